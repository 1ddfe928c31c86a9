"""The `xla` engine of pooling: elementwise operations over strided slices, never select-and-scatter.

Forward. A window is reduced along one spatial axis after another, the last one first, by joining neighbours, then
neighbouring pairs and so on (`fold`); an odd one out is passed on unchanged. This is the order of additions for sums;
for a maximum the order does not matter. Long overlapping windows share joins, so that a window of n taps costs about
2 log2 n joins.

Backward, in gather form: an element of dx adds the contributions of the windows that it is in, in a fixed order.
Elements whose positions are equal modulo the stride belong to the same taps, so that each such phase is a sum of
shifted slices of dy.

XLA contracts a product and a sum into one fused operation. If sums follow a division by a count, the two are kept
apart, so that the bits are those of the definition.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core import blending, engines
from jaxdnn._src.core.determinism import is_fixed
from jaxdnn._src.core.rounding import nearest, real, rounded
from jaxdnn._src.pool.spec import PoolSpec
from jaxdnn._src.pool.xla.fold import Item, fold, last_first, padded, slice_axis
from jaxdnn._src.pool.xla.gather import (
    UNROLLED_ON_CPUS,
    UNROLLED_TERMS,
    gather_form,
    interleaved,
    phases,
    shifted,
    spread,
)

Here = Callable[[Array], Array]

# ---- maximum ---------------------------------------------------------------------------------------------------------


def _better(spec: PoolSpec, b: Array, a: Array) -> Array:
    """Whether b, a later tap, replaces a: only if it is larger, or by the rule for NaN."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return b > a
    if spec.nan == "propagate":
        return (b > a) | (_is_nan(b) & ~_is_nan(a))
    return (b > a) | (_is_nan(a) & ~_is_nan(b))


def _is_nan(a: Array) -> Array:
    return a != a


