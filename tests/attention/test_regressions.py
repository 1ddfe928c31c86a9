"""What other attention kernels got wrong, in small: each test names the threads where users reported it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference

RNG = np.random.default_rng(0)


def operands(t: int = 6, s: int = 6, n: int = 4, h: int = 2, d: int = 4) -> Any:
    return tuple(RNG.normal(size=(2, *z)).astype(np.float32) for z in ((t, n, d), (s, h, d), (s, h, d)))


def gradients(options: dict[str, Any], *arrays: Any) -> Any:
    loss = lambda *a: jnp.sum(jnp.sin(dnn.attention(*a, **options).astype(jnp.float32)))
    return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)


def agrees(options: dict[str, Any], *arrays: Any, atol: float = 2e-6) -> None:
    """Values and gradients are the definition's."""
    q, k, v = arrays
    y, lse = dnn.attention(q, k, v, **options, return_logsumexp=True)
    golden, of_lse = reference.attention(q, k, v, **options, return_logsumexp=True)
    np.testing.assert_allclose(y, golden, atol=atol)
    np.testing.assert_allclose(lse, of_lse, atol=atol, rtol=1e-6)
    wanted = reference.attention_dgrad(np.cos(golden), q, k, v, golden, of_lse, **options)
    for found, known in zip(gradients(options, q, k, v), wanted, strict=False):
        np.testing.assert_allclose(found, known, atol=10 * atol)


def test_a_window_to_the_left_sees_no_future():
    """jax#39576; flash-attention#1133, #1116; TransformerEngine#3528."""
    q, k, v = operands()
    causal = dnn.attention(q, k, v, causal=True)
    for window in ((5, 0), (None, 0), (2**40, 0)):
        np.testing.assert_allclose(dnn.attention(q, k, v, window=window), causal, atol=1e-6)
    np.testing.assert_allclose(
        dnn.attention(q, k, v, window=(None, None)), dnn.attention(q, k, v, window=(5, 5)), atol=1e-6
    )
    np.testing.assert_allclose(dnn.attention(q, k, v, window=0)[:, :, 0], v[:, :, 0], atol=1e-6)


@pytest.mark.parametrize("sizes", [(9, 4), (9, 1), (1, 9), (1, 1)], ids=str)
def test_bottom_right_with_more_queries_than_keys(sizes: tuple[int, int]):
    """flash-attention#443, #334, #2199; cudnn-frontend#683; Sq = 1 and Skv = 1: cudnn-frontend#160."""
    q, k, v = operands(*sizes)
    agrees({"causal": "bottom_right"}, q, k, v)
    y = dnn.attention(q, k, v, causal="bottom_right")
    assert (np.asarray(y)[:, : max(sizes[0] - sizes[1], 0)] == 0).all()


def test_a_cap_does_not_make_padding_finite():
    """llama.cpp#29034."""
    q, k, v = operands()
    lengths = np.array([2, 6])
    agrees({"softcap": 0.5, "key_lengths": lengths}, q, k, v)
    k[0, 2:], v[0, 2:] = np.nan, np.inf
    assert np.isfinite(dnn.attention(q, k, v, softcap=0.5, key_lengths=lengths)).all()


def test_a_bias_that_is_minus_infinity():
    """As a mask that leaves rows and parts of rows."""
    q, k, v = operands()
    bias = np.zeros((1, 1, 6, 6), np.float32)
    bias[0, 0, 2], bias[0, 0, 3, 1:] = -np.inf, -np.inf
    y, lse = dnn.attention(q, k, v, bias=bias, return_logsumexp=True)
    assert (np.asarray(y)[:, 2] == 0).all()
    assert (np.asarray(lse)[:, 2] == -np.inf).all()
    np.testing.assert_allclose(np.asarray(y)[:, 3], np.repeat(v[:, 0], 2, 1), atol=1e-6)
    assert all(np.isfinite(g).all() for g in gradients({"bias": bias}, q, k, v))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_have_the_dtypes_of_their_operands(dtype: str):
    """Mosaic's attention declared dk and dv float16 whatever the inputs were; the logsumexp stays in float32."""
    q, k, v = (jnp.asarray(a, dtype) for a in operands())
    assert [g.dtype for g in gradients({"causal": True}, q, k, v)] == [dtype] * 3
    assert dnn.attention(q, k, v, return_logsumexp=True)[1].dtype == jnp.float32


