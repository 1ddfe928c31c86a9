"""The consumers of the matrix pipeline: warpgroups that multiply the boxes in the rings and store the results."""

import functools as ft
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.conv.hopper.pipeline_block import Block
from jaxdnn._src.core.compat import pl, plgpu
from jaxdnn._src.hopper.launch import when
from jaxdnn._src.hopper.wgmma import finish_accumulator, multiply, start_accumulator, store

_load: Any = plgpu.load  # typed otherwise by older JAX releases
REGISTERS = 232


class Consumer(Block):
    """What a consumer warpgroup does: it accumulates a tile, applies the epilogue, and stores results and zeros."""

    def consume(self) -> None:
        plgpu.set_max_registers(REGISTERS, action="increase")
        config = self.config
        self.team, self.member = lax.div(self.wg, config.groups), lax.rem(self.wg, config.groups)
        if config.resident:
            plgpu.barrier_wait(self.scratch["b_full"])

        def tile(local: Any, count: Any) -> Any:
            index = self.scheduler.tile(local, self.sm, self.sms)
            steps = self.scheduler.steps(index)
            when(lax.rem(local, config.teams) == self.team)(lambda: self.compute_tile(local, index, count, steps))
            return count + steps

        lax.fori_loop(0, self.mine, tile, jnp.int32(0))
        if config.blank:
            self.write_zeros()
        plgpu.wait_smem_to_gmem(0)

    def compute_tile(self, local: Any, tile: Any, first: Any, steps: Any) -> None:
        """Accumulates the products of `steps` slots from number `first` on, then runs the epilogue."""
        place = self.scheduler.place(tile)
        self.request_extras(place)
        stages = self.config.stages
        acc = start_accumulator(self.cut.rows, self.config.columns, self.problem.accumulator)
        if self.config.unroll:
            steps = self.cut.steps // self.problem.axes[-1].taps
            step = ft.partial(self.multiply_row, local=local)
        else:
            step = ft.partial(self.multiply_step, local=local, first=first)
        acc = finish_accumulator(lax.fori_loop(0, steps, step, acc))
        if self.cut.ringed:
            when(steps > 0)(lambda: plgpu.barrier_arrive(self.scratch["empty"].at[lax.rem(first + steps - 1, stages)]))
        if self.config.halo:
            last = (local + 1) * self.problem.chunks - 1
            plgpu.barrier_arrive(self.scratch["a_empty"].at[lax.rem(last, self.config.halo)])
        if self.problem.extras:
            plgpu.barrier_wait(self.scratch["extra_full"].at[self.wg])
        chunks = self.config.columns // self.cut.out_chunk
        for c in range(chunks):
            # The buffers rotate across tiles as well: with one chunk a tile, TMA may still read the last tile's buffer.
            buffer = lax.rem(lax.div(local, self.config.teams) * chunks + c, self.config.staged)
            self.finish_chunk(c, acc, place, buffer)

    def multiply_step(self, ks: Any, acc: Array, *, local: Any, first: Any) -> Array:
        """Issues the products of one tap of one chunk; releases the previous slot once its products are complete."""
        config, stages, halo = self.config, self.config.stages, self.config.halo
        slot = lax.rem(first + ks, stages)
        taps = self.cut.steps // self.problem.chunks
        cc, tap = (lax.div(ks, taps), lax.rem(ks, taps)) if halo else (None, None)
        a_index: Any = None
        if halo:
            a_index = local * self.problem.chunks + cc
            a_slot = lax.rem(a_index, halo)
            when(tap == 0)(lambda: plgpu.barrier_wait(self.scratch["a_full"].at[self.team * halo + a_slot]))
            a, major = self.halo_view(a_slot, tap), "halo"
        else:
            a, major = self.member_part(slot), "window" if self.problem.window else "k"
        if self.cut.ringed:
            plgpu.barrier_wait(self.scratch["full"].at[self.team * stages + slot])
        b = self.b_ring.at[ks if config.resident else slot]
        acc = multiply(acc, a, b, swizzle=self.problem.swizzle, a_major=major, b_major=self.cut.b_major)
        plgpu.wgmma_wait(1)  # for the previous slot's products; these stay in flight while that slot is released
        if self.cut.ringed:
            when(ks > 0)(lambda: plgpu.barrier_arrive(self.scratch["empty"].at[lax.rem(first + ks - 1, stages)]))
        if halo:
            when((tap == 0) & (ks > 0))(
                lambda: plgpu.barrier_arrive(self.scratch["a_empty"].at[lax.rem(a_index - 1, halo)])
            )
        return acc

    def multiply_row(self, row: Any, acc: Array, *, local: Any) -> Array:
        """Issues the products of a chunk with all taps along the last axis, from a halo and a resident filter."""
        halo, taps = self.config.halo, self.problem.axes[-1].taps
        rows = self.cut.steps // self.problem.chunks // taps
        index, tap = local * self.problem.chunks + lax.div(row, rows), lax.rem(row, rows)
        slot = lax.rem(index, halo)
        when(tap == 0)(lambda: plgpu.barrier_wait(self.scratch["a_full"].at[self.team * halo + slot]))
        for last in range(taps):
            a, b = self.halo_view(slot, tap, last), self.b_ring.at[row * taps + last]
            acc = multiply(acc, a, b, swizzle=self.problem.swizzle, a_major="halo", b_major=self.cut.b_major)
        plgpu.wgmma_wait(taps)  # for the products of the previous row
        when((tap == 0) & (row > 0))(lambda: plgpu.barrier_arrive(self.scratch["a_empty"].at[lax.rem(index - 1, halo)]))
        return acc

    def member_part(self, slot: Any) -> Any:
        """This warpgroup's rows of an input box."""
        box, part = self.cut.box, self.cut.part
        if self.problem.window:
            box, part = (0, *box), (0, *part)  # the first axis is that of whole and partial cells
        cut = [i for i, (whole, piece) in enumerate(zip(box, part, strict=True)) if whole != piece]
        if not cut:
            return self.a_ring.at[slot]
        rows = pl.ds(self.member * part[cut[0]], part[cut[0]])
        return self.a_ring.at[(slot, *([slice(None)] * cut[0]), rows)]

    def halo_view(self, slot: Any, tap: Any, last: int | None = None) -> Any:
        """This warpgroup's rows of a halo box, shifted by a tap.

        With `last`, the tap's static position along the last axis, `tap` numbers the taps of the other axes.
        """
        index: list[Any] = []
        for ax in reversed(self.problem.axes):
            if not index and last is not None:
                index.append((ax.taps - 1 - last) * -ax.move if ax.move < 0 else last * ax.move)
                continue
            j = lax.rem(tap, ax.taps) if len(index) + 1 < len(self.problem.axes) else tap
            tap = lax.div(tap, ax.taps)
            index.append((ax.taps - 1 - j) * -ax.move if ax.move < 0 else j * ax.move)
        starts = [jnp.int32(0), *index[::-1]]
        parts = zip(self.cut.box, self.cut.part, starts, strict=True)
        where = [pl.ds(start + (self.member * part if whole != part else 0), part) for whole, part, start in parts]
        return self.a_ring.at[(slot, *where)]

    def position(self, place: Any, column: Any, size: int) -> tuple[Any, ...]:
        """The indices of this warpgroup's part of the tile in an array of the output's shape."""
        n, at, phase, _ = place
        index: list[Any] = []
        for d, (start, whole, piece) in enumerate(zip((n, *at), self.cut.box, self.cut.part, strict=True)):
            if not d and self.problem.one_image:
                index.append(n)
                continue
            index.append(pl.ds(start * whole + (self.member * piece if whole != piece else 0), piece))
            if d and self.problem.axes[d - 1].out_step > 1:
                index.append(phase[d - 1])
        return (*index, pl.ds(column, size))

    def request_extras(self, place: Any) -> None:
        """Starts the loads of the tile's part of the epilogue's operands, which overlap the products."""
        base = place[-1] * self.config.columns
        buffers = self.scratch.get("extra", ())
        for gmem, (box, _), chunks in zip(self.extras, buffers, self.cut.extra_chunks, strict=True):
            per = self.config.columns // chunks
            for c in range(chunks):
                plgpu.copy_gmem_to_smem(
                    gmem.at[self.position(place, base + c * per, per)],
                    box.at[(self.wg, c, *self.image)],
                    self.scratch["extra_full"].at[self.wg],
                )

    def finish_chunk(self, c: int, acc: Array, place: Any, buffer: Any) -> None:
        """Applies the epilogue to some columns and stores them by TMA, through shared memory."""
        problem, width, staged = self.problem, self.cut.out_chunk, self.config.staged
        columns = slice(c * width, (c + 1) * width)
        value = acc[:, columns]
        if problem.finish is not None:
            tiles = [_extra_tile(matrix, self.wg, columns) for _, matrix in self.scratch.get("extra", ())]
            bias = None
            if self.bias is not None:
                start = place[-1] * self.config.columns + c * width
                vector = _load(self.bias.at[pl.ds(start, width)], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                bias = lax.broadcast_in_dim(vector, value.shape, (1,))
            value = problem.finish(value, tiles, bias)
        plgpu.wait_smem_to_gmem(staged - 1, wait_read_only=True)
        store(value.astype(problem.out_dtype), self.out_matrix.at[self.wg, buffer])
        plgpu.commit_smem()
        where = self.position(place, place[-1] * self.config.columns + c * width, width)
        plgpu.copy_smem_to_gmem(self.out_box.at[(self.wg, buffer, *self.image)], self.y.at[where])

    def write_zeros(self) -> None:
        """Stores the outputs without taps, after all tiles: whole rows where possible."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.scratch["blank"])  # the zeros overwrite the output buffers of other warpgroups
        plgpu.barrier_wait(self.scratch["blank"])
        row, pieces = self.zeros
        row[self.wg] = jnp.zeros(row.shape[1:], self.problem.out_dtype)
        plgpu.commit_smem()
        per, width, scheduler = self.config.blank, self.problem.blank_columns, self.scheduler
        here, workers = self.sm * self.cut.consumers + self.wg, self.sms * self.cut.consumers
        share = lambda total: lax.div(total - here + workers - 1, workers)

        def write_piece(local: Any) -> None:
            *index, first, phase, part = scheduler.blank_piece(here + local * workers)
            where = (*index, pl.ds(first * per, per), phase, pl.ds(part * width, width))
            plgpu.copy_smem_to_gmem(pieces.at[self.wg, 0], self.y.at[where])

        def write_row(local: Any) -> None:
            *index, first = scheduler.blank_row(here + local * workers)
            plgpu.copy_smem_to_gmem(row.at[self.wg], self.y.at[(*index, pl.ds(first * per, per))])

        if self.problem.blank_phases:
            pl.loop(0, share(scheduler.blank_pieces()))(write_piece)
        if self.problem.blank_rows:
            pl.loop(0, share(scheduler.blank_rows()))(write_row)


def _extra_tile(matrix: Any, wg: Any, columns: slice) -> Array:
    """Some columns of an epilogue operand's tile in shared memory, in float32."""
    per = matrix.shape[-1]
    width = columns.stop - columns.start
    first, inner = divmod(columns.start, per)
    tile = matrix[wg, first]
    return (tile if per == width else tile[:, inner : inner + width]).astype(jnp.float32)
