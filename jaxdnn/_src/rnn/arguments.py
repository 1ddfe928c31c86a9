"""Reads what a user passed to a recurrent layer: its arrays, of one layer and one direction, and their sizes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core import blending, checks, engines, primitives
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.rounding import at_edges
from jaxdnn._src.rnn.primitive import RnnSpec
from jaxdnn._src.rnn.steps import GATES

LAYOUTS = ("NTC", "TNC")
DIRECTIONS = ("forward", "reverse", "bidirectional")
RESET_GATES = ("after", "before")
ACTIVATIONS = ("tanh", "relu")


@dataclasses.dataclass(frozen=True)
class Layer:
    """Arrays and sizes of a layer. x is (T, N, I), whatever the layout; heads is None where `r` is a matrix."""

    spec: RnnSpec
    heads: int | None
    x: Array
    weights: dict[str, Array]
    initial: dict[str, Array]
    final: tuple[np.dtype, ...]
    lengths: Array | None
    resets: Array | None


def read(
    cell: str,
    x: Array,
    weights: Mapping[str, Any],
    initial: Mapping[str, Any],
    lengths: Any = None,
    resets: Any = None,
    *,
    layout: str | None = None,
    reverse: bool = False,
    clip: Any = None,
    engine: Any = None,
    determinism: Any = None,
) -> Layer:
    """Reads all but x, which is (T, N, I), and resets, which are (T, N) and read; layout: that of the caller's x."""
    level, gates = required(determinism), GATES[cell]
    wide = blending.accumulator(x.dtype)
    given = {name: checks.array(name, v) for name, v in weights.items() if v is not None or name == "r"}
    for name, v in given.items():
        own = (x.dtype,) if name in ("w", "r", "projection") else dict.fromkeys((np.dtype(x.dtype), wide))
        checks.dtype(name, v, tuple(own))
    hidden, heads = _units(gates, x, given)
    swapped = f" (in layout {LAYOUTS[layout == LAYOUTS[0]]} x has {x.shape[0]} sequences)"
    other = lambda v: swapped if layout is not None and v.shape[:1] == x.shape[:1] else ""
    columns = given["projection"].shape[-1] * (heads or 1) if "projection" in given else hidden
    own = (columns, gates * hidden) if heads is None else (heads, columns // heads, gates * hidden // heads)
    whose = "as `w` has" if "w" in given else "as `x` has columns"
    checks.shape("r", given["r"], own, f"for {hidden} units, {whose}, and states of {columns}")
    for name in ("bias", "recurrent_bias"):
        if name in given:
            checks.shape(name, given[name], (gates * hidden,), "one for every unit of each gate")
    states, kinds = {}, []
    for name, v in initial.items():
        shape = (x.shape[1], columns if name.startswith("h") else hidden)
        dtypes = (x.dtype,) if name.startswith("h") else tuple(dict.fromkeys((np.dtype(x.dtype), wide)))
        optional = name in ("h0", "c0")  # a cell's h and c are not
        v = jnp.zeros(shape, x.dtype) if v is None and optional else checks.array(name, v)
        checks.dtype(name, v, dtypes)
        checks.shape(name, v, shape, "one row for every sequence", other(v))
        kinds.append(np.dtype(v.dtype))
        states[name[0]] = v
    if lengths is not None:
        lengths = checks.array("lengths", lengths)
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise TypeError(f"`lengths` must be integers, got {lengths.dtype.name}.")
        checks.shape("lengths", lengths, (x.shape[1],), "one for every sequence", other(lengths))
        wide = lengths if lengths.dtype.itemsize >= 4 else lengths.astype(jnp.int32)  # which holds any T
        none, most = (jnp.asarray(v, wide.dtype) for v in (0, x.shape[0]))
        lengths = lax.clamp(none, wide, most).astype(jnp.int32)
    spec = RnnSpec(
        cell=cell,
        reverse=reverse,
        clip=_limits(clip),
        projected="projection" in given,
        ragged=lengths is not None,
        resets=resets is not None,
        narrow=np.dtype(x.dtype),
        engine=checks.choice("engine", engine, (None, *engines.names())),
        level=level,
    )
    edges = at_edges(level, (x, given, states))
    return Layer(spec, heads, *edges, tuple(kinds), lengths, resets)


def _units(gates: int, x: Array, weights: Mapping[str, Array]) -> tuple[int, int | None]:
    """H and the number of heads, if there are any, from the weights, whose ranks are checked."""
    heads = weights["r"].shape[0] if weights["r"].ndim == 3 else None
    ranks = {"w": (2,), "r": (2, 3), "projection": (2,) if heads is None else (3,)}
    for name, v in weights.items():
        if v.ndim not in ranks.get(name, (v.ndim,)):
            what = "a matrix" if name == "w" or heads is None else "a matrix for each of the heads that `r` has"
            raise ValueError(f"`{name}` must be {what}, got shape {checks.shown(tuple(v.shape))}.")
    hidden = _hidden(gates, x, weights)
    if heads is not None and (not heads or hidden % heads):
        raise ValueError(f"`r` must have a number of heads that divides the {hidden} units, got {heads}.")
    known = (hidden,) if heads is None else (heads, hidden // heads)
    if "projection" in weights and weights["projection"].shape[:-1] != known:
        given, each = tuple(weights["projection"].shape), "(H, P)" if heads is None else "(heads, H/heads, P/heads)"
        raise ValueError(f"`projection` must have shape {each} with H = {hidden} as in `w`, got {given}.")
    return hidden, heads


def _hidden(gates: int, x: Array, weights: Mapping[str, Array]) -> int:
    """H, which without `w` is the number of columns of x."""
    if "w" not in weights:
        return x.shape[-1]
    w = weights["w"]
    if w.shape[0] != x.shape[-1] or w.shape[1] % gates:
        each = "" if gates == 1 else f"{gates} "
        hint = "; it looks transposed" if w.shape[1] == x.shape[-1] and w.shape[0] % gates == 0 else ""
        raise ValueError(
            f"`w` must have shape (I, {each}H) with I = {x.shape[-1]} as in `x`, got {tuple(w.shape)}{hint}."
        )
    return w.shape[1] // gates


def _limits(clip: Any) -> tuple[float, float] | None:
    if clip is None:
        return None
    if not checks.is_sequence(clip) or len(clip) != 2:
        raise ValueError(f"`clip` must be None or a pair (low, high), got {checks.shown(clip)}.")
    low, high = (checks.as_float("clip", v) for v in clip)
    if not low <= high:
        raise ValueError(f"`clip` must have a low limit that is at most the high one, got {checks.shown(clip)}.")
    return low, high


def sequences(x: Any, axes: str) -> Array:
    x = checks.array("x", x)
    checks.dtype("x", x, blending.FLOATS[:4])
    if x.ndim != len(axes):
        names = ", ".join(axes.replace("C", "I"))
        hint = checks.unbatched("x", x.ndim, len(axes))
        raise ValueError(f"`x` must have shape ({names}), got {checks.shown(tuple(x.shape))}{hint}.")
    return x


def of_layer(name: str, value: Any, i: int, count: int) -> Any:
    """A layer's part of what is given for all."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != count:
        got = f"one of {len(value)}" if isinstance(value, tuple | list) else checks.shown(value)
        raise ValueError(f"`{name}` must be None or a sequence of {count}, one for every layer, as `r` is, got {got}.")
    return value[i]


def read_resets(resets: Any, x: Array, layout: str) -> Array:
    resets = checks.array("resets", resets)
    if resets.dtype != np.bool_:
        raise TypeError(f"`resets` must be booleans, got {resets.dtype.name}.")
    steps, batch = x.shape[:2]
    checks.shape("resets", resets, (batch, steps) if layout == "NTC" else (steps, batch), "one for every step of `x`")
    return resets if layout == "TNC" else jnp.swapaxes(resets, 0, 1)


def of_direction(name: str, value: Any, i: int) -> Array | None:
    """The part of weights or states that belongs to one of two directions."""
    if value is None:
        return None
    value = checks.array(name, value)
    ranks = (2,) if "bias" in name else (3, 4) if name in ("r", "projection") else (3,)
    if value.ndim not in ranks or value.shape[0] != 2:
        raise ValueError(
            f"`{name}` must have {ranks[0]} axes for `direction` 'bidirectional', the first of 2, forward and reverse, "
            f"got shape {checks.shown(tuple(value.shape))}."
        )
    return primitives.gathered(value, 0)[i]
