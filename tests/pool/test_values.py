"""Pooling against its definition: values, bits, indices, gradients, exceptional values, integers and blends."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases.drawn import laid_out
from tests.pool.cases import (
    DTYPES,
    FEW,
    LAYOUTS,
    MODES,
    WINDOWS,
    assert_bits,
    data,
    drawn,
    each_mode,
    each_window,
)

# ---- the definition's bits -------------------------------------------------------------------------------------------


# Every window in one type, a few of them in all.
each_kind = pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in WINDOWS for dtype in DTYPES if dtype == "bfloat16" or name in FEW],
)


@each_kind
def test_bits_of_maximum(name: str, dtype: str):
    x, _, options = drawn(name, DTYPES[dtype])
    y, indices = dnn.pool(x, **options, return_indices=True)
    expected, positions = reference.pool(x, **options, return_indices=True, arithmetic="ordered")
    assert_bits(dnn.pool(x, **options), expected)
    assert_bits(y, expected)
    assert_bits(indices, positions)
    assert_bits(dnn.pool(x, **options, return_indices="tap")[1], reference.pool(x, **options, return_indices="tap")[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("window", [2, 3, 12], ids=["disjoint", "of slices", "by a loop"])
def test_the_gradient_of_a_maximum_is_summed_from_plus_zero(window: int, dtype: str):
    """So that it is never -0, though every window hands one back; whether another one did not makes no difference."""
    options: dict[str, Any] = {"window": window, "stride": 2 if window == 2 else 1}
    x = np.random.default_rng(1).integers(-2, 3, (2, 13, 14, 3)).astype(DTYPES[dtype])
    y = reference.pool(x, **options)
    for share in (0.6, 1.0):
        dy = np.where(np.random.default_rng(2).random(y.shape) < share, -0.0, y.astype(float)).astype(x.dtype)
        dx = np.asarray(jax.jit(ft.partial(dnn.pool_dgrad, **options))(dy, x))
        assert_bits(dx, reference.pool_dgrad(dy, x, **options, arithmetic="ordered"))
        assert not np.signbit(dx[dx == 0]).any()


@each_kind
@pytest.mark.parametrize("mode", ["average", "average_exclude_padding"])
def test_bits_of_average(name: str, mode: str, dtype: str):
    x, _, options = drawn(name, DTYPES[dtype])
    ours = jax.jit(ft.partial(dnn.pool, mode=mode, determinism="portable", **options))(x)
    assert_bits(ours, reference.pool(x, mode=mode, **options, arithmetic="ordered"))


@each_kind
@pytest.mark.parametrize("mode", MODES[:3])
def test_bits_of_gradient(name: str, mode: str, dtype: str):
    x, dy, options = drawn(name, DTYPES[dtype])
    expected = reference.pool_dgrad(dy, x, mode=mode, **options, arithmetic="ordered")
    gradient = jax.jit(ft.partial(dnn.pool_dgrad, mode=mode, determinism="portable", **options))
    assert_bits(gradient(dy, x), expected)
    assert_bits(jax.vjp(ft.partial(dnn.pool, mode=mode, **options), jnp.asarray(x))[1](jnp.asarray(dy))[0], expected)


@each_window
def test_gradient_from_indices_or_a_shape(name: str):
    x, dy, options = drawn(name)
    expected = dnn.pool_dgrad(dy, x, **options)
    for kind in (True, "tap"):
        _, indices = dnn.pool(x, **options, return_indices=kind)
        assert_bits(dnn.pool_dgrad(dy, x.shape, **options, indices=indices), np.asarray(expected))
    average = dnn.pool_dgrad(dy, x, mode="average", **options)
    assert_bits(dnn.pool_dgrad(dy, x.shape, mode="average", **options), np.asarray(average))


@each_window
@each_mode
def test_golden(name: str, mode: str):
    """Against float64: sums of n numbers in a tree err by log2(n) roundings, products and powers by a few."""
    x, dy, options = drawn(name)
    options = {**options, "mode": mode}
    taps = np.prod(np.broadcast_to(options.get("window", 2), len(WINDOWS[name][0])))
    u = 2.0**-24 * (np.log2(taps) + 8)
    golden = reference.pool(x, **options)
    # Every output is bounded by the largest input times the number of taps' root, or less.
    np.testing.assert_allclose(dnn.pool(x, **options), golden, rtol=0, atol=u * np.abs(x).max() * np.sqrt(taps))
    golden = reference.pool_dgrad(dy, x, **options)
    scale = np.abs(dy).max() * (taps if mode in ("max", "lp") else 1)
    np.testing.assert_allclose(dnn.pool_dgrad(dy, x, **options), golden, rtol=0, atol=2 * u * scale)


@pytest.mark.parametrize(("rank", "name"), [(1, "line"), (2, "3x3 step 2"), (3, "volume")])
@each_mode
def test_layouts(rank: int, name: str, mode: str):
    for layout in LAYOUTS[rank]:
        x, dy, options = drawn(name, layout=layout, c=8)
        plain = {**options, "layout": LAYOUTS[rank][0], "mode": mode}
        axes, _, lanes = layout.partition("c")

        def canonical(a: Any, axes: str = axes, lanes: str = lanes) -> Any:
            if lanes:
                a = jnp.moveaxis(a, -1, 2).reshape(a.shape[0], -1, *a.shape[2:-1])
            return jnp.transpose(a, [axes.index(letter) for letter in LAYOUTS[rank][0]])

        ours = canonical(dnn.pool(x, mode=mode, **options))
        np.testing.assert_array_equal(ours, dnn.pool(canonical(x), **plain))
        ours = canonical(dnn.pool_dgrad(dy, x, mode=mode, **options))
        np.testing.assert_array_equal(ours, dnn.pool_dgrad(canonical(dy), canonical(x), **plain))


@each_window
def test_maximum_of_xla(name: str):
    """An independent formula: XLA's own windows, and its select-and-scatter where it has one."""
    x, dy, options = drawn(name)
    if options.get("ceil_mode") or options.get("padding") == "SAME":
        pytest.skip("XLA's windows have no ceil mode, and its SAME is the same only in numbers")
    rank = x.ndim - 2
    per_axis = lambda v: (v,) * rank if isinstance(v, int) else tuple(v)
    window = per_axis(options.get("window", 2))
    stride = per_axis(options.get("stride", window))
    pads = tuple((v, v) if isinstance(v, int) else v for v in per_axis(options.get("padding", 0)))
    dilation = (1, *per_axis(options.get("dilation", 1)), 1)
    spread = lambda v: (1, *v, 1)

    def theirs(x: jax.Array) -> jax.Array:
        all_pads = ((0, 0), *pads, (0, 0))
        return lax.reduce_window(
            x, -np.inf, lax.max, spread(window), spread(stride), all_pads, window_dilation=dilation
        )

    np.testing.assert_array_equal(dnn.pool(x, **options), theirs(jnp.asarray(x)))
    if max(dilation) == 1:
        unique = np.random.default_rng(0).permutation(x.size).astype(np.float32).reshape(x.shape)
        whole = np.rint(dy)
        expected = jax.vjp(theirs, jnp.asarray(unique))[1](jnp.asarray(whole))[0]
        np.testing.assert_array_equal(dnn.pool_dgrad(whole, unique, **options), expected)


