"""How arrays are reduced: sums and products by XLA or on a fixed tree, extremes, and the 2-norm without overflow.

x has the dtype that is computed in; the reduced axes keep length 1.
"""

import functools as ft
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax

from jaxdnn._src.core import blending, numbers, trees
from jaxdnn._src.core.rounding import product, real, reciprocal

Axes = tuple[int, ...]


def add(x: Array, axes: Axes, fixed: bool) -> Array:
    """The sum: on a tree, axis by axis from the last, if its order must be fixed; else XLA's."""
    if not fixed or jnp.issubdtype(x.dtype, jnp.integer):  # integers wrap, in any order to the same
        return jnp.sum(x, axes, keepdims=True, dtype=x.dtype)
    return _along(jnp.add, x, axes, 0)


def multiply(x: Array, axes: Axes, fixed: bool) -> Array:
    """The product."""
    if not fixed or jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.prod(x, axes, keepdims=True, dtype=x.dtype)
    # Signs apart: XLA may gather a sharded axis by adding zeros to its parts, which makes +0 of a product that is -0.
    sign = lambda odd: jnp.where(odd, jnp.full_like(x, -1, shape=odd.shape), jnp.ones_like(x, shape=odd.shape))
    negative = jnp.signbit(lax.stop_gradient(x))
    sizes = jnp.squeeze(_along(product, product(x, sign(negative)), axes, 1), axes)
    return jnp.expand_dims(product(sizes, sign(jnp.sum(negative, axes, dtype=jnp.int32) % 2 == 1)), axes)


def _along(combine: Callable[[Array, Array], Array], x: Array, axes: Axes, nothing: int) -> Array:
    if math.prod(x.shape[axis] for axis in axes) == 0:
        return jnp.full([1 if a in axes else n for a, n in enumerate(x.shape)], nothing, x.dtype)
    for axis in sorted(axes, reverse=True):
        x = trees.tree(combine, x, axis)
    return x


def multiply_without_zeros(x: Array, axes: Axes, fixed: bool) -> Array:
    """The product of the elements that are not zero; 1 if there are none."""
    return multiply(jnp.where(x == 0, jnp.ones_like(x), x), axes, fixed)


def average(x: Array, axes: Axes, fixed: bool) -> Array:
    """The sum times the rounded reciprocal of the number of elements; integers as float32."""
    x = _floating(x)
    # Not a division: XLA divides by a constant in this way on some devices, and otherwise GPUs' quotients are not
    # correctly rounded.
    count = math.prod(x.shape[axis] for axis in axes)
    if export.is_symbolic_dim(count):
        return add(x, axes, fixed) / jnp.asarray(count, x.dtype)
    share = np.asarray(1, x.dtype) / np.asarray(count, x.dtype)
    return product(add(x, axes, fixed), jnp.asarray(share, x.dtype))


def norm1(x: Array, axes: Axes, fixed: bool) -> Array:
    """Σ |x|."""
    return add(product(x, jnp.sign(x)), axes, fixed)  # whose derivative at 0 is 0, which that of JAX's abs is not


def add_squares(x: Array, axes: Axes, fixed: bool) -> Array:
    """Σ x², which overflows sooner than the 2-norm."""
    return _squares(x, axes, fixed)


def log_add(x: Array, axes: Axes, fixed: bool) -> Array:
    """log Σ x; integers as floats. JAX's logarithm differs between devices."""
    return (numbers.log if fixed else jnp.log)(add(_floating(x), axes, fixed))


def _floating(x: Array) -> Array:
    return real(x, jnp.float32) if jnp.issubdtype(x.dtype, jnp.integer) else x


