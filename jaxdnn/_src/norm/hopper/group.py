"""Group and instance normalisation on Hopper, channels last: parts of images in shared memory. PTX text.

Schedule. A cluster of 1 to 8 blocks processes one image, and of its channels one part: whole groups, as a rule 128
bytes of a pixel. Its threads start the copies of the whole part into shared memory at once, so that many bytes are in
flight, and add up the values as they arrive. The sums about the mean, and then the result, are computed from shared
memory: x is read from device memory once, and y is written once. Two blocks share a multiprocessor, so that one loads
while the other stores. Where a part needs most of a multiprocessor's shared memory, a cluster processes several parts
and loads the next one while it stores. Backward does the same with x and dy. The sums of a group are added through
shared memory, first a block's, then the cluster's. An image that does not fit into 8 blocks (backward also one of which
only narrow parts fit) is processed in slices by two kernels: one computes the statistics of each slice, the other
merges them and normalises, reading x a second time. `group_vectors` states which thread processes what, `group_sums`
and `group_slices_ptx` the order of additions. It depends on the shape of one image, the groups and the dtype alone.

Limits. The axes are an image's pixels, then its channels. The channels fill whole vectors of 16 bytes, and the smallest
part of a pixel that holds whole groups has at most 1024 vectors. If an image neither fits nor has slices, its first
pixels are kept and the others are read twice. bfloat16, float16 or float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.launch import launch
from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.norm.hopper import group_ptx, group_slices_ptx
from jaxdnn._src.norm.hopper.group_plan import ImagePlan, SlicePlan, best


def forward(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    *,
    groups: int,
    eps: float,
    out_dtype: Any,
    activation: str | None = None,
    config: ImagePlan | SlicePlan | None = None,
) -> Any:
    """y, and mean, rstd and variance (images, groups), of x (images, pixels, channels)."""
    images = x.shape[0]
    chosen = config or _plan(x, groups, out_dtype, 1)
    _record("forward", chosen, images)
    given, has = _parameters(scale, bias, activation)
    outs = jax.ShapeDtypeStruct(x.shape, out_dtype), *[_statistic(images, groups)] * 3
    if isinstance(chosen, SlicePlan):
        return _forward_in_slices(chosen, x, given, outs, groups, eps=eps, **has)
    turns = chosen.turns(images, 1)
    code = group_ptx.forward(chosen, eps=eps, **has, images=images if turns else 0, clusters=turns)
    shape = _shape(chosen, turns or images * chosen.parts, 1, turns > 0)
    return launch(code, [x, *given], outs, name="group_norm", **shape)


def _forward_in_slices(plans: SlicePlan, x: Array, given: list[Array], outs: Any, groups: int, **options: Any) -> Any:
    """`forward` by two kernels: one for the statistics of the images' slices, one for the result."""
    images, pixels, _ = x.shape
    first, second = plans.statistics, plans.applied
    merged, slices = pixels // first.pixels, pixels // second.pixels
    code = group_slices_ptx.statistics(first)
    shape = _shape(first, images * merged * first.parts, 1)
    found = launch(code, [x], [_statistic(images * merged, groups)] * 3, name="group_norm_statistics", **shape)
    code = group_slices_ptx.apply(second, images, slices, merged, **options)
    shape = _shape(second, images * slices * second.parts, 1)
    return launch(code, [x, *found, *given], outs, name="group_norm_apply", **shape)


def _parameters(scale: Array | None, bias: Array | None, activation: str | None) -> tuple[list[Array], dict[str, Any]]:
    """The parameters that there are, and the code's options for them and for the activation."""
    has = {"scale": scale is not None, "bias": bias is not None, "activation": activation}
    return [v for v in (scale, bias) if v is not None], has


