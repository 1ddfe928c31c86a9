"""Resampling of the spatial axes, as a matrix for each axis; pixels between space and channels.

    r[i] = sum_j w[i, j] x[j] along each spatial axis, one after another     dx[j] = sum_i w[i, j] dy[i], in reverse

With g = in / out (1 / scale where scale is given; (in - 1) / (out - 1) for "align_corners"), row i belongs to the place

    s_i = (i + 1/2) g - 1/2 ("half_pixel")        s_i = i g ("asymmetric", "align_corners")

"half_pixel_symmetric" adds (in - out g) / 2 to the first; "pytorch_half_pixel" has 0 in its place where out is 1.
"tf_crop_and_resize" has s_i = (in - 1) (start + i (end - start) / (out - 1)) with an axis' roi (start, end), and
(in - 1) (start + end) / 2 where out is 1; where a place is before 0 or behind in - 1 along any axis, r is the
extrapolation value, and dy[i] counts as 0.

"nearest": w[i, round(s_i)] = 1, clamped to the array. Otherwise w[i, j] = k((j - s_i) / t), t = max(g, 1) with
antialias and else 1, divided by the row's sum with antialias and for lanczos3, where

    linear    k(v) = max(1 - |v|, 0)
    cubic     k(v) = (a + 2)|v|^3 - (a + 3)|v|^2 + 1 for |v| <= 1,  a|v|^3 - 5a|v|^2 + 8a|v| - 4a for 1 < |v| < 2
    lanczos3  k(v) = sinc(v) sinc(v / 3) for |v| < 3

Weights are numbers of float64: a distance |j - s| and a sum are rounded once, the kernel is computed as it stands in
`_kernel`. Weights below 2^-45, which are 0 but for the rounding of a sine, are 0.

Boundary "edge" adds the weights of j < 0 to j = 0 and those of j >= in to the last; "zero" drops them; "renormalise"
drops them and divides the row by its sum.

arithmetic "ordered": weights rounded to float32, 0 + w[i, j] x[j] + ... in the order of j over the weights that are
not 0, each product and each sum rounded; float64 for float64. "nearest" copies, and an axis that does not change is
left out.

Sources: Keys (1981), "Cubic convolution interpolation for digital image processing"; ONNX's Resize, for the names.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from jaxdnn_reference import layout as lay
from jaxdnn_reference.tensor import finish, pixel_shuffle_canonical, pixel_unshuffle_canonical, wide

Array = np.ndarray[Any, Any]
Scale = float | Fraction | Sequence[float | Fraction]
Roi = Sequence[tuple[float, float]] | None
RADIUS = {"linear": 1, "cubic": 2, "lanczos3": 3}


def resample(
    x: Array,
    /,
    *,
    output_sizes: int | Sequence[int] | None = None,
    scale: Scale | None = None,
    method: str = "linear",
    coordinates: str = "half_pixel",
    rounding: str = "half_up",
    cubic_coefficient: float = -0.75,
    antialias: bool = False,
    boundary: str | None = None,
    roi: Roi = None,
    extrapolation_value: float = 0.0,
    layout: str = "NHWC",
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """alpha * r + beta * prior."""
    axes = lay.image_axes(layout)
    xc = axes.to_canonical(x)
    before = xc.shape[1:-1]
    after, distances = _sizes(before, output_sizes, scale)
    r = wide(xc, arithmetic)
    for axis, (n, m, g) in enumerate(zip(before, after, distances, strict=True)):
        part = roi[axis] if roi else None
        w = matrix(n, m, g, method, coordinates, rounding, cubic_coefficient, antialias, boundary, part)
        r = _apply(w, r, axis + 1, copies=method == "nearest", arithmetic=arithmetic)
    if roi:
        value = np.asarray(extrapolation_value).astype(r.dtype)
        r = np.where(_outside(before, after, roi), value, r)
    return finish(axes.from_canonical(r), x.dtype, alpha, beta, prior, out_dtype, arithmetic)


def resample_dgrad(
    dy: Array,
    x_shape: Sequence[int],
    /,
    *,
    scale: Scale | None = None,
    method: str = "linear",
    coordinates: str = "half_pixel",
    rounding: str = "half_up",
    cubic_coefficient: float = -0.75,
    antialias: bool = False,
    boundary: str | None = None,
    roi: Roi = None,
    layout: str = "NHWC",
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """alpha * dx + beta * prior, with dx[j] = sum_i w[i, j] dy[i] along each axis, the last one first."""
    axes = lay.image_axes(layout)
    dyc = axes.to_canonical(dy)
    before = axes.canonical_shape(x_shape)[1:-1]
    after, distances = _sizes(before, dyc.shape[1:-1] if scale is None else None, scale)
    dx = wide(dyc, arithmetic)
    if roi:
        dx = np.where(_outside(before, after, roi), np.zeros((), dx.dtype), dx)
    for axis, (n, m, g) in reversed(list(enumerate(zip(before, after, distances, strict=True)))):
        part = roi[axis] if roi else None
        w = matrix(n, m, g, method, coordinates, rounding, cubic_coefficient, antialias, boundary, part)
        dx = _apply(w.T, dx, axis + 1, copies=False, arithmetic=arithmetic)
    return finish(axes.from_canonical(dx), dy.dtype, alpha, beta, prior, out_dtype, arithmetic)


def pixel_shuffle(x: Array, /, *, factor: int | Sequence[int] = 2, order: str = "CRD", layout: str = "NHWC") -> Array:
    """y[n, h f + i, w g + j, c] = x[n, h, w, (c f + i) g + j], or with order "DCR" x[n, h, w, (i g + j) C + c]."""
    axes = lay.image_axes(layout)
    xc = axes.to_canonical(x)
    return axes.from_canonical(pixel_shuffle_canonical(xc, lay.per_axis(factor, xc.ndim - 2), order))


def pixel_unshuffle(x: Array, /, *, factor: int | Sequence[int] = 2, order: str = "CRD", layout: str = "NHWC") -> Array:
    """y[n, h, w, (c f + i) g + j] = x[n, h f + i, w g + j, c], or with order "DCR" y[n, h, w, (i g + j) C + c]."""
    axes = lay.image_axes(layout)
    xc = axes.to_canonical(x)
    return axes.from_canonical(pixel_unshuffle_canonical(xc, lay.per_axis(factor, xc.ndim - 2), order))


def matrix(
    n: int,
    m: int,
    g: Fraction,
    method: str,
    coordinates: str,
    rounding: str,
    cubic_coefficient: float,
    antialias: bool,
    boundary: str | None,
    roi: tuple[float, float] | None = None,
) -> Array:
    """w, float64 [m, n]."""
    if coordinates == "align_corners":
        g = Fraction(n - 1, max(m - 1, 1))
    boundary = boundary or ("renormalise" if antialias else "edge")
    w = np.zeros((m, n))
    for i in range(m):
        s = _place(i, n, m, g, coordinates) if roi is None else _place_in(roi, i, n, m)
        if method == "nearest":
            w[i, min(max(_rounded(s, rounding), 0), n - 1)] = 1
            continue
        t = max(g, Fraction(1)) if antialias else Fraction(1)
        reach = math.ceil(RADIUS[method] * t)
        js = range(math.floor(s) - reach, math.floor(s) + reach + 2)
        k = np.array([_kernel(method, abs(float(j - s)) / float(t), cubic_coefficient) for j in js])
        k[np.abs(k) < 2.0**-45] = 0.0
        if antialias or method == "lanczos3":
            k = k / math.fsum(k)
        for j, weight in zip(js, k, strict=True):
            if boundary == "edge" or 0 <= j < n:
                w[i, min(max(j, 0), n - 1)] += weight
        if boundary == "renormalise" and w[i].sum() != 0:
            w[i] /= math.fsum(w[i])
    return w


def _place(i: int, n: int, m: int, g: Fraction, coordinates: str) -> Fraction:
    if coordinates in ("asymmetric", "align_corners"):
        return i * g
    if coordinates == "pytorch_half_pixel" and m == 1:
        return Fraction(0)
    s = (i + Fraction(1, 2)) * g - Fraction(1, 2)
    return s + (n - m * g) / 2 if coordinates == "half_pixel_symmetric" else s


def _place_in(roi: tuple[float, float], i: int, n: int, m: int) -> Fraction:
    start, end = map(Fraction, roi)
    return (n - 1) * (start + i * (end - start) / (m - 1) if m > 1 else (start + end) / 2)


def _outside(before: Sequence[int], after: Sequence[int], roi: Sequence[tuple[float, float]]) -> Array:
    """[1, sizes..., 1] whether a result's place is outside of x along an axis."""
    found = np.zeros((), bool)
    for n, m, part in zip(before, after, roi, strict=True):
        out = np.array([not 0 <= _place_in(part, i, n, m) <= n - 1 for i in range(m)])
        found = found[..., None] | out
    return found[None, ..., None]


