"""The PTX of batch normalisation's sums over columns: those of its statistics, and those of its gradients.

Statistics, the mean and the centred second moment of each column of x, reading x once.

The first row of x is subtracted from all rows (the base), so that a mean far from zero costs no precision. A thread
keeps for each of its columns δ, the mean of x - base over its rows so far, and M, the sum of the squared distances from
that mean. A chunk of k rows after n others, with d = (x - base) - δ, changes them to

    δ' = δ + Σ d / (n + k)        M' = M + Σ d² - (Σ d)² / (n + k)

δ starts as the mean of the first chunk. After n >= k rows, at most half of Σ d² is subtracted from it, and in the first
chunk nearly nothing: there is no cancellation, whatever the data. Then pairs (δ, M) are joined over the lines of a
block,

    δ = δ₁ + (δ₂ - δ₁) n₂ / n        M = M₁ + M₂ + (δ₂ - δ₁)² n₁ n₂ / n

and `merge` merges those of the splits.

Gradients, reading dy and x once. A thread accumulates, row after row, for each of its columns

    Σ dy        Σ dy h        and for float32 Σ h, which corrects for the rounding of the saved mean

with h = (x - μ) / σ, and these are added over the lines of a block; XLA adds the splits' sums. `batch_walk` states the
order of both.

Sources: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.

It is PTX text, which an empty Pallas kernel embeds. Plain Pallas was not measured.
"""

import functools as ft
from collections.abc import Callable, Sequence

from jaxdnn._src.hopper.ptx import Emitter, real
from jaxdnn._src.norm.hopper import activation_ptx
from jaxdnn._src.norm.hopper.batch_walk import ZERO, ColumnPlan, Walk, Words, divided

LANES = 32  # columns of a block of `merge`


def values_of(plan: ColumnPlan) -> int:
    """The number of a thread's values: δ and M of every column, and the count of its rows."""
    return 2 * plan.elements + 1


@ft.lru_cache
def statistics(plan: ColumnPlan) -> str:
    """The PTX of the kernel; operands: x, base (columns,), the splits' δ and M (splits, 2, columns), shared memory."""
    return _Statistics(plan).code()


class _Statistics(Walk):
    """A thread's values are δ and M of its columns and the count of its rows."""

    def __init__(self, plan: ColumnPlan) -> None:
        super().__init__(plan, 1, ("x", "base", "sums"))
        self.base = self.per_column("x", plan.dtype)
        self.mean, self.moment = ([self.e.f("mov.f32", ZERO) for _ in range(plan.elements)] for _ in range(2))
        self.count = self.e.f("mov.f32", ZERO)

    @property
    def values(self) -> list[str]:
        return [*self.mean, *self.moment, self.count]

    def begin(self, chunks: Sequence[Words], exist: Sequence[str] = ()) -> None:
        """Sets δ, which is 0 before, to the mean of the first chunk."""
        totals = self._totals(chunks[0], exist)
        share = self._share(self._number(exist))
        for mean, total in zip(self.mean, totals, strict=True):
            self.e.op("mul.rn.f32", mean, total, share)

    def add(self, chunks: Sequence[Words], exist: Sequence[str] = ()) -> None:
        e = self.e
        totals = self._totals(chunks[0], exist, self.moment)
        e.op("add.rn.f32", self.count, self.count, self._number(exist))
        share = self._share(self.count)
        for mean, moment, total in zip(self.mean, self.moment, totals, strict=True):
            step = e.f("mul.rn.f32", total, share)
            e.op("add.rn.f32", mean, mean, step)
            e.op("fma.rn.f32", moment, e.f("neg.f32", total), step, moment)

    def _totals(self, rows: Words, exist: Sequence[str], moment: Sequence[str] | None = None) -> list[str]:
        """Σ d of each column over the rows that exist; adds Σ d² to `moment`, if it is given."""
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
        """How many rows of a chunk exist."""
        e = self.e
        number = e.f("mov.f32", real(0.0 if exist else self.plan.chunk))
        for exists in exist:
            number = e.f("add.rn.f32", number, e.f("selp.f32", real(1.0), ZERO, exists))
        return number

    def _share(self, count: str) -> str:
        """1 / n, and 1 for a thread without rows."""
        return self.e.f("rcp.rn.f32", self.e.f("max.f32", count, real(1.0)))

    def join(self, others: Sequence[str]) -> None:
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

    def store(self) -> None:
        e, plan = self.e, self.plan
        sums = e.d("mad.wide.u32", self.split, 8 * plan.columns, self.columns_of("sums", 4 * plan.elements))
        for start, values in ((0, self.mean), (4 * plan.columns, self.moment)):
            self.store_floats(sums, start, values, self.inside)
        first = e.p("and.pred", self.inside, e.p("setp.eq.s32", self.split, 0))
        self.store_floats(self.columns_of("base", 4 * plan.elements), 0, self.base, first)


