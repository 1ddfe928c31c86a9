"""Normalisations by a neighbourhood.

    lrn             s[c] = k + lrn_alpha / n sum_i x[i]^2          i the n channels around c       y = x s^-lrn_beta
    divisive_norm   s = k + lrn_alpha / n^D sum_j (x - means)[j]^2      j the n^D pixels around a pixel, in its channel

A window reaches from floor((n - 1) / 2) below to n - 1 - floor((n - 1) / 2) above (even="high", as cuDNN and ONNX
have it) or, for even n, from n / 2 below to n / 2 - 1 above (even="low", as PyTorch has it). Nothing is added for what
lies outside. The gradients, with i in the window of j:

    t[i] = 2 lrn_alpha lrn_beta / n^D (x - means)[i] sum_j dy[j] x[j] s[j]^(-lrn_beta - 1)
    dx = dy s^-lrn_beta - t        dmeans = t

Then everything is blended: alpha y + beta prior, and the prior not read with beta = 0.

Sources: Krizhevsky, Sutskever and Hinton (2012); cudnnLRNCrossChannelForward, cudnnDivisiveNormalizationForward and
their Backward; ONNX's LRN, PyTorch's local_response_norm.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdnn_reference import norm
from jaxdnn_reference.norm_group import as_it_lies

Array = np.ndarray[Any, Any]


def window_sum(v: Array, axes: Sequence[int], n: int, even: str, *, mirrored: bool = False) -> Array:
    """The sum over the window around every element, along all of `axes`."""
    low = n // 2 if even == "low" else (n - 1) // 2
    high = n - 1 - low
    if mirrored:
        low, high = high, low
    for axis in axes:
        lines = np.moveaxis(v, axis, 0)
        summed = np.empty_like(lines)
        for c in range(len(lines)):
            summed[c] = lines[max(c - low, 0) : c + high + 1].sum(0)
        v = np.moveaxis(summed, 0, axis)
    return v


def denominator(v: Array, axes: Sequence[int], n: int, lrn_alpha: float, k: float, even: str) -> Array:
    """s = k + lrn_alpha / n^D sum v^2."""
    return k + lrn_alpha / n ** len(axes) * window_sum(v * v, axes, n, even)


def blended(y: Array, alpha: float, beta: float, prior: Array | None, x: Array, out_dtype: Any) -> Array:
    y = alpha * y
    if beta != 0 and prior is not None:
        y = y + beta * prior.astype(y.dtype)
    return norm.result(y, out_dtype)


def lrn(
    x: Array,
    /,
    *,
    n: int = 5,
    lrn_alpha: float = 1e-4,
    lrn_beta: float = 0.75,
    k: float = 2.0,
    even: str = "high",
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    layout: str = "NHWC",
    out_dtype: Any = None,
) -> Array:
    """y = x (k + lrn_alpha / n sum x^2)^-lrn_beta, the sum over n channels."""
    axes, wide = as_it_lies(layout), norm.way_of(x).dtype
    v = axes.to_canonical(x).astype(wide)
    s = denominator(v, [axes.letters.index("C")], n, lrn_alpha, k, even)
    return blended(axes.from_canonical(v * s ** wide(-lrn_beta)), alpha, beta, prior, x, out_dtype)


def lrn_dgrad(
    dy: Array,
    x: Array,
    /,
    *,
    n: int = 5,
    lrn_alpha: float = 1e-4,
    lrn_beta: float = 0.75,
    k: float = 2.0,
    even: str = "high",
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    layout: str = "NHWC",
    out_dtype: Any = None,
) -> Array:
    """dx = dy s^-lrn_beta - t."""
    axes, wide = as_it_lies(layout), norm.way_of(x).dtype
    v, g = (axes.to_canonical(a).astype(wide) for a in (x, dy))
    dx, _ = _gradients(g, v, v, [axes.letters.index("C")], n, lrn_alpha, lrn_beta, k, even)
    return blended(axes.from_canonical(dx), alpha, beta, prior, x, out_dtype)


def divisive_norm(
    x: Array,
    /,
    *,
    means: Array | None = None,
    n: int = 5,
    lrn_alpha: float = 1e-4,
    lrn_beta: float = 0.75,
    k: float = 2.0,
    even: str = "high",
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    layout: str = "NHWC",
    out_dtype: Any = None,
) -> Array:
    """y = x (k + lrn_alpha / n^D sum (x - means)^2)^-lrn_beta, the sum over n^D pixels."""
    axes, wide = as_it_lies(layout), norm.way_of(x).dtype
    v, m = (axes.to_canonical(a).astype(wide) for a in (x, np.zeros_like(x) if means is None else means))
    s = denominator(v - m, _spatial(axes.letters), n, lrn_alpha, k, even)
    return blended(axes.from_canonical(v * s ** wide(-lrn_beta)), alpha, beta, prior, x, out_dtype)


def divisive_norm_dgrad(
    dy: Array,
    x: Array,
    /,
    *,
    means: Array | None = None,
    n: int = 5,
    lrn_alpha: float = 1e-4,
    lrn_beta: float = 0.75,
    k: float = 2.0,
    even: str = "high",
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    layout: str = "NHWC",
    out_dtype: Any = None,
) -> tuple[Array, Array]:
    """dx = alpha (dy s^-lrn_beta - t) + beta prior, dmeans = alpha t."""
    axes, wide = as_it_lies(layout), norm.way_of(x).dtype
    g, v, m = (axes.to_canonical(a).astype(wide) for a in (dy, x, np.zeros_like(x) if means is None else means))
    dx, t = _gradients(g, v, v - m, _spatial(axes.letters), n, lrn_alpha, lrn_beta, k, even)
    dx = blended(axes.from_canonical(dx), alpha, beta, prior, x, out_dtype)
    return dx, blended(axes.from_canonical(t), alpha, 0.0, None, x, out_dtype)


def _spatial(letters: str) -> list[int]:
    return [letters.index(letter) for letter in "DHW" if letter in letters]


def _gradients(
    g: Array, x: Array, v: Array, axes: Sequence[int], n: int, rate: float, exponent: float, k: float, even: str
) -> tuple[Array, Array]:
    s = denominator(v, axes, n, rate, k, even)
    back = window_sum(g * x * s ** (-exponent - 1), axes, n, even, mirrored=True)
    t = 2 * rate * exponent / n ** len(axes) * v * back
    return g * s**-exponent - t, t
