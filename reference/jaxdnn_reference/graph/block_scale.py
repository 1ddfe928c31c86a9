"""Nodes that take scales of blocks from numbers, and multiply by them."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxdnn_reference.graph.tensors import Array, Node, by_stride

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0}


def quantize(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    """Each block by itself: the least scale that its dtype has, so that nothing exceeds the largest number."""
    given, block = x["input"], node["block_size"]
    axis = given.ndim - 1 if node["axis"] is None else node["axis"]
    largest, kind = LARGEST[node.dtype("Y")], node.dtype("scale")
    parts = np.split(given, given.shape[axis] // block, axis=axis)
    scales = [scale_at_least(np.abs(part).max(axis=axis, keepdims=True) / largest, kind) for part in parts]
    divided = [np.where(s == 0, 0.0, part / np.where(s == 0, 1.0, s)) for part, s in zip(parts, scales, strict=True)]
    y = np.clip(np.concatenate(divided, axis=axis), -largest, largest)
    scale = np.concatenate(scales, axis=axis)
    whole = np.full(node.dims["scale"], 2.0**-127 if kind == "float8_e8m0fnu" else 0.0)  # bits of 0 fill tiles up
    whole[tuple(map(slice, scale.shape))] = scale
    return {"Y": y, "scale": whole}


def scale_at_least(v: Array, kind: str) -> Array:
    """The least number of a dtype of scales that is at least v, or its largest; float32: the nearest. NaN of NaN."""
    if kind == "float32":
        return v.astype(np.float32).astype(np.float64)
    v = v.astype(np.float32).astype(np.float64)  # the ratio is a float32
    numbers = 2.0 ** np.arange(-127, 128) if kind == "float8_e8m0fnu" else _numbers_of_e4m3()
    return np.where(np.isnan(v), np.nan, numbers[np.minimum(np.searchsorted(numbers, v), len(numbers) - 1)])


def _numbers_of_e4m3() -> Array:
    return np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def dequantize(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    given, scale, blocks = x["input"], x["descale"], node["block_size"]
    if len(blocks) == 1:
        descale = node.tensor("descale")
        smaller = [a for a, (n, m) in enumerate(zip(given.shape, scale.shape, strict=True)) if n != m]
        tiled = descale.get("reordering_type", "NONE") != "NONE"
        axis = by_stride(descale)[-1] if tiled else [given.ndim - 1, *smaller][-1]
        blocks = [blocks[0] if a == axis else 1 for a in range(given.ndim)]
    at = np.ix_(*(np.arange(n) // b for n, b in zip(given.shape, blocks, strict=True)))
    return {"Y": given / scale[at] if node["is_negative_scale"] else given * scale[at]}


OPS = {
    "block_scale_quantize": quantize,
    "block_scale_dequantize": dequantize,
}
