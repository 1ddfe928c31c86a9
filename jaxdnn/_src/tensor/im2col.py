"""The matrix of a convolution's patches, and its transpose.

Letters as in `conv`: N batch, C channels, H, W spatial sizes of x, P, Q of the convolution's result, R, S taps.
"""

from __future__ import annotations

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import blending, checks, frames, primitives
from jaxdnn._src.core import windows as _window
from jaxdnn._src.core.annotations import Padding, PerAxis
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.padding import pad
from jaxdnn._src.core.partitioning import Axes, Factors, Run, Windows
from jaxdnn._src.core.rounding import at_edges
from jaxdnn._src.core.windows import Layout, Window

MODES = ("cross_correlation", "convolution")
ORDERS = ("taps_channels", "channels_taps")


@public
def im2col(
    x: ArrayLike,
    /,
    *,
    window: PerAxis = 3,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    order: str | None = None,
) -> Array:
    """Gathers what the taps of a convolution read, so that the convolution becomes a matrix product.

    y[n, p, q, (r S + s) C + c] = x[n, p u + r d - a, q v + s e - b, c]     order "taps_channels"
    y[n, p, q, (c R + r) S + s] = x[n, p u + r d - a, q v + s e - b, c]     order "channels_taps"

    with stride (u, v), dilation (d, e), low padding (a, b), and x zero outside.

    Args:
      x: the input, (N, H, W, C) for layout NHWC; float32, bfloat16, float16, float64, float8_e4m3fn, float8_e5m2, int8,
        uint8, int32.
      window: R and S, one integer or one per spatial axis: the taps of the filter.
      stride, padding, dilation, mode: as for `conv`; mode "convolution" numbers the taps backwards.
      layout: the axes of x and of the result, see `conv`.
      order: how taps and channels are numbered together; None is "taps_channels" for channels last, else
        "channels_taps": the orders of the filter layouts HWIO and OIHW.

    Returns:
      y, in `layout`, with R S C channels: (N, P, Q, R S C) for NHWC.

    Differentiation: any order, in x; the gradient is that of `col2im`, added in one order that depends on no shape.

    Numerics: elements are copied, so the bits are those of x; float32's accumulator for the gradient, rounded once.
      Determinism level: "portable".

    Raises:
      ValueError: a window that does not fit into the padded input, or an argument out of range.
      TypeError: a dtype that is not served.

    Example:
      >>> x, w = jnp.ones((2, 5, 4, 3)), jnp.ones((3, 2, 3, 7))
      >>> (dnn.im2col(x, window=(3, 2)) @ w.reshape(18, 7)).shape
      (2, 3, 3, 7)

    Sources: cuDNN's cudnnIm2Col. PyTorch's unfold has order "channels_taps" and P Q as one axis.
    """
    frame = frames.frame(layout)
    given = blending.array("x", x)
    plain = frame.array("x", given)
    sizes = tuple(plain.shape[axis] for axis in frame.layout.spatial)
    geometry = _geometry(sizes, window, stride, padding, dilation)
    flip = checks.choice("mode", mode, MODES) == "convolution"
    if jnp.issubdtype(given.dtype, jnp.inexact):  # exact, and makes the gradient's sums float32's
        plain = plain.astype(blending.accumulator(given.dtype))
    pads = _along_spatial(frame.layout, [(low, high, 0) for low, high in geometry.padding], (0, 0, 0))
    checks.countable("`padding`", [n + low + high for n, (low, high, _) in zip(plain.shape, pads, strict=True)])

    taps = _Taps(frame.layout, geometry, flip, _order(order, frame.layout), given.dtype, last_first=True)

    def patches(x: Array) -> Array:
        return _joined(_moved(x, taps=taps, back=False), taps)

    factors = ft.partial(_factors, frame.layout, _windows(geometry))
    return at_edges(required(), frame.restore(primitives.composed(patches, factors, plain)))


