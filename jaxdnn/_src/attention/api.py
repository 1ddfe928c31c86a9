"""The public functions of attention.

Letters: B sequences, T queries, S keys, N heads of queries, K heads of keys and values, D features of queries and keys,
E of values.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxdnn._src.attention.primitive import AttentionSpec
from jaxdnn._src.core import blending, checks, primitives
from jaxdnn._src.core.determinism import require, required
from jaxdnn._src.core.eager import data
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import at_edges
from jaxdnn._src.dropout.api import DropoutState, operand, read_key
from jaxdnn._src.dropout.primitive import pair, threshold, times_block

LAYOUTS = ("BTNH", "BNTH")
CAUSAL = ("top_left", "bottom_right")
FARTHEST = 2**30  # of a window's sides, which int32 holds beside any place
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
    query_lengths: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    layout: str = "BTNH",
    return_logsumexp: bool = False,
    engine: str | None = None,
    determinism: str | None = None,
) -> Any:
    """Attention: for every query the mean of the values, weighted by the softmax of its scores.

    x_ij = softcap(scale q_i · k_j) + bias_ij + slope (j - i)        softcap(x) = c tanh(x / c)
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
      query_lengths, key_lengths: (B,), integers, cut to 0 and T or S: queries beyond see nothing, and keys beyond are
        not seen.
      query_segments, key_segments: (B, T) and (B, S), integers: packed sequences. A query sees the keys of its segment.
      alibi_slopes: (N,), floats: slope (j - i) is added to the scores of each head, wherever the diagonal is.
      sinks: (N,), floats: a score that each query of a head has besides those of its keys, without a value.
      dropout: the rate of dropping weights exp(x_ij - L_i), from 0 to below 1. What is kept is multiplied by
        1 / (1 - dropout). Kept are elements of `dropout_mask(dropout_key, (B, N, T, S), rate=dropout)`, whatever the
        layout and the mesh.
      dropout_key: as `key` in `dropout`; None where nothing is dropped.
      layout: "BTNH", or "BNTH" for arrays (B, N, T, D), (B, K, S, D), (B, K, S, E).
      return_logsumexp: whether L is returned too.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, (B, T, N, E) of q's dtype; with `return_logsumexp` also L, (B, T, N) in float32 (float64 for float64), with the
      sink in its sum. For layout "BNTH" (B, N, T, E) and (B, N, T). A score of +inf or NaN makes its row NaN.

    Differentiation: any order, forward and reverse, of y and L in q, k, v, bias, slopes and sinks; memory is linear in
      the lengths but for what bias and mask have.

    Numerics: scores, exponentials and sums in float32 (float64 for float64), rounded once; products of narrow operands
      on GPUs with narrow weights, as all attention kernels have them. float32 is not cut to TF32. Determinism level
      run_to_run by engine `xla`, batch_invariant by `hopper` (no derivatives; bfloat16 and float16, multiples of 8
      features to 256, no dropout), mesh_invariant by `ordered`, which adds products term by term; second derivatives
      run_to_run.

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
    arrays, spec = _read(
        (("q", q), ("k", k), ("v", v)),
        scale,
        causal,
        window,
        softcap,
        dict(bias=bias, alibi_slopes=alibi_slopes, sinks=sinks),
        dict(
            mask=mask,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            query_segments=query_segments,
            key_segments=key_segments,
        ),
        dropout,
        dropout_key,
        layout,
        engine,
        determinism,
    )
    found = at_edges(spec.level, primitives.call("attention", *arrays, spec=spec))
    return found if checks.flag("return_logsumexp", return_logsumexp) else found[0]


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
    query_lengths: ArrayLike | None = None,
    key_lengths: ArrayLike | None = None,
    query_segments: ArrayLike | None = None,
    key_segments: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout: float = 0.0,
    dropout_key: ArrayLike | DropoutState | None = None,
    layout: str = "BTNH",
    engine: str | None = None,
    determinism: str | None = None,
) -> tuple[Array, ...]:
    """The backward pass of `attention`.

    P_ij = exp(x_ij - L_i)    dP_ij = dy_i · v_j    D_i = dy_i · y_i - dL_i    dS_ij = P_ij (dP_ij - D_i)
    dv_j = Σ_i P_ij dy_i    dq_i = scale Σ_j dS_ij k_j    dk_j = scale Σ_i dS_ij q_i

    With a cap c the last two have dS_ij (1 - tanh²(scale q_i · k_j / c)) in the place of dS_ij.

    Args:
      dy: as y, of q's dtype.
      q, k, v: as in `attention`.
      y, logsumexp: what `attention` returned for these arguments.
      dlogsumexp: as logsumexp; None is 0.
      scale, causal, window, softcap, bias, mask, alibi_slopes, sinks: as in `attention`.
      dropout, dropout_key, layout: as in `attention`.
      query_lengths, key_lengths, query_segments, key_segments: as in `attention`.
      engine, determinism: as in `attention`.

    Returns:
      dq, dk, dv, as q, k and v; and behind them the gradients of bias (Σ dS over what it is broadcast along),
      alibi_slopes (Σ dS (j - i)) and sinks (-Σ exp(sink - L) D), as far as these are given.

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
    arrays, spec = _read(
        (("q", q), ("k", k), ("v", v)),
        scale,
        causal,
        window,
        softcap,
        dict(bias=bias, alibi_slopes=alibi_slopes, sinks=sinks),
        dict(
            mask=mask,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            query_segments=query_segments,
            key_segments=key_segments,
        ),
        dropout,
        dropout_key,
        layout,
        engine,
        determinism,
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
        checks.dtype(name, value, [dtype] if dtype == q.dtype else _FLOATS)
        saved[name] = at_edges(spec.level, value).astype(dtype)
    spec = spec.along_all()
    count = len(spec.floats)
    operands = (saved["dy"], saved["dlogsumexp"], *arrays[:count], saved["y"], saved["logsumexp"], *arrays[count:])
    found = at_edges(spec.level, primitives.call("attention_dgrad", *operands, spec=spec))
    named = dict(zip(spec.along, found, strict=True))
    return tuple(x.reshape(x.shape[-1:]) if n in ("alibi_slopes", "sinks") else x for n, x in named.items())


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


# ---- arguments -------------------------------------------------------------------------------------------------------


def _read(
    arrays: Any,
    scale: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    floats: dict[str, Any],
    constants: dict[str, Any],
    dropout: Any,
    dropout_key: Any,
    layout: Any,
    engine: Any,
    determinism: Any,
) -> tuple[tuple[Array, ...], AttentionSpec]:
    """The operands of the primitive, and what is known when the call is traced."""
    checks.choice("layout", layout, LAYOUTS)
    q, k, v = (checks.array(name, value) for name, value in arrays)
    checks.dtype("q", q, _FLOATS)
    rows, heads = (1, 2) if layout == "BTNH" else (2, 1)
    letters = lambda t, n, d: f"(B, {t}, {n}, {d})" if layout == "BTNH" else f"(B, {n}, {t}, {d})"
    if q.ndim != 4 or not q.shape[3]:
        raise ValueError(f"`q` must have shape {letters('T', 'N', 'D')} with D > 0, got {tuple(q.shape)}.")
    for name, x, d in (("k", k, "D"), ("v", v, "E")):
        checks.dtype(name, x, [q.dtype])
        if x.ndim != 4 or x.shape[0] != q.shape[0]:
            raise ValueError(
                f"`{name}` must have shape {letters('S', 'K', d)} with B = {q.shape[0]} as in `q`, "
                f"got {tuple(x.shape)}."
            )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"`k` must have as many features as `q`, {q.shape[3]}, got {k.shape[3]}.")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"`v` must have the rows and heads of `k`, {tuple(k.shape[:3])}, got {tuple(v.shape[:3])}.")
    n, groups, t, s = q.shape[heads], k.shape[heads], q.shape[rows], k.shape[rows]
    if n != groups and (not groups or n % groups):
        raise ValueError(f"`k` must have a number of heads that divides that of `q`, {n}, got {groups}.")
    full = (q.shape[0], n, t, s)
    given: dict[str, Array] = {}
    for name, value in floats.items():
        if value is None:
            continue
        value = checks.array(name, value)
        checks.dtype(name, value, _FLOATS)
        if name == "bias":
            _broadcast(name, value, full)
        else:
            checks.shape(name, value, (n,), "one for each head of `q`")
            value = value[None]
        given[name] = value
    given |= _constants(constants, full)
    thinned = _thinned(dropout, full)
    if thinned is not None:
        given["dropout_key"] = _key(dropout_key)
    left, right = _window(window)
    if not isinstance(causal, bool | np.bool_):
        checks.choice("causal", causal, CAUSAL)
    if causal:
        right = 0 if right is None else min(right, 0)
    spec = AttentionSpec(
        layout == "BNTH",
        q.shape[3] ** -0.5 if scale is None else checks.as_float("scale", scale),
        _cap(softcap),
        left,
        right,
        causal == "bottom_right",
        s - t if causal == "bottom_right" else 0,
        thinned,
        tuple(given),
        engine,
        required(determinism),
    )
    named = {"q": q, "k": k, "v": v, **given}
    order = (*spec.floats, *spec.constants)
    return tuple(at_edges(spec.level, named[name]) if name in spec.floats else named[name] for name in order), spec


def _broadcast(name: str, value: Array, full: tuple[Any, ...]) -> None:
    if value.ndim != 4 or any(m not in (1, n) for m, n in zip(value.shape, full, strict=False)):
        raise ValueError(
            f"`{name}` must have shape (B or 1, N or 1, T or 1, S or 1) with (B, N, T, S) = {full}, "
            f"got {tuple(value.shape)}."
        )


def _constants(constants: dict[str, Any], full: tuple[Any, ...]) -> dict[str, Array]:
    """Mask, lengths and segments."""
    batch, _, t, s = full
    given: dict[str, Array] = {}
    for name, value in constants.items():
        if value is None:
            continue
        value = checks.array(name, value)
        if name == "mask":
            checks.dtype(name, value, [jnp.bool_])
            _broadcast(name, value, full)
        elif not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"`{name}` must be integers, got {value.dtype.name}.")
        elif name.endswith("lengths"):
            checks.shape(name, value, (batch,), "one for every sequence")
            most = t if name == "query_lengths" else s
            value = value if value.dtype.itemsize >= 4 else value.astype(jnp.int32)  # which holds `most`
            value = jnp.clip(value, 0, most).astype(jnp.int32)
        else:
            checks.shape(name, value, (batch, t if name == "query_segments" else s), "one for every row")
        given[name] = value
    for one, other in (("query_segments", "key_segments"), ("key_segments", "query_segments")):
        if one in given and other not in given:
            raise ValueError(f"`{other}` must be given with `{one}`.")
    if "query_segments" in given:
        checks.dtype("key_segments", given["key_segments"], [given["query_segments"].dtype])
    return given


def _thinned(rate: Any, full: tuple[Any, ...]) -> tuple[int, float, int, int] | None:
    """What a call's spec says of dropout."""
    rate = checks.as_float("dropout", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"`dropout` must be at least 0 and below 1, got {rate}.")
    if rate == 0:
        return None
    _, n, t, s = full
    known = [size for size in full[:3] if isinstance(size, int)]
    if len(known) < 3 or not isinstance(s, int) or math.prod(known) >= 2**32:
        raise ValueError(f"`dropout` needs (B, N, T, S) known when traced, with B N T below 2^32, got {full}.")
    return threshold(rate), 1 / (1 - rate), n, t


def _key(key: Any) -> Array:
    """The key's words, and the number of the first element in its count."""
    if key is None:
        raise ValueError("`dropout_key` must be given with `dropout`.")
    words, used = read_key("dropout_key", key)
    return jnp.concatenate([words, pair(0) if used is None else times_block(used)])[None]


def _window(window: Any) -> tuple[int | None, int | None]:
    pair = tuple(window) if checks.is_sequence(window) else (window, window)
    if len(pair) != 2:
        raise ValueError(f"`window` must be a number or (left, right), got {checks.shown(window)}.")
    found = tuple(None if side is None else checks.integer("window", side) for side in pair)
    if any(side is not None and side < 0 for side in found):
        raise ValueError(f"`window` must have no negative side (None is without a limit), got {checks.shown(window)}.")
    left, right = (None if side is None else min(side, FARTHEST) for side in found)
    return left, right


def _cap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    cap = checks.as_float("softcap", softcap)
    if not cap > 0 or cap == float("inf"):
        raise ValueError(f"`softcap` must be a positive number, got {cap}.")
    return cap
