"""Softmax, its backward pass and logsumexp on Hopper of rows that do not fit into a block's registers. PTX text.

Schedule. Rows are contiguous in memory. Forward, blocks are persistent, up to eight in a cluster share a row, and rows
are loaded and stored through shared memory (`stream_ptx`). Backward, the blocks of a cluster hold a row in registers:
a thread loads its 16-byte vectors, all before the first use, so that the row is read once. Sums are combined by
exchanges between lanes, then through shared memory between warps, then through that of the cluster between blocks. A
row that does not fit into a cluster is read twice. `ptx` emits the instructions and states the order of additions,
which depends on the row's length and dtype. The limits are those of `rows`.
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


def plan(length: int, dtype: str, out_dtype: str, which: str) -> RowPlan:
    """How rows of a length are partitioned over threads, for an algorithm or "dgrad"."""
    vectors = length * SIZES[dtype] // VECTOR_BYTES
    if which != "dgrad" and vectors * VECTOR_BYTES <= (2 if which == "logsumexp" else CLUSTER) * SLICE:
        return _streamed(length, dtype, out_dtype, reduced=which == "logsumexp")
    if which == "dgrad" and vectors <= CLUSTER * 256 * VECTORS:
        cluster = CLUSTER // 2 if vectors <= CLUSTER // 2 * 256 * VECTORS else CLUSTER
        return RowPlan(length, dtype, out_dtype, -(-vectors // (cluster * 256)), 256, cluster)
    # Read twice, the second time from the cache as far as possible.
    if which != "dgrad" and length <= 1 << 17:  # a block's row at a time is then small enough
        return RowPlan(length, dtype, out_dtype, VECTORS, 1024)
    return RowPlan(length, dtype, out_dtype, 2, 512, CLUSTER)


def _streamed(length: int, dtype: str, out_dtype: str, *, reduced: bool) -> RowPlan:
    """Persistent blocks: the smallest cluster that holds a row, with as many slots for rows as fit."""
    block, cluster = THREADS // 2 if reduced else THREADS, 1
    while not reduced and cluster * SLICE < length * SIZES[dtype]:
        cluster *= 2
    plan = RowPlan(length, dtype, out_dtype, VECTORS, block, cluster, stages=2)
    part = stream_ptx.part_vectors(plan)
    pieces = -(-part // (32 * VECTORS)) if reduced else 1
    plan = dataclasses.replace(plan, vectors=-(-part // (32 * pieces)))
    places = (dataclasses.replace(plan, stages=count) for count in range(2, 9))
    return [each for each in places if stream_ptx.shared_bytes(each) <= ROOM[block]][-1]


def softmax(x: Array, /, *, algorithm: str, out_dtype: Any) -> Array:
    """Softmax or its logarithm of x (rows, length), or with algorithm "logsumexp" that: (rows,)."""
    chosen = plan(x.shape[1], NAMES[np.dtype(x.dtype)], NAMES[np.dtype(out_dtype)], algorithm)
    out = jax.ShapeDtypeStruct(x.shape[:1] if algorithm == "logsumexp" else x.shape, out_dtype)
    return _launch(forward_code(chosen, len(x), algorithm), chosen, [x], out, algorithm)


def softmax_dgrad(dy: Array, y: Array, /, *, algorithm: str, tangent: bool, out_dtype: Any) -> Array:
    """The backward pass for dy and y (rows, length), or with `tangent` the derivative along dy."""
    chosen = plan(dy.shape[1], NAMES[np.dtype(dy.dtype)], NAMES[np.dtype(out_dtype)], "dgrad")
    code = dgrad_ptx.backward(chosen, algorithm, tangent)
    return _launch(code, chosen, [dy, y], jax.ShapeDtypeStruct(dy.shape, out_dtype), "dgrad")


def forward_code(plan: RowPlan, rows: int, algorithm: str) -> str:
    """The kernel's PTX, for the clusters that `clusters` says."""
    if plan.stages:
        return stream_ptx.forward(plan, rows, clusters(plan, rows), algorithm)
    return ptx.forward(plan, algorithm)


def clusters(plan: RowPlan, rows: int) -> int:
    """The number of blocks or clusters: as many as the rows need, or, if persistent, as many as run at a time."""
    at_a_time = CLUSTERS_AT_ONCE[plan.cluster] * (THREADS // plan.block)
    return min(rows, at_a_time) if plan.stages else rows


def floats(plan: RowPlan) -> int:
    """Floats of a block's shared memory."""
    return stream_ptx.shared_bytes(plan) // 4 if plan.stages else SHARED_FLOATS


def _launch(code: str, plan: RowPlan, arrays: list[Array], out: jax.ShapeDtypeStruct, which: str) -> Array:
    branches.record(
        "softmax of long rows",
        operands=plan.dtype,
        pass_=which,
        row_shared_by="block" if plan.cluster == 1 else f"cluster of {plan.cluster}",
        read="streamed" if plan.stages else "once" if plan.rounds == 1 else "twice",
        stages=plan.stages,
    )
    blocks = clusters(plan, len(arrays[0]))
    shape: dict[str, Any] = {"blocks": blocks, "threads": plan.block, "cluster": plan.cluster, "floats": floats(plan)}
    return launch(code, arrays, [out], name=f"softmax_{which}", **shape)[0]
