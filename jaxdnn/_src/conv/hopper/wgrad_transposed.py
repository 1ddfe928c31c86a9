"""Convolution backward filter on Hopper for types that wgmma reads only along a contiguous reduction: TF32, 8 bits.

dw[tap, c, k] = sum over pixels (n, p) of x[n, p * s + tap * d - pad, c] dy[n, p, k].

The reduction runs over pixels, but channels are contiguous in memory. So both operands are copied to a layout with the
images last, and the sum is then a forward convolution: of c "images" with n channels by k filters whose taps are the
output's pixels, with the stride as dilation and the dilation as stride. `conv_fprop` computes it in its own order.

Schedule: the images are partitioned into runs of equal length, which are the groups of that forward convolution. Each
run is one partial sum: for each chunk of 128 bytes of images, for each pixel in order, the chunk's images in order. The
partial sums are added one after another and converted once: `run_to_run`.

Limits: float8 and int8; float32 by TF32 (truncated operands) on request. One group of channels.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper import copies, fprop, tuning
from jaxdnn._src.conv.hopper import plan as conv_plan
from jaxdnn._src.conv.hopper.limits import accumulator_of, operand_reason, result_dtype, shape_reason
from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.sizes import ceil_div

TILE = 128  # rows of a tile, and roughly its columns; the number of runs is chosen by it


def supports(
    x: Any,
    dy: Any,
    /,
    *,
    geo: Geometry,
    out_dtype: Any = None,
    precision: str | None = None,
) -> str | None:
    """Why `conv_wgrad` cannot serve a call on arrays of these shapes and dtypes, or None."""
    if reason := operand_reason(x.dtype, dy.dtype, result_dtype(x, out_dtype), precision):
        return reason
    if geo.groups > 1:
        return f"its kernel takes groups in 16-bit types, not in {jnp.dtype(x.dtype).name}"
    return shape_reason(geo, x.shape[0], x.shape[-1], dy.shape[-1], jnp.dtype(x.dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The forward convolution that computes the gradient."""

    geo: Geometry
    runs: int  # runs of images, one partial sum each
    images: int  # images of a run; zeros fill the last one


def plan(x: Any, dy: Any, geo: Geometry) -> Plan:
    width = jnp.dtype(x.dtype).itemsize
    n, c, k = x.shape[0], x.shape[-1], dy.shape[-1]
    tiles = ceil_div(c * math.prod(geo.taps), TILE) * ceil_div(k, TILE)
    runs = 1
    # Groups of filters must be whole tiles of columns, and a run must fill whole rows of a swizzle.
    while k % 16 == 0 and tiles * runs * 2 <= tuning.multiprocessors() and ceil_div(n, 2 * runs) * width >= 32:
        runs *= 2
    row = min(128, max(32, 1 << (ceil_div(n, runs) * width - 1).bit_length())) // width
    images = ceil_div(ceil_div(n, runs), row) * row
    axes = zip(geo.sizes, geo.taps, geo.stride, geo.padding, geo.dilation, geo.out, strict=True)
    padding = tuple((low, (r - 1) * d + (p - 1) * s + 1 - low - size) for size, r, s, (low, _), d, p in axes)
    turned = dataclasses.replace(
        geo,
        taps=geo.out,
        stride=geo.dilation,
        padding=padding,
        dilation=geo.stride,
        flip=False,
        groups=runs,
        outer=True,
    )
    return Plan(turned, runs, images)


def _turn(a: Array, todo: Plan) -> Array:
    """(N, spatial..., C) to (C, spatial..., N), with zero images at the end."""
    missing = todo.runs * todo.images - a.shape[0]
    a = jnp.moveaxis(a, 0, -1)
    a = jnp.moveaxis(a, -2, 0)
    return jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, missing),)) if missing else a


def conv_wgrad(
    x: Array,
    dy: Array,
    /,
    *,
    geo: Geometry,
    out_dtype: Any = None,
    sms: int | None = None,
) -> Array:
    """The gradient in w, laid out as `geo` says, from x (N, spatial..., C) and dy (N, spatial..., K)."""
    todo, k = plan(x, dy, geo), dy.shape[-1]
    runs = "one" if todo.runs == 1 else "several"
    branches.record("wgrad, images last", operands=jnp.dtype(x.dtype).name, runs=runs)
    partial, out_dtype = _types(x, todo, out_dtype)
    images, filters = _turn(copies.no_earlier(x, dy), todo), _turn(dy, todo)
    if todo.runs > 1:  # the filters of all runs along one axis
        filters = filters.reshape(*filters.shape[:-1], todo.runs, todo.images)
        filters = jnp.moveaxis(filters, -2, 0).reshape(-1, *filters.shape[1:-2], todo.images)
    parts = fprop.conv_fprop(images, filters, geo=todo.geo, out_dtype=partial, sms=sms)
    parts = parts.reshape(*parts.shape[:-1], todo.runs, k)
    total = parts[..., 0, :]
    for i in range(1, todo.runs):
        total = total + parts[..., i, :]
    total = jnp.moveaxis(total.astype(out_dtype), 0, -2)
    if geo.flip:
        total = jnp.flip(total, range(len(geo.taps)))
    return jnp.moveaxis(total, -1, 0) if geo.outer else total


def _types(x: Any, todo: Plan, out_dtype: Any) -> tuple[Any, Any]:
    """The dtypes of a partial sum and of the result."""
    out_dtype = result_dtype(x, out_dtype)
    return out_dtype if todo.runs == 1 else jnp.dtype(accumulator_of(x)), out_dtype


def schedule(x: Any, dy: Any, /, *, geo: Geometry) -> np.ndarray:
    """Flat pixel numbers of dy in the order of addition, a row for each partial sum; -1 for an image of zeros."""
    todo, pixels = plan(x, dy, geo), math.prod(geo.out)
    problem = fprop.plan(*_avals(x, dy, todo), todo.geo, epilogue=None, extras=(), out_dtype=jnp.float32).problem
    order = conv_plan.schedule_order(problem)
    pixel, image = np.divmod(order, todo.images)
    run = np.arange(todo.runs)[:, None] * todo.images
    here = (order >= 0) & (image + run < x.shape[0])
    return np.where(here, (image + run) * pixels + pixel, -1)


def _avals(x: Any, dy: Any, todo: Plan) -> tuple[Any, Any]:
    """The shapes of the operands of `conv_fprop`."""
    k = dy.shape[-1]
    a = jax.ShapeDtypeStruct((x.shape[-1], *x.shape[1:-1], todo.runs * todo.images), x.dtype)
    return a, jax.ShapeDtypeStruct((todo.runs * k, *dy.shape[1:-1], todo.images), dy.dtype)


def workspace(x: Any, dy: Any, /, *, geo: Geometry, out_dtype: Any = None) -> int:
    """Bytes of device memory beside operands and result: transposed copies and partial sums."""
    todo, width = plan(x, dy, geo), jnp.dtype(x.dtype).itemsize
    a, b = _avals(x, dy, todo)
    partial, _ = _types(x, todo, out_dtype)
    inner = fprop.workspace(a, b, geo=todo.geo, out_dtype=partial)
    results = x.shape[-1] * math.prod(geo.taps) * todo.runs * dy.shape[-1] * partial.itemsize
    return 2 * (math.prod(a.shape) + math.prod(b.shape)) * width + results + inner
