"""In which blocks the queries of a call are computed, and how what blocks give becomes results and gradients."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.attention.blocks import ROWS_OF_ANY, Arrays, Block, Named
from jaxdnn._src.core.rounding import nearest

STRIPS = 4  # of queries, each with a range of keys of its own
ROWS = 256  # the fewest of a strip


@dataclasses.dataclass(frozen=True)
class Run:
    """Blocks of as many rows each, one behind the other, with one range of keys."""

    first: int
    rows: Any
    count: Any
    low: int
    high: Any


def _strips(v: Arrays) -> list[tuple[int, Any, int, Any]]:
    """Of each strip the first query and the last, and the range of its keys."""
    spec, t, s = v.spec, v.t, v.s
    known = isinstance(t, int) and isinstance(s, int)
    moved = spec.bottom_right and {"query_lengths", "key_lengths"} & v.given.keys()
    everything = spec.left is None and spec.right is None
    if not known or moved or "start" in v.given or everything or not t:
        return [(0, t, 0, s)]
    rows = max(ROWS, -(-t // STRIPS))
    if v.k.rows is not None:  # blocks begin where they do without strips
        rows = -(-rows // v.k.rows) * v.k.rows
    shift = spec.shift if spec.bottom_right else 0
    found = []
    for first in range(0, t, rows):
        last = min(first + rows, t)
        # In order a row's sum is a tree from the first key on.
        whole = spec.left is None or v.k.rows is not None
        low = 0 if whole else min(max(first + shift - (spec.left or 0), 0), s)
        low = low // spec.split * spec.split if spec.split else low
        high = s if spec.right is None else max(min(last + shift + spec.right, s), low)
        found.append((first, last, low, high))
    return found


def _rows_of_block(v: Arrays, rows: int, keys: Any) -> int:
    """The rows of a block of so many rows and keys."""
    if v.k.rows is not None:
        return max(1, min(rows, v.k.rows))
    if not all(isinstance(n, int) for n in (*v.lead, keys)):
        return max(1, min(rows, ROWS_OF_ANY))
    return max(1, min(rows, v.k.scores // max(1, math.prod(v.lead) * v.n * keys)))


def _runs(v: Arrays) -> Iterator[Run]:
    for first, last, low, high in _strips(v):
        if not isinstance(last, int):
            yield Run(first, ROWS_OF_ANY, (last + v.filled) // ROWS_OF_ANY, low, high)
            continue
        many = _rows_of_block(v, last - first, high - low)
        whole = (last - first) // many
        # In order there are equal blocks and a rest; else few rows are one block.
        if whole > 1 or (whole and v.k.rows is not None):
            yield Run(first, many, whole, low, high)
            first += whole * many
        if first < last or not whole:
            yield Run(first, last - first, 1, low, high)


def over_queries(v: Arrays, block: Callable[[Block], tuple[Named, Named]]) -> Named:
    """What blocks give: of all queries, one behind the other, and sums over the queries, by name."""
    rows: dict[str, list[Array]] = {}
    sums: dict[str, Array] = {}
    axis = len(v.lead) + 1

    def of_all(terms: Named, run: Run) -> Named:
        """Terms of keys and values with 0 for those of other runs."""
        if (run.low, run.high) == (0, v.s):
            return terms
        pad = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(run.low, v.s - run.high), (0, 0)])
        return {name: pad(x) if name in ("k", "v") else x for name, x in terms.items()}

    for run in _runs(v):
        at = lambda first, run=run: block(Block(first, run.rows, run.low, run.high))
        if isinstance(run.count, int) and run.count == 1:
            of_rows, terms = jax.checkpoint(ft.partial(at, run.first))()
            terms = of_all(terms, run)
            sums |= {name: sums[name] + x if name in sums else x for name, x in terms.items()}
        elif v.k.rows is not None:  # in order blocks are added one by one, whatever the runs are
            of_rows, sums = _scanned(at, run, lambda terms, run=run: of_all(terms, run), sums, axis)
        else:
            of_rows, terms = _scanned(at, run, lambda terms: terms, {}, axis)
            terms = of_all(terms, run)
            sums |= {name: sums[name] + x if name in sums else x for name, x in terms.items()}
        for name, x in of_rows.items():
            rows.setdefault(name, []).append(x)
    joined = {name: jnp.concatenate(x, axis) if len(x) > 1 else x[0] for name, x in rows.items()}
    if not isinstance(v.filled, int):
        joined = {name: lax.slice_in_dim(x, 0, v.t, axis=axis) for name, x in joined.items()}
    return sums | joined


def _scanned(
    at: Callable[[Any], tuple[Named, Named]], run: Run, whole: Callable[[Named], Named], sums: Named, axis: int
) -> tuple[Named, Named]:
    """What the blocks of a run give, their terms added to sums."""
    checked = jax.checkpoint(at)

    def step(carry: Named, i: Array) -> tuple[Named, Named]:
        of_rows, terms = checked(i)
        return jax.tree.map(jnp.add, carry, whole(terms)), of_rows

    zeros = jax.eval_shape(lambda i: whole(checked(i)[1]), jnp.int32(0))
    start = {name: sums.get(name, jnp.zeros(x.shape, x.dtype)) for name, x in zeros.items()}
    firsts = run.first + run.rows * jnp.arange(run.count, dtype=jnp.int32)
    terms, found = lax.scan(step, start, firsts)
    return {name: _joined(x, axis) for name, x in found.items()}, sums | terms


def _joined(x: Array, axis: int) -> Array:
    """(blocks, ..., rows, ...) as (..., blocks rows, ...)."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def results(v: Arrays, found: Named) -> tuple[Array, ...]:
    """y and lse in the call's layout and dtypes, and the maximum if it is asked for."""
    y = found["y"] if v.spec.wide_y else nearest(found["y"], v.narrow)
    of_rows = [found[name] for name in ("lse", "maximum") if name in found]
    if v.spec.heads_first:
        return (y, *of_rows)
    return (jnp.swapaxes(y, -3, -2), *(jnp.swapaxes(x, -2, -1) for x in of_rows))


