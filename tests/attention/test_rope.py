"""Rotary embedding: both kinds of pairs, part of the features, positions of any size; its transpose; errors."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 3, 8))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("pairs", "side", "width", "layout"),
    [
        *itertools.product(["half", "interleaved"], ["first", "last"], [None, 4], ["BTNH", "BNTH"]),
        ("half", "last", 0, "BTNH"),
    ],
)
def test_values(pairs: str, side: str, width: int | None, layout: str):
    options: dict[str, Any] = dict(pairs=pairs, side=side, width=width, layout=layout, base=50.0, scale=1.5)
    x = X if layout == "BTNH" else np.swapaxes(X, 1, 2)
    for positions in (None, np.array([3, -4, 1000003, 0, 2**31 - 1]), RNG.integers(0, 100, (2, 5)), RNG.normal(size=5)):
        found = dnn.rope(x, positions=positions, **options)
        wanted = reference.rope(x, positions=positions, **options)
        # The definition multiplies in float64, which is off by 2^-53 of the angle; ours is exact modulo a turn.
        largest = 0.0 if positions is None else np.abs(positions).max()
        np.testing.assert_allclose(found, wanted, atol=1e-14 + 4 * largest * 2.0**-53)


def test_as_a_product_of_complex_numbers():
    """Pairs that lie side by side, as the original Llama has them."""
    x, angle = X[..., 0::2] + 1j * X[..., 1::2], np.arange(5)[:, None] * 10000.0 ** (-np.arange(4) / 4)
    turned = x * np.exp(1j * angle)[:, None]
    wanted = np.stack([turned.real, turned.imag], -1).reshape(X.shape)
    np.testing.assert_allclose(dnn.rope(X.astype(np.float32), pairs="interleaved"), wanted, atol=2e-6)


def test_products_depend_on_the_distance_alone():
    q, k = (jnp.asarray(RNG.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))
    at = lambda x, i: dnn.rope(x, positions=jnp.array([i]))
    found = [float(jnp.vdot(at(q, i + 7), at(k, i))) for i in (0, 5, 100_000, 2_000_000_000)]
    np.testing.assert_allclose(found, found[0], atol=1e-5)


def test_the_error_does_not_grow_with_the_position():
    x = np.ones((1, 1, 1, 64), np.float32)
    for position in (10, 10_000, 10_000_000, 2**31 - 1, -(2**31)):
        found = dnn.rope(x, positions=np.array([position], np.int32))
        wanted = reference.rope(x.astype(np.float64), positions=np.array([position]))
        assert abs(np.asarray(found, np.float64) - wanted).max() < 8e-7


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_derivatives(pairs: str):
    """Linear, and its transpose rotates back."""
    x = jnp.asarray(X, jnp.float32)
    options: dict[str, Any] = dict(pairs=pairs, width=6, positions=jnp.arange(3, 8))
    f = lambda x: dnn.rope(x, **options)
    y, back = jax.vjp(f, x)
    np.testing.assert_allclose(back(y)[0], x, atol=1e-6)  # a rotation is orthogonal
    np.testing.assert_allclose(jax.jvp(f, (x,), (2 * x,))[1], 2 * y, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(f)(jnp.stack([x, 2 * x]))[1], 2 * y, atol=1e-6)
    of_positions = jax.grad(lambda p: jnp.sum(dnn.rope(x, positions=p) ** 3))(jnp.arange(5.0))
    step = 1e-2
    moved = lambda s: (np.asarray(reference.rope(X, positions=np.arange(5.0) + s * np.eye(5)[2])) ** 3).sum()
    np.testing.assert_allclose(of_positions[2], (moved(step) - moved(-step)) / (2 * step), rtol=1e-2)


def test_bits_depend_on_the_row_alone():
    x = jnp.asarray(RNG.normal(size=(3, 40, 2, 6)), jnp.bfloat16)
    whole = dnn.rope(x, determinism="mesh_invariant")
    one = dnn.rope(x[1:2, 17:18], positions=jnp.array([17]), determinism="mesh_invariant")
    np.testing.assert_array_equal(whole[1:2, 17:18].astype(np.float32), one.astype(np.float32))


def test_stretched_frequencies():
    w = [1.0, 0.3, 0.05, 0.001]
    found = dnn.rope(X.astype(np.float32), frequencies=w)
    np.testing.assert_allclose(found, reference.rope(X, frequencies=w), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (dict(width=3), ValueError, "`width` must be an even number of at most D = 8 features, got 3"),
        (dict(width=10), ValueError, "`width` must be an even number"),
        (dict(pairs="gptj"), ValueError, "`pairs` must be one of 'half', 'interleaved', got 'gptj'"),
        (dict(side="middle"), ValueError, "`side` must be one of"),
        (dict(base=0.0), ValueError, "`base` must be a positive number, got 0.0"),
        (dict(scale=np.inf), ValueError, "`scale` must be a finite number, got inf"),
        (dict(frequencies=[1.0]), ValueError, "`frequencies` must be 4 numbers"),
        (
            dict(frequencies=1.0),
            TypeError,
            "`frequencies` must be 4 numbers.*, in a sequence or a NumPy array, got 1.0",
        ),
        (dict(positions=np.zeros((1, 5))), ValueError, r"`positions` must have shape \(5,\) or \(2, 5\), got \(1, 5\)"),
        (dict(positions=np.zeros(5, bool)), TypeError, "`positions` must be integers or floats, got bool"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.rope(X.astype(np.float32), **options)
    assert math.isfinite(float(jnp.sum(dnn.rope(X.astype(np.float32)))))
