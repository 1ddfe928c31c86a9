"""Dense Hopper convolution kernels: their plans on the CPU, their lowering for CUDA, and on a Hopper GPU their values.

Without a GPU nothing here runs a kernel: the interpreter has neither wgmma on boxes nor negative TMA coordinates. So
the index arithmetic is checked against the definition by brute force, and every kernel is lowered for CUDA.
"""

import itertools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdnn._epilogue import Epilogue
from jaxdnn._kernels import hopper

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)

from jaxdnn._kernels.hopper import conv_dgrad, conv_fprop, conv_plan, conv_wgrad, pipeline, tuning

BF16: Any = jnp.bfloat16
F32: Any = jnp.float32
LAYOUTS = {1: ("NWC", "WIO"), 2: ("NHWC", "HWIO"), 3: ("NDHWC", "DHWIO")}
on_hopper = pytest.mark.skipif(
    jax.default_backend() != "gpu" or getattr(jax.devices()[0], "compute_capability", "") != "9.0",
    reason="needs a GPU of compute capability 9.0",
)

#    n, sizes, c, k, taps, stride, padding, dilation, groups, flip
CASES: dict[str, Any] = {
    "3x3": (5, (13, 17), 24, 40, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1, False),
    "strided, odd": (3, (14, 15), 72, 72, (3, 2), (2, 2), ((1, 2), (0, 3)), (1, 1), 1, False),
    "dilated, flipped": (2, (9, 11), 64, 48, (3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2), 1, True),
    "odd channels": (4, (12, 12), 30, 33, (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 1, False),
    "one row": (3, (1, 19), 16, 32, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1, False),
    "pointwise": (7, (5, 6), 128, 200, (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1, False),
    "stride of three": (2, (23, 22), 64, 64, (3, 3), (3, 3), ((1, 1), (1, 1)), (1, 1), 1, False),
    "stride and dilation": (2, (21, 20), 64, 64, (3, 3), (2, 2), ((2, 2), (2, 2)), (2, 2), 1, False),
    "stem": (2, (19, 20), 3, 16, (7, 7), (2, 2), ((3, 3), (3, 3)), (1, 1), 1, False),
    "one axis": (3, (40,), 48, 96, (7,), (1,), ((3, 3),), (2,), 1, False),
    "one axis, strided, flipped": (3, (41,), 64, 64, (4,), (2,), ((1, 2),), (1,), 1, True),
    "three axes": (2, (7, 9, 10), 32, 64, (3, 3, 3), (1, 1, 1), ((1, 1),) * 3, (1, 1, 1), 1, False),
    "groups": (2, (14, 13), 256, 128, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 4, False),
    "narrow groups, strided": (2, (14, 14), 64, 64, (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 4, False),
    "whole image": (1, (8, 8), 64, 64, (8, 8), (1, 1), ((0, 0), (0, 0)), (1, 1), 1, False),
    "stem, windows of whole cells": (2, (9, 140), 4, 24, (3, 4), (1, 1), ((1, 1), (2, 1)), (1, 1), 1, False),
    "stem, partial cells": (2, (30, 131), 3, 32, (3, 3), (2, 2), ((0, 1), (1, 1)), (1, 1), 1, False),
    "few channels, dilated": (2, (12, 20), 3, 16, (3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2), 1, False),
    "pointwise, strided": (2, (6, 6), 64, 64, (1, 1), (2, 2), ((0, 0), (0, 0)), (1, 1), 1, False),
}

RESNET = [
    (64, 64, 56, 1, 1), (64, 64, 56, 3, 1), (64, 256, 56, 1, 1), (256, 64, 56, 1, 1), (256, 128, 56, 1, 1),
    (128, 128, 56, 3, 2), (256, 512, 56, 1, 2), (128, 128, 28, 3, 1), (512, 128, 28, 1, 1), (256, 256, 28, 3, 2),
    (256, 256, 14, 3, 1), (1024, 256, 14, 1, 1), (512, 512, 14, 3, 2), (512, 512, 7, 3, 1), (512, 2048, 7, 1, 1),
    (1024, 2048, 14, 1, 2),
]  # fmt: skip


def window(case: Any) -> dict[str, Any]:
    _, _, _, _, _, stride, padding, dilation, groups, flip = case
    return dict(stride=stride, padding=padding, dilation=dilation, groups=groups, flip=flip)


def shapes(case: Any, outer: bool = False) -> Any:
    """Shapes of x, w, dy."""
    n, sizes, c, k, taps, stride, padding, dilation, groups, _ = case
    geo = conv_fprop.Geometry(sizes, taps, stride, padding, dilation)
    w = (k, *taps, c // groups) if outer else (*taps, c // groups, k)
    return (n, *sizes, c), w, (n, *geo.out, k)


def filter_layout(case, outer):
    rank = len(case[1])
    return {1: "OWI", 2: "OHWI", 3: "ODHWI"}[rank] if outer else LAYOUTS[rank][1]


def kernel(op, case, outer, **more):
    """(function of two arrays, shapes of the arrays, reason why it is not served)."""
    x, w, dy = shapes(case, outer)
    keywords: dict[str, Any] = dict(window(case), filter_layout=filter_layout(case, outer), **more)
    module: Any = {"fprop": conv_fprop, "dgrad": conv_dgrad, "wgrad": conv_wgrad}[op]
    run = getattr(module, f"conv_{op}")
    extra = {"fprop": {}, "dgrad": {"x_shape": x}, "wgrad": {"w_shape": w}}[op]
    operands = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (x, dy)}[op]
    return module, (lambda a, b: run(a, b, **extra, **keywords)), operands, dict(extra, **keywords)


def lowered(function, *avals):
    text = jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text


@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", CASES)
def test_lowers(name, op, outer):
    module, function, operands, keywords = kernel(op, CASES[name], outer)
    avals = [jax.ShapeDtypeStruct(shape, BF16) for shape in operands]
    reason = module.supports(*avals, **keywords)
    if op == "wgrad" and CASES[name][8] > 1:
        assert "one group" in reason
        return
    assert reason is None
    lowered(function, *avals)
    del keywords["groups"]
    assert module.workspace(*avals, groups=CASES[name][8], **keywords) >= 0


@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [("float16", "float16"), ("float32", "float32"), ("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float32"),
     ("int8", "int32")],
)  # fmt: skip
def test_lowers_in_every_dtype(dtype, out_dtype, op, outer):
    module, function, operands, keywords = kernel(op, CASES["3x3"], outer, out_dtype=jnp.dtype(out_dtype))
    avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in operands]
    assert module.supports(*avals, precision="tf32" if dtype == "float32" else None, **keywords) is None
    lowered(function, *avals)


@pytest.mark.parametrize("activation", conv_fprop.ep.ACTIVATIONS)
def test_epilogue_lowers(activation):
    parameter = {"leaky_relu": 0.1, "clipped_relu": 6.0, "swish": 1.0}.get(activation)
    epilogue = Epilogue(0.5, 2.0, prior=True, bias=True, residual=True, activation=(activation, parameter))
    x, w, y = ((2, 8, 8, 64), (3, 3, 64, 96), (2, 8, 8, 96))
    avals = [jax.ShapeDtypeStruct(shape, BF16) for shape in (x, w, y, (96,), y)]
    for out_dtype in (BF16, F32):
        function = lambda *a, out_dtype=out_dtype: conv_fprop.conv_fprop(
            *a, stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1), epilogue=epilogue, out_dtype=out_dtype
        )
        text = lowered(function, *avals)
        assert text.count("tensor<2x8x8x96x") >= 2


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
    keywords = dict(window(CASES["3x3"]), **change)
    x, w, _ = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes(CASES["3x3"]))
    reason = conv_fprop.supports(x, w, **keywords)
    assert reason is not None
    assert text in reason


