"""The `hopper` engine of the convolutions: the Pallas kernels of this folder, for compute capability 9.0.

`depthwise` serves depthwise and narrow groups; `fprop`, `dgrad` and `wgrad` serve everything else. The kernels are
imported at the first call that needs them, so that importing jaxdnn does not import Pallas.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax

from jaxdnn._src import hopper
from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv import primitive
from jaxdnn._src.conv.geometry import Products
from jaxdnn._src.conv.primitive import ConvSpec
from jaxdnn._src.core import engines

PASS = {"conv": "fprop", "conv_dgrad": "dgrad", "conv_wgrad": "wgrad"}
CHUNK = 64  # channels of 16 bits that a step adds over, and the least that a tile of a filter gradient has


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One kernel, bound to the static arguments of a call."""

    run: Callable[..., Array]
    refusal: str | None
    schedule: Callable[[], engines.Schedule | None]
    workspace: Callable[[], int]
    spreads_nonfinite: Callable[[], bool]


def _kernel(call: engines.Call) -> _Kernel:
    """The kernel that serves a call; if none does, one whose `refusal` says why."""
    narrow = _narrow(call)
    if narrow.refusal is None:
        return narrow
    dense = _dense(call)
    if dense.refusal is None or call.spec.geo.groups == 1:
        return dense
    return dataclasses.replace(dense, refusal=f"{dense.refusal}, and for narrow groups {narrow.refusal}")


def _dense(call: engines.Call) -> _Kernel:
    from jaxdnn._src.conv.hopper import dgrad, fprop, limits, tuning, wgrad

    spec: ConvSpec = call.spec
    module, kernel = {
        "conv": (fprop, fprop.conv_fprop),
        "conv_dgrad": (dgrad, dgrad.conv_dgrad),
        "conv_wgrad": (wgrad, wgrad.conv_wgrad),
    }[call.op]
    geo = dataclasses.replace(spec.geo, outer=not spec.filter.axes.endswith("IO"))
    a, b = call.avals[:2]
    plain = dataclasses.replace(spec.epilogue, integer=False) == Epilogue()  # bare sums, of integers too
    if call.op == "conv_wgrad":  # the result is small: its epilogue is XLA's
        options = {"out_dtype": spec.out_dtype if plain else spec.accumulate}
    else:
        options = {"out_dtype": spec.out_dtype, "epilogue": None if plain else spec.epilogue}
    further = () if call.op == "conv_wgrad" else call.avals[2:]
    refusal = module.supports(a, b, *further, geo=geo, **options, precision=spec.precision)

    def run(a: Array, b: Array, *operands: Array) -> Array:
        target = spec.limits.multiprocessors
        sms = None if target is None else min(target, tuning.multiprocessors())
        if call.op != "conv_wgrad":
            return kernel(a, b, *operands, geo=geo, **options, sms=sms)
        acc = kernel(a, b, geo=geo, **options, sms=sms)
        return acc if plain else primitive.finish(call.op, spec, acc, *operands)

    def schedule() -> engines.Schedule | None:
        if a.dtype == jnp.int8:
            return None  # integers need none
        return engines.Schedule("tensor_core", np.atleast_2d(module.schedule(a, b, geo=geo)))

    def workspace() -> int:
        return module.workspace(a, b, *further, geo=geo, **options)

    def spreads_nonfinite() -> bool:
        if call.op != "conv_dgrad":
            return call.op == "conv_wgrad"
        return dgrad.spreads_nonfinite(geo, limits.channels_of(b, geo)[0], further)

    return _Kernel(run, refusal, schedule, workspace, spreads_nonfinite)


