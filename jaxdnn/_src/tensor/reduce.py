"""Reductions of an array along any of its axes."""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import blending, checks, primitives
from jaxdnn._src.core.annotations import PerAxis, Scale
from jaxdnn._src.core.determinism import is_fixed, required
from jaxdnn._src.core.eager import data
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import at_edges
from jaxdnn._src.tensor import reductions
from jaxdnn._src.tensor.api import NAN_RULES

EXTREMES = ("min", "max", "amax")
_SUMS = {
    "add": reductions.add,
    "mul": reductions.multiply,
    "avg": reductions.average,
    "norm1": reductions.norm1,
    "norm2": reductions.norm2,
    "mul_no_zeros": reductions.multiply_without_zeros,
    "add_squares": reductions.add_squares,
    "log_add": reductions.log_add,
}
OPS = ("add", "mul", "min", "max", "amax", "avg", "norm1", "norm2", "mul_no_zeros", "add_squares", "log_add")


@public
@data(alpha=blending.operand, beta=blending.operand)
def reduce(
    x: ArrayLike,
    /,
    *,
    op: str = "add",
    axis: PerAxis | None = None,
    keepdims: bool = False,
    return_indices: bool | str = False,
    nan: str = "propagate",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    determinism: str | None = None,
) -> Any:
    """Reduces an array along axes, in one of cuDNN's nine ways, as a sum of squares or as the logarithm of a sum.

    y = alpha r + beta prior, where r over the elements x along the axes is

    add  Σ x       min   the smallest       avg    Σ x / n      norm2         √Σ x²
    mul  Π x       max   the largest        norm1  Σ |x|        mul_no_zeros  Π x over the x that are not zero
                   amax  max |x|      log_add  log Σ x      add_squares  Σ x²

    Args:
      x: any shape; float32, bfloat16, float16, float64, float8_e4m3fn, float8_e5m2, int8, uint8, int32.
      op: one of the eleven.
      axis: the axis to reduce, or several, negative ones from the end; None is all of them.
      keepdims: whether reduced axes stay, with length 1.
      return_indices: of "min", "max" and "amax": whether the index of the extreme element is returned too: True, of the
        first; "last", of the last.
      nan: of "min", "max" and "amax": "propagate" gives NaN where an element is NaN; "ignore" passes over NaN, and
        gives NaN only where all elements are.
      alpha, beta, prior: the blend, see `conv`; prior has the result's shape. alpha scales the result of the
        reduction, not the elements.
      out_dtype: the result's dtype; None is that of x.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, or (y, indices): int32, the place of the first extreme element, counted over the reduced axes in row-major
      order. Of several equal ones (+0 and -0 are equal) and of several NaN that propagate it is the first, or the last.

    Differentiation: any order, in x, prior, and alpha and beta if they are arrays. The derivative of min, max and amax
      is that of the first extreme element alone, whichever index is returned; of amax and norm1 at x = 0, and of norm2
      where it is 0, it is 0. Zeros that mul_no_zeros passes over have none. The gradient in x adds nothing, so it
      depends on no order.

    Numerics: float32 (float64 for float64), converted once, to nearest even; integers saturate. Integers are added,
      multiplied and compared in int32, which wraps; avg and log_add of them are float32. avg is the sum times the
      rounded 1 / n. log_add of a negative sum is NaN, of 0 -infinity; where its order is fixed its logarithm is a
      polynomial.
      norm2 overflows only if the result does, and tiny numbers do not underflow: squares are added in float64, which on
      a GPU takes no longer than reading x. float64 numbers are scaled by a power of two that a second pass over x
      finds. (CPUs add squares in float32 unless the order is fixed, and run that second pass if some norm needs it, as
      a norm of zeros does.) An empty sum is 0, an empty product 1, and so is mul_no_zeros of zeros alone. min, max and
      amax give +0 for any zero. Determinism: of floats, sums and products are XLA's (run_to_run); from
      "batch_invariant" on they are taken on a tree that only the reduced lengths decide, axis by axis from the last: of
      n elements the last ⌊n / 2⌋ are joined to the first, and so on, which is "portable". min, max and amax always
      are.

    Raises:
      NotImplementedError: a level that fixes the order, over a batch that `jax.export` leaves open.
      ValueError: axes that do not exist, an unknown op or rule, an extreme or an average of nothing.
      TypeError: a dtype that is not served.

    Example:
      >>> y, at = dnn.reduce(jnp.array([[3.0, 5.0], [5.0, 4.0]]), op="max", return_indices=True)
      >>> float(y), int(at)
      (5.0, 1)

    Sources: cuDNN's cudnnReduceTensor (CUDNN_REDUCE_TENSOR_..., flattened 32-bit indices; its default for NaN is
      "ignore", and it knows the axes from the result's dimensions). ONNX's ReduceSumSquare, ReduceLogSum, and
      select_last_index of ArgMax and ArgMin. jax.numpy's max shares its gradient among ties.
    """
    level = required(determinism)
    edge = ft.partial(at_edges, level)
    x = blending.array("x", x, level)
    checks.choice("op", op, OPS)
    checks.choice("nan", nan, NAN_RULES)
    keepdims, last = checks.flag("keepdims", keepdims), isinstance(return_indices, str) and return_indices == "last"
    if not last and not isinstance(return_indices, bool | np.bool_):
        raise TypeError(f"`return_indices` must be True, False or 'last', got {checks.shown(return_indices)}.")
    reduced = tuple(range(x.ndim)) if axis is None else checks.axes("x", axis, x.ndim, minimum=0)
    symbolic = any(export.is_symbolic_dim(x.shape[axis]) for axis in reduced)
    count = math.prod(x.shape[axis] for axis in reduced if not export.is_symbolic_dim(x.shape[axis]))
    if op not in EXTREMES and (return_indices or nan != "propagate"):
        name, given = ("return_indices", return_indices) if return_indices else ("nan", nan)
        raise ValueError(f"`{name}` other than its default needs op 'min', 'max' or 'amax', got {given!r} for {op!r}.")
    if count == 0 and op in (*EXTREMES, "avg"):
        raise ValueError(f"`x` must have elements along the axes {reduced} for op {op!r}, got shape {x.shape}.")
    if count > np.iinfo(np.int32).max:
        raise ValueError(f"`axis` must hold fewer than 2^31 elements, got {count} along {reduced} of {x.shape}.")
    if symbolic and op not in EXTREMES and is_fixed(level):
        raise NotImplementedError(
            f"`x` must have known sizes along the axes {reduced} at determinism level {level!r}, got shape {x.shape}."
        )
    wide = x.astype(blending.accumulator(x.dtype))
    if op in EXTREMES:
        found = _sharded(lambda a: reductions.extreme(a, op, reduced, nan), reduced, wide)
    else:
        given = x if op == "norm2" else wide  # which is taken from x itself, and squares it in float64
        found = _sharded(lambda a: _SUMS[op](a, reduced, is_fixed(level)), reduced, given)
    y = found if keepdims else jnp.squeeze(found, reduced)
    out = blending.out_dtype(out_dtype, x)
    blend = {"alpha": alpha, "beta": beta, "prior": prior}
    y = blending.blend(edge(y), **blend, out=out, dtypes=(x.dtype,), level=level)
    if not return_indices:
        return y
    indices = _sharded(lambda a, y: reductions.index(a, y, op, reduced, last), reduced, wide, found)
    return y, indices if keepdims else jnp.squeeze(indices, reduced)


def _sharded(function: Callable[..., Array], reduced: tuple[int, ...], *operands: Array) -> Array:
    """`function(*operands)`; where shardings are in types, its reduced axes may be sharded, but nothing within is."""

    def factors(*arrays: Any) -> Factors:
        names = tuple(f"{'r' if axis in reduced else 'l'}{axis}" for axis in range(arrays[0].ndim))
        free = tuple(name for name in names if name[0] == "l")
        return Factors(operands=(names,) * len(arrays), results=(names,), free=free)

    return primitives.composed(function, factors, *operands)
