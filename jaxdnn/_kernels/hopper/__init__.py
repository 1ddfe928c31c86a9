"""Pallas kernels (Mosaic GPU) for compute capability 9.0: the H100, H200 and their kin."""

import functools as ft

import jax

MINIMUM_JAX = (0, 11)
CAPABILITY = "9.0"
MULTIPROCESSORS = 132  # of an H100 or H200; also what is cut by a number that no device may change
# Clusters of 1, 2, 4 or 8 blocks, each with a multiprocessor alone, that an H200 was seen to run at once. Which
# multiprocessors are switched off differs from chip to chip: one that runs fewer gives the same results, later.
CLUSTERS_AT_ONCE = {1: MULTIPROCESSORS, 2: 66, 4: 30, 8: 15}


def unavailable() -> str | None:
    """Why these kernels cannot be used with the installed JAX, or None."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < MINIMUM_JAX:
        return f"the Hopper kernels need JAX 0.11 or newer, this is {jax.__version__}"
    return None


def no_device(platform: str) -> str | None:
    """Why no kernel runs on the platform that a call is lowered for, or on the device that is here; or None."""
    if platform != "cuda":
        return f"it runs on NVIDIA GPUs of compute capability {CAPABILITY}, and this is {platform}"
    if reason := unavailable():
        return reason
    if (found := capability()) not in (None, CAPABILITY):
        return f"it needs compute capability {CAPABILITY}, and this device has {found}"
    return None


@ft.lru_cache
def capability() -> str | None:
    """The compute capability of the first GPU here, or None."""
    try:
        return str(jax.local_devices(backend="cuda")[0].compute_capability)
    except RuntimeError:
        return None  # no device in this process: a call is lowered for another machine
