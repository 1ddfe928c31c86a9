"""What the convolution pipeline computes (problems), how the work is tiled (configurations), and which tiles fit."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import Array

from jaxdnn._src.hopper.sizes import SHARED_BYTES, aligned, ceil_div
from jaxdnn._src.hopper.wgmma import swizzle_transform


@dataclasses.dataclass(frozen=True)
class Axis:
    """One spatial axis, as the pipeline iterates over it.

    The output positions form `out_step` phases: the one with phase a and index i is at i * out_step + a. It uses
    count[a] taps; number j of them is the filter's tap first[a] + j * tap_step, and it reads the input at
    i * in_step + offset[a] + j * move.
    """

    size: int  # input positions
    out: int  # output positions, all phases together
    taps: int  # filter taps
    in_step: int
    out_step: int
    first: tuple[int, ...]
    count: tuple[int, ...]
    offset: tuple[int, ...]
    tap_step: int
    move: int

    @property
    def positions(self) -> int:
        return ceil_div(self.out, self.out_step)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is tiled and scheduled; no field changes a bit of the result."""

    images: int  # images of a tile
    block: tuple[int, ...]  # positions of a tile along each spatial axis
    columns: int  # output channels of a tile
    stages: int = 4  # slots of the ring between producer and consumers
    teams: int = 2  # consumer teams, which take tiles in turn
    groups: int = 1  # warpgroups of a team, which share a tile
    order: str = "k"  # what varies fastest from tile to tile: "k" output channels, "p" positions, "n" images
    staged: int = 1  # buffers of 128 bytes of output channels that a warpgroup uses in rotation
    halo: int = 0  # slots of a second ring, whose boxes serve all taps of a chunk; 0: every tap has its own box
    resident: bool = False  # the whole filter stays in shared memory
    unroll: bool = False  # one loop iteration handles all taps of the last axis; needs a halo and a resident filter
    blank: int = 0  # positions of the last axis in one store of zeros to phases without taps; 0: these have tiles
    sharing: str = (
        "round"  # how blocks share tiles of several phases (`TileScheduler.tile`): "round", "snake", "together"
    )

    @property
    def rows(self) -> int:
        return self.images * math.prod(self.block)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is computed; every field is static."""

    batch: int
    reduce: int  # input channels
    columns: int  # output channels
    axes: tuple[Axis, ...]
    filter_dims: str  # the filter's axes: t taps (flattened), c reduced channels, j output channels
    dtype: Any
    out_dtype: Any
    accumulator: Any
    finish: Callable[..., Array] | None = None  # the epilogue: (acc, *tiles of extras, bias or None) -> value
    extras: tuple[Any, ...] = ()  # dtypes of the output-shaped operands of the epilogue
    bias: bool = False
    groups: int = 1  # `reduce` counts the input channels of one group
    grouped: str = "j"  # the filter axis that all groups share
    window: int = 0  # neighbouring 16-byte cells that one wgmma row reads as its channels; 0: a pixel is a whole row
    # The window's last cell is read from a second copy of the cells, with zeros where the filter has no tap.
    partial: bool = False

    @ft.cached_property
    def swizzle(self) -> int:
        bytes_ = self.reduce * np.dtype(self.dtype).itemsize
        return 128 if bytes_ > 64 else 64 if bytes_ > 32 else 32

    @ft.cached_property
    def chunk(self) -> int:
        return self.swizzle // np.dtype(self.dtype).itemsize

    @ft.cached_property
    def a_chunk(self) -> int:
        """Channels of one box of the input: a chunk, or with windows one cell."""
        return 16 // np.dtype(self.dtype).itemsize if self.window else self.chunk

    @ft.cached_property
    def chunks(self) -> int:
        return ceil_div(self.reduce, self.chunk)

    @ft.cached_property
    def epilogue_widths(self) -> list[int]:
        """Bytes of an element of the result and of each output-shaped operand of the epilogue."""
        return [np.dtype(dtype).itemsize for dtype in (self.out_dtype, *self.extras)]

    @property
    def one_image(self) -> bool:
        """Whether a tile has one image only: TMA has five dimensions, and a split axis of a volume is the fifth."""
        return len(self.axes) == 3 and any(ax.in_step > 1 or ax.out_step > 1 for ax in self.axes)

    @property
    def blank_rows(self) -> list[tuple[int, ...]]:
        """The phases, over all axes but the last, whose outputs have no tap: whole rows of zeros."""
        leading = product([range(ax.out_step) for ax in self.axes[:-1]])
        return [p for p in leading if not all(ax.count[a] for ax, a in zip(self.axes, p, strict=False))]

    @property
    def blank_phases(self) -> list[tuple[int, ...]]:
        """The other phases without taps: the last axis has none for them."""
        rows = self.blank_rows
        return [p for p in product([range(ax.out_step) for ax in self.axes]) if not self.taps(p) and p[:-1] not in rows]

    @property
    def blank_columns(self) -> int:
        """Output channels in one store of zeros to such a phase: a divisor of all, because a box has at most 256."""
        cell = 16 // np.dtype(self.out_dtype).itemsize
        return max(n for n in range(cell, 257, cell) if self.columns % n == 0)

    def taps(self, phase: Sequence[int]) -> int:
        """How many taps the outputs of a phase have."""
        return math.prod(ax.count[a] for ax, a in zip(self.axes, phase, strict=True))

    @ft.cached_property
    def phases(self) -> list[tuple[int, ...]]:
        """All phases, the one with most taps first, so that the blocks finish at about the same time."""
        found = product([range(ax.out_step) for ax in self.axes])
        return sorted(found, key=lambda phase: (-self.taps(phase), phase))


def schedule_order(problem: Problem) -> np.ndarray:
    """The flat reduction indices tap * C + c in the order in which the kernel adds them; -1 for a padding zero."""
    taps = [[ax.first[0] + j * ax.tap_step for j in range(ax.count[0])] for ax in problem.axes]
    sizes = [ax.taps for ax in problem.axes]
    flat = [int(np.ravel_multi_index(t, sizes)) for t in product(taps)]
    rows = []
    for start in range(0, problem.reduce, problem.chunk):
        channel = np.arange(start, start + problem.chunk)
        for tap in flat:
            rows.append(np.where(channel < problem.reduce, tap * problem.reduce + channel, -1))
    order = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    return order[None]


def product(lists: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for values in lists:
        out = [(*head, value) for head in out for value in values]
    return out


def row_bytes(config: Config, dtype: Any) -> int:
    """Bytes of one row of a staged chunk of columns: 128, or fewer if the tile is narrower."""
    return min(128, config.columns * np.dtype(dtype).itemsize)


def out_columns(problem: Problem, config: Config) -> int:
    """Output channels that the epilogue handles at a time: 128 bytes of the widest array that it reads or writes."""
    return min(128 // max(problem.epilogue_widths), config.columns)


def swizzled(bytes_: int) -> tuple[Any, ...]:
    return (swizzle_transform(bytes_),) if bytes_ > 16 else ()


def a_box(problem: Problem, config: Config) -> tuple[int, ...]:
    """The input box of a slot: the tile's pixels; in a halo or with windows also the pixels that their taps reach."""
    if problem.window:  # whole cells of 16 bytes; a copy is of a multiple of 128 bytes
        return (1 + problem.partial, config.images, *config.block[:-1], config.block[-1] + 8)
    if not config.halo:
        return (config.images, *config.block)
    reach = [(ax.taps - 1) * abs(ax.move) for ax in problem.axes]
    return (config.images, *(b + r for b, r in zip(config.block, reach, strict=True)))


