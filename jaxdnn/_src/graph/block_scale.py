"""Quantisation by blocks: numbers of few bits with a scale for each block of neighbours along an axis.

scale = the least number of its dtype that is at least amax / the largest number of y's dtype
y = x / scale, rounded to nearest even and saturated

Scales may lie in the order F8_128x4, in tiles of 128 rows and 4 blocks; what fills the last tiles up is bits of 0.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core.rounding import quotient
from jaxdnn._src.graph.nodes import Inference, Kind, Run, is_integer, numpy_of, register
from jaxdnn._src.graph.tensors import TILED, order_of, packed

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0}
SCALES = ("float8_e8m0fnu", "float8_e4m3fn", "float32")


def _infer_quantise(node: Inference) -> None:
    x = node.dim("input")
    node.typed("input", "float32", "bfloat16", "float16")
    axis, block = node.place("axis", len(x), "an axis of the input", optional=True), node.integer("block_size", 1)
    axis = len(x) - 1 if axis is None else axis
    node.expect(x[axis] % block == 0, "block_size", f"a divisor of {x[axis]}, the size of axis {axis}", block)
    for port, choices in (("Y", tuple(LARGEST)), ("scale", SCALES)):
        dtype = node.node.outputs[port].data_type
        node.expect(dtype in choices, f"{port}.data_type", f"set to one of {', '.join(choices)}", dtype)
    node.derive(axis=axis)
    node.output("Y", x, "input")
    own, scale = [n // block if i == axis else n for i, n in enumerate(x)], node.node.outputs["scale"]
    if scale.reordering_type != TILED:
        return node.output("scale", own, "input")
    node.expect(len(x) > 1, "scale.reordering_type", "NONE of a scale of one axis", TILED)
    if scale.stride is None:
        order = [a for a in order_of(node.node.inputs["input"].stride or ()) if a != axis]
        padded = _padded(own, order[-1], axis)
        scale.stride = packed(padded, (*order, axis))
        scale.inferred.add("stride")
    node.expect(len(scale.stride) == len(x), "scale.stride", f"{len(x)} strides", scale.stride)
    rows, columns = order_of(scale.stride)[-2:]
    node.expect(columns == axis, "scale.stride", f"the smallest along axis {axis}, that of the blocks", scale.stride)
    return node.output("scale", _padded(own, rows, columns), "input")


def _padded(sizes: Sequence[int], rows: int, columns: int) -> tuple[int, ...]:
    """Sizes of whole tiles of 128 rows and 4 columns."""
    tile = {rows: 128, columns: 4}
    return tuple(math.ceil(n / tile.get(axis, 1)) * tile.get(axis, 1) for axis, n in enumerate(sizes))


def power(exponent: Array) -> Array:
    """2 to an integer from -126 to 127, exactly, in float32."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _exponent_up(v: Array) -> Array:
    """The least integer e with 2^e >= v, of numbers above 0; from -127 to 127."""
    bits = lax.bitcast_convert_type(v, jnp.int32)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
    return jnp.where(bits <= 0x400000, -127, jnp.minimum(exponent, 127))  # 2^-127 is a subnormal number


def _blocks(x: Array, axis: int, block: int) -> Array:
    return x.reshape(*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])


def _quantise(node: Run) -> dict[str, Array]:
    x, axis, block = node.wide("input"), node.derived("axis"), node.attribute("block_size")
    kind, scale_kind = node.out("Y").data_type or "", node.out("scale").data_type
    parts = _blocks(x, axis, block)
    largest = jnp.max(jnp.abs(parts), axis=axis + 1, keepdims=True)
    ratio = quotient(largest, jnp.full_like(largest, LARGEST[kind]))
    if scale_kind == "float8_e8m0fnu":
        exponent = _exponent_up(ratio)
        half = exponent >> 1  # in two steps, for 2^-127 is no normal number
        scaled = parts * power(-half) * power(half - exponent)
        bits = jnp.where(jnp.isnan(ratio), 255, exponent + 127)
        scale = lax.bitcast_convert_type(bits.astype(jnp.uint8), jnp.float8_e8m0fnu)
    else:
        wide = ratio if scale_kind == "float32" else _up_to_e4m3(ratio)
        scale = wide.astype(numpy_of(node.out("scale")))
        scaled = jnp.where(wide == 0, 0, quotient(parts, jnp.broadcast_to(jnp.where(wide == 0, 1, wide), parts.shape)))
    limit = LARGEST[kind]
    y = jnp.clip(scaled, -limit, limit).astype(numpy_of(node.out("Y")))
    scale = jnp.squeeze(scale, axis + 1)
    more = [(0, n - m) for n, m in zip(node.out("scale").dim or (), scale.shape, strict=True)]
    bits = jnp.pad(lax.bitcast_convert_type(scale, jnp.uint8), more) if scale_kind != "float32" else scale
    return {"Y": y.reshape(x.shape), "scale": lax.bitcast_convert_type(bits, scale.dtype)}


