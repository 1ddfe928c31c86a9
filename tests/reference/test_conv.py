"""The definition of convolution against loops written straight from its formula, and against SciPy."""

import itertools
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.signal

import jaxdnn_reference as reference
from jaxdnn_reference import layout as lay

Array = np.ndarray[Any, Any]
CASES = range(120)
IMAGE = {1: ["NCW", "NWC", "CWN", "NCWc2"], 2: ["NCHW", "NHWC", "CHWN", "NCHWc2"]}
IMAGE[3] = ["NCDHW", "NDHWC", "CDHWN", "NCDHWc2"]
FILTER = {1: ["OIW", "WIO", "KSC", "KCS", "KCSc2"], 2: ["OIHW", "HWIO", "OHWI", "KCRS", "KRSC", "RSCK", "KCRSc2"]}
FILTER[3] = ["OIDHW", "DHWIO", "KCTRS", "KTRSC", "KCTRSc2"]


class Case:
    """A convolution with every option drawn at random, sizes pairwise distinct where they are free to be."""

    def __init__(self, seed: int):
        rng = self.rng = np.random.default_rng(seed)
        d = self.spatial = int(rng.integers(1, 4)) if seed % 4 else 2
        self.groups = int(rng.integers(1, 4))
        self.cg, self.kg = 2 * int(rng.integers(1, 3)), int(rng.integers(1, 4))
        if self.groups * self.kg % 2 and seed % 2:
            self.kg *= 2
        self.batch = int(rng.integers(1, 3))
        self.kernel = tuple(int(v) for v in rng.choice([1, 2, 3], d))
        self.stride = tuple(int(v) for v in rng.integers(1, 4, d))
        self.dilation = tuple(int(v) for v in rng.integers(1, 4, d))
        self.pads = tuple((int(a), int(b)) for a, b in rng.integers(0, 4, (d, 2)))
        self.mode = str(rng.choice(["cross_correlation", "convolution"]))
        reach = [dil * (r - 1) + 1 for dil, r in zip(self.dilation, self.kernel, strict=True)]
        least = [max(1, e - sum(p)) for e, p in zip(reach, self.pads, strict=True)]
        self.size = tuple(least[i] + int(rng.integers(0, 4)) + i for i in range(d))
        self.out = lay.output_size(self.size, self.kernel, self.stride, self.pads, self.dilation)
        self.filters = self.groups * self.kg
        vectors = self.filters % 2 == 0
        self.layout = str(rng.choice(IMAGE[d] if vectors else IMAGE[d][:-1]))
        self.filter_layout = str(rng.choice(FILTER[d]))
        self.x = rng.integers(-4, 5, (self.batch, *self.size, self.groups * self.cg))
        self.w = rng.integers(-4, 5, (*self.kernel, self.cg, self.filters))
        self.dy = rng.integers(-4, 5, (self.batch, *self.out, self.filters))

    def window(self) -> dict[str, Any]:
        names = {"stride": self.stride, "padding": self.pads, "dilation": self.dilation, "groups": self.groups}
        return names | {"mode": self.mode}

    def layouts(self) -> dict[str, Any]:
        return {"layout": self.layout, "filter_layout": self.filter_layout}

    def image(self, canonical: Array) -> Array:
        return lay.image_axes(self.layout).from_canonical(canonical)

    def filter(self, canonical: Array) -> Array:
        return lay.filter_axes(self.filter_layout).from_canonical(canonical)

    def products(self):
        """Every (output position, input position, filter position) whose product the formula adds."""
        channels = range(self.cg)
        for n, k in itertools.product(range(self.batch), range(self.filters)):
            first = self.cg * (k // self.kg)
            for p in np.ndindex(self.out):
                for r in np.ndindex(self.kernel):
                    h = [p[i] * self.stride[i] + r[i] * self.dilation[i] - self.pads[i][0] for i in range(len(r))]
                    if any(not 0 <= h[i] < self.size[i] for i in range(len(r))):
                        continue
                    tap = tuple(self.kernel[i] - r[i] - 1 for i in range(len(r))) if self.mode == "convolution" else r
                    for c in channels:
                        yield (n, *p, k), (n, *h, first + c), (*tap, c, k)

    def loops(self) -> tuple[Array, Array, Array, Array]:
        """y, dx, dw and the number of y's products, each element a Python integer."""
        y, count = (np.zeros(self.dy.shape, object) for _ in range(2))
        dx, dw = np.zeros(self.x.shape, object), np.zeros(self.w.shape, object)
        for i, j, t in self.products():
            y[i] += int(self.x[j]) * int(self.w[t])
            dx[j] += int(self.dy[i]) * int(self.w[t])
            dw[t] += int(self.x[j]) * int(self.dy[i])
            count[i] += 1
        return y, dx, dw, count


@pytest.mark.parametrize("seed", CASES)
def test_equals_loops_over_the_formula(seed: int):
    case = Case(seed)
    dtype = [np.float64, np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, np.int8][seed % 6]
    arithmetic = ["golden", "ordered", "tensor_core"][seed // 6 % 3] if dtype != np.float64 else "golden"
    out: dict[str, Any] = {"out_dtype": np.int32 if dtype == np.int8 else np.float32, "arithmetic": arithmetic}
    x, w, dy = (v.astype(dtype) for v in (case.image(case.x), case.filter(case.w), case.image(case.dy)))
    y, dx, dw, count = case.loops()
    options: dict[str, Any] = case.window() | case.layouts() | out
    details = reference.conv(x, w, details=True, **options)
    np.testing.assert_array_equal(details.value, case.image(y).astype(np.float64))
    np.testing.assert_array_equal(reference.conv(x, w, **options), details.value)
    np.testing.assert_array_equal(details.terms, case.image(count).astype(int))
    np.testing.assert_array_equal(reference.conv_dgrad(dy, w, x.shape, **options), case.image(dx).astype(np.float64))
    np.testing.assert_array_equal(reference.conv_wgrad(x, dy, w.shape, **options), case.filter(dw).astype(np.float64))
    bias_gradient = reference.conv_bgrad(dy, layout=case.layout, **out)
    np.testing.assert_array_equal(bias_gradient, case.dy.reshape(-1, case.filters).sum(0))
    scheduled = [  # the sums that `details` adds, where golden ones without it are those of the formula's loop
        reference.conv_dgrad(dy, w, x.shape, details=True, **options).value,
        reference.conv_wgrad(x, dy, w.shape, details=True, **options).value,
    ]
    for found, expected in zip(scheduled, (case.image(dx), case.filter(dw)), strict=True):
        np.testing.assert_array_equal(found, expected.astype(np.float64))


@pytest.mark.parametrize("seed", CASES[:30])
def test_gradients_are_the_exact_adjoints(seed: int):
    case = Case(1000 + seed)
    x, w, dy = (v.astype(np.int64) for v in (case.x, case.w, case.dy))
    layouts: dict[str, Any] = {"layout": IMAGE[case.spatial][1]}
    narrow = [v.astype(np.int8) for v in (x, w, dy)]
    options: dict[str, Any] = case.window() | layouts | {"out_dtype": np.int32}
    y = reference.conv(narrow[0], narrow[1], **options).astype(np.int64)
    dx = reference.conv_dgrad(narrow[2], narrow[1], x.shape, **options).astype(np.int64)
    dw = reference.conv_wgrad(narrow[0], narrow[2], w.shape, **options).astype(np.int64)
    assert np.sum(y * dy) == np.sum(x * dx) == np.sum(w * dw)


@pytest.mark.parametrize("seed", CASES[:30])
def test_at_gives_the_elements_of_the_whole(seed: int):
    case = Case(2000 + seed)
    x, w, dy = (v.astype(np.float32) for v in (case.image(case.x), case.filter(case.w), case.image(case.dy)))
    x, w, dy = (v + np.float32(0.1) * case.rng.standard_normal(v.shape).astype(np.float32) for v in (x, w, dy))
    arithmetic = ["golden", "ordered", "tensor_core"][seed % 3]
    options: dict[str, Any] = case.window() | case.layouts() | {"arithmetic": arithmetic}
    bias = case.rng.standard_normal(case.filters).astype(np.float32)
    forward: dict[str, Any] = options | {"bias": bias, "residual": dy, "activation": "gelu"}
    calls = [
        lambda **at: reference.conv(x, w, **forward, **at),
        lambda **at: reference.conv_dgrad(dy, w, x.shape, beta=0.5, prior=x, **options, **at),
        lambda **at: reference.conv_wgrad(x, dy, w.shape, alpha=0.25, **options, **at),
    ]
    for call in calls:
        whole = call()
        at = case.rng.integers(0, whole.size, 13)
        if arithmetic == "golden":  # float64's order is BLAS's own, which depends on the shape
            np.testing.assert_allclose(call(at=at), whole.reshape(-1)[at], rtol=1e-13, atol=1e-13)
        else:
            np.testing.assert_array_equal(call(at=at), whole.reshape(-1)[at])


@pytest.mark.parametrize("mode", ["cross_correlation", "convolution"])
@pytest.mark.parametrize("shape", [(11,), (9, 7), (6, 5, 7)])
def test_equals_scipy(mode: str, shape: tuple[int, ...]):
    rng = np.random.default_rng(5)
    d = len(shape)
    x, w = rng.standard_normal((2, *shape, 3)), rng.standard_normal((*(3, 2, 4)[:d], 3, 5))
    layout = {1: "NWC", 2: "NHWC", 3: "NDHWC"}[d]
    y = reference.conv(x, w, mode=mode, layout=layout)
    operation = scipy.signal.correlate if mode == "cross_correlation" else scipy.signal.convolve
    for n, k in np.ndindex(2, 5):
        expected = sum(operation(x[n, ..., c], w[..., c, k], mode="valid", method="direct") for c in range(3))
        np.testing.assert_allclose(y[n, ..., k].astype(float), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", CASES[:20])
def test_transposed_convolution_is_the_data_gradient(seed: int):
    case = Case(3000 + seed)
    reach = zip(case.out, case.stride, case.pads, case.dilation, case.kernel, case.size, strict=True)
    extra = [size - ((o - 1) * u - sum(p) + dil * (r - 1) + 1) for o, u, p, dil, r, size in reach]
    dy, w = case.image(case.dy).astype(np.float32), case.filter(case.w).astype(np.float32)
    options: dict[str, Any] = case.window() | case.layouts()
    expected = reference.conv_dgrad(dy, w, case.image(case.x).shape, **options)
    np.testing.assert_array_equal(reference.conv_transpose(dy, w, output_padding=extra, **options), expected)


@pytest.mark.parametrize(("stride", "kernel"), [(1, 3), (2, 3), (3, 2), (2, 5)])
def test_same_padding(stride: int, kernel: int):
    rng = np.random.default_rng(kernel)
    x, w = rng.integers(-3, 4, (1, 10, 2)).astype(np.float32), rng.integers(-3, 4, (kernel, 2, 3)).astype(np.float32)
    y = reference.conv(x, w, stride=stride, padding="SAME", layout="NWC")
    assert y.shape == (1, -(-10 // stride), 3)
    total = max((y.shape[1] - 1) * stride + kernel - 10, 0)
    explicit = reference.conv(x, w, stride=stride, padding=[(total // 2, total - total // 2)], layout="NWC")
    np.testing.assert_array_equal(y, explicit)
    back = reference.conv_transpose(y, w, stride=stride, padding="SAME", layout="NWC")
    assert back.shape == (1, y.shape[1] * stride, 2)
    same: dict[str, Any] = {"stride": stride, "padding": "SAME", "layout": "NWC"}
    np.testing.assert_array_equal(back, reference.conv_dgrad(y, w, back.shape, **same))


def small(dtype: Any = np.float32) -> tuple[Array, Array]:
    rng = np.random.default_rng(2)
    return rng.standard_normal((2, 5, 4, 3)).astype(dtype), rng.standard_normal((3, 2, 3, 6)).astype(dtype)


def test_blend_bias_residual_and_activation():
    x, w = small()
    rng = np.random.default_rng(3)
    plain = reference.conv(x, w)
    bias = rng.standard_normal(6).astype(np.float32)
    prior, residual = (rng.standard_normal(plain.shape).astype(np.float32) for _ in range(2))
    options: dict[str, Any] = {
        "alpha": 0.5,
        "beta": -2.0,
        "prior": prior,
        "bias": bias,
        "residual": residual,
        "activation": "tanh",
    }
    expected = np.tanh(0.5 * plain - 2.0 * prior.astype(np.float64) + residual + bias)
    np.testing.assert_allclose(reference.conv(x, w, **options), expected, rtol=1e-14, atol=1e-14)
    ordered = reference.conv(x, w, arithmetic="ordered", **options)
    assert ordered.dtype == np.float32
    np.testing.assert_allclose(ordered, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("arithmetic", ["golden", "ordered", "tensor_core"])
def test_prior_is_not_read_with_beta_zero(arithmetic: str):
    x, w = small()
    plain = reference.conv(x, w, arithmetic=arithmetic)
    poison = np.full(plain.shape, np.nan, np.float32)
    y = reference.conv(x, w, beta=0.0, prior=poison, arithmetic=arithmetic)
    np.testing.assert_array_equal(y, plain)
    assert np.isnan(reference.conv(x, w, beta=0.5, prior=poison, arithmetic=arithmetic)).all()


def test_one_rounding_at_the_end():
    # 1 + 2^-9 rounds to 1 in bfloat16; the residual brings it to 1 + 2^-8 + 2^-9, which rounds up to even.
    x, w = np.ones((1, 1, 2), ml_dtypes.bfloat16), np.ones((1, 2, 1), ml_dtypes.bfloat16)
    x[0, 0, 1] = 2.0**-9
    residual = np.full((1, 1, 1), 2.0**-8, ml_dtypes.bfloat16)
    for arithmetic in ("ordered", "tensor_core"):
        y = reference.conv(x, w, residual=residual, layout="NWC", arithmetic=arithmetic)
        assert y.dtype == ml_dtypes.bfloat16
        assert float(y[0, 0, 0]) == 1 + 2.0**-6 - 2.0**-7
    assert float(reference.conv(x, w, residual=residual, layout="NWC")[0, 0, 0]) == 1 + 2.0**-8 + 2.0**-9


def test_int8_wraps_saturates_and_converts():
    x, w = np.full((1, 1, 140_000), -128, np.int8), np.full((1, 140_000, 1), -128, np.int8)
    exact = 140_000 * 128 * 128
    wrapped = (exact + 2**31) % 2**32 - 2**31
    assert exact != wrapped

    def y(**options: Any) -> Any:
        return reference.conv(x, w, layout="NWC", arithmetic="ordered", **options)[0, 0, 0]

    assert y(out_dtype=np.int32) == wrapped
    assert y() == -128
    assert y().dtype == np.int8
    assert y(out_dtype=np.float32) == np.float32(wrapped)
    assert y(alpha=2.0**-24) == np.int8(np.rint(wrapped * 2.0**-24))
    # Integer bias wraps; a float one takes the sum to float32, where nothing wraps.
    assert y(out_dtype=np.int32, bias=np.array([-(2**31)], np.int32)) == wrapped + 2**31
    assert y(out_dtype=np.int32, bias=np.array([-(2.0**31)], np.float32)) == -(2**31)


def test_int8_rounds_half_to_even():
    x, w = np.array([[[1]], [[3]], [[5]], [[-1]], [[-3]]], np.int8), np.ones((1, 1, 1), np.int8)
    y = reference.conv(x, w, layout="NWC", alpha=0.5, arithmetic="ordered")
    np.testing.assert_array_equal(y.ravel(), [0, 2, 2, 0, -2])
    assert y.dtype == np.int8


def test_tf32_cuts_the_operands():
    x, w = small()
    bits = np.uint32(0xFFFFE000)
    cut = [(v.view(np.uint32) & bits).view(np.float32) for v in (x, w)]
    np.testing.assert_array_equal(reference.conv(x, w, precision="tf32"), reference.conv(*cut))
    assert not np.array_equal(reference.conv(x, w, precision="tf32"), reference.conv(x, w))


def test_default_types():
    x, w = small()
    assert reference.conv(x, w).dtype == np.float64
    assert reference.conv(x, w, arithmetic="ordered").dtype == np.float32
    assert reference.conv(x.astype(np.float64), w.astype(np.float64)).dtype == np.longdouble
    assert reference.conv(x, w, out_dtype=ml_dtypes.float8_e5m2).dtype == ml_dtypes.float8_e5m2
    assert reference.conv(x, w, arithmetic="ordered", accumulate=np.float64, out_dtype=np.float64).dtype == np.float64


@pytest.mark.parametrize("arithmetic", ["golden", "ordered", "tensor_core"])
def test_empty_batch(arithmetic: str):
    x, w = small()
    y = reference.conv(x[:0], w, arithmetic=arithmetic)
    assert y.shape == (0, 3, 3, 6)
    assert reference.conv_dgrad(y, w, x[:0].shape, arithmetic=arithmetic).shape == (0, 5, 4, 3)
    np.testing.assert_array_equal(reference.conv_wgrad(x[:0], y, w.shape, arithmetic=arithmetic), np.zeros(w.shape))
    np.testing.assert_array_equal(reference.conv_bgrad(y, arithmetic=arithmetic), np.zeros(6))


# Accumulators that hold sums of 57 products of standard normal data without any rounding.
EXACT = {("golden", ml_dtypes.bfloat16), ("golden", ml_dtypes.float8_e4m3fn), ("ordered", ml_dtypes.float8_e4m3fn)}


@pytest.mark.parametrize("arithmetic", ["golden", "ordered", "tensor_core"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_bound_holds_and_is_not_idle(arithmetic: str, dtype: Any):
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((1, 6, 19)).astype(dtype), rng.standard_normal((3, 19, 4)).astype(dtype)
    precision = None
    if dtype == np.float32 and arithmetic == "tensor_core":
        precision = "tf32"
        x, w = ((v.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for v in (x, w))
    details = reference.conv(x, w, layout="NWC", arithmetic=arithmetic, precision=precision, details=True)
    exact = np.zeros((4, 4), object)
    for p, k, r, c in np.ndindex(4, 4, 3, 19):
        exact[p, k] += Fraction(float(x[0, p + r, c])) * Fraction(float(w[r, c, k]))
    error = np.array([[abs(Fraction(float(v)) - e) for v, e in zip(*line, strict=True)]
                      for line in zip(details.accumulated[0], exact, strict=True)])  # fmt: skip
    assert np.all(error <= details.bound[0])
    if (arithmetic, dtype) in EXACT:
        assert not error.any()
    else:
        assert np.max(error / details.bound[0]) > 0.003
    np.testing.assert_array_equal(details.terms, 57)
    size = reference.conv(np.abs(x).astype(np.float64), np.abs(w).astype(np.float64), layout="NWC")
    np.testing.assert_allclose(details.magnitude, size.astype(np.float64), rtol=1e-14)


def test_schedule_reaches_the_sum():
    rng = np.random.default_rng(8)
    x, dy = rng.standard_normal((4, 9, 2)).astype(np.float32), rng.standard_normal((4, 7, 3)).astype(np.float32)
    split = reference.Schedule(np.arange(28).reshape(4, 7), combine="pairwise")
    dw = reference.conv_wgrad(x, dy, (3, 2, 3), layout="NWC", arithmetic="ordered", schedule=split)
    one: dict[str, Any] = {"layout": "NWC", "arithmetic": "ordered"}
    images = [reference.conv_wgrad(x[n : n + 1], dy[n : n + 1], (3, 2, 3), **one) for n in range(4)]
    np.testing.assert_array_equal(dw, (images[0] + images[1]) + (images[2] + images[3]))


def test_an_order_may_depend_on_the_place():
    """Orders by row and column of the output, against one order for all: all outputs, some, and with details."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((2, 7, 6, 3)).astype(np.float32)
    w = rng.standard_normal((3, 2, 3, 5)).astype(np.float32)
    orders = tuple(rng.permutation(18)[None] for _ in range(6))
    classes = np.array([[0, 3], [4, 1], [2, 5]])
    options: dict[str, Any] = {"arithmetic": "ordered"}
    each = np.stack([reference.conv(x, w, **options, schedule=reference.Schedule(order)) for order in orders])
    p, q = np.indices((5, 5))
    wanted = np.moveaxis(each, 0, -1)[:, p, q, :, classes[p % 3, q % 2]]  # the indexed axes come first
    wanted = np.moveaxis(wanted, (0, 1), (1, 2))
    assert all((each[i] != wanted).any() for i in range(6))

    plan = reference.Schedule(orders, classes=classes)
    details = reference.conv(x, w, **options, schedule=plan, details=True)
    np.testing.assert_array_equal(details.value, wanted)
    at = np.array([3, 249, 0, 77, 120, 3])
    np.testing.assert_array_equal(reference.conv(x, w, **options, schedule=plan, at=at), wanted.ravel()[at])
    exact = reference.conv(x.astype(np.float64), w.astype(np.float64))
    assert np.all(abs(details.accumulated - exact) <= details.bound)
    nothing = reference.conv(x[:0], w, **options, schedule=plan)
    assert nothing.shape == (0, 5, 5, 5)
