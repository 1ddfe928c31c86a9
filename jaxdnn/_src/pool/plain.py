"""Pooling in plain JAX, by the names of the manifest's examples."""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def _over_windows(x: Array, start: float, join: Callable[..., Array], n: int, stride: int, pad: int) -> Array:
    pads = ((0, 0), (pad, pad), (pad, pad), (0, 0))
    return lax.reduce_window(x, np.asarray(start, x.dtype), join, (1, n, n, 1), (1, stride, stride, 1), pads)


def pool(x: Array, n: int = 2, stride: int = 2, pad: int = 0) -> Array:
    return _over_windows(x, -np.inf, lax.max, n, stride, pad)


def average(x: Array, n: int = 2, stride: int = 2, pad: int = 0) -> Array:
    return _over_windows(x, 0, lax.add, n, stride, pad) / jnp.asarray(n**2, x.dtype)


def average_exclude_padding(x: Array, n: int = 2, stride: int = 2, pad: int = 0) -> Array:
    total, counts = (
        _over_windows(v, 0, lax.add, n, stride, pad) for v in (x, jnp.ones((1, *x.shape[1:3], 1), x.dtype))
    )
    return total / jnp.broadcast_to(counts, total.shape)


def unpool(y: Array, indices: Array) -> Array:
    n, h, w, c = y.shape
    empty = jnp.zeros((n, 4 * h * w, c), y.dtype)
    batch, channel = jnp.arange(n)[:, None, None], jnp.arange(c)[None, None]
    return empty.at[batch, indices.reshape(n, -1, c), channel].set(y.reshape(n, -1, c)).reshape(n, 2 * h, 2 * w, c)


pool_overlapping = ft.partial(pool, n=3, stride=1, pad=1)
pool_average = ft.partial(average, n=3, stride=2, pad=1)
pool_dgrad = lambda dy, x: jax.vjp(pool, x)[1](dy)[0]
pool_dgrad_average = lambda dy: jax.vjp(
    average, jnp.zeros((dy.shape[0], 2 * dy.shape[1], 2 * dy.shape[2], dy.shape[3]), dy.dtype)
)[1](dy)[0]
global_pool = lambda x: jnp.mean(x, (1, 2), keepdims=True)
adaptive_pool = pool
