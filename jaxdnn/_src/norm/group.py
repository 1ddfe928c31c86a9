"""Normalisations over the pixels of an image: group and instance normalisation, and their backward ops.

Letters: N batch, C channels, G groups, H, W spatial sizes; n the number of elements that a statistic is taken over.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import checks, frames, primitives
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.frames import Frame
from jaxdnn._src.norm import arguments


@dataclasses.dataclass(frozen=True)
class _Images:
    """Arrays in a layout, without the channels that only fill the last vector up: of `stored` the first `channels`."""

    frame: Frame
    stored: int
    channels: int

    def array(self, v: Array) -> Array:
        if not self.filled:
            return v
        v = primitives.evenly(v, self._with(v, self.channels))
        return lax.slice_in_dim(v, 0, self.channels, axis=self.frame.layout.channel)

    def restore(self, v: Array) -> Array:
        widths = [(0, self.filled if a == self.frame.layout.channel else 0) for a in range(v.ndim)]
        even = primitives.evenly(v, self._with(v, self.stored))
        return self.frame.restore(jnp.pad(even, widths) if self.filled else v)

    @property
    def filled(self) -> int:
        return self.stored - self.channels

    def _with(self, v: Array, channels: int) -> tuple[int, ...]:
        """v's shape with so many channels."""
        return tuple(channels if a == self.frame.layout.channel else n for a, n in enumerate(v.shape))


def _images(frame: Frame, x: Array, channels: Any) -> _Images:
    """Reads `channels`, which an array with channel vectors does not tell."""
    stored, vector = x.shape[frame.layout.channel], frame.given.vector
    if vector is None:
        if channels is not None and checks.integer("channels", channels) != stored:
            raise ValueError(f"`channels` must be None or the {stored} that x has, got {channels}.")
        return _Images(frame, stored, stored)
    if channels is None:
        raise ValueError(
            f"`channels` must be given for layout {frame.given.name}, where zeros may fill the last vector up: how "
            f"many of the {stored} channels of x there are, got None."
        )
    count, least = checks.integer("channels", channels), max(stored - vector + 1, 0)
    if not least <= count <= stored:
        raise ValueError(f"`channels` must be from {least} to {stored} for x, got {count}.")
    return _Images(frame, stored, count)


