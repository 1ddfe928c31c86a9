"""Adds the partial sums of a depthwise filter gradient, one thread for each element of the result. PTX text.

The partial sums are few and small, and still in the L2 cache from the previous launch. For speed, all loads of an
element are issued before the first addition, and the elements are distributed over many blocks.

Order of additions: one partial sum after another, from the first.
"""

import dataclasses

from jaxdnn._src.hopper.ptx import SIZES, Emitter

THREADS = 128  # of a block
_AHEAD = 32  # loads in flight at a time, each with a register


@dataclasses.dataclass(frozen=True)
class Terms:
    """Partial sums, float32, and the result.

    Attributes:
      many: the number of partial sums.
      size: elements of a partial sum, which has `rows` rows or more.
      pitch: elements of a row of a partial sum.
      rows, width: of the result; `width` is at most `pitch`.
      dtype: of the result: "bf16", "f16" or "f32".
    """

    many: int
    size: int
    pitch: int
    rows: int
    width: int
    dtype: str


def add_terms(k: Terms, blocks: int) -> str:
    """The PTX; operands: the partial sums, the result (global addresses)."""
    e = Emitter()
    terms, out = (e.d("mov.b64", f"${i}") for i in range(2))
    first = e.r("mad.lo.s32", e.r("mov.u32", "%ctaid.x"), THREADS, e.r("mov.u32", "%tid.x"))
    with e.loop(first, k.rows * k.width, blocks * THREADS) as index:
        at = index
        if k.pitch != k.width:
            at = e.scaled(e.r("div.u32", index, k.width), k.pitch - k.width, index)
        place = e.d("mad.wide.u32", at, 4, terms)
        total = ""
        for start in range(0, k.many, _AHEAD):
            some = range(start, min(k.many, start + _AHEAD))
            for value in [e.f("ld.global.b32", f"[{place}+{4 * i * k.size}]") for i in some]:
                total = e.f("add.rn.f32", total, value) if total else value
        target = e.d("mad.wide.u32", index, SIZES[k.dtype], out)
        if k.dtype == "f32":
            e.op("st.global.b32", f"[{target}+0]", total)
        else:
            half = e.new("h")
            e.op(f"cvt.rn.{k.dtype}.f32", half, total)
            e.op("st.global.b16", f"[{target}+0]", half)
    return e.text()
