"""Sampling at the points of a grid in plain JAX, by the names of the manifest's examples."""

import jax.numpy as jnp
from jax import Array


def grid_sample(x: Array, grid: Array) -> Array:
    """Bilinear, with coordinates reflected at the edges."""
    batch = jnp.arange(len(x))[:, None, None]

    def place(g: Array, size: int) -> tuple[Array, Array]:
        p = ((g + 1) * size - 1) / 2
        p = (p + 0.5) % (2 * size)
        p = jnp.clip(jnp.where(p > size, 2 * size - p, p) - 0.5, 0, size - 1)
        low = jnp.clip(jnp.floor(p), 0, max(size - 2, 0))
        return low.astype(jnp.int32), (p - low)[..., None]

    (j, right), (i, below) = place(grid[..., 0], x.shape[2]), place(grid[..., 1], x.shape[1])
    row = lambda i: x[batch, i, j] * (1 - right) + x[batch, i, j + 1] * right
    return row(i) * (1 - below) + row(i + 1) * below


def affine_grid(theta: Array, sizes: tuple[int, int]) -> Array:
    h, w = sizes
    ys, xs = ((2 * jnp.arange(n, dtype=theta.dtype) + 1) / n - 1 for n in (h, w))
    points = jnp.stack(jnp.broadcast_arrays(xs[None, :], ys[:, None], jnp.ones((h, w), theta.dtype)), -1)
    return jnp.einsum("hwk,ndk->nhwd", points, theta)
