"""Attention: every query's mean of the values, weighted by the softmax of its scores; backward pass; parts merged.

    x_ij = f(cap tanh(scale q_i . k_j / cap)) + bias_ij + slope (j - i)        without a cap: f(scale q_i . k_j)
    L_i = log sum_j exp(x_ij)        P_ij = exp(x_ij - L_i)        y_i = sum_j P_ij v_j

The sums run over the keys j that query i sees; a sink s adds exp(s) to the sum in L and has no value. A row that sees
no key has y = 0 and L = -inf (of a sink, s), and what is not seen is multiplied with nothing: NaN in it does not show.
Dropout multiplies P before the values by 0 or 1 / (1 - rate), and so dP and the P in dv.

f is a function of the user, of a score and of its sequence, head, query and key, or the score itself. It is called with
arrays of these that are broadcast. Its derivatives are differences, of which the error is about 1e-12.

Query i sees key j if all of these hold that are given: the mask is True, and the block mask's element for both; i is
less than the query length and j less than the key length; their segments are equal; -left <= j - i - shift <= right for
the window, of which causal sets the right side to 0. The shift is 0, or for "bottom_right" that of the last query and
the last key to the same place.

    dP = dy v^T    D = sum dy y - dL    dS = P (dP - D)    dv = P^T dy    dq = scale dX k    dk = scale dX^T q

with dX = dS f' (1 - tanh^2); bias and slopes take the sums of dS and of dS (j - i) over what they are broadcast along,
a sink -sum exp(s - L) D. With heads that share keys and values dk and dv are sums over them.

Sources: Vaswani et al., "Attention is all you need" (2017); Dao et al., "FlashAttention" (2022); cuDNN's SDPA.
"""

from typing import Any

import numpy as np

from jaxdnn_reference.dropout import dropout_mask
from jaxdnn_reference.rounding import round_to

Array = np.ndarray[Any, Any]


def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: Any = None,
    softcap: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    block_mask: Array | None = None,
    block_mask_tile: Any = 128,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    query_segments: Array | None = None,
    key_segments: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score_fn: Any = None,
    score_arrays: Any = (),
    dropout: float = 0.0,
    dropout_key: Any = None,
    layout: str = "BTNH",
    split: int | None = None,
    out_dtype: Any = None,
    return_logsumexp: bool = False,
    return_maximum: bool = False,
    details: bool = False,
) -> Any:
    """y, with its logsumexp and the largest score of each row if asked. What is exact is not changed by `split`.

    With `details` both in float64, and P and x of all heads, (B, N, T, S)."""
    dtype = q.dtype
    q, k, v = (_heads_first(a, layout) for a in (q, k, v))
    seen = visible(
        q.shape[0],
        q.shape[2],
        k.shape[2],
        causal,
        window,
        mask,
        query_lengths,
        key_lengths,
        query_segments,
        key_segments,
        tiles(block_mask, block_mask_tile, q, k),
    )
    x, _ = scores(q, k, scale, softcap, bias, alibi_slopes, score_fn, score_arrays)
    p, lse = probabilities(x, seen, sinks)
    times = kept(p.shape, dropout, dropout_key)
    y = weighted(p * times, seen, _repeated(v, q.shape[1]))
    maximum = np.where(seen, x, -np.inf).max(-1, initial=-np.inf)
    y, lse, maximum = (a if layout == "BNTH" else np.swapaxes(a, 1, 2) for a in (y, lse, maximum))
    if details:
        return y, lse, p, x
    found = [round_to(y, dtype if out_dtype is None else np.dtype(out_dtype))]
    found += [_accumulated(lse, dtype)] if return_logsumexp else []
    found += [_accumulated(maximum, dtype)] if return_maximum else []
    return tuple(found) if len(found) > 1 else found[0]


