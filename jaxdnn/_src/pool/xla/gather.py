"""The backward pass of max-pooling in gather form: every element of dx joins the dy of the windows that chose it."""

import functools as ft
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core.padding import pad
from jaxdnn._src.core.partitioning import vary_alike
from jaxdnn._src.pool.spec import PoolSpec, x_shape
from jaxdnn._src.pool.xla.fold import Item, last_first

UNROLLED_TERMS = 128  # beyond, a loop over the taps
UNROLLED_ON_CPUS = 8  # XLA would compute the chosen tap, which it fuses with its use, anew for every term


def phases(spec: PoolSpec, i: int) -> list[list[tuple[int, int]]]:
    """For h = a, a + stride, ...: the (tap, shift) whose output is h // stride + shift, taps ascending."""
    stride, dilation, (low, _) = spec.stride[i], spec.dilation[i], spec.padding[i]
    reach = [[(r, divmod(a + low - r * dilation, stride)) for r in range(spec.taps[i])] for a in range(stride)]
    return [[(r, shift) for r, (shift, rest) in phase if rest == 0] for phase in reach]


def interleaved(parts: list[Array], axis: int, size: int) -> Array:
    """parts[a] holds the elements a, a + stride, ... of the result."""
    if len(parts) == 1:
        return parts[0]
    stacked = jnp.stack(parts, parts[0].ndim + axis + 1)
    shape = list(parts[0].shape)
    shape[axis] *= len(parts)
    return lax.slice_in_dim(stacked.reshape(shape), 0, size, 1, len(shape) + axis)


def shifted(a: Array, axis: int, shift: int, count: int, fill: Any) -> Array:
    """a[i + shift] for i < count along an axis, `fill` outside."""
    widths = [(0, 0, 0)] * a.ndim
    widths[axis] = (-shift, count + shift - a.shape[axis], 0)
    return a if widths[axis] == (0, 0, 0) else pad(a, fill, widths)


def gather_form(
    spec: PoolSpec, dy: Item, tap: Array, join: Callable[[Item, Item], Item], unrolled: int = UNROLLED_TERMS
) -> Item:
    """Every element of dx: the dy of the windows that chose it, zero of the others, joined in the order of the taps.

    dy: an array, or several of its shape; unrolled: up to how many taps there is no loop over them.
    """
    if spec.disjoint:
        return _gather_disjoint(spec, dy, tap)
    if math.prod(spec.taps) > unrolled or math.prod(spec.stride) > unrolled:
        return _gather_by_loop(spec, dy, tap, join)
    return _gather_phases(spec, dy, tap, join, [], 0)


def _chosen(chosen: Array, dy: Item) -> Item:
    return jax.tree.map(lambda a: jnp.where(chosen, a, jnp.zeros_like(a)), dy)


def _gather_phases(spec: PoolSpec, dy: Item, tap: Array, join: Any, chosen: list[Any], i: int) -> Item:
    """Axis by axis chooses a phase; with all chosen, adds the phase's terms."""
    if i == len(spec.spatial):
        return _gather_phase(spec, dy, tap, join, chosen)
    parts = [_gather_phases(spec, dy, tap, join, [*chosen, p], i + 1) for p in phases(spec, i)]
    return jax.tree.map(lambda *parts: interleaved(list(parts), spec.spatial[i], spec.sizes[i]), *parts)


