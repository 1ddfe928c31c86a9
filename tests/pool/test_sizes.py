"""Unpooling, and pooling to given sizes: global and adaptive, with indices, derivatives and blends."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases.drawn import laid_out
from tests.pool.cases import DTYPES, assert_bits, data, drawn, each_mode, each_window


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
    kept = jax.jit(jax.grad(lambda y: dnn.unpool(y, indices, x, **options).sum()))(dy)
    assert float(kept.sum()) == np.sum(placed)  # what another window has replaced has no derivative


def test_a_shape_may_be_a_numpy_array():
    y, indices = jnp.ones((1, 2, 1)), jnp.array([1, 2], jnp.int32).reshape(1, 2, 1)
    options = {"window": 2, "layout": "NWC"}
    assert dnn.unpool(y, indices, np.array([1, 5, 1]), **options).shape == (1, 5, 1)
    assert dnn.pool_dgrad(y, np.array([1, 5, 1]), indices=indices, **options).shape == (1, 5, 1)


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
        ours = dnn.adaptive_pool(x, output_sizes=outputs, mode=mode, determinism="portable")
        assert_bits(ours, reference.adaptive_pool(x, output_sizes=outputs, mode=mode, arithmetic="ordered"))
    wide = dnn.adaptive_pool(whole, output_sizes=outputs, mode=mode, out_dtype=np.float32, alpha=0.5)
    exact = reference.adaptive_pool(whole, output_sizes=outputs, mode=mode)
    np.testing.assert_allclose(wide, 0.5 * exact, rtol=2**-22)


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("mode", ["average", "max", "lp"])
def test_derivatives_of_adaptive_pool(mode: str, outputs: Any):
    x = jnp.asarray(np.random.default_rng(0).permutation(648).reshape(2, 9, 12, 3) / 8 - 40.0625, jnp.float32)
    f = ft.partial(dnn.adaptive_pool, output_sizes=outputs, mode=mode, p=3.0)
    dy, direction = data(jax.eval_shape(f, x).shape, np.float32), data(x.shape, np.float32, 4)

    @jax.jit
    def along(x: Any, direction: Any, dy: Any) -> Any:
        linear = jax.linearize(f, x)[1]
        return linear(direction), jax.linear_transpose(linear, x)(dy)[0]

    tangent, gradient = (np.asarray(v).astype(np.float64) for v in along(x, direction, dy))
    np.testing.assert_allclose(np.sum(gradient * direction), np.sum(tangent * dy), rtol=1e-4, atol=1e-3)
    definition = ft.partial(reference.adaptive_pool, output_sizes=outputs, mode=mode, p=3.0)
    moved = [definition(np.asarray(x) + s * 2.0**-9 * direction.astype(np.float64)) for s in (1, -1)]
    np.testing.assert_allclose(tangent, (moved[0] - moved[1]) * 2.0**8, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("outputs", "layout"), [*((outputs, "NHWC") for outputs in OUTPUTS[:-1]), ((4, 6), "CHWN"), ((4, 6), "NCHWc4")]
)
def test_indices_of_adaptive_pool(outputs: Any, layout: str):
    x = data(laid_out(layout, 2, 8, (9, 12)), np.float32)
    x = np.where(np.random.default_rng(2).random(x.shape) < 0.05, np.nan, x).astype(np.float32)
    for nan in ("propagate", "ignore"):
        options: dict[str, Any] = {"output_sizes": outputs, "mode": "max", "layout": layout, "nan": nan}
        y, indices = jax.jit(ft.partial(dnn.adaptive_pool, return_indices=True, **options))(x)
        expected, places = reference.adaptive_pool(x, return_indices=True, arithmetic="ordered", **options)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(y, jax.jit(ft.partial(dnn.adaptive_pool, **options))(x))
        assert_bits(indices, places)
    options = {"output_sizes": outputs, "mode": "max", "layout": layout}
    f = ft.partial(dnn.adaptive_pool, return_indices=True, **options)
    _, indices = jax.jit(f)(x)
    many = jax.jit(jax.vmap(f))(np.stack([x, -x]))
    np.testing.assert_array_equal(many[1][0], indices)
    gradients = [
        jax.jit(jax.grad(lambda x, f=f: jnp.nansum(jax.tree.leaves(f(x))[0] ** 2)))(x)
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


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_windows_of_adaptive_pool_add_in_the_stated_order_unasked(layout: str):
    """Sizes without a common factor: each window is a pooling of a part that is as long as the window."""
    x = np.random.default_rng(5).normal(size=laid_out(layout, 2, 3, (97, 5))).astype(np.float32) * 3.7
    options = {"output_sizes": (4, 3), "layout": layout}
    for operand in (x, np.full_like(x, -0.0)):
        wanted = reference.adaptive_pool(operand, **options, arithmetic="ordered")
        assert_bits(dnn.adaptive_pool(operand, **options), wanted)


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