def least(spec: PoolSpec, dtype: Any) -> Any:
    """The value of padding: no number is smaller. If NaN is ignored, it is NaN, which any number replaces."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.iinfo(dtype).min
    return -jnp.inf if spec.nan == "propagate" else jnp.nan


def _max(call: engines.Call, x: Array) -> Array:
    spec: PoolSpec = call.spec
    y = padded(spec, x, least(spec, x.dtype))

    def join(a: Array, b: Array, _: int) -> Array:
        return jnp.where(_better(spec, b, a), b, a)

    for i, axis in last_first(spec):
        y = fold(y, axis, spec.taps[i], spec.stride[i], spec.dilation[i], spec.outputs[i], join)
    return y


def _max_indices(call: engines.Call, x: Array) -> tuple[Array, Array]:
    spec: PoolSpec = call.spec
    y, tap, weight = padded(spec, x, least(spec, x.dtype)), None, 1
    for i, axis in last_first(spec):
        tap = jnp.zeros(y.shape, spec.tap_dtype) if tap is None else tap
        item = {"y": y, "tap": tap, "inside": _inside(spec, i, axis, y)}

        def joined(a: Item, b: Item, apart: int, weight: int = weight) -> Item:
            takes = _better(spec, b["y"], a["y"])
            if a["inside"] is not None:  # padding does not win a tie
                takes = takes & b["inside"] | ~a["inside"]
            further = b["tap"] + jnp.asarray(apart * weight, spec.tap_dtype)
            return {
                "y": jnp.where(takes, b["y"], a["y"]),
                "tap": jnp.where(takes, further, a["tap"]),
                "inside": None if a["inside"] is None else a["inside"] | b["inside"],
            }

        found: Item = fold(item, axis, spec.taps[i], spec.stride[i], spec.dilation[i], spec.outputs[i], joined)
        y, tap, weight = found["y"], found["tap"], weight * spec.taps[i]
    return y, jnp.zeros(y.shape, spec.tap_dtype) if tap is None else tap


def _inside(spec: PoolSpec, i: int, axis: int, padded: Array) -> Array | None:
    """Along one axis of the padded x, which positions are in x; None if all are."""
    low, size = spec.padding[i][0], spec.sizes[i]
    if low == 0 and padded.shape[axis] <= size:
        return None
    at = np.arange(padded.shape[axis]) - low
    inside = (at >= 0) & (at < size)
    shape = [1] * padded.ndim
    shape[axis] = -1
    return jnp.asarray(inside.reshape(shape))


def without_padding(spec: PoolSpec, found: tuple[Array, Array], here: Here) -> tuple[Array, Array]:
    """A result of windows whose padding was in x: where it ties with the maximum, the first tap that is not padding."""
    if not any(map(any, spec.padding)):
        return found
    y, tap = found
    lowest = jnp.asarray(least(spec, y.dtype), y.dtype)
    ties = (y == lowest) | (_is_nan(y) & _is_nan(lowest))
    first = here(_along(spec, y, spec.first_taps().astype(spec.tap_dtype)))
    return y, jnp.where(ties, first, tap)


def _pick(call: engines.Call, x: Array, tap: Array) -> Array:
    """The chosen tap of every window, 0 for an index not in x: by selection among few slices, else by a gather."""
    spec: PoolSpec = call.spec
    if math.prod(spec.taps) > UNROLLED_TERMS:
        return _gather(spec, x, tap).astype(spec.out_dtype)
    wide, y = padded(spec, x, 0), jnp.zeros(tap.shape, x.dtype)
    for t, place in enumerate(itertools.product(*map(range, spec.taps))):
        part = wide
        for i, axis in enumerate(spec.spatial):
            part = slice_axis(part, place[i] * spec.dilation[i], spec.outputs[i], spec.stride[i], axis)
        y = jnp.where(tap == jnp.asarray(t, tap.dtype), part, y)
    return y.astype(spec.out_dtype)


def flat_positions(spec: PoolSpec, tap: Array) -> Array:
    """The flat spatial position in x of a tap, int32."""
    rest, flat, factor = tap.astype(jnp.int32), jnp.zeros(tap.shape, jnp.int32), 1
    for i, axis in last_first(spec):
        stride, dilation, (low, _) = spec.stride[i], spec.dilation[i], spec.padding[i]
        start = lax.broadcasted_iota(jnp.int32, tap.shape, tap.ndim + axis) * stride - low
        flat = flat + (start + rest % spec.taps[i] * dilation) * factor
        rest, factor = rest // spec.taps[i], factor * spec.sizes[i]
    return flat


def _gather(spec: PoolSpec, x: Array, tap: Array) -> Array:
    first = x.ndim + spec.spatial[0]
    stop = first + len(spec.spatial)
    flat = lambda a: a.reshape(*a.shape[:first], -1, *a.shape[stop:])
    found = jnp.take_along_axis(flat(x), flat(flat_positions(spec, tap)), axis=first).reshape(tap.shape)
    return jnp.where(_is_in_x(spec, tap), found, jnp.zeros_like(found))


def _is_in_x(spec: PoolSpec, tap: Array) -> Array:
    """Whether a tap is one of the window, and lies in x and not in its padding."""
    rest = tap.astype(jnp.int32)  # the largest uint32, which stands for no tap, becomes -1
    inside = (rest >= 0) & (rest < math.prod(spec.taps))
    for i, axis in last_first(spec):
        stride, dilation, (low, _) = spec.stride[i], spec.dilation[i], spec.padding[i]
        start = lax.broadcasted_iota(jnp.int32, tap.shape, tap.ndim + axis) * stride - low
        at, rest = start + rest % spec.taps[i] * dilation, rest // spec.taps[i]
        inside = inside & (at >= 0) & (at < spec.sizes[i])
    return inside


# ---- maximum, backward -----------------------------------------------------------------------------------------------


def _max_dgrad(call: engines.Call, dy: Array, tap: Array) -> Array:
    spec: PoolSpec = call.spec
    wide = dy.astype(blending.accumulator(dy.dtype))
    wide = jnp.where(wide == 0, jnp.zeros_like(wide), wide)  # sums are from +0; done first, it costs no pass
    unrolled = UNROLLED_ON_CPUS if call.platform == "cpu" else UNROLLED_TERMS
    return nearest(gather_form(spec, wide, tap, jnp.add, unrolled), spec.out_dtype)


# ---- average ---------------------------------------------------------------------------------------------------------


def _add(a: Array, b: Array, _: int) -> Array:
    return a + b


def _sums_whole(spec: PoolSpec, i: int) -> bool:
    """Whether a window as long as its axis is left to XLA's sum."""
    whole = spec.outputs[i] == 1 and spec.taps[i] == spec.sizes[i] + sum(spec.padding[i])
    return whole and not is_fixed(spec.level)


def _average(call: engines.Call, x: Array) -> Array:
    spec: PoolSpec = call.spec
    y = padded(spec, x.astype(blending.accumulator(x.dtype)), 0)
    for i, axis in last_first(spec):
        if _sums_whole(spec, i):
            y = jnp.sum(y, axis, keepdims=True, dtype=y.dtype)  # in XLA's order, which no level at hand fixes
            continue
        y = fold(y, axis, spec.taps[i], spec.stride[i], spec.dilation[i], spec.outputs[i], _add)
    return averaged(spec, y)


def averaged(spec: PoolSpec, y: Array, here: Here = lambda full: full) -> Array:
    """Sums, divided; `here` takes what belongs to a device's windows out of an array for all."""
    if spec.divisor is None:
        return nearest(y, spec.out_dtype)
    if jnp.issubdtype(spec.out_dtype, jnp.integer):
        return rounded_quotient(y, here(_along(spec, y, spec.counts().astype(np.int32)))).astype(spec.out_dtype)
    y = real(y, jnp.float32) if jnp.issubdtype(y.dtype, jnp.integer) else y
    return nearest(y * here(_reciprocals(spec, y)), spec.out_dtype)


