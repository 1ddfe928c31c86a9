"""Kernels of rows in registers: loads rows, calls what computes them, and stores its results."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.hopper import MULTIPROCESSORS, branches
from jaxdnn._src.hopper.launch import BLOCK, grid, kernel
from jaxdnn._src.hopper.ptx import NAMES
from jaxdnn._src.hopper.rows import Exchange, Rows, Totals, store

# From a step to the slots of the result (none, if it has none), each with what is added to sums, and to statistics.
Work = Callable[["Step"], tuple[Iterable[tuple[Array, ...]], tuple[Array, ...]]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rows are partitioned over threads.

    Attributes:
      threads: that share a row: a power of two from 32 to 1024.
      at_once: the rows of a warp that are computed at the same time; parameters are loaded once for them.
      stays: whether blocks are persistent: they process many rows, and load the next rows while they compute. Otherwise
        a block processes one set of rows.
      groups: of warpgroups in a block, each with rows of its own.
      keeps: whether blocks that stay keep parameters in registers.
    """

    threads: int
    at_once: int = 1
    stays: bool = False
    groups: int = 1
    keeps: bool = True


@dataclasses.dataclass
class Step:
    """A set of rows that are computed at once.

    Attributes:
      rows: their partition.
      exchange: joins the parts of sums over rows.
      sources: of each array the slots.
      numbers: statistics that are given.
      parameters: from a slot's number to the slot of each parameter.
      counted: puts zeros in the place of rows that another step adds to sums too.
    """

    rows: Rows
    exchange: Exchange
    sources: list[list[Array]]
    numbers: list[Array]
    parameters: Callable[[int], list[Array]]
    counted: Callable[[Array], Array]


def over_rows(
    work: Work,
    plan: Plan | None,
    arrays: Sequence[Array],
    parameters: Sequence[Array] = (),
    numbers: Sequence[Array] = (),
    *,
    result: Any = None,
    statistics: Sequence[Any] = (),
    sums: int = 0,
    exchanges: int,
    values: int = 1,
    name: str,
    approximate: bool = False,
    interpret: Any = None,
) -> list[Array]:
    """The results of a kernel that calls `work` for the rows of arrays (count, length), of one dtype.

    They are an array (count, length) of dtype `result`, unless that is None, arrays (count,) of dtypes `statistics`,
    and the sums over rows that each block, of those that stay, has of its own: (blocks, sums, length).

    parameters: arrays (length,). numbers: arrays (count,). exchanges, values: how many exchanges `work` does, and of
    how many values at most. approximate: exponentials and logarithms by the special function unit. name: the op's, and
    after "_" that of a pass other than the forward one.
    """
    count, length = arrays[0].shape
    if plan is None:
        raise ValueError(f"`x` must have rows that fit into registers, got {length} elements.")
    op, _, which = name.partition("_")
    decided = {
        "threads": plan.threads,
        "rows_at_once": plan.at_once,
        "stays": plan.stays,
        "keeps": plan.stays and plan.keeps,
    }
    branches.record(f"{op} of rows", operands=NAMES[np.dtype(arrays[0].dtype)], pass_=which or "forward", **decided)
    rows = Rows(length, arrays[0].dtype.itemsize, plan.threads, plan.at_once, plan.groups)
    if short := max(0, rows.height - count):
        arrays = [jnp.pad(v, ((0, short), (0, 0))) for v in arrays]
        numbers = [jnp.pad(v, (0, short)) for v in numbers]
    stored = count + short
    together = rows.height * plan.groups  # of a block
    steps = -(-stored // together)
    blocks = min(steps, MULTIPROCESSORS) if plan.stays else steps
    totals = [Totals(rows, sums)] if sums else []
    wide = [] if result is None else [jax.eval_shape(rows.view, jax.ShapeDtypeStruct((stored, length), result))]
    narrow = [jax.ShapeDtypeStruct((stored,), v) for v in statistics]
    parts = [jax.ShapeDtypeStruct((blocks, *v.shape), jnp.float32) for v in totals]

    def body(*references: Any, **scratch: Any) -> None:
        left = iter(references)
        take = lambda like: [next(left) for _ in like]
        given, parameter_refs, number_refs = take(arrays), take(parameters), take(numbers)
        wide_refs, saved_refs, part_refs = take(wide), take(narrow), take(parts)
        exchange = Exchange(rows, scratch.get("exchanged"), scratch.get("exchanges"))
        read = lambda slot: [rows.parameter(ref, slot) for ref in parameter_refs]
        kept = [read(slot) for slot in range(rows.slots)] if plan.stays and plan.keeps else []
        block = lax.axis_index(BLOCK)
        number = lambda step: (step * plan.groups + rows.group()) * rows.height
        first = lambda step: lax.min(number(step), jnp.int32(stored - rows.height))

        def loaded(step: Any) -> Any:
            start = first(step)
            return [rows.load(ref, start) for ref in given], [rows.number(ref, start) for ref in number_refs]

        def one(step: Any, held: Any, added: list[list[Array]]) -> list[list[Array]]:
            start, counted, (sources, known) = first(step), lambda v: v, held
            if sums and stored % together:
                counted = lambda v: jnp.where(rows.wide(rows.iota() >= number(step) - start), v, 0.0)
            slots, found = work(Step(rows, exchange, sources, known, kept.__getitem__ if kept else read, counted))
            new: list[list[Array]] = [[] for _ in added]
            for slot, (value, *more) in enumerate(slots):
                store(rows.at(wide_refs[0], slot, start), value.astype(result))
                for to, before, term in zip(new, added, more, strict=True):
                    to.append(before[slot] + term)
            if narrow:
                rows.save(saved_refs, start, found)
            return new

        added = [[rows.zeros(rows.shape) for _ in range(rows.slots)] for _ in range(sums)]
        if not plan.stays:
            one(block, loaded(block), added)
            return

        def next_step(i: Any, carry: Any) -> Any:
            held, added = carry
            exchange.turn = lax.rem(i, jnp.int32(2)) if exchanges % 2 else 0
            following = loaded(block + (i + 1) * blocks)
            return following, one(block + i * blocks, held, added)

        trips = lax.div(steps - 1 - block, jnp.int32(blocks)) + 1
        _, added = lax.fori_loop(0, trips, next_step, (loaded(block), added))
        for of_block, ref in zip(totals, part_refs, strict=True):
            of_block.store(added, ref, block, scratch.get("added"), scratch.get("all"))

    scratch = Exchange.scratch(rows, values)
    for of_block in totals:
        scratch |= of_block.scratch()
    options = {**grid(blocks, rows.warpgroups * plan.groups), "approximate": approximate, "interpret": interpret}
    run = kernel(body, out_type=(*wide, *narrow, *parts), scratch_types=scratch, kernel_name=name, **options)
    found = run(*(rows.view(v) for v in (*arrays, *parameters)), *numbers)
    shapes = [*[(stored, length)] * len(wide), *[(stored,)] * len(narrow), *[(blocks, sums, length)] * len(parts)]
    found = [v.reshape(shape) for v, shape in zip(found, shapes, strict=True)]
    of_rows = len(found) - len(parts)
    return [*(v[:count] for v in found[:of_rows]), *found[of_rows:]] if short else found
