"""The PTX of a recurrence's gradient: all steps of a set of sequences in one cluster, in the order opposite to forward.

Schedule of a step: a block computes the derivatives of its units' gates, joins those of its warps in shared memory, and
multiplies them by its columns of the recurrent matrix, for all units. These sums go to the blocks that have the units,
which add those of all blocks, block 0's first: that is what the step before in time has from this one.

The order of additions: a block's groups of eight columns are numbered by warp, and then by gate; one chunk has four of
them, one for each lane of four, and its two `mma` the first and the second half of each. Where a warp has fewer than
four tiles, the first half of the `mma` and the second half have sums of their own, which are added. The derivatives are
rounded to the matrix' dtype before; all else is float32. So bits depend on the size of the cluster, which the units and
the cell alone decide.

It is PTX text, which an empty Pallas kernel embeds: Mosaic GPU has no `mma.sync`. Plain Pallas was not measured.
"""

import functools as ft
import itertools
from collections.abc import Callable, Iterator

from jaxdnn._src.hopper.curves_ptx import ZERO
from jaxdnn._src.rnn.hopper import cells_ptx
from jaxdnn._src.rnn.hopper.backward_plan import Plan
from jaxdnn._src.rnn.hopper.block_ptx import VECTOR, Block, Matrix, Turn
from jaxdnn._src.rnn.hopper.forward_ptx import saved_columns
from jaxdnn._src.rnn.hopper.plan import COLUMNS, LINE, Given
from jaxdnn._src.rnn.hopper.sequences_ptx import Key, Sequences

MEETING = 1  # the number of the barrier of the warps that have units


def operands(cell: str, given: Given) -> tuple[str, ...]:
    """The arrays: cotangents, the matrix, what the forward pass saved, then the results."""
    lstm, gru = cell == "lstm", cell == "gru_after"
    marks = [*(["lengths"] if given.ragged else []), *(["resets"] if given.resets else [])]
    before = ["cells_before"] if lstm else ["before"] if gru else []
    return (
        "y",
        "h",
        *(["c"] if lstm else []),
        "r",
        "gates",
        *before,
        *marks,
        "e",
        "first_h",
        *(["first_c"] if lstm else []),
    )


@ft.lru_cache
def backward(plan: Plan, given: Given) -> str:
    """The PTX; operands as `operands` says, then shared memory. `given.reverse` is that of the layer."""
    return Backward(plan, given).text()


