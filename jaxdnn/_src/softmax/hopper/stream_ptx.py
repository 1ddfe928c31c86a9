"""The PTX of the forward softmax for long rows: persistent clusters, with rows loaded through shared memory.

Each block of a cluster has one slice of the row, and each of its warps one contiguous part of the slice. A warp has its
own ring of slots, into which bulk copies load its parts of the next rows while it computes one. It computes its part's
largest element m and the sum s of exp(x - m), and stores both into the shared memory of all blocks by asynchronous
stores, whose bytes an mbarrier of the receiver counts (it counts arrivals if one block has the whole row). Warps wait
for each other nowhere else. Exponentials stay in registers meanwhile. Results as wide as the elements are written to
the part's slot, from which a bulk copy stores them, so that no thread waits for a store; the slot is filled again one
row later.

For logsumexp no exponentials are kept. A part may then have several pieces, which go through the slots one by one.

Order of additions: vector i of a piece belongs to lane i modulo 32. The elements of a vector pairwise, and a lane's
vectors of a piece pairwise. For logsumexp the pieces one after another, each time rescaled to the lane's largest
element so far, and then the lanes' sums rescaled to that of the warp. The lanes of a warp by exchanges at distances 16,
8, 4, 2, 1. Then, rescaled to the row's largest element, the sums of warps with the same number over the blocks
pairwise, and these over the warps by exchanges.

It is PTX text, which a Pallas kernel embeds: for rows of 64 KB plain Pallas took 0.97 (float32) and 1.06 (bfloat16) of
its time, without rings of a warp's own, and for longer rows, in clusters, it failed (`benchmarks/notes-softmax.md`).
"""

import contextlib
import functools as ft
from collections.abc import Iterable, Iterator

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES, pairwise, real
from jaxdnn._src.hopper.ring_ptx import Ring
from jaxdnn._src.softmax.hopper import ptx
from jaxdnn._src.softmax.hopper.ptx import ZERO, RowPlan, bounded, finisher, shifted

_PAIR = 8  # bytes of a warp's largest element and sum


