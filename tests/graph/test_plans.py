"""Plans: what is fused and what is not, what `explain` says, filters, JSON, strides, and transformations."""

import concurrent.futures
import json
import pickle
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn.graph import Graph, GraphError, NotOffered, Plan
from jaxdnn_reference import graph as definition
from tests.graph.examples import EXAMPLES, filled, last
from tests.graph.test_nodes import worst

COMPILATION = "/jax/core/compile/backend_compile_duration"
_compilations: list[float] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: _compilations.append(duration_secs) if event == COMPILATION else None
)

X, W, Y = (2, 6, 9, 7), (4, 6, 3, 3), (2, 4, 9, 7)


def conv_block(io: str = "float32", **how: Any) -> tuple[Graph, dict[str, Any]]:
    """relu(0.5 conv + bias + residual), channels last."""
    g = Graph("block", io_data_type=io, **how)
    x, w = g.tensor(X, last(X), name="x"), g.tensor(W, last(W), name="w")
    b, r = g.tensor((1, 4, 1, 1), name="b"), g.tensor(Y, last(Y), name="r")
    made = {"conv": g.conv_fprop(x, w, padding=[1, 1], name="conv")}
    made["scaled"] = g.scale(made["conv"], 0.5, name="scaled")
    made["biased"] = g.bias(made["scaled"], b, name="biased")
    made["added"] = g.add(r, made["biased"], name="added")
    made["y"] = g.relu(made["added"], name="y").set_output(True)
    return g, made


# Seed 003's questions, each answered by a call.


def test_bias_is_fused_with_the_convolution_or_it_is_said_why_not():
    """Will the bias always be fused if asked to? One call here; where it cannot be, `not_fused` says why."""
    g, made = conv_block()
    account = g.plan().explain()
    assert account.fused == (("conv", "scaled", "biased", "added", "y"),)
    assert account.not_fused == ()
    made["conv"].set_output(True)
    account = g.plan().explain()
    assert account.fused == ()
    assert "'conv::Y' is an output, so it is written before it is read" in str(account)


def test_a_plan_says_what_it_fused_and_who_computes_it():
    """Is it possible to check what operations have been fused in a selected engine?"""
    g, _ = conv_block("bfloat16")
    fused, single = g.plans()
    (part,) = fused.explain().parts
    assert (part.calls, part.engine, part.rule) == (("conv",), ("xla",), "conv_epilogue")
    assert [len(p.nodes) for p in single.explain().parts] == [1] * 5
    assert [p.calls for p in single.explain().parts] == [("conv",), (), (), (), ("activation",)]
    assert "hopper declined conv" in str(fused.explain())
    size = lambda dim: int(np.prod(dim))
    assert part.bytes_moved == 2 * (size(X) + size(W) + 4 + 2 * size(Y))


def test_plans_can_be_compared_with_ones_own_kernels():
    """How to decide whether to use the library's fusion? Bytes moved of each plan, or its measured time."""
    g, _ = conv_block()
    fused, single = g.plans()
    assert (fused.engine, single.engine) == ("fused", "single")
    assert fused.bytes_moved < single.bytes_moved


def test_uids_are_integers_of_64_bits_and_local_to_a_graph():
    g, h = Graph("g", io_data_type="float32"), Graph("h", io_data_type="float32")
    for graph, factor in ((g, 2.0), (h, 3.0)):
        x = graph.tensor((2,), uid=2**62, name="x")
        graph.scale(x, factor).set_output(True).set_uid(-(2**63))
    x = jnp.ones(2)
    assert g.plan()({2**62: x})[-(2**63)].tolist() == [2, 2]
    assert h.plan()({2**62: x})[-(2**63)].tolist() == [3, 3]


def test_groups_and_spatial_dimensions_are_told():
    """How to set the number of groups? By the channels; the graph says what it inferred."""
    g = Graph(io_data_type="float32")
    g.conv_fprop(g.tensor((1, 6, 5, 5)), g.tensor((4, 3, 3, 3))).set_output(True)
    derived = g.describe()["nodes"][0]["derived"]
    assert (derived["groups"], derived["spatial_dims"]) == (2, 2)


