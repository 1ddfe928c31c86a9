"""Convolution, its adjoints and the transposed convolution: values, over random geometries and all dtypes."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxdnn as dnn
import jaxdnn_reference as reference
from tests.conv import cases, helpers
from tests.conv.cases import Case, Geometry

each_op = pytest.mark.parametrize("op", cases.RANDOM_OPS)
BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LAYOUTS = ("NWC", "NCW", "CWN", "NHWC", "NCHW", "CHWN", "NDHWC", "NCDHW", "CDHWN", "NCWc2", "NCHWc2", "NCDHWc2")


# ---- random geometries -----------------------------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize("start", [0, 25])
def test_random_geometries(op: str, start: int):
    helpers.check_all(cases.random_case(op, seed) for seed in range(start, start + 25))


@each_op
def test_random_geometries_on_whole_numbers_are_exact(op: str):
    many = [cases.random_case(op, seed, integers=2) for seed in range(100, 120)]
    assert sum(map(helpers.case_is_exact, many)) > 12
    helpers.check_all(many)


@each_op
@pytest.mark.usefixtures("x64")
def test_random_geometries_against_lax_in_float64(op: str):
    """An outside golden: JAX's own convolution and its derivatives agree with the definition, and so do we."""
    many = [cases.random_case(op, seed, dtype=np.float64) for seed in range(200, 215)]
    for case, ours, theirs in zip(
        many, helpers.compute_all(many), helpers.compute_all(many, helpers.lax_call), strict=True
    ):
        helpers.check(case, theirs)
        helpers.check(case, ours)


def test_random_geometries_cover_what_they_should():
    drawn = [cases.random_geometry(seed) for seed in range(150)]
    assert {g.layout.partition("c")[0] for g in drawn} == {name for name in LAYOUTS if "c" not in name}
    assert {len(g.sizes) for g in drawn} == {1, 2, 3}
    assert {g.mode for g in drawn} == {"cross_correlation", "convolution"}
    assert {type(g.padding) if not isinstance(g.padding, str) else g.padding for g in drawn} == {
        int,
        tuple,
        "SAME",
        "VALID",
    }
    for found in (
        any(g.batch == 0 for g in drawn),
        any(1 in g.sizes for g in drawn),
        any(g.groups == g.channels == g.filters > 1 for g in drawn),
        any(1 < g.groups == g.channels < g.filters for g in drawn),
        any(1 < g.groups < g.channels for g in drawn),
        any(g.filter_layout and "K" in g.filter_layout for g in drawn),
        any(g.filter_layout and "O" in g.filter_layout for g in drawn),
        any(max(g.window.stride) > max(g.taps) for g in drawn),
        any(min(max(g.window.dilation), max(g.window.stride), g.groups) > 1 for g in drawn),
        any(low != high for g in drawn for low, high in g.window.padding),
    ):
        assert found


def test_builder_refuses_equal_sizes():
    with pytest.raises(AssertionError, match="pairwise distinct"):
        Geometry(2, (5, 3), 3, 4, (1, 2))


# ---- layouts and ways to say the same --------------------------------------------------------------------------------


def of_layout(layout: str) -> Geometry:
    rank = len(layout.partition("c")[0]) - 2
    sizes, taps = (5, 7, 3)[:rank], (3, 1, 2)[:rank]
    return Geometry(batch=1, channels=4, filters=6, sizes=sizes, taps=taps, stride=2, padding=1, layout=layout)


@each_op
def test_every_layout(op: str):
    helpers.check_all(cases.case(op, of_layout(layout), 1) for layout in LAYOUTS)


def test_bias_gradient_in_every_layout_and_dtype():
    helpers.check_all(cases.case("conv_bgrad", of_layout(layout), 2) for layout in LAYOUTS)
    dtypes = (BF16, np.float16, E4M3, E5M2, np.int8)
    helpers.check_all(cases.case("conv_bgrad", cases.PLAIN, 3, dtype=dtype) for dtype in dtypes)
    many = [
        cases.case("conv_bgrad", cases.LINE, 4, dtype=np.int8).with_options(out_dtype=t) for t in ("int32", "float32")
    ]
    helpers.check_all(many)
    helpers.check_all([cases.case("conv_bgrad", cases.VOLUME, 5).with_epilogue(5, alpha=-0.5, beta=2.0, prior=True)])


