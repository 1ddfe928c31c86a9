"""The PTX of the columns' statistics: mean and centred second moment of each column of x, in one reading.

A vector is 16 bytes of a row. A thread has one place among the vectors of a row and goes down the rows, a chunk of them
at a time; the threads of a block cover `width` vectors of so many `lines`. A tile is lines x chunk rows, and a split
takes every `splits`-th of them, from the last row of x to the first: what is read last is what the next kernel reads
first, and still in the second-level cache.

Everything is a distance from a base, the first row of x, so a mean of many deviations costs no digit. A thread keeps
for each of its columns δ, the mean of its distances so far, and M, the sum of the squared distances from that. A chunk
of k rows behind n others, with d = (x - base) - δ:

    δ' = δ + Σ d / (n + k)        M' = M + Σ d² - (Σ d)² / (n + k)

δ begins as the mean of the first chunk. Behind n >= k rows what is subtracted from Σ d² is at most half of it, and in
the first chunk next to nothing: nothing cancels, whatever the data. Then the pairs of threads are joined over the lines
of a block,

    δ = δ₁ + (δ₂ - δ₁) n₂ / n        M = M₁ + M₂ + (δ₂ - δ₁)² n₁ n₂ / n

the upper half of the lines onto the lower until one is left. `merge` adds up the splits' pairs. The order is of the
plan alone, which depends on nothing but the shape and dtype of x.

Sources: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence

from jaxdnn._kernels.hopper.ptx import SIZES, VECTOR_BYTES, Emitter, real

ZERO = real(0.0)
LANES = 32  # columns of a block of `merge`


@dataclasses.dataclass(frozen=True)
class ColumnPlan:
    """How columns are dealt out.

    Attributes:
      rows, columns: of x as the kernel sees it; the bytes of a row are a multiple of 16.
      fold: how many rows of the caller's x make one: column c of x is column c + i columns / fold here, for all i.
      dtype: "bf16", "f16" or "f32".
      threads: of a block.
      width: vectors of a row that a block covers.
      chunk: rows that a thread loads before it uses the first.
      stages: chunks that a thread has under way.
      splits: blocks that share the rows of a column; at most as many as there are whole tiles, and at least one.
    """

    rows: int
    columns: int
    fold: int
    dtype: str
    threads: int
    width: int
    chunk: int
    stages: int
    splits: int

    @property
    def elements(self) -> int:
        """Of a vector."""
        return VECTOR_BYTES // SIZES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.columns * SIZES[self.dtype]

    @property
    def row_vectors(self) -> int:
        return self.row_bytes // VECTOR_BYTES

    @property
    def lines(self) -> int:
        """Rows that the threads of a block cover at a time; some threads may be left over, and copy the last line."""
        return self.threads // self.width

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.lines * self.chunk

    @property
    def full(self) -> int:
        """Tiles that are whole."""
        return self.rows // self.tile

    @property
    def rest(self) -> int:
        """Rows behind the last whole tile; they belong to split `full` mod `splits`."""
        return self.rows % self.tile

    @property
    def across(self) -> int:
        """Blocks beside each other that cover a row."""
        return -(-self.row_vectors // self.width)

    @property
    def blocks(self) -> int:
        return self.across * self.splits

    @property
    def half(self) -> int:
        """Lines that are joined first: the largest power of two below their number; 0 if there is one line."""
        return 1 << (self.lines - 1).bit_length() - 1 if self.lines > 1 else 0

    @property
    def floats(self) -> int:
        """Of shared memory: a pair for every element of a vector, and a count, of the upper half of the lines."""
        return self.half * self.width * (2 * self.elements + 1)


@ft.lru_cache
def statistics(plan: ColumnPlan) -> str:
    """The PTX of the kernel; operands: x, base (columns,), the splits' δ and M (splits, 2, columns), shared memory."""
    return _Statistics(plan).code()


