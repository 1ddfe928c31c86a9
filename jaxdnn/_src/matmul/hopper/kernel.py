"""Grouped products on Hopper: the kernel, for rows times the matrix of their group and for the gradient in these.

    y[m, n] = Σ_k a[m, k] b[g, k, n]       db[g, k, n] = Σ_(m in g) a[m, k] dy[m, n]

Schedule. A product is added over k in ascending order, a gradient over the rows of its group in ascending order, 64 in
a step, 16 at a time on the tensor core, into a float32 accumulator that is converted once. Nothing else determines the
order: neither the tile, nor the other groups, nor where a group's rows are.

Tiling. A tile of a product begins with any row of a group: the copy engine reads boxes of rows from any place on. Rows
of the next group that it reads as well are multiplied, but not stored: the last tile of a group is stored in pieces of
64, 32, ..., 1 rows. A gradient's last box of a group is cleared in shared memory from the next group's rows on, in both
operands, for these may be infinite.

Roles. As in the pipeline of convolutions: one block of threads on each multiprocessor, a producer warpgroup that loads
boxes into a ring of slots with barriers "full" and "empty", and consumer teams that take the tiles in turn. What a tile
covers is read from the table of `items`.

Limits: 16-bit operands of one dtype; whole rows of 16 bytes (the engine pads others).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core.compat import ir, llvm, pl, plgpu
from jaxdnn._src.hopper import branches, wgmma
from jaxdnn._src.hopper.cluster import address
from jaxdnn._src.hopper.launch import drain, kernel, when
from jaxdnn._src.matmul.hopper.items import MATRIX, ROWS, START, STEPS, Tiles, table
from jaxdnn._src.matmul.hopper.plan import DEPTH, SWIZZLE, Config, Problem, check, decided, out_columns

REGISTERS = 40, 232  # of a producer's thread, of a consumer's
THREADS = 128


def run(a: Array, b: Array, sizes: Array, problem: Problem, config: Config, sms: int) -> Array:
    """The product (rows of all lists, columns), or the gradient (matrices, terms, columns).

    Args:
      a: (rows of all lists, terms).
      b: the matrices, (matrices, terms, columns) or transposed; for the gradient (rows of all lists, columns).
      sizes: (lists, groups).
    """
    reason = check(problem, config)
    if reason is not None:
        raise ValueError(f"`config` {config} cannot run: {reason}")
    branches.record("grouped", **decided(problem, config))
    tiles = Tiles(problem, config)
    rows, columns, width = config.rows, config.columns, out_columns(problem)
    by_terms = (rows, DEPTH), (columns, DEPTH)  # boxes whose rows are along the reduction
    across = (rows // DEPTH, DEPTH, DEPTH), (columns // DEPTH, DEPTH, DEPTH)
    left = across[0] if problem.gradient else by_terms[0]
    right = by_terms[1] if problem.transposed else across[1]
    loads = (rows // DEPTH if problem.gradient else 1) + (1 if problem.transposed else columns // DEPTH)
    swizzled = (wgmma.swizzle_transform(SWIZZLE),)
    out, tiled = (config.consumers, config.staged, config.part, width), (wgmma.tiling_transform((8, width)), *swizzled)
    scratch: dict[str, Any] = dict(
        left=plgpu.SMEM((config.stages, *left), problem.dtype, transforms=swizzled),
        right=plgpu.SMEM((config.stages, *right), problem.dtype, transforms=swizzled),
        out=plgpu.RefUnion(
            plgpu.SMEM(out, problem.out_dtype, transforms=swizzled),
            plgpu.SMEM(out, problem.out_dtype, transforms=tiled),
        ),
        full=plgpu.Barrier(num_arrivals=loads, num_barriers=config.teams * config.stages),
        empty=plgpu.Barrier(num_arrivals=config.members, num_barriers=config.stages),
    )
    if problem.gradient and config.members > 1:
        scratch["cleared"] = plgpu.Barrier(num_arrivals=config.members, num_barriers=config.teams)

    def body(*refs: Any, **scratch: Any) -> None:
        block = (_Gradient if problem.gradient else _Product)(tiles, refs, scratch)
        when(block.wg == config.consumers)(block.produce)
        when(block.wg < config.consumers)(block.consume)

    shape = (problem.matrices, problem.terms) if problem.gradient else (problem.lists * problem.rows,)
    compiled = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((*shape, problem.columns), problem.out_dtype),
        grid=(tiles.blocks(sms),),
        grid_names=("sm",),
        num_threads=config.consumers + 1,
        thread_name="wg",
        scratch_types=scratch,
        kernel_name="jaxdnn_grouped",
    )
    return compiled(table(problem, config, sizes), a, b)


class _Tile(NamedTuple):
    """What is loaded, or stored: its matrix, its first row of all lists' rows, and which tile of a matrix it is.

    Attributes:
      row: its number among the tiles along the rows of a gradient's matrix; 0 of a product.
      column: its number among the tiles along the columns.
      rows: how many rows of a it covers; the producer does not read that.
    """

    matrix: Any
    start: Any
    row: Any
    column: Any
    rows: Any = None


class _Block:
    """One block of threads: the producer's methods, then the consumers'."""

    def __init__(self, tiles: Tiles, refs: Any, scratch: dict[str, Any]):
        self.tiles, self.problem, self.config = tiles, tiles.problem, tiles.config
        self.table, self.a, self.b, self.out = refs
        self.left, self.right, self.full, self.empty = (scratch[name] for name in ("left", "right", "full", "empty"))
        self.out_box, self.out_matrix = scratch["out"]
        self.cleared = scratch.get("cleared")
        self.wg, self.sm, self.sms = lax.axis_index("wg"), lax.axis_index("sm"), lax.axis_size("sm")
        self.items = self.table[0, 0]
        self.mine = tiles.share(self.items, self.sm, self.sms)

    def place(self, local: Any) -> tuple[Any, Any, Any]:
        """Of one of the block's tiles the row of the table, and its numbers along the item's rows and the columns."""
        item, row, column = self.tiles.place(self.sm + local * self.sms, self.items)
        return item + 1, row, column

    # ---- the producer

    def produce(self) -> None:
        plgpu.set_max_registers(REGISTERS[0], action="decrease")
        count = lax.fori_loop(0, self.mine, self.load_tile, jnp.int32(0))
        drain(self.empty, count, self.config.stages)

    def load_tile(self, local: Any, count: Any) -> Any:
        item, row, column = self.place(local)
        matrix, start, steps = (self.table[item, i] for i in (MATRIX, START, STEPS))
        team, stages = lax.rem(local, self.config.teams), self.config.stages

        def step(i: Any, count: Any) -> Any:
            slot = lax.rem(count, stages)
            when(count >= stages)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
            self.load(i, _Tile(matrix, start, row, column), slot, self.full.at[team * stages + slot])
            return count + 1

        return lax.fori_loop(0, steps, step, count)

    def load(self, i: Any, tile: _Tile, slot: Any, signal: Any) -> None:
        """Loads the boxes of step i of a tile."""
        raise NotImplementedError

    # ---- the consumers

    def consume(self) -> None:
        plgpu.set_max_registers(REGISTERS[1], action="increase")
        self.team, self.member = lax.div(self.wg, self.config.members), lax.rem(self.wg, self.config.members)

        def tile(local: Any, count: Any) -> Any:
            item, row, column = self.place(local)
            steps = self.table[item, STEPS]
            of_team = lax.rem(local, self.config.teams) == self.team
            when(of_team)(lambda: self.compute_tile((local, item, row, column), count, steps))
            return count + steps

        lax.fori_loop(0, self.mine, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def compute_tile(self, place: Any, count: Any, steps: Any) -> None:
        """Computes what this warpgroup has of a tile, whose first step is in slot number `count`.

        place: the tile's number among the block's tiles, and what `self.place` says of it.
        """
        self.compute(self.config.part, place, count, steps)

    def compute(self, height: int, place: Any, count: Any, steps: Any) -> None:
        """Adds the products of so many rows and stores the sums."""
        local, item, row, column = place
        config, problem, stages = self.config, self.problem, self.config.stages
        matrix, start, rows = (self.table[item, i] for i in (MATRIX, START, ROWS))
        tile = _Tile(matrix, start, row, column, rows)

        def step(i: Any, acc: Array) -> Array:
            slot = lax.rem(count + i, stages)
            plgpu.barrier_wait(self.full.at[self.team * stages + slot])
            self.clear(i, slot, rows)
            acc = self.multiply(acc, slot)
            plgpu.wgmma_wait(1)  # for the last slot's products; these stay in flight while that slot is released
            when(i > 0)(lambda: plgpu.barrier_arrive(self.empty.at[lax.rem(count + i - 1, stages)]))
            return acc

        acc = wgmma.start_accumulator(height, config.columns, jnp.float32)
        acc = wgmma.finish_accumulator(lax.fori_loop(0, steps, step, acc))
        when(steps > 0)(lambda: plgpu.barrier_arrive(self.empty.at[lax.rem(count + steps - 1, stages)]))
        width = out_columns(problem)
        chunks = config.columns // width
        for c in range(chunks):
            # The buffers rotate across tiles as well. Each store commits one group of copies or more: if no more than
            # `staged - 1` groups are under way, the last store from this buffer has read it. A warpgroup that has
            # nothing of a tile leaves out whole rotations (`check`).
            buffer = lax.rem(lax.div(local, config.teams) * chunks + c, config.staged)
            plgpu.wait_smem_to_gmem(config.staged - 1, wait_read_only=True)
            value = acc[:, c * width : (c + 1) * width].astype(problem.out_dtype)
            wgmma.store(value, self.out_matrix.at[self.wg, buffer, pl.ds(0, height)])
            plgpu.commit_smem()
            columns = pl.ds(column * config.columns + c * width, width)
            self.store(self.out_box.at[self.wg, buffer, pl.ds(0, height)], tile, columns)

    def release(self, count: Any, steps: Any) -> None:
        """Releases the slots of a tile of which this warpgroup has no rows, as they are loaded."""
        stages = self.config.stages

        @pl.loop(0, steps)
        def _(i: Any) -> None:
            slot = lax.rem(count + i, stages)
            plgpu.barrier_wait(self.full.at[self.team * stages + slot])
            plgpu.barrier_arrive(self.empty.at[slot])

    def clear(self, i: Any, slot: Any, rows: Any) -> None:
        """Before the products of step i: makes zeros of what was loaded beyond the rows of the group."""

    def multiply(self, acc: Array, slot: Any) -> Array:
        """Adds the products of a slot."""
        raise NotImplementedError

    def store(self, box: Any, tile: _Tile, columns: Any) -> None:
        """Stores some columns of a tile from a box in shared memory."""
        raise NotImplementedError

    # ---- boxes whose rows lie across the reduction

    def load_across(self, source: Any, lead: tuple[Any, ...], rows: Any, first: Any, target: Any, signal: Any) -> None:
        """Boxes of 64 rows by 64 columns, from column `first` on."""
        for j in range(target.shape[0]):
            index = (*lead, rows, pl.ds(first + j * DEPTH, DEPTH))
            plgpu.copy_gmem_to_smem(source.at[index], target.at[j], signal)


class _Product(_Block):
    """Rows times the matrix of their group."""

    def load(self, i: Any, tile: _Tile, slot: Any, signal: Any) -> None:
        terms, first = pl.ds(i * DEPTH, DEPTH), tile.column * self.config.columns
        plgpu.copy_gmem_to_smem(self.a.at[pl.ds(tile.start, self.config.rows), terms], self.left.at[slot], signal)
        if self.problem.transposed:
            index = (tile.matrix, pl.ds(first, self.config.columns), terms)
            plgpu.copy_gmem_to_smem(self.b.at[index], self.right.at[slot], signal)
        else:
            self.load_across(self.b, (tile.matrix,), terms, first, self.right.at[slot], signal)

    def compute_tile(self, place: Any, count: Any, steps: Any) -> None:
        """Of a group's last tile a warpgroup that has at most 64 rows computes 64, and one that has none nothing."""
        part = self.config.part
        own = self.own(self.table[place[1], ROWS])
        if part > 64:
            when(own > 64)(lambda: self.compute(part, place, count, steps))
        when((own > 0) & (own <= 64))(lambda: self.compute(64, place, count, steps))
        if self.config.members > 1:
            when(own == 0)(lambda: self.release(count, steps))

    def own(self, rows: Any) -> Any:
        """How many of the rows of an item this warpgroup has."""
        return lax.clamp(jnp.int32(0), rows - self.member * self.config.part, jnp.int32(self.config.part))

    def multiply(self, acc: Array, slot: Any) -> Array:
        a = self.left.at[slot, pl.ds(self.member * self.config.part, acc.shape[0])]
        major = "k" if self.problem.transposed else "mn"
        return wgmma.multiply(acc, a, self.right.at[slot], swizzle=SWIZZLE, a_major="k", b_major=major)

    def store(self, box: Any, tile: _Tile, columns: Any) -> None:
        height, own = box.shape[0], self.own(tile.rows)
        first = tile.start + self.member * self.config.part

        def pieces() -> None:
            """As many rows as `own` has, of which each binary digit is a piece, the largest first."""
            size = height
            while size := size // 2:
                at = own - lax.rem(own, 2 * size)  # what the larger pieces have
                there = lax.rem(lax.div(own, size), 2) == 1  # the digit
                target = self.out.at[pl.ds(first + at, size), columns]
                plgpu.copy_smem_to_gmem(box.at[pl.ds(at, size)], target, predicate=there)

        when(own == height)(lambda: plgpu.copy_smem_to_gmem(box, self.out.at[pl.ds(first, height), columns]))
        when(own < height)(pieces)


