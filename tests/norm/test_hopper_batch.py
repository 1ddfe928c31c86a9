"""The Hopper kernels of batch normalisation's sums on the CPU."""

import dataclasses
import itertools
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.norm import bounds
from tests.norm.cases import agree

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._src.hopper import lanes
from jaxdnn._src.norm.hopper import batch, batch_kernels
from jaxdnn._src.norm.hopper.batch_walk import ColumnPlan
from tests.hopper.device import on_hopper
from tests.norm import columns as machine
from tests.norm.columns import DTYPES, activated, gradients, merged, pairs_of, plan_of, statistics, sums

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
# Rows and columns: less than a tile, one row, lines that are no power of two, threads left over, a row that takes
# several blocks and ends within one, and rows of 3, 20 and 5 columns, which make whole vectors by the 8, 2 or 8.
SIZES = {
    "few": (7, 64),
    "one": (1, 8),
    "lines": (999, 24),
    "left": (200, 104),
    "across": (45, 328),
    "three": (800, 3),
    "twenty": (322, 20),
    "five": (400, 5),
}


def problem(x: np.ndarray, eps: float = 1e-5) -> bounds.Problem:
    """The bound of accurate statistics: what is left of a mean when it is subtracted is subtracted too."""
    found = bounds.problem(x.shape, (-2,), (-2,), (1, x.shape[1]), x, None, None, eps=eps, centred=True)
    return dataclasses.replace(found, wide=True, sample=None)


def check(x: np.ndarray, plan: ColumnPlan) -> batch.Statistics:
    """The statistics within their computed bounds."""
    scale = np.linspace(-1, 2, x.shape[1]).astype(np.float32)
    found = statistics(x, plan, scale=scale)
    wanted = bounds.normalised(problem(x))
    for name in ("mean", "rstd", "variance"):
        value = getattr(found, name)
        agree(value, getattr(wanted, name)[0], getattr(wanted, f"{name}_error")[0], np.float32, name)
    np.testing.assert_array_equal(found.mean, found.mean + found.rest)
    np.testing.assert_array_equal(found.factor, found.rstd * scale)
    return found


def normal(rows: int, columns: int, dtype: str, mean: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng([rows, columns])
    return (mean + rng.normal(size=(rows, columns))).astype(DTYPES[dtype])


@each_dtype
@pytest.mark.parametrize("size", SIZES)
def test_statistics(size: str, dtype: str):
    rows, columns = SIZES[size]
    if batch.forward_plan(rows, columns, dtype) is None:
        rows -= rows % 8
    check(normal(rows, columns, dtype), plan_of(rows, columns, dtype))


@each_dtype
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("chunk", "splits"), [(1, 3), (2, 5), (4, 1)])
def test_splits_and_chunks(chunk: int, splits: int, stages: int, dtype: str):
    """Several tiles for each split, not as many for all, and rows behind the last whole tile."""
    rows, columns = 4 * 128 * 3 + 5, 24
    plan = plan_of(rows, columns, dtype, threads=128, chunk=chunk, splits=splits, stages=stages)
    assert plan.splits == splits
    assert plan.full > stages * splits
    assert plan.rest
    check(normal(rows, columns, dtype), plan)


@pytest.mark.parametrize(("dtype", "mean"), [("f32", 1e4), ("bf16", 100.0), ("f16", 100.0)])
@pytest.mark.parametrize("size", ["few", "lines", "three"])
def test_mean_far_from_zero(size: str, dtype: str, mean: float):
    rows, columns = SIZES[size]
    check(normal(rows, columns, dtype, mean), plan_of(rows, columns, dtype))


@each_dtype
@pytest.mark.parametrize("row", [0, 1, 700])
def test_a_row_far_from_the_others(row: int, dtype: str):
    """Also the first, from which distances are measured."""
    x = normal(2100, 24, dtype)
    x[row] = np.asarray(-3e4, x.dtype)
    check(x, plan_of(2100, 24, dtype, threads=128, chunk=2, splits=4))


