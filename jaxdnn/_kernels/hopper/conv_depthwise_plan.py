"""Depthwise and narrow-group convolution: geometry, tile choice, what is served, and the order of additions.

Pure Python on shapes; the kernels are in `conv_depthwise`. Letters: n images, h w input rows and columns, c channels,
r s filter taps, p q output rows and columns. One-dimensional calls become rows of images: (n, w, c) is the image
(1, n, w, c) under a filter of one row.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdnn._kernels.hopper.conv_depthwise_filter import FilterWalk, pixel_order
from jaxdnn._kernels.hopper.conv_depthwise_fma import LaneFilter, LaneWalk
from jaxdnn._kernels.hopper.conv_depthwise_walk import Phase, Walk, tap_steps

SHARED_BYTES = 232448  # of one block, at most
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
GROUPS = (1, 2, 4, 8)
IN_TURN = 4  # blocks of a multiprocessor that take tiles in turn, at most


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is tiled; the fields left None are chosen from the shape.

    Attributes:
      unit: "tensor" (mma, 16-bit) or "fma" (float32 fused multiply-adds, depthwise only).
      channels: channels of a tile (16, 32 or 64 on the tensor core, filter gradient 32 or 64; else 128 bytes' worth).
      rows, columns: outputs of a tile; rows even, columns a multiple of 4 (times the stride for backward data).
      splits: filter gradient: parts of the sum over pixels, at most.
      stages: tiles in flight in one block; more than one: the blocks are few, and take tiles in turn.
    """

    unit: str | None = None
    channels: int | None = None
    rows: int | None = None
    columns: int | None = None
    splits: int | None = None
    stages: int | None = None


@dataclasses.dataclass(frozen=True)
class Window:
    """A two-dimensional call: the shapes, and stride, low padding and dilation of its two axes."""

    images: int
    size: tuple[int, int]
    out: tuple[int, int]
    taps: tuple[int, int]
    channels: int
    group: int
    stride: tuple[int, int]
    low: tuple[int, int]
    dilation: tuple[int, int]
    dtype: str


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _aligned(size: int) -> int:
    return ceil_div(size, 1024) * 1024