def test_three_axes_take_no_stride():
    x, w = jax.ShapeDtypeStruct((1, 8, 8, 8, 32), BF16), jax.ShapeDtypeStruct((2, 2, 2, 32, 32), BF16)
    keywords: dict[str, Any] = dict(stride=(2, 1, 1), padding=((0, 0),) * 3, dilation=(1, 1, 1), filter_layout="DHWIO")
    assert "three dimensions" in (conv_fprop.supports(x, w, **keywords) or "")


# ---- index arithmetic


def reads(axes):
    """All (output position, tap, input position) that a walk over some axes visits, one axis at a time."""
    found = []
    for ax in axes:
        triples = set()
        for phase, i in itertools.product(range(ax.out_step), range(ax.positions)):
            for j in range(ax.count[phase]):
                tap = ax.first[phase] + j * ax.tap_step
                triples.add((i * ax.out_step + phase, tap, i * ax.in_step + ax.offset[phase] + j * ax.move))
        found.append(triples)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_walks_visit_what_the_definition_says(seed):
    rng = np.random.default_rng(seed)
    size, taps, stride, dilation = rng.integers(1, 9), rng.integers(1, 6), rng.integers(1, 5), rng.integers(1, 4)
    low, high = rng.integers(0, 5, 2)
    high = int(max(high, dilation * (taps - 1) + 1 - size - low, 0))
    flip = bool(rng.integers(2))
    geo = conv_fprop.Geometry((int(size),), (int(taps),), (int(stride),), ((int(low), high),), (int(dilation),), flip)
    place = lambda tap: taps - 1 - tap if flip else tap
    (out,) = geo.out
    want = {(p, t, p * stride - low + place(t) * dilation) for p in range(out) for t in range(taps)}
    (forward,) = reads(conv_fprop.axes_of(geo))
    assert forward == want
    (backward,) = reads(conv_dgrad.axes_of(geo))
    inside = {(i, t, p) for i, t, p in backward if i < size and 0 <= p < out}
    assert inside == {(i, t, p) for p, t, i in want if 0 <= i < size}


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_schedules_hold_every_product_once(name, outer):
    case = CASES[name]
    x, w, dy = (jax.ShapeDtypeStruct(shape, BF16) for shape in shapes(case, outer))
    keywords: dict[str, Any] = dict(window(case), filter_layout=filter_layout(case, outer))
    c, k, taps, groups = case[2], case[3], math.prod(case[4]), case[8]
    if not (name == "stem" and case[9]):
        forward = conv_fprop.schedule(x, w, **keywords)
        assert sorted(forward[forward >= 0]) == list(range(taps * c // groups))
    backward = conv_dgrad.schedule(dy, w, x_shape=x.shape, **keywords)
    assert sorted(backward[backward >= 0]) == list(range(taps * k // groups))
    if groups == 1:
        filters = conv_wgrad.schedule(x, dy, w_shape=w.shape, **keywords)
        assert sorted(filters[filters >= 0]) == list(range(math.prod(dy.shape[:-1])))


@pytest.mark.parametrize("name", CASES)
def test_no_configuration_changes_the_forward_schedule(name):
    """The order is a function of the problem alone: nothing of a configuration enters it."""
    case = CASES[name]
    orders = []
    for batch in (1, case[0], 37):
        x, w, _ = (jax.ShapeDtypeStruct(shape, BF16) for shape in shapes((batch, *case[1:])))
        orders.append(conv_fprop.schedule(x, w, **window(case)))
    assert all(np.array_equal(orders[0], other) for other in orders[1:])


@pytest.mark.parametrize("order", ["k", "kp", "n", "p"])
def test_tiles_cover_the_output_once(order):
    axes = conv_dgrad.axes_of(conv_fprop.Geometry((9, 7), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)))
    problem = conv_plan.Problem(5, 64, 200, axes, "tjc", jnp.dtype(BF16), jnp.dtype(BF16), F32)
    walk = pipeline.Walk(problem, conv_plan.Config(2, (2, 2), 64, order=order))
    seen = set()
    for tile in range(walk.tiles):
        n, at, phase, k = walk.place(jnp.int32(tile))
        seen.add((int(n), *map(int, at), *map(int, phase), int(k)))
        steps = math.prod(ax.count[int(p)] for ax, p in zip(axes, phase, strict=True))
        assert int(walk.steps(jnp.int32(tile))) == steps
    assert len(seen) == walk.tiles == 3 * 3 * 2 * 4 * 4


# ---- choices


@pytest.mark.parametrize(("c", "k", "size", "taps", "stride"), RESNET)
def test_the_table_has_the_shapes_that_were_measured(c, k, size, taps, stride):
    """A key that changes its spelling would silently turn the measured choices off."""
    case = (128, (size, size), c, k, (taps, taps), (stride, stride), ((taps // 2,) * 2,) * 2, (1, 1), 1, False)
    x, w, dy = (jax.ShapeDtypeStruct(shape, BF16) for shape in shapes(case))
    geo = conv_fprop.geometry(x.shape, w.shape, "HWIO", case[5], case[6], case[7], False)
    plan = conv_fprop.plan(x, w, geo, groups=1, filter_layout="HWIO", epilogue=None, extras=(), out_dtype=BF16)
    back, *_ = conv_dgrad._problem(
        dy, w, geo, x.shape, groups=1, filter_layout="HWIO", epilogue=None, extras=(), out_dtype=BF16
    )
    table = tuning.table("NVIDIA H200")
    for op, problem in (("fprop", plan.problem), ("dgrad", back)):
        entry = table[tuning.key(op, problem, problem.out_dtype)]
        assert conv_plan.check(problem, conv_plan.Config(**{**entry, "block": tuple(entry["block"])})) is None
    problem = conv_wgrad.problem_of(x, dy, geo)
    entry = table[conv_wgrad.key(problem)]
    assert conv_wgrad.check(problem, conv_wgrad.Config(**{**entry, "block": tuple(entry["block"])})) is None


def test_candidates_lower():
    """A configuration that `check` lets through must lower: halo, resident filters, staged stores, both teams."""
    case = (4, (16, 16), 64, 64, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1, False)
    x, w, _ = (jax.ShapeDtypeStruct(shape, BF16) for shape in shapes(case))
    geo = conv_fprop.geometry(x.shape, w.shape, "HWIO", case[5], case[6], case[7], False)
    problem = conv_fprop.plan(
        x, w, geo, groups=1, filter_layout="HWIO", epilogue=None, extras=(), out_dtype=BF16
    ).problem
    configs = list(tuning.candidates(problem))
    assert {bool(c.halo) for c in configs} == {c.resident for c in configs} == {False, True}
    assert {c.staged for c in configs} == {c.teams for c in configs} == {1, 2}
    for config in configs[:: max(1, len(configs) // 24)]:
        lowered(lambda x, w, config=config: conv_fprop.conv_fprop(x, w, config=config, **window(case)), x, w)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (conv_plan.Config(3, (8, 8), 64, teams=1, groups=2), "do not divide"),
        (conv_plan.Config(4, (8, 8), 256), "does not fit the registers"),
        (conv_plan.Config(2, (8, 8), 128, 9), "does not fit shared memory"),
        (conv_plan.Config(2, (8, 8), 32), "whole chunks"),
        (conv_plan.Config(2, (4, 16), 64, halo=2), "8k x 8"),
    ],
)
def test_configurations_that_cannot_run(config, text):
    axes = conv_fprop.axes_of(conv_fprop.Geometry((16, 16), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
    problem = conv_plan.Problem(4, 64, 64, axes, "tcj", jnp.dtype(BF16), jnp.dtype(BF16), F32)
    assert text in conv_plan.check(problem, config)


# ---- on the hardware: small integers, whose sums are exact


@on_hopper
@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", CASES)
def test_exact_integers(name, op, outer):
    case = CASES[name]
    _, function, operands, _ = kernel(op, case, outer, out_dtype=F32)
    if op == "wgrad" and case[8] > 1:
        pytest.skip("the filter gradient takes one group")
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-2, 3, shape).astype(np.float32) for shape in operands)
    got = jax.jit(function)(jnp.asarray(a, BF16), jnp.asarray(b, BF16))
    np.testing.assert_array_equal(np.asarray(got), definition(op, case, outer, a, b))


def definition(op, case, outer, a, b):
    x_shape, w_shape, _ = shapes(case)
    rank, flip = len(case[1]), case[9]
    layout, inner = LAYOUTS[rank]

    def conv(x, w):
        w = jnp.flip(w, range(rank)) if flip else w
        return lax.conv_general_dilated(
            x, w, case[5], case[6], rhs_dilation=case[7], dimension_numbers=(layout, inner, layout),
            feature_group_count=case[8], precision="highest",
        )  # fmt: skip

    if op == "fprop":
        return conv(a, np.moveaxis(b, 0, -1) if outer else b)
    if op == "dgrad":
        w = np.moveaxis(b, 0, -1) if outer else b
        return jax.vjp(lambda x: conv(x, w), jnp.zeros(x_shape))[1](jnp.asarray(a))[0]
    dw = jax.vjp(lambda w: conv(jnp.asarray(a), w), jnp.zeros(w_shape))[1](jnp.asarray(b))[0]
    return jnp.moveaxis(dw, -1, 0) if outer else dw