# ---- the 2-norm ------------------------------------------------------------------------------------------------------


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def norm2(x: Array, axes: Axes, fixed: bool) -> Array:
    """√Σ x² of an x of its own dtype, in the accumulator's; a square overflows only if the result does."""
    if fixed and x.dtype != np.float64:
        return _norm2_in_float64(x, axes=axes, fixed=True)
    if x.size == 0 or not _squares_may_leave(x.dtype):
        return jnp.sqrt(_squares(_wide(x), axes, fixed))
    # On GPUs float64 costs no more than reading x. On CPUs it costs several times as much, and another reading as much
    # as all the rest: there the sums tell whether to take it, which on a GPU costs more than it.
    there = _scaled_norm2 if x.dtype == np.float64 else _norm2_in_float64
    here, there = (ft.partial(f, axes=axes, fixed=fixed) for f in (_norm2_in_one_pass, there))
    return lax.platform_dependent(x, cpu=here, default=there)


def _norm2_in_float64(x: Array, *, axes: Axes, fixed: bool) -> Array:
    """The norm of narrower numbers: float64 holds their squares (int32's nearly), so x is read once and not scaled."""
    with jax.enable_x64(True):
        wide = real(x, np.float64) if jnp.issubdtype(x.dtype, jnp.integer) else lax.convert_element_type(x, np.float64)
        return lax.convert_element_type(jnp.sqrt(_squares(wide, axes, fixed)), np.float32)


def _norm2_in_one_pass(x: Array, *, axes: Axes, fixed: bool) -> Array:
    """The norm without scaling where the sum shows that no overflow or underflow changed it, else with scaling.

    Which of the two an element of the result is taken from depends on its own elements of x alone.
    """
    plain = _squares(_wide(x), axes, fixed)
    good = (plain >= (2.0**-480 if plain.dtype == np.float64 else 2.0**-60)) & (plain < np.inf)
    scaled = ft.partial(_scaled_norm2, axes=axes, fixed=fixed)
    other = lax.cond(jnp.all(good), lambda x: jnp.zeros_like(scaled(x)), scaled, x)
    return jnp.where(good, jnp.sqrt(plain), other)


def _scaled_norm2(x: Array, *, axes: Axes, fixed: bool) -> Array:
    """Elements are first multiplied by a power of two, which is exact."""
    x = _wide(x)
    up, down = _powers_of_two(jnp.max(jnp.abs(x), axes, keepdims=True))
    return jnp.sqrt(_squares(x * up, axes, fixed)) * down


def _squares(x: Array, axes: Axes, fixed: bool) -> Array:
    return add(product(x, x) if fixed else x * x, axes, fixed)


def _squares_may_leave(dtype: np.dtype) -> bool:
    """Whether squares of such numbers may overflow or underflow in the accumulator; those of narrow exponents do not.

    Those of float16 and float8 lie between 2^-48 and 2^32, those of int32 below 2^63.
    """
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).maxexp > 16


def _wide(x: Array) -> Array:
    return _floating(x.astype(blending.accumulator(x.dtype)))


