"""Boxes pooled to one size: the definition's bits, torchvision's loop, boxes of all kinds, derivatives, errors."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference

# Inside; fractions; over two edges; outside; without extent; backwards; all of the image.
BOXES = np.array(
    [[0, 0, 5, 4], [1.3, 2.2, 6.9, 5.5], [-3, -2, 4, 3], [20, 20, 30, 30], [2, 2, 2, 2], [5, 4, 1, 2], [0, 0, 7, 6]],
    np.float32,
)


def images(dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, 6, 7, 3)).astype(dtype)


def for_each(boxes: np.ndarray = BOXES) -> np.ndarray:
    return np.stack([boxes, boxes[::-1]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aligned": False, "sampling_ratio": 3},
        {"adaptive": True, "sampling_ratio": 3},
        {"mode": "max", "adaptive": True, "sampling_ratio": 3},
        {"mode": "max_of_taps", "aligned": False},
        {"spatial_scale": 0.5, "order": "ij", "layout": "NCHW"},
        {"box_format": "cxcywh"},
        {"box_format": "xywh", "mode": "max"},
    ],
    ids=str,
)
def test_bits_are_the_definitions(options: dict[str, Any]):
    x = np.moveaxis(images(), -1, 1) if "layout" in options else images()
    for boxes, of in ((for_each(), None), (BOXES, np.array([0, 1, 1, 0, 1, 0, 1], np.int8))):
        given = {"output_sizes": (2, 3), "batch_indices": of, **options}
        y = jax.jit(lambda x, boxes, given=given: dnn.roi_align(x, boxes, **given))(x, boxes)
        np.testing.assert_array_equal(y, reference.roi_align(x, boxes, **given, arithmetic="ordered"))
        np.testing.assert_allclose(y, reference.roi_align(x, boxes, **given), atol=2e-6)


def as_torchvision(x: np.ndarray, box: np.ndarray, bins: tuple[int, int], ratio: int, aligned: bool) -> np.ndarray:
    """Its loop over the samples of a box of one image, by the code's conditions."""
    (h, w, c), (x1, y1, x2, y2) = x.shape, box.astype(np.float64) - (0.5 if aligned else 0.0)
    size = [y2 - y1, x2 - x1] if aligned else [max(y2 - y1, 1.0), max(x2 - x1, 1.0)]
    bin_h, bin_w = (s / b for s, b in zip(size, bins, strict=True))
    grid_h, grid_w = (ratio if ratio > 0 else math.ceil(b) for b in (bin_h, bin_w))
    y = np.zeros((*bins, c))
    for p, q, i, j in itertools.product(*map(range, (*bins, grid_h, grid_w))):
        row, column = y1 + p * bin_h + (i + 0.5) * bin_h / grid_h, x1 + q * bin_w + (j + 0.5) * bin_w / grid_w
        if row < -1 or row > h or column < -1 or column > w:
            continue
        row, column = min(max(row, 0), h - 1), min(max(column, 0), w - 1)
        a, b = int(row), int(column)
        below, right = row - a, column - b
        upper = (1 - right) * x[a, b] + right * x[a, min(b + 1, w - 1)]
        lower = (1 - right) * x[min(a + 1, h - 1), b] + right * x[min(a + 1, h - 1), min(b + 1, w - 1)]
        y[p, q] += (1 - below) * upper + below * lower
    return y / max(grid_h * grid_w, 1)


@pytest.mark.parametrize("aligned", [False, True])
def test_values_are_torchvisions(aligned: bool):
    """Adaptive sampling too, where a bin has at most so many pixels, of boxes with an extent."""
    x = images()
    for ratio, kept in ((2, BOXES), (3, BOXES), (0, BOXES[[0, 1, 2, 3, 6]])):
        how: Any = {"sampling_ratio": ratio} if ratio else {"sampling_ratio": 5, "adaptive": True}
        y = dnn.roi_align(x, for_each(kept), output_sizes=(2, 3), aligned=aligned, **how)
        for n, k in np.ndindex(2, len(kept)):
            wanted = as_torchvision(x[n].astype(np.float64), for_each(kept)[n, k], (2, 3), ratio, aligned)
            np.testing.assert_allclose(y[n, k], wanted, atol=2e-6)


