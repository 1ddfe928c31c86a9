"""The `xla` engine of the convolutions: it serves every call on every platform.

On CPUs a call takes one of the forms of `forms`, which are of channels-last arrays; integers reach that layout by
transposes that XLA cannot fold into the convolution. On NVIDIA GPUs integer convolutions take these forms too, and so
do those at which cuDNN is slow: with one tap, with windows that tile the input, and some depthwise and grouped ones.
Every other call is XLA's convolution in the caller's own layout, without a
transpose, in the pattern that XLA maps to cuDNN's forward, backward-data and backward-filter kernels. A backward-filter
convolution never has `lhs_dilation`, for which cuDNN has no kernel: transposed convolution is backward data here, so
its filter gradient is an ordinary backward-filter one.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.activation import formulas
from jaxdnn._src.conv import primitive
from jaxdnn._src.conv.geometry import Products
from jaxdnn._src.conv.primitive import ConvSpec
from jaxdnn._src.conv.xla import forms
from jaxdnn._src.conv.xla.problem import Problem
from jaxdnn._src.core import engines


def run(call: engines.Call, a: Array, b: Array, *operands: Array) -> Array:
    """Serves a call of any of the three ops."""
    spec: ConvSpec = call.spec
    if (nothing := primitive.sum_of_nothing(call.op, spec, a, b)) is not None:
        return primitive.finish(call.op, spec, nothing, *operands)
    a, b, preferred = compute_types(call, a, b)
    if spec.precision == "tf32" and call.platform != "cuda":
        a, b = truncate_to_tf32(a), truncate_to_tf32(b)
    # HIGHEST keeps float32 operands as they are; DEFAULT lets an NVIDIA GPU cut them to TF32. It is for them only:
    # cuDNN has been found without any kernel for a grouped bfloat16 convolution that asks for HIGHEST.
    uncut = a.dtype in (jnp.float32, jnp.float64) and spec.precision != "tf32"
    precision = lax.Precision.HIGHEST if uncut else lax.Precision.DEFAULT
    integer = jnp.issubdtype(a.dtype, jnp.integer)
    on_gpu = call.platform == "cuda"
    problem = Problem(spec.geo, precision, preferred, on_gpu)
    if on_gpu and not integer and not _has_better_form_on_gpu(call, problem):
        acc = _NATIVE[call.op](spec, problem, a, b)
    else:
        once = problem.is_matrix or problem.is_patches or isinstance(spec.geo, Products)  # one product, rounded once
        if not (integer or once):
            problem = dataclasses.replace(problem, preferred=primitive.wider(preferred, spec.accumulate))
        acc = _channels_last(call.op, spec, problem, a, b)
    if on_gpu and (becomes_float8(spec) or acc.dtype == jnp.float64):
        # Else XLA's autotuner may fuse the conversion into a product by cuBLASLt, which saturates instead of NaN; and
        # XLA puts the scale of a float64 result into cuDNN's call, where a result with alpha = 0.3 was off by as much
        # as float32's 0.3 is.
        acc = lax.optimization_barrier(acc)
    return primitive.finish(call.op, spec, acc, *operands)


def _has_better_form_on_gpu(call: engines.Call, problem: Problem) -> bool:
    """Whether a form beat cuDNN when measured on an H200 (`benchmarks/notes-xla-gpu.md`), or a product is asked for."""
    spec: ConvSpec = call.spec
    if isinstance(spec.geo, Products):  # goes to cuBLAS; several matrices were not timed beside cuDNN's groups
        return True
    if not spec.layout.channels_last:
        return False
    dense_pixels = problem.is_matrix and set(spec.geo.stride) == {1}
    _, c, _ = primitive.channels(spec, call.op, *call.avals[:2])
    dilated = max(spec.geo.dilation) > 1
    depthwise = spec.geo.groups == c > 1
    slow_in_cudnn = (depthwise and (dilated or problem.geo.rank == 1)) or (
        spec.geo.groups > 1 and dilated and call.op == "conv_wgrad"
    )
    return dense_pixels or problem.is_patches or slow_in_cudnn


# ---- types -----------------------------------------------------------------------------------------------------------


def compute_types(call: engines.Call, a: Array, b: Array) -> tuple[Array, Array, Any]:
    """Operands in a type that holds both exactly and that the platform multiplies, and the type to accumulate in."""
    spec: ConvSpec = call.spec
    if jnp.issubdtype(a.dtype, jnp.integer):
        return a, b, jnp.dtype(jnp.int32)
    wide = primitive.wider(_narrow_float(a.dtype), _narrow_float(b.dtype))
    if call.platform != "cuda" or spec.accumulate.itemsize > 4:
        wide = primitive.wider(wide, spec.accumulate)
    preferred = wide if _rounds_once(spec, wide) else primitive.wider(wide, spec.accumulate)
    narrow = call.platform == "cuda" and 1 in (a.dtype.itemsize, b.dtype.itemsize)
    a, b = a.astype(wide), b.astype(wide)
    # Unless it is kept from seeing the float8, XLA asks cuDNN for a float8 convolution, which it then may not have.
    a, b = lax.optimization_barrier((a, b)) if narrow else (a, b)
    return a, b, preferred


def _rounds_once(spec: ConvSpec, dtype: Any) -> bool:
    """Whether a convolution that gives this dtype is the whole call."""
    return spec.epilogue == type(spec.epilogue)() and spec.out_dtype == dtype


def becomes_float8(spec: Any) -> bool:
    """Whether the accumulator is converted to a float8 type, in the call or right after it."""
    found = (spec.out_dtype, spec.out_dtype if spec.converted is None else spec.converted)
    return any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1 for dtype in found)


def _narrow_float(dtype: Any) -> Any:
    """float8 values are exact in bfloat16, which every platform multiplies."""
    return jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else dtype


def truncate_to_tf32(x: Array) -> Array:
    """float32 with its fraction cut to TF32's 10 bits."""
    bits = formulas.bits(x) & jnp.uint32(0xFFFFE000)
    return lax.bitcast_convert_type(bits, jnp.float32)


