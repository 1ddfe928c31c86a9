"""Space to channels and back: blocks of pixels folded into channels, as pixel_unshuffle and `transform` do."""

import functools as ft
import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxdnn import _primitive
from jaxdnn._partition import Factors


def fold(name: str, x: Array, factors: tuple[int, ...], order: str = "CRD") -> Array:
    """(N, C, H f, W g) to (N, C f g, H, W): the new channel is (c f + i) g + j, or for "DCR" (i g + j) C + c."""
    sizes = x.shape[2:]
    if any(size % f for size, f in zip(sizes, factors, strict=True)):
        raise ValueError(f"`{name}` must divide the sizes {tuple(sizes)}, got {factors}.")
    return _primitive.in_types(ft.partial(_folded, factors, order), ft.partial(_moves, ()), (x,))(x)


def unfold(name: str, x: Array, factors: tuple[int, ...], order: str = "CRD") -> Array:
    """(N, C f g, H, W) to (N, C, H f, W g), the inverse of `fold`."""
    if (c := x.shape[1]) % math.prod(factors):
        raise ValueError(f"`{name}` must have a product that divides the {c} channels, got {factors}.")
    spatial = tuple(f"s{i}" for i in range(len(factors)))
    return _primitive.in_types(ft.partial(_unfolded, factors, order), ft.partial(_moves, spatial), (x,))(x)


def _moves(free: tuple[str, ...], x: Any) -> Factors:
    """The batch may be sharded, and the spatial axes in `free`: those that become longer, so that they stay even."""
    spatial = tuple(f"s{i}" for i in range(x.ndim - 2))
    return Factors(operands=(("n", "c", *spatial),), results=(("n", "k", *spatial),), free=("n", *free))


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
