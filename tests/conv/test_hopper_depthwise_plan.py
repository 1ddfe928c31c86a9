"""Depthwise and narrow-group kernels: tiles and splits, the order of additions, and what is not served."""

import math
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src.conv.hopper.depthwise.filter_plan import plan_filter
from jaxdnn._src.conv.hopper.depthwise.order import orders
from jaxdnn._src.conv.hopper.depthwise.plan import plan_walk
from jaxdnn._src.conv.hopper.depthwise.planar import Config
from tests.conv.depthwise_cases import (
    CASES,
    GEOMETRY,
    operands,
    unsupported,
    window,
)


@pytest.mark.parametrize("columns", [4, 8, 12, 16, 28, 32])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_an_unswizzled_store_that_overhangs_is_never_one_piece_of_memory(columns, stride):
    """Mosaic turns a contiguous unswizzled store into a plain bulk copy, which is not clipped at the array's end."""
    call = window(
        (2, 11, columns, 32), (3, 3, 1, 32), np.float32, stride=stride, padding=((1, 1),) * 2, dilation=(1, 1)
    )
    for op, target in (("fprop", call.out), ("dgrad", call.sizes)):
        plan = plan_walk(op, call)
        assert plan.out_tile[1] != target[1] or plan.channels != call.channels
    for taps in ((1, 9), (31, 3), (7, 7)):
        shape = (*taps, 1, 32)
        call = window(
            (2, 40, columns, 32), shape, jnp.bfloat16, stride=(1, 1), padding=((30, 30),) * 2, dilation=(1, 1)
        )
        plan = plan_filter(call)
        *_, rows, width, channels = plan.partial_shape(call)
        assert rows % plan.tap_block[0] == 0
        assert width % plan.tap_block[1] == 0
        assert channels == 32


def test_no_tile_is_made_so_narrow_that_its_store_is_one_piece_of_memory():
    """Four columns are the whole width here; with a dilation of 19 no wider tile fits, and the call is refused."""
    shape, taps = (2, 11, 4, 32), (3, 3, 1, 32)
    for dilation, columns in ((18, 8), (19, None)):
        geometry: dict[str, Any] = dict(stride=(1, 1), padding=((dilation,) * 2,) * 2, dilation=(dilation,) * 2)
        reason = unsupported("fprop", shape, taps, np.float32, **geometry)
        if columns is None:
            assert "over 232448 bytes" in (reason or "")
        else:
            assert reason is None
            assert plan_walk("fprop", window(shape, taps, np.float32, **geometry)).out_tile[1] == columns


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
@pytest.mark.parametrize("taps", [(1, 1), (1, 3), (3, 1)])
def test_a_split_stores_its_partial_sums_into_its_own_part(taps, dtype):
    """One tap's channels are one piece of memory, whose plain bulk copy would run on into the next split's part."""
    for channels in range(8, 200, 8):
        geometry: dict[str, Any] = dict(stride=(1, 1), padding=((0, 0),) * 2, dilation=(1, 1))
        call = window((8, 16, 16, channels), (*taps, 1, channels), dtype, **geometry)
        plan = plan_filter(call)
        assert plan.splits > 1
        _, _, rows, width, stored = plan.partial_shape(call)
        piece = plan.parts * rows * width == 1 or stored == plan.channels
        assert not piece or stored % plan.channels == 0
        assert stored >= channels


@pytest.mark.parametrize("case", CASES)
def test_the_schedule_has_every_product_once(case):
    *_, call, config, _ = operands(case)
    everything = np.arange(math.prod(call.taps) * call.group)
    _, found, classes = orders("fprop", call, config)
    assert len(found) == classes.max() + 1
    for order in found:
        np.testing.assert_array_equal(np.sort(order[order >= 0]), everything)
    _, found, classes = orders("dgrad", call, config)
    np.testing.assert_array_equal(np.unique(classes), np.arange(len(found)))
    phases, twice = math.prod(call.stride), len(found) // math.prod(call.stride)
    for parity in range(twice):
        seen = np.concatenate([found[phase * twice + parity].ravel() for phase in range(phases)])
        np.testing.assert_array_equal(np.sort(seen[seen >= 0]), everything)
    _, (order,), _ = orders("wgrad", call, config)
    plan = plan_filter(call, config)
    np.testing.assert_array_equal(np.sort(order[order >= 0]), np.arange(call.images * math.prod(call.out)))
    assert len(order) == plan.parts * plan.splits


