"""Sigmoid and tanh of stated steps: a polynomial and a quotient, whose bits depend on no device and no program.

XLA's own tanh has other bits in one of its code generators for GPUs than in another, and which of them a computation
gets depends on the shapes around it.
"""

import dataclasses
import functools as ft
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core.rounding import product, quotient


@dataclasses.dataclass(frozen=True)
class Float:
    """What differs between float32 and float64.

    Attributes:
      bits: the integers of its size; digits: those behind the point; bias: that of its exponents.
      degree: that of the polynomial; high, low: log 2, in a part of few digits and the rest.
      sigmoid, tanh: how far from 0 they are computed; beyond, sigmoid's exponential is 0, and tanh no longer changes.
    """

    bits: Any
    digits: int
    bias: int
    degree: int
    high: float
    low: float
    sigmoid: float
    tanh: float


FLOATS = {
    np.dtype(np.float32): Float(jnp.int32, 23, 127, 6, 0.693359375, -2.121944400546905827679e-4, 69.0, 20.0),
    np.dtype(np.float64): Float(
        jnp.int64, 52, 1023, 12, 6.93147180369123816490e-01, 1.90821492927058770002e-10, 690.0, 40.0
    ),
}


def _exponential(v: Array) -> tuple[Array, Array]:
    """2^n and 2^n t, with e^v = 2^n (1 + t)."""
    of, at = FLOATS[v.dtype], ft.partial(jnp.asarray, dtype=v.dtype)
    n = lax.round(product(v, at(1 / math.log(2))), lax.RoundingMethod.TO_NEAREST_EVEN)
    s = (v - product(n, at(of.high))) - product(n, at(of.low))
    q = jnp.full_like(s, 1 / math.factorial(of.degree + 1))
    for i in range(of.degree, 0, -1):
        q = product(q, s) + at(1 / math.factorial(i))
    power = lax.bitcast_convert_type((n.astype(of.bits) + of.bias) << of.digits, v.dtype)
    return power, product(power, product(s, q))


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), by the exponential of -|x|."""
    most = jnp.asarray(FLOATS[x.dtype].sigmoid, x.dtype)
    size = jnp.where(x == x, jnp.abs(x), jnp.zeros_like(x))
    power, rest = _exponential(-jnp.minimum(size, most))
    e = jnp.where(size > most, jnp.zeros_like(x), power + rest)
    return jnp.where(x == x, quotient(jnp.where(x >= 0, jnp.ones_like(x), e), 1 + e), x)


def tanh(x: Array) -> Array:
    """-m / (2 + m) with the sign of x, for m = e^(-2 |x|) - 1."""
    most = jnp.asarray(FLOATS[x.dtype].tanh, x.dtype)
    size = jnp.where(x == x, jnp.minimum(jnp.abs(x), most), jnp.zeros_like(x))
    power, rest = _exponential(-(size + size))
    m = (power - 1) + rest
    return jnp.where(x == x, jnp.copysign(quotient(m, 2 + m), x), x)