def test_what_is_wrong_is_named_when_the_graph_is_finalised():
    g = Graph(io_data_type="float32")
    g.conv_fprop(g.tensor((1, 6, 5, 5)), g.tensor((4, 4, 3, 3)), name="first").set_output(True)
    said = r"node 'first' \(conv_fprop\): `weight.dim` must be C channels of which image's 6 are a multiple, got "
    with pytest.raises(GraphError, match=said):
        g.validate()


# Values and fusion


@pytest.mark.parametrize("io", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("virtual", ["float32", "bfloat16"])
def test_fused_and_single_are_within_the_bound(io: str, virtual: str):
    g, _ = conv_block(io, intermediate_data_type=virtual)
    graph, arrays = filled(g, np.random.default_rng(2))
    for plan in graph.plans():
        found = plan(arrays)
        assert found["y::OUT_0"].dtype == io
        assert worst(graph, arrays, found) <= 1


def norm_block(op: str) -> Graph:
    g = Graph("norm", io_data_type="float32")
    x, r = g.tensor(X, last(X), name="x"), g.tensor(X, last(X), name="r")
    scale, bias = (g.tensor((1, 6, 1, 1), name=name) for name in ("scale", "bias"))
    if op == "batchnorm":
        y, mean, *_ = g.batchnorm(x, scale, bias, epsilon=1e-3, name="norm")
        y = g.add(y, r, name="added")
    else:
        y, mean, _ = g.instancenorm("TRAINING", x, scale, bias, epsilon=1e-3, name="norm")
    mean.set_output(True)
    g.swish(y, name="y").set_output(True)
    return g


@pytest.mark.parametrize("op", ["batchnorm", "instancenorm"])
def test_norms_take_up_residual_and_activation(op: str):
    graph, arrays = filled(norm_block(op), np.random.default_rng(3))
    fused, single = graph.plans()
    (part,) = fused.parts
    assert part.nodes == (("norm", "added", "y") if op == "batchnorm" else ("norm", "y"))
    for plan in (fused, single):
        assert worst(graph, arrays, plan(arrays)) <= 1


REASONS = {
    "two readers": "'conv::Y' has 2 readers",
    "an output": "'conv::Y' is an output, so it is written before it is read",
    "int8": "'conv::Y' is of int8, to which it is converted before it is read",
    "a scale for each column": "'conv' has no factor of sizes (1, 1, 1, 7)",
    "a row": "'conv' has no summand of sizes (1, 1, 1, 7)",
    "a maximum": "'conv' has no mode MAX",
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_is_not_fused_has_a_reason(kind: str):
    g, made = conv_block()
    behind = {
        "a scale for each column": lambda: g.mul(made["conv"], g.tensor((1, 1, 1, 7))),
        "a row": lambda: g.add(made["conv"], g.tensor((1, 1, 1, 7))),
        "a maximum": lambda: g.max(made["conv"], 0.5),
    }
    if kind in behind:
        y = behind[kind]()
        g.nodes[:] = [g.nodes[0], g.nodes[-1]]
        g.tensors = {t.uid: t for node in g.nodes for t in (*node.inputs.values(), *node.outputs.values())}
        y.set_output(True)
    elif kind == "two readers":
        g.exp(made["conv"]).set_output(True)
    elif kind == "an output":
        made["conv"].set_output(True)
    else:
        made["conv"].set_data_type("int8")
    graph, arrays = filled(g, np.random.default_rng(4))
    plan = graph.plan()
    assert plan.engine == "single"
    assert any("no rule applies" in line for line in plan.declined)
    assert [d.reason for d in plan.explain().not_fused] == [REASONS[kind]]
    assert worst(graph, arrays, plan(arrays)) <= 1


def test_what_follows_an_activation_or_a_sum_has_a_reason():
    g, made = conv_block()
    made["y"].set_output(False)
    g.scale(made["y"], 2.0).set_output(True)
    assert [d.reason for d in g.plan().not_fused] == ["'conv' ends with its activation"]
    g = Graph(io_data_type="float32")
    y = g.conv_fprop(g.tensor(X), g.tensor(W), name="conv")
    g.scale(g.bias(y, g.tensor((1, 4, 1, 1))), 2.0).set_output(True)
    assert [d.reason for d in g.plan().not_fused] == ["'conv' has no alpha behind a sum"]


@pytest.mark.parametrize("op", ["genstats", "instancenorm", "resample"])
def test_a_virtual_tensor_holds_floats_of_8_bits_in_its_own_dtype(op: str):
    """A conversion to a virtual float32, and an op that does not take 8 bits."""
    g = Graph(io_data_type="float8_e4m3fn")
    x = g.identity(g.tensor(X, name="x"))
    made: Any = {
        "genstats": lambda: g.genstats(x)[0],
        "instancenorm": lambda: g.instancenorm("INFERENCE", x, g.tensor((1, 6, 1, 1)), g.tensor((1, 6, 1, 1)), 0.5)[0],
        "resample": lambda: g.resample(x, "MAXPOOL", [2, 2]),
    }[op]()
    made.set_output(True).set_data_type("float32")
    for tensor in g.inputs()[1:]:
        tensor.set_data_type("float32")
    graph, arrays = filled(g, np.random.default_rng(25))
    assert worst(graph, arrays, graph.plan()(arrays)) <= 1


def test_a_residual_that_is_computed_from_the_same_result_is_not_taken_up():
    g = Graph("loop", io_data_type="float32")
    x, w = g.tensor((1, 4, 5, 5), name="x"), g.tensor((4, 4, 1, 1), name="w")
    g.nodes.clear()
    y = g.conv_fprop(x, w, name="conv")
    g.add(y, y, name="twice").set_output(True)
    graph, arrays = filled(g, np.random.default_rng(5))
    plan = graph.plan()
    assert plan.engine == "single"
    assert worst(graph, arrays, plan(arrays)) <= 1


def test_two_convolutions_that_are_added_are_one_epilogue_and_one_call():
    """The sum belongs to one of them; the other is its residual."""
    g = Graph("two", io_data_type="float32")
    x = g.tensor((1, 4, 5, 5), name="x")
    a, b = (g.conv_fprop(x, g.tensor((4, 4, 1, 1), name=f"w{i}"), name=f"conv{i}") for i in range(2))
    g.relu(g.add(a, b, name="sum"), name="y").set_output(True)
    graph, arrays = filled(g, np.random.default_rng(6))
    plan = graph.plan()
    assert [len(step.nodes) for step in plan.steps] == [1, 3]
    assert worst(graph, arrays, plan(arrays)) <= 1


def test_what_is_fused_does_not_wait_for_itself():
    """Each norm's residual is computed from the other's mean: one of them takes its residual up, not both."""
    g = Graph("crossed", io_data_type="float32")
    x, one, none = g.tensor(X, last(X), name="x"), g.tensor((1, 6, 1, 1), name="s"), g.tensor((1, 6, 1, 1), name="b")
    (y, mean, *_), (z, other, *_) = (g.batchnorm(x, one, none, epsilon=0.5, name=f"norm{i}") for i in range(2))
    g.add(y, g.mul(x, other, name="r1"), name="sum1").set_output(True)
    g.add(z, g.mul(x, mean, name="r2"), name="sum2").set_output(True)
    graph, arrays = filled(g, np.random.default_rng(15))
    plan = graph.plan()
    assert sorted(len(step.nodes) for step in plan.steps) == [1, 1, 1, 1, 2]
    assert any(d.reason.endswith("is computed from the same result") for d in plan.not_fused)
    assert worst(graph, arrays, plan(arrays)) <= 1


def test_long_graphs():
    """Deeper than Python's stack."""
    g = Graph(io_data_type="float32")
    x = y = g.tensor((2, 3), name="x")
    for _ in range(3000):
        y = g.neg(y)
    y.set_output(True)
    g.nodes.reverse()
    assert [len(found) for found in (g.ordered(), g.describe()["nodes"])] == [3000, 3000]
    assert y.get_dim() == x.get_dim()


# Execution


def test_the_modules_example_runs():
    lines = [line[4:] for line in (dnn.graph.__doc__ or "").splitlines() if line.startswith("    ")]
    names: dict[str, Any] = {"x_array": jnp.ones((8, 56, 56, 64), jnp.bfloat16)}
    names |= {"w_array": jnp.ones((64, 3, 3, 64), jnp.bfloat16), "b_array": jnp.ones(64, jnp.bfloat16)}
    exec("\n".join(lines[:-1]), names)
    assert names["result"].shape == (8, 56, 56, 64)
    assert str(names["plan"].explain()).startswith("plan 'fused'")


def test_variant_packs_go_by_uid_name_or_tensor():
    g, made = conv_block()
    graph, arrays = filled(g, np.random.default_rng(7))
    plan = graph.plan()
    by_uid = plan(arrays)
    by_name = plan({graph.tensors[uid].name: v for uid, v in arrays.items()})
    by_tensor = plan({graph.tensors[uid]: v for uid, v in arrays.items()})
    y = made["y"]
    for found in (by_uid, by_name, by_tensor):
        np.testing.assert_array_equal(found[y], by_uid[y.uid])
        np.testing.assert_array_equal(found["y::OUT_0"], by_uid[y.uid])
        assert [key in found for key in (y, y.uid, "y::OUT_0", "y", 2**40)] == [True, True, True, False, False]
        assert found.get(2**40) is None
        assert found.get(y) is found["y::OUT_0"]
    # A plan is of the graph as it was.
    y.set_data_type("bfloat16")
    assert plan(arrays)[y].dtype == "float32"
    assert graph.plan()(arrays)[y].dtype == "bfloat16"


@pytest.mark.parametrize("stride", [(60, 20, 5, 1), (60, 1, 15, 3), (1, 2, 6, 24), (200, 1, 40, 7), (90, 30, 6, 1)])
@pytest.mark.parametrize("out", [None, (120, 2, 30, 6), (60, 1, 15, 3)])
def test_strides_say_where_elements_lie(stride: tuple[int, ...], out: tuple[int, ...] | None):
    """Packed in any order of axes, or with gaps, which are 0 in what is returned."""
    g = Graph(io_data_type="float32")
    dim = (2, 3, 4, 5)
    y = g.neg(g.tensor(dim, stride, name="x")).set_output(True)
    y = y if out is None else y.set_stride(out)
    graph, arrays = filled(g, np.random.default_rng(8))
    (wanted,) = definition.evaluate(graph.describe(), arrays).values()
    np.testing.assert_array_equal(graph.plan()(arrays)[y], wanted)


def test_numbers_are_passed_by_value():
    g = Graph(io_data_type="float32")
    x, s = g.tensor((2, 3), name="x"), g.tensor((1, 1), is_pass_by_value=True, name="s")
    eps = g.tensor((1,), is_pass_by_value=True, name="eps")
    scale, bias = g.tensor((1, 3), name="scale"), g.tensor((1, 3), name="bias")
    g.layernorm("INFERENCE", g.mul(x, s), scale, bias, eps, name="y")[0].set_output(True)
    plan = g.plan()
    x = jnp.array([[1.0, 2.0, 4.0], [0.0, 1.0, 0.0]])
    found = lambda s, e: plan({"x": x, "s": s, "eps": e, "scale": jnp.ones(3), "bias": jnp.zeros(3)})["y::Y"]
    for s, e in ((2.0, 0.5), (np.float32(3), 1e-3), (jnp.float32(3), np.float64(1e-3))):
        wanted = dnn.layer_norm(x * np.float32(s), eps=float(e))
        np.testing.assert_allclose(found(s, e), wanted, rtol=1e-6, atol=1e-6)
    said = r"tensor 'eps' .*`variant_pack` must be a number that is known"
    with pytest.raises(GraphError, match=said):
        jax.jit(lambda e: found(2.0, e))(0.5)
    for wrong in ("1", None, True, np.ones(2)):
        with pytest.raises(GraphError, match=said):
            found(2.0, wrong)


SMOOTH = ["conv_fprop", "matmul", "layernorm", "batchnorm", "sdpa_plain", "rope", "moe_grouped_matmul_NONE"]


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_are_those_of_the_definition(name: str):
    """Along a random direction, against central differences of the definition in float64; forward and reverse."""
    graph, arrays = EXAMPLES[name](np.random.default_rng(9))
    described, plan = graph.describe(), graph.plan()
    rng = np.random.default_rng(10)
    floats = [uid for uid, v in arrays.items() if v.dtype == np.float32 and not graph.tensors[uid].is_pass_by_value]
    rest = {uid: v for uid, v in arrays.items() if uid not in floats}
    ways = {uid: rng.standard_normal(arrays[uid].shape).astype(np.float32) for uid in floats}
    weights = {t.name: rng.standard_normal(t.get_shape()).astype(np.float32) for t in graph.outputs()}

    def loss(given: dict[int, Any]) -> Any:
        found = plan({**given, **rest})
        return sum((found[name] * w).sum() for name, w in weights.items())

    given = {uid: jnp.asarray(arrays[uid]) for uid in floats}
    forward = jax.jvp(jax.jit(loss), (given,), (ways,))[1]
    back = jax.jit(jax.grad(loss))(given)
    reverse = sum((np.asarray(back[uid], np.float64) * ways[uid]).sum() for uid in floats)
    step = 1e-5

    def exact(sign: float) -> float:
        moved = {uid: arrays[uid] + sign * step * ways[uid].astype(np.float64) for uid in floats}
        held = definition.hold(in_float64(described), {**moved, **rest})
        named = {t.name: definition.to_memory(held[t.uid], _tensor(described, t.uid)) for t in graph.outputs()}
        return sum(float((named[name] * w).sum()) for name, w in weights.items())

    wanted = (exact(1) - exact(-1)) / (2 * step)
    size = sum(float(np.abs(np.asarray(back[uid]) * ways[uid]).sum()) for uid in floats)
    assert abs(float(forward) - wanted) <= 1e-5 * size
    assert abs(float(reverse) - wanted) <= 1e-5 * size


def _tensor(described: dict[str, Any], uid: int) -> dict[str, Any]:
    return next(t for t in described["tensors"] if t["uid"] == uid)


def in_float64(described: dict[str, Any]) -> dict[str, Any]:
    wide = [{**t, "data_type": "float64"} if t["data_type"] == "float32" else t for t in described["tensors"]]
    return {**described, "tensors": wide}


@pytest.mark.parametrize("name", ["conv_fprop", "matmul", "reduction_ADD", "layernorm", "sdpa_score_mod"])
def test_vmap_and_jit_and_scan(name: str):
    graph, arrays = EXAMPLES[name](np.random.default_rng(11))
    plan = graph.plan()
    first = next(iter(arrays))
    stacked = jnp.stack([jnp.asarray(arrays[first]), 2 * jnp.asarray(arrays[first])])
    call = lambda x: tuple(plan({**arrays, first: x}).values())
    single = [call(x) for x in stacked]
    mapped = jax.jit(jax.vmap(call))(stacked)
    scanned = jax.lax.scan(lambda carry, x: (carry, call(x)), 0, stacked)[1]
    for i, results in enumerate(single):
        for a, b, c in zip(results, mapped, scanned, strict=True):
            np.testing.assert_allclose(b[i], a, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(c[i], a, rtol=1e-5, atol=1e-5)


def test_the_graph_is_a_function():
    g, _ = conv_block()
    _, arrays = filled(g, np.random.default_rng(12))
    f = g.function()
    named = {g.tensors[uid].name: v for uid, v in arrays.items()}
    np.testing.assert_array_equal(f(*arrays.values()), f(**named))
    with pytest.raises(GraphError, match="`arguments`"):
        f(*arrays.values(), x=named["x"])


def test_an_output_may_take_the_memory_of_an_input():
    g = Graph(io_data_type="float32")
    x, b = g.tensor((4, 8), name="x"), g.tensor((1, 8), name="b")
    y = g.add(x, b).set_output(True)
    plan = g.plan(donate=[x])
    array, bias = jnp.ones((4, 8)), jnp.ones((1, 8))
    address = array.unsafe_buffer_pointer()
    found = plan({x: array, b: bias})[y]
    assert (array.is_deleted(), bias.is_deleted()) == (True, False)
    assert found.unsafe_buffer_pointer() == address
    assert Plan.from_json(plan.to_json()).asked.donate == (x.uid,)
    with pytest.raises(GraphError, match="`donate` must be an input of the graph that lies in memory"):
        g.plan(donate=[y])


def test_equal_graphs_are_compiled_once():
    (g, _), (h, made) = conv_block(), conv_block()
    _, arrays = filled(g, np.random.default_rng(20))
    jax.block_until_ready(tuple(g.plan()(arrays).values()))
    before = len(_compilations)
    h.plan()(arrays)
    assert len(_compilations) == before
    made["y"].set_data_type("float8_e5m2")
    h.plan()(arrays)
    assert len(_compilations) > before


def test_sixteen_threads_build_and_call():
    """Each its own graph, and all of them one plan."""
    g, _ = conv_block()
    _, arrays = filled(g, np.random.default_rng(19))
    shared = g.plan()
    wanted = np.asarray(shared(arrays)["y::OUT_0"])

    def work(number: int) -> bool:
        own, _ = conv_block()
        found = own.plan("FALLBACK")({t.uid: arrays[t.uid] for t in own.inputs()})["y::OUT_0"]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        return all(np.array_equal(shared(arrays)["y::OUT_0"], wanted) for _ in range(20))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


# Filters, levels, JSON


def test_levels_and_filters_are_met_or_the_plan_declines():
    g, _ = conv_block()
    plan = g.plan(determinism="mesh_invariant")
    assert plan.level == "mesh_invariant"
    assert "plan 'single': scaled guarantees run_to_run at most, not mesh_invariant" in plan.declined[0]
    assert plan.parts[0].engine == ("ordered",)
    assert g.plan().level == "run_to_run"
    with pytest.raises(NotOffered, match=r"plan 'fused': it is deselected\nplan 'single': .*, not mesh_invariant"):
        g.plan(determinism="mesh_invariant", deselect_engines=["fused"])
    with pytest.raises(NotOffered, match="plan 'single': it has the numeric note STRICT_NAN_PROP"):
        g.plan("FALLBACK", deselect_numeric_notes=["STRICT_NAN_PROP"])
    with pytest.raises(NotOffered, match="it does not have the numeric note TENSOR_CORE"):
        g.plan(select_numeric_notes=["TENSOR_CORE"])
    with pytest.raises(NotOffered, match="it has the behavior note RUNTIME_COMPILATION"):
        g.plan(deselect_behavior_notes=["RUNTIME_COMPILATION"])
    for name, value in {"deselect_engines": ["cudnn"], "select_numeric_notes": "FFT", "mode": "C"}.items():
        with pytest.raises(GraphError, match=f"`{name}` must be"):
            g.plans(**{name: value})
    for name, value in {"determinism": "exact", "workspace_limit": -1, "sm_count": 0}.items():
        with pytest.raises(GraphError, match=f"`{name}` must be "):
            g.plan(**{name: value})


def test_a_plan_keeps_the_level_of_the_context_that_it_was_made_in():
    g = Graph(io_data_type="float32")
    x, w = g.tensor(X, last(X), name="x"), g.tensor(W, last(W), name="w")
    y = g.conv_fprop(x, w).set_output(True)
    graph, arrays = filled(g, np.random.default_rng(26))
    with dnn.determinism("portable"), dnn.limits(workspace=1 << 20, multiprocessors=7):
        plan, read = graph.plan(), Plan.from_json(graph.plan(determinism="run_to_run").to_json())
    assert (plan.asked.determinism, plan.asked.workspace_limit, plan.asked.sm_count) == ("portable", 1 << 20, 7)
    assert (plan.level, read.level) == ("portable", "portable")
    wanted = graph.plan(determinism="portable")(arrays)[y]
    np.testing.assert_array_equal(plan(arrays)[y], wanted)
    own = graph.plan(determinism="run_to_run")
    assert own.level == "run_to_run"
    with dnn.determinism("run_to_run"):
        own(arrays)
    with (
        dnn.determinism("portable"),
        pytest.raises(NotOffered, match="guarantees 'run_to_run', and the context requir"),
    ):
        own(arrays)
    g.exp(x).set_output(True)
    with dnn.determinism("portable"), pytest.raises(NotOffered, match="exp_1 guarantees run_to_run at most"):
        g.plan()


def test_a_portable_plan_has_the_bits_of_the_definition():
    """The convolution with its epilogue, in the stated order of additions."""
    g = Graph(io_data_type="float32")
    x, w, b = g.tensor(X, last(X), name="x"), g.tensor(W, last(W), name="w"), g.tensor((1, 4, 1, 1), name="b")
    y = g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b)).set_output(True)
    _, arrays = filled(g, np.random.default_rng(13))
    found = g.plan(determinism="portable")(arrays)[y]
    image, weight, bias = arrays.values()
    how = {"padding": 1, "activation": "relu", "filter_layout": "KRSC", "bias": bias.ravel()}
    from jaxdnn_reference import conv

    np.testing.assert_array_equal(found, conv(image, weight, arithmetic="ordered", **how))


def test_a_plan_is_read_back_where_it_was_made():
    g, _ = conv_block()
    _, arrays = filled(g, np.random.default_rng(14))
    plan = g.plan(determinism="run_to_run", workspace_limit=1 << 20, sm_count=66)
    text = plan.to_json()
    read = Plan.from_json(text)
    assert (read.engine, read.asked, read.level) == (plan.engine, plan.asked, plan.level)
    np.testing.assert_array_equal(read(arrays)["y::OUT_0"], plan(arrays)["y::OUT_0"])
    for key in ("jaxdnn", "jax", "platform", "device_kind"):
        other = json.dumps({**json.loads(text), key: "another"})
        with pytest.raises(
            GraphError, match=f"plan: `{key}` must be .* for a plan is good where it was made, got 'another'"
        ):
            Plan.from_json(other)


def test_plans_are_pickled_as_their_json():
    g, _ = conv_block()
    _, arrays = filled(g, np.random.default_rng(27))
    plan = g.plan("FALLBACK", determinism="run_to_run")
    read = pickle.loads(pickle.dumps(plan))
    assert (read.engine, read.asked) == (plan.engine, plan.asked)
    assert read._program is plan._program
    np.testing.assert_array_equal(read(arrays)["y::OUT_0"], plan(arrays)["y::OUT_0"])


@pytest.mark.parametrize("key", ["engine", "determinism", "workspace_limit", "sm_count", "donate", "engines", "graph"])
@pytest.mark.parametrize("junk", ["absent", "cuda", -3, [], {}, [99]])
def test_spoilt_plans_are_refused(key: str, junk: Any):
    g = Graph(io_data_type="float32")
    g.exp(g.tensor((2,))).set_output(True)
    found = json.loads(g.plan().to_json())
    found.pop(key) if junk == "absent" else found.update({key: junk})
    if (key, junk) in (("donate", []), ("engines", [])):
        assert getattr(Plan.from_json(json.dumps(found)).asked, key) == ()
    else:
        with pytest.raises(GraphError):
            Plan.from_json(json.dumps(found))


def test_64_bits_are_refused_without_jaxs_mode():
    g = Graph(io_data_type="float64", compute_data_type="float64")
    g.exp(g.tensor((2,), name="x")).set_output(True)
    with pytest.raises(GraphError, match=r"tensor 'x' .*`data_type` must be of at most 32 bits unless jax_enable_x64"):
        g.plan()
    with jax.enable_x64(True):
        x = np.array([0.5, -1.0])
        (found,) = g.plan()({"x": x}).values()
        np.testing.assert_allclose(found, np.exp(x), rtol=1e-14)
