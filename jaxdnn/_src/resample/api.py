"""Changing the size of images: interpolation, and moving pixels between space and channels.

Letters: N batch, C channels, [D,] H, W spatial sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import blending, checks, frames, selection
from jaxdnn._src.core.annotations import PerAxis, Scale
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.rounding import real
from jaxdnn._src.resample import primitive
from jaxdnn._src.resample.band import BOUNDARIES, COORDINATES, METHODS, ROI, ROUNDINGS, ResampleSpec, Rule
from jaxdnn._src.tensor import folding

ORDERS = ("CRD", "DCR")


@public
def resample(
    x: ArrayLike,
    /,
    *,
    output_sizes: PerAxis | None = None,
    scale: float | Fraction | Sequence[float | Fraction] | None = None,
    method: str = "linear",
    coordinates: str = "half_pixel",
    rounding: str = "half_up",
    cubic_coefficient: float = -0.75,
    antialias: bool = False,
    boundary: str | None = None,
    roi: Sequence[tuple[float, float]] | None = None,
    extrapolation_value: float = 0.0,
    layout: str = "NHWC",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Resamples the spatial axes to other sizes, one after another.

    r[i] = Σ_j k((j - s_i) / t) x[j] / (Σ_j k((j - s_i) / t) if antialias or lanczos3, else 1) along each axis
    y = alpha r + beta prior

    with s_i = (i + 1/2) g - 1/2 for coordinates "half_pixel", i g for "asymmetric" and "align_corners"; g = in / out,
    or 1 / scale where scale is given, or (in - 1) / (out - 1) for "align_corners"; t = max(g, 1) if antialias, else 1.
    "half_pixel_symmetric" adds (in - out g) / 2; "pytorch_half_pixel" has s_0 = 0 where out is 1. With an axis' roi
    (a, b), "tf_crop_and_resize" has s_i = (in - 1) (a + i (b - a) / (out - 1)), or (in - 1) (a + b) / 2 where out is 1.

    Args:
      x: (N, H, W, C) for layout NHWC; float32, bfloat16, float16, float64; for "nearest" also float8_e4m3fn,
        float8_e5m2, int8, uint8, int32; for the others also int8 and uint8.
      output_sizes: the spatial sizes of the result, one integer or one per spatial axis.
      scale: instead, multiples of the sizes of x, numbers above zero (`fractions.Fraction` is exact): out = ⌊in scale⌋.
      method: "nearest", x[round(s_i)]; "linear", k(v) = max(1 - |v|, 0), which is bilinear over two axes and trilinear
        over three; "cubic", k(v) = (a + 2)|v|³ - (a + 3)|v|² + 1 up to 1 and a|v|³ - 5a|v|² + 8a|v| - 4a up to 2;
        "lanczos3", k(v) = sinc(v) sinc(v / 3) up to 3.
      coordinates: "half_pixel"; "align_corners", where the first and the last elements meet; "asymmetric";
        "half_pixel_symmetric", where a result whose size `scale` does not give exactly lies around the middle of x, and
        which for output_sizes is "half_pixel"; "pytorch_half_pixel", where one result alone is the first element; or
        "tf_crop_and_resize", where the first and the last result are the ends of `roi`.
      rounding: of "nearest": "half_up", "half_down", "floor" or "ceil".
      cubic_coefficient: a.
      antialias: whether the kernel widens where there are fewer results than elements; needs "half_pixel".
      boundary: what stands outside of x: "edge", its nearest element; "renormalise", nothing, and the weights within
        are scaled to a sum of 1; "zero". None is "edge", or with antialias "renormalise".
      roi: for "tf_crop_and_resize" a pair (start, end) for each spatial axis, numbers known when traced: 0 is the first
        element, 1 the last. They may lie outside, and end may be before start.
      extrapolation_value: r for "tf_crop_and_resize" where s_i < 0 or s_i > in - 1 along any axis.
      layout: the axes of x, prior and the result, see `conv`.
      alpha, beta, prior: the blend, see `conv`; prior has the result's shape.
      out_dtype: the result's dtype; None is that of x.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, (N, H', W', C) for NHWC.

    Differentiation: any order, in x, prior, and alpha and beta if they are arrays. The gradient in x gathers and adds
      in one order (`resample_dgrad`): it is as deterministic as the result.

    Numerics: coordinates are exact and weights computed in float64, then rounded to float32 (float64 for float64);
      products are added in it, tap by tap, one axis after another, and the result is converted once. An element of
      weight 0 is not read: infinity and NaN do not spread to neighbouring results. "nearest" copies. Every product
      is rounded before it is added: determinism level "portable", the gradient's too.

    Raises:
      ValueError: output_sizes, a scale or an option out of range. TypeError: a dtype that is not served.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> dnn.resample(jnp.array([[[0.0], [8.0]]]), output_sizes=4, layout="NWC")[0, :, 0].tolist()
      [0.0, 2.0, 6.0, 8.0]

    Sources: cuDNN's resample forward operation (nearest, bilinear). PyTorch's interpolate: mode "nearest" is "nearest"
      with "asymmetric" and "floor", "nearest-exact" is "nearest" as it stands here, "bicubic" is "cubic" (with
      antialias its a is -0.5). jax.image.resize: antialias is on, its cubic has a = -0.5 and boundary "renormalise".
      TensorFlow's resize and Pillow: antialias as here, a = -0.5. ONNX's Resize: its names for coordinates and rounding
      are these; round_prefer_floor, its default, is "half_down", and round_prefer_ceil "half_up". Its antialias=1 is
      antialias=True with boundary "edge", or with exclude_outside=1 "renormalise". Its roi has all starts first, here
      pairs of the spatial axes alone; TensorFlow's crop_and_resize is "tf_crop_and_resize" of one box. Keys (1981),
      "Cubic convolution interpolation for digital image processing".
    """
    frame = frames.frame(layout)
    given = blending.array("x", x, determinism)
    plain = frame.array("x", given)
    _check_dtype(given, method)
    before = tuple(plain.shape[axis] for axis in frame.layout.spatial)
    after, ratios = _sizes(before, output_sizes, scale)
    checks.countable("`resample`", (plain.shape[frame.layout.batch], *after, plain.shape[frame.layout.channel]))
    options = (method, coordinates, rounding, cubic_coefficient, antialias, boundary)
    rules = _rules(before, after, ratios, options, roi, scale)
    r = _along_axes(frame, plain, rules, engine, determinism, transposed=False)
    y = frame.restore(_extrapolated(frame, r, rules, extrapolation_value))
    out = blending.out_dtype(out_dtype, given)
    blend = {"alpha": alpha, "beta": beta, "prior": prior}
    return blending.blend(y, **blend, out=out, dtypes=(given.dtype,), level=required(determinism))


