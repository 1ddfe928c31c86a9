"""The computed bounds: rigorous for every order that they claim to cover, tight where they can be, blind nowhere."""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy import fft, special

from jaxdnn import _epilogue, tolerance
from jaxdnn.tolerance import ACCUMULATIONS, FORMATS, Accumulation, Epilogue, compare

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
F32 = ACCUMULATIONS["float32"]

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


# ---- epilogues -------------------------------------------------------------------------------------------------------

EXACT_ACTIVATIONS = (None, "identity", "relu", "clipped_relu")
ACTIVATIONS = [None, *_epilogue.ACTIVATIONS, ("elu", 2.5), ("swish", 1.7), ("softplus", 3.0), ("leaky_relu", 0.3)]


def exact_activation(z: np.ndarray, activation: Any) -> np.ndarray:
    name, parameter = _epilogue.read_activation(activation) or ("identity", None)
    p: Any = 1.0 if parameter is None else parameter
    wide = np.longdouble(z)
    functions = {
        "identity": lambda: z,
        "relu": lambda: np.maximum(z, 0),
        "sigmoid": lambda: special.expit(z),
        "tanh": lambda: np.tanh(wide),
        "gelu": lambda: z * special.ndtr(z),
        "gelu_tanh": lambda: z * special.expit(2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)),
        "elu": lambda: np.where(z > 0, z, p * np.expm1(np.minimum(wide, 0))),
        "swish": lambda: z * special.expit(p * z),
        "softplus": lambda: np.logaddexp(p * wide, 0) / p,
        "leaky_relu": lambda: np.where(z > 0, z, p * z),
        "clipped_relu": lambda: np.clip(z, 0, p),
    }
    return np.asarray(functions[name](), np.float64)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_epilogue_bound_holds_on_this_platform(activation: Any):
    """Two hundred thousand arguments over all exponents, of which c is known up to an error that is planted."""
    rng = np.random.default_rng(7)
    c = np.ldexp(1 + rng.random(80000), rng.integers(-45, 8, 80000)) * rng.choice([-1, 1], 80000)
    c = np.concatenate([c, rng.uniform(-12, 12, 80000), rng.uniform(-110, 110, 40000)])
    planted = (np.abs(c) * 2.0**-22 * rng.uniform(-1, 1, c.size)).astype(np.float64)
    computed = (c + planted).astype(np.float32)
    error = np.abs(computed - c)
    prior, residual, bias = (rng.standard_normal(c.size).astype(np.float32) for _ in range(3))
    flush = 2 * FORMATS["float32"].smallest_normal
    for alpha, beta, terms in ((1.0, 0.0, ()), (1.7, 0.0, ()), (-0.3, 0.6, (residual, bias))):
        spec = _epilogue.Epilogue(
            alpha, beta, beta != 0, bool(terms), bool(terms), _epilogue.read_activation(activation)
        )
        operands = (*((prior,) if beta else ()), *terms[::-1])
        out = jax.jit(lambda *a, s=spec: apply(s, *a))(computed, *operands)
        z = alpha * c + (beta * prior.astype(np.float64) if beta else 0.0) + sum(t.astype(np.float64) for t in terms)
        e = Epilogue(alpha, beta, activation).error(c, error, *terms, prior=prior)
        assert (np.abs(np.asarray(out, np.float64) - exact_activation(z, activation)) <= e + flush).all()
        # With nothing planted, the function's own error alone must stay below the bound and come near it somewhere.
        if not terms and alpha == 1 and activation not in EXACT_ACTIVATIONS:
            own = Epilogue(activation=activation).error(computed.astype(np.float64), np.zeros_like(c))
            distance = np.abs(np.asarray(out, np.float64) - exact_activation(computed.astype(np.float64), activation))
            assert 0.02 < (distance / own).max() <= 1


def apply(spec: _epilogue.Epilogue, c: jax.Array, *operands: jax.Array) -> jax.Array:
    """The library's own epilogue, with the terms elementwise: a bias along a channel axis of length c.size."""
    return _epilogue.apply(spec, c, operands, channel=0, out_dtype=jnp.float32)


def test_beta_zero_does_not_read_the_prior():
    c = np.ones(3)
    e = Epilogue(beta=0.0).error(c, c, prior=np.full(3, np.nan))
    np.testing.assert_array_equal(e, c)


def test_a_relu_that_is_surely_closed_is_exact():
    e = Epilogue(activation="relu").error(np.array([-1.0, -1e-9, 1.0]), np.full(3, 1e-6))
    np.testing.assert_array_equal(e, [0, 1e-6, 1e-6])


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
