"""Bias, activation, dropout and residual on Hopper: one pass over memory, 16 bytes a thread (Pallas, Mosaic GPU).

Schedule. Forward, and backward without a gradient in the bias, a block of 256 threads takes groups of elements that lie
one after the other, and is gone: while some blocks wait for memory, others draw. With a gradient in the bias, blocks
of 32 groups of columns and eight rows side by side stay, and go down the rows; they leave their sums, which XLA adds.
Rows are dealt out by the shape alone. `dropout_ptx` writes the instructions.

Limits. Elements lie in memory in the order in which they are counted; their number, and a row of the bias, is a
multiple of the elements of 16 bytes; the count starts at a counter's first element; bfloat16, float16 and float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn._kernels.hopper import MULTIPROCESSORS, dropout_ptx
from jaxdnn._kernels.hopper.dropout_ptx import Plan
from jaxdnn._kernels.hopper.launch import launch

BLOCKS = 4 * MULTIPROCESSORS  # that stay


def run(plan: Plan, operands: Sequence[Array], shape: tuple[int, ...], dtype: Any) -> Array:
    """y or dx; the operands are those that the plan names."""
    out = jax.ShapeDtypeStruct(shape, dtype)
    code, blocks = dropout_ptx.flat(plan), plan.leads * plan.blocks_a_lead
    if plan.plane:
        code, blocks = dropout_ptx.planes(plan), -(-plan.groups // (4 * plan.threads))
    name = "dropout_dgrad" if plan.backward else "dropout"
    return launch(code, operands, [out], name=name, blocks=blocks, threads=plan.threads)[0]


def run_stream(plan: Plan, operands: Sequence[Array], shape: tuple[int, ...], dtype: Any, blocks: int) -> Array:
    out = jax.ShapeDtypeStruct(shape, dtype)
    code = dropout_ptx.stream(plan, blocks)
    floats = plan.stages * plan.stage_bytes // 4
    return launch(code, operands, [out], name="dropout", blocks=blocks, threads=plan.threads, floats=floats)[0]


def run_columns(
    plan: Plan, operands: Sequence[Array], shape: tuple[int, ...], dtype: Any, most: int = BLOCKS
) -> tuple[Array, Array]:
    """dx, and its sums over rows in float32, (width,)."""
    columns = dropout_ptx.columns_plan(plan, most)
    outs = [
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct((columns.splits, plan.width), jnp.float32),
    ]
    dx, sums = launch(
        dropout_ptx.walk(plan, columns),
        operands,
        outs,
        name="dropout_dgrad_columns",
        blocks=columns.tiles * columns.splits,
        threads=plan.threads,
        floats=max(plan.threads * plan.elements, plan.stages * plan.stage_bytes // 4),
    )
    return dx, jnp.sum(sums, 0)
