"""The two halves of the p-norm of a window, between which its terms are added: (Σ |x|^p)^(1/p)."""

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.core import rounding
from jaxdnn._src.core.rounding import product


def powers(p: float, x: Array) -> Array:
    """|x|^p, whose derivative at 0 is 0, which that of JAX's abs is not."""
    size = product(x, jnp.sign(x))
    return size if p == 1 else product(x, x) if p == 2 else rounding.power(size, p)


def root(p: float, total: Array) -> Array:
    """total^(1/p), whose derivative at 0 is 0."""
    positive = total > 0
    safe = jnp.where(positive, total, jnp.ones_like(total))
    found = safe if p == 1 else rounding.root(safe) if p == 2 else rounding.power(safe, 1 / p)
    return jnp.where(positive, found, total)
