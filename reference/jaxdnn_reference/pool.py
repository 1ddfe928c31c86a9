"""Pooling: the maximum, the average or the p-norm of every window, its gradient, and its reversal.

For one spatial axis (with more, each has its own p, r, stride, ...), the taps of output p being

    x[p * stride + r * dilation - low],  r < R        that lie in x; outside is padding

    max        the first of the largest; nan="propagate": the first NaN; "ignore": NaN only if there is nothing else
    average    sum of the taps in x / number of taps in x or in its padding (low, high), or / a given divisor
    average_exclude_padding    ... / number of taps in x
    lp         (sum |x|^p)^(1/p)

    dx[h] = sum of dy[p] over the windows p whose maximum is at h              max
            sum of dy[p] / count[p] over the windows p that h lies in          average
            sign(x) |x|^(p-1) sum dy[p] y[p]^(1-p) over the same, 0 where y = 0  lp

The number of outputs is floor((H + low + high - dilation (R - 1) - 1) / stride) + 1, or with ceil_mode the same with
ceil, less one if the last window would start beyond x and its low padding. A tap beyond the high padding, where only
ceil_mode reaches, is in no count. A negative padding (low, high) cuts off the elements of x that stand there: they are
in no window.

Arithmetic. "golden" computes in float64 and rounds only to a given out_dtype. "ordered" gives the bits: sums in
float32 (float64 for float64; int8 exactly), taps along the last axis first, then along those before it; along one
axis neighbours are added, then neighbouring sums and so on, an odd one out going up unchanged; a sum is multiplied by
1 / count, rounded once (int8 to int8: divided, ties to even). The gradient of an average adds the same way, its taps
in ascending order, and multiplies afterwards where all counts are alike, else before. That of a maximum adds, from +0,
the taps that an element can be of a window, in row-major order, one after the other, a window that chose another
counting as zero. lp has no ordered arithmetic.

Sources: the cuDNN developer guide, cudnnPoolingForward and cudnnPoolingBackward; PyTorch's max_pool2d and avg_pool2d
for ceil mode, its counts, the divisor (divisor_override) and the flat indices; ONNX's MaxPool, AveragePool and LpPool.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdnn_reference import layout as lay
from jaxdnn_reference.product import blend
from jaxdnn_reference.rounding import FLOAT32, FLOAT64, INT8, round_to

Array = np.ndarray[Any, Any]


class Windows(NamedTuple):
    """The windows over one spatial axis.

    at: [P, R] positions in x. inside: [P, R] whether in x. counted: [P, R] whether in x or its padding. end: of x, less
    what negative padding cuts off.
    """

    size: int
    end: int
    at: Array
    inside: Array
    counted: Array
    stride: int
    dilation: int
    low: int


def make_windows(
    sizes: Sequence[int], window: Any, stride: Any, padding: lay.Padding, dilation: Any, ceil_mode: bool
) -> list[Windows]:
    taps, dilations = lay.per_axis(window, len(sizes)), lay.per_axis(dilation, len(sizes))
    strides = taps if stride is None else lay.per_axis(stride, len(sizes))
    pads = lay.pad_amounts(padding, sizes, taps, strides, dilations)
    found = []
    for size, r, u, d, (low, high) in zip(sizes, taps, strides, dilations, pads, strict=True):
        room, end = size + low + high - d * (r - 1) - 1, size + min(high, 0)
        outputs = room // u + 1
        if ceil_mode:
            outputs = math.ceil(room / u) + 1
            outputs -= (outputs - 1) * u >= end + low
        at = np.arange(outputs)[:, None] * u + np.arange(r) * d - low
        found.append(Windows(size, end, at, (at >= 0) & (at < end), at < size + high, u, d, low))
    return found


def pool(
    x: Array,
    /,
    *,
    window: Any = 2,
    mode: str = "max",
    stride: Any = None,
    padding: lay.Padding = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    layout: str = "NHWC",
    p: float = 2.0,
    divisor: int | None = None,
    nan: str = "propagate",
    return_indices: bool | str = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Any:
    """y = alpha * pooling(x) + beta * prior, in x's layout.

    return_indices: True: also the flat spatial positions of the maxima in x, int32; "tap": their positions in the
    window, in row-major order, uint8 (uint16, uint32 where a window has more than 2^8, 2^16 taps).
    """
    axes = lay.image_axes(layout)
    xc = axes.to_canonical(x)
    windows = make_windows(xc.shape[1:-1], window, stride, padding, dilation, ceil_mode)
    exact = arithmetic == "golden"
    value = tap = np.zeros(())
    if mode == "max":
        value, tap = maximum(xc, windows, nan)
        summed = value.astype(FLOAT64 if exact else accumulator(x.dtype))
    elif mode == "lp":
        summed = norms(xc.astype(FLOAT64), windows, p)
    else:
        summed = average(
            xc,
            windows,
            counts(windows, mode, divisor),
            exact,
            x.dtype == INT8 and out_dtype in (None, INT8) and alpha == 1 and beta == 0,
        )
    prior_c = None if prior is None or beta == 0 else axes.to_canonical(prior)
    y = blend(summed, alpha, beta, prior_c, (), None, exact=exact)
    if mode == "max" and alpha == 1 and beta == 0:
        y = value.astype(FLOAT64) if exact else value
    y = axes.from_canonical(finished(y, x.dtype, out_dtype, exact))
    if not return_indices:
        return y
    found = tap.astype(tap_dtype(windows)) if return_indices == "tap" else positions(tap, windows)
    return y, axes.from_canonical(found)


def finished(y: Array, dtype: Any, out_dtype: Any, exact: bool) -> Array:
    return y if exact and out_dtype is None else round_to(y, dtype if out_dtype is None else out_dtype)


def accumulator(dtype: Any) -> np.dtype:
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def places(windows: Sequence[Windows]) -> Iterator[tuple[int, ...]]:
    """The taps in row-major order."""
    return itertools.product(*(range(w.at.shape[1]) for w in windows))


def tap_values(xc: Array, windows: Sequence[Windows], place: Sequence[int]) -> tuple[Array, Array]:
    """[N, P..., C] the values of one tap of every window, and [1, P..., 1] whether they are in x."""
    inside: Array = np.ones((1,), bool)
    for axis, (w, r) in enumerate(zip(windows, place, strict=True)):
        xc = np.take(xc, np.clip(w.at[:, r], 0, w.size - 1), axis + 1)
        inside = inside[..., None] & w.inside[:, r]
    return xc, inside[..., None]


def maximum(xc: Array, windows: Sequence[Windows], nan: str) -> tuple[Array, Array]:
    """The maxima, and their taps."""
    shape = (xc.shape[0], *(len(w.at) for w in windows), xc.shape[-1])
    best, tap, started = np.zeros(shape, xc.dtype), np.zeros(shape, np.int64), np.zeros(shape, bool)
    for t, place in enumerate(places(windows)):
        value, inside = tap_values(xc, windows, place)
        with np.errstate(invalid="ignore"):
            better = value > best
        if xc.dtype.kind not in "iu":
            is_nan, best_is_nan = np.isnan(value), np.isnan(best)
            better |= is_nan & ~best_is_nan if nan == "propagate" else best_is_nan & ~is_nan
        takes = inside & (better | ~started)
        best, tap, started = np.where(takes, value, best), np.where(takes, t, tap), started | inside
    return best, tap


def tap_dtype(windows: Sequence[Windows]) -> Any:
    taps = math.prod(w.at.shape[1] for w in windows)
    return np.uint8 if taps <= 1 << 8 else np.uint16 if taps <= 1 << 16 else np.uint32


def positions(tap: Array, windows: Sequence[Windows]) -> Array:
    """Taps as flat spatial positions in x, int32; -1 for a tap that no window has, or that is outside of x."""
    counts = [w.at.shape[1] for w in windows]
    within = tap < math.prod(counts)
    place = np.unravel_index(np.where(within, tap, 0), counts)
    flat = np.zeros(tap.shape, np.int64)
    for axis, (w, r) in enumerate(zip(windows, place, strict=True)):
        p = np.arange(len(w.at)).reshape([-1 if d == axis + 1 else 1 for d in range(tap.ndim)])
        flat = flat * w.size + w.at[p, r]
        within = within & w.inside[p, r]
    return np.where(within, flat, -1).astype(np.int32)


def as_positions(indices: Array, windows: Sequence[Windows]) -> Array:
    """What `pool` returns as indices, of either kind, as flat spatial positions: taps are unsigned."""
    return positions(indices, windows) if indices.dtype.kind == "u" else indices


def pairwise(terms: list[Array]) -> Array:
    """Adds neighbours, then neighbouring sums and so on; an odd one out goes up unchanged."""
    while len(terms) > 1:
        with np.errstate(invalid="ignore", over="ignore"):
            pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def sums(xc: Array, windows: Sequence[Windows]) -> Array:
    """The sums over windows, along the last axis first."""
    for axis, w in reversed(list(enumerate(windows))):
        terms = []
        for r in range(w.at.shape[1]):
            inside = w.inside[:, r].reshape([-1 if d == axis + 1 else 1 for d in range(xc.ndim)])
            value = np.take(xc, np.clip(w.at[:, r], 0, w.size - 1), axis + 1)
            terms.append(np.where(inside, value, np.zeros_like(value)))
        xc = pairwise(terms)
    return xc


def counts(windows: Sequence[Windows], mode: str, divisor: int | None = None) -> Array:
    """[P..., 1]: what the sums are divided by."""
    if divisor is not None:
        return np.full([len(w.at) for w in windows] + [1], divisor)
    total = np.ones((), np.int64)
    for w in windows:
        total = total[..., None] * (w.counted if mode == "average" else w.inside).sum(1)
    return total[..., None]


def average(xc: Array, windows: Sequence[Windows], count: Array, exact: bool, to_integers: bool) -> Array:
    if exact:
        return sums(xc.astype(FLOAT64), windows) / count
    if xc.dtype.kind == "i":
        total = sums(xc.astype(np.int64), windows)
        if to_integers:
            return np.rint(total / count).astype(FLOAT32)
        return total.astype(FLOAT32) * (1.0 / count).astype(FLOAT32)
    kind = accumulator(xc.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        return sums(xc.astype(kind), windows) * (1.0 / count).astype(kind)


def norms(xc: Array, windows: Sequence[Windows], p: float) -> Array:
    return sums(np.abs(xc) ** p, windows) ** (1 / p)


def pool_dgrad(
    dy: Array,
    x: Any,
    /,
    *,
    window: Any = 2,
    mode: str = "max",
    stride: Any = None,
    padding: lay.Padding = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    layout: str = "NHWC",
    p: float = 2.0,
    divisor: int | None = None,
    nan: str = "propagate",
    indices: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """dx = alpha * (the gradient) + beta * prior, in the layout of x, of which a shape is enough for averages.

    indices: flat spatial positions of the maxima in x (int32), or their taps (unsigned), if they are not to be sought
    in x.
    """
    axes = lay.image_axes(layout)
    exact = arithmetic == "golden"
    kind = FLOAT64 if exact else accumulator(dy.dtype)
    shape = axes.canonical_shape(x.shape if hasattr(x, "shape") else x)
    windows = make_windows(shape[1:-1], window, stride, padding, dilation, ceil_mode)
    gradient = axes.to_canonical(dy).astype(kind)
    if mode == "max":
        if indices is None:
            flat = positions(maximum(axes.to_canonical(x), windows, nan)[1], windows)
        else:
            flat = as_positions(axes.to_canonical(indices), windows)
        dx = chosen_sums(gradient, flat, shape, windows)
    elif mode == "lp":
        xc = axes.to_canonical(x).astype(FLOAT64)
        y = norms(xc, windows, p)
        with np.errstate(divide="ignore", invalid="ignore"):
            weighted = np.where(y == 0, 0.0, gradient * y ** (1 - p))
        dx = np.sign(xc) * np.abs(xc) ** (p - 1) * window_sums(weighted, windows)
    else:
        dx = average_gradient(gradient, windows, counts(windows, mode, divisor))
    prior_c = None if prior is None or beta == 0 else axes.to_canonical(prior)
    dx = blend(dx, alpha, beta, prior_c, (), None, exact=exact)
    return axes.from_canonical(finished(dx, dy.dtype, out_dtype, exact))


def average_gradient(gradient: Array, windows: Sequence[Windows], count: Array) -> Array:
    factor = (1.0 / count).astype(gradient.dtype)
    if np.all(count == count.flat[0]):
        return window_sums(gradient, windows) * factor.flat[0]
    return window_sums(gradient * factor, windows)


def seen_by(w: Windows) -> list[tuple[Array, Array, Array]]:
    """For each tap r: [H] the output that has r at h, whether r can be at h, and whether there is that output."""
    found = []
    for r in range(w.at.shape[1]):
        h = np.arange(w.size)
        p, rest = np.divmod(h + w.low - r * w.dilation, w.stride)
        found.append((np.clip(p, 0, len(w.at) - 1), (rest == 0) & (h < w.end), (p >= 0) & (p < len(w.at))))
    return found


def window_sums(gradient: Array, windows: Sequence[Windows]) -> Array:
    """Every element's sum over the windows it lies in, along the last axis first, taps ascending, pairwise."""
    for axis, w in reversed(list(enumerate(windows))):
        taps = seen_by(w)
        total = np.zeros((*gradient.shape[: axis + 1], w.size, *gradient.shape[axis + 2 :]), gradient.dtype)
        for h in range(w.size):
            zero = np.zeros_like(np.take(gradient, 0, axis + 1))
            terms = [np.take(gradient, p[h], axis + 1) if there[h] else zero for p, fits, there in taps if fits[h]]
            if terms:
                total[(slice(None),) * (axis + 1) + (h,)] = pairwise(terms)
        gradient = total
    return gradient


