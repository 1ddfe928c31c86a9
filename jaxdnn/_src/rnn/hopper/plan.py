"""How a recurrence is partitioned over clusters, blocks and warps.

The sequences are cut in sets of N, a multiple of 8, and a cluster runs all steps of one set. The units are cut among
the cluster's blocks, and a block's units in groups of eight: a group's rows of the recurrent matrix, for each gate,
belong to one warp for all steps, as operands of `mma`, in registers as far as these suffice and else in shared memory.
What neither holds in the largest cluster is read from device memory, or the second-level cache, in every step.

A tile is the 16 rows that one `mma` multiplies: two halves of 8 units, each for one gate. So all gates of a unit are in
one thread. Nothing is partitioned by the number of sequences, so that bits do not depend on it.
"""

import abc
import dataclasses
import functools as ft
from typing import ClassVar, Self

from jaxdnn._src.hopper import CLUSTERS_AT_ONCE

COLUMNS = 8  # sequences that one `mma` multiplies
CHUNK = 32  # units whose products two `mma` add: the length of a lane's vector of 16 bytes, times four lanes
SHARED = 226 << 10  # bytes of a block's shared memory
WARPS = 8  # the most of a block, so that a thread may have 255 registers
MORE = 3  # operands beyond these, for which a few other registers are spilled, where shared memory needs it
FLYING = 3  # pairs of operands that are being read from device memory, each in eight registers
# Of every kind of cell: the halves of its tiles, (gate, group of units) or None, and the groups of a warp.
Half = tuple[int, int] | None
TILES: dict[str, tuple[tuple[Half, Half], ...]] = {
    "lstm": (((0, 0), (1, 0)), ((2, 0), (3, 0))),
    "gru_after": (((0, 0), (1, 0)), ((2, 0), None)),
    "tanh": (((0, 0), (0, 1)),),
    "relu": (((0, 0), (0, 1)),),
}
CLUSTERS = (2, 4, 8, 16)
PORTABLE = 8  # the most blocks of a cluster that every device of the kind starts
AT_ONCE = {**CLUSTERS_AT_ONCE, 16: 7}  # clusters that an H200 ran at once in a test
TIMED_ROUNDS = 3  # the most in which clusters were timed
IN_SIXTEEN, STREAMED = 128, 64  # sequences up to which clusters of sixteen, and these streaming, are faster than XLA
LINE = 128  # bytes of eight units of eight sequences
AHEAD = 2  # steps by which what is read is fetched into the second-level cache


@dataclasses.dataclass(frozen=True)
class Given:
    """What a launch computes.

    Attributes:
      steps, batch: T and the number of sequences.
      reverse, ragged, resets, clip: as in `RnnSpec`.
      saves: whether results for derivatives are stored.
    """

    steps: int
    batch: int
    reverse: bool = False
    ragged: bool = False
    resets: bool = False
    clip: tuple[float, float] | None = None
    saves: bool = False


