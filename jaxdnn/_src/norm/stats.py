"""Batch normalisation in pieces: sums of a tensor's channels, what normalises it as one product and one sum, and back.

Letters: N batch, C channels, H, W spatial sizes; m the number of elements that were added.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxdnn._src.core import checks, frames
from jaxdnn._src.core.annotations import Scale
from jaxdnn._src.core.blending import Types
from jaxdnn._src.core.determinism import require
from jaxdnn._src.core.eager import data
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.rounding import product, reciprocal, root, rounded
from jaxdnn._src.norm import arguments
from jaxdnn._src.norm.arguments import View
from jaxdnn._src.norm.batch import read_running, updated_running, weight


@public
def genstats(
    x: ArrayLike, /, *, shift: ArrayLike | None = None, layout: str = "NHWC", determinism: str | None = None
) -> tuple[Array, Array]:
    """Sum and sum of squares of every channel, over batch and pixels.

    total_c = Σ (x - shift)        squares_c = Σ (x - shift)²

    Args:
      x: (N, H, W, C) for layout NHWC; float32, bfloat16, float16 or float64.
      shift: (C,), subtracted first, such as the running mean; None is 0, as cuDNN has it. To be given to `bn_finalize`.
      layout: the axes of x, see `conv`. Channels that only fill the last vector up are among the C.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`: run_to_run at most.

    Returns:
      total and squares, (C,), float32 (float64 for float64).

    Differentiation: any order, forward and reverse.

    Numerics: in float32 (float64 for float64), in XLA's order. A variance from the sums loses precision if σ² is much
      smaller than (μ - shift)²: all of it for a mean of 10⁴ deviations, float32 and no shift. `batch_norm` loses
      none. Squares are added as they are: their sum must lie below 2^128 (2^1024 for float64), so |x - shift| below
      1.8e19 / √m on the average; beyond, squares is inf. Of |x - shift| below 2^-62 (2^-510) squares may count as 0.

    Raises:
      ValueError, TypeError: arguments that do not fit.
      NotImplementedError: the determinism level cannot be guaranteed.

    Example:
      >>> total, squares = dnn.genstats(jnp.array([1.0, -3.0]).reshape(2, 1, 1, 1))
      >>> total.tolist(), squares.tolist()
      ([-2.0], [10.0])

    Sources: cuDNN's graph operation genstats, whose results are SUM and SQSUM.
    """
    frame = frames.frame(layout)
    x = frame.array("x", x)
    found = arguments.types(x, None)
    require("genstats", determinism, "run_to_run", "it adds over the batch")
    axes = tuple(a for a in range(x.ndim) if a != frame.layout.channel)
    wide = x.astype(found.accumulate)
    if shift is not None:
        view = arguments.batches(frame, x, "spatial")
        wide = wide - view.parameter("shift", shift, found)
    return jnp.sum(wide, axes), jnp.sum(wide * wide, axes)


@public
@data(momentum=weight)
def bn_finalize(
    total: ArrayLike,
    squares: ArrayLike,
    count: int | ArrayLike,
    /,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    running_mean: ArrayLike | None = None,
    running_variance: ArrayLike | None = None,
    momentum: Scale = 0.1,
    eps: float = 1e-5,
    shift: ArrayLike | None = None,
    determinism: str | None = None,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """What the sums of `genstats` say about normalising: factor and summand of every channel, and the statistics.

    d = total / m        μ = shift + d        σ² = max(squares / m - d², 0)        r = 1 / √(σ² + eps)
    factor = r scale        summand = bias - μ factor
    running mean ← momentum μ + (1 - momentum) running mean
    running variance ← momentum σ² m / (m - 1) + (1 - momentum) running variance

    with m the count; x factor + summand is then `batch_norm` of x.

    Args:
      total, squares: the sums of every channel, (C,), float32 or float64.
      count: m, how many elements were added; a number, or an array without axes of float32, float64, int32 or int64,
        whose value is not checked: 0 gives NaN.
      scale, bias: (C,); None is 1, and 0.
      running_mean, running_variance, momentum, eps: see `batch_norm`. A statistic of weight 0 is not read.
      shift: as it was given to `genstats`.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`: run_to_run at most.

    Returns:
      factor and summand; the mean and 1 / √(σ² + eps), to be saved for `batch_norm_dgrad`; the new running mean and
      the new running variance, in the dtypes of the old; without old ones, μ and σ² m / (m - 1). All (C,), float32
      (float64 for float64).

    Differentiation: any order, forward and reverse, in all arrays; where σ² is 0 by the maximum alone, in neither sum.

    Numerics: in float32 (float64 for float64). σ² is a difference: its error is that of the sums, a few roundings of
      squares / m, which where d² is 10⁴ σ² leaves float32 three digits of σ², and none where it is 10⁷ σ². A shift near
      the mean, or `batch_norm`, loses nothing so. With m = 1 the new running variance is NaN, as with `batch_norm`.
      Where squares is inf, beyond the range of `genstats`, 1 / √(σ² + eps) and factor are 0 or NaN.

    Raises:
      ValueError, TypeError: arguments that do not fit.
      NotImplementedError: the determinism level cannot be guaranteed.

    Example:
      >>> factor, summand, mean, rstd, *_ = dnn.bn_finalize(jnp.array([4.0]), jnp.array([16.0]), 2, eps=0.0)
      >>> factor.tolist(), summand.tolist(), mean.tolist()
      ([0.5], [-1.0], [2.0])

    Sources: cuDNN's graph operation bn_finalize in training (CUDNN_FUSED_BN_FINALIZE_STATISTICS_TRAINING), whose
      ACCUM_COUNT is the count and whose EQ_SCALE and EQ_BIAS are factor and summand. It has no shift. Its inference
      phase is `bn_finalize_inference`.
    """
    total, squares = checks.array("total", total), checks.array("squares", squares)
    if total.ndim != 1:
        raise ValueError(f"`total` must have one axis, the channels, got shape {total.shape}.")
    accumulate = checks.dtype("total", total, (jnp.float32, jnp.float64))
    checks.shape("squares", squares, total.shape, "that of total")
    checks.dtype("squares", squares, (accumulate,))
    found, channels = Types(accumulate, accumulate), total.shape
    view = View(channels, (), channels, channels, channels, "one a channel")
    m = _count(count, accumulate)
    running = read_running(view, running_mean, running_variance, found)
    small = jnp.asarray(arguments.epsilon(eps), accumulate)
    require("bn_finalize", determinism, "run_to_run", "compilers fuse its products and sums as they see fit")
    mean = total / m
    difference = squares / m - mean * mean
    mean = mean if shift is None else view.parameter("shift", shift, found) + mean
    variance = jnp.where(difference <= 0, jnp.zeros_like(difference), difference)  # NaN stays NaN
    rstd = 1 / jnp.sqrt(variance + small)
    factor = rstd if scale is None else rstd * view.parameter("scale", scale, found)
    summand = -(mean * factor) if bias is None else view.parameter("bias", bias, found) - mean * factor
    unbiased = variance * (m / jnp.where(m > 1, m - 1, jnp.full_like(m, float("nan"))))
    return factor, summand, mean, rstd, *updated_running(running, (mean, unbiased), momentum)


@public
def bn_finalize_inference(
    mean: ArrayLike,
    variance: ArrayLike,
    /,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
    determinism: str | None = None,
) -> tuple[Array, Array]:
    """What given statistics say about normalising: factor and summand of every channel.

    factor = scale / √(variance + eps)        summand = bias - mean factor

    x factor + summand is then `batch_norm_inference` of x.

    Args:
      mean, variance: (C,), as `batch_norm` keeps running ones; float32, bfloat16, float16 or float64, of one dtype.
      scale, bias: (C,); None is 1, and 0.
      eps: added to the variance; a number.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`; every element depends on its own
        inputs alone, so this is mesh_invariant.

    Returns:
      factor and summand, (C,), float32 (float64 for float64).

    Differentiation: any order, forward and reverse, in all arrays.

    Numerics: in float32 (float64 for float64). Where the mean is many deviations from 0, x factor and the summand are
      both large, and their sum loses the digits by which σ lies below μ; `batch_norm_inference` loses none.

    Raises:
      ValueError, TypeError: arguments that do not fit.
      NotImplementedError: the determinism level cannot be guaranteed.

    Example:
      >>> factor, summand = dnn.bn_finalize_inference(jnp.array([3.0]), jnp.array([4.0]), eps=0.0)
      >>> factor.tolist(), summand.tolist()
      ([0.5], [-1.5])

    Sources: cuDNN's graph operation bn_finalize in inference (CUDNN_FUSED_BN_FINALIZE_STATISTICS_INFERENCE).
    """
    mean, variance = checks.array("mean", mean), checks.array("variance", variance)
    if mean.ndim != 1:
        raise ValueError(f"`mean` must have one axis, the channels, got shape {mean.shape}.")
    found = arguments.types(mean, None, name="mean")
    checks.shape("variance", variance, mean.shape, "that of mean")
    checks.dtype("variance", variance, (found.out,))
    view = View(mean.shape, (), mean.shape, mean.shape, mean.shape, "one a channel")
    small = jnp.asarray(arguments.epsilon(eps), found.accumulate)
    require("bn_finalize_inference", determinism, "mesh_invariant", "its reciprocal roots are the device's")
    wide = lambda name, value: rounded(view.parameter(name, value, found))
    factor = reciprocal(root(wide("variance", variance) + small))
    factor = factor if scale is None else product(factor, wide("scale", scale))
    less = product(wide("mean", mean), factor)
    return factor, rounded(-less if bias is None else wide("bias", bias) - less)


@public
def dbn_weight(
    dy: ArrayLike,
    x: ArrayLike,
    mean: ArrayLike,
    rstd: ArrayLike,
    /,
    *,
    scale: ArrayLike | None = None,
    layout: str = "NHWC",
    determinism: str | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """The gradients of batch normalisation in scale and bias, and what makes the one in its input of dy and x.

    dscale = Σ dy (x - mean) rstd        dbias = Σ dy
    factor_dy = scale rstd                            factor_x = -factor_dy rstd dscale / m
    summand = -factor_dy dbias / m - mean factor_x

    so that dx = factor_dy dy + factor_x x + summand, which what follows can take in as it reads dy and x, such as the
    backward ops of the convolution before.

    Args:
      dy: (N, H, W, C) for layout NHWC, the gradient in the normalised tensor; x's dtype, or another that the
        accumulator holds.
      x: what was normalised, dy's shape; float32, bfloat16, float16 or float64.
      mean, rstd: (C,), its statistics, as `batch_norm` or `bn_finalize` returns them; float32 (float64 for float64).
      scale: (C,); None is 1.
      layout: the axes of dy and x, see `conv`. Channels that only fill the last vector up are among the C.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`: run_to_run at most.

    Returns:
      dscale, dbias, factor_dy, factor_x and summand, (C,), float32 (float64 for float64).

    Differentiation: any order, forward and reverse, in all arrays; mean and rstd count as independent of x.

    Numerics: in float32 (float64 for float64), in XLA's order. The mean is subtracted before anything is multiplied, so
      dscale loses no digits to it, and dy is multiplied by what is normalised, whatever the range of x. In dx, factor_x
      x and the summand cancel where the mean is many deviations from 0; `batch_norm_dgrad` loses nothing so.

    Raises:
      ValueError, TypeError: arguments that do not fit.
      NotImplementedError: the determinism level cannot be guaranteed.

    Example:
      >>> dy, x = (jnp.array(v).reshape(3, 1, 1, 1) for v in ([1.0, 2.0, 6.0], [-1.0, 0.0, 1.0]))
      >>> found = dnn.dbn_weight(dy, x, jnp.zeros(1), jnp.ones(1))
      >>> [round(v.item(), 3) for v in found]
      [5.0, 9.0, 1.0, -1.667, -3.0]

    Sources: cuDNN's graph operation dbn_weight, whose EQ_SCALE_DY, EQ_SCALE_X and EQ_BIAS are factor_dy, factor_x and
      summand.
    """
    frame = frames.frame(layout)
    x, dy = frame.array("x", x), frame.array("dy", dy)
    found, view = arguments.types(x, None), arguments.batches(frame, x, "spatial")
    dy = arguments.cotangent(dy, x, found).astype(found.accumulate)
    center, inverse = (view.statistic(name, v, found) for name, v in (("mean", mean), ("rstd", rstd)))
    require("dbn_weight", determinism, "run_to_run", "it adds over the batch")
    channels = lambda v: v.reshape(view.parameters)
    dscale = channels(jnp.sum(dy * ((x.astype(found.accumulate) - center) * inverse), view.axes))
    dbias = channels(jnp.sum(dy, view.axes))
    m = jnp.asarray(x.size // max(1, math.prod(view.parameters)), found.accumulate)
    factor_dy = channels(inverse if scale is None else inverse * view.parameter("scale", scale, found))
    factor_x = -(factor_dy * channels(inverse)) * (dscale / m)
    summand = -(factor_dy * (dbias / m)) - channels(center) * factor_x
    return dscale, dbias, factor_dy, factor_x, summand


def _count(value: Any, accumulate: Any) -> Array:
    """Reads `count`: a number of at least 1, or an array without axes."""
    if checks.is_number(value):
        count = checks.as_float("count", value)
        if not 1 <= count <= float(jnp.finfo(accumulate).max):
            raise ValueError(f"`count` must be a number of at least 1 that {accumulate.name} holds, got {value!r}.")
        return jnp.asarray(count, accumulate)
    value = checks.array("count", value)
    checks.shape("count", value, (), "a number or a scalar array")
    checks.dtype("count", value, (jnp.float32, jnp.float64, jnp.int32, jnp.int64))
    return value.astype(accumulate)
