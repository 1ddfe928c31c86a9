"""What each tile of a convolution covers, and which block of threads computes it."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxdnn._src.conv.hopper.plan import Config, Problem
from jaxdnn._src.hopper.sizes import ceil_div


def select(index: Any, values: Sequence[int]) -> Any:
    """values[index] for a traced index and few static values."""
    if len(set(values)) == 1:
        return values[0]
    out = jnp.int32(values[-1])
    for i, value in enumerate(values[:-1]):
        out = lax.select(index == i, jnp.int32(value), out)
    return out


def digits(number: Any, sizes: Sequence[int]) -> list[Any]:
    """The mixed-radix digits of a number, the lowest first, each below its size; then what remains."""
    found = []
    for size in sizes:
        found.append(lax.rem(number, size))
        number = lax.div(number, size)
    return [*found, number]


class TileScheduler:
    """Which tiles a block of threads computes and in which order: a numbering that its producer and consumers share."""

    def __init__(self, problem: Problem, config: Config):
        self.problem, self.config = problem, config
        axes = problem.axes
        self.counts = [ceil_div(ax.positions, b) for ax, b in zip(axes, config.block, strict=True)]
        self.images = ceil_div(problem.batch, config.images)
        self.columns = ceil_div(problem.columns, config.columns)
        self.per_phase = self.images * math.prod(self.counts) * self.columns
        self.phases = [phase for phase in problem.phases if problem.taps(phase) or not config.blank]
        self.tiles = self.per_phase * len(self.phases)
        self.taps = [problem.taps(phase) for phase in self.phases]

    def blank_rows(self) -> int:
        """How many stores of zeros the rows without taps need."""
        *axes, last = self.problem.axes
        rows = self.problem.batch * math.prod(ax.positions for ax in axes) * len(self.problem.blank_rows)
        return rows * (last.positions // self.config.blank)

    def blank_row(self, number: Any) -> list[Any]:
        """The target of such a store: image, position and phase along every axis but the last, and the piece of it."""
        *axes, last = self.problem.axes
        rows = self.problem.blank_rows
        sizes = (last.positions // self.config.blank, len(rows), *(ax.positions for ax in axes[::-1]))
        piece, row, *places, image = digits(number, sizes)
        phase = [select(row, [p[d] for p in rows]) for d in range(len(axes))]
        return [*self._output(image, places[::-1], phase), piece]

    def blank_pieces(self) -> int:
        """How many stores of zeros the other phases without taps need."""
        *axes, last = self.problem.axes
        places = self.problem.batch * math.prod(ax.positions for ax in axes) * len(self.problem.blank_phases)
        return places * (last.positions // self.config.blank) * (self.problem.columns // self.problem.blank_columns)

    def blank_piece(self, number: Any) -> list[Any]:
        """As `blank_row`; also the phase along the last axis and the part of the channels."""
        problem = self.problem
        *axes, last = problem.axes
        parts, phases = problem.columns // problem.blank_columns, problem.blank_phases
        sizes = (parts, last.positions // self.config.blank, len(phases), *(ax.positions for ax in axes[::-1]))
        part, piece, row, *places, image = digits(number, sizes)
        phase = [select(row, [p[d] for p in phases]) for d in range(len(problem.axes))]
        return [*self._output(image, places[::-1], phase), piece, phase[-1], part]

    def _output(self, image: Any, places: Sequence[Any], phase: Sequence[Any]) -> list[Any]:
        """The image, then for each axis but the last the position, and the phase if the output splits the axis."""
        index = [image]
        for ax, place, p in zip(self.problem.axes[:-1], places, phase, strict=False):
            index += [place, p] if ax.out_step > 1 else [place]
        return index

    def blocks(self, sms: int) -> int:
        """How many blocks of threads run on `sms` multiprocessors."""
        return min(sms, self.per_phase if self.config.sharing == "together" else self.tiles)

    def share(self, sm: Any, sms: Any) -> Any:
        """How many tiles block `sm` of `sms` computes."""
        if self.config.sharing == "together":
            return lax.div(self.per_phase - sm + sms - 1, sms) * len(self.phases)
        if self.config.sharing == "snake":
            rounds, rest = lax.div(self.tiles, sms), lax.rem(self.tiles, sms)
            return rounds + jnp.int32(self._reversed(rounds, sm, sms) < rest)
        return lax.div(self.tiles - sm + sms - 1, sms)

    def tile(self, local: Any, sm: Any, sms: Any) -> Any:
        """The tile that block `sm` computes as its number `local`.

        "round": round-robin. "snake": round-robin with every second round reversed, so that a block with a tile of a
        long phase then gets one of a short phase. "together": all phases of one place, whose outputs are interleaved in
        memory.
        """
        if self.config.sharing == "together":
            phases = len(self.phases)
            return lax.rem(local, phases) * self.per_phase + sm + lax.div(local, phases) * sms
        if self.config.sharing == "snake":
            return local * sms + self._reversed(local, sm, sms)
        return sm + local * sms

    def _reversed(self, number: Any, sm: Any, sms: Any) -> Any:
        """The block's place in a round: from the end in odd ones."""
        return lax.select(lax.rem(number, 2) == 1, sms - 1 - sm, sm)

    def tap(self, number: Any) -> Any:
        """The filter's tap at this number in the only phase; with a flipped filter number 0 is the last tap."""
        axes = self.problem.axes
        if all(ax.first[0] == 0 and ax.tap_step == 1 for ax in axes):
            return number
        tap: Any = 0
        for ax, j in zip(axes, digits(number, [ax.taps for ax in axes[::-1]])[-2::-1], strict=True):
            tap = tap * ax.taps + ax.first[0] + j * ax.tap_step
        return tap

    def steps(self, tile: Any) -> Any:
        """How many slots of the ring a tile consumes."""
        return select(lax.div(tile, self.per_phase), self.taps) * self.problem.chunks

    def place(self, tile: Any) -> tuple[Any, list[Any], list[Any], Any]:
        """(image, position along each axis, phase along each axis, column) of a tile; all but the phases in tiles."""
        number = lax.div(tile, self.per_phase)
        phase = [select(number, [p[i] for p in self.phases]) for i in range(len(self.problem.axes))]
        rest = lax.rem(tile, self.per_phase)
        sizes = {"k": self.columns, "n": self.images}
        spatial = [f"{i}" for i in range(len(self.counts))][::-1]
        sizes.update({name: self.counts[int(name)] for name in spatial})
        order = {
            "k": ["k", "n", *spatial],
            "kp": ["k", *spatial, "n"],
            "n": ["n", *spatial, "k"],
            "p": [*spatial, "n", "k"],
        }[self.config.order]
        at: dict[str, Any] = {}
        for name in order:
            if sizes[name] == 1:
                at[name] = jnp.int32(0)
                continue
            at[name], rest = lax.rem(rest, sizes[name]), lax.div(rest, sizes[name])
        return at["n"], [at[f"{i}"] for i in range(len(self.counts))], phase, at["k"]


