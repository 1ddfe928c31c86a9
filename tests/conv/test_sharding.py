"""Sharded arrays on eight simulated devices: what XLA communicates, read from the compiled program, and equal results.

With the batch sharded, forward and backward data need no communication at all, and the filter's gradient one sum over
the mesh. That is to hold for grouped and depthwise convolution too, which XLA by itself would gather.
"""

import functools as ft
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
from tests.conv import cases, helpers
from tests.conv.cases import Case, Geometry

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
WINDOW: dict[str, Any] = {"taps": (3, 1), "padding": (1, 0), "stride": (1, 2)}
KINDS = {
    "dense": Geometry(16, (6, 7), 5, 8, **WINDOW),
    "grouped": Geometry(8, (6, 7), 16, 32, **WINDOW, groups=4),
    "depthwise": Geometry(8, (6, 7), 16, 32, **WINDOW, groups=16),
    "channels first": Geometry(8, (6, 7), 16, 32, **WINDOW, groups=4, layout="NCHW"),
    "line": Geometry(8, (9,), 4, 12, (3,), groups=4, layout="CWN"),
    "pointwise": Geometry(8, (6, 7), 3, 5, (1, 1)),
    "patchify": Geometry(8, (6, 4), 7, 5, (3, 2), stride=(3, 2)),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def collectives(compiled: Any) -> set[str]:
    """The kinds of communication in a compiled program."""
    return {name for name in COLLECTIVES if re.search(rf" {name}(-start)?\(", compiled.as_text())}


def batch_sharding(mesh: Mesh, case: Case, i: int) -> NamedSharding:
    """Operand `i` sharded along its batch axis, or replicated if it has none (a filter, a bias)."""
    g, array = case.geometry, case.arrays[i]
    if array.shape == g.shape("w"):
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*("d" if axis == "N" else None for axis in g.layout)))


def run(function: Callable[..., Any], arrays: Any, shardings: Any) -> tuple[Any, set[str]]:
    placed = [jax.device_put(a, s) for a, s in zip(arrays, shardings, strict=True)]
    compiled = jax.jit(function).lower(*placed).compile()
    return compiled(*placed), collectives(compiled)


@each_kind
@pytest.mark.parametrize("op", ["conv", "conv_dgrad", "conv_wgrad", "conv_transpose"])
def test_sharded_batch(kind: str, op: str, mesh: Mesh):
    case = cases.case(op, KINDS[kind], 1, integers=3)
    out, found = run(lambda *a: helpers.call(case, *a), case.arrays, [batch_sharding(mesh, case, i) for i in (0, 1)])
    assert found == ({"all-reduce"} if op == "conv_wgrad" else set())
    helpers.check(case, out)
    spec = P() if op == "conv_wgrad" else P(*("d" if axis == "N" else None for axis in case.geometry.layout))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), out.ndim)


@each_kind
def test_training_step_adds_gradients_once_over_the_mesh(kind: str, mesh: Mesh):
    case = cases.case("conv", KINDS[kind], 1, integers=2).with_epilogue(1, integers=2, bias=True, activation="relu")

    def loss(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(helpers.call(case, x, w, bias))

    arrays = cases.as_jax(case)
    shardings = [batch_sharding(mesh, case, 0), NamedSharding(mesh, P()), NamedSharding(mesh, P())]
    gradients, found = run(jax.grad(loss, (0, 1, 2)), arrays, shardings)
    assert found == {"all-reduce"}
    for ours, alone in zip(gradients, jax.grad(loss, (0, 1, 2))(*arrays), strict=True):
        np.testing.assert_array_equal(ours, alone)
    assert gradients[0].sharding.is_equivalent_to(shardings[0], 4)


@pytest.mark.parametrize("kind", ["dense", "grouped", "depthwise"])
def test_epilogue_of_a_sharded_filter_gradient(kind: str, mesh: Mesh):
    """The blend comes after the sum over the mesh: the prior is added once, and the result is rounded once."""
    case = cases.case("conv_wgrad", KINDS[kind], 2, integers=3, dtype=jnp.bfloat16)
    case = case.with_epilogue(2, integers=3, alpha=0.5, beta=1.0, prior=True)
    shardings = [batch_sharding(mesh, case, 0), batch_sharding(mesh, case, 1), NamedSharding(mesh, P())]
    out, found = run(lambda *a: helpers.call(case, *a), cases.as_jax(case), shardings)
    assert found == {"all-reduce"}
    helpers.check(case, out)


def test_sharded_channels(mesh: Mesh):
    """Output channels of a dense convolution: nothing is communicated either. Input channels: right all the same."""
    case = cases.case("conv", KINDS["dense"], 3, integers=3)
    by_filter = [NamedSharding(mesh, P()), NamedSharding(mesh, P(None, None, None, "d"))]
    out, found = run(lambda *a: helpers.call(case, *a), case.arrays, by_filter)
    assert found == set()
    helpers.check(case, out)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, None, None, "d")), 4)
    for kind in ("grouped", "depthwise"):
        case = cases.case("conv", KINDS[kind], 3, integers=3)
        out, _ = run(
            lambda *a, c=case: helpers.call(c, *a), case.arrays, [NamedSharding(mesh, P(None, None, None, "d"))] * 2
        )
        helpers.check(case, out)


def test_sharded_space_gives_the_same(mesh: Mesh):
    g = Geometry(2, (16, 5), 4, 6, (3, 2), padding=1)
    for op in ("conv", "conv_dgrad", "conv_wgrad"):
        case = cases.case(op, g, 1, integers=3)
        first = NamedSharding(mesh, P(None, "d") if case.arrays[0].shape[1] % 8 == 0 else P())
        out, _ = run(lambda *a, c=case: helpers.call(c, *a), case.arrays, [first, NamedSharding(mesh, P())])
        helpers.check(case, out)


