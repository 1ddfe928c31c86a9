"""`jaxdnn verify --mesh`: every line of `cases.example` on the devices that there are.

Of a line's op and of its pullback three things are compared: what the compiled programs communicate, with the table;
how results are sharded, with the operands; and what they are, with one device's: bit for bit where sums of whole
numbers are exact or the level guarantees it.
"""

import collections
import dataclasses
import functools as ft
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
from jaxdnn._src.cases.case import same_bits
from jaxdnn._src.cases.example import LARGE, Example, examples, numbers, read, shape
from jaxdnn._src.core import engines
from jaxdnn._src.core.determinism import is_fixed, satisfies

AXIS, SECOND = "d", "e"
# For meshes alone: groups and windows that devices do not divide, and meshes of two axes.
FURTHER = """
group_norm-shared | NHWC, groups=4 -> NHWC                        | N -/- HWC +2/+4 N,C -/-         | shared groups
conv-valid*       | NHWC, RSCK -> ?                               | N -/+ HW g/g                    | few windows
conv-grouped*     | NHWC, RS_C, padding=1, groups=size(C) -> NHWC | N,H h2/+h4 H,C h2/+h4           | whole groups
conv-two*         | NHWC, RSCK, padding=1 -> NHWK                 | N,H h2/+h4 N,K -/+2 H,C +h2/+h4 | as conv
divisive_norm-two | NHWC -> NHWC                                  | N,H h2/h4 H,W h4/h8             | windows
im2col-two*       | NHWC, padding=1 -> NHWF                       | N,H h2/h2 H,W h4/h4             | windows
"""
SHARED = {("group_norm-shared", "C"): 8}  # devices, more than the four groups: fewer would each have whole ones
STATISTICS = "batch_norm-statistics"
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# Where XLA shards by itself, where shardings are in types, and at the level that guarantees bits; GPUs' kernels too.
VARIANTS = (("auto", "fast", "float32"), ("explicit", "fast", "float32"), ("auto", "mesh_invariant", "float32"))
KERNELS = ("auto", "batch_invariant", "bfloat16")
TRANSFORMED = ("conv", "conv_skip", "conv_dgrad", "conv_wgrad", "conv_transpose")
# What data are multiplied by so that a layer's steps do not enlarge the difference that two orders of addition make.
ITERATED: dict[str, float] = dict.fromkeys(
    (f"{cell}{what}" for cell in ("lstm", "gru", "rnn") for what in ("", "_dgrad", "_wgrad")), 2.0**-4
)
# Threads compile at the same time. Programs run one after the other: two that communicate between the same devices wait
# for one another for ever, if one device starts the first of them and another device the second.
_RUNNING = threading.Lock()
_COMPUTING: dict[tuple[str, str, str], threading.Lock] = {}
_COLLECTIVES = {
    "collective-permute": "h",
    "all-reduce": "+",
    "reduce-scatter": "+",
    "all-gather": "g",
    "all-to-all": "t",
    "collective-broadcast": "b",
}


@ft.cache
def rows() -> dict[str, Example]:
    """The lines of the table, by name."""
    return examples() | {row.name: row for row in map(read, FURTHER.strip().splitlines())}


