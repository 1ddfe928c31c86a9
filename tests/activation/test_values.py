"""Activations: values and gradients within computed bounds, every transformation, the blend, levels, errors."""

import functools as ft
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.activation import bounds, formulas
from jaxdnn._src.activation.bounds import slope_error
from jaxdnn._src.activation.formulas import ACTIVATIONS
from jaxdnn._src.core import tolerance
from jaxdnn.verify import matrix
from tests.conv import helpers

CASES = [a for a in helpers.ACTIVATIONS if a is not None]
CASES += [("relu", -1.0, 2.0, 0.5), ("relu", 0.0, 6.0, 0.1), ("relu", 0.0, np.inf, 0.25), ("relu", 1.0, 3.0, 0.0)]
each_activation = pytest.mark.parametrize("name", CASES, ids=str)
each_narrow = pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=lambda d: np.dtype(d).name)
# The curved functions as jax.numpy users write them, to differentiate by JAX.
PLAIN = {
    "sigmoid": lambda x: 1 / (1 + jnp.exp(-x)),
    "tanh": lambda x: (jnp.exp(2 * x) - 1) / (jnp.exp(2 * x) + 1),
    "gelu": lambda x: x * jax.scipy.stats.norm.cdf(x),
    "gelu_tanh": lambda x: x / 2 * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "swish": lambda x: x / (1 + jnp.exp(-x)),
    "softplus": lambda x: jnp.log(1 + jnp.exp(x)),
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    ("celu", 1.5): lambda x: jax.nn.celu(x, 1.5),
    "mish": lambda x: x * jnp.tanh(jnp.log(1 + jnp.exp(x))),
    "softsign": lambda x: x / (1 + jnp.abs(x)),
    "hard_sigmoid": lambda x: jax.nn.relu6(x + 3) / 6,
    "hard_swish": lambda x: x * jax.nn.relu6(x + 3) / 6,
    ("swish", 1.5): lambda x: x / (1 + jnp.exp(-1.5 * x)),
    ("softplus", 2.5): lambda x: jnp.log(1 + jnp.exp(2.5 * x)) / 2.5,
}
each_smooth = pytest.mark.parametrize("name", PLAIN, ids=str)


