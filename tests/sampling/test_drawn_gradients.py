"""Gradients among the random calls of `grid_sample`: what they are compared with, and what it would not let pass."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxdnn_reference as reference
from jaxdnn._src.cases.case import judge
from jaxdnn._src.core.tolerance import ACCUMULATIONS
from jaxdnn._src.sampling.cases import OF_OP, VARIANTS, SamplingCase, draw
from jaxdnn._src.sampling.primitive import AT, AT_PIXELS, AT_SLOPES
from jaxdnn.verify import random_call

SIZES = {1: ((6,), (5,)), 2: ((4, 3), (3, 3)), 3: ((3, 2, 3), (2, 1, 3))}
STEP = 2.0**-6  # of a place; places are 1/8 away from ties


def drawn(variant: str, rank: int, gradient: str) -> tuple[SamplingCase, tuple[np.ndarray, ...], np.ndarray]:
    """A case in float64, its operands, and what is expected."""
    sizes, points = SIZES[rank]
    case = SamplingCase("grid_sample", "xla", "f64", variant, 2, sizes, points, 2, gradient=gradient)
    operands = case.operands("normal", np.random.default_rng(rank))
    (expected,) = case.expected("normal", operands, ACCUMULATIONS["float64"])
    return case, operands, np.asarray(expected.value)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_expected_is_the_definitions_derivative(variant: str, rank: int):
    """In x, in which samples are linear; and by differences in the grid, exact for polynomials of degree 4."""
    case, (x, grid, dy), of_x = drawn(variant, rank, "x")
    sample = lambda x, grid: reference.grid_sample(x, grid, **case.options)
    along = np.random.default_rng(9).normal(size=x.shape)
    np.testing.assert_allclose((of_x * along).sum(), (dy * sample(along, grid)).sum(), rtol=1e-10)
    _, _, of_grid = drawn(variant, rank, "grid")
    for axis in range(rank):
        size = 1.0 if case.options.get("coordinates") == "pixel" else 2 / x.shape[1 + axis]
        component = axis if case.options.get("order") == "ij" else rank - 1 - axis
        h = np.zeros(rank)
        h[component] = STEP * size
        rise = lambda n, h=h: sample(x, grid + n * h) - sample(x, grid - n * h)
        slope = (8 * rise(1) - rise(2)) / (12 * h[component])
        np.testing.assert_allclose(of_grid[..., component], (slope * dy).sum(-1), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("gradient", ["x", "grid"])
@pytest.mark.parametrize("variant", ["linear-reflection", "cubic", "linear-corners"])
def test_a_gradient_at_other_places_fails(variant: str, gradient: str):
    """Places that are off by a thousandth of a pixel."""
    case = SamplingCase("grid_sample", "xla", "f32", variant, gradient=gradient)
    x, grid, dy = case.operands("normal", np.random.default_rng(0))
    (expected,) = case.expected("normal", (x, grid, dy), ACCUMULATIONS["float32"])
    right = np.asarray(expected.value, np.float32)
    assert judge("normal", right, expected).passed
    moved: Any = grid + np.float32(2e-3 / 7)
    (other,) = case.expected("normal", (x, moved, dy), ACCUMULATIONS["float32"])
    assert not judge("normal", np.asarray(other.value, np.float32), expected).passed


@pytest.mark.parametrize("gradient", ["x", "grid"])
def test_a_gradient_asks_for_no_other(gradient: str):
    """An engine may not serve the other one, and a program may keep what nobody uses."""
    case = SamplingCase("grid_sample", "xla", "f32", "linear", gradient=gradient)
    traced = str(jax.make_jaxpr(case.function())(*case.operands("normal", np.random.default_rng(0))))
    assert (AT_PIXELS in traced, AT_SLOPES in traced) == (gradient == "x", gradient == "grid")


def test_half_of_the_calls_are_gradients():
    rng = np.random.default_rng(3)
    calls = [draw("grid_sample", "hopper", rng, str(i)) for i in range(400)]
    bound = [case.bound for case in calls]
    assert bound.count(AT) in range(170, 230)
    assert min(bound.count(AT_PIXELS), bound.count(AT_SLOPES)) > 70
    assert not any(c.gradient == "grid" and c.options.get("mode") == "nearest" for c in calls)
    assert {c.variant.rpartition("/")[2] for c in calls if c.gradient == "x"} == set(VARIANTS)
    assert not any(draw(op, "xla", rng, "a").gradient for op in OF_OP for _ in range(20))


def test_a_drawn_gradient_is_run():
    among = {("grid_sample", "xla"): 1.0}
    found = (random_call.draw(6, index, among) for index in range(50))
    one = next(d for d in found if d.case.gradient == "grid" and d.case.batch * len(d.case.sizes) < 9)
    report = random_call.run(one, 6, 1, flush=False, guards=None)
    assert report.status == "passed", report.message
    assert report.level == "mesh_invariant"
    assert 0 < report.ratio < 1
