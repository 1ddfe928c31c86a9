"""Batch normalisation's sums on Hopper: over the columns of a matrix, reading it once.

Schedule. x is viewed as a matrix (rows, columns). Two blocks run on every multiprocessor; a thread keeps mean and
second moment of a vector of columns in registers and accumulates its share of the rows, with many copies in flight.
The blocks store their pairs, half a megabyte in all, and a second, small kernel merges them. The backward pass reads
two arrays and accumulates their sums likewise; another small kernel adds the blocks' sums, because XLA's order of
additions depends on the program around them. The normalisation that follows is XLA's, which fuses an addition after it.
With an activation it is a kernel instead: XLA computes each column's factors in kernels of their own first, and its
exponential and division take longer than the memory accesses. `batch_walk` and `batch_kernels` have the kernels and
state the order of additions.

Limits. The statistics' axes are the first ones; bfloat16, float16 or float32. A row's bytes are a multiple of 16, or
those of a few rows together are, whose number divides that of the rows (3 channels of 16 bits: 8 pixels).
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import Array

from jaxdnn._src.hopper import MULTIPROCESSORS, branches
from jaxdnn._src.hopper.launch import once
from jaxdnn._src.hopper.ptx import NAMES, SIZES, VECTOR_BYTES
from jaxdnn._src.norm.hopper import batch_kernels
from jaxdnn._src.norm.hopper.batch_walk import ColumnPlan
from jaxdnn._src.norm.spec import Activation

BLOCKS = 2  # of a multiprocessor
THREADS, CHUNK, STAGES = 256, 4, 2
WIDTH = 32  # the most vectors of a row for a block; fewer give fewer columns a block, and so fewer pairs of a column
BACKWARD = {None: (2, 2), "relu": (2, 2), "swish": (4, 1)}  # chunk and stages, by activation
APPLY = {1: (4, 2), 2: (2, 2)}  # of a kernel that applies an activation, by the number of arrays that it reads

_statistics = once(batch_kernels.statistics, "plan")
_merge = once(batch_kernels.merge, "plan", "eps")
_totals = once(batch_kernels.totals, "fold")


def forward_plan(rows: int, columns: int, dtype: str) -> ColumnPlan | None:
    """How rows and columns are partitioned, from shape and dtype alone; None if rows cannot fill whole vectors."""
    return _plan(rows, columns, dtype, CHUNK, STAGES)


def backward_plan(rows: int, columns: int, dtype: str, activation: Activation | None = None) -> ColumnPlan | None:
    """As `forward_plan`; with two arrays there are twice as many loads in flight.

    With the slope of swish one long chunk took 105 us on an H200 and two short ones 129 (1,605,632 x 64, bfloat16);
    without it, and with that of relu, the two were as fast or faster.
    """
    return _plan(rows, columns, dtype, *BACKWARD[activation and activation[0]])


def apply_plan(rows: int, columns: int, dtype: str, arrays: int) -> ColumnPlan | None:
    """As `forward_plan`, of the kernels that apply an activation, which read one array, or backward two."""
    return _plan(rows, columns, dtype, *APPLY[arrays])


def _plan(rows: int, columns: int, dtype: str, chunk: int, stages: int) -> ColumnPlan | None:
    elements = VECTOR_BYTES // SIZES[dtype]
    fold = elements // math.gcd(columns, elements)
    # The kernels number rows in 32 bits, and multiply columns by constants whose products must fit into 32 bits.
    if rows % fold or columns * fold >= 1 << 28 or rows > 1 << 30:
        return None
    rows, columns = rows // fold, columns * fold
    vectors = columns // elements
    across = -(-vectors // WIDTH)
    width = -(-vectors // across)
    lines = THREADS // width
    while chunk * lines * vectors * VECTOR_BYTES >= 1 << 31:  # a tile's bytes are a factor of 32 bits
        chunk //= 2
        if not chunk:
            return None
    splits = max(1, min(BLOCKS * MULTIPROCESSORS // across, rows // (lines * chunk)))
    return ColumnPlan(rows, columns, fold, dtype, THREADS, width, chunk, stages, splits)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The statistics of the columns of x, (columns,) each.

    Attributes:
      mean, rstd, variance: as the op returns them.
      rest: the rounding error of the mean, which is to be subtracted from x after the mean.
      factor: rstd times the scale.
    """

    mean: Array
    rstd: Array
    variance: Array
    rest: Array
    factor: Array


def statistics(x: Array, scale: Array | None, *, eps: float) -> Statistics:
    """The statistics of the columns of x (rows, columns); scale (columns,)."""
    found = _found(forward_plan, x)
    _record(found, "forward")
    base, pairs = _statistics(x, plan=found)
    mean, rstd, variance, rest, *factor = _merge(base, pairs, scale, plan=found, eps=eps)
    return Statistics(mean, rstd, variance, rest, factor[0] if factor else rstd)


def sums(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    activation: Activation | None = None,
    affine: Sequence[Array] = (),
    config: ColumnPlan | None = None,
) -> Array:
    """Σ dy, Σ dy h and, of float32, Σ h of the columns of dy and x, (rows, columns) both, with h = (x - mean) rstd.

    activation: dy counts times its slope at scale h + bias; `affine` has scale and bias.
    """
    found = config or _found(ft.partial(backward_plan, activation=activation), x)
    _record(found, "backward")
    parts = batch_kernels.sums(dy, x, mean, rstd, found, None if activation is None else activation[0], affine)
    return _totals(parts, fold=found.fold)


def activated(
    x: Array, mean: Array, rstd: Array, activation: Activation, affine: Sequence[Array], out_dtype: Any
) -> Array:
    """y = act(scale h + bias) of x (rows, columns), with h = (x - mean) rstd; `affine` has scale and bias."""
    found = _found(ft.partial(apply_plan, arrays=1), x)
    _record(found, "forward, applied")
    return batch_kernels.activated(x, mean, rstd, found, activation[0], affine, out_dtype)


def gradients(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    totals: Array,
    activation: Activation,
    affine: Sequence[Array],
    out_dtype: Any,
) -> Array:
    """dx of dy and x, from what `sums` found of them."""
    found = _found(ft.partial(apply_plan, arrays=2), x)
    _record(found, "backward, applied")
    return batch_kernels.gradients(dy, x, mean, rstd, totals, found, activation[0], affine, out_dtype)


def _found(plan: Callable[..., ColumnPlan | None], x: Array) -> ColumnPlan:
    found = plan(*x.shape, NAMES[np.dtype(x.dtype)])
    if found is None:
        raise ValueError(f"`x` must have rows that make whole vectors of 16 bytes, got {x.shape} of {x.dtype}.")
    return found


def _record(found: ColumnPlan, which: str) -> None:
    branches.record(
        "norm batches",
        operands=found.dtype,
        pass_=which,
        fold="one row" if found.fold == 1 else "several rows",
        splits="one" if found.splits == 1 else "several",
        columns="one block" if found.row_vectors <= found.width else "several blocks",
    )
