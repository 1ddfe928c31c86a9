"""Convolution backward data on Hopper.

dx[n, i, c] = sum over (tap, k) of dy[n, (i + pad - tap * d) / s, k] w[tap, c, k], where the division has no remainder.

Schedule: that of `pipeline.py`, with output channels k in place of input channels: for each chunk of 128 bytes of k,
for each tap in order that contributes to the position, the chunk's channels in order. `batch_invariant`.

Tiling: with stride one, the forward kernel with the taps in the opposite direction. With a stride, all positions of one
phase (i mod s) use the same taps, so that each phase is a small convolution of stride one; all phases run in one
launch, those with most taps first, and TMA interleaves their outputs. Zeros are stored to phases without taps: as tiles
like those of the others, or after all tiles in whole rows (`Config.blank`). If the output has very few channels (an RGB
stem), each phase alone would use little of the tensor cores; then all phases are columns of one product over the union
of their windows, and a copy interleaves them. Taps that a phase does not have are zeros there, so that a NaN or an
infinity of dy may show in a neighbouring result that does not depend on it (`spreads_nonfinite`).

In 16-bit types the filter is read as the user stores it, without a transposing copy.
"""

import functools as ft
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper import copies, data
from jaxdnn._src.conv.hopper import epilogue as ep
from jaxdnn._src.conv.hopper.data import Plan
from jaxdnn._src.conv.hopper.limits import accumulator_of, channels_of, data_reason, narrowest, result_dtype
from jaxdnn._src.conv.hopper.plan import Axis, Config, Problem
from jaxdnn._src.hopper import branches

NARROW = 8  # with fewer output channels, the phases are joined


# Why `conv_dgrad` cannot serve a call, which adds over the output channels, or None.
supports = ft.partial(data_reason, 1)


def _x_shape(dy: Any, w: Any, geo: Geometry) -> tuple[int, ...]:
    return (dy.shape[0], *geo.sizes, channels_of(w, geo)[0])


