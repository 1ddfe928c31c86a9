"""The persistent, warp-specialised matrix pipeline that the Hopper convolution kernels share.

An implicit matrix product: a tile of the output is a box of pixels (images x positions, at most 256 rows) by a range of
output channels. For each filter tap, the input pixels that the tile needs are the same box, shifted. The tensor memory
accelerator (TMA) loads it and fills positions outside the image with zeros, so that padding, dilation and ragged edges
cost nothing. With a stride an axis is viewed as (positions, phase); a tap then selects a phase, and its pixels are
again a box.

Schedule. The products of an output are added in the same order for every tile, batch and position: for each chunk of
128 bytes of input channels, for each tap in the filter's order, the chunk's channels in order (`schedule_order` returns
it). The tensor core adds 32 bytes' worth of products at a time into a float32 accumulator.

Roles. One block of threads runs on each multiprocessor. Its producer warpgroup loads boxes into a ring of slots in
shared memory; each slot has an mbarrier "full", on which consumers wait for the loads, and an mbarrier "empty", on
which the producer waits until the consumers have read the slot. `teams` consumer teams of `groups` warpgroups take the
output tiles in turn, so that with two teams the epilogue of one tile overlaps the products of the next.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from jaxdnn._src.conv.hopper.pipeline_block import Cut
from jaxdnn._src.conv.hopper.pipeline_consumer import Consumer
from jaxdnn._src.conv.hopper.pipeline_producer import Producer
from jaxdnn._src.conv.hopper.plan import Axis, Config, Problem, check
from jaxdnn._src.conv.hopper.scheduler import decided
from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.launch import kernel, when


def run(
    a: Array, b: Array, bias: Array | None, extras: Sequence[Array], problem: Problem, config: Config, *, sms: int
) -> Array:
    """Runs the pipeline on arrays as `problem` describes them: channels last, strided axes not yet split.

    Returns an array (N, positions * out_step, ..., columns); if out_step does not divide the output, it is longer.
    """
    reason = check(problem, config)
    if reason is not None:
        raise ValueError(f"`config` {config} cannot run: {reason}")
    cut = Cut(problem, config)
    branches.record("pipeline", **decided(problem, config, sms))
    shape = [problem.batch]
    for ax in problem.axes:
        shape += [ax.positions, ax.out_step] if ax.out_step > 1 else [ax.out]

    def body(*refs: Any, **scratch: Any) -> None:
        block = _Block(cut, refs, scratch)
        when(block.wg == cut.consumers)(block.produce)
        when(block.wg < cut.consumers)(block.consume)

    compiled = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((*shape, problem.columns), problem.out_dtype),
        grid=(cut.scheduler.blocks(sms),),
        grid_names=("sm",),
        num_threads=cut.consumers + 1,
        thread_name="wg",
        scratch_types=cut.scratch(),
        kernel_name="jaxdnn_conv",
    )
    extras = [extra.reshape(*shape, problem.columns) for extra in extras]
    operands = [split_steps(a, problem.axes), b, *([bias] if bias is not None else []), *extras]
    y = compiled(*operands)
    return y.reshape(problem.batch, *(ax.positions * ax.out_step for ax in problem.axes), problem.columns)


class _Block(Producer, Consumer):
    """One block of threads: its warpgroups share the buffers, the barriers and the numbering of tiles."""


def split_steps(a: Array, axes: Sequence[Axis]) -> Array:
    """(N, X..., C) with every strided axis split into (positions, phase); in_step must divide its length."""
    shape = [a.shape[0]]
    for ax, size in zip(axes, a.shape[1:-1], strict=True):
        shape += [size // ax.in_step, ax.in_step] if ax.in_step > 1 else [size]
    return a.reshape(*shape, a.shape[-1])
