"""The backward pass of attention on Hopper: the blocks of keys, which compute dK and dV and store dS.

Of a block of 128 keys K and V stay in shared memory. A producer warpgroup loads tiles of 64 queries with their
gradients of y into a ring of slots, and each of two consumer warpgroups computes of 64 keys

    S^T = K Q^T    P^T = exp2(scale log2(e) S^T - L log2(e))    dP^T = V dY^T    dS^T = P^T (dP^T - D)
    dV += P^T dY    dK += dS^T Q

with keys as rows, so that P^T and dS^T, rounded to 16 bits, are operands in registers. dS^T is stored to a workspace,
and the blocks of queries (`backward_dq`), of the same launch (`backward_launch`), multiply it with K.

Schedule. dV and dK of a key are chains of products in the order of: heads of queries that share the key, ascending; of
a head the tiles of queries that see all keys of the block, ascending, then the others that see any, ascending; in a
tile the queries, ascending, 16 at a time. dK is then multiplied by the scale, and both are rounded once. When a block
runs, and how many heads the workspace holds, changes no order.
"""

import copy
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.attention.hopper.backward_nonfinite import accumulate_repaired
from jaxdnn._src.attention.hopper.backward_plan import (
    CONSUMERS,
    STAGED,
    TILE,
    Extent,
    Problem,
    Turns,
    nth_partial,
    query_range,
    registers,
    stages,
    whole,
)
from jaxdnn._src.attention.hopper.backward_products import (
    accumulate_weighted,
    loads_done,
    received,
    scores,
    store_registers,
    store_rounded,
    waited,
)
from jaxdnn._src.attention.hopper.backward_scores import LOG2_E, Visible, probabilities, score_gradients
from jaxdnn._src.core.compat import pl, plgpu
from jaxdnn._src.hopper import counters
from jaxdnn._src.hopper.launch import drain, turns, when
from jaxdnn._src.hopper.wgmma import start_accumulator, store, swizzle_transform, tiling_transform

IN_FLIGHT = 1  # products that are still in flight where a tile's step ends: those for dK, or none


class Arrays(NamedTuple):
    """References to the launch's arrays, which are in the call's layout with one leading axis.

    Attributes:
      rows: (heads of queries of all sequences, 2, tiles of queries times 64), minus L log2(e) and D.
      pairs: the arrays of `Problem.pairs`.
      extents: of each sequence the queries, the keys and the shift; None if it has no lengths.
      ds: (places in the workspace, tiles of queries, tiles of keys, 64 keys, 64 queries), dS times the slope of a cap;
        head g of the group of head h of keys has place (h mod held) group + g.
      counters: the blocks that have begun; then for each head of keys the warpgroups that have stored all their dS of
        it; then for each head of keys the blocks that have read all they need of its dS.
    """

    q: Any
    k: Any
    v: Any
    dy: Any
    rows: Any
    pairs: tuple[Any, ...]
    extents: Any
    dq: Any
    dk: Any
    dv: Any
    ds: Any
    counters: Any


def scratch(p: Problem) -> dict[str, Any]:
    """The buffers and barriers of a block."""
    swizzle, slots = (swizzle_transform(p.swizzle),), stages(p)
    keys, values = p.chunks(p.features), p.chunks(p.values)
    ring = lambda chunks: plgpu.SMEM((slots, chunks, TILE, p.chunk), p.dtype, transforms=swizzle)
    own = dict(ds=tiles(p, (CONSUMERS, STAGED)))
    if p.by_role:
        own = dict(
            ds=tiles(p, (1, 1)),
            p=plgpu.SMEM((TILE * TILE,), jnp.float32),
            p_full=plgpu.Barrier(num_arrivals=1),
            p_empty=plgpu.Barrier(num_arrivals=1),
            done=plgpu.Barrier(num_arrivals=CONSUMERS),
        )
    return own | dict(
        k=resident(p, keys),
        v=resident(p, values),
        q=ring(keys),
        dy=ring(values),
        rows=plgpu.SMEM((slots, 2, TILE), jnp.float32),
        resident=plgpu.Barrier(num_arrivals=p.keys_of_block // TILE * (keys + values)),
        full=plgpu.Barrier(num_arrivals=keys + values + 1, num_barriers=slots),
        empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=slots),
    )


