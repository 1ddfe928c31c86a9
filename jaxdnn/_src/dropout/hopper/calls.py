"""Bias, activation, dropout and residual on Hopper: one pass over memory, 16 bytes a thread, in Pallas.

Schedule. Blocks of 128 threads process neighbouring groups of elements, one group a thread, and end: while some wait
for memory, others draw random numbers (`_flat`). With a gradient of the bias the blocks are persistent: each has 32
groups of columns and goes down the rows, four or eight at a time; it copies the next groups into shared memory
meanwhile, and stores its sums, which XLA adds (`_walk`). Channels first, a thread processes a vector of each of four
planes (`_planes`), because the four elements of a counter are in four planes. `group` has the arithmetic.

Pallas addresses blocks of arrays. Loads, copies and stores at addresses of each thread's own, loads of a table's
entries and rounded products are Mosaic's own code (`hopper.lanes`).

Limits. The elements are in memory in the order in which they are counted, or the channels directly follow the batch.
Their number, and that of a row of the bias or of a plane, is a multiple of the elements in 16 bytes. The count starts
at the first element of a counter. bfloat16, float16 and float32.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core.compat import plgpu
from jaxdnn._src.dropout.hopper.group import F32, U32, Group
from jaxdnn._src.dropout.hopper.plan import Plan
from jaxdnn._src.dropout.primitive import BLOCK
from jaxdnn._src.hopper import MULTIPROCESSORS, branches, lanes
from jaxdnn._src.hopper.lanes import THREADS
from jaxdnn._src.hopper.launch import kernel, when
from jaxdnn._src.hopper.rows import WARPGROUP

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}


def run(plan: Plan, operands: Sequence[Array], shape: tuple[int, ...], dtype: Any) -> Array:
    """y or dx; the operands are those that the plan names."""
    _record("planes" if plan.plane else "flat", plan)
    return _launch(_planes if plan.plane else _flat, plan, operands, shape, dtype, blocks=_blocks(plan))[0]


def _blocks(plan: Plan) -> int:
    """Blocks of all examples."""
    return plan.leads * -(-plan.groups // ((BLOCK if plan.plane else 1) * THREADS))


def _launch(
    body: Callable[..., None],
    plan: Plan,
    operands: Sequence[Array],
    shape: tuple[int, ...],
    dtype: Any,
    *sums: jax.ShapeDtypeStruct,
    blocks: int,
    **options: Any,
) -> list[Array]:
    """The results of a kernel; body(plan, references by name, ...) has groups as vectors."""
    names = (*plan.operands, "result", "sums")
    e = plan.elements

    def view(name: str, array: Any) -> Any:
        if name in ("key", "start"):
            return array.reshape(-1, 2)
        if name == "table":
            return array
        if name == "bias" and plan.plane:
            return array.reshape(-1)
        return array.reshape(-1, (plan.width if name == "bias" else plan.size) // e, e)

    def run(*references: Any, **scratch: Any) -> None:
        body(plan, dict(zip(names, references, strict=False)), **scratch)

    result = jax.ShapeDtypeStruct((plan.leads, plan.groups, e), dtype)
    name = "dropout_dgrad" if plan.backward else "dropout"
    found = kernel(run, out_type=(result, *sums), grid=(blocks,), grid_names=("block",), kernel_name=name, **options)(
        *(view(n, v) for n, v in zip(plan.operands, operands, strict=True))
    )
    return [found[0].reshape(shape), *found[1:]]


def _flat(plan: Plan, refs: dict[str, Any]) -> None:
    block, lead = lax.axis_index("block"), 0
    if plan.leads > 1:
        block, lead = lax.rem(block, _blocks(plan) // plan.leads), lax.div(block, _blocks(plan) // plan.leads)
    # Threads beyond the end do what the last one does.
    group = lax.min(lanes.numbers(block * THREADS), jnp.int32(plan.groups - 1))
    words = {name: lanes.load(refs[name].at[lead], group) for name in plan.streams}
    if "bias" in plan.dtypes:
        _, column = lanes.divided(group, plan.width // plan.elements)
        words["bias"] = lanes.load(refs["bias"].at[lead if "bias" in plan.mapped else 0], column)
    v = Group(plan, refs, lead).value(words, group)
    lanes.store(refs["result"].at[lead], group, v.astype(refs["result"].dtype))


def _planes(plan: Plan, refs: dict[str, Any]) -> None:
    """Elements are counted with the channels fastest, so that the four elements of a counter are in four planes."""
    inner, quads, e = plan.plane // plan.elements, plan.channels // BLOCK, plan.elements
    g = Group(plan, refs, 0)
    number = lax.min(lanes.numbers(lax.axis_index("block") * THREADS), jnp.int32(plan.groups // BLOCK - 1))
    above, along = lanes.divided(number, inner)  # which four planes, and which vector of each
    outer, quad = lanes.divided(above, quads)
    groups = [(above * BLOCK + j) * inner + along for j in range(BLOCK)]
    held = [{name: lanes.load(refs[name].at[0], group) for name in plan.streams} for group in groups]
    if "bias" in plan.dtypes:
        for j, words in enumerate(held):
            words["bias"] = lanes.wide(lanes.entries(refs["bias"], quad * BLOCK + j), e)
    random: Any = (None,) * BLOCK
    if plan.limit:
        first = (outer * plan.plane + along * e).astype(U32) * U32(quads) + quad.astype(U32)
        random = g.draw(lanes.wide(first, e) + lanes.positions(e).astype(U32) * U32(quads))
    for group, words, word in zip(groups, held, random, strict=True):
        v = g.before_dropout(words)
        v = v if word is None else g.dropped(v, word >= U32(plan.limit))
        lanes.store(refs["result"].at[0], group, g.after_dropout(v, words).astype(refs["result"].dtype))


# ---- the gradient of the bias ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ColumnsPlan:
    """How rows and columns are partitioned if the bias has a gradient: a block processes `beside` rows at a time.

    Attributes:
      warpgroups: of a block.
      stages: groups that a thread is processing or copying at a time.
      tile: groups of columns of a block.
      splits: blocks that share the rows of a tile.
    """

    warpgroups: int
    stages: int
    tile: int
    tiles: int
    splits: int

    @property
    def threads(self) -> int:
        return self.warpgroups * THREADS

    @property
    def beside(self) -> int:
        return self.threads // self.tile


def columns(plan: Plan, most: int | None = None) -> ColumnsPlan:
    """A plan of about `most` blocks, at least one for each tile; the shape alone decides the order of additions.

    What each multiprocessor gets was fastest on an H200 (`benchmarks/notes-activation.md`).
    """
    warpgroups, stages, blocks = (2, 2, 3) if plan.activation == "table" else (1, 3, 8)
    most = most or blocks * MULTIPROCESSORS
    wide, rows = plan.width // plan.elements, plan.size // plan.width
    tile = min(lanes.LANES, 1 << max(0, wide - 1).bit_length())
    tiles, beside = -(-wide // tile), warpgroups * THREADS // tile
    return ColumnsPlan(warpgroups, stages, tile, tiles, max(1, min(-(-rows // beside), most // tiles)))


def run_columns(
    plan: Plan, operands: Sequence[Array], shape: tuple[int, ...], dtype: Any, partition: ColumnsPlan | None = None
) -> tuple[Array, Array]:
    """dx, and its sums over rows in float32, (width,)."""
    _record("walk", plan)
    p, e = partition or columns(plan), plan.elements
    slots = {name: plgpu.SMEM((p.stages * p.threads, e), DTYPES[plan.dtypes[name]]) for name in plan.streams}
    sums = {"added": plgpu.SMEM((p.threads, e), F32), "all_added": plgpu.Barrier(num_arrivals=p.warpgroups)}
    options = {"scratch_types": slots | sums, "num_threads": p.warpgroups, "thread_name": WARPGROUP}
    parts = jax.ShapeDtypeStruct((p.splits * plan.width // e, e), F32)
    body = ft.partial(_walk, p=p)
    dx, parts = _launch(body, plan, operands, shape, dtype, parts, blocks=p.tiles * p.splits, **options)
    return dx, jnp.sum(parts.reshape(p.splits, plan.width), 0)


def _walk(plan: Plan, refs: dict[str, Any], *, p: ColumnsPlan, added: Any, all_added: Any, **slots: Any) -> None:
    """The groups of the next rows are being copied into shared memory meanwhile, into slots that belong to the thread.

    A thread fills a slot again after it has used its contents.
    """
    wide, rows, e = plan.width // plan.elements, plan.size // plan.width, plan.elements
    block, warpgroup = lax.axis_index("block"), lax.axis_index(WARPGROUP)
    split, left = lax.div(block, p.tiles), lax.rem(block, p.tiles) * p.tile
    thread = lanes.numbers(warpgroup * THREADS)
    side, column = lanes.divided(thread, p.tile)
    within, column = left + column < wide, lax.min(left + column, jnp.int32(wide - 1))
    first, step = split * p.beside, p.splits * p.beside
    start = (side + first) * wide + column
    count = lax.div(rows - 1 - first, jnp.int32(step)) + 1
    g = Group(plan, refs, 0)
    bias = {"bias": lanes.load(refs["bias"].at[0], column)} if "bias" in plan.dtypes else {}
    ragged = rows % p.beside > 0

    def exists(i: Any) -> Array:
        return side + (first + i * step) < rows

    def fetch(i: Any, slot: Any) -> None:
        within_rows = exists(i) if ragged else lanes.one(0, jnp.int32) + i < count
        for name, memory in slots.items():
            place = thread + slot * p.threads
            lanes.copy(memory, place, refs[name].at[0], start + i * (step * wide), within_rows)
        lanes.commit()

    def turn(i: Any, carry: Any) -> Any:
        slot, last, total = carry
        fetch(i + (p.stages - 1), last)
        lanes.wait(p.stages - 1)
        words = {name: lanes.load(memory, thread + slot * p.threads) for name, memory in slots.items()}
        number = start + i * (step * wide)
        v = g.value(words | bias, number)
        stored = [*([exists(i)] if ragged else []), *([within] if wide % p.tile else [])]
        when_stored = ft.reduce(jnp.logical_and, stored) if stored else None
        lanes.store(refs["result"].at[0], number, v.astype(refs["result"].dtype), when_stored)
        v = jnp.where(lanes.wide(jnp.where(exists(i), 1, 0), e) > 0, v, 0.0) if ragged else v
        return jnp.where(slot == p.stages - 1, 0, slot + 1), slot, total + v

    for i in range(p.stages - 1):
        fetch(jnp.int32(i), jnp.int32(i))
    carry = jnp.int32(0), jnp.int32(p.stages - 1), lanes.full(0.0, e, F32)
    total = lax.fori_loop(0, count, turn, carry)[2]
    # No copy is under way any more: behind the last row none was started.
    lanes.store(added, thread, total)
    plgpu.barrier_arrive(all_added)
    plgpu.barrier_wait(all_added)

    @when(warpgroup == 0)
    def _() -> None:
        """Adds a block's sums of the same columns, one thread's after another's."""
        own = lax.min(thread, jnp.int32(p.tile - 1))
        parts = [lanes.load(added, own + side * p.tile) for side in range(p.beside)]
        number = split * wide + left + own
        lanes.store(refs["sums"], number, ft.reduce(jnp.add, parts), (thread < p.tile) & (left + own < wide))


def _record(kernel: str, plan: Plan) -> None:
    formula = "none" if plan.activation == "identity" else "formula"
    branches.record(
        "dropout",
        operands=plan.dtypes.get("x", plan.result),
        kernel=kernel,
        pass_="backward" if plan.backward else "forward",
        activation="table" if plan.activation == "table" else formula,
        bias=bool(plan.width),
        residual="residual" in plan.dtypes,
    )
