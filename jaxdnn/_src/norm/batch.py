"""Batch normalisation: training, inference and the backward op.

Letters: N batch, C channels, H, W spatial sizes; m the number of elements that a statistic is taken over: N H W
(mode "spatial") or N ("per_activation"), times the devices where the statistics are synchronised.
"""

from __future__ import annotations

import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, export
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.activation import epilogues
from jaxdnn._src.core import blending, checks, frames
from jaxdnn._src.core.annotations import Scale
from jaxdnn._src.core.blending import Types
from jaxdnn._src.core.determinism import require
from jaxdnn._src.core.eager import data
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.rounding import at_edges, joined, nearest, product, reciprocal, root, rounded
from jaxdnn._src.norm import arguments
from jaxdnn._src.norm import devices as several
from jaxdnn._src.norm.arguments import View
from jaxdnn._src.norm.devices import AxisName


def weight(momentum: Any) -> float | None:
    """A momentum as an operand of a call's program; what is no weight between 0 and 1 is none."""
    found = blending.operand(momentum)
    return found if found is not None and 0 < found < 1 else None


@public
@data(momentum=weight)
def batch_norm(
    x: ArrayLike,
    /,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    running_mean: ArrayLike | None = None,
    running_variance: ArrayLike | None = None,
    momentum: Scale = 0.1,
    eps: float = 1e-5,
    mode: str = "spatial",
    axis_name: AxisName = None,
    residual: ArrayLike | None = None,
    activation: str | tuple[str, float] | None = None,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    layout: str = "NHWC",
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """Batch normalisation in training: normalises by the batch's own statistics and updates the running ones.

    c = (x - μ) / √(σ² + eps) scale + bias        y = act(alpha c + beta prior + residual)
    running mean ← momentum μ + (1 - momentum) running mean
    running variance ← momentum σ² m / (m - 1) + (1 - momentum) running variance

    with μ = Σ x / m and σ² = Σ (x - μ)² / m.

    Args:
      x: (N, H, W, C) for layout NHWC; float32, bfloat16, float16 or float64.
      scale, bias: (C,), or in mode "per_activation" x's shape without N; None is 1, and 0.
      running_mean, running_variance: the running statistics, shaped like the scale. Where neither is given the batch's
        own mean and unbiased variance are returned for them, as a momentum of 1 would.
      momentum: the weight of the NEW statistic, as cuDNN's exponentialAverageFactor and PyTorch's momentum; Flax and
        Keras weigh the old one. A number or a scalar array. With 0 the new statistic is not read, with 1 the old.
      eps: added to the variance; a number.
      mode: "spatial", statistics over N, H and W for every channel, or "per_activation", over N alone.
      axis_name: a mesh axis, or several, inside shard_map (or pmap, vmap): statistics are those of all its devices.
      residual: added before the activation, x's shape.
      activation, alpha, beta, prior: see `conv`. alpha = 1, residual and activation="relu" are cuDNN's fused
        BN + add + relu.
      layout: the axes of x, y, residual and prior, see `conv`. Channels that only fill the last vector up are among the
        C: each has statistics of its own.
      out_dtype: the result's dtype; None is that of x.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that the engine must guarantee, as within `jaxdnn.determinism`.

    Returns:
      y, in x's shape; the batch's mean and 1 / √(σ² + eps), to be saved for `batch_norm_dgrad`; the new running mean
      and the new running variance, in the dtypes of the old.

    Differentiation: any order, forward and reverse, in all arrays, through all five results. An activation keeps y for
      it ("relu", "leaky_relu": where y rounds to 0 the slope is that of 0) or its slope in y's dtype. With alpha = 1
      the gradient that reaches the normalisation has y's dtype. But of bfloat16 and float16, channels last, "relu" and
      "swish" right behind the normalisation keep x alone: the gradient computes the slope again, in float32.

    Numerics: statistics, running ones too, in float32 (float64 for float64); y is converted once. The mean is
      subtracted before squaring; deviations have the range that they have in `layer_norm`.
      Synchronised, every device computes its own mean and centred second moment, and these
      are merged: Σ over the devices of their moments, and of the squares of their means' distances from the mean. Every
      element of y depends on the batch, so the level is run_to_run at most. With m = 1 the variance is 0 and there is
      no unbiased one: the new running variance is NaN, as with cuDNN (PyTorch refuses the call). With m = 0 mean and
      variance are NaN, and so are the new running statistics. With a momentum of 0 both stay what they were.

    Raises:
      ValueError, TypeError: arguments that do not fit.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> x = jnp.array([1.0, 3.0]).reshape(2, 1, 1, 1)
      >>> y, mean, rstd, running_mean, running_variance = dnn.batch_norm(x, eps=0.0)
      >>> y.ravel().tolist(), mean.tolist(), running_variance.tolist()
      ([-1.0, 1.0], [2.0], [2.0])

    Sources: Ioffe and Szegedy, arXiv:1502.03167; cuDNN's cudnnBatchNormalizationForwardTrainingEx, whose
      resultSaveInvVariance is the inverse deviation returned here; PyTorch's batch_norm and SyncBatchNorm; ONNX's
      BatchNormalization, whose momentum weighs the old statistic and whose running variance is the biased one.
    """
    frame = frames.frame(layout)
    x = frame.array("x", x)
    found, view = arguments.types(x, out_dtype), arguments.batches(frame, x, mode)
    behind = {"alpha": alpha, "beta": beta, "prior": prior, "residual": residual, "activation": activation}
    extras = arguments.epilogue(frame, x, found, **behind)
    # Right behind the normalisation some belong to the op, whose gradient then finds the slope again from x.
    own = None
    if extras is not None and not extras[1] and epilogues.is_one(extras[0].alpha) and axis_name is None:
        own = arguments.own_activation(view, x, extras[0].activation, found)
    extras = extras if own is None else None
    wide = found.out if extras is None else found.accumulate
    # The gradient that arrives here is converted to y's dtype, unless alpha may take it out of that dtype's range.
    narrow = found.out if extras is not None and epilogues.is_one(extras[0].alpha) else None
    given: dict[str, Any] = {"per_example": False, "converted": narrow, "activation": own}
    spec = arguments.spec(view, x, wide, eps, engine, determinism, **given)
    running = read_running(view, running_mean, running_variance, found)
    devices = 1 if axis_name is None else several.devices(axis_name)
    if axis_name is None:
        y, mean, rstd, variance = arguments.forward(view, x, scale, bias, spec)
    else:
        y, mean, rstd, variance = several.forward(view, x, scale, bias, spec, axis_name)
    y = nearest(y, found.out) if extras is None else _with_extras(extras, y, frame.layout.channel, found, narrow)
    unbiased = variance * _bessel(math.prod(view.shape[axis] for axis in view.axes) * devices, variance.dtype)
    mean, rstd, unbiased = (view.give_statistic(v) for v in (mean, rstd, unbiased))
    return frame.restore(y), mean, rstd, *updated_running(running, (mean, unbiased), momentum)


def _with_extras(
    extras: tuple[epilogues.Epilogue, list[Array]], y: Array, channel: int, found: Types, narrow: Any
) -> Array:
    """The epilogue, of y in the accumulator's dtype; its gradient may be converted to `narrow` or, if None, not.

    Behind a residual XLA would compute y again for those that use it, from all that it was computed from: it has to be
    stored for the next convolution, and so has its gradient, for the residual and the normalisation.
    """
    epilogue, operands = extras
    stored = epilogue.residual and epilogue.activation is not None
    # To NumPy a dtype equals None where it is float64. The one gradient that a joined sum has must fit both its terms.
    join = epilogue.residual and not epilogue.prior and narrow is not None and operands[0].dtype == narrow
    if join and jax.typeof(y).sharding == jax.typeof(operands[0]).sharding:
        y = joined(y, operands[0].astype(y.dtype), narrow)
        epilogue, operands = dataclasses.replace(epilogue, residual=False), []
    else:
        y = rounded(y)
    return epilogues.apply(epilogue, y, operands, channel=channel, out_dtype=found.out, stored=stored)


@public
def batch_norm_inference(
    x: ArrayLike,
    mean: ArrayLike,
    variance: ArrayLike,
    /,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
    mode: str = "spatial",
    residual: ArrayLike | None = None,
    activation: str | tuple[str, float] | None = None,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    layout: str = "NHWC",
    out_dtype: DTypeLike | None = None,
    determinism: str | None = None,
) -> Array:
    """Batch normalisation by given statistics.

    y = act(alpha ((x - mean) / √(variance + eps) scale + bias) + beta prior + residual)

    Args:
      x: (N, H, W, C) for layout NHWC; float32, bfloat16, float16 or float64.
      mean, variance: (C,), or in mode "per_activation" x's shape without N, as `batch_norm` keeps running ones.
      scale, bias: likewise; None is 1, and 0.
      eps: added to the variance; a number.
      mode: "spatial" or "per_activation".
      residual, activation, alpha, beta, prior, layout: see `batch_norm`.
      out_dtype: the result's dtype; None is that of x.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`; every element depends on its own
        inputs alone, so this is mesh_invariant.

    Returns:
      y, in x's shape.

    Differentiation: any order, forward and reverse, in all arrays.

    Numerics: element by element in float32 (float64 for float64), converted once; XLA's own formula.

    Raises:
      ValueError, TypeError, NotImplementedError: as `batch_norm`.

    Example:
      >>> dnn.batch_norm_inference(jnp.full((1, 1, 1, 1), 5.0), jnp.ones(1), jnp.full(1, 4.0), eps=0.0).item()
      2.0

    Sources: cuDNN's cudnnBatchNormalizationForwardInference. The graph API's batchnorm_inference takes the inverse
      deviation in place of the variance.
    """
    frame = frames.frame(layout)
    x = frame.array("x", x)
    found, view = arguments.types(x, out_dtype), arguments.batches(frame, x, mode)
    behind = {"alpha": alpha, "beta": beta, "prior": prior, "residual": residual, "activation": activation}
    extras = arguments.epilogue(frame, x, found, **behind)
    why = "compilers may fuse its products and sums"
    level = require("batch_norm_inference", determinism, "mesh_invariant", why)
    given = {name: view.parameter(name, v, found) for name, v in (("mean", mean), ("variance", variance))}
    given |= {name: view.parameter(name, v, found) for name, v in (("scale", scale), ("bias", bias)) if v is not None}
    small = jnp.asarray(arguments.epsilon(eps), found.accumulate)
    edge = ft.partial(at_edges, level)
    y = product(edge(x).astype(found.accumulate) - given["mean"], reciprocal(root(given["variance"] + small)))
    y = product(y, given["scale"]) if "scale" in given else y
    y = y + given["bias"] if "bias" in given else y
    if extras is not None:
        y = epilogues.apply(
            extras[0], y, edge(extras[1]), channel=frame.layout.channel, out_dtype=found.out, level=level
        )
    return frame.restore(edge(nearest(y, found.out)))


@public
def batch_norm_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    /,
    *,
    scale: ArrayLike | None = None,
    mean: ArrayLike | None = None,
    rstd: ArrayLike | None = None,
    y: ArrayLike | None = None,
    eps: float = 1e-5,
    mode: str = "spatial",
    axis_name: AxisName = None,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    alpha_param: Scale = 1.0,
    beta_param: Scale = 0.0,
    prior_dscale: ArrayLike | None = None,
    prior_dbias: ArrayLike | None = None,
    layout: str = "NHWC",
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, ...]:
    """The gradients of batch normalisation in training, in its input, scale and bias.

    dx = alpha scale r (dy - Σ dy / m - h Σ dy h / m) + beta prior
    dscale = alpha_param Σ dy h + beta_param prior_dscale        dbias = alpha_param Σ dy + beta_param prior_dbias

    with r = 1 / √(σ² + eps), h = (x - μ) r, and the sums over the elements of a statistic.

    Args:
      dy: the gradient in the result of `batch_norm`, x's shape.
      x: the input of `batch_norm`.
      scale, eps, mode, layout: as they were given to `batch_norm`.
      mean, rstd: the saved statistics, float32 (float64 for float64); where neither is given they are computed again.
      y: the result of `batch_norm` with activation "relu" (and a residual or none): then dy counts only where y > 0,
        and what is left of it is the gradient in the residual.
      axis_name: as it was given to `batch_norm`; dscale and dbias are then the sums over all devices, to which the
        priors are added once.
      alpha, beta, prior: the blend of dx, see `conv`; the prior has x's shape. alpha is not the one that was given to
        `batch_norm`: to differentiate through that, scale dy.
      alpha_param, beta_param, prior_dscale, prior_dbias: the blend of dscale and dbias, see `conv`; the priors have the
        scale's shape.
      out_dtype: dx's dtype; None is that of x.
      engine, determinism: see `batch_norm`.

    Returns:
      dx, in x's shape; dscale and dbias, in the scale's, float32 (float64 for float64); if y is given, dresidual too,
      in dy's dtype whatever out_dtype is.

    Differentiation: any order, in dy, x, scale, the priors, the blends' factors if they are arrays, mean and rstd;
      these two count as independent of x.
      `mean` must be that of this x: for float32 and float64 it is found again from x, so its derivative is 0; for
      bfloat16 and float16 it is subtracted as it is, and its derivative is that of the formula.

    Numerics: as `batch_norm`; run_to_run at most. Blends are computed in float32 (float64 for float64) before the one
      conversion. With a beta of 0 no prior is read.

    Raises:
      ValueError, TypeError, NotImplementedError: as `batch_norm`.

    Example:
      >>> dy = x = jnp.array([1.0, 3.0]).reshape(2, 1, 1, 1)
      >>> dx, dscale, dbias = dnn.batch_norm_dgrad(dy, x, eps=0.0)
      >>> dx.ravel().tolist(), dscale.tolist(), dbias.tolist()
      ([0.0, 0.0], [2.0], [4.0])

    Sources: cuDNN's cudnnBatchNormalizationBackwardEx, whose dz is dresidual and whose factors are alphaDataDiff,
      betaDataDiff, alphaParamDiff and betaParamDiff; PyTorch's native_batch_norm_backward.
    """
    frame = frames.frame(layout)
    x, dy = frame.array("x", x), frame.array("dy", dy)
    found, view = arguments.types(x, out_dtype), arguments.batches(frame, x, mode)
    dy = arguments.cotangent(dy, x, found)
    if y is not None:
        y = frame.array("y", y)
        checks.shape("y", y, x.shape, "that of x")
        checks.dtype("y", y, arguments.narrower(found.accumulate))
        dy = jnp.where(y > 0, dy, jnp.zeros_like(dy))
    prior = None if prior is None else frame.array("prior", prior)
    wide = found.out if blending.is_plain(alpha, beta) else found.accumulate
    spec = arguments.spec(view, x, wide, eps, engine, determinism, per_example=False)
    if axis_name is None:
        dx, ds, db = arguments.backward(view, dy, x, scale, mean, rstd, spec)
    else:
        dx, ds, db = several.backward(view, dy, x, scale, mean, rstd, spec, axis_name)
    dx = frame.restore(arguments.blended(dx, alpha, beta, prior, ("alpha", "beta", "prior"), found.out, found))
    ds, db = (
        arguments.blended(v, alpha_param, beta_param, given, ("alpha_param", "beta_param", name), v.dtype, found)
        for v, name, given in ((ds, "prior_dscale", prior_dscale), (db, "prior_dbias", prior_dbias))
    )
    return (dx, ds, db) if y is None else (dx, ds, db, frame.restore(dy))


