"""What happens to an accumulator before its one conversion: y = act(alpha * acc + beta * prior + residual + bias)."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jaxdnn import _check

# name -> the value of its parameter if the call gives none (None: the activation has no parameter).
ACTIVATIONS: dict[str, float | None] = {
    "identity": None,
    "relu": None,
    "sigmoid": None,
    "tanh": None,
    "gelu": None,
    "gelu_tanh": None,
    "elu": 1.0,
    "swish": 1.0,
    "softplus": 1.0,
    "leaky_relu": 0.01,
    "clipped_relu": 6.0,
}
# Of these, the output alone tells on which side of its kinks the input was, so the input need not be kept.
DERIVATIVE_FROM_OUTPUT = ("relu", "leaky_relu")
_SQRT_HALF = 0.7071067811865476
_SQRT_2_OVER_PI = 0.7978845608028654
_INV_SQRT_2PI = 0.3989422804014327


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The static part; which of prior, bias and residual are given, in that order, among an op's further operands."""

    alpha: float = 1.0
    beta: float = 0.0
    prior: bool = False
    bias: bool = False
    residual: bool = False
    activation: tuple[str, float | None] | None = None
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


def apply(epilogue: Epilogue, acc: Array, operands: Sequence[Array], *, channel: int, out_dtype: Any) -> Array:
    """Runs the epilogue on an accumulator; `channel` is the axis the bias lies along.

    `epilogue.alpha` and `epilogue.beta` may be traced scalars here; a traced beta of zero does not read the prior.
    """
    extras = dict(zip(epilogue.operands, operands, strict=True))
    if jnp.issubdtype(acc.dtype, jnp.integer) and not epilogue.integer:
        acc = acc.astype(jnp.float32)
    z = acc if _is_one(epilogue.alpha) else acc * jnp.asarray(epilogue.alpha).astype(acc.dtype)
    if "prior" in extras:
        z = z + _scaled_prior(epilogue.beta, extras["prior"].astype(z.dtype))
    if "residual" in extras:
        z = z + extras["residual"].astype(z.dtype)
    if "bias" in extras:
        z = z + along_channel(extras["bias"].astype(z.dtype), z.ndim, channel)
    if epilogue.activation is not None:
        z = jnp.maximum(z, 0) if epilogue.integer else activate(z, *epilogue.activation)
    return convert(z, out_dtype)


def _is_one(alpha: Any) -> bool:
    return isinstance(alpha, int | float) and alpha == 1


def _scaled_prior(beta: Any, prior: Array) -> Array:
    if isinstance(beta, int | float):  # zero is decided when traced: then there is no prior here
        return jnp.asarray(beta).astype(prior.dtype) * prior
    return _scaled_unless_zero(jnp.asarray(beta).astype(prior.dtype), prior)


def _product_or_zero(scale: Array, prior: Array) -> Array:
    return scale * jnp.where(scale == 0, jnp.zeros_like(prior), prior)


@jax.custom_jvp
def _scaled_unless_zero(scale: Array, prior: Array) -> Array:
    """scale * prior, and 0 where the scale is 0, whatever the prior is."""
    return _product_or_zero(scale, prior)


def _scaled_unless_zero_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    """The product's derivative. The one in the scale is the prior, also where the scale is zero."""
    (scale, prior), (d_scale, d_prior) = primals, tangents
    y = _scaled_unless_zero(scale, prior)
    terms = [] if isinstance(d_scale, SymbolicZero) else [d_scale * prior]
    terms += [] if isinstance(d_prior, SymbolicZero) else [_product_or_zero(scale, d_prior)]
    return y, ft.reduce(jnp.add, terms) if terms else jnp.zeros_like(y)


_scaled_unless_zero.defjvp(_scaled_unless_zero_jvp, symbolic_zeros=True)


def along_channel(bias: Array, ndim: int, channel: int) -> Array:
    """A vector as an array that broadcasts along the channel axis."""
    return lax.expand_dims(bias, [axis for axis in range(ndim) if axis != channel])


def convert(z: Array, dtype: Any) -> Array:
    """The one conversion: nearest even; integers saturate."""
    if not jnp.issubdtype(dtype, jnp.integer) or z.dtype == dtype:
        return z.astype(dtype)
    limits = jnp.iinfo(dtype)
    if jnp.issubdtype(z.dtype, jnp.floating):
        z = jnp.round(z)
    return jnp.clip(z, limits.min, limits.max).astype(dtype)


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def activate(z: Array, name: str, parameter: float | None) -> Array:
    """act(z) in z's own precision."""
    return _FORWARD[name](z, parameter)


