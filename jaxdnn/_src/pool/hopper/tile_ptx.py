"""The PTX of pooling with stride 1: a thread computes a tile of elements, because overlapping windows share much.

Windows that move by one element overlap so much that arithmetic and cache traffic bound them, not device memory. A
thread processes 16 bytes of neighbouring channels, as in `ptx`, of a tile of rows by columns. Each input is loaded and
unpacked once for the tile. Windows are reduced along a row first, then down; the parts that neighbouring windows share
are reduced once. Threads are numbered with few vectors of channels innermost, then columns, then rows, so that those of
a block share their halo in the L1 cache.

Maxima. Of two neighbours the first is kept unless the second is larger: one comparison and one selection for two 16-bit
numbers. This ignores NaN, so the sum of all inputs of the tile is kept as well, which is NaN if one of them is. In that
case the thread computes its tile again, tap by tap and with NaN (`_again`). Inputs outside of x are replaced by the
nearest ones inside. These are in the same windows, and so change no maximum; among equal values the copy stands for the
same element.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from jaxdnn._src.hopper.ptx import real
from jaxdnn._src.pool.hopper import ptx
from jaxdnn._src.pool.hopper.ptx import Emitter, Shape

Lanes = list[str]  # registers: one a word, or one a number
Item = tuple[Lanes, Lanes]  # values and, where taps are wanted, places
_SUMS = {"bf16": "add.rn.bf16x2", "f16": "add.rn.f16x2", "f32": "add.rn.f32"}


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of a thread, and the numbering of threads.

    Attributes:
      rows, columns: of the thread's tile.
      vectors: vectors of channels whose threads have neighbouring numbers; a divisor of all vectors.
      threads: of a block.
    """

    rows: int
    columns: int
    vectors: int
    threads: int

    def count(self, k: Shape, size: tuple[int, int]) -> int:
        """Threads for an array of so many rows and columns."""
        return k.images * k.vectors * -(-size[0] // self.rows) * -(-size[1] // self.columns)


class _Thread:
    """The thread's tile: its first element, and which of its elements exist."""

    def __init__(self, e: Emitter, k: Shape, tile: Tile, size: tuple[int, int]) -> None:
        self.e, self.k, self.tile, self.size = e, k, tile, size
        block, thread = e.r("mov.u32", "%ctaid.x"), e.r("mov.u32", "%tid.x")
        number = e.r("mad.lo.s32", block, tile.threads, thread)
        self._end = e.label()
        e.op("bra", self._end, when=e.p("setp.ge.u32", number, tile.count(k, size)))
        rest, vector = e.quotient(number, tile.vectors)
        rest, column = e.quotient(rest, -(-size[1] // tile.columns))
        rest, row = e.quotient(rest, -(-size[0] // tile.rows))
        self.image, chunk = e.quotient(rest, k.vectors // tile.vectors)
        self.vector = e.r("mad.lo.s32", chunk, tile.vectors, vector)
        self.row, self.column = e.r("mul.lo.u32", row, tile.rows), e.r("mul.lo.u32", column, tile.columns)
        self._made: dict[tuple[int, int], str] = {}

    def text(self) -> str:
        self.e.place(self._end)
        return self.e.text()

    def pointer(self, operand: int, row: str, column: str, size: tuple[int, int], width: int) -> str:
        at = ptx.flat_index(self.e, self.image, row, column, self.vector, size, self.k.vectors)
        return ptx.pointer(self.e, operand, at, width)

    def _made_along(self, axis: int, at: int) -> str:
        """Whether the row or column of the tile exists; "" where it always does."""
        if at == 0 or self.size[axis] % (self.tile.rows, self.tile.columns)[axis] == 0:
            return ""
        if (axis, at) not in self._made:
            e = self.e
            place = e.r("add.u32", (self.row, self.column)[axis], at)
            self._made[axis, at] = e.p("setp.lt.u32", place, self.size[axis])
        return self._made[axis, at]

    def makes(self, i: int, j: int) -> str:
        return ptx.both(self.e, self._made_along(0, i), self._made_along(1, j))

    def store(self, base: str, width: int, i: int, j: int, words: Lanes) -> None:
        place = ptx.address(base, width * self.k.vectors * (i * self.size[1] + j))
        self.e.store(words, place, self.makes(i, j))


def sliding(count: int, taps: int, get: Callable[[int], Item], join: Callable[[Item, Item], Item]) -> Iterator[Item]:
    """The windows of `taps` neighbours that start at 0, 1, ..., count - 1, with few joins.

    The windows of a group have a position in common. Each is the join of a suffix of the elements before that position
    and a prefix of those from it on, and the suffixes and prefixes are computed once.
    """
    group = min(count, 2 if taps <= 4 else taps)
    for start in range(0, count, group):
        many = min(group, count - start)
        line = start + taps
        tails = {line - 1: get(line - 1)}
        for i in range(line - 2, start - 1, -1):
            tails[i] = join(get(i), tails[i + 1])
        yield tails[start]
        head: Item | None = None
        for i in range(1, many):
            head = get(line + i - 1) if head is None else join(head, get(line + i - 1))
            # taps 1: the tail is empty
            yield head if taps == 1 else join(tails[start + i], head)


# ---- maximum ---------------------------------------------------------------------------------------------------------


class _Near:
    """The inputs of a tile, those outside of x replaced by the nearest ones inside, and their positions."""

    def __init__(self, t: _Thread, indices: bool) -> None:
        self.t, e, k = t, t.e, t.k
        extents = t.tile.rows + k.taps[0] - 1, t.tile.columns + k.taps[1] - 1
        self.ids: list[list[str]] = []  # for each axis, each position's part of a tap's number
        at: list[list[str]] = []
        for axis, start in enumerate((t.row, t.column)):
            first = e.r("add.s32", start, -k.low[axis])
            places, ids = [], []
            for i in range(extents[axis]):
                place = e.r("add.s32", first, i)
                place = e.r("min.s32", e.r("max.s32", place, 0), k.size[axis] - 1)
                places.append(place)
                if indices:
                    step = (k.taps[1], 1)[axis] * (1 if k.wide else 0x10001)
                    ids.append(e.r("mul.lo.u32", e.r("sub.s32", place, first), step))
            at.append(places)
            self.ids.append(ids)
        zero = e.r("mov.b32", 0)
        self._rows = [t.pointer(0, row, zero, k.size, 16) for row in at[0]]
        self._columns = at[1]
        self.sums: Lanes = []
        self._held: dict[tuple[int, int], Lanes] = {}

    def get(self, down: int, across: int) -> Lanes:
        if (down, across) not in self._held:
            e, k = self.t.e, self.t.k
            base = e.d("mad.wide.u32", self._columns[across], 16 * k.vectors, self._rows[down])
            found = e.load(4, ptx.address(base, 0), "", "0")
            add = _SUMS[k.dtype]
            total = e.f if k.wide else e.r
            words = [e.f("mov.b32", v) for v in found] if k.wide else found
            self.sums = [total(add, s, w) for s, w in zip(self.sums, words, strict=True)] if self.sums else words
            self._held[down, across] = found
        return self._held[down, across]


def maximum(k: Shape, tile: Tile, *, indices: bool) -> str:
    """Operands: x, y and, with indices, taps (uint8)."""
    e = Emitter()
    t = _Thread(e, k, tile, k.out)
    x = _Near(t, indices)
    y = t.pointer(1, t.row, t.column, k.out, 16)
    width = 4 if k.wide else 8
    taps = t.pointer(2, t.row, t.column, k.out, width) if indices else ""
    lines: dict[int, list[Item]] = {}

    def line(down: int) -> list[Item]:
        """The maxima of windows of one row, for each column of the tile."""
        if down not in lines:
            get = lambda across: (x.get(down, across), [x.ids[1][across]] * 4 if indices else [])
            found = list(sliding(tile.columns, k.taps[1], get, lambda a, b: _first_largest(e, k, a, b)))
            if indices:
                found = [(v, [e.r("add.u32", i, x.ids[0][down]) for i in ids]) for v, ids in found]
            lines[down] = found
        return lines[down]

    down = [
        sliding(tile.rows, k.taps[0], lambda i, j=j: line(i)[j], lambda a, b: _first_largest(e, k, a, b))
        for j in range(tile.columns)
    ]
    for i in range(tile.rows):
        for j, windows in enumerate(down):
            values, ids = next(windows)
            t.store(y, 16, i, j, values)
            if indices:
                start = (i * k.taps[1] + j) * (1 if k.wide else 0x10001)
                lanes = [e.r("sub.s32", v, start) for v in ids] if start else ids
                t.store(taps, width, i, j, ptx.as_bytes(e, k, lanes))
    kind = ptx.KINDS[k.dtype]
    nan = [e.r(f"set.nan.u32.{kind}", s, s) for s in x.sums]
    some = e.r("or.b32", e.r("or.b32", nan[0], nan[1]), e.r("or.b32", nan[2], nan[3]))
    with e.only_if("setp.ne.u32", some, 0):
        _again(t, indices)
    return t.text()


def _first_largest(e: Emitter, k: Shape, a: Item, b: Item) -> Item:
    """a unless b, which comes after it, is larger; neither is NaN."""
    kind = ptx.KINDS[k.dtype]
    keeps = [e.r(f"set.ge.u32.{kind}", v, w) for v, w in zip(a[0], b[0], strict=True)]
    pick = lambda n: [e.chosen(m, v, w) for m, v, w in zip(keeps, a[n], b[n], strict=True)]
    return pick(0), pick(1) if a[1] else []


@dataclasses.dataclass(frozen=True)
class _Element:
    """The registers of one element of the tile in a loop over them."""

    row: str
    column: str
    exists: str


def _elements(t: _Thread, body: Callable[[_Element], None]) -> None:
    """Emits a loop over the elements of the tile."""
    e = t.e
    with e.rolled(t.tile.rows * t.tile.columns) as number:
        i, j = e.quotient(number, t.tile.columns)
        row, column = e.r("add.u32", t.row, i), e.r("add.u32", t.column, j)
        inside = [e.p("setp.lt.u32", at, size) for at, size in zip((row, column), t.size, strict=True)]
        body(_Element(row, column, ptx.both(e, *inside)))


def _again(t: _Thread, indices: bool) -> None:
    """Computes the maxima of the tile again, tap by tap from the last to the first, with NaN."""
    e, k = t.e, t.k
    count = math.prod(k.taps)

    def element(at: _Element) -> None:
        best = [e.r("mov.b32", ptx.LOWEST[k.dtype]) for _ in range(4)]
        tap = [e.r("mov.b32", 0) for _ in range(4)]
        with e.rolled(count) as before:
            number = e.r("sub.s32", e.r("mov.b32", count - 1), before)
            r, s = e.quotient(number, k.taps[1])
            row, column = (
                e.r("add.s32", e.r("add.s32", start, step), -low)
                for start, step, low in zip((at.row, at.column), (r, s), k.low, strict=True)
            )
            inside = [e.p("setp.lt.u32", v, size) for v, size in zip((row, column), k.size, strict=True)]
            valid = ptx.both(e, at.exists, *inside)
            words = e.load(4, ptx.address(t.pointer(0, row, column, k.size, 16), 0), valid, ptx.LOWEST[k.dtype])
            lanes = number if k.wide else e.r("mul.lo.u32", number, 0x10001)
            values, places = ptx.compare(e, k, best, tap, words, lanes, valid if indices else "")
            for old, new in zip([*best, *tap], [*values, *places], strict=True):
                e.op("mov.b32", old, new)
        e.store(best, ptx.address(t.pointer(1, at.row, at.column, k.out, 16), 0), at.exists)
        if indices:
            base = t.pointer(2, at.row, at.column, k.out, 4 if k.wide else 8)
            e.store(ptx.as_bytes(e, k, tap), ptx.address(base, 0), at.exists)

    _elements(t, element)


# ---- average ---------------------------------------------------------------------------------------------------------


def average(k: Shape, tile: Tile, *, factor: float | None) -> str:
    """Sums over windows times a factor or, where `k` says what is counted, 1 / count; operands: x and y."""
    e = Emitter()
    t = _Thread(e, k, tile, k.out)
    y = t.pointer(1, t.row, t.column, k.out, 16)
    start = e.r("add.s32", t.row, -k.low[0]), e.r("add.s32", t.column, -k.low[1])
    x = t.pointer(0, start[0], start[1], k.size, 16)
    inside: dict[tuple[int, int], str] = {}
    lines: dict[int, list[Lanes]] = {}

    def along(axis: int, shift: int) -> str:
        if (axis, shift) not in inside:
            at = e.r("add.s32", start[axis], shift)
            inside[axis, shift] = e.p("setp.lt.u32", at, k.size[axis])
        return inside[axis, shift]

    def value(down: int, across: int) -> Lanes:
        when = ptx.both(e, along(0, down), along(1, across))
        found = e.load(4, ptx.address(x, 16 * k.vectors * (down * k.size[1] + across)), when, "0")
        return e.unpack(k.dtype, found)

    def line(down: int) -> list[Lanes]:
        """The sums over windows of one row, for each column of the tile."""
        if down not in lines:
            values = [value(down, across) for across in range(tile.columns + k.taps[1] - 1)]
            lines[down] = [ptx.pairwise(e, values[j : j + k.taps[1]]) for j in range(tile.columns)]
        return lines[down]

    columns = _counts(t, 1) if k.counted else []
    rows = _counts(t, 0) if k.counted else []
    for i, j in itertools.product(range(tile.rows), range(tile.columns)):
        total = ptx.pairwise(e, [line(i + r)[j] for r in range(k.taps[0])])
        scale = None if factor is None else real(factor)
        if k.counted:
            scale = ptx.reciprocal(e, rows[i], columns[j])
        total = total if scale is None else [e.f("mul.rn.f32", v, scale) for v in total]
        t.store(y, 16, i, j, e.pack(k.dtype, total))
    return t.text()


def _counts(t: _Thread, axis: int) -> list[str]:
    """How many taps along an axis are counted, for each row or column of the tile."""
    many = (t.tile.rows, t.tile.columns)[axis]
    start = (t.row, t.column)[axis]
    return [ptx.count(t.e, t.k, axis, t.e.r("add.u32", start, i)) for i in range(many)]


class _Outputs:
    """The outputs with elements of a tile in their windows, by offset from its first element; elsewhere dy is zero."""

    def __init__(self, t: _Thread) -> None:
        self.t, k = t, t.k
        self._dy = t.pointer(0, t.row, t.column, k.out, 16)
        self._inside: dict[tuple[int, int], str] = {}
        # From the last to the first: the order of the taps of each element of the tile.
        self.across = range(t.tile.columns - 1 + k.low[1], k.low[1] - k.taps[1], -1)

    def exists(self, down: int, across: int) -> str:
        e, k, t = self.t.e, self.t.k, self.t
        found = []
        for axis, (start, shift) in enumerate(((t.row, down), (t.column, across))):
            if (axis, shift) not in self._inside:
                at = e.r("add.s32", start, shift)
                self._inside[axis, shift] = e.p("setp.lt.u32", at, k.out[axis])
            found.append(self._inside[axis, shift])
        return ptx.both(e, *found)

    def dy(self, down: int, across: int) -> Lanes:
        k = self.t.k
        place = ptx.address(self._dy, 16 * k.vectors * (down * k.out[1] + across))
        return self.t.e.load(4, place, self.exists(down, across), "0")


def average_backward(k: Shape, tile: Tile, *, factor: float | None) -> str:
    """Sums of dy times a factor or, where counts differ, of dy times 1 / count; operands: dy, dx."""
    e = Emitter()
    t = _Thread(e, k, tile, k.size)
    y = _Outputs(t)
    dx = t.pointer(1, t.row, t.column, k.size, 16)
    scales: dict[tuple[int, int], str] = {}
    lines: dict[int, list[Lanes]] = {}

    def counted(axis: int, shift: int) -> str:
        if (axis, shift) not in scales:
            at = e.r("add.s32", (t.row, t.column)[axis], shift)
            scales[axis, shift] = ptx.count(e, k, axis, at)
        return scales[axis, shift]

    def value(down: int, across: int) -> Lanes:
        found = e.unpack(k.dtype, y.dy(down, across))
        if k.counted:
            scale = ptx.reciprocal(e, counted(0, down), counted(1, across))
            found = [e.f("mul.rn.f32", v, scale) for v in found]
        return found

    def line(down: int) -> list[Lanes]:
        if down not in lines:
            values = [value(down, across) for across in y.across]  # from the last to the first
            last = tile.columns - 1
            lines[down] = [ptx.pairwise(e, values[last - j :][: k.taps[1]]) for j in range(tile.columns)]
        return lines[down]

    # From the last row, whose first taps are loaded first.
    for i in reversed(range(tile.rows)):
        for j in range(tile.columns):
            total = ptx.pairwise(e, [line(i + k.low[0] - r)[j] for r in range(k.taps[0])])
            total = total if factor is None else [e.f("mul.rn.f32", v, real(factor)) for v in total]
            t.store(dx, 16, i, j, e.pack(k.dtype, total))
    return t.text()
