"""Guards of memory: writes where none may be are found, and nothing else; NumPy's memory stands in for a GPU's."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from jaxdnn.verify import guards
from jaxdnn.verify.guards import CHUNK, PATTERNS, Guards, Range

PIECES = 4096


@dataclasses.dataclass(frozen=True)
class Block:
    """What a program was given: so many bytes from `at` on."""

    at: int
    size: int
    given: int = 0  # bytes that no other block gets

    @property
    def end(self) -> int:
        return self.at + self.given


class Memory:
    """Memory that is given out as JAX's allocator does."""

    def __init__(self) -> None:
        self.bytes, self.blocks = PIECES * CHUNK, list[Block]()
        self.data = np.random.default_rng(0).integers(0, 256, self.bytes).astype(np.uint8)

    def give(self, size: int) -> Block:
        """The beginning of the smallest free piece that suffices; all of it, unless it is twice as large."""
        ends = [0, *(b.end for b in sorted(self.blocks, key=lambda b: b.at))]
        starts = [*(b.at for b in sorted(self.blocks, key=lambda b: b.at)), self.bytes]
        pieces = [(stop - at, at) for at, stop in zip(ends, starts, strict=True) if stop - at >= size]
        free, at = min(pieces)
        whole = -(-size // CHUNK) * CHUNK
        self.blocks.append(Block(at, size, free if free < 2 * whole else whole))
        return self.blocks[-1]

    def write(self, at: int, size: int) -> None:
        self.data[at : at + size] ^= 0x55

    def ranges(self, arrays: Iterable[Block]) -> list[Range]:
        return [(b.at, b.size) for b in arrays]

    def fill(self, last: int, pattern: int, holes: Sequence[int]) -> list[Range]:
        made = [(self.give(size), self.give(CHUNK)) for size in holes]
        self.blocks = [b for b in self.blocks if b not in [hole for hole, _ in made]]
        free = np.ones(self.bytes, bool)
        for block in self.blocks:
            free[block.at : block.end] = False
        free[: -(-last // CHUNK) * CHUNK] = False
        for _, fence in made:
            free[fence.at : fence.end] = True
        self.data[free] = np.full(self.bytes // 4, pattern, np.uint32).view(np.uint8)[free]
        return self.ranges(fence for _, fence in made)

    def touched(self, pattern: int) -> np.ndarray:
        return (self.data.view(np.uint32).reshape(PIECES, -1) != pattern).any(1)

    def piece(self, number: int) -> np.ndarray:
        return self.data[number * CHUNK : (number + 1) * CHUNK]


WORKSPACE, OUT, OTHER = 100 * CHUNK, 40 * CHUNK + 1001, 50 * CHUNK
# What is written beside the results and parts of the workspace: where, and how much.
FAULTS = {
    "a byte right after a result": lambda out, other, work: (out.at + OUT, 1),
    "the rest of a result's last piece": lambda out, other, work: (out.at + OUT, CHUNK - OUT % CHUNK),
    "right after a result of whole pieces": lambda out, other, work: (other.at + OTHER, 4),
    "a few pieces behind a result": lambda out, other, work: (other.at + OTHER + 3 * CHUNK, 2 * CHUNK),
    "right after the workspace": lambda out, other, work: (work.at + WORKSPACE, 1),
    "before the workspace": lambda out, other, work: (work.at - 1, 1),
    "far away": lambda out, other, work: (3000 * CHUNK + 17, 1),
}
ORDERS = ("out other table work", "work out other", "out work other", "other out table work", "out other work")


def _call(order: str, fault: str | None, workspace: int, *, hole: bool = False, pattern: int = PATTERNS[0]):
    """What guards find of a call that writes its results and some of its workspace, and a fault."""
    memory = Memory()
    guarding = Guards(memory)
    x, between, w = memory.give(1000), memory.give(40 * CHUNK), memory.give(3 * CHUNK)
    if hole:  # what was freed before the operands' end has not been filled
        memory.blocks.remove(between)
    assert guarding.fill([x, w], [OUT, OTHER], pattern)
    sizes = {"out": OUT, "other": OTHER, "work": workspace, "table": 16}
    given = {name: memory.give(sizes[name]) for name in order.split()}
    out, other, work = given["out"], given["other"], given.get("work", Block(CHUNK * 2000, 0))
    for result in (out, other):
        memory.write(result.at, result.size)
    if workspace:
        memory.write(work.at + workspace // 3, workspace // 4)  # no program writes all of it
    if fault:
        memory.write(*FAULTS[fault](out, other, work))
    return guarding.damage([x, w, out, other], workspace, pattern)


@pytest.mark.parametrize("pattern", PATTERNS, ids=hex)
@pytest.mark.parametrize("order", ORDERS)
def test_what_a_program_may_write_passes(order, pattern):
    for workspace in (WORKSPACE, 30 * CHUNK, CHUNK, 17):
        assert _call(order, None, workspace, pattern=pattern) is None
        assert _call(order, None, workspace, hole=True, pattern=pattern) is None
    assert _call(order.replace("work", ""), None, 0, pattern=pattern) is None


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("order", ORDERS)
def test_what_a_program_may_not_write_is_found(order, fault):
    """The workspace is larger than any of the faults, and most of it is not written."""
    found = _call(order, fault, WORKSPACE)
    assert found is not None
    assert "were written" in found
    if "a byte" in fault:
        assert found == f"1 bytes right after an array of {OUT} bytes were written"
    if "far away" in fault:  # the byte that was written is the 18th
        assert found.endswith("0 of them are fences; the first holds 7fc07fc0 7fc07fc0 7fc07fc0 7fc07fc0")
    assert _call(order.replace("work", ""), fault, 0) is not None


@pytest.mark.parametrize(
    ("at", "size", "wanted"),
    [(512, 256, (512, 256)), (-256, 512, (0, 256)), (3840, 1000, (3840, 256)), (4096, 8, None), (-512, 512, None)],
)
def test_an_array_that_reaches_beyond_what_is_looked_at_is_one_all_the_same(at, size, wanted):
    """Left out, what it holds had been reported as a whole block written by nobody."""
    assert guards._within(at, size, 4096) == wanted


def test_memory_that_is_not_filled_guards_nothing():
    memory = Memory()
    memory.give(PIECES // 2 * CHUNK)
    guarding = Guards(memory)
    memory.fill = lambda last, pattern, holes: []
    assert not guarding.fill([Block(0, 8)], [], PATTERNS[0])


def test_a_workspace_may_begin_in_memory_that_was_not_filled():
    """Pieces: an array, 3 that were not filled, then the workspace's other 5. It holds 8, and so begins in these 3."""
    kept, before = np.zeros(20, bool), np.zeros(20, bool)
    kept[[*range(4), *range(13, 20)]], before[4:7] = True, True
    assert guards._is_workspace(np.arange(7, 12), kept, before, 8)
    assert not guards._is_workspace(np.arange(7, 12), kept, np.zeros(20, bool), 7)  # all was filled: 4 to 10 at most
    assert not guards._is_workspace(np.arange(7, 13), kept, before, 5)  # longer than a workspace
