"""The `ordered` engine of the normalisations: a fixed tree of additions, the same whatever the batch.

The elements of a slice, in row-major order of its axes, are padded with zeros to a power of two; then the second half
is added to the first until one element is left. A product must not be fused with an addition in one program and not in
another, as XLA does on CPUs even across an optimization barrier: `rounded` prevents it. Every second step costs a pass
over memory, hence the engine's rank.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core import engines, selection
from jaxdnn._src.core.rounding import rounded
from jaxdnn._src.norm.spec import OPS, RANGE
from jaxdnn._src.norm.xla import FORMULAS, Arithmetic


def tree(x: Array, axes: Sequence[int]) -> Array:
    """The sum along `axes`, which are kept with length 1."""
    axes = tuple(sorted(a % x.ndim for a in axes))
    kept = [a for a in range(x.ndim) if a not in axes]
    shape = tuple(1 if a in axes else size for a, size in enumerate(x.shape))
    length = math.prod(x.shape[a] for a in axes)
    lines = jnp.transpose(x, (*axes, *kept)).reshape(length, *(x.shape[a] for a in kept))
    if length == 0:
        return jnp.zeros(shape, x.dtype)
    size = 1 << (length - 1).bit_length()
    lines = jnp.pad(lines, ((0, size - length), *((0, 0) for _ in kept)))
    while size > 1:
        size //= 2
        lines = lax.optimization_barrier(lines[:size] + lines[size:])
    return lines.reshape(shape)


ORDERED = Arithmetic(lambda x, axes: tree(lax.optimization_barrier(x), axes), rounded)


def _run(call: engines.Call, *operands: Array) -> Any:
    return FORMULAS[call.op](ORDERED, call.spec, *operands)


def _level(call: engines.Call) -> str:
    """Sums over the batch (batch statistics, gradients in scale and bias) depend on it; the rest does not."""
    return "batch_invariant" if call.spec.per_example else "run_to_run"


for _op in OPS:
    engines.register(
        engines.Engine(
            name="ordered",
            op=_op,
            run=_run,
            needs_sizes=lambda call: call.op != "norm" or not call.spec.per_example,
            level=_level,
            accumulation=lambda call: call.spec.accumulate.name,
            hazards=lambda call: ("flushes_subnormals",) if call.platform == "cpu" else (),
            rank=lambda call: selection.LAST,
            notes=("a pass over memory for every doubling of the length that is added: slow", RANGE),
        )
    )
