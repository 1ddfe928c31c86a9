"""Engine `xla` of sampling: gathers in all directions, sums of a stated order; no scatter and no atomics.

The gradient in the image sorts the taps by pixel. Those of a pixel are in the order of the taps from the last to the
first, and of one tap in that of points: so points are in the order of the cells that they lie in, which is what a
kernel sorts. Each pixel's list is added up in pairs of neighbours, then pairs of these, and so on: an order that
depends on it alone.
"""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax

from jaxdnn._src.core import engines, trees
from jaxdnn._src.core.rounding import nearest, product
from jaxdnn._src.sampling.primitive import ARRAYS, AT, AT_SLOPES, AT_TANGENT, NAMES, SampleSpec, results

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


def samples(x: Array, taps: Sequence[tuple[Array, Array]]) -> Array:
    """y[m] = 0 + w[m, 0] x[i[m, 0]] + w[m, 1] x[i[m, 1]] + ..., of the taps (i, w)."""
    zero, shape = _zero(x.dtype), (*taps[0][0].shape, x.shape[2])
    add = lambda total, tap: total + _term(tap[1], _rows(x, tap[0]))
    return ft.reduce(add, taps, jnp.broadcast_to(zero, shape))


def samples_in_turn(x: Array, w: Array, index: Array) -> Array:
    """The same of many taps, in a loop."""
    tap = lambda v, t: lax.dynamic_index_in_dim(v, t, 2, keepdims=False)
    add = lambda t, total: total + _term(tap(w, t), _rows(x, tap(index, t)))
    return lax.fori_loop(0, w.shape[2], add, jnp.broadcast_to(_zero(x.dtype), (*w.shape[:2], x.shape[2])))


def _zero(dtype: Any) -> Array:
    """The barrier keeps XLA from removing 0 + p, which is +0 for p = -0."""
    return lax.optimization_barrier(jnp.zeros((), dtype))


def weights(x: Array, y: Array, index: Sequence[Array] | Array) -> Array:
    """w[m, t] = Σ_c x[i[m, t], c] y[m, c], on a tree that depends on the number of channels alone.

    index: one by one, or of many taps an array with these on its first axis.
    """
    of = lambda at: trees.tree(jnp.add, product(_rows(x, at), y), 2)[..., 0]
    return jnp.stack(list(map(of, index)), 2) if isinstance(index, Sequence) else jnp.moveaxis(lax.map(of, index), 0, 2)


def pixels(w: Array, y: Array, index: Array, count: int) -> Array:
    """x[p] = Σ w[m, t] y[m] over the taps with i[m, t] = p."""
    images, points, taps = w.shape
    entries = points * taps
    w, index = (jnp.moveaxis(v, 2, 1)[:, ::-1].reshape(images, entries) for v in (w, index))
    place = jnp.broadcast_to(jnp.arange(entries, dtype=jnp.int32), (images, entries))
    keys = jnp.where(index < 0, jnp.int32(count), index)  # those of no pixel come last
    keys, source = _sorted(keys, place, count)
    start = jax.vmap(lambda k: jnp.searchsorted(k, jnp.arange(count + 2, dtype=jnp.int32)).astype(jnp.int32))(keys)
    along = ft.partial(jnp.take_along_axis, axis=1, mode="promise_in_bounds")
    rank, left = place - along(start, keys), along(start, keys + 1) - place
    sums = _term(along(w, source), _rows(y, source % points))

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
    out = results(call.op, spec, *operands)
    if any(0 in v.shape for v in operands):
        return jnp.zeros(out.shape, out.dtype)
    names, result = ARRAYS[call.op]
    given = dict(zip(names, (_flat(len(spec.sizes), v) for v in operands), strict=True))
    if call.op == AT_TANGENT:
        grid = _flat(len(spec.sizes), operands[1])
        given |= {"w": spec.along(grid, given["at"]), "at": grid}
    wide = operands[0].dtype if spec.rule is None else spec.wide
    x, y, w = (given[name].astype(wide) if name in given else None for name in ("x", "y", "w"))
    if call.op == AT_SLOPES:
        found = spec.slopes(given["at"], _by_rule(spec, "w", x, y, None, given["at"]))
    elif spec.rule is not None:
        found = _by_rule(spec, result, x, y, w, given["at"])
    else:
        found = _of_indices(result, x, y, w, given["at"], math.prod(spec.sizes))
    return nearest(found, out.dtype).reshape(out.shape)


def _of_indices(result: str, x: Any, y: Any, w: Any, index: Array, count: int) -> Array:
    """The array of the form that is not given, of x, y and w."""
    if result == "x":
        return pixels(w, y, index, count)
    if result == "w":
        each = jnp.moveaxis(index, 2, 0)
        return weights(x, y, each if len(each) > UNROLLED else list(each))
    if index.shape[2] > UNROLLED:
        return samples_in_turn(x, w, index)
    return samples(x, [(index[..., t], w[..., t]) for t in range(index.shape[2])])


def _by_rule(spec: SampleSpec, result: str, x: Any, y: Any, w: Any, grid: Array) -> Array:
    """The same at the points of a grid, with the weights of these where there are none: few taps one by one."""
    if spec.count > UNROLLED or result == "x":
        index, of_points = spec.taps(grid)
        return _of_indices(result, x, y, of_points if w is None else w, index, math.prod(spec.sizes))
    taps = spec.of_grid.listed(grid, spec.sizes)
    if result == "w":
        return weights(x, y, [index for index, _ in taps])
    own = [v.astype(spec.wide) for _, v in taps] if w is None else [w[..., t] for t in range(len(taps))]
    return samples(x, [(index, v) for (index, _), v in zip(taps, own, strict=True)])


engines.declare(
    "xla",
    *ARRAYS,
    run=_run,
    level=lambda call: "portable" if call.op in (NAMES["y"], AT) else "mesh_invariant",
    partition=lambda call: True,
    accumulation=lambda call: "float64" if call.avals[0].dtype == np.float64 else "float32",
    notes=("gathers in both directions: no scatter, no atomics",),
)
