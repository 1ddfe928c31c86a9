"""CTC in plain JAX, by the names of the manifest's examples: the recursion over logarithms."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def _ctc_lattice(labels: Array) -> tuple[np.ndarray, Array]:
    """Of each state its place among the blank and the labels, and whether a path may leave out the blank before it."""
    count = labels.shape[1]
    skips = jnp.pad(labels[:, 1:] != labels[:, :-1], ((0, 0), (1, 0)))[:, :count]
    skips = jnp.pad(jnp.stack([jnp.zeros_like(skips), skips], 2).reshape(len(labels), 2 * count), ((0, 0), (0, 1)))
    return np.array([s // 2 + 1 if s % 2 else 0 for s in range(2 * count + 1)]), skips


def _ctc_log(emitted: Array, labels: Array) -> Array:
    """The logarithm of the probability of labels, from those of the blank and of each label in each step."""
    states, skips = _ctc_lattice(labels)
    low = jnp.float32(-1e5)
    start = jnp.full(skips.shape, low).at[:, 0].set(0)
    before = lambda v, n: jnp.pad(v, ((0, 0), (n, 0)), constant_values=low)[:, : v.shape[1]]

    def step(alpha: Array, own: Array) -> tuple[Array, None]:
        skipped = jnp.where(skips, before(alpha, 2), low)
        return own[:, states] + jnp.logaddexp(jnp.logaddexp(alpha, before(alpha, 1)), skipped), None

    alpha, _ = lax.scan(step, start, jnp.moveaxis(emitted, 1, 0))
    return jnp.logaddexp(alpha[:, -1], alpha[:, -2])


def _ctc_emitted(x: Array, labels: Array, blank: int) -> Array:
    symbols = jnp.pad(labels, ((0, 0), (1, 0)), constant_values=blank % x.shape[2])
    log = jax.nn.log_softmax(x.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(log, jnp.expand_dims(symbols, 1), 2)


def ctc_loss(x: Array, labels: Array, blank: int = -1) -> Array:
    return -_ctc_log(_ctc_emitted(x, labels, blank), labels)


def ctc_posterior(x: Array, labels: Array) -> Array:
    return jax.grad(lambda emitted: jnp.sum(_ctc_log(emitted, labels)))(_ctc_emitted(x, labels, -1))


def ctc_align(x: Array, labels: Array, blank: int = -1) -> Array:
    emitted, states, skips = _ctc_emitted(x, labels, blank), *_ctc_lattice(labels)
    low = jnp.float32(-1e5)
    before = lambda v, n: jnp.pad(v, ((0, 0), (n, 0)), constant_values=low)[:, : v.shape[1]]

    def step(best: Array, own: Array) -> tuple[Array, Array]:
        came = jnp.stack([best, before(best, 1), jnp.where(skips, before(best, 2), low)])
        return own[:, states] + jnp.max(came, 0), jnp.argmax(came, 0)

    start = jnp.full(skips.shape, low).at[:, 0].set(0)
    best, moves = lax.scan(step, start, jnp.moveaxis(emitted, 1, 0))
    last = skips.shape[1] - 1 - (best[:, -2] >= best[:, -1]).astype(jnp.int32)

    def back(state: Array, moves: Array) -> tuple[Array, Array]:
        return state - jnp.take_along_axis(moves, state[:, None], 1)[:, 0], jnp.asarray(states, jnp.int32)[state]

    return lax.scan(back, last, moves, reverse=True)[1].T


ctc_lengths = lambda p: jnp.sum(jnp.cumprod((p == 0).astype(jnp.int32), 1), 1)
