"""Depthwise and narrow-group kernels without a GPU: their PTX on a small machine, their plans, their lowering.

Pallas' interpreter cannot run inline PTX. So the tests do what the frame around it does (fetch tiles with zeros
outside the image, store clipped tiles, add partial sums in order) and run the PTX itself on `_ptx_machine`.
"""

import functools as ft
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn_reference as definition
from _norm_machine import NormRows
from _ptx_machine import Machine, from_tile_bytes, tile_bytes
from jaxdnn._kernels.hopper import conv_depthwise_filter, conv_depthwise_fma, conv_depthwise_plan
from jaxdnn._kernels.hopper.conv_depthwise_add import THREADS, Terms, add_terms
from jaxdnn._kernels.hopper.conv_depthwise_plan import Config, plan_filter, plan_walk, unsupported, window
from jaxdnn._kernels.hopper.conv_depthwise_walk import Walk, walk

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
NEWER = tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 11)
needs_newer = pytest.mark.skipif(not NEWER, reason="the Hopper kernels need JAX 0.11 or newer")

#        x               taps    group dtype   stride  padding           dilation config
CASES = {
    "3x3": ((2, 13, 14, 32), (3, 3), 1, "bf16", (1, 1), ((1, 1), (1, 1)), (1, 1), None),
    "7x7 ragged channels": ((1, 15, 12, 40), (7, 7), 1, "bf16", (1, 1), ((3, 3), (3, 3)), (1, 1), None),
    "5x4 asymmetric": ((1, 9, 11, 16), (5, 4), 1, "f16", (1, 1), ((2, 1), (0, 3)), (1, 1), None),
    "pairs of channels": ((1, 9, 10, 32), (3, 5), 2, "f16", (1, 1), ((1, 1), (2, 2)), (1, 1), None),
    "groups of four": ((1, 10, 9, 32), (3, 3), 4, "bf16", (1, 1), ((1, 0), (1, 2)), (1, 1), None),
    "groups of eight, stride 2": ((1, 11, 13, 32), (3, 3), 8, "bf16", (2, 2), ((0, 1), (0, 1)), (1, 1), None),
    "stride 2": ((1, 12, 10, 32), (3, 3), 1, "bf16", (2, 2), ((1, 1), (1, 1)), (1, 1), None),
    "strides and dilation": ((1, 14, 12, 32), (3, 2), 1, "bf16", (3, 2), ((2, 2), (2, 2)), (2, 3), None),
    "many tap columns": ((1, 6, 16, 16), (2, 9), 1, "bf16", (1, 1), ((1, 0), (4, 4)), (1, 1), None),
    "one axis": ((5, 20, 32), (4,), 1, "bf16", (1,), ((3, 0),), (1,), None),
    "tiles in flight": ((3, 13, 14, 32), (3, 3), 1, "bf16", (1, 1), ((1, 1), (1, 1)), (1, 1), Config(stages=2)),
    "64 channels": ((1, 8, 9, 64), (3, 3), 1, "bf16", (1, 1), ((1, 1), (1, 1)), (1, 1), Config(channels=64)),
    "fma": ((2, 9, 10, 36), (3, 3), 1, "f32", (1, 1), ((1, 1), (1, 1)), (1, 1), None),
    "fma, stride 2": ((1, 9, 10, 32), (3, 3), 1, "f32", (2, 2), ((1, 1), (1, 1)), (1, 1), None),
    "fma, one axis": ((3, 13, 32), (4,), 1, "f32", (1,), ((3, 0),), (2,), None),
    "fma in bf16": ((1, 8, 9, 64), (3, 3), 1, "bf16", (1, 1), ((1, 1), (1, 1)), (1, 1), Config(unit="fma")),
    "fma in f16": ((1, 8, 9, 64), (2, 9), 1, "f16", (1, 1), ((1, 0), (4, 4)), (1, 1), Config(unit="fma")),
}


def box(array, start, shape):
    """What a TMA copy fetches: zeros outside the array."""
    out = np.zeros(shape, array.dtype)
    inside = [slice(max(0, s), max(0, min(n, s + k))) for s, n, k in zip(start, array.shape, shape, strict=True)]
    if all(part.stop > part.start for part in inside):
        target = tuple(slice(p.start - s, p.stop - s) for p, s in zip(inside, start, strict=True))
        out[target] = array[tuple(inside)]
    return out


