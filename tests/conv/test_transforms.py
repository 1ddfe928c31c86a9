"""Every op under every transformation, from one registry, compared with the same transformation of a `jax.lax` op.

The data are small whole numbers, so every result is exact in float32 and the two must be equal, element by element:
there is no tolerance to choose.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import PartitionSpec as P

from tests.conv import cases, helpers
from tests.conv.cases import Case

REGISTRY = cases.registry()
# The transformations that compile much run on these; the others on all.
FEW = [name for name in REGISTRY if name.rpartition("-")[2] in ("grouped", "relu", "blend")]
Op = Callable[..., jax.Array]

each_case = pytest.mark.parametrize("name", REGISTRY)
each_of_few = pytest.mark.parametrize("name", FEW)
each_op = pytest.mark.parametrize("op", cases.OPS)


def both(name: str) -> tuple[Case, tuple[Op, Op], tuple[jax.Array, ...]]:
    """A case, its op and the op of `jax.lax`, as functions of all arrays, and the arrays."""
    case = REGISTRY[name]
    return case, (ft.partial(helpers.call, case), ft.partial(helpers.lax_call, case)), cases.as_jax(case)


def assert_same(name: str, transformed: Callable[[Op], Any]) -> None:
    """Asserts that a transformation (from an op to a result) gives the same of our op and of lax's."""
    case, ops, _ = both(name)
    ours, theirs = jax.jit(lambda: [transformed(op) for op in ops])()
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype, case
        np.testing.assert_array_equal(a, b, err_msg=f"{case}\n  {helpers.reproduction(case.origin)}")


def others(name: str, count: int, seed: int = 0) -> list[tuple[jax.Array, ...]]:
    """Further data like the case's."""
    _, _, arrays = both(name)
    rng = np.random.default_rng([seed, 5])
    return [tuple(jnp.asarray(cases.values(rng, a.shape, a.dtype, integers=2)) for a in arrays) for _ in range(count)]


def stacked(name: str, count: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.stack(several) for several in zip(*others(name, count), strict=True))


def arguments(name: str) -> range:
    return range(len(both(name)[2]))


def squares(op: Op, *arrays: jax.Array) -> jax.Array:
    """A scalar that depends on every element in its own way, so that its gradient is not a constant."""
    y = op(*arrays)
    weights = (jnp.arange(y.size, dtype=y.dtype) % 5 - 2).reshape(y.shape)
    return jnp.sum(y * y * weights) / 2


# ---- derivatives -----------------------------------------------------------------------------------------------------


@each_case
def test_value_and_grad(name: str):
    arrays = both(name)[2]
    assert_same(name, lambda op: jax.value_and_grad(ft.partial(squares, op), tuple(arguments(name)))(*arrays))


@each_case
def test_jvp(name: str):
    arrays, tangents = both(name)[2], others(name, 1)[0]
    assert_same(name, lambda op: jax.jvp(op, arrays, tangents))


@each_case
def test_jvp_in_each_argument_alone(name: str):
    arrays, tangents = both(name)[2], others(name, 1)[0]

    def one(op: Op, i: int) -> Any:
        return jax.jvp(lambda a: op(*arrays[:i], a, *arrays[i + 1 :]), (arrays[i],), (tangents[i],))[1]

    assert_same(name, lambda op: [one(op, i) for i in arguments(name)])


@each_of_few
def test_jvp_of_grad_and_grad_of_grad(name: str):
    arrays, tangents = both(name)[2], others(name, 1)[0]
    every = tuple(arguments(name))

    def run(op: Op) -> Any:
        gradient = jax.grad(ft.partial(squares, op), every)

        def along(*given: jax.Array) -> jax.Array:
            return sum((jnp.vdot(g, t) for g, t in zip(gradient(*given), tangents, strict=True)), jnp.zeros(()))

        return jax.jvp(gradient, arrays, tangents), jax.grad(along, every)(*arrays)

    assert_same(name, run)


@each_of_few
def test_linearize_and_transpose(name: str):
    arrays, tangents = both(name)[2], others(name, 1)[0]

    def run(op: Op) -> Any:
        y, linear = jax.linearize(op, *arrays)
        return y, linear(*tangents), jax.linear_transpose(linear, *arrays)(y)

    assert_same(name, run)


