"""Depthwise and narrow-group convolution on Hopper: the launch of forward and backward data."""

import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.conv.hopper.copies import pad
from jaxdnn._src.conv.hopper.depthwise import fma as lanes
from jaxdnn._src.conv.hopper.depthwise.launch import as_images, grid, ref_type, shared
from jaxdnn._src.conv.hopper.depthwise.plan import WalkPlan, bias_floats
from jaxdnn._src.conv.hopper.depthwise.planar import Planar
from jaxdnn._src.conv.hopper.depthwise.walk import Walk, walk
from jaxdnn._src.core.compat import ir, llvm, pl, plgpu
from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.cluster import address
from jaxdnn._src.hopper.launch import kernel, turns, when
from jaxdnn._src.hopper.sizes import ceil_div


def run_walk(
    x: Array, w: Array, bias: Array | None, call: Planar, plan: WalkPlan, kernel_name: str, sms: int | None
) -> Array:
    """Runs forward or backward data on all tiles; x is the input, in backward data dy. The plan has a bias or none.

    The block's threads load a tile and its filter by TMA, wait on the slot's mbarrier `arrived`, compute the outputs
    into shared memory, and store them by TMA. With several stages the next tiles are loaded meanwhile.
    """
    tall, wide = plan.in_tile
    backward = kernel_name == "depthwise_dgrad"
    image = as_images(x, call.out if backward else call.sizes)
    target = call.sizes if backward else call.out
    filters = w.reshape(call.taps[0], call.taps[1] * call.group, call.channels)
    code = walk(plan.walk) if isinstance(plan.walk, Walk) else lanes.lane_walk(plan.walk)
    width, chunks = plan.channels, ceil_div(call.channels, plan.channels)
    slab = call.taps[0], plan.walk.filter_columns * call.group, width
    biases, biased, floats = [], int(bias is not None), bias_floats(width)
    if bias is not None:
        whole = pad(bias.astype(jnp.float32), ((0, chunks * width - call.channels),)).reshape(chunks, width)
        biases = [pad(whole, ((0, 0), (0, floats - width)))]

    tiles = chunks * math.prod(plan.tiles) * call.images
    stages = plan.stages
    (blocks,) = grid(tiles, sms if stages == 1 else min(sms or plan.blocks, plan.blocks))
    branches.record(
        "depthwise walk",
        operands=call.dtype,
        pass_="dgrad" if backward else "fprop",
        group=call.group,
        channels=width,
        stages=stages,
        phases="one" if len(plan.walk.phases) == 1 else "several",
        stride=max(call.stride) > 1,
        tail_of_channels=bool(call.channels % width),
        bias=bool(biased),
        tail_of_positions=any(size % part for size, part in zip(target, plan.out_tile, strict=True)),
        tiles_in_turn=blocks < tiles,
    )

    def body(x_hbm: Any, w_hbm: Any, *refs: Any) -> None:
        *bias_hbm, y_hbm, x_tiles, w_tiles, y_tile = refs[: 4 + biased]
        *bias_tiles, arrived = refs[4 + biased :]
        block = lax.axis_index("tile")
        count = 1 if blocks == tiles else turns(lax.div(tiles - block + blocks - 1, blocks))
        origin = lax.min(block, 0)  # a traced zero: JAX 0.12 rejects a box that it sees reach over an edge

        def place(at: Any) -> tuple[Any, Any, Any, Any]:
            c, at = lax.rem(at, chunks) * width, lax.div(at, chunks)
            j, at = lax.rem(at, plan.tiles[1]), lax.div(at, plan.tiles[1])
            return lax.div(at, plan.tiles[0]), lax.rem(at, plan.tiles[0]), j, pl.ds(c, width)

        def fetch(turn: Any) -> None:
            slot = lax.rem(turn, stages)
            n, i, j, channels = place(block + turn * blocks)
            rows = pl.ds(i * plan.advance[0] + plan.first[0], tall)
            columns = pl.ds(j * plan.advance[1] + plan.first[1], wide)
            plgpu.copy_gmem_to_smem(x_hbm.at[n, rows, columns, channels], x_tiles.at[slot], arrived.at[slot])
            filters = w_hbm.at[:, pl.ds(origin, slab[1]), channels]
            plgpu.copy_gmem_to_smem(filters, w_tiles.at[slot], arrived.at[slot])
            for of_chunks, of_slots in zip(bias_hbm, bias_tiles, strict=True):
                of_chunk = of_chunks.at[lax.rem(block + turn * blocks, chunks)]
                plgpu.copy_gmem_to_smem(of_chunk, of_slots.at[slot], arrived.at[slot])

        def step(turn: Any) -> None:
            slot = lax.rem(turn, stages)
            if stages > 1:  # all threads have read the previous tile: its slot is free

                @when(turn + stages - 1 < count)
                def _() -> None:
                    fetch(turn + stages - 1)

            plgpu.barrier_wait(arrived.at[slot])
            if blocks != tiles:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _inline_walk(
                code, plan.swizzle, x_tiles.at[slot], w_tiles.at[slot], y_tile, *(b.at[slot] for b in bias_tiles)
            )
            plgpu.commit_smem()
            n, i, j, channels = place(block + turn * blocks)
            rows = pl.ds(i * plan.out_tile[0], plan.out_tile[0])
            columns = pl.ds(j * plan.out_tile[1], plan.out_tile[1])
            plgpu.copy_smem_to_gmem(y_tile, y_hbm.at[n, rows, columns, channels])
            if stages == 1 and blocks != tiles:

                @when(turn + 1 < count)
                def _() -> None:
                    fetch(turn + 1)

        fetch(0)
        for turn in range(1, stages - 1):
            when(turn < count)(ft.partial(fetch, turn))
        if blocks == tiles:
            step(0)
        else:
            pl.loop(0, count)(step)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    compiled = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((call.images, *target, call.channels), x.dtype),
        grid=(blocks,),
        grid_names=("tile",),
        scratch_types=[
            shared((stages, tall, wide, width), x.dtype, plan.swizzle),
            shared((stages, *slab), x.dtype, 0),
            shared((*plan.out_tile, width), x.dtype, plan.swizzle),
            *[shared((stages, floats), jnp.float32, 0)] * biased,
            plgpu.Barrier(num_arrivals=2 + biased, num_barriers=stages),
        ],
        kernel_name=kernel_name,
    )
    return compiled(image, filters, *biases)


def _inline_walk(code: str, swizzle: int, *tiles: Any) -> None:
    """Runs the PTX on the tiles of the input, the filter and the output, and the biases if any."""
    swizzles = (swizzle, 0, swizzle, 0)[: len(tiles)]

    @plgpu.inline_mgpu(arg_types=tuple(map(ref_type, swizzles)))
    def run(_: Any, *tiles: Any) -> None:
        addresses = [address(tile) for tile in tiles]
        constraints = ",".join([*["r"] * len(tiles), "~{memory}"])
        llvm.inline_asm(ir.Type.parse("!llvm.void"), addresses, code, constraints, has_side_effects=True)

    run(*tiles)
