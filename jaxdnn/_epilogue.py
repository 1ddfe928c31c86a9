"""What happens to an accumulator before its one conversion: y = act(alpha * acc + beta * prior + residual + bias)."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jaxdnn import _activation, _check
from jaxdnn._activation_formulas import ACTIVATIONS as ACTIVATIONS
from jaxdnn._activation_formulas import DERIVATIVE_FROM_OUTPUT as DERIVATIVE_FROM_OUTPUT
from jaxdnn._activation_formulas import Parameter, activate
from jaxdnn._activation_formulas import derivative as derivative
from jaxdnn._activation_formulas import derivative_from_output as derivative_from_output
from jaxdnn._activation_formulas import read_activation as read_activation
from jaxdnn._rounded import nearest, product
from jaxdnn.determinism import LEVELS, is_fixed

# What a scale that is an array may be.
SCALES = (
    *(jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.float8_e4m3fn, jnp.float8_e5m2),
    *(jnp.int32, jnp.int64),
)


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The static part; which of prior, bias and residual are given, in that order, among an op's further operands."""

    alpha: float = 1.0
    beta: float = 0.0
    prior: bool = False
    bias: bool = False
    residual: bool = False
    activation: tuple[str, Parameter] | None = None
    integer: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(name for name in ("prior", "bias", "residual") if getattr(self, name))

    @property
    def linear(self) -> bool:
        """Whether all that is left is a constant factor, so that the op is linear in each of its two arrays."""
        return not self.operands and self.activation is None

    def only_alpha(self) -> "Epilogue":
        return Epilogue(alpha=self.alpha, integer=self.integer)

    def without_activation(self) -> "Epilogue":
        return dataclasses.replace(self, activation=None)


def apply(
    epilogue: Epilogue, acc: Array, operands: Sequence[Array], *, channel: int, out_dtype: Any, level: str = "fast"
) -> Array:
    """Runs the epilogue on an accumulator; `channel` is the axis the bias lies along. Products are rounded.

    `epilogue.alpha` and `epilogue.beta` may be traced scalars here; a traced beta of zero does not read the prior.
    """
    extras = dict(zip(epilogue.operands, operands, strict=True))
    if jnp.issubdtype(acc.dtype, jnp.integer) and not epilogue.integer:
        acc = acc.astype(jnp.float32)
    z = acc if _is_one(epilogue.alpha) else product(acc, jnp.asarray(epilogue.alpha).astype(acc.dtype))
    if "prior" in extras:
        z = z + scaled_prior(epilogue.beta, extras["prior"].astype(z.dtype))
    if "residual" in extras:
        z = z + extras["residual"].astype(z.dtype)
    if "bias" in extras:
        z = z + along_channel(extras["bias"].astype(z.dtype), z.ndim, channel)
    if epilogue.activation is not None:
        z = jnp.maximum(z, 0) if epilogue.integer else activated(z, *epilogue.activation, level)
    return convert(z, out_dtype)


def activated(z: Array, name: str, parameter: Parameter, level: str) -> Array:
    """act(z) in z's own precision; where the level fixes bits, as an op that nothing around it is joined with."""
    if not is_fixed(level):
        return activate(z, name, parameter)
    return _activation.bind("activation", z, spec=activation_spec(name, parameter, z.dtype, level))


def activation_spec(name: str, parameter: Parameter, dtype: Any, level: str) -> _activation.ActivationSpec:
    """The spec of an activation alone, whose result has this dtype; its engine guarantees mesh_invariant for any."""
    own = min(level, "mesh_invariant", key=LEVELS.index)
    return _activation.ActivationSpec(name, parameter, 1.0, np.dtype(dtype), None, own)


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, int | float) and alpha == 1


def scaled_prior(beta: Any, prior: Array) -> Array:
    """beta * prior, not read where beta is a traced zero."""
    if isinstance(beta, int | float):  # zero is decided when traced: then there is no prior here
        return prior if beta == 1 else product(prior, jnp.asarray(beta).astype(prior.dtype))
    return _scaled_unless_zero(jnp.asarray(beta).astype(prior.dtype), prior)


def _product_or_zero(scale: Array, prior: Array) -> Array:
    return product(scale, jnp.where(scale == 0, jnp.zeros_like(prior), prior))


@jax.custom_jvp
def _scaled_unless_zero(scale: Array, prior: Array) -> Array:
    """scale * prior, and 0 where the scale is 0, whatever the prior is."""
    return _product_or_zero(scale, prior)


def _scaled_unless_zero_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    """The product's derivative. The one in the scale is the prior, also where the scale is zero."""
    (scale, prior), (d_scale, d_prior) = primals, tangents
    y = _scaled_unless_zero(scale, prior)
    terms = [] if isinstance(d_scale, SymbolicZero) else [product(d_scale, prior)]
    terms += [] if isinstance(d_prior, SymbolicZero) else [_product_or_zero(scale, d_prior)]
    return y, ft.reduce(jnp.add, terms) if terms else jnp.zeros_like(y)


_scaled_unless_zero.defjvp(_scaled_unless_zero_jvp, symbolic_zeros=True)


def read_scales(
    alpha: Any, beta: Any, prior: Any, names: tuple[str, str, str] = ("alpha", "beta", "prior")
) -> tuple[float | Array, float | Array]:
    """Reads the two scales of a blend; with a beta that is not zero there must be a prior."""
    of_alpha, of_beta, of_prior = names
    alpha, beta = read_scale(of_alpha, alpha), read_scale(of_beta, beta)
    if prior is None and not (isinstance(beta, float) and beta == 0):
        raise ValueError(
            f"`{of_prior}` must be given when `{of_beta}` is not zero, got {of_beta} {_check.shown(beta)} and no "
            f"{of_prior}."
        )
    return alpha, beta


def read_scale(name: str, value: Any) -> float | Array:
    """Reads `alpha` or `beta`: a number known when traced, or a scalar array."""
    if _check.is_number(value):
        return _check.as_float(name, value)
    value = _check.array(name, value)
    _check.shape(name, value, (), "a number or a scalar array")
    _check.dtype(name, value, SCALES)
    return jnp.asarray(value)


def along_channel(bias: Array, ndim: int, channel: int) -> Array:
    """A vector as an array that broadcasts along the channel axis."""
    return lax.expand_dims(bias, [axis for axis in range(ndim) if axis != channel])


def convert(z: Array, dtype: Any) -> Array:
    """The one conversion: nearest even, rounded once; integers saturate."""
    if not jnp.issubdtype(dtype, jnp.integer) or z.dtype == dtype:
        return nearest(z, dtype)
    limits = jnp.iinfo(dtype)
    if jnp.issubdtype(z.dtype, jnp.floating):
        z = jnp.round(z)
    return jnp.clip(z, limits.min, limits.max).astype(dtype)
