"""The backward op of batch normalisation in pieces: values, what the pieces make together, gradients, bad arguments."""

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
from jaxdnn_reference.norm_batch import of_batch
from tests.core import running_error

SHAPES = cases_stats.SHAPES
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f64": np.float64}
NAMES = ("dy", "x", "mean", "rstd", "scale")


def arrays(layout: str, dtype: Any, center: float = 0.5) -> tuple[np.ndarray, ...]:
    """dy, x, and of every channel mean and inverse deviation, wide, and a scale."""
    rng, wide = np.random.default_rng(len(layout)), np.result_type(dtype, np.float32)
    x = (center + rng.normal(size=SHAPES[layout])).astype(dtype)
    dy = rng.normal(0.1, 1, SHAPES[layout]).astype(dtype)
    v = of_batch(x.astype(np.float64), "spatial", layout)
    statistics = v.x.mean(tuple(v.axes)), 1 / v.x.std(tuple(v.axes))
    return dy, x, *(s.astype(wide) for s in statistics), rng.normal(size=v.own).astype(dtype)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("center", [0.5, 300.0])
def test_values(center: float, dtype: str, layout: str):
    given = dict(zip(NAMES, arrays(layout, DTYPES[dtype], center), strict=True))
    for parameters in (given, {name: v for name, v in given.items() if name != "scale"}):
        dy, x, mean, rstd, *scale = parameters.values()
        named: dict[str, Any] = dict(zip(["scale"], scale, strict=False))
        found = dnn.dbn_weight(dy, x, mean, rstd, **named, layout=layout)
        golden = reference.dbn_weight(dy, x, mean, rstd, **named, layout=layout)
        wide = {name: v.astype(np.float64) for name, v in parameters.items()}
        bounds = (cases_stats.weight_error(wide, layout, format=f) for f in (mean.dtype.name, "float64"))
        for value, wanted, error, own in zip(found, golden, *bounds, strict=True):
            assert value.dtype == mean.dtype
            told = tolerance.compare(np.asarray(value), np.asarray(wanted, np.float64), error + own)
            assert told.passed, told.message
            assert not told.unchecked


def integers() -> dict[str, np.ndarray]:
    """Sixteen numbers of each of three channels, whole as their mean is, and inverse deviations that are powers of 2.

    Nothing of what is made of them is rounded.
    """
    rng = np.random.default_rng(5)
    x, dy = (rng.integers(-9, 10, (4, 2, 2, 3)).astype(np.float64) for _ in range(2))
    x[-1, -1, -1] -= x.sum((0, 1, 2)) % 16
    rstd, scale = np.array([0.5, 1.0, 4.0]), np.array([3.0, -1.0, 2.0])
    return dict(zip(NAMES, (dy, x, x.mean((0, 1, 2)), rstd, scale), strict=True))


@pytest.mark.parametrize("module", [reference, dnn])
def test_pieces_make_the_backward_op(module: Any):
    dtype = np.float64 if module is reference else np.float32
    given = {name: v.astype(dtype) for name, v in integers().items()}
    pieces = module.dbn_weight(*list(given.values())[:4], scale=given["scale"])
    dscale, dbias, factor_dy, factor_x, summand = map(np.asarray, pieces)
    named = {name: given[name] for name in ("scale", "mean", "rstd")}
    wanted = module.batch_norm_dgrad(given["dy"], given["x"], **named)
    found = (factor_dy * given["dy"] + factor_x * given["x"] + summand, dscale, dbias)
    for value, golden in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(value, golden)


def test_what_is_not_finite_stays_in_its_channel():
    given = [v.astype(np.float32) for v in integers().values()]
    clean = dnn.dbn_weight(*given[:4], scale=given[4])
    given[1][2, 1, 0, 1] = np.inf
    for value, before in zip(dnn.dbn_weight(*given[:4], scale=given[4]), clean, strict=True):
        np.testing.assert_array_equal(np.asarray(value)[[0, 2]], np.asarray(before)[[0, 2]])
    assert not np.isfinite(np.asarray(dnn.dbn_weight(*given[:4])[3])[1])


