"""What `jaxdnn bench` measures: convolutions of well-known networks, by family."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import Array, lax

import jaxdnn as dnn


@dataclasses.dataclass(frozen=True)
class Case:
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
    batch: int = 128

    @property
    def padding(self) -> int:
        return (self.taps - 1) * self.dilation // 2

    @property
    def layout(self) -> str:
        return {1: "NWC", 2: "NHWC", 3: "NDHWC"}[self.rank]

    @property
    def filter_layout(self) -> str:
        return {1: "WIO", 2: "HWIO", 3: "DHWIO"}[self.rank]

    def shapes(self, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the two operands; a transposed convolution has K input channels."""
        spatial, taps = (self.size,) * self.rank, (self.taps,) * self.rank
        channels = self.k if self.transposed else self.c
        return (batch, *spatial, channels), (*taps, self.c // self.groups, self.k)

    def flops(self, batch: int) -> int:
        """Two operations per multiply-add of the forward pass; each backward pass has as many."""
        size = self.size if self.transposed else (self.size - 1) // self.stride + 1
        return 2 * batch * size**self.rank * self.taps**self.rank * (self.c // self.groups) * self.k

    def ours(self, engine: str | None) -> Callable[[Array, Array], Array]:
        """The op of jaxdnn that this case measures."""
        op: Any = dnn.conv_transpose if self.transposed else dnn.conv
        extra: dict[str, Any] = {"output_padding": self.stride - 1 - (self.taps - 1) % 2} if self.transposed else {}
        return lambda x, w: op(
            x,
            w,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            layout=self.layout,
            engine=engine,
            **extra,
        )

    def lax(self, x: Array, w: Array) -> Array:
        """The same through jax.lax, as its users write it."""
        numbers = (self.layout, self.filter_layout, self.layout)
        if self.transposed:
            # (in, out) channels exchanged and taps reversed make lax's transposed convolution the adjoint of a forward.
            low = self.taps - 1 - self.padding
            high = low + self.stride - 1 - (self.taps - 1) % 2
            kernel = lax.rev(w, range(self.rank)).swapaxes(-1, -2)
            return lax.conv_transpose(
                x, kernel, (self.stride,) * self.rank, ((low, high),) * self.rank, dimension_numbers=numbers
            )
        return lax.conv_general_dilated(
            x,
            w,
            (self.stride,) * self.rank,
            ((self.padding, self.padding),) * self.rank,
            rhs_dilation=(self.dilation,) * self.rank,
            dimension_numbers=numbers,
            feature_group_count=self.groups,
        )


def _resnet(name: str, c: int, k: int, size: int, taps: int, stride: int = 1) -> Case:
    return Case("resnet50", name, c, k, size, taps, stride)


CASES: tuple[Case, ...] = (
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
    Case("depthwise", "convnext_s2", 384, 384, 28, 7, groups=384, batch=64),
    Case("depthwise", "convnext_s0", 96, 96, 56, 7, groups=96, batch=64),
    Case("depthwise", "mbv2_144", 144, 144, 56, 3, groups=144),
    Case("depthwise", "mbv2_384", 384, 384, 14, 3, groups=384),
    Case("depthwise", "1d_dilated", 256, 256, 4096, 7, groups=256, rank=1, dilation=8, batch=16),
    Case("grouped", "resnext", 256, 256, 28, 3, groups=32),
    Case("grouped", "four", 256, 256, 28, 3, groups=4),
    Case("dilated", "depthwise 7x7/d2", 256, 256, 56, 7, groups=256, dilation=2, batch=32),
    Case("dilated", "depthwise 3x3/d4", 256, 256, 56, 3, groups=256, dilation=4, batch=32),
    Case("dilated", "32 groups/d2", 256, 256, 28, 3, groups=32, dilation=2),
    Case("conv3d", "conv3d", 32, 64, 64, 3, rank=3, batch=2),
    Case("transposed", "4x4/2", 64, 128, 32, 4, 2, transposed=True, batch=32),
    Case("transposed", "8x8/4", 64, 64, 32, 8, 4, transposed=True, batch=32),
    Case("transposed", "1d 16/8", 64, 64, 512, 16, 8, rank=1, transposed=True, batch=32),
    Case("transposed", "3d 4/2", 32, 32, 16, 4, 2, rank=3, transposed=True, batch=4),
    Case("patches", "vit 16x16/16", 3, 768, 224, 16, 16, batch=64),
)
FAMILIES = tuple(dict.fromkeys(case.family for case in CASES))
