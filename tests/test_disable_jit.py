"""Every op inside `jax.disable_jit`, as one debugs: its values and derivatives are those of the compiled program.

Programs without fusion may round differently. In float64 both are right to a few dozen units of 2^-53; 2^-40 of the
largest value leaves room for thousands.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.activation import formulas
from jaxdnn._src.cases import example

pytestmark = pytest.mark.usefixtures("x64")

EXAMPLES = example.first()


def function_of(name: str) -> tuple[Callable[..., Any], list[jax.Array]]:
    """The op as a function of its floating-point arrays, and these."""
    return ft.partial(EXAMPLES[name].call, getattr(dnn, name)), list(map(jnp.asarray, EXAMPLES[name].data()))


def transformed(function: Callable[..., Any], arrays: list[jax.Array]) -> dict[str, Any]:
    found = {"value": function(*arrays)}
    if not arrays:
        return found
    many = [jnp.stack([v, 2 * v]) for v in arrays]

    def scalar(*given: jax.Array) -> jax.Array:
        results = [y for y in jax.tree.leaves(function(*given)) if jnp.issubdtype(y.dtype, jnp.floating)]
        return ft.reduce(
            jnp.add,
            [jnp.sum(y * (jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 5 - 2)) for y in results],
            jnp.zeros(()),
        )

    every = tuple(range(len(arrays)))
    found["jvp"] = [y for y in jax.tree.leaves(jax.jvp(function, arrays, arrays)) if y.dtype != jax.dtypes.float0]
    found["gradient"] = jax.grad(scalar, every)(*arrays)
    found["vmap"] = jax.vmap(function)(*many)
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_transformation(name: str):
    function, arrays = function_of(name)
    expected = jax.jit(ft.partial(transformed, function))(arrays)
    with jax.disable_jit():
        found = transformed(function, arrays)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        scale = float(jnp.max(jnp.abs(b), initial=1)) if jnp.issubdtype(b.dtype, jnp.floating) else 0
        np.testing.assert_allclose(a, b, rtol=0, atol=2.0**-40 * scale)


def test_the_choice_of_the_user_outlives_a_call():
    function, arrays = function_of("conv")
    with jax.disable_jit():
        function(*arrays)
        assert jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", ["gelu", "swish", "mish"])
def test_curvatures_have_the_bits_of_a_program(name: str):
    """Their products and sums are one program's, within which XLA contracts them: 2,900 of 21,120 differed."""
    z = jnp.asarray(np.random.default_rng(0).normal(size=5000), jnp.float32)
    along = lambda z: jax.jvp(lambda z: formulas.slope(z, name, 1.0), (z,), (z,))[1]
    expected = jax.jit(along)(z)
    with jax.disable_jit():
        np.testing.assert_array_equal(along(z), expected)
