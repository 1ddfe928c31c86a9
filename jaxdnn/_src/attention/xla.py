"""Attention's formulas for XLA: a block of queries at a time against the keys that it may see.

A block has all scores of its rows, so nothing is rescaled, and memory grows with the number of keys only: a limit holds
for the scores that exist at once. Where a window is known when a call is traced, a strip of queries takes the keys from
the first to the last one that any of them sees: of causal attention three eighths are not computed.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.attention.blocks import Arrays, Block, Named, exponential
from jaxdnn._src.attention.spec import AttentionSpec, operands_of
from jaxdnn._src.core import engines


def attention(spec: AttentionSpec, *operands: Array, on: str = "") -> tuple[Array, ...]:
    """y and lse."""
    v = Arrays(spec, dict(zip(operands_of("attention", spec), operands, strict=True)), on)

    def block(at: Block) -> tuple[Named, Named]:
        x, seen = v.scores(at)
        m = jnp.max(x, -1, initial=-jnp.inf)
        if "sinks" in v.given:
            m = jnp.maximum(m, v.sinks)
        m = jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)
        e = jnp.exp(x - m[..., None])
        total = jnp.sum(e, -1)
        if "sinks" in v.given:
            total = total + jnp.exp(v.sinks - m)
        y = v.over_keys(e, seen, v.columns("v", at))
        y = y / jnp.where(total == 0, jnp.ones_like(total), total)[..., None]
        return {"y": y, "lse": m + jnp.log(total)}, {}

    return v.results(v.over_queries(block))


def attention_tangent(spec: AttentionSpec, *operands: Array, on: str = "") -> tuple[Array, ...]:
    """dy and dlse."""
    count = len(spec.along)
    names = operands_of("attention_tangent", spec)
    v = Arrays(spec, dict(zip(names[count:], operands[count:], strict=True)), on)
    d = v.also(dict(zip(spec.along, operands[:count], strict=True)))

    def block(at: Block) -> tuple[Named, Named]:
        p, slope, seen = v.probabilities(at)
        dx = v.tangent_of_scores(d, at, slope)
        weighted = p * (dx if seen is None else jnp.where(seen, dx, jnp.zeros_like(dx)))
        mean = jnp.sum(weighted, -1)
        if "sinks" in spec.along:
            mean = mean + exponential(v.sinks, v.rows("lse", at)) * d.sinks
        dy = v.over_keys(weighted, seen, v.columns("v", at)) - mean[..., None] * v.rows("y", at)
        if "v" in spec.along:
            dy = dy + v.over_keys(p, seen, d.columns("v", at))
        return {"y": dy, "lse": mean}, {}

    return v.results(v.over_queries(block))


def attention_dgrad(spec: AttentionSpec, *operands: Array, on: str = "") -> tuple[Array, ...]:
    """The gradients of the operands in `along`."""
    names = operands_of("attention_dgrad", spec)
    v = Arrays(spec, dict(zip(names[2:], operands[2:], strict=True)), on)
    d = v.also(dict(zip(("y", "lse"), operands[:2], strict=True)))

    def block(at: Block) -> Named:
        p, slope, seen = v.probabilities(at)
        dy = d.rows("y", at)
        of_row = jnp.sum(dy * v.rows("y", at), -1) - d.rows("lse", at)
        dp = v.with_keys(dy, v.columns("v", at))
        ds = p * (dp - of_row[..., None])
        ds = ds if seen is None else jnp.where(seen, ds, jnp.zeros_like(ds))
        found: Named = {}
        if "bias" in spec.along:
            found["bias"] = ds
        if "alibi_slopes" in spec.along:
            found["alibi_slopes"] = jnp.sum(ds * v.distance(at), (-2, -1))
        if "sinks" in spec.along:
            found["sinks"] = -jnp.sum(exponential(v.sinks, v.rows("lse", at)) * of_row, -1)
        dx = ds * spec.scale if slope is None else ds * slope * spec.scale
        if "q" in spec.along:
            found["q"] = v.over_keys(dx, seen, v.columns("k", at))
        if "k" in spec.along:
            found["k"] = v.over_rows(dx, seen, v.rows("q", at))
        if "v" in spec.along:
            found["v"] = v.over_rows(p, seen, dy)
        return found

    return v.gradients(block)


FORMULAS: dict[str, Callable[..., tuple[Array, ...]]] = {
    "attention": attention,
    "attention_tangent": attention_tangent,
    "attention_dgrad": attention_dgrad,
}


# ---- the engine ------------------------------------------------------------------------------------------------------


def _run(call: engines.Call, *operands: Array) -> Any:
    """Off GPUs narrow operands are multiplied in the accumulator's dtype: in that XLA's products on CPUs are faster."""
    return FORMULAS[call.op](call.spec, *operands, on=call.platform)


def _accumulation(call: engines.Call) -> str:
    sizes = [v.dtype.itemsize for v in call.avals if jnp.issubdtype(v.dtype, jnp.floating)]
    if call.platform == "cuda" and min(sizes, default=4) <= 2:
        return "tensor_core"
    return "float64" if max(sizes, default=4) == 8 else "float32"


engines.declare(
    "xla",
    *FORMULAS,
    run=_run,
    level=engines.level_of_products,
    accumulation=_accumulation,
    hazards=engines.flushes_on_cpus,
    partition=lambda call: True,
    notes=("blocks of queries against all keys that they may see; memory grows with the number of keys",),
)
