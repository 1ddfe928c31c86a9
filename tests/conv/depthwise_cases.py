"""Depthwise and narrow-group convolutions for the tests of their kernels, and what runs a kernel's PTX without a GPU.

Pallas' interpreter cannot run inline PTX. So this does what the frame around it does (fetch tiles with zeros outside
the image, store clipped tiles, add partial sums in order) and runs the PTX itself on `tests.hopper.ptx_machine`.
"""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxdnn._src import hopper
from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper.depthwise import filter, fma
from jaxdnn._src.conv.hopper.depthwise.filter_plan import plan_filter
from jaxdnn._src.conv.hopper.depthwise.plan import bias_floats, plan_walk
from jaxdnn._src.conv.hopper.depthwise.plan import unsupported as refusal
from jaxdnn._src.conv.hopper.depthwise.planar import Config, Planar, planar
from jaxdnn._src.conv.hopper.depthwise.walk import Walk, walk
from tests.hopper.ptx_machine import Machine, from_tile_bytes, tile_bytes
from tests.hopper.races import Races

needs_newer = pytest.mark.skipif(hopper.unavailable() is not None, reason=hopper.unavailable() or "")
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
GEOMETRY: dict[str, Any] = dict(stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))

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
    "one tap": ((2, 5, 6, 40), (1, 1), 1, "bf16", (1, 1), ((0, 0), (0, 0)), (1, 1), None),
    "one axis, two rows left over": ((2, 50, 16), (2,), 8, "bf16", (2,), ((0, 2),), (1,), None),
    "one axis, far taps": ((1, 60, 16), (3,), 1, "f16", (1,), ((16, 16),), (16,), None),
    "two rows": ((3, 2, 2, 16), (3, 3), 1, "bf16", (2, 2), ((1, 1), (1, 1)), (1, 1), None),
    "six rows by four": ((2, 6, 4, 16), (5, 3), 2, "bf16", (1, 1), ((2, 2), (1, 1)), (1, 1), None),
    "tiles in flight": ((3, 13, 14, 32), (3, 3), 1, "bf16", (1, 1), ((1, 1), (1, 1)), (1, 1), Config(stages=2)),
    "64 channels": ((1, 8, 9, 64), (3, 3), 1, "bf16", (1, 1), ((1, 1), (1, 1)), (1, 1), Config(channels=64)),
    "fma": ((2, 9, 10, 36), (3, 3), 1, "f32", (1, 1), ((1, 1), (1, 1)), (1, 1), None),
    "fma, stride 2": ((1, 9, 10, 32), (3, 3), 1, "f32", (2, 2), ((1, 1), (1, 1)), (1, 1), None),
    "fma, one axis": ((3, 13, 32), (4,), 1, "f32", (1,), ((3, 0),), (2,), None),
    "fma, many tap columns": ((1, 8, 9, 64), (2, 9), 1, "f32", (1, 1), ((1, 0), (4, 4)), (1, 1), None),
}


def box(array, start, shape):
    """What a TMA copy fetches: zeros outside the array."""
    out = np.zeros(shape, array.dtype)
    inside = [slice(max(0, s), max(0, min(n, s + k))) for s, n, k in zip(start, array.shape, shape, strict=True)]
    if all(part.stop > part.start for part in inside):
        target = tuple(slice(p.start - s, p.stop - s) for p, s in zip(inside, start, strict=True))
        out[target] = array[tuple(inside)]
    return out


