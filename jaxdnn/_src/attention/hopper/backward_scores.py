"""Between the products of the backward pass: which elements of a tile are seen, P of the scores, and dS of dP.

Every multiplication and addition is an instruction of its own that rounds to nearest.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.attention.hopper.backward_plan import Extent, Spread, Window
from jaxdnn._src.attention.hopper.backward_products import accumulator, accumulator_of, several
from jaxdnn._src.core.compat import ir, llvm, mgpu_utils, plgpu
from jaxdnn._src.hopper.cluster import address, scalars
from jaxdnn._src.hopper.ptx import real
from jaxdnn._src.hopper.wgmma import ACCUMULATOR, NUMBER, inline_mgpu

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Visible:
    """Which elements of a tile of keys by queries are seen: of each key a run of queries.

    Attributes:
      window: which places see each other.
      extent: of the sequence.
      first_key, first_query: of the tile; traced.
      batch, head: of the sequence and its head of queries; traced.
      pairs: references to the arrays that scores or what is seen depend on besides, with how each is spread.
    """

    window: Window
    extent: Extent
    first_key: Any
    first_query: Any
    batch: Any
    head: Any
    pairs: tuple[tuple[Spread, Any], ...] = ()

    @property
    def places(self) -> tuple[Any, ...]:
        x = self.extent
        places = (self.first_key, self.first_query, x.keys, x.queries, x.shift, self.batch, self.head)
        return tuple(jnp.int32(n) for n in places)

    def runs(self, places: Sequence[Any]) -> list[tuple[ir.Value, ir.Value]]:
        """Of both rows of a thread: minus the first query seen plus that of its first column, and how many are seen."""
        i32, w = ir.IntegerType.get_signless(32), self.window
        found = []
        for half in range(2):
            lines = [
                "{ .reg .b32 t, k, d, low, high; .reg .pred p;",
                "mov.u32 t, %tid.x; bfe.u32 k, t, 5, 2; shl.b32 k, k, 4; bfe.u32 d, t, 2, 3; add.s32 k, k, d;",
                f"add.s32 k, k, {8 * half}; add.s32 k, k, $2;  // the key, and where it stands less the first query",
                "sub.s32 d, k, $6; sub.s32 d, d, $3;",
                "mov.s32 low, 0; sub.s32 high, $5, $3;",
            ]
            if w.right is not None:
                lines.append(f"sub.s32 low, d, {w.right};")
            if w.left is not None:
                lines.append(f"add.s32 d, d, {w.left + 1}; min.s32 high, high, d;")
            lines += [
                "setp.ge.s32 p, k, $4; sub.s32 high, high, low; max.s32 high, high, 0;",
                "selp.s32 $1, 0, high, p; and.b32 t, t, 3; shl.b32 t, t, 1; sub.s32 $0, t, low; }",
            ]
            operands = [x.registers.item() for x in places[:5]]
            pair = several(i32, 2, operands, "\n".join(lines), ["=&r", "=&r", *["r"] * 5], effects=False)
            found.append((pair[0], pair[1]))
        return found


def visible(n: int, runs: str, length: str, *, declared: bool = False) -> str:
    """PTX: predicate p, whether element n of a thread is seen."""
    p = "" if declared else ".reg .pred p; "
    return f"{p}.reg .b32 u; add.s32 u, {runs}, {8 * (n // 4) + n % 2}; setp.lt.u32 p, u, {length};"


def probabilities(
    s: Array, rows: Any, factor: float, seen: Visible | None, softcap: float | None = None
) -> tuple[Array, Array]:
    """exp2(x + n) of each column's n in shared memory, 0 of what is not seen; and that times the slope of a cap.

    x is factor s, with a cap (in units of log2(e)) softcap tanh(factor s / softcap), with one rounding to x + n; then
    come the terms of a bias and of slopes, with one rounding each. tanh(a) is 1 - 2 / (1 + exp2(2 log2(e) a)).
    """
    columns, pairs = s.shape[1], seen.pairs if seen else ()
    places = () if seen is None else seen.places
    count = 1 if softcap is None else 2
    types = (ACCUMULATOR, plgpu.RefType(()), *[NUMBER] * len(places), *[plgpu.RefType(())] * len(pairs))

    @inline_mgpu(arg_types=types, return_type=tuple([accumulator(64, columns)] * count))
    def probabilities(_: Any, s: Any, rows: Any, *given: Any) -> Any:
        of_columns, f32 = Columns(rows), ir.F32Type.get()
        found: list[list[ir.Value]] = [[], []]
        runs = seen.runs(given) if seen else None
        spreads = [_Pair(spread, ref, given) for (spread, _), ref in zip(pairs, given[len(places) :], strict=True)]
        for n, value in enumerate(scalars(s)):
            operands, constraints = [value, of_columns.of(n)], ["f", "f"]
            code = "{ .reg .f32 x, w; .reg .pred p; " + _score(factor, softcap, count)
            if runs is not None:
                code += visible(n, f"${count + 2}", f"${count + 3}", declared=True)
                operands += runs[n // 2 % 2]
                constraints += ["r", "r"]
            for pair in spreads:
                text, more, kinds = pair.code(n, count + len(operands))
                code, operands, constraints = code + text, [*operands, *more], [*constraints, *kinds]
            code += " ex2.approx.ftz.f32 x, x;" + (f" selp.f32 x, x, {real(0.0)}, p;" if runs is not None else "")
            code += " mov.f32 $0, x;" + (" mul.rn.f32 $1, x, w;" if count == 2 else "")
            code += f" selp.f32 $1, $1, {real(0.0)}, p; }}" if count == 2 and runs is not None else " }"
            made = several(f32, count, operands, code, [*["=&f"] * count, *constraints], effects=False)
            for own, one in zip(found, made, strict=False):
                own.append(one)
        return tuple(accumulator_of(own, columns) for own in found[:count])

    found = probabilities(s, rows, *places, *(ref for _, ref in pairs))
    return found[0], found[-1]


def _score(factor: float, softcap: float | None, count: int) -> str:
    """PTX: x = factor $s + $n, or with a cap; then w is the cap's slope."""
    s, n = f"${count}", f"${count + 1}"
    if softcap is None:
        return f"fma.rn.f32 x, {s}, {real(factor)}, {n};"
    return (
        f"mul.rn.f32 x, {s}, {real(2 * LOG2_E * factor / softcap)}; ex2.approx.ftz.f32 x, x;"
        f" add.rn.f32 x, x, {real(1.0)}; rcp.approx.ftz.f32 x, x; fma.rn.f32 w, x, {real(-2.0)}, {real(1.0)};"
        f" fma.rn.f32 x, w, {real(softcap)}, {n}; neg.f32 w, w; neg.f32 $0, w; fma.rn.f32 w, w, $0, {real(1.0)};"
    )


