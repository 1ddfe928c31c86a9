"""Max-pooling's backward pass with stride 1 in scatter form: sums in shared memory.

An element is in as many windows as a window has taps, so that the gather form (`kernels.maximum_backward`) needs that
many comparisons for each element. Here every output is read once and added to the element that its tap selects. A
thread processes two neighbouring channels of a tile of rows by columns. Its sums in shared memory belong to it alone,
so that there are no atomics. It processes the outputs from the last to the first; for every element this is the order
of the taps, and hence the order of additions.

Rows. A row of outputs adds to as many rows of dx as there are rows of taps. These rows are kept in a ring: after each
row of outputs one row of dx is complete; it is stored, and its slot is used for the next row. The offset of a tap in
the ring is read from a table, one for each position of the ring; numbers that are no tap select a separate row. Each
row of the ring has extra columns for elements outside of the tile.

The next row of outputs is loaded while one is added.

The gather form takes 1.1 times as long for 3x3 windows of 16 bits, 1.6 times for 5x5, and 1.5 times for 5x5 in float32,
on an H200. In float32 3x3 windows are faster in gather form, which serves them (benchmarks/notes-pool.md).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core.compat import plgpu
from jaxdnn._src.hopper import lanes
from jaxdnn._src.hopper.lanes import THREADS
from jaxdnn._src.hopper.launch import kernel
from jaxdnn._src.pool.hopper.shape import Shape

TAPS = 256  # entries of a table: a tap is a byte
PAIR = 2


@dataclasses.dataclass(frozen=True)
class Strip:
    """The tile of a thread: rows by columns of dx."""

    rows: int
    columns: int

    def count(self, k: Shape) -> int:
        """The number of all threads."""
        tiles = -(-k.size[0] // self.rows) * -(-k.size[1] // self.columns)
        return k.images * pairs(k) * tiles

    def pitch(self, k: Shape) -> int:
        """Sums in a row of the ring. The extra columns on a row's right are those on the left of the next row."""
        return self.columns + k.taps[1] - 1

    def cells(self, k: Shape) -> int:
        """Sums of a thread and channel: the extra columns left of the first row, the ring, and the row for no tap."""
        return (k.taps[0] + 1) * self.pitch(k)

    def floats(self, k: Shape) -> int:
        """Words of shared memory."""
        return TAPS * k.taps[0] + PAIR * self.cells(k) * THREADS


def pairs(k: Shape) -> int:
    """Pairs of channels."""
    return k.vectors * k.elements // PAIR


class _Sums:
    """A thread's sums in shared memory, by the number of a cell; the two channels of a cell are a thread apart."""

    def __init__(self, k: Shape, strip: Strip, sums: Any, tables: Any) -> None:
        self.k, self.pitch, self.sums, self.tables = k, strip.pitch(k), sums, tables
        self.own = lanes.wide(lanes.numbers(0), PAIR) + lanes.positions(PAIR) * THREADS
        self.first = k.taps[1] - 1  # cells left of the first row

    def clear(self, cells: int) -> None:
        zeros = lanes.full(0.0, PAIR, jnp.float32)
        lax.fori_loop(0, cells, lambda cell, _: lanes.put(self.sums, self.own + cell * (PAIR * THREADS), zeros), None)

    def make_tables(self) -> None:
        """Makes the tables: entry t of table n is the offset of tap t from tap (0, 0), with the ring at position n."""
        k = self.k
        for start in range(0, TAPS * k.taps[0], THREADS):
            number = lanes.numbers(start)
            table, tap = lanes.divided(number, TAPS)
            r, s = lanes.divided(tap, k.taps[1])
            slot = r - table
            cell = jnp.where(slot < 0, slot + k.taps[0], slot) * self.pitch + s
            cell = jnp.where(tap < math.prod(k.taps), cell, k.taps[0] * self.pitch)
            lanes.put(self.tables, lanes.wide(number, 1), lanes.wide(cell * (PAIR * THREADS), 1))

    def places(self, taps: Array, table: Any) -> Array:
        """Where the sums are that outputs are added to, if they were in column 0."""
        return self.own + lanes.entries(self.tables, taps.astype(jnp.int32) + table * TAPS)

    def _at(self, column: int) -> int:
        return (self.first + column) * (PAIR * THREADS)

    def add(self, places: Array, column: int, value: Array) -> None:
        """Adds outputs whose tap (0, 0) is in this column, each to the sum that its tap selects."""
        at = self._at(column)
        lanes.put(self.sums, places, lanes.entries(self.sums, places, at) + value, at)

    def taken(self, slot: Any, column: int) -> Array:
        """The sums of an element of a row of the ring, which become zero."""
        place, at = self.own + slot * (self.pitch * PAIR * THREADS), self._at(column)
        found = lanes.entries(self.sums, place, at)
        lanes.put(self.sums, place, lanes.full(0.0, PAIR, jnp.float32), at)
        return found


