"""The persistent, warp-specialised matrix pipeline that the Hopper convolution kernels share.

A convolution as a matrix product without a copy: a tile of the output is a box of pixels (images x positions, at most
256 rows) times a range of output channels. For every filter tap the box of *input* pixels that meets it is a box too,
shifted; the tensor memory accelerator (TMA) fetches it and fills whatever lies outside the image with zeros, so that
padding, dilation and ragged edges cost nothing. A stride splits an axis into (positions, phase); a tap then picks a
phase, and stays a box.

Schedule. An output's products are added in this order, whatever the tile, the batch or the position:
for each chunk of 128 bytes of input channels, for each tap in the filter's order, the chunk's channels in order
(`schedule_order` spells it out). The tensor core adds 32 bytes' worth of products at a time into a float32.

Roles in a block of threads (one block a multiprocessor): one warpgroup issues the loads into a ring of shared-memory
slots; `teams` consumer teams of `groups` warpgroups each take the output tiles in turn, so that with two teams the
epilogue of one tile overlaps the products of the next.
"""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxdnn._kernels.hopper.conv_plan import (
    Axis,
    Config,
    Problem,
    a_box,
    a_slots,
    b_slots,
    ceil_div,
    check,
    out_columns,
    row_bytes,
    split,
    swizzled,
)
from jaxdnn._kernels.hopper.conv_walk import Walk, select
from jaxdnn._kernels.hopper.wgmma import finish_accumulator, multiply, start_accumulator, tiling_transform

_load: Any = plgpu.load  # typed otherwise by older JAX releases
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


def run(
    a: Array, b: Array, bias: Array | None, extras: Sequence[Array], problem: Problem, config: Config, *, sms: int
) -> Array:
    """Runs the pipeline; every array is laid out as `problem` says (channels last, steps not yet split).

    Returns an array (N, positions * out_step, ..., columns): where out_step does not divide the output, longer.
    """
    reason = check(problem, config)
    if reason is not None:
        raise ValueError(f"`config` {config} cannot run: {reason}")
    cut = _Cut(problem, config)
    shape = [problem.batch]
    for ax in problem.axes:
        shape += [ax.positions, ax.out_step] if ax.out_step > 1 else [ax.out]

    def body(*refs: Any, **scratch: Any) -> None:
        block = _Block(cut, refs, scratch)
        pl.when(block.wg == cut.consumers)(block.produce)
        pl.when(block.wg < cut.consumers)(block.consume)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((*shape, problem.columns), problem.out_dtype),
        grid=(cut.walk.blocks(sms),),
        grid_names=("sm",),
        num_threads=cut.consumers + 1,
        thread_name="wg",
        scratch_types=cut.scratch(),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="jaxdnn_conv",
    )
    extras = [extra.reshape(*shape, problem.columns) for extra in extras]
    operands = [split_steps(a, problem.axes), b, *([bias] if bias is not None else []), *extras]
    y = kernel(*operands)
    return y.reshape(problem.batch, *(ax.positions * ax.out_step for ax in problem.axes), problem.columns)


