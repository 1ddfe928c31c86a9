"""What a convolution is: the one record that every engine reads its window from."""

import dataclasses

from jaxdnn._src.core.windows import Window


@dataclasses.dataclass(frozen=True)
class Geometry(Window):
    """A convolution without its batch, channels and dtypes: the window of its taps on the input, and how it is applied.

    Attributes:
      flip: whether it is a convolution in the mathematical sense, with the taps in reverse.
      groups: into which the channels are divided.
      outer: for kernels that read two layouts of filters: whether it is (K, taps..., C / groups), not (taps..., C /
        groups, K).
    """

    flip: bool = False
    groups: int = 1
    outer: bool = False

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


@dataclasses.dataclass(frozen=True)
class Products(Geometry):
    """Products of matrices, as `matmul` asks for them: one tap without padding, rows are pixels, groups are matrices.

    A type of its own, because engines are chosen for these by measurements of their own. What an engine does otherwise
    for products must change nothing of a convolution with the same numbers, nor be found under its key by
    `jaxdnn.tune`.

    Attributes:
      batched: whether b has leading axes, so that another batch would be another number of groups.
    """

    batched: bool = False
