"""One random call: drawn from a seed and an index, run three times, compared, and tested by a procedure.

On CUDA it runs in guarded memory, unless its process runs under a tool that checks memory itself.
"""

import contextlib
import dataclasses
import math
import os
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxdnn as dnn
from jaxdnn._src.cases import case as plain
from jaxdnn._src.cases.drawn import pick
from jaxdnn._src.cases.subject import Subject
from jaxdnn._src.core.engines import platform
from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.branches import Branch
from jaxdnn.verify import levels, matrix
from jaxdnn.verify.guards import PATTERNS, Guards
from jaxdnn.verify.random_report import Report

# The share of the calls of all ops that a pair of an op and an engine has, however many ops there are.
SHARES = {("conv", "hopper"): 0.18, ("conv_dgrad", "hopper"): 0.18, ("conv_wgrad", "hopper"): 0.18}
HOPPER, ENGINES = 3, {"ordered": 0.5}  # how often another pair is drawn, for one of XLA
# Which kernels' branches an op can take.
KERNELS = {
    "conv": ("pipeline", "fprop", "depthwise walk"),
    "conv_transpose": ("pipeline", "dgrad", "depthwise walk"),
    "conv_dgrad": ("pipeline", "dgrad", "depthwise walk"),
    "deform_conv": ("pipeline", "fprop"),
    "conv_wgrad": ("wgrad", "wgrad, images last", "depthwise filter"),
    "grouped matmul": ("grouped",),
    **dict.fromkeys(("group_norm", "instance_norm", "group_norm_dgrad", "instance_norm_dgrad"), ("norm images",)),
    **dict.fromkeys(("batch_norm", "batch_norm_dgrad"), ("norm batches",)),
    "norm": ("norm of rows",),
    "norm_activated": ("norm images", "norm batches"),
    **dict.fromkeys(("softmax", "cross-entropy"), ("softmax of rows", "softmax of long rows")),
    "pool": ("pool",),
    "dropout": ("dropout",),
    "dropout_fused": ("dropout",),
    **dict.fromkeys(("attention", "attention_decode"), ("attention forward", "attention merge")),
    "attention_dgrad": ("attention gradient",),
    "rnn": ("recurrence",),
    "grid_sample": ("sampling", "sampling slopes", "sampling pixels"),
    **dict.fromkeys(("spatial_transformer", "warp"), ("sampling",)),
    "ctc": ("ctc rows", "ctc lattice", "ctc shares"),
}
# How often for a call that the engine serves, and for one that takes a branch: of those that may, and of all.
REDRAWN, TRIED, DRAWN = 30, 40, 400
MULTIPROCESSORS = {None: 6, 1: 1, 3: 1, 20: 1, 100: 1}
PROCEDURE_EVERY = 10
ROOT = Path(dnn.__file__).resolve().parents[1]  # of the checkout
# Those that need no other threads or devices; each call is compared with the definition's bits in any case.
PROCEDURES = {
    "run_to_run": ("repeats", "recompilation", "poisoned output"),
    "batch_invariant": ("alone", "batch sizes", "neighbours", "vmap", "eager", "company"),
}
# The most outputs of a call that are compared with predicted bits; for long sums fewer, but at least `LEAST_MODELLED`:
# there are thousands of calls, and predicting `PRODUCTS` products takes about ten seconds.
MODELLED, LEAST_MODELLED, PRODUCTS = 1_000, 16, 10_000_000
Tell = Callable[[Report], None]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A call, as a seed and an index say it.

    Attributes:
      case: the call; its facts; the kind of data that it runs on.
      picks: seeds the choice of configurations in the planner's place; None leaves it to the planner.
      multiprocessors: how many its kernels may use; None: all.
      towards: a branch that the configurations are to be picked for.
    """

    case: Any
    facts: plain.Facts
    kind: str
    picks: int | None
    multiprocessors: int | None
    towards: Branch | None = None

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Within it the call is traced."""
        with contextlib.ExitStack() as stack:
            if self.multiprocessors:
                stack.enter_context(dnn.limits(multiprocessors=self.multiprocessors))
            if self.picks is not None:
                stack.enter_context(branches.picking(self._pick))
            yield

    def _pick(self, problem: Any, configs: Sequence[Any], taken: Callable[[Any], set[Branch]]) -> Any:
        """One of the configurations, the same whenever it is asked for; rare settings as often as common ones."""
        rng = np.random.default_rng([self.picks or 0, zlib.crc32(_name(problem, configs))])
        if self.towards:
            configs = [c for c in configs if self.towards in taken(c)] or configs
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
    named = engines or [e for e in matrix.engines() if e != "hopper" or platform() == "cuda"]
    for op in ops or matrix.ops():
        for engine in matrix.of(op).engines_of(op):
            if engine in named:
                found[op, engine] = HOPPER if engine == "hopper" else ENGINES.get(engine, 1)
    shares = {pair: share for pair, share in SHARES.items() if pair in found and not ops}
    others = sum(found.values()) - HOPPER * len(shares) or 1.0
    return found | {pair: others * share / (1 - sum(shares.values())) for pair, share in shares.items()}