def test_shared_heads_with_what_each_head_has_of_its_own():
    """Tokamax's dk, dv mixed up the heads of per-head biases and masks."""
    q, k, v = operands(n=6, h=2)
    bias, mask = RNG.normal(size=(1, 6, 6, 6)).astype(np.float32), RNG.random((1, 6, 6, 6)) < 0.7
    agrees({"bias": bias, "mask": mask}, q, k, v)


def test_sums_over_shared_heads_are_rounded_once():
    """flash-attention#2864: each head's part was rounded before they were added."""
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in operands(n=16, h=1))
    exact = gradients({}, *(a.astype(jnp.float32) for a in (q, k, v)))
    for found, wanted in zip(gradients({}, q, k, v)[1:], exact[1:], strict=True):
        wanted = np.asarray(wanted)
        # That of y and of dy in bfloat16 adds to the last rounding; 16 roundings of heads would be more than this.
        assert (abs(np.asarray(found, np.float32) - wanted) < 2.0**-7 * abs(wanted).max()).all()


def test_sequences_without_keys_or_queries_beside_others():
    """flash-attention#2562, #1537, #1713, #2421: memory that nobody wrote."""
    q, k, v = operands()
    for name in ("key_lengths", "query_lengths"):
        options = {name: np.array([0, 5])}
        agrees(options, q, k, v)
        for g in gradients(options, q, k, v):
            assert (np.asarray(g)[0] == 0).all()


@pytest.mark.parametrize("rows", [63, 64, 65, 127, 129, 300])
def test_strongly_negative_scores_at_the_edges_of_tiles(rows: int):
    """pytorch#196678, cudnn-frontend#1072, #160: keys behind the last one counted as scores of 0."""
    q = np.full((1, rows, 1, 8), -6, np.float32)
    k, v = np.full((1, rows, 1, 8), 6, np.float32), np.arange(rows * 2, dtype=np.float32).reshape(1, rows, 1, 2)
    y, lse = dnn.attention(q, k, v, causal=True, return_logsumexp=True)
    np.testing.assert_allclose(y[0, :, 0, 0], np.arange(rows), rtol=1e-5)
    np.testing.assert_allclose(lse[0, :, 0], -288 / 8**0.5 + np.log1p(np.arange(rows)), rtol=1e-5)


def test_large_logits_in_bfloat16():
    """Scores of 3e4 and -3e4: one key has all the weight."""
    q = jnp.full((1, 3, 1, 16), 125, jnp.bfloat16)
    k = q * jnp.array([1, -1, 0], jnp.bfloat16)[None, :, None, None]
    v = jnp.arange(6, dtype=jnp.bfloat16).reshape(1, 3, 1, 2)
    np.testing.assert_array_equal(dnn.attention(q, k, v)[0, :, 0].astype(np.float32), [[0, 1]] * 3)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients({}, q, k, v))


def test_the_gradient_of_the_logsumexp_counts():
    """That of x is P; it was ignored where the logsumexp is an extra result."""
    q, k, v = operands()
    p = jax.grad(lambda bias: jnp.sum(dnn.attention(q, k, v, bias=bias, return_logsumexp=True)[1]))(
        np.zeros((2, 4, 6, 6), np.float32)
    )
    np.testing.assert_allclose(jnp.sum(p, -1), 1, atol=1e-6)
    np.testing.assert_allclose(jnp.einsum("bnts,bsnd->btnd", p, np.repeat(v, 2, 2)), dnn.attention(q, k, v), atol=1e-6)


def test_rows_with_several_maxima_are_not_biased():
    """arXiv 2510.04212: rounding of results with repeated maxima. The mean signed error is 0 within four deviations."""
    q = jnp.zeros((1, 512, 1, 8), jnp.bfloat16)
    v = jnp.asarray(-1.5 + 0.1 * RNG.normal(size=(1, 512, 1, 64)), jnp.bfloat16)
    mask = RNG.random((1, 1, 512, 512)) < 0.02
    found = np.asarray(dnn.attention(q, q, v, mask=mask), np.float64)
    zero, exact = (np.asarray(a, np.float64) for a in (q, v))
    error = found - reference.attention(zero, zero, exact, mask=mask)
    seen = mask[0, 0].any(-1)
    assert abs(error[:, seen].mean()) < 4 * error[:, seen].std() / error[:, seen].size ** 0.5
