"""The bound of an epilogue holds, and is not far from what is seen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdnn._src.activation import epilogues
from jaxdnn._src.activation.bounds import Epilogue
from jaxdnn._src.activation.formulas import ACTIVATIONS, read_activation
from jaxdnn._src.core.formats import FORMATS
from jaxdnn_reference.activation import activate

EXACT_ACTIVATIONS = (None, "identity", "relu", "clipped_relu")
PARAMETERS = (("elu", 2.5), ("celu", 2.5), ("swish", 1.7), ("softplus", 3.0), ("leaky_relu", 0.3))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS, *PARAMETERS], ids=str)
def test_epilogue_bound_holds_on_this_platform(activation: Any):
    """Two hundred thousand arguments over all exponents, of which c is known up to an error that is planted."""
    rng = np.random.default_rng(7)
    c = np.ldexp(1 + rng.random(80000), rng.integers(-45, 8, 80000)) * rng.choice([-1, 1], 80000)
    c = np.concatenate([c, rng.uniform(-12, 12, 80000), rng.uniform(-110, 110, 40000)])
    planted = (np.abs(c) * 2.0**-22 * rng.uniform(-1, 1, c.size)).astype(np.float64)
    computed = (c + planted).astype(np.float32)
    error = np.abs(computed - c)
    prior, residual, bias = (rng.standard_normal(c.size).astype(np.float32) for _ in range(3))
    flush = 2 * FORMATS["float32"].smallest_normal
    for alpha, beta, terms in ((1.0, 0.0, ()), (1.7, 0.0, ()), (-0.3, 0.6, (residual, bias))):
        spec = epilogues.Epilogue(
            alpha, beta, beta != 0, bool(terms), bool(terms), activation=read_activation(activation)
        )
        operands = (*((prior,) if beta else ()), *terms[::-1])
        out = jax.jit(lambda *a, s=spec: apply(s, *a))(computed, *operands)
        z = alpha * c + (beta * prior.astype(np.float64) if beta else 0.0) + sum(t.astype(np.float64) for t in terms)
        e = Epilogue(alpha, beta, activation).error(c, error, *terms, prior=prior)
        assert (np.abs(np.asarray(out, np.float64) - activate(z, activation)) <= e + flush).all()
        # With nothing planted, the function's own error alone must stay below the bound and come near it somewhere.
        if not terms and alpha == 1 and activation not in EXACT_ACTIVATIONS:
            own = Epilogue(activation=activation).error(computed.astype(np.float64), np.zeros_like(c))
            distance = np.abs(np.asarray(out, np.float64) - activate(computed.astype(np.float64), activation))
            assert 0.02 < (distance / own).max() <= 1


def apply(spec: epilogues.Epilogue, c: jax.Array, *operands: jax.Array) -> jax.Array:
    """The library's own epilogue, with the terms elementwise: a bias along a channel axis of length c.size."""
    return epilogues.apply(spec, c, operands, channel=0, out_dtype=jnp.float32)


def test_beta_zero_does_not_read_the_prior():
    c = np.ones(3)
    e = Epilogue(beta=0.0).error(c, c, prior=np.full(3, np.nan))
    np.testing.assert_array_equal(e, c)


def test_a_relu_that_is_surely_closed_is_exact():
    e = Epilogue(activation="relu").error(np.array([-1.0, -1e-9, 1.0]), np.full(3, 1e-6))
    np.testing.assert_array_equal(e, [0, 1e-6, 1e-6])
