"""Depthwise and narrow-group convolution on Hopper: forward, backward data, backward filter (Pallas, Mosaic GPU).

Schedule. A block of threads takes one tile: up to 14 x 28 outputs of 32 channels (or 64). The tensor memory accelerator
fetches the input tile with its halo (outside the image it writes zeros, so padding costs nothing) and the tile's
filter slab; four warps, eight channels each, walk the tile in shared memory (`conv_depthwise_walk` on the tensor core
for bfloat16 and float16, `conv_depthwise_fma` in float32) and leave the outputs in shared memory, from where one copy
stores them, clipped to the image. Several blocks share a multiprocessor: while one waits for its tile, another
computes; and a block that takes several tiles in turn fetches the next one while it computes. Backward data is the
same walk over dy with the taps turned round; a stride makes one phase per residue of the output position, all from one
input tile. Backward filter keeps its sums in registers over the tiles of a split (`conv_depthwise_filter`) and leaves
each split's partial sum in memory; a launch of its own adds the partial sums in order (`conv_depthwise_add`); no
atomics.

Limits. As many output channels as input channels; 1, 2, 4 or 8 channels per group (float32: 1); one or two spatial
axes; rows of 16 bytes (channels divisible by 8, in float32 by 4). `supports` says so, or returns None.

Bits. `schedule` gives the order of additions. An output depends on its own inputs, and its order of additions on
nothing but the filter, the stride and (on the tensor core, two spatial axes) whether its row is even or odd: forward
and backward data are the same for every batch size, position in the batch, channel count and tile. The filter
gradient's tiles and splits follow the shape. An input that is not finite may turn sums of the filter gradient of its
own channel group into NaN that are finite by the formula (a zero that pads a tile is multiplied with it); forward and
backward data keep what is not finite to the outputs that own it.
"""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from jaxdnn import engines
from jaxdnn._kernels.hopper import conv_depthwise_filter as tensor_filter
from jaxdnn._kernels.hopper import conv_depthwise_fma as lanes
from jaxdnn._kernels.hopper.conv_depthwise_add import THREADS, Terms, add_terms
from jaxdnn._kernels.hopper.conv_depthwise_plan import (
    DTYPES,
    Config,
    FilterPlan,
    WalkPlan,
    Window,
    ceil_div,
    orders,
    plan_filter,
    plan_walk,
    unsupported,
    window,
)
from jaxdnn._kernels.hopper.conv_depthwise_walk import Walk, walk
from jaxdnn._kernels.hopper.launch import launch

PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def supports(
    op: str,
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    dtype: Any,
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
) -> str | None:
    """None where the kernels serve the call, else the reason; `op` is "fprop", "dgrad" or "wgrad"."""
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11):
        return f"the Hopper kernels need JAX 0.11 or newer, this is {jax.__version__}"
    return unsupported(op, x_shape, w_shape, dtype, stride=stride, padding=padding, dilation=dilation, config=config)


def schedule(
    op: str,
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    dtype: Any,
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
    flip: bool = False,
) -> engines.Schedule:
    """The order of additions of every output; with `flip` of a convolution whose filter is turned round beforehand."""
    call = window(x_shape, w_shape, dtype, stride=stride, padding=padding, dilation=dilation)
    arithmetic, found, classes = orders(op, call, config)
    if flip and op != "wgrad":  # tap t of the turned filter is tap T - 1 - t of the filter
        tap, channel = np.divmod(np.arange(math.prod(call.taps) * call.group), call.group)
        stored = np.append((math.prod(call.taps) - 1 - tap) * call.group + channel, -1)
        found = tuple(stored[order] for order in found)
    if classes.size == 1:
        return engines.Schedule(arithmetic, found[0])
    return engines.Schedule(arithmetic, found, classes=classes if len(x_shape) == 4 else classes[0])


def workspace(
    op: str,
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    dtype: Any,
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
) -> int:
    """Bytes of device memory beside operands and result: the filter gradient's partial sums."""
    if op != "wgrad":
        return 0
    call = window(x_shape, w_shape, dtype, stride=stride, padding=padding, dilation=dilation)
    return 4 * math.prod(plan_filter(call, config).partial_shape(call))


def depthwise_fprop(
    x: Array,
    w: Array,
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
    sms: int | None = None,
) -> Array:
    """y of x (n, [h,] w, c) and w ([r,] s, c/groups, c), on at most `sms` multiprocessors."""
    call = window(x.shape, w.shape, x.dtype, stride=stride, padding=padding, dilation=dilation)
    y = _launch(x, w, call, plan_walk("fprop", call, config), "depthwise_fprop", sms)
    return y.reshape(x.shape[0], *_spatial(call.out, x.ndim), x.shape[-1])


def depthwise_dgrad(
    dy: Array,
    w: Array,
    x_shape: Sequence[int],
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
    sms: int | None = None,
) -> Array:
    """dx of dy (n, [p,] q, c) and w ([r,] s, c/groups, c), on at most `sms` multiprocessors."""
    call = window(x_shape, w.shape, dy.dtype, stride=stride, padding=padding, dilation=dilation)
    dx = _launch(dy, w, call, plan_walk("dgrad", call, config), "depthwise_dgrad", sms)
    return dx.reshape(tuple(x_shape))


