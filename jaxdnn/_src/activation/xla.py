"""The `xla` engine of the activations: a formula in float32 or float64, a table for the narrow types.

A table has the correctly rounded result for each of the 65,536 numbers of bfloat16 or float16, so that the bits are the
definition's on every device. On an H200 a lookup of bfloat16 takes as long as copying the array, half the time of
gelu's formula (`benchmarks/notes-activation.md`): the 128 KB fit into L1.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.activation import formulas, primitive
from jaxdnn._src.activation.primitive import ActivationSpec
from jaxdnn._src.core import blending, engines, rounding


def run(call: engines.Call, x: Array) -> Array:
    """alpha act(x)."""
    spec: ActivationSpec = call.spec
    if x.dtype not in formulas.NARROW:
        return primitive.value(spec, x)
    if spec.name in ("identity", "relu") and spec.alpha == 1 and spec.out_dtype == x.dtype:
        return x if spec.name == "identity" else _relu(x)
    return formulas.look_up(x, formulas.table(spec.name, spec.parameter, spec.alpha, np.dtype(x.dtype), spec.out_dtype))


def _relu(x: Array) -> Array:
    """relu by comparing bits, because XLA's CPU code compares subnormal numbers as zero."""
    return jnp.where(_within(x, 0x8000, -np.inf), jnp.zeros_like(x), x)


def _within(x: Array, first: int, last: float) -> Array:
    """Where the bits of a narrow x lie from the first to those of the last number, so that x is not NaN."""
    bits = formulas.bits(x)
    return (bits >= np.uint16(first)) & (bits <= np.asarray(last, x.dtype).view(np.uint16))


def run_dgrad(call: engines.Call, dy: Array, x: Array) -> Array:
    """alpha dy act'(x): for a narrow x one float32 product with a slope, but for relu's from a table."""
    spec: ActivationSpec = call.spec
    if x.dtype not in formulas.NARROW:
        return primitive.backward(spec, dy, x)
    if spec.name == "relu" and spec.alpha == 1:
        slope = jnp.where(jnp.isnan(x), jnp.float32(jnp.nan), _within(x, 1, np.inf).astype(jnp.float32))
    else:
        slopes = formulas.slope_table(spec.name, spec.parameter, spec.alpha, np.dtype(x.dtype))
        slope = formulas.look_up(x, slopes)
    return rounding.product(dy.astype(slope.dtype), slope).astype(spec.out_dtype)


def _level(call: engines.Call) -> str:
    """Portable for a table, or if all operations are the same on all devices; the op works element by element."""
    spec: ActivationSpec = call.spec
    narrow = np.dtype(call.avals[-1].dtype) in formulas.NARROW
    exact = spec.name in formulas.PIECEWISE and spec.alpha == 1 and np.dtype(call.avals[-1].dtype) == spec.out_dtype
    return "portable" if narrow or exact else "mesh_invariant"


def _hazards(call: engines.Call) -> tuple[str, ...]:
    looked_up = call.op == "activation" and np.dtype(call.avals[0].dtype) in formulas.NARROW
    return () if looked_up else engines.flushes_on_cpus(call)


_RUN: dict[str, Any] = {"activation": run, "activation_dgrad": run_dgrad}
engines.declare(
    "xla",
    *_RUN,
    run=lambda call, *operands: _RUN[call.op](call, *operands),
    level=_level,
    hazards=_hazards,
    accumulation=lambda call: blending.accumulator(call.avals[-1].dtype).name,
    workspace=lambda call: None,
    notes=("bfloat16 and float16 by a table of correctly rounded results",),
)
