"""The rules by which several nodes become one call of an op.

A rule applies where the op computes the nodes' own formula in their compute dtype: every tensor between them is
virtual, is held in that dtype (see `execute`), and has no other reader. Terms of a sum may be added in another order.
Sums of int8 in int32 are followed by what computes in float32, as in the op.
Where a rule does not apply, what kept it from it is returned, for `explain`.
"""

import dataclasses
import graphlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from jaxdnn._src.graph import norms, products
from jaxdnn._src.graph.build import Operations
from jaxdnn._src.graph.execute import Numbers, Step, Values, single
from jaxdnn._src.graph.nodes import Node, Run, is_held, numpy_of
from jaxdnn._src.graph.pointwise import FORWARD, named_activation
from jaxdnn._src.graph.tensors import Tensor


@dataclasses.dataclass(frozen=True)
class NotFused:
    """Nodes that follow one another and are not joined, the rule that would have joined them, and why it did not."""

    rule: str
    nodes: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{' + '.join(self.nodes)} by rule {self.rule!r}: {self.reason}"


@dataclasses.dataclass
class Epilogue:
    """What is taken up behind a node, in the order of the chain."""

    nodes: list[Node]
    alpha: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: Any = None
    done: bool = False  # behind an activation nothing can follow

    @property
    def compute(self) -> str:
        """The compute dtype of what is taken up."""
        return self.nodes[-1].compute

    @property
    def last(self) -> Tensor:
        node = self.nodes[-1]
        return next(iter(node.outputs.values()))


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule: the operation it begins with, what it may take up, the op that is called, and how."""

    name: str
    op: str
    call: str
    takes: tuple[str, ...]
    run: Callable[[Run, Epilogue, Values, Numbers], Mapping[str, Array]]


def steps(graph: Operations, fusion: bool) -> tuple[list[Step], list[NotFused]]:
    """The steps of a plan in order, and what could not be fused and why."""
    order, taken, declined = graph.ordered(), {}, []
    for node in order:
        rule = RULES.get(node.op)
        if rule is None or not fusion:
            continue
        epilogue = Epilogue([node])
        while (reason := _extended(graph, rule, epilogue, taken)) is None:
            pass
        if reason:
            declined.append(NotFused(rule.name, (node.name, *_followers(graph, epilogue)), reason))
        if len(epilogue.nodes) > 1:
            taken[epilogue.nodes[-1]] = (rule, epilogue)
    covered = {node: last for last, (_, epilogue) in taken.items() for node in epilogue.nodes}
    found = []
    for node in order:
        if node not in covered:
            found.append(single(node))
        elif covered[node] is node:
            found.append(_fused(*taken[node]))
    return _sorted(found), declined


def _followers(graph: Operations, epilogue: Epilogue) -> tuple[str, ...]:
    return tuple(node.name for node in graph.readers(epilogue.last)[:1])


def _extended(graph: Operations, rule: Rule, epilogue: Epilogue, taken: Mapping[Node, Any]) -> str | None:
    """Takes up the next node; None if it did, else why not, or "" if nothing that the op has follows."""
    tensor, first = epilogue.last, epilogue.nodes[0]
    readers = graph.readers(tensor)
    follows = [node for node in readers if _part(node, tensor, rule, epilogue) is not None]
    if not follows:
        return ""
    if epilogue.done:
        return f"{rule.call!r} ends with its activation"
    if not tensor.is_virtual:
        return f"{tensor.name!r} is an output, so it is written before it is read"
    if len(readers) > 1:
        return f"{tensor.name!r} has {len(readers)} readers"
    whole = first.op == "conv_fprop" and first.compute == "int32" and len(epilogue.nodes) == 1
    if not is_held(tensor) and not (whole and tensor.data_type == "int32"):
        return f"{tensor.name!r} is of {tensor.data_type}, to which it is converted before it is read"
    node = follows[0]
    wanted = "float32" if whole else epilogue.compute
    if node.compute != wanted:
        return f"{node.name!r} computes in {node.compute}, and {rule.call!r} would in {wanted}"
    part, other = _part(node, tensor, rule, epilogue) or ("", None)
    if part not in rule.takes:
        return f"{rule.call!r} has no {part}"
    if any(node in e.nodes for _, e in taken.values()):
        return f"{node.name!r} is fused with nodes before its other operand"
    if other is not None and _depends(graph, other, first, taken):
        return f"{other.name!r} is computed from the same result"
    if part == "activation":
        epilogue.activation, epilogue.done = named_activation(node.attributes["mode"], node.attributes), True
    else:
        setattr(epilogue, part, other)
    epilogue.nodes.append(node)
    return None


def _part(node: Node, tensor: Tensor, rule: Rule, epilogue: Epilogue) -> tuple[str, Tensor | None] | None:
    """What a node behind `tensor` would be to an op, alpha for example, and its other operand.

    None of what is not pointwise; in words of what no op takes up.
    """
    if node.op != "pointwise":
        return None
    mode, inputs = node.attributes["mode"], list(node.inputs.values())
    if mode in FORWARD:
        return "activation", None
    if mode not in ("ADD", "MUL") or sum(t is tensor for t in inputs) != 1:
        return f"mode {mode}", None
    other = inputs[1] if inputs[0] is tensor else inputs[0]
    dim, own = other.dim or (), tensor.dim or ()
    channel = len(own) > 2 and dim == (1, own[1], *(1 for _ in own[2:]))
    if mode == "MUL":
        first = epilogue.bias is None and epilogue.residual is None and epilogue.alpha is None
        if set(dim) <= {1}:
            return ("alpha", other) if first else ("alpha behind a sum or another alpha", None)
        return ("scale for each channel" if channel else "factor of more than one element"), None
    if channel and dim != own and epilogue.bias is None:
        return "bias", other
    if dim == own and epilogue.residual is None:
        return "residual", other
    return ("second bias or residual" if channel or dim == own else f"summand of sizes {dim}"), None


def _depends(graph: Operations, tensor: Tensor, node: Node, taken: Mapping[Node, Any]) -> bool:
    """Whether a tensor is computed from a node's results; what is fused needs all that any of its nodes reads."""
    makers = {t.uid: n for n in graph.nodes for t in n.outputs.values()}
    together = {n: epilogue.nodes for _, epilogue in taken.values() for n in epilogue.nodes}
    open_, seen = [tensor], set()
    while open_:
        maker = makers.get(open_.pop().uid)
        if maker is node:
            return True
        if maker is not None and maker.name not in seen:
            group = together.get(maker, [maker])
            seen |= {n.name for n in group}
            open_ += [t for n in group for t in n.inputs.values() if makers.get(t.uid) not in group]
    return False


