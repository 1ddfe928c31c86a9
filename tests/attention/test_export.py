"""Exports whose batch and lengths are open: values and gradients, and no array of all scores."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxdnn as dnn

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": "bottom_right", "window": (30, None)},
    {"causal": True, "split": 16},
    {"bias": True, "lengths": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_open_sizes(options: dict[str, Any]):
    rng = np.random.default_rng(0)
    b, t, s, n, h, d, e = 2, 150, 70, 4, 2, 5, 6
    shapes = ((b, t, n, d), (b, s, h, d), (b, s, h, e), (1, n, t, 1))
    arrays: Any = [rng.normal(size=shape).astype(np.float32) for shape in shapes] + [np.array([t, 3], np.int32)]
    given = {name: value for name, value in options.items() if name not in ("bias", "lengths")}

    def attend(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> Any:
        more = {"bias": bias} if "bias" in options else {}
        more |= {"query_lengths": lengths, "softcap": 2.0} if "lengths" in options else {}
        return dnn.attention(q, k, v, **given, **more, return_logsumexp=True)

    def both(*a: Any) -> Any:
        loss = lambda q, k, v, bias: jnp.sum(jnp.sin(attend(q, k, v, bias, a[4])[0]))
        return attend(*a), jax.grad(loss, (0, 1, 2, 3))(*a[:4])

    open_b, open_t, open_s = export.symbolic_shape("b, t, s")
    symbols = [(open_b, open_t, n, d), (open_b, open_s, h, d), (open_b, open_s, h, e), (1, n, open_t, 1), (open_b,)]
    types = [jax.ShapeDtypeStruct(shape, a.dtype) for shape, a in zip(symbols, arrays, strict=True)]
    exported = export.export(jax.jit(both))(*types)
    wanted = jax.tree.leaves(jax.jit(both)(*arrays))
    for found, known in zip(jax.tree.leaves(exported.call(*arrays)), wanted, strict=True):
        largest = np.abs(np.where(np.isfinite(known), known, 0)).max()
        np.testing.assert_allclose(found, known, rtol=2e-5, atol=2e-5 * max(largest, 0.1))
    sizes = re.findall(r"tensor<([^>]*)xf32>", exported.mlir_module())
    assert not [x for x in sizes if x.count("?") > 2]  # the batch, queries and keys
