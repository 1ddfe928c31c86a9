"""The ways to add up.

Every convolution is a matrix product: an output is the sum over one reduction axis of products
a[m, i] * b[i, n]. In real numbers the order of that sum means nothing; in floating point it decides
the bits. Three arithmetics are defined here.

golden        The sum in float64 (for float64 inputs in np.longdouble where that is wider than float64,
              so that a float64 engine can be judged too). Integers: the exact sum, wrapped to int32.
ordered       One accumulator, one correctly rounded fused multiply-add a product, in a stated order:
              acc = fma(a[m, i], b[i, n], acc). The accumulator is float32 (float64 for float64 inputs).
tensor_core   The matrix unit of NVIDIA Hopper (wgmma) with a float32 accumulator, see `tensor_core`.
              Integers: the exact sum, wrapped to int32, as that unit gives it too.

Integers are the same in all three, because a wrapping sum does not depend on its order.

Sources: MMA-Sim (arXiv:2511.10909) for the matrix unit; Higham, "Accuracy and Stability of
Numerical Algorithms" (2002), chapter 3, for the bounds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxdnn_reference.rounding import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, FLOAT64, fma

Array = np.ndarray[Any, Any]

# Outputs that one inner loop treats at once, so that its temporaries stay in the cache, and how many of them
# lie along the rows, which NumPy's innermost loop runs over.
BLOCK, BLOCK_ROWS = 1 << 14, 1 << 10


@dataclass(frozen=True, eq=False)
class Schedule:
    """In which order an engine adds what.

    order: [segments, length] of reduction indices; -1 stands for a product 0 * 0 that a kernel pads with.
        None is one segment in natural order. Where it depends on the output's place, a tuple of orders.
    combine: how the segments' sums are added, in the accumulator's type and rounded to nearest:
        "sequential" is ((s0 + s1) + s2) + ...; "pairwise" adds neighbours (s0 + s1), (s2 + s3), ..., an odd
        last one passing on, until one is left.
    promote_every: the tensor core's partial sum moves into a float32 accumulator (rounded to nearest), and
        restarts from zero, after this many products of a segment and at the segment's end.
    classes: with a tuple of orders, which of them an output has: an array with an axis for each spatial axis of
        the result, that of the output at (p, q) is number classes[p mod its length, q mod its width].
    """

    order: Any = None
    combine: str = "sequential"
    promote_every: int | None = None
    classes: Any = None

    def by_class(self, place: tuple[Array, ...]) -> list[tuple[Array, "Schedule"]]:
        """For each order the indices of the outputs, at these spatial positions, that have it; and that order alone."""
        number = self.classes[tuple(p % n for p, n in zip(place, self.classes.shape, strict=True))]
        present = np.unique(number) if number.size else [0]
        return [(np.flatnonzero(number == i), replace(self, order=self.order[i], classes=None)) for i in present]

    def rows(self, terms: int) -> Array:
        return np.arange(terms)[None] if self.order is None else np.atleast_2d(self.order)


class Sum(NamedTuple):
    """A sum and a bound of its distance from the exact one: |value - exact| <= bound."""

    value: Array
    bound: Array


def dot(
    a: Array, b: Array, /, arithmetic: str = "golden", schedule: Schedule | None = None, *, accumulate: Any = None
) -> Array:
    """The matrix product a @ b, added up in the stated way.

    value[..., m, n] = sum_i a[..., m, i] * b[..., i, n]

    a: [..., M, n], b: [..., n, N], of bfloat16, float16, float32, float64, float8_e4m3fn, float8_e5m2 or int8.
    accumulate: float64 makes the ordered accumulator wider than the default; the others do not use it.
    Returns the accumulator, not rounded to any narrower type.
    """
    if arithmetic == "golden":
        return _golden(a, b)
    return dot_with_bound(a, b, arithmetic, schedule, accumulate=accumulate).value


def dot_with_bound(
    a: Array, b: Array, /, arithmetic: str = "golden", schedule: Schedule | None = None, *, accumulate: Any = None
) -> Sum:
    """`dot` and a bound of its rounding errors that follows from the partial sums that it went through."""
    schedule = schedule or Schedule()
    if a.dtype.kind in "iu":
        value = _golden(a, b)
        return Sum(value, np.zeros(value.shape))
    if arithmetic == "golden":
        n, u = a.shape[-1], _roundoff(np.dtype(_wide(a.dtype)))
        return Sum(_golden(a, b), n * u / (1 - n * u) * magnitude(a, b))
    unit: Callable[[Array, Array], Sum] = {
        "ordered": lambda a, b: fma_chain(a, b, accumulate),
        "tensor_core": lambda a, b: tensor_core(a, b, schedule.promote_every),
    }[arithmetic]
    a, b = _reduction_first(a, -1), _reduction_first(b, -2)
    partial = [_in_blocks(unit, a[row], b[row]) for row in schedule.rows(len(a) - 1)]
    return {"sequential": _add_in_sequence, "pairwise": _add_in_pairs}[schedule.combine](partial)


def magnitude(a: Array, b: Array, /) -> Array:
    """S = sum |a| |b|, which every bound that does not know the order is a multiple of."""
    with np.errstate(invalid="ignore"):  # 0 * inf is NaN here as in the sum
        return np.matmul(np.abs(wide(a)), np.abs(wide(b)))


def wide(x: Array) -> Array:
    """x in the type of golden sums."""
    return x.astype(_wide(x.dtype))


def wrapped(total: Array, dtype: np.dtype) -> Array:
    """A golden sum of numbers of this type: of integers wrapped to int32."""
    return total.astype(np.int64).astype(np.int32) if dtype.kind in "iu" else total


def _wide(dtype: np.dtype) -> Any:
    # float64 holds the sum of 2^39 products of int8 exactly.
    return np.longdouble if dtype == FLOAT64 else np.float64


def _golden(a: Array, b: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        return wrapped(np.matmul(wide(a), wide(b)), a.dtype)


def _reduction_first(x: Array, axis: int) -> Array:
    """[n + 1, ...]: the reduction axis in front, and a zero at its end, which index -1 reads."""
    x = np.moveaxis(x, axis, 0)
    with_zero = np.zeros((len(x) + 1, *x.shape[1:]), x.dtype)
    with_zero[:-1] = x
    return with_zero


def _in_blocks(unit: Callable[[Array, Array], Sum], a: Array, b: Array) -> Sum:
    """unit: a [n, ..., M], b [n, ..., N] -> [..., N, M], in blocks that stay in the cache. Returns [..., M, N]."""
    rows = min(BLOCK_ROWS, max(1, a.shape[-1]))
    columns = max(1, BLOCK // (rows * max(1, math.prod(a.shape[1:-1]))))

    def blocks(x: Array, width: int) -> list[Array]:
        return [np.ascontiguousarray(x[..., i : i + width]) for i in range(0, max(1, x.shape[-1]), width)]

    across = [[unit(part_a, part_b) for part_b in blocks(b, columns)] for part_a in blocks(a, rows)]
    joined = [[np.concatenate(part, axis=-2) for part in zip(*line, strict=True)] for line in across]
    return Sum(*(np.concatenate(part, axis=-1).swapaxes(-1, -2) for part in zip(*joined, strict=True)))


def _add(s: Sum, t: Sum) -> Sum:
    with np.errstate(invalid="ignore", over="ignore"):
        value = s.value + t.value
        return Sum(value, s.bound + t.bound + _roundoff(value.dtype) * np.abs(value).astype(np.float64))


def _add_in_sequence(partial: list[Sum]) -> Sum:
    total = partial[0]
    for term in partial[1:]:
        total = _add(total, term)
    return total


def _add_in_pairs(partial: list[Sum]) -> Sum:
    while len(partial) > 1:
        pairs = [_add(s, t) for s, t in zip(partial[0::2], partial[1::2], strict=False)]
        partial = pairs + partial[2 * len(pairs) :]
    return partial[0]


def _roundoff(dtype: np.dtype) -> float:
    return float(np.finfo(dtype).eps) / 2


# ordered: a chain of fused multiply-adds ------------------------------------------------------------------


def fma_chain(a: Array, b: Array, accumulate: Any = None) -> Sum:
    """acc = fma(a[i, ..., m], b[i, ..., n], acc) for i = 0, 1, ..., from acc = 0.

    The bound is the running one: a sum rounded to nearest is off by at most u |acc|, so
    |error| <= u sum_t |acc_t|, and half the smallest subnormal number a step.
    """
    dtype = np.dtype(accumulate) if accumulate is not None else (FLOAT64 if FLOAT64 in (a.dtype, b.dtype) else FLOAT32)
    step = _multiply_then_add if dtype == FLOAT32 and _products_are_exact(a, b) else fma
    a, b = a.astype(dtype), b.astype(dtype)
    acc = np.zeros((*b.shape[1:], a.shape[-1]), dtype)
    running = np.zeros(acc.shape)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for ai, bi in zip(a, b, strict=True):
            acc = step(ai[..., None, :], bi[..., :, None], acc)
            running += np.abs(acc)
    half_subnormal = float(np.finfo(dtype).smallest_subnormal) / 2
    return Sum(acc, _roundoff(dtype) * running + len(a) * half_subnormal)


def _multiply_then_add(a: Array, b: Array, c: Array) -> Array:
    return a * b + c


def _products_are_exact(a: Array, b: Array) -> bool:
    """Whether float32 holds every product, so that rounding it changes nothing.

    float16 and float8: always. bfloat16: the significand's bits fit, so only the exponent's range matters.
    """
    dtypes = {a.dtype, b.dtype}
    if dtypes <= {FLOAT16, FLOAT8_E4M3, FLOAT8_E5M2}:
        return True
    if not dtypes <= {BFLOAT16, FLOAT16, FLOAT8_E4M3, FLOAT8_E5M2}:
        return False
    x, y = (np.abs(v.astype(np.float64)) for v in (a, b))
    least = np.min(x, where=x > 0, initial=np.inf) * np.min(y, where=y > 0, initial=np.inf)
    most = np.max(x, where=np.isfinite(x), initial=0) * np.max(y, where=np.isfinite(y), initial=0)
    return bool(least >= 2.0**-134 and most < 2.0**127)


# tensor_core: Hopper's matrix unit ------------------------------------------------------------------------


class Unit(NamedTuple):
    """step: products added at once; fraction: bits kept of an addend; result: fraction bits of a sum."""

    step: int
    fraction: int
    result: int


UNITS = {
    BFLOAT16: Unit(16, 25, 23),
    FLOAT16: Unit(16, 25, 23),
    FLOAT32: Unit(8, 25, 23),
    FLOAT8_E4M3: Unit(32, 13, 13),
    FLOAT8_E5M2: Unit(32, 13, 13),
}
# Below every exponent of a product: what a product that is zero, and an accumulator that is, do not exceed.
NO_EXPONENT = np.int16(-300)
LEAST_EXPONENT = {BFLOAT16: -126, FLOAT16: -14, FLOAT32: -126, FLOAT8_E4M3: -6, FLOAT8_E5M2: -14}


def truncate_to_tf32(x: Array) -> Array:
    """float32 with its fraction cut to 10 bits, as the matrix unit reads it. NaN stays NaN."""
    cut = (np.asarray(x, np.float32, order="C").view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isnan(x), x, cut)


def tensor_core(a: Array, b: Array, promote_every: int | None = None, *, start: Array | None = None) -> Sum:
    """The sum over i of a[i, ..., m] * b[i, ..., n] as Hopper's wgmma forms it in a float32 accumulator.

    [..., n, m]; `start` is what the accumulator has before, of that shape (0 by default).

    The products come in steps (16 for bfloat16 and float16, 8 for float32 read as TF32, 32 for float8); a
    last step that is not full is filled with 0 * 0. A step adds its products to the accumulator c:

        e = the largest exponent among c and the products (a product's is the sum of its factors', which is
            not normalised; subnormal numbers have their type's least exponent; products and accumulators that
            are zero take no part)
        t = trunc(c / 2^(e-F)) + sum_i trunc(a_i b_i / 2^(e-F))       an exact sum of integers
        c = t * 2^(e-F) truncated to 23 fraction bits (float8: 13), subnormal below 2^-126

    F is 25 fraction bits (float8: 13). trunc rounds towards zero, so errors are biased.

    Measured equal to the hardware (H200), bit for bit, on normal, log-normal, cancelling and subnormal data. That
    zeros take no part was found there; in the published model a factor and an accumulator of zero have -126.
    Assumed: a step that holds an infinity or a NaN gives what IEEE addition gives (NaN from NaN, inf - inf and
    0 * inf), and these stay; a sum of 2^128 or more becomes infinite; a sum of zero is +0.

    The bound is the running one: a step of k products is off by at most (k + 1) 2^(e-F), the k + 1
    truncations, and one unit in the last place of the new c.
    """
    unit = UNITS[a.dtype]
    shape = (*b.shape[1:], a.shape[-1])
    promoted = np.zeros(shape, np.float32)
    partial = np.zeros(shape) if start is None else start.astype(np.float64)
    bound = np.zeros(shape)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for first in range(0, len(a), unit.step):
            part = slice(first, min(first + unit.step, len(a)))
            partial, error = _tensor_core_step(partial, a[part], b[part], unit)
            bound += error
            if promote_every and (part.stop % promote_every == 0 or part.stop == len(a)):
                promoted = promoted + partial.astype(np.float32)
                bound += 2.0**-24 * np.abs(promoted)
                partial = np.zeros(shape)
    return Sum(promoted if promote_every else partial.astype(np.float32), bound)


def _read(x: Array) -> tuple[Array, Array]:
    """Operands as the unit reads them: their values in float64 (float32 cut to TF32), and their exponents."""
    least = LEAST_EXPONENT[x.dtype]
    x = (truncate_to_tf32(x) if x.dtype == FLOAT32 else x).astype(np.float64)
    return x, _exponent(x, least)


def _exponent(x: Array, least: int) -> Array:
    _, exponent = np.frexp(x)  # x = fraction * 2^exponent with 1/2 <= |fraction| < 1
    exponent = np.maximum(exponent.astype(np.int16), np.int16(least + 1)) - np.int16(1)
    return np.where(x == 0, np.int16(2 * NO_EXPONENT), exponent)


def _tensor_core_step(c: Array, a: Array, b: Array, unit: Unit) -> tuple[Array, Array]:
    (a, exponent_a), (b, exponent_b) = _read(a), _read(b)
    special = _ieee_sum(c, a, b)
    if special is not None:
        a, b, c = (np.where(np.isfinite(x), x, 0.0) for x in (a, b, c))
    largest = np.maximum(_exponent(c, -126), NO_EXPONENT)
    exponent = np.empty_like(largest)
    for ea, eb in zip(exponent_a, exponent_b, strict=True):
        np.add(ea[..., None, :], eb[..., :, None], out=exponent)
        np.maximum(largest, exponent, out=largest)
    scale = np.ldexp(1.0, unit.fraction - largest)
    total = np.trunc(c * scale) + 0.0  # + 0.0 because a truncated -0.0 is the integer zero
    addend = np.empty_like(total)
    for ai, bi in zip(a, b, strict=True):
        np.multiply(ai[..., None, :], bi[..., :, None], out=addend)
        addend *= scale
        np.trunc(addend, out=addend)
        total += addend
    result, last_place = _truncate(total / scale, unit.result)
    bound = (len(a) + 1) / scale + last_place
    return (result if special is None else np.where(np.isfinite(special), result, special)), bound


def _ieee_sum(c: Array, a: Array, b: Array) -> Array | None:
    """c + sum a b in float64 if an infinity or a NaN takes part; finite inputs cannot overflow float64."""
    if all(np.isfinite(x).all() for x in (c, a, b)):
        return None
    for ai, bi in zip(a, b, strict=True):
        c = c + ai[..., None, :] * bi[..., :, None]
    return c


def _truncate(x: Array, fraction: int) -> tuple[Array, Array]:
    """x cut to `fraction` bits after the leading one (float32's exponents), and its unit in the last place."""
    last_place = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, -126) - fraction)
    result = np.trunc(x / last_place) * last_place
    return np.where(np.abs(result) < 2.0**128, result, np.copysign(np.inf, result)), last_place
