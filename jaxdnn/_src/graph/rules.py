"""The rules by which nodes become one call of an op: what each takes up behind its first node, and how it is called.

`fuse` applies them; the rule of matrix products, which takes up what its operands are made of too, is in
`rules_matmul`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from jaxdnn._src.graph import norms, products
from jaxdnn._src.graph.build import Operations
from jaxdnn._src.graph.execute import Numbers, Values
from jaxdnn._src.graph.nodes import Node, Run, is_held, numpy_of
from jaxdnn._src.graph.pointwise import FORWARD, named_activation
from jaxdnn._src.graph.tensors import Tensor

REDUCTIONS = ("reduction", "genstats")


@dataclasses.dataclass(frozen=True)
class NotFused:
    """Nodes that follow one another and are not joined, the rule that would have joined them, and why it did not."""

    rule: str
    nodes: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"{' + '.join(self.nodes)} by rule {self.rule!r}: {self.reason}"


@dataclasses.dataclass
class Operand:
    """What a product reads instead of the tensor at its port, which is computed from it.

    Attributes:
      tensor: in memory, or the tensor at the port itself.
      data_type: the dtype in which it is read.
      turned: whether its last two axes are swapped.
      factors: the tensors that it is multiplied by, each with whether its last two axes are swapped.
      nodes: those that are taken up, in order.
      scaled: the node that makes the tensor of numbers of few bits and scales of blocks, if it is taken up too.
    """

    tensor: Tensor
    data_type: str
    turned: bool = False
    factors: tuple[tuple[Tensor, bool], ...] = ()
    nodes: tuple[Node, ...] = ()
    scaled: Node | None = None


@dataclasses.dataclass
class Fusion:
    """A node with what is taken up behind it, in the order of the chain, and before it."""

    nodes: list[Node]
    operands: dict[str, Operand] = dataclasses.field(default_factory=dict)
    alpha: tuple[Tensor, ...] = ()
    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: Any = None
    relu: Tensor | None = None  # what a gradient is 0 behind, where it is not positive
    mask: Node | None = None  # what compares with 0 what the activation, a relu, reads
    end: str = ""  # what nothing can follow

    @property
    def before(self) -> list[Node]:
        return [node for operand in self.operands.values() for node in operand.nodes]

    @property
    def dequantised(self) -> dict[str, Operand]:
        """The operands, by port, that numbers with scales of blocks are."""
        return {port: operand for port, operand in self.operands.items() if operand.scaled}

    @property
    def all(self) -> list[Node]:
        """Every node, in an order in which they can be computed."""
        return [*self.before, *self.nodes[:-1], *([self.mask] if self.mask else []), self.nodes[-1]]

    @property
    def compute(self) -> str:
        """The compute dtype of what is taken up."""
        return self.nodes[-1].compute

    @property
    def last(self) -> Tensor:
        node = self.nodes[-1]
        return next(iter(node.outputs.values()))

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the result: the compute dtype where it is held, else the tensor's."""
        return np.dtype(self.compute) if is_held(self.last) else numpy_of(self.last)


Part = tuple[str, Tensor | None]  # what a node would be to an op, alpha for example, and its other operand


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
      name, op: its name, and the operation that it begins with.
      call: the public op that is called.
      takes: what it may take up behind that.
      part: what a node behind a tensor, with its other operand, would be to the op; in words of what no op takes up.
      run: the first node's outputs, by port.
      before: what is taken up before the node, by port, and what was not and why.
      lacks: what the node has that the op does not, or nothing.
    """

    name: str
    op: str
    call: str
    takes: tuple[str, ...]
    part: Callable[[str, Tensor, Tensor, Fusion], Part]
    run: Callable[[Run, Fusion, Values, Numbers], Mapping[str, Array]]
    before: Callable[[Operations, Node, Sequence[Node]], tuple[dict[str, Operand], list[NotFused]]] | None = None
    lacks: Callable[[Node], str] = lambda node: ""


def part_of(rule: Rule, node: Node, tensor: Tensor, fusion: Fusion) -> Part | None:
    """What a node behind `tensor` would be to the op; None of what no rule is about."""
    if node.op in REDUCTIONS:
        return node.op, None
    if node.op != "pointwise":
        return None
    mode, inputs = node.attributes["mode"], list(node.inputs.values())
    if mode in FORWARD:
        return "activation", None
    once = sum(t is tensor for t in inputs) == 1
    if once and mode == "RELU_BWD" and inputs[0] is tensor and is_plain_relu(node):
        return "gradient of a relu", inputs[1]
    if not once or mode not in ("ADD", "MUL"):
        return f"mode {mode}", None
    return rule.part(mode, tensor, inputs[1] if inputs[0] is tensor else inputs[0], fusion)


def is_plain_relu(node: Node) -> bool:
    """Whether a relu, or its gradient, is that of max(x, 0)."""
    return named_activation(node.attributes["mode"], node.attributes) == "relu"


def of_channels(mode: str, tensor: Tensor, other: Tensor, fusion: Fusion) -> Part:
    """The parts of ops whose channels are the second axis."""
    dim, own = other.dim or (), tensor.dim or ()
    channel = len(own) > 2 and dim == (1, own[1], *(1 for _ in own[2:]))
    if mode == "MUL":
        if not (set(dim) <= {1} or channel):
            return f"factor of sizes {dim}", None
        return ("alpha", other) if fusion.bias is None and fusion.residual is None else ("alpha behind a sum", None)
    if channel and dim != own and fusion.bias is None:
        return "bias", other
    if dim == own and fusion.residual is None:
        return "residual", other
    return ("second bias or residual" if channel or dim == own else f"summand of sizes {dim}"), None


def of_gradients(mode: str, tensor: Tensor, other: Tensor, fusion: Fusion) -> Part:
    """The parts of a gradient: a factor, and what else reaches the same tensor."""
    dim = other.dim or ()
    if mode == "ADD":
        fits = dim == tensor.dim and fusion.residual is None
        return ("prior", other) if fits else (f"summand of sizes {dim}", None)
    if not set(dim) <= {1}:
        return f"factor of sizes {dim}", None
    return ("alpha", other) if fusion.residual is None else ("alpha behind a sum", None)


def factor(tensors: Sequence[tuple[Tensor, bool]], values: Values, numbers: Numbers, compute: str) -> Any:
    """The product of factors, each with whether its last two axes are swapped: a number where all are known."""
    if all(tensor.uid in numbers for tensor, _ in tensors):
        return float(np.prod([float(numbers[tensor.uid]) for tensor, _ in tensors]))
    found = None
    for tensor, turned in tensors:
        value = values[tensor.uid].astype(compute)
        value = value.reshape(()) if value.size == 1 else value.swapaxes(-1, -2) if turned else value
        found = value if found is None else found * value
    return found


def summand(residual: Array, dtype: np.dtype, compute: str) -> Array:
    """A residual as ops take it: floats in the operand's dtype, or in the compute dtype."""
    same = residual.dtype == dtype and residual.dtype.kind not in "iub"
    return residual if same else residual.astype(compute)


