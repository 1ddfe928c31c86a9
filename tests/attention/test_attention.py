"""Attention: every option against a dense formula in float64, alone and together; derivatives; what is not seen."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.attention import arithmetic, cases, walk
from jaxdnn._src.cases import case as case_module
from jaxdnn._src.core import tolerance

FLOATS = ("bias", "alibi_slopes", "sinks")


def dense(q: Any, k: Any, v: Any, extras: dict[str, Any], **o: Any) -> tuple[Any, Any]:
    """y and its logsumexp by one softmax over all scores, with heads first."""
    group, t, s = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    x = jnp.einsum("bntd,bnsd->bnts", q, k) * o.get("scale", q.shape[-1] ** -0.5)
    if (cap := o.get("softcap")) is not None:
        x = cap * jnp.tanh(x / cap)
    i, j = jnp.arange(t).reshape(1, 1, t, 1), jnp.arange(s).reshape(1, 1, 1, s)
    if "score_fn" in o:
        of_b, of_n = jnp.arange(q.shape[0]).reshape(-1, 1, 1, 1), jnp.arange(q.shape[1]).reshape(1, -1, 1, 1)
        x = o["score_fn"](x, of_b, of_n, i, j, *o["score_arrays"])
    if "bias" in extras:
        x = x + extras["bias"]
    if "alibi_slopes" in extras:
        x = x + extras["alibi_slopes"].reshape(1, -1, 1, 1) * (j - i).astype(x.dtype)
    of = lambda name, size: jnp.asarray(o.get(name, np.full(len(q), size))).reshape(-1, 1, 1, 1)
    rows, keys = of("query_lengths", t), of("key_lengths", s)
    seen = (i < rows) & (j < keys)
    gap = j - i - (keys - rows if o.get("causal") == "bottom_right" else 0)
    left, right = o.get("window", (None, None))
    seen = seen & (gap <= (0 if o.get("causal") else t + s if right is None else right))
    seen = seen & (gap >= -(t + s if left is None else left))
    if "mask" in o:
        seen = seen & o["mask"]
    if "block_mask" in o:
        (u, w), large = o["block_mask_tile"], o["block_mask"]
        seen = seen & jnp.repeat(jnp.repeat(large, u, 2), w, 3)[:, :, :t, :s]
    if "query_segments" in o:
        seen = seen & (o["query_segments"][:, None, :, None] == o["key_segments"][:, None, None, :])
    x = jnp.where(seen, x, -jnp.inf)
    if "sinks" in extras:
        sink = jnp.broadcast_to(extras["sinks"].reshape(1, -1, 1, 1), (*x.shape[:3], 1))
        x, v = jnp.concatenate([x, sink], -1), jnp.concatenate([v, jnp.zeros_like(v[:, :, :1])], 2)
    top = jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True, initial=-jnp.inf))
    e = jnp.exp(x - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(e, -1, keepdims=True)
    none = total == 0
    p = e / jnp.where(none, 1.0, total)
    if "dropout" in o:
        kept = reference.dropout_mask(o["dropout_key"], (*p.shape[:3], s), rate=o["dropout"])
        p = p * np.pad(kept / (1 - o["dropout"]), [(0, 0)] * 3 + [(0, p.shape[3] - s)])
    y = jnp.einsum("bnts,bnsd->bntd", p, v)
    lse = jnp.where(none, -jnp.inf, jnp.log(jnp.where(none, 1.0, total)) + top)
    return y, lse[..., 0]


def arrays(
    rng: np.random.Generator, b: int = 2, t: int = 9, s: int = 9, n: int = 4, h: int = 2, d: int = 5, e: int = 6
) -> Any:
    return tuple(rng.normal(size=(b, *size)) for size in ((n, t, d), (h, s, d), (h, s, e)))


def drawn(seed: int) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray], dict[str, Any]]:
    """Operands and options of any combination."""
    rng = np.random.default_rng(seed)
    b, t, s = int(rng.integers(1, 4)), *(int(n) for n in rng.integers(1, 14, 2))
    h, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    n = h * group
    operands = arrays(rng, b, t, s, n, h, *(int(v) for v in rng.integers(1, 7, 2)))
    own = lambda: tuple(int(size if rng.random() < 0.6 else 1) for size in (b, n, t, s))
    extras = {"bias": rng.normal(size=own()), "alibi_slopes": rng.normal(size=n) / 4, "sinks": rng.normal(size=n)}
    extras = {name: value for name, value in extras.items() if rng.random() < 0.35}
    segments = lambda size: np.sort(rng.integers(0, 3, (b, size)), 1)
    options = {
        "scale": float(rng.uniform(0.1, 1)),
        "causal": rng.choice([True, "top_left", "bottom_right"]),
        "window": tuple(None if rng.random() < 0.3 else int(rng.integers(0, 6)) for _ in range(2)),
        "softcap": float(rng.uniform(0.5, 3)),
        "mask": rng.random(own()) < 0.7,
        "query_lengths": rng.integers(0, t + 1, b),
        "key_lengths": rng.integers(0, s + 1, b),
    }
    options = {name: value for name, value in options.items() if rng.random() < 0.4}
    if "causal" in options:
        options["causal"] = options["causal"] == "True" or str(options["causal"])
    if rng.random() < 0.3:
        options |= {"dropout": float(rng.choice([0.1, 0.5, 0.9])), "dropout_key": int(rng.integers(2**40))}
    if rng.random() < 0.25:
        tile = tuple(int(n) for n in rng.integers(1, 6, 2))
        counts = (*own()[:2], -(-t // tile[0]), -(-s // tile[1]))
        options |= {"block_mask": rng.random(counts) < 0.7, "block_mask_tile": tile}
    if rng.random() < 0.25:
        extras |= {"score_table": rng.normal(size=(n, 2 * (t + s))), "score_sequence": rng.normal(size=b)}
        options["score_fn"] = changed
    if rng.random() < 0.3:
        options |= {"query_segments": segments(t), "key_segments": segments(s)}
    return operands, extras, options


def changed(x: Any, sequence: Any, head: Any, query: Any, key: Any, table: Any, of_sequence: Any) -> Any:
    """A function of scores with a table of distances, and with a curve that depends on the sequence."""
    return x + table[head, key - query + table.shape[1] // 2] + 0.1 * of_sequence[sequence] * x * x


def named(extras: Any) -> dict[str, Any]:
    """The operands beside q, k and v as the op takes them."""
    of_score = tuple(value for name, value in extras.items() if name.startswith("score"))
    others = {name: value for name, value in extras.items() if not name.startswith("score")}
    return others | ({"score_arrays": of_score} if of_score else {})


def ours(extras: Any, options: dict[str, Any], **more: Any) -> Any:
    names = tuple(extras)
    return lambda q, k, v, *e: dnn.attention(
        q, k, v, **named(dict(zip(names, e, strict=True))), **options, layout="BNTH", return_logsumexp=True, **more
    )


def plain(extras: Any, options: dict[str, Any]) -> Any:
    names = tuple(extras)

    def run(q: Any, k: Any, v: Any, *e: Any) -> Any:
        given = named(dict(zip(names, e, strict=True)))
        arrays = given.pop("score_arrays", ())
        return dense(q, k, v, given, **options, score_arrays=arrays)

    return run


def close(found: Any, wanted: Any, tolerance: float = 1e-12) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", range(40))
def test_any_combination(seed: int):
    """Values, the definition, tangents and gradients of a random call."""
    operands, extras, options = drawn(seed)
    every = (*operands, *extras.values())
    f, g = ours(extras, options), plain(extras, options)
    found = jax.jit(f)(*every)
    close(found, g(*every))
    close(found, reference.attention(*operands, **named(extras), **options, layout="BNTH", return_logsumexp=True))
    in_splits = jax.jit(ours(extras, options, split=1 + seed % 5, return_maximum=True))(*every)
    whole = reference.attention(
        *operands, **named(extras), **options, layout="BNTH", return_logsumexp=True, return_maximum=True
    )
    close(in_splits, whole)
    rng = np.random.default_rng(seed)
    cotangents = tuple(jnp.asarray(np.where(np.isfinite(y), rng.normal(size=y.shape), 0.0)) for y in found)
    wanted = jax.vjp(g, *every)[1](cotangents)
    close(jax.jit(lambda *a: jax.vjp(f, *a)[1](cotangents))(*every), wanted, 1e-11)
    y, lse = (np.asarray(x) for x in found)
    given = dict(dlogsumexp=np.asarray(cotangents[1]), **named(extras), **options, layout="BNTH")
    for module, dy, least in ((dnn, cotangents[0], 1e-11), (reference, np.asarray(cotangents[0]), 1e-9)):
        dgrad: Any = module.attention_dgrad
        close(dgrad(dy, *operands, y, lse, **given), wanted, least if "score_fn" in options else 1e-11)
    tangents = tuple(jnp.asarray(rng.normal(size=x.shape)) for x in every)
    along = jax.jvp(g, tuple(map(jnp.asarray, every)), tangents)[1]
    along = tuple(jnp.where(jnp.isfinite(y), x, 0.0) for y, x in zip(found, along, strict=True))
    close(jax.jit(lambda *a: jax.jvp(f, a, tangents)[1])(*every), along, 1e-11)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", range(100, 110))
def test_second_derivatives_of_any_combination(seed: int):
    operands, extras, options = drawn(seed)
    every = tuple(map(jnp.asarray, (*operands, *extras.values())))
    finite = lambda x: jnp.where(jnp.isfinite(x), x, 0.0)

    def loss(f: Any) -> Any:
        def run(*a: Any) -> Any:
            y, lse = f(*a)
            return jnp.sum(jnp.sin(y)) + jnp.sum(finite(lse) ** 2)

        return jax.grad(run, tuple(range(len(every))))

    f, g = loss(ours(extras, options)), loss(plain(extras, options))
    rng = np.random.default_rng(seed)
    tangents = tuple(jnp.asarray(rng.normal(size=x.shape)) for x in every)
    wanted = jax.jvp(g, every, tangents)[1]
    close(jax.jit(lambda *a: jax.jvp(f, a, tangents)[1])(*every), wanted, 1e-10)
    close(jax.jit(lambda *a: jax.vjp(f, *a)[1](tangents))(*every), wanted, 1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("block", [1, 700, 5000])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": "bottom_right", "window": (40, None)},
        {"window": (300, 3), "softcap": 1.0, "dropout": 0.3, "dropout_key": 2**40 + 5},
        {"query_lengths": np.array([500, 71]), "causal": True},
    ],
    ids=str,
)
def test_blocks_and_strips(monkeypatch, block: int, options: dict[str, Any]):
    """Long sequences in strips with keys of their own, and those in blocks of which the last one is shorter."""
    for platform, plain_one in arithmetic.PLAIN.items():
        monkeypatch.setitem(arithmetic.PLAIN, platform, dataclasses.replace(plain_one, scores=block))
    monkeypatch.setattr(walk, "ROWS", 100 if block > 1 else 3)
    t, s = (517, 430) if block > 1 else (11, 7)
    rng = np.random.default_rng(0)
    operands = arrays(rng, 2, t, s, 2, 1, 3, 2)
    extras = {"bias": rng.normal(size=(1, 2, t, 1)), "sinks": rng.normal(size=2)}
    every = tuple(map(jnp.asarray, (*operands, *extras.values())))
    f, g = ours(extras, options), plain(extras, options)
    jax.clear_caches()
    found = jax.jit(f)(*every)
    close(found, g(*every))
    cotangents = tuple(jnp.where(jnp.isfinite(y), jnp.cos(jnp.arange(y.size)).reshape(y.shape), 0.0) for y in found)
    close(jax.jit(lambda *a: jax.vjp(f, *a)[1](cotangents))(*every), jax.vjp(g, *every)[1](cotangents), 1e-11)


def test_memory_is_linear_in_the_lengths():
    """No array of a gradient's program for 8,192 queries and keys, or of a second derivative's, has all scores."""
    shape = jax.ShapeDtypeStruct((1, 8192, 8, 16), jnp.float32)
    loss = lambda *a: jnp.sum(dnn.attention(*a, causal=True))
    gradient = jax.grad(loss, (0, 1, 2))
    second = lambda *a: jax.jvp(gradient, a, a)[1]
    for function in (gradient, second):
        memory: Any = jax.jit(function).lower(shape, shape, shape).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 8 * 8192 * 8192  # of 4 bytes for all scores, a quarter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_results(dtype: str):
    rng = np.random.default_rng(1)
    q, k, v = (a.astype(dtype) for a in arrays(rng, 2, 40, 50, 4, 2, 16, 8))
    y, lse = dnn.attention(q, k, v, layout="BNTH", return_logsumexp=True)
    assert y.dtype == dtype
    assert lse.dtype == jnp.float32
    wide = [jnp.asarray(a, jnp.float32) for a in (q, k, v)]
    golden, of_lse = dense(wide[0], wide[1], wide[2], {})
    np.testing.assert_allclose(np.asarray(y, np.float32), golden, atol=2.0 ** -(22 if dtype == "float32" else 8))
    np.testing.assert_allclose(lse, of_lse, atol=1e-5)


def test_layouts_are_the_same():
    q, k, v = (a.astype(np.float32) for a in arrays(np.random.default_rng(2)))
    last = tuple(np.swapaxes(a, 1, 2) for a in (q, k, v))
    y, lse = dnn.attention(*last, return_logsumexp=True)
    assert (y.shape, lse.shape) == ((2, 9, 4, 6), (2, 9, 4))
    close((np.swapaxes(y, 1, 2), np.swapaxes(lse, 1, 2)), ours({}, {})(q, k, v), 1e-6)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": (3, 2)}], ids=str)
def test_like_jax_nn(options: dict[str, Any]):
    q, k, v = (np.swapaxes(a, 1, 2).astype(np.float32) for a in arrays(np.random.default_rng(3), e=5))
    names = {"is_causal": "causal", "local_window_size": "window"}
    y = dnn.attention(q, k, v, **{names[n]: value for n, value in options.items()})
    np.testing.assert_allclose(y, jax.nn.dot_product_attention(q, k, v, **options), atol=1e-6)


def test_dropout_continues_a_state_and_repeats():
    q, k, v = (a.astype(np.float32) for a in arrays(np.random.default_rng(11)))
    state = dnn.DropoutState.of_seed(9, offset=8)
    run = lambda key: np.asarray(ours({}, {"dropout": 0.5, "dropout_key": key})(q, k, v)[0])
    np.testing.assert_array_equal(run(state), run(state))
    assert (run(state) != run(9)).any()
    assert (run(9) == run(dnn.DropoutState.of_seed(9))).all()
    assert (run(jax.random.key(3)) == run(jax.random.key_data(jax.random.key(3)))).all()
    p = np.asarray(jax.nn.softmax(jnp.einsum("bntd,bnsd->bnts", q, np.repeat(k, 2, 1)) * 5**-0.5))
    kept = np.asarray(dnn.dropout_mask(state, (2, 4, 9, 9), rate=0.5))
    np.testing.assert_allclose(run(state), np.einsum("bnts,bnsd->bntd", p * kept * 2, np.repeat(v, 2, 1)), atol=1e-6)


# ---- what is not seen ------------------------------------------------------------------------------------------------


def test_rows_that_see_nothing():
    """0 and -inf, and gradients of 0, beside rows that see something; with a sink, the sink."""
    q, k, v = (a.astype(np.float32) for a in arrays(np.random.default_rng(4), 1, 4, 4, 1, 1))
    mask = np.ones((1, 1, 4, 4), bool)
    mask[0, 0, 2] = False
    y, lse = ours({}, {"mask": mask})(q, k, v)
    assert (y[0, 0, 2] == 0).all()
    assert lse[0, 0, 2] == -np.inf
    assert np.isfinite(y).all()
    gradients = jax.grad(lambda *a: jnp.sum(ours({}, {"mask": mask})(*a)[0] ** 2), (0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() for g in gradients)
    assert (gradients[0][0, 0, 2] == 0).all()
    y, lse = ours({"sinks": 0}, {"mask": mask})(q, k, v, np.array([1.5], np.float32))
    assert (y[0, 0, 2] == 0).all()
    assert lse[0, 0, 2] == 1.5


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (2, 3, 0)], ids=str)
def test_nothing_at_all(shape: tuple[int, int, int]):
    b, t, s = shape
    q, k, v = (a.astype(np.float32) for a in arrays(np.random.default_rng(5), b, t, s))
    y, lse = ours({}, {"causal": True})(q, k, v)
    assert y.shape == (b, 4, t, 6)
    assert (np.asarray(y) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()
    found = jax.grad(lambda *a: jnp.sum(ours({}, {})(*a)[0]), (0, 1, 2))(q, k, v)
    assert all((np.asarray(g) == 0).all() for g in found)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "dy"])
@pytest.mark.parametrize("cap", [{}, {"softcap": 2.0}], ids=str)
def test_what_is_not_seen_does_not_show(which: str, bad: float, cap: dict[str, float]):
    """The last key is seen by the last query only, and the first query sees the first key only."""
    rng = np.random.default_rng(6)
    given = dict(zip("qkv", arrays(rng, 1, 6, 6, 2, 1), strict=True))
    f = ours({}, {"causal": True, **cap})
    given["dy"] = np.asarray(f(*given.values())[0]) * 0 + rng.normal(size=(1, 2, 6, 6))
    at = 0 if which in ("q", "dy") else 5
    broken = given | {which: given[which].copy()}
    broken[which][:, :, at] = bad

    def run(a: dict[str, Any]) -> dict[str, np.ndarray]:
        y, back = jax.vjp(lambda q, k, v: f(q, k, v)[0], *(jnp.asarray(a[name]) for name in "qkv"))
        qkv = tuple(jnp.asarray(a[name]) for name in "qkv")
        _, dy = jax.jvp(lambda q, k, v: f(q, k, v)[0], qkv, qkv)
        return dict(zip(("y", "t", "q", "k", "v"), map(np.asarray, (y, dy, *back(jnp.asarray(a["dy"])))), strict=True))

    found, right = run(broken), run(given)
    untouched = {
        "q": {"y": slice(1, 6), "t": slice(1, 6), "q": slice(1, 6), "k": slice(1, 6), "v": slice(1, 6)},
        "k": {"y": slice(0, 5), "t": slice(0, 5), "q": slice(0, 5), "v": slice(0, 0)},
        "v": {"y": slice(0, 5), "t": slice(0, 5), "q": slice(0, 5), "k": slice(0, 0), "v": slice(0, 6)},
        "dy": {"y": slice(0, 6), "q": slice(1, 6), "k": slice(1, 6), "v": slice(1, 6)},
    }[which]
    for name, rows in untouched.items():
        np.testing.assert_allclose(found[name][:, :, rows], right[name][:, :, rows], rtol=1e-12, atol=1e-12)
    if which == "v":
        np.testing.assert_array_equal(found["y"][:, :, 5], bad)


def test_strongly_negative_scores():
    """Rows whose scores are all far below 0, beside tails of keys that would count as 0 if they were not left out."""
    q = np.full((1, 1, 65, 8), -30, np.float32)
    k = np.full((1, 1, 65, 8), 30, np.float32)
    v = np.arange(65 * 2, dtype=np.float32).reshape(1, 1, 65, 2)
    y, lse = ours({}, {"causal": True})(q, k, v)
    np.testing.assert_allclose(y[0, 0, :, 0], np.arange(65), rtol=1e-5)
    assert np.isfinite(lse).all()
    gradients = jax.grad(lambda *a: jnp.sum(ours({}, {"causal": True})(*a)[0]), (0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() for g in gradients)


# ---- transformations -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mapped", list(itertools.product([0, None], repeat=4))[:-1], ids=str)
def test_vmap(mapped: tuple[int | None, ...]):
    """Over any of q, k, v and a bias that is shared by the batch, of values and gradients."""
    rng = np.random.default_rng(7)
    shapes = [(2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 3), (1, 4, 5, 6)]
    every = [jnp.asarray(rng.normal(size=(3, *s) if m == 0 else s)) for s, m in zip(shapes, mapped, strict=True)]

    def f(*a: Any) -> Any:
        return ours({"bias": 0}, {"causal": True})(*a)

    def both(*a: Any) -> Any:
        return f(*a), jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)[0])), (0, 1, 2, 3))(*a)

    found = jax.jit(jax.vmap(both, mapped))(*every)
    pick = lambda i: [x[i] if m == 0 else x for x, m in zip(every, mapped, strict=True)]
    wanted = jax.tree.map(lambda *x: jnp.stack(x), *(jax.jit(both)(*pick(i)) for i in range(3)))
    close(found, wanted, 1e-11)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("axis", ["batch", "heads", "queries", "keys"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "dropout": 0.4, "dropout_key": 7},
        {"causal": "bottom_right", "window": (4, None)},
        {"query_lengths": np.array([3, 16] * 4)},
    ],
    ids=str,
)
def test_meshes(axis: str, options: dict[str, Any]):
    """Sharded along each axis over eight devices: values and gradients of one device; keys are gathered."""
    rng = np.random.default_rng(8)
    operands = tuple(map(jnp.asarray, arrays(rng, 8, 16, 24, 16, 8)))
    extras = {"bias": jnp.asarray(rng.normal(size=(1, 16, 16, 24))), "alibi_slopes": jnp.asarray(rng.normal(size=16))}
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    at = ("batch", "heads", "queries" if axis == "queries" else "keys").index(axis)
    specs: list[list[str | None]] = [[None] * 4 for _ in range(4)]
    for i, spec in enumerate(specs):
        if axis in ("batch", "heads") and not (axis == "batch" and i == 3):
            spec[at] = "x"
        if axis == "queries" and i in (0, 3):
            spec[2] = "x"
        if axis == "keys" and i in (1, 2, 3):
            spec[3 if i == 3 else 2] = "x"
    every = (*operands, *extras.values())
    specs.append(["x" if axis == "heads" else None])
    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*s))) for x, s in zip(every, specs, strict=True)]

    def both(*a: Any) -> Any:
        f = ours(extras, options)
        return f(*a), jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)[0])), tuple(range(5)))(*a)

    found = jax.jit(both)(*placed)
    close(found, jax.jit(both)(*every), 1e-11)
    if axis != "keys":
        assert found[0][0].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*specs[0])), 4)


def test_sums_over_a_mesh_are_rounded_once():
    """Gradients of keys and values in bfloat16, of queries that lie on eight devices, are those of one device."""
    rng = np.random.default_rng(12)
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in arrays(rng, 1, 64, 32, 2, 2, 8, 8))
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    placed = jax.device_put(q, NamedSharding(mesh, PartitionSpec(None, None, "x")))
    gradient = jax.jit(
        jax.grad(lambda *a: jnp.sum(jnp.sin(ours({}, {"causal": True})(*a)[0].astype(jnp.float32))), (1, 2))
    )
    for found, alone in zip(gradient(placed, k, v), gradient(q, k, v), strict=True):
        different = np.asarray(found, np.float32) != np.asarray(alone, np.float32)
        assert different.mean() < 0.02  # of sums in float32 that were added in another order


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64"])
def test_lengths_of_any_integers(dtype: str):
    q, k, v = (a.astype(np.float32) for a in arrays(np.random.default_rng(13), 2, 3, 300))
    run = lambda lengths: np.asarray(ours({}, {"key_lengths": lengths})(q, k, v)[0])
    np.testing.assert_array_equal(run(np.array([100, 7], dtype)), run(np.array([100, 7], np.int32)))


def test_in_order_a_mesh_changes_no_bit_of_long_sequences():
    """Where a device's place is an operand, there are the same blocks as without."""
    rng = np.random.default_rng(16)
    q, k, v = (jnp.asarray(rng.normal(size=(8, 1, n, 2)), jnp.float32) for n in (1028, 8, 8))
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("x"))) for x in (q, k, v)]
    options = {"causal": True, "dropout": 0.25, "dropout_key": 3, "determinism": "mesh_invariant"}
    gradient = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(ours({}, options)(*a)[0])), (0, 1, 2)))
    for found, alone in zip(gradient(*placed), gradient(q, k, v), strict=True):
        np.testing.assert_array_equal(found, alone)


