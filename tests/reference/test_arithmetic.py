"""The ways to add up against exact rationals: fused multiply-add, roundings, orders, and the matrix unit's model."""

import ast
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jaxdnn_reference as reference
from jaxdnn_reference.arithmetic import tensor_core, truncate_to_tf32

Array = np.ndarray[Any, Any]
LOW = [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
# type: products a step, bits kept of an addend, fraction bits of a sum, least exponent
MODEL = {
    ml_dtypes.bfloat16: (16, 25, 23, -126),
    np.float16: (16, 25, 23, -14),
    np.float32: (8, 25, 23, -126),
    ml_dtypes.float8_e4m3fn: (32, 13, 13, -6),
    ml_dtypes.float8_e5m2: (32, 13, 13, -14),
}


def two_to(e: int) -> Fraction:
    return Fraction(2) ** e


def floor_log2(x: Fraction) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if two_to(e) <= x else e - 1


def nearest_even(x: Fraction, bits: int, least: int, most: Fraction) -> Fraction | float:
    """x rounded to `bits` of significand, subnormal below 2^least; infinite from `most` on."""
    if x == 0:
        return x
    ulp = two_to(max(floor_log2(abs(x)), least) - bits + 1)
    rounded = round(x / ulp) * ulp  # Fraction rounds half to even
    return math.copysign(math.inf, rounded) if abs(rounded) >= most else rounded


def as_float32(x: Fraction) -> float:
    return float(nearest_even(x, 24, -126, two_to(128)))


def bit_patterns(rng: np.random.Generator, count: int, dtype: Any) -> Array:
    size = np.dtype(dtype).itemsize
    bits = rng.integers(0, 256, (count, size), dtype=np.uint8).view(f"u{size}")[:, 0]
    values = bits.view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values[np.isfinite(values.astype(np.float64))]


def float32_triples(kind: str, count: int = 3000) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(len(kind))
    if kind == "bits":
        a, b, c = (bit_patterns(rng, 2 * count, np.float32)[:count] for _ in range(3))
    else:
        a, b, c = (rng.standard_normal(count).astype(np.float32) for _ in range(3))
    if kind == "cancelling":
        c = -(a * b)
    if kind == "subnormal":
        a, b, c = a * np.float32(2.0**-70), b * np.float32(2.0**-70), c * np.float32(2.0**-140)
    if kind == "halfway":  # the sum lies 2^-71 below the middle of two float32 neighbours: float64 rounds it away
        a = np.full(count, 2.0**-24 * (1 + 2.0**-23), np.float32)
        b = np.where(rng.random(count) < 0.5, 1 - 2.0**-23, 1).astype(np.float32)
        c = (1 + rng.integers(0, 2**22, count) * 2.0**-22 + 2.0**-23).astype(np.float32)
    return a, b, c


@pytest.mark.parametrize("kind", ["normal", "bits", "cancelling", "subnormal", "halfway"])
def test_fma_rounds_once(kind: str):
    a, b, c = float32_triples(kind)
    with np.errstate(over="ignore"):
        got = reference.fma(a, b, c)
    assert got.dtype == np.float32
    want = [as_float32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c)]  # noqa: B905
    np.testing.assert_array_equal(got, np.array(want, np.float32))
    if kind in ("normal", "halfway"):  # the test can tell a fused operation from two roundings, and from three
        assert np.any(got != a * b + c)
        by_float64 = (a.astype(np.float64) * b + c).astype(np.float32)
        assert np.any(got != by_float64) == (kind == "halfway")


