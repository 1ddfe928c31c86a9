"""Normalisations in plain JAX, by the names of the manifest's examples.

Statistics are taken in two passes, as `jnp.var` takes them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

EPS = 1e-5


def _normalized(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
    """The result, mean, variance and inverse deviation along these axes, which stay, with length 1."""
    mean = jnp.mean(x, axes, keepdims=True)
    variance = jnp.var(x, axes, keepdims=True)
    rstd = lax.rsqrt(variance + EPS)
    return (x - mean) * rstd, mean, variance, rstd


def _by_channel(v: Array) -> Array:
    return v.reshape(1, 1, 1, -1)


def batch_norm(x: Array, scale: Array, bias: Array) -> tuple[Array, ...]:
    y, mean, variance, rstd = _normalized(x, (0, 1, 2))
    m = x.size // x.shape[-1]
    y = y * _by_channel(scale) + _by_channel(bias)
    return y, mean.ravel(), rstd.ravel(), mean.ravel(), variance.ravel() * (m / (m - 1))


def batch_norm_inference(x: Array, mean: Array, variance: Array) -> Array:
    return (x - _by_channel(mean)) * lax.rsqrt(_by_channel(variance) + EPS)


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    return _normalized(x, (3,))[0] * _by_channel(scale) + _by_channel(bias)


def rms_norm(x: Array, scale: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * _by_channel(scale)


def adaptive_layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    per_image = lambda v: v[:, None, None, :]
    return _normalized(x, (3,))[0] * per_image(scale) + per_image(bias)


def instance_norm(x: Array, scale: Array) -> Array:
    return _normalized(x, (1, 2))[0] * _by_channel(scale)


def group_norm(x: Array, scale: Array, bias: Array, groups: int = 8) -> Array:
    y = _normalized(x.reshape(*x.shape[:3], groups, -1), (1, 2, 4))[0].reshape(x.shape)
    return y * _by_channel(scale) + _by_channel(bias)


def _norm_dgrad(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients in x, scale and bias, at a scale of 1 and a bias of 0."""

    def backward(dy: Array, x: Array) -> Any:
        return jax.vjp(forward, x, *(jnp.full(x.shape[-1:], value, x.dtype) for value in (1, 0)))[1](dy)

    return backward


def adaptive_layer_norm_dgrad(dy: Array, x: Array, scale: Array) -> Any:
    return jax.vjp(adaptive_layer_norm, x, scale, jnp.zeros_like(scale))[1](dy)


def bn_finalize(total: Array, squares: Array, m: int = 2048) -> tuple[Array, ...]:
    mean = total / m
    variance = jnp.maximum(squares / m - mean * mean, 0)
    rstd = lax.rsqrt(variance + EPS)
    return rstd, -mean * rstd, mean, rstd, mean, variance * (m / (m - 1))


def bn_finalize_inference(mean: Array, variance: Array) -> tuple[Array, Array]:
    factor = lax.rsqrt(variance + EPS)
    return factor, -mean * factor


def dbn_weight(dy: Array, x: Array, mean: Array, rstd: Array) -> tuple[Array, ...]:
    m = x.size // x.shape[-1]
    dscale = jnp.sum(dy * (x - _by_channel(mean)), (0, 1, 2)) * rstd
    dbias = jnp.sum(dy, (0, 1, 2))
    factor_x = -rstd * rstd * dscale / m
    return dscale, dbias, rstd, factor_x, -rstd * dbias / m - mean * factor_x


def lrn(x: Array) -> Array:
    sums = lax.reduce_window(x * x, np.float32(0), lax.add, (1, 1, 1, 5), (1,) * 4, ((0, 0),) * 3 + ((2, 2),))
    return x * (2 + 1e-4 / 5 * sums) ** -0.75


def divisive_norm(x: Array, means: Array | None = None) -> Array:
    d, around = x if means is None else x - means, ((0, 0), (2, 2), (2, 2), (0, 0))
    sums = lax.reduce_window(d * d, np.float32(0), lax.add, (1, 5, 5, 1), (1,) * 4, around)
    return x * (2 + 1e-4 / 25 * sums) ** -0.75


def divisive_norm_dgrad(dy: Array, x: Array) -> tuple[Array, Array]:
    """The gradients in x and in the means, at means of 0; a mean is subtracted only where x is squared."""
    return jax.vjp(divisive_norm, x, jnp.zeros_like(x))[1](dy)


batch_norm_dgrad = _norm_dgrad(lambda x, *v: batch_norm(x, *v)[0])
genstats = lambda x: (jnp.sum(x, (0, 1, 2)), jnp.sum(x * x, (0, 1, 2)))
layer_norm_dgrad = _norm_dgrad(layer_norm)
rms_norm_dgrad = _norm_dgrad(lambda x, scale, bias: rms_norm(x, scale) + _by_channel(bias))
instance_norm_dgrad = _norm_dgrad(lambda x, scale, bias: instance_norm(x, scale) + _by_channel(bias))
group_norm_dgrad = _norm_dgrad(group_norm)
lrn_dgrad = lambda dy, x: jax.vjp(lrn, x)[1](dy)[0]
lp_normalize = lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
