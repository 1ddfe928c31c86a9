"""Depthwise convolution by float32 fused multiply-adds: the PTX that a warp runs over a tile in shared memory.

A lane computes one float32 channel, or two neighbouring 16-bit channels; a warp computes a strip of one or two columns
with all rows of a block. An input value, once read, is used for every tap row. Order of additions for one output: from
zero, tap columns from left to right, and in each the tap rows downwards (by offset in the input tile), by one fused
multiply-add each, with one rounding at the end. 16-bit products are exact in float32, so that fusing changes nothing.

In the filter gradient, too, the warps share the columns of a tile and process the rows downwards; each warp has its own
sum for every tap.
"""

import dataclasses

from jaxdnn._src.conv.hopper.depthwise.ptx import Lanes
from jaxdnn._src.conv.hopper.depthwise.walk import UNROLLED_COLUMNS, Phase
from jaxdnn._src.hopper.ptx import Emitter

PIXEL_BYTES = 128  # one pixel of the tile: 32 lanes of 4 bytes


@dataclasses.dataclass(frozen=True)
class LaneWalk:
    """Forward or backward data of one tile; the fields are those of `walk.Walk`."""

    dtype: str
    filter_columns: int
    in_pitch: int
    out_pitch: int
    in_step: tuple[int, int]
    out_step: tuple[int, int]
    rows: int
    columns: int
    phases: tuple[Phase, ...]
    warps: int = 4
    bias: bool = False

    @property
    def strip(self) -> int:
        """Columns that a warp computes at a time."""
        return 2 if self.dtype == "f32" and self.columns % 2 == 0 else 1


def _load(e: Emitter, dtype: str, place: str) -> list[str]:
    """The lane's values at a shared address, in float32."""
    if dtype == "f32":
        return [e.f("ld.shared.f32", place)]
    word = e.r("ld.shared.b32", place)
    if dtype == "bf16":
        return [e.f("mov.b32", e.r("shl.b32", word, 16)), e.f("mov.b32", e.r("and.b32", word, "0xffff0000"))]
    halves = [e.new("h"), e.new("h")]
    e.op("mov.b32", halves, word)
    return [e.f("cvt.f32.f16", half) for half in halves]


def lane_walk(k: LaneWalk) -> str:
    """The PTX of a forward or backward-data tile; operands as those of `walk.walk`."""
    e = Emitter()
    x, w, y, *biases = (e.r("mov.b32", f"${i}") for i in range(3 + k.bias))
    lanes = Lanes(e)
    x, w, y = (e.scaled(lanes.lane, 4, base) for base in (x, w, y))
    width = 1 if k.dtype == "f32" else 2
    biases = [e.scaled(lanes.lane, 4 * width, base) for base in biases]
    biases = [e.f("ld.shared.f32", f"[{base}+{4 * i}]") for base in biases for i in range(width)]
    for phase in k.phases:
        with e.loop(lanes.warp, k.columns // k.strip, k.warps) as item:
            source = e.scaled(item, k.strip * k.in_step[1] * PIXEL_BYTES, x)
            sums = _strip(e, k, phase, source, w)
            start = (phase.start[0] * k.out_pitch + phase.start[1]) * PIXEL_BYTES
            target = e.r("add.s32", e.scaled(item, k.strip * k.out_step[1] * PIXEL_BYTES, y), start)
            for (p, q), values in sums.items():
                offset = (p * k.out_step[0] * k.out_pitch + q * k.out_step[1]) * PIXEL_BYTES
                if k.bias:
                    values = [e.f("add.rn.f32", value, bias) for value, bias in zip(values, biases, strict=True)]
                if k.dtype == "f32":
                    e.op("st.shared.f32", f"[{target}+{offset}]", values[0])
                else:
                    packed = e.r(f"cvt.rn.{k.dtype}x2.f32", values[1], values[0])
                    e.op("st.shared.b32", f"[{target}+{offset}]", packed)
    return e.text()


def _strip(e: Emitter, k: LaneWalk, phase: Phase, source: str, w: str) -> dict[tuple[int, int], list[str]]:
    """The sums of a strip's outputs (row, column), from the input at `source`."""
    width = 1 if k.dtype == "f32" else 2
    zero = "0f00000000"
    outputs = [(p, q) for p in range(k.rows) for q in range(k.strip)]
    sums = {at: [e.f("mov.f32", zero) for _ in range(width)] for at in outputs}
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
    sums: dict[tuple[int, int], list[str]],
) -> None:
    held: dict[tuple[int, int], list[str]] = {}
    for s, across in columns:
        for r, down in phase.row_taps:
            weights = _load(e, k.dtype, f"[{w}+{(r * k.filter_columns + s) * PIXEL_BYTES}]")
            for (p, q), values in sums.items():
                at = p * k.in_step[0] + down, q * k.in_step[1] + across
                if at not in held:
                    held[at] = _load(e, k.dtype, f"[{source}+{(at[0] * k.in_pitch + at[1]) * PIXEL_BYTES}]")
                for total, value, weight in zip(values, held[at], weights, strict=True):
                    e.op("fma.rn.f32", total, value, weight, total)


@dataclasses.dataclass(frozen=True)
class LaneFilter:
    """The float32 filter gradient of one tile; the fields are those of `filter.FilterWalk`."""

    in_pitch: int
    out_pitch: int
    in_step: tuple[int, int]
    dilation: tuple[int, int]
    row_taps: int
    column_taps: int
    rows: int
    columns: int
    warps: int = 4

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
    with e.loop(lanes.warp, k.columns, k.warps) as column:
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
