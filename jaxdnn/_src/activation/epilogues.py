"""What happens to an accumulator before its one conversion: y = act(alpha * acc + beta * prior + residual + bias).

Of a gradient it may be that before a relu: 0 unless the relu's result, a further operand, is positive.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.activation import formulas, primitive
from jaxdnn._src.activation.formulas import DERIVATIVE_FROM_OUTPUT, Parameter, activate, derivative
from jaxdnn._src.core.blending import along_channel, convert, scaled_prior
from jaxdnn._src.core.determinism import LEVELS, is_fixed
from jaxdnn._src.core.rounding import product, real


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The static part; which of prior, bias, residual, a relu's result are an op's further operands, in that order."""

    alpha: float = 1.0
    beta: float = 0.0
    prior: bool = False
    bias: bool = False
    residual: bool = False
    relu: bool = False
    activation: tuple[str, Parameter] | None = None
    integer: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(name for name in ("prior", "bias", "residual", "relu") if getattr(self, name))

    @property
    def linear(self) -> bool:
        """Whether all that is left is a constant factor, so that the op is linear in each of its two arrays."""
        return not self.operands and self.activation is None

    @property
    def like_result(self) -> tuple[str, ...]:
        """The operands that have the result's shape."""
        return tuple(name for name in self.operands if name != "bias")

    def only_alpha(self) -> "Epilogue":
        return Epilogue(alpha=self.alpha, integer=self.integer)

    def without_activation(self) -> "Epilogue":
        return dataclasses.replace(self, activation=None)


def apply(
    epilogue: Epilogue,
    acc: Array,
    operands: Sequence[Array],
    *,
    channel: int,
    out_dtype: Any,
    level: str = "fast",
    stored: bool = False,
) -> Array:
    """Runs the epilogue on an accumulator; `channel` is the axis the bias lies along. Products are rounded.

    stored: whether an activation's result is read from memory by all that uses it, see `activated`.
    `epilogue.alpha` and `epilogue.beta` may be traced scalars here, and alpha a vector of a scale for each channel, or
    an array of the accumulator's rank that broadcasts to it; a traced beta of zero does not read the prior.
    """
    extras = dict(zip(epilogue.operands, operands, strict=True))
    if jnp.issubdtype(acc.dtype, jnp.integer) and not epilogue.integer:
        acc = real(acc, np.float32) if is_fixed(level) else acc.astype(jnp.float32)
    z = acc if is_one(epilogue.alpha) else product(acc, _factor(epilogue.alpha, acc, channel))
    if "prior" in extras:
        z = z + scaled_prior(epilogue.beta, extras["prior"].astype(z.dtype))
    if "residual" in extras:
        z = z + extras["residual"].astype(z.dtype)
    if "bias" in extras:
        z = z + along_channel(extras["bias"].astype(z.dtype), z.ndim, channel)
    if "relu" in extras:
        z = before_relu(z, extras["relu"])
    if epilogue.activation is None or epilogue.integer:
        return convert(z if epilogue.activation is None else jnp.maximum(z, 0), out_dtype)
    if not jnp.issubdtype(out_dtype, jnp.inexact):
        return convert(activated(z, *epilogue.activation, level, z.dtype, stored), out_dtype)
    return activated(z, *epilogue.activation, level, np.dtype(out_dtype), stored)


def _factor(alpha: float | Array, acc: Array, channel: int) -> Array:
    alpha = jnp.asarray(alpha).astype(acc.dtype)
    return along_channel(alpha, acc.ndim, channel) if alpha.ndim == 1 else alpha


def before_relu(dy: Array, y: Array) -> Array:
    """dy where y, a relu's result, is positive, and 0 elsewhere: bits are compared, for XLA's CPU code takes subnormal
    numbers for 0."""
    bits = formulas.bits(y)
    positive = (bits != 0) & (bits <= jnp.iinfo(bits.dtype).max // 2) & (y == y)
    return jnp.where(positive, dy, jnp.zeros_like(dy))


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4, 5))
def activated(
    z: Array, name: str, parameter: Parameter, level: str, out_dtype: np.dtype, stored: bool = False
) -> Array:
    """act(z), computed in z's own precision and converted once; where the level fixes bits, as an op that nothing
    around it is joined with.

    stored: whether XLA shall not compute it again, without the conversion, for those that use it, but not its tangent.
    """
    if is_fixed(level):
        spec = activation_spec(name, parameter, z.dtype, level)
        return convert(primitive.bind("activation", z, spec=spec), out_dtype)
    y = convert(activate(z, name, parameter), out_dtype)
    return lax.optimization_barrier(y) if stored else y


@activated.defjvp
def _activated_jvp(
    name: str, parameter: Parameter, level: str, out_dtype: np.dtype, stored: bool, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    (z,), (tangent,) = primals, tangents
    y = activated(z, name, parameter, level, out_dtype, stored)
    return y, along(tangent, z, y, name, parameter, level)


def along(tangent: Array, z: Array, y: Array, name: str, parameter: Parameter, level: str) -> Array:
    """act'(z) times a tangent of z, in the dtype of y = act(z).

    It keeps y, where that tells the slope, or the slope in y's dtype: in z's, float32, it would take twice the memory
    of y. Where the level fixes bits, it keeps z, and is an op that nothing around it is joined with.
    """
    told = name in DERIVATIVE_FROM_OUTPUT
    if told or is_fixed(level):
        spec = activation_spec(name, parameter, y.dtype, level)
        return primitive.bind("activation_dgrad", tangent, y if told else z, spec=spec)
    return derivative(z, name, parameter).astype(y.dtype) * tangent.astype(y.dtype)


def activation_spec(name: str, parameter: Parameter, dtype: Any, level: str) -> primitive.ActivationSpec:
    """The spec of an activation alone, whose result has this dtype; its engine guarantees mesh_invariant for any."""
    own = min(level, "mesh_invariant", key=LEVELS.index)
    return primitive.ActivationSpec(name, parameter, 1.0, np.dtype(dtype), None, own)


def is_one(alpha: Any) -> bool:
    """Whether a factor is the number 1, known when the call is traced."""
    return isinstance(alpha, int | float) and alpha == 1
