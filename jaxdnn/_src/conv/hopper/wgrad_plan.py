"""Convolution backward filter: what is computed, how the work is tiled, and which configuration runs.

A tile is a block of the filter's gradient; a work item is a tile for one run of pixels. One side of a tile is k, the
other is (tap, c), both in blocks of one chunk of channels. Its rows are k, unless the result is stored directly in a
layout whose innermost axis is k: then its rows are (tap, c).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jax import lax

from jaxdnn._src.conv.hopper import tuning
from jaxdnn._src.conv.hopper.plan import Axis
from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.sizes import ALIGNMENT, SHARED_BYTES, aligned, ceil_div

STAGED = 2  # buffers of 64 x 64 results that a warpgroup uses in rotation
REGISTERS = {1: (40, 232), 2: (40, 232), 3: (32, 160)}  # number of consumers: registers of the producer, of a consumer


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is tiled. Boxes and splits determine the order of additions; the other fields only the speed."""

    images: int  # images of a box
    block: tuple[int, ...]  # positions of a box along each spatial axis
    splits: int  # runs of boxes, one partial sum each
    filters: int = 64  # rows of a warpgroup
    columns: int = 256  # columns of a warpgroup
    across: int = 2  # warpgroups along the rows
    along: int = 1  # warpgroups along the columns
    stages: int = 4  # slots of the ring between producer and consumers
    halo: bool = False  # one box of x serves all taps of the last two axes
    direct: bool = False  # the blocks of a cluster compute the splits of a tile, add them and store the result

    @property
    def pixels(self) -> int:
        return self.images * math.prod(self.block)

    @property
    def consumers(self) -> int:
        return self.across * self.along

    @property
    def share(self) -> int:
        """Columns of a warpgroup's tile that one block of a cluster adds and stores."""
        return self.columns // self.splits

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that a block receives from the other blocks of its cluster."""
        return (self.splits - 1) * self.consumers * self.filters * self.share * 4 if self.direct else 0


@dataclasses.dataclass(frozen=True)
class Problem:
    batch: int
    channels: int  # of one group
    filters: int  # of all groups
    axes: tuple[Axis, ...]
    dtype: Any
    outer: bool = True  # the filter is (K, taps, C), not (taps, C, K)
    groups: int = 1

    @property
    def one_image(self) -> bool:
        """Whether a box has one image only: TMA has five dimensions, and a split axis of a volume is the fifth."""
        return len(self.axes) == 3 and any(ax.in_step > 1 for ax in self.axes)

    @property
    def swizzle(self) -> int:
        bytes_ = min(self.channels, self.filters // self.groups) * 2
        return 128 if bytes_ > 64 else 64  # no less: its 32 columns of float32 are whole cache lines

    @property
    def chunk(self) -> int:
        return self.swizzle // 2

    @property
    def chunks(self) -> int:
        return ceil_div(self.channels, self.chunk)

    @property
    def taps(self) -> int:
        return math.prod(ax.taps for ax in self.axes)

    def counts(self, config: Config) -> list[int]:
        """The number of boxes along each axis, images first."""
        spatial = (ceil_div(ax.out, b) for ax, b in zip(self.axes, config.block, strict=True))
        return [ceil_div(self.batch, config.images), *spatial]


def check(problem: Problem, config: Config) -> str | None:
    """Why a configuration cannot run, or None."""
    consumers = config.consumers
    if consumers not in REGISTERS:
        return "there are one to three consumer warpgroups"
    if max(config.images, *config.block, 1) > 256 or config.pixels % problem.chunk:
        return f"a box has at most 256 positions along an axis and a multiple of {problem.chunk} pixels"
    if config.filters * config.columns > 128 * (REGISTERS[consumers][1] - 40) or config.columns > 256:
        return "the accumulator does not fit the registers"
    if config.filters % 64 or config.columns % problem.chunk:
        return "a warpgroup takes blocks of 64 filters and whole chunks of columns"
    if problem.one_image and config.images > 1:
        return "a stride in three dimensions needs boxes of one image"
    if problem.groups > 1:
        if problem.channels % problem.chunk or problem.filters // problem.groups % (config.filters * config.across):
            return "a group must divide into whole tiles of filters and whole chunks of channels"
        if config.direct:
            return "a direct result is of one group"
    if config.halo and (reason := _check_halo(problem, config)):
        return reason
    if config.direct and (reason := _check_direct(problem, config)):
        return reason
    if shared_bytes(problem, config) > SHARED_BYTES - 2048:
        return "the ring does not fit shared memory"
    return None


def _check_halo(problem: Problem, config: Config) -> str | None:
    axes = problem.axes
    if len(axes) < 2 or any(ax.in_step > 1 for ax in axes):
        return "a halo needs two axes and steps of one"
    if config.along != axes[-2].taps or config.columns != axes[-1].taps * problem.chunk:
        return "with a halo every warpgroup takes one row of the filter"
    if config.block[-1] != 8 or config.block[-2] % 2:
        return "a halo needs boxes of 2k x 8 positions"
    return None


def _check_direct(problem: Problem, config: Config) -> str | None:
    if problem.chunk != 64 or config.halo:
        return "a direct result needs whole chunks of 64 channels and no halo"
    if config.splits not in (1, 2, 4, 8) or config.share % 64:
        return "a cluster has 1, 2, 4 or 8 blocks, each of which stores whole chunks of columns"
    return None


def x_box(problem: Problem, config: Config) -> tuple[int, ...]:
    """The box of x in a slot: as large as dy's, or in a halo with all pixels that the last two axes' taps reach."""
    reach = [0] * len(config.block)
    if config.halo:
        reach[-2:] = [(ax.taps - 1) * ax.move for ax in problem.axes[-2:]]
    return (config.images, *(b + r for b, r in zip(config.block, reach, strict=True)))


def slot_boxes(problem: Problem, config: Config) -> tuple[int, int]:
    """Boxes of one chunk in a slot, for the rows' and for the columns' operand; one halo box serves all columns."""
    right = 1 if config.halo else config.columns * config.along // problem.chunk
    return config.filters * config.across // problem.chunk, right


def shared_bytes(problem: Problem, config: Config) -> int:
    left, right = slot_boxes(problem, config)
    box = x_box(problem, config) if config.halo else (config.pixels,)
    ring = lambda pixels: aligned(config.stages * pixels * problem.swizzle)
    staged = config.consumers * STAGED * 64 * 128 if config.direct else 0
    exchanged = aligned(config.exchanged_bytes) + ALIGNMENT if config.exchanged_bytes else 0  # and its barriers
    return ring(left * config.pixels) + ring(right * math.prod(box)) + staged + exchanged


class TileScheduler:
    """The numbering of work items: a tile of the filter for one run of boxes."""

    def __init__(self, problem: Problem, config: Config):
        self.problem, self.config = problem, config
        self.counts = problem.counts(config)
        self.boxes = math.prod(self.counts)
        self.run = ceil_div(self.boxes, config.splits)
        left, right = slot_boxes(problem, config)
        self.x_left = config.direct and not problem.outer
        blocks = ceil_div(problem.filters, problem.chunk), problem.taps * problem.chunks
        rows, columns = blocks[::-1] if self.x_left else blocks
        self.rows = ceil_div(rows, left)
        if config.halo:
            self.lead = math.prod(ax.taps for ax in problem.axes[:-2])
            self.tiles = self.lead * problem.chunks
        else:
            self.tiles = ceil_div(columns, right)
        self.items = self.rows * self.tiles * config.splits

    def blocks(self, sms: int) -> int:
        """How many blocks of threads (or, with `direct`, clusters of them) run on `sms` multiprocessors."""
        at_once = self.config.splits if self.config.direct else 1
        return min(max(sms // at_once, 1), self.items // at_once)

    def place(self, item: Any, split: Any = None) -> tuple[Any, Any, Any, Any, Any]:
        """(tile of rows, tile of columns, split, first box, boxes); in a cluster the block's rank is the split."""
        row, rest = lax.rem(item, self.rows), lax.div(item, self.rows)
        tile = lax.rem(rest, self.tiles)
        split = lax.div(rest, self.tiles) if split is None else split
        first = split * self.run
        return row, tile, split, first, lax.max(0, lax.min(self.run, self.boxes - first))

    def box(self, number: Any) -> list[Any]:
        """The indices of a box along each axis, in boxes."""
        at: list[Any] = [None] * len(self.counts)
        for d in reversed(range(len(self.counts))):
            at[d] = lax.rem(number, self.counts[d]) if d else number
            number = lax.div(number, self.counts[d])
        return at


