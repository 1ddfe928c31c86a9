"""Attention with functions of its scores, and of floats of 8 bits: beside formulas written apart, and refusals.

And the bound of what tensor cores compute, beside the bits that the definition of a kernel's schedule predicts.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.core.explain import traced_calls
from jaxdnn.graph import Graph, Tensor, trace
from jaxdnn_reference import graph as definition
from jaxdnn_reference.attention_scheduled import attention_scheduled
from tests.graph.examples import EXAMPLES, LOW, filled, heads
from tests.graph.test_nodes import worst
from tests.graph.test_plans import in_float64
from tests.graph.test_refusals import refused

Array = np.ndarray[Any, Any]


def wide(v: Any) -> Array:
    return np.asarray(v, np.float64)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def scores(q: Array, k: Array, scale: float) -> Array:
    """Of four heads of queries and two of keys."""
    return scale * np.einsum("bhsd,bhtd->bhst", wide(q), np.repeat(wide(k), 2, axis=1))


# What users write on the scores, with the same in NumPy of the scores, the query's and the key's numbers.
ROW, COLUMN = np.arange(5)[:, None], np.arange(7)[None, :]


def soft_cap(g: Graph, s: Tensor) -> Tensor:
    return g.mul(g.tanh(g.mul(s, 0.5)), 2.0)


def causal(g: Graph, s: Tensor) -> Tensor:
    """As cudnn-frontend's sample has it, with a number that is passed by value."""
    row, column = (g.gen_index(s, axis).set_data_type("INT32") for axis in (2, 3))
    seen = g.cmp_ge(row, column, compute_data_type="INT32").set_data_type("BOOLEAN")
    return g.binary_select(s, g.tensor((1, 1, 1, 1), is_pass_by_value=True, name="low"), seen)


def distance(g: Graph, s: Tensor) -> Tensor:
    """A penalty that grows with the distance, in heads of odd number."""
    row, column, head = (g.gen_index(s, axis).set_data_type("INT32") for axis in (2, 3, 1))
    far = g.mul(g.abs(g.sub(row, column)), -0.25)
    return g.add(s, g.mul(far, g.mod(head, 2.0)))


def activated(g: Graph, s: Tensor) -> Tensor:
    """Functions that are ops here, and a conversion."""
    return g.sub(g.gelu(s), g.identity(g.softplus(s)).set_data_type("BFLOAT16"))


FUNCTIONS: dict[Any, Callable[[Array], Array]] = {
    soft_cap: lambda s: 2 * np.tanh(0.5 * s),
    causal: lambda s: np.where(ROW >= COLUMN, s, -2.5),
    distance: lambda s: s - 0.25 * np.abs(ROW - COLUMN) * (np.arange(4) % 2)[:, None, None],
    activated: lambda s: wide(jax.nn.gelu(np.float32(s), approximate=False)) - np.log1p(np.exp(s)),
}


def graph_of(function: Any, **how: Any) -> tuple[Graph, tuple[Tensor, ...], dict[int, Any]]:
    g = Graph("scores", io_data_type="float32")
    o, stats = g.sdpa(*heads(g, "q", "k", "v"), attn_scale=0.5, score_mod=function, generate_stats=True, **how)
    o.set_output(True)
    stats.set_output(True)
    graph, arrays = filled(g, np.random.default_rng(51), low=LOW)
    return graph, (o, stats), arrays


