"""The vectors of a thread in the kernels for images: copies into shared memory, and loads from there.

An image is (pixels, channels); the channels of a pixel are contiguous. A cluster of K blocks processes one image, and
of its channels one part, which is a whole number of groups. A vector is 16 bytes of the part's channels of one pixel.
The threads of a block form R rows, one column for each vector of a pixel. A thread keeps its column for all pixels, so
that the sums and the parameters of its channels stay in registers. Pixel p belongs to row p mod R of block
(p div R) mod K. The cluster processes K R pixels in a step; a round of a thread is its vector of one step.

A thread starts the asynchronous copies of its vectors into shared memory before it uses the first of them, and loads
them from there as often as it needs them. Shared memory may not hold all rounds: the vectors of the others, which are
the last ones, are loaded from device memory each time.

A cluster processes one part of an image, or several, one after another. In the second case the copies for the next part
start while the results are written: each as soon as the thread has read, for the last time, the vector that the copy
overwrites.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES, Emitter
from jaxdnn._src.norm.hopper.group_plan import ImagePlan

_CHUNKS = 4  # groups of copies that a thread waits for one after another
_UNROLLED = 8  # more rounds than this are a loop in the emitted text

Words = dict[str, list[str]]
# Takes the words of a vector of each array, and its round: a register ("" for 0) plus a constant.
Body = Callable[[Words, str, int], None]


class Vectors:
    """The vectors of a thread, of each of the `arrays`.

    `operands` names the addresses $0, $1, ...; the operand after them is the address of shared memory. Without
    `clusters` a cluster processes the one part whose number is the cluster's (with `reverse`, the number of all parts,
    the first cluster processes the last part). With `clusters`, the number of all clusters, it processes every
    `clusters`-th part of the `images`.
    """

    def __init__(
        self,
        plan: ImagePlan,
        operands: Sequence[str],
        arrays: Sequence[str],
        images: int = 0,
        clusters: int = 0,
        reverse: int = 0,
    ) -> None:
        self.plan, self.arrays, self.e = plan, list(arrays), Emitter()
        self.units, self.clusters = images * plan.parts, clusters
        e = self.e
        self.base = {name: e.d("mov.b64", f"${i}") for i, name in enumerate(operands)}
        self.shared = e.r("mov.b32", f"${len(operands)}")
        self.thread = e.r("mov.u32", "%tid.x")
        self.lane, self.warp = e.r("and.b32", self.thread, 31), e.r("shr.u32", self.thread, 5)
        self.rank = e.r("mov.u32", "%cluster_ctarank") if plan.cluster > 1 else e.r("mov.b32", 0)
        self.unit = e.r("mov.u32", "%clusterid.x" if plan.cluster > 1 else "%ctaid.x")
        self.row, self.column = self.divided(self.thread, plan.columns)
        self.pixel = e.r("mad.lo.s32", self.rank, plan.rows, self.row)
        self.mine = ""  # whether the thread has a row; "" where all have
        if plan.rows * plan.columns < plan.threads:
            self.mine = e.p("setp.lt.s32", self.thread, plan.rows * plan.columns)
        self.last = ""  # whether the thread has a vector in a last round that not all have
        if plan.rounds > plan.full:
            self.last = e.p("setp.lt.s32", self.pixel, plan.pixels - plan.full * plan.step)
        self.slot = e.scaled(self.thread, VECTOR_BYTES, self.shared)
        self.kept = min(plan.kept, plan.rounds)
        self.area = plan.data(len(self.arrays))  # offset of the memory for sums, which follows the vectors
        if reverse:
            self.unit = e.r("sub.s32", reverse - 1, self.unit)
        self.image, self.place, self.channel, self.source = self._found(self.unit)
        self.following: dict[str, str] = {}  # the addresses of the next part's vectors
        self.more = ""  # whether there is a next part

    def divided(self, value: str, by: int) -> tuple[str, str]:
        """The quotient and the remainder of an unsigned number."""
        e = self.e
        if by == 1:
            return value, e.r("mov.b32", 0)
        if by & (by - 1) == 0:
            return e.r("shr.u32", value, by.bit_length() - 1), e.r("and.b32", value, by - 1)
        quotient = e.r("div.u32", value, by)
        return quotient, e.r("mad.lo.s32", quotient, -by, value)

    def _found(self, unit: str) -> tuple[str, str, str, dict[str, str]]:
        """A part's image, its number in the image, the thread's first channel, and the addresses of its vectors."""
        e, plan = self.e, self.plan
        image, place = self.divided(unit, plan.parts)
        channel = e.r("mad.lo.s32", place, plan.part, e.r("mul.lo.s32", self.column, plan.elements))
        source = {name: self._vectors(name, SIZES[plan.dtype], image, channel) for name in self.arrays}
        return image, place, channel, source

    def _vectors(self, name: str, size: int, image: str, channel: str) -> str:
        e, plan = self.e, self.plan
        first = e.r("mad.lo.s32", self.pixel, plan.channels, channel)
        start = e.d("mad.wide.u32", image, plan.pixels * plan.channels * size, self.base[name])
        return e.d("mad.wide.u32", first, size, start)

    def address(self, name: str, size: int) -> str:
        """The address of the thread's first vector in an array with elements of `size` bytes."""
        return self._vectors(name, size, self.image, self.channel)

    def parameter(self, name: str) -> list[str]:
        """The scale or bias of the thread's channels."""
        here = self.e.d("mad.wide.u32", self.channel, 4, self.base[name])
        places = (f"[{here}+{4 * start}]" for start in range(0, self.plan.elements, 4))
        return [value for place in places for value in self.e.load_floats("global.nc", place, 4)]

    @contextlib.contextmanager
    def where(self, predicate: str) -> Iterator[None]:
        """The threads for which the predicate holds execute what is emitted inside; all threads do if it is ""."""
        if not predicate:
            yield
            return
        end = self.e.label()
        self.e.op("bra", end, when="!" + predicate)
        yield
        self.e.place(end)

    @contextlib.contextmanager
    def each_part(self) -> Iterator[None]:
        """A loop over the cluster's parts; `copy` has started the copies of the first one."""
        if not self.clusters:
            yield
            return
        e, head = self.e, self.e.label()
        e.place(head)
        following = e.r("add.s32", self.unit, self.clusters)
        self.more = e.p("setp.lt.s32", following, self.units)
        image, place, channel, self.following = self._found(following)
        yield
        for old, new in ((self.unit, following), (self.place, place), (self.channel, channel)):
            e.op("mov.b32", old, new)
        if self.image != self.unit:
            e.op("mov.b32", self.image, image)
        for name, here in self.source.items():
            e.op("mov.b64", here, self.following[name])
        e.op("bra", head, when=self.more)

    # ---- the thread's vectors ----------------------------------------------------------------------------------------

    def copy(self) -> None:
        """Starts the copies into shared memory, in the groups `chunks`, which are waited for one after another."""
        with self.where(self.mine):
            for first, last in self.chunks:
                for k in range(first, last):
                    self._copy(self.source, "", k, self.last if k >= self.plan.full else "")
                self.e.op("cp.async.commit_group")

    def _copy(self, source: dict[str, str], index: str, k: int, guard: str) -> None:
        e, stride, size = self.e, self._stride(SIZES[self.plan.dtype]), self.plan.threads * VECTOR_BYTES
        slot = e.scaled(index, size, self.slot) if index else self.slot
        for number, name in enumerate(self.arrays):
            here = e.d("mad.wide.u32", index, stride, source[name]) if index else source[name]
            to = f"[{slot}+{(number * self.kept + k) * size}]"
            e.op("cp.async.cg.shared.global", to, f"[{here}+{k * stride}]", 16, when=guard)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The rounds that are waited for together. If the sample is not all of them, it is the first group."""
        sampled = self.plan.sampled
        if sampled >= self.kept:
            return list(itertools.pairwise(self.kept * i // _CHUNKS for i in range(_CHUNKS + 1)))
        rest, count = self.kept - sampled, _CHUNKS - 1
        return [(0, sampled), *itertools.pairwise(sampled + rest * i // count for i in range(count + 1))]

    def _stride(self, size: int) -> int:
        """Bytes from a vector of the thread to its vector of the next round."""
        return self.plan.step * self.plan.channels * size

    def for_each(self, body: Body, *, arrived: int = 0, sample_only: bool = False, refill: bool = False) -> None:
        """Emits `body` for the thread's vectors in order. `arrived` groups of copies have been waited for before.

        sample_only: for the vectors of the sample alone.
        refill: nothing reads the vectors after this, and so the copies of the next part's vectors start.
        """
        plan, chunks = self.plan, self.chunks
        if sample_only and plan.sampled < self.kept:
            chunks = chunks[:1]
        with self.where(self.mine):
            for number, (first, last) in enumerate(chunks):
                if number >= arrived:
                    self.e.op("cp.async.wait_group", _CHUNKS - 1 - number)
                self._rounds(body, self._from_shared, first, min(last, plan.full), refill and bool(self.clusters))
                if first < last and last > plan.full:
                    self._last(body, self._from_shared, refill and bool(self.clusters))
                if refill and self.clusters:
                    self.e.op("cp.async.commit_group")
            if not sample_only:
                self._rounds(body, self._from_global, self.kept, plan.full)
                if self.kept <= plan.full < plan.rounds:
                    self._last(body, self._from_global)
        if self.mine or self.last:
            self.e.op("bar.warp.sync", "0xffffffff")

    def _rounds(
        self, body: Body, load: Callable[[str, int], Words], first: int, last: int, refill: bool = False
    ) -> None:
        unroll, e = self.plan.unroll, self.e

        def together(index: str, numbers: range) -> None:
            found = [load(index, number) for number in numbers]
            for number, words in zip(numbers, found, strict=True):
                if refill:
                    self._copy(self.following, index, number, self.more)
                body(words, index, number)

        if last - first > _UNROLLED:
            end = first + (last - first) // unroll * unroll
            with e.loop(first, end, unroll) as index:
                together(index, range(unroll))
            first = end
        for start in range(first, last, unroll):
            together("", range(start, min(start + unroll, last)))

    def _last(self, body: Body, load: Callable[[str, int], Words], refill: bool = False) -> None:
        with self.where(self.last):
            words = load("", self.plan.full)
            if refill:
                self._copy(self.following, "", self.plan.full, self.more)
            body(words, "", self.plan.full)

    def _from_shared(self, index: str, number: int) -> Words:
        stride = self.plan.threads * VECTOR_BYTES
        slot = self.e.scaled(index, stride, self.slot) if index else self.slot
        places = {name: f"[{slot}+{(i * self.kept + number) * stride}]" for i, name in enumerate(self.arrays)}
        return {name: self.e.load_vector("shared", place) for name, place in places.items()}

    def _from_global(self, index: str, number: int) -> Words:
        stride, found = self._stride(SIZES[self.plan.dtype]), {}
        for name in self.arrays:
            source = self.source[name]
            source = self.e.d("mad.wide.u32", index, stride, source) if index else source
            found[name] = self.e.load_vector("global.nc", f"[{source}+{number * stride}]")
        return found

    def unpack(self, words: Sequence[str]) -> list[str]:
        """The elements of a vector in float32."""
        return self.e.unpack(self.plan.dtype, words)

    def store(self, target: str, index: str, number: int, values: Sequence[str]) -> None:
        """Rounds a vector of results and writes it."""
        e, plan = self.e, self.plan
        stride = self._stride(SIZES[plan.out_dtype])
        target = e.d("mad.wide.u32", index, stride, target) if index else target
        e.store_words(target, number * stride, e.pack(plan.out_dtype, values))
