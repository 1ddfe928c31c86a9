"""Sums of channels and groups over the threads of a cluster, in the kernels for images.

The order of additions depends on an image's shape, the groups and the dtype alone:

1. A thread adds the values of a channel over its rounds.
2. Forward it then adds those of its channels that belong to one group.
3. If a row of threads has 1, 2, 4, 8 or 16 columns, the rows of a warp are added by exchanges between lanes at
   distances 16, 8, ..., columns.
4. The rows of a block are added. Forward the terms of a group (rows times columns) are split over several lanes
   (`lanes_of`): a lane adds every so many-th term, and the lanes are added by exchanges at falling distances. Backward
   the terms of a channel are added so, and then, each multiplied by its channel's scale, those of a group.
5. The blocks of the cluster are added, block 0 first (`group_exchange`).

The gradients of scale and bias leave the kernel as sums of each block, which XLA adds.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxdnn._src.hopper.ptx import Emitter
from jaxdnn._src.norm.hopper.group_cells import ZERO, Cells
from jaxdnn._src.norm.hopper.group_exchange import BLOCK, Exchange
from jaxdnn._src.norm.hopper.group_plan import ImagePlan
from jaxdnn._src.norm.hopper.group_vectors import Vectors

Weigh = Callable[[str, list[str], str], list[str]]  # a channel of the part, its sums, the guard of loads: new sums


def lanes_of(items: int, terms: int, threads: int, least: int, count: int) -> int:
    """How many lanes, a power of two from `least` on, share the terms of an item: the fewest clocks, roughly."""

    def clocks(lanes: int) -> int:
        turns = -(-items * lanes // threads)
        return turns * (50 + 8 * count * -(-terms // lanes) + 30 * (lanes.bit_length() - 1))

    return min((lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes >= least), key=clocks)


@contextlib.contextmanager
def turns_of(vectors: Vectors, turns: int) -> Iterator[str]:
    """The block's threads take turns: in turn t a thread has number t * threads + its own."""
    if turns == 1:
        yield vectors.thread
        return
    threads = vectors.plan.threads
    with vectors.e.loop(0, turns * threads, threads) as done:
        yield vectors.e.r("add.s32", vectors.thread, done)


class Terms(NamedTuple):
    """What is added in shared memory: floats (quantities, items, pitch), of whose last axis the first are terms."""

    start: str
    items: int
    pitch: int
    most: int  # terms of an item, at most
    own: Callable[[str], str] | None = None  # the register with the terms of an item, if they are not all as many


class Sum(NamedTuple):
    """A lane's part in the sum of an item: every lane of the item has the totals of all quantities."""

    item: str
    lane: str
    exists: str  # a predicate: whether there is such an item
    totals: list[str]


