"""Rotary position embedding. Letters: B sequences, T places, N heads, D features, of which F are rotated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxdnn._src.attention.arguments import FLOATS, LAYOUTS
from jaxdnn._src.core import blending, checks, primitives
from jaxdnn._src.core.determinism import require
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import at_edges, nearest, product, steady
from jaxdnn._src.dropout.primitive import times

PAIRS, SIDES = ("half", "interleaved"), ("first", "last")


@public
def rope(
    x: ArrayLike,
    /,
    *,
    positions: ArrayLike | None = None,
    base: float = 10000.0,
    frequencies: Sequence[float] | None = None,
    width: int | None = None,
    pairs: str = "half",
    side: str = "first",
    scale: float = 1.0,
    layout: str = "BTNH",
    determinism: str | None = None,
) -> Array:
    """Rotary embedding: pairs of features are rotated by an angle that grows with the position.

    (a, b) -> scale (a cos θ - b sin θ, b cos θ + a sin θ)        θ = position w_f        w_f = base^(-2 f / F)

    for pairs f from 0 to F / 2 - 1. Products of queries and keys that are embedded so depend on the distance alone.

    Args:
      x: (B, T, N, D); float32, bfloat16, float16, float64.
      positions: (T,) or (B, T), integers of at most 32 bits, also negative ones; or floats. None is 0 to T - 1.
      base: of the frequencies, above 0.
      frequencies: w, F / 2 numbers that are known when the call is traced, instead of those of `base`, for rules that
        stretch positions (linear, NTK, YaRN).
      width: F, how many features are rotated, an even number; None is D. The others are multiplied by scale alone.
      pairs: "half", where feature f is paired with f + F / 2, as in cuDNN, GPT-NeoX, Llama of Hugging Face and
        Equinox's RotaryPositionalEmbedding; or "interleaved", 2 f with 2 f + 1, as in RoFormer and the original Llama.
      side: whether the "first" or the "last" F features are rotated; cuDNN rotates the last.
      scale: a factor of all features, of which YaRN has one.
      layout: "BTNH", or "BNTH" for an array (B, N, T, D).
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      An array of x's shape and dtype.

    Differentiation: linear in x, with the inverse rotation as its transpose; in positions, if they are floats.

    Numerics: in float32 (float64 for float64), rounded once. The angle of an integer position is exact modulo a turn
      before it is rounded, so the error does not grow with the position, as it does where θ is computed in float32: by
      0.06 at a million. Determinism level mesh_invariant.

    Raises:
      ValueError: shapes that do not fit, an unknown option. TypeError: a dtype that is not served. NotImplementedError:
      the determinism level cannot be guaranteed.

    Example:
      >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
      >>> dnn.rope(x, positions=jnp.array([0])).ravel().tolist()
      [1.0, 0.0]

    Sources: Su et al., "RoFormer" (2021); Peng et al., "YaRN" (2023); cuDNN's graph node rope. ONNX's RotaryEmbedding
      has `interleaved`, and takes tables of cosines and sines.
    """
    level = require("rope", determinism, "mesh_invariant", "its sines are the device's")
    checks.choice("layout", layout, LAYOUTS)
    checks.choice("pairs", pairs, PAIRS)
    checks.choice("side", side, SIDES)
    x = checks.array("x", x)
    checks.dtype("x", x, FLOATS)
    if x.ndim != 4:
        raise ValueError(
            f"`x` must have four axes, {'(B, T, N, D)' if layout == 'BTNH' else '(B, N, T, D)'}, got {x.ndim}"
            f"{checks.unbatched('x', x.ndim, 4)}."
        )
    rotated = x.shape[3] if width is None else checks.integer("width", width)
    if rotated % 2 or not 0 <= rotated <= x.shape[3]:
        raise ValueError(f"`width` must be an even number of at most D = {x.shape[3]} features, got {rotated}.")
    w = _frequencies(base, frequencies, rotated)
    rows = x.shape[1] if layout == "BTNH" else x.shape[2]
    places = _positions(positions, x.shape[0], rows)
    factor = checks.finite("scale", scale)

    def run(x: Array, places: Array) -> Array:
        wide = x.astype(blending.accumulator(x.dtype))
        cos, sin = (_of_angles(f, places, w, wide.dtype) for f in (jnp.cos, jnp.sin))
        axis = 2 if layout == "BTNH" else 1
        cos, sin = (jnp.expand_dims(a, axis) for a in (cos, sin))
        first = 0 if side == "first" else x.shape[3] - rotated
        before, middle, after = jnp.split(wide, [first, first + rotated], -1)
        found = jnp.concatenate([before, _rotated(middle, cos, sin, pairs), after], -1)
        found = found if factor == 1 else product(found, jnp.full_like(found, factor))
        return nearest(found, x.dtype)

    def factors(x: Any, places: Any) -> Factors:
        dims = ("b", "t", "n", "d") if layout == "BTNH" else ("b", "n", "t", "d")
        own = ("b" if places.shape[0] == x.shape[0] else "one", "t")
        return Factors((dims, own), (dims,), ("b", "t", "n"))

    return at_edges(level, primitives.composed(run, factors, at_edges(level, x), places))


def _rotated(x: Array, cos: Array, sin: Array, pairs: str) -> Array:
    """Features, the two of each pair rotated; cosines and sines have an element for each pair."""
    if pairs == "half":
        a, b = jnp.split(x, 2, -1)
    else:
        split = x.reshape(*x.shape[:-1], -1, 2)
        a, b = split[..., 0], split[..., 1]
    cos, sin = (jnp.broadcast_to(f, a.shape) for f in (cos, sin))
    of_a, of_b = product(a, cos) - product(b, sin), product(b, cos) + product(a, sin)
    if pairs == "half":
        return jnp.concatenate([of_a, of_b], -1)
    return jnp.stack([of_a, of_b], -1).reshape(x.shape)


def _of_angles(function: Any, places: Array, w: np.ndarray, dtype: Any) -> Array:
    """The sine or cosine of positions times frequencies, (B or 1, T, F / 2)."""
    if jnp.issubdtype(places.dtype, jnp.integer):
        angle = _exact(places, w, dtype)
    else:
        shape = (*places.shape, len(w))
        angle = product(*(jnp.broadcast_to(a, shape) for a in (places.astype(dtype)[..., None], jnp.asarray(w, dtype))))
    return steady(function, angle) if angle.size else function(angle)


def _exact(places: Array, w: np.ndarray, dtype: Any) -> Array:
    """The angles modulo a turn, of which 64 bits behind the point are multiplied by the position."""
    ratio = [round(float(f) / (2 * math.pi) % 1 * 2.0**64) % 2**64 for f in w]
    high, low = (jnp.asarray(np.array([r >> n & 0xFFFFFFFF for r in ratio], np.uint32)) for n in (32, 0))
    n = places.astype(jnp.int32)[..., None]
    shape = (*places.shape, len(w))
    count, high, low = (jnp.broadcast_to(a, shape) for a in (n.astype(jnp.uint32), high, low))
    of_low = times(count, low)
    top = count * high + of_low[..., 1] - jnp.where(n < 0, low, jnp.uint32(0))  # modulo a turn
    if jnp.dtype(dtype).itemsize == 8:
        turns = top.astype(jnp.int32).astype(dtype) + of_low[..., 0].astype(dtype) * 2.0**-32
    else:
        turns = top.astype(jnp.int32).astype(dtype)
    return turns * jnp.asarray(2 * math.pi * 2.0**-32, dtype)


def _frequencies(base: Any, frequencies: Any, rotated: int) -> np.ndarray:
    if frequencies is None:
        base = checks.as_float("base", base)
        if not 0 < base < math.inf:
            raise ValueError(f"`base` must be a positive number, got {base}.")
        return base ** (-np.arange(0, rotated, 2) / max(rotated, 1))
    needed = f"`frequencies` must be {rotated // 2} numbers, one for each pair"
    if not checks.is_sequence(frequencies):
        raise TypeError(f"{needed}, in a sequence or a NumPy array, got {checks.shown(frequencies)}.")
    found = np.asarray([checks.as_float("frequencies", f) for f in frequencies])
    if found.shape != (rotated // 2,) or not np.isfinite(found).all():
        raise ValueError(f"{needed}, got {checks.shown(frequencies)}.")
    return found


def _positions(positions: Any, batch: Any, rows: Any) -> Array:
    """(B or 1, T)."""
    if positions is None:
        return jnp.arange(rows, dtype=jnp.int32)[None]
    places = checks.array("positions", positions)
    if places.shape not in ((rows,), (batch, rows)):
        raise ValueError(f"`positions` must have shape ({rows},) or ({batch}, {rows}), got {tuple(places.shape)}.")
    if not jnp.issubdtype(places.dtype, jnp.integer) and not jnp.issubdtype(places.dtype, jnp.floating):
        raise TypeError(f"`positions` must be integers or floats, got {places.dtype.name}.")
    return places if places.ndim == 2 else places[None]
