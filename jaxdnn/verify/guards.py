"""Guards around the memory of a call: bytes that it may not write are filled with a pattern and compared afterwards.

On a GPU of whose memory JAX reserves one piece when it starts (`random` asks for that), all free memory behind the
operands of a call is filled with a pattern before the call. Results and workspaces are allocated in that memory, so
they start out as the pattern and are surrounded by it. After the call everything but its operands, its results and its
workspace must still hold the pattern; so must the bytes between a result's end and the end of its last 256 bytes.

The allocator takes the smallest free piece that suffices, from that piece's beginning. If a workspace were allocated
directly behind a result, a write beyond the result would not be seen. Therefore one free piece is prepared for each
result, a little larger than it, between fences: small arrays that must not change. The allocator does not say where the
workspace is. But it is one block of known size, it overlaps no array, and it starts where another allocation ends: all
other bytes that were written must lie in one such block.

What is not found: a kernel that writes from one workspace of its program into another, because XLA allocates both in
one block; and a write beyond a result of up to 256 bytes into a workspace, if the allocator puts that workspace there.
The bytes behind an operand, up to the end of its last 256 bytes, are not compared. A read beyond an array is found only
by its effect on the result: the pattern is no number in float32, bfloat16 and float16, and a call is repeated with
other patterns.
"""

import functools as ft
import gc
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# NaN in float32, bfloat16 and float16; about one in these; all bits.
PATTERNS = (0x7FC07FC0, 0x3F803F80, 0xFFFFFFFF)
CHUNK = 256  # bytes; the allocator allocates multiples of these
WORDS = CHUNK // 4
LEAST = 1 << 12  # bytes; smaller free pieces are not filled
LEAST_GUARDED = 1 << 26  # bytes behind the operands; a call is guarded if most of these are filled
# Bytes at the end that stay free: the allocator does not split a piece of which less than 128 MiB would be left.
SPARE, MARGIN = 256 << 20, 8 << 20
PLUG = 26  # the largest plug, which fills a free piece below the operands' end, has 2^26 bytes
MOST = 1 << 30  # bytes that are compared: the allocator starts at the lowest free address
GUARD = 1 << 16  # bytes behind a result, at most
Range = tuple[int, int]  # the first byte, and how many


class Memory(Protocol):
    """Memory that can be filled and compared with a pattern, in pieces of `CHUNK` bytes."""

    bytes: int

    def ranges(self, arrays: Iterable[Any]) -> list[Range]:
        """The ranges of arrays, and of what the memory's owner has allocated in it."""
        ...

    def fill(self, last: int, pattern: int, holes: Sequence[int]) -> list[Range]:
        """Fills what is free from a byte on, but for a hole of each of these sizes; the ranges of what fences them."""
        ...

    def touched(self, pattern: int) -> np.ndarray:
        """Which pieces hold something else than the pattern."""
        ...

    def piece(self, number: int) -> np.ndarray:
        """A piece's bytes."""
        ...


