"""One block of threads of the matrix pipeline: its buffers and barriers, and what producer and consumers share."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from jaxdnn._src.conv.hopper.plan import (
    Config,
    Problem,
    a_box,
    a_slots,
    b_slots,
    out_columns,
    row_bytes,
    split,
    swizzled,
)
from jaxdnn._src.conv.hopper.scheduler import TileScheduler
from jaxdnn._src.core.compat import plgpu
from jaxdnn._src.hopper.wgmma import tiling_transform


class Cut:
    """What is static in a launch: boxes, buffers and counts."""

    def __init__(self, problem: Problem, config: Config):
        self.problem, self.config, self.scheduler = problem, config, TileScheduler(problem, config)
        part = split(config)
        if part is None:  # for the type checker: `check` has refused it
            raise ValueError(f"`config` {config} cannot run: the tile does not divide among the team's warpgroups")
        self.box, self.part = (config.images, *config.block), part
        self.consumers = config.teams * config.groups
        self.rows = config.rows // config.groups
        self.b_major = "mn" if problem.filter_dims[-1] == "j" else "k"
        self.b_pieces = config.columns // problem.chunk if self.b_major == "mn" else 1
        self.out_chunk = out_columns(problem, config)
        self.extra_chunks = [config.columns * np.dtype(d).itemsize // row_bytes(config, d) for d in problem.extras]
        self.a_loads, self.b_ringed = not config.halo, not config.resident  # whether the ring holds input and filter
        self.ringed = self.a_loads or self.b_ringed
        self.steps = math.prod(ax.taps for ax in problem.axes) * problem.chunks  # slots of a resident filter

    def blank(self) -> list[Any]:
        """The memory of the output tiles, used a second time for zeros: a piece of an output row for each warpgroup."""
        if not self.config.blank:
            return []
        problem, per, step = self.problem, self.config.blank, self.problem.axes[-1].out_step
        row = (per, step, problem.columns) if step > 1 else (per, problem.columns)
        pieces = step * problem.columns // problem.blank_columns
        shapes = [row, (pieces, per, problem.blank_columns)]
        return [plgpu.SMEM((self.consumers, *shape), problem.out_dtype) for shape in shapes]

    def staging(self, dtype: Any, chunks: int, per: int, others: Sequence[Any] = ()) -> Any:
        """Buffers of `per` columns, which TMA accesses as boxes and a warpgroup as a tiled matrix."""
        swizzle = swizzled(per * np.dtype(dtype).itemsize)
        return plgpu.RefUnion(
            plgpu.SMEM((self.consumers, chunks, *self.part, per), dtype, transforms=swizzle),
            plgpu.SMEM(
                (self.consumers, chunks, self.rows, per), dtype, transforms=(tiling_transform((8, per)), *swizzle)
            ),
            *others,
        )

    def scratch(self) -> dict[str, Any]:
        """The buffers and the barriers of a block, by name."""
        problem, config, chunk = self.problem, self.config, self.problem.chunk
        swizzle = swizzled(problem.swizzle)
        b_box = (self.b_pieces, chunk, chunk) if self.b_major == "mn" else (config.columns, chunk)
        refs: dict[str, Any] = {
            "a_ring": plgpu.SMEM(
                (a_slots(config), *a_box(problem, config), problem.a_chunk),
                problem.dtype,
                transforms=() if problem.window else swizzle,
            ),
            "b_ring": plgpu.SMEM((b_slots(problem, config), *b_box), problem.dtype, transforms=swizzle),
            "out": self.staging(problem.out_dtype, config.staged, self.out_chunk, self.blank()),
        }
        teams, stages = config.teams, config.stages
        if self.ringed:
            arrivals = int(self.a_loads) * (1 + problem.partial) + (self.b_pieces if self.b_ringed else 0)
            refs["full"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=teams * stages)
            refs["empty"] = plgpu.Barrier(num_arrivals=config.groups, num_barriers=stages)
        if config.halo:
            refs["a_full"] = plgpu.Barrier(num_arrivals=1, num_barriers=teams * config.halo)
            refs["a_empty"] = plgpu.Barrier(num_arrivals=config.groups, num_barriers=config.halo)
        if config.blank:
            refs["blank"] = plgpu.Barrier(num_arrivals=self.consumers)
        if config.resident:
            refs["b_full"] = plgpu.Barrier(num_arrivals=self.steps * self.b_pieces)
        if problem.extras:
            chunks = zip(problem.extras, self.extra_chunks, strict=True)
            refs["extra"] = tuple(self.staging(d, n, config.columns // n) for d, n in chunks)
            refs["extra_full"] = plgpu.Barrier(num_arrivals=sum(self.extra_chunks), num_barriers=self.consumers)
        return refs


class Block:
    """What producer and consumers of one block share: its operands, its buffers and its number among the blocks."""

    def __init__(self, cut: Cut, refs: Sequence[Any], scratch: dict[str, Any]):
        self.cut, self.problem, self.config, self.scheduler = cut, cut.problem, cut.config, cut.scheduler
        rest = list(refs)
        self.a, self.b = rest.pop(0), rest.pop(0)
        self.bias = rest.pop(0) if cut.problem.bias else None
        self.extras, self.y = rest[:-1], rest[-1]
        self.scratch = scratch
        self.a_ring, self.b_ring = scratch["a_ring"], scratch["b_ring"]
        self.out_box, self.out_matrix, *self.zeros = scratch["out"]
        self.wg, self.sm, self.sms = lax.axis_index("wg"), lax.axis_index("sm"), lax.axis_size("sm")
        self.mine = self.scheduler.share(self.sm, self.sms)
        self.image = (0,) if cut.problem.one_image else ()  # removes the axis of images from a box with one image
