"""The cases of `jaxdnn bench matmul`: layers of transformers, with an epilogue too, batches of products, experts."""

import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jaxdnn as dnn
from jaxdnn._src.cases import timed
from jaxdnn._src.cases.timed import Function


@dataclasses.dataclass(frozen=True)
class Layer(timed.Case):
    """So many rows of K columns times a matrix of N columns."""

    family: str
    name: str
    k: int
    n: int
    batch: int = 8192
    passes: tuple[str, ...] = ("forward", "dgrad", "wgrad")
    tuned = True

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """a, b and dy."""
        return (batch, self.k), (self.k, self.n), (batch, self.n)

    def flops(self, which: str, batch: int) -> int:
        """Two operations per multiply-add; each pass has as many."""
        a, *_ = self.shapes(batch)
        return 2 * math.prod(a) * self.n

    def ours(self, which: str, engine: str | None) -> Function:
        return timed.product_pass(ft.partial(dnn.matmul, engine=engine), which)

    def xla(self, which: str) -> Function:
        return timed.product_pass(jnp.matmul, which)

    def torch(self, which: str, torch: Any, *tensors: Any) -> Any:
        """cuBLAS through PyTorch."""
        a, b, dy = tensors
        left, right = {"forward": (a, b), "dgrad": (dy, b.mT), "wgrad": (a.mT, dy)}[which]
        return lambda: torch.matmul(left, right)


@dataclasses.dataclass(frozen=True)
class Batched(Layer):
    """A batch of products of matrices, each of `rows` rows."""

    rows: int = 512

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """a, b and dy."""
        return (batch, self.rows, self.k), (batch, self.k, self.n), (batch, self.rows, self.n)


@dataclasses.dataclass(frozen=True)
class Fused(Layer):
    """gelu(a b + bias), or with a residual a b + bias + residual."""

    residual: bool = False
    passes: tuple[str, ...] = ("forward",)

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """a, b, bias and residual."""
        return (batch, self.k), (self.k, self.n), (self.n,), (batch, self.n)

    def ours(self, which: str, engine: str | None) -> Function:
        def run(a: Array, b: Array, bias: Array, residual: Array) -> Array:
            given: dict[str, Any] = {"residual": residual} if self.residual else {"activation": "gelu"}
            return dnn.matmul(a, b, bias=bias, engine=engine, **given)

        return run

    def xla(self, which: str) -> Function:
        def run(a: Array, b: Array, bias: Array, residual: Array) -> Array:
            z = jnp.matmul(a, b) + bias[None]
            return z + residual if self.residual else jax.nn.gelu(z, approximate=False)

        return run

    def torch(self, which: str, torch: Any, *tensors: Any) -> Any:
        """cuBLAS with the bias, and a kernel for what follows."""
        a, b, bias, residual = tensors
        if self.residual:
            return lambda: torch.addmm(bias, a, b) + residual
        return lambda: torch.nn.functional.gelu(torch.addmm(bias, a, b))


@dataclasses.dataclass(frozen=True)
class Experts(Layer):
    """Rows of `groups` groups whose sizes are drawn.

    uneven: whether group i is 1 / (i + 1) as likely as the first; otherwise all groups are alike.
    """

    groups: int = 8
    uneven: bool = False

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """a, b and dy."""
        return (batch, self.k), (self.groups, self.k, self.n), (batch, self.n)

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        """The arrays, and the number of rows of each group."""
        shares = 1 / np.arange(1, self.groups + 1) if self.uneven else np.ones(self.groups)
        sizes = np.random.default_rng(0).multinomial(batch, shares / shares.sum())
        return *super().operands(batch, dtype, seed), jnp.asarray(sizes, jnp.int32)

    def ours(self, which: str, engine: str | None) -> Function:
        return _pass_of_groups(ft.partial(dnn.grouped_matmul, engine=engine), which)

    def xla(self, which: str) -> Function:
        return _pass_of_groups(lax.ragged_dot, which)

    def torch(self, which: str, torch: Any, *tensors: Any) -> Any:
        """A loop over the groups, whose sizes are known to the program."""
        a, b, dy, sizes = tensors
        parts = [v.split(sizes.tolist()) for v in (a, dy)]
        operands = {
            "forward": zip(parts[0], b, strict=True),
            "dgrad": zip(parts[1], b.mT, strict=True),
            "wgrad": ((rows.mT, ct) for rows, ct in zip(*parts, strict=True)),
        }
        pairs = list(operands[which])
        return lambda: [torch.matmul(left, right) for left, right in pairs]

    def torches(self, which: str) -> dict[str, Any]:
        return super().torches(which) | {"torch grouped_mm": ft.partial(self.torch_grouped, which)}

    def torch_grouped(self, which: str, torch: Any, *tensors: Any) -> Any:
        """PyTorch's kernel for groups whose sizes are on the device: of bfloat16 alone, on these GPUs."""
        a, b, dy, sizes = tensors
        run = getattr(torch, "_grouped_mm", None)
        if run is None or a.dtype != torch.bfloat16:
            return None
        ends = sizes.cumsum(0, dtype=torch.int32)
        left, right = {"forward": (a, b), "dgrad": (dy, b.mT), "wgrad": (a.mT, dy)}[which]
        return lambda: run(left, right, offs=ends)


def _pass_of_groups(function: Function, which: str) -> Function:
    return lambda a, b, dy, sizes: timed.product_pass(lambda a, b: function(a, b, sizes), which)(a, b, dy)


CASES: tuple[Layer, ...] = (
    *(Layer("layers", f"{name} {k} to {n}", k, n) for name, k, n in (
        ("ViT-B", 768, 3072),
        ("ViT-B", 3072, 768),
        ("GPT-2", 1024, 3072),
        ("Llama 7B", 4096, 4096),
        ("Llama 7B", 4096, 11008),
        ("Llama 7B", 11008, 4096),
        ("vocabulary", 1024, 50304),
    )),
    *(Layer("few rows", f"{rows} rows, 4096 to 11008", 4096, 11008, rows, ("forward",)) for rows in (1, 16, 128)),
    Batched("batches", "scores 64 to 512", 64, 512, 128),
    Batched("batches", "values 512 to 64", 512, 64, 128),
    Fused("fused", "bias, gelu, ViT-B 768 to 3072", 768, 3072),
    Fused("fused", "bias, gelu, Llama 7B 4096 to 11008", 4096, 11008),
    Fused("fused", "bias, residual, ViT-B 3072 to 768", 3072, 768, residual=True),
    Experts("experts", "8 of 4096 to 14336", 4096, 14336),
    Experts("experts", "8 of 14336 to 4096", 14336, 4096),
    Experts("experts", "8 of 4096 to 14336, uneven", 4096, 14336, uneven=True),
    Experts("experts", "64 of 2048 to 1408", 2048, 1408, groups=64),
    Experts("experts", "64 of 2048 to 1408, 256 rows", 2048, 1408, 256, groups=64),
)  # fmt: skip
