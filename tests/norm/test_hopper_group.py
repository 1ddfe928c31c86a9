"""The Hopper kernels of group and instance normalisation on the CPU: their PTX run by a small machine, and lowered."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from jaxdnn._src import hopper
from jaxdnn._src.norm import bounds
from tests.hopper.image_machine import Images
from tests.hopper.row_machine import on_arrays
from tests.norm.calls import (
    DTYPES,
    arrays_of,
    check_activation,
    check_backward,
    check_forward,
    each_dtype,
    each_extreme,
    extreme_of,
    norm_of,
    wide_range,
)
from tests.norm.cases import agree, in_view

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._src.norm.hopper import group_plan, group_ptx
from jaxdnn._src.norm.hopper.group_plan import ImagePlan

pytestmark = pytest.mark.usefixtures("h200")


# Images (pixels, channels) and channels of a group. A vector has 4 or 8 channels: it is a part of a group, several
# groups, or neither; there are several parts, threads without a row, columns that are no power of two, or one pixel.
SIZES: dict[str, tuple[int, int, int]] = {
    "vectors": (50, 64, 8),
    "group of vectors": (21, 128, 32),
    "one group": (30, 64, 64),
    "groups of two": (37, 64, 2),
    "channels": (49, 48, 1),
    "across vectors": (50, 48, 3),
    "odd across vectors": (31, 96, 12),
    "parts of tens": (13, 320, 10),
    "thirty": (11, 240, 30),
    "parts": (19, 320, 40),
    "wide": (3, 2080, 1040),
    "a pixel": (1, 32, 16),
}
each_size = pytest.mark.parametrize("size", SIZES)
# What is replaced in a plan: several blocks, ragged rounds, little kept, threads that are no power of two.
PLANS: dict[str, dict[str, Any]] = {
    "two blocks": {"cluster": 2},
    "four blocks": {"cluster": 4, "threads": 256},
    "eight blocks": {"cluster": 8},
    "one round kept": {"cluster": 2, "kept": 1, "unroll": 3},
    "some kept": {"cluster": 2, "kept": 5},
    "all but the ragged round kept": {"cluster": 2, "kept": 9, "unroll": 4},
    "384 threads": {"threads": 384},
    "a sample": {"cluster": 2, "sampled": 2},
    "a sample of what is kept": {"cluster": 2, "kept": 5, "sampled": 1, "unroll": 4},
}


def run(
    code: str, plan: ImagePlan, clusters: int, arrays: list[np.ndarray], outs: list[tuple[Any, Any]]
) -> list[np.ndarray]:
    images = [v for v in arrays if v.ndim == 3]  # x, or backward dy and x
    floats = plan.floats(len(images), clusters < len(images[0]) * plan.parts)
    return on_arrays(Images, code, arrays, outs, plan.threads, clusters, plan.cluster, floats=floats)


def plan_of(x: np.ndarray, group: int, names: tuple[str, str], arrays: int, **changed: Any) -> ImagePlan:
    _, pixels, channels = x.shape
    plan = group_plan.plan(pixels, channels, group, names[0], names[1], arrays)
    assert plan is not None
    plan = dataclasses.replace(plan, **changed)
    assert 4 * plan.floats(arrays) <= group_plan.WHOLE
    return plan


def forward(
    x: np.ndarray,
    s: Any,
    b: Any,
    group: int,
    names: tuple[str, str],
    eps: float,
    clusters: int = 0,
    activation: str | None = None,
    **changed: Any,
) -> list[np.ndarray]:
    """y, mean, rstd and variance by the kernel."""
    plan = plan_of(x, group, names, 1, **changed)
    turns = {"images": len(x), "clusters": clusters} if clusters else {}
    has = {"scale": s is not None, "bias": b is not None, "activation": activation}
    code = group_ptx.forward(plan, eps=eps, **has, **turns)
    statistic = ((len(x), x.shape[2] // group), np.float32)
    given = [x, *(v for v in (s, b) if v is not None)]
    return run(code, plan, clusters or len(x) * plan.parts, given, [(x.shape, DTYPES[names[1]]), *[statistic] * 3])


def backward(
    dy: np.ndarray,
    x: np.ndarray,
    mean: Any,
    rstd: Any,
    s: Any,
    group: int,
    names: tuple[str, str],
    clusters: int = 0,
    b: Any = None,
    activation: str | None = None,
    **changed: Any,
) -> list[np.ndarray]:
    """dx, dscale and dbias by the kernel, the blocks' sums added up here."""
    plan = plan_of(x, group, names, 2, **changed)
    turns = {"images": len(x), "clusters": clusters} if clusters else {}
    has = {"scale": s is not None, "bias": b is not None, "activation": activation}
    code = group_ptx.backward(plan, **has, **turns)
    given = [dy, x, mean, rstd, *(v for v in (s, b) if v is not None)]
    outs = [(x.shape, DTYPES[names[1]]), ((len(x) * plan.cluster, 2, x.shape[2]), np.float32)]
    dx, sums = run(code, plan, clusters or len(x) * plan.parts, given, outs)
    return [dx, *sums.sum(0, dtype=np.float32)]


