"""The backward pass of attention on Hopper: of each query D = Σ dy y - dL, and its L in base 2. PTX text.

A few lanes share a row: each loads a vector of 16 bytes of dy and of y, multiplies, adds the eight products pairwise,
((0+1)+(2+3))+..., and the lanes' sums are added by exchanges at distances from the largest to 1. So the order depends
on the number of features alone.

The same by `hopper.lanes`, in blocks of 128 threads, had the same bits and 0.92 and 0.94 of the speed on an H200 (128
features, and 64 with heads first; benchmarks/notes-attention-gradient.md); no profile has shown why.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn._src.attention.hopper.backward_plan import TILE, Problem
from jaxdnn._src.hopper.launch import launch
from jaxdnn._src.hopper.ptx import VECTOR_BYTES, Emitter, pairwise, real
from jaxdnn._src.hopper.sizes import ceil_div

LOG2_E = 1.4426950408889634
THREADS = 256
NEGATIVE_INFINITY = real(float("-inf"))


def run(dy: Array, y: Array, dlse: Array, lse: Array, problem: Problem) -> Array:
    """(heads of queries of all sequences, 2, tiles of queries times 64): minus L log2(e), and D.

    What stands behind the last query is not written. Of a row that saw nothing L is taken for 0.
    """
    p = problem
    rows = p.batch * p.heads * p.queries
    blocks = ceil_div(rows * lanes(p), THREADS)
    out = jax.ShapeDtypeStruct((p.batch * p.heads, 2, p.query_tiles * TILE), jnp.float32)
    return launch(code(p), [dy, y, dlse, lse], [out], name="attention_rows", blocks=blocks, threads=THREADS)[0]


def lanes(p: Problem) -> int:
    """How many lanes share a row."""
    found = 1
    while found * VECTOR_BYTES // 2 < p.values:
        found *= 2
    return found


def code(p: Problem) -> str:
    e, many, padded = Emitter(), lanes(p), p.query_tiles * TILE
    dtype = {"bfloat16": "bf16", "float16": "f16"}[p.dtype.name]
    dy, y, dlse, lse, out = (e.d("mov.b64", f"${i}") for i in range(5))
    thread = e.scaled(e.r("mov.u32", "%ctaid.x"), THREADS, e.r("mov.u32", "%tid.x"))
    row, lane = e.r("shr.u32", thread, many.bit_length() - 1), e.r("and.b32", thread, many - 1)
    exists = e.p("setp.lt.u32", row, p.batch * p.heads * p.queries)
    loads = e.both(exists, e.p("setp.lt.u32", lane, p.values // 8))
    at = e.d("mad.wide.u32", row, 2 * p.values, e.d("mul.wide.u32", lane, VECTOR_BYTES))
    parts = [_vector(e, dtype, e.d("add.s64", x, at), loads) for x in (dy, y)]
    products = [e.f("mul.rn.f32", a, b) for a, b in zip(*parts, strict=True)]
    total = e.over_lanes(pairwise(lambda a, b: e.f("add.rn.f32", a, b), products), many // 2)
    writes = e.both(exists, e.p("setp.eq.u32", lane, 0))
    of_lse, of_dlse = (_float(e, x, row, writes) for x in (lse, dlse))
    shown = e.f("mul.rn.f32", of_lse, real(-LOG2_E))
    shown = e.f("selp.f32", real(0.0), shown, e.p("setp.eq.f32", of_lse, NEGATIVE_INFINITY))
    head, query = _place(e, p, row)
    target = e.d("add.s64", out, e.d("mul.wide.u32", head, 8 * padded))
    target = e.d("mad.wide.u32", query, 4, target)
    e.op("st.global.f32", f"[{target}]", shown, when=writes)
    e.op("st.global.f32", f"[{target}+{4 * padded}]", e.f("sub.rn.f32", total, of_dlse), when=writes)
    return e.text()


def _vector(e: Emitter, dtype: str, place: str, when: str) -> list[str]:
    words = [e.r("mov.b32", 0) for _ in range(4)]
    e.op("ld.global.nc.v4.b32", words, f"[{place}]", when=when)
    return e.unpack(dtype, words)


def _float(e: Emitter, array: str, row: str, when: str) -> str:
    found = e.f("mov.f32", real(0.0))
    e.op("ld.global.nc.f32", found, f"[{e.d('mad.wide.u32', row, 4, array)}]", when=when)
    return found


def _place(e: Emitter, p: Problem, row: str) -> tuple[Any, Any]:
    """(head of all sequences, query) of a row in the call's layout."""
    if p.heads_first:
        head = e.r("div.u32", row, p.queries)
        return head, e.r("sub.s32", row, e.scaled(head, p.queries))
    before = e.r("div.u32", row, p.heads)
    head = e.r("sub.s32", row, e.scaled(before, p.heads))
    batch = e.r("div.u32", before, p.queries)
    return e.scaled(batch, p.heads, head), e.r("sub.s32", before, e.scaled(batch, p.queries))
