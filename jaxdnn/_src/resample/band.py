"""How an axis is resampled: the banded matrix of its weights, which the rule alone decides, and its transpose."""

import dataclasses
import functools as ft
import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

RADIUS = {"linear": 1, "cubic": 2, "lanczos3": 3}  # of the kernel, in source elements
TINY = 2.0**-45  # a weight below is 0 but for the rounding of sin(πv)
METHODS = ("nearest", *RADIUS)
ROI = "tf_crop_and_resize"
COORDINATES = ("half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric", "pytorch_half_pixel", ROI)
ROUNDINGS = ("half_up", "half_down", "floor", "ceil")
BOUNDARIES = ("edge", "renormalise", "zero")


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one axis is resampled; `ratio` is the distance of two neighbouring results in source elements.

    offset: the first result's place, of "tf_crop_and_resize".
    """

    inputs: int
    outputs: int
    ratio: Fraction
    method: str
    coordinates: str
    rounding: str
    cubic_coefficient: float
    antialias: bool
    boundary: str
    offset: Fraction = Fraction(0)

    @property
    def is_identity(self) -> bool:
        return self.inputs == self.outputs and self.ratio == 1 and self.offset == 0

    @property
    def outside(self) -> np.ndarray:
        """Whether the place of each result is outside of the source."""
        s, d = _numerators(self)
        return ((s < 0) | (s > (self.inputs - 1) * d)).astype(bool)


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
    """The place of each result in the source, as exact fractions over one denominator (Python's integers)."""
    p, q = rule.ratio.numerator, rule.ratio.denominator
    i = np.arange(rule.outputs).astype(object)
    if rule.coordinates == "pytorch_half_pixel" and rule.outputs == 1:
        return 0 * i, 2 * q
    if rule.coordinates == ROI:
        a, b = rule.offset.numerator, rule.offset.denominator
        return 2 * (i * p * b + a * q), 2 * q * b
    if rule.coordinates in ("align_corners", "asymmetric"):
        return 2 * i * p, 2 * q
    centred = rule.inputs * q - rule.outputs * p if rule.coordinates == "half_pixel_symmetric" else 0
    return (2 * i + 1) * p - q + centred, 2 * q


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
    """The sums of rows, each rounded once."""
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
