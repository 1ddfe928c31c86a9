"""Attention in plain JAX, by the names of the manifest's examples."""

import jax
import jax.numpy as jnp
from jax import Array


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def attention_of(q: Array, k: Array, v: Array, *, causal: bool, window: int | None) -> Array:
    """By `jax.nn` where values are as wide as keys; a window is of so many keys before a query."""
    if q.shape[3] == v.shape[3]:
        local = None if window is None else (window, 0)
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, local_window_size=local)
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
    x = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    distance = jnp.arange(k.shape[1])[None] - jnp.arange(q.shape[1])[:, None]
    seen = (distance <= 0 if causal else True) & (True if window is None else distance >= -window)
    p = jax.nn.softmax(jnp.where(seen, x, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", p, v)


def attention_decode(q: Array, k: Array, v: Array, key_lengths: Array) -> Array:
    rows = jnp.arange(q.shape[1])[None, :, None] + (key_lengths - q.shape[1])[:, None, None]
    mask = jnp.arange(k.shape[1])[None, None] <= rows
    y = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
    return jnp.where((key_lengths > 0)[:, None, None, None], y, jnp.zeros_like(y))


def rope(x: Array) -> Array:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * 10000.0 ** (-jnp.arange(half) / half)[None]
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos[None] - b * sin[None], b * cos[None] + a * sin[None]], -1)


def attention_bias(q: Array, k: Array, v: Array, bias: Array) -> Array:
    """With scores cut softly at 2."""
    x = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(2 * jnp.tanh(x / 2) + bias), v)


def attention_dgrad(dy: Array, q: Array, k: Array, v: Array, y: Array, logsumexp: Array) -> tuple[Array, Array, Array]:
    scale, of_row = q.shape[-1] ** -0.5, jnp.einsum("bthd,bthd->bht", dy, y)
    x = jnp.einsum("bthd,bshd->bhts", q, k) * scale
    p = jnp.exp(x - jnp.swapaxes(logsumexp, 1, 2)[..., None])
    ds = p * (jnp.einsum("bthd,bshd->bhts", dy, v) - of_row[..., None]) * scale
    dv = jnp.einsum("bhts,bthd->bshd", p, dy)
    return jnp.einsum("bhts,bshd->bthd", ds, k), jnp.einsum("bhts,bthd->bshd", ds, q), dv


def merge_attention(y: Array, logsumexp: Array) -> tuple[Array, Array]:
    share = jax.nn.softmax(logsumexp, 0)[..., None]
    return jnp.sum(share * y, 0), jax.nn.logsumexp(logsumexp, 0)
