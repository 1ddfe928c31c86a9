"""The PTX of the depthwise and narrow-group kernels on a small machine: exact values, and every bit by schedule."""

import dataclasses
import functools as ft
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as definition
from jaxdnn._src import hopper
from jaxdnn._src.conv.hopper.depthwise.filter_plan import plan_filter
from jaxdnn._src.conv.hopper.depthwise.planar import Config
from jaxdnn._src.core import engines
from tests.conv.depthwise_cases import (
    CASES,
    DTYPES,
    GEOMETRY,
    needs_newer,
    operands,
    reference,
    run_a_tile,
    run_filter,
    run_walk,
    unsupported,
    window,
)
from tests.hopper.ptx_machine import Machine


@pytest.mark.parametrize("case", CASES)
def test_small_integers_are_exact(case):
    x, w, dy, call, config, _ = operands(case)
    y, dx, dw = reference(x, w, dy, call)
    np.testing.assert_array_equal(run_walk("fprop", x, w, call, config), y.astype(x.dtype))
    np.testing.assert_array_equal(run_walk("dgrad", dy, w, call, config), dx.astype(x.dtype))
    np.testing.assert_array_equal(run_filter(x, dy, call, config), dw)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_a_bias_is_added_before_the_one_rounding(case, op):
    """Sums of small integers are exact, so that the result is that of one addition in float32 and one conversion."""
    x, w, dy, call, config, _ = operands(case)
    bias = np.random.default_rng(6).standard_normal(call.channels).astype(np.float32) * 7
    y, dx, _ = reference(x, w, dy, call)
    source, sums = (x, y) if op == "fprop" else (dy, dx)
    want = (sums.astype(np.float32) + bias).astype(x.dtype)
    np.testing.assert_array_equal(run_walk(op, source, w, call, config, bias=bias), want)


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("seed", range(5))
def test_no_access_is_beyond_a_tile(op, seed):
    """For drawn windows: which rows and columns of a tile are left over, and what the taps reach, is in the plan."""
    rng, served = np.random.default_rng(seed), 0
    while served < 3:
        rank = int(rng.integers(1, 3))
        draw = lambda low, high, rank=rank: tuple(map(int, rng.integers(low, high, rank)))
        size, taps, stride, dilation = draw(1, 34), draw(1, 6), draw(1, 4), draw(1, 4)
        padding = [tuple(map(int, rng.integers(0, (t - 1) * d + 2, 2))) for t, d in zip(taps, dilation, strict=True)]
        dtype, config = rng.choice(list(DTYPES)), [None, Config(stages=2)][int(rng.integers(2))]
        group = 1 if dtype == "f32" else int(rng.choice([1, 1, 2, 4, 8]))
        shape, filters = (int(rng.integers(1, 5)), *size, 32), (*taps, group, 32)
        geometry = dict[str, Any](stride=stride, padding=padding, dilation=dilation)
        if unsupported(op, shape, filters, DTYPES[dtype], **geometry, config=config):
            continue
        served += 1
        run_a_tile(op, window(shape, filters, DTYPES[dtype], **geometry), config)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("channels", [16, 32, 64])
def test_a_walk_reads_its_tile_in_flight_where_it_lies(channels, stages):
    """With 10 x 18 input pixels a tile alone is no whole number of the swizzle's periods."""
    shape, w_shape = (2, 9, 16, 64), (3, 3, 1, 64)
    call = window(shape, w_shape, jnp.bfloat16, **GEOMETRY)
    config = Config(channels=channels, rows=8, columns=16, stages=stages)
    rng = np.random.default_rng(5)
    x, w, dy = (rng.integers(-2, 3, s).astype(DTYPES["bf16"]) for s in (shape, w_shape, shape))
    y, dx, _ = reference(x, w, dy, call)
    np.testing.assert_array_equal(run_walk("fprop", x, w, call, config), y.astype(x.dtype))
    np.testing.assert_array_equal(run_walk("dgrad", dy, w, call, config), dx.astype(x.dtype))


