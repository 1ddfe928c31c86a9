"""Depthwise and narrow-group convolution: the order in which the products of every output are added."""

import math

import numpy as np

from jaxdnn._src.conv.hopper.depthwise.filter import FilterWalk, pixel_order
from jaxdnn._src.conv.hopper.depthwise.filter_plan import FilterPlan, plan_filter
from jaxdnn._src.conv.hopper.depthwise.fma import LaneFilter, LaneWalk
from jaxdnn._src.conv.hopper.depthwise.plan import plan_walk
from jaxdnn._src.conv.hopper.depthwise.planar import Config, Planar
from jaxdnn._src.conv.hopper.depthwise.walk import Phase, Walk, tap_steps


def orders(op: str, call: Planar, config: Config | None = None) -> tuple[str, tuple[np.ndarray, ...], np.ndarray]:
    """The arithmetic ("tensor_core" or "ordered"), the orders of additions, and the `classes` that say which is whose.

    An order has a row for each partial sum, and these are added one after another in float32; on the tensor core
    sixteen neighbouring indices are one instruction. The indices are, forward, tap*group + channel within the group;
    backward data, tap*group + output channel within the group; filter gradient, (n*P + p)*Q + q; -1 stands for a
    product by zero. The output at (p, q) has order number classes[p mod height, q mod width] of that array: backward
    data with a stride has other taps for each residue, and on the tensor core the pairing of taps depends on whether
    the row, within its residue, is even.
    """
    if op == "wgrad":
        arithmetic, order = _filter_order(call, plan_filter(call, config))
        return arithmetic, (order,), np.zeros((1, 1), np.int64)
    plan = plan_walk(op, call, config)
    height, width = plan.walk.out_step
    parities = 2 if isinstance(plan.walk, Walk) else 1
    found = tuple(
        _walk_order(call, plan.walk, phase, parity) for phase in plan.walk.phases for parity in range(parities)
    )
    row, column = np.indices((height * parities, width))
    return _arithmetic(plan.walk), found, ((row % height) * width + column) * parities + row // height


def _arithmetic(walk: Walk | LaneWalk | FilterWalk | LaneFilter) -> str:
    return "tensor_core" if isinstance(walk, Walk | FilterWalk) else "ordered"


def _walk_order(call: Planar, k: Walk | LaneWalk, phase: Phase, parity: int) -> np.ndarray:
    if isinstance(k, LaneWalk):
        taps = [r * call.taps[1] + s for s, _ in phase.column_taps for r, _ in phase.row_taps]
        return np.array([taps], np.int64)
    steps: list[int] = []
    for taps in tap_steps(phase, k.in_step[0], parity):
        step = [(r * call.taps[1] + s) * call.group + i for r, s in taps for i in range(call.group)]
        steps += step + [-1] * (16 - len(step))
    return np.array([steps], np.int64)


def _filter_order(call: Planar, plan: FilterPlan) -> tuple[str, np.ndarray]:
    arithmetic, (rows, columns) = _arithmetic(plan.walk), plan.out_tile
    if arithmetic == "tensor_core":
        walks = [pixel_order(rows, columns)]
    else:
        walks = [[(p, q) for q in range(warp, columns, 4) for p in range(rows)] for warp in range(4)]
    lines: list[list[int]] = []
    total = call.images * math.prod(plan.tiles)
    for split in range(plan.splits):
        for walk in walks:
            line: list[int] = []
            for tile in range(split * plan.per_split, min(total, (split + 1) * plan.per_split)):
                n, rest = divmod(tile, math.prod(plan.tiles))
                i, j = divmod(rest, plan.tiles[1])
                for p, q in walk:
                    at = i * rows + p, j * columns + q
                    inside = p >= 0 and at[0] < call.out[0] and at[1] < call.out[1]
                    line.append((n * call.out[0] + at[0]) * call.out[1] + at[1] if inside else -1)
            lines.append(line)
    longest = max(map(len, lines))
    return arithmetic, np.array([x + [-1] * (longest - len(x)) for x in lines], np.int64)
