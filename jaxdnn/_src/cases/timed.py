"""The interface of the cases that `jaxdnn bench` times."""

import abc
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

Function = Callable[..., Any]


class Case(abc.ABC):
    """One shape of one op. A subclass is a frozen dataclass with these attributes among its fields.

    Attributes:
      family: the group of the summary that the case belongs to, such as "resnet50".
      name: what the case is called within it.
      batch: how many images (or rows) it has on a GPU.
      passes: what is timed: "forward", and the backward passes there are.
    """

    family: str
    name: str
    batch: int
    passes: tuple[str, ...] = ("forward",)

    @abc.abstractmethod
    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of the operands, cotangents included: every function below is called with all of them."""

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        """Fresh operands: normal numbers, unless a case needs others."""
        keys = jax.random.split(jax.random.key(seed), len(self.shapes(batch)))
        drawn = (jax.random.normal(key, shape) for key, shape in zip(keys, self.shapes(batch), strict=True))
        return tuple(a.astype(dtype) for a in drawn)

    @abc.abstractmethod
    def ours(self, which: str, engine: str | None) -> Function:
        """A pass by jaxdnn. If `engine` is None, the engine is selected as for any call."""

    @abc.abstractmethod
    def xla(self, which: str) -> Function:
        """The same pass in jax.lax and jax.numpy, as users write it."""

    def torch(self, which: str, torch: Any, *tensors: Any) -> Callable[[], Any] | None:
        """The same pass through PyTorch, whose module is `torch`, as a function to time; None if it has no such op.

        `tensors` hold the operands as they are, in JAX's order of dimensions.
        """
        return None

    def flops(self, which: str, batch: int) -> int | None:
        """The number of floating-point operations of a pass; None if the pass is not reported in operations."""
        return None

    def bytes(self, which: str, batch: int, itemsize: int) -> int | None:
        """The bytes of a pass that reads each operand once and writes each result once; None if arithmetic binds."""
        return None


def gradient(function: Function, wanted: int, *operands: Array) -> Any:
    """The gradient in one of the operands, all but the last of which go to `function`; the last is the cotangent."""
    *given, cotangent = operands

    def of_one(value: Array) -> Any:
        return function(*given[:wanted], value, *given[wanted + 1 :])

    return jax.vjp(of_one, given[wanted])[1](cotangent)[0]