@public
def resample_dgrad(
    dy: ArrayLike,
    x_shape: Sequence[int],
    /,
    *,
    scale: float | Fraction | Sequence[float | Fraction] | None = None,
    method: str = "linear",
    coordinates: str = "half_pixel",
    rounding: str = "half_up",
    cubic_coefficient: float = -0.75,
    antialias: bool = False,
    boundary: str | None = None,
    roi: Sequence[tuple[float, float]] | None = None,
    layout: str = "NHWC",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """The gradient of `resample` in its input.

    dx[j] = alpha Σ_i w[i, j] dy[i] + beta prior[j], where w is the matrix with r = w x of `resample`, along each axis

    Args:
      dy: the gradient in the result, (N, H', W', C) for layout NHWC; float32, bfloat16, float16, float64.
      x_shape: the shape of x in `layout`.
      scale: as it was given to `resample`; None if output_sizes were.
      method, coordinates, rounding, cubic_coefficient, antialias, boundary, roi, layout: those of `resample`.
      alpha, beta, prior: the blend of dx, see `conv`; prior has x's shape.
      out_dtype, engine, determinism: see `resample`.

    Returns:
      dx, of shape `x_shape`.

    Differentiation: any order, in dy, prior, and alpha and beta if they are arrays; the gradient is `resample`.

    Numerics: as `resample`; the axes in reverse order. It gathers: there is no scatter and no atomic addition.

    Raises:
      ValueError, TypeError, NotImplementedError: as `resample`.

    Example:
      >>> dnn.resample_dgrad(jnp.ones((1, 4, 1)), (1, 2, 1), layout="NWC")[0, :, 0].tolist()
      [2.0, 2.0]

    Sources: cuDNN's resample backward operation. PyTorch's has no deterministic form on GPUs.
    """
    frame = frames.frame(layout)
    given = blending.array("dy", dy, determinism)
    checks.dtype("dy", given, checks.FLOATS)
    plain, shape = frame.array("dy", given), frame.array_shape("x_shape", x_shape)
    axes = frame.layout
    before, after = (tuple(s[axis] for axis in axes.spatial) for s in (shape, plain.shape))
    wanted, ratios = _sizes(before, after if scale is None else None, scale)
    checks.shape("dy", plain, axes.shape(shape[axes.batch], wanted, shape[axes.channel]), "as resample of x has")
    options = (method, coordinates, rounding, cubic_coefficient, antialias, boundary)
    rules = _rules(before, after, ratios, options, roi, scale)
    plain = _extrapolated(frame, plain, rules, 0.0)
    dx = frame.restore(_along_axes(frame, plain, rules, engine, determinism, transposed=True))
    out = blending.out_dtype(out_dtype, given)
    blend = {"alpha": alpha, "beta": beta, "prior": prior}
    return blending.blend(dx, **blend, out=out, dtypes=(given.dtype,), level=required(determinism))


def _along_axes(
    frame: frames.Frame, x: Array, rules: list[Rule], engine: Any, determinism: Any, *, transposed: bool
) -> Array:
    """Binds the primitive for each axis that changes."""
    acc = blending.accumulator(x.dtype)
    if np.issubdtype(acc, np.integer) and rules[0].method != "nearest":
        acc = np.dtype(np.float32)
    x = real(x, acc) if jnp.issubdtype(acc, jnp.floating) else x.astype(acc)
    pairs = list(zip(frame.layout.spatial, rules, strict=True))
    for axis, rule in reversed(pairs) if transposed else pairs:
        spec = ResampleSpec(rule, axis - x.ndim, transposed, engine, required(determinism))
        spec = selection.checked("resample", spec, x)
        x = x if rule.is_identity else primitive.bind("resample", x, spec=spec)
    return x


def _extrapolated(frame: frames.Frame, y: Array, rules: list[Rule], value: Any) -> Array:
    """y with a value where its place is outside of x."""
    number = checks.as_float("extrapolation_value", value)
    if rules[0].coordinates != ROI:
        if number != 0:
            raise ValueError(f"`extrapolation_value` must be 0 for coordinates other than {ROI!r}, got {number!r}.")
        return y
    fits = jnp.issubdtype(y.dtype, jnp.floating) or (number.is_integer() and _holds(y.dtype, number))
    if not fits:
        raise ValueError(f"`extrapolation_value` must be a number that {y.dtype.name} has, got {number!r}.")
    outside = np.zeros((1,) * y.ndim, bool)
    for axis, rule in zip(frame.layout.spatial, rules, strict=True):
        outside = outside | rule.outside.reshape([-1 if i == axis else 1 for i in range(y.ndim)])
    return jnp.where(outside, jnp.asarray(number, y.dtype), y) if outside.any() else y


def _holds(dtype: Any, number: float) -> bool:
    return jnp.iinfo(dtype).min <= number <= jnp.iinfo(dtype).max


def _check_dtype(x: Array, method: Any) -> None:
    checks.choice("method", method, METHODS)
    if method != "nearest":
        checks.dtype("x", x, (*checks.FLOATS, jnp.int8, jnp.uint8))


def _sizes(before: tuple[int, ...], sizes: Any, scale: Any) -> tuple[tuple[int, ...], tuple[Fraction, ...]]:
    """The sizes of the result, and the distance of two results in elements of x."""
    if (sizes is None) == (scale is None):
        raise ValueError(
            f"`output_sizes` or `scale` must be given, not both, got {checks.shown(sizes)} and {checks.shown(scale)}."
        )
    if min(before) < 1:
        raise ValueError(f"`x` must have at least one element along every spatial axis, got {before}.")
    if sizes is not None:
        after = checks.integers("output_sizes", sizes, len(before), minimum=1)
        return after, tuple(Fraction(n, m) for n, m in zip(before, after, strict=True))
    values = tuple(scale) if checks.is_sequence(scale) else (scale,) * len(before)
    if len(values) != len(before):
        raise ValueError(
            f"`scale` must be a number or {len(before)} numbers, one per spatial axis, got {checks.shown(scale)}."
        )
    factors = tuple(map(_fraction, values))
    after = tuple(math.floor(n * f) for n, f in zip(before, factors, strict=True))
    if min(after) < 1 or max(after) > checks.LARGEST:
        raise ValueError(
            f"`scale` must leave sizes from 1 to {checks.LARGEST}, got {checks.shown(after)} for sizes {before}."
        )
    return after, tuple(1 / f for f in factors)


def _fraction(value: Any) -> Fraction:
    if isinstance(value, Fraction | int | float | np.integer | np.floating) and not isinstance(value, bool):
        exact = isinstance(value, Fraction | int)  # of any size, which a float need not hold
        number = value if exact else float(value)
        if (exact or math.isfinite(number)) and number > 0:
            return Fraction(number)
    raise ValueError(f"`scale` must be made of finite numbers above zero, got {checks.shown(value)}.")


def _rules(
    before: tuple[int, ...],
    after: tuple[int, ...],
    ratios: tuple[Fraction, ...],
    options: tuple[Any, ...],
    roi: Any,
    scale: Any,
) -> list[Rule]:
    """Checks the options, and makes a rule for every axis."""
    method, coordinates, rounding, cubic, antialias, boundary = options
    checks.choice("method", method, METHODS)
    checks.choice("coordinates", coordinates, COORDINATES)
    checks.choice("rounding", rounding, ROUNDINGS)
    checks.choice("boundary", boundary, (None, *BOUNDARIES))
    antialias = checks.flag("antialias", antialias)
    if antialias and (coordinates != "half_pixel" or method == "nearest"):
        raise ValueError(
            f"`antialias` needs coordinates 'half_pixel' and a method other than 'nearest', got {coordinates!r} and "
            f"{method!r}."
        )
    cubic = checks.as_float("cubic_coefficient", cubic)
    if not math.isfinite(cubic):
        raise ValueError(f"`cubic_coefficient` must be finite, got {cubic!r}.")
    boundary = boundary or ("renormalise" if antialias else "edge")
    common = Rule(1, 1, Fraction(1), method, coordinates, rounding, cubic, antialias, boundary)
    if (coordinates == ROI) != (roi is not None):
        raise ValueError(
            f"`roi` must be given for coordinates {ROI!r} and None for others, got {checks.shown(roi)} and "
            f"{coordinates!r}."
        )
    if roi is not None:
        return _within(common, before, after, roi, scale)
    if coordinates == "align_corners":
        ratios = tuple(Fraction(n - 1, max(m - 1, 1)) for n, m in zip(before, after, strict=True))
    return [
        dataclasses.replace(common, inputs=n, outputs=m, ratio=ratio)
        for n, m, ratio in zip(before, after, ratios, strict=True)
    ]


def _within(common: Rule, before: tuple[int, ...], after: tuple[int, ...], roi: Any, scale: Any) -> list[Rule]:
    """The rules of "tf_crop_and_resize"."""
    if scale is not None:
        raise ValueError(f"`scale` must be None for coordinates {ROI!r}, got {checks.shown(scale)}.")
    pairs: tuple[Any, ...] = tuple(roi) if checks.is_sequence(roi) else ()
    if len(pairs) != len(before) or not all(checks.is_sequence(pair) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            f"`roi` must be {len(before)} pairs of a start and an end, one per spatial axis, got {checks.shown(roi)}."
        )
    rules = []
    for n, m, pair in zip(before, after, pairs, strict=True):
        numbers = [checks.as_float("roi", value) for value in pair]
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"`roi` must be made of finite numbers, got {checks.shown(roi)}.")
        start, end = map(Fraction, numbers)
        first, step = (start, (end - start) / (m - 1)) if m > 1 else ((start + end) / 2, Fraction(0))
        rules.append(dataclasses.replace(common, inputs=n, outputs=m, ratio=(n - 1) * step, offset=(n - 1) * first))
    return rules


