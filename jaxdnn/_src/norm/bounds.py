"""How far normalisations may lie from their float64 reference, from the data: rules beside those of `tolerance`.

The letters: u the accumulator's unit roundoff, γ = (n + 8) u / (1 - (n + 8) u) what adding n terms in any order and a
few roundings around it cost at most, relative to the sum of the magnitudes; V = σ² + ε, r = 1 / √V, h = (x - μ) r.

* δ bounds the error of the subtracted mean: γ Σ|x| / n + u |μ|; where x is as wide as the accumulator the mean of what
  is left is subtracted too, and δ is γ (Σ|x - μ| / n + δ₀) + u δ₀, with δ₀ the former.
* x - μ is then off by δ, the same for a whole slice, and by l = 3 u (|x - μ| + δ). A shift changes σ² by δ² alone, for
  the x - μ add up to 0: |Δσ²| <= δ² + 2 Σ (|x - μ| + δ) l / n + Σ l² / n + γ (σ² + these).
* r is off by the factor 1 / √(1 - |Δσ²| / V), and 8 u for the addition, the root and the reciprocal, or XLA's rsqrt.
* In one pass shifted by s, d = |x - s| and a bound of s's own error: δ = γ Σ d / n + 2 u |μ|, |Δσ²| <= 4 γ Σ d² / n.
* Then products and sums follow, each rounded once; errors of factors multiply out.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxdnn._src.core.tolerance import FORMATS

Values = np.ndarray


@dataclasses.dataclass(frozen=True)
class Problem:
    """A normalisation as an error bound sees it: float64 values of the stored inputs, statistics over `axes`.

    Attributes:
      same: the axes along which scale and bias are the same.
      wide: whether x has the accumulator's own format.
      sample: the axis and how many of its first indices give the shift of a single pass, or None.
      scale, bias: as they broadcast to x, or None.
    """

    x: Values
    axes: tuple[int, ...]
    same: tuple[int, ...]
    eps: float
    centred: bool
    wide: bool
    scale: Values | None = None
    bias: Values | None = None
    format: str = "float32"
    sample: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        return math.prod(self.x.shape[a] for a in self.axes)

    @property
    def roundoff(self) -> float:
        return FORMATS[self.format].roundoff

    @property
    def tiny(self) -> float:
        """What results below the normal numbers may lose, of which there are a few."""
        return 8 * FORMATS[self.format].smallest_normal

    def mean(self, v: Values) -> Values:
        return v.mean(self.axes, keepdims=True)

    def growth(self, n: int) -> float:
        """γ."""
        return FORMATS[self.format].growth(n + 8)


@dataclasses.dataclass(frozen=True)
class Normalised:
    """h and the statistics, each with its error."""

    h: Values
    h_error: Values
    mean: Values
    mean_error: Values
    variance: Values
    variance_error: Values
    rstd: Values
    rstd_error: Values


def normalised(p: Problem) -> Normalised:
    """h and the statistics."""
    u, gamma = p.roundoff, p.growth(p.count)
    mean = p.mean(p.x) if p.centred else np.zeros_like(p.mean(p.x))
    c = p.x - mean
    if p.centred:  # as the definition does
        rest = p.mean(c)
        mean, c = mean + rest, c - rest
    shift = gamma * p.mean(np.abs(p.x)) + u * np.abs(mean) if p.centred else np.zeros_like(mean)
    if p.wide and p.centred:
        shift = gamma * (p.mean(np.abs(c)) + shift) + u * shift
    variance = p.mean(c * c)
    distances = np.zeros_like(c)
    if p.sample:
        distances = np.abs(p.x - p.mean(p.x.take(range(p.sample[1]), p.sample[0]))) + gamma * p.mean(np.abs(p.x))
        # A wide x has a single pass on CPUs alone, of which the bound does not know.
        shift = (
            np.maximum(shift, gamma * p.mean(distances)) if p.wide else gamma * p.mean(distances) + 2 * u * np.abs(mean)
        )
    local = 3 * u * (np.abs(c) + shift) if p.centred else np.zeros_like(c)
    if p.wide:
        local = local + u * distances
    moved = shift**2 + 2 * p.mean((np.abs(c) + shift) * local) + p.mean(local**2)
    variance_error = moved + gamma * (variance + moved) + p.tiny
    if p.sample:
        single = 4 * gamma * p.mean(distances**2) + p.tiny
        variance_error = np.maximum(variance_error, single) if p.wide else single
    v = variance + p.eps
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(variance_error < v, variance_error / v, np.nan)
        relative = np.where(np.isnan(share), np.inf, 1 / np.sqrt(1 - share) - 1 + 8 * u)
        rstd = 1 / np.sqrt(v)
        h = c * rstd
        h_error = rstd * (shift + local) * (1 + relative) + np.abs(h) * relative
        h_error = h_error + 2 * u * (np.abs(h) + h_error) + p.tiny
        rstd_error = rstd * relative
    mean_error = shift + 2 * u * np.abs(mean) + p.tiny if p.centred else np.zeros_like(mean)
    return Normalised(h, h_error, mean, mean_error, variance, variance_error, rstd, rstd_error)


def forward(p: Problem) -> tuple[Values, Values]:
    """y and its error before it is rounded to its dtype."""
    u, n = p.roundoff, normalised(p)
    scale = np.ones(1) if p.scale is None else p.scale
    bias = np.zeros(1) if p.bias is None else p.bias
    product = n.h * scale
    error = np.abs(scale) * n.h_error
    error = error + 2 * u * (np.abs(product) + error)  # the factor, if it is 1 + scale, and the product
    error = error + u * (np.abs(product + bias) + error) + p.tiny
    return np.broadcast_to(product + bias, p.x.shape), np.broadcast_to(error, p.x.shape)


def backward(p: Problem, dy: Values) -> tuple[tuple[Values, Values], ...]:
    """dx, dscale and dbias, each with its error before it is rounded; statistics saved in the accumulator's format."""
    u, n = p.roundoff, normalised(p)
    saved = 0.0 if p.wide or not p.centred else u * np.abs(n.mean) * n.rstd  # the rounding of the saved mean
    h, h_error = n.h, n.h_error + saved * (1 + 8 * u) + 2 * u * np.abs(n.h)
    gamma = p.growth(p.count)
    g = dy if p.scale is None else dy * p.scale
    g_error = 2 * u * np.abs(g) + p.tiny
    zero = np.zeros_like(n.mean)
    of_g = p.mean(g) if p.centred else zero
    of_g_error = gamma * p.mean(np.abs(g)) + p.tiny if p.centred else zero
    of_gh = p.mean(g * h)
    gh_error = np.abs(g) * h_error
    of_gh_error = p.mean(gh_error) + gamma * (p.mean(np.abs(g * h)) + p.mean(gh_error)) + p.tiny
    inner = g - of_g - h * of_gh
    inner_error = g_error + of_g_error + np.abs(h) * of_gh_error + h_error * (np.abs(of_gh) + of_gh_error)
    inner_error = inner_error + 4 * u * (np.abs(g) + np.abs(of_g) + np.abs(h * of_gh) + inner_error)
    dx = n.rstd * inner
    dx_error = (n.rstd + n.rstd_error) * inner_error + n.rstd_error * np.abs(inner)
    dx_error = dx_error + 2 * u * (np.abs(dx) + dx_error) + p.tiny
    return (dx, dx_error), _summed(p, dy * h, np.abs(dy) * h_error), _summed(p, dy, 0 * dy)


