"""Nodes, and what is known of each kind of node: its ports, attributes, inference and evaluation.

A kind stands in the module of its group (`pointwise`, `products`, ...), which registers it. Ports have the names of
cudnn-frontend's arguments; one that ends in ? may be left out, one that ends in * takes several tensors.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.graph.errors import GraphError
from jaxdnn._src.graph.tensors import (
    ADDRESSABLE,
    COMPUTE,
    WIDE,
    Tensor,
    check_reordering,
    is_addressable,
    numpy_dtype,
    order_of,
    overlaps,
    packed,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """A kind of node.

    Attributes:
      op: its name.
      inputs, outputs: the ports.
      attributes: the names of the attributes and their defaults.
      infer: checks a node and infers its outputs.
      run: a node's outputs, by port, from its inputs.
      static: the inputs that must be numbers when the program is traced, as static arguments of `jax.jit` are.
      compute: the compute dtypes it is served in.
      calls: the public op that it calls; nothing where it is a formula that XLA compiles.
      scored: whether it may have a function of attention's scores.
      notes: what a plan says of it, in sentences.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    infer: Callable[["Inference"], None]
    run: Callable[["Run"], Mapping[str, Array]]
    static: tuple[str, ...] = ()
    compute: tuple[str, ...] = COMPUTE
    calls: tuple[str, ...] = ()
    scored: bool = False
    notes: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    KINDS[kind.op] = kind


@dataclasses.dataclass(eq=False)
class Node:
    """An operation of a graph.

    `derived` has what was inferred and is no attribute, such as the groups of a convolution; `body` is the function of
    attention's scores, a `score.Body`, if it has one.
    """

    name: str
    op: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    attributes: dict[str, Any]
    compute: str
    derived: dict[str, Any] = dataclasses.field(default_factory=dict)
    body: Any = None

    @property
    def kind(self) -> Kind:
        return KINDS[self.op]

    @property
    def where(self) -> str:
        return f"node {self.name!r} ({self.op})"

    def __repr__(self) -> str:
        ports = lambda named: ", ".join(f"{port}={tensor.name}" for port, tensor in named.items())
        return f"{self.name}: {ports(self.outputs)} = {self.op}({ports(self.inputs)})"


