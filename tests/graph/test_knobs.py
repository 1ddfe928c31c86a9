"""Engines by number, knobs with their choices, and what heuristic B measured and keeps."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.core import engines, tuned
from jaxdnn._src.graph import heuristics
from jaxdnn.graph import Graph, GraphError, NotOffered, Plan
from tests.graph.examples import filled
from tests.graph.test_nodes import worst
from tests.graph.test_plans import conv_block


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of measurements of its own."""
    path = tmp_path / "tuned.json"
    path.write_text("{}")
    monkeypatch.setenv("JAXDNN_TUNED", str(path))
    return path


def named(plan: Plan) -> dict[str, Any]:
    return {knob.name: knob for knob in plan.knobs}


def test_engines_have_numbers_and_knobs_with_choices():
    g, _ = conv_block()
    assert g.get_engine_count() == 2
    fused, single = (g.create_execution_plan(number) for number in range(2))
    assert [(plan.engine, plan.engine_id) for plan in (fused, single)] == [("fused", 0), ("single", 1)]
    assert [knob.name for knob in g.get_knobs_for_engine(0)] == ["engine:conv", "determinism"]
    assert [knob.name for knob in g.get_knobs_for_engine(1)] == ["engine:conv", "engine:y", "determinism"]
    knob = named(fused)["engine:conv"]
    assert (knob.choices, knob.value) == (("xla", "ordered"), "xla")
    assert "guarantees mesh_invariant" in knob.notes["ordered"]
    assert "guarantees run_to_run" in knob.notes["xla"]
    assert str(knob) == "engine:conv = xla, of xla, ordered"
    level = named(fused)["determinism"]
    assert (level.choices, level.value) == (("fast", "run_to_run", "batch_invariant", "mesh_invariant"), "fast")
    assert named(single)["determinism"].choices == ("fast", "run_to_run")


def test_every_choice_of_a_knob_is_a_plan_that_computes_the_graph():
    g, _ = conv_block()
    graph, arrays = filled(g, np.random.default_rng(30))
    for number in range(g.get_engine_count()):
        for knob in g.get_knobs_for_engine(number):
            for choice in knob.choices:
                plan = g.create_execution_plan(number, {knob.name: choice})
                assert named(plan)[knob.name].value == choice
                assert worst(graph, arrays, plan(arrays)) <= 1
                if knob.name == "engine:conv":
                    assert plan.parts[0].engine == (choice,)


def test_a_plan_is_made_again_of_its_engine_and_knobs():
    g, _ = conv_block()
    graph, arrays = filled(g, np.random.default_rng(31))
    plan = g.create_execution_plan(
        0, {"engine:conv": "ordered", "determinism": "run_to_run", "workspace_limit": 1 << 20}
    )
    number, knobs = plan.get_engine_and_knobs()
    assert (number, knobs["engine:conv"], knobs["determinism"]) == (0, "ordered", "run_to_run")
    again = g.create_execution_plan(number, knobs)
    read = Plan.from_json(plan.to_json())
    assert again.asked.engines == read.asked.engines == (("conv", "ordered"),)
    for one in (again, read):
        assert one.parts[0].engine == ("ordered",)
        np.testing.assert_array_equal(one(arrays)["y::OUT_0"], plan(arrays)["y::OUT_0"])
    assert worst(graph, arrays, plan(arrays)) <= 1