def test_one_and_three_axes():
    rng = np.random.default_rng(2)
    for d in (1, 3):
        x = rng.normal(size=(2, *(5, 4, 6)[:d], 2)).astype(np.float32)
        boxes = np.concatenate([rng.uniform(-1, 2, (2, 3, d)), rng.uniform(2, 6, (2, 3, d))], -1).astype(np.float32)
        given: Any = {"output_sizes": (2, 1, 3)[:d], "layout": "N" + "DHW"[3 - d :] + "C"}
        y = dnn.roi_align(x, boxes, **given)
        np.testing.assert_array_equal(y, reference.roi_align(x, boxes, **given, arithmetic="ordered"))
    line = jnp.arange(8.0).reshape(1, 8, 1)
    whole = dnn.roi_align(line, jnp.array([[[0.0, 8.0]]]), output_sizes=8, sampling_ratio=1, layout="NWC")
    np.testing.assert_array_equal(whole[0, 0], line[0])  # a bin a pixel, sampled at its centre


def test_formats_of_boxes_are_the_same_boxes():
    x, boxes = images(), BOXES[[0, 2, 6]]
    y = dnn.roi_align(x, for_each(boxes), output_sizes=2)
    size = boxes[:, 2:] - boxes[:, :2]
    for name, same in (("xywh", (boxes[:, :2], size)), ("cxcywh", (boxes[:, :2] + size / 2, size))):
        given = for_each(np.concatenate(same, -1))
        np.testing.assert_array_equal(dnn.roi_align(x, given, output_sizes=2, box_format=name), y)
    turned = for_each(boxes[:, [1, 0, 3, 2]])
    np.testing.assert_array_equal(dnn.roi_align(x, turned, output_sizes=2, order="ij"), y)


def test_boxes_that_are_nowhere_and_images_that_are_not_there():
    x = images()
    boxes = np.array([[20, 20, 30, 30], [np.nan, 0, 3, 3], [0, 0, 3, 3], [0, 0, 3, 3]], np.float32)
    of = jnp.array([0, 0, 2, -1])
    run = lambda x: dnn.roi_align(x, boxes, output_sizes=2, batch_indices=of)
    y, back = jax.vjp(run, x)
    np.testing.assert_array_equal(y[0], 0)
    assert np.isnan(y[1:]).all()
    np.testing.assert_array_equal(back(jnp.ones_like(y))[0], 0)
    assert dnn.roi_align(x, boxes[:0], output_sizes=2, batch_indices=of[:0]).shape == (0, 2, 2, 3)
    unread = jnp.asarray(x).at[0, 3:].set(jnp.nan)
    inside = dnn.roi_align(unread, for_each(BOXES[:1] * 0 + np.array([0, 0, 3, 3], np.float32)), output_sizes=1)
    assert np.isfinite(inside[0]).all()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", ["average", "max"])
