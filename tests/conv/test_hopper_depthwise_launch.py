"""Depthwise and narrow-group kernels: their lowering for CUDA, and their grids under a limit of multiprocessors."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src import hopper
from tests.conv.depthwise_cases import CASES, DTYPES, geometry, operands, reference
from tests.hopper.device import on_hopper

if hopper.unavailable():
    pytest.skip(hopper.unavailable() or "", allow_module_level=True)

from jaxdnn._src.conv.hopper import depthwise as kernels
from jaxdnn._src.conv.hopper.depthwise import launch
from jaxdnn._src.conv.hopper.depthwise.launch import each, grid
from jaxdnn._src.conv.hopper.depthwise.planar import planar
from jaxdnn._src.core.compat import plgpu


@pytest.mark.parametrize("case", CASES)
def test_lowers_for_cuda(case):
    x, w, dy, _, config, geo = operands(case)
    dy = dy.reshape(*x.shape[:1], *geo.out, x.shape[-1])
    calls = {
        "fprop": (ft.partial(kernels.depthwise_data, "fprop", geo=geo, config=config), (x, w), dy.shape),
        "dgrad": (ft.partial(kernels.depthwise_data, "dgrad", geo=geo, config=config), (dy, w), x.shape),
        "wgrad": (ft.partial(kernels.depthwise_wgrad, geo=geo, config=config), (x, dy), w.shape),
    }
    for op, (function, arrays, shape) in calls.items():
        assert kernels.unsupported(op, geo, x.shape[0], x.shape[-1], w.shape[-1], x.dtype, config) is None
        specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        traced = jax.jit(function).trace(*specs)
        assert traced.out_info.shape == shape
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text


@pytest.mark.parametrize("case", CASES)
def test_a_limit_of_multiprocessors_bounds_every_grid(case, monkeypatch):
    grids, kernel = [], plgpu.kernel
    monkeypatch.setattr(plgpu, "kernel", lambda *a, **k: grids.append(k["grid"]) or kernel(*a, **k))
    x, w, dy, _, config, geo = operands(case)
    dy = dy.reshape(*x.shape[:1], *geo.out, x.shape[-1])

    def all_of_them(x, w, dy, **limit):
        found = [kernels.depthwise_data("fprop", x, w, geo=geo, config=config, **limit)]
        found.append(kernels.depthwise_data("dgrad", dy, w, geo=geo, config=config, **limit))
        return found if config else [*found, kernels.depthwise_wgrad(x, dy, geo=geo, **limit)]

    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w, dy)]
    jax.eval_shape(all_of_them, *specs)
    everywhere = [grid[0] for grid in grids]
    assert len(everywhere) == (2 if config else 4)  # the filter gradient's partial sums and their addition
    for sms in (1, 2, 10**6):
        grids.clear()
        text = jax.jit(ft.partial(all_of_them, sms=sms)).trace(*specs).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text
        assert [grid[0] for grid in grids] == [min(sms, blocks) for blocks in everywhere]


@pytest.mark.parametrize(("items", "sms"), [(7, None), (7, 3), (6, 2), (5, 9), (6, 1)])
def test_every_item_is_done_under_a_limit(items, sms, monkeypatch):
    """The loop of a block of threads, on Pallas' interpreter, which knows no instruction of the device's own."""
    monkeypatch.setattr(launch, "turns", lambda count: count)

    def body(x: Any, y: Any) -> None:
        def add_one(at: Any) -> None:
            y[at] = x[at] + 1

        each(items, sms, "block", add_one)

    interpreter: Any = getattr(plgpu, "InterpretGPUParams")  # noqa: B009  (older releases have none)
    run = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((items,), jnp.int32), grid=grid(items, sms), grid_names=("block",),
        interpret=interpreter(),
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(run)(jnp.arange(items, dtype=jnp.int32)), np.arange(items) + 1)


# x, taps, channels of a group, stride, padding: a tile of two rows left over, whose reads ended in an illegal address;
# and partial sums of one tap, which a split stored over its neighbour's.
SEEN: list[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...], tuple[tuple[int, int], ...]]] = [
    ((1, 600, 96), (2,), 8, (2,), ((0, 2),)),
    ((8, 16, 16, 40), (1, 1), 1, (1, 1), ((0, 0), (0, 0))),
    ((2, 30, 28, 40), (3, 3), 1, (1, 1), ((1, 1), (1, 1))),
]


@on_hopper
@pytest.mark.parametrize("sms", [None, 3])
@pytest.mark.parametrize(("shape", "taps", "group", "stride", "padding"), SEEN)
def test_whole_numbers_are_exact(shape, taps, group, stride, padding, sms):
    w_shape, rng = (*taps, group, shape[-1]), np.random.default_rng(0)
    geo = geometry(shape, w_shape, stride=stride, padding=padding, dilation=(1,) * len(taps))
    call = planar(geo, shape[0], shape[-1], jnp.bfloat16)
    draw = lambda size: rng.integers(-2, 3, size).astype(DTYPES["bf16"])
    x, w, dy = draw(shape), draw(w_shape), draw((shape[0], *geo.out, shape[-1]))
    for want, got in zip(
        reference(x, w, dy, call),
        (
            kernels.depthwise_data("fprop", x, w, geo=geo, sms=sms),
            kernels.depthwise_data("dgrad", dy, w, geo=geo, sms=sms),
            kernels.depthwise_wgrad(x, dy, geo=geo, sms=sms),
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(got).reshape(want.shape), want.astype(x.dtype))


@on_hopper
@pytest.mark.parametrize(
    ("shape", "dtype"), [((64, 4, 4, 1216), "bf16"), ((64, 8, 4, 1280), "f16"), ((64, 4, 12, 1920), "f16")]
)
def test_slots_are_not_filled_while_they_are_read(shape, dtype):
    """Whole images in tiles so small that the copy engine could fill a slot while loads of it are in flight."""
    rng = np.random.default_rng(0)
    geo = geometry(shape, (3, 3, 1, shape[-1]), stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1))
    x, dy = (rng.integers(-2, 3, shape).astype(DTYPES[dtype]) for _ in range(2))
    *_, wanted = reference(x, np.zeros((3, 3, 1, shape[-1])), dy, planar(geo, shape[0], shape[-1], x.dtype))
    wgrad = jax.jit(lambda x, dy: kernels.depthwise_wgrad(x, dy, geo=geo))
    x, dy, wanted = jax.device_put((x, dy, wanted.astype(DTYPES[dtype])))
    differs = jax.jit(lambda got: (got.reshape(wanted.shape) != wanted).any())
    assert not any([differs(wgrad(x, dy)) for _ in range(300)])
