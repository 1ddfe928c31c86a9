"""Dense Hopper convolution kernels: their plans on the CPU, their lowering for CUDA, and on a Hopper GPU their values.

Without a GPU nothing here runs a kernel: the interpreter has neither wgmma on boxes nor negative TMA coordinates. So
the index arithmetic is checked against the definition by brute force, and every kernel is lowered for CUDA.
"""

import dataclasses
import itertools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn as dnn
import jaxdnn_reference as definition_of_all
from _hopper import on_hopper
from jaxdnn._epilogue import Epilogue
from jaxdnn._kernels import hopper

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)

from jaxdnn._kernels.hopper import conv_dgrad, conv_fprop, conv_plan, conv_wgrad, pipeline, tuning

BF16: Any = jnp.bfloat16
F32: Any = jnp.float32
LAYOUTS = {1: ("NWC", "WIO"), 2: ("NHWC", "HWIO"), 3: ("NDHWC", "DHWIO")}

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
    "three axes, strided": (3, (9, 8, 11), 64, 72, (3, 2, 3), (2, 2, 2), ((1, 1), (0, 1), (2, 1)), (1, 1, 1), 1, False),
    "three axes, one strided": (
        2,
        (5, 12, 9),
        32,
        48,
        (2, 3, 1),
        (1, 3, 1),
        ((0, 1), (1, 1), (0, 0)),
        (2, 1, 1),
        1,
        True,
    ),
    "three axes, stem": (2, (6, 9, 140), 3, 32, (3, 3, 4), (2, 2, 2), ((1, 1), (1, 1), (1, 2)), (1, 1, 1), 1, False),
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
VOLUME = (32, 64, 64, 3, 1, 2, 3)  # and the batch and the number of axes


def geometry(case: Any, outer: bool = False) -> conv_fprop.Geometry:
    _, sizes, _, _, taps, stride, padding, dilation, groups, flip = case
    return conv_fprop.Geometry(sizes, taps, stride, padding, dilation, flip, groups, outer)


def shapes(case: Any, outer: bool = False) -> Any:
    """Shapes of x, w, dy."""
    n, sizes, c, k, taps, _, _, _, groups, _ = case
    w = (k, *taps, c // groups) if outer else (*taps, c // groups, k)
    return (n, *sizes, c), w, (n, *geometry(case).out, k)


def kernel(op, case, outer, **more):
    """(module, function of two arrays, shapes of the arrays, what the module's functions are told besides)."""
    x, w, dy = shapes(case, outer)
    keywords: dict[str, Any] = dict(geo=geometry(case, outer), **more)
    module: Any = {"fprop": conv_fprop, "dgrad": conv_dgrad, "wgrad": conv_wgrad}[op]
    run = getattr(module, f"conv_{op}")
    operands = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (x, dy)}[op]
    return module, (lambda a, b: run(a, b, **keywords)), operands, keywords


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
    if op == "wgrad" and reason is not None:
        assert CASES[name][8] > 1 or len(CASES[name][4]) == 3
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


