"""A row's sum over its keys in parts of a stated size, which are merged from the first one on.

What a part gives does not depend on how many there are, and one of which nothing is seen changes no bit: so a row has
the same bits whether its keys stand in a cache with capacity for more or end where it stands, and kernels may compute
the parts beside each other.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.attention.arithmetic import Arithmetic
from jaxdnn._src.attention.blocks import Arrays, Block, Named


@dataclasses.dataclass(frozen=True)
class Part:
    """The largest score of each row, and of the exponentials beside it the sum, without and with values."""

    m: Array
    total: Array
    y: Array


def by_splits(v: Arrays, at: Block) -> Named:
    """y and lse of a block of queries."""
    k, split = v.k, v.spec.split or 1
    x, seen = v.scores(at)
    shape, keys = x.shape, x.shape[-1]
    if isinstance(keys, int):  # one part is not filled up, which takes memory and adds zeros behind all terms
        split = min(split, keys)
    parts = -(-keys // split)
    seen = jnp.broadcast_to(True if seen is None else seen, shape)
    behind = jnp.arange(parts * split) < keys  # keys that fill the last part are not seen
    behind = behind.reshape(parts, *(1 for _ in shape[len(v.lead) : -1]), split)
    of_parts, seen = v.in_splits(x, -1, split), v.in_splits(seen, -1, split)
    of_parts = jnp.where(behind, of_parts, -jnp.inf)
    m = jnp.max(of_parts, -1)
    e = k.exp(of_parts - _finite(m)[..., None])
    total = k.total(e, (-1,))[..., 0]
    weights = e if v.spec.dropout is None else v.in_splits(v.dropped(_whole(e, shape, len(v.lead)), at), -1, split)
    y = v.over_splits(parts).over_keys(weights, seen, v.in_splits(v.columns("v", at), -2, split))
    axis = len(v.lead)
    merged = _merged(k, Part(*(jnp.moveaxis(a, axis, 0) for a in (m, total, y))))
    found = {"maximum": merged.m} if v.spec.maximum else {}
    if "sinks" in v.given:
        sink = jnp.broadcast_to(v.sinks, merged.m.shape)
        merged = _joined(k, merged, Part(sink, jnp.ones_like(sink), jnp.zeros_like(merged.y)))
    y = k.over(merged.y, jnp.broadcast_to(_positive(merged.total)[..., None], merged.y.shape))
    return {"y": y, "lse": _finite(merged.m) + k.log(merged.total), **found}


def _whole(e: Array, shape: tuple[int, ...], lead: int) -> Array:
    """The inverse of `Arrays.in_splits` of weights: their axis of splits back beside the keys."""
    e = jnp.moveaxis(e, lead, -2)
    return e.reshape(*e.shape[:-2], -1)[..., : shape[-1]]


def _merged(k: Arithmetic, parts: Part) -> Part:
    """The parts along the first axis, one after the other, behind one of which nothing is seen."""
    shape, dtype = parts.m.shape[1:], parts.m.dtype
    nothing = jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros(parts.y.shape[1:], dtype)

    def step(carry: tuple[Array, ...], part: tuple[Array, ...]) -> tuple[tuple[Array, ...], None]:
        found = _joined(k, Part(*carry), Part(*part))
        return (found.m, found.total, found.y), None

    return Part(*lax.scan(step, nothing, (parts.m, parts.total, parts.y))[0])


def _joined(k: Arithmetic, a: Part, b: Part) -> Part:
    """Both parts beside the larger of their largest scores; one of which nothing is seen changes nothing."""
    m = jnp.maximum(a.m, b.m)
    of_a, of_b = (k.exp(part.m - _finite(m)) for part in (a, b))
    added = lambda one, other, of_a, of_b: k.times(one, of_a) + k.times(other, of_b)
    wide = lambda x: jnp.broadcast_to(x[..., None], a.y.shape)
    total, y = added(a.total, b.total, of_a, of_b), added(a.y, b.y, wide(of_a), wide(of_b))
    kept = b.m == -jnp.inf
    return Part(m, jnp.where(kept, a.total, total), jnp.where(wide(kept), a.y, y))


def _finite(m: Array) -> Array:
    return jnp.where(m == -jnp.inf, jnp.zeros_like(m), m)


def _positive(total: Array) -> Array:
    return jnp.where(total == 0, jnp.ones_like(total), total)
