"""Bias, activation, dropout and residual on Hopper: one pass over memory, 16 bytes a thread. PTX text.

Schedule. Blocks of 128 threads process neighbouring groups of elements, one group a thread, and end: while some wait
for memory, others draw random numbers (`flat`). An activation from a table takes so long that persistent blocks, which
copy the next groups into shared memory meanwhile, are faster (`stream`). With a gradient of the bias the blocks are
persistent as well: each processes 32 groups of columns and eight rows at a time, going down the rows, and stores its
sums, which XLA adds (`walk`). Channels first, a thread processes a vector of each of four planes (`planes`). `ptx` and
`group_ptx` emit the instructions.

Limits. The elements are in memory in the order in which they are counted, or the channels directly follow the batch.
Their number, and that of a row of the bias or of a plane, is a multiple of the elements in 16 bytes. The count starts
at the first element of a counter. bfloat16, float16 and float32.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn._src.dropout.hopper import ptx
from jaxdnn._src.dropout.hopper.group_ptx import Plan
from jaxdnn._src.dropout.hopper.ptx import ColumnsPlan
from jaxdnn._src.hopper import MULTIPROCESSORS, branches
from jaxdnn._src.hopper.launch import launch

PERSISTENT = 4 * MULTIPROCESSORS  # blocks of 256 threads


def run(plan: Plan, operands: Sequence[Array], shape: tuple[int, ...], dtype: Any) -> Array:
    """y or dx; the operands are those that the plan names."""
    plan, code, blocks, floats = _program(plan)
    _record("planes" if plan.plane else "stream" if floats else "flat", plan)
    out = jax.ShapeDtypeStruct(shape, dtype)
    name = "dropout_dgrad" if plan.backward else "dropout"
    return launch(code, operands, [out], name=name, blocks=blocks, threads=plan.threads, floats=floats)[0]


def _program(plan: Plan) -> tuple[Plan, str, int, int]:
    """The kernel that was fastest on an H200 (`benchmarks/notes-activation.md`), its blocks and their shared memory."""
    if plan.leads == 1 and not plan.plane and plan.activation == "table" and plan.narrow:
        plan = dataclasses.replace(plan, threads=256, stages=2)
        if plan.groups >= 4 * PERSISTENT * plan.threads:
            return plan, ptx.stream(plan, PERSISTENT), PERSISTENT, plan.stages * plan.stage_bytes // 4
    plan = dataclasses.replace(plan, threads=128)
    if plan.plane:
        return plan, ptx.planes(plan), -(-plan.groups // (4 * plan.threads)), 0
    return plan, ptx.flat(plan), plan.leads * plan.blocks_a_lead, 0


def columns(plan: Plan) -> tuple[Plan, ColumnsPlan]:
    """How rows and columns are partitioned if the bias has a gradient; the shape alone decides it."""
    looked_up = plan.activation == "table"
    plan = dataclasses.replace(plan, threads=256, stages=2 if looked_up else 3)
    return plan, ptx.columns_plan(plan, (3 if looked_up else 4) * MULTIPROCESSORS)


def column_floats(plan: Plan) -> int:
    """Floats of a block's shared memory."""
    return max(plan.threads * plan.elements, plan.stages * plan.stage_bytes // 4)


def run_columns(plan: Plan, operands: Sequence[Array], shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array]:
    """dx, and its sums over rows in float32, (width,)."""
    plan, partition = columns(plan)
    _record("walk", plan)
    outs = [
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct((partition.splits, plan.width), jnp.float32),
    ]
    dx, sums = launch(
        ptx.walk(plan, partition),
        operands,
        outs,
        name="dropout_dgrad_columns",
        blocks=partition.tiles * partition.splits,
        threads=plan.threads,
        floats=column_floats(plan),
    )
    return dx, jnp.sum(sums, 0)


def _record(kernel: str, plan: Plan) -> None:
    formula = "none" if plan.activation == "identity" else "formula"
    branches.record(
        "dropout",
        operands=plan.dtypes.get("x", plan.result),
        kernel=kernel,
        pass_="backward" if plan.backward else "forward",
        activation="table" if plan.activation == "table" else formula,
        bias=bool(plan.width),
        residual="residual" in plan.dtypes,
    )
