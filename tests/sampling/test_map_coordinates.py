"""Arrays at any coordinates: the definition's bits, SciPy's and JAX's values, derivatives, NaN and infinity, errors."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.ndimage
import numpy as np
import pytest
import scipy.ndimage

import jaxdnn as dnn
import jaxdnn_reference as reference

MODES = ("constant", "grid-constant", "nearest", "mirror", "reflect", "grid-mirror", "wrap", "grid-wrap")
SHAPES = ((40,), (7, 5), (2, 3, 4))


def data(shape: tuple[int, ...], dtype: Any = np.float32, count: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """An array, and coordinates of which many are outside."""
    rng = np.random.default_rng(len(shape))
    p = rng.uniform(-1.5, 2.5, (len(shape), count)) * np.reshape(shape, (-1, 1))
    return rng.normal(size=shape).astype(dtype), p.astype(dtype)


@pytest.mark.parametrize("order", range(6))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_the_definitions(shape: tuple[int, ...], order: int):
    x, p = data(shape, count=3 if len(shape) == 3 else 9)
    some = MODES[order % 2 :: 2] if len(shape) > 1 else MODES
    given: list[dict[str, Any]] = [{"order": order, "mode": mode, "cval": 1.5} for mode in some]
    found = jax.jit(lambda x, p: [dnn.map_coordinates(x, p, **o) for o in given])(x, p)
    for y, o in zip(found, given, strict=True):
        np.testing.assert_array_equal(y, reference.map_coordinates(x, p, arithmetic="ordered", **o), err_msg=str(o))
        np.testing.assert_allclose(y, reference.map_coordinates(x, p, **o), atol=3e-5, err_msg=str(o))


@pytest.mark.parametrize("mode", MODES)
def test_the_definition_is_scipys(mode: str):
    """But for the coefficients of "reflect", which interpolate here, see below; with many elements they are alike."""
    for shape, order in itertools.product(((7, 5), (60,), (1, 9), (4, 3, 5)), range(6)):
        x, p = data(shape, np.float64)
        p = np.concatenate([p, np.round(2 * p) / 2], 1) if len(shape) == 1 else p
        wanted = scipy.ndimage.map_coordinates(x, p, order=order, mode=mode, cval=1.5)
        approximate = order > 1 and (mode in ("reflect", "grid-mirror", "nearest"))
        if approximate and min(shape) < 60 and mode != "nearest":
            continue
        if mode == "wrap" and 1 in shape:  # SciPy divides by 0
            continue
        found = reference.map_coordinates(x, p, order=order, mode=mode, cval=1.5)
        np.testing.assert_allclose(found, wanted, atol=2e-4 if approximate else 1e-11, err_msg=f"{shape} {order}")


@pytest.mark.parametrize("size", [1, 2, 6])
def test_ties_are_scipys(size: int):
    """Midway between two elements, and at the ends of what is repeated; exactly."""
    x, p = np.arange(size) ** 2.0 + 1, np.arange(-6 * size, 8 * size + 1)[None] / 2
    given = [(order, mode) for order in (0, 1) for mode in MODES if (size, mode) != (1, "wrap")]  # SciPy divides by 0
    run = jax.jit(lambda x, p: [dnn.map_coordinates(x, p, order=o, mode=mode, cval=0.5) for o, mode in given])
    for y, (order, mode) in zip(run(x.astype(np.float32), p.astype(np.float32)), given, strict=True):
        wanted = scipy.ndimage.map_coordinates(x, p, order=order, mode=mode, cval=0.5)
        np.testing.assert_array_equal(y, wanted, err_msg=f"{mode} {order}")
        np.testing.assert_array_equal(reference.map_coordinates(x, p, order=order, mode=mode, cval=0.5), wanted)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_splines_go_through_the_elements(order: int):
    """At whole coordinates y is x; SciPy's for "reflect" is off by 4e-4 here, of order 5."""
    for shape in ((4,), (3, 6)):
        x, _ = data(shape, np.float64)
        at = np.indices(shape).reshape(len(shape), -1).astype(np.float64)
        for mode in MODES:
            y = dnn.map_coordinates(x, at, order=order, mode=mode)
            np.testing.assert_allclose(y, x.ravel(), atol=1e-13, err_msg=mode)


