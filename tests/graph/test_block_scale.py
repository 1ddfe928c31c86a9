"""Numbers of few bits with scales of blocks: dequantised exactly, multiplied, quantised again, in cuDNN's order too."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdnn._src.core.explain import traced_calls
from jaxdnn._src.graph.tensors import numpy_dtype
from jaxdnn.graph import Graph, Tensor
from jaxdnn_reference import graph as definition
from tests.graph.examples import Example, filled
from tests.graph.test_nodes import worst
from tests.graph.test_refusals import refused

Draw = np.random.Generator
FORMATS = {
    "mxfp8": ("float8_e4m3fn", "float8_e4m3fn", "float8_e8m0fnu", 32),
    "mxfp8 of both kinds": ("float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", 32),
    "nvfp4": ("float4_e2m1fn", "float4_e2m1fn", "float8_e4m3fn", 16),
}
each = pytest.mark.parametrize("kind", FORMATS)
B, M, N, K = 2, 130, 9, 96


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def powers(rng: Draw, tensor: Tensor) -> np.ndarray[Any, Any]:
    """Scales that are powers of two, in the tensor's memory."""
    return (
        (2.0 ** rng.integers(-5, 5, tensor.get_shape())).astype(np.float32).astype(numpy_dtype(tensor.data_type or ""))
    )


