"""Negative padding: an op whose padding would be negative runs on an array whose ends have been cut off.

What is cut off meets no window, so its gradient is zero.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core import primitives
from jaxdnn._src.core.windows import Layout, Window


@dataclasses.dataclass(frozen=True)
class Cut:
    """What is cut off an array: `ends` has how many elements at the low and at the high end of each of the `axes`.

    These are counted from the last.
    """

    axes: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]

    def before(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the array of which one of this shape is left."""
        found = list(shape)
        for axis, ends in zip(self.axes, self.ends, strict=True):
            found[axis] += sum(ends)
        return tuple(found)

    def off(self, x: Array) -> Array:
        """What is left of x."""
        shape = list(x.shape)
        for axis, ends in zip(self.axes, self.ends, strict=True):
            shape[axis] -= sum(ends)
        return self._padded(x, shape, -1)

    def undone(self, y: Array) -> Array:
        """y with zeros where something was cut off."""
        return self._padded(y, self.before(y.shape), 1)

    def within(self, shape: Sequence[int]) -> Array:
        """Whether an element of an array of this shape is left."""
        left = jnp.ones((1,) * len(shape), bool)
        for axis, (low, high) in zip(self.axes, self.ends, strict=True):
            lengths = [1] * len(shape)
            lengths[axis] = shape[axis]
            at = jnp.arange(shape[axis]).reshape(lengths)
            left = left & (at >= low) & (at < shape[axis] - high)
        return left

    def _padded(self, x: Array, shape: Sequence[int], sign: int) -> Array:
        ends = dict(zip((axis + x.ndim for axis in self.axes), self.ends, strict=True))
        pads = [(sign * low, sign * high, 0) for low, high in (ends.get(axis, (0, 0)) for axis in range(x.ndim))]
        return lax.pad(primitives.evenly(x, shape), jnp.zeros((), x.dtype), pads)


def cropped(window: Window, layout: Layout) -> tuple[Cut | None, Window]:
    """What negative padding cuts off an array of a layout, and the window over what is left, which it pads."""
    axes = tuple(axis - layout.ndim for axis in layout.spatial)
    ends = tuple((max(-low, 0), max(-high, 0)) for low, high in window.padding)
    if not any(map(any, ends)):
        return None, window
    sizes = tuple(size - sum(cut) for size, cut in zip(window.sizes, ends, strict=True))
    if min(size if any(cut) else 1 for size, cut in zip(sizes, ends, strict=True)) < 1:
        raise ValueError(
            f"`padding` must leave at least one element of every spatial axis that it cuts off, got {window.padding} "
            f"for sizes {window.sizes}."
        )
    padding = tuple((max(low, 0), max(high, 0)) for low, high in window.padding)
    return Cut(axes, ends), dataclasses.replace(window, sizes=sizes, padding=padding)
