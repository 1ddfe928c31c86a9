"""The Hopper kernels of batch normalisation on the CPU: their PTX run by a small machine, and lowered for CUDA."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

import jaxdnn as dnn
import jaxdnn_reference as reference
from _norm_machine import NormRows
from _row_machine import U32, U64, on_arrays
from jaxdnn import engines, tolerance_norm
from jaxdnn._kernels import hopper
from norm_cases import Norm, agree

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._kernels.hopper import norm_batch, norm_batch_dgrad_ptx, norm_batch_ptx, norm_batches
from jaxdnn._kernels.hopper.norm_batch_ptx import LANES
from jaxdnn._kernels.hopper.norm_batch_walk import ColumnPlan
from jaxdnn._kernels.hopper.ptx import NAMES

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
# Rows and columns: less than a tile, one row, lines that are no power of two, threads left over, a row that takes
# several blocks and ends within one, and rows of 3, 20 and 5 columns, which make whole vectors by the 8, 2 or 8.
SIZES = {
    "few": (7, 64),
    "one": (1, 8),
    "lines": (999, 24),
    "left": (200, 1000),
    "across": (45, 5000),
    "three": (800, 3),
    "twenty": (322, 20),
    "five": (400, 5),
}


class Columns(NormRows):
    """The instructions that these kernels have beside the others'."""

    def _step(self, name: list[str], arguments: list[Any], active: np.ndarray) -> None:
        bits = self._bits
        put = lambda value: self._put(arguments[0], value, active)
        match name:
            case ["div", "u32"]:
                put(bits(arguments[1]) // bits(arguments[2]))
            case ["sub", "s32"]:
                put((bits(arguments[1]) - bits(arguments[2])) & U64(0xFFFFFFFF))
            case ["min", "s32"]:
                a, b = (bits(v).astype(U32).view(np.int32) for v in arguments[1:])
                put(np.minimum(a, b).view(U32).astype(U64))
            case ["cvt", "u32", "u16"]:
                put(bits(arguments[1]) & U64(0xFFFF))
            case ["ld", "global", "nc", "b16"]:
                words = np.zeros(self.threads, np.uint16)
                words[active] = self.memory[self._places(arguments[1], 2)[active]].view(np.uint16)[:, 0]
                put(words.astype(U64))
            case _:
                super()._step(name, arguments, active)


def run(code: str, block: int, blocks: int, arrays: list[np.ndarray], outs: list[tuple[int, ...]]) -> list[np.ndarray]:
    return on_arrays(Columns, code, arrays, [(shape, np.float32) for shape in outs], block, blocks)


def statistics(
    x: np.ndarray, plan: ColumnPlan, eps: float = 1e-5, scale: np.ndarray | None = None
) -> norm_batch.Statistics:
    """What both kernels find."""
    columns = x.shape[1]
    shapes: list[tuple[int, ...]] = [(plan.columns,), (plan.splits, 2, plan.columns)]
    base, sums = run(norm_batch_ptx.statistics(plan), plan.threads, plan.blocks, [x], shapes)
    threads, batch = norm_batch.MERGE_THREADS, norm_batch.MERGE_BATCH
    code = norm_batch_ptx.merge(plan, threads, batch, eps=eps, scale=scale is not None)
    given = [base, sums, *([] if scale is None else [scale])]
    count = 4 if scale is None else 5
    mean, rstd, variance, rest, *factor = run(code, threads, -(-columns // LANES), given, [(columns,)] * count)
    np.testing.assert_array_equal(base[:columns], x[0].astype(np.float32))
    found: list[Any] = [mean, rstd, variance, rest, factor[0] if factor else rstd]
    return norm_batch.Statistics(*found)


def plan_of(rows: int, columns: int, dtype: str, **other: int) -> ColumnPlan:
    """How a call is dealt out, or in another way."""
    found = norm_batch.forward_plan(rows, columns, dtype)
    assert found is not None
    found = dataclasses.replace(found, **other)
    return dataclasses.replace(found, splits=max(1, min(found.splits, found.full)))


def problem(x: np.ndarray, eps: float = 1e-5) -> tolerance_norm.Problem:
    """The bound of accurate statistics: what is left of a mean when it is subtracted is subtracted too."""
    found = tolerance_norm.problem(x.shape, (-2,), (-2,), (1, x.shape[1]), x, None, None, eps=eps, centred=True)
    return dataclasses.replace(found, wide=True, sample=None)


def check(x: np.ndarray, plan: ColumnPlan) -> norm_batch.Statistics:
    """The statistics within their computed bounds."""
    scale = np.linspace(-1, 2, x.shape[1]).astype(np.float32)
    found = statistics(x, plan, scale=scale)
    wanted = tolerance_norm.normalised(problem(x))
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
    if norm_batch.forward_plan(rows, columns, dtype) is None:
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


def test_a_first_row_far_away_costs_the_others_no_digits():
    """x - μ of the other rows, of which x less the first row has lost all but a few."""
    x = normal(3000, 8, "f32")
    x[0] = 1e6
    found = statistics(x, plan_of(3000, 8, "f32"))
    exact = x.astype(np.float64) - x.astype(np.float64).mean(0)
    centred = (x - found.mean) - found.rest
    # Distances from the first row, each rounded, are added up; here by no more than 64 roundings of a partial sum. What
    # is subtracted from x is 1000 at most, and rounded twice.
    distances = np.abs(x.astype(np.float64) - x[0]).mean(0)
    assert (np.abs(centred - exact)[1:] <= 2.0**-24 * (64 * distances + 2 * 1000)).all()
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
@pytest.mark.parametrize("kernel", ["statistics", "merge"])
def test_one_barrier_less_is_a_race(kernel: str, which: int):
    """Each of the first three; those behind order the threads of one warp."""
    x, plan = normal(999, 24, "f32"), plan_of(999, 24, "f32", threads=128, chunk=1, splits=2)
    whole = norm_batch_ptx.statistics(plan)
    arrays, shapes = [x], [(plan.columns,), (plan.splits, 2, plan.columns)]
    block, blocks = plan.threads, plan.blocks
    if kernel == "merge":
        arrays, shapes = run(whole, block, blocks, arrays, shapes), [(24,)] * 4
        block, blocks = norm_batch.MERGE_THREADS, 1
        whole = norm_batch_ptx.merge(plan, block, norm_batch.MERGE_BATCH, eps=1e-5, scale=False)
    parts = re.split(r"(?m)^bar\.sync .*\n", whole)
    barrier = f"bar.sync 0, {block};\n"
    run(barrier.join(parts), block, blocks, arrays, shapes)
    code = barrier.join(parts[: which + 1]) + barrier.join(parts[which + 1 :])
    with pytest.raises(RuntimeError, match="race for shared byte"):
        run(code, block, blocks, arrays, shapes)


def test_plans_cover_all_rows_and_columns():
    for rows, columns in ((1, 8), (401408, 256), (1568, 2048), (128, 56 * 56 * 256), (10**7, 3 * 8), (2**20, 64)):
        for dtype in DTYPES:
            plan = plan_of(rows, columns, dtype)
            assert plan.full * plan.tile + plan.rest == plan.rows
            assert plan.rows * plan.columns == rows * columns
            assert plan.across * plan.width >= plan.row_vectors
            assert 1 <= plan.splits <= max(1, plan.full)
            assert 4 * plan.floats(norm_batch_ptx.values_of(plan)) <= 48 << 10
            assert plan.tile * plan.row_bytes < 1 << 32


# ---- the engine ------------------------------------------------------------------------------------------------------


def call_of(function: Any, *operands: Any) -> engines.Call:
    """The call that the only normalisation of a function makes on a GPU."""
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name.startswith("jaxdnn_norm")]
    avals = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    return engines.Call(eqn.primitive.name.removeprefix("jaxdnn_"), eqn.params["spec"], avals, "cuda")


@each_dtype
@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize(("op", "mean"), [("plain", 0.5), ("parameters", 0.5), ("parameters", 100.0)])
def test_results_from_the_kernels(
    op: str, mean: float, out_dtype: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """y as the engine makes it of what the kernels find, run by the machine."""
    n = Norm("batch_norm", (5, 6, 7, 8), (8,), (("layout", "NHWC"),))
    x, s, b, _ = n.arrays(7, DTYPES[dtype], mean=mean)
    s, b = (None, None) if op == "plain" else (s.astype(np.float32), b.astype(np.float32))
    call = call_of(lambda x: dnn.batch_norm(x, scale=s, bias=b, out_dtype=out_dtype)[0], x)

    monkeypatch.setattr(norm_batch, "statistics", emulated_statistics)
    assert norm_batches.BATCHES.unsupported(call) is None
    parameters = [jnp.asarray(v).reshape(1, 1, 1, 8) for v in (s, b) if v is not None]
    found = norm_batches.BATCHES.run(call, jnp.asarray(x), *parameters)
    p = n.problem(x, s, b)
    out = np.dtype(out_dtype or DTYPES[dtype])
    agree(found[0], *tolerance_norm.forward(p), out, "y")
    wanted = tolerance_norm.normalised(dataclasses.replace(p, wide=True, sample=None))
    for value, name in zip(found[1:], ("mean", "rstd", "variance"), strict=True):
        agree(value, getattr(wanted, name), getattr(wanted, f"{name}_error"), np.float32, name)


def emulated_statistics(x: Any, scale: Any, *, eps: float) -> norm_batch.Statistics:
    x = np.asarray(x)
    rows, columns = x.shape
    plan = plan_of(rows, columns, NAMES[x.dtype])
    found = statistics(x, plan, eps, None if scale is None else np.asarray(scale))
    return norm_batch.Statistics(*map(jnp.asarray, dataclasses.astuple(found)))


def emulated_sums(dy: Any, x: Any, mean: Any, config: ColumnPlan | None = None) -> jax.Array:
    """The sums of the kernel's splits, added up as the engine does."""
    dy, x, mean = (np.asarray(v) for v in (dy, x, mean))
    rows, columns = x.shape
    plan = config or norm_batch.backward_plan(rows, columns, NAMES[x.dtype])
    assert plan is not None
    count = norm_batch_dgrad_ptx.sums_of(plan)
    shape = (plan.splits, count, plan.columns)
    (parts,) = run(norm_batch_dgrad_ptx.sums(plan), plan.threads, plan.blocks, [dy, x, mean], [shape])
    return jnp.asarray(parts).reshape(plan.splits, count, plan.fold, x.shape[1]).sum((0, 2))


@each_dtype
@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize(("op", "mean"), [("plain", 0.5), ("parameters", 0.5), ("parameters", 100.0)])
def test_gradients_from_the_kernels(
    op: str, mean: float, out_dtype: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """dx, dscale and dbias as the engine makes them of what the kernels find, run by the machine."""
    n = Norm("batch_norm", (5, 6, 7, 8), (8,), (("layout", "NHWC"),))
    x, s, _, dy = n.arrays(9, DTYPES[dtype], mean=mean)
    s = None if op == "plain" else s.astype(np.float32)
    mean_, rstd = (np.asarray(v, np.float32) for v in reference.batch_norm(x)[1:3])
    options: dict[str, Any] = {"mean": mean_, "rstd": rstd, "out_dtype": out_dtype}
    call = call_of(lambda dy, x: dnn.batch_norm_dgrad(dy, x, scale=s, **options), dy, x)
    monkeypatch.setattr(norm_batch, "sums", emulated_sums)
    assert norm_batches.BATCHES.unsupported(call) is None
    operands = [jnp.asarray(v) for v in (dy, x)]
    operands += [jnp.asarray(v).reshape(1, 1, 1, 8) for v in (mean_, rstd, *([] if s is None else [s]))]
    found = norm_batches.BATCHES.run(call, *operands)
    wanted = tolerance_norm.backward(n.problem(x, s, None), dy.astype(np.float64))
    dtypes = (np.dtype(out_dtype or DTYPES[dtype]), np.float32, np.float32)
    for value, (golden, error), out, name in zip(found, wanted, dtypes, ("dx", "dscale", "dbias"), strict=True):
        agree(value, golden, error, out, name)


@each_dtype
@pytest.mark.parametrize("size", SIZES)
def test_sums(size: str, dtype: str):
    """In any order: Σ |terms| (rows + 2) roundings."""
    rows, columns = SIZES[size]
    if norm_batch.backward_plan(rows, columns, dtype) is None:
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
    found = np.asarray(emulated_sums(dy, x, mean, plan))
    g, c = dy.astype(np.float64), x.astype(np.float64) - mean
    terms = [g, g * c, c][: len(found)]
    rate = (len(x) + 2) * 2.0**-24
    growth = rate / (1 - rate)
    for value, term, name in zip(found, terms, ("dy", "dy (x - mean)", "x - mean"), strict=False):
        agree(value, term.sum(0), growth * np.abs(term).sum(0), np.float32, name)


def shape_of(*shape: Any, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def refusal(function: Any, *operands: Any) -> str | None:
    """Why the engine does not serve the last call that a function makes."""
    told = dnn.explain(function, *operands, platform="cuda")
    return [c for call in told for c in call.candidates if c.engine == "hopper"][-1].refusal


IMAGES = shape_of(4, 6, 6, 16)
SERVED: dict[str, tuple[Any, tuple[Any, ...], str | None]] = {
    "images": (dnn.batch_norm, (IMAGES,), None),
    "three channels": (dnn.batch_norm, (shape_of(4, 6, 6, 3),), None),
    "activations": (lambda x: dnn.batch_norm(x, mode="per_activation"), (IMAGES,), None),
    "channels first": (lambda x: dnn.batch_norm(x, layout="NCHW"), (IMAGES,), "not axes (-4, -2, -1)"),
    "odd sizes": (
        dnn.batch_norm,
        (shape_of(3, 5, 5, 3),),
        "its kernels take whole vectors of 16 bytes, of fewer than 2^28 columns, not 75 rows of 3 bfloat16",
    ),
    "another op": (
        lambda x: dnn.layer_norm(x, axis=(0, 1, 2)),
        (IMAGES,),
        "its kernels over the first axes are those of batch normalisation",
    ),
    "many columns": (
        lambda x: dnn.batch_norm(x, mode="per_activation"),
        (shape_of(2, 1 << 12, 1 << 13, 8),),
        "of fewer than 2^28 columns, not 2 rows of 268435456 bfloat16",
    ),
    "backward": (dnn.batch_norm_dgrad, (IMAGES, IMAGES), None),
    "backward, odd sizes": (
        dnn.batch_norm_dgrad,
        (shape_of(3, 5, 5, 3), shape_of(3, 5, 5, 3)),
        "its kernels take whole vectors of 16 bytes, of fewer than 2^28 columns, not 75 rows of 3 bfloat16",
    ),
    "gradients of two dtypes": (
        dnn.batch_norm_dgrad,
        (shape_of(4, 6, 6, 16, dtype=jnp.float32), IMAGES),
        "its kernels take a gradient of x's dtype bfloat16, not float32",
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_engine_says_what_it_serves(name: str):
    function, operands, reason = SERVED[name]
    found = refusal(function, *operands)
    assert (found is None) if reason is None else (reason in (found or ""))


def test_engine_does_not_serve_sizes_that_are_not_known():
    """The dimension's name is what a call is traced with where a program is exported for any batch."""
    call = call_of(dnn.batch_norm, IMAGES)
    (batch,) = export.symbolic_shape("b")
    call = dataclasses.replace(call, avals=(shape_of(batch, 6, 6, 16),))
    (engine,) = [e for e in engines.registered("norm") if e.name == "hopper"]
    assert "sizes that are known when they are traced" in (engine.supports(call) or "")


def test_engine_adds_over_the_batch():
    told = dnn.explain(dnn.batch_norm, IMAGES, platform="cuda")
    (found,) = [c for call in told for c in call.candidates if c.engine == "hopper"]
    assert found.level == "run_to_run"
    with pytest.raises(NotImplementedError, match="cannot be served by engine 'hopper'"):
        jax.eval_shape(lambda x: dnn.batch_norm(x, engine="hopper", determinism="batch_invariant"), IMAGES)


@each_dtype
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 6, 6, 16), (8, 5, 5, 3), (2, 3, 3, 4096)])
def test_lowers_for_cuda(shape: tuple[int, ...], out_dtype: str, dtype: str):
    channel = shape_of(shape[-1], dtype=jnp.float32)
    x = shape_of(*shape, dtype=DTYPES[dtype])

    def f(x: Any, s: Any, b: Any, mean: Any, variance: Any) -> Any:
        options: dict[str, Any] = {"running_mean": mean, "running_variance": variance, "engine": "hopper"}
        return dnn.batch_norm(x, scale=s, bias=b, residual=x, activation="relu", out_dtype=DTYPES[out_dtype], **options)

    lowered = jax.jit(f).trace(x, *[channel] * 4).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2


@each_dtype
def test_lowers_for_cuda_with_its_gradient(dtype: str):
    x, s = shape_of(4, 6, 6, 16, dtype=DTYPES[dtype]), shape_of(16, dtype=jnp.float32)

    def f(x: Any, s: Any) -> Any:
        return jnp.sum(dnn.batch_norm(x, scale=s, engine="hopper")[0].astype(jnp.float32) ** 2)

    lowered = jax.jit(jax.grad(f, (0, 1))).trace(x, s).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 3


def test_rows_that_make_no_vectors_are_refused():
    with pytest.raises(ValueError, match="`x` must have rows that make whole vectors of 16 bytes, got \\(75, 3\\)"):
        norm_batch.statistics(jnp.zeros((75, 3), jnp.bfloat16), None, eps=1e-5)


@pytest.mark.parametrize(
    ("shape", "rank"),
    [((128, 56, 56, 256), 0), ((32, 7, 7, 512), 0), ((4, 6, 6, 16), 2), ((128, 7, 7, 4096), 2), ((1568, 1, 1, 512), 0)],
)
def test_chosen_unasked_like_what_was_measured(shape: tuple[int, ...], rank: int, monkeypatch: pytest.MonkeyPatch):
    call = dataclasses.replace(call_of(dnn.batch_norm, shape_of(*shape)), device_kind="NVIDIA H200")
    (engine,) = [e for e in engines.registered("norm") if e.name == "hopper"]
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert engine.rank(call) == rank
    assert engine.rank(dataclasses.replace(call, device_kind="another")) == 2
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert engine.rank(call) == 2


def test_workspace_is_what_the_kernels_take():
    """The pairs, the base, the second part of the mean and the factor; backward the sums."""
    plan = plan_of(144, 16, "bf16")
    assert norm_batches.BATCHES.workspace(call_of(dnn.batch_norm, IMAGES)) == 4 * 16 * (2 * plan.splits + 3)
    mean = shape_of(16, dtype=jnp.float32)
    call = call_of(lambda dy, x, m: dnn.batch_norm_dgrad(dy, x, mean=m, rstd=m), IMAGES, IMAGES, mean)
    backward = norm_batch.backward_plan(144, 16, "bf16")
    assert backward is not None
    assert norm_batches.BATCHES.workspace(call) == 4 * 16 * 2 * backward.splits
