"""The operands of a call of attention, and what a block of queries takes of them: scores, products, gradients' terms.

What is not seen is multiplied by 0, and 0 times NaN is NaN. So where an operand of such a product is not finite, the
product is computed with its finite elements, and the others are counted in a product of their own (`_seen_product`).
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.attention.arithmetic import Arithmetic, dot
from jaxdnn._src.attention.spec import AttentionSpec
from jaxdnn._src.core import blending, primitives
from jaxdnn._src.core.rounding import nearest
from jaxdnn._src.dropout import primitive as dropout
from jaxdnn._src.dropout.primitive import DropoutSpec

STRIPS = 4  # of queries, each with a range of keys of its own
ROWS = 256  # the fewest of a strip

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
        self.given = {name: self._heads_first(name, value) for name, value in given.items()}
        self.lead, (self.n, self.t) = self.given["q"].shape[:-3], self.given["q"].shape[-3:-1]
        self.h, self.s = self.given["k"].shape[-3:-1]

    def also(self, given: Values) -> "Arrays":
        """Tangents or cotangents of the same operands."""
        other = object.__new__(Arrays)
        other.__dict__.update(self.__dict__)
        other.given = {name: self._heads_first(name, value) for name, value in given.items()}
        return other

    def _heads_first(self, name: str, x: Array) -> Array:
        swapped = not self.spec.heads_first and name in ("q", "k", "v", "y", "lse")
        if swapped:
            x = jnp.swapaxes(x, -3, -2) if name != "lse" else jnp.swapaxes(x, -2, -1)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(self.dtype if name in ("q", "k", "v") else self.wide)

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
        """(..., 1, rows, keys): j - i."""
        return (self._keys(at) - self._queries(at)).astype(self.wide)

    def _seen(self, at: Block) -> Array | None:
        """Which pairs count, of a shape that is broadcast; None if all do."""
        spec, given, conditions = self.spec, self.given, []
        i, j = self._queries(at), self._keys(at)
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
        if "query_segments" in given:
            of_queries = self.rows("query_segments", at)[..., None, :, None]
            conditions.append(of_queries == self.columns("key_segments", at)[..., None, None, :])
        return ft.reduce(jnp.logical_and, conditions) if conditions else None

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
        if "bias" in self.given:
            x = x + self._tile("bias", at)
        if "alibi_slopes" in self.given:
            x = x + times(*self._along_distance(self.given["alibi_slopes"], at))
        return x, slope

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

    # -- blocks --

    def _strips(self) -> list[tuple[int, Any, int, Any]]:
        """Of each strip the first query and the last, and the range of its keys."""
        spec, t, s = self.spec, self.t, self.s
        known = isinstance(t, int) and isinstance(s, int)
        moved = spec.bottom_right and {"query_lengths", "key_lengths"} & self.given.keys()
        everything = spec.left is None and spec.right is None
        # In order a row's sum is a tree from the first key on, and blocks are added one by one, on a mesh too.
        if not known or moved or "start" in self.given or everything or not t or self.k.rows is not None:
            return [(0, t, 0, s)]
        rows = max(ROWS, -(-t // STRIPS))
        shift = spec.shift if spec.bottom_right else 0
        found = []
        for first in range(0, t, rows):
            last = min(first + rows, t)
            low = 0 if spec.left is None else min(max(first + shift - spec.left, 0), s)
            high = s if spec.right is None else max(min(last + shift + spec.right, s), low)
            found.append((first, last, low, high))
        return found

    def _rows_of_block(self, rows: int, keys: int) -> int:
        """The rows of a block of so many rows and keys."""
        if not isinstance(rows, int) or not all(isinstance(n, int) for n in (*self.lead, keys)):
            return rows
        if self.k.rows is not None:
            return max(1, min(rows, self.k.rows))
        return max(1, min(rows, self.k.scores // max(1, math.prod(self.lead) * self.n * keys)))

    def over_queries(self, block: Callable[[Block], tuple[Named, Named]]) -> Named:
        """What blocks give: of all queries, one behind the other, and sums over the queries, by name."""
        rows: dict[str, list[Array]] = {}
        sums: dict[str, Array] = {}
        axis = len(self.lead) + 1

        def take(of_rows: Named, terms: Named, low: int, high: Any) -> None:
            for name, x in of_rows.items():
                rows.setdefault(name, []).append(x)
            for name, x in terms.items():
                if name in ("k", "v") and (low, high) != (0, self.s):
                    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(low, self.s - high), (0, 0)])
                sums[name] = sums[name] + x if name in sums else x

        for first, last, low, high in self._strips():
            many = self._rows_of_block(last - first, high - low)
            whole = (last - first) // many if isinstance(many, int) else 0
            if whole > 1:
                run = jax.checkpoint(lambda i, many=many, low=low, high=high: block(Block(i, many, low, high)))

                def step(carry: Any, i: Array, run: Any = run) -> Any:
                    of_rows, terms = run(i)
                    return jax.tree.map(jnp.add, carry, terms), of_rows

                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, jnp.int32(0))[1])
                terms, found = lax.scan(step, zeros, first + many * jnp.arange(whole, dtype=jnp.int32))
                take({name: _joined(x, axis) for name, x in found.items()}, terms, low, high)
                first += whole * many
            if whole <= 1 or first < last:
                run = jax.checkpoint(lambda at=Block(first, last - first, low, high): block(at))
                of_rows, terms = run()
                take(of_rows, terms, low, high)
        return sums | {name: jnp.concatenate(x, axis) for name, x in rows.items()}

    def results(self, found: Named) -> tuple[Array, ...]:
        """y and lse in the call's layout and dtypes."""
        y, lse = nearest(found["y"], self.narrow), found["lse"]
        return (y, lse) if self.spec.heads_first else (jnp.swapaxes(y, -3, -2), jnp.swapaxes(lse, -2, -1))

    def gradients(self, block: Callable[[Block], Named]) -> tuple[Array, ...]:
        """The gradients of the operands in `along`, from a block's: of its queries, and terms of the others'."""

        def parts(at: Block) -> tuple[Named, Named]:
            found = block(at)
            if "bias" in found:
                found["bias"] = self._of_bias(found["bias"], at)
            by_rows = {n: x for n, x in found.items() if n == "q" or (n == "bias" and self.given[n].shape[-2] != 1)}
            return by_rows, {n: x for n, x in found.items() if n not in by_rows}

        found = self.over_queries(parts)
        return tuple(self._as_given(name, found[name]) for name in self.spec.along)

    def _of_bias(self, ds: Array, at: Block) -> Array:
        """The part of bias's gradient in a block: sums over what it is broadcast along, and 0 for other keys."""
        shape = self.given["bias"].shape
        ds = self._added_like(ds, shape)
        if shape[-1] == 1 or (at.low, at.high) == (0, self.s):
            return ds
        return jnp.pad(ds, [(0, 0)] * (ds.ndim - 1) + [(at.low, self.s - at.high)])

    def _added_like(self, x: Array, shape: tuple[int, ...]) -> Array:
        """The sums over the axes along which an array of this shape is broadcast to x."""
        axes = tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1)
        return self.k.total(x, axes) if axes else x

    def _as_given(self, name: str, x: Array) -> Array:
        """A gradient as its operand is, in shape, layout and dtype."""
        given = self.given[name]
        if name in ("alibi_slopes", "sinks"):
            x = self._added_like(x, given.shape)
        swapped = not self.spec.heads_first and name in ("q", "k", "v")
        x = jnp.swapaxes(x, -3, -2) if swapped else x
        return x if self.spec.wide else nearest(x, self.dtypes[name])


def _along(x: Array, axis: int) -> list[int]:
    """The shape of an array without keys that is broadcast to x, but for this axis."""
    return [n if i == axis else 1 for i, n in enumerate(x.shape[:-1])]


def _cut(x: Array, first: Any, rows: Any, axis: int) -> Array:
    if isinstance(first, int):
        return lax.slice_in_dim(x, first, first + rows, axis=axis)
    return lax.dynamic_slice_in_dim(x, first, rows, axis)


def _joined(x: Array, axis: int) -> Array:
    """(blocks, ..., rows, ...) as (..., blocks rows, ...)."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
