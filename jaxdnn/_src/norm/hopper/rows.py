"""Layer and RMS normalisation of rows on Hopper: rows in registers. PTX text.

Schedule. Rows are contiguous in memory. Forward, a group of 32 to 1024 threads loads the 16-byte vectors of a row into
registers, all before the first use, and computes mean and centred second moment from them: x is read once. There are
many small blocks: while some wait for memory, others compute. For long rows, and backward, one persistent block on each
multiprocessor processes many rows, because scale and bias, or their gradients, stay in its registers or shared memory;
it loads the next row while it computes one. Backward, the blocks store their sums, which XLA adds. `rows_ptx` and
`rows_dgrad_ptx` emit the instructions and state their order.

Limits. The statistics' axes are the last ones, and scale and bias vary along these only; a row's bytes are a multiple
of 16, and fit into a block's registers; bfloat16, float16 or float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.hopper import MULTIPROCESSORS, branches
from jaxdnn._src.hopper.launch import launch
from jaxdnn._src.hopper.ptx import NAMES, SIZES, VECTOR_BYTES
from jaxdnn._src.norm.hopper import rows_dgrad_ptx, rows_ptx
from jaxdnn._src.norm.hopper.rows_ptx import RowPlan


def forward_plan(length: int, dtype: str, out_dtype: str, rows: int = 1 << 30) -> RowPlan | None:
    """How rows of a length are partitioned over threads; None if they do not fit.

    A thread has sixteen elements of a row, of four rows at a time if there are many rows; with 32-bit elements a block
    has 256 threads. This was fastest on an H200 (`benchmarks/notes-hopper-norm.md`). Rows of more than 4096 16-bit
    elements need too many registers for two blocks at a time, so one persistent block runs; beyond 8192 elements it has
    no registers left for scale and bias. Threads and vectors, and so the order of additions, depend on length alone.
    """
    vectors = length * SIZES[dtype] // VECTOR_BYTES
    if SIZES[dtype] == 2 and 512 < vectors <= 2048:
        threads, shared = (512, False) if vectors <= 1024 else (1024, True)
        at_once = 2 if not shared and rows >= 4 * MULTIPROCESSORS else 1
        each = -(-vectors // threads)
        return RowPlan(length, dtype, out_dtype, threads, each, 1, at_once, stays=True, shared=shared)
    most = 2 if SIZES[dtype] == 2 else 4
    threads = next((t for t in (32, 64, 128, 256, 512) if vectors <= most * t), 512)
    each = -(-vectors // threads)
    at_once = 4 if each <= 2 and SIZES[dtype] == 2 and rows >= 16 * MULTIPROCESSORS else 1
    block = 128 if SIZES[dtype] == 2 else 256
    return RowPlan(length, dtype, out_dtype, threads, each, max(1, block // threads), at_once) if each <= 8 else None


def backward_plan(length: int, dtype: str, out_dtype: str) -> RowPlan | None:
    """As `forward_plan`; a thread has at most 16 elements, because it keeps sums too, and blocks are large."""
    vectors = length * SIZES[dtype] // VECTOR_BYTES
    most = 2 if SIZES[dtype] == 2 else 4
    threads = next((t for t in (32, 64, 128, 256, 512) if vectors <= most * t), None)
    if threads is None:
        return None
    each = -(-vectors // threads)
    groups = (1024 if each * 2 <= most else 512) // threads
    return RowPlan(length, dtype, out_dtype, threads, each, groups, keeps=threads <= (64 if most == 2 else 32))


def forward_blocks(plan: RowPlan, rows: int) -> int:
    blocks = -(-rows // plan.rows_a_block)
    return min(MULTIPROCESSORS, blocks) if plan.stays else blocks


def forward(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    *,
    centred: bool,
    eps: float,
    out_dtype: Any,
    config: RowPlan | None = None,
) -> Any:
    """y, mean, rstd and variance of x (rows, length)."""
    rows, length = x.shape
    plan = config or forward_plan(length, NAMES[np.dtype(x.dtype)], NAMES[np.dtype(out_dtype)], rows)
    if plan is None:
        raise ValueError(f"`x` must have rows that fit into registers, got {length} elements.")
    _record("forward", plan)
    given = [v for v in (scale, bias) if v is not None]
    blocks = forward_blocks(plan, rows)
    options: dict[str, Any] = {"centred": centred, "eps": eps}
    code = rows_ptx.forward(plan, rows, blocks, scale=scale is not None, bias=bias is not None, **options)
    statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    outs = (jax.ShapeDtypeStruct(x.shape, out_dtype), statistic, statistic, statistic)
    floats = forward_floats(plan, len(given))
    return launch(code, [x, *given], outs, name="norm", blocks=blocks, threads=plan.block, floats=floats)


def forward_floats(plan: RowPlan, parameters: int) -> int:
    """Floats of a block's shared memory, forward."""
    floats = 3 * plan.slots(plan.rows) * (2 if plan.stays else 1)  # exchanges, doubled for rows one after another
    return max(floats + (plan.length * parameters if plan.shared else 0), 32)


def backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    scale: Array | None,
    *,
    centred: bool,
    out_dtype: Any,
    config: RowPlan | None = None,
) -> tuple[Array, Array, Array]:
    """dx, dscale and dbias of dy and x (rows, length), mean and rstd (rows,)."""
    rows, length = x.shape
    plan = config or backward_plan(length, NAMES[np.dtype(x.dtype)], NAMES[np.dtype(out_dtype)])
    if plan is None:
        raise ValueError(f"`x` must have rows that fit into registers, got {length} elements.")
    _record("backward", plan)
    blocks = min(MULTIPROCESSORS, -(-rows // plan.groups))
    code = rows_dgrad_ptx.backward(plan, rows, blocks, centred=centred, scale=scale is not None)
    outs = (jax.ShapeDtypeStruct(x.shape, out_dtype), jax.ShapeDtypeStruct((blocks, 2, length), jnp.float32))
    floats = backward_floats(plan)
    given = [dy, x, mean, rstd] + ([] if scale is None else [scale])
    dx, sums = launch(code, given, outs, name="norm_dgrad", blocks=blocks, threads=plan.block, floats=floats)
    dscale, dbias = jnp.sum(sums, 0)
    return dx, dscale, dbias


def backward_floats(plan: RowPlan) -> int:
    """Floats of a block's shared memory, backward."""
    return max(2 * plan.slots(3) + (2 * plan.length * plan.groups if plan.groups > 1 else 0), 32)


def _record(which: str, plan: RowPlan) -> None:
    decided: dict[str, Any] = {"stays": plan.stays, "keeps": plan.keeps, "shared": plan.shared}
    threads = {"threads": plan.threads, "rows_at_once": plan.rows}
    branches.record("norm rows", operands=plan.dtype, pass_=which, **threads, **decided)