def check(size: tuple[int, int, int], names: tuple[str, str], mean: float = 0.5, **changed: Any) -> None:
    """Both kernels within the computed bounds, forward and, from the statistics that it saved, backward."""
    n, group = norm_of(*size), size[2]
    x, s, b, dy = arrays_of(n, names[0], mean)
    out = DTYPES[names[1]]
    y, *saved = forward(x, s, b, group, names, n.eps, **changed)
    check_forward(n, x, s, b, out, y, saved)
    check_backward(n, x, s, b, dy, out, backward(dy, x, saved[0], saved[1], s, group, names, **changed))


@pytest.mark.parametrize("given", ["", "scale", "bias", "scale and bias"])
@pytest.mark.parametrize("activation", ["relu", "swish"])
@pytest.mark.parametrize("plan", ["two blocks", "one round kept", "a sample of what is kept"])
def test_an_activation(plan: str, activation: str, given: str):
    size = (50, 48, 3)
    for dtype in ("bf16", "f16"):
        n, group, names = norm_of(*size), size[2], (dtype, dtype)
        x, s, b, dy = arrays_of(n, dtype, 0.5)
        s, b = (v if name in given else None for name, v in (("scale", s), ("bias", b)))
        y, *saved = forward(x, s, b, group, names, n.eps, activation=activation, **PLANS[plan])
        own = {"b": b, "activation": activation, **PLANS[plan]}
        grads = backward(dy, x, saved[0], saved[1], s, group, names, **own)
        check_activation(n, activation, x, s, b, dy, saved, y, grads)


@each_dtype
@each_size
def test_images(size: str, dtype: str):
    check(SIZES[size], (dtype, dtype))


@each_extreme
@wide_range
@pytest.mark.parametrize("size", ["group of vectors", "channels", "across vectors"])
def test_gradients_whose_products_with_x_leave_the_range(size: str, extreme: str, dtype: str):
    group, names = SIZES[size][2], (dtype, dtype)
    n, (x, s, b, dy) = extreme_of(norm_of(*SIZES[size]), dtype, extreme)
    y, *saved = forward(x, s, b, group, names, n.eps)
    check_forward(n, x, s, b, DTYPES[dtype], y, saved)
    check_backward(n, x, s, b, dy, DTYPES[dtype], backward(dy, x, saved[0], saved[1], s, group, names))


@each_dtype
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("size", [(300, 64, 8), (161, 96, 12), (301, 64, 1)])
def test_however_an_image_is_partitioned(size: tuple[int, int, int], plan: str, dtype: str):
    check(size, (dtype, dtype), **PLANS[plan])


