"""The one fence between a product and what is made of it: what passes it is rounded to its dtype first.

XLA lets LLVM and ptxas contract a * b + c into one fused multiply-add, in one program and not in another: with the bits
of the operands equal, those of the results then depend on the shape, on what else is compiled, and on the device.
`lax.optimization_barrier` does not prevent it on CPUs up to JAX 0.10 (XLA drops it before it fuses loops), and where it
does it writes the product to memory. Here a select stands between the two, of which no compiler can say that it always
gives p: -p has other bits than p, also where p is NaN. It knows nothing of the factors, so squares may pass, of which
compilers know the sign.

Narrow floats are computed in float32, and XLA may leave out the rounding in between (`xla_allow_excess_precision`), a
select's too: these go through integers, combined with a zero that no compiler finds out, for n (n + 1) is even. In one
dimension, for XLA folds `bitcast_convert_type` of a constant array that it keeps in another order of dimensions to
wrong values (JAX 0.10 to 0.12: of `x[:, rows]` for a constant x, say).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

_INTEGERS = {1: jnp.uint8, 2: jnp.uint16}


def product(a: Array, b: Array) -> Array:
    """a b for two arrays of one dtype, rounded to that dtype whatever it is added to."""
    return rounded(a * b)


def product_along(a: Array, v: Array) -> Array:
    """The same of a tangent v, in which it is linear: what JAX transposes holds no `rounded`. float32 and float64."""
    p = a * v
    return jnp.where(a == a, p, -p)


def rounded(p: Array) -> Array:
    """The numbers of p, which no compiler joins with the operation that made them. Integers pass as they are."""
    return _fence(p) if jnp.issubdtype(p.dtype, jnp.floating) else p


@jax.custom_jvp
def _fence(p: Array) -> Array:
    if p.dtype.itemsize > 2:
        return jnp.where(p == p, p, -p)
    integers = _INTEGERS[p.dtype.itemsize]
    n, one = lax.bitcast_convert_type(p.reshape(-1), integers), jnp.ones((), integers)
    return lax.bitcast_convert_type(n ^ (n * (n + one) & one), p.dtype).reshape(p.shape)


@_fence.defjvp
def _fence_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _fence(*primals), tangents[0]
