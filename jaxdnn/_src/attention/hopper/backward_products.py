"""wgmma of the backward pass, and what is computed between its products, register by register.

Values are arrays in the layout of wgmma's accumulators: of a tile of 64 rows a warp has 16, and lane 4 g + t has in
registers 4 j + 2 h + l the element of row g + 8 h and column 8 j + 2 t + l. Two neighbours rounded to 16 bits are a
register of an operand in registers, so that a result of one product is the left operand of the next without a copy.

A product is issued and left in flight; `wgmma_wait` says when its result, or an operand, may be used. Every
multiplication and addition beside these is an instruction of its own that rounds to nearest.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.attention.hopper.backward_plan import Extent, Spread, Window
from jaxdnn._src.core.compat import fa, ir, llvm, mgpu, mgpu_utils, mma_utils, plgpu, vector
from jaxdnn._src.hopper.cluster import address, scalars
from jaxdnn._src.hopper.ptx import LOADS_DONE, real
from jaxdnn._src.hopper.wgmma import ACCUMULATOR, inline_mgpu, swizzle_transform, tiling_transform

# Not typed: their signatures differ between JAX releases.
encode_descriptor: Any = mma_utils.encode_descriptor
store_tiled: Any = mgpu.FragmentedArray.store_tiled

WARPGROUP = plgpu.Layout.WGMMA
SCAN_BARRIER, REPAIR_BARRIER = 8, 9  # named barriers of both consumers; Mosaic's own are the first ones
THREADS = 256  # of both consumers
LOG2_E = math.log2(math.e)
EXPONENT = {"bf16": 0x7F80, "f16": 0x7C00}  # the bits of a number's exponent; all of them ones if it is not finite


def _accumulator(rows: int, columns: int, dtype: Any = jnp.float32) -> Any:
    return plgpu.ShapeDtypeStruct((rows, columns), dtype, layout=ACCUMULATOR)


# ---- operands in shared memory ---------------------------------------------------------------------------------------


class _Operand:
    """A matrix in shared memory: its descriptor, and for each step of 16 how far further the step's part is."""

    def __init__(self, ref: ir.Value, swizzle: int, *, turned: bool, depth: int = 0) -> None:
        """ref: (chunks, rows, chunk). `turned`: the sum runs along rows; otherwise along chunks and their columns."""
        ty = ir.MemRefType(ref.type)
        chunks, rows, _ = ty.shape
        strides, _ = ty.get_strides_and_offset()
        apart = 2 * strides[0]
        self.turned = turned
        self.base = encode_descriptor(
            ref, leading_byte_offset=apart if turned and chunks > 1 else 0, stride_byte_offset=8 * swizzle,
            swizzle=swizzle,
        )  # fmt: skip
        if turned:
            self.steps = [16 * swizzle * i for i in range((depth or rows) // 16)]
        else:
            self.steps = [apart * c + 32 * i for c in range(chunks) for i in range(swizzle // 32)]


def _product(acc: Sequence[ir.Value] | None, a: Any, b: _Operand, columns: int, dtype: str) -> list[ir.Value]:
    """Issues acc + a b, or a b, as one group. `a` is an operand or the 32-bit registers of one."""
    count, in_registers = columns // 2, not isinstance(a, _Operand)
    given = list(a) if in_registers else [a.base]
    numbers = iter(range(10**6))
    names = [f"${next(numbers)}" for _ in range(count)]
    if acc is not None:
        for _ in range(count):
            next(numbers)
    left = [f"${next(numbers)}" for _ in given]
    right = f"${next(numbers)}"
    lines = ["{ .reg .b64 x, y; .reg .pred p; setp.ne.b32 p, 1, 0;", "wgmma.fence.sync.aligned;"]
    if acc is None:
        lines[0] += " .reg .pred z; setp.ne.b32 z, 0, 0;"
    kind = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype}"
    for i, further in enumerate(b.steps):
        adds = "z" if acc is None and i == 0 else "p"
        lines.append(f"add.s64 y, {right}, {further >> 4};")
        if in_registers:
            operand, flags = "{" + ", ".join(left[4 * i : 4 * i + 4]) + "}", f"{int(b.turned)}"
        else:
            lines.append(f"add.s64 x, {left[0]}, {a.steps[i] >> 4};")
            operand, flags = "x", f"{int(a.turned)}, {int(b.turned)}"
        lines.append(f"{kind} {{{', '.join(names)}}}, {operand}, y, {adds}, 1, 1, {flags};")
    lines.append("wgmma.commit_group.sync.aligned; }")
    tied = [str(i) for i in range(count)] if acc is not None else []
    constraints = [*["=f"] * count, *tied, *(["r"] * len(given) if in_registers else ["l"]), "l"]
    f32 = ir.F32Type.get()
    operands = [*(acc or []), *given, b.base]
    return _several(f32, count, operands, "\n".join(lines), constraints, effects=True)


def _several(
    ty: Any, count: int, operands: Sequence[Any], code: str, constraints: Sequence[str], *, effects: bool
) -> list[ir.Value]:
    """The results of PTX that gives several values of one type."""
    text = ",".join([*constraints, *(["~{memory}"] if effects else [])])
    if count == 1:
        return [llvm.inline_asm(ty, list(operands), code, text, has_side_effects=effects)]  # type: ignore[list-item]
    struct = llvm.StructType.get_literal([ty] * count)
    made: Any = llvm.inline_asm(struct, list(operands), code, text, has_side_effects=effects)
    return [llvm.extractvalue(ty, made, [i]) for i in range(count)]


def _array(values: Sequence[ir.Value], columns: int) -> Any:
    """An array in the accumulators' layout of its registers."""
    ty = ir.VectorType.get((1,), ir.F32Type.get())
    shape = fa.WGMMA_LAYOUT_ACC_32BIT.registers_shape((64, columns))
    registers = np.empty(math.prod(shape), object)
    registers[:] = [vector.from_elements(ty, [value]) for value in values]
    return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=fa.WGMMA_LAYOUT_ACC_32BIT, _is_signed=None)


def _ref(swizzle: int) -> Any:
    return plgpu.RefType((swizzle_transform(swizzle),))


def scores(a: Any, b: Any, *, swizzle: int) -> Array:
    """Issues a b^T, of references (chunks, 64 rows, chunk) and (chunks, rows, chunk)."""
    columns = b.shape[-2]
    dtype = mma_name(a.dtype)

    @inline_mgpu(arg_types=(_ref(swizzle), _ref(swizzle)), return_type=_accumulator(64, columns))
    def scores(_: Any, a: Any, b: Any) -> Any:
        left, right = (_Operand(x, swizzle, turned=False) for x in (a, b))
        return _array(_product(None, left, right, columns, dtype), columns)

    return scores(a, b)


def accumulate(acc: Array, a: Any, b: Any, *, swizzle: int) -> Array:
    """Issues acc + a^T b, of references (1, 64 rows, 64) and (chunks, 64 rows, chunk)."""
    columns = acc.shape[1]
    dtype = mma_name(a.dtype)

    @inline_mgpu(arg_types=(ACCUMULATOR, _ref(128), _ref(swizzle)), return_type=_accumulator(64, columns))
    def accumulate(_: Any, acc: Any, a: Any, b: Any) -> Any:
        left, right = _Operand(a, 128, turned=True), _Operand(b, swizzle, turned=True)
        return _array(_product(scalars(acc), left, right, columns, dtype), columns)

    return accumulate(acc, a, b)


def accumulate_weighted(acc: Array, weights: Array, b: Any, *, swizzle: int) -> Array:
    """Issues acc + w b, of the weights rounded to b's dtype and a reference (chunks, 64 rows, chunk)."""
    columns = acc.shape[1]
    dtype = mma_name(b.dtype)

    @inline_mgpu(arg_types=(ACCUMULATOR, ACCUMULATOR, _ref(swizzle)), return_type=_accumulator(64, columns))
    def accumulate_weighted(_: Any, acc: Any, weights: Any, b: Any) -> Any:
        words = _rounded(scalars(weights), dtype)
        return _array(_product(scalars(acc), words, _Operand(b, swizzle, turned=True), columns, dtype), columns)

    return accumulate_weighted(acc, weights, b)


def mma_name(dtype: Any) -> str:
    return {"bfloat16": "bf16", "float16": "f16"}[np.dtype(dtype).name]


# ---- element by element ----------------------------------------------------------------------------------------------


def _rounded(values: Sequence[ir.Value], dtype: str) -> list[ir.Value]:
    """Words of two neighbouring values, each rounded to nearest even."""
    i32 = ir.IntegerType.get_signless(32)
    code = f"cvt.rn.{dtype}x2.f32 $0, $2, $1;"
    pairs = zip(values[::2], values[1::2], strict=True)
    return [_several(i32, 1, pair, code, ["=r", "f", "f"], effects=False)[0] for pair in pairs]


def waited(acc: Array, pending: int) -> Array:
    """The accumulator once no more than so many groups of products are in flight, for use outside of wgmma."""
    columns = acc.shape[1]

    @inline_mgpu(arg_types=(ACCUMULATOR,), return_type=_accumulator(64, columns))
    def waited(_: Any, acc: Any, pending: int = pending) -> Any:
        values = scalars(acc)
        constraints = [*["=f"] * len(values), *map(str, range(len(values)))]
        code = f"wgmma.wait_group.sync.aligned {pending};"
        return _array(_several(ir.F32Type.get(), len(values), values, code, constraints, effects=True), columns)

    return waited(acc)


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
            pair = _several(i32, 2, operands, "\n".join(lines), ["=&r", "=&r", *["r"] * 5], effects=False)
            found.append((pair[0], pair[1]))
        return found


_SPLAT = plgpu.Layout.WG_SPLAT(())


def _select(n: int, runs: str, length: str, *, declared: bool = False) -> str:
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
    types = (ACCUMULATOR, plgpu.RefType(()), *[_SPLAT] * len(places), *[plgpu.RefType(())] * len(pairs))

    @inline_mgpu(arg_types=types, return_type=tuple([_accumulator(64, columns)] * count))
    def probabilities(_: Any, s: Any, rows: Any, *given: Any) -> Any:
        of_columns, f32 = _Columns(rows), ir.F32Type.get()
        found: list[list[ir.Value]] = [[], []]
        runs = seen.runs(given) if seen else None
        spreads = [_Pair(spread, ref, given) for (spread, _), ref in zip(pairs, given[len(places) :], strict=True)]
        for n, value in enumerate(scalars(s)):
            operands, constraints = [value, of_columns.of(n)], ["f", "f"]
            code = "{ .reg .f32 x, w; .reg .pred p; " + _score(factor, softcap, count)
            if runs is not None:
                code += _select(n, f"${count + 2}", f"${count + 3}", declared=True)
                operands += runs[n // 2 % 2]
                constraints += ["r", "r"]
            for pair in spreads:
                text, more, kinds = pair.code(n, count + len(operands))
                code, operands, constraints = code + text, [*operands, *more], [*constraints, *kinds]
            code += " ex2.approx.ftz.f32 x, x;" + (f" selp.f32 x, x, {real(0.0)}, p;" if runs is not None else "")
            code += " mov.f32 $0, x;" + (" mul.rn.f32 $1, x, w;" if count == 2 else "")
            code += f" selp.f32 $1, $1, {real(0.0)}, p; }}" if count == 2 and runs is not None else " }"
            made = _several(f32, count, operands, code, [*["=&f"] * count, *constraints], effects=False)
            for own, one in zip(found, made, strict=False):
                own.append(one)
        return tuple(_array(own, columns) for own in found[:count])

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
                self.rows += _several(f32, 1, operands, "\n".join(lines), ["=&f", *constraints], effects=False)
                continue
            lines.append(f"mul.wide.s32 o, $4, {along[0]}; mad.wide.s32 o, $5, {along[1]}, o;")
            lines.append(f"mad.wide.s32 o, t, {along[2]}, o; mad.wide.s32 o, k, {along[3]}, o; add.s64 o, o, $1;")
            if spread.name == "key_segments":  # of keys that there are
                lines.append("{ .reg .pred p; setp.lt.s32 p, k, $6; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [o]; } }")
                i32 = ir.IntegerType.get_signless(32)
                self.rows += _several(i32, 1, operands, "\n".join(lines), ["=&r", *constraints], effects=False)
                continue
            lines.append("mov.b64 $0, o; }")
            self.rows += _several(i64, 1, operands, "\n".join(lines), ["=&l", *constraints], effects=False)
        self.slope: Any = None
        if spread.name == "alibi_slopes":
            code = f"{{ .reg .b64 o; mul.wide.s32 o, $2, {along[0]}; mad.wide.s32 o, $3, {along[1]}, o;"
            code += " add.s64 o, o, $1; ld.global.nc.f32 $0, [o]; }"
            f32 = ir.F32Type.get()
            self.slope = _several(f32, 1, [base, batch, head], code, ["=&f", "l", "r", "r"], effects=False)[0]

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
        arg_types=(ACCUMULATOR, ACCUMULATOR, plgpu.RefType(()), *[_SPLAT] * len(places)),
        return_type=_accumulator(64, columns),
    )
    def score_gradients(_: Any, p: Any, dp: Any, rows: Any, *places: Any) -> Any:
        of_columns = _Columns(rows)
        f32, found = ir.F32Type.get(), []
        runs = seen.runs(places) if seen and not by_weight else None
        for n, (weight, value) in enumerate(zip(scalars(p), scalars(dp), strict=True)):
            code = "{ .reg .f32 x; .reg .pred p; sub.rn.f32 x, $2, $3; mul.rn.f32 x, $1, x; "
            given = [] if runs is None else list(runs[n // 2 % 2])
            if by_weight:
                code += f"setp.neu.f32 p, $1, {real(0.0)}; selp.f32 x, x, {real(0.0)}, p; "
            elif runs is not None:
                code += _select(n, "$4", "$5", declared=True) + f"selp.f32 x, x, {real(0.0)}, p; "
            constraints = ["=f", "f", "f", "f", *["r"] * len(given)]
            operands = [weight, value, of_columns.of(n), *given]
            found += _several(f32, 1, operands, code + "mov.f32 $0, x; }", constraints, effects=False)
        return _array(found, columns)

    return score_gradients(p, dp, rows, *places)


class _Columns:
    """This thread's elements of a row of floats in shared memory: two neighbours for each eight columns."""

    def __init__(self, rows: ir.Value) -> None:
        code = "{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 3; mad.lo.u32 $0, t, 8, $1; }"
        i32 = ir.IntegerType.get_signless(32)
        self.first = _several(i32, 1, [address(rows)], code, ["=r", "r"], effects=False)[0]
        self.loaded: list[ir.Value] = []

    def of(self, n: int) -> ir.Value:
        """That of element n of a thread; loaded when it is first asked for."""
        if n // 4 * 2 == len(self.loaded):
            load = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{32 * (n // 4)}];"
            self.loaded += _several(ir.F32Type.get(), 2, [self.first], load, ["=f", "=f", "r"], effects=True)
        return self.loaded[n // 4 * 2 + n % 2]


def hand_over(value: Array, buffer: Any) -> None:
    """Stores the registers of a tile of 64 by 64 in shared memory, for the same thread of another warpgroup."""

    @inline_mgpu(arg_types=(ACCUMULATOR, plgpu.RefType(())))
    def hand_over(_: Any, value: Any, buffer: Any) -> None:
        given = scalars(value)
        for i in range(0, len(given), 4):
            code = _own_place("$4") + f" st.shared.v4.f32 [t+{4 * THREADS // 2 * i}], {{$0, $1, $2, $3}}; }}"
            operands = [*given[i : i + 4], address(buffer)]
            void: Any = ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, operands, code, "f,f,f,f,r,~{memory}", has_side_effects=True)

    hand_over(value, buffer)


def received(buffer: Any) -> Array:
    """What the same thread of the other warpgroup has sent; the loads are complete for the copy engine too."""

    @inline_mgpu(arg_types=(plgpu.RefType(()),), return_type=_accumulator(64, 64))
    def received(_: Any, buffer: Any) -> Any:
        found = []
        for i in range(0, 32, 4):
            code = _own_place("$4") + f" ld.shared.v4.f32 {{$0, $1, $2, $3}}, [t+{4 * THREADS // 2 * i}]; }}"
            found += _several(ir.F32Type.get(), 4, [address(buffer)], code, [*["=&f"] * 4, "r"], effects=True)
        return _array(found, 64)

    return received(buffer)


def loads_done() -> None:
    """Completes this thread's loads from shared memory, before an arrival that lets the copy engine write there."""

    @inline_mgpu(arg_types=())
    def loads_done(_: Any = None) -> None:
        void: Any = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], " ".join(LOADS_DONE), "~{memory}", has_side_effects=True)

    loads_done()


def _own_place(buffer: str) -> str:
    """PTX: t, where a thread's first 16 bytes are."""
    return f"{{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, {THREADS // 2 - 1}; mad.lo.u32 t, t, 16, {buffer};"


def store_rounded(value: Array, matrix: Any) -> None:
    """matrix[...] = value rounded, a tile of 64 by 64 in shared memory."""
    dtype = mma_name(matrix.dtype)
    transforms = tiling_transform((8, 64)), swizzle_transform(128)

    @inline_mgpu(arg_types=(ACCUMULATOR, plgpu.RefType(transforms)))
    def store_rounded(_: Any, value: Any, matrix: Any) -> None:
        element = ir.MemRefType(matrix.type).element_type
        pair = ir.VectorType.get((2,), element)
        words = _rounded(scalars(value), dtype)
        shape = fa.WGMMA_LAYOUT.registers_shape((64, 64))
        registers = np.empty(math.prod(shape), object)
        registers[:] = [llvm.bitcast(pair, word) for word in words]
        rounded = mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=fa.WGMMA_LAYOUT, _is_signed=None)
        store_tiled(rounded, matrix, swizzle=128, tiling_rank=2)

    store_rounded(value, matrix)


# ---- what is not finite, in tiles that some do not see ---------------------------------------------------------------


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
    types = [*[ACCUMULATOR] * 2 * len(sums), *[_ref(swizzle)] * (len(sums) + len(looked_at))]
    types += [plgpu.RefType(()), *[_SPLAT] * len(places)] if places else []

    @inline_mgpu(arg_types=tuple(types), return_type=tuple(_accumulator(64, acc.shape[1]) for acc, _, _ in sums))
    def accumulate_repaired(_: Any, *given: Any) -> Any:
        count, looked = len(sums), len(looked_at)
        accs, weights, refs = (given[i * count : (i + 1) * count] for i in range(3))
        others, rest = given[3 * count : 3 * count + looked], given[3 * count + looked :]
        words = [_rounded(scalars(x), dtype) for x in weights]
        bad = _repair(others, dtype)
        if count == 2:
            words[0] = [_poisoned(a, b, bad, dtype) for a, b in zip(*words, strict=True)]
        elif rest:
            columns, runs = _Columns(rest[0]), seen.runs(rest[1:]) if seen else []
            poisoned = ft.partial(_poisoned_by, columns=columns, runs=runs, bad=bad, dtype=dtype, by_weight=by_weight)
            words[0] = [poisoned(word, n) for n, word in enumerate(words[0])]
        made = []
        for acc, own, ref in zip(accs, words, refs, strict=True):
            product = _product(scalars(acc), own, _Operand(ref, swizzle, turned=True), acc.shape[1], dtype)
            made.append(_array(product, acc.shape[1]))
        return tuple(made)

    accs, weights, refs = zip(*sums, strict=True)
    return accumulate_repaired(*accs, *weights, *refs, *looked_at, *([rows, *places] if places else []))


def _poisoned_by(
    word: ir.Value, n: int, columns: "_Columns", runs: Any, bad: ir.Value, dtype: str, *, by_weight: bool
) -> ir.Value:
    """A word of two neighbours, NaN where they are seen and their columns' number is not finite, if `bad` is not 0."""
    nan = {"bf16": 0x7FC0, "f16": 0x7E00}[dtype]
    first = 4 * (n // 2)
    lines = ["{ .reg .pred q; .reg .f32 x; mov.b32 $0, $1;"]
    for half in range(2):
        lines.append("{ " + _select(first + half, "$5", "$6"))
        lines.append(f"setp.ne.and.s32 p, $4, 0, p; abs.f32 x, ${2 + half}; setp.lt.f32 q, x, 0f7F800000;")
        lines.append("not.pred q, q; and.pred p, p, q;")
        if by_weight:
            lines.append(f"and.b32 u, $1, {0x7FFF << 16 * half}; setp.ne.and.u32 p, u, 0, p;")
        lines.append(f"@p or.b32 $0, $0, {nan << 16 * half}; }}")
    given = [word, columns.of(first), columns.of(first + 1), bad, *runs[n % 2]]
    constraints = ["=&r", "r", "f", "f", "r", "r", "r"]
    i32 = ir.IntegerType.get_signless(32)
    return _several(i32, 1, given, "\n".join([*lines, "}"]), constraints, effects=False)[0]


def _poisoned(word: ir.Value, other: ir.Value, bad: ir.Value, dtype: str) -> ir.Value:
    """A word of two numbers, NaN where the other one's is not finite and `bad` is not 0."""
    ones, nan = EXPONENT[dtype], {"bf16": 0x7FC0, "f16": 0x7E00}[dtype]
    lines = ["{ .reg .pred p, q; .reg .b32 t; setp.ne.s32 p, $3, 0; mov.b32 $0, $1;"]
    for shift in (0, 16):
        lines.append(f"and.b32 t, $2, {ones << shift}; setp.eq.and.u32 q, t, {ones << shift}, p;")
        lines.append(f"@q or.b32 $0, $0, {nan << shift};")
    i32 = ir.IntegerType.get_signless(32)
    constraints = ["=&r", "r", "r", "r"]
    return _several(i32, 1, [word, other, bad], "\n".join([*lines, "}"]), constraints, effects=False)[0]


def repair(matrix: Any) -> None:
    """Replaces by 0 what is not finite in a matrix in shared memory, which both warpgroups of a block call."""
    dtype, swizzle = mma_name(matrix.dtype), 2 * matrix.shape[-1]

    @inline_mgpu(arg_types=(_ref(swizzle),))
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
    return _several(i32, 1, operands, "\n".join(lines), ["=&r", *["r"] * len(refs)], effects=True)[0]