def memory(v: Any) -> Array:
    """(B, S, H, D) as (B, H, S, D)."""
    return wide(v).swapaxes(1, 2)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_scores(function: Any):
    """Forward and backward, beside formulas and differences."""
    graph, (o, stats), arrays = graph_of(function)
    q, k, v = (memory(arrays[graph.find(name).uid]) for name in "qkv")
    x = FUNCTIONS[function](scores(q, k, 0.5))
    p = softmax(x)
    plan = graph.plan()
    assert plan.parts[-1].calls == ("attention",)
    found = plan(arrays)
    np.testing.assert_allclose(memory(found[o]), p @ np.repeat(v, 2, axis=1), atol=3e-6)
    np.testing.assert_allclose(wide(found[stats])[..., 0], np.log(np.exp(x).sum(-1)), atol=3e-6)
    again = Graph.from_json(graph.to_json())
    assert again.describe() == graph.describe()
    np.testing.assert_array_equal(again.plan()(arrays)[o.uid], found[o])
    do = np.random.default_rng(52).standard_normal(found[o].shape).astype(np.float32)
    names = {t.uid: t.name for t in graph.inputs()}
    back = backward(function, {names[uid]: v for uid, v in arrays.items()}, found[o], found[stats], do)
    _, pulled = jax.vjp(lambda q, k, v: plan({**arrays, 1: q, 2: k, 3: v})[o], *(arrays[uid] for uid in (1, 2, 3)))
    for ours, derived in zip(back, pulled(jnp.asarray(do)), strict=True):
        np.testing.assert_allclose(ours, derived, atol=2e-5)
    described, uid = in_float64(graph.describe()), graph.find("q").uid
    for at in ((0, 0, 0, 0), (1, 4, 3, 7), (0, 3, 1, 5)):
        ends = []
        for sign in (1, -1):
            moved = wide(arrays[uid])
            moved[at] += sign * 1e-4
            ends.append((memory(do) * definition.hold(described, {**arrays, uid: moved})[o.uid]).sum())
        assert abs((ends[0] - ends[1]) / 2e-4 - wide(back[0])[at]) <= 1e-4


def backward(function: Any, arrays: dict[str, Any], o: Any, stats: Any, do: Any) -> list[Any]:
    g = Graph("back", io_data_type="float32")
    q, k, v, o_, do_ = heads(g, "q", "k", "v", "o", "dO")
    saved = g.tensor((2, 4, 5, 1), name="stats")
    made = g.sdpa_backward(q, k, v, o_, do_, saved, attn_scale=0.5, score_mod=function)
    for tensor in made:
        tensor.set_output(True)
    plan = g.plan()
    return list(plan({**arrays, "o": o, "dO": do, "stats": stats}).values())


