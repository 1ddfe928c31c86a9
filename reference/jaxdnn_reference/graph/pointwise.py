"""Nodes that compute element by element."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxdnn_reference.activation import activate, derivative
from jaxdnn_reference.graph.tensors import Array, Node


def _activation(node: Node, mode: str) -> Any:
    name = mode[:-4].lower()
    if name == "relu":
        upper = math.inf if node["upper_clip"] is None else node["upper_clip"]
        return ("relu", float(node["lower_clip"]), float(upper), float(node["negative_slope"]))
    if name in ("elu", "softplus", "swish"):
        return (name, float(node[{"elu": "elu_alpha", "softplus": "softplus_beta", "swish": "swish_beta"}[name]]))
    return "gelu_tanh" if name == "gelu_approx_tanh" else name


MATH: dict[str, Callable[..., Array]] = {
    "ADD": lambda a, b: a + b,
    "MUL": lambda a, b: a * b,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "SQRT": np.sqrt,
    "ADD_SQUARE": lambda a, b: a + b**2,
    "DIV": lambda a, b: a / b,
    "MOD": np.fmod,
    "POW": lambda a, b: a**b,
    "SUB": lambda a, b: a - b,
    "ABS": np.abs,
    "CEIL": np.ceil,
    "COS": np.cos,
    "EXP": np.exp,
    "FLOOR": np.floor,
    "LOG": np.log,
    "NEG": lambda a: -a,
    "RSQRT": lambda a: 1 / np.sqrt(a),
    "SIN": np.sin,
    "TAN": np.tan,
    "ERF": np.vectorize(math.erf, otypes=[np.float64]),
    "IDENTITY": lambda a: a,
    "RECIPROCAL": lambda a: 1 / a,
    "ATAN2": np.arctan2,
    "FLOOR_MOD": np.mod,
    "CMP_EQ": lambda a, b: a == b,
    "CMP_NEQ": lambda a, b: a != b,
    "CMP_GT": lambda a, b: a > b,
    "CMP_GE": lambda a, b: a >= b,
    "CMP_LT": lambda a, b: a < b,
    "CMP_LE": lambda a, b: a <= b,
    "LOGICAL_AND": lambda a, b: np.logical_and(a != 0, b != 0),
    "LOGICAL_OR": lambda a, b: np.logical_or(a != 0, b != 0),
    "LOGICAL_NOT": lambda a: a == 0,
    "BINARY_SELECT": lambda a, b, mask: np.where(mask != 0, a, b),
}


def pointwise(node: Node, x: Mapping[str, Array]) -> dict[str, Array]:
    mode, dim = node["mode"], node.dims["OUT_0"]
    given = [x[port] for port in ("IN_0", "IN_1", "IN_2") if port in x]
    given = [np.broadcast_to(v.reshape((1,) * len(dim)) if v.size == 1 else v, dim) for v in given]
    if mode == "GEN_INDEX":
        return {"OUT_0": np.indices(dim)[node["axis"]]}
    if mode.endswith("_FWD"):
        return {"OUT_0": activate(given[0], _activation(node, mode))}
    if mode.endswith("_BWD"):
        return {"OUT_0": given[0] * derivative(given[1], _activation(node, mode))}
    return {"OUT_0": MATH[mode](*given)}


OPS = {
    "pointwise": pointwise,
}
