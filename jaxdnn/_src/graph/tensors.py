"""Tensors of a graph: dimensions, strides and dtype, as cuDNN has them, and the JAX arrays that stand for them.

A tensor's dimensions are in the order of its operation (N, C, H, W for a convolution); its strides say where the
elements lie. An array of JAX has no strides, so an array stands for the memory: its axes are the tensor's in the order
of descending strides. Strides of NHWC thus take an array (N, H, W, C), and nothing is moved.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array, lax

from jaxdnn._src.graph.errors import GraphError, flag

INT64 = (-(2**63), 2**63 - 1)

# The names of cudnn-frontend's data types.
NAMES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BFLOAT16": "bfloat16",
    "DOUBLE": "float64",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOLEAN": "bool",
    "FP8_E4M3": "float8_e4m3fn",
    "FP8_E5M2": "float8_e5m2",
    "FP8_E8M0": "float8_e8m0fnu",
    "FP4_E2M1": "float4_e2m1fn",
}
DTYPES = tuple(NAMES.values())
# Floats that a virtual tensor may hold in the compute dtype instead: see `execute`.
WIDE = ("float64", "float32", "bfloat16", "float16")
# Floats of 8 bits and fewer.
NARROW = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn")
COMPUTE = ("float32", "float64", "int32")
# The orders in which elements lie in the memory of a tensor; see `Tensor`.
TILED = "F8_128x4"
REORDERINGS = ("NONE", TILED)
TILED_TYPES = ("float8_e8m0fnu", "float8_e4m3fn")


def dtype_of(where: str, attribute: str, value: Any, choices: Sequence[str] = DTYPES) -> str:
    """The canonical name of a dtype: of cudnn-frontend's name, of NumPy's or JAX's dtype, or of its name."""
    name = NAMES.get(value) if isinstance(value, str) else None
    if name is None and value is not None and not isinstance(value, np.ndarray | Array):
        try:
            name = np.dtype(getattr(ml_dtypes, value, value) if isinstance(value, str) else value).name
        except (SyntaxError, TypeError, ValueError):
            name = None
    if name is None or name not in choices:
        raise GraphError(where, attribute, f"one of the dtypes {', '.join(choices)}", value)
    return name


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def packed(dim: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """The strides without gaps of axes that lie in this order, the slowest first; None is row-major."""
    strides, step = [0] * len(dim), 1
    for axis in reversed(range(len(dim)) if order is None else order):
        strides[axis] = step
        step *= dim[axis]
    return tuple(strides)


def order_of(stride: Sequence[int]) -> tuple[int, ...]:
    """The axes by descending stride; of equal strides, which only axes of size 1 should have, the earlier first."""
    return tuple(sorted(range(len(stride)), key=lambda axis: (-stride[axis], axis)))


def is_packed(dim: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements lie without gap or overlap; an axis of size 1 may have any stride."""
    step = 1
    for axis in reversed(order_of(stride)):
        if dim[axis] == 1:
            continue
        if stride[axis] != step:
            return False
        step *= dim[axis]
    return True


def overlaps(dim: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether an element may share its place with another, by cuDNN's rule: each stride must clear those below."""
    reach = 0
    for axis in reversed(order_of(stride)):
        if dim[axis] == 1:
            continue
        if stride[axis] <= reach:
            return True
        reach += (dim[axis] - 1) * stride[axis]
    return False


ADDRESSABLE = "strides under which fewer than 2^31 places are covered, or that leave no gaps"


def is_addressable(dim: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether places can be counted in int32, which only memory with gaps or overlaps needs."""
    return is_packed(dim, stride) or span(dim, stride) < 2**31


def span(dim: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of memory a tensor covers."""
    return 0 if 0 in dim else 1 + sum((n - 1) * s for n, s in zip(dim, stride, strict=True))


def memory_shape(dim: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The shape of the array that stands for a tensor: its axes by descending stride, or a row with its gaps."""
    if not is_packed(dim, stride):
        return (span(dim, stride),)
    return tuple(dim[axis] for axis in order_of(stride))


def _places(dim: Sequence[int], stride: Sequence[int]) -> Array:
    """Where each element lies, in the shape of the dimensions."""
    steps = [lax.broadcasted_iota(jnp.int32, tuple(dim), axis) * step for axis, step in enumerate(stride)]
    return sum(steps, jnp.zeros(tuple(dim), jnp.int32))


def from_memory(array: Array, tensor: "Tensor") -> Array:
    """The tensor in the order of its dimensions."""
    dim, stride = tensor.dim or (), tensor.stride or ()
    if not is_packed(dim, stride):
        return array.reshape(-1)[_places(dim, stride)]
    order = order_of(stride)
    sizes = [dim[axis] for axis in order]
    if tensor.reordering_type == TILED:
        array = array.reshape(_tiles(sizes)).transpose(_swapped(len(sizes), (0, 3, 2, 1, 4)))
    return array.reshape(sizes).transpose(np.argsort(order))


def to_memory(array: Array, tensor: "Tensor") -> Array:
    """The array that stands for a tensor; what lies between its elements is 0."""
    dim, stride = tensor.dim or (), tensor.stride or ()
    if not is_packed(dim, stride):
        return jnp.zeros(span(dim, stride), array.dtype).at[_places(dim, stride)].set(array)
    array = array.transpose(order_of(stride))
    if tensor.reordering_type != TILED:
        return array
    *lead, rows, columns = array.shape
    parts = array.reshape(*lead, rows // 128, 4, 32, columns // 4, 4)
    return parts.transpose(_swapped(len(dim), (0, 3, 2, 1, 4))).reshape(array.shape)


def _tiles(sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of memory in order F8_128x4: tiles of rows, of columns, and in a tile r % 32, r // 32 and c."""
    *lead, rows, columns = sizes
    return (*lead, rows // 128, columns // 4, 32, 4, 4)


def _swapped(rank: int, order: Sequence[int]) -> tuple[int, ...]:
    """Axes before the last two stay, and the five that these become are in an order."""
    return (*range(rank - 2), *(rank - 2 + axis for axis in order))


def check_reordering(where: str, attribute: str, tensor: "Tensor") -> None:
    """Checks that a tensor can lie in the order that it has."""
    if tensor.reordering_type != TILED:
        return
    dim, stride = tensor.dim or (), tensor.stride or ()
    sizes = [dim[axis] for axis in order_of(stride)]
    fits = len(sizes) > 1 and is_packed(dim, stride) and not (sizes[-2] % 128 or sizes[-1] % 4)
    if not fits or tensor.data_type not in TILED_TYPES:
        expected = "NONE, or be of a tensor of 8-bit floats without gaps, of multiples of 128 rows and 4 columns"
        got = f"{tensor.reordering_type}, {dim}, {stride}, {tensor.data_type}"
        raise GraphError(where, attribute, expected, got)


class Tensor:
    """A tensor of a graph; its setters return it, so that they can be chained.

    Attributes:
      uid: an integer of 64 bits, local to the graph: another graph may use it again.
      name: what errors, plans and variant packs call it.
      dim, stride: its sizes and strides in elements; None as long as they are to be inferred.
      data_type: the dtype's name; None is the graph's default for such a tensor.
      is_virtual: whether it is an intermediate that nobody reads, so that it need not be written.
      is_pass_by_value: whether it is one number, given when the plan is executed.
      value: a constant that is known when the plan is made; None of others.
      reordering_type: "NONE", or "F8_128x4", the order of cuDNN's scales of blocks. The last two axes of the memory are
        cut into tiles of 128 rows and 4 columns, one behind the other, and element (r, c) of a tile lies at
        16 (r % 32) + 4 (r // 32) + c.
    """

    def __init__(self, graph: Any, uid: int, name: str, **properties: Any) -> None:
        self._graph = graph
        self.uid, self.name = uid, name
        self.dim: tuple[int, ...] | None = None
        self.stride: tuple[int, ...] | None = None
        self.data_type: str | None = None
        self.is_virtual: bool = properties.pop("is_virtual", False)
        self.is_pass_by_value: bool = properties.pop("is_pass_by_value", False)
        self.value: Any = properties.pop("value", None)
        self._check_kind()
        self.inferred: set[str] = set()  # what was inferred, which another validation infers again
        self.reordering_type = "NONE"
        self.set_reordering_type(properties.pop("reordering_type", "NONE"))
        if (dim := properties.pop("dim", None)) is not None:
            self.set_dim(dim)
        if (stride := properties.pop("stride", None)) is not None:
            self.set_stride(stride)
        if (data_type := properties.pop("data_type", None)) is not None:
            self.set_data_type(data_type)

    def __repr__(self) -> str:
        kind = "virtual" if self.is_virtual else "by value" if self.is_pass_by_value else "in memory"
        return f"Tensor({self.uid}, {self.name!r}, dim={self.dim}, stride={self.stride}, {self.data_type}, {kind})"

    def _check_kind(self) -> None:
        for attribute in ("is_virtual", "is_pass_by_value"):
            if not isinstance(getattr(self, attribute), bool):
                raise GraphError(self.where, attribute, "True or False", getattr(self, attribute))
        if self.value is not None and (isinstance(self.value, bool) or not isinstance(self.value, int | float)):
            raise GraphError(self.where, "value", "None or a number", self.value)
        if isinstance(self.value, int) and not INT64[0] <= self.value <= INT64[1]:
            raise GraphError(self.where, "value", "a number of at most 64 bits", self.value)

    @property
    def where(self) -> str:
        return f"tensor {self.name!r} (uid {self.uid})"

    def set_output(self, value: bool) -> "Tensor":
        """Whether a plan returns it; a virtual tensor is an intermediate."""
        self.is_virtual = not flag(self.where, "is_output", value)
        self._graph.changed()
        return self

    def set_is_virtual(self, value: bool) -> "Tensor":
        return self.set_output(not flag(self.where, "is_virtual", value))

    def set_name(self, name: str) -> "Tensor":
        if not isinstance(name, str):
            raise GraphError(self.where, "name", "a string", name)
        self.name = name
        self._graph.changed()
        return self

    def set_uid(self, uid: int) -> "Tensor":
        self._graph.change_uid(self, uid)
        return self

    def set_data_type(self, data_type: Any) -> "Tensor":
        self.data_type = dtype_of(self.where, "data_type", data_type)
        self.inferred.discard("data_type")
        self._graph.changed()
        return self

    def set_dim(self, dim: Sequence[int]) -> "Tensor":
        self.dim = _integers(self.where, "dim", dim, 1)
        self.inferred.discard("dim")
        self._graph.changed()
        return self

    def set_stride(self, stride: Sequence[int]) -> "Tensor":
        self.stride = _integers(self.where, "stride", stride, 0)
        self.inferred.discard("stride")
        self._graph.changed()
        return self

    def set_reordering_type(self, reordering_type: str) -> "Tensor":
        if not (isinstance(reordering_type, str) and reordering_type in REORDERINGS):
            raise GraphError(self.where, "reordering_type", f"one of {', '.join(REORDERINGS)}", reordering_type)
        self.reordering_type = reordering_type
        self._graph.changed()
        return self

    def get_uid(self) -> int:
        return self.uid

    def get_name(self) -> str:
        return self.name

    def get_dim(self) -> tuple[int, ...]:
        """The sizes, inferred if they were not set."""
        return self._known("dim")

    def get_stride(self) -> tuple[int, ...]:
        """The strides, inferred if they were not set."""
        return self._known("stride")

    def get_data_type(self) -> str:
        """The dtype's name, inferred if it was not set."""
        return self._known("data_type")

    def get_is_virtual(self) -> bool:
        return self.is_virtual

    def get_reordering_type(self) -> str:
        return self.reordering_type

    def get_shape(self) -> tuple[int, ...]:
        """The shape of the JAX array that stands for it: the sizes by descending stride."""
        return memory_shape(self.get_dim(), self.get_stride())

    def _known(self, attribute: str) -> Any:
        if getattr(self, attribute) is None or attribute in self.inferred:
            self._graph.infer()
        return getattr(self, attribute)


def _integers(where: str, attribute: str, value: Any, least: int) -> tuple[int, ...]:
    expected = f"integers of at least {least}, one for each axis"
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray) or len(value) > 8:
        raise GraphError(where, attribute, expected, value)
    if any(isinstance(v, bool) or not isinstance(v, int | np.integer) or v < least or v > INT64[1] for v in value):
        raise GraphError(where, attribute, expected, value)
    return tuple(int(v) for v in value)


def check_number(where: str, attribute: str, value: Any, data_type: str) -> None:
    """Checks a number that is to be converted: integers and truths lose nothing, floats are rounded."""
    dtype = numpy_dtype(data_type)
    if not isinstance(value, int | float | np.number | np.bool_):
        raise GraphError(where, attribute, "a number", value)
    if dtype.kind in "iub":
        low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        if not low <= value <= high or value != int(value):
            raise GraphError(where, attribute, f"an integer from {low} to {high}", value)