def _narrow(call: engines.Call) -> _Kernel:
    from jaxdnn._src.conv.hopper import depthwise

    spec: ConvSpec = call.spec
    geo, (a, b) = spec.geo, call.avals[:2]
    images, channels, filters = primitive.channels(spec, call.op, a, b)
    described = (PASS[call.op], geo, images, channels)
    refusal = None
    bias = spec.epilogue.bias and call.op != "conv_wgrad"
    if a.dtype != b.dtype or spec.out_dtype != a.dtype or spec.epilogue != Epilogue(bias=bias):
        refusal = "its kernels have no epilogue but a bias, and write the operands' dtype"
    elif not spec.filter.axes.endswith("IO"):
        refusal = "its kernels take filters whose input and output channels are last, as HWIO"
    elif geo.groups == 1:
        refusal = "its kernels for narrow groups need groups"
    refusal = refusal or depthwise.unsupported(*described, filters, a.dtype, bias=bias)

    def reversed_taps(w: Array) -> Array:
        return lax.rev(w, range(geo.rank)) if geo.flip else w

    sms = spec.limits.multiprocessors

    def run(a: Array, b: Array, *bias: Array) -> Array:
        if call.op == "conv_wgrad":
            return reversed_taps(depthwise.depthwise_wgrad(a, b, geo=geo, sms=sms))
        return depthwise.depthwise_data(PASS[call.op], a, reversed_taps(b), *bias, geo=geo, sms=sms)

    def schedule() -> engines.Schedule | None:
        if spec.precision == "tf32" and a.dtype == jnp.float32:
            return None  # the definition truncates the operands to TF32, and this kernel does not
        found = depthwise.schedule(*described, a.dtype)
        if call.op == "conv_dgrad" and found.classes is not None and spec.cut is not None:
            # The kernel's first output is the first one that is left; the gradient in x begins with those cut off.
            low = [ends[0] for ends in spec.cut.ends]
            found = dataclasses.replace(found, classes=np.roll(found.classes, low, range(found.classes.ndim)))
        return found

    def workspace() -> int:
        turned = math.prod(geo.taps) * channels // geo.groups * filters * a.dtype.itemsize if geo.flip else 0
        # As float32, filled up to whole tiles, of 16 to 64 channels, and again to the 32 floats that a tile stores.
        biases = 12 * (channels + 63) * bias
        return depthwise.workspace(*described, a.dtype) + turned + biases

    return _Kernel(run, refusal, schedule, workspace, lambda: call.op == "conv_wgrad")


# ---- what the engine guarantees --------------------------------------------------------------------------------------


def _run(call: engines.Call, *operands: Array) -> Array:
    return _kernel(call).run(*operands)


def _unsupported(call: engines.Call) -> str | None:
    """Why no kernel serves a call, on any device."""
    spec: ConvSpec = call.spec
    if any(export.is_symbolic_dim(n) for n in call.avals[0].shape):
        return "its kernels are cut for a batch that is known when traced"
    if not spec.layout.channels_last:
        return f"its kernels take channels-last layouts, not {spec.layout.name}"
    if not (spec.filter.axes.endswith("IO") or (spec.filter.axes[0], spec.filter.axes[-1]) == ("O", "I")):
        return f"its kernels take filters as HWIO or OHWI, not {spec.filter.name}"
    if spec.accumulate.itemsize > 4:
        return f"it accumulates in float32 or int32, not {spec.accumulate.name}"
    return _kernel(call).refusal


def _level(call: engines.Call) -> str:
    if call.avals[0].dtype == jnp.int8:
        return "portable"
    # Which kernel serves depends on the number of groups, and so on that of matrices in a batch.
    batched = isinstance(call.spec.geo, Products) and call.spec.geo.batched
    return "run_to_run" if call.op == "conv_wgrad" or batched else "batch_invariant"


def _accumulation(call: engines.Call) -> str:
    a = call.avals[0].dtype
    if a == jnp.int8:
        return "int32"
    if a.itemsize == 1:
        return "tensor_core_fp8"
    if a == jnp.float32:
        return "tensor_core_tf32" if call.spec.precision == "tf32" else "float32"
    return "tensor_core"


def _hazards(call: engines.Call) -> tuple[str, ...]:
    """What the kernels do with exceptional values; 0 * inf is NaN.

    Filter gradients pad their boxes of pixels with zeros, and joined phases pad the filter. The phases of a stride and
    tiles at an array's end skip products outside of the array.
    """
    if call.avals[0].dtype == jnp.int8:
        return ()
    return (*(("spreads_nonfinite",) if _kernel(call).spreads_nonfinite() else ()), "leaves_out_padding")


def _schedule(call: engines.Call) -> engines.Schedule | None:
    return _kernel(call).schedule()


def _workspace(call: engines.Call) -> int:
    return _kernel(call).workspace()


def _taps(call: engines.Call) -> int:
    return math.prod(call.spec.geo.taps)


def _channels(call: engines.Call) -> tuple[int, int]:
    """The number of input channels, and that of filters."""
    return primitive.channels(call.spec, call.op, *call.avals[:2])[1:]