def test_a_mapped_key_of_dropout():
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays(np.random.default_rng(14)))
    keys = jnp.arange(6, dtype=jnp.uint32).reshape(3, 2)
    run = lambda key: ours({}, {"dropout": 0.5, "dropout_key": key})(q, k, v)[0]
    close(jax.jit(jax.vmap(run))(keys), jnp.stack([run(key) for key in keys]), 1e-6)


def test_dy_of_rows_that_see_nothing_is_not_read():
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays(np.random.default_rng(15)))
    y, back = jax.vjp(lambda *a: ours({"sinks": 0}, {"query_lengths": np.array([3, 9])})(*a)[0], q, k, v, jnp.ones(4))
    assert all(np.isfinite(g).all() for g in back(jnp.ones_like(y).at[0, :, 3:].set(jnp.nan)))


def test_parts_are_merged():
    """Attention over two parts of the keys, one of which some rows see nothing of, and its gradient."""
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays(np.random.default_rng(9), 2, 8, 12))

    def merged(q: Any, k: Any, v: Any) -> Any:
        parts = [ours({}, {"causal": True})(q, k[:, :, :5], v[:, :, :5])]
        mask = np.arange(8)[:, None] >= np.arange(5, 12)[None]
        parts.append(ours({}, {"mask": mask[None, None]})(q, k[:, :, 5:], v[:, :, 5:]))
        return dnn.merge_attention(*(jnp.stack(x) for x in zip(*parts, strict=True)))

    whole = ours({}, {"causal": True})
    close(merged(q, k, v), whole(q, k, v), 2e-6)
    loss = lambda f: lambda *a: jnp.sum(jnp.sin(f(*a)[0])) + jnp.sum(f(*a)[1] ** 2)
    every = jax.grad(loss(merged), (0, 1, 2))(q, k, v), jax.grad(loss(whole), (0, 1, 2))(q, k, v)
    close(*every, 2e-5)


