"""The blends of batch normalisation: alpha computed + beta prior, forward and of all three gradients."""

import functools as ft
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.activation.bounds import Epilogue
from jaxdnn._src.cases.case import generator
from jaxdnn._src.core import engines, tolerance
from jaxdnn._src.norm import bounds as norm_bounds
from jaxdnn._src.norm import cases as family
from tests.norm import cases
from tests.norm.cases import CASES, agree

BF16 = np.dtype(ml_dtypes.bfloat16)
NAMES = ("batch-NHWC", "batch-NCHW", "batch-NCHWc3", "activation-CHWN")
FACTORS: dict[str, Any] = dict(family.BLENDS["blend"])
PRIORS = ("prior", "prior_dscale", "prior_dbias")


def problem(name: str, dtype: Any) -> tuple[Any, tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """The case, its arrays (x, scale, bias, dy), and priors."""
    norm = CASES[name]
    x, s, b, dy = norm.arrays(21, dtype)
    return norm, (x, s, b, dy), {"prior": x[::-1] * 3, "prior_dscale": s[::-1].copy(), "prior_dbias": b * 2}


def factor(value: float, dtype: Any, traced: bool) -> Any:
    return jnp.asarray(value, np.float64 if dtype == np.float64 else np.float32) if traced else value


def check_gradients(name: str, dtype: Any, traced: bool, relu: bool) -> None:
    """dx, dscale and dbias within the bound of the blend's rule over that of the gradients."""
    norm, (x, s, b, dy), priors = problem(name, dtype)
    acc = np.float64 if dtype == np.float64 else np.float32
    behind = {"y": reference.batch_norm(x, scale=s, bias=b, out_dtype=dtype, **norm.keywords)[0]} if relu else {}
    factors = {k: factor(v, dtype, traced) for k, v in FACTORS.items()}
    # Traced factors have the accumulator's precision, and the definition gets what they then are.
    stored = {k: float(np.asarray(v)) for k, v in factors.items()}
    run = jax.jit(lambda f, p: norm.gradients(dnn, dy, x, s, **f, **p, **behind)) if traced else None
    given = {**factors, **priors, **behind}
    found = run(factors, priors) if run else norm.gradients(dnn, dy, x, s, **given)
    wanted = norm.gradients(reference, dy, x, s, **stored, **priors, **behind)
    masked = np.where(behind["y"] > 0, dy, np.zeros_like(dy)) if relu else dy
    p = norm.problem(x, s, b)
    seen = cases.in_view(norm, masked, p.x.shape)
    bounds = norm_bounds.from_definition(p, seen)
    values = [value for value, _ in norm_bounds.backward(p, seen)]
    for i, (what, dtype_) in enumerate((("dx", dtype), ("dscale", acc), ("dbias", acc))):
        suffix = "_param" if i else ""
        prior = priors[PRIORS[i]]
        like = prior.astype(np.float64).reshape(values[i].shape) if i else cases.in_view(norm, prior, p.x.shape)
        rule = Epilogue(stored["alpha" + suffix], stored["beta" + suffix], format=p.format)
        error = rule.error(values[i], bounds[i], prior=like) * (1 + norm_bounds.definition_share(p.format))
        error = error.reshape(wanted[i].shape) if i else cases.as_given(norm, x, error)
        agree(found[i], wanted[i], error, dtype_, what)
    if relu:
        np.testing.assert_array_equal(found[3], masked)


@pytest.mark.parametrize("relu", [False, True], ids=["plain", "relu"])
@pytest.mark.parametrize("traced", [False, True], ids=["numbers", "arrays"])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str, dtype: np.dtype, traced: bool, relu: bool):
    check_gradients(name, dtype, traced, relu)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("traced", [False, True], ids=["numbers", "arrays"])
def test_gradients_in_float64(traced: bool):
    check_gradients("batch-NHWC", np.dtype(np.float64), traced, False)


