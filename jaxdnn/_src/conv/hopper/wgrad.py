"""Convolution backward filter on Hopper.

dw[tap, c, k] = sum over pixels (n, p) of x[n, p * s + tap * d - pad, c] dy[n, p, k].

Schedule: the output's pixels are partitioned into boxes of images x positions. The boxes are numbered with the last
axis fastest, and the numbers are split into `splits` runs of equal length. Each run is one partial sum: box after box,
the pixels of a box in order (last axis fastest), 16 at a time on the tensor core into a float32 accumulator. The
partial sums are then added in float32, one after another, and converted once. `schedule` returns this order. There are
no atomics: `run_to_run`.

Tiling: a warpgroup's accumulator has 64 or 128 filters k by up to 256 columns (tap, c); two or three warpgroups share
the loaded pixels. The reduction runs over pixels, which is not the contiguous axis of either operand; wgmma can read
such operands in 16-bit types only. With `halo`, the pixels of x that all taps of the last two axes need are loaded
once, each warpgroup computes one row of the filter, and the taps of that row are one operand whose column blocks
overlap in memory, one pixel apart.

Groups: a tile belongs to one group. Narrow groups are joined until they fill chunks of 64 channels and 64 filters.

Limits: bfloat16 and float16; types that wgmma reads only along a contiguous reduction go to `wgrad_transposed`. With a
stride in three dimensions a box has one image.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper import copies, fprop, tuning
from jaxdnn._src.conv.hopper import wgrad_kernel as kernel
from jaxdnn._src.conv.hopper import wgrad_transposed as transposed
from jaxdnn._src.conv.hopper.limits import shape_reason
from jaxdnn._src.conv.hopper.wgrad_plan import Config, Problem, TileScheduler, choose, decided
from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.sizes import ceil_div


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
    if not _either_order(x):
        return transposed.supports(x, dy, geo=geo, out_dtype=out_dtype, precision=precision)
    if x.dtype != dy.dtype:
        return "its kernels take operands of one dtype"
    if jnp.dtype(out_dtype or x.dtype).name not in ("bfloat16", "float16", "float32"):
        return "its kernel writes bfloat16, float16 and float32"
    one = dataclasses.replace(geo, groups=1)  # any groups are served: narrow ones are joined
    return shape_reason(one, x.shape[0], x.shape[-1], dy.shape[-1], 2)


def _either_order(x: Any) -> bool:
    """Whether wgmma reads operands of this dtype with either axis contiguous, the reduction or the other."""
    return jnp.dtype(x.dtype).name in ("bfloat16", "float16")


def problem_of(x: Any, dy: Any, geo: Geometry) -> Problem:
    even = lambda n: n + -n % 8
    c, k, outer = even(x.shape[-1]), even(dy.shape[-1]), geo.outer
    groups = geo.groups // together(geo.groups, x.shape[-1], dy.shape[-1])
    if geo.pointwise:
        return Problem(math.prod(x.shape[:-1]), c // groups, k, (), jnp.dtype(x.dtype), outer, groups)
    axes = fprop.axes_of(dataclasses.replace(geo, flip=False))
    return Problem(x.shape[0], c // groups, k, axes, jnp.dtype(x.dtype), outer, groups)


def together(groups: int, channels: int, filters: int) -> int:
    """How many groups are joined into one that has whole chunks of 64 channels and of 64 filters; if none do, all.

    The products between different groups of a joined one are computed and discarded.
    """
    for count in range(1, groups):
        whole = channels // groups * count % 64 == filters // groups * count % 64 == 0
        if whole and groups % count == 0:
            return count
    return groups


def conv_wgrad(
    x: Array,
    dy: Array,
    /,
    *,
    geo: Geometry,
    out_dtype: Any = None,
    config: Config | None = None,
    sms: int | None = None,
) -> Array:
    """The gradient in w, laid out as `geo` says, from x (N, spatial..., C) and dy (N, spatial..., K)."""
    if not _either_order(x):
        return transposed.conv_wgrad(x, dy, geo=geo, out_dtype=out_dtype, sms=sms)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if folded(geo, x.shape[-1]):
        return _folded(x, dy, geo, out_dtype, config, sms)
    problem = problem_of(x, dy, geo)
    config = _config(problem, config, out_dtype, geo)
    if geo.pointwise:
        x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    c, k = x.shape[-1], dy.shape[-1]
    x = copies.pad_axes(x, problem.axes, problem.channels * problem.groups - c)
    dy = copies.pad(dy, ((0, 0),) * (dy.ndim - 1) + ((0, problem.filters - k),))
    sms = sms or tuning.multiprocessors()
    branches.record("wgrad", **decided(problem, config, sms), folded_taps=False, groups=_groups(problem, geo))
    dw = kernel.run(x, dy, problem, config, sms)
    outer = geo.outer
    if geo.groups > 1:
        dw = _own_channels(dw[:, :k], geo.groups, problem.groups, c // geo.groups)
        c //= geo.groups
    if config.direct:
        dw = dw[:k, :, :c] if outer else dw[:, :c, :k]
        dw = dw.reshape((k, *geo.taps, c) if outer else (*geo.taps, c, k))
        return jnp.flip(dw, _tap_axes(geo)) if geo.flip else dw
    parts = dw[:, :k, :, :c]
    total = parts[0]
    for i in range(1, config.splits):
        total = total + parts[i]
    total = total.astype(out_dtype).reshape(k, *geo.taps, c)
    total = total if outer else jnp.moveaxis(total, 0, -1)
    return jnp.flip(total, _tap_axes(geo)) if geo.flip else total


def _groups(problem: Problem, geo: Geometry) -> str:
    """How the groups of a call are processed, by the name in `branches.EVERY`."""
    return "one" if geo.groups == 1 else "whole" if problem.groups == geo.groups else "together"


def _own_channels(parts: Array, groups: int, tiled: int, channels: int) -> Array:
    """(splits, K, taps, channels of the joined groups) to (splits, K, taps, C / groups)."""
    count = groups // tiled
    parts = parts[..., : count * channels]
    splits, k, taps, _ = parts.shape
    parts = parts.reshape(splits, tiled, count, k // groups, taps, count, channels)
    own = jnp.stack([parts[:, :, i, :, :, i] for i in range(count)], axis=2)
    return own.reshape(splits, k, taps, channels)


def _tap_axes(geo: Geometry) -> range:
    return range(geo.outer, geo.outer + len(geo.taps))


def _config(problem: Problem, config: Config | None, out_dtype: Any, geo: Geometry) -> Config:
    """The configuration that runs. It determines the order of additions, and so must depend on the device alone.

    A result of another dtype than the operands', or with groups, is not stored directly; the order is the same.
    """
    config = config or choose(problem, tuning.multiprocessors())
    direct = config.direct and jnp.dtype(out_dtype) == problem.dtype and geo.groups == 1
    return dataclasses.replace(config, direct=direct)


def folded(geo: Geometry, channels: int) -> bool:
    """Whether a copy turns the taps of the last axis into channels, because there are few of these."""
    return channels * 2 < 32 and geo.taps[-1] > 1 and geo.groups == 1


def _folded(x: Array, dy: Array, geo: Geometry, out_dtype: Any, config: Config | None, sms: int | None) -> Array:
    """`conv_wgrad` for few input channels: one copy turns the last axis' taps into channels, as in `fprop`."""
    branches.record("wgrad", folded_taps=True)
    c, k = x.shape[-1], dy.shape[-1]
    wide, rest = _folded_channels(geo, c), geo.without_last_taps
    x = copies.fold_taps(copies.no_earlier(x, dy), geo, wide)
    dw = conv_wgrad(x, dy, geo=rest, out_dtype=out_dtype, config=config, sms=sms)
    dw = lax.slice_in_dim(dw, 0, geo.taps[-1] * c, axis=dw.ndim - (1 if geo.outer else 2))
    return dw.reshape((k, *geo.taps, c) if geo.outer else (*geo.taps, c, k))


