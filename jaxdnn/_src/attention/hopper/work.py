"""Which block of threads computes which queries of attention, and which tiles of keys these see."""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.attention.hopper.plan import Plan, Problem, tiles_seen
from jaxdnn._src.hopper.sizes import ceil_div

FAR = 2**30  # a bound that no place reaches
CACHED = 32 << 20  # bytes of keys and values of the heads that blocks work on at a time, so that they stay in the cache
TABLE = 2**15  # the most items whose distribution among blocks is computed when a call is traced
OVERHEAD = 1  # tiles of keys that take as long as what an item has besides tiles


@dataclasses.dataclass(frozen=True)
class Item:
    """A block of queries of a head: where it is, its bounds, and its tiles of keys.

    Attributes:
      image, head, row: the sequence, the head, the first query.
      part: the number of the part of the keys.
      first, last: the tiles that some query of the block may see.
      whole_from, whole_to: those of them that all of its queries see whole.
      shift: what is added to a query's number to have its place on the diagonal.
      start: the number of a device's first query.
      row_end, key_end: the first query that sees nothing, and the first key that none sees.
    """

    image: Any
    head: Any
    row: Any
    part: Any
    first: Any
    whole_from: Any
    whole_to: Any
    last: Any
    shift: Any
    start: Any
    row_end: Any
    key_end: Any


# ---- the order of items


def count(problem: Problem, plan: Plan) -> int:
    return problem.batch * problem.heads * problem.parts * ceil_div(problem.queries, plan.block_rows)


