"""CTC on sequences of different lengths: matrix, data and bounds.

Letters: u the unit roundoff, d = x - max x, s_t(k) the relative error of a factor of a path in step t, which is that of
e^d and of the sum of a step's exponentials, one rounding of their quotient and three of the recursion. A path's
probability is then off by D = exp(S) - 1 for S = sum_t s_t(path_t), a sum over paths by the mean of that over them.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core.tolerance import FORMATS, Accumulation

OPS = ("ctc_loss", "ctc_posterior", "ctc_align", "ctc_lengths")
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "scores": {"normalize": "none", "blank": -1},
    "mean": {"infeasible": "zero", "reduction": "mean"},
    "gradient": {},
    "gradient of scores": {"normalize": "none", "blank": -1},
}
DTYPES = {"quick": ("f32", "bf16"), "standard": ("f16",), "full": ("f64",)}
# In roundings: of e^d beside what d itself is off by, of the logarithm relative to itself.
EXP, LOG = 5.0, 6.0
WHOLE = 2.0**15  # of d: up to there the product of an integer and the first part of log 2 is exact
LEAST = 2.0**-99  # what is left out of a sum of exponentials, and of a posterior


@dataclasses.dataclass(frozen=True)
class CtcCase(Case):
    """Sequences of up to some steps and labels."""

    batch: int = 8
    steps: int = 12
    classes: int = 7
    labels: int = 4

    primitive = {op: op for op in OPS[:3]}  # noqa: RUF012

    @property
    def gradient(self) -> bool:
        """Whether the case is of the loss's gradient."""
        return self.variant.rpartition("/")[2].startswith("gradient")

    @property
    def bound(self) -> str:
        return "ctc_dgrad" if self.gradient else super().bound

    @property
    def options(self) -> dict[str, Any]:
        given = VARIANTS[self.variant.rpartition("/")[2]]
        others = {"ctc_posterior": ("infeasible", "reduction"), "ctc_align": ("normalize",)}.get(self.op, ())
        return {name: value for name, value in given.items() if name not in others}

    def call(self, **choices: Any) -> Callable[..., Any]:
        if self.op == "ctc_lengths":
            return dnn.ctc_lengths
        op: Any = getattr(dnn, self.op)
        run = lambda x, labels, *lengths: op(x, labels, **self._lengths(lengths), **self.options, **choices)
        return _gradient(run) if self.gradient else run

    def _lengths(self, lengths: Any) -> dict[str, Any]:
        return dict(zip(("logit_lengths", "label_lengths"), lengths, strict=True))

    def kinds(self) -> tuple[str, ...]:
        return {"ctc_lengths": ("normal",), "ctc_align": ("normal", "special", "ties")}.get(
            self.op, ("normal", "special")
        )

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        n = self.batch
        steps = rng.integers(self.steps // 2, self.steps + 1, n).astype(np.int32)
        if self.op == "ctc_lengths":
            return ((np.arange(self.steps) >= steps[:, None]).astype(self.in_dtype),)
        x = rng.normal(size=(n, self.steps, self.classes))
        own = self.options.get("blank", 0) % self.classes
        labels = rng.integers(0, max(self.classes - 1, 1), (n, self.labels))
        labels = (labels + (labels >= own)).astype(np.int32)
        count = np.minimum(rng.integers(0, self.labels + 1, n), steps // 2).astype(np.int32)
        if kind == "ties":
            x = np.round(x)
        if kind == "special":
            x = np.where(rng.random(x.shape) < 0.1, -np.inf, x * 20)
            x[..., own] = np.maximum(x[..., own], -50)  # no step has nothing at all
            x[0, 0] = rng.choice([np.nan, np.inf, -np.inf])
            steps[-1], count[-1] = 0, self.labels
        return x.astype(self.in_dtype), labels, steps, count

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        if self.op == "ctc_lengths":
            return (Expected(reference.ctc_lengths(*operands), 0.0, np.int32),)
        x, labels, *lengths = operands
        given = {**self._lengths(lengths), **self.options}
        if self.op == "ctc_align":
            return (Expected(reference.ctc_align(x, labels, **given), 0.0, np.int32),)
        value = np.asarray(getattr(reference, self.op)(x, labels, **given), np.float64)
        plain = {name: given[name] for name in given if name not in ("infeasible", "reduction")}
        posterior = reference.ctc_posterior(x, labels, **plain)
        u = FORMATS[accumulation.format].roundoff
        own, common = self._factors(x.astype(np.float64), u)
        mean, most = self._paths(own, common, labels, lengths[0], posterior, u)
        dtype = np.float64 if self.x64 else np.float32
        depth = (self.labels + 1).bit_length()
        of_shares = posterior * (2 * np.expm1(most)[:, None, None] + (4 + depth) * u) + (self.labels + 1) * LEAST
        if self.op == "ctc_posterior":
            return (Expected(value, np.nan_to_num(of_shares), dtype, generic=False),)
        if self.gradient:
            golden = reference.ctc_loss(x, labels, **given, details=True)[1]
            error = self._of_gradient(golden, own + common, labels, posterior, of_shares, u)
            return (Expected(golden, error, self.in_dtype, generic=False),)
        loss = reference.ctc_loss(x, labels, **plain)
        with np.errstate(all="ignore"):
            off = -np.log1p(-mean * np.where(most > 0, np.expm1(most) / most, 1)) + LOG * u * np.abs(loss)
        error = np.where(np.isfinite(loss), off, 0.0)
        if self.options.get("reduction") == "mean":
            count = np.maximum(lengths[1], 1)
            depth = 3 + len(loss).bit_length()
            finite = np.where(np.isfinite(loss), np.abs(loss), 0)
            error = np.asarray(np.mean((error + depth * u * (finite + error)) / count))
        return (Expected(value, error, dtype, generic=False),)

    def _factors(self, x: np.ndarray, u: float) -> tuple[np.ndarray, np.ndarray]:
        """Relative errors, in roundings' size: of each class's exponential, and of the sum of a step's."""
        with np.errstate(all="ignore"):
            top = x.max(2, keepdims=True) if self.options.get("normalize") != "none" else np.zeros((*x.shape[:2], 1))
            d = np.where(np.isfinite(x - top), np.abs(x - top), 0.0)
            off = u * (1.01 * d + EXP + 3 * d * (d > WHOLE / 2))
            e = np.where(np.isfinite(x - top), np.exp(x - top), 0.0)
            total = e.sum(2, keepdims=True)
            depth = self.classes.bit_length()
            of_total = (e * off).sum(2, keepdims=True) / total + depth * u + self.classes * LEAST
        return off, np.zeros_like(of_total) if self.options.get("normalize") == "none" else of_total

    def _paths(
        self,
        off: np.ndarray,
        of_total: np.ndarray,
        labels: np.ndarray,
        steps: np.ndarray,
        posterior: np.ndarray,
        u: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The mean of S over the paths of each sequence, and its largest value."""
        symbols = self._symbols(labels)
        with np.errstate(all="ignore"):
            s = np.take_along_axis(off, symbols[:, None], 2) + of_total + 4 * u
        share = np.nan_to_num(posterior)
        counted = np.arange(off.shape[1]) < steps[:, None]
        mean = np.where(counted, (share * np.nan_to_num(s)).sum(2), 0).sum(1)
        most = np.where(counted, np.where(share > 0, np.nan_to_num(s), 0).max(2), 0).sum(1)
        return mean + 2 * u, most + 2 * u

    def _symbols(self, labels: np.ndarray) -> np.ndarray:
        """The blank, and each sequence's labels."""
        return np.pad(labels, ((0, 0), (1, 0)), constant_values=self.options.get("blank", 0) % self.classes)

    def _of_gradient(
        self,
        golden: np.ndarray,
        off: np.ndarray,
        labels: np.ndarray,
        posterior: np.ndarray,
        of_shares: np.ndarray,
        u: float,
    ) -> np.ndarray:
        """The error of probabilities, where scores are normalised, minus the posteriors of each class."""
        symbols = self._symbols(labels)
        counted, error = np.zeros_like(golden), np.zeros_like(golden)
        for n, i in np.ndindex(*symbols.shape):
            counted[n, :, symbols[n, i]] += np.nan_to_num(posterior[n, :, i])
            error[n, :, symbols[n, i]] += np.nan_to_num(of_shares[n, :, i])
        p = np.nan_to_num(golden) + counted
        depth = self.labels.bit_length() + 2
        return error + np.nan_to_num(np.abs(p) * np.expm1(off + 4 * u)) + depth * u * (p + counted) + LEAST

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        if self.op == "ctc_lengths":
            return (reference.ctc_lengths(*operands),)
        x, labels, *lengths = operands
        arithmetic = {} if self.op == "ctc_align" else {"arithmetic": "ordered"}
        given = {**self._lengths(lengths), **self.options, **arithmetic}
        if self.gradient:
            return (reference.ctc_loss(x, labels, **given, details=True)[1],)
        return (np.asarray(getattr(reference, self.op)(x, labels, **given)),)

    def describe(self) -> dict[str, Any]:
        return {"steps": self.steps, "classes": self.classes, "labels": self.labels, **self.options}


def _gradient(losses: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of each loss in the logits."""

    def run(x: Any, *others: Any) -> Any:
        found, pull = jax.vjp(lambda x: losses(x, *others), x)
        return pull(jnp.ones_like(found))[0]

    return run


def _variants(op: str) -> tuple[str, ...]:
    two = ("softmax", "scores")
    return {"ctc_lengths": two[:1], "ctc_posterior": two, "ctc_align": two}.get(op, tuple(VARIANTS))


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[CtcCase]:
    """Every variant in every dtype of the extent; the gradient of scores in one."""
    for dtype in up_to(extent, DTYPES):
        for variant in _variants(op):
            if dtype != "f32" and variant == "gradient of scores":
                continue
            yield CtcCase(op, engine, dtype, variant)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """Losses and posteriors of logits and of scores."""
    for dtype, variant in zip(("f32", "bf16"), _variants(op), strict=False):
        case = CtcCase(op, engine, dtype, variant)
        axes = (0,) if op == "ctc_lengths" else (0,) * 4
        found = subject(case, seed, batch_axes=axes, out_axis=0)
        if found is not None:
            yield dataclasses.replace(found, variant=variant)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> CtcCase:
    """Every variant on sequences of any lengths; of the kernels also many labels, or many classes."""
    steps, classes, labels = drawn.between(rng, 1, 60), drawn.between(rng, 2, 300), drawn.between(rng, 1, 20)
    batch = drawn.between(rng, 1, 8)
    if engine == "hopper" and rng.random() < 0.3:
        many = rng.random() < 0.5
        classes, labels = (classes, drawn.between(rng, 20, 2047)) if many else (drawn.between(rng, 300, 60_000), labels)
        batch, steps = min(batch, 2), min(steps, 20) if classes > 300 else steps + labels // 2
    sizes = {"batch": batch, "steps": steps, "classes": classes, "labels": labels}
    return CtcCase(op, engine, drawn.pick(rng, drawn.WIDER), f"{name}/{rng.choice(_variants(op))}", **sizes)


def samples(case: CtcCase) -> tuple[tuple[int | None, ...], int] | None:
    """The first axis of all, unless the losses are added up."""
    if case.options.get("reduction") or case.batch == 1:
        return None
    return ((0,) if case.op == "ctc_lengths" else (0,) * 4), 0


FAMILY = family("ctc", CtcCase, OPS, cases, subjects, "a small call", (1, 1), draw=draw, samples=samples)
