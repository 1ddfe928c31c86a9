"""The Hopper filter gradient of wide groups and strided volumes, and of other types by turned operands.

As in test_hopper.py, the index arithmetic is checked by brute force and every kernel is lowered for CUDA;
values are compared on a GPU, with whole numbers, whose sums are exact.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdnn_reference as definition_of_all
from jaxdnn._src.conv.hopper import wgrad, wgrad_plan
from jaxdnn._src.conv.hopper import wgrad_transposed as transposed
from tests.conv.hopper_cases import BF16, F32, LAYOUTS, Case, lowered
from tests.hopper.device import on_hopper


def ones(rank: int) -> tuple[int, ...]:
    return (1,) * rank


GROUPS: dict[str, Case] = {
    "wide": Case(2, (14, 13), 256, 128, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 2),
    "32 channels": Case(2, (14, 13), 256, 128, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 4),
    "16 channels, strided": Case(2, (14, 14), 64, 128, (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 4),
    "odd channels": Case(2, (14, 14), 60, 30, (3, 2), (2, 2), ((1, 1), (1, 1)), (1, 1), 3, True),
    "1x1": Case(3, (14, 14), 256, 512, (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 8),
    "volumes, strided": Case(2, (6, 9, 10), 128, 128, (3, 3, 3), (2, 1, 2), ((1, 1),) * 3, ones(3), 2),
}

VOLUMES: dict[str, Case] = {
    "strided": Case(3, (9, 8, 11), 64, 72, (3, 2, 3), (2, 2, 2), ((1, 1), (0, 1), (2, 1)), ones(3)),
    "one axis strided": Case(2, (5, 12, 9), 32, 48, (2, 3, 1), (1, 3, 1), ((0, 1), (1, 1), (0, 0)), (2, 1, 1), 1, True),
    "stem": Case(2, (6, 9, 40), 3, 32, (3, 3, 4), (2, 2, 2), ((1, 1), (1, 1), (1, 2)), ones(3)),
}

TYPES = [("float32", "float32"), ("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float32"), ("int8", "int32")]
TURNED: dict[str, Case] = {
    "3x3": Case(5, (13, 17), 24, 40, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "strided, dilated, flipped": Case(3, (14, 15), 40, 24, (3, 2), (2, 3), ((1, 2), (0, 3)), (2, 1), 1, True),
    "runs of images": Case(72, (4, 5), 16, 32, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "1x1": Case(64, (3, 2), 32, 64, (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1)),
    "halos of odd lengths": Case(2, (10, 7), 5, 6, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "volumes": Case(2, (5, 6, 7), 12, 20, (2, 3, 1), (2, 1, 2), ((1, 0), (1, 1), (0, 0)), (1, 2, 1)),
}


# ---- lowering


@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*GROUPS, *VOLUMES])
def test_groups_and_volumes_lower(name, dtype, outer):
    case = (GROUPS | VOLUMES)[name]
    avals, geo = case.avals("wgrad", jnp.dtype(dtype)), case.geometry(outer)
    assert wgrad.supports(*avals, geo=geo) is None
    assert jax.eval_shape(lambda a, b: wgrad.conv_wgrad(a, b, geo=geo), *avals).shape == case.w(outer)
    lowered(lambda a, b: wgrad.conv_wgrad(a, b, geo=geo), *avals)
    filters = wgrad.schedule(*avals, geo=geo)
    assert sorted(filters[filters >= 0]) == list(range(math.prod(case.dy[:-1])))


@pytest.mark.parametrize(("name", "dtype"), [("stem", "bfloat16"), ("3x3", "int8")])
def test_a_copy_of_x_waits_for_dy(name, dtype):
    """XLA may run in the forward pass what needs x alone, and then keeps the copy, which is as large as x or larger."""
    case = (VOLUMES | TURNED)[name]
    options = dict[str, Any](geo=case.geometry(), out_dtype=jnp.dtype("int32" if dtype == "int8" else dtype))
    program = jax.make_jaxpr(lambda a, b: wgrad.conv_wgrad(a, b, **options))(*case.avals("wgrad", jnp.dtype(dtype)))
    x, dy = program.jaxpr.invars
    first = [eqn for eqn in program.jaxpr.eqns if x in eqn.invars]
    assert [eqn.primitive.name for eqn in first] == ["optimization_barrier"]
    assert dy in first[0].invars


@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
@pytest.mark.parametrize("name", TURNED)
def test_other_types_lower(name, dtype, out_dtype, outer):
    case = TURNED[name]
    avals, options = case.avals("wgrad", jnp.dtype(dtype)), dict[str, Any](geo=case.geometry(outer))
    options |= dict(out_dtype=jnp.dtype(out_dtype))
    assert wgrad.supports(*avals, **options, precision="tf32" if dtype == "float32" else None) is None
    out = jax.eval_shape(lambda a, b: wgrad.conv_wgrad(a, b, **options), *avals)
    assert (out.shape, out.dtype.name) == (case.w(outer), out_dtype)
    lowered(lambda a, b: wgrad.conv_wgrad(a, b, **options), *avals)
    assert wgrad.workspace(*avals, geo=case.geometry(outer)) > 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(dtype=F32), "no float32 products"),
        (dict(dtype=jnp.int8, out_dtype=F32), "writes int32"),
        (dict(dtype=jnp.float8_e5m2, out_dtype=BF16, groups=2), "groups in 16-bit types, not in float8_e5m2"),
        (dict(dtype=jnp.float64), "not float64"),
        (dict(out_dtype=jnp.float8_e5m2), "writes bfloat16"),
        (dict(padding=((-1, 1), (0, 0))), "no negative padding"),
    ],
)
def test_reasons(change, text):
    case = TURNED["3x3"]._replace(**{k: v for k, v in change.items() if k in ("padding", "groups")})
    avals = case.avals("wgrad", change.get("dtype", BF16))
    assert text in (wgrad.supports(*avals, geo=case.geometry(), out_dtype=change.get("out_dtype")) or "")


@pytest.mark.parametrize(
    ("case", "change", "text"),
    [
        (GROUPS["wide"], dict(images=48), "a multiple of 64 pixels"),
        (GROUPS["wide"], dict(across=2), "whole tiles of filters"),
        (GROUPS["wide"], dict(direct=True), "is of one group"),
        (VOLUMES["strided"], dict(images=2, block=(1, 4, 8)), "boxes of one image"),
    ],
)
def test_cuts_that_cannot_be(case: Case, change: dict[str, Any], text: str):
    problem = wgrad.problem_of(*case.avals("wgrad"), case.geometry())
    config = wgrad.Config(64, (1, 1), 1, columns=64, across=1, stages=2)
    assert text in (wgrad_plan.check(problem, dataclasses.replace(config, **change)) or "")


# ---- index arithmetic


@pytest.mark.parametrize(
    ("groups", "channels", "filters", "count"),
    [(32, 256, 256, 8), (4, 256, 128, 2), (2, 256, 128, 1), (3, 60, 30, 3), (6, 96, 96, 6), (6, 192, 384, 2)],
)
def test_groups_taken_together(groups, channels, filters, count):
    assert wgrad.together(groups, channels, filters) == count


@pytest.mark.parametrize("name", GROUPS)
def test_own_channels_of_groups_taken_together(name):
    """From the gradient of the filter between all channels of the groups taken together to the groups' own."""
    case = GROUPS[name]
    count = wgrad.together(case.groups, case.c, case.k)
    tiled, inner, taps = case.groups // count, case.c // case.groups, 2
    parts = np.zeros((1, case.k, taps, count * inner), np.float32)
    want = np.random.default_rng(0).standard_normal((case.k, taps, inner)).astype(np.float32)
    for k in range(case.k):
        own = k // (case.k // case.groups) % count
        parts[0, k] = np.nan
        parts[0, k, :, own * inner : (own + 1) * inner] = want[k]
    got = wgrad._own_channels(jnp.asarray(parts), case.groups, tiled, inner)
    np.testing.assert_array_equal(np.asarray(got)[0], want)


