"""The function of attention's scores that pointwise nodes are, as cudnn-frontend's `score_mod` has it.

The nodes are built by the user's function, of the graph and of the tensor of scores (B, H, S, S'). Those that depend on
the scores belong to the node of attention, which reads the other tensors that they need at ports of its own. To
`jaxdnn.attention` they are a function of one score and its places.
"""

import dataclasses
import graphlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from jaxdnn._src.graph.errors import GraphError
from jaxdnn._src.graph.nodes import Inference, Node, Run, is_held, numpy_of, rounded
from jaxdnn._src.graph.pointwise import computed
from jaxdnn._src.graph.tensors import Tensor

PORT = "score_mod_"  # and a number: what the nodes read besides the scores
ARGUMENT = "score_mod"


@dataclasses.dataclass(eq=False)
class Body:
    """The nodes of a function of the scores.

    Attributes:
      score: the tensor of scores.
      result: what the function returns.
      nodes: those that depend on the scores.
      reads: the other tensors that they read, by the port of the node of attention.
    """

    score: Tensor
    result: Tensor
    nodes: list[Node]
    reads: dict[str, Tensor]

    @property
    def made(self) -> list[Tensor]:
        return [self.score, *(tensor for node in self.nodes for tensor in node.outputs.values())]

    def ordered(self) -> Iterable[Node]:
        makers = {tensor: node for node in self.nodes for tensor in node.outputs.values()}
        after = {node: {makers[t] for t in node.inputs.values() if t in makers} for node in self.nodes}
        try:
            return [*graphlib.TopologicalSorter(after).static_order()]
        except graphlib.CycleError as error:
            node = next(one for one in error.args[1] if isinstance(one, Node))
            expected = "made by nodes that do not read its own results"
            raise GraphError(node.where, "inputs", expected, node.name) from error


def captured(graph: Any, where: str, name: str, function: Any) -> Body:
    """What a user's function builds on a graph; the nodes that depend on the scores are taken out of it again."""
    expected = "None, or a function of the graph and a tensor of scores that returns one"
    if not callable(function):
        raise GraphError(where, ARGUMENT, expected, function)
    count = len(graph.nodes)
    score = graph.tensor_of_scores(f"{name}::scores")
    result = function(graph, score)
    if not isinstance(result, Tensor) or graph.tensors.get(result.uid) is not result:
        raise GraphError(where, ARGUMENT, expected, result)
    made, nodes = {score}, []
    for node in graph.nodes[count:]:
        if made & set(node.inputs.values()):
            nodes.append(node)
            made |= set(node.outputs.values())
    if result not in made:
        raise GraphError(where, ARGUMENT, "a function whose result depends on the scores", result.name)
    for node in nodes:
        if node.op != "pointwise":
            raise GraphError(node.where, ARGUMENT, f"made of pointwise nodes, for {name!r} computes it", node.op)
    graph.take_out(nodes, made)
    others = dict.fromkeys(t for node in nodes for t in node.inputs.values() if t not in made)
    return Body(score, result, nodes, {f"{PORT}{i}": tensor for i, tensor in enumerate(others)})


def infer(node: Inference, dim: Sequence[int], check: Callable[[Node], None]) -> None:
    """Infers and checks the nodes of a function of the scores."""
    body = node.node.body
    if body is None:
        return
    for port, tensor in body.reads.items():
        node.expect(node.node.inputs.get(port) is tensor, port, f"{tensor.name!r}, which {ARGUMENT} reads", None)
    for tensor in body.made:
        for attribute in tensor.inferred:
            setattr(tensor, attribute, None)
        tensor.inferred.clear()
    known = {"dim": tuple(dim), "data_type": node.node.compute, "stride": None}
    for attribute, value in known.items():
        setattr(body.score, attribute, value)
        body.score.inferred.add(attribute)
    for inner in body.ordered():
        inner.derived.clear()
        check(inner)
        inner.kind.infer(Inference(node.graph, inner))
    for tensor in body.made:
        if not tensor.is_virtual:
            raise GraphError(
                tensor.where, "is_virtual", f"True within {ARGUMENT}, whose scores are never written", False
            )
    node.expect(body.result.dim == tuple(dim), ARGUMENT, f"a function with a result {tuple(dim)}", body.result.dim)


def function_of(node: Run) -> tuple[Callable[..., Array], list[Array]]:
    """The function of a score, its sequence, head, query and key, and arrays; and the arrays."""
    body = node.node.body
    ports = [port for port, tensor in body.reads.items() if tensor.value is None]

    def function(score: Array, *rest: Array) -> Array:
        places, arrays = rest[:4], dict(zip(ports, rest[4:], strict=True))
        values: dict[Tensor, Any] = {body.score: score}
        for port, tensor in body.reads.items():
            values[tensor] = _element(tensor, arrays[port], places) if port in arrays else _number(tensor)
        for inner in body.ordered():
            (tensor,) = inner.outputs.values()
            found = computed(inner, [values[t] for t in inner.inputs.values()], places)
            values[tensor] = found if is_held(tensor) else rounded(found, numpy_of(tensor))
        return values[body.result].astype(score.dtype)

    return function, [node.x(port) for port in ports]


def _element(tensor: Tensor, array: Array, places: Sequence[Array]) -> Array:
    """The element of an array for a score: axes of size 1 are broadcast."""
    if array.size == 1:
        return array.reshape(())
    return array[tuple(place if size > 1 else 0 for size, place in zip(tensor.dim or (), places, strict=True))]


def _number(tensor: Tensor) -> Any:
    return np.asarray(tensor.value).astype(numpy_of(tensor))


def describe(body: Body, of_tensor: Callable[[Tensor], Any], of_node: Callable[..., Any]) -> dict[str, Any]:
    """The function in numbers, strings, lists and dicts; its tensors have uids of their own."""
    tensors = dict.fromkeys([*body.reads.values(), *body.made])
    uids = {tensor: i for i, tensor in enumerate(tensors, 1)}
    return {
        "tensors": [{**of_tensor(tensor), "uid": uid} for tensor, uid in uids.items()],
        "nodes": [of_node(node, uids) for node in body.nodes],
        "score": uids[body.score],
        "result": uids[body.result],
        "reads": {port: uids[tensor] for port, tensor in body.reads.items()},
    }


def read(
    found: Mapping[str, Any],
    ports: Mapping[str, Tensor],
    of_tensor: Callable[[Any], Tensor],
    of_node: Callable[..., Node],
) -> Body:
    """The function of what `describe` returned; `ports` are the tensors that the node of attention reads."""
    reads = {port: ports[port] for port in found["reads"]}
    outer = {int(uid): ports[port] for port, uid in found["reads"].items()}
    made = {known["uid"]: of_tensor(known) for known in found["tensors"] if known["uid"] not in outer}
    tensors = {**made, **outer}
    nodes = [of_node(known, tensors.__getitem__) for known in found["nodes"]]
    return Body(made[found["score"]], made[found["result"]], nodes, reads)
