"""The pooling primitives: their shapes, derivatives, vmap and sharding rules.

An array has spatial axes, which a window moves over, and any number of other axes: vmap adds a leading one. The
primitives are:

| primitive | result | derivative |
|---|---|---|
| pool_max(x) | y | pool_pick of the tangent, at the taps of pool_max_indices |
| pool_max_indices(x) | y, tap: which tap of its window y is, in row-major order | the same |
| pool_pick(x, tap) | y: the chosen tap of every window of x | linear in x; its transpose is pool_max_dgrad |
| pool_max_dgrad(dy, tap) | dx: every element adds up the dy of the windows that chose it | linear; pool_pick |
| pool_average(x) | y: sums over windows, divided by a count if there is a divisor | linear; pool_average_dgrad |
| pool_average_dgrad(dy) | dx | linear; pool_average |

Taps are stored as uint8 if a window has at most 256: the backward pass of max-pooling reads dy and one byte for each
output, instead of x and y.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core import primitives
from jaxdnn._src.core.blending import accumulator
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.partitioning import Axes, Devices, Factors, Run, Windows
from jaxdnn._src.core.primitives import bind
from jaxdnn._src.pool.spec import OPS, PoolSpec, x_shape, y_shape


def _results(op: str, spec: PoolSpec, first: Any, *_: Any) -> Any:
    shape = x_shape(spec, first.shape) if op.endswith("dgrad") else y_shape(spec, first.shape)
    value = jax.ShapeDtypeStruct(shape, spec.out_dtype)
    return (value, jax.ShapeDtypeStruct(shape, spec.tap_dtype)) if op == "pool_max_indices" else value


def factors(op: str, spec: PoolSpec, *avals: Any) -> Factors:
    """All axes may be sharded, spatial ones where windows are as many as the stride goes into the sizes."""
    rank = len(avals[0].shape)
    windows = {axis + rank: w.dims(f"a{axis + rank}") for axis, w in zip(spec.spatial, _windows(spec), strict=True)}

    pairs = {i: (x, y) for i, (x, y, _) in windows.items()}

    def names(role: str) -> tuple[str, ...]:
        return tuple(pairs[i][role == "y"] if i in pairs else f"a{i}" for i in range(rank))

    first, last = ("y", "x") if op.endswith("dgrad") else ("x", "y")
    return Factors(
        operands=(names(first), names("y"))[: len(avals)],
        results=(names(last),) * (2 if op == "pool_max_indices" else 1),
        free=tuple(f"a{i}" for i in range(rank) if i not in windows),
        placed=tuple(f"a{i}" for i, (x, y, _) in windows.items() if x.split()[0] == y),
        sizes={name: size for *_, sizes in windows.values() for name, size in sizes.items()},
        local=ft.partial(_on_device, op, spec),
    )


def _windows(spec: PoolSpec) -> list[Windows]:
    axes = zip(spec.sizes, spec.outputs, spec.stride, spec.extents, strict=True)
    return [Windows(*axis, low) for axis, (low, _) in zip(axes, spec.padding, strict=True)]


def _on_device(op: str, spec: PoolSpec, run: Run, axes: Axes, first: Array, *further: Array) -> Any:
    """A device's part, with the rows that its windows share with other devices, and padding beyond the ends of x.

    An engine does not know the position of a window, so what depends on it is computed here: divisors that differ, and
    the taps of windows whose maximum is equal to padding. Then XLA's formula serves, with the same bits as the kernels.
    """
    from jaxdnn._src.pool.xla import engine as pool

    placed = [axes.get(f"a{axis + first.ndim}") for axis in spec.spatial]
    backward, here = op.endswith("dgrad"), ft.partial(_here, spec, placed)
    counted = spec.divisor in ("padded", "valid")
    part, divided_after = dataclasses.replace(spec, divisor="padded") if counted else spec, False
    if counted and not spec.whole:
        divided_after = not backward or len(set(spec.counts().flat)) == 1
        out = accumulator(first.dtype) if divided_after else spec.out_dtype
        part = dataclasses.replace(spec, divisor=None, out_dtype=out, engine="xla")
        first = first if divided_after else pool.shares(spec, first, here)
    operands = [first, *further]
    sizes, outputs, padding = list(spec.sizes), list(spec.outputs), list(spec.padding)
    for i, (axis, window, devices) in enumerate(zip(spec.spatial, _windows(spec), placed, strict=True)):
        if devices is None:
            continue
        at = axis + first.ndim
        if backward:
            found = [window.around_outputs(v, at, devices) for v in operands]
            operands, padding[i] = [v for v, _ in found], found[0][1]
            sizes[i] //= devices.count
            outputs[i] = operands[0].shape[at]
        else:
            fill = pool.least(spec, first.dtype) if op.startswith("pool_max") else 0
            operands[0] = window.around_inputs(operands[0], at, devices, fill)
            sizes[i], padding[i] = operands[0].shape[at], (0, 0)
            outputs[i] //= devices.count
    part = dataclasses.replace(part, padding=tuple(padding), sizes=tuple(sizes), outputs=tuple(outputs))
    found = run(part, *operands)
    if divided_after:
        return pool.averaged(spec, found, here)
    return pool.without_padding(spec, found, here) if op == "pool_max_indices" else found


def _here(spec: PoolSpec, placed: Sequence[Devices | None], full: Array) -> Array:
    """This device's part of an array that has an element for each window position."""
    for axis, devices in zip(spec.spatial, placed, strict=True):
        if devices is not None and full.shape[axis] > 1:
            count = full.shape[axis] // devices.count
            full = lax.dynamic_slice_in_dim(full, devices.index() * count, count, full.ndim + axis)
    return full