@pytest.mark.parametrize("name", NAMES[:2])
def test_blends_are_converted_once(name: str):
    """1 + 2⁻⁹ is a tie of bfloat16: dx that is rounded before 2⁻¹² is added would give 1."""
    norm, (x, s, _, dy), _ = problem(name, BF16)
    dx = np.asarray(norm.gradients(dnn, dy, x, s, out_dtype=jnp.float32)[0])
    prior = (np.float32(1) + np.float32(2.0**-9) - dx).astype(np.float32)
    exact = dx.astype(np.float64) + prior  # prior is rounded; what matters is what is added
    found = norm.gradients(dnn, dy, x, s, prior=prior, beta=1.0)[0]
    wanted = (dx + prior).astype(np.float32).astype(BF16)
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted.astype(np.float32))
    early = (dx.astype(BF16).astype(np.float32) + prior).astype(BF16)
    assert (early.astype(np.float64) != wanted.astype(np.float64)).any()
    assert np.abs(exact - 1 - 2.0**-9).max() < 2.0**-20


@pytest.mark.parametrize("traced", [False, True], ids=["numbers", "arrays"])
def test_priors_are_not_read_where_beta_is_zero(traced: bool):
    norm, (x, s, _, dy), priors = problem("batch-NCHW", np.float32)
    nan = {k: np.full_like(v, np.nan) for k, v in priors.items()}
    zero, half = factor(0.0, np.float32, traced), factor(0.5, np.float32, traced)
    plain = norm.gradients(dnn, dy, x, s)
    same = norm.gradients(dnn, dy, x, s, beta=zero, beta_param=zero, **nan)
    halved = norm.gradients(dnn, dy, x, s, alpha=half, beta=zero, alpha_param=half, beta_param=zero, **nan)
    for computed, found, scaled in zip(plain, same, halved, strict=True):
        # Other programs: at no level XLA may add a sum's terms in another order.
        off = 2.0**-21 * np.abs(computed).max()
        np.testing.assert_allclose(found, computed, rtol=0, atol=off)
        np.testing.assert_allclose(scaled, 0.5 * computed, rtol=0, atol=off)
    read = norm.gradients(dnn, dy, x, s, beta=half, beta_param=half, **nan)
    assert all(np.isnan(np.asarray(v)).all() for v in read)


@pytest.mark.parametrize("which", range(3))
def test_a_nan_prior_stays_in_its_own_gradient(which: int):
    norm, (x, s, _, dy), priors = problem("batch-NHWC", np.float32)
    priors[PRIORS[which]] = np.full_like(priors[PRIORS[which]], np.nan)
    found = norm.gradients(dnn, dy, x, s, **FACTORS, **priors)
    assert [bool(np.isnan(np.asarray(v)).all()) for v in found] == [i == which for i in range(3)]
    assert [bool(np.isnan(np.asarray(v)).any()) for v in found] == [i == which for i in range(3)]


