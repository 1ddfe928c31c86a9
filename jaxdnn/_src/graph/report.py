"""What a plan does, as `explain` tells it: its steps with their engines, what was not fused, bytes and levels."""

import dataclasses
import functools as ft
import math
from collections.abc import Iterator, Sequence

import jax
from jax import Array

from jaxdnn._src.core import engines
from jaxdnn._src.core.determinism import LEVELS
from jaxdnn._src.core.explain import Explanations, explain
from jaxdnn._src.graph.build import Operations
from jaxdnn._src.graph.execute import Numbers, Step, Values, called, constants, finished
from jaxdnn._src.graph.nodes import Node, numpy_of
from jaxdnn._src.graph.rules import NotFused
from jaxdnn._src.graph.tensors import Tensor, span

# What nodes that move data do; their results have no rounding but the one to the dtype.
MOVES = ("reshape", "transpose", "slice", "concatenate")
SUMS = ("moe_grouped_matmul", "moe_grouped_matmul_bwd")
# Rules whose call XLA, where its engine serves it on a GPU, compiles as it does the nodes one by one; with the least
# and the largest speed of plan "fused" over plan "single" in `benchmarks/results/graph_nvidia_h200.json`. Both are
# offered all the same: neither is the faster one by what decides elsewhere, `selection.MARGIN`.
ALIKE = {"conv_epilogue": (0.998, 1.003)}


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A step of a plan: the nodes that are computed together, and what computes them.

    Attributes:
      nodes: the names of the nodes; more than one are fused into one call.
      calls: the op that it calls; nothing where it is a formula that XLA compiles, and may fuse with its neighbours.
      rule: the rule that fused it.
      engine: the engine of each call that has a choice of engines.
      level: the determinism level that it guarantees.
      bytes_moved: of the tensors that it reads and writes, if nothing of it stays in registers of its neighbours.
      workspace: bytes that its engines state; None where XLA decides.
      engines: which engines could serve and which not, as `jaxdnn.explain` has it.
      notes: what else is to be said of it.
    """

    nodes: tuple[str, ...]
    calls: tuple[str, ...]
    rule: str | None
    engine: tuple[str, ...]
    level: str
    bytes_moved: int
    workspace: int | None
    engines: Explanations
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        by = f"{', '.join(self.calls)} by {', '.join(self.engine) or 'its formula'}" if self.calls else "XLA's program"
        fused = f"; fused by rule {self.rule}" if self.rule else ""
        moved = f"{self.bytes_moved} bytes moved, workspace {_room(self.workspace)}"
        said = "".join(f"\n     {note}" for note in self.notes)
        return f"{' + '.join(self.nodes)}: {by}{fused}; level {self.level}, {moved}{said}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What a plan does: its steps in order, what was not fused and why, and the plans that decline; prints as text.

    Attributes:
      plan: "fused" or "single".
      platform: of the device it is made for, "cpu" or "cuda" for example.
      parts: its steps.
      not_fused: pairs of nodes that a rule could have joined, and why it did not.
      declined: the other plans that were not offered, and why.
      level: the determinism level that every step guarantees.
      bytes_moved, workspace: the sum over the steps; the largest of them, None where XLA decides one.
      numeric_notes, behavior_notes: by cuDNN's names.
    """

    plan: str
    platform: str
    parts: tuple[StepReport, ...]
    not_fused: tuple[NotFused, ...]
    declined: tuple[str, ...]
    level: str
    bytes_moved: int
    workspace: int | None
    numeric_notes: tuple[str, ...]
    behavior_notes: tuple[str, ...]

    @property
    def fused(self) -> tuple[tuple[str, ...], ...]:
        """The nodes that are computed by one call, for each call of several."""
        return tuple(part.nodes for part in self.parts if len(part.nodes) > 1)

    def __str__(self) -> str:
        head = f"plan {self.plan!r} on {self.platform}: {len(self.parts)} steps in one program, level {self.level}"
        notes = ", ".join((*self.numeric_notes, *self.behavior_notes))
        moved = f"  at most {self.bytes_moved} bytes moved; workspace {_room(self.workspace)}; notes {notes}"
        lines = [head, moved, *(f"  {i}. {part}" for i, part in enumerate(self.parts, 1))]
        calls = [call for part in self.parts for call in part.engines]
        refusals = [(c.engine, call.public or call.op, c.refusal) for call in calls for c in call.candidates]
        lines += [f"     {engine} declined {op}: {why}" for engine, op, why in refusals if why]
        lines += [f"  not fused: {one}" for one in self.not_fused]
        return "\n".join([*lines, *(f"  declined: {line}" for line in self.declined)])


