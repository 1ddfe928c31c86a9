"""Every number of bfloat16 and float16 through every activation and every derivative: correctly rounded, all of them.

Three steps prove it. The results equal the definition's bits. The definition's float64 values are right to 2^-40, by
decimal arithmetic of 160 digits. And where a value lies so near a tie that this would not settle how it rounds, the
decimal arithmetic settles it.
"""

import functools as ft
from decimal import Decimal
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.core import tolerance
from jaxdnn_reference.activation import parse
from tests.activation import exact as exact_activations
from tests.conv import helpers

CASES = [a for a in helpers.ACTIVATIONS if a is not None]
CASES += [("swish", -0.75), ("relu", -1.0, 2.0, 0.5), ("relu", 0.0, 6.0, 0.1), ("relu", 1.0, 3.0, 0.0)]
CURVED = [a for a in CASES if parse(a)[0] in exact_activations.CURVED]
each_activation = pytest.mark.parametrize("name", CASES, ids=str)
each_curved = pytest.mark.parametrize("name", CURVED, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=lambda d: np.dtype(d).name)


def numbers(dtype: Any) -> np.ndarray:
    """All of a type's numbers, infinities and NaNs."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


@ft.cache
def computed(name: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The op and, with dy = 1, its backward op, on all numbers."""
    x = numbers(dtype)
    run = lambda x: (dnn.activation(x, activation=name), dnn.activation_dgrad(jnp.ones_like(x), x, activation=name))
    y, dx = jax.jit(run)(x)
    return np.asarray(y), np.asarray(dx)


