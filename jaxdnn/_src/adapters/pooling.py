"""Maxima and sums over windows with lax's signature."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.adapters.calls import checked_by_jax, per_axis, refused, serving
from jaxdnn._src.core import checks, primitives, windows
from jaxdnn._src.core.compat import Tracer
from jaxdnn._src.core.rounding import at_edges
from jaxdnn._src.core.windows import LAYOUTS, SPATIAL
from jaxdnn._src.pool import arguments
from jaxdnn._src.pool.api import pool
from jaxdnn._src.pool.arguments import Options

_FLOATS = [np.dtype(t) for t in checks.FLOATS]
_MAXIMUM, _SUM = (lax.max, lax.add)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows over an array; a tuple has an element for each of its axes."""

    taps: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @property
    def spatial(self) -> tuple[int, ...]:
        """The axes along which a window is more than an element, or steps over some, or is in padding."""
        axes = zip(self.taps, self.strides, self.padding, strict=True)
        return tuple(i for i, axis in enumerate(axes) if axis != (1, 1, (0, 0)))

    def options(self, axes: Sequence[int]) -> dict[str, Any]:
        """The arguments of `pool` for these spatial axes."""
        of = lambda values: [values[axis] for axis in axes]
        padding = [(max(low, 0), max(high, 0)) for low, high in of(self.padding)]
        return dict(window=of(self.taps), stride=of(self.strides), padding=padding, dilation=of(self.dilation))


