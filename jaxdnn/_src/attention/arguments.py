"""Reads and checks what a user passed to attention, once."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.attention.score import read_score
from jaxdnn._src.attention.spec import AttentionSpec
from jaxdnn._src.core import blending, checks
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.rounding import at_edges
from jaxdnn._src.dropout.api import read_key
from jaxdnn._src.dropout.primitive import pair, threshold, times_block

LAYOUTS = ("BTNH", "BNTH")
CAUSAL = ("top_left", "bottom_right")
FARTHEST = 2**30  # of a window's sides, and of a split, which int32 holds beside any place
FLOATS = blending.FLOATS[:4]


@dataclasses.dataclass(frozen=True)
class Options:
    """What attention and its backward pass take by name, as the user passed it."""

    scale: Any = None
    causal: Any = False
    window: Any = None
    softcap: Any = None
    bias: Any = None
    mask: Any = None
    block_mask: Any = None
    block_mask_tile: Any = 128
    query_lengths: Any = None
    key_lengths: Any = None
    query_segments: Any = None
    key_segments: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    score_fn: Any = None
    score_arrays: Any = ()
    dropout: Any = 0.0
    dropout_key: Any = None
    layout: Any = "BTNH"
    engine: Any = None
    determinism: Any = None
    out_dtype: Any = None
    split: Any = None
    maximum: bool = False
    diagonal: bool = False


def read(arrays: Any, o: Options) -> tuple[tuple[Array, ...], AttentionSpec]:
    """The operands of the primitive, and what is known when the call is traced."""
    checks.choice("layout", o.layout, LAYOUTS)
    q, k, v = (checks.array(name, value) for name, value in arrays)
    checks.dtype("q", q, FLOATS)
    rows, heads = (1, 2) if o.layout == "BTNH" else (2, 1)
    letters = lambda t, n, d: f"(B, {t}, {n}, {d})" if o.layout == "BTNH" else f"(B, {n}, {t}, {d})"
    if q.ndim != 4 or not q.shape[3]:
        raise ValueError(
            f"`q` must have shape {letters('T', 'N', 'D')} with D > 0, got {tuple(q.shape)}"
            f"{checks.unbatched('q', q.ndim, 4)}."
        )
    for name, x, d in (("k", k, "D"), ("v", v, "E")):
        checks.dtype(name, x, [q.dtype])
        if x.ndim != 4 or x.shape[0] != q.shape[0]:
            raise ValueError(
                f"`{name}` must have shape {letters('S', 'K', d)} with B = {q.shape[0]} as in `q`, "
                f"got {tuple(x.shape)}{checks.unbatched(name, x.ndim, 4)}."
            )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"`k` must have as many features as `q`, {q.shape[3]}, got {k.shape[3]}.")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"`v` must have the rows and heads of `k`, {tuple(k.shape[:3])}, got {tuple(v.shape[:3])}.")
    n, groups, t, s = q.shape[heads], k.shape[heads], q.shape[rows], k.shape[rows]
    other = "BNTH" if o.layout == "BTNH" else "BTNH"
    if n != groups and (not groups or n % groups):
        swapped = s > 0 and t % s == 0
        hint = f" (in layout {other} q has {t} and k {s})" if swapped else ""
        raise ValueError(f"`k` must have a number of heads that divides that of `q`, {n}, got {groups}{hint}.")
    full = Sizes(q.shape[0], n, t, s, groups, other)
    given: dict[str, Array] = {}
    for name in ("bias", "alibi_slopes", "sinks"):
        value = getattr(o, name)
        if value is None:
            continue
        value = checks.array(name, value)
        checks.dtype(name, value, FLOATS)
        if name == "bias":
            _broadcast(name, value, full)
        else:
            hint = f" (in layout {other} `q` has {t} heads)" if value.shape == (t,) else ""
            checks.shape(name, value, (n,), "one for each head of `q`", hint)
            value = value[None]
        given[name] = value
    tile = _tile(o.block_mask_tile)
    given |= _constants(o, full, tile)
    thinned = _thinned(o.dropout, full.scores)
    if thinned is not None:
        given["dropout_key"] = _key(o.dropout_key)
    score, of_score = read_score(o.score_fn, o.score_arrays, blending.accumulator(q.dtype))
    left, right = _window(o.window)
    if not isinstance(o.causal, bool | np.bool_):
        checks.choice("causal", o.causal, CAUSAL)
    if o.causal:
        right = 0 if right is None else min(right, 0)
    spec = AttentionSpec(
        o.layout == "BNTH",
        q.shape[3] ** -0.5 if o.scale is None else checks.finite("scale", o.scale),
        _cap(o.softcap),
        left,
        right,
        o.causal == "bottom_right",
        s - t if o.causal == "bottom_right" else 0,
        thinned,
        tuple(given),
        o.engine,
        required(o.determinism),
        wide_y=_is_wide(o.out_dtype, q.dtype),
        maximum=o.maximum,
        split=_split(o.split),
        tile=tile,
        diagonal=o.diagonal,
        score=score,
    )
    named = {"q": q, "k": k, "v": v, **given, **of_score}
    order = (*spec.floats, *spec.constants)
    return tuple(at_edges(spec.level, named[name]) if name in spec.floats else named[name] for name in order), spec


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a call: the batch, heads of queries, queries, keys, heads of keys, and the layout that it has not."""

    batch: Any
    n: Any
    t: Any
    s: Any
    groups: Any
    other: str

    @property
    def scores(self) -> tuple[Any, ...]:
        """(B, N, T, S)."""
        return self.batch, self.n, self.t, self.s

    @property
    def swapped(self) -> "Sizes":
        """The sizes that the same arrays have in the other layout."""
        return dataclasses.replace(self, n=self.t, t=self.n, s=self.groups, groups=self.s)


