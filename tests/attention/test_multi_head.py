"""Multi-head attention with projections, against the definition of attention between products of matrices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference

RNG = np.random.default_rng(0)
B, T, S, N, P, E, F, O = 2, 5, 7, 3, 4, 2, 6, 8  # noqa: E741
X, K, V = (RNG.normal(size=(B, rows, F)) for rows in (T, S, S))
WEIGHTS = dnn.multi_head.Weights(
    *(RNG.normal(size=z) for z in ((F, N * P), (F, N * P), (F, N * E), (N * E, O))),
    *(RNG.normal(size=z) for z in (N * P, N * P, N * E, O)),
)
LOW, HIGH = np.array([0, 0, 1, 3, 2]), np.array([2, 7, 4, 3, 5])  # query 3 sees nothing


def defined(weights: Any, **options: Any) -> np.ndarray:
    split = lambda x: x.reshape(*x.shape[:2], N, -1)
    q, k, v = (split(x @ w + b) for x, w, b in zip((X, K, V), weights[:3], weights[4:7], strict=True))
    y = reference.attention(q, k, v, **options)
    return y.reshape(B, T, -1) @ weights.o + weights.o_bias


@pytest.mark.usefixtures("x64")
def test_values_and_gradients():
    mask = np.asarray(dnn.multi_head.windows(LOW, HIGH, S))
    np.testing.assert_array_equal(mask[0, 0, 2], [False, True, True, True, False, False, False])
    residual = RNG.normal(size=(B, T, O))
    run = lambda weights: dnn.multi_head.attention(X, K, V, weights, heads=N, residual=residual, mask=mask, scale=0.7)
    found = jax.jit(run)(WEIGHTS)
    wanted = defined(WEIGHTS, mask=mask, scale=0.7) + residual
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found[:, 3] - residual[:, 3], WEIGHTS.o_bias[None] * np.ones((B, 1)))
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(run(w) ** 2)))(jax.tree.map(jnp.asarray, WEIGHTS))
    along = jax.tree.map(lambda w: RNG.normal(size=w.shape), WEIGHTS)
    moved = lambda s: (
        (defined(jax.tree.map(lambda w, d: w + s * d, WEIGHTS, along), mask=mask, scale=0.7) + residual) ** 2
    ).sum()
    slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(along), strict=True)
    np.testing.assert_allclose(sum(float((g * d).sum()) for g, d in pairs), slope, rtol=1e-6)


def test_without_projections_every_head_has_all_features():
    x = X.astype(np.float32)
    y = dnn.multi_head.attention(x, x, x, dnn.multi_head.Weights(), heads=2)
    one = dnn.attention(*[x[:, :, None]] * 3)[:, :, 0]
    np.testing.assert_allclose(y, np.concatenate([one, one], -1), atol=1e-6)


def test_dropout_of_the_result():
    x, none = X.astype(np.float32), dnn.multi_head.Weights()
    whole = dnn.multi_head.attention(x, x, x, none, heads=1)
    thinned = dnn.multi_head.attention(x, x, x, none, heads=1, output_dropout=0.5, output_dropout_key=3)
    kept = np.asarray(dnn.dropout_mask(3, whole.shape, rate=0.5))
    np.testing.assert_allclose(thinned, 2 * np.asarray(whole) * kept, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(heads=0), "`heads` must be a positive number, got 0"),
        (dict(heads=5), "`weights.q` must have a multiple of 5 columns, got 12"),
        (dict(layout="BNTH"), "`layout` must not be given"),
        (dict(residual=np.zeros((B, T, 3), np.float32)), r"`residual` must have shape \(2, 5, 8\)"),
        (dict(weights=WEIGHTS._replace(q=np.zeros((3, 12), np.float32))), r"`weights.q` must have 6 rows"),
        (dict(weights=WEIGHTS._replace(o_bias=np.zeros(3))), r"`weights.o_bias` must have shape \(8,\)"),
    ],
)
def test_bad_input(change: dict[str, Any], text: str):
    given: dict[str, Any] = {"heads": N, "weights": WEIGHTS} | change
    x, k, v = (a.astype(np.float32) for a in (X, K, V))
    with pytest.raises(ValueError, match=text):
        dnn.multi_head.attention(x, k, v, given.pop("weights"), **given)