def _fused(rule: Rule, epilogue: Epilogue) -> Step:
    first = epilogue.nodes[0]

    def run(values: Values, numbers: Numbers) -> dict[int, Array]:
        found = dict(rule.run(Run(first, values, numbers), epilogue, values, numbers))
        main = next(iter(first.outputs))
        made = {first.outputs[port].uid: array for port, array in found.items() if port != main}
        return {epilogue.last.uid: found[main], **made}

    return Step(tuple(epilogue.nodes), (rule.call,), run, rule.name)


def _sorted(found: Sequence[Step]) -> list[Step]:
    """Steps behind those whose results they read; a fused one also needs what its later nodes read."""
    makers = {t.uid: step for step in found for t in step.outputs()}
    after = {step: {makers[t.uid] for t in step.inputs() if t.uid in makers} for step in found}
    return list(graphlib.TopologicalSorter(after).static_order())


def _dtype(epilogue: Epilogue) -> np.dtype:
    return np.dtype(epilogue.compute) if is_held(epilogue.last) else numpy_of(epilogue.last)


def _conv(node: Run, epilogue: Epilogue, values: Values, numbers: Numbers) -> dict[str, Array]:
    options: dict[str, Any] = {"activation": epilogue.activation}
    compute = epilogue.compute
    if epilogue.alpha is not None:
        options["alpha"] = values[epilogue.alpha.uid].astype(compute).reshape(())
        if epilogue.alpha.uid in numbers:
            options["alpha"] = float(numbers[epilogue.alpha.uid])
    if epilogue.bias is not None:
        options["bias"] = values[epilogue.bias.uid].astype(compute).reshape(-1)
    if epilogue.residual is not None:
        options["residual"] = _summand(values[epilogue.residual.uid], node, "image", compute)
    return {"Y": products.fused_conv(node, _dtype(epilogue), **options)}


def _summand(residual: Array, node: Run, port: str, compute: str) -> Array:
    """A residual as ops take it: floats in the input's dtype, or in the compute dtype."""
    same = residual.dtype == numpy_of(node.tensor(port)) and residual.dtype.kind not in "iub"
    return residual if same else residual.astype(compute)


def _batch(node: Run, epilogue: Epilogue, values: Values, numbers: Numbers) -> dict[str, Array]:
    del numbers
    residual = None if epilogue.residual is None else values[epilogue.residual.uid]
    residual = None if residual is None else _summand(residual, node, "input", epilogue.compute)
    return norms.batch(node, products.wide_or(_dtype(epilogue), epilogue.compute), epilogue.activation, residual)


def _instance(node: Run, epilogue: Epilogue, values: Values, numbers: Numbers) -> dict[str, Array]:
    del values, numbers
    return norms.instance(node, products.wide_or(_dtype(epilogue), epilogue.compute), epilogue.activation)


RULES = {
    rule.op: rule
    for rule in (
        Rule("conv_epilogue", "conv_fprop", "conv", ("alpha", "bias", "residual", "activation"), _conv),
        Rule("batch_norm_epilogue", "batchnorm", "batch_norm", ("residual", "activation"), _batch),
        Rule("instance_norm_epilogue", "instancenorm", "instance_norm", ("activation",), _instance),
    )
}
