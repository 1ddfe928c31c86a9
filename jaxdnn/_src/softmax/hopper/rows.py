"""Softmax, its backward pass and logsumexp on Hopper: rows in registers. PTX text.

Schedule. Rows are contiguous in memory. At most a warp of threads shares a short row, a block of 128 to 512 threads a
long row, and the blocks of a cluster, up to eight, a longer one. A thread loads its 16-byte vectors into registers, all
before the first use, so that the row is read once. Maximum and sum are combined by exchanges between lanes, then
through shared memory between warps, then through that of the cluster between blocks. There are many small blocks: while
some wait for memory, others compute. Forward, for long rows (`_streamed_bytes`), blocks are persistent, and rows are
loaded and stored through shared memory (`stream_ptx`). A row that does not fit into a cluster's registers is read
twice. `ptx` emits the instructions and states the order of additions, which depends on the row's length and dtype.

Limits. The row's bytes are a multiple of 16; bfloat16, float16 or float32; the reduced axes are the last ones.
Exponentials are 2^x by the special function unit, whose results below 2^-126 are zero.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxdnn._src.hopper import CLUSTERS_AT_ONCE, branches
from jaxdnn._src.hopper.launch import launch
from jaxdnn._src.hopper.ptx import NAMES, SIZES, VECTOR_BYTES
from jaxdnn._src.softmax.hopper import dgrad_ptx, ptx, stream_ptx
from jaxdnn._src.softmax.hopper.ptx import RowPlan

VECTORS = 4  # the most vectors of an operand for a thread: more registers would mean fewer blocks at a time
CLUSTER = 8  # the most blocks of a cluster
# Persistent blocks: their threads on a multiprocessor, the most bytes of a row in these threads' registers (eight
# vectors a thread), and the shared memory of a block, without a KB each that Pallas and the device use.
THREADS = 512
SLICE = 64 << 10
ROOM = {512: 226 << 10, 256: 112 << 10}
SHARED_FLOATS = 2 * (32 + 8)  # two exchanges between up to 32 warps and 8 blocks


def plan(length: int, dtype: str, out_dtype: str, operands: int, algorithm: str = "") -> RowPlan:
    """How rows of a length are partitioned over threads; forward for the algorithm."""
    vectors = length * SIZES[dtype] // VECTOR_BYTES
    low, high = _streamed_bytes(algorithm, SIZES[dtype])
    if operands == 1 and low < vectors * VECTOR_BYTES <= high:
        return _streamed(length, dtype, out_dtype, algorithm)
    if vectors <= 32 * VECTORS // operands:
        threads = min(32, 1 << (vectors - 1).bit_length())
        return RowPlan(length, dtype, out_dtype, threads, -(-vectors // threads), 128)
    block = 128
    while block < 256 and block * VECTORS < vectors:
        block *= 2
    cluster = 1
    if operands == 1 and 256 * VECTORS < vectors <= 512 * VECTORS:
        block = 512
    while cluster < CLUSTER and cluster * block * VECTORS < vectors:
        cluster *= 2
    threads = cluster * block
    if threads * VECTORS < vectors:  # read twice, the second time from the cache as far as possible
        if operands == 1 and length <= 1 << 17:  # a block's row at a time is then small enough
            return RowPlan(length, dtype, out_dtype, 1024, VECTORS, 1024)
        return RowPlan(length, dtype, out_dtype, CLUSTER * 512, 2, 512, CLUSTER)
    return RowPlan(length, dtype, out_dtype, threads, -(-vectors // threads), block, cluster)


def _streamed_bytes(algorithm: str, size: int) -> tuple[int, int]:
    """Persistent blocks serve rows of more bytes than the first, up to the second (benchmarks/notes-softmax.md)."""
    if algorithm == "logsumexp":
        return SLICE // 2, 2 * SLICE
    return SLICE // (4 if algorithm == "log" and size == 2 else 2), CLUSTER * SLICE


def _streamed(length: int, dtype: str, out_dtype: str, algorithm: str) -> RowPlan:
    """Persistent blocks: the smallest cluster that holds a row, with as many slots for rows as fit."""
    row, reduced = length * SIZES[dtype], algorithm == "logsumexp"
    block, cluster = THREADS // 2 if reduced else THREADS, 1
    while not reduced and cluster * SLICE < row:
        cluster *= 2
    plan = RowPlan(length, dtype, out_dtype, cluster * block, VECTORS, block, cluster, stages=2)
    part = stream_ptx.part_vectors(plan)
    pieces = -(-part // (32 * VECTORS)) if reduced else 1
    plan = dataclasses.replace(plan, vectors=-(-part // (32 * pieces)))
    places = (dataclasses.replace(plan, stages=count) for count in range(2, 9))
    return [each for each in places if stream_ptx.shared_bytes(each) <= ROOM[block]][-1]


def softmax(x: Array, /, *, algorithm: str, out_dtype: Any, config: RowPlan | None = None) -> Array:
    """Softmax or its logarithm of x (rows, length), or with algorithm "logsumexp" that: (rows,)."""
    rows, length = x.shape
    chosen = config or plan(length, NAMES[np.dtype(x.dtype)], NAMES[np.dtype(out_dtype)], 1, algorithm)
    out = jax.ShapeDtypeStruct((rows,) if algorithm == "logsumexp" else x.shape, out_dtype)
    return _rows(forward_code(chosen, rows, algorithm), chosen, [x], out, f"softmax_{algorithm}")


def forward_code(plan: RowPlan, rows: int, algorithm: str) -> str:
    """The kernel's PTX, for the clusters that `clusters` says."""
    if plan.stages:
        return stream_ptx.forward(plan, rows, clusters(plan, rows), algorithm)
    return ptx.forward(plan, rows, algorithm)