def test_bias_gradient_of_integers_is_the_definition_s_to_the_last_bit():
    """LLVM knows that a sum of integers is not NaN, and would contract its product by alpha with what is added."""
    rng = np.random.default_rng(8)
    dy, prior = rng.integers(-128, 128, (2, 3, 999)).astype(np.int8), rng.normal(size=999).astype(np.float32) * 300
    blend: dict[str, Any] = {"layout": "NWC", "alpha": 0.3, "beta": 1.0, "out_dtype": np.float32}
    found = jax.jit(lambda dy, prior: dnn.conv_bgrad(dy, prior=prior, determinism="portable", **blend))(dy, prior)
    np.testing.assert_array_equal(found, reference.conv_bgrad(dy, prior=prior, arithmetic="ordered", **blend))


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("op", ["conv", "conv_dgrad", "conv_wgrad", "conv_transpose"])
def test_a_blend_is_the_definition_s_to_the_last_bit(op: str, dtype: Any):
    rng = np.random.default_rng(9)
    of = lambda *shape: rng.standard_normal(shape).astype(dtype)
    x, w, y = of(2, 9, 8, 4), of(3, 3, 4, 6), of(2, 7, 6, 6)
    arguments = {
        "conv": (x, w),
        "conv_dgrad": (y, w, x.shape),
        "conv_wgrad": (x, y, w.shape),
        "conv_transpose": (y, w),
    }[op]
    shape = {"conv": y, "conv_dgrad": x, "conv_wgrad": w, "conv_transpose": x}[op].shape
    prior = rng.standard_normal(shape).astype(np.float32)
    blend: dict[str, Any] = {"alpha": 0.3, "beta": 0.7, "prior": prior, "out_dtype": np.float32}
    found = getattr(dnn, op)(*arguments, engine="ordered", **blend)
    np.testing.assert_array_equal(found, getattr(reference, op)(*arguments, arithmetic="ordered", **blend))


@pytest.mark.parametrize("letters", ["KCRS", "OIHW"])
def test_every_order_of_a_filter(letters: str):
    layouts = ["".join(order) for order in itertools.permutations(letters)]
    geometries = [dataclasses.replace(cases.PLAIN, filter_layout=layout) for layout in layouts]
    results = helpers.compute_all([cases.case("conv", g, 1) for g in geometries])
    for geometry, out in zip(geometries, results, strict=True):
        helpers.check(cases.case("conv", geometry, 1), out)


def test_default_filter_layouts():
    shapes = {layout: of_layout(layout).shape("w") for layout in LAYOUTS}
    assert shapes["NHWC"] == (3, 1, 4, 6)
    assert shapes["NCHW"] == shapes["CHWN"] == (6, 4, 3, 1)
    assert shapes["NCHWc2"] == (6, 2, 3, 1, 2)
    for layout, shape in shapes.items():
        g = of_layout(layout)
        assert dnn.conv(jnp.ones(g.shape("x")), jnp.ones(shape), **g.options()).shape == g.shape("y")


def test_arguments_may_be_said_in_several_ways():
    x, w = (jnp.asarray(a) for a in cases.case("conv", dataclasses.replace(cases.PLAIN, stride=1, padding=0)).arrays)
    first = dnn.conv(x, w, stride=2, padding=1, dilation=1)
    ways: list[tuple[Any, Any, Any]] = [
        ((2, 2), (1, 1), (1, 1)),
        ([2, 2], [1, 1], [1, 1]),
        (np.int64(2), np.int32(1), np.uint8(1)),
        (np.array([2, 2]), np.array([1, 1]), np.array([1, 1])),
        (2, ((1, 1), (1, 1)), 1),
        (2, [1, (1, 1)], 1),
        (2, np.ones((2, 2), int), 1),
    ]
    for stride, padding, dilation in ways:
        np.testing.assert_array_equal(dnn.conv(x, w, stride=stride, padding=padding, dilation=dilation), first)
    np.testing.assert_array_equal(dnn.conv(np.asarray(x), np.asarray(w), stride=2, padding=1), first)


def test_same_padding_puts_the_odd_zero_behind():
    x, w = jnp.arange(1.0, 5.0).reshape(1, 4, 1), jnp.array([10.0, 1.0]).reshape(2, 1, 1)
    np.testing.assert_array_equal(dnn.conv(x, w, padding="SAME", layout="NWC").ravel(), [12, 23, 34, 40])
    assert dnn.conv(x, w, padding="SAME", stride=3, layout="NWC").shape == (1, 2, 1)
    np.testing.assert_array_equal(dnn.conv(x, w, padding="SAME_LOWER", layout="NWC").ravel(), [1, 12, 23, 34])


