"""The operations of networks in JAX: by lax and jnp as Flax and jax.nn have them, and by this library."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxdnn as dnn
from jaxdnn._src.conv import plain
from jaxdnn.bench.train.networks import Norm

_OURS = {"silu": "swish"}  # by name, where ours is another


class Lax:
    """The operations by lax, jnp and jax.nn; norms by Flax's formula, variance as E[x²] - E[x]² in float32."""

    def __init__(self) -> None:
        self.statistics: list[tuple[Array, Array]] = []

    def conv(
        self,
        x: Array,
        w: Array,
        bias: Any = None,
        *,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        residual: Any = None,
    ) -> Array:
        y = plain.conv(x, w.astype(x.dtype), stride, groups, (padding, padding))
        y = y if bias is None else y + bias.astype(y.dtype)
        return y if residual is None else residual + y

    def conv_skip(self, x: Array, w: Array, activation: str | None) -> tuple[Array, Array]:
        x = x if activation is None else self.activation(x, activation)
        return self.conv(x, w), x

    def conv_transpose(self, x: Array, w: Array, stride: int) -> Array:
        """A transposed convolution with as many taps as the stride."""
        return plain.conv_transpose(x, w.astype(x.dtype), stride)

    def batch_norm(self, x: Array, p: Norm, *, activation: str | None = "relu", residual: Any = None) -> Array:
        """Normalises by the batch's statistics, which are kept; then adds the residual and applies the activation."""
        h = x.astype(jnp.float32)
        axes = tuple(range(x.ndim - 1))
        mean = h.mean(axes)
        variance = jnp.maximum(0.0, (h * h).mean(axes) - mean * mean)
        self.statistics.append((mean, variance))
        y = ((h - mean) * (lax.rsqrt(variance + 1e-5) * p["scale"]) + p["bias"]).astype(x.dtype)
        y = y if residual is None else y + residual
        return y if activation is None else getattr(jax.nn, activation)(y)

    def layer_norm(self, x: Array, p: Norm) -> Array:
        h = x.astype(jnp.float32)
        mean = h.mean(-1, keepdims=True)
        variance = jnp.maximum(0.0, (h * h).mean(-1, keepdims=True) - mean * mean)
        return ((h - mean) * lax.rsqrt(variance + 1e-6) * p["scale"] + p["bias"]).astype(x.dtype)

    def group_norm(self, x: Array, p: Norm, groups: int, activation: str) -> Array:
        """Over channels and the image, then the activation; with a group for each channel instance normalisation."""
        h = x.astype(jnp.float32).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
        mean = h.mean((1, 3), keepdims=True)
        variance = jnp.maximum(0.0, (h * h).mean((1, 3), keepdims=True) - mean * mean)
        y = ((h - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape) * p["scale"] + p["bias"]
        return getattr(jax.nn, activation)(y).astype(x.dtype)

    def activation(self, x: Array, name: str) -> Array:
        """relu, gelu (by erf), silu or sigmoid."""
        return jax.nn.gelu(x, approximate=False) if name == "gelu" else getattr(jax.nn, name)(x)

    def dense(self, x: Array, w: Array, bias: Any = None) -> Array:
        y = x @ w.astype(x.dtype)
        return y if bias is None else y + bias.astype(y.dtype)

    def embed(self, table: Array, tokens: Array) -> Array:
        return table[tokens].astype(jnp.bfloat16)

    def rms_norm(self, x: Array, scale: Array) -> Array:
        h = x.astype(jnp.float32)
        return (h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)

    def heads(self, x: Array, count: int) -> Array:
        """(N, T, D) as (N, T, heads, features)."""
        return x.reshape(*x.shape[:2], count, -1)

    def rope(self, x: Array, base: float) -> Array:
        half = x.shape[-1] // 2
        angle = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def attention(self, q: Array, k: Array, v: Array, causal: bool = False) -> Array:
        """(N, T, heads, features) to (N, T, D)."""
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(*q.shape[:2], -1)

    def max_pool(self, x: Array) -> Array:
        padding = ((0, 0), (1, 1), (1, 1), (0, 0))
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)

    def mean(self, x: Array, keep: bool = False) -> Array:
        """Over the image: (N, C), or (N, 1..., C) to be multiplied with images."""
        return x.astype(jnp.float32).mean(tuple(range(1, x.ndim - 1)), keepdims=keep).astype(x.dtype)

    def concatenate(self, x: Array, y: Array) -> Array:
        return jnp.concatenate([x, y], -1)

    def tokens(self, x: Array) -> Array:
        """Images as (N, pixels, C)."""
        return x.reshape(x.shape[0], -1, x.shape[-1])

    def multiply(self, x: Array, p: Array) -> Array:
        return x * p.astype(x.dtype)

    def cross_entropy(self, x: Array, w: Array, labels: Array) -> Array:
        logits = (x @ w.astype(x.dtype)).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    def mean_square(self, x: Array) -> Array:
        """A loss for networks that end in an image."""
        return jnp.square(x.astype(jnp.float32)).mean()


class Jaxdnn(Lax):
    """The operations by this library wherever it has the op; matrix products are XLA's."""

    def conv(
        self,
        x: Array,
        w: Array,
        bias: Any = None,
        *,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        residual: Any = None,
    ) -> Array:
        bias = None if bias is None else bias.astype(x.dtype)
        window: Any = {"stride": stride, "padding": padding, "groups": groups, "layout": plain.AXES[x.ndim][0]}
        return dnn.conv(x, w.astype(x.dtype), bias=bias, residual=residual, **window)

    def conv_skip(self, x: Array, w: Array, activation: str | None) -> tuple[Array, Array]:
        return dnn.conv_skip(x, w.astype(x.dtype), input_activation=activation)

    def conv_transpose(self, x: Array, w: Array, stride: int) -> Array:
        return dnn.conv_transpose(x, w.astype(x.dtype), stride=stride, layout=plain.AXES[x.ndim][0])

    def batch_norm(self, x: Array, p: Norm, *, activation: str | None = "relu", residual: Any = None) -> Array:
        y, _, _, *statistics = dnn.batch_norm(
            x, **p, residual=residual, activation=_OURS.get(activation or "", activation)
        )
        self.statistics.append((statistics[0], statistics[1]))
        return y

    def layer_norm(self, x: Array, p: Norm) -> Array:
        y: Any = dnn.layer_norm(x, **p, eps=1e-6)
        return y

    def group_norm(self, x: Array, p: Norm, groups: int, activation: str) -> Array:
        layout = plain.AXES[x.ndim][0]
        norm = dnn.instance_norm if groups == x.shape[-1] else ft.partial(dnn.group_norm, groups=groups)
        y: Any = norm(x, **p, layout=layout, activation=_OURS.get(activation, activation))
        return y

    def activation(self, x: Array, name: str) -> Array:
        return dnn.activation(x, activation=_OURS.get(name, name))

    def rms_norm(self, x: Array, scale: Array) -> Array:
        y: Any = dnn.rms_norm(x, scale=scale, eps=1e-5)
        return y

    def rope(self, x: Array, base: float) -> Array:
        return dnn.rope(x, base=base)

    def attention(self, q: Array, k: Array, v: Array, causal: bool = False) -> Array:
        y: Any = dnn.attention(q, k, v, causal=causal)
        return y.reshape(*q.shape[:2], -1)

    def max_pool(self, x: Array) -> Array:
        return dnn.pool(x, window=3, stride=2, padding=1)

    def cross_entropy(self, x: Array, w: Array, labels: Array) -> Array:
        return dnn.linear_cross_entropy(x, w.astype(x.dtype), labels)