def choose(problem: Problem, sms: int) -> Config:
    """The measured configuration, or else the cheapest one by the cost model."""
    if (pick := branches.picker()) and (bases := list(_candidates(problem, sms))):
        configs = [config for base in bases for config in (base, *_beside(problem, base))]
        return pick(problem, configs, lambda config: branches.named("wgrad", **decided(problem, config, sms)))
    entry = tuning.table(tuning.device_kind()).get(key(problem))
    if entry is not None:
        config = Config(**{**entry, "block": tuple(entry["block"])})
        if check(problem, config) is None:
            return config
    configs = list(_candidates(problem, sms))
    if not configs:
        raise NotImplementedError(f"no tile of the filter-gradient kernel fits {problem}")
    return min(configs, key=lambda config: cost(problem, config, sms))


def decided(problem: Problem, config: Config, sms: int) -> dict[str, Any]:
    """The branches of the planner that a configuration takes, by the names in `branches.EVERY`.

    Without those that the call decides: how its groups are processed, and whether taps were folded.
    """
    scheduler, axes = TileScheduler(problem, config), problem.axes
    left, right = config.filters * config.across, config.columns * config.along
    of_filters, of_columns = problem.filters // problem.groups, problem.taps * problem.chunks * problem.chunk
    rows, columns = (of_columns, of_filters) if scheduler.x_left else (of_filters, of_columns)
    pairs = zip((problem.batch, *(ax.out for ax in axes)), (config.images, *config.block), strict=True)
    return dict(
        operands=problem.dtype.name,
        axes=len(axes) or "flat",
        filters=config.filters,
        columns=config.columns,
        warpgroups=f"{config.across} x {config.along}",
        stages=config.stages,
        splits="one" if config.splits == 1 else "several",
        halo=config.halo,
        direct=("1 block" if config.splits == 1 else f"{config.splits} blocks") if config.direct else "no",
        rows="taps" if scheduler.x_left else "filters",
        swizzle=problem.swizzle,
        strided_input=any(ax.in_step > 1 for ax in axes),
        tail_of_positions=any(size % part for size, part in pairs),
        tail_of_filters=bool(rows % left),
        tail_of_columns=bool(columns % right) and not config.halo,
        tiles_in_turn=scheduler.items // (config.splits if config.direct else 1) > scheduler.blocks(sms),
    )


