"""Hopper filter gradients that need no second pass: a cluster adds its blocks' sums and stores the result."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper import fprop, wgrad, wgrad_plan
from tests.conv.hopper_cases import BF16, F32, Case, kernel, lowered
from tests.hopper.device import on_hopper

DIRECT = {
    "one block": dict(splits=1, columns=64),
    "two blocks": dict(splits=2, columns=128),
    "four blocks, rows in twos": dict(splits=4, columns=256, filters=64, across=2, stages=2),
    "two blocks, one warpgroup of two row blocks": dict(splits=2, columns=128, filters=128, across=1),
    "two blocks, columns in twos": dict(splits=2, columns=128, across=1, along=2),
}
#    two taps with ragged channels, one tap, and taps along one axis
DIRECT_CASES: dict[str, Case] = {
    "2x3": Case(6, (11, 13), 136, 200, (2, 3), (1, 1), ((0, 1), (1, 1)), (1, 1), 1, True),
    "1x1": Case(9, (7, 6), 192, 72, (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    "strided": Case(5, (12, 14), 64, 128, (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
}


def direct_config(name, case):
    rank = 0 if math.prod(case.taps) == 1 else len(case.sizes)
    options: dict[str, Any] = dict(filters=64, across=2, stages=3, direct=True) | DIRECT[name]
    return wgrad.Config(64 if not rank else 4, (4,) * rank, **options)


@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("case", DIRECT_CASES)
@pytest.mark.parametrize("name", DIRECT)
def test_direct_results_lower(name, case, outer):
    """One launch, a result in the filter's own layout, and no partial sums in memory."""
    case = DIRECT_CASES[case]
    config = direct_config(name, case)
    _, function, operands, keywords = kernel("wgrad", case, outer, config=config)
    avals = [jax.ShapeDtypeStruct(shape, BF16) for shape in operands]
    text = lowered(function, *avals)
    w = "x".join(map(str, case.w(outer)))
    assert f"tensor<{w}xbf16>" in text
    assert "f32>" not in text.split("mosaic_gpu")[0]
    whole = case.c % 8 == case.k % 8 == 0 and not case.flip
    assert (wgrad.workspace(*avals, **keywords) == 0) == whole


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(splits=3, columns=192), "1, 2, 4 or 8 blocks"),
        (dict(splits=4, columns=128), "whole chunks of columns"),
        (dict(splits=2, columns=256, stages=4), "does not fit shared memory"),
        (dict(splits=1, halo=True, block=(8, 8), images=1, along=3, across=1, columns=192), "no halo"),
    ],
)
def test_direct_results_that_cannot_be(change, text):
    axes = fprop.axes_of(Geometry((16, 16), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
    problem = wgrad.Problem(4, 128, 128, axes, jnp.dtype(BF16))
    options: dict[str, Any] = dict(images=1, block=(8, 8), filters=64, across=2, direct=True) | change
    assert text in (wgrad_plan.check(problem, wgrad.Config(**options)) or "")


def test_a_gradient_of_few_pixels_is_stored_directly():
    """As partial sums in float32 it would be written, read and written again, which is all that it takes."""
    axes = fprop.axes_of(Geometry((8, 8), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
    for batch in (1, 2, 8):
        assert wgrad_plan.choose(wgrad.Problem(batch, 1280, 1280, axes, jnp.dtype(BF16)), 132).direct


def test_a_direct_result_of_another_type_takes_the_other_way():
    """The order of additions stays the configuration's; only the conversion is elsewhere."""
    case = DIRECT_CASES["1x1"]
    _, function, operands, _ = kernel("wgrad", case, False, config=direct_config("two blocks", case), out_dtype=F32)
    text = lowered(function, *(jax.ShapeDtypeStruct(shape, BF16) for shape in operands))
    assert "tensor<2x128x1x192xf32>" in text


@on_hopper
@pytest.mark.parametrize("sms", [None, 9])
@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("case", DIRECT_CASES)
@pytest.mark.parametrize("name", DIRECT)
def test_direct_results_have_the_same_bits(name, case, outer, sms):
    """A cluster's sum is the sum of the partial sums in memory, also where a cluster has several tiles in turn."""
    case = DIRECT_CASES[case]
    config = direct_config(name, case)
    keys = jax.random.split(jax.random.key(5))
    _, _, operands, _ = kernel("wgrad", case, outer)
    a, b = (jax.random.normal(key, shape).astype(BF16) for key, shape in zip(keys, operands, strict=True))
    found = []
    for way in (config, dataclasses.replace(config, direct=False)):
        _, function, _, _ = kernel("wgrad", case, outer, config=way, sms=sms)
        found.append(np.asarray(jax.jit(function)(a, b)).view(np.uint16))
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(
        found[0].view(BF16).astype(np.float32), case.definition("wgrad", a.astype(F32), b.astype(F32), outer),
        rtol=2**-8, atol=2**-8 * math.sqrt(math.prod(operands[1][:-1])),
    )  # fmt: skip


@on_hopper
@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize(("sizes", "batch"), [((7, 8, 8), 1), ((8, 8, 8), 2), ((5, 7, 9), 2)])
def test_blocks_beyond_the_filter_change_no_result(sizes, batch, outer):
    """A warpgroup's second row of blocks lies beyond the filter's 27 taps of 5 chunks: seen to go wrong on an H200."""
    case = Case(batch, sizes, 320, 320, (3, 3, 3), (1, 1, 1), ((1, 1),) * 3, (1, 1, 1))
    _, function, _, _ = kernel("wgrad", case, outer)
    x, dy = case.whole_numbers("wgrad")
    want = np.asarray(jnp.asarray(case.definition("wgrad", x, dy, outer)).astype(BF16))
    run = jax.jit(function)
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(run(jnp.asarray(x, BF16), jnp.asarray(dy, BF16))), want)
