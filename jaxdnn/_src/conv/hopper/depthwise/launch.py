"""Depthwise and narrow-group convolution on Hopper: what the launches of the walks and of the sums have in common."""

from collections.abc import Callable
from typing import Any

from jax import Array, lax

from jaxdnn._src.core.compat import pl, plgpu


def as_images(x: Array, size: tuple[int, int]) -> Array:
    return x.reshape(-1, *size, x.shape[-1])


def _transforms(swizzle: int) -> tuple[Any, ...]:
    make: Any = plgpu.SwizzleTransform
    return (make(swizzle),) if swizzle else ()


def shared(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=_transforms(swizzle))


def ref_type(swizzle: int) -> Any:
    return plgpu.RefType(_transforms(swizzle))


def grid(items: int, sms: int | None) -> tuple[int]:
    """A block for every item, or under a limit no more blocks than multiprocessors, each with items in turn.

    Without a limit several blocks share a multiprocessor, which hides a tile's way better than a block's turns do.
    """
    return (items if sms is None else min(items, sms),)


def each(items: int, sms: int | None, name: str, do: Callable[[Any], None]) -> None:
    """A block's items in turn. An item ends by waiting for its store, so that the next one may write shared memory."""
    (blocks,), block = grid(items, sms), lax.axis_index(name)
    if blocks == items:
        do(block)
    else:
        turns = lax.div(items - block + blocks - 1, blocks)
        pl.loop(0, turns)(lambda turn: do(block + turn * blocks))
