"""Rows of arrays in the registers of the threads that share them, in plain Pallas.

A vector is 16 bytes of a row. T places, a power of two, share a row's vectors: vector v lies in place v mod T, in slot
v div T. Where a row is no multiple of T vectors, the last slot has the row's last T vectors, and a sum leaves out those
that the slot before has; so no access needs a guard, and what is stored twice is stored with the same bits. A place is
a thread.

A warpgroup has several rows to a warp, four rows of a warp each, two of two warps, one of four, or is one of several
that share a row; and so many times as many rows as it computes at once. An array of it has the shape (at once, rows of
warps, rows of a warp, warps, 2, 2, 2, 2, 2, elements of a vector), in which the twos are the bits of a lane's number
among those of its row. The last rows of an array that is no multiple of a warpgroup's rows are computed twice, with the
same bits.

The order of additions (`Rows.parts`, `Exchange.join`) depends on a row's length and dtype, and on T: the elements of a
vector one after another, a thread's vectors pairwise, the lanes at distances 16, 8, 4, 2, 1, and then the warps of a
row in the same way.
"""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core.compat import fa, pl, plgpu
from jaxdnn._src.hopper.launch import WARPGROUP, when
from jaxdnn._src.hopper.ptx import VECTOR_BYTES, pairwise


class Rows:
    """A warpgroup's view of arrays (count, length), shaped by `view`; within a kernel, but for its sizes.

    height: the rows of a warpgroup; a statistic of them is an array of shape `rows`.
    groups: how many warpgroups, or sets of those that share a row, a block has, each with rows of its own.
    """

    def __init__(self, length: int, itemsize: int, threads: int, at_once: int = 1, groups: int = 1) -> None:
        self.length, self.groups = length, groups
        self.elements = VECTOR_BYTES // itemsize  # of a vector
        self.vectors = length // self.elements  # of a row
        self.places = min(threads, 1 << (self.vectors.bit_length() - 1))
        self.slots = -(-self.vectors // self.places)
        self.twice = self.slots * self.places - self.vectors  # vectors that the last two slots have both
        self.warpgroups, height = -(-threads // 128), max(1, 128 // threads)
        self.warps = 4 // height  # of a row in a warpgroup
        self.bits = min(self.places, 32).bit_length() - 1
        self.rows = (at_once, height, 32 >> self.bits)
        self.height = math.prod(self.rows)
        self.shape = (*self.rows, self.warps, *(2,) * self.bits, self.elements)
        self.full = layout(self.shape)
        self.of_row, self.of_lanes = self.full.reduce((0, 1, 2)), self.full.reduce((len(self.shape) - 1,))
        self.column = self.full.reduce(tuple(range(3, len(self.shape))))

    def view(self, array: Array) -> Array:
        """An array with its last axis, a row's, split into vectors."""
        return array.reshape(*array.shape[:-1], self.vectors, self.elements)

    def at(self, ref: Any, slot: int, first: Any = None) -> Any:
        """A slot of the rows from `first` on, or of an array that is one row."""
        size, start = math.prod(self.shape[3:-1]), self.place(slot)
        return ref.at[pl.ds(start, size)] if first is None else ref.at[pl.ds(first, self.height), pl.ds(start, size)]

    def place(self, slot: int) -> Any:
        """The number of the warpgroup's first vector of a slot."""
        return min(slot * self.places, self.vectors - self.places) + math.prod(self.shape[3:-1]) * self.warpgroup()

    def load(self, ref: Any, first: Any) -> list[Array]:
        """The slots of the rows from `first` on."""
        return [load(self.at(ref, slot, first), self.shape, self.full) for slot in range(self.slots)]

    def parameter(self, ref: Any, slot: int) -> Array:
        """A slot of an array that is one row, for each of the warpgroup's rows."""
        return self._wide(load(self.at(ref, slot), self.shape[3:], self.of_row), range(3, len(self.shape)))

    def save(self, refs: Sequence[Any], first: Any, statistics: Sequence[Array]) -> None:
        """Stores statistics of the rows from `first` on."""

        @when(self.warpgroup() == 0)
        def _() -> None:
            for ref, statistic in zip(refs, statistics, strict=True):
                if self.height > 1:
                    store(ref.at[pl.ds(first, self.height)], statistic.astype(ref.dtype))
                else:  # Pallas stores an array of one element as a scalar
                    ref[first] = jnp.sum(jnp.sum(jnp.sum(statistic, 2), 1), 0).astype(ref.dtype)

    def number(self, ref: Any, first: Any) -> Array:
        """A statistic of the rows from `first` on."""
        if self.height > 1:
            return load(ref.at[pl.ds(first, self.height)], self.rows, self.column)
        return plgpu.layout_cast(lax.broadcast(ref[first], self.rows), tiled(self.column))

    def again(self, slot: Array) -> Array:
        """A slot that is used again: what was computed from it before is not kept in registers for this use.

        Of several rows at once it is the slot itself. Their 16-bit elements lie in several registers, whose halves
        Mosaic's barrier puts together in another order (JAX 0.11 to 0.12).
        """
        return slot if self.rows[0] > 1 else lax.optimization_barrier(slot)

    def zeros(self, shape: tuple[int, ...] = ()) -> Array:
        """A statistic, or a slot, of nothing but zeros."""
        of = self.full if shape else self.column
        return plgpu.layout_cast(jnp.zeros(shape or self.rows, jnp.float32), tiled(of))

    def iota(self) -> Array:
        """The numbers of the rows, as a statistic."""
        iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, self.rows, axis, layout=tiled(self.column))
        return (iota(0) * self.rows[1] + iota(1)) * self.rows[2] + iota(2)

    def wide(self, statistic: Array) -> Array:
        """A statistic, as wide as a slot."""
        return self._wide(statistic, (0, 1, 2))

    def _wide(self, value: Array, axes: Sequence[int]) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(value, self.shape, tuple(axes)), tiled(self.full))

    def warpgroup(self) -> Any:
        """The warpgroup's number among those that share a row."""
        if self.warpgroups == 1:
            return 0
        number = lax.axis_index(WARPGROUP)
        return number if self.groups == 1 else lax.rem(number, jnp.int32(self.warpgroups))

    def group(self) -> Any:
        """The number of the warpgroup's group."""
        if self.groups == 1:
            return 0
        number = lax.axis_index(WARPGROUP)
        return number if self.warpgroups == 1 else lax.div(number, jnp.int32(self.warpgroups))

    def parts(self, slots: Sequence[Array]) -> Array:
        """The warps' parts (at once, rows, warps) of sums over rows."""
        found = [jnp.sum(slot, len(self.shape) - 1) for slot in slots]
        if self.twice:
            found[-1] = jnp.where(self._place() >= self.twice, found[-1], 0.0)
        return self._over_lanes(pairwise(jnp.add, found), jnp.sum)

    def largest(self, slots: Sequence[Array]) -> Array:
        """The largest elements of the warps' parts of rows, in float32."""
        of_place = jnp.max(ft.reduce(jnp.maximum, slots), len(self.shape) - 1)
        return self._over_lanes(of_place.astype(jnp.float32), jnp.max)

    def _over_lanes(self, values: Array, over: Callable[..., Array]) -> Array:
        return ft.reduce(over, [4] * self.bits, values)

    def _place(self) -> Array:
        """The number of each thread's place."""
        shape, size = self.shape[:-1], math.prod(self.shape[3:-1])
        place = jnp.full(shape, self.warpgroup() * size, jnp.int32)
        for axis in range(3, len(shape)):
            size //= shape[axis]
            place += size * plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=tiled(self.of_lanes))
        return place


