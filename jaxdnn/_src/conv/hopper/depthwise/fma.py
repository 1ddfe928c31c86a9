"""Depthwise convolution in float32 by fused multiply-adds: the PTX that a warp runs over a tile in shared memory.

A lane computes one channel; a warp computes a strip of one or two columns with all rows of a block. An input value,
once read, is used for every tap row. Order of additions for one output: from zero, tap columns from left to right, and
in each the tap rows downwards (by offset in the input tile), by one fused multiply-add each.

It is PTX text, though Pallas could write it by `hopper.lanes` with a fused multiply-add of its own: that form has not
been written or measured.

In the filter gradient, too, the warps share the columns of a tile and process the rows downwards; each warp has its own
sum for every tap.
"""

from jaxdnn._src.conv.hopper.depthwise.filter import FilterTile
from jaxdnn._src.conv.hopper.depthwise.ptx import Lanes
from jaxdnn._src.conv.hopper.depthwise.walk import UNROLLED_COLUMNS, WARPS, DataTile, Phase
from jaxdnn._src.hopper.ptx import Emitter

PIXEL_BYTES = 128  # one pixel of the tile: 32 lanes of 4 bytes


class LaneWalk(DataTile):
    """A tile in float32."""

    @property
    def strip(self) -> int:
        """Columns that a warp computes at a time."""
        return 1 if self.columns % 2 else 2


def lane_walk(k: LaneWalk) -> str:
    """The PTX of a forward or backward-data tile; operands as those of `walk.walk`."""
    e = Emitter()
    x, w, y, *biases = (e.r("mov.b32", f"${i}") for i in range(3 + k.bias))
    lanes = Lanes(e)
    x, w, y = (e.scaled(lanes.lane, 4, base) for base in (x, w, y))
    biases = [e.scaled(lanes.lane, 4, base) for base in biases]
    biases = [e.f("ld.shared.f32", f"[{base}+0]") for base in biases]
    for phase in k.phases:
        with e.loop(lanes.warp, k.columns // k.strip, WARPS) as item:
            source = e.scaled(item, k.strip * k.in_step[1] * PIXEL_BYTES, x)
            sums = _strip(e, k, phase, source, w)
            start = (phase.start[0] * k.out_pitch + phase.start[1]) * PIXEL_BYTES
            target = e.r("add.s32", e.scaled(item, k.strip * k.out_step[1] * PIXEL_BYTES, y), start)
            for (p, q), value in sums.items():
                offset = (p * k.out_step[0] * k.out_pitch + q * k.out_step[1]) * PIXEL_BYTES
                for bias in biases:
                    value = e.f("add.rn.f32", value, bias)
                e.op("st.shared.f32", f"[{target}+{offset}]", value)
    return e.text()


def _strip(e: Emitter, k: LaneWalk, phase: Phase, source: str, w: str) -> dict[tuple[int, int], str]:
    """The sums of a strip's outputs (row, column), from the input at `source`."""
    sums = {(p, q): e.f("mov.f32", "0f00000000") for p in range(k.rows) for q in range(k.strip)}
    columns = phase.column_taps
    if not columns or not phase.row_taps:
        return sums
    if len(columns) <= UNROLLED_COLUMNS:
        _add_columns(e, k, phase, columns, source, w, sums)
        return sums
    (s0, d0), (s1, d1) = columns[:2]
    with e.loop(0, len(columns), 1) as index:
        source = e.scaled(index, (d1 - d0) * PIXEL_BYTES, source)
        _add_columns(e, k, phase, columns[:1], source, e.scaled(index, (s1 - s0) * PIXEL_BYTES, w), sums)
    return sums


def _add_columns(
    e: Emitter,
    k: LaneWalk,
    phase: Phase,
    columns: tuple[tuple[int, int], ...],
    source: str,
    w: str,
    sums: dict[tuple[int, int], str],
) -> None:
    held: dict[tuple[int, int], str] = {}
    for s, across in columns:
        for r, down in phase.row_taps:
            weight = e.f("ld.shared.f32", f"[{w}+{(r * k.filter_columns + s) * PIXEL_BYTES}]")
            for (p, q), total in sums.items():
                at = p * k.in_step[0] + down, q * k.in_step[1] + across
                if at not in held:
                    held[at] = e.f("ld.shared.f32", f"[{source}+{(at[0] * k.in_pitch + at[1]) * PIXEL_BYTES}]")
                e.op("fma.rn.f32", total, held[at], weight, total)


class LaneFilter(FilterTile):
    """The filter gradient of a tile in float32."""

    @property
    def accumulators(self) -> int:
        """Float32 sums that a thread holds."""
        return self.row_taps * self.column_taps


def lane_filter(k: LaneFilter) -> str:
    """The PTX of a tile; operands: the sums (in and out), the input tile and the gradient's tile."""
    e = Emitter()
    n = k.accumulators
    sums = [e.f("mov.f32", f"${i}") for i in range(n)]
    lanes = Lanes(e)
    x, dy = (e.scaled(lanes.lane, 4, e.r("mov.b32", f"${2 * n + i}")) for i in range(2))
    with e.loop(lanes.warp, k.columns, WARPS) as column:
        source = e.scaled(column, k.in_step[1] * PIXEL_BYTES, x)
        gradient = e.scaled(column, PIXEL_BYTES, dy)
        rows = [e.f("ld.shared.f32", f"[{gradient}+{p * k.out_pitch * PIXEL_BYTES}]") for p in range(k.rows)]
        for s in range(k.column_taps):
            held: dict[int, str] = {}
            for p in range(k.rows):
                for r in range(k.row_taps):
                    line = p * k.in_step[0] + r * k.dilation[0]
                    if line not in held:
                        place = (line * k.in_pitch + s * k.dilation[1]) * PIXEL_BYTES
                        held[line] = e.f("ld.shared.f32", f"[{source}+{place}]")
                    total = sums[r * k.column_taps + s]
                    e.op("fma.rn.f32", total, held[line], rows[p], total)
    for i, value in enumerate(sums):
        e.op("mov.f32", f"${i}", value)
    return e.text()


def lane_store(k: LaneFilter) -> str:
    """The PTX that stores the sums as (warps, taps, channels) float32; operands: the sums, the shared address."""
    e = Emitter()
    sums = [e.f("mov.f32", f"${i}") for i in range(k.accumulators)]
    lanes = Lanes(e)
    out = e.scaled(lanes.lane, 4, e.r("mov.b32", f"${k.accumulators}"))
    out = e.scaled(lanes.warp, k.accumulators * PIXEL_BYTES, out)
    for i, value in enumerate(sums):
        e.op("st.shared.f32", f"[{out}+{i * PIXEL_BYTES}]", value)
    return e.text()
