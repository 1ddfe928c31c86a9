"""Which pixels a point of a grid is made of, and with which weights: a function that JAX differentiates to any order.

Every product is rounded before it is added to, and so in derivatives: bits depend on nothing else.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core.rounding import product, quotient, rounded

MODES = ("nearest", "linear", "cubic")
PADDINGS = ("zeros", "border", "reflection")
COORDINATES = ("normalised", "pixel")
ORDERS = ("xy", "ij")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a coordinate means, see `grid_sample`."""

    mode: str
    padding: str
    align_corners: bool
    coordinates: str
    order: str
    cubic: float

    @ft.partial(jax.jit, static_argnums=(0, 2))  # many small operations, which without jit are compiled one by one
    def taps(self, grid: Array, sizes: tuple[int, ...]) -> tuple[Array, Array]:
        """The flat index (-1 outside) and the weight of every tap, the last axis of both; row-major, the last fastest.

        grid: (..., d), coordinates in float32 or float64, for `sizes` of d axes.
        """
        stacked = lambda taps: jnp.stack(taps, -1)
        return across([(stacked(i), stacked(w)) for i, w in self._by_axis(rounded(grid), sizes)], sizes)

    def listed(self, grid: Array, sizes: tuple[int, ...]) -> list[tuple[Array, Array]]:
        """The same taps one by one: XLA writes what is stacked to memory, and makes these where they are used."""
        found: list[tuple[Array, Array]] = []
        for (places, weights), size in zip(self._by_axis(rounded(grid), sizes), sizes, strict=True):
            own = list(zip(places, weights, strict=True))
            found = [(_nested(i, j, size), product(v, w)) for i, v in found for j, w in own] if found else own
        return found

    def _by_axis(self, grid: Array, sizes: tuple[int, ...]) -> list[tuple[list[Array], list[Array]]]:
        along = [grid[..., i] for i in range(len(sizes))]
        along = along[::-1] if self.order == "xy" else along
        return [self.along(*of) for of in zip(along, sizes, strict=True)]

    def along(self, g: Array, size: int) -> tuple[list[Array], list[Array]]:
        """The pixel, -1 outside, and the weight of each tap along an axis of the image."""
        p = self._place(g, size)
        low = jnp.floor(p)
        if self.mode == "cubic":
            f, a = rounded(p - low), self.cubic  # each rounded before XLA joins constants
            weights = [_far(rounded(1 + f), a), _near(f, a), _near(rounded(1 - f), a), _far(rounded(2 - f), a)]
            places = [self._inside(low + k, size) for k in (-1, 0, 1, 2)]
        else:
            p = self._inside(p, size)
            low = jnp.floor(p)
            places, weights = [low, low + 1], [1 - (p - low), p - low]
            if self.mode == "nearest":  # NaN where p is NaN
                places, weights = [jnp.round(p)], [lax.stop_gradient(jnp.where(jnp.isnan(p), p, jnp.ones_like(p)))]
        pixel = lambda at: jnp.where((at >= 0) & (at <= size - 1), at, -1).astype(jnp.int32)
        return [pixel(at) for at in places], weights

    def _place(self, g: Array, size: int) -> Array:
        """A coordinate in pixels, of which the first is at 0."""
        if self.coordinates == "normalised":
            factor = jnp.asarray(size - 1 if self.align_corners else size, g.dtype)
            g = product((g + 1) * 0.5, factor) if self.align_corners else (product(g + 1, factor) - 1) * 0.5
        # Without a reflection all that is far out is alike, infinity too.
        return g if self.padding == "reflection" else clip(g, -3, size + 2)

    def _inside(self, p: Array, size: int) -> Array:
        """p brought into the image; its derivative is 0 where it is clipped and where it turns at the first pixel."""
        if self.padding == "zeros":
            return p
        if self.padding == "reflection":
            low, length = (0.0, size - 1) if self.align_corners else (-0.5, size)
            if length == 0:
                return lax.stop_gradient(p - p)
            span = jnp.full_like(p, length)
            distance = product(p - low, jnp.sign(p - low))
            flips = lax.stop_gradient(jnp.floor(quotient(distance, span)))
            rest = distance - product(flips, span)
            even = jnp.floor(flips * 0.5) == flips * 0.5  # a remainder is a call of a library for every point
            p = jnp.where(even, rest + low, rounded(span - rest) + low)
        return clip(p, 0, size - 1)


def across(each: Sequence[tuple[Array, Array]], sizes: Sequence[int]) -> tuple[Array, Array]:
    """The taps along each axis of an image of `sizes`, -1 outside, made those of all axes: flat indices and weights."""
    index, weights = each[0]
    for (pixels, factors), size in zip(each[1:], sizes[1:], strict=True):
        outer, inner = index[..., None], pixels[..., None, :]
        index = _nested(outer, inner, size)
        # Copies, not broadcasts: their cotangents are added one after another, not by XLA in an order of its own.
        outer, inner = jnp.stack([weights] * factors.shape[-1], -1), jnp.stack([factors] * weights.shape[-1], -2)
        index, weights = map(_joined, (index, product(outer, inner)))
    return index, weights


def _nested(outer: Array, inner: Array, size: int) -> Array:
    """The flat index of pixels along two axes, of which the inner one has `size`."""
    return jnp.where((outer < 0) | (inner < 0), jnp.int32(-1), outer * size + inner)


def _joined(v: Array) -> Array:
    """v with its last two axes made one."""
    return v.reshape(*v.shape[:-2], v.shape[-2] * v.shape[-1])


def clip(p: Array, low: float, high: float) -> Array:
    """p within the two, with derivative 0 at them; NaN stays."""
    return jnp.where(p <= low, jnp.full_like(p, low), jnp.where(p >= high, jnp.full_like(p, high), p))


def _near(v: Array, a: float) -> Array:
    b = jnp.asarray(a, v.dtype)
    return product(product(product(b + 2, v) - (b + 3), v), v) + 1


def _far(v: Array, a: float) -> Array:
    return product(jnp.asarray(a, v.dtype), product(product(v - 5, v) + 8, v) - 4)