def moved(p: Problem, off: Values) -> tuple[Values, Values, Values]:
    """How far dx, dscale and dbias move at most where each element of dy moves by `off`."""
    n = normalised(p)
    h, rstd = np.abs(n.h) + n.h_error, n.rstd + n.rstd_error
    along, total = off * h, lambda v: v.sum(p.same, keepdims=True)
    if p.scale is None:
        return rstd * (off + p.mean(off) + h * p.mean(along)), total(along), total(off)
    g = off * np.abs(p.scale)
    return rstd * (g + p.mean(g) + h * p.mean(g * h)), total(along), total(off)


def from_definition(p: Problem, dy: Values | None = None) -> tuple[Values, ...]:
    """How far y, or with dy the three gradients, may lie from the definition's before they are rounded: both errors.

    The definition takes float64 for float32, and np.longdouble for float64, which on some platforms has no more digits.
    A bound E is convex in u and not negative where u is 0, so with the roundoff f u it is at most f E.
    """
    exact, share = dataclasses.replace(p, wide=True, sample=None), definition_share(p.format)
    both = [[forward(q)] if dy is None else backward(q, dy) for q in (p, exact)]
    return tuple(error + share * own for (_, error), (_, own) in zip(*both, strict=True))


def definition_share(format: str) -> float:
    """f: the definition's unit roundoff over the accumulator's."""
    own = np.finfo(np.float64 if format == "float32" else np.longdouble).eps
    return float(own) / 2 / FORMATS[format].roundoff


def _summed(p: Problem, v: Values, error: Values) -> tuple[Values, Values]:
    """Σ v along the axes where the parameters are the same, and its error."""
    total = lambda a: a.sum(p.same, keepdims=True)
    gamma = p.growth(math.prod(v.shape[a] for a in p.same))
    return total(v), total(error) + gamma * (total(np.abs(v)) + total(error)) + p.tiny


def problem(
    view_shape: Sequence[int],
    axes: Sequence[int],
    same: Sequence[int],
    spread: Sequence[int],
    x: Values,
    scale: Values | None,
    bias: Values | None,
    *,
    eps: float,
    centred: bool,
    zero_centred: bool = False,
) -> Problem:
    """A call as a problem: arrays as they were given, and how the op views them."""
    from jaxdnn._src.norm.xla import sample_of

    wide = x.dtype in (np.float32, np.float64)
    shape = np.empty(tuple(view_shape), np.bool_)
    read = lambda v: None if v is None else np.asarray(v).astype(np.float64).reshape(spread)
    scale = read(scale)
    return Problem(
        x=np.asarray(x).astype(np.float64).reshape(view_shape),
        axes=tuple(axes),
        same=tuple(same),
        eps=eps,
        centred=centred,
        wide=wide,
        scale=scale if scale is None or not zero_centred else 1 + scale,
        bias=read(bias),
        format="float64" if x.dtype == np.float64 else "float32",
        sample=sample_of(shape, axes) if centred else None,
    )