class Exchange:
    """Joins the parts of sums that the warps of a row have, through shared memory. Two memories take turns.

    A memory is stored to again after the next exchange's barrier, before which everyone has loaded from it.
    """

    @staticmethod
    def scratch(rows: Rows, values: int) -> dict[str, Any]:
        """The shared memory and the barriers of exchanges of up to so many values."""
        warps, groups = rows.warps * rows.warpgroups, rows.groups
        memory = plgpu.SMEM((2, groups, values, *rows.rows, warps), jnp.float32)
        barriers = plgpu.Barrier(num_arrivals=rows.warpgroups, num_barriers=2 * groups)
        several = {"exchanges": barriers} if rows.warpgroups > 1 else {}
        return {"exchanged": memory} | several if warps > 1 else {}

    def __init__(self, rows: Rows, memory: Any = None, barrier: Any = None) -> None:
        self.rows, self.memory, self.barrier = rows, memory, barrier
        self.turn: Any = 0  # which memory is next; a loop with an odd number of exchanges has to set it

    def join(self, *parts: Array, over: Callable[..., Array] = jnp.sum) -> list[Array]:
        """The rows' sums, or with `jnp.max` their maxima, from the parts (at once, rows, warps) that warps have."""
        rows = self.rows
        if self.memory is None:
            return [over(part, 3) for part in parts]
        turn, self.turn, group = self.turn, 1 - self.turn, rows.group()
        memory = [self.memory.at[turn, group, value] for value in range(len(parts))]
        for ref, part in zip(memory, parts, strict=True):
            store(ref.at[:, :, :, pl.ds(rows.warps * rows.warpgroup(), rows.warps)], part)
        if self.barrier is None:
            plgpu.commit_smem()
        else:
            _meet(self.barrier.at[2 * group + turn])
        shape = (*rows.rows, *(2,) * ((rows.warps * rows.warpgroups).bit_length() - 1), 1)
        found = [load(ref, shape, layout(shape, rows.warps)) for ref in memory]
        for _ in shape[3:]:
            found = [over(value, 3) for value in found]
        return found


