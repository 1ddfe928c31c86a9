"""The cases of `jaxdnn bench attention`: lengths, widths and heads of language and vision models; windows; decoding.

Operations are those of pairs that a query sees: two products forward, five backward, seven of a value with its tangent,
whatever a kernel computes again. Beside lax there are cuDNN, through `jax.nn`, and PyTorch with two of its backends.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxdnn as dnn
from jaxdnn._src.attention import plain
from jaxdnn._src.cases import timed
from jaxdnn._src.cases.timed import Function

TOKENS = 1 << 14  # of a batch
PASSES = ("forward", "backward", "tangent")
MOST_SCORES = 1 << 30  # of which plain JAX has several arrays in memory


@dataclasses.dataclass(frozen=True)
class Attention(timed.Case):
    """Sequences of one length; `backward` has what the forward pass left.

    window: the keys before a query that it sees, besides its own.
    """

    family: str
    name: str
    batch: int
    queries: int
    keys: int
    heads: int = 16
    shared: int = 16
    features: int = 128
    values: int = 128
    causal: bool = False
    window: int | None = None
    passes: tuple[str, ...] = PASSES[:2]

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """q, k, v and dy; y and its logsumexp come with them."""
        return (
            (batch, self.queries, self.heads, self.features),
            (batch, self.keys, self.shared, self.features),
            (batch, self.keys, self.shared, self.values),
            (batch, self.queries, self.heads, self.values),
        )

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        q, k, v, dy = super().operands(batch, dtype, seed)
        return q, k, v, dy, *dnn.attention(q, k, v, **self.options, return_logsumexp=True)

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": None if self.window is None else (self.window, 0)}

    @property
    def seen(self) -> int:
        """The number of keys that the queries of a sequence see, of all queries together."""
        if not self.causal:
            return self.queries * self.keys
        left = self.keys if self.window is None else self.window
        ends = (min(i, self.keys - 1) for i in range(self.queries))
        return sum(max(end - max(i - left, 0) + 1, 0) for i, end in enumerate(ends))

    def flops(self, which: str, batch: int) -> int:
        d, e = self.features, self.values
        widths = {"forward": d + e, "backward": 3 * d + 2 * e, "tangent": 4 * d + 3 * e}[which]
        return 2 * batch * self.heads * self.seen * widths

    def ours(self, which: str, engine: str | None) -> Function:
        run = ft.partial(dnn.attention, engine=engine, **self.options)
        if which == "backward":
            dgrad = ft.partial(dnn.attention_dgrad, engine=engine, **self.options)
            return lambda q, k, v, dy, y, lse: dgrad(dy, q, k, v, y, lse)
        return _passed(which, run)

    def xla(self, which: str) -> Function:
        """With all scores in memory."""
        run = ft.partial(plain.attention_of, causal=self.causal, window=self.window)
        if which == "backward":
            return lambda q, k, v, dy, y, lse: jax.vjp(run, q, k, v)[1](dy)
        return _passed(which, run)

    def others(self, which: str, batch: int, dtype: Any) -> dict[str, Function | timed.Prepared]:
        found: dict[str, Function | timed.Prepared] = {}
        if batch * self.heads * self.queries * self.keys <= MOST_SCORES:
            found = {"lax": self.xla(which) if which != "backward" else prepared(self.xla_forward)}
        if self._is_cudnn(which, dtype):
            run = self.cudnn
            found["cudnn"] = prepared(run) if which == "backward" else _passed(which, run)
        return found

    @property
    def xla_forward(self) -> Function:
        return ft.partial(plain.attention_of, causal=self.causal, window=self.window)

    def cudnn(self, q: Array, k: Array, v: Array) -> Array:
        """Values as wide as keys, as `jax.nn` requires them: filled with zeros."""
        window = None if self.window is None else (self.window, 0)
        v = jnp.pad(v, [(0, 0)] * 3 + [(0, self.features - self.values)])
        y = jax.nn.dot_product_attention(
            q, k, v, implementation="cudnn", is_causal=self.causal, local_window_size=window
        )
        return y[..., : self.values]

    def _is_cudnn(self, which: str, dtype: Any) -> bool:
        """Whether cuDNN has the pass through `jax.nn`, on NVIDIA GPUs alone."""
        narrow = jnp.dtype(dtype).itemsize == 2
        on_gpu = jax.default_backend() == "gpu"
        return on_gpu and narrow and which != "tangent"

    def torches(self, which: str) -> dict[str, Callable[..., Any]]:
        if which == "tangent" or self.window is not None:
            return {}
        return {f"torch:{name}": ft.partial(self._torch, which, name) for name in ("cudnn", "flash")}

    def _torch(self, which: str, backend: str, torch: Any, *tensors: Any) -> Callable[[], Any]:
        """One of the backends of scaled_dot_product_attention, with heads that share keys as it has them."""
        q, k, v, dy = (x.transpose(1, 2) for x in tensors[:4])
        aten, scale = torch.ops.aten, self.features**-0.5
        if backend == "cudnn":
            forward = lambda: aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, self.causal, False, scale=scale
            )
        else:
            forward = lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal, False, scale=scale)
        if which == "forward":
            return lambda: forward()[0]
        y, lse, *lengths, seed, offset, _ = forward()
        if backend == "cudnn":
            return lambda: aten._scaled_dot_product_cudnn_attention_backward(
                dy, q, k, v, y, lse, seed, offset, None, *lengths, 0.0, self.causal, scale=scale
            )
        return lambda: aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, y, lse, *lengths, 0.0, self.causal, seed, offset, scale=scale
        )


@dataclasses.dataclass(frozen=True)
class Decode(timed.Case):
    """One query of each sequence to a cache that is full; memory binds."""

    family: str
    name: str
    batch: int
    keys: int
    heads: int = 32
    shared: int = 8
    features: int = 128
    passes: tuple[str, ...] = ("forward",)

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """q, k and v; the lengths come with them."""
        cache = (batch, self.keys, self.shared, self.features)
        return (batch, 1, self.heads, self.features), cache, cache

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        return *super().operands(batch, dtype, seed), jnp.full(batch, self.keys, jnp.int32)

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        q, k, v = self.shapes(batch)
        return itemsize * (2 * math.prod(q) + math.prod(k) + math.prod(v))

    def ours(self, which: str, engine: str | None) -> Function:
        return ft.partial(dnn.attention_decode, engine=engine)

    def xla(self, which: str) -> Function:
        return plain.attention_decode

    def others(self, which: str, batch: int, dtype: Any) -> dict[str, Function | timed.Prepared]:
        found: dict[str, Function | timed.Prepared] = {"lax": self.xla(which)}
        if jax.default_backend() == "gpu" and jnp.dtype(dtype).itemsize == 2:
            run = ft.partial(jax.nn.dot_product_attention, implementation="cudnn")
            found["cudnn"] = lambda q, k, v, n: run(q, k, v, query_seq_lengths=n * 0 + 1, key_value_seq_lengths=n)
        return found

    def torches(self, which: str) -> dict[str, Callable[..., Any]]:
        """PyTorch's have no lengths: they see the whole cache too."""
        whole = Attention("", "", 1, 1, self.keys, features=self.features)
        run = lambda name, torch, q, k, v, _: whole._torch("forward", name, torch, q, k, v, q)
        return {f"torch:{name}": ft.partial(run, name) for name in ("cudnn", "flash")}