class _Pair:
    """An array that scores or what is seen depend on: what an element of a tile takes of it."""

    def __init__(self, spread: Spread, ref: ir.Value, places: Sequence[Any]) -> None:
        """Addresses of the elements of both rows of a thread in its first column; a row's own number at once."""
        self.spread = spread
        i64 = ir.IntegerType.get_signless(64)
        base = llvm.ptrtoint(i64, mgpu_utils.memref_ptr(ref))
        key, query, batch, head = (places[i].registers.item() for i in (0, 1, 5, 6))
        keys = places[2].registers.item()
        along = spread.strides()
        self.step, self.rows = along[2], []
        for half in range(2):
            lines = [
                "{ .reg .b32 t, k, d; .reg .b64 o;",
                "mov.u32 t, %tid.x; bfe.u32 k, t, 5, 2; shl.b32 k, k, 4; bfe.u32 d, t, 2, 3; add.s32 k, k, d;",
                f"add.s32 k, k, {8 * half}; add.s32 k, k, $2; and.b32 t, t, 3; shl.b32 t, t, 1; add.s32 t, t, $3;",
            ]
            constraints = ["l", "r", "r", "r", "r", "r"]
            operands = [base, key, query, batch, head, keys]
            if spread.name == "alibi_slopes":
                lines.append("sub.s32 k, k, t; cvt.rn.f32.s32 $0, k; }")
                f32 = ir.F32Type.get()
                self.rows += several(f32, 1, operands, "\n".join(lines), ["=&f", *constraints], effects=False)
                continue
            lines.append(f"mul.wide.s32 o, $4, {along[0]}; mad.wide.s32 o, $5, {along[1]}, o;")
            lines.append(f"mad.wide.s32 o, t, {along[2]}, o; mad.wide.s32 o, k, {along[3]}, o; add.s64 o, o, $1;")
            if spread.name == "key_segments":  # of keys that there are
                lines.append("{ .reg .pred p; setp.lt.s32 p, k, $6; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [o]; } }")
                i32 = ir.IntegerType.get_signless(32)
                self.rows += several(i32, 1, operands, "\n".join(lines), ["=&r", *constraints], effects=False)
                continue
            lines.append("mov.b64 $0, o; }")
            self.rows += several(i64, 1, operands, "\n".join(lines), ["=&l", *constraints], effects=False)
        self.slope: Any = None
        if spread.name == "alibi_slopes":
            code = f"{{ .reg .b64 o; mul.wide.s32 o, $2, {along[0]}; mad.wide.s32 o, $3, {along[1]}, o;"
            code += " add.s64 o, o, $1; ld.global.nc.f32 $0, [o]; }"
            f32 = ir.F32Type.get()
            self.slope = several(f32, 1, [base, batch, head], code, ["=&f", "l", "r", "r"], effects=False)[0]

    def code(self, n: int, first: int) -> tuple[str, list[ir.Value], list[str]]:
        """PTX that changes x or p of element n, its operands from number `first` on, and their constraints."""
        row, column = self.rows[n // 2 % 2], 8 * (n // 4) + n % 2
        place = f"[${first}+{column * self.step}]"
        match self.spread.name:
            case "alibi_slopes":  # x + slope (j - i)
                text = f" {{ .reg .f32 d; add.rn.f32 d, ${first}, {real(-float(column))};"
                return text + f" fma.rn.f32 x, ${first + 1}, d, x; }}", [row, self.slope], ["f", "f"]
            case "mask":
                text = f" {{ .reg .b32 m; mov.b32 m, 0; @p ld.global.nc.u8 m, {place}; setp.ne.and.s32 p, m, 0, p; }}"
                return text, [row], ["l"]
            case "query_segments":  # `key_segments` follows
                text = f" {{ .reg .b32 m; mov.b32 m, 0; @p ld.global.nc.b32 m, {place};"
                return text + f" setp.eq.and.s32 p, m, ${first + 1}, p; }}", [row], ["l"]
            case "key_segments":
                return "", [row], ["r"]
        text = f" {{ .reg .f32 m; mov.f32 m, {real(0.0)};"
        if self.spread.dtype == "float32":
            text += f" @p ld.global.nc.f32 m, {place};"
        elif self.spread.dtype == "bfloat16":
            text += f" .reg .b32 h; mov.b32 h, 0; @p ld.global.nc.u16 h, {place}; shl.b32 h, h, 16; mov.b32 m, h;"
        else:
            text += f" .reg .b16 h; mov.b16 h, 0; @p ld.global.nc.b16 h, {place}; cvt.f32.f16 m, h;"
        return text + f" fma.rn.f32 x, m, {real(LOG2_E)}, x; }}", [row], ["l"]


def score_gradients(p: Array, dp: Array, rows: Any, seen: Visible | None) -> Array:
    """p (dp - D) of each column's D in shared memory, both rounded; 0 of what is not seen.

    Where more than places decides what is seen, p tells: it is 0 then.
    """
    columns = p.shape[1]
    by_weight = seen is not None and bool(seen.pairs)
    places = () if seen is None or by_weight else seen.places

    @inline_mgpu(
        arg_types=(ACCUMULATOR, ACCUMULATOR, plgpu.RefType(()), *[NUMBER] * len(places)),
        return_type=accumulator(64, columns),
    )
    def score_gradients(_: Any, p: Any, dp: Any, rows: Any, *places: Any) -> Any:
        of_columns = Columns(rows)
        f32, found = ir.F32Type.get(), []
        runs = seen.runs(places) if seen and not by_weight else None
        for n, (weight, value) in enumerate(zip(scalars(p), scalars(dp), strict=True)):
            code = "{ .reg .f32 x; .reg .pred p; sub.rn.f32 x, $2, $3; mul.rn.f32 x, $1, x; "
            given = [] if runs is None else list(runs[n // 2 % 2])
            if by_weight:
                code += f"setp.neu.f32 p, $1, {real(0.0)}; selp.f32 x, x, {real(0.0)}, p; "
            elif runs is not None:
                code += visible(n, "$4", "$5", declared=True) + f"selp.f32 x, x, {real(0.0)}, p; "
            constraints = ["=f", "f", "f", "f", *["r"] * len(given)]
            operands = [weight, value, of_columns.of(n), *given]
            found += several(f32, 1, operands, code + "mov.f32 $0, x; }", constraints, effects=False)
        return accumulator_of(found, columns)

    return score_gradients(p, dp, rows, *places)


class Columns:
    """This thread's elements of a row of floats in shared memory: two neighbours for each eight columns."""

    def __init__(self, rows: ir.Value) -> None:
        code = "{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 3; mad.lo.u32 $0, t, 8, $1; }"
        i32 = ir.IntegerType.get_signless(32)
        self.first = several(i32, 1, [address(rows)], code, ["=r", "r"], effects=False)[0]
        self.loaded: list[ir.Value] = []

    def of(self, n: int) -> ir.Value:
        """That of element n of a thread; loaded when it is first asked for."""
        if n // 4 * 2 == len(self.loaded):
            load = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{32 * (n // 4)}];"
            self.loaded += several(ir.F32Type.get(), 2, [self.first], load, ["=f", "=f", "r"], effects=True)
        return self.loaded[n // 4 * 2 + n % 2]
