"""Depthwise and narrow-group convolution on the tensor core: the PTX that a warp runs over a tile in shared memory.

A warp owns eight channels. `mma.m16n8k16` multiplies 16 pixels x 16 values by 16 x 8: here two taps of eight input
channels by two 8x8 filter blocks, block-diagonal by groups (for depthwise, diagonal), built in registers. Seven of
eight multiplications of a depthwise block are by zero, and it still beats float32 FMA: one instruction does 256
useful products without a conversion, and an input fragment, once read, serves every tap row that needs it.

Order of additions for one output: tap pairs as `tap_pairs` lists them, each pair one instruction (two products for
depthwise, 2*group for a group), the accumulator in float32 throughout, one rounding at the end.

A zero of the filter block times an infinity of a neighbouring channel is NaN. So the warp looks at its accumulators,
and where one is not finite it repeats that group of pixels once per channel group with all other channels masked:
same instructions, same order, same bits, and no channel sees another.
"""

import dataclasses

from jaxdnn._kernels.hopper.conv_depthwise_ptx import Emitter, Fragments, Lanes, SwizzledTile, matrix_multiply

UNROLLED_COLUMNS = 8  # filters with more tap columns than this loop over them


@dataclasses.dataclass(frozen=True)
class Phase:
    """Outputs of one residue modulo the output step: where they lie in the tile, and the taps that reach them.

    Attributes:
      start: row and column of the first output in the output tile.
      row_taps, column_taps: (index in the filter, offset in the input tile), offsets ascending; the phase's taps are
        all pairs of them.
    """

    start: tuple[int, int]
    row_taps: tuple[tuple[int, int], ...]
    column_taps: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Walk:
    """One forward or backward-data walk over a tile.

    Attributes:
      dtype: "bf16" or "f16".
      channels: channels of the tile: 16, 32 or 64.
      group: channels of a group: 1, 2, 4 or 8.
      filter_columns: S of the filter; tap (r, s) is number r*S + s.
      swapped: the filter block is transposed (backward data).
      in_pitch, out_pitch: pixels in a row of the input and of the output tile.
      in_step, out_step: steps between neighbouring outputs, in the input tile and in the output tile.
      rows, columns: outputs of one phase in the tile.
      block: rows that a warp holds at a time; divides rows.
      warps: warps that share the tile.
    """

    dtype: str
    channels: int
    group: int
    filter_columns: int
    swapped: bool
    in_pitch: int
    out_pitch: int
    in_step: tuple[int, int]
    out_step: tuple[int, int]
    rows: int
    columns: int
    block: int
    phases: tuple[Phase, ...]
    warps: int = 4


Tap = tuple[tuple[int, int], tuple[int, int]]  # (index, offset) of the row, (index, offset) of the column


def tap_pairs(phase: Phase) -> list[tuple[Tap, Tap | None]]:
    """Pairs of taps in the order they are added: down a tap column; what is left over joins the next column's."""
    looped = len(phase.column_taps) > UNROLLED_COLUMNS
    pairs: list[tuple[Tap, Tap | None]] = []
    left: Tap | None = None
    for column in phase.column_taps:
        taps: list[Tap] = [(row, column) for row in phase.row_taps]
        pairs += [(taps[i], taps[i + 1]) for i in range(0, len(taps) - 1, 2)]
        if len(taps) % 2:
            if left is not None:
                pairs.append((left, taps[-1]))
                left = None
            elif looped:
                pairs.append((taps[-1], None))
            else:
                left = taps[-1]
    return [*pairs, (left, None)] if left is not None else pairs


