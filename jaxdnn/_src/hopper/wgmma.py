"""wgmma on boxes of pixels: accumulators, and operands that Pallas' own wgmma does not support.

A box that TMA wrote with a swizzle as wide as its rows is a matrix that wgmma can read, with a row for each pixel; only
the descriptor differs from Pallas'. A descriptor has the distances between groups of eight rows, so that an operand may
also be part of a larger box (a halo), or overlap itself (a window). An accumulator is a value here that may be in
flight between calls, as the references of Pallas are: only `multiply` may use it before `finish_accumulator`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.core.compat import fa, ir, llvm, mgpu, mgpu_utils, mma_utils, plgpu, wgmma_m64

# Not typed: their signatures differ between JAX releases; the arguments used here are common to 0.11 and 0.12.
inline_mgpu: Any = plgpu.inline_mgpu
swizzle_transform: Any = plgpu.SwizzleTransform
tiling_transform: Any = plgpu.TilingTransform
_store_tiled: Any = mgpu.FragmentedArray.store_tiled
_one_wgmma: Any = wgmma_m64
_create_descriptor: Any = mma_utils.create_descriptor
_encode_descriptor: Any = mma_utils.encode_descriptor

ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT  # the layout whose registers wgmma takes as they are
NUMBER = plgpu.Layout.WG_SPLAT(())  # the layout of one number that all threads of a warpgroup have


def tiled_view(ref: ir.Value, shape: Sequence[int], strides: Sequence[int]) -> ir.Value:
    """Shared memory seen as the 4-d tiled matrix that wgmma's descriptors are made from."""
    ty = ir.MemRefType(ref.type)
    layout = ir.StridedLayoutAttr.get(0, list(strides))
    return mgpu_utils.ptr_as_memref(
        mgpu_utils.memref_ptr(ref), ir.MemRefType.get(list(shape), ty.element_type, layout, ty.memory_space)
    )


def ptx(instruction: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], instruction, "", has_side_effects=True)


def start_accumulator(rows: int, columns: int, dtype: Any) -> Array:
    """An accumulator of zeros that wgmma may write."""

    @inline_mgpu(return_type=plgpu.ShapeDtypeStruct((rows, columns), dtype, layout=ACCUMULATOR))
    def start(_):
        element = mgpu_utils.dtype_to_ir_type(dtype)
        signed = True if jnp.issubdtype(dtype, jnp.integer) else None
        return mgpu.WGMMAAccumulator.zero(rows, columns, element, is_signed=signed)._value

    return start()


def finish_accumulator(acc: Array) -> Array:
    """The accumulator's value, after waiting for all products issued so far."""

    @inline_mgpu(
        arg_types=(ACCUMULATOR,),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=plgpu.Layout.WGMMA),
    )
    def finish(_, acc):
        ptx("wgmma.wait_group.sync.aligned 0;")
        return fa.optimization_barrier(acc).to_layout(fa.WGMMA_LAYOUT)  # keeps uses after the wait

    return finish(acc)


def store(value: Array, matrix: Any) -> None:
    """matrix[...] = value, in shared memory tiled by eight rows of a swizzle's width.

    A store of Pallas is an exchange, for which it also writes the load of what was there. That is a tenth of the time
    that a convolution takes to lower.
    """
    width = value.shape[1] * value.dtype.itemsize
    transforms = tiling_transform((8, value.shape[1])), swizzle_transform(width)

    @inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(transforms)))
    def stored(_: Any, value: Any, matrix: Any) -> None:
        _store_tiled(value, matrix, swizzle=width, tiling_rank=2)

    stored(value, matrix)


def multiply(acc: Array, a: Any, b: Any, *, swizzle: int, a_major: str, b_major: str) -> Array:
    """Issues acc += a @ b and leaves it in flight. Operands are boxes of whole swizzled rows in shared memory.

    A "k"-major operand is (rows..., chunk); an "mn"-major one (chunks of rows, reduction..., chunk); a "halo" one is
    "k"-major and part of a larger box from any row on, which works because the hardware swizzles by address.
    """
    rows, columns = acc.shape
    ref_type = lambda: plgpu.RefType((swizzle_transform(swizzle),))
    if a_major == "window":
        return _multiply_window(acc, a, b, swizzle=swizzle, b_major=b_major)

    @inline_mgpu(
        arg_types=(ACCUMULATOR, ref_type(), ref_type()),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=ACCUMULATOR),
    )
    def product(_: Any, acc: Any, a: Any, b: Any) -> Any:
        right = _operand(b, columns, b_major, swizzle, lhs=False)
        halo = a_major == "halo"
        pieces = _halo_operands(a, swizzle) if halo else [_operand(a, rows, a_major, swizzle, lhs=True)]
        acc, height = acc.copy(), rows // len(pieces)
        for i, left in enumerate(pieces):
            part = (slice(i * height, (i + 1) * height), slice(0, columns))
            state = mgpu.WGMMAAccumulator(_value=acc[part], _original_layout=fa.WGMMA_LAYOUT, _sync=False)
            acc[part] = mgpu.wgmma(state, left, right, swizzle=swizzle)._value
        ptx("wgmma.commit_group.sync.aligned;")
        return acc

    return product(acc, a, b)


