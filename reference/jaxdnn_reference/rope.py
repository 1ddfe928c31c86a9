"""Rotary position embedding: pairs of features rotated by an angle that grows with the position.

    (a, b) -> scale (a cos t - b sin t, b cos t + a sin t)        t = position w_f        w_f = base^(-2 f / F)

for the pairs f of F features, the first or the last ones: f with f + F / 2 ("half") or 2 f with 2 f + 1
("interleaved"). All other features are multiplied by scale.

Sources: Su et al., "RoFormer" (2021); cuDNN's graph node rope, which has halves and the last features.
"""

from typing import Any

import numpy as np

from jaxdnn_reference.rounding import round_to

Array = np.ndarray[Any, Any]


def rope(
    x: Array,
    /,
    *,
    positions: Array | None = None,
    base: float = 10000.0,
    frequencies: Any = None,
    width: int | None = None,
    pairs: str = "half",
    side: str = "first",
    scale: float = 1.0,
    layout: str = "BTNH",
) -> Array:
    """x with pairs of its features rotated; positions (T,) or (B, T)."""
    given = x.astype(np.float64) if layout == "BTNH" else np.swapaxes(x.astype(np.float64), 1, 2)
    turned = x.shape[3] if width is None else width
    w = base ** (-np.arange(0, turned, 2) / max(turned, 1)) if frequencies is None else np.asarray(frequencies)
    places = np.arange(given.shape[1]) if positions is None else np.asarray(positions)
    angle = (places.astype(np.float64)[..., None] * w)[..., None, :]  # a head's
    first = np.arange(turned // 2) if pairs == "half" else np.arange(0, turned, 2)
    first = first + (0 if side == "first" else x.shape[3] - turned)
    second = first + (turned // 2 if pairs == "half" else 1)
    y = given.copy()
    y[..., first] = given[..., first] * np.cos(angle) - given[..., second] * np.sin(angle)
    y[..., second] = given[..., second] * np.cos(angle) + given[..., first] * np.sin(angle)
    y = scale * y
    return round_to(y if layout == "BTNH" else np.swapaxes(y, 1, 2), x.dtype)