def reachable(ops: Sequence[str] | None, engines: Sequence[str] | None) -> list[Branch]:
    """The branches of planners that calls of these ops and engines may take."""
    kernels = {kernel for op, engine in pairs(ops, engines) if engine == "hopper" for kernel in _kernels(op)}
    return [branch for branch in branches.every() if branch[0] in kernels]


def draw(seed: int, index: int, among: dict[tuple[str, str], float], towards: Branch | None = None) -> Drawn:
    """The call of an index: one that its engine serves, and that takes the branch `towards`, if one is found soon."""
    rng = np.random.default_rng([seed, index])
    if towards:
        able = {pair: 1.0 for pair in among if pair[1] == "hopper" and towards[0] in _kernels(pair[0])}
        led = {(op, engine): 1.0 for op, engine in able if (op, towards) in matrix.of(op).leads}
        among = led or able or among
    attempt = tried = 0
    while True:
        op, engine = pick(rng, among)
        found = _served(op, engine, rng, f"random-{seed}-{index}" + (f"-{attempt}" if attempt else ""), towards)
        attempt += 1
        if not towards or attempt == DRAWN:
            return found
        if _may_take(found, towards):
            tried += 1
            if tried == TRIED or takes(found, towards):
                return found


def _kernels(op: str) -> tuple[str, ...]:
    return KERNELS.get(op) or KERNELS.get(matrix.of(op).name, ())


def _served(op: str, engine: str, rng: np.random.Generator, name: str, towards: Branch | None) -> Drawn:
    """A call that the engine serves, if one is found soon; for a branch that calls seldom take, of those that do."""
    family = matrix.of(op)
    drawing = family.leads.get((op, towards), family.draw) if towards and engine == "hopper" else family.draw
    picks = int(rng.integers(1 << 30)) if engine == "hopper" and (towards or rng.random() < 0.5) else None
    redrawn = 0
    while True:
        case = drawing(op, engine, rng, f"{name}.{redrawn}" if redrawn else name)
        found = Drawn(case, plain.Facts(None, "fast"), "", picks, pick(rng, MULTIPROCESSORS), towards)
        with found.settings():
            found = dataclasses.replace(found, facts=family.facts(case))
        redrawn += 1
        if found.facts.refusal is None:
            kinds = family.kinds_of(case, found.facts)
            return dataclasses.replace(found, kind=str(rng.choice([*kinds, *kinds[:2]])))
        if redrawn == REDRAWN:
            return found


def _may_take(found: Drawn, branch: Branch) -> bool:
    """Whether the call's dtypes are those of a branch, which needs no lowering."""
    _, what, value = branch
    if what == "operands":
        return value in (found.case.dtype, found.case.in_dtype.name)
    return what != "result" or value == np.dtype(found.case.out_dtype).name