def gradients(v: Arrays, block: Callable[[Block], Named]) -> tuple[Array, ...]:
    """The gradients of the operands in `along`, from a block's: of its queries, and terms of the others'."""

    def parts(at: Block) -> tuple[Named, Named]:
        found = block(at)
        if "bias" in found:
            found["bias"] = _of_bias(v, found["bias"], at)
        by_rows = {n: x for n, x in found.items() if n == "q" or (n == "bias" and v.given[n].shape[-2] != 1)}
        return by_rows, {n: x for n, x in found.items() if n not in by_rows}

    found = over_queries(v, parts)
    return tuple(_as_given(v, name, found[name]) for name in v.spec.along)


def _of_bias(v: Arrays, ds: Array, at: Block) -> Array:
    """The part of bias's gradient in a block: sums over what it is broadcast along, and 0 for other keys."""
    shape = v.given["bias"].shape
    if shape[-1] == 1 and v.k.rows is None:
        return _added_like(v, ds, shape)
    return _added_like(v, v.of_all_keys(ds, at), shape)


def _added_like(v: Arrays, x: Array, shape: tuple[int, ...]) -> Array:
    """The sums over the axes along which an array of this shape is broadcast to x."""
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1)
    return v.k.total(x, axes) if axes else x


def _as_given(v: Arrays, name: str, x: Array) -> Array:
    """A gradient as its operand is, in shape, layout and dtype."""
    if name in ("alibi_slopes", "sinks") or name.startswith("score"):
        x = _added_like(v, x, v.given[name].shape)
    swapped = not v.spec.heads_first and name in ("q", "k", "v")
    x = jnp.swapaxes(x, -3, -2) if swapped else x
    return x if v.spec.wide else nearest(x, v.dtypes[name])
