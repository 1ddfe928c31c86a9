"""Resampling against its definition bit for bit, against jax.image.resize where the rules agree, and known values."""

import functools as ft
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
import jaxdnn_reference as reference
from tests.tensor.data import agree, data

RULES: list[dict[str, Any]] = [
    *(
        {"method": "nearest", "rounding": r, "coordinates": c}
        for r, c in zip(
            ("half_up", "half_down", "floor", "ceil"), ("half_pixel", "align_corners", "asymmetric") * 2, strict=False
        )
    ),
    {"method": "linear"},
    {"method": "linear", "coordinates": "align_corners"},
    {"method": "linear", "coordinates": "asymmetric", "boundary": "zero"},
    {"method": "linear", "coordinates": "half_pixel_symmetric"},
    {"method": "nearest", "coordinates": "half_pixel_symmetric", "rounding": "half_down"},
    {"method": "cubic", "coordinates": "pytorch_half_pixel"},
    {"method": "linear", "antialias": True},
    {"method": "cubic"},
    {"method": "cubic", "antialias": True, "cubic_coefficient": -0.5},
    {"method": "cubic", "boundary": "renormalise"},
    {"method": "lanczos3", "antialias": True, "boundary": "edge"},
]
SIZES = [(12, 9), (3, 2), (1, 13), (6, 5)]
X = (2, 6, 5, 3)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits(rule: dict[str, Any], dtype: str):
    x = data(dtype, *X)
    for sizes in SIZES:
        agree("resample", x, output_sizes=sizes, **rule)
        agree("resample_dgrad", data(dtype, 2, *sizes, 3), X, **rule)
    agree("resample", x, scale=(1.7, 0.6), alpha=0.3, out_dtype=np.float32, **rule)
    agree("resample", x, output_sizes=4, beta=-0.7, prior=data(dtype, 2, 4, 4, 3), **rule)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [("NCW", (2, 3, 7)), ("CHWN", (3, 6, 5, 2)), ("NCHWc2", (2, 2, 6, 5, 2)), ("NDHWC", (2, 3, 4, 5, 2))],
)
def test_layouts(layout: str, shape: tuple[int, ...]):
    x = data("float32", *shape)
    rank = len(layout.partition("c")[0]) - 2
    for method in ("nearest", "linear", "cubic"):
        y = agree("resample", x, output_sizes=(5, 8, 2)[:rank], method=method, layout=layout)
        agree("resample_dgrad", np.asarray(y), shape, method=method, layout=layout)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "float8_e4m3fn"])
def test_other_dtypes(dtype: str):
    agree("resample", data(dtype, *X), output_sizes=(9, 4), method="nearest")
    if dtype in ("int8", "uint8"):
        agree("resample", data(dtype, *X), output_sizes=(9, 4), method="cubic")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("method", ["nearest", "linear", "cubic", "lanczos3"])
@pytest.mark.parametrize("antialias", [False, True])
def test_as_jax_image_resize(sizes: tuple[int, int], method: str, antialias: bool):
    """Both in float64: sums of at most 6 (antialias: 36) products of weights that are right to a few units."""
    if method == "nearest" and antialias:
        pytest.skip("nearest has no antialias")
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=X))
        found = dnn.resample(
            x, output_sizes=sizes, method=method, antialias=antialias, cubic_coefficient=-0.5, boundary="renormalise"
        )
        wanted = jax.image.resize(x, (2, *sizes, 3), method, antialias=antialias)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2.0**-40)


def test_as_scipy_zoom():
    """SciPy's zoom of order 1 is linear with the corners aligned; its grid-mode has pixel centres."""
    x = np.random.default_rng(0).normal(size=(7, 5))
    for sizes in ((13, 9), (4, 3)):
        zoom = [m / n for m, n in zip(sizes, x.shape, strict=True)]
        corners = reference.resample(x[None, ..., None], output_sizes=sizes, coordinates="align_corners")[0, ..., 0]
        np.testing.assert_allclose(
            corners.astype(float), np.asarray(scipy.ndimage.zoom(x, zoom, order=1)), atol=2.0**-40
        )
        centres = reference.resample(x[None, ..., None], output_sizes=sizes)[0, ..., 0]
        grid = np.asarray(scipy.ndimage.zoom(x, zoom, order=1, grid_mode=True, mode="nearest"))
        np.testing.assert_allclose(centres.astype(float), grid, atol=2.0**-40)


