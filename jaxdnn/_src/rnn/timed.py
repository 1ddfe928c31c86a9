"""The cases of `jaxdnn bench rnn`: layers of recurrent networks; PyTorch's are cuDNN's."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxdnn as dnn
from jaxdnn._src.cases import timed
from jaxdnn._src.cases.timed import Function
from jaxdnn._src.rnn import plain
from jaxdnn._src.rnn.steps import GATES


@dataclasses.dataclass(frozen=True)
class Layer(timed.Case):
    """y of sequences of one length; the gradient in x and both matrices is along one cotangent of y.

    hoisted: whether plain JAX multiplies the inputs of all steps at once, or as Flax's cells do step by step.
    """

    op: str
    family: str
    name: str
    batch: int
    steps: int
    inputs: int
    units: int
    passes: tuple[str, ...] = ("forward", "gradient")
    hoisted: bool = True

    @property
    def gates(self) -> int:
        return GATES[{"gru": "gru_after", "rnn": "tanh"}.get(self.op, self.op)]

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        wide = self.gates * self.units
        return (
            (batch, self.steps, self.inputs),
            (self.inputs, wide),
            (self.units, wide),
            (batch, self.steps, self.units),
        )

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        """Weights of the size that they start with."""
        x, w, r, dy = super().operands(batch, jnp.float32, seed)
        scaled = (x, w / math.sqrt(self.inputs), r / math.sqrt(self.units), dy)
        return tuple(v.astype(dtype) for v in scaled)

    def flops(self, which: str, batch: int) -> int | None:
        products = 2 * batch * self.steps * (self.inputs + self.units) * self.gates * self.units
        return products * (1 if which == "forward" else 3)

    def ours(self, which: str, engine: str | None) -> Function:
        return _passed(which, lambda x, w, r: getattr(dnn, self.op)(x, w, r, engine=engine)[0])

    def xla(self, which: str) -> Function:
        return _passed(
            which, lambda x, w, r: getattr(plain, self.op if self.hoisted else f"{self.op}_by_cells")(x, w, r)[0]
        )

    def decisive(self, which: str) -> str | None:
        """The recurrence: what else is called are products of all steps."""
        return "rnn" if which == "forward" else "rnn_backward"

    def torch(self, which: str, torch: Any, *tensors: Any) -> Callable[[], Any] | None:
        x, w, r, dy = tensors
        module = getattr(torch.nn, self.op.upper())(self.inputs, self.units, bias=False, batch_first=True)
        module = module.to(device=x.device, dtype=x.dtype)
        with torch.no_grad():
            module.weight_ih_l0.copy_(w.T)
            module.weight_hh_l0.copy_(r.T)
        if which == "forward":

            def forward() -> Any:
                with torch.no_grad():
                    return module(x)[0]

            return forward
        x = x.detach().requires_grad_(True)
        wanted = (x, module.weight_ih_l0, module.weight_hh_l0)

        def gradient() -> Any:
            of_x, of_w, of_r = torch.autograd.grad(module(x)[0], wanted, dy)
            return of_x, of_w.T, of_r.T

        return gradient


def _passed(which: str, y: Function) -> Function:
    if which == "forward":
        return lambda x, w, r, dy: y(x, w, r)
    return lambda x, w, r, dy: jax.vjp(y, x, w, r)[1](dy)


# Speech (LSTM 512 and 768, as recurrent acoustic models), characters, and states of agents.
CASES: tuple[timed.Case, ...] = (
    Layer("lstm", "speech", "lstm-512", 64, 256, 512, 512),
    Layer("lstm", "speech", "lstm-768", 16, 1024, 768, 768),
    Layer("gru", "speech", "gru-512", 64, 256, 512, 512),
    Layer("lstm", "text", "lstm-128", 64, 128, 128, 128),
    Layer("gru", "text", "gru-256", 128, 64, 256, 256),
    Layer("lstm", "text", "lstm-1024", 32, 128, 1024, 1024),
    Layer("gru", "agent", "gru-1", 1, 64, 256, 512),
    Layer("rnn", "agent", "rnn-256", 32, 128, 256, 256),
    *(Layer("lstm", "units", f"lstm-{n}", 64, 64, n, n) for n in (128, 256, 512)),
    *(Layer("lstm", "wide", f"lstm-{n}", 64, 256, n, n) for n in (640, 768, 1024)),
    *(Layer("gru", "wide", f"gru-{n}", 64, 256, n, n) for n in (768, 1024)),
    *(Layer("lstm", "cells", f"lstm-{n}-by-cells", 64, 64, n, n, hoisted=False) for n in (128, 256, 512)),
)
