"""The resampling primitive: one axis, as a banded matrix of constant weights, and its transpose in the same form.

An axis of n elements becomes one of m: y[i] = Σ_k w[i, k] x[start[i] + k]. The transpose of such a
matrix is banded too, because the bands move in one direction; so the gradient gathers as well, and adds in one order.
XLA would transpose the gather into a scatter, which on GPUs adds with atomics.
"""

import dataclasses
import functools as ft
import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax

from jaxdnn._src.core import primitives
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.partitioning import Axes, Factors, Run, exchange

RADIUS = {"linear": 1, "cubic": 2, "lanczos3": 3}  # of the kernel, in source elements
TINY = 2.0**-45  # a weight below is 0 but for the rounding of sin(πv)
METHODS = ("nearest", *RADIUS)
COORDINATES = ("half_pixel", "align_corners", "asymmetric")
ROUNDINGS = ("half_up", "half_down", "floor", "ceil")
BOUNDARIES = ("edge", "renormalise", "zero")


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one axis is resampled; `ratio` is the distance of two neighbouring results in source elements."""

    inputs: int
    outputs: int
    ratio: Fraction
    method: str
    coordinates: str
    rounding: str
    cubic_coefficient: float
    antialias: bool
    boundary: str

    @property
    def is_identity(self) -> bool:
        return self.inputs == self.outputs and self.ratio == 1


@dataclasses.dataclass(frozen=True)
class ResampleSpec:
    """One axis, counted from the end, and how it is resampled."""

    rule: Rule
    axis: int
    transposed: bool = False
    engine: str | None = None
    level: str = "fast"


class Band(NamedTuple):
    """start: int32 [outputs]; weights: float64 [outputs, taps], zero where a row has fewer taps."""

    start: np.ndarray
    weights: np.ndarray


@ft.lru_cache(maxsize=256)
def band(rule: Rule, transposed: bool = False) -> Band:
    """The matrix of a rule; weights are computed in float64 from exact coordinates."""
    if transposed:
        return _transpose(band(rule), rule.inputs)
    if rule.method == "nearest":
        place = np.clip(_nearest(rule), 0, rule.inputs - 1)
        return Band(place.astype(np.int32), np.ones((rule.outputs, 1)))
    return _inside(rule, *_kernel_weights(rule))


def _numerators(rule: Rule) -> tuple[np.ndarray, int]:
    """Where each result lies in the source, as exact fractions over one denominator (Python's integers)."""
    p, q = rule.ratio.numerator, rule.ratio.denominator
    i = np.arange(rule.outputs).astype(object)
    return ((2 * i + 1) * p - q if rule.coordinates == "half_pixel" else 2 * i * p), 2 * q


def _nearest(rule: Rule) -> np.ndarray:
    s, d = _numerators(rule)
    half = d // 2
    rounded = {"floor": s // d, "ceil": -(-s // d), "half_up": (s + half) // d, "half_down": -(-(s - half) // d)}
    return rounded[rule.rounding].astype(np.int64)


def _kernel_weights(rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """The first tap of each result, which may lie outside, and the weights of its taps."""
    s, d = _numerators(rule)
    widening = max(rule.ratio, Fraction(1)) if rule.antialias else Fraction(1)
    reach = math.ceil(RADIUS[rule.method] * widening)
    floor = (s // d).astype(np.int64)
    offsets = np.arange(1 - reach, reach + 1)
    distances = np.abs(offsets.astype(object) * d - (s - (s // d) * d)[:, None]) / d  # of exact integers: rounded once
    weights = _kernel(rule, distances.astype(np.float64) / float(widening))
    weights[np.abs(weights) < TINY] = 0.0
    if rule.antialias or rule.method == "lanczos3":
        weights /= _sums(weights)
    return floor + offsets[0], weights


def _sums(weights: np.ndarray) -> np.ndarray:
    """Those of rows, each rounded once."""
    return np.array([math.fsum(row) for row in weights]).reshape(-1, 1)


def _kernel(rule: Rule, t: np.ndarray) -> np.ndarray:
    if rule.method == "linear":
        return np.maximum(1 - t, 0)
    if rule.method == "lanczos3":
        return np.where(t < 3, np.sinc(t) * np.sinc(t / 3), 0)
    a = rule.cubic_coefficient
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = a * (((t - 5) * t + 8) * t - 4)
    return np.where(t <= 1, near, np.where(t < 2, far, 0))


def _inside(rule: Rule, first: np.ndarray, weights: np.ndarray) -> Band:
    """Moves the taps that lie outside to the edge, or drops them."""
    n, taps = rule.inputs, min(weights.shape[1], rule.inputs)
    place = first[:, None] + np.arange(weights.shape[1])
    if rule.boundary != "edge":
        weights = np.where((place >= 0) & (place < n), weights, 0.0)
    if rule.boundary == "renormalise":
        total = _sums(weights)
        weights = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)
    start = np.clip(first, 0, n - taps)
    within = np.zeros((rule.outputs, taps))
    np.add.at(within, (np.arange(rule.outputs)[:, None], np.clip(place, 0, n - 1) - start[:, None]), weights)
    return Band(start.astype(np.int32), within)


def _transpose(of: Band, inputs: int) -> Band:
    """Row j of the transpose holds the results i that use element j, which are neighbours."""
    outputs = len(of.weights)
    i, k = np.nonzero(of.weights)
    j = of.start[i] + k
    first, last = np.full(inputs, outputs), np.full(inputs, -1)
    np.minimum.at(first, j, i)
    np.maximum.at(last, j, i)
    width = max(int((last - first).max(initial=0)) + 1, 1)
    start = np.clip(np.minimum(first, outputs - width), 0, None)
    weights = np.zeros((inputs, width))
    weights[j, i - start[j]] = of.weights[i, k]
    return Band(start.astype(np.int32), weights)


# ---- the primitive ---------------------------------------------------------------------------------------------------


def _results(spec: ResampleSpec, x: Any) -> jax.ShapeDtypeStruct:
    rows, axis = spec.rule.inputs if spec.transposed else spec.rule.outputs, spec.axis % len(x.shape)
    return jax.ShapeDtypeStruct((*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype)


def _jvp(spec: ResampleSpec, primals: Any, tangents: Any) -> tuple[Array, Any]:
    y = bind(*primals, spec=spec)
    (dx,) = tangents
    return y, primitives.zero_tangent(y) if isinstance(dx, ad.Zero) else bind(dx, spec=spec)


def _backward(spec: ResampleSpec, ct: Array, _: Any) -> list[Array]:
    return [bind(ct, spec=dataclasses.replace(spec, transposed=not spec.transposed))]


def _factors(spec: ResampleSpec, x: Any) -> Factors:
    """The axis itself may be sharded where one of its lengths divides the other: then a device has matching parts."""
    axis, inputs, outputs = spec.axis % len(x.shape), x.shape[spec.axis], _results(spec, x).shape[spec.axis]
    ratio = max(inputs, outputs) // max(min(inputs, outputs), 1)
    even = ratio > 0 and ratio * min(inputs, outputs) == max(inputs, outputs)
    long = "n ratio" if ratio > 1 else "n"
    own = ("n" if inputs <= outputs else long, long if inputs <= outputs else "n") if even else ("in", "out")
    named = lambda name: tuple(name if i == axis else f"a{i}" for i in range(len(x.shape)))
    return Factors(
        operands=(named(own[0]),),
        results=(named(own[1]),),
        free=tuple(f"a{i}" for i in range(len(x.shape)) if i != axis),
        placed=("n",) if even else (),
        sizes={"n": min(inputs, outputs), "ratio": ratio} if even and ratio > 1 else {},
        local=ft.partial(_on_device, spec),
    )


def _on_device(spec: ResampleSpec, run: Run, axes: Axes, x: Array) -> Array:
    """A device's part, with the elements of other devices that its results are made of."""
    from jaxdnn._src.resample import xla

    devices, axis = axes["n"], spec.axis % x.ndim
    start, weights = band(spec.rule, spec.transposed)
    rows, count = x.shape[axis], len(start) // devices.count
    first = np.arange(devices.count) * rows
    places = np.where(weights.any(1), start - np.repeat(first, count), 0).reshape(devices.count, count)
    before = max(int(-places.min()), 0)
    x = exchange(x, axis, devices, before, max(int(places.max()) + weights.shape[1] - rows, 0))
    here = lambda full: lax.dynamic_slice_in_dim(full, devices.index() * count, count)
    return xla.banded(x, axis, (places + before).astype(np.int32).reshape(-1), weights, here)


def _batch(spec: ResampleSpec, operands: Any, dims: Any) -> Any:
    return primitives.batch_leading(bind, spec, operands, dims)


bind = primitives.define("resample", results=_results, jvp=_jvp, transpose=_backward, batch=_batch, factors=_factors)
