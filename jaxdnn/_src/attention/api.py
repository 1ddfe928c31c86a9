"""The public functions of attention.

Letters: B sequences, T queries, S keys, N heads of queries, K heads of keys and values, D features of queries and keys,
E of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxdnn._src.attention import primitive as primitive
from jaxdnn._src.attention.arguments import Options, read
from jaxdnn._src.core import blending, checks, primitives
from jaxdnn._src.core.determinism import require
from jaxdnn._src.core.eager import data
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import at_edges
from jaxdnn._src.dropout.api import DropoutState, operand

_FLOATS = blending.FLOATS[:4]


@public
@data(dropout_key=lambda key: None if key is None else operand(key))
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    /,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: Any = None,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    block_mask: ArrayLike | None = None,
    block_mask_tile: int | tuple[int, int] = 128,
    query_lengths: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    score_fn: Callable[..., Any] | None = None,
    score_arrays: Sequence[ArrayLike] = (),
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    layout: str = "BTNH",
    split: int | None = None,
    out_dtype: Any = None,
    return_logsumexp: bool = False,
    return_maximum: bool = False,
    engine: str | None = None,
    determinism: str | None = None,
) -> Any:
    """Attention: for every query the mean of the values, weighted by the softmax of its scores.

    x_ij = f(softcap(scale q_i · k_j)) + bias_ij + slope (j - i)        softcap(x) = c tanh(x / c)
    y_i = Σ_j exp(x_ij - L_i) v_j        L_i = log Σ_j exp(x_ij)

    The sums run over the keys that a query sees. What it does not see is multiplied with nothing: NaN there shows
    neither in values nor in first derivatives. A query that sees no key has y = 0 and L = -inf (of a sink, the sink),
    and gradients of y that are 0.

    Args:
      q: (B, T, N, D); float32, bfloat16, float16, float64.
      k: (B, S, K, D) of q's dtype; K divides N, and heads n of queries share head n // (N / K) of keys.
      v: (B, S, K, E) of q's dtype.
      scale: the factor of the products; None is 1 / √D. (cuDNN's default is 1.)
      causal: whether a query sees no key after it. True or "top_left": query i sees keys j <= i; "bottom_right": the
        last query sees the last key, so j <= i + S - T, or with lengths, i + key length - query length.
      window: (left, right), the number of keys before and after the diagonal that are seen, None without a limit; or
        one number for both. left counts the keys before the diagonal, as in `jax.nn`; cuDNN's counts the diagonal too.
        Causal makes right 0, and with "bottom_right" the diagonal is that of the last query and the last key.
      softcap: c; None without a cap.
      bias: (B or 1, N or 1, T or 1, S or 1), floats; added to the scores after the cap.
      mask: as bias, booleans; False is not seen.
      block_mask: (B or 1, N or 1, tiles of queries, tiles of keys), booleans: a mask with an element for each tile.
      block_mask_tile: the queries and the keys of a tile, or one number for both; the last tiles may be cut off.
      query_lengths, key_lengths: (B,), integers, cut to 0 and T or S: queries beyond see nothing, and keys beyond are
        not seen.
      query_segments, key_segments: (B, T) and (B, S), integers: packed sequences. A query sees the keys of its segment.
      alibi_slopes: (N,), floats: slope (j - i) is added to the scores of each head, wherever the diagonal is.
      sinks: (N,), floats: a score that each query of a head has besides those of its keys, without a value.
      score_fn: f, a function (score, sequence, head, query, key) of one score and of numbers that say whose it is, as
        PyTorch's FlexAttention has it. JAX traces it; what it captures is differentiated too. (One that is made anew
        for each call compiles anew, unless the call is part of a larger `jax.jit`.)
      score_arrays: arrays that it takes besides.
      dropout: the rate of dropping weights exp(x_ij - L_i), from 0 to below 1. What is kept is multiplied by
        1 / (1 - dropout). Kept are elements of `dropout_mask(dropout_key, (B, N, T, S), rate=dropout)`, whatever the
        layout and the mesh.
      dropout_key: as `key` in `dropout`; None where nothing is dropped.
      layout: "BTNH", or "BNTH" for arrays (B, N, T, D), (B, K, S, D), (B, K, S, E).
      split: a number of keys. The sum of a row is that of its keys in parts of so many, each by itself, merged from the
        first part on (by `hopper` 16 at a time); of more keys than there are, one part. `attention_decode` has the same
        parts: at the levels that fix bits, rows of both are equal.
      out_dtype: y's dtype, None that of q; "float32" for parts that `merge_attention` joins.
      return_logsumexp: whether L is returned too.
      return_maximum: whether the largest score of each row is, behind it; -inf where nothing is seen, and without a
        derivative.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, (B, T, N, E) of q's dtype; with `return_logsumexp` also L, (B, T, N) in float32 (float64 for float64), with the
      sink in its sum; so the maximum, without the sink. For layout "BNTH" (B, N, T, E) and (B, N, T). A score of +inf
      or NaN makes its row NaN.

    Differentiation: any order, forward and reverse, of y and L in q, k, v, bias, slopes, sinks and what `score_fn`
      takes or captures; memory is linear in the lengths but for what bias and mask have.

    Numerics: scores, exponentials and sums in float32 (float64 for float64), rounded once; products of narrow operands
      on GPUs with narrow weights, as all attention kernels have them. float32 is not cut to TF32. Determinism level
      run_to_run by engine `xla`; batch_invariant by `hopper`, which takes bfloat16 and float16 in multiples of 8
      features to 256 and says in `explain` which options it does not; its gradients of bias, slopes and
      sinks are run_to_run, and those of bias and slopes take memory for all scores. mesh_invariant by `ordered`, which
      adds products term by term; second derivatives run_to_run. Derivatives recompute
      weights as exp(x - L) from a logsumexp L that is rounded to float32, so they have a relative error of |L| 2^-24:
      mask by `mask`, `causal` or lengths, not by a bias of -1e9 on all keys of a query.

    Raises:
      ValueError: shapes that do not fit, an unknown option. TypeError: a dtype that is not served. NotImplementedError:
      no engine serves the call at the required level.

    Example:
      >>> q = jnp.zeros((1, 2, 1, 4)); v = jnp.arange(4.0).reshape(1, 2, 1, 2)
      >>> dnn.attention(q, q, v, causal=True)[0, :, 0].tolist()
      [[0.0, 1.0], [1.0, 2.0]]

    Sources: Vaswani et al. (2017); Dao et al., "FlashAttention" (2022); Press et al. for slopes (ALiBi, 2022); cuDNN's
      SDPA, whose order of operations this is. `jax.nn.dot_product_attention` has the same layout, and PyTorch's
      scaled_dot_product_attention "BNTH"; its `is_causal` is "top_left".
    """
    arrays, spec = read(
        (("q", q), ("k", k), ("v", v)),
        Options(
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            bias=bias,
            mask=mask,
            block_mask=block_mask,
            block_mask_tile=block_mask_tile,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            query_segments=query_segments,
            key_segments=key_segments,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            score_fn=score_fn,
            score_arrays=score_arrays,
            dropout=dropout,
            dropout_key=dropout_key,
            layout=layout,
            engine=engine,
            determinism=determinism,
            out_dtype=out_dtype,
            split=split,
            maximum=checks.flag("return_maximum", return_maximum),
        ),
    )
    found = at_edges(spec.level, primitives.call("attention", *arrays, spec=spec))
    wanted = [found[0], *found[1:2][: checks.flag("return_logsumexp", return_logsumexp)], *found[2:]]
    return tuple(wanted) if len(wanted) > 1 else wanted[0]


@public
@data(dropout_key=lambda key: None if key is None else operand(key))
def attention_dgrad(
    dy: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    y: ArrayLike,
    logsumexp: ArrayLike,
    /,
    *,
    dlogsumexp: ArrayLike | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: Any = None,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    block_mask: ArrayLike | None = None,
    block_mask_tile: int | tuple[int, int] = 128,
    query_lengths: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    score_fn: Callable[..., Any] | None = None,
    score_arrays: Sequence[ArrayLike] = (),
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    layout: str = "BTNH",
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, ...]:
    """The backward pass of `attention`.

    P_ij = exp(x_ij - L_i)    dP_ij = dy_i · v_j    D_i = dy_i · y_i - dL_i    dS_ij = P_ij (dP_ij - D_i)
    dv_j = Σ_i P_ij dy_i    dq_i = scale Σ_j dS_ij k_j    dk_j = scale Σ_i dS_ij q_i

    With a cap c the last two have dS_ij (1 - tanh²(scale q_i · k_j / c)) in the place of dS_ij, and with f its slope.

    Args:
      dy: as y.
      q, k, v: as in `attention`.
      y, logsumexp: what `attention` returned for these arguments.
      dlogsumexp: as logsumexp; None is 0.
      scale, causal, window, softcap, bias, mask, alibi_slopes, sinks, score_fn, score_arrays: as in `attention`.
      block_mask, block_mask_tile: as in `attention`.
      dropout, dropout_key, layout: as in `attention`.
      query_lengths, key_lengths, query_segments, key_segments: as in `attention`.
      engine, determinism: as in `attention`.

    Returns:
      dq, dk, dv, as q, k and v; and behind them the gradients of bias (Σ dS over what it is broadcast along),
      alibi_slopes (Σ dS (j - i)), sinks (-Σ exp(sink - L) D) and the floats of `score_arrays`, as far as they are
      given.

    Differentiation: any order, forward and reverse, in all arrays of floats.

    Numerics: as `attention`; sums over queries in float32, of all heads that share keys, rounded once.

    Raises:
      ValueError, TypeError, NotImplementedError: as `attention`.

    Example:
      >>> q = v = jnp.ones((1, 2, 1, 4))
      >>> y, lse = dnn.attention(q, q, v, return_logsumexp=True)
      >>> dq, dk, dv = dnn.attention_dgrad(y, q, q, v, y, lse)
      >>> dv[0, :, 0, 0].tolist()
      [1.0, 1.0]

    Sources: Dao et al., "FlashAttention" (2022), algorithm 4; cuDNN's SDPA backward.
    """
    arrays, spec = read(
        (("q", q), ("k", k), ("v", v)),
        Options(
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            bias=bias,
            mask=mask,
            block_mask=block_mask,
            block_mask_tile=block_mask_tile,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            query_segments=query_segments,
            key_segments=key_segments,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            score_fn=score_fn,
            score_arrays=score_arrays,
            dropout=dropout,
            dropout_key=dropout_key,
            layout=layout,
            engine=engine,
            determinism=determinism,
        ),
    )
    q, v = arrays[0], arrays[2]
    of_y, wide = (*q.shape[:-1], v.shape[-1]), blending.accumulator(q.dtype)
    dlogsumexp = jnp.zeros(of_y[:-1], wide) if dlogsumexp is None else dlogsumexp
    saved = {}
    for name, value, shape, dtype in (
        ("dy", dy, of_y, q.dtype),
        ("dlogsumexp", dlogsumexp, of_y[:-1], wide),
        ("y", y, of_y, q.dtype),
        ("logsumexp", logsumexp, of_y[:-1], wide),
    ):
        value = checks.array(name, value)
        checks.shape(name, value, shape, "what `attention` returns for these operands")
        checks.dtype(name, value, list(dict.fromkeys([q.dtype, wide])) if dtype == q.dtype else _FLOATS)
        saved[name] = at_edges(spec.level, value).astype(dtype if shape != of_y else value.dtype)
    spec = spec.along_all()
    count = len(spec.floats)
    operands = (saved["dy"], saved["dlogsumexp"], *arrays[:count], saved["y"], saved["logsumexp"], *arrays[count:])
    found = at_edges(spec.level, primitives.call("attention_dgrad", *operands, spec=spec))
    named = dict(zip(spec.along, found, strict=True))
    captured = spec.score.captured if spec.score else ()
    of_one = lambda n: n in ("alibi_slopes", "sinks") or n.startswith("score")
    return tuple(jnp.squeeze(x, 0) if of_one(n) else x for n, x in named.items() if n not in captured)


@public
def merge_attention(y: ArrayLike, logsumexp: ArrayLike, /, *, determinism: str | None = None) -> tuple[Array, Array]:
    """Attention over all keys from its results over parts of them, as rings of devices and split decoding have.

    y = Σ_i exp(L_i - L) y_i        L = log Σ_i exp(L_i)

    Args:
      y: (P, ..., E), what `attention` returned for each of P parts of the keys; float32, bfloat16, float16, float64.
      logsumexp: (P, ...), its logsumexp, floats. A sink belongs to one of the parts.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, (..., E), of y's dtype, and logsumexp, (...), in float32 (float64 for float64). Parts that saw nothing, with
      -inf, change nothing; of none but such y is 0 and logsumexp -inf.

    Differentiation: any order, forward and reverse, in both.

    Numerics: in the dtype of the logsumexp that is returned, rounded once. Determinism level run_to_run.

    Raises:
      ValueError: shapes that do not fit. TypeError: a dtype that is not served. NotImplementedError: the determinism
      level cannot be guaranteed.

    Example:
      >>> y, lse = dnn.merge_attention(jnp.array([[1.0], [3.0]]), jnp.zeros(2))
      >>> y.tolist()
      [2.0]

    Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). FlashInfer has `merge_state`.
    """
    require("merge_attention", determinism, "run_to_run", "its sums are in XLA's order")
    y, logsumexp = checks.array("y", y), checks.array("logsumexp", logsumexp)
    checks.dtype("y", y, _FLOATS)
    checks.dtype("logsumexp", logsumexp, _FLOATS)
    if y.ndim < 2 or not y.shape[0]:
        raise ValueError(f"`y` must have shape (P, ..., E) with at least one part, got {tuple(y.shape)}.")
    checks.shape("logsumexp", logsumexp, y.shape[:-1], "one for each row of `y`")

    def run(y: Array, lse: Array) -> tuple[Array, Array]:
        lse = lse.astype(blending.accumulator(y.dtype))
        m = jnp.max(lse, 0, keepdims=True)
        m = jax.lax.stop_gradient(jnp.where(m == -jnp.inf, jnp.zeros_like(m), m))
        e = jnp.exp(lse - m)
        total = jnp.sum(e, 0)
        empty = total == 0
        total = jnp.where(empty, jnp.ones_like(total), total)
        share = (e / total[None])[..., None]
        parts = jnp.where(share == 0, jnp.zeros(y.shape, lse.dtype), y.astype(lse.dtype))
        merged = jnp.sum(share * parts, 0)
        return merged.astype(y.dtype), jnp.where(empty, -jnp.inf, jnp.squeeze(m, 0) + jnp.log(total))

    def factors(y: Any, lse: Any) -> Factors:
        names = tuple(f"a{i}" for i in range(1, len(y.shape) - 1))
        return Factors((("p", *names, "e"), ("p", *names)), ((*names, "e"), names), (*names, "e"))

    return primitives.composed(run, factors, y, logsumexp)