def _gather_phase(spec: PoolSpec, dy: Item, tap: Array, join: Any, chosen: list[Any]) -> Item:
    counts = [-(-size // stride) for size, stride in zip(spec.sizes, spec.stride, strict=True)]

    def moved(a: Array, places: Sequence[tuple[int, int]]) -> Array:
        for axis, count, (_, shift) in zip(spec.spatial, counts, places, strict=True):
            a = shifted(a, axis, shift, count, 0)
        return a

    total = None
    for places in itertools.product(*chosen):
        t = int(np.ravel_multi_index([r for r, _ in places], spec.taps))
        values = jax.tree.map(lambda a, places=places: moved(a, places), dy)
        term = _chosen(moved(tap, places) == jnp.asarray(t, tap.dtype), values)
        total = term if total is None else join(total, term)
    if total is None:
        total = jax.tree.map(lambda a: jnp.zeros_like(moved(a, [(0, 0)] * len(counts))), dy)
    return total


def _gather_disjoint(spec: PoolSpec, dy: Item, tap: Array) -> Item:
    """The gather for windows that do not overlap: dy and tap are repeated over the elements of their window."""
    wanted = np.zeros((), np.int64)
    for i, axis in enumerate(spec.spatial):
        stride, dilation, (low, _) = spec.stride[i], spec.dilation[i], spec.padding[i]
        stride = spec.sizes[i] + low if spec.outputs[i] == 1 else stride
        along = ft.partial(spread, axis=axis, stride=stride, low=low, size=spec.sizes[i])
        dy, tap = jax.tree.map(along, dy), along(tap)
        p, place = np.divmod(np.arange(spec.sizes[i]) + low, stride)
        r, rest = np.divmod(place, dilation)
        r = np.where((rest == 0) & (r < spec.taps[i]) & (p < spec.outputs[i]), r, -math.prod(spec.taps))
        wanted = wanted[..., None] * spec.taps[i] + r
    shape = [1] * tap.ndim
    for i, axis in enumerate(spec.spatial):
        shape[axis] = spec.sizes[i]
    here = jnp.asarray(np.where(wanted < 0, -2, wanted).reshape(shape), jnp.int32)  # -1: an index outside its window
    return _chosen(tap.astype(jnp.int32) == here, dy)


def spread(a: Array, axis: int, stride: int, low: int, size: int) -> Array:
    """a[(h + low) // stride] for h < size, 0 where there is none."""
    at = a.ndim + axis
    wide = lax.broadcast_in_dim(
        a, (*a.shape[: at + 1], stride, *a.shape[at + 1 :]), [d + (d > at) for d in range(a.ndim)]
    )
    flat = wide.reshape(*a.shape[:at], a.shape[at] * stride, *a.shape[at + 1 :])
    return shifted(flat, axis, low, size, 0)


def _gather_by_loop(spec: PoolSpec, dy: Item, tap: Array, join: Any) -> Item:
    """The gather for long overlapping windows: a loop over the taps, dy and tap spaced out by the strides."""
    rank, shape = tap.ndim, x_shape(spec, tap.shape)
    widths, reach = [(0, 0, 0)] * rank, []
    for i, axis in enumerate(spec.spatial):
        stride, low = spec.stride[i], spec.padding[i][0]
        before = max(spec.extents[i] - 1 - low, 0)
        widths[axis] = (before, max(spec.sizes[i] + low - (spec.outputs[i] - 1) * stride - 1, 0), stride - 1)
        reach.append(before + low)
    spaced, indices = jax.tree.map(lambda a: pad(a, 0, widths), (dy, tap))

    def body(t: Array, carry: tuple[Item, Array]) -> tuple[Item, Array]:
        t, (total, started) = t.astype(jnp.int32), carry  # of 64 bits where JAX has such integers
        start, mine, rest = [jnp.zeros((), jnp.int32)] * rank, jnp.ones((1,) * rank, bool), t
        for i, axis in last_first(spec):
            r, rest = rest % spec.taps[i], rest // spec.taps[i]
            start[axis] = reach[i] - r * spec.dilation[i]
            h = lax.broadcasted_iota(
                jnp.int32, [n if d == rank + axis else 1 for d, n in enumerate(shape)], rank + axis
            )
            offset = spec.padding[i][0] - r * spec.dilation[i]
            mine = mine & ((h + offset) % spec.stride[i] == 0)
        values, index = jax.tree.map(lambda a: lax.dynamic_slice(a, start, shape), (spaced, indices))
        term = _chosen(index.astype(jnp.int32) == t, values)
        joined = jax.tree.map(lambda a, b: jnp.where(started, a, b), join(total, term), term)
        return jax.tree.map(lambda a, b: jnp.where(mine, a, b), joined, total), started | mine

    none = jnp.zeros([n if d - rank in spec.spatial else 1 for d, n in enumerate(shape)], bool)
    leaves, structure = jax.tree.flatten(dy)
    # What a loop carries must vary over the same mesh axes before and after a step.
    zeros = vary_alike([*(jnp.zeros(shape, a.dtype) for a in leaves), *leaves, tap])[: len(leaves)]
    zeros = jax.tree.unflatten(structure, zeros)
    return lax.fori_loop(0, math.prod(spec.taps), body, (zeros, none))[0]
