"""Softmax, its backward pass, and the logarithm of a sum of exponentials.

accurate   s = exp(x - m) / sum exp(x - m),  m = max x
fast       s = exp(x) / sum exp(x)
log        s = x - m - log sum exp(x - m)

A row, over which maximum and sum run, lies along `axis`, or along the axes that cuDNN's `mode` names in a `layout`:
"channel" (all channels at one place) or "instance" (everything of one example).

Infinities by IEEE arithmetic: a row of -inf is NaN under accurate and log (-inf - -inf).
Source: cuDNN's cudnnSoftmaxForward and cudnnSoftmaxBackward.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdnn_reference.rounding import FLOAT64, round_to

Array = np.ndarray[Any, Any]


def softmax(
    x: Array,
    /,
    *,
    algorithm: str = "accurate",
    axis: int | Sequence[int] | None = -1,
    mode: str | None = None,
    layout: str = "NHWC",
    where: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
) -> Array:
    """y = alpha s + beta prior, where what the mask leaves out of its row has s = 0 (log: -inf)."""
    rows = axes(x.ndim, axis, mode, layout)
    mask = np.broadcast_to(True if where is None else where, x.shape)
    wide = np.where(mask, x.astype(_wide(x.dtype)), -np.inf)
    with np.errstate(all="ignore"):
        shifted = wide if algorithm == "fast" else wide - _max(wide, rows)
        e = np.exp(shifted)
        total = e.sum(rows, keepdims=True)
        s = shifted - np.log(total) if algorithm == "log" else e / total
    s = np.where(mask, s, -np.inf if algorithm == "log" else 0.0)
    return _blend(s, alpha, beta, prior, out_dtype or x.dtype)


def softmax_dgrad(
    dy: Array,
    y: Array,
    /,
    *,
    algorithm: str = "accurate",
    axis: int | Sequence[int] | None = -1,
    mode: str | None = None,
    layout: str = "NHWC",
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
) -> Array:
    """dx = alpha y (dy - sum y dy) + beta prior; log: dx = alpha (dy - exp(y) sum dy) + beta prior."""
    rows = axes(dy.ndim, axis, mode, layout)
    dtype = out_dtype or dy.dtype
    dy, y = dy.astype(_wide(dy.dtype)), y.astype(_wide(y.dtype))
    with np.errstate(all="ignore"):
        if algorithm == "log":
            dx = dy - np.exp(y) * dy.sum(rows, keepdims=True)
        else:
            dx = y * (dy - (y * dy).sum(rows, keepdims=True))
    return _blend(dx, alpha, beta, prior, dtype)


def logsumexp(
    x: Array,
    /,
    *,
    axis: int | Sequence[int] | None = -1,
    mode: str | None = None,
    layout: str = "NHWC",
    where: Array | None = None,
    keepdims: bool = False,
    out_dtype: Any = None,
) -> Array:
    """m + log sum exp(x - m); a row of nothing, or of -inf alone, gives -inf."""
    rows = axes(x.ndim, axis, mode, layout)
    mask = np.broadcast_to(True if where is None else where, x.shape)
    wide = np.where(mask, x.astype(_wide(x.dtype)), -np.inf)
    m = _max(wide, rows)
    m = np.where(np.isfinite(m), m, 0.0)
    with np.errstate(all="ignore"):
        y = m + np.log(np.exp(wide - m).sum(rows, keepdims=True))
    return round_to(y if keepdims else y.squeeze(rows), out_dtype or x.dtype)


def axes(ndim: int, axis: int | Sequence[int] | None, mode: str | None, layout: str) -> tuple[int, ...]:
    """The axes of a row: those given, or those that the mode names in the layout."""
    if mode is None:
        given = range(ndim) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
        return tuple(sorted(a % ndim for a in given))
    letters, _, lanes = layout.partition("c")
    letters += "C" if lanes else ""  # the vector of channels lies innermost
    return tuple(i for i, letter in enumerate(letters) if (letter == "C" if mode == "channel" else letter != "N"))


def _max(x: Array, rows: tuple[int, ...]) -> Array:
    return np.max(x, rows, keepdims=True, initial=-np.inf)


def _wide(dtype: np.dtype) -> Any:
    return np.longdouble if dtype == FLOAT64 else np.float64


def _blend(s: Array, alpha: float, beta: float, prior: Array | None, dtype: Any) -> Array:
    with np.errstate(all="ignore"):
        y = alpha * s
        if beta != 0 and prior is not None:  # else it is not read
            y = y + beta * prior.astype(s.dtype)
    return round_to(y, dtype)
