"""The `hopper` engine of the softmax family: which calls the kernels for compute capability 9.0 serve."""

import math
from typing import Any

import numpy as np
from jax import Array

from jaxdnn._src import hopper
from jaxdnn._src.core import engines
from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.softmax.primitive import OPS, SoftmaxSpec


def _geometry(call: engines.Call) -> tuple[int, int]:
    """The number of rows, and the length of a row."""
    shape, count = call.avals[0].shape, len(call.spec.axes)
    return math.prod(shape[: len(shape) - count]), math.prod(shape[len(shape) - count :])


def _run(call: engines.Call, *operands: Array) -> Array:
    from jaxdnn._src.softmax.hopper import long, rows

    spec: SoftmaxSpec = call.spec
    shape, (count, length) = operands[0].shape, _geometry(call)
    flat = [v.reshape(count, length) for v in operands]
    which = {"softmax": spec.algorithm, "softmax_dgrad": "dgrad"}.get(call.op, call.op)
    kernels = rows if rows.plan(length, flat[0].dtype, which) else long
    if which == "dgrad":
        options: dict[str, Any] = {"algorithm": spec.algorithm, "tangent": spec.tangent, "out_dtype": spec.out_dtype}
        return kernels.softmax_dgrad(*flat, **options).reshape(shape)
    found = kernels.softmax(*flat, algorithm=which, out_dtype=spec.out_dtype)
    return found.reshape(shape if call.op == "softmax" else shape[: len(shape) - len(spec.axes)])


def _unsupported(call: engines.Call) -> str | None:
    """Why no kernel serves a call, on any device."""
    spec: SoftmaxSpec = call.spec
    dtypes = [v.dtype for v in call.avals]
    if any(dtype not in NAMES for dtype in (*dtypes, np.dtype(spec.out_dtype))):
        return f"its kernels take and give {', '.join(map(str, NAMES))}, not {dtypes[0].name} and {spec.out_dtype.name}"
    if len(set(dtypes)) > 1:
        return f"its kernels take dy and y of one dtype, not {dtypes[0].name} and {dtypes[1].name}"
    if spec.axes != tuple(range(-len(spec.axes), 0)):
        return f"its rows lie along the last axes, not along {spec.axes}"
    rows, length = _geometry(call)
    if not rows * length:
        return "it has nothing to do for an empty array"
    if length * dtypes[0].itemsize % 16:
        return f"its rows are multiples of 16 bytes, and these have {length} elements of {dtypes[0].name}"
    if length * max(*(dtype.itemsize for dtype in dtypes), np.dtype(spec.out_dtype).itemsize) >= 2**32:
        return f"its rows are shorter than 2^32 bytes, a factor of 32 bits, and these have {length} elements"
    if rows > 2**26:
        return f"it takes at most 2^26 rows, not {rows}"
    return None


hopper.declare(
    *OPS,
    run=_run,
    unsupported=_unsupported,
    level=lambda call: "batch_invariant",
    accumulation=lambda call: "float32",
    hazards=lambda call: ("flushes_subnormals",),
    workspace=lambda call: 0,
    notes=(
        "exponentials by the special function unit",
        "where rows are sharded, XLA's formula serves, with its maxima and sums over the mesh",
    ),
)
