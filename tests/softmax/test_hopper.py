"""The Hopper kernels of the softmax family on the CPU: their PTX run by a small machine, and lowered for CUDA."""

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
from jaxdnn._src.softmax.hopper import dgrad_ptx, stream_ptx
from jaxdnn._src.softmax.hopper import rows as softmax
from jaxdnn._src.softmax.hopper.ptx import RowPlan

pytestmark = pytest.mark.usefixtures("h200")

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
RULE = Accumulation(flush=True)
# Rows: fewer than a block works on, as many, and a ragged last block. Lengths: every way to deal out a row.
LENGTHS = (8, 16, 128, 136, 1000, 1032, 4096, 12288, 40000, 70000, 140000)
CLUSTERS = 2  # of blocks that stay
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_length = pytest.mark.parametrize("length", LENGTHS)


def data(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * 3).astype(DTYPES[dtype])


def run(
    code: str, plan: Any, arrays: list[np.ndarray], shape: tuple[int, ...], dtype: str, blocks: int = 0
) -> np.ndarray:
    blocks, floats = blocks or softmax.clusters(plan, len(arrays[0])), softmax.floats(plan)
    return on_arrays(Rows, code, arrays, [(shape, DTYPES[dtype])], plan.block, blocks, plan.cluster, floats=floats)[0]


def assert_right(out: np.ndarray, golden: np.ndarray, error: Any) -> None:
    found = tolerance.compare(out, golden, error)
    assert found.passed, found.message


def counts(length: int) -> tuple[int, ...]:
    return (1, 13, 32) if length < 1000 else (2,)


@pytest.mark.parametrize("algorithm", ["accurate", "fast", "log", "logsumexp"])
@each_dtype
@each_length
def test_forward(length: int, dtype: str, algorithm: str):
    for rows in counts(length):
        x = data((rows, length), dtype)
        plan = softmax.plan(length, dtype, dtype, 1, algorithm)
        code = softmax.forward_code(plan, rows, algorithm)
        wide = x.astype(np.float64)
        if algorithm == "logsumexp":
            out = run(code, plan, [x], (rows,), dtype)
            golden = reference.logsumexp(x, out_dtype=np.float64)
            assert_right(out, golden, bounds.logsumexp(wide, (1,), RULE)[:, 0])
        else:
            out = run(code, plan, [x], x.shape, dtype)
            golden = reference.softmax(x, algorithm=algorithm, out_dtype=np.float64)
            assert_right(out, golden, bounds.softmax(wide, algorithm, (1,), RULE))