def resident(p: Problem, chunks: int) -> Any:
    """A block's keys or values, as boxes and as tiles that results are stored in."""
    shape, swizzle = (p.keys_of_block // TILE, chunks, TILE, p.chunk), swizzle_transform(p.swizzle)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, p.dtype, transforms=(swizzle,)),
        plgpu.SMEM(shape, p.dtype, transforms=(tiling_transform((8, p.chunk)), swizzle)),
    )


def tiles(p: Problem, lead: tuple[int, ...]) -> Any:
    """Tiles of dS, as boxes and as what threads store."""
    shape, swizzle = (*lead, TILE, TILE), swizzle_transform(128)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, p.dtype, transforms=(swizzle,)),
        plgpu.SMEM(shape, p.dtype, transforms=(tiling_transform((8, TILE)), swizzle)),
    )


def where(p: Problem, batch: Any, head: Any, rows: Any, columns: Any) -> tuple[Any, ...]:
    """The index of some rows and features of a head in an array of the call's layout."""
    return (batch, head, rows, columns) if p.heads_first else (batch, rows, head, columns)


def columns_of(p: Problem, c: int, size: int) -> Any:
    """Chunk c of so many features; beyond them loads give 0, and stores write nothing.

    Pallas refuses a slice over an array's end if it can see it, so there the start is computed in the kernel.
    """
    beyond = (c + 1) * p.chunk > size
    return pl.ds(c * p.chunk + (lax.axis_index("wg") * 0 if beyond else 0), p.chunk)


def extent_of(p: Problem, extents: Any, batch: Any) -> Extent:
    """The extent of a sequence."""
    if not p.lengths:
        return whole(p)
    return Extent(*(extents[batch * 3 + i] for i in range(3)))


