"""The groups that the channels of a thread's vector belong to.

A vector of `elements` neighbouring channels has channels of one group, or of several neighbouring ones, at most
`plan.cells`. Cell j of a vector is those of its channels that belong to the j-th of these groups. A thread has each
quantity of groups as a list with one register for each cell. A cell that its vector does not have repeats the one
before.
"""

import math
from collections.abc import Iterator, Sequence

from jaxdnn._src.hopper.ptx import real
from jaxdnn._src.norm.hopper.group_vectors import Vectors

ZERO = real(0.0)
NEVER = "never"  # in place of a predicate that never holds; "" is one that always holds


class Cells:
    """The cells of a thread's vector.

    Attributes:
      groups: the number of each cell's group within the cluster's part.
      exist: predicates: whether the vector has this cell.
      first: the number of the vector's first channel within its group.
      column: the number of the thread's column among the columns that have channels of the first cell's group.
    """

    def __init__(self, vectors: Vectors) -> None:
        self.vectors, self.e, self.plan = vectors, vectors.e, vectors.plan
        e, plan = self.e, self.plan
        elements, group = plan.elements, plan.group
        self.across = group % elements != 0 and elements % group != 0  # a vector may begin and end inside of groups
        self.groups, self.exist = [""], [""]
        self._predicates: dict[tuple[int, int], str] = {}
        if group % elements == 0:
            self.groups[0], self.column = vectors.divided(vectors.column, group // elements)
            self.first = self.column  # 0 in the same threads, and all that is asked of it: there is one cell
        elif not self.across:
            self.column = self.first = e.r("mov.b32", 0)
            self.groups[0] = e.r("mul.lo.s32", vectors.column, plan.cells)
        else:
            self.groups[0], self.first = vectors.divided(e.r("mul.lo.s32", vectors.column, elements), group)
            self.column = e.r("shr.u32", e.r("add.s32", self.first, elements - 1), elements.bit_length() - 1)
        for j in range(1, plan.cells):
            here = e.r("add.s32", self.groups[0], j)
            exists = self._reached(j, elements - 1)
            self.groups.append(e.r("selp.b32", here, self.groups[j - 1], exists) if exists else here)
            self.exist.append(exists)

    def _reached(self, j: int, i: int) -> str:
        """A predicate: whether channel i of the vector belongs to cell j or a later one."""
        plan = self.plan
        holds = {offset + i >= j * plan.group for offset in plan.offsets}
        if len(holds) == 1:
            return "" if holds.pop() else NEVER
        if (j, i) not in self._predicates:
            self._predicates[j, i] = self.e.p("setp.ge.s32", self.first, j * plan.group - i)
        return self._predicates[j, i]

    @property
    def together(self) -> Iterator[slice]:
        """The cells in runs whose groups are neighbours in memory, so that one instruction loads or stores a run."""
        size = 1 if self.across else math.gcd(4, self.plan.cells)
        for start in range(0, self.plan.cells, size):
            yield slice(start, start + size)

    # ---- between cells and channels ----------------------------------------------------------------------------------

    def to_channels(self, values: Sequence[str]) -> list[str]:
        """The value of its cell for each channel of the vector."""
        plan, found = self.plan, []
        for i in range(plan.elements):
            value = values[0]
            for j in range(1, plan.cells):
                reached = self._reached(j, i)
                if reached != NEVER:
                    value = self.e.f("selp.f32", values[j], value, reached) if reached else values[j]
            found.append(value)
        return found

    def from_channels(self, sums: Sequence[str]) -> list[str]:
        """The sum of each cell's channels, added in their order."""
        e, found = self.e, []
        for j in range(self.plan.cells):
            total = ""
            for i, value in enumerate(sums):
                begun, over = self._reached(j, i) if j else "", self._reached(j + 1, i)
                if begun == NEVER or not over:
                    continue
                if begun:
                    value = e.f("selp.f32", value, ZERO, begun)
                if over != NEVER:
                    value = e.f("selp.f32", ZERO, value, over)
                total = e.f("add.rn.f32", total, value) if total else value
            found.append(total)
        return found

    # ---- statistics in device memory ---------------------------------------------------------------------------------

    def load(self, name: str, image: str) -> list[str]:
        """A saved statistic (images, groups) of an image, for each cell."""
        found = []
        for cells in self.together:
            place = f"[{self._address(name, image, cells.start)}]"
            found += self.e.load_floats("global.nc", place, cells.stop - cells.start)
        return found

    def store(self, statistics: dict[str, list[str]], image: str, when: str = "") -> None:
        """Stores statistics of an image, each in the thread of the cluster's first row with the group's first channel.

        when: a predicate of the threads that store at all.
        """
        e = self.e
        row = e.both(e.p("setp.eq.u32", self.vectors.pixel, 0), when)
        for cells in self.together:
            number = cells.start
            first = e.both(row, self.exist[number] if number else e.p("setp.eq.u32", self.first, 0))
            for name, values in statistics.items():
                e.store_floats("global", f"[{self._address(name, image, number)}]", values[cells], when=first)

    def _address(self, name: str, image: str, cell: int) -> str:
        e, plan = self.e, self.plan
        number = e.r("mad.lo.s32", image, plan.parts, self.vectors.place)
        number = e.r("mad.lo.s32", number, plan.groups, self.groups[cell])
        return e.d("mad.wide.u32", number, 4, self.vectors.base[name])
