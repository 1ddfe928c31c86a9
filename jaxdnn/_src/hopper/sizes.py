"""Sizes of the chip that the convolutions are cut by."""

from jaxdnn._src.hopper import MULTIPROCESSORS as MULTIPROCESSORS

SHARED_BYTES = 232448  # of shared memory that one block may use on compute capability 9.0
ALIGNMENT = 1024  # of every buffer in it: the period of the 128-byte swizzle


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def aligned(size: int) -> int:
    """Bytes of a buffer, with those to the next one."""
    return ceil_div(size, ALIGNMENT) * ALIGNMENT
