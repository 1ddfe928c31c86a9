"""What is refused, and in which words: attributes, shapes, graphs, variant packs, descriptions."""

import functools as ft
import json
import pickle
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src.graph.nodes import KINDS
from jaxdnn._src.graph.pointwise import MODES
from jaxdnn.graph import Graph, GraphError, Plan
from tests.graph.examples import EXAMPLES, last


def refused(call: Callable[[], Any], where: str, attribute: str) -> GraphError:
    """The error of a call, which names node or tensor, attribute, what was expected and what was got."""
    with pytest.raises(GraphError) as caught:
        call()
    error = caught.value
    assert (where in error.where, error.attribute) == (True, attribute), str(error)
    assert str(error).startswith(f"{error.where}: `{attribute}` must be {error.expected}, got ")
    assert str(error).endswith(".")
    return error


def test_errors_are_pickled():
    error = refused(lambda: Graph().tensor((2, 0)), "tensor", "dim")
    read = pickle.loads(pickle.dumps(error))
    assert (str(read), read.where, read.got) == (str(error), error.where, (2, 0))


# Each graph is made of an image `x`, a weight `w` and a channel's `b`.
X, W, B = (2, 6, 9, 7), (4, 6, 3, 3), (1, 6, 1, 1)


def parts() -> tuple[Graph, Any, Any, Any]:
    g = Graph("bad", io_data_type="float32")
    return g, g.tensor(X, last(X), name="x"), g.tensor(W, name="w"), g.tensor(B, name="b")


ATTRIBUTES: list[tuple[str, str, Any, str]] = [
    *(
        ("conv_fprop", name, value, name)
        for name in ("stride", "dilation")
        for value in ([0, 1], [1], [1.0, 1], "1", [True, 1], [1, -1], [1, 1, 1])
    ),
    *(
        ("conv_fprop", name, value, name)
        for name in ("padding", "pre_padding", "post_padding")
        for value in ([-1, 0], [1], [1.5, 1], "1", [None, 1])
    ),
    *(("conv_fprop", "convolution_mode", value, "convolution_mode") for value in ("cross", None, 0)),
    *(
        ("conv_fprop", "compute_data_type", value, "compute_data_type")
        for value in ("float16", "float8", int, object())
    ),
    *(("resample", "mode", value, "mode") for value in ("MAX", None, "BILINEAR")),
    *(
        ("resample", name, value, name)
        for name in ("window", "stride")
        for value in ([0, 1], [2], [2.0, 2], "22", [1, 2, 3])
    ),
    *(("resample", "padding_mode", value, "padding_mode") for value in ("ZERO_PAD", "EDGE_VAL_PAD", 3)),
    *(("reduction", "mode", value, "mode") for value in ("SUM", None, 1, "add")),
    *(
        ("transpose", "permutation", value, "permutation")
        for value in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], None, "0123", [0.0, 1, 2, 3])
    ),
    *(
        ("slice", "slices", value, attribute)
        for value, attribute in (
            ([slice(0, 1)], "slices"),
            (None, "slices"),
            ([(0, 3), (0, 6), (0, 9), (0, 7)], "slices[0]"),
            ([(0, 2), (0, 6), (5, 5), (0, 7)], "slices[2]"),
            ([(0, 2), (0, 6), (0, 9), (0, 7, 0)], "slices[3]"),
            ([(0, 2), (-1, 6), (0, 9), (0, 7)], "slices[1]"),
        )
    ),
    *(("concatenate", "axis", value, "axis") for value in (-1, 4, None, True, 1.0)),
    *(("concatenate", "in_place_index", value, "in_place_index") for value in (2, -1, True, 0.0)),
    *(("reshape", "reshape_mode", value, "reshape_mode") for value in ("view", None)),
    *(("gen_index", "axis", value, "axis") for value in (-1, 4, None, True, 1.0)),
    *(("pointwise", "mode", value, "mode") for value in ("add", None, 0, "RELU")),
    *(("relu", "negative_slope", value, "negative_slope") for value in ("0.1", [0.1])),
    *(("relu", "lower_clip", value, "lower_clip") for value in (7.0, "1")),
    *(("elu", "elu_alpha", value, "elu_alpha") for value in (0, -1.0, "1", np.inf)),
    *(("rng", "bernoulli_probability", value, "bernoulli_probability") for value in (-0.1, 1.1, "1", None)),
    *(("rng", "distribution", value, "distribution") for value in ("NORMAL", None)),
    *(("layernorm", "norm_forward_phase", value, "norm_forward_phase") for value in ("TRAIN", None)),
    *(("layernorm", "epsilon", value, "epsilon") for value in (-1.0, "1", None, True)),
    *(("block_scale_quantize", "block_size", value, "block_size") for value in (0, 4, 2.0, None)),
    *(("block_scale_quantize", "axis", value, "axis") for value in (-1, 4, 1.0)),
    *(
        ("sdpa", name, value, name)
        for name in ("use_causal_mask", "use_padding_mask", "use_alibi_mask")
        for value in (1, None, "yes")
    ),
    *(("sdpa", "diagonal_alignment", value, "diagonal_alignment") for value in ("top_left", None)),
    *(("sdpa", "diagonal_band_left_bound", value, "diagonal_band_left_bound") for value in (0, -1, 1.0, True)),
    *(("sdpa", "diagonal_band_right_bound", value, "diagonal_band_right_bound") for value in (-1, 1.0, True)),
    *(("sdpa", "attn_scale", value, "attn_scale") for value in (float("inf"), float("nan"))),
    *(("sdpa", "dropout", value, "dropout") for value in (0.5, (0.5,), (0.5, 2, 4, 4))),
    *(("sdpa", "dropout", (value, 1), "dropout_probability") for value in (-0.5, 1.5, "a", 1)),
    ("sdpa", "dropout", (0.5, "a"), "seed"),
    ("sdpa", "dropout", (0.5, 1, 0.5), "offset.data_type"),
    ("sdpa", "dropout", (0, 1), "seed"),
    ("sdpa", "use_padding_mask", True, "seq_len_q"),
    ("sdpa", "use_alibi_mask", True, "use_alibi_mask"),
]