def streamed(
    length: int, dtype: str, out_dtype: str, block: int, cluster: int, places: int, pieces: int = 1
) -> RowPlan:
    part = -(-(length * SIZES[dtype] // 16) // (block * cluster // 32))
    vectors = -(-part // (32 * pieces))
    plan = RowPlan(length, dtype, out_dtype, block * cluster, vectors, block, cluster, stages=places)
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
        wide = x.astype(np.float64)
        if algorithm == "logsumexp":
            out = run(code, plan, [x], (rows,), dtype, blocks)
            golden = reference.logsumexp(x, out_dtype=np.float64)
            assert_right(out, golden, bounds.logsumexp(wide, (1,), RULE)[:, 0])
        else:
            out = run(code, plan, [x], x.shape, dtype, blocks)
            golden = reference.softmax(x, algorithm=algorithm, out_dtype=np.float64)
            assert_right(out, golden, bounds.softmax(wide, algorithm, (1,), RULE))


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
        golden = reference.logsumexp(x, out_dtype=np.float64)
        assert_right(out, golden, bounds.logsumexp(x.astype(np.float64), (1,), RULE)[:, 0])


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
    plan = RowPlan(length, "bf16", "bf16", 512, vectors, 512, stages=places)
    with pytest.raises(ValueError, match="a plan that leaves a warp"):
        stream_ptx.forward(plan, 2, 1, "accurate")


@pytest.mark.parametrize("algorithm", ["accurate", "log", "logsumexp"])
@each_dtype
def test_every_plan_can_be_followed(dtype: str, algorithm: str):
    lengths = {*range(8192, 300_000, 4096), *(8 * int(n) for n in np.random.default_rng(3).integers(1000, 40_000, 60))}
    plans = [softmax.plan(length, dtype, dtype, 1, algorithm) for length in sorted(lengths)]
    streams = [plan for plan in plans if plan.stages]
    assert 0 < len(streams) < len(plans)
    for plan in streams:
        stream_ptx.check(plan, algorithm)
        assert stream_ptx.shared_bytes(plan) <= softmax.ROOM[plan.block]


@pytest.mark.parametrize(("dtype", "out_dtype"), [("bf16", "f32"), ("f32", "bf16"), ("f16", "bf16")])
def test_results_narrower_or_wider_than_elements(dtype: str, out_dtype: str):
    """Only results as wide as the elements take the elements' place in shared memory."""
    x = data((7, 9000), dtype)
    plan = streamed(9000, dtype, out_dtype, 256, 2, 3)
    out = run(stream_ptx.forward(plan, 7, CLUSTERS, "accurate"), plan, [x], x.shape, out_dtype, CLUSTERS)
    golden = reference.softmax(x, out_dtype=np.float64)
    assert_right(out, golden, bounds.softmax(x.astype(np.float64), "accurate", (1,), RULE))


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
    for rows in counts(length):
        dy = data((rows, length), dtype, seed=1)
        y = reference.softmax(data((rows, length), dtype), algorithm=algorithm)
        plan = softmax.plan(length, dtype, dtype, 2)
        out = run(dgrad_ptx.backward(plan, rows, algorithm, False), plan, [dy, y], dy.shape, dtype)
        golden = reference.softmax_dgrad(dy, y, algorithm=algorithm, out_dtype=np.float64)
        wide = dy.astype(np.float64), y.astype(np.float64)
        assert_right(out, golden, bounds.softmax_dgrad(*wide, algorithm, (1,), RULE))


@each_dtype
@pytest.mark.parametrize("length", [128, 40000, 70000])
def test_tangent_of_the_logarithm(length: int, dtype: str):
    v, y = data((2, length), dtype, seed=1), reference.softmax(data((2, length), dtype), algorithm="log")
    plan = softmax.plan(length, dtype, "f32", 2)
    out = run(dgrad_ptx.backward(plan, 2, "log", True), plan, [v, y], v.shape, "f32")
    wide, p = v.astype(np.float64), np.exp(y.astype(np.float64))
    golden = wide - (p * wide).sum(1, keepdims=True)
    # The products' exponentials and products, and the sum in any order.
    rate = (length + 10 + 3 * np.abs(y.astype(np.float64))) * 2.0**-24
    error = (rate * p * np.abs(wide)).sum(1, keepdims=True) * 1.01 + 2.0**-24 * np.abs(golden)
    assert_right(out, golden, error)


@each_dtype
@pytest.mark.parametrize("length", [8, 1000, 40000, 70000])
@pytest.mark.parametrize("algorithm", ["accurate", "fast", "log", "logsumexp"])
def test_what_is_not_finite(length: int, dtype: str, algorithm: str):
    x = data((7, length), dtype)
    x[0] = -np.inf
    x[1, 3] = -np.inf
    x[2, length // 2] = np.inf
    x[3, length - 1] = np.nan
    x[4] = ml_dtypes.finfo(DTYPES[dtype]).min  # what some programs mask with
    x[5, 0], x[5, 1] = np.inf, -np.inf
    x[6, 1:] = -np.inf
    plan = softmax.plan(length, dtype, dtype, 1, algorithm)
    code = softmax.forward_code(plan, len(x), algorithm)
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        if algorithm == "logsumexp":
            out = run(code, plan, [x], (len(x),), dtype)
            golden = reference.logsumexp(x, out_dtype=np.float64)
            error = bounds.logsumexp(wide, (1,), RULE)[:, 0]
        else:
            out = run(code, plan, [x], x.shape, dtype)
            golden = reference.softmax(x, algorithm=algorithm, out_dtype=np.float64)
            error = bounds.softmax(wide, algorithm, (1,), RULE)
    assert_right(out, golden, error)


@each_dtype
@pytest.mark.parametrize("length", LENGTHS[:-1])
def test_bits_depend_on_the_row_alone(length: int, dtype: str):
    x = data((9, length), dtype)
    plan = softmax.plan(length, dtype, dtype, 1)
    whole = run(softmax.forward_code(plan, 9, "accurate"), plan, [x], x.shape, dtype)
    alone = run(softmax.forward_code(plan, 1, "accurate"), plan, [x[4:5]], (1, length), dtype)
    np.testing.assert_array_equal(whole[4:5].view(np.uint8), alone.view(np.uint8))


@each_dtype
@pytest.mark.parametrize("length", [8, 128, 1000, 4096, 32768, 131072, 200000])
def test_lowers_for_cuda(length: int, dtype: str):
    x = jax.ShapeDtypeStruct((64, length), DTYPES[dtype])

    def both(x: Any) -> Any:
        y = softmax.softmax(x, algorithm="accurate", out_dtype=x.dtype)
        back = softmax.softmax_dgrad(x, y, algorithm="accurate", tangent=False, out_dtype=jnp.float32)
        return back, softmax.softmax(x, algorithm="logsumexp", out_dtype=jnp.float32)

    lowered = jax.jit(both).trace(x).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 3


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


def test_engine_is_first_but_for_few_bytes():
    (kernel,) = (e for e in engines.registered("softmax") if e.name == "hopper")

    def first(rows: int, length: int, algorithm: str = "accurate", dtype: Any = jnp.bfloat16) -> bool:
        spec = SoftmaxSpec((-1,), np.dtype(np.float32), np.dtype(dtype), algorithm)
        call = engines.Call("softmax", spec, (shape_of(rows, length, dtype=dtype),), "cuda", hopper.MEASURED_ON[0])
        return selection.why_later(kernel, call) is None

    assert all(first(1 << 24 - i, 1 << i, algorithm) for i in (7, 10, 13, 17) for algorithm in ("accurate", "log"))
    assert all((first(100, 4096, "fast"), first(50, 4096, dtype=jnp.float32)))
    assert not any((first(20, 4096), first(64, 1000, "log")))


def test_call_by_name_lowers_with_its_derivatives():
    def both(x: Any) -> Any:
        f = lambda x: (
            jnp.sum(dnn.softmax(x, axis=(1, 2), engine="hopper") ** 2) + jnp.sum(dnn.logsumexp(x, engine="hopper"))
        )
        return jax.grad(f)(x), jax.vmap(lambda x: dnn.softmax(x, algorithm="log", engine="hopper"))(x)

    lowered = jax.jit(both).trace(shape_of(6, 4, 32)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 3