@public
def col2im(
    y: ArrayLike,
    x_shape: Sequence[int],
    /,
    *,
    window: PerAxis = 3,
    stride: PerAxis = 1,
    padding: Padding = 0,
    dilation: PerAxis = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    order: str | None = None,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """Adds up patches where they came from: the transpose of `im2col`.

    x[n, h, w, c] = Σ y[n, p, q, (r S + s) C + c]  over all p u + r d - a = h, q v + s e - b = w

    Args:
      y: the patches, (N, P, Q, R S C) for layout NHWC; dtypes as for `im2col`.
      x_shape: the shape of x in `layout`; several sizes of x give the same size of y.
      window, stride, padding, dilation, mode, layout, order: those of `im2col`.
      out_dtype: the result's dtype; None is that of y.

    Returns:
      x, of shape `x_shape`; 0 where no patch reaches.

    Differentiation: any order, in y; the gradient is `im2col`.

    Numerics: added in float32 (float64 for float64, wrapping int32 for integers), one tap after another in row-major
      order, then converted once; integers saturate. No atomics and no scatter: determinism level "portable".

    Raises:
      ValueError: shapes that do not fit. TypeError: a dtype that is not served.

    Example:
      >>> dnn.col2im(jnp.ones((1, 3, 9)), (1, 5, 3), layout="NWC")[0, :, 0].tolist()
      [1.0, 2.0, 3.0, 2.0, 1.0]

    Sources: PyTorch's fold, ONNX's Col2Im. cuDNN has it only within its backward-data algorithms.
    """
    frame = frames.frame(layout)
    given = blending.array("y", y)
    plain, plain_shape = frame.array("y", given), frame.array_shape("x_shape", x_shape)
    axes = frame.layout
    sizes = tuple(plain_shape[axis] for axis in axes.spatial)
    geometry = _geometry(sizes, window, stride, padding, dilation)
    features = plain_shape[axes.channel] * math.prod(geometry.taps)
    expected = axes.shape(plain_shape[axes.batch], geometry.out, features)
    checks.shape("y", plain, expected, f"as im2col of {plain_shape} has (axes {axes.name})")
    flip = checks.choice("mode", mode, MODES) == "convolution"
    taps = _Taps(axes, geometry, flip, _order(order, axes), given.dtype)

    def image(y: Array) -> Array:
        return _moved(_apart(y, taps), taps=taps, back=True)

    def factors(y: Any) -> Factors:
        of_image = _factors(axes, _windows(geometry), y)
        return dataclasses.replace(of_image, operands=of_image.results, results=of_image.operands)

    found = frame.restore(primitives.composed(image, factors, plain))
    return at_edges(required(), blending.convert(found, blending.out_dtype(out_dtype, given)))


def _geometry(sizes: tuple[int, ...], window: Any, stride: Any, padding: Any, dilation: Any) -> Window:
    taps = checks.integers("window", window, len(sizes), minimum=1)
    found = _window.window(stride=stride, padding=padding, dilation=dilation, sizes=sizes, taps=taps)
    if min(found.out) < 1:
        padded = tuple(n + sum(ends) for n, ends in zip(sizes, found.padding, strict=True))
        raise ValueError(
            f"`window` must fit into the padded input, got {taps} that spans {found.extents} at dilation "
            f"{found.dilation} for padded sizes {padded}."
        )
    return found


def _windows(geometry: Window) -> list[Windows]:
    axes = zip(geometry.sizes, geometry.out, geometry.stride, geometry.extents, strict=True)
    return [Windows(*axis, low) for axis, (low, _) in zip(axes, geometry.padding, strict=True)]


def _factors(layout: Layout, windows: Sequence[Windows], x: Any) -> Factors:
    """How `im2col` may be sharded: along all axes, spatial ones with as many patches as the stride goes into the size.

    Features of a device's channels are not neighbours in the result, whose parts are exchanged once more.
    """
    pairs = [window.dims(f"s{i}")[:2] for i, window in enumerate(windows)]
    sizes = {name: size for i, window in enumerate(windows) for name, size in window.dims(f"s{i}")[2].items()}
    named = [_along_spatial(layout, along, "c") for along in zip(*pairs, strict=True)]
    for names in named:
        names[layout.batch] = "n"
    free = ("n", "c", *(y for x, y in pairs if x.split()[0] == y))
    return Factors(operands=(tuple(named[0]),), results=(tuple(named[1]),), free=free, sizes=sizes)


def _order(value: Any, layout: Layout) -> str:
    if value is None:
        return "taps_channels" if layout.channels_last else "channels_taps"
    return checks.choice("order", value, ORDERS)


# ---- what taps read, and back ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Taps:
    """How patches are numbered, which have an axis of taps beside that of the channels.

    dtype: of the patches; images are added up in its accumulator, from the first tap or, by `last_first`, the last on.
    """

    layout: Layout
    window: Window
    flip: bool
    order: str
    dtype: np.dtype
    last_first: bool = False

    @property
    def axis(self) -> int:
        """The axis of the taps."""
        return self.layout.channel + (self.order == "channels_taps")

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """The taps in the order in which they are numbered."""
        every = list(itertools.product(*map(range, self.window.taps)))
        return iter(every[::-1] if self.flip else every)


def _run(x: Array, *, taps: _Taps, back: bool) -> Array:
    """The patches of an image, or `back` the image in which they are added up."""
    run = ft.partial(_image if back else _patches, taps)
    for _ in range(x.ndim - len(taps.layout.axes) - back):
        run = jax.vmap(run)
    return run(x)


def _patches(taps: _Taps, x: Array) -> Array:
    pads = _along_spatial(taps.layout, [(low, high, 0) for low, high in taps.window.padding], (0, 0, 0))
    padded = pad(x, 0, pads)
    return jnp.stack([_shift(taps.layout, padded, taps.window, tap).astype(taps.dtype) for tap in taps], taps.axis)


def _image(taps: _Taps, y: Array) -> Array:
    def spread(i: int, tap: tuple[int, ...]) -> Array:
        part = lax.index_in_dim(y, i, taps.axis, keepdims=False)
        return _spread(taps.layout, part.astype(blending.accumulator(y.dtype)), taps.window, tap)

    every = list(enumerate(taps))
    terms = [spread(i, tap) for i, tap in (every[::-1] if taps.last_first else every)]
    return _without_padding(taps.layout, ft.reduce(jnp.add, terms), taps.window)


def _rule(x: Any, *, taps: _Taps, back: bool) -> Factors:
    """All axes but the taps' may be sharded, spatial ones with their neighbours, see `_factors`."""
    of = _factors(taps.layout, _windows(taps.window), x)
    lead = tuple(f"lead{i}" for i in range(len(x.shape) - len(taps.layout.axes) - back))
    image, (patches,) = (*lead, *of.operands[0]), of.results
    patches = (*lead, *patches[: taps.axis], "taps", *patches[taps.axis :])
    placed = tuple(f for f in of.free if f not in ("n", "c"))
    return Factors(
        operands=(patches if back else image,),
        results=(image if back else patches,),
        free=(*lead, "n", "c"),
        placed=placed,
        sizes=of.sizes,
        local=ft.partial(_on_device, taps, back),
    )


def _on_device(taps: _Taps, back: bool, _: Run, axes: Axes, x: Array) -> Array:
    """A device's part, with the rows that its windows, or its image's, share with other devices."""
    sizes, padding = list(taps.window.sizes), list(taps.window.padding)
    lead = x.ndim - len(taps.layout.axes) - back
    for i, (axis, window) in enumerate(zip(taps.layout.spatial, _windows(taps.window), strict=True)):
        if (devices := axes.get(f"s{i}")) is None:
            continue
        if back:
            x, padding[i] = window.around_outputs(x, lead + axis + (axis >= taps.axis), devices)
            sizes[i] //= devices.count
        else:
            x = window.around_inputs(x, lead + axis, devices)
            sizes[i], padding[i] = x.shape[lead + axis], (0, 0)
    part = dataclasses.replace(taps.window, sizes=tuple(sizes), padding=tuple(padding))
    return _run(x, taps=dataclasses.replace(taps, window=part), back=back)


# XLA would exchange rows tap by tap.
_moved = primitives.linear_map("patches", _run, lambda *, taps, back: {"taps": taps, "back": not back}, _rule)


def _along_spatial(layout: Layout, values: Sequence[Any], other: Any) -> list[Any]:
    """One value per axis of the array: those of the spatial axes, and another for the batch and the channels."""
    result = [other] * len(layout.axes)
    for axis, value in zip(layout.spatial, values, strict=True):
        result[axis] = value
    return result


def _shift(layout: Layout, padded: Array, window: Window, tap: tuple[int, ...]) -> Array:
    """The elements that one tap reads: every stride-th from the tap's place on."""
    starts = [r * d for r, d in zip(tap, window.dilation, strict=True)]
    ends = [start + (p - 1) * u + 1 for start, p, u in zip(starts, window.out, window.stride, strict=True)]
    shape = padded.shape
    limits = [shape[axis] if end is None else end for axis, end in enumerate(_along_spatial(layout, ends, None))]
    return lax.slice(padded, _along_spatial(layout, starts, 0), limits, _along_spatial(layout, window.stride, 1))


def _spread(layout: Layout, part: Array, window: Window, tap: tuple[int, ...]) -> Array:
    """What one tap saw, back in its place in the padded array, with zeros elsewhere: the transpose of `_shift`.

    No length here is negative: XLA aborts where it shards an axis that it dilates and crops at once.
    """
    pads = []
    for axis, r, d, u, (low, high), size in zip(
        layout.spatial, tap, window.dilation, window.stride, window.padding, window.sizes, strict=True
    ):
        reach = (part.shape[axis] - 1) * u + 1
        pads.append((r * d, low + size + high - r * d - reach, u - 1))
    return pad(part, 0, _along_spatial(layout, pads, (0, 0, 0)))


def _without_padding(layout: Layout, padded: Array, window: Window) -> Array:
    starts = [low for low, _ in window.padding]
    limits = _along_spatial(layout, [low + size for low, size in zip(starts, window.sizes, strict=True)], None)
    limits = [n if end is None else end for n, end in zip(padded.shape, limits, strict=True)]
    return lax.slice(padded, _along_spatial(layout, starts, 0), limits)


def _joined(y: Array, taps: _Taps) -> Array:
    """Taps and channels as one axis."""
    channel = taps.layout.channel
    if taps.axis == channel:
        return _runs(y, axis=channel - len(taps.layout.axes), count=y.shape[channel], back=False)
    return y.reshape(*y.shape[:channel], y.shape[channel] * y.shape[channel + 1], *y.shape[channel + 2 :])


def _apart(y: Array, taps: _Taps) -> Array:
    """Taps and channels as two axes."""
    channel, count = taps.layout.channel, math.prod(taps.window.taps)
    if taps.axis == channel:
        return _runs(y, axis=channel - len(taps.layout.axes), count=count, back=True)
    return y.reshape(*y.shape[:channel], y.shape[channel] // count, count, *y.shape[channel + 1 :])


def _joined_runs(y: Array, *, axis: int, count: int, back: bool) -> Array:
    """One axis of so many runs, which have the axis before it, or `back`: without a reshape, for which XLA gathers."""
    if back:
        return jnp.stack(jnp.split(y, count, axis), y.ndim + axis)
    parts = [lax.index_in_dim(y, i, y.ndim + axis - 1, keepdims=False) for i in range(count)]
    return lax.concatenate(parts, y.ndim + axis - 1)


_runs = primitives.linear_map("runs", _joined_runs, lambda *, back, **given: {**given, "back": not back})
