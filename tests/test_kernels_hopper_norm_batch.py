"""The Hopper kernels of batch normalisation on the CPU: their PTX run by a small machine, and lowered for CUDA."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
from _norm_machine import NormRows
from _row_machine import U32, U64
from jaxdnn import _norm, engines, tolerance_norm
from jaxdnn._kernels import hopper
from norm_cases import Norm, agree

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._kernels.hopper import norm_batch, norm_batch_ptx, norm_batches
from jaxdnn._kernels.hopper.norm_batch_ptx import LANES, ColumnPlan

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
    """Runs a kernel on arrays that lie one after the other; it must write every result once, and nothing else."""
    results = [np.zeros(shape, np.float32) for shape in outs]
    starts, size = [], 0
    for array in (*arrays, *results):
        starts.append(size)
        size += -(-array.nbytes // 256) * 256 + 256  # what lies between may be neither used nor written
    machine = Columns(size)
    for array, start in zip(arrays, starts, strict=False):
        machine.memory[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    machine.run(code, [*starts, 0], block, blocks)
    found = []
    for result, start in zip(results, starts[len(arrays) :], strict=True):
        end = start + result.nbytes
        assert (machine.written[start:end] == 1).all()
        found.append(machine.memory[start:end].view(np.float32).reshape(result.shape))
    assert machine.written.sum() == sum(v.nbytes for v in results)
    return found


def statistics(x: np.ndarray, plan: ColumnPlan, eps: float = 1e-5) -> list[np.ndarray]:
    """Mean, inverse deviation, variance and the two parts of the mean, by both kernels."""
    columns = x.shape[1]
    shapes: list[tuple[int, ...]] = [(plan.columns,), (plan.splits, 2, plan.columns)]
    base, sums = run(norm_batch_ptx.statistics(plan), plan.threads, plan.blocks, [x], shapes)
    threads, batch = norm_batch.MERGE_THREADS, norm_batch.MERGE_BATCH
    code = norm_batch_ptx.merge(plan, threads, batch, eps=eps)
    mean, rstd, variance, offset = run(code, threads, -(-columns // LANES), [base, sums], [(columns,)] * 4)
    return [mean, rstd, variance, base[:columns], offset]


def plan_of(rows: int, columns: int, dtype: str, **other: int) -> ColumnPlan:
    """How a call is dealt out, or in another way."""
    found = norm_batch.plan(rows, columns, dtype)
    assert found is not None
    found = dataclasses.replace(found, **other)
    return dataclasses.replace(found, splits=max(1, min(found.splits, found.full)))


def problem(x: np.ndarray, eps: float = 1e-5) -> tolerance_norm.Problem:
    """The bound of accurate statistics: what is left of a mean when it is subtracted is subtracted too."""
    found = tolerance_norm.problem(x.shape, (-2,), (-2,), (1, x.shape[1]), x, None, None, eps=eps, centred=True)
    return dataclasses.replace(found, wide=True, sample=None)


def check(x: np.ndarray, plan: ColumnPlan) -> list[np.ndarray]:
    """The statistics within their computed bounds."""
    mean, rstd, variance, base, offset = found = statistics(x, plan)
    wanted = tolerance_norm.normalised(problem(x))
    pairs = {"mean": mean, "rstd": rstd, "variance": variance}
    for name, value in pairs.items():
        agree(value, getattr(wanted, name)[0], getattr(wanted, f"{name}_error")[0], np.float32, name)
    np.testing.assert_array_equal(base, x[0].astype(np.float32))
    np.testing.assert_array_equal(mean, base + offset)
    return found


def normal(rows: int, columns: int, dtype: str, mean: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng([rows, columns])
    return (mean + rng.normal(size=(rows, columns))).astype(DTYPES[dtype])


@each_dtype
@pytest.mark.parametrize("size", SIZES)
def test_statistics(size: str, dtype: str):
    rows, columns = SIZES[size]
    if norm_batch.plan(rows, columns, dtype) is None:
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


@each_dtype
@pytest.mark.parametrize("value", [0.0, 1e4, -0.3])
def test_a_constant_column_has_no_variance(value: float, dtype: str):
    x = normal(700, 24, dtype)
    x[:, 5] = value
    found = check(x, plan_of(700, 24, dtype, threads=128, chunk=2, splits=2))
    assert found[2][5] == 0
    assert found[0][5] == x[0, 5]


@each_dtype
@pytest.mark.parametrize("rows", [600, 2100])
def test_what_is_not_finite_stays_in_its_column(rows: int, dtype: str):
    x = normal(rows, 24, dtype)
    plan = plan_of(rows, 24, dtype, threads=128, chunk=2, splits=2)
    clean = statistics(x, plan)
    x[1, 3], x[rows - 1, 4], x[0, 5], x[0, 6] = np.nan, np.inf, -np.inf, np.nan
    found = statistics(x, plan)
    touched = np.isin(np.arange(24), [3, 4, 5, 6])
    for value, before in zip(found, clean, strict=True):
        np.testing.assert_array_equal(value[~touched], before[~touched])
    for value in found[:3]:
        assert not np.isfinite(value[touched]).any()
    assert np.isnan(found[1][touched]).all()


def test_plans_cover_all_rows_and_columns():
    for rows, columns in ((1, 8), (401408, 256), (1568, 2048), (128, 56 * 56 * 256), (10**7, 3 * 8), (2**20, 64)):
        for dtype in DTYPES:
            plan = plan_of(rows, columns, dtype)
            assert plan.full * plan.tile + plan.rest == plan.rows
            assert plan.rows * plan.columns == rows * columns
            assert plan.across * plan.width >= plan.row_vectors
            assert 1 <= plan.splits <= max(1, plan.full)
            assert plan.floats * 4 <= 48 << 10
            assert plan.tile * plan.row_bytes < 1 << 32


# ---- the engine ------------------------------------------------------------------------------------------------------


def call_of(function: Any, *operands: Any) -> engines.Call:
    """The call that the first normalisation of a function makes on a GPU."""
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "jaxdnn_norm"]
    avals = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    return engines.Call("norm", eqn.params["spec"], avals, "cuda")


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

    def emulated(x: jax.Array, *, eps: float) -> list[jax.Array]:
        rows, columns = x.shape
        return [jnp.asarray(v) for v in statistics(np.asarray(x), plan_of(rows, columns, dtype), eps)]

    monkeypatch.setattr(norm_batch, "statistics", emulated)
    assert norm_batches.BATCHES.unsupported(call) is None
    parameters = [jnp.asarray(v).reshape(1, 1, 1, 8) for v in (s, b) if v is not None]
    found = norm_batches.BATCHES.run(call, jnp.asarray(x), *parameters)
    p = n.problem(x, s, b)
    p = dataclasses.replace(p, wide=True, sample=None)
    out = np.dtype(out_dtype or DTYPES[dtype])
    agree(found[0], *tolerance_norm.forward(p), out, "y")
    wanted = tolerance_norm.normalised(p)
    for value, name in zip(found[1:], ("mean", "rstd", "variance"), strict=True):
        agree(value, getattr(wanted, name), getattr(wanted, f"{name}_error"), np.float32, name)


def shape_of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
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
        "its kernels take batches of whole vectors of 16 bytes, not 75 rows of 3 bfloat16",
    ),
    "another op": (
        lambda x: dnn.layer_norm(x, axis=(0, 1, 2)),
        (IMAGES,),
        "its kernels over the first axes are those of batch normalisation",
    ),
    "many batches": (jax.vmap(dnn.batch_norm), (shape_of(2, 4, 6, 6, 16),), "not axes (-4, -3, -2)"),
    "backward": (dnn.batch_norm_dgrad, (IMAGES, IMAGES), "it has no kernel for gradients over the first axes"),
}


@pytest.mark.parametrize("name", SERVED)
def test_engine_says_what_it_serves(name: str):
    function, operands, reason = SERVED[name]
    found = refusal(function, *operands)
    assert (found is None) if reason is None else (reason in (found or ""))


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


def test_rows_that_make_no_vectors_are_refused():
    with pytest.raises(ValueError, match="`x` must have rows that make whole vectors of 16 bytes, got \\(75, 3\\)"):
        norm_batch.statistics(jnp.zeros((75, 3), jnp.bfloat16), eps=1e-5)


def test_workspace_is_what_the_kernels_take():
    """The pairs, the base and the second part of the mean."""
    call = call_of(dnn.batch_norm, IMAGES)
    plan = plan_of(144, 16, "bf16")
    assert norm_batches.BATCHES.workspace(call) == 4 * 16 * (2 * plan.splits + 2)
    assert isinstance(call.spec, _norm.NormSpec)
