"""The cases of `jaxdnn bench softmax`: rows of 128 to 200,000 elements, and the linear layer with cross-entropy."""

import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxdnn as dnn
from jaxdnn._src.cases import timed
from jaxdnn._src.cases.timed import Function
from jaxdnn._src.softmax import plain

ELEMENTS = 1 << 25  # of an array


@dataclasses.dataclass(frozen=True)
class Rows(timed.Case):
    """Rows of one length."""

    family: str
    name: str
    length: int
    batch: int
    passes: tuple[str, ...] = ("forward", "backward", "log", "log-backward", "logsumexp")

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """x and dy; y comes with them."""
        return ((batch, self.length),) * 2

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        x, dy = super().operands(batch, dtype, seed)
        return x, dy, jax.nn.softmax(x, axis=-1)

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        arrays = {"logsumexp": 1}.get(which, 3 if "backward" in which else 2)
        return arrays * itemsize * math.prod(self.shapes(batch)[0])

    def ours(self, which: str, engine: str | None) -> Function:
        algorithm = "log" if which.startswith("log") else "accurate"
        if "backward" in which:
            return lambda x, dy, y: dnn.softmax_dgrad(dy, y, algorithm=algorithm, engine=engine)
        if which == "logsumexp":
            return lambda x, dy, y: dnn.logsumexp(x, engine=engine)
        return lambda x, dy, y: dnn.softmax(x, algorithm=algorithm, engine=engine)

    def xla(self, which: str) -> Function:
        return {
            "forward": lambda x, dy, y: jax.nn.softmax(x, axis=-1),
            "backward": lambda x, dy, y: plain.softmax_dgrad(dy, y),
            "log": lambda x, dy, y: jax.nn.log_softmax(x, axis=-1),
            "log-backward": lambda x, dy, y: dy - jnp.exp(y) * jnp.sum(dy, -1, keepdims=True),
            "logsumexp": lambda x, dy, y: jax.nn.logsumexp(x, axis=-1),
        }[which]

    def torch(self, which: str, torch: Any, *tensors: Any) -> Any:
        """PyTorch's own kernels."""
        x, dy, y = tensors
        aten = torch.ops.aten
        return {
            "forward": lambda: torch.softmax(x, -1),
            "backward": lambda: aten._softmax_backward_data(dy, y, -1, x.dtype),
            "log": lambda: torch.log_softmax(x, -1),
            "log-backward": lambda: aten._log_softmax_backward_data(dy, y, -1, x.dtype),
            "logsumexp": lambda: torch.logsumexp(x, -1),
        }[which]


@dataclasses.dataclass(frozen=True)
class CrossEntropy(timed.Case):
    """A language model's last layer and its loss; batch is tokens."""

    family: str
    name: str
    width: int
    words: int
    batch: int
    passes: tuple[str, ...] = ("forward", "gradient")
    tuned = True

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        return (batch, self.width), (self.width, self.words)

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        x, w = super().operands(batch, dtype, seed)
        return (
            x,
            w * jnp.asarray(self.width**-0.5, w.dtype),
            jax.random.randint(jax.random.key(seed), (batch,), 0, self.words),
        )

    def flops(self, which: str, batch: int) -> int:
        return (2 if which == "forward" else 6) * batch * self.width * self.words

    def ours(self, which: str, engine: str | None) -> Function:
        return dnn.linear_cross_entropy if which == "forward" else jax.grad(dnn.linear_cross_entropy, (0, 1))

    def xla(self, which: str) -> Function:
        """With all logits in memory, in float32."""
        return plain.linear_cross_entropy if which == "forward" else jax.grad(plain.linear_cross_entropy, (0, 1))


LENGTHS = (128, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 200000)
CASES: tuple[timed.Case, ...] = (
    *(Rows("softmax", str(n), n, ELEMENTS // n) for n in LENGTHS),
    *(
        timed.between(Rows("softmax", f"{rows}x1024", 1024, rows, passes=("forward", "backward", "log")))
        for rows in (4, 32, 256, 1024, 4096, 16384)
    ),
    CrossEntropy("cross-entropy", "8192x4096x131072", 4096, 131072, 8192),
)
OF_LAYER = {
    "softmax": ft.partial(Rows, passes=("forward", "backward")),
    "log_softmax": ft.partial(Rows, passes=("log", "log-backward", "logsumexp")),
}
