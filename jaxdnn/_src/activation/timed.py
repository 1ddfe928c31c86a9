"""The cases of `jaxdnn bench activation`: forward and backward on 8192 rows of 4096 elements."""

import dataclasses
import math
from typing import Any

import jaxdnn as dnn
from jaxdnn._src.activation.plain import FUNCTIONS
from jaxdnn._src.cases import timed
from jaxdnn._src.cases.timed import Function

WIDTH = 4096


@dataclasses.dataclass(frozen=True)
class Activation(timed.Case):
    """One activation."""

    family: str
    name: str
    batch: int = 8192
    passes: tuple[str, ...] = ("forward", "backward")

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """x and dy."""
        return (batch, WIDTH), (batch, WIDTH)

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        return (2 if which == "forward" else 3) * itemsize * math.prod(self.shapes(batch)[0])

    def ours(self, which: str, engine: str | None) -> Function:
        if which == "forward":
            return lambda x, dy: dnn.activation(x, activation=self.name, engine=engine)
        return lambda x, dy: dnn.activation_dgrad(dy, x, activation=self.name, engine=engine)

    def xla(self, which: str) -> Function:
        plain = FUNCTIONS[self.name]
        return lambda x, dy: plain(x) if which == "forward" else timed.gradient(plain, 0, x, dy)

    def torch(self, which: str, torch: Any, *tensors: Any) -> Any:
        """PyTorch's own kernels; the backward ones take what autograd saves for them."""
        x, dy = tensors
        aten = torch.ops.aten
        forward = {
            "relu": lambda: torch.relu(x),
            "gelu": lambda: aten.gelu(x, approximate="none"),
            "gelu_tanh": lambda: aten.gelu(x, approximate="tanh"),
            "swish": lambda: aten.silu(x),
            "tanh": lambda: torch.tanh(x),
            "softplus": lambda: aten.softplus(x),
        }[self.name]
        if which == "forward":
            return forward
        y = forward()
        return {
            "relu": lambda: aten.threshold_backward(dy, y, 0),
            "gelu": lambda: aten.gelu_backward(dy, x, approximate="none"),
            "gelu_tanh": lambda: aten.gelu_backward(dy, x, approximate="tanh"),
            "swish": lambda: aten.silu_backward(dy, x),
            "tanh": lambda: aten.tanh_backward(dy, y),
            "softplus": lambda: aten.softplus_backward(dy, x, 1, 20),
        }[self.name]


CASES: tuple[Activation, ...] = tuple(Activation("activation", name) for name in FUNCTIONS)
