"""What the recurrent kernels share: where a thread stands, its part of the recurrent matrix, products, and exchanges.

A lane has the row `lane / 4` of each half of a tile, and of eight sequences those of numbers `2 (lane % 4)` and one
more. The units whose products one `mma` adds are those of four groups, half of each: so a lane's vector of 16 bytes, of
a row of the matrix or of a sequence's state, is eight units in their order, and serves two `mma`.

Blocks exchange vectors by asynchronous stores that count their bytes on an mbarrier of the receiver. There are two
buffers, for even and odd steps, each with an mbarrier, and no answer from the receiver: a warp stores into the buffer
of step s + 1 after it has received all of step s, which every warp of the cluster stored after its loads of step s - 1,
the last ones from that buffer, had given the sums that it stored.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from jaxdnn._src.hopper.curves_ptx import ZERO
from jaxdnn._src.hopper.ptx import Emitter
from jaxdnn._src.rnn.hopper.plan import COLUMNS, FLYING, LINE

VECTOR = 16


class Block:
    """The place of a thread, and of the block's buffers in shared memory: two of `size` bytes and their mbarriers."""

    def __init__(
        self, operands: Sequence[str], *, cluster: int, warps: int, threads: int, groups: int, size: int
    ) -> None:
        e = self.e = Emitter()
        self.cluster, self.warps, self.threads, self.groups, self.size = cluster, warps, threads, groups, size
        self.base = {name: e.d("mov.b64", f"${i}") for i, name in enumerate(operands)}
        self.shared = e.r("mov.b32", f"${len(operands)}")
        self.thread = e.r("mov.u32", "%tid.x")
        self.lane = e.r("and.b32", self.thread, 31)
        self.warp = e.r("shr.u32", self.thread, 5)
        self.rank = e.r("mov.u32", "%cluster_ctarank")
        self.row, self.quad = e.r("shr.u32", self.lane, 2), e.r("and.b32", self.lane, 3)
        self.first = e.p("setp.eq.u32", self.thread, 0)
        self.barriers = e.r("add.s32", self.shared, 2 * size)

    def make_barriers(self, phases: int) -> None:
        """Initialises the mbarriers, for as many transfers, the first into the second buffer."""
        e = self.e
        e.make_barriers(self.barriers, [1, 1], self.first)
        e.barriers_made()
        for i in (1, 0)[:phases]:
            e.expect(e.r("add.s32", self.barriers, 8 * i), self.size, self.first)


class Turn:
    """The buffers of a step: its own, at `here`, which holds what the step before has sent, and the other one."""

    def __init__(self, k: Block, step: str) -> None:
        e = k.e
        self.k, self.step = k, step
        odd = self.odd = e.r("and.b32", step, 1)
        self.here = e.scaled(odd, k.size, k.shared)
        self.barrier = e.scaled(odd, 8, k.barriers)
        other = e.r("xor.b32", odd, 1)
        self.other, self.other_barrier = e.scaled(other, k.size, 0), e.scaled(other, 8, 0)

    def receive(self, steps: int) -> None:
        """Waits for what the step before has sent; the first thread then tells of the transfer after the next."""
        k, e = self.k, self.k.e
        with e.only_if("setp.gt.s32", self.step, 0):
            phase = e.r("and.b32", e.r("shr.u32", e.r("sub.s32", self.step, 1), 1), 1)
            e.wait(self.barrier, phase, ".acquire.cluster")
            again = e.both(k.first, e.p("setp.lt.s32", self.step, steps - 2))
            e.expect(self.barrier, k.size, again)


Tiles = Sequence[tuple[int | None, int | None]]


