"""How the kernels of group and instance normalisation partition an image over clusters, blocks and threads."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from jaxdnn._src.hopper import CLUSTERS_AT_ONCE
from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES

THREADS = 1024  # of a block, at most
CLUSTERS = (1, 2, 4, 8)  # blocks of a cluster; 8 is the portable maximum
ALL = 1 << 30  # more rounds than any plan has
# Bytes of shared memory for a block where two blocks share a multiprocessor, and where one has it alone.
HALF, WHOLE = 110 << 10, 226 << 10
IN_TURN = 6  # the fewest parts of images that a cluster processes one after another, if its blocks do not share
BARRIERS = 16  # bytes of a cluster's mbarriers
SECTOR = 32  # the smallest number of bytes that the caches move
# The fewest bytes of a pixel for a cluster, and the memory of its blocks, the fastest pair first: a line of the cache,
# and two blocks a multiprocessor. If the whole image is kept in shared memory, the smallest cluster is chosen.
PREFERRED = ((128, HALF), (64, HALF), (128, WHOLE), (64, WHOLE), (32, HALF), (32, WHOLE))
NARROW = ((16, HALF), (16, WHOLE))  # slower than reading an image twice
# An image that shared memory does not hold, or backward only in narrow parts, is processed by two kernels, in slices of
# equal size. The least and the most slices for the statistics (the fewest are chosen that shared memory holds) and for
# the results, and the bytes of shared memory of a block for a slice of the results.
MERGED, APPLIED, SLICE = (32, 128), (64, 4096), 54 << 10
# If there are no such slices, one kernel reads the image twice. It keeps few rounds, so that more blocks share a
# multiprocessor and more loads are in flight. Forward what it keeps is the sample: at least a 32nd of the image.
STREAMED_KEPT, STREAMED_UNROLL, SAMPLE = 6, 8, 32
SAMPLED = 8  # from so many rounds on, a quarter of them is the sample


@dataclasses.dataclass(frozen=True)
class ImagePlan:
    """How an image is partitioned; `group_vectors` has the terms.

    Attributes:
      pixels, channels: of an image.
      group: channels of a group.
      dtype, out_dtype: "bf16", "f16" or "f32".
      part: channels that a cluster processes: a divisor of `channels`, a multiple of `group` and of `elements`.
      threads: of a block; not fewer than a part of a pixel has vectors.
      cluster: blocks of a cluster: 1, 2, 4 or 8.
      kept: rounds, one or more, whose vectors stay in shared memory.
      unroll: rounds whose vectors are loaded before the first is used.
      sampled: rounds of the forward sample, the mean of which is subtracted first; at most those that are kept.
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
        """Channels of a vector."""
        return VECTOR_BYTES // SIZES[self.dtype]

    @property
    def columns(self) -> int:
        """Vectors of a pixel in a part."""
        return self.part // self.elements

    @property
    def rows(self) -> int:
        """Pixels that a block processes at a time."""
        return self.threads // self.columns

    @property
    def step(self) -> int:
        """Pixels that a cluster processes at a time."""
        return self.rows * self.cluster

    @property
    def full(self) -> int:
        """Rounds in which every thread with a row has a pixel."""
        return self.pixels // self.step

    @property
    def rounds(self) -> int:
        return -(-self.pixels // self.step)

    @property
    def stays(self) -> bool:
        """Whether shared memory holds the whole image."""
        return self.kept >= self.rounds

    @property
    def sample(self) -> int:
        """Pixels of the sample."""
        return min(self.kept * self.step, self.sampled * self.step, self.pixels)

    @property
    def parts(self) -> int:
        """Parts of a pixel."""
        return self.channels // self.part

    @property
    def groups(self) -> int:
        """Groups of a part."""
        return self.part // self.group

    @property
    def offsets(self) -> list[int]:
        """The number of each column's first channel within its group."""
        return [column * self.elements % self.group for column in range(self.columns)]

    @property
    def cells(self) -> int:
        """The most groups that the channels of one vector belong to (`group_cells`)."""
        return (max(self.offsets) + self.elements - 1) // self.group + 1

    @property
    def spans(self) -> list[int]:
        """The number of columns that have channels of a group, for each group of the part."""
        starts = range(0, self.part, self.group)
        return [(start + self.group - 1) // self.elements - start // self.elements + 1 for start in starts]

    @property
    def folds(self) -> bool:
        """Whether a warp has whole rows, so that its rows are added by exchanges between lanes first."""
        return self.columns in (1, 2, 4, 8, 16)

    @property
    def summands(self) -> int:
        """Sums of one column that a block adds in shared memory."""
        return self.threads // 32 if self.folds else self.rows

    @property
    def pitches(self) -> tuple[int, int]:
        """Floats from the sums of one channel, or of one group, to the next; odd, against bank conflicts."""
        return self.summands | 1, max(self.spans) * self.summands | 1

    def data(self, arrays: int) -> int:
        """Bytes of shared memory for the vectors of so many arrays."""
        return arrays * min(self.kept, self.rounds) * self.threads * VECTOR_BYTES

    def quantities(self, arrays: int) -> int:
        """Sums of a group that blocks exchange: forward in two exchanges, backward in one."""
        return 3 if arrays == 1 or self.dtype == "f32" else 2

    def exchanged(self, arrays: int, in_turn: bool = False) -> int:
        """Floats of shared memory for the blocks' exchanges and their mbarriers (`group_exchange`)."""
        places = 2 if in_turn and arrays == 2 else 1
        return -(-places * self.quantities(arrays) * self.cluster * self.groups // 4) * 4 + BARRIERS // 4

    def floats(self, arrays: int, in_turn: bool = False) -> int:
        """Floats of a block's shared memory: vectors, exchanges, the threads' sums, and sums of channels."""
        of_channel, of_group = self.pitches
        sums = 2 * self.groups * of_group
        if arrays > 1:
            sums = self.quantities(arrays) * self.part * (of_channel + 1)
        return self.data(arrays) // 4 + self.exchanged(arrays, in_turn) + sums

    def workspace(self, images: int, arrays: int) -> int:
        """Bytes of the blocks' sums for the gradients of scale and bias."""
        return 8 * images * self.cluster * self.channels if arrays == 2 else 0

    def turns(self, images: int, arrays: int) -> int:
        """How many clusters there are if each processes several parts, one after another; 0 if each processes one.

        Several are faster where a block has its multiprocessor alone, so that no other block loads while it adds and
        stores; where two blocks share one, forward, in clusters of 8, if 16-bit vectors straddle groups.
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
    """How an image is partitioned into slices: those whose statistics are merged, and those of the results."""

    pixels: int
    statistics: ImagePlan
    applied: ImagePlan

    def workspace(self, images: int, arrays: int) -> int:
        """Bytes that the first kernel stores: sums of groups, and the blocks' for the gradients of scale and bias."""
        first = self.statistics
        slices = images * (self.pixels // first.pixels)
        sums = 4 * first.quantities(arrays) * slices * first.channels // first.group
        return sums + first.workspace(slices, arrays)


Fit = Callable[[ImagePlan, int, int], ImagePlan | None]  # a plan, the arrays, bytes for a block: the plan that fits


def plan(pixels: int, channels: int, group: int, dtype: str, out_dtype: str, arrays: int) -> ImagePlan | None:
    """How one kernel processes an image, of which `arrays` arrays go through shared memory; None if it cannot."""
    elements = VECTOR_BYTES // SIZES[dtype]
    least = math.lcm(group, elements)
    if channels % elements:
        return None

    def partition(part_bytes: int, cluster: int, sectors: bool) -> ImagePlan | None:
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
            found = partition(part_bytes, cluster, sectors)
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
    """The plan with the whole image kept, or None if it does not fit.

    Forward the sample is a quarter of the rounds, so that adding up the others starts before all have been copied.
    """
    if 4 * found.floats(arrays, in_turn=room == WHOLE) > room:
        return None
    return dataclasses.replace(found, sampled=found.rounds // 4) if arrays == 1 and found.rounds >= SAMPLED else found


def _streamed(found: ImagePlan, arrays: int, room: int) -> ImagePlan | None:
    """The plan with a few rounds kept and the others read twice; None if there is no memory for one round."""
    left = room - 4 * dataclasses.replace(found, kept=0).floats(arrays)
    most = left // (arrays * found.threads * VECTOR_BYTES)
    sample = found.rounds // SAMPLE if arrays == 1 else 0
    kept = min(most, max(STREAMED_KEPT // arrays, sample))
    return dataclasses.replace(found, kept=kept, unroll=STREAMED_UNROLL) if kept > 0 else None


def in_slices(pixels: int, channels: int, group: int, dtype: str, out_dtype: str, arrays: int) -> SlicePlan | None:
    """How two kernels process an image in slices that shared memory holds; None if the pixels have no such divisor."""

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
    """The plan of an image that shared memory holds; else that of its slices; else one that reads twice; else None.

    Backward, slices are also faster than parts as narrow as a sector whose blocks have a multiprocessor alone.
    """
    shape = pixels, channels, group, dtype, out_dtype, arrays
    found = plan(*shape)
    if found is None:
        return None
    narrow = arrays == 2 and found.part * SIZES[dtype] <= SECTOR and 4 * found.floats(arrays) > HALF
    return found if found.stays and not narrow else in_slices(*shape) or found
