"""The PTX of the gradient in images: each pixel adds up the points that lie beside it.

Points are sorted by the cell that they lie in: the pixels between which they are, of which those at the border may be
outside. A pixel's taps are those of the points of 2^d cells around it ("nearest": of one). Cells that are neighbours
along the last axis are neighbours in the sorted order too, so a pixel's points lie in 2^(d-1) runs of that order.

    x[p] = Σ w[m, t] y[m] over the taps with i[m, t] = p

* `keys` gives each point the number of its cell; XLA sorts them.
* `cells` finds where the points of each cell begin in the sorted order, and writes records in this order: where a point
  is within its cell, and its samples, or if these are many its number. A pixel's threads, and those of its neighbours,
  read records that lie side by side; a point's coordinates, and samples of few channels, lie anywhere.
* `pixels` adds up.

Order of additions: the list of a pixel, which is its runs one behind the other, in pairs of neighbours, then pairs of
these, and so on, as in engine `xla`. A thread loads two points at once, adds them, and keeps the sums that wait for a
neighbour, at most one of 2^j taps for each j: of short lists in registers, of long ones in local memory.
"""

import dataclasses
import functools as ft
import itertools

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES
from jaxdnn._src.sampling.hopper.points_ptx import ONE, THREADS, ZERO, Emitter, Problem

MANY = 8  # keys that one thread does not store alone
LEVELS = 4  # of sums of pairs in registers: those of lists of fewer than 2^(LEVELS + 1) taps