class _Gradient(_Block):
    """For each group the product of its rows."""

    def load(self, i: Any, tile: _Tile, slot: Any, signal: Any) -> None:
        rows = pl.ds(tile.start + i * DEPTH, DEPTH)
        self.load_across(self.a, (), rows, tile.row * self.config.rows, self.left.at[slot], signal)
        self.load_across(self.b, (), rows, tile.column * self.config.columns, self.right.at[slot], signal)

    def boxes(self, slot: Any) -> tuple[Any, Any]:
        """Of a slot the left operand's boxes that this warpgroup alone reads, and its share of the right operand's.

        The right ones are read by all warpgroups of the team; a share is what one of them clears.
        """
        left, right = (n // self.config.members // DEPTH for n in (self.config.rows, self.config.columns))
        return (
            self.left.at[slot, pl.ds(self.member * left, left)],
            self.right.at[slot, pl.ds(self.member * right, right)],
        )

    def clear(self, i: Any, slot: Any, rows: Any) -> None:
        own = rows - i * DEPTH

        @when(own < DEPTH)
        def _() -> None:
            for boxes in self.boxes(slot):
                clear_rows(boxes, own)
            plgpu.commit_smem()
            if self.cleared is not None:  # the team's other warpgroups read the same columns
                plgpu.barrier_arrive(self.cleared.at[self.team])
                plgpu.barrier_wait(self.cleared.at[self.team])

    def multiply(self, acc: Array, slot: Any) -> Array:
        a, _ = self.boxes(slot)
        return wgmma.multiply(acc, a, self.right.at[slot], swizzle=SWIZZLE, a_major="mn", b_major="mn")

    def store(self, box: Any, tile: _Tile, columns: Any) -> None:
        rows = pl.ds(tile.row * self.config.rows + self.member * self.config.part, self.config.part)
        plgpu.copy_smem_to_gmem(box, self.out.at[tile.matrix, rows, columns])


def clear_rows(boxes: Any, first: Any) -> None:
    """Stores zeros to boxes (count, 64 rows, 64 columns) from row `first` on.

    A swizzle moves columns within a row, so that whole rows are where they were.
    """

    @wgmma.inline_mgpu(arg_types=(plgpu.RefType((wgmma.swizzle_transform(SWIZZLE),)), wgmma.NUMBER))
    def cleared(_: Any, boxes: Any, first: Any) -> None:
        count, (number,) = ir.MemRefType(boxes.type).shape[0], first.registers.flat
        cell, line = 16, SWIZZLE // 16
        high = THREADS // line  # rows that the warpgroup stores at a time
        code = [
            "{ .reg .b32 t, r, z, p; .reg .pred q; mov.u32 t, %tid.x; and.b32 t, t, 127; mov.b32 z, 0;",
            f"shr.u32 r, t, {line.bit_length() - 1}; mad.lo.u32 p, t, {cell}, $0;",
        ]
        for i in range(DEPTH // high):
            code.append(f"setp.ge.s32 q, r, $1; add.s32 r, r, {high};")
            code += [
                f"@q st.shared.v4.b32 [p+{(j * DEPTH + i * high) * SWIZZLE}], {{z, z, z, z}};" for j in range(count)
            ]
        operands: list[Any] = [address(boxes), number]
        asm: Any = llvm.inline_asm
        asm(ir.Type.parse("!llvm.void"), operands, " ".join([*code, "}"]), "r,r,~{memory}", has_side_effects=True)

    cleared(boxes, first)
