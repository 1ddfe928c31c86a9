"""Softmax, its backward pass and logsumexp on Hopper: rows in registers (Pallas, Mosaic GPU).

Schedule. Rows lie one after the other in memory. Up to a warp of threads shares a short row; a long one is shared by a
block of 128 to 512 threads, and a longer one by the blocks of a cluster, up to eight. A thread loads its 16-byte
vectors straight into registers, all before the first use, so the row is read once; maximum and sum go by exchange
between lanes, then through shared memory between warps, then through the cluster's between blocks. Blocks are many and
small: while some wait for memory, others compute. Forward, for long rows (`_streamed_bytes`), blocks stay, and rows
come and go through shared memory (`stream_ptx`). A row too long for a cluster's registers is read twice.
`ptx` writes the instructions and states the order of additions, which follows from the row's length and dtype.

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

VECTORS = 4  # of an operand that a thread holds at most: more registers would mean fewer blocks at a time
CLUSTER = 8  # blocks at most, on any device
# Where blocks stay: how many threads of them a multiprocessor has, the bytes of a row that these hold at most (eight
# vectors a thread), and the shared memory of a block, beside which Pallas and the device take a KB each.
THREADS = 512
SLICE = 64 << 10
ROOM = {512: 226 << 10, 256: 112 << 10}
SHARED_FLOATS = 2 * (32 + 8)  # two exchanges between up to 32 warps and 8 blocks


def plan(length: int, dtype: str, out_dtype: str, operands: int, algorithm: str = "") -> RowPlan:
    """How rows of a length are dealt out to threads, forward with the algorithm."""
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
    """Of rows for which blocks stay: longer than the first, up to the second (`benchmarks/notes-softmax.md`)."""
    if algorithm == "logsumexp":
        return SLICE // 2, 2 * SLICE
    return SLICE // (4 if algorithm == "log" and size == 2 else 2), CLUSTER * SLICE


def _streamed(length: int, dtype: str, out_dtype: str, algorithm: str) -> RowPlan:
    """Blocks that stay, as few to a cluster as can hold a row, with as many places for rows as fit."""
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
    """Blocks, or clusters of them: as many as the rows need, or of those that stay as many as there are at a time."""
    at_a_time = CLUSTERS_AT_ONCE[plan.cluster] * (THREADS // plan.block)
    return min(rows, at_a_time) if plan.stages else -(-rows // plan.rows_a_block)


def floats(plan: RowPlan) -> int:
    """Of a block's shared memory."""
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
