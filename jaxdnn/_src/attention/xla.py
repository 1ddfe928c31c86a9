"""Attention's formulas for XLA: a block of queries at a time against the keys that it may see.

A block has all scores of its rows, so nothing is rescaled, and memory grows with the number of keys only: a limit holds
for the scores that exist at once. Where a window is known when a call is traced, a strip of queries takes the keys from
the first to the last one that any of them sees: of causal attention three eighths are not computed.

Engine `xla` leaves the order of sums to XLA; `ordered` has one that depends on a row alone (`arithmetic`).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.attention.arithmetic import ORDERED, PLAIN, Arithmetic
from jaxdnn._src.attention.blocks import Arrays, Block, Named, exponential
from jaxdnn._src.attention.spec import AttentionSpec, operands_of
from jaxdnn._src.attention.splits import by_splits
from jaxdnn._src.attention.walk import gradients, over_queries, results
from jaxdnn._src.core import engines, selection


def attention(spec: AttentionSpec, *operands: Array, k: Arithmetic = PLAIN[""]) -> tuple[Array, ...]:
    """y and lse."""
    v = Arrays(spec, dict(zip(operands_of("attention", spec), operands, strict=True)), k)

    def block(at: Block) -> tuple[Named, Named]:
        if spec.split is not None and at.high - at.low:
            return by_splits(v, at), {}
        x, seen = v.scores(at)
        m = jnp.max(x, -1, initial=-jnp.inf)
        found = {"maximum": m} if spec.maximum else {}
        if "sinks" in v.given:
            m = jnp.maximum(m, v.sinks)
        m = jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)
        e = k.exp(x - m[..., None])
        total = k.total(e, (-1,))[..., 0]
        if "sinks" in v.given:
            total = total + k.exp(v.sinks - m)
        y = v.over_keys(v.dropped(e, at), seen, v.columns("v", at))
        y = k.over(y, jnp.broadcast_to(jnp.where(total == 0, jnp.ones_like(total), total)[..., None], y.shape))
        return {"y": y, "lse": m + k.log(total), **found}, {}

    return results(v, over_queries(v, block))


def attention_tangent(spec: AttentionSpec, *operands: Array, k: Arithmetic = PLAIN[""]) -> tuple[Array, ...]:
    """dy and dlse."""
    count = len(spec.along)
    names = operands_of("attention_tangent", spec)
    v = Arrays(spec, dict(zip(names[count:], operands[count:], strict=True)), k)
    d = v.also(dict(zip(spec.along, operands[:count], strict=True)))

    def block(at: Block) -> tuple[Named, Named]:
        p, slope, seen = v.probabilities(at)
        dx = v.tangent_of_scores(d, at, slope)
        weighted = k.times(p, dx if seen is None else jnp.where(seen, dx, jnp.zeros_like(dx)))
        mean = k.total(weighted, (-1,))[..., 0]
        if "sinks" in spec.along:
            lse = v.rows("lse", at)
            mean = mean + k.times(exponential(k, v.sinks, lse), jnp.broadcast_to(d.sinks, lse.shape))
        y = v.rows("y", at)
        of_mean = k.times(y, jnp.broadcast_to(mean[..., None], y.shape))
        dy = v.over_keys(v.dropped(weighted, at), seen, v.columns("v", at)) - of_mean
        if "v" in spec.along:
            dy = dy + v.over_keys(v.dropped(p, at), seen, d.columns("v", at))
        return {"y": dy, "lse": mean}, {}

    return results(v, over_queries(v, block))


def attention_dgrad(spec: AttentionSpec, *operands: Array, k: Arithmetic = PLAIN[""]) -> tuple[Array, ...]:
    """The gradients of the operands in `along`."""
    names = operands_of("attention_dgrad", spec)
    v = Arrays(spec, dict(zip(names[2:], operands[2:], strict=True)), k)
    d = v.also(dict(zip(("y", "lse"), operands[:2], strict=True)))

    def block(at: Block) -> Named:
        p, slope, seen = v.probabilities(at)
        dy = d.rows("y", at)
        of_row = k.total(k.times(dy, v.rows("y", at)), (-1,))[..., 0] - d.rows("lse", at)
        dp = v.dropped(v.with_keys(dy, v.columns("v", at)), at)
        ds = k.times(p, dp - of_row[..., None])
        only_seen = lambda x: x if seen is None else jnp.where(seen, x, jnp.zeros_like(x))
        ds = only_seen(ds)
        found: Named = {}
        if "bias" in spec.along:
            found["bias"] = ds
        if "alibi_slopes" in spec.along:
            along = k.times(ds, jnp.broadcast_to(v.distance(at), ds.shape))
            along = along if k.rows is None else v.of_all_keys(along, at)
            found["alibi_slopes"] = k.total(along, (-2, -1))[..., 0, 0]
        if "sinks" in spec.along:
            if seen is not None:  # of a row that sees no key dy is not read
                sees = jnp.broadcast_to(jnp.any(seen, -1), of_row.shape)
                of_row = jnp.where(sees, of_row, -d.rows("lse", at))
            found["sinks"] = -k.total(k.times(exponential(k, v.sinks, v.rows("lse", at)), of_row), (-1,))[..., 0]
        found |= v.of_score(ds, seen, at)
        dx = k.times(ds if slope is None else only_seen(k.times(ds, slope)), spec.scale)
        if "q" in spec.along:
            found["q"] = v.over_keys(dx, seen, v.columns("k", at))
        if "k" in spec.along:
            found["k"] = v.over_rows(dx, seen, v.rows("q", at))
        if "v" in spec.along:
            found["v"] = v.over_rows(v.dropped(p, at), seen, dy)
        return found

    return gradients(v, block)


FORMULAS: dict[str, Callable[..., tuple[Array, ...]]] = {
    "attention": attention,
    "attention_tangent": attention_tangent,
    "attention_dgrad": attention_dgrad,
}


# ---- the engines -----------------------------------------------------------------------------------------------------


def _run(call: engines.Call, *operands: Array) -> Any:
    """Off GPUs narrow operands are multiplied in the accumulator's dtype: in that XLA's products on CPUs are faster."""
    return FORMULAS[call.op](call.spec, *operands, k=PLAIN.get(call.platform, PLAIN[""]))


def _accumulation(call: engines.Call) -> str:
    sizes = [v.dtype.itemsize for v in call.avals if jnp.issubdtype(v.dtype, jnp.floating)]
    return "float64" if max(sizes, default=4) == 8 else "float32"


def _accumulation_of_units(call: engines.Call) -> str:
    narrow = any(v.dtype.itemsize <= 2 for v in call.avals if jnp.issubdtype(v.dtype, jnp.floating))
    return "tensor_core" if call.platform == "cuda" and narrow else _accumulation(call)


engines.declare(
    "xla",
    *FORMULAS,
    run=_run,
    level=engines.level_of_products,
    accumulation=_accumulation_of_units,
    hazards=engines.flushes_on_cpus,
    partition=lambda call: True,
    notes=("blocks of queries against all keys that they may see; memory grows with the number of keys",),
)
engines.declare(
    "ordered",
    *FORMULAS,
    run=lambda call, *operands: FORMULAS[call.op](call.spec, *operands, k=ORDERED),
    supports=lambda call: "a function that the user wrote adds in no stated order" if call.spec.score else None,
    needs_sizes=lambda call: True,
    level=lambda call: "mesh_invariant",
    accumulation=_accumulation,
    hazards=engines.flushes_on_cpus,
    rank=lambda call: selection.LAST,
    partition=lambda call: True,
    adds_in_order=True,
    notes=("products of matrices term by term: slow",),
)
