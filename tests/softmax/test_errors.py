"""What softmax promises at each determinism level, and what it says to arguments that do not fit."""

import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.softmax import bounds
from tests.softmax.cases import DTYPES, RULE, assert_right, data, each_algorithm, each_dtype, wide
from tests.texts import Refused, assert_refused

# ---- levels ----------------------------------------------------------------------------------------------------------


@each_algorithm
@each_dtype
@pytest.mark.parametrize("length", [1, 7, 33, 1000])
def test_ordered_does_not_depend_on_the_batch(algorithm: str, dtype: str, length: int):
    x, dy = data((40, length), DTYPES[dtype]), data((40, length), DTYPES[dtype], seed=1)

    @jax.jit
    def run(x: Any, dy: Any) -> Any:
        y = dnn.softmax(x, algorithm=algorithm, determinism="batch_invariant")
        back = dnn.softmax_dgrad(dy, y, algorithm=algorithm, determinism="batch_invariant")
        return y, back, dnn.logsumexp(x, determinism="batch_invariant")

    whole = run(x, dy)
    for size in (1, 3, 8, 33):
        for place in {0, size - 1}:
            part = run(x[7 - place + np.arange(size)], dy[7 - place + np.arange(size)])
            for a, b in zip(part, whole, strict=True):
                np.testing.assert_array_equal(np.asarray(a)[place], np.asarray(b)[7])


def test_first_derivatives_obey_the_level_too():
    x, v = data((17, 65)), data((17, 65), seed=1)

    def both(x: Any, v: Any) -> Any:
        with dnn.determinism("batch_invariant"):
            _, tangent = jax.jvp(dnn.softmax, (x,), (v,))
            along = jax.jvp(dnn.logsumexp, (x,), (v,))
            return tangent, along, jax.vjp(dnn.softmax, x)[1](v), jax.vjp(dnn.logsumexp, x)[1](along[0])

    whole = jax.jit(both)(x, v)
    for size in (1, 2, 7):
        part = jax.jit(both)(x[:size], v[:size])
        for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(a, b[:size])


def test_levels_choose_engines():
    x = jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16)
    (told,) = dnn.explain(dnn.softmax, x, platform="cpu")
    assert told.engine == "xla"
    (told,) = dnn.explain(ft.partial(dnn.softmax, determinism="mesh_invariant"), x, platform="cpu")
    assert told.engine == "ordered"
    with pytest.raises(NotImplementedError, match="level 'portable'"):
        dnn.softmax(np.zeros((2, 3), np.float32), determinism="portable")


# ---- bad input -------------------------------------------------------------------------------------------------------

X = np.ones((2, 3, 4, 5), np.float32)
softmax: Any = dnn.softmax
softmax_dgrad: Any = dnn.softmax_dgrad
logsumexp: Any = dnn.logsumexp
BAD: list[Refused] = [
    (lambda: softmax("x"), TypeError, "`x` must be an array"),
    (lambda: softmax(X.astype(np.int32)), TypeError, "`x` must have one of the dtypes float32, bfloat16"),
    (lambda: softmax(X, algorithm="exact"), ValueError, "`algorithm` must be one of 'accurate', 'fast', 'log'"),
    (lambda: softmax(X, mode="batch"), ValueError, "`mode` must be one of None, 'channel', 'instance'"),
    (lambda: softmax(X, mode="channel", layout="HWC"), ValueError, "`layout` must be one of NWC"),
    (lambda: softmax(X, layout="foo"), ValueError, "`layout` must be one of NWC"),
    (lambda: softmax(X, mode="channel", layout="NWC"), ValueError, "`x` must have 3 dimensions for layout NWC"),
    (
        lambda: softmax(X[..., None], mode="channel", layout="NCHWc8"),
        ValueError,
        "`x` must have 8 channels innermost for layout NCHWc8",
    ),
    (lambda: softmax(X, axis=4), ValueError, "`axis` must be made of axes from -4 to 3 of `x`, got 4"),
    (lambda: softmax(X, axis=()), ValueError, "`axis` must be made of axes"),
    (lambda: softmax(X, axis=(1, -3)), ValueError, "`axis` must name every axis once"),
    (lambda: softmax(X, axis=1.0), TypeError, "`axis` must be made of integers"),
    (lambda: softmax(np.float32(1)), ValueError, "`x` must have at least one axis, got a scalar."),
    (lambda: logsumexp(1.0, axis=0), ValueError, "`x` must have at least one axis, got a scalar."),
    (lambda: softmax_dgrad(1.0, 1.0), ValueError, "`dy` must have at least one axis, got a scalar."),
    (lambda: softmax(X, where=X), TypeError, "`where` must have the dtype bool"),
    (lambda: softmax(X, where=X[:, :1, 0] > 0), ValueError, "`where` must broadcast to the shape"),
    (lambda: softmax(X, where=np.ones((7, 1, 1, 1, 1), bool)), ValueError, "`where` must broadcast"),
    (lambda: softmax(X, beta=1.0), ValueError, "`prior` must be given when `beta` is not zero"),
    (lambda: softmax(X, beta=1.0, prior=X[0]), ValueError, "`prior` must have shape"),
    (lambda: softmax(X, alpha=True), TypeError, "`alpha` must have one of the dtypes"),
    (lambda: softmax(X, out_dtype=jnp.int8), TypeError, "`out_dtype` must have one of the dtypes"),
    (lambda: softmax(X, out_dtype=np.float64), TypeError, "`out_dtype` must not be wider than the accumulator"),
    (lambda: softmax(X, engine="cudnn"), ValueError, "`engine` must be one of None"),
    (lambda: softmax(X, determinism="exact"), ValueError, "`determinism` must be one of"),
    (lambda: softmax_dgrad(X, X[0]), ValueError, "`y` must have shape"),
    (lambda: softmax_dgrad(X, X > 0), TypeError, "`y` must have one of the dtypes"),
    (lambda: softmax_dgrad(X, X, axis=9), ValueError, "`axis` must be made of axes from -4 to 3 of `dy`, got 9"),
    (lambda: logsumexp(X, keepdims=1), TypeError, "`keepdims` must be True or False, got 1"),
    (lambda: logsumexp(X, where=X), TypeError, "`where` must have the dtype bool"),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_input(index: int):
    assert_refused(*BAD[index])


def test_rows_longer_than_memory_would_allow_a_square_of():
    x = data((2, 70001))
    error = bounds.softmax(wide(x), "accurate", (1,), RULE)
    assert_right(dnn.softmax(x, engine="ordered"), reference.softmax(x, out_dtype=np.float64), error, np.float32)
    assert math.isclose(float(jnp.sum(dnn.softmax(x, engine="ordered")[0])), 1, rel_tol=1e-5)
