"""An array at any coordinates, by B-splines.

    y[m] = sum over k of c[k] B_n(p_1[m] - k_1) ... B_n(p_d[m] - k_d)
    x[i] = sum over k of c[k] B_n(i_1 - k_1) ... B_n(i_d - k_d)

B_n is the B-spline of order n (of degree n, centred at 0), and c, with as many elements as x, are the coefficients of
the spline through x: x itself for n = 0 and n = 1. How x, and so c, goes on outside of i = 0, ..., N - 1, for N = 4:

    mirror                   d c b | a b c d | c b a
    reflect, grid-mirror     c b a | a b c d | d c b
    grid-wrap                b c d | a b c d | a b c
    wrap                     b c d | b c d | b c d      p is taken into [0, N - 1] by steps of N - 1, of which the ends
                                                        are one place, for p < 0 the last one, else the first one; c
                                                        is that of "mirror"
    nearest                  a a a | a b c d | d d d
    grid-constant            v v v | a b c d | v v v    v = cval
    constant                 y = cval for a p outside of [0, N - 1]; within it, "mirror"

For n = 0 and p midway between two elements y is the second one; where x goes on backwards, the one that is second in x,
but of "mirror" for p > 0 between the last element and what comes after it.
A p beyond FAR, infinity too, is held there. For n > 1 "nearest" and "grid-constant" go on so for PAD elements; beyond,
p of "nearest" is held there, and c of "grid-constant" is cval.

The coefficients are those of the inverse filter, axis by axis:

    c[i] = sum over |k| <= K of h(k) x[i + k]        h(k) = sum over the poles z of B_n of a_z z^|k|

with x going on as said, and K such that the largest pole's power is below 2^-26, or for float64 2^-56.

"ordered": coordinates in float32 (float64 if x or they are), each step rounded; h in float64, of terms k that meet one
element of x the sum, from the lowest k on, rounded once; 0 + h x[j] + ..., from the lowest j on for all modes but
"grid-wrap", for which it is from i - K on; then 0 + w c[k] + ..., weights multiplied in the order of the axes, in
row-major order.

Sources: SciPy's scipy.ndimage.map_coordinates; Unser, "Splines: a perfect fit for signal and image processing" (1999);
the poles are those of its box 2.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdnn_reference.tensor import finish, wide

Array = np.ndarray[Any, Any]
PAD, FAR = 12, 2.0**30
# The poles of B_n, and the reciprocal of its value at its outermost whole number.
POLES: dict[int, tuple[tuple[float, ...], float]] = {
    2: ((math.sqrt(8.0) - 3.0,), 8.0),
    3: ((math.sqrt(3.0) - 2.0,), 6.0),
    4: ((-0.361341225900220177, -0.0137254292973391214), 384.0),
    5: ((-0.430575347099973792, -0.0430962882032646538), 120.0),
}


def map_coordinates(
    x: Array,
    coordinates: Array | Sequence[Array],
    /,
    *,
    order: int = 3,
    mode: str = "constant",
    cval: float = 0.0,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """y[m] at coordinates[:, m], p_1 to p_d."""
    places = np.stack([np.asarray(p) for p in coordinates])
    c = wide(x, arithmetic)
    if c.dtype.kind == "i":
        c = c.astype(np.float64 if arithmetic == "golden" else np.float32)
    places = wide(places, arithmetic).astype(np.result_type(c.dtype, places.dtype, np.float32))
    pad = PAD if order > 1 and mode in ("nearest", "grid-constant") else 0
    if pad:
        c = np.pad(c, pad, "edge") if mode == "nearest" else np.pad(c, pad, constant_values=cval)
    for axis in range(x.ndim) if order > 1 else ():
        c = np.moveaxis(coefficients(np.moveaxis(c, axis, 0), order, mode, arithmetic), 0, axis)
    y = np.zeros(places.shape[1:], c.dtype)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for point in np.ndindex(*y.shape):
            p = places[(slice(None), *point)]
            if any(np.isnan(v) for v in p):
                y[point] = np.nan
                continue
            each = [taps(v, n, order, mode, pad) for v, n in zip(p, x.shape, strict=True)]
            if any(tap is None for tap in each):
                y[point] = cval
                continue
            for tap in itertools.product(*(along or [] for along in each)):
                at, weight = tuple(k for k, _ in tap), math.prod((w for _, w in tap[1:]), start=tap[0][1])
                inside = all(0 <= k < n for k, n in zip(at, c.shape, strict=True))
                if weight != 0:
                    y[point] += c.dtype.type(weight) * (c[at] if inside else c.dtype.type(cval))
    return finish(y, x.dtype, 1.0, 0.0, None, out_dtype, arithmetic)


def taps(p: Any, size: int, order: int, mode: str, pad: int) -> list[tuple[int, Any]] | None:
    """(place in c, -1 outside, and weight) of each tap along an axis; None where y is cval."""
    if mode == "constant" and not 0 <= p <= size - 1:
        return None
    if mode == "nearest":
        p = np.clip(p, -pad, size - 1 + pad)
    if mode == "grid-constant":
        p = np.clip(p, -pad - 9, size + 8 + pad)
    p = np.clip(p, -FAR, FAR)
    if mode == "wrap" and not 0 <= p <= size - 1:
        periods = p / max(size - 1, 1)
        p = p - (np.ceil(periods) - 1 if p < 0 else np.floor(periods)) * max(size - 1, 1)
    q = p if order % 2 else p + type(p)(0.5)
    low = np.floor(q)
    first = int(low) - order // 2
    if order == 0 and p - np.floor(p) == 0.5 and turned(first - 1, size, mode, p < 0):
        first -= 1
    return [(outside(first + j + pad, size + 2 * pad, mode), w) for j, w in enumerate(weights(q - low, order))]


def weights(f: Any, order: int) -> list[Any]:
    """B_n at the taps below and above a place that is f of the way from one knot to the next."""
    found = [type(f)(1)]
    for k in range(1, order + 1):
        lower, upper = [type(f)(0), *found], [*found, type(f)(0)]
        found = [((f + (k - j)) * lower[j] + ((j + 1) - f) * upper[j]) / k for j in range(k + 1)]
    return found


def outside(k: int, size: int, mode: str) -> int:
    """The element that stands at a place inside or outside; -1 for cval."""
    if mode == "grid-constant":
        return k if 0 <= k < size else -1
    if mode == "nearest":
        return min(max(k, 0), size - 1)
    if mode == "grid-wrap":
        return k % size
    if mode in ("reflect", "grid-mirror"):
        k %= 2 * size
        return min(k, 2 * size - 1 - k)
    if size == 1:
        return 0
    k %= 2 * size - 2
    return min(k, 2 * size - 2 - k)


def turned(k: int, size: int, mode: str, below: bool) -> bool:
    """Whether x goes on backwards from k to k + 1; as SciPy has it, not from the last element up."""
    if mode in ("reflect", "grid-mirror"):
        return k % (2 * size) >= size
    return mode == "mirror" and k % max(2 * size - 2, 1) >= (size - 1 if below else size)


def response(order: int, narrow: bool) -> list[float]:
    """h(0), ..., h(K)."""
    poles, scale = POLES[order]
    length = 0
    while max(map(abs, poles)) ** length >= (2.0**-26 if narrow else 2.0**-56):
        length += 1
    found = [0.0] * (length + 1)
    for z in poles:
        term = -scale * z / (1 - z * z)
        for other in poles:
            if other != z:
                term = term * -other / ((1 - other / z) * (1 - other * z))
        for k in range(length + 1):
            found[k] += term
            term *= z
    return found


def coefficients(x: Array, order: int, mode: str, arithmetic: str) -> Array:
    """c along the first axis."""
    size = len(x)
    goes_on = {"nearest": "reflect", "grid-constant": "mirror", "constant": "mirror", "wrap": "mirror"}.get(mode, mode)
    h = response(order, x.dtype == np.float32)
    c = np.zeros_like(x)
    for i in range(size):
        row: dict[int, float] = {}
        for k in range(1 - len(h), len(h)):
            j = outside(i + k, size, goes_on)
            row[j] = row.get(j, 0.0) + h[abs(k)]
        places = list(row) if mode == "grid-wrap" else sorted(row)
        for j in places:
            c[i] += x.dtype.type(row[j]) * x[j]
    return c