def _along(spec: PoolSpec, like: Array, values: np.ndarray) -> Array:
    """An array over the spatial axes as one that broadcasts against `like`; a number where all are alike."""
    if values.size and (values == values.flat[0]).all():
        values = values.reshape(-1)[:1].reshape((1,) * values.ndim)
    shape = [1] * like.ndim
    for i, axis in enumerate(spec.spatial):
        shape[axis] = values.shape[i]
    return jnp.asarray(values.reshape(shape))


def _reciprocals(spec: PoolSpec, like: Array) -> Array:
    """1 / count, rounded once: a product is the same on every device, a quotient is not."""
    return _along(spec, like, (1.0 / spec.counts()).astype(like.dtype))


def rounded_quotient(total: Array, count: Array) -> Array:
    """total / count to the nearest integer, ties to even, in integers."""
    quotient = (2 * total + count) // (2 * count)
    tie = (2 * total + count) % (2 * count) == 0
    return jnp.where(tie & (quotient % 2 == 1), quotient - 1, quotient)


def _average_dgrad(call: engines.Call, dy: Array) -> Array:
    spec: PoolSpec = call.spec
    dx = dy.astype(blending.accumulator(dy.dtype))
    factor = None if spec.divisor is None else _reciprocals(spec, dx)
    if factor is not None and factor.size > 1:
        dx = shares(spec, dy)
    for i, axis in last_first(spec):
        dx = _sum_backward(spec, i, axis, dx)
    if factor is not None and factor.size == 1:
        dx = dx * factor
    return nearest(dx, spec.out_dtype)


def shares(spec: PoolSpec, dy: Array, here: Here = lambda full: full) -> Array:
    """What each element of a window gets of dy, where the counts differ."""
    wide = dy.astype(blending.accumulator(dy.dtype))
    return rounded(wide * here(_reciprocals(spec, wide)))


def _sum_backward(spec: PoolSpec, i: int, axis: int, dy: Array) -> Array:
    """Along one axis: every element adds the dy of the windows it is in, taps ascending, in the order of `fold`."""
    stride, dilation, (low, _) = spec.stride[i], spec.dilation[i], spec.padding[i]
    size, count = spec.sizes[i], -(-spec.sizes[i] // stride)
    if spec.outputs[i] == 1 or spec.extents[i] <= stride:
        stride = size + low if spec.outputs[i] == 1 else stride
        p, place = np.divmod(np.arange(size) + low, stride)
        covered = (place % dilation == 0) & (place // dilation < spec.taps[i]) & (p < spec.outputs[i])
        shape = [1] * dy.ndim
        shape[axis] = size
        wide = spread(dy, axis, stride, low, size)
        if spec.extents[i] > spec.stride[i]:  # what stands for windows that are not there is added too: -0 + 0 is 0
            added = np.array([len(phase) > 1 for phase in phases(spec, i)])[np.arange(size) % spec.stride[i]]
            wide = jnp.where(jnp.asarray(added.reshape(shape)) & (wide == 0), jnp.zeros_like(wide), wide)
        return wide if covered.all() else jnp.where(jnp.asarray(covered.reshape(shape)), wide, jnp.zeros_like(wide))
    parts = []
    for phase in phases(spec, i):
        if not phase:
            parts.append(jnp.zeros([count if d == dy.ndim + axis else n for d, n in enumerate(dy.shape)], dy.dtype))
            continue
        # Ascending taps have descending outputs, so the axis is reversed: output p is at -p.
        step = phase[0][1] - phase[1][1] if len(phase) > 1 else 1
        last = phase[-1][1]
        span = count + (len(phase) - 1) * step
        around = lax.rev(shifted(dy, axis, last, span, 0), [dy.ndim + axis])
        parts.append(lax.rev(fold(around, axis, len(phase), 1, step, count, _add), [dy.ndim + axis]))
    return interleaved(parts, axis, size)


# ---- what the engine guarantees --------------------------------------------------------------------------------------

_RUN: dict[str, Any] = {
    "pool_max": _max,
    "pool_max_indices": _max_indices,
    "pool_pick": _pick,
    "pool_max_dgrad": _max_dgrad,
    "pool_average": _average,
    "pool_average_dgrad": _average_dgrad,
}


def _level(call: engines.Call) -> str:
    spec: PoolSpec = call.spec
    by_xla = call.op == "pool_average" and any(_sums_whole(spec, i) for i in range(len(spec.sizes)))
    return "run_to_run" if by_xla else "portable"


def _accumulation(call: engines.Call) -> str:
    dtype = call.avals[0].dtype
    return "int32" if not jnp.issubdtype(dtype, jnp.floating) else "float64" if dtype == jnp.float64 else "float32"


engines.declare(
    "xla",
    *_RUN,
    run=lambda call, *operands: _RUN[call.op](call, *operands),
    level=_level,
    accumulation=_accumulation,
    partition=lambda call: True,
    notes=("XLA takes subnormal numbers for zero on CPUs, so portability is for normal ones",),
)
