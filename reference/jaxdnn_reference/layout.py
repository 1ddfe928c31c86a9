"""Layouts and windows: which axis is which, and which input position meets which output position.

Canonical form, which every formula here uses:
    images   (N, spatial..., C)         filters   (taps..., C/G, K)

Image layouts are spelled with N, C and W, HW or DHW: "NCHW", "NHWC", "CHWN", "NWC", "NCDHW", ... A suffix
c<x> is cuDNN's vectorised layout NC/xHWx: "NCHWc32" has the shape (N, C/32, H, W, 32), channel
c = 32 * block + lane. Filter layouts use cuDNN's letters K C T R S or JAX's O I D H W, in any order:
"KCRS" = "OIHW", "KRSC" = "OHWI", "RSCK" = "HWIO"; "KCRSc32" has the shape (K, C/32, R, S, 32).
Source: the cuDNN developer guide, "Data Layout Formats".
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Padding = int | str | Sequence[int] | Sequence[tuple[int, int]]


class Axes(NamedTuple):
    """How an array's axes stand (letters), how they shall stand (canonical), and the lanes of a vectorised C."""

    letters: str
    canonical: str
    lanes: int | None = None

    @property
    def spatial(self) -> int:
        return len(self.letters) - 2

    def to_canonical(self, array: Array) -> Array:
        if self.lanes is not None:  # (..., C/x, ..., x) -> (..., C, ...)
            c = self.letters.index("C")
            array = np.moveaxis(array, -1, c + 1)
            array = array.reshape(*array.shape[:c], array.shape[c] * self.lanes, *array.shape[c + 2 :])
        return array.transpose([self.letters.index(letter) for letter in self.canonical])

    def from_canonical(self, array: Array) -> Array:
        array = array.transpose([self.canonical.index(letter) for letter in self.letters])
        if self.lanes is not None:
            c = self.letters.index("C")
            array = array.reshape(*array.shape[:c], array.shape[c] // self.lanes, self.lanes, *array.shape[c + 1 :])
            array = np.moveaxis(array, c + 1, -1)
        return np.ascontiguousarray(array)

    def canonical_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        size = dict(zip(self.letters, shape, strict=False))
        size["C"] = size.get("C", 1) * (self.lanes or 1)
        return tuple(size[letter] for letter in self.canonical)

    def shape(self, canonical_shape: Sequence[int]) -> tuple[int, ...]:
        size = dict(zip(self.canonical, canonical_shape, strict=True))
        if self.lanes is None:
            return tuple(size[letter] for letter in self.letters)
        size["C"] //= self.lanes
        return (*(size[letter] for letter in self.letters), self.lanes)

    def canonical_positions(self, at: Array, canonical_shape: Sequence[int]) -> Array:
        """Flat positions in the array as it lies -> flat positions in its canonical form."""
        index = np.unravel_index(at, self.shape(canonical_shape))
        where = dict(zip(self.letters, index, strict=False))
        if self.lanes is not None:
            where["C"] = where["C"] * self.lanes + index[-1]
        return np.ravel_multi_index(tuple(where[letter] for letter in self.canonical), tuple(canonical_shape))


def image_axes(layout: str) -> Axes:
    """NHWC -> Axes("NHWC", "NHWC"); NCHWc32 -> Axes("NCHW", "NHWC", 32)."""
    letters, lanes = _split(layout)
    spatial = "DHW"[5 - len(letters) :]
    return Axes(letters, f"N{spatial}C", lanes)


def filter_axes(filter_layout: str) -> Axes:
    """OIHW -> Axes("KCRS", "RSCK"): JAX's letters O I D H W are cuDNN's K C T R S."""
    letters, lanes = _split(filter_layout)
    letters = letters.translate(str.maketrans("OIDHW", "KCTRS"))
    taps = "TRS"[5 - len(letters) :]
    return Axes(letters, f"{taps}CK", lanes)


def default_filter_layout(layout: str) -> str:
    """HWIO for channels-last, OIHW for channels-first and CHWN, KCRSc<x> for vectorised layouts."""
    letters, lanes = _split(layout)
    spatial = "DHW"[5 - len(letters) :]
    if lanes is not None:
        return f"KC{'TRS'[5 - len(letters) :]}c{lanes}"
    return f"{spatial}IO" if letters.endswith("C") else f"OI{spatial}"


def _split(layout: str) -> tuple[str, int | None]:
    letters, lanes = re.fullmatch(r"([A-Z]+?)(?:c(\d+))?", layout).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return letters, None if lanes is None else int(lanes)


def per_axis(value: int | Sequence[int], spatial: int) -> tuple[int, ...]:
    """2 -> (2, 2); (2, 3) -> (2, 3)."""
    return (int(value),) * spatial if isinstance(value, int | np.integer) else tuple(int(v) for v in value)


def pad_amounts(
    padding: Padding, in_size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """(low, high) of each axis from an int, ints, pairs, "VALID" (none), "SAME" or "SAME_LOWER".

    "SAME" makes the output ceil(in / stride) long; an odd amount puts the extra zero on the high side, for "SAME_LOWER"
    on the low side.
    """
    if padding in ("SAME", "SAME_LOWER"):
        total = [
            max((math.ceil(i / u) - 1) * u + d * (r - 1) + 1 - i, 0)
            for i, r, u, d in zip(in_size, kernel, stride, dilation, strict=True)
        ]
        pads = tuple((t // 2, t - t // 2) for t in total)
        return pads if padding == "SAME" else tuple((high, low) for low, high in pads)
    if isinstance(padding, str):  # "VALID"
        return ((0, 0),) * len(in_size)
    amounts = [padding] * len(in_size) if isinstance(padding, int | np.integer) else list(padding)
    return tuple((int(p), int(p)) if np.ndim(p) == 0 else (int(p[0]), int(p[1])) for p in amounts)  # type: ignore[index]


def transposed_pad_amounts(
    padding: Padding, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """`pad_amounts` of the convolution that a transposed convolution transposes. "SAME": output = input * stride."""
    return pad_amounts(padding, stride, kernel, stride, dilation)  # the amount is the same for every multiple of stride


def output_size(
    in_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """floor((in + low + high - dilation (R - 1) - 1) / stride) + 1, and 0 where no window fits."""
    axes = zip(in_size, kernel, stride, pads, dilation, strict=True)
    return tuple(max((i + sum(p) - d * (r - 1) - 1) // u + 1, 0) for i, r, u, p, d in axes)


def transposed_output_size(
    in_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> tuple[int, ...]:
    """(in - 1) stride - low - high + dilation (R - 1) + 1 + output_padding; "SAME": in * stride."""
    if padding in ("SAME", "SAME_LOWER"):
        return tuple(i * u for i, u in zip(in_size, stride, strict=True))
    pads = transposed_pad_amounts(padding, kernel, stride, dilation)
    axes = zip(in_size, kernel, stride, pads, dilation, output_padding, strict=True)
    return tuple((i - 1) * u - sum(p) + d * (r - 1) + 1 + extra for i, r, u, p, d, extra in axes)


class Window(NamedTuple):
    """Which input pixel an output pixel meets at each tap, and the other way round.

    For output position p, tap r of the image (tap R - 1 - r of the filter in mode "convolution"):

        h = p * stride + r * dilation - low

    Pixels are numbered n * H * W + h * W + w over the batch; `outside` is the number after the last one, where
    a zero stands. Taps are numbered as they lie in the filter.
    """

    batch: int
    in_size: tuple[int, ...]
    out_size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    low: tuple[int, ...]
    dilation: tuple[int, ...]
    mode: str

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def in_pixels(self) -> int:
        return self.batch * math.prod(self.in_size)

    @property
    def out_pixels(self) -> int:
        return self.batch * math.prod(self.out_size)

    def _offsets(self) -> list[Array]:
        """r * dilation - low of every tap, an array [taps] for each axis."""
        taps = np.indices(self.kernel).reshape(len(self.kernel), -1)
        flip = self.mode == "convolution"
        axes = zip(taps, self.kernel, self.low, self.dilation, strict=True)
        return [(size - 1 - tap if flip else tap) * dilation - low for tap, size, low, dilation in axes]

    def input_pixel(self, output_pixel: Array) -> Array:
        """[...] -> [..., taps]: the input pixel h = p * stride + r * dilation - low, `outside` in the padding."""
        n, *position = np.unravel_index(output_pixel, (self.batch, *self.out_size))
        pixel, inside = n[..., None], True
        for p, offset, stride, size in zip(position, self._offsets(), self.stride, self.in_size, strict=True):
            h = p[..., None] * stride + offset
            pixel, inside = pixel * size + h, inside & (h >= 0) & (h < size)
        return np.where(inside, pixel, self.in_pixels)

    def output_pixel(self, input_pixel: Array) -> Array:
        """[...] -> [..., taps]: the output pixel p = (h + low - r * dilation) / stride, `outside` if there is none."""
        n, *position = np.unravel_index(input_pixel, (self.batch, *self.in_size))
        pixel, inside = n[..., None], True
        for h, offset, stride, size in zip(position, self._offsets(), self.stride, self.out_size, strict=True):
            p, remainder = np.divmod(h[..., None] - offset, stride)
            pixel, inside = pixel * size + p, inside & (remainder == 0) & (p >= 0) & (p < size)
        return np.where(inside, pixel, self.out_pixels)


def window_of(
    pixels: Sequence[int],
    kernel: Sequence[int],
    stride: int | Sequence[int],
    padding: Padding,
    dilation: int | Sequence[int],
    mode: str,
) -> Window:
    """The window of a convolution over an input of (N, H, W) pixels."""
    batch, *in_size = pixels
    stride, dilation = per_axis(stride, len(kernel)), per_axis(dilation, len(kernel))
    pads = pad_amounts(padding, in_size, kernel, stride, dilation)
    out_size = output_size(in_size, kernel, stride, pads, dilation)
    low = tuple(p[0] for p in pads)
    return Window(batch, tuple(in_size), out_size, tuple(kernel), stride, low, dilation, mode)


def with_zero(pixels: Array, axis: int) -> Array:
    """Adds a pixel of zeros after the last one, which `Window` numbers `outside`."""
    return np.pad(pixels, [(0, int(i == axis)) for i in range(pixels.ndim)])