def _conv(node: Run, fusion: Fusion, values: Values, numbers: Numbers) -> dict[str, Array]:
    options: dict[str, Any] = {"activation": fusion.activation}
    compute = fusion.compute
    if fusion.alpha:
        options["alpha"] = _flat(factor([(t, False) for t in fusion.alpha], values, numbers, compute))
    if fusion.bias is not None:
        options["bias"] = values[fusion.bias.uid].astype(compute).reshape(-1)
    if fusion.residual is not None:
        options["residual"] = summand(values[fusion.residual.uid], numpy_of(node.tensor("image")), compute)
    return {"Y": products.fused_conv(node, fusion.dtype, compute, **options)}


def _flat(alpha: Any) -> Any:
    """A scale for each channel as a vector."""
    return alpha.reshape(-1) if np.ndim(alpha) else alpha


def _dgrad(node: Run, fusion: Fusion, values: Values, numbers: Numbers) -> dict[str, Array]:
    options: dict[str, Any] = {}
    dtype, compute = numpy_of(node.tensor("loss")), fusion.compute
    if fusion.alpha:
        options["alpha"] = factor([(t, False) for t in fusion.alpha], values, numbers, compute)
    if fusion.residual is not None:
        options |= {"beta": 1.0, "prior": summand(values[fusion.residual.uid], dtype, compute)}
    if fusion.relu is not None:
        options["x"] = summand(values[fusion.relu.uid], dtype, compute)
    return {"DX": products.fused_dgrad(node, fusion.dtype, compute, **options)}


def _batch(node: Run, fusion: Fusion, values: Values, numbers: Numbers) -> dict[str, Array]:
    del numbers
    residual = None if fusion.residual is None else values[fusion.residual.uid]
    residual = None if residual is None else summand(residual, numpy_of(node.tensor("input")), fusion.compute)
    return norms.batch(node, products.wide_or(fusion.dtype, fusion.compute), fusion.activation, residual)


def _instance(node: Run, fusion: Fusion, values: Values, numbers: Numbers) -> dict[str, Array]:
    del values, numbers
    return norms.instance(node, products.wide_or(fusion.dtype, fusion.compute), fusion.activation)


EPILOGUE = ("alpha", "bias", "residual", "activation")
GRADIENT = ("alpha", "prior", "gradient of a relu")
CONV = Rule("conv_epilogue", "conv_fprop", "conv", EPILOGUE, of_channels, _conv)
DGRAD = Rule("conv_dgrad_epilogue", "conv_dgrad", "conv_dgrad", GRADIENT, of_gradients, _dgrad)
BATCH = Rule("batch_norm_epilogue", "batchnorm", "batch_norm", EPILOGUE[2:], of_channels, _batch)
INSTANCE = Rule("instance_norm_epilogue", "instancenorm", "instance_norm", EPILOGUE[3:], of_channels, _instance)


def _nothing(node: Run, fusion: Fusion, values: Values, numbers: Numbers) -> dict[str, Array]:
    raise NotImplementedError(f"{node.node.where} takes nothing up")


# Ops that take nothing up, so that it is said of what follows them.
ALONE = tuple(
    Rule(f"{call}_epilogue", op, call, (), of_channels, _nothing)
    for op, call in (
        ("layernorm", "layer_norm"),
        ("rmsnorm", "rms_norm"),
        ("adalayernorm", "adaptive_layer_norm"),
        ("conv_wgrad", "conv_wgrad"),
        ("sdpa", "attention"),
    )
)