class Matrix:
    """A warp's rows of a matrix, as operands of `mma`: the first `kept` in registers, the others in shared memory.

    tiles: for each its two halves, numbers among those that have rows, or None. Operands are numbered by chunk, then by
    tile, then by half of the chunk. apart: whether the first and the second half of the `mma` of a sum have sums of
    their own, which are added at the end. streamed: how many, apart from those, are read from device memory in each
    step, in pairs of the same chunk and tile that are spread evenly among all pairs.
    """

    def __init__(
        self,
        k: Block,
        tiles: Sequence[tuple[int | None, int | None]],
        chunks: int,
        kept: int,
        place: int,
        *,
        apart: bool,
        streamed: int = 0,
    ) -> None:
        self.k, self.tiles, self.chunks, self.kept, self.apart = k, tiles, chunks, kept, apart
        self.streamed, self.places, self.flying = streamed // 2, list[tuple[str, str]](), list[list[list[str]]]()
        e = k.e
        part = max(0, chunks * len(tiles) * 2 - kept - streamed) * 512
        self.rest = e.scaled(k.lane, VECTOR, e.scaled(k.warp, part, e.r("add.s32", k.shared, place))) if part else ""
        self.operands: list[list[str]] = []

    def load(self, source: Callable[[int, int], str]) -> None:
        """Reads the matrix; `source` is the place in device memory of a half's vector of a chunk."""
        e, stored = self.k.e, 0
        for pair, (chunk, halves) in enumerate(itertools.product(range(self.chunks), self.tiles)):
            places = ["" if half is None else source(half, chunk) for half in halves]
            if self._is_streamed(pair):
                self.places.append((places[0], places[1]))
                continue
            for rows in self._pair(*places):
                if len(self.operands) < self.kept:
                    self.operands.append(rows)
                else:
                    e.op("st.shared.v4.b32", f"[{self.rest}+{stored * 512}]", rows)
                    stored += 1

    def _pair(self, low: str, high: str) -> list[list[str]]:
        """Both operands of a chunk and a tile, of the places in device memory of its halves' vectors; "" is zeros."""
        e = self.k.e
        first, second = (e.load_vector("global.nc", at) if at else [e.r("mov.b32", 0)] * 4 for at in (low, high))
        return [[first[2 * s], second[2 * s], first[2 * s + 1], second[2 * s + 1]] for s in range(2)]

    def _is_streamed(self, pair: int) -> bool:
        every = self.chunks * len(self.tiles)
        return pair * self.streamed // every != (pair + 1) * self.streamed // every

    def fetch(self) -> None:
        """Begins to read the first pairs that are streamed."""
        self.flying = [self._pair(*places) for places in self.places[:FLYING]]

    def _operands(self) -> Iterator[list[str]]:
        """All in order; where a streamed pair is taken, the reading of another one begins."""
        coming, numbers = iter(self.places[FLYING:]), itertools.count()
        for pair in range(self.chunks * len(self.tiles)):
            if self._is_streamed(pair):
                yield from self.flying.pop(0)
                self.flying += [self._pair(*places) for places in itertools.islice(coming, 1)]
            else:
                yield from (self._operand(number) for number in itertools.islice(numbers, 2))

    def _operand(self, number: int) -> list[str]:
        if number < self.kept:
            return self.operands[number]
        return self.k.e.load_vector("shared", f"[{self.rest}+{(number - self.kept) * 512}]")

    def multiply(self, dtype: str, columns: Sequence[Callable[[int], str]]) -> list[list[list[str]]]:
        """[columns][tiles]: the four sums of a lane.

        columns: for each eight sequences the place in shared memory of a chunk's vectors.
        """
        e = self.k.e
        nothing = [e.f("mov.f32", ZERO)] * 4
        sums: dict[tuple[int, int, int], list[str]] = {}
        operands = self._operands()
        for chunk in range(self.chunks):
            a = list(itertools.islice(operands, 2 * len(self.tiles)))
            for n, place in enumerate(columns):
                b = e.load_vector("shared", place(chunk))
                for s, i in itertools.product(range(2), range(len(self.tiles))):
                    part = (n, i, int(self.apart and 2 * chunk + s >= self.chunks))
                    before = sums.get(part, nothing)
                    into = sums.setdefault(part, before if part in sums else [e.new("f") for _ in range(4)])
                    kind = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
                    e.op(kind, into, a[2 * i + s], b[2 * s : 2 * s + 2], before)
        total = lambda n, i: [e.f("add.rn.f32", *pair) for pair in zip(sums[n, i, 0], sums[n, i, 1], strict=True)]
        every = [(n, i) for n in range(len(columns)) for i in range(len(self.tiles))]
        found = {key: total(*key) if self.apart else sums[*key, 0] for key in every}
        return [[found[n, i] for i in range(len(self.tiles))] for n in range(len(columns))]


