"""Batch normalisation in pieces: the sums of every channel, and what they say about normalising.

    total = sum (x - shift)        squares = sum (x - shift)^2        over batch and pixels, m elements
    d = total / m     mean = shift + d     variance = max(squares / m - d^2, 0)     r = 1 / sqrt(variance + eps)
    factor = r scale        summand = bias - mean factor        so that batch_norm(x) = x factor + summand

    dscale = sum dy (x - mean) r        dbias = sum dy
    factor_dy = r scale        factor_x = -factor_dy r dscale / m        summand = -factor_dy dbias / m - mean factor_x
    so that batch_norm_dgrad(dy, x) = factor_dy dy + factor_x x + summand

Running statistics as in `norm_batch`; in inference they are mean and variance.

Sources: the operations genstats, bn_finalize and dbn_weight of cuDNN's graph API.
"""

from typing import Any

import numpy as np

from jaxdnn_reference import norm
from jaxdnn_reference.norm_batch import moved, of_batch

Array = np.ndarray[Any, Any]


def genstats(x: Array, /, *, shift: Array | None = None, layout: str = "NHWC") -> tuple[Array, Array]:
    """(total, squares)."""
    way, v = norm.way_of(x), of_batch(x, "spatial", layout)
    wide = v.x.astype(way.dtype)
    wide = wide if shift is None else wide - np.asarray(shift).astype(way.dtype).reshape(v.spread)
    return way.total(wide, v.axes).reshape(v.own), way.total(wide * wide, v.axes).reshape(v.own)


def bn_finalize(
    total: Array,
    squares: Array,
    count: float,
    /,
    *,
    scale: Array | None = None,
    bias: Array | None = None,
    running_mean: Array | None = None,
    running_variance: Array | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    shift: Array | None = None,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """(factor, summand, mean, r, running mean, running variance). Without running statistics momentum is 1."""
    kind = np.result_type(total, norm.way_of(total).dtype).type  # what `genstats` returns may be wider than float64
    m = kind(count)
    mean = total.astype(kind) / m
    variance = np.maximum(squares.astype(kind) / m - mean * mean, kind(0))
    rstd = 1 / np.sqrt(variance + kind(eps))
    mean = mean if shift is None else shift.astype(kind) + mean
    factor = rstd if scale is None else rstd * scale.astype(kind)
    summand = -mean * factor if bias is None else bias.astype(kind) - mean * factor
    unbiased = variance * (m / (m - 1) if m > 1 else kind(np.nan))
    if running_mean is None or running_variance is None:
        return factor, summand, mean, rstd, mean, unbiased
    f = kind(momentum)
    return factor, summand, mean, rstd, moved(f, mean, running_mean), moved(f, unbiased, running_variance)


def bn_finalize_inference(
    mean: Array,
    variance: Array,
    /,
    *,
    scale: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
) -> tuple[Array, Array]:
    """(factor, summand)."""
    kind = norm.way_of(mean).dtype
    factor = 1 / np.sqrt(variance.astype(kind) + kind(eps))
    factor = factor if scale is None else factor * scale.astype(kind)
    summand = -mean.astype(kind) * factor
    return factor, summand if bias is None else bias.astype(kind) + summand


def dbn_weight(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    /,
    *,
    scale: Array | None = None,
    layout: str = "NHWC",
) -> tuple[Array, Array, Array, Array, Array]:
    """(dscale, dbias, factor_dy, factor_x, summand)."""
    way, v = norm.way_of(x), of_batch(x, "spatial", layout)
    kind = way.dtype
    g, c = v.array(dy).astype(kind), v.x.astype(kind) - mean.astype(kind).reshape(v.spread)
    m, r = kind(v.x.size // max(1, v.own[0])), rstd.astype(kind)
    dscale, dbias = way.total(g * c, v.axes).reshape(v.own) * r, way.total(g, v.axes).reshape(v.own)
    factor_dy = r if scale is None else r * scale.astype(kind)
    factor_x = -factor_dy * r * dscale / m
    return dscale, dbias, factor_dy, factor_x, -factor_dy * dbias / m - mean.astype(kind) * factor_x
