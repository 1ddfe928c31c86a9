"""Batch normalisation in pieces: values, what the pieces make together, gradients, transformations, bad arguments."""

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
from jaxdnn._src.norm import cases_stats
from tests.core import running_error
from tests.norm.cases import Norm

SHAPES = cases_stats.SHAPES
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f64": np.float64}
each_layout = pytest.mark.parametrize("layout", SHAPES)


def channels(layout: str) -> int:
    shape = SHAPES[layout]
    return shape[layout.index("C")] * (shape[-1] if "c" in layout else 1)


def arrays(layout: str, dtype: Any = np.float32, mean: float = 0.5) -> tuple[np.ndarray, ...]:
    """x and, of every channel, a scale, a bias, an old mean and an old variance."""
    rng, c = np.random.default_rng(len(layout)), channels(layout)
    x = (mean + rng.normal(size=SHAPES[layout])).astype(dtype)
    scale, bias, old = (rng.normal(size=c).astype(np.float32) for _ in range(3))
    return x, scale, bias, old, rng.uniform(1, 2, c).astype(np.float32)


def agree(found: Any, golden: Any, errors: Any) -> None:
    """Every result within its computed bound."""
    for value, wanted, error in zip(found, golden, errors, strict=True):
        told = tolerance.compare(np.asarray(value), np.asarray(wanted, np.float64), error)
        assert told.passed, told.message
        assert not told.unchecked


@pytest.mark.usefixtures("x64")
@each_layout
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(dtype: str, layout: str):
    x = arrays(layout, DTYPES[dtype])[0]
    wide = np.float64 if dtype == "f64" else np.float32
    format = np.dtype(wide).name
    found = dnn.genstats(x, layout=layout)
    assert [v.dtype for v in found] == [wide] * 2
    # The definition's own error is at most the bound for float64 of values that are float64.
    own = cases_stats.sums_error(x, layout, "float64")
    errors = [a + b for a, b in zip(cases_stats.sums_error(x, layout, format), own, strict=True)]
    agree(found, reference.genstats(x, layout=layout), errors)


def test_sums_of_integers_are_exact():
    x = np.random.default_rng(3).integers(-9, 10, (4, 5, 6, 7))
    total, squares = dnn.genstats(x.astype(np.float32))
    np.testing.assert_array_equal(total, x.sum((0, 1, 2)))
    np.testing.assert_array_equal(squares, (x * x).sum((0, 1, 2)))
    for value, wanted in zip(reference.genstats(x.astype(np.float32)), (total, squares), strict=True):
        np.testing.assert_array_equal(value, wanted)


@each_layout
def test_pieces_make_batch_norm(layout: str):
    """The definitions alone, for which sums of integers are exact."""
    n = Norm("batch_norm", SHAPES[layout], (channels(layout),), (("layout", layout), ("eps", 0.01)))
    rng = np.random.default_rng(len(layout))
    x, scale, bias = (rng.integers(-9, 10, shape).astype(np.float64) for shape in (n.shape, n.parameter, n.parameter))
    count = x.size // channels(layout)
    total, squares = (v.astype(np.float64) for v in reference.genstats(x, layout=layout))
    factor, summand, *statistics = reference.bn_finalize(total, squares, count, scale=scale, bias=bias, eps=0.01)
    given = {"total": total, "squares": squares, "scale": scale, "bias": bias}
    errors = cases_stats.finalize_error(given, count, eps=0.01, momentum=0.1, format="float64")
    y, *wanted = n.definition(x, scale, bias)
    of_y, *own = n.definition_errors(x, scale, bias)
    for found in zip(statistics, wanted, errors[2:], own, strict=True):
        running_error.agree(*found)
    along = ft.partial(_along_channels, layout=layout)
    of_pieces = np.abs(x) * along(errors[0]) + along(errors[1])
    rounded = 2 * np.finfo(np.float64).eps * (np.abs(x * along(factor)) + np.abs(along(summand)))
    running_error.agree(x * along(factor) + along(summand), y, of_y, of_pieces, rounded)


def _along_channels(v: np.ndarray, *, layout: str) -> np.ndarray:
    if "c" in layout:
        return v.reshape(1, -1, 1, 1, SHAPES[layout][-1])
    return v.reshape(tuple(-1 if letter == "C" else 1 for letter in layout))