@pytest.mark.parametrize("stride", [1, 2])
def test_same_lower_is_jax_s(stride: int):
    """Even and odd windows, where the odd zero goes before; exactly, on whole numbers."""
    rng = np.random.default_rng(3)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((2, 6, 5, 3), (4, 2, 3, 4)))
    how: dict[str, Any] = {"stride": stride, "padding": "SAME_LOWER"}
    y = dnn.conv(x, w, **how)
    axes = ("NHWC", "HWIO", "NHWC")
    steps = ((stride, stride), "SAME_LOWER")
    wanted = lax.conv_general_dilated(jnp.asarray(x), jnp.asarray(w), *steps, dimension_numbers=axes)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(y, reference.conv(x, w, **how))
    back = dnn.conv_transpose(y, w, **how)
    np.testing.assert_array_equal(back, reference.conv_transpose(np.asarray(y), w, **how))
    assert back.shape[1:3] == (y.shape[1] * stride, y.shape[2] * stride)
    most = dnn.pool(x, window=(4, 2), **how)
    np.testing.assert_array_equal(most, reference.pool(x, window=(4, 2), **how))
    found = lax.reduce_window(x, -np.inf, lax.max, (1, 4, 2, 1), (1, stride, stride, 1), "SAME_LOWER")
    np.testing.assert_array_equal(most, found)


# ---- other libraries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_modes_are_those_of_scipy(rank: int):
    signal = pytest.importorskip("scipy.signal")  # which takes a second to import, in every process that collects tests
    rng = np.random.default_rng(rank)
    x = rng.integers(-3, 4, (7, 6, 5)[:rank]).astype(np.float32)
    w = rng.integers(-3, 4, (2, 3, 4)[:rank]).astype(np.float32)
    full = tuple((size - 1, size - 1) for size in w.shape)
    layout = {1: "NWC", 2: "NHWC", 3: "NDHWC"}[rank]
    for mode, theirs in (("convolution", signal.convolve), ("cross_correlation", signal.correlate)):
        ours = dnn.conv(x[None, ..., None], w[..., None, None], mode=mode, padding=full, layout=layout)
        np.testing.assert_array_equal(ours[0, ..., 0], theirs(x, w, "full", method="direct"))


