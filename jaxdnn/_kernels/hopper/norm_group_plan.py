"""How the kernels of group and instance normalisation deal an image out to blocks and threads."""

import dataclasses
import math

from jaxdnn._kernels.hopper.ptx import SIZES, VECTOR_BYTES

PART_BYTES = 128  # of a pixel that a cluster takes, or a few more: a line of the cache
CLUSTER = 8  # blocks at most, on any device
# Bytes of shared memory that a block may have where two, or one, share a multiprocessor.
HALF, WHOLE = 113 << 10, 226 << 10


@dataclasses.dataclass(frozen=True)
class ImagePlan:
    """How an image is dealt out.

    Attributes:
      pixels, channels: of an image.
      group: channels of a group.
      dtype, out_dtype: "bf16", "f16" or "f32".
      part: channels that a cluster works on: a divisor of `channels`, a multiple of `group` and of a vector's elements.
      threads: of a block, at least as many as a part of a pixel has vectors.
      cluster: blocks of a cluster: 1, 2, 4 or 8.
      kept: rounds whose vectors stay in shared memory.
      unroll: rounds whose vectors are loaded before the first is used.
    """

    pixels: int
    channels: int
    group: int
    dtype: str
    out_dtype: str
    part: int
    threads: int
    cluster: int
    kept: int
    unroll: int = 2

    @property
    def elements(self) -> int:
        """Of a vector."""
        return VECTOR_BYTES // SIZES[self.dtype]

    @property
    def columns(self) -> int:
        return self.part // self.elements

    @property
    def rows(self) -> int:
        """R."""
        return self.threads // self.columns

    @property
    def step(self) -> int:
        """Pixels that a cluster takes at a time."""
        return self.rows * self.cluster

    @property
    def full(self) -> int:
        """Rounds that all threads with a row have."""
        return self.pixels // self.step

    @property
    def rounds(self) -> int:
        return -(-self.pixels // self.step)

    @property
    def parts(self) -> int:
        """Of a pixel."""
        return self.channels // self.part

    @property
    def groups(self) -> int:
        """Of a part."""
        return self.part // self.group

    @property
    def cells(self) -> int:
        """Into how many sets of neighbouring channels a vector falls, each of one group alone, all of one size."""
        if self.group % self.elements == 0:
            return 1
        return self.elements // self.group if self.elements % self.group == 0 else self.elements

    @property
    def folds(self) -> bool:
        """Whether a warp has whole rows, so that its lanes are added by exchange first."""
        return self.columns in (1, 2, 4, 8, 16)

    @property
    def summands(self) -> int:
        """Sums of one column that a block has to add."""
        return self.threads // 32 if self.folds else self.rows

    def data(self, arrays: int) -> int:
        """Bytes of shared memory for the vectors of so many arrays."""
        return arrays * min(self.kept, self.rounds) * self.threads * VECTOR_BYTES

    @property
    def exchanged(self) -> int:
        """Floats of shared memory in which a cluster's blocks leave their sums, three for each group, to 16 bytes."""
        return -(-3 * self.cluster * self.groups // 4) * 4

    def floats(self, arrays: int) -> int:
        """Floats of a block's shared memory: vectors, what blocks exchange, threads' sums, and those of channels."""
        cells = self.cells if arrays == 1 else self.elements
        quantities = 2 if arrays == 1 or self.dtype != "f32" else 3
        return self.data(arrays) // 4 + self.exchanged + quantities * self.columns * cells * (self.summands + 1)


def plan(pixels: int, channels: int, group: int, dtype: str, out_dtype: str, arrays: int) -> ImagePlan | None:
    """How an image of so many pixels and channels is dealt out, of which so many arrays are kept; None if it is not."""
    elements = VECTOR_BYTES // SIZES[dtype]
    if channels % elements:
        return None
    least = math.lcm(group, elements)
    wanted = PART_BYTES // SIZES[dtype]
    count = channels // least
    part = least * next((d for d in range(1, count + 1) if count % d == 0 and least * d >= wanted), count)
    vectors = part // elements
    if vectors > 1024:
        return None
    threads = 128 if pixels * vectors <= 8 * 128 else 256
    while threads < vectors:
        threads *= 2
    fitted = ImagePlan(pixels, channels, group, dtype, out_dtype, part, threads, 1, 1 << 30)
    for room, blocks in ((HALF, (1, 2, 4, 8)), (WHOLE, (CLUSTER,))):
        for cluster in blocks:
            fitted = dataclasses.replace(fitted, cluster=cluster)
            if 4 * fitted.floats(arrays) <= room:
                return fitted
    empty = dataclasses.replace(fitted, kept=0)
    kept = (HALF - 4 * empty.floats(arrays)) // (arrays * threads * VECTOR_BYTES)
    return dataclasses.replace(fitted, kept=max(kept, 0))
