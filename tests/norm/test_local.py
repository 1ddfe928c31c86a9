"""Local response and divisive normalisation, and division by a p-norm: values, windows, gradients, transformations."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.core import tolerance
from jaxdnn._src.core.tolerance import Accumulation
from jaxdnn._src.norm import cases_local
from tests.core import running_error


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


# The definition's roundoff for float64, over that of float64.
SHARE = float(np.finfo(np.longdouble).eps) * 2.0**52


def window(x: np.ndarray, axes: list[int], n: int, even: str, format: str = "float32") -> cases_local.Window:
    return cases_local.Window(x.astype(np.float64), axes, n, even, 0.7, 0.75, 1.5, format)


def alike(transformed: Any, by: Any, *arrays: Any) -> None:
    """Two programs agree within the bounds of their own roundings."""
    errors = [jax.tree.leaves(running_error.bounds(f, *arrays)[1]) for f in (transformed, by)]
    results = [jax.tree.leaves(jax.jit(f)(*arrays)) for f in (transformed, by)]
    for a, b, *both in zip(*results, *errors, strict=True):
        running_error.agree(a, b, *both)


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
    defined = reference.lrn(x[:, None], layout="NWC", n=n, even=even, **STRONG)[:, 0]
    running_error.agree(defined, expected, 2 * window(x, [1], n, even, "float64").forward(x)[0][1])
    found = jax.jit(ft.partial(dnn.lrn, layout="NWC", n=n, even=even, **STRONG))(x[:, None].astype(np.float32))
    agree(found[:, 0], expected, window(x, [1], n, even).forward(x)[0][1])


def test_window_of_ten_is_asymmetric():
    """cuDNN's [c - 4, c + 5] and PyTorch's [c - 5, c + 4]: what a single one adds to where."""
    one = np.zeros((1, 1, 20), np.float32)
    one[0, 0, 10] = 1
    for even, reached in (("high", range(5, 15)), ("low", range(6, 16))):
        x = one + np.float32(2.0**-30)
        run = jax.jit(ft.partial(dnn.lrn, layout="NWC", n=10, even=even, lrn_alpha=10.0, lrn_beta=1.0, k=1.0))
        s = x / np.asarray(run(x))
        assert np.flatnonzero(s[0, 0] > 1.5).tolist() == list(reached)


def test_zeros_that_fill_a_vector_up_change_no_channel():
    x, dy, _ = arrays((2, 3, 4, 7), np.float32)
    fill = jax.jit(ft.partial(dnn.transform, out_layout="NCHWc4"))
    filled = [fill(a) for a in (x, dy)]
    for op, given, plain in ((dnn.lrn, filled[:1], (x,)), (dnn.lrn_dgrad, filled[::-1], (dy, x))):
        found = jax.jit(ft.partial(op, layout="NCHWc4", **STRONG))(*given)
        wanted = fill(jax.jit(ft.partial(op, **STRONG))(*plain))
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", cases_local.OPS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
def test_layouts_blends_and_backward(op: str, dtype: str):
    """Every variant that `jaxdnn verify` knows."""
    accumulation = Accumulation(format="float64" if dtype == "f64" else "float32")
    for i, variant in enumerate(cases_local.VARIANTS[op]):
        case = cases_local.LocalCase(op, "xla", dtype, variant)
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
    found = jax.jit(ft.partial(dnn.divisive_norm, **given))(x)
    agree(found, reference.divisive_norm(x, n=3, **STRONG), rule.forward(x)[0][1])
    wanted = reference.divisive_norm_dgrad(dy, x, n=3, **STRONG)
    found = jax.jit(ft.partial(dnn.divisive_norm_dgrad, **given))(dy, x)
    for out, golden, (_, error) in zip(found, wanted, rule.backward(dy, x), strict=True):
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
    agree(jax.jit(ft.partial(dnn.lrn, **options))(x), golden, error)
    for fault, wrong in faults.items():
        assert not tolerance.compare(wrong.astype(np.float32), golden, error).passed, fault
    agree(jax.jit(ft.partial(dnn.lrn_dgrad, **options))(dy, x), exact, back)
    mirrored = reference.lrn_dgrad(dy, x, even="low", **options)
    assert not tolerance.compare(mirrored.astype(np.float32), exact, back).passed
    vector = cases_local.vector_error(x.astype(np.float64), 2.0, -1, 1e-12, "float32")
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
        allowed = cases_local.POWER / 2 * (1 + np.abs(exponent * np.log(t.astype(np.float64))))
        assert (np.abs(found / exact - 1) <= allowed * np.finfo(dtype).eps / 2).all()


def test_backward_definitions_are_derivatives():
    """Central differences of the definition, in x and in the means."""
    x, dy, means, d = running_error.coarse(*arrays((2, 4, 5, 3)), np.random.default_rng(9).normal(size=(2, 4, 5, 3)))
    rule = window(x, [3], 4, "high", "float64")
    y, (off, _) = rule.forward(x)[0][1] * SHARE, ((e * SHARE for _, e in rule.backward(dy, x)))
    running_error.dual(
        reference.lrn_dgrad(dy, x, n=4, **STRONG), off, d, dy, lambda h: reference.lrn(x + h * d, n=4, **STRONG), y
    )
    rule = window(x - means, [1, 2], 2, "high", "float64")
    y, errors = rule.forward(x)[0][1] * SHARE, [e * SHARE for _, e in rule.backward(dy, x)]
    gradients = reference.divisive_norm_dgrad(dy, x, means=means, n=2, **STRONG)
    moved = lambda dx, dm: reference.divisive_norm(x + dx, means=means + dm, n=2, **STRONG)
    for gradient, off, f in zip(gradients, errors, (lambda h: moved(h * d, 0), lambda h: moved(0, h * d)), strict=True):
        running_error.dual(gradient, off, d, dy, f, y)


@pytest.mark.usefixtures("x64")
def test_transformations():
    """Gradients of any order are those of the public backward ops; vmap is a loop."""
    x, dy, means = running_error.coarse(*arrays((2, 3, 4, 6)))
    local, divisive = ft.partial(dnn.lrn, n=3, **STRONG), ft.partial(dnn.divisive_norm, n=3, **STRONG)
    pulled = lambda f: lambda dy, *given: jax.vjp(f, *given)[1](dy)
    alike(
        pulled(lambda x, m: divisive(x, means=m)),
        lambda dy, x, m: dnn.divisive_norm_dgrad(dy, x, means=m, n=3, **STRONG),
        *map(jnp.asarray, (dy, x, means)),
    )
    alike(pulled(local), lambda dy, x: [dnn.lrn_dgrad(dy, x, n=3, **STRONG)], jnp.asarray(dy), jnp.asarray(x))
    second = jax.jit(lambda x, d: jax.jvp(jax.grad(lambda x: jnp.sum(local(x) * dy)), (x,), (d,))[1])
    ends = lambda h: reference.lrn_dgrad(dy, x + h * means, n=3, **STRONG)
    off = window(x, [3], 3, "high", "float64").backward(dy, x)[0][1] * SHARE
    error = running_error.bounds(second, jnp.asarray(x), jnp.asarray(means))[1]
    running_error.agree(second(jnp.asarray(x), jnp.asarray(means)), *running_error.slope(ends, off), error)
    many = jnp.stack([jnp.asarray(x), jnp.asarray(dy)])
    mapped, error = jax.jit(jax.vmap(local))(many), running_error.bounds(jax.vmap(local), many)[1]
    for loop in (lambda many: jax.lax.map(local, many), lambda many: jnp.stack([local(many[0]), local(many[1])])):
        looped = jax.jit(loop)(many)
        running_error.agree(looped, mapped, 2 * error)


@pytest.mark.parametrize("p", [1, 1.5, 2, 3.0, np.inf])
@pytest.mark.parametrize("axis", [-1, 0, (0, 2)])
def test_p_norms(p: float, axis: Any):
    x = arrays((3, 4, 5), np.float32)[0]
    y = np.asarray(jax.jit(ft.partial(dnn.lp_normalize, p=p, axis=axis))(x))
    error = cases_local.vector_error(x.astype(np.float64), p, axis, 1e-12, "float32")
    agree(y, reference.lp_normalize(x, p=p, axis=axis), error)
    wide = x.astype(np.float64)
    total, root = (np.sum, 1 / p) if p < np.inf else (np.max, 1)
    norms = total(np.abs(wide) ** (p if p < np.inf else 1), axis, keepdims=True) ** root
    twice = 2 * cases_local.vector_error(wide, p, axis, 1e-12, "float64")
    running_error.agree(reference.lp_normalize(x, p=p, axis=axis), wide / norms, twice)


@pytest.mark.parametrize("p", [1, 2, 3.0, np.inf])
def test_lp_normalize_beside_infinity_is_zero(p: float) -> None:
    x = np.array([[2.0, np.inf, -3.0], [0.0, 4.0, 0.0]], np.float32)
    for y in (jax.jit(ft.partial(dnn.lp_normalize, p=p))(x), reference.lp_normalize(x, p=p)):
        np.testing.assert_array_equal(y, [[0, np.nan, 0], [0, 1, 0]])


@pytest.mark.parametrize("p", [1, 2, 3.0, np.inf])
def test_p_norms_of_extremes(p: float):
    """Neither overflow nor underflow; zero stays zero, and so do its derivatives."""
    run = jax.jit(lambda x: dnn.lp_normalize(x, p=p, eps=0.0))
    for size in (2e-38, 1e-20, 1.0, 1e20, 3e38):
        x = f32([size, -size])
        error = cases_local.vector_error(x.astype(np.float64), p, -1, 0.0, "float32")
        agree(run(x), 2 ** (-1 / p) * np.sign(x), error)
    zero = jnp.zeros(3)
    np.testing.assert_array_equal(jax.jit(ft.partial(dnn.lp_normalize, p=p))(zero), zero)
    np.testing.assert_array_equal(
        jax.jit(jax.jacobian(lambda x: dnn.lp_normalize(x, p=p, eps=0.5)))(zero), 2 * np.eye(3)
    )
    halves = jnp.asarray([0.25, 0.0], ml_dtypes.bfloat16)
    found = jax.jit(ft.partial(dnn.lp_normalize, p=p, eps=0.5))(halves)
    np.testing.assert_array_equal(np.asarray(found, np.float32), [0.5, 0])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("p", [1, 1.5, 2, 3.0])
def test_p_norms_derivatives(p: float):
    x, direction, _ = running_error.coarse(*arrays((3, 5)))
    run = lambda x: jax.jvp(lambda x: dnn.lp_normalize(x, p=p), (x,), (jnp.asarray(direction),))[1]
    off = cases_local.vector_error(x, p, -1, 1e-12, "float64") * SHARE
    along = running_error.slope(lambda h: reference.lp_normalize(x + h * direction, p=p), off)
    running_error.agree(jax.jit(run)(jnp.asarray(x)), *along, running_error.bounds(run, jnp.asarray(x))[1])
    first = jax.grad(lambda x: dnn.lp_normalize(x, p=p)[0, 0])
    second = jax.jit(jax.grad(lambda x: jnp.vdot(first(x), direction)))(jnp.asarray(x))
    assert np.isfinite(np.asarray(second)).all()


def test_a_vector_of_each_size_is_scaled_on_its_own():
    sizes = np.array([[1e-30], [1e-20], [1e-13], [1.0], [1e19], [1e25], [1e37]])
    x = (arrays((7, 33))[0] * sizes).astype(np.float32)
    for eps in (0.0, 1e-12, 0.5):
        run = jax.jit(ft.partial(dnn.lp_normalize, eps=eps))
        y = run(x)
        agree(
            y, reference.lp_normalize(x, eps=eps), cases_local.vector_error(x.astype(np.float64), 2, -1, eps, "float32")
        )
        np.testing.assert_array_equal(run(x[3:5]), y[3:5])


def test_lp_normalize_stores_its_result_alone():
    """XLA for CPUs makes no other array of x's size, unless a vector must be scaled."""
    text = str(jax.jit(dnn.lp_normalize).lower(jnp.ones((64, 80, 24))).compile().as_text())
    assert text[text.index("ENTRY") :].count("80,24]{2,1,0} fusion") == 1


