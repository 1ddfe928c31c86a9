"""The `xla` engine of the convolutions: formulas that XLA compiles well, on every platform.

A call becomes one of these forms, chosen by its geometry alone:

| form | when | what it is |
|---|---|---|
| matrix | one tap, stride 1, no padding, one group, channels last | a matrix product over the pixels |
| patches | stride = taps, no padding, no dilation, one group, channels last | a reshape and a matrix product |
| direct | everything else | XLA's convolution (cuDNN's on NVIDIA GPUs) |

Backward-data convolutions are written with `lhs_dilation`, which XLA maps to cuDNN's backward-data kernels, and on CPU
as one small convolution per stride phase. Backward-filter convolutions never have `lhs_dilation`: transposed
convolution is backward data here, so its filter gradient is an ordinary backward-filter convolution.
"""

import math
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _conv, engines
from jaxdnn._conv import ConvSpec


def run(call: engines.Call, a: Array, b: Array, *operands: Array) -> Array:
    """Serves a call of any of the three ops."""
    spec: ConvSpec = call.spec
    a, b, preferred = _compute_types(call, a, b)
    if spec.precision == "tf32" and call.platform != "cuda":
        a, b = _truncate_to_tf32(a), _truncate_to_tf32(b)
    form = {"conv": _forward, "conv_dgrad": _backward_data, "conv_wgrad": _backward_filter}[call.op]
    acc = form(call, a, b, preferred)
    return _conv.finish(call.op, spec, acc, *operands)


# ---- types -----------------------------------------------------------------------------------------------------------


def _compute_types(call: engines.Call, a: Array, b: Array) -> tuple[Array, Array, Any]:
    """Operands in a type that holds both exactly and that the platform multiplies, and the type to accumulate in."""
    spec: ConvSpec = call.spec
    if jnp.issubdtype(a.dtype, jnp.integer):
        return a, b, jnp.dtype(jnp.int32)
    wide = jnp.promote_types(_narrow_float(a.dtype), _narrow_float(b.dtype))
    if call.platform != "cuda" or spec.accumulate.itemsize > 4:
        wide = jnp.promote_types(wide, spec.accumulate)
    direct = spec.epilogue == type(spec.epilogue)() and spec.out_dtype == wide
    return a.astype(wide), b.astype(wide), wide if direct else jnp.promote_types(wide, spec.accumulate)


def _narrow_float(dtype: Any) -> Any:
    """float8 values are exact in bfloat16, which every platform multiplies."""
    return jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else dtype


def _truncate_to_tf32(x: Array) -> Array:
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFE000)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _precision(spec: ConvSpec) -> lax.Precision:
    """HIGHEST keeps float32 products exact; DEFAULT lets an NVIDIA GPU truncate float32 operands to TF32."""
    return lax.Precision.DEFAULT if spec.precision == "tf32" else lax.Precision.HIGHEST


# ---- geometry --------------------------------------------------------------------------------------------------------


def _is_matrix(spec: ConvSpec) -> bool:
    """Whether every output element is one input pixel times the filter."""
    window = spec.window
    plain = set(spec.taps) | set(window.strides) <= {1} and not any(map(any, window.padding))
    return plain and spec.groups == 1 and spec.layout.channels_last


def _is_patches(spec: ConvSpec) -> bool:
    """Whether the windows tile the input without overlap, gap or padding."""
    window = spec.window
    tiles = window.strides == spec.taps and set(window.dilation) == {1} and not any(map(any, window.padding))
    return tiles and spec.groups == 1 and spec.layout.channels_last


def _taps_channels(spec: ConvSpec, w: Array) -> Array:
    """The filter as (taps..., input channels, output channels), taps as cross-correlation has them."""
    w = jnp.transpose(w, (*spec.filter.spatial, spec.filter.input, spec.filter.output))
    return lax.rev(w, range(len(spec.taps))) if spec.flip else w