def inputs(shape: Any, seed: int, dtype: Any = np.float32) -> np.ndarray:
    """Of all magnitudes, both signs, with zeros, and the kinks of the activations above."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-20, 6, shape))
    x.reshape(-1)[:8] = [0.0, -0.0, 1.0, 2.0, 6.0, -1.0, 1.5, 3.0]
    return x.astype(dtype)


def agree(out: Any, golden: np.ndarray, error: np.ndarray) -> None:
    found = tolerance.compare(np.asarray(out), golden, error)
    assert found.passed, found.message


# ---- values ----------------------------------------------------------------------------------------------------------


@each_activation
def test_float32_within_the_computed_bound(name: Any):
    x, dy = inputs((40, 25, 30), 1), inputs((40, 25, 30), 2)
    agree(
        dnn.activation(x, activation=name),
        reference.activation(x, activation=name),
        bounds.value_error(name, x),
    )
    slope = reference.derivative(x.astype(np.float64), name)
    golden = reference.activation_dgrad(dy, x, activation=name)
    error = np.abs(dy) * slope_error(name, x) * (1 + 2.0**-20) + 2.0**-24 * np.abs(golden)
    agree(dnn.activation_dgrad(dy, x, activation=name), golden, error + 2.0**-125 * (1 + np.abs(dy) + np.abs(slope)))


@pytest.mark.usefixtures("x64")
@each_activation
def test_float64(name: Any):
    x = inputs((7, 50), 3, np.float64)
    y, dx = dnn.activation(x, activation=name), dnn.activation_dgrad(np.ones_like(x), x, activation=name)
    # Twice the bound: the definition is computed in float64 as well.
    value, slope = (rule(name, x, format="float64") for rule in (bounds.value_error, slope_error))
    assert (np.abs(y - reference.activation(x, activation=name)) <= 2 * value).all()
    assert (np.abs(dx - reference.derivative(x, name)) <= 2 * slope).all()
    assert dx.dtype == np.float64


@each_activation
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda d: np.dtype(d).name)
def test_nan_stays_and_infinity_gives_the_limit(name: Any, dtype: Any):
    x = np.array([-np.inf, np.inf, np.nan], np.float64).astype(dtype)
    y, dx = dnn.activation(x, activation=name), dnn.activation_dgrad(jnp.ones_like(jnp.asarray(x)), x, activation=name)
    far = np.array([-1e20, 1e20])  # softsign is slow
    for found, golden in ((y, reference.activate), (dx, reference.derivative)):
        limit = golden(far, name)
        unbounded = np.abs(limit) > 50
        wanted = np.where(unbounded, np.copysign(np.inf, limit), limit).astype(np.float64)
        np.testing.assert_allclose(np.asarray(found, np.float64)[:2], wanted, rtol=2.0**-7, atol=1e-30)
        assert np.isnan(np.asarray(found, np.float64)[2])


def test_kinks():
    x = jnp.array([-1.0, -0.0, 0.0, 2.0, 6.0])
    slope = lambda name: jax.jit(ft.partial(dnn.activation_dgrad, activation=name))(jnp.ones(5), x).tolist()
    assert slope("relu") == [0, 0, 0, 1, 1]
    assert slope("clipped_relu") == [0, 0, 0, 1, 0]
    assert slope(("leaky_relu", 0.25)) == [0.25, 0.25, 0.25, 1, 1]
    assert slope(("elu", 0.5))[1:] == [0.5, 0.5, 1, 1]
    assert slope(("relu", -1.0, 6.0, 0.5)) == [0.5, 1, 1, 1, 0]
    ends, total = jnp.array([-3.0, 3.0]), lambda v: jnp.sum(dnn.activation(v, activation="hard_swish"))
    assert jax.jit(jax.grad(total))(ends).tolist() == [0, 1]
    assert np.diag(jax.jit(jax.hessian(total))(ends)).tolist() == [0, 0]


def test_second_derivatives_far_out_and_at_zero():
    """Where a factor vanishes or overflows, and where formulas change branches; against the slopes' differences."""
    x = np.array([-1e30, -200.0, -20.0, 0.0, 20.0, 200.0, 1e30])
    for name in (*PLAIN, "elu"):
        second = jax.jit(jax.vmap(jax.grad(jax.grad(ft.partial(dnn.activation, activation=name)))))(
            x.astype(np.float32)
        )
        h = 2.0**-17
        low, high = (reference.derivative(v, name) for v in (x - h, x + h))
        wanted = (high - low) / (2 * h)
        at = reference.derivative(x, name)
        if name in ("selu", "elu", "celu", ("celu", 1.5)):  # from the side of 0 that 0 belongs to
            wanted[3] = (at - low)[3] / h
        if name == "softsign":
            wanted[3] = (high - at)[3] / h
        np.testing.assert_allclose(second, wanted, rtol=1e-4, atol=1e-5, err_msg=str(name))


@pytest.mark.parametrize("name", PLAIN)
def test_derivatives_of_any_order_are_finite(name: str):
    """Where powers of what a slope is made of could leave float32's range."""
    found = jnp.arange(-30, 30, 0.125, jnp.float32)
    function = ft.partial(dnn.activation, activation=name)
    for _ in range(4):
        function = jax.grad(function)
        assert np.isfinite(jax.jit(jax.vmap(function))(found)).all()


def test_third_derivatives_at_zero():
    """Where a formula by |z| changes branches."""
    for name, wanted in (("sigmoid", -1 / 8), ("tanh", -2.0), ("swish", 0.0), ("gelu_tanh", 0.0)):
        third = jax.grad(jax.grad(jax.grad(ft.partial(dnn.activation, activation=name))))
        assert float(jax.jit(third)(0.0)) == pytest.approx(wanted, abs=1e-6), name