@pytest.mark.parametrize("out_dtype", DTYPES)
@each_dtype
def test_result_of_another_dtype(dtype: str, out_dtype: str):
    check((37, 64, 4), (dtype, out_dtype))


@pytest.mark.parametrize(("dtype", "mean"), [("f32", 1e4), ("bf16", 100.0), ("f16", 100.0)])
@pytest.mark.parametrize("size", ["vectors", "one group", "channels", "across vectors"])
def test_mean_far_from_zero(size: str, dtype: str, mean: float):
    check(SIZES[size], (dtype, dtype), mean)
    check(SIZES[size], (dtype, dtype), mean, cluster=4)


@each_dtype
@pytest.mark.parametrize("group", [1, 8])
def test_a_sample_unlike_the_rest(group: int, dtype: str):
    """The quarter from whose mean is measured lies ten deviations off; the bounds are those of a mean taken first."""
    n, names = norm_of(400, 64, group), (dtype, dtype)
    x, s, b, dy = arrays_of(n, dtype, 0.5)
    plan = plan_of(x, group, names, 1)
    assert 1 < plan.sampled < plan.rounds
    x[:, : plan.sample] += x.dtype.type(10)
    y, *saved = forward(x, s, b, group, names, n.eps)
    check_forward(n, x, s, b, DTYPES[dtype], y, saved)
    check_backward(n, x, s, b, dy, DTYPES[dtype], backward(dy, x, saved[0], saved[1], s, group, names))


@each_dtype
def test_what_is_constant_is_its_bias(dtype: str):
    x = np.full((2, 245, 64), 3.14159, DTYPES[dtype])
    _, s, b, _ = arrays_of(norm_of(245, 64, 8), dtype, 0.5)
    y, mean, rstd, variance = forward(x, s, b, 8, (dtype, dtype), 1e-5)
    np.testing.assert_array_equal(y.astype(np.float32), np.broadcast_to(b.astype(y.dtype), y.shape).astype(np.float32))
    np.testing.assert_array_equal(mean, np.full_like(mean, x[0, 0, 0]))
    np.testing.assert_array_equal(variance, np.zeros_like(variance))
    np.testing.assert_allclose(rstd, 1e-5**-0.5, rtol=4 * 2**-24)


@pytest.mark.parametrize("group", [1, 8])
def test_without_parameters(group: int):
    n = norm_of(49, 64, group)
    x, _, _, dy = arrays_of(n, "f32", 0.5)
    y, *saved = forward(x, None, None, group, ("f32", "f32"), n.eps)
    p = n.problem(x, None, None)
    golden, error = (v.reshape(x.shape) for v in bounds.forward(p))
    agree(y, golden, error, np.float32, "y")
    grads = backward(dy, x, saved[0], saved[1], None, group, ("f32", "f32"))
    for found, (golden, error) in zip(grads, bounds.backward(p, in_view(n, dy, p.x.shape)), strict=True):
        agree(found, golden.reshape(found.shape), error.reshape(found.shape), np.float32, "a gradient")


@each_dtype
@pytest.mark.parametrize("size", ["vectors", "channels", "across vectors"])
def test_bits_depend_on_the_image_alone(size: str, dtype: str):
    """The promise of batch_invariant: of y, of the statistics, and of dx, for however many images."""
    pixels, channels, group = SIZES[size]
    n, names = norm_of(pixels, channels, group, 3), (dtype, dtype)
    x, s, b, dy = arrays_of(n, dtype, 0.5)
    assert plan_of(x, group, names, 1) == plan_of(x[1:2], group, names, 1)
    whole, alone = (forward(v, s, b, group, names, n.eps) for v in (x, x[1:2]))
    for one, images in zip(alone, whole, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), images[1:2].view(np.uint8))
    dx = backward(dy, x, whole[1], whole[2], s, group, names)[0]
    one = backward(dy[1:2], x[1:2], alone[1], alone[2], s, group, names)[0]
    np.testing.assert_array_equal(one.view(np.uint8), dx[1:2].view(np.uint8))