def test_products_with_x_that_leave_the_range():
    """dy (x - mean) would, and times rstd does not."""
    given = [v.astype(np.float32) for v in integers().values()]
    clean = dnn.dbn_weight(*given[:4], scale=given[4])
    scaled = [v * np.float32(2.0**i) for v, i in zip(given[:4], (80, 52, 52, -52), strict=True)]
    found = dnn.dbn_weight(*scaled, scale=given[4])
    for value, before, i in zip(found, clean, (80, 80, -52, -24, 28), strict=True):
        np.testing.assert_array_equal(value, before * np.float32(2.0**i))


# ---- derivatives and transformations ---------------------------------------------------------------------------------

SHARE = float(np.finfo(np.longdouble).eps) * 2.0**52  # the definition's roundoff for float64, over that of float64


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("result", range(5))
def test_tangents_are_slopes_of_the_definition(result: int, which: str):
    rng = np.random.default_rng(7)
    shapes = ((3, 2, 4, 3), (3, 2, 4, 3), (3,), (3,), (3,))
    given: dict[str, Any] = dict(
        zip(NAMES, running_error.coarse(*(rng.normal(size=shape) for shape in shapes)), strict=True)
    )
    (direction,) = running_error.coarse(rng.normal(size=given[which].shape))

    def run(module: Any, v: Any) -> Any:
        *first, scale = {**given, which: v}.values()
        return module.dbn_weight(*first, scale=scale)[result]

    ours = ft.partial(run, dnn)
    along = lambda v: jax.jvp(ours, (v,), (jnp.asarray(direction),))[1]
    start = jnp.asarray(given[which])
    off = running_error.bounds(ours, start)[1] * SHARE
    wanted, slack = running_error.slope(lambda h: run(reference, given[which] + h * direction), off)
    running_error.agree(along(start), wanted, slack, running_error.bounds(along, start)[1])


def test_transformations_agree_with_each_other():
    rng = np.random.default_rng(8)
    shapes = ((3, 2, 4, 3), (3, 2, 4, 3), (3,), (3,), (3,))
    given = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    loss = lambda *a: sum(jnp.sum(v * v) for v in dnn.dbn_weight(*a[:4], scale=a[4]))
    gradients = jax.grad(loss, range(5))
    mapped = jax.jit(jax.vmap(gradients))(*(jnp.stack([v, v]) for v in given))
    remat = jax.jit(jax.grad(jax.checkpoint(loss), range(5)))(*given)
    errors = running_error.bounds(gradients, *given)[1]
    for one, two, three, error in zip(jax.jit(gradients)(*given), mapped, remat, errors, strict=True):
        running_error.agree(one, two[1], error, error)
        running_error.agree(one, three, error, error)


X, ONE = np.ones((1, 2, 2, 3), np.float32), np.ones(3, np.float32)
CALLS: dict[str, tuple[type[Exception], str, Any]] = {
    "no array": (TypeError, r"`x` must be an array, got NoneType", lambda: dnn.dbn_weight(X, None, ONE, ONE)),  # type: ignore[arg-type]
    "layout": (ValueError, r"`layout` must be one of", lambda: dnn.dbn_weight(X, X, ONE, ONE, layout="NC")),
    "sizes": (ValueError, r"`dy` must have shape", lambda: dnn.dbn_weight(X[:, :1], X, ONE, ONE)),
    "wide gradient": (
        TypeError,
        r"`dy` must have one of",
        lambda: dnn.dbn_weight(X.astype(np.int32), X, ONE, ONE),
    ),
    "mean": (ValueError, r"`mean` must have shape \(3,\)", lambda: dnn.dbn_weight(X, X, ONE[:2], ONE)),
    "narrow": (TypeError, r"`rstd` must have", lambda: dnn.dbn_weight(X, X, ONE, ONE.astype(np.float16))),
    "scale": (ValueError, r"`scale` must have shape \(3,\)", lambda: dnn.dbn_weight(X, X, ONE, ONE, scale=ONE[:2])),
    "level": (
        NotImplementedError,
        r"cannot be guaranteed for dbn_weight, expected 'run_to_run' or less",
        lambda: dnn.dbn_weight(X, X, ONE, ONE, determinism="batch_invariant"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_arguments(name: str):
    kind, message, call = CALLS[name]
    with pytest.raises(kind, match=message):
        call()
