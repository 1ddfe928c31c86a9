"""Makes Pallas kernels whose code is alike wherever it is lowered, and launches one that is PTX text."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core.compat import ir, llvm, mgpu, mgpu_utils, name_module, pl, plgpu
from jaxdnn._src.hopper.wgmma import NUMBER, inline_mgpu

_inline_asm: Any = llvm.inline_asm
_nothing, _same = lambda: None, lambda value: value  # one function each: JAX keeps its trace
BLOCK, WARPGROUP = "block", "warpgroup"  # the names of axes
PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def kernel(
    body: Callable[..., None], *, kernel_name: str, approximate: bool = False, **options: Any
) -> Callable[..., Any]:
    """`plgpu.kernel` for single lanes, without barriers of its own, and with a name that every lowering gives it.

    approximate: exponentials and logarithms by the special function unit. `references` of a call are arrays that the
    kernel writes to, its last operands.

    XLA compiles kernels of equal code once in a process. JAX 0.11 numbers the kernels of a process in their code.

    XLA makes no copy of a part of an array that a call reads if the part's bytes are a multiple of 128 (its "dynamic
    slice fusion"), and Mosaic refuses a part that does not begin at a multiple of 256. A barrier lies between the two.
    """

    def run(*references: Any, **scratch: Any) -> None:
        _named(kernel_name)
        body(*references, **scratch)

    parameters = dataclasses.replace(PARAMETERS, approx_math=approximate)
    compiled = plgpu.kernel(run, kernel_name=kernel_name, compiler_params=parameters, **options)

    def call(*arrays: Array, references: Sequence[Any] = ()) -> Any:
        return compiled(*lax.optimization_barrier(arrays), *references)

    return call


def once(run: Callable[..., Any], *static: str) -> Callable[..., Any]:
    """`run`, which launches kernels, traced once for operands of the same types and equal arguments of these names.

    JAX lowers an operation of a program again unless it is bound with the same objects, and a kernel's are its trace.
    Two ops that launch the same kernel, as batch norm does with relu and without, would each have a trace of their own.
    """
    return jax.jit(run, static_argnames=static, inline=True)


def _named(name: str) -> None:
    @inline_mgpu(arg_types=())
    def run(_: Any = None) -> None:
        name_module(name)

    run()


def grid(blocks: int, warpgroups: int) -> dict[str, Any]:
    """What `kernel` takes for so many blocks of so many warpgroups; the axis of a single warpgroup has no name."""
    several = {"num_threads": warpgroups, "thread_name": WARPGROUP} if warpgroups > 1 else {}
    return {"grid": (blocks,), "grid_names": (BLOCK,), **several}


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """`pl.when`, but a program that lowers many conditions is lowered in three quarters of the time.

    `lax.cond` converts its condition to an integer. For each conversion of a truth value, JAX 0.11 starts ptxas to ask
    for its version, which takes tens of milliseconds. The selection of an integer needs no conversion.
    """
    if isinstance(condition, bool):
        return pl.when(condition)
    return lambda body: lax.switch(lax.select(condition, 1, 0), (_nothing, body))


def changed(condition: Any, change: Callable[[Any], Any], value: Any) -> Any:
    """change(value) where a condition holds, else the value. It is lowered as `when` is."""
    return lax.switch(lax.select(condition, 1, 0), (_same, change), value)


def turns(count: Any) -> Any:
    """The number of a loop's turns, which the compilers do not learn, so that they keep the loop.

    A loop of few turns that starts copies by TMA is unrolled otherwise. ptxas 13.0 then runs out of uniform registers,
    and overwrites the address of a copy's descriptor while it saves it: the copy reads from anywhere. 13.4 does not.
    """

    @inline_mgpu(arg_types=(NUMBER,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=NUMBER))
    def unknown(_: Any, count: Any) -> Any:
        (number,) = count.registers.flat
        code = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
        found = _inline_asm(number.type, [number], code, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), layout=count.layout, is_signed=True)

    return unknown(jnp.int32(count))


def drain(empty: Any, total: Any, slots: int) -> None:
    """Waits on the "empty" barriers of all slots in use, so that the producer ends after the consumers' last reads.

    The results do not depend on it: consumers wait for their products before they end, and a block keeps its shared
    memory until all of its warps have ended.
    """

    @pl.loop(lax.max(total - slots, 0), total)
    def _(count: Any) -> None:
        plgpu.barrier_wait(empty.at[lax.rem(count, slots)])


def launch(
    code: str,
    arrays: Sequence[Array],
    outs: Sequence[Any],
    *,
    name: str,
    blocks: int,
    threads: int = 128,
    floats: int = 0,
    cluster: int = 1,
) -> Any:
    """The results of a kernel whose operands $0, $1, ... are the addresses of the arrays, then of the results.

    If the kernel uses shared memory, of `floats` floats, the operand after these is its 32-bit address.
    threads: of a block, a multiple of 128. cluster: the number of blocks of a cluster.
    """
    count = len(arrays) + len(outs)
    shared = [plgpu.SMEM((floats,), jnp.float32)] if floats else []

    def body(*references: Any) -> None:
        @inline_mgpu(arg_types=(plgpu.RefType(),) * len(references))
        def run(_: Any, *refs: Any) -> None:
            widths = [64] * count + [32] * len(shared)
            addresses = [
                llvm.ptrtoint(ir.IntegerType.get_signless(width), mgpu_utils.memref_ptr(ref))
                for width, ref in zip(widths, refs, strict=True)
            ]
            constraints = ",".join([*["l"] * count, *["r"] * len(shared), "~{memory}"])
            llvm.inline_asm(ir.Type.parse("!llvm.void"), addresses, code, constraints, has_side_effects=True)

        run(*references)

    of_cluster: dict[str, Any] = {"cluster": (cluster,), "cluster_names": ("part",)} if cluster > 1 else {}
    options = {**grid(blocks, threads // 128), **of_cluster}
    return kernel(body, out_type=tuple(outs), scratch_types=shared, kernel_name=name, **options)(*arrays)
