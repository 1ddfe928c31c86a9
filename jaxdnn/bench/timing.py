"""Clocks: device time by CUPTI on NVIDIA GPUs, interleaved wall time elsewhere. Medians, in milliseconds."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def measure(functions: Sequence[Callable[..., Any]], operands: Sequence[Any], *, repeats: int) -> list[float]:
    """The median time of each function on the same operands, after a warm-up that compiles it."""
    compiled = [jax.jit(f) for f in functions]
    for f in compiled:
        jax.block_until_ready(f(*operands))
    if jax.default_backend() == "gpu":
        return [_device_time(f, operands, repeats) for f in compiled]
    times: list[list[float]] = [[] for _ in compiled]
    for repeat in range(repeats):
        # In turn, and in both directions, so that a slow moment of the machine falls on all of them.
        order = range(len(compiled)) if repeat % 2 == 0 else reversed(range(len(compiled)))
        for i in order:
            start = time.perf_counter()
            jax.block_until_ready(compiled[i](*operands))
            times[i].append(1e3 * (time.perf_counter() - start))
    return [statistics.median(t) for t in times]


def _device_time(function: Callable[..., Any], operands: Sequence[Any], repeats: int) -> float:
    from jax.experimental.mosaic.gpu import profiler  # needs a GPU build of jaxlib

    _, times = profiler.Cupti(finalize=False).measure(function, iterations=repeats)(*operands)
    times = times if isinstance(times, list) else [times]
    return float(statistics.median(t for t in times if t is not None))
