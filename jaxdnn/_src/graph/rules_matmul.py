"""The rule by which nodes around a matrix product become the arguments of `matmul`.

Behind it: factors, which are multiplied with each other and become alpha, a bias, a residual, an activation. Before it:
a transpose, a conversion, and factors that do not differ along K, which are taken out of the sum. So the product reads
what lies in memory, int8 and float8 too, and its scales follow it. Numbers with scales of blocks along K, for which no
kernel of this library has a product, are dequantised to bfloat16 before it, which holds them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.graph import products
from jaxdnn._src.graph.build import Operations
from jaxdnn._src.graph.execute import Numbers, Values
from jaxdnn._src.graph.nodes import Node, Run, is_held
from jaxdnn._src.graph.rules import EPILOGUE, Fusion, NotFused, Operand, Part, Rule, factor, summand
from jaxdnn._src.graph.tensors import Tensor, numpy_dtype

NAME = "matmul_epilogue"
BEFORE = ("transpose", "pointwise", "block_scale_dequantize")
# Products of numbers of float8 or float4 and scales of 8 bits have at most 8 bits, as bfloat16 has.
DEQUANTISED = "bfloat16"
# The dtypes that hold each number of a dtype.
_OF_8 = ("bfloat16", "float16", "float32", "float64")
HOLDERS = {
    "float8_e4m3fn": _OF_8,
    "float8_e5m2": _OF_8,
    "int8": _OF_8,
    "bfloat16": _OF_8[2:],
    "float16": _OF_8[2:],
    "float32": _OF_8[3:],
}
# Sums of so many products of int8 are in int32.
EXACT_TERMS = (2**31 - 1) // 2**14


def _part(mode: str, tensor: Tensor, other: Tensor, fusion: Fusion) -> Part:
    dim, own = other.dim or (), tensor.dim or ()
    vector = set(dim[:-1]) <= {1} and dim[-1:] in ((1,), own[-1:])
    fits = set(dim) <= {1} or all(n in (1, m) for n, m in zip(dim, own, strict=True))
    summed = fusion.bias is not None or fusion.residual is not None
    if not fits:
        return f"operand of sizes {dim}", None
    if mode == "MUL":
        return ("alpha behind a sum", None) if summed else ("alpha", other)
    if vector and fusion.bias is None:
        return "bias", other
    return ("second residual", None) if fusion.residual is not None else ("residual", other)


def _lacks(node: Node) -> str:
    given = [port for port in ("M_override", "N_override", "K_override") if port in node.inputs]
    return f"{given[0]}, the size of each matrix" if given else ""


def _before(graph: Operations, node: Node, taken: Sequence[Node]) -> tuple[dict[str, Operand], list[NotFused]]:
    """What the product reads at each port, and why that is not what its operands are computed from."""
    pairs = {port: _operand(graph, node, port, taken) for port in ("A", "B")}
    declined = [NotFused(NAME, (maker, node.name), reason) for _, maker, reason in pairs.values() if reason]
    return {port: operand for port, (operand, *_) in pairs.items()}, declined


def _operand(graph: Operations, node: Node, port: str, taken: Sequence[Node]) -> tuple[Operand, str, str]:
    """The furthest tensor from which a port's is computed by what `matmul` does itself.

    And the node that keeps it from being computed from a further one, and why.
    """
    start = node.inputs[port]
    best = at = Operand(start, start.data_type or "")
    while True:
        maker = graph.maker(at.tensor)
        if maker is None or maker.op not in BEFORE or not at.tensor.is_virtual or maker in taken:
            break
        if maker.op == "block_scale_dequantize":
            if reason := _not_dequantised(graph, node, maker, at):
                return best, maker.name, f"operand {port}: {reason}"
            dequantised = dataclasses.replace(at, data_type=DEQUANTISED, nodes=(maker, *at.nodes), scaled=maker)
            return dequantised, "", ""
        step = _step(graph, node, port, maker, at)
        if isinstance(step, str):
            return best, maker.name, f"operand {port}: {step}"
        at, source = step, step.tensor
        if all(n.op == "transpose" for n in at.nodes):
            best = at
        elif not source.is_virtual and _holds(start.data_type or "", source.data_type or ""):
            best = dataclasses.replace(at, data_type=source.data_type or "")
    if best.tensor is at.tensor:
        return best, "", ""
    what = "computed, too" if at.tensor.is_virtual else f"{at.tensor.data_type}, and read as {start.data_type}"
    return best, at.nodes[0].name, f"operand {port}: {at.tensor.name!r}, of which it is a multiple, is {what}"


def _not_dequantised(graph: Operations, node: Node, maker: Node, at: Operand) -> str:
    """Why numbers with scales of blocks are not taken up, but dequantised as they are without a rule; or nothing."""
    tensor, scale = at.tensor, maker.inputs["descale"]
    if len(graph.readers(tensor)) > 1:
        return f"{tensor.name!r} has {len(graph.readers(tensor))} readers"
    if not is_held(tensor):
        return f"{tensor.name!r} is of {tensor.data_type}, to which it is converted before it is read"
    if scale.data_type == "float32":
        return f"{DEQUANTISED} does not hold products with scales of {scale.data_type}"
    return f"it computes in float32, and 'matmul' would in {node.compute}" if node.compute != "float32" else ""


def _step(graph: Operations, node: Node, port: str, maker: Node, at: Operand) -> Operand | str:
    """What is before the node that makes an operand, or why it is not taken up."""
    tensor = at.tensor
    dim, rank = tensor.dim or (), len(tensor.dim or ())
    if len(graph.readers(tensor)) > 1:
        return f"{tensor.name!r} has {len(graph.readers(tensor))} readers"
    if maker.op == "transpose":
        source, swapped = maker.inputs["input"], (*range(rank - 2), rank - 1, rank - 2)
        if tuple(maker.attributes["permutation"]) != swapped:
            return f"{maker.name!r} moves more than the last two axes"
        if not is_held(tensor) and tensor.data_type != source.data_type:
            return f"{tensor.name!r} is of {tensor.data_type}, to which it is converted before it is read"
        return Operand(source, at.data_type, not at.turned, at.factors, (maker, *at.nodes))
    mode = maker.attributes["mode"]
    if mode not in ("MUL", "IDENTITY"):
        return f"'matmul' has no mode {mode} before it"
    if not is_held(tensor):
        return f"{tensor.name!r} is of {tensor.data_type}, to which it is converted before it is read"
    if maker.compute != node.compute:
        return f"{maker.name!r} computes in {maker.compute}, and 'matmul' would in {node.compute}"
    if mode == "IDENTITY":
        return Operand(maker.inputs["IN_0"], at.data_type, at.turned, at.factors, (maker, *at.nodes))
    summed = rank - 1 if (port == "A") != at.turned else rank - 2
    batch = (node.outputs["C"].dim or ())[: rank - 2]
    for source, other in (("IN_0", "IN_1"), ("IN_1", "IN_0")):
        source, other = maker.inputs[source], maker.inputs[other]
        sizes = other.dim or ()
        one = set(sizes) <= {1}
        fits = one or (sizes[summed] == 1 and all(n in (1, m) for n, m in zip(sizes, batch, strict=False)))
        if source.dim == dim and source is not other and fits:
            return Operand(source, at.data_type, at.turned, (*at.factors, (other, at.turned)), (maker, *at.nodes))
    return f"{maker.name!r} has no factor that is the same for all terms of a sum"


def _dtype(left: str, right: str, node: Node) -> str:
    """The dtype in which operands that are not both float8 are multiplied."""
    if left == right:
        terms = (node.inputs["A"].dim or (0,))[-1]
        whole = left == "int8" and node.compute != "int32"
        return node.compute if whole and (node.compute != "float32" or terms > EXACT_TERMS) else left
    holders = [v for v in ("bfloat16", "float16", "float32", "float64") if _holds(v, left) and _holds(v, right)]
    return holders[0]


def _holds(dtype: str, other: str) -> bool:
    return dtype == other or dtype in HOLDERS.get(other, ())


def _read(operand: Operand, values: Values, numbers: Numbers) -> Array:
    maker = operand.scaled
    return maker.kind.run(Run(maker, values, numbers))["Y"] if maker else values[operand.tensor.uid]


def _matmul(node: Run, fusion: Fusion, values: Values, numbers: Numbers) -> dict[str, Array]:
    compute = fusion.compute
    read = [fusion.operands[port] for port in ("A", "B")]
    a, b = (_read(o, values, numbers).astype(numpy_dtype(o.data_type)) for o in read)
    if not all(o.data_type.startswith("float8") for o in read):
        dtype = numpy_dtype(_dtype(read[0].data_type, read[1].data_type, node.node))
        a, b = a.astype(dtype), b.astype(dtype)
    options: dict[str, Any] = {"transpose_a": read[0].turned, "transpose_b": read[1].turned}
    options["activation"] = fusion.activation
    factors = [*read[0].factors, *read[1].factors, *((tensor, False) for tensor in fusion.alpha)]
    if factors:
        options["alpha"] = factor(factors, values, numbers, compute)
    dim = node.out("C").dim or ()
    if fusion.bias is not None:
        options["bias"] = jnp.broadcast_to(values[fusion.bias.uid].astype(compute).reshape(-1), dim[-1:])
    if fusion.residual is not None:
        residual = summand(values[fusion.residual.uid], a.dtype, compute)
        if residual.size == 1:
            residual = residual.reshape((1,) * len(dim))
        options["residual"] = jnp.broadcast_to(residual, dim)
    return {"C": products.multiplied(node, a, b, fusion.dtype, compute, **options)}


MATMUL = Rule(NAME, "matmul", "matmul", EPILOGUE, _part, _matmul, _before, _lacks)
