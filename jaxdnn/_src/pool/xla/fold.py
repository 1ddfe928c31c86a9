"""Windows along one axis, joined by neighbours: what the formulas of pooling are made of."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core.padding import pad
from jaxdnn._src.pool.spec import PoolSpec

UNROLLED_TAPS = 8  # of one axis: up to here each tap is a slice
Item = Any  # arrays of the same length along the axis that is folded
Join = Callable[[Item, Item, int], Item]


def slice_axis(item: Item, start: int, count: int, step: int, axis: int) -> Item:
    stop = start + (count - 1) * step + 1 if count else start
    return jax.tree.map(lambda a: lax.slice_in_dim(a, start, stop, step, a.ndim + axis), item)


def fold(item: Item, axis: int, taps: int, stride: int, dilation: int, outputs: int, join: Join) -> Item:
    """Joins the taps p * stride + r * dilation of every output p; `join` learns how many taps apart the two start."""
    if taps <= UNROLLED_TAPS:
        return _fold_slices([slice_axis(item, r * dilation, outputs, stride, axis) for r in range(taps)], join)
    if outputs == 1 or (dilation == 1 and stride >= taps):
        return _fold_blocks(item, axis, taps, stride, dilation, outputs, join)
    return _fold_sliding(item, axis, taps, stride, dilation, outputs, join)


def _fold_slices(items: list[Item], join: Join) -> Item:
    apart = 1
    while len(items) > 1:
        joined = [join(a, b, apart) for a, b in zip(items[::2], items[1::2], strict=False)]
        items = joined + items[len(joined) * 2 :]
        apart *= 2
    return items[0]


def _fold_blocks(item: Item, axis: int, taps: int, stride: int, dilation: int, outputs: int, join: Join) -> Item:
    """Disjoint windows, as blocks that are halved at each step."""
    if outputs == 1:
        item, stride = slice_axis(item, 0, taps, dilation, axis), taps

    def blocks(a: Array) -> Array:
        a = a if a.shape[axis] >= outputs * stride else _grow(a, axis, outputs * stride - a.shape[axis])
        a = lax.slice_in_dim(a, 0, outputs * stride, 1, a.ndim + axis)
        shape = list(a.shape)
        shape[a.ndim + axis : a.ndim + axis + 1] = [outputs, stride]
        return lax.slice_in_dim(a.reshape(shape), 0, taps, 1, a.ndim + axis + 1)

    item, apart, count, inner = jax.tree.map(blocks, item), 1, taps, axis
    while count > 1:
        half = count // 2
        even, odd = (slice_axis(item, i, half, 2, inner) for i in (0, 1))
        item, rest = join(even, odd, apart), slice_axis(item, 2 * half, count - 2 * half, 1, inner)
        if count % 2:
            item = jax.tree.map(lambda a, b: lax.concatenate([a, b], a.ndim + inner), item, rest)
        apart, count = 2 * apart, count - half
    return jax.tree.map(lambda a: lax.squeeze(a, [a.ndim + inner]), item)


def _grow(a: Array, axis: int, more: int) -> Array:
    widths = [(0, 0, 0)] * a.ndim
    widths[axis] = (0, more, 0)
    return lax.pad(a, jnp.zeros((), a.dtype), widths)


def _fold_sliding(item: Item, axis: int, taps: int, stride: int, dilation: int, outputs: int, join: Join) -> Item:
    """Overlapping windows: runs of 1, 2, 4, ... taps from every start; a window is a few of them, longest first."""
    parts, at, runs, width = [], 0, item, 1
    lengths = [1 << k for k in range(taps.bit_length()) if taps >> k & 1][::-1]
    starts = dict(zip(lengths, itertools.accumulate([0, *lengths[:-1]]), strict=True))
    while width <= taps:
        if width in starts:
            at = starts[width]
            parts.insert(0, (at, slice_axis(runs, at * dilation, outputs, stride, axis)))
        if 2 * width <= taps:
            count = jax.tree.leaves(runs)[0].shape[axis] - width * dilation
            pair = (slice_axis(runs, i, count, 1, axis) for i in (0, width * dilation))
            runs = join(*pair, width)
        width *= 2
    at, total = parts.pop()
    while parts:
        start, part = parts.pop()
        total, at = join(part, total, at - start), start
    return total


def padded(spec: PoolSpec, x: Array, fill: Any) -> Array:
    """x with its padding, as far as windows reach; an axis may be cut where none does."""
    widths = [(0, 0, 0)] * x.ndim
    for axis, size, outputs, stride, extent, (low, _) in zip(
        spec.spatial,
        spec.sizes,
        spec.outputs,
        spec.stride,
        spec.extents,
        spec.padding,
        strict=True,
    ):
        widths[axis] = (low, (outputs - 1) * stride + extent - low - size, 0)
    return pad(x, fill, widths)


def last_first(spec: PoolSpec) -> Sequence[tuple[int, int]]:
    """(number, axis) of the spatial axes, the last one first."""
    return list(enumerate(spec.spatial))[::-1]
