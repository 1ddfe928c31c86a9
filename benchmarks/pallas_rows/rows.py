"""What the row kernels share: the partition of rows over warps, sums over a row, and a ring of slots for rows to come.

P warps share a row, P = 1 or a multiple of 4. A warpgroup holds arrays (4, n), a warp to each line: four rows if P = 1,
else four of the row's P parts of n = length / P elements. Pallas reduces a line by shuffles; the results of the P parts
are joined through shared memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUP, BLOCK = "warpgroup", "block"
MULTIPROCESSORS = 132  # of an H200


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rows of a length are partitioned.

    Attributes:
      length: of a row, a multiple of 32 `warps`.
      warps: P, the warps that share a row: 1 or a multiple of 4.
      rows: arrays that a warpgroup works on at a time.
      blocks: persistent blocks of a multiprocessor; 0: as many blocks as there is work for.
      stages: slots in shared memory that a block's next rows are copied to; 0: rows are loaded to registers.
    """

    length: int
    warps: int = 1
    rows: int = 1
    blocks: int = 0
    stages: int = 0

    @property
    def warpgroups(self) -> int:
        return max(1, self.warps // 4)

    @property
    def part(self) -> int:
        return self.length // self.warps

    @property
    def rows_a_step(self) -> int:
        return self.rows * (1 if self.warps > 1 else 4)

    def steps(self, count: int) -> int:
        """For so many rows, whole arrays of them; the last step may have arrays beyond the end."""
        assert self.warps > 1 or count % 4 == 0
        return -(-count // self.rows_a_step)

    def grid(self, steps: int) -> int:
        """The blocks of a launch."""
        return min(steps, MULTIPROCESSORS * self.blocks) if self.blocks else steps


def tiled(tiling: tuple, warps: Any, lanes: tuple, reduced: tuple[int, ...] = ()) -> Any:
    layout = fa.TiledLayout(fa.Tiling(tiling), warps, lanes, -1, _check_canonical=False).canonicalize()
    layout = layout.reduce(reduced) if reduced else layout
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


class Rows:
    """A warpgroup's view of arrays (count, length), within a kernel."""

    def __init__(self, plan: Plan, count: int, itemsize: int) -> None:
        self.plan, self.count = plan, count
        self.height, self.whole = 4 if plan.warps == 1 else 1, count % plan.rows_a_step == 0
        vector = 16 // itemsize
        while plan.part % (32 * vector):
            vector //= 2
        tiling = ((4, 32 * vector), (1, 32 * vector), (1, vector))
        self.full, self.column, self.row = (tiled(tiling, (-6,), (-3,), reduced) for reduced in ((), (1,), (0,)))
        self.shape = (4, plan.part)
        self.warpgroup = lax.axis_index(WARPGROUP) if plan.warpgroups > 1 else 0
        self.first = 4 * self.warpgroup  # of the row's parts

    def number(self, step: Any, j: int) -> Any:
        """The first row of the j-th array of a step; of one beyond the end that of the last array."""
        number, height = step * self.plan.rows_a_step + j * self.height, self.height
        return number if self.whole else jnp.minimum(number, self.count - height)

    def within(self, step: Any, j: int) -> Callable:
        """A decorator: does what is stored for an array, unless it is beyond the end."""
        if self.whole:
            return lambda store: store()
        return pl.when(step * self.plan.rows_a_step + j * self.height < self.count)

    def at(self, ref: Any, step: Any, j: int) -> Any:
        """The j-th array of a step, in an array shaped by `view`."""
        number = self.number(step, j)
        return ref.at[pl.ds(number, 4)] if self.plan.warps == 1 else ref.at[number, pl.ds(self.first, 4)]

    def load(self, ref: Any) -> Any:
        return load(ref, self.full)

    def parameter(self, ref: Any) -> Any:
        """Scale or bias, as wide as the warpgroup's array."""
        if self.plan.warps > 1:
            return self.load(ref.at[pl.ds(self.first, 4)])
        found = load(ref, self.row)
        return plgpu.layout_cast(lax.broadcast_in_dim(found, self.shape, (1,)), self.full)

    # A statistic is an array (4,) if P = 1, else a scalar.

    def zero(self) -> Any:
        if self.plan.warps > 1:
            return jnp.float32(0)
        return plgpu.layout_cast(jnp.zeros((4,), jnp.float32), self.column)

    def statistic(self, ref: Any, step: Any, j: int) -> Any:
        number = self.number(step, j)
        return ref[number] if self.plan.warps > 1 else load(ref.at[pl.ds(number, 4)], self.column)

    def put_statistic(self, ref: Any, step: Any, j: int, value: Any) -> None:
        number = self.number(step, j)
        if self.plan.warps == 1:
            put(ref.at[pl.ds(number, 4)], value)
            return

        @pl.when(self.first == 0)
        def _() -> None:
            ref[number] = value

    def wide(self, value: Any) -> Any:
        """A statistic, as wide as the warpgroup's array."""
        if self.plan.warps > 1:
            return value
        return plgpu.layout_cast(lax.broadcast_in_dim(value, self.shape, (0,)), self.full)


def view(plan: Plan, array: Any) -> Any:
    """An array with its last axis, a row's, split into parts."""
    return array.reshape(*array.shape[:-1], plan.warps, plan.part) if plan.warps > 1 else array


class Exchange:
    """Joins the results of a row's warps: one barrier, and memory for two exchanges in turn."""

    @staticmethod
    def scratch(plan: Plan, values: int) -> list[Any]:
        if plan.warps == 1:
            return []
        memory = plgpu.SMEM((2, values, plan.warps), jnp.float32)
        return [memory, plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=2)]

    def __init__(self, rows: Rows, scratch: tuple) -> None:
        self.rows, self.warps = rows, rows.plan.warps
        self.memory, self.barrier = scratch or (None, None)  # None: P = 1
        self.turn: Any = 0  # which memory is next; a step with an odd number of exchanges sets it

    def join(self, parts: list, reduce: Callable = jnp.sum) -> list:
        """From the warps' results (4,) to statistics."""
        if self.memory is None or self.barrier is None:
            return parts
        turn, self.turn = self.turn, 1 - self.turn
        for i, value in enumerate(parts):
            put(self.memory.at[turn, i, pl.ds(self.rows.first, 4)], value)
        meet(self.barrier.at[turn])
        lanes = (fa.Replicated(32 // self.warps), -2) if self.warps < 32 else (-2,)
        layout = tiled(((self.warps,), (1,)), (fa.Replicated(4),), lanes)
        return [reduce(load(self.memory.at[turn, i], layout)) for i in range(len(parts))]


class Ring:
    """Slots in shared memory for the next steps' rows; each warpgroup has its own."""

    @staticmethod
    def scratch(plan: Plan, dtypes: list) -> list[Any]:
        if not plan.stages:
            return []
        shape = (plan.warpgroups, plan.stages, plan.rows * 4, plan.part)
        barrier = plgpu.Barrier(num_arrivals=len(dtypes) * plan.rows, num_barriers=plan.warpgroups * plan.stages)
        return [*(plgpu.SMEM(shape, dtype) for dtype in dtypes), barrier]

    def __init__(self, rows: Rows, sources: list, scratch: tuple, step: Callable, count: Any) -> None:
        """`step(i)` is the number of the block's i-th step, of `count`."""
        self.rows, self.sources, self.step, self.count = rows, sources, step, count
        *self.slots, self.barrier = scratch
        self.first = rows.warpgroup * rows.plan.stages

    def ask(self, i: Any) -> None:
        """Starts the copies of the i-th step's rows."""
        plan = self.rows.plan

        @pl.when(i < self.count)
        def _() -> None:
            slot = lax.rem(jnp.int32(i), jnp.int32(plan.stages))
            barrier = self.barrier.at[self.first + slot]
            for source, memory in zip(self.sources, self.slots, strict=True):
                target = memory.at[self.rows.warpgroup, slot]
                for j in range(plan.rows):
                    start, part = self.rows.at(source, self.step(i), j), target.at[pl.ds(j * 4, 4)]
                    plgpu.copy_gmem_to_smem(start, part, barrier, oob_mode=plgpu.OOBFillMode.UNDEFINED)

    def wait(self, i: Any) -> list[list[Any]]:
        """Of each source the references to the arrays of the i-th step."""
        plan = self.rows.plan
        slot = lax.rem(jnp.int32(i), jnp.int32(plan.stages))
        plgpu.barrier_wait(self.barrier.at[self.first + slot])
        slots = [memory.at[self.rows.warpgroup, slot] for memory in self.slots]
        return [[s.at[pl.ds(j * 4, 4)] for j in range(plan.rows)] for s in slots]


def sums_scratch(plan: Plan) -> list[Any]:
    return [] if plan.warps > 1 else [plgpu.SMEM((4, plan.length), jnp.float32), plgpu.Barrier()]


def write_sums(rows: Rows, scratch: tuple, target: Any, value: Any) -> None:
    """Writes a block's sums over rows; if P = 1, the sum of its four warps' sums."""
    if not scratch:
        put(target.at[pl.ds(rows.first, 4)], value)
        return
    memory, barrier = scratch
    put(memory, value)
    meet(barrier)
    wide = min(512, rows.plan.length)
    layout = tiled(((1, wide), (1, wide // 4), (1, wide // 128)), (-5,), (-3,))
    for first in range(0, rows.plan.length, wide):
        columns = pl.ds(first, wide)
        put(target.at[columns], jnp.sum(load(memory.at[:, columns], layout), 0))
    meet(barrier)


def load(ref: Any, layout: Any) -> Any:
    """Loads an array, by accesses as wide as the layout has them."""
    return getattr(plgpu, "load")(ref, layout=layout, optimized=False)  # noqa: B009  (its arguments differ by release)


def put(ref: Any, value: Any) -> None:
    """Stores an array likewise; before JAX 0.12 there is no `store`, and nothing has to be asked for."""
    store = getattr(plgpu, "store", None)
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)


def meet(barrier: Any) -> None:
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def launch(body: Callable, plan: Plan, out: tuple, scratch: list, steps: int, name: str, interpret: Any) -> Any:
    """A kernel that calls body(step, count, references): step(i) is the number of the block's i-th step of `count`."""
    blocks = plan.grid(steps)
    threads = {"num_threads": plan.warpgroups, "thread_name": WARPGROUP} if plan.warpgroups > 1 else {}

    def run(*references: Any) -> None:
        block = lax.axis_index(BLOCK)
        count = 1 if blocks == steps else (steps - 1 - block) // blocks + 1
        body(lambda i: block + i * blocks, count, *references)

    return plgpu.kernel(
        run,
        out_type=out,
        grid=(blocks,),
        grid_names=(BLOCK,),
        scratch_types=scratch,
        kernel_name=name,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            approx_math=True,
            reduction_scratch_bytes=8192 if plan.warps == 1 else 512,
        ),
        **threads,
    )


def each_step(plan: Plan, arguments: tuple, work: Callable, state: Any = ()) -> Any:
    """Runs `state = work(i, arrays, state)` for a block's steps; `arguments` are a Ring's.

    Without a ring the next step's rows are loaded to registers before a step's are worked on.
    """
    rows, sources, ringed, step, count = arguments
    if ringed:
        ring = Ring(*arguments)
        for i in range(plan.stages):
            ring.ask(i)

        def ring_step(i: Any, state: Any) -> Any:
            arrays = [[rows.load(ref) for ref in refs] for refs in ring.wait(i)]
            plgpu.commit_smem()  # the whole warpgroup has read the slot, and a copy may write it
            ring.ask(i + plan.stages)
            return work(i, arrays, state)

        return lax.fori_loop(0, count, ring_step, state)
    arrays_of = lambda i: [[rows.load(rows.at(r, step(i), j)) for j in range(plan.rows)] for r in sources]
    if isinstance(count, int):
        return work(0, arrays_of(0), state)

    def next_step(i: Any, carry: Any) -> Any:
        arrays, state = carry
        following = arrays_of(jnp.minimum(i + 1, count - 1))
        return following, work(i, arrays, state)

    return lax.fori_loop(0, count, next_step, (arrays_of(0), state))[1]
