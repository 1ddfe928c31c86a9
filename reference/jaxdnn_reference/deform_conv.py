"""Convolution with windows whose taps are moved.

    y[n, p, k] = sum over taps r and channels c of m[n, p, r] x[n, c](place) w[r, c, k]
    place      = p stride + r dilation - low + offset[n, p, r]

x at a place is linear along each axis, with zeros outside. offsets: (N, P..., D R... d), of D groups of channels, each
tap in row-major order, d numbers in the order of the axes; mask: (N, P..., D R...). It is the convolution, with a
stride of its window, of the image of all samples, in which the samples of a window stand beside each other.

"ordered": places and weights in float32 (float64 if x or offsets are), each step rounded; weights multiplied in the
order of the axes, then with the mask; 0 + w x + ... in row-major order; the sample rounded to x's dtype, and `conv`.

Sources: Dai et al., arXiv:1703.06211; Zhu et al., arXiv:1811.11168; torchvision's deform_conv2d, ONNX's DeformConv.
"""

import itertools
import math
from typing import Any

import numpy as np

from jaxdnn_reference import layout as lay
from jaxdnn_reference.conv import conv
from jaxdnn_reference.grid_sample import taps as taps_along
from jaxdnn_reference.rounding import round_to
from jaxdnn_reference.tensor import wide

Array = np.ndarray[Any, Any]


def deform_conv(
    x: Array,
    offsets: Array,
    w: Array,
    /,
    *,
    mask: Array | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: lay.Padding = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    layout: str = "NHWC",
    filter_layout: str | None = None,
    arithmetic: str = "golden",
    **options: Any,
) -> Any:
    """y in x's layout; options: see `conv`."""
    axes = lay.image_axes(layout)
    kernel = lay.filter_axes(filter_layout or lay.default_filter_layout(layout)).to_canonical(w).shape[:-2]
    image = wide(axes.to_canonical(x), arithmetic)
    window = lay.window_of(image.shape[:-1], kernel, stride, padding, dilation, "cross_correlation")
    numbers = math.prod(kernel) * len(kernel)
    many = axes.to_canonical(offsets).shape[-1] // max(numbers, 1)
    by_tap = (len(image), *window.out_size, many, *kernel)
    moved = wide(axes.to_canonical(offsets), arithmetic).reshape(*by_tap, len(kernel))
    moved = moved.astype(np.result_type(image.dtype, moved.dtype))
    factor = None if mask is None else wide(axes.to_canonical(mask), arithmetic).reshape(by_tap)
    samples = samples_of(image, moved, factor, window)
    blocks = [p * r for p, r in zip(window.out_size, kernel, strict=True)]
    samples = samples.reshape(len(image), *blocks, image.shape[-1])
    samples = axes.from_canonical(samples if arithmetic == "golden" else round_to(samples, x.dtype))
    how = {"stride": kernel, "groups": groups, "layout": layout, "filter_layout": filter_layout}
    if arithmetic == "golden":
        w = wide(w, arithmetic)
    return conv(samples, w, **how, arithmetic=arithmetic, **options)


def samples_of(image: Array, moved: Array, factor: Array | None, window: Any) -> Array:
    """x at the taps of every window, (N, P, R, Q, S, C)."""
    d, many, c = (
        len(window.kernel),
        moved.shape[1 + len(window.kernel)],
        image.shape[-1] // moved.shape[1 + len(window.kernel)],
    )
    pairs = [n for both in zip(window.out_size, window.kernel, strict=True) for n in both]
    found = np.zeros((len(image), *pairs, image.shape[-1]), image.dtype)
    with np.errstate(invalid="ignore"):
        for n, *at in np.ndindex(len(image), *window.out_size, many, *window.kernel):
            p, g, r = at[:d], at[d], at[d + 1 :]
            each = zip(p, window.stride, r, window.dilation, window.low, strict=True)
            place = [v + (i * u + j * e - low) for v, (i, u, j, e, low) in zip(moved[(n, *at)], each, strict=True)]
            place = [np.clip(v, -3, size + 2) for v, size in zip(place, window.in_size, strict=True)]
            along = [
                taps_along(v, size, "linear", "zeros", False, 0.0)
                for v, size in zip(place, window.in_size, strict=True)
            ]
            block = tuple(i for both in zip(p, r, strict=True) for i in both)
            for tap in itertools.product(*along):
                weight = math.prod((v for _, v in tap[1:]), start=tap[0][1])
                weight = weight if factor is None else weight * type(weight)(factor[(n, *at)])
                inside = all(0 <= t < size for (t, _), size in zip(tap, window.in_size, strict=True))
                if np.isnan(weight):
                    found[(n, *block)][g * c : (g + 1) * c] = np.nan
                elif inside and weight != 0:
                    pixel = image[(n, *(int(t) for t, _ in tap))][g * c : (g + 1) * c]
                    found[(n, *block)][g * c : (g + 1) * c] += image.dtype.type(weight) * pixel
    return found
