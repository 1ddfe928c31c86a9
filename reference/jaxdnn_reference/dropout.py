"""Dropout whose random bits are a function of a key and of an element's logical index.

Philox4x32-10 maps a counter of four 32-bit words and a key of two to four random words. Here the call's key is part of
the counter, and the generator's own key is 0. Element e of the count has word e mod 4 of the counter (e div 4, as two
words, the low one first; the two words of the key), and is kept if that word is at least rate 2^32, rounded to an
integer. e is the element's row-major index over the logical axes N, spatial, C, plus an offset.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import math
from typing import Any

import numpy as np

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
    """The random words of elements offset, offset + 1, ..., offset + count - 1."""
    first, last = offset // 4, (offset + count + 3) // 4
    block = (first + np.arange(last - first, dtype=np.uint64)).astype(np.uint64)
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
    x: Array, key: Any, /, *, rate: float = 0.5, offset: int = 0, layout: Any = None, arithmetic: str = "golden"
) -> Array:
    """x / (1 - rate) where kept, 0 elsewhere, whatever x is there.

    "golden": in float64. "ordered" states the bits: x times the nearest float32 to 1 / (1 - rate), in float32, rounded
    to the type of x; float64 in float64.
    """
    wide = FLOAT64 if arithmetic == "golden" or x.dtype == FLOAT64 else FLOAT32
    scale = wide.type(0.0 if rate == 1 else 1 / (1 - rate))
    kept = dropout_mask(key, x.shape, rate=rate, offset=offset, layout=layout)
    with np.errstate(over="ignore", invalid="ignore"):
        y = np.where(kept, x.astype(wide) * scale, wide.type(0))
    return y if arithmetic == "golden" else round_to(y, x.dtype)


def canonical_order(layout: Any, rank: int) -> list[int]:
    """The axes in the order N, spatial, C, channel vectors innermost; without a layout as they are."""
    if layout is None:
        return list(range(rank))
    axes = layout.partition("c")[0]
    return [axes.index(a) for a in "NDHWC" if a in axes] + ([len(axes)] if "c" in layout else [])
