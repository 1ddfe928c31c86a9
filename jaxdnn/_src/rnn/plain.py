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


def rnn_cell(x: Array, w: Array, r: Array, h: Array) -> Array:
    return jnp.tanh(x @ w + h @ r)


def lstm(x: Array, w: Array, r: Array) -> Any:
    start = jnp.zeros((x.shape[0], r.shape[0]), x.dtype)
    return _lstm_layer(x @ w, r, (start, start), reverse=False)


def lstm_by_cells(x: Array, w: Array, r: Array) -> Any:
    """With the product of the inputs in each step, as Flax's RNN of an OptimizedLSTMCell has it."""

    def step(state: tuple[Array, Array], x: Array) -> Any:
        h, c = lstm_cell(x, w, r, *state)
        return (h, c), h

    start = jnp.zeros((x.shape[0], r.shape[0]), x.dtype)
    states, y = lax.scan(step, (start, start), jnp.swapaxes(x, 0, 1))
    return jnp.swapaxes(y, 0, 1), states


def lstm_states(x: Array, w: Array, r: Array, bias: Array, h0: Array, c0: Array) -> Any:
    return _lstm_layer(x @ w + jnp.expand_dims(bias, (0, 1)), r, (h0, c0), reverse=True)


def _lstm_layer(a: Array, r: Array, states: tuple[Array, Array], *, reverse: bool) -> Any:
    def step(state: tuple[Array, Array], a: Array) -> Any:
        h, c = _lstm(a, state[0] @ r, state[1])
        return (h, c), h

    states, y = lax.scan(step, states, jnp.swapaxes(a, 0, 1), reverse=reverse)
    return jnp.swapaxes(y, 0, 1), states


def gru(x: Array, w: Array, r: Array) -> Any:
    return gru_bias(x, w, r, jnp.zeros(r.shape[1:], r.dtype))


def gru_bias(x: Array, w: Array, r: Array, recurrent_bias: Array) -> Any:
    return _gru_layer(x, w, r, recurrent_bias, jnp.zeros((x.shape[0], r.shape[0]), x.dtype))


def _gru_layer(x: Array, w: Array, r: Array, recurrent_bias: Array, start: Array) -> Any:
    def step(h: Array, a: Array) -> Any:
        h = _gru(a, h @ r + jnp.expand_dims(recurrent_bias, 0), h)
        return h, h

    h, y = lax.scan(step, start, jnp.swapaxes(x @ w, 0, 1))
    return jnp.swapaxes(y, 0, 1), h


def rnn(x: Array, w: Array, r: Array) -> Any:
    return _rnn_layer(x, w, r, jnp.zeros((x.shape[0], r.shape[0]), x.dtype))


def _rnn_layer(x: Array, w: Array, r: Array, start: Array) -> Any:
    def step(h: Array, a: Array) -> Any:
        h = jnp.tanh(a + h @ r)
        return h, h

    h, y = lax.scan(step, start, jnp.swapaxes(x @ w, 0, 1))
    return jnp.swapaxes(y, 0, 1), h


def lstm_dgrad(dy: Array, x: Array, w: Array, r: Array) -> Any:
    start = jnp.zeros((x.shape[0], r.shape[0]), x.dtype)
    run = lambda x, h, c: _lstm_layer(x @ w, r, (h, c), reverse=False)[0]
    dx, *states = jax.vjp(run, x, start, start)[1](dy)
    return dx, tuple(states)


def lstm_wgrad(dy: Array, x: Array, w: Array, r: Array) -> Any:
    return jax.vjp(lambda w, r: lstm(x, w, r)[0], w, r)[1](dy)


def gru_dgrad(dy: Array, x: Array, w: Array, r: Array) -> Any:
    none, start = jnp.zeros(r.shape[1:], r.dtype), jnp.zeros((x.shape[0], r.shape[0]), x.dtype)
    return jax.vjp(lambda x, h: _gru_layer(x, w, r, none, h)[0], x, start)[1](dy)


def gru_wgrad(dy: Array, x: Array, w: Array, r: Array) -> Any:
    return jax.vjp(lambda w, r: gru(x, w, r)[0], w, r)[1](dy)


def rnn_dgrad(dy: Array, x: Array, w: Array, r: Array) -> Any:
    start = jnp.zeros((x.shape[0], r.shape[0]), x.dtype)
    return jax.vjp(lambda x, h: _rnn_layer(x, w, r, h)[0], x, start)[1](dy)


def rnn_wgrad(dy: Array, x: Array, w: Array, r: Array) -> Any:
    return jax.vjp(lambda w, r: rnn(x, w, r)[0], w, r)[1](dy)