def line(values: list[float], **options: Any) -> list[float]:
    return dnn.resample(jnp.array(values)[None, :, None], layout="NWC", **options)[0, :, 0].tolist()


def test_known_values():
    """What PyTorch's and ONNX's documentation give for these rules."""
    assert line([1.0, 2.0], output_sizes=4) == [1.0, 1.25, 1.75, 2.0]
    assert line([1.0, 2.0], output_sizes=4, coordinates="asymmetric") == [1.0, 1.5, 2.0, 2.0]
    assert line([0.0, 3.0], output_sizes=4, coordinates="align_corners") == [0.0, 1.0, 2.0, 3.0]
    nearest = ft.partial(line, [1.0, 2.0, 3.0, 4.0, 5.0], output_sizes=3, method="nearest")
    assert nearest(coordinates="asymmetric", rounding="floor") == [1.0, 2.0, 4.0]  # PyTorch's "nearest": floor(i 5 / 3)
    assert nearest() == [1.0, 3.0, 5.0]  # "nearest-exact"


def onnx_places(n: int, scale: float, coordinates: str) -> np.ndarray:
    """ONNX's formulas, as its specification of Resize writes them."""
    length = math.floor(n * scale)
    i = np.arange(length)
    if coordinates == "pytorch_half_pixel":
        return (i + 0.5) / scale - 0.5 if length > 1 else np.zeros(1)
    adjustment, centre = length / (scale * n), n / 2
    return centre * (1 - adjustment) + (i + 0.5) / scale - 0.5


@pytest.mark.parametrize("coordinates", ["half_pixel_symmetric", "pytorch_half_pixel"])
@pytest.mark.parametrize("scale", [0.15, 0.3, 0.6, 1.0, 1.7, 2.0])
def test_coordinates_of_onnx(coordinates: str, scale: float):
    """Linear interpolation by NumPy at the places that ONNX gives."""
    x = np.random.default_rng(0).normal(size=11)
    wanted = np.interp(onnx_places(11, scale, coordinates), np.arange(11), x)
    found = line(x.tolist(), scale=scale, coordinates=coordinates)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2.0**-20)


def test_examples_of_onnx():
    """Its tests of Resize, downsample_scales_linear_half_pixel_symmetric and sizes_linear_pytorch_half_pixel."""
    found = line([1.0, 2.0, 3.0, 4.0], scale=0.6, coordinates="half_pixel_symmetric")
    np.testing.assert_allclose(found, [5 / 3, 10 / 3], rtol=2.0**-22)
    x = jnp.arange(1.0, 17).reshape(1, 4, 4, 1)
    found = dnn.resample(x, output_sizes=(3, 1), coordinates="pytorch_half_pixel").ravel()
    np.testing.assert_allclose(found, [5 / 3, 7, 37 / 3], rtol=2.0**-22)
    symmetric = dnn.resample(x, output_sizes=(3, 7), coordinates="half_pixel_symmetric")
    np.testing.assert_array_equal(symmetric, dnn.resample(x, output_sizes=(3, 7)))


ROI = ((0.25, 1.125), (0.75, -0.125))
PART: dict[str, Any] = {"coordinates": "tf_crop_and_resize", "roi": ROI}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("method", ["nearest", "linear", "cubic"])
def test_bits_of_a_part(method: str, dtype: str):
    x = data(dtype, *X)
    for sizes in [(9, 4), (1, 7), (6, 5)]:
        agree("resample", x, output_sizes=sizes, method=method, extrapolation_value=-3.0, **PART)
    agree("resample", x, output_sizes=(6, 5), method=method, coordinates=PART["coordinates"], roi=((0, 1), (0, 1)))
    if dtype != "int8":
        agree("resample_dgrad", data(dtype, 2, 9, 4, 3), X, method=method, boundary="renormalise", **PART)


