"""The activation primitives: their types, derivatives, vmap and sharding rules.

activation(x) = alpha act(x), and activation_dgrad(dy, x) = alpha dy act'(x), which is linear in dy and its own
transpose. As primitives they keep x alone for the backward pass, in x's type, and not a slope in float32.
"""

import dataclasses
import functools as ft
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxdnn._src.activation import formulas
from jaxdnn._src.activation.formulas import Parameter
from jaxdnn._src.core import partitioning, primitives, rounding
from jaxdnn._src.core.blending import accumulator
from jaxdnn._src.core.primitives import bind

OPS = ("activation", "activation_dgrad")


@dataclasses.dataclass(frozen=True)
class ActivationSpec:
    """Everything about a call that is known when it is traced, apart from shapes."""

    name: str
    parameter: Parameter
    alpha: float
    out_dtype: np.dtype
    engine: str | None = None
    level: str = "fast"


def value(spec: ActivationSpec, x: Array) -> Array:
    """alpha act(x) by the formula; for narrow types the engines look it up instead."""
    z = x.astype(accumulator(x.dtype))
    y = formulas.activate(z, spec.name, spec.parameter, spec.level)
    return rounding.nearest(y if spec.alpha == 1 else spec.alpha * y, spec.out_dtype)


def backward(spec: ActivationSpec, dy: Array, x: Array) -> Array:
    """alpha dy act'(x) by the formula."""
    precision = accumulator(x.dtype)
    slope = formulas.derivative(x.astype(precision), spec.name, spec.parameter)
    slope = slope if spec.alpha == 1 else spec.alpha * slope
    return rounding.nearest(rounding.product(dy.astype(precision), slope), spec.out_dtype)


def _jvp(spec: ActivationSpec, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    return bind("activation", x, spec=spec), bind("activation_dgrad", dx, x, spec=spec)


def _transpose(spec: ActivationSpec, ct: Array, dy: Any, x: Array) -> list[Array | None]:
    back = dataclasses.replace(spec, out_dtype=np.dtype(dy.aval.dtype))
    return [bind("activation_dgrad", ct, x, spec=back), None]


def _result(spec: ActivationSpec, *operands: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(operands[0].shape, spec.out_dtype)


_RULES: dict[str, dict[str, Any]] = {
    "activation": {"jvp": _jvp},
    "activation_dgrad": {
        "jvp": ft.partial(primitives.jvp_of_linear, "activation_dgrad", backward),
        "transpose": _transpose,
    },
}
for _op, _rules in _RULES.items():
    primitives.define(
        _op,
        **_rules,
        results=_result,
        batch=ft.partial(primitives.batch_leading, _op),
        factors=lambda spec, *operands: partitioning.elementwise(*operands),
    )