def key(problem: Problem) -> str:
    """A problem's name in the table."""
    axes = ",".join(f"{ax.size}>{ax.out}k{ax.taps}i{ax.in_step}m{ax.move}" for ax in problem.axes)
    groups = f"g{problem.groups}" if problem.groups > 1 else ""
    sizes = f"n{problem.batch} c{problem.channels} k{problem.filters}{groups}"
    return f"wgrad {sizes} {axes or 'flat'} {problem.dtype.name}"


def _candidates(problem: Problem, sms: int) -> Iterator[Config]:
    chunk = problem.chunk
    shapes = [
        (2, 1, 64, 4),
        (2, 1, 64, 3),
        (2, 1, 64, 2),
        (2, 1, 64, 1),
        (1, 2, 64, 4),
        (1, 2, 64, 3),
        (1, 2, 64, 2),
        (1, 2, 64, 1),
        (1, 3, 64, 3),
        (2, 1, 128, 2),
        (1, 2, 128, 2),
        (2, 1, 128, 1),
        (1, 2, 128, 1),
    ]
    for images, block in _boxes(problem, 64):
        for across, along, filters, blocks in shapes:
            for stages in (6, 5, 4, 3, 2):
                base = Config(images, block, 1, filters, blocks * chunk, across, along, stages)
                if check(problem, base) is None:
                    yield from _splits(problem, base, sms)
                    break
    if len(problem.axes) >= 2 and problem.axes[-2].taps in (1, 2, 3) and problem.chunk == 64:
        block = (*(1 for _ in problem.axes[:-2]), 8, 8)
        for images in (2, 1):
            for stages in (6, 5, 4, 3, 2):
                base = Config(
                    images, block, 1, 64, problem.axes[-1].taps * chunk, 1, problem.axes[-2].taps, stages, True
                )
                if check(problem, base) is None:
                    yield from _splits(problem, base, sms)
                    break


