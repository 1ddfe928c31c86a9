"""Which configuration a kernel runs: the measured one for the device kind and the problem, or the cost model's choice.

The tables are JSON files beside this module, one a device kind, made from measurements; a key names the problem, and of
its epilogue how many operands there are. No configuration changes a bit of fprop or dgrad, so the table is about speed
alone; wgrad's splits and boxes are part of its schedule, and a table entry fixes them.
"""

import dataclasses
import functools as ft
import itertools
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

from jaxdnn._src.conv.hopper import plan
from jaxdnn._src.conv.hopper.plan import Config, Problem
from jaxdnn._src.conv.hopper.scheduler import decided
from jaxdnn._src.hopper import MEASURED_ON, MULTIPROCESSORS, branches
from jaxdnn._src.hopper.sizes import ceil_div

# The model's constants, fitted to what the kernels took on an H200 for 87 passes of networks that are not held out:
# half of its estimates are within 4 %, on networks held out within 17 %, where its plans took 0.92 of the time of those
# before (`benchmarks/notes-hopper-conv.md`). Cycles, bytes per cycle and multiprocessor.
_TENSOR_SHARE = 0.87  # the share of the tensor cores' peak that the loop of one tile reaches
_READ_RATE = 106.0  # of shared memory, where both factors lie: narrow tiles read the pixels again for few products
_L2_RATE = 77.0
_STEP, _STEP_WITHOUT_RING = 385.0, 74.0  # waiting for a slot and releasing it, if the products do not hide it
_EPILOGUE, _EPILOGUE_ROW = 180.0, 15.8  # for a tile, and per row and 64 columns of a warpgroup's part
_STORE_RATE, _LOAD_RATE = 23.9, 54.0
_LATENCY = 243.0  # for a tile, with 64 KiB in flight
_UNROLLED = 4  # taps of the last axis in one loop iteration, if no load is needed between them
_WAVES = 0.62  # the cost of a partial last wave, as a share of a full one


def multiprocessors() -> int:
    """The device's number of multiprocessors; without a GPU that of an H100 or H200."""
    device = jax.devices()[0]
    return getattr(device, "core_count", MULTIPROCESSORS) if device.platform == "gpu" else MULTIPROCESSORS


def device_kind() -> str:
    device = jax.devices()[0]
    return device.device_kind if device.platform == "gpu" else MEASURED_ON[0]


@ft.cache
def table(kind: str) -> dict[str, Any]:
    """The measured choices for a device kind; empty if none were measured."""
    path = pathlib.Path(__file__).with_name(kind.lower().replace(" ", "_") + ".json")
    return json.loads(path.read_text()) if path.exists() else {}


def key(op: str, problem: Problem, out_dtype: Any) -> str:
    """A problem's name in the table."""
    axes = ",".join(f"{ax.size}>{ax.out}k{ax.taps}i{ax.in_step}o{ax.out_step}m{ax.move}" for ax in problem.axes)
    extras = f"+{len(problem.extras)}" if problem.extras else ""
    groups = f"g{problem.groups}" if problem.groups > 1 else f"w{problem.window}" if problem.window else ""
    return (
        f"{op} n{problem.batch} c{problem.reduce} k{problem.columns}{groups} {axes or 'flat'} {problem.filter_dims} "
        f"{_name(problem.dtype)}>{_name(out_dtype)}{extras}"
    )


def _name(dtype: Any) -> str:
    return jax.numpy.dtype(dtype).name


def choose(op: str, problem: Problem, sms: int) -> Config:
    """The configuration for a problem: the table's, or else the cheapest by `cost`."""
    if (pick := branches.picker()) and (bases := list(candidates(problem))):
        configs = [config for base in bases for config in (base, *beside(problem, base))]
        return pick(problem, configs, lambda config: branches.named("pipeline", **decided(problem, config, sms)))
    entry = _measured(op, problem)
    if entry is not None:
        # The epilogue's operands leave less memory for the ring, and an epilogue may change the zeros.
        blanks = dict.fromkeys((entry.blank, 0))
        for blank, stages in itertools.product(blanks, range(entry.stages, 1, -1)):
            config = dataclasses.replace(entry, stages=stages, blank=blank)
            if plan.check(problem, config) is None:
                return config
    configs = list(candidates(problem))
    if not configs:
        raise NotImplementedError(f"no tile of the convolution kernel fits {problem}")
    return min(configs, key=lambda config: cost(problem, config, sms))


def _measured(op: str, problem: Problem) -> Config | None:
    """The table's entry for a problem, or for the same one without the epilogue's operands and output type."""
    plain = dataclasses.replace(problem, extras=())
    known = table(device_kind())
    for name in (key(op, problem, problem.out_dtype), key(op, plain, problem.dtype)):
        if name in known:
            return Config(**{**known[name], "block": tuple(known[name]["block"])})
    return None


def candidates(problem: Problem) -> Iterator[Config]:
    """Configurations that can run, over row boxes, column tiles and ways to divide the work among warpgroups."""
    per_group = problem.columns // problem.groups
    narrowest = 32 // min(problem.epilogue_widths)  # bytes of a swizzle
    least = max(problem.chunk if problem.filter_dims[-1] == "j" else 8, narrowest)
    boxes = {rows: _boxes(problem, rows) for rows in (256, 192, 128, 64)}
    for columns in (256, 128, 64, 32, 16, 8):
        if columns > max(least, 2 * per_group - 1) or (problem.groups > 1 and per_group % columns):
            continue
        order = "k" if problem.columns > columns else "p"
        for rows, (teams, groups) in itertools.product(boxes, ((2, 1), (1, 2))):
            for images, block in boxes[rows][:3]:
                base = Config(images, block, columns, 8, teams, groups, order)
                yield from _deepest(problem, base)
                yield from _deepest(problem, dataclasses.replace(base, staged=2))
        yield from _with_filter_or_halo(problem, columns, order, boxes)