def clusters(plan: RowPlan, rows: int) -> int:
    """The number of blocks or clusters: as many as the rows need, or, if persistent, as many as run at a time."""
    at_a_time = CLUSTERS_AT_ONCE[plan.cluster] * (THREADS // plan.block)
    return min(rows, at_a_time) if plan.stages else -(-rows // plan.rows_a_block)


def floats(plan: RowPlan) -> int:
    """Floats of a block's shared memory."""
    return stream_ptx.shared_bytes(plan) // 4 if plan.stages else SHARED_FLOATS


def softmax_dgrad(
    dy: Array, y: Array, /, *, algorithm: str, tangent: bool, out_dtype: Any, config: RowPlan | None = None
) -> Array:
    """The backward pass for dy and y (rows, length), or with `tangent` the derivative along dy."""
    rows, length = dy.shape
    chosen = config or plan(length, NAMES[np.dtype(dy.dtype)], NAMES[np.dtype(out_dtype)], 2)
    code = dgrad_ptx.backward(chosen, rows, algorithm, tangent)
    out = jax.ShapeDtypeStruct(dy.shape, out_dtype)
    return _rows(code, chosen, [dy, y], out, "softmax_dgrad")


def _rows(code: str, plan: RowPlan, arrays: list[Array], out: jax.ShapeDtypeStruct, name: str) -> Array:
    of_block = "lanes" if plan.threads < 32 else "warp" if plan.threads == 32 else "block"
    branches.record(
        "softmax",
        operands=plan.dtype,
        pass_="backward" if len(arrays) == 2 else name.removeprefix("softmax_"),
        row_shared_by=of_block if plan.cluster == 1 else f"cluster of {plan.cluster}",
        read="streamed" if plan.stages else "once" if plan.rounds == 1 else "twice",
        stages=plan.stages,
    )
    blocks = clusters(plan, len(arrays[0]))
    shape: dict[str, Any] = {"blocks": blocks, "threads": plan.block, "cluster": plan.cluster, "floats": floats(plan)}
    return launch(code, arrays, [out], name=name, **shape)[0]
