"""The PTX of a recurrence, forward: all steps of a set of sequences in one cluster.

Schedule of a step: a warp waits until all of h has come, multiplies it by its rows of the recurrent matrix, computes
its units' new states, sends them to all blocks, and stores its results. Warps of a block never wait for each other but
by what they receive.

The order of additions: the units in groups of eight, G = 0, 1, ...; `mma` number s, of H / 16, adds the products with
units 4 (s mod 2) to 4 (s mod 2) + 3 of the groups 4 (s div 2) to 4 (s div 2) + 3 to the sum of those before. The first
half of the `mma` and the second half, each from 0, give two sums, which are added, and then to a. What is rounded: h to
the matrix' dtype; all else is float32.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

from jaxdnn._src.hopper.ptx import real
from jaxdnn._src.rnn.hopper.block_ptx import Block, Matrix, States, Turn
from jaxdnn._src.rnn.hopper.curves_ptx import ONE, ZERO, sigmoid, tanh
from jaxdnn._src.rnn.hopper.plan import AHEAD, COLUMNS, TILES, Given, Plan
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


Marks = dict[tuple[int, int], str]  # by set of sequences, and sequence of two
Entering = dict[tuple[int, int, int, int], str]  # by gate, set of sequences, group of units, and sequence of two


class Forward:
    """Emits the kernel. Values of a thread are indexed by set of sequences, group of units, and sequence of two."""

    def __init__(self, plan: Plan, given: Given) -> None:
        self.plan, self.given = plan, given
        names = operands(plan.cell, given)
        sizes = {"cluster": plan.cluster, "warps": plan.warps, "threads": plan.threads, "groups": plan.groups}
        k = self.k = Block(names, **sizes, size=plan.state)
        e = self.e = k.e
        self.wide = GATES[plan.cell] * plan.units
        self.first = e.scaled(e.r("mov.u32", "%clusterid.x"), plan.sequences)
        self.whole = given.batch % plan.sequences == 0
        k.make_barriers(given.steps - 1)

    def text(self) -> str:
        plan, given, k, e = self.plan, self.given, self.k, self.e
        states = self.states = States(k, plan.units)
        states.begin(k.base["h"], self.first, given.batch, plan.tiles)
        k.arrive()
        with e.only_if("setp.lt.u32", k.warp, plan.warps):
            self._begin()
        k.meet()
        with e.only_if("setp.lt.u32", k.warp, plan.warps):
            with e.loop(0, given.steps, 1) as step:
                self._step(step)
            self._end()
        k.arrive()  # no block ends before all have received
        k.meet()
        return e.text()

    # ---- places ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Addresses, the matrix and the states."""
        plan, given, k, e = self.plan, self.given, self.k, self.e
        base, units = k.base, plan.units
        unit = e.r("mad.lo.s32", self.states.number, 8 * plan.groups, 0)
        own = e.r("add.s32", unit, k.row)
        rows = e.d("mad.wide.u32", own, 2 * units, base["r"])
        rows = e.d("mad.wide.u32", k.quad, 16, rows)
        halves = plan.halves
        numbers = iter(range(len(halves)))
        number = lambda half: None if half is None else next(numbers)
        tiles = [(number(low), number(high)) for low, high in TILES[plan.cell]]
        after = 2 * plan.state + 128
        self.matrix = Matrix(k, tiles, plan.chunks, plan.kept, after, apart=True)
        self.matrix.load(lambda half, chunk: f"[{rows}+{self._row(*halves[half]) * 2 * units + 64 * chunk}]")
        self.sequence = e.scaled(k.quad, 2, self.first)
        self.exists = self._each(self._exists)
        self.sent = e.r("add.s32", self.first, self.states.column)
        self.sent_exists = [self._less(self.sent, COLUMNS * n) for n in range(plan.tiles)]
        self.at: dict[str, str] = {}
        self.strides: dict[str, int] = {}
        for name, columns in (("a", self.wide), ("gates", saved_columns(self.plan)), ("cells", units), ("resets", 1)):
            if name in base:
                self._walk(name, self.sequence, columns, 4, "" if name == "resets" else own)
        self._walk("y", self.sent, units, 2, unit)
        self.last_h = self._row_of("last_h", self.sent, units, 2, unit)
        self.h = self._first_h(own) if given.ragged or plan.cell == "gru_after" else {}
        self.c = {}
        if plan.cell == "lstm":
            at = self._row_of("c", self.sequence, units, 4, own)
            place = lambda n, group, i: f"[{at}+{4 * (units * (COLUMNS * n + i) + 8 * group)}]"
            self.c = self._loaded(place, self._every)
            self.last_c = self._row_of("last_c", self.sequence, units, 4, own)
        self.q = (
            "" if "q" not in base else e.load_floats("global.nc", f"[{e.d('mad.wide.u32', own, 4, base['q'])}]", 1)[0]
        )
        self.lengths = {}
        if given.ragged:
            at = e.d("mad.wide.u32", self.sequence, 4, base["lengths"])
            for n, i in self._columns:
                self.lengths[n, i] = e.r("mov.b32", 0)
                e.op("ld.global.nc.b32", self.lengths[n, i], f"[{at}+{4 * (COLUMNS * n + i)}]", when=self.exists[n, i])

    def _row(self, gate: int, group: int) -> int:
        """The first row of a half in the matrix, from that of the warp's first unit."""
        return gate * self.plan.units + 8 * group

    @property
    def _columns(self) -> list[tuple[int, int]]:
        """A thread's sequences."""
        return [(n, i) for n in range(self.plan.tiles) for i in range(2)]

    @property
    def _every(self) -> list[tuple[int, int, int]]:
        """A thread's pairs of a sequence and a unit."""
        return [(n, group, i) for n in range(self.plan.tiles) for group in range(self.plan.groups) for i in range(2)]

    def _less(self, sequence: str, plus: int) -> str:
        """Whether a sequence exists; "" if all do."""
        return "" if self.whole else self.e.p("setp.lt.s32", sequence, self.given.batch - plus)

    def _exists(self, n: int, i: int) -> str:
        return self._less(self.sequence, COLUMNS * n + i)

    def _each(self, of: Callable[[int, int], str]) -> Marks:
        return {(n, i): of(n, i) for n, i in self._columns}

    def _row_of(self, name: str, sequence: str, columns: int, size: int, column: str) -> str:
        """The address of an element in an array (sequences, columns)."""
        e = self.e
        row = e.d("mad.wide.u32", sequence, columns * size, self.k.base[name])
        return e.d("mad.wide.u32", column, size, row) if column else row

    def _walk(self, name: str, sequence: str, columns: int, size: int, column: str) -> None:
        """The address of an element in an array (steps, sequences, columns), at the first step, and its stride."""
        e, given = self.e, self.given
        stride = given.batch * columns * size
        at = self._row_of(name, sequence, columns, size, column)
        if given.reverse:
            at = e.d("add.s64", at, (given.steps - 1) * stride)
        self.at[name], self.strides[name] = at, -stride if given.reverse else stride

    def _loaded(self, place: Callable[..., str], keys: Sequence[Any]) -> dict[Any, str]:
        """Floats, 0 where there is no such sequence."""
        e, found = self.e, {}
        for key in keys:
            exists = self.exists[key[0], key[-1]]
            found[key] = e.f("mov.f32", ZERO) if exists else e.new("f")
            e.op("ld.global.nc.f32", found[key], place(*key), when=exists)
        return found

    def _first_h(self, own: str) -> Marks:
        """A unit's initial states of a thread's two sequences, as words."""
        e, units = self.e, self.plan.units
        at = self._row_of("h", self.sequence, units, 2, own)
        words = {}
        for n in range(self.plan.tiles):
            for group in range(self.plan.groups):
                pair = []
                for i in range(2):
                    value = e.new("h")
                    e.op("mov.b16", value, 0)
                    place = f"[{at}+{2 * (units * (COLUMNS * n + i) + 8 * group)}]"
                    e.op("ld.global.nc.b16", value, place, when=self.exists[n, i])
                    pair.append(value)
                words[n, group] = e.r("mov.b32", pair)
        return words

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _step(self, step: str) -> None:
        plan, given, k, e = self.plan, self.given, self.k, self.e
        turn = Turn(k, step)
        a = self._entering(step)
        known, live = self._marks(step)
        turn.receive(given.steps)
        sums = self.matrix.multiply(plan.dtype, [self.states.at(turn.here, n) for n in range(plan.tiles)])
        products = self._by_gate(sums, known)
        new = {key: self._cell(key, a, products, known, live) for key in self._every}
        last = e.p("setp.eq.s32", step, given.steps - 1)
        vectors = {}
        for n in range(plan.tiles):
            for group in range(plan.groups):
                word = e.r(f"cvt.rn.{plan.dtype}x2.f32", new[n, group, 1], new[n, group, 0])
                if self.h:
                    e.op("mov.b32", self.h[n, group], word)
                vectors[n, group] = self.states.gathered(word)
        with e.only_if("setp.lt.s32", step, given.steps - 1):
            for (n, group), vector in vectors.items():
                self.states.send(turn, group, n, vector)
        stores = e.p("setp.eq.u32", self.states.to, 0)
        for (n, group), vector in vectors.items():
            when = e.both(stores, self.sent_exists[n])
            place = 2 * (COLUMNS * n * plan.units + 8 * group)
            e.op("st.global.v4.b32", f"[{self.at['y']}+{place}]", vector, when=when)
            e.op("st.global.v4.b32", f"[{self.last_h}+{place}]", vector, when=e.both(when, last))
        for name, at in self.at.items():
            e.op("add.s64", at, at, self.strides[name])

    def _entering(self, step: str) -> Entering:
        """a by gate, and what is fetched for later steps."""
        plan, e, at, later = self.plan, self.e, self.at["a"], AHEAD * self.strides["a"]
        found = {}
        fetches = e.p("setp.lt.s32", step, self.given.steps - AHEAD)
        for n, group, i in self._every:
            exists = self.exists[n, i]
            for gate in range(GATES[plan.cell]):
                place = 4 * ((COLUMNS * n + i) * self.wide + gate * plan.units + 8 * group)
                found[gate, n, group, i] = e.f("mov.f32", ZERO) if exists else e.new("f")
                e.op("ld.global.nc.f32", found[gate, n, group, i], f"[{at}+{place}]", when=exists)
                if abs(place + later) < 1 << 31:
                    e.op("prefetch.global.L2", f"[{at}+{place + later}]", when=e.both(fetches, exists))
        return found

    def _marks(self, step: str) -> tuple[Marks, Marks]:
        """Of each sequence: whether its state before the step is known, and whether it has the step; "" for always."""
        e, given = self.e, self.given
        live = {key: "" for key in self._columns}
        if given.ragged:
            time = e.r("sub.s32", given.steps - 1, step) if given.reverse else step
            live = {key: e.p("setp.lt.s32", time, self.lengths[key]) for key in self._columns}
        known = dict(live)
        if given.resets:
            for n, i in self._columns:
                mark = e.r("mov.b32", 0)
                place = f"[{self.at['resets']}+{4 * (COLUMNS * n + i)}]"
                e.op("ld.global.nc.b32", mark, place, when=self.exists[n, i])
                known[n, i] = e.both(e.p("setp.eq.s32", mark, 0), live[n, i])
        return known, live

    def _by_gate(self, sums: list[list[list[str]]], known: Marks) -> Entering:
        """h times the matrix, by gate; 0 where the state is not known."""
        found = {}
        for n, of_tiles in enumerate(sums):
            for tile, values in zip(TILES[self.plan.cell], of_tiles, strict=True):
                for j, half in enumerate(tile):
                    if half is None:
                        continue
                    gate, group = half
                    for i in range(2):
                        found[gate, n, group, i] = self._if(known[n, i], values[2 * j + i])
        return found

    def _if(self, holds: str, value: str, otherwise: str = ZERO) -> str:
        return self.e.f("selp.f32", value, otherwise, holds) if holds else value

    def _save(self, key: tuple[int, int, int], name: str, column: int, value: str) -> None:
        n, group, i = key
        columns = saved_columns(self.plan) if name == "gates" else self.plan.units
        place = 4 * ((COLUMNS * n + i) * columns + column + 8 * group)
        self.e.op("st.global.f32", f"[{self.at[name]}+{place}]", value, when=self.exists[n, i])

    def _cell(self, key: tuple[int, int, int], a: Entering, products: Entering, known: Marks, live: Marks) -> str:
        """h of a unit and a sequence after the step."""
        n, group, i = key
        e, cell, units = self.e, self.plan.cell, self.plan.units
        gates = GATES[cell]
        entering = [a[gate, *key] for gate in range(gates)]
        s = [products[gate, *key] for gate in range(gates)]
        if cell == "lstm":
            z = [e.f("add.rn.f32", *pair) for pair in zip(entering, s, strict=True)]
            saved = [sigmoid(e, z[0]), sigmoid(e, z[1]), tanh(e, z[2]), sigmoid(e, z[3])]
            before = self._if(known[n, i], self.c[key])
            c = e.f("fma.rn.f32", saved[1], before, e.f("mul.rn.f32", saved[0], saved[2]))
            c = self._clipped(c)
            h = e.f("mul.rn.f32", saved[3], tanh(e, c))
            e.op("mov.f32", self.c[key], self._if(live[n, i], c, self.c[key]))
        elif cell == "gru_after":
            q = e.f("add.rn.f32", s[2], self.q)
            r, z = (sigmoid(e, e.f("add.rn.f32", entering[j], s[j])) for j in range(2))
            new = tanh(e, e.f("fma.rn.f32", r, q, entering[2]))
            before = self._if(known[n, i], self._old(n, group, i))
            h = e.f("fma.rn.f32", z, before, e.f("mul.rn.f32", e.f("sub.rn.f32", ONE, z), new))
            saved = [r, z, new, q]
        else:
            z = e.f("add.rn.f32", entering[0], s[0])
            h = tanh(e, z) if cell == "tanh" else e.f("max.NaN.f32", z, ZERO)
            saved = [h]
        if self.given.saves:
            for j, value in enumerate(saved):
                self._save(key, "gates", j * units, value)
            if cell == "lstm":
                self._save(key, "cells", 0, self.c[key])
        return self._if(live[n, i], h, self._old(n, group, i)) if live[n, i] else h

    def _old(self, n: int, group: int, i: int) -> str:
        """h before the step."""
        return self.e.unpack(self.plan.dtype, [self.h[n, group]])[i]

    def _clipped(self, c: str) -> str:
        if self.given.clip is None:
            return c
        e, (low, high) = self.e, map(real, self.given.clip)
        below, above = e.p("setp.lt.f32", c, low), e.p("setp.gt.f32", c, high)
        return e.f("selp.f32", low, e.f("selp.f32", high, c, above), below)

    def _end(self) -> None:
        """Stores the final cells."""
        for (n, group, i), value in self.c.items():
            place = 4 * (self.plan.units * (COLUMNS * n + i) + 8 * group)
            self.e.op("st.global.f32", f"[{self.last_c}+{place}]", value, when=self.exists[n, i])
