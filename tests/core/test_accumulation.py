"""The bounds of sums: they hold for every order that they claim to cover, also on tensor cores, tight if possible."""

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy import fft

from jaxdnn._src.core import tolerance
from jaxdnn._src.core.tolerance import ACCUMULATIONS, Accumulation, compare

F32 = ACCUMULATIONS["float32"]


# ---- accumulation ----------------------------------------------------------------------------------------------------


def sequential(products: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    total = np.zeros(products.shape[1:], dtype)
    for p in products:
        total = (total + p).astype(dtype)
    return total


def pairwise(products: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    while len(products) > 1:
        odd = products[len(products) // 2 * 2 :]
        products = np.concatenate([(products[0:-1:2] + products[1::2]).astype(dtype), odd])
    return products[0]


def sorted_by_size(products: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """The worst chain for one-signed data: the largest first, so that every later addition rounds a large sum."""
    order = np.argsort(-np.abs(products), axis=0)
    return sequential(np.take_along_axis(products, order, 0), dtype)


def positives_first(products: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """The worst chain for cancelling data: the partial sums climb to P before they fall to G."""
    return sequential(np.sort(products, axis=0)[::-1], dtype)


ORDERS = [sequential, pairwise, sorted_by_size, positives_first]


def sums(seed: int, n: int, kind: str, dtype: Any, many: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Factors a and b, (n, many) each, of the stored dtype."""
    rng = np.random.default_rng([seed, n])
    a, b = rng.standard_normal((2, n, many))
    if kind == "positive":
        a, b = np.abs(a), np.abs(b)
    elif kind == "equal":
        a, b = np.full_like(a, 0.1), np.full_like(b, 1.3)
    elif kind == "lognormal":
        a, b = a * np.exp(2 * rng.standard_normal(a.shape)), b
    elif kind == "cancelling":
        a = np.concatenate([a[: n // 2], -a[: n // 2], a[2 * (n // 2) :]])
        b = np.concatenate([b[: n // 2], b[: n // 2], b[2 * (n // 2) :]])
    return a.astype(dtype), b.astype(dtype)


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Σ a b of each column, in exact rationals, rounded once."""
    result = np.empty(a.shape[1])
    for j in range(a.shape[1]):
        result[j] = float(sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[:, j], b[:, j], strict=True)))
    return result


def bound(accumulation: Accumulation, a: np.ndarray, b: np.ndarray, golden: np.ndarray) -> np.ndarray:
    wide = [v.astype(np.float64) for v in (a, b)]
    magnitude, count = np.abs(wide[0] * wide[1]).sum(0), (wide[0] * wide[1] != 0).sum(0)
    is_exact = tolerance.products_are_exact(a.dtype, b.dtype, format=accumulation.format)
    return accumulation.error(golden, magnitude, count, exact_products=is_exact)


@pytest.mark.parametrize("kind", ["normal", "positive", "equal", "lognormal", "cancelling"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda d: np.dtype(d).name)
def test_bound_holds_for_every_order(kind: str, dtype: Any):
    for n in (1, 2, 3, 17, 100, 333):
        a, b = sums(0, n, kind, dtype)
        golden, products = exact(a, b), a.astype(np.float32) * b.astype(np.float32)
        e = bound(F32, a, b, golden)
        for order in ORDERS:
            error = np.abs(order(products).astype(np.float64) - golden)
            assert (error <= e).all(), (n, order.__name__)


def test_bound_is_nearly_attained():
    """One and then many numbers of just over half a unit in the last place: each addition errs by nearly u |C|."""
    for n in (2, 10, 1000):
        products = np.full((n, 1), np.float32(2.0**-24) * np.float32(1 - 2.0**-20))
        products[0] = 1
        golden = exact(products, np.ones_like(products))
        e = bound(F32, products, np.ones_like(products, dtype=ml_dtypes.bfloat16), golden)
        assert 0.3 < abs(float(sequential(products)[0]) - golden[0]) / e[0] <= 1


def test_one_exact_product_has_no_error():
    a, b = sums(1, 1, "normal", ml_dtypes.bfloat16)
    products = a.astype(np.float32) * b.astype(np.float32)
    for name in ("float32", "tensor_core"):
        assert (bound(ACCUMULATIONS[name], a, b, exact(a, b)) <= 2.0**-149).all()
    assert compare(products[0], exact(a, b), bound(F32, a, b, exact(a, b))).ratio == 0


def test_zeros_do_not_widen_the_bound():
    a, b = sums(2, 40, "normal", np.float32)
    with_zeros = np.concatenate([a, np.zeros_like(a)]), np.concatenate([b, b])
    np.testing.assert_array_equal(bound(F32, a, b, exact(a, b)), bound(F32, *with_zeros, exact(a, b)))


def test_float64_bound_is_as_much_smaller_as_its_roundoff():
    a, b = sums(3, 50, "normal", np.float32)
    narrow, wide = (bound(ACCUMULATIONS[f], a, b, exact(a, b)) for f in ("float32", "float64"))
    np.testing.assert_allclose(wide / narrow, 2.0**-29, rtol=0.2)


def test_integers_have_no_error():
    assert not ACCUMULATIONS["int32"].error(*np.ones((3, 5)) * 100).any()


def test_a_sum_that_may_overflow_is_not_judged():
    e = F32.error(np.array([0.0, 1e30]), np.array([8e38, 1e30]), np.array([2, 1]))
    assert np.isinf(e[0])
    assert np.isfinite(e[1])
    for anything in (np.nan, np.inf, 3.0):
        assert compare(np.array([anything, 1e30], np.float32), np.array([0.0, 1e30]), e).passed


def test_flush_admits_zero_for_a_tiny_sum():
    tiny = np.full(3, 1e-39)
    strict = F32.error(tiny, tiny, np.ones(3))
    flushed = Accumulation(flush=True).error(tiny, tiny, np.ones(3))
    assert not compare(np.zeros(3, np.float32), tiny, strict).passed
    assert compare(np.zeros(3, np.float32), tiny, flushed).passed


def test_truncated_inputs():
    a, b = sums(4, 30, "normal", np.float32)
    cut = [(v.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for v in (a, b)]
    distance = np.abs(exact(*cut) - exact(a, b))
    allowed = tolerance.truncated_inputs_error(np.abs(a.astype(np.float64) * b).sum(0))
    assert (distance <= allowed).all()
    assert (distance > 0.02 * allowed).any()


# ---- tensor cores: an own scalar model, in exact rationals, of what the docstring of Accumulation says ---------------


def truncate(value: Fraction, exponent: int, bits: int) -> Fraction:
    unit = Fraction(2) ** (exponent - bits)
    return int(value / unit) * unit


def exponent_of(value: Fraction) -> int:
    return math.frexp(float(value))[1] - 1


def tensor_core(a: np.ndarray, b: np.ndarray, form: Accumulation) -> tuple[float, list[float], list[float]]:
    """The sum, the partial sums, and the largest product of each step."""
    c, partials, largest = Fraction(0), list[float](), list[float]()
    for start in range(0, len(a), form.step):
        part = slice(start, start + form.step)
        products = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[part], b[part], strict=True)]
        addends = [v for v in (c, *products) if v]
        top = max((exponent_of(v) for v in addends), default=0)
        c = sum((truncate(v, top, form.fraction_bits) for v in addends), Fraction(0))
        c = truncate(c, exponent_of(c), form.sum_bits - 1) if c else c
        partials.append(float(c))
        largest.append(float(max(map(abs, products))))
    return float(c), partials, largest


def steps_of(model: list[tuple[float, list[float], list[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """The partial sums and the largest products of several runs: steps along axis 0."""
    return np.array([partials for _, partials, _ in model]).T, np.array([largest for _, _, largest in model]).T


TENSOR_CORES = [("tensor_core", ml_dtypes.bfloat16), ("tensor_core", np.float16), ("tensor_core_tf32", np.float16)]
TENSOR_CORES += [("tensor_core_fp8", ml_dtypes.float8_e4m3fn), ("tensor_core_fp8", ml_dtypes.float8_e5m2)]


@pytest.mark.parametrize("kind", ["normal", "positive", "lognormal", "cancelling"])
@pytest.mark.parametrize(("name", "dtype"), TENSOR_CORES)
def test_tensor_core_bounds_hold(name: str, dtype: Any, kind: str):
    form = ACCUMULATIONS[name]
    for n in (1, 5, 16, 130):
        a, b = sums(5, n, kind, np.float32, many=12)
        a, b = np.clip(a, -30, 30).astype(dtype), b.astype(dtype)
        order = np.random.default_rng(n).permutation(n)
        for i in (np.arange(n), order):
            golden = exact(a, b)
            model = [tensor_core(a[i, j], b[i, j], form) for j in range(12)]
            error = np.abs(np.array([m[0] for m in model]) - golden)
            e = bound(form, a, b, golden)
            assert (error <= e).all()
            assert (error <= form.running_error(*steps_of(model))).all()


@pytest.mark.parametrize(("name", "dtype"), TENSOR_CORES)
def test_tensor_core_bounds_are_near_what_happens(name: str, dtype: Any):
    """Long sums of one sign, which truncation makes too small at every step."""
    form, n = ACCUMULATIONS[name], 512
    a, b = (np.abs(v).astype(dtype) for v in sums(5, n, "positive", np.float32, many=4))
    golden = exact(a, b)
    model = [tensor_core(a[:, j], b[:, j], form) for j in range(4)]
    error = np.abs(np.array([m[0] for m in model]) - golden)
    assert (error / form.running_error(*steps_of(model)) > 0.05).any()
    magnitude, steps = golden, np.full(4, n // form.step)
    known = form.error(golden, magnitude, np.full(4, n), exact_products=True, steps=steps)
    unknown = form.error(golden, magnitude, np.full(4, n), exact_products=True)
    assert (error <= known).all()
    assert (error / known > 0.02).any()
    assert (known < unknown).all()


def test_float_running_error_holds_and_is_sharper():
    a, b = sums(6, 200, "normal", ml_dtypes.bfloat16)
    products = a.astype(np.float32) * b.astype(np.float32)
    partials = np.cumsum(products, axis=0, dtype=np.float32)
    golden = exact(a, b)
    error, tight = np.abs(partials[-1] - golden), F32.running_error(partials, np.abs(products))
    assert (error <= tight).all()
    assert (tight < 0.5 * bound(F32, a, b, golden)).all()


def test_integer_amplitude_is_the_last_exact_one():
    assert tolerance.integer_amplitude(4096, F32, np.float32, np.float32) == 64
    assert tolerance.integer_amplitude(4096, F32, ml_dtypes.float8_e5m2, np.float32) == 8
    assert tolerance.integer_amplitude(4096, ACCUMULATIONS["tensor_core_fp8"], np.float16, np.float16) == 2
    assert tolerance.integer_amplitude(2**20, ACCUMULATIONS["tensor_core_fp8"], np.float16, np.float16) == 0
    assert tolerance.integer_amplitude(9, ACCUMULATIONS["int32"], np.int8, np.int8) == 127
    a = np.full((4096, 1), 64, np.float32)
    assert sequential(a * a)[0] == 4096 * 64 * 64
    assert sequential(np.concatenate([a * a, np.ones_like(a)]))[0] != 4096 * 64 * 64 + 4096


def test_hopper_fp8_loses_integers_beyond_its_limit():
    form = ACCUMULATIONS["tensor_core_fp8"]
    for a, n in ((2, 4096), (4, 4096)):
        rng = np.random.default_rng(a)
        x, y = rng.integers(1, a, (2, n), endpoint=True)
        assert (tensor_core(x, y, form)[0] == int(x @ y)) == (n * a * a <= form.largest_integer)


def by_transform(x: np.ndarray, f: np.ndarray) -> np.ndarray:
    """Full convolutions over the last two axes, added over the first, in the precision of the arrays."""
    shape = [n + r - 1 for n, r in zip(x.shape[1:], f.shape[1:], strict=True)]
    spectra = [np.asarray(fft.rfft2(v, s=shape)) for v in (x, f)]
    return np.asarray(fft.irfft2(np.sum(spectra[0] * spectra[1], 0), s=shape))


@pytest.mark.parametrize("sizes", [((8, 8), (3, 3)), ((30, 17), (5, 2)), ((64, 64), (9, 9))])
def test_transform_bound_holds(sizes: tuple[tuple[int, int], tuple[int, int]]):
    """A convolution by Fourier transforms in float32; what holds for a sum in any order does not hold for it."""
    (h, w), (r, s) = sizes
    rng = np.random.default_rng(10)
    for scale in (1.0, 1000.0):
        x: np.ndarray = rng.standard_normal((4, h, w)).astype(np.float32)
        x[:, : h // 2] *= np.float32(scale)  # small sums beside large ones
        f = rng.standard_normal((4, r, s)).astype(np.float32)
        got, golden = by_transform(x, f), by_transform(x.astype(np.float64), f.astype(np.float64))
        assert got.dtype == np.float32
        norms = np.sum(np.sqrt((x.astype(np.float64) ** 2).sum((1, 2)) * (f.astype(np.float64) ** 2).sum((1, 2))))
        e = ACCUMULATIONS["transform"].transform_error(np.full(golden.shape, norms), 4)
        error = np.abs(got - golden)
        assert (error <= e).all()
        assert (error > 1e-4 * e).any()


def test_where_cut_digits_may_be_more_than_the_sum_there_is_no_bound():
    """Found by random calls: 1 - r had become negative, and the bound with it."""
    rule = ACCUMULATIONS["tensor_core_fp8"]
    error = rule.error(np.zeros(3), np.ones(3), np.array([64, 1000, 6000]), exact_products=True)
    assert 0 < error[0] < error[1]
    assert error[2] == np.inf