def _folded_channels(geo: Geometry, channels: int) -> int:
    """The channels of the array with folded taps, whole rows of 16 bytes."""
    return ceil_div(geo.taps[-1] * channels, 8) * 8


def schedule(
    x: Any,
    dy: Any,
    /,
    *,
    geo: Geometry,
    config: Config | None = None,
) -> np.ndarray:
    """Flat pixel numbers of dy in the order of addition, a row for each partial sum; -1 outside of dy."""
    if not _either_order(x):
        return transposed.schedule(x, dy, geo=geo)
    if folded(geo, x.shape[-1]):
        x = jax.ShapeDtypeStruct((*x.shape[:-2], geo.out[-1], _folded_channels(geo, x.shape[-1])), x.dtype)
        geo = geo.without_last_taps
    problem = problem_of(x, dy, geo)
    config = config or choose(problem, tuning.multiprocessors())
    counts, out = problem.counts(config), (problem.batch, *(ax.out for ax in problem.axes))
    box = (config.images, *config.block)
    boxes = np.stack(np.unravel_index(np.arange(math.prod(counts)), counts), -1)
    inner = np.stack(np.unravel_index(np.arange(config.pixels), box), -1)
    pixel = boxes[:, None] * np.array(box) + inner[None]
    inside = (pixel < np.array(out)).all(-1)
    flat = np.ravel_multi_index(tuple(np.where(inside, pixel[..., d], 0) for d in range(len(out))), out)
    flat = np.where(inside, flat, -1)
    run = ceil_div(len(flat), config.splits)
    padded = np.full((run * config.splits, config.pixels), -1)
    padded[: len(flat)] = flat
    return padded.reshape(config.splits, -1)


