"""The PTX of max-pooling's backward pass with stride 1 in scatter form: sums in shared memory.

An element is in as many windows as a window has taps, so that the gather form needs that many comparisons for each
element. Here every output is read once and added to the element that its tap selects. A thread processes two
neighbouring channels of a tile of rows by columns. Its sums in shared memory belong to it alone, so that there are no
atomics. It processes the outputs from the last to the first; for every element this is the order of the taps, and hence
the order of additions.

Rows. A row of outputs adds to as many rows of dx as there are rows of taps. These rows are kept in a ring: after each
row of outputs one row of dx is complete; it is stored, and its slot is used for the next row. The offset of a tap in
the ring is read from a table, one for each position of the ring; numbers that are no tap select a separate row. Each
row of the ring has extra columns for elements outside of the tile.

The next row of outputs is loaded while one is added.

It is PTX text, which an otherwise empty Pallas kernel launches: Pallas' loads from shared memory take whole arrays, and
here each thread adds to a place of its own. The gather form, in Pallas (`kernels.maximum_backward`), compares every
element with all taps of its windows. On an H200 that takes 1.1 times as long for 3x3 windows of 16 bits, 1.6 times for
5x5, and 1.5 times for 5x5 in float32. In float32 3x3 windows are faster in gather form, which serves them
(benchmarks/notes-pool.md).
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxdnn._src.hopper import ptx
from jaxdnn._src.pool.hopper.shape import Shape

TAPS = 256  # entries of a table: a tap is a byte


@dataclasses.dataclass(frozen=True)
class Strip:
    """The tile of a thread: rows by columns of dx. `threads` are those of a block."""

    rows: int
    columns: int
    threads: int = 128

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
        """Floats of shared memory."""
        return TAPS * k.taps[0] + 2 * self.cells(k) * self.threads


def pairs(k: Shape) -> int:
    """Pairs of channels."""
    return k.vectors * (2 if k.wide else 4)


class Emitter(ptx.Emitter):
    """The emitter with what scattering needs besides."""

    def quotient(self, value: str, divisor: int) -> tuple[str, str]:
        """value // divisor and value % divisor."""
        if divisor == 1:
            return value, self.r("mov.b32", 0)
        quotient = self.r("div.u32", value, divisor)
        return quotient, self.r("sub.u32", value, self.r("mul.lo.u32", quotient, divisor))

    def store(self, names: Sequence[str], place: str, when: str) -> None:
        width = f".v{len(names)}" if len(names) > 1 else ""
        self.op(f"st.global{width}.b32", place, list(names) if len(names) > 1 else names[0], when=when)


def _address(base: str, offset: int) -> str:
    return f"[{base}+{offset}]" if offset >= 0 else f"[{base}+-{-offset}]"


