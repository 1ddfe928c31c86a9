"""The table of work items of a grouped product, and which tiles of them a block of threads computes.

How many rows a group has is data. A few operations of XLA make a table of it, whose length depends on the shapes alone;
the kernel reads there what a tile covers.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.hopper.sizes import ceil_div
from jaxdnn._src.matmul.grouped_primitive import group_ends
from jaxdnn._src.matmul.hopper.plan import DEPTH, Config, Problem

MATRIX, START, ROWS, STEPS = range(4)  # the columns of the table


def most(problem: Problem, config: Config) -> int:
    """The most items that any sizes make.

    The rows of a list are runs: one for each group, and one of rows that have no group. At most one item of each run
    is not full.
    """
    if problem.gradient:
        return problem.matrices
    runs = problem.lists * (problem.groups + 1)
    return (problem.lists * problem.rows + runs * (config.rows - 1)) // config.rows


def table(problem: Problem, config: Config, sizes: Array) -> Array:
    """int32 (1 + items, 4), of sizes (lists, groups).

    Row 0 begins with the number of items. A row follows for each: its matrix, its first row, how many rows it has, and
    how many steps its sums take. Rows of no group make items without a step, whose sums are zeros.
    """
    starts, ends = group_ends(sizes, problem.rows)
    lists = jnp.arange(problem.lists, dtype=jnp.int32)[:, None]
    if problem.gradient:
        matrix = jnp.arange(problem.matrices, dtype=jnp.int32)
        start, rows = ((v + shift).reshape(-1) for v, shift in ((starts, lists * problem.rows), (ends - starts, 0)))
        count = jnp.int32(problem.matrices)
        items = jnp.stack([matrix, start, rows, (rows + DEPTH - 1) // DEPTH], -1)
    else:
        starts = jnp.concatenate([starts, ends[:, -1:]], -1)
        ends = jnp.concatenate([ends, jnp.full_like(ends[:, :1], problem.rows)], -1)
        last = jnp.cumsum(((ends - starts + config.rows - 1) // config.rows).reshape(-1), dtype=jnp.int32)
        count, number = last[-1], jnp.arange(most(problem, config), dtype=jnp.int32)
        # The run of each item is the number of runs whose items all come before it.
        run = jnp.minimum(jnp.sum(last[None] <= number[:, None], 1, dtype=jnp.int32), last.size - 1)
        of_list, group = run // (problem.groups + 1), run % (problem.groups + 1)
        before = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])[run]
        start = starts.reshape(-1)[run] + (number - before) * config.rows
        rows = jnp.clip(ends.reshape(-1)[run] - start, 0, config.rows)
        matrix = of_list * problem.groups + jnp.minimum(group, problem.groups - 1)
        steps = jnp.where(group == problem.groups, 0, problem.steps)
        items = jnp.stack([matrix, start + of_list * problem.rows, rows, steps], -1)
    head = jnp.stack([count, *[jnp.int32(0)] * 3])[None]
    return jnp.concatenate([head, items.astype(jnp.int32)])


class Tiles:
    """Which tiles a block of threads computes and in which order: a numbering that producer and consumers share."""

    def __init__(self, problem: Problem, config: Config):
        self.problem, self.config = problem, config
        self.columns = ceil_div(problem.columns, config.columns)
        self.rows = ceil_div(problem.terms, config.rows) if problem.gradient else 1  # of one item

    def blocks(self, sms: int) -> int:
        """How many blocks of threads run on `sms` multiprocessors."""
        return min(sms, most(self.problem, self.config) * self.rows * self.columns)

    def share(self, items: Any, sm: Any, sms: Any) -> Any:
        """How many tiles block `sm` of `sms` computes, if there are so many items: every `sms`-th one."""
        return lax.div(items * (self.rows * self.columns) - sm + sms - 1, sms)

    def place(self, number: Any, items: Any) -> tuple[Any, Any, Any]:
        """The item of a tile, and the tile's number along the rows of the item and along the columns.

        Of a product some items (a panel) are multiplied by some columns before the next ones: tiles that are computed
        at the same time share their rows and their columns in the L2 cache.
        """
        if self.problem.gradient:
            per = self.rows * self.columns
            within = lax.rem(number, per)
            return lax.div(number, per), lax.rem(within, self.rows), lax.div(within, self.rows)
        per = self.config.panel * self.columns
        panel, within = lax.div(number, per), lax.rem(number, per)
        height = lax.min(jnp.int32(self.config.panel), items - panel * self.config.panel)
        return panel * self.config.panel + lax.rem(within, height), jnp.int32(0), lax.div(within, height)