def test_plans_are_asked_for_by_knobs_and_without_engines_of_ops():
    g, _ = conv_block()
    fused, single = g.plans(knobs={"engine:conv": "ordered"})
    assert [plan.parts[0].engine for plan in (fused, single)] == [("ordered",)] * 2
    assert g.plan(knobs={"determinism": "mesh_invariant"}).level == "mesh_invariant"
    assert g.plans(knobs={"engine:y": "xla"})[0].engine == "single"
    with pytest.raises(NotOffered) as error:
        g.plan(deselect_engines=["xla"])
    assert "plan 'fused': conv + scaled + biased + added + y is served by engine 'xla', which is deselected" in str(
        error.value
    )
    assert g.plan(deselect_engines=["xla"], knobs={"engine:conv": "ordered"}).engine == "fused"


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (2, {}, GraphError, r"`engine_id` must be one of 0 \(fused\), 1 \(single\), got 2"),
    (True, {}, GraphError, "`engine_id` must be one of"),
    ("fused", {}, GraphError, "`engine_id` must be one of"),
    (
        0,
        {"tile": 3},
        GraphError,
        "`knobs` must be of determinism, sm_count, workspace_limit and 'engine:' with a node, got 'tile'",
    ),
    (0, {"engine:none": "xla"}, GraphError, "`knobs` must be of"),
    (0, {3: "xla"}, GraphError, "`knobs` must be of"),
    (0, {"engine:conv": "cudnn"}, GraphError, r"`knobs\['engine:conv'\]` must be one of .*, got 'cudnn'"),
    (0, {"engine:conv": 1}, GraphError, r"`knobs\['engine:conv'\]` must be one of"),
    (0, {"engine:y": "xla"}, NotOffered, "plan 'fused': it has no knob 'engine:y'"),
    (1, {"engine:biased": "xla"}, NotOffered, "plan 'single': it has no knob 'engine:biased'"),
    (
        0,
        {"engine:conv": "hopper"},
        NotOffered,
        "`conv` on cpu cannot be served by engine 'hopper' .*it runs on NVIDIA GPUs",
    ),
    (1, {"determinism": "portable"}, NotOffered, "plan 'single': scaled guarantees run_to_run at most, not portable"),
    (0, {"determinism": "exact"}, GraphError, "`determinism` must be"),
    (0, {"sm_count": 0}, GraphError, "`sm_count` must be"),
    (0, {"workspace_limit": -1}, GraphError, "`workspace_limit` must be"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_a_plan_cannot_be_is_refused_with_the_reason(number: int):
    engine_id, knobs, kind, said = REFUSED[number]
    g, _ = conv_block()
    with pytest.raises(kind, match=said):
        g.create_execution_plan(engine_id, knobs)


def test_knobs_that_contradict_arguments_and_graphs_without_rules_are_refused():
    g, _ = conv_block()
    with pytest.raises(
        GraphError, match="`determinism` must be 'run_to_run' as a knob too, for it is given, got 'fast'"
    ):
        g.plans(determinism="run_to_run", knobs={"determinism": "fast"})
    with pytest.raises(GraphError, match="`knobs` must be a mapping from names of knobs to values"):
        g.plans(knobs=["engine:conv"])  # type: ignore[arg-type]
    h = Graph(io_data_type="float32")
    h.exp(h.tensor((2,))).set_output(True)
    with pytest.raises(NotOffered, match="plan 'fused': it is the plan 'single', for no rule applies"):
        h.create_execution_plan(0)
    assert [knob.name for knob in h.get_knobs_for_engine(1)] == ["determinism"]


def test_kernels_have_the_knobs_of_limits(monkeypatch: pytest.MonkeyPatch):
    """Where a kernel may serve, and states its workspace, the limits are knobs."""
    g, _ = conv_block()
    (xla, _) = (e for e in engines.registered("conv") if e.name in ("xla", "ordered"))
    kernel = engines.Engine("kernel", "conv", xla.run, fused=False, workspace=lambda call: 64, level=xla.level)
    monkeypatch.setitem(engines._registry, "conv", [*engines.registered("conv"), kernel])
    plan = g.create_execution_plan(0, {"sm_count": 66})
    found = named(plan)
    assert (found["sm_count"].value, found["sm_count"].least, found["sm_count"].choices) == (66, 1, ())
    assert found["workspace_limit"].value is None
    assert str(found["workspace_limit"]) == "workspace_limit = None, of any integer from 0 on"
    assert "kernel" in found["engine:conv"].choices


def test_an_engine_of_another_platform_serves_no_plan_here(monkeypatch: pytest.MonkeyPatch):
    """JAX may lower the call for that platform, so it can be traced; the plan is not offered all the same."""
    g, _ = conv_block()
    away = lambda call: None if call.platform == "cuda" else "it is away"
    (xla, _) = (e for e in engines.registered("conv") if e.name in ("xla", "ordered"))
    kernel = engines.Engine("xla", "conv", xla.run, supports=away)
    monkeypatch.setitem(engines._registry, "conv", [kernel])
    with pytest.raises(NotOffered, match=r"conv .* is served by no engine: it is away"):
        g.create_execution_plan(0, {"engine:conv": "xla"})


def test_what_heuristic_b_measured_is_kept_where_tune_keeps_it(file: Path, monkeypatch: pytest.MonkeyPatch):
    g, _ = conv_block()
    first = g.plans("B")
    assert {plan.engine for plan in first} == {"fused", "single"}
    assert 0 < (first[0].measured or 0) <= (first[1].measured or 0)
    of_device = json.loads(file.read_text())["cpu"][tuned.VERSIONS]
    ((name, times),) = of_device.items()
    assert name.startswith("graph 'block', sha256 ")
    assert times == {plan.engine: pytest.approx(1e3 * (plan.measured or 0)) for plan in first}
    monkeypatch.setattr(heuristics, "_seconds", lambda plan: pytest.fail("it is measured again"))
    h, _ = conv_block()
    assert [plan.measured for plan in h.plans("B")] == [pytest.approx(plan.measured) for plan in first]
    # A file that says otherwise is believed, and what tune keeps there beside it is still there.
    swapped = {"fused": times["single"], "single": times["fused"]}
    tuned.keep(file, "cpu", {name: swapped, "conv(...)": {"xla": 1.0}})
    assert [plan.engine for plan in g.plans("B")] == [plan.engine for plan in first][::-1]
    assert set(json.loads(file.read_text())["cpu"][tuned.VERSIONS]) == {name, "conv(...)"}
    monkeypatch.undo()


def test_a_level_that_fixes_bits_and_other_requirements_are_measured_apart(file: Path):
    g = Graph("two", io_data_type="float32")
    x = g.tensor((4, 6), name="x")
    g.relu(g.matmul(x, g.tensor((6, 5), name="w"), name="product"), name="act").set_output(True)
    g.plans("B", determinism="run_to_run")
    assert json.loads(file.read_text()) == {}
    g.plans("B")
    g.plans("B", knobs={"engine:product": "ordered"})
    assert len(json.loads(file.read_text())["cpu"][tuned.VERSIONS]) == 2


def test_engines_of_a_plans_calls_are_tuned_by_tune(file: Path):
    """A plan's calls are calls: what is measured for them is found by them."""
    g, _ = conv_block()
    graph, arrays = filled(g, np.random.default_rng(32))
    plan = g.plan()
    found = dnn.tune(plan.function, *map(jnp.asarray, arrays.values()))
    assert found.failed == {}
    assert worst(graph, arrays, plan(arrays)) <= 1
