"""The cases of `jaxdnn bench ctc`: published sizes of speech and of text in images."""

import dataclasses
import functools as ft
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxdnn as dnn
from jaxdnn._src.cases import timed
from jaxdnn._src.cases.timed import Function, Prepared
from jaxdnn._src.ctc import plain


@dataclasses.dataclass(frozen=True)
class Ctc(timed.Case):
    """Sequences of one length with labels of one length; the gradient is that of the sum of their losses."""

    family: str
    name: str
    batch: int
    steps: int
    classes: int
    labels: int
    passes: tuple[str, ...] = ("forward", "gradient")

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """Logits; the labels come with them."""
        return ((batch, self.steps, self.classes),)

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        labels = jax.random.randint(jax.random.key(seed + 1), (batch, self.labels), 1, self.classes)
        return (*super().operands(batch, dtype, seed), labels)

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        return (1 if which == "forward" else 2) * itemsize * batch * self.steps * self.classes

    def ours(self, which: str, engine: str | None) -> Function:
        return _passed(which, lambda x, labels: dnn.ctc_loss(x, labels, engine=engine))

    def xla(self, which: str) -> Function:
        """The same recursion over logarithms."""
        return _passed(which, ft.partial(plain.ctc_loss, blank=0))

    def others(self, which: str, batch: int, dtype: Any) -> dict[str, Function | Prepared]:
        """optax where it is installed, whose loss is that recursion."""
        if importlib.util.find_spec("optax"):
            return {"optax": _passed(which, _optax)}
        return super().others(which, batch, dtype)

    def torches(self, which: str) -> dict[str, Callable[..., Any]]:
        """PyTorch's own kernels, and cuDNN's, to which it gives at most 256 labels in 32 bits that lie on the host."""
        return super().torches(which) | {"torch cudnn": ft.partial(self.torch, which, cudnn=True)}

    def torch(self, which: str, torch: Any, *tensors: Any, cudnn: bool = False) -> Callable[[], Any] | None:
        """Both take float32."""
        x, labels = tensors
        n, logits = len(x), x.float().detach().requires_grad_(which == "gradient")
        labels = labels.int().cpu().flatten() if cudnn else labels.long()
        integers = torch.int32 if cudnn else torch.long
        steps, count = (torch.full((n,), size, dtype=integers) for size in (self.steps, self.labels))

        def run() -> Any:
            log = torch.log_softmax(logits, -1).transpose(0, 1)
            losses = torch.nn.functional.ctc_loss(log, labels, steps, count, reduction="none")
            return losses if which == "forward" else torch.autograd.grad(losses.sum(), logits)[0]

        return run


def _passed(which: str, losses: Function) -> Function:
    return losses if which == "forward" else jax.grad(lambda x, labels: jnp.sum(losses(x, labels).astype(jnp.float32)))


def _optax(x: Array, labels: Array) -> Array:
    import optax  # pyright: ignore[reportMissingImports]

    return optax.ctc_loss(x, jnp.zeros(x.shape[:2], x.dtype), labels, jnp.zeros(labels.shape, x.dtype))


# steps, classes, labels: CRNN on words of 37 classes; characters, word pieces and words of speech.
CASES: tuple[timed.Case, ...] = (
    Ctc("text", "crnn", 256, 26, 37, 8),
    Ctc("text", "line", 32, 128, 6625, 25),
    Ctc("speech", "512x64", 64, 512, 64, 64),
    Ctc("speech", "characters", 32, 1000, 32, 100),
    Ctc("speech", "pieces", 32, 1000, 1000, 100),
    Ctc("speech", "words", 32, 1000, 10000, 100),
)
