"""Pooling against its definition: values, bits, indices, gradients, transformations, meshes and messages."""

import functools as ft
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
import jaxdnn_reference as reference

MODES = ("max", "average", "average_exclude_padding", "lp")
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Spatial sizes, and the window over them.
WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((6, 4), {}),
    "ragged": ((7, 9), {"window": 2}),
    "resnet": ((8, 11), {"window": 3, "stride": 2, "padding": 1}),
    "dense": ((6, 5), {"window": (3, 2), "stride": 1, "padding": ((1, 1), (0, 1))}),
    "dilated": ((11, 10), {"window": (2, 3), "stride": (1, 2), "dilation": (3, 2), "padding": (1, 2)}),
    "dilated by its stride": ((12, 9), {"window": 3, "stride": 2, "dilation": 2, "padding": 2}),
    "steps over elements": ((13, 10), {"window": (2, 1), "stride": (3, 4)}),
    "same": ((7, 8), {"window": (4, 3), "stride": (3, 2), "padding": "SAME"}),
    "ceil": ((7, 10), {"window": (3, 4), "stride": (2, 3), "padding": (1, 2), "ceil_mode": True}),
    "ceil, last window dropped": ((5, 8), {"window": 2, "stride": 3, "padding": ((1, 0), (1, 1)), "ceil_mode": True}),
    "line": ((13,), {"window": 5, "stride": 2, "padding": ((2, 1),)}),
    "volume": ((5, 4, 6), {"window": (3, 2, 1), "stride": (2, 1, 3), "padding": (1, 1, 0)}),
    "long": ((19, 4), {"window": (11, 2), "stride": (2, 1), "padding": (4, 0)}),
    "long and dilated": ((31,), {"window": 9, "stride": 1, "dilation": 3, "padding": 4}),
    "large": ((18, 17), {"window": (13, 12), "stride": (2, 3), "padding": (5, 4)}),
    "large, disjoint": ((29, 20), {"window": (14, 10), "stride": (15, 10)}),
    "whole": ((11, 13), {"window": (11, 13)}),
}
LAYOUTS = {1: ("NWC", "NCW", "CWN", "NCWc4"), 2: ("NHWC", "NCHW", "CHWN", "NCHWc4"), 3: ("NDHWC", "NCDHW", "CDHWN")}
FEW = ("resnet", "ceil", "long")
each_window = pytest.mark.parametrize("name", WINDOWS)
each_mode = pytest.mark.parametrize("mode", MODES)


