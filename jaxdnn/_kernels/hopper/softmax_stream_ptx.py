"""The PTX of the forward softmax for long rows: clusters that stay, rows on their way into their shared memory.

Each block of a cluster has one slice of the row, contiguous. Rows come by the bulk copy engine into a ring of as many
places as fit into shared memory, and while one is worked on the next are under way. A warp takes its own part's largest
element m and sum s of exp(x - m), and leaves the two in the shared memory of all blocks, asynchronously: one trip, for
which a barrier there counts bytes (arrivals, where one block has the row). Who has all of them knows that all warps
have read the row, so its place is free. Warps meet nowhere else.

Order of additions: vector i of a block's slice belongs to thread i modulo its threads. In a vector the elements
pairwise, a thread's vectors pairwise, the threads of a warp by exchange over lane distances 16, 8, 4, 2, 1; then, each
rescaled to the row's largest element, the sums of like warps over the blocks pairwise, and over the warps by exchange.
"""

import contextlib
import functools as ft
from collections.abc import Iterator

from jaxdnn._kernels.hopper import softmax_ptx
from jaxdnn._kernels.hopper.ptx import SIZES, VECTOR_BYTES, real
from jaxdnn._kernels.hopper.ring_ptx import Ring
from jaxdnn._kernels.hopper.softmax_ptx import ZERO, RowPlan, bounded, finisher, shifted

_PAIR = 8  # bytes of a warp's largest element and sum
_STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"


