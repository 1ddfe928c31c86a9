"""The Hopper kernels of group and instance normalisation for images read twice, on the CPU: run by a small machine."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src import hopper
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

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._src.norm.hopper import group as norm_group
from jaxdnn._src.norm.hopper import group_plan, group_slices_ptx
from jaxdnn._src.norm.hopper.group_plan import ImagePlan, SlicePlan

pytestmark = pytest.mark.usefixtures("h200")

# Images (pixels, channels, channels of a group), their slices whose statistics are merged and those written, and
# blocks of a cluster.
SIZES: dict[str, tuple[tuple[int, int, int], int, int, int]] = {
    "groups of vectors": ((576, 64, 16), 32, 64, 1),
    "groups across vectors": ((300, 320, 10), 4, 5, 2),
    "slices that lanes do not divide": ((320, 48, 3), 5, 8, 1),
    "channels": ((320, 64, 1), 40, 10, 4),
    "a slice": ((50, 64, 8), 1, 2, 1),
}
each_size = pytest.mark.parametrize("size", SIZES)


def plan_of(pixels: int, channels: int, group: int, names: tuple[str, str], arrays: int, cluster: int) -> ImagePlan:
    plan = group_plan.plan(pixels, channels, group, *names, arrays)
    assert plan is not None
    return dataclasses.replace(plan, cluster=cluster)


def plans_of(size: str, names: tuple[str, str], arrays: int) -> SlicePlan:
    (pixels, channels, group), merged, slices, cluster = SIZES[size]
    first = plan_of(pixels // merged, channels, group, names, arrays, cluster)
    return SlicePlan(pixels, first, plan_of(pixels // slices, channels, group, names, arrays, 1))


def run(code: str, plan: ImagePlan, slices: int, arrays: list[Any], outs: list[tuple[Any, Any]]) -> list[np.ndarray]:
    floats, clusters = plan.floats(sum(v.ndim == 3 for v in arrays)), slices * plan.parts
    return on_arrays(Images, code, arrays, outs, plan.threads, clusters, plan.cluster, floats=floats)


def forward(
    x: np.ndarray, s: Any, b: Any, plans: SlicePlan, eps: float, activation: str | None = None
) -> list[np.ndarray]:
    """y, mean, rstd and variance by the two kernels."""
    images, pixels, channels = x.shape
    first, second = plans.statistics, plans.applied
    merged, slices, groups = pixels // first.pixels, pixels // second.pixels, channels // first.group
    of_slices, of_images = (((count, groups), np.float32) for count in (images * merged, images))
    found = run(group_slices_ptx.statistics(first), first, images * merged, [x], [of_slices] * 3)
    has = {"scale": s is not None, "bias": b is not None, "activation": activation}
    code = group_slices_ptx.apply(second, images, slices, merged, eps=eps, **has)
    given = [x, *found, *(v for v in (s, b) if v is not None)]
    return run(code, second, images * slices, given, [(x.shape, DTYPES[second.out_dtype]), *[of_images] * 3])


def backward(
    dy: np.ndarray,
    x: np.ndarray,
    mean: Any,
    rstd: Any,
    s: Any,
    plans: SlicePlan,
    b: Any = None,
    activation: str | None = None,
) -> list[np.ndarray]:
    """dx, dscale and dbias by the two kernels, the blocks' sums added up here."""
    images, pixels, channels = x.shape
    first, second = plans.statistics, plans.applied
    merged, slices, groups = pixels // first.pixels, pixels // second.pixels, channels // first.group
    names, given = group_slices_ptx.sums_of_groups(first.dtype), [v for v in (s, b) if v is not None]
    has = {"scale": s is not None, "bias": b is not None, "activation": activation}
    of_slices, of_images = (((count, groups), np.float32) for count in (images * merged, images))
    outs = [((images * merged * first.cluster, 2, channels), np.float32), *[of_slices] * len(names)]
    code = group_slices_ptx.gradient_sums(first, merged, **has)
    each, *sums = run(code, first, images * merged, [dy, x, mean, rstd, *given], outs)
    code = group_slices_ptx.apply_gradients(second, images, slices, merged, **has)
    outs = [(x.shape, DTYPES[second.out_dtype]), *[of_images] * (first.dtype == "f32")]
    dx, *rest = run(code, second, images * slices, [dy, x, mean, rstd, *given, *sums], outs)
    dscale, dbias = norm_group.merged_gradients(*map(jnp.asarray, (each, *rest)))
    return [dx, np.asarray(dscale), np.asarray(dbias)]


