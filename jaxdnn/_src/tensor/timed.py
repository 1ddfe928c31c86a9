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
from jaxdnn._src.resample import plain as resample
from jaxdnn._src.tensor.plain import im2col


@dataclasses.dataclass(frozen=True)
class Tensor(timed.Case):
    """A tensor op, as we, users of `jax.numpy` and PyTorch write it.

    Attributes:
      op: the arrays and an engine to our result; only `resample` has engines to choose from.
      plain: the arrays to the same in `jax.numpy`.
      peer: a pass, PyTorch's module and the tensors to its function; None if it has none.
      arrays: the axes of the arrays that the op reads, in letters; "_" is an axis of length 1.
    """

    family: str
    name: str
    op: Callable[..., Array]
    plain: Callable[..., Array]
    peer: Callable[..., Callable[[], Any]] | None
    arrays: tuple[str, ...] = ("NHWC",)
    c: int = 64
    size: int = 112
    batch: int = 128
    passes: tuple[str, ...] = ("forward",)

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """The arrays that the op reads; of an op with a backward pass also the cotangent."""
        sizes = {"N": batch, "H": self.size, "W": self.size, "C": self.c, "_": 1}
        inputs = tuple(tuple(sizes[axis] for axis in axes) for axes in self.arrays)
        return inputs if "backward" not in self.passes else (*inputs, self._result(inputs).shape)

    def _result(self, inputs: tuple[tuple[int, ...], ...]) -> Any:
        return jax.eval_shape(self.plain, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in inputs))

    def bytes(self, which: str, batch: int, itemsize: int) -> int:
        """The inputs and the result once, and backward the cotangent and the gradient, which are as large."""
        inputs = self.shapes(batch)[: len(self.arrays)]
        return itemsize * (sum(map(math.prod, inputs)) + self._result(inputs).size)

    def ours(self, which: str, engine: str | None) -> Function:
        return self._pass(which, ft.partial(self.op, engine=engine))

    def xla(self, which: str) -> Function:
        return self._pass(which, self.plain)

    def _pass(self, which: str, function: Function) -> Function:
        if which == "backward":
            return ft.partial(timed.gradient, function, 0)
        return lambda *operands: function(*operands[: len(self.arrays)])

    def torch(self, which: str, torch: Any, *tensors: Any) -> Callable[[], Any] | None:
        return self.peer and self.peer(which, torch, *tensors)


def _moved(name: str, layout: str, out_layout: str) -> Tensor:
    """A change of layout."""
    order = tuple(layout.index(axis) for axis in out_layout)
    op = lambda x, engine: dnn.transform(x, layout=layout, out_layout=out_layout)
    peer = lambda which, torch, x: lambda: x.permute(order).contiguous()
    return Tensor("transform", name, op, lambda x: jnp.transpose(x, order), peer, (layout,))


def _reduced(name: str, op: str = "add", axes: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
    """A sum or a norm along some axes, or along all."""

    def plain(x: Array) -> Array:
        if op == "add":
            return jnp.sum(x, axis=axes)
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes)).astype(x.dtype)

    def peer(which: str, torch: Any, x: Any) -> Callable[[], Any]:
        return ft.partial(torch.linalg.vector_norm if op == "norm2" else torch.sum, x, dim=axes)

    return Tensor("reduce", name, lambda x, engine: dnn.reduce(x, op=op, axis=axes), plain, peer)


def _resized(which: str, torch: Any, x: Any, dy: Any) -> Callable[[], Any]:
    x, dy = (t.permute(0, 3, 1, 2) for t in (x, dy))
    aten, sizes = torch.ops.aten, list(dy.shape[2:])
    if which == "forward":
        return ft.partial(aten.upsample_bilinear2d, x, sizes, False)
    return ft.partial(aten.upsample_bilinear2d_backward, dy, sizes, list(x.shape), False)


def _patches(name: str, order: str) -> Tensor:
    """The patches of a convolution of 3 by 3 taps that keeps the size, numbered in one of the two orders.

    PyTorch 2.11 fails when a CUDA graph captures aten::im2col, after which the device serves nobody.
    """

    def channels_first(x: Array) -> Array:
        """Channels first is what `jax.lax` has a function for."""
        axes = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated_patches(x, (3, 3), (1, 1), ((1, 1), (1, 1)), dimension_numbers=axes)

    op = lambda x, engine: dnn.im2col(x, window=3, padding=1, order=order)
    plain = im2col if order == "taps_channels" else channels_first
    return Tensor("im2col", name, op, plain, None, size=56, batch=64, passes=("forward", "backward"))


def _sum(which: str, torch: Any, a: Any, b: Any) -> Callable[[], Any]:
    return lambda: a + b


CASES: tuple[Tensor, ...] = (
    _moved("NHWC to NCHW", "NHWC", "NCHW"),
    _moved("NCHW to NHWC", "NCHW", "NHWC"),
    Tensor(
        "element-wise",
        "op_tensor add",
        lambda a, b, engine: dnn.op_tensor(a, b, op="add"),
        lambda a, b: a + b,
        _sum,
        ("NHWC", "NHWC"),
    ),
    Tensor(
        "element-wise",
        "add a bias",
        lambda x, bias, engine: dnn.add(bias, x),
        lambda x, bias: x + jnp.broadcast_to(bias, x.shape),
        _sum,
        ("NHWC", "___C"),
    ),
    _reduced("add over C", axes=(3,)),
    _reduced("add over N, H, W", axes=(0, 1, 2)),
    _reduced("add over all"),
    _reduced("norm2 over C", op="norm2", axes=(3,)),
    _reduced("norm2 over all", op="norm2"),
    Tensor(
        "resample",
        "bilinear x 2",
        lambda x, engine: dnn.resample(x, output_sizes=2 * x.shape[1], engine=engine),
        lambda x: jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3]), "bilinear"),
        _resized,
        size=56,
        batch=64,
        passes=("forward", "backward"),
    ),
    _patches("3 x 3", "taps_channels"),
    _patches("3 x 3, channels before taps", "channels_taps"),
    Tensor(
        "pixel_shuffle",
        "x 2",
        lambda x, engine: dnn.pixel_shuffle(x),
        resample.pixel_shuffle,
        lambda which, torch, x: ft.partial(torch.pixel_shuffle, x.permute(0, 3, 1, 2), 2),
    ),
)
