"""Pallas kernels (Mosaic GPU) for compute capability 9.0: the H100, H200 and their kin."""

import jax

MINIMUM_JAX = (0, 11)


def unavailable() -> str | None:
    """Why these kernels cannot be used with the installed JAX, or None."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < MINIMUM_JAX:
        return f"the Hopper kernels need JAX 0.11 or newer, this is {jax.__version__}"
    return None
