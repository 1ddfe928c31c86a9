"""Arrays at any coordinates, by B-splines of order 0 to 5: `map_coordinates`.

The coefficients of the spline through x are x filtered along each axis. Both are sums over taps: the primitive of
`grid_sample`, for the filter on the elements of an axis, for the sampling on x as a line, behind which stands `cval`.
"""

from __future__ import annotations

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import blending, checks, primitives
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import product, quotient, real, rounded
from jaxdnn._src.sampling.primitive import SampleSpec
from jaxdnn._src.sampling.taps import across, clip

HIGHEST = 5
MODES = ("constant", "grid-constant", "nearest", "mirror", "reflect", "grid-mirror", "wrap", "grid-wrap")
TURNING = ("mirror", "reflect", "grid-mirror")  # go on backwards and forwards in turn
PAD, FAR = 12, 2.0**30
# How what is filtered goes on, "mirror" if nothing is said here; and the poles of the filters, with a scale.
FILTERED_AS = {"nearest": "reflect", "grid-mirror": "reflect", "grid-wrap": "grid-wrap", "reflect": "reflect"}
POLES: dict[int, tuple[tuple[float, ...], float]] = {
    2: ((math.sqrt(8.0) - 3.0,), 8.0),
    3: ((math.sqrt(3.0) - 2.0,), 6.0),
    4: ((-0.361341225900220177, -0.0137254292973391214), 384.0),
    5: ((-0.430575347099973792, -0.0430962882032646538), 120.0),
}


