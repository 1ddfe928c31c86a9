"""Determinism levels of the normalisations, and the errors that bad arguments get."""

import functools as ft
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.core import engines
from tests.core import running_error

X = jnp.zeros((2, 3, 4, 6))
VECTORS = jnp.zeros((2, 4, 1, 2, 3))
FLOAT: Any = 1.0
TEXT: Any = "2"
ARRAY: Any = jnp.ones(6)
INTEGER: Any = 1
NAMES: Any = {"d"}
ROW, C, SAMPLES = jnp.ones(6), jnp.ones(6), jnp.ones((2, 6))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("length", [3, 7, 129])
def test_ordered_rows_do_not_depend_on_the_batch(dtype: Any, length: int):
    rng = np.random.default_rng(length)
    x, s = jnp.asarray(rng.normal(1, 3, (33, length)), dtype), jnp.asarray(rng.normal(size=length), jnp.float32)
    dy = x[::-1]

    @jax.jit
    def run(x: Any, dy: Any) -> Any:
        with dnn.determinism("batch_invariant"):
            forward = dnn.layer_norm(x, scale=s, bias=s, return_statistics=True)
            return *forward, dnn.layer_norm_dgrad(dy, x, scale=s)[0], dnn.rms_norm(x, scale=s)

    whole = run(x, dy)
    for start, size in ((0, 1), (5, 2), (1, 3), (25, 8), (16, 17)):
        part = slice(start, start + size)
        for some, all_rows in zip(run(x[part], dy[part]), whole, strict=True):
            np.testing.assert_array_equal(some, all_rows[part])


@pytest.mark.parametrize("op", [dnn.layer_norm, dnn.rms_norm], ids=lambda op: op.__name__)
def test_ordered_deviations_do_not_depend_on_the_batch(op: Any):
    """So many that XLA takes their reciprocal roots in vectors, whose bits on CPUs are others with JAX 0.12."""
    x = np.random.default_rng(0).normal(1, 3, (40, 5, 64)).astype(np.float32)
    run = jax.jit(ft.partial(op, engine="ordered", return_statistics=True))
    whole, each = run(x)[-1], [run(x[i : i + 1])[-1] for i in range(len(x))]
    np.testing.assert_array_equal(whole, np.concatenate(each))


def test_levels_are_told_and_kept():
    with dnn.determinism("batch_invariant"):
        calls = dnn.explain(dnn.layer_norm, X)
        assert [call.engine for call in calls] == ["ordered"]
        with pytest.raises(NotImplementedError, match=r"`batch_norm` on cpu cannot be served .*'run_to_run' here"):
            dnn.batch_norm(X)
    with pytest.raises(NotImplementedError, match=r"engine 'xla' at determinism level 'batch_invariant'"):
        dnn.layer_norm(X, engine="xla", determinism="batch_invariant")
    with pytest.raises(NotImplementedError, match=r"`determinism` 'portable' cannot be guaranteed for lrn"):
        dnn.lrn(X, determinism="portable")
    with pytest.raises(NotImplementedError, match=r"`layer_norm` on cpu cannot be served by engine 'hopper'"):
        dnn.layer_norm(X, engine="hopper")


NONE: Any = None
YES: Any = "yes"


