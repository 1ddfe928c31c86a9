"""What the kernels do not know of a call they refuse: a mask that is passed over would be a wrong result."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.attention.hopper import engine
from jaxdnn._src.core.explain import traced_calls

OPTIONS: list[dict[str, Any]] = [
    {"block_mask": np.ones((1, 1, 2, 2), bool)},
    {"score_fn": lambda x, *_: 2 * x},
    {"split": 64},
    {"out_dtype": "float32"},
    {"return_maximum": True},
]


@pytest.mark.skipif(hopper.unavailable() is not None, reason=f"no kernels: {hopper.unavailable()}")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o)))
def test_options_that_only_xla_has(options: dict[str, Any]):
    q = jnp.zeros((1, 256, 2, 64), jnp.bfloat16)
    for given, is_refused in (({}, False), (options, True)):
        (call,) = traced_calls(lambda q, given=given: dnn.attention(q, q, q, **given), q, platform="cuda")
        reason = engine._unsupported(call) or ""
        assert ("its kernel has no" in reason) == is_refused, reason
