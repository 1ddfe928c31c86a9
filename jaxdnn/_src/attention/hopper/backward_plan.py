"""The backward pass on Hopper: what a call's sizes decide. Tiles, their ranges, the workspace.

Queries and keys are partitioned into tiles of 64. A block of the kernel of dK and dV has `Problem.keys_of_block` keys,
and one of the kernel of dQ `Problem.queries_of_block` queries. Of the other side's tiles a block meets a range, and
those that it meets entirely, which need no mask, form a range within. Positions are numbers or traced scalars.
"""

import dataclasses
from typing import Any

import numpy as np
from jax import lax

from jaxdnn._src.hopper.sizes import SHARED_BYTES, ceil_div

TILE = 64  # queries or keys: the rows of a wgmma, and the columns of a tile of scores
CONSUMERS = 2
WIDE = 128  # features: of more of them a thread has not the registers for two accumulators
STAGED = 2  # buffers for dS of a warpgroup
BUDGET = 1 << 30  # bytes of the workspace: with less of it launches have too few blocks to share evenly
TOGETHER = 24 << 20  # bytes of queries and gradients that blocks should read at about the same time: half of the L2


@dataclasses.dataclass(frozen=True)
class Window:
    """Query i sees key j if -left <= j - i - shift <= right; a side that is None has no limit."""

    left: int | None
    right: int | None
    shift: int


