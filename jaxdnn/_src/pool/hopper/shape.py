"""The shapes of a pooling, and the tiles that threads compute."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """A pooling of (n, h, w, c), channels last; pairs are for the rows ("down") and the columns ("across").

    Attributes:
      dtype: "bf16", "f16" or "f32".
      images: the product of the axes before the spatial ones.
      vectors: 16-byte vectors of channels.
      size, out: sizes of x and of y.
      counted: for averages whose counts differ, the positions [from, to) that are counted, down and across.
    """

    dtype: str
    images: int
    vectors: int
    size: tuple[int, int]
    out: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    low: tuple[int, int]
    dilation: tuple[int, int]
    counted: tuple[tuple[int, int], tuple[int, int]] | None = None

    @property
    def wide(self) -> bool:
        """Whether a number has 32 bits; otherwise it has 16."""
        return self.dtype == "f32"

    @property
    def elements(self) -> int:
        """Elements of a vector."""
        return 4 if self.wide else 8

    @property
    def cells(self) -> tuple[int, int]:
        """The number of cells of dx, down and across: a cell is as many elements along each axis as the stride."""
        down, across = (-(-h // u) for h, u in zip(self.size, self.stride, strict=True))
        return down, across

    def padded(self, axis: int) -> bool:
        """Whether some window reaches beyond x."""
        last = (self.out[axis] - 1) * self.stride[axis] + (self.taps[axis] - 1) * self.dilation[axis] - self.low[axis]
        return self.low[axis] > 0 or last >= self.size[axis]

    def slides(self, axis: int) -> bool:
        """Whether windows, and their taps, move by one element."""
        return self.stride[axis] == self.dilation[axis] == 1

    def phases(self, axis: int) -> list[list[tuple[int, int]]]:
        """For each a < stride: (tap, shift) of the outputs i + shift whose window has element a + i * stride of dx."""
        u, d, low = self.stride[axis], self.dilation[axis], self.low[axis]
        reach = ([(r, divmod(a + low - r * d, u)) for r in range(self.taps[axis])] for a in range(u))
        return [[(r, shift) for r, (shift, rest) in phase if rest == 0] for phase in reach]


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of a thread, of outputs or of cells, and the numbering of threads.

    Attributes:
      rows, columns: of the thread's tile; at most those of the array.
      vectors: vectors of channels whose threads have neighbouring numbers; a divisor of all vectors.
    """

    rows: int
    columns: int
    vectors: int

    def count(self, k: Shape, size: tuple[int, int]) -> int:
        """Threads for an array of so many rows and columns."""
        return k.images * k.vectors * -(-size[0] // self.rows) * -(-size[1] // self.columns)
