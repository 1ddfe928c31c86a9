"""Which configuration a kernel runs: measured ones by device kind and problem, else the cost model's choice.

The tables are JSON files beside this module, one a device kind, written by the tuner from measurements; a key names
everything that the choice depends on. No configuration changes a bit of fprop or dgrad, so the table is about speed
alone; wgrad's splits and boxes are part of its schedule, and a table entry fixes them.
"""

import dataclasses
import functools as ft
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

from jaxdnn._kernels.hopper import pipeline
from jaxdnn._kernels.hopper.pipeline import Config, Problem, ceil_div

DEFAULT_SMS = 132
_CYCLES_PER_STEP = 150.0  # barriers and issue of one slot, where the products do not hide them
_EPILOGUE_CYCLES = 9.0  # per row and 64 columns of a warpgroup's tile
_L2_BYTES_PER_CYCLE = 46.0  # per multiprocessor, with all of them reading


def multiprocessors() -> int:
    """The device's number of multiprocessors; where there is no GPU, the H100's and H200's."""
    device = jax.devices()[0]
    return getattr(device, "core_count", DEFAULT_SMS) if device.platform == "gpu" else DEFAULT_SMS


def device_kind() -> str:
    device = jax.devices()[0]
    return device.device_kind if device.platform == "gpu" else "NVIDIA H200"


@ft.cache
def table(kind: str) -> dict[str, Any]:
    """The measured choices for a device kind; empty where none were measured."""
    path = pathlib.Path(__file__).with_name(kind.lower().replace(" ", "_") + ".json")
    return json.loads(path.read_text()) if path.exists() else {}


def key(op: str, problem: Problem, out_dtype: Any) -> str:
    """A problem's name in the table."""
    axes = ",".join(f"{ax.size}>{ax.out}k{ax.taps}i{ax.in_step}o{ax.out_step}m{ax.move}" for ax in problem.axes)
    extras = f"+{len(problem.extras)}" if problem.extras else ""
    groups = f"g{problem.groups}" if problem.groups > 1 else ""
    return (
        f"{op} n{problem.batch} c{problem.reduce} k{problem.columns}{groups} {axes or 'flat'} {problem.filter_dims} "
        f"{_name(problem.dtype)}>{_name(out_dtype)}{extras}"
    )


def _name(dtype: Any) -> str:
    return jax.numpy.dtype(dtype).name


def choose(op: str, problem: Problem, sms: int) -> Config:
    """The configuration for a problem: the table's, else the cheapest by `cost`."""
    entry = table(device_kind()).get(key(op, problem, problem.out_dtype))
    if entry is not None:
        config = Config(**{**entry, "block": tuple(entry["block"])})
        if pipeline.check(problem, config) is None:
            return config
    configs = list(candidates(problem))
    if not configs:
        raise NotImplementedError(f"no tile of the convolution kernel fits {problem}")
    return min(configs, key=lambda config: cost(problem, config, sms))


def candidates(problem: Problem) -> Iterator[Config]:
    """Configurations that can run, over row boxes, column tiles and ways to divide the work among warpgroups."""
    per_group = problem.columns // problem.groups
    least = problem.chunk if problem.filter_dims[-1] == "j" else 8
    widths = [
        n
        for n in (256, 128, 64, 32, 16, 8)
        if n <= max(least, 2 * per_group - 1) and (problem.groups == 1 or per_group % n == 0)
    ]
    for columns in widths:
        for rows in (256, 128, 64):
            for teams, groups in ((2, 1), (1, 2)):
                boxes = list(_boxes(problem, rows))
                for images, block in sorted(boxes, key=lambda box: _waste(problem, *box))[:3]:
                    for stages in (8, 7, 6, 5, 4, 3):
                        order = "k" if problem.columns > columns else "p"
                        config = Config(images, block, columns, stages, teams, groups, order)
                        if pipeline.check(problem, config) is None:
                            yield config
                            break


