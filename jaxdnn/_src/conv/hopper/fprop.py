"""Convolution forward on Hopper.

y[n, p, k] = sum over (tap, c) of x[n, p * s + tap * d - pad, c] w[tap, c, k].

Schedule: that of `pipeline.py`. For each chunk of 128 bytes of input channels (64 of bfloat16), for each tap in order,
the chunk's channels in order; float32 (int32) accumulation on the tensor core, one conversion at the end. It does not
depend on the tile, the batch, the position or the configuration: `batch_invariant`.

Tiling: boxes of images x positions by up to 256 output channels; see `Config`. A 1x1 convolution with stride one and
no padding is a plain matrix product over flattened pixels. An input with very few channels (an RGB stem) is copied
once into cells of 16 bytes: a cell has as many pixels as the last axis' stride, padded with zero channels. The taps of
that axis are then a run of neighbouring cells, and wgmma reads the overlapping runs of all outputs directly from shared
memory. If such cells do not fit (8 channels, a dilation), a copy turns the last axis' taps into channels. The order is
then: for each tap of the other axes, (last tap, channel) in the filter's order.

Limits: bfloat16, float16; float8 and int8; float32 by TF32 (truncated operands) on request. Channels that do not fill a
multiple of 16 bytes are padded by a copy; so are strided axes whose length the stride does not divide. Groups need
16, 32 or a multiple of 64 channels each (bfloat16). With a stride in three dimensions a tile has one image.
"""

import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper import copies, data
from jaxdnn._src.conv.hopper import epilogue as ep
from jaxdnn._src.conv.hopper import plan as conv_plan
from jaxdnn._src.conv.hopper.data import Plan
from jaxdnn._src.conv.hopper.limits import accumulator_of, channels_of, data_reason, narrowest, result_dtype
from jaxdnn._src.conv.hopper.plan import Axis, Config, Problem
from jaxdnn._src.hopper.sizes import ceil_div

# Why `conv_fprop` cannot serve a call, which adds over the input channels, or None.
supports = ft.partial(data_reason, 0)


def axes_of(geo: Geometry) -> tuple[Axis, ...]:
    """The axes of the forward pass: every output reads all taps, and a stride splits the input into phases."""
    axes = []
    for x, out, r, s, (low, _), d in zip(
        geo.sizes, geo.out, geo.taps, geo.stride, geo.padding, geo.dilation, strict=True
    ):
        first, step = (r - 1, -1) if geo.flip else (0, 1)
        axes.append(Axis(x, out, r, s, 1, (first,), (r,), (-low,), step, d))
    return tuple(axes)


def plan(x: Any, w: Any, geo: Geometry, *, epilogue: Epilogue | None, extras: tuple[Any, ...], out_dtype: Any) -> Plan:
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
    # A filter with contiguous output channels must have whole chunks of 16-bit numbers; otherwise it is transposed.
    transpose = not channels_last and not cells and (width != 2 or (groups > 1 and columns // groups % chunk != 0))
    pad_reduce = -reduce % (16 // width)
    mn_major = cells or not (channels_last or transpose)
    align = max(16 // narrowest(out_dtype, extras), 8 if mn_major else 1)
    pad_columns = -columns % align
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
        accumulator=accumulator_of(x),
        finish=ep.finisher(epilogue),
        extras=extras,
        bias=epilogue is not None and epilogue.bias,
        groups=groups,
    )
    return Plan(problem, flat, pad_reduce, pad_columns, transpose, folded, cells)


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
    out_dtype = result_dtype(x, out_dtype)
    todo = plan(x, w, geo, epilogue=epilogue, extras=ep.dtypes(epilogue, operands), out_dtype=out_dtype)
    shape = (x.shape[0], *geo.out, todo.problem.columns - todo.pad_columns)
    if todo.cells:
        x, w = copies.in_cells(x, geo, todo.cells), _window_filter(w, geo, todo)
    elif todo.folded:
        x = copies.fold_taps(x, geo, todo.problem.reduce)
    a = _input(x, todo)
    b = w if todo.cells else _filter(w, geo, todo)
    return data.run("fprop", a, b, todo, shape, epilogue, operands, config, sms)


def _input(x: Array, todo: Plan) -> Array:
    if todo.flat:
        x = x.reshape(-1, x.shape[-1])
    return copies.pad_axes(x, todo.problem.axes, 0 if todo.folded else todo.pad_reduce)


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


def schedule(x: Any, w: Any, /, *, geo: Geometry) -> np.ndarray:
    """The order in which the products of an output are added: flat indices tap * C + c, -1 for a padding zero.

    Taps are numbered as they are stored. Windows are read forwards, so that a flipped filter begins with its last tap;
    taps that a copy turned into channels come in the filter's own order, flipped or not.
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
    x: Any, w: Any, /, *operands: Any, geo: Geometry, epilogue: Epilogue | None = None, out_dtype: Any = None
) -> int:
    """Bytes of device memory of the copies around the kernel."""
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    todo = plan(x, w, geo, epilogue=None, extras=ep.dtypes(epilogue, operands), out_dtype=out_dtype)
    problem, width, total = todo.problem, jnp.dtype(x.dtype).itemsize, 0
    if todo.cells:
        cells = jax.eval_shape(lambda x: copies.in_cells(x, geo, todo.cells), jax.ShapeDtypeStruct(x.shape, x.dtype))
        # XLA may store the cells before it makes the array that has them twice, the second time with masked pixels.
        total += math.prod(cells.shape) * width * (3 if problem.partial else 2) // 2
        x = cells
    elif todo.folded:
        total += copies.folding_bytes(x, geo, problem.reduce)
        x = jax.eval_shape(lambda x: copies.fold_taps(x, geo, problem.reduce), jax.ShapeDtypeStruct(x.shape, x.dtype))
    a = jax.eval_shape(lambda x: _input(x, todo), jax.ShapeDtypeStruct(x.shape, x.dtype))
    total += copies.copied(x, a)
    filter_is_copied = todo.cells or todo.transpose or todo.pad_columns or (todo.pad_reduce and geo.outer)
    return total + data.further_bytes(todo, width, bool(filter_is_copied), epilogue, operands, out_dtype)
