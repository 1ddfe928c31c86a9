"""Decoding: the last queries of sequences over a cache, in pages too, as rows of attention; bits; errors."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference

OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 3, "softcap": 2.0},
    {"alibi": True, "sinks": True, "split": 2, "layout": "BNTH"},
    {"pages": True, "split": 5, "scale": 0.4},
    {"pages": True, "alibi": True, "layout": "BNTH", "split": 1},
]


def operands(options: dict[str, Any], t: int = 2, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """q, k, v and lengths, and what is given by name; sequences share their first page."""
    rng = np.random.default_rng(seed)
    b, n, h, d, e, m, r = 3, 4, 2, 5, 6, 4, 3
    o = {name: value for name, value in options.items() if name not in ("pages", "alibi", "sinks")}
    rows = (13, r) if "pages" in options else (b, m * r)
    q, k, v = (rng.normal(size=s) for s in ((b, t, n, d), (*rows, h, d), (*rows, h, e)))
    lengths = np.array([7, 0, 12])
    if "pages" in options:
        table = 1 + rng.permutation(12).reshape(b, m)
        table[:, 0] = 0
        table[0, 3] = -7  # is not used
        o["page_table"] = table
    o |= {"alibi_slopes": rng.normal(size=n) / 4} if "alibi" in options else {}
    o |= {"sinks": rng.normal(size=n)} if "sinks" in options else {}
    if options.get("layout") == "BNTH":
        q, k, v = (np.swapaxes(a, 1, 2) for a in (q, k, v))
    return [q, k, v, lengths], o


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_and_gradients(options: dict[str, Any]):
    given, o = operands(options)
    found = dnn.attention_decode(*given, **o, return_logsumexp=True)
    for a, b in zip(found, reference.attention_decode(*given, **o, return_logsumexp=True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    q, k, v, lengths = given

    def loss(change: Any) -> Any:
        y = dnn.attention_decode(q + change[0], k + change[1], v + change[2], lengths, **o)
        return jnp.sum(jnp.sin(y))

    zero = [jnp.zeros_like(jnp.asarray(a)) for a in (q, k, v)]
    gradients = jax.jit(jax.grad(loss))(zero)
    rng = np.random.default_rng(1)
    along = [rng.normal(size=a.shape) for a in (q, k, v)]

    def defined(step: float) -> float:
        moved: Any = [*(a + step * d for a, d in zip((q, k, v), along, strict=True)), lengths]
        y = reference.attention_decode(*moved, **o)
        return float(np.sin(y).sum())

    slope = (defined(1e-5) - defined(-1e-5)) / 2e-5
    np.testing.assert_allclose(
        sum(float((g * d).sum()) for g, d in zip(gradients, along, strict=True)), slope, rtol=1e-7
    )


@pytest.mark.parametrize("engine", ["xla", "ordered"])
def test_a_split_of_more_keys_than_there_are_takes_no_more_memory(engine: str):
    q, k, n = jnp.ones((1, 2, 2, 4)), jnp.ones((1, 21, 2, 4)), jnp.array([20])
    for run in (ft.partial(dnn.attention, q, k, k), ft.partial(dnn.attention_decode, q, k, k, n)):
        found: list[Any] = [
            jax.jit(ft.partial(run, split=split, engine=engine)).lower().compile().memory_analysis()
            for split in (21, 2**20)
        ]
        assert found[1].temp_size_in_bytes <= found[0].temp_size_in_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [{}, {"window": 4, "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("split", [4, 24, 2**40])  # of 21 keys in room for 32
def test_a_row_of_a_prefill_has_the_bits_of_a_decoded_one(split: int, causal: dict[str, Any], dtype: str):
    """Whatever the room of the cache, its pages and the batch are; NaN behind the last key does not show."""
    rng = np.random.default_rng(2)
    b, t, n, h = 2, 21, 4, 2
    q, k, v = (jnp.asarray(rng.normal(size=(b, t, m, d)), dtype) for m, d in ((n, 5), (h, 5), (h, 6)))
    slopes, sinks = (jnp.asarray(rng.normal(size=n) / 4, jnp.float32) for _ in range(2))
    options: dict[str, Any] = dict(alibi_slopes=slopes, sinks=sinks, split=split, return_logsumexp=True)
    options["determinism"] = "batch_invariant"
    both = (causal["window"], 0) if "window" in causal else None
    prefill = dnn.attention(q, k, v, causal=True, **options, **{**causal, "window": both})
    room = [jnp.pad(a, [(0, 0), (0, 11), (0, 0), (0, 0)], constant_values=jnp.nan) for a in (k, v)]
    pages = [a.reshape(2 * 4, 8, h, -1)[::-1] for a in room]
    table = 7 - np.arange(8).reshape(2, 4)

    @jax.jit
    def decoded(i: Any) -> Any:
        one, lengths = jax.lax.dynamic_slice_in_dim(q, i, 1, 1), jnp.full(b, i + 1)
        plain: Any = (one, *room, lengths)
        paged: Any = (one, *pages, lengths)
        run = ft.partial(dnn.attention_decode, **options, **causal)
        return run(*plain), run(*(a[:1] for a in plain)), run(*paged, page_table=table)

    for i in (0, 3, 4, 20):
        plain, alone, paged = decoded(i)
        for whole, a, one, c in zip(prefill, plain, alone, paged, strict=True):
            np.testing.assert_array_equal(whole[:, i], a[:, 0])
            np.testing.assert_array_equal(a[:1], one)
            np.testing.assert_array_equal(a, c)


def test_several_queries_are_the_last_ones():
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(1, 9, 2, 4)).astype(np.float32) for _ in range(3))
    whole = dnn.attention(q, k, v, causal=True)
    last = dnn.attention_decode(q[:, 6:], k, v, np.array([9]))
    np.testing.assert_allclose(last, whole[:, 6:], atol=1e-6)


def test_vmap_over_pages_and_tables():
    given, o = operands({"pages": True})
    q, k, v, lengths = (jnp.asarray(a) for a in given)
    run = lambda q, k, table: dnn.attention_decode(q, k, v, lengths, page_table=table)
    tables = jnp.stack([o["page_table"], o["page_table"][::-1]])
    found = jax.vmap(run, (None, None, 0))(q, k, tables)
    np.testing.assert_allclose(found, jnp.stack([run(q, k, t) for t in tables]), atol=1e-6)
    keys = jnp.stack([k, 2 * k])
    found = jax.vmap(run, (None, 0, None))(q, keys, tables[0])
    np.testing.assert_allclose(found, jnp.stack([run(q, a, tables[0]) for a in keys]), atol=1e-6)


Q, K = np.zeros((2, 1, 4, 8), np.float32), np.zeros((2, 6, 2, 8), np.float32)
BAD = [
    (dict(page_table=np.zeros(2, np.int32)), ValueError, r"`page_table` must have shape \(B, M\)"),
    (dict(page_table=np.zeros((2, 1), np.float32)), TypeError, "`page_table` must be integers, got float32"),
    (dict(split=0), ValueError, "`split` must be a positive number of keys, got 0"),
    (dict(window=-1), ValueError, "`window` must have no negative side"),
    (dict(layout="NTHD"), ValueError, "`layout` must be one of"),
    (dict(out_dtype="bfloat16"), ValueError, "`out_dtype` must be one of float32 here"),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD)
def test_bad_input(options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.attention_decode(Q, K, K, np.array([3, 4]), **options)


def test_bad_arrays():
    with pytest.raises(ValueError, match=r"`key_lengths` must have shape \(2,\)"):
        dnn.attention_decode(Q, K, K, np.array([3]))
    with pytest.raises(ValueError, match=r"`k` must have shape \(P, R, K, D\) with a page table, got \(6, 2, 8\)"):
        dnn.attention_decode(Q, K[0], K, np.array([3, 3]), page_table=np.zeros((2, 1), np.int32))
