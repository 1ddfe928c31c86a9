"""Launches a kernel that is PTX text, from an otherwise empty Pallas kernel."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.core.compat import ir, llvm, mgpu_utils, plgpu

PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


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
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(references))
        def run(_: Any, *refs: Any) -> None:
            widths = [64] * count + [32] * len(shared)
            addresses = [
                llvm.ptrtoint(ir.IntegerType.get_signless(width), mgpu_utils.memref_ptr(ref))
                for width, ref in zip(widths, refs, strict=True)
            ]
            constraints = ",".join([*["l"] * count, *["r"] * len(shared), "~{memory}"])
            llvm.inline_asm(ir.Type.parse("!llvm.void"), addresses, code, constraints, has_side_effects=True)

        run(*references)

    shape: dict[str, Any] = {}
    if threads > 128:
        shape |= {"num_threads": threads // 128, "thread_name": "warpgroup"}
    if cluster > 1:
        shape |= {"cluster": (cluster,), "cluster_names": ("part",)}
    kernel = plgpu.kernel(
        body,
        out_type=tuple(outs),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=shared,
        kernel_name=name,
        compiler_params=PARAMETERS,
        **shape,
    )
    return kernel(*arrays)
