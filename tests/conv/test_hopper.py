"""Dense Hopper convolution kernels: their lowering for CUDA, what they refuse, and on a Hopper GPU their values.

Without a GPU nothing here runs a kernel: the interpreter has neither wgmma on boxes nor negative TMA coordinates. The
index arithmetic is checked by brute force in test_hopper_walk.py.
"""

import dataclasses
import itertools
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper import dgrad, fprop, plan
from jaxdnn._src.conv.hopper.epilogue import ACTIVATIONS
from jaxdnn._src.core import engines
from jaxdnn._src.core.explain import traced_calls
from tests.conv.hopper_cases import BF16, CASES, F32, Case, kernel, lowered
from tests.hopper.device import on_hopper

pytestmark = pytest.mark.usefixtures("h200")


@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", CASES)
def test_lowers(name, op, outer):
    module, function, operands, keywords = kernel(op, CASES[name], outer)
    avals = [jax.ShapeDtypeStruct(shape, BF16) for shape in operands]
    reason = module.supports(*avals, **keywords)
    if op == "wgrad" and reason is not None:
        assert CASES[name].groups > 1 or len(CASES[name].taps) == 3
        return
    assert reason is None
    lowered(function, *avals)
    assert module.workspace(*avals, **keywords) >= 0


@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [("float16", "float16"), ("float32", "float32"), ("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float32"),
     ("int8", "int32")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["3x3", "three axes", "three axes, strided"])
def test_lowers_in_every_dtype(name, dtype, out_dtype, op, outer):
    module, function, operands, keywords = kernel(op, CASES[name], outer, out_dtype=jnp.dtype(out_dtype))
    avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in operands]
    assert module.supports(*avals, precision="tf32" if dtype == "float32" else None, **keywords) is None
    lowered(function, *avals)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue_lowers(activation):
    parameter = {"leaky_relu": 0.1, "clipped_relu": 6.0, "swish": 1.0}.get(activation)
    epilogue = Epilogue(0.5, 2.0, prior=True, bias=True, residual=True, activation=(activation, parameter))
    x, w, y = ((2, 8, 8, 64), (3, 3, 64, 96), (2, 8, 8, 96))
    geo = Geometry((8, 8), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    avals = [jax.ShapeDtypeStruct(shape, BF16) for shape in (x, w, y, (96,), y)]
    for out_dtype in (BF16, F32):
        function = lambda *a, out_dtype=out_dtype: fprop.conv_fprop(*a, geo=geo, epilogue=epilogue, out_dtype=out_dtype)
        text = lowered(function, *avals)
        assert text.count("tensor<2x8x8x96x") >= 2


# Narrower and wider than the result: the copy engine wants rows of 16 bytes of each, and the epilogue whole chunks.
@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("channels", [5, 36, 64, 144])
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "other"),
    [("bfloat16", "bfloat16", "float32"), ("float16", "float32", "float16"), ("float8_e5m2", "bfloat16", "float8_e5m2"),
     ("float8_e4m3fn", "float32", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16", "float32")],
)  # fmt: skip
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_an_epilogue_of_other_types_lowers(op, dtype, out_dtype, other, channels, outer):
    case = CASES["3x3"]._replace(**{"k" if op == "fprop" else "c": channels})
    module, _, operands, _ = kernel(op, case, outer)
    epilogue = Epilogue(0.5, 2.0, prior=True, bias=True, residual=True)
    shape = case.dy if op == "fprop" else case.x
    likes = [jax.ShapeDtypeStruct(s, jnp.dtype(other)) for s in (shape, (channels,), shape)]
    avals = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in operands]
    options: dict[str, Any] = dict(geo=case.geometry(outer), epilogue=epilogue, out_dtype=jnp.dtype(out_dtype))
    assert module.supports(*avals, *likes, **options) is None
    lowered(lambda *a: getattr(module, f"conv_{op}")(*a, **options), *avals, *likes)


STRIDED = ["strided, odd", "stride of three", "stem", "one axis, strided, flipped", "three axes, strided"]


