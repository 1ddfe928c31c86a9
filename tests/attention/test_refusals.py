"""What attention refuses, and the sentence that says so."""

import math
from typing import Any

import numpy as np
import pytest

import jaxdnn as dnn

# ---- errors ----------------------------------------------------------------------------------------------------------

Q, K = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 6, 2, 8), np.float32)
BAD = [
    (
        dict(q=Q[0]),
        ValueError,
        r"`q` must have shape \(B, T, N, D\) with D > 0, got \(5, 4, 8\) \(one example .* `q\[None\]`\)\.",
    ),
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
    (dict(mask=np.zeros((1, 1, 5, 6), np.float32)), TypeError, "`mask` must be bool, .* are `bias`, got float32"),
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
