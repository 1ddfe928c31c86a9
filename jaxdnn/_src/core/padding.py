"""Padding whose ends may be negative, which is right on every mesh."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike


def pad(x: Array, value: ArrayLike, widths: Sequence[tuple[int, int, int]]) -> Array:
    """`lax.pad`, by slices, padding outside, and a new axis for what is put between elements.

    XLA's partitioner (of JAX 0.10 to 0.12) returns the operand where one end of an axis is padded by as much as the
    other one loses, if every device has the whole operand and a part of the result. Where elements are put between
    others too, and ends are negative, it gives wrong elements or ends the process.
    """
    fill = jnp.asarray(value, x.dtype)
    ends = [(low, high) for low, high, _ in widths]
    for axis, (low, high, between) in enumerate(widths):
        if between and x.shape[axis]:
            x, ends[axis] = _spread(x, axis, between, fill), (low, high - between)  # what follows the last one goes
    lost = [(max(-low, 0), max(-high, 0)) for low, high in ends]
    grown = [(max(low, 0), max(high, 0), 0) for low, high in ends]
    early = [sum(cut) <= size for cut, size in zip(lost, x.shape, strict=True)]  # else padding is cut off too
    x = _without(x, [cut if first else (0, 0) for cut, first in zip(lost, early, strict=True)])
    x = lax.pad(x, fill, grown) if any(map(any, grown)) else x
    return _without(x, [(0, 0) if first else cut for cut, first in zip(lost, early, strict=True)])


def _spread(x: Array, axis: int, between: int, fill: Array) -> Array:
    """x with so many elements behind each of its own along an axis."""
    at = axis + 1
    wide = lax.pad(lax.expand_dims(x, [at]), fill, [(0, between if i == at else 0, 0) for i in range(x.ndim + 1)])
    return lax.reshape(wide, (*x.shape[:axis], x.shape[axis] * (between + 1), *x.shape[at:]))


def _without(x: Array, ends: Sequence[tuple[int, int]]) -> Array:
    if not any(map(any, ends)):
        return x
    return lax.slice(x, [low for low, _ in ends], [size - high for size, (_, high) in zip(x.shape, ends, strict=True)])
