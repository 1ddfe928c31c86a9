"""Convolution backward filter: the kernel, and the two ways in which its partial sums become the result.

A producer warpgroup loads boxes of x and dy into a ring of slots, and consumer warpgroups multiply them; barriers as in
`pipeline`. With `direct`, the blocks of a cluster compute the splits of one tile. Each block owns a share of the
columns: it receives the other blocks' sums of its share through distributed shared memory, adds them in the order of
the splits, and stores the converted result in the filter's layout. Otherwise the partial sums are stored to device
memory, and `conv_wgrad` adds them after the launch.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.conv.hopper import pipeline
from jaxdnn._src.conv.hopper.wgrad_plan import (
    REGISTERS,
    STAGED,
    Config,
    Problem,
    TileScheduler,
    check,
    slot_boxes,
    x_box,
)
from jaxdnn._src.core.compat import fa, ir, mgpu, mgpu_utils, pl, plgpu
from jaxdnn._src.hopper import cluster, wgmma
from jaxdnn._src.hopper.launch import drain, kernel, turns, when
from jaxdnn._src.hopper.sizes import ceil_div
from jaxdnn._src.hopper.wgmma import ACCUMULATOR


def run(x: Array, dy: Array, problem: Problem, config: Config, sms: int) -> Array:
    """The partial sums, float32 of shape (splits, k, taps, c) with k and c padded to whole tiles, or the result.

    The result, with `direct`, has the operands' dtype and is (k, taps, c) or (taps, c, k), as the problem says.
    """
    reason = check(problem, config)
    if reason is not None:
        raise ValueError(f"`config` {config} cannot run: {reason}")
    scheduler = TileScheduler(problem, config)
    pixels = (config.images, *config.block)
    left, right = slot_boxes(problem, config)
    ring = lambda boxes, box: plgpu.SMEM(
        (config.stages, boxes, *box, problem.chunk), problem.dtype, transforms=_swizzled(problem)
    )
    scratch: dict[str, Any] = dict(
        left_ring=ring(left, pixels),
        right_ring=ring(right, x_box(problem, config) if config.halo else pixels),
        full=plgpu.Barrier(num_arrivals=left + right, num_barriers=config.stages),
        empty=plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages),
    )
    grid: dict[str, Any] = dict(grid=(scheduler.blocks(sms),), grid_names=("sm",))
    if config.direct:
        scratch |= _direct_scratch(problem, config)
        grid |= dict(cluster=(config.splits,), cluster_names=("split",)) if config.splits > 1 else {}

    def body(x: Any, dy: Any, out: Any, **scratch: Any) -> None:
        block = (_DirectBlock if config.direct else _Block)(scheduler, x, dy, out, scratch)
        when(block.wg == config.consumers)(block.produce)
        when(block.wg < config.consumers)(block.consume)

    compiled = kernel(
        body,
        out_type=jax.ShapeDtypeStruct(_out_shape(scheduler), problem.dtype if config.direct else jnp.float32),
        num_threads=config.consumers + 1,
        thread_name="wg",
        scratch_types=scratch,
        kernel_name="jaxdnn_conv_wgrad",
        **grid,
    )
    return compiled(pipeline.split_steps(x, problem.axes), dy)


def _swizzled(problem: Problem) -> tuple[Any, ...]:
    return (wgmma.swizzle_transform(problem.swizzle),)


def _out_shape(scheduler: TileScheduler) -> tuple[int, ...]:
    problem, config = scheduler.problem, scheduler.config
    if config.direct:
        k, c = problem.filters, problem.channels
        return (k, problem.taps, c) if problem.outer else (problem.taps, c, k)
    return config.splits, scheduler.rows * config.filters * config.across, problem.taps, problem.chunks * problem.chunk


def _direct_scratch(problem: Problem, config: Config) -> dict[str, Any]:
    """The output buffers, and the buffers and barriers that `hopper.cluster` needs."""
    box, swizzle = (config.consumers, STAGED, 64, 64), _swizzled(problem)
    scratch: dict[str, Any] = dict(
        out_stage=plgpu.RefUnion(
            plgpu.SMEM(box, problem.dtype, transforms=swizzle),
            plgpu.SMEM(box, problem.dtype, transforms=(wgmma.tiling_transform((8, 64)), *swizzle)),
        )
    )
    if config.splits > 1:
        scratch |= dict(
            slots=plgpu.SMEM((config.exchanged_bytes // 4,), jnp.float32),
            barriers=plgpu.SMEM((2 * config.consumers,), jnp.int32),
            ready=plgpu.ClusterBarrier(collective_axes=("split",), num_barriers=1, num_arrivals=config.consumers),
        )
    return scratch


class _Block:
    """One block of threads: the producer's methods, then the consumers'."""

    def __init__(self, scheduler: TileScheduler, x: Any, dy: Any, out: Any, scratch: dict[str, Any]):
        self.scheduler, self.problem, self.config = scheduler, scheduler.problem, scheduler.config
        self.x, self.dy, self.out, self.scratch = x, dy, out, scratch
        self.left_ring, self.right_ring = scratch["left_ring"], scratch["right_ring"]
        self.full, self.empty = scratch["full"], scratch["empty"]
        self.wg, self.sm, self.sms = lax.axis_index("wg"), lax.axis_index("sm"), lax.axis_size("sm")
        self.items = scheduler.items
        self.registers = REGISTERS[scheduler.config.consumers]

    @property
    def mine(self) -> Any:
        """How many work items the block has."""
        return lax.div(self.items - self.sm + self.sms - 1, self.sms)

    def place(self, local: Any) -> tuple[Any, Any, Any, Any, Any]:
        return self.scheduler.place(self.sm + local * self.sms)

    # ---- the producer

    def produce(self) -> None:
        plgpu.set_max_registers(self.registers[0], action="decrease")
        count = lax.fori_loop(0, turns(self.mine), self.load_item, jnp.int32(0))
        drain(self.empty, count, self.config.stages)

    def load_item(self, local: Any, count: Any) -> Any:
        row, tile, _, first, boxes = self.place(local)
        return lax.fori_loop(0, turns(boxes), lambda i, count: self.load_box(row, tile, first + i, count), count)

    def load_box(self, row: Any, tile: Any, number: Any, count: Any) -> Any:
        problem, config, chunk = self.problem, self.config, self.problem.chunk
        slot = lax.rem(count, config.stages)
        when(count >= config.stages)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
        at = self.scheduler.box(number)
        left, right = slot_boxes(problem, config)
        group = lax.div(row * left * chunk, problem.filters // problem.groups) if problem.groups > 1 else 0
        images = at[0] if problem.one_image else pl.ds(at[0] * config.images, config.images)
        image = (0,) if problem.one_image else ()  # removes the axis of images from a box with one image
        positions = [pl.ds(i * b, b) for i, b in zip(at[1:], config.block, strict=True)]

        def load_dy(block: Any, target: Any) -> None:
            index = (images, *positions, pl.ds(block * chunk, chunk))
            plgpu.copy_gmem_to_smem(self.dy.at[index], target, self.full.at[slot])

        def load_x(block: Any, target: Any) -> None:
            tap, c = self.column(block)
            channels = pl.ds(group * problem.channels + c * chunk, chunk)
            index = (images, *self.x_positions(at[1:], tap), channels)
            plgpu.copy_gmem_to_smem(self.x.at[index], target, self.full.at[slot])

        load_left, load_right = (load_x, load_dy) if self.scheduler.x_left else (load_dy, load_x)
        for j in range(left):
            load_left(row * left + j, self.left_ring.at[(slot, j, *image)])
        for j in range(right):
            load_right(tile * right + j, self.right_ring.at[(slot, j, *image)])
        return count + 1

    def column(self, block: Any) -> tuple[Any, Any]:
        """(tap, chunk of c) of a block of (tap, c); with a halo the first of the taps that share its box."""
        chunks = self.problem.chunks
        if self.config.halo:
            last = math.prod(ax.taps for ax in self.problem.axes[-2:])
            return lax.div(block, chunks) * last, lax.rem(block, chunks)
        return lax.div(block, chunks), lax.rem(block, chunks)

    def x_positions(self, at: Sequence[Any], tap: Any) -> list[Any]:
        """The spatial indices of x's box for a box of dy and a tap."""
        taps: list[Any] = []
        for d in reversed(range(len(at))):
            taps.insert(0, lax.rem(tap, self.problem.axes[d].taps) if d else tap)
            tap = lax.div(tap, self.problem.axes[d].taps)
        index: list[Any] = []
        sizes = x_box(self.problem, self.config)[1:]
        for ax, block, size, i, t in zip(self.problem.axes, self.config.block, sizes, at, taps, strict=True):
            offset = ax.offset[0] + t * ax.move
            if ax.in_step == 1:
                index.append(pl.ds(i * block + offset, size))
            else:
                shift = ax.in_step * ceil_div(max(0, -ax.offset[0]), ax.in_step)  # makes the dividend non-negative
                high = lax.div(offset + shift, ax.in_step) - shift // ax.in_step
                index += [pl.ds(i * block + high, size), lax.rem(offset + shift, ax.in_step)]
        return index

    # ---- the consumers

    def consume(self) -> None:
        plgpu.set_max_registers(self.registers[1], action="increase")
        self.across, self.along = lax.div(self.wg, self.config.along), lax.rem(self.wg, self.config.along)
        lax.fori_loop(0, self.mine, self.compute_item, jnp.int32(0))

    def compute_item(self, local: Any, count: Any) -> Any:
        config = self.config
        row, tile, split, _, boxes = self.place(local)

        def step(i: Any, acc: Array) -> Array:
            slot = lax.rem(count + i, config.stages)
            plgpu.barrier_wait(self.full.at[slot])
            acc = self.multiply(acc, slot)
            plgpu.wgmma_wait(1)
            when(i > 0)(lambda: plgpu.barrier_arrive(self.empty.at[lax.rem(count + i - 1, config.stages)]))
            return acc

        acc = wgmma.start_accumulator(config.filters, config.columns, jnp.float32)
        acc = wgmma.finish_accumulator(lax.fori_loop(0, boxes, step, acc))
        when(boxes > 0)(lambda: plgpu.barrier_arrive(self.empty.at[lax.rem(count + boxes - 1, config.stages)]))
        self.store(acc, local, row, tile, split)
        return count + boxes

    def multiply(self, acc: Array, slot: Any) -> Array:
        config, problem = self.config, self.problem
        rows = config.filters // problem.chunk
        a = self.left_ring.at[slot, pl.ds(self.across * rows, rows)]
        if not config.halo:
            columns = config.columns // problem.chunk
            b = self.right_ring.at[slot, pl.ds(self.along * columns, columns)]
            return wgmma.multiply(acc, a, b, swizzle=problem.swizzle, a_major="mn", b_major="mn")
        lead = [slice(None)] * (len(config.block) - 1)
        first = pl.ds(self.along * problem.axes[-2].move, config.block[-2])
        return multiply_halo(acc, a, self.right_ring.at[(slot, 0, *lead, first)], problem, config)

    def store(self, acc: Array, local: Any, row: Any, tile: Any, split: Any) -> None:
        del local  # partial sums are stored from registers, without a buffer
        config, problem = self.config, self.problem
        chunk = problem.chunk
        rows = pl.ds((row * config.across + self.across) * config.filters, config.filters)
        for j in range(config.columns // chunk):
            value = acc[:, j * chunk : (j + 1) * chunk]
            if config.halo:
                first, c = self.column(tile)
                tap = first + self.along * problem.axes[-1].taps + j
                self.out[split, rows, tap, pl.ds(c * chunk, chunk)] = value
                continue
            block = (tile * config.along + self.along) * (config.columns // chunk) + j
            tap, c = self.column(block)

            @when(tap < problem.taps)
            def _(value: Array = value, tap: Any = tap, c: Any = c) -> None:
                self.out[split, rows, tap, pl.ds(c * chunk, chunk)] = value


class _DirectBlock(_Block):
    """A block of a cluster whose blocks compute the splits of a tile and store the result."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Of the cluster, whose blocks compute the splits of an item.
        self.items = self.scheduler.items // self.config.splits
        self.split = lax.axis_index("split") if self.config.splits > 1 else jnp.int32(0)
        self.out_box, self.out_matrix = self.scratch["out_stage"]

    def place(self, local: Any) -> tuple[Any, Any, Any, Any, Any]:
        return self.scheduler.place(self.sm + local * self.sms, self.split)

    def consume(self) -> None:
        if self.config.splits > 1:
            cluster.prepare(self.scratch["barriers"])
            plgpu.barrier_arrive(self.scratch["ready"].at[0])
        super().consume()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # a block's shared memory must be valid until TMA has read it
        if self.config.splits > 1:  # and until the other blocks' last arrivals at its barrier
            plgpu.barrier_wait(self.scratch["ready"].at[0])

    def store(self, acc: Array, local: Any, row: Any, tile: Any, split: Any) -> None:
        config = self.config
        value = self.exchange(acc) if config.splits > 1 else acc
        row_block = (row * config.across + self.across) * (config.filters // 64)
        column_block = (tile * config.along + self.along) * (config.columns // 64) + split * (config.share // 64)
        blocks = list(np.ndindex(config.filters // 64, config.share // 64))
        for turn, (i, j) in enumerate(blocks):
            # The buffers rotate across tiles as well: TMA may still read the last tile's buffers.
            buffer = lax.rem(local * len(blocks) + turn, STAGED) if len(blocks) % STAGED else turn % STAGED
            part = value[i * 64 : (i + 1) * 64, j * 64 : (j + 1) * 64]
            self.store_block(part, row_block + i, column_block + j, buffer)

    def exchange(self, acc: Array) -> Array:
        """This block's share of the columns, accumulated over the cluster in the order of the splits."""
        slots, barriers, ready = (self.scratch[name] for name in ("slots", "barriers", "ready"))
        plgpu.barrier_wait(ready.at[0])
        cluster.send(acc, slots, barriers, self.config.splits)
        total = cluster.receive(acc, slots, barriers, self.config.splits)
        plgpu.barrier_arrive(ready.at[0])
        return total

    def store_block(self, value: Array, row: Any, column: Any, buffer: Any) -> None:
        """Stores 64 x 64 results. Every call commits one group of copies; the wait for a buffer counts these groups."""
        problem = self.problem
        plgpu.wait_smem_to_gmem(STAGED - 1, wait_read_only=True)
        wgmma.store(value.astype(problem.dtype), self.out_matrix.at[self.wg, buffer])
        plgpu.commit_smem()
        k, x = (column, row) if self.scheduler.x_left else (row, column)
        tap, c = self.column(x)
        filters, channels = pl.ds(k * 64, 64), pl.ds(c * 64, 64)
        where = (filters, tap, channels) if problem.outer else (tap, channels, filters)

        # For a tap beyond the filter the group of copies is empty. TMA does not clip it: it drops an axis of length
        # one, so that with one tap every index of the tap would address that one.
        inside = tap < problem.taps
        plgpu.copy_smem_to_gmem(self.out_box.at[self.wg, buffer], self.out.at[where], predicate=inside)


def multiply_halo(acc: Array, a: Any, b: Any, problem: Problem, config: Config) -> Array:
    """acc += dy^T x for all taps of one filter row, whose column blocks are one (dilated) pixel apart in one box.

    a: (chunks of k, box, chunk). b: a halo box from the row's first pixel on, (images, ..., rows, width, chunk).
    """
    swizzle, chunk = problem.swizzle, problem.chunk
    ref_type = lambda: plgpu.RefType((wgmma.swizzle_transform(swizzle),))
    deep = config.block[-2] * 8  # pixels of the reduction that are at equal distances in memory

    @wgmma.inline_mgpu(
        arg_types=(ACCUMULATOR, ref_type(), ref_type()),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=ACCUMULATOR),
    )
    def product(_: Any, acc: Any, a: Any, b: Any) -> Any:
        state = mgpu.WGMMAAccumulator(_value=acc, _original_layout=fa.WGMMA_LAYOUT, _sync=False)
        strides, _ = ir.MemRefType(b.type).get_strides_and_offset()
        pitch, shift = strides[-3], problem.axes[-1].move * chunk
        lead = ir.MemRefType(b.type).shape[:-3]
        for index in np.ndindex(*lead):
            number = tuple(int(i) for i in index)
            left = mgpu_utils.memref_slice(a, (slice(None), *number))
            right = mgpu_utils.memref_slice(b, number)
            blocks = config.filters // chunk
            left = wgmma.tiled_view(left, (blocks, deep // 8, chunk, 8), (config.pixels * chunk, 8 * chunk, 1, chunk))
            right = wgmma.tiled_view(right, (deep // 8, config.columns // chunk, 8, chunk), (pitch, shift, chunk, 1))
            state = _by_depth(state, left, right, deep, chunk, swizzle)
        wgmma.ptx("wgmma.commit_group.sync.aligned;")
        return state._value

    return product(acc, a, b)


def _by_depth(state: Any, left: Any, right: Any, deep: int, chunk: int, swizzle: int) -> Any:
    """wgmma over `deep` pixels, which Pallas requires to be a multiple of the swizzle's elements."""
    if deep % chunk:
        raise ValueError(f"a halo box has {deep} pixels in a row block, no multiple of {chunk}")
    return mgpu.wgmma(state, left, right, swizzle=swizzle)
