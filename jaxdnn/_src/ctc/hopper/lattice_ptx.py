"""The PTX of CTC's recursion: all steps of a sequence in one block, forward, or forward and backward in two blocks.

A lattice has L + 1 pairs of states, a blank and the label behind it; the last pair has no label. Backward in time the
lattice is taken from its end: pair j is then blank L - j and label L - 1 - j, and the recursion is the same. A lane has
one, two or four neighbouring pairs, of which the first needs the label of the pair before: from the lane before by a
shuffle, and where that is in another warp from shared memory.

What a pair needs comes from earlier pairs alone. So warps are a chunk of steps apart: while a warp is in chunk c, the
next one is in chunk c - 1, for which its neighbour left a label of each step in shared memory. Only between chunks is
there a barrier, and a step of a warp waits for nothing but its own arithmetic. What is emitted is loaded a chunk ahead.

It is PTX text, which an empty Pallas kernel embeds: a Pallas kernel has no shuffle of a value to the next lane.
"""

import dataclasses
import functools as ft

from jaxdnn._src.core.numbers import ZERO
from jaxdnn._src.ctc.hopper import numbers_ptx as numbers
from jaxdnn._src.ctc.hopper.numbers_ptx import HALF, State
from jaxdnn._src.hopper.ptx import Emitter

LANES = 32
WARPS = 16  # the most of a block, so that a thread may have 128 registers
# Pairs of a lane to steps of a chunk, which registers must hold twice, and whose time is longer than that of a load.
CHUNKS = {1: 8, 2: 4, 4: 2}
VECTOR = 16  # bytes of a pair's two states


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a lattice is partitioned.

    Attributes:
      steps, labels: T and L; each: pairs of a lane.
      both: whether blocks go backward, too, and all states are stored.
    """

    steps: int
    labels: int
    each: int
    both: bool

    @property
    def pairs(self) -> int:
        return self.labels + 1

    @property
    def warps(self) -> int:
        return -(-self.pairs // (LANES * self.each))

    @property
    def threads(self) -> int:
        return -(-self.warps // 4) * 128

    @property
    def chunk(self) -> int:
        return CHUNKS[self.each]

    @property
    def floats(self) -> int:
        """Of shared memory: two chunks of states of each warp's last label."""
        return 4 * self.warps * self.chunk if self.warps > 1 else 0


MOST_LABELS = WARPS * LANES * max(CHUNKS) - 1


def plan(steps: int, labels: int, both: bool) -> Plan | None:
    """The plan with the fewest pairs of a lane; None for more labels than a block has lanes for."""
    found = (Plan(steps, labels, each, both) for each in CHUNKS)
    return next((plan for plan in found if plan.warps <= WARPS), None)


@ft.lru_cache
def lattice(plan: Plan) -> str:
    """The PTX. Operands: what is emitted, symbols, lengths, then the results; then shared memory.

    Emitted is (B, T, 2, L + 1), of the blank and of each label first w, then the bits of n. Symbols are (B, L + 1), the
    classes of the blank and of the labels. Lengths are (B, 2), the numbers of steps and of labels.

    Results are the last states (B, L + 1, 4), m and e of a blank and of a label, and for `both` all states
    (B, T, L + 1, 4) after each step: forward, and backward in time, there of the pairs from the lattice's end, before
    the step's emission and not brought to their place (`numbers_ptx.normal`). Beyond a sequence's steps nothing is
    stored.
    """
    return _Lattice(plan).text()


