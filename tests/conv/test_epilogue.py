"""y = act(alpha c + beta prior + residual + bias), on the accumulator, converted once; and its gradients."""

import functools as ft
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.activation.formulas import ACTIVATIONS
from tests.conv import cases, helpers
from tests.conv.cases import Geometry

BF16 = ml_dtypes.bfloat16
SMALL = Geometry(2, (7, 5), 3, 4, (2, 1), stride=(2, 1), padding=((1, 0), (0, 1)), groups=1)
FULL: dict[str, Any] = {"alpha": 0.75, "beta": -0.3, "prior": True, "residual": True, "bias": True}
OPERANDS = ("prior", "residual", "bias")
each_dtype = pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16], ids=lambda d: np.dtype(d).name)
each_activation = pytest.mark.parametrize("activation", helpers.ACTIVATIONS, ids=str)


# ---- values ----------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("op", ["conv", "conv_transpose"])
def test_every_activation_on_everything(op: str, dtype: Any):
    plain = cases.case(op, SMALL, 1, dtype=dtype)
    helpers.check_all(plain.with_epilogue(i, activation=a, **FULL) for i, a in enumerate(helpers.ACTIVATIONS))


@pytest.mark.usefixtures("x64")
def test_every_activation_in_float64():
    plain = cases.case("conv", SMALL, 2, dtype=np.float64)
    helpers.check_all(plain.with_epilogue(i, activation=a, **FULL) for i, a in enumerate(helpers.ACTIVATIONS))


def test_all_activations_are_tested():
    named = {a[0] if isinstance(a, tuple) else a for a in helpers.ACTIVATIONS}
    assert named == {None, *ACTIVATIONS}


def test_every_combination_of_operands():
    plain = cases.case("conv", cases.GROUPED, 3)
    many = []
    for given in itertools.chain.from_iterable(itertools.combinations(OPERANDS, n) for n in range(4)):
        options: dict[str, Any] = dict.fromkeys(given, True) | ({"beta": 1.5} if "prior" in given else {})
        many.append(plain.with_epilogue(4, **options))
    helpers.check_all(many)


SCALES = np.asarray([0.5, -2.0, 0.25, 1.0, 3.0, -1.5], np.float32)


@pytest.mark.parametrize("layout", ["NCW", "CWN", "NWC", "NCWc2"])
@pytest.mark.parametrize("op", ["conv", "conv_transpose"])
def test_a_scale_for_each_channel(op: str, layout: str):
    """On whole numbers, so that it is exact."""
    case = cases.case(op, Geometry(3, (7,), 4, 6, (2,), layout=layout), 5, integers=3)
    case = case.with_epilogue(5, bias=True, prior=True, beta=0.5, integers=4)
    case = case.with_options(alpha=SCALES[: case.result_channels])
    found = jax.jit(lambda *arrays: helpers.call(case, *arrays))(*cases.as_jax(case))
    np.testing.assert_array_equal(found, getattr(reference, op)(*case.arrays, *case.static, **case.arguments))


def test_derivatives_of_a_scale_for_each_channel():
    """In the scale the sum of its channel, in x and w those of a filter that is scaled."""
    x, w = cases.case("conv", Geometry(3, (7,), 4, 6, (2,), layout="NWC"), 5).arrays
    gradients = jax.jit(jax.grad(lambda x, w, s: (dnn.conv(x, w, alpha=s, layout="NWC") ** 2).sum(), (0, 1, 2)))
    scaled = jax.jit(jax.grad(lambda x, w, s: (dnn.conv(x, w * s, layout="NWC") ** 2).sum(), (0, 1, 2)))
    for ours, wanted in zip(gradients(x, w, SCALES), scaled(x, w, SCALES[None, None]), strict=True):
        np.testing.assert_allclose(ours, wanted.reshape(ours.shape), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "out", "level"),
    [(np.int8, np.int8, "run_to_run"), (np.int8, np.float32, "run_to_run"), (BF16, BF16, "mesh_invariant")],
)
def test_bits_of_a_scale_for_each_channel(dtype: Any, out: Any, level: str):
    """As the definition has them: of integers because sums are exact and products are rounded, of others by level."""
    case = cases.case("conv", SMALL, 6, dtype=dtype).with_epilogue(6, dtype=np.float32, bias=True, activation="relu")
    options = {**case.arguments, "alpha": SCALES[:4] / 70, "out_dtype": out}
    wanted = reference.conv(*case.arrays, **options, arithmetic="ordered")
    assert len(np.unique(wanted)) > 20
    found = jax.jit(lambda x, w: dnn.conv(x, w, **options, determinism=level))(*case.arrays)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("layout", ["NCW", "CWN", "NWC", "NCWc2"])