def test_derivatives_are_the_definitions_differences(mode: str):
    x, boxes = images(np.float64), for_each(BOXES[[1, 2, 5]]).astype(np.float64)
    boxes = boxes + np.random.default_rng(3).uniform(0.01, 0.2, boxes.shape)  # of which none is at a kink
    rng, h = np.random.default_rng(4), 2.0**-20
    ours = lambda x, b: dnn.roi_align(x, b, output_sizes=(2, 3), mode=mode)
    theirs = lambda x, b: reference.roi_align(x, b, output_sizes=(2, 3), mode=mode)
    dx, db, dy = (rng.normal(size=s) for s in (x.shape, boxes.shape, (2, 3, 2, 3, 3)))
    back = jax.jit(lambda x, b: jax.vjp(ours, x, b)[1](jnp.asarray(dy)))
    of_x, of_boxes = back(x, boxes)
    in_x = (theirs(x + h * dx, boxes) - theirs(x - h * dx, boxes)) / (2 * h)
    in_boxes = (theirs(x, boxes + h * db) - theirs(x, boxes - h * db)) / (2 * h)
    np.testing.assert_allclose(np.vdot(of_x, dx), np.vdot(dy, in_x), atol=1e-6)
    np.testing.assert_allclose(np.vdot(of_boxes, db), np.vdot(dy, in_boxes), atol=1e-6)
    np.testing.assert_allclose(jax.jvp(ours, (x, boxes), (dx, db))[1], in_x + in_boxes, atol=1e-6)
    second = jax.jit(lambda x, b: jax.jvp(back, (x, b), (dx, db)))(x, boxes)[1]
    for found, up, down in zip(second, *(back(x + s * dx, boxes + s * db) for s in (h, -h)), strict=True):
        np.testing.assert_allclose(found, (up - down) / (2 * h), atol=1e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("aligned", [False, True])
def test_gradients_are_those_of_torchvisions_loop(aligned: bool):
    """By differences of the loop in float64: exact in x, in which it is linear; boxes away from kinks."""
    rng, h = np.random.default_rng(5), 2.0**-20
    x = images(np.float64)
    boxes = for_each(BOXES[[0, 1, 2, 6]]).astype(np.float64) + rng.uniform(0.01, 0.2, (2, 4, 4))

    def theirs(x: np.ndarray, boxes: np.ndarray) -> np.ndarray:
        each = [as_torchvision(of, box, (2, 3), 2, aligned) for of, own in zip(x, boxes, strict=True) for box in own]
        return np.reshape(each, (2, 4, 2, 3, 3))

    ours = lambda x, b: dnn.roi_align(x, b, output_sizes=(2, 3), aligned=aligned)
    dy = rng.normal(size=(2, 4, 2, 3, 3))
    of_x, of_boxes = jax.jit(lambda x, b: jax.vjp(ours, x, b)[1](jnp.asarray(dy)))(x, boxes)
    for _ in range(4):
        dx, db = rng.normal(size=x.shape), rng.normal(size=boxes.shape)
        np.testing.assert_allclose(np.vdot(of_x, dx), np.vdot(dy, theirs(dx, boxes)), atol=1e-11)
        in_boxes = (theirs(x, boxes + h * db) - theirs(x, boxes - h * db)) / (2 * h)
        np.testing.assert_allclose(np.vdot(of_boxes, db), np.vdot(dy, in_boxes), atol=1e-6)


def test_vmap_and_narrow_types():
    x, boxes = images(), for_each(BOXES[[1, 2]])
    run = lambda x, b: dnn.roi_align(x, b, output_sizes=2)
    y = run(x, boxes)
    np.testing.assert_array_equal(jax.vmap(run)(x[:, None], boxes[:, None])[:, 0], y)
    np.testing.assert_array_equal(jax.vmap(run, (None, 0))(x, np.stack([boxes, boxes]))[1], y)
    narrow = jnp.asarray(x, jnp.bfloat16)
    np.testing.assert_array_equal(run(narrow, boxes), run(narrow.astype(jnp.float32), boxes).astype(jnp.bfloat16))


X, EACH = np.ones((2, 4, 5, 3), np.float32), np.ones((2, 6, 4), np.float32)


@pytest.mark.parametrize(
    ("x", "boxes", "options", "error", "text"),
    [
        (X, EACH[0], {}, ValueError, "`boxes` must have shape .2, K, 4., or .K, 4. with `batch_indices`, for 2"),
        (X, EACH, {"batch_indices": np.zeros(6, int)}, ValueError, "`boxes` must have shape .K, 4. with `batch_ind"),
        (X, EACH[0], {"batch_indices": np.zeros(6)}, TypeError, "`batch_indices` must be integers, got float"),
        (X, EACH[0], {"batch_indices": np.zeros(5, int)}, ValueError, "`batch_indices` must have shape .6,"),
        (X, EACH.astype(int), {}, TypeError, "`boxes` must have one of the dtypes float32"),
        (X.astype(np.int8), EACH, {}, TypeError, "`x` must have one of the dtypes float32"),
        (X[:, :0], EACH, {}, ValueError, "`x` must have at least one pixel along every spatial axis"),
        (X, EACH, {"output_sizes": 0}, ValueError, "`output_sizes` must be at least 1 along every axis"),
        (X, EACH, {"sampling_ratio": 0}, ValueError, "`sampling_ratio` must be at least 1, got 0; .* `adaptive=True`"),
        (X, EACH, {"spatial_scale": 0.0}, ValueError, "`spatial_scale` must be finite and above 0, got 0.0"),
        (X, EACH, {"mode": "avg"}, ValueError, "`mode` must be one of 'average', 'max', 'max_of_taps', got 'avg'"),
        (X, EACH, {"box_format": "yxyx"}, ValueError, "`box_format` must be one of 'xyxy', 'xywh', 'cxcywh', got"),
        (X, EACH, {"output_sizes": 2**15}, ValueError, r"`x` and `boxes` must have fewer than 2\^31 pixels and taps"),
    ],
)  # fmt: skip
def test_errors(x: Any, boxes: Any, options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.roi_align(x, boxes, **{"output_sizes": 2, **options})
