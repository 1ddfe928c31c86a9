"""Every kind of node: its results are within the computed bound of the definition, alone and under transformations."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.graph.nodes import KINDS
from jaxdnn_reference import graph as definition
from tests.graph.bounds import ATTENTION, tolerance
from tests.graph.examples import EXAMPLES

each = pytest.mark.parametrize("name", EXAMPLES)


def worst(graph: Any, arrays: dict[int, Any], found: Any, accumulation: str | None = None) -> float:
    """The largest error over its bound; infinite where a result is NaN or infinite and should not be.

    `accumulation` is how attention adds, None as the engine does that serves it here.
    """
    described = graph.describe()
    held, errors = tolerance(described, arrays, accumulation or of_attention(graph))
    known = {t["uid"]: t for t in described["tensors"]}
    ratios = [0.0]
    for tensor in graph.outputs():
        value = definition.from_memory(np.asarray(found[tensor.uid]), known[tensor.uid]).astype(np.float64)
        wanted, bound = held[tensor.uid], np.broadcast_to(errors[tensor.uid], value.shape)
        equal = (value == wanted) | (np.isnan(value) & np.isnan(wanted))
        with np.errstate(all="ignore"):
            ratio = np.where(equal, 0.0, np.abs(value - wanted) / np.where(bound > 0, bound, 0.0))
        ratios.append(float(np.max(np.where(np.isnan(ratio), np.inf, ratio))))
    return max(ratios)


def of_attention(graph: Any) -> str:
    """How attention adds on this device, as the engine of the graph's first plan declares it."""
    if not any(node.op in ATTENTION for node in graph.nodes):
        return "float32"
    shapes = [jax.ShapeDtypeStruct(t.get_shape(), t.get_data_type()) for t in graph.inputs()]
    said = dnn.explain(graph.plan().function, *shapes)
    found = {c.accumulation for call in said for c in call.candidates if c.engine == call.engine}
    return "tensor_core" if "tensor_core" in found else "float32"


@each
def test_value(name: str):
    graph, arrays = EXAMPLES[name](np.random.default_rng(1))
    plan = graph.plan()
    found = plan(arrays)
    for tensor in graph.outputs():
        assert (found[tensor].shape, found[tensor].dtype.name) == (tensor.get_shape(), tensor.get_data_type())
    assert worst(graph, arrays, found) <= 1


def test_every_kind_has_an_example():
    made = {node.op for build in EXAMPLES.values() for node in build(np.random.default_rng(0))[0].nodes}
    assert made == set(KINDS) == set(definition.OPS)
