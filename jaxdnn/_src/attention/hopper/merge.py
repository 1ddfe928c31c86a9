"""Merges parts of attention's rows on Hopper: threads of their own, in Pallas.

Schedule. Of the parts p of a group of 16, with largest scores m_p (times log2 e), sums l_p and weighted values O_p,

    M = max m_p    w_p = 2^(m_p - M)    L = w_0 l_0 + w_1 l_1 + ...    O = w_0 O_0 + w_1 O_1 + ...

from the first part on, in float32; then each group is joined to those before it, in the same way. At the end
y = O (1 / L), rounded once, and the logarithm is M ln 2 + ln L. A part of which nothing is seen has m = -inf and l = 0,
and changes no bit, so that a row's bits do not depend on how many there are behind the last key.

A thread has four features of a row, and loads those of 16 parts before it uses the first. With many parts a first
kernel merges each of the groups, so that the loop of the second one, which joins them, is short.
"""

import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.hopper import branches, lanes
from jaxdnn._src.hopper.lanes import THREADS
from jaxdnn._src.hopper.launch import kernel
from jaxdnn._src.hopper.sizes import ceil_div

F32 = jnp.float32
GROUP = 16
DIRECT = 2  # groups that one kernel merges and joins: more take a kernel for each step
VECTOR = 4  # features of a thread
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
LOWEST = -math.inf


