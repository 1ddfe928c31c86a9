"""Filter gradient of depthwise and narrow-group convolution on the tensor core: the PTX that a warp runs over a tile.

dw[r, s, i, c] = sum over pixels of x[pixel + (r, s), i] dy[pixel, c], i in c's group. A warp computes eight channels.
One instruction multiplies 16 x 16 by 16 x 8: the rows are eight input channels at two neighbouring column taps, the
reduction is 16 pixels, the columns are the eight output channels. Of each 8x8 result only the group's own block is
stored (for depthwise, the diagonal). The sums stay in registers over all tiles of a split. Both operands are read
transposed (`ldmatrix.trans`), because the tiles are channels-last.

Order of additions for one element of dw in one split: the tiles in order; in a tile the groups of eight columns, then,
if four columns remain, groups of 2 x 4 pixels; in a group the rows in order, two fragments (16 pixels) for each
instruction. `pixel_order` returns it. A second launch adds the splits' sums (`partials`).
"""

import dataclasses

from jaxdnn._src.conv.hopper.depthwise.ptx import Fragments, Lanes, SwizzledTile, matrix_multiply
from jaxdnn._src.conv.hopper.depthwise.walk import Kind, kinds
from jaxdnn._src.hopper.ptx import Emitter


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterTile:
    """The filter gradient of one tile of the input and one tile of the output's gradient, by either arithmetic.

    Attributes:
      in_pitch, out_pitch: pixels in a row of the input tile and of the gradient's tile.
      in_step: pixels between the inputs of neighbouring outputs.
      dilation: pixels between taps.
      row_taps: tap rows of the block.
      column_taps: tap columns of one warpgroup; group g has g*column_taps to (g+1)*column_taps - 1.
      rows, columns: outputs of the tile.
    """

    in_pitch: int
    out_pitch: int
    in_step: tuple[int, ...]
    dilation: tuple[int, ...]
    row_taps: int
    column_taps: int
    rows: int
    columns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterWalk(FilterTile):
    """A tile on the tensor core.

    Attributes:
      dtype: "bf16" or "f16".
      group: channels of a group: 1, 2, 4 or 8.
      warpgroups: groups with a warp for each eight channels, which share the tap columns.
      channels: channels of the tile: 32 or 64.
    """

    dtype: str
    group: int
    warpgroups: int
    channels: int = 32

    @property
    def in_rows(self) -> int:
        """Rows of the input tile that the taps reach; the tile may have more."""
        return (self.rows - 1) * self.in_step[0] + (self.row_taps - 1) * self.dilation[0] + 1

    @property
    def accumulators(self) -> int:
        """Float32 sums that a thread holds."""
        return 4 * self.row_taps * ((self.column_taps + 1) // 2)


def _chunk(e: Emitter, k: FilterWalk, lanes: Lanes) -> tuple[str, str]:
    """The number of the warp's eight channels, and of its warpgroup."""
    chunks = k.channels // 8
    return e.r("and.b32", lanes.warp, chunks - 1), e.r("shr.u32", lanes.warp, chunks.bit_length() - 1)


def filter_walk(k: FilterWalk) -> str:
    """The PTX of a tile; operands: the sums (in and out), the input tile and the gradient's tile."""
    e = Emitter()
    n = k.accumulators
    sums = [e.f("mov.f32", f"${i}") for i in range(n)]
    x, dy = (e.r("mov.b32", f"${2 * n + i}") for i in range(2))
    lanes = Lanes(e)
    chunk, warpgroup = _chunk(e, k, lanes)
    shift = e.scaled(warpgroup, k.column_taps * k.dilation[1])
    for kind in kinds(k.columns):
        rows = _fragment_rows(kind, k.rows)
        with e.loop(0, kind.groups, 1) as group:
            pixel = kind.lane_pixel(e, lanes.source, k.in_step, k.in_pitch, apart=1)
            pixel = e.scaled(group, 8 * k.in_step[1], e.r("add.s32", pixel, shift))
            pixel = e.r("add.s32", pixel, kind.first_column * k.in_step[1])
            inputs = _Inputs(e, k, kind, lanes, rows.step * k.in_step[0], x, pixel, chunk)
            pixel = kind.lane_pixel(e, lanes.source, (1, 1), k.out_pitch, apart=1)
            pixel = e.scaled(lanes.matrix, rows.step * k.out_pitch, pixel)
            pixel = e.r("add.s32", e.scaled(group, 8, pixel), kind.first_column)
            tile = SwizzledTile(e, dy, k.channels, pixel, chunk)
            gradients = Fragments(e, tile, k.out_pitch, 0, rows.step, len(rows), transposed=True)
            _group(e, k, rows, inputs, gradients, sums)
    for i, value in enumerate(sums):
        e.op("mov.f32", f"${i}", value)
    return e.text()


def _fragment_rows(kind: Kind, rows: int) -> range:
    """The first row of each fragment of a tile: eight pixels of one row, or four of it and four of the next."""
    return range(0, rows, 2 if kind.half else 1)


class _Inputs:
    """Input pixels of eight columns, as ldmatrix reads them: two neighbouring column taps of one row, or of two.

    If the number of column taps is odd, the last one has no neighbour. The values that are read in its neighbour's
    place are not stored; at the tile's end, where none follow, that tap is read twice instead.
    """

    def __init__(
        self, e: Emitter, k: FilterWalk, kind: Kind, lanes: Lanes, apart: int, x: str, pixel: str, chunk: str
    ) -> None:
        """pixel: the lane's in the first of the four matrices. apart: input rows from the first two to the others."""
        self._e, self._k, self._apart = e, k, apart
        pixel = e.scaled(e.r("shr.u32", lanes.matrix, 1), apart * k.in_pitch, pixel)
        second = e.r("and.b32", lanes.matrix, 1)
        tile = lambda taps: SwizzledTile(e, x, k.channels, e.scaled(second, taps * k.dilation[1], pixel), chunk)
        self._two, self._one = tile(1), tile(0) if k.column_taps % 2 else None
        within = int(kind.half), kind.first_column + (4 if kind.half else 8 * kind.groups) - 1
        self._last = tuple(n * step for n, step in zip(within, k.in_step, strict=True))  # of the pixels of all lanes

    def read(self, line: int, pair: int, rows: int) -> list[str]:
        """The matrices of a pair of column taps in the tile's row `line`; with two `rows` also `apart` rows below."""
        k, names = self._k, [self._e.new() for _ in range(2 * rows)]
        row = line + self._last[0] + (rows - 1) * self._apart
        column = self._last[1] + ((k.warpgroups - 1) * k.column_taps + 2 * pair + 1) * k.dilation[1]
        inside = row * k.in_pitch + column < k.in_rows * k.in_pitch
        tile = self._two if inside or self._one is None else self._one
        place = tile.at(line * k.in_pitch + 2 * pair * k.dilation[1])
        self._e.op(f"ldmatrix.sync.aligned.m8n8.x{len(names)}.trans.shared.b16", names, place)
        return names


def _group(e: Emitter, k: FilterWalk, rows: range, inputs: _Inputs, gradients: Fragments, sums: list[str]) -> None:
    """The products of eight columns: an input fragment, once read, is multiplied for every tap row that needs it."""
    zero = e.r("mov.b32", 0)
    apart = rows.step * k.in_step[0]  # input rows from one fragment of an instruction to the other
    uses: dict[int, list[tuple[int, int]]] = {}  # input row: (index of the first output row, tap row)
    for i in range(0, len(rows), 2):
        for r in range(k.row_taps):
            uses.setdefault(rows[i] * k.in_step[0] + r * k.dilation[0], []).append((i, r))
    alone = lambda i: i + 1 == len(rows)  # the last fragment of an odd number has no partner
    for pair in range((k.column_taps + 1) // 2):
        held: dict[int, list[str]] = {}

        def fetch(line: int, held: dict[int, list[str]] = held, pair: int = pair) -> list[str]:
            if line not in held:
                held[line] = inputs.read(line, pair, 1 if all(alone(i) for i, _ in uses[line]) else 2)
            return held[line]

        for line in sorted(uses):
            # Every second fragment is assembled from halves of its neighbours: moves are cheaper than a second load.
            if (line // apart) % 2 and len(held.get(line - apart, ())) == 4 and line + apart in uses:
                a = [e.r("mov.b32", half) for half in (*held[line - apart][2:], *fetch(line + apart)[:2])]
            else:
                a = fetch(line)
            for i, r in uses[line]:
                b = [gradients.get(rows[i], 0), zero if alone(i) else gradients.get(rows[i + 1], 0)]
                first = 4 * (pair * k.row_taps + r)
                matrix_multiply(e, k.dtype, sums[first : first + 4], [*a[:2], zero, zero] if alone(i) else a, b)


def filter_store(k: FilterWalk) -> str:
    """The PTX that stores the sums as (taps, group, channels) float32; operands: the sums, the shared address."""
    e = Emitter()
    n = k.accumulators
    sums = [e.f("mov.f32", f"${i}") for i in range(n)]
    out = e.r("mov.b32", f"${n}")
    lanes = Lanes(e)
    chunk, warpgroup = _chunk(e, k, lanes)
    shift = {1: 0, 2: 1, 4: 2, 8: 3}[k.group]
    line = 4 * k.channels
    own = e.r("shr.u32", lanes.row, shift)
    base = e.scaled(chunk, 32, e.scaled(lanes.pair, 4, out))
    base = e.scaled(e.r("and.b32", lanes.row, k.group - 1), line, base)
    base = e.scaled(warpgroup, k.column_taps * k.group * line, base)
    columns = k.column_taps * k.warpgroups
    keep = [e.p("setp.eq.u32", e.r("shr.u32", e.r("add.u32", lanes.pair, j), shift), own) for j in range(2)]
    for i, value in enumerate(sums):
        pair, r = divmod(i // 4, k.row_taps)
        s, j = 2 * pair + i % 4 // 2, i % 2
        if s < k.column_taps:
            offset = (r * columns + s) * k.group * line + 4 * j
            e.op("st.shared.f32", f"[{base}+{offset}]", value, when=keep[j])
    return e.text()


def pixel_order(rows: int, columns: int) -> list[tuple[int, int]]:
    """The pixels of a tile in the order of addition, sixteen for each instruction; (-1, -1) stands for zeros."""
    order: list[tuple[int, int]] = []
    for kind in kinds(columns):
        lines = _fragment_rows(kind, rows)
        for group in range(kind.groups):
            at = kind.first_column + 8 * group
            for i in range(0, len(lines) + len(lines) % 2):
                if i >= len(lines):
                    order += [(-1, -1)] * 8
                elif kind.half:
                    order += [(lines[i] + j // 4, at + j % 4) for j in range(8)]
                else:
                    order += [(lines[i], at + j) for j in range(8)]
    return order