@pytest.mark.parametrize("kind", ["normal", "cancelling", "halfway"])
def test_fma_rounds_once_in_float64(kind: str):
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(2000) for _ in range(3))
    if kind == "cancelling":
        c = -(a * b)
    if kind == "halfway":
        a, b = np.full(2000, 2.0**-53), np.where(rng.random(2000) < 0.5, 1.0, np.nextafter(1.0, 2.0))
        c = 1 + rng.integers(0, 2**52, 2000) * 2.0**-52
    want = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(reference.fma(a, b, c), want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_of_special_values(dtype: Any):
    a, b, c = (
        np.array(v, dtype) for v in ([np.inf, np.inf, 1, 0, np.nan], [1, 2, 1, np.inf, 1], [1, -np.inf, 2, 0, 0])
    )
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(reference.fma(a, b, c), np.array([np.inf, np.nan, 3, np.nan, np.nan], dtype))


@pytest.mark.parametrize("dtype", [*LOW, np.float32])
@pytest.mark.parametrize("source", [np.float64, np.longdouble, np.float32])
def test_round_to_rounds_once(dtype: Any, source: Any):
    info = ml_dtypes.finfo(dtype)
    rng = np.random.default_rng(3)
    values = bit_patterns(rng, 2000, dtype).astype(np.float64)
    step = np.abs(values) * float(info.eps) / 2 + float(info.smallest_subnormal) / 2 * (values == 0)
    near = [values, values + step, values + step * (1 + 2.0**-30), values - step * (1 - 2.0**-30), values * 1.7]
    with np.errstate(over="ignore"):
        x = np.concatenate(near).astype(source)
    x = x[np.isfinite(x)]
    got = reference.round_to(x, dtype).astype(np.float64)
    bits, most = (
        int(info.nmant) + 1,
        Fraction(float(info.max)) + Fraction(float(info.max)) * Fraction(float(info.eps)) / 4,
    )
    overflow = math.nan if dtype == ml_dtypes.float8_e4m3fn else math.inf
    for value, result in zip(x, got, strict=True):
        exact = Fraction(*value.as_integer_ratio())
        want = nearest_even(exact, bits, int(info.minexp), most)
        want = math.copysign(overflow, exact) if abs(want) > Fraction(float(info.max)) else float(want)
        assert result == want or (math.isnan(want) and math.isnan(result)), (value, result, want)


def test_round_to_agrees_with_ml_dtypes_where_a_cast_rounds_once():
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    for dtype in LOW:
        np.testing.assert_array_equal(reference.round_to(x, dtype), x.astype(dtype))
        double = x.astype(np.float64)
        np.testing.assert_array_equal(reference.round_to(double, dtype), x.astype(dtype))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e5m2, np.float32, np.int8])
def test_rounding_keeps_an_array_without_axes(dtype: Any):
    assert reference.round_to(np.array(1.3), dtype).shape == ()
    assert reference.fma(*(np.array(v, np.float32) for v in (1.3, 2.1, 0.7))).shape == ()
    assert truncate_to_tf32(np.array(1.3, np.float32)).shape == ()


def test_a_plain_cast_rounds_twice():
    x = np.array([1 + 2.0**-8 + 2.0**-40])  # just above the middle of two bfloat16 numbers
    assert float(reference.round_to(x, ml_dtypes.bfloat16)[0]) == 1 + 2.0**-7
    assert float(x.astype(np.float32).astype(ml_dtypes.bfloat16)[0]) == 1.0


@pytest.mark.parametrize(("dtype", "low", "high"), [(np.int8, -128, 127), (np.int32, -(2**31), 2**31 - 1)])
def test_round_to_integers_saturates(dtype: Any, low: int, high: int):
    x = np.array([0.5, 1.5, -0.5, -2.5, np.nan, np.inf, -np.inf, 1e20, -1e20])
    np.testing.assert_array_equal(reference.round_to(x, dtype), [0, 2, 0, -2, 0, high, low, high, low])
    np.testing.assert_array_equal(reference.round_to(np.array([2**30, -5], np.int32), np.int8), [127, -5])


# orders ---------------------------------------------------------------------------------------------------


def scalar_chain(a: Array, b: Array, order: Array) -> Fraction:
    acc = Fraction(0)
    for i in order:
        if i >= 0:
            acc = Fraction(as_float32(acc + Fraction(float(a[i])) * Fraction(float(b[i]))))
    return acc


