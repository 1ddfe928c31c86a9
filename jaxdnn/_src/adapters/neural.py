"""Attention and softmax with the signatures of jax.nn.

Letters: B sequences, T queries, S keys, N heads of queries, K heads of keys and values, H features.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jaxdnn._src.adapters.calls import checked_by_jax, refused, serving
from jaxdnn._src.attention.api import attention
from jaxdnn._src.core import checks
from jaxdnn._src.softmax.api import softmax as _softmax_op

# JAX's own, whatever stands under its names when these are called.
_JAX_ATTENTION: Any = jax.nn.dot_product_attention
_JAX_SOFTMAX, _JAX_LOG_SOFTMAX = jax.nn.softmax, jax.nn.log_softmax
_FLOATS = [np.dtype(t) for t in checks.FLOATS]
UNSEEN = -0.7 * float(np.finfo(np.float32).max)  # the score that JAX gives a key that is not seen


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention`, computed by `attention`.

    y_i = Σ_j softmax_j(scale q_i · k_j + bias_ij) v_j over the keys j that query i sees

    Args:
      query: (B, T, N, H) or (T, N, H); float32, bfloat16, float16.
      key, value: (B, S, K, H) or (S, K, H), of the dtype of query; K divides N.
      bias: None, or floats that broadcast to (B, N, T, S), in four axes or in (N, T, S).
      mask: None, or booleans, as bias; False is not seen.
      scale: a number; None is 1 / √H.
      is_causal: whether query i sees keys j <= i alone.
      query_seq_lengths: None, or (B,), int32; results beyond are 0.
      key_value_seq_lengths: None, or (B,), int32; keys beyond are not seen.
      local_window_size: the keys before and after its own place that a query sees, or one number for both.
      implementation: must be None: the other choices name an implementation of JAX's.
      return_residual: whether the logsumexp is returned too, as JAX has it: of query's dtype and without a derivative.

    Returns:
      What JAX returns: an array like query, with `return_residual` also (B, T, N) or (T, N). A query that sees no key
      has the mean of all values, as in JAX.

    Differentiation: any order, forward and reverse, in query, key, value and bias.

    Numerics: as `attention`: scores, exponentials and sums in float32, rounded once; memory is linear in the lengths,
      but for those of bias and mask. float32 is not cut to TF32, to which GPUs cut JAX's products by default. A query
      whose scores are all -inf by the bias is 0 where JAX has NaN. Derivatives recompute weights from scores and their
      logsumexp in float32: of a query all of whose keys have scores as large as -1e9, by a bias that stands for a mask,
      they are not JAX's, which keeps the weights. The result itself is; `mask` has no such limit.

    Raises:
      NotImplementedError: what is not served: the argument, and what it was. Whatever JAX raises for arguments that are
        wrong.

    Example:
      >>> q = jnp.zeros((1, 2, 1, 4)); v = jnp.arange(8.0).reshape(1, 2, 1, 4)
      >>> dnn.lax_like.dot_product_attention(q, q, v, is_causal=True)[0, 1, 0].tolist()
      [2.0, 3.0, 4.0, 5.0]

    Sources: `jax.nn.dot_product_attention`.
    """
    if implementation is not None:
        raise refused("implementation", "None", implementation)
    if scale is not None and not checks.is_number(scale):
        raise refused("scale", "a number known when traced", scale)
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    arrays |= {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    given = {name: checks.array(name, x) for name, x in arrays.items() if x is not None}
    if given["query"].dtype not in _FLOATS[:3]:
        raise refused("query", "float32, bfloat16 or float16", given["query"].dtype.name)
    static = dict(scale=scale, is_causal=is_causal, local_window_size=local_window_size)
    wanted = checked_by_jax(lambda named: _JAX_ATTENTION(**named, **static, return_residual=return_residual), given)
    q, k, v = (_of_four_axes(given[name]) for name in ("query", "key", "value"))
    bias_, mask_ = (_of_four_axes(given[name]) if name in given else None for name in ("bias", "mask"))
    lengths = given.get("query_seq_lengths"), given.get("key_value_seq_lengths")
    window = local_window_size if isinstance(local_window_size, Sequence) else (local_window_size,) * 2
    with serving("dot_product_attention"):
        y, residual = attention(
            q,
            k,
            v,
            scale=scale,
            causal=bool(is_causal),
            window=window,
            bias=bias_,
            mask=mask_,
            query_lengths=lengths[0],
            key_lengths=lengths[1],
            return_logsumexp=True,
        )
        blind = _blind(q.shape[1], k.shape[1], mask_, (*_sides(window, bool(is_causal)), lengths[1]))
    beyond = _beyond(q.shape[1], lengths[0])
    if blind is not None:
        mean = jnp.mean(v, 1, keepdims=True, dtype=np.float32).astype(v.dtype)
        mean = jnp.repeat(mean, q.shape[2] // v.shape[2], 2)
        # Its rows beyond a sequence are 0 already.
        y = jnp.where(_either(blind, beyond, alone=True)[..., None], jnp.broadcast_to(mean, y.shape), y)
    if not return_residual:
        return y.reshape(wanted.shape)
    unseen = _either(blind, beyond, alone=False)
    if unseen is not None:
        residual = jnp.where(unseen, jnp.full((), UNSEEN, residual.dtype), residual)
    residual = lax.stop_gradient(residual.astype(k.dtype))
    return y.reshape(wanted[0].shape), residual.reshape(wanted[1].shape)


def softmax(x: ArrayLike, axis: Any = -1, where: ArrayLike | None = None) -> Array:
    """`jax.nn.softmax`, computed by this library's `softmax`.

    Args:
      x: any shape; float32, bfloat16, float16, float64.
      axis: an axis or several, which are one row; None: all.
      where: None, or booleans that broadcast to x: elements where it is False are left out, and 0.

    Returns:
      What JAX returns.

    Differentiation: any order, forward and reverse, in x.

    Numerics: as of this library's `softmax`: computed in float32 (float64 for float64) and rounded once.

    Raises:
      NotImplementedError: what is not served: the argument, and what it was. Whatever JAX raises for arguments that are
        wrong.

    Example:
      >>> dnn.lax_like.softmax(jnp.zeros(4)).tolist()
      [0.25, 0.25, 0.25, 0.25]

    Sources: `jax.nn.softmax`.
    """
    return _softmax("softmax", _JAX_SOFTMAX, "accurate", x, axis, where)


def log_softmax(x: ArrayLike, axis: Any = -1, where: ArrayLike | None = None) -> Array:
    """`jax.nn.log_softmax`, computed by this library's `softmax`.

    Args:
      x, axis, where: see `softmax`; what is left out is -inf.

    Returns:
      What JAX returns.

    Example:
      >>> dnn.lax_like.log_softmax(jnp.zeros(1)).tolist()
      [0.0]

    Sources: `jax.nn.log_softmax`.
    """
    return _softmax("log_softmax", _JAX_LOG_SOFTMAX, "log", x, axis, where)


def _softmax(name: str, function: Any, algorithm: str, x: Any, axis: Any, where: Any) -> Array:
    if not hasattr(x, "dtype") or x.dtype not in _FLOATS:
        raise refused("x", "an array of float32, bfloat16, float16 or float64", x)
    x = checks.array("x", x)
    checked_by_jax(lambda given: function(given, axis, where), x)
    with serving(name):
        return _softmax_op(x, algorithm=algorithm, axis=axis, where=where)


# ---- queries that see no key -----------------------------------------------------------------------------------------


def _of_four_axes(x: Array) -> Array:
    return x if x.ndim > 3 else x.reshape((1,) * (4 - x.ndim) + x.shape)


def _sides(window: Any, causal: bool) -> tuple[int | None, int | None]:
    """How many keys before its own place and after it a query sees; None without a limit."""
    left, right = window
    return left, 0 if causal else right


def _blind(t: int, s: int, mask: Array | None, limits: tuple[int | None, int | None, Array | None]) -> Array | None:
    """Which queries see no key, (B or 1, T or 1, N or 1); None where all see one whatever the arrays hold."""
    left, right, lengths = limits
    rows = np.arange(t)
    low = np.zeros(t, np.int64) if left is None else np.maximum(rows - left, 0)
    high = np.full(t, s - 1) if right is None else np.minimum(rows + right, s - 1)
    if mask is None and lengths is None:
        return jnp.asarray(low > high)[None, :, None] if (low > high).any() else None
    last = jnp.asarray(high, jnp.int32)[None]
    if lengths is not None:
        last = jnp.minimum(last, lengths[:, None] - 1)
    if mask is None:
        return (jnp.asarray(low, jnp.int32)[None] > last)[..., None]
    key = jnp.arange(s, dtype=jnp.int32)[None, None, None]
    inside = (key >= jnp.asarray(low, jnp.int32)[None, None, :, None]) & (key <= last[:, None, :, None])
    return jnp.swapaxes(~jnp.any(mask & inside, -1), 1, 2)


def _beyond(t: int, lengths: Array | None) -> Array | None:
    """Which queries are beyond their sequence, (B, T, 1)."""
    return None if lengths is None else (jnp.arange(t, dtype=jnp.int32)[None] >= lengths[:, None])[..., None]


def _either(blind: Array | None, beyond: Array | None, *, alone: bool) -> Any:
    """Which queries see no key or are beyond their sequence; `alone`: which see none and are within."""
    if blind is None or beyond is None:
        return blind if beyond is None or alone else beyond
    return blind & ~beyond if alone else blind | beyond