def test_a_part_by_onnx_examples():
    """Its tests of Resize with tf_crop_and_resize, and with an extrapolation value."""
    x = jnp.arange(1.0, 17).reshape(1, 4, 4, 1)
    resized = lambda **options: dnn.resample(x, output_sizes=3, coordinates="tf_crop_and_resize", **options)[0, ..., 0]
    wanted = [[7.6, 7.9, 8.2], [8.8, 9.1, 9.4], [10.0, 10.3, 10.6]]
    np.testing.assert_allclose(resized(roi=((0.4, 0.6), (0.6, 0.8))), wanted, rtol=2.0**-22)
    wanted = [[7.6, 10.0, 10.0], [12.4, 10.0, 10.0], [10.0, 10.0, 10.0]]
    found = resized(roi=((0.4, 1.2), (0.6, 1.7)), extrapolation_value=10.0)
    np.testing.assert_allclose(found, wanted, rtol=2.0**-22)


def test_aligned_corners_by_onnx_scales():
    """Its test downsample_scales_linear_align_corners: the places of its own, by the part that from-onnx.md gives."""
    x = jnp.arange(1.0, 9).reshape(1, 2, 4, 1)
    roi = tuple((0.0, (math.floor(0.6 * n) - 1) / (0.6 * n - 1)) for n in (2, 4))
    found = dnn.resample(x, output_sizes=(1, 2), coordinates="tf_crop_and_resize", roi=roi)
    np.testing.assert_allclose(found.ravel(), [1.0, 1 + 3 / 1.4], rtol=2.0**-22)
    stretched = dnn.resample(x, scale=0.6, coordinates="align_corners")
    assert stretched.ravel().tolist() == [1.0, 4.0]


def test_gradient_of_a_part():
    """That of `resample_dgrad`; an extrapolated result depends on no element."""
    x, dy = data("float32", *X), data("float32", 2, 9, 4, 3)
    y, pullback = jax.vjp(lambda x: dnn.resample(x, output_sizes=(9, 4), extrapolation_value=7.0, **PART), x)
    np.testing.assert_array_equal(pullback(jnp.asarray(dy))[0], dnn.resample_dgrad(dy, X, **PART))
    spoilt = np.where(np.asarray(y) == 7, np.nan, dy)
    assert np.isnan(spoilt).any()
    np.testing.assert_array_equal(dnn.resample_dgrad(spoilt, X, **PART), dnn.resample_dgrad(dy, X, **PART))


def test_cubic_kernel_at_halves():
    """Half way between two pixels the weights are a/8, 1/2 - a/8, 1/2 - a/8, a/8."""
    for a in (-0.75, -0.5, -1.0):
        wanted = [0.0, 64 * (a / 8), 64 * (0.5 - a / 8), 64 * (0.5 - a / 8)]
        rule = {"coordinates": "align_corners", "method": "cubic", "cubic_coefficient": a}
        found = line([0.0, 0.0, 0.0, 64.0, 0.0, 0.0], output_sizes=11, **rule)
        assert found[1:8:2] == wanted


def test_a_constant_stays():
    for rule in RULES:
        if rule.get("boundary") != "zero":
            found = np.array(line([7.0] * 5, output_sizes=13, **rule))
            np.testing.assert_allclose(found, 7.0, rtol=2.0**-21)  # weights of a row add up to 1 but for their rounding


def test_scale_is_exact():
    """Of a fraction, the sizes are those of exact arithmetic."""
    assert len(line([1.0] * 11, scale=Fraction(1, 11))) == 1
    assert len(line([1.0] * 30, scale=Fraction(11, 10))) == 33
    # 4.5 is cut to 4 results, 2/3 of an element apart, as PyTorch has it unless it is told to recompute the scale.
    np.testing.assert_allclose(line([0.0, 3.0, 6.0], scale=1.5), [0.0, 1.5, 3.5, 5.5], rtol=2.0**-22)


def test_gradient_does_not_scatter():
    """In the compiled gradient there is no scatter, which on GPUs would add with atomics."""
    for rule, sizes in itertools.product(RULES, SIZES):
        gradient = jax.grad(lambda x: dnn.resample(x, output_sizes=sizes, **rule).sum())  # noqa: B023
        assert "scatter" not in jax.jit(gradient).lower(jnp.ones(X)).as_text()