@dataclasses.dataclass(frozen=True)
class Partition(abc.ABC):
    """How the units are partitioned; `Plan` is that of the forward pass, `backward_plan.Plan` that of the gradient.

    Attributes:
      cell: a key of `TILES`; units: H; dtype: "bf16" or "f16".
      cluster: blocks that share the units.
      tiles: sets of eight sequences that a cluster runs.
      kept: operands of `mma`, of a warp's part of the recurrent matrix, that are in registers.
      streamed: those that are read from device memory in every step.
    """

    most_kept: ClassVar[tuple[int, ...]]  # the most operands in registers, by the sets of eight sequences
    sets: ClassVar[tuple[int, ...]]  # sets of eight sequences that a cluster is given

    cell: str
    units: int
    dtype: str
    cluster: int
    tiles: int = 1
    kept: int = 0
    streamed: int = 0

    @property
    @abc.abstractmethod
    def groups(self) -> int:
        """Groups of eight units that a warp has."""

    @property
    @abc.abstractmethod
    def operands(self) -> int:
        """Operands of `mma`, each of four registers, of a warp's part of the recurrent matrix."""

    @property
    @abc.abstractmethod
    def shared(self) -> int:
        """Bytes of a block's shared memory."""

    @abc.abstractmethod
    def step_cycles(self) -> float:
        """Cycles of a step, but for a factor of 1.0 to 1.3 by 23 kernels on an H200."""

    @property
    def is_whole(self) -> bool:
        """Whether blocks and warps divide the units."""
        return self.units % (8 * self.groups * self.cluster) == 0

    @property
    def own(self) -> int:
        """Units of a block."""
        return self.units // self.cluster

    @property
    def warps(self) -> int:
        """Warps of a block that have units."""
        return self.own // (8 * self.groups)

    @property
    def threads(self) -> int:
        return -(-self.warps // 4) * 128

    @property
    def sequences(self) -> int:
        """N."""
        return self.tiles * COLUMNS

    @property
    def matrix(self) -> int:
        """Bytes of the recurrent matrix in a block's shared memory."""
        return (self.operands - self.kept - self.streamed) * 512 * self.warps

    def with_tiles(self, tiles: int) -> Self | None:
        """The partition for so many sets of eight sequences, which also need registers; None if memory is short."""
        most = self.most_kept[tiles - 1]
        for kept in range(most, most + MORE + 1):
            found = dataclasses.replace(self, tiles=tiles, kept=min(self.operands, kept), streamed=0)
            if found.shared <= SHARED:
                return found
        if self.cluster < CLUSTERS[-1] or (tiles > 1 and not self.streamed):
            return None
        kept = most - 2 * FLYING
        for streamed in range(2, self.operands - kept + 1, 2):
            found = dataclasses.replace(self, tiles=tiles, kept=kept, streamed=streamed)
            if found.shared <= SHARED:
                return found
        return None

    @property
    def counts(self) -> tuple[int, ...]:
        """The sets of sequences among which `choose` chooses."""
        return self.sets

    @property
    def streaming(self) -> float:
        """Cycles in which a multiprocessor reads from the second-level cache what is streamed."""
        return self.streamed * 512 * self.warps / 64

    def clusters(self, batch: int) -> int:
        return -(-batch // self.sequences)

    def rounds(self, batch: int) -> int:
        """How often in turn the device runs as many clusters as it can."""
        return -(-self.clusters(batch) // AT_ONCE[self.cluster])

    @classmethod
    @ft.cache
    def least(cls, cell: str, units: int, dtype: str) -> Self | None:
        """The smallest cluster that holds the matrix, or else the largest; the cell and its units decide alone."""
        if cell not in TILES:
            return None
        plans = (cls(cell, units, dtype, cluster) for cluster in CLUSTERS)
        fitting = (plan.with_tiles(1) for plan in plans if plan.is_whole and plan.warps <= WARPS)
        return next((plan for plan in fitting if plan is not None), None)

    @classmethod
    def choose(cls, cell: str, units: int, dtype: str, batch: int) -> Self | None:
        """The partition, with the number of sequences of a cluster that is fastest by a model of all rounds' steps."""
        least = cls.least(cell, units, dtype)
        if least is None:
            return None
        plans = [plan for tiles in least.counts if (plan := least.with_tiles(tiles)) is not None]
        return min(plans, key=lambda plan: plan.rounds(batch) * plan.step_cycles())


class Plan(Partition):
    """The forward pass by rows of the matrix."""

    most_kept = (44, 38, 32, 26)
    sets = (1, 2, 4)  # three were timed with conditions on sequences that do not exist alone

    @property
    def halves(self) -> tuple[tuple[int, int], ...]:
        """The halves of the tiles that have rows."""
        return tuple(half for tile in TILES[self.cell] for half in tile if half is not None)

    @property
    def groups(self) -> int:
        return 1 + max(group for _, group in self.halves)

    @property
    def is_whole(self) -> bool:
        return self.units % CHUNK == 0 and super().is_whole

    @property
    def chunks(self) -> int:
        return self.units // CHUNK

    @property
    def operands(self) -> int:
        return self.chunks * len(TILES[self.cell]) * 2

    @property
    def state(self) -> int:
        """Bytes of h of all units and of a cluster's sequences."""
        return self.units * self.sequences * 2

    @property
    def shared(self) -> int:
        """Two states, two mbarriers, and the rest of the matrix."""
        return 2 * self.state + 128 + self.matrix

    def step_cycles(self) -> float:
        multiplied = self.warps * self.chunks * 2 * len(TILES[self.cell]) * self.tiles * 1.53
        read = (self.matrix + self.warps * self.state) / 128 + self.streaming
        return multiplied + read + 600 + 250 * self.tiles
