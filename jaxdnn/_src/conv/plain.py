"""Convolutions in plain JAX, as users write them, and the manifest's examples by their names."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

AXES = {3: ("NWC", "WIO", "NWC"), 4: ("NHWC", "HWIO", "NHWC"), 5: ("NDHWC", "DHWIO", "NDHWC")}  # by dimensions


def conv(
    x: Array, w: Array, stride: int = 1, groups: int = 1, pad: tuple[int, int] = (1, 1), dilation: int = 1
) -> Array:
    rank = x.ndim - 2
    return lax.conv_general_dilated(
        x, w, (stride,) * rank, (pad,) * rank, rhs_dilation=(dilation,) * rank,
        dimension_numbers=AXES[x.ndim], feature_group_count=groups,
    )  # fmt: skip


def conv_dgrad(dy: Array, w: Array) -> Array:
    x = jnp.zeros((*dy.shape[:3], w.shape[2]), dy.dtype)
    return jax.vjp(lambda x: conv(x, w), x)[1](dy)[0]


def conv_wgrad(x: Array, dy: Array) -> Array:
    w = jnp.zeros((3, 3, x.shape[3], dy.shape[3]), x.dtype)
    return jax.vjp(lambda w: conv(x, w), w)[1](dy)[0]


def conv_transpose(x: Array, w: Array, stride: int = 2, pads: Any = "VALID") -> Array:
    """The adjoint of a forward convolution, for which lax exchanges the filter's channels and reverses its taps."""
    strides = (stride,) * (x.ndim - 2)
    return lax.conv_transpose(x, w, strides, pads, dimension_numbers=AXES[x.ndim], transpose_kernel=True)


conv_strided = ft.partial(conv, stride=2)
conv_depthwise = lambda x, w: conv(x, w, groups=x.shape[3])
conv_skip = lambda x, w: (conv(x, w), x)
conv_bgrad = lambda dy: jnp.sum(dy, (0, 1, 2))
