"""Nodes that draw random numbers."""

from collections.abc import Mapping

from jaxdnn_reference.dropout import dropout_mask
from jaxdnn_reference.graph.tensors import Array, Node


def rng(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    key, rate = int(x["seed"].item()) % 2**64, 1 - node["bernoulli_probability"]
    return {"Y": dropout_mask(key, node.dims["Y"], rate=rate, offset=int(x["offset"].item()) % 2**64)}


OPS = {
    "rng": rng,
}
