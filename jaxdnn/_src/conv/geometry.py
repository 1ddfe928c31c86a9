"""What a convolution is: the one record that every engine reads its window from."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A convolution without its batch, channels and dtypes; tuples have an element for each spatial axis.

    Attributes:
      sizes: of the input.
      taps: of the filter.
      padding: (low, high) of the input.
      flip: whether it is a convolution in the mathematical sense, with the taps in reverse.
      groups: into which the channels are divided.
      outer: for kernels that read two layouts of filters: whether it is (K, taps..., C / groups), not (taps..., C /
        groups, K).
    """

    sizes: tuple[int, ...]
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    flip: bool = False
    groups: int = 1
    outer: bool = False

    @property
    def rank(self) -> int:
        return len(self.taps)

    @property
    def extents(self) -> tuple[int, ...]:
        """The span of the window in input elements."""
        return tuple((r - 1) * d + 1 for r, d in zip(self.taps, self.dilation, strict=True))

    @property
    def out(self) -> tuple[int, ...]:
        """The sizes of the output."""
        axes = zip(self.sizes, self.extents, self.stride, self.padding, strict=True)
        return tuple((x + low + high - extent) // s + 1 for x, extent, s, (low, high) in axes)

    @property
    def unpadded(self) -> bool:
        return not any(map(any, self.padding))

    @property
    def pointwise(self) -> bool:
        """Whether each output pixel reads exactly the input pixel at its own position."""
        return set(self.taps) <= {1} and set(self.stride) <= {1} and self.unpadded

    @property
    def without_last_taps(self) -> "Geometry":
        """The convolution that remains after a copy has turned the last axis' taps into channels."""
        return dataclasses.replace(
            self,
            sizes=(*self.sizes[:-1], self.out[-1]),
            taps=(*self.taps[:-1], 1),
            stride=(*self.stride[:-1], 1),
            padding=(*self.padding[:-1], (0, 0)),
            dilation=(*self.dilation[:-1], 1),
        )