class _Lattice:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.e = plan, Emitter()
        e = self.e
        names = ["emitted", "symbols", "lengths", "last", *(["forward", "backward"] if plan.both else [])]
        self.base = {name: e.d("mov.b64", f"${i}") for i, name in enumerate(names)}
        self.shared = e.r("mov.b32", f"${len(names)}") if plan.floats else ""

    def text(self) -> str:
        e = self.e
        self.end, self.next = e.label(), []
        thread = e.r("mov.u32", "%tid.x")
        self.lane, self.warp = e.r("and.b32", thread, LANES - 1), e.r("shr.u32", thread, 5)
        e.op("bra", self.end, when=e.p("setp.ge.s32", self.warp, self.plan.warps))
        self._begin(e.scaled(thread, self.plan.each))
        self._rounds()
        self._end()
        e.place(self.end)
        return e.text()

    # ---- before the steps --------------------------------------------------------------------------------------------

    def _begin(self, first: str) -> None:
        """Addresses, states and what is emitted in the first steps; `first` is the number of the lane's first pair."""
        plan, e, pairs = self.plan, self.e, self.plan.pairs
        block = e.r("mov.u32", "%ctaid.x")
        self.sequence = e.r("shr.u32", block, 1) if plan.both else block
        self.back = e.p("setp.eq.u32", e.r("and.b32", block, 1), 1) if plan.both else ""
        place = e.d("mad.wide.u32", self.sequence, 8, self.base["lengths"])
        self.steps, count = e.new(), e.new()
        e.op("ld.global.v2.b32", [self.steps, count], f"[{place}]")
        self.pair = [e.r("add.s32", first, i) for i in range(plan.each)]
        self.exists = [e.p("setp.lt.s32", pair, pairs) for pair in self.pair]
        self.has_label = [e.p("setp.lt.s32", pair, plan.labels) for pair in self.pair]
        own = [self._turned(pair, e.r("sub.s32", plan.labels - 1, pair)) for pair in self.pair]
        self.skips = self._skips(own)
        start = self._turned(e.r("mov.b32", 0), e.r("sub.s32", plan.labels, count))
        self.states: list[tuple[State, State]] = []
        for pair in self.pair:
            here = e.p("setp.eq.s32", pair, start)
            blank = e.f("mov.f32", HALF), e.r("selp.b32", e.r("mov.b32", 1), ZERO, here)
            self.states.append((blank, (e.f("mov.f32", HALF), e.r("mov.b32", ZERO))))
        time = self._turned(e.r("mov.b32", 0), e.r("sub.s32", self.steps, 1))
        row = e.r("mad.lo.s32", self.sequence, plan.steps, time)  # -1 where there are no steps, and nothing is loaded
        at = e.d("mad.wide.s32", row, 8 * pairs, self.base["emitted"])
        self.blank_at = at
        self.label_at = [e.d("mad.wide.s32", label, 4, at) for label in own]
        self.stride = self._turned(e.r("mov.b32", 8 * pairs), e.r("mov.b32", -8 * pairs))
        self.stride = e.d("cvt.s64.s32", self.stride)
        if plan.both:
            base = e.d("selp.b64", self.base["backward"], self.base["forward"], self.back)
            row = e.d("mad.wide.s32", row, VECTOR * pairs, base)
            self.stored_at = e.d("mad.wide.s32", first, VECTOR, row)
            self.stored_stride = e.d("add.s64", self.stride, self.stride)
        self.coming = [self._place_of_emission() for _ in range(plan.chunk)]
        self._load(e.r("mov.b32", 0))

    def _turned(self, forward: str, backward: str) -> str:
        """One register forward, the other one backward."""
        return self.e.r("selp.b32", backward, forward, self.back) if self.back else forward

    def _skips(self, own: list[str]) -> list[str]:
        """Of each pair, whether a path may come to its label from the one before, without the blank between."""
        e, found = self.e, []
        row = e.d("mad.wide.u32", self.sequence, 4 * self.plan.pairs, self.base["symbols"])
        step = self._turned(e.r("mov.b32", 1), e.r("mov.b32", -1))
        for pair, label, has in zip(self.pair, own, self.has_label, strict=True):
            may = e.p("and.pred", has, e.p("setp.gt.s32", pair, 0))
            values = []
            for index in (label, e.r("sub.s32", label, step)):
                values.append(e.r("mov.b32", 0))
                e.op("ld.global.b32", values[-1], f"[{e.d('mad.wide.s32', index, 4, row)}+4]", when=may)
            found.append(e.p("setp.ne.s32", *values))
        return found

    # ---- what is emitted ---------------------------------------------------------------------------------------------

    def _place_of_emission(self) -> list[State]:
        """Registers for a step's blank and labels; those of no label stay as they are."""
        e = self.e
        none = lambda: (e.f("mov.f32", numbers.NOTHING), e.r("mov.b32", ZERO))
        return [none() for _ in range(1 + self.plan.each)]

    def _load(self, step: str) -> None:
        """Loads what is emitted in a chunk from this step on, and moves on to the next chunk."""
        e, own = self.e, 4 * self.plan.pairs
        for i, emitted in enumerate(self.coming):
            in_time = e.p("setp.lt.s32", e.r("add.s32", step, i), self.steps)
            places = [self.blank_at, *self.label_at]
            wanted = [in_time, *(e.p("and.pred", in_time, has) for has in self.has_label)]
            for k, ((w, n), at, when) in enumerate(zip(emitted, places, wanted, strict=True)):
                offset = 4 if k else 0  # labels stand behind the blank
                e.op("ld.global.nc.f32", w, f"[{at}+{offset}]", when=when)
                e.op("ld.global.nc.b32", n, f"[{at}+{offset + own}]", when=when)
                e.op("add.s64", at, at, self.stride)

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def _rounds(self) -> None:
        plan, e = self.plan, self.e
        self.first_lane = e.p("setp.eq.s32", self.lane, 0)
        self.last_lane = e.p("setp.eq.s32", self.lane, LANES - 1)
        self.current = [self._place_of_emission() for _ in range(plan.chunk)]
        self.before = [(e.f("mov.f32", HALF), e.r("mov.b32", ZERO)) for _ in range(plan.chunk)]
        if plan.warps == 1:
            with e.loop(0, self.steps, plan.chunk) as step:
                self._chunk(step)
            return
        self.later = e.p("setp.gt.s32", self.warp, 0)
        own = 8 * plan.chunk  # bytes of a warp's labels in a chunk
        # What is left alternates between two places: one is written while the other is read.
        self.left = e.scaled(self.warp, own, self.shared)
        both = e.r("add.s32", e.r("add.s32", self.left, self.left), own * plan.warps)
        step = e.r("mul.lo.s32", self.warp, -plan.chunk)
        rounds = e.r("add.s32", self.steps, plan.chunk * (plan.warps - 1))
        with e.loop(0, rounds, plan.chunk):
            self.found = e.r("sub.s32", both, e.r("add.s32", self.left, own))
            with e.only_if("setp.ge.s32", step, 0), e.only_if("setp.lt.s32", step, self.steps):
                self._chunk(step)
            e.op("bar.sync", 1, LANES * plan.warps)
            e.op("add.s32", step, step, plan.chunk)
            e.op("sub.s32", self.left, both, self.left)

    def _chunk(self, step: str) -> None:
        """The steps of a chunk, of which the first is one of the sequence."""
        plan, e = self.plan, self.e
        for now, coming in zip(self.current, self.coming, strict=True):
            for (w, n), (next_w, next_n) in zip(now, coming, strict=True):
                e.op("mov.f32", w, next_w)
                e.op("mov.b32", n, next_n)
        self._load(e.r("add.s32", step, plan.chunk))
        if plan.warps > 1:
            for i, (m, exponent) in enumerate(self.before):
                e.op("ld.shared.v2.b32", [m, exponent], f"[{self.found}+{8 * i}]", when=self.later)
        partly, end = e.label(), e.label()
        last = e.r("add.s32", step, plan.chunk)
        e.op("bra", partly, when=e.p("setp.gt.s32", last, self.steps))
        for i in range(plan.chunk):
            self._step(i)
        e.op("bra", end)
        e.place(partly)
        for i in range(plan.chunk - 1):
            if i:
                e.op("bra", end, when=e.p("setp.ge.s32", e.r("add.s32", step, i), self.steps))
            self._step(i)
        e.place(end)

    def _step(self, i: int) -> None:
        """A step of the chunk: new states from the old ones."""
        plan, e = self.plan, self.e
        label = self.states[-1][1]
        if plan.warps > 1:
            e.op("st.shared.v2.b32", f"[{self.left}+{8 * i}]", list(label), when=self.last_lane)
        m, exponent = (e.r("shfl.sync.up.b32", e.r("mov.b32", v), 1, 0, "0xffffffff") for v in label)
        m = e.f("selp.f32", self.before[i][0], e.f("mov.b32", m), self.first_lane)
        before: State = m, e.r("selp.b32", self.before[i][1], exponent, self.first_lane)
        blank_emitted, *emitted = self.current[i]
        olds = [(blank, label) for blank, label in self.states]
        for k, ((blank, label), skips) in enumerate(zip(olds, self.skips, strict=True)):
            left = olds[k - 1][1] if k else before
            skipped = left[0], e.r("selp.b32", left[1], ZERO, skips)
            sums = numbers.total(e, (blank, left)), numbers.total(e, (label, blank, skipped))
            new = [self._times(*pair) for pair in zip(sums, (blank_emitted, emitted[k]), strict=True)]
            if plan.both:
                kept = [self._kept(*pair) for pair in zip(sums, new, strict=True)]
                words = [word for state in kept for word in state]
                e.op("st.global.v4.b32", f"[{self.stored_at}+{VECTOR * k}]", words, when=self.exists[k])
            self.next.append(new)
        for old, new in zip(olds, self.next, strict=True):
            for state, found in zip(old, new, strict=True):
                e.op("mov.f32", state[0], found[0])
                e.op("mov.b32", state[1], found[1])
        self.next.clear()
        if plan.both:
            e.op("add.s64", self.stored_at, self.stored_at, self.stored_stride)

    def _times(self, term: State, emitted: State) -> State:
        e = self.e
        return numbers.normal(e, e.f("mul.rn.f32", term[0], emitted[0]), e.r("add.s32", term[1], emitted[1]))

    def _kept(self, term: State, new: State) -> tuple[str, str]:
        """The words that are stored: forward the new state, backward what comes to it."""
        e = self.e
        m = e.r("selp.b32", e.r("mov.b32", term[0]), e.r("mov.b32", new[0]), self.back)
        return m, e.r("selp.b32", term[1], new[1], self.back)

    def _end(self) -> None:
        """Stores the last states."""
        plan, e = self.plan, self.e
        row = e.d("mad.wide.u32", self.sequence, VECTOR * plan.pairs, self.base["last"])
        if plan.both:
            e.op("bra", self.end, when=self.back)
        for pair, exists, (blank, label) in zip(self.pair, self.exists, self.states, strict=True):
            at = e.d("mad.wide.u32", pair, VECTOR, row)
            e.op("st.global.v4.b32", f"[{at}]", [*blank, *label], when=exists)
