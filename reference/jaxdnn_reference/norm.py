"""Normalisations by mean and deviation, and their backward ops.

For every slice, n elements of x along the axes A, with h the normalised elements:

    mean = sum x / n        variance = sum (x - mean)^2 / n        r = 1 / sqrt(variance + eps)
    h = (x - mean) r        y = scale h + bias

    dx = r (g - sum g / n - h (sum g h) / n)  with g = scale dy        dscale = sum dy h        dbias = sum dy

RMS normalisation leaves out the mean, and sum g / n with it. The ops differ in A, and in the axes along which scale
and bias are the same, over which dscale and dbias are summed:

    op                    A                              scale and bias
    layer_norm, rms_norm  `axis`                         one for every index along A
    adaptive_layer_norm   `axis`                         for every index along A and the first axis
    group_norm            pixels, channels of a group    one a channel
    instance_norm         pixels                         one a channel
    batch_norm            batch and pixels               one a channel
      "per_activation"    batch                          one for every index but the batch's

Everything is computed in float64 (np.longdouble for float64 inputs), and rounded only if a result's dtype is given.
The mean is subtracted in two steps, so what is left has full precision however far from zero the mean is.

Sources: Ioffe and Szegedy, arXiv:1502.03167; Ba, Kiros and Hinton, arXiv:1607.06450; Ulyanov, Vedaldi and Lempitsky,
arXiv:1607.08022; Wu and He, arXiv:1803.08494; Zhang and Sennrich, arXiv:1910.07467; Chan, Golub and LeVeque,
The American Statistician 37 (1983), for the variance. cuDNN's names are in jaxdnn's docstrings.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdnn_reference.activation import Activation, activate, parse
from jaxdnn_reference.rounding import FLOAT64, round_to

Array = np.ndarray[Any, Any]
Axis = int | Sequence[int]


class Way(NamedTuple):
    """The type that is computed in: float64, for float64 inputs np.longdouble."""

    dtype: Any

    def total(self, x: Array, axes: Sequence[int]) -> Array:
        """The sum along axes, which stay with length 1."""
        return np.sum(x, axis=tuple(axes), keepdims=True) if axes else x

    def mean(self, x: Array, axes: Sequence[int]) -> Array:
        """The mean along axes; NaN where there is nothing to take it of."""
        n = int(np.prod([x.shape[a] for a in axes]))
        return self.total(x, axes) / self.dtype(n if n else np.nan)


def way_of(x: Array) -> Way:
    return Way(np.longdouble if x.dtype == FLOAT64 else np.float64)


class Statistics(NamedTuple):
    """x - mean (x itself if not centred), the mean, the variance and r = 1 / sqrt(variance + eps)."""

    centred: Array
    mean: Array
    variance: Array
    rstd: Array


def statistics(way: Way, x: Array, axes: Sequence[int], eps: float, centred: bool = True) -> Statistics:
    """The mean of what is left after the mean was subtracted is subtracted too: a far mean is itself rounded."""
    wide, mean = x.astype(way.dtype), np.zeros(1, way.dtype)
    for _ in range(2 if centred else 0):
        rest = way.mean(wide, axes)
        wide, mean = wide - rest, mean + rest
    variance = way.mean(wide * wide, axes)
    with np.errstate(divide="ignore"):
        rstd = 1 / np.sqrt(variance + way.dtype(eps))
    return Statistics(wide, np.broadcast_to(mean, rstd.shape), variance, rstd)


def saved(
    way: Way, x: Array, axes: Sequence[int], eps: float, mean: Array | None, rstd: Array | None, centred: bool = True
) -> Statistics:
    """The statistics that a forward op has saved, shaped like x with length 1 along `axes`; None: those of x."""
    if rstd is None:
        return statistics(way, x, axes, eps, centred)
    rstd, wide = rstd.astype(way.dtype), x.astype(way.dtype)
    if not centred or mean is None:
        return Statistics(wide, np.zeros_like(rstd), np.zeros_like(rstd), rstd)
    return Statistics(wide - mean.astype(way.dtype), mean, np.zeros_like(rstd), rstd)


def normalise(way: Way, s: Statistics, scale: Array | None, bias: Array | None) -> Array:
    """scale h + bias; both broadcast to x."""
    y = s.centred * s.rstd
    y = y if scale is None else y * scale.astype(way.dtype)
    return y if bias is None else y + bias.astype(way.dtype)


def activated(y: Array, activation: Activation) -> Array:
    """act(y), in the type that is computed in."""
    return y if parse(activation)[0] == "identity" else activate(y, activation).astype(y.dtype)


def gradients(
    way: Way,
    dy: Array,
    s: Statistics,
    scale: Array | None,
    axes: Sequence[int],
    same: Sequence[int],
    centred: bool = True,
) -> tuple[Array, Array, Array]:
    """dx, dscale and dbias; scale and bias are the same along the axes `same`, which are summed over.

    Sums along axes in both `axes` and `same` are taken first, once for all that need them.
    """
    h, g = s.centred * s.rstd, dy.astype(way.dtype)
    shared = [a for a in axes if a in same]
    rest = [a for a in axes if a not in shared]
    n = int(np.prod([h.shape[a] for a in axes]))
    factor = way.dtype(1) if scale is None else scale.astype(way.dtype)
    sum_g, sum_gh = way.total(g, shared), way.total(g * h, shared)
    of_g, of_gh = (way.total(v * factor, rest) / way.dtype(n) for v in (sum_g, sum_gh))
    inner = g * factor - of_g if centred else g * factor
    same = [a for a in same if a not in shared]
    return s.rstd * (inner - h * of_gh), way.total(sum_gh, same), way.total(sum_g, same)


def result(y: Array, out_dtype: Any) -> Array:
    """y, rounded if a dtype is given."""
    return y if out_dtype is None else round_to(y, out_dtype)


def factor_of(scale: Array | None, shape: Sequence[int], zero_centred: bool, way: Way) -> Array | None:
    """The scale in a shape that broadcasts to x; stored as its distance from one if `zero_centred`."""
    if scale is None:
        return None
    return scale.astype(way.dtype).reshape(shape) + way.dtype(1 if zero_centred else 0)


# along axes of an array ---------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The axes A; the shapes of parameters and of statistics as they broadcast to x; the statistics' own shape."""

    axes: list[int]
    same: list[int]
    parameters: tuple[int, ...]
    reduced: tuple[int, ...]
    statistics: tuple[int, ...]


