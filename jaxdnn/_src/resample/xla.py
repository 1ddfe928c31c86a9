"""Engine `xla` of the resampling primitive: for each tap one gather, multiplied and added in the order of the taps."""

import functools as ft
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core import engines
from jaxdnn._src.core.rounding import product
from jaxdnn._src.resample import band
from jaxdnn._src.resample.band import ResampleSpec

UNROLLED = 16  # taps; beyond, a loop runs over them in the same order


def run(call: engines.Call, x: Array) -> Array:
    """y[i] = Σ_k w[i, k] x[start[i] + k] along the axis."""
    spec: ResampleSpec = call.spec
    return banded(x, spec.axis % x.ndim, *band.band(spec.rule, spec.transposed))


def banded(
    x: Array, axis: int, start: np.ndarray, weights: np.ndarray, here: Callable[[Array], Array] = lambda full: full
) -> Array:
    """The product with a banded matrix along an axis; `here` selects a device's results from an array for all."""
    first = here(jnp.asarray(start))
    shape = (*x.shape[:axis], len(first), *x.shape[axis + 1 :])
    if x.shape[axis] == 0 or weights.size == 0:
        return jnp.zeros(shape, x.dtype)
    if weights.shape[1] == 1 and np.all(weights == 1):  # one element chosen, nothing multiplied
        return _take(x, first, axis)
    factors = here(jnp.asarray(weights, x.dtype)).T

    def add_tap(k: Array | int, total: Array) -> Array:
        factor = lax.dynamic_index_in_dim(factors, k, keepdims=False)
        factor = lax.broadcast_in_dim(factor, shape, (axis,))
        return total + _term(factor, _take(x, first + jnp.asarray(k, jnp.int32), axis))

    # From +0, as in the definition. The barrier keeps XLA from removing 0 + p, which is +0 for p = -0.
    zero = lax.optimization_barrier(jnp.zeros((), x.dtype))
    total = jnp.broadcast_to(zero, shape)
    if len(factors) > UNROLLED:
        return lax.fori_loop(0, len(factors), add_tap, total)
    return ft.reduce(lambda total, k: add_tap(k, total), range(len(factors)), total)


def _take(x: Array, rows: Array, axis: int) -> Array:
    return x.at[(slice(None),) * axis + (rows,)].get(mode="promise_in_bounds")


def _term(factor: Array, x: Array) -> Array:
    """w x, and 0 where w is 0: an infinity or NaN of weight 0 has no effect."""
    return jnp.where(factor == 0, jnp.zeros_like(factor), product(factor, x))


engines.declare(
    "xla",
    "resample",
    run=run,
    level=lambda call: "portable",
    partition=lambda call: True,
    accumulation=lambda call: "float64" if call.avals[0].dtype == np.float64 else "float32",
    notes=("a gather per tap in both directions: no scatter, no atomics",),
)
