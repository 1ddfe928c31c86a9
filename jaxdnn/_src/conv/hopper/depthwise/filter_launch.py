"""Depthwise and narrow-group filter gradients on Hopper: the launch for partial sums."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.conv.hopper.depthwise import filter as tensor_filter
from jaxdnn._src.conv.hopper.depthwise import fma as lanes
from jaxdnn._src.conv.hopper.depthwise.filter_plan import FilterPlan
from jaxdnn._src.conv.hopper.depthwise.launch import as_images, each, grid, loads_done, ref_type, shared
from jaxdnn._src.conv.hopper.depthwise.planar import Planar
from jaxdnn._src.core.compat import ir, llvm, mgpu, pl, plgpu, vector
from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.cluster import address, scalars
from jaxdnn._src.hopper.launch import kernel, turns, when
from jaxdnn._src.hopper.sizes import ceil_div


def filter_partials(x: Array, dy: Array, call: Planar, plan: FilterPlan, sms: int | None) -> Array:
    """Partial sums (splits, parts, r, s * group, c) in float32."""
    chunks, stages = ceil_div(call.channels, plan.channels), plan.stages
    groups, (r, s) = plan.warpgroups, plan.tap_block
    total = call.images * math.prod(plan.tiles)
    registers = plan.walk.accumulators
    layout = plgpu.Layout.WG_STRIDED((128 * registers,), 1)
    if isinstance(plan.walk, tensor_filter.FilterWalk):
        code, store = tensor_filter.filter_walk(plan.walk), tensor_filter.filter_store(plan.walk)
    else:
        code, store = lanes.lane_filter(plan.walk), lanes.lane_store(plan.walk)

    items = chunks * math.prod(plan.tap_blocks) * plan.splits

    def body(*refs: Any) -> None:
        each(items, sms, "block", lambda at: compute(at, *refs))

    def compute(
        at: Any, x_hbm: Any, dy_hbm: Any, out: Any, x_tile: Any, dy_tile: Any, sums: Any, full: Any, empty: Any,
        done: Any,
    ) -> None:  # fmt: skip
        group = lax.axis_index("warpgroup")
        c, at = lax.rem(at, chunks) * plan.channels, lax.div(at, chunks)
        blocks = math.prod(plan.tap_blocks)
        tap_block, split = lax.rem(at, blocks), lax.div(at, blocks)
        row_tap = lax.div(tap_block, plan.tap_blocks[1]) * r
        column_tap = lax.rem(tap_block, plan.tap_blocks[1]) * s
        start = split * plan.per_split
        count = turns(jnp.minimum(plan.per_split, total - start))

        def fetch(index: Any) -> None:
            t, slot = start + index, lax.rem(index, stages)
            j, t = lax.rem(t, plan.tiles[1]), lax.div(t, plan.tiles[1])
            i, n = lax.rem(t, plan.tiles[0]), lax.div(t, plan.tiles[0])
            row, column = i * plan.out_tile[0], j * plan.out_tile[1]
            channels = pl.ds(c, plan.channels)
            tall = pl.ds(row * call.stride[0] + row_tap * call.dilation[0] - call.low[0], plan.in_tile[0])
            wide = pl.ds(column * call.stride[1] + column_tap * call.dilation[1] - call.low[1], plan.in_tile[1])
            plgpu.copy_gmem_to_smem(x_hbm.at[n, tall, wide, channels], x_tile.at[slot], full.at[slot])
            tall, wide = pl.ds(row, plan.out_tile[0]), pl.ds(column, plan.out_tile[1])
            plgpu.copy_gmem_to_smem(dy_hbm.at[n, tall, wide, channels], dy_tile.at[slot], full.at[slot])

        @when(group == 0)
        def _() -> None:
            @pl.loop(0, jnp.minimum(stages, count))
            def _(index: Any) -> None:
                fetch(index)

        def step(index: Any, carry: Any) -> Any:
            slot = lax.rem(index, stages)
            plgpu.barrier_wait(full.at[slot])
            carry = _inline_filter(code, plan, carry, x_tile.at[slot], dy_tile.at[slot], layout)
            loads_done()
            plgpu.barrier_arrive(empty.at[slot])

            @when(group == 0)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

                @when(index + stages < count)
                def _() -> None:
                    fetch(index + stages)

            return carry

        zeros = plgpu.layout_cast(jnp.zeros((128 * registers,), jnp.float32), layout)
        carry = lax.fori_loop(0, count, step, zeros)
        _inline_filter_store(store, carry, sums, layout)
        plgpu.commit_smem()
        plgpu.barrier_arrive(done)

        @when(group == 0)
        def _() -> None:
            plgpu.barrier_wait(done)
            taps = pl.ds(row_tap, r), pl.ds(column_tap * call.group, s * call.group)
            plgpu.copy_smem_to_gmem(sums, out.at[split, pl.ds(0, plan.parts), *taps, pl.ds(c, plan.channels)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    branches.record(
        "depthwise filter",
        operands=call.dtype,
        group=call.group,
        channels=plan.channels,
        stages=stages,
        warpgroups=groups,
        tap_blocks="one" if plan.tap_blocks == (1, 1) else "several",
        splits="one" if plan.splits == 1 else "several",
        tail_of_channels=bool(call.channels % plan.channels),
        tail_of_positions=any(size % part for size, part in zip(call.out, plan.out_tile, strict=True)),
    )
    compiled = kernel(
        body,
        out_type=jax.ShapeDtypeStruct(plan.partial_shape(call), jnp.float32),
        grid=grid(items, sms),
        grid_names=("block",),
        num_threads=groups,
        thread_name="warpgroup",
        scratch_types=[
            shared((stages, *plan.in_tile, plan.channels), x.dtype, plan.swizzle),
            shared((stages, *plan.out_tile, plan.channels), x.dtype, plan.swizzle),
            shared((plan.parts, r, s * call.group, plan.channels), jnp.float32, 0),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups),
        ],
        kernel_name="depthwise_wgrad",
    )
    return compiled(as_images(x, call.sizes), as_images(dy, call.out))


def _inline_filter(code: str, plan: FilterPlan, carry: Any, x_tile: Any, dy_tile: Any, layout: Any) -> Any:
    n = plan.walk.accumulators
    refs = (ref_type(plan.swizzle),) * 2
    result = plgpu.ShapeDtypeStruct((128 * n,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, *refs), return_type=result)
    def run(_: Any, sums: Any, *tiles: Any) -> Any:
        f32 = ir.F32Type.get()
        operands = [*scalars(sums), *(address(tile) for tile in tiles)]
        constraints = ",".join([*["=f"] * n, *map(str, range(n)), "r", "r", "~{memory}"])
        struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * n)})>")
        packed: Any = llvm.inline_asm(struct, operands, code, constraints, has_side_effects=True)
        one = ir.VectorType.get((1,), f32)
        registers = np.array([vector.broadcast(one, llvm.extractvalue(f32, packed, [i])) for i in range(n)], object)
        return mgpu.FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)

    return run(carry, x_tile, dy_tile)


def _inline_filter_store(code: str, carry: Any, sums: Any, layout: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(layout, ref_type(0)))
    def run(_: Any, *arrays: Any) -> None:
        values, tile = arrays
        operands = [*scalars(values), address(tile)]
        constraints = ",".join([*["f"] * len(values.registers), "r", "~{memory}"])
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, constraints, has_side_effects=True)

    run(carry, sums)
