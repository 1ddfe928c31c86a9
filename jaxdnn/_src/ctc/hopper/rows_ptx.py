"""The PTX of CTC's passes over scores, a row of V classes in the registers of a warp or a block: what a lattice's
states emit, and the gradient in the scores.

Element i of a row belongs to thread i mod G of the row's G threads. So the tree by halves of `core.trees`, of a row
padded to a power of two, adds a thread's own elements first, and then those of threads G / 2 apart, G / 4 apart, ...
Rows too long for registers are read again for each pass, their sum in the same order.

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

from jaxdnn._src.ctc.hopper import numbers_ptx as numbers
from jaxdnn._src.ctc.hopper.numbers_ptx import NOTHING
from jaxdnn._src.hopper.ptx import SIZES, Emitter, real

LANES = 32
GROUPS = (32, 128, 256, 512, 1024)  # threads of a row
SLOTS = 40  # the most elements of a thread that are kept in its registers
LOWEST = {"f32": "0fFF800000", "bf16": 0xFF80, "f16": 0xFC00}  # -inf


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rows are partitioned.

    Attributes:
      sequences, steps, classes, labels: B, T, V and L; dtype: of scores, a value of `ptx.NAMES`.
      group: G; softmax: whether the scores are normalised.
    """

    sequences: int
    steps: int
    classes: int
    labels: int
    dtype: str
    group: int
    softmax: bool = True

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
        return -(-self.sequences * self.steps // self.rows)

    @property
    def floats(self) -> int:
        """Of shared memory: those that go between warps, and of a gradient's labels."""
        return self.group + LANES + self.rows * self.pairs


def plan(sequences: int, steps: int, classes: int, labels: int, dtype: str, softmax: bool = True) -> Plan:
    """The plan with the fewest threads of a row that keep it in their registers, or with the most threads."""
    found = [Plan(sequences, steps, classes, labels, dtype, group, softmax) for group in GROUPS]
    return next((plan for plan in found if plan.kept), found[-1])


@ft.lru_cache
def emissions(plan: Plan) -> str:
    """The PTX. Operands: scores (B, T, V), symbols (B, L + 1), lengths (B, 2), and two results; then shared memory.

    Symbols are the classes of the blank and of the labels. Results: what is emitted, as `lattice_ptx` takes it, and
    (B, T) the largest score of each step. Beyond a sequence's steps nothing is stored.
    """
    k = _Rows(plan, ("x", "symbols", "lengths", "emitted", "largest"))
    e = k.e
    steps = k.of_sequence("lengths", 8)
    e.op("bra", k.end, when=e.p("setp.ge.s32", k.time, steps))
    k.read()
    e.op("st.global.f32", f"[{k.element('largest', k.row)}]", k.largest, when=k.first)
    row = e.d("mad.wide.u32", k.row, 8 * plan.pairs, k.base["emitted"])
    symbols = e.d("mad.wide.u32", k.sequence, 4 * plan.pairs, k.base["symbols"])
    with e.loop(k.member, plan.pairs, plan.group) as i:
        symbol = e.new()
        e.op("ld.global.nc.b32", symbol, f"[{e.d('mad.wide.u32', i, 4, symbols)}]")
        w, n = numbers.exponential(e, k.beside_largest(k.score(symbol)))
        at = e.d("mad.wide.u32", i, 4, row)
        e.op("st.global.f32", f"[{at}]", e.f("mul.rn.f32", w, k.inverse))
        e.op("st.global.b32", f"[{at}+{4 * plan.pairs}]", n)
    return k.text()


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
    k.out = k.of_row("out")
    steps, most = k.of_sequence("lengths", 8), k.of_sequence("lengths", 8, 4)
    loss = e.f("mov.b32", k.of_sequence("losses", 4))
    factor = e.f("mov.b32", k.of_sequence("cotangents", 4))
    factor = e.f("selp.f32", loss, factor, e.p("setp.nan.f32", loss, loss))
    dead = e.p("setp.eq.f32", e.f("abs.f32", loss), real(math.inf))
    e.op("bra", k.dead, when=dead)
    e.op("bra", k.dead, when=e.p("setp.ge.s32", k.time, steps))
    if plan.softmax:
        k.read()
        k.store_all(lambda i: e.f("mul.rn.f32", factor, e.f("mul.rn.f32", k.share(i), k.inverse)))
    else:
        nothing = e.f("mul.rn.f32", factor, real(-0.0))
        k.store_all(lambda i: nothing)
    k.add_labels(most)
    with k.symbols() as ((_, of_class, before, _), at):
        first = e.p("setp.eq.s32", before, 0)
        with e.only_if("setp.ge.s32", e.r("selp.b32", of_class, -1, first), 0):
            counted = e.load_floats("shared", f"[{at}]", 1)[0]
            if plan.softmax:
                share = numbers.small_exponential(e, k.beside_largest(k.score(of_class)))
                found = e.f("sub.rn.f32", e.f("mul.rn.f32", share, k.inverse), counted)
            else:
                found = e.f("neg.f32", counted)
            k.store(e.d("mad.wide.u32", of_class, SIZES[plan.dtype], k.out), 0, e.f("mul.rn.f32", factor, found))
    e.op("bra", k.end)
    e.place(k.dead)
    nothing = e.f("mov.f32", NOTHING)
    k.store_all(lambda i: nothing)
    return k.text()


class _Rows:
    """A row of scores: who has which elements, loads, and what is common to all threads of the row."""

    def __init__(self, plan: Plan, names: tuple[str, ...]) -> None:
        self.plan = plan
        e = self.e = Emitter()
        self.base = {name: e.d("mov.b64", f"${i}") for i, name in enumerate(names)}
        self.shared = e.r("mov.b32", f"${len(names)}")
        self.end, self.dead = e.label(), e.label()
        thread, block = e.r("mov.u32", "%tid.x"), e.r("mov.u32", "%ctaid.x")
        if plan.rows == 1:
            self.member, self.row, group = thread, block, "0"
        else:
            self.member, group = e.r("and.b32", thread, LANES - 1), e.r("shr.u32", thread, 5)
            self.row = e.scaled(block, plan.rows, group)
            e.op("bra", self.end, when=e.p("setp.ge.s32", self.row, plan.sequences * plan.steps))
        self.counted = e.r("add.s32", e.r("mad.lo.s32", group, 4 * plan.pairs, self.shared), 4 * (plan.group + LANES))
        self.sequence = e.r("div.u32", self.row, plan.steps)
        self.time = e.r("sub.s32", self.row, e.r("mul.lo.s32", self.sequence, plan.steps))
        self.first = e.p("setp.eq.s32", self.member, 0)
        last = (plan.slots - 1) * plan.group
        self.in_last = e.p("setp.lt.s32", self.member, plan.classes - last) if plan.classes % plan.group else ""
        self.out = ""

    def text(self) -> str:
        self.e.place(self.end)
        return self.e.text()

    # ---- addresses ---------------------------------------------------------------------------------------------------

    def element(self, name: str, index: str) -> str:
        """The address of an element of 4 bytes."""
        return self.e.d("mad.wide.u32", index, 4, self.base[name])

    def of_sequence(self, name: str, size: int, offset: int = 0) -> str:
        """A word of the row's sequence, of which an array has `size` bytes."""
        found = self.e.new()
        at = self.e.d("mad.wide.u32", self.sequence, size, self.base[name])
        self.e.op("ld.global.nc.b32", found, f"[{at}+{offset}]")
        return found

    def of_row(self, name: str) -> str:
        """The address of the row in an array (B, T, V)."""
        return self.e.d("mad.wide.u32", self.row, self.plan.classes * SIZES[self.plan.dtype], self.base[name])

    def _when(self, slot: int) -> str:
        return self.in_last if slot == self.plan.slots - 1 else ""

    # ---- loads and stores --------------------------------------------------------------------------------------------

    def _loaded(self, at: str, offset: int, when: str = "") -> str:
        """A score; -inf where the predicate does not hold."""
        e, dtype = self.e, self.plan.dtype
        kind, width = ("f", "f32") if dtype == "f32" else ("h", "b16")
        found = e.new(kind)
        if when:
            e.op(f"mov.{width}", found, LOWEST[dtype])
        e.op(f"ld.global.nc.{width}", found, f"[{at}+{offset}]", when=when)
        if dtype == "bf16":
            low = e.new("h")
            e.op("mov.b16", low, 0)
            return e.f("mov.b32", [low, found])
        return found if dtype == "f32" else e.f("cvt.f32.f16", found)

    def score(self, index: str) -> str:
        """That of a class."""
        return self._loaded(self.e.d("mad.wide.u32", index, SIZES[self.plan.dtype], self.x), 0)

    def store(self, at: str, offset: int, value: str, when: str = "") -> None:
        e, dtype = self.e, self.plan.dtype
        if dtype == "f32":
            e.op("st.global.f32", f"[{at}+{offset}]", value, when=when)
            return
        narrow = e.new("h")
        e.op(f"cvt.rn.{dtype}.f32", narrow, value)
        e.op("st.global.b16", f"[{at}+{offset}]", narrow, when=when)

    def store_all(self, value: Callable[[int], str]) -> None:
        """Stores a thread's elements, of numbers of slots."""
        size = SIZES[self.plan.dtype]
        at = self.e.d("mad.wide.u32", self.member, size, self.out)
        for i in range(self.plan.slots):
            self.store(at, i * self.plan.group * size, value(i), self._when(i))

    # ---- the softmax -------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Reads the row: its largest score, and 1 over the sum of e^(x - largest)."""
        plan, e = self.plan, self.e
        size = SIZES[plan.dtype]
        self.x = self.of_row("x")
        own = e.d("mad.wide.u32", self.member, size, self.x)
        load = lambda i: self._loaded(own, i * plan.group * size, self._when(i))
        scores = [load(i) for i in range(plan.slots)] if plan.kept else []
        values = iter(scores or map(load, range(plan.slots)))
        largest = next(values)
        for value in values:
            largest = e.f("max.NaN.f32", largest, value)
        self.largest = self._over_group_largest(e.over_lanes(largest, LANES // 2, instruction="max.NaN.f32"))
        again = lambda i: numbers.small_exponential(e, self.beside_largest(scores[i] if plan.kept else load(i)))
        self.shares = [again(i) for i in range(plan.slots)] if plan.kept else []
        self.share = (lambda i: self.shares[i]) if plan.kept else again
        slots = 1 << (-(-plan.classes // plan.group) - 1).bit_length()
        total = self._over_group(self._tree(0, 1, slots))
        self.inverse = e.f("rcp.rn.f32", total)

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

    @contextlib.contextmanager
    def symbols(self) -> Iterator[tuple[list[str], str]]:
        """A thread's part of the blank and the labels, one by one: its place, and where its sum is in shared memory."""
        plan, e = self.plan, self.e
        places = e.d("mad.wide.u32", self.sequence, 16 * plan.pairs, self.base["places"])
        with e.loop(self.member, plan.pairs, plan.group) as i:
            self.index = i
            place = e.load_vector("global.nc", f"[{e.d('mad.wide.u32', i, 16, places)}]")
            yield place, e.scaled(place[0], 4, self.counted)

    def add_labels(self, most: str) -> None:
        """Adds, of each class, the posteriors of its labels, where the first of them is."""
        e = self.e
        row = e.d("mad.wide.u32", self.row, 4 * self.plan.pairs, self.base["posteriors"])
        with self.symbols() as (_, at):
            value = e.load_floats("global.nc", f"[{e.d('mad.wide.u32', self.index, 4, row)}]", 1)
            e.store_floats("shared", f"[{at}]", value)
        self.sync()
        distance, again, done = e.r("mov.b32", 1), e.label(), e.label()
        e.place(again)
        e.op("bra", done, when=e.p("setp.ge.s32", distance, most))
        mask = e.r("sub.s32", e.r("add.s32", distance, distance), 1)
        with self.symbols() as ((_, _, before, left), at):
            rest = e.r("and.b32", before, mask)
            more = e.r("selp.b32", left, 0, e.p("setp.eq.s32", rest, 0))
            with e.only_if("setp.gt.s32", more, distance):
                other = e.load_floats("shared", f"[{e.scaled(distance, 4, at)}]", 1)[0]
                own = e.load_floats("shared", f"[{at}]", 1)[0]
                e.store_floats("shared", f"[{at}]", [e.f("add.rn.f32", own, other)])
        self.sync()
        e.op("add.s32", distance, distance, distance)
        e.op("bra", again)
        e.place(done)