def test_transposed_convolution_is_that_of_lax():
    """As the docstring has it: mode "convolution", and the filter's channel axes exchanged."""
    x, w = cases.case("conv_transpose", Geometry(2, (9, 8), 4, 5, (3, 2), stride=2), 1, integers=3).arrays
    theirs = lax.conv_transpose(x, w.swapaxes(2, 3), (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    np.testing.assert_array_equal(dnn.conv_transpose(x, w, stride=2, mode="convolution"), theirs)


@pytest.mark.parametrize(
    ("stride", "dilation", "padding"), [(1, 4, 0), (2, 3, 1), (2, 5, 4), (3, 4, (0, 7)), (3, 2, 2)]
)
@pytest.mark.parametrize("layout", ["NWC", "NCW"])
def test_output_padding_below_stride_or_dilation(layout: str, stride: int, dilation: int, padding: Any):
    """As PyTorch and ONNX allow it: each element of x is added where the filter puts it, as long as the result is."""
    rng, (low, high) = np.random.default_rng(5), (padding, padding) if isinstance(padding, int) else padding
    x, w, bias = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((2, 6, 4), (3, 5, 4), (5,)))
    for extra in {min(stride, max(stride, dilation) - 1), max(stride, dilation) - 1}:
        size = 5 * stride - low - high + 2 * dilation + 1 + extra
        expected = np.broadcast_to(bias, (2, size, 5)).copy()
        for p, r in np.ndindex(6, 3):
            if 0 <= (h := p * stride + r * dilation - low) < size:
                expected[:, h] += x[:, p] @ w[r].T
        options: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": ((low, high),)}
        options |= {"output_padding": extra, "layout": layout, "filter_layout": "WIO", "bias": bias}
        given = x if layout == "NWC" else x.transpose(0, 2, 1)
        for y in (dnn.conv_transpose(given, w, **options), reference.conv_transpose(given, w, **options)):
            np.testing.assert_array_equal(np.asarray(y if layout == "NWC" else y.transpose(0, 2, 1)), expected)
        loss = lambda x, o=options: jnp.sum(dnn.conv_transpose(x, w, **o) ** 2) / 2
        dy = jnp.asarray(y, jnp.float32)
        back = {k: v for k, v in options.items() if k not in ("output_padding", "bias")}
        wanted = dnn.conv(dy, w, **back)
        wanted = wanted[:, :6] if layout == "NWC" else wanted[..., :6]
        np.testing.assert_array_equal(jax.grad(loss)(jnp.asarray(given)), wanted)


def test_transposed_convolution_undoes_shapes():
    for seed in range(300, 340):
        case = cases.random_case("conv_transpose", seed)
        out = jax.eval_shape(lambda *a, c=case: helpers.call(c, *a), *cases.as_jax(case))
        assert out.shape == case.geometry.shape("x"), case


def test_adjoints():
    """<conv(x, w), dy> = <x, dgrad(dy, w)> = <w, wgrad(x, dy)>, exactly on whole numbers."""
    forward = [cases.random_case("conv", seed, integers=2) for seed in range(400, 412)]
    dys = [cases.random_case("conv_dgrad", seed, integers=2).arrays[0] for seed in range(400, 412)]
    data, filters = [], []
    for case, dy in zip(forward, dys, strict=True):
        g, (x, w) = case.geometry, case.arrays
        data.append(Case("conv_dgrad", g, (dy, w), (g.shape("x"),), case.options))
        filters.append(Case("conv_wgrad", g, (x, dy), (g.shape("w"),), case.options))
    results = helpers.compute_all([*forward, *data, *filters])
    for i, (case, dy) in enumerate(zip(forward, dys, strict=True)):
        (x, w), (y, dx, dw) = case.arrays, results[i :: len(forward)]
        assert np.vdot(y, dy) == np.vdot(x, dx) == np.vdot(w, dw), helpers.reproduction(case.origin)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize("dtype", [BF16, np.float16, E4M3, E5M2, np.int8], ids=lambda d: np.dtype(d).name)
def test_narrow_dtypes(op: str, dtype: Any):
    helpers.check_all(cases.random_case(op, seed, dtype=dtype) for seed in range(500, 506))


@each_op
def test_two_kinds_of_float8(op: str):
    case = cases.case(op, cases.GROUPED, 1, dtype=E4M3)
    mixed = dataclasses.replace(case, arrays=(case.arrays[0], case.arrays[1].astype(E5M2)), origin="")
    helpers.check_all([mixed, mixed.with_options(out_dtype=E5M2), mixed.with_options(out_dtype="float32")])


@each_op
def test_result_dtypes(op: str):
    many = [
        cases.case(op, cases.PLAIN, 1, dtype=dtype).with_options(out_dtype=np.dtype(out).name)
        for dtype, out in (
            (np.float32, BF16),
            (np.float32, np.float16),
            (np.float32, E4M3),
            (BF16, np.float32),
            (BF16, np.float16),
            (np.float16, E5M2),
            (np.int8, np.int32),
            (np.int8, np.float32),
            (np.int8, BF16),
        )
    ]
    helpers.check_all(many)


@each_op
@pytest.mark.usefixtures("x64")
def test_float64_accumulator(op: str):
    many = [cases.case(op, g, 1, dtype=t) for g in (cases.PLAIN, cases.GROUPED) for t in (np.float32, BF16, np.float16)]
    helpers.check_all(case.with_options(accumulate="float64") for case in many)
    helpers.check_all(case.with_options(accumulate="float64", out_dtype="float64") for case in many)


MANY_TAPS = {
    "depthwise": Geometry(2, (20, 18), 3, 6, (13, 11), groups=3),
    "grouped": Geometry(2, (15, 16), 32, 4, (13, 11), groups=2),
}


@pytest.mark.parametrize("geometry", MANY_TAPS)
@pytest.mark.parametrize("bits", [32, 64])
def test_filters_of_so_many_taps_that_a_loop_adds_them(geometry: str, bits: int):
    """In JAX's 64-bit mode its loops count in int64."""
    with jax.enable_x64(bits == 64):
        for op in cases.RANDOM_OPS:
            helpers.check(cases.case(op, MANY_TAPS[geometry], 1, integers=2))


@pytest.mark.parametrize("groups", [1, 4, 20])
def test_backward_data_of_large_strides(groups: int):
    """More stride phases than are unrolled; 10^5 of them along an axis must not take 10^5 convolutions."""
    plane = Geometry(2, (60, 47), 20, 40, (3, 2), stride=(19, 17), padding=(5, 1), groups=groups)
    line = Geometry(2, (7,), 20, 40, (3,), stride=100_000, dilation=2, groups=groups, layout="NCW")
    for geometry in (plane, line):
        for op in ("conv", "conv_dgrad"):
            helpers.check(cases.case(op, geometry, 1, integers=3))


@each_op
def test_tf32_truncates_the_operands(op: str):
    many = [cases.case(op, g, 1).with_options(precision="tf32") for g in cases.GEOMETRIES.values()]
    helpers.check_all(many)
    exact = helpers.compute_all([cases.case(op, g, 1) for g in cases.GEOMETRIES.values()])
    assert any(not np.array_equal(a, b) for a, b in zip(exact, helpers.compute_all(many), strict=True))


def test_tf32_of_a_constant_whose_dimensions_are_permuted():
    """XLA folds the bitcast of such a constant to wrong values."""
    rng, rows = np.random.default_rng(5), np.array([2, 0, 3, 1])
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 5, 6, 7), (1, 1, 7, 3)))
    run = lambda x, w: dnn.conv(x[:, :, rows], w, precision="tf32")
    found = jax.jit(lambda w: run(jnp.asarray(x), w))(w)
    np.testing.assert_array_equal(found, jax.jit(run)(x, w))