def axes_of(geo: Geometry) -> tuple[Axis, ...]:
    """The axes of the backward pass: an output phase uses every (s / gcd(s, d))-th tap, each at its own offset."""
    axes = []
    for x, out, r, s, (low, _), d in zip(
        geo.sizes, geo.out, geo.taps, geo.stride, geo.padding, geo.dilation, strict=True
    ):
        step = s // math.gcd(s, d)
        first, count, offset = [], [], []
        for phase in range(s):
            meets = [t for t in range(r) if (phase + low - t * d) % s == 0]
            first.append(meets[0] if meets else 0)
            count.append(len(meets))
            offset.append((phase + low - meets[0] * d) // s if meets else 0)
        move = -step * d // s
        if geo.flip:  # the filter's tap at position t of the window is r - 1 - t
            first, step = [r - 1 - f for f in first], -step
        axes.append(Axis(out, x, r, 1, s, tuple(first), tuple(count), tuple(offset), step, move))
    return tuple(axes)


def plan(dy: Any, w: Any, geo: Geometry, *, epilogue: Epilogue | None, extras: tuple[Any, ...], out_dtype: Any) -> Plan:
    width = jnp.dtype(dy.dtype).itemsize
    groups, outer = geo.groups, geo.outer
    reduce, columns = dy.shape[-1] // groups, channels_of(w, geo)[0]
    chunk = min(128, max(32, reduce * width)) // width
    transpose = outer and (width != 2 or (groups > 1 and columns // groups % chunk != 0))
    pad_reduce = -reduce % (16 // width)
    align = max(16 // narrowest(out_dtype, extras), 8 if outer and not transpose else 1)
    pad_columns = -columns % align
    flat = geo.pointwise
    problem = Problem(
        batch=math.prod(dy.shape[:-1]) if flat else dy.shape[0],
        reduce=reduce + pad_reduce,
        columns=columns + pad_columns,
        axes=() if flat else axes_of(geo),
        filter_dims="ctj" if outer and not transpose else "tjc",
        dtype=jnp.dtype(dy.dtype),
        out_dtype=jnp.dtype(out_dtype),
        accumulator=accumulator_of(dy),
        finish=ep.finisher(epilogue),
        extras=extras,
        bias=epilogue is not None and epilogue.bias,
        groups=groups,
        grouped="c",
    )
    return Plan(problem, flat, pad_reduce, pad_columns, transpose)


def joined(geo: Geometry, channels: int, operands: Sequence[Any] = ()) -> bool:
    """Whether the phases are columns of one product."""
    return (
        any(s > 1 for s in geo.stride)
        and not operands
        and geo.groups == 1
        and channels < NARROW
        and not geo.flip
        and all(s <= r for s, r in zip(geo.stride, geo.taps, strict=True))
    )


def spreads_nonfinite(geo: Geometry, channels: int, operands: Sequence[Any] = ()) -> bool:
    """Whether a NaN of dy may show in results that do not depend on it: if the joined filter is padded with zeros."""
    if not joined(geo, channels, operands):
        return False
    _, windows = _joint(geo)
    return any((table == r).any() for table, r in zip(windows, geo.taps, strict=True))


def conv_dgrad(
    dy: Array,
    w: Array,
    /,
    *operands: Array,
    geo: Geometry,
    epilogue: Epilogue | None = None,
    out_dtype: Any = None,
    config: Config | None = None,
    sms: int | None = None,
) -> Array:
    """The gradient in x (N, spatial..., C), from dy (N, spatial..., K) and w as `conv_fprop` takes it.

    `operands` are the epilogue's, in its order (prior, bias, residual, a relu's result).
    """
    out_dtype = result_dtype(dy, out_dtype)
    x_shape = _x_shape(dy, w, geo)
    if joined(geo, x_shape[-1], operands):
        branches.record("dgrad", copies="joined phases")
        return _joined_phases(dy, w, geo, epilogue, out_dtype, config, sms)
    todo = plan(dy, w, geo, epilogue=epilogue, extras=ep.dtypes(epilogue, operands), out_dtype=out_dtype)
    a = copies.pad_axes(dy.reshape(-1, dy.shape[-1]) if todo.flat else dy, todo.problem.axes, todo.pad_reduce)
    return data.run("dgrad", a, _filter(w, geo, todo), todo, x_shape, epilogue, operands, config, sms)


def _filter(w: Array, geo: Geometry, todo: Plan) -> Array:
    """The filter with its reduced axis k padded, in the order of `Problem.filter_dims`."""
    if geo.outer:
        w = w.reshape(w.shape[0], -1, w.shape[-1])
        w = copies.pad(w, ((0, todo.pad_reduce if todo.transpose else 0), (0, 0), (0, todo.pad_columns)))
        return w.transpose(1, 2, 0) if todo.transpose else w
    w = w.reshape(-1, w.shape[-2], w.shape[-1])
    return copies.pad(w, ((0, 0), (0, 0), (0, todo.pad_reduce)))


def _joined_phases(
    dy: Array,
    w: Array,
    geo: Geometry,
    epilogue: Epilogue | None,
    out_dtype: Any,
    config: Config | None,
    sms: int | None,
) -> Array:
    """`conv_dgrad` with all phases as columns: a convolution of dy with stride one by a filter of all taps."""
    joint, windows = _joint(geo)
    x_shape, rank = _x_shape(dy, w, geo), len(geo.taps)
    if geo.outer:
        w = jnp.moveaxis(w, 0, -1)  # taps..., C, K
    w = jnp.pad(w, [(0, 1)] * rank + [(0, 0)] * 2)  # the tap "none" is zero
    for d, table in enumerate(windows):  # (u, a) at axis 2d, 2d + 1
        w = jnp.take(w, jnp.asarray(table.reshape(-1)), axis=2 * d)
        w = w.reshape(*w.shape[: 2 * d], *table.shape, *w.shape[2 * d + 1 :])
    order = (*range(0, 2 * rank, 2), *range(1, 2 * rank, 2), 2 * rank, 2 * rank + 1)
    w = w.transpose(order)  # u..., a..., c, k
    w = w.reshape(*joint.taps, -1, w.shape[-1])
    dx = conv_dgrad(dy, w, geo=joint, epilogue=epilogue, out_dtype=out_dtype, config=config, sms=sms)
    dx = dx.reshape(x_shape[0], *joint.sizes, *geo.stride, x_shape[-1])
    interleave = (0, *itertools.chain(*((1 + d, 1 + rank + d) for d in range(rank))), 2 * rank + 1)
    dx = dx.transpose(interleave).reshape(
        x_shape[0], *(p * s for p, s in zip(joint.sizes, geo.stride, strict=True)), x_shape[-1]
    )
    return dx[(slice(None), *(slice(0, n) for n in x_shape[1:-1]))]


def _joint(geo: Geometry) -> tuple[Geometry, list[np.ndarray]]:
    """The convolution of all phases, and for each axis the tap at each window position and phase (r for none)."""
    windows, tops, axes = [], [], axes_of(geo)
    for ax, r in zip(axes, geo.taps, strict=True):
        top = max(o for o, n in zip(ax.offset, ax.count, strict=True) if n)
        bottom = min(o + (n - 1) * ax.move for o, n in zip(ax.offset, ax.count, strict=True) if n)
        table = np.full((top - bottom + 1, ax.out_step), r)
        for phase in range(ax.out_step):
            for j in range(ax.count[phase]):
                table[top - (ax.offset[phase] + j * ax.move), phase] = ax.first[phase] + j * ax.tap_step
        windows.append(table)
        tops.append(top)
    places = tuple(len(table) for table in windows)
    positions = tuple(ax.positions for ax in axes)
    # Window position u reads dy at i + top - u: a backward convolution of stride one with padding `top`.
    pads = tuple(
        (top, p + n - 1 - top - size) for top, p, n, size in zip(tops, geo.out, places, positions, strict=True)
    )
    ones = (1,) * len(axes)
    return Geometry(positions, places, ones, pads, ones), windows


def schedule(dy: Any, w: Any, /, *, geo: Geometry) -> np.ndarray:
    """The order in which the products of an output are added: flat indices tap * K + k, -1 for a padding zero.

    A position uses some of the taps; the others add nothing, and so one order is valid for all positions.
    """
    todo = plan(dy, w, geo, epilogue=None, extras=(), out_dtype=jnp.float32)
    problem, reduce = todo.problem, todo.problem.reduce - todo.pad_reduce
    taps = range(math.prod(geo.taps))
    rows = []
    for start in range(0, problem.reduce, problem.chunk):
        channel = np.arange(start, start + problem.chunk)
        rows += [np.where(channel < reduce, tap * reduce + channel, -1) for tap in (taps[::-1] if geo.flip else taps)]
    return np.concatenate(rows)[None]


def workspace(
    dy: Any, w: Any, /, *operands: Any, geo: Geometry, epilogue: Epilogue | None = None, out_dtype: Any = None
) -> int:
    """Bytes of device memory of the copies around the kernel."""
    out_dtype, width = jnp.dtype(out_dtype or dy.dtype), jnp.dtype(dy.dtype).itemsize
    if joined(geo, channels_of(w, geo)[0], operands):
        return _joined_workspace(dy, w, geo, epilogue, out_dtype)
    todo = plan(dy, w, geo, epilogue=None, extras=ep.dtypes(epilogue, operands), out_dtype=out_dtype)
    flat = jax.ShapeDtypeStruct((math.prod(dy.shape[:-1]), dy.shape[-1]) if todo.flat else dy.shape, dy.dtype)
    padded = jax.eval_shape(lambda dy: copies.pad_axes(dy, todo.problem.axes, todo.pad_reduce), flat)
    filter_is_copied = todo.transpose or todo.pad_reduce or (todo.pad_columns and geo.outer)
    further = data.further_bytes(todo, width, bool(filter_is_copied), epilogue, operands, out_dtype)
    return copies.copied(dy, padded) + further


def _joined_workspace(dy: Any, w: Any, geo: Geometry, epilogue: Epilogue | None, out_dtype: Any) -> int:
    joint, _ = _joint(geo)
    c, k, width = channels_of(w, geo)[0], dy.shape[-1], jnp.dtype(dy.dtype).itemsize
    columns = math.prod(geo.stride) * c
    filters = jax.ShapeDtypeStruct((*joint.taps, columns, k), w.dtype)
    total = workspace(dy, filters, geo=joint, epilogue=epilogue, out_dtype=out_dtype)
    total += (math.prod(r + 1 for r in geo.taps) * c * k + math.prod(filters.shape)) * width
    todo = plan(dy, filters, joint, epilogue=None, extras=(), out_dtype=out_dtype)
    if not todo.pad_columns:  # otherwise the kernel's result has been counted there
        total += dy.shape[0] * math.prod(joint.sizes) * columns * out_dtype.itemsize
    return total
