"""The consumers' PTX of attention's forward kernel: scores, softmax and weighted values of one block of queries.

Schedule. For each row, from O = 0, m = -inf, l = 0, for each tile of keys in ascending order:

    S = Q Kᵀ            wgmma, features in steps of 16 from the first on, from 0
    S = softcap, bias, slopes, each rounded (`shape_scores`); -inf where a key is not seen
    m' = max(m, max S)    alpha = 2^((m - m') c)    p_j = 2^(S_j c - m' c)          c = scale log2 e, m' c rounded
    l = l alpha + ((p_2t + p_2t+8 + ...) + (p_2t+1 + p_2t+9 + ...))      by one of four lanes t, ascending, in float32
    O = O alpha, then + P V      wgmma, keys in steps of 16 from the tile's first on, P rounded to the operands' dtype

and at the end l is added over the lanes at distance 2, then 1, y = O (1 / l), and the logarithm is m scale + ln l. The
multiplications with additions are fused where they stand in one term; 2^x is `ex2.approx.ftz`, log2 is `lg2.approx`. A
tile that a row does not see leaves its m, l and O as they are, so that leaving it out changes no bit. Nothing that a
row's result depends on is decided for several rows at once.

Of parts of rows, m c rounded, l added over the lanes, and O are the results; `merge` goes on with them.

Overlap. The products S of a tile and P V of the one before are issued together; while P V runs, the softmax of S goes
on. The consumers take turns in issuing (`take_turn`), so that one has the tensor cores while another has the rest.

It is PTX text, within a frame in Pallas that moves the tiles. Plain Pallas was not measured.
"""

from jaxdnn._src.attention.hopper.finite_ptx import Finite
from jaxdnn._src.attention.hopper.plan import ROWS, Plan, Problem
from jaxdnn._src.attention.hopper.tile_ptx import THREADS, of_row
from jaxdnn._src.hopper.ptx import real