class _Filter:
    """Filter blocks in registers: one 8x8 block, one register a lane, for a tap."""

    def __init__(self, e: Emitter, k: Walk, lanes: Lanes, address: str) -> None:
        self._e, self._k = e, k
        self._row_bytes = 2 * k.channels
        shift = {1: 0, 2: 1, 4: 2, 8: 3}[k.group]
        same = lambda column: e.p(
            "setp.eq.u32", e.r("shr.u32", column, shift), e.r("shr.u32", lanes.row, shift)
        )
        second = e.r("add.u32", lanes.pair, 1)
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
        """Fixes the eight channels (and a byte offset, where tap columns are looped over)."""
        e = self._e
        self._bases = [e.scaled(chunk, 16, base) for base in self._lanes]
        if offset:
            self._bases = [e.r("add.s32", base, offset) for base in self._bases]
        self._held: dict[int, str] = {}

    def get(self, tap: int) -> str:
        if tap in self._held:
            return self._held[tap]
        e, k = self._e, self._k
        at = lambda base: f"[{base}+{tap * k.group * self._row_bytes}]"
        if k.swapped and k.group > 1:
            block = e.r("ld.shared.b32", at(self._bases[0]))
        else:
            halves = [e.r("ld.shared.u16", at(base)) for base in self._bases]
            block = e.r("prmt.b32", halves[0], halves[-1], "0x5410")
        self._held[tap] = block if k.group == 8 else e.r("and.b32", block, self._keep)
        return self._held[tap]


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How eight pixels lie: eight in a row, or two rows of four where four columns are left over."""

    half: bool
    first_column: int
    groups: int

    def lane_pixel(self, e: Emitter, lane8: str, step: tuple[int, int], pitch: int) -> str:
        if not self.half:
            return e.scaled(lane8, step[1])
        across = e.scaled(e.r("and.b32", lane8, 3), step[1])
        return e.scaled(e.r("shr.u32", lane8, 2), step[0] * pitch, across)

    def rows(self, block: int) -> range:
        return range(0, block, 2 if self.half else 1)


def kinds(columns: int) -> list[_Kind]:
    full, rest = divmod(columns, 8)
    found = [_Kind(False, 0, full)] if full else []
    return [*found, _Kind(True, full * 8, 1)] if rest else found


def walk(k: Walk) -> str:
    """The PTX of a forward or backward-data tile; operands: input tile, filter slab, output tile (shared addresses)."""
    e = Emitter()
    x, w, y = (e.r("mov.b32", f"${i}") for i in range(3))
    lanes = Lanes(e)
    blocks = _Filter(e, k, lanes, w)
    for phase in k.phases:
        for kind in kinds(k.columns):
            _Section(e, k, lanes, blocks, phase, kind).emit(x, y)
    return e.text()


class _Section:
    """All groups of eight pixels of one kind in one phase, shared out over the warps, chunk of channels first."""

    def __init__(self, e: Emitter, k: Walk, lanes: Lanes, blocks: _Filter, phase: Phase, kind: _Kind) -> None:
        self.e, self.k, self.lanes, self.blocks, self.phase, self.kind = e, k, lanes, blocks, phase, kind
        self.pairs = tap_pairs(phase)
        self.looped = len(phase.column_taps) > UNROLLED_COLUMNS
        self.out_rows = list(kind.rows(k.block))
        rows = sorted({p * k.in_step[0] + offset for p in self.out_rows for _, offset in phase.row_taps})
        gaps = {b - a for a, b in zip(rows, rows[1:], strict=False)}
        self.first, self.row_step = (rows[0], min(gaps, default=1)) if rows else (0, 1)
        if any(gap % self.row_step for gap in gaps):
            self.row_step = 1
        self.row_count = (rows[-1] - self.first) // self.row_step + 1 if rows else 0

    def emit(self, x: str, y: str) -> None:
        e, k, kind = self.e, self.k, self.kind
        chunks = k.channels // 8
        with e.loop(self.lanes.warp, chunks * (k.rows // k.block) * kind.groups, k.warps) as item:
            chunk = e.r("and.b32", item, chunks - 1)
            rest = e.r("shr.u32", item, chunks.bit_length() - 1)
            block = e.r("div.u32", rest, kind.groups)
            group = e.r("sub.s32", rest, e.scaled(block, kind.groups))
            source = self._source(block, group)
            target = self._target(y, block, group, chunk)
            sums = self._sums(x, source, chunk, "")
            self._store(target, sums)
            if k.group < 8:
                self._repair(x, source, chunk, target, sums)

    def _source(self, block: str, group: str) -> str:
        """The input pixel that this lane addresses for ldmatrix, tap offsets apart."""
        e, k, kind = self.e, self.k, self.kind
        pixel = kind.lane_pixel(e, self.lanes.source, k.in_step, k.in_pitch)
        pixel = e.scaled(self.lanes.matrix, self.row_step * k.in_pitch, pixel)
        pixel = e.scaled(block, k.block * k.in_step[0] * k.in_pitch, pixel)
        pixel = e.scaled(group, 8 * k.in_step[1], pixel)
        return e.r("add.s32", pixel, kind.first_column * k.in_step[1])

    def _target(self, y: str, block: str, group: str, chunk: str) -> SwizzledTile:
        e, k, kind = self.e, self.k, self.kind
        pixel = kind.lane_pixel(e, self.lanes.row, k.out_step, k.out_pitch)
        pixel = e.scaled(block, k.block * k.out_step[0] * k.out_pitch, pixel)
        pixel = e.scaled(group, 8 * k.out_step[1], pixel)
        start = self.phase.start[0] * k.out_pitch + self.phase.start[1] + kind.first_column * k.out_step[1]
        within = e.scaled(self.lanes.pair, 2, y)
        return SwizzledTile(e, within, k.channels, e.r("add.s32", pixel, start), chunk)

    def _sums(self, x: str, source: str, chunk: str, mask: str) -> list[list[str]]:
        e = self.e
        sums = [[e.f("mov.f32", "0f00000000") for _ in range(4)] for _ in range((len(self.out_rows) + 1) // 2)]
        if not self.pairs:
            return sums
        if not self.looped:
            self.blocks.bind(chunk)
            self._accumulate(x, source, chunk, mask, sums, self.pairs)
            return sums
        (s0, d0), (s1, d1) = self.phase.column_taps[:2]
        with e.loop(0, len(self.phase.column_taps), 1) as index:
            step = self.k.group * 2 * self.k.channels * (s1 - s0)
            self.blocks.bind(chunk, e.scaled(index, step))
            once = [pair for pair in self.pairs if pair[0][1] == (s0, d0)]
            self._accumulate(x, e.scaled(index, d1 - d0, source), chunk, mask, sums, once)
        return sums

    def _accumulate(
        self, x: str, source: str, chunk: str, mask: str, sums: list[list[str]], pairs: list[tuple[Tap, Tap | None]]
    ) -> None:
        e, k = self.e, self.k
        tile = SwizzledTile(e, x, k.channels, source, chunk)
        taken = Fragments(e, tile, k.in_pitch, self.first, self.row_step, self.row_count, mask=mask)
        zero = e.r("mov.b32", 0)
        for pair in pairs:
            b = [self.blocks.get(tap[0][0] * k.filter_columns + tap[1][0]) if tap else zero for tap in pair]
            for m, accumulators in enumerate(sums):
                two = self.out_rows[2 * m : 2 * m + 2]
                two = [two[0], two[-1]]
                a = [
                    taken.get(row * k.in_step[0] + tap[0][1], tap[1][1]) if tap else zero for tap in pair for row in two
                ]
                matrix_multiply(e, k.dtype, accumulators, a, b)

    def _store(self, target: SwizzledTile, sums: list[list[str]], only: tuple[str, str] | None = None) -> None:
        e, k = self.e, self.k
        for i, row in enumerate(self.out_rows):
            low, high = sums[i // 2][2 * (i % 2) : 2 * (i % 2) + 2]
            packed = e.r(f"cvt.rn.{k.dtype}x2.f32", high, low)
            place = target.at(row * k.out_step[0] * k.out_pitch)
            if only is None:
                e.op("st.shared.b32", place, packed)
            else:
                e.op("st.shared.u16", place, packed, when=only[0])
                base, offset = place[1:-1].split("+")
                e.op("st.shared.u16", f"[{base}+{int(offset) + 2}]", e.r("shr.u32", packed, 16), when=only[1])

    def _repair(self, x: str, source: str, chunk: str, target: SwizzledTile, sums: list[list[str]]) -> None:
        """Where a sum is not finite: again, one channel group at a time, the others masked."""
        e, k, lanes = self.e, self.k, self.lanes
        probe = e.f("mov.f32", "0f00000000")
        for value in (v for four in sums for v in four):
            e.op("fma.rn.f32", probe, value, "0f00000000", probe)  # stays 0 unless a value is infinite or NaN
        bad = e.p("setp.nan.f32", probe, probe)
        fine = e.p("vote.sync.any.pred", bad, "0xffffffff")
        done = e.label()
        e.op("bra", done, when=f"!{fine}")
        shift = {1: 0, 2: 1, 4: 2}[k.group]
        first = e.r("shr.u32", lanes.pair, shift)
        second = e.r("shr.u32", e.r("add.u32", lanes.pair, 1), shift)
        with e.loop(0, 8 // k.group, 1) as current:
            own = e.p("setp.eq.u32", first, current), e.p("setp.eq.u32", second, current)
            mask = e.r("selp.b32", "0x0000ffff", 0, own[0])
            mask = e.r("or.b32", mask, e.r("selp.b32", "0xffff0000", 0, own[1]))
            self._store(target, self._sums(x, source, chunk, mask), own)
        e.place(done)
