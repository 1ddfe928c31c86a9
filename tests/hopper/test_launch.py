"""What all kernels' launches have in common."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src import hopper

if (reason := hopper.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.usefixtures("h200")

X = jax.ShapeDtypeStruct((2, 8, 8, 64), jnp.bfloat16)
DENSE, DEPTHWISE = (jax.ShapeDtypeStruct((3, 3, c, 64), jnp.bfloat16) for c in (64, 1))


def hashes(f: Any, *operands: Any) -> list[str]:
    """What XLA knows the kernels of a program by."""
    text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r'kernel_hash = "([^"]*)"', text)


def gradients(x: Any, w: Any) -> Any:
    conv = lambda x, w: dnn.conv(x, w, padding=1, groups=64 // w.shape[2], engine="hopper")
    return jax.vjp(conv, x, w)[1](x)


KERNELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "convolution": (gradients, (X, DENSE)),
    "depthwise convolution": (gradients, (X, DEPTHWISE)),
    "batch normalisation": (lambda x: dnn.batch_norm(x, engine="hopper")[0], (X,)),
    "softmax": (lambda x: dnn.softmax(x, engine="hopper"), (X,)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_one_hash_in_every_program(name: str):
    """XLA compiles the kernels of one hash once in a process; JAX 0.11 numbers kernels in what it hashes."""
    f, operands = KERNELS[name]
    first, then = hashes(f, *operands), hashes(lambda *a: jax.tree.map(jnp.negative, f(*a)), *operands)
    assert first
    assert first == then