def variants(problem: Problem, sms: int, top: int = 8) -> list[Config]:
    """What the tuner measures: the model's best, and changes of them that the model does not see."""
    ranked = sorted(set(candidates(problem)), key=lambda config: cost(problem, config, sms))
    best, out = ranked[:top], []
    for config in best:
        out.append(config)
    if math.prod(ax.taps for ax in problem.axes) > 1:
        for images in (1, 2, 4):
            for teams, groups in ((2, 1), (1, 2)):
                for columns in (64, 128):
                    for halo in (3, 2):
                        box = (8,) * len(problem.axes) if len(problem.axes) != 1 else (64,)
                        common = dict(teams=teams, groups=groups, halo=halo, order="p")
                        out.append(Config(images, box, columns, 4, resident=True, **common))
                        out.append(Config(images, box, columns, 4, **common))
    for config in best[:4]:
        replace = ft.partial(dataclasses.replace, config)
        for order in ("k", "p", "n", "kp"):
            out.append(replace(order=order))
        for stages in (config.stages, config.stages - 1, config.stages - 2):
            more = replace(staged=2, stages=stages)
            if stages >= 2 and pipeline.check(problem, more) is None:
                out.append(more)
                break
        out += [replace(resident=True, stages=n) for n in (4, 6)]
    unique = dict.fromkeys(out)
    return [config for config in unique if pipeline.check(problem, config) is None]


def _boxes(problem: Problem, rows: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """All boxes of powers of two that hold `rows` pixels."""
    rank = len(problem.axes)

    def divide(left: int, depth: int) -> Iterator[tuple[int, ...]]:
        if depth == 0:
            yield (left,)
            return
        part = 1
        while part <= left:
            for rest in divide(left // part, depth - 1):
                yield (*rest, part)
            part *= 2

    for images, *block in divide(rows, rank):
        yield images, tuple(block)


def _waste(problem: Problem, images: int, block: tuple[int, ...]) -> float:
    """Pixels computed over pixels needed, and a little against boxes that are narrow in memory."""
    whole = ceil_div(problem.batch, images) * images / problem.batch
    for ax, b in zip(problem.axes, block, strict=True):
        whole *= ceil_div(ax.positions, b) * b / ax.positions
    return whole + (0.01 / block[-1] if block else 0)


def cost(problem: Problem, config: Config, sms: int) -> float:
    """Cycles a problem takes, by a model of the tensor cores, shared memory, the L2 and the epilogue."""
    width = jax.numpy.dtype(problem.dtype).itemsize
    rows, columns, chunk = config.rows, config.columns, problem.chunk
    a_bytes, b_bytes = rows * chunk * width, columns * chunk * width
    macs = rows * columns * chunk
    per_wgmma = 64 * chunk * width + b_bytes  # what one row block of 64 reads from shared memory
    products = macs * width / 4096 / 0.85
    shared = (rows // 64 * per_wgmma + a_bytes + b_bytes) / 128
    step = max(products, shared, (a_bytes + b_bytes) / _L2_BYTES_PER_CYCLE, _CYCLES_PER_STEP)
    taps = sum(math.prod(ax.count[a] for ax, a in zip(problem.axes, phase, strict=True)) for phase in _phases(problem))
    phases = math.prod(ax.out_step for ax in problem.axes)
    tiles = ceil_div(problem.batch, config.images) * ceil_div(problem.columns, columns)
    tiles *= math.prod(ceil_div(ax.positions, b) for ax, b in zip(problem.axes, config.block, strict=True))
    epilogue = 600 + rows // config.groups * ceil_div(columns, 64) * _EPILOGUE_CYCLES
    loop = step * taps * problem.chunks / phases
    each = max(loop, epilogue / 2, (loop + epilogue) / 2) if config.teams == 2 else loop + epilogue
    waves = ceil_div(tiles * phases, sms)
    return waves * each + epilogue


def _phases(problem: Problem) -> list[tuple[int, ...]]:
    phases: list[tuple[int, ...]] = [()]
    for ax in problem.axes:
        phases = [(*head, a) for head in phases for a in range(ax.out_step)]
    return phases
