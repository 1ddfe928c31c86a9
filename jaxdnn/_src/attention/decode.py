"""Attention of the last queries of sequences over a cache of their keys. Letters as in `api`; P pages of R keys."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxdnn._src.attention.arguments import LAYOUTS, Options, read
from jaxdnn._src.core import checks, primitives
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import at_edges


@public
def attention_decode(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_lengths: ArrayLike,
    /,
    *,
    page_table: ArrayLike | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    split: int = 256,
    layout: str = "BTNH",
    out_dtype: Any = None,
    return_logsumexp: bool = False,
    engine: str | None = None,
    determinism: str | None = None,
) -> Any:
    """Attention of the last T queries of each sequence over a cache of its keys, as text is generated.

    x_ij = softcap(scale q_i · k_j) + slope (j - i - key_length + T), of keys with j <= i + key_length - T

    and y and L of the scores x as in `attention`, whose rows these are: the last query sees the last key.

    Args:
      q: (B, T, N, D); float32, bfloat16, float16, float64.
      k: (B, S, K, D) of q's dtype, S the capacity of the cache; with a page table (P, R, K, D), pages of R keys.
      v: (B, S, K, E), or (P, R, K, E), of q's dtype.
      key_lengths: (B,), integers, cut to 0 and S: how many keys each sequence has, with those of its last T queries.
      page_table: (B, M), integers: the pages of each sequence in order, so that key j is number j mod R of page
        page_table[b, j // R]. Numbers of pages behind the last key are not used, and may be any.
      scale, softcap, sinks: as in `attention`.
      window: how many keys before its own a query sees; None without a limit.
      alibi_slopes: (N,), floats: slope times the distance from the query's own key is added to the scores.
      split: the number of keys after which the sum of a row is merged with that of the keys before, see `attention`.
        It does not depend on the batch, nor on the capacity of the cache.
      layout: "BTNH", or "BNTH" for arrays (B, N, T, D), (B, K, S, D), (P, K, R, D).
      out_dtype, return_logsumexp: as in `attention`.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, (B, T, N, E) of q's dtype; with `return_logsumexp` also L, (B, T, N), as `attention` returns them.

    Differentiation: any order, forward and reverse, in q, k, v, slopes and sinks. Gradients of pages that sequences
      share are sums that XLA scatters.

    Numerics: as `attention`. Engine `hopper` takes splits in multiples of 128 keys, merges 16 parts at a time, and
      copies the keys and values of pages into their order. At batch_invariant and above a row has the bits of the same
      row of `attention(..., causal=True, split=split)`, whatever the batch, the cache's capacity and the pages are.
      That does not hold for gradients of pages.

    Raises:
      ValueError: shapes that do not fit, an unknown option. TypeError: a dtype that is not served. NotImplementedError:
      no engine serves the call at the required level.

    Example:
      >>> q = jnp.zeros((1, 1, 1, 4)); cache = jnp.arange(8.0).reshape(1, 8, 1, 1)
      >>> dnn.attention_decode(q, jnp.zeros((1, 8, 1, 4)), cache, jnp.array([3])).tolist()
      [[[[1.0]]]]

    Sources: Dao et al., "Flash-Decoding" (2023); Kwon et al., "PagedAttention" (2023). cuDNN's SDPA has the same page
      table; FlashAttention's flash_attn_with_kvcache appends the new keys too, which is an update of the cache here.
    """
    checks.choice("layout", layout, LAYOUTS)
    k, v = checks.array("k", k), checks.array("v", v)
    if page_table is not None:
        k, v = (_of_pages(name, x, page_table, layout) for name, x in (("k", k), ("v", v)))
    left = None if window is None else checks.integer("window", window)
    options = Options(
        scale=scale,
        causal="bottom_right",
        window=(left, 0),
        softcap=softcap,
        bias=None,
        mask=None,
        block_mask=None,
        block_mask_tile=1,
        query_lengths=None,
        key_lengths=key_lengths,
        query_segments=None,
        key_segments=None,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        score_fn=None,
        score_arrays=(),
        dropout=0.0,
        dropout_key=None,
        layout=layout,
        engine=engine,
        determinism=determinism,
        out_dtype=out_dtype,
        split=split,
        diagonal=True,
    )
    operands, spec = read((("q", q), ("k", k), ("v", v)), options)
    y, lse = at_edges(spec.level, primitives.call("attention", *operands, spec=spec))
    return (y, lse) if checks.flag("return_logsumexp", return_logsumexp) else y


def _of_pages(name: str, pages: Array, page_table: ArrayLike, layout: str) -> Array:
    """Keys or values of each sequence, in the order of its pages."""
    table = checks.array("page_table", page_table)
    letters = "(P, R, K, D)" if layout == "BTNH" else "(P, K, R, D)"
    if pages.ndim != 4 or not pages.shape[0]:
        raise ValueError(f"`{name}` must have shape {letters} with a page table, got {tuple(pages.shape)}.")
    if table.ndim != 2:
        raise ValueError(f"`page_table` must have shape (B, M), pages of each sequence, got {tuple(table.shape)}.")
    if not jnp.issubdtype(table.dtype, jnp.integer):
        raise TypeError(f"`page_table` must be integers, got {table.dtype.name}.")

    def run(pages: Array, table: Array) -> Array:
        found = jnp.take(pages, jnp.clip(table, 0, len(pages) - 1).astype(jnp.int32), 0, mode="clip")
        heads = 3 if layout == "BTNH" else 2
        found = jnp.moveaxis(found, heads, 1)  # (B, K, M, R, features)
        found = found.reshape(*found.shape[:2], found.shape[2] * found.shape[3], found.shape[4])
        return found if layout == "BNTH" else jnp.swapaxes(found, 1, 2)

    def factors(pages: Any, table: Any) -> Factors:
        heads, rest = ("r", "h", "d") if layout == "BTNH" else ("h", "r", "d"), ("s", "h", "d")
        result = ("b", *rest) if layout == "BTNH" else ("b", "h", "s", "d")
        return Factors((("p", *heads), ("b", "m")), (result,), ("b", "h"))

    return primitives.composed(run, factors, pages, table)
