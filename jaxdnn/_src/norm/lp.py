"""Division by the norm of a vector."""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import checks, partitioning, primitives, trees
from jaxdnn._src.core.annotations import PerAxis
from jaxdnn._src.core.blending import Types
from jaxdnn._src.core.determinism import is_fixed, require
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
    axis: PerAxis = -1,
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
    level = require("lp_normalize", determinism, "batch_invariant", "its powers are the device's")
    normalized = ft.partial(_normalized, p=p, eps=small, view=view, found=found, level=level)
    return primitives.composed(normalized, partitioning.elementwise, x)


def _normalized(x: Array, *, p: float, eps: float, view: arguments.View, found: Types, level: str) -> Array:
    edge = ft.partial(at_edges, level)
    wide = edge(x).astype(found.accumulate)
    axes = tuple(axis % x.ndim for axis in view.axes)
    if p == 2 and not is_fixed(level):
        return nearest(_unit_vectors(wide, axes, eps), found.out)
    scaled, unit = _scaled_by_power_of_two(wide, axes)
    divisor = jnp.maximum(_norm_of(scaled, p, axes, is_fixed(level)), jnp.asarray(eps, wide.dtype) * unit)
    return edge(nearest(quotient(scaled, trees.broadcast(divisor, scaled, level)), found.out))


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _unit_vectors(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    """x / max(√Σ x², eps), its sums in XLA's order."""
    norm, unit = _root_of_squares(x, axes, eps)
    return x * unit / jnp.maximum(norm, jnp.asarray(eps, x.dtype) * unit)


@_unit_vectors.defjvp
def _unit_vectors_jvp(axes: tuple[int, ...], eps: float, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """(dx - y Σ y dx) / the norm, in this order, so that cotangents too are added up before anything divides them."""
    (x,), (dx,), y = primals, tangents, _unit_vectors(*primals, axes, eps)
    norm, unit = _root_of_squares(x, axes, eps)
    least = jnp.asarray(eps, x.dtype) * unit
    factor = unit / jnp.maximum(norm, least)
    along = jnp.where(norm < least, jnp.zeros_like(factor), factor)
    return y, factor * dx - y * (along * jnp.sum(y * dx, axes, keepdims=True))


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _root_of_squares(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array]:
    """√Σ (x unit)² and the unit, which counts as constant, in XLA's order."""
    # With such an eps it changes nothing if squares underflow: n 2^-126 (float32) beside 2^-23 eps².
    count, limits = math.prod(x.shape[axis] for axis in axes), jnp.finfo(x.dtype)
    harmless = not export.is_symbolic_dim(count) and count * float(limits.tiny / limits.eps) < eps * eps

    def scaled(x: Array) -> tuple[Array, Array]:
        v, unit = _scaled_by_power_of_two(x, axes)
        return jnp.sum(v * v, axes, keepdims=True), unit

    def in_one_pass(x: Array) -> tuple[Array, Array]:
        """Scaled only where the plain sum shows that squares have overflowed, or underflowed."""
        total, least = jnp.sum(x * x, axes, keepdims=True), 2.0**-480 if x.dtype == np.float64 else 2.0**-60
        good = (total < np.inf) & (harmless | (total >= least))
        as_it_is = total, jnp.ones_like(total)
        mixed = lambda x: tuple(jnp.where(good, *pair) for pair in zip(as_it_is, scaled(x), strict=True))
        some = jnp.max((~good).astype(x.dtype), initial=0) > 0  # a call of XLA's library, which that of `any` is not
        return lax.cond(some, mixed, lambda x: as_it_is, x)

    total, unit = lax.platform_dependent(x, cpu=in_one_pass, default=scaled)
    return jnp.sqrt(total), unit


@_root_of_squares.defjvp
def _root_of_squares_jvp(axes: tuple[int, ...], eps: float, primals: Any, tangents: Any) -> Any:
    """The norm's is Σ (v / norm) dv, 0 where it is 0, for v = x unit."""
    (x,), (dx,) = primals, tangents
    norm, unit = _root_of_squares(x, axes, eps)
    inner = jnp.sum((x * unit) * (dx * unit), axes, keepdims=True)
    zero = norm == 0
    slope = jnp.where(zero, jnp.zeros_like(norm), inner / jnp.where(zero, jnp.ones_like(norm), norm))
    return (norm, unit), (slope, jnp.zeros_like(unit))


def _scaled_by_power_of_two(x: Array, axes: Sequence[int]) -> tuple[Array, Array]:
    """x with the largest magnitude of every vector between 1/2 and 2, and the factor. It counts as constant."""
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), tuple(axes), keepdims=True, initial=0)
    limits = jnp.finfo(x.dtype)
    inverse = 1 / jnp.clip(largest, 4 * limits.tiny, limits.max / 4)
    unit = lax.reduce_precision(
        inverse, limits.nexp, 0
    )  # a power of two, even if the quotient is not rounded correctly
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
