"""The evaluation of a graph, step by step, in one traced program.

What a tensor holds: one in memory has its dtype, by one rounding (integers saturate), and its readers read what was
written. A virtual tensor of float64, float32, bfloat16 or float16 is never written, and is held as it was computed, in
the compute dtype; so a fused op and one op after the other compute the same formula. Virtual integers, truths and
floats of 8 bits or fewer are converted all the same. Operands of convolutions, matrix products and attention are
converted to the tensor's dtype, as tensor cores read them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core import engines
from jaxdnn._src.graph import score_options
from jaxdnn._src.graph.build import Operations
from jaxdnn._src.graph.nodes import Node, Run, as_stored, is_held, numpy_of, rounded
from jaxdnn._src.graph.tensors import NARROW, WIDE, Tensor, from_memory, to_memory

Values = Mapping[int, Array]
Numbers = Mapping[int, Any]  # what is known when the program is traced


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A part of a plan: nodes that are computed together.

    Attributes:
      nodes: those that it covers, in order.
      calls: the public ops that it calls; nothing where it is a formula that XLA compiles.
      run: what it makes, by uid, of the values so far and the numbers that are known when the program is traced.
      rule: the rule that joined the nodes; None of a single node.
      core: the node that the calls are of.
      notes: what else is to be said of it, in sentences.
      copies: bytes that it writes to memory besides its outputs, and reads again.
    """

    nodes: tuple[Node, ...]
    calls: tuple[str, ...]
    run: Callable[[Values, Numbers], Mapping[int, Array]]
    rule: str | None = None
    core: Node | None = None
    notes: tuple[str, ...] = ()
    copies: int = 0

    def by(self, engine: str) -> "Step":
        """The step with the engine that its calls name."""

        def run(values: Values, numbers: Numbers) -> Mapping[int, Array]:
            with engines.asked(engine):
                return self.run(values, numbers)

        return dataclasses.replace(self, run=run)

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors it reads that it does not make, each once."""
        made = {t.uid for node in self.nodes for t in node.outputs.values()}
        read = {t.uid: t for node in self.nodes for t in node.inputs.values() if t.uid not in made}
        return tuple(read.values())

    def outputs(self) -> tuple[Tensor, ...]:
        return tuple(t for node in self.nodes for t in node.outputs.values())


def single(node: Node) -> Step:
    """One node by its own evaluation."""

    def run(values: Values, numbers: Numbers) -> dict[int, Array]:
        found = node.kind.run(Run(node, values, numbers))
        return {node.outputs[port].uid: array for port, array in found.items()}

    return Step((node,), called(node), run, core=node, notes=(*node.kind.notes, *score_options.notes(node)))


def called(node: Node) -> tuple[str, ...]:
    """The public ops that a node calls; none where it is a formula that XLA compiles."""
    if node.op == "pointwise":
        suffix = node.attributes["mode"].rpartition("_")[2]
        return {"FWD": ("activation",), "BWD": ("activation_dgrad",)}.get(suffix, ())
    return node.kind.calls


def constants(graph: Operations) -> tuple[dict[int, Array], dict[int, Any]]:
    """The tensors that are known when the program is made: as arrays, and as numbers."""
    given = [tensor for tensor in graph.tensors.values() if tensor.value is not None]
    arrays = {t.uid: jnp.full(t.dim or (), t.value, numpy_of(t)) for t in given}
    return arrays, {t.uid: as_stored(t, t.value) for t in given}


def evaluate(graph: Operations, steps: Sequence[Step], arrays: Values, numbers: Numbers) -> dict[int, Array]:
    """The graph's outputs, by uid, of the arrays that stand for its inputs; both lie as the strides say."""
    values, known = constants(graph)
    numbers = {**known, **numbers}
    for uid, array in arrays.items():
        tensor = graph.tensors[uid]
        values[uid] = from_memory(array, tensor)
    for tensor in graph.inputs():
        if tensor.uid not in values:  # a number passed by value that is static
            values[tensor.uid] = jnp.full(tensor.dim or (), numbers[tensor.uid], numpy_of(tensor))
    for step in steps:
        values |= finished(graph, step.run(values, numbers))
    return {t.uid: to_memory(values[t.uid], t) for t in graph.outputs()}


def finished(graph: Operations, made: Mapping[int, Array]) -> dict[int, Array]:
    """What nodes made, as it is held.

    XLA may leave out a conversion to a narrow dtype and back (`xla_allow_excess_precision`), so that what reads an
    output would not read what was written. It leaves out neither a rounding that is asked for by itself, which
    bfloat16 has, for its exponents are float32's, nor, elsewhere, what stands on both sides of a barrier.
    """
    found = {}
    for uid, array in made.items():
        tensor = graph.tensors[uid]
        found[uid] = array if is_held(tensor) and array.dtype.name in WIDE else rounded(array, numpy_of(tensor))
        if is_held(tensor) or not graph.readers(tensor):
            continue
        if tensor.data_type == "bfloat16" and array.dtype.name in ("bfloat16", "float32"):
            found[uid] = lax.reduce_precision(array.astype(jnp.float32), 8, 7).astype(jnp.bfloat16)
        elif tensor.data_type in (*NARROW, "float16"):
            found[uid] = lax.optimization_barrier(found[uid])
    return found
