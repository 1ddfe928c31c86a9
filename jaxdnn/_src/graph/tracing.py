"""How a program of JAX, a jaxpr, becomes a graph.

It is read equation by equation. An array of the program is a tensor together with how its
axes lie in the tensor's (`Value`), so axes that are added, dropped, turned or broadcast need no node; a node is made
where an operation needs the axes in an order of its own. Primitives stand in `trace_lax` and `trace_ops`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdnn._src.core import compat
from jaxdnn._src.core.compat import Literal
from jaxdnn._src.graph import trace_nn
from jaxdnn._src.graph.api import Graph
from jaxdnn._src.graph.errors import GraphError
from jaxdnn._src.graph.pointwise import MODES
from jaxdnn._src.graph.tensors import DTYPES, Tensor, packed

Shape = tuple[int, ...]
Axes = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Value:
    """An array of the program.

    Attributes:
      tensor: what holds its elements.
      axes: for each axis of the array that of the tensor; None of one that the tensor does not have. Such an axis, and
        one that is 1 in the tensor alone, is broadcast. What the tensor has beyond is 1.
      shape, dtype: the array's.
    """

    tensor: Tensor
    axes: Axes
    shape: Shape
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Handler = Callable[["Tracing", Any, Sequence[Value]], Sequence[Value]]
PRIMITIVES: dict[str, Handler] = {}


def primitive(*names: str) -> Callable[[Handler], Handler]:
    """Registers what reads equations of these primitives."""

    def register(handler: Handler) -> Handler:
        PRIMITIVES.update(dict.fromkeys(names, handler))
        return handler

    return register


class Refused(Exception):
    """Why an equation has no node, in words that follow "one"."""


class Tracing:
    """A graph while it is made of a program; `dims` has the sizes of its tensors."""

    def __init__(self, name: str) -> None:
        self.g = Graph(name)
        self.dims: dict[int, Shape] = {}
        self._live: set[Any] = set()
        self._places: list[str] = []

    # Values and tensors

    def dim(self, value: Value) -> Shape:
        return self.dims[value.tensor.uid]

    def made(self, tensor: Tensor, dim: Sequence[int], dtype: str) -> Tensor:
        """A node's result, of these sizes and this dtype."""
        self.dims[tensor.uid] = tuple(dim)
        return tensor.set_dim(dim).set_data_type(dtype)

    def constant(self, number: Any, dtype: str) -> Value:
        number = number.item() if isinstance(number, np.generic | np.ndarray | jax.Array) else number
        number = int(number) if isinstance(number, bool) else number
        tensor = self.g.tensor_scalar(number, dtype if dtype != "bool" else "int32")
        self.dims[tensor.uid] = (1,)
        return Value(tensor, (), (), dtype)

    def own(self, value: Value) -> list[int | None]:
        """For each axis of the tensor, that of the array; None of one that the array does not have."""
        found: list[int | None] = [None] * len(self.dim(value))
        for axis, place in enumerate(value.axes):
            if place is not None:
                found[place] = axis
        return found

    def arranged(self, value: Value, order: Sequence[int | None]) -> Tensor:
        """A tensor whose axes are the array's in this order, with 1 for None and for what is broadcast."""
        tensor, dim = value.tensor, self.dim(value)
        size = lambda axis: 1 if axis is None or value.axes[axis] is None else dim[value.axes[axis]]
        wanted = tuple(map(size, order))
        long = lambda axes: [axis for axis in axes if axis is not None and size(axis) > 1]
        have, need = long(self.own(value)), long(order)
        if have != need:
            if len(have) != len(dim):
                tensor = self.reshaped(tensor, [size(axis) for axis in have])
            permutation = [have.index(axis) for axis in need]
            sizes = [size(axis) for axis in need]
            turned = self.made(self.g.transpose(tensor, permutation), sizes, tensor.data_type or "")
            slow = sorted(range(len(need)), key=permutation.__getitem__)  # as the elements lie
            tensor = turned.set_stride(packed(sizes, slow))
        return tensor if self.dims[tensor.uid] == wanted else self.reshaped(tensor, wanted)

    def reshaped(self, tensor: Tensor, dim: Sequence[int]) -> Tensor:
        """The elements in the order of the last axis first, in other sizes."""
        if self.dims[tensor.uid] == tuple(dim):
            return tensor
        return self.made(self.g.reshape(tensor, reshape_mode="LOGICAL"), dim, tensor.data_type or "")

    def operand(self, value: Value, order: Sequence[int | None]) -> Tensor:
        """As `arranged`, in the array's dtype and of its sizes, as operations other than pointwise ones need it."""
        if any(self.broadcast(value, axis) for axis in range(len(value.shape))):
            raise Refused("whose operand is not broadcast")
        tensor = self.arranged(value, order)
        return self.converted(tensor, value.dtype)

    def converted(self, tensor: Tensor, dtype: str) -> Tensor:
        if tensor.data_type == dtype:
            return tensor
        compute = "float64" if "float64" in (dtype, tensor.data_type) else "float32"
        return self.made(self.g.identity(tensor, compute_data_type=compute), self.dims[tensor.uid], dtype)

    def broadcast(self, value: Value, axis: int) -> bool:
        place = value.axes[axis]
        return (1 if place is None else self.dim(value)[place]) != value.shape[axis]

    def value(self, tensor: Tensor, order: Sequence[int | None], shape: Sequence[int], dtype: str) -> Value:
        """The array of this shape whose axes lie in a tensor in this order."""
        axes = tuple(order.index(axis) if axis in order else None for axis in range(len(shape)))
        return Value(tensor, axes, tuple(shape), dtype)

    def lifted(self, value: Value, axes: Sequence[int], shape: Sequence[int]) -> Value:
        """An array broadcast to a shape: its axis i is the new one's axis axes[i]."""
        found: list[int | None] = [None] * len(shape)
        for axis, new in enumerate(axes):
            found[new] = value.axes[axis]
        return Value(value.tensor, tuple(found), tuple(shape), value.dtype)

    # Pointwise nodes, which most of a program is

    def pointwise(self, mode: str, values: Sequence[Value], dtype: str, **attributes: Any) -> Value:
        """A pointwise node of arrays that broadcast against each other."""
        shape = np.broadcast_shapes(*(v.shape for v in values))
        values = [self.lifted(v, range(len(shape) - len(v.shape), len(shape)), shape) for v in values]
        main = max(values, key=lambda v: math.prod(self.dim(v)))
        order: list[int | None] = self.own(main) if math.prod(self.dim(main)) > 1 else [*range(len(shape))]
        long = {a for v in values for a, p in enumerate(v.axes) if p is not None and self.dim(v)[p] > 1}
        if not long <= set(order):
            order = [*range(len(shape))]
        # A number may have any axes.
        tensors = [v.tensor if math.prod(self.dim(v)) == 1 else self.arranged(v, order) for v in values]
        sizes = [self.dims[t.uid] for t in tensors]
        dim = tuple(np.broadcast_shapes(*(s for s in sizes if math.prod(s) > 1)))
        if len(values) == 3:  # of which none is broadcast
            tensors = [self._spread(t, tensors, dim) for t in tensors]
        compute = self._compute(mode, [v.dtype for v in values[:2]])
        node = self.g.pointwise(mode, *tensors, compute_data_type=compute, **attributes)
        if not dim:
            return self.lifted(Value(self.made(node, (1,) * max(map(len, sizes)), dtype), (), (), dtype), (), shape)
        return self.value(self.made(node, dim, dtype), order, shape, dtype)

    def _spread(self, tensor: Tensor, others: Sequence[Tensor], dim: Shape) -> Tensor:
        """A tensor broadcast to the sizes of another: what is added to it is 0, made of the other's indices."""
        sizes, dtype = self.dims[tensor.uid], tensor.data_type or ""
        if math.prod(sizes) == 1 or sizes == dim:
            return tensor
        like = next((t for t in others if self.dims[t.uid] == dim), None)
        if like is None:
            raise Refused("of which an operand has the shape of the result")
        index = self.made(self.g.gen_index(like, 0, compute_data_type="int32"), dim, "int32")
        zero = self.made(self.g.min(index, 0, compute_data_type="int32"), dim, "int32")
        whole = dtype in ("bool", "int8", "uint8", "int32")
        compute = "int32" if whole else "float64" if dtype == "float64" else "float32"
        return self.made(self.g.add(tensor, zero, compute_data_type=compute), dim, dtype)

    def _compute(self, mode: str, dtypes: Sequence[str]) -> str:
        if "float64" in dtypes:
            return "float64"
        whole = all(name in ("int32", "int8", "uint8", "bool") for name in dtypes)
        if whole and not MODES[mode].integers:
            raise Refused("of floats")
        return "int32" if whole else "float32"

    # Programs

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
        """The results of a program, whose nodes are added to the graph."""
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            if np.size(const) != 1:
                words = "without arrays that it closes over, which have to be arguments"
                raise GraphError(
                    f"function {self.g.name!r}", "function", words, f"{var.aval.dtype}{list(np.shape(const))}"
                )
            known[var] = self.lifted(self.constant(const, var.aval.dtype.name), (), var.aval.shape)
        read = lambda v: self._literal(v) if isinstance(v, Literal) else known[v]
        needed, live = _needs(jaxpr)
        self._live |= live
        named = trace_nn.found(jaxpr)
        within = {p for last, (count, *_) in named.items() for p in range(last - count + 1, last)}
        for position, eqn in enumerate(jaxpr.eqns):
            if position not in needed or position in within:
                continue
            if position in named:
                _, mode, x = named[position]
                known[eqn.outvars[0]] = self.pointwise(mode, [known[x]], eqn.outvars[0].aval.dtype.name)
            else:
                known |= zip(eqn.outvars, self.equation(eqn, [read(v) for v in eqn.invars]), strict=True)
        return [read(v) for v in jaxpr.outvars]

    def _literal(self, literal: Any) -> Value:
        aval = literal.aval
        return self.lifted(self.constant(literal.val, aval.dtype.name), (), aval.shape)

    def equation(self, eqn: Any, values: Sequence[Value]) -> Sequence[Value]:
        name, place = eqn.primitive.name, compat.place(eqn)
        self._places.append(place or (self._places[-1] if self._places else "in a place that is not known"))
        try:
            for var in eqn.outvars:
                if getattr(var.aval, "dtype", None) is None or var.aval.dtype.name not in DTYPES:
                    raise Refused(f"of dtypes that a graph has, not {var.aval}")
            if name not in PRIMITIVES:
                raise Refused("that a graph has a node for")
            return PRIMITIVES[name](self, eqn, values)
        except Refused as why:
            # What JAX keeps of a function within names who called it first.
            where = f"function {self.g.name!r}, {self._places[0]}"
            raise GraphError(where, "primitive", f"one {why}", name) from None
        finally:
            self._places.pop()

    def is_read(self, var: Any) -> bool:
        """Whether anything depends on a result of an equation."""
        return var in self._live

    def inner(self, closed: Any, values: Sequence[Value]) -> list[Value]:
        """The results of a program within the program."""
        if hasattr(closed, "consts"):
            return self.run(closed.jaxpr, closed.consts, values)
        return self.run(closed, (), values)


def _needs(jaxpr: Any) -> tuple[set[int], set[Any]]:
    """The equations, and the variables, on which a program's results depend; and what has effects."""
    wanted, found = {v for v in jaxpr.outvars if not isinstance(v, Literal)}, set()
    for position in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[position]
        if eqn.effects or any(v in wanted for v in eqn.outvars):
            found.add(position)
            wanted |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return found, wanted