@public
def map_coordinates(
    x: ArrayLike,
    coordinates: ArrayLike | Sequence[ArrayLike],
    /,
    *,
    order: int = 3,
    mode: str = "constant",
    cval: float = 0.0,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Samples an array at any coordinates, by splines of order 0 to 5: SciPy's function of this name.

    y[m] = Σ_k c[k] Π_a B(p_a[m] - k_a)        with the coefficients c for which Σ_k c[k] Π_a B(i_a - k_a) = x[i]

    B is the B-spline of degree `order`. Order 0 is the nearest element, 1 linear; for both c is x. Of 2 to 5 c is x
    behind a filter along each axis (SciPy's `spline_filter`), which is always applied.

    Args:
      x: any number of axes, d; float32, bfloat16, float16, float64, int8 or uint8. Channels, and images of a batch,
        are served by `jax.vmap`.
      coordinates: (d, ...), or d arrays of one shape: the coordinates p_a along each axis of x in elements, of which
        the first is at 0. float32, bfloat16, float16 or float64, whatever x is.
      order: 0 to 5. Of order 0 a coordinate midway between two elements is that of the second one; where x goes on
        backwards, that is the second one of x, but of "mirror" between the last element and what comes after it.
      mode: how x goes on outside. With v = cval, and abcd for x:
        "constant": y is v at coordinates outside of x, below 0 or above its length - 1; "grid-constant": vvv|abcd|vvv;
        "nearest": aaa|abcd|ddd; "mirror": dcb|abcd|cba; "reflect" and "grid-mirror": cba|abcd|dcb; "grid-wrap":
        bcd|abcd|abc; "wrap": as if a and d were in one place, bcd|bcd|bcd between a and d; it is d before a, and a
        behind d.
      cval: a number, infinity and NaN too.
      out_dtype: the result's dtype; None is that of x.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, of the shape of coordinates without its first axis.

    Differentiation: any order, in x and coordinates. In coordinates order 0 has the derivative 0, and order 1 that on
      the side of larger coordinates; a spline of order 2 or more is smooth, with the derivatives of its pieces. They
      are 0 where y is cval. The gradient in x sorts and gathers: there is no scatter and no atomic addition.

    Numerics: coordinates and weights in float32 (float64 if x or coordinates are), each step rounded, and products
      added tap by tap; the filter's response is cut where it is below 2^-26 (2^-56) and added in the order of its taps;
      one conversion at the end. Determinism level "portable", gradients "mesh_invariant". What has weight 0 is not
      read, but a filter spreads a NaN or an infinity to all that its response reaches. A NaN coordinate gives NaN
      (0 in integers) and sends no gradient to x. Coordinates beyond ±2^30, infinity too, count as ±2^30.

    Raises:
      ValueError: an option out of range, coordinates that do not fit, an array without elements. TypeError: a dtype
      that is not served. NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> x, p = jnp.array([0.0, 1.0, 4.0, 9.0]), jnp.array([[1.0, 1.5, 2.5, 3.5]])
      >>> dnn.map_coordinates(x, p, order=1, mode="nearest").tolist()
      [1.0, 2.5, 6.5, 9.0]

    Sources: `scipy.ndimage.map_coordinates`, whose modes these are; its coefficients of "reflect", "grid-mirror" and
      "nearest" are those of the spline up to z^N alone, of the filter's pole z (-0.27 for order 3) and N elements. Of
      `jax.scipy.ndimage.map_coordinates`, which has orders 0 and 1, "constant" is "grid-constant" here, and "wrap" is
      "grid-wrap". Unser, "Splines: a perfect fit for signal and image processing" (1999).
    """
    x = blending.array("x", x, determinism)
    checks.dtype("x", x, (*checks.FLOATS, jnp.int8, jnp.uint8))
    places = _places(coordinates, x.ndim)
    order = checks.integer("order", order)
    if not 0 <= order <= HIGHEST:
        raise ValueError(f"`order` must be from 0 to {HIGHEST}, got {order}.")
    checks.choice("mode", mode, MODES)
    cval, level = checks.as_float("cval", cval), required(determinism)
    pad = PAD if order > 1 and mode in ("nearest", "grid-constant") else 0
    if x.ndim < 1 or min(x.shape) < 1:
        raise ValueError(f"`x` must have at least one axis, and one element along each, got shape {tuple(x.shape)}.")
    elements, points = math.prod(n + 2 * pad for n in x.shape), math.prod(places.shape[1:])
    taps = 0 if export.is_symbolic_dim(points) else points * (order + 1) ** x.ndim
    if max(elements, taps) > checks.LARGEST - 2:
        raise ValueError(
            f"`x` and `coordinates` must have fewer than 2^31 elements and taps, got shapes {tuple(x.shape)} and "
            f"{checks.shown(tuple(places.shape))}."
        )
    wide = blending.accumulator(x.dtype)
    wide = wide if jnp.issubdtype(wide, jnp.floating) else np.dtype(np.float32)
    places = places.astype(max(wide, np.dtype(places.dtype), key=lambda dtype: dtype.itemsize))
    scalar = places.ndim == 1
    index, weights = Spline(order, mode, pad).taps(places[:, None] if scalar else places, x.shape)
    index = jnp.where(index < 0, jnp.int32(elements), index)
    # As many axes as there are points', of length 1 but for the last: points keep theirs.
    ones = (1,) * (weights.ndim - 2)

    def line(x: Array) -> Array:
        c = _coefficients(x, order, mode, cval, pad, level)
        return lax.concatenate([c.reshape(-1), jnp.full((1,), cval, wide)], 0).reshape(*ones, elements + 1, 1)

    letters = tuple(f"x{i}" for i in range(x.ndim))
    spread = tuple(f"o{i}" for i in range(len(ones) + 2))
    c = primitives.composed(line, lambda x: Factors((letters,), (spread,), ()), real(x, wide))
    spec = SampleSpec((*ones, elements + 1), engine, level)
    y = primitives.call("grid_sample", c, weights.astype(wide), index, spec=spec)[..., 0]
    out = blending.out_dtype(out_dtype, x)
    return blending.blend(y[0] if scalar else y, alpha=1.0, beta=0.0, prior=None, out=out, level=level)


def _places(value: Any, axes: int) -> Array:
    if checks.is_sequence(value):
        each = [checks.array("coordinates", v) for v in value]
        if len({v.shape for v in each}) > 1 or len({v.dtype for v in each}) > 1:
            found = ", ".join(f"{v.dtype.name} {tuple(v.shape)}" for v in each)
            raise ValueError(f"`coordinates` must be arrays of one shape and one dtype, got {found}.")
        value = jnp.stack(each) if each else jnp.zeros((0,))
    places = checks.array("coordinates", value)
    checks.dtype("coordinates", places, checks.FLOATS)
    if places.ndim < 1 or places.shape[0] != axes:
        raise ValueError(
            f"`coordinates` must have the first axis of size {axes}, a coordinate for each axis of `x`, got shape "
            f"{checks.shown(tuple(places.shape))}."
        )
    return rounded(jnp.asarray(places))


# ---- taps ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Spline:
    """What a coordinate means, see `map_coordinates`; of arrays that go on for `pad` elements."""

    order: int
    mode: str
    pad: int

    @ft.partial(jax.jit, static_argnums=(0, 2))
    def taps(self, places: Array, sizes: tuple[int, ...]) -> tuple[Array, Array]:
        """The flat index (-1 for `cval`) and the weight of every tap, the last axis of both, of places (d, ...)."""
        each = [self._along(*of) for of in zip(places, sizes, strict=True)]
        index, weights = across(each, [n + 2 * self.pad for n in sizes])
        if self.mode == "constant":
            beyond = [(p < 0) | (p > n - 1) for p, n in zip(places, sizes, strict=True)]
            out = ft.reduce(jnp.logical_or, beyond)[..., None]
            one = lax.broadcasted_iota(jnp.int32, index.shape, index.ndim - 1) == 0
            index = jnp.where(out, -1, index)
            weights = jnp.where(out, one.astype(weights.dtype), weights)
        none = ft.reduce(jnp.logical_or, map(jnp.isnan, places))[..., None]
        return jnp.where(none, -1, index), jnp.where(none, jnp.full_like(weights, jnp.nan), weights)

    def _along(self, p: Array, size: int) -> tuple[Array, Array]:
        """The element, -1 for `cval`, and the weight of each tap along an axis."""
        low, high = {
            "nearest": (-self.pad, size - 1 + self.pad),
            "grid-constant": (-self.pad - 9, size + 8 + self.pad),
        }.get(self.mode, (-FAR, FAR))
        p = clip(jnp.where(jnp.isnan(p), jnp.zeros_like(p), p), low, high)
        if self.mode == "wrap":
            span = jnp.full_like(p, max(size - 1, 1))
            periods = lax.stop_gradient(quotient(p, span))
            times = jnp.where(p < 0, jnp.ceil(periods) - 1, jnp.floor(periods))
            p = jnp.where((p < 0) | (p > size - 1), p - product(times, span), p)
        q = p if self.order % 2 else rounded(p + 0.5)
        floor = jnp.floor(q)
        first = floor.astype(jnp.int32) - (self.order // 2 - self.pad)
        if self.order == 0 and self.mode in TURNING:
            first = jnp.where((p - jnp.floor(p) == 0.5) & _turns(first - 1, size, self.mode, p < 0), first - 1, first)
        at = first[..., None] + lax.broadcasted_iota(jnp.int32, (*first.shape, self.order + 1), first.ndim)
        weights = _basis(rounded(q - lax.stop_gradient(floor)), self.order)
        return _inside(at, size + 2 * self.pad, self.mode), jnp.stack(weights, -1)


def _turns(at: Array, size: int, mode: str, below: Array) -> Array:
    """Whether an array goes on backwards behind the element `at`; as SciPy has it, not from its last one up."""
    if mode == "mirror":
        return at % max(2 * size - 2, 1) >= jnp.where(below, size - 1, size)
    return at % (2 * size) >= size


def _basis(f: Array, order: int) -> list[Array]:
    """The B-spline at the taps from below to above, f of the way between two of its knots."""
    found = [jnp.ones_like(f)]
    for k in range(1, order + 1):
        terms: list[list[Array]] = [[] for _ in range(k + 1)]
        for j, known in enumerate(found):
            terms[j + 1].append(product(rounded(f + (k - j - 1)), known))
            terms[j].append(product(rounded((j + 1) - f), known))
        found = [ft.reduce(jnp.add, each) for each in terms]
        found = [quotient(v, jnp.full_like(v, k)) for v in found] if k > 1 else found
    return found


def _inside(at: Array, size: int, mode: str) -> Array:
    """The elements that stand at places inside and outside; -1 for `cval`."""
    if mode == "grid-constant":
        return jnp.where((at >= 0) & (at < size), at, -1)
    if mode == "nearest":
        return jnp.clip(at, 0, size - 1)
    return _goes_on(jnp, at, size, FILTERED_AS.get(mode, "mirror"))


def _goes_on(xp: Any, at: Any, size: int, how: str) -> Any:
    if how == "grid-wrap":
        return at % size
    both = 2 * size - 1 if how == "reflect" else 2 * size - 2
    at = at % (both + 1 if how == "reflect" else max(both, 1))
    return xp.minimum(at, both - at)


# ---- coefficients ----------------------------------------------------------------------------------------------------


def _coefficients(x: Array, order: int, mode: str, cval: float, pad: int, level: str) -> Array:
    """Those of the spline through x, in the order of its axes; of x as it goes on for `pad` elements."""
    if order < 2:
        return x
    if pad:
        for axis in range(x.ndim):
            ends = [lax.slice_in_dim(x, at, at + 1, axis=axis) for at in (0, x.shape[axis] - 1)]
            low, high = (
                lax.concatenate([end if mode == "nearest" else jnp.full_like(end, cval)] * pad, axis) for end in ends
            )
            x = lax.concatenate([low, x, high], axis)
    for axis in range(-x.ndim, 0):
        x = _filtered(x, axis=axis, order=order, how=FILTERED_AS.get(mode, "mirror"), level=level, back=False)
    return x


def _run(x: Array, *, axis: int, order: int, how: str, level: str, back: bool) -> Array:
    size = x.shape[axis]
    index, weights = _filter(size, order, how, x.dtype == np.float32, back)
    moved = jnp.moveaxis(x, axis, 0)
    lines = moved.reshape(size, math.prod(moved.shape[1:]))
    operands = lines, jnp.asarray(weights, x.dtype), jnp.asarray(index)
    found = primitives.bind("grid_sample", *operands, spec=SampleSpec((size,), None, level))
    return jnp.moveaxis(found.reshape(moved.shape), 0, axis)


_filtered = primitives.linear_map("spline_coefficients", _run, lambda back, **given: {**given, "back": not back})


@ft.lru_cache(maxsize=64)
def _filter(size: int, order: int, how: str, narrow: bool, back: bool) -> tuple[np.ndarray, np.ndarray]:
    """The filter along an axis of `size` elements, or its transpose: each result's taps and their weights."""
    h = _response(order, 2.0**-26 if narrow else 2.0**-56)
    reach = len(h) - 1
    taps, row = min(size, 2 * reach + 1), np.arange(size)
    wraps = how == "grid-wrap"
    start = row - reach if wraps else np.clip(row - reach, 0, size - taps)
    column = lambda at, of: (at - start[of]) % size if wraps else at - start[of]
    weights = np.zeros((size, taps))
    for k in range(-reach, reach + 1):
        weights[row, column(_goes_on(np, row + k, size, how), row)] += h[abs(k)]
    index = start[:, None] + np.arange(taps)
    index = index % size if wraps else index
    if back:
        (at, tap), turned = np.nonzero(weights), np.zeros_like(weights)
        turned[index[at, tap], column(at, index[at, tap])] = weights[at, tap]
        weights = turned
    return index.astype(np.int32), weights


def _response(order: int, least: float) -> list[float]:
    """h(0), h(1), ... of the filter, up to where its slowest power is below `least`."""
    poles, scale = POLES[order]
    length = next(k for k in range(200) if max(map(abs, poles)) ** k < least)
    found = [0.0] * (length + 1)
    for i, z in enumerate(poles):
        term = -scale * z / (1 - z * z)
        for other in (*poles[:i], *poles[i + 1 :]):
            term = term * -other / ((1 - other / z) * (1 - other * z))
        for k in range(length + 1):
            found[k], term = found[k] + term, term * z
    return found