def shape_of(layout: str, n: int, sizes: tuple[int, ...], c: int) -> tuple[int, ...]:
    axes, _, lanes = layout.partition("c")
    letters = {"N": n, "C": c // int(lanes or 1), **dict(zip("DHW"[3 - len(sizes) :], sizes, strict=True))}
    return (*(letters[a] for a in axes), *([int(lanes)] if lanes else []))


def data(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Signed numbers with ties and zeros of both signs."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape)
    values = np.where(rng.random(shape) < 0.4, rng.integers(-2, 3, shape), values)
    return np.where(rng.random(shape) < 0.1, -0.0, values).astype(dtype)


def drawn(name: str, dtype: Any = np.float32, layout: str | None = None, c: int = 3, seed: int = 0) -> Any:
    """x, dy and the options of a window."""
    sizes, options = WINDOWS[name]
    layout = layout or LAYOUTS[len(sizes)][0]
    options = {**options, "layout": layout}
    x = data(shape_of(layout, 2, sizes, c), dtype, seed)
    y = jax.eval_shape(ft.partial(dnn.pool, **options), x)
    return x, data(y.shape, dtype, seed + 1), options


def bits(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def assert_bits(ours: Any, definition: np.ndarray) -> None:
    assert (ours.dtype, ours.shape) == (definition.dtype, definition.shape)
    np.testing.assert_array_equal(bits(ours), bits(definition))


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


@pytest.mark.parametrize(("rank", "name"), [(1, "line"), (2, "resnet"), (3, "volume")])
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
        f = ft.partial(dnn.pool, window=2, mode="lp", p=p, layout="NWC")
        np.testing.assert_allclose(jax.grad(lambda x, f=f: f(x).sum())(x).ravel(), [0, 0, 0, 1], rtol=1e-6)
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
    x = np.random.default_rng(1).integers(-128, 128, shape_of(layout, 2, sizes, 3)).astype(np.int8)
    options = {**options, "layout": layout, "mode": mode}
    assert_bits(dnn.pool(x, **options), reference.pool(x, **options, arithmetic="ordered"))
    exact = reference.pool(x, **options)
    np.testing.assert_array_equal(dnn.pool(x, **options), np.clip(np.rint(exact), -128, 127))
    wide = dnn.pool(x, **options, out_dtype=np.float32, alpha=0.5)
    np.testing.assert_allclose(wide, 0.5 * exact, rtol=2**-22)


# ---- the blend -------------------------------------------------------------------------------------------------------


@each_mode
def test_blend(mode: str):
    x, dy, options = drawn("resnet", ml_dtypes.bfloat16)
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
    assert_bits(dnn.pool(x, **options, prior=unread), np.asarray(dnn.pool(x, **options)))
    traced = jax.jit(lambda a, b: dnn.pool(x, **options, alpha=a, beta=b, prior=unread))(1.0, 0.0)
    np.testing.assert_array_equal(traced, dnn.pool(x, **options))


# ---- unpooling, given sizes ------------------------------------------------------------------------------------------


@each_window
def test_unpool(name: str):
    x, dy, options = drawn(name)
    options.pop("mode", None)
    for kind in (True, "tap"):
        _, indices = dnn.pool(x, **options, return_indices=kind)
        _, flat = reference.pool(x, **options, return_indices=True)
        expected = reference.unpool(dy, flat, x.shape, **options)
        np.testing.assert_array_equal(dnn.unpool(dy, indices, x.shape, **options), expected)
    placed = reference.unpool(np.ones(dy.shape, np.float32), flat, x.shape, **options)
    kept = jax.grad(lambda y: dnn.unpool(y, indices, x, **options).sum())(jnp.asarray(dy))
    assert float(kept.sum()) == np.sum(placed)  # what another window has replaced has no derivative


def test_unpool_places_nothing_outside_a_window():
    y, indices = jnp.ones((1, 2, 1)), jnp.asarray([[[3], [-1]]], jnp.int32)
    assert not dnn.unpool(y, indices, (1, 4, 1), window=2, layout="NWC").any()
    assert not dnn.pool_dgrad(y, (1, 4, 1), window=2, layout="NWC", indices=indices).any()


@each_mode
def test_global_pool(mode: str):
    x = data((2, 9, 13, 3), np.float32)
    given = "average" if mode == "average_exclude_padding" else mode
    ours = dnn.global_pool(x, mode=given)
    np.testing.assert_allclose(ours, reference.global_pool(x, mode=given), rtol=1e-6, atol=1e-7)
    axes = (1, 2)
    by_hand = {
        "max": lambda x: x.max(axes),
        "average": lambda x: x.astype(np.float64).mean(axes),
        "lp": lambda x: np.sqrt((x.astype(np.float64) ** 2).sum(axes)),
    }[given]
    np.testing.assert_allclose(np.asarray(ours)[:, 0, 0], by_hand(x), rtol=1e-6, atol=1e-7)


OUTPUTS = [1, (3, 2), (4, 6), (9, 12), (5, 7), (13, 25)]


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("mode", ["average", "max"])
def test_adaptive_pool(mode: str, outputs: Any):
    whole = np.random.default_rng(1).integers(-128, 128, (2, 9, 12, 3)).astype(np.int8)
    for x in (whole, *(data(whole.shape, dtype) for dtype in DTYPES.values())):
        ours = dnn.adaptive_pool(x, output_sizes=outputs, mode=mode)
        assert_bits(ours, reference.adaptive_pool(x, output_sizes=outputs, mode=mode, arithmetic="ordered"))
    wide = dnn.adaptive_pool(whole, output_sizes=outputs, mode=mode, out_dtype=np.float32, alpha=0.5)
    exact = reference.adaptive_pool(whole, output_sizes=outputs, mode=mode)
    np.testing.assert_allclose(wide, 0.5 * exact, rtol=2**-22)


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("mode", ["average", "max", "lp"])
def test_derivatives_of_adaptive_pool(mode: str, outputs: Any):
    x = jnp.asarray(np.random.default_rng(0).permutation(648).reshape(2, 9, 12, 3) / 8 - 40.0625, jnp.float32)
    f = ft.partial(dnn.adaptive_pool, output_sizes=outputs, mode=mode, p=3.0)
    y, linear = jax.linearize(f, x)
    dy, direction = data(y.shape, np.float32), data(x.shape, np.float32, 4)
    tangent = np.asarray(linear(jnp.asarray(direction))).astype(np.float64)
    gradient = np.asarray(jax.linear_transpose(linear, x)(jnp.asarray(dy))[0]).astype(np.float64)
    np.testing.assert_allclose(np.sum(gradient * direction), np.sum(tangent * dy), rtol=1e-4, atol=1e-3)
    definition = ft.partial(reference.adaptive_pool, output_sizes=outputs, mode=mode, p=3.0)
    moved = [definition(np.asarray(x) + s * 2.0**-9 * direction.astype(np.float64)) for s in (1, -1)]
    np.testing.assert_allclose(tangent, (moved[0] - moved[1]) * 2.0**8, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("outputs", "layout"), [*((outputs, "NHWC") for outputs in OUTPUTS[:-1]), ((4, 6), "CHWN"), ((4, 6), "NCHWc4")]
)
def test_indices_of_adaptive_pool(outputs: Any, layout: str):
    x = data(shape_of(layout, 2, (9, 12), 8), np.float32)
    x = np.where(np.random.default_rng(2).random(x.shape) < 0.05, np.nan, x).astype(np.float32)
    for nan in ("propagate", "ignore"):
        options: dict[str, Any] = {"output_sizes": outputs, "mode": "max", "layout": layout, "nan": nan}
        y, indices = jax.jit(ft.partial(dnn.adaptive_pool, return_indices=True, **options))(x)
        expected, places = reference.adaptive_pool(x, return_indices=True, arithmetic="ordered", **options)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(y, dnn.adaptive_pool(x, **options))
        assert_bits(indices, places)
    options = {"output_sizes": outputs, "mode": "max", "layout": layout}
    f = ft.partial(dnn.adaptive_pool, return_indices=True, **options)
    _, indices = f(x)
    many = jax.vmap(f)(jnp.stack([x, -x]))
    np.testing.assert_array_equal(many[1][0], indices)
    gradients = [
        jax.grad(lambda x, f=f: jnp.nansum(jax.tree.leaves(f(x))[0] ** 2))(jnp.asarray(x))
        for f in (f, ft.partial(dnn.adaptive_pool, **options))
    ]
    np.testing.assert_array_equal(*gradients)


def test_indices_of_global_pool():
    x = data((2, 9, 13, 3), np.float32)
    for kind in (True, "tap"):
        found = dnn.global_pool(x, mode="max", return_indices=kind)
        expected = reference.global_pool(x, mode="max", return_indices=kind, arithmetic="ordered")
        for ours, definition in zip(found, expected, strict=True):
            assert_bits(ours, definition)
        assert np.array_equal(np.asarray(found[1])[:, 0, 0], x.reshape(2, -1, 3).argmax(1))


@pytest.mark.parametrize("mode", ["average", "max", "lp"])
@pytest.mark.parametrize("outputs", [(3, 2), (5, 7)])
def test_blend_of_adaptive_pool(mode: str, outputs: Any):
    x = data((2, 9, 12, 3), ml_dtypes.bfloat16)
    prior = data((2, *outputs, 3), np.float32, 7)
    options: dict[str, Any] = {"output_sizes": outputs, "mode": mode}
    blend: dict[str, Any] = {"alpha": -1.5, "beta": 0.5, "prior": prior, "out_dtype": np.float32}
    ours, golden = dnn.adaptive_pool(x, **options, **blend), reference.adaptive_pool(x, **options, **blend)
    np.testing.assert_allclose(ours, golden, rtol=1e-6, atol=1e-6)
    unread = np.full(prior.shape, np.nan, ml_dtypes.bfloat16)
    traced = jax.jit(lambda a, b: dnn.adaptive_pool(x, **options, alpha=a, beta=b, prior=unread))(1.0, 0.0)
    np.testing.assert_array_equal(traced, dnn.adaptive_pool(x, **options))
    derivatives = jax.grad(
        lambda a, b: dnn.adaptive_pool(x, **options, **{**blend, "alpha": a, "beta": b}).sum(), (0, 1)
    )(-1.5, 0.5)
    sums = [np.sum(reference.adaptive_pool(x, **options)), np.sum(prior.astype(np.float64))]
    np.testing.assert_allclose(derivatives, sums, rtol=1e-5, atol=1e-4)


# ---- transformations, by an independent formula ----------------------------------------------------------------------


def theirs(mode: str, x: jax.Array) -> jax.Array:
    """The "resnet" window as a stack of its taps; the first of equal maxima by argmax."""
    pads = [(0, 0)] * (x.ndim - 3) + [(1, 1), (1, 1), (0, 0)]
    fill = -jnp.inf if mode == "max" else 0.0
    wide = jnp.pad(x, pads, constant_values=fill)
    h, w = x.shape[-3:-1]
    outputs = (h - 1) // 2 + 1, (w - 1) // 2 + 1
    taps = [
        wide[..., r : r + 2 * outputs[0] - 1 : 2, s : s + 2 * outputs[1] - 1 : 2, :]
        for r, s in itertools.product(range(3), range(3))
    ]
    stack = jnp.stack(taps)
    if mode == "max":
        return jnp.take_along_axis(stack, jnp.argmax(stack, 0)[None], 0)[0]
    if mode == "average":
        return jnp.sum(stack, 0) / 9
    total = jnp.sum(stack * stack, 0)
    return jnp.where(total > 0, jnp.sqrt(jnp.where(total > 0, total, 1.0)), 0.0)


def ours(mode: str, x: jax.Array) -> jax.Array:
    return dnn.pool(x, window=3, stride=2, padding=1, mode=mode)


TRANSFORMATIONS: dict[str, Callable[[Callable[[jax.Array], jax.Array], jax.Array, jax.Array], Any]] = {
    "jit": lambda f, x, v: jax.jit(f)(x),
    "jvp": lambda f, x, v: jax.jvp(f, (x,), (v,)),
    "grad": lambda f, x, v: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x),
    "jvp of grad": lambda f, x, v: jax.jvp(jax.grad(lambda x: jnp.sum(f(x) ** 3)), (x,), (v,))[1],
    "grad of grad": lambda f, x, v: jax.grad(lambda x: jnp.sum(v * jax.grad(lambda x: jnp.sum(f(x) ** 3))(x)))(x),
    "hessian": lambda f, x, v: jax.hessian(lambda w: jnp.sum(f(x.at[0, :2, :2, 0].set(w)) ** 3))(x[0, :2, :2, 0]),
    "vmap": lambda f, x, v: jax.vmap(f, 1, 2)(jnp.stack([x, v], 1)),
    "vmap of grad": lambda f, x, v: jax.vmap(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(jnp.stack([x, v])),
    "grad of vmap": lambda f, x, v: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x) ** 2))(jnp.stack([x, v])),
    "vmap of nothing": lambda f, x, v: jax.vmap(f)(jnp.zeros((0, *x.shape))),
    "scan": lambda f, x, v: lax.scan(lambda c, x: (c + f(x), None), 0 * f(x), jnp.stack([x, v]))[0],
    "remat": lambda f, x, v: jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x) ** 2))(x),
    "linearize": lambda f, x, v: jax.linearize(f, x)[1](v),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("mode", ["max", "average", "lp"])