class Inference:
    """One node while it is checked: what its inputs are, and what its outputs turn out to be."""

    def __init__(self, graph: Any, node: Node) -> None:
        self.graph, self.node = graph, node

    def has(self, port: str) -> bool:
        return port in self.node.inputs

    def asked(self, port: str) -> bool:
        return port in self.node.outputs

    def dim(self, port: str) -> tuple[int, ...]:
        dim = self.node.inputs[port].dim
        return () if dim is None else dim

    def dtype(self, port: str) -> str:
        return self.node.inputs[port].data_type or ""

    def attribute(self, name: str) -> Any:
        return self.node.attributes[name]

    def derive(self, **values: Any) -> None:
        self.node.derived.update(values)

    def expect(self, met: bool, attribute: str, expected: str, got: Any) -> None:
        if not met:
            raise GraphError(self.node.where, attribute, expected, got)

    def rank(self, port: str, *ranks: int) -> tuple[int, ...]:
        """The dimensions of an input, of which there must be so many."""
        words = " or ".join(map(str, ranks))
        self.expect(len(self.dim(port)) in ranks, port, f"a tensor of {words} dimensions", self.dim(port))
        return self.dim(port)

    def shaped(self, port: str, dim: Sequence[int], why: str) -> None:
        self.expect(self.dim(port) == tuple(dim), port, f"of dimensions {tuple(dim)}, {why}", self.dim(port))

    def one(self, port: str) -> None:
        """Checks that an input is one number."""
        dim = self.dim(port)
        self.expect(set(dim) <= {1}, f"{port}.dim", "1 along each axis, for it is one number", dim)

    def typed(self, port: str, *choices: str) -> None:
        """Checks the dtype of an input."""
        words = f"{'one of ' if len(choices) > 1 else ''}{', '.join(choices)}"
        self.expect(self.dtype(port) in choices, f"{port}.data_type", words, self.dtype(port))

    def floats(self, *ports: str) -> None:
        """Checks that those of these inputs that are given are floats of 16 bits or more."""
        for port in ports:
            if self.has(port):
                self.typed(port, *WIDE)

    def integers(self, name: str, count: int, least: int, default: int) -> tuple[int, ...]:
        """An attribute with an integer for each of `count` axes; None is the default for all."""
        value = self.attribute(name)
        if value is None:
            return (default,) * count
        ok = isinstance(value, tuple) and len(value) == count
        self.expect(ok and all(map(is_integer, value)), name, f"{count} integers of at least {least}", value)
        ok = all(least <= v < 2**31 for v in value)
        self.expect(ok, name, f"{count} integers of at least {least}, and below 2^31", value)
        return tuple(value)

    def integer(self, name: str, least: int, optional: bool = False) -> Any:
        """An attribute that is an integer, or None if it is optional."""
        value = self.attribute(name)
        ok = (optional and value is None) or (is_integer(value) and value >= least)
        self.expect(ok, name, f"{'None or ' if optional else ''}an integer of at least {least}", value)
        return value

    def place(self, name: str, count: int, what: str, optional: bool = False) -> Any:
        """An attribute that numbers one of `count` axes or inputs, or None if it is optional."""
        value = self.attribute(name)
        ok = (optional and value is None) or (is_integer(value) and 0 <= value < count)
        self.expect(ok, name, f"{'None or ' if optional else ''}{what}, from 0 to {count - 1}", value)
        return value

    def flag(self, name: str) -> bool:
        value = self.attribute(name)
        self.expect(isinstance(value, bool), name, "True or False", value)
        return value

    def choice(self, name: str, choices: Sequence[Any]) -> Any:
        value = self.attribute(name)
        self.expect(isinstance(value, str) and value in choices, name, f"one of {', '.join(map(str, choices))}", value)
        return value

    def number(self, name: str, low: float = -np.inf, high: float = np.inf) -> float:
        value = self.attribute(name)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        limits = "a number" if (low, high) == (-np.inf, np.inf) else f"a number from {low:g} to {high:g}"
        self.expect(ok, name, limits, value)
        return float(value)

    def output_dim(self, port: str, expected: str) -> tuple[int, ...]:
        """The dimensions of an output that have to be set because the inputs do not tell them."""
        dim = self.node.outputs[port].dim
        self.expect(dim is not None, f"{port}.dim", expected, None)
        return dim or ()

    def output(self, port: str, dim: Sequence[int], like: str | None, data_type: str | None = None) -> None:
        """Sets what is open of an output and checks what was set; its axes lie as those of the input `like`."""
        if port not in self.node.outputs:
            return
        tensor, dim = self.node.outputs[port], tuple(dim)
        if tensor.dim is None:
            tensor.dim = dim
            tensor.inferred.add("dim")
        self.expect(tensor.dim == dim, f"{port}.dim", f"{dim}, as the inputs have it", tensor.dim)
        if tensor.data_type is None:
            default = self.graph.intermediate_data_type if tensor.is_virtual else self.graph.io_data_type
            tensor.data_type = data_type or default
            tensor.inferred.add("data_type")
            expected = f"set, for the graph has no {'intermediate' if tensor.is_virtual else 'io'}_data_type"
            self.expect(tensor.data_type is not None, f"{port}.data_type", expected, None)
        if tensor.stride is None:
            other = self.node.inputs.get(like) if like else None
            same = other is not None and other.stride is not None and len(other.stride) == len(dim)
            order = order_of(other.stride) if same else None  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
            tensor.stride = packed(dim, order)
            tensor.inferred.add("stride")
        name, stride = f"{port}.stride", tensor.stride
        self.expect(len(stride) == len(dim), name, f"{len(dim)} strides", stride)
        self.expect(not overlaps(dim, stride), name, "strides under which no elements share a place", stride)
        self.expect(is_addressable(dim, stride), name, ADDRESSABLE, stride)
        check_reordering(self.node.where, f"{port}.reordering_type", tensor)


