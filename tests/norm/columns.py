"""What the kernels of batch normalisation's sums find on the CPU.

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
from jaxdnn._src.norm.hopper import batch_kernels, batch_walk
from jaxdnn._src.norm.hopper.batch_walk import ColumnPlan
from tests.hopper.lane_machine import on_cpu

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def pairs_of(x: Any, plan: ColumnPlan, **machine: Any) -> tuple[jax.Array, jax.Array]:
    """The base, and the splits' δ and M."""
    with on_cpu(batch_kernels, batch_walk, **machine):
        return batch_kernels.statistics(jnp.asarray(x), plan)


def merged(base: Any, pairs: Any, scale: Any, plan: ColumnPlan, eps: float = 1e-5, **machine: Any) -> list[jax.Array]:
    """The statistics."""
    with on_cpu(batch_kernels, **machine):
        return batch_kernels.merge(base, pairs, None if scale is None else jnp.asarray(scale), plan, eps=eps)


def statistics(x: Any, plan: ColumnPlan, eps: float = 1e-5, scale: Any = None) -> norm_batch.Statistics:
    """What both kernels find."""
    base, pairs = pairs_of(x, plan)
    np.testing.assert_array_equal(base[: x.shape[1]], np.asarray(x)[0].astype(np.float32))
    mean, rstd, variance, rest, *factor = map(np.asarray, merged(base, pairs, scale, plan, eps))
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
    **machine: Any,
) -> jax.Array:
    """Those of the splits, added up."""
    dy, x, mean, rstd = (jnp.asarray(v) for v in (dy, x, mean, rstd))
    rows, columns = x.shape
    plan = config or norm_batch.backward_plan(rows, columns, NAMES[np.dtype(x.dtype)], activation)
    assert plan is not None
    with on_cpu(batch_kernels, batch_walk, **machine):
        name = None if activation is None else activation[0]
        parts = batch_kernels.sums(dy, x, mean, rstd, plan, name, [jnp.asarray(v) for v in affine])
        return batch_kernels.totals(parts, plan.fold)


def activated(
    x: Any,
    mean: Any,
    rstd: Any,
    activation: Any,
    affine: Any,
    out_dtype: Any,
    config: ColumnPlan | None = None,
) -> jax.Array:
    """y, by the kernel of the pass behind the statistics."""
    x, mean, rstd, *affine = (jnp.asarray(v) for v in (x, mean, rstd, *affine))
    rows, columns = x.shape
    plan = config or norm_batch.apply_plan(rows, columns, NAMES[np.dtype(x.dtype)], 1)
    assert plan is not None
    with on_cpu(batch_kernels, batch_walk):
        return batch_kernels.activated(x, mean, rstd, plan, activation[0], affine, out_dtype)


def gradients(
    dy: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    totals: Any,
    activation: Any,
    affine: Any,
    out_dtype: Any,
    config: ColumnPlan | None = None,
) -> jax.Array:
    """dx, by the kernel of the pass behind the sums."""
    dy, x, mean, rstd, totals, *affine = (jnp.asarray(v) for v in (dy, x, mean, rstd, totals, *affine))
    rows, columns = x.shape
    plan = config or norm_batch.apply_plan(rows, columns, NAMES[np.dtype(x.dtype)], 2)
    assert plan is not None
    with on_cpu(batch_kernels, batch_walk):
        return batch_kernels.gradients(dy, x, mean, rstd, totals, plan, activation[0], affine, out_dtype)
