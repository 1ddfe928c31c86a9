"""The normalisations under every transformation, in float64, against the same transformation of another formula.

Two routes to a result may lie as far from each other as the bounds of their own rounding errors together allow.
"""

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
from tests.core import running_error
from tests.norm.cases import CASES, FEW, Norm

each_of_few = pytest.mark.parametrize("name", FEW)
pytestmark = pytest.mark.usefixtures("x64")
Op = Callable[..., Any]


def both(name: str) -> tuple[tuple[Op, Op], tuple[jax.Array, ...]]:
    """The op and the other formula, as functions of x, scale and bias; these arrays and a cotangent."""
    norm = CASES[name]
    arrays = tuple(map(jnp.asarray, norm.arrays(1, np.float64)))
    return (lambda *a: norm.call()(*a)[0], norm.formula), arrays


def same(transformed: Callable[[Op], Any], ops: tuple[Op, Op], bounded: Callable[[Op], Any] | None = None) -> None:
    """The transformation of the op and that of the other formula agree; `bounded` is the same without loops."""
    results = jax.jit(lambda: [transformed(op) for op in ops])()
    errors = [running_error.bounds(ft.partial(bounded or transformed, op))[1] for op in ops]
    for a, b, of_a, of_b in zip(*map(jax.tree.leaves, (*results, *errors)), strict=True):
        running_error.agree(a, b, of_a, of_b)


def alike(op: Op, another: Op, *arrays: Any) -> None:
    """Two ways to run what is the same but for the order of its additions."""
    errors = jax.tree.leaves(running_error.bounds(op, *arrays)[1])
    found = [jax.tree.leaves(jax.jit(f)(*arrays)) for f in (another, op)]
    for a, b, error in zip(*found, errors, strict=True):
        running_error.agree(a, b, 2 * error)


def scalar(op: Op, *arrays: jax.Array) -> jax.Array:
    y = op(*arrays)
    weights = (np.arange(y.size) % 5 - 1.5).reshape(y.shape)
    return jnp.sum((y - y * y * y) * jnp.asarray(weights, y.dtype))


@each_of_few
def test_derivatives(name: str):
    ops, (x, s, b, dy) = both(name)
    along = (dy, s[::-1], b * b)

    def run(op: Op) -> Any:
        gradient = jax.grad(ft.partial(scalar, op), (0, 1, 2))
        inner = lambda *a: sum(jnp.sum(g * t) for g, t in zip(gradient(*a), along, strict=True))
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

    def run(op: Op, scan: Callable[..., Any] = jax.lax.scan) -> Any:
        def looped(x: jax.Array, b: jax.Array) -> jax.Array:
            return (scan(lambda c, s: (op(c, s, b), None), x, many)[0] * weights).sum()

        return jax.grad(looped, (0, 1))(x, b), jax.lax.cond(x.sum() > 1e9, lambda: 2 * op(x, s, b), lambda: op(x, s, b))

    steps = list(map(jnp.asarray, np.asarray(many)))
    unrolled = lambda step, x, _: ft.reduce(lambda carry, s: (step(carry[0], s)[0], None), steps, (x, None))
    same(run, ops, ft.partial(run, scan=unrolled))


@each_of_few
def test_statistics_are_differentiated(name: str):
    """Through the saved mean and inverse deviation, and through running statistics, by finite differences."""
    norm = CASES[name]
    x, s, b, _ = norm.arrays(2, np.float64)
    x, direction = running_error.coarse(x, np.random.default_rng(3).normal(size=x.shape))
    run = lambda x: jax.jvp(lambda x: norm.call()(x, s, b), (x,), (jnp.asarray(direction),))[1]
    tangents, errors = run(jnp.asarray(x)), running_error.bounds(run, jnp.asarray(x))[1]
    own = norm.definition_errors(x, s, b)
    for i, (tangent, error, off) in enumerate(zip(tangents, errors, own, strict=True)):
        ends, apart = running_error.slope(lambda h, i=i: norm.definition(x + h * direction, s, b)[i], off)
        running_error.agree(tangent, ends, error, apart)


@each_of_few
def test_backward_ops_are_the_gradients(name: str):
    """And are differentiable themselves: in dy linear, in x and scale by finite differences of the definition."""
    norm = CASES[name]
    x, s, b, dy = running_error.coarse(*norm.arrays(4, np.float64))
    own = lambda dy, x, s, b: norm.gradients(dnn, dy, x, s)
    pulled = lambda dy, x, s, b: jax.vjp(lambda *a: norm.call()(*a)[0], x, s, b)[1](dy)
    given = tuple(map(jnp.asarray, (dy, x, s, b)))
    found = [(jax.jit(f)(*given), running_error.bounds(f, *given)[1]) for f in (own, pulled)]
    for ours, error, theirs, another in zip(*found[0], *found[1], strict=True):
        running_error.agree(ours, theirs, error, another)
    rng = np.random.default_rng(5)
    along = running_error.coarse(*(rng.normal(size=a.shape) for a in (dy, x, s)))
    run = lambda dy, x, s: norm.gradients(dnn, dy, x, s)
    pushed = lambda *a: jax.jvp(run, a, tuple(map(jnp.asarray, along)))[1]
    tangents, errors = jax.jit(pushed)(*given[:3]), running_error.bounds(pushed, *given[:3])[1]
    for i, (tangent, error, off) in enumerate(zip(tangents, errors, norm.definition_errors(x, s, b, dy), strict=True)):
        at = lambda h, i=i: norm.gradients(reference, *(a + h * t for a, t in zip((dy, x, s), along, strict=True)))[i]
        value, apart = running_error.slope(at, off)
        running_error.agree(tangent, value, apart, error)


