"""Tensor descriptors: dimensions, strides, and what the two say about the memory.

The element with index (i_1, ..., i_d) lies sum_j i_j * strides[j] elements from the element (0, ..., 0).

Source: the cuDNN developer guide, "Tensors and Layouts" (cudnnSetTensorNdDescriptor, cudnnTensorFormat_t).
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

DEFAULT_LETTERS = {3: "NCW", 4: "NCHW", 5: "NCDHW", 6: "ABCDEF", 7: "ABCDEFG", 8: "ABCDEFGH"}
SPATIAL = "DHW"


@dataclass(frozen=True)
class TensorDescriptor:
    """A tensor of 3 to 8 dimensions, each with a size and a stride (in elements; negative ones mirror).

    dims: sizes, at least 1. strides: as many. dtype: the elements' type. letters: a name for each dimension, in
    the order of dims; default NCW, NCHW, NCDHW for 3 to 5 dimensions and ABC... beyond. A small c names the lanes
    of a vectorised channel dimension C, as in NC/32HW32.

    Raises TypeError for entries that are no integers and ValueError for sizes below 1, other than 3 to 8
    dimensions, and lengths that differ.

    >>> TensorDescriptor((2, 3, 5, 4), (60, 1, 12, 3), np.float32).layout
    'NHWC'
    """

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    letters: str | None = None

    def __post_init__(self) -> None:
        dims, strides = _integers("dims", self.dims), _integers("strides", self.strides)
        if not 3 <= len(dims) <= 8:
            raise ValueError(f"`dims` must have 3 to 8 entries, got {len(dims)}: {dims}.")
        if len(strides) != len(dims):
            raise ValueError(f"`strides` must have one entry for each of the {len(dims)} dims, got {len(strides)}.")
        if min(dims) < 1:
            raise ValueError(f"`dims` must be at least 1 each, got {dims}.")
        letters = DEFAULT_LETTERS[len(dims)] if self.letters is None else self.letters
        if len(letters) != len(dims) or len(set(letters)) != len(letters) or not letters.isalpha():
            raise ValueError(f"`letters` must be {len(dims)} different letters, got {letters!r}.")
        values = {"dims": dims, "strides": strides, "dtype": np.dtype(self.dtype), "letters": letters}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_layout(cls, layout: str, dims: Sequence[int], dtype: Any) -> "TensorDescriptor":
        """The fully packed descriptor of a layout's name.

        layout: "NCHW", "NHWC", "CHWN" and any other order of N, C and W, HW or DHW; "NC/32HW32" or "NCHWc32"
        (any number of lanes). dims: sizes in the order N, C, spatial, whatever the layout.
        Vectorised: the dimensions become (N, C/x, spatial, x) with the letters NC...c.

        >>> TensorDescriptor.from_layout("NC/32HW32", (1, 64, 5, 4), np.int8).dims
        (1, 2, 5, 4, 32)
        """
        order, lanes = _parse_layout(layout)
        sizes = _integers("dims", dims)
        logical = "NC" + SPATIAL[5 - len(order) :]
        if len(sizes) != len(order):
            raise ValueError(f"`dims` must have {len(order)} entries ({logical}) for {layout!r}, got {len(sizes)}.")
        if lanes is not None:
            if sizes[1] % lanes:
                raise ValueError(f"`dims` must have a C that {lanes} divides for {layout!r}, got {sizes[1]}.")
            sizes = (sizes[0], sizes[1] // lanes, *sizes[2:], lanes)
            logical, order = logical + "c", order + "c"
        size = dict(zip(logical, sizes, strict=True))
        stride = {letter: math.prod(size[later] for later in order[i + 1 :]) for i, letter in enumerate(order)}
        return cls(sizes, tuple(stride[letter] for letter in logical), dtype, logical)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def span(self) -> int:
        """The number of elements of memory from the lowest address to the highest, both counted."""
        return 1 + sum((d - 1) * abs(s) for d, s in zip(self.dims, self.strides, strict=True))

    @property
    def layout(self) -> str:
        """The letters in decreasing order of their strides; of equal strides the larger dimension goes first.

        Raises ValueError unless all strides are positive, as cuDNN's naming requires.
        """
        if min(self.strides) <= 0:
            raise ValueError(f"`strides` must be positive for a layout to have a name, got {self.strides}.")
        rank = {x: (-s, -d) for x, s, d in zip(self._names, self.strides, self.dims, strict=True)}
        return "".join(sorted(self._names, key=rank.__getitem__))

    def offsets(self) -> Array:
        """[dims]: the distance of each element from the element (0, ..., 0), in elements."""
        axes = np.ix_(*(np.arange(d, dtype=np.int64) * s for d, s in zip(self.dims, self.strides, strict=True)))
        return np.asarray(sum(axes, np.zeros((), np.int64)))

    def memory(self, array: Array, *, fill: Any = 0) -> Array:
        """[span]: the memory that holds `array`, from the lowest address up; `fill` where no element lies.

        array: of shape dims; for a vectorised descriptor also (N, C, spatial), with all channels on one axis.
        """
        offsets = self.offsets()
        if self.is_overlapping():
            raise ValueError("`array` needs an address for each element, but this descriptor is overlapping.")
        memory = np.full(self.span, fill, self.dtype)
        memory[offsets - offsets.min()] = self._with_lanes(np.asarray(array))
        return memory

    def is_fully_packed(self, layout: str | None = None) -> bool:
        """Whether each stride is the product of the next dimension and its stride, and the last stride is 1."""
        return self.is_packed(self._names, layout=layout)

    def is_packed(self, letters: str, *, layout: str | None = None) -> bool:
        """Whether the tensor is packed in the named dimensions.

        Dimensions stand in the order of `layout` (default: this descriptor's). Each named one has the product
        of the next dimension and its stride as its stride (the last one: 1); each other one at least that.

        >>> TensorDescriptor((1, 3, 5, 4), (120, 40, 8, 1), np.float32).is_packed("N")
        True
        """
        order = self.layout if layout is None else layout
        if not set(letters) <= set(self._names):
            raise ValueError(f"`letters` must be among {self._names!r}, got {letters!r}.")
        if sorted(order) != sorted(self._names):
            raise ValueError(f"`layout` must be an order of {self._names!r}, got {order!r}.")
        size = dict(zip(self._names, self.dims, strict=True))
        stride = dict(zip(self._names, self.strides, strict=True))
        least = [size[x] * stride[x] for x in order[1:]] + [1]
        return min(self.strides) > 0 and all(
            stride[x] == bound if x in letters else stride[x] >= bound for x, bound in zip(order, least, strict=True)
        )

    def is_spatially_packed(self) -> bool:
        """Whether the spatial dimensions are the minor ones and packed: NCHW or CNHW that is HW-packed."""
        spatial = "".join(x for x in self._names if x in SPATIAL)
        return {"N", "C"} | set(spatial) == set(self._names) and any(
            self.is_packed(spatial, layout=major + spatial) for major in ("NC", "CN")
        )

    def is_overlapping(self) -> bool:
        """Whether two different indices have the same address. Exact, whatever the strides and their signs."""
        return _overlaps([(d, abs(s)) for d, s in zip(self.dims, self.strides, strict=True) if d > 1])

    @property
    def _names(self) -> str:
        return self.letters or DEFAULT_LETTERS[len(self.dims)]

    def _with_lanes(self, array: Array) -> Array:
        if array.shape == self.dims:
            return array
        if "c" in self._names:
            size = dict(zip(self._names, self.dims, strict=True))
            names = self._names.replace("c", "")
            if array.shape == tuple(size[x] * (size["c"] if x == "C" else 1) for x in names):
                c = names.index("C")
                split = array.reshape(*array.shape[:c], size["C"], size["c"], *array.shape[c + 1 :])
                return np.moveaxis(split, c + 1, self._names.index("c"))
        raise ValueError(f"`array` must have the shape {self.dims}, got {array.shape}.")


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    values = tuple(values)
    if not all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in values):
        raise TypeError(f"`{name}` must be integers, got {values}.")
    return tuple(int(v) for v in values)


def _parse_layout(layout: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"NC/(\d+)(D?H?W)(\d+)", layout)
    if match and match[1] == match[3]:
        order, lanes = "NC" + match[2], int(match[1])
    else:
        match = re.fullmatch(r"([A-Z]+)(?:c(\d+))?", layout)
        order, lanes = (match[1], int(match[2]) if match[2] else None) if match else ("", None)
    if not 3 <= len(order) <= 5 or sorted(order) != sorted("NC" + SPATIAL[5 - len(order) :]) or lanes == 0:
        raise ValueError(f"`layout` must order N, C and W, HW or DHW, or be NC/xHWx or NCHWcx, got {layout!r}.")
    return order, lanes


def _overlaps(axes: list[tuple[int, int]]) -> bool:
    """Whether sum_j i_j stride_j takes a value twice for 0 <= i_j < dim_j; axes of (dim > 1, stride >= 0).

    It does just if some difference of indices, not all zero and |delta_j| < dim_j, has sum_j delta_j stride_j = 0.
    Two cheap tests decide nearly all tensors; the search below is exact for the rest.
    """
    if any(stride == 0 for _, stride in axes):
        return True
    axes = sorted(axes, key=lambda axis: axis[1], reverse=True)
    reach = [sum((d - 1) * s for d, s in axes[j:]) for j in range(len(axes) + 1)]
    if all(stride > reach[j + 1] for j, (_, stride) in enumerate(axes)):
        return False  # each stride steps over all that the smaller ones reach
    common = math.gcd(*(stride for _, stride in axes))
    if math.prod(d for d, _ in axes) > reach[0] // common + 1:
        return True  # more elements than addresses
    if any(_pair_overlaps(*pair) for pair in itertools.combinations(axes, 2)):
        return True
    return any(_leads_to_zero(axes[j:], reach[j:]) for j in range(len(axes)))


def _pair_overlaps(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """i * s = k * t has its least solution at i = t / gcd, k = s / gcd."""
    (dim_s, s), (dim_t, t) = first, second
    g = math.gcd(s, t)
    return t // g < dim_s and s // g < dim_t


def _leads_to_zero(axes: list[tuple[int, int]], reach: list[int]) -> bool:
    """Whether sum_j delta_j stride_j = 0 for some delta_0 > 0 and further deltas of either sign."""
    dim, stride = axes[0]
    most = min(dim - 1, reach[1] // stride)
    return any(_reaches(delta * stride, axes[1:], reach[1:]) for delta in range(1, most + 1))


def _reaches(target: int, axes: list[tuple[int, int]], reach: list[int]) -> bool:
    """Whether sum_j delta_j stride_j = target for some |delta_j| < dim_j (target taken with either sign)."""
    target = abs(target)
    if target > reach[0] or (axes and target % math.gcd(*(s for _, s in axes))):
        return False
    if target == 0:
        return True
    if len(axes) == 1:
        return target // axes[0][1] < axes[0][0]
    dim, stride = axes[0]
    # |target - delta * stride| <= reach[1] bounds delta
    low = max(-(dim - 1), -((reach[1] - target) // stride))
    high = min(dim - 1, (target + reach[1]) // stride)
    return any(_reaches(target - delta * stride, axes[1:], reach[1:]) for delta in range(low, high + 1))