def _rounded(s: Fraction, rounding: str) -> int:
    half = Fraction(1, 2)
    return {
        "floor": math.floor(s),
        "ceil": math.ceil(s),
        "half_up": math.floor(s + half),
        "half_down": math.ceil(s - half),
    }[rounding]


def _kernel(method: str, v: float, a: float) -> float:
    if method == "linear":
        return max(1 - v, 0.0)
    if method == "lanczos3":
        return float(np.sinc(v) * np.sinc(v / 3)) if v < 3 else 0.0
    if v <= 1:
        return ((a + 2) * v - (a + 3)) * v * v + 1
    return a * (((v - 5) * v + 8) * v - 4) if v < 2 else 0.0


def _sizes(
    before: Sequence[int], sizes: int | Sequence[int] | None, scale: Scale | None
) -> tuple[tuple[int, ...], tuple[Fraction, ...]]:
    if scale is None:
        after = lay.per_axis(before if sizes is None else sizes, len(before))
        return after, tuple(Fraction(n, m) for n, m in zip(before, after, strict=True))
    factors = scale if isinstance(scale, Sequence) else (scale,) * len(before)
    exact = [Fraction(f) for f in factors]
    after = tuple(math.floor(n * f) for n, f in zip(before, exact, strict=True))
    return after, tuple(1 / f for f in exact)


def _apply(w: Array, x: Array, axis: int, *, copies: bool, arithmetic: str) -> Array:
    x = np.moveaxis(x, axis, 0)
    if copies:
        return np.moveaxis(x[w.argmax(axis=1)], 0, axis)
    if w.shape[0] == w.shape[1] and np.array_equal(w, np.eye(len(w))):
        return np.moveaxis(x, 0, axis)
    if x.dtype.kind == "i":
        x = x.astype(np.float64 if arithmetic == "golden" else np.float32)
    y = np.zeros((len(w), *x.shape[1:]), x.dtype)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for j in range(w.shape[1]):
            rows = np.nonzero(w[:, j])[0]
            weight = w[rows, j].astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
            y[rows] = y[rows] + weight * x[j]
    return np.moveaxis(y, 0, axis)
