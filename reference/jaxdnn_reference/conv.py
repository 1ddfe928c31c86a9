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

Here each sum is a loop over the taps, with one matrix product for each group. Every op then returns
act(alpha * sum + beta * prior + residual + bias); `product.finish` states it, and the options that all four take.
Some of these ask for a stated order of additions, for some elements only, or for error bounds: `conv_scheduled` has
the same sums for that, as products of matrices.

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

from jaxdnn_reference import conv_scheduled as scheduled
from jaxdnn_reference import layout as lay
from jaxdnn_reference.activation import Activation, activate
from jaxdnn_reference.arithmetic import truncate_to_tf32, wide
from jaxdnn_reference.product import finish
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
    image, filters = x_axes.to_canonical(operand(x, precision)), w_axes.to_canonical(operand(w, precision))
    window = lay.window_of(image.shape[:-1], filters.shape[:-2], stride, padding, dilation, mode)
    xs, ws = pixels_of(image, groups), taps_of(filters, groups)

    def total() -> Any:
        at = window.input_pixel(np.arange(window.out_pixels))  # [N P Q, R S]: x's p * stride + r * dilation - low
        return sum(wide(xs[:, at[:, r]]) @ wide(ws[:, r]) for r in range(window.taps))

    shape = (window.batch, *window.out_size, filters.shape[-1])
    return finish(total, scheduled.conv(window, xs, ws, x_axes, shape), x.dtype, **options)


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
    x: Array | None = None,
    precision: str | None = None,
    **options: Any,
) -> Any:
    """dx[n, h, c] = sum over r, k and p with p * stride + r * dilation - low = h of dy[n, p, k] w[r, c mod C_g, k].

    x_shape: the shape of x in `layout`. x: itself, if it is the result of a relu, before which dx is then the
    gradient. options: see `product.finish`.
    Returns dx in `layout` (cudnnConvolutionBackwardData).
    """
    x_axes, w_axes = lay.image_axes(layout), lay.filter_axes(filter_layout or lay.default_filter_layout(layout))
    gradient, filters = x_axes.to_canonical(operand(dy, precision)), w_axes.to_canonical(operand(w, precision))
    shape = x_axes.canonical_shape(x_shape)
    window = lay.window_of(shape[:-1], filters.shape[:-2], stride, padding, dilation, mode)
    dys, ws = pixels_of(gradient, groups), taps_of(filters, groups)

    def total() -> Any:
        at = window.output_pixel(np.arange(window.in_pixels))  # [N H W, R S]: dy's (h + low - r * dilation) / stride
        return sum(wide(dys[:, at[:, r]]) @ wide(ws[:, r]).swapaxes(1, 2) for r in range(window.taps))

    return finish(total, scheduled.conv_dgrad(window, dys, ws, x_axes, shape), dy.dtype, relu=x, **options)


def conv_skip(x: Array, w: Array, /, *, input_activation: Activation = None, **options: Any) -> Any:
    """h = act(x), y = conv(h, w). Returns y, and h in x's type.

    The gradient of both in x is conv_dgrad(dy, w, beta=1, prior=dh, x=h), without the x if there is no activation.
    """
    h = x if input_activation is None else activate(x.astype(np.float64), input_activation).astype(x.dtype)
    return conv(h, w, **options), h


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
    image, gradient = x_axes.to_canonical(operand(x, precision)), x_axes.to_canonical(operand(dy, precision))
    shape = w_axes.canonical_shape(w_shape)
    window = lay.window_of(image.shape[:-1], shape[:-2], stride, padding, dilation, mode)
    xs, dys = pixels_of(image, groups), pixels_of(gradient, groups)[:, :-1]

    def total() -> Array:
        at = window.input_pixel(np.arange(window.out_pixels))
        taps = [wide(xs[:, at[:, r]]).swapaxes(1, 2) @ wide(dys) for r in range(window.taps)]
        return np.concatenate(taps, axis=1)

    return finish(total, scheduled.conv_wgrad(window, xs, dys, w_axes, shape), x.dtype, **options)


def conv_bgrad(dy: Array, /, *, layout: str = "NHWC", **options: Any) -> Any:
    """db[k] = sum_{n, p} dy[n, p, k].

    options: see `product.finish`. Returns db [K] (cudnnConvolutionBackwardBias).
    """
    gradient = lay.image_axes(layout).to_canonical(dy)
    gradient = gradient.reshape(math.prod(gradient.shape[:-1]), gradient.shape[-1])  # [N P Q, K]
    total = lambda: wide(gradient).sum(0)[None, :, None]
    product = scheduled.conv_bgrad(gradient, lay.Axes("K", "K"), gradient.shape[1:])
    return finish(total, product, dy.dtype, **options)


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


def pixels_of(image: Array, groups: int) -> Array:
    """[N, H, W, C] to [G, N H W + 1, C_g], with a last pixel of zeros, which `Window` numbers `outside`."""
    pixels = image.reshape(math.prod(image.shape[:-1]), groups, image.shape[-1] // groups).swapaxes(0, 1)
    return lay.with_zero(pixels, 1)


def taps_of(filters: Array, groups: int) -> Array:
    """[R, S, C_g, K] to [G, R S, C_g, K_g]."""
    *taps, c, k = filters.shape
    return np.moveaxis(filters.reshape(math.prod(taps), c, groups, k // groups), 2, 0)
