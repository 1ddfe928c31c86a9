"""The interface of the cases that `jaxdnn bench` times."""

import abc
import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

Function = Callable[..., Any]
# Milliseconds of a call, of sets of operands and a number of repeats; raises a RuntimeError where it is no peer.
Clock = Callable[[Sequence[Sequence[Array]], int], float]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A peer whose pass needs more than the case's operands: timed is `function` of what `prepare` makes of these."""

    prepare: Function
    function: Function


class Case(abc.ABC):
    """One shape of one op. A subclass is a frozen dataclass with these attributes among its fields.

    Attributes:
      family: the group of the summary that the case belongs to, such as "resnet50".
      name: what the case is called within it.
      batch: how many images (or rows) it has on a GPU.
      passes: what is timed: "forward", and the backward passes there are.
      tuned: whether XLA times a library's kernels on the device when it compiles a pass.
    """

    family: str
    name: str
    batch: int
    passes: tuple[str, ...] = ("forward",)
    tuned = False

    @abc.abstractmethod
    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of the operands, cotangents included: every function below is called with all of them."""

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        """Fresh operands: normal numbers, unless a case needs others."""
        shapes = self.shapes(batch)
        ends = list(itertools.accumulate(map(math.prod, shapes)))
        # Drawn at once, because each call of the generator takes seconds to compile.
        drawn = jax.random.normal(jax.random.key(seed), (ends[-1],)).astype(dtype)
        of_each = (drawn[end - math.prod(shape) : end] for end, shape in zip(ends, shapes, strict=True))
        return tuple(a.reshape(shape) for a, shape in zip(of_each, shapes, strict=True))

    @abc.abstractmethod
    def ours(self, which: str, engine: str | None) -> Function:
        """A pass by jaxdnn. If `engine` is None, the engine is selected as for any call."""

    @abc.abstractmethod
    def xla(self, which: str) -> Function:
        """The same pass in jax.lax and jax.numpy, as users write it."""

    def others(self, which: str, batch: int, dtype: Any) -> dict[str, Function | Prepared]:
        """What the pass is compared with in JAX, by name."""
        return {"lax": self.xla(which)}

    def decisive(self, which: str) -> str | None:
        """The primitive whose engine the pass' row names; None is the last that it calls."""
        return None

    def clocks(self, which: str, batch: int, dtype: Any) -> dict[str, Clock]:
        """What the pass is compared with outside of JAX and PyTorch, by name, each with a clock of its own."""
        return {}

    def torches(self, which: str) -> dict[str, Callable[..., Any]]:
        """What the pass is compared with in PyTorch, by name, which begins with "torch"; as `torch` without a pass."""
        return {"torch": ft.partial(self.torch, which)}

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


@dataclasses.dataclass(frozen=True)
class Between(Case):
    """A pass as it stands in a network: what it reads is a sum that is a result too, what it writes is activated.

    XLA's program may join all of it, a kernel stands apart; that decides where arrays are small.
    """

    of: Case
    family: str
    name: str
    batch: int
    passes: tuple[str, ...] = ("forward",)

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        return self.of.shapes(batch)

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        return self.of.operands(batch, dtype, seed)

    def bytes(self, which: str, batch: int, itemsize: int) -> int | None:
        return self.of.bytes(which, batch, itemsize)

    def ours(self, which: str, engine: str | None) -> Function:
        return _between(self.of.ours(which, engine))

    def xla(self, which: str) -> Function:
        return _between(self.of.xla(which))


def between(case: Case) -> Between:
    """A case's passes as they stand in a network."""
    return Between(case, "between", case.name, case.batch, case.passes)


def _between(function: Function) -> Function:
    """A function of the sum of its first two operands, which is a result too, and the silu of its first result."""

    def run(x: Array, *others: Array) -> Any:
        total = x + others[0]
        first, *rest = jax.tree.leaves(function(total, *others))
        return total, jax.nn.silu(first), *rest

    return run


def gradient(function: Function, wanted: int, *operands: Array) -> Any:
    """The gradient in one of the operands, all but the last of which go to `function`; the last is the cotangent."""
    *given, cotangent = operands

    def of_one(value: Array) -> Any:
        return function(*given[:wanted], value, *given[wanted + 1 :])

    return jax.vjp(of_one, given[wanted])[1](cotangent)[0]


def product_pass(function: Function, which: str) -> Function:
    """A pass of a function of two operands, as one of these and of the result's cotangent."""
    if which == "forward":
        return lambda a, b, dy: function(a, b)
    return ft.partial(gradient, function, {"dgrad": 0, "wgrad": 1}[which])