def test_bounded_relu_is_named_by_what_it_is():
    """The graph API's relu with a bound, or with a slope, is the activation of its own name."""
    x = inputs((500,), 4)
    same = lambda a, b: np.testing.assert_array_equal(dnn.activation(x, activation=a), dnn.activation(x, activation=b))
    same(("relu", 0, np.inf, 0), "relu")
    same(("relu", 0, 6, 0), "clipped_relu")
    same(("relu", 0, np.inf, 0.01), "leaky_relu")
    same(None, "identity")


@each_activation
def test_epilogue_of_a_convolution_is_the_same_function(name: Any):
    """A one-tap convolution by 1 with `activation=` and the op of its result: the same formula."""
    x = inputs((1, 50, 20, 1), 5)
    fused = dnn.conv(x, np.ones((1, 1, 1, 1), np.float32), activation=name)
    golden = reference.activation(x, activation=name)
    agree(fused, golden, bounds.value_error(name, x) + 2.0**-125)


# ---- the blend -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("traced", [False, True])
def test_blend(dtype: Any, traced: bool):
    x, prior, dy = (inputs((6, 70), seed, dtype) for seed in (6, 7, 8))
    wrap = jnp.float32 if traced else float

    def run(x: Any, dy: Any, prior: Any) -> Any:
        scales = {"alpha": wrap(0.75), "beta": wrap(-1.5), "prior": prior, "out_dtype": np.float32}
        return dnn.activation(x, activation="gelu", **scales), dnn.activation_dgrad(dy, x, activation="gelu", **scales)

    y, dx = jax.jit(run)(x, dy, prior)
    given = {"alpha": 0.75, "beta": -1.5, "prior": prior}
    x64, dy64, prior64 = (v.astype(np.float64) for v in (x, dy, prior))
    value, slope = (f(x64, "gelu") for f in (reference.activate, reference.derivative))
    # At most three roundings of either term and of the sum, beside the function's own.
    own = 0.75 * bounds.value_error("gelu", x64)
    size = np.abs(0.75 * value) + np.abs(1.5 * prior64)
    agree(y, reference.activation(x, activation="gelu", **given), own + 2.0**-22 * size + 2.0**-124)
    own = 0.75 * np.abs(dy64) * slope_error("gelu", x64)
    size = np.abs(0.75 * dy64 * slope) + np.abs(1.5 * prior64)
    agree(dx, reference.activation_dgrad(dy, x, activation="gelu", **given), own + 2.0**-22 * size + 2.0**-124)


def test_prior_is_not_read_where_beta_is_zero():
    x = inputs((30,), 9)
    nan = np.full_like(x, np.nan)
    for beta in (0.0, jnp.float32(0)):
        found = jax.jit(ft.partial(dnn.activation, activation="tanh", beta=beta))(x, prior=nan)
        np.testing.assert_array_equal(found, dnn.activation(x, activation="tanh"))
    assert np.isnan(dnn.activation(x, activation="tanh", beta=1e-30, prior=nan)).all()


# ---- transformations -------------------------------------------------------------------------------------------------