def test_p_norms_of_rows_do_not_depend_on_the_batch():
    x = jnp.asarray(arrays((33, 7), np.float32)[0])
    run = jax.jit(lambda x: dnn.lp_normalize(x, determinism="batch_invariant"))
    for start, size in ((0, 1), (3, 5), (16, 17)):
        np.testing.assert_array_equal(run(x[start : start + size]), run(x)[start : start + size])


@pytest.mark.parametrize("p", [126.0, 127.0, 1000.0, 1e6])
def test_lp_normalize_of_a_large_p(p: float) -> None:
    x = jnp.array([[1.0, 0.5], [-0.75, 0.75], [0.501, -0.5]], jnp.float32)
    wide = np.asarray(x, np.float64)
    error = cases_local.vector_error(wide, p, -1, 1e-12, "float32")
    run = jax.jit(ft.partial(dnn.lp_normalize, p=p))
    agree(run(x), reference.lp_normalize(np.asarray(x), p=p), error)
    slope = jax.jit(jax.grad(lambda x: run(x)[1]))(jnp.array([1.0, 0.5], jnp.float32))
    np.testing.assert_array_equal(slope, [-0.5, 1.0])


@pytest.mark.parametrize("op", ["divisive_norm", "divisive_norm_dgrad"])
def test_means_that_are_a_product_are_rounded_before_they_are_subtracted(op: str) -> None:
    """At mesh_invariant, whatever stands around the op: XLA would fuse the product into the subtraction."""
    rng = np.random.default_rng(0)
    x, dy, a, b = (rng.normal(size=(2, 7, 9, 8)).astype(np.float32) for _ in range(4))
    arrays = (dy, x) if op.endswith("dgrad") else (x,)

    def run(means: Any, *arrays: Any) -> Any:
        return getattr(dnn, op)(*arrays, means=means, lrn_alpha=0.7, determinism="mesh_invariant")

    alone = jax.jit(run)(a * b, *arrays)
    within = jax.jit(lambda a, b, *arrays: run(a * b, *arrays))(a, b, *arrays)
    jax.tree.map(np.testing.assert_array_equal, alone, within)
