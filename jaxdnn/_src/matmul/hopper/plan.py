"""Grouped products on Hopper: what is computed (problems), how the work is tiled (configurations), and which runs.

A tile of `grouped_matmul` is up to `Config.rows` rows of one group by a range of columns. A tile of its gradient in the
matrices is a block of one group's matrix.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.sizes import SHARED_BYTES, aligned, ceil_div

SWIZZLE = 128  # bytes of a row of a box in shared memory
# Rows and columns of a tile; teams and the warpgroups of a team.
TILES = ((128, 256, 1, 2), (256, 128, 1, 2), (128, 128, 2, 1), (64, 256, 2, 1), (64, 128, 2, 1), (64, 64, 2, 1))
# Fitted to what four tiles took of three shapes and their gradients on an H200 (`benchmarks/notes-matmul.md`): bytes of
# shared memory a cycle; cycles to store a row and 64 columns of a warpgroup; what two teams gain by hiding the stores;
# the cost of a partial last wave, as a share of a full one.
_SHARED_RATE, _EPILOGUE_ROW, _OVERLAP, _WAVES = 119.0, 10.0, 1.4, 0.62
DEPTH = 64  # products that a step adds: SWIZZLE bytes of 16-bit numbers, and rows of the gradient's boxes


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is computed; every field is static.

    Attributes:
      gradient: whether the result is that of `grouped_matmul_wgrad`.
      lists: how many lists of group sizes there are, each of which has rows and matrices of its own.
      rows, groups: of one list.
      terms: columns of a.
      columns: of the matrices, and so of the result.
      transposed: whether the matrices are stored as (columns, terms).
    """

    gradient: bool
    lists: int
    rows: int
    groups: int
    terms: int
    columns: int
    dtype: Any
    out_dtype: Any
    transposed: bool = False

    @property
    def matrices(self) -> int:
        return self.lists * self.groups

    @property
    def steps(self) -> int:
        """Slots of the ring that a tile of the product takes."""
        return ceil_div(self.terms, DEPTH)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is tiled. No field changes a bit of the result.

    Attributes:
      rows, columns: of a tile.
      stages: slots of the ring between producer and consumers.
      teams: consumer teams, which take tiles in turn.
      members: warpgroups of a team, which share the rows of a tile.
      staged: buffers of 128 bytes of columns that a warpgroup stores from in rotation.
      panel: tiles of rows that are taken before the next columns, of a product.
    """

    rows: int
    columns: int
    stages: int
    teams: int
    members: int
    staged: int = 1
    panel: int = 8

    @property
    def consumers(self) -> int:
        return self.teams * self.members

    @property
    def part(self) -> int:
        """Rows of a warpgroup."""
        return self.rows // self.members


def out_columns(problem: Problem) -> int:
    """Columns that are stored at a time."""
    return SWIZZLE // np.dtype(problem.out_dtype).itemsize


def shared_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a configuration needs, without barriers (`check` keeps 2048 bytes for them)."""
    ring = sum(aligned(config.stages * n * SWIZZLE) for n in (config.rows, config.columns))
    return ring + aligned(config.consumers * config.staged * config.part * SWIZZLE)


def check(problem: Problem, config: Config) -> str | None:
    """Why a configuration cannot run, or None."""
    if config.rows % (64 * config.members) or config.columns % DEPTH or max(config.rows, config.columns) > 256:
        return "a warpgroup has a multiple of 64 rows, and a tile whole chunks of columns, at most 256 of each"
    if config.part * config.columns > 128 * 128:
        return "the accumulator does not fit the registers"
    if config.consumers != 2:
        return "two warpgroups multiply"
    if config.members > 1 and config.columns // out_columns(problem) % config.staged:
        return "a warpgroup that has no rows of a tile must leave out whole rotations of its buffers"
    if shared_bytes(problem, config) > SHARED_BYTES - 2048:
        return "the ring does not fit shared memory"
    return None


def candidates(problem: Problem) -> Iterator[Config]:
    """Configurations that can run: of each tile the deepest ring, and more buffers where they leave it as deep."""
    for rows, columns, teams, members in TILES:
        deepest = 0
        for staged in (1, 2):
            for stages in range(8, 2, -1):
                config = Config(rows, columns, stages, teams, members, staged)
                if check(problem, config) is None:
                    if stages >= deepest:
                        yield config
                    deepest = stages
                    break


def choose(problem: Problem, sms: int) -> Config:
    """The configuration that runs: the cheapest by `cost`, of several the one with most buffers."""
    configs = list(candidates(problem))
    if pick := branches.picker():
        return pick(problem, configs, lambda config: branches.named("grouped", **decided(problem, config)))
    return min(configs, key=lambda config: (cost(problem, config, sms), -config.staged))


def cost(problem: Problem, config: Config, sms: int) -> float:
    """Estimated cycles, for groups of one size, that is the mean; the last tile of a group is half full.

    What a step takes is the time of the tensor cores, or of shared memory: the copy engine writes each slot once, and
    64 rows are multiplied by columns that are read anew.
    """
    mean = problem.rows / problem.groups
    units = max(1.0, mean / 64 + 0.5)  # of 64 rows, in a group
    columns = ceil_div(problem.columns, config.columns)
    if problem.gradient:
        tiles = problem.matrices * ceil_div(problem.terms, config.rows) * columns
        steps, height = units, config.rows / 64
    else:
        items = max(1.0, mean / config.rows + 0.5)
        tiles = problem.matrices * items * columns
        steps, height = float(problem.steps), units / items
    moved = (config.rows + config.columns + height * (64 + config.columns)) * SWIZZLE
    products = steps * max(height * 2 * config.columns, moved / _SHARED_RATE)
    epilogue = 64 * height / config.members * config.columns / 64 * _EPILOGUE_ROW
    tile = max(products, (products + epilogue) / _OVERLAP) if config.teams == 2 else products + epilogue
    return tile * (_WAVES * math.ceil(tiles / sms) + (1 - _WAVES) * tiles / sms)


def decided(problem: Problem, config: Config) -> dict[str, Any]:
    """The branches of the planner that a configuration takes, by the names in `branches.EVERY`."""
    height = problem.terms if problem.gradient else problem.rows
    return dict(
        operands=np.dtype(problem.dtype).name,
        result=np.dtype(problem.out_dtype).name,
        pass_="gradient" if problem.gradient else "product",
        matrices="transposed" if problem.transposed else "as they are",
        rows=config.rows,
        columns=config.columns,
        teams=f"{config.teams} x {config.members}",
        stages=config.stages,
        staged=config.staged,
        tail_of_rows=bool(height % config.rows),
        tail_of_columns=bool(problem.columns % config.columns),
        tail_of_terms=bool(not problem.gradient and problem.terms % DEPTH),
    )
