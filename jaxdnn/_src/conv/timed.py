"""The cases of `jaxdnn bench conv`: convolutions of well-known networks, by family, and one with a fused epilogue."""

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
from jaxdnn._src.conv import plain


@dataclasses.dataclass(frozen=True)
class Conv(timed.Case):
    """A convolution of N images of `size` in every spatial axis; `size` is the input's of the op that is measured."""

    family: str
    name: str
    c: int
    k: int
    size: int
    taps: int
    stride: int = 1
    groups: int = 1
    rank: int = 2
    dilation: int = 1
    transposed: bool = False
    pad: tuple[int, int] | None = None  # low and high, of every axis; None: what keeps the size
    batch: int = 128
    passes: tuple[str, ...] = ("forward", "dgrad", "wgrad")
    filters_first: bool = False  # as OHWI, the order of cuDNN's and PyTorch's channels-last filters
    tuned = True

    @property
    def padding(self) -> tuple[int, int]:
        same = (self.taps - 1) * self.dilation // 2
        return self.pad or (same, same)

    @property
    def output_padding(self) -> int:
        """What makes a transposed convolution's output `stride` times its input, where no padding is given."""
        return self.stride - 1 - (self.taps - 1) % 2 if self.transposed and self.pad is None else 0

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """x, w and dy; a transposed convolution has K input channels."""
        spatial, taps = (self.size,) * self.rank, (self.taps,) * self.rank
        x = (batch, *spatial, self.k if self.transposed else self.c)
        w = (self.k, *taps, self.c // self.groups) if self.filters_first else (*taps, self.c // self.groups, self.k)
        y = jax.eval_shape(self._lax, jax.ShapeDtypeStruct(x, jnp.float32), jax.ShapeDtypeStruct(w, jnp.float32))
        return x, w, y.shape

    def flops(self, which: str, batch: int) -> int:
        """Two operations per multiply-add; each pass has as many."""
        span = self.size + sum(self.padding) - (self.taps - 1) * self.dilation
        size = self.size if self.transposed else (span - 1) // self.stride + 1
        return 2 * batch * size**self.rank * self.taps**self.rank * (self.c // self.groups) * self.k

    def bytes(self, which: str, batch: int, itemsize: int) -> int | None:
        """Both operands and the result of a depthwise pass; the others are bound by arithmetic, or nearly."""
        if self.groups < self.c:
            return None
        return itemsize * sum(math.prod(shape) for shape in self.shapes(batch))

    def ours(self, which: str, engine: str | None) -> Function:
        """A gradient is its own op, so that an engine is named for it alone."""
        options: dict[str, Any] = {**self.options, "engine": engine}
        if which == "forward" or self.transposed:
            return timed.product_pass(ft.partial(dnn.conv_transpose if self.transposed else dnn.conv, **options), which)
        if which == "dgrad":
            return lambda x, w, dy: dnn.conv_dgrad(dy, w, x.shape, **options)
        return lambda x, w, dy: dnn.conv_wgrad(x, dy, w.shape, **options)

    def xla(self, which: str) -> Function:
        return timed.product_pass(self._lax, which)

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "stride": self.stride,
            "padding": (self.padding,) * self.rank,
            "layout": plain.AXES[self.rank + 2][0],
        }
        options |= {"dilation": self.dilation, "groups": self.groups}
        options |= {"filter_layout": "O" + "DHW"[3 - self.rank :] + "I"} if self.filters_first else {}
        return {**options, "output_padding": self.output_padding} if self.transposed else options

    def _lax(self, x: Array, w: Array) -> Array:
        w = jnp.moveaxis(w, 0, -1) if self.filters_first else w  # a change of the order's name: nothing is copied
        if not self.transposed:
            return plain.conv(x, w, self.stride, self.groups, self.padding, self.dilation)
        low, high = (self.taps - 1 - n for n in self.padding)
        return plain.conv_transpose(x, w, self.stride, ((low, high + self.output_padding),) * self.rank)

    def torch(self, which: str, torch: Any, *tensors: Any) -> Any:
        """cuDNN through PyTorch, channels last: the same memory for images, the filter as (K, taps, C)."""
        if len(set(self.padding)) > 1:
            return None
        x, w, dy = self.channels_first(torch, *tensors[:3])
        per_axis = ([self.stride] * self.rank, [self.padding[0]] * self.rank, [self.dilation] * self.rank)
        tail = (*per_axis, self.transposed, [self.output_padding] * self.rank, self.groups)
        if which == "forward":
            return lambda: torch.ops.aten.convolution(x, w, None, *tail)
        mask = [which == "dgrad", which == "wgrad", False]
        return lambda: torch.ops.aten.convolution_backward(dy, x, w, None, *tail, mask)

    def channels_first(self, torch: Any, x: Any, w: Any, dy: Any) -> list[Any]:
        """PyTorch's order of dimensions over memory that is channels last (in one dimension it has no such thing)."""
        rank = self.rank
        last = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}[rank]
        images = 0, rank + 1, *range(1, rank + 1)
        orders = images, images if self.filters_first else (rank + 1, rank, *range(rank)), images
        return [t.permute(o).contiguous(memory_format=last) for t, o in zip((x, w, dy), orders, strict=True)]


