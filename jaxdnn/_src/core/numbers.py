"""Numbers of any size: sums, products, exponentials and logarithms of a mantissa and an exponent, with stated bits.

Probabilities of long sequences are too small for a float, and their logarithms too inexact: beside a loss of 30,000,
float32 does not tell 0.002 apart. So a probability is a `Number` m 2^e, of a float m and an integer e. A sum
of such numbers multiplies by powers of two alone, which is exact: no compiler can change its bits by contraction, and
nothing is computed but products, sums, quotients and integers, each rounded in IEEE arithmetic. Exponential and
logarithm are polynomials of stated coefficients.
"""

import dataclasses
import functools as ft
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core.rounding import product, quotient, real, reciprocal

FARTHEST = 2.0**27  # of a score from its row's maximum, or from 0; beyond, its exponential is 0
LARGEST = 2**28  # exponents
ZERO = -(2**29)  # the exponent of 0
ALIGNED = -64  # so many places below the largest term of a sum another has no effect on it


class Number(NamedTuple):
    """m 2^e, element by element, for an m that is not negative and, unless it is 0, a normal float.

    What `normal` and the sums return has m from 1/2 to 1, or m = 0 and e = `ZERO`; terms of a sum must be such.
    """

    m: Array
    e: Array


@dataclasses.dataclass(frozen=True)
class Float:
    """What differs between float32 and float64.

    Attributes:
      bits: the integers of its size; digits: those behind the point; half: the exponent field of 1/2.
      least: the least exponent that a plain result has; below, it is 0.
      exp: the coefficients of e^r, the highest power first; log: those of artanh(s) / s in s^2.
      high, low: log 2, in a part of few digits and the rest.
    """

    bits: Any
    digits: int
    half: int
    least: int
    exp: tuple[float, ...]
    log: tuple[float, ...]
    high: float
    low: float


def _exponential(degree: int) -> tuple[float, ...]:
    return tuple(1 / math.factorial(k) for k in range(degree, -1, -1))


def _artanh(degree: int) -> tuple[float, ...]:
    return tuple(1 / (2 * k + 1) for k in range(degree, -1, -1))


FLOATS = {
    np.dtype(np.float32): Float(
        jnp.int32, 23, 126, -100, _exponential(7), _artanh(5), 0.693359375, -2.121944400546905827679e-4
    ),
    np.dtype(np.float64): Float(
        jnp.int64,
        52,
        1022,
        -1000,
        _exponential(13),
        _artanh(11),
        6.93147180369123816490e-01,
        1.90821492927058770002e-10,
    ),
}


def normal(m: Array, e: Array) -> Number:
    """m 2^e with m brought to its place."""
    of = FLOATS[m.dtype]
    bits = lax.bitcast_convert_type(m, of.bits)
    e = e + (bits >> of.digits).astype(jnp.int32) - of.half
    m = lax.bitcast_convert_type(bits & ((1 << of.digits) - 1) | (of.half << of.digits), m.dtype)
    zero = (bits == 0) | (e < -LARGEST)
    return Number(jnp.where(zero, jnp.zeros_like(m), m), jnp.where(zero, ZERO, jnp.minimum(e, LARGEST)))


def power(e: Array, dtype: Any) -> Array:
    """2^e for exponents of normal numbers."""
    of = FLOATS[np.dtype(dtype)]
    return lax.bitcast_convert_type((e.astype(of.bits) + (of.half + 1)) << of.digits, dtype)


def plain(m: Array, e: Array) -> Array:
    """m 2^e as a float; 0 where e is small."""
    least = FLOATS[m.dtype].least
    return jnp.where(e < least, jnp.zeros_like(m), m * power(jnp.clip(e, least, -least), m.dtype))


def aligned(*terms: Number) -> tuple[list[Array], Array]:
    """Terms with m from 1/2 to 1, or 0, as floats beside the largest of them, and its exponent."""
    top = ft.reduce(jnp.maximum, [term.e for term in terms])
    below = [term.e - top for term in terms]
    scales = (jnp.where(e < ALIGNED, 0, power(jnp.maximum(e, ALIGNED), terms[0].m.dtype)) for e in below)
    return [term.m * scale for term, scale in zip(terms, scales, strict=True)], top


def added(*terms: Number) -> Number:
    """The sum, from the left."""
    parts, top = aligned(*terms)
    return normal(ft.reduce(jnp.add, parts), top)


def added_times(p: Number, *terms: Number) -> Number:
    """The sum, from the left, rounded, times p."""
    parts, top = aligned(*terms)
    return normal(ft.reduce(jnp.add, parts) * p.m, top + p.e)


def where(keep: Array, a: Number, b: Number) -> Number:
    return Number(*(jnp.where(keep, x, y) for x, y in zip(a, b, strict=True)))


def one_at(place: Array, count: int, dtype: Any) -> Number:
    """(B, count): 1 at a place of each row, else 0."""
    here = lax.broadcasted_iota(jnp.int32, (place.shape[0], count), 1) == place[:, None]
    return Number(jnp.where(here, 0.5, 0.0).astype(dtype), jnp.where(here, 1, ZERO).astype(jnp.int32))


def exponential(d: Array) -> tuple[Array, Array]:
    """w, about from 1/2 to 2, and n with e^d = w 2^n; w = 0 for a d that is no number or far from 0."""
    of, at = FLOATS[d.dtype], ft.partial(jnp.asarray, dtype=d.dtype)
    near = jnp.abs(d) <= FARTHEST
    d = jnp.where(near, d, jnp.zeros_like(d))
    whole = lax.round(product(d, at(1 / math.log(2))), lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
    n = real(whole, d.dtype)
    r = (d - product(n, at(of.high))) - product(n, at(of.low))
    w = horner(of.exp, jnp.clip(r, -0.5, 0.5))  # where d has no digits behind the point, r may be anything
    return jnp.where(near, w, jnp.zeros_like(w)), whole


def logarithm(x: Number) -> Array:
    """log x, of an x that is not 0."""
    of, at = FLOATS[x.m.dtype], ft.partial(jnp.asarray, dtype=x.m.dtype)
    low = x.m < at(math.sqrt(0.5))
    m, e = jnp.where(low, x.m + x.m, x.m), real(jnp.where(low, x.e - 1, x.e), x.m.dtype)
    s = quotient(m - 1, m + 1)
    half = product(s, horner(of.log, product(s, s)))
    return product(e, at(of.high)) + (product(e, at(of.low)) + (half + half))


@jax.custom_jvp
def log(x: Array) -> Array:
    """log x of floats, with stated bits; of 0 it is -infinity, of what is less NaN. Its derivative is dx / x."""
    fits = (x > 0) & (x < jnp.inf)
    small = x < 2.0**-60  # and perhaps no normal float, whose exponent says less
    scaled = jnp.where(small, x * 2.0**60, x)
    m, e = normal(jnp.where(fits, scaled, jnp.ones_like(x)), jnp.zeros(x.shape, jnp.int32))
    of_others = jnp.where(x == 0, -jnp.inf, jnp.where(x > 0, x, jnp.nan)).astype(x.dtype)
    return jnp.where(fits & (scaled > 0), logarithm(Number(m, e - jnp.where(small, 60, 0))), of_others)


@log.defjvp
def _log_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return log(*primals), product(tangents[0], reciprocal(primals[0]))


def horner(coefficients: tuple[float, ...], x: Array) -> Array:
    """A polynomial, each product and each sum rounded."""
    constants = [jnp.asarray(c, x.dtype) for c in coefficients]
    return ft.reduce(lambda total, c: product(total, x) + c, constants[1:], jnp.broadcast_to(constants[0], x.shape))