def test_a_function_of_scores_is_the_ops():
    """The bits are those of `attention` with the function that the nodes are."""
    graph, (o, _), arrays = graph_of(lambda g, s: g.sub(g.gelu(s), g.mul(g.gen_index(s, 1), 0.25)))
    q, k, v = (jnp.asarray(arrays[graph.find(name).uid]) for name in "qkv")

    def function(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return dnn.activation(s, activation="gelu") - h.astype(jnp.float32) * 0.25

    wanted = jax.jit(lambda q, k, v: dnn.attention(q, k, v, scale=0.5, score_fn=function))(q, k, v)
    np.testing.assert_array_equal(graph.plan()(arrays)[o], wanted)


def places(g: Graph, s: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of query and key, one of them converted."""
    return g.gen_index(s, 2), g.gen_index(s, 3).set_data_type("INT32")


def biased(g: Graph, s: Tensor) -> Tensor:
    return g.add(s, g.tensor((2, 1, 5, 7), name="bias"))


def biased_less(g: Graph, s: Tensor) -> Tensor:
    return g.sub(biased(g, s), g.tensor((1, 4, 1, 7), name="less"))


def alibi(g: Graph, s: Tensor) -> Tensor:
    query, key = places(g, s)
    return g.add(s, g.mul(g.tensor((1, 4, 1, 1), name="slopes"), g.sub(key, query)))


def alibi_of_heads(g: Graph, s: Tensor) -> Tensor:
    """Slopes 2^-(h + 1), as a function of the number of the head."""
    query, key = places(g, s)
    slopes = g.pow(g.mul(g.add(g.gen_index(s, 1), 1.0), 1.0).set_name("number"), 1.0)
    return g.sub(s, g.mul(g.sub(query, key), g.exp(g.mul(slopes, -0.6931471805599453))))


def relative(g: Graph, s: Tensor) -> Tensor:
    query, key = places(g, s)
    return g.add(g.mul(g.tanh(g.div(s, 2.0)), 3.0), g.mul(g.abs(g.sub(query, key)), -0.25))


def before_the_diagonal(g: Graph, s: Tensor) -> Tensor:
    query, key = places(g, s)
    return g.binary_select(s, -np.inf, g.cmp_ge(query, key))


def behind_it_nothing(g: Graph, s: Tensor) -> Tensor:
    query, key = places(g, s)
    return g.binary_select(-np.inf, biased(g, s), g.cmp_gt(key, query))


def arrow(g: Graph, s: Tensor) -> Tensor:
    """The first two keys, and those before the diagonal."""
    query, key = places(g, s)
    return g.binary_select(s, -np.inf, g.logical_or(g.cmp_lt(key, 2.0), g.cmp_ge(query, key)))


OPTIONS: dict[Any, str] = {
    soft_cap: "softcap",
    (lambda g, s: g.mul(3.0, g.tanh(g.div(s, 3.0)))): "softcap",
    (lambda g, s: g.mul(g.tanh(g.mul(s, 0.5)), 3.0)): "scale and softcap",
    (lambda g, s: g.tanh(g.mul(g.mul(s, 0.5), 3.0))): "scale and softcap",
    (lambda g, s: (g.mul(s, 0.5), g.mul(g.tanh(s), 2.0))[1]): "scale and softcap",
    (lambda g, s: g.identity(s)): "nothing, for it changes nothing",
    biased: "bias",
    biased_less: "bias",
    distance: "bias",
    alibi: "alibi_slopes",
    alibi_of_heads: "alibi_slopes",
    relative: "scale and softcap and bias",
    before_the_diagonal: "causal",
    behind_it_nothing: "bias and causal",
    arrow: "mask",
}


@pytest.mark.parametrize("function", OPTIONS)
def test_options_of_attention_are_recognised(function: Any):
    """Kernels serve these, and no function of the user's; values and gradients are those of the function."""
    graph, (o, stats), arrays = graph_of(function)
    plan = graph.plan()
    (call,) = traced_calls(lambda v: tuple(plan(v).values()), arrays, platform="cpu")
    assert call.spec.score is None
    assert plan.parts[-1].notes == (f"score_mod is given as {OPTIONS[function]}",)
    found, wanted = plan(arrays), definition.evaluate(graph.describe(), arrays)
    for tensor in (o, stats):
        np.testing.assert_allclose(found[tensor], wanted[tensor.uid], atol=3e-6)
    do = np.random.default_rng(59).standard_normal(found[o].shape).astype(np.float32)
    names = {t.uid: t.name for t in graph.inputs()}
    dq, dk, _ = backward(function, {names[uid]: v for uid, v in arrays.items()}, found[o], found[stats], do)
    described = in_float64(graph.describe())
    for name, made, at in (("q", dq, (1, 4, 3, 7)), ("k", dk, (0, 3, 1, 5))):
        uid, ends = graph.find(name).uid, []
        for sign in (1, -1):
            moved = wide(arrays[uid])
            moved[at] += sign * 1e-4
            ends.append((memory(do) * definition.hold(described, {**arrays, uid: moved})[o.uid]).sum())
        assert abs((ends[0] - ends[1]) / 2e-4 - wide(made)[at]) <= 1e-4


def test_options_of_a_function_and_of_the_node_are_both_kept():
    """Both biases, and the mask of the function with the window, the slopes and the lengths of the node."""

    def function(g: Graph, s: Tensor) -> Tensor:
        return before_the_diagonal(g, alibi(g, biased(g, s)))

    g = Graph("both", io_data_type="float32")
    lengths = {n: g.tensor((2, 1, 1, 1), data_type="int32", name=n) for n in ("seq_len_q", "seq_len_kv")}
    how = {"use_padding_mask": True, **lengths, "bias": g.tensor((1, 4, 5, 1), name="outer"), "attn_scale": 0.5}
    how |= {"use_causal_mask": True, "sliding_window_length": 3, "use_alibi_mask": True}
    o = g.sdpa(*heads(g, "q", "k", "v"), score_mod=function, **how)[0].set_output(True)
    few = np.array([5, 3], np.int32).reshape(2, 1, 1, 1)
    graph, arrays = filled(g, np.random.default_rng(60), seq_len_q=few, seq_len_kv=few)
    assert graph.plan().parts[-1].notes == ("score_mod is given as bias and alibi_slopes and causal",)
    np.testing.assert_allclose(graph.plan()(arrays)[o], definition.evaluate(graph.describe(), arrays)[o.uid], atol=3e-6)


NO_OPTIONS: dict[Any, str] = {
    (lambda g, s: g.mul(g.tanh(g.div(2.0, s)), 2.0)): "DIV, is none",
    (lambda g, s: g.mul(g.tanh(g.mul(s, 0.5).set_data_type("int32")), 2.0)): "has a dtype of its own",
    (lambda g, s: g.mul(g.tanh(g.mul(s, -0.5)), -2.0)): "a cap of -2",
    (lambda g, s: g.mul(s, 0.0)): "a scale of 0",
    (lambda g, s: g.mul(g.sigmoid(g.mul(s, 0.5)), 2.0)): "SIGMOID_FWD, is none",
    (lambda g, s: g.tanh(g.tanh(s))): "TANH_FWD, is none",
    (lambda g, s: g.mul(g.add(s, 1.0), 2.0)): "MUL, is none",
    (lambda g, s: g.sub(1.0, s)): "SUB, is none",
    (lambda g, s: g.add(s, g.mul(s, 0.5))): "reads scores twice",
    (lambda g, s: g.binary_select(s, -1e9, g.cmp_ge(*places(g, s)))): "not known to be -inf",
    (lambda g, s: g.binary_select(s, -np.inf, g.cmp_gt(s, 0.0))): "reads scores twice",
    causal: "not known to be -inf",
    activated: "reads scores twice",
    (lambda g, s: g.mul(g.tanh(g.mul(s, 0.5)), g.tensor((1, 1, 1, 1), is_pass_by_value=True, name="low"))): "MUL, is",
}


@pytest.mark.parametrize("function", NO_OPTIONS)
def test_what_is_no_option_is_a_function(function: Any):
    graph, (o, _), arrays = graph_of(function)
    plan = graph.plan()
    (call,) = traced_calls(lambda v: tuple(plan(v).values()), arrays, platform="cpu")
    assert call.spec.score is not None
    (note,) = plan.parts[-1].notes
    assert NO_OPTIONS[function] in note
    assert note in str(plan.explain())
    wanted = definition.evaluate(graph.describe(), arrays)[o.uid]
    np.testing.assert_allclose(plan(arrays)[o], wanted, atol=2e-5)


def test_a_gradient_of_the_nodes_bias_is_that_of_no_sum():
    """Where dBias is asked for, what the function adds stays apart; it is the definition's, as dQ is."""
    g = Graph("dbias", io_data_type="float32")
    saved, outer = g.tensor((2, 4, 5, 1), name="stats"), g.tensor((1, 4, 1, 7), name="outer")
    how = {"attn_scale": 0.5, "bias": outer, "score_mod": biased, "generate_dbias": True}
    q, k, v, o, do = heads(g, "q", "k", "v", "o", "dO")
    made = g.sdpa_backward(q, k, v, o, do, saved, **how)
    for tensor in made:
        tensor.set_output(True)
    graph, arrays = filled(g, np.random.default_rng(61))
    assert "dBias is the gradient of the node's bias alone" in graph.plan().parts[0].notes[0]
    assert worst(graph, arrays, graph.plan()(arrays)) <= 1


def test_a_bias_of_places_takes_no_more_room_than_it_may():
    """What is computed of all places of long sequences stays a function; what is read is as large as it is."""
    g = Graph("long", io_data_type="bfloat16")
    q = g.tensor((1, 8, 2**14, 64), name="q")
    g.sdpa(q, q, q, score_mod=distance, name="far")[0].set_output(True)
    assert f"a bias of it would take {8 * 2**30} bytes" in g.plan().parts[0].notes[0]


def test_a_traced_cap_is_a_function_of_scores():
    q = jax.ShapeDtypeStruct((2, 5, 3, 8), "float32")
    graph = trace(lambda q: dnn.attention(q, q, q, softcap=2.0, causal=True), q)
    assert graph.nodes[-1].body is not None
    x = np.random.default_rng(58).standard_normal((2, 5, 3, 8)).astype(np.float32)
    (found,) = graph.plan()({"q": x}).values()
    np.testing.assert_allclose(found, dnn.attention(x, x, x, softcap=2.0, causal=True), atol=1e-6)


def test_what_does_not_depend_on_scores_stays_in_the_graph():
    """A table that is computed once, and read by the function; its gradient is that of differences."""
    g = Graph("table", io_data_type="float32")
    table = g.tensor((1, 4, 1, 7), name="table")

    def function(graph: Graph, s: Tensor) -> Tensor:
        total = graph.reduction(table, "ADD").set_dim((1, 4, 1, 1))
        return graph.add(graph.mul(s, graph.exp(table, name="grown")), total)

    o = g.sdpa(*heads(g, "q", "k", "v"), score_mod=function, name="attention")[0].set_output(True)
    assert [node.op for node in g.nodes] == ["reduction", "pointwise", "sdpa"]
    graph, arrays = filled(g, np.random.default_rng(53))
    q, k, v = (memory(arrays[graph.find(name).uid]) for name in "qkv")
    of_table = wide(arrays[table.uid])
    x = scores(q, k, 1.0) * np.exp(of_table) + of_table.sum(-1, keepdims=True)
    plan = graph.plan()
    np.testing.assert_allclose(memory(plan(arrays)[o]), softmax(x) @ np.repeat(v, 2, axis=1), atol=2e-5)
    found = jax.grad(lambda t: (plan({**arrays, table.uid: t})[o] ** 2).sum())(jnp.asarray(arrays[table.uid]))
    described = in_float64(graph.describe())
    for at in ((0, 0, 0, 0), (0, 3, 0, 6), (0, 2, 0, 3)):
        ends = []
        for sign in (1, -1):
            moved = of_table.copy()
            moved[at] += sign * 1e-4
            ends.append((definition.hold(described, {**arrays, table.uid: moved})[o.uid] ** 2).sum())
        assert abs((ends[0] - ends[1]) / 2e-4 - float(found[at])) <= 1e-3 * (1 + abs(float(found[at])))


def other_sizes(g: Graph, s: Tensor) -> Tensor:
    return g.add(s, g.tensor((2, 4, 5, 6)))


def two_axes(g: Graph, s: Tensor) -> Tensor:
    return g.add(s, g.tensor((5, 7)))


def summed(g: Graph, s: Tensor) -> Tensor:
    return g.sub(s, g.reduction(s, "MAX", name="most").set_dim((2, 4, 5, 1)))


def written(g: Graph, s: Tensor) -> Tensor:
    return g.exp(s).set_output(True)


def no_node(g: Graph, s: Tensor) -> Tensor:
    return g.tensor((2, 4, 5, 7))


def wrong_axis(g: Graph, s: Tensor) -> Tensor:
    return g.add(s, g.gen_index(s, 4))


def wrong_parameter(g: Graph, s: Tensor) -> Tensor:
    return g.relu(s, "a")  # pyright: ignore[reportArgumentType]


BAD: dict[Any, tuple[str, str]] = {
    "softcap": ("sdpa_0", "score_mod"),
    3: ("sdpa_0", "score_mod"),
    (lambda g, s: None): ("sdpa_0", "score_mod"),
    (lambda g, s: 1.0): ("sdpa_0", "score_mod"),
    (lambda g, s: Graph("other").tensor((2, 4, 5, 7))): ("sdpa_0", "score_mod"),
    no_node: ("sdpa_0", "score_mod"),
    summed: ("node 'most' (reduction)", "score_mod"),
    written: ("exp_", "is_virtual"),
    other_sizes: ("add_", "IN_1"),
    two_axes: ("add_", "IN_1"),
    wrong_axis: ("gen_index_", "axis"),
    wrong_parameter: ("relu_fwd_", "negative_slope"),
}


@pytest.mark.parametrize("function", BAD)
def test_functions_that_do_not_fit_are_refused(function: Any):
    def build() -> Any:
        g = Graph("bad", io_data_type="float32")
        g.sdpa(*heads(g, "q", "k", "v"), score_mod=function)[0].set_output(True)
        return g.validate()

    refused(build, *BAD[function])


def test_scores_are_read_by_their_function_alone():
    g = Graph("bad", io_data_type="float32")
    kept: list[Tensor] = []
    g.sdpa(*heads(g, "q", "k", "v"), score_mod=lambda g, s: kept.append(s) or g.exp(s))
    refused(lambda: g.exp(kept[0]), "exp_1", "IN_0")


def test_descriptions_of_functions_that_read_their_own_results_are_refused():
    """So are uids that are no integers."""
    described = json.loads(graph_of(before_the_diagonal)[0].to_json())
    inner = described["nodes"][0]["score_mod"]
    made = inner["nodes"][0]["outputs"]["OUT_0"]
    inner["nodes"][0]["inputs"]["IN_0"] = made
    refused(lambda: Graph.from_description(described), "gen_index_0", "inputs")
    inner["nodes"][0]["inputs"]["IN_0"] = made + 0.5
    refused(lambda: Graph.from_description(described), "graph", "description")


# ---- floats of 8 bits ------------------------------------------------------------------------------------------------


def test_fp8_attention_beside_a_formula():
    graph, arrays = EXAMPLES["sdpa_fp8_causal"](np.random.default_rng(54))
    given = {t.name: wide(arrays[t.uid]) for t in graph.inputs()}
    q, k, v = (given[name].swapaxes(1, 2) for name in "qkv")
    x = np.where(ROW >= COLUMN, scores(q, k, given["dq"].item() * given["dk"].item()), -np.inf)
    p = softmax(x)
    o = given["dv"].item() * given["ds"].item() * given["ss"].item() * (p @ np.repeat(v, 2, axis=1))
    plan = graph.plan()
    y, stats, most, largest = plan(arrays).values()
    np.testing.assert_allclose(memory(y), given["so"].item() * o, atol=2e-3 * np.abs(o).max())
    np.testing.assert_allclose(wide(stats)[..., 0], np.log(np.exp(x).sum(-1)), atol=3e-6)
    np.testing.assert_allclose([most.item(), largest.item()], [p.max(), np.abs(o).max()], rtol=3e-6)
    assert "weights are not rounded to 8 bits" in str(plan.explain())


@pytest.mark.parametrize(("name", "scored"), [("sdpa_fp8_plain", False), ("sdpa_fp8_causal", True)])
def test_factors_of_scores_that_are_known_are_part_of_the_scale(name: str, scored: bool):
    """So that a kernel may serve; others are a function of the scores."""
    graph, arrays = EXAMPLES[name](np.random.default_rng(55))
    (call,) = traced_calls(lambda v: tuple(graph.plan()(v).values()), arrays, platform="cpu")
    assert [a.dtype.name for a in call.avals[:3]] == ["bfloat16"] * 3
    assert (call.spec.score is not None) == scored


def test_fp8_attention_with_a_function_of_its_scores():
    """Which sees scores that are descaled; rows that see nothing are 0 and have no part in the largest weight."""
    g = Graph("fp8", io_data_type="float8_e4m3fn")
    q, k, v = heads(g, "q", "k", "v")
    lengths = {n: g.tensor((2, 1, 1, 1), data_type="int32", name=n) for n in ("seq_len_q", "seq_len_kv")}
    one = g.tensor((1, 1, 1, 1), data_type="float32", name="one")
    how = {"use_padding_mask": True, **lengths, "score_mod": soft_cap}
    made = g.sdpa_fp8(q, k, v, one, 0.5, 1.0, 1.0, 1.0, 1.0, is_inference=True, **how)
    assert made[1] is None
    for tensor in made:
        _ = tensor and tensor.set_output(True).set_data_type("float32")
    zeros = np.zeros((2, 1, 1, 1), np.int32)
    few = np.array([5, 2], np.int32).reshape(2, 1, 1, 1)
    given = {"one": np.full((1, 1, 1, 1), 0.25, np.float32)}
    graph, arrays = filled(g, np.random.default_rng(56), **given, seq_len_q=few, seq_len_kv=few)
    plan = graph.plan()
    assert any("descale_q and descale_k are multiplied before" in note for note in plan.parts[-1].notes)
    assert worst(graph, arrays, plan(arrays)) <= 1
    described = plan({**{t.name: arrays[t.uid] for t in graph.inputs()}, "seq_len_q": zeros, "seq_len_kv": zeros})
    assert [float(np.abs(v).max()) for v in described.values()] == [0, 0, 0]


def test_planted_faults_in_functions_of_scores_are_found():
    for name, wrong in (("sdpa_score_mod", "table"), ("sdpa_backward_score_mod", "table"), ("sdpa_fp8_causal", "dq")):
        graph, arrays = EXAMPLES[name](np.random.default_rng(57))
        uid = graph.find(wrong).uid
        assert worst(graph, arrays, graph.plan()({**arrays, uid: np.float32(1.01) * arrays[uid]})) > 1


# ---- the bound of what tensor cores compute --------------------------------------------------------------------------


def of_rows(seed: int, dtype: str, queries: int, keys: int, **options: Any) -> tuple[Graph, dict[int, np.ndarray]]:
    """A causal `sdpa` of heads of 16 features."""
    g = Graph("rows", io_data_type=dtype, intermediate_data_type="float32", compute_data_type="float32")
    shapes = {"q": (1, 2, queries, 16), "k": (1, 2, keys, 16), "v": (1, 2, keys, 16)}
    q, k, v = (g.tensor(shape, name=name) for name, shape in shapes.items())
    bias: dict[str, Any] = {"bias": g.tensor((1, 2, queries, keys), name="bias")} if options.get("bias") else {}
    g.sdpa(q=q, k=k, v=v, attn_scale=0.25, use_causal_mask=True, is_inference=True, **bias)[0].set_output(True)
    rng = np.random.default_rng(seed)
    return g, {t.uid: (2 * rng.normal(size=t.get_shape())).astype(t.get_data_type()) for t in g.inputs()}


def rounded_weights(q: Any, k: Any, v: Any, bias: Any, dtype: Any) -> np.ndarray:
    """Causal attention in float64, but for exponentials that are rounded to a dtype before they meet the values."""
    q, k, v, bias = (x.astype(np.float64) for x in (q, k, v, bias))
    scores = np.where(np.tri(q.shape[2], k.shape[2], dtype=bool), 0.25 * q @ k.swapaxes(2, 3) + bias, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p.astype(np.float32).astype(dtype).astype(np.float64) @ v / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bound_on_tensor_cores_holds_for_the_bits_of_the_kernel(dtype: str):
    """The schedule's definition rounds weights as the kernel does, which no bound for weights of 32 bits allows."""
    graph, arrays = of_rows(3, dtype, 70, 70)
    by_name = {graph.tensors[uid].name: v for uid, v in arrays.items()}
    q, k, v = (by_name[n] for n in "qkv")
    y = attention_scheduled(q, k, v, np.tri(70, dtype=bool), scale=0.25, tile=64)
    found = {graph.outputs()[0].uid: y}
    assert 0.05 < worst(graph, arrays, found, "tensor_core") <= 1
    assert worst(graph, arrays, found, "float32") > 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bound_on_tensor_cores_is_of_the_weights_type(dtype: str):
    """With a bias: weights may be rounded to the values' type, and to no type with fewer bits."""
    graph, arrays = of_rows(4, dtype, 50, 60, bias=True)
    by_name = {graph.tensors[uid].name: v for uid, v in arrays.items()}
    q, k, v, bias = (by_name[n] for n in ("q", "k", "v", "bias"))
    of = lambda kind: rounded_weights(q, k, v, bias, kind).astype(dtype)
    ratio = lambda kind, how: worst(graph, arrays, {graph.outputs()[0].uid: of(kind)}, how)
    assert ratio(np.dtype(dtype), "tensor_core") <= 1 < ratio(np.dtype(dtype), "float32")
    assert ratio(ml_dtypes.float8_e4m3fn, "tensor_core") > 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bound_of_gradients_on_tensor_cores_is_of_the_weights_type(dtype: str):
    """P and dS may be rounded to the operands' type before they are multiplied, and to no type with fewer bits."""
    g = Graph("gradients", io_data_type=dtype, intermediate_data_type="float32", compute_data_type="float32")
    names, shape, rng = ("q", "k", "v", "o", "dO"), (1, 2, 40, 16), np.random.default_rng(5)
    x: dict[str, Any] = {name: (2 * rng.normal(size=shape)).astype(dtype) for name in names}
    q, k, v, _, do = (x[name].astype(np.float64) for name in names)
    scores = np.where(np.tri(40, dtype=bool), 0.25 * q @ k.swapaxes(2, 3), -np.inf)
    x["stats"] = np.log(np.exp(scores).sum(-1, keepdims=True)).astype(np.float32)
    p = np.exp(scores - x["stats"].astype(np.float64))
    x["o"] = (p @ v).astype(dtype)
    ds = p * (do @ v.swapaxes(2, 3) - (do * x["o"].astype(np.float64)).sum(-1, keepdims=True))
    given = [g.tensor(shape, name=name) for name in names] + [g.tensor((1, 2, 40, 1), None, "float32", name="stats")]
    made = g.sdpa_backward(*given, attn_scale=0.25, use_causal_mask=True)[:3]
    arrays = {t.uid: x[t.name] for t in given}

    def ratio(kind: Any, how: str) -> float:
        of_p, of_ds = (a.astype(np.float32).astype(kind).astype(np.float64) for a in (p, ds))
        results = (0.25 * of_ds @ k, 0.25 * of_ds.swapaxes(2, 3) @ q, of_p.swapaxes(2, 3) @ do)
        found = {t.set_output(True).uid: y.astype(dtype) for t, y in zip(made, results, strict=True)}
        return worst(g, arrays, found, how)

    assert 0.02 < ratio(np.dtype(dtype), "tensor_core") <= 1 < ratio(np.dtype(dtype), "float32")
    assert ratio(ml_dtypes.float8_e5m2, "tensor_core") > 1
