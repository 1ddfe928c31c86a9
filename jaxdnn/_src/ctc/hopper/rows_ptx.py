"""The PTX of CTC's passes over scores, a row of V classes in the registers of a warp or a block: what a lattice's
states emit, and the gradient in the scores.

Element i of a row belongs to thread i mod G of the row's G threads. So the tree by halves of `core.trees`, of a row
padded to a power of two, adds a thread's own elements first, and then those of threads G / 2 apart, G / 4 apart, ...
Rows too long for registers are read again for each pass, their sum in the same order. Blocks are persistent: while a
row's exponentials are computed, the next row is loaded.

Of the gradient's labels, what those of a class have in common is added in shared memory, where labels lie in the order
of their classes: rounds of additions at distances 1, 2, 4, ..., of labels whose place among those of their class is a
multiple of twice the distance. Then the row is stored as if there were no labels, and those classes again.

It is PTX text, which an empty Pallas kernel embeds: Mosaic may contract a product and a sum.
"""

import contextlib
import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxdnn._src.ctc.hopper import numbers_ptx as numbers
from jaxdnn._src.ctc.hopper.numbers_ptx import NOTHING
from jaxdnn._src.hopper import MULTIPROCESSORS
from jaxdnn._src.hopper.ptx import SIZES, Emitter, real

LANES = 32
GROUPS = (32, 128, 256, 512, 1024)  # threads of a row
SLOTS = 40  # the most elements of a thread that are kept in its registers
UNROLLED = 4  # the most labels of a thread that are loaded at once
LOWEST = {"f32": "0fFF800000", "bf16": 0xFF80, "f16": 0xFC00}  # -inf


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rows are partitioned.

    Attributes:
      sequences, steps, classes, labels: B, T, V and L; dtype: of scores, a value of `ptx.NAMES`.
      group: G; softmax: whether the scores are normalised; multiprocessors: of the device.
    """

    sequences: int
    steps: int
    classes: int
    labels: int
    dtype: str
    group: int
    softmax: bool = True
    multiprocessors: int = MULTIPROCESSORS

    @property
    def pairs(self) -> int:
        return self.labels + 1

    @property
    def slots(self) -> int:
        """Elements of a thread."""
        return -(-self.classes // self.group)

    @property
    def kept(self) -> bool:
        """Whether a row stays in registers, of which each of a thousand threads has 64."""
        return self.slots <= (SLOTS if self.group < GROUPS[-1] else SLOTS // 2)

    @property
    def rows(self) -> int:
        """Of a block."""
        return 4 if self.group == LANES else 1

    @property
    def threads(self) -> int:
        return self.rows * self.group

    @property
    def blocks(self) -> int:
        """As many as run at once, or as rows need."""
        of_thread = 40 + 2 * (self.slots if self.kept else SLOTS)  # registers
        at_once = max(1, min(2048, (1 << 16) // of_thread) // self.threads)
        return min(-(-self.sequences * self.steps // self.rows), self.multiprocessors * at_once)

    @property
    def floats(self) -> int:
        """Of shared memory: those that go between warps, and of a gradient's labels."""
        return self.group + LANES + self.rows * self.pairs


def plan(sequences: int, steps: int, classes: int, labels: int, dtype: str, softmax: bool = True) -> Plan:
    """The plan with the fewest threads of a row that keep it in their registers, or with the most threads."""
    found = [Plan(sequences, steps, classes, labels, dtype, group, softmax, MULTIPROCESSORS) for group in GROUPS]
    return next((plan for plan in found if plan.kept), found[-1])