@public
def pixel_shuffle(x: ArrayLike, /, *, factor: PerAxis = 2, order: str = "CRD", layout: str = "NHWC") -> Array:
    """Moves channels into space: every pixel becomes f x g pixels.

    y[n, h f + i, w g + j, c] = x[n, h, w, (c f + i) g + j]     order "CRD"
    y[n, h f + i, w g + j, c] = x[n, h, w, (i g + j) C + c]     order "DCR", C channels of y

    Args:
      x: (N, H, W, C f g) for layout NHWC; dtypes as for `transform`.
      factor: f and g, one integer or one per spatial axis.
      order: "CRD" or "DCR".
      layout: the axes of x and of the result, see `conv`.

    Returns:
      y, (N, H f, W g, C) for NHWC.

    Differentiation: any order, in x; the gradient is `pixel_unshuffle`.

    Numerics: elements are moved, bit for bit: determinism level "portable".

    Raises:
      ValueError: channels that do not divide, or an argument out of range. TypeError: a dtype that is not served.

    Example:
      >>> dnn.pixel_shuffle(jnp.arange(4.0).reshape(1, 1, 1, 4))[0, :, :, 0].tolist()
      [[0.0, 1.0], [2.0, 3.0]]

    Sources: PyTorch's pixel_shuffle and ONNX's DepthToSpace in mode CRD are "CRD"; TensorFlow's depth_to_space and
      ONNX's mode DCR are "DCR".
    """
    return _shuffle(x, factor, order, layout, folding.unfold)


