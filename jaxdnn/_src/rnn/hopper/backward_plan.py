"""How a recurrence's gradient is partitioned, as `plan` says of the forward pass, but by columns of the matrix.

A block has its units' columns of the recurrent matrix, of every gate, for all units. Each warp has the pointwise work
of eight units, and in the product the rows of `cluster` groups of eight.
"""

import dataclasses
import functools as ft

from jaxdnn._src.rnn.hopper.plan import AT_ONCE, CLUSTERS, COLUMNS, LINE, MORE, SHARED, TILES, WARPS
from jaxdnn._src.rnn.steps import GATES

KEPT = (44, 36, 28, 20)  # the most operands in registers, by the sets of eight sequences
SETS = (1, 2)  # that a cluster is given; more were not timed


@dataclasses.dataclass(frozen=True)
class Plan:
    """A partition, as `plan.Plan` of the forward pass; a warp has eight units, and `cluster` / 2 tiles of 16 rows."""

    cell: str
    units: int
    dtype: str
    cluster: int
    tiles: int = 1
    kept: int = 0

    @property
    def gates(self) -> int:
        return GATES[self.cell]

    @property
    def own(self) -> int:
        """Units of a block."""
        return self.units // self.cluster

    @property
    def warps(self) -> int:
        return self.own // 8

    @property
    def threads(self) -> int:
        return -(-self.warps // 4) * 128

    @property
    def sequences(self) -> int:
        return self.tiles * COLUMNS

    @property
    def rows(self) -> int:
        """Tiles of 16 rows of a warp."""
        return self.cluster // 2

    @property
    def columns(self) -> int:
        """Groups of eight columns of a block."""
        return self.warps * self.gates

    @property
    def chunks(self) -> int:
        """Of four groups of columns; the last one may have groups of zeros."""
        return -(-self.columns // 4)

    @property
    def operands(self) -> int:
        return self.chunks * self.rows * 2

    @property
    def received(self) -> int:
        """Bytes of a buffer: a pair of sums for each source, unit and two sequences."""
        return self.tiles * self.warps * self.cluster * 256

    @property
    def joined(self) -> int:
        """Bytes of a block's derivatives in a step."""
        return self.chunks * 4 * LINE * self.tiles

    @property
    def together(self) -> bool:
        """Whether all units of a warp's rows are one block's."""
        return self.warps % self.cluster == 0

    @property
    def table(self) -> int:
        """Bytes of a warp's table of where its sums go."""
        return 0 if self.together else 8 * self.cluster

    @property
    def before_joined(self) -> int:
        """Bytes of what is sent, of the mbarriers, and of tables."""
        return 2 * self.received + 128 + -(-self.warps * self.table // 128) * 128

    @property
    def matrix(self) -> int:
        return (self.operands - self.kept) * 512 * self.warps

    @property
    def shared(self) -> int:
        return self.before_joined + 2 * self.joined + self.matrix


@ft.cache
def partition(cell: str, units: int, dtype: str) -> Plan | None:
    """The smallest cluster that holds the matrix, which the cell and its units decide alone."""
    if cell not in TILES:
        return None
    for cluster in CLUSTERS:
        plan = Plan(cell, units, dtype, cluster)
        if units % (8 * cluster) or plan.warps > WARPS:
            continue
        plan = with_tiles(plan, 1)
        if plan is not None:
            return plan
    return None


def with_tiles(plan: Plan, tiles: int) -> Plan | None:
    """The partition for so many sets of eight sequences; None if shared memory is short."""
    for kept in range(KEPT[tiles - 1], KEPT[tiles - 1] + MORE + 1):
        found = dataclasses.replace(plan, tiles=tiles, kept=min(plan.operands, kept))
        if found.shared <= SHARED:
            return found
    return None


def choose(cell: str, units: int, dtype: str, batch: int) -> Plan | None:
    least = partition(cell, units, dtype)
    if least is None:
        return None
    plans = [with_tiles(least, tiles) for tiles in SETS]
    return min((plan for plan in plans if plan), key=lambda plan: time(plan, batch))


def clusters(plan: Plan, batch: int) -> int:
    return -(-batch // plan.sequences)


def rounds(plan: Plan, batch: int) -> int:
    return -(-clusters(plan, batch) // AT_ONCE[plan.cluster])


def time(plan: Plan, batch: int) -> float:
    """Cycles of a step in all rounds."""
    multiplied = plan.warps * plan.operands * plan.tiles * 1.53
    read = (plan.matrix + plan.warps * plan.joined) / 128
    return rounds(plan, batch) * (multiplied + read + 700 + plan.tiles * (300 + plan.cluster * 64))
