"""Depthwise and narrow-group convolution: which calls are supported, and the tiles of forward and backward data.

Pure Python on shapes; the kernels are in `depthwise`.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper.depthwise.filter_plan import plan_filter
from jaxdnn._src.conv.hopper.depthwise.fma import LaneWalk
from jaxdnn._src.conv.hopper.depthwise.planar import (
    DTYPES,
    Config,
    NoTile,
    Planar,
    best,
    check_tile,
    planar,
    whole_copies,
    whole_pattern,
)
from jaxdnn._src.conv.hopper.depthwise.walk import Phase, Walk
from jaxdnn._src.hopper.sizes import MULTIPROCESSORS, SHARED_BYTES, aligned, ceil_div

GROUPS = (1, 2, 4, 8)
IN_TURN = 4  # the most blocks of a multiprocessor that process several tiles each


def unsupported(
    op: str,
    geo: Geometry,
    images: int,
    channels: int,
    filters: int,
    dtype: Any,
    config: Config | None = None,
    *,
    bias: bool = False,
) -> str | None:
    """Why the kernels do not serve a call (a clause), or None; `op` is "fprop", "dgrad" or "wgrad"."""
    if geo.rank not in (1, 2):
        return f"these kernels have one or two spatial axes, the call has {geo.rank}"
    name = np.dtype(dtype).name
    if name not in DTYPES:
        return f"the dtype is one of {', '.join(DTYPES)}, got {name}"
    group = channels // geo.groups
    if filters != channels:
        return f"these kernels have as many output channels as input channels, got {filters} and {channels}"
    if group not in GROUPS or channels % group:
        return f"channels per group is one of {GROUPS}, got {group}"
    if name == "float32" and group > 1:
        return f"in float32 these kernels are depthwise, got {group} channels per group"
    many = 16 // np.dtype(dtype).itemsize
    if channels % many:
        return f"the copy engine needs rows of 16 bytes: channels divisible by {many}, got {channels}"
    call = planar(geo, images, channels, dtype)
    if min(*call.out, *call.sizes, call.images, channels) < 1:
        return f"there is nothing to compute: input {(images, *geo.sizes, channels)} gives output size {call.out}"
    if min(call.low) < 0 or any(high < 0 for _, high in geo.padding):
        return f"negative padding is not served, got {geo.padding}"
    try:
        plan_filter(call, config) if op == "wgrad" else plan_walk(op, call, config, bias=bias)
    except NoTile as error:
        return str(error)
    return None


def phases(op: str, call: Planar) -> tuple[tuple[Phase, ...], tuple[int, int]]:
    """The phases of the outputs (forward has one), and the input offset of the tile's first row and column."""
    if op == "fprop":
        taps = [tuple((t, t * call.dilation[i]) for t in range(call.taps[i])) for i in range(2)]
        return (Phase((0, 0), taps[0], taps[1]),), (-call.low[0], -call.low[1])
    found: list[list[tuple[tuple[int, int], ...]]] = []
    first: list[int] = []
    for i in range(2):
        step = call.stride[i]
        reach = [
            [
                (t, (a + call.low[i] - t * call.dilation[i]) // step)
                for t in reversed(range(call.taps[i]))
                if (a + call.low[i] - t * call.dilation[i]) % step == 0
            ]
            for a in range(step)
        ]
        lowest = min(offset for taps in reach for _, offset in taps)
        first.append(lowest)
        found.append([tuple((t, offset - lowest) for t, offset in taps) for taps in reach])
    grid = tuple(Phase((a, b), rows, columns) for a, rows in enumerate(found[0]) for b, columns in enumerate(found[1]))
    return grid, (first[0], first[1])


@dataclasses.dataclass(frozen=True)
class WalkPlan:
    """A launch of forward or backward data: the arithmetic of a tile, the tiles, and where their inputs are."""

    walk: Walk | LaneWalk
    channels: int
    in_tile: tuple[int, int]
    out_tile: tuple[int, int]
    advance: tuple[int, int]  # input rows and columns from one tile to the next
    first: tuple[int, int]  # of the first tile
    tiles: tuple[int, int]
    swizzle: int  # bytes, 0 for none
    stages: int = 1  # tiles in flight in one block
    blocks: int = 0  # with several stages, the most blocks, which process several tiles each

    def shared_bytes(self, filter_rows: int, itemsize: int) -> int:
        pixels = self.stages * math.prod(self.in_tile), self.stages * filter_rows, math.prod(self.out_tile)
        biases = aligned(self.stages * bias_floats(self.channels) * 4) if self.walk.bias else 0
        return sum(aligned(n * self.channels * itemsize) for n in pixels) + biases + 1024


def bias_floats(channels: int) -> int:
    """Floats of a tile's biases in shared memory: 128 bytes at least, as a copy by one warpgroup needs."""
    return max(32, channels)


def plan_walk(op: str, call: Planar, config: Config | None = None, *, bias: bool = False) -> WalkPlan:
    """The tiles of a forward ("fprop") or backward-data ("dgrad") call.

    Measured: on the tensor core, blocks that process several tiles with two in flight are faster if four of them fit
    into a multiprocessor, and slower if two or three do.

    Raises:
      ValueError: no tile fits into shared memory, or into what one copy can fetch.
    """
    config = config or Config()
    plan = _plan_walk(op, call, config, bias)
    if config.stages or config.rows or config.columns or not isinstance(plan.walk, Walk):
        return plan
    turns = _plan_walk(op, call, dataclasses.replace(config, stages=2), bias)
    tiles = ceil_div(call.channels, plan.channels) * math.prod(plan.tiles) * call.images
    same = (turns.out_tile, turns.channels) == (plan.out_tile, plan.channels)
    return turns if same and turns.blocks == IN_TURN * MULTIPROCESSORS and tiles > turns.blocks else plan


def _plan_walk(op: str, call: Planar, config: Config, bias: bool) -> WalkPlan:
    check_tile(config, (1, 1) if op == "fprop" else call.stride)
    grid, first = phases(op, call)
    forward = op == "fprop"
    in_step, out_step = (call.stride, (1, 1)) if forward else ((1, 1), call.stride)
    target = call.out if forward else call.sizes
    itemsize = call.itemsize
    extent = [ceil_div(target[i], out_step[i]) for i in range(2)]
    rows = config.rows // out_step[0] if config.rows else best(extent[0], (14, 16, 12, 10, 8, 6, 4, 2))
    columns = config.columns // out_step[1] if config.columns else best(extent[1], (28, 32, 24, 20, 16, 12, 8, 4))
    least = 4
    if not call.tensor:  # a store as wide as the image would be contiguous, and TMA would not clip it at the last row
        columns += 4 if columns * out_step[1] == target[1] else 0
        least += 4 if least * out_step[1] == target[1] else 0
    stages = config.stages or 1
    widths = [config.channels] if config.channels else [32, 16] if call.tensor else [32]
    reach = [
        max((offset for phase in grid for _, offset in (phase.row_taps, phase.column_taps)[i]), default=0)
        for i in range(2)
    ]
    size, boxes = 0, (0,)
    while True:
        for channels in widths:
            tall, wide = (rows - 1) * in_step[0] + reach[0] + 1, (columns - 1) * in_step[1] + reach[1] + 1
            tall += tall % 2 if call.tensor else 0  # input rows are read in pairs
            wide = whole_copies(wide, channels * itemsize)
            in_tile = whole_pattern(tall, wide) if stages > 1 else tall, wide
            filter_columns = whole_copies(call.taps[1], channels * itemsize)
            out_tile = rows * out_step[0], columns * out_step[1]
            common: dict[str, Any] = dict(
                filter_columns=filter_columns, in_pitch=in_tile[1], out_pitch=out_tile[1],
                in_step=in_step, out_step=out_step, rows=rows, columns=columns, phases=grid, bias=bias,
            )  # fmt: skip
            if call.tensor:
                common |= dict(dtype=call.dtype, channels=channels, group=call.group, swapped=not forward, block=rows)
            walk = Walk(**common) if call.tensor else LaneWalk(**common)
            plan = WalkPlan(
                walk,
                channels,
                in_tile,
                out_tile,
                (rows * in_step[0], columns * in_step[1]),
                first,
                (ceil_div(target[0], out_tile[0]), ceil_div(target[1], out_tile[1])),
                2 * channels if call.tensor else 0,
                stages,
            )
            size = plan.shared_bytes(call.taps[0] * filter_columns * call.group, itemsize)
            boxes = (*in_tile, *out_tile, call.taps[0], filter_columns * call.group)
            if size <= SHARED_BYTES and max(boxes) <= 256:
                resident = min(SHARED_BYTES // (size + 1024), IN_TURN)
                return plan if stages == 1 else dataclasses.replace(plan, blocks=MULTIPROCESSORS * resident)
        if config.rows or config.columns or (rows <= 2 and columns <= least):
            raise NoTile(f"a tile of {size} bytes and {max(boxes)} pixels a side is over {SHARED_BYTES} bytes or 256")
        if columns > 8 or rows <= 2:
            columns = max(least, columns // 8 * 4)
        else:
            rows = max(2, rows // 4 * 2)