@pytest.mark.usefixtures("x64")
@each_mode
def test_float64(mode: str):
    x, dy, options = drawn("ceil", np.float64)
    options = {**options, "mode": mode}
    assert dnn.pool(x, **options).dtype == np.float64
    np.testing.assert_allclose(dnn.pool(x, **options), reference.pool(x, **options), rtol=1e-14, atol=1e-15)
    ours, golden = dnn.pool_dgrad(dy, x, **options), reference.pool_dgrad(dy, x, **options)
    np.testing.assert_allclose(ours, golden, rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("x64")
@each_mode
@pytest.mark.parametrize("p", [1, 2, 3.5])
def test_gradient_against_finite_differences(mode: str, p: float):
    """Of the definition, where no two numbers are equal."""
    if mode != "lp" and p != 2:
        pytest.skip("p is for lp")
    sizes, options = WINDOWS["ceil"]
    rng = np.random.default_rng(5)
    x = rng.permutation(2 * np.prod(sizes)).reshape(1, *sizes, 2) / 16 - 4.03125
    options = {**options, "mode": mode, "p": p}
    dy = rng.normal(size=reference.pool(x, **options).shape)
    gradient, step = dnn.pool_dgrad(dy, x, **options), 2.0**-10
    for at in rng.integers(0, x.size, 12):
        moved = [x.copy() for _ in range(2)]
        for sign, v in zip((1, -1), moved, strict=True):
            v.flat[at] += sign * step
        high, low = (np.sum(dy * reference.pool(v, **options)) for v in moved)
        np.testing.assert_allclose(np.asarray(gradient).flat[at], (high - low) / (2 * step), rtol=1e-5, atol=1e-5)


# ---- exceptional values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nan", ["propagate", "ignore"])
@each_window
def test_nan_and_infinities(name: str, nan: str):
    x, _, options = drawn(name)
    rng = np.random.default_rng(3)
    x = np.where(rng.random(x.shape) < 0.15, np.nan, x)
    x = np.where(rng.random(x.shape) < 0.3, -np.inf, x).astype(np.float32)
    x[0] = np.where(rng.random(x[0].shape) < 0.5, np.nan, -np.inf)
    y, tap = dnn.pool(x, **options, nan=nan, return_indices="tap")
    expected = reference.pool(x, **options, nan=nan, return_indices="tap", arithmetic="ordered")
    np.testing.assert_array_equal(y, expected[0])
    np.testing.assert_array_equal(tap, expected[1])
    np.testing.assert_array_equal(dnn.pool(x, **options, nan=nan), expected[0])


def test_padding_never_wins_and_ties_go_to_the_first():
    x = np.full((1, 3, 3, 1), -np.inf, np.float32)
    y, indices = dnn.pool(x, window=2, stride=1, padding=1, return_indices=True)
    assert np.all(np.asarray(y) == -np.inf)
    np.testing.assert_array_equal(
        np.asarray(indices)[0, :, :, 0].ravel(), [0, 0, 1, 2, 0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8]
    )
    zeros = np.asarray([-0.0, 0.0, 0.0, -0.0], np.float32).reshape(1, 4, 1)
    assert np.signbit(dnn.pool(zeros, window=2, layout="NWC")).ravel().tolist() == [True, False]


def test_nan_spreads_no_further_than_its_windows():
    x = np.ones((1, 6, 6, 1), np.float32)
    x[0, 2, 2] = np.nan
    for mode in MODES:
        y = np.isnan(dnn.pool(x, window=3, stride=1, padding=1, mode=mode))[0, :, :, 0]
        expected = np.zeros((6, 6), bool)
        expected[1:4, 1:4] = True
        np.testing.assert_array_equal(y, expected)


def test_lp_of_zeros_has_a_derivative():
    x = jnp.zeros((1, 4, 1)).at[0, 3].set(3.0)
    for p in (1, 2, 2.5):
        f = jax.jit(ft.partial(dnn.pool, window=2, mode="lp", p=p, layout="NWC"))
        np.testing.assert_allclose(jax.jit(jax.grad(lambda x, f=f: f(x).sum()))(x).ravel(), [0, 0, 0, 1], rtol=1e-6)
        np.testing.assert_allclose(f(x).ravel(), [0, 3], rtol=1e-6)


def test_average_of_each_count():
    x = np.ones((1, 5, 1), np.float32)
    options = {"window": 3, "stride": 2, "padding": ((1, 0),), "layout": "NWC", "ceil_mode": True}
    # Windows at -1, 1 and 3, the last of which reaches one element beyond x, which no padding covers.
    np.testing.assert_allclose(dnn.pool(x, mode="average", **options).ravel(), [2 / 3, 1, 1])
    np.testing.assert_allclose(dnn.pool(x, mode="average_exclude_padding", **options).ravel(), [1, 1, 1])


# ---- integers --------------------------------------------------------------------------------------------------------


@each_window
@pytest.mark.parametrize("mode", MODES[:3])
def test_int8(name: str, mode: str):
    sizes, options = WINDOWS[name]
    layout = LAYOUTS[len(sizes)][0]
    x = np.random.default_rng(1).integers(-128, 128, laid_out(layout, 2, 3, sizes)).astype(np.int8)
    options = {**options, "layout": layout, "mode": mode}
    assert_bits(dnn.pool(x, **options), reference.pool(x, **options, arithmetic="ordered"))
    exact = reference.pool(x, **options)
    np.testing.assert_array_equal(dnn.pool(x, **options), np.clip(np.rint(exact), -128, 127))
    wide = dnn.pool(x, **options, out_dtype=np.float32, alpha=0.5)
    np.testing.assert_allclose(wide, 0.5 * exact, rtol=2**-22)


# ---- the blend -------------------------------------------------------------------------------------------------------


@each_mode
def test_blend(mode: str):
    x, dy, options = drawn("3x3 step 2", ml_dtypes.bfloat16)
    options = {**options, "mode": mode}
    prior = data(dy.shape, np.float32, 7)
    blend = {"alpha": -1.5, "beta": 0.5, "prior": prior, "out_dtype": np.float32}
    np.testing.assert_allclose(
        dnn.pool(x, **options, **blend), reference.pool(x, **options, **blend), rtol=1e-6, atol=1e-6
    )
    blend = {"alpha": 2.0, "beta": -0.25, "prior": data(x.shape, np.float32, 8), "out_dtype": np.float32}
    ours = dnn.pool_dgrad(dy, x, **options, **blend)
    np.testing.assert_allclose(ours, reference.pool_dgrad(dy, x, **options, **blend), rtol=1e-5, atol=1e-5)
    unread = np.full(dy.shape, np.nan, ml_dtypes.bfloat16)
    assert_bits(dnn.pool(x, **options, beta=0.0, prior=unread), np.asarray(dnn.pool(x, **options)))
    traced = jax.jit(lambda a, b: dnn.pool(x, **options, alpha=a, beta=b, prior=unread))(1.0, 0.0)
    np.testing.assert_array_equal(traced, dnn.pool(x, **options))


def test_a_single_window_adds_what_stands_for_its_neighbours():
    """dx of -0 is +0 where an element could lie in several windows, also if there is one."""
    dy = np.full((1, 1, 1), -0.0, np.float32)
    options = {"window": 8, "stride": 2, "mode": "average", "layout": "NWC"}
    found = np.asarray(dnn.pool_dgrad(dy, (1, 8, 1), **options))
    wanted = reference.pool_dgrad(dy, (1, 8, 1), arithmetic="ordered", **options)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))
    assert not np.signbit(found).any()


@pytest.mark.parametrize("level", [None, "portable"])
def test_the_sum_over_a_whole_axis_says_what_fixes_its_order(level: str | None):
    """At no level it is XLA's sum, which is not the definition's on every device."""
    x = np.zeros((1, 7, 6, 2), np.float32)
    (found,) = dnn.explain(dnn.global_pool, x, mode="average", determinism=level)
    (xla,) = [candidate for candidate in found.candidates if candidate.engine == "xla"]
    assert xla.level == (level or "run_to_run")
