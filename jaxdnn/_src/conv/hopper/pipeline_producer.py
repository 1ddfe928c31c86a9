"""The producer of the matrix pipeline: one warpgroup that loads the boxes of all tiles into the rings."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxdnn._src.conv.hopper.pipeline_block import Block
from jaxdnn._src.conv.hopper.plan import a_box
from jaxdnn._src.conv.hopper.scheduler import select
from jaxdnn._src.core.compat import pl, plgpu
from jaxdnn._src.hopper.launch import drain, turns, when
from jaxdnn._src.hopper.sizes import ceil_div

REGISTERS = 40


class Producer(Block):
    """The steps of the producer: the resident filter, a tile, a halo, a slot of the ring."""

    def produce(self) -> None:
        plgpu.set_max_registers(REGISTERS, action="decrease")
        config = self.config
        if config.resident:
            self.load_filter()
        zero = jnp.int32(0)
        count, a_count = lax.fori_loop(0, turns(self.mine), self.load_tile, (zero, zero))
        if self.cut.ringed:
            drain(self.scratch["empty"], count, config.stages)
        if config.halo:
            drain(self.scratch["a_empty"], a_count, config.halo)

    def load_filter(self) -> None:
        """Loads the whole filter once, for all tiles of the block."""
        taps = self.cut.steps // self.problem.chunks

        @pl.loop(0, turns(self.cut.steps))
        def _(step: Any) -> None:
            tap = self.scheduler.tap(lax.rem(step, taps))
            self.load_b(lax.div(step, taps), tap, jnp.int32(0), step, self.scratch["b_full"])

    def load_tile(self, local: Any, counts: tuple[Any, Any]) -> tuple[Any, Any]:
        """Loads a tile's slots. `counts`: the slots of the ring and of the halo ring that were filled before."""
        n, at, phase, k = self.scheduler.place(self.scheduler.tile(local, self.sm, self.sms))
        team = lax.rem(local, self.config.teams)
        extents = [select(p, ax.count) for p, ax in zip(phase, self.problem.axes, strict=True)]

        def nest(cc: Any, j: tuple[Any, ...], counts: tuple[Any, Any]) -> tuple[Any, Any]:
            if len(j) == len(extents):
                return self.load_step(cc, j, (n, at, phase, k), team, counts)
            extent = extents[len(j)]
            if isinstance(extent, int) and extent == 1:
                return nest(cc, (*j, jnp.int32(0)), counts)
            return lax.fori_loop(0, turns(extent), lambda i, counts: nest(cc, (*j, i), counts), counts)

        def chunk(cc: Any, counts: tuple[Any, Any]) -> tuple[Any, Any]:
            if self.config.halo:
                counts = self.load_halo(cc, (n, at, phase, k), team, counts)
            return nest(cc, (), counts) if self.cut.ringed else counts

        return lax.fori_loop(0, turns(self.problem.chunks), chunk, counts)

    def load_halo(self, cc: Any, place: Any, team: Any, counts: tuple[Any, Any]) -> tuple[Any, Any]:
        """Loads the input box that all taps of a chunk share."""
        count, a_count = counts
        slots = self.config.halo
        slot = lax.rem(a_count, slots)
        when(a_count >= slots)(lambda: plgpu.barrier_wait(self.scratch["a_empty"].at[slot]))
        n, at, _, k = place
        index: list[Any] = [pl.ds(n * self.config.images, self.config.images)]
        sizes = a_box(self.problem, self.config)[1:]
        for ax, block, size, i in zip(self.problem.axes, self.config.block, sizes, at, strict=True):
            lowest = min(ax.offset[0], ax.offset[0] + (ax.taps - 1) * ax.move)
            index.append(pl.ds(i * block + lowest, size))
        index.append(self.channels(cc, k))
        plgpu.copy_gmem_to_smem(
            self.a.at[tuple(index)], self.a_ring.at[slot], self.scratch["a_full"].at[team * slots + slot]
        )
        return count, a_count + 1

    def channels(self, cc: Any, k: Any) -> Any:
        """The input channels of a chunk, in the group of the tile's output channels."""
        problem = self.problem
        start = cc * problem.chunk
        if problem.groups > 1:
            start += lax.div(k, self.scheduler.columns // problem.groups) * problem.reduce
        return pl.ds(start, problem.a_chunk)

    def load_step(self, cc: Any, j: Sequence[Any], place: Any, team: Any, counts: tuple[Any, Any]) -> tuple[Any, Any]:
        """Fills one slot of the ring: the input box of one tap and chunk, and the part of the filter for it."""
        count, a_count = counts
        n, at, phase, k = place
        stages = self.config.stages
        slot = lax.rem(count, stages)
        signal = self.scratch["full"].at[team * stages + slot]
        when(count >= stages)(lambda: plgpu.barrier_wait(self.scratch["empty"].at[slot]))
        index: list[Any] = [self.images(n)]
        tap: Any = jnp.int32(0)
        for d, (ax, block, p, i, jj) in enumerate(
            zip(self.problem.axes, self.config.block, phase, at, j, strict=True), 1
        ):
            tap = tap * ax.taps + select(p, ax.first) + jj * ax.tap_step
            offset = select(p, ax.offset) + jj * ax.move
            if ax.in_step == 1:
                wide = self.problem.window and d == len(self.problem.axes)
                index.append(pl.ds(i * block + offset, block + 8 if wide else block))
            else:
                # lax.div and lax.rem round toward zero; `shift` makes the dividend non-negative, so that they floor.
                shift = ax.in_step * ceil_div(max(0, -min(ax.offset)), ax.in_step)
                high = lax.div(offset + shift, ax.in_step) - shift // ax.in_step
                index += [pl.ds(i * block + high, block), lax.rem(offset + shift, ax.in_step)]
        if self.cut.a_loads:
            index.append(self.channels(cc, k))
            target = self.a_ring.at[(slot, *((0,) if self.problem.window else ()), *self.image)]
            plgpu.copy_gmem_to_smem(self.a.at[tuple(index)], target, signal)
            if self.problem.partial:  # the second copy of the cells, with zeros where no tap is, follows the first
                block = self.config.block[-1]
                index[-2] = pl.ds(self.a.shape[-2] // 2 + at[-1] * block, block + 8)
                plgpu.copy_gmem_to_smem(self.a.at[tuple(index)], self.a_ring.at[(slot, 1, *self.image)], signal)
        if self.cut.b_ringed:
            self.load_b(cc, tap, k, slot, signal)
        return count + 1, a_count

    def images(self, n: Any) -> Any:
        """The index of a tile's images."""
        return n if self.problem.one_image else pl.ds(n * self.config.images, self.config.images)

    def load_b(self, cc: Any, tap: Any, k: Any, slot: Any, signal: Any) -> None:
        """Loads one tap and chunk of the filter, which arrives at the barrier `signal`."""
        problem, chunk = self.problem, self.problem.chunk
        first, reduced = k * self.config.columns, cc * chunk
        if problem.groups > 1 and problem.grouped == "c":
            per = self.scheduler.columns // problem.groups
            first, reduced = lax.rem(k, per) * self.config.columns, lax.div(k, per) * problem.reduce + reduced
        for piece in range(self.cut.b_pieces):
            where = {"t": tap, "c": pl.ds(reduced, chunk), "j": pl.ds(first, self.config.columns)}
            target = self.b_ring.at[slot]
            if self.cut.b_major == "mn":
                where["j"], target = pl.ds(first + piece * chunk, chunk), self.b_ring.at[slot, piece]
            plgpu.copy_gmem_to_smem(self.b.at[tuple(where[d] for d in problem.filter_dims)], target, signal)
