"""Attention whose keys lie on eight devices, against `attention` on one: values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxdnn as dnn

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "sinks": True, "alibi_slopes": True, "segments": True},
    {"window": (5, 9), "softcap": 2.0, "layout": "BNTH"},
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(options: dict[str, Any]):
    rng = np.random.default_rng(0)
    b, t, s, n, h, d, e = 2, 24, 40, 4, 2, 5, 6
    s = t if options.get("causal") or "window" in options else s
    first = options.get("layout", "BTNH") == "BTNH"
    laid_out = lambda x: jnp.asarray(x if first else np.swapaxes(x, 1, 2))
    arrays = [laid_out(rng.normal(size=z)) for z in ((b, t, n, d), (b, s, h, d), (b, s, h, e))]
    names = [name for name in ("alibi_slopes", "sinks") if name in options]
    of_heads = [jnp.asarray(rng.normal(size=n) / 3) for _ in names]
    segments = {
        "query_segments": np.sort(rng.integers(0, 3, (b, t)), 1),
        "key_segments": np.sort(rng.integers(0, 3, (b, s)), 1),
    }
    constants: dict[str, Any] = segments if "segments" in options else {}
    given = {name: value for name, value in options.items() if name not in (*names, "segments")}
    rows, none = PartitionSpec(None, "x") if first else PartitionSpec(None, None, "x"), PartitionSpec()
    of_lse = rows

    def on_one(q: Any, k: Any, v: Any, *more: Any) -> Any:
        named = dict(zip(names, more, strict=True))
        return dnn.attention(q, k, v, **given, **named, **constants, return_logsumexp=True)

    def on_ring(*a: Any) -> Any:
        def part(q: Any, k: Any, v: Any, constants: Any, *more: Any) -> Any:
            named = dict(zip(names, more, strict=True))
            return dnn.ring.attention(q, k, v, axis_name="x", **given, **named, **constants, return_logsumexp=True)

        mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
        specs = (rows, rows, rows, PartitionSpec(None, "x"), *[none] * len(names))
        run = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=(rows, of_lse))
        return run(*a[:3], {name: jnp.asarray(x) for name, x in constants.items()}, *a[3:])

    every = (*arrays, *of_heads)
    for a, b_ in zip(jax.jit(on_ring)(*every), on_one(*every), strict=True):
        np.testing.assert_allclose(a, b_, rtol=1e-12, atol=1e-12)

    def loss(f: Any) -> Any:
        def run(*a: Any) -> Any:
            y, lse = f(*a)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0) ** 2)

        return jax.jit(jax.grad(run, tuple(range(len(every)))))

    for a, b_ in zip(loss(on_ring)(*every), loss(on_one)(*every), strict=True):
        np.testing.assert_allclose(a, b_, rtol=1e-11, atol=1e-11)


def test_parts_are_merged_in_float32():
    """Of bfloat16 the result is rounded once: as near to the exact one as that of one device."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 32, 2, 8)), jnp.bfloat16) for _ in range(3))
    rows = PartitionSpec(None, "x")
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    ring = lambda q, k, v: dnn.ring.attention(q, k, v, axis_name="x")
    found = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows))(q, k, v)
    assert found.dtype == jnp.bfloat16
    wanted = np.asarray(dnn.attention(*(x.astype(jnp.float32) for x in (q, k, v))))
    np.testing.assert_allclose(found.astype(np.float32), wanted, rtol=2.0**-8, atol=1e-6)


def test_levels():
    with pytest.raises(NotImplementedError, match=r"`ring.attention` guarantees run_to_run"):
        dnn.ring.attention(*[np.zeros((1, 2, 1, 2), np.float32)] * 3, axis_name="x", determinism="batch_invariant")