class Backward:
    """Emits the kernel."""

    def __init__(self, plan: Plan, given: Given) -> None:
        self.plan, self.given = plan, given
        names = operands(plan.cell, given)
        sizes = {"cluster": plan.cluster, "warps": plan.warps, "threads": plan.threads, "groups": 1}
        k = self.k = Block(names, **sizes, size=plan.received)
        self.e, self.units = k.e, plan.units
        self.wide = plan.gates * plan.units
        k.make_barriers(given.steps)
        self.sequences = Sequences(k, given, plan.tiles, backwards=not given.reverse)

    def text(self) -> str:
        k, e = self.k, self.e
        k.e.arrive_in_cluster()
        has_units = ("setp.lt.u32", k.warp, self.plan.warps)
        with e.only_if(*has_units):
            self._begin()
        # What one warp has written here for others, another reads after a barrier of the block in the first step.
        k.e.wait_for_cluster()
        with e.only_if(*has_units):
            with e.loop(0, self.given.steps, 1) as step:
                self._step(step)
            self._end()
        k.e.arrive_in_cluster()  # no block ends before all have received
        k.e.wait_for_cluster()
        return e.text()

    # ---- before the steps --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        plan, s, k, e, units = self.plan, self.sequences, self.k, self.e, self.units
        begins = e.r("mul.lo.s32", k.rank, plan.own)  # the block's first unit
        own = e.r("add.s32", e.scaled(k.warp, 8, begins), k.row)
        self._load_matrix(begins)
        self._find_places()
        self._find_targets()
        self.saved = saved_columns(plan)  # of the gates, and of e
        for name, columns, size in (
            ("y", units, 2), ("gates", self.saved, 4), ("cells_before", units, 4), ("before", units, 2),
            ("e", self.saved, 4),
        ):  # fmt: skip
            if name in k.base:
                s.walk(name, columns, size, own)
        self.dh = s.widened(plan.dtype, s.halves(s.row("h", units, 2, own), units))
        self.first_h = s.row("first_h", units, 2, own)
        self.dc: dict[Key, str] = {}
        if plan.cell == "lstm":
            self.dc = s.floats(s.row("c", units, 4, own), units)
            self.first_c = s.row("first_c", units, 4, own)
        # Whether the sums that come count, or else `dh` is what was kept.
        self.counts = {key: e.r("mov.b32", 1) for key in s.keys} if self.given.ragged or self.given.resets else {}

    def _load_matrix(self, begins: str) -> None:
        """Of rows of all units the block's columns: a chunk has four groups of eight of one gate's columns."""
        plan, k, e = self.plan, self.k, self.e
        place = plan.before_joined + 2 * plan.joined
        tiles = [(2 * i, 2 * i + 1) for i in range(plan.rows)]
        self.matrix = Matrix(k, tiles, plan.chunks, plan.kept, place, apart=plan.rows < 4, streamed=plan.streamed)
        row = e.r("add.s32", e.scaled(k.warp, 16 * plan.rows, 0), k.row)
        rows = e.d("mad.wide.u32", row, 2 * self.wide, k.base["r"])
        places: dict[int, str] = {}

        def source(half: int, chunk: int) -> str:
            if chunk not in places:
                group = e.r("min.s32", e.r("add.s32", k.quad, 4 * chunk), plan.columns - 1)  # others multiply zeros
                if plan.streamed:  # a block's columns lie beside each other
                    column = e.scaled(group, 8, e.scaled(begins, plan.gates, 0))
                else:
                    warp = e.r("div.u32", group, plan.gates)
                    gate = e.r("sub.s32", group, e.r("mul.lo.s32", warp, plan.gates))
                    column = e.r("mad.lo.s32", gate, plan.units, e.scaled(warp, 8, begins))
                places[chunk] = e.d("mad.wide.u32", column, 2, rows)
            return f"[{places[chunk]}+{8 * half * 2 * self.wide}]"

        self.matrix.load(source)

    def _find_places(self) -> None:
        """Where a lane writes and reads the block's derivatives: lines of eight vectors, one for each sequence."""
        plan, k, e = self.plan, self.k, self.e
        self.joined = e.r("add.s32", k.shared, plan.before_joined)
        place = lambda column, group: e.r("and.b32", e.scaled(group, 2, column), COLUMNS - 1)
        line = e.scaled(k.quad, LINE, e.scaled(place(k.row, k.quad), VECTOR, 0))
        self.read = e.r("add.s32", self.joined, line)
        column = e.scaled(k.quad, 2, e.r("and.b32", k.row, 1))
        self.gate = e.r("shr.u32", k.row, 1)  # that of the vector that a lane writes
        group = e.scaled(k.warp, plan.gates, self.gate)
        at = place(column, e.r("and.b32", group, 3))
        self.write = e.scaled(group, LINE, e.scaled(at, VECTOR, self.joined))
        self.writes = "" if plan.gates == 4 else e.p("setp.lt.u32", self.gate, plan.gates)
        bit = lambda i: e.p("setp.gt.s32", e.r("and.b32", k.row, 1 << i), 0)
        self.bits = [bit(i) for i in range(3)]
        self.picks = e.r("selp.b32", "0x3276", "0x5410", self.bits[0])
        for line in range(plan.columns, 4 * plan.chunks):
            for n, odd in itertools.product(range(plan.tiles), range(2)):
                at = e.scaled(k.lane, 4, self.joined)
                further = odd * plan.joined + (n * plan.chunks * 4 + line) * LINE
                e.op("st.shared.b32", f"[{at}+{further}]", 0, when=e.p("setp.eq.u32", k.warp, 0))
        self.slot = e.scaled(k.lane, 8, e.scaled(k.warp, plan.cluster * 256, 0))  # what a lane receives

    def _find_targets(self) -> None:
        """Where the units' block receives a lane's sums of each group of eight units, and that block's mbarriers.

        If all groups of a warp are one block's, the first group's place says where the others are. Else a table in
        shared memory has the place and the mbarriers for each, of which a lane writes one and all read all.
        """
        plan, k, e = self.plan, self.k, self.e
        self.lane = e.scaled(k.lane, 8, 0)
        which = "0" if plan.together else e.r("and.b32", k.lane, plan.cluster - 1)
        group = e.scaled(k.warp, plan.cluster, which)  # of eight units among all
        block = e.r("div.u32", group, plan.warps)
        warp = e.r("sub.s32", group, e.r("mul.lo.s32", block, plan.warps))
        place = e.scaled(warp, plan.cluster * 256, e.scaled(k.rank, 256, k.shared))
        target = [e.in_block(address, block) for address in (place, k.barriers)]
        self.target = (e.r("add.s32", target[0], self.lane), target[1])
        self.table = e.r("add.s32", k.shared, 2 * plan.received + 128)
        self.table = e.scaled(k.warp, plan.table, self.table)
        if not plan.together:
            own = e.scaled(which, 8, self.table)
            e.op("st.shared.v2.b32", f"[{own}]", target, when=e.p("setp.lt.u32", k.lane, plan.cluster))
            e.op("bar.warp.sync", "0xffffffff")

    def _targets(self) -> Iterator[tuple[str, int, str]]:
        """For each group of eight units the address to which a lane sends, what is added to it, and the mbarriers."""
        plan, e = self.plan, self.e
        for half in range(plan.cluster):
            if plan.together:
                yield self.target[0], half * plan.cluster * 256, self.target[1]
            else:
                place, barrier = e.new(), e.new()
                e.op("ld.shared.v2.b32", [place, barrier], f"[{self.table}+{8 * half}]")
                yield e.r("add.s32", place, self.lane), 0, barrier

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _step(self, step: str) -> None:
        plan, s, e = self.plan, self.sequences, self.e
        turn = Turn(self.k, step)
        gates, dy, before = self._read(step)
        live, anew = s.live(step), s.resets(lambda mark: e.p("setp.gt.s32", mark, 0))
        self._receive(turn)
        found = {}
        for key in s.keys:
            dh = e.f("add.rn.f32", self.dh[key], dy[key])
            derivatives, kept = self._derivatives(key, dh, [g[key] for g in gates], before, live[key], anew[key])
            self._keep(key, dh, kept, live[key], anew[key])
            found[key] = self._stored(key, derivatives, live[key])
        for n in range(plan.tiles):
            self._join(n, list(zip(found[n, 0], found[n, 1], strict=True)), turn)
        self.matrix.fetch()
        e.op("bar.sync", MEETING, 32 * plan.warps)
        sums = self.matrix.multiply(plan.dtype, [self._columns(n, turn) for n in range(plan.tiles)])
        for half, (place, further, barrier) in enumerate(self._targets()):
            to, told = e.r("add.s32", place, turn.other), e.r("add.s32", barrier, turn.other_barrier)
            for n, of_tiles in enumerate(sums):
                values = of_tiles[half // 2][2 * (half % 2) : 2 * (half % 2) + 2]
                e.send("v2.f32", f"{to}+{further + n * plan.warps * plan.cluster * 256}", values, told)
        s.advance()

    def _read(self, step: str) -> tuple[list[dict[Key, str]], dict[Key, str], dict[Key, str]]:
        """The gates, dy, and the state before the step that derivatives take; the later steps' are fetched."""
        s, units = self.sequences, self.units
        columns = range(0, self.saved, units)
        gates = [s.floats(s.at["gates"], self.saved, column) for column in columns]
        s.fetch("gates", step, self.saved, 4, columns)
        dy = s.widened(self.plan.dtype, s.halves(s.at["y"], units))
        s.fetch("y", step, units, 2)
        before: dict[Key, str] = {}
        if "cells_before" in s.at:
            before = s.floats(s.at["cells_before"], units)
            s.fetch("cells_before", step, units, 4)
        elif "before" in s.at:
            before = s.widened(self.plan.dtype, s.halves(s.at["before"], units))
            s.fetch("before", step, units, 2)
        return gates, dy, before

    def _receive(self, turn: Turn) -> None:
        """dh from the sums of all blocks, where they count, and what the cell keeps."""
        plan, e = self.plan, self.e
        turn.receive(self.given.steps + 1)
        with e.only_if("setp.gt.s32", turn.step, 0):
            start = e.r("add.s32", turn.here, self.slot)
            for n in range(plan.tiles):
                place = lambda source, n=n: f"[{start}+{256 * (n * plan.warps * plan.cluster + source)}]"
                pairs = [e.load_floats("shared", place(source), 2) for source in range(plan.cluster)]
                for i in range(2):
                    total = ft.reduce(ft.partial(e.f, "add.rn.f32"), [pair[i] for pair in pairs])
                    dh = self.dh[n, i]
                    if plan.cell == "gru_after":
                        total = e.f("add.rn.f32", dh, total)
                    if self.counts:
                        total = e.f("selp.f32", total, dh, e.p("setp.gt.s32", self.counts[n, i], 0))
                    e.op("mov.f32", dh, total)

    def _derivatives(
        self, key: Key, dh: str, gates: list[str], before: dict[Key, str], live: str, anew: str
    ) -> tuple[list[str], str]:
        """e by column, and of dh what does not pass through the matrix; an LSTM's dc is set."""
        e, cell = self.e, self.plan.cell
        if cell == "gru_after":
            return cells_ptx.gru_gradient(e, gates, before[key], dh)
        if cell != "lstm":
            return [cells_ptx.plain_gradient(e, cell, gates[0], dh)], ""
        dc = self.dc[key]
        found, new = cells_ptx.lstm_gradient(e, gates, before[key], dh, dc, self.given.clip)
        new = e.f("selp.f32", ZERO, new, anew) if anew else new
        e.op("mov.f32", dc, e.f("selp.f32", new, dc, live) if live else new)
        return found, ""

    def _keep(self, key: Key, dh: str, kept: str, live: str, anew: str) -> None:
        """dh before the sums of this step come: that of the cell, or where a sequence has no such step all of it."""
        e = self.e
        if anew:
            kept = e.f("selp.f32", ZERO, kept or ZERO, anew)
        if live:
            kept = e.f("selp.f32", kept or ZERO, dh, live)
        if kept:
            e.op("mov.f32", self.dh[key], kept)
        if self.counts:
            counts = e.r("selp.b32", 0, 1, anew) if anew else 1
            counts = e.r("selp.b32", counts, 0, live) if live else counts
            e.op("mov.b32", self.counts[key], counts)

    def _stored(self, key: Key, derivatives: list[str], live: str) -> list[str]:
        """Stores e, which is 0 where a sequence has no such step; returns what multiplies the matrix, by gate."""
        e, s = self.e, self.sequences
        if live:
            derivatives = [e.f("selp.f32", v, ZERO, live) for v in derivatives]
        for j, value in enumerate(derivatives):
            place = s.place(s.at["e"], key, self.saved, 4, j * self.units)
            e.op("st.global.f32", place, value, when=s.exists[key])
        if self.plan.cell == "gru_after":
            return [*derivatives[:2], derivatives[3]]
        return derivatives

    def _columns(self, n: int, turn: Turn) -> Callable[[int], str]:
        start = self.e.scaled(turn.odd, self.plan.joined, self.read)
        return lambda chunk: f"[{start}+{(n * self.plan.chunks + chunk) * 4 * LINE}]"

    def _join(self, n: int, pairs: list[tuple[str, str]], turn: Turn) -> None:
        """Writes the derivatives of eight units and eight sequences: each lane a vector of one gate and sequence."""
        e, plan = self.e, self.plan
        words = [e.r(f"cvt.rn.{plan.dtype}x2.f32", high, low) for low, high in pairs]
        exchanged = lambda word, distance: e.r("shfl.sync.bfly.b32", word, distance, 31, "0xffffffff")
        vectors = [[e.r("prmt.b32", word, exchanged(word, 4), self.picks)] for word in words]
        vectors += [vectors[-1]] * (len(vectors) == 3)
        for i in (1, 2):
            vectors = self._halved(vectors, 4 << i, self.bits[i])
        target = e.scaled(turn.odd, plan.joined, self.write)
        e.op("st.shared.v4.b32", f"[{target}+{n * plan.chunks * 4 * LINE}]", vectors[0], when=self.writes)

    def _halved(self, vectors: list[list[str]], distance: int, bit: str) -> list[list[str]]:
        """Vectors of twice the units: of two gates a lane takes the one of its bit, and sends the other one."""
        e = self.e
        pick = lambda a, b: e.r("selp.b32", b, a, bit)
        exchanged = lambda word: e.r("shfl.sync.bfly.b32", word, distance, 31, "0xffffffff")
        found = []
        for first, second in zip(vectors[::2], vectors[1::2] or vectors, strict=True):
            own = [pick(a, b) for a, b in zip(first, second, strict=True)]
            other = [exchanged(pick(b, a)) for a, b in zip(first, second, strict=True)]
            low = [pick(a, b) for a, b in zip(own, other, strict=True)]
            high = [pick(b, a) for a, b in zip(own, other, strict=True)]
            found.append(low + high)
        return found

    def _end(self) -> None:
        """Receives the last sums and stores the gradients of the initial states."""
        e, s = self.e, self.sequences
        self._receive(Turn(self.k, e.r("mov.b32", self.given.steps)))
        for key in s.keys:
            half = e.new("h")
            e.op(f"cvt.rn.{self.plan.dtype}.f32", half, self.dh[key])
            e.op("st.global.b16", s.place(self.first_h, key, self.units, 2), half, when=s.exists[key])
            if self.dc:
                e.op("st.global.f32", s.place(self.first_c, key, self.units, 4), self.dc[key], when=s.exists[key])
