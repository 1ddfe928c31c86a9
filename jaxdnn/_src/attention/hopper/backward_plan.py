"""The backward pass on Hopper: what a call's sizes decide. Tiles, their ranges, the workspace.

Queries and keys are partitioned into tiles of 64. A block of keys, which computes dK and dV, has
`Problem.keys_of_block` keys, and a block of queries, which computes dQ, `Problem.queries_of_block` queries. Of the
other side's tiles a block meets a range, and those that it meets entirely, which need no mask, form a range within.
Positions are numbers or traced scalars.
"""

import dataclasses
from typing import Any

import numpy as np
from jax import lax

from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.sizes import MULTIPROCESSORS, SHARED_BYTES, ceil_div

TILE = 64  # queries or keys: the rows of a wgmma, and the columns of a tile of scores
CONSUMERS = 2
WIDE = 128  # features: of more of them a thread has not the registers for two accumulators
STAGED = 2  # buffers for dS of a warpgroup
BUDGET = 1 << 30  # bytes of the workspace: with less of it blocks of keys wait for those of queries
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
        """Keys of a block of keys."""
        return TILE if self.by_role else CONSUMERS * TILE

    @property
    def storing(self) -> int:
        """Warpgroups of a block of keys that store dS."""
        return 1 if self.by_role else CONSUMERS

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
        """Queries of a block of queries: two tiles for each warpgroup where the accumulators fit."""
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


@dataclasses.dataclass(frozen=True)
class Turns:
    """Which block of the launch does what.

    A turn has the blocks of keys of some heads of keys, or the blocks of queries of the heads of queries that share
    them. The turns of keys are in the order of heads, and each is followed by a turn of queries: that of the same
    heads, or of those before, whose dS is then as a rule in the workspace already. The workspace has places for `held`
    heads: head h takes the place of head h - held, whose blocks of queries have smaller numbers.

    Attributes:
      heads: of keys, of all sequences; held: of which the workspace holds dS at a time.
      group: heads of queries for each.
      keys, queries: blocks of a head.
      together: heads of keys of a turn.
      ahead: how many turns of keys come before the first one of queries: 1 or 2.
    """

    heads: int
    held: int
    group: int
    keys: int
    queries: int
    together: int
    ahead: int

    @property
    def blocks(self) -> int:
        return self.heads * (self.keys + self.group * self.queries)

    @property
    def reuses(self) -> bool:
        """Whether heads have places in the workspace in turn."""
        return self.held < self.heads

    def at(self, number: Any) -> tuple[Any, Any, Any]:
        """(whether it is a block of keys, its head, its place among the blocks of the head) of a block of the launch.

        Within a turn come the first blocks of all heads, then the second ones, and so on.
        """
        int32, late = np.int32, self.ahead - 1
        last = ceil_div(self.heads, self.together) - 1  # the number of the last turn, the only one with fewer heads
        of_keys, of_queries = self.together * self.keys, self.together * self.group * self.queries
        heads_of = lambda turn: lax.min(int32(self.together), int32(self.heads) - turn * int32(self.together))
        # After the turns ahead: pairs of a turn of keys and one of queries; the last pair is followed by what is left.
        after = lax.max(number - int32(late * of_keys), int32(0))
        pair = lax.min(lax.div(after, int32(of_keys + of_queries)), int32(last - late))
        within = after - pair * int32(of_keys + of_queries)
        own = heads_of(pair + int32(late)) * int32(self.keys)
        first = number < int32(late * of_keys)
        is_keys = first | (within < own)
        behind = lax.div(lax.max(within - own, int32(0)), int32(of_queries))
        turn = lax.select(is_keys, lax.select(first, int32(0), pair + int32(late)), pair + behind)
        rest = lax.select(first, number, lax.select(is_keys, within, within - own - behind * int32(of_queries)))
        size = heads_of(turn) * lax.select(is_keys, int32(1), int32(self.group))
        start = turn * int32(self.together) * lax.select(is_keys, int32(1), int32(self.group))
        return is_keys, start + lax.rem(rest, size), lax.div(rest, size)


def turns(p: Problem, held: int, most: int | None = None) -> Turns:
    """The order of the blocks of a call whose workspace holds dS of so many heads of keys.

    most: the most heads of a turn, if it is not to be chosen.
    """
    heads = p.batch * p.shared
    held = min(held, heads)
    width = p.features + p.values
    near = max(1, TOGETHER // (p.group * p.queries * width * 2))  # heads whose queries stay in the L2
    half = heads if held == heads else max(1, held // 2)  # so that a turn does not wait for the one that follows it
    together = min(near, max(1, MULTIPROCESSORS // p.key_blocks), half, most or heads)
    ahead = 2 if heads > together and (held == heads or held >= 2 * together) else 1
    return Turns(heads, held, p.group, p.key_blocks, ceil_div(p.queries, p.queries_of_block), together, ahead)


def choose(p: Problem, *, whole: bool) -> Turns:
    """The order of the blocks that runs. whole: whether dS of all heads has to be in the workspace at the end."""
    heads = p.batch * p.shared
    held = heads if whole else heads_at_a_time(p)
    if pick := branches.picker():
        fewer = [] if whole else sorted({1, 2, 3, ceil_div(held, 2)})
        orders = {turns(p, n, most) for n in (*fewer, held) if n <= held for most in (None, 1)}
        return pick(p, sorted(orders, key=str), lambda order: branches.named("attention gradient", **decided(order)))
    return turns(p, held)


def decided(order: Turns) -> dict[str, Any]:
    """The branches of an order of blocks."""
    return {"workspace": "of some heads" if order.reuses else "of all heads", "turns_ahead": order.ahead}


def registers(accumulators: int) -> tuple[int, int]:
    """Of a producer's thread and of a consumer's, with so many columns of accumulators; 504 for three warpgroups."""
    return (24, 240) if accumulators > 192 else (40, 232)


# ---- memory ----------------------------------------------------------------------------------------------------------


def tile_bytes(p: Problem, features: int) -> int:
    """Of a tile of rows with so many features in shared memory."""
    return p.chunks(features) * TILE * p.swizzle


def stages(p: Problem) -> int:
    """Slots of the ring of queries and gradients of a block of keys."""
    both = tile_bytes(p, p.features) + tile_bytes(p, p.values)
    # By role: P in float32 and a tile of dS in 16 bits; otherwise two of the latter for each warpgroup.
    others = 3 * TILE * TILE * 2 if p.by_role else CONSUMERS * STAGED * TILE * TILE * 2
    fixed = p.keys_of_block // TILE * both + others + 2 * 1024  # barriers, and a remainder
    return min(4, (SHARED_BYTES - fixed) // (both + 2 * TILE * 4))


def stages_dq(p: Problem) -> int:
    """Slots of the ring of dS and keys of a block of queries."""
    slot = tile_bytes(p, p.features) + p.queries_of_block // TILE * TILE * TILE * 2
    return min(5, (SHARED_BYTES - CONSUMERS * tile_bytes(p, p.features) - 2 * 1024) // slot)


def workspace_of_head(p: Problem) -> int:
    """Bytes of dS of a head of keys with its group."""
    return p.group * p.query_tiles * p.key_tiles * TILE * TILE * 2


def heads_at_a_time(p: Problem, budget: int = BUDGET) -> int:
    """Heads of keys whose dS the workspace holds at a time; the order of additions does not depend on it."""
    return max(1, min(p.batch * p.shared, budget // workspace_of_head(p)))
