"""The sums of channels and groups over the threads of a cluster, for the kernels for images.

Order of additions, from an image's shape, the groups and the dtype alone: of a channel a thread's rounds one after the
other; forward then the channels of a thread's vector that are of one group, one after the other; then, if the columns
are 1, 2, 4, 8 or 16, the rows of a warp by exchange over lane distances 16, 8, ..., columns; then the rows of a block,
forward of all columns of a group, dealt out to a number of lanes (`lanes_of`), one after the other and then by exchange
over falling distances; backward then what belongs to one group likewise; and then the blocks of the cluster one after
the other. Backward the sums of a channel are multiplied by its scale before those of a group are added; the gradients
in scale and bias leave the kernel as sums of a block, which are added outside.
"""

import contextlib
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence

from jaxdnn._src.hopper.ptx import real
from jaxdnn._src.norm.hopper.group_plan import BARRIERS, ImagePlan
from jaxdnn._src.norm.hopper.group_walk import Walk

ZERO = real(0.0)
BARRIER = 1  # of a whole block
STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32"

Weigh = Callable[[str, list[str], str], list[str]]  # a channel of the part, its sums, the guard of their load
Terms = tuple[int, Callable[[str], str] | None]  # at most; of an item, if they differ


def lanes_of(items: int, terms: int, threads: int, least: int, count: int) -> int:
    """How many lanes, a power of two from `least` on, add the terms of an item: the fewest clocks, roughly."""

    def clocks(lanes: int) -> int:
        turns = -(-items * lanes // threads)
        return turns * (50 + 8 * count * -(-terms // lanes) + 30 * (lanes.bit_length() - 1))

    return min((lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes >= least), key=clocks)


class Sums(Walk):
    """A walk whose sums are added up over the block and the cluster.

    A vector has channels of one or more neighbouring groups, at most `cells`: its cells.
    """

    def __init__(self, plan: ImagePlan, operands: Sequence[str], arrays: Sequence[str], **units: int) -> None:
        super().__init__(plan, operands, arrays, **units)
        self.owner = self.image  # whose statistics are meant
        self.exchanges, self.exchanged, self.started = 0, 0, False
        self.count = ""  # the parts that the cluster has behind it
        e, elements, group = self.e, plan.elements, plan.group
        if plan.cluster > 1:
            self.barriers, self.first = e.r("add.s32", self.shared, self.area), e.p("setp.eq.u32", self.thread, 0)
            for i in range(2):
                e.op("mbarrier.init.shared::cta.b64", f"[{self.barriers}+{8 * i}]", 1, when=self.first)
            e.op("fence.mbarrier_init.release.cluster", "")
            # Waited for before the first store into another block's memory: by then it runs, and has its barriers.
            e.op("barrier.cluster.arrive.release.aligned")
        self.uneven = group % elements != 0 and elements % group != 0
        self.groups, self.exists, self.begins = [""], [""], {}
        if group % elements == 0:  # the column's place among those of its group, too
            self.groups[0], self.among = self.divided(self.column, group // elements)
            self.offset = self.among
        elif not self.uneven:
            self.among = self.offset = e.r("mov.b32", 0)
            self.groups[0] = e.r("mul.lo.s32", self.column, plan.cells)
        else:
            self.groups[0], self.offset = self.divided(e.r("mul.lo.s32", self.column, elements), group)
            self.among = e.r("shr.u32", e.r("add.s32", self.offset, elements - 1), elements.bit_length() - 1)
        for j in range(1, plan.cells):
            here = e.r("add.s32", self.groups[0], j)
            exists = self._begins(j, elements - 1)
            self.groups.append(e.r("selp.b32", here, self.groups[j - 1], exists) if exists else here)
            self.exists.append(exists)

    @contextlib.contextmanager
    def each_part(self) -> Iterator[None]:
        if self.clusters:
            self.count = self.e.r("mov.b32", 0)
            self._start()
        with super().each_part():
            yield
            if self.clusters:
                self.e.op("add.s32", self.count, self.count, 1)

    def _start(self) -> None:
        """Waits until the cluster's blocks run."""
        if self.plan.cluster > 1 and not self.started:
            self.e.op("barrier.cluster.wait.acquire.aligned")
            self.started = True

    def _begins(self, j: int, i: int) -> str:
        """A predicate: whether channel i of the vector is of cell j or a later one; "" if it always is, "no" if not."""
        plan = self.plan
        holds = {offset + i >= j * plan.group for offset in plan.offsets}
        if len(holds) == 1:
            return "" if holds.pop() else "no"
        if (j, i) not in self.begins:
            self.begins[j, i] = self.e.p("setp.ge.s32", self.offset, j * plan.group - i)
        return self.begins[j, i]

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
        number = e.r("mad.lo.s32", self.owner, plan.parts, self.place)
        number = e.r("mad.lo.s32", number, plan.groups, group)
        return e.d("mad.wide.u32", number, 4, self.base[name])

    @property
    def alike(self) -> Iterator[slice]:
        """The thread's cells, those together whose groups lie one after the other, so that they are loaded at once."""
        size = 1 if self.uneven else math.gcd(4, self.plan.cells)
        for start in range(0, self.plan.cells, size):
            yield slice(start, start + size)

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
        for cells in self.alike:
            place = f"[{self.of_group(name, self.groups[cells.start])}]"
            found += self.load("global.nc", place, cells.stop - cells.start)
        return found

    def spread(self, cells: Sequence[str]) -> list[str]:
        """For each channel of the vector what its cell has."""
        plan, found = self.plan, []
        for i in range(plan.elements):
            value = cells[0]
            for j in range(1, plan.cells):
                begins = self._begins(j, i)
                if begins != "no":
                    value = self.e.f("selp.f32", cells[j], value, begins) if begins else cells[j]
            found.append(value)
        return found

    def shares(self, totals: Sequence[str], share: str) -> list[str]:
        return [self.e.f("mul.rn.f32", total, share) for total in totals]

    def times(self, value: str, factor: str, plus: str) -> str:
        if plus:
            return self.e.f("fma.rn.f32", value, factor, plus)
        return self.e.f("mul.rn.f32", value, factor)

    def store_statistics(self, statistics: dict[str, list[str]], when: str = "") -> None:
        """Each by the thread of the cluster's first row that has the group's first channel."""
        e = self.e
        row = self.both(e.p("setp.eq.u32", self.pixel, 0), when)
        for cells in self.alike:
            number = cells.start
            first = self.exists[number] if number else e.p("setp.eq.u32", self.offset, 0)
            first = e.p("and.pred", row, first) if first else row
            for name, values in statistics.items():
                some = values[cells]
                kind = "f32" if len(some) == 1 else f"v{len(some)}.f32"
                stored = some[0] if len(some) == 1 else "{" + ", ".join(some) + "}"
                e.op(f"st.global.{kind}", f"[{self.of_group(name, self.groups[number])}]", stored, when=first)

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
        """The block's sums of dy h and dy, from those of dy (x - mean) and dy, by the threads of its first row.

        Without `rstd` they are left as they are.
        """
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
                less = [e.f("neg.f32", rest[start + i]) for i in range(4)]
                along = [e.f("fma.rn.f32", r, g, a) for r, g, a in zip(less, plain, along, strict=True)]
            if rstd:
                along = [e.f("mul.rn.f32", a, rstd[start + i]) for i, a in enumerate(along)]
            for i, values in enumerate((along, plain)):
                place = 4 * (i * plan.channels + start)
                e.op("st.global.v4.f32", f"[{target}+{place}]", "{" + ", ".join(values) + "}", when=first)

    # ---- sums --------------------------------------------------------------------------------------------------------

    def zeros(self) -> list[str]:
        """For the sums of the thread's channels."""
        return [self.e.f("mov.f32", ZERO) for _ in range(self.plan.elements)]

    def fold(self, sums: Sequence[str]) -> list[str]:
        """Sums of a thread's channels to those of its cells."""
        e, found = self.e, []
        for j in range(self.plan.cells):
            total = ""
            for i, value in enumerate(sums):
                begins, ends = self._begins(j, i) if j else "", self._begins(j + 1, i)
                if begins == "no" or not ends:
                    continue
                if begins:
                    value = e.f("selp.f32", value, ZERO, begins)
                if ends != "no":
                    value = e.f("selp.f32", ZERO, value, ends)
                total = e.f("add.rn.f32", total, value) if total else value
            found.append(total)
        return found

    def totals(self, values: Sequence[Sequence[str]]) -> list[list[str]]:
        """The sums of each quantity over groups, for each of the thread's cells, from sums of a thread's cells."""
        e, plan, count = self.e, self.plan, len(values)
        pitch, summands = plan.pitches[1], plan.summands
        exchange, scratch = self._places(count)
        values, row, guard = self._over_rows(values)
        for j in range(plan.cells):
            here = e.r("mad.lo.s32", self.among, summands, row) if j == 0 else row
            here = e.scaled(e.r("mad.lo.s32", self.groups[j], pitch, here), 4, scratch)
            for i, quantity in enumerate(values):
                place = f"[{here}+{4 * i * plan.groups * pitch}]"
                e.op("st.shared.f32", place, quantity[j], when=self.both(guard, self.exists[j]))
        self._meet()
        terms: Terms = max(plan.spans) * summands, None
        if len(set(plan.spans)) > 1:
            terms = terms[0], self._terms
        with self._added(scratch, plan.groups, terms, pitch, count, plan.cluster) as (group, lane, exists, found):
            self._send(exchange, group, lane, exists, found)
        return self._met(exchange, count)

    def totals_of_channels(self, values: Sequence[Sequence[str]], weigh: Weigh) -> list[list[str]]:
        """Likewise from sums of a thread's channels, of which `weigh` makes what is added up.

        Those of the block's channels stay in shared memory at `self.sums`.
        """
        e, plan, count = self.e, self.plan, len(values)
        pitch, summands = plan.pitches[0], plan.summands
        exchange, scratch = self._places(count)
        self.sums = e.r("add.s32", scratch, 4 * count * plan.part * pitch)
        values, row, guard = self._over_rows(values)
        here = e.r("mad.lo.s32", e.r("mul.lo.s32", self.column, plan.elements), pitch, row)
        here = e.scaled(here, 4, scratch)
        for i, quantity in enumerate(values):
            for j, value in enumerate(quantity):
                e.op("st.shared.f32", f"[{here}+{4 * (i * plan.part + j) * pitch}]", value, when=guard)
        self._meet()
        with self._added(scratch, plan.part, (summands, None), pitch, count, 1) as (channel, lane, exists, found):
            first = self.both(e.p("setp.eq.u32", lane, 0), exists)
            for i, value in enumerate(found):
                e.op("st.shared.f32", f"[{e.scaled(channel, 4, self.sums)}+{4 * i * plan.part}]", value, when=first)
        e.op("bar.sync", BARRIER, plan.threads)
        each = plan.group, None
        with self._added(self.sums, plan.groups, each, plan.group, count, plan.cluster, weigh) as (
            group,
            lane,
            exists,
            found,
        ):
            self._send(exchange, group, lane, exists, found)
        return self._met(exchange, count)

    def _places(self, count: int) -> tuple[str, str]:
        """Where a cluster's blocks leave sums of groups, and where threads do.

        A block leaves its sums for the next part when it has those for this one, not before all others have read those
        for the last one: backward two places take turns, and forward there are two for each part.
        """
        e, plan, in_turn = self.e, self.plan, bool(self.clusters)
        size, arrays = 4 * plan.cluster * plan.groups, len(self.arrays)
        exchange = e.r("add.s32", self.shared, self.area + BARRIERS + self.exchanged * size)
        self.barrier, self.phase = "", "0"
        if plan.cluster > 1:
            self.barrier = e.r("add.s32", self.barriers, 8 * self.exchanges)
            if in_turn and arrays == 1:
                self.phase = e.r("and.b32", self.count, 1)
            elif in_turn:
                turn = e.r("and.b32", self.count, 1)
                self.phase = e.r("and.b32", e.r("shr.u32", self.count, 1), 1)
                exchange = e.scaled(turn, count * size, exchange)
                self.barrier = e.scaled(turn, 8, self.barrier)
        self.exchanged, self.exchanges = self.exchanged + count, self.exchanges + 1
        return exchange, e.r("add.s32", self.shared, self.area + 4 * plan.exchanged(arrays, in_turn))

    def _meet(self) -> None:
        """All threads have left their sums, and the cluster's blocks run."""
        self.e.op("bar.sync", BARRIER, self.plan.threads)
        self._start()

    def _met(self, exchange: str, count: int) -> list[list[str]]:
        """Those of the cluster's blocks, once all are there.

        Stores that tell a barrier, because a barrier of the cluster would wait for all that is on its way to and from
        device memory, too.
        """
        e, plan = self.e, self.plan
        if plan.cluster > 1:
            size = 4 * count * plan.cluster * plan.groups
            e.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{self.barrier}]", size, when=self.first)
            again = e.label()
            e.place(again)
            wait = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"
            e.op("bra", again, when="!" + e.p(wait, f"[{self.barrier}]", self.phase))
        else:
            e.op("bar.sync", BARRIER, plan.threads)
        return self._received(exchange, count)

    def _over_rows(self, values: Sequence[Sequence[str]]) -> tuple[Sequence[Sequence[str]], str, str]:
        """Threads' sums, those of rows of one warp added; which of the column's a thread has; whether it has any."""
        e, plan = self.e, self.plan
        if not plan.folds:
            return values, self.row, self.mine
        values = [[self.over_lanes(v, 16, plan.columns) for v in quantity] for quantity in values]
        return values, self.warp, e.p("setp.lt.s32", self.lane, plan.columns)

    def _terms(self, group: str) -> str:
        """How many sums of a group a block's threads leave."""
        e, plan = self.e, self.plan
        shift = plan.elements.bit_length() - 1
        first = e.r("mul.lo.s32", group, plan.group)
        last = e.r("shr.u32", e.r("add.s32", first, plan.group - 1), shift)
        spanned = e.r("sub.s32", last, e.r("shr.u32", first, shift))
        return e.scaled(spanned, plan.summands, plan.summands)

    def over_lanes(self, value: str, distance: int, least: int) -> str:
        e = self.e
        while distance >= least:
            word = e.r("shfl.sync.bfly.b32", e.r("mov.b32", value), distance, 31, "0xffffffff")
            value = e.f("add.rn.f32", value, e.f("mov.b32", word))
            distance //= 2
        return value

    @contextlib.contextmanager
    def _added(
        self, start: str, items: int, terms: Terms, pitch: int, count: int, least: int, weigh: Weigh | None = None
    ) -> Iterator[tuple[str, str, str, list[str]]]:
        """Sums of (count, items, pitch) floats over the terms; yields an item, a lane, whether it exists, its sums.

        Several lanes, at least so many, have the same item, one after the other.
        """
        e, plan, (most, number) = self.e, self.plan, terms
        lanes = lanes_of(items, most, plan.threads, least, count)
        turns = -(-items * lanes // plan.threads)
        with self.turns(turns) as index:
            item = e.r("shr.u32", index, lanes.bit_length() - 1)
            lane = e.r("and.b32", index, lanes - 1)
            exists = e.p("setp.lt.s32", item, items) if turns * plan.threads > items * lanes else ""
            here = e.scaled(e.r("mad.lo.s32", item, pitch, lane), 4, start)
            own = number(item) if number else ""
            totals: list[str] = []
            for j in range(0, most, lanes):
                guard = ""
                if own:
                    guard = e.p("setp.lt.s32", e.r("add.s32", lane, j), own)
                elif j + lanes > most:
                    guard = e.p("setp.lt.s32", lane, most - j)
                guard = self.both(exists, guard)
                found = [e.f("mov.f32", ZERO) if guard else e.new("f") for _ in range(count)]
                for i, value in enumerate(found):
                    e.op("ld.shared.f32", value, f"[{here}+{4 * (i * items * pitch + j)}]", when=guard)
                if weigh is not None:
                    found = weigh(e.r("mad.lo.s32", item, most, e.r("add.s32", lane, j)), found, guard)
                totals = [e.f("add.rn.f32", *pair) for pair in zip(totals, found, strict=True)] if totals else found
            yield item, lane, exists, [self.over_lanes(v, lanes // 2, 1) for v in totals]

    @contextlib.contextmanager
    def turns(self, turns: int) -> Iterator[str]:
        """A thread's number plus those of all threads that had turns before."""
        if turns == 1:
            yield self.thread
            return
        with self.e.loop(0, turns * self.plan.threads, self.plan.threads) as done:
            yield self.e.r("add.s32", self.thread, done)

    def both(self, a: str, b: str) -> str:
        return self.e.p("and.pred", a, b) if a and b else a or b

    def _send(self, exchange: str, group: str, lane: str, exists: str, sums: Sequence[str]) -> None:
        """Leaves a group's sums in all blocks' shared memory, (quantities, blocks, groups), a lane for each block."""
        e, plan = self.e, self.plan
        here = e.scaled(e.r("mad.lo.s32", self.rank, plan.groups, group), 4, exchange)
        sends = self.both(e.p("setp.lt.s32", lane, plan.cluster), exists)
        apart, told = 4 * plan.cluster * plan.groups, ""
        if plan.cluster > 1:
            told = e.new()
            for place, where in ((told, self.barrier), (here, here)):
                e.op("mapa.shared::cluster.u32", place, where, lane, when=sends)
        for i, value in enumerate(sums):
            if told:
                e.op(STORE, f"[{here}+{i * apart}]", value, f"[{told}]", when=sends)
            else:
                e.op("st.shared.f32", f"[{here}+{i * apart}]", value, when=sends)

    def _received(self, exchange: str, count: int) -> list[list[str]]:
        e, plan = self.e, self.plan
        found: list[list[str]] = [[] for _ in range(count)]
        for cells in self.alike:
            here = e.scaled(self.groups[cells.start], 4, exchange)
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
