"""The fence between a product and a sum: bits against NumPy, which rounds every product."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdnn._rounded import product, rounded

pytestmark = pytest.mark.usefixtures("x64")
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
Form = Callable[[Callable[..., Any], Any, Any, Any], Any]
FORMS: dict[str, Form] = {
    "sum": lambda fence, a, b, c: fence(a * b) + c,
    "difference": lambda fence, a, b, c: c - fence(a * b),
    "two products": lambda fence, a, b, c: fence(a * b) + fence(b * c),
    "square": lambda fence, a, b, c: fence(a * a) + c,
    "constant": lambda fence, a, b, c: fence(a * a.dtype.type(1 / 3)) + c,
}


def drawn(dtype: Any, shape: tuple[int, ...] = (37, 65)) -> list[np.ndarray]:
    """Normal numbers; in float16 some products are subnormal."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=shape).astype(dtype) for _ in range(3))
    return [a * np.asarray(2.0**-12, dtype) if dtype == np.float16 else a, b, c]


def same_bits(found: Any, expected: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    words = np.dtype(f"u{expected.itemsize}")
    np.testing.assert_array_equal(np.asarray(found).view(words), expected.view(words))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_rounded_before_they_are_added(dtype: Any, form: str):
    operands = drawn(dtype)
    found = jax.jit(lambda *v: FORMS[form](rounded, *v))(*map(jnp.asarray, operands))
    same_bits(found, FORMS[form](lambda v: v, *operands))


@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.int32])
def test_numbers_pass_unchanged(dtype: Any):
    if np.issubdtype(dtype, np.integer) or np.dtype(dtype).itemsize == 1:
        values = np.arange(256).astype(np.uint8).view(np.int8).astype(np.int32)
        values = values.astype(dtype) if np.issubdtype(dtype, np.integer) else values.astype(np.int8).view(dtype)
    else:
        values = np.asarray([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, float(ml_dtypes.finfo(dtype).max)], dtype)
    numbers = values == values
    found = np.asarray(jax.jit(rounded)(values.reshape(2, -1))).reshape(-1)
    same_bits(found[numbers], values[numbers])
    assert np.all(found[~numbers] != found[~numbers])


@pytest.mark.parametrize("dtype", DTYPES)
def test_constants_in_another_order_of_dimensions(dtype: Any):
    """XLA's evaluator reads the bits of such a constant in the wrong order."""
    x, rows = drawn(dtype, (3, 4, 5))[1], np.asarray([2, 0, 1, 3])
    same_bits(jax.jit(lambda: rounded(jnp.asarray(x)[:, rows]))(), x[:, rows])


def test_derivatives_and_vmap():
    a, b, c = map(jnp.asarray, drawn(np.float64, (3, 5)))
    value, gradients = jax.value_and_grad(lambda a, b: jnp.vdot(c, product(a, b)), (0, 1))(a, b)
    np.testing.assert_allclose(value, jnp.vdot(c, a * b))
    np.testing.assert_array_equal(gradients[0], c * b)
    np.testing.assert_array_equal(gradients[1], c * a)
    np.testing.assert_array_equal(jax.jvp(rounded, (a,), (b,))[1], b)
    np.testing.assert_array_equal(jax.vmap(product, 1)(a, b), (a * b).T)
