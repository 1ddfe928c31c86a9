"""wgmma of the backward pass: its operands, its products, and what is stored of them, register by register.

Values are arrays in the layout of wgmma's accumulators: of a tile of 64 rows a warp has 16, and lane 4 g + t has in
registers 4 j + 2 h + l the element of row g + 8 h and column 8 j + 2 t + l. Two neighbours rounded to 16 bits are a
register of an operand in registers, so that a result of one product is the left operand of the next without a copy.

A product is issued and left in flight; `wgmma_wait` says when its result, or an operand, may be used.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.core.compat import fa, ir, llvm, mgpu, mma_utils, plgpu, vector
from jaxdnn._src.hopper.cluster import address, scalars
from jaxdnn._src.hopper.ptx import LOADS_DONE
from jaxdnn._src.hopper.wgmma import ACCUMULATOR, inline_mgpu, swizzle_transform, tiling_transform

# Not typed: their signatures differ between JAX releases.
encode_descriptor: Any = mma_utils.encode_descriptor
store_tiled: Any = mgpu.FragmentedArray.store_tiled

THREADS = 256  # of both consumers


def accumulator(rows: int, columns: int, dtype: Any = jnp.float32) -> Any:
    return plgpu.ShapeDtypeStruct((rows, columns), dtype, layout=ACCUMULATOR)


# ---- operands in shared memory ---------------------------------------------------------------------------------------


class Operand:
    """A matrix in shared memory: its descriptor, and for each step of 16 how far further the step's part is."""

    def __init__(self, ref: ir.Value, swizzle: int, *, transposed: bool, depth: int = 0) -> None:
        """ref: (chunks, rows, chunk). `transposed`: the sum is over rows; otherwise over chunks and their columns."""
        ty = ir.MemRefType(ref.type)
        chunks, rows, _ = ty.shape
        strides, _ = ty.get_strides_and_offset()
        apart = 2 * strides[0]
        self.transposed = transposed
        self.base = encode_descriptor(
            ref, leading_byte_offset=apart if transposed and chunks > 1 else 0, stride_byte_offset=8 * swizzle,
            swizzle=swizzle,
        )  # fmt: skip
        if transposed:
            self.steps = [16 * swizzle * i for i in range((depth or rows) // 16)]
        else:
            self.steps = [apart * c + 32 * i for c in range(chunks) for i in range(swizzle // 32)]


def product(acc: Sequence[ir.Value] | None, a: Any, b: Operand, columns: int, dtype: str) -> list[ir.Value]:
    """Issues acc + a b, or a b, as one group. `a` is an operand or the 32-bit registers of one."""
    count, in_registers = columns // 2, not isinstance(a, Operand)
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
            operand, flags = "{" + ", ".join(left[4 * i : 4 * i + 4]) + "}", f"{int(b.transposed)}"
        else:
            lines.append(f"add.s64 x, {left[0]}, {a.steps[i] >> 4};")
            operand, flags = "x", f"{int(a.transposed)}, {int(b.transposed)}"
        lines.append(f"{kind} {{{', '.join(names)}}}, {operand}, y, {adds}, 1, 1, {flags};")
    lines.append("wgmma.commit_group.sync.aligned; }")
    tied = [str(i) for i in range(count)] if acc is not None else []
    constraints = [*["=f"] * count, *tied, *(["r"] * len(given) if in_registers else ["l"]), "l"]
    f32 = ir.F32Type.get()
    operands = [*(acc or []), *given, b.base]
    return several(f32, count, operands, "\n".join(lines), constraints, effects=True)


def several(
    ty: Any, count: int, operands: Sequence[Any], code: str, constraints: Sequence[str], *, effects: bool
) -> list[ir.Value]:
    """The results of PTX that gives several values of one type."""
    text = ",".join([*constraints, *(["~{memory}"] if effects else [])])
    if count == 1:
        return [llvm.inline_asm(ty, list(operands), code, text, has_side_effects=effects)]  # type: ignore[list-item]
    struct = llvm.StructType.get_literal([ty] * count)
    made: Any = llvm.inline_asm(struct, list(operands), code, text, has_side_effects=effects)
    return [llvm.extractvalue(ty, made, [i]) for i in range(count)]


def accumulator_of(values: Sequence[ir.Value], columns: int) -> Any:
    """An array in the accumulators' layout of its registers."""
    ty = ir.VectorType.get((1,), ir.F32Type.get())
    shape = fa.WGMMA_LAYOUT_ACC_32BIT.registers_shape((64, columns))
    registers = np.empty(math.prod(shape), object)
    registers[:] = [vector.from_elements(ty, [value]) for value in values]
    return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=fa.WGMMA_LAYOUT_ACC_32BIT, _is_signed=None)


def swizzled(swizzle: int) -> Any:
    return plgpu.RefType((swizzle_transform(swizzle),))


def scores(a: Any, b: Any, *, swizzle: int) -> Array:
    """Issues a b^T, of references (chunks, 64 rows, chunk) and (chunks, rows, chunk)."""
    columns = b.shape[-2]
    dtype = mma_name(a.dtype)

    @inline_mgpu(arg_types=(swizzled(swizzle), swizzled(swizzle)), return_type=accumulator(64, columns))
    def scores(_: Any, a: Any, b: Any) -> Any:
        left, right = (Operand(x, swizzle, transposed=False) for x in (a, b))
        return accumulator_of(product(None, left, right, columns, dtype), columns)

    return scores(a, b)


def accumulate(acc: Array, a: Any, b: Any, *, swizzle: int) -> Array:
    """Issues acc + a^T b, of references (1, 64 rows, 64) and (chunks, 64 rows, chunk)."""
    columns = acc.shape[1]
    dtype = mma_name(a.dtype)

    @inline_mgpu(arg_types=(ACCUMULATOR, swizzled(128), swizzled(swizzle)), return_type=accumulator(64, columns))
    def accumulate(_: Any, acc: Any, a: Any, b: Any) -> Any:
        left, right = Operand(a, 128, transposed=True), Operand(b, swizzle, transposed=True)
        return accumulator_of(product(scalars(acc), left, right, columns, dtype), columns)

    return accumulate(acc, a, b)


def accumulate_weighted(acc: Array, weights: Array, b: Any, *, swizzle: int) -> Array:
    """Issues acc + w b, of the weights rounded to b's dtype and a reference (chunks, 64 rows, chunk)."""
    columns = acc.shape[1]
    dtype = mma_name(b.dtype)

    @inline_mgpu(arg_types=(ACCUMULATOR, ACCUMULATOR, swizzled(swizzle)), return_type=accumulator(64, columns))
    def accumulate_weighted(_: Any, acc: Any, weights: Any, b: Any) -> Any:
        words = rounded_words(scalars(weights), dtype)
        made = product(scalars(acc), words, Operand(b, swizzle, transposed=True), columns, dtype)
        return accumulator_of(made, columns)

    return accumulate_weighted(acc, weights, b)


def mma_name(dtype: Any) -> str:
    return {"bfloat16": "bf16", "float16": "f16"}[np.dtype(dtype).name]


def rounded_words(values: Sequence[ir.Value], dtype: str) -> list[ir.Value]:
    """Words of two neighbouring values, each rounded to nearest even."""
    i32 = ir.IntegerType.get_signless(32)
    code = f"cvt.rn.{dtype}x2.f32 $0, $2, $1;"
    pairs = zip(values[::2], values[1::2], strict=True)
    return [several(i32, 1, pair, code, ["=r", "f", "f"], effects=False)[0] for pair in pairs]


def waited(acc: Array, pending: int) -> Array:
    """The accumulator once no more than so many groups of products are in flight, for use outside of wgmma."""
    columns = acc.shape[1]

    @inline_mgpu(arg_types=(ACCUMULATOR,), return_type=accumulator(64, columns))
    def waited(_: Any, acc: Any, pending: int = pending) -> Any:
        values = scalars(acc)
        constraints = [*["=f"] * len(values), *map(str, range(len(values)))]
        code = f"wgmma.wait_group.sync.aligned {pending};"
        return accumulator_of(several(ir.F32Type.get(), len(values), values, code, constraints, effects=True), columns)

    return waited(acc)


# ---- through shared memory -------------------------------------------------------------------------------------------


def store_registers(value: Array, buffer: Any) -> None:
    """Stores the registers of a tile of 64 by 64 in shared memory, for the same thread of another warpgroup."""

    @inline_mgpu(arg_types=(ACCUMULATOR, plgpu.RefType(())))
    def store_registers(_: Any, value: Any, buffer: Any) -> None:
        given = scalars(value)
        for i in range(0, len(given), 4):
            code = _own_place("$4") + f" st.shared.v4.f32 [t+{4 * THREADS // 2 * i}], {{$0, $1, $2, $3}}; }}"
            operands = [*given[i : i + 4], address(buffer)]
            void: Any = ir.Type.parse("!llvm.void")
            llvm.inline_asm(void, operands, code, "f,f,f,f,r,~{memory}", has_side_effects=True)

    store_registers(value, buffer)


def received(buffer: Any) -> Array:
    """What the same thread of the other warpgroup has sent; the loads are complete for the copy engine too."""

    @inline_mgpu(arg_types=(plgpu.RefType(()),), return_type=accumulator(64, 64))
    def received(_: Any, buffer: Any) -> Any:
        found = []
        for i in range(0, 32, 4):
            code = _own_place("$4") + f" ld.shared.v4.f32 {{$0, $1, $2, $3}}, [t+{4 * THREADS // 2 * i}]; }}"
            found += several(ir.F32Type.get(), 4, [address(buffer)], code, [*["=&f"] * 4, "r"], effects=True)
        return accumulator_of(found, 64)

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
        words = rounded_words(scalars(value), dtype)
        shape = fa.WGMMA_LAYOUT.registers_shape((64, 64))
        registers = np.empty(math.prod(shape), object)
        registers[:] = [llvm.bitcast(pair, word) for word in words]
        rounded = mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=fa.WGMMA_LAYOUT, _is_signed=None)
        store_tiled(rounded, matrix, swizzle=128, tiling_rank=2)

    store_rounded(value, matrix)
