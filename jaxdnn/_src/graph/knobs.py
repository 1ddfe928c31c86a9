"""The knobs of a plan's configuration: what can be chosen of it, among what, and what each choice means."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxdnn._src.core import engines
from jaxdnn._src.core.explain import ACCUMULATORS, HAZARDS, Candidate
from jaxdnn._src.graph.execute import Step
from jaxdnn._src.graph.report import StepReport

OF_STEP = "engine:"  # the knob of a step is called so and by the node whose op is called
OF_PLAN = ("determinism", "sm_count", "workspace_limit")


@dataclasses.dataclass(frozen=True)
class Knob:
    """A knob of a plan; see `jaxdnn.graph.Plan.knobs`.

    Attributes:
      name: "engine:NODE", the engine of the op that a node calls; "determinism", the level that the plan guarantees;
        "sm_count" and "workspace_limit", where an engine keeps to them.
      choices: the values there are; empty where every integer from `least` on is one.
      least: the least integer.
      value: what the plan has: of an engine the one that serves, None of what is not limited.
      notes: what each choice means, by choice: of an engine its level, accumulator and hazards, in words.
    """

    name: str
    choices: tuple[Any, ...]
    value: Any
    least: int | None = None
    notes: Mapping[Any, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        among = ", ".join(map(str, self.choices)) or f"any integer from {self.least} on"
        return f"{self.name} = {self.value}, of {among}"


def of_steps(steps: Sequence[Step], parts: Sequence[StepReport], chosen: Mapping[str, str]) -> Iterator[Knob]:
    """A knob for each step whose calls several engines may serve; `parts` are of the plan in which none is chosen."""
    for step, part in zip(steps, parts, strict=True):
        if step.core is None or not part.engines:
            continue
        able = [{c.engine: c for c in call.candidates if c.refusal is None} for call in part.engines]
        names = [name for name in able[0] if all(name in of_call for of_call in able)]
        value = chosen.get(step.core.name, part.engines[0].engine)
        notes = {name: _in_words(able[0][name]) for name in names}
        yield Knob(f"{OF_STEP}{step.core.name}", tuple(names), value, notes=notes)


def limited(parts: Sequence[StepReport]) -> tuple[bool, bool]:
    """Whether any engine that may serve keeps to a number of multiprocessors, as kernels do, and states a workspace."""
    able = [(call.op, c) for part in parts for call in part.engines for c in call.candidates if c.refusal is None]
    kernel = lambda op, name: any(e.name == name and not e.fused for e in engines.registered(op))
    return any(kernel(op, c.engine) for op, c in able), any(c.workspace is not None for _, c in able)


def _in_words(candidate: Candidate) -> tuple[str, ...]:
    accumulator = ACCUMULATORS.get(candidate.accumulation, candidate.accumulation)
    return (
        f"guarantees {candidate.level}",
        f"accumulates in {accumulator}",
        *(HAZARDS[hazard] for hazard in candidate.hazards),
        *candidate.notes,
    )