class _Block:
    """One block of threads: the producer's methods, then the consumers'."""

    def __init__(self, p: Problem, turns: Turns, arrays: Arrays, place: Any, scratch: dict[str, Any]) -> None:
        """place: the head of all sequences, and the number of the block of the head; computed anew at each call."""
        self.p, self.turns, self.s, self.place = p, turns, scratch, place
        self.q, self.k, self.v, self.dy, self.rows = arrays[:5]
        self.dk, self.dv, self.ds, self.counters = arrays.dk, arrays.dv, arrays.ds, arrays.counters
        self.pairs = tuple(zip(p.pairs, arrays.pairs, strict=True))
        self.wg = lax.axis_index("wg")
        self.tile = np.int32(0) if p.by_role else self.wg  # this warpgroup's tile of the block's keys
        self.locate()
        self.extent = extent_of(p, arrays.extents, self.batch)
        self.range = query_range(p, self.extent, self.first_key)
        self.slots = stages(p)
        self.registers = registers((p.chunks(p.features) + p.chunks(p.values)) * p.chunk)
        (self.k_box, self.k_out), (self.v_box, self.v_out) = scratch["k"], scratch["v"]
        self.ds_box, self.ds_out = scratch["ds"]

    def located_again(self) -> "_Block":
        """The same, where it is computed anew: behind the loop over tiles, which has no registers to keep it."""
        found = copy.copy(self)
        found.locate()
        return found

    def locate(self) -> None:
        """Sets where the block is."""
        p, (head, block) = self.p, self.place()
        self.of_all = head
        self.batch, self.head = lax.div(head, np.int32(p.shared)), lax.rem(head, np.int32(p.shared))
        self.first_key = block * p.keys_of_block
        self.key_tile = block * (p.keys_of_block // TILE) + self.tile

    def run(self) -> None:
        when(self.wg == CONSUMERS)(self.produce)
        when(self.wg < CONSUMERS)(self.consume)

    def over_tiles(self, head: Any, step: Any, carry: Any, between: Any = lambda carry: carry) -> Any:
        """step(head, tile, carry, partial) over the tiles of queries of a head, in the order of addition."""
        low, high, full_low, full_high = self.range
        full = turns(full_high - full_low)
        carry = lax.fori_loop(np.int32(0), full, lambda i, carry: step(head, full_low + i, carry, False), carry)
        carry, others = between(carry), turns((high - low) - (full_high - full_low))
        nth = lambda n: nth_partial(n, low, full_low, full_high)
        return lax.fori_loop(np.int32(0), others, lambda n, carry: step(head, nth(n), carry, True), carry)

    # ---- the producer

    def produce(self) -> None:
        plgpu.set_max_registers(self.registers[0], action="decrease")
        p = self.p
        for box, array, size in ((self.k_box, self.k, p.features), (self.v_box, self.v, p.values)):
            for wg in range(p.keys_of_block // TILE):
                for c in range(p.chunks(size)):
                    rows, columns = pl.ds(self.first_key + wg * TILE, TILE), columns_of(p, c, size)
                    source = array.at[where(p, self.batch, self.head, rows, columns)]
                    plgpu.copy_gmem_to_smem(source, box.at[wg, c], self.s["resident"])
        load_head = lambda g, count: self.over_tiles(self.head * p.group + g, self.load, count)
        count = lax.fori_loop(np.int32(0), turns(p.group), load_head, jnp.int32(0))
        drain(self.s["empty"], count, self.slots)

    def load(self, head: Any, tile: Any, count: Any, partial: bool) -> Any:
        del partial
        p, slot = self.p, lax.rem(count, np.int32(self.slots))
        full = self.s["full"].at[slot]
        when(count >= self.slots)(lambda: plgpu.barrier_wait(self.s["empty"].at[slot]))
        rows = pl.ds(tile * TILE, TILE)
        for box, array, size in ((self.s["q"], self.q, p.features), (self.s["dy"], self.dy, p.values)):
            for c in range(p.chunks(size)):
                columns = columns_of(p, c, size)
                plgpu.copy_gmem_to_smem(array.at[where(p, self.batch, head, rows, columns)], box.at[slot, c], full)
        of_head = self.rows.at[self.batch * p.heads + head, :, rows]
        plgpu.copy_gmem_to_smem(of_head, self.s["rows"].at[slot], full)
        return count + 1

    # ---- the consumers

    def consume(self) -> None:
        """The work of one of the two warpgroups."""
        raise NotImplementedError

    def take_place(self) -> None:
        """Waits until nothing reads what the head before this one has in its place in the workspace."""
        if not self.turns.reuses:
            return
        before = self.of_all - self.turns.held

        @when(before >= 0)
        def _() -> None:
            counter = np.int32(1 + self.turns.heads) + before
            counters.reached(self.counters, counter, self.turns.group * self.turns.queries)
            counters.copies_follow()

    def finish(self) -> None:
        """Waits until this warpgroup's stores have come to memory, and tells the blocks of queries of it."""
        plgpu.wait_smem_to_gmem(0)
        counters.count(self.counters, np.int32(1) + self.of_all)

    def release(self, count: Any) -> None:
        """Tells the producer that this warpgroup has read the slot before number `count`, if there is one."""
        slot = lax.rem(count - 1, np.int32(self.slots))
        when(count > 0)(lambda: plgpu.barrier_arrive(self.s["empty"].at[slot]))

    def visible(self, g: Any, tile: Any) -> Visible:
        """Which of this warpgroup's keys see which queries of a tile of a head."""
        p, head = self.p, self.head * self.p.group + g
        first = self.first_key + self.tile * TILE
        return Visible(p.window, self.extent, first, tile * TILE, self.batch, head, self.pairs)

    def weights_of(self, x: Array, rows: Any, seen: Visible | None) -> tuple[Array, Array]:
        """P of scores, and P times the slope of the cap."""
        p = self.p
        cap = None if p.softcap is None else p.softcap * LOG2_E
        weights, sloped = probabilities(x, rows, p.scale * LOG2_E, seen, cap)
        return weights, sloped if p.slope else weights

    def store(self, ds: Array, g: Any, tile: Any, at: tuple[Any, Any]) -> None:
        """dS of a tile to the workspace."""
        plgpu.wait_smem_to_gmem(self.ds_box.shape[1] - 1, wait_read_only=True)
        store_rounded(ds, self.ds_out.at[at])
        plgpu.commit_smem()
        place = lax.rem(self.of_all, np.int32(self.turns.held)) * self.p.group + g
        target = self.ds.at[place, tile, self.key_tile]
        plgpu.copy_smem_to_gmem(self.ds_box.at[at], target)

    def write(self, acc: Array, matrix: Any, box: Any, out: Any, size: int, scale: float | None) -> None:
        """A result, through the memory of the operand whose rows it has."""
        p = self.p
        value = plgpu.layout_cast(acc, plgpu.Layout.WGMMA)
        value = value if scale is None else value * np.float32(scale)
        first = self.first_key + self.tile * TILE
        for c in range(p.chunks(size)):
            part = value[:, c * p.chunk : (c + 1) * p.chunk]
            columns = columns_of(p, c, size)
            store(part.astype(p.dtype), matrix.at[self.tile, c])
            plgpu.commit_smem()
            target = out.at[where(p, self.batch, self.head, pl.ds(first, TILE), columns)]
            plgpu.copy_smem_to_gmem(box.at[self.tile, c], target)


class ByKeys(_Block):
    """Each warpgroup computes all of 64 keys."""

    def consume(self) -> None:
        plgpu.set_max_registers(self.registers[1], action="increase")
        p = self.p
        self.take_place()
        plgpu.barrier_wait(self.s["resident"])
        start = lambda size: start_accumulator(TILE, p.chunks(size) * p.chunk, jnp.float32)
        carry = jnp.int32(0), start(p.features), start(p.values)
        of_head = lambda g, carry: self.over_tiles(g, self.step, carry, all_waited)
        count, dk, dv = lax.fori_loop(np.int32(0), np.int32(p.group), of_head, carry)
        self.release(count)
        here = self.located_again()
        here.write(dk, self.k_out, self.k_box, self.dk, p.features, p.scale)
        here.write(dv, self.v_out, self.v_box, self.dv, p.values, None)
        here.finish()

    def step(self, g: Any, tile: Any, carry: Any, partial: bool) -> Any:
        """The products of a tile of queries; also releases the slot of the last one, once its products are complete."""
        (count, dk, dv), s = carry, self.s
        slot, swizzle = lax.rem(count, np.int32(self.slots)), self.p.swizzle
        q, dy, rows = s["q"].at[slot], s["dy"].at[slot], lambda i: s["rows"].at[slot, i]
        seen = self.visible(g, tile) if partial else None
        plgpu.barrier_wait(s["full"].at[slot])
        x = scores(self.k_box.at[self.tile], q, swizzle=swizzle)
        dp = scores(self.v_box.at[self.tile], dy, swizzle=swizzle)
        x = waited(x, 1)  # with it the products of the last tile are complete
        self.release(count)
        weights, sloped = self.weights_of(x, rows(0), seen)
        if seen is None:
            dv = accumulate_weighted(dv, weights, dy, swizzle=swizzle)
            ds = score_gradients(sloped, waited(dp, 1), rows(1), None)
            dk = accumulate_weighted(dk, ds, q, swizzle=swizzle)
        else:
            ds = score_gradients(sloped, waited(dp, 0), rows(1), seen)
            dv, dk = accumulate_repaired([(dv, weights, dy), (dk, ds, q)], (dy, q), swizzle=swizzle)
        self.store(ds, g, tile, (self.wg, lax.rem(count, np.int32(STAGED))))
        if partial or not IN_FLIGHT:
            return all_waited((count + 1, dk, dv))
        return count + 1, dk, waited(dv, 1)  # registers for one of the two operands less


class ByRole(_Block):
    """Of wide features: the first warpgroup computes S, P and dV, the second one dP, dS and dK, of the same keys.

    P goes from the one to the other through shared memory, in float32 and in the order of registers.
    """

    def consume(self) -> None:
        plgpu.set_max_registers(self.registers[1], action="increase")
        p = self.p
        self.take_place()
        plgpu.barrier_wait(self.s["resident"])
        self.follow(0, p.values, self.weights, self.v_out, self.v_box, self.dv, None)
        self.follow(1, p.features, self.gradients, self.k_out, self.k_box, self.dk, p.scale)

    def follow(self, role: int, size: int, step: Any, matrix: Any, box: Any, out: Any, scale: float | None) -> None:
        """The whole of a role: the sum over all tiles of queries, and its result."""

        @when(self.wg == role)
        def _() -> None:
            p = self.p
            carry = jnp.int32(0), start_accumulator(TILE, p.chunks(size) * p.chunk, jnp.float32)
            of_head = lambda g, carry: self.over_tiles(g, step, carry)
            _, acc = lax.fori_loop(np.int32(0), np.int32(p.group), of_head, carry)
            plgpu.barrier_arrive(self.s["done"])
            plgpu.barrier_wait(self.s["done"])  # the other one has read what the result is stored in
            here = self.located_again()
            here.write(acc, matrix, box, out, size, scale)
            here.finish() if role else plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def weights(self, g: Any, tile: Any, carry: Any, partial: bool) -> Any:
        """S, P and the product for dV of a tile of queries."""
        (count, dv), s = carry, self.s
        slot, swizzle = lax.rem(count, np.int32(self.slots)), self.p.swizzle
        q, dy, rows = s["q"].at[slot], s["dy"].at[slot], lambda i: s["rows"].at[slot, i]
        seen = self.visible(g, tile) if partial else None
        plgpu.barrier_wait(s["full"].at[slot])
        x = waited(scores(self.k_box.at[0], q, swizzle=swizzle), 0)
        weights, sloped = self.weights_of(x, rows(0), seen)
        when(count > 0)(lambda: plgpu.barrier_wait(s["p_empty"]))
        store_registers(sloped, s["p"])
        plgpu.barrier_arrive(s["p_full"])
        if seen is None:
            dv = accumulate_weighted(dv, weights, dy, swizzle=swizzle)
        else:
            (dv,) = accumulate_repaired([(dv, weights, dy)], (dy, q), swizzle=swizzle, rows=rows(1), seen=seen)
        dv = waited(dv, 0)
        loads_done()
        self.release(count + 1)
        return count + 1, dv

    def gradients(self, g: Any, tile: Any, carry: Any, partial: bool) -> Any:
        """dP, dS and the product for dK of a tile of queries."""
        (count, dk), s = carry, self.s
        slot, swizzle = lax.rem(count, np.int32(self.slots)), self.p.swizzle
        q, dy, rows = s["q"].at[slot], s["dy"].at[slot], lambda i: s["rows"].at[slot, i]
        seen = self.visible(g, tile) if partial else None
        plgpu.barrier_wait(s["full"].at[slot])
        dp = scores(self.v_box.at[0], dy, swizzle=swizzle)
        plgpu.barrier_wait(s["p_full"])
        weights = received(s["p"])
        plgpu.barrier_arrive(s["p_empty"])
        ds = score_gradients(weights, waited(dp, 0), rows(1), seen)
        if seen is None:
            dk = accumulate_weighted(dk, ds, q, swizzle=swizzle)
        else:
            (dk,) = accumulate_repaired([(dk, ds, q)], (dy, q), swizzle=swizzle)
        self.store(ds, g, tile, (0, 0))
        dk = waited(dk, 0)
        self.release(count + 1)
        return count + 1, dk


def all_waited(carry: Any) -> Any:
    count, dk, dv = carry
    return count, waited(dk, 0), waited(dv, 0)
