"""Pooling to given sizes: to one element, or to any number of windows that together cover the input."""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn import _check, _pool, _window
from jaxdnn import _pool_arguments as arguments
from jaxdnn._pool import PoolSpec
from jaxdnn._rounded import product
from jaxdnn._window import Window
from jaxdnn.determinism import required
from jaxdnn.pool import pool


def global_pool(
    x: ArrayLike,
    /,
    *,
    mode: str = "average",
    layout: str = "NHWC",
    p: float = 2.0,
    nan: str = "propagate",
    alpha: float | ArrayLike = 1.0,
    beta: float | ArrayLike = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Pools all spatial axes to one element each.

    y[n,0,0,c] = the maximum, average or p-norm of x[n,h,w,c] over all h and w

    Args:
      x: the input, (N, H, W, C) for layout NHWC; float32, bfloat16, float16, float64, and int8 except for "lp".
      mode: "average", "max" or "lp".
      layout, p, nan, alpha, beta, prior, out_dtype, engine, determinism: as for `jaxdnn.pool`.

    Returns:
      y, (N, 1, 1, C) for layout NHWC.

    Differentiation: as that of `jaxdnn.pool`.

    Numerics: as those of `jaxdnn.pool`, whose window is all of the spatial axes here. Determinism: portable; "lp" is
      mesh_invariant.

    Raises:
      ValueError: an input without elements along a spatial axis, or an argument out of range.
      TypeError: a dtype that is not served.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdnn as dnn
      >>> dnn.global_pool(jnp.arange(8.0).reshape(1, 2, 2, 2)).ravel().tolist()
      [3.0, 4.0]

    Sources: ONNX's GlobalAveragePool, GlobalMaxPool and GlobalLpPool; PyTorch's adaptive_avg_pool2d(x, 1).
    """
    order = _window.layout(layout)
    shape = arguments.shape_of("x", _check.array("x", x), order)
    sizes = [shape[axis] for axis in arguments.spatial_axes(order)]
    if min(sizes) < 1:
        raise ValueError(f"`x` must have at least one element along every spatial axis, got shape {shape}.")
    return pool(
        x,
        window=sizes,
        mode=mode,
        layout=layout,
        p=p,
        nan=nan,
        alpha=alpha,
        beta=beta,
        prior=prior,
        out_dtype=out_dtype,
        engine=engine,
        determinism=determinism,
    )


def adaptive_pool(
    x: ArrayLike,
    /,
    *,
    output_sizes: int | Sequence[int] = 1,
    mode: str = "average",
    layout: str = "NHWC",
    nan: str = "propagate",
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Pools to given spatial sizes, by windows that follow from them.

    y[n,p,q,c] = the maximum or average of x[n,h,w,c] over ⌊p H / P⌋ ≤ h < ⌈(p + 1) H / P⌉ and w alike

    Args:
      x: the input, (N, H, W, C) for layout NHWC; float32, bfloat16, float16 or float64.
      output_sizes: P and Q, one integer or one per spatial axis; they may exceed H and W.
      mode: "average" or "max".
      layout, nan, out_dtype, engine, determinism: as for `jaxdnn.pool`.

    Returns:
      y, (N, P, Q, C) for layout NHWC.

    Differentiation: any order, forward and reverse, in x. Of equal maxima the first in row-major order has the whole
      derivative.

    Numerics: as those of `jaxdnn.pool` with each window by itself: sums in float32 (float64 for float64), along the
      last spatial axis first, neighbours before neighbouring sums, multiplied by 1 / count. Determinism: portable, its
      gradients mesh_invariant.

    Raises:
      ValueError: an input without elements along a spatial axis, or an argument out of range.
      TypeError: a dtype that is not served.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdnn as dnn
      >>> dnn.adaptive_pool(jnp.arange(5.0).reshape(1, 5, 1), output_sizes=2, layout="NWC").ravel().tolist()
      [1.0, 3.0]

    Sources: PyTorch's adaptive_avg_pool2d and adaptive_max_pool2d, whose windows these are.
    """
    order = _window.layout(layout)
    x = arguments.array("x", x, order)
    _check.dtype("x", x, arguments.FLOATS)
    _check.choice("mode", mode, ("average", "max"))
    out = arguments.result_dtype(mode, "x", x.dtype, out_dtype)
    axes = arguments.spatial_axes(order)
    sizes = [x.shape[axis] for axis in axes]
    outputs = _check.integers("output_sizes", output_sizes, len(sizes), minimum=1)
    if min(sizes) < 1:
        raise ValueError(f"`x` must have at least one element along every spatial axis, got shape {x.shape}.")
    if all(size % count == 0 for size, count in zip(sizes, outputs, strict=True)):
        window = [size // count for size, count in zip(sizes, outputs, strict=True)]
        return pool(
            x, window=window, mode=mode, layout=layout, nan=nan, out_dtype=out, engine=engine, determinism=determinism
        )
    _check.choice("nan", nan, ("propagate", "ignore"))
    y = x if mode == "max" else x.astype(arguments.accumulator(x.dtype))
    for axis, count in list(zip(axes, outputs, strict=True))[::-1]:
        one = PoolSpec((1,), Window((1,), ((0, 0),), (1,)), (1,), (1,), (axis,), y.dtype, nan=nan, engine=engine)
        y = _along_axis(dataclasses.replace(one, level=required(determinism)), mode, y, count)
    if mode == "average":
        y = product(y, _reciprocals(y, axes, sizes, outputs))  # which the caller may add to something
    return y.astype(out)


def _along_axis(spec: PoolSpec, mode: str, x: Array, count: int) -> Array:
    """Maxima or sums over the windows of one axis.

    With g = gcd(H, P), window i + P / g is window i moved on by H / g: P / g kinds of windows, each a pooling.
    """
    axis = spec.spatial[0]
    size, at = x.shape[axis], x.ndim + axis
    common = math.gcd(size, count)
    kinds, stride = count // common, size // common
    parts = []
    for i in range(kinds):
        start, taps = i * size // count, -(-(i + 1) * size // count) - i * size // count
        reach = (common - 1) * stride + taps
        window = Window((stride,), ((0, 0),), (1,))
        one = dataclasses.replace(spec, taps=(taps,), window=window, sizes=(reach,), outputs=(common,))
        part = lax.slice_in_dim(x, start, start + reach, 1, at)
        op = "pool_max" if mode == "max" else "pool_average"
        arguments.check(op, one, part)
        parts.append(_pool.bind(op, part, spec=one))
    shape = list(parts[0].shape)
    shape[at] = count
    return jnp.stack(parts, at + 1).reshape(shape)


def _reciprocals(like: Array, axes: Sequence[int], sizes: Sequence[int], outputs: Sequence[int]) -> Array:
    """1 / count of every window, rounded once."""
    counts = np.ones((1,) * like.ndim)
    for axis, size, count in zip(axes, sizes, outputs, strict=True):
        ends = [-(-(i + 1) * size // count) - i * size // count for i in range(count)]
        counts = counts * np.reshape(ends, [count if d == like.ndim + axis else 1 for d in range(like.ndim)])
    return jnp.asarray((1.0 / counts).astype(like.dtype))
