"""PTX text for the depthwise kernels: lanes, swizzled tiles in shared memory, matrix fragments.

Pallas moves the tiles and allocates the barriers. The arithmetic between them is one block of PTX for each kernel,
because Mosaic GPU has no `mma.sync` with operands that are built in registers. A block is a scope of its own: it
declares its registers, reads its operands ($0, $1, ...) at the top, and stores its results in shared memory or in the
operands that are results.
"""

import dataclasses

from jaxdnn._src.hopper.ptx import Emitter


class Lanes:
    """A thread's warp and lane, and the parts of the lane's number that fragments use."""

    def __init__(self, e: Emitter) -> None:
        thread = e.r("mov.u32", "%tid.x")
        self.lane = e.r("and.b32", thread, 31)
        self.warp = e.r("shr.u32", thread, 5)
        self.row = e.r("shr.u32", self.lane, 2)  # the accumulator's row: a pixel
        self.pair = e.r("shl.b32", e.r("and.b32", self.lane, 3), 1)  # its first of two columns: channels
        self.source = e.r("and.b32", self.lane, 7)  # the row of an 8x8 matrix that this lane addresses for ldmatrix
        self.matrix = e.r("shr.u32", self.lane, 3)  # the number of that matrix among the four


class SwizzledTile:
    """Pixels of `channels` 16-bit values in shared memory as TMA swizzles them, addressed from a lane's pixel.

    A pixel has 2*channels bytes (32, 64 or 128). The number of a 16-byte chunk is combined by exclusive or with address
    bits 7 and up, so that a chunk of eight neighbouring pixels is in different banks. The pattern repeats every eight
    pixels: a lane needs one base address for each offset modulo eight, and adds constants to it.
    """

    def __init__(self, e: Emitter, address: str, channels: int, pixel: str, chunk: str) -> None:
        self._e, self._pixel, self._chunk = e, pixel, chunk
        self._bytes = 2 * channels
        self._shift = {64: 0, 32: 1, 16: 2}[channels]
        self._mask = {64: 7, 32: 3, 16: 1}[channels]
        self._start = e.scaled(pixel, self._bytes, address)
        self._bases: dict[int, str] = {}

    def at(self, offset: int) -> str:
        """The operand `[register+constant]` for the lane's pixel plus `offset` pixels."""
        phase = offset % 8
        if phase not in self._bases:
            e = self._e
            turn = e.r("and.b32", e.r("shr.u32", e.r("add.s32", self._pixel, phase), self._shift), self._mask)
            turn = e.r("shl.b32", e.r("xor.b32", turn, self._chunk), 4)
            self._bases[phase] = e.r("add.s32", self._start, turn)
        return f"[{self._bases[phase]}+{offset * self._bytes}]"


@dataclasses.dataclass
class Fragments:
    """8x8 matrices (eight pixels of eight channels) read by ldmatrix, four rows of a column of them at a time.

    Fragment (row, column) has the eight pixels whose first is `row` rows and `column` pixels from the lane's own. Rows
    first, first+step, ... are loaded four at a time, when the first of them is needed; lanes 8 to 31 address the other
    three, so that the lane's pixel must include matrix * step * pitch.
    """

    e: Emitter
    tile: SwizzledTile
    pitch: int
    first: int
    step: int
    count: int
    transposed: bool = False
    mask: str = ""

    def __post_init__(self) -> None:
        self._held: dict[tuple[int, int], str] = {}

    def get(self, row: int, column: int) -> str:
        if (row, column) not in self._held:
            self._fetch((row - self.first) // self.step // 4 * 4, column)
        return self._held[row, column]

    def _fetch(self, start: int, column: int) -> None:
        left = min(4, self.count - start)
        while left:
            size = 4 if left == 4 else 2 if left >= 2 else 1
            names = [self.e.new() for _ in range(size)]
            rows = [self.first + self.step * (start + i) for i in range(size)]
            trans = ".trans" if self.transposed else ""
            self.e.op(
                f"ldmatrix.sync.aligned.m8n8.x{size}{trans}.shared.b16",
                names,
                self.tile.at(rows[0] * self.pitch + column),
            )
            for name, row in zip(names, rows, strict=True):
                self._held[row, column] = self.e.r("and.b32", name, self.mask) if self.mask else name
            start, left = start + size, left - size


def matrix_multiply(e: Emitter, dtype: str, accumulators: list[str], a: list[str], b: list[str]) -> None:
    """accumulators (16 x 8, float32) += a (16 x 16) b (16 x 8)."""
    e.op(f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32", accumulators, a, b, accumulators)