def decided(problem: Problem, config: Config, sms: int) -> dict[str, Any]:
    """The branches of the planner that a configuration takes, by the names in `branches.EVERY`."""
    scheduler = TileScheduler(problem, config)
    axes, taps = problem.axes, [problem.taps(phase) for phase in problem.phases]
    sizes = zip((problem.batch, *(ax.positions for ax in axes)), (config.images, *config.block), strict=True)
    given = ["function"] * (problem.finish is not None) + ["bias"] * problem.bias + ["arrays"] * bool(problem.extras)
    return dict(
        operands=problem.dtype.name,
        result=problem.out_dtype.name,
        axes=len(axes) or "flat",
        rows=config.rows,
        columns=config.columns,
        teams=f"{config.teams} x {config.groups}",
        stages=config.stages,
        staged=config.staged,
        order=config.order,
        sharing=config.sharing,
        halo=config.halo,
        resident=config.resident,
        unroll=config.unroll,
        blank=bool(config.blank),
        window=bool(problem.window),
        masked_window=problem.partial,
        filter=problem.filter_dims,
        swizzle=problem.swizzle,
        groups=problem.groups > 1,
        strided_input=any(ax.in_step > 1 for ax in axes),
        phases="one" if len(taps) == 1 else "several" if all(taps) else "some without taps",
        tail_of_positions=any(size % part for size, part in sizes),
        tail_of_columns=bool(problem.columns % config.columns),
        tail_of_channels=bool(problem.reduce % problem.chunk),
        epilogue=", ".join(given) or "none",
        tiles_in_turn=scheduler.tiles > scheduler.blocks(sms),
    )
