"""The bits of attention's forward kernel on Hopper: its sums in their order, its roundings, its exponentials.

For each row, from O = 0, m = -inf, l = 0, for each tile of keys in ascending order, with c = scale log2 e:

    S = q . k, by the matrix unit; -inf where a key is not seen      m' = max(m, max S)      alpha = 2^((m - m') c)
    p_j = 2^(S_j c - m' c)      l_t = l_t alpha + (sum p_8i+2t + sum p_8i+2t+1), t = 0, 1, 2, 3
    O = O alpha + sum_j p_j v_j, by the matrix unit, p_j rounded to v's type      m = m'

and y = O (1 / ((l_0 + l_2) + (l_1 + l_3))), rounded. Products with additions are fused, all else is rounded at once.
m' c is rounded by itself, so that S_j c - m' c need not be 0 where S_j = m'. A tile that a row does not see leaves its
m, l and O as they are.

Scores without a cap, bias or slopes; values that are finite.
"""

import math
from typing import Any

import numpy as np

from jaxdnn_reference.arithmetic import tensor_core
from jaxdnn_reference.rounding import fma, round_to
from jaxdnn_reference.special_function import ex2

Array = np.ndarray[Any, Any]

WIDE, LOG2_E = np.float32, math.log2(math.e)


def attention_scheduled(
    q: Array, k: Array, v: Array, seen: Array, /, *, scale: float, tile: int, sinks: Array | None = None
) -> Array:
    """y of q (B, N, T, D), k (B, K, S, D) and v (B, K, S, E), with `seen` of a shape that is broadcast to (B, N, T, S).

    tile: keys of a tile. sinks: (N,).
    """
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    seen = np.broadcast_to(seen, (batch, heads, queries, k.shape[2]))
    y = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    for b, n in np.ndindex(batch, heads):
        sink = None if sinks is None else WIDE(sinks[n])
        y[b, n] = _head(q[b, n], k[b, n // group], v[b, n // group], seen[b, n], scale, tile, sink)
    return y


def _head(q: Array, k: Array, v: Array, seen: Array, scale: float, tile: int, sink: Any) -> Array:
    c, rows = WIDE(scale * LOG2_E), len(q)
    o = np.zeros((rows, v.shape[1]), WIDE)
    m, lanes = np.full(rows, -np.inf, WIDE), np.zeros((rows, 4), WIDE)
    columns = _filled(np.arange(tile)[None], tile).reshape(-1, 4, 2)
    with np.errstate(all="ignore"):
        for start in range(0, len(k), tile):
            keys, values = _filled(k[start : start + tile].T, tile), _filled(v[start : start + tile].T, tile)
            s = tensor_core(np.ascontiguousarray(q.T), keys).value.T
            s = np.where(_filled(seen[:, start : start + tile], tile), s, WIDE(-np.inf))
            new = np.fmax(m, np.fmax.reduce(s, 1))
            known = np.where(new == -np.inf, WIDE(0), new)
            alpha, minus = ex2((m - known) * c), -(known * c)
            p = ex2(fma(s, np.broadcast_to(c, s.shape), np.broadcast_to(minus[:, None], s.shape)))
            lanes = fma(lanes, np.broadcast_to(alpha[:, None], lanes.shape), _of_lanes(p[:, columns]))
            weights, values = round_to(p, v.dtype), np.ascontiguousarray(values.T)
            o = tensor_core(np.ascontiguousarray(weights.T), values, start=(o * alpha[:, None]).T).value.T
            m = new
    return round_to(o * _inverse(lanes, m, c, sink)[:, None], v.dtype)


def _filled(x: Array, tile: int) -> Array:
    """(rows, keys) with zeros to a whole tile."""
    return np.pad(x, ((0, 0), (0, tile - x.shape[1])))


def _of_lanes(p: Array) -> Array:
    """(rows, 4): the sums of p (rows, groups of eight, 4, 2) over the groups, each of the two apart, then together."""
    even, odd = p[:, 0, :, 0], p[:, 0, :, 1]
    for i in range(1, p.shape[1]):
        even, odd = even + p[:, i, :, 0], odd + p[:, i, :, 1]
    return even + odd


def _inverse(lanes: Array, m: Array, c: Any, sink: Any) -> Array:
    """1 / l, or with a sink what its part leaves of that."""
    with np.errstate(all="ignore"):
        total = (lanes[:, 0] + lanes[:, 2]) + (lanes[:, 1] + lanes[:, 3])
        if sink is None:
            return WIDE(1) / np.where(total == 0, WIDE(1), total)
        scaled, sink = m * c, sink * WIDE(LOG2_E)
        top = np.fmax(scaled, sink)
        low = np.where(top == -np.inf, WIDE(0), top)
        share, added = ex2(scaled - low), ex2(sink - low)
        total = fma(total, share, added)
        return WIDE(1) / np.where(total == 0, WIDE(1), total) * share