def with_an_epilogue(name: str) -> tuple[Case, Any, Any]:
    """A strided case, its backward data with a prior, a bias and relu, and the epilogue's operands."""
    case = CASES[name]
    epilogue = Epilogue(0.5, 2.0, prior=True, bias=True, activation=("relu", None))
    options: dict[str, Any] = dict(geo=case.geometry(), epilogue=epilogue, out_dtype=F32)
    like = [jax.ShapeDtypeStruct(case.x, BF16), jax.ShapeDtypeStruct((case.c,), BF16)]
    assert dgrad.supports(*case.avals("dgrad"), *like, **options) is None
    return case, lambda *a: dgrad.conv_dgrad(*a, **options), like


@pytest.mark.parametrize("name", STRIDED)
def test_strided_backward_data_with_an_epilogue_lowers(name):
    case, function, like = with_an_epilogue(name)
    lowered(function, *case.avals("dgrad"), *like)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(dtype=F32), "no float32 products"),
        (dict(dtype=jnp.float64), "not float64"),
        (dict(out_dtype=jnp.float8_e5m2), "its kernels write"),
        (dict(padding=((-1, 1), (0, 0))), "no negative padding"),
        (dict(epilogue=Epilogue(activation=("softplus", 1.0))), "no activation 'softplus'"),
        (dict(epilogue=Epilogue(alpha=cast(Any, np.float32(2)))), "as numbers"),
    ],
)
def test_reasons(change, text):
    dtype = change.pop("dtype", BF16)
    geo = CASES["3x3"].geometry()
    geo = dataclasses.replace(geo, padding=change.pop("padding", geo.padding))
    x, w = CASES["3x3"].avals("fprop", dtype)
    reason = fprop.supports(x, w, geo=geo, **change)
    assert reason is not None
    assert text in reason


def test_groups_hold_whole_tiles_of_narrow_operands():
    case = CASES["groups"]._replace(k=192)
    x, w = case.avals("fprop", jnp.float8_e5m2)
    like = jax.ShapeDtypeStruct(case.dy, jnp.float8_e5m2)
    options: dict[str, Any] = dict(geo=case.geometry(), out_dtype=BF16)
    assert fprop.supports(x, w, **options) is None
    reason = fprop.supports(x, w, like, epilogue=Epilogue(residual=True), **options)
    assert reason == "its kernels take groups of a multiple of 32 output channels"


@pytest.mark.parametrize(
    ("channels", "options", "text"),
    [
        (24, dict(activation="relu"), "for narrow groups its kernels have no epilogue but a bias"),
        (24, dict(filter_layout="OHWI"), "for narrow groups its kernels take filters whose input and output"),
        (20, dict(), "for narrow groups the copy engine needs rows of 16 bytes"),
    ],
)
def test_a_refusal_of_narrow_groups_says_both_reasons(channels, options, text):
    filters = (channels, 3, 3, 1) if "filter_layout" in options else (3, 3, 1, channels)
    avals = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((2, 9, 9, channels), filters)]
    run = lambda x, w: dnn.conv(x, w, groups=channels, **options)
    (call,) = traced_calls(run, *avals, platform="cuda")
    (engine,) = (engine for engine in engines.registered("conv") if engine.name == "hopper")
    assert re.match(rf"its kernels take groups of 32.*, and {text}", engine.supports(call) or "")


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_pixels_are_numbered_in_32_bits(op):
    """A product over flattened pixels; with a window there are several coordinates."""
    case = Case(2**11, (2**10, 2**10), 8, 16, (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1))
    module, *_ = kernel(op, case, False)
    assert "32 bits" in module.supports(*case.avals(op), geo=case.geometry())
    for served in (case._replace(n=2**11 - 1), case._replace(taps=(2, 1))):
        assert module.supports(*served.avals(op), geo=served.geometry()) is None


# ---- on the hardware: small integers, whose sums are exact