@ft.lru_cache
def emissions(plan: Plan) -> str:
    """The PTX. Operands: scores (B, T, V), symbols (B, L + 1), lengths (B, 2), and two results; then shared memory.

    Symbols are the classes of the blank and of the labels. Results: what is emitted, as `lattice_ptx` takes it, and
    (B, T) the largest score of each step. Beyond a sequence's steps nothing is stored.
    """
    k = _Rows(plan, ("x", "symbols", "lengths", "emitted", "largest"))
    e = k.e
    with k.each_row():
        symbols = e.d("mad.wide.u32", k.sequence, 4 * plan.pairs, k.base["symbols"])
        symbol = k.ahead(lambda i, when: k.word(e.d("mad.wide.u32", i, 4, symbols), when))
        k.read(dead=k.after)
        e.op("st.global.f32", f"[{e.d('mad.wide.u32', k.row, 4, k.base['largest'])}]", k.largest, when=k.first)
        row = e.d("mad.wide.u32", k.row, 8 * plan.pairs, k.base["emitted"])
        for i, of_class in k.each(symbol):
            w, n = numbers.exponential(e, k.beside_largest(k.score(of_class)))
            at = e.d("mad.wide.u32", i, 4, row)
            e.op("st.global.f32", f"[{at}]", e.f("mul.rn.f32", w, k.inverse))
            e.op("st.global.b32", f"[{at}+{4 * plan.pairs}]", n)
    return e.text()


@ft.lru_cache
def gradient(plan: Plan) -> str:
    """The PTX. Operands: cotangents (B,), scores, posteriors (B, T, L + 1), losses (B,), lengths (B, 2), places, and
    the result (B, T, V); then shared memory. Without a softmax there are no scores.

    Places are (B, L + 1, 4): of the blank and of each label its place among all by class, its class, how many of its
    class come before, and how many are left with it. The second length is the largest of the latter.
    """
    names = ("cotangents", *(["x"] if plan.softmax else []), "posteriors", "losses", "lengths", "places", "out")
    k = _Rows(plan, names)
    e = k.e
    with k.each_row():
        k.out = k.of_row("out")
        places = e.d("mad.wide.u32", k.sequence, 16 * plan.pairs, k.base["places"])
        posteriors = e.d("mad.wide.u32", k.row, 4 * plan.pairs, k.base["posteriors"])
        place = k.ahead(lambda i, when: k.vector(e.d("mad.wide.u32", i, 16, places), when))
        share = k.ahead(lambda i, when: k.word(e.d("mad.wide.u32", i, 4, posteriors), when))
        most, loss = k.of_sequence("lengths", 8, 4), e.f("mov.b32", k.of_sequence("losses", 4))
        factor = e.f("mov.b32", k.of_sequence("cotangents", 4))
        factor = e.f("selp.f32", loss, factor, e.p("setp.nan.f32", loss, loss))
        dead = e.label()
        if plan.softmax:
            k.read(dead)
        else:
            e.op("bra", dead, when=k.late)
        e.op("bra", dead, when=e.p("setp.eq.f32", e.f("abs.f32", loss), real(math.inf)))
        if plan.softmax:
            k.store_all(lambda i: e.f("mul.rn.f32", factor, e.f("mul.rn.f32", k.share(i), k.inverse)))
        else:
            nothing = e.f("mul.rn.f32", factor, real(-0.0))
            k.store_all(lambda i: nothing)
        k.add_labels(place, share, most)
        for _, (at, of_class, before, _) in k.each(place):
            first = e.p("setp.eq.s32", before, 0)
            with e.only_if("setp.ge.s32", e.r("selp.b32", of_class, -1, first), 0):
                found = e.f("neg.f32", k.counted(at))
                if plan.softmax:
                    own = numbers.small_exponential(e, k.beside_largest(k.score(of_class)))
                    found = e.f("add.rn.f32", e.f("mul.rn.f32", own, k.inverse), found)
                k.store(e.d("mad.wide.u32", of_class, SIZES[plan.dtype], k.out), 0, e.f("mul.rn.f32", factor, found))
        e.op("bra", k.after)
        e.place(dead)
        nothing = e.f("mov.f32", NOTHING)
        k.store_all(lambda i: nothing)
    return e.text()


@dataclasses.dataclass(frozen=True)
class _Ahead:
    """What a thread loads of each of its labels: all of it at once, `found`, or one by one."""

    load: Callable[[str, str], Any]
    found: tuple[Any, ...]


