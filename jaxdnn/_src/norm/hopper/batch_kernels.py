"""The kernels of batch normalisation: sums over columns, of its statistics and its gradients, and the passes behind.

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

with h = (x - μ) / σ, and these are added over the lines of a block; `totals` adds the splits' sums. `batch_walk` states
the order of both.

Results with an activation, y of x and dx of dy and x, element by element: `activated` and `gradients`.

On an H200 they take 0.81 to 1.02 times the time of the PTX text that they replaced, but for sums of gradients of few
rows (1,568 of 512 columns: 1.18) and of three channels (1.15); benchmarks/notes-hopper-norm.md has a guess why.

Sources: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
"""

import functools as ft
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core.compat import plgpu
from jaxdnn._src.hopper import lanes
from jaxdnn._src.hopper.curves_ptx import LOG2_E
from jaxdnn._src.hopper.lanes import LANES
from jaxdnn._src.hopper.launch import BLOCK, WARPGROUP, grid, kernel, when
from jaxdnn._src.norm.hopper.activation_ptx import FAR, HALF_OF_LEAST
from jaxdnn._src.norm.hopper.batch_walk import (
    F32,
    Chunks,
    ColumnPlan,
    Exist,
    Threads,
    Values,
    each_row,
    launch,
    of_columns,
    over_lines,
    over_rows,
    thread,
)

MERGE_THREADS, MERGE_BATCH = 1024, 9


# ---- statistics ------------------------------------------------------------------------------------------------------


def statistics(x: Array, plan: ColumnPlan) -> tuple[Array, Array]:
    """The base (columns,) and the splits' δ and M (splits, 2, columns) of x (rows, columns)."""
    e = plan.elements

    def body(t: Threads, arrays: Any, others: Any, outs: Any, joined: Any, slots: Any) -> None:
        base = t.per_column(others[0] if others else arrays[0].at[0])

        def totals(
            base: Array, mean: Array, rows: Sequence[Array], exist: Exist, moment: Any = None
        ) -> tuple[Array, Any]:
            """Σ d of each column over the rows that exist; adds Σ d² to `moment`, if it is given."""
            total: Any = None
            for i, row in enumerate(rows):
                d = (row - base) - mean
                d = lanes.where(exist[i], d, 0.0) if exist else d
                moment = None if moment is None else lanes.fma(d, d, moment)
                total = d if total is None else total + d
            return total, moment

        def begin(given: Values, chunks: Chunks, exist: Exist) -> Values:
            zeros = lanes.full(0.0, e, F32)
            total, _ = totals(given[0], zeros, chunks[0], exist)
            return lanes.product(total, lanes.wide(_share(_number(plan, exist)), e)), zeros, lanes.one(0.0, F32)

        def add(given: Values, values: Values, chunks: Chunks, exist: Exist) -> Values:
            mean, moment, count = values
            count = count + _number(plan, exist)
            total, moment = totals(given[0], mean, chunks[0], exist, moment)
            step = lanes.product(total, lanes.wide(_share(count), e))
            return mean + step, lanes.fma(-total, step, moment), count

        def join(values: Values, others: Values) -> Values:
            (mean, moment, count), (mean2, moment2, count2) = values, others
            whole = count + count2
            apart = mean2 - mean
            step = lanes.product(apart, lanes.wide(lanes.product(count2, _share(whole)), e))
            moment = lanes.fma(lanes.product(apart, step), lanes.wide(count, e), moment + moment2)
            return mean + step, moment, whole

        like = [lanes.like(e), lanes.like(e), lanes.like()]
        mean, moment, _ = over_lines(t, over_rows(t, arrays, slots, [base], begin, add, like), joined, join)
        stores = (t.line == 0) & t.inside
        _store_sums(t, outs[1], (mean, moment), stores)
        lanes.store(outs[0], t.vector, base, stores & (lanes.one(0, jnp.int32) + t.split == 0))

    flat = [x.reshape(-1)] if plan.fold > 1 else []  # x again, by single elements
    base, pairs = launch(
        body, plan, [x], flat, [(plan.columns,), (plan.splits, 2, plan.columns)], (e, e, 1), "norm_columns"
    )
    return base, pairs


def _number(plan: ColumnPlan, exist: Exist) -> Array:
    """How many rows of a chunk exist."""
    if exist is None:
        return lanes.one(float(plan.chunk), F32)
    return ft.reduce(operator.add, (lanes.where(holds, 1.0, 0.0) for holds in exist))


def _share(count: Array) -> Array:
    """1 / n, and 1 for a thread without rows."""
    return lanes.reciprocal(lanes.at_least(count, 1.0))


def _store_sums(t: Threads, ref: Any, values: Values, stores: Array) -> None:
    """Stores the sums of a block, (splits, values, columns)."""
    row = t.plan.row_vectors
    for i, value in enumerate(values):
        lanes.store(ref, (t.split * len(values) + i) * row + t.vector, value, stores)


