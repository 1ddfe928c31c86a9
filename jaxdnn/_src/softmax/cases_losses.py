"""The cross-entropy of logits: matrix, data and bounds."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core.tolerance import FORMATS, Accumulation
from jaxdnn._src.softmax import bounds

OPS = ("cross_entropy",)
IGNORED = -100
DTYPES = {"quick": ("f32", "bf16"), "standard": ("f16",), "full": ("f64",)}


@dataclasses.dataclass(frozen=True)
class CrossEntropyCase(Case):
    """Rows of logits along an axis; `targets` are "labels", some of them ignored, or "distributions"."""

    shape: tuple[int, ...] = (12, 50)
    axis: int = -1
    targets: str = "labels"
    weighted: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    reduction: str = "none"

    primitive = {"cross_entropy": "logsumexp"}  # noqa: RUF012

    @property
    def at(self) -> int:
        return self.axis % len(self.shape)

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(size for i, size in enumerate(self.shape) if i != self.at)

    @property
    def options(self) -> dict[str, Any]:
        smooth = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        ignored = {"ignore_index": IGNORED} if self.targets == "labels" else {}
        return {"axis": self.axis, "reduction": self.reduction, **smooth, **ignored}

    def call(self, **choices: Any) -> Callable[..., Any]:
        named = lambda rest: {"weights": rest[0]} if rest else {}
        return lambda z, labels, *rest: dnn.cross_entropy(z, labels, **named(rest), **self.options, **choices)

    def kinds(self) -> tuple[str, ...]:
        return ("normal", "wide", "special") if self.reduction == "none" else ("normal", "wide")

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        z = rng.normal(size=self.shape) * (1.0 if kind == "normal" else 30.0)
        if kind == "special":  # classes left out, and a row or so that is not finite
            z = np.where(rng.random(self.shape) < 0.05, -np.inf, z)
            row = rng.random((*self.rows, 1)) < 0.1
            z = np.where(np.moveaxis(np.broadcast_to(row, (*self.rows, self.shape[self.at])), -1, self.at), np.nan, z)
        if self.targets == "labels":
            labels = rng.integers(0, self.shape[self.at], self.rows).astype(np.int32)
            labels = np.where(rng.random(self.rows) < 0.1, IGNORED, labels).astype(np.int32)
            labels.flat[0] = 0  # one row counts at least
            if kind == "special":
                labels.flat[-1] = self.shape[self.at]
        else:
            e = rng.random(self.shape) * (rng.random(self.shape) < 0.5)
            labels = (e / np.maximum(e.sum(self.at, keepdims=True), 1)).astype(self.in_dtype)
        weights = ((rng.random(self.rows) + 0.1).astype(self.in_dtype),) if self.weighted else ()
        return z.astype(self.in_dtype), labels, *weights

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        given = {"weights": operands[2]} if self.weighted else {}
        value = np.asarray(reference.cross_entropy(*operands[:2], **given, **self.options), np.float64)
        rule = dataclasses.replace(accumulation, flush=True)
        u = FORMATS[rule.format].roundoff
        losses = self._rows(operands[0].astype(np.float64), operands[1], rule, u)
        counts = operands[1] != IGNORED if self.targets == "labels" else np.ones(self.rows, bool)
        weights = np.where(counts, operands[2].astype(np.float64) if self.weighted else 1.0, 0.0)
        size, error = (weights * np.where(counts, np.nan_to_num(v), 0.0) for v in losses)
        error = error + u * (size + error)
        if self.reduction != "none":
            # So many additions, of which those of the weights have a relative error, and a quotient.
            rate = (2 * size.size + 3) * u
            error = error.sum() + rate * (size.sum() + error.sum())
            error = error / (weights.sum() if self.reduction == "mean" else 1)
        error = error + 2 * u * np.abs(np.nan_to_num(value))  # the definition's own rounding, and the last one
        return (Expected(value, error, np.float64 if self.x64 else np.float32, generic=False),)

    def _rows(self, z: np.ndarray, labels: np.ndarray, rule: Accumulation, u: float) -> tuple[np.ndarray, np.ndarray]:
        """For each row the sum of the magnitudes of its loss's terms, and the error bound of the loss."""
        classes = self.shape[self.at]
        z = np.moveaxis(z, self.at, -1)
        one_hot = lambda: np.asarray(labels[..., None] == np.arange(classes), np.float64)
        p = one_hot() if self.targets == "labels" else np.moveaxis(labels.astype(np.float64), self.at, -1)
        t = (1 - self.label_smoothing) * p + self.label_smoothing / classes
        with np.errstate(all="ignore"):
            top = np.max(z, -1, keepdims=True)
            lse = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
            off = bounds.logsumexp(z, (z.ndim - 1,), rule) + 2 * u * np.abs(lse)  # and one rounding to the dtype
            terms = np.where(t == 0, 0.0, t * np.abs(lse - z))
            # Each term: the targets' roundings and its own; and the additions, of which a label alone needs none.
            many = classes if self.label_smoothing or self.targets != "labels" else 0
            error = (t * off).sum(-1) + (many + 8) * u * (terms.sum(-1) + (t * off).sum(-1))
            size = np.abs(lse[..., 0])
            error = error + self.z_loss * (2 * size * off[..., 0] + off[..., 0] ** 2 + 4 * u * size**2)
            total = terms.sum(-1) + self.z_loss * size**2
        good = np.isfinite(total)
        return np.where(good, total, 0.0), np.where(good, error + u * total, 0.0)

    def describe(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "targets": self.targets, "weighted": self.weighted, **self.options}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[CrossEntropyCase]:
    """Labels and distributions, every reduction, with and without smoothing, z-loss and weights, two axes."""
    more: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "weighted": True}
    for dtype in up_to(extent, DTYPES):
        make = lambda variant, dtype=dtype, **options: CrossEntropyCase(op, engine, dtype, variant, **options)
        yield make("labels")
        yield make("distributions", targets="distributions")
        if extent == "quick":
            continue
        yield make("images", shape=(3, 24, 5, 8), axis=1, **more)
        yield make("vocabulary", shape=(6, 4096))
        for reduction in ("mean", "sum"):
            yield make(f"labels-{reduction}", reduction=reduction, **more)
            yield make(f"distributions-{reduction}", reduction=reduction, targets="distributions", **more)
        if extent == "full":
            yield make("long", shape=(2, 131072), **more)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """One for every dtype, of a batch that eight devices divide."""
    for dtype in ("f32", "bf16", "f16"):
        case = CrossEntropyCase(op, engine, dtype, "labels", shape=(8, 1000), label_smoothing=0.1)
        yield subject(case, seed, batch_axes=(0, 0), out_axis=0)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> CrossEntropyCase:
    """Rows of 1 to 40,000 classes, along the last axis or another, with every option."""
    classes = drawn.between(rng, 1, 5000) * int(drawn.pick(rng, {1: 1, 8: 1}))
    rows = drawn.axes(rng, int(rng.integers(1, 3)), 2**18 / classes, 1000)
    axis = -1 if engine == "hopper" else int(drawn.pick(rng, {-1: 2, 0: 1, 1: 1}))
    at = axis % (len(rows) + 1)
    return CrossEntropyCase(
        op,
        engine,
        drawn.pick(rng, drawn.FLOATS if engine == "hopper" else drawn.WIDER),
        name,
        shape=(*rows[:at], classes, *rows[at:]),
        axis=axis,
        targets=str(rng.choice(["labels", "distributions"])),
        weighted=bool(rng.random() < 0.3),
        label_smoothing=float(rng.choice([0.0, 0.1, 1.0])),
        z_loss=float(rng.choice([0.0, 0.01])),
        reduction=str(rng.choice(["none", "mean", "sum"])),
    )


def samples(case: CrossEntropyCase) -> tuple[tuple[int | None, ...], int] | None:
    """The batch axis of the case, the first one; none if that has the classes or if losses are added over it."""
    apart = case.at != 0 and case.shape[0] > 1 and case.reduction == "none"
    return ((0,) * (2 + case.weighted), 0) if apart else None


FAMILY = family(
    "cross-entropy", CrossEntropyCase, OPS, cases, subjects, "rows of 50", (1, 3), draw=draw, samples=samples
)
