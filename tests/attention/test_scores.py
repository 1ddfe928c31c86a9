"""Functions of scores that the user writes, block masks, and what else is returned: on meshes, captured, refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdnn as dnn
import jaxdnn_reference as reference

RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=(8, 16, n, d)) for n, d in ((16, 5), (8, 5), (8, 6)))
TABLE, LABELS = RNG.normal(size=(16, 32)), np.arange(16) % 3


def changed(x: Any, sequence: Any, head: Any, query: Any, key: Any, table: Any, labels: Any) -> Any:
    """Distances and kinds of tokens count, and in each sequence another way."""
    same = (labels[query] == labels[key]).astype(x.dtype)
    return x + table[head, key - query + 16] * (1 + 0.25 * sequence.astype(x.dtype)) + 0.5 * same


def captured(table: Any) -> Any:
    """The same, with its arrays captured."""
    return lambda x, b, h, i, j: changed(x, b, h, i, j, table, jnp.asarray(LABELS))


@pytest.mark.usefixtures("x64")
def test_captured_arrays_are_those_that_are_passed():
    def run(q: Any, table: Any) -> Any:
        return jnp.sum(jnp.sin(dnn.attention(q, K, V, score_fn=captured(table), causal=True)))

    def passed(q: Any, table: Any) -> Any:
        return jnp.sum(jnp.sin(dnn.attention(q, K, V, score_fn=changed, score_arrays=(table, LABELS), causal=True)))

    found, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(Q, TABLE) for f in (run, passed))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    y = reference.attention(Q, K, V, score_fn=changed, score_arrays=(TABLE, LABELS), causal=True)
    np.testing.assert_allclose(found[0], np.sin(y).sum(), rtol=1e-12)
    tables = np.stack([TABLE, 2 * TABLE])
    of_each = jax.jit(jax.vmap(jax.grad(run, 1), (None, 0)))(Q, tables)
    np.testing.assert_allclose(of_each[0], found[1][1], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(of_each[1], jax.grad(run, 1)(Q, tables[1]), rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("x64")
def test_tangents_alone_may_be_mapped():
    """Of arrays that the function takes and captures: Jacobians forward are those backward, of gradients too."""
    q, k, v = (a[:2, :3, :2] for a in (Q, K, V))

    def loss(scales: Any, shift: Any) -> Any:
        f = lambda x, b, h, i, j, scales: scales[h] * x + jnp.sin(shift) * scales[j % 2] * x * x
        return jnp.sum(jnp.cos(dnn.attention(q, k, v, score_fn=f, score_arrays=(scales,))))

    at = (RNG.normal(size=2), RNG.normal())
    backward = jax.grad(loss, (0, 1))
    for f, back in ((loss, backward), (lambda *a: backward(*a)[0], jax.jacrev(lambda *a: backward(*a)[0], (0, 1)))):
        for a, b in zip(jax.jacfwd(f, (0, 1))(*at), back(*at), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "queries", "heads"])
def test_meshes(axis: int):
    """Each device knows which sequences, heads and queries it has."""
    large = RNG.random((8, 1, 4, 2)) < 0.7
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))

    def both(q: Any, k: Any, v: Any, table: Any) -> Any:
        def run(q: Any, k: Any, v: Any, table: Any) -> Any:
            options: dict[str, Any] = dict(score_fn=changed, score_arrays=(table, LABELS))
            return dnn.attention(q, k, v, **options, block_mask=large, block_mask_tile=(5, 9))

        return run(q, k, v, table), jax.grad(lambda *a: jnp.sum(jnp.sin(run(*a))), (0, 1, 2, 3))(q, k, v, table)

    def placed(x: Any, i: int) -> Any:
        names: list[Any] = [None] * 4
        names[axis] = "x"
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*names if i == 0 or axis != 1 else ())))

    found = jax.jit(both)(*(placed(x, i) for i, x in enumerate((Q, K, V))), TABLE)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(both)(Q, K, V, TABLE)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def test_what_is_not_seen_does_not_show():
    """NaN of keys that are masked reaches no gradient of the function's arrays."""
    q, k, v = (a[:1, :4].astype(np.float32) for a in (Q, K, V))
    k[:, 3] = np.nan

    def run(scale: Any) -> Any:
        options: dict[str, Any] = dict(score_fn=lambda x, b, h, i, j, s: s * x, score_arrays=(scale,))
        return jnp.sum(dnn.attention(q, k, v, key_lengths=np.array([3]), **options))

    value, gradient = jax.value_and_grad(run)(jnp.float32(1.5))
    assert np.isfinite(value)
    assert np.isfinite(gradient)


