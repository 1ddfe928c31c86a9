"""Images sampled at the points of a grid, the grid of an affine map, and what is made of both.

    y[n, m, c] = sum over taps t of w_t x[n, t, c]

The taps and weights of a point are those of its coordinate along each spatial axis, their weights multiplied. A
coordinate g becomes the place p, in pixels of which the first has its centre at 0:

    p = g ("pixel")        p = (g + 1) / 2 (size - 1) (align_corners)        p = ((g + 1) size - 1) / 2 (otherwise)

Into the image it is brought by

    zeros       p as it is; pixels outside count 0
    border      p clipped to [0, size - 1]
    reflection  p reflected, as often as needed, about 0 and size - 1 (align_corners) or about -1/2 and size - 1/2, then
                clipped to [0, size - 1]; 0 where the two are one

    nearest  the pixel round(p), of two the even one                                            p brought inside
    linear   floor(p) and the next one, with 1 - f and f, f = p - floor(p)                      p brought inside
    cubic    floor(p) - 1, ..., floor(p) + 2, with k(1 + f), k(f), k(1 - f), k(2 - f)           each tap brought inside
             k(v) = (a + 2)|v|^3 - (a + 3)|v|^2 + 1 up to 1, a|v|^3 - 5a|v|^2 + 8a|v| - 4a up to 2

A pixel of weight 0 is not read. A point with a NaN, or for reflection an infinite, coordinate gives NaN.

arithmetic "ordered": coordinates in float32 (float64 if x or the grid is), each step above rounded; weights multiplied
in the order of the axes; 0 + w_t x[t] + ... in row-major order of the taps, each product and each sum rounded.

Sources: PyTorch's grid_sample and affine_grid, ONNX's GridSample and AffineGrid; Jaderberg et al., arXiv:1506.02025.
"""

import itertools
import math
from typing import Any

import numpy as np

from jaxdnn_reference import layout as lay
from jaxdnn_reference.tensor import finish, wide

Array = np.ndarray[Any, Any]
Taps = list[tuple[Any, Any]]