def test_two_mesh_axes():
    """Batch over one axis, output channels over the other."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    case = cases.case("conv", KINDS["dense"], 4, integers=3)
    shardings = [NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, None, None, "model"))]
    out, found = run(lambda *a: helpers.call(case, *a), case.arrays, shardings)
    assert found == set()
    helpers.check(case, out)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, None, "model")), 4)


# ---- meshes whose axes JAX follows in types: what `jax.make_mesh` makes ----------------------------------------------


@pytest.mark.parametrize("op", ["conv", "conv_dgrad", "conv_wgrad", "conv_transpose"])
@pytest.mark.parametrize("kind", ["dense", "grouped", "channels first", "line"])
def test_shardings_in_types(kind: str, op: str):
    mesh = jax.make_mesh((8,), ("d",))
    case = cases.case(op, KINDS[kind], 6, integers=3)
    spec = P() if op == "conv_wgrad" else P(*("d" if axis == "N" else None for axis in case.geometry.layout))

    def f(*arrays: jax.Array) -> jax.Array:
        y = helpers.call(case, *arrays)
        assert jax.typeof(y).sharding.spec == P(*spec, *[None] * (y.ndim - len(spec)))
        return y

    with jax.set_mesh(mesh):
        out, found = run(f, case.arrays, [batch_sharding(mesh, case, i) for i in (0, 1)])
    assert found == ({"all-reduce"} if op == "conv_wgrad" else set())
    helpers.check(case, jax.device_put(out, jax.devices()[0]))


@pytest.mark.parametrize("groups", [1, 4])
def test_training_step_with_shardings_in_types(groups: int):
    """A residual block, mapped, scanned over its filters, recomputed backwards, and inside shard_map."""
    mesh = jax.make_mesh((4, 2), ("d", "e"))
    rng = np.random.default_rng(7)
    shapes = (16, 6, 5, 8), (3, 1, 8 // groups, 8)
    x, w = (rng.integers(-1, 2, shape).astype(np.float32) for shape in shapes)

    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + dnn.conv(x, w, padding=(1, 0), groups=groups, activation="relu")

    def loss(block: Any, x: jax.Array, filters: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jax.checkpoint(block)(x, w), None), x, filters)[0].sum()

    filters, arrays = jnp.stack([w, -w]), (jnp.stack([x, 2 * x]), jnp.stack([w, -w]))
    expected = jax.vmap(jax.grad(ft.partial(loss, block), (0, 1)), (0, None))(*arrays)
    inside = {"mesh": mesh, "in_specs": (P("d"), P()), "out_specs": P("d")}
    bodies = block, jax.shard_map(block, **inside), jax.shard_map(block, **inside, axis_names={"d"})
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays[0], P(None, "d")), jax.device_put(filters, P())
        for body in bodies:
            found = jax.jit(jax.vmap(jax.grad(ft.partial(loss, body), (0, 1)), (0, None)))(*placed)
            assert jax.typeof(found[0]).sharding.spec == P(None, "d", None, None, None)
            for ours, alone in zip(found, expected, strict=True):
                np.testing.assert_array_equal(ours, alone)


@each_kind
def test_sharded_vmap_and_scan(kind: str, mesh: Mesh):
    case = cases.case("conv", KINDS[kind], 5, integers=2)
    x, w = (jnp.asarray(a) for a in case.arrays)
    stacked = jnp.stack([w, 2 * w])
    placed = jax.device_put(x, batch_sharding(mesh, case, 0))
    many = jax.jit(jax.vmap(lambda v: helpers.call(case, placed, v)))(stacked)
    np.testing.assert_array_equal(many[1], 2 * many[0])
    np.testing.assert_array_equal(many[0], helpers.call(case, x, w))
    last = jax.jit(lambda x: jax.lax.scan(lambda c, v: (c + helpers.call(case, x, v), None), 0 * many[0], stacked)[0])
    np.testing.assert_array_equal(last(placed), 3 * np.asarray(many[0]))


def test_bias_gradient(mesh: Mesh):
    case = cases.case("conv_bgrad", KINDS["grouped"], 1, integers=3)
    out, found = run(lambda dy: dnn.conv_bgrad(dy), case.arrays, [batch_sharding(mesh, case, 0)])
    assert found == {"all-reduce"}
    helpers.check(case, out)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("place", [P("d"), P(None, "d"), P(None, None, None, "d")], ids=["batch", "rows", "channels"])
def test_a_convolution_that_hands_on_what_it_reads(kind: AxisType, place: P):
    """Its results and gradients on a mesh, of whole numbers; also where nothing says how they are sharded."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    rng = np.random.default_rng(5)
    x, w, dy, dh = (
        rng.integers(-3, 4, shape).astype(np.float32)
        for shape in ((8, 16, 6, 8), (3, 3, 8, 16), (8, 16, 6, 16), (8, 16, 6, 8))
    )

    def both(x: Any, w: Any, dy: Any, dh: Any) -> Any:
        results, back = jax.vjp(lambda x, w: dnn.conv_skip(x, w, padding=1, input_activation="relu"), x, w)
        return *results, *back((dy, dh))

    wanted = jax.jit(both)(x, w, dy, dh)
    placed = [jax.device_put(v, NamedSharding(mesh, p)) for v, p in zip((x, w, dh), (place, P(), place), strict=True)]
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x, w: dnn.conv_skip(x, w, padding=1)[0])(*placed[:2])
        found = jax.jit(both)(*placed[:2], jax.device_put(dy, y.sharding), placed[2])
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
