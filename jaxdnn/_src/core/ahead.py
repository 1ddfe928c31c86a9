"""Compiles the kernels of a program in other threads while the rest of it is being lowered.

XLA compiles the kernels of a program one after another, which for the hundred kernels of a network's training step
takes longer than all else. It keeps a compiled kernel for the process, under the hash of its code. So a program of one
kernel, compiled in another thread, leaves the kernel where XLA looks for it when it comes to it in the program. It does
not hold the interpreter's lock meanwhile, and the hash does not depend on the program (`hopper.launch.kernel`).

The last kernel of a program is left to XLA: it would be compiled twice at once. Where XLA finds the whole program in
JAX's persistent cache, these threads have worked for nothing. `JAXDNN_COMPILE_THREADS=0` turns them off.
"""

import contextlib
import functools as ft
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxdnn._src.core import compat, settings

TARGET = "mosaic_gpu_v2"  # the name of the function that XLA calls for a kernel
_Kernels = tuple[tuple[bytes, bytes], ...]
_waiting: tuple[int, _Kernels] = (0, ())  # a program and the kernels of the op that was lowered last


@contextlib.contextmanager
def compiling(ctx: Any, platform: str | None) -> Iterator[None]:
    """Compiles ahead what is lowered within the context, an op on a GPU, once another op of the program is lowered."""
    global _waiting
    wanted = settings.threads() > 0  # what the variable cannot mean is refused on every platform
    if not wanted or platform != "cuda" or jax.default_backend() != "gpu" or compat.is_exported(ctx):
        yield
        return
    before = len(compat.kernels_lowered())
    yield
    if compat.program(ctx) == _waiting[0]:
        for kernel in _waiting[1]:
            start(*kernel)
    _waiting = compat.program(ctx), tuple(compat.kernels_lowered().items())[before:]


def start(kernel_hash: bytes, code: bytes) -> Future[None]:
    """Compiles a kernel in another thread. Nobody reads an error: XLA raises it when it comes to the kernel."""
    return _pool().submit(lambda: alone(kernel_hash, code).lower().compile() and None)


def alone(kernel_hash: bytes, code: bytes) -> Any:
    """The traced program of one kernel. It is never run, so it has no operands, and a result of one byte."""
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((1,), np.uint8))
    false = dict.fromkeys(("use_custom_barrier", "skip_device_barrier", "uses_xla_collective_metadata"), False)
    return jax.jit(lambda: call(kernel_hash=kernel_hash, module=code, **false)).trace()


@ft.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(settings.threads(), "jaxdnn-compile")
