"""What forward and backward data on Hopper share around the pipeline: a call's plan, its run, and its copies' bytes.

They add over channels at each tap, and differ in which channels these are and in the axes that the pipeline iterates
over. `fprop` and `dgrad` make the plan and the copies of the operands.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv.hopper import copies, pipeline, tuning
from jaxdnn._src.conv.hopper.plan import Config, Problem
from jaxdnn._src.hopper import branches


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is computed: the problem that the pipeline solves, and the copies around it.

    Attributes:
      flat: whether the pixels are flattened: a matrix product.
      pad_reduce: zero channels that are added to the input and to the filter.
      pad_columns: zero output channels that are added, and removed from the result.
      transpose: whether the filter is copied transposed, for types that wgmma reads only along the reduction.
      folded: forward, whether a copy turns the last axis' taps into channels.
      cells: forward, pixels of a 16-byte cell, of which an output reads a window; 0: no cells.
    """

    problem: Problem
    flat: bool
    pad_reduce: int
    pad_columns: int
    transpose: bool
    folded: bool = False
    cells: int = 0


def run(
    which: str,
    a: Array,
    b: Array,
    todo: Plan,
    shape: Sequence[int],
    epilogue: Epilogue | None,
    operands: Sequence[Array],
    config: Config | None,
    sms: int | None,
) -> Array:
    """The pipeline's result for the copied operands, without what was added to it: of this shape."""
    problem, sms = todo.problem, sms or tuning.multiprocessors()
    config = config or tuning.choose(which, problem, sms)
    made = {"padded channels": todo.pad_reduce, "padded columns": todo.pad_columns, "transposed filter": todo.transpose}
    made |= {"folded taps": todo.folded, "cells": todo.cells, "none": True}
    for name in filter(made.get, made):
        branches.record(which, copies=name)
    bias, extras = copies.prepare_epilogue(epilogue, operands, problem, config, todo.flat, todo.pad_columns)
    y = pipeline.run(a, b, bias, extras, problem, config, sms=sms)
    if not todo.flat:
        y = y[(slice(None), *(slice(0, n) for n in shape[1:-1]))]
    return y[..., : shape[-1]].reshape(tuple(shape))


def further_bytes(
    todo: Plan,
    width: int,
    filter_is_copied: bool,
    epilogue: Epilogue | None,
    operands: Sequence[Any],
    out_dtype: Any,
) -> int:
    """Bytes of the copies of the filter and of the epilogue's operands, and of a result that is longer than wanted."""
    problem, total = todo.problem, 0
    if filter_is_copied:
        padded_first = todo.transpose and (todo.pad_columns or todo.pad_reduce)
        total += copies.filter_bytes(problem, width) * (2 if padded_first else 1)
    total += copies.epilogue_bytes(epilogue, operands, problem, todo.pad_columns)
    if todo.pad_columns or any(map(any, copies.longer(problem))):
        pixels = problem.batch * math.prod(ax.positions * ax.out_step for ax in problem.axes)
        total += pixels * problem.columns * jnp.dtype(out_dtype).itemsize
    return total
