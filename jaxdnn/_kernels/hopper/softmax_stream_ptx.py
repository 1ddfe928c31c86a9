"""The PTX of the forward softmax for long rows: clusters that stay, rows on their way through their shared memory.

Each block of a cluster has one slice of the row, each of its warps one part of the slice, contiguous. A warp has a ring
of places of its own, which the bulk copy engine fills with its parts of the next rows while one is worked on. It takes
its part's largest element m and sum s of exp(x - m), and leaves the two in the shared memory of all blocks,
asynchronously: one trip, for which a barrier there counts bytes (arrivals, where one block has the row). Warps meet
nowhere else. Results as wide as the elements go into the part's place, from which the engine brings them to memory, so
that no thread waits for a store; a row later they have been read, and the place is filled anew.

Order of additions: vector i of a part belongs to lane i modulo 32. In a vector the elements pairwise, a lane's vectors
pairwise, the lanes of a warp by exchange over distances 16, 8, 4, 2, 1; then, each rescaled to the row's largest
element, the sums of like warps over the blocks pairwise, and over the warps by exchange.
"""

import contextlib
import functools as ft
from collections.abc import Iterator, Sequence

from jaxdnn._kernels.hopper import softmax_ptx
from jaxdnn._kernels.hopper.ptx import SIZES, VECTOR_BYTES, real
from jaxdnn._kernels.hopper.ring_ptx import Ring
from jaxdnn._kernels.hopper.softmax_ptx import ZERO, RowPlan, bounded, finisher, shifted

_PAIR = 8  # bytes of a warp's largest element and sum
_STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"


