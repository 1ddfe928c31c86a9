"""Pooling of channels-last arrays on compute capability 9.0: launches of the PTX of `pool_ptx`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn._kernels.hopper import pool_ptx
from jaxdnn._kernels.hopper.launch import launch
from jaxdnn._kernels.hopper.pool_ptx import THREADS, Shape

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
    found = launch(code, [x], results, name="pool_max", blocks=_blocks(k.forward_threads(rows)), threads=THREADS)
    return found if indices else found[0]


def average(x: Array, k: Shape, *, factor: float | None, rows: int | None = None) -> Array:
    """y of x (n, h, w, c): sums times a factor."""
    rows = forward_rows(k) if rows is None else rows
    result = jax.ShapeDtypeStruct((k.images, *k.out, x.shape[-1]), x.dtype)
    code = pool_ptx.average(k, factor=factor, rows=rows)
    return launch(code, [x], [result], name="pool_average", blocks=_blocks(k.forward_threads(rows)), threads=THREADS)[0]


def maximum_backward(dy: Array, taps: Array, k: Shape) -> Array:
    """dx of dy and taps (n, p, q, c)."""
    result = jax.ShapeDtypeStruct((k.images, *k.size, dy.shape[-1]), dy.dtype)
    code, blocks = pool_ptx.maximum_backward(k), _blocks(k.backward_threads())
    return launch(code, [dy, taps], [result], name="pool_max_dgrad", blocks=blocks, threads=THREADS)[0]


def average_backward(dy: Array, k: Shape, *, factor: float | None) -> Array:
    """dx of dy (n, p, q, c)."""
    result = jax.ShapeDtypeStruct((k.images, *k.size, dy.shape[-1]), dy.dtype)
    code = pool_ptx.average_backward(k, factor=factor)
    return launch(
        code, [dy], [result], name="pool_average_dgrad", blocks=_blocks(k.backward_threads()), threads=THREADS
    )[0]


def _blocks(threads: int) -> int:
    return -(-threads // THREADS)
