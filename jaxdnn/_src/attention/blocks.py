"""The operands of a call of attention, and what a block of queries takes of them: scores, products, gradients' terms.

What is not seen is multiplied by 0, and 0 times NaN is NaN. So where an operand of such a product is not finite, the
product is computed with its finite elements, and the others are counted in a product of their own (`_seen_product`).
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.attention.arithmetic import Arithmetic, dot
from jaxdnn._src.attention.spec import AttentionSpec
from jaxdnn._src.core import blending, primitives
from jaxdnn._src.dropout import primitive as dropout
from jaxdnn._src.dropout.primitive import DropoutSpec

ROWS_OF_ANY = 64  # of a block, where the number of queries, keys or sequences is not known

Values = Mapping[str, Any]
Named = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of queries: the first one, which may be traced, how many, and the range of their keys."""

    first: Any
    rows: Any
    low: int
    high: Any


def exponential(k: Arithmetic, x: Array, lse: Array) -> Array:
    """exp(x - lse), of a row that saw nothing exp(x)."""
    return k.exp(x - jnp.where(lse == -jnp.inf, jnp.zeros_like(lse), lse))


class Arrays:
    """The operands of a call with heads first, (..., heads, rows, features), and in the dtype that is computed in.

    Features and weights are multiplied in `dtype`: the accumulator's, or the narrow one of the call.
    """

    def __init__(self, spec: AttentionSpec, given: Values, k: Arithmetic) -> None:
        q = given["q"]
        self.spec, self.narrow, self.wide = spec, q.dtype, blending.accumulator(q.dtype)
        self.k, self.dtype = k, self.narrow if k.narrow else self.wide
        self.dtypes = {name: value.dtype for name, value in given.items()}
        self.t = q.shape[spec.axes("q").index("t") - 3]
        self.filled = 0 if isinstance(self.t, int) else -(-self.t // ROWS_OF_ANY) * ROWS_OF_ANY - self.t
        self.given = {name: self._heads_first(name, value) for name, value in given.items()}
        self.lead, self.n = self.given["q"].shape[:-3], self.given["q"].shape[-3]
        self.h, self.s = self.given["k"].shape[-3:-1]

    def also(self, given: Values) -> "Arrays":
        """Tangents or cotangents of the same operands."""
        other = object.__new__(Arrays)
        other.__dict__.update(self.__dict__)
        other.given = {name: self._heads_first(name, value) for name, value in given.items()}
        return other

    def _heads_first(self, name: str, x: Array) -> Array:
        swapped = not self.spec.heads_first and name in ("q", "k", "v", "y", "lse")
        if name.startswith("score"):
            return x
        if swapped:
            x = jnp.swapaxes(x, -3, -2) if name != "lse" else jnp.swapaxes(x, -2, -1)
        x = self._filled(name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(self.dtype if name in ("q", "k", "v") else self.wide)

    def _filled(self, name: str, x: Array) -> Array:
        """An operand whose rows are those of whole blocks, where their number is not known."""
        axis = {"lse": -1, "query_segments": -1, "q": -2, "y": -2, "bias": -2, "mask": -2}.get(name)
        if isinstance(self.filled, int) or axis is None or x.shape[axis] == 1:
            return x
        padding: list[Any] = [(0, 0)] * x.ndim
        padding[axis] = (0, self.filled)
        return jnp.pad(x, padding)

    # -- parts of a block --

    @property
    def sinks(self) -> Array:
        return self.given["sinks"][..., None]

    def rows(self, name: str, at: Block) -> Array:
        """The queries' part of an operand; its last axis but one, or of lse the last one, are queries."""
        x = self.given[name]
        return _cut(x, at.first, at.rows, x.ndim - (1 if name in ("lse", "query_segments") else 2))

    def columns(self, name: str, at: Block) -> Array:
        """The keys' part of keys, values and segments."""
        x = self.given[name]
        return lax.slice_in_dim(x, at.low, at.high, axis=x.ndim - (1 if name == "key_segments" else 2))

    def _tile(self, name: str, at: Block) -> Array:
        """The part of bias or mask, which may have length 1 along any axis."""
        x = self.given[name]
        x = x if x.shape[-2] == 1 else _cut(x, at.first, at.rows, x.ndim - 2)
        return x if x.shape[-1] == 1 else lax.slice_in_dim(x, at.low, at.high, axis=x.ndim - 1)

    def _queries(self, at: Block) -> Array:
        """(..., 1, rows, 1): the places of queries."""
        i = (at.first + jnp.arange(at.rows, dtype=jnp.int32)).reshape(*(1 for _ in self.lead), 1, at.rows, 1)
        return i + self.given["start"][..., 2][..., None, None, None] if "start" in self.given else i

    def _keys(self, at: Block) -> Array:
        """(..., 1, 1, keys): the places of keys."""
        j = at.low + jnp.arange(at.high - at.low, dtype=jnp.int32)
        return j.reshape(*(1 for _ in self.lead), 1, 1, at.high - at.low)

    def distance(self, at: Block) -> Array:
        """(..., 1, rows, keys): j - i, or how far a key is behind the window's diagonal."""
        shift = self._shift() if self.spec.diagonal else 0
        return (self._keys(at) - self._queries(at) - shift).astype(self.wide)

    def of_all_keys(self, x: Array, at: Block) -> Array:
        """An array whose last axis has a block's keys, with 0 for all others: trees of sums in order have every key."""
        if (at.low, at.high) == (0, self.s):
            return x
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(at.low, self.s - at.high)])

    def _seen(self, at: Block) -> Array | None:
        """Which pairs count, of a shape that is broadcast; None if all do."""
        spec, given, conditions = self.spec, self.given, []
        i, j = self._queries(at), self._keys(at)
        if not isinstance(self.filled, int):
            conditions.append(at.first + jnp.arange(at.rows).reshape(*(1 for _ in self.lead), 1, at.rows, 1) < self.t)
        of_each = lambda name: given[name][..., None, None, None]
        if "query_lengths" in given:
            conditions.append(i < of_each("query_lengths"))
        if "key_lengths" in given:
            conditions.append(j < of_each("key_lengths"))
        if spec.left is not None or spec.right is not None:
            distance = j - i - self._shift()
            conditions += [] if spec.left is None else [distance >= -spec.left]
            conditions += [] if spec.right is None else [distance <= spec.right]
        if "mask" in given:
            conditions.append(self._tile("mask", at))
        if "block_mask" in given:
            conditions.append(self._tiles(i, j))
        if "query_segments" in given:
            of_queries = self.rows("query_segments", at)[..., None, :, None]
            conditions.append(of_queries == self.columns("key_segments", at)[..., None, None, :])
        return ft.reduce(jnp.logical_and, conditions) if conditions else None

    def _tiles(self, i: Array, j: Array) -> Array:
        """The elements of the block mask that queries and keys at these places have, (..., heads or 1, rows, keys)."""
        u, v = (places.ravel() // n for places, n in zip((i, j), self.spec.tile, strict=True))
        return jnp.take(jnp.take(self.given["block_mask"], u, -2, mode="clip"), v, -1, mode="clip")

    def _shift(self) -> Any:
        if not self.spec.bottom_right:
            return 0
        of_each = lambda name, other: self.given[name][..., None, None, None] if name in self.given else other
        if not {"query_lengths", "key_lengths"} & self.given.keys():
            return self.spec.shift
        return of_each("key_lengths", self.s) - of_each("query_lengths", self.s - self.spec.shift)

    def dropped(self, p: Array, at: Block) -> Array:
        """Weights of all pairs, some of which are 0 and the others scaled: as dropout of (B, N, T, S) has them."""
        if self.spec.dropout is None:
            return p
        limit, scale, heads, queries = self.spec.dropout
        lead, word = len(self.lead), jnp.uint32
        start = self.given["start"].astype(word) if "start" in self.given else jnp.zeros((1,) * lead + (3,), word)
        place = lambda i, axis: start[..., i][..., None, None] + lax.broadcasted_iota(word, _along(p, axis), axis)
        # Of each row of keys the first element's number. A row is counted below 2^32, its elements below 2^64.
        of_heads = place(0, lead - 1) * word(heads) + place(1, lead)
        row = of_heads * word(queries) + place(2, lead + 1) + jnp.asarray(at.first, word)
        key = self.given["dropout_key"][..., None, None, :]
        first = dropout.times(row, self.s)
        for further in (key[..., 2:], dropout.pair(at.low)):
            further = further.reshape((1,) * (first.ndim - further.ndim) + further.shape)
            first = dropout.plus(*jnp.broadcast_arrays(first, further))
        spec = DropoutSpec(limit, scale, (0,), None, lead + 2, "xla", self.spec.level)
        return primitives.bind("dropout", p, key[..., :2], first, spec=spec)

    # -- scores --

    def _raw(self, at: Block) -> tuple[Array, Array | None]:
        """The scores of all pairs, and with a cap their slope."""
        times, cap, slope = self.k.times, self.spec.softcap, None
        x = times(self.with_keys(self.rows("q", at), self.columns("k", at)), self.spec.scale)
        if cap is not None:
            t = self.k.tanh(times(x, 1 / cap))
            x, slope = times(t, cap), 1 - times(t, t)
        if self.spec.score is not None:
            x, own = self.spec.score.with_slope(x, self._places(at), self.given)
            slope = own if slope is None else times(slope, own)
        if "bias" in self.given:
            x = x + self._tile("bias", at)
        if "alibi_slopes" in self.given:
            x = x + times(*self._along_distance(self.given["alibi_slopes"], at))
        return x, slope

    def _products(self, at: Block) -> Array:
        """The scores of all pairs before the user's function."""
        x = self.k.times(self.with_keys(self.rows("q", at), self.columns("k", at)), self.spec.scale)
        cap = self.spec.softcap
        return x if cap is None else self.k.times(self.k.tanh(self.k.times(x, 1 / cap)), cap)

    def _places(self, at: Block) -> tuple[Array, ...]:
        """Of the sequences, heads, queries and keys of a block; those of a device stand behind the others'."""
        start = self.given["start"].reshape(3) if "start" in self.given else jnp.zeros(3, jnp.int32)
        counts = (self.lead[-1], self.n, at.rows)
        first = (start[0], start[1], start[2] + at.first)
        of_rows = (jnp.arange(n, dtype=jnp.int32) + f for n, f in zip(counts, first, strict=True))
        return (*of_rows, at.low + jnp.arange(at.high - at.low, dtype=jnp.int32))

    def of_score(self, ds: Array, seen: Array | None, at: Block) -> Named:
        """The gradients of the arrays that the user's function takes, from those of the scores."""
        names = tuple(name for name in self.spec.along if name.startswith("score"))
        if not names or self.spec.score is None:
            return {}
        x = self._products(at)
        x = x if seen is None else jnp.where(seen, x, jnp.zeros_like(x))
        return self.spec.score.back(ds, x, self._places(at), self.given, names)

    def _along_distance(self, slopes: Array, at: Block) -> list[Array]:
        return jnp.broadcast_arrays(slopes[..., None, None], self.distance(at))

    def scores(self, at: Block) -> tuple[Array, Array | None]:
        """The scores, -inf where nothing is seen, and what is seen."""
        (x, _), seen = self._raw(at), self._seen(at)
        return (x if seen is None else jnp.where(seen, x, -jnp.inf)), seen

    def probabilities(self, at: Block) -> tuple[Array, Array | None, Array | None]:
        """P, the scores' slope and what is seen."""
        (x, slope), seen = self._raw(at), self._seen(at)
        p = exponential(self.k, x if seen is None else jnp.where(seen, x, -jnp.inf), self.rows("lse", at)[..., None])
        return p if seen is None else jnp.where(seen, p, jnp.zeros_like(p)), slope, seen  # also where lse is NaN

    def tangent_of_scores(self, d: "Arrays", at: Block, slope: Array | None) -> Array:
        """That of the scores along the tangents, of all pairs."""
        parts = []
        if "q" in d.given:
            parts.append(self.with_keys(d.rows("q", at), self.columns("k", at)))
        if "k" in d.given:
            parts.append(self.with_keys(self.rows("q", at), d.columns("k", at)))
        shape = (*self.lead, self.n, at.rows, at.high - at.low)
        times = self.k.times
        x = times(ft.reduce(jnp.add, parts), self.spec.scale) if parts else jnp.zeros(shape, self.wide)
        x = x if slope is None else times(x, slope)
        if self.spec.score is not None and any(name in d.given for name in self.spec.score.floats):
            x = x + self.spec.score.along(self._products(at), self._places(at), self.given, d.given)
        if "bias" in d.given:
            x = x + d._tile("bias", at)
        if "alibi_slopes" in d.given:
            x = x + times(*self._along_distance(d.given["alibi_slopes"], at))
        return x

    # -- products --

    def _grouped(self, x: Array) -> Array:
        """(b, h, g rows, ...) of (..., n, rows, ...): the heads that share keys are more rows."""
        return x.reshape(math.prod(self.lead), self.h, self.n // max(self.h, 1) * x.shape[-2], x.shape[-1])

    def _flat(self, x: Array) -> Array:
        return x.reshape(math.prod(self.lead), *x.shape[-3:])

    def with_keys(self, rows: Array, keys: Array) -> Array:
        """Σ over features: (..., n, rows, keys)."""
        found = self._product(self._grouped(rows), self._flat(keys), 3, 3)
        return found.reshape(*rows.shape[:-1], keys.shape[-2])

    def over_keys(self, p: Array, seen: Array | None, values: Array) -> Array:
        """Σ over keys of weights times values: (..., n, rows, features)."""
        given = self._grouped(p), self._where(seen, p), self._flat(values)
        found = self._seen_product(*given, 3, 2)
        return found.reshape(*p.shape[:-1], values.shape[-1])

    def in_splits(self, x: Array, axis: int, n: int) -> Array:
        """An array of which an axis, counted from the last one, has keys: with splits of n behind the common axes."""
        lead = len(self.lead)
        parts = -(-x.shape[axis] // n)
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, parts * n - x.shape[axis])
        x = jnp.pad(x, padding)
        at = x.ndim + axis
        x = x.reshape(*x.shape[:at], parts, n, *x.shape[at + 1 :])
        return jnp.moveaxis(x, at, lead)

    def over_splits(self, parts: int) -> "Arrays":
        """The same operands, of which splits of keys are one more common axis."""
        other = object.__new__(Arrays)
        other.__dict__.update(self.__dict__)
        other.lead = (*self.lead, parts)
        return other

    def over_rows(self, p: Array, seen: Array | None, values: Array) -> Array:
        """Σ over the queries of all heads that share a key: (..., h, keys, features)."""
        given = self._grouped(p), self._where(seen, p), self._grouped(values)
        found = self._seen_product(*given, 2, 2)
        return found.reshape(*self.lead, *found.shape[1:])

    def _where(self, seen: Array | None, p: Array) -> Callable[[], Array] | None:
        return None if seen is None else lambda: self._grouped(jnp.broadcast_to(seen, p.shape))

    def _seen_product(self, p: Array, seen: Callable[[], Array] | None, values: Array, i: int, j: int) -> Array:
        """The product, to which values that are not finite contribute only where they are seen."""
        if seen is None:
            return self._product(p, values, i, j)
        finite = jnp.isfinite(values)
        found = self._product(p, jnp.where(finite, values, jnp.zeros_like(values)), i, j)

        def with_others(found: Array, p: Array, values: Array) -> Array:
            where = seen()
            up, down, none = values == jnp.inf, values == -jnp.inf, jnp.zeros(values.shape, bool)
            # Of weights of each sign, and of all, what they make of values: infinity, minus infinity, NaN.
            weights = jnp.concatenate([p > 0, p < 0, where & (p == 0), where], i)
            made = [(up, down, none), (down, up, none), (none, none, up | down), (none, none, jnp.isnan(values))]
            kinds = jnp.concatenate([jnp.concatenate(kinds, -1) for kinds in made], j)
            up, down, nan = jnp.split(
                dot(weights.astype(self.dtype), kinds.astype(self.dtype), i, j, self.wide) > 0, 3, -1
            )
            found = jnp.where(up, jnp.inf, jnp.where(down, -jnp.inf, found))
            return jnp.where(nan | (up & down), jnp.nan, found)

        return lax.cond(jnp.all(finite), lambda found, *_: found, with_others, found, p, values)

    def _product(self, a: Array, b: Array, i: int, j: int) -> Array:
        """Σ along axis i of a and j of b, in the accumulator's dtype."""
        return self.k.dot(a.astype(self.dtype), b.astype(self.dtype), i, j, self.wide)


def _along(x: Array, axis: int) -> list[int]:
    """The shape of an array without keys that is broadcast to x, but for this axis."""
    return [n if i == axis else 1 for i, n in enumerate(x.shape[:-1])]


def _cut(x: Array, first: Any, rows: Any, axis: int) -> Array:
    if isinstance(first, int):
        return lax.slice_in_dim(x, first, first + rows, axis=axis)
    return lax.dynamic_slice_in_dim(x, first, rows, axis)