def together(problem: Problem, plan: Plan) -> int:
    """How many heads are computed at a time: as many as have their keys and values in the cache, a divisor of all."""
    heads = problem.batch * problem.heads
    head = 2 * problem.keys * (plan.features + plan.values) * problem.shared // problem.heads
    most = max(1, CACHED // max(1, head))
    return max(n for n in range(1, min(heads, most) + 1) if heads % n == 0)


def placed(number: Any, problem: Problem, plan: Plan) -> tuple[Any, Any, Any]:
    """The block of queries, the part of the keys and the head (of all sequences) of an item.

    With a right bound the longest come first. Blocks of queries that read the same part follow each other.
    """
    tiles = ceil_div(problem.queries, plan.block_rows)
    if problem.split is not None:
        rest = lax.div(number, jnp.int32(tiles))
        parts = jnp.int32(problem.parts)
        return lax.rem(number, jnp.int32(tiles)), lax.rem(rest, parts), lax.div(rest, parts)
    whole = jnp.int32(0)
    if plan.mask.right is None:
        return lax.rem(number, jnp.int32(tiles)), whole, lax.div(number, jnp.int32(tiles))
    group = together(problem, plan)
    inner = lax.rem(number, jnp.int32(group * tiles))
    head = lax.div(number, jnp.int32(group * tiles)) * group + lax.rem(inner, jnp.int32(group))
    return tiles - 1 - lax.div(inner, jnp.int32(group)), whole, head


def shared_out(costs: Sequence[int], blocks: int) -> np.ndarray:
    """Of every block the items that it computes, in order: the next item goes to the block that is through first.

    In each row the number of a block's items, then these, then zeros.
    """
    taken: list[list[int]] = [[] for _ in range(blocks)]
    heap = [(0, block) for block in range(blocks)]
    for item, cost in enumerate(costs):
        until, block = heap[0]
        taken[block].append(item)
        heapq.heapreplace(heap, (until + cost, block))
    table = np.zeros((blocks, max(map(len, taken)) + 2), np.int32)
    for row, items in zip(table, taken, strict=True):
        row[0], row[1 : len(items) + 1] = len(items), items
    return table


def work_table(problem: Problem, plan: Plan, blocks: int) -> np.ndarray | None:
    """`shared_out` of a launch; None where all items take the same time, or are too many for it to matter."""
    alike = problem.split is not None or (plan.mask.left, plan.mask.right) == (None, None)
    if alike or count(problem, plan) > TABLE:
        return None
    tiles, heads = ceil_div(problem.queries, plan.block_rows), problem.batch * problem.heads
    costs = [OVERHEAD + tiles_seen(t * plan.block_rows, problem, plan) for t in range(tiles)]
    if plan.mask.right is None:
        return shared_out(costs * heads, blocks)
    group = together(problem, plan)
    return shared_out([cost for cost in reversed(costs) for _ in range(group)] * (heads // group), blocks)


# ---- where an item's queries and results are


def query_slot(plan: Plan, warpgroup: int, items: Any) -> tuple[Any, Any]:
    """The place in shared memory of a consumer's queries, and how often it was filled before; `items` before this."""
    buffers = jnp.int32(plan.q_buffers)
    return lax.rem(items, buffers) + warpgroup * buffers, lax.div(items, buffers)


def first_result(problem: Problem, image: Any, head: Any, part: Any) -> Any:
    """The number of the first row of a head among the logarithms, or of a part of it among the parts' sums."""
    heads, queries = problem.heads, problem.queries
    if problem.split is not None:
        return ((image * heads + head) * problem.parts + part) * queries
    return (image * heads + head) * queries if problem.heads_first else image * (queries * heads) + head


# ---- the tiles of an item


def bounded(problem: Problem, plan: Plan, given: Mapping[str, Any], image: Any, head: Any, row: Any, part: Any) -> Item:
    """An item's bounds and tiles. `given`: the lengths, places and `ranges` of tiles that the problem has."""
    mask, zero = plan.mask, jnp.int32(0)
    keys = given["key_lengths"][image] if problem.key_lengths else jnp.int32(problem.keys)
    start = given["start"][image, 2] if problem.start else zero
    whole = problem.keys - problem.shift  # the queries of all devices, with which `shift` was made
    shift, row_end = start, jnp.int32(FAR)
    if problem.query_lengths:
        length = given["query_lengths"][image]
        # Rows that do not exist bound nothing: only queries beyond a length see nothing.
        row_end = lax.select(length - start < problem.queries, length - start, jnp.int32(FAR))
    if problem.bottom_right:
        length = given["query_lengths"][image] if problem.query_lengths else jnp.int32(whole)
        shift = start + (keys - length)
    end = lax.min(lax.min(row + plan.block_rows, jnp.int32(problem.queries)), row_end)  # of the queries that see
    low_from = low_to = zero
    high_from = high_to = keys
    above, below = (zero, zero) if problem.packed else (row, end - 1)  # the first query and the last one
    if mask.right is not None:
        high_from = lax.max(lax.min(above + shift + (mask.right + 1), keys), zero)
        high_to = lax.max(lax.min(below + 1 + shift + mask.right, keys), zero)
    if mask.left is not None:
        low_from = lax.max(above + shift - mask.left, zero)
        low_to = lax.max(below + shift - mask.left, zero)
    tile = jnp.int32(plan.keys)
    some = (end > row) & (high_to > low_from)
    first, last = lax.div(low_from, tile), lax.div(high_to + (tile - 1), tile)
    whole_from, whole_to = lax.div(low_to + (tile - 1), tile), lax.div(high_from, tile)
    if problem.query_lengths:  # a block with queries beyond the length has no whole tile
        whole_to = lax.select(row + plan.block_rows <= row_end, whole_to, zero)
    if mask.listed:
        ranges, block = given["ranges"], lax.div(row, jnp.int32(plan.block_rows))
        own = [ranges[image, head if ranges.shape[1] > 1 else 0, block, i] for i in range(4)]
        first, last = lax.max(first, own[0]), lax.min(last, own[3])
        whole_from, whole_to = lax.max(whole_from, own[1]), lax.min(whole_to, own[2])
    if problem.split is not None:
        size = jnp.int32(problem.split // plan.keys)
        first, last = lax.max(first, part * size), lax.min(last, (part + 1) * size)
    last = lax.select(some & (last > first), last, first)
    return Item(image, head, row, part, first, whole_from, whole_to, last, shift, start, row_end, keys)


# ---- the tiles that arrays say are seen, computed by XLA


def ranges(problem: Problem, plan: Plan, given: Mapping[str, Array]) -> Array:
    """Of each block of queries the tiles that are seen, from and to, and the whole ones: (B, 1 or N, blocks, 4).

    In order: first, whole from, whole to, last.
    """
    blocks, tiles = ceil_div(problem.queries, plan.block_rows), ceil_div(problem.keys, plan.keys)
    some, whole = jnp.ones((1, 1, 1, 1), bool), jnp.ones((1, 1, 1, 1), bool)
    if plan.mask.pairs:
        of_tiles = lambda fill: _in_tiles(given["mask"], (plan.block_rows, plan.keys), fill)
        some, whole = some & jnp.any(of_tiles(False), (3, 5)), whole & jnp.all(of_tiles(True), (3, 5))
    if plan.mask.segments:
        q_least, q_most = (x[:, None, :, None] for x in _extremes(given["query_segments"], plan.block_rows))
        k_least, k_most = (x[:, None, None, :] for x in _extremes(given["key_segments"], plan.keys))
        some = some & (q_least <= k_most) & (k_least <= q_most)
        whole = whole & (q_least == q_most) & (k_least == k_most) & (q_least == k_least)
    heads = some.shape[1]
    some, whole = (jnp.broadcast_to(x, (problem.batch, heads, blocks, tiles)) for x in (some, whole))
    number = jnp.broadcast_to(jnp.arange(tiles, dtype=jnp.int32), some.shape)
    least = lambda seen: jnp.min(jnp.where(seen, number, jnp.int32(tiles)), -1)
    last = jnp.max(jnp.where(some, number + 1, jnp.int32(0)), -1)
    whole_from = least(whole)
    whole_to = least(~whole & (number >= whole_from[..., None]))
    return jnp.stack([least(some), whole_from, whole_to, last], -1)


def ranges_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of `ranges`, and of the tiles of which it is made."""
    if not plan.mask.listed:
        return 0
    heads = problem.heads if problem.mask and problem.mask.axes[1] else 1
    blocks, tiles = ceil_div(problem.queries, plan.block_rows), ceil_div(problem.keys, plan.keys)
    return problem.batch * heads * blocks * (2 * tiles + 16)


def _in_tiles(x: Array, sizes: tuple[int, int], fill: bool) -> Array:
    """(B, N, T, S) as (B, N, tiles, rows, tiles, keys); an axis of length 1 is one tile of one."""
    for axis, size in zip((2, 3), sizes, strict=True):
        if x.shape[axis] > 1:
            pads = [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)]
            x = jnp.pad(x, pads, constant_values=fill)
    cut = [(n // size, size) if n > 1 else (1, 1) for n, size in zip(x.shape[2:], sizes, strict=True)]
    return x.reshape(*x.shape[:2], *cut[0], *cut[1])


def _extremes(x: Array, size: int) -> tuple[Array, Array]:
    """The least and the largest of each tile of (B, T)."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), mode="edge").reshape(len(x), -1, size)
    return jnp.min(x, -1), jnp.max(x, -1)