class _Scatter:
    """A thread's tile, and the addresses of its sums. `row` and `column` are those of its first element."""

    def __init__(self, k: Shape, strip: Strip) -> None:
        self.e, self.k, self.strip = Emitter(), k, strip
        self.shared = "$3"
        e = self.e
        self.thread = e.r("mov.u32", "%tid.x")
        number = e.r("mad.lo.s32", e.r("mov.u32", "%ctaid.x"), strip.threads, self.thread)
        self.works = e.p("setp.lt.u32", number, strip.count(k))
        rest, self.pair = e.quotient(number, pairs(k))
        rest, column = e.quotient(rest, -(-k.size[1] // strip.columns))
        self.image, row = e.quotient(rest, -(-k.size[0] // strip.rows))
        self.row, self.column = e.r("mul.lo.u32", row, strip.rows), e.r("mul.lo.u32", column, strip.columns)
        first = TAPS * k.taps[0] + (k.taps[1] - 1) * 2 * strip.threads
        self.sums = e.r("add.u32", e.r("mad.lo.u32", self.thread, 4, self.shared), 4 * first)
        self.bytes = 8 if k.wide else 4  # of a pair

    def pointer(self, operand: int, row: str, column: str, size: tuple[int, int], width: int) -> str:
        """The address of the thread's pair of an operand's pixel; a pair has `width` bytes."""
        e = self.e
        line = e.r("mad.lo.s32", self.image, size[0], row)
        pixel = e.r("mad.lo.s32", line, size[1], column)
        at = e.r("mad.lo.s32", pixel, pairs(self.k), self.pair)
        return e.d("mad.wide.s32", at, width, e.d("cvta.to.global.u64", f"${operand}"))

    def cell(self, slot: int, column: int, half: int) -> int:
        """The offset of a sum, in bytes from the thread's first sum."""
        return 4 * self.strip.threads * (2 * (slot * self.strip.pitch(self.k) + column) + half)

    def make_tables(self) -> None:
        """Makes the tables: entry t of table n is the offset of tap t from tap (0, 0), with the ring at position n."""
        e, k = self.e, self.k
        place = e.r("mad.lo.u32", self.thread, 4, self.shared)
        number = e.r("mov.b32", self.thread)
        head = e.label()
        e.place(head)
        table, tap = e.quotient(number, TAPS)
        r, s = e.quotient(tap, k.taps[1])
        slot = e.r("sub.s32", r, table)
        slot = e.r("add.s32", slot, e.r("selp.b32", str(k.taps[0]), "0", e.p("setp.lt.s32", slot, 0)))
        cell = e.r("mad.lo.s32", slot, self.strip.pitch(k), s)
        none = e.p("setp.ge.u32", tap, math.prod(k.taps))
        cell = e.r("selp.b32", str(k.taps[0] * self.strip.pitch(k)), cell, none)
        e.op("st.shared.b32", f"[{place}]", e.r("mul.lo.u32", cell, 8 * self.strip.threads))
        e.op("add.u32", place, place, 4 * self.strip.threads)
        e.op("add.u32", number, number, self.strip.threads)
        e.op("bra", head, when=e.p("setp.lt.u32", number, TAPS * k.taps[0]))

    def registers(self) -> tuple[list[str], str]:
        """New registers for a pair of dy and its taps."""
        return [self.e.new() for _ in range(self.bytes // 4)], self.e.new()

    def load(self, when: str, dy: str, taps: str, column: int, into: tuple[list[str], str]) -> None:
        """Loads a pair of the row at the pointers, and its taps; without an output dy is 0 and the tap 255, no tap."""
        e, k = self.e, self.k
        words, tap = into
        for word in words:
            e.op("mov.b32", word, 0)
        e.op("mov.b32", tap, "0xffff")
        offset = column * pairs(k)
        name = "ld.global.nc.v2.b32" if k.wide else "ld.global.nc.b32"
        e.op(name, list(words) if k.wide else words[0], _address(dy, self.bytes * offset), when=when)
        e.op("ld.global.nc.u16", tap, _address(taps, 2 * offset), when=when)


def maximum_backward(k: Shape, strip: Strip) -> str:
    """Operands: dy, taps (uint8), dx, shared memory."""
    t = _Scatter(k, strip)
    e = t.e
    t.make_tables()
    for slot in range(k.taps[0]):
        for column in range(strip.columns):
            for half in range(2):
                e.op("st.shared.b32", f"[{t.sums}+{t.cell(slot, column, half)}]", 0)
    e.op("bar.sync", 0)
    end = e.label()
    e.op("bra", end, when="!" + t.works)

    # The first and the last row of outputs whose windows reach the tile. `last` may be negative: no such rows exist.
    last = e.r("add.s32", t.row, k.low[0] - k.taps[0] + 1)
    at = e.r("min.s32", e.r("add.s32", t.row, strip.rows - 1 + k.low[0]), k.out[0] - 1)
    first_column = e.r("add.s32", t.column, k.low[1] - k.taps[1] + 1)
    dy = t.pointer(0, at, first_column, k.out, t.bytes)
    taps = t.pointer(1, at, first_column, k.out, 2)
    columns = range(strip.columns + k.taps[1] - 1)
    places = [e.r("add.s32", first_column, b) for b in columns]
    held = [t.registers() for _ in columns]
    ahead = [t.registers() for _ in columns]
    for b in reversed(columns):
        t.load(e.p("setp.lt.u32", places[b], k.out[1]), dy, taps, b, held[b])
    # The row of dx that is complete after this row of outputs has been added.
    done = e.r("add.s32", at, k.taps[0] - 1 - k.low[0])
    dx = t.pointer(2, done, t.column, k.size, t.bytes)
    table = e.r("mov.b32", t.shared)
    row = 8 * strip.threads * strip.pitch(k)  # bytes of a row of the ring
    slot = e.r("mov.b32", (k.taps[0] - 1) * row)
    head = e.label()
    e.place(head)
    e.op('.pragma "nounroll"')
    offsets = [_offsets(t, tap, table) for _, tap in held]
    e.op("sub.s32", at, at, 1)
    e.op("add.s64", dy, dy, -t.bytes * pairs(k) * k.out[1])
    e.op("add.s64", taps, taps, -2 * pairs(k) * k.out[1])
    below = e.p("setp.lt.s32", at, e.r("max.s32", last, 0))
    limit = e.r("selp.b32", "0", str(k.out[1]), below)
    for b in reversed(columns):
        t.load(e.p("setp.lt.u32", places[b], limit), dy, taps, b, ahead[b])
    for b in reversed(columns):
        _add(t, held[b][0], offsets[b], b - k.taps[1] + 1)
    _flush(t, e.r("add.u32", t.sums, slot), done, dx)
    e.op("sub.s32", done, done, 1)
    e.op("add.s64", dx, dx, -t.bytes * pairs(k) * k.size[1])
    # The ring advances by one row, and the tables with it.
    first = e.p("setp.eq.u32", slot, 0)
    e.op("selp.b32", slot, str(k.taps[0] * row), slot, first)
    e.op("sub.s32", slot, slot, row)
    e.op("add.u32", table, table, 4 * TAPS)
    e.op("selp.b32", table, t.shared, table, first)
    for old, new in zip(held, ahead, strict=True):
        for name, value in zip([*old[0], old[1]], [*new[0], new[1]], strict=True):
            e.op("mov.b32", name, value)
    e.op("bra", head, when=e.p("setp.ge.s32", at, last))
    e.place(end)
    return e.text()


def _add(t: _Scatter, words: list[str], offsets: list[str], column: int) -> None:
    """Adds the two numbers of an output, each to the sum that its tap selects."""
    e = t.e
    places = [f"[{offset}+{t.cell(0, column, half)}]" for half, offset in enumerate(offsets)]
    sums = [e.f("mov.b32", e.r("ld.shared.b32", place)) for place in places]
    for place, total, value in zip(places, sums, e.unpack(t.k.dtype, words), strict=True):
        e.op("st.shared.b32", place, e.f("add.rn.f32", total, value))


def _offsets(t: _Scatter, tap: str, table: str) -> list[str]:
    """The addresses of the sums that an output's two channels are added to, relative to tap (0, 0) of its column."""
    e = t.e
    found = []
    for half in range(2):
        byte = e.r("prmt.b32", tap, "0", f"0x444{half}")
        entry = e.r("ld.shared.b32", f"[{e.r('mad.lo.u32', byte, 4, table)}]")
        found.append(e.r("add.u32", entry, t.sums))
    return found


def _flush(t: _Scatter, sums: str, done: str, dx: str) -> None:
    """Stores a row of the ring, if it belongs to the tile, and sets it to zero."""
    e, k, strip = t.e, t.k, t.strip
    after = e.r("min.u32", e.r("add.u32", t.row, strip.rows), k.size[0])
    mine = e.p("setp.lt.s32", done, after)
    limit = e.r("selp.b32", str(k.size[1]), "0", mine)
    for column in range(strip.columns):
        places = [f"[{sums}+{t.cell(0, column, half)}]" for half in range(2)]
        values = [e.f("mov.b32", e.r("ld.shared.b32", place)) for place in places]
        for place in places:
            e.op("st.shared.b32", place, 0)
        inside = e.p("setp.lt.u32", e.r("add.u32", t.column, column), limit)
        e.store(e.pack(k.dtype, values), _address(dx, t.bytes * pairs(k) * column), inside)