HALOS: dict[str, Case] = {
    "16 channels": Case(3, (17, 21), 16, 64, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "32 channels": Case(3, (17, 21), 32, 64, (3, 5), (1, 1), ((1, 1), (2, 2)), (1, 1)),
    "two chunks": Case(5, (19, 9), 128, 64, (2, 3), (1, 1), ((1, 0), (1, 1)), (1, 1)),
    "three axes": Case(2, (5, 11, 13), 32, 64, (3, 3, 3), (1, 1, 1), ((1, 1), (0, 2), (2, 1)), (1, 1, 1)),
    "three axes, dilated": Case(2, (9, 11, 13), 32, 64, (2, 3, 2), (1, 1, 1), ((1, 1), (2, 2), (2, 1)), (1, 2, 3)),
}


@on_hopper
@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("name", HALOS)
def test_exact_with_a_halo(name, op, outer):
    """Every way to cut the work that shares a load among taps, with the filter in a ring or in memory for good."""
    case = HALOS[name]
    _, _, operands, keywords = kernel(op, case, outer)
    module: Any = {"fprop": fprop, "dgrad": dgrad}[op]
    a, b = (jax.ShapeDtypeStruct(shape, BF16) for shape in operands)
    problem = module.plan(a, b, keywords["geo"], epilogue=None, extras=(), out_dtype=BF16).problem
    rng = np.random.default_rng(2)
    x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in operands)
    want = np.asarray(jnp.asarray(case.definition(op, x, w, outer)).astype(BF16))
    configs = [
        plan.Config(1, (*lead, 8, 8), columns, stages, teams, groups, "p", halo=halo, resident=res, unroll=unroll)
        for lead in (((2,), (1,), (4,)) if len(case.sizes) == 3 else ((),))
        for columns, (teams, groups), halo in itertools.product((32, 64, 128), ((2, 1), (1, 2)), (2, 3))
        for stages, res, unroll in ((3, False, False), (4, True, False), (4, True, True))
    ]
    configs += [dataclasses.replace(c, images=2) for c in configs]
    served = [c for c in configs if plan.check(problem, c) is None]
    assert served
    for config in (served[i] for i in rng.permutation(len(served))[:6]):
        got = jax.jit(lambda a, b, c=config: getattr(module, f"conv_{op}")(a, b, config=c, **keywords))(
            jnp.asarray(x, BF16), jnp.asarray(w, BF16)
        )
        np.testing.assert_array_equal(np.asarray(got), want, err_msg=str(config))


@on_hopper
@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", CASES)
def test_exact_integers(name, op, outer):
    case = CASES[name]
    module, function, operands, keywords = kernel(op, case, outer, out_dtype=F32)
    if reason := module.supports(*(jax.ShapeDtypeStruct(shape, BF16) for shape in operands), **keywords):
        assert op == "wgrad"
        pytest.skip(reason)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, shape).astype(np.float32) for shape in operands)
    got = jax.jit(function)(jnp.asarray(a, BF16), jnp.asarray(b, BF16))
    np.testing.assert_array_equal(np.asarray(got), case.definition(op, a, b, outer))


@on_hopper
@pytest.mark.parametrize("name", STRIDED)
def test_strided_backward_data_with_an_epilogue_is_exact(name):
    case, function, like = with_an_epilogue(name)
    rng = np.random.default_rng(6)
    dy, w = case.whole_numbers("dgrad")
    prior, bias = (rng.integers(-9, 10, operand.shape).astype(np.float32) for operand in like)
    got = jax.jit(function)(*(jnp.asarray(v, BF16) for v in (dy, w, prior, bias)))
    want = np.maximum(0.5 * case.definition("dgrad", dy, w) + 2 * prior + bias, 0)
    np.testing.assert_array_equal(np.asarray(got), want)


