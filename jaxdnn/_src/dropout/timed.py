"""The cases of `jaxdnn bench dropout`: dropout, and a transformer's bias, gelu, dropout and residual."""

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

RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Dropout(timed.Case):
    """Dropout of rows; its backward pass is itself."""

    family: str
    name: str
    layout: str | None = None
    batch: int = 8192
    width: int = 4096
    passes: tuple[str, ...] = ("forward",)

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """x, in rows, or as images of 8 x 8 pixels."""
        return ((batch, self.width),) if self.layout is None else ((batch // 64, self.width, 8, 8),)

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        """The arrays, and a key."""
        return *super().operands(batch, dtype, seed), jnp.array([seed, 1], jnp.uint32)

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        return 2 * itemsize * math.prod(self.shapes(batch)[0])

    def ours(self, which: str, engine: str | None) -> Function:
        return lambda x, key: dnn.dropout(x, key, rate=RATE, layout=self.layout, engine=engine)

    def xla(self, which: str) -> Function:
        """As in flax: a mask of `jax.random.bernoulli`."""
        return lambda x, key: _with_jax_random(x, key)

    def torch(self, which: str, torch: Any, *tensors: Any) -> Any:
        return lambda: torch.nn.functional.dropout(tensors[0], RATE)


@dataclasses.dataclass(frozen=True)
class Fused(Dropout):
    """residual + dropout(gelu(x + bias)). Backward, the gradients in x and bias, with the residual as dy."""

    activation: str | None = "gelu"
    passes: tuple[str, ...] = ("forward", "backward")

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """x, residual and bias."""
        return (batch, self.width), (batch, self.width), (self.width,)

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        """Backward without an activation x is not read."""
        arrays = 3 if which == "forward" or self.activation else 2
        return arrays * itemsize * math.prod(self.shapes(batch)[0])

    def ours(self, which: str, engine: str | None) -> Function:
        def run(x: Array, residual: Array | None, bias: Array, key: Array) -> Array:
            given: dict[str, Any] = {"bias": bias, "residual": residual, "activation": self.activation}
            return dnn.dropout(x, key, rate=RATE, engine=engine, **given)

        return run if which == "forward" else _gradients(run)

    def xla(self, which: str) -> Function:
        def run(x: Array, residual: Array | None, bias: Array, key: Array) -> Array:
            z = x + bias[None]
            y = _with_jax_random(jax.nn.gelu(z, approximate=False) if self.activation else z, key)
            return y if residual is None else residual + y

        return run if which == "forward" else _gradients(run)

    def torch(self, which: str, torch: Any, *tensors: Any) -> Any:
        """Its own kernels, one after the other; backward those that autograd calls, with the mask kept."""
        x, residual, bias, _ = tensors
        functional, aten = torch.nn.functional, torch.ops.aten

        def forward() -> Any:
            z = x + bias
            return residual + functional.dropout(functional.gelu(z) if self.activation else z, RATE)

        if which == "forward":
            return forward
        z, mask = x + bias, torch.rand(x.shape, device=x.device) >= RATE

        def backward() -> Any:
            dz = aten.native_dropout_backward(residual, mask, 1 / (1 - RATE))
            dz = aten.gelu_backward(dz, z) if self.activation else dz
            return dz, dz.sum(0)

        return backward


def _gradients(run: Function) -> Function:
    """The gradients in x and bias; the residual is not read."""

    def backward(x: Array, dy: Array, bias: Array, key: Array) -> Any:
        return jax.vjp(lambda x, bias: run(x, None, bias, key), x, bias)[1](dy)

    return backward


def _with_jax_random(x: Array, key: Array) -> Array:
    kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 1 - RATE, x.shape)
    return jnp.where(kept, x / (1 - RATE), jnp.zeros_like(x))


CASES: tuple[Dropout, ...] = (
    Dropout("dropout", "rows"),
    Dropout("dropout", "images, channels first", "NCHW"),
    Fused("dropout", "bias, gelu, dropout, residual"),
    Fused("dropout", "bias, dropout, residual", activation=None),
)
OF_LAYER = {"dropout": Dropout, "bias_dropout_add": ft.partial(Fused, activation=None)}