@pytest.mark.usefixtures("x64")
def test_default_precision_of_jax_is_not_read():
    case = cases.case("conv", cases.PLAIN, 1)
    with jax.default_matmul_precision("bfloat16"):
        helpers.check(case)


def long_sum(values: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((1, 1, count), values[0], np.int8), np.full((1, count, 1), values[1], np.int8)


@pytest.mark.parametrize(("pair", "count"), [((127, 127), 140_000), ((-128, -128), 2**17), ((-128, 127), 2**18 + 1)])
def test_int8_sums_wrap_in_int32(pair: tuple[int, int], count: int):
    total = (pair[0] * pair[1] * count + 2**31) % 2**32 - 2**31
    x, w = long_sum(pair, count)
    assert dnn.conv(x, w, layout="NWC", out_dtype="int32").item() == total
    assert dnn.conv(x, w, layout="NWC").item() == max(-128, min(127, total))
    assert dnn.conv(x, w, layout="NWC", out_dtype="float32").item() == np.float32(total)
    bias = np.full(1, 2**31 - 1, np.int32)
    assert dnn.conv(x, w, layout="NWC", out_dtype="int32", bias=bias).item() == (total + 2**32 - 1) % 2**32 - 2**31


def test_int8_results_saturate_and_round_to_even():
    x, w = np.array([[[-100], [3], [100], [1]]], np.int8), np.full((1, 1, 1), 5, np.int8)
    np.testing.assert_array_equal(dnn.conv(x, w, layout="NWC").ravel(), [-128, 15, 127, 5])
    np.testing.assert_array_equal(dnn.conv(x, w, layout="NWC", alpha=0.5).ravel(), [-128, 8, 127, 2])
    np.testing.assert_array_equal(dnn.conv(x, w, layout="NWC", alpha=0.1).ravel(), [-50, 2, 50, 0])


def test_float8_results_overflow_as_their_format_says():
    x, w = jnp.full((1, 2, 3), 440, E4M3), jnp.ones((1, 3, 1), E4M3)
    assert np.isnan(np.asarray(dnn.conv(x, w, layout="NWC"), np.float32)).all()
    x, w = jnp.full((1, 2, 3), -50000, E5M2), jnp.ones((1, 3, 1), E5M2)
    np.testing.assert_array_equal(np.asarray(dnn.conv(x, w, layout="NWC"), np.float32), -np.inf)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("op", ["conv", "conv_dgrad", "conv_wgrad"])
def test_infinities_that_meet_the_padding(op: str, dtype: Any):
    """They are NaN by the definition. Engine `ordered` gives that; XLA's states that it may leave them out."""
    case = cases.case(op, cases.GROUPED, 1, dtype=dtype, integers=2)
    case.arrays[1].reshape(-1)[1] = np.inf
    golden = getattr(reference, op)(*case.arrays, *case.static, **case.options).astype(np.float64)
    assert np.isnan(golden).any()
    (found,) = dnn.explain(lambda *a: helpers.call(case, *a), *case.arrays)
    assert {c.engine for c in found.candidates if "leaves_out_padding" in c.hazards} == {"xla"}
    ours = np.asarray(helpers.call(case), np.float64)
    np.testing.assert_array_equal(np.where(np.isnan(golden), np.nan, ours), golden)
    if dtype == np.float32:
        np.testing.assert_array_equal(helpers.call(case.with_options(engine="ordered")), golden)


def test_nan_and_infinity_reach_their_windows_only():
    x = np.ones((1, 7, 1), np.float32)
    x[0, 1], x[0, 5] = np.nan, np.inf
    y = np.asarray(dnn.conv(x, np.ones((2, 1, 1), np.float32), layout="NWC")).ravel()
    np.testing.assert_array_equal(y, [np.nan, np.nan, 2, 2, np.inf, np.inf])


# ---- sizes of none and one -------------------------------------------------------------------------------------------


@each_op
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.int8], ids=lambda d: np.dtype(d).name)
def test_empty_batch(op: str, dtype: Any):
    many = [cases.case(op, dataclasses.replace(g, batch=0), dtype=dtype) for g in cases.GEOMETRIES.values()]
    for case, out in zip(many, helpers.compute_all(many), strict=True):
        helpers.check(case, out)
        assert not np.any(np.asarray(out, np.float32))