class Guards:
    """The bytes around the arrays of a call in a memory, which must not change."""

    def __init__(self, memory: Memory):
        self.memory, self.before, self.fences = memory, np.zeros(0, bool), list[Range]()

    def fill(self, arrays: Iterable[Any], results: Sequence[int], pattern: int) -> bool:
        """Fills the memory behind all arrays that exist, for results of so many bytes.

        Returns whether a call is guarded: whether enough memory was filled.
        """
        last = max((at + size for at, size in self.memory.ranges(arrays)), default=0)
        self.fences = self.memory.fill(last, pattern, _holes(results))
        self.before = self.memory.touched(pattern)
        behind = self.before[-(-last // CHUNK) :]
        return behind.size * CHUNK >= min(LEAST_GUARDED, self.memory.bytes // 2) and float(behind.mean()) < 0.5

    def damage(self, arrays: Iterable[Any], workspace: int, pattern: int) -> str | None:
        """Describes bytes that were written outside of the arrays and of a workspace of so many bytes; None if none."""
        ranges = self.memory.ranges(arrays)
        owned = self._pieces(ranges)
        found = np.flatnonzero(self.memory.touched(pattern) & ~self.before & ~owned)
        kept = owned | self._pieces(self.fences)
        if found.size and not _is_workspace(found, kept, self.before, -(-workspace // CHUNK)):
            places = ", ".join(_near(int(i) * CHUNK, ranges) for i in dict.fromkeys((found[0], found[-1])))
            beside = f" and of a workspace of {workspace} bytes" if workspace else ""
            fences = int(self._pieces(self.fences)[found].sum())
            holds = " ".join(f"{word:08x}" for word in self.memory.piece(int(found[0])).view(np.uint32)[:4])
            return (
                f"{found.size} pieces of {CHUNK} bytes were written outside of every array{beside}: {places}; {fences} "
                f"of them are fences; the first holds {holds}"
            )
        for at, size in ranges:
            if size % CHUNK and not self.before[(at + size) // CHUNK]:
                wanted = np.full(WORDS, pattern, np.uint32).view(np.uint8)
                changed = int((self.memory.piece((at + size) // CHUNK) != wanted)[size % CHUNK :].sum())
                if changed:
                    return f"{changed} bytes right after an array of {size} bytes were written"
        return None

    def _pieces(self, ranges: Iterable[Range]) -> np.ndarray:
        """Which pieces they cover."""
        covered = np.zeros(self.before.size, bool)
        for at, size in ranges:
            covered[at // CHUNK : -(-(at + size) // CHUNK)] = True
        return covered


def _holes(results: Sequence[int]) -> list[int]:
    """Bytes of a free piece for each result, and for the table that XLA makes of several.

    What remains of a piece is smaller than the result, so that the allocator does not split it for another array.
    """
    sizes = [-(-size // CHUNK) * CHUNK for size in results if size]
    return [size + min(GUARD, size - CHUNK) for size in sizes] + [CHUNK] * (len(results) > 1)


def _is_workspace(found: np.ndarray, kept: np.ndarray, before: np.ndarray, pieces: int) -> bool:
    """Whether all pieces that were found lie in one block of so many that can be the workspace.

    It starts where free memory begins: behind an array or a fence, or anywhere in or behind memory that was not filled,
    of which nobody knows what is free.
    """
    used = kept | before
    starts = np.flatnonzero(~kept & np.concatenate([[True], used[:-1]]))
    starts = starts[(starts <= found[0]) & (found[-1] < starts + pieces)]
    return any(not kept[start : start + pieces].any() for start in starts)


def _within(at: int, size: int, most: int) -> Range | None:
    """The part of an array that lies in the bytes that are compared; None if it has none.

    An array that reaches beyond them is cut to that part: without it, its bytes would be taken for a wrong write.
    """
    first, last = max(at, 0), min(at + size, most)
    return (first, last - first) if first < last else None


def _near(at: int, ranges: list[Range]) -> str:
    """The place of a piece, by its distance from the nearest end or beginning of an array."""
    number, distance = min(
        ((i, at - start - size if at >= start + size else at - start) for i, (start, size) in enumerate(ranges)),
        key=lambda found: abs(found[1]),
    )
    return f"{distance} bytes from array {number}"


class DeviceMemory:
    """The memory that JAX has taken from the first GPU, all but the last of it. For CUDA alone."""

    def __init__(self) -> None:
        self.device = jax.local_devices()[0]
        # Allocated once, below the bytes that are compared. An array made for each use would be allocated among a
        # call's arrays until it is freed, and hold the pattern, so that its range could not be told from free memory.
        self.patterns = {p: jax.device_put(np.array(p, np.uint32), self.device) for p in PATTERNS}
        jax.block_until_ready(_full(WORDS, self.patterns[PATTERNS[0]]))  # now JAX has reserved the memory
        stats = self.device.memory_stats() or {}
        free = int(stats["pool_bytes"] - stats["bytes_in_use"])
        self.bytes = min(free - SPARE, MOST) // CHUNK * CHUNK
        if self.bytes <= LEAST_GUARDED:
            raise RuntimeError(f"of the device's memory {free} bytes are free for this process, too few for guards.")
        whole = jax.block_until_ready(_full(self.bytes // 4, self.patterns[PATTERNS[0]]))
        self.start = whole.unsafe_buffer_pointer()
        whole.delete()
        self.map = jax.block_until_ready(jnp.zeros(self.bytes // CHUNK, jnp.bool_))
        self.fences: list[jax.Array] = []
        self.plugs: list[jax.Array] = []
        self.words: jax.Array = jnp.asarray(_Words(self.start, self.bytes // 4), copy=False)
        if self.words.unsafe_buffer_pointer() != self.start:
            raise RuntimeError("JAX has copied the memory that is to be compared.")
        self.touched(PATTERNS[0])  # compiled here, because XLA's autotuner runs it on free memory

    def ranges(self, arrays: Iterable[jax.Array]) -> list[Range]:
        """The ranges of arrays, the map's own among them, counted from the first byte that is compared."""
        return self._places([*arrays, self.map])

    def _places(self, arrays: Iterable[jax.Array]) -> list[Range]:
        places = [(v.unsafe_buffer_pointer() - self.start, v.nbytes) for v in arrays]
        return list(filter(None, (_within(at, size, self.bytes) for at, size in places)))

    def fill(self, last: int, pattern: int, holes: Sequence[int]) -> list[Range]:
        """Fills what is free, but for `SPARE` and `MARGIN` at the end, by blocks that are freed at once."""
        self.fences.clear()
        self.plugs.clear()
        # A result of an earlier call may still be allocated: in a reference cycle, or until its deletion completes.
        if self._free() < self.bytes - last:
            gc.collect()
        self._plug(last, pattern)
        blocks = []
        for size in holes:  # copied from the host: a program that fills it would be compiled for each size
            blocks.append(jax.device_put(np.full(size // 4, pattern, np.uint32), self.device))
            self.fences.append(jax.device_put(np.full(WORDS, pattern, np.uint32), self.device))
        jax.block_until_ready(self.fences)
        fences = self._places(self.fences)
        last = max([last, *(at + size for at, size in fences)])
        left = min(self.bytes - last, self._free() - SPARE) - MARGIN
        while left >= LEAST:
            size = 1 << (left.bit_length() - 1)
            blocks.append(_full(size // 4, self.patterns[pattern]))
            left -= size
        jax.block_until_ready(blocks)
        for block in blocks:
            block.delete()
        return [*fences, *self._places(self.plugs)]

    def _plug(self, last: int, pattern: int) -> None:
        """Allocates every free piece below a byte, where the allocator would otherwise put fences and results.

        An array of the largest power of two bytes that fits takes a whole piece: the allocator does not split a piece
        that is less than twice as large as what is asked for.
        """
        for exponent in range(min(last.bit_length() - 1, PLUG), CHUNK.bit_length() - 2, -1):
            while True:
                block = jax.block_until_ready(_full((1 << exponent) // 4, self.patterns[pattern]))
                if block.unsafe_buffer_pointer() - self.start >= last:
                    block.delete()
                    break
                self.plugs.append(block)

    def touched(self, pattern: int) -> np.ndarray:
        """Which pieces hold something else than the pattern."""
        place = self.map.unsafe_buffer_pointer()
        self.map = _touched(self.words, self.patterns[pattern], self.map)
        if self.map.unsafe_buffer_pointer() != place:
            raise RuntimeError("XLA did not write the map into its own memory.")
        return np.array(self.map)

    def piece(self, number: int) -> np.ndarray:
        """A piece's bytes."""
        return np.asarray(lax.dynamic_slice(self.words, (number * WORDS,), (WORDS,))).view(np.uint8)

    def _free(self) -> int:
        """Bytes of the largest free piece."""
        return int((self.device.memory_stats() or {})["largest_free_block_bytes"])


class _Words:
    """Words of device memory as an object that JAX makes an array of, without a copy."""

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


@ft.partial(jax.jit, donate_argnums=2, keep_unused=True)
def _touched(words: jax.Array, pattern: jax.Array, into: jax.Array) -> jax.Array:
    """Which pieces have a word that is not the pattern; in memory of its own, so that nothing is overwritten."""
    return (words.reshape(-1, WORDS) != pattern).any(1)