@each_op
def test_linear_transpose(op: str):
    name = f"{op}-grouped"
    arrays = both(name)[2]

    def run(function: Op) -> Any:
        y = function(*arrays)

        def one(i: int) -> Any:
            return jax.linear_transpose(lambda a: function(*arrays[:i], a, *arrays[i + 1 :]), arrays[i])(y)

        return [one(i) for i in arguments(name)]

    assert_same(name, run)


TINY = cases.Geometry(1, (5,), 2, 4, (3,), padding=1, stride=3, layout="NCW")


@each_op
def test_jacobians_and_hessian(op: str):
    case = cases.case(op, TINY, 1, integers=2)
    REGISTRY.setdefault(f"{op}-tiny", case)
    name = f"{op}-tiny"
    arrays, every = both(name)[2], tuple(arguments(name))
    assert_same(name, lambda f: (jax.jacfwd(f, every)(*arrays), jax.jacrev(f, every)(*arrays)))
    assert_same(name, lambda f: jax.hessian(ft.partial(squares, f), every)(*arrays))


# ---- vmap ------------------------------------------------------------------------------------------------------------


@each_case
def test_vmap_over_each_argument_and_over_all(name: str):
    arrays, many = both(name)[2], stacked(name, 3)

    def over(op: Op, chosen: set[int]) -> Any:
        given = [many[i] if i in chosen else arrays[i] for i in arguments(name)]
        return jax.vmap(op, [0 if i in chosen else None for i in arguments(name)])(*given)

    sets = [{i} for i in arguments(name)] + [set(arguments(name))]
    assert_same(name, lambda op: [over(op, chosen) for chosen in sets])


@each_of_few
def test_vmap_over_pairs_along_other_axes(name: str):
    arrays, many = both(name)[2], stacked(name, 2)
    pairs = [(i, j) for i in arguments(name) for j in range(i)]

    def over(op: Op, pair: tuple[int, int]) -> Any:
        axes = [(-1 if i == pair[0] else 1) if i in pair else None for i in arguments(name)]
        axes = [axis if axis is None or arrays[i].ndim > 1 else 0 for i, axis in enumerate(axes)]
        given = [arrays[i] if a is None else jnp.moveaxis(many[i], 0, a) for i, a in enumerate(axes)]
        return jax.vmap(op, axes, out_axes=-1)(*given)

    if pairs:
        assert_same(name, lambda op: [over(op, pair) for pair in pairs])


@each_of_few
def test_nested_vmap(name: str):
    arrays, many = both(name)[2], stacked(name, 6)
    nested = [a.reshape(2, 3, *a.shape[1:]) for a in many]
    first = [0, *[None for _ in arrays[1:]]]

    def run(op: Op) -> Any:
        crossed = jax.vmap(jax.vmap(op, first), [None] + [0] * (len(arrays) - 1)) if len(arrays) > 1 else jax.vmap(op)
        return jax.vmap(jax.vmap(op))(*nested), crossed(*many)

    assert_same(name, run)


@each_of_few
def test_vmap_of_grad_and_grad_of_vmap(name: str):
    many, every = stacked(name, 3), tuple(arguments(name))

    def run(op: Op) -> Any:
        gradient = jax.grad(ft.partial(squares, op), every)
        return jax.vmap(gradient)(*many), jax.grad(ft.partial(squares, jax.vmap(op)), every)(*many)

    assert_same(name, run)


@each_of_few
def test_vmap_of_nothing(name: str):
    """A mapped axis of length 0 and one of length 1."""
    many = stacked(name, 1)
    assert_same(name, lambda op: [jax.vmap(op)(*(a[:n] for a in many)) for n in (0, 1)])


# ---- control flow ----------------------------------------------------------------------------------------------------