def attention_dgrad(
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    logsumexp: Array,
    /,
    *,
    dlogsumexp: Array | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: Any = None,
    softcap: float | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    block_mask: Array | None = None,
    block_mask_tile: Any = 128,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
    query_segments: Array | None = None,
    key_segments: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score_fn: Any = None,
    score_arrays: Any = (),
    dropout: float = 0.0,
    dropout_key: Any = None,
    layout: str = "BTNH",
    details: bool = False,
) -> Any:
    """dq, dk, dv, and the gradients of bias, slopes, sinks and the floats of `score_arrays`, as far as these are given.

    With `details` in float64, and P, dP, D and dS of all heads behind them.
    """
    dtypes = [q.dtype, k.dtype, v.dtype, *(a.dtype for a in (bias, alibi_slopes, sinks) if a is not None)]
    dy, q, k, v, y, lse = (_heads_first(a, layout) for a in (dy, q, k, v, y, logsumexp))
    heads, groups = q.shape[1], k.shape[1]
    seen = visible(
        q.shape[0],
        q.shape[2],
        k.shape[2],
        causal,
        window,
        mask,
        query_lengths,
        key_lengths,
        query_segments,
        key_segments,
        tiles(block_mask, block_mask_tile, q, k),
    )
    x, slope = scores(q, k, scale, softcap, bias, alibi_slopes, score_fn, score_arrays)
    with np.errstate(all="ignore"):
        p = np.where(seen, np.exp(x - np.where(lse == -np.inf, 0.0, lse)[..., None]), 0.0)
        of_y = (dy * y).sum(-1)
        if dlogsumexp is not None:
            of_y = of_y - _heads_first(dlogsumexp, layout)
        times = kept(p.shape, dropout, dropout_key)
        dp = np.where(seen & (times != 0), times * (dy @ np.swapaxes(_repeated(v, heads), 2, 3)), 0.0)
        ds = np.where(seen, p * (dp - of_y[..., None]), 0.0)
        factor = _factor(q, scale)
        dx = ds * slope * factor
    dq = weighted(dx, seen, _repeated(k, heads))
    dk, dv = (
        _added(weighted(np.swapaxes(a, 2, 3), np.swapaxes(np.broadcast_to(seen, a.shape), 2, 3), b), groups)
        for a, b in ((dx, q), (p * times, dy))
    )
    found = [a if layout == "BNTH" else np.swapaxes(a, 1, 2) for a in (dq, dk, dv)]
    if bias is not None:
        found.append(ds.sum(tuple(i for i in range(4) if bias.shape[i] == 1), keepdims=True))
    if alibi_slopes is not None:
        found.append((ds * _distance(q, k)).sum((0, 2, 3)))
    if sinks is not None:
        with np.errstate(all="ignore"):
            found.append(-(np.exp(_wide(sinks)[:, None] - lse) * of_y).sum((0, 2)))
    for i, array in enumerate(score_arrays):
        if np.asarray(array).dtype.kind != "i":
            found.append(_of_array(i, ds, q, k, scale, softcap, score_fn, score_arrays))
            dtypes.append(array.dtype)
    if details:
        return (*found, p, dp, of_y, ds)
    return tuple(round_to(a, dtype) for a, dtype in zip(found, dtypes, strict=True))


def merge_attention(y: Array, logsumexp: Array, /) -> tuple[Array, Array]:
    """y = sum_i exp(L_i - L) y_i and L = log sum_i exp(L_i) over the first axis; where no part saw anything 0, -inf."""
    parts, lse = _wide(y), _wide(logsumexp)
    m = lse.max(0)
    m = np.where(m == -np.inf, 0.0, m)
    with np.errstate(divide="ignore", invalid="ignore"):
        e = np.exp(lse - m)
        total = e.sum(0)
        share = np.where(lse == -np.inf, 0.0, e / total)[..., None]
        merged = np.where(share == 0, 0.0, share * parts).sum(0)
        return round_to(merged, y.dtype), _accumulated(m + np.log(total), y.dtype)