class Forward(Finite):
    """Emits one block of queries."""

    def text(self) -> str:
        e, plan = self.e, self.plan
        self.start()
        self.start_rows()
        end, loads_always = e.label(), plan.out_in_q
        if loads_always:
            e.wait(self.q_full, self.item_phase)
        e.op("bra", end, when=e.p("setp.ge.s32", self.j, self.given["last"]))
        if not loads_always:
            e.wait(self.q_full, self.item_phase)
        self.first_tile()
        self.further_tiles()
        self.last_values()
        if plan.partial:
            self.store_values()
        e.place(end)
        if plan.partial:
            self.store_sums()
        else:
            self.finish()
        return _uniform(e.text())

    # ---- tiles

    def first_tile(self) -> None:
        """Scores of the first tile, whose values the next step takes; with the code for tiles seen in part."""
        e, plan = self.e, self.plan
        self.wait("k_full", self.slot, self.phase)
        self.take_turn()
        e.op("wgmma.fence.sync.aligned")
        self.issue_scores()
        self.give_turn()
        self.wait_products(0)
        self.arrive(self.barrier("k_empty", self.slot))
        self.shape_scores(tail=plan.masked)
        if plan.masked:
            self.mask_scores()
        self.softmax()
        self.round_weights()
        if plan.mask.bounded:
            past = e.label()
            e.op("bra", past, when="!" + self.in_part())
            self.clean_values()
            e.place(past)
        self.advance()

    def step(self, *, masked: bool) -> None:
        """The scores of a tile, and the values of the one before."""
        e = self.e
        self.wait("k_full", self.slot, self.phase)
        self.wait("v_full", self.old_slot, self.old_phase)
        self.take_turn()
        e.op("wgmma.fence.sync.aligned")
        self.issue_scores()
        self.issue_values(self.old_slot)
        self.give_turn()
        self.wait_products(1)
        self.arrive(self.barrier("k_empty", self.slot))
        self.shape_scores(tail=masked)
        if masked:
            self.mask_scores()
        self.softmax()
        self.wait_products(0)
        self.arrive(self.barrier("v_empty", self.old_slot))
        self.rescale()
        self.round_weights()
        if masked and self.plan.mask.bounded:
            self.clean_values()
        self.advance()

    def in_part(self) -> str:
        """Whether some row may not see all keys of the current tile."""
        e, g = self.e, self.given
        found = e.p("setp.ge.s32", self.j, g["whole_to"])
        if self._has_head:
            found = e.p("or.pred", found, e.p("setp.lt.s32", self.j, g["whole_from"]))
        return found

    @property
    def _has_head(self) -> bool:
        """Whether tiles seen in part may come before whole ones."""
        return self.plan.mask.left is not None or self.plan.mask.listed

    def further_tiles(self) -> None:
        e, plan = self.e, self.plan
        top, end, masked = e.label(), e.label(), e.label()
        e.place(top)
        e.op("bra", end, when=e.p("setp.ge.s32", self.j, self.given["last"]))
        if plan.masked:
            e.op("bra", masked, when=self.in_part())
        self.step(masked=False)
        e.op("bra", top)
        if plan.masked:
            e.place(masked)
            self.step(masked=True)
            e.op("bra", top)
        e.place(end)

    def last_values(self) -> None:
        e = self.e
        if not self.plan.out_in_q:
            self.arrive(self.q_empty)
        self.wait("v_full", self.old_slot, self.old_phase)
        e.op("wgmma.fence.sync.aligned")
        self.issue_values(self.old_slot)
        self.wait_products(0)
        self.arrive(self.barrier("v_empty", self.old_slot))

    # ---- results

    def finish(self) -> None:
        """y to shared memory, in boxes as TMA stores them; the logarithms to device memory."""
        e, plan, g = self.e, self.plan, self.given
        totals = self.totals()
        stride = 1 if self.problem.heads_first else self.problem.heads
        for (_, log), row in zip(totals, self.row, strict=True):
            first = e.p("setp.lt.and.s32", row, self.problem.queries, self.quad_first)
            place = e.d("mad.wide.u32", e.scaled(row, stride, g["result_first"]), 4, g["lse"])
            e.op("st.global.f32", f"[{place}]", log, when=first)
        size = plan.q_bytes if plan.out_in_q else plan.out_bytes
        target = e.scaled(self.wg, size, g["q" if plan.out_in_q else "out"])
        e.op("cp.async.bulk.wait_group.read", 0)  # what was staged here before has been stored
        e.op("bar.sync", self.vote, THREADS)
        for row, (inverse, _) in enumerate(totals):
            offset = e.r("mul.lo.s32", e.r("add.s32", self.local, 8 * row), plan.swizzle)
            place = e.r("add.s32", e.r("add.s32", target, offset), e.r("shl.b32", self.column, 1))
            flip, o = self.flip(offset), of_row(self.o, row)
            for i in range(plan.wide_values // 8):
                box, unit = divmod(8 * i, plan.chunk)
                at = e.r("add.s32", place, e.r("xor.b32", flip, 2 * unit))
                (word,) = e.pack(plan.dtype, [e.f("mul.rn.f32", x, inverse) for x in o[2 * i : 2 * i + 2]])
                e.op("st.shared.b32", f"[{at}+{box * ROWS * plan.swizzle}]", word)

    def store_values(self) -> None:
        """O of a part to device memory. What no tile was seen of is not stored."""
        e, plan, g = self.e, self.plan, self.given
        for row, number in enumerate(self.row):
            inside = e.p("setp.lt.s32", number, self.problem.queries)
            first = e.r("add.s32", number, g["result_first"])
            place = e.d("mad.wide.u32", first, 4 * plan.values, g["values"])
            place = e.d("add.s64", place, e.d("mul.wide.u32", self.column, 4))
            o = of_row(self.o, row)
            for i in range(plan.values // 8):
                e.store_floats("global", f"[{place}+{32 * i}]", o[2 * i : 2 * i + 2], when=inside)

    def store_sums(self) -> None:
        """m c and l of a part to device memory."""
        e, g = self.e, self.given
        for number, m, own in zip(self.row, self.m, self.sums, strict=True):
            inside = e.p("setp.lt.and.s32", number, self.problem.queries, self.quad_first)
            first = e.r("add.s32", number, g["result_first"])
            for name, value in (
                ("largest", e.f("mul.rn.f32", m, real(self.factor))),
                ("total", e.over_lanes(own, 2)),
            ):
                e.op("st.global.f32", f"[{e.d('mad.wide.u32', first, 4, g[name])}]", value, when=inside)


def code(problem: Problem, plan: Plan) -> str:
    """The consumers' text, whose operands are those of `tile_ptx.operands`."""
    return Forward(problem, plan).text()


def _uniform(text: str) -> str:
    """The text with branches that say that a warp takes them as a whole, but for those that wait for a barrier.

    The assembler would otherwise take what is computed in loops for different in each lane (see `same`).
    """
    lines = text.splitlines()
    waits = ["try_wait" in before for before in ["", *lines[:-1]]]
    said = (line if wait else line.replace("bra ", "bra.uni ") for line, wait in zip(lines, waits, strict=True))
    return "\n".join(said)
