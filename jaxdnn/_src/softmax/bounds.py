"""Error bounds of the softmax family: from the formula, the data and the accumulator, as `jaxdnn.tolerance` has them.

Letters: u the accumulator's unit roundoff, n the length of a row, d = x - m the shifted inputs, e = exp(d), s = Σ e.

d is off by u |d|, and by 2 u |d| more where exp(d) is computed as 2^(d log2 e); an exponential has then a relative
error of η = expm1(3 u |d|) + ε u, and s one of σ = Σ e η / s + (n - 1) u (1 + max η) in whichever order it is added,
since its terms are positive. What is subnormal may be flushed to zero, so every exponential may be off by the smallest
normal number besides. All bounds are of the result before its one conversion.
"""

import numpy as np

from jaxdnn._src.core.tolerance import FORMATS, Accumulation

# In units of u. The exponential's error was measured as 1.5 (XLA on CPUs) and 2.5 (on an H200); the bound takes twice
# that, and two of them, since a kernel may rescale what it computed by the largest element of a part of the row. The
# logarithm's was 2 of its value; it is bounded by three times that, and as much of 1, since lg2.approx has an absolute
# error next to 1. tests/softmax/test_values.py measures again.
EXP, LOG, LOG_OF_ONE = 10.0, 6.0, 6.0

Values = np.ndarray


def _sum(e: Values, eta: Values, axes: tuple[int, ...], u: float, tiny: float) -> tuple[Values, Values]:
    """s, and the bound σ of its relative error."""
    n = np.prod([e.shape[axis] for axis in axes], dtype=np.float64)
    s = e.sum(axes, keepdims=True)
    off = (e * eta).sum(axes, keepdims=True) + n * tiny
    off = off + (n - 1) * u * (s + off)
    return s, off / s


def _exponentials(x: Values, axes: tuple[int, ...], shift: bool, u: float) -> tuple[Values, Values, Values]:
    """d, e and η."""
    d = x - np.max(x, axes, keepdims=True, initial=-np.inf) if shift else x
    far = np.where(np.isfinite(d), np.abs(d), 0.0)
    return d, np.exp(d), np.expm1(3 * u * far) + EXP * u


def softmax(x: Values, algorithm: str, axes: tuple[int, ...], accumulation: Accumulation) -> Values:
    """E of softmax at x, float64."""
    rule = FORMATS[accumulation.format]
    u, tiny = rule.roundoff, rule.smallest_normal
    with np.errstate(all="ignore"):
        d, e, eta = _exponentials(x, axes, algorithm != "fast", u)
        s, sigma = _sum(e, eta, axes, u, tiny)
        if algorithm == "log":
            y = d - np.log(s)
            error = u * np.where(np.isfinite(d), np.abs(d), 0.0) + _log(s, sigma, u) + u * np.abs(y)
        else:
            # The quotient, or a reciprocal and a product.
            error = e / s * ((1 + eta) * (1 + 3 * u) / (1 - sigma) - 1) + 2 * tiny * (1 + 1 / s)
    return np.where(np.isfinite(error), error, 0.0)  # there the result is not finite either, which is compared as such


def _log(s: Values, sigma: Values, u: float) -> Values:
    return -np.log1p(-sigma) + u * ((LOG + 1) * np.abs(np.log(s)) + LOG_OF_ONE)


def logsumexp(x: Values, axes: tuple[int, ...], accumulation: Accumulation) -> Values:
    """E of logsumexp at x, float64; the axes stay with length 1."""
    rule = FORMATS[accumulation.format]
    u, tiny = rule.roundoff, rule.smallest_normal
    with np.errstate(all="ignore"):
        _, e, eta = _exponentials(x, axes, True, u)
        s, sigma = _sum(e, eta, axes, u, tiny)
        y = np.max(x, axes, keepdims=True, initial=-np.inf) + np.log(s)
        error = _log(s, sigma, u) + u * np.abs(y)
    return np.where(np.isfinite(error), error, 0.0)


def softmax_dgrad(dy: Values, y: Values, algorithm: str, axes: tuple[int, ...], accumulation: Accumulation) -> Values:
    """E of softmax_dgrad at dy and y, float64."""
    rule = FORMATS[accumulation.format]
    u, tiny = rule.roundoff, rule.smallest_normal
    n = np.prod([dy.shape[axis] for axis in axes], dtype=np.float64)
    rate = n * u / (1 - n * u)  # n - 1 additions and a product
    with np.errstate(all="ignore"):
        if algorithm == "log":
            p, eta = np.exp(y), np.expm1(3 * u * np.abs(y)) + EXP * u
            total, off = dy.sum(axes, keepdims=True), rate * np.abs(dy).sum(axes, keepdims=True) + n * tiny
            product = p * np.abs(total)
            error = p * off + (product + p * off) * (eta + 2 * u) + u * np.abs(dy - p * total) + 3 * tiny
        else:
            terms = y * dy
            # A subnormal y may be read as zero.
            flushed = tiny * (1 + np.abs(dy))
            total, off = terms.sum(axes, keepdims=True), rate * np.abs(terms).sum(axes, keepdims=True)
            off = off + (1 + rate) * flushed.sum(axes, keepdims=True)
            inner = off + u * (np.abs(dy - total) + off)
            error = (
                np.abs(y) * inner
                + u * (np.abs(y * (dy - total)) + np.abs(y) * inner)
                + 2 * tiny * (1 + np.abs(dy - total))
            )
    return np.where(np.isfinite(error), error, 0.0)
