"""The static arguments of the dropout kernels."""

import dataclasses

from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES


@dataclasses.dataclass(frozen=True)
class Plan:
    """A call of the kernels.

    Attributes:
      backward: whether dx is computed, from dy and x, or y, from x and the residual.
      arrays: the operands that the call has, of (x, bias, residual) or (dy, x, bias), and their dtypes.
      result: the dtype of y or dx.
      activation: "identity", "relu", "leaky_relu", "clipped_relu", or "table".
      parameter: of "leaky_relu" the slope, of "clipped_relu" the ceiling.
      limit: an element is kept if its random word is at least this; 0 keeps all and draws nothing.
      scale: the factor of kept elements.
      start: the counter of the first group, if it is known when traced; otherwise it is an operand.
      size: elements that one key counts.
      width: the period of the bias, in elements.
      plane, channels: channels first, the elements of a plane and the number of planes; channels last, 0.
      leads: examples under vmap, each of `size` elements; each has its own mask if the key is mapped.
      mapped: those of "bias", "key" and "start" that differ between the examples.
    """

    backward: bool
    arrays: tuple[tuple[str, str], ...]
    result: str
    activation: str
    parameter: float
    limit: int
    scale: float
    size: int
    width: int = 0
    start: int | None = None
    plane: int = 0
    channels: int = 0
    leads: int = 1
    mapped: tuple[str, ...] = ()

    @property
    def dtypes(self) -> dict[str, str]:
        return dict(self.arrays)

    @property
    def streams(self) -> list[str]:
        """The operands that are as large as the result."""
        return [name for name in self.dtypes if name != "bias"]

    @property
    def elements(self) -> int:
        """Elements of a group."""
        return VECTOR_BYTES // min(
            SIZES[dtype] for dtype in (*(self.dtypes[name] for name in self.streams), self.result)
        )

    @property
    def groups(self) -> int:
        return self.size // self.elements

    @property
    def operands(self) -> tuple[str, ...]:
        """The kernel's operands in order, without the results."""
        drawn = ("key", *(("start",) if self.start is None else ())) if self.limit else ()
        return (*self.dtypes, *drawn, *(("table",) if self.activation == "table" else ()))