def test_the_maximum_has_no_gradient():
    q, k, v = (jnp.asarray(a[:1], jnp.float32) for a in (Q, K, V))
    y, lse, m = dnn.attention(q, k, v, causal=True, sinks=jnp.full(16, 9.0), return_logsumexp=True, return_maximum=True)
    assert (y.shape, lse.shape, m.shape, m.dtype) == ((1, 16, 16, 6), (1, 16, 16), (1, 16, 16), jnp.float32)
    np.testing.assert_allclose(
        m[:, 0], jnp.einsum("bnd,bnd->bn", q[:, 0], jnp.repeat(k[:, 0], 2, 1)) * 5**-0.5, rtol=1e-5
    )
    gradient = jax.grad(lambda q: jnp.sum(dnn.attention(q, k, v, return_maximum=True)[1]))(q)
    assert (np.asarray(gradient) == 0).all()


def test_a_result_in_float32_and_its_gradients():
    q, k, v = (jnp.asarray(a[:1], jnp.bfloat16) for a in (Q, K, V))
    y, lse = dnn.attention(q, k, v, out_dtype="float32", return_logsumexp=True)
    assert y.dtype == jnp.float32
    assert (y.astype(jnp.bfloat16) == dnn.attention(q, k, v)).all()
    dy = jnp.asarray(RNG.normal(size=y.shape), jnp.float32)
    found = dnn.attention_dgrad(dy, q, k, v, y, lse)
    wanted = jax.vjp(lambda *a: dnn.attention(*a, out_dtype=jnp.float32), q, k, v)[1](dy)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))


BAD = [
    (dict(score_fn=3), TypeError, "`score_fn` must be a function of a score and its places, got 3"),
    (dict(score_arrays=(1.0,)), ValueError, "`score_arrays` must be given with `score_fn`"),
    (dict(score_arrays=3.0), TypeError, "`score_arrays` must be a sequence of arrays, got 3.0"),
    (dict(score_fn=lambda x, b, h, i, j: (x, x)), ValueError, "`score_fn` must return one score"),
    (dict(score_fn=lambda x, b, h, i, j: i), ValueError, r"`score_fn` must return one score.*got int32\[\]"),
    (dict(block_mask=np.ones((1, 1, 2, 2))), TypeError, "`block_mask` must have the dtype bool"),
    (
        dict(block_mask=np.ones((1, 1, 2, 2), bool)),
        ValueError,
        r"`block_mask` must have shape \(B or 1, N or 1, 1, 1\)",
    ),
    (dict(block_mask_tile=0), ValueError, "`block_mask_tile` must be a positive number, or"),
    (dict(split=0), ValueError, "`split` must be a positive number of keys, got 0"),
    (dict(score_fn=len), TypeError, r"`score_fn` must take 5 arguments, \(score, .*got a function of \(obj, /\)"),
    (dict(score_fn=lambda x, b, h, i, j: x, score_arrays=(1.0,)), TypeError, "`score_fn` must take 6 arguments"),
    (dict(scale=float("nan")), ValueError, "`scale` must be a finite number, got nan"),
    (dict(scale=-np.inf), ValueError, "`scale` must be a finite number, got -inf"),
    (dict(out_dtype="float16"), ValueError, "`out_dtype` must be one of float32 here, got 'float16'"),
    (dict(return_maximum=1), TypeError, "`return_maximum` must be True or False"),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD)
def test_bad_input(options: dict[str, Any], error: type[Exception], text: str):
    q, k, v = (a[:1].astype(np.float32) for a in (Q, K, V))
    with pytest.raises(error, match=text):
        dnn.attention(q, k, v, **options)


def test_a_function_has_no_stated_order():
    q, k, v = (a[:1].astype(np.float32) for a in (Q, K, V))
    with pytest.raises(NotImplementedError, match="a function that the user wrote adds in no stated order"):
        dnn.attention(q, k, v, score_fn=lambda x, *_: 2 * x, determinism="mesh_invariant")
    assert "xla" in str(dnn.explain(dnn.attention, q, k, v, score_fn=lambda x, *_: 2 * x))
