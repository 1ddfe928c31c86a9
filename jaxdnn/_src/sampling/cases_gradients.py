"""What the gradients of `grid_sample` are, in float64 from its formula, and how far off a result may be.

A weight is off by its place's error times its steepest slope, and by its roundings. A slope is off likewise, by what it
changes along its own axis and along the others.
"""

import functools as ft
import itertools
import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
# Of a mode: taps along an axis, and the largest sums along it of |weights|, of |slopes| and of |curvatures|, for the
# usual cubic coefficient.
MODES = {"nearest": (1, 1.0, 0.0, 0.0), "linear": (2, 1.0, 2.0, 0.0), "cubic": (4, 1.4, 3.0, 15.0)}
CUBIC = -0.75
FACTOR = 24  # roundings of a weight for each axis, with those of the products that it is in


def scale(size: int, options: dict[str, Any]) -> float:
    """The pixels to a unit of a coordinate."""
    if options.get("coordinates") == "pixel":
        return 1.0
    return (size - 1) / 2 if options.get("align_corners") else size / 2


def along(g: Array, size: int, options: dict[str, Any]) -> tuple[Array, Array, Array]:
    """Of the coordinates along an axis: each tap's pixel and weight, and the weight's derivative in the place.

    Places are not at a tie, where a derivative is a matter of convention.
    """
    mode, corners = options.get("mode", "linear"), bool(options.get("align_corners"))
    inside = ft.partial(_inside, size=size, padding=options.get("padding", "zeros"), corners=corners)
    p = g if options.get("coordinates") == "pixel" else (g + 1) * scale(size, options) - (0 if corners else 0.5)
    if mode == "cubic":
        low, a = np.floor(p), CUBIC
        f = (p - low)[..., None]
        far, near = (lambda v: a * (((v - 5) * v + 8) * v - 4)), (lambda v: ((a + 2) * v - (a + 3)) * v * v + 1)
        of_far, of_near = (lambda v: a * ((3 * v - 10) * v + 8)), (lambda v: (3 * (a + 2) * v - 2 * (a + 3)) * v)
        weights = np.concatenate([far(1 + f), near(f), near(1 - f), far(2 - f)], -1)
        slopes = np.concatenate([of_far(1 + f), of_near(f), -of_near(1 - f), -of_far(2 - f)], -1)
        return inside(low[..., None] + np.arange(-1, 3))[0], weights, slopes
    p, turned = (v[..., None] for v in inside(p))
    if mode == "nearest":
        return np.rint(p), np.ones_like(p), np.zeros_like(p)
    low = np.floor(p)
    weights, slopes = ([1 - (p - low), p - low], [-turned, turned])
    return low + np.arange(2), np.concatenate(weights, -1), np.concatenate(slopes, -1)


def _inside(p: Array, size: int, padding: str, corners: bool) -> tuple[Array, Array]:
    """Places in the image, and their derivative."""
    turned = np.ones_like(p)
    if padding == "zeros":
        return p, turned
    if padding == "reflection":
        low, span = (0.0, size - 1.0) if corners else (-0.5, float(size))
        if span == 0:
            return np.zeros_like(p), np.zeros_like(p)
        rest = np.mod(p - low, 2 * span)
        turned = np.where(rest > span, -1.0, 1.0)
        p = np.minimum(rest, 2 * span - rest) + low
    return np.clip(p, 0, size - 1), np.where((p > 0) & (p < size - 1), turned, 0.0)


def gradient(
    wanted: str, x: Array, grid: Array, dy: Array, options: dict[str, Any], place: Array, u: float
) -> tuple[Array, Array]:
    """The gradient in "x" or in "grid", of images with channels last; and how far off it may be before it is rounded.

    place: what a point is off at most, in pixels, of as many axes as dy; u: the unit roundoff of weights and sums.
    """
    shape, sizes = {"x": x.shape, "grid": grid.shape}[wanted], x.shape[1:-1]
    d, images = len(sizes), len(x)
    place = np.broadcast_to(place, (*dy.shape[:-1], 1))
    flat = lambda v: v.astype(np.float64).reshape(images, -1, v.shape[-1])
    x, grid, dy, place = map(flat, (x, grid, dy, place))
    components = range(d) if options.get("order") == "ij" else range(d)[::-1]
    axes = [along(grid[..., c], size, options) for c, size in zip(components, sizes, strict=True)]
    taps, weight, slope, curvature = MODES[options.get("mode", "linear")]

    def of_taps() -> Any:
        """Of each tap: its place in the list of each axis, its pixel of each point, and whether that is one."""
        for tap in itertools.product(range(taps), repeat=d):
            at = [pixels[..., t].astype(int) for (pixels, _, _), t in zip(axes, tap, strict=True)]
            known = ft.reduce(np.logical_and, [(i >= 0) & (i < n) for i, n in zip(at, sizes, strict=True)])
            yield tap, np.ravel_multi_index(at, sizes, mode="clip"), known[..., None]

    chosen = lambda tap, of: [axis[of][..., t, None] for axis, t in zip(axes, tap, strict=True)]
    image = np.arange(images)[:, None]
    if wanted == "x":
        found, moved, sizes_of = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
        count = np.zeros_like(x)
        for tap, index, known in of_taps():
            given = np.where(known, dy, 0)
            np.add.at(found, (image, index), math.prod(chosen(tap, 1)) * given)
            np.add.at(moved, (image, index), place * np.abs(given))
            np.add.at(sizes_of, (image, index), np.abs(given))
            np.add.at(count, (image, index), known)
        error = slope * weight ** (d - 1) * moved + (count + FACTOR * d) * u * weight**d * sizes_of
        return found.reshape(shape), error.reshape(shape)
    found = np.zeros_like(grid)
    for tap, index, known in of_taps():
        total = np.where(known, (x[image, index] * dy).sum(-1, keepdims=True), 0)
        weights, slopes = chosen(tap, 1), chosen(tap, 2)
        for i, c in enumerate(components):
            factors = [slopes[j] if j == i else weights[j] for j in range(d)]
            found[..., c] += (total * math.prod(factors))[..., 0]
    largest = (np.abs(x).max(1, keepdims=True) * np.abs(dy)).sum(-1, keepdims=True)
    bent = curvature * weight ** (d - 1) + (d - 1) * slope**2 * weight ** max(d - 2, 0)
    roundings = (x.shape[-1] + taps**d + FACTOR * d) * slope * weight ** (d - 1)
    factors = np.empty(d)
    factors[list(components)] = [scale(size, options) for size in sizes]
    return (found * factors).reshape(shape), (largest * (bent * place + roundings * u) * factors).reshape(shape)
