"""Dropout, and what stands before and after it in a transformer: bias, gelu, dropout, residual."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxdnn as dnn
from jaxdnn.bench import cases
from jaxdnn.bench.cases import Function

WIDTH, RATE = 4096, 0.1


@dataclasses.dataclass(frozen=True)
class Dropout(cases.Case):
    """Dropout of 8192 rows of 4096 elements; its backward pass is itself."""

    family: str
    name: str
    layout: str | None = None
    batch: int = 8192
    passes: tuple[str, ...] = ("forward",)

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """x, in rows, or as images of 8 x 8 pixels."""
        return ((batch, WIDTH),) if self.layout is None else ((batch // 64, WIDTH, 8, 8),)

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        """The arrays, and a key."""
        return *super().operands(batch, dtype, seed), jnp.asarray(np.array([seed, 1], np.uint32))

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        return 2 * itemsize * math.prod(self.shapes(batch)[0])

    def ours(self, which: str, engine: str | None) -> Function:
        return lambda x, key: dnn.dropout(x, key, rate=RATE, layout=self.layout, engine=engine)

    def xla(self, which: str) -> Function:
        """As in flax: a mask of `jax.random.bernoulli`."""
        return lambda x, key: _with_jax_random(x, key)

    def torch(self, which: str, *tensors: Any) -> Any:
        import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)

        return lambda: torch.nn.functional.dropout(tensors[0], RATE)


@dataclasses.dataclass(frozen=True)
class Fused(Dropout):
    """residual + dropout(gelu(x + bias)): ours in sequence, which XLA fuses."""

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """x, residual and bias."""
        return (batch, WIDTH), (batch, WIDTH), (WIDTH,)

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        return 3 * itemsize * math.prod(self.shapes(batch)[0])

    def ours(self, which: str, engine: str | None) -> Function:
        def run(x: Array, residual: Array, bias: Array, key: Array) -> Array:
            y = dnn.activation(x + bias[None], activation="gelu")
            return residual + dnn.dropout(y, key, rate=RATE, engine=engine)

        return run

    def xla(self, which: str) -> Function:
        def run(x: Array, residual: Array, bias: Array, key: Array) -> Array:
            return residual + _with_jax_random(jax.nn.gelu(x + bias[None], approximate=False), key)

        return run

    def torch(self, which: str, *tensors: Any) -> Any:
        import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)

        x, residual, bias, _ = tensors
        functional = torch.nn.functional
        return lambda: residual + functional.dropout(functional.gelu(x + bias), RATE)


def _with_jax_random(x: Array, key: Array) -> Array:
    kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 1 - RATE, x.shape)
    return jnp.where(kept, x / (1 - RATE), jnp.zeros_like(x))


CASES: tuple[Dropout, ...] = (
    Dropout("dropout", "rows"),
    Dropout("dropout", "images, channels first", "NCHW"),
    Fused("dropout", "bias, gelu, dropout, residual"),
)