def _from_taps_channels(spec: ConvSpec, w: Array) -> Array:
    """The inverse of `_taps_channels`."""
    w = lax.rev(w, range(len(spec.taps))) if spec.flip else w
    order = (*spec.filter.spatial, spec.filter.input, spec.filter.output)
    return jnp.transpose(w, np.argsort(order))


def _flipped(spec: ConvSpec, w: Array) -> Array:
    return lax.rev(w, spec.filter.spatial) if spec.flip else w


def _numbers(spec: ConvSpec) -> lax.ConvDimensionNumbers:
    layout, filt = spec.layout, spec.filter
    data = (layout.batch, layout.channel, *layout.spatial)
    return lax.ConvDimensionNumbers(data, (filt.output, filt.input, *filt.spatial), data)


def _to_patches(spec: ConvSpec, x: Array) -> Array:
    """(N, size..., C) to (N, P..., taps * C), cropping what no window covers."""
    n, *_, c = x.shape
    rank = len(spec.taps)
    covered = [p * r for p, r in zip(spec.output_sizes, spec.taps, strict=True)]
    x = lax.slice(x, (0,) * x.ndim, (n, *covered, c))
    split = [v for p, r in zip(spec.output_sizes, spec.taps, strict=True) for v in (p, r)]
    x = x.reshape(n, *split, c)
    outer, inner = range(1, 2 * rank, 2), range(2, 2 * rank + 1, 2)
    return jnp.transpose(x, (0, *outer, *inner, 2 * rank + 1)).reshape(n, *spec.output_sizes, math.prod(spec.taps) * c)


def _from_patches(spec: ConvSpec, patches: Array, c: int) -> Array:
    """The adjoint of `_to_patches`."""
    n, rank = patches.shape[0], len(spec.taps)
    x = patches.reshape(n, *spec.output_sizes, *spec.taps, c)
    interleaved = [v for i in range(rank) for v in (1 + i, 1 + rank + i)]
    covered = [p * r for p, r in zip(spec.output_sizes, spec.taps, strict=True)]
    x = jnp.transpose(x, (0, *interleaved, 2 * rank + 1)).reshape(n, *covered, c)
    missing = [(0, size - cover) for size, cover in zip(spec.sizes, covered, strict=True)]
    return jnp.pad(x, ((0, 0), *missing, (0, 0)))


# ---- the three ops ---------------------------------------------------------------------------------------------------


def _forward(call: engines.Call, x: Array, w: Array, preferred: Any) -> Array:
    spec: ConvSpec = call.spec
    if _is_matrix(spec) or _is_patches(spec):
        w = _taps_channels(spec, w)
        return _dot(spec, _to_patches(spec, x), w.reshape(-1, w.shape[-1]), (-1, 0), preferred)
    return lax.conv_general_dilated(
        x,
        _flipped(spec, w),
        window_strides=spec.window.strides,
        padding=spec.window.padding,
        rhs_dilation=spec.window.dilation,
        dimension_numbers=_numbers(spec),
        feature_group_count=spec.groups,
        precision=_precision(spec),
        preferred_element_type=preferred,
    )


def _backward_data(call: engines.Call, dy: Array, w: Array, preferred: Any) -> Array:
    spec: ConvSpec = call.spec
    if _is_matrix(spec) or _is_patches(spec):
        w = _taps_channels(spec, w)
        patches = _dot(spec, dy, w.reshape(-1, w.shape[-1]), (-1, 1), preferred)
        return _from_patches(spec, patches, w.shape[-2])
    window, extents = spec.window, spec.window.extents(spec.taps)
    padding = [
        (extent - 1 - low, size + low - 1 - (p - 1) * stride)
        for size, p, extent, stride, (low, _) in zip(
            spec.sizes, spec.output_sizes, extents, window.strides, window.padding, strict=True
        )
    ]
    w = w if spec.flip else lax.rev(w, spec.filter.spatial)
    return lax.conv_general_dilated(
        dy,
        _swap_filter_channels(spec, w),
        window_strides=(1,) * len(spec.taps),
        padding=padding,
        lhs_dilation=window.strides,
        rhs_dilation=window.dilation,
        dimension_numbers=_numbers(spec),
        feature_group_count=spec.groups,
        precision=_precision(spec),
        preferred_element_type=preferred,
    )