@public
def pixel_unshuffle(x: ArrayLike, /, *, factor: PerAxis = 2, order: str = "CRD", layout: str = "NHWC") -> Array:
    """Moves space into channels: f x g pixels become one. The inverse of `pixel_shuffle`.

    y[n, h, w, (c f + i) g + j] = x[n, h f + i, w g + j, c]     order "CRD"
    y[n, h, w, (i g + j) C + c] = x[n, h f + i, w g + j, c]     order "DCR"

    Args:
      x: (N, H f, W g, C) for layout NHWC; dtypes as for `transform`.
      factor: f and g, one integer or one per spatial axis; must divide the sizes.
      order: "CRD" or "DCR".
      layout: the axes of x and of the result, see `conv`.

    Returns:
      y, (N, H, W, C f g) for NHWC.

    Differentiation: any order, in x; the gradient is `pixel_shuffle`.

    Numerics: elements are moved, bit for bit: determinism level "portable".

    Raises:
      ValueError: sizes that do not divide, or an argument out of range. TypeError: a dtype that is not served.

    Example:
      >>> dnn.pixel_unshuffle(jnp.arange(4.0).reshape(1, 2, 2, 1)).ravel().tolist()
      [0.0, 1.0, 2.0, 3.0]

    Sources: PyTorch's pixel_unshuffle is "CRD"; TensorFlow's space_to_depth and ONNX's SpaceToDepth are "DCR".
    """
    return _shuffle(x, factor, order, layout, folding.fold)


def _shuffle(x: Any, factor: Any, order: Any, layout: Any, move: Any) -> Array:
    frame = frames.frame(layout)
    plain = frame.array("x", blending.array("x", x))
    factors = checks.integers("factor", factor, frame.layout.rank, minimum=1)
    checks.choice("order", order, ORDERS)
    canonical = (frame.layout.batch, frame.layout.channel, *frame.layout.spatial)
    moved = move("factor", jnp.transpose(plain, canonical), factors, order)
    return frame.restore(jnp.transpose(moved, [int(axis) for axis in np.argsort(canonical)]))