def maximum_backward(dy: Array, taps: Array, k: Shape, strip: Strip) -> Array:
    """The sums of the dy whose taps select an element, from +0 on."""
    count, columns = strip.count(k), range(strip.columns + k.taps[1] - 1)

    def body(dy_ref: Any, taps_ref: Any, dx_ref: Any, *, sums: Any, tables: Any) -> None:
        thread = lax.min(lanes.numbers(lax.axis_index("block") * THREADS), jnp.int32(count - 1))
        rest, pair = lanes.divided(thread, pairs(k))
        rest, across = lanes.divided(rest, -(-k.size[1] // strip.columns))
        image, down = lanes.divided(rest, -(-k.size[0] // strip.rows))
        row, column = down * strip.rows, across * strip.columns
        memory = _Sums(k, strip, sums, tables)
        memory.make_tables()
        memory.clear(strip.cells(k))
        lanes.meet()
        # Outputs whose windows reach the tile: from its last row, which may not exist, to its first; likewise columns.
        last = row + (strip.rows - 1 + k.low[0])
        left = column + (k.low[1] - k.taps[1] + 1)
        exist = [(left + b >= 0) & (left + b < k.out[1]) for b in columns]

        def loaded(step: Any) -> list[tuple[Array, Array]]:
            """dy and taps of a row of outputs; where there is no output dy is 0, and any tap will do."""
            at = last - step
            inside = (at >= 0) & (at < k.out[0])
            number = ((image * k.out[0] + at) * k.out[1] + left) * pairs(k) + pair
            load = lambda ref, b: lanes.load(ref, number, inside & exist[b], b * pairs(k))
            return [(load(dy_ref, b), load(taps_ref, b)) for b in columns]

        def step(number: Any, carry: Any) -> Any:
            table, slot, held = carry
            ahead = loaded(number + 1)
            places = [memory.places(tap, table) for _, tap in held]
            for b in reversed(columns):
                memory.add(places[b], b - k.taps[1] + 1, lanes.float32(held[b][0]))
            done = last + (k.taps[0] - 1 - k.low[0]) - number  # the row of dx that is complete
            mine = done < lax.min(row + strip.rows, jnp.int32(k.size[0]))
            first = ((image * k.size[0] + done) * k.size[1] + column) * pairs(k) + pair
            for b in range(strip.columns):
                value = memory.taken(slot, b).astype(dx_ref.dtype)
                lanes.store(dx_ref, first, value, mine & (column + b < k.size[1]), b * pairs(k))
            # The ring advances by one row, and the tables with it.
            wraps = slot == 0
            return jnp.where(wraps, 0, table + 1), jnp.where(wraps, k.taps[0] - 1, slot - 1), ahead

        carry = jnp.int32(0), jnp.int32(k.taps[0] - 1), loaded(0)
        lax.fori_loop(0, strip.rows + k.taps[0] - 1, step, carry)

    scratch = {
        "sums": plgpu.SMEM((PAIR * strip.cells(k) * THREADS,), jnp.float32),
        "tables": plgpu.SMEM((TAPS * k.taps[0],), jnp.int32),
    }
    out = jax.ShapeDtypeStruct((k.images * math.prod(k.size) * pairs(k), PAIR), dy.dtype)
    options: dict[str, Any] = {"grid": (-(-count // THREADS),), "grid_names": ("block",), "scratch_types": scratch}
    found = kernel(body, out_type=(out,), kernel_name="pool_max_dgrad", **options)(
        dy.reshape(-1, PAIR), taps.reshape(-1, PAIR)
    )
    return found[0].reshape(k.images, *k.size, dy.shape[-1])
