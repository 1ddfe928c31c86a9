"""The PTX of a recurrence, forward: all steps of a set of sequences in one cluster.

Schedule of a step: a warp waits until all of h has come, multiplies it by its rows of the recurrent matrix, computes
its units' new states, sends them to all blocks, and stores its results. Warps of a block never wait for each other but
by what they receive.

The order of additions: the units in groups of eight, G = 0, 1, ...; `mma` number s, of H / 16, adds the products with
units 4 (s mod 2) to 4 (s mod 2) + 3 of the groups 4 (s div 2) to 4 (s div 2) + 3 to the sum of those before. The first
half of the `mma` and the second half, each from 0, give two sums, which are added, and then to a. What is rounded: h to
the matrix' dtype; all else is float32.

It is PTX text, which an empty Pallas kernel embeds: Mosaic GPU has no `mma.sync`. Plain Pallas was not measured.
"""

import functools as ft
from typing import Any

from jaxdnn._src.hopper.curves_ptx import ZERO
from jaxdnn._src.rnn.hopper import cells_ptx
from jaxdnn._src.rnn.hopper.block_ptx import VECTOR, Block, Matrix, States, Turn
from jaxdnn._src.rnn.hopper.plan import COLUMNS, TILES, Given, Plan
from jaxdnn._src.rnn.hopper.sequences_ptx import Key, Sequences
from jaxdnn._src.rnn.steps import GATES


def operands(cell: str, given: Given) -> tuple[str, ...]:
    """The arrays: a, the matrix' rows, and others, then the results."""
    cells = ["c"] if cell == "lstm" else []
    marks = [*(["lengths"] if given.ragged else []), *(["resets"] if given.resets else [])]
    saved = [*(["gates"] if given.saves else []), *(["cells"] if given.saves and cells else [])]
    names = ["a", "r", *(["q"] if cell == "gru_after" else []), "h", *cells, *marks]
    return (*names, "y", "last_h", *(f"last_{c}" for c in cells), *saved)


def saved_columns(plan: Any) -> int:
    """Columns of the gates that are saved."""
    return (GATES[plan.cell] + (plan.cell == "gru_after")) * plan.units


@ft.lru_cache
def forward(plan: Plan, given: Given) -> str:
    """The PTX; operands as `operands` says, then shared memory."""
    return Forward(plan, given).text()


Cell = tuple[int, int, int]  # a set of sequences, a sequence of two, and a group of units


