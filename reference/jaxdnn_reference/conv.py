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

Every op then blends and activates, in the accumulator's precision and with one rounding at the end:

    result = act(alpha * sum + beta * prior + residual + bias)                with beta = 0 prior is not read

Numerics. The accumulator is float32 (float64 for float64 inputs or accumulate=float64; "golden": float64, or
np.longdouble for float64 inputs). alpha * sum, + residual and + bias are rounded one after another, beta * prior
is added by a fused multiply-add, and the activation is correctly rounded from float64. int8: the
sum is exact and wraps to int32. If alpha is 1, beta 0, there is no activation, and bias and residual are absent
or int32, they are added in wrapping int32; otherwise float32(sum) (golden: float64) goes through the formula.

Limits. A product with a padding zero, or with a zero of dx's sum where no p exists, counts as 0 * w: with an
infinite or NaN filter element it gives NaN.

Sources: the cuDNN developer guide, "Convolution Formulas" and "Scaling Parameters"; cudnnConvolutionForward,
cudnnConvolutionBackwardData, cudnnConvolutionBackwardFilter, cudnnConvolutionBackwardBias,
cudnnConvolutionBiasActivationForward; Dumoulin and Visin, arXiv:1603.07285, for the transposed convolution.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdnn_reference import layout as lay
from jaxdnn_reference.activation import Activation, activate, parse
from jaxdnn_reference.arithmetic import (
    FLOAT32,
    FLOAT64,
    INT32,
    Schedule,
    dot,
    dot_with_bound,
    fma,
    magnitude,
    round_to,
    truncate_to_tf32,
)

Array = np.ndarray[Any, Any]

# Elements of the patch matrix that exist at one time.
PATCH_ELEMENTS = 1 << 20


class Details(NamedTuple):
    """What `details=True` returns: the result, and what a computed tolerance needs, element by element.

    value: the result. blended: the argument of the activation. accumulated: the sum before alpha.
    bound: |accumulated - exact sum| <= bound, from the partial sums of the arithmetic used.
    magnitude: S = sum |a||b|. terms: how many products with a stored number (no padding) the sum has.
    """

    value: Array
    blended: Array
    accumulated: Array
    bound: Array
    magnitude: Array
    terms: Array


class Product(NamedTuple):
    """An op as a matrix product: in each group [rows, terms] times [terms, columns].

    left(row, group) and right(column, group) give [..., terms] for index arrays of any common shape;
    stored(row) gives how many of the terms are stored numbers. The result [rows, groups * columns] is the
    output in its canonical form, whose shape is `shape`.
    """

    groups: int
    rows: int
    columns: int
    left: Callable[[Array, Array], Array]
    right: Callable[[Array, Array], Array]
    stored: Callable[[Array], Array]
    axes: lay.Axes
    shape: tuple[int, ...]


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

    options: see `finish`. Returns y in x's layout (cudnnConvolutionForward).
    """
    x_axes, w_axes = lay.image_axes(layout), lay.filter_axes(filter_layout or lay.default_filter_layout(layout))
    xc, wc = x_axes.to_canonical(operand(x, precision)), w_axes.to_canonical(operand(w, precision))
    window = make_window(xc.shape[0], xc.shape[1:-1], wc.shape[:-2], stride, padding, dilation, mode)
    c, k = wc.shape[-2] * groups, wc.shape[-1]
    cg, kg = c // groups, k // groups
    pixels = with_zero(xc.reshape(-1, groups, cg))
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

    x_shape: the shape of x in `layout`. options: see `finish`. Returns dx (cudnnConvolutionBackwardData).
    """
    x_axes, w_axes = lay.image_axes(layout), lay.filter_axes(filter_layout or lay.default_filter_layout(layout))
    dyc, wc = x_axes.to_canonical(operand(dy, precision)), w_axes.to_canonical(operand(w, precision))
    shape = x_axes.canonical_shape(x_shape)
    window = make_window(shape[0], shape[1:-1], wc.shape[:-2], stride, padding, dilation, mode)
    cg, k = wc.shape[-2:]
    kg = k // groups
    pixels = with_zero(dyc.reshape(-1, groups, kg))
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

    w_shape: the shape of w in `filter_layout`. options: see `finish`. Returns dw (cudnnConvolutionBackwardFilter).
    """
    x_axes, w_axes = lay.image_axes(layout), lay.filter_axes(filter_layout or lay.default_filter_layout(layout))
    xc, dyc = x_axes.to_canonical(operand(x, precision)), x_axes.to_canonical(operand(dy, precision))
    shape = w_axes.canonical_shape(w_shape)
    window = make_window(xc.shape[0], xc.shape[1:-1], shape[:-2], stride, padding, dilation, mode)
    cg, k = shape[-2:]
    kg = k // groups
    pixels = with_zero(xc.reshape(-1, groups, cg)).transpose(1, 2, 0)
    input_pixel = np.ascontiguousarray(window.input_pixel(np.arange(window.out_pixels)).T)  # [taps, N P Q]
    gradient = np.ascontiguousarray(dyc.reshape(-1, k).T)

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

    options: see `finish`. Returns db [K] (cudnnConvolutionBackwardBias).
    """
    dyc = lay.image_axes(layout).to_canonical(dy)
    gradient = dyc.reshape(-1, dyc.shape[-1]).T
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
    y_shape = x_axes.shape((n, *out_size, cg * groups))
    return conv_dgrad(x, w, y_shape, layout=layout, filter_layout=filter_layout, **window, **options)


# what the ops share ---------------------------------------------------------------------------------------


def operand(x: Array, precision: str | None) -> Array:
    """precision="tf32" cuts float32 to TF32's 10 fraction bits; None multiplies the stored values."""
    return truncate_to_tf32(x) if precision == "tf32" and x.dtype == FLOAT32 else x


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


