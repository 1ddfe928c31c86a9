"""Attention in a stated order: a row decides its bits, and the bound covers what is rounded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.attention import arithmetic, cases, walk
from jaxdnn._src.cases import case as case_module
from jaxdnn._src.core import tolerance
from tests.attention.calls import arrays, close, drawn, ours

# ---- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 2), "softcap": 2.0}], ids=str)
def test_in_order_a_row_decides_its_bits(options: dict[str, Any]):
    """Values and gradients of a sequence, alone, among others, and with keys behind the last one that counts."""
    rng = np.random.default_rng(10)
    q, k, v = (a.astype(np.float32) for a in arrays(rng, 3, 70, 19, 2, 1))
    dy = rng.normal(size=(3, 2, 70, 6)).astype(np.float32)
    lengths = np.full(3, 19)

    def both(q: Any, k: Any, v: Any, dy: Any, lengths: Any) -> Any:
        f = ours({}, {**options, "key_lengths": lengths}, engine="ordered", determinism="mesh_invariant")
        (y, lse), back = jax.vjp(f, q, k, v)
        return y, lse, *back((dy, jnp.ones_like(lse)))

    every = jax.jit(both)(q, k, v, dy, lengths)
    alone = jax.jit(both)(q[1:2], k[1:2], v[1:2], dy[1:2], lengths[:1])
    longer = [np.concatenate([a, np.full((3, 1, 20, a.shape[3]), np.nan, np.float32)], 2) for a in (k, v)]
    padded = jax.jit(both)(q, *longer, dy, lengths)
    for name, one, a, b in zip(("y", "lse", "dq", "dk", "dv"), every, alone, padded, strict=True):
        np.testing.assert_array_equal(one[1:2], a, name)
        np.testing.assert_array_equal(one, b if name in ("y", "lse", "dq") else b[:, :, :19], name)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", range(200, 210))
def test_any_combination_in_order(seed: int):
    operands, extras, options = drawn(seed)
    options.pop("score_fn", None)
    extras = {name: value for name, value in extras.items() if not name.startswith("score")}
    every = (*operands, *extras.values())
    f, g = ours(extras, options, engine="ordered"), ours(extras, options, engine="xla")
    found = jax.jit(f)(*every)
    close(found, jax.jit(g)(*every))
    cotangents = tuple(jnp.where(jnp.isfinite(y), jnp.cos(y), 0.0) for y in found)
    tangents = tuple(jnp.sin(jnp.asarray(x) * 7) for x in every)

    def both(f: Any) -> Any:
        return jax.jit(lambda *a: (jax.vjp(f, *a)[1](cotangents), jax.jvp(f, a, tangents)[1]))(*every)

    close(both(f), both(g), 1e-11)


@pytest.mark.parametrize(
    ("op", "variant"), [(op, variant) for op in ("attention", "attention_dgrad") for variant in cases.variants(op)]
)
def test_the_bound_covers_weights_that_are_rounded_to_16_bits(op: str, variant: str, monkeypatch: Any):
    """As on GPUs, on a CPU: in float16 most weights of distant scores are subnormal numbers."""
    monkeypatch.setitem(arithmetic.PLAIN, "cpu", arithmetic.PLAIN["cuda"])
    case = cases.AttentionCase(op, "xla", "f16", variant)
    accumulation = case_module.ACCUMULATIONS["tensor_core"]
    for kind in case.kinds():
        operands = case.operands(kind, np.random.default_rng(7))
        found = jax.jit(case.call())(*operands)
        for out, wanted in zip(found, case.expected(kind, operands, accumulation), strict=True):
            compared = tolerance.compare(np.asarray(out), wanted.value, wanted.error, generic=False)
            assert compared.passed, f"{kind} {wanted.name}: {compared.message}"


@pytest.mark.parametrize("level", ["batch_invariant", "mesh_invariant"])
def test_a_cap_in_order_is_no_tanh_of_the_device(level: str):
    """XLA's tanh has other bits in one of its code generators for GPUs than in another: rows of y depended on N."""
    x = jnp.ones((2, 8, 2, 4))
    of = lambda q, k, v: dnn.attention(q, k, v, softcap=2.0, determinism=level, engine="ordered")
    value_and_gradient = lambda *a: (of(*a), jax.grad(lambda *a: of(*a).sum(), (0, 1, 2))(*a))
    text = jax.jit(value_and_gradient).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "tanh" not in text
    assert "exponential" in text


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"causal": "bottom_right", "window": (50, None), "split": 32}], ids=str
)
def test_strips_in_order_change_no_bit(monkeypatch, options: dict[str, Any]):
    """What a strip leaves out would have added zeros."""
    rng = np.random.default_rng(17)
    operands = [jnp.asarray(a, jnp.float32) for a in arrays(rng, 1, 300, 270, 2, 1, 3, 2)]
    bias, slopes = (jnp.asarray(rng.normal(size=z) / 9, jnp.float32) for z in ((1, 1, 300, 1), (2,)))
    found = []
    for rows in (128, 10**6):
        monkeypatch.setattr(walk, "ROWS", rows)
        jax.clear_caches()
        f = ours({"bias": 0, "alibi_slopes": 0}, {**options, "determinism": "mesh_invariant"})
        both = jax.jit(lambda *a, f=f: (f(*a), jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)[0])), tuple(range(5)))(*a)))
        found.append(jax.tree.leaves(both(*operands, bias, slopes)))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
