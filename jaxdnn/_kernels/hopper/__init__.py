"""Pallas kernels (Mosaic GPU) for compute capability 9.0: the H100, H200 and their kin."""

import functools as ft

import jax

MINIMUM_JAX = (0, 11)
CAPABILITY = "9.0"


def unavailable() -> str | None:
    """Why these kernels cannot be used with the installed JAX, or None."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < MINIMUM_JAX:
        return f"the Hopper kernels need JAX 0.11 or newer, this is {jax.__version__}"
    return None


@ft.lru_cache
def capability() -> str | None:
    """The compute capability of the first GPU here, or None."""
    try:
        return str(jax.local_devices(backend="cuda")[0].compute_capability)
    except RuntimeError:
        return None  # no device in this process: a call is lowered for another machine