def beside(problem: Problem, base: Config) -> Iterator[Config]:
    """Variants of a candidate that only tuning chooses: other orders of tiles and of phases, more output buffers."""
    changes: list[dict[str, Any]] = [{"order": order} for order in ("k", "kp", "n", "p") if order != base.order]
    changes += [{"staged": count, "stages": stages} for count in (3, 4) for stages in range(2, base.stages)]
    if len(problem.phases) > 1:
        changes += [{"sharing": how} for how in ("snake", "together")]
        changes += [{"blank": problem.axes[-1].positions // parts} for parts in (1, 2, 4)]
    for change in changes:
        config = dataclasses.replace(base, **change)
        if plan.check(problem, config) is None:
            yield config


def _deepest(problem: Problem, base: Config) -> Iterator[Config]:
    """The configuration with the deepest ring that fits; less than the ring's depth changes nothing else."""
    for stages in range(base.stages, 2, -1):
        config = base if stages == base.stages else dataclasses.replace(base, stages=stages)
        reason = plan.check(problem, config)
        if reason is None:
            yield config
        if reason != plan.NO_ROOM:
            return


Boxes = dict[int, list[tuple[int, tuple[int, ...]]]]


def _with_filter_or_halo(problem: Problem, columns: int, order: str, boxes: Boxes) -> Iterator[Config]:
    """Tiles that keep the filter in shared memory, and tiles of 8 x 8 positions whose taps share one load."""
    resident = problem.columns <= columns and problem.groups == 1
    for rows, (teams, groups) in itertools.product((256, 128), ((2, 1), (1, 2))):
        if resident:
            for images, block in boxes[rows][:2]:
                yield from _deepest(problem, Config(images, block, columns, 6, teams, groups, order, resident=True))
    rank, unit = len(problem.axes), all(abs(ax.move) == 1 for ax in problem.axes)
    if rank < 2 or not unit or problem.window or math.prod(ax.taps for ax in problem.axes) == 1:
        return
    lead = [(images, ()) for images in (4, 2, 1)] if rank == 2 else [(1, (4,)), (1, (2,)), (2, (1,)), (1, (1,))]
    unroll = resident and problem.axes[-1].taps <= _UNROLLED
    for (images, outer), (teams, groups), halo in itertools.product(lead, ((2, 1), (1, 2)), (3, 2)):
        base = Config(images, (*outer, 8, 8), columns, 4, teams, groups, order, halo=halo, unroll=unroll)
        yield from _deepest(problem, dataclasses.replace(base, resident=resident))


def _boxes(problem: Problem, rows: int) -> list[tuple[int, tuple[int, ...]]]:
    """Boxes of `rows` pixels, powers of two along the spatial axes; those that waste fewest pixels come first."""
    found = []
    for block in itertools.product((1, 2, 4, 8, 16, 32, 64, 128, 256), repeat=len(problem.axes)):
        images, rest = divmod(rows, math.prod(block))
        if rest or not images or (problem.window and block[-1] % 64) or (problem.one_image and images > 1):
            continue
        found.append((images, block))
    return sorted(found, key=lambda box: _waste(problem, *box))


def _waste(problem: Problem, images: int, block: tuple[int, ...]) -> float:
    """The ratio of computed to needed pixels, with a small penalty for boxes that are narrow in memory."""
    whole = ceil_div(problem.batch, images) * images / problem.batch
    for ax, b in zip(problem.axes, block, strict=True):
        whole *= ceil_div(ax.positions, b) * b / ax.positions
    return whole + (0.01 / block[-1] if block else 0)


def cost(problem: Problem, config: Config, sms: int) -> float:
    """Estimated cycles for a problem, by a model of tensor cores, shared memory, the epilogue and device memory."""
    width = jax.numpy.dtype(problem.dtype).itemsize
    rows, columns, chunk = config.rows, config.columns, problem.chunk
    a_row = 16 if problem.window else chunk * width
    a_bytes, b_bytes = math.prod(plan.a_box(problem, config)) * a_row, columns * chunk * width
    phases, axes = problem.phases, problem.axes
    steps = sum(problem.taps(phase) for phase in phases) * problem.chunks / len(phases)
    loaded = (a_bytes * problem.chunks / steps if config.halo else a_bytes) + b_bytes * (not config.resident)
    read = rows // 64 * (64 * chunk * width + b_bytes) / _READ_RATE
    ring = _STEP_WITHOUT_RING if config.halo and config.resident else _STEP
    step = max(rows * columns * chunk * width / 4096 / _TENSOR_SHARE, read, loaded / _L2_RATE, ring)
    loop = step * steps
    epilogue = _EPILOGUE + rows // config.groups * columns / 64 * _EPILOGUE_ROW
    tile = max(loop, (loop + epilogue) / 2) if config.teams == 2 else loop + epilogue
    out = rows * columns * jax.numpy.dtype(problem.out_dtype).itemsize
    tile = max(tile, out / _STORE_RATE + loaded * steps / _LOAD_RATE)
    tiles = len(phases) * ceil_div(problem.batch, config.images) * ceil_div(problem.columns, columns)
    tiles *= math.prod(ceil_div(ax.positions, b) for ax, b in zip(axes, config.block, strict=True))
    waves = _WAVES * ceil_div(tiles, sms) + (1 - _WAVES) * tiles / sms
    latency = _LATENCY / max(1.0, config.stages * loaded / 65536) * tiles / sms
    return waves * tile + epilogue + latency
