"""Guards around the memory of a call: what it may not touch is full of a pattern, before and after.

On a GPU whose memory JAX takes in one piece when it starts (`random` sees to that), what lies behind the operands of a
call is filled with a pattern before the call. So results and workspaces start out as the pattern, and around each of
them lies the pattern. After the call all but its operands, its results and one block of the size of its workspace
has to be as it was; the bytes between a result's end and the end of its last 256, too.

What this cannot see: a kernel that writes from one workspace of its program into another, for XLA puts them in one
block; nor, in a program with a workspace, a write outside of it that together with it is no longer than it is large.
Its results would have to be wrong to show it. Of an operand's last 256 bytes the rest is not looked at. A read beyond
an array is seen only by what comes of it: the pattern is not a number in float32, bfloat16 and float16, and a call is
repeated on other patterns.
"""

import functools as ft
import gc
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
LEAST = 1 << 12  # bytes that are worth filling
LEAST_GUARDED = 1 << 26  # bytes behind the operands, most of which have to be filled
# Bytes at the end that stay free: the allocator gives away a piece whole where less than 128 MiB of it would be left.
SPARE, MARGIN = 256 << 20, 8 << 20
MOST = 1 << 30  # bytes that are looked at: what is allocated lies at the lowest address that is free


class Arena:
    """The memory that JAX has taken from the first GPU, all but the last of it."""

    def __init__(self) -> None:
        self.device = jax.local_devices()[0]
        jax.block_until_ready(_full(WORDS, _word(0)))  # now the memory has been taken
        stats = self.device.memory_stats() or {}
        free = int(stats["pool_bytes"] - stats["bytes_in_use"])
        self.bytes = min(free - SPARE, MOST) // CHUNK * CHUNK
        whole = jax.block_until_ready(_full(self.bytes // 4, _word(0)))
        self.start = whole.unsafe_buffer_pointer()
        whole.delete()
        self.map = jax.block_until_ready(jnp.zeros(self.bytes // CHUNK, jnp.bool_))
        self.before = np.zeros(0, bool)
        self.words: jax.Array = jnp.asarray(_Memory(self.start, self.bytes // 4), copy=False)
        if self.words.unsafe_buffer_pointer() != self.start:
            raise RuntimeError("JAX has copied the memory that is to be looked at.")
        self._touched(0)  # to compile it, XLA tries it out on memory that is free

    def fill(self, arrays: Iterable[jax.Array], pattern: int) -> bool:
        """Fills the memory behind these arrays, which are all there are. Returns whether that guards a call."""
        last = max(at + size for at, size in self._ranges(arrays))
        # A result of an earlier call may still be there, in a cycle of Python's or on its way out.
        if self._free() < self.bytes - last:
            gc.collect()
        left, blocks = min(self.bytes - last, self._free() - SPARE) - MARGIN, []
        while left >= LEAST:
            size = 1 << (left.bit_length() - 1)
            blocks.append(_full(size // 4, _word(pattern)))
            left -= size
        jax.block_until_ready(blocks)
        for block in blocks:
            block.delete()
        self.before = self._touched(pattern)
        behind = self.before[-(-last // CHUNK) :]
        return behind.size * CHUNK >= LEAST_GUARDED and float(behind.mean()) < 0.5

    def damage(self, arrays: Iterable[jax.Array], workspace: int, pattern: int) -> str | None:
        """What was written since that lies in no array, nor in one block of so many bytes; None if nothing."""
        ranges = self._ranges(arrays)
        touched = self._touched(pattern) & ~self.before
        for at, size in ranges:
            touched[at // CHUNK : -(-(at + size) // CHUNK)] = False
        found = np.flatnonzero(touched)
        if found.size and (found[-1] + 1 - found[0]) * CHUNK > -(-workspace // CHUNK) * CHUNK:
            places = ", ".join(self._near(int(i) * CHUNK, ranges) for i in (found[0], found[-1]))
            beside = f" and of a workspace of {workspace} bytes" if workspace else ""
            return f"{found.size} pieces of {CHUNK} bytes were written outside of every array{beside}: {places}"
        for at, size in ranges:
            if size % CHUNK and not self.before[(at + size) // CHUNK] and (message := self._after(at, size, pattern)):
                return message
        return None

    def _free(self) -> int:
        """Bytes of the largest piece of memory that no array has."""
        return int((self.device.memory_stats() or {})["largest_free_block_bytes"])

    def _ranges(self, arrays: Iterable[jax.Array]) -> list[tuple[int, int]]:
        """Where arrays lie, the map's own among them, counted from the first byte that is looked at."""
        places = [(v.unsafe_buffer_pointer() - self.start, v.nbytes) for v in (*arrays, self.map)]
        return [(at, size) for at, size in places if at >= 0 and at + size <= self.bytes]

    def _touched(self, pattern: int) -> np.ndarray:
        """Which pieces hold something else than the pattern."""
        place = self.map.unsafe_buffer_pointer()
        self.map = _touched(self.words, _word(pattern), self.map)
        if self.map.unsafe_buffer_pointer() != place:
            raise RuntimeError("XLA did not write the map into its own memory.")
        return np.array(self.map)

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
def _full(count: int, pattern: jax.Array) -> jax.Array:
    return jnp.full(count, pattern)


def _word(pattern: int) -> np.ndarray:
    return np.array(pattern, np.uint32)


@ft.partial(jax.jit, donate_argnums=2, keep_unused=True)
def _touched(words: jax.Array, pattern: jax.Array, into: jax.Array) -> jax.Array:
    """Which pieces have a word that is not the pattern; in memory of its own, so that nothing is overwritten."""
    return (words.reshape(-1, WORDS) != pattern).any(1)
