"""Sampling at the points of a grid in plain JAX, by the names of the manifest's examples."""

import jax.numpy as jnp
from jax import Array
from jax.scipy import ndimage


def bilinear(x: Array, p: Array, q: Array, inside: bool = True) -> Array:
    """x at rows p and columns q, in pixels; `inside`: all of them are in the image."""
    batch = jnp.arange(len(x))[:, None, None]
    i, j = (
        jnp.clip(jnp.floor(v), 0, max(n - 2, 0)) if inside else jnp.floor(v)
        for v, n in zip((p, q), x.shape[1:3], strict=True)
    )
    below, right = (p - i)[..., None], (q - j)[..., None]

    def tap(i: Array, j: Array) -> Array:
        i, j = i.astype(jnp.int32), j.astype(jnp.int32)
        if inside:
            return x[batch, i, j]
        known = (i >= 0) & (i < x.shape[1]) & (j >= 0) & (j < x.shape[2])
        return jnp.where(known[..., None], x[batch, i, j], 0)

    row = lambda i: tap(i, j) * (1 - right) + tap(i, j + 1) * right
    return row(i) * (1 - below) + row(i + 1) * below


def grid_sample(x: Array, grid: Array) -> Array:
    """Bilinear, with coordinates reflected at the edges."""

    def place(g: Array, size: int) -> Array:
        p = (((g + 1) * size - 1) / 2 + 0.5) % (2 * size)
        return jnp.clip(jnp.where(p > size, 2 * size - p, p) - 0.5, 0, size - 1)

    return bilinear(x, place(grid[..., 1], x.shape[1]), place(grid[..., 0], x.shape[2]))


def affine_grid(theta: Array, sizes: tuple[int, int]) -> Array:
    return _grid(theta, *((2 * jnp.arange(n, dtype=theta.dtype) + 1) / n - 1 for n in sizes))


def spatial_transformer(x: Array, theta: Array, sizes: tuple[int, int]) -> Array:
    grid = _grid(theta, *(jnp.linspace(-1, 1, n, dtype=theta.dtype) for n in sizes))
    p, q = ((grid[..., i] + 1) / 2 * (n - 1) for i, n in zip((1, 0), x.shape[1:3], strict=True))
    return bilinear(x, p, q, inside=False)


def _grid(theta: Array, ys: Array, xs: Array) -> Array:
    ones = jnp.ones((len(ys), len(xs)), theta.dtype)
    points = jnp.stack(jnp.broadcast_arrays(xs[None, :], ys[:, None], ones), -1)
    return jnp.einsum("hwk,ndk->nhwd", points, theta)


def warp(x: Array, flow: Array) -> Array:
    """Bilinear, with places clipped to the image."""
    h, w = flow.shape[1:3]
    p = jnp.arange(h, dtype=flow.dtype)[None, :, None] + flow[..., 1]
    q = jnp.arange(w, dtype=flow.dtype)[None, None] + flow[..., 0]
    return bilinear(x, jnp.clip(p, 0, x.shape[1] - 1), jnp.clip(q, 0, x.shape[2] - 1))


def map_coordinates(x: Array, coordinates: Array) -> Array:
    return ndimage.map_coordinates(x, list(coordinates), 1, "nearest")


def roi_align(x: Array, boxes: Array, bins: int = 3) -> Array:
    """Of lines, with two samples a bin."""
    batch = jnp.arange(len(x))[:, None, None]
    low, length = boxes[..., :1] - 0.5, boxes[..., 1:] - boxes[..., :1]
    p = low + (jnp.arange(2 * bins, dtype=x.dtype) + 0.5)[None, None] * length / (2 * bins)
    q = jnp.clip(p, 0, x.shape[1] - 1)
    i = jnp.floor(q)
    f, i = (q - i)[..., None], i.astype(jnp.int32)
    each = x[batch, i] * (1 - f) + x[batch, jnp.minimum(i + 1, x.shape[1] - 1)] * f
    each = jnp.where(((p < -1) | (p > x.shape[1]))[..., None], 0, each)
    return each.reshape(*boxes.shape[:2], bins, 2, -1).mean(3)


def deform_conv(x: Array, offsets: Array, w: Array) -> Array:
    """Of lines, with as many zeros around them as keep their length."""
    batch, taps = jnp.arange(len(x))[:, None, None], len(w)
    at = jnp.arange(x.shape[1])[:, None] + jnp.arange(taps)[None] - taps // 2
    p = at.astype(x.dtype)[None] + offsets
    i = jnp.floor(p)
    f, i = (p - i)[..., None], i.astype(jnp.int32)
    tap = lambda i: jnp.where(((i >= 0) & (i < x.shape[1]))[..., None], x[batch, i], 0)
    return jnp.einsum("nprc,rck->npk", tap(i) * (1 - f) + tap(i + 1) * f, w)
