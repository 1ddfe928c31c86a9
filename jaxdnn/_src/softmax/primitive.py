"""The primitives of the softmax family: their specs, derivatives, vmap and sharding rules.

| op | operands | result | derivative |
|---|---|---|---|
| softmax | x | y | softmax_dgrad with `tangent` |
| softmax_dgrad | dy, y | dx | itself along dy, its formula along y |
| logsumexp | x | lse | a sum of softmax(x) times the tangent |

The Jacobian of softmax, diag(y) - y yᵀ, is symmetric: softmax_dgrad is its own transpose. The log-softmax's is
I - 1 exp(y)ᵀ; softmax_dgrad is its transpose, and with `tangent` the Jacobian itself.
Rows lie along `axes`, counted from the last axis, so any number of leading axes is more rows.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core import primitives
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.partitioning import Axes, Factors, Run
from jaxdnn._src.core.primitives import bind
from jaxdnn._src.core.rounding import nearest
from jaxdnn._src.softmax import xla as formulas

OPS = ("softmax", "softmax_dgrad", "logsumexp")


@dataclasses.dataclass(frozen=True)
class SoftmaxSpec:
    """Everything about a call that is known when it is traced, apart from shapes."""

    axes: tuple[int, ...]  # negative, ascending
    accumulate: np.dtype
    out_dtype: np.dtype
    algorithm: str = "accurate"
    tangent: bool = False
    engine: str | None = None
    level: str = "fast"

    def as_dtype(self, dtype: Any) -> "SoftmaxSpec":
        return dataclasses.replace(self, out_dtype=np.dtype(dtype))


# ---- derivatives -----------------------------------------------------------------------------------------------------


def _softmax_jvp(spec: SoftmaxSpec, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Array, Any]:
    y = bind("softmax", *primals, spec=spec)
    if isinstance(tangents[0], ad.Zero):
        return y, primitives.zero_tangent(y)
    return y, bind("softmax_dgrad", tangents[0], y, spec=dataclasses.replace(spec, tangent=True))


def _dgrad_transpose(spec: SoftmaxSpec, ct: Array, dy: Any, y: Any) -> list[Array | None]:
    if not primitives.is_linear_operand(dy) or primitives.is_linear_operand(y):
        raise NotImplementedError("`softmax_dgrad` is linear in `dy` alone; jax.vjp linearises it in `y` first.")
    back = dataclasses.replace(spec, tangent=not spec.tangent, out_dtype=np.dtype(dy.aval.dtype))
    return [bind("softmax_dgrad", ct, y, spec=back), None]


def _logsumexp_jvp(spec: SoftmaxSpec, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Array, Any]:
    x, v = primals[0], tangents[0]
    wide = bind("logsumexp", x, spec=spec.as_dtype(spec.accumulate))
    y = nearest(wide, spec.out_dtype)
    if isinstance(v, ad.Zero):
        return y, primitives.zero_tangent(y)
    axes = tuple(axis % x.ndim for axis in spec.axes)
    add, fixed = formulas.for_derivative(spec)
    # Where no order is fixed not softmax(x): its gradient would be a second reduction where this is element by element.
    same = dataclasses.replace(spec, algorithm="accurate", out_dtype=spec.accumulate, engine="ordered")
    shifted = lambda: jnp.exp(x.astype(spec.accumulate) - jnp.expand_dims(wide, axes))
    p = bind("softmax", x, spec=same) if fixed else shifted()
    total = add(p, v.astype(spec.accumulate), spec.axes)
    return y, jnp.squeeze(total, axes).astype(spec.out_dtype)


# ---- shapes and sharding ---------------------------------------------------------------------------------------------


def _like_first(spec: SoftmaxSpec, x: Any, *_: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, spec.out_dtype)


def _reduced(spec: SoftmaxSpec, x: Any) -> jax.ShapeDtypeStruct:
    gone = {axis % len(x.shape) for axis in spec.axes}
    shape = tuple(size for axis, size in enumerate(x.shape) if axis not in gone)
    return jax.ShapeDtypeStruct(shape, spec.out_dtype)


def _factors(op: str, spec: SoftmaxSpec, *avals: Any) -> Factors:
    """Every axis but those of the rows may be sharded; a row too, where its bits may depend on that."""
    rank = len(avals[0].shape)
    rows = sorted(axis % rank for axis in spec.axes)
    names = tuple(f"r{axis}" if axis in rows else f"l{axis}" for axis in range(rank))
    free = tuple(name for name in names if name.startswith("l"))
    return Factors(
        operands=(names,) * len(avals),
        results=(free if op == "logsumexp" else names,),
        free=free,
        summed=tuple(names[axis] for axis in rows),
        local=ft.partial(_on_device, op, spec),
    )


def _on_device(op: str, spec: SoftmaxSpec, run: Run, axes: Axes, *operands: Array) -> Array:
    """A device's part of rows that are split: XLA's formula, with the largest element and the sum over the mesh."""
    names = tuple(name for devices in axes.values() for name in devices.names)
    total = lambda x, along: lax.psum(formulas.xla_sum(x, along), names)
    if op == "softmax_dgrad":
        return formulas.softmax_dgrad(spec, *operands, total=total)
    largest = lambda x, along: lax.pmax(formulas.row_max(x, along), names)
    return formulas.FORMULAS[op](spec, *operands, total=total, largest=largest)


_RULES: dict[str, dict[str, Any]] = {
    "softmax": {"results": _like_first, "jvp": _softmax_jvp},
    "softmax_dgrad": {
        "results": _like_first,
        "jvp": ft.partial(primitives.jvp_of_linear, "softmax_dgrad", formulas.softmax_dgrad),
        "transpose": _dgrad_transpose,
    },
    "logsumexp": {"results": _reduced, "jvp": _logsumexp_jvp},
}
for _op, _rules in _RULES.items():
    batch = ft.partial(primitives.batch_leading, _op)
    primitives.define(_op, **_rules, batch=batch, factors=ft.partial(_factors, _op))