class _Rows:
    """The rows of a block: who has which elements, loads, and what is common to all threads of a row."""

    def __init__(self, plan: Plan, names: tuple[str, ...]) -> None:
        self.plan = plan
        e = self.e = Emitter()
        self.base = {name: e.d("mov.b64", f"${i}") for i, name in enumerate(names)}
        self.shared = e.r("mov.b32", f"${len(names)}")
        thread, self.row = e.r("mov.u32", "%tid.x"), e.r("mov.u32", "%ctaid.x")
        self.member, group = thread, "0"
        if plan.rows > 1:
            self.member, group = e.r("and.b32", thread, LANES - 1), e.r("shr.u32", thread, 5)
            self.row = e.scaled(self.row, plan.rows, group)
        self.sums = e.r("add.s32", e.r("mad.lo.s32", group, 4 * plan.pairs, self.shared), 4 * (plan.group + LANES))
        self.first = e.p("setp.eq.s32", self.member, 0)
        last = (plan.slots - 1) * plan.group
        self.in_last = e.p("setp.lt.s32", self.member, plan.classes - last) if plan.classes % plan.group else ""
        self.kept = plan.kept and "x" in names
        kind = "f" if plan.dtype == "f32" else "h"
        self.coming = [e.new(kind) for _ in range(plan.slots)] if self.kept else []
        for value in self.coming:  # of rows that are not read
            e.op("mov.f32" if kind == "f" else "mov.b16", value, LOWEST[plan.dtype])
        self.out = self.after = ""

    @contextlib.contextmanager
    def each_row(self) -> Iterator[None]:
        """What is emitted within is done for each row; `after` is where the next one begins."""
        e, plan = self.e, self.plan
        again, end = e.label(), e.label()
        self.after = e.label()
        if self.kept:
            self._load_coming(self.row)
        e.place(again)
        e.op("bra", end, when=e.p("setp.ge.s32", self.row, plan.sequences * plan.steps))
        self.sequence, self.late = self._place_in_time(self.row)
        yield
        e.place(self.after)
        self.sync()  # shared memory is used again
        e.op("add.s32", self.row, self.row, plan.blocks * plan.rows)
        e.op("bra", again)
        e.place(end)

    def _place_in_time(self, row: str, when: str = "") -> tuple[str, str]:
        """A row's sequence, and whether it lies beyond the sequence's steps."""
        e, steps = self.e, self.plan.steps
        sequence = e.r("div.u32", row, steps)
        time = e.r("sub.s32", row, e.r("mul.lo.s32", sequence, steps))
        count = e.r("mov.b32", 0)
        e.op("ld.global.nc.b32", count, f"[{e.d('mad.wide.u32', sequence, 8, self.base['lengths'])}]", when=when)
        return sequence, e.p("setp.ge.s32", time, count)

    def _load_coming(self, row: str) -> None:
        """Loads a row's scores, if there is such a row, and it is read."""
        e, plan = self.e, self.plan
        exists = e.p("setp.lt.s32", row, plan.sequences * plan.steps)
        _, late = self._place_in_time(row, exists)
        in_time = e.p("not.pred", late)
        own = e.d("mad.wide.u32", self.member, SIZES[plan.dtype], self._at("x", row))
        for i, target in enumerate(self.coming):
            self._load(target, own, i * plan.group * SIZES[plan.dtype], self._of_slot(i), in_time)

    # ---- addresses, loads and stores ---------------------------------------------------------------------------------

    def _at(self, name: str, row: str) -> str:
        """The address of a row of an array (B, T, V)."""
        return self.e.d("mad.wide.u32", row, self.plan.classes * SIZES[self.plan.dtype], self.base[name])

    def of_row(self, name: str) -> str:
        return self._at(name, self.row)

    def of_sequence(self, name: str, size: int, offset: int = 0) -> str:
        """A word of the row's sequence, of which an array has `size` bytes."""
        at = self.e.d("mad.wide.u32", self.sequence, size, self.base[name])
        return self.word(at, "", offset)

    def word(self, at: str, when: str, offset: int = 0) -> str:
        found = self.e.new()
        self.e.op("ld.global.nc.b32", found, f"[{at}+{offset}]", when=when)
        return found

    def vector(self, at: str, when: str) -> list[str]:
        found = [self.e.new() for _ in range(4)]
        self.e.op("ld.global.nc.v4.b32", found, f"[{at}]", when=when)
        return found

    def _of_slot(self, slot: int) -> str:
        """Whether the thread has an element there; "" if all threads have."""
        return self.in_last if slot == self.plan.slots - 1 else ""

    def _load(self, target: str, at: str, offset: int, has: str, when: str = "") -> None:
        """Loads an element where both predicates hold; -inf where the first does not."""
        e, dtype = self.e, self.plan.dtype
        width = "f32" if dtype == "f32" else "b16"
        if has:
            e.op(f"mov.{width}", target, LOWEST[dtype])
        e.op(f"ld.global.nc.{width}", target, f"[{at}+{offset}]", when=e.both(has, when))

    def _wide(self, value: str) -> str:
        """An element as a float of its own."""
        e, dtype = self.e, self.plan.dtype
        if dtype == "bf16":
            low = e.new("h")
            e.op("mov.b16", low, 0)
            return e.f("mov.b32", [low, value])
        return e.f("mov.f32" if dtype == "f32" else "cvt.f32.f16", value)

    def _loaded(self, at: str, offset: int, has: str = "") -> str:
        target = self.e.new("f" if self.plan.dtype == "f32" else "h")
        self._load(target, at, offset, has)
        return self._wide(target)

    def score(self, index: str) -> str:
        """That of a class."""
        return self._loaded(self.e.d("mad.wide.u32", index, SIZES[self.plan.dtype], self.of_row("x")), 0)

    def store(self, at: str, offset: int, value: str, when: str = "") -> None:
        self.e.store_rounded(self.plan.dtype, f"[{at}+{offset}]", value, when)

    def store_all(self, value: Callable[[int], str]) -> None:
        """Stores a thread's elements, of numbers of slots."""
        size = SIZES[self.plan.dtype]
        at = self.e.d("mad.wide.u32", self.member, size, self.out)
        for i in range(self.plan.slots):
            self.store(at, i * self.plan.group * size, value(i), self._of_slot(i))

    # ---- the softmax -------------------------------------------------------------------------------------------------

    def read(self, dead: str) -> None:
        """The row's largest score, and 1 over the sum of e^(x - largest); of a late row a branch to `dead`."""
        plan, e = self.plan, self.e
        size = SIZES[plan.dtype]
        own = e.d("mad.wide.u32", self.member, size, self.of_row("x"))
        load = lambda i: self._loaded(own, i * plan.group * size, self._of_slot(i))
        scores = [self._wide(value) for value in self.coming]
        if not self.kept:
            e.op("bra", dead, when=self.late)
        values = iter(scores or map(load, range(plan.slots)))
        largest = next(values)
        for value in values:
            largest = e.f("max.NaN.f32", largest, value)
        self.largest = self._over_group_largest(e.over_lanes(largest, LANES // 2, instruction="max.NaN.f32"))
        if self.kept:
            self._load_coming(e.r("add.s32", self.row, plan.blocks * plan.rows))
            e.op("bra", dead, when=self.late)
        of_slot = lambda i: numbers.small_exponential(e, self.beside_largest(scores[i] if self.kept else load(i)))
        shares = [of_slot(i) for i in range(plan.slots)] if self.kept else []
        self.share = (lambda i: shares[i]) if self.kept else of_slot
        slots = 1 << (plan.slots - 1).bit_length()
        self.inverse = e.f("rcp.rn.f32", self._over_group(self._tree(0, 1, slots)))

    def beside_largest(self, x: str) -> str:
        return self.e.f("sub.rn.f32", x, self.largest)

    def _tree(self, first: int, distance: int, slots: int) -> str:
        """The sum by halves of the thread's elements `first`, `first` + `distance`, ... of so many, rest zeros."""
        if distance == slots:
            return self.share(first)
        low = self._tree(first, 2 * distance, slots)
        if first + distance >= self.plan.slots:
            return low
        return self.e.f("add.rn.f32", low, self._tree(first + distance, 2 * distance, slots))

    def _over_group_largest(self, value: str) -> str:
        """Of the warps' largest scores the largest."""
        plan, e = self.plan, self.e
        if plan.group == LANES:
            return value
        warps, start = plan.group // LANES, 4 * plan.group
        lane, warp = e.r("and.b32", self.member, LANES - 1), e.r("shr.u32", self.member, 5)
        at = e.scaled(warp, 4, self.shared)
        e.store_floats("shared", f"[{at}+{start}]", [value], when=e.p("setp.eq.s32", lane, 0))
        self.sync()
        at = e.scaled(e.r("and.b32", lane, warps - 1), 4, self.shared)
        value = e.load_floats("shared", f"[{at}+{start}]", 1)[0]
        return e.over_lanes(value, warps // 2, instruction="max.NaN.f32")

    def _over_group(self, value: str) -> str:
        """The sum by halves over the row's threads."""
        plan, e = self.plan, self.e
        if plan.group > LANES:
            e.store_floats("shared", f"[{e.scaled(self.member, 4, self.shared)}]", [value])
            self.sync()
            at = e.scaled(e.r("and.b32", self.member, LANES - 1), 4, self.shared)
            values = [e.load_floats("shared", f"[{at}+{4 * i}]", 1)[0] for i in range(0, plan.group, LANES)]
            while len(values) > 1:
                half = len(values) // 2
                values = [e.f("add.rn.f32", *two) for two in zip(values[:half], values[half:], strict=True)]
            value = values[0]
        return e.over_lanes(value, LANES // 2)

    def sync(self) -> None:
        """All threads of the row meet."""
        if self.plan.group == LANES:
            self.e.op("bar.warp.sync", "0xffffffff")
        else:
            self.e.op("bar.sync", 1, self.plan.group)

    # ---- labels ------------------------------------------------------------------------------------------------------

    def ahead(self, load: Callable[[str, str], Any]) -> _Ahead:
        """What `load` gives for an index and a predicate, of each of a thread's part of the blank and the labels."""
        plan, e = self.plan, self.e
        count = -(-plan.pairs // plan.group)
        if count > UNROLLED:
            return _Ahead(load, ())
        indices = [e.r("add.s32", self.member, n * plan.group) for n in range(count)]
        return _Ahead(load, tuple((i, load(i, e.p("setp.lt.s32", i, plan.pairs))) for i in indices))

    def each(self, ahead: _Ahead) -> Iterator[tuple[str, Any]]:
        """An index and what was loaded for it, one by one: what is emitted for each is done for all."""
        e, plan = self.e, self.plan
        for i, found in ahead.found:
            with e.only_if("setp.lt.s32", i, plan.pairs):
                yield i, found
        if not ahead.found:
            with e.loop(self.member, plan.pairs, plan.group) as i:
                yield i, ahead.load(i, "")

    def counted(self, place: str, offset: object = 0) -> str:
        """What shared memory has at a place."""
        at = self.e.scaled(place, 4, self.sums)
        at = self.e.scaled(str(offset), 4, at) if offset else at
        return self.e.load_floats("shared", f"[{at}]", 1)[0]

    def _count(self, place: str, value: str) -> None:
        self.e.store_floats("shared", f"[{self.e.scaled(place, 4, self.sums)}]", [value])

    def add_labels(self, places: _Ahead, shares: _Ahead, most: str) -> None:
        """Adds, of each class, the posteriors of its labels, where the first of them is."""
        e = self.e
        of_index = {i: value for i, value in shares.found}
        for i, (place, *_) in self.each(places):
            value = of_index[i] if i in of_index else shares.load(i, "")
            self._count(place, e.f("mov.b32", value))
        self.sync()
        distance, again, done = e.r("mov.b32", 1), e.label(), e.label()
        e.place(again)
        e.op("bra", done, when=e.p("setp.ge.s32", distance, most))
        mask = e.r("sub.s32", e.r("add.s32", distance, distance), 1)
        for _, (place, _, before, left) in self.each(places):
            even = e.p("setp.eq.s32", e.r("and.b32", before, mask), 0)
            with e.only_if("setp.gt.s32", e.r("selp.b32", left, 0, even), distance):
                other = self.counted(place, distance)
                self._count(place, e.f("add.rn.f32", self.counted(place), other))
        self.sync()
        e.op("add.s32", distance, distance, distance)
        e.op("bra", again)
        e.place(done)