def with_attribute(op: str, attribute: str, value: Any) -> None:
    """A graph of one node that is right but for an attribute."""
    g, x, w, _ = parts()
    good: dict[str, Any] = {
        "conv_fprop": {"image": x, "weight": w},
        "resample": {"input": x, "mode": "MAXPOOL", "window": [2, 2]},
        "reduction": {"input": x, "mode": "ADD"},
        "transpose": {"input": x, "permutation": [0, 1, 2, 3]},
        "slice": {"input": x},
        "concatenate": {"inputs": [x, x], "axis": 1},
        "reshape": {"input": x},
        "gen_index": {"input": x, "axis": 0},
        "pointwise": {"mode": "NEG", "in_0": x},
        "relu": {"input": x, "upper_clip": 6.0},
        "elu": {"input": x},
        "rng": {"dim": (3, 4), "seed": 1},
        "layernorm": {
            "norm_forward_phase": "INFERENCE",
            "input": x,
            "scale": g.tensor(B),
            "bias": g.tensor(B),
            "epsilon": 1.0,
        },
        "block_scale_quantize": {"input": x, "block_size": 7},
        "sdpa": {"q": g.tensor((1, 2, 3, 4)), "k": g.tensor((1, 2, 3, 4)), "v": g.tensor((1, 2, 3, 4))},
    }[op]
    y = getattr(g, op)(**{**good, attribute: value})
    if op == "reduction":
        y.set_dim((1, 6, 1, 1))
    if op == "reshape":
        y.set_dim((12, 63))
    for tensor in y if isinstance(y, tuple) else (y,):
        _ = tensor and tensor.set_output(True)
    if op == "block_scale_quantize":
        y[0].set_data_type("float8_e4m3fn")
        y[1].set_data_type("float8_e8m0fnu")
    g.validate()


@pytest.mark.parametrize(("op", "name", "value", "attribute"), ATTRIBUTES)
def test_attributes_are_refused(op: str, name: str, value: Any, attribute: str):
    refused(lambda: with_attribute(op, name, value), "", attribute)


