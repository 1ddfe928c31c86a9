"""Pointwise nodes: y = op(x), op(x, b) or op(x, b, t), element by element, in every mode of cuDNN."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.activation.api import activation, activation_dgrad
from jaxdnn._src.graph.nodes import Inference, Kind, Node, Run, register
from jaxdnn._src.graph.tensors import WIDE


@dataclasses.dataclass(frozen=True)
class Mode:
    """A mode: how many inputs it has, what it computes of them, and whether integers may be its compute dtype."""

    inputs: int
    of: Callable[..., Array]
    integers: bool = False


MODES: dict[str, Mode] = {
    "ADD": Mode(2, jnp.add, True),
    "MUL": Mode(2, jnp.multiply, True),
    "MIN": Mode(2, jnp.minimum, True),
    "MAX": Mode(2, jnp.maximum, True),
    "SQRT": Mode(1, jnp.sqrt),
    "ADD_SQUARE": Mode(2, lambda a, b: a + b * b, True),
    "DIV": Mode(2, jnp.divide),
    "MOD": Mode(2, lax.rem),
    "POW": Mode(2, jnp.power),
    "SUB": Mode(2, jnp.subtract, True),
    "ABS": Mode(1, jnp.abs, True),
    "CEIL": Mode(1, jnp.ceil),
    "COS": Mode(1, jnp.cos),
    "EXP": Mode(1, jnp.exp),
    "FLOOR": Mode(1, jnp.floor),
    "LOG": Mode(1, jnp.log),
    "NEG": Mode(1, jnp.negative, True),
    "RSQRT": Mode(1, lax.rsqrt),
    "SIN": Mode(1, jnp.sin),
    "TAN": Mode(1, jnp.tan),
    "ERF": Mode(1, lax.erf),
    "IDENTITY": Mode(1, lambda a: a, True),
    "RECIPROCAL": Mode(1, lambda a: 1 / a),
    "ATAN2": Mode(2, jnp.arctan2),
    "FLOOR_MOD": Mode(2, jnp.mod),
    "CMP_EQ": Mode(2, jnp.equal, True),
    "CMP_NEQ": Mode(2, jnp.not_equal, True),
    "CMP_GT": Mode(2, jnp.greater, True),
    "CMP_GE": Mode(2, jnp.greater_equal, True),
    "CMP_LT": Mode(2, jnp.less, True),
    "CMP_LE": Mode(2, jnp.less_equal, True),
    "LOGICAL_AND": Mode(2, lambda a, b: (a != 0) & (b != 0), True),
    "LOGICAL_OR": Mode(2, lambda a, b: (a != 0) | (b != 0), True),
    "LOGICAL_NOT": Mode(1, lambda a: a == 0, True),
    "BINARY_SELECT": Mode(3, lambda a, b, mask: jnp.where(mask != 0, a, b), True),
    "GEN_INDEX": Mode(1, lambda a: a, True),
}
# What results are truths: 1 and 0, of dtype bool unless another is set.
TRUTHS = ("CMP_EQ", "CMP_NEQ", "CMP_GT", "CMP_GE", "CMP_LT", "CMP_LE", "LOGICAL_AND", "LOGICAL_OR", "LOGICAL_NOT")
ACTIVATIONS = ("RELU", "TANH", "SIGMOID", "ELU", "GELU", "SOFTPLUS", "SWISH", "GELU_APPROX_TANH")
FORWARD = tuple(f"{name}_FWD" for name in ACTIVATIONS)
BACKWARD = tuple(f"{name}_BWD" for name in ACTIVATIONS)
for _name in FORWARD:
    MODES[_name] = Mode(1, lambda x, how: activation(x, activation=how))
for _name in BACKWARD:
    MODES[_name] = Mode(2, lambda dy, x, how: activation_dgrad(dy, x, activation=how))

PARAMETERS = {
    "negative_slope": 0.0,
    "lower_clip": 0.0,
    "upper_clip": None,
    "elu_alpha": 1.0,
    "softplus_beta": 1.0,
    "swish_beta": 1.0,
}
PORTS = ("IN_0", "IN_1", "IN_2")
OPERANDS = (*WIDE, "float8_e4m3fn", "float8_e5m2", "bool", "int8", "uint8", "int32", "int64")
WHOLE = ("bool", "int8", "uint8", "int32")  # what int32 holds


def named_activation(mode: str, attributes: Mapping[str, Any]) -> Any:
    """How `activation` calls a mode with these attributes."""
    name = mode.rpartition("_")[0]
    if name == "RELU":
        lower, upper, slope = (attributes[p] for p in ("lower_clip", "upper_clip", "negative_slope"))
        if upper is None and lower == 0 and 0 <= slope <= 1:
            return "relu" if slope == 0 else ("leaky_relu", float(slope))
        return ("relu", float(lower), float("inf") if upper is None else float(upper), float(slope))
    parameter = {"ELU": "elu_alpha", "SOFTPLUS": "softplus_beta", "SWISH": "swish_beta"}.get(name)
    called = {"GELU_APPROX_TANH": "gelu_tanh"}.get(name, name.lower())
    return called if parameter is None else (called, float(attributes[parameter]))


def _infer(node: Inference) -> None:
    mode = node.choice("mode", tuple(MODES))
    how = MODES[mode]
    given = [port for port in PORTS if node.has(port)]
    node.expect(given == list(PORTS[: how.inputs]), "inputs", f"{how.inputs} of mode {mode}", given)
    compute = node.node.compute
    node.expect(how.integers or compute != "int32", "compute_data_type", f"a float for mode {mode}", compute)
    for port in given:
        node.typed(port, *(WHOLE if compute == "int32" and mode != "GEN_INDEX" else OPERANDS))
    _check_parameters(node, mode)
    if mode == "GEN_INDEX":
        node.place("axis", len(node.dim("IN_0")), "an axis of IN_0")
    dim = _broadcast(node, given)
    main = max(given, key=lambda port: (node.dim(port) == dim, len(node.dim(port)) == len(dim)))
    node.output("OUT_0", dim, main, "bool" if mode in TRUTHS else None)


def _check_parameters(node: Inference, mode: str) -> None:
    if mode in FORWARD or mode in BACKWARD:
        for name in PARAMETERS:
            if name != "upper_clip" or node.attribute(name) is not None:
                node.number(name)
        low, high = node.attribute("lower_clip"), node.attribute("upper_clip")
        node.expect(high is None or low <= high, "lower_clip", f"at most upper_clip, {high}", low)
        for name in ("negative_slope", "lower_clip", "elu_alpha", "softplus_beta", "swish_beta"):
            node.expect(math.isfinite(node.attribute(name)), name, "a finite number", node.attribute(name))
        for name in ("elu_alpha", "softplus_beta"):
            node.expect(node.attribute(name) > 0, name, "a number above 0", node.attribute(name))


def _broadcast(node: Inference, ports: list[str]) -> tuple[int, ...]:
    """The dimensions of the result; sizes of 1 are broadcast, of the select with three inputs only by value."""
    rank = max(len(node.dim(port)) for port in ports)
    sizes = [1] * rank
    for port in ports:
        dim = node.dim(port)
        scalar = all(n == 1 for n in dim)
        node.expect(
            len(dim) == rank or scalar, port, f"a tensor of {rank} dimensions, as the other inputs, or a number", dim
        )
        if not scalar:
            sizes = [max(a, b) for a, b in zip(sizes, dim, strict=True)]
    for port in ports:
        dim = node.dim(port)
        if all(n == 1 for n in dim):
            continue
        fits = all(n in (1, m) for n, m in zip(dim, sizes, strict=True))
        node.expect(fits, port, f"of dimensions that are 1 or those of {tuple(sizes)}", dim)
        if len(ports) == 3:
            node.expect(
                dim == tuple(sizes), port, f"of dimensions {tuple(sizes)}, for three inputs are not broadcast", dim
            )
    return tuple(sizes)


def evaluate(node: Run) -> Array:
    """What a pointwise node computes, in its compute dtype; of indices and truths in int32 and bool."""
    mode, dim = node.attribute("mode"), node.out("OUT_0").dim or ()
    places = [lax.broadcasted_iota(jnp.int32, dim, node.attribute("axis"))] if mode == "GEN_INDEX" else []
    args = [_shaped(node.x(port), len(dim)) for port in PORTS if node.has(port)]
    if mode in FORWARD or mode in BACKWARD:
        args = [jnp.broadcast_to(a, dim) for a in args]
    with jax.numpy_rank_promotion("allow"):
        return jnp.broadcast_to(computed(node.node, args, places * len(dim)), dim)


def computed(node: Node, args: Sequence[Any], places: Sequence[Array]) -> Array:
    """What a node computes of its inputs, in its compute dtype; `places` are the indices along each axis."""
    mode = node.attributes["mode"]
    if mode == "GEN_INDEX":
        return places[node.attributes["axis"]]
    if mode != "IDENTITY" or args[0].dtype.name in WIDE:
        args = [a.astype(node.compute) for a in args]
    how = [named_activation(mode, node.attributes)] if mode in FORWARD or mode in BACKWARD else []
    return MODES[mode].of(*args, *how)


def _shaped(x: Array, rank: int) -> Array:
    """Numbers have as many dimensions as the others."""
    return x if x.ndim == rank else x.reshape((1,) * rank)


register(
    Kind(
        "pointwise",
        ("IN_0", "IN_1?", "IN_2?"),
        ("OUT_0",),
        {"mode": None, "axis": None, **PARAMETERS},
        _infer,
        lambda node: {"OUT_0": evaluate(node)},
    )
)