def test_transformations(mode: str, transformation: str):
    x, v = (jnp.asarray(data((2, 5, 6, 3), np.float32, seed)) for seed in (0, 1))
    run = TRANSFORMATIONS[transformation]
    found, expected = (run(ft.partial(f, mode), x, v) for f in (ours, theirs))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_derivatives_of_the_backward_op():
    x, dy, options = drawn("resnet")
    for mode in ("max", "average"):
        back = ft.partial(dnn.pool_dgrad, mode=mode, **options)
        along = data(x.shape, np.float32, 9)
        # Linear in dy, and its transpose is the tangent of the pooling.
        forward = jax.jvp(ft.partial(dnn.pool, mode=mode, **options), (jnp.asarray(x),), (jnp.asarray(along),))[1]
        np.testing.assert_allclose(
            jax.vjp(lambda d, b=back: b(d, x), jnp.asarray(dy))[1](jnp.asarray(along))[0], forward
        )
        np.testing.assert_allclose(jax.jvp(lambda d, b=back: b(d, x), (dy,), (2 * dy,))[1], 2 * back(dy, x))
        many = jax.vmap(back)(jnp.stack([dy, -dy]), jnp.stack([x, 2 * x]))
        np.testing.assert_array_equal(many[1], -back(dy, 2 * x))