class Kernel:
    """What the kernels for images are made of: vectors, their cells, and sums over the block and the cluster."""

    def __init__(self, plan: ImagePlan, operands: Sequence[str], arrays: Sequence[str], **parts: Any) -> None:
        self.plan = plan
        self.vectors = Vectors(plan, operands, arrays, **parts)
        self.e: Emitter = self.vectors.e
        self.exchange = Exchange(self.vectors)
        self.cells = Cells(self.vectors)

    @contextlib.contextmanager
    def each_part(self) -> Iterator[None]:
        """A loop over the parts that the cluster processes."""
        self.exchange.begin()
        with self.vectors.each_part():
            yield
            self.exchange.next_part()

    def zeros(self) -> list[str]:
        """A register of 0 for each of the thread's channels."""
        return [self.e.f("mov.f32", ZERO) for _ in range(self.plan.elements)]

    def totals_from_cells(self, values: Sequence[Sequence[str]]) -> list[list[str]]:
        """The totals of each quantity over groups, for each of the thread's cells, from the values of its cells."""
        e, plan, cells, count = self.e, self.plan, self.cells, len(values)
        pitch, summands = plan.pitches[1], plan.summands
        buffer = self.exchange.buffer(count)
        values, row, guard = self._add_rows_of_warp(values)
        for j in range(plan.cells):
            here = e.r("mad.lo.s32", cells.column, summands, row) if j == 0 else row
            here = e.scaled(e.r("mad.lo.s32", cells.groups[j], pitch, here), 4, buffer.scratch)
            for i, quantity in enumerate(values):
                place = f"[{here}+{4 * i * plan.groups * pitch}]"
                e.op("st.shared.f32", place, quantity[j], when=e.both(guard, cells.exist[j]))
        self.exchange.meet()
        own = self._terms_of_group if len(set(plan.spans)) > 1 else None
        terms = Terms(buffer.scratch, plan.groups, pitch, max(plan.spans) * summands, own)
        with self._added(terms, count, plan.cluster) as found:
            self.exchange.send(buffer, found.item, found.lane, found.exists, found.totals)
        return self.exchange.receive(buffer, cells)

    def totals_from_channels(self, values: Sequence[Sequence[str]], weigh: Weigh) -> tuple[list[list[str]], str]:
        """As `totals_from_cells`, from the values of the thread's channels, whose sums in a block go through `weigh`.

        Returns also the address in shared memory of the block's sums (quantities, channels of the part).
        """
        e, plan, count = self.e, self.plan, len(values)
        pitch, summands = plan.pitches[0], plan.summands
        buffer = self.exchange.buffer(count)
        sums = e.r("add.s32", buffer.scratch, 4 * count * plan.part * pitch)
        values, row, guard = self._add_rows_of_warp(values)
        here = e.r("mad.lo.s32", e.r("mul.lo.s32", self.vectors.column, plan.elements), pitch, row)
        here = e.scaled(here, 4, buffer.scratch)
        for i, quantity in enumerate(values):
            for j, value in enumerate(quantity):
                e.op("st.shared.f32", f"[{here}+{4 * (i * plan.part + j) * pitch}]", value, when=guard)
        self.exchange.meet()
        with self._added(Terms(buffer.scratch, plan.part, pitch, summands), count, 1) as found:
            first = e.both(e.p("setp.eq.u32", found.lane, 0), found.exists)
            for i, value in enumerate(found.totals):
                e.op("st.shared.f32", f"[{e.scaled(found.item, 4, sums)}+{4 * i * plan.part}]", value, when=first)
        e.op("bar.sync", BLOCK, plan.threads)
        with self._added(Terms(sums, plan.groups, plan.group, plan.group), count, plan.cluster, weigh) as found:
            self.exchange.send(buffer, found.item, found.lane, found.exists, found.totals)
        return self.exchange.receive(buffer, self.cells), sums

    def _add_rows_of_warp(self, values: Sequence[Sequence[str]]) -> tuple[Sequence[Sequence[str]], str, str]:
        """Sums over the rows of a warp, if it has whole ones; their number in the column; whether a thread has any."""
        e, plan, vectors = self.e, self.plan, self.vectors
        if not plan.folds:
            return values, vectors.row, vectors.mine
        values = [[e.over_lanes(v, 16, plan.columns) for v in quantity] for quantity in values]
        return values, vectors.warp, e.p("setp.lt.s32", vectors.lane, plan.columns)

    def _terms_of_group(self, group: str) -> str:
        """How many sums of a group the threads of a block leave."""
        e, plan = self.e, self.plan
        shift = plan.elements.bit_length() - 1
        first = e.r("mul.lo.s32", group, plan.group)
        last = e.r("shr.u32", e.r("add.s32", first, plan.group - 1), shift)
        spanned = e.r("sub.s32", last, e.r("shr.u32", first, shift))
        return e.scaled(spanned, plan.summands, plan.summands)

    @contextlib.contextmanager
    def _added(self, terms: Terms, count: int, least: int, weigh: Weigh | None = None) -> Iterator[Sum]:
        """The sums of items over their terms; what is emitted inside uses them. An item has `least` lanes or more."""
        e, plan = self.e, self.plan
        items, pitch, most = terms.items, terms.pitch, terms.most
        lanes = lanes_of(items, most, plan.threads, least, count)
        turns = -(-items * lanes // plan.threads)
        with turns_of(self.vectors, turns) as index:
            item = e.r("shr.u32", index, lanes.bit_length() - 1)
            lane = e.r("and.b32", index, lanes - 1)
            exists = e.p("setp.lt.s32", item, items) if turns * plan.threads > items * lanes else ""
            here = e.scaled(e.r("mad.lo.s32", item, pitch, lane), 4, terms.start)
            own = terms.own(item) if terms.own else ""
            totals: list[str] = []
            for j in range(0, most, lanes):
                guard = ""
                if own:
                    guard = e.p("setp.lt.s32", e.r("add.s32", lane, j), own)
                elif j + lanes > most:
                    guard = e.p("setp.lt.s32", lane, most - j)
                guard = e.both(exists, guard)
                found = [e.f("mov.f32", ZERO) if guard else e.new("f") for _ in range(count)]
                for i, value in enumerate(found):
                    e.op("ld.shared.f32", value, f"[{here}+{4 * (i * items * pitch + j)}]", when=guard)
                if weigh is not None:
                    found = weigh(e.r("mad.lo.s32", item, most, e.r("add.s32", lane, j)), found, guard)
                totals = [e.f("add.rn.f32", *pair) for pair in zip(totals, found, strict=True)] if totals else found
            yield Sum(item, lane, exists, [e.over_lanes(v, lanes // 2) for v in totals])
