"""The two ways in which attention's formulas compute: in XLA's order, and in one that nothing but a row decides.

In order, each product is rounded before anything is added to it; products of matrices start from 0 and take their terms
one by one; the sum of a row is a tree over a power of two, so that keys behind the last one that is seen change no bit;
and blocks have so many queries whatever the batch is.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.activation.stated import tanh
from jaxdnn._src.core import products, trees
from jaxdnn._src.core.rounding import product, quotient, rounded, steady

UNROLLED = 4  # terms of a sum that a pass over the result adds


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """What the formulas are made of.

    Attributes:
      times, over: of arrays of one dtype, element by element; over may also be a quotient of broadcast arrays.
      exp, log, tanh: of every element.
      total: the sum along axes, which are kept.
      dot: (a, b, i, j, dtype): of arrays with two common axes in front, the sum along axis i of a and j of b, behind
        which stand the axis of a that is left and that of b.
      scores: how many there may be of all heads and sequences at once; rows: of every block, if that is fixed.
      narrow: whether narrow operands of products stay narrow, and their weights are rounded to that.
    """

    times: Callable[[Array, Any], Array]
    over: Callable[[Array, Array], Array]
    exp: Callable[[Array], Array]
    log: Callable[[Array], Array]
    tanh: Callable[[Array], Array]
    total: Callable[[Array, tuple[int, ...]], Array]
    dot: Callable[..., Array]
    scores: int
    rows: int | None = None
    narrow: bool = False


def dot(a: Array, b: Array, i: int, j: int, dtype: Any) -> Array:
    """In XLA's order."""
    precision = lax.Precision.HIGHEST if a.dtype.itemsize >= 4 else lax.Precision.DEFAULT
    return products.dot(a, b, ((i,), (j,)), ((0, 1), (0, 1)), precision=precision, preferred=dtype)


def _plain(scores: int, *, narrow: bool = False) -> Arithmetic:
    return Arithmetic(
        times=lambda a, b: a * b,
        over=lambda a, b: a / b,
        exp=jnp.exp,
        log=jnp.log,
        tanh=jnp.tanh,
        total=lambda x, axes: jnp.sum(x, axes, keepdims=True),
        dot=dot,
        scores=scores,
        narrow=narrow,
    )


def _ordered_dot(a: Array, b: Array, i: int, j: int, dtype: Any) -> Array:
    """From 0 on, term by term."""
    a, b = (jnp.moveaxis(x.astype(dtype), axis, 0) for x, axis in ((a, i), (b, j)))
    # The barrier keeps XLA from removing 0 + p, which is +0 for p = -0.
    zero = lax.optimization_barrier(jnp.zeros((*a.shape[1:], b.shape[-1]), dtype))
    add = lambda total, term: (total + product(term[0][..., None], term[1][..., None, :]), None)
    return lax.scan(add, zero, (a, b), unroll=UNROLLED if isinstance(len(a), int) else 1)[0]


# By platform. On CPUs the scores stay in caches, GPUs need many for each launch; of formulas that are differentiated
# further no platform is known.
PLAIN = {"cpu": _plain(2**21), "cuda": _plain(2**26, narrow=True), "": _plain(2**22)}
ORDERED = Arithmetic(
    times=lambda a, b: product(a, jnp.asarray(b, a.dtype)),
    over=quotient,
    exp=lambda x: steady(jnp.exp, x),
    log=lambda x: steady(jnp.log, x),
    tanh=tanh,
    total=lambda x, axes: trees.halves(rounded(x), axes),
    dot=_ordered_dot,
    scores=2**22,
    rows=64,
)
