"""Depthwise and narrow-group filter gradients: the tiles, taps and splits of a launch. Pure Python on shapes."""

import dataclasses
import math
from typing import Any

from jaxdnn._src.conv.hopper.depthwise.filter import FilterWalk
from jaxdnn._src.conv.hopper.depthwise.fma import LaneFilter
from jaxdnn._src.conv.hopper.depthwise.planar import (
    Config,
    NoTile,
    Planar,
    best,
    check_tile,
    whole_copies,
    whole_pattern,
)
from jaxdnn._src.hopper.sizes import MULTIPROCESSORS, SHARED_BYTES, aligned, ceil_div


@dataclasses.dataclass(frozen=True)
class FilterPlan:
    """A launch of the filter gradient: a block adds the tiles of a split, in order, for some taps and channels."""

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
    parts: int  # partial sums of a split: 1, or one for each warp
    warpgroups: int
    swizzle: int

    def partial_shape(self, call: Planar) -> tuple[int, int, int, int, int]:
        """(splits, parts, r, s * group, c) of the partial sums, in whole blocks of taps.

        A contiguous unswizzled copy is clipped only at the end of the array (JAX 0.11), and so none may cross another
        edge. The channels of a single tap are contiguous, and therefore padded to whole tiles.
        """
        rows, columns = (n * b for n, b in zip(self.tap_blocks, self.tap_block, strict=True))
        piece = self.parts * rows * columns * call.group == 1
        channels = ceil_div(call.channels, self.channels) * self.channels if piece else call.channels
        return self.splits, self.parts, rows, columns * call.group, channels


def plan_filter(call: Planar, config: Config | None = None) -> FilterPlan:
    """The tiles and splits of a filter gradient.

    Measured: for depthwise 3x3, stride 1, where a tile has the whole image, tiles of 64 channels are faster, whose rows
    in memory are twice as long: with three in flight if two such blocks fit into a multiprocessor, otherwise two.

    Raises:
      ValueError: no tile fits into shared memory, or into what one copy can fetch.
    """
    config = config or Config()
    plan, _ = _plan_filter(call, config)
    measured = isinstance(plan.walk, FilterWalk) and call.group == 1 and max(call.taps) <= 3 and call.stride == (1, 1)
    if config != Config() or not measured or call.channels % 64 or plan.tiles != (1, 1):
        return plan
    for stages, resident in ((3, 2), (2, 1)):
        wide, fit = _plan_filter(call, Config(channels=64, stages=stages))
        if wide.out_tile == plan.out_tile and fit >= resident and wide.per_split >= 4:
            return wide
    return plan


def _plan_filter(call: Planar, config: Config) -> tuple[FilterPlan, int]:
    """A plan, and how many of its blocks are assumed to fit into a multiprocessor."""
    check_tile(config, (1, 1))
    itemsize = call.itemsize
    taps = min(call.taps[0], 8), min(call.taps[1], 8)
    warpgroups = 2 if call.tensor and taps[1] > 6 else 1
    per_group = ceil_div(taps[1], warpgroups)
    block = taps[0], per_group * warpgroups
    # Measured: with two warpgroups (wide filters) many small tiles are faster, with one warpgroup few large ones.
    rows = config.rows or best(call.out[0], (4, 2) if warpgroups == 2 else (14, 16, 12, 10, 8, 6, 4, 2))
    columns = config.columns or best(call.out[1], (28, 32, 24, 20, 16, 12, 8, 4))
    stages = config.stages or (2 if call.tensor else 1)
    channels = config.channels or 32
    if channels not in ((32, 64) if call.tensor else (32,)) or (channels > 32 and call.channels % channels):
        raise NoTile(f"a filter gradient's tiles have 32 channels, or 64 that divide all, got {channels}")
    parts = 1 if call.tensor else 4
    tap_blocks = ceil_div(call.taps[0], block[0]), ceil_div(call.taps[1], block[1])
    while True:
        tall, wide = (
            (n - 1) * call.stride[i] + (block[i] - 1) * call.dilation[i] + 1 for i, n in enumerate((rows, columns))
        )
        wide = whole_copies(wide, channels * itemsize)
        in_tile = whole_pattern(tall, wide) if stages > 1 else tall, wide
        sums = parts * math.prod(block) * call.group * channels * 4
        size = stages * sum(aligned(math.prod(t) * channels * itemsize) for t in (in_tile, (rows, columns)))
        size += aligned(sums) + 1024
        if size <= SHARED_BYTES and max(*in_tile, block[1] * call.group) <= 256:
            break
        if stages > 1 and not config.stages:
            stages = 1
            continue
        if config.rows or config.columns or (rows <= 2 and columns <= 4):
            raise NoTile(f"a tile of {size} bytes is over {SHARED_BYTES} bytes, or over 256 pixels a side")
        if columns > 8 or rows <= 2:
            columns = max(4, columns // 8 * 4)
        else:
            rows = max(2, rows // 4 * 2)
    tiles = ceil_div(call.out[0], rows), ceil_div(call.out[1], columns)
    total = call.images * math.prod(tiles)
    blocks = ceil_div(call.channels, channels) * math.prod(tap_blocks)
    groups = warpgroups * channels // 32
    resident = max(1, min(SHARED_BYTES // (size + 1024), 4 // groups))
    splits = min(config.splits or max(1, MULTIPROCESSORS * resident // blocks), total, 256 // parts)
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
        if call.tensor
        else LaneFilter(column_taps=block[1], **common)
    )
    plan = FilterPlan(
        walk, channels, (in_tile[0], in_tile[1]), (rows, columns), block, tap_blocks, tiles, per_split,
        ceil_div(total, per_split), stages, parts, groups, 2 * channels if call.tensor else 0,
    )  # fmt: skip
    return plan, resident
