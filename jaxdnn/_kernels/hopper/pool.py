"""Pooling of channels-last arrays on compute capability 9.0: launches of the PTX of `pool_ptx`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxdnn._kernels.hopper import pool_ptx
from jaxdnn._kernels.hopper.pool_ptx import THREADS, Shape

PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)
DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def forward_rows(k: Shape) -> int:
    """Outputs of a thread: two where their windows share rows and the loads fit into registers."""
    shares = (k.taps[0] - 1) * k.dilation[0] >= k.stride[0]
    loads = (k.taps[0] + k.stride[0]) * k.taps[1]
    return 2 if shares and loads <= 16 and k.out[0] > 1 else 1


def maximum(x: Array, k: Shape, *, indices: bool, rows: int | None = None) -> Any:
    """y of x (n, h, w, c), and with indices the taps."""
    rows = forward_rows(k) if rows is None else rows
    shape = (k.images, *k.out, x.shape[-1])
    results = [jax.ShapeDtypeStruct(shape, x.dtype)] + [jax.ShapeDtypeStruct(shape, jnp.uint8)] * indices
    code = pool_ptx.maximum(k, indices=indices, rows=rows)
    found = _launch(code, k.forward_threads(rows), [x], results, "pool_max")
    return found if indices else found[0]


def average(x: Array, k: Shape, *, factor: float | None, rows: int | None = None) -> Array:
    """y of x (n, h, w, c): sums times a factor."""
    rows = forward_rows(k) if rows is None else rows
    result = jax.ShapeDtypeStruct((k.images, *k.out, x.shape[-1]), x.dtype)
    code = pool_ptx.average(k, factor=factor, rows=rows)
    return _launch(code, k.forward_threads(rows), [x], [result], "pool_average")[0]


def maximum_backward(dy: Array, taps: Array, k: Shape) -> Array:
    """dx of dy and taps (n, p, q, c)."""
    result = jax.ShapeDtypeStruct((k.images, *k.size, dy.shape[-1]), dy.dtype)
    return _launch(pool_ptx.maximum_backward(k), k.backward_threads(), [dy, taps], [result], "pool_max_dgrad")[0]


def average_backward(dy: Array, k: Shape, *, factor: float | None) -> Array:
    """dx of dy (n, p, q, c)."""
    result = jax.ShapeDtypeStruct((k.images, *k.size, dy.shape[-1]), dy.dtype)
    code = pool_ptx.average_backward(k, factor=factor)
    return _launch(code, k.backward_threads(), [dy], [result], "pool_average_dgrad")[0]


def _launch(code: str, threads: int, operands: Sequence[Array], results: Sequence[Any], name: str) -> tuple[Array, ...]:
    """Runs one block of PTX whose operands $0, $1, ... are the addresses of the arrays."""
    count = len(operands) + len(results)

    def body(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(()),) * count)
        def run(_: Any, *arrays: Any) -> None:
            long = ir.IntegerType.get_signless(64)
            addresses = [llvm.ptrtoint(long, mgpu_utils.memref_ptr(array)) for array in arrays]
            constraints = ",".join([*["l"] * count, "~{memory}"])
            llvm.inline_asm(ir.Type.parse("!llvm.void"), addresses, code, constraints, has_side_effects=True)

        run(*refs)

    kernel = plgpu.kernel(
        body,
        out_type=tuple(results),
        grid=(-(-threads // THREADS),),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=PARAMETERS,
    )
    return tuple(kernel(*operands))
