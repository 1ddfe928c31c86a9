"""The PTX of a recurrence's gradient: all steps of a set of sequences in one cluster, in the order opposite to forward.

Schedule of a step: a block computes the derivatives of its units' gates, joins those of its warps in shared memory, and
multiplies them by its columns of the recurrent matrix, for all units. These sums go to the blocks that have the units,
which add those of all blocks, block 0's first: that is what the step before in time has from this one.

The order of additions: a block's groups of eight columns are numbered by warp, and then by gate; one chunk has four of
them, one for each lane of four, and its two `mma` the first and the second half of each. Where a warp has fewer than
four tiles, the first half of the `mma` and the second half have sums of their own, which are added. The derivatives are
rounded to the matrix' dtype before; all else is float32. So bits depend on the size of the cluster, which the units and
the cell alone decide.
"""

import functools as ft
import itertools
from collections.abc import Callable, Iterator

from jaxdnn._src.hopper.ptx import real
from jaxdnn._src.rnn.hopper.backward_plan import Plan
from jaxdnn._src.rnn.hopper.block_ptx import VECTOR, Block, Matrix, Turn
from jaxdnn._src.rnn.hopper.curves_ptx import ONE, ZERO, tanh
from jaxdnn._src.rnn.hopper.plan import AHEAD, COLUMNS, LINE, Given

STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
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


Key = tuple[int, int]  # a set of eight sequences, and one of a thread's two sequences in it


