"""What a call costs outside of jit, in Python's function calls: clocks of shared machines tell nothing."""

import cProfile
import pstats
from typing import Any

import jax.numpy as jnp
import pytest

import jaxdnn as dnn

X, W = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 8))
CALLS: dict[str, tuple[Any, int]] = {
    "add": (lambda: dnn.add(X, X), 800),
    "activation": (lambda: dnn.activation(X), 480),
    "resample": (lambda: dnn.resample(X, output_sizes=(16, 16)), 1350),
    "conv": (lambda: dnn.conv(X, W, padding=1), 1200),
    "pool": (lambda: dnn.pool(X, window=2), 850),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_eager_call_takes_few_python_calls(name: str):
    call, most = CALLS[name]
    call()  # compiles
    profile = cProfile.Profile()
    profile.runcall(call)
    found: Any = pstats.Stats(profile)
    assert found.total_calls < most