def slice_vectors(plan: RowPlan) -> int:
    """Of a row, that each block of a cluster has; the last may have fewer."""
    return -(-plan.row_vectors // plan.cluster)


def _exchange_bytes(plan: RowPlan) -> int:
    """Of a row's pairs; two rows take turns."""
    return plan.block // 32 * plan.cluster * _PAIR


def _ring_at(plan: RowPlan) -> int:
    """The two exchanges, their two barriers, and the ring's lie before."""
    return -(-(2 * _exchange_bytes(plan) + 16 + 8 * plan.stages) // 128) * 128


def shared_bytes(plan: RowPlan) -> int:
    return _ring_at(plan) + plan.stages * slice_vectors(plan) * VECTOR_BYTES


@ft.lru_cache
def forward(plan: RowPlan, row_count: int, clusters: int, algorithm: str) -> str:
    """The PTX of softmax ("accurate", "fast", "log") or of "logsumexp"; operands: x, the result, shared memory."""
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


class _Stream(softmax_ptx.Kernel):
    def __init__(self, plan: RowPlan, row_count: int, clusters: int, *, reduced: bool) -> None:
        super().__init__(plan, row_count, 1, reduced=reduced)
        e = self.e
        self.row_count, self.clusters, self.reduced = row_count, clusters, reduced
        self.stride, self.slice = plan.block, slice_vectors(plan)
        self.thread = e.r("mov.u32", "%tid.x")
        self.leads = e.p("setp.eq.u32", self.thread, 0)
        self.before = e.r("mul.lo.s32", self.rank, self.slice) if self.rank else e.r("mov.b32", 0)
        self.mine = e.r("mov.b32", self.slice)  # vectors of this block
        if plan.row_vectors % plan.cluster:
            e.op("min.s32", self.mine, self.mine, e.r("sub.s32", plan.row_vectors, self.before))
        self.source = e.d("mad.wide.u32", self.before, VECTOR_BYTES, e.d("mov.b64", "$0"))
        self.output = e.d("mov.b64", "$1")
        self.turn, self.phase = e.r("mov.b32", 0), e.r("mov.b32", 0)  # 0 or 1; the phase of this turn's barrier
        self.sums = e.r("add.s32", self.shared, 2 * _exchange_bytes(plan))
        for i in range(2):
            e.op(
                "mbarrier.init.shared::cta.b64",
                f"[{self.sums}+{8 * i}]",
                1 if self.rank else plan.block // 32,
                when=self.leads,
            )
        start = e.r("add.s32", self.shared, _ring_at(plan))
        size = self.slice * VECTOR_BYTES
        self.ring = Ring(e, plan.stages, size, start=start, barriers=e.r("add.s32", self.sums, 16), leads=self.leads)
        self.following = ""

    @contextlib.contextmanager
    def each_row(self) -> Iterator[None]:
        """The cluster's rows, one after the other."""
        e, plan = self.e, self.plan
        first = e.r("mov.u32", "%clusterid.x" if self.rank else "%ctaid.x")
        for i in range(plan.stages):
            self._ask(e.r("add.s32", first, i * self.clusters), e.r("mov.b32", i))
        if self.rank:  # the barriers of all blocks are made
            e.op("barrier.cluster.arrive.release.aligned")
            e.op("barrier.cluster.wait.acquire.aligned")
        else:
            e.op("bar.sync", 1, plan.block)
        with e.loop(first, self.row_count, self.clusters) as row:
            self.row = self._row_at(row)
            self.following = e.r("add.s32", row, plan.stages * self.clusters)
            expected = _exchange_bytes(plan)
            if self.rank:
                e.op("mbarrier.arrive.expect_tx.shared::cta.b64", "_", self._barrier(), expected, when=self.leads)
            self.ring.wait()
            yield
            self.ring.advance()
            e.op("xor.b32", self.phase, self.phase, self.turn)
            e.op("xor.b32", self.turn, self.turn, 1)

    def _barrier(self) -> str:
        """Of this turn's pairs."""
        return f"[{self.e.scaled(self.turn, 8, self.sums)}]"

    def _ask(self, row: str, place: str = "") -> None:
        """Has this block's slice of a row, if there is such a row, brought to a place."""
        e = self.e
        size = e.r("mul.lo.s32", self.mine, VECTOR_BYTES)
        source = e.d("mad.wide.u32", row, self.plan.row_vectors * VECTOR_BYTES, self.source)
        self.ring.ask(source, size, e.p("setp.lt.s32", row, self.row_count), place)

    def _row_at(self, row: str) -> softmax_ptx.Row:
        e, plan = self.e, self.plan
        size = SIZES[plan.out_dtype]
        scalar = e.d("mad.wide.u32", row, (1 if self.reduced else plan.length) * size, self.output)
        vector = e.r("add.s32", self.before, self.thread)
        return softmax_ptx.Row([], e.d("mad.wide.u32", vector, plan.elements * size, scalar), scalar, "")

    def vector(self, j: int) -> tuple[str, str, str]:
        least = self.plan.row_vectors - (self.plan.cluster - 1) * self.slice  # vectors of the cluster's last block
        if (j + 1) * self.stride <= least:
            return "", "", ""
        inside = self.e.p("setp.lt.s32", self.e.r("add.s32", self.thread, j * self.stride), self.mine)
        return inside, "", ""

    def held(self) -> list[list[str]]:
        """The registers of a thread's vectors, as they lie in memory; -inf beyond the slice."""
        e, found = self.e, []
        fill = softmax_ptx.NEGATIVE_INFINITY[self.plan.dtype]
        start = e.scaled(self.thread, VECTOR_BYTES, self.ring.address())
        for j in range(self.plan.vectors):
            guard, _, _ = self.vector(j)
            words = [e.r("mov.b32", f"0x{fill:08X}") if guard else e.new() for _ in range(4)]
            place = f"[{start}+{j * self.stride * VECTOR_BYTES}]"
            e.op("ld.shared.v4.b32", "{" + ", ".join(words) + "}", place, when=guard)
            found.append(words)
        return found

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
        pair = e.scaled(self.rank, plan.block // 32 * _PAIR, pair)
        pair, barrier = (e.r("mapa.shared::cluster.u32", where, self.lane) for where in (pair, barrier))
        e.op(_STORE, f"[{pair}]", values, f"[{barrier}]", when=when)

    def receive(self) -> tuple[list[str], list[str]]:
        """For lane i, the largest elements and the sums of warp i modulo the warps of a block, of all blocks."""
        e, plan = self.e, self.plan
        again, barrier = e.label(), self._barrier()
        e.place(again)
        come = e.p("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64", barrier, self.phase)
        e.op("bra", again, when="!" + come)
        self._ask(self.following)
        warps = plan.block // 32
        start = e.scaled(self.turn, _exchange_bytes(plan), self.shared)
        start = e.scaled(e.r("and.b32", self.lane, warps - 1), _PAIR, start)
        pairs = [(e.new("f"), e.new("f")) for _ in range(plan.cluster)]
        for i, pair in enumerate(pairs):
            e.op("ld.shared.v2.f32", "{" + ", ".join(pair) + "}", f"[{start}+{i * warps * _PAIR}]")
        return [m for m, _ in pairs], [s for _, s in pairs]
