"""The PTX of the columns' sums in batch normalisation's gradients, reading dy and x once.

A thread accumulates, row after row, for each of its columns

    Σ dy        Σ dy (x - μ)        and for float32 Σ (x - μ), which corrects for the rounding of the saved mean

and these are added over the lines of a block; XLA adds the splits' sums. `batch_walk` states the order.
"""

import functools as ft
from collections.abc import Sequence

from jaxdnn._src.norm.hopper.batch_walk import ZERO, ColumnPlan, Walk, Words


def sums_of(plan: ColumnPlan) -> int:
    """The number of sums of a column."""
    return 3 if plan.dtype == "f32" else 2


@ft.lru_cache
def sums(plan: ColumnPlan) -> str:
    """The PTX of the kernel; operands: dy, x, mean, the splits' sums (splits, 2 or 3, columns), shared memory."""
    return _Sums(plan).code()


class _Sums(Walk):
    def __init__(self, plan: ColumnPlan) -> None:
        super().__init__(plan, 2, ("dy", "x", "mean", "sums"))
        self.mean = self.per_column("mean", "f32")
        new = lambda: [self.e.f("mov.f32", ZERO) for _ in range(plan.elements)]
        self.sums = [new() for _ in range(sums_of(plan))]

    @property
    def values(self) -> list[str]:
        return [value for total in self.sums for value in total]

    def add(self, chunks: Sequence[Words], exist: Sequence[str] = ()) -> None:
        """Rows that do not exist have a dy of 0."""
        e, dtype = self.e, self.plan.dtype
        of_dy, along, *rest = self.sums
        for i, (words, others) in enumerate(zip(*chunks, strict=True)):
            for j, (dy, x) in enumerate(zip(e.unpack(dtype, words), e.unpack(dtype, others), strict=True)):
                centred = e.f("sub.rn.f32", x, self.mean[j])
                e.op("add.rn.f32", of_dy[j], of_dy[j], dy)
                e.op("fma.rn.f32", along[j], dy, centred, along[j])
                for total in rest:
                    own = e.f("selp.f32", centred, ZERO, exist[i]) if exist else centred
                    e.op("add.rn.f32", total[j], total[j], own)

    def join(self, others: Sequence[str]) -> None:
        for value, other in zip(self.values, others, strict=True):
            self.e.op("add.rn.f32", value, value, other)

    def store(self) -> None:
        e, plan = self.e, self.plan
        row = 4 * plan.columns
        start = e.d("mad.wide.u32", self.split, len(self.sums) * row, self.columns_of("sums", 4 * plan.elements))
        for i, total in enumerate(self.sums):
            self.store_floats(start, i * row, total, self.inside)
