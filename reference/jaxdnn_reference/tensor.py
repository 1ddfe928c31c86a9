"""Layouts, scaling, blending and element-wise ops of two arrays.

Every op ends in y = alpha * computed + beta * prior and one rounding; with beta = 0 the prior is not read.

arithmetic "golden" computes in float64 (np.longdouble for float64) and rounds only if out_dtype is given. "ordered"
computes in float32 (float64 for float64), each product and each sum rounded once, and rounds to out_dtype, by default
the operand's. Integers stay integers (int32, which wraps) as long as alpha is 1 and beta 0 or 1.

Sources: cuDNN's cudnnTransformTensorEx, cudnnAddTensor, cudnnOpTensor, cudnnScaleTensor, cudnnSetTensor.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdnn_reference import layout as lay
from jaxdnn_reference.rounding import FLOAT32, FLOAT64, round_to

Array = np.ndarray[Any, Any]


def transform(
    x: Array,
    /,
    *,
    layout: str = "NHWC",
    out_layout: str | None = None,
    padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0,
    fold: int | Sequence[int] = 1,
    unfold: int | Sequence[int] = 1,
    channels: int | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """alpha * moved(x) + beta * prior: unfold, pad (or crop), fold, cut or fill up the channels, in the new layout.

    unfolded u[n, h f + i, w g + j, c] = x[n, h, w, (c f + i) g + j]
    padded   p[n, h, w, c] = u[n, h - low_h, w - low_w, c], zero outside
    folded   m[n, h, w, (c f + i) g + j] = p[n, h f + i, w g + j, c]
    """
    source, target = lay.image_axes(layout), lay.image_axes(out_layout or layout)
    m = source.to_canonical(x)
    rank = m.ndim - 2
    m = pixel_shuffle_canonical(m, lay.per_axis(unfold, rank), "CRD")
    m = pixel_unshuffle_canonical(_padded(m, padding), lay.per_axis(fold, rank), "CRD")
    wanted = m.shape[-1] if channels is None else channels
    vector = target.lanes or 1
    y = np.zeros((*m.shape[:-1], -(-wanted // vector) * vector), m.dtype)
    kept = min(wanted, m.shape[-1])
    y[..., :kept] = m[..., :kept]
    y = target.from_canonical(y)
    return finish(wide(y, arithmetic), x.dtype, alpha, beta, prior, out_dtype, arithmetic)


def _padded(x: Array, padding: Any) -> Array:
    """Zeros around the spatial axes; negative amounts cut off."""
    pads = lay.pad_amounts(padding, x.shape[1:-1], (), (), ())
    y = np.zeros((x.shape[0], *(n + sum(p) for n, p in zip(x.shape[1:-1], pads, strict=True)), x.shape[-1]), x.dtype)
    for position in itertools.product(*(range(n) for n in y.shape[1:-1])):
        origin = tuple(i - low for i, (low, _) in zip(position, pads, strict=True))
        if all(0 <= i < n for i, n in zip(origin, x.shape[1:-1], strict=True)):
            y[(slice(None), *position)] = x[(slice(None), *origin)]
    return y


def pixel_shuffle_canonical(x: Array, factors: Sequence[int], order: str) -> Array:
    parts = int(np.prod(factors))
    c = x.shape[-1] // parts
    sizes = (n * f for n, f in zip(x.shape[1:-1], factors, strict=True))
    y = np.empty((x.shape[0], *sizes, c), x.dtype)
    for number, part in enumerate(itertools.product(*map(range, factors))):
        every = tuple(slice(i, None, f) for i, f in zip(part, factors, strict=True))
        y[(slice(None), *every)] = x[..., _channels(number, parts, c, order)]
    return y


def pixel_unshuffle_canonical(x: Array, factors: Sequence[int], order: str) -> Array:
    parts, c = int(np.prod(factors)), x.shape[-1]
    y = np.empty((x.shape[0], *(n // f for n, f in zip(x.shape[1:-1], factors, strict=True)), c * parts), x.dtype)
    for number, part in enumerate(itertools.product(*map(range, factors))):
        every = tuple(slice(i, None, f) for i, f in zip(part, factors, strict=True))
        y[..., _channels(number, parts, c, order)] = x[(slice(None), *every)]
    return y


def _channels(number: int, parts: int, c: int, order: str) -> slice:
    """The channels that hold one part of every pixel."""
    return slice(number, None, parts) if order == "CRD" else slice(number * c, (number + 1) * c)


def add(
    a: Array,
    c: Array,
    /,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """alpha * a + beta * c, a broadcast to c."""
    computed = np.broadcast_to(wide(a, arithmetic), c.shape)
    return finish(computed, c.dtype, alpha, beta, c, out_dtype, arithmetic)


def op_tensor(
    a: Array,
    b: Array | None,
    /,
    *,
    op: str = "add",
    alpha1: float = 1.0,
    alpha2: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    nan: str = "propagate",
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """op(alpha1 * a, alpha2 * b) + beta * prior with op add, mul, min, max, sqrt (of a) or not (1 - a).

    min and max: a where the two are equal; NaN where one is NaN, or the other with nan="ignore".
    """
    first = _scaled(wide(a, arithmetic), alpha1, arithmetic)
    second = first if b is None else _scaled(wide(b, arithmetic), alpha2, arithmetic)
    if first.dtype != second.dtype:  # an integer whose scale is 1 and one whose scale is not
        first, second = (v.astype(_float(arithmetic)) for v in (first, second))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if op == "add":
            computed = first + second
        elif op == "mul":
            computed = first * second
        elif op == "sqrt":
            computed = np.sqrt(first.astype(_float(arithmetic)) if first.dtype.kind == "i" else first)
        elif op == "not":
            computed = first.dtype.type(1) - first
        else:
            chosen = first <= second if op == "min" else first >= second
            chosen |= np.isnan(first) if nan == "propagate" else np.isnan(second)
            computed = np.where(chosen, first, second)
    return finish(computed, a.dtype, 1.0, beta, prior, out_dtype, arithmetic)


def scale(x: Array, /, *, alpha: float = 1.0, out_dtype: Any = None, arithmetic: str = "golden") -> Array:
    """alpha * x."""
    return finish(wide(x, arithmetic), x.dtype, alpha, 0.0, None, out_dtype, arithmetic)


def fill(x: Array, /, *, value: float = 0.0, out_dtype: Any = None, arithmetic: str = "golden") -> Array:
    """value everywhere, in x's shape."""
    filled = np.full(x.shape, value, np.float64)
    return filled if out_dtype is None and arithmetic == "golden" else round_to(filled, out_dtype or x.dtype)


