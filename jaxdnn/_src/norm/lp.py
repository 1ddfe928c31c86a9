"""Division by the norm of a vector."""

import functools as ft
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import checks, partitioning, primitives, trees
from jaxdnn._src.core.determinism import is_fixed, required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.rounding import at_edges, nearest, power, product, quotient, root
from jaxdnn._src.norm import arguments
from jaxdnn._src.tensor import reductions


@public
def lp_normalize(
    x: ArrayLike,
    /,
    *,
    p: float = 2.0,
    axis: int | Sequence[int] = -1,
    eps: float = 1e-12,
    out_dtype: DTypeLike | None = None,
    determinism: str | None = None,
) -> Array:
    """Divides by the p-norm over some axes.

    y = x / max((Σ |x|^p)^(1/p), eps)

    Args:
      x: float32, bfloat16, float16 or float64, of any shape.
      p: at least 1; infinity is the largest magnitude.
      axis: the axes that the norm is taken over, one or several.
      eps: the least divisor, so that a vector of zeros stays one; a number.
      out_dtype: the result's dtype; None is that of x.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`; batch_invariant comes by a fixed
        tree of additions.

    Returns:
      y, in x's shape.

    Differentiation: any order, forward and reverse. |x| has derivative 0 at 0; of equal largest magnitudes (p = inf)
      each gets its share; where the norm is below eps, it counts as constant.

    Numerics: in float32 (float64 for float64), converted once. Every vector is scaled by a power of two, and for a
      p other than 1 and 2 divided by its largest magnitude, so no power overflows and the largest does not vanish.

    Raises:
      ValueError, TypeError, NotImplementedError: as `layer_norm`.

    Example:
      >>> dnn.lp_normalize(jnp.array([0.0, -4e30])).tolist()
      [0.0, -1.0]

    Sources: PyTorch's normalize, whose axis is 1; ONNX's LpNormalization, which has no eps.
    """
    x = checks.array("x", x)
    found, view = arguments.types(x, out_dtype), arguments.rows(x, axis)
    p, small = checks.as_float("p", p), arguments.epsilon(eps)
    if not p >= 1:
        raise ValueError(f"`p` must be a number of at least 1, got {p!r}.")
    arguments.require("lp_normalize", determinism, "batch_invariant", "its powers are the device's")
    level = required(determinism)
    normalized = ft.partial(_normalized, p=p, eps=small, view=view, found=found, level=level)
    return primitives.composed(normalized, partitioning.elementwise, x)


def _normalized(x: Array, *, p: float, eps: float, view: arguments.View, found: arguments.Types, level: str) -> Array:
    edge = ft.partial(at_edges, level)
    wide = edge(x).astype(found.accumulate)
    scaled, unit = _scaled_by_power_of_two(wide, view.axes)
    axes = tuple(axis % x.ndim for axis in view.axes)
    divisor = jnp.maximum(_norm_of(scaled, p, axes, is_fixed(level)), jnp.asarray(eps, wide.dtype) * unit)
    return edge(nearest(quotient(scaled, trees.broadcast(divisor, scaled, level)), found.out))


def _scaled_by_power_of_two(x: Array, axes: Sequence[int]) -> tuple[Array, Array]:
    """x with the largest magnitude of every vector between 1/2 and 1, and the factor. It counts as constant."""
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), tuple(axes), keepdims=True, initial=0)
    limits = jnp.finfo(x.dtype)
    exponent = jnp.clip(jnp.frexp(largest)[1], limits.minexp + 2, limits.maxexp - 2)
    unit = jnp.ldexp(jnp.ones_like(largest), -exponent)
    return x * unit, unit


def _norm_of(v: Array, p: float, axes: tuple[int, ...], fixed: bool) -> Array:
    """The p-norm. Its derivative at zero is zero, not the NaN of a root's infinite slope."""
    size = jnp.abs(v)
    largest = jnp.max(size, tuple(axes), keepdims=True, initial=0)
    if math.isinf(p):
        return largest
    if p == 1:
        return reductions.add(size, axes, fixed)
    if p == 2:
        total = reductions.add(product(v, v), axes, fixed)
        return jnp.where(total == 0, total, root(jnp.where(total == 0, jnp.ones_like(total), total)))
    # The largest quotient is 1, whose power does not vanish for any p. The result does not depend on the divisor, which
    # therefore counts as constant.
    largest = lax.stop_gradient(largest)
    divisor = jnp.where((largest == 0) | jnp.isinf(largest), jnp.ones_like(largest), largest)
    total = reductions.add(power(quotient(size, jnp.broadcast_to(divisor, v.shape)), p), axes, fixed)
    some = jnp.where(total == 0, jnp.ones_like(total), total)
    return jnp.where(total == 0, total, product(divisor, power(some, 1 / p)))
