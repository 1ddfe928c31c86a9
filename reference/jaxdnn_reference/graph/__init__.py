"""Operation graphs, evaluated from their plain description in NumPy.

A description is a dict of numbers, strings, lists and dicts, as `jaxdnn.graph.Graph.describe` returns it: `tensors`
with uid, dim, stride, data_type, is_virtual, value; `nodes` with op, inputs and outputs (ports to uids), attributes and
compute_data_type. The array of a tensor is its memory: axes by descending stride, or a row where there are gaps.

Every node is computed in float64 from what its inputs hold. A tensor in memory holds its dtype's nearest numbers, of
integers saturated. A virtual one of float16 or wider is never written and holds what was computed; other virtual
tensors are converted. int32 wraps where it is the compute dtype.

Sources: the cuDNN developer guide, "Graph API", and the headers of cudnn-frontend for names and defaults.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxdnn_reference.graph import attention, block_scale, norms, pointwise, products, random, resample, shapes
from jaxdnn_reference.graph.tensors import (
    HELD as HELD,
)
from jaxdnn_reference.graph.tensors import (
    Array,
    Description,
    Node,
    converted,
    from_memory,
    stored,
    to_memory,
    wrapped,
)

OPS: dict[str, Callable[[Node, Mapping[str, Array]], dict[str, Array]]] = {
    name: op
    for group in (pointwise, products, shapes, norms, resample, random, attention, block_scale)
    for name, op in group.OPS.items()
}


def evaluate(description: Description, arrays: Mapping[int, Any]) -> dict[int, Array]:
    """The arrays of a graph's outputs, by uid, of those of its inputs."""
    known = {t["uid"]: t for t in description["tensors"]}
    held = hold(description, arrays)
    made = [uid for node in description["nodes"] for uid in node["outputs"].values()]
    written = (known[uid] for uid in made if not known[uid]["is_virtual"])
    return {t["uid"]: to_memory(converted(held[t["uid"]], t["data_type"]), t) for t in written}


def hold(description: Description, arrays: Mapping[int, Any]) -> dict[int, Array]:
    """What every tensor holds, in float64 and in the shape of its dimensions."""
    known = {t["uid"]: t for t in description["tensors"]}
    held = {uid: np.full(t["dim"], float(t["value"]), np.float64) for uid, t in known.items() if t["value"] is not None}
    held = {uid: converted(v, known[uid]["data_type"]).astype(np.float64) for uid, v in held.items()}
    for uid, array in arrays.items():
        held[uid] = from_memory(np.asarray(array), known[uid]).astype(np.float64)
    waiting = list(description["nodes"])
    while waiting:
        node = next(n for n in waiting if all(uid in held for uid in n["inputs"].values()))
        waiting.remove(node)
        for port, value in run(node, known, {port: held[uid] for port, uid in node["inputs"].items()}).items():
            tensor = known[node["outputs"][port]]
            held[tensor["uid"]] = stored(value, tensor)
    return held


def run(node: Mapping[str, Any], known: Mapping[int, Any], x: Mapping[str, Array]) -> dict[str, Array]:
    """What a node computes of its inputs, by port."""
    dims = {port: tuple(known[uid]["dim"]) for port, uid in (*node["inputs"].items(), *node["outputs"].items())}
    whole = node["compute_data_type"] == "int32"
    if whole and node["op"] in ("pointwise", "reduction"):  # products of 62 bits; int64 wraps at a multiple of 2^32
        x = {port: value.astype(np.int64) for port, value in x.items()}
    with np.errstate(all="ignore"):
        found = OPS[node["op"]](Node(node, dims, known), x)
        if whole:
            found = {port: wrapped(value) for port, value in found.items()}
    return {port: np.asarray(value, np.float64).reshape(dims[port]) for port, value in found.items() if port in dims}