@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("name", TURNED)
def test_a_filter_gradient_is_the_forward_convolution_of_turned_operands(name, outer, monkeypatch):
    """The copies, the geometry and the schedule, with XLA's convolution in the kernel's place."""
    case, seen = TURNED[name], []

    def forward(x, w, *, geo, out_dtype, sms):
        layout, inner = LAYOUTS[len(geo.sizes)]
        seen.append((x.shape, w.shape))
        y = lax.conv_general_dilated(
            x, jnp.moveaxis(w, 0, -1), geo.stride, geo.padding, rhs_dilation=geo.dilation,
            dimension_numbers=(layout, inner, layout), feature_group_count=geo.groups, precision="highest",
        )  # fmt: skip
        return y.astype(out_dtype)

    monkeypatch.setattr(transposed.fprop, "conv_fprop", forward)
    x, dy = case.whole_numbers("wgrad", seed=1)
    geo = case.geometry(outer)
    got = transposed.conv_wgrad(jnp.asarray(x), jnp.asarray(dy), geo=geo)
    np.testing.assert_array_equal(np.asarray(got), case.definition("wgrad", x, dy, outer))
    avals = case.avals("wgrad", F32)
    todo = transposed.plan(*avals, geo)
    assert seen == [tuple(a.shape for a in transposed._avals(*avals, todo))]
    order = transposed.schedule(*avals, geo=geo)
    assert len(order) == todo.runs
    assert (todo.runs > 1) == (name in ("runs of images", "1x1"))
    assert sorted(order[order >= 0]) == list(range(math.prod(case.dy[:-1])))