def levels(k: Problem) -> int:
    """How many sums of pairs may wait: a point is at most once in a pixel's list."""
    return max(1, ((k.points + 1) // 2).bit_length())


def inner(k: Problem) -> int:
    """The numbers that say where a point is within its cell."""
    return k.axes if k.each > 1 else 0


def samples_in_records(k: Problem) -> bool:
    """Whether a record of four words has a point's samples, all of which one thread reads, and not its number."""
    return k.units == 1 and inner(k) * 4 + k.channels * SIZES[k.y] <= VECTOR_BYTES


@ft.lru_cache
def keys(k: Problem) -> str:
    """Of each point of all images the number of its cell among those of all images, which is `Problem.keys` where no
    tap is inside: one sort serves all images. And the number of each point. Operands: the grid, keys, numbers."""
    e = Emitter(k)
    grid, found, numbers = map(e.operand, range(3))
    point = e.number(k.images * k.points)
    key, _ = e.divided(point, k.points)
    inside = ""
    for place, count in zip(e.places(grid, point), k.cells, strict=True):
        cell = e.r("add.s32", e.first(e.fractions(place.value)[0], place.value), k.each - 1)
        inside = e.both(inside, e.p("setp.lt.u32", cell, count))
        key = e.r("mad.lo.s32", key, count, cell)
    key = e.r("selp.b32", key, str(k.keys), inside)
    for to, v in ((found, key), (numbers, point)):
        e.op("st.global.b32", f"[{e.d('mad.wide.u32', point, 4, to)}+0]", v)
    return e.finished()


@ft.lru_cache
def cells(k: Problem) -> str:
    """The records; and for every cell, and one behind the last, the first place in the sorted order of a point in it or
    in a later one.

    A thread has an entry, and stores its place for the keys of which it is the first: those above the key before it, up
    to its own. Many of them are stored by all lanes of the warp. Operands: the sorted keys, their points, y, the grid,
    the places, the records.
    """
    e, entries = Emitter(k), k.images * k.points
    keys, order, y, grid, places, records = map(e.operand, range(6))
    thread = e.r("mov.u32", "%tid.x")
    place = e.r("mad.lo.s32", e.r("mov.u32", "%ctaid.x"), THREADS, thread)
    at = e.d("mad.wide.u32", place, 4, keys)
    first, stop = e.r("mov.b32", 0), e.r("mov.b32", 0)  # none, of threads beyond all entries
    e.op("mov.b32", stop, k.keys + 1, when=e.p("setp.eq.u32", place, entries))
    here = e.p("setp.lt.u32", place, entries)
    e.op("ld.global.nc.b32", stop, f"[{at}+0]", when=here)
    e.op("add.s32", stop, stop, 1, when=here)
    after = e.both(e.p("setp.gt.s32", place, 0), e.p("setp.lt.u32", place, entries + 1))
    e.op("ld.global.nc.b32", first, f"[{at}+-4]", when=after)
    e.op("add.s32", first, first, 1, when=after)

    def stores(first: str, stop: str, step: int, place: str) -> None:
        with e.loop(first, stop, step) as key:
            e.op("st.global.b32", f"[{e.d('mad.wide.u32', key, 4, places)}+0]", place)

    count = e.r("sub.s32", stop, first)
    with e.only_if("setp.lt.s32", count, MANY):
        stores(first, stop, 1, place)
    every = "0xffffffff"
    lanes = e.r("vote.sync.ballot.b32", e.p("setp.ge.s32", count, MANY), every)
    again, done = e.label(), e.label()
    e.place(again)
    e.op("bra", done, when=e.p("setp.eq.s32", lanes, 0))
    lane = e.r("bfind.u32", lanes)
    own = [e.r("shfl.sync.idx.b32", v, lane, 31, every) for v in (first, stop, place)]
    stores(e.r("add.s32", own[0], e.r("and.b32", thread, 31)), own[1], 32, own[2])
    e.op("xor.b32", lanes, lanes, e.r("shl.b32", 1, lane))
    e.op("bra", again)
    e.place(done)
    e.op("bra", e.end, when=e.p("setp.ge.u32", place, entries))
    point = e.new()
    e.op("ld.global.nc.b32", point, f"[{e.d('mad.wide.u32', place, 4, order)}+0]")
    words: list[str] = []
    if k.each > 1:
        words += [e.r("mov.b32", e.fractions(at.value)[1][1]) for at in e.places(grid, point)]
    if samples_in_records(k):
        values = e.load(k.y, e.d("mad.wide.u32", e.r("mul.lo.s32", point, k.channels), SIZES[k.y], y), k.channels)
        words += e.pack(k.y, values + [ZERO] * (SIZES[k.y] == 2 and len(values) % 2))
    else:
        words.append(point)
    words += [e.r("mov.b32", 0) for _ in range(4 - len(words))]
    e.op("st.global.v4.b32", f"[{e.d('mad.wide.u32', place, VECTOR_BYTES, records)}+0]", words)
    return e.finished()


@ft.lru_cache
def pixels(k: Problem) -> str:
    """Operands: y, the cells' first places, the records, x."""
    e = Emitter(k)
    y, begins, records, x = map(e.operand, range(4))
    number = e.number(k.images * k.pixels * k.units)
    pixel, part = e.divided(number, k.units)
    start = e.r("mul.lo.s32", part, k.unit)
    runs, length = _runs(e, pixel, begins)
    sums = _Sums(e)
    with e.loop(0, length, 2) as place:
        after = e.r("add.s32", place, 1)
        two = e.p("setp.lt.u32", after, length)
        # Behind the last one, that one once more: its loads need no guard.
        places = [place, e.r("selp.b32", after, place, two)]
        near, far = [_term(e, runs, at, start, y, records) for at in places]
        sums.add([e.f("selp.f32", e.f("add.rn.f32", a, b), a, two) for a, b in zip(near, far, strict=True)])
    at = e.d("mad.wide.u32", e.r("mad.lo.s32", pixel, k.channels, start), SIZES[k.x], x)
    e.store(k.x, at, sums.total())
    return e.finished()


@dataclasses.dataclass(frozen=True)
class _Run:
    """Where a run begins in a pixel's list, and where in the sorted order the list would begin if it were of this run;
    the place in the list of its second cell; the taps along all axes but the last, as bits above the last one's."""

    first: str
    base: str
    second: str
    taps: int


def _runs(e: Emitter, pixel: str, begins: str) -> tuple[list[_Run], str]:
    """The runs of a pixel's list, and its length."""
    k = e.k
    rest, at = pixel, []
    for size in k.sizes[::-1]:
        rest, own = e.divided(rest, size)
        at.insert(0, own)
    # Tap t of a point is at its cell + t - 1 along an axis, where a cell's number begins at 0 before the first pixel.
    found, length = [], e.r("mov.b32", 0)
    for cells in itertools.product(range(k.each), repeat=k.axes - 1):
        key, bits = rest, 0
        for own, further, count in zip(at, (*cells, 0), k.cells, strict=True):
            key = e.r("mad.lo.s32", key, count, e.r("add.s32", own, further) if further else own)
        for further in cells:
            bits = 2 * bits + (k.each - 1 - further)
        base = e.d("mad.wide.u32", key, 4, begins)
        places = [e.new() for _ in range(k.each + 1)]
        for i, place in enumerate(places):
            e.op("ld.global.nc.b32", place, f"[{base}+{4 * i}]")
        begin, *_, stop = places
        shift = e.r("sub.s32", begin, length)
        found.append(_Run(length, shift, e.r("sub.s32", places[1], shift), 2 * bits))
        length = e.r("add.s32", length, e.r("sub.s32", stop, begin))
    return found, length


def _term(e: Emitter, runs: list[_Run], place: str, start: str, y: str, records: str) -> list[str]:
    """The product of the entry at a place of a pixel's list; 0 where its weight is 0."""
    k = e.k
    base, second, taps = (e.r("mov.b32", v) for v in (runs[0].base, runs[0].second, runs[0].taps))
    for run in runs[1:]:
        beyond = e.p("setp.ge.u32", place, run.first)
        for to, v in ((base, run.base), (second, run.second), (taps, run.taps)):
            e.op("mov.b32", to, v, when=beyond)
    record = [e.new() for _ in range(4)]
    at = e.d("mad.wide.u32", e.r("add.s32", place, base), VECTOR_BYTES, records)
    e.op("ld.global.nc.v4.b32", record, f"[{at}+0]")
    rest = record[inner(k) :]
    if samples_in_records(k):
        values = e.unpack(k.y, rest)[: k.unit]
    else:
        at = e.d("mad.wide.u32", e.r("mad.lo.s32", rest[0], k.channels, start), SIZES[k.y], y)
        values = e.load(k.y, at, k.unit)
    if k.each == 1:
        return values  # of weight 1
    outer = [e.p("setp.ne.s32", e.r("and.b32", taps, 1 << (k.axes - 1 - axis)), 0) for axis in range(k.axes - 1)]
    bits = [*outer, e.p("setp.lt.u32", place, second)]  # the second tap is that of the first cell
    factors = []
    for word, bit in zip(record[: k.axes], bits, strict=True):
        f = e.f("mov.b32", word)
        factors.append(e.f("selp.f32", f, e.f("sub.rn.f32", ONE, f), bit))
    weight = ft.reduce(lambda a, b: e.f("mul.rn.f32", a, b), factors)
    none = e.p("setp.eq.f32", weight, ZERO)
    return [e.f("selp.f32", ZERO, e.f("mul.rn.f32", weight, v), none) for v in values]


class _Sums:
    """The sums that wait for a neighbour: bit j of `count` says whether one of 2^j pairs does."""

    def __init__(self, e: Emitter) -> None:
        self.e, self.count = e, e.r("mov.b32", 0)
        k = e.k
        self.kept = [[e.f("mov.f32", ZERO) for _ in range(k.unit)] for _ in range(min(LEVELS, levels(k)))]
        self.more = levels(k) - len(self.kept)
        self.bytes = 4 * k.unit
        if self.more:
            e.declare(f".local .align 16 .b8 more[{self.more * self.bytes}];")
            self.local = e.d("mov.b64", "more")

    def add(self, values: list[str]) -> None:
        """Adds a pair: it joins the sums that wait as a carry joins the digits of a binary number."""
        e, placed = self.e, self.e.label()
        carry = list(values)
        for level, kept in enumerate(self.kept):
            with e.only_if("setp.eq.s32", e.r("and.b32", self.count, 1 << level), 0):
                for to, v in zip(kept, carry, strict=True):
                    e.op("mov.f32", to, v)
                e.op("bra", placed)
            for v, earlier in zip(carry, kept, strict=True):
                e.op("add.rn.f32", v, earlier, v)
        if self.more:
            self._add_more(carry, placed)
        e.place(placed)
        e.op("add.s32", self.count, self.count, 1)

    def _add_more(self, carry: list[str], placed: str) -> None:
        e = self.e
        digits, at = e.r("shr.u32", self.count, len(self.kept)), e.d("mov.b64", self.local)
        again = e.label()
        e.place(again)
        with e.only_if("setp.eq.s32", e.r("and.b32", digits, 1), 0):
            for i, v in enumerate(carry):
                e.op("st.local.b32", f"[{at}+{4 * i}]", v)
            e.op("bra", placed)
        self._join(carry, at)
        e.op("shr.u32", digits, digits, 1)
        e.op("add.s64", at, at, self.bytes)
        e.op("bra", again)

    def _join(self, carry: list[str], at: str) -> None:
        """Adds a sum in local memory, of earlier taps."""
        e = self.e
        for i, v in enumerate(carry):
            earlier = e.new("f")
            e.op("ld.local.b32", earlier, f"[{at}+{4 * i}]")
            e.op("add.rn.f32", v, earlier, v)

    def total(self) -> list[str]:
        """The sum of all that waits, the latest first; of none 0."""
        e = self.e
        found = [e.f("mov.f32", ZERO) for _ in range(e.k.unit)]
        for level, kept in enumerate(self.kept):
            waits = e.p("setp.ne.s32", e.r("and.b32", self.count, 1 << level), 0)
            later = e.p("setp.ne.s32", e.r("and.b32", self.count, (1 << level) - 1), 0)
            for v, earlier in zip(found, kept, strict=True):
                e.op("mov.f32", v, e.f("selp.f32", e.f("add.rn.f32", earlier, v), earlier, later), when=waits)
        if self.more:
            self._total_of_more(found)
        return found

    def _total_of_more(self, found: list[str]) -> None:
        e = self.e
        digits, at = e.r("shr.u32", self.count, len(self.kept)), e.d("mov.b64", self.local)
        later = e.r("and.b32", self.count, (1 << len(self.kept)) - 1)  # 0 where nothing later waits
        again, end = e.label(), e.label()
        e.place(again)
        e.op("bra", end, when=e.p("setp.eq.s32", digits, 0))
        with e.only_if("setp.ne.s32", e.r("and.b32", digits, 1), 0):
            some = e.p("setp.ne.s32", later, 0)
            for i, v in enumerate(found):
                earlier = e.new("f")
                e.op("ld.local.b32", earlier, f"[{at}+{4 * i}]")
                e.op("selp.f32", v, e.f("add.rn.f32", earlier, v), earlier, some)
            e.op("mov.b32", later, 1)
        e.op("shr.u32", digits, digits, 1)
        e.op("add.s64", at, at, self.bytes)
        e.op("bra", again)
        e.place(end)