SHAPES: list[tuple[str, tuple[tuple[int, ...], ...], str]] = [
    ("conv_fprop", ((2, 6, 9, 7), (4, 5, 3, 3)), "weight.dim"),
    ("conv_fprop", ((2, 6, 9, 7), (4, 6, 3)), "weight"),
    ("conv_fprop", ((2, 6), (4, 6)), "image"),
    ("conv_fprop", ((2, 6, 9, 7), (5, 3, 3, 3)), "weight.dim"),
    ("conv_fprop", ((2, 6, 2, 7), (4, 6, 3, 3)), "weight.dim"),
    ("matmul", ((2, 3, 4), (2, 5, 6)), "B.dim"),
    ("matmul", ((2, 3, 4), (3, 4, 6)), "B.dim"),
    ("matmul", ((2, 3, 4), (4, 6)), "B"),
    ("matmul", ((4,), (4,)), "A"),
    ("add", ((2, 3), (2, 4)), "IN_0"),
    ("add", ((2, 3), (2, 3, 1)), "IN_0"),
    ("mul", ((2, 3), (3, 2)), "IN_0"),
    ("binary_select", ((2, 3), (2, 3), (2, 1)), "IN_2"),
    ("moe_grouped_matmul", ((1, 7, 3), (4, 2, 5), (4, 1, 1)), "weight.dim"),
    ("moe_grouped_matmul", ((2, 7, 3), (4, 3, 5), (4, 1, 1)), "token.dim"),
    ("moe_grouped_matmul", ((1, 7, 3), (4, 3, 5), (5, 1, 1)), "first_token_offset"),
    ("genstats", ((2, 3),), "input"),
    ("batchnorm", ((2, 3, 4, 5), (1, 4, 1, 1), (1, 3, 1, 1)), "scale"),
    ("batchnorm", ((2, 3, 4, 5), (1, 3, 1, 1), (3,)), "bias"),
    ("batchnorm_inference", ((2, 3, 4), (1, 3, 1), (1, 3, 1), (1, 2, 1), (1, 3, 1)), "scale"),
    ("dbn_weight", ((2, 3, 4, 5), (2, 3, 4, 6), (1, 3, 1, 1), (1, 3, 1, 1), (1, 3, 1, 1)), "dy"),
    ("layernorm_backward", ((2, 3), (2, 4), (1, 4), (2, 1), (2, 1)), "grad"),
    ("layernorm_backward", ((2, 3), (2, 3), (1, 4), (2, 1), (2, 1)), "scale.dim"),
    ("layernorm_backward", ((2, 3), (2, 3), (1, 3), (1, 1), (2, 1)), "mean"),
    ("sdpa", ((1, 4, 3, 8), (1, 3, 5, 8), (1, 3, 5, 8)), "k.dim"),
    ("sdpa", ((1, 4, 3, 8), (1, 2, 5, 7), (1, 2, 5, 7)), "k.dim"),
    ("sdpa", ((1, 4, 3, 8), (1, 2, 5, 8), (1, 2, 6, 8)), "v"),
    ("sdpa", ((4, 3, 8), (2, 5, 8), (2, 5, 8)), "q"),
    ("rope", ((1, 2, 3, 4), (4, 1, 1, 4)), "freqs.dim"),
    ("rope", ((1, 2, 3, 4), (3, 1, 1, 3)), "freqs.dim"),
    ("rope", ((1, 2, 3, 4), (3, 1, 1, 6)), "freqs.dim"),
]


@pytest.mark.parametrize(("op", "dims", "attribute"), SHAPES)
def test_shapes_are_refused(op: str, dims: tuple[tuple[int, ...], ...], attribute: str):
    g = Graph("bad", io_data_type="float32")
    tensors: list[Any] = [g.tensor(dim) for dim in dims]
    for tensor in tensors if op.startswith("moe") else ():
        tensor.set_data_type("int32" if tensor is tensors[-1] else "float32")
    made = getattr(g, op)(*tensors)
    for tensor in made if isinstance(made, tuple) else (made,):
        _ = tensor and tensor.set_output(True)
    refused(g.validate, f"({g.nodes[0].op})", attribute)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_pointwise_modes_have_a_number_of_inputs(mode: str, count: int):
    g = Graph("bad", io_data_type="float32")
    tensors: list[Any] = [g.tensor((2, 3)) for _ in range(count)]
    g.pointwise(mode, *tensors, **({"axis": 0} if mode == "GEN_INDEX" else {})).set_output(True)
    if MODES[mode].inputs == count:
        g.validate()
    else:
        assert f"{MODES[mode].inputs} of mode {mode}" in str(refused(g.validate, "(pointwise)", "inputs"))


