"""What recurrent layers refuse, and the sentence that says so."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jaxdnn as dnn
from tests.rnn.layer_calls import D, H, N, T

ANY: Callable[[Any], Any] = lambda v: v
ZEROS: Callable[..., Any] = lambda *shape: np.zeros(shape, np.float32)
BOTH = "bidirectional"
X, W, R = ZEROS(N, T, D), ZEROS(D, 4 * H), ZEROS(H, 4 * H)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dnn.lstm(X[0], W, R), ValueError, r"`x` must have shape \(N, T, I\), got \(8, 3\)"),
        (lambda: dnn.lstm(X[0], W, R, layout="TNC"), ValueError, r"`x` must have shape \(T, N, I\), got"),
        (lambda: dnn.lstm_cell(X, W, R, ZEROS(N, H), ZEROS(N, H)), ValueError, r"`x` must have shape \(N, I\), got"),
        (lambda: dnn.lstm(X.astype(int), W, R), TypeError, "`x` must have one of the dtypes float32, bfloat16"),
        (
            lambda: dnn.lstm(X, W.astype(np.float16), R),
            TypeError,
            "`w` must have the dtype float32, got float16",
        ),
        (lambda: dnn.lstm(X, W.T, R), ValueError, r"`w` must have shape \(I, 4 H\) with I = 3 .* it looks transposed"),
        (lambda: dnn.gru(X, W, R), ValueError, r"`w` must have shape \(I, 3 H\) with I = 3 as in `x`, got \(3, 16\)\."),
        (lambda: dnn.rnn(X, W[0], R), ValueError, r"`w` must be a matrix, got shape \(16,\)"),
        (lambda: dnn.lstm(X, W, R[:3]), ValueError, r"`r` must have shape \(4, 16\), for 4 units, as `w` has"),
        (
            lambda: dnn.lstm(X, W, R, projection=ZEROS(4, 2)),
            ValueError,
            r"`r` must have shape \(2, 16\), .* states of 2",
        ),
        (
            lambda: dnn.lstm(X, W, R, projection=ZEROS(2, 4)),
            ValueError,
            r"`projection` must have shape \(H, P\) with H",
        ),
        (lambda: dnn.lstm(X, W, R, bias=ZEROS(2, 16)), ValueError, r"`bias` must have shape \(16,\), one for every"),
        (lambda: dnn.lstm(X, W, R, h0=ZEROS(1, N, H)), ValueError, r"`h0` must have shape \(5, 4\), one row for every"),
        (lambda: dnn.lstm(X, W, R, c0=ZEROS(N, 3)), ValueError, r"`c0` must have shape \(5, 4\)"),
        (lambda: dnn.lstm(X, W, R, h0=ZEROS(N, H).astype(np.float16)), TypeError, "`h0` must have the dtype"),
        (lambda: dnn.gru_cell(X[0], ZEROS(D, 12), ZEROS(H, 12), ZEROS(N, H)), ValueError, "`h` must have shape"),
        (lambda: dnn.lstm(X, W, R, lengths=ZEROS(N)), TypeError, "`lengths` must be integers, got float32"),
        (lambda: dnn.lstm(X, W, R, lengths=np.zeros((T, N), int)), ValueError, r"`lengths` must have shape \(5,\)"),
        (lambda: dnn.lstm(X, W, R, clip=ANY(3.0)), ValueError, r"`clip` must be None or a pair \(low, high\), got 3.0"),
        (lambda: dnn.lstm(X, W, R, clip=(1, -1)), ValueError, "`clip` must have a low limit that is at most the high"),
        (lambda: dnn.lstm(X, W, R, clip=(-1, math.nan)), ValueError, "`clip` must have a low limit that is at most"),
        (lambda: dnn.lstm(X, W, R, fill=ANY("nan")), TypeError, "`fill` must be a number known when traced, got 'nan'"),
        (lambda: dnn.lstm(X, W, R, layout="NCT"), ValueError, "`layout` must be one of 'NTC', 'TNC', got 'NCT'"),
        (
            lambda: dnn.lstm(X, W, R, direction="backward"),
            ValueError,
            "`direction` must be one of 'forward', 'reverse'",
        ),
        (
            lambda: dnn.gru(X, W, R, reset_gate=ANY(True)),
            ValueError,
            "`reset_gate` must be one of 'after', 'before', got True",
        ),
        (lambda: dnn.lstm(X, W, R, direction="bidirectional"), ValueError, r"`w` must have 3 axes for `direction` 'bi"),
        (
            lambda: dnn.rnn(X[:2], W[[0] * 6].reshape(2, D, -1), ZEROS(2, 16, 16), h0=ZEROS(2, 16), direction=BOTH),
            ValueError,
            r"`h0` must have 3 axes for `direction` 'bidirectional', the first of 2, .* got shape \(2, 16\)",
        ),
        (lambda: dnn.lstm(X, W, ANY(None)), TypeError, "`r` must be an array, got NoneType"),
        (lambda: dnn.rnn_cell(X[0], W, ZEROS(16, 16), ANY(None)), TypeError, "`h` must be an array, got NoneType"),
        (lambda: dnn.rnn(X, W, R, activation="gelu"), ValueError, "`activation` must be one of 'tanh', 'relu', got"),
        (lambda: dnn.lstm(X, W, R, resets=np.zeros((N, T))), TypeError, "`resets` must be booleans, got float32"),
        (
            lambda: dnn.lstm(X, W, R, resets=np.zeros((T, N), bool)),
            ValueError,
            r"`resets` must have shape \(5, 8\), one",
        ),
        (lambda: dnn.lstm(X, None, R), ValueError, r"`r` must have shape \(3, 12\), for 3 units, as `x` has columns"),
        (
            lambda: dnn.lstm(X, W, ZEROS(3, 2, 8)),
            ValueError,
            "`r` must have a number of heads that divides the 4 units, g",
        ),
        (lambda: dnn.lstm(X, W, ZEROS(2, 4, 16)), ValueError, r"`r` must have shape \(2, 2, 8\), for 4 units"),
        (
            lambda: dnn.lstm(X, W, ZEROS(2, 1, 8), projection=ZEROS(4, 2)),
            ValueError,
            "`projection` must be a matrix for each of the heads that `r` has, got shape",
        ),
        (
            lambda: dnn.lstm(X, W, [R, R]),
            ValueError,
            "`w` must be None or a sequence of 2, one for every layer, as `r` is",
        ),
        (lambda: dnn.lstm(X, [W], [R, R]), ValueError, "`w` must be .* as `r` is, got one of 1"),
        (lambda: dnn.lstm(X, [], []), ValueError, "`r` must have a matrix for every layer, of which there must be one"),
        (lambda: dnn.lstm(X, [W, W], [R, R]), ValueError, r"In layer 1: `w` must have shape \(I, 4 H\) with I = 4"),
        (
            lambda: dnn.lstm(X, W, R, dropout=0.5),
            ValueError,
            "`dropout_key` must be given with a `dropout` of 0.5, got",
        ),
        (lambda: dnn.lstm(X, W, R, dropout=1.5, dropout_key=1), ValueError, "`dropout` must be from 0 to 1, got 1.5"),
        (lambda: dnn.lstm(X, W, R, engine="cudnn"), ValueError, "`engine` must be one of"),
        (lambda: dnn.lstm(X, W, R, engine=X), ValueError, "`engine` must be one of .* got an array of float32"),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()
