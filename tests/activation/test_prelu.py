"""The rectifier with a learned slope: values, derivatives, bad input."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from tests.texts import Refused, assert_refused

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(2, 3, 5)).astype(np.float32)
X[0, 0, :4] = 0.0, -0.0, np.inf, np.nan
SLOPE = np.array([0.25, -0.3, 1.7], np.float32)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_value_is_the_definition_s(dtype: Any):
    x, slope = X.astype(dtype), SLOPE.astype(dtype)
    run = jax.jit(lambda x, a: (dnn.prelu(x, a, axis=1), dnn.prelu(x, a[0]), dnn.prelu(jnp.swapaxes(x, 1, 2), a)))
    along, shared, last = (np.asarray(y) for y in run(x, slope))
    assert along.dtype == dtype
    along, shared, last = (y.astype(np.float32) for y in (along, shared, last))
    np.testing.assert_array_equal(along, reference.prelu(x, slope, axis=1).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(along[0, 0, :2]), [False, True])
    np.testing.assert_array_equal(shared, reference.prelu(x, slope[0]).astype(np.float32))
    np.testing.assert_array_equal(last, np.swapaxes(along, 1, 2))
    wide, a = x.astype(np.float64), slope.astype(np.float64)[:, None]
    by_hand = np.where(wide > 0, wide, (wide * a).astype(dtype).astype(np.float64))
    np.testing.assert_array_equal(along, by_hand)


@pytest.mark.parametrize("level", ["fast", "portable"])
def test_derivatives(level: str):
    """At 0 that of the side below; what is infinite above 0 has no share in the gradient of the slope."""
    x = np.where(np.isnan(X), -1, X).astype(np.float32)
    f = lambda x, a: dnn.prelu(x, a, axis=1, determinism=level)
    dy = RANDOM.normal(size=x.shape).astype(np.float32)
    dx, da = jax.jit(lambda x, a: jax.vjp(f, x, a)[1](dy))(x, SLOPE)
    np.testing.assert_array_equal(dx, dy * np.where(x > 0, np.float32(1), SLOPE[:, None]))
    below = np.minimum(x, 0).astype(np.float64) * dy
    np.testing.assert_allclose(da, below.sum((0, 2)), rtol=1e-5)
    mixed = jax.jit(lambda x, a: jax.jvp(lambda a: jax.vjp(f, x, a)[1](dy)[0], (a,), (jnp.ones_like(a),))[1])(x, SLOPE)
    np.testing.assert_array_equal(mixed, np.where(x > 0, 0, dy))


BAD: list[Refused] = [
    (lambda: dnn.prelu(np.ones(3, np.int32), SLOPE), TypeError, "`x` must have one of the dtypes"),
    (lambda: dnn.prelu(X, SLOPE.astype(np.float16), axis=1), TypeError, "`slope` must have the dtype float32, got"),
    (lambda: dnn.prelu(X, SLOPE), ValueError, "`slope` must have shape (5,), one for each element along `axis` -1 of"),
    (lambda: dnn.prelu(X, X, axis=1), ValueError, "`slope` must have shape (3,)"),
    (lambda: dnn.prelu(X, SLOPE, axis=3), ValueError, "`axis` must be made of axes from -3 to 2 of `x`, got"),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_input(index: int):
    assert_refused(*BAD[index])