def test_many_taps_in_a_loop():
    x = data("float32", 1, 200, 2)
    agree("resample", x, output_sizes=3, antialias=True, layout="NWC")
    agree("resample_dgrad", data("float32", 1, 3, 2), (1, 200, 2), antialias=True, layout="NWC")


def test_elements_of_weight_zero_are_not_read():
    x = [1.0, float("inf"), float("nan"), 4.0]
    assert line(x, output_sizes=7, coordinates="align_corners")[::2][0] == 1.0
    assert line(x, output_sizes=7, coordinates="align_corners")[2] == float("inf")
    assert line(x, output_sizes=7, coordinates="align_corners")[6] == 4.0


def test_rows_do_not_depend_on_the_batch():
    x = data("float32", 9, 6, 5, 3)
    whole = dnn.resample(x, output_sizes=(9, 4), method="cubic", determinism="portable")
    for n in (1, 2, 5):
        some = jax.jit(lambda x: dnn.resample(x, output_sizes=(9, 4), method="cubic"))(x[:n])
        np.testing.assert_array_equal(some, whole[:n])
    spoilt = np.where(np.arange(9)[:, None, None, None] == 4, x, np.nan).astype(np.float32)
    np.testing.assert_array_equal(dnn.resample(spoilt, output_sizes=(9, 4), method="cubic")[4], whole[4])


@pytest.mark.parametrize("order", ["CRD", "DCR"])
@pytest.mark.parametrize(("layout", "shape"), [("NHWC", (2, 3, 4, 12)), ("NCHW", (2, 12, 3, 4)), ("NCW", (2, 6, 5))])
def test_pixel_shuffle(order: str, layout: str, shape: tuple[int, ...]):
    factor = 2 if layout == "NCW" else (3, 2)
    x = data("bfloat16", *shape)
    y = dnn.pixel_shuffle(x, factor=factor, order=order, layout=layout)
    np.testing.assert_array_equal(y, reference.pixel_shuffle(x, factor=factor, order=order, layout=layout))
    back = dnn.pixel_unshuffle(y, factor=factor, order=order, layout=layout)
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(
        back, reference.pixel_unshuffle(np.asarray(y), factor=factor, order=order, layout=layout)
    )


def test_pixel_shuffle_by_hand():
    x = jnp.arange(8.0).reshape(1, 1, 1, 8)
    assert dnn.pixel_shuffle(x)[0, :, :, 0].tolist() == [[0, 1], [2, 3]]  # torch: channel c f g + i g + j
    assert dnn.pixel_shuffle(x, order="DCR")[0, :, :, 0].tolist() == [[0, 2], [4, 6]]  # depth_to_space


