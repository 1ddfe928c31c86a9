"""The PTX of the softmax kernels: a row in the registers of the threads that share it.

A vector is 16 bytes of a row. T threads share a row; thread t has its vectors t, T + t, 2T + t, ... All loads are
issued before the first use. Elements beyond the row's end are -inf (forward) or 0 (backward), which adds nothing.

The order of additions depends on the row's length and dtype alone: the elements of a vector pairwise,
((0+1)+(2+3))+...; a thread's vectors pairwise; the threads of a warp by exchanges at lane distances T/2 or 16, ..., 2,
1; then the warps of a block in the same way, and then the blocks of a cluster. A row that does not fit into the
registers of a cluster is read twice, in rounds of a few vectors for each thread: the sums of the rounds are added one
after another, rescaled to the largest element so far.

exp(d) is ex2.approx(d log2 e), with d = x - m rounded first; log(s) is lg2.approx(s) / log2 e.

It is PTX text, which a Pallas kernel embeds: for "accurate" and bfloat16 plain Pallas took 0.97 to 1.02 of its time up
to rows of 32 KB (`benchmarks/results/rows_nvidia_h200.json`); other algorithms and dtypes have not been timed.
"""

import contextlib
import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Sequence

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES, Emitter, real

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
NEGATIVE_INFINITY = {"bf16": 0xFF80FF80, "f16": 0xFC00FC00, "f32": 0xFF800000}
LARGEST, LOWEST, ZERO = real(3.4028234663852886e38), real(-3.4028234663852886e38), real(0.0)


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """How rows are partitioned over threads.

    Attributes:
      length: elements of a row; its bytes are a multiple of 16.
      dtype, out_dtype: "bf16", "f16" or "f32".
      threads: T, the threads that share a row: a power of two; a part of a block, a block, or a cluster's blocks.
      vectors: vectors of a row that a thread has at a time.
      block: threads of a block.
      cluster: blocks that share a row.
      stages: forward, slots of a warp in shared memory, into which bulk copies load its parts of the next rows
        (`stream_ptx`); 0: rows are loaded into registers.
    """

    length: int
    dtype: str
    out_dtype: str
    threads: int
    vectors: int
    block: int
    cluster: int = 1
    stages: int = 0

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
    def rows_a_block(self) -> int:
        """Rows of a block, or of a cluster that shares a row."""
        return max(1, self.block // self.threads)

    @property
    def warps_a_row(self) -> int:
        """Warps of one block that share a row."""
        return max(1, min(self.threads, self.block) // 32)


# A vector's number to the guard of its load, and to the byte offsets of the round's first vector from the row's first,
# in the input and in the output: registers, or "".
Vector = Callable[[int], tuple[str, str, str]]


@dataclasses.dataclass
class Row:
    """A thread's row: the addresses of its first vector, and a predicate, whether the row exists ("" if always)."""

    sources: list[str]
    target: str
    scalar: str
    exists: str


class Kernel:
    """What the kernels share: addresses, loads, sums over a row's threads, stores."""

    def __init__(self, plan: RowPlan, row_count: int, operands: int, *, reduced: bool = False) -> None:
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
        self.at = e.scaled(self.rank, plan.block, thread) if self.rank else e.r("and.b32", thread, plan.threads - 1)
        block = e.r("mov.u32", "%clusterid.x" if self.rank else "%ctaid.x")
        group = 0 if self.rank else e.r("shr.u32", thread, plan.threads.bit_length() - 1)
        row = e.r("mad.lo.s32", block, plan.rows_a_block, group)
        self.used, self.started = 0, False
        self.stride = plan.threads  # between vectors of one thread
        if self.rank and not plan.stages:  # waited for before the first store to another block, which must run by then
            e.op("barrier.cluster.arrive.relaxed.aligned")
        self.row = self._row(inputs, output, row, row_count, reduced)

    def _row(self, inputs: list[str], output: str, row: str, row_count: int, reduced: bool) -> Row:
        e, plan = self.e, self.plan
        out_vector = plan.elements * SIZES[plan.out_dtype]
        place, out_place = (e.d("mul.wide.u32", self.at, size) for size in (VECTOR_BYTES, out_vector))
        sources = [
            e.d("mad.wide.u32", row, plan.length * SIZES[plan.dtype], e.d("add.s64", source, place))
            for source in inputs
        ]
        out_row = (1 if reduced else plan.length) * SIZES[plan.out_dtype]
        scalar = e.d("mad.wide.u32", row, out_row, output)
        target = e.d("add.s64", scalar, out_place)
        exists = e.p("setp.lt.s32", row, row_count) if row_count % plan.rows_a_block else ""
        return Row(sources, target, scalar, exists)

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
        """A predicate: whether the vector exists; that of the row, if all threads have it in every round."""
        plan, row = self.plan, self.row
        if last_start + (j + 1) * plan.threads <= plan.row_vectors:
            return row.exists
        inside = self.e.p("setp.lt.s32", first, plan.row_vectors - j * plan.threads)
        return self.e.p("and.pred", inside, row.exists) if row.exists else inside

    def load(self, operand: int, vector: Vector, fill: int) -> list[list[str]]:
        """The registers of a thread's vectors, in the dtype of memory."""
        e, plan, row, found = self.e, self.plan, self.row, []
        for j in range(plan.vectors):
            guard, moved, _ = vector(j)
            words = [e.r("mov.b32", f"0x{fill:08X}") if guard else e.new() for _ in range(4)]
            source = e.d("add.s64", row.sources[operand], moved) if moved else row.sources[operand]
            place = f"[{source}+{j * self.stride * VECTOR_BYTES}]"
            e.op("ld.global.nc.v4.b32", "{" + ", ".join(words) + "}", place, when=guard)
            found.append(words)
        return found

    def unpack(self, words: Sequence[str]) -> list[str]:
        """The elements of a vector in float32."""
        return self.e.unpack(self.plan.dtype, words)

    def store(self, vector: Vector, j: int, values: Sequence[str]) -> None:
        """Rounds a vector of results and stores it."""
        e, plan, row = self.e, self.plan, self.row
        guard, _, moved = vector(j)
        words = e.pack(plan.out_dtype, values)
        target = e.d("add.s64", row.target, moved) if moved else row.target
        start = j * self.stride * plan.elements * SIZES[plan.out_dtype]
        while words:  # of 8, 16 or 32 bytes
            part, words = words[:4], words[4:]
            registers = "{" + ", ".join(part) + "}"
            e.op(f"st.global.v{len(part)}.b32", f"[{target}+{start}]", registers, when=guard)
            start += 4 * len(part)

    def store_scalar(self, value: str) -> None:
        """Stores the single result of a row, in the first of its threads."""
        e, out, row = self.e, self.plan.out_dtype, self.row
        first = e.p("setp.eq.u32", self.at, 0)
        first = e.p("and.pred", first, row.exists) if row.exists else first
        if out == "f32":
            e.op("st.global.f32", f"[{row.scalar}]", value, when=first)
            return
        half = e.new("h")
        e.op(f"cvt.rn.{out}.f32", half, value)
        e.op("st.global.b16", f"[{row.scalar}]", half, when=first)

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def pairwise(self, instruction: str, values: Sequence[str]) -> str:
        values = list(values)
        while len(values) > 1:
            pairs = list(zip(values[::2], values[1::2], strict=False))
            values = [self.e.f(instruction, *pair) for pair in pairs] + values[2 * len(pairs) :]
        return values[0]

    def over_row(self, instruction: str, value: str) -> str:
        """The values of all threads of a row combined; every thread gets the result."""
        value = self.over_block(instruction, value)
        return self.over_cluster(instruction, value) if self.plan.cluster > 1 else value

    def over_block(self, instruction: str, value: str) -> str:
        """The values of the threads combined that share a row in a block."""
        e, plan = self.e, self.plan
        value = self.over_lanes(instruction, value, min(plan.threads, 32))
        if plan.warps_a_row == 1:
            return value
        slot = self._slot(plan.warps_a_row)
        first = e.p("setp.eq.u32", self.lane, 0)
        e.op("st.shared.f32", f"[{e.scaled(self.warp, 4, slot)}]", value, when=first)
        e.op("bar.sync", 1, plan.block)
        mine = e.r("and.b32", self.lane, plan.warps_a_row - 1)
        there = e.f("ld.shared.f32", f"[{e.scaled(mine, 4, slot)}]")
        return self.over_lanes(instruction, there, plan.warps_a_row)

    def over_cluster(self, instruction: str, value: str) -> str:
        """The values of the cluster's blocks combined: each block stores its own to the shared memory of all."""
        e, plan = self.e, self.plan
        slot = self._slot(plan.cluster)
        if not self.started:
            e.op("barrier.cluster.wait.aligned")
            self.started = True
        block = e.p("setp.lt.s32", e.scaled(self.warp, 32, self.lane), plan.cluster)  # a thread for each
        there = e.r("mapa.shared::cluster.u32", e.scaled(self.rank, 4, slot), self.lane)
        e.op("st.shared::cluster.f32", f"[{there}]", value, when=block)
        e.op("barrier.cluster.arrive.release.aligned")
        e.op("barrier.cluster.wait.acquire.aligned")
        mine = e.r("and.b32", self.lane, plan.cluster - 1)
        return self.over_lanes(instruction, e.f("ld.shared.f32", f"[{e.scaled(mine, 4, slot)}]"), plan.cluster)

    def _slot(self, count: int) -> str:
        """Shared memory for so many floats. None is used twice, so that every exchange needs only one barrier."""
        slot = self.e.r("add.s32", self.shared, 4 * self.used)
        self.used += count
        return slot

    def over_lanes(self, instruction: str, value: str, lanes: int) -> str:
        e, distance = self.e, lanes // 2
        while distance:
            word = e.r("mov.b32", value)
            other = e.r("shfl.sync.bfly.b32", word, distance, 31, "0xffffffff")
            value = e.f(instruction, value, e.f("mov.b32", other))
            distance //= 2
        return value

    def exp(self, d: str) -> str:
        return self.e.f("ex2.approx.ftz.f32", self.e.f("mul.rn.f32", d, real(LOG2_E)))

    def log(self, s: str) -> str:
        return self.e.f("mul.rn.f32", self.e.f("lg2.approx.f32", s), real(LN_2))

    def finite_or_zero(self, m: str) -> str:
        infinite = self.e.p("setp.eq.f32", self.e.f("abs.f32", m), real(float("inf")))
        return self.e.f("selp.f32", ZERO, m, infinite)


# ---- forward ---------------------------------------------------------------------------------------------------------


@ft.lru_cache
def forward(plan: RowPlan, row_count: int, algorithm: str) -> str:
    """The PTX of softmax ("accurate", "fast", "log") or of "logsumexp"; operands: x, the result, shared memory."""
    k = Kernel(plan, row_count, 1, reduced=algorithm == "logsumexp")
    way = _forward_twice if plan.rounds > 1 else _forward_once
    way(k, algorithm, NEGATIVE_INFINITY[plan.dtype])
    return k.e.text()


def _forward_once(k: Kernel, algorithm: str, fill: int) -> None:
    e = k.e
    with k.rounds() as vector:
        words = k.load(0, vector, fill)
        m = ""
        if algorithm != "fast":
            m = k.over_row("max.f32", k.pairwise("max.f32", [k.pairwise("max.f32", k.unpack(v)) for v in words]))
            m = k.finite_or_zero(m) if algorithm == "logsumexp" else m
        parts, held = [], []
        for v in words:
            terms = [k.exp(d) for d in shifted(k, v, m)]
            parts.append(k.pairwise("add.rn.f32", terms))
            held.append(terms)
        s = k.over_row("add.rn.f32", k.pairwise("add.rn.f32", parts))
        finish = finisher(k, algorithm, s)
        if algorithm == "logsumexp":
            k.store_scalar(e.f("add.rn.f32", m, finish("")))
            return
        for j, (v, terms) in enumerate(zip(words, held, strict=True)):
            terms = shifted(k, v, m) if algorithm == "log" else terms
            k.store(vector, j, [finish(term) for term in terms])


def shifted(k: Kernel, words: Sequence[str], m: str) -> list[str]:
    """x - m; for an empty m, x."""
    x = k.unpack(words)
    return [k.e.f("sub.rn.f32", value, m) for value in x] if m else x


def finisher(k: Kernel, algorithm: str, s: str) -> Callable[[str], str]:
    """From exp(d), or for "log" from d, to the result; for "logsumexp" the logarithm of the sum alone."""
    if algorithm in ("log", "logsumexp"):
        log = k.log(s)
        return lambda d: k.e.f("sub.rn.f32", d, log) if d else log
    reciprocal = k.e.f("rcp.rn.f32", s)
    return lambda e: k.e.f("mul.rn.f32", e, reciprocal)


def bounded(k: Kernel, algorithm: str, m: str) -> str:
    """m as a finite number, to be subtracted before the row's largest element is known: -inf minus it is not NaN."""
    above = k.e.f("max.f32", m, LOWEST)
    return k.e.f("min.f32", above, LARGEST) if algorithm == "logsumexp" else above


def _forward_twice(k: Kernel, algorithm: str, fill: int) -> None:
    """Two passes: the largest element and the sum, rescaled at each larger element; then the results."""
    e, finite = k.e, ft.partial(bounded, k, algorithm)
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
        return
    with k.rounds() as vector:
        for j, v in enumerate(k.load(0, vector, fill)):
            k.store(vector, j, [finish(d if algorithm == "log" else k.exp(d)) for d in shifted(k, v, m)])