# ---- channels last ---------------------------------------------------------------------------------------------------


def _channels_last(op: str, spec: ConvSpec, problem: Problem, a: Array, b: Array) -> Array:
    roles = primitive.ROLES[op]
    form = {"y": forms.forward, "x": forms.backward_data, "w": forms.backward_filter}[roles[2]]
    transpose = _transpose_in_runs if jnp.issubdtype(a.dtype, jnp.integer) else jnp.transpose
    a, b = (canonical(spec, role, v, transpose) for role, v in zip(roles, (a, b), strict=False))
    return caller_layout(spec, roles[2], form(problem, a, b))


def _canonical_axes(spec: ConvSpec, role: str) -> tuple[int, ...]:
    """The array's axes in the order (N, sizes..., C) or (taps..., C / G, K)."""
    if role == "w":
        return (*spec.filter.spatial, spec.filter.input, spec.filter.output)
    return (spec.layout.batch, *spec.layout.spatial, spec.layout.channel)


def canonical(
    spec: ConvSpec, role: str, array: Array, transpose: Callable[[Array, Sequence[int]], Array] = jnp.transpose
) -> Array:
    """An array in the caller's layout as (N, sizes..., C), a filter as (taps..., C / G, K) for cross-correlation."""
    return _unflipped(spec, role, transpose(array, _canonical_axes(spec, role)))


def _transpose_in_runs(array: Array, axes: Sequence[int]) -> Array:
    """A transpose in which axes that stay neighbours are one: NCHW to NHWC is (N, C, HW) to (N, HW, C).

    The reshapes keep XLA from folding the transpose into an integer convolution. One that has taken it in is no longer
    served by the library that multiplies int8 on CPUs: 110 ms in place of 4 for 64 channels of 56 x 56 pixels.
    """
    starts = [i for i, axis in enumerate(axes) if i == 0 or axis != axes[i - 1] + 1]
    runs = [tuple(axes[start:end]) for start, end in zip(starts, [*starts[1:], len(axes)], strict=True)]
    if len(runs) < 2:
        return array
    merged = array.reshape([math.prod(array.shape[axis] for axis in run) for run in sorted(runs)])
    order = np.argsort(np.argsort([run[0] for run in runs]))
    return jnp.transpose(merged, [int(i) for i in order]).reshape([array.shape[axis] for axis in axes])


def caller_layout(spec: ConvSpec, role: str, array: Array) -> Array:
    """The inverse of `canonical`."""
    return jnp.transpose(_unflipped(spec, role, array), [int(i) for i in np.argsort(_canonical_axes(spec, role))])


def _unflipped(spec: ConvSpec, role: str, array: Array) -> Array:
    """Mode "convolution" is cross-correlation by the reversed filter."""
    return lax.rev(array, range(len(spec.geo.taps))) if role == "w" and spec.geo.flip else array


# ---- the caller's layout ---------------------------------------------------------------------------------------------


def _native_forward(spec: ConvSpec, problem: Problem, x: Array, w: Array) -> Array:
    return forms.direct(problem, x, lax.rev(w, spec.filter.spatial) if spec.geo.flip else w, _numbers(spec))


