"""Products of matrices in plain JAX, by the names of the manifest's examples."""

import jax
import jax.numpy as jnp
from jax import Array, lax

matmul = jnp.matmul
matmul_batched = jnp.matmul
grouped_matmul = lax.ragged_dot


def grouped_matmul_wgrad(a: Array, dy: Array, group_sizes: Array) -> Array:
    """The gradient of `lax.ragged_dot` in its matrices, by JAX's transpose."""
    matrices = jnp.zeros((group_sizes.shape[0], a.shape[1], dy.shape[1]), a.dtype)
    return jax.vjp(lambda b: lax.ragged_dot(a, b, group_sizes), matrices)[1](dy)[0]
