"""Activations against independent values, and their derivatives against central differences."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats

from jaxdnn_reference.activation import ACTIVATIONS, activate, derivative

CASES = [
    *ACTIVATIONS,
    ("elu", 0.5),
    ("celu", 1.5),
    ("clipped_relu", 2.5),
    ("leaky_relu", 0.125),
    ("swish", 1.5),
    ("softplus", 2.5),
    None,
]
# Another way to compute each, with parameters filled in.
OTHER = {
    "identity": lambda x: x,
    "relu": lambda x: (x + abs(x)) / 2,
    "sigmoid": scipy.special.expit,
    "tanh": lambda x: 2 * scipy.special.expit(2 * x) - 1,
    "elu": lambda x: np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1),
    "gelu": lambda x: x * scipy.stats.norm.cdf(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(0, x),
    "selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * (np.exp(np.minimum(x, 0)) - 1)),
    "celu": lambda x: np.maximum(x, 0) + np.minimum(0, np.exp(np.minimum(x, 0)) - 1),
    ("celu", 1.5): lambda x: np.maximum(x, 0) + np.minimum(0, 1.5 * (np.exp(np.minimum(x, 0) / 1.5) - 1)),
    "mish": lambda x: x * (1 - 2 / ((1 + np.exp(x)) ** 2 + 1)),
    "softsign": lambda x: np.sign(x) - np.sign(x) / (1 + abs(x)),
    "hard_sigmoid": lambda x: np.interp(x, [-3, 3], [0, 1]),
    "hard_swish": lambda x: np.where(x < 3, np.maximum(x + 3, 0) * x / 6, x),
    "clipped_relu": lambda x: np.clip(x, 0, 6),
    "leaky_relu": lambda x: np.maximum(x, 0.01 * x),
    ("elu", 0.5): lambda x: np.where(x > 0, x, 0.5 * (np.exp(np.minimum(x, 0)) - 1)),
    ("swish", 1.5): lambda x: x / (1 + np.exp(-1.5 * x)),
    ("softplus", 2.5): lambda x: np.logaddexp(0, 2.5 * x) / 2.5,
    ("clipped_relu", 2.5): lambda x: np.clip(x, 0, 2.5),
    ("leaky_relu", 0.125): lambda x: np.maximum(x, 0.125 * x),
    None: lambda x: x,
}
POINTS = np.concatenate([np.linspace(-6, 6, 241) + 0.003, [-0.5, 0.25, 2.75]])


@pytest.mark.parametrize("activation", CASES, ids=str)
def test_values(activation: Any):
    np.testing.assert_allclose(activate(POINTS, activation), OTHER[activation](POINTS), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("activation", CASES, ids=str)
def test_derivatives_equal_central_differences(activation: Any):
    h = 2.0**-17
    difference = (activate(POINTS + h, activation) - activate(POINTS - h, activation)) / (2 * h)
    # h^2 / 6 times the third derivative (below 3) and float64's rounding over h: at most four of a value up to 6
    np.testing.assert_allclose(derivative(POINTS, activation), difference, rtol=0, atol=h * h / 2 + 2.0**-49 / h)


@pytest.mark.parametrize("activation", CASES, ids=str)
def test_extremes_and_nan(activation: Any):
    x = np.array([-1e4, -700.0, 700.0, 1e4])
    assert np.isfinite(activate(x, activation)).all()
    assert np.isfinite(derivative(x, activation)).all()
    assert np.isnan(activate(np.array([np.nan]), activation)).all()
    assert np.isnan(derivative(np.array([np.nan]), activation)).all()


def test_derivatives_at_kinks():
    zero = np.zeros(1)
    assert derivative(zero, "relu") == 0
    assert derivative(zero, ("leaky_relu", 0.125)) == 0.125
    assert derivative(zero, ("elu", 0.5)) == 0.5
    assert derivative(np.array([0.0, 2.5]), ("clipped_relu", 2.5)).tolist() == [0, 0]
    assert derivative(np.array([-3.0, 3.0]), "hard_swish").tolist() == [0, 1]
    assert derivative(np.array([-3.0, 3.0]), "hard_sigmoid").tolist() == [0, 0]
    np.testing.assert_allclose(derivative(np.zeros(1), "selu"), 1.7580993408473766, rtol=1e-15)


def test_small_values_do_not_cancel():
    x = np.array([-30.0, -1e-20])
    np.testing.assert_allclose(activate(x, "gelu")[0], -30 * scipy.stats.norm.sf(30), rtol=1e-12)
    np.testing.assert_allclose(activate(x, "elu")[1], -1e-20, rtol=1e-15)
    np.testing.assert_allclose(activate(x, "softplus")[0], math.exp(-30), rtol=1e-12)
    np.testing.assert_allclose(activate(np.array([-9.0]), "gelu_tanh"), -9 * scipy.special.expit(
        2 * math.sqrt(2 / math.pi) * (-9 - 0.044715 * 729)), rtol=1e-12)  # fmt: skip


def test_longdouble_stays_wide():
    x = np.array([0.1], np.longdouble)
    for activation in ("relu", "sigmoid", "tanh", "softplus", "swish"):
        assert activate(x, activation).dtype == np.longdouble
