"""Deformable convolution: `deform_conv`.

The samples of every window are laid out beside each other, as an image of R S times as many pixels as the result has. A
convolution whose stride is its window reads each of them once, so that its engines serve, with all that they guarantee.
"""

from __future__ import annotations

import functools as ft
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.conv.api import conv
from jaxdnn._src.core import blending, checks, frames, primitives, windows
from jaxdnn._src.core.annotations import Activation, Padding, PerAxis
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.frames import Frame
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import at_edges, product, rounded
from jaxdnn._src.core.windows import Window
from jaxdnn._src.sampling.primitive import SampleSpec
from jaxdnn._src.sampling.taps import Rule

OUTSIDE = Rule("linear", "zeros", False, "pixel", "ij", 0.0)


@public
def deform_conv(
    x: ArrayLike,
    offsets: ArrayLike,
    w: ArrayLike,
    /,
    *,
    mask: ArrayLike | None = None,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    groups: int = 1,
    layout: str = "NHWC",
    filter_layout: str | None = None,
    bias: ArrayLike | None = None,
    activation: Activation = None,
    accumulate: DTypeLike | None = None,
    precision: str | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Convolves with windows whose taps are moved: deformable convolution, and with a mask its second version.

    c[n,p,q,k] = Σ_{r,s,i} m[n,p,q,r,s] x[n, i] at (p u + r d - a + δ, q v + s e - b + ε) w[r, s, i, k]
    y = act(c + bias)        with (δ, ε) = offsets[n,p,q,r,s], and m = 1 without a mask

    The letters are those of `conv`. x at a place between its pixels is bilinear (linear, trilinear), and 0 outside.

    Args:
      x: (N, H, W, C) for layout NHWC; one to three spatial axes, d of them; float32, bfloat16, float16 or float64.
      offsets: (N, P, Q, D R S d), in pixels: for each of D groups of C / D channels, and each tap in row-major order, d
        numbers in the order of the axes, (δ, ε). D follows from the shape. float32, bfloat16, float16 or float64,
        whatever x is.
      w: (R, S, C/G, K) for filter layout HWIO; the dtype of x.
      mask: None, or (N, P, Q, D R S): the factor of every tap; a float dtype too. Whoever wants it between 0 and 1
        applies a sigmoid.
      stride, padding, dilation, groups: of the window that is moved, see `conv`; groups need not fit D.
      layout: the axes of x, offsets, mask and the result, without vectors of channels; filter_layout: those of w.
      bias, activation, accumulate, precision, out_dtype: see `conv`.
      engine: None, or the name of the engine that must serve the convolution.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, (N, P, Q, K) for NHWC, with P and Q as for `conv`.

    Differentiation: any order, in x, offsets, mask, w and bias. In offsets it is that of `grid_sample` in places in
      pixels: at a pixel's centre that on the side of larger coordinates. The gradient in x sorts and gathers: there is
      no scatter and no atomic addition.

    Numerics: places and weights, times the mask, in float32 (float64 if x or offsets are), each step rounded; a sample
      is rounded to the dtype of x, and convolved as `conv` says. R S times the memory of x are taken for the samples.
      Determinism: the level of the convolution, gradients in x, offsets and mask "mesh_invariant" at most. A pixel of
      weight 0, and one behind a mask of 0, is not read; a NaN offset makes its sample NaN and sends no gradient to x.

    Raises:
      ValueError: shapes that do not fit, an option out of range. TypeError: a dtype that is not served.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> x, w = jnp.arange(5.0).reshape(1, 5, 1), jnp.ones((1, 1, 1))
      >>> dnn.deform_conv(x, jnp.full((1, 5, 1), 0.5), w, layout="NWC")[0, :, 0].tolist()
      [0.5, 1.5, 2.5, 3.5, 2.0]

    Sources: Dai et al., arXiv:1703.06211; Zhu et al., arXiv:1811.11168 (the mask). torchvision's deform_conv2d and
      ONNX's DeformConv have "NCHW", and offsets and masks of the same order.
    """
    frame = frames.frame(layout, filter_layout)
    if frame.given.vector is not None:
        raise ValueError(f"`layout` must be one without vectors of channels, got {layout!r}.")
    x, w = blending.array("x", x, determinism), checks.array("w", w)
    checks.dtype("x", x, checks.FLOATS)
    frame.array("x", x)
    taps = [frame.filter_shape("w", w.shape)[axis] for axis in frame.filter_layout.spatial]
    axes = frame.layout
    sizes = [x.shape[axis] for axis in axes.spatial]
    if min(sizes) < 1 or min(taps) < 1:
        raise ValueError(
            f"`x` and `w` must have at least one element along every spatial axis, got {sizes} and {taps}."
        )
    window = windows.window(stride=stride, padding=padding, dilation=dilation, sizes=sizes, taps=taps)
    if min(window.out) < 0:
        raise ValueError(f"`w` must fit into the padded `x`, got taps {tuple(taps)} for sizes {tuple(sizes)}.")
    moved, many = _moved("offsets", offsets, frame, x, window, len(sizes), None)
    factor = None if mask is None else _moved("mask", mask, frame, x, window, 1, many)[0][..., 0]
    if x.shape[axes.channel] % many:
        raise ValueError(
            f"`offsets` must be those of groups that divide the {x.shape[axes.channel]} channels of `x`, got {many}."
        )
    if max(math.prod(sizes), math.prod(moved.shape[2:-1]) << len(sizes)) > checks.LARGEST - 2:
        raise ValueError(f"`x` and `offsets` must have fewer than 2^31 pixels and taps an image, got {sizes}.")
    samples = _samples(x, moved, factor, frame, window, many, required(determinism))
    return conv(
        samples.astype(x.dtype),
        w,
        stride=taps,
        groups=groups,
        layout=layout,
        filter_layout=filter_layout,
        bias=bias,
        activation=activation,
        accumulate=accumulate,
        precision=precision,
        out_dtype=out_dtype,
        engine=engine,
        determinism=determinism,
    )


def _moved(
    name: str, value: Any, frame: Frame, x: Array, window: Window, numbers: int, many: int | None
) -> tuple[Array, int]:
    """Offsets or the mask as (N, D, P R, Q S, numbers), and D, in which the windows stand beside each other."""
    value = checks.array(name, value)
    checks.dtype(name, value, checks.FLOATS)
    axes, each = frame.layout, math.prod(window.taps) * numbers
    frame.array(name, value)
    c = value.shape[axes.channel]
    found = c // each if many is None else many
    expected = axes.shape(x.shape[axes.batch], window.out, found * each)
    if c % each or found < 1 or tuple(value.shape) != expected:
        wanted = f"D times {each}" if many is None else f"{many} times {each}"
        raise ValueError(
            f"`{name}` must have the sizes of the result, {window.out}, and {wanted} channels, {numbers} for each of "
            f"{math.prod(window.taps)} taps in layout {axes.name}, got shape {checks.shown(tuple(value.shape))}."
        )
    d = len(window.taps)
    canonical = (axes.batch, *axes.spatial, axes.channel)

    def beside(v: Array) -> Array:
        v = jnp.transpose(v, canonical)
        v = v.reshape(*v.shape[:-1], found, *window.taps, numbers)
        pairs = (axis for i in range(d) for axis in (1 + i, 2 + d + i))
        v = jnp.transpose(v, (0, 1 + d, *pairs, v.ndim - 1))
        sizes = (p * r for p, r in zip(window.out, window.taps, strict=True))
        return v.reshape(v.shape[0], found, *sizes, numbers)

    given = tuple("n" if i == axes.batch else f"i{i}" for i in range(value.ndim))
    factors = lambda v: Factors((given,), (("n", "g", *(f"o{i}" for i in range(d)), "z"),), ("n",))
    return primitives.composed(beside, factors, rounded(value)), found


def _samples(
    x: Array, moved: Array, factor: Array | None, frame: Frame, window: Window, many: int, level: str
) -> Array:
    """x at every tap of every window, in x's layout, as an image of which each window is a block."""
    wide = blending.accumulator(x.dtype)
    moved = moved.astype(max(wide, np.dtype(moved.dtype), key=lambda dtype: dtype.itemsize))
    axes, d = frame.layout, len(window.taps)
    canonical = (axes.batch, *axes.spatial, axes.channel)
    along = zip(window.out, window.taps, window.stride, window.dilation, window.padding, strict=True)
    starts = [
        (np.arange(p)[:, None] * stride - low + np.arange(r) * dilation).reshape(-1)
        for p, r, stride, dilation, (low, _) in along
    ]
    here = np.stack(np.meshgrid(*starts, indexing="ij"), -1)[None, None]
    here = jnp.broadcast_to(jnp.asarray(here, moved.dtype), moved.shape)
    index, weights = OUTSIDE.taps(rounded(moved + primitives.placed_like(here, moved)), window.sizes)
    if factor is not None:
        weights = product(weights, jnp.stack([factor.astype(weights.dtype)] * weights.shape[-1], -1))

    def grouped(x: Array) -> Array:
        x = jnp.transpose(x, canonical)
        x = x.reshape(*x.shape[:-1], many, x.shape[-1] // many)
        return jnp.moveaxis(x, -2, 1)

    def joined(y: Array) -> Array:
        y = jnp.moveaxis(y, 1, -2)
        y = y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1])
        return jnp.transpose(y, [int(axis) for axis in np.argsort(canonical)])

    image = tuple("n" if i == axes.batch else f"i{i}" for i in range(x.ndim))
    apart = ("n", "g", *(f"o{i}" for i in range(d)), "c")
    x = primitives.composed(grouped, lambda x: Factors((image,), (apart,), ("n",)), x.astype(wide))
    spec = SampleSpec(window.sizes, None, level)
    y = primitives.call("grid_sample", x, weights.astype(wide), index, spec=spec)
    back = ft.partial(primitives.composed, joined, lambda y: Factors((apart,), (image,), ("n",)))
    return at_edges(level, back(y))
