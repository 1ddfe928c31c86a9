"""The definition of pooling against loops, SciPy's filters, worked examples and finite differences."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.ndimage

import jaxdnn_reference as reference


def loops(x: np.ndarray, window: int, stride: int, pad: tuple[int, int], dilation: int, ceil: bool) -> list[list[int]]:
    """For a line: the positions in x of every window, straight from the words."""
    size, found, start = len(x), [], -pad[0]
    while True:
        inside = start + dilation * (window - 1) < size + pad[1]
        if not inside and not (
            ceil and start + dilation * (window - 1) - (size + pad[1] - 1) < stride and start < size
        ):
            return found
        found.append([h for h in range(start, start + dilation * window, dilation) if 0 <= h < size])
        start += stride


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(
    ("window", "stride", "pad", "dilation"),
    [
        (2, 2, (0, 0), 1),
        (3, 2, (1, 1), 1),
        (3, 2, (1, 0), 2),
        (4, 3, (2, 1), 1),
        (2, 3, (1, 0), 1),
        (5, 1, (2, 2), 1),
    ],
)
def test_windows_of_a_line(window: int, stride: int, pad: tuple[int, int], dilation: int, ceil: bool):
    for size in range(dilation * (window - 1) + 1, 14):
        x = np.random.default_rng(size).permutation(size).astype(np.float64)
        taken = loops(x, window, stride, pad, dilation, ceil)
        if not all(taken):
            continue  # a window wholly in padding, which the library refuses
        options: dict[str, Any] = {"window": window, "stride": stride, "padding": (pad,), "dilation": dilation}
        options |= {"ceil_mode": ceil, "layout": "NWC"}
        image = x.reshape(1, -1, 1)
        y, indices = reference.pool(image, **options, return_indices=True)
        np.testing.assert_array_equal(y.ravel(), [max(x[h] for h in taps) for taps in taken])
        np.testing.assert_array_equal(indices.ravel(), [max(taps, key=lambda h: x[h]) for taps in taken])
        average = reference.pool(image, **options, mode="average_exclude_padding").ravel()
        np.testing.assert_allclose(average, [np.mean([x[h] for h in taps]) for taps in taken])
        norm = reference.pool(image, **options, mode="lp", p=3).ravel()
        np.testing.assert_allclose(norm, [sum(x[h] ** 3 for h in taps) ** (1 / 3) for taps in taken])


@pytest.mark.parametrize("window", [3, 5])
def test_filters_of_scipy(window: int):
    x = np.random.default_rng(0).normal(size=(2, 9, 8, 3))
    options: dict[str, Any] = {"window": window, "stride": 1, "padding": window // 2}
    size: Any = (1, window, window, 1)
    expected = scipy.ndimage.maximum_filter(x, size, mode="constant", cval=-np.inf)
    np.testing.assert_array_equal(reference.pool(x, **options), expected)
    expected = scipy.ndimage.uniform_filter(x, size, mode="constant")
    np.testing.assert_allclose(reference.pool(x, **options, mode="average"), expected, rtol=1e-10, atol=1e-12)


def test_worked_example_of_pytorch():
    """avg_pool2d(arange(9), 2, stride 2, padding 0, ceil_mode=True) divides by what lies in x: [[2, 3.5], [6.5, 8]]."""
    x = np.arange(9.0).reshape(1, 3, 3, 1)
    y = reference.pool(x, mode="average", ceil_mode=True)
    np.testing.assert_array_equal(y.ravel(), [2, 3.5, 6.5, 8])
    padded = reference.pool(x, mode="average", padding=1, ceil_mode=True)  # 4 a window: its padding is counted
    np.testing.assert_array_equal(padded.ravel(), [0, 0.75, 2.25, 6])


def test_divisor_in_place_of_the_counts():
    """avg_pool2d(arange(9), 2, ceil_mode=True, divisor_override=5) divides every sum, of four numbers or less, by 5."""
    x = np.arange(9.0).reshape(1, 3, 3, 1)
    y = reference.pool(x, mode="average", ceil_mode=True, divisor=5)
    np.testing.assert_array_equal(y.ravel(), np.asarray([8, 7, 13, 8]) / 5)


def test_ordered_sums():
    """((a + b) + (c + d)) + e, in float32."""
    x = np.asarray([1, 2.0**-24, 2.0**-24, 2.0**-24, 1], np.float32)
    y = reference.pool(x.reshape(1, 5, 1), window=5, mode="average", layout="NWC", arithmetic="ordered")
    expected = np.float32(np.float32(np.float32(1) + np.float32(2.0**-23)) + np.float32(1)) * np.float32(1 / 5)
    assert y.ravel()[0] == expected
    assert y.dtype == np.float32


@pytest.mark.parametrize("mode", ["max", "average", "average_exclude_padding", "lp", "divisor"])
@pytest.mark.parametrize("ceil", [False, True])
def test_gradient_by_finite_differences(mode: str, ceil: bool):
    rng = np.random.default_rng(1)
    x = rng.permutation(2 * 42).reshape(1, 7, 6, 2) / 8 - 5.0625
    options: dict[str, Any] = {
        "window": (3, 2),
        "stride": 2,
        "padding": ((1, 0), (0, 1)),
        "ceil_mode": ceil,
        "mode": mode,
    }
    options |= {"mode": "average", "divisor": 7} if mode == "divisor" else {}
    dy = rng.normal(size=reference.pool(x, **options).shape)
    gradient, step = reference.pool_dgrad(dy, x, **options), 2.0**-12
    for at in range(0, x.size, 3):
        moved = [x.copy() for _ in range(2)]
        for sign, v in zip((1, -1), moved, strict=True):
            v.flat[at] += sign * step
        high, low = (np.sum(dy * reference.pool(v, **options)) for v in moved)
        np.testing.assert_allclose(gradient.flat[at], (high - low) / (2 * step), rtol=1e-6, atol=1e-6)


def test_unpool_by_a_loop():
    rng = np.random.default_rng(2)
    x = rng.integers(0, 4, (2, 6, 5, 3)).astype(np.float32)
    options: dict[str, Any] = {"window": 3, "stride": (1, 2), "padding": 1}
    y, indices = reference.pool(x, **options, return_indices=True, arithmetic="ordered")
    y = rng.normal(size=y.shape)
    expected = np.zeros((2, 30, 3))
    for n, p, q, c in itertools.product(*map(range, y.shape)):
        expected[n, indices[n, p, q, c], c] = y[n, p, q, c]
    np.testing.assert_array_equal(reference.unpool(y, indices, x.shape, **options), expected.reshape(x.shape))


@pytest.mark.parametrize(("size", "count"), [(9, 3), (7, 3), (5, 8), (12, 5)])
def test_adaptive_windows(size: int, count: int):
    x = np.random.default_rng(3).normal(size=size)
    ends = [(math.floor(i * size / count), math.ceil((i + 1) * size / count)) for i in range(count)]
    image = x.reshape(1, size, 1)
    y = reference.adaptive_pool(image, output_sizes=count, layout="NWC")
    np.testing.assert_allclose(y.ravel(), [x[a:b].mean() for a, b in ends])
    y = reference.adaptive_pool(image, output_sizes=count, layout="NWC", mode="max")
    np.testing.assert_array_equal(y.ravel(), [x[a:b].max() for a, b in ends])


@pytest.mark.parametrize("padding", [0, ((1, 1), (0, 2))])
def test_taps_say_what_positions_say(padding: Any):
    x = np.random.default_rng(5).permutation(np.arange(2 * 7 * 6 * 3)).reshape(2, 7, 6, 3).astype(np.float32)
    options = {"window": (3, 2), "stride": (2, 1), "dilation": (1, 2), "padding": padding}
    y, flat = reference.pool(x, return_indices=True, **options)
    _, taps = reference.pool(x, return_indices="tap", **options)
    assert taps.dtype == np.uint8
    assert not np.array_equal(taps, flat)
    assert np.array_equal(
        reference.pool_dgrad(y, x.shape, indices=taps, **options),
        reference.pool_dgrad(y, x.shape, indices=flat, **options),
    )
    assert np.array_equal(reference.unpool(y, taps, x.shape, **options), reference.unpool(y, flat, x.shape, **options))


def test_a_tap_that_no_window_has_goes_nowhere():
    y, taps = np.array([5.0, 7.0]).reshape(1, 2, 1), np.array([6, 0], np.uint8).reshape(1, 2, 1)
    options = {"window": 3, "stride": 2, "padding": ((1, 1),), "layout": "NWC"}
    assert reference.unpool(y, taps, (1, 3, 1), **options).ravel().tolist() == [0.0, 7.0, 0.0]
    padding = np.zeros((1, 2, 1), np.uint8)  # the first window's tap 0 is in the padding
    assert reference.pool_dgrad(y, (1, 3, 1), indices=padding, **options).ravel().tolist() == [0.0, 7.0, 0.0]


def test_taps_of_a_large_window_do_not_wrap():
    x = np.zeros((1, 70_000, 1), np.float32)
    x[0, 69_999] = 1
    _, taps = reference.global_pool(x, mode="max", layout="NWC", return_indices="tap")
    assert taps.dtype == np.uint32
    assert taps.item() == 69_999
