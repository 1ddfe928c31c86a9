"""The backward pass of attention on Hopper: its launches.

After that of rows one launch computes dQ, dK and dV. Its blocks of keys (`backward`) store dS in a workspace, and its
blocks of queries (`backward_dq`) read it; what each block is, and in which order, `backward_plan.Turns` says. A block
of queries waits until all blocks of keys have stored the head's dS. The workspace may hold dS of fewer heads than there
are: a block of keys whose head takes the place of another one waits until the blocks of queries have read that one's.
Blocks wait only for blocks of smaller numbers, and draw their numbers, so that every wait ends. Why it does, and what
orders the stores of dS before the loads, is said in `hopper.counters`.

The gradients of sinks, biases and slopes are XLA's sums, on trees of a fixed order: of D, and of dS in the workspace,
which then holds all heads'. Beside a cap dS is computed once more for them, without the cap's slope.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.attention.hopper import backward, backward_dq, backward_rows
from jaxdnn._src.attention.hopper.backward_plan import (
    CONSUMERS,
    TILE,
    Problem,
    Turns,
    choose,
    decided,
    heads_at_a_time,
    workspace_of_head,
)
from jaxdnn._src.core import trees
from jaxdnn._src.core.compat import pl, plgpu
from jaxdnn._src.core.rounding import product, rounded, steady
from jaxdnn._src.hopper import branches, counters
from jaxdnn._src.hopper.launch import kernel


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
    order = choose(p, whole=bool(summed))
    _record(p, order)
    rows = backward_rows.run(dy, y, dlse, lse, p)
    launched = lambda p: run(q, k, v, dy, rows, p, order, pairs=pairs, extents=extents)
    *found, ds = launched(p)
    if summed and p.softcap is not None:  # once more, for dS without the cap's slope
        *_, ds = launched(dataclasses.replace(p, slope=False))
    of_sinks = () if sinks is None else (_of_sinks(sinks, rows, lse, dlse, extents, p),)
    return (*found, *of_sinks, *(_summed(ds, spread, extents, p) for spread in summed))


def run(
    q: Array, k: Array, v: Array, dy: Array, rows: Array, problem: Problem, order: Turns, *,
    pairs: Sequence[Array] = (), extents: Array | None = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """dQ, dK, dV, and the workspace: dS of the last `order.held` heads of keys (`backward.Arrays`).

    extents: (sequences, 3), if the problem has lengths.
    """
    p = problem
    given = () if extents is None else (extents.reshape(-1),)
    of_keys = backward.ByRole if p.by_role else backward.ByKeys
    roles = (backward_dq.Block, backward_dq.scratch(p)), (of_keys, backward.scratch(p))

    def body(q: Any, k: Any, v: Any, dy: Any, rows: Any, *others: Any, number: Any) -> None:
        pairs, (extents, *_) = others[: len(p.pairs)], (*others[len(p.pairs) : -4], None)
        dq, dk, dv, ds = others[-4:]
        counted = counters.zeroed(counters_of(order.heads))
        arrays = backward.Arrays(q, k, v, dy, rows, pairs, extents, dq, dk, dv, ds, counted)
        is_keys, *_ = order.at(counters.draw(counted, number))
        place = lambda: order.at(counters.drawn(number))[1:]

        def follow(role: Any, scratch: dict[str, Any]) -> None:
            run = lambda **scratch: role(p, order, arrays, place, scratch).run()
            pl.run_scoped(run, collective_axes="wg", **scratch)

        lax.switch(lax.select(is_keys, 1, 0), [lambda role=role: follow(*role) for role in roles])

    compiled = kernel(
        body,
        out_type=(
            *(jax.ShapeDtypeStruct(x.shape, p.dtype) for x in (q, k, v)),
            jax.ShapeDtypeStruct((order.held * p.group, p.query_tiles, p.key_tiles, TILE, TILE), p.dtype),
        ),
        grid=(order.blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=dict(number=plgpu.SMEM((1,), jnp.int32)),
        kernel_name="jaxdnn_attention_gradient",
    )
    return compiled(q, k, v, dy, rows, *pairs, *given)


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
    """Bytes: dS of the heads that share the workspace, two numbers of each query, and counters.

    The launch that is made once more for sums beside a cap has also results that are not used.
    """
    p, heads = problem, problem.batch * problem.shared
    held = heads if summed else heads_at_a_time(p)
    rows = 8 * p.batch * p.heads * p.query_tiles * TILE
    of_queries, of_keys = p.queries * p.heads * p.features, p.keys * p.shared * (p.features + p.values)
    unused = 2 * p.batch * (of_queries + of_keys) if summed and p.softcap is not None else 0
    return held * workspace_of_head(p) + rows + 4 * counters_of(heads) + unused


def counters_of(heads: int) -> int:
    """The number of counters of a call with so many heads of keys: `backward.Arrays` says what they count."""
    return 1 + 2 * heads


def _record(p: Problem, order: Turns) -> None:
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
        **decided(order),
    )
