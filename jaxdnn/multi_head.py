"""Multi-head attention with its projections, as cuDNN's legacy functions have it: a composition around `attention`.

    weights = dnn.multi_head.Weights(wq, wk, wv, wo)
    y = dnn.multi_head.attention(x, x, x, weights, heads=8, residual=x)

cuDNN's `cudnnMultiHeadAttnForward` sees of every query the keys from one place to another, of arrays loWinIdx and
hiWinIdx; `windows` makes the mask of them. Its beams are further queries, and one step of decoding is a call with one
query.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxdnn._src.attention.api import attention as _attention
from jaxdnn._src.core import blending, checks, products
from jaxdnn._src.core.rounding import nearest
from jaxdnn._src.dropout.api import dropout as _dropout

__all__ = ["Weights", "attention", "windows"]


class Weights(NamedTuple):
    """The projections, each None without one, and their biases.

    Attributes:
      q, k: (features of queries or keys, N P), N heads with P features each; without one every head has all features.
      v: (features of values, N E).
      o: (N E, features of the result).
      q_bias, k_bias, v_bias, o_bias: of the results of these.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    o: Any = None
    q_bias: Any = None
    k_bias: Any = None
    v_bias: Any = None
    o_bias: Any = None


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    weights: Weights,
    /,
    *,
    heads: int,
    residual: ArrayLike | None = None,
    output_dropout: float = 0.0,
    output_dropout_key: Any = None,
    **options: Any,
) -> Array:
    """y = dropout(concatenated heads of attention(q Wq + bq, k Wk + bk, v Wv + bv), times Wo + bo) + residual.

    Args:
      q: (B, T, features); float32, bfloat16, float16, float64. k, v: (B, S, features), of q's dtype.
      weights: the projections. Without that of the result the heads stand side by side.
      heads: N.
      residual: (B, T, features of the result), which is added.
      output_dropout, output_dropout_key: as `rate` and `key` in `dropout`, of what is projected.
      options: as in `attention`, whose default of `scale` counts: 1 over the root of a head's features. cuDNN's
        smScaler has no default.

    Returns:
      (B, T, features of the result), of q's dtype.

    Differentiation: any order, forward and reverse, in all arrays of floats.

    Raises:
      What `attention` raises, and ValueError for shapes of weights that do not fit.

    Sources: Vaswani et al. (2017); cuDNN's legacy multi-head attention.
    """
    heads = checks.integer("heads", heads)
    if heads < 1:
        raise ValueError(f"`heads` must be a positive number, got {heads}.")
    if "layout" in options:
        raise ValueError("`layout` must not be given: heads are made here, of arrays (B, rows, features).")
    given = ((n, x, getattr(weights, n), getattr(weights, f"{n}_bias")) for n, x in (("q", q), ("k", k), ("v", v)))
    y = _attention(*(_heads(*of_one, heads) for of_one in given), **options)
    y = y.reshape(*y.shape[:2], y.shape[2] * y.shape[3])
    y = _projected("o", y, weights.o, weights.o_bias)
    if output_dropout:
        y = _dropout(y, output_dropout_key, rate=output_dropout)
    if residual is None:
        return y
    residual = checks.array("residual", residual)
    checks.shape("residual", residual, y.shape, "what is projected")
    return y + residual.astype(y.dtype)


def windows(low: ArrayLike, high: ArrayLike, keys: int) -> Array:
    """The mask of attention with which query i sees the keys j with low[i] <= j < high[i].

    Args:
      low: (T,), integers: the first key that each query sees, cuDNN's loWinIdx.
      high: (T,), integers: the first key behind them, cuDNN's hiWinIdx. Where it is not above low a query sees none.
      keys: S, how many keys there are.

    Returns:
      (1, 1, T, S), booleans, for the `mask` of `attention`.

    Example:
      >>> dnn.multi_head.windows(jnp.array([0, 1]), jnp.array([2, 2]), 3)[0, 0].astype(int).tolist()
      [[1, 1, 0], [0, 1, 0]]

    Sources: cuDNN's `cudnnMultiHeadAttnForward`.
    """
    low, high = (checks.array(name, x)[:, None] for name, x in (("low", low), ("high", high)))
    j = jnp.arange(keys)[None]
    return ((j >= low) & (j < high))[None, None]


def _heads(name: str, x: ArrayLike, weight: Any, bias: Any, heads: int) -> Array:
    """(B, rows, N, features of a head)."""
    x = checks.array(name, x)
    if x.ndim != 3:
        raise ValueError(f"`{name}` must have shape (B, rows, features), got {tuple(x.shape)}.")
    if weight is None:
        return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], heads, x.shape[2]))
    found = _projected(name, x, weight, bias)
    if found.shape[2] % heads:
        raise ValueError(f"`weights.{name}` must have a multiple of {heads} columns, got {found.shape[2]}.")
    return found.reshape(*x.shape[:2], heads, found.shape[2] // heads)


def _projected(name: str, x: Array, weight: Any, bias: Any) -> Array:
    """x W + b, added in the accumulator's dtype and rounded once."""
    if weight is None:
        return x
    weight = checks.array(f"weights.{name}", weight)
    if weight.ndim != 2 or weight.shape[0] != x.shape[2]:
        raise ValueError(
            f"`weights.{name}` must have {x.shape[2]} rows, one for each feature, got {tuple(weight.shape)}."
        )
    wide = blending.accumulator(x.dtype)
    exact = lax.Precision.HIGHEST if x.dtype.itemsize >= 4 else lax.Precision.DEFAULT
    found = products.dot(x, weight.astype(x.dtype), ((2,), (0,)), precision=exact, preferred=wide)
    if bias is not None:
        bias = checks.array(f"weights.{name}_bias", bias)
        checks.shape(f"weights.{name}_bias", bias, (weight.shape[1],), f"one for each column of `weights.{name}`")
        found = found + bias.astype(wide)[None, None]
    return nearest(found, x.dtype)
