"""Which plans a graph has, which of them are wanted, and in which order."""

import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxdnn._src.core.determinism import LEVELS, required
from jaxdnn._src.core.limits import current_limits, limits
from jaxdnn._src.graph.build import Operations
from jaxdnn._src.graph.errors import GraphError, NotOffered
from jaxdnn._src.graph.nodes import numpy_of
from jaxdnn._src.graph.plan import BEHAVIOR_NOTES, ENGINES, NUMERIC_NOTES, Plan, Requirements
from jaxdnn._src.graph.tensors import memory_shape

MODES = ("A", "B", "FALLBACK")


def plans(
    graph: Operations,
    mode: str = "A",
    *,
    determinism: str | None = None,
    workspace_limit: int | None = None,
    sm_count: int | None = None,
    donate: Sequence[Any] = (),
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
        time, on ones, and orders them by that; "FALLBACK" has the plan "single" alone.
      determinism: the level that every step must guarantee, see `jaxdnn.determinism`; at least that of the context.
      workspace_limit: bytes of workspace that an engine may state, see `jaxdnn.limits`; steps for which XLA decides
        are not held to it.
      sm_count: how many multiprocessors kernels may use, see `jaxdnn.limits`.
      donate: inputs, by tensor, uid or name, whose arrays are given up when the plan is called outside of jit: an
        output of the same shape and dtype may take their memory, which is how an output is written in place.
      deselect_engines: of "fused" and "single", those not wanted.
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
    if mode not in MODES:
        raise GraphError(graph.where, "mode", f"one of {', '.join(MODES)}", mode)
    notes = {
        ("select_numeric_notes", NUMERIC_NOTES): select_numeric_notes,
        ("deselect_numeric_notes", NUMERIC_NOTES): deselect_numeric_notes,
        ("select_behavior_notes", BEHAVIOR_NOTES): select_behavior_notes,
        ("deselect_behavior_notes", BEHAVIOR_NOTES): deselect_behavior_notes,
    }
    for (name, choices), given in {("deselect_engines", tuple(ENGINES)): deselect_engines, **notes}.items():
        if not isinstance(given, list | tuple | set | frozenset) or any(one not in choices for one in given):
            raise GraphError(graph.where, name, f"a sequence of {', '.join(choices)}", given)
    graph.validate()
    _check_64(graph)
    asked = _requirements(graph, determinism, workspace_limit, sm_count, donate)
    offered, declined = [], []
    for engine in ENGINES:
        if mode == "FALLBACK" and engine != "single":
            continue
        plan = Plan(graph, engine, asked)
        if engine == "fused" and not plan.is_fused:
            declined.append(f"plan {engine!r}: it is the plan 'single', for no rule applies")
            continue
        reasons = ["it is deselected"] if engine in deselect_engines else plan.refusals()
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
            plan.measured = _seconds(plan)
    return tuple(sorted(offered, key=lambda plan: plan.measured if mode == "B" else plan.bytes_moved))


def _requirements(
    graph: Operations, level: str | None, workspace: int | None, sm_count: int | None, donate: Sequence[Any]
) -> Requirements:
    """What is asked here and by the contexts of `jaxdnn.determinism` and `jaxdnn.limits`, so that a plan keeps it."""
    level = required(level)
    with limits(workspace=workspace, multiprocessors=sm_count):
        within = current_limits()
    if isinstance(donate, str) or not isinstance(donate, Sequence):
        raise GraphError(graph.where, "donate", "a sequence of inputs", donate)
    uids = tuple(_donated(graph, key) for key in donate)
    return Requirements(None if level == LEVELS[0] else level, within.workspace, within.multiprocessors, uids)


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
