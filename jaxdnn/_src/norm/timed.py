"""The cases of `jaxdnn bench norm`: rows of transformers and images of residual networks, with saved statistics.

The bytes of a pass are those that it must move: forward x is read once and y written once, backward dy and x are read
and dx is written. Batch normalisation reads its operands twice, because its sums go over the whole batch, which no
cache holds.
"""

import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxdnn as dnn
from jaxdnn._src.cases import timed
from jaxdnn._src.cases.timed import Function

EPS = 1e-5
ROWS = ("layer_norm", "rms_norm")


@dataclasses.dataclass(frozen=True)
class Norm(timed.Case):
    """One op on `batch` rows or images of `size`; the operands are x, dy, scale, bias, and the saved statistics."""

    family: str
    name: str
    op: str
    size: tuple[int, ...]
    batch: int
    groups: int = 32  # of a group norm
    passes: tuple[str, ...] = ("forward", "backward")

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        x, c = (batch, *self.size), (self.size[-1],)
        statistic = {"group_norm": (batch, self.groups), "instance_norm": (batch, *c), "batch_norm": c}.get(
            self.op, (batch,)
        )
        return x, x, c, c, statistic, statistic

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        x, dy, scale, bias, _, _ = super().operands(batch, dtype, seed)
        scale, bias = (v.astype(jnp.float32) for v in (scale, bias))
        return (x, dy, scale, bias, *jax.jit(self._saved)(x))

    def _saved(self, x: Array) -> Any:
        if self.op == "rms_norm":
            rstd = dnn.rms_norm(x, eps=EPS, return_statistics=True)[1]
            return jnp.zeros_like(rstd), rstd
        if self.op == "batch_norm":
            return dnn.batch_norm(x, **self.options)[1:3]
        return getattr(dnn, self.op)(x, return_statistics=True, **self.options)[1:]

    @property
    def options(self) -> dict[str, Any]:
        """The options of images: the layout, and a group norm's groups."""
        if self.op in ROWS:
            return {}
        layout = {2: "NWC", 3: "NHWC", 4: "NDHWC"}[len(self.size)]
        return {"layout": layout, **({"groups": self.groups} if self.op == "group_norm" else {})}

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        moves = {"forward": 3, "backward": 5} if self.op == "batch_norm" else {"forward": 2, "backward": 3}
        return moves[which] * itemsize * batch * math.prod(self.size)

    def ours(self, which: str, engine: str | None) -> Function:
        op: Any = getattr(dnn, self.op if which == "forward" else f"{self.op}_dgrad")
        if which == "forward":
            extra = self.options if self.op == "batch_norm" else {"return_statistics": True, **self.options}
            return lambda x, dy, s, b, m, r: op(x, scale=s, bias=b, eps=EPS, engine=engine, **extra)
        if self.op == "rms_norm":
            return lambda x, dy, s, b, m, r: op(dy, x, scale=s, rstd=r, eps=EPS, engine=engine)
        return lambda x, dy, s, b, m, r: op(dy, x, scale=s, mean=m, rstd=r, eps=EPS, engine=engine, **self.options)

    def xla(self, which: str) -> Function:
        """Formulas as users write them; batch normalisation's variance unprotected, in one pass, as Flax has it."""
        if which == "forward":
            return lambda x, dy, s, b, m, r: self._plain(x, s, b)
        return lambda x, dy, s, b, m, r: jax.vjp(self._plain, x, s, b)[1](dy)

    def _plain(self, x: Array, scale: Array, bias: Array) -> Array:
        h = x.astype(jnp.float32)
        if self.op == "group_norm":
            h = h.reshape(len(x), -1, self.groups, x.shape[-1] // self.groups)
        pixels = tuple(range(1, x.ndim - 1))
        axes = {"batch_norm": (0, *pixels), "group_norm": (1, 3), "instance_norm": pixels}.get(self.op, (-1,))
        mean = h.mean(axes, keepdims=True)
        if self.op == "rms_norm":
            y = h * lax.rsqrt((h * h).mean(axes, keepdims=True) + EPS)
        elif self.op == "batch_norm":
            y = (h - mean) * lax.rsqrt(jnp.maximum((h * h).mean(axes, keepdims=True) - mean * mean, 0) + EPS)
        else:
            y = (h - mean) * lax.rsqrt(h.var(axes, keepdims=True) + EPS)
        along = (1,) * (x.ndim - 1) + (-1,)
        return (y.reshape(x.shape) * scale.reshape(along) + bias.reshape(along)).astype(x.dtype)

    def torch(self, which: str, torch: Any, *tensors: Any) -> Any:
        x, dy, s, b, m, r = tensors
        aten = torch.ops.aten
        narrow = [v.to(x.dtype) for v in (s, b)]
        if self.op == "layer_norm":
            if which == "forward":
                return lambda: aten.native_layer_norm(x, list(self.size), *narrow, EPS)
            m, r = m.unsqueeze(-1), r.unsqueeze(-1)
            return lambda: aten.native_layer_norm_backward(dy, x, list(self.size), m, r, *narrow, [True] * 3)
        if self.op != "batch_norm":
            return None
        x, dy = (v.permute(0, 3, 1, 2) for v in (x, dy))  # channels last, as the memory is
        if which == "forward":
            return lambda: aten.native_batch_norm(x, s, b, None, None, True, 0.1, EPS)
        return lambda: aten.native_batch_norm_backward(dy, x, s, None, None, m, r, True, EPS, [True] * 3)


CASES: tuple[timed.Case, ...] = (
    *(
        Norm("rows", f"{op} {length}", op, (length,), 2**25 // length)
        for op in ROWS
        for length in (512, 1024, 2048, 4096, 8192)
    ),
    Norm("images", "batch_norm 56x56x256", "batch_norm", (56, 56, 256), 128),
    Norm("images", "batch_norm 14x14x1024", "batch_norm", (14, 14, 1024), 128),
    Norm("images", "group_norm 56x56x256", "group_norm", (56, 56, 256), 128),
    Norm("images", "group_norm 64x64x320", "group_norm", (64, 64, 320), 64),
    Norm("images", "group_norm 256x256x128", "group_norm", (256, 256, 128), 8),
    Norm("images", "instance_norm 56x56x256", "instance_norm", (56, 56, 256), 128),
    *(
        timed.between(Norm("rows", f"layer_norm {rows}x768", "layer_norm", (768,), rows))
        for rows in (4, 32, 256, 1024, 4096, 16384)
    ),
    *(
        timed.between(Norm("images", f"{op} {n}x8x8x512", op, (8, 8, 512), n))
        for op in ("batch_norm", "group_norm", "instance_norm")
        for n in (1, 8, 64)
    ),
)
OF_LAYER = {op: ft.partial(Norm, op=op) for op in (*ROWS, "batch_norm", "group_norm", "instance_norm")}
