"""What pooling promises at each determinism level, and what it says to arguments that do not fit."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.pool.arguments import first_empty_window
from tests.pool.cases import MODES, bits, drawn


def test_batch_invariance():
    x, dy, options = drawn("3x3 step 2", ml_dtypes.bfloat16)
    x, dy = np.concatenate([x] * 5), np.concatenate([dy] * 5)
    for mode in MODES:
        f = jax.jit(
            lambda x, dy, mode=mode: (dnn.pool(x, mode=mode, **options), dnn.pool_dgrad(dy, x, mode=mode, **options))
        )
        for many, one in zip(f(x, dy), f(x[1:2], dy[1:2]), strict=True):
            np.testing.assert_array_equal(bits(many)[1:2], bits(one))


def test_levels():
    x = jnp.ones((1, 4, 4, 1))
    assert dnn.explain(ft.partial(dnn.pool, determinism="portable"), x)[0].engine == "xla"
    with pytest.raises(NotImplementedError, match=r"`determinism` 'portable' cannot be guaranteed for mode 'lp'"):
        dnn.pool(x, mode="lp", determinism="portable")
    with pytest.raises(NotImplementedError, match=r"for a blend of two scaled terms, expected 'mesh_invariant'"):
        dnn.pool(x, alpha=0.5, beta=1.5, prior=jnp.ones((1, 2, 2, 1)), determinism="portable")


ANY_ONE: Any = 1
ANY_TWO: Any = "2"
ANY_TAP: Any = "tap"
MESSAGES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: dnn.pool(jnp.ones((4, 4))), ValueError, r"`x` must have 4 dimensions for layout NHWC, got shape \(4, 4\)"),
    (
        lambda: dnn.pool(jnp.ones((1, 4, 4, 1), jnp.uint16)),
        TypeError,
        "`x` must have one of the dtypes float32, bfloat16, float16, float64, int8, uint8, int32, got uint16",
    ),
    (
        lambda: dnn.pool(jnp.ones((1, 4, 4, 1), jnp.uint8), mode="average"),
        TypeError,
        "`x` must have one of the dtypes float32, bfloat16, float16, float64, int8, got uint8",
    ),
    (
        lambda: dnn.pool(jnp.ones((1, 4, 4, 1), jnp.uint8), out_dtype=jnp.int8),
        TypeError,
        "`out_dtype` must have one of the dtypes .* uint8, got int8",
    ),
    (lambda: dnn.pool(jnp.ones((1, 4, 4, 1), jnp.int8), mode="lp"), TypeError, "`x` must have one of the dtypes"),
    (lambda: dnn.pool(X, mode="min"), ValueError, "`mode` must be one of 'max', 'average'"),
    (lambda: dnn.pool(X, nan="keep"), ValueError, "`nan` must be one of 'propagate', 'ignore', got 'keep'"),
    (lambda: dnn.pool(X, window=0), ValueError, "`window` must be at least 1"),
    (lambda: dnn.pool(X, window=(2, 2, 2)), ValueError, "`window` must be an integer or 2 integers"),
    (lambda: dnn.pool(X, window=5), ValueError, "`window` must fit into the padded input"),
    (lambda: dnn.pool(X, window=2, padding=2), ValueError, "`padding` must leave every window at least one element"),
    (lambda: dnn.pool(X, window=2, padding=4, dilation=7), ValueError, "window 1 of spatial axis 0 has none"),
    (
        lambda: dnn.pool(X, window=1, padding=-8),
        ValueError,
        "`padding` must leave at least one element of every spatial",
    ),
    (lambda: dnn.pool(X, ceil_mode=ANY_ONE), TypeError, "`ceil_mode` must be True or False, got 1"),
    (lambda: dnn.pool(X, mode="lp", p=0.5), ValueError, "`p` must be at least 1 and finite, got 0.5"),
    (lambda: dnn.pool(X, mode="lp", p=ANY_TWO), TypeError, "`p` must be a number known when traced, got '2'"),
    (lambda: dnn.pool(X, divisor=2), ValueError, "`divisor` must be None for mode 'max', expected mode 'average'"),
    (lambda: dnn.pool(X, mode="average", divisor=0), ValueError, r"`divisor` must be None or .* 1 to 2\^30 - 1, got 0"),
    (lambda: dnn.pool_dgrad(Y, X, mode="average", divisor=ANY_TWO), TypeError, "`divisor` must be made of integers"),
    (lambda: dnn.pool(X, return_indices="flat"), ValueError, "`return_indices` must be False, True or 'tap'"),
    (lambda: dnn.pool(X, mode="average", return_indices=True), ValueError, "`return_indices` must be False for mode"),
    (lambda: dnn.pool(X, out_dtype=jnp.int8), TypeError, "`out_dtype` must have one of the dtypes"),
    (lambda: dnn.pool(X, beta=1.0), ValueError, "`prior` must be given when `beta` is not zero"),
    (lambda: dnn.pool(X, layout="NCHWc4"), ValueError, "`x` must have 5 dimensions for layout NCHWc4"),
    (lambda: dnn.pool(X[None], layout="NCHWc4"), ValueError, "`x` must have 4 channels innermost for layout NCHWc4"),
    (lambda: dnn.pool(X, engine="fastest"), ValueError, "`engine` must be one of None"),
    (lambda: dnn.pool_dgrad(Y, (1, 4, 4)), ValueError, "`x` must have 4 dimensions"),
    (lambda: dnn.pool_dgrad(Y, 4), TypeError, "`x` must be an array or a shape, got 4"),
    (lambda: dnn.pool_dgrad(Y, (1, 4, 4, 1)), ValueError, "`x` must be the input of the pooling where its values"),
    (lambda: dnn.pool_dgrad(X, X), ValueError, r"`dy` must have shape \(1, 2, 2, 1\), as the pooling of"),
    (lambda: dnn.pool_dgrad(Y, X, indices=Y), TypeError, "`indices` must have one of the dtypes int32, uint8"),
    (lambda: dnn.pool_dgrad(Y, X, mode="average", indices=Y), ValueError, "`indices` must be None for mode 'average'"),
    (lambda: dnn.unpool(Y, X.astype(jnp.int32), (1, 4, 4, 1)), ValueError, "`indices` must have shape"),
    (lambda: dnn.global_pool(jnp.ones((1, 0, 4, 1))), ValueError, "`x` must have at least one element along every"),
    (lambda: dnn.adaptive_pool(X, output_sizes=0), ValueError, "`output_sizes` must be at least 1"),
    (lambda: dnn.adaptive_pool(X, mode="min"), ValueError, "`mode` must be one of 'average', 'max', 'lp', got 'min'"),
    (lambda: dnn.adaptive_pool(X.astype(jnp.int8), mode="lp"), TypeError, "`x` must have one of the dtypes float32"),
    (lambda: dnn.adaptive_pool(X, output_sizes=3, mode="lp", p=0.5), ValueError, "`p` must be at least 1 and finite"),
    (lambda: dnn.adaptive_pool(X, output_sizes=3, beta=1.0), ValueError, "`prior` must be given when `beta` is not"),
    (
        lambda: dnn.adaptive_pool(X, output_sizes=3, beta=0.0, prior=Y),
        ValueError,
        r"`prior` must have shape \(1, 3, 3, 1\)",
    ),
    (
        lambda: dnn.adaptive_pool(X, output_sizes=3, mode="max", return_indices=ANY_TAP),
        ValueError,
        "`return_indices` must be False or True, got 'tap'",
    ),
    (lambda: dnn.adaptive_pool(X, return_indices=True), ValueError, "`return_indices` must be False for mode 'average"),
    (lambda: dnn.global_pool(X, return_indices=True), ValueError, "`return_indices` must be False for mode 'average'"),
    (
        lambda: dnn.adaptive_pool(X, output_sizes=3, mode="lp", determinism="portable"),
        NotImplementedError,
        "`determinism` 'portable' cannot be guaranteed for mode 'lp'",
    ),
    (lambda: dnn.adaptive_pool(X, output_sizes=3, nan="keep"), ValueError, "`nan` must be one of"),
    *[
        (ft.partial(call, **wrong), kind, message)
        for call in (
            lambda **options: dnn.pool(X, **options),
            lambda **options: dnn.pool_dgrad(Y, X, **options),
            lambda **options: dnn.global_pool(X, **options),
            lambda **options: dnn.adaptive_pool(X, output_sizes=3, **options),
        )
        for wrong, kind, message in (
            ({"mode": np.ones(3)}, ValueError, "`mode` must be one of .*, got an array of float64"),
            ({"engine": np.ones(3)}, ValueError, "`engine` must be one of .*, got an array of float64"),
            ({"mode": "max", "p": "no"}, TypeError, "`p` must be a number known when traced, got 'no'"),
            ({"mode": "average", "p": 0.5}, ValueError, "`p` must be at least 1 and finite, got 0.5"),
            ({"alpha": True}, TypeError, "`alpha` must have one of the dtypes .*, got bool"),
            ({"beta": False}, TypeError, "`beta` must have one of the dtypes .*, got bool"),
        )
    ],
]
X, Y = jnp.ones((1, 4, 4, 1)), jnp.ones((1, 2, 2, 1))


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_messages(number: int):
    call, kind, message = MESSAGES[number]
    with pytest.raises(kind, match=message):
        call()


def test_the_first_empty_window_is_found_as_by_looking_at_all():
    rng = np.random.default_rng(0)
    empty = 0
    for _ in range(3000):
        size, taps, stride, dilation, low = (int(rng.integers(least, 9)) for least in (1, 1, 1, 1, 0))
        outputs = int(rng.integers(1, 12))
        at = np.arange(outputs)[:, None] * stride + np.arange(taps) * dilation - low
        without = np.flatnonzero(~((at >= 0) & (at < size)).any(1))
        wanted = int(without[0]) if without.size else None
        assert first_empty_window(size, outputs, taps, stride, dilation, low) == wanted
        empty += wanted is not None
    assert 300 < empty < 2700


def test_a_long_axis_takes_no_time_to_trace():
    """Nothing is made of as many elements as x has, but where counts or taps are read from an array."""
    x = jax.ShapeDtypeStruct((1, 2**30 - 1, 2, 1), jnp.float32)
    for options in ({"window": 2}, {"window": 3, "stride": 1, "padding": 1}):
        lowered = jax.jit(ft.partial(dnn.pool, **options)).trace(x).lower(lowering_platforms=("cuda",))
        assert len(lowered.as_text()) < 100_000