@dataclasses.dataclass(frozen=True)
class Part:
    """Of each thread's row the largest score and the sum, (warps, lanes), and values (warps, lanes, features)."""

    m: Array
    total: Array
    values: Array


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of the parts (B, N, P, T, E), and of the result: heads of it, and whether they come before queries."""

    batch: int
    heads: int
    parts: int
    queries: int
    values: int
    packed: bool
    heads_first: bool

    @property
    def vectors(self) -> int:
        """Of a row."""
        return self.values // VECTOR

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.queries


def groups(parts: int) -> int:
    """How many groups a kernel of its own merges; 0 where one kernel does all."""
    return ceil_div(parts, GROUP) if parts > DIRECT * GROUP else 0


def merge(
    largest: Array, total: Array, values: Array, sinks: Array | None, *, packed: bool, heads_first: bool, dtype: Any
) -> tuple[Array, Array]:
    """y (rows, E) and the logarithms (rows,), rows in the order of the result.

    Args:
      largest, total, values: of the parts, (B, N, P, T) and (B, N, P, T, E).
      sinks: None, or (B or 1, heads) in float32.
      packed: whether the parts' rows are heads.
      heads_first: whether results have heads before queries.
      dtype: of y.
    """
    batch, heads, count, queries, features = values.shape
    shape = Shape(batch, heads, count, queries, features, packed, heads_first)
    branches.record("attention merge", groups=groups(shape.parts) > 0, sinks=sinks is not None, heads_first=heads_first)
    parts, size = (largest, total, values), GROUP
    if groups(shape.parts):
        parts, size = _groups(shape, *parts), 1
        shape = dataclasses.replace(shape, parts=parts[0].shape[2])
    given = () if sinks is None else (sinks.reshape(-1),)

    def body(number: Array, *refs: Any) -> None:
        *sources, y, lse = refs
        rest, column = lanes.divided(number, shape.vectors)
        head, row = lanes.divided(rest, shape.queries)

        def following(turn: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, ...]:
            found, parts = Part(*carry), _loaded(shape, sources, head, turn, row, column)
            for part in [_merged(parts)] if size > 1 else parts:
                found = _joined(found, part)
            return _fields(found)

        nothing = (lanes.one(LOWEST, F32), lanes.one(0.0, F32), lanes.full(0.0, VECTOR, F32))
        found = Part(*lax.fori_loop(0, ceil_div(shape.parts, GROUP), following, nothing))
        image, own = lanes.divided(head, shape.heads)
        if given:
            n, heads = (own * shape.queries + row, shape.heads * shape.queries) if packed else (own, shape.heads)
            place = n if given[0].size == heads else image * heads + n
            sink = lanes.product(lanes.entries(sources[3], place), lanes.one(LOG2_E, F32))
            found = _joined(found, Part(sink, lanes.one(1.0, F32), lanes.full(0.0, VECTOR, F32)))
        place = rest if packed or heads_first else (image * shape.queries + row) * shape.heads + own
        share = 1 / jnp.where(found.total == 0, 1.0, found.total)
        lanes.store(y, place * shape.vectors + column, (found.values * lanes.wide(share, VECTOR)).astype(dtype))
        ln_2 = lanes.one(LN_2, F32)
        log = lanes.product(_finite(found.m), ln_2) + lanes.product(lanes.log2(found.total), ln_2)
        lanes.store(lse, place, lanes.wide(log, 1), column == 0)

    vectors = jax.ShapeDtypeStruct((shape.rows * shape.vectors, VECTOR), dtype)
    logs = jax.ShapeDtypeStruct((shape.rows, 1), F32)
    y, lse = _launch(body, shape.rows * shape.vectors, (*_flat(*parts), *given), (vectors, logs), "merge")
    return y.reshape(shape.rows, shape.values), lse[:, 0]


def _groups(shape: Shape, largest: Array, total: Array, values: Array) -> tuple[Array, ...]:
    """Each group of parts as a part."""
    count_of_groups = groups(shape.parts)

    def body(number: Array, *refs: Any) -> None:
        *sources, largest, total, values = refs
        rest, column = lanes.divided(number, shape.vectors)
        rest, row = lanes.divided(rest, shape.queries)
        head, group = lanes.divided(rest, count_of_groups)
        found = _merged(_loaded(shape, sources, head, group, row, column))
        lanes.store(values, number, found.values)
        place, first = rest * shape.queries + row, column == 0
        lanes.store(largest, place, lanes.wide(found.m, 1), first)
        lanes.store(total, place, lanes.wide(found.total, 1), first)

    rows = (shape.batch, shape.heads, count_of_groups, shape.queries)
    count = math.prod(rows)
    of_rows = jax.ShapeDtypeStruct((count, 1), F32)
    outs = (of_rows, of_rows, jax.ShapeDtypeStruct((count * shape.vectors, VECTOR), F32))
    found = _launch(body, count * shape.vectors, _flat(largest, total, values), outs, "merge_groups")
    return found[0].reshape(rows), found[1].reshape(rows), found[2].reshape(*rows, shape.values)


def _flat(largest: Array, total: Array, values: Array) -> tuple[Array, ...]:
    return largest.reshape(-1), total.reshape(-1), values.reshape(-1, VECTOR)


def _launch(body: Any, count: int, arrays: Any, outs: Any, name: str) -> Any:
    """The results of a kernel in which `body` is given the number of each of `count` threads, and the arrays."""

    def run(*refs: Any) -> None:
        body(lax.min(lanes.numbers(lax.axis_index("block") * THREADS), jnp.int32(count - 1)), *refs)

    options = {"grid": (ceil_div(count, THREADS),), "grid_names": ("block",)}
    return kernel(run, out_type=tuple(outs), kernel_name=f"jaxdnn_attention_{name}", **options)(*arrays)


def _loaded(shape: Shape, sources: Any, head: Array, group: Any, row: Array, column: Array) -> list[Part]:
    """The parts of a group."""
    largest, total, values = sources[:3]
    rows, known = [], []
    for i in range(min(GROUP, shape.parts)):
        part = group * GROUP + i
        rows.append((head * shape.parts + lax.min(part, jnp.int32(shape.parts - 1))) * shape.queries + row)
        exists = lanes.one(0, jnp.int32) + part < shape.parts
        of_part = lambda ref, none, exists=exists: jnp.where(exists, lanes.entries(ref, rows[-1]), none)
        known.append((of_part(largest, LOWEST), of_part(total, 0.0)))
    return [
        Part(m, own, lanes.load(values, at * shape.vectors + column, own != 0))
        for at, (m, own) in zip(rows, known, strict=True)
    ]


def _merged(parts: list[Part]) -> Part:
    """The parts of a group as one."""
    m = ft.reduce(lax.max, (part.m for part in parts))
    low, sums, weighted = _finite(m), lanes.one(0.0, F32), lanes.full(0.0, VECTOR, F32)
    for part in parts:
        share = lanes.exp2(part.m - low)
        sums = sums + lanes.product(share, part.total)
        weighted = weighted + lanes.product(lanes.wide(share, VECTOR), part.values)
    return Part(m, sums, weighted)


def _joined(a: Part, b: Part) -> Part:
    m = lax.max(a.m, b.m)
    low = _finite(m)
    of_a, of_b = lanes.exp2(a.m - low), lanes.exp2(b.m - low)
    total = lanes.product(a.total, of_a) + lanes.product(b.total, of_b)
    of_a, of_b = (lanes.wide(x, VECTOR) for x in (of_a, of_b))
    return Part(m, total, lanes.product(a.values, of_a) + lanes.product(b.values, of_b))


def _finite(m: Array) -> Array:
    return jnp.where(m == LOWEST, 0.0, m)


def _fields(part: Part) -> tuple[Array, ...]:
    return part.m, part.total, part.values