def roundings(plan: ColumnPlan) -> int:
    """How many a distance from the first row goes through, at most, on its way into the mean (`batch_kernels`).

    None of what is rounded there is larger than the largest distance.
    """
    first = plan.chunk + 4  # the distance, those added to it, their number's inverse, the product
    chunk = plan.chunk + 6  # two differences, and the mean's own sum
    chunks = -(-plan.full // plan.splits) + (plan.rest > 0)
    lines = 5 * (plan.lines - 1).bit_length()  # a difference, a share of two roundings, a product, a sum
    warps = batch_kernels.MERGE_THREADS // lanes.LANES
    merge = -(-plan.splits * plan.fold // warps) + warps + 2  # products are fused with sums; 1 / n, and its product
    return first + chunks * chunk + lines + merge


def test_a_first_row_far_away_costs_the_others_no_digits():
    """x - μ of the other rows, of which x less the first row has lost all but a few."""
    x, plan = normal(3000, 8, "f32"), plan_of(3000, 8, "f32")
    x[0] = 1e6
    found = statistics(x, plan)
    wide = x.astype(np.float64)
    exact = wide - wide.mean(0)
    centred = (x - found.mean) - found.rest
    largest = np.abs(wide - wide[0]).max(0)
    subtracted = 2 * np.abs(exact[1:]).max(0)  # twice, and each time it is rounded
    assert (np.abs(centred - exact)[1:] <= 2.0**-24 * (roundings(plan) * largest + subtracted)).all()
    through_the_base = (x - x[0]) - (found.mean.astype(np.float64) - x[0]).astype(np.float32)
    assert np.ptp((through_the_base - exact)[1:], 0).max() > 4 * np.ptp((centred - exact)[1:], 0).max()


@each_dtype
@pytest.mark.parametrize("value", [0.0, 1e4, -0.3])
def test_a_constant_column_has_no_variance(value: float, dtype: str):
    x = normal(700, 24, dtype)
    x[:, 5] = value
    found = check(x, plan_of(700, 24, dtype, threads=128, chunk=2, splits=2))
    assert found.variance[5] == 0
    assert found.mean[5] == x[0, 5]


@each_dtype
@pytest.mark.parametrize("rows", [600, 2100])
def test_what_is_not_finite_stays_in_its_column(rows: int, dtype: str):
    x = normal(rows, 24, dtype)
    plan = plan_of(rows, 24, dtype, threads=128, chunk=2, splits=2)
    clean = statistics(x, plan)
    x[1, 3], x[rows - 1, 4], x[0, 5], x[0, 6] = np.nan, np.inf, -np.inf, np.nan
    found = statistics(x, plan)
    touched = np.isin(np.arange(24), [3, 4, 5, 6])
    for name in ("mean", "rstd", "variance", "rest"):
        value, before = (np.asarray(getattr(v, name)) for v in (found, clean))
        np.testing.assert_array_equal(value[~touched], before[~touched])
        assert not np.isfinite(value[touched]).any()
    assert np.isnan(np.asarray(found.rstd)[touched]).all()


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("kernel", ["statistics", "merge", "sums"])
def test_one_barrier_less_is_a_race(kernel: str, which: int):
    """Each of the three of `merge`, and the first three of the others."""
    x, plan = normal(999, 24, "f32"), plan_of(999, 24, "f32", chunk=1, splits=1)
    base, pairs = pairs_of(x, plan)
    runs: dict[str, Any] = {
        "statistics": lambda **machine: pairs_of(x, plan, **machine),
        "merge": lambda **machine: merged(base, pairs, None, plan, **machine),
        "sums": lambda **machine: sums(x, x, base, base, config=plan, **machine),
    }
    runs[kernel]()
    with pytest.raises(AssertionError, match="a race"):
        runs[kernel](skips=which)


def test_plans_cover_all_rows_and_columns():
    for rows, columns in ((1, 8), (401408, 256), (1568, 2048), (128, 56 * 56 * 256), (10**7, 3 * 8), (2**20, 64)):
        for dtype in DTYPES:
            plan = plan_of(rows, columns, dtype)
            assert plan.full * plan.tile + plan.rest == plan.rows
            assert plan.rows * plan.columns == rows * columns
            assert plan.across * plan.width >= plan.row_vectors
            assert 1 <= plan.splits <= max(1, plan.full)
            assert plan.tile * plan.row_vectors < 1 << 27


@each_dtype
@pytest.mark.parametrize("size", SIZES)
def test_sums(size: str, dtype: str):
    """In any order: Σ |terms| (rows + 3) roundings."""
    rows, columns = SIZES[size]
    if batch.backward_plan(rows, columns, dtype) is None:
        rows -= rows % 8
    x, dy = normal(rows, columns, dtype), normal(rows, columns, dtype, 0.1)
    mean = x.astype(np.float64).mean(0).astype(np.float32)
    check_sums(dy, x, mean, None)


@each_dtype
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("chunk", "splits"), [(1, 3), (2, 5)])
def test_sums_of_splits_and_chunks(chunk: int, splits: int, stages: int, dtype: str):
    rows, columns = 4 * 128 * 3 + 5, 24
    plan = plan_of(rows, columns, dtype, threads=128, chunk=chunk, splits=splits, stages=stages)
    x, dy = normal(rows, columns, dtype), normal(rows, columns, dtype, 0.1)
    check_sums(dy, x, np.linspace(-1, 2, columns).astype(np.float32), plan)


def check_sums(dy: np.ndarray, x: np.ndarray, mean: np.ndarray, plan: ColumnPlan | None) -> None:
    rstd = np.linspace(0.5, 3, x.shape[1]).astype(np.float32)
    found = np.asarray(sums(dy, x, mean, rstd, config=plan))
    g, h = dy.astype(np.float64), (x.astype(np.float64) - mean) * rstd
    terms = [g, g * h, h][: len(found)]
    rate = (len(x) + 3) * 2.0**-24
    growth = rate / (1 - rate)
    for value, term, name in zip(found, terms, ("dy", "dy h", "h"), strict=False):
        agree(value, term.sum(0), growth * np.abs(term).sum(0), np.float32, name)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("size", SIZES)
def test_sums_before_a_relu(size: str, dtype: str):
    """The bits of sums of a dy that is 0 where y, rounded, is not above 0, in float16 at ties too, and NaN where y is.

    Those of bfloat16 are subnormal in float32, which XLA takes for 0 on a CPU, and a GPU does not.
    """
    rows, columns = SIZES[size]
    rows -= rows % 8 if batch.backward_plan(rows, columns, dtype) is None else 0
    x, dy = normal(rows, columns, dtype), normal(rows, columns, dtype, 0.1)
    x[::3] = x[0]
    mean, least = x[0].astype(np.float32), {"bf16": 0.0, "f16": 2.0**-24}[dtype]
    rstd, scale = np.linspace(0.5, 2, columns).astype(np.float32), np.linspace(-1, 2, columns).astype(np.float32)
    # Of every third row y is its column's bias.
    bias = np.resize([0.25, least, 0.75 * least, 0.5 * least, 0, -0.5, np.nan], columns).astype(np.float32)
    y = (((x.astype(np.float32) - mean) * rstd) * scale + bias).astype(x.dtype).astype(np.float32)
    found = sums(dy, x, mean, rstd, ("relu", None), (scale, bias))
    passed = dy.astype(np.float32) * np.where(np.isnan(y), y, y > 0)
    np.testing.assert_array_equal(found, sums(passed.astype(dy.dtype), x, mean, rstd))
    assert np.isnan(np.asarray(found)).all(0).tolist() == np.isnan(bias).tolist()


def test_slope_of_swish():
    """σ + z σ (1 - σ) with a few roundings, from both tails to the middle; of a row alone the slope is the sum."""
    z = np.concatenate([np.linspace(-120, 120, 80), np.linspace(-3, 3, 48)]).astype(DTYPES["bf16"])
    x, zeros, ones = z.reshape(1, -1), np.zeros(128, np.float32), np.ones(128, np.float32)
    found = np.asarray(sums(np.ones_like(x), x, zeros, ones, ("swish", 1.0), (ones, zeros)))[0]
    wide = z.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-wide))
    # The exponent is rounded, so σ is off by z / 2 units of its last place below 0; 1 - σ is off by one of 1.
    off = sigmoid * (4 + 10 * np.abs(wide) + np.abs(wide) ** 2) * 2.0**-24
    agree(found, sigmoid + wide * sigmoid * (1 - sigmoid), off + 2.0**-120, np.float32, "slope")


