"""Which configuration a dense Hopper convolution runs: what is measured, what fits, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper import dgrad, fprop, tuning, wgrad, wgrad_plan
from jaxdnn._src.conv.hopper import plan as conv_plan
from tests.conv.hopper_cases import BF16, CASES, F32, Case, lowered

RESNET = [
    (64, 64, 56, 1, 1), (64, 64, 56, 3, 1), (64, 256, 56, 1, 1), (256, 64, 56, 1, 1), (256, 128, 56, 1, 1),
    (128, 128, 56, 3, 2), (256, 512, 56, 1, 2), (128, 128, 28, 3, 1), (512, 128, 28, 1, 1), (256, 256, 28, 3, 2),
    (256, 256, 14, 3, 1), (1024, 256, 14, 1, 1), (512, 512, 14, 3, 2), (512, 512, 7, 3, 1), (512, 2048, 7, 1, 1),
    (1024, 2048, 14, 1, 2),
]  # fmt: skip
VOLUME = (32, 64, 64, 3, 1, 2, 3)  # and the batch and the number of axes


@pytest.mark.parametrize(
    ("c", "k", "size", "taps", "stride", "batch", "rank"), [*((*shape, 128, 2) for shape in RESNET), VOLUME]
)
def test_the_table_has_the_shapes_that_were_measured(c, k, size, taps, stride, batch, rank):
    """A key that changes its spelling would silently turn the measured choices off."""
    padding = ((taps // 2,) * 2,) * rank
    case = Case(batch, (size,) * rank, c, k, (taps,) * rank, (stride,) * rank, padding, (1,) * rank)
    x, w, dy = (jax.ShapeDtypeStruct(shape, BF16) for shape in (case.x, case.w(), case.dy))
    geo = case.geometry()
    plan = fprop.plan(x, w, geo, epilogue=None, extras=(), out_dtype=BF16)
    back = dgrad.plan(dy, w, geo, epilogue=None, extras=(), out_dtype=BF16).problem
    table = tuning.table("NVIDIA H200")
    for op, problem in (("fprop", plan.problem), ("dgrad", back)):
        entry = table[tuning.key(op, problem, problem.out_dtype)]
        assert conv_plan.check(problem, conv_plan.Config(**{**entry, "block": tuple(entry["block"])})) is None
    if rank == 3:
        return
    problem = wgrad.problem_of(x, dy, geo)
    entry = table[wgrad_plan.key(problem)]
    assert wgrad_plan.check(problem, wgrad.Config(**{**entry, "block": tuple(entry["block"])})) is None


def test_zeros_are_stored_apart_where_they_stay_zeros():
    """The measured choice of a strided 1x1, and what is left of it under an epilogue or in a wider type."""
    case = Case(128, (56, 56), 256, 512, (1, 1), (2, 2), ((0, 0), (0, 0)), (1, 1))
    dy, w = case.avals("dgrad")
    blanks = []
    for epilogue, out_dtype in ((None, BF16), (Epilogue(activation=("sigmoid", None)), BF16), (None, F32)):
        options = {"epilogue": epilogue, "extras": (), "out_dtype": jnp.dtype(out_dtype)}
        problem = dgrad.plan(dy, w, case.geometry(), **options).problem
        config = tuning.choose("dgrad", problem, 132)
        assert conv_plan.check(problem, config) is None
        blanks.append(config.blank)
    assert blanks == [14, 0, 0]


@pytest.mark.parametrize(("channels", "rank"), [(64, 2), (16, 2), (32, 3)])
def test_candidates_lower(channels, rank):
    """A configuration that `check` lets through must lower: halo, resident filters, staged stores, both teams."""
    case = Case(4, (16,) * rank, channels, 64, (3,) * rank, (1,) * rank, ((1, 1),) * rank, (1,) * rank)
    x, w = case.avals("fprop")
    geo = case.geometry()
    problem = fprop.plan(x, w, geo, epilogue=None, extras=(), out_dtype=BF16).problem
    configs = list(tuning.candidates(problem))
    configs += [dataclasses.replace(c, unroll=False) for c in configs if c.unroll]
    assert {bool(c.halo) for c in configs} == {c.resident for c in configs} == {False, True}
    assert {c.staged for c in configs} == {c.teams for c in configs} == {1, 2}
    for config in configs[:: max(1, len(configs) // 24)]:
        lowered(lambda x, w, config=config: fprop.conv_fprop(x, w, config=config, geo=case.geometry()), x, w)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (conv_plan.Config(3, (8, 8), 64, teams=1, groups=2), "do not divide"),
        (conv_plan.Config(4, (8, 8), 256), "does not fit the registers"),
        (conv_plan.Config(2, (8, 8), 128, 9), "does not fit shared memory"),
        (conv_plan.Config(2, (8, 8), 32), "whole chunks"),
        (conv_plan.Config(2, (4, 16), 64, halo=2), "8k x 8"),
        (conv_plan.Config(2, (8, 8), 64, halo=2, unroll=True), "a resident filter"),
        (conv_plan.Config(2, (8, 8), 64, blank=8), "no phase"),
    ],
)
def test_configurations_that_cannot_run(config, text):
    axes = fprop.axes_of(Geometry((16, 16), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
    problem = conv_plan.Problem(4, 64, 64, axes, "tcj", jnp.dtype(BF16), jnp.dtype(BF16), F32)
    assert text in conv_plan.check(problem, config)


@pytest.mark.parametrize(("batch", "size", "images", "block"), [(1, (9, 9), 2, (8, 8)), (3, (1, 80), 1, (2, 64))])
def test_a_tile_is_not_cut_along_an_axis_of_one_position(batch, size, images, block):
    """The second warpgroup's part lies beyond it, and would be stored in the first one's place."""
    axes = fprop.axes_of(Geometry(size, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)))
    problem = conv_plan.Problem(batch, 64, 64, axes, "tcj", jnp.dtype(BF16), jnp.dtype(BF16), F32)
    config = conv_plan.Config(images, block, 64, 2, teams=1, groups=2)
    assert "has but one" in (conv_plan.check(problem, config) or "")
    larger = dataclasses.replace(problem, batch=batch + 1)
    for served, cut in (
        (problem, dataclasses.replace(config, teams=2, groups=1)),
        (problem, dataclasses.replace(config, images=4, block=(4, 8))),
        *([(larger, config)] if batch == 1 else []),
    ):
        assert conv_plan.check(served, cut) is None
    parts = [conv_plan.split(c) or (0,) for c in tuning.candidates(problem) if batch == 1 < c.images]
    assert all(part[0] > 1 for part in parts)


def test_a_box_with_what_its_taps_reach_has_256_positions_at_most():
    """Windows reach eight cells further than the tile, and a halo as far as its taps."""
    stem = Case(2, (9, 600), 3, 16, (7, 7), (2, 2), ((3, 3), (3, 3)), (1, 1))
    x, w = stem.avals("fprop")
    problem = fprop.plan(x, w, stem.geometry(), epilogue=None, extras=(), out_dtype=BF16).problem
    assert problem.window
    assert "256 elements" in (conv_plan.check(problem, conv_plan.Config(1, (1, 256), 32)) or "")
    assert conv_plan.check(problem, conv_plan.Config(1, (1, 192), 32)) is None
    axes = fprop.axes_of(Geometry((600,), (3,), (1,), ((99, 99),), (99,)))
    problem = conv_plan.Problem(1, 64, 64, axes, "tcj", jnp.dtype(BF16), jnp.dtype(BF16), F32)
    assert "256 elements" in (conv_plan.check(problem, conv_plan.Config(1, (64,), 64, 2, halo=2)) or "")


def test_a_stride_in_three_dimensions_takes_one_image_a_tile():
    geo = CASES["three axes, strided"].geometry()
    for axes in (fprop.axes_of(geo), dgrad.axes_of(geo)):
        problem = conv_plan.Problem(3, 64, 64, axes, "tcj", jnp.dtype(BF16), jnp.dtype(BF16), F32)
        assert "one image" in (conv_plan.check(problem, conv_plan.Config(2, (2, 4, 4), 64)) or "")
        assert {config.images for config in tuning.candidates(problem)} == {1}


@pytest.mark.parametrize(("channels", "columns", "taps", "rank"), [(96, 160, 3, 2), (64, 64, 3, 3), (256, 1024, 1, 2)])
def test_a_plan_is_cheap_to_find(channels: int, columns: int, taps: int, rank: int, monkeypatch: pytest.MonkeyPatch):
    """Every ring is as deep as fits, and few configurations beside the candidates are looked at."""
    ones = (1,) * rank
    padding = ((taps // 2, taps // 2),) * rank
    case = Case(16, (28,) * rank, channels, columns, (taps,) * rank, ones, padding, ones)
    x, w = case.avals("fprop")
    problem = fprop.plan(x, w, case.geometry(), epilogue=None, extras=(), out_dtype=BF16).problem
    looked_at, check = [], conv_plan.check
    monkeypatch.setattr(conv_plan, "check", lambda *given: looked_at.append(given) or check(*given))
    configs = list(tuning.candidates(problem))
    assert len(looked_at) < 800
    monkeypatch.setattr(conv_plan, "check", check)
    deepest = [dataclasses.replace(config, stages=config.stages + 1) for config in configs]
    full = {4, 6, 8}
    fits = [c.stages in full or check(problem, d) is not None for c, d in zip(configs, deepest, strict=True)]
    assert configs
    assert all(fits)