def _native_backward_data(spec: ConvSpec, problem: Problem, dy: Array, w: Array) -> Array:
    geo, one = spec.geo, (1,) * spec.geo.rank
    spans = zip(geo.sizes, geo.out, geo.extents, geo.stride, geo.padding, strict=True)
    padding = [(ext - 1 - low, size + low - 1 - (p - 1) * stride) for size, p, ext, stride, (low, _) in spans]
    dy, padding = forms.crop(dy, spec.layout.spatial, padding, geo.stride)
    # For one group the filter's channels are exchanged by name: XLA looks for a mere reversal to map this to cuDNN.
    back = w if geo.flip else lax.rev(w, spec.filter.spatial)
    numbers = _numbers(spec)
    if geo.groups == 1:
        o, i, *taps = numbers.rhs_spec
        numbers = numbers._replace(rhs_spec=(i, o, *taps))
    else:
        back = _exchange_channels(spec, back)
    groups = {"feature_group_count": geo.groups}
    return problem.convolve(dy, back, numbers, one, padding, geo.dilation, lhs_dilation=geo.stride, **groups)


def _native_backward_filter(spec: ConvSpec, problem: Problem, x: Array, dy: Array) -> Array:
    geo, layout, filt = spec.geo, spec.layout, spec.filter
    channels_as_batch = (layout.channel, layout.batch, *layout.spatial)
    out = (filt.input, filt.output, *filt.spatial)
    numbers = lax.ConvDimensionNumbers(channels_as_batch, channels_as_batch, out)
    padding = forms.backward_filter_padding(geo)
    dw = problem.convolve(x, dy, numbers, geo.dilation, padding, geo.stride, batch_group_count=geo.groups)
    return lax.rev(dw, filt.spatial) if geo.flip else dw


_NATIVE = {"conv": _native_forward, "conv_dgrad": _native_backward_data, "conv_wgrad": _native_backward_filter}


def _numbers(spec: ConvSpec) -> lax.ConvDimensionNumbers:
    layout, filt = spec.layout, spec.filter
    data = (layout.batch, layout.channel, *layout.spatial)
    return lax.ConvDimensionNumbers(data, (filt.output, filt.input, *filt.spatial), data)


def _exchange_channels(spec: ConvSpec, w: Array) -> Array:
    """Within each group, input and output channels change places: O = (G, Kg), I = Cg to O = (G, Cg), I = Kg."""
    o, i, g = spec.filter.output, spec.filter.input, spec.geo.groups
    split = w.reshape(*w.shape[:o], g, w.shape[o] // g, *w.shape[o + 1 :])  # (... G Kg ...)
    cg = i + (i > o)
    moved = jnp.swapaxes(split, o + 1, cg)
    return moved.reshape(*moved.shape[:o], g * moved.shape[o + 1], *moved.shape[o + 2 :])


# ---- what the engine guarantees --------------------------------------------------------------------------------------


def _level(call: engines.Call) -> str:
    if jnp.issubdtype(call.avals[0].dtype, jnp.integer):
        return "portable" if call.spec.epilogue.integer else "run_to_run"
    return engines.level_of_products(call)


def _accumulation(call: engines.Call) -> str:
    spec: ConvSpec = call.spec
    if spec.accumulate != jnp.float32:
        return jnp.dtype(spec.accumulate).name
    if call.platform != "cuda":
        return "float32"
    return "transform"  # XLA's autotuner may take any of cuDNN's algorithms, and has been seen to take Fourier's


def _hazards(call: engines.Call) -> tuple[str, ...]:
    """cuDNN pads groups, strides and tiles with zeros, by which it multiplies: infinity becomes NaN elsewhere.

    XLA's own loops, by which all of float64 is computed, and the phases of a stride skip what lies outside of an array.
    Algorithm 47 of cuDNN's forward convolution, which XLA may choose for any of the three ops in float16, writes 0 for
    a result below -65504 (`benchmarks/notes-random-calls.md`). With an epilogue cuDNN is asked for float32.
    """
    if jnp.issubdtype(call.avals[0].dtype, jnp.integer):
        return ()
    spreads = ("spreads_nonfinite",) if call.platform == "cuda" else ()
    loses = ("loses_negative_overflow",) if call.platform == "cuda" and _rounds_once(call.spec, jnp.float16) else ()
    return ("flushes_subnormals", *spreads, "leaves_out_padding", *loses)


engines.declare(
    "xla",
    *primitive.ROLES,
    run=run,
    level=_level,
    accumulation=_accumulation,
    # XLA's own partitioner gathers groups, and has been seen to give wrong filter gradients of one group.
    partition=lambda call: True,
    hazards=_hazards,
)