@pytest.mark.parametrize("order", [0, 1])
def test_values_are_jaxs(order: int):
    x, p = data((7, 5))
    for ours, theirs in zip(("grid-constant", "nearest", "mirror", "reflect", "grid-wrap"),
                            ("constant", "nearest", "mirror", "reflect", "wrap"), strict=True):  # fmt: skip
        wanted = jax.scipy.ndimage.map_coordinates(jnp.asarray(x), list(p), order, theirs, 0.5)
        found = dnn.map_coordinates(x, list(p), order=order, mode=ours, cval=0.5)
        np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=ours)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("order", [1, 3, 4])
def test_derivatives_are_the_definitions_differences(order: int):
    x, p = data((7, 5), np.float64, 9)
    rng, h = np.random.default_rng(1), 2.0**-18
    dx, dp, dy = rng.normal(size=x.shape), rng.normal(size=p.shape), rng.normal(size=p.shape[1:])
    for mode in ("constant", "nearest", "reflect", "grid-wrap"):
        ours = lambda x, p, mode=mode: dnn.map_coordinates(x, p, order=order, mode=mode)
        theirs = lambda x, p, mode=mode: reference.map_coordinates(x, p, order=order, mode=mode)
        back = jax.jit(lambda x, p, f=ours: jax.vjp(f, x, p)[1](jnp.asarray(dy)))
        of_x, of_p = back(x, p)
        in_x, in_p = theirs(x + dx, p) - theirs(x, p), (theirs(x, p + h * dp) - theirs(x, p - h * dp)) / (2 * h)
        np.testing.assert_allclose(np.vdot(of_x, dx), np.vdot(dy, in_x), atol=1e-9, err_msg=mode)
        np.testing.assert_allclose(np.vdot(of_p, dp), np.vdot(dy, in_p), atol=1e-6, err_msg=mode)
        along = jax.jit(lambda x, p, f=ours: jax.jvp(f, (x, p), (dx, dp)))(x, p)[1]
        np.testing.assert_allclose(along, in_x + in_p, atol=1e-6, err_msg=mode)
        if mode == "reflect":
            second = jax.jit(lambda x, p, b=back: jax.jvp(b, (x, p), (dx, dp)))(x, p)[1]
            for found, up, down in zip(second, *(back(x + s * dx, p + s * dp) for s in (h, -h)), strict=True):
                np.testing.assert_allclose(found, (up - down) / (2 * h), atol=1e-5)


def test_gradients_have_no_scatter():
    x, p = data((7, 5))
    run = jax.grad(lambda x, p: jnp.sum(dnn.map_coordinates(x, p, mode="reflect") ** 2), (0, 1))
    assert "scatter" not in jax.jit(run).lower(x, p).as_text()


def test_vmap_and_shapes_of_coordinates():
    x, p = data((7, 5))
    many = np.stack([x, -x, x + 1])
    run = lambda x, p: dnn.map_coordinates(x, p, mode="mirror")
    one = run(x, p)
    np.testing.assert_array_equal(jax.vmap(run, (0, None))(many, p)[0], one)
    np.testing.assert_array_equal(jax.vmap(run, (None, 1))(x, p), one)
    np.testing.assert_array_equal(run(x, p.reshape(2, 9, 1))[:, 0], one)
    alone = run(x, p[:, 0])
    assert alone.shape == ()
    assert alone == one[0]


LINE = jnp.arange(1.0, 5.0)


def on_line(p: Any, **options: Any) -> jax.Array:
    return dnn.map_coordinates(LINE, jnp.asarray(p, jnp.float32)[None], **options)