def _statistic(images: int, groups: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((images, groups), jnp.float32)


def backward(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    scale: Array | None,
    bias: Array | None = None,
    *,
    groups: int,
    out_dtype: Any,
    activation: str | None = None,
    config: ImagePlan | SlicePlan | None = None,
) -> tuple[Array, Array, Array]:
    """dx, dscale and dbias of dy and x (images, pixels, channels), mean and rstd (images, groups).

    bias: with an activation, if there is one; dy is the gradient behind it.
    """
    images, _, channels = x.shape
    chosen = config or _plan(x, groups, out_dtype, 2)
    _record("backward", chosen, images)
    given, has = _parameters(scale, bias, activation)
    arrays, out = [dy, x, mean, rstd, *given], jax.ShapeDtypeStruct(x.shape, out_dtype)
    if isinstance(chosen, SlicePlan):
        return _backward_in_slices(chosen, arrays, out, groups, **has)
    turns = chosen.turns(images, 2)
    code = group_ptx.backward(chosen, **has, images=images if turns else 0, clusters=turns)
    sums = jax.ShapeDtypeStruct((images * chosen.cluster, 2, channels), jnp.float32)
    shape = _shape(chosen, turns or images * chosen.parts, 2, turns > 0)
    dx, each = launch(code, arrays, (out, sums), name="group_norm_dgrad", **shape)
    return dx, *merged_gradients(each)


def _backward_in_slices(plans: SlicePlan, arrays: list[Array], out: Any, groups: int, **has: Any) -> Any:
    """`backward` by two kernels: one for the sums of the images' slices, one for dx."""
    images, pixels, channels = out.shape
    first, second = plans.statistics, plans.applied
    merged, slices = pixels // first.pixels, pixels // second.pixels
    names, wide = group_slices_ptx.sums_of_groups(first.dtype), first.dtype == "f32"
    outs = [jax.ShapeDtypeStruct((images * merged * first.cluster, 2, channels), jnp.float32)]
    outs += [_statistic(images * merged, groups)] * len(names)
    code = group_slices_ptx.gradient_sums(first, merged, **has)
    shape = _shape(first, images * merged * first.parts, 2)
    each, *sums = launch(code, arrays, outs, name="group_norm_dgrad_sums", **shape)
    code = group_slices_ptx.apply_gradients(second, images, slices, merged, **has)
    outs = [out] + [_statistic(images, groups)] * wide
    shape = _shape(second, images * slices * second.parts, 2)
    dx, *rest = launch(code, [*arrays, *sums], outs, name="group_norm_dgrad_apply", **shape)
    return dx, *merged_gradients(each, *rest)


def merged_gradients(each: Array, rest: Array | None = None) -> tuple[Array, Array]:
    """dscale and dbias from the blocks' sums of dy h and of dy; rest: the mean h of images and groups, to subtract."""
    if rest is not None:
        images, groups = rest.shape
        along, plain = jnp.moveaxis(jnp.sum(each.reshape(images, -1, *each.shape[1:]), 1), 1, 0)
        return jnp.sum(along - jnp.repeat(rest, each.shape[-1] // groups, 1) * plain, 0), jnp.sum(plain, 0)
    dscale, dbias = jnp.sum(each, 0)
    return dscale, dbias


def _plan(x: Array, groups: int, out_dtype: Any, arrays: int) -> ImagePlan | SlicePlan:
    _, pixels, channels = x.shape
    names = NAMES[np.dtype(x.dtype)], NAMES[np.dtype(out_dtype)]
    found = best(pixels, channels, channels // groups, *names, arrays)
    if found is None:
        raise ValueError(f"`x` must have channels that fill vectors and fit into a block, got {channels} of {x.dtype}.")
    return found


def _record(which: str, chosen: ImagePlan | SlicePlan, images: int) -> None:
    if isinstance(chosen, SlicePlan):
        kind, plans = "in slices", [chosen.statistics, chosen.applied]
    elif chosen.stays:
        in_turn = chosen.turns(images, 1 + (which == "backward")) > 0
        kind, plans = "stays, in turn" if in_turn else "stays", [chosen]
    else:
        kind, plans = "read twice", [chosen]
    for plan in plans:
        whole = "of one group" if plan.group % plan.elements == 0 else "of several groups"
        branches.record(
            "norm images",
            operands=plan.dtype,
            pass_=which,
            image=kind,
            cluster=plan.cluster,
            vector=whole if 0 in (plan.group % plan.elements, plan.elements % plan.group) else "across groups",
            threads=plan.threads,
        )


def _shape(chosen: ImagePlan, clusters: int, arrays: int, in_turn: bool = False) -> dict[str, Any]:
    """The options of `launch`."""
    return {
        "blocks": clusters,
        "threads": chosen.threads,
        "cluster": chosen.cluster,
        "floats": chosen.floats(arrays, in_turn),
    }
