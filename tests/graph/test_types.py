"""Dtypes and layouts: nodes in float64, whole numbers in int32, convolutions of each dtype in any order of axes."""

import json
import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxdnn._src.graph.pointwise import MODES
from jaxdnn._src.graph.tensors import packed
from jaxdnn.graph import Graph
from jaxdnn_reference import graph as definition
from tests.graph.examples import EXAMPLES, filled
from tests.graph.test_nodes import worst

NARROW = ("block_scale", "conv_int8", "sdpa_fp8")
WIDE = [name for name in EXAMPLES if not name.startswith(NARROW)]


@pytest.mark.parametrize("name", WIDE)
def test_float64(name: str):
    """The same graph in float64, computed in float64: the errors are those of 53 bits."""
    graph, arrays = EXAMPLES[name](np.random.default_rng(21))
    text = graph.to_json().replace('"float32"', '"float64"').replace('"bfloat16"', '"float64"')
    with jax.enable_x64(True):
        wide = Graph.from_description(json.loads(text))
        given = {uid: v.astype(np.float64) if v.dtype.kind in "fV" else v for uid, v in arrays.items()}
        found = {uid: np.asarray(v) for uid, v in ((t.uid, wide.plan()(given)[t]) for t in wide.outputs())}
        assert all(v.dtype in (np.float64, np.bool_, np.int8) for v in found.values())
        assert worst(wide, given, found) <= 1


WHOLE = [mode for mode, how in MODES.items() if how.integers and mode != "GEN_INDEX"]


@pytest.mark.parametrize("mode", WHOLE)
def test_whole_numbers_wrap(mode: str):
    g = Graph(io_data_type="int32", intermediate_data_type="int32", compute_data_type="int32")
    tensors: list[Any] = [g.tensor((3, 4), name=f"x{i}") for i in range(MODES[mode].inputs)]
    g.pointwise(mode, *tensors).set_output(True)
    rng = np.random.default_rng(22)
    ends = np.array([-(2**31), 2**31 - 1, 0, 1, -1, 46341], np.int32)
    arrays = {t.uid: rng.choice(ends, (3, 4)).astype(np.int32) for t in tensors}
    (wanted,) = definition.evaluate(g.describe(), arrays).values()
    (found,) = g.plan()(arrays).values()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("mode", ["ADD", "MUL", "MIN", "MAX", "AMAX", "NORM1", "MUL_NO_ZEROS"])
