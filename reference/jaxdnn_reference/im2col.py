"""The matrix of a convolution's patches, and its transpose.

    im2col  y[n, p, (r, c)] = x[n, p * stride + r * dilation - low, c]           0 outside of x
    col2im  x[n, h, c] = sum y[n, p, (r, c)] over p * stride + r * dilation - low = h

Channel (r, c) is r * C + c in order "taps_channels" and c * R + r in "channels_taps", r counting the taps row-major;
mode "convolution" numbers them backwards. col2im is the adjoint: <im2col(x), y> = <x, col2im(y)>.

Sources: cuDNN's cudnnIm2Col, PyTorch's unfold and fold.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdnn_reference import layout as lay
from jaxdnn_reference.tensor import finish, wide

Array = np.ndarray[Any, Any]


def im2col(
    x: Array,
    /,
    *,
    window: int | Sequence[int] = 3,
    stride: int | Sequence[int] = 1,
    padding: lay.Padding = 0,
    dilation: int | Sequence[int] = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    order: str | None = None,
) -> Array:
    """y[n, p, (r, c)] = x[n, p * stride + r * dilation - low, c]."""
    axes = lay.image_axes(layout)
    xc = axes.to_canonical(x)
    n, *sizes, c = xc.shape
    found = lay.window_of((n, *sizes), lay.per_axis(window, len(sizes)), stride, padding, dilation, mode)
    pixels = lay.with_zero(xc.reshape(math.prod(xc.shape[:-1]), c), 0)
    patches = pixels[found.input_pixel(np.arange(found.out_pixels))]  # [N P Q, R S, C]
    patches = patches if _order(order, layout) == "taps_channels" else patches.swapaxes(-1, -2)
    return axes.from_canonical(patches.reshape(n, *found.out_size, found.taps * c))


def col2im(
    y: Array,
    x_shape: Sequence[int],
    /,
    *,
    window: int | Sequence[int] = 3,
    stride: int | Sequence[int] = 1,
    padding: lay.Padding = 0,
    dilation: int | Sequence[int] = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    order: str | None = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """x[n, h, c] = sum y[n, p, (r, c)] over p * stride + r * dilation - low = h, one tap after another."""
    axes = lay.image_axes(layout)
    yc = wide(axes.to_canonical(y), arithmetic)
    n, *sizes, c = axes.canonical_shape(x_shape)
    kernel = lay.per_axis(window, len(sizes))
    found = lay.window_of((n, *sizes), kernel, stride, padding, dilation, mode)
    if _order(order, layout) == "taps_channels":
        patches = yc.reshape(math.prod(yc.shape[:-1]), found.taps, c)
    else:
        patches = yc.reshape(math.prod(yc.shape[:-1]), c, found.taps).swapaxes(1, 2)
    patches = lay.with_zero(patches, 0)
    pixel = found.output_pixel(np.arange(found.in_pixels))  # [N H W, R S]
    total = patches[pixel[:, 0], 0]
    with np.errstate(invalid="ignore", over="ignore"):
        for tap in range(1, found.taps):
            total = total + patches[pixel[:, tap], tap]
    return finish(axes.from_canonical(total.reshape(n, *sizes, c)), y.dtype, 1.0, 0.0, None, out_dtype, arithmetic)


def _order(order: str | None, layout: str) -> str:
    return order or ("taps_channels" if layout.endswith("C") else "channels_taps")