# ---- derivatives -----------------------------------------------------------------------------------------------------

_TRANSPOSED = {
    "pool_pick": "pool_max_dgrad",
    "pool_max_dgrad": "pool_pick",
    "pool_average": "pool_average_dgrad",
    "pool_average_dgrad": "pool_average",
}


def _is_zero(tangent: Any, primal: Any) -> bool:
    return isinstance(tangent, ad.Zero) or not jnp.issubdtype(primal.dtype, jnp.inexact)


def _jvp_of_max(op: str, spec: PoolSpec, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    (x,), (dx,) = primals, tangents
    many = op == "pool_max_indices"
    if _is_zero(dx, x):
        found = bind(op, x, spec=spec)
        return found, tuple(map(primitives.zero_tangent, found)) if many else primitives.zero_tangent(found)
    y, tap = bind("pool_max_indices", x, spec=spec)
    dy = bind("pool_pick", dx, tap, spec=spec)
    return ((y, tap), (dy, primitives.zero_tangent(tap))) if many else (y, dy)


def _jvp_of_linear(op: str, spec: PoolSpec, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    y = bind(op, *primals, spec=spec)
    if _is_zero(tangents[0], primals[0]) or not jnp.issubdtype(y.dtype, jnp.inexact):
        return y, primitives.zero_tangent(y)
    return y, bind(op, tangents[0], *primals[1:], spec=spec)


def _transpose(op: str, spec: PoolSpec, ct: Array, *operands: Any) -> list[Array | None]:
    back = dataclasses.replace(spec, out_dtype=np.dtype(operands[0].aval.dtype))
    return [bind(_TRANSPOSED[op], ct, *operands[1:], spec=back), *[None] * (len(operands) - 1)]


_WORDS = {
    "pool_max": "`pool` of mode 'max'",
    "pool_max_indices": "`pool` of mode 'max', with the places of its maxima for its gradient,",
    "pool_max_dgrad": "The gradient of `pool` of mode 'max'",
    "pool_pick": "The derivative of `pool` of mode 'max' along a tangent",
    "pool_average": "Average pooling",
    "pool_average_dgrad": "The gradient of average pooling",
}
for _op in OPS:
    primitives.define(
        _op,
        results=ft.partial(_results, _op),
        jvp=ft.partial(_jvp_of_linear if _op in _TRANSPOSED else _jvp_of_max, _op),
        transpose=ft.partial(_transpose, _op) if _op in _TRANSPOSED else None,
        batch=ft.partial(primitives.batch_leading, _op),
        factors=ft.partial(factors, _op),
        many=_op == "pool_max_indices",
        words=_WORDS[_op],
    )