def test_bias_lies_along_the_channels(layout: str):
    g = Geometry(3, (7,), 4, 6, (2,), layout=layout)
    helpers.check_all(cases.case(op, g, 5).with_epilogue(5, **FULL) for op in ("conv", "conv_transpose"))


@pytest.mark.parametrize("op", cases.OPS)
def test_blend_of_every_op(op: str):
    plain = cases.case(op, cases.PLAIN, 6)
    scales = [(1.0, 1.0), (-0.5, 0.25), (0.0, 1.0), (2.0, 0.0), (0, 0), (1, 2)]
    helpers.check_all(plain.with_epilogue(i, alpha=a, beta=b, prior=True) for i, (a, b) in enumerate(scales))


@pytest.mark.parametrize("op", cases.OPS)
@pytest.mark.parametrize("traced", [False, True])
def test_prior_is_not_read_where_beta_is_zero(op: str, traced: bool):
    case = cases.case(op, cases.PLAIN, 7, integers=3)
    nan = np.full(case.result_shape, np.nan, np.float32)

    def run(beta: Any) -> jax.Array:
        return helpers.call(case.with_options(alpha=0.5, beta=beta, prior=nan))

    out = jax.jit(run)(jnp.zeros(())) if traced else run(0.0)
    np.testing.assert_array_equal(out, helpers.call(case.with_options(alpha=0.5)))
    assert np.isnan(run(1e-30)).all()


@pytest.mark.parametrize("op", cases.OPS)
def test_traced_scales_give_what_static_ones_give(op: str):
    case = cases.case(op, cases.GROUPED, 8).with_epilogue(8, alpha=0.75, beta=-0.5, prior=True)
    rest = {k: v for k, v in case.options.items() if k not in ("alpha", "beta")}

    @jax.jit
    def run(alpha: jax.Array, beta: jax.Array) -> jax.Array:
        return getattr(dnn, op)(*case.arrays, *case.static, **rest, **case.named, alpha=alpha, beta=beta)

    helpers.check(case, run(jnp.float32(0.75), jnp.float32(-0.5)))
    helpers.check(case, run(jnp.bfloat16(0.75), jnp.bfloat16(-0.5)))
    helpers.check(case, run(0.75, -0.5))


def test_operands_may_have_the_dtype_of_input_result_or_accumulator():
    plain = cases.case("conv", SMALL, 9, dtype=BF16)
    many = [
        plain.with_options(out_dtype="float16").with_epilogue(9, dtype=d, **FULL)
        for d in (BF16, np.float16, np.float32)
    ]
    helpers.check_all(many)
    with pytest.raises(
        TypeError, match="`prior` must have one of the dtypes bfloat16, float16, float32, got float8_e5m2"
    ):
        helpers.call(plain.with_options(out_dtype="float16").with_epilogue(9, dtype=ml_dtypes.float8_e5m2, **FULL))