def merge(
    base: Array, pairs: Array, scale: Array | None, plan: ColumnPlan, *, eps: float, batch: int = MERGE_BATCH
) -> list[Array]:
    """Merges the splits' pairs (δ, M) into mean, rstd, variance, rest and, with a scale, rstd scale.

    mean + rest is base + δ: rest is the rounding error of the mean. First δ = Σ n_b δ_b / n, then
    σ² = Σ (M_b + n_b (δ_b - δ)²) / n, each added as `_Merging` says.
    """
    columns = plan.columns // plan.fold
    given = [base, pairs, *([] if scale is None else [scale])]

    def body(base_ref: Any, pairs_ref: Any, *rest: Any, shared: Any) -> None:
        outs, scales = rest[len(given) - 2 :], rest[: len(given) - 2]
        m = _Merging(columns, plan.splits * plan.fold, batch, shared)

        def pair(pairs: Any, column: Array, entry: Array, exists: Array) -> tuple[Array, ...]:
            """δ, M and n; zeros if they do not exist."""
            split, part = lanes.divided(entry, plan.fold)
            at = split * (2 * plan.columns) + part * columns + column
            found = (lanes.load(pairs, at + j * plan.columns, exists) for j in range(2))
            return *found, lanes.wide(lanes.where(exists, _rows_of(plan, split), 0.0), 1)

        def mean() -> Array:
            """The sum of the warps' values over the number of rows."""
            return lanes.product(m.added(), lanes.full(1 / (plan.rows * plan.fold), 1, F32))

        of_all = m.each(pair, [pairs_ref], [m.column], 3)
        base, *factors = (lanes.load(ref, m.column) for ref in (base_ref, *scales))
        m.share(of_all(lambda total, _, delta, __, n: lanes.fma(delta, n, total)))

        @when(lax.axis_index(WARPGROUP) == 0)
        def _() -> None:
            lanes.store(shared, m.lane + MERGE_THREADS, mean(), m.warp == 0)

        lanes.meet()
        offset = lanes.load(shared, m.lane + MERGE_THREADS)

        def squared(total: Array, exists: Array, delta: Array, moment: Array, n: Array, offset: Array) -> Array:
            apart = lanes.where(exists, delta - offset, 0.0)
            return lanes.fma(lanes.product(apart, apart), n, total + moment)

        m.share(of_all(squared, offset))

        @when(lax.axis_index(WARPGROUP) == 0)
        def _() -> None:
            variance = mean()
            rstd = lanes.reciprocal(lanes.square_root(variance + eps))
            mean_, rest = _two_sum(base, offset)
            found = [mean_, rstd, variance, rest, *(lanes.product(rstd, factor) for factor in factors)]
            for ref, value in zip(outs, found, strict=True):
                lanes.store(ref, m.column, value, m.stores)

    return _merged(body, given, columns, 2 + len(given), "norm_merge")


