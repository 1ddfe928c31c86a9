"""The PTX of the gradient in images: each pixel adds up the points that lie beside it.

Points are sorted by the cell that they lie in: the pixels between which they are, of which those at the border may be
outside. A pixel's taps are those of the points of 2^d cells around it ("nearest": of one). Cells that are neighbours
along the last axis are neighbours in the sorted order too, so a pixel's points lie in 2^(d-1) runs of that order.

    x[p] = Σ w[m, t] y[m] over the taps with i[m, t] = p

* `keys` gives each point the number of its cell; XLA sorts them, of more than 2^16 cells by the high bits.
* `cells` finds where the points of each cell begin in the sorted order, and writes records in this order: where a point
  is within its cell, and its samples, or if these are many its number. A pixel's threads, and those of its neighbours,
  read records that lie side by side; a point's coordinates, and samples of few channels, lie anywhere. Where low bits
  are left to sort, `begins` and `buckets` do so.
* `pixels` adds up.

Order of additions: the list of a pixel, which is its runs one behind the other, in pairs of neighbours, then pairs of
these, and so on, as in engine `xla`. A thread loads two points at once, adds them, and keeps the sums that wait for a
neighbour, at most one of 2^j taps for each j: of short lists in registers, of long ones in local memory.
"""

import dataclasses
import functools as ft
import itertools

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES
from jaxdnn._src.sampling.hopper.points_ptx import ONE, THREADS, ZERO, Emitter, Place, Problem

MANY = 8  # keys that one thread does not store alone
MOST_GROUPS = 2**16 - 1  # buckets, beside that of the points outside
MOST_LEFT = 7  # bits of a cell's number that are sorted by votes: a lane has up to four of a bucket's cells
EVERY = "0xffffffff"  # lane of a warp
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


def made_first(k: Problem) -> bool:
    """Whether records are made in the order of points and then sorted: one load of a vector in place of several loads
    of single numbers, each of which takes the time of as many lines of the cache as a warp has threads."""
    return samples_in_records(k) or inner(k) > 2