@each_of_few
def test_backward_ops_are_transposed(name: str):
    """<transpose(c), t> = <c, run(t)>, both sums with their own bounds."""
    norm = CASES[name]
    x, s, _, dy = norm.arrays(5, np.float64)
    rng = np.random.default_rng(5)
    along, *cotangents = (jnp.asarray(rng.normal(size=shape)) for shape in (dy.shape, x.shape, s.shape, s.shape))
    run = lambda dy: norm.gradients(dnn, dy, jnp.asarray(x), jnp.asarray(s))
    left = lambda t: jnp.sum(jax.linear_transpose(run, jnp.asarray(dy))(tuple(cotangents))[0] * t)
    right = lambda t: sum(jnp.sum(c * g) for c, g in zip(cotangents, run(t), strict=True))
    errors = [running_error.bounds(side, along)[1] for side in (left, right)]
    running_error.agree(left(along), right(along), *errors)


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
    errors = jax.tree.leaves(running_error.bounds(run, jnp.asarray(x), jnp.asarray(dy))[1])
    for ours, theirs, error in zip(jax.tree.leaves(found), jax.tree.leaves(run(x, dy)), errors, strict=True):
        running_error.agree(ours, theirs, 2 * error)


@pytest.mark.parametrize("name", ["layer", "rms", "group-NCHW"])
def test_shard_map_over_the_batch(name: str):
    norm = CASES[name]
    wide = Norm(norm.op, (8, *norm.shape[1:]), norm.parameter, norm.options)
    x, s, b, _ = map(jnp.asarray, wide.arrays(7, np.float64))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec("d"), PartitionSpec(), PartitionSpec())
    op = lambda *a: wide.call()(*a)[0]
    mapped = jax.jit(jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d")))
    alike(op, mapped, x, s, b)
    alike(*(jax.grad(ft.partial(scalar, f), (0, 1, 2)) for f in (op, mapped)), x, s, b)


@each_of_few
def test_a_fault_in_a_derivative_would_be_seen(name: str):
    """A gradient that is wrong by a billionth; the bounds hold in float32 too, where the exact values are at hand."""
    norm = CASES[name]
    x, s, b, _ = map(jnp.asarray, norm.arrays(8, np.float64))
    run = jax.grad(ft.partial(scalar, norm.formula), (0, 1, 2))
    errors = running_error.bounds(run, x, s, b)[1]
    ours = jax.jit(jax.grad(lambda *a: scalar(lambda *a: norm.call()(*a)[0], *a), (0, 1, 2)))(x, s, b)
    for good, error in zip(ours, errors, strict=True):
        with pytest.raises(AssertionError, match="apart"):
            running_error.agree(good * (1 + 1e-9), good, 2 * error)
    narrow = [a.astype(jnp.float32) for a in (x, s, b)]
    values, errors = running_error.bounds(run, *narrow)
    for found, exact, error in zip(jax.jit(run)(*narrow), values, errors, strict=True):
        running_error.agree(found, exact, error)
        assert np.abs(np.asarray(found, np.float64) - exact).max() > 0


NORMS: dict[str, Any] = {
    "batch_norm": lambda x, **o: dnn.batch_norm(x, **o)[0],
    "group_norm": ft.partial(dnn.group_norm, groups=2),
    "instance_norm": dnn.instance_norm,
}


@pytest.mark.parametrize("activation", ["relu", "swish"])
@pytest.mark.parametrize("norm", NORMS)
def test_an_activation_of_the_op_has_every_derivative(norm: str, activation: str):
    """Of a bfloat16 x it is a part of the op, of a float32 one an op behind it: the same values and derivatives."""
    rng = np.random.default_rng(11)
    narrow = jnp.asarray(rng.normal(0.5, 1, (3, 4, 5, 4)), jnp.bfloat16)
    s, b = (jnp.asarray(rng.normal(size=4), jnp.float32) for _ in range(2))
    dx = jnp.asarray(rng.normal(size=narrow.shape), jnp.bfloat16)

    def loss(x: jax.Array, s: jax.Array, b: jax.Array) -> jax.Array:
        y = NORMS[norm](x, scale=s, bias=b, activation=activation, out_dtype=jnp.float32)
        return jnp.sum(jnp.sin(y + jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape)))

    def everything(x: jax.Array) -> Any:
        along = (dx.astype(x.dtype), s, b)
        first, second = jax.jvp(jax.grad(loss, (0, 1, 2)), (x, s, b), along)
        return (
            first,
            second,
            jax.jvp(loss, (x, s, b), along),
            jax.vmap(lambda s: jax.grad(loss)(x, s, b))(jnp.stack([s, b])),
        )

    own, behind = (jax.jit(everything)(x) for x in (narrow, narrow.astype(jnp.float32)))
    for ours, theirs in zip(jax.tree.leaves(own), jax.tree.leaves(behind), strict=True):
        wanted = np.asarray(theirs, np.float64)
        rate = 2.0**-8 if ours.dtype == jnp.bfloat16 else 2.0**-14
        np.testing.assert_allclose(np.asarray(ours, np.float64), wanted, rtol=rate, atol=rate * np.abs(wanted).max())