def test_the_groups_own_channels_are_memory_too():
    """Seen on an H200: partial sums, and the result once more before its axes change places."""
    case = Case(2, (2, 7, 3), 64, 32, (5, 1, 3), ones(3), ((5, 0), (0, 1), (0, 0)), ones(3), 2)
    problem = wgrad.problem_of(*case.avals("wgrad"), case.geometry())
    config = wgrad.choose(problem, 132)
    partial = config.splits * case.k * problem.taps * problem.channels
    needed = 4 * partial + 2 * math.prod(case.w())
    assert wgrad.workspace(*case.avals("wgrad"), geo=case.geometry()) >= needed


# ---- on the hardware


@on_hopper
@pytest.mark.parametrize("outer", [False, True], ids=["HWIO", "OHWI"])
@pytest.mark.parametrize("name", [*GROUPS, *VOLUMES])
def test_groups_and_volumes_are_exact(name, outer):
    case = (GROUPS | VOLUMES)[name]
    a, b = case.whole_numbers("wgrad", seed=1)
    run = jax.jit(lambda a, b: wgrad.conv_wgrad(a, b, geo=case.geometry(outer), out_dtype=F32))
    got = run(jnp.asarray(a, BF16), jnp.asarray(b, BF16))
    np.testing.assert_array_equal(np.asarray(got), case.definition("wgrad", a, b, outer))


@on_hopper
@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
@pytest.mark.parametrize("name", TURNED)
def test_other_types_are_exact(name, dtype, out_dtype):
    case = TURNED[name]
    a, b = case.whole_numbers("wgrad", seed=1)
    run = jax.jit(lambda a, b: wgrad.conv_wgrad(a, b, geo=case.geometry(), out_dtype=jnp.dtype(out_dtype)))
    got = run(jnp.asarray(a, dtype), jnp.asarray(b, dtype))
    want = jnp.asarray(case.definition("wgrad", a, b)).astype(out_dtype)
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(want, np.float64))


PREDICTED: dict[str, tuple[Case, str]] = {
    **{name: (case, "float16") for name, case in (GROUPS | VOLUMES).items()},
    **{f"{name}, TF32": (case, "float32") for name, case in TURNED.items()},
    **{f"{name}, float8": (case, "float8_e4m3fn") for name, case in TURNED.items()},
}


def predicted(name: str, a: Any, b: Any, at: np.ndarray) -> np.ndarray:
    """What the definition makes of the stated schedule with Hopper's arithmetic, at some places of the result."""
    case, dtype = PREDICTED[name]
    order = wgrad.schedule(*case.avals("wgrad", jnp.dtype(dtype)), geo=case.geometry())
    found = definition_of_all.conv_wgrad(
        np.asarray(a), np.asarray(b), case.w(False), stride=case.stride, padding=case.padding, dilation=case.dilation,
        groups=case.groups, mode="convolution" if case.flip else "cross_correlation",
        layout=LAYOUTS[len(case.sizes)][0], precision="tf32" if dtype == "float32" else None,
        out_dtype=np.float32, arithmetic="tensor_core", schedule=definition_of_all.Schedule(order), at=at,
    )  # fmt: skip
    return np.asarray(found).reshape(-1)


@pytest.mark.parametrize("name", ["32 channels", "odd channels", "stem", "runs of images, TF32", "1x1, float8"])
def test_the_stated_schedule_reaches_the_definition(name):
    case, dtype = PREDICTED[name]
    x, dy = case.whole_numbers("wgrad", seed=1)
    want = case.definition("wgrad", x, dy).reshape(-1)
    at = np.sort(np.random.default_rng(0).choice(want.size, 60, replace=False))
    a, b = (np.asarray(jnp.asarray(v, dtype)) for v in (x, dy))
    np.testing.assert_array_equal(predicted(name, a, b, at), want[at])


@on_hopper
@pytest.mark.parametrize("name", PREDICTED)
def test_bits_are_predicted(name):
    case, dtype = PREDICTED[name]
    rng = np.random.default_rng(3)
    a, b = (jnp.asarray(rng.standard_normal(shape), F32).astype(dtype) for shape in (case.x, case.dy))
    run = jax.jit(lambda a, b: wgrad.conv_wgrad(a, b, geo=case.geometry(), out_dtype=F32))
    got = np.asarray(run(a, b)).reshape(-1)
    at = np.sort(rng.choice(got.size, min(300, got.size), replace=False))
    np.testing.assert_array_equal(got[at].view(np.uint32), predicted(name, a, b, at).view(np.uint32))