def takes(found: Drawn, branch: Branch) -> bool:
    return found.facts.refusal is None and branch in branches_of(found)


def branches_of(found: Drawn) -> set[Branch]:
    """The branches that a call takes: it is lowered for a GPU, nothing is compiled."""
    operands, extras = _arrays(found, 0)
    with jax.enable_x64(found.case.x64), found.settings(), branches.recorded() as taken:
        jax.jit(found.case.function()).trace(*operands, **extras).lower(lowering_platforms=("cuda",))
    return taken


def _arrays(found: Drawn, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    family = matrix.of(found.case.op)
    return family.arrays(found.case, found.kind, seed, plain.accumulation_of(found.facts, False))


def run(
    found: Drawn, seed: int, index: int, *, flush: bool, guards: Guards | None, tell: Tell = lambda report: None
) -> Report:
    """Runs a call; `tell` is given its report before it runs and before each step that may end the process."""
    case, facts = found.case, found.facts
    report = Report(
        index,
        towards="/".join(found.towards) if found.towards else None,
        id=case.id,
        op=case.op,
        engine=case.engine,
        dtype=case.dtype,
        level=facts.level,
        kind=found.kind,
        call=repr(case),
        picked=found.picks is not None,
        multiprocessors=found.multiprocessors,
    )
    if facts.refusal is not None:
        return dataclasses.replace(report, status="refused", message=facts.refusal)
    one = _Run(found, seed, dataclasses.replace(report, message="while it ran"), flush, guards, tell)
    try:
        message = one.problem()
    except Exception as error:  # whatever an op raises is a finding about this call
        message = f"{one.report.message}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    fatal = any(word in message for word in ("CUDA", "INTERNAL"))  # the device is of no use any more
    return dataclasses.replace(one.report, status="failed" if message else "passed", message=message, fatal=fatal)


class _Run:
    """A call that is run; its report grows as it goes."""

    def __init__(self, found: Drawn, seed: int, report: Report, flush: bool, guards: Guards | None, tell: Tell):
        self.found, self.seed, self.report, self.guards, self.tell = found, seed, report, guards, tell
        self.family = matrix.of(found.case.op)
        self.accumulation = plain.accumulation_of(found.facts, flush)

    def grow(self, **known: Any) -> None:
        self.report = dataclasses.replace(self.report, **known)

    def problem(self) -> str:
        """What is wrong with the call, "" if nothing is."""
        found, case = self.found, self.found.case
        self.tell(self.report)
        operands, extras = self.family.arrays(case, found.kind, self.seed, self.accumulation)
        with jax.enable_x64(case.x64), found.settings():
            with branches.recorded() as taken:
                lowered = jax.jit(case.function()).lower(*operands, **extras)
                compiled = lowered.compile()
            self.grow(branches=tuple(sorted(taken)))
            results = [math.prod(v.shape) * v.dtype.itemsize for v in jax.tree.leaves(lowered.out_info)]
            runs = self.repeated(compiled, results, operands, extras)
            if isinstance(runs, str):
                return runs
            for results in runs:
                given = (case, found.facts, found.kind, operands, extras, results, self.accumulation)
                checks = self.family.judge(*given, modelled=_modelled(found.facts))
                self.grow(ratio=max([self.report.ratio, *(c.ratio for c in checks)]))
                if failed := next((c for c in checks if not c.passed), None):
                    return f"on {failed.data} data, by {failed.rule}: {failed.message}"
            return self.procedure() if self.report.index % PROCEDURE_EVERY == 0 else ""

    def repeated(self, compiled: Any, sizes: Sequence[int], operands: Any, extras: Any) -> Any:
        """The results that differ, of runs on memory full of each pattern; or what is wrong with one, as a sentence.

        Where bits have to repeat one result stands for all. `sizes`: of the results, in bytes.
        """
        guards, repeats = self.guards, self.found.facts.level != "fast"
        there, named = jax.device_put((operands, extras))
        workspace = compiled.memory_analysis().temp_size_in_bytes
        runs, guarded = [], guards is not None
        for pattern in PATTERNS:
            if guards is not None:
                jax.block_until_ready((there, named))
                guarded &= guards.fill(jax.tree.leaves((there, named)), sizes, pattern)
            outs = jax.block_until_ready(compiled(*there, **named))
            if guards is not None:
                self.grow(guarded=guarded)
                if damage := guards.damage(jax.tree.leaves((there, named, outs)), workspace, pattern):
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

    def procedure(self) -> str:
        """Runs one procedure of the level that the engine declares; "" if the level holds."""
        chosen = _subject(self.found, self.seed)
        if chosen is None:
            return ""
        subject, tested = chosen
        declared = [level for level in levels.LEVELS[1 : levels.LEVELS.index(subject.declared) + 1] if level in tested]
        choices = [(level, procedure) for level in declared for procedure in PROCEDURES[level]]
        if not choices:
            return ""
        level, procedure = choices[self.report.index // PROCEDURE_EVERY % len(choices)]
        self.grow(procedure=f"{level}, {procedure}", message=f"in the procedure {level}, {procedure}")
        self.tell(self.report)
        trial = levels.trial(subject, level, procedure, "quick")
        self.grow(tried=trial.status != "not run")
        return f"{self.report.procedure}: {trial.message}" if trial.status == "failed" else ""


def _modelled(facts: plain.Facts) -> int:
    """How many outputs are compared with predicted bits."""
    orders = facts.schedule.order if facts.schedule else ()
    terms = max(map(np.size, orders if isinstance(orders, tuple) else (orders,)), default=1)
    return max(LEAST_MODELLED, min(MODELLED, PRODUCTS // max(terms, 1)))


def _subject(found: Drawn, seed: int) -> tuple[Subject, tuple[str, ...]] | None:
    """What procedures run on, and the levels that can be tested; None if operands are given by name."""
    case, family = found.case, matrix.of(found.case.op)
    operands, extras = _arrays(found, seed)
    if extras:
        return None
    axes, out_axis = family.samples(case) or ((None,) * len(operands), None)
    sized = lambda batch: case
    batched = hasattr(getattr(case, "geometry", None), "batch")
    if batched and out_axis is not None:  # the gradient in x takes the shape of x
        sized = lambda batch: dataclasses.replace(case, geometry=dataclasses.replace(case.geometry, batch=batch))
    function = lambda batch: lambda *arrays: jax.tree.leaves(sized(batch).function()(*arrays))[0]
    names = (case.op, case.engine, case.dtype, found.facts.level)
    subject = Subject(*names, function, operands, axes, out_axis)
    return subject, ("run_to_run",) if out_axis is None else ("run_to_run", "batch_invariant")


def timed(
    seed: int, index: int, among: Any, towards: Branch | None, *, flush: bool, guards: Guards | None, tell: Tell
) -> Report:
    """Draws and runs a call; with the seconds that it took."""
    start = time.perf_counter()
    report = Report(index, towards="/".join(towards) if towards else None, message="while it was drawn")
    tell(report)
    try:
        found = draw(seed, index, among, towards)
    except Exception:  # to describe a call asks the library about it, which must not raise
        # A file of results names no machine's paths.
        said = traceback.format_exc(limit=-3).replace(f"{ROOT}{os.sep}", "")
        return report.failed(f"while it was drawn: {said}")
    drawn = time.perf_counter()
    report = run(found, seed, index, flush=flush, guards=guards, tell=tell)
    seconds = {"drawing": round(drawn - start, 3), "running": round(time.perf_counter() - drawn, 3)}
    return dataclasses.replace(report, seconds=seconds)