class Backward:
    """Emits the kernel."""

    def __init__(self, plan: Plan, given: Given) -> None:
        self.plan, self.given = plan, given
        names = operands(plan.cell, given)
        sizes = {"cluster": plan.cluster, "warps": plan.warps, "threads": plan.threads, "groups": 1}
        k = self.k = Block(names, **sizes, size=plan.received)
        self.e = k.e
        self.keys: list[Key] = [(n, i) for n in range(plan.tiles) for i in range(2)]
        self.wide = plan.gates * plan.units
        self.entering = self.saved = self.wide + (plan.units if plan.cell == "gru_after" else 0)
        self.whole = given.batch % plan.sequences == 0

    def text(self) -> str:
        plan, given, k, e = self.plan, self.given, self.k, self.e
        k.make_barriers(given.steps)
        k.arrive()
        has_units = ("setp.lt.u32", k.warp, plan.warps)
        with e.only_if(*has_units):
            self._begin()
        k.meet()
        with e.only_if(*has_units):
            with e.loop(0, given.steps, 1) as step:
                self._step(step)
            self._end()
        k.arrive()  # no block ends before all have received
        k.meet()
        return e.text()

    # ---- places ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        plan, given, k, e = self.plan, self.given, self.k, self.e
        first = e.scaled(e.r("mov.u32", "%clusterid.x"), plan.sequences)
        self.sequence = e.scaled(k.quad, 2, first)
        self.exists = {(n, i): self._less(COLUMNS * n + i) for n, i in self.keys}
        begins = e.r("mul.lo.s32", k.rank, plan.own)  # the block's first unit
        own = e.r("add.s32", e.scaled(k.warp, 8, begins), k.row)
        self._load_matrix(begins)
        self._find_places()
        self._find_targets()
        self.at: dict[str, str] = {}
        self.strides: dict[str, int] = {}
        for name, columns, size in (
            ("y", plan.units, 2), ("gates", self.saved, 4), ("cells_before", plan.units, 4), ("before", plan.units, 2),
            ("e", self.entering, 4), ("resets", 1, 4),
        ):  # fmt: skip
            if name in k.base:
                self._walk(name, columns, size, "" if name == "resets" else own)
        self.dh = self._narrow(self._row_of("h", plan.units, 2, own))
        self.first_h = self._row_of("first_h", plan.units, 2, own)
        self.dc: dict[Key, str] = {}
        if plan.cell == "lstm":
            self.dc = self._floats(self._row_of("c", plan.units, 4, own), plan.units)
            self.first_c = self._row_of("first_c", plan.units, 4, own)
        self.lengths: dict[Key, str] = {}
        if given.ragged:
            at = e.d("mad.wide.u32", self.sequence, 4, k.base["lengths"])
            for n, i in self.keys:
                self.lengths[n, i] = e.r("mov.b32", 0)
                e.op("ld.global.nc.b32", self.lengths[n, i], f"[{at}+{4 * (COLUMNS * n + i)}]", when=self.exists[n, i])
        # Whether the sums that come count, or else `dh` is what was kept.
        self.counts = {key: e.r("mov.b32", 1) for key in self.keys} if given.ragged or given.resets else {}

    def _load_matrix(self, begins: str) -> None:
        """Of rows of all units the block's columns: a chunk has four groups of eight of one gate's columns."""
        plan, k, e = self.plan, self.k, self.e
        place = plan.before_joined + 2 * plan.joined
        tiles = [(2 * i, 2 * i + 1) for i in range(plan.rows)]
        self.matrix = Matrix(k, tiles, plan.chunks, plan.kept, place, apart=plan.rows < 4)
        row = e.r("add.s32", e.scaled(k.warp, 16 * plan.rows, 0), k.row)
        rows = e.d("mad.wide.u32", row, 2 * self.wide, k.base["r"])
        places: dict[int, str] = {}

        def source(half: int, chunk: int) -> str:
            if chunk not in places:
                group = e.r("min.s32", e.r("add.s32", k.quad, 4 * chunk), plan.columns - 1)  # others multiply zeros
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
        target = [e.r("mapa.shared::cluster.u32", address, block) for address in (place, k.barriers)]
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

    def _less(self, plus: int) -> str:
        return "" if self.whole else self.e.p("setp.lt.s32", self.sequence, self.given.batch - plus)

    def _row_of(self, name: str, columns: int, size: int, column: str) -> str:
        row = self.e.d("mad.wide.u32", self.sequence, columns * size, self.k.base[name])
        return self.e.d("mad.wide.u32", column, size, row) if column else row

    def _walk(self, name: str, columns: int, size: int, column: str) -> None:
        """The address of an element in an array (steps, sequences, columns), at the first step, and its stride."""
        e, given = self.e, self.given
        stride = given.batch * columns * size
        at = self._row_of(name, columns, size, column)
        if not given.reverse:
            at = e.d("add.s64", at, (given.steps - 1) * stride)
        self.at[name], self.strides[name] = at, stride if given.reverse else -stride

    def _floats(self, at: str, columns: int, column: int = 0) -> dict[Key, str]:
        """Floats of a thread's unit, 0 where there is no such sequence."""
        e, found = self.e, {}
        for n, i in self.keys:
            exists = self.exists[n, i]
            found[n, i] = e.f("mov.f32", ZERO) if exists else e.new("f")
            place = 4 * ((COLUMNS * n + i) * columns + column)
            e.op("ld.global.nc.f32", found[n, i], f"[{at}+{place}]", when=exists)
        return found

    def _narrow(self, at: str) -> dict[Key, str]:
        """The same of an array of the narrow dtype, of a row of `units`."""
        e, found = self.e, {}
        for n, i in self.keys:
            value = e.new("h")
            e.op("mov.b16", value, 0)
            place = f"[{at}+{2 * (COLUMNS * n + i) * self.plan.units}]"
            e.op("ld.global.nc.b16", value, place, when=self.exists[n, i])
            zero = e.new("h")
            e.op("mov.b16", zero, 0)
            found[n, i] = e.unpack(self.plan.dtype, [e.r("mov.b32", [value, zero])])[0]
        return found

    def _fetch(self, name: str, step: str, columns: list[int], width: int, size: int) -> None:
        """Fetches what a later step reads into the second-level cache."""
        e, later = self.e, AHEAD * self.strides[name]
        fetches = e.p("setp.lt.s32", step, self.given.steps - AHEAD)
        for n, i in self.keys:
            for column in columns:
                place = size * ((COLUMNS * n + i) * width + column) + later
                if abs(place) < 1 << 31:
                    e.op("prefetch.global.L2", f"[{self.at[name]}+{place}]", when=e.both(fetches, self.exists[n, i]))

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _step(self, step: str) -> None:
        plan, k, e = self.plan, self.k, self.e
        units, count = plan.units, self.saved // plan.units
        turn = Turn(k, step)
        gates = [self._floats(self.at["gates"], self.saved, j * units) for j in range(count)]
        self._fetch("gates", step, [j * units for j in range(count)], self.saved, 4)
        dy = self._narrow(self.at["y"])
        self._fetch("y", step, [0], units, 2)
        before: dict[Key, str] = {}
        if "cells_before" in self.at:
            before = self._floats(self.at["cells_before"], units)
            self._fetch("cells_before", step, [0], units, 4)
        if "before" in self.at:
            before = self._narrow(self.at["before"])
            self._fetch("before", step, [0], units, 2)
        live, resets = self._marks(step)
        self._receive(turn)
        found = {}
        for key in self.keys:
            dh = e.f("add.rn.f32", self.dh[key], dy[key])
            derivatives, kept = self._derivatives(
                key, dh, [g[key] for g in gates], before.get(key, ""), live[key], resets[key]
            )
            self._keep(key, dh, kept, live[key], resets[key])
            found[key] = self._stored(key, derivatives, live[key])
        for n in range(plan.tiles):
            self._join(n, [(found[n, 0][j], found[n, 1][j]) for j in range(plan.gates)], turn)
        e.op("bar.sync", MEETING, 32 * plan.warps)
        columns = [self._columns(n, turn) for n in range(plan.tiles)]
        sums = self.matrix.multiply(plan.dtype, columns)
        for half, (place, further, barrier) in enumerate(self._targets()):
            to, told = e.r("add.s32", place, turn.other), e.r("add.s32", barrier, turn.other_barrier)
            for n, of_tiles in enumerate(sums):
                values = of_tiles[half // 2][2 * (half % 2) : 2 * (half % 2) + 2]
                e.op(STORE, f"[{to}+{further + n * plan.warps * plan.cluster * 256}]", values, f"[{told}]")
        for name, at in self.at.items():
            e.op("add.s64", at, at, self.strides[name])

    def _columns(self, n: int, turn: Turn) -> Callable[[int], str]:
        start = self.e.scaled(turn.odd, self.plan.joined, self.read)
        return lambda chunk: f"[{start}+{(n * self.plan.chunks + chunk) * 4 * LINE}]"

    def _marks(self, step: str) -> tuple[dict[Key, str], dict[Key, str]]:
        """Of each sequence: whether it has the step, and whether it begins anew with it; "" for always, and never."""
        e, given = self.e, self.given
        live, resets = dict.fromkeys(self.keys, ""), dict.fromkeys(self.keys, "")
        if given.ragged:
            time = step if given.reverse else e.r("sub.s32", given.steps - 1, step)
            live = {key: e.p("setp.lt.s32", time, self.lengths[key]) for key in self.keys}
        if given.resets:
            for n, i in self.keys:
                mark = e.r("mov.b32", 0)
                place = f"[{self.at['resets']}+{4 * (COLUMNS * n + i)}]"
                e.op("ld.global.nc.b32", mark, place, when=self.exists[n, i])
                resets[n, i] = e.p("setp.gt.s32", mark, 0)
        return live, resets

    def _receive(self, turn: Turn) -> None:
        """dh from the sums of all blocks, where they count, and what the cell keeps."""
        plan, e = self.plan, self.e
        turn.receive(self.given.steps + 1)
        with e.only_if("setp.gt.s32", turn.step, 0):
            start = e.r("add.s32", turn.here, self.slot)
            for n in range(plan.tiles):
                pairs = [
                    e.load_floats("shared", f"[{start}+{n * plan.warps * plan.cluster * 256 + 256 * s}]", 2)
                    for s in range(plan.cluster)
                ]
                for i in range(2):
                    total = ft.reduce(lambda a, b: e.f("add.rn.f32", a, b), [pair[i] for pair in pairs])
                    counts = e.p("setp.gt.s32", self.counts[n, i], 0) if self.counts else ""
                    dh = self.dh[n, i]
                    if plan.cell == "gru_after":
                        total = e.f("add.rn.f32", dh, total)
                    e.op("mov.f32", dh, e.f("selp.f32", total, dh, counts) if counts else total)

    def _keep(self, key: Key, dh: str, kept: str, live: str, resets: str) -> None:
        """dh before the sums of this step come: that of the cell, or where a sequence has no such step all of it."""
        e = self.e
        if resets:
            kept = e.f("selp.f32", ZERO, kept or ZERO, resets)
        if live:
            kept = e.f("selp.f32", kept or ZERO, dh, live)
        if kept:
            e.op("mov.f32", self.dh[key], kept)
        if self.counts:
            counts = e.r("selp.b32", 0, 1, resets) if resets else 1
            counts = e.r("selp.b32", counts, 0, live) if live else counts
            e.op("mov.b32", self.counts[key], counts)

    def _derivatives(
        self, key: Key, dh: str, gates: list[str], before: str, live: str, resets: str
    ) -> tuple[list[str], str]:
        """e by column, and of dh what does not pass through the matrix; an LSTM's dc is set."""
        e, cell = self.e, self.plan.cell
        times = lambda *v: ft.reduce(lambda a, b: e.f("mul.rn.f32", a, b), v)
        less = lambda a, b: e.f("sub.rn.f32", a, b)
        plus = lambda a, b, c: e.f("fma.rn.f32", a, b, c)
        of_sigmoid = lambda s: times(s, less(ONE, s))
        of_tanh = lambda t: plus(e.f("neg.f32", t), t, ONE)
        if cell == "lstm":
            i, f, g, o = gates
            c = plus(f, before, times(i, g))
            below = above = ""
            if self.given.clip is not None:
                low, high = map(real, self.given.clip)
                below, above = e.p("setp.lt.f32", c, low), e.p("setp.gt.f32", c, high)
                c = e.f("selp.f32", low, e.f("selp.f32", high, c, above), below)
            t = tanh(e, c)
            dc = plus(dh, times(o, of_tanh(t)), self.dc[key])
            if below:
                dc = e.f("selp.f32", ZERO, e.f("selp.f32", ZERO, dc, above), below)
            found = [
                times(dc, g, of_sigmoid(i)), times(dc, before, of_sigmoid(f)),
                times(dc, i, of_tanh(g)), times(dh, t, of_sigmoid(o)),
            ]  # fmt: skip
            new = times(dc, f)
            new = e.f("selp.f32", ZERO, new, resets) if resets else new
            e.op("mov.f32", self.dc[key], e.f("selp.f32", new, self.dc[key], live) if live else new)
            return found, ""
        if cell == "gru_after":
            r, z, n, q = gates
            dn = times(dh, less(ONE, z), of_tanh(n))
            dz = times(dh, less(before, n), of_sigmoid(z))
            dr = times(dn, q, of_sigmoid(r))
            return [dr, dz, dn, times(dn, r)], times(dh, z)
        (h,) = gates
        slope = of_tanh(h) if cell == "tanh" else e.f("selp.f32", ONE, ZERO, e.p("setp.gt.f32", h, ZERO))
        return [times(slope, dh)], ""

    def _stored(self, key: Key, derivatives: list[str], live: str) -> list[str]:
        """Stores e, which is 0 where a sequence has no such step; returns what multiplies the matrix, by gate."""
        e, (n, i) = self.e, key
        if live:
            derivatives = [e.f("selp.f32", v, ZERO, live) for v in derivatives]
        for j, value in enumerate(derivatives):
            place = 4 * ((COLUMNS * n + i) * self.entering + j * self.plan.units)
            e.op("st.global.f32", f"[{self.at['e']}+{place}]", value, when=self.exists[key])
        if self.plan.cell == "gru_after":
            return [*derivatives[:2], derivatives[3]]
        return derivatives

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
        plan, e = self.plan, self.e
        self._receive(Turn(self.k, e.r("mov.b32", self.given.steps)))
        for n, i in self.keys:
            half = e.new("h")
            e.op(f"cvt.rn.{plan.dtype}.f32", half, self.dh[n, i])
            place = 2 * (COLUMNS * n + i) * plan.units
            e.op("st.global.b16", f"[{self.first_h}+{place}]", half, when=self.exists[n, i])
            if self.dc:
                place = 4 * (COLUMNS * n + i) * plan.units
                e.op("st.global.f32", f"[{self.first_c}+{place}]", self.dc[n, i], when=self.exists[n, i])
