"""Softmax's Hopper kernels on the CPU: in Pallas' interpreter, where they are PTX by a small machine, and lowered."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.core import engines, selection, tolerance
from jaxdnn._src.core.tolerance import Accumulation
from jaxdnn._src.softmax import bounds
from jaxdnn._src.softmax.primitive import SoftmaxSpec
from tests.hopper.row_machine import Rows, on_arrays

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._src.hopper.ptx import SIZES
from jaxdnn._src.hopper.row_kernel import Plan
from jaxdnn._src.softmax.hopper import dgrad_ptx, long, stream_ptx
from jaxdnn._src.softmax.hopper import rows as softmax
from jaxdnn._src.softmax.hopper.ptx import RowPlan
from tests.hopper.interpreter import interpreted

pytestmark = pytest.mark.usefixtures("h200")

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
RULE = Accumulation(flush=True)
# Every way to partition a long row.
LENGTHS = (16392, 20000, 40000, 70000, 140000)
CLUSTERS = 2  # of blocks that stay
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_length = pytest.mark.parametrize("length", LENGTHS)


def data(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * 3).astype(DTYPES[dtype])


def run(
    code: str, plan: Any, arrays: list[np.ndarray], shape: tuple[int, ...], dtype: str, blocks: int = 0
) -> np.ndarray:
    blocks, floats = blocks or long.clusters(plan, len(arrays[0])), long.floats(plan)
    return on_arrays(Rows, code, arrays, [(shape, DTYPES[dtype])], plan.block, blocks, plan.cluster, floats=floats)[0]


def assert_right(out: np.ndarray, golden: np.ndarray, error: Any) -> None:
    found = tolerance.compare(out, golden, error)
    assert found.passed, found.message


def forward_of(x: np.ndarray, algorithm: str) -> tuple[np.ndarray, Any]:
    """The definition's results, and how far a kernel's may be from them."""
    wide = x.astype(np.float64)
    if algorithm == "logsumexp":
        return reference.logsumexp(x, out_dtype=np.float64), bounds.logsumexp(wide, (1,), RULE)[:, 0]
    return reference.softmax(x, algorithm=algorithm, out_dtype=np.float64), bounds.softmax(wide, algorithm, (1,), RULE)


def backward_of(dy: np.ndarray, y: np.ndarray, algorithm: str, *, tangent: bool = False) -> tuple[np.ndarray, Any]:
    """Likewise. Along dy: the bound is of the exponentials, the products, and the sum in any order."""
    wide = dy.astype(np.float64), y.astype(np.float64)
    if not tangent:
        golden = reference.softmax_dgrad(dy, y, algorithm=algorithm, out_dtype=np.float64)
        return golden, bounds.softmax_dgrad(*wide, algorithm, (1,), RULE)
    p = np.exp(wide[1])
    golden = wide[0] - (p * wide[0]).sum(1, keepdims=True)
    rate = (dy.shape[1] + 10 + 3 * np.abs(wide[1])) * 2.0**-24
    return golden, (rate * p * np.abs(wide[0])).sum(1, keepdims=True) * 1.01 + 2.0**-24 * np.abs(golden)


def exceptional(length: int, dtype: str) -> np.ndarray:
    """Rows with infinities and NaN, and with what some programs mask with."""
    x = data((7, length), dtype)
    x[0] = -np.inf
    x[1, 3] = -np.inf
    x[2, length // 2] = np.inf
    x[3, length - 1] = np.nan
    x[4] = ml_dtypes.finfo(DTYPES[dtype]).min
    x[5, 0], x[5, 1] = np.inf, -np.inf
    x[6, 1:] = -np.inf
    return x


# ---- rows in the registers of a block, in Pallas --------------------------------------------------------------------


# Length, dtype, dtype of the result, rows, plan: several rows to a warp, a warp to a row, two, four and eight; ragged
# ends, several rows at once, and fewer than a warpgroup has; blocks that stay.
HELD: dict[str, tuple[int, str, str, int, Plan]] = {
    "a vector": (8, "bf16", "bf16", 128, Plan(32)),
    "part of a warp": (64, "f32", "f32", 32, Plan(32, 2)),
    "part of a warp, ragged": (104, "f16", "f32", 16, Plan(32)),
    "a warp, ragged": (136, "f32", "bf16", 4, Plan(32)),
    "two warps, ragged": (520, "bf16", "bf16", 4, Plan(64)),
    "four warps": (2048, "f16", "f16", 3, Plan(128, 4)),
    "eight warps": (2048, "bf16", "f32", 3, Plan(256)),
    "eight warps, ragged": (1032, "f32", "f32", 3, Plan(256)),
    "eight warps that stay": (2048, "f16", "bf16", 5, Plan(256, stays=True)),
}


def held(case: str, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Two arrays, and how a kernel is called. Rows, and a ragged end's vectors, that are stored twice are a race."""
    length, dtype, out, rows, plan = HELD[case]
    interpret = interpreted(monkeypatch, races="ragged" not in case and rows >= 4)
    x, dy = (data((rows, length), dtype, seed) for seed in range(2))
    return x, dy, {"out_dtype": np.dtype(DTYPES[out]), "config": plan, "interpret": interpret}