resampled = lambda **options: dnn.resample(jnp.ones(X), output_sizes=3, **options)
ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: dnn.resample(jnp.ones(X)),
        ValueError,
        "`output_sizes` or `scale` must be given, not both, got None and None",
    ),
    (
        lambda: dnn.resample(jnp.ones(X), output_sizes=0),
        ValueError,
        "`output_sizes` must be at least 1 along every axis, got 0",
    ),
    (lambda: dnn.resample(jnp.ones(X), scale=0.1), ValueError, r"`scale` must leave sizes from 1 to .*, got \(0, 0\)"),
    (lambda: dnn.resample(jnp.ones(X), scale=10**400), ValueError, r"`scale` must leave sizes from 1 to .*, got \(\d+"),
    (
        lambda: dnn.resample(jnp.ones(X), scale=cast(Any, jnp.ones(3))),
        ValueError,
        r"`scale` must be made of finite numbers above zero, got an array of float32 of shape \(3,\)",
    ),
    (
        lambda: dnn.resample_dgrad(jnp.ones(X), cast(Any, jnp.ones(X))),
        TypeError,
        "`x_shape` must be a shape, got an array of float32",
    ),
    (lambda: dnn.resample(jnp.ones(X), scale=-1), ValueError, "`scale` must be made of finite numbers above zero"),
    (lambda: dnn.resample(jnp.ones(X), scale=(2, 2, 2)), ValueError, "`scale` must be a number or 2 numbers"),
    (lambda: resampled(method="area"), ValueError, "`method` must be one of 'nearest', "),
    (lambda: resampled(coordinates="x"), ValueError, "`coordinates` must be one of"),
    (lambda: resampled(rounding="x"), ValueError, "`rounding` must be one of 'half_up'"),
    (
        lambda: resampled(roi=ROI),
        ValueError,
        r"`roi` must be given for coordinates 'tf_crop_and_resize' and None for others",
    ),
    (lambda: resampled(coordinates="tf_crop_and_resize"), ValueError, "`roi` must be given for .*, got None and 'tf_"),
    (
        lambda: resampled(coordinates="tf_crop_and_resize", roi=(0, 1)),
        ValueError,
        "`roi` must be 2 pairs of a start and an",
    ),
    (
        lambda: resampled(coordinates="tf_crop_and_resize", roi=((0, np.inf), (0, 1))),
        ValueError,
        "`roi` must be made of finite",
    ),
    (
        lambda: dnn.resample(jnp.ones(X), scale=2, **PART),
        ValueError,
        "`scale` must be None for coordinates 'tf_crop_and_resize', got 2",
    ),
    (
        lambda: resampled(extrapolation_value=1.0),
        ValueError,
        "`extrapolation_value` must be 0 for coordinates other than",
    ),
    (
        lambda: dnn.resample(jnp.ones(X, jnp.uint8), output_sizes=3, method="nearest", extrapolation_value=0.5, **PART),
        ValueError,
        "`extrapolation_value` must be a number that int32 has, got 0.5",
    ),
    (lambda: resampled(boundary="x"), ValueError, "`boundary` must be one of None, 'edge'"),
    (lambda: resampled(antialias=True, method="nearest"), ValueError, "`antialias` needs"),
    (lambda: resampled(cubic_coefficient=np.inf), ValueError, "`cubic_coefficient` must be"),
    (
        lambda: dnn.resample(jnp.ones(X, jnp.int32), output_sizes=3),
        TypeError,
        "`x` must have one of the dtypes float32",
    ),
    (lambda: resampled(engine="cudnn"), ValueError, "`engine` must be one of None"),
    (
        lambda: dnn.resample(jnp.ones((2, 0, 5, 3)), output_sizes=3),
        ValueError,
        "`x` must have at least one element along",
    ),
    (lambda: dnn.resample_dgrad(jnp.ones(X), (2, 3, 3, 4)), ValueError, r"`dy` must have shape \(2, 6, 5, 4\)"),
    (lambda: dnn.pixel_shuffle(jnp.ones(X)), ValueError, "`factor` must have a product that divides the 3 channels"),
    (lambda: dnn.pixel_unshuffle(jnp.ones(X)), ValueError, r"`factor` must divide the sizes \(6, 5\), got \(2, 2\)"),
    (lambda: dnn.pixel_shuffle(jnp.ones(X), order="x"), ValueError, "`order` must be one of 'CRD', 'DCR'"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call: Callable[[], Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        call()


def test_a_loop_over_many_taps_inside_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(data("float32", 8, 30, 2))
    f = ft.partial(dnn.resample, output_sizes=3, method="lanczos3", antialias=True, layout="NWC")  # 60 taps
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    np.testing.assert_array_equal(jax.jit(mapped)(x), jax.jit(f)(x))


@pytest.mark.parametrize("method", ["nearest", "linear", "cubic"])
def test_an_empty_batch(method: str):
    x = jnp.zeros((0, 4, 4, 1))
    assert dnn.resample(x, output_sizes=2, method=method).shape == (0, 2, 2, 1)
    assert dnn.resample_dgrad(jnp.zeros((0, 2, 2, 1)), x.shape, method=method).shape == x.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"antialias": "no"}, "`antialias` must be True or False, got 'no'"),
        ({"cubic_coefficient": "steep"}, "`cubic_coefficient` must be a number known when traced, got 'steep'"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=message):
        dnn.resample(jnp.ones((1, 4, 4, 1)), output_sizes=2, **options)