@each_of_few
def test_scan_map_cond_while_and_remat(name: str):
    arrays, many, every = both(name)[2], stacked(name, 3), tuple(arguments(name))

    def run(op: Op) -> Any:
        zeros = jnp.zeros_like(op(*arrays))

        def summed(*given: jax.Array) -> jax.Array:
            return squares(lambda *g: lax.scan(lambda c, a: (c + op(*a), None), zeros, g)[0], *given)

        looped = lax.fori_loop(
            0, 2, lambda i, c: c + op(*(lax.dynamic_index_in_dim(a, i, 0, False) for a in many)), zeros
        )
        return {
            "scan": jax.grad(summed, every)(*many),
            "map": lax.map(lambda a: op(*a), many),
            "batched map": lax.map(lambda a: op(*a), many, batch_size=2),
            "cond": lax.cond(arrays[0].ravel()[0] > 9, lambda *a: 2 * op(*a), op, *arrays),
            "fori": looped,
            "remat": jax.grad(ft.partial(squares, jax.checkpoint(op)), every)(*arrays),
        }

    assert_same(name, run)


# ---- compilation -----------------------------------------------------------------------------------------------------


@each_case
def test_shapes_without_a_value(name: str):
    _, (ours, theirs), arrays = both(name)
    a, b = jax.eval_shape(ours, *arrays), jax.eval_shape(theirs, *arrays)
    assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, False)


@each_of_few
def test_eager_equals_jit(name: str):
    case, (ours, _), arrays = both(name)
    np.testing.assert_array_equal(ours(*arrays), jax.jit(ours)(*arrays), err_msg=str(case))


@each_op
def test_donated_argument(op: str):
    name = f"{op}-plain"
    _, (ours, _), arrays = both(name)
    expected = ours(*arrays)
    donated = jax.jit(lambda *a: (ours(*a), a[0] + 1), donate_argnums=0)(jnp.array(arrays[0]), *arrays[1:])
    np.testing.assert_array_equal(donated[0], expected)


@each_op
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_export_for_each_platform(op: str, platform: str):
    case, (ours, _), arrays = both(f"{op}-grouped")
    exported = export.export(jax.jit(ours), platforms=[platform])(*arrays)
    assert exported.out_avals[0].shape == case.result_shape
    if platform == "cpu":
        np.testing.assert_array_equal(exported.call(*arrays), ours(*arrays))


def test_export_for_several_platforms_at_once():
    _, (ours, _), arrays = both("conv-plain")
    exported = export.export(jax.jit(jax.grad(ft.partial(squares, ours))), platforms=["cpu", "cuda"])(*arrays)
    np.testing.assert_array_equal(exported.call(*arrays), jax.grad(ft.partial(squares, ours))(*arrays))


def test_calls_of_the_same_kind_compile_once():
    _, (ours, _), arrays = both("conv-plain")
    traces = []

    @jax.jit
    def counted(*given: jax.Array) -> jax.Array:
        traces.append(1)
        return ours(*given)

    counted(*arrays)
    counted(*others("conv-plain", 1)[0])
    assert len(traces) == 1


# ---- meshes ----------------------------------------------------------------------------------------------------------


@each_op
def test_shard_map_over_the_batch(op: str):
    """Batches of eight devices in a row; of the filter's and the bias's gradient, the parts are added."""
    name = f"{op}-plain"
    case, (ours, _), arrays = both(name)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    many = stacked(name, 8)
    batched = [op != "conv_bgrad" or i == 0 for i in arguments(name)]
    if op in ("conv", "conv_dgrad", "conv_transpose"):
        batched = [i == 0 for i in arguments(name)]
    given = [many[i] if b else arrays[i] for i, b in enumerate(batched)]
    summed = op in ("conv_wgrad", "conv_bgrad")

    def local(*parts: jax.Array) -> jax.Array:
        y = ours(*(p[0] if b else p for p, b in zip(parts, batched, strict=True)))
        return lax.psum(y, "d") if summed else y[None]

    specs = tuple(P("d") if b else P() for b in batched)
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P() if summed else P("d")))
    expected = jax.vmap(ours, [0 if b else None for b in batched])(*given)
    np.testing.assert_array_equal(mapped(*given), expected.sum(0) if summed else expected, err_msg=str(case))
    gradient = jax.jit(jax.grad(lambda *a: squares(mapped, *a)))(*given)
    np.testing.assert_array_equal(
        gradient,
        jax.grad(lambda *a: squares(lambda *b: expected_of(ours, batched, summed, *b), *a))(*given),
        err_msg=str(case),
    )


def expected_of(op: Op, batched: list[bool], summed: bool, *given: jax.Array) -> jax.Array:
    y = jax.vmap(op, [0 if b else None for b in batched])(*given)
    return y.sum(0) if summed else y
