"""Pooling of channels-last arrays on compute capability 9.0: which kernel serves a call, and its launch. PTX text."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.launch import launch
from jaxdnn._src.pool.hopper import ptx, scatter_ptx, tile_ptx
from jaxdnn._src.pool.hopper.ptx import THREADS, Shape
from jaxdnn._src.pool.hopper.scatter_ptx import Strip
from jaxdnn._src.pool.hopper.tile_ptx import Tile

SHARED_TAPS = 3  # from so many taps along both axes on, tiles and strips are faster (benchmarks/notes-pool.md)
MOST_ROWS = 14  # of a strip, and also its most columns
MOST_SHARED = 110 << 10  # bytes of a block, for two of them on a multiprocessor
MANY_THREADS = 1 << 15  # about 250 for each multiprocessor


def forward_rows(k: Shape) -> int:
    """Outputs of a thread: two if their windows share rows and the inputs fit into registers."""
    shares = (k.taps[0] - 1) * k.dilation[0] >= k.stride[0]
    loads = (k.taps[0] + k.stride[0]) * k.taps[1]
    return 2 if shares and loads <= 16 and k.out[0] > 1 else 1


def _shares_much(k: Shape) -> bool:
    # Offsets from a tile's first element are immediate operands of 32 bits.
    reach = 16 * k.vectors * max(k.size[1], k.out[1]) * (k.taps[0] + 4)
    return k.stride == (1, 1) and k.dilation == (1, 1) and min(k.taps) >= SHARED_TAPS and reach < 2**31


def tile_of(k: Shape, size: tuple[int, int]) -> Tile | None:
    """The tile of a thread for an array of so many rows and columns; None if windows share little."""
    if not _shares_much(k):
        return None
    vectors = next((v for v in (8, 4) if k.vectors % v == 0), k.vectors)
    return Tile(rows=min(4, size[0]), columns=min(2, size[1]), vectors=vectors, threads=THREADS)


def strip_of(k: Shape) -> Strip | None:
    """The strip of a thread for max-pooling's gradient; None if windows share little or the sums do not fit."""
    most = k.images * scatter_ptx.pairs(k) * max(math.prod(k.size), math.prod(k.out))
    if not _shares_much(k) or most >= 2**31:  # the kernel numbers pairs in 32 bits
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
    shape = (k.images, *k.out, x.shape[-1])
    results = [jax.ShapeDtypeStruct(shape, x.dtype)] + [jax.ShapeDtypeStruct(shape, jnp.uint8)] * indices
    rows, tile = forward_rows(k), tile_of(k, k.out)
    if tile is None:
        code, grid = ptx.maximum(k, indices=indices, rows=rows), _blocks(k.forward_threads(rows))
    else:
        code, grid = tile_ptx.maximum(k, tile, indices=indices), _tiles(k, tile, k.out)
    _record("max and indices" if indices else "max", k, tile, rows)
    found = launch(code, [x], results, name="pool_max", **grid)
    return found if indices else found[0]


def average(x: Array, k: Shape, *, factor: float | None) -> Array:
    """y of x (n, h, w, c): sums times a factor."""
    result = jax.ShapeDtypeStruct((k.images, *k.out, x.shape[-1]), x.dtype)
    rows, tile = forward_rows(k), tile_of(k, k.out)
    if tile is None:
        code, grid = ptx.average(k, factor=factor, rows=rows), _blocks(k.forward_threads(rows))
    else:
        code, grid = tile_ptx.average(k, tile, factor=factor), _tiles(k, tile, k.out)
    _record("average", k, tile, rows)
    return launch(code, [x], [result], name="pool_average", **grid)[0]


def maximum_backward(dy: Array, taps: Array, k: Shape) -> Array:
    """dx of dy and taps (n, p, q, c)."""
    result = jax.ShapeDtypeStruct((k.images, *k.size, dy.shape[-1]), dy.dtype)
    strip = strip_of(k)
    if strip is None:
        code, grid = ptx.maximum_backward(k), _blocks(k.backward_threads())
    else:
        code = scatter_ptx.maximum_backward(k, strip)
        grid = {"blocks": -(-strip.count(k) // strip.threads), "threads": strip.threads, "floats": strip.floats(k)}
    _record("max backward", k, strip)
    return launch(code, [dy, taps], [result], name="pool_max_dgrad", **grid)[0]


def average_backward(dy: Array, k: Shape, *, factor: float | None) -> Array:
    """dx of dy (n, p, q, c)."""
    result = jax.ShapeDtypeStruct((k.images, *k.size, dy.shape[-1]), dy.dtype)
    tile = tile_of(k, k.size)
    if tile is None:
        code, grid = ptx.average_backward(k, factor=factor), _blocks(k.backward_threads())
    else:
        code, grid = tile_ptx.average_backward(k, tile, factor=factor), _tiles(k, tile, k.size)
    _record("average backward", k, tile)
    return launch(code, [dy], [result], name="pool_average_dgrad", **grid)[0]


def _blocks(threads: int) -> dict[str, int]:
    return {"blocks": -(-threads // THREADS), "threads": THREADS}


def _tiles(k: Shape, tile: Tile, size: tuple[int, int]) -> dict[str, int]:
    return {"blocks": -(-tile.count(k, size) // tile.threads), "threads": tile.threads}


def _record(which: str, k: Shape, shared: Tile | Strip | None, rows: int = 1) -> None:
    of_outputs = "a thread two outputs" if rows > 1 else "a thread an output"
    kernel = "strips" if isinstance(shared, Strip) else "tiles" if shared else of_outputs
    branches.record("pool", operands=k.dtype, pass_=which, kernel=kernel, counts="several" if k.counted else "one")