def test_forward_order_ignores_batch_and_tiles():
    shape = (3, 3, 1, 32)
    geometry: dict[str, Any] = dict(stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))
    found = [
        orders("fprop", window((n, size, size, 32), shape, jnp.bfloat16, **geometry))[1]
        for n in (1, 4)
        for size in (7, 28, 56)
    ]
    for one in found:
        np.testing.assert_array_equal(one, found[0])


@pytest.mark.parametrize(
    ("shape", "taps", "walk", "filter_gradient"),
    [
        ((128, 14, 14, 384), 3, (32, 2), (64, 2)),
        ((128, 7, 7, 960), 3, (32, 2), (64, 3)),
        ((2, 14, 14, 384), 3, (32, 1), (32, 2)),  # too few tiles to take in turn
        ((128, 14, 14, 144), 3, (32, 2), (32, 2)),  # 64 channels do not divide them
        ((128, 56, 56, 144), 3, (32, 1), (32, 2)),
        ((64, 28, 28, 384), 7, (32, 1), (32, 2)),
    ],
)
def test_channels_and_tiles_in_flight_are_those_that_were_measured(shape, taps, walk, filter_gradient):
    low = (taps // 2,) * 2
    call = window(shape, (taps, taps, 1, shape[-1]), jnp.bfloat16, stride=(1, 1), padding=(low, low), dilation=(1, 1))
    for op in ("fprop", "dgrad"):
        plan = plan_walk(op, call)
        assert (plan.channels, plan.stages) == walk
        fixed = plan_walk(op, call, Config(rows=plan.out_tile[0], columns=plan.out_tile[1]))
        assert (fixed.stages, fixed.out_tile) == (1, plan.out_tile)
    assert (plan_filter(call).channels, plan_filter(call).stages) == filter_gradient


def test_one_axis_order_ignores_the_image():
    call = window((4, 20, 32), (5, 1, 32), jnp.bfloat16, stride=(1,), padding=((4, 0),), dilation=(1,))
    _, (even, odd), _ = orders("fprop", call)
    np.testing.assert_array_equal(even, odd)


def test_a_tile_starts_at_an_even_row():
    call = window((1, 20, 20, 32), (3, 3, 1, 32), jnp.bfloat16, **GEOMETRY)
    with pytest.raises(ValueError, match="rows are a multiple of 2 and its columns of 4, got 7 and 28"):
        plan_walk("fprop", call, Config(rows=7, columns=28))


@pytest.mark.parametrize(
    ("shape", "w_shape", "dtype", "reason"),
    [
        ((1, 8, 8, 8, 32), (3, 3, 3, 1, 32), "bfloat16", "one or two spatial axes"),
        ((1, 8, 8, 32), (3, 3, 1, 32), "float64", "the dtype is one of"),
        ((1, 8, 8, 32), (3, 3, 1, 64), "bfloat16", "as many output channels"),
        ((1, 8, 8, 48), (3, 3, 3, 48), "bfloat16", r"channels per group is one of \(1, 2, 4, 8\), got 3"),
        ((1, 8, 8, 36), (3, 3, 1, 36), "float16", "divisible by 8, got 36"),
        ((1, 8, 8, 32), (3, 3, 2, 32), "float32", "depthwise, got 2"),
        ((1, 8, 8, 32), (300, 3, 1, 32), "bfloat16", "nothing to compute"),
        ((1, 600, 600, 32), (257, 257, 1, 32), "bfloat16", "over 232448 bytes"),
    ],
)
def test_what_is_not_served_says_why(shape, w_shape, dtype, reason):
    why = unsupported("fprop", shape, w_shape, dtype, **GEOMETRY)
    assert why is not None
    assert re.search(reason, why), why