# ---- the pass behind an activation -----------------------------------------------------------------------------------

ROUNDOFF = 2.0**-24
each_narrow = pytest.mark.parametrize("dtype", ["bf16", "f16"])
each_activation = pytest.mark.parametrize("activation", ["relu", "swish"])


def saved(columns: int) -> list[np.ndarray]:
    """A mean, an inverse deviation, a scale and a bias for each column."""
    ends = (0.2, 0.7), (0.5, 2), (-1, 2), (0.5, -0.5)
    return [np.linspace(*of, columns).astype(np.float32) for of in ends]


def before(x: np.ndarray, mean: Any, rstd: Any, scale: Any, bias: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """h, z = s h + b, and how far z may be off, of four roundings."""
    h = (x.astype(np.float64) - mean) * rstd
    z = h * scale + bias
    return h, z, ROUNDOFF * (4 * np.abs(h * scale) + np.abs(z))


def values(activation: str, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """act(z) and act'(z)."""
    if activation == "relu":
        return np.maximum(z, 0), (z > 0).astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-z))
    return z * sigmoid, sigmoid + z * sigmoid * (1 - sigmoid)


@each_narrow
@each_activation
@pytest.mark.parametrize("size", SIZES)
def test_results_behind_an_activation(size: str, activation: str, dtype: str):
    rows, columns = SIZES[size]
    rows -= rows % 8 if batch.apply_plan(rows, columns, dtype, 1) is None else 0
    x, (mean, rstd, *affine) = normal(rows, columns, dtype), saved(columns)
    _, z, off = before(x, mean, rstd, *affine)
    wanted, _ = values(activation, z)
    for out in (dtype, "f32"):
        found = activated(x, mean, rstd, (activation, None), affine, DTYPES[out])
        agree(found, wanted, 1.1 * off + 8 * ROUNDOFF * (1 + np.abs(z)) * np.abs(wanted), DTYPES[out], "y")


