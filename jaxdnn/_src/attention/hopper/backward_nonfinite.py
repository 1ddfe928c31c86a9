"""Products of the backward pass with rows that are not finite, in tiles of which a key may not see a query."""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

from jax import Array

from jaxdnn._src.attention.hopper.backward_products import (
    THREADS,
    Operand,
    accumulator,
    accumulator_of,
    mma_name,
    product,
    rounded_words,
    several,
    swizzled,
)
from jaxdnn._src.attention.hopper.backward_scores import Columns, Visible, visible
from jaxdnn._src.core.compat import ir, plgpu
from jaxdnn._src.hopper.cluster import address, scalars
from jaxdnn._src.hopper.wgmma import ACCUMULATOR, NUMBER, inline_mgpu

SCAN_BARRIER, REPAIR_BARRIER = 8, 9  # named barriers of both consumers; Mosaic's own are the first ones
EXPONENT = {"bf16": 0x7F80, "f16": 0x7C00}  # the bits of a number's exponent; all of them ones if it is not finite


def accumulate_repaired(
    sums: Sequence[tuple[Array, Array, Any]],
    looked_at: Sequence[Any],
    *,
    swizzle: int,
    rows: Any = None,
    seen: Visible | None = None,
) -> tuple[Array, ...]:
    """Issues acc + w b for each (acc, w, b), of a tile of which a key may not see a query.

    There the weights are 0, and 0 times NaN is NaN. So the warpgroups of a block, which have finished their products
    with all of q and dy, `looked_at`, look for elements that are not finite. If there are any, these become 0, and a
    weight of dy becomes NaN if it is seen and its row of dy has such an element. Whether it has is taken from dS, if
    the second sum has that for weights, or else from D in `rows`: neither is finite then. (A row of q with such an
    element has made P and dS NaN, or 0 by a score of minus infinity.)
    """
    dtype, places = mma_name(looked_at[0].dtype), seen.places if seen and rows is not None else ()
    by_weight = bool(seen and seen.pairs)
    types = [*[ACCUMULATOR] * 2 * len(sums), *[swizzled(swizzle)] * (len(sums) + len(looked_at))]
    types += [plgpu.RefType(()), *[NUMBER] * len(places)] if places else []

    @inline_mgpu(arg_types=tuple(types), return_type=tuple(accumulator(64, acc.shape[1]) for acc, _, _ in sums))
    def accumulate_repaired(_: Any, *given: Any) -> Any:
        count, looked = len(sums), len(looked_at)
        accs, weights, refs = (given[i * count : (i + 1) * count] for i in range(3))
        others, rest = given[3 * count : 3 * count + looked], given[3 * count + looked :]
        words = [rounded_words(scalars(x), dtype) for x in weights]
        bad = _repair(others, dtype)
        if count == 2:
            words[0] = [_poisoned(a, b, bad, dtype) for a, b in zip(*words, strict=True)]
        elif rest:
            columns, runs = Columns(rest[0]), seen.runs(rest[1:]) if seen else []
            poisoned = ft.partial(_poisoned_by, columns=columns, runs=runs, bad=bad, dtype=dtype, by_weight=by_weight)
            words[0] = [poisoned(word, n) for n, word in enumerate(words[0])]
        made = []
        for acc, own, ref in zip(accs, words, refs, strict=True):
            values = product(scalars(acc), own, Operand(ref, swizzle, transposed=True), acc.shape[1], dtype)
            made.append(accumulator_of(values, acc.shape[1]))
        return tuple(made)

    accs, weights, refs = zip(*sums, strict=True)
    return accumulate_repaired(*accs, *weights, *refs, *looked_at, *([rows, *places] if places else []))