@pytest.mark.parametrize("taps", [(2, 2), (3, 3), (4, 1), (8, 5)])
@pytest.mark.parametrize(("channels", "stages"), [(32, 1), (32, 2), (32, 3), (64, 2)])
def test_tiles_in_flight_are_read_where_they_lie(taps, channels, stages):
    """An even number of tap rows makes tiles of an odd number of rows, whose bytes the swizzle's period divides not."""
    shape, config = (4, 9, 11, 64), Config(splits=1, channels=channels, stages=stages)
    w_shape = (*taps, 1, 64)
    call = window(shape, w_shape, jnp.bfloat16, stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))
    assert plan_filter(call, config).per_split == 4
    rng = np.random.default_rng(3)
    draw = lambda size: rng.integers(-2, 3, size).astype(DTYPES["bf16"])
    x, w, dy = draw(shape), draw(w_shape), draw((4, *call.out, 64))
    np.testing.assert_array_equal(run_filter(x, dy, call, config), reference(x, w, dy, call)[2])


@pytest.mark.parametrize("case", ["3x3", "groups of four", "groups of eight, stride 2", "many tap columns"])
@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_an_output_does_not_see_what_it_does_not_own(case, poison):
    x, w, dy, call, config, _ = operands(case)
    w = np.where(w == 0, w.dtype.type(1), w)
    clean = run_walk("fprop", x, w, call, config)
    x = x.reshape(call.images, *call.sizes, -1).copy()
    x[0, 4, 5, 9] = poison
    mark = np.zeros_like(x)
    mark[0, 4, 5, 9] = 1
    touched = reference(mark, np.ones_like(w), dy, call)[0] != 0
    got = run_walk("fprop", x, w, call, config)
    assert touched.any()
    assert not np.isfinite(got[touched].astype(np.float32)).any()
    np.testing.assert_array_equal(got[~touched], clean[~touched])


@needs_newer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("partial", "rows", "width", "blocks"),
    [((5, 2, 3, 40), 2, 40, 1), ((33, 1, 4, 96), 3, 88, 2), ((70, 1, 8, 64), 7, 40, 3), ((1, 1, 1, 8), 1, 8, 1)],
)
def test_partial_sums_are_added_in_order(dtype, partial, rows, width, blocks):
    """Whatever the number of blocks."""
    from jaxdnn._src.conv.hopper.depthwise import partials
    from tests.hopper.lane_machine import on_cpu

    to, rng = np.dtype(DTYPES[dtype]), np.random.default_rng(4)
    terms = (rng.standard_normal(partial) * np.exp2(rng.integers(-9, 4, partial))).astype(np.float32)
    want = ft.reduce(np.add, terms.reshape(-1, *partial[2:]))[:rows, :width].astype(to)
    with on_cpu(partials):
        found = partials.add_partials(jnp.asarray(terms)[..., None], rows, width, to, blocks)
    np.testing.assert_array_equal(found, want)


def test_a_planted_fault_shows():
    x, w, dy, call, config, _ = operands("3x3")
    want = reference(x, w, dy, call)[0].astype(x.dtype)
    swap = lambda text: text.replace("0x2210", "0x1022", 1)
    assert not np.array_equal(run_walk("fprop", x, w, call, config, swap), want)


@pytest.mark.parametrize("case", ["3x3", "strides and dilation", "fma"])
def test_a_race_shows(case):
    """Pairs of warps that do the same work store to the same words; as they are, no case has such a word."""
    x, w, _, call, config, _ = operands(case)
    same = lambda text: re.sub(r"(shr\.u32 r\d+, r\d+), 5;", r"\1, 6;", text, count=1)
    with pytest.raises(RuntimeError, match="race for shared byte"):
        run_walk("fprop", x, w, call, config, same)


def test_the_machine_knows_no_other_instruction():
    with pytest.raises(NotImplementedError, match=r"sqrt\.rn\.f32"):
        Machine(64).run("{\nsqrt.rn.f32 f0, f1;\n}", [], 1)


def spread(rng, shape):
    """Magnitudes over four decades, so that the order of additions shows even in a narrow result."""
    return rng.standard_normal(shape) * np.exp2(rng.integers(-9, 4, shape))


