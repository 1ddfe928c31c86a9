"""The definition of the softmax family, against SciPy, finite differences, and values known by hand."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.special

import jaxdnn_reference as reference

RANDOM = np.random.default_rng(4)
X = RANDOM.normal(size=(2, 3, 4, 5)) * 3
MODES = {
    ("channel", "NHWC"): (3,),
    ("channel", "NCHW"): (1,),
    ("channel", "CHWN"): (0,),
    ("instance", "NHWC"): (1, 2, 3),
    ("instance", "CHWN"): (0, 1, 2),
}


@pytest.mark.parametrize("axis", [-1, 0, (1, 3), (0, 1, 2, 3)])
def test_agrees_with_scipy(axis: Any):
    x = X.astype(np.float32)
    wide = x.astype(np.float64)
    named: dict[str, Any] = {"axis": axis, "out_dtype": np.float64}
    np.testing.assert_allclose(reference.softmax(x, **named), scipy.special.softmax(wide, axis), rtol=1e-14)
    fast = reference.softmax(x, algorithm="fast", **named)
    np.testing.assert_allclose(fast, scipy.special.softmax(wide, axis), rtol=1e-13)
    log = reference.softmax(x, algorithm="log", **named)
    np.testing.assert_allclose(log, scipy.special.log_softmax(wide, axis), rtol=1e-13)
    np.testing.assert_allclose(
        reference.logsumexp(x, **named), scipy.special.logsumexp(wide, axis), rtol=1e-14, atol=1e-15
    )


@pytest.mark.parametrize(("mode", "layout"), MODES)
def test_modes_name_axes(mode: str, layout: str):
    named = reference.softmax(X, mode=mode, layout=layout)
    np.testing.assert_array_equal(named, reference.softmax(X, axis=MODES[mode, layout]))


def test_vectorised_channels_lie_on_two_axes():
    x = RANDOM.normal(size=(2, 3, 5, 4, 32))
    found = reference.softmax(x, mode="channel", layout="NCHWc32")
    np.testing.assert_array_equal(found, reference.softmax(x, axis=(1, 4)))


@pytest.mark.parametrize("algorithm", ["accurate", "fast", "log"])
@pytest.mark.parametrize("axis", [-1, (0, 2)])
def test_gradient_is_the_slope(algorithm: str, axis: Any):
    weights, step = RANDOM.normal(size=X.shape), 1e-5

    def value(x: np.ndarray) -> float:
        return float((weights * reference.softmax(x, algorithm=algorithm, axis=axis)).sum())

    y = reference.softmax(X, algorithm=algorithm, axis=axis)
    gradient = reference.softmax_dgrad(weights, y, algorithm=algorithm, axis=axis)
    for index in [(0, 0, 0, 0), (1, 2, 3, 4), (1, 0, 2, 1)]:
        away = np.zeros_like(X)
        away[index] = step
        slope = (value(X + away) - value(X - away)) / (2 * step)
        assert abs(gradient[index] - slope) < 1e-8


def test_what_is_not_finite():
    nan, inf = np.nan, np.inf
    x = np.array([[-inf, -inf], [0, -inf], [0, inf], [0, nan]])
    np.testing.assert_array_equal(reference.softmax(x), [[nan, nan], [1, 0], [nan, nan], [nan, nan]])
    np.testing.assert_array_equal(reference.softmax(x, algorithm="log")[1], [0, -inf])
    np.testing.assert_array_equal(reference.softmax(x, algorithm="fast"), [[nan, nan], [1, 0], [0, nan], [nan, nan]])
    np.testing.assert_array_equal(reference.logsumexp(x), [-inf, 0, inf, nan])


def test_mask_and_blend():
    x = np.array([[0.0, 7.0, 0.0], [1.0, 2.0, 3.0]])
    mask = np.array([[True, False, True], [False, False, False]])
    np.testing.assert_array_equal(reference.softmax(x, where=mask), [[0.5, 0, 0.5], [0, 0, 0]])
    np.testing.assert_array_equal(reference.softmax(x, where=mask, algorithm="log")[1], [-np.inf] * 3)
    prior = np.full_like(x, np.nan)
    np.testing.assert_array_equal(reference.softmax(x, prior=prior, beta=0.0), reference.softmax(x))
    blended = reference.softmax(x, alpha=2.0, beta=0.5, prior=np.ones_like(x))
    np.testing.assert_allclose(blended, 2 * reference.softmax(x) + 0.5)


def test_one_rounding():
    x = X.astype(ml_dtypes.bfloat16)
    exact = reference.softmax(x, out_dtype=np.float64)
    np.testing.assert_array_equal(reference.softmax(x), reference.round_to(exact, ml_dtypes.bfloat16))


def test_cross_entropy_by_hand():
    x, w = np.zeros((3, 2)), np.ones((2, 8))
    labels = np.array([0, 5, 7])
    assert abs(float(reference.linear_cross_entropy(x, w, labels)) - np.log(8)) < 1e-15
    assert abs(float(reference.linear_cross_entropy(x, w, labels, reduction="sum")) - 3 * np.log(8)) < 1e-14
    assert abs(float(reference.linear_cross_entropy(x, w, labels, z_loss=2.0)) - np.log(8) - 2 * np.log(8) ** 2) < 1e-14
    kept = reference.linear_cross_entropy(x, w, labels, ignore_index=5, reduction="none")
    np.testing.assert_allclose(kept, [np.log(8), 0, np.log(8)])
    assert np.isnan(reference.linear_cross_entropy(x, w, labels + 8))
    one_hot = scipy.special.log_softmax(RANDOM.normal(size=(4, 6)), -1)
    eye = np.eye(6)
    smooth = reference.linear_cross_entropy(one_hot, eye, np.arange(4), label_smoothing=0.25, reduction="none")
    target = 0.75 * eye[:4] + 0.25 / 6
    np.testing.assert_allclose(smooth, -(target * one_hot).sum(-1), rtol=1e-13)


def test_cross_entropy_of_logits_by_hand():
    z, labels, zeros = RANDOM.normal(size=(3, 8)), np.array([0, 5, 7]), np.zeros((3, 8))
    assert abs(float(reference.cross_entropy(zeros, labels)) - np.log(8)) < 1e-15
    assert abs(float(reference.cross_entropy(zeros, labels, z_loss=2.0)) - np.log(8) - 2 * np.log(8) ** 2) < 1e-14
    kept = reference.cross_entropy(zeros, labels, ignore_index=5, reduction="none")
    np.testing.assert_allclose(kept, [np.log(8), 0, np.log(8)])
    assert np.isnan(reference.cross_entropy(zeros, labels + 8))
    wanted = -scipy.special.log_softmax(z, -1)
    weights = np.array([1.0, 2.0, 0.5])
    found = reference.cross_entropy(z, labels, weights=weights)
    np.testing.assert_allclose(found, (weights * wanted[np.arange(3), labels]).sum() / 3.5, rtol=1e-13)
    p = RANDOM.random((8, 3))
    target = 0.75 * p.T + 0.25 / 8
    found = reference.cross_entropy(z.T, p, axis=0, label_smoothing=0.25, reduction="sum")
    np.testing.assert_allclose(found, (target * wanted).sum(), rtol=1e-13)
    np.testing.assert_allclose(
        reference.cross_entropy(z, labels), reference.linear_cross_entropy(z, np.eye(8), labels), rtol=1e-14
    )
