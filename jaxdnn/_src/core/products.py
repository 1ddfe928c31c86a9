"""Products of matrices by XLA, which for GPUs rounds each product of two numbers to their own type in some of them."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, export, lax

# Products of so few elements cost nothing in float32; XLA's own limit, below which no library is called, is lower.
SMALL = 4096


def dot(
    a: Array, b: Array, contract: tuple, batch: tuple = ((), ()), *, precision: lax.Precision, preferred: Any
) -> Array:
    """`lax.dot_general`, but narrow floats are multiplied as float32 where XLA might round what it adds up."""
    narrow = jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize < 4
    if narrow and _is_thin(a, b, contract, batch):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        highest = lax.Precision.HIGHEST
        product = lax.dot_general(a, b, (contract, batch), precision=highest, preferred_element_type=jnp.float32)
        return product.astype(preferred)
    # A dtype of 64 bits is named only where it is not the operands' own: outside of that mode JAX warns of the name.
    wider = None if a.dtype == preferred else preferred
    return lax.dot_general(a, b, (contract, batch), precision=precision, preferred_element_type=wider)


def _is_thin(a: Array, b: Array, contract: tuple, batch: tuple) -> bool:
    """Whether XLA may turn a product into multiplications and sums in the operands' own type (seen on GPUs).

    It does so where a side is a vector or the terms are one, and leaves small products, of however large a batch, to a
    loop that does the same.
    """
    if any(map(export.is_symbolic_dim, (a.size, b.size))):  # then it may be: the batch is known when it is compiled
        return True
    terms = math.prod(a.shape[axis] for axis in contract[0])
    many = max(math.prod(a.shape[axis] for axis in batch[0]), 1)
    rows, columns = (v.size // max(terms * many, 1) for v in (a, b))
    return 1 in (terms, rows, columns) or (rows + columns) * terms < SMALL
