"""Reductions along any axes.

y = alpha * r + beta * prior, where r over the elements along the axes is

    add sum x      min, max               avg sum x / n      norm2 sqrt(sum x^2)
    mul prod x     amax max |x|           norm1 sum |x|      mul_no_zeros prod of the x that are not 0
    add_squares sum x^2        log_add log sum x

arithmetic "golden" is float64's. "ordered" joins in float32 (float64 for float64), correctly rounded at each step, on
a tree: along the last of the axes, then the one before it, and so on, of n elements the last floor(n / 2) are joined
to the first floor(n / 2), element by element; an odd middle one passes on; until one is left. add_squares rounds the
squares before they are added. log_add takes the logarithm of the tree's sum by the steps of `ctc`'s. avg multiplies
the tree's sum by 1 / n, which is rounded. norm2 squares, adds and takes the root in float64, then rounds to float32;
float64 is multiplied by 2^-e first, and the root by 2^e, 2^e the power of two below max |x|. A zero that min or max
finds is +0.

Sources: cuDNN's cudnnReduceTensor; ONNX's ReduceSumSquare and ReduceLogSum, and ArgMax with select_last_index.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdnn_reference.ctc import minus_logarithm
from jaxdnn_reference.tensor import finish, wide

Array = np.ndarray[Any, Any]


def reduce(
    x: Array,
    /,
    *,
    op: str = "add",
    axis: int | Sequence[int] | None = None,
    keepdims: bool = False,
    return_indices: bool | str = False,
    nan: str = "propagate",
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Any:
    """alpha * r + beta * prior; with return_indices also where the first extreme element is, counted over the axes.

    With return_indices="last" it is the last one.
    """
    given = range(x.ndim) if axis is None else np.atleast_1d(np.asarray(axis, int))
    along = tuple(sorted(int(a) % x.ndim for a in given))
    w = wide(x, arithmetic)
    if op == "norm2":
        w = x.astype(np.float64)
    elif op in ("avg", "log_add") and w.dtype.kind == "i":
        w = w.astype(np.float64 if arithmetic == "golden" else np.float32)
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        found = _reduced(w, op, along, nan, _plain if arithmetic == "golden" else _tree)
        if op == "norm2" and arithmetic == "ordered" and x.dtype != np.float64:
            found = found.astype(np.float32)
    r = np.asarray(found if keepdims else found.squeeze(along))
    y = finish(r, x.dtype, alpha, beta, prior, out_dtype, arithmetic)
    if not return_indices:
        return y
    at = _place(w, found, op, along, last=return_indices == "last")
    return y, at if keepdims else at.squeeze(along)


Join = Callable[[Callable[[Array, Array], Array], Array, tuple[int, ...]], Array]


def _reduced(x: Array, op: str, axes: tuple[int, ...], nan: str, join: Join) -> Array:
    if op in ("min", "max", "amax"):
        return _extreme(np.abs(x) if op == "amax" else x, op, axes, nan)
    if op in ("add", "avg"):
        total, count = join(np.add, x, axes), x.dtype.type(np.prod([x.shape[axis] for axis in axes]))
        if op == "add":
            return total
        return total / count if join is _plain else total * (x.dtype.type(1) / count)
    if op == "log_add":
        total = join(np.add, x, axes)
        return np.log(total) if join is _plain else _logarithm(total)
    if op == "mul":
        return join(np.multiply, x, axes)
    if op == "mul_no_zeros":
        return join(np.multiply, np.where(x == 0, x.dtype.type(1), x), axes)
    if op == "add_squares":
        return join(np.add, x * x, axes)
    if op == "norm1":
        return join(np.add, np.abs(x), axes)
    largest = np.max(np.abs(x), axis=axes, keepdims=True, initial=0)
    _, exponent = np.frexp(np.where(np.isfinite(largest), largest, np.finfo(x.dtype).max))
    e = np.clip(exponent - 1, -1022, 1022)
    scaled = np.ldexp(x, -e)
    return np.ldexp(np.sqrt(join(np.add, scaled * scaled, axes)), e)


def _logarithm(x: Array) -> Array:
    """log x; of 0 -infinity, of what is less NaN."""
    fits = (x > 0) & (x < np.inf)
    m, e = np.frexp(np.where(fits, x, x.dtype.type(1)))
    return np.where(fits, -minus_logarithm(m, e), np.log(x)).astype(x.dtype)


def _plain(combine: Any, x: Array, axes: tuple[int, ...]) -> Array:
    return combine.reduce(x, axis=axes, keepdims=True, dtype=x.dtype)


def _tree(combine: Any, x: Array, axes: tuple[int, ...]) -> Array:
    if x.dtype.kind == "i" or 0 in [x.shape[axis] for axis in axes]:
        return _plain(combine, x, axes)
    for axis in reversed(axes):
        rows = list(np.moveaxis(x, axis, 0))
        while len(rows) > 1:
            pairs, rest = len(rows) // 2, len(rows) - len(rows) // 2
            rows = [combine(a, b) for a, b in zip(rows[:pairs], rows[rest:], strict=True)] + rows[pairs:rest]
        x = np.expand_dims(rows[0], axis)
    return x


def _extreme(x: Array, op: str, axes: tuple[int, ...], nan: str) -> Array:
    if x.dtype.kind == "i":
        return (np.min if op == "min" else np.max)(x, axis=axes, keepdims=True)
    rules = {"propagate": (np.minimum, np.maximum), "ignore": (np.fmin, np.fmax)}[nan]
    found = rules[op != "min"].reduce(x, axis=axes, keepdims=True)
    return np.where(found == 0, x.dtype.type(0), found)


def _place(x: Array, found: Array, op: str, axes: tuple[int, ...], *, last: bool) -> Array:
    x = np.abs(x) if op == "amax" else x
    equal = (x == found) | (np.isnan(x) & np.isnan(found))
    others = [axis for axis in range(x.ndim) if axis not in axes]
    flat = equal.transpose(*others, *axes).reshape(*(x.shape[axis] for axis in others), -1)
    at = flat.shape[-1] - 1 - flat[..., ::-1].argmax(axis=-1) if last else flat.argmax(axis=-1)
    return np.expand_dims(at.astype(np.int32), axes)
