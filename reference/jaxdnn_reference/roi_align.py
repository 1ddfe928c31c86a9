"""Boxes of images pooled to one size.

    y[k, i, j] = average or maximum over a, b of x[n_k] at the place (p(i, a), q(j, b))

Along each axis, of length L, a box goes from l to l + s in pixels, of which the first has its centre at 0; it has P
bins, and a bin m samples, which are at

    p(i, a) = l + (i m + a + 1/2) s / (P m)        i = 0, ..., P - 1,  a = 0, ..., m - 1

    "xyxy"    l = scale x1 - o, s = scale x2 - scale x1        o = 1/2 if aligned, and otherwise 0, with s at least 1
    "xywh"    s = scale w
    "cxcywh"  l = (scale cx - s / 2) - o
    adaptive  m is ceil(s / P), at least 1 and at most sampling_ratio

A sample is 0 where p < -1 or p > L, and otherwise linear at p clipped to [0, L - 1]. A pixel of weight 0 is not read.
"max_of_taps" is the maximum of weight times pixel over all taps of all samples, 0 for one outside or of weight 0. A box
with a NaN and one of an image that is not there are NaN.

"ordered": all of it in float32 (float64 if x or boxes are), each step rounded, (i m + a + 1/2) (s / (P m)) as these two
factors; weights multiplied in the order of the axes; 0 + w x + ... over samples and, within each, taps in row-major
order, and the sum times the rounded 1 / the number of samples.

Sources: He et al., arXiv:1703.06870; torchvision's and Detectron2's roi_align; ONNX's RoiAlign.
"""

import itertools
import math
from typing import Any

import numpy as np

from jaxdnn_reference import layout as lay
from jaxdnn_reference.tensor import finish, wide

Array = np.ndarray[Any, Any]


def roi_align(
    x: Array,
    boxes: Array,
    /,
    *,
    output_sizes: int | tuple[int, ...] = 1,
    batch_indices: Array | None = None,
    spatial_scale: float = 1.0,
    sampling_ratio: int = 2,
    adaptive: bool = False,
    mode: str = "average",
    aligned: bool = True,
    box_format: str = "xyxy",
    order: str = "xy",
    layout: str = "NHWC",
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """y, (K, P, Q, C) for NHWC, or (N, K, P, Q, C) without batch_indices."""
    axes = lay.image_axes(layout)
    xc, numbers = wide(axes.to_canonical(x), arithmetic), wide(boxes, arithmetic)
    numbers = numbers.astype(np.result_type(xc.dtype, numbers.dtype))
    sizes = xc.shape[1:-1]
    bins = (output_sizes,) * len(sizes) if isinstance(output_sizes, int) else tuple(output_sizes)
    lines = numbers.reshape(-1, numbers.shape[-1])
    of = np.repeat(np.arange(len(xc)), numbers.shape[-2]) if batch_indices is None else batch_indices
    y = np.zeros((len(lines), *bins, xc.shape[-1]), xc.dtype)
    options: Any = (spatial_scale, sampling_ratio, adaptive, aligned, box_format)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for k, line in enumerate(lines):
            if np.isnan(line).any() or not 0 <= of[k] < len(xc):
                y[k] = np.nan
                continue
            pairs = line.reshape(2, -1) if order == "ij" else line.reshape(2, -1)[:, ::-1]
            each = [samples(pairs[0, i], pairs[1, i], bins[i], n, *options) for i, n in enumerate(sizes)]
            for at in np.ndindex(*bins):
                values = [
                    taps(xc[of[k]], sample)
                    for sample in itertools.product(*(along[i] for along, i in zip(each, at, strict=True)))
                ]
                if mode == "average":
                    total = np.zeros(xc.shape[-1], xc.dtype)
                    for term in itertools.chain(*values):
                        total = total + term
                    y[k][at] = total * (xc.dtype.type(1) / xc.dtype.type(len(values)))
                elif mode == "max":
                    y[k][at] = np.max([sum(terms, np.zeros(xc.shape[-1], xc.dtype)) for terms in values], 0)
                else:
                    y[k][at] = np.max([term for terms in values for term in terms], 0)
    restored = axes.from_canonical(y)  # whose N are all boxes
    if batch_indices is None:
        each = [axes.from_canonical(of) for of in y.reshape(*numbers.shape[:2], *y.shape[1:])]
        restored = np.stack(each) if each else restored.reshape(*numbers.shape[:2], *restored.shape[1:])
    return finish(restored, x.dtype, 1.0, 0.0, None, out_dtype, arithmetic)


def samples(
    one: Any, two: Any, bins: int, size: int, scale: float, ratio: int, adaptive: bool, aligned: bool, kind: str
) -> list[list[list[tuple[int, Any]]]]:
    """Of each bin, of each of its samples, the two (pixel, weight) along an axis."""
    number = type(one)
    one, two = one * number(scale), two * number(scale)
    low, length = (one, two - one) if kind == "xyxy" else (one, two)
    low = low - length * number(0.5) if kind == "cxcywh" else low
    low, length = (low - number(0.5), length) if aligned else (low, max(length, number(1)))
    m = min(max(math.ceil(length / number(bins)), 1), ratio) if adaptive else ratio
    step = length / number(bins * m)
    return [[linear(low + number(i * m + a + 0.5) * step, size) for a in range(m)] for i in range(bins)]


def linear(p: Any, size: int) -> list[tuple[int, Any]]:
    if p < -1 or p > size:
        return [(0, type(p)(0))] * 2
    p = np.clip(p, 0, size - 1)
    low = np.floor(p)
    return [(int(low), 1 - (p - low)), (min(int(low) + 1, size - 1), p - low)]


def taps(image: Array, sample: tuple[list[tuple[int, Any]], ...]) -> list[Array]:
    """Weight times pixel of each tap, of all channels; 0 for weight 0."""
    found = []
    for tap in itertools.product(*sample):
        weight = math.prod((w for _, w in tap[1:]), start=tap[0][1])
        pixel = image[tuple(at for at, _ in tap)]
        found.append(image.dtype.type(weight) * pixel if weight != 0 else np.zeros_like(pixel))
    return found