@each_smooth
def test_derivatives_of_every_order_and_mode(name: Any):
    """Against JAX's derivatives of the function written differently, in float64 precision on float32 values."""
    x, t = (jnp.asarray(np.random.default_rng(s).normal(size=12).astype(np.float32)) for s in (10, 11))
    ours = lambda v: jnp.sum(jnp.sin(dnn.activation(v, activation=name)))
    theirs = lambda v: jnp.sum(jnp.sin(PLAIN[name](v)))
    transformed = {
        "jvp": lambda f: jax.jvp(f, (x,), (t,)),
        "grad": lambda f: jax.grad(f)(x),
        "jvp of grad": lambda f: jax.jvp(jax.grad(f), (x,), (t,)),
        "grad of grad": lambda f: jax.grad(lambda v: jnp.vdot(jax.grad(f)(v), t))(x),
        "hessian": lambda f: jax.hessian(f)(x),
        "jacfwd of jacrev": lambda f: jax.jacfwd(jax.jacrev(f))(x),
        "vmap of grad": lambda f: jax.vmap(jax.grad(lambda v: f(v[None])))(x),
        "remat": lambda f: jax.grad(jax.checkpoint(f))(x),
        "scan": lambda f: jax.grad(lambda v: jax.lax.scan(lambda c, e: (c + f(e[None]), c), 0.0, v)[0])(x),
    }
    for what, run in transformed.items():
        found = jax.jit(lambda run=run: (run(ours), run(theirs)))()
        for mine, other in zip(*map(jax.tree.leaves, found), strict=True):
            np.testing.assert_allclose(mine, other, rtol=2e-4, atol=2e-5, err_msg=what)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_gradient_is_the_backward_op(dtype: Any):
    x, dy, ddx = (jnp.asarray(inputs((4, 60), seed, dtype)) for seed in (12, 13, 14))
    calls = [{"activation": name, "alpha": alpha} for name in CASES for alpha in (1.0, -0.5)]
    backward = lambda options, dy, x: dnn.activation_dgrad(dy, x, **options)
    forms = {
        "backward": backward,
        "vjp": lambda options, dy, x: jax.vjp(lambda x: dnn.activation(x, **options), x)[1](dy)[0],
        "jvp": lambda options, dy, x: jax.jvp(lambda x: dnn.activation(x, **options), (x,), (dy,))[1],
        "transpose": lambda options, dy, x: jax.linear_transpose(lambda v: backward(options, v, x), dy)(dy)[0],
    }
    # A program for each form of all calls: one by one they compile for ten times as long.
    run = {what: jax.jit(lambda dy, x, form=form: [form(o, dy, x) for o in calls]) for what, form in forms.items()}
    for along in (dy, ddx):
        wanted = run["backward"](along, x)
        for what in ("vjp", "jvp", "transpose"):
            for found, right, options in zip(run[what](along, x), wanted, calls, strict=True):
                np.testing.assert_array_equal(found, right, err_msg=f"{what} of {options}")


def test_finite_differences_of_the_definition():
    x = np.random.default_rng(15).normal(size=50)
    x = x[np.abs(x) > 1e-3]
    total = lambda v, name: jnp.sum(dnn.activation(v, activation=name))
    slopes = jax.jit(lambda v: [jax.grad(total)(v, name) for name in CASES])(jnp.asarray(x, jnp.float32))
    for name, found in zip(CASES, slopes, strict=True):
        h = 2.0**-17
        difference = (reference.activate(x + h, name) - reference.activate(x - h, name)) / (2 * h)
        np.testing.assert_allclose(found, difference, rtol=0, atol=1e-6, err_msg=str(name))


def test_the_backward_pass_keeps_x_alone():
    x = jnp.ones((8, 16), jnp.bfloat16)
    for name in ("gelu", "swish", ("elu", 0.5)):
        _, pull = jax.vjp(ft.partial(dnn.activation, activation=name), x)
        kept = [v for v in jax.tree.leaves(pull) if getattr(v, "size", 0) >= x.size]
        assert [(v.shape, v.dtype) for v in kept] == [(x.shape, x.dtype)]