def attention_decode(
    q: Array,
    k: Array,
    v: Array,
    key_lengths: Array,
    /,
    *,
    page_table: Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    split: int = 256,
    layout: str = "BTNH",
    out_dtype: Any = None,
    return_logsumexp: bool = False,
) -> Any:
    """`attention` of the last queries of each sequence, "bottom_right"; key j is number j mod R of its page.

    ALiBi counts from the key of the query itself, so that it is a bias of each sequence here.
    """
    if page_table is not None:
        table = np.clip(page_table, 0, len(k) - 1)
        k, v = (np.concatenate(np.moveaxis(a[table], 1, 0), axis=1 if layout == "BTNH" else 2) for a in (k, v))
    rows, axis = q.shape[1 if layout == "BTNH" else 2], 1 if layout == "BTNH" else 2
    lengths, bias = np.clip(key_lengths, 0, k.shape[axis]), None
    if alibi_slopes is not None:
        own = np.arange(rows)[None, :, None] + (lengths - rows)[:, None, None]
        bias = _wide(alibi_slopes)[:, None, None] * (np.arange(k.shape[axis]) - own)[:, None]
    return attention(
        q,
        k,
        v,
        scale=scale,
        causal="bottom_right",
        window=(window, 0),
        softcap=softcap,
        bias=bias,
        key_lengths=lengths,
        sinks=sinks,
        layout=layout,
        out_dtype=out_dtype,
        return_logsumexp=return_logsumexp,
    )


# ---- pieces ----------------------------------------------------------------------------------------------------------


def visible(
    batch: int,
    queries: int,
    keys: int,
    causal: bool | str,
    window: Any,
    mask: Array | None,
    query_lengths: Array | None,
    key_lengths: Array | None,
    query_segments: Array | None,
    key_segments: Array | None,
    block_mask: Array | None = None,
) -> Array:
    """(B, 1 or N, T, S): whether a query sees a key; the block mask is as `tiles` gives it."""
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    t = np.full(batch, queries) if query_lengths is None else np.clip(query_lengths, 0, queries)
    s = np.full(batch, keys) if key_lengths is None else np.clip(key_lengths, 0, keys)
    t, s = (a[:, None, None, None] for a in (t, s))
    seen = (i < t) & (j < s)
    left, right = window if isinstance(window, tuple | list) else (window, window)
    right = 0 if causal and (right is None or right > 0) else right
    distance = j - i - (s - t if causal == "bottom_right" else 0)
    seen = seen if left is None else seen & (distance >= -left)
    seen = seen if right is None else seen & (distance <= right)
    if mask is not None:
        seen = seen & mask
    if block_mask is not None:
        seen = seen & block_mask
    if query_segments is not None and key_segments is not None:
        seen = seen & (query_segments[:, None, :, None] == key_segments[:, None, None, :])
    return seen


def tiles(block_mask: Array | None, tile: Any, q: Array, k: Array) -> Array | None:
    """The block mask with an element for each pair; q and k with heads first."""
    if block_mask is None:
        return None
    u, v = tile if isinstance(tile, tuple | list) else (tile, tile)
    return np.repeat(np.repeat(block_mask, u, 2), v, 3)[:, :, : q.shape[2], : k.shape[2]]


def scores(
    q: Array,
    k: Array,
    scale: float | None,
    cap: float | None,
    bias: Array | None,
    slopes: Array | None,
    function: Any = None,
    arrays: Any = (),
) -> tuple[Array, Array]:
    """x of all pairs, seen or not, and its derivative along scale q k^T; q and k with heads first."""
    with np.errstate(all="ignore"):
        x = _factor(q, scale) * (q @ np.swapaxes(_repeated(k, q.shape[1]), 2, 3))
        slope = np.ones_like(x)
        if cap is not None:
            t = np.tanh(x / cap)
            x, slope = cap * t, 1 - t * t
        if function is not None:
            run = lambda x: function(x, *_places(x), *arrays)
            x, slope = np.broadcast_to(run(x), x.shape), slope * _difference(run, x)
        if bias is not None:
            x = x + _wide(bias)
        if slopes is not None:
            x = x + _wide(slopes)[:, None, None] * _distance(q, k)
    return x, slope


