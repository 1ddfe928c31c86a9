"""Plans: a graph with the steps that compute it, as one program that is called with a variant pack."""

import contextlib
import dataclasses
import functools as ft
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxdnn._src.core import checks, engines
from jaxdnn._src.core.compat import Tracer
from jaxdnn._src.core.determinism import LEVELS, determinism, required, satisfies
from jaxdnn._src.core.limits import limits
from jaxdnn._src.graph.build import Operations
from jaxdnn._src.graph.errors import GraphError, NotOffered
from jaxdnn._src.graph.execute import Step, evaluate
from jaxdnn._src.graph.fuse import steps
from jaxdnn._src.graph.knobs import OF_STEP, Knob, limited, of_steps
from jaxdnn._src.graph.nodes import as_stored, numpy_of
from jaxdnn._src.graph.report import Report, StepReport, lowest, step_reports
from jaxdnn._src.graph.rules import NotFused
from jaxdnn._src.graph.tensors import Tensor, check_number, memory_shape
from jaxdnn._version import __version__

FORMAT = 1
ENGINES = {"fused": True, "single": False}  # whether nodes are fused by the rules of `fuse`
NUMERIC_NOTES = (
    "TENSOR_CORE",
    "DOWN_CONVERT_INPUTS",
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "NONDETERMINISTIC",
    "STRICT_NAN_PROP",
)
BEHAVIOR_NOTES = ("RUNTIME_COMPILATION",)


@dataclasses.dataclass(frozen=True)
class Requirements:
    """What a plan must satisfy, and the uids of the inputs whose memory it may use for its outputs; see `plans`.

    `engines` has pairs of a node and the engine that the op it calls must have.
    """

    determinism: str | None = None
    workspace_limit: int | None = None
    sm_count: int | None = None
    donate: tuple[int, ...] = ()
    engines: tuple[tuple[str, str], ...] = ()


REQUIREMENTS = tuple(field.name for field in dataclasses.fields(Requirements))