def slice_vectors(plan: RowPlan) -> int:
    """Vectors of a row for each block of a cluster; the last may have fewer."""
    return -(-plan.row_vectors // plan.cluster)


def part_vectors(plan: RowPlan) -> int:
    """Vectors of a slice for each warp; the last may have fewer."""
    return -(-slice_vectors(plan) // plan.warps)


def pieces(plan: RowPlan) -> int:
    """The number of pieces of a part."""
    return -(-part_vectors(plan) // (32 * plan.vectors))


def piece_vectors(plan: RowPlan) -> int:
    """Vectors of a part in each piece; the last may have fewer."""
    return -(-part_vectors(plan) // pieces(plan))


def _least_vectors(plan: RowPlan) -> int:
    """Vectors of the last piece of the last warp of the last block."""
    of_slice = plan.row_vectors - (plan.cluster - 1) * slice_vectors(plan)
    of_part = of_slice - (plan.warps - 1) * part_vectors(plan)
    return of_part - (pieces(plan) - 1) * piece_vectors(plan)


def _exchange_bytes(plan: RowPlan) -> int:
    """Bytes of the pairs (m, s) of a row; there is memory for two rows."""
    return plan.warps * plan.cluster * _PAIR


def _rings_at(plan: RowPlan) -> int:
    """The offset of the rings, after the memory of two exchanges, their two mbarriers, and those of the rings."""
    return -(-(2 * _exchange_bytes(plan) + 16 + 8 * plan.warps * plan.stages) // 128) * 128


def shared_bytes(plan: RowPlan) -> int:
    return _rings_at(plan) + plan.warps * plan.stages * piece_vectors(plan) * VECTOR_BYTES


def check(plan: RowPlan, algorithm: str) -> None:
    """Raises a ValueError for a plan that the kernel does not support."""
    held = algorithm != "logsumexp"
    if _least_vectors(plan) < 1 or (held and (pieces(plan) > 1 or plan.stages < 2)):
        raise ValueError(f"a plan that leaves a warp without elements, or with more than it can hold: {plan}")


@ft.lru_cache
def forward(plan: RowPlan, row_count: int, clusters: int, algorithm: str) -> str:
    """The PTX of softmax ("accurate", "fast", "log") or of "logsumexp"; operands: x, the result, shared memory."""
    check(plan, algorithm)
    k = _Stream(plan, row_count, clusters, algorithm)
    if algorithm == "logsumexp":
        k.reduce_rows()
    else:
        k.write_rows()
    return k.e.text()


class _Stream(ptx.Kernel):
    """The kernel of persistent clusters."""

    def __init__(self, plan: RowPlan, row_count: int, clusters: int, algorithm: str) -> None:
        super().__init__(plan, 1)
        e = self.e
        self.row_count, self.clusters, self.algorithm = row_count, clusters, algorithm
        self.stride, self.warps = 32, plan.warps
        self.pieces, self.piece = pieces(plan), piece_vectors(plan)
        self.in_place = algorithm != "logsumexp" and SIZES[plan.dtype] == SIZES[plan.out_dtype]
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
        self.mine = mine
        out_vector = plan.elements * SIZES[plan.out_dtype]
        self.source = e.d("mad.wide.u32", before, VECTOR_BYTES, e.d("mov.b64", "$0"))
        self.output = e.d("mov.b64", "$1")
        self.results = e.d("mad.wide.u32", before, out_vector, self.output)
        self.turn, self.phase = e.r("mov.b32", 0), e.r("mov.b32", 0)  # 0 or 1; the phase of this turn's barrier
        self.sums = e.r("add.s32", self.shared, 2 * _exchange_bytes(plan))
        e.make_barriers(self.sums, [1 if self.rank else self.warps] * 2, self.first)
        size = self.piece * VECTOR_BYTES
        self.ring = Ring(
            e,
            plan.stages,
            size,
            start=e.scaled(self.warp, plan.stages * size, e.r("add.s32", self.shared, _rings_at(plan))),
            barriers=e.scaled(self.warp, plan.stages * 8, e.r("add.s32", self.sums, 16)),
            leads=e.p("setp.eq.u32", self.lane, 0),
        )
        self.begin = e.r("mov.u32", "%clusterid.x" if self.rank else "%ctaid.x")
        self.next_row, self.next_at = e.r("mov.b32", self.begin), e.r("mov.b32", 0)  # the piece that is loaded next
        loads = plan.stages - self.in_place  # if results are stored from slots, one slot is in use at each load
        first = min(self.pieces, loads)
        for _ in range(first):
            self.load_next()
        # The loads of all warps' first rows come before any other; after this, all blocks' mbarriers are initialised.
        if self.rank:
            e.arrive_in_cluster()
            e.wait_for_cluster()
        else:
            e.op("bar.sync", 1, plan.block)
        for _ in range(loads - first):
            self.load_next()

    # ---- rows --------------------------------------------------------------------------------------------------------

    def reduce_rows(self) -> None:
        """The loop over rows for logsumexp."""
        e = self.e
        m_start, s_start = real(float("-inf")), ZERO
        own_m, own_s = e.f("mov.f32", m_start), e.f("mov.f32", s_start)
        with e.loop(self.begin, self.row_count, self.clusters) as row:
            with self.each_piece() as at:
                words = self.next_piece(at)
                self.fill()
                self.add(words, own_m, own_s)
            m, s = self.over_all(own_m, own_s)
            e.op("mov.f32", own_m, m_start)
            e.op("mov.f32", own_s, s_start)
            self.scalar = e.d("mad.wide.u32", row, SIZES[self.plan.out_dtype], self.output)
            self.store_scalar(e.f("add.rn.f32", m, finisher(self, self.algorithm, s)("")))

    def write_rows(self) -> None:
        """The loop over rows for softmax: exponentials stay in registers until the row's sum is known."""
        e, log = self.e, self.algorithm == "log"
        with e.loop(self.begin, self.row_count, self.clusters) as row:
            words = self.next_piece(e.r("mov.b32", 0))
            own, shift = ZERO, ""
            if self.algorithm != "fast":
                own = e.over_lanes(self.largest(words), 16, 1, "max.f32")
                shift = bounded(self, self.algorithm, own)
            terms = [[self.exp(d) for d in shifted(self, v, shift)] for v in words]
            parts = [self.pairwise("add.rn.f32", v) for v in terms]
            self.send(own, e.over_lanes(self.pairwise("add.rn.f32", parts), 16))
            self.fill()
            m, s = self.joined(*self.receive())
            finish = finisher(self, self.algorithm, s)
            if not log:
                share = finish(self.exp(e.f("sub.rn.f32", shift, m)) if shift else real(1.0))
                finish = lambda term: e.f("mul.rn.f32", term, share)
            results = (shifted(self, v, m) for v in words) if log else terms
            self.write(row, ([finish(value) for value in v] for v in results))
        if self.in_place:
            self.ring.wait_for_stores()

    @contextlib.contextmanager
    def each_piece(self) -> Iterator[str]:
        """A loop over the pieces of a part; yields how many vectors of the part come before the piece."""
        if self.pieces == 1:
            yield self.e.r("mov.b32", 0)
            return
        with self.e.loop(0, self.pieces * self.piece, self.piece) as at:
            yield at

    # ---- pieces ------------------------------------------------------------------------------------------------------

    def load_next(self) -> None:
        """Starts the copy of the next piece, if its row exists, into the next slot."""
        e = self.e
        source = e.d("mad.wide.u32", self.next_row, self.plan.row_vectors * VECTOR_BYTES, self.source)
        source = e.d("mad.wide.u32", self.next_at, VECTOR_BYTES, source)
        there = e.p("setp.lt.s32", self.next_row, self.row_count)
        self.ring.fill(source, e.r("mul.lo.s32", self.vectors_from(self.next_at), VECTOR_BYTES), there)
        e.op("add.s32", self.next_at, self.next_at, self.piece)
        last = e.p("setp.eq.s32", self.next_at, self.pieces * self.piece)
        e.op("mov.b32", self.next_at, 0, when=last)
        e.op("add.s32", self.next_row, self.next_row, self.clusters, when=last)

    def vectors_from(self, at: str) -> str:
        """The vectors of the piece that begins at a vector of the part."""
        return self.e.r("min.s32", self.e.r("sub.s32", self.mine, at), self.piece)

    def guard(self, j: int, count: str) -> str:
        """A predicate: whether a lane has a vector j; "" if it always has."""
        if (j + 1) * self.stride <= _least_vectors(self.plan):
            return ""
        return self.e.p("setp.lt.s32", self.e.r("add.s32", self.lane, j * self.stride), count)

    def held(self, place: str, at: str) -> list[list[str]]:
        """The registers of a lane's vectors, in the dtype of memory; -inf beyond the piece."""
        e, found = self.e, []
        fill = ptx.NEGATIVE_INFINITY[self.plan.dtype]
        start, count = e.scaled(self.lane, VECTOR_BYTES, self.ring.address(place)), self.vectors_from(at)
        for j in range(self.plan.vectors):
            guard = self.guard(j, count)
            words = [e.r("mov.b32", f"0x{fill:08X}") if guard else e.new() for _ in range(4)]
            where = f"[{start}+{j * self.stride * VECTOR_BYTES}]"
            e.op("ld.shared.v4.b32", words, where, when=guard)
            found.append(words)
        return found

    def next_piece(self, at: str) -> list[list[str]]:
        """Waits for the next piece and returns its vectors."""
        self.ring.wait()
        words = self.held(self.ring.read, at)
        self.ring.next_read()
        return words

    def add(self, words: list[list[str]], m: str, s: str) -> None:
        """Updates a lane's largest element m and its sum s by a piece."""
        e, finite = self.e, ft.partial(bounded, self, self.algorithm)
        larger = e.f("max.f32", m, self.largest(words))
        shift = finite(larger)
        e.op("mul.rn.f32", s, s, self.exp(e.f("sub.rn.f32", finite(m), shift)))
        e.op("mov.f32", m, larger)
        terms = [self.pairwise("add.rn.f32", [self.exp(d) for d in shifted(self, v, shift)]) for v in words]
        e.op("add.rn.f32", s, s, self.pairwise("add.rn.f32", terms))

    def write(self, row: str, results: Iterable[list[str]]) -> None:
        """Stores a part's results, vector by vector."""
        e, plan = self.e, self.plan
        out_vector = plan.elements * SIZES[plan.out_dtype]
        target = e.d("mad.wide.u32", row, plan.row_vectors * out_vector, self.results)
        self.target = e.d("mad.wide.u32", self.lane, out_vector, target)
        place = e.scaled(self.lane, VECTOR_BYTES, self.ring.address(self.ring.written))
        for j, values in enumerate(results):
            guard = self.guard(j, self.mine)
            if self.in_place:
                words = e.pack(plan.out_dtype, values)
                e.op("st.shared.v4.b32", f"[{place}+{j * self.stride * VECTOR_BYTES}]", words, when=guard)
            else:
                self.store(lambda _, guard=guard: (guard, "", ""), j, values)
        if self.in_place:
            self.ring.store(target, e.r("mul.lo.s32", self.mine, VECTOR_BYTES))
        self.ring.next_write()

    def fill(self) -> None:
        """Starts the next load: into the last row's slot, if results are stored from slots, else into this row's."""
        if self.in_place:
            self.ring.wait_for_stores()
        else:
            self.e.loads_done()
            self.e.op("bar.warp.sync", "0xffffffff")  # of all lanes
        self.load_next()

    def largest(self, words: list[list[str]]) -> str:
        """The largest of a lane's elements; 16-bit elements are compared two at a time."""
        flat, dtype = [word for v in words for word in v], self.plan.dtype
        if dtype != "f32":
            flat = [pairwise(ft.partial(self.e.r, f"max.{dtype}x2"), flat)]
        return self.pairwise("max.f32", self.unpack(flat))

    # ---- sums over the row -------------------------------------------------------------------------------------------

    def over_all(self, m: str, s: str) -> tuple[str, str]:
        """The row's largest element and sum, from those of all lanes."""
        e, finite = self.e, ft.partial(bounded, self, self.algorithm)
        own = e.over_lanes(m, 16, 1, "max.f32")
        s = e.f("mul.rn.f32", s, self.exp(e.f("sub.rn.f32", finite(m), finite(own))))
        self.send(own, e.over_lanes(s, 16))
        return self.joined(*self.receive())

    def joined(self, theirs: list[str], sums: list[str]) -> tuple[str, str]:
        """The row's largest element and sum, from the warps' pairs that this lane has received."""
        e, m, finite = self.e, "", ft.partial(bounded, self, self.algorithm)
        if self.algorithm != "fast":
            m = e.over_lanes(self.pairwise("max.f32", theirs), self.warps // 2, 1, "max.f32")
            m = finite(m) if self.algorithm == "logsumexp" else m
            factors = [self.exp(e.f("sub.rn.f32", finite(value), m)) for value in theirs]
            sums = [e.f("mul.rn.f32", *pair) for pair in zip(sums, factors, strict=True)]
        return m, e.over_lanes(self.pairwise("add.rn.f32", sums), self.warps // 2)

    def send(self, m: str, s: str) -> None:
        """Stores a warp's pair to all blocks, one lane for each. Without a cluster the store is synchronous."""
        e, plan = self.e, self.plan
        pair = e.scaled(self.turn, _exchange_bytes(plan), e.scaled(self.warp, _PAIR, self.shared))
        barrier = e.scaled(self.turn, 8, self.sums)
        values, when = [m, s], e.p("setp.lt.s32", self.lane, plan.cluster)
        if not self.rank:
            e.op("st.shared.v2.f32", f"[{pair}]", values, when=when)
            e.op("mbarrier.arrive.shared::cta.b64", "_", f"[{barrier}]", when=when)
            return
        e.expect(barrier, _exchange_bytes(plan), self.first)
        pair = e.scaled(self.rank, self.warps * _PAIR, pair)
        pair, barrier = (e.in_block(where, self.lane) for where in (pair, barrier))
        e.send("v2.f32", pair, values, barrier, when)

    def receive(self) -> tuple[list[str], list[str]]:
        """Waits for all pairs; returns, for lane i, m and s of warp i (modulo a block's warps) of every block."""
        e, plan = self.e, self.plan
        e.wait(e.scaled(self.turn, 8, self.sums), self.phase, ".acquire.cluster")
        start = e.scaled(self.turn, _exchange_bytes(plan), self.shared)
        start = e.scaled(e.r("and.b32", self.lane, self.warps - 1), _PAIR, start)
        pairs = [[e.new("f"), e.new("f")] for _ in range(plan.cluster)]
        for i, pair in enumerate(pairs):
            e.op("ld.shared.v2.f32", pair, f"[{start}+{i * self.warps * _PAIR}]")
        e.op("xor.b32", self.phase, self.phase, self.turn)
        e.op("xor.b32", self.turn, self.turn, 1)
        return [m for m, _ in pairs], [s for _, s in pairs]
