"""What attention's forward kernel computes (problems), how it is cut into tiles (plans), and which tiles fit.

A block of threads computes 64 queries of a head at a time with each consumer warpgroup, and takes the keys in tiles of
128 (64 where features are many) from key 0 on, in ascending order, whatever the batch, the lengths and the mask. Tiles
that no query of the block sees are left out, which changes no bit. With splits, other blocks begin at each multiple of
their size, and what they find is merged (`merge`); the heads that share keys may then be the rows of one block.
"""

import dataclasses
import functools as ft
from typing import Any

from jaxdnn._src.hopper.sizes import SHARED_BYTES, aligned, ceil_div

ROWS = 64  # queries of a consumer warpgroup
BARRIER_BYTES = 8
# The most registers for accumulators and rounded weights, beside addresses and numbers, by the number of consumers.
REGISTERS = {1: 176, 2: 176, 3: 128}
TILES = (128, 64)
STAGES = (4, 3, 2)


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which bounds the keys of a query have besides their number; what is static of them.

    Attributes:
      left, right: the window's sides, None without a limit.
      lengths: whether sequences have lengths of their own.
      pairs: whether an array says of each pair of query and key whether it counts.
      segments: whether queries see the keys of their own segment.
    """

    left: int | None = None
    right: int | None = None
    lengths: bool = False
    pairs: bool = False
    segments: bool = False

    @property
    def bounded(self) -> bool:
        """Whether keys that exist may be unseen."""
        return self.left is not None or self.right is not None or self.lengths or self.listed

    @property
    def listed(self) -> bool:
        """Whether arrays say what is seen."""
        return self.pairs or self.segments


@dataclasses.dataclass(frozen=True)
class Spread:
    """An array (B or 1, N or 1, T or 1, S or 1) of one number for each pair: which axes it has, and its dtype."""

    axes: tuple[bool, bool, bool, bool]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is computed; every field is static.

    Attributes:
      batch, queries, keys, heads, shared: B, T, S, N, and the number of heads of keys.
      heads_first: whether arrays are (B, N, T, D), otherwise (B, T, N, D).
      scale, softcap: of the scores; softcap may be None.
      bottom_right: whether the window's diagonal ends at the last query and key.
      shift: by how much it is moved then, where there are no lengths.
      query_lengths, key_lengths, start: whether they are given.
      bias, mask: what is known of these arrays, or None.
      slopes, sinks: whether heads have slopes (ALiBi) and sinks.
      diagonal: whether slopes count from the window's diagonal.
      split: the keys of a part, or None: then results are whole rows, otherwise parts of rows.
      packed: whether the rows of a head of keys are the heads of one query.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    shared: int
    heads_first: bool
    scale: float
    softcap: float | None = None
    bottom_right: bool = False
    shift: int = 0
    query_lengths: bool = False
    key_lengths: bool = False
    start: bool = False
    bias: Spread | None = None
    mask: Spread | None = None
    slopes: bool = False
    sinks: bool = False
    diagonal: bool = False
    split: int | None = None
    packed: bool = False

    @property
    def parts(self) -> int:
        return 1 if self.split is None else ceil_div(self.keys, self.split)

    @property
    def q_heads_first(self) -> bool:
        """Whether q is (B, N, T, D) as the kernel takes it."""
        return self.heads_first or self.packed

    @property
    def plain(self) -> bool:
        """Whether scores are products of queries and keys times a factor, and no more."""
        return self.softcap is None and self.bias is None and not self.slopes


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles and buffers of a launch.

    Attributes:
      dtype: "bf16" or "f16".
      features, values: D and E, multiples of 8.
      mask: the bounds of visible keys.
      ragged: whether the number of keys is no multiple of a tile's.
      keys: of a tile.
      stages: tiles of keys, and of values, in shared memory.
      consumers: warpgroups of 64 queries each.
      partial: whether results are parts of rows, which go from registers to device memory.
    """

    dtype: str
    features: int
    values: int
    mask: Mask
    ragged: bool
    keys: int
    stages: int
    consumers: int = 2
    partial: bool = False

    @ft.cached_property
    def swizzle(self) -> int:
        """Bytes of a row of the boxes in which features lie: 128, or 64 where that leaves less of them unused."""
        wide = ceil_div(self.features, 64) + ceil_div(self.values, 64)
        narrow = ceil_div(self.features, 32) + ceil_div(self.values, 32)
        return 64 if narrow < 2 * wide else 128

    @property
    def chunk(self) -> int:
        """Features of a box."""
        return self.swizzle // 2

    @property
    def feature_chunks(self) -> int:
        return ceil_div(self.features, self.chunk)

    @property
    def value_chunks(self) -> int:
        return ceil_div(self.values, self.chunk)

    @property
    def wide_values(self) -> int:
        """Columns of the accumulator: whole boxes."""
        return self.value_chunks * self.chunk

    @property
    def block_rows(self) -> int:
        return ROWS * self.consumers

    @property
    def q_buffers(self) -> int:
        """Blocks of queries that a consumer has in shared memory: its next item's loads do not wait for its last's."""
        return 2 if self.consumers == 1 else 1

    @property
    def q_slots(self) -> int:
        return self.consumers * self.q_buffers

    @property
    def q_bytes(self) -> int:
        """Of one warpgroup's queries."""
        return self.feature_chunks * ROWS * self.swizzle

    @property
    def k_bytes(self) -> int:
        return self.feature_chunks * self.keys * self.swizzle

    @property
    def v_bytes(self) -> int:
        return self.value_chunks * self.keys * self.swizzle

    @property
    def out_bytes(self) -> int:
        """Of one warpgroup's results."""
        return 0 if self.partial else self.value_chunks * ROWS * self.swizzle

    @property
    def out_in_q(self) -> bool:
        """Whether results are staged where the queries were: where shared memory does not hold both."""
        return not self.fits(apart=True)

    @property
    def masked(self) -> bool:
        """Whether a tile may have keys that some query does not see."""
        return self.ragged or self.mask.bounded

    @property
    def registers(self) -> int:
        """Of a thread, for the accumulators of results and scores and the rounded weights."""
        return self.wide_values // 2 + self.keys // 2 + self.keys // 4

    @property
    def barriers(self) -> int:
        return 2 * self.q_slots + 4 * self.stages

    def barrier(self, name: str) -> int:
        """The byte of a kind's first barrier."""
        names = ("q_full", "q_empty", "k_full", "v_full", "k_empty", "v_empty")
        counts = (self.q_slots, self.q_slots, *[self.stages] * 4)
        return BARRIER_BYTES * sum(counts[: names.index(name)])

    def fits(self, *, apart: bool) -> bool:
        """Whether the buffers fit shared memory, with results apart from the queries or in their place."""
        if not apart and self.out_bytes > self.q_bytes:
            return False
        out = self.consumers * self.out_bytes if apart else 0
        ring = aligned(self.stages * self.k_bytes) + aligned(self.stages * self.v_bytes)
        return aligned(self.q_slots * self.q_bytes) + ring + aligned(out) + 2048 <= SHARED_BYTES


