"""Sums over the blocks of a cluster through distributed shared memory, in a fixed order.

Every block has an accumulator of the same tile. Block j computes share j of its columns, summed over the cluster: each
block sends the other blocks their shares, and adds the received shares and its own, that of block 0 first. A thread
sends its registers to the thread with the same number. Block r receives from block s in slot (r - s) mod blocks - 1.

The stores are asynchronous and count their bytes on an mbarrier of the receiver, one for each of its warpgroups, so
that a sum waits for one transfer between blocks only. Pallas has no such store, hence these mbarriers are not Pallas
barriers: each is 8 bytes of shared memory, initialised again for every sum. A sender must know that the receiver's
mbarrier is initialised and that its slots have been read. The caller ensures it by a barrier of the cluster:
`prepare`, arrive; wait, `send`; `receive`, arrive; wait, `send`; ...
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.core.compat import ir, llvm, mgpu, mgpu_utils, plgpu, vector
from jaxdnn._src.hopper.wgmma import inline_mgpu

THREADS = 128  # of a warpgroup
_LAYOUT = plgpu.Layout.WGMMA
_INIT = "mbarrier.init.shared::cta.b64 [m], 1; fence.mbarrier_init.release.cluster;"
_STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"


def prepare(barriers: Any) -> None:
    """Initialises this warpgroup's mbarrier; visible to its threads, and to the cluster after a cluster barrier."""

    @inline_mgpu(arg_types=(plgpu.RefType(()),))
    def make(_: Any, barriers: Any) -> None:
        _void([address(barriers)], _block([*_own_barrier("$0"), *_first_thread(_INIT)]), "r,~{memory}")
        mgpu_utils.warpgroup_barrier()

    make(barriers)


def send(acc: Array, slots: Any, barriers: Any, blocks: int) -> None:
    """Stores the shares of the other blocks into their slots."""
    share = acc.shape[1] // blocks
    size = acc.shape[0] * share * 4  # bytes of one share: of a slot

    @inline_mgpu(arg_types=(_LAYOUT, plgpu.RefType(()), plgpu.RefType(())))
    def store(_: Any, acc: Any, slots: Any, barriers: Any) -> None:
        for to in range(blocks):
            registers = scalars(acc[:, to * share : (to + 1) * share])
            count = len(registers)
            lines = [
                *_own_barrier(f"${count + 1}"),
                *_place(blocks, size, f"${count}"),
                f"sub.s32 a, {to}, r; and.b32 a, a, {blocks - 1}; sub.s32 a, a, 1; mad.lo.s32 a, a, {size}, b;",
                f"mapa.shared::cluster.u32 a, a, {to}; mapa.shared::cluster.u32 m, m, {to};",
                f"setp.ne.s32 p, r, {to};",
            ]
            for i in range(0, count, 4):
                names = ", ".join(f"${i + d}" for d in range(4))
                lines.append(f"@p {_STORE} [a+{i * 4 * THREADS}], {{{names}}}, [m];")
            constraints = ",".join([*["f"] * count, "r", "r", "~{memory}"])
            _void([*registers, address(slots), address(barriers)], _block(lines), constraints)

    store(acc, slots, barriers)


def receive(acc: Array, slots: Any, barriers: Any, blocks: int) -> Array:
    """Waits for this block's share from all blocks and returns their sum; then initialises the mbarrier again."""
    share = acc.shape[1] // blocks
    size = acc.shape[0] * share * 4
    shape = (acc.shape[0], share)

    @inline_mgpu(
        arg_types=(_LAYOUT, plgpu.RefType(()), plgpu.RefType(())),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=_LAYOUT),
    )
    def add(_: Any, acc: Any, slots: Any, barriers: Any) -> Any:
        expect = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [m], {(blocks - 1) * size};"
        lines = [*_own_barrier("$0"), *_first_thread(expect), ".reg .pred w;", "WAIT:"]
        lines += ["mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 w, [m], 0;", "@!w bra WAIT;"]
        _void([address(barriers)], _block(lines), "r,~{memory}")
        parts = [acc[:, j * share : (j + 1) * share] for j in range(blocks)]
        registers = [scalars(part) for part in parts]
        sums: list[Any] = []
        for start in range(0, len(registers[0]), 4):
            own = [[values[start + d] for d in range(4)] for values in registers]
            sums += _add_four(own, address(slots), start * 4 * THREADS, blocks, size)
        # All its threads have waited, and their loads are complete: a barrier alone lets loads in flight be overtaken.
        _void([], "fence.acq_rel.cluster;", "~{memory}")
        mgpu_utils.warpgroup_barrier()
        again = f"mbarrier.inval.shared::cta.b64 [m]; {_INIT}"
        _void([address(barriers)], _block([*_own_barrier("$0"), *_first_thread(again)]), "r,~{memory}")
        mgpu_utils.warpgroup_barrier()
        return _like(parts[0], sums)

    return add(acc, slots, barriers)


