"""What the kernel of grouped products computes, by the interpreter of `tests.hopper.protocol`: places, slots, masks.

Its products are NumPy's; what is not modelled is its PTX, and the layouts of registers and of shared memory.
"""

import functools as ft
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdnn._src.matmul.hopper import items, kernel
from jaxdnn._src.matmul.hopper.plan import DEPTH, Config, Problem
from tests.attention import backward_values
from tests.hopper.protocol import Kernel, kernels


class Values(backward_values.Values):
    """A warpgroup that computes."""

    def computed(self, name: str, x: list[Any], known: Mapping[str, Any]) -> Any:
        match name:
            case "multiply":
                left, right = (matrix(v, known[f"{side}_major"]) for v, side in zip(x[1:], ("a", "b"), strict=True))
                with np.errstate(invalid="ignore"):
                    return [x[0] + (left @ right.T).astype(np.float32)]
            case "finish_accumulator":
                return [x[0]]
            case "store":
                x[1][...] = x[0].astype(x[1].dtype)
                return None
            case "clear_rows":
                x[0].reshape(-1, DEPTH, DEPTH)[:, max(0, int(x[1])) :] = 0
                return None
        return super().computed(name, x, known)


def matrix(boxes: np.ndarray, major: str) -> np.ndarray:
    """A slot as a matrix, with a column for each product that is added."""
    if major == "k":
        return boxes.reshape(-1, DEPTH).astype(np.float64)
    return boxes.reshape(-1, DEPTH, DEPTH).swapaxes(1, 2).reshape(-1, DEPTH).astype(np.float64)


def launched(problem: Problem, config: Config, sms: int) -> Kernel:
    """The one launch of a call."""
    rows = problem.lists * problem.rows
    of_matrices = (problem.columns, problem.terms) if problem.transposed else (problem.terms, problem.columns)
    second = (rows, problem.columns) if problem.gradient else (problem.matrices, *of_matrices)
    avals = [jax.ShapeDtypeStruct(shape, problem.dtype) for shape in ((rows, problem.terms), second)]
    sizes = jax.ShapeDtypeStruct((problem.lists, problem.groups), jnp.int32)
    run = lambda a, b, sizes: kernel.run(a, b, sizes, problem, config, sms)
    (found,) = kernels(run, *avals, sizes)
    return found


def table(problem: Problem, config: Config, sizes: Any) -> np.ndarray:
    return np.asarray(jax.jit(ft.partial(items.table, problem, config))(np.asarray(sizes, np.int32)))


def values(problem: Problem, config: Config, operands: Sequence[np.ndarray], sizes: Any, sms: int) -> np.ndarray:
    """The result, NaN where nothing was stored."""
    shape = (problem.matrices, problem.terms) if problem.gradient else (problem.lists * problem.rows,)
    out = np.full((*shape, problem.columns), np.nan, np.float32).astype(problem.out_dtype)
    launch = launched(problem, config, sms)
    launch.dtype, launch.warpgroup = np.dtype(problem.dtype), Values
    launch.run(dict(enumerate((table(problem, config, sizes), *operands, out))))
    return out