def test_places_that_are_far_out_or_none():
    far = [np.nan, np.inf, -np.inf, 1e30]
    for order in (0, 1, 3):
        np.testing.assert_array_equal(on_line(far, order=order, cval=np.nan), [np.nan] * 4)
        np.testing.assert_array_equal(on_line(far, order=order, cval=7.0), [np.nan, 7, 7, 7])
        np.testing.assert_allclose(on_line(far, order=order, mode="grid-constant", cval=7.0), [np.nan, 7, 7, 7], 1e-6)
        np.testing.assert_allclose(on_line(far, order=order, mode="nearest"), [np.nan, 4, 1, 4], atol=2e-6)
        for mode in ("mirror", "reflect", "wrap", "grid-wrap"):
            y = on_line([*far, -(2.0**30)], order=order, mode=mode)
            assert np.isnan(y[0])
            np.testing.assert_array_equal(y[1], y[3])
            np.testing.assert_array_equal(y[2], y[4])
    inside = on_line([0.0, 3.0, 1.5], order=1, cval=np.nan)  # which is not read inside
    np.testing.assert_array_equal(inside, [1, 4, 2.5])
    dx = jax.grad(lambda x: dnn.map_coordinates(x, jnp.array([[np.nan, 1.25, 9.0]]), order=1).sum())(LINE)
    np.testing.assert_array_equal(dx, [0, 0.75, 0.25, 0])


def test_an_element_of_weight_0_is_not_read():
    x = LINE.at[2].set(np.nan)
    np.testing.assert_array_equal(dnn.map_coordinates(x, jnp.array([[1.0, 3.0]]), order=1), [2, 4])
    assert np.isnan(dnn.map_coordinates(x, jnp.array([[0.0]]), order=3))  # the filter reads all


def test_integers_and_narrow_types():
    whole = jnp.asarray(LINE, jnp.uint8)
    y = dnn.map_coordinates(whole, jnp.array([[0.5, 1.75, np.nan]]), order=1)
    assert y.dtype == jnp.uint8
    np.testing.assert_array_equal(y, [2, 3, 0])
    x, p = data((7, 5))
    narrow = jnp.asarray(x, jnp.bfloat16)
    wide = dnn.map_coordinates(narrow.astype(jnp.float32), p)
    np.testing.assert_array_equal(dnn.map_coordinates(narrow, p), wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(dnn.map_coordinates(narrow, p, out_dtype=jnp.float32), wide)


X, P = np.ones((4, 5), np.float32), np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("x", "p", "options", "error", "text"),
    [
        (X, P[:1], {}, ValueError, "`coordinates` must have the first axis of size 2, a coordinate for each"),
        (X, [P[0], P[1, :2]], {}, ValueError, "`coordinates` must be arrays of one shape and one dtype, got float32"),
        (X, P.astype(int), {}, TypeError, "`coordinates` must have one of the dtypes float32"),
        (X.astype(int), P, {}, TypeError, "`x` must have one of the dtypes float32"),
        (X[:0], P, {}, ValueError, "`x` must have at least one axis, and one element along each, got shape .0, 5."),
        (X, P, {"order": 6}, ValueError, "`order` must be from 0 to 5, got 6"),
        (X, P, {"order": 1.0}, TypeError, "`order`"),
        (X, P, {"mode": "edge"}, ValueError, "`mode` must be one of 'constant', .* got 'edge'"),
        (X, P, {"cval": None}, TypeError, "`cval` must be a number known when traced"),
        (X, P, {"engine": "hopper"}, NotImplementedError, "cannot be served by engine 'hopper'"),
    ],
)  # fmt: skip
def test_errors(x: Any, p: Any, options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.map_coordinates(x, p, **options)


def test_errors_of_sizes():
    with pytest.raises(ValueError, match=r"`x` and `coordinates` must have fewer than 2\^31 elements and taps"):
        jax.eval_shape(dnn.map_coordinates, jax.ShapeDtypeStruct((2**16, 2**16), np.float32), P)
