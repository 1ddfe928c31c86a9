"""The definition of the normalisations against loops, finite differences and each other."""

import dataclasses
import decimal
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jaxdnn_reference as reference
from jaxdnn._src.norm import bounds
from tests.core import running_error
from tests.norm import cases
from tests.norm.cases import CASES, FEW


def f32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_backward_is_the_derivative(name: str):
    """Along a direction in x, scale and bias, by central differences of y."""
    norm = CASES[name]
    x, s, b, dy = running_error.coarse(*norm.arrays(1, np.float64))
    gradients, off = norm.gradients(reference, dy, x, s), norm.definition_errors(x, s, b, dy)
    error, rng = norm.definition_errors(x, s, b)[0], np.random.default_rng(2)
    for i, of in enumerate((x, s, b)):
        (d,) = running_error.coarse(rng.normal(size=of.shape))
        y = lambda h, i=i, d=d: norm.definition(*(a + h * d if i == j else a for j, a in enumerate((x, s, b))))[0]
        running_error.dual(gradients[i], off[i], d, dy, y, error)


@pytest.mark.parametrize("name", FEW)
def test_saved_statistics_give_the_same_gradients(name: str):
    norm = CASES[name]
    x, s, b, dy = norm.arrays(3, np.float32)
    found = norm.definition(x, s, b)
    saved = {"mean": found[1], "rstd": found[2]} if norm.centred else {"rstd": found[1]}
    p = dataclasses.replace(norm.problem(x, s, b), wide=False)  # a saved mean is rounded
    errors = bounds.backward(p, cases.in_view(norm, dy, p.x.shape))
    ours, theirs = norm.gradients(reference, dy, x, s, **saved), norm.gradients(reference, dy, x, s)
    for mine, other, (_, error) in zip(ours, theirs, errors, strict=True):
        running_error.agree(mine, other, 2 * error.reshape(mine.shape) * bounds.definition_share(p.format))


@pytest.mark.parametrize("mean", [0.0, 1e4, 1e8])
@pytest.mark.parametrize("op", ["layer_norm", "group_norm", "instance_norm", "batch_norm"])
def test_float64_keeps_its_digits_far_from_zero(op: str, mean: float):
    """Against decimal numbers of 60 digits: no further off than rounding a result to float64."""
    rng = np.random.default_rng(14)
    x, dy = rng.normal(size=(3, 7, 5, 4)) + mean, rng.normal(size=(3, 7, 5, 4))
    slices = {"layer_norm": (3,), "group_norm": (1, 2, 3), "instance_norm": (1, 2), "batch_norm": (0, 1, 2)}[op]
    options = {"groups": 1} if op == "group_norm" else {}
    found = getattr(reference, op)(x, **options)
    found = found[0] if op == "batch_norm" else found
    dx = getattr(reference, op + "_dgrad")(dy, x, **options)[0]
    with decimal.localcontext(prec=60):
        number = np.vectorize(decimal.Decimal, otypes=[object])
        exact, g = number(x), number(dy)
        of = lambda v: v.sum(slices, keepdims=True) / math.prod(x.shape[a] for a in slices)
        centred = exact - of(exact)
        eps = decimal.Decimal.from_float(1e-5)
        rstd = np.vectorize(lambda v: 1 / (v + eps).sqrt(), otypes=[object])(of(centred**2))
        h = centred * rstd
        inner = rstd * (g - of(g) - h * of(g * h))
        for ours, golden in ((found, h), (dx, inner)):
            error = number(np.asarray(ours, np.float64)) - golden
            assert (np.abs(error) <= decimal.Decimal(2.0**-52) * np.abs(golden).max()).all()


def whole(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Integers: where statistics are over a power of two of them, nothing rounds in any order before a root."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float64)


def test_group_norm_by_loops():
    x = whole(4, (3, 2, 4, 6))
    y, mean, rstd = reference.group_norm(x, groups=3, return_statistics=True)
    for n in range(3):
        for g in range(3):
            part = x[n, ..., 2 * g : 2 * g + 2].astype(np.longdouble)
            inverse = 1 / np.sqrt(part.var() + np.longdouble(1e-5))
            assert (mean[n, g], rstd[n, g]) == (part.mean(), inverse)
            np.testing.assert_array_equal(y[n, ..., 2 * g : 2 * g + 2], (part - part.mean()) * inverse)


def test_special_cases_of_each_other():
    x = whole(5, (3, 4, 2, 8))
    instance = reference.instance_norm(x)
    np.testing.assert_array_equal(reference.group_norm(x, groups=8), instance)
    np.testing.assert_array_equal(np.concatenate([reference.batch_norm(x[i : i + 1])[0] for i in range(3)]), instance)
    np.testing.assert_array_equal(reference.group_norm(x, groups=1), reference.layer_norm(x, axis=(1, 2, 3)))
    ones = np.ones((3, 8))
    np.testing.assert_array_equal(
        reference.adaptive_layer_norm(x, 0 * ones, ones, zero_centred=True), reference.layer_norm(x) + 1
    )
    centred = x - x.mean(-1, keepdims=True)
    np.testing.assert_array_equal(reference.rms_norm(centred, eps=1e-5), reference.layer_norm(x))


@pytest.mark.parametrize("layout", ["NCHW", "CHWN", "NCHWc3"])
@pytest.mark.parametrize("op", ["group_norm", "instance_norm", "batch_norm"])
def test_layouts_differ_in_nothing_but_their_order(op: str, layout: str):
    x = whole(6, (2, 4, 8, 6))
    there = {
        "NCHW": lambda v: v.transpose(0, 3, 1, 2),
        "CHWN": lambda v: v.transpose(3, 1, 2, 0),
        "NCHWc3": lambda v: v.reshape(2, 4, 8, 2, 3).transpose(0, 3, 1, 2, 4),
    }[layout]
    options = {"groups": 3} if op == "group_norm" else {}
    extra = {} if op == "batch_norm" else {"return_statistics": True}
    s = np.arange(1.0, 7)
    here = getattr(reference, op)(x, scale=s, **options, **extra)
    other = getattr(reference, op)(there(x), scale=s, layout=layout, **options, **extra)
    np.testing.assert_array_equal(other[0], there(here[0]))
    for a, b in zip(other[1:], here[1:], strict=True):
        np.testing.assert_array_equal(a, b)


def test_running_variance_is_unbiased_and_momentum_weighs_the_new():
    x, old = whole(9, (2, 1, 1, 3)), np.arange(3.0)
    *_, mean, variance = reference.batch_norm(x, running_mean=old, running_variance=old, momentum=0.25)
    np.testing.assert_array_equal(mean, 0.25 * x.mean((0, 1, 2)) + 0.75 * old)
    np.testing.assert_array_equal(variance, 0.25 * x.var((0, 1, 2), ddof=1) + 0.75 * old)
    assert x.var((0, 1, 2)).all()


def test_rounded_only_where_a_dtype_is_given():
    x = f32([[1, 2, 4]])
    assert reference.layer_norm(x).dtype == np.float64
    assert reference.layer_norm(x, out_dtype=ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