def rows(x: Array, axis: Axis, samples: bool) -> Rows:
    axes = sorted(a % x.ndim for a in np.atleast_1d(axis).tolist())
    varies = [*axes, 0] if samples else axes
    return Rows(
        axes,
        [a for a in range(x.ndim) if a not in varies],
        tuple(size if a in varies else 1 for a, size in enumerate(x.shape)),
        tuple(1 if a in axes else size for a, size in enumerate(x.shape)),
        tuple(size for a, size in enumerate(x.shape) if a not in axes),
    )


def _forward(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    axis: Axis,
    eps: float,
    zero_centred: bool,
    out_dtype: Any,
    *,
    samples: bool = False,
    centred: bool = True,
) -> tuple[Array, Array, Array]:
    way, r = way_of(x), rows(x, axis, samples)
    s = statistics(way, x, r.axes, eps, centred)
    factor = factor_of(scale, r.parameters, zero_centred, way)
    y = normalise(way, s, factor, None if bias is None else bias.reshape(r.parameters))
    return result(y, out_dtype), s.mean.reshape(r.statistics), s.rstd.reshape(r.statistics)


def _backward(
    dy: Array,
    x: Array,
    scale: Array | None,
    mean: Array | None,
    rstd: Array | None,
    axis: Axis,
    eps: float,
    zero_centred: bool,
    out_dtype: Any,
    *,
    samples: bool = False,
    centred: bool = True,
) -> tuple[Array, Array, Array]:
    way, r = way_of(x), rows(x, axis, samples)
    mean, rstd = (None if v is None else np.asarray(v).reshape(r.reduced) for v in (mean, rstd))
    s = saved(way, x, r.axes, eps, mean, rstd, centred)
    factor = factor_of(scale, r.parameters, zero_centred, way)
    dx, dscale, dbias = gradients(way, dy, s, factor, r.axes, r.same, centred)
    shape = tuple(size for a, size in enumerate(x.shape) if a not in r.same)
    return result(dx, out_dtype), dscale.reshape(shape), dbias.reshape(shape)


