"""Hundreds of drawn malformed graphs, plans and functions: what is refused is refused by an error of graphs alone."""

import collections

import numpy as np
import pytest

from tests.graph.malformed import DRAWN, outcome

EACH, SEEDS = 20, 16  # draws of a kind in a test, and tests


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_does_not_fit_is_refused_in_a_sentence(kind: str, seed: int):
    """Most is refused, and what is accepted was planned: an error of Python's or JAX's is a fault."""
    found: collections.Counter[str] = collections.Counter()
    for number in range(EACH * seed, EACH * (seed + 1)):
        what, call = DRAWN[kind](np.random.default_rng([20261127, number]))
        try:
            found[outcome(call)] += 1
        except Exception as error:
            raise AssertionError(f"DRAWN[{kind!r}] of {number}: {what}") from error
    assert found["refused"] >= EACH // 3
    assert set(found) <= {"refused", "accepted", *(["not offered"] if kind == "plan" else [])}
