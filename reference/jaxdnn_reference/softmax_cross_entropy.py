"""The cross-entropy of the softmax of logits, and of those of a linear layer.

lse = log sum_c exp(z[c])
t = (1 - e) p + e / C, p the distribution, or 1 at the label and 0 elsewhere
loss = sum_c t[c] (lse - z[c]) + zeta lse^2

A class with t = 0 adds nothing, whatever its logit. Source: PyTorch's cross_entropy, and optax's
softmax_cross_entropy. Behind a linear layer the same is written as

z = x w + bias,  lse = log sum_v exp(z[v])
loss = lse - (1 - e) z[label] - (e / V) sum_v z[v] + zeta lse^2

with e the label smoothing and zeta the weight of the z-loss (Chowdhery et al., arXiv:2204.02311). Rows with the
ignored label do not count. "mean" divides the sum of weight times loss by the sum of the weights.
"""

from typing import Any

import numpy as np

from jaxdnn_reference.rounding import FLOAT32, FLOAT64, round_to

Array = np.ndarray[Any, Any]


def cross_entropy(
    logits: Array,
    labels: Array,
    /,
    *,
    axis: int = -1,
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Array:
    """labels: integers, in the shape of logits without the axis, or distributions in their shape."""
    wide = np.longdouble if logits.dtype == FLOAT64 else np.float64
    z = np.moveaxis(logits.astype(wide), axis, -1)
    classes = z.shape[-1]
    if np.issubdtype(labels.dtype, np.integer):
        p = (labels[..., None] == np.arange(classes)).astype(wide)
        known = (labels >= 0) & (labels < classes)
        counts = np.broadcast_to(True if ignore_index is None else labels != ignore_index, labels.shape)
    else:
        p = np.moveaxis(labels.astype(wide), axis, -1)
        known = counts = np.ones(z.shape[:-1], bool)
    t = (1 - label_smoothing) * p + label_smoothing / classes
    with np.errstate(all="ignore"):
        m = z.max(-1, keepdims=True)
        m = np.where(np.isfinite(m), m, 0)
        lse = m[..., 0] + np.log(np.exp(z - m).sum(-1))
        loss = np.where(t == 0, 0, t * (lse[..., None] - z)).sum(-1) + z_loss * lse**2
        loss = np.where(known, loss, np.nan)
        weight = np.where(counts, 1 if weights is None else weights.astype(wide), 0)
        loss = np.where(counts, weight * np.where(counts, loss, 0), 0)
        result = {"none": lambda: loss, "sum": loss.sum, "mean": lambda: loss.sum() / weight.sum()}[reduction]()
    return round_to(np.asarray(result), logits.dtype if logits.dtype == FLOAT64 else FLOAT32)


def linear_cross_entropy(
    x: Array,
    w: Array,
    labels: Array,
    /,
    *,
    bias: Array | None = None,
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    precision: str | None = None,
) -> Array:
    """x: [..., D], w: [D, V], labels: [...]. `chunk` and `precision` say how, not what, and change nothing here."""
    wide = np.longdouble if x.dtype == FLOAT64 else np.float64
    z = np.matmul(x.astype(wide), w.astype(wide))
    if bias is not None:
        z = z + bias.astype(wide)
    words = z.shape[-1]
    with np.errstate(all="ignore"):
        m = z.max(-1, keepdims=True)
        m = np.where(np.isfinite(m), m, 0)
        lse = m[..., 0] + np.log(np.exp(z - m).sum(-1))
        known = (labels >= 0) & (labels < words)
        picked = np.take_along_axis(z, np.where(known, labels, 0)[..., None], -1)[..., 0]
        loss = lse - (1 - label_smoothing) * picked + z_loss * lse**2
        if label_smoothing:
            loss = loss - label_smoothing / words * z.sum(-1)
        loss = np.where(known, loss, np.nan)
        counts = np.broadcast_to(True if ignore_index is None else labels != ignore_index, labels.shape)
        weight = np.where(counts, 1 if weights is None else weights.astype(wide), 0)
        loss = np.where(counts, weight * np.where(counts, loss, 0), 0)
        result = {"none": lambda: loss, "sum": loss.sum, "mean": lambda: loss.sum() / weight.sum()}[reduction]()
    return round_to(np.asarray(result), x.dtype if x.dtype == FLOAT64 else FLOAT32)
