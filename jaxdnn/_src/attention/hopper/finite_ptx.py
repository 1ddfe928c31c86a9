"""The PTX that keeps NaN and infinity among values from rows that do not see them.

What a row does not see has weight 0, but 0 times NaN is NaN, and wgmma multiplies a tile's rows with all of its values.
So a consumer looks through the values of a tile that some row of its block does not see whole. Where one is not finite,
the consumers add it to the results of the rows that see it, and make it zero in shared memory before the product. Rows
that do not see it have the bits that they have without it: a product with zero is zero.
"""

from jaxdnn._src.attention.hopper.scores_ptx import Scores
from jaxdnn._src.attention.hopper.tile_ptx import MEET, THREADS, ZERO

VECTOR = 16  # bytes


class Finite(Scores):
    """Emits the treatment of a tile's values."""

    def clean_values(self) -> None:
        """Of the current tile, whose values are in shared memory afterwards."""
        e, plan = self.e, self.plan
        base = e.scaled(self.slot, plan.v_bytes, self.given["v"])
        self.wait("v_full", self.slot, self.phase)
        any_ = e.p("bar.red.or.pred", self.vote, THREADS, self._finds_other(base))
        past = e.label()
        e.op("bra", past, when="!" + any_)
        self._act_on_rows(base)
        e.op("bar.sync", MEET, THREADS * plan.consumers)  # all consumers have read the values
        self._make_zero(base)
        e.op("fence.proxy.async.shared::cta")
        e.op("bar.sync", MEET, THREADS * plan.consumers)
        e.place(past)
        e.loads_done()

    def _finds_other(self, base: str) -> str:
        """Whether one of this thread's values is not finite: 0 times it is NaN, which sums keep."""
        e, plan = self.e, self.plan
        mine, zero = e.scaled(self.thread, VECTOR, base), e.r("mov.b32", 0)
        sums = [e.r("mov.b32", 0) for _ in range(4)]
        for start in range(0, plan.v_bytes, VECTOR * THREADS):
            for total, word in zip(sums, e.load_vector("shared", f"[{mine}+{start}]"), strict=True):
                e.op(f"fma.rn.{plan.dtype}x2", total, word, zero, total)
        total = ""
        for half in e.unpack(plan.dtype, sums):
            total = e.f("add.rn.f32", total, half) if total else half
        return e.p("setp.nan.f32", total, total)

    def _act_on_rows(self, base: str) -> None:
        """Adds each value that is not finite to the results of the rows that see its key."""
        e, plan = self.e, self.plan
        with e.loop(0, plan.keys, 1) as key:
            seen = [self.seen(row, key) for row in range(2)]
            offset = e.r("mul.lo.s32", key, plan.swizzle)
            place = e.r("add.s32", e.r("add.s32", base, offset), e.r("shl.b32", self.column, 1))
            flip = self.flip(offset)
            for i in range(plan.wide_values // 8):
                box, unit = divmod(8 * i, plan.chunk)
                at = e.r("add.s32", place, e.r("xor.b32", flip, 2 * unit))
                word = e.r("ld.shared.b32", f"[{at}+{box * plan.keys * plan.swizzle}]")
                for half, value in enumerate(e.unpack(plan.dtype, [word])):
                    other = e.p("setp.nan.f32", e.f("mul.rn.f32", value, ZERO), ZERO)
                    for row in range(2):
                        o = self.o[4 * i + 2 * row + half]
                        e.op("add.rn.f32", o, o, value, when=e.p("and.pred", other, seen[row]))

    def _make_zero(self, base: str) -> None:
        """The consumers share the tile's vectors."""
        e, plan = self.e, self.plan
        exponent = {"bf16": "0x7F80", "f16": "0x7C00"}[plan.dtype]
        with e.loop(
            e.scaled(self.wg, THREADS, self.thread), plan.v_bytes // VECTOR, THREADS * plan.consumers
        ) as number:
            place = e.scaled(number, VECTOR, base)
            kept = []
            for word in e.load_vector("shared", f"[{place}]"):
                low = e.p("setp.eq.u32", e.r("and.b32", word, exponent), exponent)
                high = e.p("setp.eq.u32", e.r("and.b32", word, f"{exponent}0000"), f"{exponent}0000")
                word = e.r("selp.b32", e.r("and.b32", word, "0xFFFF0000"), word, low)
                kept.append(e.r("selp.b32", e.r("and.b32", word, "0x0000FFFF"), word, high))
            e.op("st.shared.v4.b32", f"[{place}]", kept)