class _Cut:
    """The static side of a launch: boxes, buffers and counts."""

    def __init__(self, problem: Problem, config: Config):
        self.problem, self.config, self.walk = problem, config, Walk(problem, config)
        part = split(config)
        if part is None:  # for the type checker: `check` has refused it
            raise ValueError(f"`config` {config} cannot run: the tile does not divide among the team's warpgroups")
        self.box, self.part = (config.images, *config.block), part
        self.consumers = config.teams * config.groups
        self.rows = config.rows // config.groups
        self.b_major = "mn" if problem.filter_dims[-1] == "j" else "k"
        self.b_pieces = config.columns // problem.chunk if self.b_major == "mn" else 1
        self.out_chunk = out_columns(problem, config)
        self.extra_chunks = [config.columns * np.dtype(d).itemsize // row_bytes(config, d) for d in problem.extras]
        self.a_loads, self.b_ringed = not config.halo, not config.resident  # what the common ring holds
        self.ringed = self.a_loads or self.b_ringed
        self.steps = math.prod(ax.taps for ax in problem.axes) * problem.chunks  # slots that a resident filter takes

    def blank(self) -> list[Any]:
        """The output tiles' memory as zeros, a piece of a row of the output for each warpgroup."""
        if not self.config.blank:
            return []
        problem, per, step = self.problem, self.config.blank, self.problem.axes[-1].out_step
        row = (per, step, problem.columns) if step > 1 else (per, problem.columns)
        pieces = step * problem.columns // problem.blank_columns
        shapes = [row, (pieces, per, problem.blank_columns)]
        return [plgpu.SMEM((self.consumers, *shape), problem.out_dtype) for shape in shapes]

    def staging(self, dtype: Any, chunks: int, per: int, others: Sequence[Any] = ()) -> Any:
        """Buffers of `per` columns, written or read by TMA as boxes and by the warpgroup as a tiled matrix."""
        swizzle = swizzled(per * np.dtype(dtype).itemsize)
        return plgpu.RefUnion(
            plgpu.SMEM((self.consumers, chunks, *self.part, per), dtype, transforms=swizzle),
            plgpu.SMEM(
                (self.consumers, chunks, self.rows, per), dtype, transforms=(tiling_transform((8, per)), *swizzle)
            ),
            *others,
        )

    def scratch(self) -> dict[str, Any]:
        problem, config, chunk = self.problem, self.config, self.problem.chunk
        swizzle = swizzled(problem.swizzle)
        b_box = (self.b_pieces, chunk, chunk) if self.b_major == "mn" else (config.columns, chunk)
        refs: dict[str, Any] = {
            "a_ring": plgpu.SMEM(
                (a_slots(config), *a_box(problem, config), problem.a_chunk),
                problem.dtype,
                transforms=() if problem.window else swizzle,
            ),
            "b_ring": plgpu.SMEM((b_slots(problem, config), *b_box), problem.dtype, transforms=swizzle),
            "out": self.staging(problem.out_dtype, config.staged, self.out_chunk, self.blank()),
        }
        teams, stages = config.teams, config.stages
        if self.ringed:
            arrivals = int(self.a_loads) * (1 + problem.partial) + (self.b_pieces if self.b_ringed else 0)
            refs["full"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=teams * stages)
            refs["empty"] = plgpu.Barrier(num_arrivals=config.groups, num_barriers=stages)
        if config.halo:
            refs["a_full"] = plgpu.Barrier(num_arrivals=1, num_barriers=teams * config.halo)
            refs["a_empty"] = plgpu.Barrier(num_arrivals=config.groups, num_barriers=config.halo)
        if config.blank:
            refs["blank"] = plgpu.Barrier(num_arrivals=self.consumers)
        if config.resident:
            refs["b_full"] = plgpu.Barrier(num_arrivals=self.steps * self.b_pieces)
        if problem.extras:
            chunks = zip(problem.extras, self.extra_chunks, strict=True)
            refs["extra"] = tuple(self.staging(d, n, config.columns // n) for d, n in chunks)
            refs["extra_full"] = plgpu.Barrier(num_arrivals=sum(self.extra_chunks), num_barriers=self.consumers)
        return refs


class _Block:
    """What one block of threads does; a method is a role or a stage of one."""

    def __init__(self, cut: _Cut, refs: Sequence[Any], scratch: dict[str, Any]):
        self.cut, self.problem, self.config, self.walk = cut, cut.problem, cut.config, cut.walk
        rest = list(refs)
        self.a, self.b = rest.pop(0), rest.pop(0)
        self.bias = rest.pop(0) if cut.problem.bias else None
        self.extras, self.y = rest[:-1], rest[-1]
        self.scratch = scratch
        self.a_ring, self.b_ring = scratch["a_ring"], scratch["b_ring"]
        self.out_box, self.out_matrix, *self.zeros = scratch["out"]
        self.wg, self.sm, self.sms = lax.axis_index("wg"), lax.axis_index("sm"), lax.axis_size("sm")
        self.mine = self.walk.share(self.sm, self.sms)
        self.image = (0,) if cut.problem.one_image else ()  # indexes the axis of images of a box that holds one

    # ---- the producer

    def produce(self) -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        config = self.config
        if config.resident:
            self.load_filter()
        zero = jnp.int32(0)
        count, a_count = lax.fori_loop(0, self.mine, self.load_tile, (zero, zero))
        if self.cut.ringed:
            drain(self.scratch["empty"], count, config.stages)
        if config.halo:
            drain(self.scratch["a_empty"], a_count, config.halo)

    def load_filter(self) -> None:
        """The whole filter, once, for the tiles of the block's whole life."""
        taps = self.cut.steps // self.problem.chunks

        @pl.loop(0, self.cut.steps)
        def _(step: Any) -> None:
            self.load_b(
                lax.div(step, taps), lax.rem(step, taps), jnp.int32(0), jnp.int32(0), step, self.scratch["b_full"]
            )

    def load_tile(self, local: Any, counts: tuple[Any, Any]) -> tuple[Any, Any]:
        n, at, phase, k = self.walk.place(self.walk.tile(local, self.sm, self.sms))
        team = lax.rem(local, self.config.teams)
        extents = [select(p, ax.count) for p, ax in zip(phase, self.problem.axes, strict=True)]

        def nest(cc: Any, j: tuple[Any, ...], counts: tuple[Any, Any]) -> tuple[Any, Any]:
            if len(j) == len(extents):
                return self.load_step(cc, j, (n, at, phase, k), team, counts)
            extent = extents[len(j)]
            if isinstance(extent, int) and extent == 1:
                return nest(cc, (*j, jnp.int32(0)), counts)
            return lax.fori_loop(0, extent, lambda i, counts: nest(cc, (*j, i), counts), counts)

        def chunk(cc: Any, counts: tuple[Any, Any]) -> tuple[Any, Any]:
            if self.config.halo:
                counts = self.load_halo(cc, (n, at, phase, k), team, counts)
            return nest(cc, (), counts) if self.cut.ringed else counts

        return lax.fori_loop(0, self.problem.chunks, chunk, counts)

    def load_halo(self, cc: Any, place: Any, team: Any, counts: tuple[Any, Any]) -> tuple[Any, Any]:
        """The input that all taps of a chunk need, once."""
        count, a_count = counts
        slots = self.config.halo
        slot = lax.rem(a_count, slots)
        pl.when(a_count >= slots)(lambda: plgpu.barrier_wait(self.scratch["a_empty"].at[slot]))
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
        """The input channels of a chunk, in the group that the tile's columns belong to."""
        problem = self.problem
        start = cc * problem.chunk
        if problem.groups > 1:
            start += lax.div(k, self.walk.columns // problem.groups) * problem.reduce
        return pl.ds(start, problem.a_chunk)

    def load_step(self, cc: Any, j: Sequence[Any], place: Any, team: Any, counts: tuple[Any, Any]) -> tuple[Any, Any]:
        """One slot of the ring: the input box of one tap and chunk, and the filter's part for it."""
        count, a_count = counts
        n, at, phase, k = place
        stages = self.config.stages
        slot = lax.rem(count, stages)
        signal = self.scratch["full"].at[team * stages + slot]
        pl.when(count >= stages)(lambda: plgpu.barrier_wait(self.scratch["empty"].at[slot]))
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
                shift = ax.in_step * ceil_div(max(0, -min(ax.offset)), ax.in_step)  # division of what is not negative
                high = lax.div(offset + shift, ax.in_step) - shift // ax.in_step
                index += [pl.ds(i * block + high, block), lax.rem(offset + shift, ax.in_step)]
        if self.cut.a_loads:
            index.append(self.channels(cc, k))
            target = self.a_ring.at[(slot, *((0,) if self.problem.window else ()), *self.image)]
            plgpu.copy_gmem_to_smem(self.a.at[tuple(index)], target, signal)
            if self.problem.partial:
                block = self.config.block[-1]
                index[-2] = pl.ds(self.a.shape[-2] // 2 + at[-1] * block, block + 8)
                plgpu.copy_gmem_to_smem(self.a.at[tuple(index)], self.a_ring.at[(slot, 1, *self.image)], signal)
        if self.cut.b_ringed:
            self.load_b(cc, tap, k, team, slot, signal)
        return count + 1, a_count

    def images(self, n: Any) -> Any:
        """A tile's images, as copies name them."""
        return n if self.problem.one_image else pl.ds(n * self.config.images, self.config.images)

    def load_b(self, cc: Any, tap: Any, k: Any, team: Any, slot: Any, signal: Any) -> None:
        problem, chunk = self.problem, self.problem.chunk
        first, reduced = k * self.config.columns, cc * chunk
        if problem.groups > 1 and problem.grouped == "c":
            per = self.walk.columns // problem.groups
            first, reduced = lax.rem(k, per) * self.config.columns, lax.div(k, per) * problem.reduce + reduced
        for piece in range(self.cut.b_pieces):
            where = {"t": tap, "c": pl.ds(reduced, chunk), "j": pl.ds(first, self.config.columns)}
            target = self.b_ring.at[slot]
            if self.cut.b_major == "mn":
                where["j"], target = pl.ds(first + piece * chunk, chunk), self.b_ring.at[slot, piece]
            plgpu.copy_gmem_to_smem(self.b.at[tuple(where[d] for d in problem.filter_dims)], target, signal)

    # ---- the consumers

    def consume(self) -> None:
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        config = self.config
        self.team, self.member = lax.div(self.wg, config.groups), lax.rem(self.wg, config.groups)
        if config.resident:
            plgpu.barrier_wait(self.scratch["b_full"])

        def tile(local: Any, count: Any) -> Any:
            index = self.walk.tile(local, self.sm, self.sms)
            steps = self.walk.steps(index)
            pl.when(lax.rem(local, config.teams) == self.team)(lambda: self.compute_tile(local, index, count, steps))
            return count + steps

        lax.fori_loop(0, self.mine, tile, jnp.int32(0))
        if config.blank:
            self.write_zeros()
        plgpu.wait_smem_to_gmem(0)

    def compute_tile(self, local: Any, tile: Any, first: Any, steps: Any) -> None:
        place = self.walk.place(tile)
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
            pl.when(steps > 0)(
                lambda: plgpu.barrier_arrive(self.scratch["empty"].at[lax.rem(first + steps - 1, stages)])
            )
        if self.config.halo:
            last = (local + 1) * self.problem.chunks - 1
            plgpu.barrier_arrive(self.scratch["a_empty"].at[lax.rem(last, self.config.halo)])
        if self.problem.extras:
            plgpu.barrier_wait(self.scratch["extra_full"].at[self.wg])
        chunks = self.config.columns // self.cut.out_chunk
        for c in range(chunks):
            buffer = lax.rem(lax.div(local, self.config.teams) * chunks + c, self.config.staged)
            self.finish_chunk(c, acc, place, buffer)

    def multiply_step(self, ks: Any, acc: Array, *, local: Any, first: Any) -> Array:
        """One tap of one chunk; the slot before it is given back once its products have arrived."""
        config, stages, halo = self.config, self.config.stages, self.config.halo
        slot = lax.rem(first + ks, stages)
        taps = self.cut.steps // self.problem.chunks
        cc, tap = (lax.div(ks, taps), lax.rem(ks, taps)) if halo else (None, None)
        a_index: Any = None
        if halo:
            a_index = local * self.problem.chunks + cc
            a_slot = lax.rem(a_index, halo)
            pl.when(tap == 0)(lambda: plgpu.barrier_wait(self.scratch["a_full"].at[self.team * halo + a_slot]))
            a, major = self.halo_view(a_slot, tap), "halo"
        else:
            a, major = self.member_part(slot), "window" if self.problem.window else "k"
        if self.cut.ringed:
            plgpu.barrier_wait(self.scratch["full"].at[self.team * stages + slot])
        b = self.b_ring.at[ks if config.resident else slot]
        acc = multiply(acc, a, b, swizzle=self.problem.swizzle, a_major=major, b_major=self.cut.b_major)
        plgpu.wgmma_wait(1)
        if self.cut.ringed:
            pl.when(ks > 0)(lambda: plgpu.barrier_arrive(self.scratch["empty"].at[lax.rem(first + ks - 1, stages)]))
        if halo:
            pl.when((tap == 0) & (ks > 0))(
                lambda: plgpu.barrier_arrive(self.scratch["a_empty"].at[lax.rem(a_index - 1, halo)])
            )
        return acc

    def multiply_row(self, row: Any, acc: Array, *, local: Any) -> Array:
        """All taps of the last axis of one chunk, from a halo and a resident filter."""
        halo, taps = self.config.halo, self.problem.axes[-1].taps
        rows = self.cut.steps // self.problem.chunks // taps
        index, tap = local * self.problem.chunks + lax.div(row, rows), lax.rem(row, rows)
        slot = lax.rem(index, halo)
        pl.when(tap == 0)(lambda: plgpu.barrier_wait(self.scratch["a_full"].at[self.team * halo + slot]))
        for last in range(taps):
            a, b = self.halo_view(slot, tap, last), self.b_ring.at[row * taps + last]
            acc = multiply(acc, a, b, swizzle=self.problem.swizzle, a_major="halo", b_major=self.cut.b_major)
        plgpu.wgmma_wait(taps)
        pl.when((tap == 0) & (row > 0))(
            lambda: plgpu.barrier_arrive(self.scratch["a_empty"].at[lax.rem(index - 1, halo)])
        )
        return acc

    def member_part(self, slot: Any) -> Any:
        """This warpgroup's rows of an input box."""
        box, part = self.cut.box, self.cut.part
        if self.problem.window:
            box, part = (0, *box), (0, *part)  # the axis of whole and partial cells
        cut = [i for i, (whole, piece) in enumerate(zip(box, part, strict=True)) if whole != piece]
        if not cut:
            return self.a_ring.at[slot]
        rows = pl.ds(self.member * part[cut[0]], part[cut[0]])
        return self.a_ring.at[(slot, *([slice(None)] * cut[0]), rows)]

    def halo_view(self, slot: Any, tap: Any, last: int | None = None) -> Any:
        """This warpgroup's rows of a halo box, shifted by a tap, whose place on the last axis may be told apart."""
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
        """Where this warpgroup's part of the tile lies in an output-shaped array."""
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
        """Fetches the tile's part of the epilogue's operands while the products are computed."""
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
        """The epilogue of some columns, and their way out: registers, shared memory, TMA."""
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
        self.out_matrix[self.wg, buffer] = value.astype(problem.out_dtype)
        plgpu.commit_smem()
        where = self.position(place, place[-1] * self.config.columns + c * width, width)
        plgpu.copy_smem_to_gmem(self.out_box.at[(self.wg, buffer, *self.image)], self.y.at[where])

    def write_zeros(self) -> None:
        """The outputs that meet no tap: rows whole where they can be, and after all tiles, reads and writes apart."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.scratch["blank"])  # the zeros lie over the tiles of other warpgroups
        plgpu.barrier_wait(self.scratch["blank"])
        row, pieces = self.zeros
        row[self.wg] = jnp.zeros(row.shape[1:], self.problem.out_dtype)
        plgpu.commit_smem()
        per, width, walk = self.config.blank, self.problem.blank_columns, self.walk
        here, workers = self.sm * self.cut.consumers + self.wg, self.sms * self.cut.consumers
        share = lambda total: lax.div(total - here + workers - 1, workers)

        def write_piece(local: Any) -> None:
            *index, first, phase, part = walk.blank_piece(here + local * workers)
            where = (*index, pl.ds(first * per, per), phase, pl.ds(part * width, width))
            plgpu.copy_smem_to_gmem(pieces.at[self.wg, 0], self.y.at[where])

        def write_row(local: Any) -> None:
            *index, first = walk.blank_row(here + local * workers)
            plgpu.copy_smem_to_gmem(row.at[self.wg], self.y.at[(*index, pl.ds(first * per, per))])

        if self.problem.blank_phases:
            pl.loop(0, share(walk.blank_pieces()))(write_piece)
        if self.problem.blank_rows:
            pl.loop(0, share(walk.blank_rows()))(write_row)


def drain(empty: Any, total: Any, slots: int) -> None:
    """Waits until every slot has been read: memory must not be given back while the tensor cores read it."""

    @pl.loop(lax.max(total - slots, 0), total)
    def _(count: Any) -> None:
        plgpu.barrier_wait(empty.at[lax.rem(count, slots)])


def _extra_tile(matrix: Any, wg: Any, columns: slice) -> Array:
    per = matrix.shape[-1]
    width = columns.stop - columns.start
    first, inner = divmod(columns.start, per)
    tile = matrix[wg, first]
    return (tile if per == width else tile[:, inner : inner + width]).astype(jnp.float32)


def split_steps(a: Array, axes: Sequence[Axis]) -> Array:
    """(N, X..., C) with every stepped axis as (positions, phase); its length must divide."""
    shape = [a.shape[0]]
    for ax, size in zip(axes, a.shape[1:-1], strict=True):
        shape += [size // ax.in_step, ax.in_step] if ax.in_step > 1 else [size]
    return a.reshape(*shape, a.shape[-1])