def _blends() -> dict[str, Any]:
    """What is wrong with the blends of a gradient, by argument."""
    back, short = ft.partial(dnn.batch_norm_dgrad, X, X), jnp.ones(5)
    found: dict[str, Any] = {}
    for name in ("alpha", "beta", "alpha_param", "beta_param"):
        prior = (
            {"prior": X} if name == "beta" else {"prior_dscale": C, "prior_dbias": C} if name == "beta_param" else {}
        )
        shape = rf"`{name}` must have shape \(\), a number or a scalar array, got \(6,\)"
        found[f"{name} of an array"] = (ValueError, shape, ft.partial(back, **{name: C}, **prior))
        found[f"{name} of text"] = (TypeError, rf"`{name}` must be an array", ft.partial(back, **{name: TEXT}, **prior))
        wrong = jnp.zeros((), jnp.complex64)
        found[f"{name} of a complex number"] = (
            TypeError,
            rf"`{name}` must have one of the dtypes",
            ft.partial(back, **{name: wrong}, **prior),
        )
    missing = r"must be given when `beta{0}` is not zero, got beta{0} {1} and no prior"
    found["no prior, back"] = (ValueError, "`prior` " + missing.format("", "0.5"), ft.partial(back, beta=0.5))
    found["no prior_dscale"] = (
        ValueError,
        "`prior_dscale` " + missing.format("_param", "2.0"),
        ft.partial(back, beta_param=2, prior_dbias=C),
    )
    found["no prior_dbias"] = (
        ValueError,
        "`prior_dbias` " + missing.format("_param", "2.0"),
        ft.partial(back, beta_param=2, prior_dscale=C),
    )
    found["no prior for an array"] = (
        ValueError,
        "`prior` must be given when `beta` is not zero",
        ft.partial(back, beta=jnp.zeros(())),
    )
    for name, shape in (
        ("prior", r"\(2, 3, 4, 6\), the result's"),
        ("prior_dscale", r"\(6,\), the result's"),
        ("prior_dbias", r"\(6,\), the result's"),
    ):
        # Read or not, a prior is checked.
        unread = {"beta": 0.0} if name == "prior" else {"beta_param": 0.0}
        found[f"shape of {name}"] = (ValueError, f"`{name}` must have ", ft.partial(back, **unread, **{name: short}))
        full = X if name == "prior" else C
        found[f"dtype of {name}"] = (
            TypeError,
            f"`{name}` must have one of the dtypes bfloat16, float16, float32",
            ft.partial(back, **unread, **{name: full.astype(jnp.int32)}),
        )
        found[f"{name} is no array"] = (
            TypeError,
            f"`{name}` must be an array, got str",
            ft.partial(back, **unread, **{name: TEXT}),
        )
        if name != "prior":
            found[f"full shape of {name}"] = (
                ValueError,
                f"`{name}` must have shape {shape}",
                ft.partial(back, **unread, **{name: X}),
            )
    found["prior of another batch"] = (
        ValueError,
        r"`prior` must have shape \(2, 3, 4, 6\), the result's",
        ft.partial(back, beta=0.0, prior=X[:1]),
    )
    return found


def with_hopper(function: Callable[..., Any], *operands: Any) -> Any:
    with engines.asked("hopper"):
        return function(*operands)


