"""How the kernels of group and instance normalisation deal an image out to blocks and threads."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from jaxdnn._src.hopper import CLUSTERS_AT_ONCE
from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES

THREADS = 1024  # of a block, at most
CLUSTERS = (1, 2, 4, 8)  # blocks of a cluster; any device has 8
ALL = 1 << 30  # rounds: none has so many
# Bytes of shared memory that a block may have where two, or one, share a multiprocessor, less what else it needs.
HALF, WHOLE = 110 << 10, 226 << 10
IN_TURN = 6  # parts of images that a cluster has in turn at least, where there are enough and a block is alone
BARRIERS = 16  # bytes of a cluster's
SECTOR = 32  # bytes that the caches move at least
# At least so many bytes of a pixel for a cluster, in so much memory of a block, the fastest first: a line of the cache,
# two blocks a multiprocessor. Of a plan in which all is kept the smallest cluster is taken.
PREFERRED = ((128, HALF), (64, HALF), (128, WHOLE), (64, WHOLE), (32, HALF), (32, WHOLE))
NARROW = ((16, HALF), (16, WHOLE))  # slower than to read twice
# An image that does not stay, or backward in narrow parts alone, is dealt out to two kernels, if its pixels have
# divisors: so many slices of it, the fewest that stay, whose statistics are merged, and so many that are written, of a
# block with so much memory.
MERGED, APPLIED, SLICE = (32, 128), (64, 4096), 54 << 10
# Else one kernel reads it twice: with little of it kept more blocks share a multiprocessor, and have more bytes under
# way. Forward what is kept is the sample from whose mean is measured: a 32nd at least.
STREAMED_KEPT, STREAMED_UNROLL, SAMPLE = 6, 8, 32
SAMPLED = 8  # rounds from which on a quarter is the sample


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
      sampled: rounds, all that are kept at most, from whose mean forward is measured.
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
    sampled: int = ALL

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
    def stays(self) -> bool:
        """Whether all of an image is kept."""
        return self.kept >= self.rounds

    @property
    def sample(self) -> int:
        """Pixels from whose mean is measured."""
        return min(self.kept * self.step, self.sampled * self.step, self.pixels)

    @property
    def parts(self) -> int:
        """Of a pixel."""
        return self.channels // self.part

    @property
    def groups(self) -> int:
        """Of a part."""
        return self.part // self.group

    @property
    def offsets(self) -> list[int]:
        """Of each column, the number of its first channel within a group."""
        return [column * self.elements % self.group for column in range(self.columns)]

    @property
    def cells(self) -> int:
        """Of how many groups a vector has channels, at most."""
        return (max(self.offsets) + self.elements - 1) // self.group + 1

    @property
    def spans(self) -> list[int]:
        """Of each group of the part, how many columns have channels."""
        starts = range(0, self.part, self.group)
        return [(start + self.group - 1) // self.elements - start // self.elements + 1 for start in starts]

    @property
    def folds(self) -> bool:
        """Whether a warp has whole rows, so that its lanes are added by exchange first."""
        return self.columns in (1, 2, 4, 8, 16)

    @property
    def summands(self) -> int:
        """Sums of one column that a block has to add."""
        return self.threads // 32 if self.folds else self.rows

    @property
    def pitches(self) -> tuple[int, int]:
        """Floats from the sums of one channel, or group, to the next one's: odd, so that lanes store to other banks."""
        return self.summands | 1, max(self.spans) * self.summands | 1

    def data(self, arrays: int) -> int:
        """Bytes of shared memory for the vectors of so many arrays."""
        return arrays * min(self.kept, self.rounds) * self.threads * VECTOR_BYTES

    def quantities(self, arrays: int) -> int:
        """How many sums of a group the kernel takes: forward in two turns, backward in one."""
        return 3 if arrays == 1 or self.dtype == "f32" else 2

    def exchanged(self, arrays: int, in_turn: bool = False) -> int:
        """Floats of shared memory in which a cluster's blocks leave their sums of groups, and for their barriers."""
        places = 2 if in_turn and arrays == 2 else 1
        return -(-places * self.quantities(arrays) * self.cluster * self.groups // 4) * 4 + BARRIERS // 4

    def floats(self, arrays: int, in_turn: bool = False) -> int:
        """Floats of a block's shared memory: vectors, what blocks exchange, threads' sums, and those of channels."""
        of_channel, of_group = self.pitches
        sums = 2 * self.groups * of_group
        if arrays > 1:
            sums = self.quantities(arrays) * self.part * (of_channel + 1)
        return self.data(arrays) // 4 + self.exchanged(arrays, in_turn) + sums

    def workspace(self, images: int, arrays: int) -> int:
        """Bytes of the blocks' sums for the gradients in scale and bias."""
        return 8 * images * self.cluster * self.channels if arrays == 2 else 0

    def turns(self, images: int, arrays: int) -> int:
        """How many clusters there are if each has several parts of images in turn; 0 if each has one.

        That pays where no other block on the multiprocessor loads while one adds up and stores; and, of those where
        two share one, forward for clusters of 8 whose vectors of 16 bits fall across groups.
        """
        alone = 4 * self.floats(arrays) > HALF
        across = self.group % self.elements != 0 and self.elements % self.group != 0
        shared = arrays == 1 and across and self.cluster == 8 and self.dtype != "f32"
        at_once, parts = CLUSTERS_AT_ONCE[self.cluster] * (1 if alone else 2), images * self.parts
        if not (alone or shared) or not self.stays or parts <= at_once:
            return 0
        return at_once * (max(1, parts // (IN_TURN * at_once)) if alone else 1)


@dataclasses.dataclass(frozen=True)
class SlicePlan:
    """How the slices of an image of so many pixels are dealt out: those that are merged, and those that are written."""

    pixels: int
    statistics: ImagePlan
    applied: ImagePlan

    def workspace(self, images: int, arrays: int) -> int:
        """Bytes that the first kernel leaves: sums of groups, and the blocks' for the gradients in scale and bias."""
        first = self.statistics
        slices = images * (self.pixels // first.pixels)
        sums = 4 * first.quantities(arrays) * slices * first.channels // first.group
        return sums + first.workspace(slices, arrays)


Fit = Callable[[ImagePlan, int, int], ImagePlan | None]  # a plan, the arrays, the room: the plan that fits


def plan(pixels: int, channels: int, group: int, dtype: str, out_dtype: str, arrays: int) -> ImagePlan | None:
    """How an image of so many pixels and channels is dealt out, of which so many arrays are kept; None if it cannot."""
    elements = VECTOR_BYTES // SIZES[dtype]
    least = math.lcm(group, elements)
    if channels % elements:
        return None

    def dealt(part_bytes: int, cluster: int, sectors: bool) -> ImagePlan | None:
        count, sector = channels // least, SECTOR if sectors else 1
        sizes = ((d, least * d * SIZES[dtype]) for d in range(1, count + 1) if count % d == 0)
        part = least * next((d for d, size in sizes if size >= part_bytes and size % sector == 0), count)
        if part // elements > THREADS:
            return None
        threads = 128 if pixels * part <= 8 * 128 * elements else 256
        while threads < part // elements:
            threads *= 2
        return ImagePlan(pixels, channels, group, dtype, out_dtype, part, threads, cluster, ALL)

    def first(
        tries: Sequence[tuple[int, int]], clusters: Sequence[int], fit: Fit, sectors: bool = True
    ) -> ImagePlan | None:
        for (part_bytes, room), cluster in itertools.product(tries, clusters):
            found = dealt(part_bytes, cluster, sectors)
            if found is not None and (found := fit(found, arrays, room)) is not None:
                return found
        return None

    return (
        first(PREFERRED, CLUSTERS, _kept)
        or first(PREFERRED, CLUSTERS, _kept, sectors=False)
        or first([t for t in PREFERRED if t[1] == HALF], CLUSTERS[-1:], _streamed)
        or first(NARROW, CLUSTERS, _kept, sectors=False)
        or first((*PREFERRED, *NARROW), CLUSTERS[::-1], _streamed, sectors=False)
    )


def _kept(found: ImagePlan, arrays: int, room: int) -> ImagePlan | None:
    """The plan itself, if there is room; forward the sample is a quarter, so that the sums of the others can begin."""
    if 4 * found.floats(arrays, in_turn=room == WHOLE) > room:
        return None
    return dataclasses.replace(found, sampled=found.rounds // 4) if arrays == 1 and found.rounds >= SAMPLED else found


def _streamed(found: ImagePlan, arrays: int, room: int) -> ImagePlan | None:
    """The plan with as many rounds kept as it should have; None if there is no room for one."""
    left = room - 4 * dataclasses.replace(found, kept=0).floats(arrays)
    most = left // (arrays * found.threads * VECTOR_BYTES)
    sample = found.rounds // SAMPLE if arrays == 1 else 0
    kept = min(most, max(STREAMED_KEPT // arrays, sample))
    return dataclasses.replace(found, kept=kept, unroll=STREAMED_UNROLL) if kept > 0 else None


def in_slices(pixels: int, channels: int, group: int, dtype: str, out_dtype: str, arrays: int) -> SlicePlan | None:
    """How an image is dealt out to two kernels, whose every slice stays; None if its pixels have no such divisor."""

    def first(counts: tuple[int, int], room: int, clusters: Sequence[int]) -> ImagePlan | None:
        for count in range(counts[0], min(counts[1], pixels) + 1):
            found = None if pixels % count else plan(pixels // count, channels, group, dtype, out_dtype, arrays)
            if found is None or not found.stays:
                continue
            if found.cluster in clusters and 4 * found.floats(arrays) <= room:
                return found
        return None

    statistics, applied = first(MERGED, HALF, CLUSTERS), first(APPLIED, SLICE, (1,))
    return SlicePlan(pixels, statistics, applied) if statistics and applied else None


def best(
    pixels: int, channels: int, group: int, dtype: str, out_dtype: str, arrays: int
) -> ImagePlan | SlicePlan | None:
    """That of an image that stays, else that of its slices, else that of one that a kernel reads twice, or None.

    Backward slices are faster than parts of a sector's width for which blocks have a multiprocessor alone.
    """
    shape = pixels, channels, group, dtype, out_dtype, arrays
    found = plan(*shape)
    if found is None:
        return None
    narrow = arrays == 2 and found.part * SIZES[dtype] <= SECTOR and 4 * found.floats(arrays) > HALF
    return found if found.stays and not narrow else in_slices(*shape) or found
