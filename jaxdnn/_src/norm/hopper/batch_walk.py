"""Passes over arrays (rows, columns): what the kernels of batch normalisation share.

A vector is 16 bytes of a row. A thread processes one vector of every row, a chunk of rows at a time;
the threads of a block cover `width` vectors of `lines` rows. A tile is lines x chunk rows, and split i of `splits`
processes every `splits`-th tile. A reduction over the columns goes from the last row to the first: the rows that are
read last are those that the next kernel reads first, and still in the L2 cache. Then the threads' values are joined
over the lines of a block, the upper half of the lines with the lower half, until one line is left. The plan alone
determines the order. A kernel that makes an array of each row's own elements goes from the first row to the last.

A thread copies its vectors of the next tiles into slots of shared memory that belong to it alone, while it processes
one: nothing is read twice, so nothing should be kept in the L1 cache, which these copies pass by.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core.compat import pl, plgpu
from jaxdnn._src.hopper import lanes
from jaxdnn._src.hopper.launch import BLOCK, WARPGROUP, grid, kernel, when
from jaxdnn._src.hopper.ptx import SIZES, VECTOR_BYTES

F32 = jnp.float32
Values = Sequence[Array]  # what a thread keeps for its columns: vectors, and numbers
Chunks = Sequence[Sequence[Array]]  # of each array the vectors of a chunk's rows, in float32
Exist = Sequence[Array] | None  # which rows of a chunk exist; None if all do


@dataclasses.dataclass(frozen=True)
class ColumnPlan:
    """How rows and columns are partitioned.

    Attributes:
      rows, columns: of x as the kernel reads it; the bytes of a row are a multiple of 16.
      fold: how many rows of the caller's x are one row here: its column c is columns c + i columns / fold, for all i.
      dtype: "bf16", "f16" or "f32".
      threads: of a block.
      width: vectors of a row that a block covers.
      chunk: rows of a line that a thread processes together.
      stages: chunks that a thread copies while it processes one.
      splits: blocks that share the rows of a column; at least one, and at most as many as there are whole tiles.
    """

    rows: int
    columns: int
    fold: int
    dtype: str
    threads: int
    width: int
    chunk: int
    stages: int
    splits: int

    @property
    def elements(self) -> int:
        """Elements of a vector."""
        return VECTOR_BYTES // SIZES[self.dtype]

    @property
    def row_vectors(self) -> int:
        return self.columns // self.elements

    @property
    def lines(self) -> int:
        """Rows that the threads of a block cover at a time; threads beyond them read the last line too."""
        return self.threads // self.width

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.lines * self.chunk

    @property
    def full(self) -> int:
        """Whole tiles."""
        return self.rows // self.tile

    @property
    def rest(self) -> int:
        """Rows after the last whole tile; they belong to split `full` mod `splits`."""
        return self.rows % self.tile

    @property
    def across(self) -> int:
        """Blocks that cover a row together."""
        return -(-self.row_vectors // self.width)

    @property
    def blocks(self) -> int:
        return self.across * self.splits

    @property
    def half(self) -> int:
        """The lower lines in the first join: the largest power of two below their number; 0 if there is one line."""
        return 1 << (self.lines - 1).bit_length() - 1 if self.lines > 1 else 0

    @property
    def joined(self) -> int:
        """Vectors of shared memory for a value of the threads that are joined with others, in all joins."""
        return max(1, (2 * self.half - 1) * self.width)


class Threads:
    """Of each thread of a block its split, its line, its vector of a row, and whether that exists.

    Threads beyond the columns or lines read what the last ones do, and their values are not used.
    """

    def __init__(self, plan: ColumnPlan) -> None:
        self.plan, block = plan, lax.axis_index(BLOCK)
        self.split, across = (of(block, jnp.int32(plan.across)) for of in (lax.div, lax.rem))
        self.number = thread(plan.threads)
        self.line, self.place = lanes.divided(self.number, plan.width)
        vector = across * plan.width + self.place
        self.inside = vector < plan.row_vectors
        self.vector = lax.min(vector, jnp.int32(plan.row_vectors - 1))
        self.row = lax.min(self.line, jnp.int32(plan.lines - 1))
        self.first = self.row * plan.row_vectors + self.vector  # the number of its vector in the first row of a tile

    def per_column(self, ref: Any, which: int = 0) -> Array:
        """An array (one element for each of the caller's columns), viewed by `of_columns`, at the thread's columns.

        which: of several such arrays, one behind the other.
        """
        plan = self.plan
        if plan.fold == 1:
            return lanes.float32(lanes.load(ref, self.vector, plus=which * plan.row_vectors))
        column = lanes.wide(self.vector * plan.elements, plan.elements) + lanes.positions(plan.elements)
        columns = plan.columns // plan.fold
        return lanes.float32(lanes.entries(ref, lanes.divided(column, columns)[1], which * columns))


def thread(threads: int) -> Array:
    """The number of each thread in its block."""
    return lanes.numbers(lax.axis_index(WARPGROUP) * lanes.THREADS if threads > lanes.THREADS else 0)


def of_columns(plan: ColumnPlan, v: Array) -> Array:
    """An array of the caller's columns, as `Threads.per_column` takes it."""
    return v.reshape(-1, plan.elements) if plan.fold == 1 else v.reshape(-1)


def launch(
    body: Callable[..., None],
    plan: ColumnPlan,
    arrays: Sequence[Array],
    others: Sequence[Array],
    outs: Sequence[tuple[int, ...]],
    values: Sequence[int],
    name: str,
    dtype: Any = F32,
) -> list[Array]:
    """The results of a kernel, of a dtype: body(threads, arrays, others, results, memory for joins, slots).

    arrays: those that are read row by row, (rows, columns). values: the elements of each value that is joined.
    """
    e, views = plan.elements, [v.reshape(plan.rows, plan.row_vectors, plan.elements) for v in arrays]
    slots = (plan.stages + 1) * plan.chunk * plan.threads
    scratch = {
        **{f"slots{i}": plgpu.SMEM((slots, e), v.dtype) for i, v in enumerate(arrays)},
        **{f"joined{i}": plgpu.SMEM((plan.joined, size), F32) for i, size in enumerate(values)},
    }

    def run(*refs: Any, **scratch: Any) -> None:
        split = len(views), len(views) + len(others)
        of = lambda prefix: [ref for name, ref in scratch.items() if name.startswith(prefix)]
        body(Threads(plan), refs[: split[0]], refs[slice(*split)], refs[split[1] :], of("joined"), of("slots"))

    view = lambda shape: jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // e, e), dtype)
    options = {"scratch_types": scratch, **grid(plan.blocks, plan.threads // lanes.THREADS)}
    found = kernel(run, out_type=tuple(map(view, outs)), kernel_name=name, **options)(*views, *others)
    return [v.reshape(shape) for v, shape in zip(found, outs, strict=True)]


class _Tiles:
    """The tiles of a split from the first row to the last, for `each_row`, which stores results for each tile.

    A thread copies its vectors of the next tiles into slots while it processes one. `over_rows` visits the same tiles,
    but from the last row to the first; it accumulates in registers and stores nothing.
    """

    def __init__(self, t: Threads, arrays: Sequence[Any], slots: Sequence[Any]) -> None:
        self.t, self.arrays, self.slots = t, arrays, slots
        self.step, self.size = t.plan.lines * t.plan.row_vectors, t.plan.chunk * t.plan.threads
        self.count = lax.div(t.plan.full - 1 - t.split, jnp.int32(t.plan.splits)) + 1  # of the split

    def row(self, number: Any) -> Any:
        """The first row of a tile of the split."""
        return (self.t.split + number * self.t.plan.splits) * self.t.plan.tile

    def _place(self, slot: Any) -> Any:
        return self.t.number + slot * self.size

    def _fetch(self, number: Any, slot: Any) -> None:
        """Starts to copy a tile of the split into a slot, if it exists."""
        plan = self.t.plan

        @when(number < self.count)
        def _() -> None:
            row = self.row(number)
            for ref, memory in zip(self.arrays, self.slots, strict=True):
                part = ref.at[pl.ds(row, plan.tile)]
                for i in range(plan.chunk):
                    lanes.copy(memory, self._place(slot), part, self.t.first, plus=(i * plan.threads, i * self.step))

        lanes.commit()

    def _held(self, slot: Any) -> Chunks:
        plan = self.t.plan
        loads = lambda memory: (lanes.load(memory, self._place(slot), plus=i * plan.threads) for i in range(plan.chunk))
        return [[lanes.float32(v) for v in loads(memory)] for memory in self.slots]

    def start(self) -> None:
        for i in range(self.t.plan.stages):
            self._fetch(jnp.int32(i), jnp.int32(i))

    def each(self, values: Values, use: Callable[[Values, Any, Chunks], Values]) -> Values:
        """The values after all tiles: use(values, the tile's number, its chunks) makes the next ones."""
        stages = self.t.plan.stages

        def turn(number: Any, carry: Any) -> Any:
            slot, free, values = carry
            self._fetch(number + stages, free)
            lanes.wait(stages)
            return jnp.where(slot == stages, 0, slot + 1), slot, use(values, number, self._held(slot))

        return lax.fori_loop(0, self.count, turn, (jnp.int32(0), jnp.int32(stages), values))[2]

    def rest(self) -> tuple[Chunks, Exist]:
        """The rows after the last whole tile, and which of the thread's exist."""
        plan = self.t.plan
        exist = [self.t.row + i * plan.lines < plan.rest for i in range(plan.chunk)]
        parts = [ref.at[pl.ds(plan.full * plan.tile, plan.rest)] for ref in self.arrays]
        loads = lambda part: (lanes.load(part, self.t.first, holds, i * self.step) for i, holds in enumerate(exist))
        return [[lanes.float32(v) for v in loads(part)] for part in parts], exist


def over_rows(
    t: Threads,
    arrays: Sequence[Any],
    slots: Sequence[Any],
    given: Values,
    begin: Callable[[Values, Chunks, Exist], Values],
    add: Callable[[Values, Values, Chunks, Exist], Values],
    like: Any,
) -> Values:
    """The threads' values: those that `begin` makes for the first chunk, to which `add` then adds every chunk.

    It reduces the rows, from the last to the first; `each_row` makes a row of results of each, in the other direction.

    Both are functions of `lanes.together`: `given` are the arrays that they take besides. like: of the values.
    """
    plan = t.plan
    step, size, ring = plan.lines * plan.row_vectors, plan.chunk * plan.threads, plan.stages + 1
    count = lax.div(plan.full - 1 - t.split, jnp.int32(plan.splits)) + 1  # tiles of the split
    many = len(arrays)

    place = lambda slot: t.number + slot * size

    def fetch(number: Any, slot: Any) -> None:
        """Starts to copy a tile of the split into a slot, if it exists; tile 0 is the last of x."""

        def copies(*given: Any) -> None:
            for memory, part in zip(given[:many], given[many : 2 * many], strict=True):
                for i in range(plan.chunk):
                    lanes.copy(memory, given[-2], part, given[-1], plus=(i * plan.threads, i * step))

        @when(number < count)
        def _() -> None:
            row = (plan.full - 1 - t.split - number * plan.splits) * plan.tile
            parts = [ref.at[pl.ds(row, plan.tile)] for ref in arrays]
            lanes.together(copies, [*slots, *parts], [place(slot), t.first], None)

        lanes.commit()

    def held(memories: Sequence[Any], place: Any) -> Chunks:
        loads = lambda memory: (lanes.load(memory, place, plus=i * plan.threads) for i in range(plan.chunk))
        return [[lanes.float32(v) for v in loads(memory)] for memory in memories]

    def begun(*of: Any) -> Values:
        return begin(of[many + 1], held(of[:many], of[many]), None)

    def added(*of: Any) -> Values:
        return add(of[many + 1], of[many + 2], held(of[:many], of[many]), None)

    def turn(number: Any, carry: Any) -> Any:
        slot, free, values = carry
        fetch(number + plan.stages, free)
        lanes.wait(plan.stages)
        values = lanes.together(added, slots, [place(slot), given, values], like)
        return jnp.where(slot == plan.stages, 0, slot + 1), slot, values

    def of_rest(*of: Any) -> Values:
        """What the rows after the whole tiles add to the values, which these begin if they are given none."""
        first, row, given, *values = of[many:]
        exist = [row + i * plan.lines < plan.rest for i in range(plan.chunk)]
        loads = lambda part: (lanes.load(part, first, holds, i * step) for i, holds in enumerate(exist))
        chunks = [[lanes.float32(v) for v in loads(part)] for part in of[:many]]
        return add(given, values[0] if values else begin(given, chunks, exist), chunks, exist)

    def with_rest(*values: Values) -> Values:
        parts = [ref.at[pl.ds(plan.full * plan.tile, plan.rest)] for ref in arrays]
        return lanes.together(of_rest, parts, [t.first, t.row, given, *values], like)

    if not plan.full:
        return with_rest()
    for i in range(plan.stages):
        fetch(jnp.int32(i), jnp.int32(i))
    lanes.wait(plan.stages - 1)
    values = lanes.together(begun, slots, [place(jnp.int32(0)), given], like)
    values = lax.fori_loop(0, count, turn, (jnp.int32(0), jnp.int32(ring - 1), values))[2]
    if plan.rest:
        mine = jnp.where(t.split == plan.full % plan.splits, 1, 0)
        values = lax.fori_loop(0, mine, lambda _, values: with_rest(values), values)
    return values


def each_row(
    t: Threads, arrays: Sequence[Any], slots: Sequence[Any], out: Any, make: Callable[[Sequence[Array]], Array]
) -> None:
    """Stores what `make` finds of each row's vectors, from the first row to the last: `over_rows` read those last."""
    plan, tiles = t.plan, _Tiles(t, arrays, slots)
    own = t.inside & (t.line < plan.lines)

    def put(row: Any, rows: int, chunks: Chunks, exist: Exist) -> None:
        part = out.at[pl.ds(row, rows)]
        for i, vectors in enumerate(zip(*chunks, strict=True)):
            stores = own & exist[i] if exist else own
            lanes.store(part, t.first, make(vectors).astype(out.dtype), stores, i * tiles.step)

    def put_tile(values: Values, number: Any, chunks: Chunks) -> Values:
        put(tiles.row(number), plan.tile, chunks, None)
        return values

    if plan.full:
        tiles.start()
        tiles.each([], put_tile)
    if plan.rest:

        @when(t.split == plan.full % plan.splits)
        def _() -> None:
            put(plan.full * plan.tile, plan.rest, *tiles.rest())


def over_lines(t: Threads, values: Values, memory: Sequence[Any], join: Callable[[Values, Values], Values]) -> Values:
    """The values of a block, in the threads of its first line. `join` is a function of `lanes.together`."""
    plan, many = t.plan, len(memory)
    vector = lambda v: v if len(v.shape) == 3 else lanes.wide(v, 1)

    def run(*of: Any) -> Values:
        refs, (values, line, place) = of[:many], of[many:]
        half, start = plan.half, 0
        while half:
            above = min(plan.lines, 2 * half) - half
            upper = line - half
            to, writes = start + upper * plan.width + place, (upper >= 0) & (upper < above)
            for ref, value in zip(refs, values, strict=True):
                lanes.store(ref, to, vector(value), writes)
            lanes.meet()
            own = start + lanes.at_most(line, above - 1) * plan.width + place
            others = [lanes.load(ref, own) for ref in refs]
            others = [v if len(of.shape) == 3 else lanes.narrow(v) for v, of in zip(others, values, strict=True)]
            new = join(values, others)
            if above < half:  # the lines between have none to join with
                new = [lanes.where(line < above, a, b) for a, b in zip(new, values, strict=True)]
            values, start, half = new, start + half * plan.width, half // 2
        return values

    return lanes.together(run, memory, [values, t.line, t.place], values) if plan.half else values