def sums(c: int = 13, count: int = 50, mean: float = 0.5) -> tuple[np.ndarray, ...]:
    """Total, squares, scale, bias, an old mean and an old variance."""
    rng = np.random.default_rng([c, count])
    x = mean + rng.normal(size=(count, c))
    made = (x.sum(0), (x * x).sum(0), rng.normal(size=c), rng.normal(size=c), rng.normal(size=c), rng.uniform(1, 2, c))
    return tuple(v.astype(np.float32) for v in made)


def check_finalize(given: dict[str, np.ndarray], count: int, **options: Any) -> list[np.ndarray]:
    """The results within the computed bounds, with the definition's share."""
    parameters: dict[str, Any] = {name: v for name, v in given.items() if name not in ("total", "squares")}
    run = jax.jit(lambda total, squares, given: dnn.bn_finalize(total, squares, count, **given, **options))
    found = run(given["total"], given["squares"], parameters)
    golden = reference.bn_finalize(given["total"], given["squares"], count, **parameters, **options)
    wide = {name: v.astype(np.float64) for name, v in given.items()}
    about = {"eps": 1e-5, "momentum": 0.1, **options}
    bounds = [cases_stats.finalize_error(wide, count, **about, format=f) for f in ("float32", "float64")]
    agree(found, golden, [a + b for a, b in zip(*bounds, strict=True)])
    return [np.asarray(v) for v in found]


NAMES = ("total", "squares", *cases_stats.GIVEN)


@pytest.mark.parametrize("given", [(), ("scale",), ("bias",), ("running_mean", "running_variance"), cases_stats.GIVEN])
@pytest.mark.parametrize(("momentum", "eps"), [(0.1, 1e-5), (1.0, 0.0), (0.0, 0.5)])
def test_finalize(given: tuple[str, ...], momentum: float, eps: float):
    named = dict(zip(NAMES, sums(), strict=True))
    check_finalize({n: v for n, v in named.items() if n in NAMES[:2] + given}, 50, momentum=momentum, eps=eps)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [(), ("scale",), ("bias",), ("scale", "bias")])
def test_finalize_inference(given: tuple[str, ...], dtype: str):
    _, _, scale, bias, mean, variance = (v.astype(DTYPES[dtype]) for v in sums())
    named: dict[str, Any] = {name: v for name, v in (("scale", scale), ("bias", bias)) if name in given}
    format = "float64" if dtype == "f64" else "float32"
    found = jax.jit(ft.partial(dnn.bn_finalize_inference, eps=0.01))(mean, variance, **named)
    assert [v.dtype for v in found] == [np.dtype(format)] * 2
    wide = {n: v.astype(np.float64) for n, v in {"mean": mean, "variance": variance, **named}.items()}
    bounds = [cases_stats.inference_error(wide, eps=0.01, format=f) for f in (format, "float64")]
    golden = reference.bn_finalize_inference(mean, variance, **named, eps=0.01)
    agree(found, golden, [a + b for a, b in zip(*bounds, strict=True)])


@pytest.mark.parametrize("module", [reference, dnn])
def test_pieces_make_batch_norm_inference(module: Any):
    """Of powers of two and whole numbers, of which nothing is rounded."""
    rng = np.random.default_rng(6)
    x, mean, scale, bias = (rng.integers(-9, 10, s).astype(np.float32) for s in ((4, 5, 6, 3), 3, 3, 3))
    variance = np.array([0.25, 1.0, 16.0], np.float32)
    given: dict[str, Any] = {"scale": scale, "bias": bias, "eps": 0.0}
    factor, summand = map(np.asarray, module.bn_finalize_inference(mean, variance, **given))
    np.testing.assert_array_equal(x * factor + summand, module.batch_norm_inference(x, mean, variance, **given))


def test_a_difference_below_zero_is_no_variance():
    total, squares = (
        np.array([6, 3], np.float32),
        np.array([11.999, 4.5], np.float32),
    )  # three times 2, and a little less than that
    found = check_finalize({"total": total, "squares": squares}, 3, eps=0.25)
    assert found[5][0] == 0
    assert found[3][0] == 2
    slope = jax.jit(jax.grad(lambda q: dnn.bn_finalize(total, q, 3, eps=0.25)[3].sum()))(squares)
    assert slope[0] == 0
    assert slope[1] != 0


def test_one_element_has_no_unbiased_variance():
    one = np.array([2.0], np.float32)
    *_, mean, rstd, _, variance = dnn.bn_finalize(one, one * one, 1, eps=4.0)
    assert (mean.item(), rstd.item()) == (2.0, 0.5)
    assert np.isnan(variance).all()
    assert np.isnan(reference.bn_finalize(one, one * one, 1)[-1]).all()


