"""Convolution forward on Hopper.

y[n, p, k] = sum over (tap, c) of x[n, p * s + tap * d - pad, c] w[tap, c, k].

Schedule: `pipeline.py`'s. For each chunk of 128 bytes of input channels (64 of bfloat16), for each tap in order, the
chunk's channels in order; float32 (int32) accumulation on the tensor core, one conversion at the end. No tile, batch,
position or configuration changes it: `batch_invariant`.

Tiling: boxes of images x positions against up to 256 output channels; see `Config`. A convolution whose taps are all
one, with stride one and no padding, is a plain matrix product over flattened pixels. An input of very few channels (an
RGB stem) is copied once into cells of 16 bytes, as many pixels as the stride of the last axis and zero channels; the
taps of that axis are then a run of neighbouring cells, and wgmma reads the overlapping runs of all outputs straight
from shared memory. Where that does not fit (8 channels, a dilation) a copy makes those taps channels. The order is
then tap by tap of the remaining axes, and (last tap, channel) inside, which is the filter's own order.

Limits: bfloat16, float16; float8 and int8; float32 by TF32 (truncated operands) on request. Channels whose rows are
no multiple of 16 bytes are padded by a copy; so are strided axes whose length the stride does not divide. Groups need
16, 32 or a multiple of 64 channels each (bfloat16). With a stride in three dimensions a tile is of one image.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv.hopper import copies, pipeline, tuning
from jaxdnn._src.conv.hopper import epilogue as ep
from jaxdnn._src.conv.hopper import plan as conv_plan
from jaxdnn._src.conv.hopper.geometry import Geometry, channels_of, narrowest, operand_reason, shape_reason
from jaxdnn._src.conv.hopper.plan import Axis, Config, Problem
from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.sizes import ceil_div


def supports(
    x: Any,
    w: Any,
    /,
    *operands: Any,
    geo: Geometry,
    epilogue: Epilogue | None = None,
    out_dtype: Any = None,
    precision: str | None = None,
) -> str | None:
    """Why `conv_fprop` cannot serve a call on arrays of these shapes and dtypes, or None."""
    out_dtype = jnp.dtype(out_dtype or (jnp.int32 if x.dtype == jnp.int8 else x.dtype))
    accumulator = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    reason = operand_reason(x.dtype, w.dtype, out_dtype, precision) or ep.supports(epilogue, accumulator)
    if reason:
        return reason
    channels, columns = channels_of(w, geo)
    width = jnp.dtype(x.dtype).itemsize
    least = narrowest(out_dtype, ep.dtypes(epilogue, operands))
    return shape_reason(geo, x.shape[0], channels // geo.groups, columns // geo.groups, width, least)


def axes_of(geo: Geometry) -> tuple[Axis, ...]:
    """The forward walk: every output reads all taps; a stride is a phase of the input."""
    axes = []
    for x, out, r, s, (low, _), d in zip(
        geo.sizes, geo.out, geo.taps, geo.stride, geo.padding, geo.dilation, strict=True
    ):
        first, step = (r - 1, -1) if geo.flip else (0, 1)
        axes.append(Axis(x, out, r, s, 1, (first,), (r,), (-low,), step, d))
    return tuple(axes)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run for a call: the problem, and the copies around it."""

    problem: Problem
    geo: Geometry
    flat: bool  # pixels flattened: a matrix product
    folded: bool  # the last axis' taps became channels
    cells: int  # pixels side by side in a cell of 16 bytes, of which an output reads a window; 0: no cells
    pad_reduce: int  # zero channels added to x and w
    pad_columns: int  # zero output channels added, then cut off
    transpose: bool  # the filter goes through a transposing copy (types that wgmma reads one way only)


