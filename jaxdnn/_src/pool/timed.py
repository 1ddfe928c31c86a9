"""The cases of `jaxdnn bench pool`: poolings of well-known networks, forward, forward with indices, and backward."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

import jaxdnn as dnn
from jaxdnn._src.cases import timed
from jaxdnn._src.cases.timed import Function
from jaxdnn._src.pool import plain


@dataclasses.dataclass(frozen=True)
class Pool(timed.Case):
    """A pooling of N images of `size` by `size` pixels and `c` channels.

    The backward pass of a maximum reads a byte for each output, which the forward pass under differentiation keeps.
    """

    family: str
    name: str
    c: int
    size: int
    window: int
    stride: int
    padding: int = 0
    mode: str = "max"
    batch: int = 128
    passes: tuple[str, ...] = ("forward", "backward")

    @property
    def out(self) -> int:
        return (self.size + 2 * self.padding - self.window) // self.stride + 1

    @property
    def options(self) -> dict[str, Any]:
        return {"window": self.window, "stride": self.stride, "padding": self.padding, "mode": self.mode}

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """x and dy; for the maximum also the taps."""
        x, y = (batch, self.size, self.size, self.c), (batch, self.out, self.out, self.c)
        return (x, y, y) if self.mode == "max" else (x, y)

    def operands(self, batch: int, dtype: Any, seed: int) -> tuple[Array, ...]:
        x, dy = super().operands(batch, dtype, seed)[:2]
        return (x, dy, dnn.pool(x, **self.options, return_indices="tap")[1]) if self.mode == "max" else (x, dy)

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        """x and y once, and a byte for each output where maxima are remembered."""
        x, y, *taps = (math.prod(shape) for shape in self.shapes(batch))
        return itemsize * (x + y) + (sum(taps) if which != "forward" else 0)

    def ours(self, which: str, engine: str | None) -> Function:
        if which == "forward":
            return lambda x, *_: dnn.pool(x, **self.options, engine=engine)
        if self.mode == "max":
            return lambda x, dy, taps: dnn.pool_dgrad(dy, x, **self.options, indices=taps, engine=engine)
        return lambda x, dy: dnn.pool_dgrad(dy, x, **self.options, engine=engine)

    def xla(self, which: str) -> Function:
        """Windows as users of `jax.lax` reduce them, and their gradient: select-and-scatter for the maximum."""
        if which == "backward":
            return lambda x, dy, *_: jax.vjp(self._lax, x)[1](dy)[0]
        return lambda x, *_: self._lax(x)

    def _lax(self, x: Array) -> Array:
        by_mode = {"average": plain.average, "average_exclude_padding": plain.average_exclude_padding}
        return by_mode.get(self.mode, plain.pool)(x, self.window, self.stride, self.padding)

    def torch(self, which: str, torch: Any, *tensors: Any) -> Callable[[], Any] | None:
        """PyTorch's kernels on the same memory, seen as channels last."""
        x, dy = (t.permute(0, 3, 1, 2) for t in tensors[:2])
        aten, geometry = torch.ops.aten, ([self.window] * 2, [self.stride] * 2, [self.padding] * 2)
        if self.mode == "max":
            if which != "backward":
                return ft.partial(aten.max_pool2d_with_indices, x, *geometry)
            indices = aten.max_pool2d_with_indices(x, *geometry)[1]
            return ft.partial(aten.max_pool2d_with_indices_backward, dy, x, *geometry, [1, 1], False, indices)
        tail = (False, self.mode == "average", None)
        if which == "forward":
            return ft.partial(aten.avg_pool2d, x, *geometry, *tail)
        return ft.partial(aten.avg_pool2d_backward, dy, x, *geometry, *tail)


CASES: tuple[timed.Case, ...] = (
    Pool("resnet50", "stem", 64, 112, 3, 2, 1),
    Pool("vgg", "pool 2", 128, 112, 2, 2, batch=64),
    Pool("vgg", "pool 3", 256, 56, 2, 2, batch=64),
    Pool("googlenet", "inception 3", 192, 28, 3, 1, 1),
    Pool("googlenet", "pool 3", 480, 28, 3, 2, 1),
    Pool("yolo", "spp 5", 256, 20, 5, 1, 2, batch=64),
    Pool("densenet", "transition 1", 128, 56, 2, 2, mode="average"),
    Pool("resnet-d", "shortcut", 256, 56, 3, 2, 1, mode="average"),
    Pool("inception v3", "pool", 192, 35, 3, 1, 1, mode="average", batch=64),
    Pool("resnet-d", "shortcut, no padding", 256, 56, 3, 2, 1, mode="average_exclude_padding"),
)
OF_LAYER = {"pool": Pool}
