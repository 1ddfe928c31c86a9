"""The PTX of CTC's posterior: from the states forward and backward the share of paths in each state, a warp for a step.

Pair i of the lattice belongs to lane i mod 32. Blanks are added by halves, as `core.trees` does: a lane's own first,
then those of lanes 16, 8, 4, 2 and 1 apart.

It is PTX text, which an empty Pallas kernel embeds: Mosaic may contract a product and a sum.
"""

import functools as ft

from jaxdnn._src.core.numbers import ZERO
from jaxdnn._src.ctc.hopper import numbers_ptx as numbers
from jaxdnn._src.ctc.hopper.numbers_ptx import NOTHING, State
from jaxdnn._src.hopper.ptx import Emitter

LANES, ROWS = 32, 4  # steps of a block
VECTOR = 16  # bytes of a pair's two states


def blocks(sequences: int, steps: int) -> int:
    return -(-sequences * steps // ROWS)


@ft.lru_cache
def shares(sequences: int, steps: int, labels: int) -> str:
    """The PTX. Operands: the states of `lattice_ptx`, forward and backward, totals, and the result (B, T, L + 1).

    Totals are (B, 4): the number of steps, the bits of 1 over the probability's m (or of NaN, which is then the result
    of all steps), its exponent (or 2^30 where it is 0), and nothing.
    """
    return _Shares(sequences, steps, labels).text()


class _Shares:
    def __init__(self, sequences: int, steps: int, labels: int) -> None:
        self.sequences, self.steps, self.labels, self.pairs = sequences, steps, labels, labels + 1
        self.slots = -(-self.pairs // LANES)
        self.e = Emitter()

    def text(self) -> str:
        e, pairs = self.e, self.pairs
        end, late = e.label(), e.label()
        forward, backward, totals, out = (e.d("mov.b64", f"${i}") for i in range(4))
        thread = e.r("mov.u32", "%tid.x")
        self.lane = e.r("and.b32", thread, LANES - 1)
        row = e.scaled(e.r("mov.u32", "%ctaid.x"), ROWS, e.r("shr.u32", thread, 5))
        e.op("bra", end, when=e.p("setp.ge.s32", row, self.sequences * self.steps))
        sequence = e.r("div.u32", row, self.steps)
        time = e.r("sub.s32", row, e.r("mul.lo.s32", sequence, self.steps))
        count, inverse, exponent, _ = e.load_vector("global.nc", f"[{e.d('mad.wide.u32', sequence, VECTOR, totals)}]")
        self.inverse, self.exponent = e.f("mov.b32", inverse), exponent
        self.unknown = e.p("setp.nan.f32", self.inverse, self.inverse)
        own = e.d("mad.wide.u32", row, 4 * pairs, out)
        self.out = e.d("mad.wide.u32", self.lane, 4, own)
        self.first = e.p("setp.eq.s32", self.lane, 0)
        e.op("bra", late, when=e.p("setp.ge.s32", time, count))
        self.forward = e.d("mad.wide.u32", self.lane, VECTOR, e.d("mad.wide.u32", row, VECTOR * pairs, forward))
        last = e.d("mad.wide.u32", row, VECTOR * pairs, backward)
        self.backward = e.d("mad.wide.s32", e.r("sub.s32", self.labels, self.lane), VECTOR, last)
        found = [self._of_pair(i) for i in range(self.slots)]
        blanks = [blank for blank, _ in found]
        slots = 1 << (self.slots - 1).bit_length()
        while slots > 1:
            slots //= 2
            tail = [e.f("add.rn.f32", *two) for two in zip(blanks, blanks[slots:], strict=False)]
            blanks = [*tail, *blanks[len(tail) : slots]]
        self._store(e.over_lanes(blanks[0], LANES // 2), [label for _, label in found])
        e.op("bra", end)
        e.place(late)
        self._store(NOTHING, [NOTHING] * self.slots)
        e.place(end)
        return e.text()

    def _of_pair(self, i: int) -> tuple[str, str]:
        """The shares of the lane's pair number i: of its blank and of its label."""
        e = self.e
        found = []
        for place, has in ((0, self._below(i, self.pairs)), (8, self._below(i, self.labels))):
            offset = LANES * VECTOR * i
            back = place - offset - (VECTOR if place else 0)  # label L - 1 - j is in pair j
            a, b = self._load(self.forward, place + offset, has), self._load(self.backward, back, has)
            found.append(self._share(a, numbers.normal(e, *b)))
        return found[0], found[1]

    def _below(self, i: int, count: int) -> str:
        """Whether the lane's pair number i is one of so many; "" if that of every lane is."""
        return self.e.p("setp.lt.s32", self.lane, count - LANES * i) if LANES * (i + 1) > count else ""

    def _load(self, at: str, offset: int, when: str) -> State:
        e = self.e
        m, exponent = (e.f("mov.f32", NOTHING), e.r("mov.b32", ZERO)) if when else (e.new("f"), e.new())
        e.op("ld.global.nc.v2.b32", [m, exponent], f"[{at}+{offset}]", when=when)
        return m, exponent

    def _share(self, a: State, b: State) -> str:
        e = self.e
        m = e.f("mul.rn.f32", *(e.f("selp.f32", NOTHING, m, e.p("setp.eq.s32", x, ZERO)) for m, x in (a, b)))
        exponent = e.r("sub.s32", e.r("add.s32", a[1], b[1]), self.exponent)
        found = numbers.plain(e, e.f("mul.rn.f32", m, self.inverse), exponent)
        return e.f("selp.f32", self.inverse, found, self.unknown)

    def _store(self, blank: str, labels: list[str]) -> None:
        e = self.e
        e.op("st.global.f32", f"[{self.out}]", blank, when=self.first)
        for i, label in enumerate(labels):
            has = self._below(i, self.labels)
            if self.labels > LANES * i:
                e.op("st.global.f32", f"[{self.out}+{4 * (1 + LANES * i)}]", label, when=has)
