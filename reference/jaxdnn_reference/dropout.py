"""Dropout whose random bits are a function of a key and of an element's logical index.

Philox4x32-10 maps a counter of four 32-bit words and a key of two to four random words. Here the call's key is part of
the counter, and the generator's own key is 0. Element e of the count has word e mod 4 of the counter (e div 4, as two
words, the low one first; the two words of the key), and is kept if that word is at least rate 2^32, rounded to an
integer. e is the element's row-major index over the logical axes N, spatial, C, plus an offset, modulo 2^64.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import math
from typing import Any

import numpy as np

from jaxdnn_reference.activation import Activation, activate, derivative, parse, slope_in_float32
from jaxdnn_reference.rounding import FLOAT32, FLOAT64, round_to

Array = np.ndarray[Any, Any]

ROUNDS = 10
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)  # of the golden ratio and of sqrt(3) - 1
LOW = np.uint64(0xFFFFFFFF)


def philox(counter: Array, key: tuple[int, int] = (0, 0)) -> Array:
    """The four random words of every counter, [..., 4] to [..., 4]."""
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    k0, k1 = np.array(key, np.uint64)
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & LOW, (p0 >> 32) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return np.stack([c0, c1, c2, c3], -1).astype(np.uint32)


def random_words(key: Any, count: int, offset: int = 0) -> Array:
    """The random words of elements offset, offset + 1, ..., offset + count - 1, modulo 2^64."""
    first, last = offset // 4, (offset + count + 3) // 4
    block = (np.uint64(first) + np.arange(last - first, dtype=np.uint64)) % np.uint64(2**62)
    k0, k1 = (np.full_like(block, word) for word in words_of(key))
    words = philox(np.stack([block & LOW, block >> 32, k0, k1], -1)).reshape(-1)
    return words[offset - 4 * first :][:count]


def words_of(key: Any) -> Array:
    """A key as two words: of an integer the low one first."""
    if isinstance(key, int | np.integer):
        return np.array([int(key) & 0xFFFFFFFF, int(key) >> 32], np.uint64)
    return np.asarray(key)


def dropout_mask(
    key: Any, shape: tuple[int, ...], /, *, rate: float = 0.5, offset: int = 0, layout: Any = None
) -> Array:
    """Which elements of an array of this shape are kept."""
    order = canonical_order(layout, len(shape))
    words = random_words(key, math.prod(shape), offset).reshape([shape[axis] for axis in order])
    kept = words.astype(np.uint64) >= np.uint64(np.rint(rate * 2.0**32))
    return kept.transpose(np.argsort(order))


def dropout(
    x: Array,
    key: Any,
    /,
    *,
    rate: float = 0.5,
    offset: int = 0,
    layout: Any = None,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: Activation = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> Array:
    """residual + (act(x + bias) / (1 - rate) where kept, 0 elsewhere, whatever x is there).

    "golden": in float64, not rounded unless `out_dtype` is given. "ordered" states the bits: every operation rounded to
    float32, or for a float64 x to float64, and once to `out_dtype`, or else the type of x; but see `_scaled`.
    """
    exact = arithmetic == "golden"
    wide = FLOAT64 if exact or x.dtype == FLOAT64 else FLOAT32
    kept = dropout_mask(key, x.shape, rate=rate, offset=offset, layout=layout)
    with np.errstate(over="ignore", invalid="ignore"):
        z = x.astype(wide)
        if bias is not None:
            z = z + along(bias, x.shape, layout).astype(wide)
        scale = wide.type(0.0 if rate == 1 else 1 / (1 - rate))
        v = activate(z, activation) * scale if exact else _scaled(z, scale, activation, x.dtype)
        y = np.where(kept, v, wide.type(0))
        y = y if residual is None else residual.astype(wide) + y
    return y if exact and out_dtype is None else round_to(y, out_dtype or x.dtype)


def dropout_dgrad(
    dy: Array,
    x: Array,
    key: Any,
    /,
    *,
    rate: float = 0.5,
    offset: int = 0,
    layout: Any = None,
    bias: Array | None = None,
    activation: Activation = None,
    out_dtype: Any = None,
    arithmetic: str = "golden",
) -> tuple[Array, Array]:
    """The gradients of `dropout` in x and in the bias: dx = act'(x + bias) dy / (1 - rate) where kept, 0 elsewhere.

    The second is the sum of dx over the axes along which the bias is the same, in float64 of what dx is before its one
    conversion; without a bias over no axis. "ordered" states the bits of dx, in float32 but for a float64 x: the slope
    act'(x + bias) / (1 - rate), and its product with dy. Without an activation x is not read: NaN in it does not show.
    """
    wide = FLOAT64 if arithmetic == "golden" or x.dtype == FLOAT64 else FLOAT32
    kept = dropout_mask(key, x.shape, rate=rate, offset=offset, layout=layout)
    with np.errstate(over="ignore", invalid="ignore"):
        spread = np.zeros_like(x) if bias is None else along(bias, x.shape, layout)
        z = x.astype(wide) + spread.astype(wide) if parse(activation)[0] != "identity" else np.ones(x.shape, wide)
        scale = wide.type(0.0 if rate == 1 else 1 / (1 - rate))
        slope = derivative(z, activation) * scale if arithmetic == "golden" else _slope(z, scale, activation, x.dtype)
        v = np.where(kept, dy.astype(wide) * slope, wide.type(0))
        axes = tuple(a for a, (n, m) in enumerate(zip(spread.shape, x.shape, strict=True)) if n != m)
        total = v.sum(axes, keepdims=True, dtype=FLOAT64)
    return v if arithmetic == "golden" and out_dtype is None else round_to(v, out_dtype or x.dtype), total


def _scaled(z: Array, scale: Any, activation: Activation, dtype: Any) -> Array:
    """act(z) scale in the precision of z; for an x of bfloat16 or float16 activations that are not `piecewise` are
    exact but for two roundings, of z to the type of x, and of the result to float32."""
    if dtype.itemsize == 2 and not piecewise(activation):
        z = round_to(z, dtype).astype(FLOAT64)
        return round_to(np.float64(scale) * activate(z, activation), FLOAT32)
    return activate_in(z, activation) * scale


def _slope(z: Array, scale: Any, activation: Activation, dtype: Any) -> Array:
    """act'(z) scale likewise; see `slope_in_float32`."""
    if dtype.itemsize == 2 and not piecewise(activation):
        z = round_to(z, dtype).astype(FLOAT64)
        return slope_in_float32(np.float64(scale) * derivative(z, activation), dtype)
    return derivative(z, in_precision(activation, z.dtype)).astype(z.dtype) * scale