def _swap_filter_channels(spec: ConvSpec, w: Array) -> Array:
    """A filter from x to y as one from y to x: within each group, input and output channels change places."""
    i, o = spec.filter.input, spec.filter.output
    if spec.groups > 1:
        shape = list(w.shape)
        split = w.reshape(*shape[:o], spec.groups, shape[o] // spec.groups, *shape[o + 1 :])
        i_split = i + (i > o)
        merged_shape = list(shape)
        merged_shape[o], merged_shape[i] = shape[o] // spec.groups, shape[i] * spec.groups
        w = jnp.moveaxis(split, o, i_split - (i > o)).reshape(merged_shape)
    return jnp.swapaxes(w, i, o)


def _backward_filter(call: engines.Call, x: Array, dy: Array, preferred: Any) -> Array:
    spec: ConvSpec = call.spec
    if _is_matrix(spec) or _is_patches(spec):
        axes = tuple(range(x.ndim - 1))
        patches = _to_patches(spec, x)
        w = _dot(spec, patches, dy, (axes, axes), preferred)
        return _from_taps_channels(spec, w.reshape(*spec.taps, x.shape[-1], dy.shape[-1]))
    window, layout, filt = spec.window, spec.layout, spec.filter
    padding = [
        (low, extent - 1 + (p - 1) * stride + 1 - size - low)
        for size, p, extent, stride, (low, _) in zip(
            spec.sizes, spec.output_sizes, window.extents(spec.taps), window.strides, window.padding, strict=True
        )
    ]
    numbers = lax.ConvDimensionNumbers(
        (layout.channel, layout.batch, *layout.spatial),  # channels of x are the batch, the batch is contracted
        (layout.channel, layout.batch, *layout.spatial),
        (filt.input, filt.output, *filt.spatial),
    )
    w = lax.conv_general_dilated(
        x,
        dy,
        window_strides=window.dilation,
        padding=padding,
        rhs_dilation=window.strides,
        dimension_numbers=numbers,
        batch_group_count=spec.groups,
        precision=_precision(spec),
        preferred_element_type=preferred,
    )
    return _flipped(spec, w)


def _dot(spec: ConvSpec, a: Array, b: Array, axes: Any, preferred: Any) -> Array:
    left, right = ((axis,) if isinstance(axis, int) else axis for axis in axes)
    left, right = tuple(v % a.ndim for v in left), tuple(v % b.ndim for v in right)
    return lax.dot_general(
        a, b, ((left, right), ((), ())), precision=_precision(spec), preferred_element_type=preferred
    )


# ---- what the engine promises ----------------------------------------------------------------------------------------


def _level(call: engines.Call) -> str:
    if jnp.issubdtype(call.avals[0].dtype, jnp.integer):
        return "portable" if call.spec.epilogue.integer else "run_to_run"
    if call.platform == "cpu":
        return "run_to_run"
    flags = os.environ.get("XLA_FLAGS", "")
    names = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
    asked = any(f"--{name}" in flags and f"--{name}=false" not in flags for name in names)
    return "run_to_run" if asked else "fast"


def _accumulation(call: engines.Call) -> str:
    spec: ConvSpec = call.spec
    if spec.accumulate != jnp.float32:
        return jnp.dtype(spec.accumulate).name
    if call.platform != "cuda":
        return "float32"
    if spec.precision == "tf32":
        return "tensor_core_tf32"
    return "float32" if call.avals[0].dtype == jnp.float32 else "tensor_core"


for _op in _conv.ROLES:
    engines.register(engines.Engine(name="xla", op=_op, run=run, level=_level, accumulation=_accumulation))
