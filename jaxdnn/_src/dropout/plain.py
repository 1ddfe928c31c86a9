"""Dropout in plain JAX, by the names of the manifest's examples, with `jax.random`'s bits in place of ours."""

import jax
import jax.numpy as jnp
from jax import Array


def dropout(x: Array) -> Array:
    return jnp.where(jax.random.bernoulli(jax.random.key(7), 0.5, x.shape), x / 0.5, jnp.zeros_like(x))


dropout_mask = lambda shape: jax.random.bernoulli(jax.random.key(7), 0.5, shape)
