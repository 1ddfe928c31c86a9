"""What is known of pooling when it is traced, and the shapes that follow from it."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxdnn._src.core.cropping import Cut
from jaxdnn._src.core.windows import Window

OPS = ("pool_max", "pool_max_indices", "pool_pick", "pool_max_dgrad", "pool_average", "pool_average_dgrad")


@dataclasses.dataclass(frozen=True)
class PoolSpec(Window):
    """Everything about a pooling call that is known when it is traced, apart from the sizes of the other axes.

    Attributes:
      outputs: the spatial sizes of y; in ceil mode the last window may reach over the high padding.
      spatial: the spatial axes, counted from the end.
      divisor: what a sum is divided by: None (nothing), "padded" (the window's taps in x and its padding), "valid"
        (those in x), or a number that the user gave.
      nan: "propagate" or "ignore", for max.
      out_dtype: the result's dtype.
      cut: what negative padding has cut off x, whose sizes are of what is left.
    """

    outputs: tuple[int, ...]
    spatial: tuple[int, ...]
    out_dtype: np.dtype
    divisor: str | int | None = None
    nan: str = "propagate"
    engine: str | None = None
    level: str = "fast"
    cut: Cut | None = None

    @property
    def tap_dtype(self) -> np.dtype:
        """The dtype of taps."""
        count = math.prod(self.taps)
        return np.dtype(np.uint8 if count <= 256 else np.uint16 if count <= 65536 else np.uint32)

    @property
    def uncut(self) -> "PoolSpec":
        """The same windows on the whole x, with negative padding: for positions, as no engine takes such padding."""
        if self.cut is None:
            return self
        pads = zip(self.padding, self.cut.ends, strict=True)
        padding = tuple((low - before, high - after) for (low, high), (before, after) in pads)
        sizes = tuple(size + sum(ends) for size, ends in zip(self.sizes, self.cut.ends, strict=True))
        return dataclasses.replace(self, sizes=sizes, padding=padding, cut=None)

    def positions(self, axis: int) -> np.ndarray:
        """[outputs, taps] along a spatial axis: p * stride + r * dilation - low, in x or its padding."""
        stride, dilation, (low, _) = self.stride[axis], self.dilation[axis], self.padding[axis]
        p, r = np.arange(self.outputs[axis]), np.arange(self.taps[axis])
        return p[:, None] * stride + r * dilation - low

    def counts(self) -> np.ndarray:
        """What each output's sum is divided by, an integer array with the spatial axes of y; their lengths may be 1."""
        if isinstance(self.divisor, int):
            return np.full((1,) * self.rank, self.divisor, np.int64)
        total = np.ones((), np.int64)
        for axis, (size, (_, high)) in enumerate(zip(self.sizes, self.padding, strict=True)):
            at = self.positions(axis)
            inside = at < size + high if self.divisor == "padded" else (at >= 0) & (at < size)
            total = total[..., None] * inside.sum(1)
        return total

    @property
    def whole(self) -> bool:
        """Whether one divisor serves all windows: a given number, or the number of taps."""
        return isinstance(self.divisor, int) or bool((self.counts() == math.prod(self.taps)).all())

    def first_taps(self) -> np.ndarray:
        """Each output's first tap in x, an integer array with the spatial axes of y."""
        first = np.zeros((), np.int64)
        for axis, taps in enumerate(self.taps):
            first = first[..., None] * taps + (self.positions(axis) >= 0).argmax(1)
        return first

    @property
    def disjoint(self) -> bool:
        """Whether no two windows share an element."""
        return all(
            extent <= stride or outputs == 1
            for extent, stride, outputs in zip(self.extents, self.stride, self.outputs, strict=True)
        )


def _swapped(spec: PoolSpec, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    new = list(shape)
    for axis, size in zip(spec.spatial, sizes, strict=True):
        new[axis] = size
    return tuple(new)


def x_shape(spec: PoolSpec, y_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of x, from that of y."""
    return _swapped(spec, y_shape, spec.sizes)


def y_shape(spec: PoolSpec, x_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of y, from that of x."""
    return _swapped(spec, x_shape, spec.outputs)
