"""Which nodes of a graph become one call of an op, by the rules of `rules`.

A rule applies where the op computes the nodes' own formula in their compute dtype: every tensor between them is
virtual, is held in that dtype (see `execute`), and has no other reader. Terms of a sum, and factors, may be taken in
another order. Sums of int8 in int32 are followed by what computes in float32, as in the op.
Where a rule does not apply, what kept it from it is returned, for `explain`.
"""

import graphlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax import Array

from jaxdnn._src.graph.build import Operations
from jaxdnn._src.graph.execute import Numbers, Step, Values, single
from jaxdnn._src.graph.nodes import Node, Run, is_held
from jaxdnn._src.graph.pointwise import named_activation
from jaxdnn._src.graph.rules import ALONE, BATCH, CONV, DGRAD, INSTANCE, Fusion, NotFused, Rule, is_plain_relu, part_of
from jaxdnn._src.graph.rules_matmul import MATMUL
from jaxdnn._src.graph.tensors import Tensor, numpy_dtype

RULES = {rule.op: rule for rule in (CONV, DGRAD, MATMUL, BATCH, INSTANCE, *ALONE)}


def steps(graph: Operations, fusion: bool) -> tuple[list[Step], list[NotFused]]:
    """The steps of a plan in order, and what could not be fused and why."""
    order, taken, declined = graph.ordered(), {}, []
    covered: dict[Node, Node] = {}
    for node in order:
        rule = RULES.get(node.op)
        if rule is None or not fusion:
            continue
        found = Fusion([node])
        reason = f"{rule.call!r} has no {lacking}" if (lacking := rule.lacks(node)) else None
        if rule.before and not reason:
            found.operands, refused = rule.before(graph, node, tuple(covered))
            declined += refused
        while reason is None:
            reason = _extended(graph, rule, found, taken)
        if reason:
            declined.append(NotFused(rule.name, (node.name, *_followers(graph, found)), reason))
        if len(found.all) > 1:
            taken[found.nodes[-1]] = (rule, found)
            covered |= dict.fromkeys(found.all, found.nodes[-1])
    made = []
    for node in order:
        if node not in covered:
            made.append(single(node))
        elif covered[node] is node:
            made.append(_fused(*taken[node]))
    return _sorted(made), declined


def _followers(graph: Operations, fusion: Fusion) -> tuple[str, ...]:
    return tuple(node.name for node in graph.readers(fusion.last)[:1])


def _extended(graph: Operations, rule: Rule, fusion: Fusion, taken: Mapping[Node, Any]) -> str | None:
    """Takes up the next node; None if it did, else why not, or "" if nothing that the op has follows."""
    tensor, first = fusion.last, fusion.nodes[0]
    readers = graph.readers(tensor)
    follows = [node for node in readers if part_of(rule, node, tensor, fusion) is not None]
    if not follows:
        return ""
    if fusion.end:
        return f"{rule.call!r} ends with its {fusion.end}"
    if not tensor.is_virtual:
        return f"{tensor.name!r} is an output, so it is written before it is read"
    mask = _mask(rule, readers, tensor)
    if mask:
        readers = follows = [node for node in readers if node is not mask]
    if len(readers) > 1:
        return f"{tensor.name!r} has {len(readers)} readers"
    whole = first.op in ("conv_fprop", "matmul") and first.compute == "int32" and len(fusion.nodes) == 1
    if not is_held(tensor) and not (whole and tensor.data_type == "int32"):
        return f"{tensor.name!r} is of {tensor.data_type}, to which it is converted before it is read"
    node = follows[0]
    wanted = "float32" if whole else fusion.compute
    part, other = part_of(rule, node, tensor, fusion) or ("", None)
    if part not in rule.takes:
        return f"{rule.call!r} has no {part}"
    if node.compute != wanted:
        return f"{node.name!r} computes in {node.compute}, and {rule.call!r} would in {wanted}"
    if any(node in found.all for _, found in taken.values()):
        return f"{node.name!r} is fused with nodes before its other operand"
    if other is not None and _depends(graph, other, first, taken):
        return f"{other.name!r} is computed from the same result"
    if part == "activation":
        fusion.activation, fusion.end = named_activation(node.attributes["mode"], node.attributes), part
        fusion.mask = mask
    elif part == "gradient of a relu":
        fusion.relu, fusion.end = other, part
    elif part == "prior":
        fusion.residual = other
    elif part == "alpha" and other is not None:
        fusion.alpha = (*fusion.alpha, other)
    else:
        setattr(fusion, part, other)
    fusion.nodes.append(node)
    return None


def _mask(rule: Rule, readers: Sequence[Node], tensor: Tensor) -> Node | None:
    """The node that compares with 0 what a relu reads, if that is what the relu's result is compared with 0 for.

    A positive number stays positive where it is rounded to a dtype of the same exponents.
    """
    if "activation" not in rule.takes or len(readers) != 2:
        return None
    relu, mask = sorted(readers, key=lambda node: node.attributes.get("mode") == "CMP_GT")
    if relu.op != "pointwise" or relu.attributes["mode"] != "RELU_FWD" or not is_plain_relu(relu):
        return None
    if mask.attributes.get("mode") != "CMP_GT" or mask.inputs["IN_0"] is not tensor or mask.inputs["IN_1"].value != 0:
        return None
    result = relu.outputs["OUT_0"]
    same = is_held(result) or result.data_type in ("float32", "bfloat16", "float64")
    return mask if same and mask.compute == relu.compute else None


def _depends(graph: Operations, tensor: Tensor, node: Node, taken: Mapping[Node, Any]) -> bool:
    """Whether a tensor is computed from a node's results; what is fused needs all that any of its nodes reads."""
    makers = {t.uid: n for n in graph.nodes for t in n.outputs.values()}
    together = {n: found.all for _, found in taken.values() for n in found.all}
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


def _fused(rule: Rule, fusion: Fusion) -> Step:
    first = fusion.nodes[0]

    def run(values: Values, numbers: Numbers) -> dict[int, Array]:
        found = dict(rule.run(Run(first, values, numbers), fusion, values, numbers))
        main = next(iter(first.outputs))
        made = {first.outputs[port].uid: array for port, array in found.items() if port != main}
        if fusion.mask:
            made[fusion.mask.outputs["OUT_0"].uid] = found[main] > 0
        return {fusion.last.uid: found[main], **made}

    notes, copies = [], 0
    for port, operand in fusion.dequantised.items():
        data, scale = (operand.scaled.inputs[p].data_type for p in ("input", "descale"))  # pyright: ignore[reportOptionalMemberAccess]
        notes.append(
            f"operand {port} is dequantised to {operand.data_type} first, which holds its numbers: no kernel of this "
            f"library multiplies {data} with scales of {scale}"
        )
        copies += numpy_dtype(operand.data_type).itemsize * math.prod(operand.tensor.dim or ())
    return Step(tuple(fusion.all), (rule.call,), run, rule.name, first, tuple(notes), copies)


def _sorted(found: Sequence[Step]) -> list[Step]:
    """Steps behind those whose results they read; a fused one also needs what its later nodes read."""
    makers = {t.uid: step for step in found for t in step.outputs()}
    after = {step: {makers[t.uid] for t in step.inputs() if t.uid in makers} for step in found}
    return list(graphlib.TopologicalSorter(after).static_order())