def slice_vectors(plan: RowPlan) -> int:
    """Of a row, that each block of a cluster has; the last may have fewer."""
    return -(-plan.row_vectors // plan.cluster)


def part_vectors(plan: RowPlan) -> int:
    """Of a slice, that each warp has; the last may have fewer."""
    return -(-slice_vectors(plan) // plan.warps_a_row)


def _least_vectors(plan: RowPlan) -> int:
    """Of the last warp of the last block."""
    return plan.row_vectors - (plan.cluster - 1) * slice_vectors(plan) - (plan.warps_a_row - 1) * part_vectors(plan)


def _exchange_bytes(plan: RowPlan) -> int:
    """Of a row's pairs; two rows take turns."""
    return plan.warps_a_row * plan.cluster * _PAIR


def _rings_at(plan: RowPlan) -> int:
    """The two exchanges, their two barriers, and the rings' lie before."""
    return -(-(2 * _exchange_bytes(plan) + 16 + 8 * plan.warps_a_row * plan.stages) // 128) * 128


def shared_bytes(plan: RowPlan) -> int:
    return _rings_at(plan) + plan.warps_a_row * plan.stages * part_vectors(plan) * VECTOR_BYTES


@ft.lru_cache
def forward(plan: RowPlan, row_count: int, clusters: int, algorithm: str) -> str:
    """The PTX of softmax ("accurate", "fast", "log") or of "logsumexp"; operands: x, the result, shared memory."""
    if _least_vectors(plan) < 1:
        raise ValueError(f"a row of {plan.length} elements leaves a warp without any: {plan}")
    k = _Stream(plan, row_count, clusters, reduced=algorithm == "logsumexp")
    with k.each_row():
        _row(k, algorithm)
    return k.e.text()


def _row(k: "_Stream", algorithm: str) -> None:
    e, plan = k.e, k.plan
    words = k.held()
    own, shift = ZERO, ""
    if algorithm != "fast":
        own = k.over_lanes("max.f32", k.largest(words), 32)
        shift = bounded(k, algorithm, own)
    terms = [[k.exp(d) for d in shifted(k, v, shift)] for v in words]
    parts = [k.pairwise("add.rn.f32", v) for v in terms]
    k.send(own, k.over_lanes("add.rn.f32", k.pairwise("add.rn.f32", parts), 32))
    k.refill()
    theirs, sums = k.receive()
    m = ""
    if shift:
        m = k.over_lanes("max.f32", k.pairwise("max.f32", theirs), plan.warps_a_row)
        m = bounded(k, algorithm, m) if algorithm == "logsumexp" else m
        factors = [k.exp(e.f("sub.rn.f32", bounded(k, algorithm, value), m)) for value in theirs]
        sums = [e.f("mul.rn.f32", *pair) for pair in zip(sums, factors, strict=True)]
    finish = finisher(k, algorithm, k.over_lanes("add.rn.f32", k.pairwise("add.rn.f32", sums), plan.warps_a_row))
    if algorithm == "logsumexp":
        k.store_scalar(e.f("add.rn.f32", m, finish("")))
        return
    share = "" if algorithm == "log" else finish(k.exp(e.f("sub.rn.f32", shift, m)) if shift else real(1.0))
    for j, (v, of_v) in enumerate(zip(words, terms, strict=True)):
        if algorithm == "log":
            k.store(k.vector, j, [finish(d) for d in shifted(k, v, m)])
        else:
            k.store(k.vector, j, [e.f("mul.rn.f32", term, share) for term in of_v])
    k.bring_back()


class _Stream(softmax_ptx.Kernel):
    """A warp's way through its cluster's rows."""

    def __init__(self, plan: RowPlan, row_count: int, clusters: int, *, reduced: bool) -> None:
        super().__init__(plan, row_count, 1, reduced=reduced)
        e = self.e
        self.row_count, self.clusters, self.reduced = row_count, clusters, reduced
        self.stride, self.warps = 32, plan.warps_a_row
        self.in_place = not reduced and plan.stages > 1 and SIZES[plan.dtype] == SIZES[plan.out_dtype]
        self.first = e.p("setp.eq.u32", e.r("mov.u32", "%tid.x"), 0)
        part = part_vectors(plan)
        before = e.r("mul.lo.s32", self.warp, part)  # vectors of the row before the warp's
        mine = e.r("mov.b32", part)  # vectors of the warp
        if slice_vectors(plan) % self.warps:
            e.op("min.s32", mine, mine, e.r("sub.s32", slice_vectors(plan), before))
        if self.rank:
            e.op("mad.lo.s32", before, self.rank, slice_vectors(plan), before)
        if plan.row_vectors % plan.cluster:
            e.op("min.s32", mine, mine, e.r("sub.s32", plan.row_vectors, before))
        self.before, self.mine = before, mine
        self.bytes = e.r("mul.lo.s32", mine, VECTOR_BYTES)
        self.source = e.d("mad.wide.u32", before, VECTOR_BYTES, e.d("mov.b64", "$0"))
        self.output = e.d("mov.b64", "$1")
        self.turn, self.phase = e.r("mov.b32", 0), e.r("mov.b32", 0)  # 0 or 1; the phase of this turn's barrier
        self.sums = e.r("add.s32", self.shared, 2 * _exchange_bytes(plan))
        for i in range(2):
            count = 1 if self.rank else self.warps
            e.op("mbarrier.init.shared::cta.b64", f"[{self.sums}+{8 * i}]", count, when=self.first)
        size = part * VECTOR_BYTES
        self.ring = Ring(
            e,
            plan.stages,
            size,
            start=e.scaled(self.warp, plan.stages * size, e.r("add.s32", self.shared, _rings_at(plan))),
            barriers=e.scaled(self.warp, plan.stages * 8, e.r("add.s32", self.sums, 16)),
            leads=e.p("setp.eq.u32", self.lane, 0),
        )
        self.ahead = plan.stages - self.in_place  # rows that are asked for before one is worked on
        self.following, self.target = "", ""

    @contextlib.contextmanager
    def each_row(self) -> Iterator[None]:
        """The cluster's rows, one after the other."""
        e, plan = self.e, self.plan
        first = e.r("mov.u32", "%clusterid.x" if self.rank else "%ctaid.x")
        for i in range(self.ahead):
            self._ask(e.r("add.s32", first, i * self.clusters), e.r("mov.b32", i))
        if self.rank:  # the barriers of all blocks are made
            e.op("barrier.cluster.arrive.release.aligned")
            e.op("barrier.cluster.wait.acquire.aligned")
        else:
            e.op("bar.sync", 1, plan.block)
        with e.loop(first, self.row_count, self.clusters) as row:
            self._go_to(row)
            if self.rank:
                expected = _exchange_bytes(plan)
                e.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", self._barrier(), expected, when=self.first)
            self.ring.wait()
            yield
            self.ring.advance()
            e.op("xor.b32", self.phase, self.phase, self.turn)
            e.op("xor.b32", self.turn, self.turn, 1)
        if self.in_place:
            self.ring.wait_until_read()

    def _barrier(self) -> str:
        """Of this turn's pairs."""
        return f"[{self.e.scaled(self.turn, 8, self.sums)}]"

    def _ask(self, row: str, place: str = "") -> None:
        """Has this warp's part of a row, if there is such a row, brought to a place."""
        e = self.e
        source = e.d("mad.wide.u32", row, self.plan.row_vectors * VECTOR_BYTES, self.source)
        self.ring.ask(source, self.bytes, e.p("setp.lt.s32", row, self.row_count), place)

    def _go_to(self, row: str) -> None:
        e, plan = self.e, self.plan
        size = SIZES[plan.out_dtype]
        scalar = e.d("mad.wide.u32", row, (1 if self.reduced else plan.length) * size, self.output)
        self.target = e.d("mad.wide.u32", self.before, plan.elements * size, scalar)
        target = e.d("mad.wide.u32", self.lane, plan.elements * size, self.target)
        self.row = softmax_ptx.Row([], target, scalar, "")
        self.following = e.r("add.s32", row, self.ahead * self.clusters)

    def vector(self, j: int) -> tuple[str, str, str]:
        if (j + 1) * self.stride <= _least_vectors(self.plan):
            return "", "", ""
        return self.e.p("setp.lt.s32", self.e.r("add.s32", self.lane, j * self.stride), self.mine), "", ""

    def _place(self) -> str:
        """The first of a lane's vectors in the place of this row."""
        return self.e.scaled(self.lane, VECTOR_BYTES, self.ring.address())

    def held(self) -> list[list[str]]:
        """The registers of a lane's vectors, as they lie in memory; -inf beyond the part."""
        e, found = self.e, []
        fill = softmax_ptx.NEGATIVE_INFINITY[self.plan.dtype]
        start = self._place()
        for j in range(self.plan.vectors):
            guard, _, _ = self.vector(j)
            words = [e.r("mov.b32", f"0x{fill:08X}") if guard else e.new() for _ in range(4)]
            place = f"[{start}+{j * self.stride * VECTOR_BYTES}]"
            e.op("ld.shared.v4.b32", "{" + ", ".join(words) + "}", place, when=guard)
            found.append(words)
        return found

    def store(self, vector: softmax_ptx.Vector, j: int, values: Sequence[str]) -> None:
        if not self.in_place:
            super().store(vector, j, values)
            return
        words = "{" + ", ".join(self.e.pack(self.plan.out_dtype, values)) + "}"
        place = f"[{self._place()}+{j * self.stride * VECTOR_BYTES}]"
        self.e.op("st.shared.v4.b32", place, words, when=vector(j)[0])

    def bring_back(self) -> None:
        """The part's results, if they are in its place."""
        if self.in_place:
            self.ring.bring_back(self.target, self.bytes)

    def refill(self) -> None:
        """Has the next row without a place brought to that of the last row, or of this one if it is needed no more."""
        if self.in_place:
            self.ring.wait_until_read()
            self._ask(self.following, self.ring.before())
        else:
            self.e.op("bar.warp.sync", "0xffffffff")  # all lanes have read
            self._ask(self.following)

    def largest(self, words: list[list[str]]) -> str:
        """Of a thread's elements; those of 16 bits two at a time."""
        flat, dtype = [word for v in words for word in v], self.plan.dtype
        while dtype != "f32" and len(flat) > 1:
            pairs = list(zip(flat[::2], flat[1::2], strict=False))
            flat = [self.e.r(f"max.{dtype}x2", *pair) for pair in pairs] + flat[2 * len(pairs) :]
        return self.pairwise("max.f32", self.unpack(flat))

    def send(self, m: str, s: str) -> None:
        """A warp's pair to all blocks, a lane for each. Outside of a cluster there is no asynchronous store."""
        e, plan = self.e, self.plan
        pair = e.scaled(self.turn, _exchange_bytes(plan), e.scaled(self.warp, _PAIR, self.shared))
        barrier = e.scaled(self.turn, 8, self.sums)
        values, when = "{" + f"{m}, {s}" + "}", e.p("setp.lt.s32", self.lane, plan.cluster)
        if not self.rank:
            e.op("st.shared.v2.f32", f"[{pair}]", values, when=when)
            e.op("mbarrier.arrive.shared::cta.b64", "_", f"[{barrier}]", when=when)
            return
        pair = e.scaled(self.rank, self.warps * _PAIR, pair)
        pair, barrier = (e.r("mapa.shared::cluster.u32", where, self.lane) for where in (pair, barrier))
        e.op(_STORE, f"[{pair}]", values, f"[{barrier}]", when=when)

    def receive(self) -> tuple[list[str], list[str]]:
        """For lane i, the largest elements and the sums of warp i modulo the warps of a block, of all blocks."""
        e, plan = self.e, self.plan
        again, barrier = e.label(), self._barrier()
        e.place(again)
        come = e.p("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64", barrier, self.phase)
        e.op("bra", again, when="!" + come)
        start = e.scaled(self.turn, _exchange_bytes(plan), self.shared)
        start = e.scaled(e.r("and.b32", self.lane, self.warps - 1), _PAIR, start)
        pairs = [(e.new("f"), e.new("f")) for _ in range(plan.cluster)]
        for i, pair in enumerate(pairs):
            e.op("ld.shared.v2.f32", "{" + ", ".join(pair) + "}", f"[{start}+{i * self.warps * _PAIR}]")
        return [m for m, _ in pairs], [s for _, s in pairs]