class States:
    """h of eight sequences and more in a buffer, and its exchange: a line of 128 bytes for each group of eight units.

    A line has a vector for each of eight sequences. Their order within lines differs from group to group so that the
    vectors that eight lanes read lie in different banks.
    """

    def __init__(self, k: Block, units: int) -> None:
        e = k.e
        self.k, self.units = k, units
        self.read = e.scaled(k.quad, LINE, e.scaled(self._place(k.row, k.quad), VECTOR, 0))
        # The sequence whose vector a lane sends, and to which block of each four.
        self.column = e.scaled(k.quad, 2, e.r("and.b32", k.row, 1))
        self.to = e.r("shr.u32", k.row, 1)
        self.picks = e.r("selp.b32", "0x3276", "0x5410", self._bit(0))
        self.number = e.r("mad.lo.s32", k.rank, k.warps, k.warp)  # of the warp in the cluster
        self.sends = "" if k.cluster >= 4 else e.p("setp.lt.u32", self.to, k.cluster)
        self.targets: list[tuple[list[str], str]] = []
        for four in range(0, k.cluster, 4):
            block, mapped = e.r("and.b32", e.r("add.s32", self.to, four), k.cluster - 1), []
            for group in range(k.groups):
                line = e.scaled(self.number, k.groups, group)
                place = self._place(self.column, e.r("and.b32", line, 3))
                mapped.append(e.in_block(e.scaled(line, LINE, e.scaled(place, VECTOR, k.shared)), block))
            self.targets.append((mapped, e.in_block(k.barriers, block)))
        self.bits = [self._bit(i) for i in range(3)]

    def _bit(self, i: int) -> str:
        """Whether a bit of the lane's row is set."""
        return self.k.e.p("setp.gt.s32", self.k.e.r("and.b32", self.k.row, 1 << i), 0)

    def _place(self, column: str, group: str) -> str:
        return self.k.e.r("and.b32", self.k.e.scaled(group, 2, column), COLUMNS - 1)

    def at(self, buffer: str, tile: int) -> Callable[[int], str]:
        """The place of a chunk's vectors in a buffer."""
        start = self.k.e.r("add.s32", buffer, self.read)
        return lambda chunk: f"[{start}+{tile * self.units * VECTOR + chunk * 4 * LINE}]"

    def begin(self, source: str, first: str, batch: int, tiles: int) -> None:
        """Fills the first buffer with rows of an array (sequences, units), and with 0 behind its last sequence."""
        k, e = self.k, self.k.e
        for tile in range(tiles):
            with e.loop(k.thread, self.units, k.threads) as i:
                column, group = e.r("and.b32", i, COLUMNS - 1), e.r("shr.u32", i, 3)
                sequence = e.r("add.s32", e.r("add.s32", first, tile * COLUMNS), column)
                words = [e.r("mov.b32", 0) for _ in range(4)]
                row = e.d("mad.wide.u32", sequence, 2 * self.units, source)
                place = e.d("mad.wide.u32", group, VECTOR, row)
                e.op("ld.global.nc.v4.b32", words, f"[{place}]", when=e.p("setp.lt.s32", sequence, batch))
                at = self._place(column, e.r("and.b32", group, 3))
                target = e.scaled(group, LINE, e.scaled(at, VECTOR, k.shared))
                e.op("st.shared.v4.b32", f"[{target}+{tile * self.units * VECTOR}]", words)

    def gathered(self, word: str) -> list[str]:
        """Of two sequences of a unit, which a lane has, to all eight units of one: the vector of 16 bytes."""
        e = self.k.e
        other = self._exchanged(word, 4)
        words = [e.r("prmt.b32", word, other, self.picks)]
        for i in (1, 2):
            others = [self._exchanged(w, 4 << i) for w in words]
            pairs = list(zip(words, others, strict=True))
            words = [e.r("selp.b32", b, a, self.bits[i]) for a, b in pairs] + [
                e.r("selp.b32", a, b, self.bits[i]) for a, b in pairs
            ]
        return words

    def _exchanged(self, word: str, distance: int) -> str:
        return self.k.e.r("shfl.sync.bfly.b32", word, distance, 31, "0xffffffff")

    def send(self, turn: Turn, group: int, tile: int, vector: list[str]) -> None:
        """Stores a vector into the other buffer of all blocks."""
        e = self.k.e
        for mapped, barrier in self.targets:
            place = e.r("add.s32", mapped[group], turn.other)
            told = e.r("add.s32", barrier, turn.other_barrier)
            e.send("v4.b32", f"{place}+{tile * self.units * VECTOR}", vector, told, self.sends)
