"""The `xla` engine of bias, activation, dropout and residual, and of its derivatives: float32, one conversion.

Each product is rounded before anything is added to it. In bfloat16 and float16 an activation is read from a float32
table at x + bias, rounded to that type. So the bits are those of the definition. The scale of kept elements is part of
the table, or of the slope.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.activation import formulas
from jaxdnn._src.core import engines
from jaxdnn._src.core.rounding import nearest, product
from jaxdnn._src.dropout import xla
from jaxdnn._src.dropout.fused import OPS, FusedSpec, is_fixed, precision
from jaxdnn._src.tensor import reductions


def run(call: engines.Call, x: Array, *operands: Array) -> Array:
    """residual + (act(x + bias) scale where kept, 0 elsewhere)."""
    spec: FusedSpec = call.spec
    *rest, key, start = operands
    bias, rest = (rest[0], rest[1:]) if spec.bias else (None, rest)
    wide = precision(spec, (x, *operands))
    scale = wide.type(spec.scale)
    if spec.looked_up and x.dtype in formulas.NARROW:
        entries = formulas.table(spec.activation, spec.parameter, float(scale), np.dtype(x.dtype), wide)
        v = formulas.look_up(_argument(x, bias), entries)
    else:
        v = formulas.activate(_sum(x, bias, wide), spec.activation, spec.parameter, spec.level)
        v = v if scale == 1 else product(v, jnp.asarray(scale))
    v = jnp.where(_kept(call, x.shape, key, start), v, jnp.zeros_like(v))
    return nearest(rest[0].astype(wide) + v if rest else v, spec.out_dtype)


def run_tangent(call: engines.Call, *operands: Array) -> Array:
    """act'(x + bias) scale (dx + dbias) where kept, 0 elsewhere."""
    spec: FusedSpec = call.spec
    return nearest(_dropped(call, operands[: 1 + spec.dbias], operands[1 + spec.dbias :]), spec.out_dtype)


def run_dgrad(call: engines.Call, dy: Array, *operands: Array) -> tuple[Array, Array]:
    """dx, and the sum of the unrounded dx over the axes along which the bias is constant."""
    spec: FusedSpec = call.spec
    v = _dropped(call, (dy,), operands)
    axes = tuple(spec.leading + axis for axis in spec.summed)
    return nearest(v, spec.out_dtype), reductions.add(v, axes, is_fixed(spec))


def _dropped(call: engines.Call, tangents: Any, operands: Any) -> Array:
    """The derivative in float32 (float64)."""
    spec: FusedSpec = call.spec
    *at, key, start = operands
    wide = precision(spec, (*tangents, *operands))
    t = ft.reduce(jnp.add, [v.astype(wide) for v in tangents])
    v = product(t, _slope(spec, at, wide))
    return jnp.where(_kept(call, t.shape, key, start), v, jnp.zeros_like(v))


def _slope(spec: FusedSpec, at: Any, wide: np.dtype) -> Array:
    """act'(x + bias) times the scale, in float32 (float64)."""
    scale = wide.type(spec.scale)
    if not at:
        return jnp.asarray(scale)
    x, bias = at[0], at[1] if spec.bias else None
    if spec.looked_up and x.dtype in formulas.NARROW:
        slopes = formulas.slope_table(spec.activation, spec.parameter, float(scale), np.dtype(x.dtype))
        return formulas.look_up(_argument(x, bias), slopes)
    return formulas.derivative(_sum(x, bias, wide), spec.activation, spec.parameter) * scale


def _sum(x: Array, bias: Array | None, wide: Any) -> Array:
    return x.astype(wide) if bias is None else x.astype(wide) + bias.astype(wide)


def _argument(x: Array, bias: Array | None) -> Array:
    """x + bias in the type of x, as the tables' index."""
    return x if bias is None else _sum(x, bias, np.float32).astype(x.dtype)


def _kept(call: engines.Call, shape: tuple[int, ...], key: Array, start: Array) -> Array:
    with jax.enable_x64(True):  # this runs while a program is lowered, where no transformation sees the wide types
        return xla.kept(call, shape, key, start)


def _portable(call: engines.Call) -> bool:
    """Whether every bit is the definition's, because all operations are exact or correctly rounded on all devices."""
    spec: FusedSpec = call.spec
    x = call.avals[0] if call.op == "fused_dropout" else call.avals[1 + spec.dbias]
    return not spec.looked_up or np.dtype(x.dtype) in formulas.NARROW


def _level(call: engines.Call) -> str:
    """Element by element; a gradient in the bias adds over the batch."""
    if call.op == "fused_dropout_dgrad":
        return "mesh_invariant" if is_fixed(call.spec) else "run_to_run"
    return "portable" if _portable(call) else "mesh_invariant"


_RUN: dict[str, Any] = dict(zip(OPS, (run, run_tangent, run_dgrad), strict=True))
engines.declare(
    "xla",
    *_RUN,
    run=lambda call, *operands: _RUN[call.op](call, *operands),
    needs_sizes=lambda call: call.op == "fused_dropout_dgrad" and is_fixed(call.spec),  # a tree's
    level=_level,
    accumulation=lambda call: precision(call.spec, call.avals).name,
    hazards=engines.flushes_on_cpus,
    notes=("Philox4x32-10, drawn again for the backward pass",),
)
