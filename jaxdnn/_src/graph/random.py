"""Random numbers: which elements dropout keeps."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdnn._src.dropout.api import dropout_mask
from jaxdnn._src.graph.nodes import Inference, Kind, Run, register


def _infer(node: Inference) -> None:
    node.choice("distribution", ("BERNOULLI",))
    node.number("bernoulli_probability", 0.0, 1.0)
    for port in ("seed", "offset"):
        node.one(port)
        node.typed(port, "int32", "int64")
    dim = node.output_dim("Y", "set, or given as `dim`")
    node.output("Y", dim, None)


def words(seed: Array) -> Array:
    """A seed as Philox's key: an integer of 64 bits in two's complement, the low word first."""
    seed = seed.reshape(())
    low = seed.astype(jnp.uint32)
    high = (
        (seed >> 32).astype(jnp.uint32)
        if seed.dtype == np.int64
        else jnp.where(seed < 0, ~jnp.uint32(0), jnp.uint32(0))
    )
    return jnp.stack([low, high])


def _rng(node: Run) -> dict[str, Array]:
    out = node.out("Y")
    rate = 1.0 - float(node.attribute("bernoulli_probability"))
    offset: Any = node.x("offset").reshape(())
    mask = dropout_mask(words(node.x("seed")), out.dim or (), rate=rate, offset=offset)
    return {"Y": mask}


register(
    Kind(
        "rng",
        ("seed", "offset"),
        ("Y",),
        {"distribution": "BERNOULLI", "bernoulli_probability": 0.5},
        _infer,
        _rng,
        calls=("dropout_mask",),
    )
)