def _up_to_e4m3(v: Array) -> Array:
    """The least number of float8_e4m3fn of at least v, or 448, in float32.

    In integers and powers of two: of a conversion to 8 bits and back XLA may leave out both.
    """
    v = jnp.minimum(v, 448.0)
    bits = lax.bitcast_convert_type(v, jnp.int32)
    exponent = jnp.maximum((bits >> 23) - 127, -6)  # subnormal numbers have that of the least normal one
    steps = jnp.maximum(jnp.ceil(v * power(3 - exponent)), (bits > 0).astype(jnp.float32))
    return steps * power(exponent - 3)


def _infer_dequantise(node: Inference) -> None:
    x, scale, block = node.dim("input"), node.dim("descale"), node.attribute("block_size")
    node.typed("input", *LARGEST)
    node.typed("descale", *SCALES)
    ok = isinstance(block, tuple) and all(is_integer(b) and b >= 1 for b in block)
    node.expect(ok and len(block) in (1, len(x)), "block_size", f"1 or {len(x)} integers of at least 1", block)
    node.expect(len(scale) == len(x), "descale.dim", f"{len(x)} sizes, as the input", scale)
    tensor = node.node.inputs["descale"]
    tiled = tensor.reordering_type == TILED and len(x) > 1
    rows, columns = order_of(tensor.stride or ())[-2:] if tiled else (0, 0)
    if tiled:
        block = tuple(block[0] if a == columns else 1 for a in range(len(x))) if len(block) == 1 else block
        others = [b for a, b in enumerate(block) if a != columns]
        node.expect(set(others) <= {1}, "block_size", f"1 but for axis {columns}, that of the scales' columns", block)
    elif len(block) == 1:
        divided = lambda axis: tuple(-(-n // block[0]) if i == axis else n for i, n in enumerate(x))
        fits = [axis for axis in range(len(x)) if scale == divided(axis)]
        node.expect(bool(fits), "descale.dim", f"the input's sizes {x}, one of them divided by {block[0]}", scale)
        block = tuple(block[0] if axis == fits[-1] else 1 for axis in range(len(x)))
    wanted = tuple(math.ceil(n / b) for n, b in zip(x, block, strict=True))
    wanted = _padded(wanted, rows, columns) if tiled else wanted
    node.expect(scale == wanted, "descale.dim", f"{wanted}, a scale for each block", scale)
    negative = node.flag("is_negative_scale")
    fits = not negative or node.dtype("descale") == "float8_e8m0fnu"
    node.expect(fits, "is_negative_scale", "False but for scales of float8_e8m0fnu", negative)
    node.derive(blocks=block)
    node.output("Y", x, "input")


def _dequantise(node: Run) -> dict[str, Array]:
    x, scale = node.x("input").astype(jnp.float32), node.x("descale")
    if node.tensor("descale").data_type == "float8_e8m0fnu":
        bits = lax.bitcast_convert_type(scale, jnp.uint8)
        x = jnp.where(_spread(bits, x.shape, node.derived("blocks")) == 255, jnp.nan, x)
        exponent = bits.astype(jnp.int32) - 127
        exponent = -exponent if node.attribute("is_negative_scale") else exponent
        half = exponent >> 1  # in two steps, for 2^-127 is no normal number
        factors = (power(half), power(exponent - half))
    else:
        factors = (scale.astype(jnp.float32),)
    for factor in factors:
        x = x * _spread(factor, x.shape, node.derived("blocks"))
    return {"Y": x.astype(np.dtype(node.compute))}


def _spread(scale: Array, shape: tuple[int, ...], blocks: tuple[int, ...]) -> Array:
    """A scale for each element."""
    for axis, block in enumerate(blocks):
        if block != 1:
            scale = jnp.repeat(scale, block, axis=axis)
    return scale[tuple(slice(0, n) for n in shape)]


register(
    Kind(
        "block_scale_quantize",
        ("input",),
        ("Y", "scale"),
        {"block_size": None, "axis": None},
        _infer_quantise,
        _quantise,
        compute=("float32",),
    )
)
register(
    Kind(
        "block_scale_dequantize",
        ("input", "descale"),
        ("Y",),
        {"block_size": None, "is_negative_scale": False},
        _infer_dequantise,
        _dequantise,
        compute=("float32",),
    )
)