def test_reductions_of_whole_numbers_wrap(mode: str):
    g = Graph(io_data_type="int32", compute_data_type="int32")
    y = g.reduction(g.tensor((3, 4), name="x"), mode).set_dim((3, 1)).set_output(True)
    x = np.array([[2**31 - 1, 5, -(2**31), 0], [65537, 65539, -65543, 3], [-(2**31), -(2**31), 1, -7]], np.int32)
    (wanted,) = definition.evaluate(g.describe(), {1: x}).values()
    np.testing.assert_array_equal(g.plan()({1: x})[y], wanted)
    if mode == "MUL":
        exact = [math.prod(map(int, row)) for row in x]
        np.testing.assert_array_equal(wanted[:, 0], [(v + 2**31) % 2**32 - 2**31 for v in exact])


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32"])
@pytest.mark.parametrize("target", ["int8", "uint8", "int32", "bool", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_identity_converts_by_one_rounding(source: str, target: str):
    """Ties to even, integers saturated, NaN to 0 of them."""
    g = Graph(io_data_type=source)
    x = g.tensor((14,), name="x")
    g.identity(x).set_output(True).set_data_type(target)
    values = [0.5, 1.5, -0.5, 2.5, 127.5, -128.5, 300, -300, 3e9, -3e9, 0, 1e-3, 17, 400]
    values = (
        values if source != "int32" else [0, 1, -1, 127, 128, -128, -129, 255, 256, 2**31 - 1, -(2**31), 7, 17, 400]
    )
    values = np.array(values)
    x = np.asarray(definition.converted(values, source))
    (found,) = g.plan()({"x": x}).values()
    (wanted,) = definition.evaluate(g.describe(), {1: x}).values()
    np.testing.assert_array_equal(np.float64(found), np.float64(wanted))


DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")


@pytest.mark.parametrize("seed", range(15))
def test_convolutions_in_any_order_of_axes(seed: int):
    """One to three spatial axes, strides of any order, groups, each dtype, forward and both gradients."""
    rng = np.random.default_rng([23, seed])
    spatial, dtype, groups = 1 + seed % 3, DTYPES[seed % 5], int(rng.choice([1, 2]))
    each = lambda low, high: tuple(int(v) for v in rng.integers(low, high, spatial))
    x, w = (2, 2 * groups, *each(4, 7)), (3 * groups, 2, *each(1, 4))
    how: dict[str, Any] = {
        "stride": each(1, 3),
        "dilation": each(1, 2),
        "pre_padding": each(0, 2),
        "post_padding": each(0, 2),
    }
    how["convolution_mode"] = str(rng.choice(["CROSS_CORRELATION", "CONVOLUTION"]))
    compute = "int32" if dtype == "int8" else "float32"
    laid = lambda dim: packed(dim, [int(a) for a in rng.permutation(len(dim))])
    g = Graph(io_data_type=dtype, intermediate_data_type=compute, compute_data_type=compute)
    image, weight = g.tensor(x, laid(x), name="x"), g.tensor(w, laid(w), name="w")
    out = str(rng.choice(["int8", "int32"])) if dtype == "int8" else str(rng.choice(["float32", "bfloat16"]))
    y = g.conv_fprop(image, weight, **how).set_output(True).set_data_type(out)
    if dtype != "int8":
        dim = y.get_dim()
        dy = g.tensor(dim, laid(dim), name="dy")
        g.conv_dgrad(dy, weight, **how).set_dim(x).set_output(True).set_data_type("float32")
        g.conv_wgrad(image, dy, **how).set_dim(w).set_stride(laid(w)).set_output(True).set_data_type("float32")
    graph, arrays = filled(g, rng)
    assert worst(graph, arrays, graph.plan()(arrays)) <= 1


@pytest.mark.parametrize("out", ["int8", "bool", "float8_e4m3fn", "float16", "int32"])
@pytest.mark.parametrize(
    "op", ["resample_AVGPOOL_INCLUDE_PADDING", "instancenorm", "rmsnorm", "matmul", "sdpa_plain", "conv_fprop"]
)
def test_results_of_any_dtype(op: str, out: str):
    """What the op itself does not return is converted to from the compute dtype, by one rounding."""
    graph, arrays = EXAMPLES[op](np.random.default_rng(24))
    graph.outputs()[0].set_data_type(out)
    assert worst(graph, arrays, graph.plan()(arrays)) <= 1


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float16"])
def test_numbers_that_are_known_are_those_of_their_dtype(dtype: str, by_value: bool):
    """An epsilon of 1e-3 is 0.0009765625 in float8_e5m2."""
    g = Graph(io_data_type="float32")
    how: dict[str, Any] = {"is_pass_by_value": True, "name": "epsilon"}
    epsilon = g.tensor((1,), data_type=dtype, **how) if by_value else g.tensor_scalar(1e-3, dtype)
    x, scale = g.tensor((5, 4), name="x"), g.tensor((1, 4), name="scale")
    y = g.rmsnorm("INFERENCE", x, scale, epsilon=epsilon)[0].set_output(True)
    values = np.full((5, 4), 1e-3, np.float32)
    arrays: dict[Any, Any] = {"x": values, "scale": np.ones((1, 4), np.float32)}
    found = g.plan()({**arrays, "epsilon": 1e-3} if by_value else arrays)[y]
    known = float(np.asarray(definition.converted(np.array(1e-3), dtype), np.float64))
    np.testing.assert_allclose(found, values / np.sqrt(1e-6 + known), rtol=1e-6)


@pytest.mark.parametrize("op", ["gelu", "matmul", "reduction"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_what_reads_an_output_reads_what_was_written(dtype: str, op: str):
    """Bit for bit; and the program says so, for compilers may leave out a conversion and back."""
    g = Graph("again", io_data_type="float32")
    x = g.tensor((2, 8, 8), name="x")
    y = {"gelu": lambda: g.gelu(x), "matmul": lambda: g.matmul(x, x), "reduction": lambda: g.reduction(x, "ADD")}[op]()
    y = y.set_output(True).set_data_type(dtype)
    if op == "reduction":
        y.set_dim((2, 8, 1))
    z = g.identity(y).set_output(True).set_data_type("float32")
    plan, arrays = g.plan("FALLBACK"), {"x": np.random.default_rng(71).standard_normal((2, 8, 8)).astype(np.float32)}
    found = plan(arrays)
    np.testing.assert_array_equal(found[y].astype(np.float32), found[z])
    text = jax.jit(plan.function).lower(arrays["x"]).as_text()
    assert ("reduce_precision" if dtype == "bfloat16" else "optimization_barrier") in text
    dx = jax.grad(lambda v: plan({"x": v})[z].sum())(arrays["x"])
    assert np.isfinite(dx).all()
    assert np.abs(dx).max() > 0


def test_numbers_of_float64_are_float64():
    """Of a node that computes in float64 a Python number is rounded no further."""
    types = dict.fromkeys(("io_data_type", "intermediate_data_type", "compute_data_type"), "float64")
    with jax.enable_x64(True):
        g = Graph("wide", **types)
        y = g.mul(g.tensor((2,), name="x"), 0.1).set_output(True)
        np.testing.assert_array_equal(g.plan()({"x": np.array([1.0, 3.0])})[y], [0.1, 3 * 0.1])


@pytest.mark.parametrize("slope", [-1.0, 0.5, 2.0])
def test_a_slope_may_be_any_number(slope: float):
    g = Graph(io_data_type="float32")
    y = g.relu(g.tensor((2, 3), name="x"), slope).set_output(True)
    x = np.array([[-2, -1, 0], [0.5, 1, 3]], np.float32)
    np.testing.assert_allclose(g.plan()({"x": x})[y], np.where(x > 0, x, slope * x))
