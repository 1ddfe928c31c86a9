"""Guards around the memory of a call: what it may not touch is full of a pattern, before and after.

On a GPU whose memory JAX takes in one piece when it starts (the worker of `random_worker` sees to that), all of the
piece that holds no array is filled with a pattern before a call. So results and workspaces start out as the pattern,
and around each of them lies the pattern. After the call everything but its operands, its results and one block of the
size of its workspace has to be as it was; the bytes between an array's end and the end of its last 256, too.

What this cannot see: a kernel that writes from one workspace of its program into another, for XLA puts them into one
block. Its results would have to be wrong to show it. A read beyond an array is seen only by what comes of it: the
pattern is not a number in float32, bfloat16 and float16, and a call is repeated on other patterns.
"""

import functools as ft
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# NaN in float32, bfloat16 and float16; about one in these; all bits.
PATTERNS = (0x7FC07FC0, 0x3F803F80, 0xFFFFFFFF)
CHUNK = 256  # bytes, of which the allocator gives out multiples
WORDS = CHUNK // 4
LEAST = 1 << 12  # bytes of a free piece of memory that is filled


class Arena:
    """The memory that JAX has taken from the first GPU."""

    def __init__(self) -> None:
        self.device = jax.local_devices()[0]
        free = self._free() // (8 * CHUNK) * (8 * CHUNK)
        whole = jnp.zeros(free // 4, jnp.uint32)
        self.start, self.bytes = whole.unsafe_buffer_pointer(), free
        whole.delete()
        self.touched = jnp.zeros(free // CHUNK, jnp.bool_)
        self.words: jax.Array = jnp.asarray(_Memory(self.start, free // 4), copy=False)
        if self.words.unsafe_buffer_pointer() != self.start:
            raise RuntimeError("JAX has copied the memory that is to be looked at.")

    def _free(self) -> int:
        stats = self.device.memory_stats() or {}
        return int(stats["largest_free_block_bytes"])

    def fill(self, pattern: int) -> None:
        """Fills all memory that no array has."""
        blocks = []
        while (free := self._free()) >= LEAST:
            size = 1 << (free.bit_length() - 1)
            blocks.append(_full(size // 4, pattern))
        jax.block_until_ready(blocks)
        for block in blocks:
            block.delete()

    def damage(self, arrays: Iterable[jax.Array], workspace: int, pattern: int) -> str | None:
        """What was written that lies in none of these arrays, nor in one block of so many bytes; None if nothing."""
        live = [*arrays, self.touched]
        ranges = [(v.unsafe_buffer_pointer() - self.start, v.nbytes) for v in live]
        self.touched = _touched(self.words, jnp.uint32(pattern), self.touched)
        touched = np.array(self.touched)
        for at, size in ranges:
            if 0 <= at < self.bytes:
                touched[at // CHUNK : -(-(at + size) // CHUNK)] = False
        found = np.flatnonzero(touched)
        if found.size and (found[-1] + 1 - found[0]) * CHUNK > -(-workspace // CHUNK) * CHUNK:
            places = ", ".join(self._near(int(i) * CHUNK, ranges) for i in (found[0], found[-1]))
            return f"{found.size} pieces of {CHUNK} bytes were written outside of every array, {places}"
        for at, size in ranges[:-1]:
            if 0 <= at < self.bytes and size % CHUNK and (message := self._after(at, size, pattern)):
                return message
        return None

    def _near(self, at: int, ranges: list[tuple[int, int]]) -> str:
        """Where a piece lies, told by the array that ends or begins next to it."""
        number, distance = min(
            ((i, at - start - size if at >= start + size else at - start) for i, (start, size) in enumerate(ranges)),
            key=lambda found: abs(found[1]),
        )
        return f"{distance} bytes from array {number}"

    def _after(self, at: int, size: int, pattern: int) -> str | None:
        last = np.asarray(lax.dynamic_slice(self.words, ((at + size) // CHUNK * WORDS,), (WORDS,))).view(np.uint8)
        wanted = np.full(WORDS, pattern, np.uint32).view(np.uint8)
        changed = int((last != wanted)[size % CHUNK :].sum())
        return f"{changed} bytes right after an array of {size} bytes were written" if changed else None


class _Memory:
    """So many words of device memory, for JAX to make an array of."""

    def __init__(self, start: int, count: int):
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (count,),
            "typestr": "<u4",
            "data": (start, False),
            "version": 3,
            "strides": None,
        }


@ft.partial(jax.jit, static_argnums=0)
def _full(count: int, pattern: Any) -> jax.Array:
    return jnp.full(count, jnp.asarray(pattern, jnp.uint32))


@ft.partial(jax.jit, donate_argnums=2)
def _touched(words: jax.Array, pattern: jax.Array, into: jax.Array) -> jax.Array:
    """Which pieces have a word that is not the pattern; in memory of its own, so that nothing is overwritten."""
    return (words.reshape(-1, WORDS) != pattern).any(1)