@pytest.mark.parametrize("far", [False, True])
@each_dtype
@each_size
def test_images(size: str, dtype: str, far: bool):
    """Within the computed bounds, which are those of a mean taken first, also where it is far from 0."""
    names, n = (dtype, dtype), norm_of(*SIZES[size][0])
    x, s, b, dy = arrays_of(n, dtype, (1e4 if dtype == "f32" else 100.0) if far else 0.5)
    y, *saved = forward(x, s, b, plans_of(size, names, 1), n.eps)
    check_forward(n, x, s, b, DTYPES[dtype], y, saved)
    grads = backward(dy, x, saved[0], saved[1], s, plans_of(size, names, 2))
    check_backward(n, x, s, b, dy, DTYPES[dtype], grads)


@pytest.mark.parametrize("given", ["", "scale and bias"])
@pytest.mark.parametrize("activation", ["relu", "swish"])
@each_size
def test_an_activation(size: str, activation: str, given: str):
    names, n = ("bf16", "bf16"), norm_of(*SIZES[size][0])
    x, s, b, dy = arrays_of(n, "bf16", 0.5)
    s, b = (s, b) if given else (None, None)
    y, *saved = forward(x, s, b, plans_of(size, names, 1), n.eps, activation)
    grads = backward(dy, x, saved[0], saved[1], s, plans_of(size, names, 2), b, activation)
    check_activation(n, activation, x, s, b, dy, saved, y, grads)


@pytest.mark.parametrize("out_dtype", DTYPES)
@each_dtype
def test_result_of_another_dtype(dtype: str, out_dtype: str):
    size, names = "groups across vectors", (dtype, out_dtype)
    n = norm_of(*SIZES[size][0])
    x, s, b, dy = arrays_of(n, dtype, 0.5)
    y, *saved = forward(x, s, b, plans_of(size, names, 1), n.eps)
    check_forward(n, x, s, b, DTYPES[out_dtype], y, saved)
    grads = backward(dy, x, saved[0], saved[1], s, plans_of(size, names, 2))
    check_backward(n, x, s, b, dy, DTYPES[out_dtype], grads)


@each_extreme
@wide_range
def test_gradients_whose_products_with_x_leave_the_range(extreme: str, dtype: str):
    size, names = "groups across vectors", (dtype, dtype)
    n, (x, s, b, dy) = extreme_of(norm_of(*SIZES[size][0]), dtype, extreme)
    y, *saved = forward(x, s, b, plans_of(size, names, 1), n.eps)
    check_forward(n, x, s, b, DTYPES[dtype], y, saved)
    grads = backward(dy, x, saved[0], saved[1], s, plans_of(size, names, 2))
    check_backward(n, x, s, b, dy, DTYPES[dtype], grads)


def test_without_parameters():
    """Scale 1 and bias 0."""
    size, names = "groups of vectors", ("f32", "f32")
    n = norm_of(*SIZES[size][0])
    x, s, b, dy = arrays_of(n, "f32", 0.5)
    s, b = np.ones_like(s), np.zeros_like(b)
    y, *saved = forward(x, None, None, plans_of(size, names, 1), n.eps)
    check_forward(n, x, s, b, np.float32, y, saved)
    grads = backward(dy, x, saved[0], saved[1], None, plans_of(size, names, 2))
    check_backward(n, x, s, b, dy, np.float32, grads)


@each_dtype
def test_slices_of_unlike_means(dtype: str):
    """One image's halves lie ten deviations apart, so the slices' means make up most of its variance."""
    size, names = "groups of vectors", (dtype, dtype)
    n = norm_of(*SIZES[size][0])
    x, s, b, dy = arrays_of(n, dtype, 0.5)
    x[:, : x.shape[1] // 2] += x.dtype.type(10)
    y, *saved = forward(x, s, b, plans_of(size, names, 1), n.eps)
    check_forward(n, x, s, b, DTYPES[dtype], y, saved)
    grads = backward(dy, x, saved[0], saved[1], s, plans_of(size, names, 2))
    check_backward(n, x, s, b, dy, DTYPES[dtype], grads)


@each_dtype
@pytest.mark.parametrize("size", ["groups across vectors", "channels"])
def test_bits_depend_on_the_image_alone(size: str, dtype: str):
    """The promise of batch_invariant: of y, of the statistics, and of dx, for however many images."""
    n, names = norm_of(*SIZES[size][0], 3), (dtype, dtype)
    x, s, b, dy = arrays_of(n, dtype, 0.5)
    plans = [plans_of(size, names, arrays) for arrays in (1, 2)]
    whole, alone = (forward(v, s, b, plans[0], n.eps) for v in (x, x[1:2]))
    for one, images in zip(alone, whole, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), images[1:2].view(np.uint8))
    dx = backward(dy, x, whole[1], whole[2], s, plans[1])[0]
    one = backward(dy[1:2], x[1:2], alone[1], alone[2], s, plans[1])[0]
    np.testing.assert_array_equal(one.view(np.uint8), dx[1:2].view(np.uint8))


