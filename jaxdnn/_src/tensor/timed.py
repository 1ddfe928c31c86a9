"""The cases of `jaxdnn bench tensor`: layouts, element-wise ops, reductions, resampling and patches of one activation.

Every case has an x of N images of `size` by `size` pixels and `c` channels, in NHWC unless its name says otherwise.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import jaxdnn as dnn
from jaxdnn._src.cases import timed
from jaxdnn._src.cases.timed import Function

TAPS = 3  # of a patch, along each axis


@dataclasses.dataclass(frozen=True)
class Tensor(timed.Case):
    """A tensor op; each op below says how we, users of `jax.numpy` and PyTorch write it.

    None of them has an engine to choose but `resample`: a pass through the others takes any name of one for "xla".
    """

    family: str
    name: str
    c: int = 64
    size: int = 112
    batch: int = 128
    passes: tuple[str, ...] = ("forward",)

    def inputs(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arrays that the op reads."""
        return ((batch, self.size, self.size, self.c),)

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """The inputs; of an op with a backward pass also the cotangent."""
        inputs = self.inputs(batch)
        if "backward" not in self.passes:
            return inputs
        return (*inputs, jax.eval_shape(self.run_xla, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in inputs)).shape)

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        """The inputs and the result once, and backward the cotangent and the gradient, which are as large."""
        inputs = self.inputs(batch)
        y = jax.eval_shape(self.run_xla, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in inputs))
        return itemsize * (sum(map(math.prod, inputs)) + y.size)

    def ours(self, which: str, engine: str | None) -> Function:
        run = ft.partial(self.run, engine=engine)
        return ft.partial(timed.gradient, run, 0) if which == "backward" else self._without_cotangent(run)

    def xla(self, which: str) -> Function:
        run = self.run_xla
        return ft.partial(timed.gradient, run, 0) if which == "backward" else self._without_cotangent(run)

    def _without_cotangent(self, function: Function) -> Function:
        count = len(self.inputs(1))
        return lambda *operands: function(*operands[:count])

    def run(self, *operands: Array, engine: str | None) -> Array:
        raise NotImplementedError

    def run_xla(self, *operands: Array) -> Array:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Transform(Tensor):
    """A change of layout."""

    layout: str = "NHWC"
    out_layout: str = "NCHW"

    def inputs(self, batch: int) -> tuple[tuple[int, ...], ...]:
        sizes = {"N": batch, "C": self.c, "H": self.size, "W": self.size}
        return (tuple(sizes[axis] for axis in self.layout),)

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(self.layout.index(axis) for axis in self.out_layout)

    def run(self, *operands: Array, engine: str | None) -> Array:
        return dnn.transform(*operands, layout=self.layout, out_layout=self.out_layout)

    def run_xla(self, *operands: Array) -> Array:
        return jnp.transpose(operands[0], self.order)

    def torch(self, which: str, *tensors: Any) -> Callable[[], Any]:
        return lambda: tensors[0].permute(self.order).contiguous()


@dataclasses.dataclass(frozen=True)
class OpTensor(Tensor):
    """The sum of two arrays of one shape."""

    def inputs(self, batch: int) -> tuple[tuple[int, ...], ...]:
        return (*super().inputs(batch), *super().inputs(batch))

    def run(self, *operands: Array, engine: str | None) -> Array:
        return dnn.op_tensor(*operands, op="add")

    def run_xla(self, *operands: Array) -> Array:
        a, b = operands
        return a + b

    def torch(self, which: str, *tensors: Any) -> Callable[[], Any]:
        return lambda: tensors[0] + tensors[1]


@dataclasses.dataclass(frozen=True)
class Add(Tensor):
    """A bias of every channel, added to x."""

    def inputs(self, batch: int) -> tuple[tuple[int, ...], ...]:
        return (*super().inputs(batch), (1, 1, 1, self.c))

    def run(self, *operands: Array, engine: str | None) -> Array:
        x, bias = operands
        return dnn.add(bias, x)

    def run_xla(self, *operands: Array) -> Array:
        x, bias = operands
        return x + jnp.broadcast_to(bias, x.shape)

    def torch(self, which: str, *tensors: Any) -> Callable[[], Any]:
        return lambda: tensors[0] + tensors[1]


