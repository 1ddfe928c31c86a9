"""Hundreds of random graphs: every plan's results are within the computed bound, and exact where nothing is rounded."""

import numpy as np
import pytest

from jaxdnn._src.graph.fuse import steps
from jaxdnn_reference import graph as definition
from tests.graph import drawn
from tests.graph.bounds import tolerance
from tests.graph.test_nodes import worst

EACH, SEEDS = 4, 60  # graphs a test, and tests


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_graphs_are_within_their_bound(seed: int):
    for number in range(EACH * seed, EACH * (seed + 1)):
        graph, arrays = drawn.graph(number)
        for plan in graph.plans()[: 2 - number % 2]:
            assert worst(graph, arrays, plan(arrays)) <= 1, f"drawn.graph({number}), plan {plan.engine!r}"


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_random_graphs_of_blocks_and_attention_are_within_their_bound(seed: int):
    """Products of numbers with scales of blocks, and attention with functions of scores, of 8 bits too."""
    for number in range(EACH * seed, EACH * (seed + 1)):
        graph, arrays = drawn.graph(number, drawn.NEWER)
        for plan in graph.plans()[: 2 - number % 2]:
            assert worst(graph, arrays, plan(arrays)) <= 1, f"drawn.graph({number}, NEWER), plan {plan.engine!r}"


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_of_integers_are_exact(seed: int):
    graph, arrays = drawn.integers(seed)
    wanted = definition.evaluate(graph.describe(), arrays)
    for plan in graph.plans():
        found = plan(arrays)
        for uid, value in wanted.items():
            np.testing.assert_array_equal(found[uid], value, err_msg=f"drawn.integers({seed}), plan {plan.engine!r}")


def test_bounds_say_something():
    """Of most graphs every result's bound is below its size, and graphs fuse."""
    fused, tight, count = 0, 0, 40
    for number in range(count):
        graph, arrays = drawn.graph(number)
        held, errors = tolerance(graph.describe(), arrays)
        tight += all(np.median(errors[t.uid]) <= 0.05 * np.abs(held[t.uid]).max() for t in graph.outputs())
        fused += any(step.rule for step in steps(graph, fusion=True)[0])
    assert tight >= 0.8 * count
    assert fused >= 0.25 * count


@pytest.mark.parametrize("fault", ["a wrong weight", "a lost bias", "a shifted image"])
def test_planted_faults_are_found(fault: str):
    """What would pass whatever came out is no test."""
    found = 0
    for number in range(5):
        graph, arrays = drawn.graph(number)
        wrong = {uid: np.array(v) for uid, v in arrays.items()}
        uid = next(iter(wrong))
        if fault == "a wrong weight":
            wrong[uid].flat[0] += 1
        elif fault == "a lost bias":
            wrong[uid] = np.zeros_like(wrong[uid])
        else:
            wrong[uid] = np.roll(wrong[uid], 1, axis=0)
        found += worst(graph, arrays, graph.plan()(wrong)) > 1
    assert found >= 3