def depthwise_wgrad(
    x: Array,
    dy: Array,
    w_shape: Sequence[int],
    /,
    *,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    config: Config | None = None,
    sms: int | None = None,
) -> Array:
    """dw ([r,] s, c/groups, c) of x (n, [h,] w, c) and dy (n, [p,] q, c), in x's dtype.

    It takes at most `sms` multiprocessors. How many these are decides neither splits nor tiles, hence no bit.
    """
    call = window(x.shape, w_shape, x.dtype, stride=stride, padding=padding, dilation=dilation)
    plan = plan_filter(call, config)
    partial = _filter_partials(x, dy, call, plan, sms)
    return _add_partials(partial, call.taps[0], call.taps[1] * call.group, x.dtype, sms).reshape(tuple(w_shape))


def _spatial(size: tuple[int, int], rank: int) -> tuple[int, ...]:
    return size if rank == 4 else size[1:]


def _image(x: Array, size: tuple[int, int]) -> Array:
    return x.reshape(-1, *size, x.shape[-1])


def _transforms(swizzle: int) -> tuple[Any, ...]:
    make: Any = plgpu.SwizzleTransform
    return (make(swizzle),) if swizzle else ()


def _shared(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=_transforms(swizzle))


def _ref_type(swizzle: int) -> Any:
    return plgpu.RefType(_transforms(swizzle))


def _address(ref: Any) -> ir.Value:
    """The 32-bit shared address of a reference."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu_utils.memref_ptr(ref))


def _grid(items: int, sms: int | None) -> tuple[int]:
    """A block for every item, or under a limit no more blocks than multiprocessors, each with items in turn.

    Without a limit several blocks share a multiprocessor, which hides a tile's way better than a block's turns do.
    """
    return (items if sms is None else min(items, sms),)


def _each(items: int, sms: int | None, name: str, do: Callable[[Any], None]) -> None:
    """A block's items in turn. An item ends by waiting for its store, so that the next one may write shared memory."""
    (blocks,), block = _grid(items, sms), lax.axis_index(name)
    if blocks == items:
        do(block)
    else:
        turns = lax.div(items - block + blocks - 1, blocks)
        pl.loop(0, turns)(lambda turn: do(block + turn * blocks))


def _launch(x: Array, w: Array, call: Window, plan: WalkPlan, kernel_name: str, sms: int | None) -> Array:
    """Runs a forward or backward-data walk over all tiles; x is the input of the walk."""
    tall, wide = plan.in_tile
    backward = kernel_name == "depthwise_dgrad"
    image = _image(x, call.out if backward else call.size)
    target = call.size if backward else call.out
    filters = w.reshape(call.taps[0], call.taps[1] * call.group, call.channels)
    code = walk(plan.walk) if isinstance(plan.walk, Walk) else lanes.lane_walk(plan.walk)
    width, chunks = plan.channels, ceil_div(call.channels, plan.channels)
    slab = call.taps[0], plan.walk.filter_columns * call.group, width

    tiles = chunks * math.prod(plan.tiles) * call.images
    stages = plan.stages
    (blocks,) = _grid(tiles, sms if stages == 1 else min(sms or plan.blocks, plan.blocks))

    def body(x_hbm: Any, w_hbm: Any, y_hbm: Any, x_tiles: Any, w_tiles: Any, y_tile: Any, arrived: Any) -> None:
        block = lax.axis_index("tile")
        turns = 1 if blocks == tiles else lax.div(tiles - block + blocks - 1, blocks)
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

        def step(turn: Any) -> None:
            slot = lax.rem(turn, stages)
            if stages > 1:  # the tile before the last one has been read: its slot is free

                @pl.when(turn + stages - 1 < turns)
                def _() -> None:
                    fetch(turn + stages - 1)

            plgpu.barrier_wait(arrived.at[slot])
            if blocks != tiles:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _run_walk(code, plan.swizzle, x_tiles.at[slot], w_tiles.at[slot], y_tile)
            plgpu.commit_smem()
            n, i, j, channels = place(block + turn * blocks)
            rows = pl.ds(i * plan.out_tile[0], plan.out_tile[0])
            columns = pl.ds(j * plan.out_tile[1], plan.out_tile[1])
            plgpu.copy_smem_to_gmem(y_tile, y_hbm.at[n, rows, columns, channels])
            if stages == 1 and blocks != tiles:

                @pl.when(turn + 1 < turns)
                def _() -> None:
                    fetch(turn + 1)

        fetch(0)
        for turn in range(1, stages - 1):
            pl.when(turn < turns)(ft.partial(fetch, turn))
        if blocks == tiles:
            step(0)
        else:
            pl.loop(0, turns)(step)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((call.images, *target, call.channels), x.dtype),
        grid=(blocks,),
        grid_names=("tile",),
        scratch_types=[
            _shared((stages, tall, wide, width), x.dtype, plan.swizzle),
            _shared((stages, *slab), x.dtype, 0),
            _shared((*plan.out_tile, width), x.dtype, plan.swizzle),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
        kernel_name=kernel_name,
        compiler_params=PARAMETERS,
    )
    return kernel(image, filters)


