"""Batch normalisation: `norm`'s formulas over the batch, running statistics, and what is fused behind.

    c = (x - mean) r scale + bias        y = act(alpha c + beta prior + residual)       with beta = 0 no prior is read
    running mean     <- momentum mean + (1 - momentum) running mean
    running variance <- momentum variance m / (m - 1) + (1 - momentum) running variance

where m elements make a statistic: batch and pixels of a channel ("spatial"), or the batch ("per_activation"). The
running variance is unbiased, the variance that normalises is not; m = 1 gives NaN.

Sources: Ioffe and Szegedy, arXiv:1502.03167; cudnnBatchNormalizationForwardTrainingEx,
cudnnBatchNormalizationForwardInference, cudnnBatchNormalizationBackwardEx.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxdnn_reference import layout as lay
from jaxdnn_reference import norm
from jaxdnn_reference.activation import Activation
from jaxdnn_reference.norm_group import as_it_lies

Array = np.ndarray[Any, Any]


class Batch(NamedTuple):
    """x with plain channels, the statistics' axes, and the shape of parameters: theirs, and as they broadcast to x."""

    layout: lay.Axes
    x: Array
    axes: list[int]
    own: tuple[int, ...]
    spread: tuple[int, ...]

    def array(self, v: Array) -> Array:
        return self.layout.to_canonical(v)

    def restore(self, v: Array) -> Array:
        return self.layout.from_canonical(v)

    def parameter(self, v: Array | None) -> Array | None:
        return None if v is None else np.asarray(v).reshape(self.spread)


def of_batch(x: Array, mode: str, layout: str) -> Batch:
    axes = as_it_lies(layout)
    plain = axes.to_canonical(x)
    kept = [a for a, letter in enumerate(axes.letters) if (letter == "C" if mode == "spatial" else letter != "N")]
    own = tuple(plain.shape[a] for a in kept)
    spread = tuple(size if a in kept else 1 for a, size in enumerate(plain.shape))
    return Batch(axes, plain, [a for a in range(plain.ndim) if a not in kept], own, spread)


def _blended(c: Array, alpha: float, beta: float, prior: Array | None) -> Array:
    """alpha c + beta prior."""
    kind = c.dtype.type
    y = c if alpha == 1 else kind(alpha) * c
    return y if beta == 0 or prior is None else y + kind(beta) * prior.astype(kind)


def _finish(
    v: Batch,
    c: Array,
    residual: Array | None,
    activation: Activation,
    alpha: float,
    beta: float,
    prior: Array | None,
) -> Array:
    """act(alpha c + beta prior + residual)."""
    kind = c.dtype.type
    y = _blended(c, alpha, beta, None if prior is None else v.array(prior))
    if residual is not None:
        y = y + v.array(residual).astype(kind)
    return norm.activated(y, activation)


def batch_norm(
    x: Array,
    /,
    *,
    scale: Array | None = None,
    bias: Array | None = None,
    running_mean: Array | None = None,
    running_variance: Array | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    mode: str = "spatial",
    axis_name: None = None,
    residual: Array | None = None,
    activation: Activation = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    layout: str = "NHWC",
    out_dtype: Any = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """(y, mean, r, running mean, running variance). Without running statistics momentum is 1.

    axis_name: the definition has one device, whose batch is that of all.
    """
    way, v = norm.way_of(x), of_batch(x, mode, layout)
    s = norm.statistics(way, v.x, v.axes, eps)
    c = norm.normalise(way, s, v.parameter(scale), v.parameter(bias))
    y = norm.result(_finish(v, c, residual, activation, alpha, beta, prior), out_dtype)
    m = int(np.prod([v.x.shape[a] for a in v.axes]))
    unbiased = s.variance * way.dtype(m / (m - 1) if m > 1 else np.nan)
    mean, rstd, unbiased = (value.reshape(v.own) for value in (s.mean, s.rstd, unbiased))
    if running_mean is None or running_variance is None:
        return v.restore(y), mean, rstd, mean, unbiased
    f = way.dtype(momentum)
    return v.restore(y), mean, rstd, moved(f, mean, running_mean), moved(f, unbiased, running_variance)


def moved(f: Any, new: Array, old: Array) -> Array:
    """f new + (1 - f) old; a term of weight 0 is left out, for it may be NaN."""
    terms = [weight * v.astype(type(f)) for weight, v in ((f, new), (1 - f, old)) if weight != 0]
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def batch_norm_inference(
    x: Array,
    mean: Array,
    variance: Array,
    /,
    *,
    scale: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    mode: str = "spatial",
    residual: Array | None = None,
    activation: Activation = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    layout: str = "NHWC",
    out_dtype: Any = None,
) -> Array:
    """y = act(alpha ((x - mean) / sqrt(variance + eps) scale + bias) + beta prior + residual)."""
    way, v = norm.way_of(x), of_batch(x, mode, layout)
    mean, variance = (p.astype(way.dtype).reshape(v.spread) for p in (mean, variance))
    rstd = 1 / np.sqrt(variance + way.dtype(eps))
    s = norm.Statistics(v.x.astype(way.dtype) - mean, mean, variance, rstd)
    c = norm.normalise(way, s, v.parameter(scale), v.parameter(bias))
    return v.restore(norm.result(_finish(v, c, residual, activation, alpha, beta, prior), out_dtype))


def batch_norm_dgrad(
    dy: Array,
    x: Array,
    /,
    *,
    scale: Array | None = None,
    mean: Array | None = None,
    rstd: Array | None = None,
    y: Array | None = None,
    eps: float = 1e-5,
    mode: str = "spatial",
    axis_name: None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    alpha_param: float = 1.0,
    beta_param: float = 0.0,
    prior_dscale: Array | None = None,
    prior_dbias: Array | None = None,
    layout: str = "NHWC",
    out_dtype: Any = None,
) -> tuple[Array, ...]:
    """dx, dscale, dbias of `batch_norm`, blended; with the result y of a relu behind it, also dresidual = dy [y > 0].

    dx <- alpha dx + beta prior        dscale <- alpha_param dscale + beta_param prior_dscale        dbias likewise
    """
    way, v = norm.way_of(x), of_batch(x, mode, layout)
    dy = dy if y is None else np.where(y > 0, dy, np.zeros_like(dy))
    s = norm.saved(way, v.x, v.axes, eps, v.parameter(mean), v.parameter(rstd))
    dx, dscale, dbias = norm.gradients(way, v.array(dy), s, v.parameter(scale), v.axes, v.axes)
    dx = _blended(dx, alpha, beta, None if prior is None else v.array(prior))
    parameters = ((dscale, prior_dscale), (dbias, prior_dbias))
    dscale, dbias = (_blended(d.reshape(v.own), alpha_param, beta_param, p) for d, p in parameters)
    found = v.restore(norm.result(dx, out_dtype)), dscale, dbias
    return found if y is None else (*found, dy)
