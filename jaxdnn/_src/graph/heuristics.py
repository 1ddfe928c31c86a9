"""Which plans a graph has, which of them are wanted, and in which order."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdnn._src.core import engines, tuned
from jaxdnn._src.core.determinism import LEVELS, required
from jaxdnn._src.core.limits import current_limits, limits
from jaxdnn._src.graph.build import Operations
from jaxdnn._src.graph.errors import GraphError, NotOffered
from jaxdnn._src.graph.knobs import OF_PLAN, OF_STEP, Knob
from jaxdnn._src.graph.nodes import is_integer, numpy_of
from jaxdnn._src.graph.plan import BEHAVIOR_NOTES, ENGINES, NUMERIC_NOTES, Plan, Requirements
from jaxdnn._src.graph.tensors import memory_shape

MODES = ("A", "B", "FALLBACK")
CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "determinism": (lambda v: isinstance(v, str) and v in LEVELS, f"one of {', '.join(LEVELS)}"),
    "sm_count": (lambda v: is_integer(v) and v >= 1, "an integer of at least 1"),
    "workspace_limit": (lambda v: is_integer(v) and v >= 0, "an integer of at least 0"),
}
ALIKE = "it is the plan 'single', for no rule applies"


def plans(
    graph: Operations,
    mode: str = "A",
    *,
    determinism: str | None = None,
    workspace_limit: int | None = None,
    sm_count: int | None = None,
    donate: Sequence[Any] = (),
    knobs: Mapping[str, Any] | None = None,
    deselect_engines: Sequence[str] = (),
    select_numeric_notes: Sequence[str] = (),
    deselect_numeric_notes: Sequence[str] = (),
    select_behavior_notes: Sequence[str] = (),
    deselect_behavior_notes: Sequence[str] = (),
) -> tuple[Plan, ...]:
    """The plans that implement the whole graph as asked, the best first.

    There are two: "fused", where the rules of fusion join nodes into calls of ops that take them up, and "single", one
    op or formula for each node. Both are one program that XLA compiles. A plan implements the whole graph or declines.

    Args:
      graph: the graph, which is validated.
      mode: "A" orders plans by the bytes that they move at most; "B" executes each once for warmth and thrice for
        time, on ones, and orders them by that; "FALLBACK" has the plan "single" alone. What "B" measured at the level
        "fast" is kept in the file of `jaxdnn.tune`, and not measured again. The engines of its calls are what `tune`
        measured, if it was asked to: `jaxdnn.tune(plan.function, ...)`.
      determinism: the level that every step must guarantee, see `jaxdnn.determinism`; at least that of the context.
      workspace_limit: bytes of workspace that an engine may state, see `jaxdnn.limits`; steps for which XLA decides
        are not held to it.
      sm_count: how many multiprocessors kernels may use, see `jaxdnn.limits`.
      donate: inputs, by tensor, uid or name, whose arrays are given up when the plan is called outside of jit: an
        output of the same shape and dtype may take their memory, which is how an output is written in place.
      knobs: by name, the values that a plan must have, as `Plan.knobs` lists them: {"engine:conv": "ordered"} is the
        engine of the op that node "conv" calls; "determinism", "sm_count" and "workspace_limit" are the arguments.
      deselect_engines: of "fused" and "single", and of the ops' engines (`jaxdnn.engines.names()`), those that a plan
        must not be, or be served by.
      select_numeric_notes, deselect_numeric_notes: notes that a plan must have, and must not have: "TENSOR_CORE",
        "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT", "NONDETERMINISTIC", "STRICT_NAN_PROP".
      select_behavior_notes, deselect_behavior_notes: likewise, of "RUNTIME_COMPILATION", which every plan has.

    Returns:
      At least one plan.

    Raises:
      GraphError: the graph is not well formed, or an argument is none of the choices.
      NotOffered: every plan declined; the message has a line for each.

    Sources: cudnn-frontend's create_execution_plans, (de)select_numeric_notes, (de)select_behavior_notes and
      deselect_engines; its deselect_workspace_greater_than is `workspace_limit`.
    """
    if not (isinstance(mode, str) and mode in MODES):
        raise GraphError(graph.where, "mode", f"one of {', '.join(MODES)}", mode)
    notes = {
        ("select_numeric_notes", NUMERIC_NOTES): select_numeric_notes,
        ("deselect_numeric_notes", NUMERIC_NOTES): deselect_numeric_notes,
        ("select_behavior_notes", BEHAVIOR_NOTES): select_behavior_notes,
        ("deselect_behavior_notes", BEHAVIOR_NOTES): deselect_behavior_notes,
    }
    names = (*ENGINES, *engines.names())
    for (name, choices), given in {("deselect_engines", names): deselect_engines, **notes}.items():
        known = lambda one, choices=choices: isinstance(one, str) and one in choices
        if not isinstance(given, list | tuple | set | frozenset) or not all(map(known, given)):
            raise GraphError(graph.where, name, f"a sequence of {', '.join(choices)}", given)
    graph.validate()
    _check_64(graph)
    limits_ = {"determinism": determinism, "sm_count": sm_count, "workspace_limit": workspace_limit}
    asked = requirements(graph, limits_, donate, {} if knobs is None else knobs)
    offered, declined = [], []
    for engine in ENGINES:
        if mode == "FALLBACK" and engine != "single":
            continue
        plan = Plan(graph, engine, asked)
        if engine == "fused" and not plan.is_fused:
            declined.append(f"plan {engine!r}: {ALIKE}")
            continue
        reasons = ["it is deselected"] if engine in deselect_engines else plan.refusals()
        if not reasons:
            reasons += [
                f"{' + '.join(part.nodes)} is served by engine {name!r}, which is deselected"
                for part in plan.parts
                for name in dict.fromkeys(part.engine)
                if name in deselect_engines
            ]
        for (name, _), wanted in notes.items() if not reasons else ():
            verb, kind, _ = name.split("_")
            own = plan.numeric_notes if kind == "numeric" else plan.behavior_notes
            if verb == "select":
                reasons += [f"it does not have the {kind} note {note}" for note in wanted if note not in own]
            else:
                reasons += [f"it has the {kind} note {note}" for note in wanted if note in own]
        if reasons:
            declined.append(f"plan {engine!r}: {'; '.join(reasons)}")
        else:
            offered.append(plan)
    if not offered:
        raise NotOffered(f"{graph.where}: no plan is offered.\n" + "\n".join(declined))
    for plan in offered:
        plan.declined = tuple(declined)
    if mode == "B":
        _measure(graph, offered, asked)
    return tuple(sorted(offered, key=lambda plan: plan.measured if mode == "B" else plan.bytes_moved))


def requirements(
    graph: Operations, limited: Mapping[str, Any], donate: Sequence[Any], knobs: Mapping[str, Any]
) -> Requirements:
    """What is asked here and by the contexts of `jaxdnn.determinism` and `jaxdnn.limits`, so that a plan keeps it."""
    limited, chosen = dict(limited), {}
    if not isinstance(knobs, Mapping):
        raise GraphError(graph.where, "knobs", "a mapping from names of knobs to values", knobs)
    nodes = [node.name for node in graph.nodes]
    for name, value in knobs.items():
        if name in OF_PLAN:
            if limited[name] is not None and not np.array_equal(value, limited[name]):
                raise GraphError(graph.where, name, f"{limited[name]!r} as a knob too, for it is given", value)
            limited[name] = value
        elif isinstance(name, str) and name.startswith(OF_STEP) and name.removeprefix(OF_STEP) in nodes:
            if not (isinstance(value, str) and value in engines.names()):
                raise GraphError(graph.where, f"knobs[{name!r}]", f"one of {', '.join(engines.names())}", value)
            chosen[name.removeprefix(OF_STEP)] = value
        else:
            raise GraphError(graph.where, "knobs", f"of {', '.join(OF_PLAN)} and '{OF_STEP}' with a node", name)
    for name, (check, expected) in CHECKS.items():
        if limited[name] is not None and not check(limited[name]):
            raise GraphError(graph.where, name, f"None or {expected}", limited[name])
    level = required(limited["determinism"])
    with limits(workspace=limited["workspace_limit"], multiprocessors=limited["sm_count"]):
        within = current_limits()
    if isinstance(donate, str) or not isinstance(donate, Sequence):
        raise GraphError(graph.where, "donate", "a sequence of inputs", donate)
    uids = tuple(_donated(graph, key) for key in donate)
    level = None if level == LEVELS[0] else level
    return Requirements(level, within.workspace, within.multiprocessors, uids, tuple(chosen.items()))


def _donated(graph: Operations, key: Any) -> int:
    tensor = graph.find(key)
    if tensor not in graph.inputs() or tensor.is_pass_by_value:
        raise GraphError(tensor.where, "donate", "an input of the graph that lies in memory", tensor.name)
    return tensor.uid


def _check_64(graph: Operations) -> None:
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return
    expected = "of at most 32 bits unless jax_enable_x64 is on"
    for tensor in graph.tensors.values():
        if tensor.data_type in ("float64", "int64"):
            raise GraphError(tensor.where, "data_type", expected, tensor.data_type)
    for node in graph.nodes:
        if node.compute == "float64":
            raise GraphError(node.where, "compute_data_type", expected, node.compute)


def _measure(graph: Operations, offered: Sequence[Plan], asked: Requirements) -> None:
    """Times the plans, or reads their times where they are kept. At a level that fixes bits none is read."""
    device, fast = engines.device_kind(engines.platform()), asked.determinism is None
    described = json.dumps([graph.describe(), dataclasses.asdict(asked)], sort_keys=True)
    name = f"graph {graph.name!r}, sha256 {hashlib.sha256(described.encode()).hexdigest()}"
    times = (tuned.kept(name, device) if fast else None) or {}
    if not {plan.engine for plan in offered} <= set(times):
        times = {plan.engine: 1e3 * _seconds(plan) for plan in offered}
        if fast and device is not None:
            tuned.keep(tuned.path(), device, {name: times})
    for plan in offered:
        plan.measured = times[plan.engine] / 1e3


def _seconds(plan: Plan) -> float:
    """The shortest of three executions, on ones."""

    def pack() -> dict[int, Any]:
        found = {}
        for tensor in plan.graph.inputs():
            shape = memory_shape(tensor.dim or (), tensor.stride or ())
            found[tensor.uid] = 1 if plan.is_static(tensor) else jax.numpy.ones(shape, numpy_of(tensor))
        return jax.block_until_ready(found)

    jax.block_until_ready(plan(pack()))
    times = []
    for _ in range(3):
        given, start = pack(), time.perf_counter()
        jax.block_until_ready(plan(given))
        times.append(time.perf_counter() - start)
    return min(times)


def create(graph: Operations, engine_id: int, knobs: Mapping[str, Any]) -> Plan:
    """The plan of an engine's number and of knobs; one that it cannot be is refused with the reason."""
    graph.validate()
    _check_64(graph)
    _check_id(graph, engine_id)
    plan = Plan(graph, tuple(ENGINES)[engine_id], requirements(graph, dict.fromkeys(OF_PLAN), (), knobs))
    alike = plan.engine == "fused" and not plan.is_fused
    if reasons := [ALIKE] if alike else plan.refusals():
        raise NotOffered(f"{graph.where}: plan {plan.engine!r}: {'; '.join(reasons)}")
    return plan


def knobs_of(graph: Operations, engine_id: int) -> tuple[Knob, ...]:
    """The knobs of the plan of an engine's number."""
    return create(graph, engine_id, {}).knobs


def _check_id(graph: Operations, engine_id: Any) -> None:
    if isinstance(engine_id, bool) or not isinstance(engine_id, int) or not 0 <= engine_id < len(ENGINES):
        words = ", ".join(f"{number} ({name})" for number, name in enumerate(ENGINES))
        raise GraphError(graph.where, "engine_id", f"one of {words}", engine_id)