@pytest.mark.usefixtures("x64")
def test_derivatives_of_a_blend():
    """It is linear in its parts: with powers of two as factors every derivative is one of the plain op's, exactly."""
    norm, (x, s, _, dy), priors = problem("batch-NHWC", np.float64)
    factors = {"alpha": 0.5, "beta": -2.0, "alpha_param": 4.0, "beta_param": 0.25}
    cotangents = tuple(map(jnp.asarray, (dy[::-1], s * 2, s + 1)))
    plain, pull = jax.vjp(lambda dy, x, s: norm.gradients(dnn, dy, x, s), *map(jnp.asarray, (dy, x, s)))
    blended = lambda dy, x, s, f, p: norm.gradients(dnn, dy, x, s, **f, **p)
    traced = {k: jnp.asarray(v) for k, v in factors.items()}
    *own, of_factors, of_priors = jax.vjp(blended, *map(jnp.asarray, (dy, x, s)), traced, priors)[1](cotangents)
    alphas, betas = ((factors[k], factors[f"{k}_param"], factors[f"{k}_param"]) for k in ("alpha", "beta"))
    for ours, theirs in zip(own, pull(tuple(a * c for a, c in zip(alphas, cotangents, strict=True))), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name, beta, c in zip(PRIORS, betas, cotangents, strict=True):
        np.testing.assert_array_equal(of_priors[name], beta * c)
    sums = {"alpha": [(plain[0], cotangents[0])], "beta": [(priors["prior"], cotangents[0])]}
    sums["alpha_param"] = list(zip(plain[1:], cotangents[1:], strict=True))
    sums["beta_param"] = [(priors[name], c) for name, c in zip(PRIORS[1:], cotangents[1:], strict=True)]
    for name, pairs in sums.items():
        terms = np.concatenate([(np.asarray(v) * np.asarray(c)).astype(np.float64).ravel() for v, c in pairs])
        bound = 2 * (len(terms) + 1) * 2.0**-53 * np.abs(terms).sum()  # ours and this sum, in any order
        assert abs(float(of_factors[name]) - terms.sum()) <= bound, name
    jvp = jax.jvp(ft.partial(blended, jnp.asarray(dy), jnp.asarray(x), jnp.asarray(s), traced), (priors,), (priors,))[1]
    for tangent, name, beta in zip(jvp, PRIORS, betas, strict=True):
        np.testing.assert_array_equal(tangent, beta * priors[name])


def test_vmap_over_priors_and_factors():
    norm, (x, s, _, dy), priors = problem("batch-NCHW", np.float32)
    many = {k: np.stack([v, 2 * v, v - 1]) for k, v in priors.items()}
    betas = jnp.array([0.5, 0.0, -1.5])
    run = lambda b, p, dy: norm.gradients(dnn, dy, x, s, beta=b, beta_param=b, **p)
    mapped = jax.vmap(run, (0, 0, None))(betas, many, dy)
    alone = [run(betas[i], {k: v[i] for k, v in many.items()}, dy) for i in range(3)]
    every = jax.vmap(run)(betas, many, np.stack([dy] * 3))
    p = norm.problem(x, s, s)
    bounds = norm_bounds.from_definition(p, cases.in_view(norm, dy, p.x.shape))
    for *others, wanted, error, name in zip(zip(*alone, strict=True), every, mapped, bounds, PRIORS, strict=True):
        # Two routes to a gradient, each behind a product and a sum.
        blended = 4 * 2.0**-24 * (np.abs(np.asarray(wanted)) + np.abs(1.5 * many[name])).max()
        for found in others:
            assert np.abs(np.asarray(found) - np.asarray(wanted)).max() <= 2 * float(error.max()) + blended


def test_priors_are_added_once_over_a_mesh():
    """Eight devices: with integers and no scale dbias is exact; each device's prior of dx is its own."""
    rng = np.random.default_rng(22)
    x = rng.normal(size=(16, 3, 2, 5)).astype(np.float32)
    dy = rng.integers(-4, 5, x.shape).astype(np.float32)
    prior, of_scale, of_bias = (rng.integers(-9, 10, s).astype(np.float32) for s in (x.shape, 5, 5))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    across, alike = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()

    def run(dy: Any, x: Any, prior: Any, of_scale: Any, of_bias: Any, **o: Any) -> Any:
        priors = {"prior": prior, "prior_dscale": of_scale, "prior_dbias": of_bias}
        return dnn.batch_norm_dgrad(dy, x, axis_name="d", beta=0.5, beta_param=2.0, **priors, **o)

    specs = (across, across, across, alike, alike)
    spread = ft.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=(across, alike, alike))
    blended = jax.jit(spread(run))(dy, x, prior, of_scale, of_bias)
    none = jax.jit(spread(run))(dy, x, 0 * prior, 0 * of_scale, 0 * of_bias)
    np.testing.assert_array_equal(blended[2], dy.sum((0, 1, 2)) + 2 * of_bias)
    np.testing.assert_array_equal(blended[0], none[0] + 0.5 * prior)
    np.testing.assert_array_equal(blended[1], none[1] + 2 * of_scale)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("op", ["batch_norm", "batch_norm_dgrad"])
def test_what_verify_runs(op: str, dtype: str):
    """Every variant with a blend, on every kind of data."""
    accumulation = tolerance.Accumulation(format="float64" if dtype == "f64" else "float32")
    found = [c for c in family.FAMILY.cases(op, "xla", "full", 0) if c.dtype == dtype and c.factors]
    assert {c.variant.rpartition("-")[2] for c in found} == set(family.BLENDS)
    for case in found:
        function = jax.jit(case.function())
        for kind in case.kinds():
            operands = case.operands(kind, generator(case, kind, 0))
            results = jax.tree.leaves(function(*operands))
            for out, wanted in zip(results, case.expected(kind, operands, accumulation), strict=True):
                agree(out, wanted.value, wanted.error, wanted.dtype, f"{case.id} {kind} {wanted.name}")


