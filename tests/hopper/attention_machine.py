"""Runs attention's forward kernel on the CPU: its consumers' PTX on the warpgroups of a block, and a producer.

The warpgroups and the producer take turns in an order that is drawn, and change at every instruction that waits. A slot
is overwritten as soon as its barrier says that it has been read.
"""

import contextlib
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdnn._src.attention.hopper import work
from jaxdnn._src.attention.hopper.forward_ptx import code
from jaxdnn._src.attention.hopper.plan import ROWS, Plan, Problem, Spread
from jaxdnn._src.attention.hopper.tile_ptx import RESULTS, TURN, operands
from tests.hopper.warpgroup_machine import LANES, Add, Block, Run, Warpgroup, nearest


def attention(
    problem: Problem,
    plan: Plan,
    arrays: dict[str, np.ndarray],
    items: list[tuple[int, int, int, int]],
    *,
    seed: int = 0,
    add: Add = nearest,
) -> tuple[np.ndarray, ...]:
    """y (B, N, T, E) and lse (B, N, T) of these blocks of queries, (b, n, first row, part), NaN elsewhere.

    Of a plan for parts their largest scores, sums (B, N, parts, T) and values (B, N, parts, T, E).

    arrays: q, k and v, these with heads first, and what else the problem has, by name.
    """
    rng = np.random.default_rng(seed)
    block = Block(problem, plan, rng, add)
    given: dict[str, Any] = {name: jnp.asarray(x) for name, x in arrays.items() if name not in "qkv"}
    if plan.mask.listed:
        given["ranges"] = work.ranges(problem, plan, given)
    found = [
        vars(work.bounded(problem, plan, given, b, n, jnp.int32(row), jnp.int32(part))) for b, n, row, part in items
    ]
    found = [{name: int(value) for name, value in item.items()} for item in found]
    q, k, v = (arrays[name] for name in "qkv")
    y = np.full((*q.shape[:3], v.shape[3]), np.nan, np.float32)
    groups = [Warpgroup(block, w) for w in range(plan.consumers)]
    text, kinds = code(problem, plan), operands(problem, plan)
    results = RESULTS[plan.partial]
    memory = {name: block.keep(arrays[name]) for name, kind in kinds.items() if kind == "l" and name not in results}
    written = {name: (100 + i) << 40 for i, name in enumerate(results)}

    def produce() -> Run:
        number = used = 0

        def load_queries(item: dict[str, int]) -> Run:
            for w in range(plan.consumers):
                slot, over = map(int, work.query_slot(plan, w, jnp.int32(used)))
                while over and not block.barrier("q_empty", slot).passed((over - 1) & 1):
                    yield
                rows = _rows(q[item["image"], item["head"]], item["row"] + ROWS * w, ROWS)
                block.put("q", slot * plan.q_bytes, rows)
                block.barrier("q_full", slot).arrive()

        for item in found:
            for j in range(item["first"], item["last"]):
                for name, source, size in (("k", k, plan.k_bytes), ("v", v, plan.v_bytes)):
                    slot, over = number % plan.stages, number // plan.stages
                    while over and not block.barrier(f"{name}_empty", slot).passed((over - 1) & 1):
                        yield
                    head = item["head"] // (problem.heads // problem.shared)
                    block.put(name, slot * size, _rows(source[item["image"], head], j * plan.keys, plan.keys))
                    block.barrier(f"{name}_full", slot).arrive()
                    yield
                    if name == "k" and j == item["first"]:
                        yield from load_queries(item)
                number += 1
            if plan.out_in_q and item["first"] >= item["last"]:
                yield from load_queries(item)
            used += plan.out_in_q or item["last"] > item["first"]

    def consume(group: Warpgroup) -> Run:
        number = used = 0
        if plan.consumers > 1 and group.number == plan.consumers - 1:
            block.come(TURN, 2 * LANES)
        for item in found:
            numbers = _numbers(problem, arrays, item)
            places = {**block.at, "bars": block.bars, **written, **memory, "number": number, "item": used}
            yield from group.run(text, kinds, places | numbers)
            row = item["row"] + ROWS * group.number
            if not plan.partial:
                stride = plan.q_bytes if plan.out_in_q else plan.out_bytes
                out = block.get("out", group.number * stride, ROWS, v.shape[3])
                kept = max(0, min(ROWS, problem.queries - row))
                y[item["image"], item["head"], row : row + kept] = out[:kept]
            if plan.out_in_q:
                for _ in range(4):
                    block.barrier("q_empty", group.number).arrive()
            number += item["last"] - item["first"]
            used += plan.out_in_q or item["last"] > item["first"]
        if plan.consumers > 1 and group.number == 0:
            yield from group.meet(TURN, 2 * LANES)

    _interleave(block, [produce(), *map(consume, groups)], rng)
    b, n, t = q.shape[:3]
    shapes: dict[str, tuple[int, ...]] = {"lse": (b, n, t) if problem.heads_first else (b, t, n)}
    parts = (b, n, problem.parts, t)
    shapes |= {"largest": parts, "total": parts, "values": (*parts, plan.values)}
    arrays_of = {name: np.full(shapes[name], np.nan, np.float32) for name in results}
    for place, value in (stored for group in groups for stored in group.stored.items()):
        arrays_of[results[(place >> 40) - 100]].reshape(-1)[(place & (1 << 40) - 1) // 4] = value
    if plan.partial:
        return tuple(arrays_of.values())
    lse = arrays_of["lse"]
    return y, lse if problem.heads_first else np.swapaxes(lse, 1, 2)


def _numbers(problem: Problem, arrays: dict[str, np.ndarray], item: dict[str, int]) -> dict[str, Any]:
    """The operands that are numbers, as the frame computes them."""
    image, head = item["image"], item["head"]
    found: dict[str, Any] = item | {"result_first": work.first_result(problem, image, head, item["part"])}
    for name, operand in (("alibi_slopes", "slope"), ("sinks", "sink")):
        if name in arrays:
            found[operand] = arrays[name][image if len(arrays[name]) > 1 else 0, head]
    for name in ("bias", "mask"):
        array: Spread | None = getattr(problem, name)
        if array is not None:
            shape = arrays[name].shape
            index = (image if array.axes[0] else 0, head if array.axes[1] else 0, 0, 0)
            found[f"{name}_first"] = int(np.ravel_multi_index(index, shape))
    return found


def _interleave(block: Block, agents: list[Run | None], rng: np.random.Generator) -> None:
    """Runs the agents in an order that is drawn, each for some waits at a time."""
    idle = 0
    state = lambda: (dict(block.rounds), [(b.over, b.due) for b in block.barriers], sum(a is not None for a in agents))
    while any(agents):
        before = state()
        for i in rng.permutation(len(agents))[: 1 + int(rng.integers(len(agents)))]:
            with contextlib.suppress(StopIteration):
                for _ in range(int(rng.integers(1, 6)) if agents[i] is not None else 0):
                    try:
                        next(agents[i])  # type: ignore[arg-type]
                    except StopIteration:
                        agents[i] = None
                        raise
        idle = idle + 1 if before == state() else 0
        if idle > 5000:
            raise RuntimeError("a wait without an end")


def _rows(matrix: np.ndarray, first: int, count: int) -> np.ndarray:
    """Rows of a matrix, zeros beyond its last."""
    found = np.zeros((count, matrix.shape[1]), matrix.dtype)
    part = matrix[first : first + count]
    found[: len(part)] = part
    return found


def every_item(problem: Problem, plan: Plan) -> list[tuple[int, int, int, int]]:
    tiles = range(math.ceil(problem.queries / plan.block_rows))
    numbers = itertools.product(range(problem.batch), range(problem.heads), tiles, range(problem.parts))
    return [(b, n, t * plan.block_rows, part) for b, n, t, part in numbers]
