"""One random call: drawn from a seed and an index, run in guarded memory three times, compared, put to a procedure."""

import contextlib
import dataclasses
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import jaxdnn as dnn
from jaxdnn._kernels.hopper import branches
from jaxdnn.verify import case as plain
from jaxdnn.verify import levels, matrix
from jaxdnn.verify.families.drawn import pick
from jaxdnn.verify.guards import PATTERNS, Arena
from jaxdnn.verify.subject import Subject

# How often a pair of an op and an engine is drawn; others once.
WEIGHTS = {("conv", "hopper"): 46, ("conv_dgrad", "hopper"): 45, ("conv_wgrad", "hopper"): 45}
HOPPER, ENGINES = 3, {"ordered": 0.5}
# Which kernels' branches an op can take.
KERNELS = {
    "conv": ("pipeline", "fprop", "depthwise walk"),
    "conv_transpose": ("pipeline", "dgrad", "depthwise walk"),
    "conv_dgrad": ("pipeline", "dgrad", "depthwise walk"),
    "conv_wgrad": ("wgrad", "wgrad, images last", "depthwise filter"),
    "norm": ("norm rows", "norm images", "norm batches"),
    "softmax": ("softmax",),
    "pool": ("pool",),
    "dropout": ("dropout",),
    "dropout_fused": ("dropout",),
}
REDRAWN, TRIED = 30, 20  # how often for a call that the engine serves, and for one that takes a branch
MULTIPROCESSORS = {None: 6, 1: 1, 3: 1, 20: 1, 100: 1}
PROCEDURE_EVERY = 10
# Those that need no other threads or devices; each call is compared with the definition's bits in any case.
PROCEDURES = {
    "run_to_run": ("repeats", "recompilation", "poisoned output"),
    "batch_invariant": ("batch sizes", "neighbours", "vmap"),
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A call, as a seed and an index say it.

    Attributes:
      case: the call; its facts; the kind of data that it runs on.
      picks: seeds the choice of configurations in the planner's place; None leaves it to the planner.
      multiprocessors: how many its kernels may use; None: all.
      towards: a branch, (kernel, what, value), that the configurations are to be picked for.
    """

    case: Any
    facts: plain.Facts
    kind: str
    picks: int | None
    multiprocessors: int | None
    towards: tuple[str, str, str] | None = None

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Within it the call is traced."""
        with contextlib.ExitStack() as stack:
            if self.multiprocessors:
                stack.enter_context(dnn.limits(multiprocessors=self.multiprocessors))
            if self.picks is not None:
                stack.enter_context(branches.picking(self._pick))
            yield

    def _pick(self, problem: Any, configs: Sequence[Any]) -> Any:
        """One of the configurations, the same whenever it is asked for; rare settings as often as common ones."""
        rng = np.random.default_rng([self.picks or 0, zlib.crc32(_name(problem, configs))])
        if self.towards:
            _, what, value = self.towards
            settings = [getattr(c, what.replace(" ", "_"), None) for c in configs]
            wanted = [c for c, v in zip(configs, settings, strict=True) if value in (str(v), branches.YES_NO[bool(v)])]
            configs = wanted or configs
        fields = [f.name for f in dataclasses.fields(configs[0])]
        for name in rng.permutation(fields)[:3]:
            values = sorted({repr(getattr(c, name)) for c in configs})
            value = values[int(rng.integers(len(values)))]
            configs = [c for c in configs if repr(getattr(c, name)) == value]
        return configs[int(rng.integers(len(configs)))]


def _name(problem: Any, configs: Sequence[Any]) -> bytes:
    """What a choice is drawn for, the same in every process: an epilogue's function has an address in its name."""
    if dataclasses.is_dataclass(problem) and getattr(problem, "finish", None):
        problem = dataclasses.replace(problem, finish=None)  # type: ignore[type-var]
    return f"{problem} {len(configs)}".encode()


def pairs(ops: Sequence[str] | None, engines: Sequence[str] | None) -> dict[tuple[str, str], float]:
    """The pairs of an op and an engine that calls are drawn for, by weight; `hopper` where it runs or is named."""
    found: dict[tuple[str, str], float] = {}
    named = engines or [e for e in matrix.engines() if e != "hopper" or plain.platform() == "cuda"]
    for op in ops or matrix.ops():
        for engine in matrix.of(op).engines_of(op):
            if engine in named:
                weight = HOPPER if engine == "hopper" else ENGINES.get(engine, 1)
                found[op, engine] = WEIGHTS.get((op, engine), weight)
    return found


def draw(
    seed: int, index: int, among: dict[tuple[str, str], float], towards: tuple[str, str, str] | None = None
) -> Drawn:
    """The call of an index: one that its engine serves, and that takes the branch `towards`, if one is found soon."""
    rng = np.random.default_rng([seed, index])
    if towards:
        among = {pair: 1 for pair in among if pair[1] == "hopper" and towards[0] in _kernels(pair[0])} or among
    attempt = 0
    while True:
        op, engine = pick(rng, among)
        found = _served(op, engine, rng, f"random-{seed}-{index}" + (f"-{attempt}" if attempt else ""), towards)
        attempt += 1
        if not towards or attempt == TRIED or _takes(found, towards):
            return found


def _kernels(op: str) -> tuple[str, ...]:
    return KERNELS.get(op) or KERNELS.get(matrix.of(op).name, ())


def _served(op: str, engine: str, rng: np.random.Generator, name: str, towards: Any) -> Drawn:
    family = matrix.of(op)
    picks = int(rng.integers(1 << 30)) if engine == "hopper" and (towards or rng.random() < 0.5) else None
    redrawn = 0
    while True:
        case = family.draw(op, engine, rng, f"{name}.{redrawn}" if redrawn else name)
        found = Drawn(case, plain.Facts(None, "fast"), "", picks, pick(rng, MULTIPROCESSORS), towards)
        with found.settings():
            found = dataclasses.replace(found, facts=family.facts(case))
        redrawn += 1
        if found.facts.refusal is None:
            kinds = family.kinds_of(case, found.facts)
            return dataclasses.replace(found, kind=str(rng.choice([*kinds, *kinds[:2]])))
        if redrawn == REDRAWN:
            return found


def _takes(found: Drawn, towards: tuple[str, str, str]) -> bool:
    """Whether the call takes a branch: lowered for a GPU, nothing is compiled."""
    if found.facts.refusal is not None:
        return False
    operands, extras = _arrays(found, 0)
    with jax.enable_x64(found.case.x64), found.settings(), branches.recorded() as taken:
        jax.jit(found.case.function()).trace(*operands, **extras).lower(lowering_platforms=("cuda",))
    return towards in {(kernel, what, str(value)) for kernel, what, value in taken}


def _arrays(found: Drawn, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    family = matrix.of(found.case.op)
    return family.arrays(found.case, found.kind, seed, plain.accumulation_of(found.facts, False))


def run(found: Drawn, seed: int, index: int, *, flush: bool, arena: Arena | None) -> dict[str, Any]:
    """Runs a call and says what came of it: `status` is "passed", "failed" or "refused"."""
    case, told = found.case, found.facts
    report = {"index": index, "id": case.id, "op": case.op, "engine": case.engine, "dtype": case.dtype}
    report |= {"level": told.level, "kind": found.kind, "picked": found.picks is not None, "call": repr(case)}
    report |= {"multiprocessors": found.multiprocessors, "status": "refused", "message": told.refusal or ""}
    if told.refusal is not None:
        return report
    report["guarded"] = arena is not None
    try:
        message, ratio = _problem(found, seed, index, flush, arena, report)
    except Exception as error:  # whatever an op raises is a finding about this call
        message, ratio = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", 0.0
    report["fatal"] = any(word in message for word in ("CUDA", "INTERNAL"))  # the device is of no use any more
    return report | {"status": "failed" if message else "passed", "message": message, "ratio": ratio}


def _problem(
    found: Drawn, seed: int, index: int, flush: bool, arena: Arena | None, report: dict[str, Any]
) -> tuple[str, float]:
    """What is wrong with a call, "" if nothing is, and its largest error over the bound; reports its branches."""
    case, family = found.case, matrix.of(found.case.op)
    accumulation = plain.accumulation_of(found.facts, flush)
    operands, extras = family.arrays(case, found.kind, seed, accumulation)
    with jax.enable_x64(case.x64), found.settings():
        with branches.recorded() as taken:
            compiled = jax.jit(case.function()).lower(*operands, **extras).compile()
        report["branches"] = sorted((kernel, what, str(value)) for kernel, what, value in taken)
        runs = _repeated(compiled, operands, extras, arena, report, repeats=found.facts.level != "fast")
        if isinstance(runs, str):
            return runs, 0.0
        ratio = 0.0
        for results in runs:
            checks = family.judge(case, found.facts, found.kind, operands, extras, results, accumulation)
            ratio = max([ratio, *(c.ratio for c in checks)])
            if failed := next((c for c in checks if not c.passed), None):
                return f"on {failed.data} data, by {failed.rule}: {failed.message}", ratio
        if index % PROCEDURE_EVERY == 0:
            return _put_to_a_procedure(found, seed, index), ratio
    return "", ratio


def _repeated(
    compiled: Any, operands: Any, extras: Any, arena: Arena | None, report: dict[str, Any], *, repeats: bool
) -> Any:
    """The results that differ, of runs on memory full of each pattern; or what is wrong with one, as a sentence.

    `repeats`: whether bits have to repeat, so that one result stands for all.
    """
    there, named = jax.device_put((operands, extras))
    workspace = compiled.memory_analysis().temp_size_in_bytes
    runs = []
    for pattern in PATTERNS:
        if arena is not None:
            jax.block_until_ready((there, named))
            report["guarded"] &= arena.fill(jax.tree.leaves((there, named)), pattern)
        outs = jax.block_until_ready(compiled(*there, **named))
        if arena is not None and (damage := arena.damage(jax.tree.leaves((there, named, outs)), workspace, pattern)):
            return damage
        here = jax.tree.map(np.asarray, outs)
        del outs
        different = [
            int((~plain.same_bits(a, b)).sum())
            for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(runs[0] if runs else here), strict=True)
        ]
        if repeats and any(different):
            return f"{sum(different)} elements have other bits when it is repeated"
        if not runs or any(different):
            runs.append(here)
    for given, here in zip(jax.tree.leaves((operands, extras)), jax.tree.leaves((there, named)), strict=True):
        if not plain.same_bits(np.asarray(here), np.asarray(given)).all():
            return "an operand was written to"
    return runs


def _put_to_a_procedure(found: Drawn, seed: int, index: int) -> str:
    """Runs one procedure of the level that the engine declares; "" if the level holds."""
    case, family = found.case, matrix.of(found.case.op)
    operands, extras = _arrays(found, seed)
    if extras:
        return ""  # the procedures know of no operands by name
    axes, out_axis = family.samples(case) or ((None,) * len(operands), None)
    sized = lambda batch: case
    if hasattr(case, "geometry") and out_axis is not None:  # the gradient in x is told the shape of x
        sized = lambda batch: dataclasses.replace(case, geometry=dataclasses.replace(case.geometry, batch=batch))
    function = lambda batch: lambda *arrays: jax.tree.leaves(sized(batch).function()(*arrays))[0]
    names = (case.op, case.engine, case.dtype, found.facts.level)
    subject = Subject(*names, function, operands, axes, out_axis)
    tested = ("run_to_run",) if out_axis is None else ("run_to_run", "batch_invariant")
    declared = [level for level in levels.LEVELS[1 : levels.LEVELS.index(subject.declared) + 1] if level in tested]
    choices = [(level, procedure) for level in declared for procedure in PROCEDURES[level]]
    if not choices:
        return ""
    trial = levels.trial(subject, *choices[index // PROCEDURE_EVERY % len(choices)], "quick")
    return f"{trial.level}, {trial.procedure}: {trial.message}" if trial.status == "failed" else ""


def timed(seed: int, index: int, among: Any, towards: Any, *, flush: bool, arena: Arena | None) -> dict[str, Any]:
    """Draws and runs a call; with the seconds that it took."""
    start = time.perf_counter()
    try:
        found = draw(seed, index, among, towards)
    except Exception:  # to describe a call asks the library about it, which must not raise
        report = {"index": index, "id": "", "op": "", "engine": "", "dtype": "", "status": "failed"}
        return report | {"message": f"while it was drawn: {traceback.format_exc(limit=-3)}"}
    drawn = time.perf_counter()
    report = run(found, seed, index, flush=flush, arena=arena)
    seconds = {"drawing": round(drawn - start, 3), "running": round(time.perf_counter() - drawn, 3)}
    return report | {"seconds": seconds}
