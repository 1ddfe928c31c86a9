"""The pooling kernels, in Pallas: threads of their own, from device memory through registers to device memory.

Pooling moves many bytes and computes little, so these kernels use neither shared memory nor barriers, but for one test
for NaN. A thread processes 16 bytes of neighbouring channels (8 of 16 bits or 4 of float32) by one load and one store,
so that the accesses of a warp are whole cache lines. The inputs that overlapping windows share come from the caches.

Forward, a thread computes a tile of outputs, and loads each of their inputs once. Windows are reduced along a row
first, then down; of windows that move by one element, the parts that neighbours share are reduced once. Threads are
numbered with few vectors of channels innermost, then columns, then rows, so that those of a block share their halo in
the L1 cache. Backward, a thread computes a tile of cells of dx, of stride by stride elements, which belong to the
windows of the same few outputs: it loads dy and taps once. Of maxima the gradient of windows that move by one element
has a kernel of its own, `scatter`, where that is faster.

Maxima. Of two items in the order of their taps the first is kept unless the second is larger, or is NaN and the first
is not. So the result is the first of equal maxima, in whatever groups the items are joined. A tap outside of x is
replaced by the nearest one of its window that is inside, which changes no maximum; among equal values it stands for the
same element. Where windows move by one element, arithmetic counts: NaN is ignored at first, but the sum of all inputs
of a tile tells whether there may be any. If so the block computes its tiles again, with NaN, an output at a time.

Order of additions: that of `jaxdnn._src.pool.xla.engine`, so that the bits are the same.

A tile at the end of an axis begins earlier, so that it ends with the axis: what is computed twice has the same bits. So
no store has a condition but that of a cell that reaches beyond dx.

Pallas addresses blocks of arrays. What windows of each thread's own need, loads and stores at addresses of its own, and
comparisons of two 16-bit numbers at once, is Mosaic's own code (`hopper.lanes`). On an H200 the kernels take 0.78 to
1.04 times the time of the PTX text that they replaced (benchmarks/notes-pool.md).
"""

import copy
import functools as ft
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core.compat import plgpu
from jaxdnn._src.hopper import lanes
from jaxdnn._src.hopper.lanes import THREADS
from jaxdnn._src.hopper.launch import kernel, when
from jaxdnn._src.pool.hopper.shape import Shape, Tile

Item = tuple[Array, ...]  # the words of values and, where taps are wanted, of their numbers
F32 = jnp.float32
WORDS = 4  # of a vector