# ---- running statistics ----------------------------------------------------------------------------------------------


def _bessel(m: Any, dtype: Any) -> Array:
    """m / (m - 1), which makes a variance of m elements unbiased; NaN for one element."""
    if export.is_symbolic_dim(m):
        several = jnp.asarray(m, dtype)
        return several / jnp.where(several > 1, several - 1, jnp.full_like(several, float("nan")))
    return jnp.asarray(m / (m - 1) if m > 1 else float("nan"), dtype)


def read_running(view: View, mean: Any, variance: Any, found: Types) -> tuple[Array, Array] | None:
    if (mean is None) != (variance is None):
        raise ValueError("`running_mean` and `running_variance` must be given both or neither, got one of them.")
    if mean is None:
        return None
    read = []
    for name, value in (("running_mean", mean), ("running_variance", variance)):
        value = checks.array(name, value)
        checks.shape(name, value, view.parameters, view.why)
        checks.dtype(name, value, arguments.narrower(found.accumulate))
        read.append(value)
    return read[0], read[1]


def updated_running(
    running: tuple[Array, Array] | None, new: tuple[Array, Array], momentum: Any
) -> tuple[Array, Array]:
    """momentum new + (1 - momentum) running; what has the weight 0 does not reach the result."""
    weight = blending.read_scale("momentum", momentum)
    if isinstance(weight, float) and not 0 <= weight <= 1:
        raise ValueError(f"`momentum` must be a number from 0 to 1, got {weight!r}.")
    if running is None:
        return new
    weight = jnp.asarray(weight).astype(new[0].dtype)
    part = blending.scaled_prior  # what has the weight 0 is not read: it may be NaN
    blended = [part(weight, n) + part(1 - weight, old.astype(n.dtype)) for n, old in zip(new, running, strict=True)]
    return blended[0].astype(running[0].dtype), blended[1].astype(running[1].dtype)