def _room(workspace: int | None) -> str:
    return "chosen by XLA" if workspace is None else f"{workspace} bytes"


def lowest(levels: Sequence[str]) -> str:
    """The level that all of these guarantee; "run_to_run" of none."""
    return LEVELS[min(map(LEVELS.index, levels), default=LEVELS.index("run_to_run"))]


def step_reports(graph: Operations, found: Sequence[Step]) -> Iterator[StepReport]:
    """Each step with what `jaxdnn.explain` says of it; traced, nothing is computed."""
    arrays, numbers = constants(graph)
    shapes = {uid: jax.ShapeDtypeStruct(a.shape, a.dtype) for uid, a in arrays.items()}
    for tensor in graph.inputs():
        shapes[tensor.uid] = jax.ShapeDtypeStruct(tensor.dim or (), numpy_of(tensor))
        if tensor.is_pass_by_value:
            numbers[tensor.uid] = 1.0  # a number that is not known yet; engines do not depend on it
    for step in found:
        call = ft.partial(_made, graph, step, dict(numbers))
        given = {tensor.uid: shapes[tensor.uid] for tensor in step.inputs()}
        yield _report(graph, step, explain(call, given))
        shapes |= jax.eval_shape(call, given)


def _made(graph: Operations, step: Step, numbers: Numbers, values: Values) -> dict[int, Array]:
    return finished(graph, step.run(values, numbers))


def _report(graph: Operations, step: Step, said: Explanations) -> StepReport:
    served = [candidate for e in said for candidate in e.candidates if candidate.engine == e.engine]
    levels = [c.level for c in served] + [formula.level for formula in said.formulas]
    levels += [_formula_level(node) for node in step.nodes if step.rule is None and not called(node)]
    rooms = [c.workspace for c in served]
    outside = {t.uid for other in graph.nodes if other not in step.nodes for t in other.inputs.values()}
    moved = [*step.inputs(), *(t for t in step.outputs() if not t.is_virtual or t.uid in outside)]
    return StepReport(
        nodes=tuple(node.name for node in step.nodes),
        calls=step.calls,
        rule=step.rule,
        engine=tuple(c.engine for c in served),
        level=lowest(levels),
        bytes_moved=sum(map(_size, moved)) + 2 * step.copies,
        workspace=None if not rooms or None in rooms else sum(room for room in rooms if room is not None),
        engines=said,
        notes=(*step.notes, *_measured(step, said)),
    )


def _measured(step: Step, said: Explanations) -> Iterator[str]:
    if step.rule in ALIKE and all((e.platform, e.engine) == ("cuda", "xla") for e in said):
        least, most = ALIKE[step.rule]
        yield (
            "XLA fuses these nodes itself where its engine serves: on an NVIDIA H200 the plan had "
            f"{least} to {most} of the speed of 'single'"
        )


def _size(tensor: Tensor) -> int:
    """Bytes of memory; a number passed by value, or known, is not read from there."""
    if tensor.value is not None or tensor.is_pass_by_value:
        return 0
    bits = 4 if tensor.data_type == "float4_e2m1fn" else 8 * numpy_of(tensor).itemsize
    return math.ceil(span(tensor.dim or (), tensor.stride or ()) * bits / 8)


def _formula_level(node: Node) -> str:
    """The level of what XLA computes without an op of ours."""
    if node.op in MOVES:
        return "portable"
    if node.op in SUMS:
        return engines.level_of_products(engines.Call(node.op, None, (), engines.platform()))
    return "run_to_run"