@pytest.mark.parametrize("algorithm", ["accurate", "fast", "log", "logsumexp"])
@pytest.mark.parametrize("case", HELD)
def test_forward_in_registers(case: str, algorithm: str, monkeypatch: pytest.MonkeyPatch):
    x, _, options = held(case, monkeypatch)
    out = np.asarray(softmax.softmax(jnp.asarray(x), algorithm=algorithm, **options))
    assert_right(out, *forward_of(x, algorithm))


@pytest.mark.parametrize("which", ["accurate", "log", "tangent"])
@pytest.mark.parametrize("case", HELD)
def test_backward_in_registers(case: str, which: str, monkeypatch: pytest.MonkeyPatch):
    x, dy, options = held(case, monkeypatch)
    algorithm = "log" if which == "tangent" else which
    y = reference.softmax(x, algorithm=algorithm)
    tangent = which == "tangent"
    out = softmax.softmax_dgrad(jnp.asarray(dy), jnp.asarray(y), algorithm=algorithm, tangent=tangent, **options)
    assert_right(np.asarray(out), *backward_of(dy, y, algorithm, tangent=tangent))


@pytest.mark.parametrize("algorithm", ["accurate", "fast", "log", "logsumexp"])
@pytest.mark.parametrize(("length", "dtype", "threads"), [(8, "bf16", 32), (520, "f32", 64), (2056, "f16", 256)])
def test_what_is_not_finite_in_registers(
    length: int, dtype: str, threads: int, algorithm: str, monkeypatch: pytest.MonkeyPatch
):
    x = exceptional(length, dtype)
    options: dict[str, Any] = {"config": Plan(threads), "interpret": interpreted(monkeypatch, races=False)}
    out = softmax.softmax(jnp.asarray(x), algorithm=algorithm, out_dtype=np.dtype(DTYPES[dtype]), **options)
    with np.errstate(all="ignore"):
        assert_right(np.asarray(out), *forward_of(x, algorithm))


@pytest.mark.parametrize(("length", "threads"), [(64, 32), (520, 64)])
def test_bits_do_not_depend_on_how_rows_are_partitioned(length: int, threads: int, monkeypatch: pytest.MonkeyPatch):
    """Whole numbers, whose sums are exact: the interpreter adds a vector's elements in any order."""
    draw = np.random.default_rng(length).integers
    dy, y = (jnp.asarray(draw(-9, 9, (33, length)), jnp.bfloat16) for _ in range(2))
    options: dict[str, Any] = {"algorithm": "accurate", "tangent": False, "out_dtype": np.dtype(np.float32)}
    options["interpret"] = interpreted(monkeypatch, races=False)
    lone = softmax.softmax_dgrad(dy, y, config=Plan(threads), **options)
    many = softmax.softmax_dgrad(dy, y, config=Plan(threads, 4), **options)
    few = softmax.softmax_dgrad(dy[7:9], y[7:9], config=Plan(threads), **options)
    np.testing.assert_array_equal(lone, many)
    np.testing.assert_array_equal(lone[7:9], few)


@pytest.mark.parametrize(("rows", "length"), [(4096, 512), (4096, 64), (600, 16384)])
def test_elements_of_several_rows_at_once_are_not_fenced(rows: int, length: int, monkeypatch: pytest.MonkeyPatch):
    """Mosaic's barrier permutes 16-bit elements that lie in several registers of a thread."""
    found, barrier = [], jax.lax.optimization_barrier
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda v: found.append(v) or barrier(v))
    jax.make_jaxpr(lambda x: softmax.softmax(x, algorithm="log", out_dtype=x.dtype))(shape_of(rows, length))
    found = [v for v in found if not isinstance(v, tuple)]  # that before the kernel has all operands
    assert {v.dtype for v in found} == {np.dtype(np.float32)} | ({np.dtype(jnp.bfloat16)} if length > 512 else set())
    assert all(v.dtype == np.float32 or v.shape[0] == 1 for v in found)


