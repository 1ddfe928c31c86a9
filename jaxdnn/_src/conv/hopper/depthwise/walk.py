"""Depthwise and narrow-group convolution on the tensor core: the PTX that a warp runs over a tile in shared memory.

A warp computes eight channels. `mma.m16n8k16` multiplies 16 x 16 by 16 x 8. The right operand is eight pixels of eight
channels in two neighbouring input rows, as `ldmatrix` reads them. The left operand is the filter: its 16 rows are two
neighbouring output rows of eight channels, and its 8x8 blocks, built in registers, are block-diagonal by groups (for
depthwise, diagonal). Most of the products are by zero, and it is still faster than float32 FMA: one instruction forms
up to 256 useful products without a conversion, and an input fragment, once read, is used for every output row that
needs it. Pairs of input rows start at an even row, so that a pair is in neighbouring registers wherever it is used.

Order of additions for one output: the tap columns by offset, in each the pairs of input rows downwards. A pair is one
instruction, which adds the products of the taps in it (`tap_steps` returns them; for output rows of odd index the
pairs are shifted by one row). The accumulator is float32, with one rounding at the end.

A zero of a filter block times an infinity of a neighbouring channel or row is NaN. So the warp tests its sums, and if
one is not finite, it computes that group of pixels again, for one output row of a pair and one channel group at a time,
with all other operands masked: by the same instructions in the same order, hence with the same bits, and without values
that the output does not depend on.
"""

import dataclasses

from jaxdnn._src.conv.hopper.depthwise.ptx import Fragments, Lanes, SwizzledTile, matrix_multiply
from jaxdnn._src.hopper.ptx import Emitter

WARPS = 4  # that share a tile
UNROLLED_COLUMNS = 8  # filters with more tap columns than this loop over them


@dataclasses.dataclass(frozen=True)
class Phase:
    """The outputs of one residue modulo the output step: their place in the tile, and their taps.

    Attributes:
      start: row and column of the first output in the output tile.
      row_taps, column_taps: (index in the filter, offset in the input tile), offsets ascending; the phase's taps are
        all pairs of them.
    """

    start: tuple[int, int]
    row_taps: tuple[tuple[int, int], ...]
    column_taps: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataTile:
    """Forward or backward data of one tile, by either arithmetic.

    Attributes:
      filter_columns: S of the filter; tap (r, s) is number r*S + s.
      in_pitch, out_pitch: pixels in a row of the input and of the output tile.
      in_step, out_step: pixels between neighbouring outputs, in the input tile and in the output tile.
      rows, columns: outputs of one phase in the tile.
      bias: whether a float32 of each channel, in shared memory too, is added to its sums before they are rounded.
    """

    filter_columns: int
    in_pitch: int
    out_pitch: int
    in_step: tuple[int, ...]
    out_step: tuple[int, ...]
    rows: int
    columns: int
    phases: tuple[Phase, ...]
    bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk(DataTile):
    """A tile on the tensor core.

    Attributes:
      dtype: "bf16" or "f16".
      channels: channels of the tile: 16, 32 or 64.
      group: channels of a group: 1, 2, 4 or 8.
      swapped: the filter block is transposed (backward data).
      block: rows that a warp computes at a time; even, divides rows.
    """

    dtype: str
    channels: int
    group: int
    swapped: bool
    block: int


