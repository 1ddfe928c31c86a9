"""The machine for the kernels of batch normalisation, and what the kernels find when it runs them.

It imports the kernels, so who imports it asks first whether they can be had.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.norm.hopper import batch as norm_batch
from jaxdnn._src.norm.hopper import batch_ptx
from jaxdnn._src.norm.hopper.batch_ptx import LANES
from jaxdnn._src.norm.hopper.batch_walk import ColumnPlan
from tests.hopper.norm_machine import NormRows
from tests.hopper.row_machine import U32, U64, on_arrays

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


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
                words[active] = self.memory[self._global(arguments[1], 2, active)[active]].view(np.uint16)[:, 0]
                put(words.astype(U64))
            case _:
                super()._step(name, arguments, active)


def run(
    code: str, floats: int, block: int, blocks: int, arrays: list[np.ndarray], outs: list[tuple[int, ...]]
) -> list[np.ndarray]:
    return on_arrays(Columns, code, arrays, [(shape, np.float32) for shape in outs], block, blocks, floats=floats)


MERGE_FLOATS = norm_batch.MERGE_THREADS + LANES


def walked_floats(plan: ColumnPlan, backward: bool = False) -> int:
    """Of a block that goes down the columns."""
    values = batch_ptx.sums_of(plan) * plan.elements if backward else batch_ptx.values_of(plan)
    return max(plan.floats(values), 32)


def statistics(
    x: np.ndarray, plan: ColumnPlan, eps: float = 1e-5, scale: np.ndarray | None = None
) -> norm_batch.Statistics:
    """What both kernels find."""
    columns = x.shape[1]
    shapes: list[tuple[int, ...]] = [(plan.columns,), (plan.splits, 2, plan.columns)]
    base, sums = run(batch_ptx.statistics(plan), walked_floats(plan), plan.threads, plan.blocks, [x], shapes)
    threads, batch = norm_batch.MERGE_THREADS, norm_batch.MERGE_BATCH
    code = batch_ptx.merge(plan, threads, batch, eps=eps, scale=scale is not None)
    given = [base, sums, *([] if scale is None else [scale])]
    count = 4 if scale is None else 5
    mean, rstd, variance, rest, *factor = run(
        code, MERGE_FLOATS, threads, -(-columns // LANES), given, [(columns,)] * count
    )
    np.testing.assert_array_equal(base[:columns], x[0].astype(np.float32))
    found: list[Any] = [mean, rstd, variance, rest, factor[0] if factor else rstd]
    return norm_batch.Statistics(*found)


def plan_of(rows: int, columns: int, dtype: str, **other: int) -> ColumnPlan:
    """The plan of a call, or a changed one."""
    found = norm_batch.forward_plan(rows, columns, dtype)
    assert found is not None
    found = dataclasses.replace(found, **other)
    return dataclasses.replace(found, splits=max(1, min(found.splits, found.full)))


def sums(
    dy: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    activation: Any = None,
    affine: Any = (),
    config: ColumnPlan | None = None,
) -> jax.Array:
    """Those of the kernel's splits, added up as the engine does."""
    dy, x, mean, rstd = (np.asarray(v) for v in (dy, x, mean, rstd))
    rows, columns = x.shape
    plan = config or norm_batch.backward_plan(rows, columns, NAMES[x.dtype], activation)
    assert plan is not None
    count = batch_ptx.sums_of(plan)
    shape = (plan.splits, count, plan.columns)
    code = batch_ptx.sums(plan, None if activation is None else activation[0])
    given = [dy, x, mean, rstd, *map(np.asarray, affine)]
    (parts,) = run(code, walked_floats(plan, True), plan.threads, plan.blocks, given, [shape])
    return jnp.asarray(parts).reshape(plan.splits, count, plan.fold, x.shape[1]).sum((0, 2))
