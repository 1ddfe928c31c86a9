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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._epilogue import Epilogue
from jaxdnn._kernels.hopper import conv_plan, pipeline, tuning
from jaxdnn._kernels.hopper import epilogue as ep
from jaxdnn._kernels.hopper.conv_plan import Axis, Config, Problem, ceil_div

FLOATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
Pads = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What a convolution is, apart from its batch, channels and dtypes; tuples by spatial axis."""

    sizes: tuple[int, ...]
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    flip: bool = False  # a mathematical convolution: taps in reverse
    groups: int = 1
    outer: bool = False  # the filter is (K, taps..., C / groups), not (taps..., C / groups, K)

    @property
    def out(self) -> tuple[int, ...]:
        axes = zip(self.sizes, self.taps, self.stride, self.padding, self.dilation, strict=True)
        return tuple((x + low + high - d * (r - 1) - 1) // s + 1 for x, r, s, (low, high), d in axes)

    @property
    def pointwise(self) -> bool:
        """Every output pixel reads the one input pixel at its place."""
        return all(t == 1 for t in self.taps) and all(s == 1 for s in self.stride) and not any(map(any, self.padding))

    @property
    def without_last_taps(self) -> "Geometry":
        """What is left to do where a copy has brought the last axis' taps to each of its outputs."""
        return dataclasses.replace(
            self,
            sizes=(*self.sizes[:-1], self.out[-1]),
            taps=(*self.taps[:-1], 1),
            stride=(*self.stride[:-1], 1),
            padding=(*self.padding[:-1], (0, 0)),
            dilation=(*self.dilation[:-1], 1),
        )


def channels_of(w: Any, geo: Geometry) -> tuple[int, int]:
    """Input channels, all groups together, and output channels of a filter."""
    if geo.outer:
        return w.shape[-1] * geo.groups, w.shape[0]
    return w.shape[-2] * geo.groups, w.shape[-1]