@pytest.mark.parametrize("which", ["accurate", "logsumexp", "dgrad"])
def test_threads_depend_on_the_length_alone(which: str):
    for dtype in (jnp.bfloat16, jnp.float32):
        for length in range(8, 20000, 8):
            plans = [softmax.plan(length, dtype, which, rows) for rows in (1, 600, 1 << 20)]
            assert len({plan and plan.threads for plan in plans}) == 1
            vectors = length * np.dtype(dtype).itemsize // 16
            assert all(plan is None or vectors >= plan.threads or plan.threads == 32 for plan in plans)


# ---- longer rows: PTX ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["accurate", "fast", "log", "logsumexp"])
@each_dtype
@each_length
def test_forward(length: int, dtype: str, algorithm: str):
    x = data((2, length), dtype)
    plan = long.plan(length, dtype, dtype, algorithm)
    code = long.forward_code(plan, 2, algorithm)
    out = run(code, plan, [x], (2,) if algorithm == "logsumexp" else x.shape, dtype)
    assert_right(out, *forward_of(x, algorithm))


def streamed(
    length: int, dtype: str, out_dtype: str, block: int, cluster: int, places: int, pieces: int = 1
) -> RowPlan:
    part = -(-(length * SIZES[dtype] // 16) // (block * cluster // 32))
    vectors = -(-part // (32 * pieces))
    plan = RowPlan(length, dtype, out_dtype, vectors, block, cluster, stages=places)
    assert stream_ptx.pieces(plan) == pieces
    return plan


@pytest.mark.parametrize("algorithm", ["accurate", "fast", "log", "logsumexp"])
@each_dtype
@pytest.mark.parametrize(("length", "block", "cluster"), [(8192, 128, 1), (9000, 256, 2), (16384, 128, 4)])
def test_rows_on_their_way_through_shared_memory(length: int, block: int, cluster: int, dtype: str, algorithm: str):
    """One row, more than there are places for, and as many as clusters; slices and parts of two lengths."""
    for rows, places in ((2 * CLUSTERS * 3 + 1, 3), (3, 2), (1, 2), (CLUSTERS, 5)):
        plan = streamed(length, dtype, dtype, block, cluster, places)
        x = data((rows, length), dtype)
        blocks = min(rows, CLUSTERS)
        code = stream_ptx.forward(plan, rows, blocks, algorithm)
        out = run(code, plan, [x], (rows,) if algorithm == "logsumexp" else x.shape, dtype, blocks)
        assert_right(out, *forward_of(x, algorithm))


@each_dtype
@pytest.mark.parametrize(
    ("length", "block", "cluster", "pieces"), [(9000, 128, 1, 2), (24576, 128, 1, 3), (24584, 128, 2, 4)]
)
def test_logsumexp_of_rows_in_pieces(length: int, block: int, cluster: int, pieces: int, dtype: str):
    """Fewer places than a row has pieces, and more."""
    for rows, places in ((7, 2), (7, 5), (1, 1)):
        plan = streamed(length, dtype, dtype, block, cluster, places, pieces)
        x = data((rows, length), dtype)
        x[rows // 2, : length // 2] = -np.inf
        code = stream_ptx.forward(plan, rows, min(rows, CLUSTERS), "logsumexp")
        out = run(code, plan, [x], (rows,), dtype, min(rows, CLUSTERS))
        assert_right(out, *forward_of(x, "logsumexp"))


@pytest.mark.parametrize(("algorithm", "pieces"), [("accurate", 1), ("logsumexp", 3)])
def test_bits_depend_on_neither_places_nor_clusters(algorithm: str, pieces: int):
    x = data((9, 9000), "bf16")
    first = streamed(9000, "bf16", "bf16", 256, 2, 2, pieces)
    shape = (9,) if algorithm == "logsumexp" else x.shape
    runs = [
        run(stream_ptx.forward(plan, 9, clusters, algorithm), plan, [x], shape, "bf16", clusters)
        for plan, clusters in ((first, 2), (dataclasses.replace(first, stages=4), 2), (first, 5))
    ]
    for found in runs[1:]:
        np.testing.assert_array_equal(found.view(np.uint8), runs[0].view(np.uint8))


@pytest.mark.parametrize(("vectors", "places", "length"), [(4, 3, 1032), (2, 3, 9000), (3, 1, 9000)])
def test_a_plan_that_the_kernel_cannot_follow(vectors: int, places: int, length: int):
    """A warp without elements; more than lanes hold; no place for the next row beside this one."""
    plan = RowPlan(length, "bf16", "bf16", vectors, 512, stages=places)
    with pytest.raises(ValueError, match="a plan that leaves a warp"):
        stream_ptx.forward(plan, 2, 1, "accurate")


@pytest.mark.parametrize("algorithm", ["accurate", "log", "logsumexp"])
@each_dtype
def test_every_plan_can_be_followed(dtype: str, algorithm: str):
    lengths = {*range(8192, 300_000, 4096), *(8 * int(n) for n in np.random.default_rng(3).integers(1000, 40_000, 60))}
    plans = [long.plan(length, dtype, dtype, algorithm) for length in sorted(lengths)]
    streams = [plan for plan in plans if plan.stages]
    assert 0 < len(streams) < len(plans)
    for plan in streams:
        stream_ptx.check(plan, algorithm)
        assert stream_ptx.shared_bytes(plan) <= long.ROOM[plan.block]


@pytest.mark.parametrize(("dtype", "out_dtype"), [("bf16", "f32"), ("f32", "bf16"), ("f16", "bf16")])
def test_results_narrower_or_wider_than_elements(dtype: str, out_dtype: str):
    """Only results as wide as the elements take the elements' place in shared memory."""
    x = data((7, 9000), dtype)
    plan = streamed(9000, dtype, out_dtype, 256, 2, 3)
    out = run(stream_ptx.forward(plan, 7, CLUSTERS, "accurate"), plan, [x], x.shape, out_dtype, CLUSTERS)
    assert_right(out, *forward_of(x, "accurate"))


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("cp.async.bulk.wait_group.read", "race for shared byte"),
        ("cp.async.bulk.commit_group", "race for shared byte"),
        ("fence.proxy.async", "no fence has shown"),
        ("mbarrier.arrive.shared::cta", "a wait for what does not come"),
        ("st.async", "a wait for what does not come"),
        ("cp.async.bulk.shared::cluster", "a wait for what does not come"),
    ],
)
def test_a_lost_instruction_shows(lost: str, message: str):
    """The machine that runs the kernels sees what the device would only at times."""
    plan = streamed(9000, "bf16", "bf16", 256, 2 if lost == "st.async" else 1, 2)
    x = data((7, 9000), "bf16")
    whole = stream_ptx.forward(plan, 7, CLUSTERS, "accurate")
    code = "\n".join(line for line in whole.splitlines() if lost not in line)
    assert code != whole
    run(whole, plan, [x], x.shape, "bf16", CLUSTERS)
    with pytest.raises(RuntimeError, match=message):
        run(code, plan, [x], x.shape, "bf16", CLUSTERS)


@pytest.mark.parametrize("algorithm", ["accurate", "log"])
@each_dtype
@each_length
def test_backward(length: int, dtype: str, algorithm: str):
    dy = data((2, length), dtype, seed=1)
    y = reference.softmax(data((2, length), dtype), algorithm=algorithm)
    plan = long.plan(length, dtype, dtype, "dgrad")
    out = run(dgrad_ptx.backward(plan, algorithm, False), plan, [dy, y], dy.shape, dtype)
    assert_right(out, *backward_of(dy, y, algorithm))


@each_dtype
@pytest.mark.parametrize("length", [40000, 70000])
def test_tangent_of_the_logarithm(length: int, dtype: str):
    v, y = data((2, length), dtype, seed=1), reference.softmax(data((2, length), dtype), algorithm="log")
    plan = long.plan(length, dtype, "f32", "dgrad")
    out = run(dgrad_ptx.backward(plan, "log", True), plan, [v, y], v.shape, "f32")
    assert_right(out, *backward_of(v, y, "log", tangent=True))


@each_dtype
@pytest.mark.parametrize("length", [40000, 70000])
@pytest.mark.parametrize("algorithm", ["accurate", "fast", "log", "logsumexp"])
def test_what_is_not_finite(length: int, dtype: str, algorithm: str):
    x = exceptional(length, dtype)
    plan = long.plan(length, dtype, dtype, algorithm)
    code = long.forward_code(plan, len(x), algorithm)
    with np.errstate(all="ignore"):
        out = run(code, plan, [x], (len(x),) if algorithm == "logsumexp" else x.shape, dtype)
        assert_right(out, *forward_of(x, algorithm))


@each_dtype
@pytest.mark.parametrize("length", LENGTHS[:-1])
def test_bits_depend_on_the_row_alone(length: int, dtype: str):
    x = data((9, length), dtype)
    plan = long.plan(length, dtype, dtype, "accurate")
    whole = run(long.forward_code(plan, 9, "accurate"), plan, [x], x.shape, dtype)
    alone = run(long.forward_code(plan, 1, "accurate"), plan, [x[4:5]], (1, length), dtype)
    np.testing.assert_array_equal(whole[4:5].view(np.uint8), alone.view(np.uint8))


@each_dtype
@pytest.mark.parametrize("length", [8, 128, 1000, 4096, 8192, 16384, 32768, 131072, 200000])
def test_lowers_for_cuda(length: int, dtype: str):
    dx = lambda x, algorithm: dnn.softmax_dgrad(x, x, algorithm=algorithm, engine="hopper", out_dtype="float32")

    def every(x: Any) -> Any:
        logs = dnn.softmax(x, algorithm="log", engine="hopper"), dx(x, "log")
        return dnn.softmax(x, engine="hopper"), dnn.logsumexp(x, engine="hopper"), dx(x, "accurate"), logs

    lowered = jax.jit(every).trace(shape_of(64, length, dtype=DTYPES[dtype])).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 5


# ---- the engine ------------------------------------------------------------------------------------------------------


def shape_of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def explained(function: Any, *operands: Any) -> Any:
    (told,) = dnn.explain(function, *operands, platform="cuda")
    return told


def candidate(function: Any, *operands: Any) -> Any:
    return next(c for c in explained(function, *operands).candidates if c.engine == "hopper")


@pytest.mark.parametrize(
    ("options", "shape", "dtype", "reason"),
    [
        ({"axis": 0}, (8, 16), jnp.bfloat16, "its rows lie along the last axes, not along (-2,)"),
        ({}, (8, 17), jnp.bfloat16, "its rows are multiples of 16 bytes, and these have 17 elements of bfloat16"),
        ({}, (8, 0), jnp.bfloat16, "it has nothing to do for an empty array"),
        ({}, (1 << 27, 8), jnp.bfloat16, "it takes at most 2^26 rows"),
        ({}, (2, 1 << 31), jnp.bfloat16, "its rows are shorter than 2^32 bytes"),
        ({"out_dtype": jnp.float32}, (2, 1 << 30), jnp.bfloat16, "its rows are shorter than 2^32 bytes"),
        ({}, (2, 1 << 30), jnp.bfloat16, None),
        ({"axis": (0, 1)}, (8, 16), jnp.bfloat16, None),
        ({"out_dtype": jnp.float32}, (8, 16), jnp.float16, None),
        ({}, (2, 3, 4), jnp.float32, None),
    ],
)
def test_engine_says_what_it_serves(options: Any, shape: tuple[int, ...], dtype: Any, reason: str | None):
    found = candidate(lambda x: dnn.softmax(x, **options), shape_of(*shape, dtype=dtype))
    assert found.level == "batch_invariant"
    assert (found.refusal is None) if reason is None else (reason in found.refusal)


def test_engine_wants_one_dtype_backward():
    found = candidate(dnn.softmax_dgrad, shape_of(8, 16), shape_of(8, 16, dtype=jnp.float32))
    assert "its kernels take dy and y of one dtype, not bfloat16 and float32" in found.refusal


def test_engine_does_not_serve_cpus():
    with pytest.raises(NotImplementedError, match="and this is cpu"):
        jax.jit(lambda x: dnn.softmax(x, engine="hopper")).lower(shape_of(8, 16))


def test_engine_is_first_of_every_size():
    (kernel,) = (e for e in engines.registered("softmax") if e.name == "hopper")

    def first(rows: int, length: int, algorithm: str = "accurate", dtype: Any = jnp.bfloat16) -> bool:
        spec = SoftmaxSpec((-1,), np.dtype(np.float32), np.dtype(dtype), algorithm)
        call = engines.Call("softmax", spec, (shape_of(rows, length, dtype=dtype),), "cuda", hopper.MEASURED_ON[0])
        return selection.why_later(kernel, call) is None

    assert all(first(1 << 24 - i, 1 << i, algorithm) for i in (7, 10, 13, 17) for algorithm in ("accurate", "log"))
    assert all((first(100, 4096, "fast"), first(50, 4096, dtype=jnp.float32), first(64, 1000, "log")))


def test_call_by_name_lowers_with_its_derivatives():
    def both(x: Any) -> Any:
        f = lambda x: (
            jnp.sum(dnn.softmax(x, axis=(1, 2), engine="hopper") ** 2) + jnp.sum(dnn.logsumexp(x, engine="hopper"))
        )
        return jax.grad(f)(x), jax.vmap(lambda x: dnn.softmax(x, algorithm="log", engine="hopper"))(x)

    lowered = jax.jit(both).trace(shape_of(6, 4, 32)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 3
