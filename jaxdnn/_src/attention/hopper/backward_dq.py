"""The backward pass of attention on Hopper: dQ as a product of dS and K.

A block has the queries of one or two tiles for each of two consumer warpgroups. A producer warpgroup loads tiles of dS,
which `backward` has stored as (keys, queries), with tiles of K into a ring of slots; the consumers multiply them.

Schedule. dQ of a query is a chain of products in the order of: tiles of keys that all queries of the block see,
ascending, then the others that any of them sees, ascending; in a tile the keys, ascending, 16 at a time. Tiles that no
query of a tile sees are left out. The sum is multiplied by the scale and rounded once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.attention.hopper.backward import columns_of, extent_of, where
from jaxdnn._src.attention.hopper.backward_nonfinite import repair
from jaxdnn._src.attention.hopper.backward_plan import (
    CONSUMERS,
    TILE,
    TOGETHER,
    Problem,
    heads_together,
    key_range,
    nth_partial,
    place,
    registers,
    stages_dq,
    tile_sees,
)
from jaxdnn._src.attention.hopper.backward_products import accumulate, waited
from jaxdnn._src.core.compat import pl, plgpu
from jaxdnn._src.hopper.launch import changed, drain, kernel, turns, when
from jaxdnn._src.hopper.sizes import ceil_div
from jaxdnn._src.hopper.wgmma import start_accumulator, store, swizzle_transform, tiling_transform


def run(numbers: Array, ds: Array, k: Array, q_shape: Any, problem: Problem, *, heads: int, out: Any = None) -> Any:
    """dQ of the heads of queries that share these heads of keys, from their dS; others are not written.

    `out`: a reference to the array that dQ is written to, instead of a new one.
    """
    p = problem

    def body(*refs: Any, **scratch: Any) -> None:
        block = _Block(p, heads, refs, scratch)
        when(block.wg == CONSUMERS)(block.produce)
        when(block.wg < CONSUMERS)(block.consume)

    compiled = kernel(
        body,
        out_type=() if out is not None else (jax.ShapeDtypeStruct(q_shape, p.dtype),),
        grid=(heads * p.group * ceil_div(p.queries, p.queries_of_block),),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=_scratch(p),
        kernel_name="jaxdnn_attention_dq",
    )
    if out is None:
        return compiled(numbers, ds, k)[0]
    compiled(numbers, ds, k, out)
    return out


def _scratch(p: Problem) -> dict[str, Any]:
    slots, keys, tiles = stages_dq(p), p.chunks(p.features), p.queries_of_block // TILE
    swizzle = swizzle_transform(p.swizzle)
    out = (CONSUMERS, keys, TILE, p.chunk)
    return dict(
        ds=plgpu.SMEM((slots, tiles, 1, TILE, TILE), p.dtype, transforms=(swizzle_transform(128),)),
        k=plgpu.SMEM((slots, keys, TILE, p.chunk), p.dtype, transforms=(swizzle,)),
        out=plgpu.RefUnion(
            plgpu.SMEM(out, p.dtype, transforms=(swizzle,)),
            plgpu.SMEM(out, p.dtype, transforms=(tiling_transform((8, p.chunk)), swizzle)),
        ),
        full=plgpu.Barrier(num_arrivals=tiles + keys, num_barriers=slots),
        empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=slots),
    )


class _Block:
    """One block of threads: the producer's methods, then the consumers'."""

    def __init__(self, p: Problem, heads: int, refs: Any, scratch: dict[str, Any]) -> None:
        self.p, self.s = p, scratch
        numbers, self.ds, self.k, self.dq = refs
        self.wg = lax.axis_index("wg")
        size, heads = p.queries_of_block, heads * p.group
        blocks = ceil_div(p.queries, size)
        together = heads_together(p.keys, p.features + p.queries, TOGETHER, heads)
        self.local, block = place(lax.axis_index("block"), heads, blocks, together)
        self.first_query = (blocks - 1 - block) * size  # the last of causal attention take the longest
        head = numbers[0] * p.group + self.local
        self.batch, self.head = lax.div(head, np.int32(p.heads)), lax.rem(head, np.int32(p.heads))
        self.shared = lax.div(self.head, np.int32(p.group))
        self.extent = extent_of(p, numbers, self.batch)
        self.range = key_range(p, self.extent, self.first_query)
        self.tiles, self.slots = size // TILE, stages_dq(p)
        self.out_box, self.out_matrix = scratch["out"]

    def over_tiles(self, step: Any, carry: Any) -> Any:
        """step(tile, carry, partial) over the tiles of keys, in the order of addition."""
        low, high, full_low, full_high = self.range
        full = turns(full_high - full_low)
        carry = lax.fori_loop(np.int32(0), full, lambda i, carry: step(full_low + i, carry, False), carry)
        others = turns((high - low) - (full_high - full_low))
        nth = lambda n: nth_partial(n, low, full_low, full_high)
        return lax.fori_loop(np.int32(0), others, lambda n, carry: step(nth(n), carry, True), carry)

    # ---- the producer

    def produce(self) -> None:
        plgpu.set_max_registers(registers(0)[0], action="decrease")
        count = self.over_tiles(self.load, jnp.int32(0))
        drain(self.s["empty"], count, self.slots)

    def load(self, tile: Any, count: Any, partial: bool) -> Any:
        """Tiles of dS that no query sees were not written: what is loaded of them is not read."""
        del partial
        p, slot = self.p, lax.rem(count, np.int32(self.slots))
        full = self.s["full"].at[slot]
        when(count >= self.slots)(lambda: plgpu.barrier_wait(self.s["empty"].at[slot]))
        for i in range(self.tiles):
            queries = lax.min(lax.div(self.first_query, np.int32(TILE)) + i, np.int32(p.query_tiles - 1))
            plgpu.copy_gmem_to_smem(self.ds.at[self.local, queries, tile], self.s["ds"].at[slot, i, 0], full)
        for c in range(p.chunks(p.features)):
            rows, columns = pl.ds(tile * TILE, TILE), columns_of(p, c, p.features)
            source = self.k.at[where(p, self.batch, self.shared, rows, columns)]
            plgpu.copy_gmem_to_smem(source, self.s["k"].at[slot, c], full)
        return count + 1

    # ---- the consumers

    def consume(self) -> None:
        plgpu.set_max_registers(registers(0)[1], action="increase")
        p, own = self.p, self.tiles // CONSUMERS
        width = p.chunks(p.features) * p.chunk
        carry = jnp.int32(0), *(start_accumulator(TILE, width, jnp.float32) for _ in range(own))
        count, *sums = self.over_tiles(self.step, carry)
        sums = [waited(acc, 0) for acc in sums]
        when(count > 0)(lambda: plgpu.barrier_arrive(self.s["empty"].at[lax.rem(count - 1, np.int32(self.slots))]))
        for i, acc in enumerate(sums):
            if i:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.write(acc, self.wg * own + i)
        plgpu.wait_smem_to_gmem(0)

    def step(self, tile: Any, carry: Any, partial: bool) -> Any:
        """The products of a tile of keys; also releases the slot of the last one, once its products are complete."""
        p, (count, *sums), s = self.p, carry, self.s
        slot, own = lax.rem(count, np.int32(self.slots)), self.tiles // CONSUMERS
        k = s["k"].at[slot]
        plgpu.barrier_wait(s["full"].at[slot])
        if partial:
            repair(k)
        issued = 0
        for i in range(own):
            number = self.wg * own + i
            product = lambda acc, number=number: accumulate(acc, s["ds"].at[slot, number], k, swizzle=p.swizzle)
            if not partial:
                sums[i], issued = product(sums[i]), issued + 1
                continue
            sees = tile_sees(p, self.extent, self.first_query + number * TILE, tile)
            sums[i] = changed(sees, product, sums[i])
        plgpu.wgmma_wait(issued)
        when(count > 0)(lambda: plgpu.barrier_arrive(s["empty"].at[lax.rem(count - 1, np.int32(self.slots))]))
        return count + 1, *sums

    def write(self, acc: Array, tile: Any) -> None:
        """A tile of the result."""
        p = self.p
        value = plgpu.layout_cast(acc, plgpu.Layout.WGMMA) * np.float32(p.scale)
        for c in range(p.chunks(p.features)):
            store(value[:, c * p.chunk : (c + 1) * p.chunk].astype(p.dtype), self.out_matrix.at[self.wg, c])
        plgpu.commit_smem()
        rows = pl.ds(self.first_query + tile * TILE, TILE)
        for c in range(p.chunks(p.features)):
            target = self.dq.at[where(p, self.batch, self.head, rows, columns_of(p, c, p.features))]
            plgpu.copy_smem_to_gmem(self.out_box.at[self.wg, c], target)