def reduce_window(
    operand: Any,
    init_value: Any,
    computation: Callable[..., Any],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> Array:
    """`jax.lax.reduce_window` of maxima and sums, computed by the engines of `pool`.

    y[p] = max, or Σ, of x[p u + r d - a] over the taps r of a window, along every axis

    with strides u, dilation d and low padding a. Padding is no maximum, and zero in sums.

    Args:
      operand: one array, of any rank; float32, bfloat16, float16, float64, or int8 for maxima. Windows extend along
        three axes at most.
      init_value: -inf, or for int8 also -128, with `jax.lax.max`; 0 with `jax.lax.add`. Known when traced.
      computation: `jax.lax.max` or `jax.lax.add`.
      window_dimensions: a sequence of integers, one for each axis.
      window_strides: None, or a sequence of integers.
      padding: "SAME", "SAME_LOWER", "VALID", or (low, high) for each axis; negative numbers cut off. Every window of
        maxima must have at least one element of the operand.
      base_dilation: None or 1 along all axes.
      window_dilation: None, or a sequence of integers: steps between taps.

    Returns:
      What lax returns: an array of the same shape and dtype.

    Differentiation: any order, forward and reverse. Of equal maxima the first in row-major order has the whole
      derivative.

    Numerics: a maximum is exact; sums are added in float32 (float64 for float64) in the order that `pool` states, and
      rounded once. They are no averages times a count, which would be rounded twice.

    Raises:
      NotImplementedError: what is not served: the argument, and what it was. Whatever lax raises for arguments that are
        wrong.

    Example:
      >>> x = jnp.arange(12.0).reshape(1, 3, 4, 1)
      >>> lax = jax.lax
      >>> dnn.lax_like.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").ravel().tolist()
      [5.0, 7.0]

    Sources: `jax.lax.reduce_window`; XLA's ReduceWindow.
    """
    if computation is not _MAXIMUM and computation is not _SUM:
        raise refused("computation", "jax.lax.max or jax.lax.add", getattr(computation, "__name__", computation))
    if isinstance(operand, Sequence | dict) or not hasattr(operand, "dtype"):
        raise refused("operand", "one array", operand)
    x = checks.array("operand", operand)
    maximum = computation is _MAXIMUM
    if x.dtype not in _FLOATS and not (maximum and x.dtype == jnp.int8):
        raise refused("operand", f"float32, bfloat16, float16, float64{' or int8' * maximum}", x.dtype.name)
    _require_identity(init_value, maximum, x.dtype)
    # JAX compares it while it traces, which it cannot do with its own arrays.
    known = np.asarray(init_value) if isinstance(init_value, Array) else init_value
    checked_by_jax(
        lambda given: lax.reduce_window(
            given,
            known,
            computation,
            window_dimensions,
            window_strides=window_strides,
            padding=padding,
            base_dilation=base_dilation,
            window_dilation=window_dilation,
        ),
        x,
    )
    if set(per_axis(base_dilation, x.ndim)) - {1}:
        raise refused("base_dilation", "None or 1 along all axes", base_dilation)
    with serving("reduce_window"):
        over = _windows(x, window_dimensions, window_strides, padding, window_dilation)
        return _computed(x, over, _maxima if maximum else _sums)


def _computed(x: Array, over: Windows, reduce: Callable[..., Array]) -> Array:
    if len(over.spatial) > len(SPATIAL):
        raise refused("window_dimensions", "of windows along three axes at most", over.taps)
    if not over.spatial:
        return x
    cut = [(min(low, 0), min(high, 0), 0) for low, high in over.padding]
    x = lax.pad(x, jnp.zeros((), x.dtype), cut) if any(map(any, cut)) else x
    _require_elements(x, over)
    return _reduced(x, over, reduce)


def _require_identity(value: Any, maximum: bool, dtype: Any) -> None:
    """Refuses an initial value that changes results: it would be one more element of every window."""
    wanted = (0,) if not maximum else (-128, -np.inf) if dtype == jnp.int8 else (-np.inf,)
    known = checks.is_number(value) or (hasattr(value, "dtype") and not isinstance(value, Tracer))
    if not known or np.ndim(value) or float(value) not in wanted:
        raise refused("init_value", f"{' or '.join(map(str, wanted))}, known when traced", value)


def _windows(x: Array, taps: Any, strides: Any, padding: Any, dilation: Any) -> Windows:
    """What lax has checked, as tuples of integers."""
    taps, steps, spread = (per_axis(v, x.ndim) for v in (taps, strides, dilation))
    if isinstance(padding, str):
        extents = [(r - 1) * d + 1 for r, d in zip(taps, spread, strict=True)]
        padding = lax.padtype_to_pads(x.shape, extents, steps, padding)
    return Windows(taps, steps, tuple((int(low), int(high)) for low, high in padding), spread)


def _require_elements(x: Array, over: Windows) -> None:
    """Refuses windows without an element of x, of which lax has the initial value."""
    for axis in over.spatial:
        low, high = (max(pad, 0) for pad in over.padding[axis])
        size, extent = x.shape[axis], (over.taps[axis] - 1) * over.dilation[axis] + 1
        outputs = (size + low + high - extent) // over.strides[axis] + 1
        steps = (over.taps[axis], over.strides[axis], over.dilation[axis])
        if arguments.first_empty_window(size, outputs, *steps, low) is not None:
            raise refused("padding", "such that every window has an element of the operand", over.padding)


def _reduced(x: Array, over: Windows, reduce: Callable[..., Array]) -> Array:
    """The windows in a layout of `pool`: the array's own if it is one, or axes without windows joined to two."""
    spatial = over.spatial
    for layout in (axes for axes in LAYOUTS if len(axes) == x.ndim):
        axes = [layout.index(letter) for letter in SPATIAL[len(layout) - 2]]
        if set(spatial) <= set(axes):
            return reduce(x, layout, **over.options(axes))
    last = [axis for axis in range(x.ndim) if axis > spatial[-1]]
    first = [axis for axis in range(x.ndim) if axis not in spatial and axis not in last]
    order = [*first, *spatial, *last]
    moved = lax.transpose(x, order)
    count = lambda axes: math.prod(x.shape[axis] for axis in axes)
    joined = moved.reshape(count(first), *(x.shape[axis] for axis in spatial), count(last))
    y = reduce(joined, f"N{SPATIAL[len(spatial)]}C", **over.options(spatial))
    y = y.reshape(*moved.shape[: len(first)], *y.shape[1:-1], *(x.shape[axis] for axis in last))
    return lax.transpose(y, np.argsort(order))


def _maxima(x: Array, layout: str, **options: Any) -> Array:
    return pool(x, mode="max", layout=layout, **options)


def _sums(x: Array, layout: str, **options: Any) -> Array:
    """The sums that `pool` divides for an average."""
    axes = windows.layout(layout)
    spec = arguments.spec(Options(mode="average", layout=layout, **options), axes, x.shape, x.dtype)
    spec = dataclasses.replace(spec, divisor=None)
    return at_edges(spec.level, primitives.call("pool_average", at_edges(spec.level, x), spec=spec))