class _Statistics:
    """What a thread has: its columns' base, δ and M, the count of its rows, and where its first row lies."""

    def __init__(self, plan: ColumnPlan) -> None:
        self.plan, self.e = plan, Emitter()
        e = self.e
        self.x, self.base_at, self.sums_at = (e.d("mov.b64", f"${i}") for i in range(3))
        self.shared = e.r("mov.b32", "$3")
        self.split, across = _divided(e, e.r("mov.u32", "%ctaid.x"), plan.across)
        self.line, self.place = _divided(e, e.r("mov.u32", "%tid.x"), plan.width)
        vector = e.scaled(across, plan.width, self.place)
        self.inside = e.p("setp.lt.s32", vector, plan.row_vectors)
        # Threads that are left over read what the last do, and their sums go nowhere.
        self.vector = e.r("min.s32", vector, plan.row_vectors - 1)
        self.row = e.r("min.s32", self.line, plan.lines - 1)
        self.start = e.d("mad.wide.u32", self.row, plan.row_bytes, self._at(self.x, VECTOR_BYTES))
        self.base = self._base()
        self.mean, self.moment = ([e.f("mov.f32", ZERO) for _ in range(plan.elements)] for _ in range(2))
        self.count = e.f("mov.f32", ZERO)

    def _at(self, array: str, size: int) -> str:
        """Where the thread's columns lie in a row, in which a vector has so many bytes."""
        return self.e.d("mad.wide.u32", self.vector, size, array)

    def _base(self) -> list[str]:
        """The first row of the caller's x at the thread's columns."""
        e, plan = self.e, self.plan
        if plan.fold == 1:
            words = [e.new() for _ in range(4)]
            e.op("ld.global.nc.v4.b32", _group(words), f"[{self._at(self.x, VECTOR_BYTES)}]")
            return e.unpack(plan.dtype, words)
        found = []
        for i in range(plan.elements):
            _, column = _divided(e, e.scaled(self.vector, plan.elements, i), plan.columns // plan.fold)
            found.append(_number_at(e, plan.dtype, e.d("mad.wide.u32", column, SIZES[plan.dtype], self.x)))
        return found

    def code(self) -> str:
        e, plan = self.e, self.plan
        stages = [[[e.new() for _ in range(4)] for _ in range(plan.chunk)] for _ in range(plan.stages)]
        if plan.full:
            step = plan.stages * plan.splits
            for i, rows in enumerate(stages):
                self._load_tile(rows, e.r("add.s32", self.split, i * plan.splits))
            self._begin(stages[0])
            with e.loop(self.split, plan.full, step) as index:
                for i, rows in enumerate(stages):
                    tile = e.r("add.s32", index, i * plan.splits)
                    with e.only_if("setp.lt.s32", tile, plan.full):
                        self._add(rows)
                        self._load_tile(rows, e.r("add.s32", tile, step))
        if plan.rest:
            with e.only_if("setp.eq.s32", self.split, plan.full % plan.splits):
                self._add_rest(stages[0])
        self._join_lines()
        with e.only_if("setp.eq.s32", self.line, 0):
            self._store()
        return e.text()

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _load_tile(self, rows: Sequence[Sequence[str]], number: str) -> None:
        """The thread's chunk of a tile, if there is that tile; tile 0 is the last of x."""
        e, plan = self.e, self.plan
        exists = e.p("setp.lt.s32", number, plan.full)
        tile = e.r("sub.s32", plan.full - 1, number)
        self._load(rows, e.d("mad.wide.u32", tile, plan.tile * plan.row_bytes, self.start), [exists] * plan.chunk)

    def _load(self, rows: Sequence[Sequence[str]], address: str, exist: Sequence[str]) -> None:
        step = self.plan.lines * self.plan.row_bytes
        for i, (words, exists) in enumerate(zip(rows, exist, strict=True)):
            self.e.op("ld.global.nc.v4.b32", _group(words), f"[{address}+{i * step}]", when=exists)

    def _add_rest(self, rows: Sequence[Sequence[str]]) -> None:
        """The rows behind the last whole tile: a thread has some of them, all or none."""
        e, plan = self.e, self.plan
        done = plan.full * plan.tile
        row = [e.r("add.s32", self.row, done + i * plan.lines) for i in range(plan.chunk)]
        exist = [e.p("setp.lt.s32", r, plan.rows) for r in row]
        for words in rows:
            for word in words:
                e.op("mov.b32", word, 0)
        self._load(rows, e.d("add.s64", self.start, done * plan.row_bytes), exist)
        if not plan.full:
            self._begin(rows, exist)
        self._add(rows, exist)

    def _begin(self, rows: Sequence[Sequence[str]], exist: Sequence[str] = ()) -> None:
        """δ as the mean of a first chunk; it is 0 up to here."""
        totals = self._totals(rows, exist)
        share = self._share(self._number(exist))
        for mean, total in zip(self.mean, totals, strict=True):
            self.e.op("mul.rn.f32", mean, total, share)

    def _add(self, rows: Sequence[Sequence[str]], exist: Sequence[str] = ()) -> None:
        """One more chunk."""
        e = self.e
        totals = self._totals(rows, exist, self.moment)
        e.op("add.rn.f32", self.count, self.count, self._number(exist))
        share = self._share(self.count)
        for mean, moment, total in zip(self.mean, self.moment, totals, strict=True):
            step = e.f("mul.rn.f32", total, share)
            e.op("add.rn.f32", mean, mean, step)
            e.op("fma.rn.f32", moment, e.f("neg.f32", total), step, moment)

    def _totals(
        self, rows: Sequence[Sequence[str]], exist: Sequence[str], moment: Sequence[str] | None = None
    ) -> list[str]:
        """Σ d for each column, of the rows that exist (all, if nothing is said); Σ d² is added to the moment."""
        e, totals = self.e, []
        for i, words in enumerate(rows):
            for j, value in enumerate(e.unpack(self.plan.dtype, words)):
                d = e.f("sub.rn.f32", e.f("sub.rn.f32", value, self.base[j]), self.mean[j])
                if exist:
                    d = e.f("selp.f32", d, ZERO, exist[i])
                if moment is not None:
                    e.op("fma.rn.f32", moment[j], d, d, moment[j])
                if i == 0:
                    totals.append(e.f("mov.f32", d))
                else:
                    e.op("add.rn.f32", totals[j], totals[j], d)
        return totals

    def _number(self, exist: Sequence[str]) -> str:
        """How many rows a chunk has."""
        e = self.e
        number = e.f("mov.f32", real(0.0 if exist else self.plan.chunk))
        for exists in exist:
            number = e.f("add.rn.f32", number, e.f("selp.f32", real(1.0), ZERO, exists))
        return number

    def _share(self, count: str) -> str:
        """1 / n, and 1 for a thread without rows."""
        return self.e.f("rcp.rn.f32", self.e.f("max.f32", count, real(1.0)))

    # ---- lines and splits --------------------------------------------------------------------------------------------

    def _join_lines(self) -> None:
        e, plan, half = self.e, self.plan, self.plan.half
        values = [*self.mean, *self.moment, self.count]
        apart = 4 * plan.half * plan.width  # bytes
        while half:
            above = min(plan.lines, 2 * half) - half
            upper = e.r("sub.s32", self.line, half)
            writes = e.p("and.pred", e.p("setp.ge.s32", upper, 0), e.p("setp.lt.s32", upper, above))
            e.op("bar.sync", 0, plan.threads)  # what was written before has been read
            to = e.scaled(e.scaled(upper, plan.width, self.place), 4, self.shared)
            for i, value in enumerate(values):
                e.op("st.shared.f32", f"[{to}+{i * apart}]", value, when=writes)
            e.op("bar.sync", 0, plan.threads)
            with e.only_if("setp.lt.s32", self.line, above):
                start = e.scaled(e.scaled(self.line, plan.width, self.place), 4, self.shared)
                self._join([e.f("ld.shared.f32", f"[{start}+{i * apart}]") for i in range(len(values))])
            half //= 2

    def _join(self, others: Sequence[str]) -> None:
        """Another line's pairs and count to the thread's own."""
        e, n = self.e, self.plan.elements
        means, moments, count = others[:n], others[n : 2 * n], others[2 * n]
        whole = e.f("add.rn.f32", self.count, count)
        share = e.f("mul.rn.f32", count, self._share(whole))
        for mean, moment, mean2, moment2 in zip(self.mean, self.moment, means, moments, strict=True):
            apart = e.f("sub.rn.f32", mean2, mean)
            step = e.f("mul.rn.f32", apart, share)
            e.op("add.rn.f32", mean, mean, step)
            e.op("add.rn.f32", moment, moment, moment2)
            e.op("fma.rn.f32", moment, e.f("mul.rn.f32", apart, step), self.count, moment)
        e.op("mov.f32", self.count, whole)

    def _store(self) -> None:
        e, plan = self.e, self.plan
        sums = e.d("mad.wide.u32", self.split, 8 * plan.columns, self._at(self.sums_at, 4 * plan.elements))
        for start, values in ((0, self.mean), (4 * plan.columns, self.moment)):
            self._store_floats(sums, start, values, self.inside)
        first = e.p("and.pred", self.inside, e.p("setp.eq.s32", self.split, 0))
        self._store_floats(self._at(self.base_at, 4 * plan.elements), 0, self.base, first)

    def _store_floats(self, address: str, start: int, values: Sequence[str], when: str) -> None:
        for i in range(0, len(values), 4):
            self.e.op("st.global.v4.f32", f"[{address}+{start + 4 * i}]", _group(values[i : i + 4]), when=when)


@ft.lru_cache
def merge(plan: ColumnPlan, threads: int, batch: int, *, eps: float) -> str:
    """The PTX that makes one of the splits' pairs; operands: base, the pairs, mean, rstd, variance, δ, shared memory.

    A block has 32 columns; its warps take the pairs in turn, `batch` of them under way. δ = Σ n_b δ_b / n first, then
    σ² = Σ (M_b + n_b (δ_b - δ)²) / n: in a warp one after the other, then over the warps likewise.
    """
    e, warps, entries = Emitter(), threads // LANES, plan.splits * plan.fold
    base, sums, *results = (e.d("mov.b64", f"${i}") for i in range(6))
    shared, columns = e.r("mov.b32", "$6"), plan.columns // plan.fold
    warp, lane = _divided(e, e.r("mov.u32", "%tid.x"), LANES)
    own = e.scaled(e.r("mov.u32", "%ctaid.x"), LANES, lane)
    inside = e.p("setp.lt.s32", own, columns)
    column = e.r("min.s32", own, columns - 1)
    slot, first = e.scaled(e.scaled(warp, LANES, lane), 4, shared), e.scaled(lane, 4, shared)

    def pairs(index: str) -> list[tuple[str, str, str]]:
        """δ, M and n of the next pairs, zeros behind the last; loads first."""
        found = []
        for i in range(batch):
            entry = e.r("add.s32", index, i * warps)
            exists = e.p("setp.lt.s32", entry, entries)
            split, part = _divided(e, entry, plan.fold)
            at = e.d("mad.wide.u32", split, 8 * plan.columns, sums)
            at = e.d("mad.wide.u32", e.scaled(part, columns, column), 4, at)
            values = [e.f("mov.f32", ZERO) for _ in range(2)]
            for value, start in zip(values, (0, 4 * plan.columns), strict=True):
                e.op("ld.global.nc.f32", value, f"[{at}+{start}]", when=exists)
            found.append((*values, e.f("selp.f32", _rows_of(e, plan, split), ZERO, exists)))
        return found

    def over_warps(value: str, start: int) -> str:
        start *= 4 * LANES * warps
        e.op("st.shared.f32", f"[{slot}+{start}]", value)
        e.op("bar.sync", 0, threads)
        parts = [e.f("ld.shared.f32", f"[{first}+{start + 4 * LANES * i}]") for i in range(warps)]
        return e.f("mul.rn.f32", ft.reduce(lambda a, b: e.f("add.rn.f32", a, b), parts), real(1 / rows))

    rows = plan.rows * plan.fold
    total = e.f("mov.f32", ZERO)
    with e.loop(warp, entries, batch * warps) as index:
        for delta, _, n in pairs(index):
            e.op("fma.rn.f32", total, delta, n, total)
    offset, total = over_warps(total, 0), e.f("mov.f32", ZERO)
    with e.loop(warp, entries, batch * warps) as index:
        for delta, moment, n in pairs(index):
            apart = e.f("sub.rn.f32", delta, offset)
            e.op("add.rn.f32", total, total, moment)
            e.op("fma.rn.f32", total, e.f("mul.rn.f32", apart, apart), n, total)
    variance = over_warps(total, 1)
    rstd = e.f("rcp.rn.f32", e.f("sqrt.rn.f32", e.f("add.rn.f32", variance, real(eps))))
    writes = e.p("and.pred", inside, e.p("setp.eq.s32", warp, 0))
    mean = e.f("add.rn.f32", e.f("ld.global.nc.f32", f"[{e.d('mad.wide.u32', column, 4, base)}]"), offset)
    for array, value in zip(results, (mean, rstd, variance, offset), strict=True):
        e.op("st.global.f32", f"[{e.d('mad.wide.u32', column, 4, array)}]", value, when=writes)
    return e.text()


def _rows_of(e: Emitter, plan: ColumnPlan, split: str) -> str:
    """How many rows a split has."""
    each, more = divmod(plan.full, plan.splits)
    one, other = real((each + 1) * plan.tile), real(each * plan.tile)
    rows = e.f("selp.f32", one, other, e.p("setp.lt.s32", split, more))
    if plan.rest:
        rows = e.f("selp.f32", real(each * plan.tile + plan.rest), rows, e.p("setp.eq.s32", split, more))
    return rows


def _divided(e: Emitter, value: str, by: int) -> tuple[str, str]:
    """Quotient and remainder."""
    quotient = e.r("div.u32", value, by)
    return quotient, e.r("sub.s32", value, e.r("mul.lo.s32", quotient, by))


def _number_at(e: Emitter, dtype: str, address: str) -> str:
    """One element in float32."""
    if dtype == "f32":
        return e.f("ld.global.nc.f32", f"[{address}]")
    half = e.new("h")
    e.op("ld.global.nc.b16", half, f"[{address}]")
    if dtype == "f16":
        return e.f("cvt.f32.f16", half)
    word = e.r("cvt.u32.u16", half)
    return e.f("mov.b32", e.r("shl.b32", word, 16))


def _group(names: Sequence[str]) -> str:
    return "{" + ", ".join(names) + "}"