def whole_copies(columns: int, pixel_bytes: int) -> int:
    """Columns rounded up so that a tile's bytes divide by 128, as a copy by one warpgroup needs."""
    many = max(1, 128 // pixel_bytes)
    return ceil_div(columns, many) * many


def whole_pattern(tall: int, wide: int) -> int:
    """Rows added until a tile's pixels divide by 8: there the pattern repeats in which the pixels' chunks lie.

    The pattern follows the address, so a tile behind another one must start where it starts.
    """
    return next(rows for rows in range(tall, tall + 8) if rows * wide % 8 == 0)


def window(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    dtype: Any,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> Window:
    """The call as two axes; x (n, *spatial, c) and w (*taps, c/groups, k)."""
    images, *size, channels = x_shape
    taps, group = list(w_shape[:-2]), w_shape[-2]
    stride, dilation, padding = list(stride), list(dilation), list(padding)
    out = [(size[i] + sum(padding[i]) - dilation[i] * (taps[i] - 1) - 1) // stride[i] + 1 for i in range(len(size))]
    low = [p[0] for p in padding]
    if len(size) == 1:
        size, out, taps = [images, *size], [images, *out], [1, *taps]
        stride, dilation, low = [1, *stride], [1, *dilation], [0, *low]
        images = 1
    two = lambda values: (int(values[0]), int(values[1]))
    name = DTYPES.get(np.dtype(dtype).name, "")
    return Window(images, two(size), two(out), two(taps), channels, group, two(stride), two(low), two(dilation), name)


def unsupported(
    op: str,
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    dtype: Any,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
) -> str | None:
    """Why a call is not served (a clause), or None; `op` is "fprop", "dgrad" or "wgrad"."""
    if len(x_shape) not in (3, 4):
        return f"these kernels have one or two spatial axes, the call has {len(x_shape) - 2}"
    name = np.dtype(dtype).name
    if name not in DTYPES:
        return f"the dtype is one of {', '.join(DTYPES)}, got {name}"
    channels, group, filters = x_shape[-1], w_shape[-2], w_shape[-1]
    if filters != channels:
        return f"these kernels have as many output channels as input channels, got {filters} and {channels}"
    if group not in GROUPS or channels % group:
        return f"channels per group is one of {GROUPS}, got {group}"
    unit = (config and config.unit) or default_unit(DTYPES[name])
    if unit == "tensor" and name == "float32":
        return "the tensor-core kernels are for bfloat16 and float16, the operands are float32"
    if unit == "fma" and group > 1:
        return f"in float32 these kernels are depthwise, got {group} channels per group"
    if unit == "fma" and op == "wgrad" and name != "float32":
        return f"the filter gradient by fused multiply-adds is for float32, got {name}"
    many = 16 // np.dtype(dtype).itemsize
    if channels % many:
        return f"the copy engine needs rows of 16 bytes: channels divisible by {many}, got {channels}"
    call = window(x_shape, w_shape, dtype, stride=stride, padding=padding, dilation=dilation)
    if min(*call.out, *call.size, call.images, channels) < 1:
        return f"there is nothing to compute: input {tuple(x_shape)} gives output size {call.out}"
    if min(call.low) < 0 or any(high < 0 for _, high in padding):
        return f"negative padding is not served, got {tuple(padding)}"
    try:
        plan_filter(call, config) if op == "wgrad" else plan_walk(op, call, config)
    except _NoTile as error:
        return str(error)
    return None


class _NoTile(ValueError):
    pass


def _check_tile(config: Config, step: tuple[int, int]) -> None:
    """Tiles start at even rows (of a phase), so that the pairing of rows is the same for all; columns come in fours."""
    if (config.rows and config.rows % (2 * step[0])) or (config.columns and config.columns % (4 * step[1])):
        raise _NoTile(
            f"a tile's rows are a multiple of {2 * step[0]} and its columns of {4 * step[1]}, "
            f"got {config.rows} and {config.columns}"
        )


def default_unit(dtype: str) -> str:
    return "fma" if dtype == "f32" else "tensor"


def _best(extent: int, choices: Sequence[int]) -> int:
    """The choice that covers the extent with the least work, counting six rows or columns of halo to a tile."""
    return min(choices, key=lambda size: (ceil_div(extent, size) * (size + 6), -size))


def phases(op: str, call: Window) -> tuple[tuple[Phase, ...], tuple[int, int]]:
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
    """A forward or backward-data launch: the walk, the tiles, and where an output tile's input tile lies."""

    walk: Walk | LaneWalk
    channels: int
    in_tile: tuple[int, int]
    out_tile: tuple[int, int]
    advance: tuple[int, int]  # input rows and columns from one tile to the next
    first: tuple[int, int]  # of the first tile
    tiles: tuple[int, int]
    swizzle: int  # bytes, 0 for none
    stages: int = 1  # tiles in flight in one block
    blocks: int = 0  # with stages, at most so many, which take tiles in turn

    def shared_bytes(self, filter_rows: int, itemsize: int) -> int:
        pixels = self.stages * math.prod(self.in_tile), self.stages * filter_rows, math.prod(self.out_tile)
        return sum(_aligned(n * self.channels * itemsize) for n in pixels) + 1024


def plan_walk(op: str, call: Window, config: Config | None = None, multiprocessors: int = 132) -> WalkPlan:
    """The tiles of a forward ("fprop") or backward-data ("dgrad") call.

    Measured: on the tensor core blocks that take tiles in turn, two in flight, win where four of them fit into a
    multiprocessor, and lose where two or three do.

    Raises:
      ValueError: no tile fits into shared memory, or into what one copy can fetch.
    """
    config = config or Config()
    plan = _plan_walk(op, call, config, multiprocessors)
    if config.stages or config.rows or config.columns or not isinstance(plan.walk, Walk):
        return plan
    turns = _plan_walk(op, call, dataclasses.replace(config, stages=2), multiprocessors)
    tiles = ceil_div(call.channels, plan.channels) * math.prod(plan.tiles) * call.images
    same = (turns.out_tile, turns.channels) == (plan.out_tile, plan.channels)
    return turns if same and turns.blocks == IN_TURN * multiprocessors and tiles > turns.blocks else plan


def _plan_walk(op: str, call: Window, config: Config, multiprocessors: int) -> WalkPlan:
    _check_tile(config, (1, 1) if op == "fprop" else call.stride)
    grid, first = phases(op, call)
    forward = op == "fprop"
    in_step, out_step = (call.stride, (1, 1)) if forward else ((1, 1), call.stride)
    target = call.out if forward else call.size
    unit = config.unit or default_unit(call.dtype)
    itemsize = 4 if call.dtype == "f32" else 2
    extent = [ceil_div(target[i], out_step[i]) for i in range(2)]
    rows = config.rows // out_step[0] if config.rows else _best(extent[0], (14, 16, 12, 10, 8, 6, 4, 2))
    columns = config.columns // out_step[1] if config.columns else _best(extent[1], (28, 32, 24, 20, 16, 12, 8, 4))
    least = 4
    if unit == "fma":  # a store as wide as the image would be one piece of memory, and not be clipped at its last row
        columns += 4 if columns * out_step[1] == target[1] else 0
        least += 4 if least * out_step[1] == target[1] else 0
    stages = config.stages or 1
    widths = [config.channels] if config.channels else [32, 16] if unit == "tensor" else [128 // itemsize]
    reach = [
        max((offset for phase in grid for _, offset in (phase.row_taps, phase.column_taps)[i]), default=0)
        for i in range(2)
    ]
    size, boxes = 0, (0,)
    while True:
        for channels in widths:
            tall, wide = (rows - 1) * in_step[0] + reach[0] + 1, (columns - 1) * in_step[1] + reach[1] + 1
            tall += tall % 2 if unit == "tensor" else 0  # input rows are read in pairs
            wide = whole_copies(wide, channels * itemsize)
            in_tile = whole_pattern(tall, wide) if stages > 1 else tall, wide
            filter_columns = whole_copies(call.taps[1], channels * itemsize)
            out_tile = rows * out_step[0], columns * out_step[1]
            common: dict[str, Any] = dict(
                dtype=call.dtype, filter_columns=filter_columns, in_pitch=in_tile[1], out_pitch=out_tile[1],
                in_step=in_step, out_step=out_step, rows=rows, columns=columns, phases=grid,
            )  # fmt: skip
            walk = (
                Walk(
                    channels=channels,
                    group=call.group,
                    swapped=not forward,
                    block=rows,
                    **common,
                )
                if unit == "tensor"
                else LaneWalk(**common)
            )
            plan = WalkPlan(
                walk,
                channels,
                in_tile,
                out_tile,
                (rows * in_step[0], columns * in_step[1]),
                first,
                (ceil_div(target[0], out_tile[0]), ceil_div(target[1], out_tile[1])),
                2 * channels if unit == "tensor" else 0,
                stages,
            )
            size = plan.shared_bytes(call.taps[0] * filter_columns * call.group, itemsize)
            boxes = (*in_tile, *out_tile, call.taps[0], filter_columns * call.group)
            if size <= SHARED_BYTES and max(boxes) <= 256:
                resident = min(SHARED_BYTES // (size + 1024), IN_TURN)
                return plan if stages == 1 else dataclasses.replace(plan, blocks=multiprocessors * resident)
        if config.rows or config.columns or (rows <= 2 and columns <= least):
            raise _NoTile(f"a tile of {size} bytes and {max(boxes)} pixels a side is over {SHARED_BYTES} bytes or 256")
        if columns > 8 or rows <= 2:
            columns = max(least, columns // 8 * 4)
        else:
            rows = max(2, rows // 4 * 2)


@dataclasses.dataclass(frozen=True)
class FilterPlan:
    """A filter-gradient launch: a block sums, for some taps and channels, the tiles of one split, in order."""

    walk: FilterWalk | LaneFilter
    channels: int
    in_tile: tuple[int, int]
    out_tile: tuple[int, int]
    tap_block: tuple[int, int]
    tap_blocks: tuple[int, int]
    tiles: tuple[int, int]
    per_split: int  # tiles (images first, then rows, then columns) of a split
    splits: int
    stages: int
    parts: int  # sums per split: 1, or one for each warp
    warpgroups: int
    swizzle: int

    def partial_shape(self, call: Window) -> tuple[int, int, int, int, int]:
        """(splits, parts, r, s * group, c) of the partial sums, in whole blocks of taps.

        An unswizzled copy that is one piece of memory is not clipped (JAX 0.11), so none may reach over an edge.
        """
        rows, columns = (n * b for n, b in zip(self.tap_blocks, self.tap_block, strict=True))
        return self.splits, self.parts, rows, columns * call.group, call.channels


def plan_filter(call: Window, config: Config | None = None, multiprocessors: int = 132) -> FilterPlan:
    """The tiles and splits of a filter gradient.

    Measured: depthwise, 3x3, stride 1 and a tile for a whole image, tiles of 64 channels win, whose rows in memory are
    twice as long: three in flight where two such blocks fit into a multiprocessor, else two.

    Raises:
      ValueError: no tile fits into shared memory, or into what one copy can fetch.
    """
    config = config or Config()
    plan, _ = _plan_filter(call, config, multiprocessors)
    measured = isinstance(plan.walk, FilterWalk) and call.group == 1 and max(call.taps) <= 3 and call.stride == (1, 1)
    if config != Config() or not measured or call.channels % 64 or plan.tiles != (1, 1):
        return plan
    for stages, resident in ((3, 2), (2, 1)):
        wide, fit = _plan_filter(call, Config(channels=64, stages=stages), multiprocessors)
        if wide.out_tile == plan.out_tile and fit >= resident and wide.per_split >= 4:
            return wide
    return plan


def _plan_filter(call: Window, config: Config, multiprocessors: int) -> tuple[FilterPlan, int]:
    """A plan, and how many of its blocks a multiprocessor is taken to hold."""
    _check_tile(config, (1, 1))
    unit = config.unit or default_unit(call.dtype)
    itemsize = 4 if call.dtype == "f32" else 2
    taps = min(call.taps[0], 8), min(call.taps[1], 8)
    warpgroups = 2 if unit == "tensor" and taps[1] > 6 else 1
    per_group = ceil_div(taps[1], warpgroups)
    block = taps[0], per_group * warpgroups
    # Measured: with two warpgroups (wide filters) many small tiles win, with one few large ones.
    rows = config.rows or _best(call.out[0], (4, 2) if warpgroups == 2 else (14, 16, 12, 10, 8, 6, 4, 2))
    columns = config.columns or _best(call.out[1], (28, 32, 24, 20, 16, 12, 8, 4))
    stages = config.stages or (2 if unit == "tensor" else 1)
    channels = config.channels or 32
    if channels not in ((32, 64) if unit == "tensor" else (32,)) or (channels > 32 and call.channels % channels):
        raise _NoTile(f"a filter gradient's tiles have 32 channels, or 64 that divide all, got {channels}")
    parts = 1 if unit == "tensor" else 4
    tap_blocks = ceil_div(call.taps[0], block[0]), ceil_div(call.taps[1], block[1])
    while True:
        tall, wide = (
            (n - 1) * call.stride[i] + (block[i] - 1) * call.dilation[i] + 1 for i, n in enumerate((rows, columns))
        )
        wide = whole_copies(wide, channels * itemsize)
        in_tile = whole_pattern(tall, wide) if stages > 1 else tall, wide
        sums = parts * math.prod(block) * call.group * channels * 4
        size = stages * sum(_aligned(math.prod(t) * channels * itemsize) for t in (in_tile, (rows, columns)))
        size += _aligned(sums) + 1024
        if size <= SHARED_BYTES and max(*in_tile, block[1] * call.group) <= 256:
            break
        if stages > 1 and not config.stages:
            stages = 1
            continue
        if config.rows or config.columns or (rows <= 2 and columns <= 4):
            raise _NoTile(f"a tile of {size} bytes is over {SHARED_BYTES} bytes, or over 256 pixels a side")
        if columns > 8 or rows <= 2:
            columns = max(4, columns // 8 * 4)
        else:
            rows = max(2, rows // 4 * 2)
    tiles = ceil_div(call.out[0], rows), ceil_div(call.out[1], columns)
    total = call.images * math.prod(tiles)
    blocks = ceil_div(call.channels, channels) * math.prod(tap_blocks)
    groups = warpgroups * channels // 32
    resident = max(1, min(SHARED_BYTES // (size + 1024), 4 // groups))
    splits = min(config.splits or max(1, multiprocessors * resident // blocks), total, 256 // parts)
    per_split = ceil_div(total, splits)
    common: dict[str, Any] = dict(
        in_pitch=in_tile[1], out_pitch=columns, in_step=call.stride, dilation=call.dilation,
        row_taps=block[0], rows=rows, columns=columns,
    )  # fmt: skip
    walk = (
        FilterWalk(
            dtype=call.dtype,
            group=call.group,
            column_taps=per_group,
            warpgroups=warpgroups,
            channels=channels,
            **common,
        )
        if unit == "tensor"
        else LaneFilter(column_taps=block[1], **common)
    )
    plan = FilterPlan(
        walk, channels, (in_tile[0], in_tile[1]), (rows, columns), block, tap_blocks, tiles, per_split,
        ceil_div(total, per_split), stages, parts, groups, 2 * channels if unit == "tensor" else 0,
    )  # fmt: skip
    return plan, resident


def orders(op: str, call: Window, config: Config | None = None) -> tuple[str, tuple[np.ndarray, ...], np.ndarray]:
    """The arithmetic ("tensor_core" or "ordered"), the orders in which products are added, and which output has which.

    In an order, rows are partial sums, added one after the other in float32; on the tensor core sixteen indices in a
    row are one instruction. Forward: tap*group + channel within the group; backward data: tap*group + output channel
    within the group; filter gradient: (n*P + p)*Q + q. -1 is a product by zero. An output of the image at (p, q) has
    order number classes[p mod len(classes), q mod its width]: backward data with a stride meets other taps at each
    residue, and on the tensor core the pairing of taps depends on whether the row, within its residue, is even.
    """
    if op == "wgrad":
        arithmetic, order = _filter_order(call, plan_filter(call, config))
        return arithmetic, (order,), np.zeros((1, 1), np.int64)
    plan = plan_walk(op, call, config)
    height, width = plan.walk.out_step
    parities = 2 if isinstance(plan.walk, Walk) else 1
    found = tuple(
        _walk_order(call, plan.walk, phase, parity) for phase in plan.walk.phases for parity in range(parities)
    )
    row, column = np.indices((height * parities, width))
    return _arithmetic(plan.walk), found, ((row % height) * width + column) * parities + row // height


def _arithmetic(walk: Walk | LaneWalk | FilterWalk | LaneFilter) -> str:
    return "tensor_core" if isinstance(walk, Walk | FilterWalk) else "ordered"


def _walk_order(call: Window, k: Walk | LaneWalk, phase: Phase, parity: int) -> np.ndarray:
    if isinstance(k, LaneWalk):
        taps = [r * call.taps[1] + s for s, _ in phase.column_taps for r, _ in phase.row_taps]
        return np.array([taps], np.int64)
    steps: list[int] = []
    for taps in tap_steps(phase, k.in_step[0], parity):
        step = [(r * call.taps[1] + s) * call.group + i for r, s in taps for i in range(call.group)]
        steps += step + [-1] * (16 - len(step))
    return np.array([steps], np.int64)


def _filter_order(call: Window, plan: FilterPlan) -> tuple[str, np.ndarray]:
    arithmetic, (rows, columns) = _arithmetic(plan.walk), plan.out_tile
    if arithmetic == "tensor_core":
        walks = [pixel_order(rows, columns)]
    else:
        walks = [[(p, q) for q in range(warp, columns, 4) for p in range(rows)] for warp in range(4)]
    lines: list[list[int]] = []
    total = call.images * math.prod(plan.tiles)
    for split in range(plan.splits):
        for walk in walks:
            line: list[int] = []
            for tile in range(split * plan.per_split, min(total, (split + 1) * plan.per_split)):
                n, rest = divmod(tile, math.prod(plan.tiles))
                i, j = divmod(rest, plan.tiles[1])
                for p, q in walk:
                    at = i * rows + p, j * columns + q
                    inside = p >= 0 and at[0] < call.out[0] and at[1] < call.out[1]
                    line.append((n * call.out[0] + at[0]) * call.out[1] + at[1] if inside else -1)
            lines.append(line)
    longest = max(map(len, lines))
    return arithmetic, np.array([x + [-1] * (longest - len(x)) for x in lines], np.int64)
