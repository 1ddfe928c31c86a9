"""Attention in plain JAX, by the names of the manifest's examples."""

import jax
import jax.numpy as jnp
from jax import Array


def attention(q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal)


def merge_attention(y: Array, logsumexp: Array) -> tuple[Array, Array]:
    share = jax.nn.softmax(logsumexp, 0)[..., None]
    return jnp.sum(share * y, 0), jax.nn.logsumexp(logsumexp, 0)
