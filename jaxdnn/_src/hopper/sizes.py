"""Sizes of the chip that determine the tiles of the convolutions."""

from jaxdnn._src.hopper import MULTIPROCESSORS as MULTIPROCESSORS

SHARED_BYTES = 232448  # bytes of shared memory that one block may use on compute capability 9.0
ALIGNMENT = 1024  # of every buffer in shared memory: the period of the 128-byte swizzle


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def aligned(size: int) -> int:
    """The size of a buffer, rounded up to the alignment of the next one."""
    return ceil_div(size, ALIGNMENT) * ALIGNMENT