@each_narrow
def test_vmap(dtype: Any):
    x, dy = (jnp.asarray(inputs((3, 4, 5), seed, dtype)) for seed in (16, 17))
    for axis in (0, 1, 2):
        op = jax.jit(ft.partial(dnn.activation, activation="gelu"))
        np.testing.assert_array_equal(jax.vmap(op, axis, axis)(x), op(x))
        back = jax.jit(ft.partial(dnn.activation_dgrad, activation="gelu"))
        np.testing.assert_array_equal(jax.vmap(back, axis, axis)(dy, x), back(dy, x))
    one = jax.vmap(back, (0, None))(dy, x[0])
    np.testing.assert_array_equal(one, jnp.stack([back(d, x[0]) for d in dy]))
    one = jax.vmap(back, (None, 0))(dy[0], x)
    np.testing.assert_array_equal(one, jnp.stack([back(dy[0], v) for v in x]))
    assert jax.vmap(op)(x[:, 0, 0]).shape == (3,)  # scalars


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_sharded_without_communication(kind: Any, dtype: Any):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    x, dy = (inputs((8, 6, 4), seed, dtype) for seed in (18, 19))
    there = NamedSharding(mesh, P("a", None, "b"))
    loss = lambda x, dy: jax.vjp(ft.partial(dnn.activation, activation="gelu"), x)[1](dy)[0]
    for function, arrays in ((ft.partial(dnn.activation, activation="gelu"), (x,)), (loss, (x, dy))):
        placed = [jax.device_put(v, there) for v in arrays]
        with jax.set_mesh(mesh):
            compiled: Any = jax.jit(function).lower(*placed).compile()
            out = compiled(*placed)
        assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
        assert out.sharding.is_equivalent_to(there, out.ndim)
        np.testing.assert_array_equal(out, jax.jit(function)(*arrays))


