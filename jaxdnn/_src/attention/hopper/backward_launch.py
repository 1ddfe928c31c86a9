"""The backward pass of attention on Hopper: its launches, and how many heads share the workspace at a time.

The gradients of sinks, biases and slopes are XLA's sums, on trees of a fixed order: of D, and of dS in the workspace,
which then holds all heads'. Beside a cap dS is computed once more for them, without the cap's slope.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.attention.hopper import backward, backward_dq, backward_rows
from jaxdnn._src.attention.hopper.backward_plan import TILE, Problem, heads_at_a_time, workspace_of_head
from jaxdnn._src.core import trees
from jaxdnn._src.core.compat import pl
from jaxdnn._src.core.rounding import product, rounded, steady
from jaxdnn._src.hopper import branches


def gradients(
    dy: Array, dlse: Array, q: Array, k: Array, v: Array, y: Array, lse: Array, *, problem: Problem,
    extents: Array | None = None, pairs: Sequence[Array] = (), sinks: Array | None = None,
    summed: Sequence[Any] = (),
) -> tuple[Array, ...]:  # fmt: skip
    """dq, dk, dv; the gradient of sinks (sequences or 1, heads) if they are given; those in `summed`.

    Arrays have one leading axis. `extents`: of each sequence the queries, keys and shift of its window. `summed`: of
    "bias" and "alibi_slopes" how they are spread.
    """
    p = problem
    total = p.batch * p.shared
    heads = total if summed else heads_at_a_time(p)
    _record(p)
    rows = backward_rows.run(dy, y, dlse, lse, p)

    def part(first: int, count: int, refs: Any = None) -> tuple[Array, ...]:
        at = jnp.full((1,), first, jnp.int32)
        at = at if extents is None else jnp.concatenate([at, extents.reshape(-1)])
        dk, dv, ds = backward.run(at, q, k, v, dy, rows, p, heads=count, pairs=pairs, out=refs and refs[1:])
        dq = backward_dq.run(at, ds, k, q.shape, p, heads=count, out=refs and refs[0])
        if summed and p.softcap is not None:  # once more, for dS without the cap's slope
            flat = dataclasses.replace(p, slope=False)
            *_, ds = backward.run(at, q, k, v, dy, rows, flat, heads=count, pairs=pairs)
        return dq, dk, dv, *(_summed(ds, spread, extents, p) for spread in summed)

    of_sinks = () if sinks is None else (_of_sinks(sinks, rows, lse, dlse, extents, p),)
    found = part(0, heads)
    if heads == total:
        return (*found[:3], *of_sinks, *found[3:])

    def others(refs: Any) -> None:
        for first in range(heads, total, heads):
            part(first, min(heads, total - first), refs)

    return (*pl.run_state(others)(found), *of_sinks)


def _of_sinks(sinks: Array, rows: Array, lse: Array, dlse: Array, extents: Array | None, p: Problem) -> Array:
    """-Σ exp(s - L) D over queries, and over sequences if they have the sinks in common: a tree of a fixed order.

    Of a query that sees no key dy is not read: there D is -dL.
    """
    lse, dlse = (x if p.heads_first else jnp.swapaxes(x, 1, 2) for x in (lse, dlse))
    of_y = rows.reshape(p.batch, p.heads, 2, -1)[:, :, 1, : p.queries]
    of_y = jnp.where(_sees(extents, p)[:, None], of_y, -dlse)
    weights = steady(jnp.exp, sinks.astype(jnp.float32)[..., None] - lse)
    terms = trees.halves(rounded(product(weights, of_y)), (-1,))
    return -(trees.halves(terms, (0,)) if len(sinks) == 1 else terms)[..., 0]


def _summed(ds: Array, spread: Any, extents: Array | None, p: Problem) -> Array:
    """The gradient of a bias, or of slopes: dS, times j - i, added over what the operand is the same for."""
    shape = (p.batch, p.heads, p.query_tiles, p.key_tiles, TILE, TILE)
    ds = ds.reshape(shape).transpose(0, 1, 2, 5, 3, 4)
    ds = ds.reshape(p.batch, p.heads, p.query_tiles * TILE, p.key_tiles * TILE)[:, :, : p.queries, : p.keys]
    i = jnp.arange(p.queries, dtype=jnp.int32)[None, :, None]
    j = jnp.arange(p.keys, dtype=jnp.int32)[None, None]
    queries, keys, shift = (x[..., None] for x in jnp.split(_extents(extents, p), 3, -1))
    seen = (i < queries) & (j < keys)  # tiles that are not seen were not written
    if p.window.left is not None:
        seen &= j - i - shift >= -p.window.left
    if p.window.right is not None:
        seen &= j - i - shift <= p.window.right
    ds = jnp.where(seen[:, None], ds.astype(jnp.float32), jnp.zeros(ds.shape, jnp.float32))
    if spread.name == "alibi_slopes":
        ds = product(ds, jnp.broadcast_to((j - i)[:, None].astype(jnp.float32), ds.shape))
    axes = tuple(axis for axis, n in enumerate(spread.shape) if n != ds.shape[axis])
    return trees.halves(rounded(ds), axes) if axes else ds


def _extents(extents: Array | None, p: Problem) -> Array:
    """(sequences or 1, 3): queries, keys and shift."""
    return jnp.array([[p.queries, p.keys, p.window.shift]], jnp.int32) if extents is None else extents


def _sees(extents: Array | None, p: Problem) -> Array:
    """(sequences, queries): whether a query sees a key, by its place."""
    w, i = p.window, jnp.arange(p.queries, dtype=jnp.int32)[None]
    queries, keys, shift = jnp.split(_extents(extents, p), 3, -1)
    first = jnp.zeros_like(i) if w.left is None else jnp.maximum(i + shift - w.left, 0)
    last = keys - 1 if w.right is None else jnp.minimum(i + shift + w.right, keys - 1)
    return jnp.broadcast_to((i < queries) & (first <= last), (p.batch, p.queries))


def workspace(problem: Problem, *, summed: bool = False) -> int:
    """Bytes: dS of the heads that share the workspace, and two numbers of each query."""
    p = problem
    heads = p.batch * p.shared if summed else heads_at_a_time(p)
    return heads * workspace_of_head(p) + 8 * p.batch * p.heads * p.query_tiles * TILE


def _record(p: Problem) -> None:
    given = {spread.name for spread in p.pairs}
    sides = p.window.left is not None, p.window.right is not None
    branches.record(
        "attention gradient",
        operands=p.dtype.name,
        heads="first" if p.heads_first else "last",
        row_of_shared_memory=p.swizzle,
        warpgroups="by role" if p.by_role else "by keys",
        heads_of_a_group="one" if p.group == 1 else "several",
        window={(False, False): "none", (False, True): "right"}.get(sides, "left"),
        lengths=p.lengths,
        softcap=p.softcap is not None,
        segments="query_segments" in given,
        mask="mask" in given,
        slopes="alibi_slopes" in given,
        bias="bias" in given,
    )
