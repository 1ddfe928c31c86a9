"""Arrays of 64 bits outside of JAX's 64-bit mode: NumPy's are read as JAX reads them, JAX's own are an error.

`tests/test_api.py` has NumPy's arrays of floats.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.cases import example

EXAMPLES = {name: found for name, found in example.first().items() if found.operands}
# Made of JAX's own lax.pad and lax.dot_general, whose transposes need the mode that they were traced in (to JAX 0.12).
IN_THE_MODE = ("im2col", "col2im", "affine_grid", "spatial_transformer")
REFUSED = "must have a dtype of JAX's 32-bit mode, got float64; enable jax_enable_x64 for the call, or convert it."

X = np.random.default_rng(0).standard_normal((2, 6, 7)).astype(np.float32)
LABELS = np.array([[1, 2, 3], [1, 1, 0]])
LENGTHS = np.array([6, 5])
W, R = np.ones((7, 16), np.float32), np.ones((4, 16), np.float32)
WITH_INTEGERS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "ctc_loss": lambda of: dnn.ctc_loss(X, of(LABELS), blank=-1, logit_lengths=of(LENGTHS), label_lengths=of([3, 2])),
    "ctc_posterior": lambda of: dnn.ctc_posterior(X, of(LABELS), blank=-1, logit_lengths=of(LENGTHS)),
    "ctc_align": lambda of: dnn.ctc_align(X, of(LABELS), blank=-1, label_lengths=of([3, 2])),
    "ctc_lengths": lambda of: dnn.ctc_lengths(of(LABELS == 0)),
    "linear_cross_entropy": lambda of: dnn.linear_cross_entropy(X[0], W, of([1, 0, 2, 3, 4, 1])),
    "lstm": lambda of: dnn.lstm(X, W, R, lengths=of(LENGTHS)),
    "unpool": lambda of: dnn.unpool(np.ones((1, 2, 2, 3), np.float32), of(np.zeros((1, 2, 2, 3))), (1, 4, 4, 3)),
    "scale": lambda of: dnn.scale(of(LABELS), alpha=2),
    "reduce": lambda of: dnn.reduce(of(LABELS)),
    "bn_finalize": lambda of: dnn.bn_finalize(np.ones(3, np.float32), np.full(3, 2, np.float32), of(10)),
}  # fmt: skip


def wide(values: Any, dtype: Any = np.float64) -> jax.Array:
    """An array of JAX of 64 bits."""
    with jax.enable_x64(True):
        return jnp.asarray(values, dtype)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_array_of_jax_of_64_bits_is_refused(name: str):
    call = lambda *operands: EXAMPLES[name].call(getattr(dnn, name), *operands)
    arrays = [wide(v) for v in EXAMPLES[name].data()]
    for run in (call, jax.jit(call), lambda *given: jax.eval_shape(call, *given)):
        with pytest.raises(TypeError, match=f"^`[a-z_0-9]*` {REFUSED}"):
            run(*arrays)


@pytest.mark.parametrize("name", WITH_INTEGERS)
def test_integers_of_64_bits(name: str):
    """Of NumPy they are those of 32 bits, eagerly and as operands of jit; of JAX they are refused."""
    call = WITH_INTEGERS[name]
    wanted, found = (call(lambda v, dtype=dtype: np.asarray(v, dtype)) for dtype in (np.int32, np.int64))
    lists = call(lambda v: np.asarray(v).astype(int).tolist()) if name != "bn_finalize" else wanted
    for a, b, c in zip(*map(jax.tree.leaves, (wanted, found, lists)), strict=True):
        assert a.dtype == b.dtype == c.dtype
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    with pytest.raises(TypeError, match="must have a dtype of JAX's 32-bit mode, got int64; enable"):
        call(lambda v: wide(v, np.int64))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in IN_THE_MODE])
def test_a_derivative_made_in_the_mode_works_outside_of_it(name: str):
    """With the values that it has inside, `jax.linearize`'s too."""
    arrays = [wide(v) for v in EXAMPLES[name].data()]
    call = lambda *operands: EXAMPLES[name].call(getattr(dnn, name), *operands)
    with jax.enable_x64(True):
        result, vjp = jax.vjp(call, *arrays)
        cotangents = jax.tree.map(
            lambda y: jnp.ones_like(y) if y.dtype == np.float64 else np.zeros(y.shape, jax.dtypes.float0), result
        )
        linear = jax.linearize(call, *arrays)[1]
        wanted = vjp(cotangents), linear(*arrays)
    found = vjp(cotangents), linear(*arrays)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
