"""What the kernels do not know of a call they refuse: a mask that is passed over would be a wrong result."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper
from jaxdnn._src.attention.hopper import engine
from jaxdnn._src.core.explain import traced_calls

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"block_mask": np.ones((1, 1, 2, 2), bool)}, "its kernel has no"),
    ({"score_fn": lambda x, *_: 2 * x}, "its kernel has no"),
    ({"return_maximum": True}, "its kernel has no"),
    ({"split": 64}, "its kernel takes splits in multiples of 128 keys, not 64"),
]


@pytest.mark.skipif(hopper.unavailable() is not None, reason=f"no kernels: {hopper.unavailable()}")
@pytest.mark.parametrize(("options", "expected"), OPTIONS, ids=[next(iter(options)) for options, _ in OPTIONS])
def test_options_that_only_xla_has(options: dict[str, Any], expected: str):
    q = jnp.zeros((1, 256, 2, 64), jnp.bfloat16)
    (call,) = traced_calls(lambda q: dnn.attention(q, q, q), q, platform="cuda")
    assert engine._unsupported(call) is None
    (call,) = traced_calls(lambda q: dnn.attention(q, q, q, **options), q, platform="cuda")
    assert (engine._unsupported(call) or "").startswith(expected)