@norm2.defjvp
def _norm2_jvp(axes: Axes, fixed: bool, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """d‖x‖ = Σ (x / ‖x‖) dx, and 0 where the norm is 0."""
    (x,), (dx,) = primals, tangents
    y = norm2(x, axes, fixed)
    x, dx, zero = x.astype(y.dtype), dx.astype(y.dtype), y == 0
    # Scaled, for XLA multiplies by 1 / y, which is zero for a norm whose reciprocal is subnormal.
    up, _ = _powers_of_two(y)
    scaled = product(x * up, reciprocal(jnp.where(zero, jnp.ones_like(y), y * up)))
    unit = jnp.where(zero, jnp.zeros_like(x), scaled)
    return y, add(product(unit, dx), axes, fixed)


def _powers_of_two(largest: Array) -> tuple[Array, Array]:
    """A power of two that brings the largest magnitude near 1, and its inverse.

    One of five, told by comparisons: then the largest square lies between 2^-60 and 2^60 (float64: 2^-480 and 2^480),
    so the sum does not overflow, and what of it underflows is lost to rounding anyway.
    """
    unit = 8 if largest.dtype == np.float64 else 1
    bands = [(90, -110), (30, -60), (-30, 0), (-90, 60)]  # from this exponent on, multiplied by 2 to that one
    # Zeros are multiplied by 1: of constants, XLA in JAX 0.10 turns (0 up)² into 0 up², which is NaN if up² overflows.
    largest = jnp.where(largest == 0, jnp.ones_like(largest), largest)
    steps = [largest >= 2.0 ** (unit * least) for least, _ in bands]

    def power(sign: int) -> Array:
        values = [jnp.full_like(largest, 2.0 ** (unit * sign * exponent)) for _, exponent in bands]
        return jnp.select(steps, values, jnp.full_like(largest, 2.0 ** (unit * sign * 110)))

    return power(1), power(-1)


# ---- extremes --------------------------------------------------------------------------------------------------------


def extreme(x: Array, op: str, axes: Axes, nan: str) -> Array:
    """The largest or smallest element, or the largest magnitude ("amax"); integers as they are."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = jnp.abs(x) if op == "amax" else x
        return jnp.min(x, axes, keepdims=True) if op == "min" else jnp.max(x, axes, keepdims=True)
    return _extreme(x, op, axes, nan)


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extreme(x: Array, op: str, axes: Axes, nan: str) -> Array:
    """A zero is +0: of two zeros of different signs backends choose differently.

    That an element is NaN the sum of squares tells, which no infinity spoils: XLA's extremes lose NaN on CPUs, in a
    device's part and between devices, and there its `any` takes several times as long as a sum.
    """
    x = jnp.abs(x) if op == "amax" else x
    if nan == "ignore":
        missing = jnp.isnan(x)
        x = jnp.where(missing, jnp.asarray(np.inf if op == "min" else -np.inf, x.dtype), x)
        spoilt = jnp.all(missing, axes, keepdims=True)
    else:
        spoilt = jnp.isnan(jnp.sum(x * x, axes, keepdims=True))
    found = jnp.min(x, axes, keepdims=True) if op == "min" else jnp.max(x, axes, keepdims=True)
    found = jnp.where(found == 0, jnp.zeros_like(found), found)
    return jnp.where(spoilt, jnp.asarray(np.nan, x.dtype), found)


@_extreme.defjvp
def _extreme_jvp(op: str, axes: Axes, nan: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The tangent of the first extreme element. One that is chosen, not added up: its transpose needs no scatter."""
    (x,), (dx,) = primals, tangents
    y = _extreme(x, op, axes, nan)
    if op == "amax":
        dx = dx * jnp.sign(x)
    chosen = places(x.shape, axes) == index(x, y, op, axes)
    return y, jnp.sum(jnp.where(chosen, dx, jnp.zeros_like(dx)), axes, keepdims=True)


def index(x: Array, y: Array, op: str, axes: Axes, last: bool = False) -> Array:
    """The place of the first element equal to the extreme y, or of the last.

    int32, flat over the reduced axes in row-major order.
    """
    x = jnp.abs(x) if op == "amax" else x
    equal = x == y
    if jnp.issubdtype(x.dtype, jnp.inexact):
        equal |= jnp.isnan(x) & jnp.isnan(y)
    # As floats, which hold them, the least is found by XLA's library on CPUs.
    count, place = math.prod(x.shape[axis] for axis in axes), places(x.shape, axes)
    place = place.astype(jnp.float32) if not export.is_symbolic_dim(count) and count <= 2**24 else place
    if last:
        return jnp.max(jnp.where(equal, place, jnp.full_like(place, -1)), axes, keepdims=True).astype(jnp.int32)
    beyond = jnp.asarray(np.iinfo(np.int32).max, place.dtype)
    return jnp.min(jnp.where(equal, place, beyond), axes, keepdims=True).astype(jnp.int32)


def places(shape: tuple[int, ...], axes: Axes) -> Array:
    """The flat index of every element over the reduced axes."""
    place, step = jnp.zeros(shape, jnp.int32), 1
    for axis in sorted(axes, reverse=True):
        place = place + lax.broadcasted_iota(jnp.int32, shape, axis) * jnp.asarray(step, jnp.int32)
        step *= shape[axis]
    return place