@public
def group_norm(
    x: ArrayLike,
    /,
    *,
    groups: int = 32,
    channels: int | None = None,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
    activation: str | tuple[str, float] | None = None,
    layout: str = "NHWC",
    return_statistics: bool = False,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array | tuple[Array, Array, Array]:
    """Group normalisation: mean and deviation over the pixels and the channels of a group, for every image.

    y[n,h,w,c] = act((x[n,h,w,c] - μ[n,g]) / √(σ²[n,g] + eps) scale[c] + bias[c])        g = ⌊c G / C⌋

    Args:
      x: (N, H, W, C) for layout NHWC; float32, bfloat16, float16 or float64.
      groups: G, which divides C.
      channels: C. A vectorised layout needs it, for its array does not tell it: further channels fill the last vector
        up. They are not read, and are 0 in the result. Of any other layout None is what x has.
      scale, bias: (C,); None is 1, and 0.
      eps: added to the variance; a number.
      activation: see `conv`.
      layout: the axes of x and y, see `conv`.
      return_statistics: whether to return the mean and the inverse deviation too, for `group_norm_dgrad`.
      out_dtype: y's dtype; None is that of x.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that the engine must guarantee, as within `jaxdnn.determinism`.

    Returns:
      y, in x's shape; with `return_statistics` also the mean and 1 / √(σ² + eps), (N, G).

    Differentiation: any order, forward and reverse, in x, scale and bias; levels as `layer_norm`.

    Numerics: as `layer_norm`, the range of deviations too. y is converted once, behind the activation, whose
      gradient keeps what it does in `batch_norm`; at levels that fix bits it is that of an op apart.

    Raises:
      ValueError, TypeError: arguments that do not fit.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> x = jnp.arange(8.0).reshape(1, 2, 1, 4)
      >>> y, mean, rstd = dnn.group_norm(x, groups=2, return_statistics=True)
      >>> mean.tolist()
      [[2.5, 4.5]]

    Sources: Wu and He, arXiv:1803.08494; PyTorch's group_norm, ONNX's GroupNormalization of opset 21 (that of opset
      18 has a scale a group). cuDNN's graph API lists mode GROUP and refuses it.
    """
    frame = frames.frame(layout)
    x = frame.array("x", x)
    images = _images(frame, x, channels)
    x = images.array(x)
    view = arguments.grouped(frame, x, groups)
    spec = arguments.spec(view, x, out_dtype, eps, engine, determinism)
    given = {"restore": images.restore, "activation": activation}
    return arguments.normalised(view, x, scale, bias, spec, return_statistics, **given)


@public
def group_norm_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    /,
    *,
    groups: int = 32,
    channels: int | None = None,
    scale: ArrayLike | None = None,
    mean: ArrayLike | None = None,
    rstd: ArrayLike | None = None,
    eps: float = 1e-5,
    layout: str = "NHWC",
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of group normalisation in its input, scale and bias.

    dx = r (g - Σ g / n - h Σ g h / n)        dscale[c] = Σ_{n,h,w} dy h        dbias[c] = Σ_{n,h,w} dy

    with r = 1 / √(σ² + eps), h = (x - μ) r, g = scale dy, and the sums of dx over a group's pixels and channels.

    Args:
      dy: the gradient in the result of `group_norm`, x's shape.
      x: the input of `group_norm`.
      groups, channels, scale, eps, layout: as they were given to `group_norm`.
      mean, rstd: the saved statistics, (N, G), float32 (float64 for float64); where neither is given they are computed
        again.
      out_dtype: dx's dtype; None is that of x.
      engine, determinism: see `group_norm`.

    Returns:
      dx, in x's shape; dscale and dbias, (C,), float32 (float64 for float64).

    Differentiation: as `layer_norm_dgrad`.

    Numerics: as `layer_norm_dgrad`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `group_norm`.

    Example:
      >>> dy, x = jnp.ones((1, 2, 1, 4)), jnp.arange(8.0).reshape(1, 2, 1, 4)
      >>> dnn.group_norm_dgrad(dy, x, groups=2)[2].tolist()
      [2.0, 2.0, 2.0, 2.0]

    Sources: PyTorch's native_group_norm_backward.
    """
    frame = frames.frame(layout)
    x, dy = frame.array("x", x), frame.array("dy", dy)
    checks.shape("dy", dy, x.shape, "that of x")
    images = _images(frame, x, channels)
    x, dy = images.array(x), images.array(dy)
    view = arguments.grouped(frame, x, groups)
    spec = arguments.spec(view, x, out_dtype, eps, engine, determinism)
    dx, ds, db = arguments.backward(view, dy, x, scale, mean, rstd, spec)
    return images.restore(dx), ds, db


@public
def instance_norm(
    x: ArrayLike,
    /,
    *,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    eps: float = 1e-5,
    activation: str | tuple[str, float] | None = None,
    layout: str = "NHWC",
    return_statistics: bool = False,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array | tuple[Array, Array, Array]:
    """Instance normalisation: mean and deviation over the pixels, for every image and channel.

    y[n,h,w,c] = act((x[n,h,w,c] - μ[n,c]) / √(σ²[n,c] + eps) scale[c] + bias[c])

    Args:
      x: (N, H, W, C) for layout NHWC; float32, bfloat16, float16 or float64.
      scale, bias: (C,); None is 1, and 0.
      eps: added to the variance; a number.
      activation: see `conv`.
      layout: the axes of x and y, see `conv`. Channels that only fill the last vector up are among the C: each has
        statistics of its own, and is its bias in the result.
      return_statistics: whether to return the mean and the inverse deviation too, for `instance_norm_dgrad`.
      out_dtype: y's dtype; None is that of x.
      engine, determinism: see `group_norm`.

    Returns:
      y, in x's shape; with `return_statistics` also the mean and 1 / √(σ² + eps), (N, C).

    Differentiation: any order, forward and reverse, in x, scale and bias; levels as `layer_norm`.

    Numerics: as `layer_norm`, the range of deviations too. An image of one pixel has no variance: y is the bias.

    Raises:
      ValueError, TypeError, NotImplementedError: as `group_norm`.

    Example:
      >>> dnn.instance_norm(jnp.array([[[[1.0]], [[3.0]]]]), eps=0.0).ravel().tolist()
      [-1.0, 1.0]

    Sources: Ulyanov, Vedaldi and Lempitsky, arXiv:1607.08022; cuDNN's norm_forward, mode INSTANCE; PyTorch's
      instance_norm without running statistics, ONNX's InstanceNormalization.
    """
    frame = frames.frame(layout)
    x = frame.array("x", x)
    view = arguments.instances(frame, x)
    spec = arguments.spec(view, x, out_dtype, eps, engine, determinism)
    given = {"restore": frame.restore, "activation": activation}
    return arguments.normalised(view, x, scale, bias, spec, return_statistics, **given)


@public
def instance_norm_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    /,
    *,
    scale: ArrayLike | None = None,
    mean: ArrayLike | None = None,
    rstd: ArrayLike | None = None,
    eps: float = 1e-5,
    layout: str = "NHWC",
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, Array, Array]:
    """The gradients of instance normalisation in its input, scale and bias.

    As `group_norm_dgrad` with one channel a group.

    Args:
      dy: the gradient in the result of `instance_norm`, x's shape.
      x: the input of `instance_norm`.
      scale, eps, layout: as they were given to `instance_norm`.
      mean, rstd: the saved statistics, (N, C), float32 (float64 for float64); where neither is given they are computed
        again.
      out_dtype: dx's dtype; None is that of x.
      engine, determinism: see `group_norm`.

    Returns:
      dx, in x's shape; dscale and dbias, (C,), float32 (float64 for float64).

    Differentiation: as `layer_norm_dgrad`.

    Numerics: as `layer_norm_dgrad`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `group_norm`.

    Example:
      >>> dnn.instance_norm_dgrad(jnp.ones((1, 2, 2, 3)), jnp.ones((1, 2, 2, 3)))[2].tolist()
      [4.0, 4.0, 4.0]

    Sources: cuDNN's norm_backward, mode INSTANCE.
    """
    frame = frames.frame(layout)
    x, dy = frame.array("x", x), frame.array("dy", dy)
    view = arguments.instances(frame, x)
    spec = arguments.spec(view, x, out_dtype, eps, engine, determinism)
    dx, ds, db = arguments.backward(view, dy, x, scale, mean, rstd, spec)
    return frame.restore(dx), ds, db