def workspace(
    x: Any,
    dy: Any,
    /,
    *,
    geo: Geometry,
    out_dtype: Any = None,
    config: Config | None = None,
) -> int:
    """Bytes of device memory beside operands and result: partial sums and padded copies."""
    if not _either_order(x):
        return transposed.workspace(x, dy, geo=geo, out_dtype=out_dtype)
    total, channels = 0, x.shape[-1]
    if folded(geo, channels):
        channels *= geo.taps[-1]
        wide = _folded_channels(geo, x.shape[-1])
        total += copies.folding_bytes(x, geo, wide)
        x = jax.ShapeDtypeStruct((*x.shape[:-2], geo.out[-1], wide), x.dtype)
        geo = geo.without_last_taps
    problem = problem_of(x, dy, geo)
    config = _config(problem, config, out_dtype or x.dtype, geo)
    if config.direct:
        exact = (problem.filters, problem.channels) == (dy.shape[-1], channels)
        total += 0 if exact and not geo.flip else problem.filters * problem.taps * problem.channels * 2
    else:
        rows = TileScheduler(problem, config).rows * config.filters * config.across
        total += config.splits * rows * problem.taps * problem.chunks * problem.chunk * 4
        if geo.groups > 1:  # XLA may materialise each group's channels before it transposes them to (taps, C, K)
            total += dy.shape[-1] * problem.taps * (x.shape[-1] // geo.groups) * 4
    padded = jax.eval_shape(
        lambda a: copies.pad_axes(a, problem.axes, problem.channels * problem.groups - x.shape[-1]),
        jax.ShapeDtypeStruct((problem.batch, *x.shape[1:]) if problem.axes else (problem.batch, x.shape[-1]), x.dtype),
    )
    if math.prod(padded.shape) != math.prod(x.shape):
        total += math.prod(padded.shape) * 2
    if problem.filters != dy.shape[-1]:
        total += math.prod(dy.shape[:-1]) * problem.filters * 2
    return total