@ft.cache
def built() -> tuple[Graph, ...]:
    """A graph of each kind of node."""
    return tuple(build(np.random.default_rng(0))[0] for build in EXAMPLES.values())


REQUIRED = [(kind.op, port) for kind in KINDS.values() for port in kind.inputs if port[-1] not in "?*"]


@pytest.mark.parametrize(("op", "port"), REQUIRED)
def test_every_operand_is_asked_for(op: str, port: str):
    """A node of an example without one of its operands."""
    graph = next(graph for graph in built() if any(node.op == op for node in graph.nodes))
    graph = Graph.from_json(graph.to_json())
    node = next(n for n in graph.nodes if n.op == op)
    del node.inputs[port]
    graph.changed()
    refused(graph.validate, node.name, port)


def three(g: Graph) -> list[Any]:
    return [g.tensor((1, 2, 3, 4))] * 3


def tangled() -> Graph:
    g, x, _, _ = parts()
    y = g.exp(x)
    z = g.exp(y).set_output(True)
    g.nodes[0].inputs["IN_0"] = z
    return g


def valued() -> Graph:
    g, x, _, _ = parts()
    g.exp(x).set_output(True).value = 1.0
    return g


def without_dtype() -> Graph:
    g = Graph("bad")
    g.exp(g.tensor((1,))).set_output(True)
    return g


def graph_of(change: Callable[[Graph, Any, Any, Any], Any]) -> Callable[[], Any]:
    def call() -> Any:
        g, x, w, b = parts()
        change(g, x, w, b)
        return g.validate()

    return call


