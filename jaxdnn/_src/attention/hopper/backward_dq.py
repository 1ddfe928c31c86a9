"""The backward pass of attention on Hopper: the blocks of queries, which compute dQ as a product of dS and K.

A block has the queries of one or two tiles for each of two consumer warpgroups. A producer warpgroup waits until the
blocks of keys (`backward`) have stored the head's dS, as (keys, queries). It loads tiles of it with tiles of K into a
ring of slots; the consumers multiply them.

Schedule. dQ of a query is a chain of products in the order of: tiles of keys that all queries of the block see,
ascending, then the others that any of them sees, ascending; in a tile the keys, ascending, 16 at a time. Tiles that no
query of a tile sees are left out. The sum is multiplied by the scale and rounded once.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.attention.hopper.backward import Arrays, columns_of, extent_of, where
from jaxdnn._src.attention.hopper.backward_nonfinite import repair
from jaxdnn._src.attention.hopper.backward_plan import (
    CONSUMERS,
    TILE,
    Problem,
    Turns,
    key_range,
    nth_partial,
    registers,
    stages_dq,
    tile_sees,
)
from jaxdnn._src.attention.hopper.backward_products import accumulate, waited
from jaxdnn._src.core.compat import pl, plgpu
from jaxdnn._src.hopper import counters
from jaxdnn._src.hopper.launch import changed, drain, turns, when
from jaxdnn._src.hopper.wgmma import start_accumulator, store, swizzle_transform, tiling_transform


def scratch(p: Problem) -> dict[str, Any]:
    """The buffers and barriers of a block."""
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


class Block:
    """One block of threads: the producer's methods, then the consumers'."""

    def __init__(self, p: Problem, turns: Turns, arrays: Arrays, place: Any, scratch: dict[str, Any]) -> None:
        """place: gives the head of all sequences, and the number of the block of the head."""
        self.p, self.turns, self.s = p, turns, scratch
        head, block = place()
        self.k, self.dq, self.ds, self.counters = arrays.k, arrays.dq, arrays.ds, arrays.counters
        self.wg = lax.axis_index("wg")
        size = p.queries_of_block
        self.first_query = (turns.queries - 1 - block) * size  # the last of causal attention take the longest
        self.of_all = lax.div(head, np.int32(p.group))  # the head of keys
        self.place = lax.rem(head, np.int32(turns.held * p.group))
        self.batch, self.head = lax.div(head, np.int32(p.heads)), lax.rem(head, np.int32(p.heads))
        self.shared = lax.div(self.head, np.int32(p.group))
        self.extent = extent_of(p, arrays.extents, self.batch)
        self.range = key_range(p, self.extent, self.first_query)
        self.tiles, self.slots = size // TILE, stages_dq(p)
        self.out_box, self.out_matrix = scratch["out"]

    def run(self) -> None:
        when(self.wg == CONSUMERS)(self.produce)
        when(self.wg < CONSUMERS)(self.consume)

    def over_tiles(self, step: Any, carry: Any) -> Any:
        """step(tile, carry, partial) over the tiles of keys, in the order of addition."""
        low, high, full_low, full_high = self.range
        full = turns(full_high - full_low)
        carry = lax.fori_loop(np.int32(0), full, lambda i, carry: step(full_low + i, carry, False), carry)
        others = turns((high - low) - (full_high - full_low))
        nth = lambda n: nth_partial(n, low, full_low, full_high)
        return lax.fori_loop(np.int32(0), others, lambda n, carry: step(nth(n), carry, True), carry)

    def wait_for_stores(self) -> None:
        """Waits until the blocks of keys have stored all of the head's dS."""
        counters.reached(self.counters, np.int32(1) + self.of_all, self.p.storing * self.turns.keys)

    # ---- the producer

    def produce(self) -> None:
        plgpu.set_max_registers(registers(0)[0], action="decrease")
        self.wait_for_stores()
        counters.copies_follow()
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
            plgpu.copy_gmem_to_smem(self.ds.at[self.place, queries, tile], self.s["ds"].at[slot, i, 0], full)
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
        if self.turns.reuses:
            when(self.wg == 0)(lambda: self.free_place(count))
        sums = [waited(acc, 0) for acc in sums]
        when(count > 0)(lambda: plgpu.barrier_arrive(self.s["empty"].at[lax.rem(count - 1, np.int32(self.slots))]))
        for i, acc in enumerate(sums):
            if i:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.write(acc, self.wg * own + i)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def free_place(self, count: Any) -> None:
        """Tells the head that is next at this place in the workspace that the block reads no more of it.

        All loads are over: this warpgroup has waited for each. So are the stores of dS that the loads had to follow. Of
        a block that loads nothing they need not be, and the next head's stores must not be overtaken by them.
        """
        when(count == 0)(self.wait_for_stores)
        counters.count(self.counters, np.int32(1 + self.turns.heads) + self.of_all)

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