class _Thread:
    """Of each thread its image, its vector of channels, and the row and the column at which its tile begins."""

    def __init__(self, k: Shape, tile: Tile, size: tuple[int, int], number: Array) -> None:
        self.k, self.number = k, number
        rest, vector = lanes.divided(number, tile.vectors)
        rest, column = lanes.divided(rest, -(-size[1] // tile.columns))
        rest, row = lanes.divided(rest, -(-size[0] // tile.rows))
        self.image, chunk = lanes.divided(rest, k.vectors // tile.vectors)
        self.vector = chunk * tile.vectors + vector
        self.row = lax.min(row * tile.rows, jnp.int32(size[0] - tile.rows))
        self.column = lax.min(column * tile.columns, jnp.int32(size[1] - tile.columns))

    def moved(self, rows: Any, columns: Any) -> "_Thread":
        """A thread of the same, whose tile begins so much further."""
        other = copy.copy(self)
        other.row, other.column = self.row + rows, self.column + columns
        return other

    def index(self, row: Array, column: Array, size: tuple[int, int]) -> Array:
        """The number of the thread's vector of a pixel."""
        return ((self.image * size[0] + row) * size[1] + column) * self.k.vectors + self.vector

    def output(self, i: int, j: int) -> Array:
        """The same of an output of the tile."""
        return self.index(self.row + i, self.column + j, self.k.out)


def _launch(
    body: Callable[..., None],
    k: Shape,
    tile: Tile,
    size: tuple[int, int],
    arrays: Sequence[Array],
    outs: Any,
    name: str,
    **options: Any,
) -> list[Array]:
    """The results of a kernel in which `body` is given the threads and the arrays as vectors (count, elements)."""
    count = tile.count(k, size)

    def run(*refs: Any, **scratch: Any) -> None:
        number = lax.min(lanes.numbers(lax.axis_index("block") * THREADS), jnp.int32(count - 1))
        body(_Thread(k, tile, size, number), *refs, **scratch)

    view = lambda v: jax.ShapeDtypeStruct((math.prod(v.shape) // k.elements, k.elements), v.dtype)
    options |= {"grid": (-(-count // THREADS),), "grid_names": ("block",), "kernel_name": name}
    found = kernel(run, out_type=tuple(map(view, outs)), **options)(*(v.reshape(-1, k.elements) for v in arrays))
    return [v.reshape(out.shape) for v, out in zip(found, outs, strict=True)]


def _pairwise(items: list[Array]) -> Array:
    """Adds neighbours, then neighbouring sums, and so on; an odd one out is passed on unchanged."""
    while len(items) > 1:
        joined = [a + b for a, b in zip(items[::2], items[1::2], strict=False)]
        items = joined + items[2 * len(joined) :]
    return items[0]


def _inside(at: Array, size: int) -> Array:
    return (at >= 0) & (at < size)


# ---- averages --------------------------------------------------------------------------------------------------------


class _Reciprocals:
    """1 / (how many taps of an output's window are counted), of the outputs around a thread's tile.

    They are rounded to nearest, so each is one of those there may be: Mosaic's division is approximate.
    """

    def __init__(self, t: _Thread) -> None:
        self.t, self.k = t, t.k
        self._counts: dict[tuple[int, int], Array] = {}
        self._products = sorted({a * b for a, b in itertools.product(*(range(1, n + 1) for n in t.k.taps))})

    def of(self, down: int, across: int) -> Array:
        """That of the output so many rows and columns after the tile's first one."""
        return lanes.together(self._find, [], [self._count(0, down), self._count(1, across)], lanes.like())

    def _find(self, down: Any, across: Any) -> Any:
        count, found = down * across, lanes.one(1.0, F32)
        for n in self._products[1:]:
            found = lanes.where(count == n, float(np.float32(1 / n)), found)
        return found

    def _count(self, axis: int, offset: int) -> Array:
        """The taps of an output's window that are counted along an axis; at least one."""
        if (axis, offset) not in self._counts:
            k = self.k
            low, high = (k.counted or ((0, 0), (0, 0)))[axis]
            start = ((self.t.row, self.t.column)[axis] + offset) * k.stride[axis] - k.low[axis]
            taps = (start + r * k.dilation[axis] for r in range(k.taps[axis]))
            count = lax.max(sum(jnp.where((at >= low) & (at < high), 1, 0) for at in taps), 1)
            self._counts[axis, offset] = count
        return self._counts[axis, offset]


def average(x: Array, k: Shape, tile: Tile, *, factor: float | None) -> Array:
    """Sums over windows times a factor or, where `k` says what is counted, 1 / count."""
    out = jax.ShapeDtypeStruct((k.images, *k.out, x.shape[-1]), x.dtype)

    def body(t: _Thread, x_ref: Any, y_ref: Any) -> None:
        start = [at * u - low for at, u, low in zip((t.row, t.column), k.stride, k.low, strict=True)]
        reciprocals = _Reciprocals(t)

        @ft.cache
        def value(down: int, across: int) -> Array:
            """An input in float32, 0 outside of x."""
            row, column = start[0] + down, start[1] + across
            inside = [_inside(at, k.size[axis]) for axis, at in enumerate((row, column)) if k.padded(axis)]
            when = ft.reduce(jnp.logical_and, inside) if inside else None
            return lanes.float32(lanes.load(x_ref, t.index(row, column, k.size), when))

        @ft.cache
        def line(down: int, j: int) -> Array:
            return _pairwise([value(down, j * k.stride[1] + s * k.dilation[1]) for s in range(k.taps[1])])

        for i, j in itertools.product(range(tile.rows), range(tile.columns)):
            total = _pairwise([line(i * k.stride[0] + r * k.dilation[0], j) for r in range(k.taps[0])])
            if k.counted:
                total = total * lanes.wide(reciprocals.of(i, j), k.elements)
            elif factor is not None:
                total = total * factor
            lanes.store(y_ref, t.output(i, j), total.astype(y_ref.dtype))

    return _launch(body, k, tile, k.out, [x], [out], "pool_average")[0]


def _reader(t: _Thread, ref: Any) -> Callable[[int, int], Array]:
    """From an output's offset from a tile's first cell to its vector of an array; zeros where there is no output."""
    k = t.k

    @ft.cache
    def read(down: int, across: int) -> Array:
        row, column = t.row + down, t.column + across
        when = _inside(row, k.out[0]) & _inside(column, k.out[1])
        return lanes.load(ref, t.index(row, column, k.out), when)

    return read


def _store_cells(t: _Thread, tile: Tile, dx: Any, make: Callable[..., Array]) -> None:
    """Stores make(i, j, rows, columns) of each element of each cell (i, j); its taps and their outputs are given."""
    k = t.k
    # From the last cell, whose first taps are loaded first.
    for i, j in itertools.product(reversed(range(tile.rows)), range(tile.columns)):
        for (a, rows), (b, columns) in itertools.product(*(enumerate(k.phases(axis)) for axis in (0, 1))):
            row, column = (t.row + i) * k.stride[0] + a, (t.column + j) * k.stride[1] + b
            ragged = [
                at < k.size[axis]
                for axis, (at, shift) in enumerate(((row, a), (column, b)))
                if shift and k.size[axis] % k.stride[axis]
            ]
            when = ft.reduce(jnp.logical_and, ragged) if ragged else None
            value = make(i, j, rows, columns) if rows and columns else lanes.full(0.0, k.elements, F32)
            lanes.store(dx, t.index(row, column, k.size), value.astype(dx.dtype), when)


def average_backward(dy: Array, k: Shape, tile: Tile, *, factor: float | None) -> Array:
    """Sums of dy times a factor or, where counts differ, of dy times 1 / count."""
    out = jax.ShapeDtypeStruct((k.images, *k.size, dy.shape[-1]), dy.dtype)

    def body(t: _Thread, dy_ref: Any, dx_ref: Any) -> None:
        read, reciprocals = _reader(t, dy_ref), _Reciprocals(t)

        @ft.cache
        def value(down: int, across: int) -> Array:
            found = lanes.float32(read(down, across))
            if k.counted:
                found = lanes.product(found, lanes.wide(reciprocals.of(down, across), k.elements))
            return found

        @ft.cache
        def line(down: int, columns: tuple[int, ...]) -> Array:
            return _pairwise([value(down, across) for across in columns])

        def make(i: int, j: int, rows: Any, columns: Any) -> Array:
            total = _pairwise([line(i + down, tuple(j + across for _, across in columns)) for _, down in rows])
            return total if factor is None else total * factor

        _store_cells(t, tile, dx_ref, make)

    return _launch(body, k, tile, k.cells, [dy], [out], "pool_average_dgrad")[0]


# ---- maxima ----------------------------------------------------------------------------------------------------------


def sliding(count: int, taps: int, get: Callable[[int], Any], join: Callable[[Any, Any], Any]) -> Iterator[Any]:
    """The windows of `taps` neighbours that start at 0, 1, ..., count - 1, with few joins, each as late as it can be.

    The windows of a group have a position in common. Each is the join of a suffix of the elements before that position
    and a prefix of those from it on, and the suffixes and prefixes are computed once.
    """
    group = min(count, 2 if taps <= 4 else taps)
    for start in range(0, count, group):
        line = start + taps
        tails = list(itertools.accumulate((get(i) for i in reversed(range(start, line))), lambda a, b: join(b, a)))
        yield tails[-1]
        heads = itertools.accumulate((get(line + i) for i in range(min(group, count - start) - 1)), join)
        # With one tap the tail is empty.
        yield from (head if taps == 1 else join(tails[-2 - i], head) for i, head in enumerate(heads))


class _Maxima:
    """The maxima of a tile and, with `indices`, their taps.

    nan: whether NaN counts. Where it does not, `total` is the sum of all inputs, which is NaN if one of them is.
    """

    def __init__(self, t: _Thread, tile: Tile, x: Any, *, indices: bool, nan: bool) -> None:
        self.t, self.k, self.tile, self._x, self._indices, self._nan = t, t.k, tile, x, indices, nan
        self._start = [at * u - low for at, u, low in zip((t.row, t.column), t.k.stride, t.k.low, strict=True)]
        self._places: dict[tuple[int, int], tuple[Array, Any]] = {}
        self._inputs: dict[tuple[int, int], Array] = {}
        self._lines: dict[int, list[Item]] = {}
        self.total: Any = None

    def _place(self, axis: int, offset: int) -> tuple[Array, Any]:
        """The nearest position inside that is whole dilations away from an offset, and how many."""
        if (axis, offset) not in self._places:
            at, d, size = self._start[axis] + offset, self.k.dilation[axis], self.k.size[axis]
            steps: Any = 0
            if self.k.padded(axis):
                # 0 or more of them downwards from below x, and upwards from above.
                below, above = (lanes.divided(lax.max(n, 0), d)[0] for n in (d - 1 - at, at - size + d))
                steps = below - above
            self._places[axis, offset] = at + steps * d, steps
        return self._places[axis, offset]

    def _input(self, down: int, across: int) -> Array:
        if (down, across) not in self._inputs:
            index = self.t.index(self._place(0, down)[0], self._place(1, across)[0], self.k.size)
            value = lanes.load(self._x, index)
            self._inputs[down, across] = lanes.words(value)
            if not self._nan:  # added at once: otherwise all would be held in registers until the end
                self.total = value if self.total is None else self.total + value
        return self._inputs[down, across]

    def _numbered(self, item: Item, number: Any) -> Item:
        """An item whose taps' numbers, as wide as the values, are greater by this.

        They are added as words, so none may become negative where items are joined. None does, for each window has an
        element of x along each axis: numbers count from the first window's start, and from their own in the end.
        """
        if not self._indices:
            return item
        lane = 1 if self.k.wide else 0x10001
        if isinstance(number, int):
            more = lanes.full(number * lane % 2**32, WORDS, jnp.uint32)
        else:
            more = lanes.wide((number * lane).astype(jnp.uint32), WORDS)
        return item[0], item[1] + more if len(item) > 1 else more

    def _join(self, a: Item, b: Item) -> Item:
        """a where it is greater or equal, else b, whose taps come after it."""
        return lanes.larger(a, b, self._x.dtype, nan=self._nan)

    def _along(self, axis: int, count: int, get: Callable[[int], Item]) -> Iterator[Item]:
        """The maxima of windows along an axis, of the items at offsets."""
        u, d, taps = (v[axis] for v in (self.k.stride, self.k.dilation, self.k.taps))
        step = (self.k.taps[1], 1)[axis]

        def item(i: int, r: int) -> Item:
            offset = i * u + r * d
            return self._numbered(get(offset), (self._place(axis, offset)[1] + r) * step)

        if not self.k.slides(axis):
            return (ft.reduce(self._join, [item(i, r) for r in range(taps)]) for i in range(count))
        found = sliding(count, taps, lambda i: item(0, i), self._join)
        return (self._numbered(v, -i * step) if i else v for i, v in enumerate(found))

    def _line(self, down: int) -> list[Item]:
        """The maxima of windows of one row, for each column of the tile."""
        if down not in self._lines:
            self._lines[down] = [*self._along(1, self.tile.columns, lambda across: (self._input(down, across),))]
        return self._lines[down]

    def store(self, y: Any, taps: Any) -> None:
        """Row by row, so that few of the inputs are held at a time."""
        columns = [
            self._along(0, self.tile.rows, lambda down, j=j: self._line(down)[j]) for j in range(self.tile.columns)
        ]
        for i, row in enumerate(zip(*columns, strict=True)):
            for j, item in enumerate(row):
                lanes.store(y, self.t.output(i, j), lanes.of_words(item[0], y.dtype))
                if self._indices:
                    lanes.store(taps, self.t.output(i, j), lanes.to_bytes(item[1], 32 if self.k.wide else 16))


def maximum(x: Array, k: Shape, tile: Tile, *, indices: bool) -> Any:
    """y, and with indices the taps (uint8)."""
    outs = [jax.ShapeDtypeStruct((k.images, *k.out, x.shape[-1]), x.dtype)]
    outs += [jax.ShapeDtypeStruct(outs[0].shape, jnp.uint8)] * indices

    def body(t: _Thread, x_ref: Any, y_ref: Any, taps_ref: Any = None, *, flag: Any) -> None:
        if not k.slides(0) or not k.slides(1):
            _Maxima(t, tile, x_ref, indices=indices, nan=True).store(y_ref, taps_ref)
            return
        fast = _Maxima(t, tile, x_ref, indices=indices, nan=False)
        fast.store(y_ref, taps_ref)

        @when(lanes.any_nan(fast.total, flag))
        def _() -> None:
            # One output after another in a loop, which takes fewer registers than the tile.
            def output(i: Any, carry: Any) -> Any:
                own = t.moved(lax.div(i, tile.columns), lax.rem(i, tile.columns))
                _Maxima(own, Tile(1, 1, tile.vectors), x_ref, indices=indices, nan=True).store(y_ref, taps_ref)
                return carry

            lax.fori_loop(0, tile.rows * tile.columns, output, None)

    scratch = {"flag": plgpu.SMEM((1,), jnp.int32)}
    found = _launch(body, k, tile, k.out, [x], outs, "pool_max", scratch_types=scratch)
    return found if indices else found[0]


def maximum_backward(dy: Array, taps: Array, k: Shape, tile: Tile) -> Array:
    """The sums of the dy whose taps select an element, from +0 on."""
    out = jax.ShapeDtypeStruct((k.images, *k.size, dy.shape[-1]), dy.dtype)
    ids = jnp.uint32 if k.wide else jnp.uint16  # of taps beside the values: as wide as these

    def body(t: _Thread, dy_ref: Any, taps_ref: Any, dx_ref: Any) -> None:
        read, read_taps = _reader(t, dy_ref), _reader(t, taps_ref)

        def taken(down: int, across: int, number: int) -> Array:
            """dy in float32 where its tap has this number, else 0."""
            dy, of = read(down, across), read_taps(down, across).astype(ids)
            mask = lanes.equal(of, lanes.full(number, k.elements, ids))
            return lanes.float32(lax.bitcast_convert_type(lax.bitcast_convert_type(dy, ids) & mask, dy.dtype))

        def make(i: int, j: int, rows: Any, columns: Any) -> Array:
            terms = (
                taken(i + down, j + across, r * k.taps[1] + s)
                for (r, down), (s, across) in itertools.product(rows, columns)
            )
            return ft.reduce(jnp.add, terms, lanes.full(0.0, k.elements, F32))

        _store_cells(t, tile, dx_ref, make)

    return _launch(body, k, tile, k.cells, [dy, taps], [out], "pool_max_dgrad")[0]
