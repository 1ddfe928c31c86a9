"""A model of the recurrent kernels' exchange: warps at any speed, stores that arrive at any time, in any order.

Each warp of each block of a cluster runs by itself, one action at a time, and a random choice says which is next: a
warp, or one of the stores under way. A buffer has a slot for each sender; a read checks that each slot that it reads
has what the step before sent, no earlier and no later. A wait takes a phase by its parity, as the hardware does. So
who reads too early, who overwrites too early, and who waits for ever shows. A fault planted in the order of actions
must be found by some of the random orders.

    forward    every warp reads all slots of its block, and sends to its own slot of all blocks
    backward   a warp reads its slots from all blocks, and sends to slots of some blocks; between the two all warps
               of a block write, meet, and read what they have written
"""

import random
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

STEPS = 7
Action = Generator[Callable[[], bool] | None, None, None]  # yields what it waits for, or None


class Wrong(Exception):
    """What the exchange must not do."""


class Barrier:
    """An mbarrier of one arrival: a phase is over when it has been told of as many stores as have come."""

    def __init__(self) -> None:
        self.phase = self.due = self.came = 0
        self.told = False

    def expect(self, stores: int) -> None:
        if self.told:
            raise Wrong("two arrivals in a phase")
        self.told, self.due = True, stores
        self._check()

    def store(self) -> None:
        self.came += 1
        self._check()

    def _check(self) -> None:
        if self.told and self.came == self.due:
            self.phase, self.told, self.came = self.phase + 1, False, 0
        elif self.told and self.came > self.due:
            raise Wrong("more stores than a phase was told of")

    def over(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Block:
    def __init__(self) -> None:
        self.barriers = [Barrier(), Barrier()]
        self.slots: list[dict[Any, int]] = [{}, {}]
        self.joined: list[dict[int, int]] = [{}, {}]
        self.meeting: list[int] = []  # how often each warp has come


class Cluster:
    """The state that all warps share; `fault` is a name that an action looks for."""

    def __init__(self, which: str, blocks: int, warps: int, fault: str, rng: random.Random) -> None:
        self.which, self.warps, self.fault, self.rng = which, warps, fault, rng
        self.blocks = [Block() for _ in range(blocks)]
        self.under_way: list[tuple[Block, int, Any, int]] = []
        for block in self.blocks:
            block.meeting = [0] * warps
            for i in (1, 0):
                block.barriers[i].expect(self.expected)
            if which == "forward":
                block.slots[0] = {(b, w): 0 for b in range(blocks) for w in range(warps)}

    @property
    def expected(self) -> int:
        return len(self.blocks) * self.warps

    def run(self) -> None:
        actors = [self._warp(b, w) for b in range(len(self.blocks)) for w in range(self.warps)]
        waiting: dict[int, Callable[[], bool] | None] = dict.fromkeys(range(len(actors)))
        pace = [self.rng.choice((1, 1, 20)) for _ in actors]  # some warps are slow
        while waiting:
            able = [i for i, until in waiting.items() if until is None or until()]
            if not able and not self.under_way:
                raise Wrong("all wait for ever")
            if self.under_way and (not able or self.rng.random() < 0.4):
                block, buffer, slot, step = self.under_way.pop(self.rng.randrange(len(self.under_way)))
                block.slots[buffer][slot] = step
                block.barriers[buffer].store()
                continue
            chosen = self.rng.choices(able, [1 / pace[i] for i in able])[0]
            try:
                waiting[chosen] = next(actors[chosen])
            except StopIteration:
                del waiting[chosen]
        if self.under_way:
            raise Wrong("a store to a block that has ended")

    def _warp(self, rank: int, warp: int) -> Action:
        block = self.blocks[rank]
        last = STEPS if self.which == "backward" else STEPS - 1
        for step in range(last + 1):
            here = step % 2
            if step:
                yield from self._receive(block, warp, step, last)
            if self.which == "forward" or step:
                yield from self._read(block, rank, warp, step)
            if step == last:
                return
            if self.which == "backward":
                yield from self._join(block, warp, step)
            target = here if self.fault == "one buffer" else 1 - here
            for to, slot in self._targets(rank, warp):
                self.under_way.append((self.blocks[to], target, slot, step + 1))
                yield None

    def _receive(self, block: Block, warp: int, step: int, last: int) -> Action:
        barrier, parity = block.barriers[step % 2], (step - 1) // 2 % 2
        if self.fault == "one parity":
            parity = 0
        if self.fault != "no wait":
            yield lambda: barrier.over(parity)
        if warp == 0 and step + 2 <= last and self.fault != "no arrival":
            barrier.expect(self.expected)
        yield None

    def _read(self, block: Block, rank: int, warp: int, step: int) -> Action:
        for sender in [*self._senders(rank, warp)]:
            if block.slots[step % 2].get(sender, -1) != step:
                raise Wrong(f"in step {step} a slot has what step {block.slots[step % 2].get(sender)} has sent")
            yield None

    def _join(self, block: Block, warp: int, step: int) -> Action:
        place = 0 if self.fault == "one place to join" else step % 2
        block.joined[place][warp] = step
        block.meeting[warp] += 1
        if self.fault != "no meeting":
            yield lambda: min(block.meeting) > step
        for other in range(self.warps):
            if block.joined[place].get(other, -1) != step:
                raise Wrong(f"in step {step} a warp reads what another had joined in another step")
            yield None

    def _senders(self, rank: int, warp: int) -> Iterator[Any]:
        """The slots of its block that a warp reads."""
        if self.which == "forward":
            yield from ((b, w) for b in range(len(self.blocks)) for w in range(self.warps))
        else:
            yield from ((b, warp) for b in range(len(self.blocks)))

    def _targets(self, rank: int, warp: int) -> Iterator[tuple[int, Any]]:
        """The blocks and slots to which a warp sends."""
        count = len(self.blocks)
        if self.which == "forward":
            yield from ((b, (rank, warp)) for b in range(count))
        else:  # of eight units and more of all blocks, those of this warp's rows
            for half in range(warp * count, (warp + 1) * count):
                yield half // self.warps, (rank, half % self.warps)


def outcomes(which: str, blocks: int, warps: int, fault: str, tries: int) -> list[str]:
    found = []
    for seed in range(tries):
        try:
            Cluster(which, blocks, warps, fault, random.Random(seed)).run()
        except Wrong as wrong:
            found.append(str(wrong))
    return found


SHAPES = ((2, 1), (2, 4), (4, 3), (8, 2))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_every_order_is_right(which: str, shape: tuple[int, int]):
    assert outcomes(which, *shape, "", 60) == []


FAULTS = ("no wait", "no arrival", "one parity", "one buffer", "no meeting", "one place to join")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_faults_are_found(which: str, fault: str):
    if which == "forward" and fault in ("no meeting", "one place to join"):
        pytest.skip("warps of a block meet in the backward kernel alone")
    assert len(outcomes(which, 2, 4, fault, 60)) > 5
