"""Graphs as they are built: inference, order, JSON."""

import json
from typing import Any

import numpy as np
import pytest

from jaxdnn.graph import Graph, GraphError
from tests.graph.examples import EXAMPLES, last

each = pytest.mark.parametrize("name", EXAMPLES)


@each
def test_json_loads_back(name: str):
    graph, _ = EXAMPLES[name](np.random.default_rng(0))
    text = graph.to_json()
    read = Graph.from_json(text)
    assert json.loads(read.to_json()) == json.loads(text)
    assert [t.name for t in read.inputs()] == [t.name for t in graph.inputs()]


def test_what_is_inferred_follows_the_strides():
    g = Graph(io_data_type="bfloat16")
    x, w = g.tensor((2, 6, 9, 7), last((2, 6, 9, 7)), name="x"), g.tensor((4, 6, 3, 3), name="w")
    assert (w.get_stride(), w.get_data_type()) == ((54, 9, 3, 1), "bfloat16")  # before there is a node, too
    with pytest.raises(GraphError, match="`nodes` must be at least one operation, got 'none'"):
        g.validate()
    y = g.conv_fprop(x, w, padding=[1, 1], stride=[2, 1])
    assert y.get_dim() == (2, 4, 5, 7)  # while the graph grows, too
    z = g.relu(y).set_output(True)
    assert (y.get_dim(), y.get_stride(), y.get_data_type()) == ((2, 4, 5, 7), (140, 1, 28, 4), "float32")
    assert (z.get_stride(), z.get_data_type(), z.get_shape()) == (y.get_stride(), "bfloat16", (2, 5, 7, 4))
    x.set_dim((2, 6, 11, 7)).set_stride(last((2, 6, 11, 7)))  # what was inferred is inferred again
    assert y.get_dim() == (2, 4, 6, 7)
    assert g.nodes[0].derived["groups"] == 1
    assert g.nodes[0].derived["spatial_dims"] == 2


def test_order_of_declaration_does_not_matter():
    g = Graph(io_data_type="float32")
    x = g.tensor((2, 3), name="x")
    y = g.exp(g.neg(x)).set_output(True)
    g.nodes.reverse()
    np.testing.assert_allclose(g.plan()({x: np.ones((2, 3), np.float32)})[y], np.exp(-1.0), rtol=1e-6)


def test_uids_of_numpy_are_kept_as_integers():
    g = Graph(io_data_type="float32")
    uids: list[Any] = [np.int64(5), np.int32(7)]
    g.exp(g.tensor((2,), uid=uids[0])).set_output(True).set_uid(uids[1])
    assert [t["uid"] for t in json.loads(g.to_json())["tensors"]] == [5, 7]


def test_slices_without_a_limit_end_with_the_axis():
    """Of a tensor whose sizes are not known yet, too."""
    g = Graph(io_data_type="float32")
    x = g.tensor((4, 5), name="x")
    y = g.slice(g.neg(x), [slice(None), slice(1, None, 2)]).set_output(True)
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    assert y.get_dim() == (4, 2)
    np.testing.assert_array_equal(Graph.from_json(g.to_json()).plan()({"x": x})[y.uid], -x[:, 1::2])
