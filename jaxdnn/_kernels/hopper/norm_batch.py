"""Batch normalisation's statistics on Hopper: columns of rows, in one reading (Pallas, Mosaic GPU).

Schedule. x is seen as rows of columns. Two blocks stay on every multiprocessor; a thread keeps mean and second moment
of a vector of columns in registers and goes down its share of the rows, with many loads under way. The blocks leave
their pairs, half a megabyte, which a second, tiny kernel makes one of. What follows, x - μ times what, is left to XLA's
formula, which joins an activation or a sum behind it to the same pass over memory. `norm_batch_ptx` writes the
instructions and states their order.

Limits. The statistics' axes are the first ones; a row's bytes are a multiple of 16, or so many rows' bytes as divide
the number of rows (3 channels: 8 pixels); bfloat16, float16 or float32.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._kernels.hopper import norm_batch_ptx
from jaxdnn._kernels.hopper.launch import launch
from jaxdnn._kernels.hopper.norm_batch_ptx import LANES, ColumnPlan
from jaxdnn._kernels.hopper.ptx import SIZES, VECTOR_BYTES

NAMES = {np.dtype(jnp.bfloat16): "bf16", np.dtype(np.float16): "f16", np.dtype(np.float32): "f32"}
MULTIPROCESSORS = 132
BLOCKS = 2  # on a multiprocessor
THREADS, CHUNK, STAGES = 256, 8, 2
MERGE_THREADS, MERGE_BATCH = 512, 8


def plan(rows: int, columns: int, dtype: str) -> ColumnPlan | None:
    """How columns are dealt out, from the shape and dtype alone; None if rows do not make whole vectors."""
    elements = VECTOR_BYTES // SIZES[dtype]
    fold = elements // math.gcd(columns, elements)
    if rows % fold:
        return None
    rows, columns = rows // fold, columns * fold
    vectors = columns // elements
    width = min(vectors, THREADS)
    lines, across = THREADS // width, -(-vectors // width)
    # A tile's bytes are a factor of 32 bits.
    chunk = next((k for k in (CHUNK, 4, 2, 1) if k * lines * vectors * VECTOR_BYTES < 1 << 31), None)
    if chunk is None:
        return None
    splits = max(1, min(BLOCKS * MULTIPROCESSORS // across, rows // (lines * chunk)))
    return ColumnPlan(rows, columns, fold, dtype, THREADS, width, chunk, STAGES, splits)


def statistics(x: Array, *, eps: float, config: ColumnPlan | None = None) -> tuple[Array, Array, Array, Array, Array]:
    """Mean, inverse deviation and variance of the columns of x (rows, columns), and the mean as a sum of two numbers.

    The first of the two is a row of x, so what it is subtracted from loses nothing where it is near.
    """
    rows, columns = x.shape
    found = config or plan(rows, columns, NAMES[np.dtype(x.dtype)])
    if found is None:
        raise ValueError(f"`x` must have rows that make whole vectors of 16 bytes, got {x.shape} of {x.dtype}.")
    base, sums = _pairs(x, found)
    number = jax.ShapeDtypeStruct((columns,), jnp.float32)
    mean, rstd, variance, offset = launch(
        norm_batch_ptx.merge(found, MERGE_THREADS, MERGE_BATCH, eps=eps),
        [base, sums],
        (number,) * 4,
        name="norm_merge",
        blocks=-(-columns // LANES),
        threads=MERGE_THREADS,
        floats=2 * MERGE_THREADS,
    )
    return mean, rstd, variance, base[:columns], offset


def _pairs(x: Array, found: ColumnPlan) -> tuple[Array, Array]:
    """The base and the splits' pairs."""
    columns = jax.ShapeDtypeStruct((found.columns,), jnp.float32)
    pairs = jax.ShapeDtypeStruct((found.splits, 2, found.columns), jnp.float32)
    return launch(
        norm_batch_ptx.statistics(found),
        [x.reshape(found.rows, found.columns)],
        (columns, pairs),
        name="norm_columns",
        blocks=found.blocks,
        threads=found.threads,
        floats=max(found.floats, 32),
    )
