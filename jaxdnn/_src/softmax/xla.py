"""The softmax family's formulas for XLA: the engine `xla`, and the engine `ordered`, whose sums are fixed trees.

Engine `xla` leaves the order of a sum to XLA, and so guarantees equal bits from run to run only.

Engine `ordered` adds the elements of a row in the tree `core.trees.halves`, which depends on the row's length alone.
Products are rounded before anything is added to them, here and by the caller, so that no compiler contracts the two;
maxima are exact in any order; everything else is computed element by element. Every third level of the tree costs a
pass over memory, and on CPUs, where XLA has several exponentials, these run in a loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core import engines, selection, trees
from jaxdnn._src.core.determinism import is_fixed
from jaxdnn._src.core.rounding import nearest, product, rounded, steady

Sum = Callable[[Array, tuple[int, ...]], Array]
Apart = Callable[[Array], Array]  # keeps XLA from contracting a step with the next, which changes bits


def xla_sum(x: Array, axes: tuple[int, ...]) -> Array:
    """The sum along `axes`, which are kept with length 1, in XLA's order."""
    return jnp.sum(x, axes, keepdims=True)


def row_max(x: Array, axes: Sequence[int]) -> Array:
    """The largest element along `axes`, which stay with length 1: NaN if there is one, -inf if there are none."""
    return jnp.max(x, tuple(axes), keepdims=True, initial=-jnp.inf)


def tree_sum(x: Array, axes: tuple[int, ...]) -> Array:
    """The sum along `axes`, which stay with length 1, on a tree that depends on their lengths alone."""
    return trees.halves(rounded(x), axes)  # x may be a product


def _plain(x: Array) -> Array:
    return x


# ---- the formulas ----------------------------------------------------------------------------------------------------


def softmax(spec: Any, x: Array, total: Sum = xla_sum, apart: Apart = _plain, largest: Sum = row_max) -> Array:
    """y, in the result's dtype."""
    x = x.astype(spec.accumulate)
    if spec.algorithm == "fast":
        e = _exp(x, apart)
        return nearest(_share(e, total(e, spec.axes), apart), spec.out_dtype)
    shifted = x - largest(x, spec.axes)
    e = _exp(shifted, apart)
    if spec.algorithm == "log":
        return nearest(shifted - _log(total(e, spec.axes), apart), spec.out_dtype)
    return nearest(_share(e, total(e, spec.axes), apart), spec.out_dtype)


def _exp(x: Array, apart: Apart) -> Array:
    return jnp.exp(x) if apart is _plain else steady(jnp.exp, x)


def _log(x: Array, apart: Apart) -> Array:
    return jnp.log(x) if apart is _plain else steady(jnp.log, x)


def _share(e: Array, s: Array, apart: Apart) -> Array:
    """e / s; if steps are kept apart, by the reciprocal, which XLA would use for some shapes and not for others."""
    return e / s if apart is _plain else apart(e * apart(1 / s))


def softmax_dgrad(spec: Any, dy: Array, y: Array, total: Sum = xla_sum, apart: Apart = _plain) -> Array:
    """The derivative's transpose along dy, or for `spec.tangent` the derivative, in the result's dtype."""
    dy, y = dy.astype(spec.accumulate), y.astype(spec.accumulate)
    if spec.algorithm != "log":
        dx = apart(y * (dy - total(y * dy, spec.axes)))
    elif spec.tangent:
        dx = dy - total(_exp(y, apart) * dy, spec.axes)
    else:
        dx = dy - apart(_exp(y, apart) * total(dy, spec.axes))
    return nearest(dx, spec.out_dtype)


def logsumexp(spec: Any, x: Array, total: Sum = xla_sum, apart: Apart = _plain, largest: Sum = row_max) -> Array:
    """log Σ exp(x) with the reduced axes gone; infinities are not subtracted from one another."""
    x = x.astype(spec.accumulate)
    m = largest(x, spec.axes)
    m = jnp.where(jnp.isfinite(m), m, jnp.zeros_like(m))
    y = m + _log(total(_exp(x - m, apart), spec.axes), apart)
    return nearest(lax.squeeze(y, [axis % x.ndim for axis in spec.axes]), spec.out_dtype)


def for_derivative(spec: Any) -> tuple[Callable[[Array, Array, tuple[int, ...]], Array], bool]:
    """Σ a v, linear in v, for a derivative that is a formula, and whether its bits are fixed, as the call asks."""
    if spec.engine == "ordered" or is_fixed(spec.level):
        return lambda a, v, axes: trees.halves(product(a, v), axes), True
    return lambda a, v, axes: xla_sum(a * v, axes), False


FORMULAS: dict[str, Callable[..., Array]] = {
    "softmax": softmax,
    "softmax_dgrad": softmax_dgrad,
    "logsumexp": logsumexp,
}


# ---- the engines -----------------------------------------------------------------------------------------------------


def _run(call: engines.Call, *operands: Array) -> Array:
    return FORMULAS[call.op](call.spec, *operands)


def _run_ordered(call: engines.Call, *operands: Array) -> Array:
    return FORMULAS[call.op](call.spec, *operands, total=tree_sum, apart=rounded)


def _accumulation(call: engines.Call) -> str:
    return call.spec.accumulate.name


engines.declare(
    "xla",
    *FORMULAS,
    run=_run,
    level=lambda call: "run_to_run",
    accumulation=_accumulation,
    hazards=engines.flushes_on_cpus,
)
engines.declare(
    "ordered",
    *FORMULAS,
    run=_run_ordered,
    needs_sizes=lambda call: True,
    level=lambda call: "mesh_invariant",
    accumulation=_accumulation,
    hazards=engines.flushes_on_cpus,
    rank=lambda call: selection.LAST,
    partition=lambda call: True,
    adds_in_order=True,
    notes=("sums over a binary tree, with a pass over memory for every third level of it: slow",),
)
