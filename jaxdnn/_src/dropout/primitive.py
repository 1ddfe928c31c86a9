"""The dropout primitive: its type, derivative, vmap and sharding rules.

y = dropout(x, key, start), linear in x and its own transpose: the backward pass draws the mask again and keeps nothing
of the size of x. x has leading axes, which share one mask or have a key each, and then the axes that are counted.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.core import primitives
from jaxdnn._src.core.partitioning import Factors, alike

BLOCK = 4  # random words that one counter gives
COUNTERS = 2**64 // BLOCK  # elements are numbered modulo 2^64, and begin anew with counter 0


@dataclasses.dataclass(frozen=True)
class DropoutSpec:
    """Everything about a call that is known when it is traced, apart from shapes.

    Attributes:
      threshold: an element is kept if its random word is at least this, from 0 to 2^32 - 1.
      scale: what a kept element is multiplied by, 1 / (1 - rate).
      order: the counted axes in logical order, the slowest first; numbered from the first counted axis.
      shift: the first element is word `shift` of counter `start`; None: `start` counts elements, not counters.
      leading: how many leading axes x, key and start have; those of key and start may be 1.
      start: the counter, if it is known when traced; then that operand is not read, and the key is passed in its place.
    """

    threshold: int
    scale: float
    order: tuple[int, ...]
    shift: int | None
    leading: int = 0
    engine: str | None = None
    level: str = "fast"
    start: int | None = None


def _batch(spec: DropoutSpec, operands: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """One more leading axis; a key or a start that is not mapped has length 1 along it."""
    more = dataclasses.replace(spec, leading=spec.leading + 1)
    return primitives.batch_leading("dropout", more, operands, dims, shared=(1, 2))


def _factors(spec: DropoutSpec, x: Any, key: Any, start: Any) -> Factors:
    """XLA may shard any axis; a kernel would have to know the position of its part, and so cannot be partitioned."""
    axes = tuple(f"x{i}" for i in range(len(x.shape)))
    lead = slice(spec.leading)
    words = lambda own, v: (*alike(axes[lead], x.shape[lead], v.shape[lead], own), f"{own}words")
    return Factors(operands=(axes, words("k", key), words("s", start)), results=(axes,), free=(), placed=axes)


primitives.define(
    "dropout",
    results=lambda spec, x, *_: jax.ShapeDtypeStruct(x.shape, x.dtype),
    jvp=ft.partial(primitives.jvp_of_linear, "dropout", None, constant=2),
    transpose=lambda spec, ct, x, key, start: [primitives.bind("dropout", ct, key, start, spec=spec), None, None],
    batch=_batch,
    factors=_factors,
)


# ---- 64-bit counts in two 32-bit words, the low one first ------------------------------------------------------------


def words(value: int) -> np.ndarray:
    """A number below 2^64 as two words."""
    return np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)


def pair(value: int) -> Array:
    """The same as an array of JAX's."""
    return jnp.asarray(words(value))


def pair_of(value: Array) -> Array:
    """A scalar integer array modulo 2^64 as two words."""
    if value.dtype.itemsize == 8:
        return jnp.stack([value.astype(jnp.uint32), (value >> jnp.asarray(32, value.dtype)).astype(jnp.uint32)])
    high = jnp.where(value < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    return jnp.stack([value.astype(jnp.uint32), high])


def plus(a: Array, b: Array) -> Array:
    """a + b of two pairs, modulo 2^64."""
    low = a[..., 0] + b[..., 0]
    carry = (low < b[..., 0]).astype(jnp.uint32)
    return jnp.stack([low, a[..., 1] + b[..., 1] + carry], -1)


def times(a: Array, n: Any) -> Array:
    """a n of two numbers below 2^32, as pairs."""
    low = lambda v: v & jnp.uint32(0xFFFF)
    high = lambda v: v >> jnp.uint32(16)
    b = jnp.full_like(a, n)
    middle = high(low(a) * low(b)) + low(high(a) * low(b)) + low(low(a) * high(b))
    above = high(a) * high(b) + high(high(a) * low(b)) + high(low(a) * high(b)) + high(middle)
    return jnp.stack([a * b, above], -1)


def times_block(a: Array) -> Array:
    """BLOCK a of a pair, modulo 2^64."""
    low, high = a[..., 0], a[..., 1]
    return jnp.stack([low << jnp.uint32(2), (high << jnp.uint32(2)) | (low >> jnp.uint32(30))], -1)


@ft.lru_cache
def threshold(rate: float) -> int:
    """rate 2^32, rounded to the nearest integer, ties to even; the product is exact."""
    return int(np.rint(rate * 2.0**32))
