"""Pooling of channels-last arrays on compute capability 9.0: which kernel serves a call, with which tile."""

import math
from typing import Any

from jax import Array

from jaxdnn._src.hopper import branches
from jaxdnn._src.pool.hopper import kernels, scatter
from jaxdnn._src.pool.hopper.scatter import Strip
from jaxdnn._src.pool.hopper.shape import Shape, Tile

# What was measured on an H200, in benchmarks/notes-pool.md:
SHARED_TAPS = 3  # from so many taps along both axes on, tiles and strips are faster
GATHERED_TAPS = 9  # up to so many taps max-pooling's gradient is faster in gather form, in float32
MOST_ROWS = 14  # of a strip, and also its most columns
MOST_SHARED = 110 << 10  # bytes of a block, for two of them on a multiprocessor
MANY_THREADS = 1 << 15  # about 250 for each multiprocessor


def _shares_much(k: Shape) -> bool:
    return k.slides(0) and k.slides(1) and min(k.taps) >= SHARED_TAPS


def forward_tile(k: Shape, *, average: bool = False) -> Tile:
    """The outputs of a thread: two of a column if their windows share rows and the inputs fit into registers."""
    if _shares_much(k):
        return _shared(k, k.out, 4, 1 if average and not k.wide else 2)
    shares = (k.taps[0] - 1) * k.dilation[0] >= k.stride[0]
    loads = (k.taps[0] + k.stride[0]) * k.taps[1]
    return Tile(2 if shares and loads <= 16 and k.out[0] > 1 else 1, 1, k.vectors)


def backward_tile(k: Shape, *, average: bool = False) -> Tile:
    """The cells of a thread."""
    if not _shares_much(k):
        return Tile(1, 1, k.vectors)
    return _shared(k, k.cells, 4, 2 if k.wide else 1) if average else _shared(k, k.cells, 2, 1)


def _shared(k: Shape, size: tuple[int, int], rows: int, columns: int) -> Tile:
    """The tile of an array of this size where windows share much.

    An average holds its inputs in float32. Inputs of 16 bits then take twice the registers, so a tile has one column.
    """
    vectors = next((v for v in (8, 4) if k.vectors % v == 0), k.vectors)
    return Tile(min(rows, size[0]), min(columns, size[1]), vectors)


def strip_of(k: Shape) -> Strip | None:
    """The strip of a thread for max-pooling's gradient; None where the gather form serves."""
    if not _shares_much(k) or (k.wide and math.prod(k.taps) <= GATHERED_TAPS):
        return None
    most = k.images * scatter.pairs(k) * max(math.prod(k.size), math.prod(k.out))
    # Offsets from a strip's first element are immediate operands of 32 bits.
    reach = 16 * k.vectors * max(k.size[1], k.out[1]) * (k.taps[0] + 4)
    if max(most, reach) >= 2**31:  # the kernel numbers pairs in 32 bits
        return None
    down, across = (-(-size // MOST_ROWS) for size in k.size)
    part = lambda axis, parts: -(-k.size[axis] // parts)
    while 4 * (strip := Strip(part(0, down), part(1, across))).floats(k) > MOST_SHARED:
        if strip.columns == 1:
            return None
        across += 1
    while strip.count(k) < MANY_THREADS and strip.rows > k.taps[0]:
        down += 1
        strip = Strip(part(0, down), strip.columns)
    return strip


def maximum(x: Array, k: Shape, *, indices: bool) -> Any:
    """y of x (n, h, w, c), and with indices the taps."""
    tile = forward_tile(k)
    _record("max and indices" if indices else "max", k, tile)
    return kernels.maximum(x, k, tile, indices=indices)


def average(x: Array, k: Shape, *, factor: float | None) -> Array:
    """y of x (n, h, w, c): sums times a factor."""
    tile = forward_tile(k, average=True)
    _record("average", k, tile)
    return kernels.average(x, k, tile, factor=factor)


def maximum_backward(dy: Array, taps: Array, k: Shape) -> Array:
    """dx of dy and taps (n, p, q, c)."""
    strip = strip_of(k)
    if strip is None:
        tile = backward_tile(k)
        _record("max backward", k, tile)
        return kernels.maximum_backward(dy, taps, k, tile)
    _record("max backward", k, strip)
    return scatter.maximum_backward(dy, taps, k, strip)


def average_backward(dy: Array, k: Shape, *, factor: float | None) -> Array:
    """dx of dy (n, p, q, c)."""
    tile = backward_tile(k, average=True)
    _record("average backward", k, tile)
    return kernels.average_backward(dy, k, tile, factor=factor)


def _record(which: str, k: Shape, shared: Tile | Strip) -> None:
    of_outputs = "a thread two outputs" if shared.rows > 1 else "a thread an output"
    kernel = "strips" if isinstance(shared, Strip) else "tiles" if _shares_much(k) else of_outputs
    branches.record("pool", operands=k.dtype, pass_=which, kernel=kernel, counts="several" if k.counted else "one")
