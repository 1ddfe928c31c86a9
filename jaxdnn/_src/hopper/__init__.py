"""What the kernels for compute capability 9.0 (H100, H200, GH200) share.

Convolutions, layer and RMS norm and softmax of rows (`rows`, `row_kernel`), and batch norm, pooling and dropout
(`lanes`) are Pallas kernels (Mosaic GPU), and so is attention, but for its consumers, which are PTX text within it. The
kernels of softmax of long rows, group and instance norm, sampling, CTC and recurrences are PTX text, which an
otherwise empty Pallas kernel launches (`launch`).
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax

from jaxdnn._src.core import compat, engines

MEASURED_ON = ("NVIDIA H200",)  # the kinds of device on which every kernel here was measured
MINIMUM_JAX = (0, 11)
CAPABILITY = "9.0"
MULTIPROCESSORS = 132  # of an H100 or H200; also the fixed number by which work is partitioned where bits depend on it
# How many clusters of 1, 2, 4 or 8 blocks an H200 ran at once in a test, each block alone on a multiprocessor. Which
# multiprocessors are disabled differs from chip to chip; a chip that runs fewer gives the same results, more slowly.
CLUSTERS_AT_ONCE = {1: MULTIPROCESSORS, 2: 66, 4: 30, 8: 15}


def unavailable() -> str | None:
    """Why these kernels cannot be used with the installed JAX, or None."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < MINIMUM_JAX:
        return f"the Hopper kernels need JAX 0.11 or newer, this is {jax.__version__}"
    if lack := compat.lacking(compat.KERNELS):
        return f"{lack}, which its kernels need"
    return None


def no_device(call: engines.Call) -> str | None:
    """Why no kernel runs on the platform that a call is lowered for, or on this process's device; or None.

    A call that is lowered for a GPU in a process without one, as in `jax.export`, has a kernel only by `engine=`.
    """
    if call.platform != "cuda":
        return f"it runs on NVIDIA GPUs of compute capability {CAPABILITY}, and this is {call.platform}"
    if reason := unavailable():
        return reason
    if call.device_kind is None:
        if call.spec.engine == "hopper":
            return None
        return (
            "no GPU is here, and no kernel is chosen unasked for one that is not known: engine='hopper' asks for it, "
            f"for devices of compute capability {CAPABILITY}"
        )
    if call.device_kind not in MEASURED_ON and (found := capability()) != CAPABILITY:
        return f"it needs compute capability {CAPABILITY}, and {call.device_kind} has {found or 'an unknown one'}"
    return None


def declare(
    *ops: str, unsupported: Callable[[engines.Call], str | None], run: Callable[..., Any], **declared: Any
) -> None:
    """Registers the engine `hopper` of these ops: `engines.declare` with what its kernels have in common.

    `unsupported` says why no kernel serves a call, whatever the device; None if one does. Kernels count in 32 bits, in
    JAX's 64-bit mode too.
    """

    def narrow(call: engines.Call, *operands: Any) -> Any:
        with jax.enable_x64(False):
            return run(call, *operands)

    of_sizes = {"needs_sizes": lambda call: True, "partition": lambda call: True}
    supports = lambda call: no_device(call) or unsupported(call)
    common = {**of_sizes, "fused": False, "supports": supports, "measured_on": MEASURED_ON}
    engines.declare("hopper", *ops, run=narrow, **(common | declared))


@ft.lru_cache
def capability() -> str | None:
    """The compute capability of the first GPU here, or None."""
    try:
        return str(jax.local_devices(backend="cuda")[0].compute_capability)
    except RuntimeError:
        return None
