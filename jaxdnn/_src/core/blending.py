"""What ops on arrays of any dtype share: reading operands, the blend alpha * computed + beta * prior, the conversion.

The blend is bound by memory and consists of XLA's operations; it needs neither a primitive nor an engine.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jaxdnn._src.core import checks
from jaxdnn._src.core.determinism import LEVELS, required
from jaxdnn._src.core.rounding import at_edges, nearest, product, real, rounded

FLOATS = (*checks.FLOATS, jnp.float8_e4m3fn, jnp.float8_e5m2)
SCALES = (*FLOATS, jnp.int32, jnp.int64)  # what a scale that is an array may be
INTEGERS = (jnp.int8, jnp.uint8, jnp.int32)
_F32, _F64, _I32 = (np.dtype(t) for t in (jnp.float32, jnp.float64, jnp.int32))


@dataclasses.dataclass(frozen=True)
class Types:
    """The dtypes of a call: what it is computed in, and the result's."""

    accumulate: np.dtype
    out: np.dtype


def array(name: str, value: Any, level: str | None = None) -> Array:
    """Reads an operand of any of the dtypes. If the level fixes bits, XLA must not fuse it with what computed it.

    The level is that of the call; None is that of the enclosing context.
    """
    value = checks.array(name, value)
    checks.dtype(name, value, (*FLOATS, *INTEGERS))
    return at_edges(required(level), value)


def same_dtype(name: str, value: Array, other_name: str, other: Array) -> None:
    """Checks that two operands have one dtype."""
    if value.dtype != other.dtype:
        raise TypeError(f"`{name}` must have the dtype of `{other_name}`, {other.dtype.name}, got {value.dtype.name}.")


def accumulator(dtype: Any) -> np.dtype:
    """The dtype to compute in: float32, float64 for float64, int32 for integers."""
    dtype = np.dtype(dtype)
    return _F64 if dtype == _F64 else _F32 if dtype in map(np.dtype, FLOATS) else _I32


def out_dtype(value: Any, like: Array) -> np.dtype:
    """Reads `out_dtype`; None is the operand's."""
    wide = _F64 if like.dtype == _F64 else _F32
    return checks.out_dtype(value, like.dtype, (*FLOATS, *INTEGERS), wide)


def scaled(z: Array, alpha: float | Array) -> Array:
    """alpha * z rounded to z's dtype (float32 for an integer z unless alpha is 1)."""
    if isinstance(alpha, float) and alpha == 1:
        return z
    z = real(z, _F32) if z.dtype == _I32 else z
    return product(z, jnp.asarray(alpha).astype(z.dtype))


def blend(
    computed: Array,
    *,
    alpha: Any,
    beta: Any,
    prior: Any,
    out: np.dtype,
    dtypes: Sequence[Any] = (),
    names: tuple[str, str, str] = ("alpha", "beta", "prior"),
    level: str = LEVELS[-1],
) -> Array:
    """alpha * computed + beta * prior in the dtype of `computed`, and the one conversion.

    Reads and checks the arguments, of these names; if beta is zero, the prior is not read. Integers stay integers if
    alpha is 1 and beta 0 or 1, and otherwise become float32. Every step is rounded, the last one whatever comes after
    it if the call's level fixes bits.
    """
    edge = ft.partial(at_edges, level)
    alpha, beta = read_scales(alpha, beta, prior, names)
    none = isinstance(beta, float) and beta == 0
    if prior is not None:
        prior = checks.array(names[2], prior)
        checks.shape(names[2], prior, computed.shape, "the result's")
        checks.dtype(names[2], prior, sorted({np.dtype(t) for t in (computed.dtype, out, *dtypes)}, key=str))
    integer = computed.dtype == _I32 and isinstance(alpha, float) and alpha == 1
    if prior is None or none:
        return edge(convert(scaled(computed, alpha), out))
    prior = edge(prior)
    if integer and isinstance(beta, float) and beta == 1 and jnp.issubdtype(prior.dtype, jnp.integer):
        return convert(computed + prior.astype(_I32), out)
    z = scaled(real(computed, _F32) if computed.dtype == _I32 else computed, alpha)
    term = real(prior, z.dtype)
    # Rounded even if nothing was scaled: the caller may have computed x or the prior as a product.
    return edge(convert(rounded(z) + rounded(scaled_prior(beta, term)), out))


def is_plain(alpha: Any, beta: Any) -> bool:
    """Whether there is nothing to blend, so that what was computed is the result; a bool is left to be refused."""
    return checks.is_number(alpha) and checks.is_number(beta) and alpha == 1 and beta == 0


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
    alpha: Any,
    beta: Any,
    prior: Any,
    names: tuple[str, str, str] = ("alpha", "beta", "prior"),
    channels: int | None = None,
) -> tuple[float | Array, float | Array]:
    """Reads the two scales of a blend; with a beta that is not zero there must be a prior.

    channels: of the result, if alpha may have a number for each.
    """
    of_alpha, of_beta, of_prior = names
    alpha, beta = read_scale(of_alpha, alpha, channels), read_scale(of_beta, beta)
    if prior is None and not (isinstance(beta, float) and beta == 0):
        raise ValueError(
            f"`{of_prior}` must be given when `{of_beta}` is not zero, got {of_beta} {checks.shown(beta)} and no "
            f"{of_prior}."
        )
    return alpha, beta


def read_scale(name: str, value: Any, channels: int | None = None) -> float | Array:
    """Reads `alpha` or `beta`: a number known when traced, or a scalar array, whose rounding is not left out.

    With `channels` it may be an array of a number for each.
    """
    if checks.is_number(value):
        return checks.as_float(name, value)
    value = checks.array(name, value)
    if channels is None or value.ndim == 0:
        checks.shape(name, value, (), "a number or a scalar array")
    else:
        checks.shape(name, value, (channels,), "one for each channel of the result, if it is no number")
    checks.dtype(name, value, SCALES)
    return rounded(value) if value.dtype.itemsize <= 2 else value


def operand(value: Any) -> float | None:
    """A scale as an operand of a call's program; None of 0 and 1, which decide what is computed, and of no number.

    A number too small for float32 decides too: in an array it would be 0, beside which nothing is read.
    """
    if not checks.is_number(value) or value in (0, 1) or not abs(value) >= jnp.finfo(jnp.float32).tiny:
        return None
    return float(value)


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