@dataclasses.dataclass(frozen=True)
class Reduce(Tensor):
    """A reduction along some axes, or along all."""

    op: str = "add"
    axes: tuple[int, ...] = (0, 1, 2, 3)

    def run(self, *operands: Array, engine: str | None) -> Array:
        return dnn.reduce(*operands, op=self.op, axis=self.axes)

    def run_xla(self, *operands: Array) -> Array:
        if self.op == "add":
            return jnp.sum(*operands, axis=self.axes)
        (x,) = operands
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=self.axes)).astype(x.dtype)

    def torch(self, which: str, *tensors: Any) -> Callable[[], Any]:
        import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)

        (x,) = tensors
        norm = ft.partial(torch.linalg.vector_norm, x, dim=self.axes)
        return norm if self.op == "norm2" else ft.partial(torch.sum, x, dim=self.axes)


@dataclasses.dataclass(frozen=True)
class Resample(Tensor):
    """Twice as many pixels along both axes, bilinear."""

    passes: tuple[str, ...] = ("forward", "backward")

    def run(self, *operands: Array, engine: str | None) -> Array:
        return dnn.resample(*operands, output_sizes=2 * self.size, engine=engine)

    def run_xla(self, *operands: Array) -> Array:
        (x,) = operands
        return jax.image.resize(x, (x.shape[0], 2 * self.size, 2 * self.size, self.c), "bilinear")

    def torch(self, which: str, *tensors: Any) -> Callable[[], Any]:
        import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)

        x, dy = (t.permute(0, 3, 1, 2) for t in tensors)
        aten, sizes = torch.ops.aten, [2 * self.size] * 2
        if which == "forward":
            return ft.partial(aten.upsample_bilinear2d, x, sizes, False)
        return ft.partial(aten.upsample_bilinear2d_backward, dy, sizes, list(x.shape), False)


@dataclasses.dataclass(frozen=True)
class Im2col(Tensor):
    """The patches of a convolution of 3 by 3 taps that keeps the size, numbered in one of the two orders."""

    passes: tuple[str, ...] = ("forward", "backward")
    order: str = "taps_channels"

    def run(self, *operands: Array, engine: str | None) -> Array:
        return dnn.im2col(*operands, window=TAPS, padding=TAPS // 2, order=self.order)

    def run_xla(self, *operands: Array) -> Array:
        """Shifted copies side by side; channels first is what `jax.lax` has a function for."""
        (x,) = operands
        pad = TAPS // 2, TAPS // 2
        if self.order == "channels_taps":
            axes = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated_patches(x, (TAPS, TAPS), (1, 1), (pad, pad), dimension_numbers=axes)
        padded, n = jnp.pad(x, ((0, 0), pad, pad, (0, 0))), self.size
        return jnp.concatenate([padded[:, r : r + n, s : s + n] for r in range(TAPS) for s in range(TAPS)], -1)

    def torch(self, which: str, *tensors: Any) -> None:
        """None: PyTorch 2.11 fails when a CUDA graph captures aten::im2col, after which the device serves nobody."""


@dataclasses.dataclass(frozen=True)
class PixelShuffle(Tensor):
    """A quarter of the channels for twice as many pixels along both axes."""

    def run(self, *operands: Array, engine: str | None) -> Array:
        return dnn.pixel_shuffle(*operands)

    def run_xla(self, *operands: Array) -> Array:
        (x,) = operands
        n, size, kept = x.shape[0], self.size, self.c // 4
        apart = jnp.transpose(x.reshape(n, size, size, kept, 2, 2), (0, 1, 4, 2, 5, 3))
        return apart.reshape(n, 2 * size, 2 * size, kept)

    def torch(self, which: str, *tensors: Any) -> Callable[[], Any]:
        import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)

        return ft.partial(torch.pixel_shuffle, tensors[0].permute(0, 3, 1, 2), 2)


CASES: tuple[timed.Case, ...] = (
    Transform("transform", "NHWC to NCHW"),
    Transform("transform", "NCHW to NHWC", layout="NCHW", out_layout="NHWC"),
    OpTensor("element-wise", "op_tensor add"),
    Add("element-wise", "add a bias"),
    Reduce("reduce", "add over C", axes=(3,)),
    Reduce("reduce", "add over N, H, W", axes=(0, 1, 2)),
    Reduce("reduce", "add over all"),
    Reduce("reduce", "norm2 over C", op="norm2", axes=(3,)),
    Reduce("reduce", "norm2 over all", op="norm2"),
    Resample("resample", "bilinear x 2", size=56, batch=64),
    Im2col("im2col", "3 x 3", size=56, batch=64),
    Im2col("im2col", "3 x 3, channels before taps", size=56, batch=64, order="channels_taps"),
    PixelShuffle("pixel_shuffle", "x 2"),
)
