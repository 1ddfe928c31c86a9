"""The tensor ops under every transformation, compared with the same transformation of a formula in jax.numpy.

In float64, where both are right to a few dozen units of 2^-53: 2^-40 of the largest value leaves room for thousands.
Values are compared with the definition, and derivatives with its finite differences, too.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.tensor import cases
from tests.tensor.cases import TensorCase

pytestmark = pytest.mark.usefixtures("x64")
each_case = pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)


def both(case: TensorCase) -> tuple[tuple[Callable[..., Any], ...], list[jax.Array], list[jax.Array]]:
    """Our op and the formula, arrays for them, and other arrays of the same shapes."""
    arrays, tangents = ([jnp.asarray(v) for v in case.arrays(np.float64, seed)] for seed in (0, 1))
    return (case.ours, case.theirs), arrays, tangents


def assert_same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-40 * max(1.0, float(np.abs(b).max(initial=0))))


def assert_bits(case: TensorCase, a: Any, b: Any) -> None:
    """Equal bits, unless the op leaves it to XLA how to add."""
    if case.op == "reduce" and case.options["determinism"] == "fast":
        assert_same(a, b)
    else:
        np.testing.assert_array_equal(a, b)


def scalar(op: Callable[..., Any], *arrays: Any) -> jax.Array:
    """Depends on every element in its own way."""
    y = op(*arrays)
    return jnp.sum(y * y * (jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 5 - 2))


@each_case
def test_value_is_the_definitions(case: TensorCase):
    arrays = case.arrays(np.float64)
    options = {k: v for k, v in case.options.items() if k != "determinism"}
    definition = cases.dataclasses.replace(case, options=options).definition(*arrays)
    assert_same(case.ours(*arrays), np.asarray(definition, np.float64))


@each_case
def test_derivatives(case: TensorCase):
    ops, arrays, tangents = both(case)
    every = tuple(range(len(arrays)))

    def run(op: Callable[..., Any]) -> Any:
        gradient = jax.grad(ft.partial(scalar, op), every)
        return {
            "value and gradient": jax.value_and_grad(ft.partial(scalar, op), every)(*arrays),
            "jvp": jax.jvp(op, arrays, tangents),
            "jvp of gradient": jax.jvp(gradient, arrays, tangents),
            "gradient of gradient": jax.grad(
                lambda *a: sum(jnp.vdot(g, t) for g, t in zip(gradient(*a), tangents, strict=True)), every
            )(*arrays),
            "remat": jax.grad(ft.partial(scalar, jax.checkpoint(op)), every)(*arrays),
        }

    assert_same(*(jax.jit(ft.partial(run, op))() for op in ops))


@each_case
def test_jvp_is_the_definitions_finite_difference(case: TensorCase):
    """Central differences in extended precision: off by h² of a third derivative and by 2^-64 / h of the value."""
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("longdouble is float64 here, and the differences would be no better than what they check")
    _, arrays, tangents = both(case)
    options = {k: v for k, v in case.options.items() if k != "determinism"}
    definition = cases.dataclasses.replace(case, options=options).definition
    h = 2.0**-20  # exact steps: arrays are whole numbers
    ahead, behind = (
        definition(*(np.asarray(a) + sign * h * np.asarray(t) for a, t in zip(arrays, tangents, strict=True)))
        for sign in (1, -1)
    )
    slope = np.asarray((ahead - behind) / (2 * h), np.float64)
    found = jax.jvp(case.ours, arrays, tangents)[1]
    # The third derivatives of these values are below 2^12 of the first ones; 2^-40 2^12 and as much again.
    np.testing.assert_allclose(found, slope, rtol=0, atol=2.0**-27 * max(1.0, float(np.abs(slope).max())))


@each_case
def test_vmap(case: TensorCase):
    ops, arrays, _ = both(case)
    many = [jnp.stack([jnp.asarray(case.arrays(np.float64, s)[i]) for s in range(3)]) for i in range(len(arrays))]

    def run(op: Callable[..., Any]) -> Any:
        each = [
            jax.vmap(op, [0 if j == i else None for j in range(len(arrays))])(
                *(many[j] if j == i else arrays[j] for j in range(len(arrays)))
            )
            for i in range(len(arrays))
        ]
        gradients = jax.vmap(jax.grad(ft.partial(scalar, op), tuple(range(len(arrays)))))(*many)
        return (
            each,
            jax.vmap(op)(*many),
            jax.vmap(op, in_axes=-1, out_axes=1)(*(jnp.moveaxis(m, 0, -1) for m in many)),
            gradients,
        )

    assert_same(*(jax.jit(ft.partial(run, op))() for op in ops))


@each_case
def test_loops_and_eager(case: TensorCase):
    ops, arrays, _ = both(case)
    many = [jnp.stack([jnp.asarray(case.arrays(np.float64, s)[i]) for s in range(3)]) for i in range(len(arrays))]

    def run(op: Callable[..., Any]) -> Any:
        carried = lax.scan(lambda c, a: (c + op(*a), None), jnp.zeros_like(op(*arrays)), tuple(many))[0]
        return carried, lax.map(lambda a: op(*a), tuple(many)), lax.cond(True, op, lambda *a: 2 * op(*a), *arrays)

    assert_same(*(jax.jit(ft.partial(run, op))() for op in ops))
    assert_bits(case, ops[0](*arrays), jax.jit(ops[0])(*arrays))


@each_case
def test_meshes(case: TensorCase):
    """shard_map, sharded jit and its gradient, with one image of a batch on each of two devices."""
    op, arrays = case.ours, both(case)[1]
    if any(a.ndim == 0 or a.shape[0] != 2 for a in arrays) or (2 in case.options.get("fold", ()) and len(arrays) > 2):
        arrays = [jnp.stack([a, 2 * a]) for a in arrays]
        op = jax.vmap(op)
    elif case.op in ("col2im", "resample_dgrad"):  # they are given the size of the whole batch
        arrays, op = [jnp.stack([a, 2 * a]) for a in arrays], jax.vmap(op)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    expected = op(*arrays)
    mapped = jax.jit(jax.shard_map(op, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    assert_bits(case, mapped(*arrays), expected)
    sharded = [jax.device_put(a, NamedSharding(mesh, P("d"))) for a in arrays]
    assert_bits(case, jax.jit(op)(*sharded), expected)
    every = tuple(range(len(arrays)))
    gradients = [jax.jit(jax.grad(ft.partial(scalar, op), every))(*given) for given in (sharded, arrays)]
    assert_same(*gradients)


@each_case
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for_other_platforms(case: TensorCase, platform: str):
    arrays = [jnp.asarray(v) for v in case.arrays(np.float32)]
    jax.jit(jax.grad(ft.partial(scalar, case.ours))).trace(*arrays).lower(lowering_platforms=(platform,))
