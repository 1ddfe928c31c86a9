"""Roundings that happen once: the fused multiply-add, and the conversion to a narrower type.

Both rest on rounding to odd: an inexact value becomes whichever of its two neighbours has an odd last bit. A
later rounding to nearest in a type of at least two bits less then comes out as if it were the only one.

Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to
odd" (IEEE Transactions on Computers 57, 2008).
"""

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FLOAT16, FLOAT32, FLOAT64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
INT8, INT32 = np.dtype(np.int8), np.dtype(np.int32)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding, to the inputs' type (float32 or float64).

    float32: the product is exact in float64; the sum's error comes out exactly by TwoSum; forcing the last
    bit of an inexact float64 sum to one (round to odd) makes the final rounding to float32 the only one.
    float64: the same with the product as a pair, exact where |a b| lies between 2^-960 and 2^990.
    """
    if np.result_type(a, b, c) == FLOAT32:
        p = a.astype(np.float64) * b.astype(np.float64)
        return _round_to_odd(*_two_sum(p, c.astype(np.float64))).astype(np.float32)
    high, low = _two_product(a, b)
    t, t_error = _two_sum(c, low)
    v, v_error = _two_sum(high, t)
    exact = v + _round_to_odd(*_two_sum(t_error, v_error))
    with np.errstate(invalid="ignore", over="ignore"):
        plain = a * b + c
    return np.where(np.isfinite(exact), exact, plain)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """s + e = a + b exactly, s rounded to nearest (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """p + e = a * b exactly, p rounded to nearest (Dekker, with Veltkamp's splitting at 27 bits)."""
    p = a * b
    (a1, a2), (b1, b2) = ((x1 := (big := x * 134217729.0) - (big - x), x - x1) for x in (a, b))
    return p, ((a1 * b1 - p) + a1 * b2 + a2 * b1) + a2 * b2


def _round_to_odd(s: Array, e: Array) -> Array:
    """s + e rounded to odd, s being its rounding to nearest: exact, or the neighbour whose last bit is one."""
    bits = np.asarray(s, order="C").view(np.int64)
    to_next = ((e > 0) | (e < 0)) & (bits & 1 == 0)
    away_from_zero = np.where((e > 0) == (s > 0), 1, -1)
    return (bits + to_next * away_from_zero).view(np.float64)


def sum_to_odd(a: Array, b: Array) -> Array:
    """a + b in float64, rounded to odd."""
    return _round_to_odd(*_two_sum(a, b))


def round_to(x: Array, dtype: Any) -> Array:
    """x in `dtype` by one rounding to nearest, ties to even.

    Overflow: as ml_dtypes and XLA have it (float8_e4m3fn: NaN, the others: infinity). To integers: ties to
    even, saturated at the type's ends, NaN to 0. Wide types go down through round-to-odd steps, since a
    plain cast by way of float32 would round twice.
    """
    dtype = np.dtype(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        if dtype.kind in "iu":
            return _saturate(x, dtype)
        if x.dtype.kind in "iu":
            return round_to(x.astype(np.float64), dtype)  # int32 fits
        if x.dtype == np.longdouble and dtype != np.longdouble and x.dtype != FLOAT64 and dtype != FLOAT64:
            return round_to(_narrow_to_odd(x, np.float64, np.int64), dtype)
        if x.dtype == FLOAT64 and dtype not in (FLOAT64, FLOAT32, np.dtype(np.longdouble)):
            return _narrow_to_odd(x, np.float32, np.int32).astype(dtype)
        return x.astype(dtype)


def _saturate(x: Array, dtype: np.dtype) -> Array:
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if x.dtype.kind in "iu":
        return np.clip(x, least, most).astype(dtype)
    return np.clip(np.nan_to_num(np.rint(x.astype(np.longdouble)), nan=0.0), least, most).astype(np.int64).astype(dtype)


def _narrow_to_odd(x: Array, narrow: Any, bits: Any) -> Array:
    """x in a narrower type, rounded to odd. An overflow becomes the largest number, whose last bit is one."""
    y = x.astype(narrow)
    largest = np.finfo(narrow).max
    y = np.where(np.isinf(y) & np.isfinite(x), np.copysign(largest, y), y)
    raw = np.asarray(y, order="C").view(bits)
    to_next = (y != x) & ~np.isnan(x) & (raw & 1 == 0)
    away_from_zero = np.where(np.abs(x) > np.abs(y), 1, -1)
    odd = (raw + (to_next * away_from_zero).astype(bits)).view(narrow)
    # A number that underflows to zero has no sign to step along in its bits alone.
    return np.where((y == 0) & (x != 0), np.copysign(np.finfo(narrow).smallest_subnormal, x), odd).astype(narrow)
