"""How the kernels of group and instance normalisation deal an image out to blocks and threads."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from jaxdnn._kernels.hopper.ptx import SIZES, VECTOR_BYTES

THREADS = 1024  # of a block, at most
CLUSTERS = (1, 2, 4, 8)  # blocks of a cluster; any device has 8
ALL = 1 << 30  # rounds: none has so many
# Bytes of shared memory that a block may have where two, or one, share a multiprocessor, less what else it needs.
HALF, WHOLE = 110 << 10, 226 << 10
# At least so many bytes of a pixel for a cluster, in so much memory of a block, the fastest first: a line of the cache,
# two blocks a multiprocessor. Of a plan in which all is kept the smallest cluster is taken.
PREFERRED = ((128, HALF), (64, HALF), (128, WHOLE), (64, WHOLE), (32, HALF), (32, WHOLE))
NARROW = ((16, HALF), (16, WHOLE))  # slower than to read twice
# An image that does not stay is read twice: with little of it kept more blocks share a multiprocessor, and have more
# bytes under way. Forward what is kept is the sample from whose mean is measured: a 32nd at least.
STREAMED_KEPT, STREAMED_UNROLL, SAMPLE = 6, 8, 32


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
      kept: rounds, one or more, whose vectors stay in shared memory.
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
    def sample(self) -> int:
        """Pixels whose vectors are kept."""
        return min(self.kept * self.step, self.pixels)

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

    @property
    def pitch(self) -> int:
        """Floats from one column's sums to the next one's: an odd number, so that lanes store to different banks."""
        return self.summands | 1

    def data(self, arrays: int) -> int:
        """Bytes of shared memory for the vectors of so many arrays."""
        return arrays * min(self.kept, self.rounds) * self.threads * VECTOR_BYTES

    def quantities(self, arrays: int) -> int:
        """How many sums of a group the kernel takes: forward in two turns, backward in one."""
        return 3 if arrays == 1 or self.dtype == "f32" else 2

    def exchanged(self, arrays: int) -> int:
        """Floats of shared memory in which a cluster's blocks leave their sums of groups, to 16 bytes."""
        return -(-self.quantities(arrays) * self.cluster * self.groups // 4) * 4

    def floats(self, arrays: int) -> int:
        """Floats of a block's shared memory: vectors, what blocks exchange, threads' sums, and those of channels."""
        cells, at_once = (self.cells, 2) if arrays == 1 else (self.elements, self.quantities(arrays))
        return self.data(arrays) // 4 + self.exchanged(arrays) + at_once * self.columns * cells * (self.pitch + 1)


Fit = Callable[[ImagePlan, int, int], ImagePlan | None]  # a plan, the arrays, the room: the plan that fits


def plan(pixels: int, channels: int, group: int, dtype: str, out_dtype: str, arrays: int) -> ImagePlan | None:
    """How an image of so many pixels and channels is dealt out, of which so many arrays are kept; None if it cannot."""
    elements = VECTOR_BYTES // SIZES[dtype]
    least = math.lcm(group, elements)
    if channels % elements:
        return None

    def dealt(part_bytes: int, cluster: int) -> ImagePlan | None:
        count = channels // least
        enough = (d for d in range(1, count + 1) if count % d == 0 and least * d * SIZES[dtype] >= part_bytes)
        part = least * next(enough, count)
        if part // elements > THREADS:
            return None
        threads = 128 if pixels * part <= 8 * 128 * elements else 256
        while threads < part // elements:
            threads *= 2
        return ImagePlan(pixels, channels, group, dtype, out_dtype, part, threads, cluster, ALL)

    def first(tries: Sequence[tuple[int, int]], clusters: Sequence[int], fit: Fit) -> ImagePlan | None:
        for (part_bytes, room), cluster in itertools.product(tries, clusters):
            found = dealt(part_bytes, cluster)
            if found is not None and (found := fit(found, arrays, room)) is not None:
                return found
        return None

    return (
        first(PREFERRED, CLUSTERS, _kept)
        or first([t for t in PREFERRED if t[1] == HALF], CLUSTERS[-1:], _streamed)
        or first(NARROW, CLUSTERS, _kept)
        or first((*PREFERRED, *NARROW), CLUSTERS[::-1], _streamed)
    )


def _kept(found: ImagePlan, arrays: int, room: int) -> ImagePlan | None:
    """The plan itself, if there is room."""
    return found if 4 * found.floats(arrays) <= room else None


def _streamed(found: ImagePlan, arrays: int, room: int) -> ImagePlan | None:
    """The plan with as many rounds kept as it should have; None if there is no room for one."""
    left = room - 4 * dataclasses.replace(found, kept=0).floats(arrays)
    most = left // (arrays * found.threads * VECTOR_BYTES)
    sample = found.rounds // SAMPLE if arrays == 1 else 0
    kept = min(most, max(STREAMED_KEPT // arrays, sample))
    return dataclasses.replace(found, kept=kept, unroll=STREAMED_UNROLL) if kept > 0 else None
