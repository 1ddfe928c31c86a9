"""Pooling, its backward pass, unpooling, and pooling to given sizes, in one to three dimensions.

Letters: N batch, C channels, [D,] H, W spatial sizes of x, [O,] P, Q of y, [T,] R, S taps of a window. Formulas are
written for two spatial axes; the others drop an axis or add one.
"""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import blending, checks, primitives, windows
from jaxdnn._src.core.annotations import Padding, PerAxis, Scale
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import vary_alike
from jaxdnn._src.core.rounding import at_edges
from jaxdnn._src.pool import arguments, lp, primitive
from jaxdnn._src.pool.arguments import Options
from jaxdnn._src.pool.spec import PoolSpec
from jaxdnn._src.pool.xla.engine import flat_positions
from jaxdnn._src.pool.xla.gather import gather_form


@public
def pool(
    x: ArrayLike,
    /,
    *,
    window: PerAxis = 2,
    mode: str = "max",
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
    layout: str = "NHWC",
    p: float = 2.0,
    divisor: int | None = None,
    nan: str = "propagate",
    return_indices: bool | str = False,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Any:
    """Pools: the maximum, the average or the p-norm of every window.

    o[n,p,q,c] = max, or Σ / count, or (Σ |.|^p)^(1/p)   of x[n, p u + r d - a, q v + s e - b, c] over the taps (r, s)
    y = alpha o + beta prior

    with stride (u, v), dilation (d, e) and low padding (a, b). Padding counts as zero in sums and is never a maximum.

    Args:
      x: the input, (N, H, W, C) for layout NHWC; float32, bfloat16, float16, float64; int8 except for "lp"; uint8 and
        int32 for "max".
      window: taps of a window, one integer or one per spatial axis.
      mode: "max"; "average", whose count includes padding; "average_exclude_padding"; or "lp".
      stride: steps between windows, one integer or one per spatial axis; None: the window.
      padding: around x: one integer, one per spatial axis, a (low, high) pair per spatial axis, "VALID" (none) or
        "SAME" (⌈size / stride⌉ outputs, an odd element goes to the high side; of "SAME_LOWER" to the low side). A
        negative number cuts off that many elements of x, which are then in no window and in no count.
      dilation: steps between the taps of a window, one integer or one per spatial axis.
      ceil_mode: rounds the number of windows up, as long as the last one starts in x or its low padding. What the last
        window reaches beyond x and `padding` is in no count.
      layout: the axes of x, prior and the result, see `conv`.
      p: the exponent of mode "lp", at least 1.
      divisor: for "average", what every sum is divided by, from 1 to 2^30 - 1, in place of its count; None: the count.
      nan: "propagate": the first NaN of a window is its maximum; "ignore": NaN only where a window has nothing else.
      return_indices: for "max", whether to return where the maxima are too: True, as flat spatial positions in x
        without padding, int32; "tap", as positions in the window, in row-major order, uint8 (uint16, uint32 where a
        window has more than 2^8, 2^16 taps).
      alpha, beta, prior: the blend, see `conv`; prior has the result's shape.
      out_dtype: the result's dtype; None is that of x.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that the engine must guarantee, as within `jaxdnn.determinism`.

    Returns:
      y, (N, P, Q, C) for layout NHWC, with P = ⌊(H + low + high - (R - 1) d - 1) / u⌋ + 1; with `return_indices` the
      pair of y and the indices.

    Differentiation: any order, forward and reverse, in x, prior, and alpha and beta if they are arrays. Of equal
      maxima the first in row-major order has the whole derivative. At a window of zeros that of "lp" is 0.

    Numerics: a maximum is exact; a blend of integers is computed in float32. Sums are added in float32 (float64 for
      float64, int32 for int8) in a fixed order: along the last spatial axis first, then along those before it, always
      neighbours, then neighbouring pairs and so on; where a window is as long as its axis and no level is required, in
      XLA's. They are multiplied by 1 / count, rounded once (int8 to int8: divided exactly, ties to even). Backward, an
      element of dx adds the dy of its windows in a fixed order too, in gather form. Determinism: portable, for normal
      numbers; "lp" is mesh_invariant, for powers differ between devices.

    Raises:
      ValueError: a window wholly in padding or larger than the padded input, or an argument out of range.
      TypeError: a dtype that is not served.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> y, indices = dnn.pool(jnp.arange(12.0).reshape(1, 3, 4, 1), window=2, return_indices=True)
      >>> y.ravel().tolist(), indices.ravel().tolist()
      ([5.0, 7.0], [5, 7])

    Sources: cuDNN's cudnnPoolingForward; its modes MAX_DETERMINISTIC, AVERAGE_COUNT_INCLUDE_PADDING and
      AVERAGE_COUNT_EXCLUDE_PADDING; its NOT_PROPAGATE is nan="ignore"; the graph API's index tensor is "tap". PyTorch's
      max_pool2d (whose indices are True's) and avg_pool2d (count_include_pad=True by default; its divisor_override is
      `divisor`), ceil mode and its counts included; ONNX's MaxPool, AveragePool, LpPool. PyTorch's lp_pool2d sums
      signed powers, and multiplies the sum of a window that ceil mode cuts off by its taps / its elements.
    """
    common = (window, mode, stride, padding, dilation, ceil_mode, layout, p, nan, out_dtype, engine, determinism)
    found = Options(*common, divisor=divisor)
    order = windows.layout(layout)
    x = arguments.array("x", x, order)
    out = arguments.result_dtype(mode, "x", x.dtype, out_dtype)
    spec = arguments.spec(found, order, x.shape, out)
    arguments.require_level(spec, mode, alpha, beta)
    x = _left_of(spec, at_edges(spec.level, x))
    if arguments.wants_indices(return_indices, mode, (True, "tap")):
        y, tap = primitives.call("pool_max_indices", x, spec=_of(spec, x.dtype))
        indices = tap if return_indices == "tap" else flat_positions(spec.uncut, tap)
        return arguments.finish(y, alpha, beta, prior, out, x.dtype), indices
    y = _computed(spec, mode, p, x, blending.is_plain(alpha, beta))
    return arguments.finish(y, alpha, beta, prior, out, x.dtype)


def _left_of(spec: PoolSpec, x: Array) -> Array:
    return x if spec.cut is None else spec.cut.off(x)


def _whole(spec: PoolSpec, dx: Array) -> Array:
    return dx if spec.cut is None else spec.cut.undone(dx)


def _of(spec: PoolSpec, dtype: Any) -> PoolSpec:
    return dataclasses.replace(spec, out_dtype=np.dtype(dtype))


def _computed(spec: PoolSpec, mode: str, p: Any, x: Array, plain: bool) -> Array:
    """The pooling itself, in the result's dtype if it is plain, else in one that loses nothing."""
    if mode == "max":
        return primitives.call("pool_max", x, spec=_of(spec, x.dtype))
    wide = arguments.accumulator(x.dtype)
    if mode == "lp":
        return _lp(spec, arguments.exponent(p), x.astype(wide))
    return primitives.call("pool_average", x, spec=spec if plain else _of(spec, wide))


def _lp(spec: PoolSpec, p: float, x: Array) -> Array:
    return lp.root(p, primitives.call("pool_average", lp.powers(p, x), spec=_of(spec, x.dtype)))


@public
def pool_dgrad(
    dy: ArrayLike,
    x: ArrayLike | Sequence[int],
    /,
    *,
    window: PerAxis = 2,
    mode: str = "max",
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
    layout: str = "NHWC",
    p: float = 2.0,
    divisor: int | None = None,
    nan: str = "propagate",
    indices: ArrayLike | None = None,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """The gradient of pooling in its input, in gather form.

    max:     dx[n,h,w,c] = alpha Σ dy[n,p,q,c] over the windows (p, q) whose first maximum is at (h, w) + beta prior
    average: dx[n,h,w,c] = alpha Σ dy[n,p,q,c] / count[p,q] over the windows that (h, w) lies in + beta prior
    lp:      dx[n,h,w,c] = alpha sign(x) |x|^(p-1) Σ dy[n,p,q,c] y[n,p,q,c]^(1-p) over the same + beta prior

    Args:
      dy: the gradient in y, (N, P, Q, C) for layout NHWC; float32, bfloat16, float16 or float64.
      x: the input of the pooling. For an average, or with `indices`, its shape is enough.
      window, mode, stride, padding, dilation, ceil_mode, layout, p, divisor, nan: of the pooling; see `pool`.
      indices: for "max", what `pool` returned as indices, flat positions (int32) or taps (unsigned), so that the
        maxima are not sought again. A position outside its window receives nothing.
      alpha, beta, prior: the blend of dx, see `conv`; prior has x's shape.
      out_dtype: the result's dtype; None is that of dy.
      engine, determinism: see `pool`.

    Returns:
      dx, the shape of x.

    Differentiation: any order, forward and reverse, in dy, prior, and alpha and beta if they are arrays; for "lp" in x
      too, in which those of the other modes are constant.

    Numerics: added in float32 (float64 for float64) in a fixed order: for "max", from +0, the taps of the windows that
      an element is in, in row-major order, one after another; for averages as in `pool`, multiplied by 1 / count
      after the sum if all counts are equal, otherwise before. Determinism: portable; "lp" is mesh_invariant.

    Raises:
      ValueError: shapes that do not fit, or an argument out of range.
      TypeError: a dtype that is not served.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> x = jnp.asarray([1.0, 3.0, 3.0, 2.0]).reshape(1, 4, 1)
      >>> dnn.pool_dgrad(jnp.ones((1, 3, 1)), x, window=2, stride=1, layout="NWC").ravel().tolist()
      [0.0, 2.0, 1.0, 0.0]

    Sources: cuDNN's cudnnPoolingBackward, mode MAX_DETERMINISTIC; PyTorch's max_pool2d_with_indices_backward.
    """
    common = (window, mode, stride, padding, dilation, ceil_mode, layout, p, nan, out_dtype, engine, determinism)
    found = Options(*common, divisor=divisor)
    order = windows.layout(layout)
    shape = arguments.shape_of("x", x, order)
    dy = arguments.array("dy", dy, order)
    checks.dtype("dy", dy, checks.FLOATS)
    out = arguments.result_dtype(mode, "dy", dy.dtype, out_dtype)
    spec = arguments.spec(found, order, shape, out)
    arguments.like_y("dy", spec, dy, shape)
    arguments.require_level(spec, mode, alpha, beta)
    dy = at_edges(spec.level, dy)
    if indices is not None and mode != "max":
        raise ValueError(f"`indices` must be None for mode {mode!r}, expected mode 'max', got {mode!r}.")
    wide = out if blending.is_plain(alpha, beta) else arguments.accumulator(dy.dtype)
    if mode == "max":
        tap = _taps(spec, x, indices, dy.shape, order)
        dx = primitives.call("pool_max_dgrad", dy, tap, spec=_of(spec, wide))
    elif mode == "lp":
        exponent, accumulator = arguments.exponent(p), arguments.accumulator(dy.dtype)
        given = _left_of(spec, at_edges(spec.level, _given_x(x, order)))
        given, along = vary_alike([v.astype(accumulator) for v in (given, dy)])
        dx = jax.vjp(lambda v: _lp(spec, exponent, v), given)[1](along)[0]
    else:
        dx = primitives.call("pool_average_dgrad", dy, spec=_of(spec, wide))
    return arguments.finish(_whole(spec, dx), alpha, beta, prior, out, dy.dtype)


def _given_x(x: Any, order: windows.Layout) -> Array:
    if not hasattr(x, "shape"):
        raise ValueError("`x` must be the input of the pooling where its values are needed, got a shape.")
    return arguments.array("x", x, order)


def _taps(spec: PoolSpec, x: Any, indices: Any, y_shape: Any, order: windows.Layout) -> Array:
    if indices is not None:
        return arguments.taps_of(spec, indices, tuple(y_shape))
    given = _given_x(x, order)
    arguments.result_dtype("max", "x", given.dtype, None)
    return primitives.call("pool_max_indices", _left_of(spec, given), spec=_of(spec, given.dtype))[1]


@public
def unpool(
    y: ArrayLike,
    indices: ArrayLike,
    x_shape: ArrayLike | Sequence[int],
    /,
    *,
    window: PerAxis = 2,
    stride: PerAxis | None = None,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    ceil_mode: bool = False,
    layout: str = "NHWC",
) -> Array:
    """Puts maxima back where they were, and zero elsewhere.

    x[n,h,w,c] = y[n,p,q,c] of the last window (p, q), in row-major order, whose index is (h, w), or 0 if there is none

    Args:
      y: values to place, (N, P, Q, C) for layout NHWC; float32, bfloat16, float16, float64, int8, uint8
        or int32.
      indices: what `pool` returned as indices, flat positions (int32) or taps (unsigned), the shape of y. A
        position outside its window is placed nowhere.
      x_shape: the shape of the result, or an array of it.
      window, stride, padding, dilation, ceil_mode, layout: of the pooling; see `pool`.

    Returns:
      x, of shape x_shape and y's dtype.

    Differentiation: any order, forward and reverse, in y. A value that another window's has replaced has none.

    Numerics: exact. Determinism: portable; the order of writes does not decide which window it is.

    Raises:
      ValueError: shapes that do not fit, or an argument out of range.
      TypeError: a dtype that is not served.

    Example:
      >>> x = jnp.asarray([1.0, 3.0, 2.0, 5.0]).reshape(1, 4, 1)
      >>> y, indices = dnn.pool(x, window=2, layout="NWC", return_indices=True)
      >>> dnn.unpool(y, indices, (1, 4, 1), window=2, layout="NWC").ravel().tolist()
      [0.0, 3.0, 0.0, 5.0]

    Sources: PyTorch's max_unpool2d, which where windows overlap may keep either value; ONNX's MaxUnpool.
    """
    order = windows.layout(layout)
    shape = arguments.shape_of("x_shape", x_shape, order)
    y = arguments.array("y", y, order)
    out = arguments.result_dtype("max", "y", y.dtype, None)
    found = Options(window, "max", stride, padding, dilation, ceil_mode, layout)
    spec = arguments.spec(found, order, shape, out)
    arguments.like_y("y", spec, y, shape)
    tap = arguments.taps_of(spec, indices, y.shape)
    # The first tap that matches belongs to the last window. A flag tells a value of zero from none.
    first = lambda a, b: (jnp.where(a[1], a[0], b[0]), a[1] | b[1])
    place = lambda y, tap: gather_form(spec, (y, jnp.ones(y.shape, bool)), tap, first)[0]
    x = primitives.in_types(place, ft.partial(primitive.factors, "pool_max_dgrad", spec), (y, tap))(y, tap)
    return _whole(spec, x)