def layer_norm(
    x: Array,
    /,
    *,
    axis: Axis = -1,
    scale: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    zero_centred: bool = False,
    return_statistics: bool = False,
    out_dtype: Any = None,
) -> Any:
    """y = (x - mean) r scale + bias over the axes `axis`; with `return_statistics` (y, mean, r)."""
    found = _forward(x, scale, bias, axis, eps, zero_centred, out_dtype)
    return found if return_statistics else found[0]


def layer_norm_dgrad(
    dy: Array,
    x: Array,
    /,
    *,
    axis: Axis = -1,
    scale: Array | None = None,
    mean: Array | None = None,
    rstd: Array | None = None,
    eps: float = 1e-5,
    zero_centred: bool = False,
    out_dtype: Any = None,
) -> tuple[Array, Array, Array]:
    """dx, dscale, dbias of `layer_norm`."""
    return _backward(dy, x, scale, mean, rstd, axis, eps, zero_centred, out_dtype)


def rms_norm(
    x: Array,
    /,
    *,
    axis: Axis = -1,
    scale: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-6,
    zero_centred: bool = False,
    return_statistics: bool = False,
    out_dtype: Any = None,
) -> Any:
    """y = x / sqrt(sum x^2 / n + eps) scale + bias; with `return_statistics` (y, r)."""
    y, _, rstd = _forward(x, scale, bias, axis, eps, zero_centred, out_dtype, centred=False)
    return (y, rstd) if return_statistics else y


def rms_norm_dgrad(
    dy: Array,
    x: Array,
    /,
    *,
    axis: Axis = -1,
    scale: Array | None = None,
    rstd: Array | None = None,
    eps: float = 1e-6,
    zero_centred: bool = False,
    out_dtype: Any = None,
) -> tuple[Array, Array, Array]:
    """dx, dscale, dbias of `rms_norm`: those of `layer_norm` without the terms in the mean."""
    return _backward(dy, x, scale, None, rstd, axis, eps, zero_centred, out_dtype, centred=False)


def adaptive_layer_norm(
    x: Array,
    scale: Array,
    bias: Array,
    /,
    *,
    axis: Axis = -1,
    eps: float = 1e-5,
    zero_centred: bool = False,
    return_statistics: bool = False,
    out_dtype: Any = None,
) -> Any:
    """`layer_norm` with a scale and a bias for every index of the first axis."""
    found = _forward(x, scale, bias, axis, eps, zero_centred, out_dtype, samples=True)
    return found if return_statistics else found[0]


def adaptive_layer_norm_dgrad(
    dy: Array,
    x: Array,
    scale: Array,
    /,
    *,
    axis: Axis = -1,
    mean: Array | None = None,
    rstd: Array | None = None,
    eps: float = 1e-5,
    zero_centred: bool = False,
    out_dtype: Any = None,
) -> tuple[Array, Array, Array]:
    """dx, dscale, dbias of `adaptive_layer_norm`, the latter two for every index of the first axis."""
    return _backward(dy, x, scale, mean, rstd, axis, eps, zero_centred, out_dtype, samples=True)
