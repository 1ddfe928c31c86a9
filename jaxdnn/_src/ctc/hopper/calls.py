"""CTC by kernels: what they are launched with, and what XLA computes around them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core.numbers import FARTHEST, ZERO, Number, exponential
from jaxdnn._src.core.rounding import quotient
from jaxdnn._src.ctc import xla
from jaxdnn._src.ctc.hopper import lattice_ptx, rows_ptx, shares_ptx
from jaxdnn._src.ctc.xla import Problem
from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.launch import launch
from jaxdnn._src.hopper.ptx import NAMES

NOWHERE = 2**30  # the exponent of a probability that is 0, beside which no share is


def loss(p: Problem, x: Array) -> Array:
    """(B,), of the scores as they were given, (B, T, V)."""
    emitted, known = _emissions(p, x)
    [last] = _lattice(p, emitted, both=False)
    return xla.loss_of(p, xla.probability_of(p, _states(last)), known)


def posterior(p: Problem, x: Array) -> tuple[Array, Array]:
    """(B,), and (B, T, L + 1): the share of paths that emit the blank, or a label, in a step."""
    (batch, steps, _), pairs = x.shape, p.labels.shape[1] + 1
    emitted, known = _emissions(p, x)
    last, forward, backward = _lattice(p, emitted, both=True)
    probability = xla.probability_of(p, _states(last))
    found = xla.loss_of(p, probability, known)
    possible, one = probability.e > ZERO, jnp.ones_like(probability.m)
    inverse = quotient(one, jnp.where(possible, probability.m, one))
    inverse = lax.bitcast_convert_type(jnp.where(jnp.isnan(found), jnp.full_like(found, jnp.nan), inverse), jnp.int32)
    exponent = jnp.where(possible, probability.e, NOWHERE)
    totals = jnp.stack([p.steps, inverse, exponent, jnp.zeros_like(exponent)], 1)
    branches.record("ctc shares", elements_of_a_lane=_some(-(-pairs // shares_ptx.LANES)))
    code, out = shares_ptx.shares(batch, steps, pairs - 1), jax.ShapeDtypeStruct((batch, steps, pairs), jnp.float32)
    blocks = shares_ptx.blocks(batch, steps)
    [shares] = launch(code, [forward, backward, totals], [out], name="ctc_shares", blocks=blocks)
    return found, shares


def dgrad(p: Problem, x: Array, ct: Array, shares: Array, loss: Array) -> Array:
    """(B, T, V): the gradient in the scores, in their dtype, times a sequence's cotangent."""
    plan = _rows(p, x)
    _record("gradient", plan)
    places, most = _places(p.labels, p.spec.blank)
    lengths = jnp.stack([p.steps, most], 1)
    arrays = [ct, *([x] if plan.softmax else []), shares, loss, lengths, places]
    return _of_rows(rows_ptx.gradient(plan), plan, arrays, [jax.ShapeDtypeStruct(x.shape, x.dtype)], "gradient")[0]


def _rows(p: Problem, x: Array) -> rows_ptx.Plan:
    batch, steps, classes = x.shape
    dtype, softmax = NAMES[np.dtype(x.dtype)], p.spec.normalize == "softmax"
    return rows_ptx.plan(batch, steps, classes, p.labels.shape[1], dtype, softmax)


def _of_rows(code: str, plan: rows_ptx.Plan, arrays: Sequence[Array], outs: Sequence[Any], name: str) -> Any:
    given: dict[str, Any] = {"blocks": plan.blocks, "threads": plan.threads, "floats": plan.floats}
    return launch(code, arrays, outs, name=f"ctc_{name}", **given)


def _emissions(p: Problem, x: Array) -> tuple[Array, Array]:
    """(B, T, 2, L + 1): w and the bits of n of the blank and of each label; (B,): whether all of them are known."""
    if p.spec.normalize == "softmax":
        plan = _rows(p, x)
        _record("emissions", plan)
        arrays = [x, p.symbols, jnp.stack([p.steps, p.count], 1)]
        shapes = (*x.shape[:2], 2, plan.pairs), x.shape[:2]
        outs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        found, largest = _of_rows(rows_ptx.emissions(plan), plan, arrays, outs, "emissions")
        return found, p.known & ~jnp.any(~jnp.isfinite(largest) & p.in_time, 1)
    scores = jnp.take_along_axis(p.x, p.symbols[:, None], 2, mode="promise_in_bounds")
    read = lax.broadcasted_iota(jnp.int32, scores.shape, 2) <= p.count[:, None, None]
    wrong = jnp.any(read & ~(scores <= FARTHEST), 2)
    w, n = exponential(scores)
    n = lax.bitcast_convert_type(jnp.where(w == 0, ZERO, n), jnp.float32)
    return jnp.stack([w, n], 2), p.known & ~jnp.any(wrong & p.in_time, 1)


def _lattice(p: Problem, emitted: Array, *, both: bool) -> Sequence[Array]:
    """The last states, and for `both` all of them."""
    batch, steps, _, pairs = emitted.shape
    plan = lattice_ptx.plan(steps, pairs - 1, both)
    branches.record(
        "ctc lattice",
        pass_="both" if both else "forward",
        pairs_of_a_lane=plan.each,
        warps=_some(plan.warps),
        idle_warps=plan.threads > lattice_ptx.LANES * plan.warps,
    )
    shapes = [(batch, pairs, 4), *([(batch, steps, pairs, 4)] * 2 if both else [])]
    outs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    arrays = [emitted, p.symbols, jnp.stack([p.steps, p.count], 1)]
    given: dict[str, Any] = {"threads": plan.threads, "floats": plan.floats, "blocks": batch * (1 + both)}
    return launch(lattice_ptx.lattice(plan), arrays, outs, name="ctc_lattice", **given)


def _some(count: int) -> str:
    return "one" if count == 1 else "several"


def _record(which: str, plan: rows_ptx.Plan) -> None:
    branches.record(
        "ctc rows",
        operands=plan.dtype,
        pass_=which,
        normalized=plan.softmax,
        threads_of_a_row=plan.group,
        read="once" if plan.kept else "again for each pass",
        tail=plan.classes % plan.group != 0,
    )


def _states(last: Array) -> Number:
    """The states (B, 2 (L + 1)) of pairs (B, L + 1, 4); the last one is that of no label."""
    m, e = last[..., ::2], lax.bitcast_convert_type(last[..., 1::2], jnp.int32)
    return Number(*(v.reshape(len(v), -1) for v in (m, e)))


def _places(labels: Array, blank: int) -> tuple[Array, Array]:
    """Of the blank and of each label what `rows_ptx.gradient` asks for, and the most labels that a class has."""
    one, other = labels[:, :, None], labels[:, None]
    same = one == other
    earlier = lax.broadcasted_iota(jnp.int32, same.shape, 1) < lax.broadcasted_iota(jnp.int32, same.shape, 2)
    count = lambda which: jnp.sum(which, 1, dtype=jnp.int32)
    before, left = count(same & earlier), count(same & ~earlier)
    place = 1 + count((one < other) | (same & earlier))
    of_labels = jnp.stack([place, labels, before, left], 2)
    of_blank = jnp.array([0, blank, 0, 1], jnp.int32)
    of_blank = jnp.broadcast_to(of_blank, (len(labels), 1, 4))
    return jnp.concatenate([of_blank, of_labels], 1), jnp.max(left, 1, initial=1)