@needs_newer
@pytest.mark.parametrize("mode", ["cross_correlation", "convolution"])
@pytest.mark.parametrize("case", CASES)
def test_the_schedule_predicts_every_bit(case, mode):
    """The kernels' own instructions, on the model of the matrix unit, against the reference with the stated orders."""
    from jaxdnn._src.conv.hopper import depthwise as kernels

    shape, taps, group, dtype, *_ = CASES[case]
    *_, call, config, geo = operands(case)
    geo = dataclasses.replace(geo, flip=mode == "convolution")
    out = (shape[0], *geo.out, shape[-1])
    rng = np.random.default_rng(1)
    shapes = shape, (*taps, group, shape[-1]), out
    x, w, dy = (spread(rng, s).astype(np.float16).astype(DTYPES[dtype]) for s in shapes)
    turned = np.flip(w, tuple(range(len(taps)))) if mode == "convolution" else w
    options = {"stride": geo.stride, "padding": geo.padding, "dilation": geo.dilation, "groups": geo.groups}
    options |= {"mode": mode, "layout": {3: "NWC", 4: "NHWC"}[x.ndim]}

    def predicted(op, *arrays, **more):
        told = kernels.schedule(op, geo, shape[0], shape[-1], x.dtype, config)
        plan = definition.Schedule(told.order, told.combine, classes=told.classes)
        function = {"fprop": definition.conv, "dgrad": definition.conv_dgrad, "wgrad": definition.conv_wgrad}[op]
        return function(*arrays, **options, arithmetic=told.arithmetic, schedule=plan, **more)

    y = run_walk("fprop", x, turned, call, config)
    np.testing.assert_array_equal(y.reshape(out), predicted("fprop", x, w))
    dx = run_walk("dgrad", dy, turned, call, config)
    np.testing.assert_array_equal(dx.reshape(x.shape), predicted("dgrad", dy, w, x.shape))
    if mode == "cross_correlation":
        dw = run_filter(x, dy, call, config)
        np.testing.assert_array_equal(dw.reshape(w.shape), predicted("wgrad", x, dy, w.shape, out_dtype=np.float32))


@needs_newer
def test_orders_that_change_places_show():
    """A negative control: even rows' order for odd rows and the other way round are not the kernel's bits."""
    from jaxdnn._src.conv.hopper import depthwise as kernels

    *_, call, config, geo = operands("3x3")
    rng = np.random.default_rng(2)
    x, w = np.ones((2, 13, 14, 32), DTYPES["bf16"]), rng.standard_normal((3, 3, 1, 32)).astype(DTYPES["bf16"])
    w[:2, 0] = np.array([2**18, -(2**18)])[:, None, None]  # which meet in one instruction, or the second in a later one
    geo = dataclasses.replace(geo, sizes=(13, 14), groups=32)
    told = kernels.schedule("fprop", geo, 2, 32, x.dtype)
    got = run_walk("fprop", x, w, call, config).astype(np.float32)
    assert told.classes is not None
    for classes, equal in ((told.classes, True), (1 - told.classes, False)):
        plan = definition.Schedule(told.order, classes=classes)
        options: dict[str, Any] = {"stride": geo.stride, "padding": geo.padding, "dilation": geo.dilation}
        wanted = definition.conv(x, w, **options, groups=32, arithmetic=told.arithmetic, schedule=plan)
        assert np.array_equal(got, wanted.astype(np.float32)) is equal


@needs_newer
@pytest.mark.parametrize("padding", [((1, 0), (-1, 2)), ((-2, 1), (1, 1)), ((-1, 2), (-2, 2))], ids=str)
def test_orders_of_a_gradient_count_from_what_negative_padding_cuts_off(padding: Any):
    """With another class's order an output would lack products: those of the windows that reach it."""
    options: dict[str, Any] = {"stride": (2, 3), "padding": padding, "groups": 24}
    x, w = np.zeros((1, 7, 32, 48), DTYPES["bf16"]), np.ones((2, 3, 2, 48), DTYPES["bf16"])
    rng = np.random.default_rng(0)
    dy = rng.integers(-4, 5, definition.conv(x, w, **options).shape).astype(DTYPES["bf16"])
    jaxpr = jax.make_jaxpr(lambda dy, w: dnn.conv_dgrad(dy, w, x.shape, engine="hopper", **options))(dy, w).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "jaxdnn_conv_dgrad"]
    avals = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    call = engines.Call("conv_dgrad", eqn.params["spec"], avals, "cuda", hopper.MEASURED_ON[0])
    (engine,) = [e for e in engines.registered("conv_dgrad") if e.name == "hopper"]
    told = engine.schedule(call)
    assert told is not None
    assert told.classes is not None
    plan = definition.Schedule(told.order, told.combine, classes=told.classes)
    given: dict[str, Any] = options | {"arithmetic": told.arithmetic, "schedule": plan}
    wanted = definition.conv_dgrad(dy, w, x.shape, **options)
    assert np.array_equal(definition.conv_dgrad(dy, w, x.shape, **given), wanted)
