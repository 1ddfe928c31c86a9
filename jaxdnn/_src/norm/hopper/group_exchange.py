"""How the blocks of a cluster exchange their sums of groups, in the kernels for images.

Each block stores its sums into the shared memory of all blocks of the cluster, by stores that count their bytes on an
mbarrier of the receiver; a barrier of the whole cluster would also wait for all copies from and stores to device
memory. Then each thread adds the blocks' sums, block 0's first.

An exchange has an mbarrier and memory of its own. If a cluster processes several parts, a block stores its sums for the
next part as soon as it has them, but the other blocks may not have read those for this part yet. Forward a part has two
exchanges, so that the other one comes between two uses of the same memory: no block completes it before all have read
the first. Backward a part has one exchange, and so two copies of its memory and its mbarrier, for even and odd parts.
"""

import functools as ft
from collections.abc import Sequence
from typing import NamedTuple

from jaxdnn._src.norm.hopper.group_cells import Cells
from jaxdnn._src.norm.hopper.group_plan import BARRIERS
from jaxdnn._src.norm.hopper.group_vectors import Vectors

BLOCK = 1  # the number of the barrier of the block's threads


class Buffer(NamedTuple):
    """The memory of one exchange."""

    quantities: int
    start: str  # the blocks' sums (quantities, blocks, groups)
    barrier: str
    phase: str  # the parity of the mbarrier's phase in which the sums of this part arrive
    scratch: str  # the block's own memory, for the sums of its threads


class Exchange:
    """The exchanges of a kernel."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors, self.e, self.plan = vectors, vectors.e, vectors.plan
        self._in_turn = bool(vectors.clusters)
        self._buffers = self._quantities = 0  # of the exchanges emitted so far
        self._part = ""  # the number of parts that the cluster has completed
        e = self.e
        if self.plan.cluster > 1:
            self._barriers = e.r("add.s32", vectors.shared, vectors.area)
            self._first = e.p("setp.eq.u32", vectors.thread, 0)
            e.make_barriers(self._barriers, [1, 1], self._first)
            e.barriers_made()
            # Waited for before the first store into another block's memory: that block then runs and has its mbarriers.
            e.arrive_in_cluster()

    def begin(self) -> None:
        """Prepares for the loop over the cluster's parts."""
        if self._in_turn:
            self._part = self.e.r("mov.b32", 0)
            self._wait_for_cluster()

    def next_part(self) -> None:
        """Counts a part, at the end of the loop's body."""
        if self._in_turn:
            self.e.op("add.s32", self._part, self._part, 1)

    def _wait_for_cluster(self) -> None:
        if self.plan.cluster > 1:
            self.e.wait_for_cluster()

    def buffer(self, count: int) -> Buffer:
        """The memory of the next exchange of a part."""
        e, plan, vectors = self.e, self.plan, self.vectors
        size, arrays = 4 * plan.cluster * plan.groups, len(vectors.arrays)
        start = e.r("add.s32", vectors.shared, vectors.area + BARRIERS + self._quantities * size)
        barrier, phase = "", "0"
        if plan.cluster > 1:
            barrier = e.r("add.s32", self._barriers, 8 * self._buffers)
            if self._in_turn and arrays == 1:
                phase = e.r("and.b32", self._part, 1)
            elif self._in_turn:
                odd = e.r("and.b32", self._part, 1)
                phase = e.r("and.b32", e.r("shr.u32", self._part, 1), 1)
                start = e.scaled(odd, count * size, start)
                barrier = e.scaled(odd, 8, barrier)
        scratch = e.r("add.s32", vectors.shared, vectors.area + 4 * plan.exchanged(arrays, self._in_turn))
        self._quantities, self._buffers = self._quantities + count, self._buffers + 1
        return Buffer(count, start, barrier, phase, scratch)

    def meet(self) -> None:
        """Waits until all threads of the block have stored their sums, and all blocks of the cluster run."""
        self.e.op("bar.sync", BLOCK, self.plan.threads)
        if self._buffers == 1 and not self._in_turn:
            self._wait_for_cluster()

    def send(self, to: Buffer, group: str, lane: str, exists: str, sums: Sequence[str]) -> None:
        """Stores the sums of a group into all blocks' buffers: lane i those for block i."""
        e, plan = self.e, self.plan
        here = e.scaled(e.r("mad.lo.s32", self.vectors.rank, plan.groups, group), 4, to.start)
        sends = e.both(e.p("setp.lt.s32", lane, plan.cluster), exists)
        step, barrier = 4 * plan.cluster * plan.groups, ""
        if plan.cluster > 1:
            barrier = e.new()
            for mapped, own in ((barrier, to.barrier), (here, here)):
                e.op("mapa.shared::cluster.u32", mapped, own, lane, when=sends)
        for i, value in enumerate(sums):
            if barrier:
                e.send("f32", f"{here}+{i * step}", value, barrier, sends)
            else:
                e.op("st.shared.f32", f"[{here}+{i * step}]", value, when=sends)

    def receive(self, buffer: Buffer, cells: Cells) -> list[list[str]]:
        """Waits for the sums of all blocks; returns their total for each quantity and cell."""
        e, plan = self.e, self.plan
        if plan.cluster > 1:
            size = 4 * buffer.quantities * plan.cluster * plan.groups
            e.expect(buffer.barrier, size, self._first)
            e.wait(buffer.barrier, buffer.phase, ".acquire.cluster")
        else:
            e.op("bar.sync", BLOCK, plan.threads)
        found: list[list[str]] = [[] for _ in range(buffer.quantities)]
        for run in cells.together:
            here = e.scaled(cells.groups[run.start], 4, buffer.start)
            for i, totals in enumerate(found):
                places = [f"[{here}+{4 * (i * plan.cluster + b) * plan.groups}]" for b in range(plan.cluster)]
                each = [e.load_floats("shared", place, run.stop - run.start) for place in places]
                totals += [ft.reduce(lambda a, b: e.f("add.rn.f32", a, b), sums) for sums in zip(*each, strict=True)]
        return found
