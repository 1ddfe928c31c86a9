"""Group and instance normalisation, channels last, by the `hopper` engine: which calls `group` serves, and how.

x is (images..., pixels..., groups, channels of a group), or (images..., pixels..., channels) with groups of one.
"""

import math
from typing import Any, NamedTuple

from jax import Array, export

from jaxdnn._src.core import engines
from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.norm.hopper import group_plan
from jaxdnn._src.norm.hopper.group_plan import ImagePlan, SlicePlan
from jaxdnn._src.norm.hopper.kind import Kind, marks, size_of, unlike, x_of
from jaxdnn._src.norm.spec import NormSpec, reduced

LARGEST = 1 << 31  # bytes of an image, in which offsets have 32 bits
SECTOR = 32
FEW_CLUSTERS, FEW_BYTES, FEW_BYTES_IN_SLICES = 4, 1 << 16, 1 << 24  # bytes of x
STATISTICS = 1 << 31  # statistics of all images, or of their slices


class _Sizes(NamedTuple):
    images: int
    pixels: int
    channels: int
    groups: int


def _own(call: engines.Call) -> tuple[int, ...]:
    """The axes of the channels, counted from the last."""
    return (-2, -1) if marks(call).endswith("kr") else (-1,)


def _sizes(call: engines.Call) -> _Sizes:
    shape, axes = x_of(call).shape, marks(call)
    first, own = axes.index("r"), len(_own(call))
    last = len(shape) - own
    return _Sizes(math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:]), shape[last])


def _unsupported(call: engines.Call) -> str | None:
    spec: NormSpec = call.spec
    x = x_of(call)
    if any(map(export.is_symbolic_dim, x.shape)):
        return "its kernels for images take sizes that are known when they are traced"
    size = _sizes(call)
    if not spec.centred:
        return "its kernels for images subtract the mean"
    if reason := unlike(call, "the channels", _own(call)):
        return reason
    if size.channels * x.dtype.itemsize % 16:
        return f"its kernels take channels that fill vectors of 16 bytes, not {size.channels} of {x.dtype}"
    if size.pixels * size.channels * max(x.dtype.itemsize, spec.out_dtype.itemsize) >= LARGEST:
        return f"its kernels take images of less than {LARGEST} bytes, not {size.pixels} pixels of {size.channels}"
    plan = _plan(call)
    slices = size.pixels // min(plan.statistics.pixels, plan.applied.pixels) if isinstance(plan, SlicePlan) else 1
    if (count := size.images * slices * size.groups) >= STATISTICS:
        return f"its kernels take fewer than {STATISTICS} groups and slices, which they number in 32 bits, not {count}"
    if plan is None:
        group = size.channels // size.groups
        return f"its kernels take groups that fit into a block, not {group} of {size.channels} channels of {x.dtype}"
    return None


def _plan(call: engines.Call) -> ImagePlan | SlicePlan | None:
    size = _sizes(call)
    dtype, out_dtype = (NAMES[dtype] for dtype in (x_of(call).dtype, call.spec.out_dtype))
    arrays = 1 if call.op == "norm" else 2
    return group_plan.best(size.pixels, size.channels, size.channels // size.groups, dtype, out_dtype, arrays)


def _run(call: engines.Call, *operands: Array) -> Any:
    from jaxdnn._src.norm.hopper import group as norm_group

    spec: NormSpec = call.spec
    shape, size = x_of(call).shape, _sizes(call)
    flat = lambda v: v.reshape(size.images, size.pixels, size.channels)
    activation = None if spec.activation is None else spec.activation[0]
    options: dict[str, Any] = {"groups": size.groups, "out_dtype": spec.out_dtype, "activation": activation}
    if call.op == "norm":
        x, *parameters = operands
        scale, bias = spec.split([p.reshape(size.channels) for p in parameters])
        y, *statistics = norm_group.forward(flat(x), scale, bias, eps=spec.eps, **options)
        return y.reshape(shape), *(s.reshape(reduced(shape, spec.axes)) for s in statistics)
    dy, x, mean, rstd, *parameters = operands
    scale, bias = spec.split([p.reshape(size.channels) for p in parameters])
    mean, rstd = (v.reshape(size.images, size.groups) for v in (mean, rstd))
    dx, *gradients = norm_group.backward(flat(dy), flat(x), mean, rstd, scale, bias, **options)
    return dx.reshape(shape), *(g.reshape(reduced(shape, spec.summed)) for g in gradients)


def _workspace(call: engines.Call) -> int | None:
    """Bytes of what one kernel stores for the next, and of the blocks' sums for the gradients of scale and bias."""
    found = _plan(call)
    return None if found is None else found.workspace(_sizes(call).images, 1 if call.op == "norm" else 2)


def _reads_twice(call: engines.Call) -> bool:
    found = _plan(call)
    return not isinstance(found, SlicePlan | None) and not found.stays


def _fills_few(call: engines.Call) -> bool:
    found = _plan(call)
    if isinstance(found, SlicePlan):
        return size_of(call) < FEW_BYTES_IN_SLICES
    return found is not None and (_sizes(call).images * found.parts < FEW_CLUSTERS or size_of(call) < FEW_BYTES)


def _reads_little(call: engines.Call) -> bool:
    found = _plan(call)
    return isinstance(found, ImagePlan) and found.part * x_of(call).dtype.itemsize < SECTOR


SLOWER = (
    engines.Slower(
        "its kernels for images were measured with results of x's dtype, and not under vmap of batch normalisation",
        lambda call: not call.spec.per_example or x_of(call).dtype != call.spec.out_dtype,
    ),
    engines.Slower("one cluster reads an image twice that does not stay in its shared memory", _reads_twice),
    engines.Slower("it reads less than a sector of 32 bytes of a pixel at a time", _reads_little),
    engines.Slower("it occupies few multiprocessors with so few images", _fills_few),
)
IMAGES = Kind(
    axes="the pixels of an image and the channels of a group, channels last",
    pattern="k+r+kr?",
    unsupported=_unsupported,
    run=_run,
    workspace=_workspace,
    slower=SLOWER,
)
