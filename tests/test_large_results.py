"""Results of 2^63 elements and more, at which XLA ends the process, are refused when a call is traced, eager or not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn

SIDE = 2**30 - 1
LARGE = (1, SIDE, SIDE, SIDE, 16)
VOLUME: dict[str, Any] = {"layout": "NDHWC"}


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


CALLS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "conv": (lambda x, w: dnn.conv(x, w, padding=SIDE, **VOLUME), (ones(1, 1, 1, 1, 1),) * 2),
    "conv_dgrad": (
        lambda dy, w: dnn.conv_dgrad(dy, w, LARGE, stride=SIDE, **VOLUME),
        (ones(1, 1, 1, 1, 1), ones(1, 1, 1, 16, 1)),
    ),
    "conv_transpose": (
        lambda x, w: dnn.conv_transpose(x, w, stride=2**27, **VOLUME),
        (ones(1, 9, 9, 9, 1), ones(1, 1, 1, 16, 1)),
    ),
    "adaptive_pool": (lambda x: dnn.adaptive_pool(x, output_sizes=SIDE, **VOLUME), (ones(1, 2, 2, 2, 16),)),
    "col2im": (lambda y: dnn.col2im(y, LARGE, window=1, stride=SIDE, **VOLUME), (ones(1, 1, 1, 1, 16),)),
    "dropout_mask": (lambda key: dnn.dropout_mask(key, LARGE), (np.zeros(2, np.uint32),)),
    "im2col": (lambda x: dnn.im2col(x, window=1, padding=SIDE, **VOLUME), (ones(1, 1, 1, 1, 16),)),
    "resample": (lambda x: dnn.resample(x, output_sizes=(SIDE,) * 3, **VOLUME), (ones(1, 2, 2, 2, 16),)),
    "resample_dgrad": (lambda dy: dnn.resample_dgrad(dy, LARGE, **VOLUME), (ones(1, 2, 2, 2, 16),)),
    "transform": (lambda x: dnn.transform(x, padding=((SIDE, SIDE),) * 3, **VOLUME), (ones(1, 1, 1, 1, 16),)),
    "unpool": (
        lambda y, i: dnn.unpool(y, i, LARGE, window=1, stride=SIDE, **VOLUME),
        (ones(1, 1, 1, 1, 16), np.zeros((1, 1, 1, 1, 16), np.int32)),
    ),
}


@pytest.mark.parametrize("op", CALLS)
def test_by_an_argument(op: str):
    function, arrays = CALLS[op]
    for run in (jax.eval_shape, lambda f, *a: f(*map(jnp.asarray, a))):
        with pytest.raises(ValueError, match=r"^`\w+` must give fewer than 2\^63 elements, got shape"):
            run(function, *arrays)


@pytest.mark.parametrize("function", [dnn.softmax, dnn.layer_norm, dnn.activation, dnn.pool, dnn.scale])
def test_by_the_operand(function: Callable[..., Any]):
    x = jax.ShapeDtypeStruct((2, 2**22, 2**22, 2**20), jnp.float32)
    with pytest.raises(ValueError, match=r"^`\w+` must give fewer than 2\^63 elements, got shape \(\d+, "):
        jax.eval_shape(function, x)


def test_by_vmap():
    """Of the convolution itself, and of its gradient, whose result alone is large."""
    x = jax.ShapeDtypeStruct((2**31 - 1, 2**31 - 1, 1, 1, 1), jnp.float32)
    convolve = lambda v: dnn.conv(v, jnp.ones((1, 1, 1, 16)))
    with pytest.raises(ValueError, match=r"^`conv` must give fewer than 2\^63 elements"):
        jax.eval_shape(jax.vmap(convolve), x)
