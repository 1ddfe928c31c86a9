"""Counters in device memory by which the blocks of one launch wait for each other. PTX.

Why every wait ends. CUDA promises neither that blocks start in the order of their indices, nor that all of them run at
the same time: a block that waits for one that has not started may keep it from ever starting. So a block's number is
not its index. It draws its number when it starts, from a counter that gives 0, 1, 2, ... (`draw`): all smaller numbers
then belong to blocks that have started. If blocks wait only for blocks of smaller numbers, the block of the smallest
number among those that have not ended waits for none of them, so that it goes on and ends, and so all do. What a block
computes must follow from its number; then results do not depend on which block draws which.

The counters are Pallas' semaphores. Each execution of a call has its own, which XLA has filled with zeros before the
launch begins: an operand of the custom call that aliases a result, so that XLA, which knows that it is written, neither
shares it between calls nor keeps it from one execution to the next. No launch has to put back what it has counted.

Memory. Copies by TMA access memory by another path, the asynchronous proxy. What orders a block's stores by TMA before
another block's loads by TMA of the same bytes is, in this order:

1. `wait_smem_to_gmem(0)`, that waits for writes and not only for reads of shared memory: a store has reached memory,
   and is visible to the warpgroup as if by accesses of its own. With `wait_read_only` it may still be under way.
2. `count`: a release at the scope of the GPU. Relaxed, the count could be seen before what it tells of.
3. `reached`: an acquire at the scope of the GPU. Relaxed, later accesses could be made before it.
4. `copies_follow`: a fence between the proxies. An acquire orders accesses of the thread itself, while a copy that it
   starts later could still go by the other path's view of memory.

The other way about, a load by TMA is over once its barrier in shared memory has completed its phase. Then a block
counts, and the one that is to overwrite the bytes does 3 and 4.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.core.compat import ir, llvm, mgpu, mgpu_utils, pl, plgpu
from jaxdnn._src.hopper.cluster import address
from jaxdnn._src.hopper.wgmma import NUMBER, inline_mgpu, ptx

_inline_asm: Any = llvm.inline_asm
_BARRIER = 10  # the named barrier of all of a block's threads; Mosaic's own are the first ones, attention's 8 and 9


def zeroed(count: int) -> Any:
    """References to so many counters that all blocks of a launch share, 0 when it begins."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def draw(counters: Any, shared: Any) -> Array:
    """This block's number, drawn from counter 0. All threads of the block call it, once.

    shared: a reference to one 32-bit integer of shared memory.
    """

    @inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def draw(_: Any, counters: Any, shared: Any) -> None:
        code = (
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
            " @p atom.relaxed.gpu.global.add.u32 t, [$0], 1; @p st.shared.u32 [$1], t;"
            f" barrier.cta.sync {_BARRIER}; }}"
        )
        _run([_global(counters), address(shared)], code, "l,r")

    draw(counters, shared)
    return drawn(shared)


def drawn(shared: Any) -> Array:
    """The number that was drawn, read again: a block that does so need not keep in registers what follows from it."""

    @inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=NUMBER))
    def drawn(_: Any, shared: Any) -> Any:
        # All lanes have one number; the exchange tells the assembler so.
        code = "{ .reg .b32 t; ld.shared.u32 t, [$1]; shfl.sync.idx.b32 $0, t, 0, 31, -1; }"
        i32 = ir.IntegerType.get_signless(32)
        found = _inline_asm(i32, [address(shared)], code, "=r,r,~{memory}", has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), layout=NUMBER.to_mgpu(), is_signed=True)

    return drawn(shared)


def count(counters: Any, number: Any) -> None:
    """Adds 1 to a counter, after all that this warpgroup's first thread knows of."""

    @inline_mgpu(arg_types=(plgpu.RefType(), NUMBER))
    def count(_: Any, counters: Any, number: Any) -> None:
        code = (
            "{ .reg .pred p; .reg .b32 t; .reg .b64 a; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 p, t, 0;"
            " mad.wide.u32 a, $1, 4, $0; @p red.release.gpu.global.add.u32 [a], 1; }"
        )
        _run([_global(counters), number.registers.item()], code, "l,r")

    count(counters, jnp.int32(number))


def reached(counters: Any, number: Any, total: int) -> None:
    """Waits until a counter has come to a total; this warpgroup's threads then know of what was counted."""

    @inline_mgpu(arg_types=(plgpu.RefType(), NUMBER))
    def reached(_: Any, counters: Any, number: Any, total: int = total) -> None:
        code = (
            "{ .reg .pred p; .reg .b32 t; .reg .b64 a; mad.wide.u32 a, $1, 4, $0;"
            f" AGAIN: ld.acquire.gpu.global.u32 t, [a]; setp.ge.u32 p, t, {total}; @p bra OVER;"
            " nanosleep.u32 40; bra AGAIN; OVER: bar.warp.sync -1; }"
        )
        _run([_global(counters), number.registers.item()], code, "l,r")

    reached(counters, jnp.int32(number))


def copies_follow() -> None:
    """Orders copies by TMA that this thread starts later after what it knows of device memory."""

    @inline_mgpu(arg_types=())
    def copies_follow(_: Any = None) -> None:
        ptx("fence.proxy.async.global;")

    copies_follow()


def _global(counters: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(counters))


def _run(operands: list[ir.Value], code: str, constraints: str) -> None:
    void: Any = ir.Type.parse("!llvm.void")
    _inline_asm(void, operands, code, f"{constraints},~{{memory}}", has_side_effects=True)