def _passed(which: str, run: Function) -> Function:
    """Forward, or with the tangent along the operands themselves."""
    if which == "forward":
        return lambda q, k, v, dy, y, lse: run(q, k, v)
    return lambda q, k, v, dy, y, lse: jax.jvp(run, (q, k, v), (q, k, v))


def prepared(run: Function) -> timed.Prepared:
    """The backward pass of a function alone: what its forward pass leaves is made beforehand."""
    tree: list[Any] = []

    def prepare(q: Array, k: Array, v: Array, dy: Array, y: Array, lse: Array) -> tuple[Array, ...]:
        left, found = jax.tree.flatten(jax.vjp(run, q, k, v)[1])
        tree[:] = [found]
        return (*left, dy)

    return timed.Prepared(prepare, lambda *given: jax.tree.unflatten(tree[0], given[:-1])(given[-1]))


def _of(family: str, length: int, **sizes: Any) -> Attention:
    """Sequences of one length, so many that a batch has `TOKENS` of them, but at least one."""
    return Attention(family, f"{family}-{_short(length)}", max(1, TOKENS // length), length, length, **sizes)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


LENGTHS = tuple(1 << n for n in range(10, 17))
CASES: tuple[timed.Case, ...] = (
    *(_of("causal", n, causal=True, passes=PASSES if n == 4096 else PASSES[:2]) for n in LENGTHS),
    *(_of("full", n, passes=PASSES if n == 8192 else PASSES[:2]) for n in LENGTHS if n <= 16384),
    *(_of("gqa", n, causal=True, heads=64, shared=8) for n in (2048, 4096, 8192, 16384)),
    *(_of("d64", n, causal=True, heads=32, shared=32, features=64, values=64) for n in (4096, 16384)),
    _of("d64-full", 8192, heads=32, shared=32, features=64, values=64),
    *(_of("d256", n, causal=True, heads=8, shared=8, features=256, values=256) for n in (4096, 16384)),
    *(_of("d192/128", n, causal=True, features=192) for n in (4096, 16384)),
    *(_of("window", n, causal=True, window=1023) for n in (4096, 16384)),
    # Lengths and numbers of heads that no published table has.
    *(_of("other", n, causal=True, heads=12, shared=4) for n in (1500, 3000, 10000)),
    *(
        Decode("decode", f"{n // 1024}k x {b}", b, n)
        for n in (8192, 32768, 131072)
        for b in (1, 16, 64)
        if n * b <= 1 << 21
    ),
    Attention("vision", "vit-b", 128, 197, 197, heads=12, shared=12, features=64, values=64),
    Attention("vision", "cross", 16, 4096, 77, heads=8, shared=8, features=64, values=64),
)
