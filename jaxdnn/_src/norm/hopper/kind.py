"""The kinds of normalisation that the `hopper` engine has kernels for.

The axes of x that the statistics are taken over decide the kind. With each axis of x marked as kept (k) or reduced (r),
rows are like `kkrr` (k*r+), channels or groups of images like `krrk` or `krrkr` (k+r+k or k+r+kr), and batches like
`rrrk` (r+k+). No call is of two kinds.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from jaxdnn._src.core import engines
from jaxdnn._src.norm.spec import reduced


@dataclasses.dataclass(frozen=True)
class Kind:
    """Kernels for the statistics of one kind of axes.

    Attributes:
      axes: these axes in words, to follow "statistics over".
      pattern: a regular expression over x's axes, k for one that is kept, r for one that statistics are taken over.
      unsupported: why the kernels do not serve a call over such axes, as a clause; None if they do.
      run: a call and its operands to its results.
      workspace: bytes of device memory beside operands and results; None of a call that no kernel serves.
      slower: the kinds of calls that the kernels serve, but XLA's program faster.
    """

    axes: str
    pattern: str
    unsupported: Callable[[engines.Call], str | None]
    run: Callable[..., tuple[Array, ...]]
    workspace: Callable[[engines.Call], int | None]
    slower: tuple[engines.Slower, ...] = ()

    def has(self, call: engines.Call) -> bool:
        return re.fullmatch(self.pattern, marks(call)) is not None


def x_of(call: engines.Call) -> Any:
    """The shape and dtype of x."""
    return call.avals[1 if call.op == "norm_dgrad" else 0]


def parameters_of(call: engines.Call) -> Sequence[Any]:
    """The shapes and dtypes of scale and bias, or backward of the scale."""
    return call.avals[1 if call.op == "norm" else 4 :]


def size_of(call: engines.Call) -> int:
    """Bytes of x."""
    x = x_of(call)
    return math.prod(x.shape) * x.dtype.itemsize


def marks(call: engines.Call) -> str:
    """The axes of x: k for one that is kept, r for one that statistics are taken over."""
    rank = len(x_of(call).shape)
    return "".join("r" if axis in call.spec.axes else "k" for axis in range(-rank, 0))


def unlike(call: engines.Call, along: str, own: Sequence[int]) -> str | None:
    """Why parameters that vary along other axes of x than its `own` (negative), or whose gradients do, do not fit."""
    shape = x_of(call).shape
    fits = reduced(shape, [axis for axis in range(-len(shape), 0) if axis not in own])
    for value in parameters_of(call):
        if value.shape != fits:
            return f"its kernels take parameters that vary along {along} alone, not of shape {value.shape}"
    if call.op == "norm_dgrad" and reduced(shape, call.spec.summed) != fits:
        return f"its kernels add the gradients in scale and bias over all but {along}, not over {call.spec.summed}"
    return None