class Results(dict[Any, Array]):
    """A plan's outputs: a dict by name, whose items are found by uid and by tensor too; a pytree."""

    uids: Mapping[int, str]

    def __init__(self, arrays: Mapping[str, Array], uids: Mapping[int, str]) -> None:
        super().__init__(arrays)
        self.uids = uids

    def _name(self, key: Any) -> Any:
        return self.uids.get(key.uid if isinstance(key, Tensor) else key)

    def __missing__(self, key: Any) -> Array:
        if (name := self._name(key)) is None:
            raise KeyError(key)
        return self[name]

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or self._name(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        name = self._name(key)
        return super().get(key if name is None else name, default)


jax.tree_util.register_pytree_node(
    Results,
    lambda found: (tuple(found.values()), (tuple(found), tuple(found.uids.items()))),
    lambda names, arrays: Results(dict(zip(names[0], arrays, strict=True)), dict(names[1])),
)


class Program:
    """The steps that compute a graph, and the program they are: what plans of equal graphs have in common.

    Attributes:
      static: the uids of the numbers that are known when it is traced; others passed by value are operands.
      inputs: of each input, by uid, shape and dtype; None of a static number.
      donated, kept: the uids of the arrays that may be overwritten, and of the others.
      names: of each output, by uid.
      call: donated and kept arrays, and static numbers with their uids, to the outputs.
    """

    def __init__(self, graph: Operations, engine: str, asked: Requirements) -> None:
        self.graph, self.asked = graph, asked
        fused, self.not_fused = steps(graph, True)
        found = fused if ENGINES[engine] else steps(graph, False)[0]
        chosen = dict(asked.engines)
        self.steps = [
            step.by(chosen[step.core.name]) if step.core and step.core.name in chosen else step for step in found
        ]
        read = (node.inputs[port] for node in graph.nodes for port in node.kind.static if port in node.inputs)
        self.static = {tensor.uid for tensor in read if tensor.value is None}
        shaped = lambda t: (memory_shape(t.dim or (), t.stride or ()), numpy_of(t))
        self.inputs = {t.uid: None if t.uid in self.static else shaped(t) for t in graph.inputs()}
        order = [uid for uid, wanted in self.inputs.items() if wanted is not None]
        self.donated = tuple(uid for uid in order if uid in asked.donate)
        self.kept = tuple(uid for uid in order if uid not in asked.donate)
        self.names = {tensor.uid: tensor.name for tensor in graph.outputs()}

        def program(donated: Any, kept: Any, numbers: tuple[tuple[int, Any], ...]) -> tuple[Array, ...]:
            with self.within(required(asked.determinism)):
                named = dict(zip((*self.donated, *self.kept), (*donated, *kept), strict=True))
                found = evaluate(graph, self.steps, named, dict(numbers))
            return tuple(found[uid] for uid in self.names)

        program.__name__ = program.__qualname__ = re.sub(r"\W", "_", f"graph_{graph.name}")  # as profiles show it
        self.call = jax.jit(program, static_argnums=2, donate_argnums=0 if self.donated else ())

    @contextlib.contextmanager
    def within(self, level: str) -> Iterator[None]:
        """The level and the limits under which the ops are traced."""
        room = limits(workspace=self.asked.workspace_limit, multiprocessors=self.asked.sm_count)
        with determinism(level), room:
            yield


@ft.lru_cache(maxsize=1024)
def _program(description: str, engine: str, asked: Requirements) -> Program:
    """The same program for equal graphs, so that JAX compiles it once."""
    return Program(Operations.from_description(json.loads(description)), engine, asked)


class Plan:
    """A graph with the steps that compute it; `plans` makes it.

    Call it with a variant pack, a mapping from the graph's inputs, by uid, name or tensor, to arrays: the results are
    found by the same three. An array stands for a tensor's memory: its axes are the tensor's by descending stride
    (`Tensor.get_shape`); where strides leave gaps it is a row of all places. Dtypes are the tensors'. Several threads
    may call a plan. It is pickled as its JSON, without the tensors of the graph that it was made of.

    Attributes:
      engine: "fused" or "single".
      asked: what it was asked to satisfy.
      measured: seconds of one execution, where heuristic mode B measured it.
    """

    def __init__(self, graph: Operations, engine: str, asked: Requirements) -> None:
        self.engine, self.asked, self._source = engine, asked, graph
        self._program = _program(graph.to_json(), engine, asked)
        self.measured: float | None = None
        self.declined: tuple[str, ...] = ()
        self._parts: tuple[StepReport, ...] | None = None
        self._knobs: tuple[Knob, ...] | None = None
        inputs = self.graph.inputs()
        mine = [(graph.tensors[t.uid], t.uid) for t in inputs]
        self._keys = dict(mine) | {key: t.uid for t in inputs for key in (t, t.uid, t.name)}

    @property
    def graph(self) -> Operations:
        """The graph as it was when the plan was made. Plans of equal graphs share it, so it is not to be changed."""
        return self._program.graph

    @property
    def steps(self) -> list[Step]:
        return self._program.steps

    @property
    def not_fused(self) -> list[NotFused]:
        """What could not be fused, and why."""
        return self._program.not_fused

    def __repr__(self) -> str:
        return f"Plan({self.graph.name!r}, engine={self.engine!r}, steps={len(self.steps)})"

    # Execution

    def __call__(self, variant_pack: Mapping[Any, Any]) -> Results:
        """The outputs, of arrays given by uid, name or tensor; within jit, vmap and grad too.

        Args:
          variant_pack: an array for each of the graph's inputs, and for nothing else; a tensor of one element may be a
            number, which is rounded to its dtype. What is static (epsilon, attn_scale) is known when traced.

        Returns:
          A dict of arrays by the outputs' names, in the order of their nodes, that is read by uid and by tensor too.

        Raises:
          GraphError: an array that is missing or too much, or of another shape or dtype; a number that its dtype does
            not hold.
          NotOffered: the context requires a determinism level that the plan does not guarantee.
        """
        if not isinstance(variant_pack, Mapping):
            expected = "a mapping from tensors, uids or names to arrays"
            raise GraphError(self.graph.where, "variant_pack", expected, variant_pack)
        program = self._program
        self._check_level()
        arrays: dict[int, Any] = {}
        numbers: list[tuple[int, Any]] = []
        for key, value in variant_pack.items():
            uid = self._keys.get(key)
            if uid is None:
                uid = self._refused(key)
            wanted = program.inputs[uid]
            if wanted is None:
                numbers.append((uid, self._number(uid, value)))
            elif isinstance(value, Array) and (value.shape, value.dtype) == wanted and not value.weak_type:
                arrays[uid] = value
            else:
                arrays[uid] = self._array(uid, value)
        if len(arrays) + len(numbers) != len(program.inputs) or len(variant_pack) != len(program.inputs):
            self._incomplete(variant_pack)
        donated, kept = (tuple(arrays[uid] for uid in order) for order in (program.donated, program.kept))
        found = program.call(donated, kept, tuple(sorted(numbers)))
        return Results(dict(zip(program.names.values(), found, strict=True)), program.names)

    def _check_level(self) -> None:
        """Refuses to run where the context requires more than was asked of the plan, unless it guarantees that too."""
        level = required()
        if not satisfies(self.asked.determinism or LEVELS[0], level) and not satisfies(self.level, level):
            why = (
                f"it guarantees {self.level!r}, and the context requires {level!r}: make it with determinism={level!r}"
            )
            raise NotOffered(f"plan {self.engine!r} of {self.graph.where}: {why}.")

    def _refused(self, key: Any) -> int:
        """Raises the error of a key that is no input."""
        known = isinstance(key, Tensor) and self._source.tensors.get(key.uid) is key
        tensor = self.graph.find(key.uid if known else key)
        raise GraphError(tensor.where, "variant_pack", "without what is no input of the graph", tensor.name)

    def _incomplete(self, variant_pack: Mapping[Any, Any]) -> None:
        given = [self._keys[key] for key in variant_pack]
        twice = next((uid for uid in given if given.count(uid) > 1), None)
        if twice is not None:
            raise GraphError(self.graph.tensors[twice].where, "variant_pack", "a mapping with one array for it", "two")
        missing = [tensor.name for tensor in self.graph.inputs() if tensor.uid not in given]
        names = [self.graph.tensors[uid].name for uid in given]
        raise GraphError(self.graph.where, "variant_pack", f"with an array for {', '.join(missing)}", names)

    def _number(self, uid: int, value: Any) -> float | int:
        tensor = self.graph.tensors[uid]
        given = None if isinstance(value, Tracer) or np.size(value) != 1 else np.asarray(value)
        if given is None or not (given.dtype.kind in "iu" or jax.numpy.issubdtype(given.dtype, np.floating)):
            raise GraphError(tensor.where, "variant_pack", "a number that is known when it is traced", value)
        return as_stored(tensor, given.reshape(()))

    def _array(self, uid: int, value: Any) -> Array:
        tensor = self.graph.tensors[uid]
        dim, stride = tensor.dim or (), tensor.stride or ()
        wanted = numpy_of(tensor)
        if isinstance(value, int | float | np.generic) and set(dim) <= {1}:
            check_number(tensor.where, "variant_pack", value, wanted.name)
            with np.errstate(over="ignore"):
                return jax.numpy.full(memory_shape(dim, stride), np.asarray(value).astype(wanted))
        try:
            array = checks.array(tensor.name, np.asarray(value) if isinstance(value, list | tuple) else value)
        except (TypeError, ValueError) as error:
            raise GraphError(tensor.where, "variant_pack", "an array of numbers", value) from error
        if array.dtype != wanted:
            raise GraphError(tensor.where, "data_type", f"{wanted.name}", array.dtype.name)
        shape = memory_shape(dim, stride)
        if array.shape != shape:
            squeezed = lambda sizes: tuple(n for n in sizes if n != 1)
            if squeezed(array.shape) != squeezed(shape):
                raise GraphError(tensor.where, "shape", f"{shape}, its sizes by descending stride", array.shape)
        return array  # the program brings it into the tensor's shape

    @property
    def function(self) -> Callable[..., Any]:
        """A JAX function of the arrays in the order of the graph's inputs, or by name; of several outputs a tuple."""
        names = [tensor.name for tensor in self.graph.inputs()]

        def call(*arrays: Any, **named: Any) -> Any:
            if len(arrays) > len(names) or set(names[: len(arrays)]) & set(named):
                raise GraphError(
                    self.graph.where, "arguments", ", ".join(names), f"{len(arrays)} arrays and {', '.join(named)}"
                )
            found = tuple(self({**dict(zip(names, arrays, strict=False)), **named}).values())
            return found[0] if len(found) == 1 else found

        call.__name__ = self.graph.name
        return call

    # What it is

    def is_static(self, tensor: Tensor) -> bool:
        """Whether a tensor is a number that has to be known when the program is traced."""
        return tensor.uid in self._program.static

    @property
    def is_fused(self) -> bool:
        """Whether a rule joined any nodes."""
        return any(step.rule for step in self.steps)

    @property
    def parts(self) -> tuple[StepReport, ...]:
        """The steps with their engines; traced once, nothing is computed."""
        if self._parts is None:
            with self._program.within(self.asked.determinism or LEVELS[0]):
                self._parts = tuple(step_reports(self.graph, self.steps))
        return self._parts

    @property
    def level(self) -> str:
        """The determinism level that every step guarantees."""
        return lowest([part.level for part in self.parts])

    @property
    def bytes_moved(self) -> int:
        return sum(part.bytes_moved for part in self.parts)

    @property
    def workspace_size(self) -> int | None:
        """The largest workspace of a step; None where XLA decides that of one."""
        rooms = [part.workspace for part in self.parts]
        return None if None in rooms else max(room for room in rooms if room is not None)

    def get_workspace_size(self) -> int | None:
        return self.workspace_size

    @property
    def numeric_notes(self) -> tuple[str, ...]:
        served = [c for part in self.parts for e in part.engines for c in e.candidates if c.engine == e.engine]
        kinds = {c.accumulation for c in served}
        hazards = {hazard for c in served for hazard in c.hazards}
        notes = {
            "TENSOR_CORE": any(kind.startswith(("tensor_core", "transform")) for kind in kinds),
            "DOWN_CONVERT_INPUTS": "tensor_core_tf32" in kinds,
            "REDUCED_PRECISION_REDUCTION": "tensor_core_fp8" in kinds,
            "FFT": "transform" in kinds,
            "NONDETERMINISTIC": self.level == "fast",
            "STRICT_NAN_PROP": "spreads_nonfinite" not in hazards,
        }
        return tuple(note for note in NUMERIC_NOTES if notes[note])

    @property
    def behavior_notes(self) -> tuple[str, ...]:
        """XLA compiles every program when it first runs."""
        return BEHAVIOR_NOTES

    def refusals(self) -> list[str]:
        """Why it does not implement the graph as asked; nothing if it does."""
        try:
            parts = self.parts
        except (NotImplementedError, TypeError, ValueError) as error:
            return [str(error)]
        level = self.asked.determinism or LEVELS[0]
        low = [part for part in parts if not satisfies(part.level, level)]
        found = [f"{' + '.join(part.nodes)} guarantees {part.level} at most, not {level}" for part in low]
        cores = [step.core.name for step, part in zip(self.steps, parts, strict=True) if step.core and part.engines]
        found += [f"it has no knob '{OF_STEP}{name}'" for name, _ in self.asked.engines if name not in cores]
        unserved = [(part, call) for part in parts for call in part.engines if call.engine is None]
        for part, call in unserved:
            why = next((c.refusal for c in call.candidates if (part.nodes and c.engine in self._chosen(part))), None)
            found.append(f"{' + '.join(part.nodes)} is served by no engine{f': {why}' if why else ''}")
        return found

    def _chosen(self, part: StepReport) -> tuple[str, ...]:
        return tuple(engine for name, engine in self.asked.engines if name in part.nodes)

    # Its configuration

    @property
    def engine_id(self) -> int:
        """The number of its engine, as `Graph.create_execution_plan` takes it."""
        return tuple(ENGINES).index(self.engine)

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """What can be chosen of the plan, among what, and what is chosen.

        A knob for each step whose op has engines, "engine:NODE"; "determinism"; and "sm_count" and "workspace_limit"
        where an engine that may serve keeps to them. Tiles of kernels are chosen by their planners, and are no knobs.
        """
        if self._knobs is None:
            free = Plan(self.graph, self.engine, dataclasses.replace(self.asked, engines=()))
            found = [*of_steps(self.steps, free.parts, dict(self.asked.engines))]
            levels = [Plan(self.graph, self.engine, dataclasses.replace(self.asked, determinism=one)) for one in LEVELS]
            able = tuple(plan.asked.determinism for plan in levels if not plan.refusals())
            found.append(Knob("determinism", able, self.asked.determinism or LEVELS[0]))
            cores, rooms = limited(free.parts)
            found += [Knob("sm_count", (), self.asked.sm_count, 1)] if cores else []
            found += [Knob("workspace_limit", (), self.asked.workspace_limit, 0)] if rooms else []
            self._knobs = tuple(found)
        return self._knobs

    def get_engine_and_knobs(self) -> tuple[int, dict[str, Any]]:
        """Its engine's number and the value of each knob, of which `Graph.create_execution_plan` makes it again."""
        return self.engine_id, {knob.name: knob.value for knob in self.knobs}

    def explain(self) -> Report:
        """What it computes by which kernels, what was fused, what was not and why, and what that costs.

        Returns:
          A report that prints as text. Its attributes: plan, platform, parts (each step: nodes, calls, rule, engine,
          level, bytes_moved, workspace, engines), fused, not_fused, declined, level, bytes_moved, workspace,
          numeric_notes, behavior_notes.
        """
        return Report(
            self.engine,
            engines.platform(),
            self.parts,
            tuple(self.not_fused),
            self.declined,
            self.level,
            self.bytes_moved,
            self.workspace_size,
            self.numeric_notes,
            self.behavior_notes,
        )

    # JSON

    def to_json(self, **how: Any) -> str:
        """The plan with its graph, and where it was made; `from_json` reads it back on the same."""
        found = {"plan": FORMAT, **_here(), "engine": self.engine, **dataclasses.asdict(self.asked)}
        return json.dumps({**found, "graph": self.graph.describe()}, allow_nan=False, **how)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan of a text; one of another version, or for another device, is refused with the reason."""
        try:
            found = json.loads(text)
        except (TypeError, ValueError) as error:
            raise GraphError("plan", "text", f"the JSON of a plan ({error})", text) from error
        for key, value in {"plan": FORMAT, **_here()}.items():
            got = found.get(key) if isinstance(found, Mapping) else found
            if got != value:
                raise GraphError("plan", key, f"{value!r}, what is here, for a plan is good where it was made", got)
        absent = [name for name in ("engine", "graph", *REQUIREMENTS) if name not in found]
        if absent:
            raise GraphError("plan", "text", f"the JSON of a plan, with {absent[0]!r}", sorted(found))
        graph, engine, donate = (found[name] for name in ("graph", "engine", "donate"))
        graph = Operations.from_description(graph)
        if engine not in tuple(ENGINES):
            raise GraphError("plan", "engine", f"one of {', '.join(ENGINES)}", engine)
        inputs = [tensor.uid for tensor in graph.inputs() if not tensor.is_pass_by_value]
        if not isinstance(donate, list) or any(uid not in inputs for uid in donate):
            raise GraphError("plan", "donate", f"a list of uids of inputs, {inputs}", donate)
        level, workspace, sm_count = (found[name] for name in REQUIREMENTS[:3])
        pairs, nodes = found["engines"], [node.name for node in graph.nodes]
        well = isinstance(pairs, list) and all(isinstance(p, list) and len(p) == 2 for p in pairs)
        if not well or any(node not in nodes or name not in engines.names() for node, name in pairs):
            raise GraphError("plan", "engines", "pairs of a node and an engine", pairs)
        try:
            with limits(workspace=workspace, multiprocessors=sm_count):
                level = None if level is None else checks.choice("determinism", level, LEVELS)
        except (TypeError, ValueError) as error:
            raise GraphError("plan", "text", f"the JSON of a plan ({error})", sorted(found)) from error
        chosen = tuple((node, name) for node, name in pairs)
        plan = cls(graph, engine, Requirements(level, workspace, sm_count, tuple(donate), chosen))
        if reasons := plan.refusals():
            raise NotOffered(f"plan {plan.engine!r}: {'; '.join(reasons)}")
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.from_json, (self.to_json(),)


def _here() -> dict[str, Any]:
    platform = engines.platform()
    return {
        "jaxdnn": __version__,
        "jax": jax.__version__,
        "platform": platform,
        "device_kind": engines.device_kind(platform),
    }
