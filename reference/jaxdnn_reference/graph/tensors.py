"""What a description says of tensors: what they hold, how their memory is read and written."""

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxdnn_reference.rounding import round_to

Array = np.ndarray[Any, Any]
Description = Mapping[str, Any]
HELD = ("float64", "float32", "bfloat16", "float16")  # what a virtual tensor holds as it was computed
LAYOUT = {3: ("NCW", "KCS"), 4: ("NCHW", "KCRS"), 5: ("NCDHW", "KCTRS")}


def converted(value: Array, data_type: str) -> Array:
    """In a dtype, by one rounding to nearest even."""
    dtype = np.dtype(getattr(ml_dtypes, data_type, data_type))
    if dtype == np.bool_:
        return value != 0
    return round_to(np.asarray(value), dtype)


def stored(value: Array, tensor: Mapping[str, Any]) -> Array:
    """What a tensor holds of a computed value."""
    if tensor["is_virtual"] and tensor["data_type"] in HELD:
        return value
    return converted(value, tensor["data_type"]).astype(np.float64)


def from_memory(array: Array, tensor: Mapping[str, Any]) -> Array:
    """A tensor's elements in the shape of its dimensions: element i lies at the sum of i times the strides."""
    return np.asarray(array).reshape(-1)[_places(tensor)]


def _places(tensor: Mapping[str, Any]) -> Array:
    """Where each element lies in memory."""
    at = np.zeros(tuple(tensor["dim"]), np.int64)
    for axis, (n, stride) in enumerate(zip(tensor["dim"], tensor["stride"], strict=True)):
        at += stride * np.arange(n).reshape([-1 if a == axis else 1 for a in range(at.ndim)])
    return at if tensor.get("reordering_type", "NONE") == "NONE" else _tiled(at, tensor)


def _tiled(at: Array, tensor: Mapping[str, Any]) -> Array:
    """F8_128x4: tiles of 128 rows and 4 columns, in which (r, c) lies at 16 (r % 32) + 4 (r // 32) + c."""
    rows, columns = (tensor["dim"][axis] for axis in by_stride(tensor)[-2:])
    matrix, (r, c) = at // (rows * columns), divmod(at % (rows * columns), columns)
    tile = r // 128 * (columns // 4) + c // 4
    return matrix * rows * columns + tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def by_stride(tensor: Mapping[str, Any]) -> list[int]:
    """The axes by descending stride."""
    return sorted(range(len(tensor["dim"])), key=lambda axis: -tensor["stride"][axis])


def to_memory(value: Array, tensor: Mapping[str, Any]) -> Array:
    """The memory of a tensor; what lies in gaps is 0."""
    dim, stride = tuple(tensor["dim"]), tuple(tensor["stride"])
    size = 1 + sum((n - 1) * s for n, s in zip(dim, stride, strict=True))
    flat = np.zeros(size, value.dtype)
    flat[_places(tensor)] = value
    return flat.reshape([dim[axis] for axis in by_stride(tensor)]) if math.prod(dim) == size else flat


def wrapped(value: Array) -> Array:
    """An integer modulo 2^32, from -2^31 on."""
    return (np.asarray(value).astype(np.int64) + 2**31) % 2**32 - 2**31


class Node:
    """A node's attributes, and the dimensions and dtypes at its ports."""

    def __init__(self, node: Mapping[str, Any], dims: Mapping[str, tuple[int, ...]], known: Mapping[int, Any]) -> None:
        self.dims = dims
        self.score_mod: Any = node.get("score_mod")
        self._node, self._known = node, known

    def __getitem__(self, name: str) -> Any:
        value = self._node["attributes"][name]
        return float(value) if value in ("inf", "-inf", "nan") else value

    def tensor(self, port: str) -> Mapping[str, Any]:
        return self._known[{**self._node["inputs"], **self._node["outputs"]}[port]]

    def dtype(self, port: str) -> str:
        return self.tensor(port)["data_type"]


def layout(node: Node) -> str:
    return LAYOUT[len(node.dims["input"])][0]