def chosen_sums(gradient: Array, flat: Array, shape: Sequence[int], windows: Sequence[Windows]) -> Array:
    """Every element's sum, from +0, over the windows whose index it is, in the order of the taps."""
    here = np.arange(math.prod(shape[1:-1])).reshape((*shape[1:-1], 1))
    taps = [seen_by(w) for w in windows]
    total = np.zeros(shape, gradient.dtype)
    for place in places(windows):
        value, index, fits, there = gradient, flat, np.ones((), bool), np.ones((), bool)
        for axis, r in enumerate(place):
            p, fits_here, there_here = taps[axis][r]
            value, index = np.take(value, p, axis + 1), np.take(index, p, axis + 1)
            fits, there = fits[..., None] & fits_here, there[..., None] & there_here
        term = np.where(there[..., None] & (index == here), value, np.zeros_like(value))
        with np.errstate(invalid="ignore", over="ignore"):
            total = np.where(fits[..., None], total + term, total)
    return total


def unpool(
    y: Array,
    indices: Array,
    x_shape: Any,
    /,
    *,
    window: Any = 2,
    stride: Any = None,
    padding: lay.Padding = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    layout: str = "NHWC",
) -> Array:
    """x[indices[p]] = y[p] for the windows p in row-major order, a later one replacing an earlier one; else 0.

    indices: flat spatial positions (int32), or taps (unsigned). An index outside of its window is placed nowhere.
    """
    axes = lay.image_axes(layout)
    shape = axes.canonical_shape(x_shape.shape if hasattr(x_shape, "shape") else x_shape)
    windows = make_windows(shape[1:-1], window, stride, padding, dilation, ceil_mode)
    yc, flat = axes.to_canonical(y), as_positions(axes.to_canonical(indices), windows)
    x = np.zeros((shape[0], math.prod(shape[1:-1]), shape[-1]), y.dtype)
    n, c = np.ix_(np.arange(shape[0]), np.arange(shape[-1]))
    for place in itertools.product(*(range(len(w.at)) for w in windows)):
        inside = np.zeros((1,), np.int64)
        for w, p in zip(windows, place, strict=True):
            inside = (inside[:, None] * w.size + w.at[p][w.inside[p]]).reshape(-1)
        at, value = flat[:, *place], yc[:, *place]
        mine = np.isin(at, inside)
        at = np.where(mine, at, 0)
        x[n, at, c] = np.where(mine, value, x[n, at, c])
    return axes.from_canonical(x.reshape(shape))