def product(kind: str, tiled: bool, rng: Draw, **how: Any) -> tuple[Graph, Tensor, dict[str, Any]]:
    """The graph of cuDNN's sample: both operands with scales along K, B stored with K fastest."""
    a_type, b_type, scale, block = FORMATS[kind]
    g = Graph("product", **how)
    a = g.tensor((B, M, K), data_type=a_type, name="a")
    b = g.tensor((B, K, N), (K * N, 1, K), b_type, name="b")
    blocks = up(K // block, 4) if tiled else K // block
    rows, columns = (up(M, 128), up(N, 128)) if tiled else (M, N)
    order: dict[str, Any] = {"data_type": scale, "reordering_type": "F8_128x4" if tiled else "NONE"}
    sa = g.tensor((B, rows, blocks), name="sa", **order)
    sb = g.tensor((B, blocks, columns), (blocks * columns, 1, blocks), name="sb", **order)
    a = g.block_scale_dequantize(a, sa, block, name="wide a")
    b = g.block_scale_dequantize(b, sb, [1, block, 1] if tiled else [block], name="wide b")
    return g, g.matmul(a, b, name="product"), {t.name: powers(rng, t) for t in (sa, sb)}


@each
@pytest.mark.parametrize("tiled", [False, True])
def test_products_of_dequantised_operands(kind: str, tiled: bool):
    """In one call, of operands in bfloat16, which holds their numbers: as exact as in float32."""
    rng = np.random.default_rng(41)
    g, y, scales = product(kind, tiled, rng)
    y = g.gelu(
        g.bias(g.scale(y, 0.03125, name="both"), g.tensor((1, 1, N), data_type="float32", name="bias"), name="b")
    )
    y.set_output(True).set_data_type("float32").set_name("y")
    graph, arrays = filled(g, rng, **scales)
    fused, single = graph.plans()
    (part,) = fused.parts
    assert part.nodes[:3] == ("wide a", "wide b", "product")
    assert part.calls == ("matmul",)
    assert [note.partition(" is ")[0] for note in part.notes] == ["operand A", "operand B"]
    assert "is dequantised to bfloat16 first" in str(fused.explain())
    (call,) = traced_calls(lambda v: tuple(fused(v).values()), arrays, platform="cpu")
    assert [v.dtype.name for v in call.avals[:2]] == ["bfloat16", "bfloat16"]
    for plan in (fused, single):
        assert worst(graph, arrays, plan(arrays)) <= 1
    assert part.bytes_moved < single.bytes_moved


def test_scales_in_tiles_lie_as_cudnn_has_them():
    """Element (r, c) of a tile of 128 x 4 lies at 16 (r % 32) + 4 (r // 32) + c, and tiles lie row by row."""
    rng, (rows, columns) = np.random.default_rng(42), (256, 12)
    g = Graph("tiles")
    x = g.tensor((2, rows, 4 * columns), data_type="float8_e4m3fn", name="x")
    s = g.tensor((2, rows, columns), data_type="float8_e4m3fn", name="s", reordering_type="F8_128x4")
    y = g.block_scale_dequantize(x, s, 4).set_output(True).set_data_type("float32")
    memory = rng.integers(1, 0x7E, (2, rows, columns)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    arrays = {x.uid: np.ones(x.get_shape(), ml_dtypes.float8_e4m3fn), s.uid: memory}
    found = np.asarray(g.plan()(arrays)[y])
    for m, r, c in ((0, 0, 0), (0, 1, 0), (0, 33, 2), (1, 127, 3), (0, 128, 0), (1, 200, 11), (1, 70, 5)):
        tile, inner = (r // 128) * (columns // 4) + c // 4, 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4
        assert found[m, r, 4 * c] == np.float32(memory[m].reshape(-1)[512 * tile + inner])
    np.testing.assert_array_equal(found, definition.evaluate(g.describe(), arrays)[y.uid])
    again = Graph.from_json(g.to_json())
    assert again.find("s").get_reordering_type() == "F8_128x4"
    np.testing.assert_array_equal(found, again.plan()(arrays)[y.uid])


@pytest.mark.parametrize(
    ("scale", "negative"), [("float8_e8m0fnu", False), ("float8_e8m0fnu", True), ("float8_e4m3fn", False)]
)
@pytest.mark.parametrize("data", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_every_number_times_every_scale_is_exact(data: str, scale: str, negative: bool):
    """But where float32 holds no normal number, which XLA on CPUs takes for 0. In bfloat16 nothing is lost."""
    count = 16 if data == "float4_e2m1fn" else 256
    g = Graph("all")
    x = g.tensor((256, count), data_type=data, name="x")
    s = g.tensor((256, 1), data_type=scale, name="s")
    y = g.block_scale_dequantize(x, s, [1, count], negative).set_output(True).set_data_type("float32")
    numbers = np.arange(count, dtype=np.uint8)
    given = numbers.astype(ml_dtypes.uint4).view(numpy_dtype(data)) if count == 16 else numbers.view(numpy_dtype(data))
    arrays = {
        x.uid: np.broadcast_to(given, (256, count)),
        s.uid: np.arange(256, dtype=np.uint8).view(numpy_dtype(scale)),
    }
    arrays[s.uid] = arrays[s.uid].reshape(256, 1)
    found, wanted = np.asarray(g.plan()(arrays)[y]), definition.hold(g.describe(), arrays)[y.uid]
    with np.errstate(over="ignore"):
        narrow = wanted.astype(np.float32)
    small = (np.abs(wanted) < 2.0**-126) & (found == 0)
    np.testing.assert_array_equal(np.where(small, 0, found), np.where(small, 0, narrow))
    with np.errstate(over="ignore"):
        held = wanted.astype(ml_dtypes.bfloat16).astype(np.float64)
    normal = np.isfinite(wanted) & (np.abs(wanted) >= 2.0**-126) & (np.abs(wanted) < 2.0**128)
    np.testing.assert_array_equal(held[normal], wanted[normal])


@each
@pytest.mark.parametrize("tiled", [False, True])
def test_results_are_quantised_by_blocks(kind: str, tiled: bool):
    """A product of integers, which is exact, by one rounding; tiles are filled up with bits of 0."""
    _, data, scale, block = FORMATS[kind]
    g = Graph("quantised", io_data_type="float32")
    y = g.matmul(g.tensor((2, 33, 8), name="a"), g.tensor((2, 8, 3 * block), name="b"))
    q, s = g.block_scale_quantize(g.add(y, 0.5), block)
    q.set_data_type(data).set_output(True)
    s.set_data_type(scale).set_output(True).set_reordering_type("F8_128x4" if tiled else "NONE")
    rng = np.random.default_rng(43)
    arrays = {t.uid: rng.integers(-9, 10, t.get_shape()).astype(np.float32) for t in g.inputs()}
    arrays[1] *= 2.0 ** rng.integers(-9, 9, (2, 33, 1)).astype(np.float32)
    arrays[1][0, 5] = 0  # a block of zeros has a scale too
    assert s.get_dim() == ((2, 128, 4) if tiled else (2, 33, 3))
    found, wanted = g.plan()(arrays), definition.evaluate(g.describe(), arrays)
    for tensor in (q, s):
        np.testing.assert_array_equal(
            np.asarray(found[tensor]).astype(np.float32), wanted[tensor.uid].astype(np.float32)
        )


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_quotients_are_rounded_once(kind: str):
    """Numbers of 24 bits, and blocks whose largest is a number of the data's dtype times a scale."""
    _, data, scale, block = FORMATS[kind]
    rng = np.random.default_rng(44)
    x = rng.standard_normal((512, 4 * block)) * np.exp(rng.uniform(-8, 8, (512, 1)))
    most = {"float8_e4m3fn": 448.0, "float4_e2m1fn": 6.0}[data]
    x[::2, ::block] = most * rng.integers(8, 16, (256, 1)) * 2.0 ** rng.integers(-9, 3, (256, 4))
    x[1::2, 1::block] = most * 1.875 * 2.0 ** rng.integers(-9, 3, (256, 1)) * (1 + 2.0**-23)
    g = Graph("quantised")
    q, s = g.block_scale_quantize(g.tensor(x.shape, data_type="float32", name="x"), block)
    q.set_data_type(data).set_output(True)
    s.set_data_type(scale).set_output(True)
    arrays = {1: x.astype(np.float32)}
    found, wanted = g.plan()(arrays), definition.evaluate(g.describe(), arrays)
    for tensor in (s, q):
        np.testing.assert_array_equal(
            np.asarray(found[tensor]).astype(np.float32), wanted[tensor.uid].astype(np.float32)
        )


def test_roundings_to_few_bits_stay_when_they_are_undone():
    """XLA on GPUs leaves out a conversion to 8 bits and back where nothing stands between."""
    g = Graph("there and back", io_data_type="float32")
    q, s = g.block_scale_quantize(g.tensor((4, 64), name="x"), 32)
    q.set_data_type("float8_e4m3fn")
    s.set_data_type("float8_e8m0fnu")
    g.block_scale_dequantize(q, s, 32).set_output(True)
    lowered = jax.jit(g.function()).lower(jnp.zeros((4, 64))).as_text()
    assert lowered.count("optimization_barrier") == 2


def read_twice(g: Graph, y: Tensor) -> None:
    g.exp(g.find("wide a::Y")).set_output(True).set_data_type("float32")


def with_wide_scales(g: Graph, y: Tensor) -> None:
    g.find("sa").set_data_type("float32")


REASONS = {
    read_twice: "operand A: 'wide a::Y' has 2 readers",
    with_wide_scales: "operand A: bfloat16 does not hold products with scales of float32",
}


@pytest.mark.parametrize("change", REASONS)
def test_what_is_dequantised_by_itself_has_a_reason(change: Any):
    rng = np.random.default_rng(45)
    g, y, _ = product("mxfp8", False, rng)
    y.set_output(True).set_data_type("float32")
    change(g, y)
    graph, arrays = filled(g, rng, **{t.name: powers(rng, t) for t in g.inputs() if t.name.startswith("s")})
    plan = graph.plan()
    assert REASONS[change] in [one.reason for one in plan.not_fused]
    assert [part.nodes for part in plan.parts if part.rule] == [("wide b", "product")]
    assert worst(graph, arrays, plan(arrays)) <= 1


def test_an_operand_without_scales_stays_wide():
    """Weights of 8 bits with scales, activations in bfloat16; and in float32, which keeps the product in float32."""
    for io in ("bfloat16", "float32"):
        rng = np.random.default_rng(46)
        g = Graph("weights", io_data_type=io, intermediate_data_type=io)
        w = g.tensor((1, 64, 6), data_type="float8_e4m3fn", name="w")
        s = g.tensor((1, 2, 6), data_type="float8_e8m0fnu", name="s")
        y = g.matmul(g.tensor((1, 5, 64), name="x"), g.block_scale_dequantize(w, s, 32), name="product")
        y.set_output(True)
        graph, arrays = filled(g, rng, s=powers(rng, s))
        fused, single = graph.plans()
        (call,) = traced_calls(lambda v, plan=fused: tuple(plan(v).values()), arrays, platform="cpu")
        assert [v.dtype.name for v in call.avals[:2]] == [io, io]
        for plan in (fused, single):
            assert worst(graph, arrays, plan(arrays)) <= 1


def test_derivatives_of_what_is_multiplied_by():
    """In the activations, of a product with weights that have scales of blocks."""
    rng = np.random.default_rng(47)
    g = Graph("weights", io_data_type="float32")
    w = g.tensor((1, 32, 6), data_type="float8_e4m3fn", name="w")
    s = g.tensor((1, 1, 6), data_type="float8_e8m0fnu", name="s")
    y = g.matmul(g.tensor((1, 5, 32), name="x"), g.block_scale_dequantize(w, s, 32)).set_output(True)
    graph, arrays = filled(g, rng, s=powers(rng, s))
    plan, x = graph.plan(), arrays[graph.find("x").uid]
    found = jax.grad(lambda x: plan({**arrays, graph.find("x").uid: x})[y].sum())(jnp.asarray(x))
    wide = np.asarray(arrays[w.uid], np.float64) * np.asarray(arrays[s.uid], np.float64)
    np.testing.assert_allclose(found[0], np.broadcast_to(wide[0].sum(1), (5, 32)), rtol=1e-6)


REFUSED: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None, str, str, str]] = {
    # of the scales of a (137, 64) with blocks of 32: dim, stride, dtype, order, and the attribute that is named
    "rows that fill no tile": ((137, 4), None, "float8_e8m0fnu", "F8_128x4", "reordering_type"),
    "columns that fill no tile": ((256, 2), None, "float8_e8m0fnu", "F8_128x4", "reordering_type"),
    "a tile too much": ((384, 4), None, "float8_e8m0fnu", "F8_128x4", "descale.dim"),
    "whole tiles that are not in tiles": ((256, 4), None, "float8_e8m0fnu", "NONE", "descale.dim"),
    "wide scales in tiles": ((256, 4), None, "float32", "F8_128x4", "reordering_type"),
    "gaps between tiles": ((256, 4), (8, 1), "float8_e8m0fnu", "F8_128x4", "reordering_type"),
    "an order that is not known": ((137, 2), None, "float8_e8m0fnu", "INT8x32", "reordering_type"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_scales_that_do_not_fit_are_refused(name: str):
    dim, stride, dtype, order, attribute = REFUSED[name]
    g = Graph("bad")

    def build() -> Any:
        x = g.tensor((137, 64), data_type="float8_e4m3fn", name="x")
        s = g.tensor(dim, stride, dtype, name="s", reordering_type=order)
        g.block_scale_dequantize(x, s, 32).set_output(True).set_data_type("float32")
        return g.validate()

    refused(build, "", attribute)


def test_only_scales_lie_in_tiles():
    g = Graph("bad", io_data_type="float8_e4m3fn")
    g.exp(g.tensor((128, 4), name="x", reordering_type="F8_128x4")).set_output(True)
    refused(g.validate, "exp_0", "IN_0")


def example_of(kind: str) -> Example:
    rng = np.random.default_rng(48)
    g, y, scales = product(kind, True, rng)
    y.set_output(True).set_data_type("float32")
    return filled(g, rng, **scales)


@each
def test_planted_faults_in_scales_are_found(kind: str):
    """A scale that is read at its place in row-major order is another number."""
    graph, arrays = example_of(kind)
    wrong = {uid: np.array(v) for uid, v in arrays.items()}
    uid = graph.find("sa").uid
    wrong[uid] = np.roll(wrong[uid], 1, axis=1)
    assert worst(graph, arrays, graph.plan()(wrong)) > 1


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_scales_of_what_is_tiny_huge_or_not_finite(kind: str):
    """The largest scale is the largest there is; NaN in a block makes its scale NaN."""
    _, data, scale, block = FORMATS[kind]
    x = np.zeros((7, block), np.float32)
    x[1:6, 0] = (2.0**-120, 3e38, -np.inf, np.nan, 2.0**-12 * 1.1)
    x[6] = np.linspace(-1, 1, block)
    g = Graph("edges", io_data_type="float32")
    q, s = g.block_scale_quantize(g.tensor(x.shape, name="x"), block)
    q.set_data_type(data).set_output(True)
    s.set_data_type(scale).set_output(True)
    found, wanted = g.plan()({"x": x}), definition.evaluate(g.describe(), {1: x})
    np.testing.assert_array_equal(np.float32(found[s]), np.float32(wanted[s.uid]))
    whole = [row for row in range(7) if row != 4]  # float4 has no NaN
    np.testing.assert_array_equal(
        np.asarray(found[q]).astype(np.float32)[whole], wanted[q.uid].astype(np.float32)[whole]
    )
    assert np.isnan(np.asarray(found[s]).astype(np.float32)[4, 0])


def test_every_scale_is_rounded_up():
    """Of numbers at, just above and just below each number of float8_e4m3fn."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    near = np.concatenate([numbers, np.nextafter(numbers, np.float32(0)), np.nextafter(numbers, np.float32(1e9))])
    near = near[np.abs(near) >= 2.0**-100]
    g = Graph("scales", io_data_type="float32")
    q, s = g.block_scale_quantize(g.tensor((len(near), 1), name="x"), 1)
    q.set_data_type("float4_e2m1fn").set_output(True)
    s.set_data_type("float8_e4m3fn").set_output(True)
    x = (near * 6)[:, None]
    found, wanted = g.plan()({"x": x}), definition.evaluate(g.describe(), {1: x})
    np.testing.assert_array_equal(np.float32(found[s]), np.float32(wanted[s.uid]))
    np.testing.assert_array_equal(np.float32(found[q]), np.float32(wanted[q.uid]))