@dataclasses.dataclass(frozen=True)
class Spread:
    """An operand along (sequences, heads, queries, keys), with length 1 where it is the same for all.

    The name is "bias", "mask" (bytes), "alibi_slopes", "query_segments" or "key_segments".
    """

    name: str
    shape: tuple[int, int, int, int]
    dtype: str

    def strides(self) -> tuple[int, ...]:
        """Bytes from one place to the next along each axis; 0 where there is one place."""
        size = {"float32": 4, "int32": 4, "uint8": 1}.get(self.dtype, 2)
        found = []
        for n in reversed(self.shape):
            found.append(size if n > 1 else 0)
            size *= n
        return tuple(reversed(found))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and static arguments: B sequences, N heads of queries, K of keys, D features of keys, E of values.

    Attributes:
      lengths: whether each sequence has an extent of its own, in memory.
      softcap: the limit of scores, or None; slope: whether dS is multiplied by its slope.
      pairs: the arrays that scores or what is seen depend on, with which no tile is computed without masks.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    shared: int
    features: int
    values: int
    dtype: Any
    heads_first: bool
    scale: float
    window: Window
    lengths: bool = False
    softcap: float | None = None
    pairs: tuple["Spread", ...] = ()
    slope: bool = True

    @property
    def group(self) -> int:
        """Heads of queries for each head of keys."""
        return self.heads // self.shared

    @property
    def chunk(self) -> int:
        """Features in a row of shared memory: as wide as the swizzle."""
        narrow = any(ceil_div(n, TILE // 2) % 2 for n in (self.features, self.values))
        return TILE // 2 if narrow else TILE

    def chunks(self, size: int) -> int:
        return ceil_div(size, self.chunk)

    @property
    def swizzle(self) -> int:
        return 2 * self.chunk

    @property
    def by_role(self) -> bool:
        """Whether one warpgroup computes dV and the other one dK, of the same keys, instead of both of 64 keys each."""
        return max(self.features, self.values) > WIDE

    @property
    def keys_of_block(self) -> int:
        """Keys of a block of the kernel of dK and dV."""
        return TILE if self.by_role else CONSUMERS * TILE

    @property
    def query_tiles(self) -> int:
        return ceil_div(self.queries, TILE)

    @property
    def key_blocks(self) -> int:
        return ceil_div(self.keys, self.keys_of_block)

    @property
    def key_tiles(self) -> int:
        """Tiles of keys of all blocks."""
        return self.key_blocks * self.keys_of_block // TILE

    @property
    def queries_of_block(self) -> int:
        """Queries of a block of the kernel of dQ: two tiles for each warpgroup where the accumulators fit."""
        return CONSUMERS * TILE * (2 if self.features <= WIDE else 1)


# ---- the ranges of tiles ---------------------------------------------------------------------------------------------

Range = tuple[Any, Any, Any, Any]  # low, high, full_low, full_high


@dataclasses.dataclass(frozen=True)
class Extent:
    """How many queries and keys a sequence has, and by how much its window is shifted; numbers or traced scalars."""

    queries: Any
    keys: Any
    shift: Any


def whole(p: Problem) -> Extent:
    """That of sequences without lengths."""
    return Extent(np.int32(p.queries), np.int32(p.keys), np.int32(p.window.shift))


def query_range(p: Problem, x: Extent, first: Any) -> Range:
    """Of the tiles of queries, the range of those that see some of a block's keys, and of those that see all."""
    w, size = p.window, p.keys_of_block
    found = _range(x.queries, x.keys, first, size, _moved(w.right, -x.shift, -1), _moved(w.left, -x.shift, 1))
    return (*found[:2], found[0], found[0]) if p.pairs else found


def key_range(p: Problem, x: Extent, first: Any) -> Range:
    """Of the tiles of keys, the range of those that some of a block's queries see, and of those that all see."""
    w, size = p.window, p.queries_of_block
    found = _range(x.keys, x.queries, first, size, _moved(w.left, x.shift, -1), _moved(w.right, x.shift, 1))
    return (*found[:2], found[0], found[0]) if p.pairs else found


def _moved(side: int | None, shift: Any, sign: int) -> Any:
    """How far from a position the last one is that it meets on one side."""
    return None if side is None else shift + np.int32(sign * side)


def _range(total: Any, own: Any, first: Any, size: int, below: Any, above: Any) -> Range:
    """Own positions from `first` on meet those of `total` others from `below` to `above` of themselves."""
    number, tile = np.int32, np.int32(TILE)
    clip = lambda n: lax.clamp(number(0), n, total)
    last = lax.max(lax.min(first + number(size), own) - number(1), first)
    start = full_start = number(0)
    stop = full_stop = total
    if below is not None:
        start, full_start = clip(first + below), clip(last + below)
    if above is not None:
        stop, full_stop = clip(last + above + number(1)), clip(first + above + number(1))
    low = lax.div(start, tile)
    high = lax.max(lax.div(stop + tile - number(1), tile), low)
    high = lax.select(first < own, high, low)
    full_low = lax.clamp(low, lax.div(full_start + tile - number(1), tile), high)
    full_high = lax.clamp(full_low, lax.div(full_stop, tile), high)
    return low, high, full_low, lax.select(first + number(size) <= own, full_high, full_low)


def tile_sees(p: Problem, x: Extent, first_query: Any, tile: Any) -> Any:
    """Whether any query of the tile from `first_query` on sees any key of a tile of keys."""
    w, number = p.window, np.int32
    first_key = tile * number(TILE)
    last_key = lax.min(first_key + number(TILE), x.keys) - number(1)
    last_query = lax.min(first_query + number(TILE), x.queries) - number(1)
    sees = first_query < x.queries
    if w.left is not None:
        sees &= last_key - first_query >= x.shift - number(w.left)
    if w.right is not None:
        sees &= first_key - last_query <= x.shift + number(w.right)
    return sees


def nth_partial(n: Any, low: Any, full_low: Any, full_high: Any) -> Any:
    """The n-th tile of a range that is not met entirely, in ascending order."""
    before = full_low - low
    return lax.select(n < before, low + n, full_high + (n - before))


# ---- the order of blocks ---------------------------------------------------------------------------------------------


def heads_together(rows: int, width: int, together: int, heads: int) -> int:
    """How many heads' blocks stand side by side, so that what they read at the same time stays in the L2."""
    return min(heads, max(1, together // max(1, rows * width * 2)))


def place(block: Any, heads: int, blocks: int, together: int) -> tuple[Any, Any]:
    """(head, block of the head) of a block: groups of heads in turn, and of a group the first block of each first."""
    per = together * blocks
    group, rest = lax.div(block, np.int32(per)), lax.rem(block, np.int32(per))
    size = lax.min(np.int32(together), heads - group * together)
    return group * together + lax.rem(rest, size), lax.div(rest, size)


def registers(accumulators: int) -> tuple[int, int]:
    """Of a producer's thread and of a consumer's, with so many columns of accumulators; 504 for three warpgroups."""
    return (24, 240) if accumulators > 192 else (40, 232)


# ---- memory ----------------------------------------------------------------------------------------------------------


def tile_bytes(p: Problem, features: int) -> int:
    """Of a tile of rows with so many features in shared memory."""
    return p.chunks(features) * TILE * p.swizzle


def stages(p: Problem) -> int:
    """Slots of the ring of queries and gradients of the kernel of dK and dV."""
    both = tile_bytes(p, p.features) + tile_bytes(p, p.values)
    # By role: P in float32 and a tile of dS in 16 bits; otherwise two of the latter for each warpgroup.
    others = 3 * TILE * TILE * 2 if p.by_role else CONSUMERS * STAGED * TILE * TILE * 2
    fixed = p.keys_of_block // TILE * both + others + 2 * 1024  # barriers, and a remainder
    return min(4, (SHARED_BYTES - fixed) // (both + 2 * TILE * 4))


def stages_dq(p: Problem) -> int:
    """Slots of the ring of dS and keys of the kernel of dQ."""
    slot = tile_bytes(p, p.features) + p.queries_of_block // TILE * TILE * TILE * 2
    return min(5, (SHARED_BYTES - CONSUMERS * tile_bytes(p, p.features) - 2 * 1024) // slot)


def workspace_of_head(p: Problem) -> int:
    """Bytes of dS of a head of keys with its group."""
    return p.group * p.query_tiles * p.key_tiles * TILE * TILE * 2


def heads_at_a_time(p: Problem, budget: int = BUDGET) -> int:
    """Heads of keys whose dS the workspace holds at a time; the order of additions does not depend on it."""
    return max(1, min(p.batch * p.shared, budget // workspace_of_head(p)))