IN_TURN: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "one block": ((50, 64, 8), {}),
    "tens in two blocks": ((300, 320, 10), {"cluster": 2}),
    "a ragged round in four blocks": ((161, 96, 12), {"cluster": 4, "unroll": 3}),
    "eight blocks": ((37, 48, 3), {"cluster": 8}),
    "rounds in a loop": ((641, 64, 1), {"cluster": 2}),
    "not all kept": ((300, 64, 8), {"cluster": 2, "kept": 5}),
    "384 threads": ((161, 80, 10), {"cluster": 2, "threads": 384}),
}


@each_dtype
@pytest.mark.parametrize("case", IN_TURN)
@pytest.mark.parametrize("clusters", [1, 2])
def test_images_in_turn_have_the_same_bits(clusters: int, case: str, dtype: str):
    """One cluster has all parts of three images, or two have each second."""
    (pixels, channels, group), changed = IN_TURN[case]
    n, names = norm_of(pixels, channels, group, 3), (dtype, dtype)
    x, s, b, dy = arrays_of(n, dtype, 0.5)
    alone = forward(x, s, b, group, names, n.eps, **changed)
    in_turn = forward(x, s, b, group, names, n.eps, clusters, **changed)
    alone += backward(dy, x, alone[1], alone[2], s, group, names, **changed)
    in_turn += backward(dy, x, in_turn[1], in_turn[2], s, group, names, clusters, **changed)
    for one, other in zip(alone, in_turn, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@each_dtype
@pytest.mark.parametrize("group", [3, 8])
def test_what_is_not_finite_stays_in_its_group(group: int, dtype: str):
    n, names = norm_of(70, 48, group, 3), (dtype, dtype)
    x, s, b, dy = arrays_of(n, dtype, 0.5)
    clean = forward(x, s, b, group, names, n.eps)[0].astype(np.float32)
    x[1, 3, 0], x[2, 69, 47] = np.nan, np.inf
    y, mean, rstd, variance = forward(x, s, b, group, names, n.eps)
    hit = np.zeros(x.shape, bool)
    hit[1, :, :group] = hit[2, :, -group:] = True
    assert np.isnan(y.astype(np.float32)[hit]).all()
    np.testing.assert_array_equal(y.astype(np.float32)[~hit], clean[~hit])
    of_group = hit[:, 0, ::group]
    for found in (mean, rstd, variance):
        np.testing.assert_array_equal(np.isfinite(found), ~of_group)
    dx, dscale, dbias = backward(dy, x, mean, rstd, s, group, names)
    np.testing.assert_array_equal(np.isnan(dx.astype(np.float32)), hit)
    np.testing.assert_array_equal(np.isnan(dscale), hit.any((0, 1)))
    assert np.isfinite(dbias).all()


@pytest.mark.parametrize("activation", ["relu", "swish"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_an_infinite_bias_has_the_limits_of_an_activation(dtype: str, activation: str):
    """There the slope is 1 or 0, as it is, rounded, a hundred from 0."""
    n, names = norm_of(50, 48, 3, 2), (dtype, dtype)
    x, s, _, dy = arrays_of(n, dtype, 0.5)
    far = np.resize(np.array([np.inf, -np.inf], np.float32), 48)
    y, *saved = forward(x, s, far, 3, names, n.eps, activation=activation)
    np.testing.assert_array_equal(y.astype(np.float32), np.broadcast_to(np.maximum(far, 0), x.shape))
    of = lambda b: backward(dy, x, saved[0], saved[1], s, 3, names, b=b, activation=activation)
    for found, wanted in zip(of(far), of(np.clip(far, -100, 100)), strict=True):
        np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


def test_a_copy_that_is_not_waited_for_shows():
    """A planted fault: the last wait is missing, or comes when all is over."""
    n = norm_of(50, 64, 8)
    x, _, _, _ = arrays_of(n, "bf16", 0.5)
    plan = plan_of(x, 8, ("bf16", "bf16"), 1)
    code = group_ptx.forward(plan, eps=1e-5, scale=False, bias=False)
    outs = [(x.shape, x.dtype), *[((2, 8), np.float32)] * 3]
    wait = "cp.async.wait_group 0;\n"
    assert code.count(wait) == 1
    early = code.replace(wait, "")
    with pytest.raises(AssertionError, match="copies that nothing waits for"):
        run(early, plan, 2, [x], outs)
    y = run(early.removesuffix("}") + wait + "}", plan, 2, [x], outs)[0]
    assert np.isnan(y.astype(np.float32)).all()


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_barrier_shows(which: int):
    """A planted fault: threads read sums that others may still write."""
    n = norm_of(50, 64, 8)
    x, _, _, _ = arrays_of(n, "bf16", 0.5)
    plan = plan_of(x, 8, ("bf16", "bf16"), 1)
    parts = group_ptx.forward(plan, eps=1e-5, scale=False, bias=False).split(f"bar.sync 1, {plan.threads};\n")
    assert len(parts) == 5
    barrier = [f"bar.sync 1, {plan.threads};\n"] * 4
    barrier[which] = ""
    code = "".join(part + bar for part, bar in zip(parts, [*barrier, ""], strict=True))
    with pytest.raises(RuntimeError, match=r"warps \d+ and \d+ race for shared byte"):
        run(code, plan, 2, [x], [(x.shape, x.dtype), *[((2, 8), np.float32)] * 3])


def in_turn() -> tuple[list[np.ndarray], ImagePlan, str, list[tuple[Any, Any]]]:
    """The backward kernel of four blocks for three images, and what it takes and returns."""
    x, _, _, dy = arrays_of(norm_of(150, 64, 8, 3), "bf16", 0.5)
    plan = plan_of(x, 8, ("bf16", "bf16"), 2, cluster=4)
    code = group_ptx.backward(plan, scale=False, images=3, clusters=1)
    statistic = np.ones((3, 8), np.float32)
    return [dy, x, statistic, statistic], plan, code, [(x.shape, x.dtype), ((12, 2, 64), np.float32)]


def test_the_next_image_that_is_not_waited_for_shows():
    """A planted fault: a thread waits for one set of copies less, so it may read what has not come."""
    given, plan, code, outs = in_turn()
    assert np.isfinite(run(code, plan, 1, given, outs)[0].astype(np.float32)).all()
    code = code.replace("cp.async.wait_group 0;", "cp.async.wait_group 1;")
    early = code.removesuffix("}") + "cp.async.wait_group 0;\n}"
    assert np.isnan(run(early, plan, 1, given, outs)[0].astype(np.float32)).any()


def test_a_block_that_is_an_image_ahead_shows():
    """A planted fault: it leaves its sums where another still reads those of the last image."""
    given, plan, code, outs = in_turn()
    size = 4 * plan.quantities(2) * plan.cluster * plan.groups
    code, count = re.subn(rf"mad.lo.s32 (r\d+), r\d+, {size}, (r\d+);", r"mov.b32 \1, \2;", code)  # one place, not two
    assert count == 1
    with pytest.raises(RuntimeError, match=r"warps \d+ and \d+ race for shared byte"):
        run(code, plan, 1, given, outs)


def test_sums_that_are_not_waited_for_show():
    """A planted fault: a thread reads what other blocks leave before it is told that they have."""
    given, plan, code, outs = in_turn()
    code, count = re.subn(r"mbarrier.try_wait.*;\n@!p\d+ bra L\d+;\n", "", code)
    assert count == 1
    with pytest.raises(RuntimeError, match=r"warps \d+ and \d+ race for shared byte"):
        run(code, plan, 1, given, outs)