class Totals:
    """The sums over a block's rows: those of each group's rows, one after another, through shared memory."""

    def __init__(self, rows: Rows, sums: int) -> None:
        self.rows, self.height, self.warpgroups = rows, math.prod(rows.rows[:2]), rows.warpgroups * rows.groups
        self.sets = self.height * rows.groups
        self.shape = (sums * rows.vectors, rows.elements)
        threads = min(max(32, 1 << (self.shape[0].bit_length() - 1)), 128 * self.warpgroups)
        groups = self.warpgroups // max(1, threads // 128)
        self.all = Rows(sums * rows.length, VECTOR_BYTES // rows.elements, threads, groups=groups)

    def scratch(self) -> dict[str, Any]:
        several = {"all": plgpu.Barrier(num_arrivals=self.warpgroups)} if self.warpgroups > 1 else {}
        return {"added": plgpu.SMEM((self.sets, *self.shape), jnp.float32)} | several if self.sets > 1 else {}

    def store(self, added: list[list[Array]], target: Any, block: Any, memory: Any = None, barrier: Any = None) -> None:
        rows, ref, first = self.rows, target, block
        if memory is not None:
            ref, first = memory, rows.group() * self.height
        for which, slots in enumerate(added):
            for slot, value in enumerate(slots):
                place = pl.ds(which * rows.vectors + rows.place(slot), math.prod(rows.shape[3:-1]))
                store(ref.at[pl.ds(first, self.height), place], jnp.sum(value, 2))
        if memory is None:
            return
        if barrier is None:
            plgpu.commit_smem()
        else:
            _meet(barrier)
        for slot in range(self.all.slots):
            shape, of = self.all.shape[3:], self.all.of_row
            parts = [load(self.all.at(memory.at[i], slot), shape, of) for i in range(self.sets)]
            store(self.all.at(target.at[block], slot), ft.reduce(jnp.add, parts))


def _meet(barrier: Any) -> None:
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def layout(shape: tuple[int, ...], warps: int = 0) -> Any:
    """The layout of (at once, rows of warps, of a warp, warps, bits of a lane, elements); with `warps`, without it.

    Each of these warps has all then.
    """
    rank = len(shape)
    bits = shape[3:-1] if warps else shape[4:-1]
    several = shape[2] > 1  # rows in a warp
    lanes = [*([2 - rank] if several else [fa.Replicated(2)] * (5 - len(bits))), *range(-1 - len(bits), -1)]
    of_warps = (1 - rank, fa.Replicated(warps) if warps else 3 - rank)
    wide = tuple(d - rank if isinstance(d, int) else d for d in (*of_warps, *lanes))
    tiling = fa.Tiling((shape, (*(1,) * (rank - 1), shape[-1])))
    return fa.TiledLayout(tiling, wide[:2], wide[2:], -1, _check_canonical=False).canonicalize()


@ft.cache
def tiled(of: Any) -> Any:
    """A layout as Pallas takes it; Pallas' own class makes the layout anew wherever one is compared with it."""
    pallas: Any = type(plgpu.Layout.TILED(of.tiling, of.warp_dims, of.lane_dims, of.vector_dim))

    class Tiled(pallas):
        def to_mgpu(self) -> Any:
            return of

    return Tiled(plgpu.Layout.TILED, (of.tiling, of.warp_dims, of.lane_dims, of.vector_dim), {})


def load(ref: Any, shape: tuple[int, ...], of: Any) -> Array:
    """Loads an array, by accesses as wide as the layout has them."""
    options: dict[str, Any] = {"layout": tiled(of), "optimized": False}  # the arguments differ by release
    return plgpu.load(ref.reshape(shape), **options)


def store(ref: Any, value: Array) -> None:
    """Stores an array likewise; before JAX 0.12 there is no `store`, and nothing has to be asked for."""
    wide: Callable[..., None] | None = getattr(plgpu, "store", None)
    if wide is None:
        ref.reshape(value.shape)[...] = value
    else:
        wide(ref.reshape(value.shape), value, optimized=False)
