"""Recurrent layers in plain JAX, by the names of the manifest's examples."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def lstm_cell(x: Array, w: Array, r: Array, h: Array, c: Array) -> tuple[Array, Array]:
    return _lstm(x @ w, h @ r, c)


def _lstm(a: Array, s: Array, c: Array) -> tuple[Array, Array]:
    i, f, g, o = jnp.split(a + s, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru_cell(x: Array, w: Array, r: Array, h: Array) -> Array:
    return _gru(x @ w, h @ r, h)


def _gru(a: Array, s: Array, h: Array) -> Array:
    (a_r, a_z, a_n), (s_r, s_z, s_n) = jnp.split(a, 3, -1), jnp.split(s, 3, -1)
    z = jax.nn.sigmoid(a_z + s_z)
    return (1 - z) * jnp.tanh(a_n + jax.nn.sigmoid(a_r + s_r) * s_n) + z * h


def rnn_cell(x: Array, w: Array, r: Array, h: Array, bias: Array) -> Array:
    return jnp.tanh(x @ w + jnp.expand_dims(bias, 0) + h @ r)


def lstm(
    x: Array, w: Array, r: Array, bias: Any = None, h0: Any = None, c0: Any = None, direction: str = "forward"
) -> Any:
    def step(state: tuple[Array, Array], a: Array) -> Any:
        h, c = _lstm(a, state[0] @ r, state[1])
        return (h, c), h

    a = x @ w if bias is None else x @ w + jnp.expand_dims(bias, (0, 1))
    start = jnp.zeros((x.shape[0], r.shape[0]), x.dtype)
    states = start if h0 is None else h0, start if c0 is None else c0
    states, y = lax.scan(step, states, jnp.swapaxes(a, 0, 1), reverse=direction == "reverse")
    return jnp.swapaxes(y, 0, 1), states


def gru(x: Array, w: Array, r: Array, recurrent_bias: Array) -> Any:
    def step(h: Array, a: Array) -> Any:
        h = _gru(a, h @ r + jnp.expand_dims(recurrent_bias, 0), h)
        return h, h

    h, y = lax.scan(step, jnp.zeros((x.shape[0], r.shape[0]), x.dtype), jnp.swapaxes(x @ w, 0, 1))
    return jnp.swapaxes(y, 0, 1), h


def rnn(x: Array, w: Array, r: Array, activation: str = "tanh") -> Any:
    def step(h: Array, a: Array) -> Any:
        h = jnp.tanh(a + h @ r) if activation == "tanh" else jax.nn.relu(a + h @ r)
        return h, h

    h, y = lax.scan(step, jnp.zeros((x.shape[0], r.shape[0]), x.dtype), jnp.swapaxes(x @ w, 0, 1))
    return jnp.swapaxes(y, 0, 1), h


lstm_states = lstm