class Forward:
    """Emits the kernel."""

    def __init__(self, plan: Plan, given: Given) -> None:
        self.plan, self.given = plan, given
        names = operands(plan.cell, given)
        sizes = {"cluster": plan.cluster, "warps": plan.warps, "threads": plan.threads, "groups": plan.groups}
        k = self.k = Block(names, **sizes, size=plan.state)
        self.e = k.e
        self.gates, self.units = GATES[plan.cell], plan.units
        k.make_barriers(given.steps - 1)
        self.sequences = Sequences(k, given, plan.tiles, backwards=given.reverse)
        self.states = States(k, plan.units)

    def text(self) -> str:
        plan, k, e = self.plan, self.k, self.e
        self.states.begin(k.base["h"], self.sequences.first, self.given.batch, plan.tiles)
        k.e.arrive_in_cluster()
        with e.only_if("setp.lt.u32", k.warp, plan.warps):
            self._begin()
        k.e.wait_for_cluster()
        with e.only_if("setp.lt.u32", k.warp, plan.warps):
            with e.loop(0, self.given.steps, 1) as step:
                self._step(step)
            self._end()
        k.e.arrive_in_cluster()  # no block ends before all have received
        k.e.wait_for_cluster()
        return e.text()

    # ---- before the steps --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Addresses, the matrix and the states."""
        plan, s, k, e, units = self.plan, self.sequences, self.k, self.e, self.units
        unit = e.scaled(self.states.number, 8 * plan.groups, 0)
        own = e.r("add.s32", unit, k.row)
        self._load_matrix(own)
        for name, columns in (("a", self.gates * units), ("gates", saved_columns(plan)), ("cells", units)):
            if name in k.base:
                s.walk(name, columns, 4, own)
        sent = e.r("add.s32", s.first, self.states.column)  # the sequence whose vectors a lane sends and stores
        self.sent_exists = [s.less(sent, COLUMNS * n) for n in range(plan.tiles)]
        s.walk("y", units, 2, unit, sent)
        self.last_h = s.row("last_h", units, 2, unit, sent)
        self.h: dict[tuple[int, int], str] = {}
        if self.given.ragged or plan.cell == "gru_after":
            self.h = self._first_h(s.row("h", units, 2, own))
        self.c: dict[Cell, str] = {}
        if plan.cell == "lstm":
            self.c = self._by_group(s.row("c", units, 4, own), units)
            self.last_c = s.row("last_c", units, 4, own)
        if "q" in k.base:
            self.q = e.load_floats("global.nc", f"[{e.d('mad.wide.u32', own, 4, k.base['q'])}]", 1)[0]

    def _load_matrix(self, own: str) -> None:
        plan, k, e, units = self.plan, self.k, self.e, self.units
        rows = e.d("mad.wide.u32", k.quad, VECTOR, e.d("mad.wide.u32", own, 2 * units, k.base["r"]))
        halves = plan.halves
        numbers = iter(range(len(halves)))
        number = lambda half: None if half is None else next(numbers)
        tiles = [(number(low), number(high)) for low, high in TILES[plan.cell]]
        row = lambda gate, group: gate * units + 8 * group
        place = 2 * plan.state + 128
        self.matrix = Matrix(k, tiles, plan.chunks, plan.kept, place, apart=True, streamed=plan.streamed)
        self.matrix.load(lambda half, chunk: f"[{rows}+{row(*halves[half]) * 2 * units + 64 * chunk}]")

    def _by_group(self, at: str, columns: int, column: int = 0) -> dict[Cell, str]:
        """Floats of a thread's units and sequences."""
        of_group = lambda group: self.sequences.floats(at, columns, column + 8 * group)
        return {(*key, group): v for group in range(self.plan.groups) for key, v in of_group(group).items()}

    def _first_h(self, at: str) -> dict[tuple[int, int], str]:
        """A unit's initial states of two sequences, as words, by set of sequences and group of units."""
        words = {}
        for group in range(self.plan.groups):
            halves = self.sequences.halves(at, self.units, 8 * group)
            for n in range(self.plan.tiles):
                words[n, group] = self.e.r("mov.b32", [halves[n, 0], halves[n, 1]])
        return words

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _step(self, step: str) -> None:
        plan, given, s, e = self.plan, self.given, self.sequences, self.e
        turn = Turn(self.k, step)
        wide = self.gates * self.units
        a = [self._by_group(s.at["a"], wide, gate * self.units) for gate in range(self.gates)]
        s.fetch(
            "a", step, wide, 4, [g * self.units + 8 * group for g in range(self.gates) for group in range(plan.groups)]
        )
        live, anew = s.live(step), s.resets(lambda mark: e.p("setp.eq.s32", mark, 0))
        known = {key: e.both(live[key], anew[key]) for key in s.keys}
        self.matrix.fetch()
        turn.receive(given.steps)
        sums = self.matrix.multiply(plan.dtype, [self.states.at(turn.here, n) for n in range(plan.tiles)])
        products = self._by_gate(sums, known)
        new = {}
        for cell, of_first in a[0].items():
            entering = [of_first, *(of_gate[cell] for of_gate in a[1:])]
            new[cell] = self._cell(cell, entering, products, known[cell[:2]], live[cell[:2]])
        self._pass_on(step, turn, new)
        s.advance()

    def _by_gate(self, sums: list[list[list[str]]], known: dict[Key, str]) -> dict[tuple[int, Cell], str]:
        """h times the matrix, by gate; 0 where the state is not known."""
        found = {}
        for (n, i), holds in known.items():
            for tile, values in zip(TILES[self.plan.cell], sums[n], strict=True):
                for j, half in enumerate(tile):
                    if half is not None:
                        gate, group = half
                        found[gate, (n, i, group)] = self._if(holds, values[2 * j + i])
        return found

    def _cell(self, cell: Cell, a: list[str], products: dict[tuple[int, Cell], str], known: str, live: str) -> str:
        """h of a unit and a sequence after the step."""
        e, kind = self.e, self.plan.cell
        s = [products[gate, cell] for gate in range(self.gates)]
        if kind == "lstm":
            gates, c, h = cells_ptx.lstm(e, a, s, self._if(known, self.c[cell]), self.given.clip)
            e.op("mov.f32", self.c[cell], self._if(live, c, self.c[cell]))
        elif kind == "gru_after":
            gates, h = cells_ptx.gru(e, a, s, self.q, self._if(known, self._old(cell)))
        else:
            h = cells_ptx.plain(e, kind, a[0], s[0])
            gates = [h]
        if self.given.saves:
            self._save(cell, gates)
        return self._if(live, h, self._old(cell)) if live else h

    def _if(self, holds: str, value: str, otherwise: str = ZERO) -> str:
        return self.e.f("selp.f32", value, otherwise, holds) if holds else value

    def _old(self, cell: Cell) -> str:
        """h before the step."""
        n, i, group = cell
        return self.e.unpack(self.plan.dtype, [self.h[n, group]])[i]

    def _save(self, cell: Cell, gates: list[str]) -> None:
        """Stores what derivatives take."""
        s, (n, i, group) = self.sequences, cell
        values = [("gates", saved_columns(self.plan), j * self.units, value) for j, value in enumerate(gates)]
        values += [("cells", self.units, 0, self.c[cell])] if self.c else []
        for name, columns, column, value in values:
            place = s.place(s.at[name], (n, i), columns, 4, column + 8 * group)
            self.e.op("st.global.f32", place, value, when=s.exists[n, i])

    def _pass_on(self, step: str, turn: Turn, new: dict[Cell, str]) -> None:
        """Sends and stores h."""
        plan, e = self.plan, self.e
        last = e.p("setp.eq.s32", step, self.given.steps - 1)
        vectors = {}
        for n, group in ((n, group) for n in range(plan.tiles) for group in range(plan.groups)):
            word = e.r(f"cvt.rn.{plan.dtype}x2.f32", new[n, 1, group], new[n, 0, group])
            if self.h:
                e.op("mov.b32", self.h[n, group], word)
            vectors[n, group] = self.states.gathered(word)
        with e.only_if("setp.lt.s32", step, self.given.steps - 1):
            for (n, group), vector in vectors.items():
                self.states.send(turn, group, n, vector)
        stores = e.p("setp.eq.u32", self.states.to, 0)  # of lanes that have the same vector one
        for (n, group), vector in vectors.items():
            when = e.both(stores, self.sent_exists[n])
            place = 2 * (COLUMNS * n * self.units + 8 * group)
            e.op("st.global.v4.b32", f"[{self.sequences.at['y']}+{place}]", vector, when=when)
            e.op("st.global.v4.b32", f"[{self.last_h}+{place}]", vector, when=e.both(when, last))

    def _end(self) -> None:
        """Stores the final cells."""
        for (n, i, group), value in self.c.items():
            place = self.sequences.place(self.last_c, (n, i), self.units, 4, 8 * group)
            self.e.op("st.global.f32", place, value, when=self.sequences.exists[n, i])
