"""Normalisations by a neighbourhood: local response over channels, divisive over pixels.

XLA computes them element by element. A sum has few terms, which are added in a fixed order, so that an element depends
on its own neighbourhood alone.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import blending, checks, frames, partitioning, primitives
from jaxdnn._src.core.annotations import Scale
from jaxdnn._src.core.determinism import require
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Axes, Factors, Run, exchange
from jaxdnn._src.core.rounding import at_edges, power, product, reciprocal, root
from jaxdnn._src.norm import arguments

_SIDES = ("high", "low")
_WHY = "its powers are the device's"


@public
def lrn(
    x: ArrayLike,
    /,
    *,
    n: int = 5,
    lrn_alpha: float = 1e-4,
    lrn_beta: float = 0.75,
    k: float = 2.0,
    even: str = "high",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    layout: str = "NHWC",
    out_dtype: DTypeLike | None = None,
    determinism: str | None = None,
) -> Array:
    """Local response normalisation across channels.

    s[c] = k + lrn_alpha / n Σ_i x[i]²        y[c] = alpha x[c] s[c]^-lrn_beta + beta prior[c]

    over the n channels i from c - ⌊(n - 1) / 2⌋ to c + ⌈(n - 1) / 2⌉ that there are.

    Args:
      x: (N, H, W, C) for layout NHWC; float32, bfloat16, float16 or float64.
      n: the width of the window, at least 1.
      lrn_alpha: the weight of the mean square; it is divided by n here, unlike TensorFlow's.
      lrn_beta: the exponent.
      k: what is added; Caffe, TensorFlow, ONNX and PyTorch have 1.
      even: on which side of c a window of even width has one channel more: "high" as cuDNN and ONNX define it, "low"
        as PyTorch does.
      alpha, beta, prior: the blend, see `conv`.
      layout: the axes of x and y, see `conv`. Zeros that only fill the last vector up change no other channel.
      out_dtype: the result's dtype; None is that of x.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`; this is mesh_invariant.

    Returns:
      y, in x's shape.

    Differentiation: any order, forward and reverse, in x, prior, and alpha and beta if they are arrays.

    Numerics: in float32 (float64 for float64), squares added from the lowest channel up, converted once.

    Raises:
      ValueError, TypeError: arguments that do not fit.
      NotImplementedError: a level that cannot be guaranteed.

    Example:
      >>> dnn.lrn(jnp.ones((1, 1, 1, 3)), n=2, lrn_alpha=2.0, lrn_beta=1.0).ravel().tolist()
      [0.25, 0.25, 0.3333333432674408]

    Sources: Krizhevsky, Sutskever and Hinton (2012), section 3.3; cuDNN's cudnnLRNCrossChannelForward, whose defaults
      these are; PyTorch's local_response_norm, ONNX's LRN.
    """
    frame = frames.frame(layout)
    level = require("lrn", determinism, "mesh_invariant", _WHY)
    x = at_edges(level, frame.array("x", x))
    found = arguments.types(x, out_dtype)
    window = _window_of(n, lrn_alpha, lrn_beta, k, even)
    wide = x.astype(found.accumulate)
    y = product(wide, window.powers(wide, (frame.layout.channel,))[0])
    return frame.restore(_blended(frame, y, alpha, beta, prior, found))


@public
def lrn_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    /,
    *,
    n: int = 5,
    lrn_alpha: float = 1e-4,
    lrn_beta: float = 0.75,
    k: float = 2.0,
    even: str = "high",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    layout: str = "NHWC",
    out_dtype: DTypeLike | None = None,
    determinism: str | None = None,
) -> Array:
    """The gradient of local response normalisation in its input.

    g[i] = dy[i] s[i]^-lrn_beta - 2 lrn_alpha lrn_beta / n x[i] Σ_c dy[c] x[c] s[c]^(-lrn_beta - 1)
    dx = alpha g + beta prior

    over the channels c whose window holds i, with s as in `lrn`.

    Args:
      dy: the gradient in x s^-lrn_beta, x's shape.
      x: the input of `lrn`.
      n, lrn_alpha, lrn_beta, k, even, layout: as they were given to `lrn`.
      alpha, beta, prior: the blend of dx, see `conv`.
      out_dtype: dx's dtype; None is that of x.
      determinism: see `lrn`.

    Returns:
      dx, in x's shape.

    Differentiation: any order, in dy, x, prior, and alpha and beta if they are arrays.

    Numerics: as `lrn`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lrn`.

    Example:
      >>> dnn.lrn_dgrad(jnp.ones((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1)), n=1, lrn_alpha=2.0, lrn_beta=1.0).item()
      0.0

    Sources: cuDNN's cudnnLRNCrossChannelBackward, which takes y too and does not need it.
    """
    frame = frames.frame(layout)
    level = require("lrn_dgrad", determinism, "mesh_invariant", _WHY)
    x, dy = at_edges(level, (frame.array("x", x), frame.array("dy", dy)))
    found = arguments.types(x, out_dtype)
    dy = arguments.cotangent(dy, x, found).astype(found.accumulate)
    window = _window_of(n, lrn_alpha, lrn_beta, k, even)
    wide = x.astype(found.accumulate)
    dx, _ = window.gradient(dy, wide, wide, (frame.layout.channel,))
    return frame.restore(_blended(frame, dx, alpha, beta, prior, found))


@public
def divisive_norm(
    x: ArrayLike,
    /,
    *,
    means: ArrayLike | None = None,
    n: int = 5,
    lrn_alpha: float = 1e-4,
    lrn_beta: float = 0.75,
    k: float = 2.0,
    even: str = "high",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    layout: str = "NHWC",
    out_dtype: DTypeLike | None = None,
    determinism: str | None = None,
) -> Array:
    """Divisive normalisation: divides by a power of the mean square around a pixel, in its own channel.

    s = k + lrn_alpha / n^D Σ (x - means)²        y = alpha x s^-lrn_beta + beta prior

    over the pixels of a window of n along each of the D spatial axes, as far as it lies within the image.

    Args:
      x: (N, H, W, C) for layout NHWC; float32, bfloat16, float16 or float64.
      means: x's shape: local means, or whatever else is to be subtracted within the square; None is 0.
      n: the width of the window along every spatial axis, at least 1.
      lrn_alpha: the weight of the mean square; divided by n^D here.
      lrn_beta, k: the exponent, and what is added.
      even: where a window of even width has one pixel more, see `lrn`.
      alpha, beta, prior: the blend, see `conv`.
      layout: the axes of x and y, see `conv`.
      out_dtype: the result's dtype; None is that of x.
      determinism: see `lrn`.

    Returns:
      y, in x's shape.

    Differentiation: any order, forward and reverse, in x, means, prior, and alpha and beta if they are arrays. If the
      means are computed from x, the whole gradient comes from differentiating that too, as JAX does.

    Numerics: in float32 (float64 for float64), the squares added axis by axis from the low end up, converted once.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lrn`.

    Example:
      >>> dnn.divisive_norm(jnp.ones((1, 1, 2, 1)), n=2, lrn_alpha=4.0, lrn_beta=1.0).ravel().tolist()
      [0.25, 0.3333333432674408]

    Sources: cuDNN's cudnnDivisiveNormalizationForward, mode PRECOMPUTED_MEANS, without means "spatial LRN"; Jarrett,
      Kavukcuoglu, Ranzato and LeCun (2009) for local contrast normalisation, of which this is the division.
    """
    frame = frames.frame(layout)
    level = require("divisive_norm", determinism, "mesh_invariant", _WHY)
    x = at_edges(level, frame.array("x", x))
    found = arguments.types(x, out_dtype)
    window = _window_of(n, lrn_alpha, lrn_beta, k, even)
    wide = x.astype(found.accumulate)
    y = product(wide, window.powers(wide - _means(frame, means, x, found, level), frame.layout.spatial)[0])
    return frame.restore(_blended(frame, y, alpha, beta, prior, found))


@public
def divisive_norm_dgrad(
    dy: ArrayLike,
    x: ArrayLike,
    /,
    *,
    means: ArrayLike | None = None,
    n: int = 5,
    lrn_alpha: float = 1e-4,
    lrn_beta: float = 0.75,
    k: float = 2.0,
    even: str = "high",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    layout: str = "NHWC",
    out_dtype: DTypeLike | None = None,
    determinism: str | None = None,
) -> tuple[Array, Array]:
    """The gradients of divisive normalisation in its input and its means, as if these did not depend on each other.

    t[i] = 2 lrn_alpha lrn_beta / n^D (x[i] - means[i]) Σ_j dy[j] x[j] s[j]^(-lrn_beta - 1)
    dx = alpha (dy s^-lrn_beta - t) + beta prior        dmeans = alpha t

    over the pixels j whose window holds i, with s as in `divisive_norm`.

    Args:
      dy: the gradient in x s^-lrn_beta, x's shape.
      x, means: as they were given to `divisive_norm`.
      n, lrn_alpha, lrn_beta, k, even, layout: likewise.
      alpha, beta, prior: the blend of dx, see `conv`.
      out_dtype: dx's and dmeans' dtype; None is that of x.
      determinism: see `lrn`.

    Returns:
      dx and dmeans, in x's shape.

    Differentiation: any order, in dy, x, means, prior, and alpha and beta if they are arrays.

    Numerics: as `divisive_norm`.

    Raises:
      ValueError, TypeError, NotImplementedError: as `lrn`.

    Example:
      >>> one = jnp.ones((1, 1, 1, 1))
      >>> [g.item() for g in dnn.divisive_norm_dgrad(one, one, n=1, lrn_alpha=2.0, lrn_beta=1.0)]
      [0.0, 0.25]

    Sources: cuDNN's cudnnDivisiveNormalizationBackward.
    """
    frame = frames.frame(layout)
    level = require("divisive_norm_dgrad", determinism, "mesh_invariant", _WHY)
    x, dy = at_edges(level, (frame.array("x", x), frame.array("dy", dy)))
    found = arguments.types(x, out_dtype)
    dy = arguments.cotangent(dy, x, found).astype(found.accumulate)
    window = _window_of(n, lrn_alpha, lrn_beta, k, even)
    wide = x.astype(found.accumulate)
    centred = wide - _means(frame, means, x, found, level)
    dx, dmeans = window.gradient(dy, wide, centred, frame.layout.spatial)
    scaled = blending.blend(dmeans, alpha=alpha, beta=0.0, prior=None, out=found.out)
    return frame.restore(_blended(frame, dx, alpha, beta, prior, found)), frame.restore(scaled)


# ---- windows ---------------------------------------------------------------------------------------------------------


class _Window:
    """s = k + alpha / n^D Σ v² over a window, and its powers."""

    def __init__(self, n: int, alpha: float, beta: float, k: float, low: int):
        self.n, self.alpha, self.beta, self.k = n, alpha, beta, k
        self.low, self.high = low, n - 1 - low

    def powers(self, v: Array, axes: Sequence[int]) -> tuple[Array, Array]:
        """s^-beta and s^(-beta - 1)."""
        total = _summed(product(v, v), axes, self.low, self.high)
        rate = self.alpha / self.n ** len(axes)
        s = jnp.asarray(self.k, v.dtype) + product(total, jnp.asarray(rate, v.dtype))
        found = _inverse_power(s, self.beta)
        if self.n == 1:  # All is then one fusion of XLA, whose tuning on GPUs takes many times longer with each fence.
            found = lax.optimization_barrier(found)
        return found, product(found, reciprocal(s))

    def gradient(self, dy: Array, x: Array, v: Array, axes: Sequence[int]) -> tuple[Array, Array]:
        """dx, and with the opposite sign its part that comes through v, which is x less the means."""
        first, second = self.powers(v, axes)
        # A pixel lies in the windows of those pixels that the mirrored window around it holds.
        gathered = _summed(product(product(dy, x), second), axes, self.high, self.low)
        rate = 2 * self.alpha * self.beta / self.n ** len(axes)
        through = product(product(v, jnp.asarray(rate, v.dtype)), gathered)
        return product(dy, first) - through, through


@ft.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _inverse_power(s: Array, exponent: float) -> Array:
    """s^-exponent, of multiples of 1/4, such as the usual 3/4, by roots: on CPUs in a tenth of a power's time."""
    if not (0 < exponent <= 2 and (4 * exponent).is_integer()):
        return power(s, -exponent)
    whole, quarters = divmod(int(4 * exponent), 4)
    half = root(s)
    factors = [*[s] * whole, *[half] * (quarters // 2), *[root(half)] * (quarters % 2)]
    return reciprocal(ft.reduce(product, factors))


@_inverse_power.defjvp
def _inverse_power_jvp(exponent: float, primals: Any, tangents: Any) -> tuple[Array, Array]:
    y = _inverse_power(*primals, exponent)
    slope = product(product(y, reciprocal(primals[0])), jnp.asarray(-exponent, y.dtype))
    return y, product(tangents[0], slope)


def _window_of(n: Any, alpha: Any, beta: Any, k: Any, even: Any) -> _Window:
    n = checks.integer("n", n)
    if n < 1:
        raise ValueError(f"`n` must be at least 1, got {n}.")
    if n > checks.LARGEST:
        raise ValueError(f"`n` must be at most {checks.LARGEST}, got a number of {n.bit_length()} bits.")
    low = n // 2 if checks.choice("even", even, _SIDES) == "low" else (n - 1) // 2
    return _Window(n, checks.finite("lrn_alpha", alpha), checks.finite("lrn_beta", beta), checks.finite("k", k), low)


def added(v: Array, *, axes: tuple[int, ...], low: int, high: int) -> Array:
    """The sum over a window around every element along each of the axes, which are counted from the last: negative."""
    return _added_on_device(axes, low, high, None, {}, v)


def _added_on_device(axes: Sequence[int], low: int, high: int, _: Run | None, placed: Axes, v: Array) -> Array:
    """The sums around a device's elements, with those of other devices along the axes of which it has a part."""
    for axis in (axis % v.ndim for axis in axes):
        size, devices = v.shape[axis], placed.get(f"d{axis}")
        # What lies further away than the axis is long is zero.
        before, after = (min(r, max(size * (devices.count if devices else 1) - 1, 0)) for r in (low, high))
        if devices is None:
            around = jnp.pad(v, [(before, after) if a == axis else (0, 0) for a in range(v.ndim)])
        else:
            around = exchange(v, axis, devices, before, after)
        terms = [lax.slice_in_dim(around, i, i + size, axis=axis) for i in range(before + after + 1)]
        v = ft.reduce(jnp.add, terms)
    return v


def _factors(v: Any, *, axes: tuple[int, ...], low: int, high: int) -> Factors:
    """All axes may be sharded; along those of the window a device also needs its neighbours' elements."""
    rank = len(v.shape)
    names, along = tuple(f"d{axis}" for axis in range(rank)), tuple(f"d{axis % rank}" for axis in axes)
    free = tuple(name for name in names if name not in along)
    return Factors((names,), (names,), free, placed=along, local=ft.partial(_added_on_device, axes, low, high))


# The transpose is the sum over the mirrored window: that of slices is a sum of padded arrays, for each of which XLA on
# CPUs computes anew whatever they are made of. Of slices XLA would also exchange each one's elements by itself.
_window_sum = primitives.linear_map(
    "window_sum", added, lambda *, axes, low, high: {"axes": axes, "low": high, "high": low}, _factors
)


def _summed(v: Array, axes: Sequence[int], low: int, high: int) -> Array:
    """Σ of v over a window around every element, zero outside: term by term, one axis after the other."""
    bound = ft.partial(_window_sum, axes=tuple(axis - v.ndim for axis in axes), low=low, high=high)
    return primitives.composed(bound, partitioning.elementwise, v)


def _means(frame: Any, means: Any, x: Array, found: Any, level: str) -> Array:
    if means is None:
        return jnp.zeros((), found.accumulate)
    means = frame.array("means", means)
    checks.shape("means", means, x.shape, "that of x")
    checks.dtype("means", means, arguments.narrower(found.accumulate))
    return at_edges(level, means.astype(found.accumulate))


def _blended(frame: Any, computed: Array, alpha: Any, beta: Any, prior: Any, found: Any) -> Array:
    prior = None if prior is None else frame.array("prior", prior)
    dtypes = arguments.narrower(found.accumulate)
    return blending.blend(computed, alpha=alpha, beta=beta, prior=prior, out=found.out, dtypes=dtypes)