@ft.lru_cache
def merge(plan: ColumnPlan, threads: int, batch: int, *, eps: float, scale: bool) -> str:
    """The PTX that merges the splits' pairs (δ, M) into the statistics.

    Operands: base, the pairs, [scale], mean, rstd, variance, rest, [rstd scale], shared memory. mean + rest is
    base + δ: rest is the rounding error of the mean.

    A block processes 32 columns; its warps take the pairs in turn, with the loads of at most `batch` pairs in flight.
    First δ = Σ n_b δ_b / n, then σ² = Σ (M_b + n_b (δ_b - δ)²) / n; a warp adds its terms one after another, and then
    the warps' sums are added one after another.
    """
    return _Merge(plan, threads, batch, scale).code(eps)


class _Merge:
    def __init__(self, plan: ColumnPlan, threads: int, batch: int, scale: bool) -> None:
        self.plan, self.threads, self.warps, self.e = plan, threads, threads // LANES, Emitter()
        e = self.e
        operands = ["base", "sums", *["scale"] * scale, "mean", "rstd", "variance", "rest", *["factor"] * scale]
        self.at = {name: e.d("mov.b64", f"${i}") for i, name in enumerate(operands)}
        self.shared, self.columns = e.r("mov.b32", f"${len(operands)}"), plan.columns // plan.fold
        self.warp, lane = divided(e, e.r("mov.u32", "%tid.x"), LANES)
        own = e.scaled(e.r("mov.u32", "%ctaid.x"), LANES, lane)
        self.inside = e.p("setp.lt.s32", own, self.columns)
        self.column = e.r("min.s32", own, self.columns - 1)
        self.lane_at = e.scaled(lane, 4, self.shared)
        self.base, *self.scale = (
            e.f("ld.global.nc.f32", f"[{self._of_column(name)}]") for name in operands if name in ("base", "scale")
        )
        self.entries = plan.splits * plan.fold
        self.batch = min(batch, -(-self.entries // self.warps))
        self.once = self._pairs(self.warp) if self.entries <= self.batch * self.warps else None

    def _pairs(self, index: str) -> list[tuple[str, str, str]]:
        """δ, M and n of the next pairs; zeros after the last pair."""
        e, plan, found = self.e, self.plan, []
        for i in range(self.batch):
            entry = e.r("add.s32", index, i * self.warps)
            exists = e.p("setp.lt.s32", entry, self.entries)
            split, part = divided(e, entry, plan.fold)
            at = e.d("mad.wide.u32", split, 8 * plan.columns, self.at["sums"])
            at = e.d("mad.wide.u32", e.scaled(part, self.columns, self.column), 4, at)
            values = [e.f("mov.f32", ZERO) for _ in range(2)]
            for value, start in zip(values, (0, 4 * plan.columns), strict=True):
                e.op("ld.global.nc.f32", value, f"[{at}+{start}]", when=exists)
            found.append((*values, e.f("selp.f32", _rows_of(e, plan, split), ZERO, exists)))
        return found

    def _of_all(self, add: Callable[[str, str, str], None]) -> None:
        if self.once is not None:
            for pair in self.once:
                add(*pair)
            return
        with self.e.loop(self.warp, self.entries, self.batch * self.warps) as index:
            for pair in self._pairs(index):
                add(*pair)

    def code(self, eps: float) -> str:
        e = self.e
        total, moments = (e.f("mov.f32", ZERO) for _ in range(2))
        self._of_all(lambda delta, _, n: e.op("fma.rn.f32", total, delta, n, total))
        self._store_of_warp(total)
        place = f"[{self.lane_at}+{4 * LANES * self.warps}]"
        with e.only_if("setp.eq.s32", self.warp, 0):
            e.op("st.shared.f32", place, self._mean())
        e.op("bar.sync", 0, self.threads)
        offset = e.f("ld.shared.f32", place)

        def add(delta: str, moment: str, n: str) -> None:
            apart = e.f("sub.rn.f32", delta, offset)
            e.op("add.rn.f32", moments, moments, moment)
            e.op("fma.rn.f32", moments, e.f("mul.rn.f32", apart, apart), n, moments)

        self._of_all(add)
        self._store_of_warp(moments)
        with e.only_if("setp.eq.s32", self.warp, 0):
            self._finish(self._mean(), offset, eps)
        return e.text()

    def _store_of_warp(self, value: str) -> None:
        """Stores the warp's value of each column in shared memory, for `_mean`."""
        self.e.op("st.shared.f32", f"[{self.e.scaled(self.warp, 4 * LANES, self.lane_at)}]", value)
        self.e.op("bar.sync", 0, self.threads)

    def _mean(self) -> str:
        """The sum of the warps' values over the number of rows."""
        e = self.e
        parts = [e.f("ld.shared.f32", f"[{self.lane_at}+{4 * LANES * i}]") for i in range(self.warps)]
        total = ft.reduce(lambda a, b: e.f("add.rn.f32", a, b), parts)
        return e.f("mul.rn.f32", total, real(1 / (self.plan.rows * self.plan.fold)))

    def _finish(self, variance: str, offset: str, eps: float) -> None:
        e = self.e
        rstd = e.f("rcp.rn.f32", e.f("sqrt.rn.f32", e.f("add.rn.f32", variance, real(eps))))
        mean, rest = self._two_sum(self.base, offset)
        found = {"mean": mean, "rstd": rstd, "variance": variance, "rest": rest}
        for scale in self.scale:
            found["factor"] = e.f("mul.rn.f32", rstd, scale)
        for name, value in found.items():
            e.op("st.global.f32", f"[{self._of_column(name)}]", value, when=self.inside)

    def _two_sum(self, a: str, b: str) -> tuple[str, str]:
        """The rounded sum and its rounding error (Knuth's TwoSum)."""
        e = self.e
        total = e.f("add.rn.f32", a, b)
        of_b = e.f("sub.rn.f32", total, a)
        left = e.f("sub.rn.f32", a, e.f("sub.rn.f32", total, of_b)), e.f("sub.rn.f32", b, of_b)
        return total, e.f("add.rn.f32", *left)

    def _of_column(self, name: str) -> str:
        return self.e.d("mad.wide.u32", self.column, 4, self.at[name])


def _rows_of(e: Emitter, plan: ColumnPlan, split: str) -> str:
    """How many rows a split has."""
    each, more = divmod(plan.full, plan.splits)
    one, other = real((each + 1) * plan.tile), real(each * plan.tile)
    rows = e.f("selp.f32", one, other, e.p("setp.lt.s32", split, more))
    if plan.rest:
        rows = e.f("selp.f32", real(each * plan.tile + plan.rest), rows, e.p("setp.eq.s32", split, more))
    return rows


# ---- gradients -------------------------------------------------------------------------------------------------------


def sums_of(plan: ColumnPlan) -> int:
    """The number of sums of a column."""
    return 3 if plan.dtype == "f32" else 2


@ft.lru_cache
def sums(plan: ColumnPlan, activation: str | None = None) -> str:
    """The PTX of the kernel; operands: dy, x, mean, rstd, the splits' sums (splits, 2 or 3, columns), shared memory.

    activation: behind rstd come scale and bias, and dy counts times its slope at scale h + bias; of relu, not at all
    where that is NaN.
    """
    return _Sums(plan, activation).code()


class _Sums(Walk):
    def __init__(self, plan: ColumnPlan, activation: str | None) -> None:
        affine = () if activation is None else ("scale", "bias")
        super().__init__(plan, 2, ("dy", "x", "mean", "rstd", *affine, "sums"))
        self.activation, self.affine = activation, [self.per_column(name, "f32") for name in affine]
        self.mean, self.rstd = (self.per_column(name, "f32") for name in ("mean", "rstd"))
        new = lambda: [self.e.f("mov.f32", ZERO) for _ in range(plan.elements)]
        self.sums = [new() for _ in range(sums_of(plan))]

    @property
    def values(self) -> list[str]:
        return [value for total in self.sums for value in total]

    def add(self, chunks: Sequence[Words], exist: Sequence[str] = ()) -> None:
        """Rows that do not exist have a dy and an h of 0."""
        e, dtype = self.e, self.plan.dtype
        of_dy, along, *rest = self.sums
        for i, (words, others) in enumerate(zip(*chunks, strict=True)):
            for j, (dy, x) in enumerate(zip(e.unpack(dtype, words), e.unpack(dtype, others), strict=True)):
                h = e.f("mul.rn.f32", e.f("sub.rn.f32", x, self.mean[j]), self.rstd[j])
                h = e.f("selp.f32", h, ZERO, exist[i]) if exist else h
                if self.activation is not None:
                    z = activation_ptx.affine(e, h, *(values[j] for values in self.affine))
                    dy = activation_ptx.before(e, self.activation, dy, z, dtype)
                e.op("add.rn.f32", of_dy[j], of_dy[j], dy)
                e.op("fma.rn.f32", along[j], dy, h, along[j])
                for total in rest:
                    e.op("add.rn.f32", total[j], total[j], h)

    def join(self, others: Sequence[str]) -> None:
        for value, other in zip(self.values, others, strict=True):
            self.e.op("add.rn.f32", value, value, other)

    def store(self) -> None:
        e, plan = self.e, self.plan
        row = 4 * plan.columns
        start = e.d("mad.wide.u32", self.split, len(self.sums) * row, self.columns_of("sums", 4 * plan.elements))
        for i, total in enumerate(self.sums):
            self.store_floats(start, i * row, total, self.inside)