ACTIVATIONS: tuple[Any, ...] = ("relu", ("leaky_relu", 0.25), "clipped_relu", "swish", "gelu")


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_an_activation_keeps_nothing_wider_than_the_array(activation: Any, residual: bool):
    """For its derivative: x, and y or a slope, both of x's dtype. Relu and swish right behind need x alone."""
    x = jnp.zeros((3, 6, 5, 8), jnp.bfloat16)
    fused: dict[str, Any] = {"residual": jnp.ones_like(x) if residual else None, "activation": activation}
    back = jax.eval_shape(lambda x: jax.vjp(lambda x: dnn.batch_norm(x, **fused)[0], x)[1], x)
    large = [leaf for leaf in jax.tree.leaves(back) if getattr(leaf, "size", 0) == x.size]
    assert [np.dtype(leaf.dtype) for leaf in large] == [BF16] * (
        1 if activation in ("relu", "swish") and not residual else 2
    )


@pytest.mark.parametrize("engine", ["xla", "hopper"])
def test_behind_a_residual_y_and_its_gradient_are_stored_once(engine: str, monkeypatch: pytest.MonkeyPatch):
    """Without barriers XLA computes y again for the next residual, and writes the gradient twice, for both its uses."""
    if engine == "hopper" and (reason := hopper.unavailable()):
        pytest.skip(reason)
    monkeypatch.setattr(engines, "device_kind", lambda platform: hopper.MEASURED_ON[0])
    x = jax.ShapeDtypeStruct((32, 28, 28, 64), jnp.bfloat16)
    norm = lambda x, z: dnn.batch_norm(x, residual=z, activation="relu", engine=engine)[0]
    step = lambda x, z, dy: jax.vjp(norm, x, z)[1](dy)
    text = jax.jit(step).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    stored = re.findall(r"(%\w+) = stablehlo.optimization_barrier %\w+ : tensor<32x28x28x64xbf16>", text)
    # And hopper's pass over x reads the gradient that its kernel reads.
    assert len(stored) == {"xla": 2, "hopper": 3}[engine]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("traced", [False, True], ids=["number", "traced"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_factor_is_not_of_the_residual(dtype: Any, traced: bool):
    """To NumPy the dtype float64 equals None, by which the epilogue says that its gradient has no narrower dtype."""
    _, (x, _, _, z), _ = problem("batch-NHWC", dtype)
    extras: dict[str, Any] = {"residual": z, "activation": "relu"}
    run = lambda alpha: dnn.batch_norm(x, alpha=alpha, **extras)[0]
    found = jax.jit(run)(factor(3.0, dtype, traced)) if traced else run(3.0)
    wanted = reference.batch_norm(x, alpha=3.0, **extras)[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=100 * np.finfo(dtype).eps)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("name", ["batch-NHWC", "activation-CHWN"])
def test_gradients_through_relu_are_those_of_the_backward_op(name: str, dtype: np.dtype, residual: bool):
    """Bit for bit: relu's slope is 0 or 1, so its product with the gradient is rounded nowhere."""
    norm, (x, s, b, dy), _ = problem(name, dtype)
    z = jnp.asarray(dy[::-1]) if residual else None

    def forward(x: Any, s: Any, b: Any, z: Any) -> Any:
        y, *saved = dnn.batch_norm(x, scale=s, bias=b, residual=z, activation="relu", **norm.keywords)[:3]
        return y, saved

    y, back, (mean, rstd) = jax.vjp(forward, *map(jnp.asarray, (x, s, b)), z, has_aux=True)
    named = dnn.batch_norm_dgrad(dy, x, scale=s, mean=mean, rstd=rstd, y=y, **norm.keywords)
    assert y.dtype == dtype
    for ours, theirs in zip(jax.tree.leaves(back(jnp.asarray(dy))), named if residual else named[:3], strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs).astype(ours.dtype))


@pytest.mark.parametrize("alpha", [1e5, 1e-4])
def test_a_factor_takes_no_gradient_out_of_its_range(alpha: float):
    """In float16 alpha dy may be infinite or subnormal where dx is neither."""
    x = jnp.asarray(np.random.default_rng(3).standard_normal((4, 5, 6, 8)), jnp.float16)
    scale = jnp.full(8, 1e-3 if alpha > 1 else 1e3, jnp.float32)

    @jax.jit
    def gradient(x: jax.Array) -> jax.Array:
        weigh = jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
        return jax.grad(lambda x: jnp.sum(weigh * dnn.batch_norm(x, scale=scale, alpha=alpha)[0].astype(jnp.float32)))(
            x
        )

    wanted = np.asarray(gradient(x.astype(jnp.float32)))
    np.testing.assert_allclose(gradient(x).astype(jnp.float32), wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())
