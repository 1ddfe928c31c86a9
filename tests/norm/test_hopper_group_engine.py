"""Group normalisation on Hopper: its plans, what lowers for CUDA, and which calls the engine serves."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.core import engines, selection
from jaxdnn._src.norm.spec import NormSpec
from tests.norm.calls import DTYPES, each_dtype

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

from jaxdnn._src.hopper import CLUSTERS_AT_ONCE
from jaxdnn._src.norm.hopper import group as norm_group
from jaxdnn._src.norm.hopper import group_plan

pytestmark = pytest.mark.usefixtures("h200")


# ---- plans -----------------------------------------------------------------------------------------------------------


def channels_and_groups(dtype: str) -> Iterator[tuple[int, int]]:
    """Powers of two, and numbers that few parts divide."""
    yield from ((8, 8), (64, 2), (256, 8), (320, 10), (2048, 64), (4096, 4096), (1000, 125))
    vector = 16 // group_plan.SIZES[dtype]
    for prime in (3, 31, 127, 401, 1021, 1031):
        yield from ((vector * prime, group) for group in (1, vector, prime, vector * prime))


@each_dtype
@pytest.mark.parametrize("arrays", [1, 2])
def test_plans_fit_the_device(arrays: int, dtype: str):
    vector = 16 // group_plan.SIZES[dtype]
    for pixels in (1, 4, 49, 196, 784, 3136, 12544, 50176, 1 << 20):
        for channels, group in channels_and_groups(dtype):
            plan = group_plan.plan(pixels, channels, group, dtype, dtype, arrays)
            if math.lcm(group, vector) // vector > 1024:  # no part is smaller, and no block has as many threads
                assert plan is None
                continue
            assert plan is not None
            assert plan.channels % plan.part == plan.part % plan.group == plan.part % plan.elements == 0
            assert plan.columns <= plan.threads <= group_plan.THREADS == 1024
            assert plan.threads % 128 == 0
            assert plan.cluster in group_plan.CLUSTERS
            assert 4 * plan.floats(arrays) <= group_plan.WHOLE < 227 << 10
            assert min(plan.kept, plan.rounds) >= 1


def test_parts_in_turn_are_more_than_run_at_once():
    """Where a block has a multiprocessor alone, unless there are few parts or not all of them stays."""
    plan = group_plan.plan(4096, 320, 10, "bf16", "bf16", 2)
    assert plan is not None
    assert 4 * plan.floats(2) > group_plan.HALF
    at_once = CLUSTERS_AT_ONCE[plan.cluster]
    assert (plan.parts, plan.turns(at_once // plan.parts, 2)) == (4, 0)
    assert plan.turns(at_once // plan.parts + 1, 2) == at_once
    assert plan.turns(64, 2) == 2 * at_once
    assert dataclasses.replace(plan, kept=plan.rounds - 1).turns(64, 2) == 0
    half = group_plan.plan(4096, 320, 10, "bf16", "bf16", 1)
    assert half is not None
    assert (half.turns(64, 1), half.turns(7, 1)) == (2 * at_once, 0)
    even = group_plan.plan(3136, 256, 8, "bf16", "bf16", 1)
    assert even is not None
    assert even.turns(128, 1) == 0


def test_parts_are_whole_sectors_where_these_fit():
    """80 bytes of a pixel, the least that 8 groups of 10 fill, straddle the caches' sectors of 32."""
    for channels, group in ((320, 10), (640, 20), (1280, 40)):
        for arrays in (1, 2):
            plan = group_plan.plan(4096 * 320 // channels // (channels // 320), channels, group, "bf16", "bf16", arrays)
            assert plan is not None
            assert plan.part * 2 % group_plan.SECTOR == 0


def test_channels_that_no_part_divides_are_processed_in_vectors():
    """As many clusters as there are vectors in a pixel."""
    plan = group_plan.plan(4096, 3208, 1, "bf16", "bf16", 1)
    assert plan is not None
    assert (plan.part, plan.kept >= plan.rounds) == (8, True)


def test_channels_that_do_not_fit_are_refused():
    x = jnp.zeros((2, 9, 12), jnp.bfloat16)
    message = "`x` must have channels that fill vectors and fit into a block, got 12 of bfloat16"
    with pytest.raises(ValueError, match=message):
        norm_group.forward(x, None, None, groups=4, eps=1e-5, out_dtype=x.dtype)
    statistic = jnp.zeros((2, 4))
    with pytest.raises(ValueError, match=message):
        norm_group.backward(x, x, statistic, statistic, None, groups=4, out_dtype=x.dtype)


# ---- lowered for CUDA ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", DTYPES)
@each_dtype
@pytest.mark.parametrize("size", [(49, 64, 1), (3136, 256, 8), (50176, 64, 32)])
def test_lowers_for_cuda(size: tuple[int, int, int], dtype: str, out_dtype: str):
    pixels, channels, group = size
    x = jax.ShapeDtypeStruct((4, pixels, channels), DTYPES[dtype])
    row = jax.ShapeDtypeStruct((channels,), jnp.float32)

    def both(x: Any, s: Any, b: Any) -> Any:
        options: dict[str, Any] = {"groups": channels // group, "out_dtype": np.dtype(DTYPES[out_dtype])}
        y, mean, rstd, _ = norm_group.forward(x, s, b, eps=1e-5, **options)
        plain = norm_group.forward(x, None, None, eps=0.0, **options)
        gradients = norm_group.backward(x, x, mean, rstd, s, **options)
        return y, plain, gradients, norm_group.backward(x, x, mean, rstd, None, **options)

    lowered = jax.jit(both).trace(x, row, row).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 4


# ---- the engine ------------------------------------------------------------------------------------------------------


def shape_of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def candidates(function: Any, *operands: Any) -> list[Any]:
    """What the engine says, of every call that is made."""
    told = dnn.explain(function, *operands, platform="cuda")
    return [c for call in told for c in call.candidates if c.engine == "hopper"]


def grouped(**options: Any) -> Any:
    return lambda x: dnn.group_norm(x, groups=2, **options)


SERVED: dict[str, tuple[Any, tuple[Any, ...], str | None]] = {
    "groups": (grouped(), (shape_of(2, 4, 4, 16),), None),
    "one group": (lambda x: dnn.group_norm(x, groups=1), (shape_of(2, 4, 4, 16),), None),
    "three axes of pixels": (grouped(layout="NDHWC"), (shape_of(2, 3, 4, 5, 16),), None),
    "instances": (dnn.instance_norm, (shape_of(2, 4, 4, 8),), None),
    "many images": (lambda x: jax.vmap(dnn.instance_norm)(x), (shape_of(3, 2, 4, 4, 8),), None),
    "another dtype out": (lambda x: dnn.instance_norm(x, out_dtype=jnp.float32), (shape_of(2, 4, 4, 8),), None),
    "backward": (
        lambda dy, x: dnn.group_norm_dgrad(dy, x, groups=2, scale=jnp.ones(16)),
        (shape_of(2, 4, 4, 16),) * 2,
        None,
    ),
    "channels first, with a scale": (
        lambda x: dnn.instance_norm(x, scale=jnp.ones(8), layout="NCHW"),
        (shape_of(2, 8, 4, 4),),
        "its kernels take parameters that vary along the last axes alone, not of shape (1, 8, 1, 1)",
    ),
    "batch last": (
        lambda x: dnn.group_norm(x, groups=2, scale=jnp.ones(8), layout="CHWN"),
        (shape_of(8, 4, 4, 16),),
        "its kernels take parameters that vary along the channels alone, not of shape (2, 4, 1, 1, 1)",
    ),
    "odd channels": (
        grouped(),
        (shape_of(2, 4, 4, 12),),
        "its kernels take channels that fill vectors of 16 bytes, not 12 of bfloat16",
    ),
    "no images": (grouped(), (shape_of(0, 4, 4, 16),), "its kernels take arrays with elements"),
    "a group that is too large": (
        lambda x: dnn.group_norm(x, groups=1),
        (shape_of(2, 2, 2, 8200),),
        "its kernels take groups that fit into a block, not 8200 of 8200 channels of bfloat16",
    ),
    "an eps that float32 does not hold": (
        grouped(eps=1e39),
        (shape_of(2, 4, 4, 16),),
        "its kernels take an eps that float32 holds, not 1e+39",
    ),
    "an image that is too large": (
        grouped(),
        (shape_of(1, 1 << 13, 1 << 13, 16),),
        "its kernels take images of less than 2147483648 bytes, not 67108864 pixels of 16",
    ),
    "statistics beyond 32 bits": (
        lambda x: dnn.instance_norm(x),
        (shape_of(1 << 28, 1, 2, 8),),
        "fewer than 2147483648 groups and slices, which they number in 32 bits, not 2147483648",
    ),
    "not centred": (
        lambda x: dnn.rms_norm(x, axis=1),
        (shape_of(2, 4, 8),),
        "its kernels for images subtract the mean",
    ),
    "gradients of two dtypes": (
        lambda dy, x: dnn.group_norm_dgrad(dy, x, groups=2),
        (shape_of(2, 4, 4, 16, dtype=jnp.float32), shape_of(2, 4, 4, 16)),
        "its kernels take a gradient of x's dtype bfloat16, not float32",
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_engine_says_what_it_serves(name: str):
    function, operands, reason = SERVED[name]
    found = candidates(function, *operands)[-1]
    assert found.level == "batch_invariant"
    assert (found.refusal is None) if reason is None else (reason in found.refusal)


def test_call_by_name_lowers_with_its_derivatives():
    def both(x: Any, s: Any) -> Any:
        def f(x: Any, s: Any) -> Any:
            y: Any = dnn.group_norm(x, groups=4, scale=s, engine="hopper")
            return jnp.sum(y.astype(jnp.float32) ** 2)

        many: Any = jax.vmap(lambda x: dnn.instance_norm(x, scale=s, engine="hopper"))
        return jax.grad(f, (0, 1))(x, s), many(x[None])

    x, row = shape_of(3, 6, 4, 64), shape_of(64, dtype=jnp.float32)
    lowered = jax.jit(both).trace(x, row).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 3


def call_of(op: str, images: int, size: int, channels: int, groups: int, dtype: Any = jnp.bfloat16) -> engines.Call:
    """A call on square images, by a device that was measured."""
    view = shape_of(images, size, size, groups, channels // groups, dtype=dtype)
    statistic = shape_of(images, 1, 1, groups, 1, dtype=jnp.float32)
    kinds = (np.dtype(np.float32), np.dtype(dtype))
    spec = NormSpec((-4, -3, -1), (-5, -4, -3), True, 1e-5, False, False, True, *kinds)
    operands = (view,) if op == "norm" else (view, view, statistic, statistic)
    return engines.Call(op, spec, operands, "cuda", hopper.MEASURED_ON[0])


def engine_of(op: str) -> engines.Engine:
    (found,) = (engine for engine in engines.registered(op) if engine.name == "hopper")
    return found


def test_workspace_is_the_sums_of_the_blocks():
    plan = group_plan.plan(56 * 56, 256, 8, "bf16", "bf16", 2)
    assert plan is not None
    call = call_of("norm_dgrad", 4, 56, 256, 32)
    assert engine_of("norm_dgrad").supports(call) is None
    assert engine_of("norm_dgrad").workspace(call) == 4 * plan.cluster * 2 * 256 * 4
    assert engine_of("norm").workspace(call_of("norm", 4, 56, 256, 32)) == 0
    slices = group_plan.in_slices(256 * 256, 128, 4, "bf16", "bf16", 2)
    assert slices is not None
    merged = 256 * 256 // slices.statistics.pixels
    wanted = 2 * merged * 4 * (2 * 32 + slices.statistics.cluster * 2 * 128)
    assert engine_of("norm_dgrad").workspace(call_of("norm_dgrad", 2, 256, 128, 32)) == wanted
    assert engine_of("norm").workspace(call_of("norm", 2, 256, 128, 32)) == 2 * merged * 4 * 3 * 32
    wide = call_of("norm", 4, 56, 256, 32, np.float64)
    assert engine_of("norm").supports(wide) is not None
    assert engine_of("norm").workspace(wide) is None


@pytest.mark.parametrize("op", ["norm", "norm_dgrad"])
def test_engine_is_first_but_for_kinds_of_images(op: str):
    gains = lambda call: selection.why_later(engine_of(op), call) is None
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        call = call_of(op, 128, 56, 256, 32, dtype)
        assert selection.ranked(call)[0].name == "hopper"
        assert selection.ranked(dataclasses.replace(call, device_kind="another"))[0].name == "xla"
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert gains(call_of(op, 1, 256, 128, 32, dtype))  # an image in slices
    assert not gains(call_of(op, 1, 248, 128, 32))  # one of few bytes
    assert not gains(call_of(op, 8, 257, 128, 32))  # one that has no slices
    assert not gains(call_of(op, 4, 64, 3208, 3208))  # a vector of a pixel at a time
    assert not gains(call_of(op, 1, 4, 256, 32))  # few elements
    assert not gains(call_of(op, 1, 56, 64, 32))  # few clusters
    call = call_of(op, 128, 56, 256, 32)
    batch = dataclasses.replace(call.spec, per_example=False)
    assert not gains(dataclasses.replace(call, spec=batch))  # batch normalisation under vmap