def test_what_is_not_finite_stays_in_its_channel():
    total, squares, *_ = sums(3)
    clean = dnn.bn_finalize(total, squares, 50)
    total[1] = np.nan
    for value, before in zip(dnn.bn_finalize(total, squares, 50), clean, strict=True):
        assert np.isnan(value[1])
        np.testing.assert_array_equal(np.asarray(value)[[0, 2]], np.asarray(before)[[0, 2]])


def test_momentum_of_zero_reads_nothing_new_and_of_one_nothing_old():
    total, squares, _, _, mean, variance = sums()
    old: dict[str, Any] = {"running_mean": mean, "running_variance": variance}
    nan: dict[str, Any] = {name: np.full_like(v, np.nan) for name, v in old.items()}
    for value, wanted in zip(
        dnn.bn_finalize(total, squares, 50, **nan, momentum=1.0)[4:], (total, squares), strict=True
    ):
        assert np.isfinite(value).all() == np.isfinite(wanted).all()
    for value, wanted in zip(
        dnn.bn_finalize(total * np.nan, squares, 50, **old, momentum=0.0)[4:], (mean, variance), strict=True
    ):
        np.testing.assert_array_equal(value, wanted)


def test_a_weight_of_zero_reads_nothing_in_the_definitions_too():
    total, squares, *_ = (v.astype(np.float64) for v in sums())
    nan: dict[str, Any] = dict.fromkeys(("running_mean", "running_variance"), np.full_like(total, np.nan))
    x = arrays("NHWC")[0][..., :1]
    one: dict[str, Any] = dict.fromkeys(("running_mean", "running_variance"), np.full(1, np.nan))
    for found in (
        reference.bn_finalize(total, squares, 50, **nan, momentum=1.0),
        reference.batch_norm(x, **one, momentum=1.0),
        dnn.batch_norm(x, **one, momentum=1.0),
    ):
        assert all(np.isfinite(v).all() for v in found)


@pytest.mark.parametrize("size", [1e18, 1e20, 1e30])
def test_beyond_the_range_of_the_squares_nothing_looks_right(size: float):
    """As stated: up to 1.8e19 / √m the statistics are right; beyond, what normalises is 0 or NaN."""
    x = (size * np.array([-1.5, 0.5, 1.0], np.float32)).reshape(3, 1, 1, 1)
    factor, _, mean, rstd, *_ = jax.jit(lambda x: dnn.bn_finalize(*dnn.genstats(x), 3))(x)
    np.testing.assert_allclose(mean, 0, atol=1e-6 * size)
    if size < 1.8e19 / np.sqrt(3):
        np.testing.assert_allclose([factor, rstd], 1 / x.std(dtype=np.float64), rtol=1e-5)
    else:
        assert not np.nan_to_num(np.asarray([factor, rstd])).any()