def _add_four(own: list[list[ir.Value]], base: ir.Value, offset: int, blocks: int, size: int) -> list[ir.Value]:
    """The sums of four neighbouring registers; own[j] are this block's values of share j."""
    f32 = ir.F32Type.get()
    number = lambda j, d: f"${4 + 4 * j + d}"  # inputs follow the four results
    lines = [*_place(blocks, size, f"${4 + 4 * blocks}"), ".reg .f32 o<4>; .reg .f32 v<4>; .reg .pred q;"]
    lines += [f"mov.f32 o{d}, {number(0, d)};" for d in range(4)]
    for j in range(1, blocks):
        lines.append(f"setp.eq.s32 q, r, {j};")
        lines += [f"selp.f32 o{d}, {number(j, d)}, o{d}, q;" for d in range(4)]
    for s in range(blocks):
        lines += [f"setp.ne.s32 p, r, {s};", *(f"mov.f32 v{d}, o{d};" for d in range(4))]
        lines.append(f"sub.s32 a, r, {s}; and.b32 a, a, {blocks - 1}; sub.s32 a, a, 1; mad.lo.s32 a, a, {size}, b;")
        lines.append(f"@p ld.shared.v4.f32 {{v0, v1, v2, v3}}, [a+{offset}];")
        lines += [f"mov.f32 ${d}, v{d};" if s == 0 else f"add.rn.f32 ${d}, ${d}, v{d};" for d in range(4)]
    code = _block(lines)
    # "=&f": a result is written before the last operand is read, so that it may not share a register with one.
    constraints = ",".join([*["=&f"] * 4, *["f"] * (4 * blocks), "r", "~{memory}"])
    struct = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    operands = [*(value for values in own for value in values), base]
    packed: Any = llvm.inline_asm(struct, operands, code, constraints, has_side_effects=True)
    return [llvm.extractvalue(f32, packed, [d]) for d in range(4)]


def _place(blocks: int, size: int, slots: str) -> list[str]:
    """r: this block's rank in the cluster; b: the address of this thread's 16 bytes in its warpgroup's first slot."""
    return [
        ".reg .b32 r, a, b, t; .reg .pred p;",
        "mov.u32 r, %cluster_ctarank; mov.u32 t, %tid.x;",
        f"shr.u32 a, t, 7; mad.lo.s32 b, a, {(blocks - 1) * size}, {slots};",
        f"and.b32 t, t, {THREADS - 1}; mad.lo.s32 b, t, 16, b;",
    ]


def _own_barrier(barriers: str) -> list[str]:
    """m: the address of this warpgroup's mbarrier; n: this thread's number in the warpgroup."""
    return [
        ".reg .b32 m, n;",
        f"mov.u32 n, %tid.x; shr.u32 m, n, 7; mad.lo.s32 m, m, 8, {barriers};",
        f"and.b32 n, n, {THREADS - 1};",
    ]


def _first_thread(instructions: str) -> list[str]:
    """Instructions that the warpgroup's first thread executes."""
    return [".reg .pred f;", "setp.ne.s32 f, n, 0;", "@f bra PAST;", instructions, "PAST: mov.b32 n, n;"]


def _block(lines: list[str]) -> str:
    return "\n".join(["{", *lines, "}"])


def _void(operands: list[ir.Value], code: str, constraints: str) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, constraints, has_side_effects=True)


def address(ref: Any) -> ir.Value:
    """The 32-bit shared address of a reference."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu_utils.memref_ptr(ref))


def scalars(array: Any) -> list[ir.Value]:
    """A fragment's registers as single numbers, in the order of the array."""
    out = []
    for register in array.registers.flat:
        for i in range(math.prod(ir.VectorType(register.type).shape)):
            out.append(vector.extract(register, dynamic_position=[], static_position=[i]))
    return out


def _like(array: Any, scalars: list[ir.Value]) -> Any:
    """An array with the layout and shape of another and these elements."""
    ty = ir.VectorType(array.registers.flat[0].type)
    width = math.prod(ty.shape)
    registers = np.empty_like(array.registers)
    for n, index in enumerate(np.ndindex(*registers.shape)):
        registers[index] = vector.from_elements(ty, scalars[n * width : (n + 1) * width])
    return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=None)
