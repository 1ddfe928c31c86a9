"""Attention: every option against a dense formula in float64, alone and together; derivatives; what is not seen."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.attention import arithmetic, walk
from tests.attention.calls import arrays, close, dense, drawn, named, ours, plain

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
    along, back = (lambda h, a: jax.jvp(h, a, tangents)[1]), lambda h, a: jax.vjp(h, *a)[1](tangents)
    wanted, *found = jax.jit(lambda *a: (along(g, a), along(f, a), back(f, a)))(*every)
    for each in found:
        close(each, wanted, 1e-10)


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