def test_a_shift_near_the_mean_keeps_the_digits():
    """A mean of 10⁴ deviations: nothing is left of the variance without a shift, and all within the bounds with one."""
    x = arrays("NHWC", np.float32, 1e4)[0]
    shift = np.full(8, 1e4 + 2, np.float32)
    total, squares = dnn.genstats(x, shift=shift)
    bounds = [cases_stats.sums_error(x, "NHWC", f, shift) for f in ("float32", "float64")]
    agree((total, squares), reference.genstats(x, shift=shift), [a + b for a, b in zip(*bounds, strict=True)])
    given = {"total": np.asarray(total), "squares": np.asarray(squares), "shift": shift}
    found = check_finalize(given, x.size // 8)
    exact, m = x.astype(np.float64).reshape(-1, 8), x.size // 8
    of_total, of_squares = (v / m for v in bounds[0])
    wide = {name: v.astype(np.float64) for name, v in given.items()}
    own = cases_stats.finalize_error(wide, m, eps=1e-5, momentum=0.1, format="float32")
    d = np.abs(wide["total"] / m)
    allowed = own[5] + (of_squares + 2 * d * of_total + of_total**2) * m / (m - 1)
    assert (np.abs(found[5] - exact.var(0, ddof=1)) <= allowed).all()
    assert (np.abs(found[2] - exact.mean(0)) <= own[2] + of_total).all()
    plain = np.asarray(dnn.bn_finalize(*dnn.genstats(x), m)[5])
    assert (np.abs(plain - exact.var(0, ddof=1)) > allowed).any()


def test_sums_of_devices_add_up():
    """Inside shard_map by psum, and in a program that XLA shards; integers, so that no order shows."""
    x = np.random.default_rng(4).integers(-4, 5, (8, 3, 2, 5)).astype(np.float32)
    mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, none = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    wanted = dnn.bn_finalize(*dnn.genstats(x), x.size // 5)

    def local(x: Any) -> Any:
        total, squares = jax.lax.psum(dnn.genstats(x), "d")
        return dnn.bn_finalize(total, squares, x.size * mesh.size // 5)

    manual = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=none))
    automatic = jax.jit(lambda x: dnn.bn_finalize(*dnn.genstats(x), x.size // 5))
    named = {n: np.asarray(v, np.float64) for n, v in zip(NAMES, dnn.genstats(x), strict=False)}
    errors = cases_stats.finalize_error(named, x.size // 5, eps=1e-5, momentum=0.1, format="float32")
    for program in (manual, automatic):
        found = program(jax.device_put(x, jax.sharding.NamedSharding(mesh, rows)))
        for a, b, error in zip(found, wanted, errors, strict=True):
            running_error.agree(a, b, error, error)


def test_count_may_be_an_array():
    total, squares, *_ = sums()
    run = jax.jit(lambda n: dnn.bn_finalize(total, squares, n))
    fixed, traced = dnn.bn_finalize(total, squares, 50), run(jnp.float32(50))
    named = {"total": total.astype(np.float64), "squares": squares.astype(np.float64)}
    errors = cases_stats.finalize_error(named, 50, eps=1e-5, momentum=0.1, format="float32")
    for a, b, error in zip(fixed, traced, errors, strict=True):
        assert (np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)) <= 2 * error).all()


# ---- derivatives and transformations ---------------------------------------------------------------------------------


# The definition's roundoff for float64, over that of float64.
SHARE = float(np.finfo(np.longdouble).eps) * 2.0**52


def whole(module: Any, x: Any, scale: Any, bias: Any) -> Any:
    """Both ops behind each other: y, and all that there is besides."""
    total, squares = module.genstats(x)
    count = x.size // x.shape[-1]
    factor, summand, *rest = module.bn_finalize(total, squares, count, scale=scale, bias=bias, eps=0.1)
    along = lambda v: v.reshape(1, 1, 1, -1)
    return x * along(factor) + along(summand), *rest


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("result", range(5))
def test_tangents_are_slopes_of_the_definition(result: int, which: int):
    rng = np.random.default_rng(7)
    given = running_error.coarse(rng.normal(size=(3, 2, 4, 3)), rng.normal(size=3), rng.normal(size=3))
    (direction,) = running_error.coarse(rng.normal(size=given[which].shape))

    def run(module: Any, v: Any) -> Any:
        return whole(module, *(v if i == which else a for i, a in enumerate(given)))[result]

    ours = ft.partial(run, dnn)
    along = lambda v: jax.jvp(ours, (v,), (jnp.asarray(direction),))[1]
    start = jnp.asarray(given[which])
    off = running_error.bounds(ours, start)[1] * SHARE
    wanted, slack = running_error.slope(lambda h: run(reference, given[which] + h * direction), off)
    running_error.agree(along(start), wanted, slack, running_error.bounds(along, start)[1])


def test_transformations_agree_with_each_other():
    rng = np.random.default_rng(8)
    given = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 2, 4, 3), (3,), (3,))]
    loss = lambda *a: sum(jnp.sum(v * v) for v in whole(dnn, *a))
    gradients = jax.grad(loss, (0, 1, 2))
    mapped = jax.jit(jax.vmap(gradients))(*(np.stack([v, v]) for v in given))
    remat = jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*given)
    errors = running_error.bounds(gradients, *given)[1]
    for one, two, three, error in zip(jax.jit(gradients)(*given), mapped, remat, errors, strict=True):
        running_error.agree(one, two[1], error, error)
        running_error.agree(one, three, error, error)


