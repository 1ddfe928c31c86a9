"""Graphs: their tensors and nodes, validation with inference, and their plain description."""

import collections
import graphlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from jaxdnn._src.core.compat import Tracer
from jaxdnn._src.graph import attention, block_scale, norms, pointwise, products, random, resample, score, shapes  # noqa: F401  # register kinds
from jaxdnn._src.graph.errors import GraphError
from jaxdnn._src.graph.methods import Methods
from jaxdnn._src.graph.nodes import KINDS, Inference, Node
from jaxdnn._src.graph.tensors import (
    ADDRESSABLE,
    COMPUTE,
    INT64,
    Tensor,
    check_number,
    check_reordering,
    dtype_of,
    is_addressable,
    packed,
)
from jaxdnn._version import __version__

FORMAT = 1  # of the description; another is refused
REORDERED = (("block_scale_dequantize", "descale"), ("block_scale_quantize", "scale"))


class Operations(Methods):
    """The tensors and the nodes of a graph, their validation, and their description; see `jaxdnn.graph.Graph`."""

    def __init__(
        self,
        name: str = "graph",
        *,
        io_data_type: Any = None,
        intermediate_data_type: Any = "float32",
        compute_data_type: Any = "float32",
    ) -> None:
        where = f"graph {name!r}"
        if not isinstance(name, str):
            raise GraphError(where, "name", "a string", name)
        self.name = name
        self.io_data_type = None if io_data_type is None else dtype_of(where, "io_data_type", io_data_type)
        self.intermediate_data_type = dtype_of(where, "intermediate_data_type", intermediate_data_type)
        self.compute_data_type = dtype_of(where, "compute_data_type", compute_data_type, COMPUTE)
        self.tensors: dict[int, Tensor] = {}
        self.nodes: list[Node] = []
        self._valid = False

    @property
    def where(self) -> str:
        return f"graph {self.name!r}"

    def __repr__(self) -> str:
        lines = [f"Graph({self.name!r})", *(f"  {tensor!r}" for tensor in self.tensors.values())]
        return "\n".join([*lines, *(f"  {node!r}" for node in self.nodes)])

    # Tensors

    def tensor(
        self,
        dim: Sequence[int],
        stride: Sequence[int] | None = None,
        data_type: Any = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        name: str = "",
        uid: int | None = None,
        reordering_type: str = "NONE",
    ) -> Tensor:
        """A tensor of these sizes; without strides it is packed, in the order of the sizes."""
        return self._tensor(
            name,
            uid,
            dim=dim,
            stride=stride,
            data_type=data_type,
            is_virtual=is_virtual,
            is_pass_by_value=is_pass_by_value,
            reordering_type=reordering_type,
        )

    def tensor_like(self, input: Any, name: str = "") -> Tensor:
        """A tensor with the sizes and dtype of an array, or a copy of another tensor's properties."""
        if isinstance(input, Tensor):
            like = {"dim": input.dim, "stride": input.stride, "data_type": input.data_type}
            kinds = {"is_virtual": input.is_virtual, "is_pass_by_value": input.is_pass_by_value}
            return self._tensor(name, None, **like, **kinds, reordering_type=input.reordering_type)
        if not (hasattr(input, "shape") and hasattr(input, "dtype")):
            raise GraphError(self.where, "input", "an array or a tensor", input)
        return self._tensor(name, None, dim=input.shape or (1,), data_type=input.dtype)

    def tensor_scalar(self, value: Any, scalar_type: Any = None, name: str = "") -> Tensor:
        """A number that is known now, as a tensor of one element."""
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise GraphError(self.where, "value", "a number", value)
        data_type = "int32" if isinstance(value, int | np.integer) else "float32"
        value = value.item() if isinstance(value, np.number) else value
        data_type = data_type if scalar_type is None else scalar_type
        return self._tensor(name, None, dim=(1,), data_type=data_type, value=value)

    def _tensor(self, name: str, uid: int | None, **properties: Any) -> Tensor:
        if uid is None:
            uid = max((u for u in self.tensors if u < INT64[1]), default=0) + 1
        uid = self._checked_uid(uid)
        self._check_name("tensor", name)
        tensor = Tensor(self, uid, name or f"tensor_{uid}", **properties)
        self.tensors[uid] = tensor
        self.changed()
        return tensor

    def tensor_of_scores(self, name: str) -> Tensor:
        """A tensor that a function of attention's scores is called with."""
        return self._tensor(name, None, is_virtual=True)

    def take_out(self, nodes: Sequence[Node], tensors: Collection[Tensor]) -> None:
        """Removes nodes, and tensors that they read and made, which belong to a node of attention from now on."""
        self.nodes = [node for node in self.nodes if node not in nodes]
        self.tensors = {uid: tensor for uid, tensor in self.tensors.items() if tensor not in tensors}

    def _check_name(self, what: str, name: Any) -> None:
        if not isinstance(name, str):
            raise GraphError(self.where, f"{what} name", "a string", name)

    def _checked_uid(self, uid: Any) -> int:
        if isinstance(uid, bool) or not isinstance(uid, int | np.integer) or not INT64[0] <= uid <= INT64[1]:
            raise GraphError(self.where, "uid", "an integer of 64 bits", uid)
        if uid in self.tensors:
            raise GraphError(self.where, "uid", f"one that {self.tensors[int(uid)].where} does not have", uid)
        return int(uid)

    def change_uid(self, tensor: Tensor, uid: int) -> None:
        if not isinstance(uid, int | np.integer) or uid != tensor.uid:
            new = self._checked_uid(uid)
            self.tensors = {(new if t is tensor else u): t for u, t in self.tensors.items()}
            tensor.uid = new
        self.changed()

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """The tensor with this uid."""
        if not isinstance(uid, int | np.integer) or uid not in self.tensors:
            raise GraphError(self.where, "uid", f"one of {', '.join(map(str, self.tensors))}", uid)
        return self.tensors[uid]

    def find(self, key: Any) -> Tensor:
        """A tensor by itself, its uid or its name."""
        if isinstance(key, Tensor):
            if self.tensors.get(key.uid) is not key:
                raise GraphError(self.where, "tensor", "one of this graph", key.name)
            return key
        if isinstance(key, int | np.integer) and not isinstance(key, bool):
            return self.query_tensor_attributes_of_uid(int(key))
        named = [tensor for tensor in self.tensors.values() if isinstance(key, str) and tensor.name == key]
        if len(named) != 1:
            raise GraphError(self.where, "tensor", f"one of {', '.join(t.name for t in self.tensors.values())}", key)
        return named[0]

    # Nodes

    def _node(
        self,
        op: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        attributes: Mapping[str, Any] | None = None,
        compute_data_type: Any = None,
        name: str = "",
        score_mod: Any = None,
    ) -> Any:
        """Adds a node and returns its outputs: virtual tensors, to be set as outputs where they are to be read."""
        name = self.name_of(name, op)
        where = f"node {name!r} ({op})"
        body = None if score_mod is None else score.captured(self, where, name, score_mod)
        inputs = {**inputs, **(body.reads if body else {})}
        compute = (
            self.compute_data_type
            if compute_data_type is None
            else dtype_of(where, "compute_data_type", compute_data_type, COMPUTE)
        )
        found = {port: self._operand(where, port, v, compute) for port, v in inputs.items() if v is not None}
        results = {port: self._tensor(f"{name}::{port}", None, is_virtual=True) for port in outputs}
        given = {key: _known(where, key, value) for key, value in (attributes or {}).items()}
        self.nodes.append(Node(name, op, found, results, {**KINDS[op].attributes, **given}, compute, body=body))
        self.changed()
        made = tuple(results.values())
        return made[0] if len(made) == 1 else made

    def name_of(self, name: Any, op: str) -> str:
        """A node's name: that which was given, or the operation with the number of the node."""
        self._check_name("node", "" if name is None else name)
        return name or f"{op}_{len(self.nodes)}"

    def _operand(self, where: str, port: str, value: Any, compute: str) -> Tensor:
        if isinstance(value, int | float | np.number) and not isinstance(value, bool):
            wide = compute == "float64" and not isinstance(value, int | np.integer)
            return self.tensor_scalar(value, compute if wide else None)
        if not isinstance(value, Tensor):
            raise GraphError(where, port, "a tensor or a number", value)
        if self.tensors.get(value.uid) is not value:
            raise GraphError(where, port, f"a tensor of graph {self.name!r}", value.name)
        return value

    # Validation

    def changed(self) -> None:
        self._valid = False

    def validate(self) -> Self:
        """Infers what was left open, and checks the graph; raises GraphError, which names node and attribute."""
        if not self.nodes:
            raise GraphError(self.where, "nodes", "at least one operation", "none")
        self.infer()
        if all(tensor.is_virtual for node in self.nodes for tensor in node.outputs.values()):
            raise GraphError(self.where, "outputs", "at least one tensor that set_output(True) marks", "none")
        return self

    def infer(self) -> None:
        """Infers what was left open and checks every node, as `validate`; there need be no node and no output yet."""
        if self._valid:
            return
        for tensor in self.tensors.values():
            for attribute in tensor.inferred:
                setattr(tensor, attribute, None)
            tensor.inferred.clear()
        self._check_names()
        order = self.ordered()
        made = {t.uid for node in self.nodes for t in node.outputs.values()}
        for tensor in self.tensors.values():
            if tensor.uid not in made:
                self._check_given(tensor)
            elif tensor.value is not None or tensor.is_pass_by_value:
                attribute = "is_pass_by_value" if tensor.value is None else "value"
                raise GraphError(tensor.where, attribute, "left out, for a node makes it", getattr(tensor, attribute))
        for node in order:
            node.derived.clear()
            self.check_node(node)
            node.kind.infer(Inference(self, node))
        self._valid = True

    def _check_names(self) -> None:
        for what, names in (
            ("tensor", [t.name for t in self.tensors.values()]),
            ("node", [n.name for n in self.nodes]),
        ):
            twice = {name for name, count in collections.Counter(names).items() if count > 1}
            if twice:
                raise GraphError(self.where, f"{what} name", "different for each", min(twice))

    def _check_given(self, tensor: Tensor) -> None:
        """A tensor that no node makes: from the variant pack, by value, or a constant."""
        if tensor.is_virtual:
            raise GraphError(tensor.where, "is_virtual", "False, for no node makes it", True)
        if tensor.dim is None:
            raise GraphError(tensor.where, "dim", "set, for no node makes it", None)
        if tensor.data_type is None:
            if self.io_data_type is None:
                raise GraphError(tensor.where, "data_type", "set, for the graph has no io_data_type", None)
            tensor.data_type = self.io_data_type
            tensor.inferred.add("data_type")
        if tensor.stride is None:
            tensor.stride = packed(tensor.dim)
            tensor.inferred.add("stride")
        if len(tensor.stride) != len(tensor.dim):
            raise GraphError(tensor.where, "stride", f"{len(tensor.dim)} strides, one for each axis", tensor.stride)
        if not is_addressable(tensor.dim, tensor.stride):
            raise GraphError(tensor.where, "stride", ADDRESSABLE, tensor.stride)
        check_reordering(tensor.where, "reordering_type", tensor)
        if (tensor.is_pass_by_value or tensor.value is not None) and not set(tensor.dim) <= {1}:
            raise GraphError(tensor.where, "dim", "1 along each axis, for it is one number", tensor.dim)
        if tensor.value is not None:
            check_number(tensor.where, "value", tensor.value, tensor.data_type)

    def check_node(self, node: Node) -> None:
        """Checks what does not depend on the kind of node: its ports, attributes and compute dtype."""
        kind = node.kind
        if node.body is not None and not kind.scored:
            raise GraphError(node.where, score.ARGUMENT, "None, for it has no scores", node.body.result.name)
        if node.compute not in kind.compute:
            raise GraphError(node.where, "compute_data_type", f"one of {', '.join(kind.compute)}", node.compute)
        many = any(port.endswith("*") for port in kind.inputs)
        for side, ports, named in (("inputs", kind.inputs, node.inputs), ("outputs", kind.outputs, node.outputs)):
            for port in ports:
                if port[-1] not in "?*" and port not in named:
                    raise GraphError(node.where, port, "given", None)
            allowed = [port.rstrip("?*") for port in ports]
            allowed += node.body.reads if node.body and side == "inputs" else ()
            for port in named:
                if port not in allowed and not (many and side == "inputs"):
                    raise GraphError(node.where, side, f"among {', '.join(allowed)}", port)
        if many and not node.inputs:
            raise GraphError(node.where, "inputs", "at least one", "none")
        for name in node.attributes:
            if name not in kind.attributes:
                raise GraphError(node.where, "attributes", f"among {', '.join(kind.attributes)}", name)
        for port, tensor in (*node.inputs.items(), *node.outputs.items()):
            if tensor.reordering_type != "NONE" and (node.op, port) not in REORDERED:
                raise GraphError(
                    node.where,
                    port,
                    "of reordering_type NONE, for only scales of blocks are reordered",
                    tensor.reordering_type,
                )
        for port, tensor in node.inputs.items():
            if port in kind.static and tensor.value is None and not tensor.is_pass_by_value:
                raise GraphError(node.where, port, "a number, or a tensor that is passed by value", tensor.name)

    def ordered(self) -> list[Node]:
        """The nodes, each behind those whose results it reads."""
        makers: dict[int, Node] = {}
        for node in self.nodes:
            for tensor in node.outputs.values():
                if tensor.uid in makers:
                    raise GraphError(
                        node.where, "outputs", f"a tensor that {makers[tensor.uid].name!r} does not make", tensor.name
                    )
                makers[tensor.uid] = node
        after = {node: {makers[t.uid] for t in node.inputs.values() if t.uid in makers} for node in self.nodes}
        try:
            return list(graphlib.TopologicalSorter(after).static_order())
        except graphlib.CycleError as error:
            node = error.args[1][0]
            raise GraphError(
                node.where, "inputs", "made by nodes that do not read its own results", node.name
            ) from error

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that a variant pack has to give, in the order in which they were made."""
        made = {t.uid for node in self.nodes for t in node.outputs.values()}
        read = {t.uid for node in self.nodes for t in node.inputs.values()}
        return tuple(t for u, t in self.tensors.items() if u not in made and u in read and t.value is None)

    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors that a plan returns, in the order of their nodes."""
        return tuple(t for node in self.nodes for t in node.outputs.values() if not t.is_virtual)

    def maker(self, tensor: Tensor) -> Node | None:
        """The node that makes a tensor; None of an input or a constant."""
        return next((node for node in self.nodes if any(t is tensor for t in node.outputs.values())), None)

    def readers(self, tensor: Tensor) -> list[Node]:
        return [node for node in self.nodes if any(t is tensor for t in node.inputs.values())]

    # Description

    def describe(self) -> dict[str, Any]:
        """The graph in numbers, strings, lists and dicts, with all that was inferred; the definition evaluates it."""
        self.validate()
        return {
            "format": FORMAT,
            "jaxdnn": __version__,
            "name": self.name,
            "io_data_type": self.io_data_type,
            "intermediate_data_type": self.intermediate_data_type,
            "compute_data_type": self.compute_data_type,
            "tensors": [_of_tensor(tensor) for tensor in self.tensors.values()],
            "nodes": [_of_node(node) for node in self.nodes],
        }

    def to_json(self, **how: Any) -> str:
        """The description as JSON; `Graph.from_json` reads it back."""
        return json.dumps(self.describe(), allow_nan=False, **how)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The graph of a description; one of another format is refused."""
        try:
            found = json.loads(text)
        except (TypeError, ValueError) as error:
            raise GraphError("graph", "text", f"the JSON of a graph ({error})", text) from error
        return cls.from_description(found)

    @classmethod
    def from_description(cls, found: Any) -> Self:
        """The graph of what `describe` returned; one of another format is refused."""
        if not isinstance(found, Mapping) or found.get("format") != FORMAT:
            got = found.get("format") if isinstance(found, Mapping) else found
            raise GraphError("graph", "format", f"{FORMAT}, the one of jaxdnn {__version__}", got)
        try:
            graph = cls._read(found)
        except GraphError:
            raise
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise GraphError("graph", "description", "as `describe` returns it", repr(error)) from error
        return graph.validate()

    @classmethod
    def _read(cls, found: Mapping[str, Any]) -> Self:
        defaults = ("io_data_type", "intermediate_data_type", "compute_data_type")
        graph = cls(found["name"], **{name: found[name] for name in defaults})
        for known in found["tensors"]:
            graph._tensor(known["name"], known["uid"], **_read_properties(known))
        for known in found["nodes"]:
            node = graph._read_node(known, graph.find)
            graph.nodes.append(node)
            if score.ARGUMENT in known:
                of_tensor = lambda inner: Tensor(graph, inner["uid"], inner["name"], **_read_properties(inner))
                node.body = score.read(known[score.ARGUMENT], node.inputs, of_tensor, graph._read_node)
        graph.changed()
        return graph

    def _read_node(self, known: Mapping[str, Any], find: Callable[[int], Tensor]) -> Node:
        op = known["op"]
        self._check_name("node", known["name"])
        if op not in KINDS:
            raise GraphError("graph", "op", f"one of {', '.join(KINDS)}", op)
        inputs, outputs = ({port: find(uid) for port, uid in known[side].items()} for side in ("inputs", "outputs"))
        attributes = {key: _frozen(_number(value)) for key, value in known["attributes"].items()}
        where = f"node {known['name']!r} ({op})"
        compute = dtype_of(where, "compute_data_type", known["compute_data_type"], COMPUTE)
        return Node(known["name"], op, inputs, outputs, {**KINDS[op].attributes, **attributes}, compute)


_PROPERTIES = ("dim", "stride", "data_type", "is_virtual", "is_pass_by_value", "value", "reordering_type")


def _read_properties(known: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _number(known[key]) for key in _PROPERTIES if key in known}


def _of_tensor(tensor: Tensor) -> dict[str, Any]:
    named = {"uid": tensor.uid, "name": tensor.name}
    properties = {key: getattr(tensor, key) for key in _PROPERTIES}
    return {**named, **{key: _thawed(value) for key, value in properties.items()}}


def _of_node(node: Node, uids: Mapping[Tensor, int] | None = None) -> dict[str, Any]:
    """A node; `uids` are those of its tensors if they are not the tensors' own."""
    ports = lambda named: {port: uids[tensor] if uids else tensor.uid for port, tensor in named.items()}
    body = {score.ARGUMENT: score.describe(node.body, _of_tensor, _of_node)} if node.body else {}
    return {
        "name": node.name,
        "op": node.op,
        "inputs": ports(node.inputs),
        "outputs": ports(node.outputs),
        "attributes": {key: _thawed(value) for key, value in node.attributes.items()},
        "derived": {key: _thawed(value) for key, value in node.derived.items()},
        "compute_data_type": node.compute,
        **body,
    }


def _known(where: str, attribute: str, value: Any) -> Any:
    """An attribute, which may be an array that is known."""
    if isinstance(value, Tracer):
        raise GraphError(where, attribute, "known when the graph is built, not an array that is traced", value)
    return _frozen(np.asarray(value) if isinstance(value, jax.Array) else value)


def _frozen(value: Any) -> Any:
    """Lists and arrays as tuples, all the way down, and NumPy's numbers as Python's."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    return value.item() if isinstance(value, np.generic) else value


NOT_FINITE = ("inf", "-inf", "nan")  # JSON has no such numbers, so a description has these words


def _thawed(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(map(_thawed, value)) if isinstance(value, tuple) else value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value
