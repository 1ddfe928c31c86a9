"""What XLA for GPUs might multiply in the operands' own type is multiplied as float32; all else is left as it is."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxdnn as dnn
from jaxdnn._src.core import products


def multiplied_in(m: int, k: int, n: int, batch: int, dtype: str) -> str:
    """The type of the operands of the product (batch, m, k) (batch, k, n)."""
    a, b = jax.ShapeDtypeStruct((batch, m, k), dtype), jax.ShapeDtypeStruct((batch, k, n), dtype)
    how = {"precision": lax.Precision.DEFAULT, "preferred": jnp.float32}
    made = jax.make_jaxpr(lambda a, b: products.dot(a, b, ((2,), (1,)), ((0,), (0,)), **how))(a, b)
    (product,) = [eqn for eqn in made.eqns if eqn.primitive.name == "dot_general"]
    assert product.outvars[0].aval.dtype == jnp.float32
    return product.invars[0].aval.dtype.name


@pytest.mark.parametrize(
    ("m", "k", "n", "batch", "wide"),
    [
        (10, 2, 7, 1, True),  # dV of two queries, whose terms an H200 rounded to bfloat16
        (10, 2, 7, 10_000, True),
        (1, 512, 512, 1, True),
        (512, 1, 512, 1, True),
        (512, 512, 1, 3, True),
        (64, 64, 64, 1, False),
        (64, 64, 64, 100, False),
    ],
)
def test_thin_and_small_products_are_wide(m: int, k: int, n: int, batch: int, wide: bool):
    assert multiplied_in(m, k, n, batch, "bfloat16") == ("float32" if wide else "bfloat16")
    assert multiplied_in(m, k, n, batch, "float32") == "float32"


def test_gradients_of_short_sequences_are_wide_on_gpus():
    q, k = jnp.ones((1, 2, 3, 6), jnp.bfloat16), jnp.ones((1, 10, 3, 6), jnp.bfloat16)
    loss = lambda q, k, v: dnn.attention(q, k, v, engine="xla").astype(jnp.float32).sum()
    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    dots = [line for line in lowered.splitlines() if "dot_general" in line]
    assert len(dots) >= 5
    assert not [line for line in dots if "bf16" in line]
