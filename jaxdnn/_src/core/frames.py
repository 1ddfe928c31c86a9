"""The layouts of a call: reads arrays in them, and takes channel vectors (NC/32HW32) off and on."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, export

from jaxdnn._src.core import checks, primitives, windows
from jaxdnn._src.core.windows import FilterLayout, Layout


@dataclasses.dataclass(frozen=True)
class Frame:
    """The layouts of a call; inside, arrays have no channel vectors (NC/32HW32 becomes NCHW)."""

    given: Layout
    given_filter: FilterLayout

    @property
    def layout(self) -> Layout:
        return Layout(self.given.axes)

    @property
    def filter_layout(self) -> FilterLayout:
        return FilterLayout(self.given_filter.axes, name=self.given_filter.name)

    def array(self, name: str, value: Any) -> Array:
        """Reads an input or output array."""
        value = checks.array(name, value)
        shape = self.array_shape(name, value.shape)
        return value if self.given.vector is None else _devectorise(value, self.given.channel, shape)

    def filter(self, name: str, value: Any) -> Array:
        """Reads a filter."""
        value = checks.array(name, value)
        shape = self.filter_shape(name, value.shape)
        layout = self.given_filter
        return value if layout.vector is None else _devectorise(value, layout.input, shape)

    def array_shape(self, name: str, shape: Any) -> tuple[int, ...]:
        """Reads the shape of an input or output array, and returns it without channel vectors."""
        return _plain_shape(name, shape, self.given, "layout", self.given.channel)

    def filter_shape(self, name: str, shape: Any) -> tuple[int, ...]:
        """Reads the shape of a filter, and returns it without channel vectors."""
        layout = self.given_filter
        return _plain_shape(name, shape, layout, "filter layout", layout.input)

    def restore(self, y: Array) -> Array:
        """Gives an input or output array its channel vectors."""
        return y if self.given.vector is None else _vectorise(y, self.given.channel, self.given.vector, "result")

    def restore_filter(self, w: Array) -> Array:
        """Gives a filter its channel vectors."""
        vector = self.given_filter.vector
        return w if vector is None else _vectorise(w, self.given_filter.input, vector, "filter")


def frame(layout: Any, filter_layout: Any = None) -> Frame:
    """Reads the layouts."""
    data = windows.layout(layout)
    return Frame(data, windows.filter_layout(filter_layout, data))


def _plain_shape(name: str, shape: Any, layout: Layout | FilterLayout, why: str, channel: int) -> tuple[int, ...]:
    vector = isinstance(shape, np.ndarray) and shape.ndim == 1
    if not isinstance(shape, str) and not vector and (hasattr(shape, "shape") or not checks.is_sequence(shape)):
        raise TypeError(f"`{name}` must be a shape, got {checks.shown(shape)}.")
    # `jax.export` may trace a call for batches of any size; every other size decides the program.
    batch = layout.batch if isinstance(layout, Layout) else None
    given: Any = shape
    sizes: tuple[Any, ...] = tuple(
        s if i == batch and export.is_symbolic_dim(s) else checks.integer(name, s) for i, s in enumerate(given)
    )
    windows.require_shape(name, sizes, layout, why)
    if any(s < 0 for s in sizes):
        raise ValueError(f"`{name}` must have no negative size, got {sizes}.")
    checks.countable(f"`{name}`", sizes)
    if layout.vector is None:
        return sizes
    return (*sizes[:channel], sizes[channel] * layout.vector, *sizes[channel + 1 : -1])


def _devectorise(value: Array, channel: int, shape: tuple[int, ...]) -> Array:
    return primitives.reshaped(jnp.moveaxis(value, -1, channel + 1), shape)


def _vectorise(value: Array, channel: int, vector: int, name: str) -> Array:
    c = value.shape[channel]
    if c % vector:
        raise ValueError(f"`layout` needs the channels of the {name} divisible by {vector}, got {c}.")
    split = (*value.shape[:channel], c // vector, vector, *value.shape[channel + 1 :])
    return jnp.moveaxis(primitives.reshaped(value, split), channel + 1, -1)