def piecewise(activation: Activation) -> bool:
    """Whether an activation is the identity, relu, leaky_relu or clipped_relu: comparisons and at most one product."""
    name, parameters = parse(activation)
    if name == "relu" and parameters:
        lower, upper, slope = parameters
        return lower == 0 and (slope == 0 or (upper == np.inf and 0 < slope <= 1))
    return name in ("identity", "relu", "leaky_relu", "clipped_relu")


def activate_in(z: Array, activation: Activation) -> Array:
    """act(z) in the precision of z, the activation's parameter too."""
    return activate(z, in_precision(activation, z.dtype)).astype(z.dtype)


def in_precision(activation: Activation, dtype: Any) -> Activation:
    """An activation with its parameters rounded to a type."""
    name, parameters = parse(activation)
    return (name, *(dtype.type(p) for p in parameters)) if parameters else name  # type: ignore[return-value]


def along(bias: Array, shape: tuple[int, ...], layout: Any) -> Array:
    """A bias with the rank of x: one element a channel, or as many dimensions as x has."""
    if bias.ndim == len(shape):
        return bias
    axes = (layout or "").partition("c")[0]
    channel = axes.index("C") if layout else len(shape) - 1
    inner = [len(axes)] if layout and "c" in layout else []
    return bias.reshape([shape[a] if a in (channel, *inner) else 1 for a in range(len(shape))])


def canonical_order(layout: Any, rank: int) -> list[int]:
    """The axes in the order N, spatial, C, channel vectors innermost; without a layout as they are."""
    if layout is None:
        return list(range(rank))
    axes = layout.partition("c")[0]
    return [axes.index(a) for a in "NDHWC" if a in axes] + ([len(axes)] if "c" in layout else [])
