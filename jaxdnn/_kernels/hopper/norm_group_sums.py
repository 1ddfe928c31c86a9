"""The sums of channels and groups over the threads of a cluster, for the kernels for images.

Order of additions, from an image's shape, the groups and the dtype alone: of a channel a thread's rounds one after the
other; forward then the channels of a thread's vector that are of one group, one after the other; then, if the columns
are 1, 2, 4, 8 or 16, the rows of a warp by exchange over lane distances 16, 8, ..., columns; then the rows of a block,
which are dealt out to up to 32 lanes, one after the other and then by exchange over distances 16, 8, ..., 1; then what
belongs to one group likewise; and then the blocks of the cluster one after the other. Backward the sums of a channel
are multiplied by its scale before those of a group are added; the gradients in scale and bias leave the kernel as sums
of a block, which are added outside.
"""

import contextlib
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence

from jaxdnn._kernels.hopper.norm_group_plan import ImagePlan
from jaxdnn._kernels.hopper.norm_group_walk import Walk
from jaxdnn._kernels.hopper.ptx import real

ZERO = real(0.0)
_BARRIER = 1  # of a whole block

Weigh = Callable[[str, list[str], str], list[str]]  # a channel of the part, its sums, the guard of their load


class Sums(Walk):
    """A walk whose sums are added up over the block and the cluster."""

    def __init__(self, plan: ImagePlan, operands: Sequence[str], arrays: Sequence[str]) -> None:
        super().__init__(plan, operands, arrays)
        self.exchanged, self.started = 0, False

    # ---- what a channel or a group has -------------------------------------------------------------------------------

    def parameter(self, name: str) -> list[str]:
        """The scale or bias of the thread's channels."""
        e, found = self.e, []
        here = e.d("mad.wide.u32", self.channel, 4, self.base[name])
        for start in range(0, self.plan.elements, 4):
            names = [e.new("f") for _ in range(4)]
            e.op("ld.global.nc.v4.f32", "{" + ", ".join(names) + "}", f"[{here}+{4 * start}]")
            found += names
        return found

    def of_group(self, name: str, group: str) -> str:
        """Where a statistic of a group of the part lies."""
        e, plan = self.e, self.plan
        number = e.r("mad.lo.s32", self.unit, plan.groups, group)
        return e.d("mad.wide.u32", number, 4, self.base[name])

    @property
    def alike(self) -> Iterator[tuple[slice, str, str]]:
        """The thread's cells, those together that are neighbouring groups: which, and the first as in `groups`."""
        plan = self.plan
        size = math.gcd(4, plan.cells) if plan.elements % plan.group == 0 else 1
        for start in range(0, plan.cells, size):
            yield slice(start, start + size), *self.groups[start]

    def load(self, space: str, place: str, count: int) -> list[str]:
        """1, 2 or 4 floats."""
        found = [self.e.new("f") for _ in range(count)]
        if count == 1:
            self.e.op(f"ld.{space}.f32", found[0], place)
        else:
            self.e.op(f"ld.{space}.v{count}.f32", "{" + ", ".join(found) + "}", place)
        return found

    def statistic(self, name: str) -> list[str]:
        """A saved statistic of the thread's cells."""
        found = []
        for cells, group, _ in self.alike:
            found += self.load("global.nc", f"[{self.of_group(name, group)}]", cells.stop - cells.start)
        return found

    def of(self, cells: Sequence[str], i: int) -> str:
        """What the cell of the thread's channel i has."""
        return cells[i * len(cells) // self.plan.elements]

    def shares(self, totals: Sequence[str], share: str) -> list[str]:
        return [self.e.f("mul.rn.f32", total, share) for total in totals]

    def times(self, value: str, factor: str, plus: str) -> str:
        if plus:
            return self.e.f("fma.rn.f32", value, factor, plus)
        return self.e.f("mul.rn.f32", value, factor)

    def store_statistics(self, statistics: dict[str, list[str]]) -> None:
        """Each by the thread of the cluster's first row that has the first cell of the group."""
        e = self.e
        for cells, group, place in self.alike:
            first = e.p("setp.eq.u32", self.pixel, 0)
            first = e.p("and.pred", first, e.p("setp.eq.u32", place, 0))
            for name, values in statistics.items():
                some = values[cells]
                kind = "f32" if len(some) == 1 else f"v{len(some)}.f32"
                stored = some[0] if len(some) == 1 else "{" + ", ".join(some) + "}"
                e.op(f"st.global.{kind}", f"[{self.of_group(name, group)}]", stored, when=first)

    def weigher(self, name: str) -> Weigh:
        """Multiplies the first two sums of a channel by its scale, if there is one."""
        e = self.e

        def weigh(channel: str, sums: list[str], guard: str) -> list[str]:
            if not name:
                return sums
            at = e.r("mad.lo.s32", self.place, self.plan.part, channel)
            scale = e.f("mov.f32", ZERO) if guard else e.new("f")
            e.op("ld.global.nc.f32", scale, f"[{e.d('mad.wide.u32', at, 4, self.base[name])}]", when=guard)
            return [e.f("mul.rn.f32", value, scale) for value in sums[:2]] + sums[2:]

        return weigh

    def store_sums(self, rest: Sequence[str], rstd: Sequence[str]) -> None:
        """The block's sums of dy h and dy, from those of dy (x - mean) and dy, by the threads of its first row."""
        e, plan = self.e, self.plan
        first = e.p("setp.eq.u32", self.row, 0)
        block = e.r("mad.lo.s32", self.image, plan.cluster, self.rank)
        target = e.d("mad.wide.u32", block, 8 * plan.channels, self.base["sums"])
        target = e.d("mad.wide.u32", self.channel, 4, target)
        here = e.scaled(self.column, 4 * plan.elements, self.sums)
        for start in range(0, plan.elements, 4):
            along, plain = ([e.new("f") for _ in range(4)] for _ in range(2))
            for i, values in enumerate((along, plain)):
                place = 4 * (i * plan.part + start)
                e.op("ld.shared.v4.f32", "{" + ", ".join(values) + "}", f"[{here}+{place}]", when=first)
            if rest:
                less = [e.f("neg.f32", self.of(rest, start + i)) for i in range(4)]
                along = [e.f("fma.rn.f32", r, g, a) for r, g, a in zip(less, plain, along, strict=True)]
            along = [e.f("mul.rn.f32", a, self.of(rstd, start + i)) for i, a in enumerate(along)]
            for i, values in enumerate((along, plain)):
                place = 4 * (i * plan.channels + start)
                e.op("st.global.v4.f32", f"[{target}+{place}]", "{" + ", ".join(values) + "}", when=first)

    # ---- sums --------------------------------------------------------------------------------------------------------

    def zeros(self) -> list[str]:
        """For the sums of the thread's channels."""
        return [self.e.f("mov.f32", ZERO) for _ in range(self.plan.elements)]

    def fold(self, sums: Sequence[str]) -> list[str]:
        """Sums of a thread's channels to those of its cells."""
        each, found = self.plan.elements // self.plan.cells, []
        for start in range(0, len(sums), each):
            total = sums[start]
            for value in sums[start + 1 : start + each]:
                total = self.e.f("add.rn.f32", total, value)
            found.append(total)
        return found

    def totals(self, values: Sequence[Sequence[str]], weigh: Weigh | None = None) -> list[list[str]]:
        """The sums of each quantity over groups, for each of the thread's cells, from sums of a thread's cells.

        With `weigh` these are sums of its channels; those of the block's channels stay in shared memory at `self.sums`,
        and what `weigh` makes of them is added up.
        """
        e, plan = self.e, self.plan
        cells, count = plan.columns * len(values[0]), len(values)
        exchange = e.r("add.s32", self.shared, self.area + 4 * self.exchanged * plan.cluster * plan.groups)
        self.exchanged += count  # none is used twice: threads may still read the last one
        scratch = e.r("add.s32", self.shared, self.area + 4 * plan.exchanged(len(self.arrays)))
        self._leave(values, scratch)
        self.sums = e.r("add.s32", scratch, 4 * count * cells * plan.pitch)
        e.op("bar.sync", _BARRIER, plan.threads)
        if plan.cluster > 1 and not self.started:
            e.op("barrier.cluster.wait.aligned")
            self.started = True
        each = cells // plan.groups  # of a group
        if each == 1 and weigh is None:
            with self._added(scratch, cells, plan.summands, plan.pitch, count) as (cell, lane, exists, found):
                self._send(exchange, cell, lane, exists, found)
        else:
            with self._added(scratch, cells, plan.summands, plan.pitch, count) as (cell, lane, exists, found):
                first = self._both(e.p("setp.eq.u32", lane, 0), exists)
                for i, value in enumerate(found):
                    e.op("st.shared.f32", f"[{e.scaled(cell, 4, self.sums)}+{4 * i * cells}]", value, when=first)
            e.op("bar.sync", _BARRIER, plan.threads)
            with self._added(self.sums, plan.groups, each, each, count, weigh) as (group, lane, exists, found):
                self._send(exchange, group, lane, exists, found)
        if plan.cluster > 1:
            e.op("barrier.cluster.arrive.release.aligned")
            e.op("barrier.cluster.wait.acquire.aligned")
        else:
            e.op("bar.sync", _BARRIER, plan.threads)
        return self._received(exchange, count)

    def _leave(self, values: Sequence[Sequence[str]], scratch: str) -> None:
        """Threads' sums into shared memory, (quantities, cells, pitch); rows of one warp are added before."""
        e, plan = self.e, self.plan
        many, guard = len(values[0]), self.mine
        if plan.folds:
            values = [[self._over_lanes(v, 16, plan.columns) for v in quantity] for quantity in values]
            guard = e.p("setp.lt.s32", self.lane, plan.columns) if plan.columns < 32 else ""
        start = e.r("mul.lo.s32", self.column, many * plan.pitch)
        start = e.r("add.s32", start, self.warp if plan.folds else self.row)
        here = e.scaled(start, 4, scratch)
        for i, quantity in enumerate(values):
            for j, value in enumerate(quantity):
                place = 4 * (i * plan.columns * many + j) * plan.pitch
                e.op("st.shared.f32", f"[{here}+{place}]", value, when=guard)

    def _over_lanes(self, value: str, distance: int, least: int) -> str:
        e = self.e
        while distance >= least:
            word = e.r("shfl.sync.bfly.b32", e.r("mov.b32", value), distance, 31, "0xffffffff")
            value = e.f("add.rn.f32", value, e.f("mov.b32", word))
            distance //= 2
        return value

    @contextlib.contextmanager
    def _added(
        self, start: str, items: int, terms: int, pitch: int, count: int, weigh: Weigh | None = None
    ) -> Iterator[tuple[str, str, str, list[str]]]:
        """Sums of (count, items, pitch) floats over the terms; yields an item, a lane, whether it exists, its sums.

        Several lanes, at least as many as the cluster has blocks, have the same item, one after the other.
        """
        e, plan = self.e, self.plan
        lanes = max(min(32, 1 << (terms - 1).bit_length()), plan.cluster)
        turns = -(-items * lanes // plan.threads)
        with self._turns(turns) as index:
            item = e.r("shr.u32", index, lanes.bit_length() - 1)
            lane = e.r("and.b32", index, lanes - 1)
            exists = e.p("setp.lt.s32", item, items) if turns * plan.threads > items * lanes else ""
            here = e.scaled(e.r("mad.lo.s32", item, pitch, lane), 4, start)
            totals: list[str] = []
            for j in range(0, terms, lanes):
                guard = self._both(exists, e.p("setp.lt.s32", lane, terms - j) if j + lanes > terms else "")
                found = [e.f("mov.f32", ZERO) if guard else e.new("f") for _ in range(count)]
                for i, value in enumerate(found):
                    e.op("ld.shared.f32", value, f"[{here}+{4 * (i * items * pitch + j)}]", when=guard)
                if weigh is not None:
                    found = weigh(e.r("mad.lo.s32", item, terms, e.r("add.s32", lane, j)), found, guard)
                totals = [e.f("add.rn.f32", *pair) for pair in zip(totals, found, strict=True)] if totals else found
            yield item, lane, exists, [self._over_lanes(v, lanes // 2, 1) for v in totals]

    @contextlib.contextmanager
    def _turns(self, turns: int) -> Iterator[str]:
        """A thread's number plus those of all threads that had turns before."""
        if turns == 1:
            yield self.thread
            return
        with self.e.loop(0, turns * self.plan.threads, self.plan.threads) as done:
            yield self.e.r("add.s32", self.thread, done)

    def _both(self, a: str, b: str) -> str:
        return self.e.p("and.pred", a, b) if a and b else a or b

    def _send(self, exchange: str, group: str, lane: str, exists: str, sums: Sequence[str]) -> None:
        """Leaves a group's sums in all blocks' shared memory, (quantities, blocks, groups), a lane for each block."""
        e, plan = self.e, self.plan
        here = e.scaled(e.r("mad.lo.s32", self.rank, plan.groups, group), 4, exchange)
        sends = self._both(e.p("setp.lt.s32", lane, plan.cluster), exists)
        if plan.cluster > 1:
            e.op("mapa.shared::cluster.u32", here, here, lane, when=sends)
        space = "shared::cluster" if plan.cluster > 1 else "shared"
        for i, value in enumerate(sums):
            e.op(f"st.{space}.f32", f"[{here}+{4 * i * plan.cluster * plan.groups}]", value, when=sends)

    def _received(self, exchange: str, count: int) -> list[list[str]]:
        e, plan = self.e, self.plan
        found: list[list[str]] = [[] for _ in range(count)]
        for cells, group, _ in self.alike:
            here = e.scaled(group, 4, exchange)
            for i, totals in enumerate(found):
                each = [
                    self.load(
                        "shared",
                        f"[{here}+{4 * (i * plan.cluster + block) * plan.groups}]",
                        cells.stop - cells.start,
                    )
                    for block in range(plan.cluster)
                ]
                totals += [ft.reduce(lambda a, b: e.f("add.rn.f32", a, b), sums) for sums in zip(*each, strict=True)]
        return found
