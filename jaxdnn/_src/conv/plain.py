"""Convolutions in plain JAX, by the names of the manifest's examples."""

import functools as ft

import jax
import jax.numpy as jnp
from jax import Array, lax

_NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x: Array, w: Array, stride: int = 1, groups: int = 1, pad: int = 1) -> Array:
    return lax.conv_general_dilated(
        x, w, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=_NHWC, feature_group_count=groups
    )


def conv_dgrad(dy: Array, w: Array) -> Array:
    x = jnp.zeros((*dy.shape[:3], w.shape[2]), dy.dtype)
    return jax.vjp(lambda x: conv(x, w), x)[1](dy)[0]


def conv_wgrad(x: Array, dy: Array) -> Array:
    w = jnp.zeros((3, 3, x.shape[3], dy.shape[3]), x.dtype)
    return jax.vjp(lambda w: conv(x, w), w)[1](dy)[0]


def conv_transpose(x: Array, w: Array) -> Array:
    return lax.conv_transpose(x, w, (2, 2), "VALID", dimension_numbers=_NHWC, transpose_kernel=True)


conv_strided = ft.partial(conv, stride=2)
conv_depthwise = lambda x, w: conv(x, w, groups=x.shape[3])
conv_skip = lambda x, w: (conv(x, w), x)
conv_bgrad = lambda dy: jnp.sum(dy, (0, 1, 2))