@on_hopper
@pytest.mark.parametrize("multiprocessors", [1, 7, 66, 131])
@pytest.mark.parametrize("op", ["conv", "conv_dgrad", "conv_wgrad"])
@pytest.mark.parametrize("name", ["3x3", "strided, odd", "pointwise", "stem", "pointwise, strided", "groups"])
def test_the_number_of_multiprocessors_changes_no_bit(name, op, multiprocessors):
    case = CASES[name]
    if op == "conv_wgrad" and case.groups > 1:
        pytest.skip("which filter gradients of groups are served is a matter of their own tests")
    x, w, dy = (
        jax.random.normal(jax.random.key(i), shape).astype(BF16) for i, shape in enumerate((case.x, case.w(), case.dy))
    )
    keywords: dict[str, Any] = dict(
        stride=case.stride, padding=case.padding, dilation=case.dilation, groups=case.groups, engine="hopper"
    )
    arrays = {"conv": (x, w), "conv_dgrad": (dy, w, x.shape), "conv_wgrad": (x, dy, w.shape)}[op]
    everywhere = getattr(dnn, op)(*arrays, **keywords)
    with dnn.limits(multiprocessors=multiprocessors):
        here = getattr(dnn, op)(*arrays, **keywords)
    np.testing.assert_array_equal(np.asarray(everywhere).view(np.uint16), np.asarray(here).view(np.uint16))


@on_hopper
@pytest.mark.parametrize("multiprocessors", [1, 7, 131])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("op", ["conv", "conv_dgrad", "conv_wgrad"])
def test_the_number_of_multiprocessors_changes_no_bit_of_a_depthwise_convolution(op, dtype, multiprocessors):
    """Under a limit a block has several tiles in turn, in the same shared memory."""
    shapes = ((9, 41, 37, 96), (5, 3, 1, 96), (9, 41, 37, 96))
    x, w, dy = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes))
    keywords: dict[str, Any] = dict(padding="SAME", groups=96, engine="hopper")
    arrays = {"conv": (x, w), "conv_dgrad": (dy, w, x.shape), "conv_wgrad": (x, dy, w.shape)}[op]
    everywhere = getattr(dnn, op)(*arrays, **keywords)
    with dnn.limits(multiprocessors=multiprocessors):
        here = getattr(dnn, op)(*arrays, **keywords)
    np.testing.assert_array_equal(np.asarray(everywhere, np.float32), np.asarray(here, np.float32))


@on_hopper
@pytest.mark.parametrize("sharing", ["round", "snake", "together"])
@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((1, 0), (0, 2))])
def test_rows_without_taps_are_zero(padding, sharing):
    """Also where the memory of the result held something else."""
    case = Case(5, (8, 12), 256, 128, (1, 1), (2, 2), padding, (1, 1))
    config = plan.Config(4, (4, 4), 128, 3, staged=2, blank=3, sharing=sharing)
    _, function, operands, _ = kernel("dgrad", case, False, config=config, sms=5)
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-2, 3, shape).astype(np.float32) for shape in operands)
    junk = [jax.block_until_ready(jnp.full(case.x, jnp.nan, BF16)) for _ in range(3)]
    for array in junk:
        array.delete()
    got = jax.jit(function)(jnp.asarray(a, BF16), jnp.asarray(b, BF16))
    want = np.asarray(jnp.asarray(case.definition("dgrad", a, b)).astype(BF16))
    np.testing.assert_array_equal(np.asarray(got), want)


@on_hopper
@pytest.mark.parametrize("sharing", ["round", "snake", "together"])
@pytest.mark.parametrize("name", ["strided, odd", "stride of three", "pointwise, strided", "stride and dilation"])
def test_exact_in_every_order_of_phases(name, sharing):
    case = CASES[name]
    for staged, teams, groups in ((1, 2, 1), (2, 1, 2), (3, 2, 1)):
        config = plan.Config(8, (4, 4), 64, 3, teams, groups, staged=staged, sharing=sharing)
        _, function, operands, _ = kernel("dgrad", case, False, config=config, sms=5)
        rng = np.random.default_rng(1)
        a, b = (rng.integers(-2, 3, shape).astype(np.float32) for shape in operands)
        got = jax.jit(function)(jnp.asarray(a, BF16), jnp.asarray(b, BF16))
        want = np.asarray(jnp.asarray(case.definition("dgrad", a, b)).astype(BF16))
        np.testing.assert_array_equal(np.asarray(got), want)
