"""Nodes that reduce, and those that change shapes alone."""

from collections.abc import Callable, Mapping

import numpy as np

from jaxdnn_reference.graph.tensors import Array, Node, from_memory, to_memory, wrapped
from jaxdnn_reference.reduce import reduce

WHOLE: dict[str, Callable[..., Array]] = {
    "ADD": np.sum,
    "MUL": np.prod,
    "MIN": np.min,
    "MAX": np.max,
    "AMAX": lambda v, **along: np.max(wrapped(np.abs(v)), **along),
    "NORM1": lambda v, **along: np.sum(np.abs(v), **along),
    "MUL_NO_ZEROS": lambda v, **along: np.prod(np.where(v == 0, 1, v), **along),
}


def reduction(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    y = node.dims["Y"]
    axes = tuple(axis for axis, n in enumerate(y) if n == 1)
    if x["input"].dtype == np.int64:
        return {"Y": WHOLE[node["mode"]](x["input"], axis=axes, keepdims=True)}
    return {"Y": reduce(x["input"], op=node["mode"].lower(), axis=axes, keepdims=True)}


def reshape(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    if node["reshape_mode"] == "LOGICAL":
        return {"Y": x["input"].reshape(node.dims["Y"])}
    tensors = node._known, node._node
    source, target = tensors[0][tensors[1]["inputs"]["input"]], tensors[0][tensors[1]["outputs"]["Y"]]
    return {"Y": from_memory(to_memory(x["input"], source), target)}


def transpose(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"Y": x["input"].transpose(node["permutation"])}


def sliced(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"Y": x["input"][tuple(slice(*part) for part in node["slices"])]}


def concatenate(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"Y": np.concatenate([x[f"inputs_{i}"] for i in range(len(x))], axis=node["axis"])}


OPS = {
    "reduction": reduction,
    "reshape": reshape,
    "transpose": transpose,
    "slice": sliced,
    "concatenate": concatenate,
}