def _beside(problem: Problem, base: Config) -> Iterator[Config]:
    """A larger cluster. It was never the fastest in a measurement; random calls test it."""
    larger = dataclasses.replace(base, splits=4, stages=2)
    if base.direct and check(problem, larger) is None and TileScheduler(problem, larger).boxes >= larger.splits:
        yield larger


def _splits(problem: Problem, base: Config, sms: int) -> Iterator[Config]:
    """The configuration with numbers of splits whose work items fill whole waves of multiprocessors."""
    scheduler = TileScheduler(problem, base)
    tiles = scheduler.rows * scheduler.tiles
    for waves in (1, 2, 3, 4):
        splits = waves * sms // tiles
        if splits >= 1 and ceil_div(scheduler.boxes, splits) >= 4:
            yield dataclasses.replace(base, splits=splits)
    yield base
    for splits in (1, 2):  # larger clusters do not all run at once, and were slower in every measurement
        direct = dataclasses.replace(base, splits=splits, direct=True)
        for stages in range(base.stages, 1, -1):  # the output buffers leave less memory for the ring
            config = dataclasses.replace(direct, stages=stages)
            # One block stores sums of any number of boxes, which would otherwise pass through memory in float32. A
            # cluster of two needs enough boxes for each to make up for the exchange of the sums.
            if (splits == 1 or ceil_div(scheduler.boxes, splits) >= 4) and check(problem, config) is None:
                yield config
                break


def _boxes(problem: Problem, pixels: int) -> list[tuple[int, tuple[int, ...]]]:
    """The two boxes of so many pixels that compute the fewest pixels outside of the output."""
    found = []

    def divide(left: int, depth: int) -> Iterator[tuple[int, ...]]:
        if depth == 0:
            yield (left,)
            return
        part = 1
        while part <= left:
            for rest in divide(left // part, depth - 1):
                yield (*rest, part)
            part *= 2

    for images, *block in divide(pixels, len(problem.axes)):
        if problem.one_image and images > 1:
            continue
        config = Config(images, tuple(block), 1)
        waste = math.prod(problem.counts(config)) * pixels
        found.append((waste, -(block[-1] if block else 0), images, tuple(block)))
    found.sort()
    return [(images, block) for _, _, images, block in found[:2]]


def cost(problem: Problem, config: Config, sms: int) -> float:
    """Estimated cycles, by a model of tensor cores, shared memory, the L2 cache and the traffic of partial sums."""
    scheduler = TileScheduler(problem, config)
    left, right = slot_boxes(problem, config)
    loaded = (left * config.pixels + right * math.prod(x_box(problem, config))) * problem.swizzle
    consumers = config.consumers
    products = consumers * config.filters * config.columns * config.pixels / 2048 / 0.85
    read = consumers * config.filters // 64 * config.pixels * 2 * (64 + config.columns)
    step = max(products, (read + loaded) / 128, loaded / 46, 200)
    if config.direct:
        clusters = max(sms // config.splits, 1)
        waves = ceil_div(scheduler.items // config.splits, clusters)
        return waves * (scheduler.run * step + 2500 + 4000 * (config.splits > 1))
    waves = ceil_div(scheduler.items, sms)
    outputs = problem.filters * problem.taps * problem.channels
    return waves * (scheduler.run * step + 2500) + 3400 + config.splits * outputs * 8 / 2000