class _Merging:
    """A block that adds up what the splits leave of 32 columns. Its warps take the entries of a column in turn.

    A warp adds its entries one after another, and then the warps' sums are added one after another.
    """

    def __init__(self, columns: int, entries: int, batch: int, shared: Any) -> None:
        self.entries, self.shared, self.warps = entries, shared, MERGE_THREADS // LANES
        self.batch = min(batch, -(-entries // self.warps))  # entries whose loads are in flight at a time
        self.warp, self.lane = lanes.divided(thread(MERGE_THREADS), LANES)
        own = lax.axis_index(BLOCK) * LANES + self.lane
        self.stores, self.column = (own < columns) & (self.warp == 0), lax.min(own, jnp.int32(columns - 1))

    def each(
        self, load: Callable[..., Sequence[Array]], refs: Sequence[Any], given: Sequence[Array], values: int
    ) -> Callable[..., Array]:
        """A function that adds up the entries, of so many values each; they are loaded once if they are few.

        It takes add(total, whether the entry exists, *its values, *others), and the others. Both functions are of
        `lanes.together`: load(*references, *given, the entry's number, whether it exists).
        """
        step, many = self.batch * self.warps, len(refs)
        turns = -(-self.entries // step)

        def entries(first: Array) -> list[tuple[Array, Array]]:
            numbers = [first + i * self.warps for i in range(self.batch)]
            return [(number, number < self.entries) for number in numbers]

        def loads(*of: Any) -> list[Sequence[Array]]:
            return [load(*of[:many], *of[many + 1 :], *entry) for entry in entries(of[many])]

        def loaded(first: Array) -> Any:
            return lanes.together(loads, refs, [first, *given], [[lanes.like(1)] * values] * self.batch)

        once = loaded(self.warp) if turns == 1 else None

        def of_all(add: Callable[..., Array], *others: Array) -> Array:
            def adds(first: Array, found: Any, total: Array, *others: Array) -> Array:
                for (_, exists), entry in zip(entries(first), found, strict=True):
                    total = add(total, exists, *entry, *others)
                return total

            def added(first: Array, found: Any, total: Array) -> Array:
                return lanes.together(adds, [], [first, found, total, *others], lanes.like(1))

            def turn(number: Any, total: Array) -> Array:
                first = self.warp + number * step
                return added(first, loaded(first), total)

            zero = lanes.full(0.0, 1, F32)
            return added(self.warp, once, zero) if turns == 1 else lax.fori_loop(0, turns, turn, zero)

        return of_all

    def share(self, value: Array) -> None:
        """Stores the warps' values, for `added`."""
        lanes.store(self.shared, self.warp * LANES + self.lane, value)
        lanes.meet()

    def added(self) -> Array:
        """The sum of the warps' values."""

        def run(shared: Any, lane: Array) -> Array:
            return ft.reduce(operator.add, [lanes.load(shared, lane + LANES * i) for i in range(self.warps)])

        return lanes.together(run, [self.shared], [self.lane], lanes.like(1))


def _merged(body: Callable[..., None], given: Sequence[Array], columns: int, outs: int, name: str) -> list[Array]:
    """The results (columns,) of a kernel of blocks that add up what the splits leave."""
    scratch = {"shared": plgpu.SMEM((MERGE_THREADS + LANES, 1), F32)}
    options = {"scratch_types": scratch, **grid(-(-columns // LANES), MERGE_THREADS // lanes.THREADS)}
    out = jax.ShapeDtypeStruct((columns, 1), F32)
    found = kernel(body, out_type=(out,) * outs, kernel_name=name, **options)(*(v.reshape(-1, 1) for v in given))
    return [v.reshape(columns) for v in found]


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum and its rounding error (Knuth's TwoSum)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _rows_of(plan: ColumnPlan, split: Array) -> Array:
    """How many rows a split has."""
    each, more = divmod(plan.full, plan.splits)
    rows = lanes.where(split < more, float((each + 1) * plan.tile), float(each * plan.tile))
    return lanes.where(split == more, float(each * plan.tile + plan.rest), rows) if plan.rest else rows


# ---- the pass behind the statistics ----------------------------------------------------------------------------------


def activated(
    x: Array, mean: Array, rstd: Array, plan: ColumnPlan, activation: str, affine: Sequence[Array], out_dtype: Any
) -> Array:
    """y = act(s h + b) of x (rows, columns), with h = (x - mean) rstd; `affine` has s and b."""

    def body(t: Threads, arrays: Any, others: Any, outs: Any, joined: Any, slots: Any) -> None:
        mean, rstd, scale, bias = (t.per_column(ref) for ref in others)

        def make(vectors: Sequence[Array]) -> Array:
            z = lanes.product(lanes.product(vectors[0] - mean, rstd), scale) + bias
            return _after(activation, z)

        each_row(t, arrays, slots, outs[0], make)

    others = [of_columns(plan, v) for v in (mean, rstd, *affine)]
    return _each(body, plan, [x], others, out_dtype, "norm_columns_apply")


def _each(
    body: Callable[..., None], plan: ColumnPlan, arrays: Sequence[Array], others: Sequence[Array], dtype: Any, name: str
) -> Array:
    """An array like `arrays`, made row by row."""
    out = [(plan.rows, plan.columns)]
    return launch(body, plan, arrays, others, out, [], name, dtype)[0].reshape(arrays[0].shape)


def _after(activation: str, z: Array) -> Array:
    """act(z); NaN of NaN."""
    if activation == "relu":
        return lanes.at_least(z, 0.0)
    return lanes.product(lanes.at_least(z, -FAR), _sigmoid(z))


# ---- gradients -------------------------------------------------------------------------------------------------------


def sums_of(plan: ColumnPlan) -> int:
    """The number of sums of a column."""
    return 3 if plan.dtype == "f32" else 2


def sums(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    plan: ColumnPlan,
    activation: str | None = None,
    affine: Sequence[Array] = (),
) -> Array:
    """The splits' sums (splits, 2 or 3, columns) of dy and x (rows, columns), mean and rstd (columns,).

    activation: dy counts times its slope at scale h + bias; `affine` has scale and bias.
    """
    e = plan.elements

    def body(t: Threads, arrays: Any, others: Any, outs: Any, joined: Any, slots: Any) -> None:
        given = [t.per_column(ref) for ref in others]

        def begin(given: Values, chunks: Chunks, exist: Exist) -> Values:
            return [lanes.full(0.0, e, F32)] * sums_of(plan)

        def add(given: Values, values: Values, chunks: Chunks, exist: Exist) -> Values:
            """Rows that do not exist have a dy and an h of 0."""
            mean, rstd, *affine = given
            of_dy, along, *rest = values
            for i, (dy, x) in enumerate(zip(*chunks, strict=True)):
                h = lanes.product(x - mean, rstd)
                h = lanes.where(exist[i], h, 0.0) if exist else h
                if activation is not None:
                    scale, bias = affine  # each operation is rounded as forward, so that the sign is the same
                    dy = _before(activation, dy, lanes.product(h, scale) + bias, plan.dtype)
                    dy = lanes.where(exist[i], dy, 0.0) if exist else dy  # a slope of no row may be NaN
                of_dy, along, rest = of_dy + dy, lanes.fma(dy, h, along), [total + h for total in rest]
            return [of_dy, along, *rest]

        def join(values: Values, others: Values) -> Values:
            return [a + b for a, b in zip(values, others, strict=True)]

        like = [lanes.like(e)] * sums_of(plan)
        found = over_lines(t, over_rows(t, arrays, slots, given, begin, add, like), joined, join)
        _store_sums(t, outs[0], found, (t.line == 0) & t.inside)

    count = sums_of(plan)
    others = [of_columns(plan, v) for v in (mean, rstd, *affine)]
    outs = [(plan.splits, count, plan.columns)]
    return launch(body, plan, [dy, x], others, outs, [e] * count, "norm_columns_dgrad")[0]


def totals(parts: Array, fold: int, *, batch: int = MERGE_BATCH) -> Array:
    """The sums (sums, columns) of the splits' (splits, sums, columns of a plan), added as `_Merging` says."""
    splits, count, wide = parts.shape
    columns = wide // fold

    def body(parts_ref: Any, out: Any, *, shared: Any) -> None:
        m = _Merging(count * columns, splits * fold, batch, shared)

        def entry(parts: Any, which: Array, column: Array, number: Array, exists: Array) -> tuple[Array]:
            split, part = lanes.divided(number, fold)
            return (lanes.load(parts, (split * count + which) * wide + part * columns + column, exists),)

        of_all = m.each(entry, [parts_ref], lanes.divided(m.column, columns), 1)
        m.share(of_all(lambda total, _, value: total + value))

        @when(lax.axis_index(WARPGROUP) == 0)
        def _() -> None:
            lanes.store(out, m.column, m.added(), m.stores)

    return _merged(body, [parts], count * columns, 1, "norm_totals")[0].reshape(count, columns)


def gradients(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    totals: Array,
    plan: ColumnPlan,
    activation: str,
    affine: Sequence[Array],
    out_dtype: Any,
) -> Array:
    """dx = (r s) g - (r s) Σ g / n - h (r s) Σ g h / n of dy and x (rows, columns), with g = dy act'(s h + b).

    totals: those of g and g h, (2, columns), as `totals` adds them. `affine` has s and b.
    """

    def body(t: Threads, arrays: Any, others: Any, outs: Any, joined: Any, slots: Any) -> None:
        mean, rstd, scale, bias = (t.per_column(ref) for ref in others[:4])
        of_both = [t.per_column(others[4], which) for which in range(2)]
        share = lanes.full(1 / (plan.rows * plan.fold), plan.elements, F32)
        factor = lanes.product(rstd, scale)
        of_g, of_gh = (lanes.product(factor, lanes.product(total, share)) for total in of_both)

        def make(vectors: Sequence[Array]) -> Array:
            dy, x = vectors
            h = lanes.product(x - mean, rstd)
            g = _before(activation, dy, lanes.product(h, scale) + bias, plan.dtype)
            return lanes.fma(-h, of_gh, lanes.fma(g, factor, -of_g))

        each_row(t, arrays, slots, outs[0], make)

    others = [of_columns(plan, v) for v in (mean, rstd, *affine, totals)]
    return _each(body, plan, [dy, x], others, out_dtype, "norm_columns_dgrad_apply")


def _before(activation: str, dy: Array, z: Array, dtype: str) -> Array:
    """dy act'(z), NaN where z is; of relu with 0 for the slope where y is rounded to 0, of swish σ + z σ (1 - σ)."""
    if activation == "relu":
        slope = lanes.where(z > HALF_OF_LEAST[dtype], 1.0, lanes.where(z != z, z, 0.0))
    else:
        z = lanes.at_most(lanes.at_least(z, -FAR), FAR)
        sigmoid = _sigmoid(z)
        slope = lanes.fma(lanes.product(z, sigmoid), 1.0 - sigmoid, sigmoid)
    return lanes.product(dy, slope)


def _sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z))."""
    power = lanes.exp2(lanes.product(z, lanes.full(-LOG2_E, z.shape[-1], F32)))
    return lanes.reciprocal(power + 1.0, approximate=True)