def test_indices_through_transformations():
    x, _, options = drawn("resnet")
    f = lambda x: dnn.pool(x, **options, return_indices=True)
    _, indices = f(x)
    many = jax.vmap(f)(jnp.stack([x, -x]))
    np.testing.assert_array_equal(many[1][0], indices)
    value = jax.grad(lambda x: jnp.sum(f(x)[0] ** 2))(jnp.asarray(x))
    np.testing.assert_array_equal(value, jax.grad(lambda x: jnp.sum(dnn.pool(x, **options) ** 2))(jnp.asarray(x)))
    assert jax.jit(f)(x)[1].dtype == jnp.int32


def test_residuals_of_max_pooling_are_one_byte_an_output():
    x = jnp.zeros((2, 8, 8, 4))
    back = jax.vjp(lambda x: dnn.pool(x, window=3, stride=2, padding=1), x)[1]
    kept = [leaf for leaf in jax.tree.leaves(back) if hasattr(leaf, "nbytes")]
    assert sum(leaf.nbytes for leaf in kept) == 2 * 4 * 4 * 4


# ---- meshes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("mode", MODES)
def test_sharded_batch_and_channels(mode: str, kind: AxisType):
    """Nothing is gathered, and the bits are those of one device."""
    mesh = jax.make_mesh((4, 2), ("d", "c"), axis_types=(kind, kind))
    x, dy = data((8, 5, 6, 4), np.float32), data((8, 3, 3, 4), np.float32, 1)
    sharding = NamedSharding(mesh, P("d", None, None, "c"))

    def step(x: jax.Array, dy: jax.Array) -> Any:
        y, back = jax.vjp(ft.partial(ours, mode), x)
        return y, back(dy)[0]

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, sharding), jax.device_put(dy, sharding)
        compiled = jax.jit(step).lower(*placed).compile()
        found = compiled(*placed)
    assert not any(f" {word}(" in str(compiled.as_text()) for word in ("all-gather", "all-reduce", "all-to-all"))
    for a, b in zip(found, jax.jit(step)(x, dy), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(sharding, 4)


def test_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = data((8, 5, 6, 3), np.float32)
    f = jax.shard_map(ft.partial(ours, "max"), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    np.testing.assert_array_equal(jax.jit(f)(x), ours("max", jnp.asarray(x)))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(x)
    np.testing.assert_array_equal(gradient, jax.grad(lambda x: jnp.sum(ours("max", x) ** 2))(jnp.asarray(x)))


SMALL, LARGE = {"window": 3, "stride": 2, "padding": 1}, {"window": 12, "stride": 1}  # LARGE by a loop over the taps
BACKWARD: dict[str, tuple[Callable[..., jax.Array], dict[str, Any]]] = {
    "max": (dnn.pool_dgrad, SMALL),
    "average": (ft.partial(dnn.pool_dgrad, mode="average"), SMALL),
    "lp": (ft.partial(dnn.pool_dgrad, mode="lp"), SMALL),
    "max, large": (dnn.pool_dgrad, LARGE),
    "unpool, large": (lambda y, x, **o: dnn.unpool(y, dnn.pool(x, return_indices=True, **o)[1], x, **o), LARGE),
}


@pytest.mark.parametrize("replicated", ["x", "dy"])
@pytest.mark.parametrize("name", BACKWARD)
def test_shard_map_of_the_backward_ops_with_one_operand_on_every_device(name: str, replicated: str):
    f, options = BACKWARD[name]
    f = ft.partial(f, **options)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = data((8, 14, 13, 1), np.float32)
    dy = data(jax.eval_shape(ft.partial(dnn.pool, **options), x).shape, np.float32, 1)
    operands, specs = ((dy, x[:1]), (P("d"), P())) if replicated == "x" else ((dy[:1], x), (P(), P("d")))
    every = [np.broadcast_to(a, (8, *a.shape[1:])) for a in operands]

    def value_and_gradients(dy: jax.Array, x: jax.Array) -> Any:
        y, back = jax.vjp(f, dy, x)
        return y, *back(y * y)

    mapped = jax.jit(jax.shard_map(value_and_gradients, mesh=mesh, in_specs=specs, out_specs=(P("d"), *specs)))
    y, *found = mapped(*operands)
    whole = jax.jit(value_and_gradients)(*every)
    np.testing.assert_array_equal(y, whole[0])
    of_dy, of_x = (np.asarray(g) for g in whole[1:])
    mine, summed, expected = (found[0], found[1], (of_dy, of_x))
    if replicated == "dy":
        mine, summed, expected = (found[1], found[0], (of_x, of_dy))
    np.testing.assert_array_equal(mine, expected[0])
    # What every device has gets the sum of their gradients: 8 numbers, in any order. An average reads no x: one number.
    terms = expected[1].astype(np.float64)[: 1 if (name, replicated) == ("average", "dy") else 8]
    bound = 8 * 2.0**-24 * np.abs(terms).sum(0, keepdims=True)
    assert np.all(np.abs(summed - terms.sum(0, keepdims=True)) <= bound)


# ---- levels and messages ---------------------------------------------------------------------------------------------


def test_batch_invariance():
    x, dy, options = drawn("resnet", ml_dtypes.bfloat16)
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
        lambda: dnn.pool(jnp.ones((1, 4, 4, 1), jnp.int32)),
        TypeError,
        "`x` must have one of the dtypes float32, bfloat16",
    ),
    (lambda: dnn.pool(jnp.ones((1, 4, 4, 1), jnp.int8), mode="lp"), TypeError, "`x` must have one of the dtypes"),
    (lambda: dnn.pool(X, mode="min"), ValueError, "`mode` must be one of 'max', 'average'"),
    (lambda: dnn.pool(X, nan="keep"), ValueError, "`nan` must be one of 'propagate', 'ignore', got 'keep'"),
    (lambda: dnn.pool(X, window=0), ValueError, "`window` must be at least 1"),
    (lambda: dnn.pool(X, window=(2, 2, 2)), ValueError, "`window` must be an integer or 2 integers"),
    (lambda: dnn.pool(X, window=5), ValueError, "`window` must fit into the padded input"),
    (lambda: dnn.pool(X, window=2, padding=2), ValueError, "`padding` must leave every window at least one element"),
    (lambda: dnn.pool(X, window=2, padding=4, dilation=7), ValueError, "window 1 of spatial axis 0 has none"),
    (lambda: dnn.pool(X, ceil_mode=ANY_ONE), TypeError, "`ceil_mode` must be True or False, got 1"),
    (lambda: dnn.pool(X, mode="lp", p=0.5), ValueError, "`p` must be at least 1 and finite, got 0.5"),
    (lambda: dnn.pool(X, mode="lp", p=ANY_TWO), TypeError, "`p` must be a number known when traced, got '2'"),
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
    (lambda: dnn.adaptive_pool(X, output_sizes=3, prior=Y), ValueError, r"`prior` must have shape \(1, 3, 3, 1\)"),
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


@pytest.mark.parametrize("options", [{"window": (9, 17), "stride": (3, 2)}])
def test_a_loop_over_the_taps_where_jax_has_integers_of_64_bits(options: dict[str, Any]):
    x = np.random.default_rng(3).permutation(12 * 21).reshape(1, 12, 21, 1).astype(np.float32)
    gradient = jax.grad(lambda a: dnn.pool(a, **options).sum())
    expected = gradient(jnp.asarray(x))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(gradient(jnp.asarray(x)), expected)


@pytest.mark.parametrize("window", [2, 12])  # by selection, by a gather
@pytest.mark.parametrize("indices", [-1, 10**6])
def test_the_gradient_in_dy_of_an_index_outside_its_window_is_zero(window: int, indices: int):
    options: dict[str, Any] = {"window": window, "stride": 1, "padding": 0}
    x = jnp.ones((1, 14, 14, 1))
    y = dnn.pool(x, **options)
    at = jnp.full(y.shape, indices, jnp.int32).at[0, 1, 0, 0].set(14 + 1)  # one that is inside
    weights = jnp.arange(1.0, x.size + 1).reshape(x.shape)
    got = jax.grad(lambda dy: (dnn.pool_dgrad(dy, x.shape, indices=at, **options) * weights).sum())(y)
    np.testing.assert_array_equal(got, jnp.zeros(y.shape).at[0, 1, 0, 0].set(16.0))


def test_the_gradient_in_dy_of_a_tap_in_the_padding_is_zero():
    x = jnp.ones((1, 14, 14, 1))
    options: dict[str, Any] = {"window": 12, "stride": 1, "padding": 1}
    y, taps = dnn.pool(x, return_indices="tap", **options)
    weights = jnp.arange(1.0, x.size + 1).reshape(x.shape)
    dgrad = lambda dy: dnn.pool_dgrad(dy, x.shape, indices=jnp.zeros_like(taps), **options)
    got = jax.grad(lambda dy: (dgrad(dy) * weights).sum())(y)
    expected = np.zeros(y.shape, np.float32)
    expected[0, 1:, 1:, 0] = weights[0, :4, :4, 0]
    np.testing.assert_array_equal(got, expected)