def _multiply_window(acc: Array, a: Any, b: Any, *, swizzle: int, b_major: str) -> Array:
    """acc += a @ b where row i of a is the run of cells from cell i of a box (1 or 2, images, ..., cells, 8) on.

    With two boxes the last cell of a run comes from the second one.

    The rows overlap: without a swizzle wgmma reads units of eight rows by 16 bytes at arbitrary distances, here one
    cell to the next row and one cell to the next 16 bytes of the reduction. So the im2col matrix is never materialised.
    """
    columns = acc.shape[1]

    @inline_mgpu(
        arg_types=(ACCUMULATOR, plgpu.RefType(()), plgpu.RefType((swizzle_transform(swizzle),))),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, layout=ACCUMULATOR),
    )
    def product(_: Any, acc: Any, a: Any, b: Any) -> Any:
        element = ir.MemRefType(b.type).element_type
        chunk = swizzle // mgpu_utils.bytewidth(element)
        (b_base, (_, b_steps)), _, b_fastest = _create_descriptor(
            _operand(b, columns, b_major, swizzle, lhs=False),
            swizzle=swizzle,
            large_tile=(chunk, chunk),
            group_size=(chunk, columns),
            logical_k_major=True,
        )
        ty = ir.MemRefType(a.type)
        partial = 2 * ty.get_strides_and_offset()[0][0] if ty.shape[0] == 2 else 0  # bytes from the first box to it
        registers = acc.registers.copy()
        for piece, index in enumerate(np.ndindex(*ty.shape[1:-2], (ty.shape[-2] - 8) // 64)):
            *lead, block = (int(i) for i in index)
            for pair in range(chunk // 16):
                rows = mgpu_utils.memref_slice(a, (0, *lead, mgpu_utils.ds(block * 64 + 2 * pair, 64)))
                last = partial if pair == chunk // 16 - 1 else 0
                registers[piece : piece + 1] = _one_wgmma(
                    registers[piece : piece + 1],
                    _encode_descriptor(rows, leading_byte_offset=16 + last, stride_byte_offset=128, swizzle=None),
                    _llvm_add(b_base, mgpu_utils.c(pair * b_steps[0] >> 4, ir.IntegerType.get_signless(64))),
                    a_transpose=False,
                    b_transpose=b_fastest != mma_utils.Dim.K,
                    a_k_stride=32,
                    b_k_stride=b_steps[0],
                    n=columns,
                    swizzle=32,  # one instruction: 16 products deep
                    a_element_type=element,
                    b_element_type=element,
                )
        ptx("wgmma.commit_group.sync.aligned;")
        return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=acc.is_signed)

    return product(acc, a, b)


def _llvm_add(a: Any, b: Any) -> Any:
    return llvm.add(a, b, overflow_flags=llvm.IntegerOverflowFlags.none)


def _operand(ref: ir.Value, extent: int, major: str, swizzle: int, *, lhs: bool) -> ir.Value:
    """A whole buffer as wgmma's operand: `extent` rows (or columns) by the buffer's part of the reduction."""
    ty = ir.MemRefType(ref.type)
    chunk = swizzle // mgpu_utils.bytewidth(ty.element_type)
    if major == "k":
        shape, strides = (extent // 8, 1, 8, chunk), (8 * chunk, chunk, chunk, 1)
    else:
        deep = math.prod(ty.shape) // extent
        shape, strides = (deep // 8, extent // chunk, 8, chunk), (8 * chunk, deep * chunk, chunk, 1)
    if (major == "k") == lhs:
        return tiled_view(ref, shape, strides)
    swap = (1, 0, 3, 2)
    return tiled_view(ref, [shape[i] for i in swap], [strides[i] for i in swap])


def _halo_operands(ref: ir.Value, swizzle: int) -> list[ir.Value]:
    """The boxes of 8k x 8 positions (or runs of 64k) that a part of a halo box consists of."""
    ty = ir.MemRefType(ref.type)
    chunk = swizzle // mgpu_utils.bytewidth(ty.element_type)
    strides, _ = ty.get_strides_and_offset()
    tail = 2 if len(ty.shape) == 3 else 3  # (images, positions, chunk) or (..., rows, 8, chunk)
    lead = ty.shape[: len(ty.shape) - tail]
    height = math.prod(ty.shape[-tail:-1])
    step = 8 * chunk if tail == 2 else strides[-3]
    pieces = []
    for index in np.ndindex(*lead):
        part = mgpu_utils.memref_slice(ref, tuple(int(i) for i in index))
        pieces.append(tiled_view(part, (height // 8, 1, 8, chunk), (step, chunk, chunk, 1)))
    return pieces
