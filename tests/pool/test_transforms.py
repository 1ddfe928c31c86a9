"""Pooling under every transformation, by an independent formula, and on meshes."""

import functools as ft
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
from jaxdnn._src.pool.xla import engine
from tests.pool.cases import MODES, data, drawn

# ---- transformations, by an independent formula ----------------------------------------------------------------------


def theirs(mode: str, x: jax.Array) -> jax.Array:
    """The "3x3 step 2" window as a stack of its taps; the first of equal maxima by argmax."""
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
    found, expected = jax.jit(lambda x, v: [run(ft.partial(f, mode), x, v) for f in (ours, theirs)])(x, v)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_derivatives_of_the_backward_op():
    x, dy, options = drawn("3x3 step 2")
    for mode in ("max", "average"):
        back = ft.partial(dnn.pool_dgrad, mode=mode, **options)
        along = data(x.shape, np.float32, 9)

        @jax.jit
        def run(x: Any, dy: Any, along: Any, mode: str = mode, back: Any = back) -> Any:
            forward = jax.jvp(ft.partial(dnn.pool, mode=mode, **options), (x,), (along,))[1]
            transposed = jax.vjp(lambda d: back(d, x), dy)[1](along)[0]
            tangent = jax.jvp(lambda d: back(d, x), (dy,), (2 * dy,))[1]
            return forward, transposed, tangent, jax.vmap(back)(jnp.stack([dy, -dy]), jnp.stack([x, 2 * x]))

        forward, transposed, tangent, many = run(x, dy, along)
        # Linear in dy, and its transpose is the tangent of the pooling.
        np.testing.assert_allclose(transposed, forward)
        np.testing.assert_allclose(tangent, 2 * back(dy, x))
        np.testing.assert_array_equal(many[1], -back(dy, 2 * x))


def test_indices_through_transformations():
    x, _, options = drawn("3x3 step 2")
    f = jax.jit(lambda x: dnn.pool(x, **options, return_indices=True))
    _, indices = f(x)
    many = jax.vmap(f)(jnp.stack([x, -x]))
    np.testing.assert_array_equal(many[1][0], indices)
    value = jax.jit(jax.grad(lambda x: jnp.sum(f(x)[0] ** 2)))(x)
    np.testing.assert_array_equal(value, jax.jit(jax.grad(lambda x: jnp.sum(dnn.pool(x, **options) ** 2)))(x))
    assert indices.dtype == jnp.int32


def test_residuals_of_max_pooling_are_one_byte_an_output():
    x = jnp.zeros((2, 8, 8, 4))
    back = jax.vjp(lambda x: dnn.pool(x, window=3, stride=2, padding=1), x)[1]
    kept = [leaf for leaf in jax.tree.leaves(back) if hasattr(leaf, "nbytes")]
    assert sum(leaf.nbytes for leaf in kept) == 2 * 4 * 4 * 4


@pytest.mark.parametrize("options", [{"window": (9, 17), "stride": (3, 2)}])
def test_a_loop_over_the_taps_where_jax_has_integers_of_64_bits(options: dict[str, Any]):
    x = np.random.default_rng(3).permutation(12 * 21).reshape(1, 12, 21, 1).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda a: dnn.pool(a, **options).sum()))
    expected = gradient(jnp.asarray(x))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(gradient(jnp.asarray(x)), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 3, "stride": 1, "padding": 1},
        {"window": (3, 2), "stride": (2, 1), "padding": (1, 0)},
        {"window": (2, 4), "stride": (3, 2), "padding": (0, 1)},
        {"window": 2, "stride": 1, "dilation": 2},
    ],
    ids=str,
)
def test_the_gradient_with_and_without_a_loop_over_the_taps(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    x, found = np.random.default_rng(3).integers(0, 4, (2, 9, 10, 3)).astype(np.float32), []
    for unrolled in (0, 128):
        monkeypatch.setattr(engine, "UNROLLED_ON_CPUS", unrolled)
        jax.clear_caches()
        gradient = jax.jit(jax.grad(lambda a: jnp.sum(dnn.pool(a, **options) ** 3)))
        assert ("stablehlo.while" in gradient.lower(x).as_text()) == (unrolled == 0)
        found.append(gradient(x))
    np.testing.assert_array_equal(*found)


def test_on_cpus_a_gradient_of_many_taps_is_a_loop():
    """XLA would compute the chosen tap anew for each: 15 times the time."""
    gradient = jax.jit(jax.grad(lambda a, n: jnp.sum(dnn.pool(a, window=n, stride=1))), static_argnums=1)
    x = jnp.ones((1, 9, 9, 2))
    assert ["stablehlo.while" in gradient.lower(x, n).as_text() for n in (2, 3)] == [False, True]


@pytest.mark.parametrize("window", [2, 12])  # by selection, by a gather
@pytest.mark.parametrize("indices", [-1, 10**6])
def test_the_gradient_in_dy_of_an_index_outside_its_window_is_zero(window: int, indices: int):
    options: dict[str, Any] = {"window": window, "stride": 1, "padding": 0}
    x = jnp.ones((1, 14, 14, 1))
    y = dnn.pool(x, **options)
    at = jnp.full(y.shape, indices, jnp.int32).at[0, 1, 0, 0].set(14 + 1)  # one that is inside
    weights = jnp.arange(1.0, x.size + 1).reshape(x.shape)
    got = jax.jit(jax.grad(lambda dy: (dnn.pool_dgrad(dy, x.shape, indices=at, **options) * weights).sum()))(y)
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


def test_a_divisor_where_rows_are_sharded():
    """Windows reach over the ends of a device's rows, and those at the ends of x over its padding; all are divided."""
    mesh = jax.make_mesh((4,), ("h",), axis_types=(AxisType.Auto,))
    x = data((2, 16, 6, 4), np.float32)
    f = jax.jit(jax.value_and_grad(lambda x: jnp.sum(ours_divided(x) ** 2)))
    ours_divided = ft.partial(dnn.pool, window=(4, 3), stride=(2, 1), padding=1, mode="average", divisor=7)
    placed = jax.device_put(x, NamedSharding(mesh, P(None, "h")))
    np.testing.assert_array_equal(jax.jit(ours_divided)(placed), jax.jit(ours_divided)(x))
    np.testing.assert_array_equal(f(placed)[1], f(x)[1])


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
