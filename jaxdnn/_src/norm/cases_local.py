"""Normalisations by a neighbourhood or a vector's norm: windows, layouts, blends, exponents.

The bounds, with u the accumulator's unit roundoff and γ(m) = m u / (1 - m u) what m roundings come to:

* s = k + a Σ v² over m elements is off by γ(m + 8) (|k| + |a| Σ v²): three roundings of a square, m - 1 of the sum,
  those of a, of k, of the product and of the last addition.
* If t has the relative error ρ, its power t^q has the relative error (1 - ρ)^-|q| - 1, and that of the device's
  function, POWER u (1 + |q log t|), which includes the rounding of the exponent.
* Products and sums follow, each rounded once. Whatever may be subnormal is off by the smallest normal number besides.
* y = v / max(‖v‖, ε): the norm is a sum of powers and a root of it, γ(n) and two powers, or a maximum, which is exact.
  For p other than 1 and 2 the powers are of quotients by the largest, each off by u.

The definition's own error, in float64 or np.longdouble, is the same bound times the quotient of the roundoffs.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.activation.bounds import Epilogue
from jaxdnn._src.cases import case as plain
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected, Facts
from jaxdnn._src.cases.family import family
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core import tolerance
from jaxdnn._src.core.tolerance import Accumulation
from jaxdnn._src.norm.bounds import definition_share
from jaxdnn_reference.norm_group import as_it_lies
from jaxdnn_reference.norm_local import window_sum

Values = np.ndarray
# In units of u (1 + |q log t|): the 4 units in the last place that CUDA's documentation of its mathematical functions
# gives for powf. XLA on CPUs was measured to stay within 1; tests/norm/test_local.py measures again.
POWER = 8.0

_STRONG = {"lrn_alpha": 0.7, "k": 1.5}
_BLEND = {"alpha": 0.3, "beta": -1.7}
_WINDOWS = {
    "NHWC-high": ((8, 3, 2, 7), {"n": 4, "even": "high", **_STRONG}),
    "NCHW-low-blend": ((5, 7, 3, 6), {"layout": "NCHW", "n": 4, "even": "low", **_STRONG, **_BLEND}),
    "NCHWc4-odd-blend": ((3, 2, 3, 5, 4), {"layout": "NCHWc4", "n": 5, "lrn_beta": 1.5, **_STRONG, **_BLEND}),
    "CHWN-wide": ((7, 3, 4, 5), {"layout": "CHWN", "n": 16, "even": "low", "lrn_beta": 0.5, **_STRONG}),
    "NDHWC-defaults": ((2, 3, 4, 3, 6), {"layout": "NDHWC"}),
}
_NORMS = {
    "2": ((5, 4, 77), {}),
    "ordered": ((5, 4, 77), {"determinism": "batch_invariant"}),
    "1": ((5, 4, 7), {"p": 1, "axis": (0, 2)}),
    "1.5": ((5, 4, 7), {"p": 1.5, "axis": 1}),
    "3": ((5, 4, 7), {"p": 3.0}),
    "inf": ((5, 4, 7), {"p": math.inf, "eps": 1.5}),
}
VARIANTS: dict[str, dict[str, tuple[tuple[int, ...], dict[str, Any]]]] = {
    **{op: _WINDOWS for op in ("lrn", "lrn_dgrad", "divisive_norm", "divisive_norm_dgrad")},
    "lp_normalize": _NORMS,
}
OPS = tuple(VARIANTS)


@dataclasses.dataclass(frozen=True)
class LocalCase(Case):
    """One call; divisive normalisation with means."""

    given: tuple[tuple[int, ...], tuple[tuple[str, Any], ...]] | None = None  # shape and options, if not a variant's

    @property
    def shape(self) -> tuple[int, ...]:
        return VARIANTS[self.op][self.variant][0] if self.given is None else self.given[0]

    @property
    def options(self) -> dict[str, Any]:
        return VARIANTS[self.op][self.variant][1] if self.given is None else dict(self.given[1])

    @property
    def backward(self) -> bool:
        return self.op.endswith("_dgrad")

    @property
    def names(self) -> tuple[str, ...]:
        """What the operands are."""
        divisive, blended = self.op.startswith("divisive"), "beta" in self.options
        return ("dy",) * self.backward + ("x",) + ("means",) * divisive + ("prior",) * blended

    def call(self, **choices: Any) -> Callable[..., Any]:
        level = choices.pop("determinism", None) or self.options.get("determinism")
        return self._function(dnn, determinism=level, **choices)

    def _function(self, module: Any, **choices: Any) -> Callable[..., Any]:
        op = getattr(module, self.op)
        options = {**{k: v for k, v in self.options.items() if k != "determinism"}, **choices}
        count = 1 + self.backward
        return lambda *arrays: op(
            *arrays[:count], **dict(zip(self.names[count:], arrays[count:], strict=True)), **options
        )

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        arrays = [rng.normal(size=self.shape) * (0.3 if name == "means" else 1.0) for name in self.names]
        return tuple(v.astype(self.in_dtype) for v in arrays)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        values = self._function(reference)(*operands)
        given = {name: v.astype(np.float64) for name, v in zip(self.names, operands, strict=True)}
        if self.op == "lp_normalize":
            p, axis, eps = (self.options.get(k, v) for k, v in (("p", 2.0), ("axis", -1), ("eps", 1e-12)))
            errors = (vector_error(given["x"], p, axis, eps, accumulation.format),)
        else:
            errors = self._window_errors(given, accumulation.format)
        share = definition_share(accumulation.format)
        results = values if isinstance(values, tuple) else (values,)
        names = ("dx", "dmeans") if self.backward else ("y",)
        pairs = zip(names, results, errors, strict=False)
        return tuple(Expected(np.asarray(v, np.float64), e * (1 + share), self.in_dtype, n) for n, v, e in pairs)

    def _window_errors(self, given: dict[str, Values], format: str) -> tuple[Values, ...]:
        o = self.options
        axes = as_it_lies(o.get("layout", "NHWC"))
        x = axes.to_canonical(given["x"])
        v = x - axes.to_canonical(given["means"]) if "means" in given else x
        letters = axes.letters
        along = [letters.index(c) for c in ("C" if self.op.startswith("lrn") else "DHW") if c in letters]
        window = Window(
            v,
            along,
            o.get("n", 5),
            o.get("even", "high"),
            o.get("lrn_alpha", 1e-4),
            o.get("lrn_beta", 0.75),
            o.get("k", 2.0),
            format,
        )
        dy = axes.to_canonical(given["dy"]) if self.backward else None
        found = window.forward(x) if dy is None else window.backward(dy, x)
        prior = axes.to_canonical(given["prior"]) if "prior" in given else None
        errors = []
        for i, (value, error) in enumerate(found):
            rule = Epilogue(o.get("alpha", 1.0), o.get("beta", 0.0) if i == 0 else 0.0, format=format)
            errors.append(axes.from_canonical(rule.error(value, error, prior=prior)))
        return tuple(errors)

    def describe(self) -> dict[str, Any]:
        return {"shape": self.shape, **{k: str(v) for k, v in self.options.items()}}


# ---- bounds ----------------------------------------------------------------------------------------------------------


def power_error(t: Values, off: Values | float, q: float, u: float) -> Values:
    """The largest relative error of t^q if t has the relative error `off`."""
    own = POWER * u * (1 + np.abs(q * np.log(t)))
    return (1 - off) ** -abs(q) * (1 + own) - 1


@dataclasses.dataclass(frozen=True)
class Window:
    """s = k + rate / n^D Σ v², its powers and what is made of them; float64 values of the stored inputs."""

    v: Values
    axes: list[int]
    n: int
    even: str
    rate: float
    exponent: float
    k: float
    format: str

    @property
    def rule(self) -> Any:
        return tolerance.FORMATS[self.format]

    @property
    def terms(self) -> int:
        """How many elements a window has at most."""
        return math.prod(min(self.n, self.v.shape[a]) for a in self.axes)

    def powers(self) -> tuple[Values, Values, Values, Values]:
        """s, how far it may be off as a factor, s^-exponent, and how far that may be."""
        u, scale = self.rule.roundoff, abs(self.rate) / self.n ** len(self.axes)
        total = window_sum(self.v**2, self.axes, self.n, self.even)
        s = self.k + self.rate / self.n ** len(self.axes) * total
        error = (
            self.rule.growth(self.terms + 8) * (abs(self.k) + scale * total)
            + (1 + scale * self.terms) * self.rule.smallest_normal
        )
        off = error / s
        return s, off, s**-self.exponent, power_error(s, off, -self.exponent, u)

    def forward(self, x: Values) -> tuple[tuple[Values, Values], ...]:
        """x s^-exponent and its error."""
        _, _, power, off = self.powers()
        y = x * power
        return ((y, np.abs(y) * ((1 + off) * (1 + self.rule.roundoff) - 1) + self.rule.smallest_normal),)

    def backward(self, dy: Values, x: Values) -> tuple[tuple[Values, Values], ...]:
        """dx and dmeans, each with its error, not blended."""
        u, tiny = self.rule.roundoff, self.rule.smallest_normal
        s, off_s, power, off = self.powers()
        around = lambda a: window_sum(a, self.axes, self.n, self.even, mirrored=True)
        inner = dy * x * power / s
        off_inner = (1 + off) * (1 + u) ** 3 / (1 - off_s) - 1
        gathered, size = around(inner), around(np.abs(inner) * (1 + off_inner) + 3 * tiny)
        error = around(np.abs(inner) * off_inner + 3 * tiny) + self.rule.growth(self.terms) * size
        rate = 2 * self.rate * self.exponent / self.n ** len(self.axes)
        through = rate * self.v * gathered
        reach = np.abs(rate * self.v) * (np.abs(gathered) + error)
        through_error = np.abs(rate * self.v) * error + self.rule.growth(5) * reach + 2 * tiny
        direct = dy * power
        direct_error = np.abs(direct) * ((1 + off) * (1 + u) - 1) + tiny
        dx, before = direct - through, direct_error + through_error
        return (dx, before + u * (np.abs(dx) + before) + tiny), (through, through_error)


def vector_error(x: Values, p: float, axis: Any, eps: float, format: str) -> Values:
    """How far x / max(‖x‖, eps) may be off: the norm's error, and five roundings: of eps and of a quotient."""
    rule = tolerance.FORMATS[format]
    u, tiny, axes = rule.roundoff, rule.smallest_normal, tuple(np.atleast_1d(axis).tolist())
    size = np.abs(x)
    largest = size.max(axes, keepdims=True)
    unit = np.exp2(-np.frexp(largest)[1].astype(np.float64))  # the power of two that the op scales by
    n = math.prod(x.shape[a] for a in axes)
    off: Any = 0.0
    norm = largest * unit
    if not math.isinf(p):
        divisor = 1 / unit if p in (1, 2) else np.where(largest > 0, largest, 1)
        scaled = np.where(size > 0, size, divisor) / divisor
        powers = np.where(size > 0, scaled**p, 0)
        own = 0.0 if p == 1 else u if p == 2 else power_error(scaled, np.where(scaled == 1, 0, u), p, u)
        total = powers.sum(axes, keepdims=True)
        off = ((powers * own).sum(axes, keepdims=True) + n * tiny) / total * (1 + rule.growth(n)) + rule.growth(n)
        norm = total ** (1 / p) * divisor * unit
        off = off if p == 1 else power_error(total, off, 1 / p, u)
    y = size * unit / np.maximum(norm, eps * unit)
    return y * ((1 + rule.growth(5)) / (1 - off) - 1) + tiny * (1 + 1 / np.maximum(norm, eps * unit))


