"""Nodes that pool."""

from collections.abc import Mapping
from typing import Any

from jaxdnn_reference.graph.tensors import Array, Node, layout
from jaxdnn_reference.pool import pool, pool_dgrad

POOLS = {"MAXPOOL": "max", "AVGPOOL_INCLUDE_PADDING": "average", "AVGPOOL_EXCLUDE_PADDING": "average_exclude_padding"}


def _pool(node: Node) -> dict[str, Any]:
    letters = layout(node)
    each = lambda name, default: tuple(node[name] or [default] * (len(letters) - 2))
    padding = tuple(zip(each("pre_padding", 0), each("post_padding", 0), strict=True))
    window = {"window": tuple(node["window"]), "stride": each("stride", 1), "padding": padding}
    return {**window, "mode": POOLS[node["mode"]], "layout": letters}


def resample(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    if "INDEX" not in node.dims:
        return {"Y": pool(x["input"], **_pool(node))}
    y, index = pool(x["input"], return_indices="tap", **_pool(node))
    return {"Y": y, "INDEX": index}


def resample_backward(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    return {"DX": pool_dgrad(x["loss"], x["input"], **_pool(node))}


OPS = {
    "resample": resample,
    "resample_backward": resample_backward,
}