def row_pairs(phase: Phase, step: int) -> list[int]:
    """The q of the input rows (2q, 2q + 1), relative to an even output row, that it or the next output row uses."""
    reached = {offset + u * step for _, offset in phase.row_taps for u in range(2)}
    return sorted({row // 2 for row in reached})


def tap_steps(phase: Phase, step: int, parity: int) -> list[list[tuple[int, int]]]:
    """The (r, s) of each instruction that adds to an output whose row within the phase is even (0) or odd (1)."""
    rows = {offset + parity * step: r for r, offset in phase.row_taps}
    steps = [
        [(rows[i], s) for i in (2 * q, 2 * q + 1) if i in rows]
        for s, _ in phase.column_taps
        for q in row_pairs(phase, step)
    ]
    return [taps for taps in steps if taps]


class _Filter:
    """Filter blocks in registers: for a tap an 8x8 block of (output channel, input channel), one register a lane."""

    def __init__(self, e: Emitter, k: Walk, lanes: Lanes, address: str) -> None:
        self._e, self._k = e, k
        self._row_bytes = 2 * k.channels
        self._zero = e.r("mov.b32", 0)
        shift = {1: 0, 2: 1, 4: 2, 8: 3}[k.group]
        same = lambda column: e.p("setp.eq.u32", e.r("shr.u32", column, shift), e.r("shr.u32", lanes.row, shift))
        second = e.r("add.u32", lanes.pair, 1)
        if k.group == 1:  # a lane has one value (bytes 0 and 1), which it moves to its place on the diagonal
            picked = e.r("selp.b32", "0x2210", "0x2222", same(lanes.pair))
            self._pick = e.r("selp.b32", "0x1022", picked, same(second))
        else:
            low = e.r("selp.b32", "0x0000ffff", 0, same(lanes.pair))
            self._keep = e.r("or.b32", low, e.r("selp.b32", "0xffff0000", 0, same(second)))
        within = lambda value: e.scaled(e.r("and.b32", value, k.group - 1), self._row_bytes, address)
        if k.group == 1:
            self._lanes = [e.scaled(lanes.row, 2, address)]
        elif k.swapped:
            self._lanes = [e.scaled(lanes.pair, 2, within(lanes.row))]
        else:
            self._lanes = [e.scaled(lanes.row, 2, within(column)) for column in (lanes.pair, second)]

    def bind(self, chunk: str, offset: str = "") -> None:
        """Sets the eight channels, and a byte offset in a loop over tap columns."""
        e = self._e
        self._bases = [e.scaled(chunk, 16, base) for base in self._lanes]
        if offset:
            self._bases = [e.r("add.s32", base, offset) for base in self._bases]
        self._held: dict[int, str] = {}

    def block(self, r: int | None, s: int, copy: int = 0) -> str:
        """The block of tap (r, s), or zeros for no row. A copy is built again, which costs no more than a move."""
        if r is None:
            return self._zero
        held = self.raw(r, s)
        if self._k.group == 1:
            return self._e.r("prmt.b32", held, held if copy else 0, self._pick)
        return held if self._k.group == 8 else self._e.r("and.b32", held, self._keep)

    def raw(self, r: int, s: int) -> str:
        """The lane's values of tap (r, s), loaded once."""
        e, k, tap = self._e, self._k, r * self._k.filter_columns + s
        if tap not in self._held:
            at = [f"[{base}+{tap * k.group * self._row_bytes}]" for base in self._bases]
            if k.group == 1:
                self._held[tap] = e.r("ld.shared.u16", at[0])
            elif k.swapped:
                self._held[tap] = e.r("ld.shared.b32", at[0])
            else:
                low, high = (e.r("ld.shared.u16", place) for place in at)
                self._held[tap] = e.r("prmt.b32", low, high, "0x5410")
        return self._held[tap]


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the eight pixels of an operand are arranged: eight of one row, or four of each of two rows.

    The second is for four remaining columns. The two rows are two apart; the rows next to them are the other half of
    the same instruction. In a block of two rows both fours are the same pixels.
    """

    half: bool
    first_column: int
    groups: int

    def lane_pixel(self, e: Emitter, lane8: str, step: tuple[int, ...], pitch: int, apart: int) -> str:
        if not self.half:
            return e.scaled(lane8, step[1])
        across = e.scaled(e.r("and.b32", lane8, 3), step[1])
        return e.scaled(e.r("shr.u32", lane8, 2), apart * step[0] * pitch, across)

    @property
    def tall(self) -> int:
        """Output rows of an instruction's accumulator."""
        return 4 if self.half else 2


def kinds(columns: int) -> list[Kind]:
    full, rest = divmod(columns, 8)
    found = [Kind(False, 0, full)] if full else []
    return [*found, Kind(True, full * 8, 1)] if rest else found


def walk(k: Walk) -> str:
    """The PTX of a forward or backward-data tile.

    Its operands are shared addresses: of the input tile, the filter slab, the output tile, and the biases if any.
    """
    e = Emitter()
    x, w, y, *biases = (e.r("mov.b32", f"${i}") for i in range(3 + k.bias))
    lanes = Lanes(e)
    blocks = _Filter(e, k, lanes, w)
    items = 0
    for phase in k.phases:
        for kind in kinds(k.columns):
            items += _Section(e, k, lanes, blocks, phase, kind).emit(x, y, biases, items)
    return e.text()


class _Section:
    """All groups of eight pixels of one kind in one phase, distributed over the warps, the channels fastest."""

    def __init__(self, e: Emitter, k: Walk, lanes: Lanes, blocks: _Filter, phase: Phase, kind: Kind) -> None:
        self.e, self.k, self.lanes, self.blocks, self.phase, self.kind = e, k, lanes, blocks, phase, kind
        self.looped = len(phase.column_taps) > UNROLLED_COLUMNS
        self.pairs = row_pairs(phase, k.in_step[0]) if phase.column_taps else []
        self.rows = {offset: r for r, offset in phase.row_taps}
        # The first output row of each set. The last set ends with the block and may repeat rows of the one before it.
        self.sets = [min(row, max(0, k.block - kind.tall)) for row in range(0, k.block, kind.tall)]
        self.apart = 2 if k.block >= kind.tall else 0

    def emit(self, x: str, y: str, biases: list[str], before: int) -> int:
        """Emits the section; returns its number of items, which go to the warps in turn after those of `before`."""
        e, k, kind = self.e, self.k, self.kind
        chunks = k.channels // 8
        items = chunks * (k.rows // k.block) * kind.groups
        first = e.r("and.b32", e.r("add.u32", self.lanes.warp, -before % WARPS), WARPS - 1)
        with e.loop(first, items, WARPS) as item:
            chunk = e.r("and.b32", item, chunks - 1)
            rest = e.r("shr.u32", item, chunks.bit_length() - 1)
            block = e.r("div.u32", rest, kind.groups)
            group = e.r("sub.s32", rest, e.scaled(block, kind.groups))
            source = self._source(block, group)
            of_lane = (e.scaled(chunk, 32, e.scaled(self.lanes.row, 4, base)) for base in biases)
            self.bias = [e.f("ld.shared.f32", f"[{place}]") for place in of_lane]
            sums = self._sums(x, source, chunk, "", None)
            self._store(y, block, group, chunk, sums)
            self._repair(x, y, source, block, group, chunk, sums)
        return items

    def _source(self, block: str, group: str) -> str:
        """The input pixel that this lane addresses for ldmatrix, without the offset of a tap."""
        e, k, kind = self.e, self.k, self.kind
        pixel = kind.lane_pixel(e, self.lanes.source, k.in_step, k.in_pitch, self.apart)
        pixel = e.scaled(self.lanes.matrix, k.in_pitch, pixel)
        pixel = e.scaled(block, k.block * k.in_step[0] * k.in_pitch, pixel)
        pixel = e.scaled(group, 8 * k.in_step[1], pixel)
        return e.r("add.s32", pixel, kind.first_column * k.in_step[1])

    def _target(self, y: str, lane_pixel: str, block: str, group: str, chunk: str) -> SwizzledTile:
        """The output tile from the lane's pixel on, without the row of the set."""
        e, k = self.e, self.k
        pixel = e.scaled(block, k.block * k.out_step[0] * k.out_pitch, lane_pixel)
        pixel = e.scaled(group, 8 * k.out_step[1], pixel)
        start = self.phase.start[0] * k.out_pitch + self.phase.start[1] + self.kind.first_column * k.out_step[1]
        return SwizzledTile(e, y, k.channels, e.r("add.s32", pixel, start), chunk)

    def _sums(self, x: str, source: str, chunk: str, mask: str, only: int | None) -> list[list[str]]:
        """Sums of each set: [even row's two pixels, odd row's two pixels]; `only` one of the rows, if given."""
        e = self.e
        sums = [[e.f("mov.f32", "0f00000000") for _ in range(4)] for _ in self.sets]
        columns = self.phase.column_taps
        if not self.pairs:
            return sums
        if not self.looped:
            self.blocks.bind(chunk)
            self._accumulate(x, source, chunk, mask, only, sums, columns)
            return sums
        (s0, d0), (s1, d1) = columns[:2]
        with e.loop(0, len(columns), 1) as index:
            self.blocks.bind(chunk, e.scaled(index, self.k.group * 2 * self.k.channels * (s1 - s0)))
            self._accumulate(x, e.scaled(index, d1 - d0, source), chunk, mask, only, sums, columns[:1])
        return sums

    def _accumulate(
        self,
        x: str,
        source: str,
        chunk: str,
        mask: str,
        only: int | None,
        sums: list[list[str]],
        columns: tuple[tuple[int, int], ...],
    ) -> None:
        e, k = self.e, self.k
        first = 2 * self.pairs[0]
        count = 2 * self.pairs[-1] + self.sets[-1] * k.in_step[0] + 2 - first
        tile = SwizzledTile(e, x, k.channels, source, chunk)
        taken = Fragments(e, tile, k.in_pitch, first, 1, count, mask=mask)
        zero = e.r("mov.b32", 0)

        def fetch(s: int, across: int) -> None:
            for r, _ in self.phase.row_taps:
                self.blocks.raw(r, s)
            if only is None:
                for row in range(first, first + count, 4):
                    taken.get(row, across)

        for i, (s, across) in enumerate(columns):
            for column in columns[i : i + 2]:  # the next column's operands are loaded before this one's products
                fetch(*column)
            for q in self.pairs:
                taps = [[self.rows.get(2 * q + v - u * k.in_step[0]) for u in range(2)] for v in range(2)]
                a = [self.blocks.block(r, s, copy) for copy, two in enumerate(taps) for r in two]
                for start, accumulators in zip(self.sets, sums, strict=True):
                    row = 2 * q + start * k.in_step[0]
                    seen = [only is None or taps[v][only] is not None for v in range(2)]
                    b = [taken.get(row + v, across) if seen[v] else zero for v in range(2)]
                    matrix_multiply(e, k.dtype, accumulators, a, b)

    def _store(self, y: str, block: str, group: str, chunk: str, sums: list[list[str]]) -> None:
        """Rounds and stores, two sets at a time; stmatrix transposes (channel, pixel) to (pixel, channel)."""
        e, k, lanes = self.e, self.k, self.lanes
        pixel = self.kind.lane_pixel(e, lanes.source, k.out_step, k.out_pitch, self.apart)
        line = k.out_step[0] * k.out_pitch
        if self.kind.half:  # matrices: even rows, odd rows of a set of four rows, then of the next
            pixel = e.scaled(e.r("and.b32", lanes.matrix, 1), line, pixel)
            pixel = e.scaled(e.r("shr.u32", lanes.matrix, 1), 4 * line, pixel)
        else:
            pixel = e.scaled(lanes.matrix, line, pixel)
        target = self._target(y, pixel, block, group, chunk)
        whole = max(1, k.block // self.kind.tall)  # sets that do not overlap
        for two in (*(range(whole)[m : m + 2] for m in range(0, whole, 2)), range(whole, len(sums))):
            words = [self._packed(sums[m], u) for m in two for u in range(2)]
            if words:
                place = target.at(self.sets[two[0]] * line)
                e.op(f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16", place, words)

    def _packed(self, sums: list[str], u: int) -> str:
        low, high = sums[2 * u : 2 * u + 2]
        for bias in self.bias:
            low, high = (self.e.f("add.rn.f32", value, bias) for value in (low, high))
        return self.e.r(f"cvt.rn.{self.k.dtype}x2.f32", high, low)

    def _store_row(
        self, y: str, block: str, group: str, chunk: str, sums: list[list[str]], m: int, u: int, when: str
    ) -> None:
        """Stores the two values of one row of a set, one at a time, in lanes for which the predicate holds."""
        e, k, lanes = self.e, self.k, self.lanes
        word = self._packed(sums[m], u)
        within = e.scaled(lanes.row, 2, y)
        for j in range(2):
            lane8 = e.r("add.u32", lanes.pair, j)
            pixel = self.kind.lane_pixel(e, lane8, k.out_step, k.out_pitch, self.apart)
            target = self._target(within, pixel, block, group, chunk)
            place = target.at((self.sets[m] + u) * k.out_step[0] * k.out_pitch)
            e.op("st.shared.u16", place, e.r("shr.u32", word, 16 * j), when=when)

    def _repair(self, x: str, y: str, source: str, block: str, group: str, chunk: str, sums: list[list[str]]) -> None:
        """Computes all again if a sum is not finite, for one output row of a pair and one channel group at a time."""
        e, k, lanes = self.e, self.k, self.lanes
        zero = "0f00000000"
        probe = e.f("mov.f32", zero)
        for value in (value for four in sums for value in four):
            e.op("fma.rn.f32", probe, value, zero, probe)  # stays 0 unless a value is infinite or NaN
        bad = e.p("vote.sync.any.pred", e.p("setp.nan.f32", probe, probe), "0xffffffff")
        done = e.label()
        e.op("bra", done, when=f"!{bad}")
        shift = {1: 0, 2: 1, 4: 2, 8: 3}[k.group]
        first, second = lanes.pair, e.r("add.u32", lanes.pair, 1)
        with e.loop(0, 8 // k.group, 1) as current:
            of = lambda channel: e.p("setp.eq.u32", e.r("shr.u32", channel, shift), current)
            mask = e.r("selp.b32", "0x0000ffff", 0, of(first))
            mask = e.r("or.b32", mask, e.r("selp.b32", "0xffff0000", 0, of(second)))
            for u in range(2):
                again = self._sums(x, source, chunk, mask, u)
                for m in range(len(self.sets)):
                    self._store_row(y, block, group, chunk, again, m, u, of(lanes.row))
        e.place(done)