def mesh_of(kind: str, letters: str = "N") -> Mesh:
    """All devices along one axis, or as many of them as divide the sizes; two axes where there are two letters."""
    count = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
    shape = (min(count, 2), max(count // 2, 1)) if "," in letters else (count,)
    names = (AXIS, SECOND)[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(KINDS[kind],) * len(shape), devices=jax.devices()[:count])


@dataclasses.dataclass(frozen=True)
class Trial:
    """A line of the table with the axes of a letter sharded, or of two."""

    row: str
    letter: str
    kind: str
    level: str
    dtype: str

    @property
    def op(self) -> str:
        return self.row.partition("-")[0]

    @property
    def id(self) -> str:
        return "/".join(("mesh", self.row, self.letter, self.kind, self.level, self.dtype))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trial found. status: "passed", "failed", "refused" (no engine serves it: the message says why)."""

    trial: Trial
    status: str
    forward: str = ""
    backward: str = ""
    message: str = ""


def trials() -> list[Trial]:
    """Every line of the table, letter and variant, and batch norm's statistics."""
    variants = VARIANTS if engines.platform() == "cpu" else (*VARIANTS, KERNELS)
    lines = [Trial(r.name, letter, *variant) for r in rows().values() for variant in variants for letter in r.needs]
    lines = [line for line in lines if jax.device_count() >= _fewest(line)]
    return lines + [Trial(STATISTICS, "N", kind, "fast", "float32") for kind in ("auto", "manual")]


def _fewest(trial: Trial) -> int:
    """How many devices there must be for the line to say what they communicate."""
    if "," in trial.letter:
        return 4  # along each axis of the mesh at least two
    return SHARED.get((trial.row, trial.letter), 1)


def collectives(compiled: Any) -> str:
    """The signs of what a compiled program communicates, each with how often if that is more than once."""
    text = compiled.as_text()
    found: collections.Counter[str] = collections.Counter()
    for name, sign in _COLLECTIVES.items():
        found[sign] += len(re.findall(rf" {name}(?:-start)?\(", text))
    return "".join(sign + (str(n) if n > 1 else "") for sign, n in sorted(found.items()) if n) or "-"


def _counts(signs: str) -> dict[str, int]:
    """How often each collective is found or needed, by sign."""
    return {sign: int(n or 1) for sign, n in re.findall(r"([^-\d])(\d*)", signs)}


def _run(compiled: Any, *operands: Any) -> Any:
    """What a compiled program of all devices makes of its operands."""
    with _RUNNING:
        return jax.block_until_ready(compiled(*operands))


def run(trial: Trial) -> Outcome:
    """Compiles a trial's two programs, runs them, and compares. Whatever an op raises is a finding about it."""
    try:
        return _statistics(trial) if trial.row == STATISTICS else _line(trial)
    except NotImplementedError as refusal:
        return Outcome(trial, "refused", message=str(refusal))
    except Exception as error:
        return Outcome(trial, "failed", message=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _line(trial: Trial) -> Outcome:
    row, mesh = rows()[trial.row], mesh_of(trial.kind, trial.letter)
    alone = _alone(trial.row, trial.level, trial.dtype)
    forward, backward = _programs(row, trial.level)
    at = lambda axes: NamedSharding(mesh, P(*_sharded(axes, trial.letter)))
    with jax.set_mesh(mesh):
        operands = [jax.device_put(v, at(axes)) for v, axes in zip(alone.operands, row.operands, strict=True)]
        first = jax.jit(forward).lower(*operands).compile()
        results = _run(first, *operands)
        cotangents = [jax.device_put(v, y.sharding) for v, y in zip(alone.cotangents, results, strict=True)]
        # Gradients are wanted as the operands are sharded, which on explicit meshes is in their types.
        wanted = [v.sharding for v in operands] if trial.kind == "auto" else None
        second = jax.jit(backward, out_shardings=wanted).lower(*cotangents, *operands).compile()
        gradients = _run(second, *cotangents, *operands)
    signs = collectives(first), collectives(second)
    needed, fixed = _needed(row.needs[trial.letter]), is_fixed(trial.level)
    faults = []
    added = "+" in "".join(needed)  # of a sum in a fixed order the transpose moves data too, and the other way round
    for i, name in enumerate(("forward", "backward")):
        if not _as_needed(signs[i], needed[i], fixed and added):
            faults.append(f"{name}: communicates {signs[i]}, needs {needed[i]}")
    bits = satisfies(trial.level, "mesh_invariant")
    # On GPUs XLA's convolutions may transform their operands (Winograd), which is exact for no numbers.
    exact = row.exact and (fixed or engines.platform() == "cpu" or row.op not in TRANSFORMED)
    for i, (axes, y, one) in enumerate(zip(row.results, results, alone.results, strict=True)):
        faults += _differences(f"result {i}", row, y, one, None if axes == "?" else at(axes), exact or bits)
    for i, (axes, x, one) in enumerate(zip(row.operands, gradients, alone.gradients, strict=True)):
        # Of gradients a level fixes the first derivatives in arrays with a batch; those in others are sums over it.
        further = "_dgrad" in row.op or (row.op in ITERATED and "_wgrad" in row.op)
        guaranteed = bits and "N" in axes and (i == 0 or not further)
        faults += _differences(f"gradient {i}", row, x, one, at(axes), exact or guaranteed)
    return Outcome(trial, "failed" if faults else "passed", *signs, message="; ".join(faults))


def _statistics(trial: Trial) -> Outcome:
    """Batch norm's statistics of whole numbers: those of the whole batch, which no device's part has.

    On manual meshes devices add theirs up as `axis_name` asks.
    """
    mesh, rng = mesh_of("auto"), np.random.default_rng(0)
    n, h, w, c = shape("NHWC", LARGE)
    # Every image's mean is a whole number too, 1 or 5, and so is each device's: all sums are exact.
    half = rng.integers(-3, 4, (n, h // 2, w, c))
    centres = np.where(np.arange(n) < n // 2, 1, 5).reshape(-1, 1, 1, 1)
    x = (centres + np.concatenate([half, -half], 1)).astype(trial.dtype)
    zeros = np.zeros(c, np.float32)
    given = dict(running_mean=zeros, running_variance=zeros, momentum=1.0, eps=0.0)
    function = ft.partial(dnn.batch_norm, **given)
    if trial.kind == "manual":
        named = ft.partial(function, axis_name=AXIS)
        function = jax.shard_map(named, mesh=mesh, in_specs=P(AXIS), out_specs=(P(AXIS), *(P(),) * 4))
    placed = jax.device_put(x, NamedSharding(mesh, P(AXIS)))
    compiled = jax.jit(function).lower(placed).compile()
    y, mean, rstd, *running = map(np.asarray, _run(compiled, placed))
    wide, axes = x.astype(np.float64), (0, 1, 2)
    deviation = np.sqrt(np.var(wide, axes))
    faults = [] if (mean == 3).all() and (running[0] == 3).all() else ["the mean is not that of the whole batch"]
    for name, found, wanted in (
        ("rstd", rstd, 1 / deviation),
        ("running_variance", running[1], np.var(wide, axes, ddof=1)),
        ("y", y, (wide - 3) / deviation),
    ):
        # The sums are exact: a root, a quotient and a product are rounded, each by half a unit, or two of a GPU.
        if not (np.abs(found - wanted) <= 6 * np.finfo(np.float32).eps * np.abs(wanted)).all():
            faults.append(f"{name} is not that of the whole batch")
    return Outcome(trial, "failed" if faults else "passed", collectives(compiled), "", "; ".join(faults))


def _sharded(axes: str, letters: str) -> list[str | None]:
    """Along which axis of the mesh each axis of an array is sharded, where those of one letter or of two are."""
    along = dict(zip(letters.split(","), (AXIS, SECOND), strict=False))
    return [along.get(a.upper(), along.get("C") if a == "F" else None) for a in axes]


def _needed(signs: tuple[str, str]) -> tuple[str, str]:
    """What a line says of its two programs, on this platform: after a "c" there is what CPUs alone communicate."""
    kept = r"\1" if engines.platform() == "cpu" else ""
    forward, backward = (re.sub(r"c(\D\d*)", kept, of_one) or "-" for of_one in signs)
    return forward, backward


def _as_needed(found: str, needed: str, movable: bool) -> bool:
    """Whether a program communicates what it needs, and on CPUs, where that was counted, no more often.

    What is added in a fixed order may be moved in any way.
    """
    ours, allowed = _counts(found), _counts(needed)
    often = engines.platform() != "cpu" or all(n <= allowed.get(sign, 0) for sign, n in ours.items())
    if ours.keys() == allowed.keys() and often:
        return True
    return movable and ours.keys() <= {*allowed, *"+ght"}


def _differences(name: str, row: Example, ours: Any, alone: Any, sharding: Any, fixed: bool) -> Iterator[str]:
    if sharding is not None and not ours.sharding.is_equivalent_to(sharding, ours.ndim):
        yield f"{name} is sharded {ours.sharding.spec}, not {sharding.spec}"
    ours, alone = np.asarray(ours), np.asarray(alone)
    if fixed:
        if (different := ~same_bits(ours, alone)).any():
            yield f"{name} has other bits in {int(different.sum())} of {different.size} elements"
        return
    error, bound = _error(ours, alone), _bound(row, ours.dtype)
    if not error <= bound:
        yield f"{name} differs by {error:.3g} of the largest element, bound {bound:.3g}"


def _error(ours: np.ndarray, alone: np.ndarray) -> float:
    wide = alone.astype(np.float64)
    return float(np.max(np.abs(ours - wide)) / max(np.max(np.abs(wide)), np.finfo(np.float32).tiny))


def _bound(row: Example, dtype: Any) -> float:
    """A bound on the difference of sums of up to all elements in float32 in two orders, both rounded.

    Steps in a type of 16 bits round what they pass on to the next, and XLA for GPUs omits now this rounding, now that.
    Such errors are independent of one another: they grow with the root of the number of steps.
    """
    terms, eps = max(int(np.prod(of)) for of in row.shapes(LARGE)), float(jax.numpy.finfo(dtype).eps)
    steps = LARGE["T"] if row.op in ITERATED and eps > 2.0**-23 else 1
    return terms * 2.0**-24 + 2 * eps * steps**0.5


@dataclasses.dataclass(frozen=True)
class _Alone:
    """Data, and what both programs make of it on one device."""

    operands: Sequence[Any]
    cotangents: Sequence[Any]
    results: Sequence[Any]
    gradients: Sequence[Any]


def _programs(row: Example, level: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The op, and its pullback: (*cotangents, *operands) to the operands' cotangents."""

    def forward(*operands: Any) -> Any:
        with dnn.determinism(level):
            return jax.tree.leaves(row.call(getattr(dnn, row.op), *operands, sizes=LARGE))

    def backward(*arguments: Any) -> Any:
        count = len(arguments) - len(row.operands)
        return list(jax.vjp(forward, *arguments[count:])[1](list(arguments[:count])))

    return forward, backward


def _alone(name: str, level: str, dtype: str) -> _Alone:
    """Of all threads that want the same, one computes it: the lines of a letter each begin at the same time."""
    with _COMPUTING.setdefault((name, level, dtype), threading.Lock()):
        return _computed(name, level, dtype)


@ft.lru_cache(maxsize=64)
def _computed(name: str, level: str, dtype: str) -> _Alone:
    row = rows()[name]
    forward, backward = (jax.jit(program) for program in _programs(row, level))
    whole = level != "mesh_invariant" or row.exact
    # Parameters and statistics, which have one axis, are float32 whatever x is.
    scale = ITERATED.get(row.op, 1.0)
    operands = [(scale * v).astype(dtype if v.ndim > 1 else "float32") for v in row.data(LARGE, whole=whole)]
    results = forward(*operands)
    cotangents = [numbers(9 + i, y.shape, whole).astype(y.dtype) for i, y in enumerate(results)]
    return _Alone(operands, cotangents, results, backward(*cotangents, *operands))


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What a run found, by line and variant: for each letter what both programs communicate."""
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for o in outcomes:
        t = o.trial
        line = lines.setdefault((t.row, t.kind, t.level, t.dtype), {"found": {}, "status": []})
        line["found"][t.letter] = f"{o.forward}/{o.backward}" if o.forward else o.status
        line["status"].append(o.status)
    names = ("line", "kind", "level", "dtype")
    told = [
        dict(zip(names, key, strict=True)) | line | {"status": _worst(line["status"])} for key, line in lines.items()
    ]
    for line in told:
        row = rows().get(line["line"])
        line["needs"] = {a: "/".join(_needed(signs)) for a, signs in row.needs.items()} if row else {}
        line["why"] = row.why if row else "the whole batch's"
    refusals = collections.Counter(o.message for o in outcomes if o.status == "refused")
    counts = dict(collections.Counter(o.status for o in outcomes))
    failed = [{"id": o.trial.id, "message": o.message} for o in outcomes if o.status == "failed"]
    passed = not failed and bool(counts.get("passed"))
    return {"passed": passed, "counts": counts, "failed": failed, "refusals": dict(refusals), "lines": told}


def _worst(statuses: Sequence[str]) -> str:
    return next(s for s in ("failed", "refused", "passed") if s in statuses)