@each_narrow
@each_activation
@pytest.mark.parametrize("size", SIZES)
def test_gradients_behind_an_activation(size: str, activation: str, dtype: str):
    rows, columns = SIZES[size]
    rows -= rows % 8 if batch.apply_plan(rows, columns, dtype, 2) is None else 0
    x, dy, (mean, rstd, *affine) = normal(rows, columns, dtype), normal(rows, columns, dtype, 0.1), saved(columns)
    totals = np.stack([np.linspace(-2, 3, columns), np.linspace(4, -1, columns)]).astype(np.float32)
    h, z, off = before(x, mean, rstd, *affine)
    # Of relu as far from its kink as z is off.
    dy[np.abs(z) <= off] = 0
    g = dy * values(activation, z)[1]
    factor = rstd.astype(np.float64) * affine[0]
    terms = [factor * g, factor * totals[0] / rows, factor * h * totals[1] / rows]
    slope = 0 if activation == "relu" else 16 * ROUNDOFF * (1 + np.abs(z)) + off / 2
    error = np.abs(factor * dy) * slope + 8 * ROUNDOFF * sum(map(np.abs, terms))
    for out in (dtype, "f32"):
        found = gradients(dy, x, mean, rstd, totals, (activation, None), affine, DTYPES[out])
        agree(found, terms[0] - terms[1] - terms[2], error, DTYPES[out], "dx")


@each_narrow
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(("chunk", "splits"), [(1, 3), (2, 5), (4, 1)])
def test_an_activation_has_the_same_bits_however_rows_are_partitioned(chunk: int, splits: int, stages: int, dtype: str):
    rows, columns = 4 * 128 * 3 + 5, 24
    plan = plan_of(rows, columns, dtype, threads=128, chunk=chunk, splits=splits, stages=stages)
    assert plan.rest
    x, dy, (mean, rstd, *affine) = normal(rows, columns, dtype), normal(rows, columns, dtype, 0.1), saved(columns)
    swish, out, totals = ("swish", 1.0), DTYPES[dtype], np.ones((2, columns), np.float32)
    of = lambda config: (
        activated(x, mean, rstd, swish, affine, out, config),
        gradients(dy, x, mean, rstd, totals, swish, affine, out, config),
    )
    for one, other in zip(of(None), of(plan), strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint16), np.asarray(other).view(np.uint16))


@each_activation
def test_what_is_not_finite_stays_in_its_column_behind_an_activation(activation: str):
    """A NaN among the parameters makes all of its column NaN, one of x its own element."""
    x, (mean, rstd, *affine) = normal(40, 32, "bf16"), saved(32)
    totals, options = np.zeros((2, 32), np.float32), ((activation, None), affine, DTYPES["bf16"])
    clean = activated(x, mean, rstd, *options)
    for i, parameter in enumerate((mean, rstd, affine[0])):
        parameter[3 * i] = np.nan
    x[7, 20] = np.nan
    found = np.asarray(activated(x, mean, rstd, *options), np.float32)
    dx = gradients(x, x, mean, rstd, totals, *options)
    touched = np.zeros((40, 32), bool)
    touched[:, [0, 3, 6]] = touched[7, 20] = True
    np.testing.assert_array_equal(np.isnan(found), touched)
    np.testing.assert_array_equal(found[~touched], np.asarray(clean, np.float32)[~touched])
    np.testing.assert_array_equal(np.isnan(np.asarray(dx, np.float32)), touched)


