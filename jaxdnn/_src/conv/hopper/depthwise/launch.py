"""Depthwise and narrow-group convolution on Hopper: what its launches share."""

from collections.abc import Callable
from typing import Any

from jax import Array, lax

from jaxdnn._src.core.compat import ir, llvm, pl, plgpu
from jaxdnn._src.hopper.launch import turns
from jaxdnn._src.hopper.ptx import LOADS_DONE


def as_images(x: Array, size: tuple[int, ...]) -> Array:
    return x.reshape(-1, *size, x.shape[-1])


def _transforms(swizzle: int) -> tuple[Any, ...]:
    make: Any = plgpu.SwizzleTransform
    return (make(swizzle),) if swizzle else ()


def shared(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=_transforms(swizzle))


def ref_type(swizzle: int) -> Any:
    return plgpu.RefType(_transforms(swizzle))


def loads_done() -> None:
    """Completes this thread's loads from shared memory, before an arrival that lets the copy engine write there.

    The arrival alone orders them for other threads' stores. The copy engine's overtake loads that are in flight.
    """

    @plgpu.inline_mgpu(arg_types=())
    def run(_: Any = None) -> None:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], " ".join(LOADS_DONE), "~{memory}", has_side_effects=True)

    run()


def grid(items: int, sms: int | None) -> tuple[int]:
    """One block for each item, or at most `sms` blocks that process several items, one after another.

    Without a limit several blocks share a multiprocessor, which hides the latency of loads better.
    """
    return (items if sms is None else min(items, sms),)


def each(items: int, sms: int | None, name: str, do: Callable[[Any], None]) -> None:
    """Calls `do` for each item of a block. It must wait for its store, so that the next item may reuse the memory."""
    (blocks,), block = grid(items, sms), lax.axis_index(name)
    if blocks == items:
        do(block)
    else:
        count = lax.div(items - block + blocks - 1, blocks)
        pl.loop(0, turns(count))(lambda turn: do(block + turn * blocks))
