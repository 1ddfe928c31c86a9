"""Resampling in plain JAX, by the names of the manifest's examples."""

import jax
import jax.numpy as jnp
from jax import Array


def resample(x: Array, factor: float = 2) -> Array:
    n, h, w, c = x.shape
    return jax.image.resize(x, (n, int(h * factor), int(w * factor), c), "linear", antialias=False)


def resample_dgrad(dy: Array) -> Array:
    n, h, w, c = dy.shape
    return jax.vjp(resample, jnp.zeros((n, h // 2, w // 2, c), dy.dtype))[1](dy)[0]


def pixel_shuffle(x: Array) -> Array:
    n, h, w, c = x.shape
    apart = jnp.transpose(x.reshape(n, h, w, c // 4, 2, 2), (0, 1, 4, 2, 5, 3))
    return apart.reshape(n, 2 * h, 2 * w, c // 4)


def pixel_unshuffle(x: Array) -> Array:
    n, h, w, c = x.shape
    apart = jnp.transpose(x.reshape(n, h // 2, 2, w // 2, 2, c), (0, 1, 3, 5, 2, 4))
    return apart.reshape(n, h // 2, w // 2, 4 * c)