def scalar(value: float, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.full((1, 1, 1), value, dtype)


def test_the_sum_is_not_rounded_before_bias_residual_and_prior():
    """Rounded to bfloat16 first, (1 + 3/128)^2 is 1 + 6/128, and 6/128 after subtracting 1: some 1 % too small."""
    x = w = scalar(1 + 3 / 128)
    exact = (1 + 3 / 128) ** 2 - 1
    rounded = float(jnp.bfloat16((1 + 3 / 128) ** 2)) - 1
    assert float(jnp.bfloat16(exact)) != rounded
    minus = scalar(-1)
    options: dict[str, Any] = {"layout": "NWC"}
    extras: list[dict[str, Any]] = [{"bias": minus.ravel()}, {"residual": minus}, {"prior": minus, "beta": 1.0}]
    for extra in extras:
        assert dnn.conv(x, w, **options, **extra).item() == float(jnp.bfloat16(exact))
        beta = {"beta": jnp.ones(())} if "beta" in extra else {}
        assert dnn.conv(x, w, **options, **{**extra, "alpha": jnp.ones(()), **beta}).item() == float(
            jnp.bfloat16(exact)
        )


def test_the_activation_comes_last_and_before_rounding():
    x, w = scalar(3, jnp.float32), scalar(1, jnp.float32)
    y = dnn.conv(
        x, w, layout="NWC", alpha=2.0, bias=jnp.array([-7.0]), residual=scalar(-1, jnp.float32), activation="relu"
    )
    assert y.item() == 0
    y = dnn.conv(x, w, layout="NWC", alpha=2.0, bias=jnp.array([-4.0]), activation=("clipped_relu", 1.0))
    assert y.item() == 1
    z = (1 + 5 / 128) ** 2
    y = dnn.conv(scalar(1 + 5 / 128), scalar(1 + 5 / 128), layout="NWC", activation=("swish", 8.0))
    assert y.item() == float(jnp.bfloat16(z / (1 + np.exp(-8 * z))))


@pytest.mark.parametrize("out", ["int8", "int32", "float32"])
def test_integer_epilogue_is_exact(out: str):
    plain = cases.case("conv", SMALL, 10, dtype=np.int8).with_options(out_dtype=out)
    many = [
        plain.with_epilogue(10, dtype=np.int32, bias=True, residual=True),
        plain.with_epilogue(11, dtype=np.int32, bias=True, activation="relu"),
        plain.with_epilogue(12, dtype=np.int32, beta=1, prior=True, residual=True),
        plain.with_epilogue(13, dtype=np.int8, residual=True),
    ]
    for case, found in zip(many, helpers.compute_all(many), strict=True):
        golden = np.asarray(reference.conv(*case.arrays, **case.arguments))
        np.testing.assert_array_equal(np.asarray(found), golden, err_msg=str(case))


@pytest.mark.parametrize("out", ["int8", "float32", "bfloat16"])
def test_integers_with_a_float_epilogue(out: str):
    plain = cases.case("conv", SMALL, 14, dtype=np.int8, integers=20).with_options(out_dtype=out)
    scaled = {"alpha": 0.01, "bias": True, "residual": True}
    activations = [None, "relu", "gelu", ("clipped_relu", 2.5)]
    helpers.check_all(plain.with_epilogue(15, dtype=np.float32, activation=a, **scaled) for a in activations)


# ---- gradients -------------------------------------------------------------------------------------------------------


def arguments(seed: int, **options: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A float64 case with everything, and all its differentiable arguments by name."""
    case = cases.case("conv", SMALL, seed, dtype=np.float64).with_epilogue(seed, **FULL, **options)
    x, w = case.arrays
    return case, {"x": x, "w": w, **case.named, "alpha": np.array(0.75), "beta": np.array(-0.3)}


def ours(case: Any, given: dict[str, Any]) -> jax.Array:
    rest = {k: v for k, v in case.options.items() if k not in ("alpha", "beta")}
    return dnn.conv(given["x"], given["w"], **rest, **{k: v for k, v in given.items() if k not in "xw"})


def definition(case: Any, given: dict[str, Any]) -> np.ndarray:
    rest = {k: v for k, v in case.options.items() if k not in ("alpha", "beta")}
    return reference.conv(given["x"], given["w"], **rest, **{k: v for k, v in given.items() if k not in "xw"})


def finite_difference(case: Any, given: dict[str, Any], along: dict[str, Any], dy: np.ndarray) -> tuple[float, float]:
    """d/dt <definition(given + t along), dy> at t = 0 by the five-point rule, and an estimate of its error.

    The estimate is what halving the step changes, 16 times what is left after it, and the noise of the values.
    """

    def at(t: float) -> Any:
        return np.vdot(np.asarray(definition(case, {k: v + t * along[k] for k, v in given.items()}), np.longdouble), dy)

    def rule(h: float) -> Any:
        return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)

    h = 2.0**-9
    coarse, fine = rule(h), rule(h / 2)
    noise = 3 * 2.0**-52 * np.abs(definition(case, given) * dy).sum() / (h / 2)
    return float(fine), float(abs(coarse - fine) + noise)


@each_activation
@pytest.mark.usefixtures("x64")
def test_gradients_against_finite_differences_of_the_definition(activation: Any):
    """Along a random direction in all arguments at once, the scales included, and along each alone."""
    case, given = arguments(20, activation=activation)
    rng = np.random.default_rng(21)
    dy = rng.standard_normal(case.result_shape)
    directions = {k: rng.standard_normal(v.shape) for k, v in given.items()}
    # Finite differences are no guide at a kink: the data move away from it, and a gap of 2^-7 holds the steps.
    z = np.asarray(reference.conv(*case.arrays, **{**case.arguments, "activation": None}), np.float64)
    kinks = {"relu": (0,), "elu": (0,), "leaky_relu": (0,), "clipped_relu": (0, 1.5)}
    for kink in kinks.get(activation[0] if isinstance(activation, tuple) else activation, ()):
        close = np.abs(z - kink) < 2.0**-4
        given["residual"] = given["residual"] + np.where(close, 2.0**-3, 0.0)
    gradient = jax.jit(jax.grad(lambda g: jnp.vdot(ours(case, g), dy)))(given)
    for chosen in (tuple(given), *((name,) for name in given)):
        along = {k: v if k in chosen else np.zeros_like(v) for k, v in directions.items()}
        scale = 1 / max(np.abs(v).max() for v in along.values())
        along = {k: v * scale / 8 for k, v in along.items()}
        expected, error = finite_difference(case, given, along, dy)
        found = sum(float(np.vdot(gradient[k], along[k])) for k in given)
        assert abs(found - expected) <= 4 * error + 1e-12 * abs(expected), (chosen, found, expected, error)


@each_activation
@pytest.mark.usefixtures("x64")
def test_gradients_against_the_definition_of_the_backward_ops(activation: Any):
    """dz = dy act'(z), then the reference's backward data, filter and bias; also where z sits on a kink."""
    case, given = arguments(22, activation=activation)
    g = case.geometry
    dy = np.random.default_rng(23).standard_normal(case.result_shape)
    z = definition(case.with_options(activation=None), given)
    at_kinks = np.random.default_rng(24).choice([0.0, 1.5, np.nan], z.shape, p=[0.2, 0.2, 0.6])
    given["residual"] = given["residual"] + np.where(np.isnan(at_kinks), 0, at_kinks - np.asarray(z, np.float64))
    gradient = jax.grad(lambda v: jnp.vdot(ours(case, v), dy))(given)
    # The sum that ours sees, on a kink to the last bit or on one side of it: the definition's derivative is of that.
    z = np.asarray(ours(case.with_options(activation=None), given))
    dz = dy * reference.derivative(z, activation)
    c = reference.conv(given["x"], given["w"], **g.options())
    options = {**g.options(), "alpha": 0.75}
    expected = {
        "x": reference.conv_dgrad(dz, given["w"], g.shape("x"), **options),
        "w": reference.conv_wgrad(given["x"], dz, g.shape("w"), **options),
        "bias": reference.conv_bgrad(dz),
        "residual": dz,
        "prior": -0.3 * dz,
        "alpha": np.vdot(np.asarray(c, np.float64), dz),
        "beta": np.vdot(given["prior"], dz),
    }
    for name, value in expected.items():
        value = np.asarray(value, np.float64)
        # Sums of at most 2^8 terms below 2^8 in float64, act' included; what is looked for is far larger.
        np.testing.assert_allclose(gradient[name], value, rtol=0, atol=2.0**-36, err_msg=name)


@pytest.mark.parametrize("activation", ["relu", "elu", ("leaky_relu", 0.25), ("clipped_relu", 1.5)], ids=str)
def test_derivative_at_a_kink_is_that_of_the_side_stated(activation: Any):
    x = jnp.array([-1.0, 0.0, 1.0, 1.5, 2.0]).reshape(1, 5, 1)
    w = jnp.ones((1, 1, 1))
    op = jax.jit(ft.partial(dnn.conv, layout="NWC", activation=activation))
    slopes = np.ravel(jax.jit(jax.grad(lambda v: op(v, w).sum()))(x))
    _, tangent = jax.jvp(lambda v: op(v, w), (x,), (jnp.ones_like(x),))
    expected = reference.derivative(np.asarray(x, np.float64), activation).ravel()
    np.testing.assert_allclose(slopes, expected, rtol=2.0**-22)
    np.testing.assert_array_equal(tangent.ravel(), slopes)
    at_zero = {"relu": 0, "elu": 1, "leaky_relu": 0.25, "clipped_relu": 0}
    assert slopes[1] == at_zero[activation if isinstance(activation, str) else activation[0]]


@each_dtype
def test_gradients_have_the_dtype_of_what_they_are_of(dtype: Any):
    case = cases.case("conv", SMALL, 25, dtype=dtype).with_options(out_dtype="float32")
    case = case.with_epilogue(25, dtype=np.float32, **FULL, activation="gelu")
    given = {
        "x": case.arrays[0],
        "w": case.arrays[1],
        **case.named,
        "alpha": np.float32(0.5),
        "beta": jnp.bfloat16(0.5),
    }
    given = {k: jnp.asarray(v) for k, v in given.items()}
    gradient = jax.jit(jax.grad(lambda v: ours(case, v).sum()))(given)
    for name, value in given.items():
        assert (gradient[name].dtype, gradient[name].shape) == (value.dtype, value.shape), name


def test_gradient_of_a_prior_that_is_not_read_is_zero():
    case = cases.case("conv", SMALL, 26)
    prior = jnp.full(case.result_shape, jnp.nan)

    def loss(p: jax.Array, beta: Any) -> jax.Array:
        return dnn.conv(*case.arrays, **case.options, beta=beta, prior=p).sum()

    assert not np.any(jax.grad(loss)(prior, 0.0))
    assert not np.any(jax.jit(jax.grad(loss))(prior, jnp.zeros(())))


@pytest.mark.parametrize("beta", [0.0, -0.5])
def test_gradient_in_beta_is_the_prior_also_at_zero(beta: float):
    """Unread where beta is zero, it is still what a change of beta would add: the difference quotient says so too."""
    case = cases.case("conv", SMALL, 30, integers=3)
    prior, dy = (
        jnp.asarray(np.random.default_rng(s).integers(-3, 4, case.result_shape), jnp.float32) for s in (31, 32)
    )

    @jax.jit
    def loss(b: jax.Array, p: jax.Array) -> jax.Array:
        return jnp.vdot(dnn.conv(*case.arrays, **case.options, beta=b, prior=p), dy)

    at = jnp.float32(beta)
    d_beta, d_prior = jax.jit(jax.grad(loss, (0, 1)))(at, prior)
    assert float(d_beta) == float(loss(at + 0.5, prior) - loss(at - 0.5, prior)) != 0
    np.testing.assert_array_equal(d_prior, beta * dy)
    by_beta, by_prior = jax.jit(jax.jacfwd(jax.grad(loss), (0, 1)))(at, prior)
    np.testing.assert_array_equal(by_beta, 0)
    np.testing.assert_array_equal(by_prior, dy)
    nan = jnp.full_like(prior, jnp.nan)
    _, tangent = jax.jvp(lambda p: loss(at, p), (nan,), (dy,))
    assert float(tangent) == beta * float(jnp.vdot(dy, dy))
    several = jax.vmap(lambda b: loss(b, nan))(jnp.array([0.0, 1.0]))
    np.testing.assert_array_equal(np.isnan(several), [False, True])


def test_gradients_of_a_float_epilogue_on_integers():
    """int8 operands have no gradient, but bias, residual and scales do; z must not be rounded on the way."""
    plain = cases.case("conv", SMALL, 27, dtype=np.int8, integers=10)
    bias = jnp.array([0.3, -0.2, 0.6, 0.1])
    c = np.asarray(reference.conv(*plain.arrays, **plain.options), np.float64)
    for activation in (None, "relu", "gelu", "tanh"):

        def loss(b: jax.Array, alpha: Any, activation: Any = activation) -> jax.Array:
            options = {"out_dtype": "float32", "activation": activation, **plain.options}
            return dnn.conv(*plain.arrays, bias=b, alpha=alpha, **options).sum()

        slope = reference.derivative(0.03125 * c + np.asarray(bias, np.float64), activation)
        number, array = jax.grad(ft.partial(loss, alpha=0.03125)), jax.grad(loss)
        for found in (jax.jit(number)(bias), jax.jit(array)(bias, jnp.float32(0.03125))):
            np.testing.assert_allclose(found, slope.sum((0, 1, 2)), rtol=2.0**-16)


@each_activation
@pytest.mark.usefixtures("x64")
def test_second_derivatives(activation: Any):
    """Forward over reverse equals a difference quotient of our gradient, whose first order is checked above."""
    case, given = arguments(28, activation=activation)
    x, w = given["x"], given["w"]
    given["residual"] = given["residual"] + 0.0625  # off the kinks
    rng = np.random.default_rng(29)
    t, dy = rng.standard_normal(w.shape) / 8, rng.standard_normal(case.result_shape)

    @jax.jit
    def gradient(v: jax.Array) -> jax.Array:
        return jax.grad(lambda u: jnp.vdot(ours(case, {**given, "x": u, "w": v}), dy))(x)

    _, second = jax.jvp(gradient, (w,), (t,))
    h = 2.0**-12
    coarse, fine = ((gradient(w + s * t) - gradient(w - s * t)) / (2 * s) for s in (h, h / 2))
    jumps = np.abs(coarse - fine) > 2.0**-12  # a kink within the step: no derivative there
    assert jumps.mean() < 0.1
    error = np.abs(coarse - fine) + 2.0**-52 * 2**8 / h
    assert np.all((np.abs(second - fine) <= 2 * error) | jumps)
