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
NO = 2 * ZERO  # added to the exponent of what may not be added: it is then below that of 0


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
        """Of shared memory: two chunks of states of each warp's last label, and of none before the first warp."""
        return 4 * (self.warps + 1) * self.chunk if self.warps > 1 else 0


MOST_LABELS = WARPS * LANES * max(CHUNKS) - 1


def plan(steps: int, labels: int, both: bool) -> Plan:
    """The plan with the fewest pairs of a lane; a ValueError for more than `MOST_LABELS`."""
    found = (Plan(steps, labels, each, both) for each in CHUNKS)
    return min((plan for plan in found if plan.warps <= WARPS), key=lambda plan: plan.each)


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
    """The kernel; `back` says which of the two directions is emitted."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.e = plan, Emitter()
        e = self.e
        names = ["emitted", "symbols", "lengths", "last", *(["forward", "backward"] if plan.both else [])]
        self.base = {name: e.d("mov.b64", f"${i}") for i, name in enumerate(names)}
        self.shared = e.r("mov.b32", f"${len(names)}") if plan.floats else ""
        thread, block = e.r("mov.u32", "%tid.x"), e.r("mov.u32", "%ctaid.x")
        self.lane, self.warp = e.r("and.b32", thread, LANES - 1), e.r("shr.u32", thread, 5)
        self.first_pair = e.scaled(thread, plan.each)
        self.sequence = e.r("shr.u32", block, 1) if plan.both else block
        self.odd = e.p("setp.eq.u32", e.r("and.b32", block, 1), 1) if plan.both else ""

    def text(self) -> str:
        e, end = self.e, self.e.label()
        e.op("bra", end, when=e.p("setp.ge.s32", self.warp, self.plan.warps))
        turned = e.label()
        if self.plan.both:
            e.op("bra", turned, when=self.odd)
        for back in (False, True)[: 1 + self.plan.both]:
            self.back = back
            if back:
                e.op("bra", end)
                e.place(turned)
            self._begin()
            self._rounds()
            if not back:
                self._store_last()
        e.place(end)
        return e.text()

    # ---- before the steps --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Addresses, states, and what is emitted in the first steps."""
        plan, e, pairs = self.plan, self.e, self.plan.pairs
        self.steps, count = e.new(), e.new()
        e.op("ld.global.v2.b32", [self.steps, count], f"[{self._of_sequence('lengths', 8)}]")
        self.pair = [e.r("add.s32", self.first_pair, i) for i in range(plan.each)]
        self.exists = [e.p("setp.lt.s32", pair, pairs) for pair in self.pair]
        self.has_label = [e.p("setp.lt.s32", pair, plan.labels) for pair in self.pair]
        own = [e.r("sub.s32", plan.labels - 1, pair) if self.back else pair for pair in self.pair]
        self.skips = self._skips(own)
        start = e.r("sub.s32", plan.labels, count) if self.back else "0"
        self.states: list[tuple[State, State]] = []
        for pair in self.pair:
            here = e.p("setp.eq.s32", pair, start)
            blank = e.f("mov.f32", HALF), e.r("selp.b32", 1, ZERO, here)
            self.states.append((blank, (e.f("mov.f32", HALF), e.r("mov.b32", ZERO))))
        row = e.r("mul.lo.s32", self.sequence, plan.steps)
        row = e.r("add.s32", row, e.r("sub.s32", self.steps, 1)) if self.back else row
        # The row before an array, where a sequence has no steps, is not loaded.
        at = e.d("mad.wide.s32", row, 8 * pairs, self.base["emitted"])
        self.emitted_at = [at, *(e.d("mad.wide.s32", label, 4, at) for label in own)]
        self.stride = -8 * pairs if self.back else 8 * pairs  # bytes from a step to the next
        if plan.both:
            row = e.d("mad.wide.s32", row, VECTOR * pairs, self.base["backward" if self.back else "forward"])
            self.stored_at = e.d("mad.wide.s32", self.first_pair, VECTOR, row)
        self.coming = [self._place_of_emission() for _ in range(plan.chunk)]
        self._load(e.r("mov.b32", 0))

    def _of_sequence(self, name: str, size: int) -> str:
        """The address of what an array has for the sequence."""
        return self.e.d("mad.wide.u32", self.sequence, size, self.base[name])

    def _skips(self, own: list[str]) -> list[str]:
        """Of each pair 0 where a path may come to its label from the one before, without a blank, else `NO`."""
        e, found, row = self.e, [], self._of_sequence("symbols", 4 * self.plan.pairs)
        for pair, label, has in zip(self.pair, own, self.has_label, strict=True):
            may = e.p("and.pred", has, e.p("setp.gt.s32", pair, 0))
            values = []
            for offset in (4, 8 if self.back else 0):  # labels stand behind the blank
                values.append(e.r("mov.b32", 0))
                at = e.d("mad.wide.s32", label, 4, row)
                e.op("ld.global.b32", values[-1], f"[{at}+{offset}]", when=may)
            found.append(e.r("selp.b32", 0, NO, e.p("setp.ne.s32", *values)))
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
            wanted = [in_time, *(e.p("and.pred", in_time, has) for has in self.has_label)]
            for k, ((w, n), at, when) in enumerate(zip(emitted, self.emitted_at, wanted, strict=True)):
                offset = i * self.stride + (4 if k else 0)  # labels stand behind the blank
                e.op("ld.global.nc.f32", w, f"[{at}+{offset}]", when=when)
                e.op("ld.global.nc.b32", n, f"[{at}+{offset + own}]", when=when)
        for at in self.emitted_at:
            e.op("add.s64", at, at, self.plan.chunk * self.stride)

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
        own = 8 * plan.chunk  # bytes of a warp's labels in a chunk
        # A warp reads what the one before has left, the first one what is no label. There are two such places: one is
        # written while the other is read.
        self.found = e.scaled(self.warp, own, self.shared)
        size = own * (plan.warps + 1)
        both = e.r("add.s32", e.r("add.s32", self.found, self.found), size)
        with e.only_if("setp.lt.s32", e.r("mov.u32", "%tid.x"), plan.chunk):
            at = e.scaled(self.lane, 8, self.shared)
            for start in (0, size):
                e.op("st.shared.v2.b32", f"[{at}+{start}]", [e.f("mov.f32", HALF), e.r("mov.b32", ZERO)])
        e.op("bar.warp.sync", "0xffffffff")
        step = e.r("mul.lo.s32", self.warp, -plan.chunk)
        rounds = e.r("add.s32", self.steps, plan.chunk * (plan.warps - 1))
        with e.loop(0, rounds, plan.chunk):
            self.left = e.r("add.s32", e.r("sub.s32", both, self.found), own)
            with e.only_if("setp.ge.s32", step, 0), e.only_if("setp.lt.s32", step, self.steps):
                self._chunk(step)
            e.op("bar.sync", 1, LANES * plan.warps)
            e.op("add.s32", step, step, plan.chunk)
            e.op("sub.s32", self.found, both, self.found)

    def _chunk(self, step: str) -> None:
        """The steps of a chunk, of which the first is one of the sequence."""
        plan, e = self.plan, self.e
        for now, coming in zip(self.current, self.coming, strict=True):
            for (w, n), (next_w, next_n) in zip(now, coming, strict=True):
                e.op("mov.f32", w, next_w)
                e.op("mov.b32", n, next_n)
        self._load(e.r("add.s32", step, plan.chunk))
        if plan.warps > 1:
            for i in range(0, plan.chunk, 2):
                words = [*self.before[i], *self.before[i + 1]]
                e.op("ld.shared.v4.b32", words, f"[{self.found}+{8 * i}]")
        partly, end = e.label(), e.label()
        last = e.r("add.s32", step, plan.chunk)
        e.op("bra", partly, when=e.p("setp.gt.s32", last, self.steps))
        for i in range(plan.chunk):
            self._step(i)
        if plan.both:
            e.op("add.s64", self.stored_at, self.stored_at, 2 * plan.chunk * self.stride)
        e.op("bra", end)
        e.place(partly)  # the last chunk
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
        left: State = m, e.r("selp.b32", self.before[i][1], exponent, self.first_lane)
        blank_emitted, *emitted = self.current[i]
        found = []
        for k, ((blank, label), skips) in enumerate(zip(self.states, self.skips, strict=True)):
            skipped = left[0], e.r("add.s32", left[1], skips)
            sums = numbers.total(e, (blank, left)), numbers.total(e, (label, blank, skipped))
            new = [self._times(*pair) for pair in zip(sums, (blank_emitted, emitted[k]), strict=True)]
            if plan.both:
                words = [word for state in (sums if self.back else new) for word in state]
                at = 2 * i * self.stride + VECTOR * k
                e.op("st.global.v4.b32", f"[{self.stored_at}+{at}]", words, when=self.exists[k])
            found.append(new)
            left = label
        for old, new in zip(self.states, found, strict=True):
            for state, value in zip(old, new, strict=True):
                e.op("mov.f32", state[0], value[0])
                e.op("mov.b32", state[1], value[1])

    def _times(self, term: State, emitted: State) -> State:
        e = self.e
        return numbers.normal(e, e.f("mul.rn.f32", term[0], emitted[0]), e.r("add.s32", term[1], emitted[1]))

    def _store_last(self) -> None:
        """Stores the last states."""
        e, row = self.e, self._of_sequence("last", VECTOR * self.plan.pairs)
        for pair, exists, (blank, label) in zip(self.pair, self.exists, self.states, strict=True):
            at = e.d("mad.wide.u32", pair, VECTOR, row)
            e.op("st.global.v4.b32", f"[{at}]", [*blank, *label], when=exists)
