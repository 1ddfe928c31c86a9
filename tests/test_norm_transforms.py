"""The normalisations under every transformation, in float64, against the same transformation of another formula."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxdnn as dnn
import jaxdnn_reference as reference
from norm_cases import CASES, FEW, Norm

each_of_few = pytest.mark.parametrize("name", FEW)
pytestmark = pytest.mark.usefixtures("x64")
Op = Callable[..., Any]


def both(name: str) -> tuple[tuple[Op, Op], tuple[jax.Array, ...]]:
    """The op and the other formula, as functions of x, scale and bias; these arrays and a cotangent."""
    norm = CASES[name]
    arrays = tuple(map(jnp.asarray, norm.arrays(1, np.float64)))
    return (lambda *a: norm.call()(*a)[0], norm.formula), arrays


def same(transformed: Callable[[Op], Any], ops: tuple[Op, Op], rtol: float = 1e-9) -> None:
    ours, theirs = jax.jit(lambda: [transformed(op) for op in ops])()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(jnp.abs(b).max(initial=0)))


def scalar(op: Op, *arrays: jax.Array) -> jax.Array:
    y = op(*arrays)
    return jnp.sum(jnp.sin(y) * (jnp.arange(y.size, dtype=y.dtype) % 5 - 1.5).reshape(y.shape))


@each_of_few
def test_derivatives(name: str):
    ops, (x, s, b, dy) = both(name)
    along = (dy, s[::-1], b * b)

    def run(op: Op) -> Any:
        gradient = jax.grad(ft.partial(scalar, op), (0, 1, 2))
        inner = lambda *a: sum(jnp.vdot(g, t) for g, t in zip(gradient(*a), along, strict=True))
        return {
            "grad": gradient(x, s, b),
            "jvp": jax.jvp(op, (x, s, b), along),
            "jvp in each alone": [
                jax.jvp(
                    lambda a, i=i: op(*[a if j == i else v for j, v in enumerate((x, s, b))]), ((x, s, b)[i],), (t,)
                )
                for i, t in enumerate(along)
            ],
            "jvp of grad": jax.jvp(gradient, (x, s, b), along),
            "grad of grad": jax.grad(inner, (0, 1, 2))(x, s, b),
            "remat": jax.grad(ft.partial(scalar, jax.checkpoint(op)), (0, 1, 2))(x, s, b),
        }

    same(run, ops)


def test_hessian():
    ops, (x, s, b, _) = both("layer")
    x = x[:1, :2]
    same(lambda op: jax.hessian(ft.partial(scalar, op), (0, 1, 2))(x, s, b), ops)


@each_of_few
def test_vmap_over_each_argument(name: str):
    ops, (x, s, b, _) = both(name)
    many = [jnp.stack([a, 2 * a + 0.5, a * a], axis=-1) for a in (x, s, b)]

    def run(op: Op) -> Any:
        found = []
        for chosen in [{0}, {1}, {2}, {0, 1}, {0, 1, 2}]:
            axes = [-1 if i in chosen else None for i in range(3)]
            given = [m if i in chosen else a for i, (m, a) in enumerate(zip(many, (x, s, b), strict=True))]
            mapped = jax.vmap(op, axes, out_axes=1)
            found.append((mapped(*given), jax.grad(ft.partial(scalar, mapped), (0, 1, 2))(*given)))
            found.append(jax.vmap(jax.grad(ft.partial(scalar, op), (0, 1, 2)), axes)(*given))
        return found

    same(run, ops)


@each_of_few
def test_scan_and_cond(name: str):
    ops, (x, s, b, weights) = both(name)
    many = jnp.stack([s, s + 1, s * 2])

    def run(op: Op) -> Any:
        def looped(x: jax.Array, b: jax.Array) -> jax.Array:
            return (jax.lax.scan(lambda c, s: (op(c, s, b), None), x, many)[0] * weights).sum()

        return jax.grad(looped, (0, 1))(x, b), jax.lax.cond(x.sum() > 1e9, lambda: 2 * op(x, s, b), lambda: op(x, s, b))

    same(run, ops, rtol=1e-6)


@each_of_few
def test_statistics_are_differentiated(name: str):
    """Through the saved mean and inverse deviation, and through running statistics, by finite differences."""
    norm = CASES[name]
    x, s, b, _ = norm.arrays(2, np.float64)
    direction = np.random.default_rng(3).normal(size=x.shape)
    tangents = jax.jvp(lambda x: norm.call()(x, s, b), (jnp.asarray(x),), (jnp.asarray(direction),))[1]
    h = 1e-5
    up, down = (norm.definition(x + sign * h * direction, s, b) for sign in (1, -1))
    for tangent, high, low in zip(tangents, up, down, strict=True):
        np.testing.assert_allclose(tangent, (high - low).astype(np.float64) / (2 * h), rtol=2e-6, atol=1e-6)


@each_of_few
def test_backward_ops_are_the_gradients(name: str):
    """And are differentiable themselves: in dy linear, in x and scale by finite differences of the definition."""
    norm = CASES[name]
    x, s, b, dy = norm.arrays(4, np.float64)
    gradient = jax.vjp(lambda *a: norm.call()(*a)[0], *map(jnp.asarray, (x, s, b)))[1](jnp.asarray(dy))
    for ours, theirs in zip(norm.gradients(dnn, dy, x, s), gradient, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    rng = np.random.default_rng(5)
    along = [rng.normal(size=a.shape) for a in (dy, x, s)]
    run = lambda dy, x, s: norm.gradients(dnn, dy, x, s)
    tangents = jax.jvp(run, tuple(map(jnp.asarray, (dy, x, s))), tuple(map(jnp.asarray, along)))[1]
    h = 1e-5
    ends = [
        norm.gradients(reference, *(a + sign * h * t for a, t in zip((dy, x, s), along, strict=True)))
        for sign in (1, -1)
    ]
    for tangent, high, low in zip(tangents, *ends, strict=True):
        np.testing.assert_allclose(tangent, (high - low).astype(np.float64) / (2 * h), rtol=2e-6, atol=2e-6)
    transposed = jax.linear_transpose(lambda dy: norm.gradients(dnn, dy, x, s), jnp.asarray(dy))
    cotangents = tuple(map(jnp.asarray, (along[1], *(rng.normal(size=s.shape) for _ in range(2)))))
    left = jnp.vdot(transposed(cotangents)[0], along[0])
    right = sum(jnp.vdot(c, g) for c, g in zip(cotangents, run(along[0], x, s), strict=True))
    np.testing.assert_allclose(left, right, rtol=1e-9)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@each_of_few
def test_sharded_jit(name: str, kind: AxisType):
    """Sharded over the examples; batch normalisation's statistics are then those of all devices."""
    norm = CASES[name]
    wide = Norm(norm.op, (8, *norm.shape[1:]), norm.parameter, norm.options)
    if norm.op == "adaptive_layer_norm":
        wide = Norm(norm.op, wide.shape, (8, *norm.parameter[1:]), norm.options)
    x, s, b, dy = wide.arrays(6, np.float64)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    spread = [jax.device_put(a, NamedSharding(mesh, PartitionSpec("d"))) for a in (x, dy)]
    run = jax.jit(lambda x, dy: (wide.call()(x, s, b)[0], wide.gradients(dnn, dy, x, s)))
    with jax.set_mesh(mesh):
        found = run(*spread)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(run(x, dy)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["layer", "rms", "group-NCHW"])
def test_shard_map_over_the_batch(name: str):
    norm = CASES[name]
    wide = Norm(norm.op, (8, *norm.shape[1:]), norm.parameter, norm.options)
    x, s, b, _ = map(jnp.asarray, wide.arrays(7, np.float64))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec("d"), PartitionSpec(), PartitionSpec())
    op = lambda *a: wide.call()(*a)[0]
    mapped = jax.jit(jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d")))
    np.testing.assert_allclose(mapped(x, s, b), op(x, s, b), rtol=1e-12)
    for ours, theirs in zip(
        jax.grad(ft.partial(scalar, mapped), (0, 1, 2))(x, s, b),
        jax.grad(ft.partial(scalar, op), (0, 1, 2))(x, s, b),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