def test_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = jnp.asarray(inputs((16, 5), 20, np.float16))
    local = jax.shard_map(ft.partial(dnn.activation, activation="swish"), mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    np.testing.assert_array_equal(jax.jit(local)(x), dnn.activation(x, activation="swish"))
    gradient = jax.grad(lambda v: jnp.sum(local(v).astype(jnp.float32)))(x)
    np.testing.assert_array_equal(gradient, dnn.activation_dgrad(jnp.ones_like(x), x, activation="swish"))


def test_second_derivative_in_shard_map():
    """JAX 0.12 cannot differentiate erf and erfc there."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = jnp.asarray(inputs((16,), 23, np.float32))
    total = lambda f: lambda v: jnp.sum(f(v))
    second = jax.grad(total(jax.grad(total(ft.partial(dnn.activation, activation="gelu")))))
    local = jax.shard_map(second, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    np.testing.assert_array_equal(jax.jit(local)(x), jax.jit(second)(x))


@each_narrow
def test_constants_that_xla_folds(dtype: Any):
    """XLA folds the bitcast of a constant array that it keeps in another order of dimensions to wrong values."""
    x, rows = inputs((6, 5, 4, 3), 22, dtype), np.array([3, 1, 0, 2, 4])
    for name in ("gelu", "relu"):
        op, back = ft.partial(dnn.activation, activation=name), ft.partial(dnn.activation_dgrad, activation=name)
        np.testing.assert_array_equal(jax.jit(lambda op=op: op(jnp.asarray(x)[:, rows]))(), op(x[:, rows]))
        ones = jnp.ones_like(jnp.asarray(x))
        found = jax.jit(lambda back=back, ones=ones: back(ones, jnp.asarray(x)[:, rows]))()
        np.testing.assert_array_equal(found, back(ones, x[:, rows]))


def test_verify_finds_a_wrong_entry(monkeypatch: pytest.MonkeyPatch):
    """One of the 65,536 results off by a last bit, in a table and in a table of slopes."""

    def run(op: str) -> str:
        jax.clear_caches()
        (case,) = (c for c in matrix.cases("quick", 0, ops=[op], dtypes=["bf16"]) if c.name == "swish")
        return matrix.run(case, 0, flush=True).status

    def off(entries: np.ndarray) -> np.ndarray:
        entries = entries.copy()
        entries.view(f"u{entries.itemsize}")[0x3FC0] += 1 if entries.itemsize == 2 else 1 << 16
        return entries

    for op, table in (("activation", "table"), ("activation_dgrad", "slope_table")):
        assert run(op) == "passed"
        right = getattr(formulas, table)
        monkeypatch.setattr(formulas, table, lambda *given, right=right: off(right(*given)))
        assert run(op) == "failed"
    jax.clear_caches()


# ---- levels, explanation, errors -------------------------------------------------------------------------------------


def test_levels():
    level = lambda op, *a, **k: dnn.explain(ft.partial(op, **k), *a)[0].candidates[0].level
    for dtype in (jnp.bfloat16, jnp.float16):
        x = jnp.ones(3, dtype)
        assert (
            level(dnn.activation, x, activation="gelu")
            == level(dnn.activation_dgrad, x, x, activation="gelu")
            == "portable"
        )
    x = jnp.ones(3)
    assert level(dnn.activation, x, activation="relu") == "portable"
    assert level(dnn.activation, x, activation="gelu") == "mesh_invariant"
    with pytest.raises(NotImplementedError, match="'mesh_invariant' here, not 'portable'"):
        dnn.activation(x, activation="gelu", determinism="portable")
    with (
        dnn.determinism("portable"),
        pytest.raises(
            NotImplementedError, match="`determinism` 'portable' cannot be guaranteed for activation with a prior"
        ),
    ):
        dnn.activation(x, beta=2.0, prior=x)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 31, 33, 64, 127, 1000])
def test_an_element_depends_on_nothing_but_itself(size: int):
    x = inputs((1000,), 21)
    for name in ("gelu", "tanh", "softplus", "swish", "elu"):
        op = jax.jit(ft.partial(dnn.activation, activation=name))
        np.testing.assert_array_equal(op(x[:size]), op(x)[:size])
        np.testing.assert_array_equal(op(x[-size:]), op(x)[-size:])


def test_every_activation_is_tested():
    assert set(ACTIVATIONS) <= {a if isinstance(a, str) else a[0] for a in CASES}


X = np.ones(3, np.float32)
CHOICES = "must be None, one of 'identity', .* a pair of a name and its parameter, or .'relu', lower, upper, slope."


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"activation": "gelo"}, ValueError, f"`activation` {CHOICES}, got 'gelo'"),
        ({"activation": ("relu", 1)}, ValueError, "`activation` 'relu' takes no parameter, got 1"),
        ({"activation": ("elu", "1")}, ValueError, "`activation` 'elu' takes one number, got '1'"),
        ({"activation": ("leaky_relu", 2)}, ValueError, "`activation` 'leaky_relu' needs a slope from 0 to 1, got 2.0"),
        ({"activation": ("clipped_relu", -1)}, ValueError, "'clipped_relu' needs a ceiling of at least 0, got -1.0"),
        ({"activation": ("softplus", 0)}, ValueError, "`activation` 'softplus' needs a positive parameter, got 0.0"),
        ({"activation": ("celu", -1)}, ValueError, "`activation` 'celu' needs a positive parameter, got -1.0"),
        ({"activation": ("swish", np.inf)}, ValueError, "`activation` 'swish' needs a finite parameter, got inf"),
        ({"activation": ("relu", 0, 1, "2")}, ValueError, "slope. takes three numbers, got .0, 1, '2'."),
        (
            {"activation": ("relu", 2, 1, 0)},
            ValueError,
            "needs a finite lower bound of at most the upper one .* got .2, 1, 0.",
        ),
        ({"out_dtype": np.int8}, TypeError, "`out_dtype` must have one of the dtypes float32, bfloat16, .* got int8"),
        ({"out_dtype": np.float64}, TypeError, "`out_dtype` must not be wider than the accumulator float32"),
        ({"beta": 1.0}, ValueError, "`prior` must be given when `beta` is not zero"),
        ({"beta": 1.0, "prior": np.ones(4, np.float32)}, ValueError, "`prior` must have shape .3,., the result's"),
        ({"engine": "fastest"}, ValueError, "`engine` must be one of None, .*, got 'fastest'"),
        ({"engine": "hopper"}, NotImplementedError, "`activation` on .* cannot be served by engine 'hopper'"),
        ({"determinism": "bitwise"}, ValueError, "`determinism` must be one of .*, got 'bitwise'"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.activation(X, **options)


def test_errors_of_operands():
    with pytest.raises(
        TypeError, match="`x` must have one of the dtypes float32, bfloat16, float16, float64, got int32"
    ):
        dnn.activation(np.ones(3, np.int32))
    with pytest.raises(TypeError, match="`x` must be an array, got object"):
        dnn.activation(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`dy` must have shape \(3,\), that of x, got \(4,\)"):
        dnn.activation_dgrad(np.ones(4, np.float32), X)


@pytest.mark.parametrize("op", ["activation", "activation_dgrad"])
@pytest.mark.parametrize("traced", [False, True])
def test_the_products_of_a_blend_are_rounded_whatever_the_shape(op: str, traced: bool) -> None:
    x, dy, prior = (np.random.default_rng(5).normal(size=(3, 257)) * 3).astype(np.float32)
    alpha, beta = np.float32(0.7), np.float32(-1.3)
    operands = (x,) if op == "activation" else (dy, x)
    call = ft.partial(getattr(dnn, op), activation="swish", determinism="mesh_invariant")
    alone = np.asarray(jax.jit(call)(*operands))
    wanted = alpha * alone + beta * prior
    for n in (1, 2, 3, 7, 33, 257):
        parts = tuple(v[:n] for v in operands)
        if traced:
            found = jax.jit(lambda o, p, a, b: call(*o, prior=p, alpha=a, beta=b))(parts, prior[:n], alpha, beta)
        else:
            run = jax.jit(lambda o, p: call(*o, prior=p, alpha=float(alpha), beta=float(beta)))
            found = run(parts, prior[:n])
        np.testing.assert_array_equal(found, wanted[:n])


def test_limits_at_infinity() -> None:
    x = jnp.array([-jnp.inf, jnp.inf])
    one = jnp.ones(2)
    np.testing.assert_array_equal(dnn.activation(x, activation=("swish", 0.0)), x)
    np.testing.assert_array_equal(dnn.activation_dgrad(one, x, activation=("swish", 0.0)), [0.5, 0.5])
    np.testing.assert_array_equal(dnn.activation(x, activation=("leaky_relu", 0.0)), [0, np.inf])
    np.testing.assert_array_equal(dnn.activation_dgrad(one, x, activation=("leaky_relu", 0.0)), [0, 1])
    np.testing.assert_array_equal(dnn.activation_dgrad(one, x, activation=("relu", 0.0, np.inf, -0.5)), [-0.5, 1])
    assert np.isnan(dnn.activation_dgrad(one, x * jnp.nan, activation=("swish", 0.0))).all()


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "swish", "gelu_tanh"])
def test_a_slope_takes_one_exponential(name: str):
    """logistic(z) logistic(-z) of two is as exact, and on CPUs takes half as long again."""
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    text = jax.jit(lambda dy, x: dnn.activation_dgrad(dy, x, activation=name)).lower(x, x).as_text()
    found = [text.count(f"stablehlo.{op} ") for op in ("exponential", "logistic", "tanh")]
    assert found == [1, 0, 0]


@pytest.mark.parametrize("call", ["activation", "conv", "fused dropout"])
def test_where_bits_are_fixed_tanh_is_not_the_device_s(call: str):
    """XLA's has other bits in one of its code generators for GPUs, which transposes arrays, than in another."""
    x = jnp.ones((2, 4, 4, 8))
    functions = {
        "activation": lambda x, **how: dnn.activation(x, activation="tanh", **how),
        "conv": lambda x, **how: dnn.conv(x, jnp.ones((1, 1, 8, 8)), activation="tanh", **how),
        "fused dropout": lambda x, **how: dnn.dropout(x, jax.random.key(0), rate=0.5, activation="tanh", **how),
    }
    text = lambda **how: (
        jax.jit(ft.partial(functions[call], **how)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    )
    assert "stablehlo.tanh" in text()
    assert "stablehlo.tanh" not in text(determinism="batch_invariant", engine="ordered" if call == "conv" else "xla")
