"""Activations in plain JAX, as users write them, and the manifest's examples by their names."""

import functools as ft

import jax
import jax.numpy as jnp

FUNCTIONS = {
    "relu": jax.nn.relu,
    "gelu": ft.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
}
activation = FUNCTIONS["gelu"]
activation_dgrad = lambda dy, x: jax.vjp(activation, x)[1](dy)[0]
prelu = lambda x, slope: jnp.where(x > 0, x, jnp.expand_dims(slope, tuple(range(x.ndim - 1))) * x)
