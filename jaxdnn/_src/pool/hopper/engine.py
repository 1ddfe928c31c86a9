"""The `hopper` engine of pooling: which calls its kernels serve, and what it guarantees."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src import hopper
from jaxdnn._src.core import engines
from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.pool.hopper.shape import Shape
from jaxdnn._src.pool.spec import OPS, PoolSpec, x_shape, y_shape

MOST_TAPS = 64
MOST_LOADS = 64  # of 16 bytes by one thread


def _shape(call: engines.Call) -> Shape:
    """The call as a pooling of (images, rows, columns, channels); one spatial axis has one row."""
    spec: PoolSpec = call.spec
    pad = lambda values, one: (one,) * (2 - len(values)) + tuple(values)
    first = call.avals[0]
    several = spec.divisor is not None and len(set(spec.counts().flat)) > 1
    leading = first.shape[: len(first.shape) - len(spec.spatial) - 1]
    return Shape(
        dtype=NAMES[np.dtype(first.dtype)],
        images=math.prod(leading),
        vectors=first.shape[-1] * first.dtype.itemsize // 16,
        size=pad(spec.sizes, 1),
        out=pad(spec.outputs, 1),
        taps=pad(spec.taps, 1),
        stride=pad(spec.stride, 1),
        low=pad([low for low, _ in spec.padding], 0),
        dilation=pad(spec.dilation, 1),
        counted=_counted(spec, pad) if several else None,
    )


def _counted(spec: PoolSpec, pad: Any) -> Any:
    """The positions that are counted along each axis."""
    padded = spec.divisor == "padded"
    pairs = zip(spec.padding, spec.sizes, strict=True)
    return pad([(-low, size + high) if padded else (0, size) for (low, high), size in pairs], (0, 1))


def _unsupported(call: engines.Call) -> str | None:
    """Why the kernels do not serve a call, whatever the device."""
    spec: PoolSpec = call.spec
    first = call.avals[0]
    if call.op == "pool_pick":
        return "it has no kernel for the derivative along a tangent"
    if np.dtype(first.dtype) not in NAMES:
        return f"its kernels take {', '.join(map(str, NAMES))}, not {first.dtype}"
    if spec.out_dtype != first.dtype:
        return f"its kernels write the operand's dtype {first.dtype}, not {spec.out_dtype}"
    if spec.spatial not in ((-2,), (-3, -2)):
        return f"its kernels take one or two spatial axes before the channels, not axes {spec.spatial}"
    if spec.nan != "propagate" and call.op in ("pool_max", "pool_max_indices"):
        return "its kernels propagate NaN"
    if first.shape[-1] * first.dtype.itemsize % 16:
        return f"its kernels take channels in vectors of 16 bytes, not {first.shape[-1]} of {first.dtype}"
    if call.op == "pool_max_dgrad" and call.avals[1].dtype != jnp.uint8:
        return f"its kernels take taps of uint8, not {call.avals[1].dtype}"
    return _too_large(call)


def _too_large(call: engines.Call) -> str | None:
    k = _shape(call)
    backward = call.op.endswith("dgrad")
    if not 2 <= math.prod(k.taps) <= MOST_TAPS:
        return f"its kernels take windows of 2 to {MOST_TAPS} taps, not {math.prod(k.taps)}"
    if backward:
        loads = math.prod(len({shift for phase in k.phases(axis) for _, shift in phase}) for axis in (0, 1))
        if loads > MOST_LOADS or math.prod(k.stride) > MOST_LOADS:
            return f"its kernels take strides of {MOST_LOADS} elements at most, not {k.stride}"
    elements = k.images * k.vectors * math.prod(max(h, p * u) for h, p, u in zip(k.size, k.out, k.stride, strict=True))
    return None if 0 < elements < 2**31 else "its kernels take arrays of 1 to 2^31 vectors of 16 bytes"


def _run(call: engines.Call, *operands: Array) -> Any:
    from jaxdnn._src.pool.hopper import calls as kernels

    spec: PoolSpec = call.spec
    k = _shape(call)
    backward = call.op.endswith("dgrad")
    image = k.out if backward else k.size
    first, *taps = (a.reshape(k.images, *image, a.shape[-1]) for a in operands)
    factor = None if spec.divisor is None or k.counted else float(1.0 / spec.counts().flat[0])
    if call.op == "pool_max_dgrad":
        found: Any = kernels.maximum_backward(first, taps[0], k)
    elif call.op == "pool_average_dgrad":
        found = kernels.average_backward(first, k, factor=factor)
    elif call.op == "pool_average":
        found = kernels.average(first, k, factor=factor)
    else:
        found = kernels.maximum(first, k, indices=call.op == "pool_max_indices")
    shape = (x_shape if backward else y_shape)(spec, operands[0].shape)
    return jax.tree.map(lambda a: a.reshape(shape), found)


SLOWER = (
    engines.Slower(
        "no element is in two windows, so XLA's program adds nothing and is a selection in one pass",
        lambda call: call.op.endswith("dgrad") and call.spec.disjoint,
        engines.Measured("corpus_pool", "VGG-16", "pool 112", "backward", 0.63),
    ),
)


hopper.declare(
    *OPS,
    run=_run,
    unsupported=_unsupported,
    level=lambda call: "portable",
    slower=SLOWER,
    workspace=lambda call: 0,
)