def test_empty_batch_still_blends():
    g = dataclasses.replace(cases.PLAIN, batch=0)
    dw = cases.case("conv_wgrad", g).with_epilogue(1, beta=2.0, prior=True)
    np.testing.assert_array_equal(helpers.call(dw), 2 * dw.named["prior"])
    db = cases.case("conv_bgrad", g).with_epilogue(1, beta=-1.0, prior=True)
    np.testing.assert_array_equal(helpers.call(db), -db.named["prior"])


def test_no_channels():
    """A sum of nothing is zero, and the epilogue still runs."""
    y = dnn.conv(jnp.ones((2, 5, 0)), jnp.ones((3, 0, 4)), layout="NWC", bias=jnp.arange(4.0))
    np.testing.assert_array_equal(y, np.broadcast_to(np.arange(4.0), (2, 3, 4)))
    assert dnn.conv(jnp.ones((2, 5, 3)), jnp.ones((3, 3, 0)), layout="NWC").shape == (2, 3, 0)
    assert not np.any(dnn.conv_dgrad(jnp.ones((2, 3, 0)), jnp.ones((3, 4, 0)), (2, 5, 4), layout="NWC"))
    assert dnn.conv_wgrad(jnp.ones((2, 5, 0)), jnp.ones((2, 3, 4)), (3, 0, 4), layout="NWC").shape == (3, 0, 4)


def test_an_empty_axis_that_is_padded():
    """Windows that lie in the padding alone."""
    y = dnn.conv(jnp.ones((2, 0, 3)), jnp.ones((2, 3, 4)), layout="NWC", padding=1, bias=jnp.arange(4.0))
    np.testing.assert_array_equal(y, np.broadcast_to(np.arange(4.0), (2, 1, 4)))
    dw = dnn.conv_wgrad(jnp.ones((2, 0, 3)), jnp.ones((2, 1, 4)), (2, 3, 4), layout="NWC", padding=1)
    np.testing.assert_array_equal(dw, np.zeros((2, 3, 4)))
    assert dnn.conv_dgrad(jnp.ones((2, 1, 4)), jnp.ones((2, 3, 4)), (2, 0, 3), layout="NWC", padding=1).shape == (
        2,
        0,
        3,
    )


def test_single_element():
    for op in cases.RANDOM_OPS:
        helpers.check(cases.case(op, Geometry(1, (1, 1, 1), 1, 1, (1, 1, 1), layout="NCDHW"), 3))


# ---- the comparison itself -------------------------------------------------------------------------------------------


def plant(out: jax.Array, fault: str) -> Any:
    at = tuple(size // 2 for size in out.shape)
    return {
        "value": lambda: out.at[at].add(2.0**-10 * jnp.maximum(jnp.abs(out[at]), 1)),
        "nan": lambda: out.at[at].set(jnp.nan),
        "swapped axes": lambda: jnp.swapaxes(out, 1, 2),
        "shape": lambda: out[:-1],
        "dtype": lambda: out.astype(jnp.bfloat16),
        "not an array": lambda: np.asarray(out),
    }[fault]()


@pytest.mark.parametrize("fault", ["value", "nan", "swapped axes", "shape", "dtype", "not an array"])
def test_comparison_finds_planted_faults(fault: str):
    case: Case = cases.case("conv", cases.PLAIN, 1)
    out = helpers.call(case)
    helpers.check(case, out)
    with pytest.raises(AssertionError, match=r"PYTHONPATH=\.:reference python -c"):
        helpers.check(case, plant(out, fault))