GRAPHS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "no nodes": (graph_of(lambda g, x, w, b: None), "graph 'bad'", "nodes"),
    "no output": (graph_of(lambda g, x, w, b: g.exp(x)), "graph 'bad'", "outputs"),
    "a graph's name that is no text": (lambda: Graph(3), "graph 3", "name"),  # pyright: ignore[reportArgumentType]
    "an unknown dtype that NumPy cannot parse": (lambda: Graph(io_data_type="(2,"), "graph", "io_data_type"),
    "a tensor like a list": (graph_of(lambda g, x, w, b: g.tensor_like([1.0])), "graph 'bad'", "input"),
    "gaps beyond int32": (
        graph_of(lambda g, x, w, b: g.exp(x.set_stride((2**33, 63, 7, 1))).set_output(True)),
        "tensor 'x'",
        "stride",
    ),
    "gaps of a result beyond int32": (
        graph_of(lambda g, x, w, b: g.exp(x).set_stride((2**33, 63, 7, 1)).set_output(True)),
        "exp_0",
        "OUT_0.stride",
    ),
    "a sum of floats in int32": (
        graph_of(lambda g, x, w, b: g.reduction(x, "ADD", "int32").set_dim((2, 1, 1, 1)).set_output(True)),
        "reduction_0",
        "input.data_type",
    ),
    "floats added in int32": (
        graph_of(lambda g, x, w, b: g.add(x, b, compute_data_type="int32").set_output(True)),
        "add_0",
        "IN_0.data_type",
    ),
    "an operand too few": (lambda: parts()[0].add(1.0), "node of mode ADD", "arguments"),
    "an operand too many": (lambda: parts()[0].exp(1.0, None, "", 2.0), "node of mode EXP", "arguments"),
    "experts with another top_k": (
        graph_of(
            lambda g, x, w, b: g.moe_grouped_matmul(
                g.tensor((1, 7, 3)), g.tensor((4, 3, 5)), g.tensor((4, 1, 1), data_type="int32"), top_k=2
            ).set_output(True)
        ),
        "moe",
        "top_k",
    ),
    "half of an integer beyond a matrix": (
        graph_of(
            lambda g, x, w, b: g.matmul(
                *(g.tensor((2, 2), data_type="int8") for _ in "ab"), compute_data_type="int32", padding=0.5
            ).set_output(True)
        ),
        "matmul",
        "padding",
    ),
    "a truth of 2": (
        graph_of(lambda g, x, w, b: g.add(x, g.tensor_scalar(2, "bool")).set_output(True)),
        "tensor",
        "value",
    ),
    "a cycle": (lambda: tangled().validate(), "exp_", "inputs"),
    "a virtual input": (
        graph_of(lambda g, x, w, b: (x.set_output(False), g.exp(x).set_output(True))),
        "tensor 'x'",
        "is_virtual",
    ),
    "a name twice": (
        graph_of(lambda g, x, w, b: (w.set_name("x"), g.exp(x).set_output(True))),
        "graph 'bad'",
        "tensor name",
    ),
    "a uid twice": (graph_of(lambda g, x, w, b: w.set_uid(x.uid)), "graph 'bad'", "uid"),
    "a uid of text": (graph_of(lambda g, x, w, b: w.set_uid("w")), "graph 'bad'", "uid"),
    "a uid of 65 bits": (graph_of(lambda g, x, w, b: g.tensor((1,), uid=2**63)), "graph 'bad'", "uid"),
    "too few strides": (
        graph_of(lambda g, x, w, b: (x.set_stride((1, 2)), g.exp(x).set_output(True))),
        "tensor 'x'",
        "stride",
    ),
    "a size of 0": (graph_of(lambda g, x, w, b: x.set_dim((2, 0))), "tensor 'x'", "dim"),
    "a size of a float": (graph_of(lambda g, x, w, b: x.set_dim((2.0, 1))), "tensor 'x'", "dim"),
    "a stride below 0": (graph_of(lambda g, x, w, b: x.set_stride((-1, 1))), "tensor 'x'", "stride"),
    "an unknown dtype": (graph_of(lambda g, x, w, b: x.set_data_type("float99")), "tensor 'x'", "data_type"),
    "a complex dtype": (graph_of(lambda g, x, w, b: x.set_data_type(np.complex64)), "tensor 'x'", "data_type"),
    "another size of a result": (
        graph_of(lambda g, x, w, b: g.exp(x).set_dim((2, 6, 9, 8)).set_output(True)),
        "exp_0",
        "OUT_0.dim",
    ),
    "a result that overlaps": (
        graph_of(lambda g, x, w, b: g.exp(x).set_stride((1, 1, 1, 1)).set_output(True)),
        "exp_0",
        "OUT_0.stride",
    ),
    "no operand": (graph_of(lambda g, x, w, b: g.add(None, x).set_output(True)), "add_0", "IN_0"),
    "an array for a tensor": (graph_of(lambda g, x, w, b: g.add(x, np.ones(X))), "add_0", "IN_1"),
    "text for a tensor": (graph_of(lambda g, x, w, b: g.exp("x")), "exp_0", "IN_0"),
    "another graph's tensor": (graph_of(lambda g, x, w, b: g.exp(Graph("other").tensor((1,)))), "exp_0", "IN_0"),
    "an unknown attribute": (
        graph_of(lambda g, x, w, b: g.pointwise("NEG", x, slope=1).set_output(True)),
        "neg_0",
        "attributes",
    ),
    "no io_data_type": (lambda: without_dtype().validate(), "tensor", "data_type"),
    "dims of dgrad": (
        graph_of(lambda g, x, w, b: g.conv_dgrad(g.tensor((2, 4, 7, 5)), w).set_output(True)),
        "conv_dgrad",
        "DX.dim",
    ),
    "dims of wgrad": (
        graph_of(lambda g, x, w, b: g.conv_wgrad(x, g.tensor((2, 4, 7, 5))).set_output(True)),
        "conv_wgrad",
        "DW.dim",
    ),
    "dims of a reduction": (
        graph_of(lambda g, x, w, b: g.reduction(x, "ADD").set_output(True)),
        "reduction_0",
        "Y.dim",
    ),
    "other dims of a reduction": (
        graph_of(lambda g, x, w, b: g.reduction(x, "ADD").set_dim((2, 3, 1, 1)).set_output(True)),
        "reduction_0",
        "Y.dim",
    ),
    "dims of a view": (
        graph_of(lambda g, x, w, b: g.reshape(x).set_dim((3, 4)).set_output(True)),
        "reshape_0",
        "Y.dim",
    ),
    "two paddings": (
        graph_of(lambda g, x, w, b: g.conv_fprop(x, w, [1, 1], pre_padding=[1, 1]).set_output(True)),
        "conv_fprop",
        "padding",
    ),
    "a float in int32": (
        graph_of(lambda g, x, w, b: g.conv_fprop(x, w, compute_data_type="int32").set_output(True)),
        "conv_fprop",
        "image.data_type",
    ),
    "exp in int32": (
        graph_of(lambda g, x, w, b: g.exp(x, compute_data_type="int32").set_output(True)),
        "exp_0",
        "compute_data_type",
    ),
    "operands of two dtypes": (
        graph_of(lambda g, x, w, b: (w.set_data_type("bfloat16"), g.conv_fprop(x, w).set_output(True))),
        "conv_fprop",
        "weight.data_type",
    ),
    "an epsilon in memory": (
        graph_of(lambda g, x, w, b: g.layernorm("INFERENCE", x, b, b, g.tensor((1,)))[0].set_output(True)),
        "layernorm",
        "epsilon",
    ),
    "a half of running statistics": (
        graph_of(lambda g, x, w, b: g.batchnorm(x, b, b, b, None, 1.0, 0.5)[0].set_output(True)),
        "batchnorm",
        "in_running_mean",
    ),
    "a sink of another size": (
        graph_of(lambda g, x, w, b: g.sdpa(*three(g), sink_token=g.tensor((2,)))[0].set_output(True)),
        "sdpa",
        "sink_token",
    ),
    "both causal masks": (
        graph_of(
            lambda g, x, w, b: g.sdpa(*three(g), use_causal_mask=True, use_causal_mask_bottom_right=True)[0].set_output(
                True
            )
        ),
        "sdpa",
        "use_causal_mask",
    ),
    "both left bounds": (
        graph_of(
            lambda g, x, w, b: g.sdpa(*three(g), sliding_window_length=2, diagonal_band_left_bound=2)[0].set_output(
                True
            )
        ),
        "sdpa",
        "sliding_window_length",
    ),
    "a corner's right bound": (
        graph_of(
            lambda g, x, w, b: g.sdpa(*three(g), diagonal_alignment="BOTTOM_RIGHT", diagonal_band_right_bound=1)[
                0
            ].set_output(True)
        ),
        "sdpa",
        "diagonal_band_right_bound",
    ),
    "a scale's dtype": (
        graph_of(lambda g, x, w, b: g.block_scale_quantize(x, 7)[0].set_output(True)),
        "block_scale_quantize",
        "Y.data_type",
    ),
    "scales of another size": (
        graph_of(
            lambda g, x, w, b: g.block_scale_dequantize(
                g.tensor((2, 8), data_type="FP8_E4M3"), g.tensor((2, 3), data_type="FP8_E8M0"), [4]
            ).set_output(True)
        ),
        "block_scale_dequantize",
        "descale.dim",
    ),
    "more than 127 taps": (
        graph_of(
            lambda g, x, w, b: g.resample(g.tensor((1, 1, 12, 12)), "MAXPOOL", [12, 12], generate_index=True)[
                0
            ].set_output(True)
        ),
        "resample",
        "window",
    ),
    "an index of an average": (
        graph_of(
            lambda g, x, w, b: g.resample(x, "AVGPOOL_INCLUDE_PADDING", [2, 2], generate_index=True)[0].set_output(True)
        ),
        "resample",
        "generate_index",
    ),
    "no index": (
        graph_of(
            lambda g, x, w, b: g.moe_grouped_matmul(
                g.tensor((1, 7, 3)), g.tensor((4, 3, 5)), g.tensor((4, 1, 1), data_type="int32"), mode="GATHER"
            ).set_output(True)
        ),
        "moe",
        "token_index",
    ),
    "a value of a result": (lambda: valued().validate(), "exp_0", "value"),
    "half of an integer": (
        graph_of(lambda g, x, w, b: g.add(x, g.tensor_scalar(0.5, "int32")).set_output(True)),
        "tensor",
        "value",
    ),
    "a number of 65 bits": (graph_of(lambda g, x, w, b: g.add(x, 2**64)), "tensor", "value"),
    "a name that is no text": (graph_of(lambda g, x, w, b: x.set_name(1)), "tensor 'x'", "name"),
    "a node's name that is no text": (graph_of(lambda g, x, w, b: g.exp(x, name=1)), "graph 'bad'", "node name"),
    "not JSON": (lambda: Graph.from_json("{"), "graph", "text"),
    "no description": (lambda: Graph.from_json("[]"), "graph", "format"),
    "another format": (lambda: Graph.from_json('{"format": 2}'), "graph", "format"),
    "a description in part": (lambda: Graph.from_json('{"format": 1, "name": "a"}'), "graph", "description"),
    "no plan's JSON": (lambda: Plan.from_json("{"), "plan", "text"),
    "a plan of another format": (lambda: Plan.from_json('{"plan": 0}'), "plan", "plan"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_refused(name: str):
    refused(*GRAPHS[name])


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        ("int8", [-128, 127, np.int64(3)], [128, 2.5, np.inf, np.nan]),
        ("bool", [0, 1, True], [2]),
        ("uint8", [255], [-1]),
    ],
)
def test_numbers_that_a_dtype_does_not_hold_are_refused(dtype: str, good: list[Any], bad: list[Any]):
    g = Graph(io_data_type="float32")
    s = g.tensor((1, 1), data_type=dtype, is_pass_by_value=True, name="s")
    y = g.add(g.tensor((2, 3), name="x"), s).set_output(True)
    plan, x = g.plan(), np.zeros((2, 3), np.float32)
    for value in good:
        assert float(plan({"x": x, "s": value})[y][0, 0]) == value
    for value in bad:
        refused(lambda value=value: plan({"x": x, "s": value}), "tensor 's'", "variant_pack")


