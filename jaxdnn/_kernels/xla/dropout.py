"""The `xla` engine of dropout: Philox4x32-10 written out for every element.

Four neighbours share a counter. The code says nothing of it: each element runs the generator and picks its word. But
where a GPU's thread computes four neighbours, the compiler finds that their counters are one and runs it once, as long
as it can see that the first of them starts a counter; so the elements are numbered by one iota over the whole array.
The 64-bit products of Philox are one instruction each on a GPU and on a CPU; without 64-bit types XLA would need ten.

The generator's own key is fixed, and the call's key takes two words of the counter. So the keys of the rounds are
constants in the instructions: keys that are operands cost an H200 half as much time again (`notes-activation.md`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import engines
from jaxdnn._dropout import BLOCK, DropoutSpec

ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def run(call: engines.Call, x: Array, key: Array, start: Array) -> Array:
    """x * scale where the random word reaches the threshold, 0 elsewhere."""
    spec: DropoutSpec = call.spec
    with jax.enable_x64(True):  # this runs while a program is lowered, where no transformation sees the wide types
        kept = _words(spec, x.shape[spec.leading :], key, start) >= np.uint32(spec.threshold)
        wide = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
        scaled = (x.astype(wide) * wide.type(spec.scale)).astype(x.dtype)
        return jnp.where(kept, scaled, jnp.zeros((), x.dtype))


def _words(spec: DropoutSpec, shape: tuple[int, ...], key: Array, start: Array) -> Array:
    """The random word of every element, with the leading axes of key and start."""
    size = math.prod(shape)
    count = np.uint32 if size + BLOCK < 2**32 else np.uint64
    index = lax.iota(count, size).reshape([shape[axis] for axis in spec.order]).transpose(np.argsort(spec.order))
    index = index.reshape((1,) * spec.leading + shape)
    k0, k1, low, high = (_column(v, i, len(shape)) for v in (key, start) for i in (0, 1))
    if spec.shift is None:
        element = low.astype(np.uint64) + (high.astype(np.uint64) << np.uint64(32)) + index.astype(np.uint64)
        block, word = element >> np.uint64(2), (element & np.uint64(3)).astype(np.uint32)
        low, high = block.astype(np.uint32), (block >> np.uint64(32)).astype(np.uint32)
    else:
        element = index + count(spec.shift)
        block, word = element >> count(2), (element & count(3)).astype(np.uint32)
        first, low = low, low + block.astype(np.uint32)
        high = high + (low < first).astype(np.uint32)
        high = high + (block >> count(32)).astype(np.uint32) if count is np.uint64 else high
    c0, c1, c2, c3 = philox((low, high, k0, k1))
    return jnp.where(word < 2, jnp.where(word == 0, c0, c1), jnp.where(word == 2, c2, c3))


def _column(pair: Array, i: int, rank: int) -> Array:
    return lax.expand_dims(pair[..., i], range(pair.ndim - 1, pair.ndim - 1 + rank))


def philox(counter: tuple[Array, ...], key: tuple[int, int] = (0, 0)) -> tuple[Array, ...]:
    """Four random words a counter (Salmon et al., SC 2011); 64-bit types must be on."""
    c0, c1, c2, c3 = counter
    for i in range(ROUNDS):
        (high0, low0), (high1, low1) = (_multiply(m, c) for m, c in zip(_MULTIPLIERS, (c0, c2), strict=True))
        k0, k1 = (np.uint32((k + i * w) % 2**32) for k, w in zip(key, _WEYL, strict=True))
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _multiply(multiplier: int, x: Array) -> tuple[Any, Any]:
    """The high and the low word of a product."""
    product = x.astype(np.uint64) * np.uint64(multiplier)
    return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)


def _hazards(call: engines.Call) -> tuple[str, ...]:
    # XLA's CPU code reads and writes float32's subnormal numbers as zero; bfloat16 products are float32's.
    return ("flushes_subnormals",) if call.platform == "cpu" else ()


engines.register(
    engines.Engine(
        "xla",
        "dropout",
        run,
        level=lambda call: "portable",
        hazards=_hazards,
        notes=("Philox4x32-10, drawn again for the backward pass",),
    )
)