def _broadcast(name: str, value: Array, full: Sizes) -> None:
    fits = lambda scores: value.ndim == 4 and all(m in (1, n) for m, n in zip(value.shape, scores, strict=True))
    if not fits(full.scores):
        swapped = full.swapped.scores
        hint = f" (in layout {full.other} of q and k it would fit {swapped})" if fits(swapped) else ""
        raise ValueError(
            f"`{name}` must have shape (B or 1, N or 1, T or 1, S or 1) with (B, N, T, S) = {full.scores}, "
            f"got {tuple(value.shape)}{hint}."
        )


def _constants(o: Options, full: Sizes, tile: tuple[int, int]) -> dict[str, Array]:
    """Masks, lengths and segments."""
    batch, n, t, s = full.scores
    given: dict[str, Array] = {}
    for name in ("mask", "block_mask", "query_lengths", "key_lengths", "query_segments", "key_segments"):
        value = getattr(o, name)
        if value is None:
            continue
        value = checks.array(name, value)
        if name == "block_mask":
            checks.dtype(name, value, [jnp.bool_])
            tiles = (-(-t // tile[0]), -(-s // tile[1]))
            if (
                value.ndim != 4
                or value.shape[2:] != tiles
                or any(m not in (1, size) for m, size in zip(value.shape[:2], (batch, n), strict=True))
            ):
                raise ValueError(
                    f"`block_mask` must have shape (B or 1, N or 1, {tiles[0]}, {tiles[1]}), an element for "
                    f"{tile[0]} queries and {tile[1]} keys, got {tuple(value.shape)}."
                )
        elif name == "mask":
            if value.dtype != jnp.bool_:
                numbers = "; numbers that are added to the scores are `bias`"
                raise TypeError(f"`mask` must be bool, with True for a key that is seen{numbers}, got {value.dtype}.")
            _broadcast(name, value, full)
        elif not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"`{name}` must be integers, got {value.dtype.name}.")
        elif name.endswith("lengths"):
            checks.shape(name, value, (batch,), "one for every sequence")
            most = t if name == "query_lengths" else s
            value = value if value.dtype.itemsize >= 4 else value.astype(jnp.int32)  # which holds `most`
            value = jnp.clip(value, 0, most).astype(jnp.int32)
        else:
            rows, swapped = (v.t if name == "query_segments" else v.s for v in (full, full.swapped))
            hint = f" (in layout {full.other} of q and k it would fit)" if value.shape == (batch, swapped) else ""
            checks.shape(name, value, (batch, rows), "one for every row", hint)
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


def _tile(tile: Any) -> tuple[int, int]:
    pair = tuple(tile) if checks.is_sequence(tile) else (tile, tile)
    found = tuple(checks.integer("block_mask_tile", n) for n in pair)
    if len(found) != 2 or min(found) < 1:
        raise ValueError(f"`block_mask_tile` must be a positive number, or (queries, keys), got {checks.shown(tile)}.")
    return found[0], found[1]


def _split(split: Any) -> int | None:
    if split is None:
        return None
    split = checks.integer("split", split)
    if split < 1:
        raise ValueError(f"`split` must be a positive number of keys, got {split}.")
    return min(split, FARTHEST)


def _is_wide(out_dtype: Any, dtype: Any) -> bool:
    """Whether y is in the accumulator's dtype, unlike q."""
    wide = blending.accumulator(dtype)
    if out_dtype is None:
        return False
    names = list(dict.fromkeys(jnp.dtype(d).name for d in (dtype, wide)))
    try:
        found = jnp.dtype(out_dtype)
    except TypeError:
        found = None
    if found is None or found.name not in names:
        meant = checks.did_you_mean(out_dtype, names)
        raise ValueError(f"`out_dtype` must be one of {', '.join(names)} here, got {checks.shown(out_dtype)}{meant}.")
    return found != dtype