class Memory:
    """Buffers in a machine's shared memory, one after the other, aligned as Mosaic aligns them."""

    def __init__(self):
        self.machine, self._end = Machine(1 << 18), 1024

    def put(self, values, swizzle=0):
        address = self._end
        self.machine.shared[address : address + values.nbytes] = tile_bytes(values, swizzle)
        self._end = address + -(-values.nbytes // 1024) * 1024
        return address

    def put_slot(self, values, slot, slots, swizzle=0):
        """One of several tiles that lie one behind the other; the swizzle goes by the address. The slot's address."""
        tiles = np.full((slots, *values.shape), np.nan, values.dtype)
        tiles[slot] = values
        return self.put(tiles, swizzle) + slot * values.nbytes

    def get(self, address, dtype, shape, swizzle=0):
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return from_tile_bytes(self.machine.shared[address : address + size], dtype, shape, swizzle)


def run_walk(op, source, w, call, config, change=lambda text: text):
    plan = plan_walk(op, call, config)
    text = change(walk(plan.walk) if isinstance(plan.walk, Walk) else conv_depthwise_fma.lane_walk(plan.walk))
    inputs, outputs = (call.size, call.out) if op == "fprop" else (call.out, call.size)
    source = source.reshape(call.images, *inputs, call.channels)
    w = w.reshape(call.taps[0], call.taps[1] * call.group, call.channels)
    y = np.full((call.images, *outputs, call.channels), np.nan, source.dtype)
    slab = (call.taps[0], plan.walk.filter_columns * call.group, plan.channels)
    for n in range(call.images):
        for i in range(plan.tiles[0]):
            for j in range(plan.tiles[1]):
                for c in range(0, call.channels, plan.channels):
                    memory, slot = Memory(), (n + i + j) % plan.stages
                    start = (i * plan.advance[0] + plan.first[0], j * plan.advance[1] + plan.first[1], c)
                    x_tile = box(source[n], start, (*plan.in_tile, plan.channels))
                    x_at = memory.put_slot(x_tile, slot, plan.stages, plan.swizzle)
                    w_at = memory.put_slot(box(w, (0, 0, c), slab), slot, plan.stages)
                    shape = (*plan.out_tile, plan.channels)
                    y_at = memory.put(np.full(shape, np.nan, y.dtype))
                    memory.machine.run(text, [x_at, w_at, y_at], 4)
                    tile = memory.get(y_at, y.dtype, shape, plan.swizzle)
                    p, q = i * plan.out_tile[0], j * plan.out_tile[1]
                    to = y[n, p : p + shape[0], q : q + shape[1], c : c + shape[2]]
                    to[...] = tile[: to.shape[0], : to.shape[1], : to.shape[2]]
    return y


def run_filter(x, dy, call, config):
    plan = plan_filter(call, config)
    tensor = isinstance(plan.walk, conv_depthwise_filter.FilterWalk)
    module = conv_depthwise_filter if tensor else conv_depthwise_fma
    names = ("filter_walk", "filter_store") if tensor else ("lane_filter", "lane_store")
    body, store = (getattr(module, name)(plan.walk) for name in names)
    x = x.reshape(call.images, *call.size, call.channels)
    dy = dy.reshape(call.images, *call.out, call.channels)
    warps, registers = 4 * plan.warpgroups, plan.walk.accumulators
    total = call.images * math.prod(plan.tiles)
    dw = np.zeros((call.taps[0], call.taps[1] * call.group, call.channels), np.float32)
    for split in range(plan.splits):
        for block in range(math.prod(plan.tap_blocks)):
            r, s = (a * b for a, b in zip(divmod(block, plan.tap_blocks[1]), plan.tap_block, strict=True))
            for c in range(0, call.channels, plan.channels):
                sums = [np.zeros((warps, 32), np.float32) for _ in range(registers)]
                start_tile = split * plan.per_split
                for tile in range(start_tile, min(total, start_tile + plan.per_split)):
                    slot = (tile - start_tile) % plan.stages
                    n, rest = divmod(tile, math.prod(plan.tiles))
                    p, q = (a * b for a, b in zip(divmod(rest, plan.tiles[1]), plan.out_tile, strict=True))
                    start = (
                        p * call.stride[0] + r * call.dilation[0] - call.low[0],
                        q * call.stride[1] + s * call.dilation[1] - call.low[1],
                        c,
                    )
                    memory = Memory()
                    x_tile = box(x[n], start, (*plan.in_tile, plan.channels))
                    dy_tile = box(dy[n], (p, q, c), (*plan.out_tile, plan.channels))
                    x_at, dy_at = (memory.put_slot(t, slot, plan.stages, plan.swizzle) for t in (x_tile, dy_tile))
                    memory.machine.run(body, [*sums, *[0] * registers, x_at, dy_at], warps)
                memory = Memory()
                shape = (plan.parts, plan.tap_block[0], plan.tap_block[1] * call.group, plan.channels)
                at = memory.put(np.full(shape, np.nan, np.float32))
                memory.machine.run(store, [*sums, at], warps)
                to = dw[r : r + shape[1], s * call.group : s * call.group + shape[2], c : c + shape[3]]
                for part in memory.get(at, np.float32, shape):
                    to += part[: to.shape[0], : to.shape[1], : to.shape[2]]
    return dw


def reference(x, w, dy, call):
    """Output, input gradient and filter gradient in float64, by loops over taps and channels of a group."""
    images, group = call.images, call.group
    x = x.astype(np.float64).reshape(images, *call.size, -1)
    dy = dy.astype(np.float64).reshape(images, *call.out, -1)
    w = w.astype(np.float64).reshape(*call.taps, group, -1)
    reach = [(call.out[i] - 1) * call.stride[i] + (call.taps[i] - 1) * call.dilation[i] + 1 for i in range(2)]
    after = [max(0, reach[i] - call.size[i] - call.low[i]) for i in range(2)]
    x = np.pad(x, ((0, 0), *((call.low[i], after[i]) for i in range(2)), (0, 0)))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    first = np.arange(call.channels) // group * group
    for r in range(call.taps[0]):
        for s in range(call.taps[1]):
            at = tuple(
                slice(t * d, t * d + (n - 1) * step + 1, step)
                for t, d, n, step in zip((r, s), call.dilation, call.out, call.stride, strict=True)
            )
            for i in range(group):
                seen = x[:, *at][..., first + i]
                y += seen * w[r, s, i]
                dw[r, s, i] = (seen * dy).sum((0, 1, 2))
                place: Any = (..., first + i)  # output channels of a group share an input channel: `at` adds them all
                np.add.at(dx[:, *at], place, dy * w[r, s, i])
    inside = tuple(slice(call.low[i], call.low[i] + call.size[i]) for i in range(2))
    return y, dx[:, *inside], dw.reshape(call.taps[0], -1, call.channels)


def has_filter_gradient(config):
    return config is None or config.unit is None


def operands(case, seed=0):
    shape, taps, group, dtype, stride, padding, dilation, config = CASES[case]
    rng = np.random.default_rng(seed)
    w_shape = (*taps, group, shape[-1])
    geometry = dict(stride=stride, padding=padding, dilation=dilation)
    call = window(shape, w_shape, DTYPES[dtype], **geometry)
    draw = lambda size: rng.integers(-2, 3, size).astype(DTYPES[dtype])
    x, w, dy = draw(shape), draw(w_shape), draw((call.images, *call.out, call.channels))
    return x, w, dy, call, config, geometry


@pytest.mark.parametrize("case", CASES)
def test_small_integers_are_exact(case):
    x, w, dy, call, config, _ = operands(case)
    y, dx, dw = reference(x, w, dy, call)
    np.testing.assert_array_equal(run_walk("fprop", x, w, call, config), y.astype(x.dtype))
    np.testing.assert_array_equal(run_walk("dgrad", dy, w, call, config), dx.astype(x.dtype))
    if has_filter_gradient(config):
        np.testing.assert_array_equal(run_filter(x, dy, call, config), dw)


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
    x = x.reshape(call.images, *call.size, -1).copy()
    x[0, 4, 5, 9] = poison
    mark = np.zeros_like(x)
    mark[0, 4, 5, 9] = 1
    touched = reference(mark, np.ones_like(w), dy, call)[0] != 0
    got = run_walk("fprop", x, w, call, config)
    assert touched.any()
    assert not np.isfinite(got[touched].astype(np.float32)).any()
    np.testing.assert_array_equal(got[~touched], clean[~touched])


@pytest.mark.parametrize("columns", [4, 8, 12, 16, 28, 32])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_an_unswizzled_store_that_overhangs_is_never_one_piece_of_memory(columns, stride):
    """Mosaic turns a contiguous unswizzled store into a plain bulk copy, which is not clipped at the array's end."""
    call = window(
        (2, 11, columns, 32), (3, 3, 1, 32), np.float32, stride=stride, padding=((1, 1),) * 2, dilation=(1, 1)
    )
    for op, target in (("fprop", call.out), ("dgrad", call.size)):
        plan = plan_walk(op, call)
        assert plan.out_tile[1] != target[1] or plan.channels != call.channels
    for taps in ((1, 9), (31, 3), (7, 7)):
        shape = (*taps, 1, 32)
        call = window(
            (2, 40, columns, 32), shape, jnp.bfloat16, stride=(1, 1), padding=((30, 30),) * 2, dilation=(1, 1)
        )
        plan = plan_filter(call)
        *_, rows, width, channels = plan.partial_shape(call)
        assert rows % plan.tap_block[0] == 0
        assert width % plan.tap_block[1] == 0
        assert channels == 32


def test_no_tile_is_made_so_narrow_that_its_store_is_one_piece_of_memory():
    """Four columns are the whole width here; with a dilation of 19 no wider tile fits, and the call is refused."""
    shape, taps = (2, 11, 4, 32), (3, 3, 1, 32)
    for dilation, columns in ((18, 8), (19, None)):
        geometry: dict[str, Any] = dict(stride=(1, 1), padding=((dilation,) * 2,) * 2, dilation=(dilation,) * 2)
        reason = unsupported("fprop", shape, taps, np.float32, **geometry)
        if columns is None:
            assert "over 232448 bytes" in (reason or "")
        else:
            assert reason is None
            assert plan_walk("fprop", window(shape, taps, np.float32, **geometry)).out_tile[1] == columns


class Adder(NormRows):
    """With the instruction that the addition of partial sums needs besides."""

    def _step(self, name, arguments, active):
        if name == ["div", "u32"]:
            low = [self._bits(x) & np.uint64(0xFFFFFFFF) for x in arguments[1:]]
            self._put(arguments[0], low[0] // low[1], active)
        else:
            super()._step(name, arguments, active)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("partial", "rows", "width", "blocks"),
    [((5, 2, 3, 40), 2, 40, 1), ((33, 1, 4, 96), 3, 88, 2), ((70, 1, 8, 64), 7, 40, 3), ((1, 1, 1, 8), 1, 8, 1)],
)
def test_partial_sums_are_added_in_order(dtype, partial, rows, width, blocks):
    """Into memory in which nothing else is written, and every element once, whatever the number of blocks."""
    many, to = partial[0] * partial[1], np.dtype(DTYPES[dtype])
    rng = np.random.default_rng(4)
    terms = (rng.standard_normal(partial) * np.exp2(rng.integers(-9, 4, partial))).astype(np.float32)
    terms = terms.reshape(many, *partial[2:])
    want = ft.reduce(np.add, terms)[:rows, :width].astype(to)
    machine = Adder(terms.nbytes + want.nbytes + 512)
    machine.memory[: terms.nbytes] = terms.view(np.uint8).ravel()
    at = -(-terms.nbytes // 128) * 128
    text = add_terms(Terms(many, math.prod(partial[2:]), partial[3], rows, width, dtype), blocks)
    machine.run(text, [0, at], THREADS, blocks)
    written = np.flatnonzero(machine.written)
    assert (written[0], written[-1] + 1, machine.written.max()) == (at, at + want.nbytes, 1)
    np.testing.assert_array_equal(machine.memory[at : at + want.nbytes].view(to).reshape(rows, width), want)


def test_a_planted_fault_shows():
    x, w, dy, call, config, _ = operands("3x3")
    want = reference(x, w, dy, call)[0].astype(x.dtype)
    swap = lambda text: text.replace("0x2210", "0x1022", 1)
    assert not np.array_equal(run_walk("fprop", x, w, call, config, swap), want)


def test_the_machine_knows_no_other_instruction():
    with pytest.raises(NotImplementedError, match=r"sqrt\.rn\.f32"):
        Machine(64).run("{\nsqrt.rn.f32 f0, f1;\n}", [], 1)


@pytest.mark.parametrize("case", CASES)
def test_the_schedule_has_every_product_once(case):
    *_, call, config, _ = operands(case)
    everything = np.arange(math.prod(call.taps) * call.group)
    _, found, classes = conv_depthwise_plan.orders("fprop", call, config)
    assert len(found) == classes.max() + 1
    for order in found:
        np.testing.assert_array_equal(np.sort(order[order >= 0]), everything)
    _, found, classes = conv_depthwise_plan.orders("dgrad", call, config)
    np.testing.assert_array_equal(np.unique(classes), np.arange(len(found)))
    phases, twice = math.prod(call.stride), len(found) // math.prod(call.stride)
    for parity in range(twice):
        seen = np.concatenate([found[phase * twice + parity].ravel() for phase in range(phases)])
        np.testing.assert_array_equal(np.sort(seen[seen >= 0]), everything)
    if has_filter_gradient(config):
        _, (order,), _ = conv_depthwise_plan.orders("wgrad", call, config)
        plan = plan_filter(call, config)
        pixels = np.sort(order[order >= 0])
        np.testing.assert_array_equal(pixels, np.arange(call.images * math.prod(call.out)))
        assert len(order) == plan.parts * plan.splits


def spread(rng, shape):
    """Magnitudes over four decades, so that the order of additions shows even in a narrow result."""
    return rng.standard_normal(shape) * np.exp2(rng.integers(-9, 4, shape))


@needs_newer
@pytest.mark.parametrize("mode", ["cross_correlation", "convolution"])
@pytest.mark.parametrize("case", CASES)
def test_the_schedule_predicts_every_bit(case, mode):
    """The kernels' own instructions, on the model of the matrix unit, against the reference with the stated orders."""
    from jaxdnn._kernels.hopper import conv_depthwise as kernels

    shape, taps, group, dtype, *_ = CASES[case]
    *_, call, config, geometry = operands(case)
    out = (shape[0], *kernels._spatial(call.out, len(shape)), shape[-1])
    rng = np.random.default_rng(1)
    shapes = shape, (*taps, group, shape[-1]), out
    x, w, dy = (spread(rng, s).astype(np.float16).astype(DTYPES[dtype]) for s in shapes)
    turned = np.flip(w, tuple(range(len(taps)))) if mode == "convolution" else w
    options = {**geometry, "groups": shape[-1] // group, "mode": mode, "layout": {3: "NWC", 4: "NHWC"}[x.ndim]}

    def predicted(op, *arrays, **more):
        told = kernels.schedule(
            op, x.shape, w.shape, x.dtype, **geometry, config=config, flip=options["mode"] == "convolution"
        )
        plan = definition.Schedule(told.order, told.combine, classes=told.classes)
        function = {"fprop": definition.conv, "dgrad": definition.conv_dgrad, "wgrad": definition.conv_wgrad}[op]
        return function(*arrays, **options, arithmetic=told.arithmetic, schedule=plan, **more)

    y = run_walk("fprop", x, turned, call, config)
    np.testing.assert_array_equal(y.reshape(out), predicted("fprop", x, w))
    dx = run_walk("dgrad", dy, turned, call, config)
    np.testing.assert_array_equal(dx.reshape(x.shape), predicted("dgrad", dy, w, x.shape))
    if has_filter_gradient(config) and mode == "cross_correlation":
        dw = run_filter(x, dy, call, config)
        np.testing.assert_array_equal(dw.reshape(w.shape), predicted("wgrad", x, dy, w.shape, out_dtype=np.float32))


@needs_newer
def test_orders_that_change_places_show():
    """A negative control: even rows' order for odd rows and the other way round are not the kernel's bits."""
    from jaxdnn._kernels.hopper import conv_depthwise as kernels

    *_, call, config, geometry = operands("3x3")
    rng = np.random.default_rng(2)
    x, w = np.ones((2, 13, 14, 32), DTYPES["bf16"]), rng.standard_normal((3, 3, 1, 32)).astype(DTYPES["bf16"])
    w[:2, 0] = np.array([2**18, -(2**18)])[:, None, None]  # which meet in one instruction, or the second in a later one
    told = kernels.schedule("fprop", x.shape, w.shape, x.dtype, **geometry)
    got = run_walk("fprop", x, w, call, config).astype(np.float32)
    assert told.classes is not None
    for classes, equal in ((told.classes, True), (1 - told.classes, False)):
        plan = definition.Schedule(told.order, classes=classes)
        wanted = definition.conv(x, w, **geometry, groups=32, arithmetic=told.arithmetic, schedule=plan)
        assert np.array_equal(got, wanted.astype(np.float32)) is equal


def test_forward_order_ignores_batch_and_tiles():
    shape = (3, 3, 1, 32)
    geometry: dict[str, Any] = dict(stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))
    found = [
        conv_depthwise_plan.orders("fprop", window((n, size, size, 32), shape, jnp.bfloat16, **geometry))[1]
        for n in (1, 4)
        for size in (7, 28, 56)
    ]
    for orders in found:
        np.testing.assert_array_equal(orders, found[0])


@pytest.mark.parametrize(
    ("shape", "taps", "walk", "filter_gradient"),
    [
        ((128, 14, 14, 384), 3, (32, 2), (64, 2)),
        ((128, 7, 7, 960), 3, (32, 2), (64, 3)),
        ((2, 14, 14, 384), 3, (32, 1), (32, 2)),  # too few tiles to take in turn
        ((128, 14, 14, 144), 3, (32, 2), (32, 2)),  # 64 channels do not divide them
        ((128, 56, 56, 144), 3, (32, 1), (32, 2)),
        ((64, 28, 28, 384), 7, (32, 1), (32, 2)),
    ],
)
def test_channels_and_tiles_in_flight_are_those_that_were_measured(shape, taps, walk, filter_gradient):
    low = (taps // 2,) * 2
    call = window(shape, (taps, taps, 1, shape[-1]), jnp.bfloat16, stride=(1, 1), padding=(low, low), dilation=(1, 1))
    for op in ("fprop", "dgrad"):
        plan = plan_walk(op, call)
        assert (plan.channels, plan.stages) == walk
        fixed = plan_walk(op, call, Config(rows=plan.out_tile[0], columns=plan.out_tile[1]))
        assert (fixed.stages, fixed.out_tile) == (1, plan.out_tile)
    assert (plan_filter(call).channels, plan_filter(call).stages) == filter_gradient


def test_one_axis_order_ignores_the_image():
    call = window((4, 20, 32), (5, 1, 32), jnp.bfloat16, stride=(1,), padding=((4, 0),), dilation=(1,))
    _, (even, odd), _ = conv_depthwise_plan.orders("fprop", call)
    np.testing.assert_array_equal(even, odd)


def test_a_tile_starts_at_an_even_row():
    call = window((1, 20, 20, 32), (3, 3, 1, 32), jnp.bfloat16, **GEOMETRY)
    with pytest.raises(ValueError, match="rows are a multiple of 2 and its columns of 4, got 7 and 28"):
        plan_walk("fprop", call, Config(rows=7, columns=28))


GEOMETRY: dict[str, Any] = dict(stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))


@pytest.mark.parametrize(
    ("shape", "w_shape", "dtype", "reason"),
    [
        ((1, 8, 8, 8, 32), (3, 3, 3, 1, 32), "bfloat16", "one or two spatial axes"),
        ((1, 8, 8, 32), (3, 3, 1, 32), "float64", "the dtype is one of"),
        ((1, 8, 8, 32), (3, 3, 1, 64), "bfloat16", "as many output channels"),
        ((1, 8, 8, 48), (3, 3, 3, 48), "bfloat16", r"channels per group is one of \(1, 2, 4, 8\), got 3"),
        ((1, 8, 8, 36), (3, 3, 1, 36), "float16", "divisible by 8, got 36"),
        ((1, 8, 8, 32), (3, 3, 2, 32), "float32", "depthwise, got 2"),
        ((1, 8, 8, 32), (300, 3, 1, 32), "bfloat16", "nothing to compute"),
        ((1, 600, 600, 32), (257, 257, 1, 32), "bfloat16", "over 232448 bytes"),
    ],
)
def test_what_is_not_served_says_why(shape, w_shape, dtype, reason):
    why = unsupported("fprop", shape, w_shape, dtype, **GEOMETRY)
    assert why is not None
    assert re.search(reason, why), why


@needs_newer
@pytest.mark.parametrize("case", CASES)
def test_lowers_for_cuda(case):
    from jaxdnn._kernels.hopper import conv_depthwise as kernels

    x, w, dy, call, config, geometry = operands(case)
    dy = dy.reshape(*x.shape[:1], *kernels._spatial(call.out, x.ndim), x.shape[-1])
    calls = {
        "fprop": (ft.partial(kernels.depthwise_fprop, **geometry, config=config), (x, w), dy.shape),
        "dgrad": (lambda dy, w: kernels.depthwise_dgrad(dy, w, x.shape, **geometry, config=config), (dy, w), x.shape),
    }
    if has_filter_gradient(config):
        wgrad = lambda x, dy: kernels.depthwise_wgrad(x, dy, w.shape, **geometry, config=config)
        calls["wgrad"] = (wgrad, (x, dy), w.shape)
    for op, (function, arrays, shape) in calls.items():
        assert kernels.supports(op, x.shape, w.shape, x.dtype, **geometry, config=config) is None
        specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        traced = jax.jit(function).trace(*specs)
        assert traced.out_info.shape == shape
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text


@needs_newer
@pytest.mark.parametrize("case", CASES)
def test_a_limit_of_multiprocessors_bounds_every_grid(case, monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxdnn._kernels.hopper import conv_depthwise as kernels

    grids, launch = [], plgpu.kernel
    monkeypatch.setattr(plgpu, "kernel", lambda *a, **k: grids.append(k["grid"]) or launch(*a, **k))
    x, w, dy, call, config, geometry = operands(case)
    dy = dy.reshape(*x.shape[:1], *kernels._spatial(call.out, x.ndim), x.shape[-1])

    def all_of_them(x, w, dy, **limit):
        found = [kernels.depthwise_fprop(x, w, **geometry, config=config, **limit)]
        found.append(kernels.depthwise_dgrad(dy, w, x.shape, **geometry, config=config, **limit))
        return found if config else [*found, kernels.depthwise_wgrad(x, dy, w.shape, **geometry, **limit)]

    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w, dy)]
    jax.eval_shape(all_of_them, *specs)
    everywhere = [grid[0] for grid in grids]
    assert len(everywhere) == (2 if config else 4)  # the filter gradient's partial sums and their addition
    for sms in (1, 2, 10**6):
        grids.clear()
        text = jax.jit(ft.partial(all_of_them, sms=sms)).trace(*specs).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text
        assert [grid[0] for grid in grids] == [min(sms, blocks) for blocks in everywhere]


@needs_newer
@pytest.mark.parametrize(("items", "sms"), [(7, None), (7, 3), (6, 2), (5, 9), (6, 1)])
def test_every_item_is_done_under_a_limit(items, sms):
    """The loop of a block of threads, on Pallas' interpreter."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxdnn._kernels.hopper import conv_depthwise as kernels

    def body(x: Any, y: Any) -> None:
        def add_one(at: Any) -> None:
            y[at] = x[at] + 1

        kernels._each(items, sms, "block", add_one)

    interpreter: Any = getattr(plgpu, "InterpretGPUParams")  # noqa: B009  (older releases have none)
    run = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((items,), jnp.int32), grid=kernels._grid(items, sms), grid_names=("block",),
        interpret=interpreter(),
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(run)(jnp.arange(items, dtype=jnp.int32)), np.arange(items) + 1)
