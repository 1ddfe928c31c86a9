"""Formats and the comparison, blind nowhere; the bounds of sums: test_accumulation."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxdnn._src.core import tolerance
from jaxdnn._src.core.tolerance import FORMATS, compare

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
each_narrow_dtype = pytest.mark.parametrize("dtype", DTYPES[2:], ids=lambda d: np.dtype(d).name)


# ---- formats ---------------------------------------------------------------------------------------------------------


@each_dtype
def test_format_agrees_with_the_dtype(dtype: Any):
    form, one = tolerance.format_of(dtype), np.ones((), dtype)
    assert isinstance(form, tolerance.Format)
    info = ml_dtypes.finfo(dtype)
    assert form.ulp(np.array([1.0]))[0] == float(np.nextafter(one, dtype(2))) - 1 == 2 * form.roundoff
    assert form.smallest_subnormal == float(info.smallest_subnormal)
    assert form.smallest_normal == float(info.smallest_normal)
    assert form.largest == float(info.max)


@each_narrow_dtype
def test_rounding_equals_the_cast(dtype: Any):
    """Every number of the format, the ties between neighbours, their float32 neighbours, and random numbers."""
    form = tolerance.format_of(dtype)
    size = np.dtype(dtype).itemsize
    with np.errstate(invalid="ignore"):  # some of the bit patterns are signalling NaNs
        every = np.arange(2 ** (8 * size), dtype=f"u{size}").view(dtype).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    ties = (every[1:] + every[:-1]) / 2
    beside = [np.nextafter(ties.astype(np.float32), np.float32(s)).astype(np.float64) for s in (-np.inf, np.inf)]
    random = np.random.default_rng(0).standard_normal(10000) * 2.0 ** np.random.default_rng(1).integers(-30, 18, 10000)
    values = np.concatenate([every, ties, *beside, random.astype(np.float32)])
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(np.float32).astype(dtype).astype(np.float64)
    rounded = form.round(values)
    if form.overflows_to == "nan":
        rounded = np.where(np.isinf(rounded), np.nan, rounded)
    np.testing.assert_array_equal(rounded, cast)


@each_narrow_dtype
def test_what_rounds_to_a_number(dtype: Any):
    """The ends of each interval round to the number or to its even neighbour, what lies beyond them does not."""
    form = tolerance.format_of(dtype)
    size = np.dtype(dtype).itemsize
    with np.errstate(invalid="ignore"):
        every = np.arange(2 ** (8 * size), dtype=f"u{size}").view(dtype).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    for values in (every, np.array([-np.inf, np.inf])):
        low, high = form.rounds_to(values)
        inside = np.nextafter(low, np.inf), np.nextafter(high, -np.inf)
        outside = np.nextafter(low, -np.inf), np.nextafter(high, np.inf)
        for ends in inside:
            np.testing.assert_array_equal(form.round(ends), values)
        for ends in outside:
            assert (form.round(ends)[np.isfinite(ends)] != np.broadcast_to(values, ends.shape)[np.isfinite(ends)]).all()


def test_error_over_bound_is_the_part_of_the_bound_that_is_used():
    golden, e = np.array([1 + 2.0**-9]), np.array([2.0**-7])  # bfloat16 has 1 and 1 + 2^-7, and a tie at 1 + 2^-8
    assert compare(np.array([1.0]).astype(ml_dtypes.bfloat16), golden, e).ratio == 0
    assert compare(np.array([1 + 2.0**-7]).astype(ml_dtypes.bfloat16), golden, e).ratio == pytest.approx(0.25)
    assert compare(np.array([1 + 2.0**-6]).astype(ml_dtypes.bfloat16), golden, e).ratio == pytest.approx(1.25)


def test_rounding_to_integers_saturates_and_ties_to_even():
    values = [0.5, 1.5, -2.5, 126.5, 127.5, 1e9, -128.5, -1e9]
    np.testing.assert_array_equal(tolerance.format_of("int8").round(values), [0, 2, -2, 126, 127, 127, -128, -128])


def test_unknown_format():
    with pytest.raises(ValueError, match=r"`dtype` must be one of float64, .* got 'uint8'"):
        tolerance.format_of("uint8")


# ---- the comparison --------------------------------------------------------------------------------------------------


@each_narrow_dtype
def test_comparison_bites_by_one_unit_in_the_last_place(dtype: Any):
    golden = np.random.default_rng(8).uniform(1, 100, 500)
    e, form = golden * 2.0**-20, tolerance.format_of(dtype)
    assert isinstance(form, tolerance.Format)
    out = form.round(golden)
    good = compare(out.astype(dtype), golden, e)
    assert good.passed
    assert good.ratio == 0
    out[123] += form.ulp(out[123:124])[0] * (1 if golden[123] < out[123] else -1)
    bad = compare(out.astype(dtype), golden, e)
    assert not bad.passed
    assert bad.unreachable == 1
    assert bad.ratio > 1
    assert bad.where == (123,)
    assert "worst at (123,): got" in bad.message


def test_comparison_sees_a_bias_below_the_last_place():
    golden = np.random.default_rng(9).uniform(1, 100, 4000)
    biased = golden * (1 + 2.0**-13)
    e = np.abs(biased - golden) * 1.01  # every element by itself is as it may be
    assert compare(biased[:100].astype(ml_dtypes.bfloat16), golden[:100], e[:100]).passed
    e[::2] = golden[::2] * 2.0**-20
    biased[::2] = golden[::2]
    assert compare(biased.astype(ml_dtypes.bfloat16), golden, e).passed
    # Truncating moves half of the elements, though none by more than a bound of one unit in the last place.
    wide = golden * 2.0**-7
    truncated = (golden.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    assert compare(truncated.astype(ml_dtypes.bfloat16), golden, wide).passed
    wide[200:] = golden[200:] * 2.0**-11
    few = np.where(np.arange(4000) < 200, truncated, golden).astype(ml_dtypes.bfloat16)
    assert compare(few, golden, wide).passed


def test_the_rate_allows_what_is_likely():
    """Errors uniform within E: the rate check must not fire, over many seeds and few or many elements."""
    for seed in range(300):
        rng = np.random.default_rng(seed)
        golden = rng.uniform(1, 100, rng.choice([1, 10, 100, 3000]))
        e = golden * 2.0 ** rng.integers(-20, -7)
        out = golden + e * rng.uniform(-1, 1, golden.size)
        assert compare(out.astype(ml_dtypes.bfloat16), golden, e).passed


@pytest.mark.parametrize(
    ("dtype", "beyond"),
    [
        (np.float32, np.inf),
        (np.float16, np.inf),
        (ml_dtypes.bfloat16, np.inf),
        (ml_dtypes.float8_e5m2, np.inf),
        (ml_dtypes.float8_e4m3fn, np.nan),
        (np.int8, 127),
    ],
    ids=str,
)
def test_special_values(dtype: Any, beyond: float):
    nan = 0.0 if dtype == np.int8 else np.nan
    golden, zero = np.array([1.0, np.nan, np.inf, 1e39]), np.zeros(4)
    right = np.array([1.0, nan, beyond, beyond]).astype(dtype)
    assert compare(right, golden, zero).passed
    for i in (1, 2, 3):
        wrong = right.copy()
        wrong[i] = 2
        assert not compare(wrong, golden, zero).passed
    assert not compare(np.where(np.arange(4) == 0, right[1], right).astype(dtype), golden, zero).passed


def test_overflow_is_free_only_within_the_error():
    largest = FORMATS["float16"].largest
    golden = np.array([largest + 15.9])  # half a unit in the last place is 16
    for out, e, passed in ((np.inf, 1.0, True), (largest, 1.0, True), (np.inf, 0.01, False), (-np.inf, 1.0, False)):
        assert compare(np.array([out]).astype(np.float16), golden, np.array([e])).passed == passed


def test_float64_at_both_ends_of_its_range():
    values = np.array([0.0, 5e-324, -1.7976931348623157e308, 1.0])
    for e in (np.zeros(4), np.abs(values) * 2.0**-50):
        assert compare(values, values, e).ratio == 0


def test_shapes_and_empty_arrays():
    assert not compare(np.zeros((2, 3), np.float32), np.zeros((3, 2)), np.ones((3, 2))).passed
    assert compare(np.zeros((0, 3), np.float32), np.zeros((0, 3)), np.zeros((0, 3))).passed


@each_narrow_dtype
def test_signalling_nans_are_compared_without_a_warning(dtype: Any):
    """A result may hold them: a copy keeps the payload of its operand. Warnings are errors in these tests."""
    kind = np.dtype(f"u{np.dtype(dtype).itemsize}")
    every = np.arange(2 ** (8 * kind.itemsize), dtype=kind).view(dtype)
    with np.errstate(invalid="ignore"):
        nans = every[np.isnan(every)]
    golden = np.full(nans.shape, np.nan)
    assert compare(nans, golden, np.zeros(nans.shape)).passed
    found = compare(nans, np.ones(nans.shape), np.zeros(nans.shape))
    assert found.unreachable == found.outside == nans.size


def test_a_tie_may_round_either_way():
    """x / 6 of few bits is halfway between two of bfloat16 far more often than the rate of correct rounding allows."""
    golden = np.full(1000, 1 + 2.0**-8)
    error = np.full(1000, 1e-7)
    for end in (1.0, 1 + 2.0**-7):
        assert compare(np.full(1000, end, ml_dtypes.bfloat16), golden * (1 + 2.0**-52), error).passed
    beside = golden - 2.0**-26  # an error that is one, on the way to the tie's other end
    assert not compare(np.full(1000, 1 + 2.0**-7, ml_dtypes.bfloat16), beside, error).passed