# ---- the family ------------------------------------------------------------------------------------------------------


def facts(case: LocalCase) -> Facts:
    """What is guaranteed: of a norm without a level, XLA's order of additions; of a maximum, whatever the order."""
    found = plain.facts(case)
    loose = case.op == "lp_normalize" and "determinism" not in case.options
    return dataclasses.replace(found, level="run_to_run") if loose else found


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[LocalCase]:
    """Both sides of an even window, layouts and exponents in float32; in the full extent in all types."""
    variants = list(VARIANTS[op])
    for dtype in ("f32", "bf16", "f16"):
        every = extent == "full" or (dtype == "f32" and extent == "standard")
        for variant in variants if every else variants[:1]:
            yield LocalCase(op, engine, dtype, variant)
    for variant in variants if extent == "full" else ():
        yield LocalCase(op, engine, "f64", variant)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """Images, or rows by the fixed tree of additions."""
    for dtype in ("f32", "bf16") if extent == "full" else ("f32",):
        case = LocalCase(op, engine, dtype, "ordered" if op == "lp_normalize" else next(iter(VARIANTS[op])))
        yield subject(case, seed, batch_axes=(0,) * len(case.names), out_axis=0)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> LocalCase:
    """Windows of 1 to 16 neighbours in every layout; vectors by several norms."""
    dtype = drawn.pick(rng, drawn.WIDER)
    if op == "lp_normalize":
        shape = drawn.axes(rng, 3, 2**15, 400)
        options: dict[str, Any] = {"p": drawn.pick(rng, {2.0: 3, 1.0: 1, 1.5: 1, 3.0: 1, math.inf: 1})}
        options["axis"] = drawn.pick(rng, {-1: 3, 1: 1, (0, 2): 1})
        if rng.random() < 0.5:
            options["determinism"] = "batch_invariant"
        return LocalCase(op, engine, dtype, name, (shape, tuple(options.items())))
    rank = int(drawn.pick(rng, {1: 1, 2: 4, 3: 1}))
    layout = drawn.layout(rng, rank, last=False)
    shape = drawn.images(rng, layout, rank, drawn.channels(rng, 128, layout), 2**15, 2**13, 12)
    options = {"layout": layout, "n": int(rng.integers(1, 17)), "even": str(rng.choice(["high", "low"]))}
    options |= {"lrn_alpha": float(rng.choice([0.7, 1e-4])), "lrn_beta": float(rng.choice([0.5, 0.75, 1.5])), "k": 1.5}
    alpha, beta = drawn.blend(rng)
    blended = {"alpha": alpha, "beta": beta} if beta else {}
    return LocalCase(op, engine, dtype, name, (shape, tuple((options | blended).items())))


FAMILY = family("norm_local", LocalCase, OPS, cases, subjects, "a small call", (3, 8), facts, draw=draw)
