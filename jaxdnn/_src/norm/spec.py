"""What is known of a normalisation when it is traced, apart from shapes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdnn._src.activation.formulas import Parameter

OPS = ("norm", "norm_tangent", "norm_dgrad")
Activation = tuple[str, Parameter]
ACTIVATIONS: tuple[Activation, ...] = (("relu", None), ("swish", 1.0))
RANGE = "where squared deviations add up to 2^128 or more, results are 0 or NaN"


def reduced(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """A shape with length 1 along axes, which are negative."""
    return tuple(1 if axis - len(shape) in axes else size for axis, size in enumerate(shape))


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """What is known of a normalisation when it is traced.

    Attributes:
      axes: the axes that statistics are taken over, negative.
      summed: the axes along which scale and bias are the same, negative: their gradients are added over these.
      centred: whether the mean is subtracted.
      eps: added to the variance.
      scale, bias: whether `norm` has them (`norm_dgrad` and `norm_tangent`: a scale, and with an
        activation a bias).
      per_example: whether the statistics are of one example, so that the level of a fixed order is batch_invariant.
      converted: what y is converted to outside of `norm`, if that is known: the derivative of y then passes through
        this dtype, so that the backward op's dy has it and not the accumulator's.
      activation: y is that of s h + b, one of `ACTIVATIONS`. `norm_dgrad` and `norm_tangent` compute its slope from x
        again, and read neither y nor a slope from memory. Only of an x that is narrower than the accumulator, for which
        h follows from the saved statistics without another sum.
      tangents: of which operands `norm_tangent` has tangents.
    """

    axes: tuple[int, ...]
    summed: tuple[int, ...]
    centred: bool
    eps: float
    scale: bool
    bias: bool
    per_example: bool
    accumulate: np.dtype
    out_dtype: np.dtype
    converted: np.dtype | None = None
    activation: Activation | None = None
    tangents: tuple[str, ...] = ()
    engine: str | None = None
    level: str = "fast"

    def split(self, parameters: Sequence[Any]) -> tuple[Any, Any]:
        """The scale and the bias of further operands, None for what is missing."""
        rest = list(parameters)
        scale = rest.pop(0) if self.scale else None
        return scale, rest.pop(0) if rest else None

    def split_tangents(self, operands: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
        """The tangents of `norm_tangent` by name, and its further operands."""
        count = len(self.tangents)
        return dict(zip(self.tangents, operands[:count], strict=True)), list(operands[count:])