# what the tensor ops share --------------------------------------------------------------------------------


def wide(x: Array, arithmetic: str) -> Array:
    """x in what it is computed in; integers in int32, whatever the arithmetic."""
    if x.dtype.kind in "iu":
        return x.astype(np.int32)
    if arithmetic == "golden":
        return x.astype(np.longdouble if x.dtype == FLOAT64 else np.float64)
    return x.astype(FLOAT64 if x.dtype == FLOAT64 else FLOAT32)


def _float(arithmetic: str) -> Any:
    """What integers become once they are not integers any more."""
    return np.float64 if arithmetic == "golden" else np.float32


def _scaled(z: Array, alpha: float, arithmetic: str) -> Array:
    if alpha == 1:
        return z
    z = z.astype(_float(arithmetic)) if z.dtype.kind == "i" else z
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return z * z.dtype.type(alpha)


def finish(
    z: Array, like: np.dtype, alpha: float, beta: float, prior: Array | None, out_dtype: Any, arithmetic: str
) -> Array:
    """alpha * z + beta * prior, two products and a sum, and the one rounding."""
    added = None if beta == 0 else prior
    whole = z.dtype.kind == "i" and alpha == 1 and (added is None or (beta == 1 and added.dtype.kind in "iu"))
    if z.dtype.kind == "i" and not whole:
        z = z.astype(_float(arithmetic))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        z = _scaled(z, alpha, arithmetic)
        if added is not None:
            z = z + _scaled(added.astype(z.dtype), beta, arithmetic)
    return z if out_dtype is None and arithmetic == "golden" else round_to(z, out_dtype or like)