def _run_walk(code: str, swizzle: int, x_tile: Any, w_tile: Any, y_tile: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(_ref_type(swizzle), _ref_type(0), _ref_type(swizzle)))
    def run(_: Any, *tiles: Any) -> None:
        addresses = [_address(tile) for tile in tiles]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), addresses, code, "r,r,r,~{memory}", has_side_effects=True)

    run(x_tile, w_tile, y_tile)


def _filter_partials(x: Array, dy: Array, call: Window, plan: FilterPlan, sms: int | None) -> Array:
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
        _each(items, sms, "block", lambda at: compute(at, *refs))

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
        count = jnp.minimum(plan.per_split, total - start)

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

        @pl.when(group == 0)
        def _() -> None:
            @pl.loop(0, jnp.minimum(stages, count))
            def _(index: Any) -> None:
                fetch(index)

        def step(index: Any, carry: Any) -> Any:
            slot = lax.rem(index, stages)
            plgpu.barrier_wait(full.at[slot])
            carry = _run_filter(code, plan, carry, x_tile.at[slot], dy_tile.at[slot], layout)
            plgpu.barrier_arrive(empty.at[slot])

            @pl.when(group == 0)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

                @pl.when(index + stages < count)
                def _() -> None:
                    fetch(index + stages)

            return carry

        zeros = plgpu.layout_cast(jnp.zeros((128 * registers,), jnp.float32), layout)
        carry = lax.fori_loop(0, count, step, zeros)
        _run_filter_store(store, carry, sums, layout)
        plgpu.commit_smem()
        plgpu.barrier_arrive(done)

        @pl.when(group == 0)
        def _() -> None:
            plgpu.barrier_wait(done)
            taps = pl.ds(row_tap, r), pl.ds(column_tap * call.group, s * call.group)
            plgpu.copy_smem_to_gmem(sums, out.at[split, pl.ds(0, plan.parts), *taps, pl.ds(c, plan.channels)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(plan.partial_shape(call), jnp.float32),
        grid=_grid(items, sms),
        grid_names=("block",),
        num_threads=groups,
        thread_name="warpgroup",
        scratch_types=[
            _shared((stages, *plan.in_tile, plan.channels), x.dtype, plan.swizzle),
            _shared((stages, *plan.out_tile, plan.channels), x.dtype, plan.swizzle),
            _shared((plan.parts, r, s * call.group, plan.channels), jnp.float32, 0),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=groups),
        ],
        kernel_name="depthwise_wgrad",
        compiler_params=PARAMETERS,
    )
    return kernel(_image(x, call.size), _image(dy, call.out))


def _scalars(array: Any) -> list[ir.Value]:
    return [vector.extract(v, dynamic_position=[], static_position=[0]) for v in array.registers]


def _run_filter(code: str, plan: FilterPlan, carry: Any, x_tile: Any, dy_tile: Any, layout: Any) -> Any:
    n = plan.walk.accumulators
    refs = (_ref_type(plan.swizzle),) * 2
    result = plgpu.ShapeDtypeStruct((128 * n,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, *refs), return_type=result)
    def run(_: Any, sums: Any, *tiles: Any) -> Any:
        f32 = ir.F32Type.get()
        operands = [*_scalars(sums), *(_address(tile) for tile in tiles)]
        constraints = ",".join([*["=f"] * n, *map(str, range(n)), "r", "r", "~{memory}"])
        struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * n)})>")
        packed: Any = llvm.inline_asm(struct, operands, code, constraints, has_side_effects=True)
        one = ir.VectorType.get((1,), f32)
        registers = np.array([vector.broadcast(one, llvm.extractvalue(f32, packed, [i])) for i in range(n)], object)
        return mgpu.FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)

    return run(carry, x_tile, dy_tile)


def _run_filter_store(code: str, carry: Any, sums: Any, layout: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(layout, _ref_type(0)))
    def run(_: Any, *arrays: Any) -> None:
        values, tile = arrays
        operands = [*_scalars(values), _address(tile)]
        constraints = ",".join([*["f"] * len(values.registers), "r", "~{memory}"])
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, constraints, has_side_effects=True)

    run(carry, sums)


def _add_partials(partial: Array, rows: int, columns: int, dtype: Any, sms: int | None) -> Array:
    """Adds partial sums (splits, parts, r, s * group, c) one after the other, and rounds: (rows, columns * c)."""
    splits, parts, _, wide, channels = partial.shape
    width, name = columns * channels, DTYPES[np.dtype(dtype).name]
    terms = Terms(splits * parts, math.prod(partial.shape[2:]), wide * channels, rows, width, name)
    (blocks,) = _grid(ceil_div(rows * width, THREADS), sms)
    result = jax.ShapeDtypeStruct((rows, width), dtype)
    code = add_terms(terms, blocks)
    return launch(code, [partial], [result], name="depthwise_add_partials", blocks=blocks, threads=THREADS)[0]
