"""What a family of `jaxdnn bench` consists of: the interface of a case."""

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
        """A pass through jaxdnn; an engine of None is chosen by the rule."""

    @abc.abstractmethod
    def xla(self, which: str) -> Function:
        """The same pass as users of jax.lax and jax.numpy write it."""

    def torch(self, which: str, torch: Any, *tensors: Any) -> Callable[[], Any] | None:
        """The same pass through PyTorch, whose module is `torch`, as a function to time; None if it has no such op.

        `tensors` hold the operands as they are, in JAX's order of dimensions.
        """
        return None

    def flops(self, which: str, batch: int) -> int | None:
        """Floating-point operations of a pass; None where they say nothing."""
        return None

    def bytes(self, which: str, batch: int, itemsize: int) -> int | None:
        """The bytes that a pass must move, each operand read once and each result written once; None: not bound so."""
        return None


def gradient(function: Function, wanted: int, *operands: Array) -> Any:
    """The gradient in one of the operands, all but the last of which go to `function`; the last is the cotangent."""
    *given, cotangent = operands

    def of_one(value: Array) -> Any:
        return function(*given[:wanted], value, *given[wanted + 1 :])

    return jax.vjp(of_one, given[wanted])[1](cotangent)[0]