def _rank(call: engines.Call) -> int:
    return len(call.spec.geo.taps)


def _filters_first(call: engines.Call) -> bool:
    """Whether filters lie as OHWI."""
    return not call.spec.filter.axes.endswith("IO")


def _is_product(call: engines.Call) -> bool:
    """Whether there is one tap and one group, so that a matrix product computes a call."""
    return _taps(call) == call.spec.geo.groups == 1


def _has_further_passes(call: engines.Call) -> bool:
    """Whether an epilogue has more than a bias, which cuBLAS's kernels have too: an activation, or further arrays."""
    epilogue = call.spec.epilogue
    return call.op == "conv" and (epilogue.activation is not None or bool(epilogue.like_result))


def _is_padded(call: engines.Call) -> bool:
    """Whether the channels of the reduction do not fill whole vectors of 16 bytes, so that a copy pads them."""
    return bool(call.avals[0].shape[-1] * call.avals[0].dtype.itemsize % 16)


SLOWER = (
    engines.Slower(
        "it is a product of matrices without an epilogue that XLA needs another kernel for",
        lambda call: isinstance(call.spec.geo, Products) and not _has_further_passes(call),
        engines.Measured("matmul", "layers", "vocabulary 1024 to 50304", "forward", 0.75),
    ),
    engines.Slower(
        "it is a batch of products of matrices",
        lambda call: isinstance(call.spec.geo, Products) and call.spec.geo.groups > 1,
        engines.Measured("matmul", "batches", "values 512 to 64", "forward", 0.28),
    ),
    engines.Slower(
        "of its kernels only those of operands and results in bfloat16 or float16 were measured at large",
        lambda call: not call.avals[0].dtype == call.spec.out_dtype in (jnp.bfloat16, jnp.float16),
    ),
    engines.Slower(
        "XLA's program takes filters as OHWI as they are, and is about as fast",
        lambda call: _filters_first(call) and call.op != "conv_wgrad" and not (call.op == "conv" and _rank(call) == 3),
        engines.Measured("filters_first", "filters-first", "u-net 320", "dgrad", 0.9),
    ),
    engines.Slower(
        "its filter gradients of depthwise filters as OHWI take longer",
        lambda call: _filters_first(call) and call.spec.geo.groups == call.avals[0].shape[-1] > 1,
        engines.Measured("filters_first", "filters-first", "convnext_s2", "wgrad", 0.38),
    ),
    engines.Slower(
        "of its kernels with filters as OHWI those of one dimension were not measured",
        lambda call: _filters_first(call) and _rank(call) == 1,
    ),
    engines.Slower(
        "its tiles are mostly padding where there are few channels and many taps",
        lambda call: call.op == "conv_wgrad" and _taps(call) > 100 and _channels(call)[0] < 8,
        engines.Measured("corpus_conv", "patch-embed", "B/16", "wgrad", 0.44),
    ),
    engines.Slower(
        "there is one tap, and it adds over fewer channels than a step has",
        lambda call: call.op != "conv_wgrad" and _is_product(call) and call.avals[0].shape[-1] < CHUNK,
        engines.Measured("corpus_conv", "MobileNetV2", "c24.1.expand", "forward", 0.65),
    ),
    engines.Slower(
        "there is one tap, and fewer channels or filters than a tile has",
        lambda call: call.op == "conv_wgrad" and _is_product(call) and min(_channels(call)) < CHUNK,
        engines.Measured("corpus_conv", "MobileNetV2", "c16.0.project", "wgrad", 0.37),
    ),
    engines.Slower(
        "there is one tap, and a copy that pads the channels moves as much as the kernel",
        lambda call: call.op != "conv_wgrad" and _is_product(call) and _is_padded(call),
        engines.Measured("corpus_conv", "X3D-M", "s2 1x1", "dgrad", 0.33),
    ),
)


hopper.declare(
    *primitive.ROLES,
    run=_run,
    unsupported=_unsupported,
    needs_sizes=lambda call: False,  # it says so itself, of the batch
    level=_level,
    accumulation=_accumulation,
    schedule=_schedule,
    modelled=hopper.MEASURED_ON,
    hazards=_hazards,
    slower=SLOWER,
    workspace=_workspace,
    notes=("tensor cores",),
)
