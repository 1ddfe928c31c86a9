"""Convolution, its two adjoints, its bias gradient, and the transposed convolution.

For an input x, a filter w and one spatial axis (with more, each has its own p, r, stride, ...; outside of the
input x is 0), with C_g = C / G channels and K_g = K / G filters in each of G groups:

    y[n, p, k]  = sum_{r < R, c < C_g} x[n, p * stride + r * dilation - low, C_g floor(k / K_g) + c] w[r, c, k]

    mode "convolution" has w[R - 1 - r, c, k] there: the taps flipped, nothing else.

    dx[n, h, c] = sum_{r, k, p : p * stride + r * dilation - low = h}  dy[n, p, k] w[r, c mod C_g, k]
                                                                               k in the group of channel c
    dw[r, c, k] = sum_{n, p} x[n, p * stride + r * dilation - low, C_g floor(k / K_g) + c] dy[n, p, k]
    db[k]       = sum_{n, p} dy[n, p, k]

dx and dw are the exact adjoints of y in x and in w: <y(x, w), dy> = <x, dx(dy, w)> = <w, dw(x, dy)>.

All four are matrix products of a patch matrix with a filter matrix, one a group. Their reduction axes, which
`Schedule.order` refers to, are in natural order
    conv r * C_g + c      conv_dgrad r * K_g + k      conv_wgrad, conv_bgrad (n * P + p) * Q + q
with r counting the filter's taps as they lie in the filter (row-major), in both modes.

Every op then gives act(alpha * sum + beta * prior + residual + bias), as `product` says, with its options.

Limits. A product with a padding zero, or with a zero of dx's sum where no p exists, counts as 0 * w: with an
infinite or NaN filter element it gives NaN.

Sources: the cuDNN developer guide, "Convolution Formulas"; cudnnConvolutionForward, cudnnConvolutionBackwardData,
cudnnConvolutionBackwardFilter, cudnnConvolutionBackwardBias; Dumoulin and Visin, arXiv:1603.07285, for the
transposed convolution.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdnn_reference import layout as lay
from jaxdnn_reference.arithmetic import truncate_to_tf32
from jaxdnn_reference.product import Product, finish
from jaxdnn_reference.rounding import FLOAT32

Array = np.ndarray[Any, Any]


def conv(
    x: Array,
    w: Array,
    /,
    *,
    stride: int | Sequence[int] = 1,
    padding: lay.Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    filter_layout: str | None = None,
    precision: str | None = None,
    **options: Any,
) -> Any:
    """y[n, p, k] = sum_{r, c} x[n, p * stride + r * dilation - low, C_g floor(k / K_g) + c] w[r, c, k].

    options: see `product.finish`. Returns y in x's layout (cudnnConvolutionForward).
    """
    x_axes, w_axes = lay.image_axes(layout), lay.filter_axes(filter_layout or lay.default_filter_layout(layout))
    xc, wc = x_axes.to_canonical(operand(x, precision)), w_axes.to_canonical(operand(w, precision))
    window = make_window(xc.shape[0], xc.shape[1:-1], wc.shape[:-2], stride, padding, dilation, mode)
    c, k = wc.shape[-2] * groups, wc.shape[-1]
    cg, kg = c // groups, k // groups
    pixels = with_zero(in_pixels(xc, groups, cg))
    taps_of_filter = np.ascontiguousarray(wc.reshape(window.taps * cg, k).T)

    def left(row: Array, group: Array) -> Array:
        patch = pixels[window.input_pixel(row), group[..., None]]
        return patch.reshape(*patch.shape[:-2], window.taps * cg)

    def stored(row: Array) -> Array:
        return cg * np.sum(window.input_pixel(row) != window.in_pixels, axis=-1)

    def right(column: Array, group: Array) -> Array:
        return taps_of_filter[group * kg + column]

    shape = (window.batch, *window.out_size, k)
    return finish(Product(groups, window.out_pixels, kg, left, right, stored, x_axes, shape), x.dtype, **options)


def conv_dgrad(
    dy: Array,
    w: Array,
    x_shape: Sequence[int],
    /,
    *,
    stride: int | Sequence[int] = 1,
    padding: lay.Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    filter_layout: str | None = None,
    precision: str | None = None,
    **options: Any,
) -> Any:
    """dx[n, h, c] = sum over r, k and p with p * stride + r * dilation - low = h of dy[n, p, k] w[r, c mod C_g, k].

    x_shape: the shape of x in `layout`. options: see `product.finish`.
    Returns dx in `layout` (cudnnConvolutionBackwardData).
    """
    x_axes, w_axes = lay.image_axes(layout), lay.filter_axes(filter_layout or lay.default_filter_layout(layout))
    dyc, wc = x_axes.to_canonical(operand(dy, precision)), w_axes.to_canonical(operand(w, precision))
    shape = x_axes.canonical_shape(x_shape)
    window = make_window(shape[0], shape[1:-1], wc.shape[:-2], stride, padding, dilation, mode)
    cg, k = wc.shape[-2:]
    kg = k // groups
    pixels = with_zero(in_pixels(dyc, groups, kg))
    taps_of_filter = np.ascontiguousarray(wc.reshape(window.taps, cg, groups, kg).transpose(2, 1, 0, 3))

    def left(row: Array, group: Array) -> Array:
        patch = pixels[window.output_pixel(row), group[..., None]]
        return patch.reshape(*patch.shape[:-2], window.taps * kg)

    def stored(row: Array) -> Array:
        return kg * np.sum(window.output_pixel(row) != window.out_pixels, axis=-1)

    def right(column: Array, group: Array) -> Array:
        taps = taps_of_filter[group, column]
        return taps.reshape(*taps.shape[:-2], window.taps * kg)

    return finish(Product(groups, window.in_pixels, cg, left, right, stored, x_axes, shape), dy.dtype, **options)


def conv_wgrad(
    x: Array,
    dy: Array,
    w_shape: Sequence[int],
    /,
    *,
    stride: int | Sequence[int] = 1,
    padding: lay.Padding = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    mode: str = "cross_correlation",
    layout: str = "NHWC",
    filter_layout: str | None = None,
    precision: str | None = None,
    **options: Any,
) -> Any:
    """dw[r, c, k] = sum_{n, p} x[n, p * stride + r * dilation - low, C_g floor(k / K_g) + c] dy[n, p, k].

    w_shape: the shape of w in `filter_layout`. options: see `product.finish`.
    Returns dw in `filter_layout` (cudnnConvolutionBackwardFilter).
    """
    x_axes, w_axes = lay.image_axes(layout), lay.filter_axes(filter_layout or lay.default_filter_layout(layout))
    xc, dyc = x_axes.to_canonical(operand(x, precision)), x_axes.to_canonical(operand(dy, precision))
    shape = w_axes.canonical_shape(w_shape)
    window = make_window(xc.shape[0], xc.shape[1:-1], shape[:-2], stride, padding, dilation, mode)
    cg, k = shape[-2:]
    kg = k // groups
    pixels = np.ascontiguousarray(with_zero(in_pixels(xc, groups, cg)).transpose(1, 2, 0))
    input_pixel = np.ascontiguousarray(window.input_pixel(np.arange(window.out_pixels)).T)  # [taps, N P Q]
    gradient = np.ascontiguousarray(in_pixels(dyc, k).T)

    def left(row: Array, group: Array) -> Array:
        tap, c = np.divmod(row, cg)
        return pixels[group[..., None], c[..., None], input_pixel[tap]]

    def stored(row: Array) -> Array:
        return np.sum(input_pixel != window.in_pixels, axis=-1)[row // cg]

    def right(column: Array, group: Array) -> Array:
        return gradient[group * kg + column]

    return finish(Product(groups, window.taps * cg, kg, left, right, stored, w_axes, shape), x.dtype, **options)


def conv_bgrad(dy: Array, /, *, layout: str = "NHWC", **options: Any) -> Any:
    """db[k] = sum_{n, p} dy[n, p, k], a matrix product with ones.

    options: see `product.finish`. Returns db [K] (cudnnConvolutionBackwardBias).
    """
    dyc = lay.image_axes(layout).to_canonical(dy)
    gradient = in_pixels(dyc, dyc.shape[-1]).T
    k, terms = gradient.shape

    def right(column: Array, group: Array) -> Array:
        return np.ones((*np.broadcast_shapes(column.shape, group.shape), terms), dy.dtype)

    def left(row: Array, group: Array) -> Array:
        return gradient[row + 0 * group]

    def stored(row: Array) -> Array:
        return np.full(row.shape, terms)

    return finish(Product(1, k, 1, left, right, stored, lay.Axes("K", "K"), (k,)), dy.dtype, **options)


def conv_transpose(
    x: Array,
    w: Array,
    /,
    *,
    stride: int | Sequence[int] = 1,
    padding: lay.Padding = 0,
    dilation: int | Sequence[int] = 1,
    output_padding: int | Sequence[int] = 0,
    layout: str = "NHWC",
    filter_layout: str | None = None,
    groups: int = 1,
    **options: Any,
) -> Any:
    """conv_dgrad(x, w) with the output as long as a convolution's input that gives x:

    H = (P - 1) * stride - low - high + dilation (R - 1) + 1 + output_padding        "SAME": H = P * stride

    From output_padding = stride on such a convolution gives more than x has: there zeros follow x.

    w is the filter of the convolution that this transposes: its K is the number of x's channels, its C (in the
    filter C / G) that of the output's, as in cudnnConvolutionBackwardData and PyTorch's ConvTranspose.
    """
    x_axes, w_axes = lay.image_axes(layout), lay.filter_axes(filter_layout or lay.default_filter_layout(layout))
    n, *in_size, _ = x_axes.canonical_shape(x.shape)
    *kernel, cg, _ = w_axes.canonical_shape(w.shape)
    stride, dilation, extra = (lay.per_axis(v, len(kernel)) for v in (stride, dilation, output_padding))
    out_size = lay.transposed_output_size(in_size, kernel, stride, padding, dilation, extra)
    pads = lay.transposed_pad_amounts(padding, kernel, stride, dilation)
    window = {"stride": stride, "padding": pads, "dilation": dilation, "groups": groups}
    longer = [(0, e // u) for e, u in zip(extra, stride, strict=True)]
    x = x_axes.from_canonical(np.pad(x_axes.to_canonical(x), [(0, 0), *longer, (0, 0)]))
    y_shape = x_axes.shape((n, *out_size, cg * groups))
    return conv_dgrad(x, w, y_shape, layout=layout, filter_layout=filter_layout, **window, **options)


# what the ops share ---------------------------------------------------------------------------------------


def operand(x: Array, precision: str | None) -> Array:
    """precision="tf32" cuts float32 to TF32's 10 fraction bits; None multiplies the stored values."""
    return truncate_to_tf32(x) if precision == "tf32" and x.dtype == FLOAT32 else x


def in_pixels(x: Array, *channels: int) -> Array:
    """[N P..., channels]: an image's pixels in a row; without channels as many, of no elements."""
    return x.reshape(math.prod(x.shape[:-1]), *channels)


def with_zero(pixels: Array) -> Array:
    """[pixels, groups, channels] with a last pixel of zeros, which `Window` numbers `outside`."""
    return np.concatenate([pixels, np.zeros((1, *pixels.shape[1:]), pixels.dtype)])


def make_window(
    batch: int,
    in_size: Sequence[int],
    kernel: Sequence[int],
    stride: int | Sequence[int],
    padding: lay.Padding,
    dilation: int | Sequence[int],
    mode: str,
) -> lay.Window:
    stride, dilation = lay.per_axis(stride, len(kernel)), lay.per_axis(dilation, len(kernel))
    pads = lay.pad_amounts(padding, in_size, kernel, stride, dilation)
    out_size = lay.output_size(in_size, kernel, stride, pads, dilation)
    low = tuple(p[0] for p in pads)
    return lay.Window(batch, tuple(in_size), out_size, tuple(kernel), stride, low, dilation, mode)