def test_merging_nothing():
    y, lse = dnn.merge_attention(jnp.full((2, 3, 4), jnp.nan), jnp.full((2, 3), -jnp.inf))
    assert (y == 0).all()
    assert (lse == -jnp.inf).all()
    close(reference.merge_attention(np.full((2, 3, 4), np.nan), np.full((2, 3), -np.inf)), (y, lse))
    y, lse = dnn.merge_attention(jnp.array([[1.0, jnp.nan]]).T, jnp.array([2.0, -jnp.inf]))
    assert (y.item(), lse.item()) == (1.0, 2.0)


# ---- errors ----------------------------------------------------------------------------------------------------------

Q, K = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 6, 2, 8), np.float32)
BAD = [
    (dict(q=Q[0]), ValueError, r"`q` must have shape \(B, T, N, D\) with D > 0, got \(5, 4, 8\)\."),
    (dict(q=Q.astype(np.int32)), TypeError, "`q` must have one of the dtypes"),
    (dict(k=K.astype(np.float16)), TypeError, "`k` must have the dtype float32, got float16"),
    (dict(k=K[:1]), ValueError, r"`k` must have shape \(B, S, K, D\) with B = 2 as in `q`, got \(1, 6, 2, 8\)"),
    (dict(k=K[..., :7]), ValueError, "`k` must have as many features as `q`, 8, got 7"),
    (dict(v=K[:, :5]), ValueError, r"`v` must have the rows and heads of `k`, \(2, 6, 2\), got \(2, 5, 2\)"),
    (dict(q=Q[:, :, :3]), ValueError, "`k` must have a number of heads that divides that of `q`, 3, got 2"),
    (dict(layout="BTHD"), ValueError, "`layout` must be one of 'BTNH', 'BNTH', got 'BTHD'"),
    (dict(causal="lower"), ValueError, "`causal` must be one of 'top_left', 'bottom_right', got 'lower'"),
    (dict(window=-1), ValueError, "`window` must have no negative side"),
    (dict(window=(1, 2, 3)), ValueError, r"`window` must be a number or \(left, right\)"),
    (dict(window=1.5), TypeError, "`window` must be made of integers"),
    (dict(softcap=0.0), ValueError, "`softcap` must be a positive number, got 0.0"),
    (dict(scale="a"), TypeError, "`scale` must be a number known when traced"),
    (dict(bias=np.zeros((5, 6), np.float32)), ValueError, r"`bias` must have shape \(B or 1, N or 1, T or 1, S or 1\)"),
    (dict(bias=np.zeros((1, 1, 5, 6), bool)), TypeError, "`bias` must have one of the dtypes"),
    (dict(mask=np.zeros((1, 1, 5, 6), np.float32)), TypeError, "`mask` must have the dtype bool, got float32"),
    (dict(mask=np.zeros((2, 3, 5, 6), bool)), ValueError, r"`mask` must have shape .* = \(2, 4, 5, 6\), got \(2, 3"),
    (dict(key_lengths=np.zeros(2, np.float32)), TypeError, "`key_lengths` must be integers, got float32"),
    (dict(key_lengths=np.zeros(3, np.int32)), ValueError, r"`key_lengths` must have shape \(2,\), one for every seq"),
    (dict(query_segments=np.zeros((2, 5), np.int32)), ValueError, "`key_segments` must be given with `query_segments`"),
    (
        dict(query_segments=np.zeros((2, 5), np.int8), key_segments=np.zeros((2, 6), np.int32)),
        TypeError,
        "`key_segments` must have the dtype int8, got int32",
    ),
    (dict(sinks=np.zeros(3, np.float32)), ValueError, r"`sinks` must have shape \(4,\), one for each head of `q`"),
    (dict(alibi_slopes=np.zeros(4, np.int32)), TypeError, "`alibi_slopes` must have one of the dtypes"),
    (dict(dropout=1.0, dropout_key=1), ValueError, "`dropout` must be at least 0 and below 1, got 1.0"),
    (dict(dropout=0.5), ValueError, "`dropout_key` must be given with `dropout`"),
    (dict(dropout=0.5, dropout_key=np.zeros(3, np.uint32)), ValueError, "`dropout_key` must be one jax.random.key of"),
    (dict(return_logsumexp=1), TypeError, "`return_logsumexp` must be True or False"),
    (dict(engine="cudnn"), ValueError, "`engine` must be one of"),
]