class Watched(Machine):
    """A machine on which two warps may not meet in a word that one of them stores: a walk has no barrier inside."""

    def run(self, text: str, operands: list[Any], warps: int) -> None:
        self.races, self.current = Races(32 * warps, self.shared.size), 0
        super().run(text, operands, warps)

    def _warp(self, code: Any, labels: Any, registers: Any) -> None:
        self.current = int(registers["%tid.x"][0])
        super()._warp(code, labels, registers)

    def _step(self, name: Any, operands: Any, registers: Any, active: Any) -> None:
        match name:
            case ["ld" | "st", "shared", width]:
                place = operands[name[0] == "ld"]
                self._seen(name[0], self._address(registers, place)[active], int(width[1:]) // 8)
            case ["ldmatrix" | "stmatrix", _, _, _, count, *_]:
                place = operands[name[0] == "ldmatrix"]
                self._seen(name[0], self._address(registers, place)[: 8 * int(count[1])], 16)
        super()._step(name, operands, registers, active)

    def _seen(self, name: str, starts: np.ndarray, size: int) -> None:
        places = starts[:, None] + np.arange(size)
        note = self.races.load if name.startswith("ld") else self.races.store
        note(np.full(len(places), self.current), places)


class Memory:
    """Buffers in a machine's shared memory, aligned as Mosaic aligns them; no access may touch what lies between."""

    def __init__(self):
        self.machine, self._end = Watched(1 << 20), 1024

    def put(self, values, swizzle=0):
        return self.put_slot(values, 0, 1, swizzle)

    def put_slot(self, values, slot, slots, swizzle=0):
        """One of several tiles that lie one behind the other; the swizzle goes by the address. The slot's address."""
        tiles = np.full((slots, *values.shape), np.nan, values.dtype)
        tiles[slot] = values
        self.machine.shared[self._end : self._end + tiles.nbytes] = tile_bytes(tiles, swizzle)
        address = self._end + slot * values.nbytes
        self.machine.allocated[address : address + values.nbytes] = True
        self._end += -(-tiles.nbytes // 1024) * 1024 + 1024
        return address

    def get(self, address, dtype, shape, swizzle=0):
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return from_tile_bytes(self.machine.shared[address : address + size], dtype, shape, swizzle)


def run_walk(op, source, w, call, config, change=lambda text: text, bias=None):
    plan = plan_walk(op, call, config, bias=bias is not None)
    text = change(walk(plan.walk) if isinstance(plan.walk, Walk) else fma.lane_walk(plan.walk))
    inputs, outputs = (call.sizes, call.out) if op == "fprop" else (call.out, call.sizes)
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
                    at = [x_at, w_at, y_at]
                    if bias is not None:
                        floats = np.zeros(bias_floats(plan.channels), np.float32)
                        floats[: plan.channels] = box(bias, (c,), (plan.channels,))
                        at.append(memory.put_slot(floats, slot, plan.stages))
                    memory.machine.run(text, at, 4)
                    tile = memory.get(y_at, y.dtype, shape, plan.swizzle)
                    p, q = i * plan.out_tile[0], j * plan.out_tile[1]
                    to = y[n, p : p + shape[0], q : q + shape[1], c : c + shape[2]]
                    to[...] = tile[: to.shape[0], : to.shape[1], : to.shape[2]]
    return y


def filter_code(plan):
    tensor = isinstance(plan.walk, filter.FilterWalk)
    module = filter if tensor else fma
    names = ("filter_walk", "filter_store") if tensor else ("lane_filter", "lane_store")
    return [getattr(module, name)(plan.walk) for name in names]


def run_a_tile(op, call, config):
    """One tile of zeros in the last slot: every access must lie in a buffer, and all of the result is written."""
    memory, dtype = Memory(), DTYPES[call.dtype]
    plan: Any = plan_filter(call, config) if op == "wgrad" else plan_walk(op, call, config)
    put = lambda shape, swizzle: memory.put_slot(np.zeros(shape, dtype), plan.stages - 1, plan.stages, swizzle)
    x_at = put((*plan.in_tile, plan.channels), plan.swizzle)
    if op == "wgrad":
        body, store = filter_code(plan)
        warps = 4 * plan.warpgroups
        sums = [np.zeros((warps, 32), np.float32) for _ in range(plan.walk.accumulators)]
        dy_at = put((*plan.out_tile, plan.channels), plan.swizzle)
        memory.machine.run(body, [*sums, *[0] * len(sums), x_at, dy_at], warps)
        memory, shape, dtype, swizzle = (
            Memory(),
            (plan.parts, *plan.tap_block, call.group, plan.channels),
            np.float32,
            0,
        )
        at = memory.put(np.full(shape, np.nan, np.float32))
        memory.machine.run(store, [*sums, at], warps)
    else:
        text = walk(plan.walk) if isinstance(plan.walk, Walk) else fma.lane_walk(plan.walk)
        w_at = put((call.taps[0], plan.walk.filter_columns * call.group, plan.channels), 0)
        shape, swizzle = (*plan.out_tile, plan.channels), plan.swizzle
        at = memory.put(np.full(shape, np.nan, dtype))
        memory.machine.run(text, [x_at, w_at, at], 4)
    np.testing.assert_array_equal(memory.get(at, dtype, shape, swizzle), np.zeros(shape, dtype))


def run_filter(x, dy, call, config):
    plan = plan_filter(call, config)
    body, store = filter_code(plan)
    x = x.reshape(call.images, *call.sizes, call.channels)
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
    x = x.astype(np.float64).reshape(images, *call.sizes, -1)
    dy = dy.astype(np.float64).reshape(images, *call.out, -1)
    w = w.astype(np.float64).reshape(*call.taps, group, -1)
    reach = [(call.out[i] - 1) * call.stride[i] + (call.taps[i] - 1) * call.dilation[i] + 1 for i in range(2)]
    after = [max(0, reach[i] - call.sizes[i] - call.low[i]) for i in range(2)]
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
    inside = tuple(slice(call.low[i], call.low[i] + call.sizes[i]) for i in range(2))
    return y, dx[:, *inside], dw.reshape(call.taps[0], -1, call.channels)


def geometry(shape: Any, w_shape: Any, *, stride: Any, padding: Any, dilation: Any) -> Geometry:
    """The convolution of an x (n, [h,] w, c) and a filter ([r,] s, c/groups, k) of these shapes."""
    return Geometry(shape[1:-1], w_shape[:-2], stride, padding, dilation, groups=shape[-1] // w_shape[-2])


def window(shape: Any, w_shape: Any, dtype: Any, **options: Any) -> Planar:
    """The same as two axes."""
    return planar(geometry(shape, w_shape, **options), shape[0], shape[-1], dtype)


def unsupported(op: str, shape: Any, w_shape: Any, dtype: Any, *, config: Any = None, **options: Any) -> str | None:
    """Why the kernels do not serve it."""
    return refusal(op, geometry(shape, w_shape, **options), shape[0], shape[-1], w_shape[-1], dtype, config)


def operands(case, seed=0):
    shape, taps, group, dtype, stride, padding, dilation, config = CASES[case]
    rng = np.random.default_rng(seed)
    w_shape = (*taps, group, shape[-1])
    geo = geometry(shape, w_shape, stride=stride, padding=padding, dilation=dilation)
    call = planar(geo, shape[0], shape[-1], DTYPES[dtype])
    draw = lambda size: rng.integers(-2, 3, size).astype(DTYPES[dtype])
    x, w, dy = draw(shape), draw(w_shape), draw((call.images, *call.out, call.channels))
    return x, w, dy, call, config, geo
