"""How a thread of the kernels for images comes by its vectors: copied into shared memory, and read from there.

An image is (pixels, channels), a pixel's channels one after the other. A cluster of blocks works on one image and on a
part of its channels, a whole number of groups. A vector is 16 bytes of a pixel's channels in the part. A thread has one
column of vectors, so that it keeps the sums and parameters of its channels in registers, and of all pixels those of its
row: pixel p belongs to block p div R mod K of the K blocks of the cluster and to row p mod R of the R rows of threads
of that block. A step of the cluster is K R pixels, and a round of a thread is its vector of one step.

A thread copies its vectors into shared memory asynchronously, all before the first use, and reads them from there as
often as it takes. Rounds for which there is no room there, the later ones, are read from device memory each time.

A cluster has one part of an image, or several in turn: then the copies of the next one's vectors start, each as soon
as the thread has read the vector in whose place it comes for the last time, while the results are being written.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES, Emitter
from jaxdnn._src.norm.hopper.group_plan import ImagePlan

_CHUNKS = 4  # in which a thread waits for its copies
_UNROLLED = 8  # rounds that are written out; more of them are a loop

Words = dict[str, list[str]]
Body = Callable[[Words, str, int], None]  # the words of a vector of each array; its round, as a register and a number


class Walk:
    """What the kernels share. `operands` names the addresses $0, $1, ...; shared memory's is the last.

    A cluster has one part of an image, or each `clusters`-th of those of the `images`; or, if there are as many as
    `reverse`, the first cluster has the last one, and so on.
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
        self.mine = ""  # whether the thread has a row
        if plan.rows * plan.columns < plan.threads:
            self.mine = e.p("setp.lt.s32", self.thread, plan.rows * plan.columns)
        self.last = ""  # whether it has a vector in the last, ragged round
        if plan.rounds > plan.full:
            self.last = e.p("setp.lt.s32", self.pixel, plan.pixels - plan.full * plan.step)
        self.slot = e.scaled(self.thread, VECTOR_BYTES, self.shared)
        self.kept = min(plan.kept, plan.rounds)
        self.area = plan.data(len(self.arrays))  # where the sums start
        if reverse:
            self.unit = e.r("sub.s32", reverse - 1, self.unit)
        self.image, self.place, self.channel, self.source = self._found(self.unit)
        self.following: dict[str, str] = {}  # where the next part's vectors lie
        self.more = ""  # whether there is one

    def divided(self, value: str, by: int) -> tuple[str, str]:
        """The quotient and the remainder."""
        e = self.e
        if by == 1:
            return value, e.r("mov.b32", 0)
        if by & (by - 1) == 0:
            return e.r("shr.u32", value, by.bit_length() - 1), e.r("and.b32", value, by - 1)
        quotient = e.r("div.u32", value, by)
        return quotient, e.r("mad.lo.s32", quotient, -by, value)

    def _found(self, unit: str) -> tuple[str, str, str, dict[str, str]]:
        """A part's image, its place in there, the thread's first channel, and where its vectors lie."""
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
        """Where the thread's first vector lies, of an array with elements of `size` bytes."""
        return self._vectors(name, size, self.image, self.channel)

    @contextlib.contextmanager
    def where(self, predicate: str) -> Iterator[None]:
        """What is emitted inside is done by threads for which the predicate holds, or by all if it is ""."""
        if not predicate:
            yield
            return
        end = self.e.label()
        self.e.op("bra", end, when="!" + predicate)
        yield
        self.e.place(end)

    @contextlib.contextmanager
    def each_part(self) -> Iterator[None]:
        """What is emitted inside is done for each part that the cluster has; the first is being copied."""
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
        """Starts the copies into shared memory, in sets (`chunks`) to be waited for one after the other."""
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
        """The rounds that are waited for together: first those whose mean is taken, if these are not all."""
        sampled = self.plan.sampled
        if sampled >= self.kept:
            return list(itertools.pairwise(self.kept * i // _CHUNKS for i in range(_CHUNKS + 1)))
        rest, count = self.kept - sampled, _CHUNKS - 1
        return [(0, sampled), *itertools.pairwise(sampled + rest * i // count for i in range(count + 1))]

    def _stride(self, size: int) -> int:
        """Bytes from a vector of the thread to that of the next round."""
        return self.plan.step * self.plan.channels * size

    def walk(self, body: Body, *, arrived: int = 0, sample_only: bool = False, refill: bool = False) -> None:
        """Calls `body` for the thread's vectors in order; `arrived`: how many sets of copies were waited for.

        `sample_only`: for those from whose mean is measured. `refill`: for the last time, so that the next part's
        vectors may come.
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
        stride, found = self.plan.threads * VECTOR_BYTES, {}
        slot = self.e.scaled(index, stride, self.slot) if index else self.slot
        for i, name in enumerate(self.arrays):
            found[name] = [self.e.new() for _ in range(4)]
            registers = "{" + ", ".join(found[name]) + "}"
            self.e.op("ld.shared.v4.b32", registers, f"[{slot}+{(i * self.kept + number) * stride}]")
        return found

    def _from_global(self, index: str, number: int) -> Words:
        stride, found = self._stride(SIZES[self.plan.dtype]), {}
        for name in self.arrays:
            source = self.source[name]
            source = self.e.d("mad.wide.u32", index, stride, source) if index else source
            found[name] = [self.e.new() for _ in range(4)]
            registers = "{" + ", ".join(found[name]) + "}"
            self.e.op("ld.global.nc.v4.b32", registers, f"[{source}+{number * stride}]")
        return found

    def unpack(self, words: Sequence[str]) -> list[str]:
        """The elements of a vector in float32."""
        return self.e.unpack(self.plan.dtype, words)

    def store(self, target: str, index: str, number: int, values: Sequence[str]) -> None:
        """Rounds a vector of results and writes it."""
        e, plan = self.e, self.plan
        stride = self._stride(SIZES[plan.out_dtype])
        target = e.d("mad.wide.u32", index, stride, target) if index else target
        words, start = e.pack(plan.out_dtype, values), number * stride
        while words:  # of 8, 16 or 32 bytes
            part, words = words[:4], words[4:]
            e.op(f"st.global.v{len(part)}.b32", f"[{target}+{start}]", "{" + ", ".join(part) + "}")
            start += 4 * len(part)