def left(k: Problem) -> int:
    """The low bits of a cell's number that XLA's sort leaves to `buckets`: its time is that of its keys' bytes.

    A point's number and these bits are one word.
    """
    bits = ((k.keys - 1) // MOST_GROUPS).bit_length()
    fits = bits <= MOST_LEFT and bits + _number_bits(k) <= 32
    return bits if fits else 0


def groups(k: Problem) -> int:
    """The buckets, as many cells each as the bits that are left tell apart; points outside have one more."""
    return -(-k.keys >> left(k))


def narrow(k: Problem) -> bool:
    """Whether 16 bits number the buckets."""
    return groups(k) < 2**16


def _number_bits(k: Problem) -> int:
    return (k.images * k.points - 1).bit_length()


@ft.lru_cache
def keys(k: Problem) -> str:
    """Of each point of all images the number of its cell's bucket among those of all images, which is `groups` where no
    tap is inside: one sort serves all images. And the number of each point, with the bits of its cell within the bucket
    above it. Operands: the grid, keys, numbers; or y, the grid, keys, numbers, and the records in the order of points.
    """
    e = Emitter(k)
    *given, found, numbers = map(e.operand, range(4 if made_first(k) else 3))
    grid = given[-1]
    point = e.number(k.images * k.points)
    key, _ = e.divided(point, k.points)
    inside, at_point = "", e.places(grid, point)
    for place, count in zip(at_point, k.cells, strict=True):
        cell = e.r("add.s32", e.first(e.fractions(place.value)[0], place.value), k.each - 1)
        inside = e.both(inside, e.p("setp.lt.u32", cell, count))
        key = e.r("mad.lo.s32", key, count, cell)
    number = point
    if bits := left(k):
        number = e.r("mad.lo.s32", e.r("and.b32", key, 2**bits - 1), 1 << _number_bits(k), point)
        key = e.r("shr.u32", key, bits)
    key = e.r("selp.b32", key, str(groups(k)), inside)
    size = 2 if narrow(k) else 4
    at = e.d("mad.wide.u32", point, size, found)
    if narrow(k):
        half = e.new("h")
        e.op("cvt.u16.u32", half, key)
        e.op("st.global.b16", f"[{at}+0]", half)
    else:
        e.op("st.global.b32", f"[{at}+0]", key)
    e.op("st.global.b32", f"[{e.d('mad.wide.u32', point, 4, numbers)}+0]", number)
    if made_first(k):
        _store_record(e, _record(e, point, at_point, given[0]), point, e.operand(4))
    return e.finished()


def _begins(e: Emitter, keys: str, places: str) -> str:
    """Stores for every bucket, and one behind the last, the first place in the sorted order of a point in it or in a
    later one; the thread's own place in that order.

    A thread has an entry, and stores its place for the keys of which it is the first: those above the key before it, up
    to its own. Many of them are stored by all lanes of the warp.
    """
    k, entries = e.k, e.k.images * e.k.points
    size = 2 if narrow(k) else 4
    thread = e.r("mov.u32", "%tid.x")
    place = e.r("mad.lo.s32", e.r("mov.u32", "%ctaid.x"), THREADS, thread)
    at = e.d("mad.wide.u32", place, size, keys)
    first, stop = e.r("mov.b32", 0), e.r("mov.b32", 0)  # none, of threads beyond all entries

    def read(to: str, offset: int, when: str) -> None:
        if narrow(k):
            half = e.new("h")
            e.op("ld.global.nc.b16", half, f"[{at}+{offset}]", when=when)
            e.op("cvt.u32.u16", to, half, when=when)
        else:
            e.op("ld.global.nc.b32", to, f"[{at}+{offset}]", when=when)
        e.op("add.s32", to, to, 1, when=when)

    e.op("mov.b32", stop, groups(k) + 1, when=e.p("setp.eq.u32", place, entries))
    read(stop, 0, e.p("setp.lt.u32", place, entries))
    read(first, -size, e.both(e.p("setp.gt.s32", place, 0), e.p("setp.lt.u32", place, entries + 1)))

    def stores(first: str, stop: str, step: int, place: str) -> None:
        with e.loop(first, stop, step) as key:
            e.op("st.global.b32", f"[{e.d('mad.wide.u32', key, 4, places)}+0]", place)

    count = e.r("sub.s32", stop, first)
    with e.only_if("setp.lt.s32", count, MANY):
        stores(first, stop, 1, place)
    lanes = e.r("vote.sync.ballot.b32", e.p("setp.ge.s32", count, MANY), EVERY)
    again, done = e.label(), e.label()
    e.place(again)
    e.op("bra", done, when=e.p("setp.eq.s32", lanes, 0))
    lane = e.r("bfind.u32", lanes)
    own = [e.r("shfl.sync.idx.b32", v, lane, 31, EVERY) for v in (first, stop, place)]
    stores(e.r("add.s32", own[0], e.r("and.b32", thread, 31)), own[1], 32, own[2])
    e.op("xor.b32", lanes, lanes, e.r("shl.b32", 1, lane))
    e.op("bra", again)
    e.place(done)
    return place


@ft.lru_cache
def begins(k: Problem) -> str:
    """Where the points of each bucket begin in the sorted order. Operands: the sorted keys, the places."""
    e = Emitter(k)
    _begins(e, *map(e.operand, range(2)))
    return e.finished()


@ft.lru_cache
def cells(k: Problem) -> str:
    """Where the points of each cell begin, where a bucket is a cell; and the records.

    Operands: the sorted keys, their points, what `_move` reads, the places, the records.
    """
    e = Emitter(k)
    keys, order, source, places, records = map(e.operand, range(5))
    place = _begins(e, keys, places)
    e.op("bra", e.end, when=e.p("setp.ge.u32", place, k.images * k.points))
    point = e.new()
    e.op("ld.global.nc.b32", point, f"[{e.d('mad.wide.u32', place, 4, order)}+0]")
    _move(e, point, source, records, place)
    return e.finished()


def _move(e: Emitter, point: str, source: str, records: str, place: str) -> None:
    """Writes a point's record to a place of the sorted order.

    source: the records in the order of points, or where these are not made first the grid.
    """
    if made_first(e.k):
        words = e.load_vector("global.nc", f"[{e.d('mad.wide.u32', point, VECTOR_BYTES, source)}+0]")
    else:
        words = _record(e, point, e.places(source, point), "")
    _store_record(e, words, place, records)


def _store_record(e: Emitter, words: list[str], place: str, records: str) -> None:
    e.op("st.global.v4.b32", f"[{e.d('mad.wide.u32', place, VECTOR_BYTES, records)}+0]", words)


def _record(e: Emitter, point: str, at_point: list[Place], y: str) -> list[str]:
    """The words of a point's record."""
    k = e.k
    words: list[str] = []
    if k.each > 1:
        words += [e.r("mov.b32", e.fractions(at.value)[1][1]) for at in at_point]
    if samples_in_records(k):
        values = e.load(k.y, e.d("mad.wide.u32", e.r("mul.lo.s32", point, k.channels), SIZES[k.y], y), k.channels)
        words += e.pack(k.y, values + [ZERO] * (SIZES[k.y] == 2 and len(values) % 2))
    else:
        words.append(point)
    return words + [e.r("mov.b32", 0) for _ in range(4 - len(words))]


@ft.lru_cache
def buckets(k: Problem) -> str:
    """Sorts the points of each bucket by the rest of their cells' numbers, and writes where those of each cell begin,
    and the records, but none of points outside.

    A warp has a bucket, and each lane every 32nd of its cells. It counts the points of its cells, 32 points at a time:
    a vote on each bit of the points' cells tells every lane which of the 32 are in a cell. Then it places them, in
    their order. Operands: where buckets begin, the points in the order of buckets, what `_move` reads, places,
    records.
    """
    e, bits = Emitter(k), left(k)
    own_cells = max(1, 2**bits // 32)
    begins, order, source, places, records = map(e.operand, range(5))
    thread = e.r("mov.u32", "%tid.x")
    lane = e.r("and.b32", thread, 31)
    bucket = e.r("shr.u32", e.r("mad.lo.s32", e.r("mov.u32", "%ctaid.x"), THREADS, thread), 5)
    e.op("bra", e.end, when=e.p("setp.ge.u32", bucket, groups(k) + 1))
    at = e.d("mad.wide.u32", bucket, 4, begins)
    first, stop = e.new(), e.new()
    e.op("ld.global.nc.b32", first, f"[{at}+0]")
    with e.only_if("setp.eq.s32", bucket, groups(k)):
        e.op("st.global.b32", f"[{places}+{4 * k.keys}]", first, when=e.p("setp.eq.s32", lane, 0))
        e.op("bra", e.end)
    e.op("ld.global.nc.b32", stop, f"[{at}+4]")
    # All bits where the word's is 0, else none.
    negated = lambda word, bit: e.r("sub.s32", e.r("and.b32", e.r("shr.u32", word, bit), 1), 1)
    of_lane = [negated(lane, bit) for bit in range(min(bits, 5))]

    def joined(masks: list[str], flips: list[str]) -> str:
        """Which lanes agree with all of the bits that are not flipped."""
        found = masks[0]
        for mask, flip in zip(masks[1:], flips, strict=True):
            found = e.r("and.b32", found, e.r("xor.b32", mask, flip))
        return found

    def read(start: str) -> tuple[str, str, str, list[str]]:
        """A lane's word, whether it has one, its cell in the bucket; which lanes have one, and each cell bit by bit."""
        place = e.r("add.s32", start, lane)
        here, word = e.p("setp.lt.u32", place, stop), e.r("mov.b32", 0)
        e.op("ld.global.nc.b32", word, f"[{e.d('mad.wide.u32', place, 4, order)}+0]", when=here)
        cell = e.r("shr.u32", word, _number_bits(k))
        vote = lambda holds: e.r("vote.sync.ballot.b32", holds, EVERY)
        masks = [vote(here)]
        for bit in range(bits):  # each predicate with its vote: there are seven registers for them
            masks.append(vote(e.p("setp.ne.s32", e.r("and.b32", cell, 1 << bit), 0)))
        return word, here, cell, masks

    def add(to: list[str], masks: list[str]) -> None:
        """Counts the lanes that are in each of the lane's own cells."""
        for i, total in enumerate(to):
            flips = [*of_lane, *(str(0 if i >> bit & 1 else EVERY) for bit in range(bits - len(of_lane)))]
            e.op("add.s32", total, total, e.r("popc.b32", joined(masks, flips)))

    next_places = [e.r("mov.b32", 0) for _ in range(own_cells)]
    with e.loop(first, stop, 32) as start:
        add(next_places, read(start)[3])
    before = first
    for i, count in enumerate(next_places):
        total = e.r("mov.b32", count)
        for distance in (1, 2, 4, 8, 16):
            other = e.r("shfl.sync.idx.b32", total, e.r("sub.s32", lane, distance), 31, EVERY)
            e.op("add.s32", total, total, other, when=e.p("setp.ge.s32", lane, distance))
        begin = e.r("add.s32", before, e.r("sub.s32", total, count))
        before = e.r("add.s32", before, e.r("shfl.sync.idx.b32", total, 31, 31, EVERY))
        e.op("mov.b32", count, begin)
        cell = e.r("add.s32", e.r("mad.lo.s32", bucket, 2**bits, lane), 32 * i)
        known = e.both(e.p("setp.lt.u32", cell, k.keys), e.p("setp.lt.u32", lane, 2**bits) if bits < 5 else "")
        e.op("st.global.b32", f"[{e.d('mad.wide.u32', cell, 4, places)}+0]", begin, when=known)
    earlier = e.r("sub.s32", e.r("shl.b32", 1, lane), 1)
    with e.loop(first, stop, 32) as start:
        word, here, cell, masks = read(start)
        alike = joined(masks, [negated(cell, bit) for bit in range(bits)])
        place = e.r("mov.b32", 0)
        for i, following in enumerate(next_places):
            found = e.r("shfl.sync.idx.b32", following, e.r("and.b32", cell, 31), 31, EVERY)
            own = e.p("setp.eq.s32", e.r("shr.u32", cell, 5), i)
            e.op("selp.b32", place, found, place, own)
        place = e.r("add.s32", place, e.r("popc.b32", e.r("and.b32", alike, earlier)))
        add(next_places, masks)
        skip = e.label()
        e.op("bra", skip, when="!" + here)
        point = e.r("and.b32", word, 2 ** _number_bits(k) - 1)
        _move(e, point, source, records, place)
        e.place(skip)
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