def a_slots(config: Config) -> int:
    return config.halo or config.stages


def b_slots(problem: Problem, config: Config) -> int:
    return math.prod(ax.taps for ax in problem.axes) * problem.chunks if config.resident else config.stages


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a configuration needs, without barriers (`check` keeps 2048 bytes for them)."""
    width = np.dtype(problem.dtype).itemsize
    warpgroups = config.teams * config.groups
    staged = lambda row, chunks: aligned(warpgroups * chunks * config.rows // config.groups * row)
    a_row = 16 if problem.window else problem.chunk * width
    ring = aligned(a_slots(config) * math.prod(a_box(problem, config)) * a_row)
    ring += aligned(b_slots(problem, config) * config.columns * problem.chunk * width)
    rows = [row_bytes(config, d) for d in problem.extras]
    extras = [staged(r, config.columns * np.dtype(d).itemsize // r) for d, r in zip(problem.extras, rows, strict=True)]
    out = out_columns(problem, config) * np.dtype(problem.out_dtype).itemsize
    return ring + staged(out, config.staged) + sum(extras)


NO_ROOM = "the ring does not fit shared memory"


def check(problem: Problem, config: Config) -> str | None:
    """Why a configuration cannot run, or None."""
    rows = config.rows
    if rows % (64 * config.groups):
        return f"{rows} rows do not divide into {config.groups} warpgroups of multiples of 64"
    if max(config.images, *config.block, config.columns, *a_box(problem, config)) > 256:
        return "a box has at most 256 elements along an axis"
    if rows // config.groups * config.columns > 128 * 208:
        return "the accumulator does not fit the registers"
    part = split(config)
    if part is None:
        return "the tile does not divide among the team's warpgroups"
    sizes = (problem.batch, *(ax.positions for ax in problem.axes))
    if any(n == p == 1 < whole for n, p, whole in zip(sizes, part, (config.images, *config.block), strict=True)):
        # TMA drops an axis of length one whose box has length one too, and no longer clips positions outside of it.
        return "a tile is not cut to single positions along an axis that has but one"
    if config.columns * min(problem.epilogue_widths) < 32:
        return "a tile has at least 32 bytes of output channels, the least that a swizzle takes"
    if shared_bytes(problem, config) > SHARED_BYTES - 2048:
        return NO_ROOM
    if problem.filter_dims[-1] == "j" and config.columns % problem.chunk:
        return "a filter that is contiguous in its output channels needs tiles of whole chunks"
    if problem.groups > 1 and (problem.columns // problem.groups % config.columns or problem.reduce % problem.chunk):
        return "a group must divide into whole tiles and whole chunks"
    if config.resident and (problem.columns > config.columns or any(ax.out_step > 1 for ax in problem.axes)):
        return "a resident filter needs all its columns in one tile, and one phase"
    if problem.window and (config.block[-1] % 64 or config.halo or part[-1] != config.block[-1]):
        return "windows of cells need blocks of 64 positions along the last axis"
    if problem.one_image and config.images > 1:
        return "a stride in three dimensions needs tiles of one image"
    if config.blank and (reason := _check_blank(problem, config)):
        return reason
    if config.unroll and not (config.halo and config.resident):
        return "taps are unrolled where a halo and a resident filter hold them all"
    if config.halo:
        return _check_halo(problem, config)
    return None


def _check_blank(problem: Problem, config: Config) -> str | None:
    """Why zeros cannot be stored so, or None. Each warpgroup stores them from its part of the output buffers."""
    if not problem.axes or all(map(problem.taps, problem.phases)) or problem.finish is not None:
        return "no phase of the output is zero throughout"
    last = problem.axes[-1]
    piece = config.blank * last.out_step * problem.columns
    if last.positions % config.blank or piece % 512:  # a warpgroup writes eight bytes a thread
        return "rows do not divide into such stores of zeros"
    width = np.dtype(problem.out_dtype).itemsize
    if piece * width > config.staged * config.rows // config.groups * row_bytes(config, problem.out_dtype):
        return "a store of zeros does not fit the memory of an output tile"
    return None


def _check_halo(problem: Problem, config: Config) -> str | None:
    """Why a halo cannot be used, or None. wgmma reads 64 rows as eight groups of eight, at one constant distance."""
    if any(ax.in_step > 1 or ax.out_step > 1 for ax in problem.axes) or not problem.axes:
        return "a halo needs steps of one"
    if any(ax.first[0] or ax.tap_step != 1 for ax in problem.axes):
        return "a halo needs the taps in the filter's order"
    if math.prod(a_box(problem, config)) * problem.chunk * np.dtype(problem.dtype).itemsize % 128:
        return "a copy is of whole 128 bytes, and a halo box is not"
    part = list(split(config) or ())
    if len(part) == 2:
        return None if part[-1] % 64 == 0 else "a halo of one axis needs blocks of 64 positions"
    return None if part[-1] == 8 and part[-2] % 8 == 0 else "a halo needs blocks of 8k x 8 positions"


def split(config: Config) -> tuple[int, ...] | None:
    """The box of one warpgroup: the team's tile is split along the outermost axis with more than one position."""
    box = [config.images, *config.block]
    if config.groups == 1:
        return tuple(box)
    for i, n in enumerate(box):
        if n > 1:
            if n % config.groups:
                return None
            box[i] = n // config.groups
            return tuple(box)
    return None
