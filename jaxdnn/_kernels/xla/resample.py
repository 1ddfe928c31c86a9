"""Engine `xla` of the resampling primitive: one gather a tap, multiplied and added in the order of the taps."""

import functools as ft

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _resample, engines
from jaxdnn._resample import ResampleSpec
from jaxdnn._rounded import product

UNROLLED = 16  # taps; beyond, a loop runs over them in the same order


def run(call: engines.Call, x: Array) -> Array:
    """y[i] = Σ_k w[i, k] x[start[i] + k] along the axis before the last."""
    spec: ResampleSpec = call.spec
    start, weights = _resample.band(spec.rule, spec.transposed)
    if x.shape[-2] == 0 or weights.size == 0:
        return jnp.zeros((*x.shape[:-2], len(start), x.shape[-1]), x.dtype)
    if weights.shape[1] == 1 and np.all(weights == 1):  # one element chosen, nothing multiplied
        return _take(x, jnp.asarray(start))
    factors = jnp.asarray(weights.T, x.dtype)[..., None]

    def add_tap(k: Array | int, total: Array) -> Array:
        factor = lax.dynamic_index_in_dim(factors, k, keepdims=False)
        return total + _term(x, jnp.asarray(start) + jnp.asarray(k, jnp.int32), factor)

    # From +0, as the definition has it; behind the barrier, for XLA would leave out 0 + p, which is 0 for p = -0.
    zero = lax.optimization_barrier(jnp.zeros((), x.dtype))
    total = jnp.broadcast_to(zero, (*x.shape[:-2], len(start), x.shape[-1]))
    if len(factors) > UNROLLED:
        return lax.fori_loop(0, len(factors), add_tap, total)
    return ft.reduce(lambda total, k: add_tap(k, total), range(len(factors)), total)


def _take(x: Array, rows: Array) -> Array:
    return x.at[..., rows, :].get(mode="promise_in_bounds")


def _term(x: Array, rows: Array, factor: Array) -> Array:
    """w x, and 0 where w is 0: an element of weight 0 is not read, be it infinite or NaN."""
    factor = jnp.broadcast_to(factor, (*x.shape[:-2], factor.shape[0], x.shape[-1]))
    return jnp.where(factor == 0, jnp.zeros_like(factor), product(factor, _take(x, rows)))


engines.register(
    engines.Engine(
        name="xla",
        op="resample",
        run=run,
        level=lambda call: "portable",
        accumulation=lambda call: "float64" if call.avals[0].dtype == np.float64 else "float32",
        notes=("a gather per tap in both directions: no scatter, no atomics",),
    )
)