def finish(
    product: Product,
    in_dtype: np.dtype,
    /,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: Activation = None,
    accumulate: Any = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
    schedule: Schedule | None = None,
    at: Array | None = None,
    details: bool = False,
) -> Any:
    """Add up, blend, activate, round: act(alpha * sum + beta * prior + residual + bias).

    bias: [K]. prior, residual: in the output's shape and layout.
    out_dtype: default the input's type; "golden" does not round unless one is given.
    at: flat positions in the output as it lies; only these are computed and returned, as a vector.
    details: return `Details` instead of the result alone.
    """
    axes, shape = product.axes, product.shape
    if at is None:
        parts = all_sums(product, arithmetic, schedule, accumulate, details)
        parts = [axes.from_canonical(part.reshape(shape)) for part in parts]
        prior_at, residual_at = prior, residual
        bias_at = None if bias is None else bias.reshape([-1 if a == "C" else 1 for a in axes.canonical])
        if bias_at is not None:
            bias_at = axes.from_canonical(np.broadcast_to(bias_at, shape))
    else:
        at = np.asarray(at)
        position = axes.canonical_positions(at, shape)
        parts = sums_at(product, position, arithmetic, schedule, accumulate, details)
        prior_at, residual_at = (None if v is None else v.reshape(-1)[at] for v in (prior, residual))
        bias_at = None if bias is None else bias[position % shape[-1]]
    added = (residual_at, bias_at)
    blended = blend(parts[0], alpha, beta, prior_at, added, activation, exact=arithmetic == "golden")
    value = blended if parse(activation)[0] == "identity" else activated(blended, activation)
    if out_dtype is not None or arithmetic != "golden":
        value = round_to(value, in_dtype if out_dtype is None else out_dtype)
    return Details(value, blended, *parts) if details else value


def all_sums(
    product: Product, arithmetic: str, schedule: Schedule | None, accumulate: Any, details: bool
) -> list[Array]:
    """The sums, and with details their bounds, magnitudes and numbers of terms, each [rows, groups * columns].

    They are computed a block of rows at a time, to bound the memory that the patch matrix takes.
    """
    group = np.arange(product.groups)[:, None]
    b = product.right(np.arange(product.columns)[None], group).swapaxes(-1, -2)
    width = product.groups * product.columns
    height = max(1, PATCH_ELEMENTS // max(1, product.groups * b.shape[-2]))
    blocks = []
    for start in range(0, max(1, product.rows), height):
        row = np.arange(start, min(start + height, product.rows))
        a = product.left(row[None], group)
        parts = sums(a, b, arithmetic, schedule, accumulate, details)
        if details:
            parts.append(np.broadcast_to(product.stored(row)[:, None], parts[0].shape))
        blocks.append([np.moveaxis(part, 0, 1).reshape(len(row), width) for part in parts])
    return [np.concatenate(part) for part in zip(*blocks, strict=True)]


def sums_at(
    product: Product, position: Array, arithmetic: str, schedule: Schedule | None, accumulate: Any, details: bool
) -> list[Array]:
    """`all_sums` at canonical flat positions, each a vector."""
    row, column = np.divmod(position, product.groups * product.columns)
    group, column = np.divmod(column, product.columns)
    terms = product.left(row[:1], group[:1]).shape[-1]
    count = max(1, PATCH_ELEMENTS // max(1, terms))
    blocks = []
    for start in range(0, max(1, len(position)), count):
        part = slice(start, start + count)
        a = product.left(row[part], group[part])[:, None, :]
        b = product.right(column[part], group[part])[:, :, None]
        found = [sum_[:, 0, 0] for sum_ in sums(a, b, arithmetic, schedule, accumulate, details)]
        blocks.append([*found, product.stored(row[part])] if details else found)
    return [np.concatenate(part) for part in zip(*blocks, strict=True)]


def sums(a: Array, b: Array, arithmetic: str, schedule: Schedule | None, accumulate: Any, details: bool) -> list[Array]:
    """[the sums] or, with details, [the sums, their bounds, their magnitudes]."""
    if not details:
        return [dot(a, b, arithmetic, schedule, accumulate=accumulate)]
    return [*dot_with_bound(a, b, arithmetic, schedule, accumulate=accumulate), magnitude(a, b)]


def blend(
    summed: Array,
    alpha: float,
    beta: float,
    prior: Array | None,
    added: Sequence[Array | None],
    activation: Activation,
    *,
    exact: bool,
) -> Array:
    """alpha * sum + beta * prior + residual + bias in the accumulator's type. With beta = 0 prior is not read."""
    present = [v for v in added if v is not None]
    if summed.dtype == INT32:
        plain = alpha == 1 and beta == 0 and parse(activation)[0] == "identity"
        if plain and all(v.dtype == INT32 for v in present):
            return sum((v.astype(np.int64) for v in present), summed.astype(np.int64)).astype(np.int32)
        summed = summed.astype(FLOAT64 if exact else FLOAT32)
    kind = summed.dtype.type
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        total = summed if alpha == 1 else kind(alpha) * summed
        if beta != 0 and prior is not None:
            product = (np.full(total.shape, kind(beta)), prior.astype(kind))
            total = product[0] * product[1] + total if exact else fma(*product, total)
        for term in present:
            total = total + term.astype(kind)
    return total


def activated(x: Array, activation: Activation) -> Array:
    """The activation in x's type: float32 by way of float64, wider types in their own precision."""
    wide = activate(x.astype(np.float64) if x.dtype == FLOAT32 else x, activation)
    return wide.astype(x.dtype)


__all__ = ["Details", "conv", "conv_bgrad", "conv_dgrad", "conv_transpose", "conv_wgrad"]
