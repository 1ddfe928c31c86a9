"""Products that are rounded before they are added to anything.

XLA lets LLVM and ptxas contract a * b + c into one fused multiply-add, in one program and not in another: with the bits
of the operands equal, those of the results then depend on the shape, on what else is compiled, and on the device.
`lax.optimization_barrier` does not prevent it on CPUs up to JAX 0.10 (XLA drops it before it fuses loops), and where it
does it writes the product to memory. Taking the product's sign from its factors' signs says nothing new, but no
compiler knows that, so what is added is not a product any more. It costs a few operations an element.

By comparisons and not by bits: XLA folds `bitcast_convert_type` of a constant array that it keeps in another order of
dimensions to wrong values (JAX 0.10 to 0.12: of `x[:, rows]` for a constant x, say).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def product(a: Array, b: Array) -> Array:
    """a b for two arrays of floats of one dtype and shape, rounded to that dtype whatever it is added to."""
    return apart(a * b, a, b)


@jax.custom_jvp
def apart(p: Array, a: Array, b: Array) -> Array:
    """p, which is a b, or 0 where it is not to be read."""
    signed = jnp.where((a < 0) != (b < 0), -jnp.abs(p), jnp.abs(p))
    return jnp.where(p == 0, p, signed)  # a zero has a sign that comparisons do not see


@apart.defjvp
def _apart_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return apart(*primals), tangents[0]