SPECIAL = (np.nan, np.inf, -np.inf)


def planted(dtype: str) -> tuple[np.ndarray, ...]:
    """dy, x, mean, rstd, scale and bias, of most columns with a number that is not finite.

    It is a statistic's, a parameter's, or of x or dy at an element of a whole tile or of the rest, before or beyond
    relu's kink; or there are two of which an element's s h + b is NaN, and not its h.
    """
    rows, columns = 200, 56
    x, dy, parameters = normal(rows, columns, dtype), normal(rows, columns, dtype, 0.1), saved(columns)
    mean, rstd, scale, bias = parameters
    mean[:] = x.astype(np.float64).mean(0)
    scale += np.where(scale < 0, -0.5, 0.5).astype(np.float32)
    _, z, off = before(x, *parameters)
    dy[np.abs(z) <= off] = 0
    for column, (row, value) in enumerate(itertools.product((5, 198), SPECIAL)):
        x[row, column] = value
    for column in range(6, 30):
        of_side = np.flatnonzero((z[:, column] > 0) == bool(column % 2))
        dy[of_side[0 if column % 4 < 2 else -1], column] = SPECIAL[column % 3]
    for column, (v, value) in enumerate(itertools.product(parameters, SPECIAL), 30):
        v[column] = value
    scale[42], x[5, 42] = 0, np.inf
    scale[43], mean[43] = np.inf, x[198, 43]
    scale[44], bias[44] = np.inf, -np.inf
    rstd[45], bias[45] = np.inf, -np.inf
    return dy, x, *parameters


@pytest.mark.parametrize("of", [machine, pytest.param(batch, marks=on_hopper)], ids=["machine", "device"])
@each_narrow
@each_activation
def test_what_is_not_finite_is_where_the_definition_has_it(activation: str, dtype: str, of: ModuleType):
    """In y, dx, dscale and dbias; the numbers beside it are right."""
    dy, x, mean, rstd, scale, bias = planted(dtype)
    rows, affine, act = len(x), (scale, bias), (activation, None)
    with np.errstate(invalid="ignore", over="ignore"):
        h, z, off = before(x, mean, rstd, *affine)
        g = reference.activation_dgrad(dy.astype(np.float64), z, activation=activation)
        alike: dict[str, Any] = {"layout": "NWC", "mean": mean, "rstd": rstd, "scale": scale}
        dx, dscale, dbias = reference.batch_norm_dgrad(g[:, None], x[:, None], **alike)
        # Where z is infinite y and the slope have their limits.
        off, far = (np.where(np.isfinite(z), v, 0) for v in (off, np.abs(z)))
        of_slope = 0 if activation == "relu" else 16 * ROUNDOFF * (1 + far) + off / 2
        of_g, growth = np.abs(dy * of_slope), ROUNDOFF * (rows + 8)
        of_sums = [(of_g * v + growth * np.abs(g * v)).sum(0) for v in (1, np.abs(h))]
        terms = np.abs(g) + np.abs(g.mean(0)) + np.abs(h * (g * h).mean(0))
        off_by = of_g + (of_sums[0] + np.abs(h) * of_sums[1]) / rows + 8 * ROUNDOFF * terms
    wanted = {
        "y": (reference.activation(z, activation=activation), 1.1 * off + 8 * ROUNDOFF * (1 + far) * far),
        "dx": (dx[:, 0], np.abs(rstd * scale) * off_by),
        "dbias": (dbias, of_sums[0]),
        "dscale": (dscale, of_sums[1]),
    }
    dy, x, mean, rstd, *affine = map(jnp.asarray, (dy, x, mean, rstd, *affine))
    totals = of.sums(dy, x, mean, rstd, act, affine)
    found = {
        "y": of.activated(x, mean, rstd, act, affine, DTYPES[dtype]),
        "dx": of.gradients(dy, x, mean, rstd, totals, act, affine, DTYPES[dtype]),
        "dbias": totals[0],
        "dscale": totals[1],
    }
    for name, (golden, error) in wanted.items():
        agree(found[name], golden, np.nan_to_num(error, posinf=0), found[name].dtype, name)