def plan(
    x: Any,
    w: Any,
    geo: Geometry,
    *,
    epilogue: Epilogue | None,
    extras: tuple[Any, ...],
    out_dtype: Any,
) -> Plan:
    dtype, width = jnp.dtype(x.dtype), jnp.dtype(x.dtype).itemsize
    groups, channels_last = geo.groups, geo.outer
    _, columns = channels_of(w, geo)
    reduce = x.shape[-1] // groups
    flat = geo.pointwise
    cells = copies.cells_of(geo, reduce, width)
    folded = not cells and groups == 1 and reduce * width < 32 and geo.taps[-1] > 1
    batch = x.shape[0]
    if flat:
        batch, geo = math.prod(x.shape[:-1]), Geometry((), (), (), (), ())
    window, geo_taps = 0, geo.taps[-1] if geo.taps else 1
    if cells:
        window = ceil_div(geo.taps[-1], cells)
        reduce = window * 16 // width
    if folded:
        reduce *= geo.taps[-1]
    if folded or cells:
        geo = geo.without_last_taps
    chunk = min(128, max(32, reduce * width)) // width
    # contiguous output channels come in whole chunks of 16-bit numbers; else the filter is transposed
    transpose = not channels_last and not cells and (width != 2 or (groups > 1 and columns // groups % chunk != 0))
    pad_reduce = -reduce % (16 // width)
    mn_major = cells or not (channels_last or transpose)
    align = max(16 // narrowest(out_dtype, extras), 8 if mn_major else 1)
    pad_columns = -columns % align
    integer = dtype == jnp.int8
    problem = Problem(
        batch=batch,
        reduce=reduce + pad_reduce,
        columns=columns + pad_columns,
        axes=axes_of(geo),
        filter_dims="jtc" if (channels_last and not cells) or transpose else "tcj",
        window=window,
        partial=bool(cells and geo_taps % cells),
        dtype=dtype,
        out_dtype=jnp.dtype(out_dtype),
        accumulator=jnp.int32 if integer else jnp.float32,
        finish=ep.finisher(epilogue),
        extras=extras,
        bias=epilogue is not None and epilogue.bias,
        groups=groups,
    )
    return Plan(problem, geo, flat, folded, cells, pad_reduce, pad_columns, transpose)


def conv_fprop(
    x: Array,
    w: Array,
    /,
    *operands: Array,
    geo: Geometry,
    epilogue: Epilogue | None = None,
    out_dtype: Any = None,
    config: Config | None = None,
    sms: int | None = None,
) -> Array:
    """The convolution of channels-last arrays; `operands` are the epilogue's, in its order (prior, bias, residual).

    Args:
      x: (N, spatial..., C).
      w: (taps..., C / groups, K), or (K, taps..., C / groups), as `geo` says.
      config: how to cut the work; by default the measured or modelled choice.
      sms: how many multiprocessors to use; by default all.
    """
    out_dtype = jnp.dtype(out_dtype or (jnp.int32 if x.dtype == jnp.int8 else x.dtype))
    todo = plan(x, w, geo, epilogue=epilogue, extras=ep.dtypes(epilogue, operands), out_dtype=out_dtype)
    problem = todo.problem
    sms = sms or tuning.multiprocessors()
    config = config or tuning.choose("fprop", problem, sms)
    made = {"padded channels": todo.pad_reduce, "padded columns": todo.pad_columns, "transposed filter": todo.transpose}
    made |= {"folded taps": todo.folded, "cells": todo.cells, "none": True}
    for name in filter(made.get, made):
        branches.record("fprop", copies=name)
    out_shape = (x.shape[0], *geo.out, problem.columns - todo.pad_columns)
    if todo.cells:
        x, w = copies.in_cells(x, geo, todo.cells), _window_filter(w, geo, todo)
    if todo.folded:
        x = copies.fold_taps(x, geo)
    a = _input(x, todo)
    b = w if todo.cells else _filter(w, geo, todo)
    bias, extras = copies.prepare_epilogue(epilogue, operands, problem, config, todo.flat, todo.pad_columns)
    y = pipeline.run(a, b, bias, extras, problem, config, sms=sms)
    if todo.pad_columns:
        y = y[..., : out_shape[-1]]
    return y.reshape(out_shape)


def _input(x: Array, todo: Plan) -> Array:
    if todo.flat:
        x = x.reshape(-1, x.shape[-1])
    return copies.pad_axes(x, todo.problem.axes, todo.pad_reduce)


def _filter(w: Array, geo: Geometry, todo: Plan) -> Array:
    columns = todo.problem.columns - todo.pad_columns
    reduce = todo.problem.reduce - todo.pad_reduce
    if geo.outer:
        w = w.reshape(columns, -1, reduce)
        return copies.pad(w, ((0, todo.pad_columns), (0, 0), (0, todo.pad_reduce)))
    w = w.reshape(-1, reduce, columns)
    if todo.transpose:
        w = copies.pad(w, ((0, 0), (0, todo.pad_reduce), (0, todo.pad_columns)))
        return w.transpose(2, 0, 1)
    return copies.pad(w, ((0, 0), (0, 0), (0, todo.pad_columns)))


def _window_filter(w: Array, geo: Geometry, todo: Plan) -> Array:
    """The filter as (other taps, window * 8, K), with zeros where a cell holds no channel or a window no tap."""
    if geo.outer:
        w = jnp.moveaxis(w, 0, -1)
    problem, per = todo.problem, 8 // todo.cells
    taps = problem.window * todo.cells
    w = w.reshape(-1, geo.taps[-1], *w.shape[-2:])
    w = copies.pad(w, ((0, 0), (0, taps - w.shape[1]), (0, per - w.shape[2]), (0, todo.pad_columns)))
    return w.reshape(-1, problem.reduce, problem.columns)


def schedule(
    x: Any,
    w: Any,
    /,
    *,
    geo: Geometry,
) -> np.ndarray:
    """In which order the products of an output are added: flat indices tap * C + c, -1 where a zero pads.

    Taps are numbered as the filter lies. Windows are walked forwards, so that of a flipped filter the last tap comes
    first; taps that a copy made channels come in the filter's own order, flipped or not.
    """
    todo = plan(x, w, geo, epilogue=None, extras=(), out_dtype=jnp.float32)
    reduce = todo.problem.reduce - todo.pad_reduce
    order = conv_plan.schedule_order(todo.problem)
    if todo.cells:
        row, cell = np.divmod(order, todo.problem.reduce)
        tap, channel = np.divmod(cell, 8 // todo.cells)
        here = (tap < geo.taps[-1]) & (channel < x.shape[-1])
        return np.where(here, (row * geo.taps[-1] + tap) * x.shape[-1] + channel, -1)
    tap, channel = np.divmod(order, todo.problem.reduce)
    return np.where((order < 0) | (channel >= reduce), -1, tap * reduce + channel)


def workspace(
    x: Any,
    w: Any,
    /,
    *operands: Any,
    geo: Geometry,
    epilogue: Epilogue | None = None,
    out_dtype: Any = None,
) -> int:
    """Bytes of device memory that the copies around the kernel take."""
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    todo = plan(x, w, geo, epilogue=None, extras=ep.dtypes(epilogue, operands), out_dtype=out_dtype)
    problem, width, total = todo.problem, jnp.dtype(x.dtype).itemsize, 0
    if todo.cells:
        cells = jax.eval_shape(lambda x: copies.in_cells(x, geo, todo.cells), jax.ShapeDtypeStruct(x.shape, x.dtype))
        # Before a row of partly masked cells is put beside them, the cells are an array of their own.
        total += math.prod(cells.shape) * width * (3 if problem.partial else 2) // 2
        x = cells
    elif todo.folded:
        total += copies.folding_bytes(x, geo)
        x = jax.eval_shape(lambda x: copies.fold_taps(x, geo), jax.ShapeDtypeStruct(x.shape, x.dtype))
    a = jax.eval_shape(lambda x: _input(x, todo), jax.ShapeDtypeStruct(x.shape, x.dtype))
    total += copies.copied(x, a)
    if todo.cells or todo.transpose or todo.pad_columns or (todo.pad_reduce and geo.outer):
        padded_first = todo.transpose and (todo.pad_columns or todo.pad_reduce)
        total += copies.filter_bytes(problem, width) * (2 if padded_first else 1)
    total += copies.epilogue_bytes(epilogue, operands, problem, todo.pad_columns)
    if todo.pad_columns:
        total += x.shape[0] * math.prod(geo.out) * problem.columns * out_dtype.itemsize
    return total
