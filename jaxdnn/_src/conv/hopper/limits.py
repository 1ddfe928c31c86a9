"""Which dtypes and shapes the dense Hopper kernels take."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv.geometry import Geometry
from jaxdnn._src.conv.hopper import epilogue as ep

FLOATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def channels_of(w: Any, geo: Geometry) -> tuple[int, int]:
    """Input channels, all groups together, and output channels of a filter."""
    if geo.outer:
        return w.shape[-1] * geo.groups, w.shape[0]
    return w.shape[-2] * geo.groups, w.shape[-1]


def accumulator_of(a: Any) -> Any:
    """What the products of an operand are added in."""
    return jnp.int32 if a.dtype == jnp.int8 else jnp.float32


def result_dtype(a: Any, out_dtype: Any) -> Any:
    """The result's dtype; if none is given, the operand's, or that of sums of integers."""
    return jnp.dtype(out_dtype or (jnp.int32 if a.dtype == jnp.int8 else a.dtype))


def data_reason(
    added_over: int,
    a: Any,
    w: Any,
    /,
    *operands: Any,
    geo: Geometry,
    epilogue: Epilogue | None = None,
    out_dtype: Any = None,
    precision: str | None = None,
) -> str | None:
    """Why a convolution of arrays of these shapes and dtypes by w cannot be served with an epilogue of `operands`, or
    None. It adds over w's input channels (`added_over` is 0) or its output channels (1)."""
    out_dtype = result_dtype(a, out_dtype)
    reason = operand_reason(a.dtype, w.dtype, out_dtype, precision) or ep.supports(epilogue, accumulator_of(a))
    if reason:
        return reason
    found = [n // geo.groups for n in channels_of(w, geo)]
    least = narrowest(out_dtype, ep.dtypes(epilogue, operands))
    return shape_reason(geo, a.shape[0], found[added_over], found[1 - added_over], jnp.dtype(a.dtype).itemsize, least)


def operand_reason(dtype: Any, other: Any, out_dtype: Any, precision: str | None) -> str | None:
    """Why two operand dtypes cannot be multiplied by the tensor cores, or None."""
    name = jnp.dtype(dtype).name
    if name == "float32":
        if precision != "tf32":
            return "the tensor cores have no float32 products; `precision='tf32'` asks for truncated ones"
    elif name == "int8":
        if jnp.dtype(out_dtype).name not in ("int32",):
            return "its int8 kernel writes int32"
    elif name not in FLOATS:
        return f"its kernels take bfloat16, float16, float8, int8 and (as TF32) float32, not {name}"
    if jnp.dtype(dtype) != jnp.dtype(other):
        return "its kernels take operands of one dtype"
    if name != "int8" and jnp.dtype(out_dtype).name not in ("bfloat16", "float16", "float32"):
        return f"its kernels write bfloat16, float16 and float32, not {jnp.dtype(out_dtype).name}"
    return None


def narrowest(out_dtype: Any, extras: Sequence[Any]) -> int:
    """Bytes of the smallest element among the result and the epilogue's operands in the output's shape."""
    return min(jnp.dtype(dtype).itemsize for dtype in (out_dtype, *extras))


def shape_reason(geo: Geometry, batch: int, reduce: int, columns: int, width: int, least: int = 2) -> str | None:
    """Why no kernel supports such shapes, or None. width, least: bytes of an element of operands, of results."""
    if min(batch, *geo.out, *geo.sizes, reduce, columns, 1) < 1:
        return "it has no kernel for empty arrays"
    if any(low < 0 or high < 0 for low, high in geo.padding):
        return "its kernels take no negative padding"
    if geo.pointwise and batch * math.prod(geo.sizes) >= 2**31:
        return "its kernels number the pixels of a matrix product in 32 bits"
    if geo.groups > 1:
        bytes_ = reduce * width
        if bytes_ not in (32, 64) and bytes_ % 128:
            return "its kernels take groups of 32, 64 or a multiple of 128 bytes of channels"
        if columns % (tile := max(16, 32 // least)):
            return f"its kernels take groups of a multiple of {tile} output channels"
    return None