@dataclasses.dataclass(frozen=True)
class Fused(Conv):
    """relu(conv(x, w) + bias + residual), one kernel here and what XLA's compiler makes of it there."""

    passes: tuple[str, ...] = ("forward",)

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """x, w, bias and residual."""
        x, w, y = super().shapes(batch)
        return x, w, (self.k,), y

    def ours(self, which: str, engine: str | None) -> Function:
        options: dict[str, Any] = {**self.options, "activation": "relu", "engine": engine}
        return lambda x, w, bias, residual: dnn.conv(x, w, bias=bias, residual=residual, **options)

    def xla(self, which: str) -> Function:
        return lambda x, w, bias, residual: jnp.maximum(
            self._lax(x, w) + bias.reshape(1, *(1,) * self.rank, -1) + residual, 0
        )

    def torch(self, which: str, torch: Any, *tensors: Any) -> Any:
        """cuDNN's fused convolution, bias, addition and relu."""
        x, w, bias, residual = tensors
        x, w, residual = self.channels_first(torch, x, w, residual)
        per_axis = ([self.stride] * self.rank, [self.padding[0]] * self.rank, [self.dilation] * self.rank)
        return lambda: torch.ops.aten.cudnn_convolution_add_relu(x, w, residual, 1.0, bias, *per_axis, self.groups)


def _resnet(name: str, c: int, k: int, size: int, taps: int, stride: int = 1) -> Conv:
    return Conv("resnet50", name, c, k, size, taps, stride)


CASES: tuple[Conv, ...] = (
    _resnet("stem", 3, 64, 224, 7, 2),
    _resnet("l1.1x1", 64, 64, 56, 1),
    _resnet("l1.3x3", 64, 64, 56, 3),
    _resnet("l1.up", 64, 256, 56, 1),
    _resnet("l1.down", 256, 64, 56, 1),
    _resnet("l2.in", 256, 128, 56, 1),
    _resnet("l2.3x3s2", 128, 128, 56, 3, 2),
    _resnet("l2.proj", 256, 512, 56, 1, 2),
    _resnet("l2.3x3", 128, 128, 28, 3),
    _resnet("l2.down", 512, 128, 28, 1),
    _resnet("l3.3x3s2", 256, 256, 28, 3, 2),
    _resnet("l3.3x3", 256, 256, 14, 3),
    _resnet("l3.down", 1024, 256, 14, 1),
    _resnet("l4.3x3s2", 512, 512, 14, 3, 2),
    _resnet("l4.3x3", 512, 512, 7, 3),
    _resnet("l4.up", 512, 2048, 7, 1),
    _resnet("l4.proj", 1024, 2048, 14, 1, 2),
    Fused("fused", "l2.3x3", 128, 128, 28, 3),
    Fused("fused", "l3.3x3", 256, 256, 14, 3),
    Fused("fused", "l1.up", 64, 256, 56, 1),
    Fused("fused", "l4.up", 512, 2048, 7, 1),
    Conv("depthwise", "convnext_s2", 384, 384, 28, 7, groups=384, batch=64),
    Conv("depthwise", "convnext_s0", 96, 96, 56, 7, groups=96, batch=64),
    Conv("depthwise", "mbv2_144", 144, 144, 56, 3, groups=144),
    Conv("depthwise", "mbv2_384", 384, 384, 14, 3, groups=384),
    Conv("depthwise", "1d_dilated", 256, 256, 4096, 7, groups=256, rank=1, dilation=8, batch=16),
    Conv("grouped", "resnext", 256, 256, 28, 3, groups=32),
    Conv("grouped", "four", 256, 256, 28, 3, groups=4),
    Conv("dilated", "depthwise 7x7/d2", 256, 256, 56, 7, groups=256, dilation=2, batch=32),
    Conv("dilated", "depthwise 3x3/d4", 256, 256, 56, 3, groups=256, dilation=4, batch=32),
    Conv("dilated", "32 groups/d2", 256, 256, 28, 3, groups=32, dilation=2),
    Conv("conv3d", "conv3d", 32, 64, 64, 3, rank=3, batch=2),
    Conv("transposed", "4x4/2", 64, 128, 32, 4, 2, transposed=True, batch=32),
    Conv("transposed", "8x8/4", 64, 64, 32, 8, 4, transposed=True, batch=32),
    Conv("transposed", "1d 16/8", 64, 64, 512, 16, 8, rank=1, transposed=True, batch=32),
    Conv("transposed", "3d 4/2", 32, 32, 16, 4, 2, rank=3, transposed=True, batch=4),
    Conv("patches", "vit 16x16/16", 3, 768, 224, 16, 16, batch=64),
    *(
        dataclasses.replace(layer, family="filters-first", filters_first=True)
        for layer in (
            _resnet("l1.up", 64, 256, 56, 1),
            _resnet("l2.3x3s2", 128, 128, 56, 3, 2),
            _resnet("l2.down", 512, 128, 28, 1),
            _resnet("l3.3x3", 256, 256, 14, 3),
            _resnet("l4.3x3", 512, 512, 7, 3),
        )
    ),
    Conv("filters-first", "u-net 320", 320, 320, 32, 3, batch=16, filters_first=True),
    Conv("filters-first", "resnext", 256, 256, 28, 3, groups=32, filters_first=True),
    Conv("filters-first", "convnext_s2", 384, 384, 28, 7, groups=384, batch=64, filters_first=True),
    Conv("filters-first", "conv3d", 64, 64, 32, 3, rank=3, batch=4, filters_first=True),
)
OF_LAYER = {"conv": Conv, "conv_transpose": ft.partial(Conv, transposed=True)}