def global_pool(
    x: Array, /, *, mode: str = "average", layout: str = "NHWC", p: float = 2.0, nan: str = "propagate", **options: Any
) -> Array:
    """Pooling with one window, all of the spatial axes."""
    sizes = lay.image_axes(layout).canonical_shape(x.shape)[1:-1]
    return pool(x, window=sizes, mode=mode, layout=layout, p=p, nan=nan, **options)


def adaptive_pool(
    x: Array,
    /,
    *,
    output_sizes: Any = 1,
    mode: str = "average",
    layout: str = "NHWC",
    p: float = 2.0,
    nan: str = "propagate",
    return_indices: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    prior: Array | None = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Any:
    """alpha * o + beta * prior, o[i] being the pooling of x[floor(i H / P)], ..., x[ceil((i + 1) H / P) - 1], i < P.

    return_indices: also the flat spatial positions of the maxima in x, int32.
    """
    axes = lay.image_axes(layout)
    xc = axes.to_canonical(x)
    sizes, outputs = xc.shape[1:-1], lay.per_axis(output_sizes, xc.ndim - 2)
    prior_c = None if prior is None or beta == 0 else axes.to_canonical(prior)
    shape = (xc.shape[0], *outputs, xc.shape[-1])
    dtype = finished(np.zeros(1), x.dtype, out_dtype, arithmetic == "golden").dtype
    y, indices = np.empty(shape, dtype), np.empty(shape, np.int32)
    for place in itertools.product(*map(range, outputs)):
        first = [i * size // count for i, size, count in zip(place, sizes, outputs, strict=True)]
        last = [-(-(i + 1) * size // count) for i, size, count in zip(place, sizes, outputs, strict=True)]
        part = xc[:, *(slice(low, high) for low, high in zip(first, last, strict=True))]
        here = (slice(None), *(slice(i, i + 1) for i in place))
        options = {"layout": "N" + "DHW"[3 - len(sizes) :] + "C", "p": p, "nan": nan, "alpha": alpha, "beta": beta}
        options |= {"prior": None if prior_c is None else prior_c[here], "out_dtype": out_dtype}
        found = global_pool(part, mode=mode, return_indices=mode == "max", arithmetic=arithmetic, **options)
        y[here] = found[0] if mode == "max" else found
        if mode == "max":
            within = np.unravel_index(found[1], part.shape[1:-1])
            moved = [low + at for low, at in zip(first, within, strict=True)]
            indices[here] = np.ravel_multi_index(moved, sizes)
    y = axes.from_canonical(y)
    return (y, axes.from_canonical(indices)) if return_indices else y