def test_variant_packs_are_refused():
    g, x, _, b = parts()
    y = g.add(x, b).set_output(True)
    plan: Any = g.plan()
    good, bias = jnp.ones((2, 9, 7, 6)), jnp.ones(6)
    assert plan({x: good, b: bias})[y].shape == (2, 9, 7, 6)
    refused(lambda: plan([good, bias]), "graph 'bad'", "variant_pack")
    refused(lambda: plan({x: good}), "graph 'bad'", "variant_pack")
    refused(lambda: plan({x: good, "x": good, b: bias}), "tensor 'x'", "variant_pack")
    refused(lambda: plan({x: good, b: bias, y: good}), "tensor", "variant_pack")
    refused(lambda: plan({x: good, "c": bias}), "graph 'bad'", "tensor")
    refused(lambda: plan({x: good, 99: bias}), "graph 'bad'", "uid")
    refused(lambda: plan({x: jnp.ones(X), b: bias}), "tensor 'x'", "shape")
    refused(lambda: plan({x: good.astype(jnp.bfloat16), b: bias}), "tensor 'x'", "data_type")
    refused(lambda: plan({x: good, Graph().tensor((1,)): bias}), "graph 'bad'", "tensor")


JUNK: tuple[Any, ...] = (None, -1, 0, 3, "x", "float32", [], [1], [1, 2, 3, 4], {}, {"a": 1}, 1.5, True, 2**70, "inf")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value of a description, containers too."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(way for key, inner in items for way in leaves(inner, (*path, key)))]


@pytest.mark.parametrize("seed", range(40))
def test_spoilt_descriptions_are_refused_or_read(seed: int):
    """A hundred descriptions with one value changed: what is refused is refused by an error of graphs."""
    rng = np.random.default_rng([31, seed])
    graphs = built()
    spoilt = refusals = 0
    while spoilt < 100:
        described = graphs[int(rng.integers(len(graphs)))].describe()
        ways = [way for way in leaves(described) if way and way != ("name",)]
        *path, key = ways[int(rng.integers(len(ways)))]
        place: Any = described
        for step in path:
            place = place[step]
        junk = JUNK[int(rng.integers(len(JUNK)))]
        place[key] = junk
        spoilt += 1
        try:
            Graph.from_description(json.loads(json.dumps(described)))
        except GraphError:
            refusals += 1
        except Exception as error:
            raise AssertionError(f"{described['nodes']} with {[*path, key]} = {junk!r}") from error
    assert refusals >= 20