@each_dtype
def test_what_is_not_finite_stays_in_its_group(dtype: str):
    size, names = "slices that lanes do not divide", (dtype, dtype)
    n = norm_of(*SIZES[size][0], 3)
    x, s, b, dy = arrays_of(n, dtype, 0.5)
    group = SIZES[size][0][2]
    plans = [plans_of(size, names, arrays) for arrays in (1, 2)]
    clean = forward(x, s, b, plans[0], n.eps)[0].astype(np.float32)
    x[1, 3, 0], x[2, -1, -1] = np.nan, np.inf
    y, mean, rstd, variance = forward(x, s, b, plans[0], n.eps)
    hit = np.zeros(x.shape, bool)
    hit[1, :, :group] = hit[2, :, -group:] = True
    assert np.isnan(y.astype(np.float32)[hit]).all()
    np.testing.assert_array_equal(y.astype(np.float32)[~hit], clean[~hit])
    for found in (mean, rstd, variance):
        np.testing.assert_array_equal(np.isfinite(found), ~hit[:, 0, ::group])
    dx, dscale, dbias = backward(dy, x, mean, rstd, s, plans[1])
    np.testing.assert_array_equal(np.isnan(dx.astype(np.float32)), hit)
    np.testing.assert_array_equal(np.isnan(dscale), hit.any((0, 1)))
    assert np.isfinite(dbias).all()


def test_a_missing_barrier_shows():
    """A planted fault: threads read what was merged while others may still write it."""
    size, names = "groups of vectors", ("bf16", "bf16")
    n = norm_of(*SIZES[size][0])
    x, _, _, _ = arrays_of(n, "bf16", 0.5)
    plans = plans_of(size, names, 1)
    found = run(group_slices_ptx.statistics(plans.statistics), plans.statistics, 64, [x], [((64, 4), np.float32)] * 3)
    code = group_slices_ptx.apply(plans.applied, 2, 64, 32, eps=n.eps, scale=False, bias=False)
    barrier = f"bar.sync 1, {plans.applied.threads};\n"
    assert code.count(barrier) == 1
    outs = [(x.shape, x.dtype), *[((2, 4), np.float32)] * 3]
    with pytest.raises(RuntimeError, match=r"warps \d+ and \d+ race for shared byte"):
        run(code.replace(barrier, ""), plans.applied, 128, [x, *found], outs)


# ---- plans -----------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("arrays", [1, 2])
@pytest.mark.parametrize("size", [(256 * 256, 128, 4), (512 * 512, 128, 4), (384 * 640, 256, 8), (96 * 96, 512, 16)])
def test_slices_stay_and_divide_the_image(size: tuple[int, int, int], arrays: int, dtype: str):
    plans = group_plan.in_slices(*size, dtype, dtype, arrays)
    assert plans is not None
    for plan in (plans.statistics, plans.applied):
        assert size[0] % plan.pixels == 0
        assert plan.kept >= plan.rounds
        assert 4 * plan.floats(arrays) <= group_plan.HALF
    assert plans.applied.cluster == 1


def test_slices_are_for_what_does_not_stay_or_is_narrow():
    best = lambda pixels, arrays: type(group_plan.best(pixels, 128, 4, "bf16", "bf16", arrays))
    assert [best(64 * 64, arrays) for arrays in (1, 2)] == [ImagePlan, ImagePlan]
    assert [best(128 * 128, arrays) for arrays in (1, 2)] == [ImagePlan, SlicePlan]
    assert [best(256 * 256, arrays) for arrays in (1, 2)] == [SlicePlan, SlicePlan]
    assert [best(257 * 257, arrays) for arrays in (1, 2)] == [ImagePlan, ImagePlan]  # no divisors


def test_an_image_that_nothing_divides_has_no_slices():
    assert group_plan.in_slices(65537, 128, 4, "bf16", "bf16", 1) is None


# ---- lowered for CUDA ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", DTYPES)
@each_dtype
def test_lowers_for_cuda(dtype: str, out_dtype: str):
    pixels, channels, groups = 256 * 256, 128, 32
    x = jax.ShapeDtypeStruct((2, pixels, channels), DTYPES[dtype])
    row = jax.ShapeDtypeStruct((channels,), jnp.float32)
    plans = [group_plan.in_slices(pixels, channels, channels // groups, dtype, out_dtype, arrays) for arrays in (1, 2)]

    def both(x: Any, s: Any, b: Any) -> Any:
        options: dict[str, Any] = {"groups": groups, "out_dtype": np.dtype(DTYPES[out_dtype])}
        y, mean, rstd, _ = norm_group.forward(x, s, b, eps=1e-5, **options, config=plans[0])
        plain = norm_group.forward(x, None, None, eps=0.0, **options, config=plans[0])
        gradients = norm_group.backward(x, x, mean, rstd, s, **options, config=plans[1])
        return y, plain, gradients, norm_group.backward(x, x, mean, rstd, None, **options, config=plans[1])

    lowered = jax.jit(both).trace(x, row, row).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 8