ONE = np.ones(3, np.float32)
CALLS: dict[str, tuple[type[Exception], str, Any]] = {
    "no array": (TypeError, r"`x` must be an array, got NoneType", lambda: dnn.genstats(None)),  # type: ignore[arg-type]
    "integers": (TypeError, r"`x` must have one of", lambda: dnn.genstats(np.ones((1, 1, 1, 2), np.int32))),
    "layout": (ValueError, r"`layout` must be one of", lambda: dnn.genstats(np.ones((1, 2)), layout="NC")),
    "level": (
        NotImplementedError,
        r"`determinism` 'batch_invariant' cannot be guaranteed for genstats, expected 'run_to_run' or less",
        lambda: dnn.genstats(np.ones((1, 1, 1, 2), np.float32), determinism="batch_invariant"),
    ),
    "level, finalize": (
        NotImplementedError,
        r"cannot be guaranteed for bn_finalize, expected 'run_to_run' or less",
        lambda: dnn.bn_finalize(ONE, ONE, 2, determinism="portable"),
    ),
    "axes": (
        ValueError,
        r"`total` must have one axis, the channels, got shape",
        lambda: dnn.bn_finalize(ONE[None], ONE, 2),
    ),
    "narrow": (TypeError, r"`total` must have one of", lambda: dnn.bn_finalize(ONE.astype(np.float16), ONE, 2)),
    "sizes": (ValueError, r"`squares` must have shape \(3,\)", lambda: dnn.bn_finalize(ONE, ONE[:2], 2)),
    "count": (
        ValueError,
        r"`count` must be a number of at least 1 that float32 holds, got 0",
        lambda: dnn.bn_finalize(ONE, ONE, 0),
    ),
    "count of infinity": (
        ValueError,
        r"`count` must be a number of at least 1 that float32 holds, got inf",
        lambda: dnn.bn_finalize(ONE, ONE, float("inf")),
    ),
    "large count": (ValueError, r"that float32 holds, got 1e\+39", lambda: dnn.bn_finalize(ONE, ONE, 1e39)),
    "narrow count": (
        TypeError,
        r"`count` must have one of",
        lambda: dnn.bn_finalize(ONE, ONE, np.array(8, np.float16)),
    ),
    "shift": (ValueError, r"`shift` must have shape \(3,\)", lambda: dnn.bn_finalize(ONE, ONE, 2, shift=ONE[:2])),
    "shift of sums": (
        ValueError,
        r"`shift` must have shape \(2,\)",
        lambda: dnn.genstats(np.ones((1, 1, 1, 2), np.float32), shift=ONE),
    ),
    "axes in inference": (
        ValueError,
        r"`mean` must have one axis, the channels, got shape",
        lambda: dnn.bn_finalize_inference(ONE[None], ONE),
    ),
    "variance": (ValueError, r"`variance` must have shape", lambda: dnn.bn_finalize_inference(ONE, ONE[:2])),
    "two dtypes": (
        TypeError,
        r"`variance` must have",
        lambda: dnn.bn_finalize_inference(ONE, ONE.astype(np.float16)),
    ),
    "level, inference": (
        NotImplementedError,
        r"cannot be guaranteed for bn_finalize_inference, expected 'mesh_invariant' or less",
        lambda: dnn.bn_finalize_inference(ONE, ONE, determinism="portable"),
    ),
    "counts": (ValueError, r"`count` must have shape \(\)", lambda: dnn.bn_finalize(ONE, ONE, ONE)),
    "scale": (ValueError, r"`scale` must have shape \(3,\)", lambda: dnn.bn_finalize(ONE, ONE, 2, scale=ONE[:2])),
    "half": (ValueError, r"must be given both or neither", lambda: dnn.bn_finalize(ONE, ONE, 2, running_mean=ONE)),
    "momentum": (ValueError, r"`momentum` must be a number from 0", lambda: dnn.bn_finalize(ONE, ONE, 2, momentum=2)),
    "eps": (ValueError, r"`eps` must be a finite number", lambda: dnn.bn_finalize(ONE, ONE, 2, eps=-1.0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments(name: str):
    kind, message, call = CALLS[name]
    with pytest.raises(kind, match=message):
        call()


def test_dbn_weight_of_more_elements_than_an_int32_counts():
    x = jax.ShapeDtypeStruct((2048, 1024, 1024, 1), jnp.bfloat16)
    c = jax.ShapeDtypeStruct((1,), jnp.float32)
    assert [v.shape for v in jax.eval_shape(dnn.dbn_weight, x, x, c, c)] == [(1,)] * 5


def test_dbn_weight_without_channels_is_empty():
    x, c = np.zeros((2, 3, 3, 0), np.float32), np.zeros(0, np.float32)
    assert [v.shape for v in dnn.dbn_weight(x, x, c, c)] == [(0,)] * 5
    assert [v.shape for v in reference.dbn_weight(x, x, c, c)] == [(0,)] * 5