@activate.defjvp
def _activate_jvp(name: str, parameter: float | None, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (z,), (tangent,) = primals, tangents
    return activate(z, name, parameter), derivative(z, name, parameter) * tangent


def derivative(z: Array, name: str, parameter: float | None) -> Array:
    """act'(z) in z's own precision; at a kink, that of the side below; clipped_relu's is 0 at its ceiling too."""
    return _DERIVATIVE[name](z, parameter)


def derivative_from_output(y: Array, name: str, parameter: float | None) -> Array:
    """act'(z) told from y = act(z), for the activations in DERIVATIVE_FROM_OUTPUT."""
    return derivative(y, name, parameter)


def _swish(z: Array, beta: Any) -> Array:
    return z * lax.logistic(z * beta)


def _swish_derivative(z: Array, beta: Any) -> Array:
    s = lax.logistic(z * beta)
    return s + z * beta * s * (1 - s)


def _gelu_tanh_inner(z: Array) -> Array:
    return _SQRT_2_OVER_PI * (z + 0.044715 * z * z * z)


def _gelu_tanh_derivative(z: Array, _: Any) -> Array:
    t = jnp.tanh(_gelu_tanh_inner(z))
    inner = _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * z * z)
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * inner


def _softplus(z: Array, beta: Any) -> Array:
    return jnp.logaddexp(z * beta, jnp.zeros_like(z)) / beta


_FORWARD: dict[str, Callable[[Array, Any], Array]] = {
    "identity": lambda z, _: z,
    "relu": lambda z, _: jnp.maximum(z, 0),
    "sigmoid": lambda z, _: lax.logistic(z),
    "tanh": lambda z, _: jnp.tanh(z),
    # erfc keeps the relative accuracy of the negative tail, where 1 + erf cancels.
    "gelu": lambda z, _: 0.5 * z * lax.erfc(-z * _SQRT_HALF),
    "gelu_tanh": lambda z, _: 0.5 * z * (1 + jnp.tanh(_gelu_tanh_inner(z))),
    "elu": lambda z, alpha: jnp.where(z > 0, z, alpha * jnp.expm1(jnp.minimum(z, 0))),
    "swish": _swish,
    "softplus": _softplus,
    "leaky_relu": lambda z, slope: jnp.where(z > 0, z, slope * z),
    "clipped_relu": lambda z, ceiling: jnp.minimum(jnp.maximum(z, 0), ceiling),
}
_DERIVATIVE: dict[str, Callable[[Array, Any], Array]] = {
    "identity": lambda z, _: jnp.ones_like(z),
    "relu": lambda z, _: (z > 0).astype(z.dtype),
    "sigmoid": lambda z, _: lax.logistic(z) * lax.logistic(-z),
    "tanh": lambda z, _: 1 - jnp.tanh(z) ** 2,
    "gelu": lambda z, _: 0.5 * lax.erfc(-z * _SQRT_HALF) + z * _INV_SQRT_2PI * jnp.exp(-0.5 * z * z),
    "gelu_tanh": _gelu_tanh_derivative,
    "elu": lambda z, alpha: jnp.where(z > 0, jnp.ones_like(z), alpha * jnp.exp(jnp.minimum(z, 0))),
    "swish": _swish_derivative,
    "softplus": lambda z, beta: lax.logistic(z * beta),
    "leaky_relu": lambda z, slope: jnp.where(z > 0, jnp.ones_like(z), jnp.full_like(z, slope)),
    "clipped_relu": lambda z, ceiling: ((z > 0) & (z < ceiling)).astype(z.dtype),
}


def read_activation(value: Any) -> tuple[str, float | None] | None:
    """Reads `activation`: None, a name, or (name, parameter)."""
    if value is None or (isinstance(value, str) and value == "identity"):
        return None
    name, parameter = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(
            f"`activation` must be None, one of {', '.join(map(repr, ACTIVATIONS))}, "
            f"or a pair of a name and its parameter, got {value!r}."
        )
    default = ACTIVATIONS[name]
    if parameter is None:
        return name, default
    if default is None or not _is_number(parameter):
        takes = "no parameter" if default is None else "one number"
        raise ValueError(f"`activation` {name!r} takes {takes}, got {parameter!r}.")
    parameter = _check.as_float("activation", parameter)
    if name == "leaky_relu" and not 0 <= parameter <= 1:
        raise ValueError(f"`activation` 'leaky_relu' needs a slope from 0 to 1, got {parameter!r}.")
    if name == "clipped_relu" and not parameter >= 0:
        raise ValueError(f"`activation` 'clipped_relu' needs a ceiling of at least 0, got {parameter!r}.")
    if name == "softplus" and not parameter > 0:
        raise ValueError(f"`activation` 'softplus' needs a positive parameter, got {parameter!r}.")
    if not math.isfinite(parameter):
        raise ValueError(f"`activation` {name!r} needs a finite parameter, got {parameter!r}.")
    return name, parameter


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
