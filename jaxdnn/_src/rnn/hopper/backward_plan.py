"""How a recurrence's gradient is partitioned, as `plan` says of the forward pass, but by columns of the matrix.

A block has its units' columns of the recurrent matrix, of every gate, for all units. Each warp has the pointwise work
of eight units, and in the product the rows of `cluster` groups of eight.
"""

from jaxdnn._src.rnn.hopper.plan import CLUSTERS, LINE, Partition
from jaxdnn._src.rnn.steps import GATES


class Plan(Partition):
    """The gradient by columns of the matrix; a warp has eight units, and `cluster` / 2 tiles of 16 rows."""

    most_kept = (44, 36, 28, 20)
    sets = (1, 2)  # more were not timed

    @property
    def counts(self) -> tuple[int, ...]:
        """In clusters of sixteen one: of 640 units two sets took 2.07 times as long on an H200, two rounds 1.9."""
        return self.sets if self.cluster < CLUSTERS[-1] or self.streamed else self.sets[:1]

    @property
    def groups(self) -> int:
        return 1

    @property
    def gates(self) -> int:
        return GATES[self.cell]

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
    def shared(self) -> int:
        return self.before_joined + 2 * self.joined + self.matrix

    def step_cycles(self) -> float:
        multiplied = self.warps * self.operands * self.tiles * 1.53
        read = (self.matrix + self.warps * self.joined) / 128 + self.streaming
        return multiplied + read + 700 + self.tiles * (300 + self.cluster * 64)
