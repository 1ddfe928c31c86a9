"""Space to channels and back: blocks of pixels folded into channels, as pixel_unshuffle and `transform` do."""

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn._src.core import primitives
from jaxdnn._src.core.partitioning import Dims, Factors


def fold(name: str, x: Array, factors: tuple[int, ...], order: str = "CRD") -> Array:
    """(N, C, H f, W g) to (N, C f g, H, W): the new channel is (c f + i) g + j, or for "DCR" (i g + j) C + c."""
    sizes = x.shape[2:]
    if any(size % f for size, f in zip(sizes, factors, strict=True)):
        raise ValueError(f"`{name}` must divide the sizes {tuple(sizes)}, got {factors}.")
    wide, narrow = _dims(len(sizes), order)
    rule = ft.partial(_factors, wide, narrow, x.shape[1], [size // f for size, f in zip(sizes, factors, strict=True)])
    return primitives.in_types(ft.partial(_folded, factors, order), rule, (x,))(x)


def unfold(name: str, x: Array, factors: tuple[int, ...], order: str = "CRD") -> Array:
    """(N, C f g, H, W) to (N, C, H f, W g), the inverse of `fold`."""
    if (c := x.shape[1]) % math.prod(factors):
        raise ValueError(f"`{name}` must have a product that divides the {c} channels, got {factors}.")
    wide, narrow = _dims(len(factors), order)
    rule = ft.partial(_factors, narrow, wide, c // math.prod(factors), x.shape[2:])
    return primitives.in_types(ft.partial(_unfolded, factors, order), rule, (x,))(x)


def _dims(rank: int, order: str) -> tuple[Dims, Dims]:
    """The factors of the array with the longer spatial axes, and of that with more channels."""
    spatial = [f"s{i}" for i in range(rank)]
    return ("n", "c", *(f"{s} part" for s in spatial)), ("n", "c parts" if order == "CRD" else "parts c", *spatial)


def _factors(operand: Dims, result: Dims, channels: int, sizes: Sequence[int], x: Any) -> Factors:
    """Whole runs of neighbours and of channels stay on a device; by "DCR" a channel's parts lie apart."""
    sizes_of = {"c": channels, **{f"s{i}": size for i, size in enumerate(sizes)}}
    free = ("n", *(f for f in sizes_of if f != "c" or "parts c" not in (*operand, *result)))
    return Factors(operands=(operand,), results=(result,), free=free, sizes=sizes_of)


def _folded(factors: tuple[int, ...], order: str, x: Array) -> Array:
    n, c, *sizes = x.shape
    split = [part for size, f in zip(sizes, factors, strict=True) for part in (size // f, f)]
    rank = len(sizes)
    places, parts = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    channels = (1, *parts) if order == "CRD" else (*parts, 1)
    y = jnp.transpose(x.reshape(n, c, *split), (0, *channels, *places))
    return y.reshape(n, c * math.prod(factors), *split[::2])


def _unfolded(factors: tuple[int, ...], order: str, x: Array) -> Array:
    n, c, *sizes = x.shape
    rank, kept = len(sizes), c // math.prod(factors)
    channels = (kept, *factors) if order == "CRD" else (*factors, kept)
    first = 2 if order == "CRD" else 1
    spatial = [axis for i in range(rank) for axis in (2 + rank + i, first + i)]
    y = jnp.transpose(x.reshape(n, *channels, *sizes), (0, 1 if order == "CRD" else 1 + rank, *spatial))
    return y.reshape(n, kept, *(size * f for size, f in zip(sizes, factors, strict=True)))