def operands(dtype: Any, kind: str, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Signed data with zeros; lognormal spreads the exponents, subnormal sits at the type's lower end."""
    rng = np.random.default_rng(11)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    if kind == "lognormal":
        a, b = (np.sign(v) * np.exp(3 * np.abs(v)) for v in (a, b))
    if kind == "cancelling":
        a[:, 1::2], b[1::2] = -a[:, 0::2], b[0::2] * (1 + 2.0**-4 * rng.standard_normal((k // 2, n)))
    if kind == "subnormal":
        tiny = 4 * float(ml_dtypes.finfo(dtype).smallest_normal)
        a = np.where(rng.random((m, k)) < 0.7, a * tiny, a)
    if kind == "subnormal only":  # no normal number hides what exponent a subnormal one has
        a, b = a * float(ml_dtypes.finfo(dtype).smallest_normal) / 8, b * np.exp2(rng.integers(-4, 5, b.shape))
    if kind == "underflow":  # products of 2^-140
        a, b = a * 2.0**-70, b * 2.0**-70
    if kind == "balanced":  # small products of large and small factors; zeros beside the large ones
        spread = np.exp2(rng.integers(-50, 51, k)) if dtype in (np.float32, ml_dtypes.bfloat16) else np.ones(k)
        a, b = a * spread * spread[0], b / spread[:, None] / 2.0**70
    if kind == "wide":
        a, b = (v * np.exp2(rng.integers(-6, 7, v.shape)) for v in (a, b))
    a, b = a * (rng.random(a.shape) < 0.9), b * (rng.random(b.shape) < 0.9)
    most = float(ml_dtypes.finfo(dtype).max)
    return np.clip(a, -most, most).astype(dtype), np.clip(b, -most, most).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("kind", ["normal", "subnormal", "cancelling", "underflow"])
def test_ordered_is_a_chain_of_fused_multiply_adds(dtype: Any, kind: str):
    a, b = operands(dtype, kind, 3, 5, 34)
    got = reference.dot(a, b, "ordered")
    assert got.dtype == np.float32
    for m, n in np.ndindex(3, 5):
        assert Fraction(float(got[m, n])) == scalar_chain(a[m], b[:, n], np.arange(34))


@pytest.mark.parametrize("combine", ["sequential", "pairwise"])
def test_segments_are_added_as_stated(combine: str):
    a, b = operands(np.float32, "normal", 2, 3, 20)
    order = np.array([[0, 4, 8, -1], [19, 18, -1, -1], [1, 2, 3, 5], [6, 7, 9, 10], [17, 16, 11, 12]])
    got = reference.dot(a, b, "ordered", reference.Schedule(order, combine))
    for m, n in np.ndindex(2, 3):
        s = [np.float32(float(scalar_chain(a[m], b[:, n], row))) for row in order]
        tree = ((s[0] + s[1]) + (s[2] + s[3])) + s[4]
        assert got[m, n] == (tree if combine == "pairwise" else (((s[0] + s[1]) + s[2]) + s[3]) + s[4])


def test_golden_is_wider_than_what_it_judges():
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((2, 50)), rng.standard_normal((50, 3))
    got = reference.dot(a, b)
    assert got.dtype == np.longdouble
    for m, n in np.ndindex(2, 3):
        exact = sum(Fraction(a[m, i]) * Fraction(b[i, n]) for i in range(50))
        error = abs(Fraction(*np.longdouble(got[m, n]).as_integer_ratio()) - exact)
        assert error <= Fraction(float(np.finfo(np.longdouble).eps)) * 50 * sum(abs(a[m]) * abs(b[:, n]))


@pytest.mark.parametrize("arithmetic", ["golden", "ordered", "tensor_core"])
def test_integers_wrap_to_int32(arithmetic: str):
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-128, -100, s).astype(np.int8) for s in ((2, 300_000), (300_000, 2)))
    exact = a.astype(np.int64) @ b.astype(np.int64)
    assert np.all(exact > 2**31)
    got = reference.dot(a, b, arithmetic)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, (exact + 2**31) % 2**32 - 2**31)


# the matrix unit's model ----------------------------------------------------------------------------------


def scalar_tensor_core(a: Array, b: Array, dtype: Any) -> Fraction:
    """The model again, one output and one addend at a time, in rationals."""
    step, kept, result, least = MODEL[dtype]

    def read(value: Any, least: int) -> tuple[Fraction, int]:
        x = Fraction(float(value))
        return x, max(floor_log2(abs(x)), least) if x else 0

    def cut(value: Any) -> float:
        bits = np.float32(value).view(np.uint32) & np.uint32(0xFFFFE000)
        return float(bits.view(np.float32)) if dtype == np.float32 else float(value)

    c = Fraction(0)
    for start in range(0, len(a), step):
        addends = [(c, read(c, -126)[1])] if c else []  # as measured: zeros are not aligned to
        for x, y in zip(a[start : start + step], b[start : start + step], strict=True):
            (x, ex), (y, ey) = read(cut(x), least), read(cut(y), least)
            addends += [(x * y, ex + ey)] if x * y else []
        if not addends:
            continue
        quantum = two_to(max(e for _, e in addends) - kept)
        total = sum(math.trunc(value / quantum) for value, _ in addends) * quantum
        if total:
            ulp = two_to(max(floor_log2(abs(total)), -126) - result)
            total = math.trunc(total / ulp) * ulp
        c = Fraction(total)
    return c


def test_a_zero_accumulator_is_not_aligned_to():
    """Three products of 1.5 * 2^-151 are 1.125 * 2^-149; cut to 2^-151 each, as beside a number of 2^-126, 0.75."""
    a = np.full((1, 3), 1.5 * 2.0**-75).astype(ml_dtypes.bfloat16)
    b = np.full((3, 1), 2.0**-76).astype(ml_dtypes.bfloat16)
    assert reference.dot(a, b, "tensor_core")[0, 0] == np.float32(2.0**-149)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_a_zero_product_is_not_aligned_to(dtype: Any):
    """2^-40 + 0 * 2^120: beside an exponent of 120 - 126 = -6 the first would be cut off; on an H200 it is not."""
    a, b = np.array([[2.0**-40, 0, 2.0**120]], dtype), np.array([[1, 2.0**120, 0]], dtype).T
    assert reference.dot(a, b, "tensor_core")[0, 0] == np.float32(2.0**-40)


def test_a_chain_goes_on_from_what_the_accumulator_has():
    """And from something else it does not give the same."""
    a, b = operands(ml_dtypes.bfloat16, "normal", 5, 4, 70)
    a = np.ascontiguousarray(a.T)
    half = tensor_core(a[:32], b[:32]).value
    found = tensor_core(a[32:], b[32:], start=half).value
    assert found.tobytes() == tensor_core(a, b).value.tobytes()
    assert found.tobytes() != (half + tensor_core(a[32:], b[32:]).value).tobytes()


@pytest.mark.parametrize("dtype", MODEL)
@pytest.mark.parametrize(
    "kind", ["normal", "lognormal", "subnormal", "subnormal only", "cancelling", "balanced", "wide"]
)
def test_tensor_core_equals_the_scalar_model(dtype: Any, kind: str):
    a, b = operands(dtype, kind, 5, 4, 70)  # 70 is no multiple of any step
    got = reference.dot(a, b, "tensor_core")
    assert got.dtype == np.float32
    for m, n in np.ndindex(5, 4):
        assert Fraction(float(got[m, n])) == scalar_tensor_core(a[m], b[:, n], dtype), (m, n)


@pytest.mark.parametrize("dtype", MODEL)
def test_tensor_core_truncates(dtype: Any):
    """On positive data every error of the unit goes down, unlike a rounding to nearest."""
    a, b = (np.abs(v.astype(np.float32)).astype(dtype) for v in operands(dtype, "normal", 6, 7, 256))
    if dtype == np.float32:
        a, b = (truncate_to_tf32(v) for v in (a, b))
    error = reference.dot(a, b, "tensor_core") - reference.dot(a, b)
    assert np.all(error <= 0)
    assert np.any(error < 0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_addends_keep_25_bits(dtype: Any):
    """2^23 - 2^23 - 0.5 - 0.25 - 0.125 in one step: 23, 24, 25 and more bits give 0, -0.5, -0.75 and -0.875."""
    a, b = np.array([[8192, -8192, -0.5, -0.25, -0.125]], dtype), np.array([[1024, 1024, 1, 1, 1]], dtype).T
    assert float(reference.dot(a, b, "tensor_core")[0, 0]) == -0.75
    # with 2^23 in the accumulator from the step before
    step = MODEL[dtype][0]
    a, b = (np.concatenate([v.ravel()[:1], np.zeros(step - 1, dtype), v.ravel()[1:]]) for v in (a, b))
    assert float(reference.dot(a[None], b[:, None], "tensor_core")[0, 0]) == -0.75


@pytest.mark.parametrize("dtype", LOW[2:])
def test_float8_addends_keep_13_bits(dtype: Any):
    a, b = np.array([[64, -64, -0.5, -0.25, -0.125]], dtype), np.array([[32, 32, 1, 1, 1]], dtype).T
    assert float(reference.dot(a, b, "tensor_core")[0, 0]) == -0.75
    assert float(reference.dot(a, b, "ordered")[0, 0]) == -0.875


def test_float8_accumulator_stalls_unless_promoted():
    """A sum with 13 fraction bits loses the eighths of 1.125 once it is large; promoted partial sums keep them."""
    a, b = np.ones((1, 32 * 1024), ml_dtypes.float8_e4m3fn), np.ones((32 * 1024, 1), ml_dtypes.float8_e4m3fn)
    a[0, 16::32] = 1.125
    exact = 32 * 1024 + 1024 / 8
    stalled, promoted = (
        float(reference.dot(a, b, "tensor_core", reference.Schedule(promote_every=every))[0, 0])
        for every in (None, 128)
    )
    assert stalled < exact
    assert promoted == exact


@pytest.mark.parametrize("promote_every", [32, 128])
def test_promotion_adds_partial_sums_to_the_nearest(promote_every: int):
    a, b = operands(ml_dtypes.float8_e4m3fn, "wide", 3, 2, 300)
    got = reference.dot(a, b, "tensor_core", reference.Schedule(promote_every=promote_every))
    for m, n in np.ndindex(3, 2):
        total = np.float32(0)
        for start in range(0, 300, promote_every):
            part = slice(start, start + promote_every)
            total += np.float32(float(scalar_tensor_core(a[m, part], b[part, n], ml_dtypes.float8_e4m3fn)))
        assert got[m, n] == total


def test_schedule_orders_the_steps():
    a, b = operands(ml_dtypes.bfloat16, "wide", 3, 2, 60)
    order = np.concatenate([np.random.default_rng(0).permutation(60), [-1, -1, -1, -1]]).reshape(2, 32)
    got = reference.dot(a, b, "tensor_core", reference.Schedule(order))
    for m, n in np.ndindex(3, 2):
        x, y = (np.append(v, ml_dtypes.bfloat16(0)) for v in (a[m], b[:, n]))
        parts = [np.float32(float(scalar_tensor_core(x[row], y[row], ml_dtypes.bfloat16))) for row in order]
        assert got[m, n] == parts[0] + parts[1]
    assert np.any(got != reference.dot(a, b, "tensor_core"))


@pytest.mark.parametrize("arithmetic", ["golden", "ordered", "tensor_core"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_special_values_propagate(arithmetic: str, dtype: Any):
    a = np.array([[np.inf, 1], [np.nan, 1], [np.inf, -np.inf], [-np.inf, 2], [1, 1]], dtype)
    a = np.concatenate([a, np.ones((5, 40), dtype)], axis=1)
    b = np.ones((42, 2), dtype)
    b[0, 1] = 0
    with np.errstate(invalid="ignore"):
        got = reference.dot(a, b, arithmetic)
    np.testing.assert_array_equal(got[:, 0], [np.inf, np.nan, np.nan, -np.inf, 42])
    np.testing.assert_array_equal(got[:, 1], [np.nan, np.nan, np.nan, np.nan, 41])


def test_overflow_is_infinite():
    a = np.full((1, 40), 2.0**120, ml_dtypes.bfloat16)
    b = np.full((40, 1), 2.0**10, ml_dtypes.bfloat16)
    assert np.isposinf(reference.dot(a, b, "tensor_core")[0, 0])
    with np.errstate(over="ignore"):
        assert np.isneginf(reference.dot(-a, b, "ordered")[0, 0])  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("arithmetic", ["ordered", "tensor_core"])
@pytest.mark.parametrize(
    "shape", [((3, 2, 19), (3, 19, 5)), ((1, 19), (19, 40)), ((2000, 19), (19, 1)), ((4, 1, 19), (4, 19, 1))]
)
def test_each_output_depends_on_its_own_operands_only(arithmetic: str, shape: tuple[tuple[int, ...], ...]):
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in shape)
    whole = reference.dot(a, b, arithmetic)
    m, n = min(1, shape[0][-2] - 1), min(4, shape[1][-1] - 1)
    one = reference.dot(a[..., m : m + 1, :], b[..., :, n : n + 1], arithmetic)
    np.testing.assert_array_equal(whole[..., m, n], one[..., 0, 0])


def test_the_definition_imports_numpy_only():
    folder = Path(reference.__file__).parent
    allowed = {"numpy", "ml_dtypes", "jaxdnn_reference", *sys.stdlib_module_names}
    files = list(folder.glob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= allowed, file.name