def probabilities(x: Array, seen: Array, sinks: Array | None) -> tuple[Array, Array]:
    """P, 0 where nothing is seen, and L."""
    with np.errstate(all="ignore"):
        x = np.where(seen, x, -np.inf)
        m = x.max(-1, initial=-np.inf)
        if sinks is not None:
            m = np.maximum(m, _wide(sinks)[:, None])
        m = np.where(m == -np.inf, 0.0, m)
        total = np.exp(x - m[..., None]).sum(-1)
        if sinks is not None:
            total = total + np.exp(_wide(sinks)[:, None] - m)
        lse = m + np.log(total)
        p = np.where(seen, np.exp(x - np.where(lse == -np.inf, 0.0, lse)[..., None]), 0.0)
    return p, lse


def weighted(p: Array, seen: Array, values: Array) -> Array:
    """sum_j p_ij values_j over what is seen; elsewhere p is 0, and values may be NaN or infinite."""
    if np.isfinite(values).all():
        return p @ values
    seen = np.broadcast_to(seen, p.shape)
    with np.errstate(all="ignore"):
        terms = np.where(seen[..., None], p[..., None] * values[..., None, :, :], 0.0)
        return terms.sum(-2)


def kept(shape: tuple[int, ...], rate: float, key: Any) -> Array:
    """What dropout multiplies the weights by: 0, or 1 / (1 - rate). A key may be a pair of a key and an offset."""
    if rate == 0:
        return np.ones(shape)
    key, offset = key if isinstance(key, tuple) else (key, 0)
    return dropout_mask(key, shape, rate=rate, offset=offset) / (1 - rate)


def _places(x: Array) -> list[Array]:
    """Of each score its sequence, head, query and key."""
    return list(np.ix_(*map(np.arange, x.shape)))


def _difference(function: Any, x: Array, step: float = 1e-3) -> Array:
    """The derivative of a function element by element: the central difference of fourth order."""
    f = lambda count: function(x + count * step)
    return (8 * (f(1) - f(-1)) - (f(2) - f(-2))) / (12 * step)


def _of_array(
    number: int, ds: Array, q: Array, k: Array, scale: float | None, cap: float | None, function: Any, arrays: Any
) -> Array:
    """The gradient of an array that the user's function takes: sum of dS over the derivatives in each element."""
    x, _ = scores(q, k, scale, cap, None, None)
    given = np.asarray(arrays[number], np.float64)
    found = np.zeros(given.shape)
    for at in np.ndindex(*given.shape):

        def along(change: Array, at: Any = at) -> Array:
            moved = given.copy()
            moved[at] += change
            others = [moved if i == number else a for i, a in enumerate(arrays)]
            return (ds * function(x, *_places(x), *others)).sum()

        found[at] = _difference(along, np.zeros(()))
    return found


def _distance(q: Array, k: Array) -> Array:
    return np.arange(k.shape[2])[None, :] - np.arange(q.shape[2])[:, None]


def _factor(q: Array, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _heads_first(a: Array, layout: str) -> Array:
    return _wide(a) if layout == "BNTH" else np.swapaxes(_wide(a), 1, 2)


def _wide(a: Array) -> Array:
    return np.asarray(a).astype(np.float64)


def _accumulated(a: Array, dtype: Any) -> Array:
    return a.astype(np.float64 if dtype == np.float64 else np.float32)


def _repeated(a: Array, heads: int) -> Array:
    """Keys or values for each of so many heads: those of head h are h // (heads / K)."""
    return np.repeat(a, heads // max(a.shape[1], 1), axis=1)


def _added(a: Array, groups: int) -> Array:
    """The sum over the heads that share keys and values."""
    return a.reshape(a.shape[0], groups, a.shape[1] // max(groups, 1), *a.shape[2:]).sum(2)
