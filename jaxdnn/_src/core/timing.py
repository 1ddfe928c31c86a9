"""Clocks: device time by CUPTI on NVIDIA GPUs, interleaved wall time elsewhere. Medians, in milliseconds."""

import contextlib
import functools as ft
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROTATED_BYTES = 4 << 30  # several times any GPU's cache: what operands that rotate take together
MOST_SETS = 128  # of operands that are that small a cache holds all, as it does in a network
POLL = 2e-3  # seconds between two looks whether another process has ended its turn
Operands = Sequence[Any]


def compiled(function: Callable[..., Any], operands: Operands) -> Callable[..., Any]:
    """A function for operands of these shapes and dtypes, compiled before it is called."""
    return jax.jit(function).lower(*operands).compile()


def measure(
    functions: Sequence[Callable[..., Any]],
    sets: Sequence[Operands],
    *,
    repeats: int,
    own: Mapping[int, Sequence[Operands]] | None = None,
) -> list[float]:
    """The median time of each function on the sets of operands in turn, after a warm-up that compiles what is not.

    `own` has, by number, the sets of functions with operands of their own.
    """
    functions = [f if isinstance(f, jax.stages.Compiled) else jax.jit(f) for f in functions]
    given = [(own or {}).get(i, sets) for i in range(len(functions))]
    for f, of_f in zip(functions, given, strict=True):
        jax.block_until_ready(f(*of_f[0]))
    if jax.default_backend() == "gpu":
        calls = max(repeats, len(sets) if len(sets) > 1 else 0)
        return [
            device_time(lambda i, f=f, of_f=of_f: f(*of_f[i % len(of_f)]), jax.block_until_ready, calls, kept=len(of_f))
            for f, of_f in zip(functions, given, strict=True)
        ]
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats):
        # In turn, and in both directions, so that a slow moment of the machine falls on all of them.
        order = range(len(functions)) if repeat % 2 == 0 else reversed(range(len(functions)))
        for i in order:
            start = time.perf_counter()
            jax.block_until_ready(functions[i](*given[i][repeat % len(sets)]))
            times[i].append(1e3 * (time.perf_counter() - start))
    return [statistics.median(t) for t in times]


@contextlib.contextmanager
def turn(path: Path | None, until: float = math.inf) -> Iterator[None]:
    """While a process is in this context no other one is that names the same file; it waits `until` then at most."""
    in_time(until)
    if path is None:
        yield
        return
    import fcntl  # of Unix alone

    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                in_time(until)
                time.sleep(POLL)
            else:
                break
        yield


def in_time(until: float) -> None:
    """Raises if a moment of the monotonic clock is past."""
    if time.monotonic() > until:
        raise TimeoutError("the time is up")


def device_time(call: Callable[[int], Any], wait: Callable[..., Any], calls: int, kept: int = 1) -> float:
    """The median over calls of the summed time of a call's kernels; the mean if some ran more kernels than others.

    Args:
      call: starts a call, of a number, and returns its results.
      wait: returns when the device is done; it is given the results of the last `kept` calls.
    """
    results: deque[Any] = deque(maxlen=kept)  # so that results do not land where the last one was, in the cache

    def run() -> None:
        for i in range(calls):
            results.append(call(i))
        wait(list(results))

    found = kernels(run)
    if not found:
        raise RuntimeError(f"no kernel ran in {calls} calls")
    each, rest = divmod(len(found), calls)
    if rest:
        return sum(t for _, t in found) / calls
    return statistics.median(sum(t for _, t in found[i * each : (i + 1) * each]) for i in range(calls))


def kernels(run: Callable[[], None]) -> list[tuple[str, float]]:
    """The kernels that a function runs on a GPU before it returns, in order, and the milliseconds that each takes."""
    from jaxdnn._src.core.compat import profiler  # needs a GPU build of jaxlib

    cupti: Any = getattr(profiler, "mosaic_gpu_lib")._mosaic_gpu_ext  # noqa: B009  (not in its stub)
    cupti._cupti_init()
    try:
        run()
    finally:
        found = cupti._cupti_get_timings(False)
    return found


@ft.lru_cache
def copy_bandwidth() -> float:
    """What a plain copy in the device's memory reaches, in TB/s, bytes read and bytes written; the best of 5 rounds.

    By the wall clock over many copies that queue up: a device-to-device copy is no kernel, which CUPTI would time.
    """
    gibibytes, copies = (2, 20) if jax.default_backend() == "gpu" else (1 / 8, 4)
    arrays = [jnp.full(int(gibibytes * 2**28), i, jnp.int32) for i in range(2)]
    copy = jax.jit(lambda a: a.copy())
    best = 0.0
    for _ in range(5):
        jax.block_until_ready([copy(a) for a in arrays])
        start = time.perf_counter()
        kept: deque[Any] = deque(maxlen=2)
        for i in range(copies):
            kept.append(copy(arrays[i % 2]))
        jax.block_until_ready(list(kept))
        best = max(best, copies * 2 * arrays[0].nbytes / (time.perf_counter() - start) / 1e12)
    return best
