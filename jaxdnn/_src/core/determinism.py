"""What an op guarantees of its bits: the levels, and the context that requires one.

| level | guarantee, bit for bit |
|---|---|
| `"fast"` | none |
| `"run_to_run"` | same build, device model and shapes: the same result over repeats, processes, recompilation |
| `"batch_invariant"` | and an element depends on its own inputs only: not on batch size, position, neighbours or vmap |
| `"mesh_invariant"` | and not on how the arrays are sharded |
| `"portable"` | and it equals the NumPy definition (`arithmetic="ordered"`, or exact integers) on every device |

Each level includes those above it. `jaxdnn.explain` shows which level an engine guarantees for a call, and which the
call may require of it at most. From `"batch_invariant"` on, nothing of a call is joined with the operations around it,
so it has the same bits called alone, within `jit`, and on any mesh.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jaxdnn._src.core import checks

LEVELS = ("fast", "run_to_run", "batch_invariant", "mesh_invariant", "portable")

# JAX keys its tracing and compilation caches on this value, so a jitted function is traced anew under another level.
_required = jax.make_user_context("fast")


@contextlib.contextmanager
def determinism(level: str, /) -> Iterator[None]:
    """Requires a determinism level of every jaxdnn op that is traced inside.

    Args:
      level: "fast", "run_to_run", "batch_invariant", "mesh_invariant" or "portable".

    Returns:
      A context manager. An op inside picks an engine that guarantees the level, or raises when it is traced.

    Differentiation: first derivatives taken inside require the level of their own engines too, and so do those of any
      order where they are such calls again: of convolutions without an activation, of resampling, of pooling by maximum
      or average, and of dropout in x. Other ops differentiate XLA's formula from the second derivative on: run_to_run.
      Sums over the batch that XLA adds are run_to_run whatever the level: the gradients in a convolution's bias
      (`jaxdnn.conv_bgrad` itself would raise), in parameters of a normalisation that examples share, and in alpha and
      beta. Those in dropout's bias, in an operand that `add` or `op_tensor` broadcasts, in `affine_grid`'s theta, and
      in weights and biases of recurrent layers are added in a fixed order from "batch_invariant" on: mesh_invariant.

    Numerics: the level changes which engine serves a call, hence the order of additions, never the formula. No level
      fixes the sign and the payload of a NaN that is computed.

    Raises:
      ValueError: an unknown level.

    Example:
      >>> x, w = jnp.ones((1, 4, 4, 2), jnp.bfloat16), jnp.ones((3, 3, 2, 5), jnp.bfloat16)
      >>> with dnn.determinism("batch_invariant"):
      ...     y = dnn.conv(x, w)

    Sources: the names follow `cuda::execution::determinism` of NVIDIA's CCCL (not_guaranteed, run_to_run, gpu_to_gpu).
    """
    with _required(checks.choice("level", level, LEVELS)):
        yield


def required(level: str | None = None) -> str:
    """The stronger of what the enclosing context and a call's own `determinism=` argument ask for."""
    context: Any = _required.value
    if level is None:
        return context
    checks.choice("determinism", level, LEVELS)
    return max(context, level, key=LEVELS.index)


def require(what: str, level: str | None, guaranteed: str, why: str = "") -> str:
    """The level that a call of this `determinism` is under; raises where more is required than `what` guarantees."""
    level = required(level)
    if not satisfies(guaranteed, level):
        why = f": {why}" if why else ""
        raise NotImplementedError(
            f"`determinism` {level!r} cannot be guaranteed for {what}, expected {guaranteed!r} or less{why}."
        )
    return level


def satisfies(guaranteed: str, level: str) -> bool:
    """Whether a guarantee covers a requirement."""
    return LEVELS.index(guaranteed) >= LEVELS.index(level)


def is_fixed(level: str) -> bool:
    """Whether a level fixes the bits of an element beyond one program: sums have one order, products are rounded."""
    return satisfies(level, "batch_invariant")
