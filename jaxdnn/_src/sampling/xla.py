"""Engine `xla` of sampling: gathers in all directions, sums of a stated order; no scatter and no atomics.

The gradient in the image sorts the taps by pixel, which keeps those of a pixel in the order of points and taps. Each
pixel's list is added up in pairs of neighbours, then pairs of these, and so on: an order that depends on it alone.
"""

import functools as ft
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax

from jaxdnn._src.core import engines, trees
from jaxdnn._src.core.rounding import product
from jaxdnn._src.sampling.primitive import NAMES, SampleSpec, results

UNROLLED = 16  # taps; beyond, a loop runs over them in the same order


def _flat(rank: int, v: Array) -> Array:
    """An array with one axis of images, and one of pixels or points, before its last."""
    return v.reshape(math.prod(v.shape[: -rank - 1]), math.prod(v.shape[-rank - 1 : -1]), v.shape[-1])


def _rows(x: Array, index: Array) -> Array:
    """x at an index a point; zeros where there is no pixel."""
    found = jnp.take_along_axis(x, jnp.maximum(index, 0)[..., None], 1, mode="promise_in_bounds")
    return jnp.where(index[..., None] < 0, jnp.zeros_like(found), found)


def _term(w: Array, x: Array) -> Array:
    """w x, and 0 where w is 0: an infinity or NaN of weight 0 has no effect."""
    w = w[..., None]
    return jnp.where(w == 0, jnp.zeros((), x.dtype), product(w, x))


def samples(x: Array, w: Array, index: Array) -> Array:
    """y[m] = 0 + w[m, 0] x[i[m, 0]] + w[m, 1] x[i[m, 1]] + ..."""
    tap = lambda v, t: lax.dynamic_index_in_dim(v, t, 2, keepdims=False)
    add = lambda t, total: total + _term(tap(w, t), _rows(x, tap(index, t)))
    # The barrier keeps XLA from removing 0 + p, which is +0 for p = -0.
    zero = lax.optimization_barrier(jnp.zeros((), x.dtype))
    total = jnp.broadcast_to(zero, (*w.shape[:2], x.shape[2]))
    if w.shape[2] > UNROLLED:
        return lax.fori_loop(0, w.shape[2], add, total)
    return ft.reduce(lambda total, t: add(t, total), range(w.shape[2]), total)


def weights(x: Array, y: Array, index: Array) -> Array:
    """w[m, t] = Σ_c x[i[m, t], c] y[m, c], on a tree that depends on the number of channels alone."""
    of = lambda at: trees.tree(jnp.add, product(_rows(x, at), y), 2)[..., 0]
    each = jnp.moveaxis(index, 2, 0)
    return jnp.moveaxis(lax.map(of, each) if len(each) > UNROLLED else jnp.stack(list(map(of, each))), 0, 2)


def pixels(w: Array, y: Array, index: Array, count: int) -> Array:
    """x[p] = Σ w[m, t] y[m] over the taps with i[m, t] = p."""
    images, points, taps = w.shape
    entries = points * taps
    place = jnp.broadcast_to(jnp.arange(entries, dtype=jnp.int32), (images, entries))
    keys = jnp.where(index < 0, jnp.int32(count), index).reshape(images, entries)  # those of no pixel come last
    keys, source = _sorted(keys, place, count)
    start = jax.vmap(lambda k: jnp.searchsorted(k, jnp.arange(count + 2, dtype=jnp.int32)).astype(jnp.int32))(keys)
    along = ft.partial(jnp.take_along_axis, axis=1, mode="promise_in_bounds")
    rank, left = place - along(start, keys), along(start, keys + 1) - place
    sums = _term(along(w.reshape(images, entries), source), _rows(y, source // taps))

    def add_pairs(state: tuple[Array, Array]) -> tuple[Array, Array]:
        stride, sums = state
        padded = lax.concatenate([sums, sums], 1)
        other = lax.dynamic_slice_in_dim(padded, stride, entries, axis=1)
        joined = (rank % (2 * stride) == 0) & (left > stride)
        return 2 * stride, jnp.where(joined[..., None], sums + other, sums)

    longest = jnp.max(start[:, 1 : count + 1] - start[:, :count])
    _, sums = lax.while_loop(lambda state: state[0] < longest, add_pairs, (jnp.int32(1), sums))
    first = jnp.where(start[:, :count] < start[:, 1 : count + 1], start[:, :count], -1)
    return _rows(sums, first)


def _sorted(keys: Array, place: Array, largest: int) -> tuple[Array, Array]:
    """Keys in their order with the places they come from, which keep theirs among equal ones."""
    entries = keys.shape[1]
    if export.is_symbolic_dim(entries) or (largest + 1) * entries > 2**32:
        keys, place = lax.sort((keys, place), dimension=1, num_keys=1, is_stable=True)
        return keys, place
    # Both in one number: on CPUs in a quarter of the time.
    size = jnp.uint32(entries)
    both = lax.sort(keys.astype(jnp.uint32) * size + place.astype(jnp.uint32), dimension=1, is_stable=False)
    return (both // size).astype(jnp.int32), (both % size).astype(jnp.int32)


def _run(call: engines.Call, *operands: Array) -> Array:
    spec: SampleSpec = call.spec
    result = next(result for result, name in NAMES.items() if name == call.op)
    out = results(result, spec, *operands)
    if any(0 in v.shape for v in operands):
        return jnp.zeros(out.shape, out.dtype)
    run = {"y": samples, "w": weights, "x": ft.partial(pixels, count=math.prod(spec.sizes))}[result]
    return run(*(_flat(len(spec.sizes), v) for v in operands)).reshape(out.shape)


engines.declare(
    "xla",
    *NAMES.values(),
    run=_run,
    level=lambda call: "portable" if call.op == "grid_sample" else "mesh_invariant",
    partition=lambda call: True,
    accumulation=lambda call: "float64" if call.avals[0].dtype == np.float64 else "float32",
    notes=("gathers in both directions: no scatter, no atomics",),
)