def grid_sample(
    x: Array,
    grid: Array,
    /,
    *,
    mode: str = "linear",
    padding: str = "zeros",
    align_corners: bool = False,
    coordinates: str = "normalised",
    order: str = "xy",
    cubic_coefficient: float = -0.75,
    layout: str = "NHWC",
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """alpha * y + beta * prior."""
    axes = lay.image_axes(layout)
    xc = wide(axes.to_canonical(x), arithmetic)
    if xc.dtype.kind == "i":
        xc = xc.astype(np.float64 if arithmetic == "golden" else np.float32)
    places = wide(grid, arithmetic).astype(np.result_type(xc.dtype, grid.dtype, np.float32))
    places = np.broadcast_to(places, (len(xc), *places.shape[1:]))
    sizes = xc.shape[1:-1]
    y = np.zeros((*places.shape[:-1], xc.shape[-1]), xc.dtype)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for point in np.ndindex(*places.shape[:-1]):
            g = places[point][::-1] if order == "xy" else places[point]
            p = [place(*of, padding, align_corners, coordinates) for of in zip(g, sizes, strict=True)]
            each = [taps(*of, mode, padding, align_corners, cubic_coefficient) for of in zip(p, sizes, strict=True)]
            for tap in itertools.product(*each):
                at, weight = tuple(t for t, _ in tap), math.prod((w for _, w in tap[1:]), start=tap[0][1])
                inside = all(0 <= t < size for t, size in zip(at, sizes, strict=True))
                if np.isnan(weight):
                    y[point] = np.nan
                elif inside and weight != 0:
                    y[point] += xc.dtype.type(weight) * xc[(point[0], *map(int, at))]
    return finish(axes.from_canonical(y), x.dtype, alpha, beta, prior, out_dtype, arithmetic)


def place(g: Any, size: int, padding: str, align_corners: bool, coordinates: str) -> Any:
    """The coordinate g in pixels."""
    p = g
    if coordinates == "normalised":
        p = (g + 1) / 2 * (size - 1) if align_corners else ((g + 1) * size - 1) / 2
    if padding == "reflection":
        return p
    return np.clip(p, -3, size + 2)  # as far out as further out, and infinity is a place too


def taps(p: Any, size: int, mode: str, padding: str, align_corners: bool, a: float) -> Taps:
    """(pixel, weight) of each tap along an axis; pixels may be outside."""
    if mode == "cubic":
        low = np.floor(p)
        f, a = p - low, type(p)(a)
        weights = (_far(1 + f, a), _near(f, a), _near(1 - f, a), _far(2 - f, a))
        return [(inside(low + k, size, padding, align_corners), w) for k, w in zip((-1, 0, 1, 2), weights, strict=True)]
    q = inside(p, size, padding, align_corners)
    if mode == "nearest":
        return [(np.rint(q), q if np.isnan(q) else type(p)(1))]
    low = np.floor(q)
    return [(low, 1 - (q - low)), (low + 1, q - low)]


def _near(v: Any, a: Any) -> Any:
    return ((a + 2) * v - (a + 3)) * v * v + 1


def _far(v: Any, a: Any) -> Any:
    return a * (((v - 5) * v + 8) * v - 4)


def inside(p: Any, size: int, padding: str, align_corners: bool) -> Any:
    """p brought into the image, or as it is for "zeros"."""
    if padding == "zeros":
        return p
    if padding == "reflection":
        low, span = (0, size - 1) if align_corners else (-0.5, size)
        if span == 0:
            return p - p
        distance = abs(p - low)
        flips = np.floor(distance / span)
        rest = distance - flips * span
        p = rest + low if flips % 2 == 0 else (span - rest) + low
    return np.clip(p, 0, size - 1)


def affine_grid(
    theta: Array, sizes: tuple[int, ...], /, *, align_corners: bool = False, arithmetic: str = "golden"
) -> Array:
    """grid[n, m] = theta[n] (x, y[, z], 1) at the normalised coordinates of the centre of each pixel m.

    "ordered": a coordinate rounded to theta's float32 or float64; products and sums in it, from the left.
    """
    wide_theta = wide(theta, arithmetic)
    base = np.meshgrid(*(centres(n, align_corners).astype(wide_theta.dtype) for n in sizes), indexing="ij")[::-1]
    grid = np.zeros((len(theta), *sizes, len(sizes)), wide_theta.dtype)
    for n, i in np.ndindex(*grid.shape[:: grid.ndim - 1]):
        row = wide_theta[n, i]
        total = row[0] * base[0]
        for factor, coordinate in zip(row[1:-1], base[1:], strict=True):
            total = total + factor * coordinate
        grid[n, ..., i] = total + row[-1]
    return grid if arithmetic == "golden" else grid.astype(theta.dtype)


def centres(n: int, align_corners: bool) -> Array:
    """The normalised coordinates of n pixels' centres; 0 of a single one."""
    if align_corners:
        return np.linspace(-1, 1, n) if n > 1 else np.zeros(n)
    return (2 * np.arange(n) + 1) / n - 1


def spatial_transformer(
    x: Array,
    theta: Array,
    /,
    *,
    sizes: tuple[int, ...] | None = None,
    align_corners: bool = True,
    layout: str = "NHWC",
    arithmetic: str = "golden",
    **options: Any,
) -> Array:
    """grid_sample(x, affine_grid(theta, sizes)), whose grid is not rounded to 16 bits."""
    after = lay.image_axes(layout).to_canonical(x).shape[1:-1] if sizes is None else sizes
    grid = affine_grid(wide(theta, arithmetic), after, align_corners=align_corners, arithmetic=arithmetic)
    return grid_sample(x, grid, align_corners=align_corners, layout=layout, arithmetic=arithmetic, **options)


def warp(x: Array, flow: Array, /, *, order: str = "xy", arithmetic: str = "golden", **options: Any) -> Array:
    """y[n, m] = x[n] at the place m + flow[n, m] in pixels.

    "ordered": the sum rounded to float32 (float64 if x or flow is).
    """
    here = np.moveaxis(np.indices(flow.shape[1:-1]), 0, -1)
    precise = arithmetic == "golden" or np.float64 in (x.dtype, flow.dtype)
    precision = np.float64 if precise else np.float32
    places = flow.astype(precision) + (here if order == "ij" else here[..., ::-1]).astype(precision)
    return grid_sample(x, places, coordinates="pixel", order=order, arithmetic=arithmetic, **options)
