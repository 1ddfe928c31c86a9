"""Levels kept by every op that promises one, forward and backward, by calls that are drawn from a seed.

What the procedures of `jaxdnn verify` do to the calls of its matrix is done here to others, to results and gradients
in one: alone and in the batch, operation by operation and compiled among other operations, and sharded.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxdnn._src.cases.subject import Subject, gradient, strongest
from jaxdnn._src.core.determinism import is_fixed
from jaxdnn.verify import levels
from tests import level_calls
from tests.level_calls import LevelCall

SEED = 11


def subject(call: LevelCall) -> Subject:
    """The call with its gradient; without it where that fixes no bits."""
    batch = call.batch or (None,) * len(call.arrays)
    plain = Subject(call.name, "any", "f32", "portable", lambda _: call.function, call.arrays, batch, call.out)
    plain = dataclasses.replace(plain, declared=strongest(plain))
    return (gradient(plain) if is_fixed(plain.declared) else None) or plain


def found(call: LevelCall) -> Iterator[str]:
    """What is wrong with a call."""
    made = subject(call)
    assert is_fixed(made.declared), call.name
    for procedure in ("alone", "company", "mesh"):
        trial = levels.trial(made, made.declared, procedure, "quick")
        if trial.status == "failed":
            yield f"{trial.id} at {made.declared}: {trial.message}"


@pytest.mark.parametrize("call", list(level_calls.once_broken()), ids=lambda call: call.name)
def test_calls_that_broke_their_level(call: LevelCall):
    assert not list(found(call))


@pytest.mark.parametrize("kind", level_calls.KINDS, ids=lambda kind: kind.__name__)
def test_levels_are_kept(kind: Callable[[np.random.Generator], Iterator[Any]]):
    """One call of every kind."""
    calls = list(level_calls.calls(SEED, kind))
    assert not list(found(calls[SEED % len(calls)]))
