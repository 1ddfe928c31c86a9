"""The PTX of softmax's kernels for long rows: a row in the registers of the threads that share it.

A vector is 16 bytes of a row. The T threads of a block, or of the blocks of a cluster, share a row; thread t has its
vectors t, T + t, 2T + t, ... All loads are issued before the first use. Elements beyond the row's end are -inf
(forward) or 0 (backward), which adds nothing.

The order of additions depends on the row's length and dtype alone: the elements of a vector pairwise,
((0+1)+(2+3))+...; a thread's vectors pairwise; the threads of a warp by exchanges at lane distances 16, ..., 2, 1; then
the warps of a block in the same way, and then the blocks of a cluster. A row that does not fit into the registers of a
cluster is read twice, in rounds of a few vectors for each thread: the sums of the rounds are added one after another,
rescaled to the largest element so far.

exp(d) is ex2.approx(d log2 e), with d = x - m rounded first; log(s) is lg2.approx(s) / log2 e.

It is PTX text, which a Pallas kernel embeds: rows of a cluster failed in plain Pallas, whose cluster barriers do not
make a warpgroup's warps wait for each other (`benchmarks/notes-softmax.md`).
"""

import contextlib
import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Sequence

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES, Emitter, pairwise, real

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
NEGATIVE_INFINITY = {"bf16": 0xFF80FF80, "f16": 0xFC00FC00, "f32": 0xFF800000}
LARGEST, LOWEST, ZERO = real(3.4028234663852886e38), real(-3.4028234663852886e38), real(0.0)


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """How rows are partitioned over threads.

    Attributes:
      length: elements of a row; its bytes are a multiple of 16.
      dtype, out_dtype: "bf16", "f16" or "f32".
      vectors: vectors of a row that a thread has at a time.
      block: threads of a block.
      cluster: blocks that share a row.
      stages: forward, slots of a warp in shared memory, into which bulk copies load its parts of the next rows
        (`stream_ptx`); 0: rows are loaded into registers.
    """

    length: int
    dtype: str
    out_dtype: str
    vectors: int
    block: int
    cluster: int = 1
    stages: int = 0

    @property
    def threads(self) -> int:
        """T, the threads that share a row."""
        return self.cluster * self.block

    @property
    def elements(self) -> int:
        """Elements of a vector."""
        return VECTOR_BYTES // SIZES[self.dtype]

    @property
    def row_vectors(self) -> int:
        return self.length // self.elements

    @property
    def rounds(self) -> int:
        """How many rounds of all threads' vectors a row has."""
        return -(-self.row_vectors // (self.threads * self.vectors))

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.block // 32


# A vector's number to the guard of its load, and to the byte offsets of the round's first vector from the row's first,
# in the input and in the output: registers, or "".
Vector = Callable[[int], tuple[str, str, str]]


class Kernel:
    """What the kernels share: addresses, loads, sums over a row's threads, stores."""

    def __init__(self, plan: RowPlan, operands: int, *, reduced: bool = False) -> None:
        self.plan, self.e = plan, Emitter()
        e = self.e
        inputs = [e.d("mov.b64", f"${i}") for i in range(operands)]
        output = e.d("mov.b64", f"${operands}")
        self.shared = e.r("mov.b32", f"${operands + 1}")
        thread = e.r("mov.u32", "%tid.x")
        self.lane = e.r("and.b32", thread, 31)
        self.warp = e.r("shr.u32", thread, 5)
        self.rank = e.r("mov.u32", "%cluster_ctarank") if plan.cluster > 1 else ""
        # The thread's number among those of its row.
        self.at = e.scaled(self.rank, plan.block, thread) if self.rank else thread
        row = e.r("mov.u32", "%clusterid.x" if self.rank else "%ctaid.x")
        self.used, self.started = 0, False
        self.stride = plan.threads  # between vectors of one thread
        if self.rank and not plan.stages:  # waited for before the first store to another block, which must run by then
            e.op("barrier.cluster.arrive.relaxed.aligned")
        out_vector = plan.elements * SIZES[plan.out_dtype]
        place, out_place = (e.d("mul.wide.u32", self.at, size) for size in (VECTOR_BYTES, out_vector))
        # The addresses of the thread's first vector in each operand, of the row's single result, of the first result.
        self.sources = [
            e.d("mad.wide.u32", row, plan.length * SIZES[plan.dtype], e.d("add.s64", source, place))
            for source in inputs
        ]
        self.scalar = e.d("mad.wide.u32", row, (1 if reduced else plan.length) * SIZES[plan.out_dtype], output)
        self.target = e.d("add.s64", self.scalar, out_place)

    @contextlib.contextmanager
    def rounds(self) -> Iterator[Vector]:
        """A loop over the rounds of a row; yields a `Vector`, whose offsets are "" if there is one round only."""
        e, plan = self.e, self.plan
        step = plan.threads * plan.vectors
        if plan.rounds == 1:
            yield lambda j: (self._guard(self.at, j, 0), "", "")
            return
        out_vector = plan.elements * SIZES[plan.out_dtype]
        with e.loop(0, plan.rounds * step, step) as start:
            first = e.r("add.s32", self.at, start)
            moved, out_moved = (e.d("mul.wide.u32", start, size) for size in (VECTOR_BYTES, out_vector))
            yield lambda j: (self._guard(first, j, (plan.rounds - 1) * step), moved, out_moved)

    def _guard(self, first: str, j: int, last_start: int) -> str:
        """A predicate: whether the vector exists; "" if all threads have it in every round."""
        plan = self.plan
        if last_start + (j + 1) * plan.threads <= plan.row_vectors:
            return ""
        return self.e.p("setp.lt.s32", first, plan.row_vectors - j * plan.threads)

    def load(self, operand: int, vector: Vector, fill: int) -> list[list[str]]:
        """The registers of a thread's vectors, in the dtype of memory."""
        e, plan, found = self.e, self.plan, []
        for j in range(plan.vectors):
            guard, moved, _ = vector(j)
            words = [e.r("mov.b32", f"0x{fill:08X}") if guard else e.new() for _ in range(4)]
            source = e.d("add.s64", self.sources[operand], moved) if moved else self.sources[operand]
            place = f"[{source}+{j * self.stride * VECTOR_BYTES}]"
            e.op("ld.global.nc.v4.b32", words, place, when=guard)
            found.append(words)
        return found

    def unpack(self, words: Sequence[str]) -> list[str]:
        """The elements of a vector in float32."""
        return self.e.unpack(self.plan.dtype, words)

    def store(self, vector: Vector, j: int, values: Sequence[str]) -> None:
        """Rounds a vector of results and stores it."""
        e, plan = self.e, self.plan
        guard, _, moved = vector(j)
        words = e.pack(plan.out_dtype, values)
        target = e.d("add.s64", self.target, moved) if moved else self.target
        e.store_words(target, j * self.stride * plan.elements * SIZES[plan.out_dtype], words, guard)

    def store_scalar(self, value: str) -> None:
        """Stores the single result of a row, in the first of its threads."""
        first = self.e.p("setp.eq.u32", self.at, 0)
        self.e.store_rounded(self.plan.out_dtype, f"[{self.scalar}]", value, first)

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def pairwise(self, instruction: str, values: Sequence[str]) -> str:
        return pairwise(ft.partial(self.e.f, instruction), values)

    def over_row(self, instruction: str, value: str) -> str:
        """Combines the values of all threads of a row; every thread gets the result."""
        value = self.over_block(instruction, value)
        return self.over_cluster(instruction, value) if self.plan.cluster > 1 else value

    def over_block(self, instruction: str, value: str) -> str:
        """Combines the values of the threads of a block that share a row."""
        e, plan = self.e, self.plan
        value = e.over_lanes(value, 16, 1, instruction)
        slot = self._slot(plan.warps)
        first = e.p("setp.eq.u32", self.lane, 0)
        e.op("st.shared.f32", f"[{e.scaled(self.warp, 4, slot)}]", value, when=first)
        e.op("bar.sync", 1, plan.block)
        mine = e.r("and.b32", self.lane, plan.warps - 1)
        there = e.f("ld.shared.f32", f"[{e.scaled(mine, 4, slot)}]")
        return e.over_lanes(there, plan.warps // 2, 1, instruction)

    def over_cluster(self, instruction: str, value: str) -> str:
        """Combines the values of the cluster's blocks: each block stores its own to the shared memory of all."""
        e, plan = self.e, self.plan
        slot = self._slot(plan.cluster)
        if not self.started:
            e.op("barrier.cluster.wait.aligned")
            self.started = True
        block = e.p("setp.lt.s32", e.scaled(self.warp, 32, self.lane), plan.cluster)  # a thread for each
        there = e.in_block(e.scaled(self.rank, 4, slot), self.lane)
        e.op("st.shared::cluster.f32", f"[{there}]", value, when=block)
        e.arrive_in_cluster()
        e.wait_for_cluster()
        mine = e.r("and.b32", self.lane, plan.cluster - 1)
        there = e.f("ld.shared.f32", f"[{e.scaled(mine, 4, slot)}]")
        return e.over_lanes(there, plan.cluster // 2, 1, instruction)

    def _slot(self, count: int) -> str:
        """Shared memory for so many floats. None is used twice, so that every exchange needs only one barrier."""
        slot = self.e.r("add.s32", self.shared, 4 * self.used)
        self.used += count
        return slot

    def exp(self, d: str) -> str:
        return self.e.f("ex2.approx.ftz.f32", self.e.f("mul.rn.f32", d, real(LOG2_E)))

    def log(self, s: str) -> str:
        return self.e.f("mul.rn.f32", self.e.f("lg2.approx.f32", s), real(LN_2))


# ---- forward ---------------------------------------------------------------------------------------------------------


def shifted(k: Kernel, words: Sequence[str], m: str) -> list[str]:
    """x - m; for an empty m, x."""
    x = k.unpack(words)
    return [k.e.f("sub.rn.f32", value, m) for value in x] if m else x


def finisher(k: Kernel, algorithm: str, s: str) -> Callable[[str], str]:
    """The map from exp(d), or for "log" from d, to the result; for "logsumexp" it gives the logarithm of the sum."""
    if algorithm in ("log", "logsumexp"):
        log = k.log(s)
        return lambda d: k.e.f("sub.rn.f32", d, log) if d else log
    reciprocal = k.e.f("rcp.rn.f32", s)
    return lambda e: k.e.f("mul.rn.f32", e, reciprocal)


def bounded(k: Kernel, algorithm: str, m: str) -> str:
    """m as a finite number, to be subtracted before the row's largest element is known: -inf minus it is not NaN."""
    above = k.e.f("max.f32", m, LOWEST)
    return k.e.f("min.f32", above, LARGEST) if algorithm == "logsumexp" else above


@ft.lru_cache
def forward(plan: RowPlan, algorithm: str) -> str:
    """The PTX of softmax ("accurate", "fast", "log") or of "logsumexp"; operands: x, the result, shared memory.

    Two passes: the largest element and the sum, rescaled at each larger element; then the results.
    """
    k = Kernel(plan, 1, reduced=algorithm == "logsumexp")
    e, finite, fill = k.e, ft.partial(bounded, k, algorithm), NEGATIVE_INFINITY[plan.dtype]
    m, s = ("" if algorithm == "fast" else e.f("mov.f32", real(float("-inf")))), e.f("mov.f32", ZERO)
    with k.rounds() as vector:
        words, shift = k.load(0, vector, fill), ""
        if m:
            larger = k.pairwise("max.f32", [m, *(k.pairwise("max.f32", k.unpack(v)) for v in words)])
            shift = finite(larger)
            e.op("mul.rn.f32", s, s, k.exp(e.f("sub.rn.f32", finite(m), shift)))
            e.op("mov.f32", m, larger)
        terms = [k.pairwise("add.rn.f32", [k.exp(d) for d in shifted(k, v, shift)]) for v in words]
        e.op("add.rn.f32", s, s, k.pairwise("add.rn.f32", terms))
    if m:
        largest = k.over_row("max.f32", m)
        s = e.f("mul.rn.f32", s, k.exp(e.f("sub.rn.f32", finite(m), finite(largest))))
        m = finite(largest) if algorithm == "logsumexp" else largest
    finish = finisher(k, algorithm, k.over_row("add.rn.f32", s))
    if algorithm == "logsumexp":
        k.store_scalar(e.f("add.rn.f32", m, finish("")))
        return e.text()
    with k.rounds() as vector:
        for j, v in enumerate(k.load(0, vector, fill)):
            k.store(vector, j, [finish(d if algorithm == "log" else k.exp(d)) for d in shifted(k, v, m)])
    return e.text()
