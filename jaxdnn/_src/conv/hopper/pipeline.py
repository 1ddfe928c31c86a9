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

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array

from jaxdnn._src.conv.hopper.pipeline_block import Cut
from jaxdnn._src.conv.hopper.pipeline_consumer import Consumer
from jaxdnn._src.conv.hopper.pipeline_producer import Producer
from jaxdnn._src.conv.hopper.plan import Axis, Config, Problem, check
from jaxdnn._src.conv.hopper.walk import decided
from jaxdnn._src.core.compat import pl, plgpu
from jaxdnn._src.hopper import branches


def run(
    a: Array, b: Array, bias: Array | None, extras: Sequence[Array], problem: Problem, config: Config, *, sms: int
) -> Array:
    """Runs the pipeline; every array is laid out as `problem` says (channels last, steps not yet split).

    Returns an array (N, positions * out_step, ..., columns): where out_step does not divide the output, longer.
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


class _Block(Producer, Consumer):
    """One block of threads: its warpgroups share buffers, barriers and the arithmetic of tiles, and part by role."""


def split_steps(a: Array, axes: Sequence[Axis]) -> Array:
    """(N, X..., C) with every stepped axis as (positions, phase); its length must divide."""
    shape = [a.shape[0]]
    for ax, size in zip(axes, a.shape[1:-1], strict=True):
        shape += [size // ax.in_step, ax.in_step] if ax.in_step > 1 else [size]
    return a.reshape(*shape, a.shape[-1])