ERRORS: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "axis": (
        ValueError,
        r"`axis` must be made of axes from -4 to 3 of `x`, got 4",
        lambda: dnn.layer_norm(X, axis=4),
    ),
    "axis twice": (
        ValueError,
        r"`axis` must name every axis once, got \(3, -1",
        lambda: dnn.rms_norm(X, axis=(3, -1)),
    ),
    "no axis": (ValueError, r"`axis` must be made of axes", lambda: dnn.rms_norm(X, axis=())),
    "axis of floats": (TypeError, r"`axis` must be made of integers", lambda: dnn.layer_norm(X, axis=FLOAT)),
    "first axis": (
        ValueError,
        r"`axis` must leave the first axis",
        lambda: dnn.adaptive_layer_norm(X, ROW, ROW, axis=0),
    ),
    "scale": (
        ValueError,
        r"`scale` must have shape \(6,\), the sizes of x",
        lambda: dnn.layer_norm(X, scale=jnp.ones(5)),
    ),
    "bias": (ValueError, r"`bias` must have shape \(2, 6\)", lambda: dnn.adaptive_layer_norm(X, SAMPLES, ROW)),
    "integers": (TypeError, r"`x` must have one of the dtypes float32", lambda: dnn.layer_norm(jnp.arange(4))),
    "dtype of scale": (
        TypeError,
        r"`scale` must have one of the dtypes",
        lambda: dnn.layer_norm(X, scale=jnp.arange(6)),
    ),
    "out_dtype": (TypeError, r"`out_dtype` must have one of the dtypes", lambda: dnn.layer_norm(X, out_dtype=jnp.int8)),
    "eps": (ValueError, r"`eps` must be a finite number of at least 0, got -1.0", lambda: dnn.layer_norm(X, eps=-1)),
    "eps of an array": (TypeError, r"`eps` must be a number known when traced", lambda: dnn.rms_norm(X, eps=ARRAY)),
    "zero_centred": (
        TypeError,
        r"`zero_centred` must be True or False, got 1",
        lambda: dnn.rms_norm(X, zero_centred=INTEGER),
    ),
    "groups": (ValueError, r"`groups` must divide the 6 channels of x, got 4", lambda: dnn.group_norm(X, groups=4)),
    "channels": (
        ValueError,
        r"`channels` must be given for layout NCHWc3, .* how many of the 12 channels of x there are, got None",
        lambda: dnn.group_norm(VECTORS, groups=2, layout="NCHWc3"),
    ),
    "channels of other vectors": (
        ValueError,
        r"`channels` must be from 10 to 12 for x, got 9",
        lambda: dnn.group_norm_dgrad(VECTORS, VECTORS, groups=3, channels=9, layout="NCHWc3"),
    ),
    "channels of x": (
        ValueError,
        r"`channels` must be None or the 6 that x has, got 5",
        lambda: dnn.group_norm(X, groups=2, channels=5),
    ),
    "layout": (ValueError, r"`layout` must be one of NWC", lambda: dnn.instance_norm(X, layout="HWC")),
    "rank": (ValueError, r"`x` must have 3 dimensions for layout NWC", lambda: dnn.instance_norm(X, layout="NWC")),
    "dy": (ValueError, r"`dy` must have shape \(2, 3, 4, 6\), that of x", lambda: dnn.layer_norm_dgrad(X[0], X)),
    "one statistic": (
        ValueError,
        r"`mean` and `rstd` must be given both",
        lambda: dnn.layer_norm_dgrad(X, X, mean=X[..., 0]),
    ),
    "statistics": (ValueError, r"`rstd` must have shape \(2, 3, 4\)", lambda: dnn.rms_norm_dgrad(X, X, rstd=X)),
    "mode": (ValueError, r"`mode` must be one of 'spatial'", lambda: dnn.batch_norm(X, mode="channel")),
    "one running": (
        ValueError,
        r"`running_mean` and `running_variance` must",
        lambda: dnn.batch_norm(X, running_mean=C),
    ),
    "momentum": (
        ValueError,
        r"`momentum` must be a number from 0 to 1, got 2.0",
        lambda: dnn.batch_norm(X, momentum=2),
    ),
    "prior": (ValueError, r"`prior` must be given when `beta` is not zero", lambda: dnn.batch_norm(X, beta=1.0)),
    **_blends(),
    "residual": (ValueError, r"`residual` must have shape", lambda: dnn.batch_norm(X, residual=X[:1])),
    "activation": (ValueError, r"`activation` must be None, one of", lambda: dnn.batch_norm(X, activation="rellu")),
    "n": (ValueError, r"`n` must be at least 1, got 0", lambda: dnn.lrn(X, n=0)),
    "large n": (ValueError, r"`n` must be at most 2147483647, got", lambda: dnn.lrn(X, n=10**400)),
    "large n, divisive": (ValueError, r"`n` must be at most", lambda: dnn.divisive_norm(X, n=10**400)),
    "no mean": (TypeError, r"`mean` must be an array, got NoneType", lambda: dnn.batch_norm_inference(X, NONE, C)),
    "axis_name": (TypeError, r"`axis_name` must be None, the name of", lambda: dnn.batch_norm(X, axis_name=INTEGER)),
    "unbound": (ValueError, r"`axis_name` must name axes of .*'foo'", lambda: dnn.batch_norm(X, axis_name="foo")),
    "unbound, back": (ValueError, r"`axis_name` must name", lambda: dnn.batch_norm_dgrad(X, X, axis_name="foo")),
    "unhashable": (TypeError, r"`axis_name` must be None", lambda: dnn.batch_norm_dgrad(X, X, axis_name=NAMES)),
    "traced": (
        TypeError,
        r"`axis_name` must be None, the name of a mesh axis or several, got a traced array of float32",
        lambda: jax.jit(lambda name: dnn.batch_norm_dgrad(X, X, axis_name=name))(X),
    ),
    "named twice": (
        ValueError,
        r"`axis_name` must name an axis once, got \('d', 'd'\)",
        lambda: jax.vmap(lambda x: dnn.batch_norm(x, axis_name=("d", "d")), axis_name="d")(X[None]),
    ),
    "engine": (
        NotImplementedError,
        r"`engine` must be None or 'xla' with `axis_name`, got 'hopper'",
        lambda: jax.vmap(lambda x: dnn.batch_norm(x, axis_name="d", engine="hopper"), axis_name="d")(X[None]),
    ),
    "engine, asked for around the call": (
        NotImplementedError,
        r"`engine` must be None or 'xla' with `axis_name`, got 'hopper'",
        lambda: with_hopper(jax.vmap(lambda x: dnn.batch_norm(x, axis_name="d"), axis_name="d"), X[None]),
    ),
    "scalar": (ValueError, r"`x` must have at least one axis, got a scalar", lambda: dnn.layer_norm(2.0)),
    "return_statistics": (
        TypeError,
        r"`return_statistics` must be True or False, got 'yes'",
        lambda: [f(X, return_statistics=YES) for f in (dnn.layer_norm, dnn.rms_norm, dnn.instance_norm)],
    ),
    "complex y": (TypeError, r"`y` must have one of", lambda: dnn.batch_norm_dgrad(X, X, y=X.astype(jnp.complex64))),
    "integer y": (TypeError, r"`y` must have one of", lambda: dnn.batch_norm_dgrad(X, X, y=X.astype(jnp.int32))),
    "even": (ValueError, r"`even` must be one of 'high', 'low'", lambda: dnn.lrn(X, even="left")),
    "lrn_alpha": (ValueError, r"`lrn_alpha` must be a finite number", lambda: dnn.lrn(X, lrn_alpha=float("inf"))),
    "k": (TypeError, r"`k` must be a number known when traced", lambda: dnn.divisive_norm(X, k=TEXT)),
    "means": (ValueError, r"`means` must have shape", lambda: dnn.divisive_norm(X, means=X[0:1])),
    "p": (ValueError, r"`p` must be a number of at least 1, got 0.5", lambda: dnn.lp_normalize(X, p=0.5)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_teach(name: str):
    kind, message, call = ERRORS[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert re.fullmatch(r"[^.]*(\.\d[^.]*)*\.", str(caught.value)) or str(caught.value).count(". ") == 0


def test_gradients_of_integers_are_refused_where_they_are_read():
    with pytest.raises(TypeError, match="`dy` must have one of the dtypes"):
        dnn.layer_norm_dgrad(jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3)))