def plan(dtype: str, features: int, values: int, problem: Problem, mask: Mask) -> Plan | None:
    """The tiles of a problem; None if none fit."""
    for tile in TILES:
        ragged, partial = bool(problem.keys % tile), problem.split is not None
        cut = Plan(dtype, features, values, mask, ragged, tile, STAGES[0], partial=partial)
        consumers = _consumers(cut, problem)
        if cut.registers > REGISTERS[consumers]:
            continue
        plans = [dataclasses.replace(cut, stages=stages, consumers=consumers) for stages in STAGES]
        for apart in (True, False):
            if found := next((p for p in plans if p.fits(apart=apart)), None):
                return _with_parts(found, problem) if partial else found
    return None


def _with_parts(found: Plan, problem: Problem) -> Plan | None:
    """The plan for parts of rows: with one consumer where that has all queries. The tile stays, which decides bits."""
    if (problem.split or 0) % found.keys:
        return None
    if problem.queries > ROWS:
        return found
    return next(p for n in STAGES if (p := dataclasses.replace(found, stages=n, consumers=1)).fits(apart=True))


def _consumers(cut: Plan, problem: Problem) -> int:
    """Three, where the registers suffice and blocks of 192 queries leave hardly more rows unused than those of 128."""
    if cut.partial:
        return 2
    if cut.registers > REGISTERS[3] or cut.mask.listed or not problem.plain:
        return 2
    rows = [ceil_div(problem.queries, ROWS * n) * ROWS * n for n in (2, 3)]
    return 3 if rows[1] <= rows[0] + problem.queries // 8 else 2


def tiles_seen(row: int, problem: Problem, plan: Plan) -> int:
    """How many tiles of keys the block of queries from `row` on sees, without lengths and arrays that say so."""
    mask, shift = plan.mask, problem.shift
    low = 0 if mask.left is None else max(row + shift - mask.left, 0)
    high = problem.keys
    if mask.right is not None:
        high = max(min(row + plan.block_rows + shift + mask.right, high), 0)
    return max(0, ceil_div(high, plan.keys) - low // plan.keys) if high > low else 0


def decided(plan: Plan, problem: Problem) -> dict[str, Any]:
    """The branches of a plan, by keywords."""
    sides = {(False, False): "none", (False, True): "right", (True, False): "left", (True, True): "both"}
    spread = lambda array: "none" if array is None else "for a key" if not array.axes[2] else "for a pair"
    return {
        "operands": plan.dtype,
        "keys": plan.keys,
        "stages": plan.stages,
        "consumers": plan.consumers,
        "swizzle": plan.swizzle,
        "results_staged": "in queries" if plan.out_in_q else "apart",
        "window": sides[plan.mask.left is not None, plan.mask.right is not None],
        "lengths": plan.mask.lengths,
        "segments": plan.mask.segments,
        "tail_of_keys": plan.ragged,
        "tail_of_queries": bool(problem.queries % plan.block_rows),
        "shared_heads": problem.heads != problem.shared,
        "heads_first": problem.heads_first,
        "softcap": problem.softcap is not None,
        "bias": spread(problem.bias),
        "mask": spread(problem.mask),
        "slopes": problem.slopes,
        "sinks": problem.sinks,
        "split": problem.split is not None,
        "packed": problem.packed,
    }