class Run:
    """One node while it is evaluated: its inputs as arrays in the order of their dimensions."""

    def __init__(self, node: Node, values: Mapping[int, Array], numbers: Mapping[int, Any]) -> None:
        self.node, self.compute, self._values, self._numbers = node, node.compute, values, numbers

    def has(self, port: str) -> bool:
        return port in self.node.inputs

    def asked(self, port: str) -> bool:
        return port in self.node.outputs

    def attribute(self, name: str) -> Any:
        return self.node.attributes[name]

    def derived(self, name: str) -> Any:
        return self.node.derived[name]

    def tensor(self, port: str) -> Tensor:
        return self.node.inputs[port]

    def x(self, port: str) -> Array:
        """An input as it is held."""
        return self._values[self.node.inputs[port].uid]

    def static(self, port: str) -> Any:
        """A number that is known when the program is traced."""
        return self._numbers[self.node.inputs[port].uid]

    def wide(self, port: str) -> Array:
        """An input in the compute dtype."""
        return self.x(port).astype(self.compute)

    def stored(self, port: str) -> Array:
        """An input in its own dtype, as operands of tensor cores are."""
        return self.x(port).astype(numpy_of(self.node.inputs[port]))

    def out(self, port: str) -> Tensor:
        return self.node.outputs[port]

    def order(self, port: str) -> tuple[int, ...]:
        """The axes of an input by descending stride."""
        return order_of(self.node.inputs[port].stride or ())


def numpy_of(tensor: Tensor) -> np.dtype:
    return numpy_dtype(tensor.data_type or "float32")


def as_stored(tensor: Tensor, value: Any) -> Any:
    """A number as a tensor's dtype has it."""
    with np.errstate(over="ignore"):
        found = np.asarray(value).astype(numpy_of(tensor))
    return found.item() if found.dtype.kind in "iub" else float(found)


def is_held(tensor: Tensor) -> bool:
    """Whether a tensor is held as it was computed: it is virtual, and of floats of 16 bits or more; see `execute`."""
    return tensor.is_virtual and tensor.data_type in WIDE


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def rounded(array: Array, dtype: np.dtype) -> Array:
    """Converted by one rounding, to nearest even; integers saturate, and NaN is 0 of them."""
    if array.dtype == dtype:
        return array
    if dtype.kind in "iu" and array.dtype.kind not in "iub":
        return _saturated(array, dtype)
    if dtype.kind in "iu" and array.dtype.kind in "iu":
        info, wide = np.iinfo(dtype), np.iinfo(array.dtype)
        low, high = max(int(info.min), int(wide.min)), min(int(info.max), int(wide.max))
        return jnp.clip(array, low, high).astype(dtype)
    if dtype == np.bool_:
        return array != 0
    return array.astype(dtype)


def _saturated(array: Array, dtype: np.dtype) -> Array:
    info = np.iinfo(dtype)
    # Floats of 8 bits do not hold the ends, and some of them have no infinity to stand for these.
    array = array if array.dtype.itemsize > 1 else array.astype(jnp.float32)
    near = lax.round(array, lax.RoundingMethod.TO_NEAREST_EVEN)
    # Floats do not hold the largest integer of 32 bits; what is at least its successor is set apart.
    top, bottom = float(info.max) + 1.0, float(info.min)
    inner = jnp.where((near < top) & (near >= bottom), near, 0).astype(dtype)
    ends = jnp.where(near >= top, jnp.asarray(info.max, dtype), jnp.asarray(info.min, dtype))
    outside = (near >= top) | (near < bottom)
    return jnp.where(outside, ends, inner)
