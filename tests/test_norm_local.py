"""Local response and divisive normalisation, and division by a p-norm: values, windows, gradients, transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn import tolerance
from jaxdnn.tolerance import Accumulation
from jaxdnn.verify.families import norm_local


def f32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


STRONG: dict[str, Any] = {"lrn_alpha": 0.7, "k": 1.5}
WINDOWS = [(1, "high"), (2, "high"), (2, "low"), (3, "high"), (4, "low"), (4, "high"), (5, "low"), (16, "high")]


def arrays(shape: Any, dtype: Any = np.float64) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(len(shape))
    return tuple(rng.normal(size=shape).astype(dtype) for _ in range(3))


def agree(out: Any, golden: Any, error: Any) -> None:
    """The value within its computed bound, which every element has."""
    found = tolerance.compare(np.asarray(out), np.asarray(golden, np.float64), error)
    assert found.passed, found.message
    assert not found.unchecked


def window(x: np.ndarray, axes: list[int], n: int, even: str, exponent: float = 0.75) -> norm_local.Window:
    return norm_local.Window(x.astype(np.float64), axes, n, even, 0.7, exponent, 1.5, "float32")


def loops(x: np.ndarray, n: int, even: str, k: float, rate: float, exponent: float) -> np.ndarray:
    """LRN of (pixels, channels) as its definition reads, channel by channel."""
    y = np.empty_like(x)
    low = (n - 1) // 2 if even == "high" else n // 2
    for c in range(x.shape[1]):
        seen = [x[:, i] ** 2 for i in range(c - low, c - low + n) if 0 <= i < x.shape[1]]
        y[:, c] = x[:, c] * (k + rate / n * sum(seen)) ** -exponent
    return y


@pytest.mark.parametrize(("n", "even"), WINDOWS)
def test_windows(n: int, even: str):
    x = arrays((4, 7))[0]
    x = x.astype(np.float32).astype(np.float64)
    expected = loops(x, n, even, 1.5, 0.7, 0.75)
    np.testing.assert_allclose(
        reference.lrn(x[:, None], layout="NWC", n=n, even=even, **STRONG)[:, 0], expected, rtol=1e-12
    )
    found = dnn.lrn(x[:, None].astype(np.float32), layout="NWC", n=n, even=even, **STRONG)
    agree(found[:, 0], expected, window(x, [1], n, even).forward(x)[0][1])


def test_window_of_ten_is_asymmetric():
    """cuDNN's [c - 4, c + 5] and PyTorch's [c - 5, c + 4]: what a single one adds to where."""
    one = np.zeros((1, 1, 20), np.float32)
    one[0, 0, 10] = 1
    for even, reached in (("high", range(5, 15)), ("low", range(6, 16))):
        x = one + np.float32(2.0**-30)
        s = x / np.asarray(dnn.lrn(x, layout="NWC", n=10, even=even, lrn_alpha=10.0, lrn_beta=1.0, k=1.0))
        assert np.flatnonzero(s[0, 0] > 1.5).tolist() == list(reached)


def test_zeros_that_fill_a_vector_up_change_no_channel():
    x, dy, _ = arrays((2, 3, 4, 7), np.float32)
    filled = [dnn.transform(a, out_layout="NCHWc4") for a in (x, dy)]
    for op, given, plain in ((dnn.lrn, filled[:1], (x,)), (dnn.lrn_dgrad, filled[::-1], (dy, x))):
        found = op(*given, layout="NCHWc4", **STRONG)
        wanted = dnn.transform(op(*plain, **STRONG), out_layout="NCHWc4")
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", norm_local.OPS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
def test_layouts_blends_and_backward(op: str, dtype: str):
    """Every variant that `jaxdnn verify` knows."""
    accumulation = Accumulation(format="float64" if dtype == "f64" else "float32")
    for i, variant in enumerate(norm_local.VARIANTS[op]):
        case = norm_local.LocalCase(op, "xla", dtype, variant)
        operands = case.operands("normal", np.random.default_rng(i))
        results = jax.tree.leaves(jax.jit(case.function())(*operands))
        for out, wanted in zip(results, case.expected("normal", operands, accumulation), strict=True):
            assert out.dtype == wanted.dtype
            agree(out, wanted.value, wanted.error)


@pytest.mark.parametrize("means", [None, "zeros"])
def test_divisive_norm_without_means(means: Any):
    x, dy, _ = (v.astype(np.float32) for v in arrays((2, 3, 4, 5)))
    given: Any = {"n": 3, "means": means and np.zeros_like(x), **STRONG}
    rule = window(x, [1, 2], 3, "high")
    agree(dnn.divisive_norm(x, **given), reference.divisive_norm(x, n=3, **STRONG), rule.forward(x)[0][1])
    wanted = reference.divisive_norm_dgrad(dy, x, n=3, **STRONG)
    for out, golden, (_, error) in zip(
        dnn.divisive_norm_dgrad(dy, x, **given), wanted, rule.backward(dy, x), strict=True
    ):
        agree(out, golden, error)


def test_bounds_find_planted_faults():
    x, dy, _ = (v.astype(np.float32) for v in arrays((3, 4, 2, 7)))
    options = {"n": 4, **STRONG}
    (golden, error), ((exact, back), _) = (
        window(x, [3], 4, "high").forward(x)[0],
        window(x, [3], 4, "high").backward(dy, x),
    )
    faults = {
        "the other side": reference.lrn(x, even="low", **options),
        "n + 1 divides": reference.lrn(x, **{**options, "lrn_alpha": 0.7 * 4 / 5}),
        "an exponent next to it": reference.lrn(x, lrn_beta=0.75001, **options),
        "k forgotten": reference.lrn(x, **{**options, "k": 0.0}),
    }
    agree(dnn.lrn(x, **options), golden, error)
    for fault, wrong in faults.items():
        assert not tolerance.compare(wrong.astype(np.float32), golden, error).passed, fault
    agree(dnn.lrn_dgrad(dy, x, **options), exact, back)
    mirrored = reference.lrn_dgrad(dy, x, even="low", **options)
    assert not tolerance.compare(mirrored.astype(np.float32), exact, back).passed
    vector = norm_local.vector_error(x.astype(np.float64), 2.0, -1, 1e-12, "float32")
    wrong = reference.lp_normalize(x, p=2.00001).astype(np.float32)
    assert not tolerance.compare(wrong, reference.lp_normalize(x), vector).passed


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("exponent", [-0.75, -0.5, -1.5, 1.5, 3.0, 1 / 3])
def test_powers_keep_half_of_what_the_bounds_allow(dtype: Any, exponent: float):
    rng, wide = np.random.default_rng(11), np.longdouble if dtype == np.float64 else np.float64
    for reach in (0.05, 2, 20):
        t = np.exp2(rng.uniform(-reach, reach, 100_000)).astype(dtype)
        found = np.asarray(jax.jit(lambda t: t ** jnp.asarray(exponent, t.dtype))(t)).astype(wide)
        exact = t.astype(wide) ** wide(exponent)
        allowed = norm_local.POWER / 2 * (1 + np.abs(exponent * np.log(t.astype(np.float64))))
        assert (np.abs(found / exact - 1) <= allowed * np.finfo(dtype).eps / 2).all()


def test_backward_definitions_are_derivatives():
    """Central differences of the definition, in x and in the means."""
    x, dy, means = arrays((2, 4, 5, 3))
    direction, h = np.random.default_rng(9).normal(size=x.shape), 1e-6
    change = lambda f: np.sum(dy * (f(h * direction) - f(-h * direction))) / (2 * h)
    np.testing.assert_allclose(
        np.sum(reference.lrn_dgrad(dy, x, n=4, **STRONG) * direction),
        change(lambda d: reference.lrn(x + d, n=4, **STRONG)),
        rtol=1e-7,
    )
    dx, dmeans = reference.divisive_norm_dgrad(dy, x, means=means, n=2, **STRONG)
    for gradient, f in (
        (dx, lambda d: reference.divisive_norm(x + d, means=means, n=2, **STRONG)),
        (dmeans, lambda d: reference.divisive_norm(x, means=means + d, n=2, **STRONG)),
    ):
        np.testing.assert_allclose(np.sum(gradient * direction), change(f), rtol=1e-7)


@pytest.mark.usefixtures("x64")
def test_transformations():
    """Gradients of any order are those of the public backward ops; vmap is a loop."""
    x, dy, means = map(jnp.asarray, arrays((2, 3, 4, 6)))
    forward = lambda x, m: dnn.divisive_norm(x, means=m, n=3, **STRONG)
    for ours, theirs in zip(
        jax.vjp(forward, x, means)[1](dy), dnn.divisive_norm_dgrad(dy, x, means=means, n=3, **STRONG), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    local = lambda x: dnn.lrn(x, n=3, **STRONG)
    np.testing.assert_allclose(jax.vjp(local, x)[1](dy)[0], dnn.lrn_dgrad(dy, x, n=3, **STRONG), rtol=1e-9, atol=1e-12)
    second = jax.jvp(jax.grad(lambda x: jnp.vdot(local(x), dy)), (x,), (means,))[1]
    h = 1e-6
    ends = [reference.lrn_dgrad(np.asarray(dy), np.asarray(x + s * h * means), n=3, **STRONG) for s in (1, -1)]
    np.testing.assert_allclose(second, (ends[0] - ends[1]).astype(float) / (2 * h), rtol=1e-5, atol=1e-8)
    many = jnp.stack([x, dy])
    np.testing.assert_allclose(jax.vmap(local)(many), jnp.stack([local(x), local(dy)]), rtol=1e-12)
    np.testing.assert_allclose(jax.lax.map(local, many), jax.jit(jax.vmap(local))(many), rtol=1e-12)


@pytest.mark.parametrize("p", [1, 1.5, 2, 3.0, np.inf])
@pytest.mark.parametrize("axis", [-1, 0, (0, 2)])
def test_p_norms(p: float, axis: Any):
    x = arrays((3, 4, 5), np.float32)[0]
    y = np.asarray(dnn.lp_normalize(x, p=p, axis=axis))
    error = norm_local.vector_error(x.astype(np.float64), p, axis, 1e-12, "float32")
    agree(y, reference.lp_normalize(x, p=p, axis=axis), error)
    axes = axis if isinstance(axis, tuple) else (axis,)
    lines = np.moveaxis(y, axes, range(len(axes))).reshape(-1, y.size // np.prod([y.shape[a] for a in axes])).T
    np.testing.assert_allclose([np.linalg.norm(line, p) for line in lines], np.ones(len(lines)), rtol=2e-6)


@pytest.mark.parametrize("p", [1, 2, 3.0, np.inf])
def test_p_norms_of_extremes(p: float):
    """Neither overflow nor underflow; zero stays zero, and so do its derivatives."""
    for size in (2e-38, 1e-20, 1.0, 1e20, 3e38):
        x = f32([size, -size])
        y = dnn.lp_normalize(x, p=p, eps=0.0)
        np.testing.assert_allclose(y, [2 ** (-1 / p), -(2 ** (-1 / p))], rtol=1e-6)
    zero = jnp.zeros(3)
    np.testing.assert_array_equal(dnn.lp_normalize(zero, p=p), zero)
    np.testing.assert_allclose(jax.jacobian(lambda x: dnn.lp_normalize(x, p=p, eps=0.5))(zero), 2 * np.eye(3))
    halves = jnp.asarray([0.25, 0.0], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(dnn.lp_normalize(halves, p=p, eps=0.5).astype(jnp.float32), [0.5, 0])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("p", [1, 1.5, 2, 3.0])
def test_p_norms_derivatives(p: float):
    x, direction, _ = arrays((3, 5))
    h = 1e-6
    tangent = jax.jvp(lambda x: dnn.lp_normalize(x, p=p), (jnp.asarray(x),), (jnp.asarray(direction),))[1]
    ends = [reference.lp_normalize(x + s * h * direction, p=p) for s in (1, -1)]
    np.testing.assert_allclose(tangent, (ends[0] - ends[1]).astype(float) / (2 * h), rtol=1e-5, atol=1e-8)
    second = jax.grad(lambda x: jnp.vdot(jax.grad(lambda x: dnn.lp_normalize(x, p=p)[0, 0])(x), direction))(
        jnp.asarray(x)
    )
    assert np.isfinite(np.asarray(second)).all()


def test_p_norms_of_rows_do_not_depend_on_the_batch():
    x = jnp.asarray(arrays((33, 7), np.float32)[0])
    run = jax.jit(lambda x: dnn.lp_normalize(x, determinism="batch_invariant"))
    for start, size in ((0, 1), (3, 5), (16, 17)):
        np.testing.assert_array_equal(run(x[start : start + size]), run(x)[start : start + size])


@pytest.mark.parametrize("p", [126.0, 127.0, 1000.0, 1e6])
def test_lp_normalize_of_a_large_p(p: float) -> None:
    x = jnp.array([[1.0, 0.5], [-0.75, 0.75], [0.501, -0.5]], jnp.float32)
    np.testing.assert_allclose(dnn.lp_normalize(x, p=p), reference.lp_normalize(np.asarray(x), p=p), rtol=2e-6)
    slope = jax.grad(lambda x: dnn.lp_normalize(x, p=p)[1])(jnp.array([1.0, 0.5], jnp.float32))
    np.testing.assert_allclose(slope, [-0.5, 1.0], rtol=1e-5)