@pytest.mark.parametrize("activation", conv_fprop.ep.ACTIVATIONS)
def test_epilogue_lowers(activation):
    parameter = {"leaky_relu": 0.1, "clipped_relu": 6.0, "swish": 1.0}.get(activation)
    epilogue = Epilogue(0.5, 2.0, prior=True, bias=True, residual=True, activation=(activation, parameter))
    x, w, y = ((2, 8, 8, 64), (3, 3, 64, 96), (2, 8, 8, 96))
    geo = conv_fprop.Geometry((8, 8), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    avals = [jax.ShapeDtypeStruct(shape, BF16) for shape in (x, w, y, (96,), y)]
    for out_dtype in (BF16, F32):
        function = lambda *a, out_dtype=out_dtype: conv_fprop.conv_fprop(
            *a, geo=geo, epilogue=epilogue, out_dtype=out_dtype
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
    geo = geometry(CASES["3x3"])
    geo = dataclasses.replace(geo, padding=change.pop("padding", geo.padding))
    x, w, _ = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes(CASES["3x3"]))
    reason = conv_fprop.supports(x, w, geo=geo, **change)
    assert reason is not None
    assert text in reason


def test_a_stride_in_three_dimensions_takes_one_image_a_tile():
    geo = geometry(CASES["three axes, strided"])
    for axes in (conv_fprop.axes_of(geo), conv_dgrad.axes_of(geo)):
        problem = conv_plan.Problem(3, 64, 64, axes, "tcj", jnp.dtype(BF16), jnp.dtype(BF16), F32)
        assert "one image" in (conv_plan.check(problem, conv_plan.Config(2, (2, 4, 4), 64)) or "")
        assert {config.images for config in tuning.candidates(problem)} == {1}


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
    geo = geometry(case, outer)
    c, k, taps, groups = case[2], case[3], math.prod(case[4]), case[8]
    for flip in (False, True):
        forward = conv_fprop.schedule(x, w, geo=dataclasses.replace(geo, flip=flip))
        assert sorted(forward[forward >= 0]) == list(range(taps * c // groups))
    backward = conv_dgrad.schedule(dy, w, geo=geo)
    assert sorted(backward[backward >= 0]) == list(range(taps * k // groups))
    if groups == 1:
        filters = conv_wgrad.schedule(x, dy, geo=geo)
        assert sorted(filters[filters >= 0]) == list(range(math.prod(dy.shape[:-1])))


@pytest.mark.parametrize("name", CASES)
def test_no_configuration_changes_the_forward_schedule(name):
    """The order is a function of the problem alone: nothing of a configuration enters it."""
    case = CASES[name]
    orders = []
    for batch in (1, case[0], 37):
        x, w, _ = (jax.ShapeDtypeStruct(shape, BF16) for shape in shapes((batch, *case[1:])))
        orders.append(conv_fprop.schedule(x, w, geo=geometry(case)))
    assert all(np.array_equal(orders[0], other) for other in orders[1:])


def by_the_model(x: Any, w: Any, geo: conv_fprop.Geometry, **options: Any) -> np.ndarray:
    """What the definition makes of the stated schedule, on the model of the tensor core, in float32."""
    layout, inner = LAYOUTS[len(geo.sizes)]
    told = definition_of_all.Schedule(conv_fprop.schedule(x, w, geo=geo))
    return definition_of_all.conv(
        x, w, stride=geo.stride, padding=geo.padding, dilation=geo.dilation, groups=geo.groups, layout=layout,
        filter_layout=inner, mode="convolution" if geo.flip else "cross_correlation", arithmetic="tensor_core",
        schedule=told, out_dtype=np.float32, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["3x3", "dilated, flipped", "one axis, strided, flipped", "three axes", "stem"])
def test_the_schedule_of_a_flipped_filter(name):
    """Its bits are those of the kernel's own walk: of the turned filter's, or of the copy that made taps channels."""
    case = CASES[name]
    geo = dataclasses.replace(geometry(case), flip=True)
    rng = np.random.default_rng(3)
    spread = lambda shape: (rng.standard_normal(shape) * np.exp2(rng.integers(-9, 4, shape))).astype(BF16)
    x, w = map(spread, shapes((2, *case[1:]))[:2])
    found = by_the_model(x, w, geo)
    todo = conv_fprop.plan(x, w, geo, epilogue=None, extras=(), out_dtype=F32)
    assert todo.folded == (name == "stem")
    if todo.folded:  # the remaining taps are still flipped
        folded = np.asarray(conv_fprop.fold_taps(jnp.asarray(x), geo))
        rest = w.reshape(*w.shape[:-3], 1, w.shape[-3] * w.shape[-2], w.shape[-1])
        same = by_the_model(folded, rest, geo.without_last_taps)
    else:
        same = by_the_model(x, np.flip(w, tuple(range(len(geo.taps)))), dataclasses.replace(geo, flip=False))
    np.testing.assert_array_equal(found, same)
    plain = definition_of_all.Schedule(conv_fprop.schedule(x, w, geo=dataclasses.replace(geo, flip=False)))
    with pytest.MonkeyPatch.context() as patch:  # a negative control: the order of the filter that is not flipped
        patch.setattr(conv_fprop, "schedule", lambda *_, **__: plain.order)
        assert not np.array_equal(found, by_the_model(x, w, geo))


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


@pytest.mark.parametrize("sms", [1, 2, 7, 132, 1000])
@pytest.mark.parametrize("deal", ["round", "snake", "together"])
def test_every_tile_is_dealt_once(deal, sms):
    """Each block of threads has its own tiles; where phases are unequal, "snake" leaves none much more than another."""
    axes = conv_dgrad.axes_of(conv_fprop.Geometry((14, 14), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)))
    problem = conv_plan.Problem(33, 64, 256, axes, "tjc", jnp.dtype(BF16), jnp.dtype(BF16), F32)
    walk = pipeline.Walk(problem, conv_plan.Config(2, (1, 4), 64, deal=deal))
    blocks = walk.blocks(sms)
    assert 1 <= blocks <= sms
    count = jnp.int32(blocks)
    share = jax.jit(jax.vmap(lambda sm: walk.share(sm, count)))(jnp.arange(blocks, dtype=jnp.int32))
    places = [(sm, local) for sm in range(blocks) for local in range(int(share[sm]))]
    sm, local = jnp.asarray(places, jnp.int32).T
    tiles = np.asarray(jax.jit(jax.vmap(lambda sm, local: walk.tile(local, sm, count)))(sm, local))
    assert sorted(tiles) == list(range(walk.tiles))
    if deal == "snake" and walk.tiles > 8 * blocks:
        steps = np.bincount(np.asarray(sm), weights=np.array(walk.taps)[tiles // walk.per_phase])
        assert steps.max() - steps.min() <= 2 * max(walk.taps)


@pytest.mark.parametrize(
    ("geo", "block", "blank", "columns"),
    [
        (conv_fprop.Geometry((8, 11), (1, 1), (2, 2), ((1, 0), (0, 2)), (1, 1)), (4, 4), 3, 256),
        (conv_fprop.Geometry((9, 16), (2, 1), (3, 1), ((0, 0), (0, 0)), (1, 1)), (2, 8), 8, 64),
        (conv_fprop.Geometry((9, 16), (3, 1), (1, 2), ((1, 1), (0, 0)), (1, 1)), (4, 4), 8, 320),
        (conv_fprop.Geometry((8, 9, 10), (1, 1, 1), (2, 1, 3), ((0, 0),) * 3, (1, 1, 1)), (4, 4, 4), 4, 128),
    ],
)
def test_rows_without_taps_are_written_once(geo, block, blank, columns):
    """Tiles and stores of zeros write every output once, and zeros only what meets no tap."""
    axes = conv_dgrad.axes_of(geo)
    problem = conv_plan.Problem(3, 64, columns, axes, "tjc", jnp.dtype(BF16), jnp.dtype(BF16), F32)
    images = 1 if len(axes) == 3 else 4
    config = conv_plan.Config(images, block, 64, staged=4, blank=blank)
    assert conv_plan.check(problem, config) is None
    walk = pipeline.Walk(problem, config)
    shape = [problem.batch, *itertools.chain(*((ax.positions, ax.out_step) for ax in axes))]
    written = np.zeros(shape, int)
    for tile in range(0, walk.tiles, walk.columns):  # in the order "k" the column tiles of a place are neighbours
        n, at, phase, _ = walk.place(jnp.int32(tile))
        index: list[Any] = [slice(int(n) * images, (int(n) + 1) * images)]
        for i, b, p in zip(at, block, phase, strict=True):
            index += [slice(int(i) * b, (int(i) + 1) * b), int(p)]
        written[tuple(index)] += 1
    zeros = np.zeros((*shape, columns), int)
    per, width = blank, problem.blank_columns

    def leading(index: list[int]) -> list[int]:
        rest = iter(index)
        return [next(rest), *itertools.chain(*((next(rest), next(rest) if a.out_step > 1 else 0) for a in axes[:-1]))]

    for number in range(walk.blank_rows() if problem.blank_rows else 0):
        *index, first = map(int, walk.blank_row(jnp.int32(number)))
        zeros[(*leading(index), slice(first * per, (first + 1) * per))] += 1
    for number in range(walk.blank_pieces() if problem.blank_phases else 0):
        *index, first, phase, part = map(int, walk.blank_piece(jnp.int32(number)))
        where = (slice(first * per, (first + 1) * per), phase, slice(part * width, (part + 1) * width))
        zeros[(*leading(index), *where)] += 1
    assert np.array_equal(written[..., None] + zeros, np.ones_like(zeros))
    met = np.ones(shape, bool)
    for d, ax in enumerate(axes):
        met &= np.reshape(ax.count, [-1 if i == 2 * d + 2 else 1 for i in range(len(shape))]) > 0
    assert np.array_equal(zeros.any(-1), ~met)
    assert np.array_equal(zeros.all(-1), ~met)
    lowered(
        lambda dy, w: conv_dgrad.conv_dgrad(dy, w, geo=geo, config=config),
        jax.ShapeDtypeStruct((3, *geo.out, 64), BF16), jax.ShapeDtypeStruct((*geo.taps, columns, 64), BF16),
    )  # fmt: skip


# ---- choices


@pytest.mark.parametrize(
    ("c", "k", "size", "taps", "stride", "batch", "rank"), [*((*shape, 128, 2) for shape in RESNET), VOLUME]
)
def test_the_table_has_the_shapes_that_were_measured(c, k, size, taps, stride, batch, rank):
    """A key that changes its spelling would silently turn the measured choices off."""
    padding = ((taps // 2,) * 2,) * rank
    case = (batch, (size,) * rank, c, k, (taps,) * rank, (stride,) * rank, padding, (1,) * rank, 1, False)
    x, w, dy = (jax.ShapeDtypeStruct(shape, BF16) for shape in shapes(case))
    geo = geometry(case)
    plan = conv_fprop.plan(x, w, geo, epilogue=None, extras=(), out_dtype=BF16)
    back, *_ = conv_dgrad._problem(dy, w, geo, epilogue=None, extras=(), out_dtype=BF16)
    table = tuning.table("NVIDIA H200")
    for op, problem in (("fprop", plan.problem), ("dgrad", back)):
        entry = table[tuning.key(op, problem, problem.out_dtype)]
        assert conv_plan.check(problem, conv_plan.Config(**{**entry, "block": tuple(entry["block"])})) is None
    if rank == 3:
        return
    problem = conv_wgrad.problem_of(x, dy, geo)
    entry = table[conv_wgrad.key(problem)]
    assert conv_wgrad.check(problem, conv_wgrad.Config(**{**entry, "block": tuple(entry["block"])})) is None


def test_zeros_are_stored_apart_where_they_stay_zeros():
    """The measured choice of a strided 1x1, and what is left of it under an epilogue or in a wider type."""
    case = (128, (56, 56), 256, 512, (1, 1), (2, 2), ((0, 0), (0, 0)), (1, 1), 1, False)
    _, w, dy = (jax.ShapeDtypeStruct(shape, BF16) for shape in shapes(case))
    blanks = []
    for epilogue, out_dtype in ((None, BF16), (Epilogue(activation=("sigmoid", None)), BF16), (None, F32)):
        problem, *_ = conv_dgrad._problem(
            dy, w, geometry(case), epilogue=epilogue, extras=(), out_dtype=jnp.dtype(out_dtype)
        )
        config = tuning.choose("dgrad", problem, 132)
        assert conv_plan.check(problem, config) is None
        blanks.append(config.blank)
    assert blanks == [14, 0, 0]


@pytest.mark.parametrize(("channels", "rank"), [(64, 2), (16, 2), (32, 3)])
def test_candidates_lower(channels, rank):
    """A configuration that `check` lets through must lower: halo, resident filters, staged stores, both teams."""
    case = (4, (16,) * rank, channels, 64, (3,) * rank, (1,) * rank, ((1, 1),) * rank, (1,) * rank, 1, False)
    x, w, _ = (jax.ShapeDtypeStruct(shape, BF16) for shape in shapes(case))
    geo = geometry(case)
    problem = conv_fprop.plan(x, w, geo, epilogue=None, extras=(), out_dtype=BF16).problem
    configs = list(tuning.candidates(problem))
    configs += [dataclasses.replace(c, unroll=False) for c in configs if c.unroll]
    assert {bool(c.halo) for c in configs} == {c.resident for c in configs} == {False, True}
    assert {c.staged for c in configs} == {c.teams for c in configs} == {1, 2}
    for config in configs[:: max(1, len(configs) // 24)]:
        lowered(lambda x, w, config=config: conv_fprop.conv_fprop(x, w, config=config, geo=geometry(case)), x, w)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (conv_plan.Config(3, (8, 8), 64, teams=1, groups=2), "do not divide"),
        (conv_plan.Config(4, (8, 8), 256), "does not fit the registers"),
        (conv_plan.Config(2, (8, 8), 128, 9), "does not fit shared memory"),
        (conv_plan.Config(2, (8, 8), 32), "whole chunks"),
        (conv_plan.Config(2, (4, 16), 64, halo=2), "8k x 8"),
        (conv_plan.Config(2, (8, 8), 64, halo=2, unroll=True), "a resident filter"),
        (conv_plan.Config(2, (8, 8), 64, blank=8), "no phase"),
    ],
)
def test_configurations_that_cannot_run(config, text):
    axes = conv_fprop.axes_of(conv_fprop.Geometry((16, 16), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
    problem = conv_plan.Problem(4, 64, 64, axes, "tcj", jnp.dtype(BF16), jnp.dtype(BF16), F32)
    assert text in conv_plan.check(problem, config)


class Indexed:
    """What a reference was indexed with."""

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("block", [(2, 8, 8), (1, 16, 8)])
def test_a_halo_holds_what_every_tap_reads(block, op, unroll):
    """A tap's rows in the box that is loaded once are those that a load of its own would bring."""
    geo = conv_fprop.Geometry((7, 40, 23), (2, 3, 4), (1, 1, 1), ((1, 0), (2, 1), (3, 3)), (2, 1, 2))
    axes = (conv_fprop if op == "fprop" else conv_dgrad).axes_of(geo)
    dims = "tcj" if op == "fprop" else "tjc"
    problem = conv_plan.Problem(4, 32, 32, axes, dims, jnp.dtype(BF16), jnp.dtype(BF16), F32)
    config = conv_plan.Config(1, block, 32, 2, 1, 2, halo=2, resident=True, unroll=unroll)
    walker: Any = object.__new__(pipeline._Block)
    walker.problem, walker.config, walker.cut, walker.a_ring = (
        problem,
        config,
        pipeline._Cut(problem, config),
        Indexed(),
    )
    lowest = [min(ax.offset[0], ax.offset[0] + (ax.taps - 1) * ax.move) for ax in axes]
    box = conv_plan.a_box(problem, config)[1:]
    for number, taps in enumerate(itertools.product(*(range(ax.taps) for ax in axes))):
        for member in range(config.groups):
            walker.member = member
            told = (number // geo.taps[-1], taps[-1]) if unroll else (number,)
            slot, images, *found = walker.halo_view(jnp.int32(1), *map(jnp.int32, told[:1]), *told[1:])
            assert (int(slot), int(images.start), images.size) == (1, 0, 1)
            for d, (ax, tap, cut) in enumerate(zip(axes, taps, found, strict=True), 1):
                whole, piece = walker.cut.box[d], walker.cut.part[d]
                first = member * piece if whole != piece else 0
                assert int(cut.start) + lowest[d - 1] == first + ax.offset[0] + tap * ax.move
                assert cut.size == piece
                assert 0 <= int(cut.start) <= box[d - 1] - piece


# ---- filter gradients that need no second pass

DIRECT = {
    "one block": dict(splits=1, columns=64),
    "two blocks": dict(splits=2, columns=128),
    "four blocks, rows in twos": dict(splits=4, columns=256, filters=64, across=2, stages=2),
    "two blocks, one warpgroup of two row blocks": dict(splits=2, columns=128, filters=128, across=1),
    "two blocks, columns in twos": dict(splits=2, columns=128, across=1, along=2),
}
#    two taps with ragged channels, one tap, and taps along one axis
DIRECT_CASES: dict[str, Any] = {
    "2x3": (6, (11, 13), 136, 200, (2, 3), (1, 1), ((0, 1), (1, 1)), (1, 1), 1, True),
    "1x1": (9, (7, 6), 192, 72, (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1, False),
    "strided": (5, (12, 14), 64, 128, (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 1, False),
}


def direct_config(name, case):
    rank = 0 if math.prod(case[4]) == 1 else len(case[1])
    options: dict[str, Any] = dict(filters=64, across=2, stages=3, direct=True) | DIRECT[name]
    return conv_wgrad.Config(64 if not rank else 4, (4,) * rank, **options)


@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("case", DIRECT_CASES)
@pytest.mark.parametrize("name", DIRECT)
def test_direct_results_lower(name, case, outer):
    """One launch, a result in the filter's own layout, and no partial sums in memory."""
    case = DIRECT_CASES[case]
    config = direct_config(name, case)
    _, function, operands, keywords = kernel("wgrad", case, outer, config=config)
    avals = [jax.ShapeDtypeStruct(shape, BF16) for shape in operands]
    text = lowered(function, *avals)
    w = "x".join(map(str, shapes(case, outer)[1]))
    assert f"tensor<{w}xbf16>" in text
    assert "f32>" not in text.split("mosaic_gpu")[0]
    whole = case[2] % 8 == case[3] % 8 == 0 and not case[9]
    assert (conv_wgrad.workspace(*avals, **keywords) == 0) == whole


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(splits=3, columns=192), "1, 2, 4 or 8 blocks"),
        (dict(splits=4, columns=128), "whole chunks of columns"),
        (dict(splits=2, columns=256, stages=4), "does not fit shared memory"),
        (dict(splits=1, halo=True, block=(8, 8), images=1, along=3, across=1, columns=192), "no halo"),
    ],
)
def test_direct_results_that_cannot_be(change, text):
    axes = conv_fprop.axes_of(conv_fprop.Geometry((16, 16), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
    problem = conv_wgrad.Problem(4, 128, 128, axes, jnp.dtype(BF16))
    options: dict[str, Any] = dict(images=1, block=(8, 8), filters=64, across=2, direct=True) | change
    assert text in (conv_wgrad.check(problem, conv_wgrad.Config(**options)) or "")


def test_a_direct_result_of_another_type_takes_the_other_way():
    """The order of additions stays the configuration's; only the conversion is elsewhere."""
    case = DIRECT_CASES["1x1"]
    _, function, operands, _ = kernel("wgrad", case, False, config=direct_config("two blocks", case), out_dtype=F32)
    text = lowered(function, *(jax.ShapeDtypeStruct(shape, BF16) for shape in operands))
    assert "tensor<2x128x1x192xf32>" in text


# ---- on the hardware: small integers, whose sums are exact

HALOS: dict[str, Any] = {
    "16 channels": (3, (17, 21), 16, 64, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1, False),
    "32 channels": (3, (17, 21), 32, 64, (3, 5), (1, 1), ((1, 1), (2, 2)), (1, 1), 1, False),
    "two chunks": (5, (19, 9), 128, 64, (2, 3), (1, 1), ((1, 0), (1, 1)), (1, 1), 1, False),
    "three axes": (2, (5, 11, 13), 32, 64, (3, 3, 3), (1, 1, 1), ((1, 1), (0, 2), (2, 1)), (1, 1, 1), 1, False),
    "three axes, dilated": (
        2,
        (9, 11, 13),
        32,
        64,
        (2, 3, 2),
        (1, 1, 1),
        ((1, 1), (2, 2), (2, 1)),
        (1, 2, 3),
        1,
        False,
    ),
}


@on_hopper
@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("name", HALOS)
def test_exact_with_a_halo(name, op, outer):
    """Every way to cut the work that shares a load among taps, with the filter in a ring or in memory for good."""
    case = HALOS[name]
    _, _, operands, keywords = kernel(op, case, outer)
    module: Any = {"fprop": conv_fprop, "dgrad": conv_dgrad}[op]
    a, b = (jax.ShapeDtypeStruct(shape, BF16) for shape in operands)
    if op == "fprop":
        problem = conv_fprop.plan(a, b, keywords["geo"], epilogue=None, extras=(), out_dtype=BF16).problem
    else:
        problem, *_ = conv_dgrad._problem(a, b, keywords["geo"], epilogue=None, extras=(), out_dtype=BF16)
    rng = np.random.default_rng(2)
    x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in operands)
    want = np.asarray(jnp.asarray(definition(op, case, outer, x, w)).astype(BF16))
    configs = [
        conv_plan.Config(1, (*lead, 8, 8), columns, stages, teams, groups, "p", halo=halo, resident=res, unroll=unroll)
        for lead in (((2,), (1,), (4,)) if len(case[1]) == 3 else ((),))
        for columns, (teams, groups), halo in itertools.product((32, 64, 128), ((2, 1), (1, 2)), (2, 3))
        for stages, res, unroll in ((3, False, False), (4, True, False), (4, True, True))
    ]
    configs += [dataclasses.replace(c, images=2) for c in configs]
    served = [c for c in configs if conv_plan.check(problem, c) is None]
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
    np.testing.assert_array_equal(np.asarray(got), definition(op, case, outer, a, b))


def definition(op, case, outer, a, b):
    """By XLA on the CPU: on a GPU it may take an algorithm that rounds on its way, even with whole numbers."""
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(_definition(op, case, outer, np.asarray(a), np.asarray(b)))


def _definition(op, case, outer, a, b):
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


@on_hopper
@pytest.mark.parametrize("sms", [None, 9])
@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("case", DIRECT_CASES)
@pytest.mark.parametrize("name", DIRECT)
def test_direct_results_have_the_same_bits(name, case, outer, sms):
    """A cluster's sum is the sum of the partial sums in memory, also where a cluster has several tiles in turn."""
    case = DIRECT_CASES[case]
    config = direct_config(name, case)
    keys = jax.random.split(jax.random.key(5))
    _, _, operands, _ = kernel("wgrad", case, outer)
    a, b = (jax.random.normal(key, shape).astype(BF16) for key, shape in zip(keys, operands, strict=True))
    found = []
    for way in (config, dataclasses.replace(config, direct=False)):
        _, function, _, _ = kernel("wgrad", case, outer, config=way, sms=sms)
        found.append(np.asarray(jax.jit(function)(a, b)).view(np.uint16))
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(
        found[0].view(BF16).astype(np.float32), definition("wgrad", case, outer, a.astype(F32), b.astype(F32)),
        rtol=2**-8, atol=2**-8 * math.sqrt(math.prod(operands[1][:-1])),
    )  # fmt: skip


@on_hopper
@pytest.mark.parametrize("multiprocessors", [1, 7, 66, 131])
@pytest.mark.parametrize("op", ["conv", "conv_dgrad", "conv_wgrad"])
@pytest.mark.parametrize("name", ["3x3", "strided, odd", "pointwise", "stem", "pointwise, strided", "groups"])
def test_the_number_of_multiprocessors_changes_no_bit(name, op, multiprocessors):
    case = CASES[name]
    if op == "conv_wgrad" and case[8] > 1:
        pytest.skip("which filter gradients of groups are served is a matter of their own tests")
    x, w, dy = (jax.random.normal(jax.random.key(i), shape).astype(BF16) for i, shape in enumerate(shapes(case)))
    keywords: dict[str, Any] = dict(stride=case[5], padding=case[6], dilation=case[7], groups=case[8], engine="hopper")
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
@pytest.mark.parametrize("deal", ["round", "snake", "together"])
@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((1, 0), (0, 2))])
def test_rows_without_taps_are_zero(padding, deal):
    """Also where the memory of the result held something else."""
    case = (5, (8, 12), 256, 128, (1, 1), (2, 2), padding, (1, 1), 1, False)
    config = conv_plan.Config(4, (4, 4), 128, 3, staged=2, blank=3, deal=deal)
    _, function, operands, _ = kernel("dgrad", case, False, config=config, sms=5)
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-2, 3, shape).astype(np.float32) for shape in operands)
    junk = [jax.block_until_ready(jnp.full(shapes(case)[0], jnp.nan, BF16)) for _ in range(3)]
    for array in junk:
        array.delete()
    got = jax.jit(function)(jnp.asarray(a, BF16), jnp.asarray(b, BF16))
    want = np.asarray(jnp.asarray(definition("dgrad", case, False, a, b)).astype(BF16))
    np.testing.assert_array_equal(np.asarray(got), want)


@on_hopper
@pytest.mark.parametrize("deal", ["round", "snake", "together"])
@pytest.mark.parametrize("name", ["strided, odd", "stride of three", "pointwise, strided", "stride and dilation"])
def test_exact_however_phases_are_dealt(name, deal):
    case = CASES[name]
    for staged, teams, groups in ((1, 2, 1), (2, 1, 2), (3, 2, 1)):
        config = conv_plan.Config(8, (4, 4), 64, 3, teams, groups, staged=staged, deal=deal)
        _, function, operands, _ = kernel("dgrad", case, False, config=config, sms=5)
        rng = np.random.default_rng(1)
        a, b = (rng.integers(-2, 3, shape).astype(np.float32) for shape in operands)
        got = jax.jit(function)(jnp.asarray(a, BF16), jnp.asarray(b, BF16))
        want = np.asarray(jnp.asarray(definition("dgrad", case, False, a, b)).astype(BF16))
        np.testing.assert_array_equal(np.asarray(got), want)