def _poisoned_by(
    word: ir.Value, n: int, columns: "Columns", runs: Any, bad: ir.Value, dtype: str, *, by_weight: bool
) -> ir.Value:
    """A word of two neighbours, NaN where they are seen and their columns' number is not finite, if `bad` is not 0."""
    nan = {"bf16": 0x7FC0, "f16": 0x7E00}[dtype]
    first = 4 * (n // 2)
    lines = ["{ .reg .pred q; .reg .f32 x; mov.b32 $0, $1;"]
    for half in range(2):
        lines.append("{ " + visible(first + half, "$5", "$6"))
        lines.append(f"setp.ne.and.s32 p, $4, 0, p; abs.f32 x, ${2 + half}; setp.lt.f32 q, x, 0f7F800000;")
        lines.append("not.pred q, q; and.pred p, p, q;")
        if by_weight:
            lines.append(f"and.b32 u, $1, {0x7FFF << 16 * half}; setp.ne.and.u32 p, u, 0, p;")
        lines.append(f"@p or.b32 $0, $0, {nan << 16 * half}; }}")
    given = [word, columns.of(first), columns.of(first + 1), bad, *runs[n % 2]]
    constraints = ["=&r", "r", "f", "f", "r", "r", "r"]
    i32 = ir.IntegerType.get_signless(32)
    return several(i32, 1, given, "\n".join([*lines, "}"]), constraints, effects=False)[0]


def _poisoned(word: ir.Value, other: ir.Value, bad: ir.Value, dtype: str) -> ir.Value:
    """A word of two numbers, NaN where the other one's is not finite and `bad` is not 0."""
    ones, nan = EXPONENT[dtype], {"bf16": 0x7FC0, "f16": 0x7E00}[dtype]
    lines = ["{ .reg .pred p, q; .reg .b32 t; setp.ne.s32 p, $3, 0; mov.b32 $0, $1;"]
    for shift in (0, 16):
        lines.append(f"and.b32 t, $2, {ones << shift}; setp.eq.and.u32 q, t, {ones << shift}, p;")
        lines.append(f"@q or.b32 $0, $0, {nan << shift};")
    i32 = ir.IntegerType.get_signless(32)
    constraints = ["=&r", "r", "r", "r"]
    return several(i32, 1, [word, other, bad], "\n".join([*lines, "}"]), constraints, effects=False)[0]


def repair(matrix: Any) -> None:
    """Replaces by 0 what is not finite in a matrix in shared memory, which both warpgroups of a block call."""
    dtype, swizzle = mma_name(matrix.dtype), 2 * matrix.shape[-1]

    @inline_mgpu(arg_types=(swizzled(swizzle),))
    def repair(_: Any, matrix: Any) -> None:
        _repair([matrix], dtype)

    repair(matrix)


def _repair(refs: Sequence[ir.Value], dtype: str) -> ir.Value:
    """1 if anything was not finite, else 0; the same in all threads of both warpgroups."""
    mask = EXPONENT[dtype]
    sizes = [2 * math.prod(ir.MemRefType(ref.type).shape) for ref in refs]
    lines = ["{ .reg .pred p, q; .reg .b32 a, e, o, t; .reg .b32 w<4>; mov.b32 o, 0;"]

    def each(do: Sequence[str], name: str) -> list[str]:
        found = []
        for i, size in enumerate(sizes):
            found += [f"mov.u32 a, %tid.x; and.b32 a, a, {THREADS - 1}; mad.lo.u32 a, a, 16, ${i + 1};"]
            found += [f"add.u32 e, ${i + 1}, {size};", f"{name}{i}: setp.ge.u32 p, a, e; @p bra {name}E{i};"]
            found += ["ld.shared.v4.b32 {w0, w1, w2, w3}, [a];", *do]
            found += [f"add.u32 a, a, {16 * THREADS}; bra {name}{i};", f"{name}E{i}:"]
        return found

    look, clear = [], []
    for k in range(4):
        for part, kept in ((mask, "0xFFFF0000"), (mask << 16, "0x0000FFFF")):
            look += [f"and.b32 t, w{k}, {part}; setp.eq.u32 q, t, {part}; selp.b32 t, 1, 0, q; or.b32 o, o, t;"]
            clear += [f"and.b32 t, w{k}, {part}; setp.eq.u32 q, t, {part}; @q and.b32 w{k}, w{k}, {kept};"]
    clear += ["st.shared.v4.b32 [a], {w0, w1, w2, w3};"]
    lines += each(look, "S")
    lines += ["setp.ne.u32 q, o, 0;", f"barrier.cta.red.or.pred p, {SCAN_BARRIER}, {THREADS}, q;"]
    lines += ["selp.b32 $0, 1, 0, p; @!p bra DONE;"]
    lines += each(clear, "C")
    lines += ["fence.proxy.async.shared::cta;", f"barrier.cta.sync {REPAIR_BARRIER}, {THREADS};", "DONE: }"]
    i32 = ir.IntegerType.get_signless(32)
    operands = [address(ref) for ref in refs]
    return several(i32, 1, operands, "\n".join(lines), ["=&r", *["r"] * len(refs)], effects=True)[0]