def operand_reason(dtype: Any, other: Any, out_dtype: Any, precision: str | None) -> str | None:
    """Why two operand dtypes cannot be multiplied by the tensor cores, or None."""
    name = jnp.dtype(dtype).name
    if name == "float32":
        if precision != "tf32":
            return "the tensor cores have no float32 products; `precision='tf32'` asks for truncated ones"
    elif name == "int8":
        if jnp.dtype(out_dtype).name not in ("int32",):
            return "its int8 kernel writes int32"
    elif name not in FLOATS:
        return f"its kernels take bfloat16, float16, float8, int8 and (as TF32) float32, not {name}"
    if jnp.dtype(dtype) != jnp.dtype(other):
        return "its kernels take operands of one dtype"
    if name != "int8" and jnp.dtype(out_dtype).name not in ("bfloat16", "float16", "float32"):
        return f"its kernels write bfloat16, float16 and float32, not {jnp.dtype(out_dtype).name}"
    return None


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
    reason = operand_reason(x.dtype, w.dtype, out_dtype, precision) or ep.supports(epilogue, accumulator, out_dtype)
    if reason:
        return reason
    channels, columns = channels_of(w, geo)
    width = jnp.dtype(x.dtype).itemsize
    least = narrowest(out_dtype, ep.dtypes(epilogue, operands))
    return shape_reason(geo, x.shape[0], channels // geo.groups, columns // geo.groups, width, least)


def narrowest(out_dtype: Any, extras: Sequence[Any]) -> int:
    """Bytes of the smallest element that an epilogue reads or writes in the output's shape."""
    return min(jnp.dtype(dtype).itemsize for dtype in (out_dtype, *extras))


def shape_reason(geo: Geometry, batch: int, reduce: int, columns: int, width: int, least: int = 2) -> str | None:
    """Why no kernel takes such shapes, or None; `width` and `least` are bytes of an element, at either end."""
    if min(batch, *geo.out, *geo.sizes, reduce, columns, 1) < 1:
        return "it has no kernel for empty arrays"
    if any(low < 0 or high < 0 for low, high in geo.padding):
        return "its kernels take no negative padding"
    if geo.pointwise and batch * math.prod(geo.sizes) >= 2**31:
        return "its kernels number the pixels of a matrix product in 32 bits"
    if geo.groups > 1:
        bytes_ = reduce * width
        if bytes_ not in (32, 64) and bytes_ % 128:
            return "its kernels take groups of 32, 64 or a multiple of 128 bytes of channels"
        if columns % (tile := max(16, 32 // least)):
            return f"its kernels take groups of a multiple of {tile} output channels"
    return None


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
    cells = cells_of(geo, reduce, width)
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
    out_shape = (x.shape[0], *geo.out, problem.columns - todo.pad_columns)
    if todo.cells:
        x, w = in_cells(x, geo, todo.cells), _window_filter(w, geo, todo)
    if todo.folded:
        x = fold_taps(x, geo)
    a = _input(x, todo)
    b = w if todo.cells else _filter(w, geo, todo)
    bias, extras = prepare_epilogue(epilogue, operands, problem, config, todo.flat, todo.pad_columns)
    y = pipeline.run(a, b, bias, extras, problem, config, sms=sms)
    if todo.pad_columns:
        y = y[..., : out_shape[-1]]
    return y.reshape(out_shape)


def cells_of(geo: Geometry, channels: int, width: int) -> int:
    """How many pixels of few channels make a cell of 16 bytes, so that every output's window starts at one; 0: none.

    A cell is one step of the last axis' stride long; its pixels are padded with zero channels.
    """
    if geo.groups > 1 or width != 2 or not geo.taps or geo.flip or geo.dilation[-1] != 1:
        return 0
    s = geo.stride[-1]
    fits = s in (1, 2, 4) and channels <= min(4, 8 // s) and ceil_div(geo.taps[-1], s) in (2, 4, 8)
    return s if fits else 0


def in_cells(x: Array, geo: Geometry, cells: int) -> Array:
    """(..., X, C) to (..., cells, 8): padded as the window asks, so that output q's window starts at cell q."""
    (low, _), taps, out = geo.padding[-1], geo.taps[-1], geo.out[-1]
    length = (out + ceil_div(taps, cells) - 1) * cells
    none = [(0, 0, 0)] * (x.ndim - 2)
    pads = [*none, (low, length - low - x.shape[-2], 0), (0, 8 // cells - x.shape[-1], 0)]
    x = lax.pad(x, jnp.zeros((), x.dtype), pads)  # its negative padding cuts pixels that no window reads
    x = x.reshape(*x.shape[:-2], length // cells, 8)
    rest = taps % cells
    if not rest:
        return x
    # A window's last cell holds pixels that no tap reads. Were they multiplied by zeros, a NaN there would show.
    kept = jnp.arange(8) < rest * (8 // cells)
    return jnp.concatenate([x, jnp.where(kept, x, jnp.zeros((), x.dtype))], axis=-2)


def _window_filter(w: Array, geo: Geometry, todo: Plan) -> Array:
    """The filter as (other taps, window * 8, K), with zeros where a cell holds no channel or a window no tap."""
    if geo.outer:
        w = jnp.moveaxis(w, 0, -1)
    problem, per = todo.problem, 8 // todo.cells
    taps = problem.window * todo.cells
    w = w.reshape(-1, geo.taps[-1], *w.shape[-2:])
    w = _pad(w, ((0, 0), (0, taps - w.shape[1]), (0, per - w.shape[2]), (0, todo.pad_columns)))
    return w.reshape(-1, problem.reduce, problem.columns)


def fold_taps(x: Array, geo: Geometry) -> Array:
    """(..., X, C) to (..., Q, S * C): the last axis' taps side by side, as one copy."""
    s, d, r, q = geo.stride[-1], geo.dilation[-1], geo.taps[-1], geo.out[-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [_folded_padding(geo), (0, 0)])
    taps = range(r)[::-1] if geo.flip else range(r)
    return jnp.concatenate([x[..., t * d : t * d + (q - 1) * s + 1 : s, :] for t in taps], axis=-1)


def _folded_padding(geo: Geometry) -> tuple[int, int]:
    low, high = geo.padding[-1]
    s, d, r, q = geo.stride[-1], geo.dilation[-1], geo.taps[-1], geo.out[-1]
    return low, max(high, (q - 1) * s + (r - 1) * d + 1 - low - geo.sizes[-1])


def folding_bytes(x: Any, geo: Geometry) -> int:
    """Bytes of what `fold_taps` makes: the padded array, and its result."""
    rows, c, width = math.prod(x.shape[:-2]), x.shape[-1], jnp.dtype(x.dtype).itemsize
    low, high = _folded_padding(geo)
    padded = low + x.shape[-2] + high if low or high else 0
    return rows * c * width * (padded + geo.out[-1] * geo.taps[-1])


def _input(x: Array, todo: Plan) -> Array:
    if todo.flat:
        x = x.reshape(-1, x.shape[-1])
    return pad_axes(x, todo.problem.axes, todo.pad_reduce)


def pad_axes(x: Array, axes: Sequence[Axis], pad_reduce: int) -> Array:
    """Zeros where the pipeline needs them: whole steps, rows of 16 bytes, and no axis of one position with taps.

    TMA descriptors drop an axis of one position, and with it the test that fills zeros outside of it.
    """
    pads = [(0, 0)]
    for ax in axes:
        high = -ax.size % ax.in_step
        alone = ax.positions == 1 and ax.count == (1,) and ax.offset == (0,)
        if (ax.size + high) // ax.in_step == 1 and not alone:
            high += ax.in_step
        pads.append((0, high))
    pads.append((0, pad_reduce))
    return jnp.pad(x, pads) if any(map(any, pads)) else x


def _filter(w: Array, geo: Geometry, todo: Plan) -> Array:
    columns = todo.problem.columns - todo.pad_columns
    reduce = todo.problem.reduce - todo.pad_reduce
    if geo.outer:
        w = w.reshape(columns, -1, reduce)
        return _pad(w, ((0, todo.pad_columns), (0, 0), (0, todo.pad_reduce)))
    w = w.reshape(-1, reduce, columns)
    if todo.transpose:
        w = _pad(w, ((0, 0), (0, todo.pad_reduce), (0, todo.pad_columns)))
        return w.transpose(2, 0, 1)
    return _pad(w, ((0, 0), (0, 0), (0, todo.pad_columns)))


def _pad(a: Array, pads: Sequence[tuple[int, int]]) -> Array:
    return jnp.pad(a, pads) if any(map(any, pads)) else a


def prepare_epilogue(
    epilogue: Epilogue | None,
    operands: Sequence[Array],
    problem: Problem,
    config: Config,
    flat: bool,
    pad_columns: int,
) -> tuple[Array | None, list[Array]]:
    """The epilogue's operands as the pipeline reads them: bias whole tiles long, the others like the output."""
    if epilogue is None:
        return None, []
    named = dict(zip(epilogue.operands, operands, strict=True))
    bias = None
    if "bias" in named:
        whole = ceil_div(problem.columns, config.columns) * config.columns
        bias = named["bias"].astype(jnp.float32)
        bias = _pad(bias, ((0, whole - bias.shape[0]),))
    extras = []
    for name in ("prior", "residual"):
        if name in named:
            extra = _pad(named[name], ((0, 0),) * (named[name].ndim - 1) + ((0, pad_columns),))
            extras.append(extra.reshape(-1, extra.shape[-1]) if flat else extra)
    return bias, extras


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
        cells = jax.eval_shape(lambda x: in_cells(x, geo, todo.cells), jax.ShapeDtypeStruct(x.shape, x.dtype))
        # Before a row of partly masked cells is put beside them, the cells are an array of their own.
        total += math.prod(cells.shape) * width * (3 if problem.partial else 2) // 2
        x = cells
    elif todo.folded:
        total += folding_bytes(x, geo)
        x = jax.eval_shape(lambda x: fold_taps(x, geo), jax.ShapeDtypeStruct(x.shape, x.dtype))
    a = jax.eval_shape(lambda x: _input(x, todo), jax.ShapeDtypeStruct(x.shape, x.dtype))
    total += copied(x, a)
    if todo.cells or todo.transpose or todo.pad_columns or (todo.pad_reduce and geo.outer):
        padded_first = todo.transpose and (todo.pad_columns or todo.pad_reduce)
        total += filter_bytes(problem, width) * (2 if padded_first else 1)
    total += epilogue_bytes(epilogue, operands, problem, todo.pad_columns)
    if todo.pad_columns:
        total += x.shape[0] * math.prod(geo.out) * problem.columns * out_dtype.itemsize
    return total


def filter_bytes(problem: Problem, width: int) -> int:
    """Bytes of the filter as the pipeline reads it."""
    return math.prod(ax.taps for ax in problem.axes) * problem.reduce * problem.columns * width


def copied(before: Any, after: Any) -> int:
    """Bytes of an array that is a longer copy of another; 0 where it is the other."""
    if math.prod(before.shape) == math.prod(after.shape):
        return 0
    return math.prod(after.shape) * jnp.dtype(after.dtype).itemsize


def epilogue_bytes(epilogue: Epilogue | None, operands: Sequence[Any], problem: Problem, pad_columns: int) -> int:
    """Bytes of what `prepare_epilogue` makes, whatever the configuration: a tile has at most 256 columns."""
    named = {} if epilogue is None else dict(zip(epilogue.operands, operands, strict=True))
    total = (problem.columns + 255) * 4 if "bias" in named else 0
    for name in ("prior", "residual"):
        if name in named and pad_columns:
            shape, dtype = named[name].shape, jnp.dtype(named[name].dtype)
            total += math.prod(shape[:-1]) * problem.columns * dtype.itemsize
    return total