def test_numpy_float64_is_read_as_jax_reads_it():
    x, c = np.random.default_rng(6).normal(size=(2, 2, 3, 4, 6)).astype(np.float32), np.arange(1.0, 7)
    calls = {
        "batch": lambda x, dy, c: dnn.batch_norm(x, scale=c, bias=c, running_mean=c, running_variance=c, residual=dy),
        "batch, back": lambda x, dy, c: dnn.batch_norm_dgrad(
            dy, x, scale=c, mean=c, rstd=c, y=x, prior_dscale=c, prior_dbias=c, beta_param=1.0
        ),
        "inference": lambda x, dy, c: dnn.batch_norm_inference(x, c, c, prior=dy, beta=1.0),
        "layer": lambda x, dy, c: dnn.layer_norm(x, scale=c, bias=c),
        "layer, back": lambda x, dy, c: dnn.layer_norm_dgrad(dy, x, scale=c, mean=dy[..., 0], rstd=dy[..., 1]),
        "group": lambda x, dy, c: dnn.group_norm(x, groups=2, scale=c, bias=c),
        "group, back": lambda x, dy, c: dnn.group_norm_dgrad(dy, x, groups=6, mean=dy[:, 0, 0], rstd=dy[:, 0, 1]),
        "divisive": lambda x, dy, c: dnn.divisive_norm(x, means=dy, prior=dy, beta=1.0),
    }
    for name, call in calls.items():
        wide, narrow = (jax.tree.leaves(call(*(v.astype(t) for v in (*x, c)))) for t in (np.float64, np.float32))
        for ours, theirs in zip(wide, narrow, strict=True):
            assert ours.dtype == jnp.float32, name
            np.testing.assert_array_equal(ours, theirs, name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_derivative_in_a_saved_mean(dtype: Any) -> None:
    dy, x = (jax.random.normal(jax.random.key(i), (2, 5)).astype(dtype) for i in (1, 2))
    _, mean, rstd = dnn.layer_norm(x, return_statistics=True)
    run = lambda mean: dnn.layer_norm_dgrad(dy, x, mean=mean, rstd=rstd, out_dtype=jnp.float32)[0]
    tangent = jax.jvp(run, (mean,), (jnp.ones_like(mean),))[1]
    definition = lambda h: reference.layer_norm_dgrad(
        np.asarray(dy), np.asarray(x), mean=np.asarray(mean, np.float64) + h, rstd=np.asarray(rstd)
    )[0]
    if dtype == jnp.float32:
        np.testing.assert_array_equal(tangent, jnp.zeros_like(tangent))
        return
    pushed = lambda mean: jax.jvp(run, (mean,), (jnp.ones_like(mean),))[1]
    # The definition is quadratic in the mean, so central differences have no error but float64's.
    size = float(np.abs(definition(0.5)).max() + np.abs(definition(-0.5)).max())
    slope = (definition(0.5) - definition(-0.5)).astype(np.float64)
    running_error.agree(tangent, slope, running_error.bounds(pushed, mean)[1], 64 * 2.0**-53 * size)
    assert np.abs(slope).max() > 0.01
