"""The normalisations against their definition, within computed bounds; running statistics; what one pass would lose."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.activation.bounds import Epilogue
from jaxdnn._src.cases.case import generator
from jaxdnn._src.core import tolerance
from jaxdnn._src.norm import bounds as norm_bounds
from jaxdnn._src.norm import cases_activated
from tests.core import running_error
from tests.norm.cases import CASES, FEW, Norm, agree, as_given, in_view


def f32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


BF16 = np.dtype(ml_dtypes.bfloat16)
each_case = pytest.mark.parametrize("name", CASES)
each_of_few = pytest.mark.parametrize("name", FEW)


def check(norm: Norm, arrays: Any, **choices: Any) -> None:
    """Forward and backward, by statistics that were saved and by statistics computed again."""
    x, s, b, dy = arrays
    p, acc = norm.problem(x, s, b), np.float64 if x.dtype == np.float64 else np.float32
    view = norm.of(x).view
    found, wanted = jax.jit(norm.call(**choices))(x, s, b), norm.definition(x, s, b)
    (error,) = norm_bounds.from_definition(p)
    agree(found[0], wanted[0], as_given(norm, x, error), x.dtype, "y")
    stats, saved = norm_bounds.normalised(p), {}
    names = {"mean": stats.mean_error, "rstd": stats.rstd_error} if norm.centred else {"rstd": stats.rstd_error}
    for (name, error), out, golden in zip(names.items(), found[1:], wanted[1:], strict=False):
        agree(out, np.asarray(golden), np.asarray(view.give_statistic(jnp.asarray(error))), acc, name)
        saved[name] = out
    exact = norm.gradients(reference, dy, x, s)
    bounds = norm_bounds.from_definition(p, in_view(norm, dy, p.x.shape))
    for given in (saved, {}):
        run = jax.jit(lambda dy, x, s, given=given: norm.gradients(dnn, dy, x, s, **choices, **given))
        dx, *parameters = run(dy, x, s)
        agree(dx, exact[0], as_given(norm, x, bounds[0]), x.dtype, f"dx, saved {list(given)}")
        for what, out, golden, error in zip(("dscale", "dbias"), parameters, exact[1:], bounds[1:], strict=True):
            agree(out, golden, error.reshape(golden.shape), acc, f"{what}, saved {list(given)}")


@each_case
def test_float32(name: str):
    check(CASES[name], CASES[name].arrays(0, np.float32))


@each_of_few
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)], ids=str)
def test_narrow(name: str, dtype: np.dtype):
    check(CASES[name], CASES[name].arrays(1, dtype))


@each_of_few
def test_ordered(name: str):
    check(CASES[name], CASES[name].arrays(2, np.float32), engine="ordered")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("engine", ["xla", "ordered"])
@each_of_few
def test_float64_of_mean_1e8(name: str, engine: str):
    check(CASES[name], CASES[name].arrays(3, np.float64, mean=1e8), engine=engine)


# ---- a mean far from zero --------------------------------------------------------------------------------------------

OFFSETS = [(np.dtype(np.float32), 1e4), (BF16, 100.0)]


@pytest.mark.parametrize(("dtype", "mean"), OFFSETS, ids=str)
@pytest.mark.parametrize("name", ["layer", "layer-axes", "group-NHWC", "group-NCHW", "instance-NCHW", "batch-NHWC"])
def test_mean_of_many_deviations(name: str, dtype: np.dtype, mean: float):
    """The bound has no term in mean / deviation but the rounding of the saved mean of a narrow input."""
    check(CASES[name], CASES[name].arrays(4, dtype, mean=mean))


@pytest.mark.parametrize("engine", ["xla", "ordered"])
def test_float32_of_mean_1e4_is_right_to_float32(engine: str):
    """No further off than for a mean of zero: by some units in the last place of the largest element."""
    rng = np.random.default_rng(5)
    x, dy = ((rng.normal(size=(4, 1000)) + m).astype(np.float32) for m in (1e4, 0))
    y, mean, rstd = dnn.layer_norm(x, engine=engine, return_statistics=True)
    wanted = reference.layer_norm(x)
    assert np.abs(np.asarray(y) - wanted).max() < 16 * 2.0**-24 * np.abs(wanted).max()
    dx, dscale, _ = dnn.layer_norm_dgrad(dy, x, mean=mean, rstd=rstd, engine=engine)
    exact = reference.layer_norm_dgrad(dy, x)
    assert np.abs(np.asarray(dx) - exact[0]).max() < 16 * 2.0**-24 * np.abs(exact[0]).max()
    assert np.abs(np.asarray(dscale) - exact[1]).max() < 16 * 2.0**-24 * np.abs(exact[1]).max()


def test_a_gradient_and_its_value_have_one_mean():
    """XLA computes the mean in several places of a program: with a fused multiply-add in one of them alone it would be
    off by a unit in the last place, of 1e4."""
    every = cases_activated.cases("norm_activated_dgrad", "xla", "quick", 0)
    case = next(c for c in every if c.dtype == "f32" and (c.of, c.activation) == ("group_norm", "swish"))
    operands = case.operands("far", generator(case, "far", 0))
    expected = case.expected("far", operands, tolerance.ACCUMULATIONS["float32"])
    for out, wanted in zip(jax.jit(case.function())(*operands), expected, strict=True):
        assert np.abs(np.asarray(out) - wanted.value).max() < 64 * 2.0**-24 * np.abs(wanted.value).max()


EVERY = {
    "layer": Norm("layer_norm", (6, 5, 257), (257,)),
    "layer-first-axes": Norm("layer_norm", (64, 9, 5), (64, 9), (("axis", (0, 1)),)),
    "adaptive": Norm("adaptive_layer_norm", (6, 5, 257), (6, 257)),
    "adaptive-middle": Norm("adaptive_layer_norm", (6, 65, 5), (6, 65), (("axis", 1),)),
    "group-NHWC": Norm("group_norm", (3, 17, 9, 6), (6,), (("groups", 2), ("layout", "NHWC"))),
    "group-NCHW": Norm("group_norm", (3, 6, 17, 9), (6,), (("groups", 3), ("layout", "NCHW"))),
    "instance-NHWC": Norm("instance_norm", (3, 17, 9, 6), (6,), (("layout", "NHWC"),)),
    "instance-NCHW": Norm("instance_norm", (3, 6, 17, 9), (6,), (("layout", "NCHW"),)),
    "batch-NHWC": Norm("batch_norm", (33, 5, 4, 6), (6,), (("layout", "NHWC"),)),
    "batch-NCHW": Norm("batch_norm", (33, 6, 5, 4), (6,), (("layout", "NCHW"),)),
    "activation-NHWC": Norm("batch_norm", (257, 2, 3, 4), (2, 3, 4), (("layout", "NHWC"), ("mode", "per_activation"))),
}


@pytest.mark.parametrize("engine", ["xla", "ordered"])
@pytest.mark.parametrize(("dtype", "mean"), OFFSETS, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_variances_far_from_zero_are_those_of_float32(name: str, dtype: np.dtype, mean: float, engine: str):
    """Under jit, from the inverse deviation, and of batches from the running variance too.

    γ is what adding n float32 numbers costs, and 64 what a shift by a sample's mean may at worst (`norm.sample_of`).
    One pass without a shift would cost the squares of these means, 10⁴ and 10⁸.
    """
    norm = EVERY[name]
    x, s, b, _ = norm.arrays(32, dtype, mean=mean)
    p = norm.problem(x, s, b)
    exact = norm_bounds.normalised(p)
    gamma = p.growth(p.count)
    assert (exact.variance_error <= 64 * gamma * exact.variance).all()
    rstd, *running = jax.jit(norm.call(engine=engine))(x, s, b)[2:]
    variance = np.asarray(rstd, np.float64) ** -2.0 - norm.eps
    golden, error = (np.asarray(v).reshape(variance.shape) for v in (exact.variance, exact.variance_error))
    own = 32 * p.roundoff * (golden + error)  # what 8 u in the inverse deviation are in its square, and as much again
    assert (np.abs(variance - golden) <= error + own).all()
    if norm.op == "batch_norm":
        unbiased, m = running[1], p.count / (p.count - 1)
        assert (np.abs(np.asarray(unbiased, np.float64) - golden * m) <= (error + 4 * p.roundoff * golden) * m).all()


def test_one_pass_would_be_found_out():
    """The mean of squares less the square of the mean, in float32, breaks the bound that these ops keep."""
    norm = Norm("layer_norm", (8, 4096), (4096,))
    x, *_ = norm.arrays(6, np.float32, mean=1e4)
    wide = jnp.asarray(x).astype(jnp.float32)
    mu = wide.mean(-1, keepdims=True)
    one_pass = (wide - mu) / jnp.sqrt(jnp.maximum((wide * wide).mean(-1, keepdims=True) - mu * mu, 0) + 1e-5)
    golden, error = norm_bounds.forward(norm.problem(x, None, None))
    assert not tolerance.compare(np.asarray(one_pass), golden, error).passed
    agree(dnn.layer_norm(x, out_dtype=jnp.float32), golden, error, np.float32, "y")


def test_bounds_find_planted_faults():
    norm = CASES["group-NHWC"]
    x, s, b, _ = norm.arrays(7, np.float32)
    p = norm.problem(x, s, b)
    golden, error = norm_bounds.forward(p)
    y = np.asarray(norm.call()(x, s, b)[0])
    faults = {
        "unbiased variance": lambda: reference.group_norm(x, groups=2, scale=s, bias=b, eps=1e-5) * (59 / 60) ** 0.5,
        "eps outside of the root": lambda: y * (1 + 1e-5),
        "bias forgotten": lambda: reference.group_norm(x, groups=2, scale=s),
        "three groups": lambda: reference.group_norm(x, groups=3, scale=s, bias=b),
        "a shifted element": lambda: y + np.float32(1e-4) * (np.arange(y.size).reshape(y.shape) == 17),
    }
    assert tolerance.compare(y, golden.reshape(y.shape), error.reshape(y.shape)).passed
    for fault, wrong in faults.items():
        out = wrong().astype(np.float32)
        assert not tolerance.compare(out, golden.reshape(y.shape), error.reshape(y.shape)).passed, fault


# ---- exact cases, and the ends of what there is ----------------------------------------------------------------------


def test_signs_are_their_own_normal_form():
    """±1 in equal numbers: mean 0, variance 1, so with eps 0 nothing is rounded."""
    x = np.tile(f32([1, -1, -1, 1]), (3, 2))
    scale, bias = np.arange(8, dtype=np.float32), np.ldexp(np.float32(1), np.arange(8))
    y, mean, rstd = dnn.layer_norm(x, scale=scale, bias=bias, eps=0.0, return_statistics=True)
    np.testing.assert_array_equal(y, x * scale + bias)
    np.testing.assert_array_equal(mean, np.zeros(3))
    np.testing.assert_array_equal(rstd, np.ones(3))
    np.testing.assert_array_equal(dnn.rms_norm(4 * x, eps=0.0), x)


def test_constant_rows():
    x = np.full((2, 5), 3.0, np.float32)
    np.testing.assert_array_equal(dnn.layer_norm(x, bias=np.arange(5.0, dtype=np.float32)), [np.arange(5)] * 2)
    assert np.isnan(np.asarray(dnn.layer_norm(x, eps=0.0))).all()  # 0 / 0


def test_nan_stays_in_its_row():
    x = np.ones((3, 4), np.float32)
    x[1, 2] = np.nan
    x[0, 0] = 5
    y = np.asarray(dnn.layer_norm(x))
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 3)])
def test_empty(shape: tuple[int, ...]):
    x = jnp.zeros(shape)
    y: Any = dnn.layer_norm(x)
    assert y.shape == shape
    dx, dscale, dbias = dnn.layer_norm_dgrad(x, x)
    assert dx.shape == shape
    np.testing.assert_array_equal([dscale, dbias], np.zeros((2, shape[-1])))


def test_channels_that_only_fill_a_vector_up():
    """48 channels in two vectors of 32: in no group, whatever they hold, and 0 in the results."""
    x, dy = np.random.default_rng(13).normal(size=(2, 2, 3, 5, 48)).astype(np.float32)
    stored = [np.array(dnn.transform(a, out_layout="NCHWc32")) for a in (x, dy)]
    for a in stored:
        a[:, 1, ..., 16:] = np.nan
    options: Any = {"groups": 4, "channels": 48, "layout": "NCHWc32"}
    y, mean, rstd = jax.jit(ft.partial(dnn.group_norm, return_statistics=True, **options))(stored[0])
    dx, *parameters = jax.jit(ft.partial(dnn.group_norm_dgrad, **options))(stored[1], stored[0], mean=mean, rstd=rstd)
    pulled = jax.jit(lambda x, dy: jax.vjp(lambda x: dnn.group_norm(x, **options), x)[1](dy)[0])(*stored)
    rule = Norm("group_norm", x.shape, (48,), (("groups", 4),))
    p = rule.problem(x, None, None)
    (error,), errors = norm_bounds.from_definition(p), norm_bounds.from_definition(p, dy.reshape(p.x.shape))
    golden = reference.group_norm_dgrad(dy, x, groups=4)
    plain = lambda v: np.moveaxis(np.asarray(v), -1, 2).reshape(2, 64, 3, 5)[:, :48].transpose(0, 2, 3, 1)
    agree(plain(y), reference.group_norm(x, groups=4), error.reshape(x.shape), np.float32, "y")
    for v in (dx, pulled):
        agree(plain(v), golden[0], errors[0].reshape(x.shape), np.float32, "dx")
    for ours, wanted, off in zip(parameters, golden[1:], errors[1:], strict=True):
        agree(ours, wanted, off.reshape(48), np.float32, "parameters")
    for v in (y, dx, pulled):
        assert not np.asarray(v)[:, 1, ..., 16:].any()


def test_result_of_another_dtype():
    x = jnp.ones((2, 4), jnp.bfloat16)
    row: Any = dnn.layer_norm(x, out_dtype=jnp.float32)
    image: Any = dnn.group_norm(x.reshape(1, 2, 1, 4), groups=2, out_dtype=jnp.float32)
    assert row.dtype == image.dtype == jnp.float32
    assert dnn.layer_norm_dgrad(x, x, out_dtype=jnp.float16)[0].dtype == jnp.float16


# ---- batch normalisation ---------------------------------------------------------------------------------------------


def test_running_statistics():
    """momentum weighs the new statistic; the running variance is the unbiased one; 1 is what the first call needs."""
    x = f32([1, 5]).reshape(2, 1, 1, 1)
    old = f32([10.0])
    _, mean, _, running_mean, running_variance = dnn.batch_norm(
        x, running_mean=old, running_variance=old, momentum=0.25, eps=0.0
    )
    assert (mean[0], running_mean[0], running_variance[0]) == (3, 0.25 * 3 + 7.5, 0.25 * 8 + 7.5)
    *_, first_mean, first_variance = dnn.batch_norm(x, running_mean=old, running_variance=old, momentum=1.0)
    *_, own_mean, own_variance = dnn.batch_norm(x)
    np.testing.assert_array_equal([first_mean, first_variance], [own_mean, own_variance])
    assert own_variance[0] == 8


def test_cumulative_average_by_a_traced_momentum():
    batches = np.random.default_rng(8).normal(size=(4, 5, 1, 1, 2)).astype(np.float32)

    def step(carry: Any, given: Any) -> Any:
        n, x = given
        *_, mean, variance = dnn.batch_norm(x, running_mean=carry[0], running_variance=carry[1], momentum=1 / n)
        return (mean, variance), None

    (mean, variance), _ = jax.lax.scan(step, (jnp.zeros(2), jnp.ones(2)), (jnp.arange(1.0, 5), batches))
    wide = batches.astype(np.float64)
    golden = wide.mean((0, 1, 2, 3)), wide.var(1, ddof=1).mean((0, 1, 2))

    def unrolled(*each: Any) -> Any:
        carry: Any = (jnp.zeros(2), jnp.ones(2))
        for n, x in enumerate(each, 1):
            carry, _ = step(carry, (jnp.float32(n), x))
        return carry

    errors = running_error.bounds(unrolled, *map(jnp.asarray, batches))[1]
    for found, exact, error in zip((mean, variance), golden, errors, strict=True):
        running_error.agree(found, exact, error)


def test_one_element_has_no_unbiased_variance():
    x = jnp.full((1, 1, 1, 2), 3.0)
    y, mean, _, _, variance = dnn.batch_norm(x, bias=jnp.ones(2))
    np.testing.assert_array_equal(y, jnp.ones_like(x))
    np.testing.assert_array_equal(mean, [3, 3])
    assert np.isnan(np.asarray(variance)).all()


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NCHWc3"])
def test_fused_add_and_relu(layout: str):
    norm = CASES[f"batch-{layout}"]
    x, s, b, dy = norm.arrays(9, np.float32)
    z = dy[::-1].copy()
    extras = {"scale": s, "bias": b, "residual": z, "activation": "relu", "layout": layout}
    y, mean, rstd, *_ = dnn.batch_norm(x, **extras)
    p = norm.problem(x, s, b)
    computed = in_view(norm, reference.batch_norm(x, scale=s, bias=b, layout=layout)[0], p.x.shape)
    error = Epilogue(activation="relu").error(computed, norm_bounds.from_definition(p)[0], in_view(norm, z, p.x.shape))
    agree(y, reference.batch_norm(x, **extras)[0], as_given(norm, x, error), np.float32, "y")
    with jax.disable_jit():  # operation by operation: as one program XLA adds up as that program suits it
        plain = dnn.batch_norm(x, scale=s, bias=b, layout=layout)[0]
        np.testing.assert_array_equal(dnn.batch_norm(x, **extras)[0], np.maximum(plain + z, 0))
    found = dnn.batch_norm_dgrad(dy, x, scale=s, mean=mean, rstd=rstd, y=y, layout=layout)
    forward = lambda x, s, b, z: dnn.batch_norm(x, **{**extras, "scale": s, "bias": b, "residual": z})[0]
    pulled = lambda dy, *a: jax.vjp(forward, *a)[1](dy)
    backward = lambda dy, x, s: dnn.batch_norm_dgrad(dy, x, scale=s, y=y, layout=layout)
    given = tuple(map(jnp.asarray, (dy, x, s, b, z)))
    errors = running_error.bounds(backward, *given[:3])[1], running_error.bounds(pulled, *given)[1]
    for ours, theirs, *both in zip(found, pulled(*given), *errors, strict=True):
        running_error.agree(ours, theirs, *both)
    np.testing.assert_array_equal(found[3], np.where(np.asarray(y) > 0, dy, 0))


def test_blend_does_not_read_the_prior():
    x = jnp.asarray(CASES["batch-NHWC"].arrays(10, np.float32)[0])
    nan = jnp.full_like(x, jnp.nan)
    y = dnn.batch_norm(x)[0]
    np.testing.assert_array_equal(dnn.batch_norm(x, beta=0.0, prior=nan)[0], y)
    np.testing.assert_array_equal(dnn.batch_norm(x, alpha=2.0, beta=jnp.zeros(()), prior=nan)[0], 2 * y)
    assert np.isnan(np.asarray(dnn.batch_norm(x, beta=1.0, prior=nan)[0])).all()


def test_inference_is_training_with_its_statistics():
    x, s, b, _ = CASES["batch-NCHW"].arrays(11, np.float32)
    y, mean, rstd, *_ = dnn.batch_norm(x, scale=s, bias=b, layout="NCHW")
    by = lambda x, mean, rstd, s, b: dnn.batch_norm_inference(
        x, mean, 1 / rstd**2 - 1e-5, scale=s, bias=b, layout="NCHW"
    )
    again = lambda x, s, b: by(x, *dnn.batch_norm(x, scale=s, bias=b, layout="NCHW")[1:3], s, b)
    whole = lambda x, s, b: dnn.batch_norm(x, scale=s, bias=b, layout="NCHW")[0]
    errors = [running_error.bounds(f, *map(jnp.asarray, (x, s, b)))[1] for f in (again, whole)]
    running_error.agree(by(x, mean, rstd, s, b), y, *errors)


ACROSS, ALIKE = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("dtype", "mean"), [(np.float32, 0.0), (np.float64, 1e4)])
def test_synchronised_over_a_mesh_axis(dtype: Any, mean: float):
    """Eight devices have the statistics, results and gradients of one that has the whole batch.

    vmap over the devices is the same program for `running_error`.
    """
    norm = Norm("batch_norm", (16, 3, 2, 5), (5,))
    x, s, b, dy = norm.arrays(12, dtype, mean=mean)
    x = x + np.arange(16, dtype=dtype).reshape(-1, 1, 1, 1)

    def forward(x: Any, s: Any, b: Any) -> Any:
        return dnn.batch_norm(x, scale=s, bias=b, axis_name="d")

    def backward(dy: Any, x: Any, s: Any, m: Any, r: Any) -> Any:
        return dnn.batch_norm_dgrad(dy, x, scale=s, mean=m, rstd=r, axis_name="d")

    spread = on_devices(forward, (ACROSS, ALIKE, ALIKE), (ACROSS, *[ALIKE] * 4))
    mapped = jax.vmap(forward, (0, None, None), axis_name="d")
    apart = lambda v: jnp.asarray(v.reshape(8, 2, *v.shape[1:]))
    like = lambda v, golden: v.reshape(golden.shape) if v.size == golden.size else v[0]

    def agreed(found: Any, exact: Any, errors: Any, own: Any) -> None:
        for ours, golden, error, off in zip(found, exact, errors, own, strict=True):
            assert ours.dtype == dtype
            running_error.agree(ours, golden, like(error, golden), off)

    found = spread(x, s, b)
    errors = running_error.bounds(mapped, apart(x), s, b)[1]
    agreed(found, norm.definition(x, s, b), errors, norm.definition_errors(x, s, b))
    exact, own = norm.gradients(reference, dy, x, s), norm.definition_errors(x, s, b, dy)
    pulled = lambda f: lambda dy, *given: jax.vjp(lambda *a: f(*a)[0], *given)[1](dy)
    errors = running_error.bounds(pulled(mapped), apart(dy), apart(x), s, b)[1]
    agreed(jax.jit(pulled(spread))(dy, x, s, b), exact, errors, own)
    saved = on_devices(backward, (ACROSS, ACROSS, ALIKE, ALIKE, ALIKE), (ACROSS, ALIKE, ALIKE))(dy, x, s, *found[1:3])
    back = jax.vmap(backward, (0, 0, None, 0, 0), axis_name="d")
    whole = lambda dy, x, s, b: back(dy, x, s, *mapped(x, s, b)[1:3])
    agreed(saved, exact, running_error.bounds(whole, apart(dy), apart(x), s, b)[1], own)


def on_devices(f: Any, given: Any, results: Any) -> Any:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=given, out_specs=results))


@pytest.mark.parametrize(("dtype", "mean"), OFFSETS, ids=str)
def test_synchronised_variances_far_from_zero_are_those_of_float32(dtype: np.dtype, mean: float):
    """Merged from eight devices' means and second moments, each within the bound of its own.

    A device's mean is held in two parts if x is wide; a distance t between means that is off by e moves the variance by
    2 |t| e + e².
    """
    norm = Norm("batch_norm", (64, 4, 3, 5), (5,))
    x, s, b, dy = norm.arrays(33, np.float64, mean=mean)
    x = (x + np.repeat(np.arange(8) / 4, 8).reshape(-1, 1, 1, 1)).astype(dtype)
    s, b, dy = (v.astype(dtype) for v in (s, b, dy))
    found = on_devices(norm.call(axis_name="d"), (ACROSS, ALIKE, ALIKE), (ACROSS, *[ALIKE] * 4))(x, s, b)
    p, parts = norm.problem(x, s, b), [norm.problem(part, s, b) for part in np.split(x, 8)]
    exact, own = norm_bounds.normalised(p), [norm_bounds.normalised(part) for part in parts]
    t = np.stack([n.mean - exact.mean for n in own])
    u = p.roundoff
    held = np.stack([n.mean_error - (2 * u * np.abs(n.mean) if p.wide else 0) for n in own])
    size = np.abs(t) + np.abs(t[:1]) + np.stack([n.mean_error for n in own])  # of distances and of the means' low parts
    e = held + held[:1] + 4 * u * size
    e = e + e.mean(0) + p.growth(8) * (size + e)
    moments, off = (np.stack([getattr(n, name) for n in own]).mean(0) for name in ("variance", "variance_error"))
    error = off + (2 * np.abs(t) * e + e**2).mean(0)
    error = error + p.growth(8) * (moments + off + ((np.abs(t) + e) ** 2).mean(0))
    golden, error = exact.variance.ravel(), error.ravel()
    assert (error <= 64 * p.growth(p.count) * golden).all()
    variance = np.asarray(found[2], np.float64) ** -2.0 - norm.eps
    assert (np.abs(variance - golden) <= error + 32 * u * (golden + error)).all()
    unbiased, m = np.asarray(found[4], np.float64), p.count / (p.count - 1)
    assert (np.abs(unbiased - golden * m) <= (error + 4 * u * (golden + error)) * m).all()
    mean_error = (held[0] + e.mean(0) + 4 * u * (np.abs(exact.mean) + size.max(0))).ravel()
    running_error.agree(found[1], exact.mean.ravel(), mean_error)


@pytest.mark.parametrize("traced", [False, True])
def test_running_statistics_of_weight_zero_are_not_read(traced: bool) -> None:
    x, nan, old = jnp.arange(8.0).reshape(4, 1, 1, 2), jnp.full(2, jnp.nan), jnp.array([3.0, 5.0])
    given = (lambda m: jnp.asarray(m, jnp.float32)) if traced else float
    run = lambda x, v, m: jax.jit(lambda x, v: dnn.batch_norm(x, running_mean=v, running_variance=v, momentum=m))(x, v)
    for found, fresh in zip(run(x, nan, given(1))[3:], dnn.batch_norm(x)[3:], strict=True):
        np.testing.assert_array_equal(found, fresh)
    for found in (*run(x[:1], old, given(0))[3:], *run(x * jnp.nan, old, given(0))[3:]):  # one element: NaN variance
        np.testing.assert_array_equal(found, old)
    assert np.isnan(dnn.batch_norm(x[:0])[1]).all()


@each_of_few
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
def test_the_range_of_deviations_is_the_one_that_is_told(name: str, dtype: Any):
    """Within it a power of two changes no bit; above y is the bias or NaN, and below, without an eps, not finite."""
    norm = CASES[name]
    x, s, b, dy = norm.arrays(3, dtype)
    run = jax.jit(lambda x: norm.call(eps=0.0)(x, s, b)[0])
    back = jax.jit(lambda x: norm.gradients(dnn, dy, x, s, eps=0.0)[:2])
    y, gradients = run(x), back(x)
    for exponent in (50, -50):
        scale = np.asarray(2.0**exponent, dtype)
        np.testing.assert_array_equal(run(x * scale), y)
        np.testing.assert_array_equal(back(x * scale)[0] * scale, gradients[0])
        np.testing.assert_array_equal(back(x * scale)[1], gradients[1])
    large = x * np.asarray(2.0**100, dtype)
    above, bias = np.asarray(run(large), np.float32), np.asarray(jax.jit(norm.call())(0 * x, s, b)[0], np.float32)
    assert (np.isnan(above) | (above == bias)).all()
    for v in back(large):
        assert (np.isnan(v) | (np.asarray(v) == 0)).all()
    assert not np.isfinite(np.asarray(run(x * np.asarray(2.0**-80, dtype)), np.float32)).any()
