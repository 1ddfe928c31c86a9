"""Batch normalisation in pieces: the sums of channels, what is made of them, and y of given statistics.

The bounds, with u the accumulator's unit roundoff and γ(k) = k u / (1 - k u) what k roundings come to:

* Adding n terms in any order is off by γ(n) Σ |x|, and γ(n + 1) Σ x² with the roundings of the squares.
* The sums, as `bn_finalize` reads them, are exact. A mean and squares / m are off by 2 u of themselves: XLA divides, or
  multiplies with a rounded 1 / m. μ² is off by 2 |μ| 2 u |μ| + (2 u μ)² and a rounding, the difference by both and a
  rounding; a maximum adds nothing.
* r is off by the factor 1 / √(1 - E / V), with V = σ² + eps and E the error of that, and 8 u, as in `bounds.py`.
* A shift is subtracted from each number, and added to the mean, with one rounding.
* Then products and sums follow, each rounded once. A running statistic is off by what its new one is, and γ(6) of the
  magnitudes: of the weights, the quotient m / (m - 1), the products and their sum.
* r of a given variance is off by γ(4): the addition, the root and the quotient, of which XLA's rsqrt rounds two.
* Σ dy (x - mean) has two roundings a term beside the adding, times r one more.
* y of given statistics has those of r, and one for x - mean, each product, and the addition of the bias.

The definition's own error, in float64 or np.longdouble, is the same bound times the quotient of the roundoffs.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import case as plain
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected
from jaxdnn._src.cases.family import family
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core import tolerance
from jaxdnn._src.core.tolerance import Accumulation
from jaxdnn._src.norm.bounds import definition_share
from jaxdnn_reference.norm_batch import of_batch

Values = np.ndarray
SHAPES = {"NHWC": (5, 6, 7, 8), "NCHW": (5, 8, 6, 7), "CHWN": (8, 3, 5, 6), "NCHWc4": (3, 2, 5, 6, 4), "NWC": (4, 9, 8)}
FINALIZE: dict[str, dict[str, Any]] = {
    "parameters-running": {"momentum": 0.3, "eps": 0.01},
    "plain": {},
    "cumulative": {"momentum": 1.0},
    "shifted": {},
}
SHIFTED = "NHWC-shifted"  # numbers far from zero, less others that are
FAR = 100.0
VARIANTS: dict[str, tuple[str, ...]] = {
    "genstats": (next(iter(SHAPES)), SHIFTED, *list(SHAPES)[1:]),
    "bn_finalize": tuple(FINALIZE),
    "bn_finalize_inference": ("parameters", "plain"),
    "dbn_weight": tuple(SHAPES),
    "batch_norm_inference": tuple(SHAPES),
}
COUNT, CHANNELS = 210, 13
RESULTS = {
    "genstats": ("total", "squares"),
    "bn_finalize": ("factor", "summand", "mean", "rstd", "running_mean", "running_variance"),
    "bn_finalize_inference": ("factor", "summand"),
    "dbn_weight": ("dscale", "dbias", "factor_dy", "factor_x", "summand"),
    "batch_norm_inference": ("y",),
}
POSITIONAL = {
    "genstats": ("x",),
    "bn_finalize": ("total", "squares"),
    "bn_finalize_inference": ("mean", "variance"),
    "dbn_weight": ("dy", "x", "mean", "rstd"),
    "batch_norm_inference": ("x", "mean", "variance"),
}
GIVEN = ("scale", "bias", "running_mean", "running_variance")
OF_IMAGES = ("genstats", "dbn_weight", "batch_norm_inference")


@dataclasses.dataclass(frozen=True)
class StatsCase(Case):
    """One call, with parameters unless it is plain; `bn_finalize` takes the sums of `COUNT` numbers of each channel."""

    given: tuple[str, tuple[int, ...]] | None = None  # layout and shape, if not the variant's

    @property
    def names(self) -> tuple[str, ...]:
        """What the operands are."""
        return (*POSITIONAL[self.op], *self._named)

    @property
    def _named(self) -> tuple[str, ...]:
        shift = ("shift",) if self.shifted else ()
        parameters = {"bn_finalize": GIVEN, "dbn_weight": GIVEN[:1]}
        parameters |= dict.fromkeys(("bn_finalize_inference", "batch_norm_inference"), GIVEN[:2])
        return (*shift, *(() if self.variant == "plain" else parameters.get(self.op, ())))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.given[1] if self.given else SHAPES[self.options["layout"]]

    @property
    def shifted(self) -> bool:
        return self.variant.endswith("shifted")

    @property
    def options(self) -> dict[str, Any]:
        """What is given beside operands."""
        if self.op in OF_IMAGES:
            return {"layout": self.given[0] if self.given else self.variant.removesuffix("-shifted")}
        return FINALIZE[self.variant] if self.op == "bn_finalize" else {}

    def call(self, **choices: Any) -> Callable[..., Any]:
        return self._function(dnn, **choices)

    def _function(self, module: Any, **choices: Any) -> Callable[..., Any]:
        function, options = getattr(module, self.op), {**self.options, **choices}
        count, extra = len(POSITIONAL[self.op]), (COUNT,) if self.op == "bn_finalize" else ()
        named = lambda given: dict(zip(self._named, given, strict=True))
        return lambda *v: function(*v[:count], *extra, **named(v[count:]), **options)

    def kinds(self) -> tuple[str, ...]:
        """ "large" data too, of which dy (x - mean) leaves the range and dy (x - mean) rstd does not."""
        return ("normal", "integers", *["large"] * (self.op == "dbn_weight" and self.dtype != "f16"))

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        draw = lambda *s: rng.integers(-4, 5, s).astype(np.float64) if kind == "integers" else rng.normal(0.5, 1, s)
        if "layout" in self.options:
            return self._images(draw, *(2.0**80, 2.0**52) if kind == "large" else (1, 1))
        x = draw(COUNT, CHANNELS)
        made = {"total": x.sum(0), "squares": (x * x).sum(0)}
        arrays = [made[name] if name in made else draw(CHANNELS) for name in self.names]
        if self.shifted:
            arrays[2] += FAR
        arrays = [np.abs(v) if name.endswith("variance") else v for name, v in zip(self.names, arrays, strict=True)]
        return tuple(v.astype(self.in_dtype) for v in arrays)

    def _images(self, draw: Callable[..., np.ndarray], of_dy: float, of_x: float) -> tuple[np.ndarray, ...]:
        """x, and dy, and numbers of every channel; statistics are wide, r a power of two where numbers are whole."""
        shape = self.shape
        channels = of_batch(np.empty(shape), "spatial", self.options["layout"]).own
        if self.op == "genstats":
            x = draw(*shape) + FAR * self.shifted
            arrays = [x, *[draw(*channels) + FAR] * self.shifted]
            return tuple(v.astype(self.in_dtype) for v in arrays)
        if self.op == "batch_norm_inference":
            mean, variance, scale, bias = (draw(*channels) for _ in range(4))
            arrays = [draw(*shape), mean, np.abs(variance), scale, bias]
            return tuple(v.astype(self.in_dtype) for v in arrays)
        wide = np.float64 if self.x64 else np.float32
        images, (mean, scale) = (draw(*shape), draw(*shape)), (draw(*channels), draw(*channels))
        rstd = 2.0 ** np.round(np.abs(mean)) / of_x
        return (
            *((v * size).astype(self.in_dtype) for v, size in zip(images, (of_dy, of_x), strict=True)),
            (mean * of_x).astype(wide),
            rstd.astype(wide),
            scale.astype(self.in_dtype),
        )

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        values = self._function(reference)(*operands)
        values = (values,) if self.op == "batch_norm_inference" else values
        format = accumulation.format
        named = dict(zip(self.names, (v.astype(np.float64) for v in operands), strict=True))
        if self.op == "genstats":
            errors = sums_error(operands[0], self.options["layout"], format, *operands[1:])
        elif self.op == "dbn_weight":
            errors = weight_error(named, self.options["layout"], format=format)
        elif self.op == "bn_finalize_inference":
            errors = inference_error(named, eps=1e-5, format=format)
        elif self.op == "batch_norm_inference":
            errors = (normalised_error(named, self.options["layout"], eps=1e-5, format=format),)
        else:
            errors = finalize_error(named, COUNT, **{"eps": 1e-5, "momentum": 0.1, **self.options}, format=format)
        share = definition_share(format)
        wide = np.float64 if self.x64 else np.float32
        wide = self.in_dtype if self.op == "batch_norm_inference" else wide
        found = zip(RESULTS[self.op], values, errors, strict=True)
        generic = kind != "integers"
        return tuple(Expected(np.asarray(v, np.float64), e * (1 + share), wide, n, generic) for n, v, e in found)

    def describe(self) -> dict[str, Any]:
        if "layout" in self.options:
            return {"shape": self.shape, **self.options}
        count = {"count": COUNT} if self.op == "bn_finalize" else {}
        return {"channels": CHANNELS, **count, **self.options}


def sums_error(x: Values, layout: str, format: str, shift: Values | None = None) -> tuple[Values, Values]:
    """How far the sums of `genstats` may be off; of numbers less a shift each number by one rounding more."""
    rule, v = tolerance.FORMATS[format], of_batch(x.astype(np.float64), "spatial", layout)
    axes, n, extra = tuple(v.axes), v.x.size // v.own[0], 0 if shift is None else 1
    size = np.abs(v.x if shift is None else v.x - shift.astype(np.float64).reshape(v.spread))
    squares = rule.growth(n + 1 + 2 * extra) * (size**2).sum(axes) + n * rule.smallest_normal
    return rule.growth(n + extra) * size.sum(axes), squares


def finalize_error(given: dict[str, Values], m: int, *, eps: float, momentum: float, format: str) -> tuple[Values, ...]:
    """How far the results of `bn_finalize` may be off."""
    rule = tolerance.FORMATS[format]
    u, tiny = rule.roundoff, 8 * rule.smallest_normal
    mean, second = given["total"] / m, given["squares"] / m
    mean_error = 2 * u * np.abs(mean) + tiny
    square_error = 2 * np.abs(mean) * mean_error + mean_error**2
    square_error = square_error + u * (mean**2 + square_error) + 2 * u * second + tiny
    difference = second - mean**2
    error = square_error + u * (np.abs(difference) + square_error)
    if "shift" in given:
        mean = given["shift"] + mean
        mean_error = mean_error + u * (np.abs(mean) + mean_error)
    variance = np.maximum(difference, 0)
    v = variance + eps
    off = error + u * (v + error) + u * eps
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(off < v, 1 / np.sqrt(1 - np.minimum(off / v, 1)) - 1 + 8 * u, np.inf)
        rstd = 1 / np.sqrt(v)
    scale, bias = (np.abs(given.get(name, default)) for name, default in (("scale", 1.0), ("bias", 0.0)))
    factor = scale * rstd
    factor_error = factor * relative * (1 + u) + u * factor + tiny
    product = np.abs(mean) * factor
    product_error = np.abs(mean) * factor_error + mean_error * (factor + factor_error)
    product_error = product_error + u * (product + product_error) + tiny
    summand_error = product_error + u * (product + product_error + bias) + tiny
    unbiased, unbiased_error = variance * m / (m - 1), error * m / (m - 1)
    found = [factor_error, summand_error, mean_error, rstd * relative]
    for new, own, name in ((np.abs(mean), mean_error, GIVEN[2]), (unbiased, unbiased_error, GIVEN[3])):
        weight = momentum if name in given else 1.0
        old = np.abs(given.get(name, 0.0))
        found.append(weight * own + rule.growth(6) * (weight * (new + own) + abs(1 - weight) * old) + tiny)
    return tuple(found)


def inference_error(given: dict[str, Values], *, eps: float, format: str) -> tuple[Values, Values]:
    """How far the results of `bn_finalize_inference` may be off."""
    rule = tolerance.FORMATS[format]
    u, tiny = rule.roundoff, 8 * rule.smallest_normal
    scale, bias = (np.abs(given.get(name, default)) for name, default in (("scale", 1.0), ("bias", 0.0)))
    factor = scale / np.sqrt(given["variance"] + eps)
    product = np.abs(given["mean"]) * factor
    summand = rule.growth(6) * product + tiny
    return rule.growth(5) * factor + tiny, summand + u * (product + bias + summand)


def normalised_error(given: dict[str, Values], layout: str, *, eps: float, format: str) -> Values:
    """How far y of `batch_norm_inference` may be off."""
    rule, v = tolerance.FORMATS[format], of_batch(given["x"], "spatial", layout)
    mean, variance, scale, bias = (given[name].reshape(v.spread) for name in ("mean", "variance", "scale", "bias"))
    r, s = 1 / np.sqrt(variance + eps), np.abs(scale)
    size = np.abs(v.x - mean) * r * s + np.abs(bias)
    spare = 8 * rule.smallest_normal * (1 + r) * (1 + s)
    return v.restore(rule.growth(8) * size + spare)


def weight_error(given: dict[str, Values], layout: str, *, format: str) -> tuple[Values, ...]:
    """How far the results of `dbn_weight` may be off."""
    rule, v = tolerance.FORMATS[format], of_batch(given["x"], "spatial", layout)
    axes, m = tuple(v.axes), v.x.size // v.own[0]
    tiny = 8 * m * rule.smallest_normal
    dy, c = np.abs(v.array(given["dy"])), np.abs(v.x - given["mean"].reshape(v.spread))
    r, mean = np.abs(given["rstd"]), np.abs(given["mean"])
    along, total = (dy * c).sum(axes), dy.sum(axes)
    factor = r * np.abs(given.get("scale", 1.0))
    # Magnitudes, before anything cancels, of what the factor of x and the summand are products and sums of.
    of_x, of_dy = factor * r * r * along / m, factor * total / m
    spare = tiny * (1 + r) * (1 + factor * (1 + r) * (1 + mean))  # what results below the normal numbers may lose
    return (
        rule.growth(m + 3) * r * along + spare,
        rule.growth(m) * total + spare,
        rule.growth(1) * factor + spare,
        rule.growth(m + 9) * of_x + spare,
        rule.growth(m + 11) * (of_dy + mean * of_x) + spare,
    )


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[StatsCase]:
    """Every layout, and the sums with and without parameters; sums are wide."""
    variants = VARIANTS[op]
    for dtype in ("f32",) if op == "bn_finalize" else ("f32", "bf16", "f16"):
        for variant in variants[:1] if extent == "quick" else variants:
            yield StatsCase(op, engine, dtype, variant)
    for variant in variants if extent == "full" else ():
        yield StatsCase(op, engine, "f64", variant)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """Whole calls, but for the op of each image alone: sums are over the batch, and what is made of them has none."""
    if op == "batch_norm_inference":
        if extent == "full":  # a run's compilations are few
            case = StatsCase(op, engine, "f32", "images", ("NHWC", (8, 5, 6, 16)))
            axes = (0, *(None,) * (len(case.names) - 1))
            yield subject(case, seed, batch_axes=axes, out_axis=0)
        return
    case = StatsCase(op, engine, "f32", VARIANTS[op][0])
    yield subject(case, seed, batch_axes=(None,) * len(case.names), out_axis=None)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> StatsCase:
    """Images in every layout, sums of them with and without a shift; what is made of sums in each of its ways."""
    if op not in OF_IMAGES:
        return StatsCase(op, engine, "f32", str(rng.choice(VARIANTS[op])))
    rank = int(drawn.pick(rng, {1: 1, 2: 4, 3: 1}))
    layout = drawn.layout(rng, rank, last=False)
    shape = drawn.images(rng, layout, rank, drawn.channels(rng, 640, layout), 2**18, 2**15)
    variant = f"{name}-shifted" if op == "genstats" and rng.random() < 0.5 else name
    return StatsCase(op, engine, drawn.pick(rng, drawn.WIDER), variant, (layout, shape))


FAMILY = family(
    "norm_stats",
    StatsCase,
    tuple(VARIANTS),
    cases,
    subjects,
    "a small call",
    (2, 3),
    plain.facts,
    draw=draw,
)
