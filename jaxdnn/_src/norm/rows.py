"""Normalisations over the features of an example: layer, RMS and adaptive layer normalisation, and their backward ops.

Letters: A the axes that are normalised, n how many elements they have, N the first axis, S the sizes along A.
"""

from __future__ import annotations

from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import checks
from jaxdnn._src.core.annotations import PerAxis
from jaxdnn._src.core.explain import public
from jaxdnn._src.norm import arguments


@public
def layer_norm(
    x: ArrayLike,
    /,
    *,
    axis: PerAxis = -1,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
    zero_centred: bool = False,
    return_statistics: bool = False,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array | tuple[Array, Array, Array]:
    """Layer normalisation: subtracts the mean over some axes, divides by the deviation, scales and shifts.

    μ = Σ_A x / n        σ² = Σ_A (x - μ)² / n        y = (x - μ) / √(σ² + eps) scale + bias

    Args:
      x: float32, bfloat16, float16 or float64, of any shape.
      axis: the axes A, one or several. Every element along them counts, zeros that only fill channels up too.
      scale: S, the sizes of x along A in ascending order of the axes; None is 1. Of x's dtype or any that the
        accumulator holds.
      bias: likewise; None is 0.
      eps: added to the variance; a number.
      zero_centred: whether the scale is stored as its distance from 1, so that the factor is 1 + scale.
      return_statistics: whether to return the mean and the inverse deviation too, for `layer_norm_dgrad`.
      out_dtype: y's dtype; None is that of x.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that the engine must guarantee, as within `jaxdnn.determinism`.

    Returns:
      y, in x's shape; with `return_statistics` also the mean and 1 / √(σ² + eps), in x's shape without A.

    Differentiation: any order, forward and reverse, in x, scale and bias. Gradients in scale and bias are added over
      the batch, so their level is run_to_run. Second derivatives are XLA's, run_to_run too.

    Numerics: in float32 (float64 for float64), converted once. The mean is subtracted before squaring, for float32
      and float64 twice, so a mean of 10⁴ deviations costs y no digit; the saved mean is rounded. Squares are added as
      they are (a scale for each row would take another reduction, `lp_normalize` has one): Σ (x - μ)² must lie below
      2^128, so deviations below 1.8e19 / √n. Beyond, the inverse deviation is 0 or NaN, y the bias alone or NaN, and dx
      and dscale are 0 or NaN. With an eps of 0 deviations must be above 2^-62, or their squares may count as 0 and y is
      not finite; a variance far below eps counts nothing anyway. The sums of |x| and, in gradients, of |dy scale| and
      of |dy scale h|, with h = (x - μ) / √(σ² + eps), must lie below 2^128 as well. In float64 the limits are 2^1024
      and 2^-510.

    Raises:
      ValueError, TypeError: arguments that do not fit.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> dnn.layer_norm(jnp.array([[7.0, 3.0]]), eps=0.0, scale=jnp.array([2.0, 0.5]), bias=jnp.ones(2)).tolist()
      [[3.0, 0.5]]

    Sources: Ba, Kiros and Hinton, arXiv:1607.06450; cuDNN's norm_forward, mode LAYER; PyTorch's layer_norm, ONNX's
      LayerNormalization. cuDNN's INV_VARIANCE is the inverse deviation returned here.
    """
    x = checks.array("x", x)
    view = arguments.rows(x, axis)
    spec = arguments.spec(view, x, out_dtype, eps, engine, determinism)
    return arguments.normalised(view, x, scale, bias, spec, return_statistics, zero_centred=zero_centred)


@public
def layer_norm_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    /,
    *,
    axis: PerAxis = -1,
    scale: ArrayLike | None = None,
    mean: ArrayLike | None = None,
    rstd: ArrayLike | None = None,
    eps: float = 1e-5,
    zero_centred: bool = False,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of layer normalisation in its input, scale and bias.

    dx = r (g - Σ_A g / n - h Σ_A g h / n)        dscale = Σ dy h        dbias = Σ dy

    with r = 1 / √(σ² + eps), h = (x - μ) r, g = scale dy, and the last two sums over all axes but A.

    Args:
      dy: the gradient in the result of `layer_norm`, x's shape.
      x: the input of `layer_norm`.
      axis, scale, eps, zero_centred: as they were given to `layer_norm`.
      mean: the saved mean, x's shape without A, float32 (float64 for float64).
      rstd: the saved inverse deviation. Where neither is given, both are computed again from x and eps.
      out_dtype: dx's dtype; None is that of x.
      engine, determinism: see `layer_norm`.

    Returns:
      dx, in x's shape; dscale and dbias, of shape S, float32 (float64 for float64), also where there was no scale.

    Differentiation: any order, in dy, x, scale, mean and rstd; these two count as independent of x.
      `mean` must be that of this x: for float32 and float64 it is found again from x, so its derivative is 0; for
      bfloat16 and float16 it is subtracted as it is, and its derivative is that of the formula.

    Numerics: as `layer_norm`; the rounding error of the saved mean is corrected if x is float32 or float64.
      dscale and dbias add over the batch: run_to_run, whatever level dx has.

    Raises:
      ValueError, TypeError, NotImplementedError: as `layer_norm`.

    Example:
      >>> dx, dscale, dbias = dnn.layer_norm_dgrad(jnp.ones((2, 3)), jnp.eye(2, 3))
      >>> dx.shape, dbias.tolist()
      ((2, 3), [2.0, 2.0, 2.0])

    Sources: cuDNN's norm_backward, mode LAYER; PyTorch's native_layer_norm_backward.
    """
    x = checks.array("x", x)
    view = arguments.rows(x, axis)
    spec = arguments.spec(view, x, out_dtype, eps, engine, determinism)
    return arguments.backward(view, dy, x, scale, mean, rstd, spec, zero_centred)


@public
def rms_norm(
    x: ArrayLike,
    /,
    *,
    axis: PerAxis = -1,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-6,
    zero_centred: bool = False,
    return_statistics: bool = False,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array | tuple[Array, Array]:
    """RMS normalisation: divides by the root of the mean square over some axes, scales and shifts.

    y = x / √(Σ_A x² / n + eps) scale + bias

    Args:
      x: float32, bfloat16, float16 or float64, of any shape.
      axis: the axes A, one or several. cuDNN tells them from the shape of the scale: (1, C, 1, 1) is C alone.
      scale, bias: S, the sizes of x along A in ascending order of the axes; None is 1, and 0.
      eps: added to the mean square; a number.
      zero_centred: whether the scale is stored as its distance from 1, as in Gemma.
      return_statistics: whether to return the inverse root too, for `rms_norm_dgrad`.
      out_dtype: y's dtype; None is that of x.
      engine, determinism: see `layer_norm`.

    Returns:
      y, in x's shape; with `return_statistics` also 1 / √(Σ_A x² / n + eps), in x's shape without A.

    Differentiation: any order, forward and reverse, in x, scale and bias; levels as `layer_norm`.

    Numerics: in float32 (float64 for float64), converted once. Σ x² has the range of Σ (x - μ)² in `layer_norm`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `layer_norm`.

    Example:
      >>> dnn.rms_norm(jnp.array([[3.0, -3.0]]), eps=0.0, scale=jnp.array([1.0, 0.5]), zero_centred=True).tolist()
      [[2.0, -1.5]]

    Sources: Zhang and Sennrich, arXiv:1910.07467; cuDNN's norm_forward, mode RMS; PyTorch's rms_norm, whose eps of
      None is the smallest step from 1 of x's dtype; ONNX's RMSNormalization.
    """
    x = checks.array("x", x)
    view = arguments.rows(x, axis)
    spec = arguments.spec(view, x, out_dtype, eps, engine, determinism, centred=False)
    return arguments.normalised(view, x, scale, bias, spec, return_statistics, zero_centred=zero_centred)


@public
def rms_norm_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    /,
    *,
    axis: PerAxis = -1,
    scale: ArrayLike | None = None,
    rstd: ArrayLike | None = None,
    eps: float = 1e-6,
    zero_centred: bool = False,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of RMS normalisation in its input, scale and bias.

    dx = r (g - h Σ_A g h / n)        dscale = Σ dy h        dbias = Σ dy

    with r = 1 / √(Σ_A x² / n + eps), h = x r, g = scale dy, and the last two sums over all axes but A.

    Args:
      dy: the gradient in the result of `rms_norm`, x's shape.
      x: the input of `rms_norm`.
      axis, scale, eps, zero_centred: as they were given to `rms_norm`.
      rstd: the saved inverse root, x's shape without A; None: computed again from x and eps.
      out_dtype: dx's dtype; None is that of x.
      engine, determinism: see `layer_norm`.

    Returns:
      dx, in x's shape; dscale and dbias, of shape S, float32 (float64 for float64).

    Differentiation: any order, in dy, x, scale and rstd, which counts as independent of x.

    Numerics: as `layer_norm_dgrad`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `layer_norm`.

    Example:
      >>> dnn.rms_norm_dgrad(jnp.ones((2, 3)), jnp.eye(2, 3))[0].shape
      (2, 3)

    Sources: cuDNN's norm_backward, mode RMS.
    """
    x = checks.array("x", x)
    view = arguments.rows(x, axis)
    spec = arguments.spec(view, x, out_dtype, eps, engine, determinism, centred=False)
    return arguments.backward(view, dy, x, scale, None, rstd, spec, zero_centred)


@public
def adaptive_layer_norm(
    x: ArrayLike,
    scale: ArrayLike,
    bias: ArrayLike,
    /,
    *,
    axis: PerAxis = -1,
    eps: float = 1e-5,
    zero_centred: bool = False,
    return_statistics: bool = False,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array | tuple[Array, Array, Array]:
    """Layer normalisation whose scale and bias differ from example to example.

    y[n] = (x[n] - μ) / √(σ² + eps) scale[n] + bias[n]

    Args:
      x: float32, bfloat16, float16 or float64, of any shape, examples along the first axis.
      scale: (N, *S): for every example the sizes of x along the axes A, in their ascending order.
      bias: likewise.
      axis: the axes A; not the first.
      eps: added to the variance; a number.
      zero_centred: whether the scale is stored as its distance from 1, as the modulation of diffusion transformers.
      return_statistics: whether to return the mean and the inverse deviation too.
      out_dtype: y's dtype; None is that of x.
      engine, determinism: see `layer_norm`.

    Returns:
      y, in x's shape; with `return_statistics` also the mean and 1 / √(σ² + eps), in x's shape without A.

    Differentiation: any order, forward and reverse, in x, scale and bias.

    Numerics: as `layer_norm`; gradients in scale and bias add within an example only.

    Raises:
      ValueError, TypeError, NotImplementedError: as `layer_norm`.

    Example:
      >>> x, scale, bias = jnp.ones((2, 5, 3)), jnp.zeros((2, 3)), jnp.ones((2, 3))
      >>> float(dnn.adaptive_layer_norm(x, scale, bias, zero_centred=True).max())
      1.0

    Sources: cuDNN's norm_forward, mode ADA_LAYER; Peebles and Xie, arXiv:2212.09748.
    """
    x = checks.array("x", x)
    view = arguments.samples(x, axis)
    spec = arguments.spec(view, x, out_dtype, eps, engine, determinism)
    return arguments.normalised(view, x, scale, bias, spec, return_statistics, zero_centred=zero_centred)


@public
def adaptive_layer_norm_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    scale: ArrayLike,
    /,
    *,
    axis: PerAxis = -1,
    mean: ArrayLike | None = None,
    rstd: ArrayLike | None = None,
    eps: float = 1e-5,
    zero_centred: bool = False,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of adaptive layer normalisation in its input and in every example's scale and bias.

    dx as `layer_norm_dgrad`        dscale[n] = Σ dy[n] h[n]        dbias[n] = Σ dy[n]

    Args:
      dy: the gradient in the result of `adaptive_layer_norm`, x's shape.
      x, scale: as they were given to `adaptive_layer_norm`.
      axis, eps, zero_centred: likewise.
      mean, rstd: the saved statistics, x's shape without A; where neither is given they are computed again.
      out_dtype: dx's dtype; None is that of x.
      engine, determinism: see `layer_norm`.

    Returns:
      dx, in x's shape; dscale and dbias, (N, *S), float32 (float64 for float64).

    Differentiation: as `layer_norm_dgrad`.

    Numerics: as `layer_norm_dgrad`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `layer_norm`.

    Example:
      >>> dy, x = jnp.ones((2, 5, 3)), jnp.ones((2, 5, 3))
      >>> dnn.adaptive_layer_norm_dgrad(dy, x, jnp.ones((2, 3)))[2].tolist()
      [[5.0, 5.0, 5.0], [5.0, 5.0, 5.0]]

    Sources: cuDNN's norm_backward, mode ADA_LAYER.
    """
    x = checks.array("x", x)
    view = arguments.samples(x, axis)
    spec = arguments.spec(view, x, out_dtype, eps, engine, determinism)
    return arguments.backward(view, dy, x, scale, mean, rstd, spec, zero_centred)