@pytest.mark.parametrize(("given", "error", "text"), BAD)
def test_bad_input(given: dict[str, Any], error: type[Exception], text: str):
    arrays = {"q": Q, "k": K, "v": K} | {n: v for n, v in given.items() if n in ("q", "k", "v")}
    options = {n: v for n, v in given.items() if n not in arrays}
    with pytest.raises(error, match=text):
        dnn.attention(*arrays.values(), **options)


def test_bad_gradients():
    y, lse = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 5, 4), np.float32)
    with pytest.raises(ValueError, match=r"`dy` must have shape \(2, 5, 4, 8\), what `attention` returns"):
        dnn.attention_dgrad(y[:1], Q, K, K, y, lse)
    with pytest.raises(ValueError, match=r"`logsumexp` must have shape \(2, 5, 4\)"):
        dnn.attention_dgrad(y, Q, K, K, y, lse[..., None])
    with pytest.raises(ValueError, match=r"`logsumexp` must have shape \(2, 5\), one for each row of `y`, got \(2,\)"):
        dnn.merge_attention(np.zeros((2, 5, 4), np.float32), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="with at least one part"):
        dnn.merge_attention(np.zeros((0, 4), np.float32), np.zeros(0, np.float32))


def test_default_scale():
    assert math.isclose(
        float(dnn.attention(Q + 1, K + 1, K, return_logsumexp=True)[1][0, 0, 0]), 8**0.5 + math.log(6), rel_tol=1e-6
    )


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