def assert_same_bits(found: np.ndarray, wanted: np.ndarray, x: np.ndarray) -> None:
    """The same bits, or NaN in both."""
    assert found.dtype == wanted.dtype
    unsigned = np.dtype(f"u{found.dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        different = (found.view(unsigned) != wanted.view(unsigned)) & ~((found != found) & (wanted != wanted))
    at = np.flatnonzero(different)[:5]
    assert not different.any(), f"{different.sum()} differ: at {x[at]} got {found[at]}, wanted {wanted[at]}"


@each_dtype
@each_activation
def test_bits_are_the_definitions(name: Any, dtype: Any):
    x = numbers(dtype)
    y, dx = computed(name, dtype)
    assert_same_bits(y, reference.activation(x, activation=name, arithmetic="ordered"), x)
    assert_same_bits(dx, reference.activation_dgrad(np.ones_like(x), x, activation=name, arithmetic="ordered"), x)
    with np.errstate(invalid="ignore"):
        slopes = reference.derivative(x.astype(np.float64), name)
    assert_same_bits(dx, reference.round_to(slopes, dtype), x)


@each_dtype
@each_curved
@pytest.mark.parametrize("slope", [False, True], ids=["value", "slope"])
def test_near_ties_are_settled_by_decimal_arithmetic(name: Any, dtype: Any, slope: bool):
    x, (kind, parameters) = numbers(dtype), parse(name)
    rounded = computed(name, dtype)[slope].astype(np.float64)
    with np.errstate(invalid="ignore"):
        wide = (reference.derivative if slope else reference.activate)(x.astype(np.float64), name)
    low, high = tolerance.format_of(np.dtype(dtype).name).rounds_to(np.where(np.isnan(rounded), 0.0, rounded))
    with np.errstate(invalid="ignore"):
        gap = np.minimum(np.abs(wide - low), np.abs(high - wide))
        near = np.isfinite(x.astype(np.float64)) & (gap <= 2.0**-38 * np.abs(wide)) & (wide != 0)
    for at in np.flatnonzero(near):
        value = exact_activations.exact(float(x[at]), kind, parameters, slope=slope)
        even = computed(name, dtype)[slope].view(np.uint16)[at] % 2 == 0  # a tie is its own: hard_swish has some
        lowest, highest = Decimal(low[at]), Decimal(high[at])
        right = lowest < value < highest or (even and value in (lowest, highest))
        assert right, f"{name} at {x[at]}: {value} is not nearest {rounded[at]}"
    if np.dtype(dtype) == ml_dtypes.bfloat16 and kind in ("gelu", "swish") and not slope:
        assert near.sum() >= 100  # half of a subnormal number is a tie


@each_curved
@pytest.mark.parametrize("slope", [False, True], ids=["value", "slope"])
def test_float64_is_right_far_beyond_a_narrow_type(name: Any, slope: bool):
    kind, parameters = parse(name)
    x = np.random.default_rng(7).normal(size=60) * np.exp2(np.random.default_rng(8).integers(-12, 5, 60))
    found = (reference.derivative if slope else reference.activate)(x, name)
    for value, got in zip(x, found, strict=True):
        exact = exact_activations.exact(float(value), kind, parameters, slope=slope)
        # 2^-200 is nothing beside the smallest narrow number, 2^-133.
        assert abs(Decimal(float(got)) - exact) <= abs(exact) * Decimal(2) ** -40 + Decimal(2) ** -200, (value, got)


@each_dtype
def test_a_planted_misrounding_is_found(dtype: Any):
    x = numbers(dtype)
    y = computed("gelu", dtype)[0].copy()
    y.view(np.uint16)[np.flatnonzero(x == 1.5)] += 1
    with pytest.raises(AssertionError, match="1 differ: at"):
        assert_same_bits(y, reference.activation(x, activation="gelu", arithmetic="ordered"), x)


@each_dtype
def test_scale_and_result_type_round_once(dtype: Any):
    x = numbers(dtype)
    many: tuple[dict[str, Any], ...] = (
        {"alpha": -0.75},
        {"out_dtype": np.float32},
        {"alpha": 3.0, "out_dtype": np.float16},
    )
    for options in many:
        for name in ("gelu", "swish", "mish", "softsign", ("elu", 0.5), ("celu", 1.5), "relu"):
            found = np.asarray(jax.jit(ft.partial(dnn.activation, activation=name, **options))(x))
            assert_same_bits(found, reference.activation(x, activation=name, arithmetic="ordered", **options), x)


@each_dtype
@each_curved
def test_slopes_are_rounded_once_down_to_the_least_normal_float32(name: Any, dtype: Any):
    """With a dy of 1 that is known to no compiler, compiled and not; below, a zero of the slope's sign may be."""
    x = numbers(dtype)
    with np.errstate(invalid="ignore"):
        x = x[np.isfinite(x.astype(np.float64))]
    slopes = reference.derivative(x.astype(np.float64), name)
    wanted = reference.round_to(slopes, dtype)
    below = np.abs(slopes) < 2.0**-126
    if name not in ("hard_sigmoid", "hard_swish"):  # whose slopes are 0 below -3, not nearly 0
        assert (below & (wanted != 0)).any() == (np.dtype(dtype) == ml_dtypes.bfloat16)
    back = ft.partial(dnn.activation_dgrad, activation=name)
    for run in (back, jax.jit(back)):
        found = np.asarray(run(jnp.ones_like(jnp.asarray(x)), jnp.asarray(x)))
        assert_same_bits(found[~below], wanted[~below], x[~below])
        right = found.view(np.uint16) == wanted.view(np.uint16)
        assert (right | (found == 0))[below].all()


@each_dtype
def test_backward_multiplies_by_the_slope_in_float32(dtype: Any):
    x = numbers(dtype)
    dy = np.random.default_rng(3).normal(size=x.shape).astype(dtype)
    for name in CASES:
        found = np.asarray(jax.jit(ft.partial(dnn.activation_dgrad, activation=name))(dy, x))
        wanted = reference.activation_dgrad(dy, x, activation=name, arithmetic="ordered")
        # XLA on CPU reads and writes float32's subnormal numbers as 0, and bfloat16's are among them.
        with np.errstate(invalid="ignore"):
            factors = (dy.astype(np.float64), reference.derivative(x.astype(np.float64), name), wanted)
            flushed = [(np.abs(v) > 0) & (np.abs(v.astype(np.float64)) < 2.0**-126) for v in factors]
        normal = ~np.any(flushed, axis=0)
        assert normal.mean() > 0.7
        assert_same_bits(found[normal], wanted[normal], x[normal])
