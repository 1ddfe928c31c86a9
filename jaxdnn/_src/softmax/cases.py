"""Softmax, its backward pass, logsumexp, and the linear layer with cross-entropy."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.activation.bounds import Epilogue as Blend
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Blended, Case, Expected
from jaxdnn._src.cases.family import family
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core import engines
from jaxdnn._src.core.tolerance import ACCUMULATIONS, Accumulation
from jaxdnn._src.hopper import branches
from jaxdnn._src.softmax import bounds

ROWS = ("softmax", "softmax_dgrad", "logsumexp")
OPS = (*ROWS, "linear_cross_entropy")
NARROW = ("bf16", "f16")


@dataclasses.dataclass(frozen=True)
class SoftmaxCase(Blended, Case):
    """Rows along some axes of an array."""

    primitive: ClassVar[dict[str, str]] = {op: op for op in ROWS}

    shape: tuple[int, ...] = (5, 128)
    axis: tuple[int, ...] = (-1,)
    algorithm: str = "accurate"
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(sorted(a % len(self.shape) for a in self.axis))

    def arguments(self) -> dict[str, Any]:
        if self.op == "logsumexp":
            return {"axis": self.axis}
        return {"axis": self.axis, "algorithm": self.algorithm, "alpha": self.alpha, "beta": self.beta}

    def kinds(self) -> tuple[str, ...]:
        return ("normal", "wide") if self.op == "softmax_dgrad" or self.beta else ("normal", "wide", "special")

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        # Exponentials of the "fast" algorithm have to fit.
        scale = 1.0 if kind == "normal" else 8.0 if self.algorithm == "fast" else 30.0
        x, *others = (rng.normal(size=self.shape) * scale for _ in range(1 + (self.beta != 0)))
        if kind == "special":
            places = rng.random(self.shape)
            x = np.where(places < 0.05, -np.inf, x)
            x = np.where(places > 1 - 1 / math.prod(self.shape[1:]), rng.choice([np.nan, np.inf]), x)
            x[0] = -np.inf
        arrays = [v.astype(self.in_dtype) for v in (x, *others)]
        if self.op == "softmax_dgrad":
            y = reference.softmax(arrays[0], algorithm=self.algorithm, axis=self.axis)
            arrays = [rng.normal(size=self.shape).astype(self.in_dtype), y, *arrays[1:]]
        return tuple(arrays)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        definition: Any = getattr(reference, self.op)
        given = operands[: self.count]
        value = definition(*given, **self.prior(operands), **self.arguments(), out_dtype=np.float64)
        wide: list[Any] = [v.astype(np.float64) for v in given]
        # A bound for every order of additions, and for subnormal exponentials that are taken as zero.
        rule = dataclasses.replace(accumulation, flush=True)
        if self.op == "logsumexp":
            error = bounds.logsumexp(wide[0], self.axes, rule).squeeze(self.axes)
        elif self.op == "softmax":
            error = bounds.softmax(wide[0], self.algorithm, self.axes, rule)
        else:
            error = bounds.softmax_dgrad(wide[0], wide[1], self.algorithm, self.axes, rule)
        if self.alpha != 1 or self.beta:
            plain_value = definition(*given, **{**self.arguments(), "alpha": 1.0, "beta": 0.0}, out_dtype=np.float64)
            prior = operands[-1].astype(np.float64) if self.beta else None
            blend = Blend(alpha=self.alpha, beta=self.beta, format="float64" if self.x64 else "float32")
            error = blend.error(plain_value, error, prior=prior)
        generic = kind == "normal" and not self.beta
        return (Expected(value, error, self.in_dtype, generic=generic),)

    def describe(self) -> dict[str, Any]:
        return {"shape": list(self.shape), **self.arguments()}


@dataclasses.dataclass(frozen=True)
class LossCase(Case):
    """The linear layer with cross-entropy."""

    rows: int = 12
    width: int = 16
    words: int = 50
    chunk: int | None = None
    reduction: str = "none"
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def call(self, **choices: Any) -> Callable[..., Any]:
        options = {"chunk": self.chunk, **self.options()}
        return lambda x, w, labels: dnn.linear_cross_entropy(x, w, labels, **options, **choices)

    def options(self) -> dict[str, Any]:
        return {"reduction": self.reduction, "label_smoothing": self.label_smoothing, "z_loss": self.z_loss}

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        x, w = rng.normal(size=(self.rows, self.width)), rng.normal(size=(self.width, self.words))
        return x.astype(self.in_dtype), w.astype(self.in_dtype), rng.integers(0, self.words, self.rows).astype(np.int32)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        x, w, labels = operands
        options = self.options()
        loss = reference.linear_cross_entropy(x, w, labels, **{**options, "reduction": "none"}).astype(np.float64)
        value = np.asarray(reference.linear_cross_entropy(x, w, labels, **options), np.float64)
        error = self._row_error(x.astype(np.float64), w.astype(np.float64), labels)
        u = 2.0**-53 if self.x64 else 2.0**-24
        own = 2.0**-53 if self.x64 else 2.0**-25  # the definition's result is rounded already
        if self.reduction != "none":
            total = error.sum() + self.rows * u * (np.abs(loss).sum() + error.sum())
            error = total / (self.rows if self.reduction == "mean" else 1)
        error = error + 4 * (u + own) * (np.abs(value) + error)
        return (Expected(value, error, np.float64 if self.x64 else np.float32, generic=False),)

    def _row_error(self, x: np.ndarray, w: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The error of each row's loss: of its logits, of their logsumexp, and of the terms that are added."""
        unit = (
            "float64"
            if self.x64
            else "tensor_core"
            if self.dtype in NARROW and engines.platform() == "cuda"
            else "float32"
        )
        rule = dataclasses.replace(ACCUMULATIONS[unit], flush=True)
        wide = ACCUMULATIONS["float64" if self.x64 else "float32"]
        z = x @ w
        off = rule.error(z, np.abs(x) @ np.abs(w), np.asarray(self.width), exact_products=self.dtype in NARROW)
        u = 2.0**-53 if self.x64 else 2.0**-24
        lse = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
        e_lse = off.max(1) + bounds.logsumexp(z, (1,), wide)[:, 0]
        at = np.arange(self.rows), labels
        smooth = self.label_smoothing * (np.abs(z).mean(1) * self.words * u + off.mean(1))
        squares = self.z_loss * (2 * np.abs(lse) * e_lse + e_lse**2 + 3 * u * lse**2)
        sizes = np.abs(lse) + np.abs(z[at]) + self.label_smoothing * np.abs(z).mean(1) + self.z_loss * lse**2
        return e_lse + off[at] + smooth + squares + 6 * u * sizes

    def describe(self) -> dict[str, Any]:
        return {"rows": self.rows, "width": self.width, "words": self.words, "chunk": self.chunk, **self.options()}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[Case]:
    """Rows of lengths for which engines use different kernels, every algorithm, several axes, blends."""
    if op == "linear_cross_entropy":
        yield from _losses(engine, extent)
        return
    make = ft.partial(_case, op, engine)
    algorithms = ("accurate",) if op == "logsumexp" else ("accurate", "log", "fast")
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((6, 128), (-1,)), ((5, 1000), (-1,)), ((4, 3, 7), (-2,))]
    if extent != "quick":
        shapes += [((37, 8), (-1,)), ((3, 4, 5, 16), (-3, -2, -1)), ((5, 4096), (-1,)), ((3, 12288), (-1,))]
    if extent == "full":
        shapes += [((2, n), (-1,)) for n in (17, 2048, 16384, 50304, 131072)]
    for shape, axis in shapes:
        for dtype in ("f32", "bf16", "f16") if extent != "quick" or len(shape) == 2 else ("f32",):
            for algorithm in algorithms:
                yield make(dtype, shape, axis, algorithm)
    if extent == "quick":
        return
    for algorithm in algorithms:
        yield make("f64", (4, 33), (-1,), algorithm)
    if op != "logsumexp":
        for dtype in ("f32", "bf16"):
            yield make(dtype, (6, 128), (-1,), "accurate", alpha=0.5, beta=-2.0)


def _losses(engine: str, extent: str) -> Iterator[LossCase]:
    for dtype in ("f32", "bf16", "f16", *(("f64",) if extent != "quick" else ())):
        for chunk in (None, 5):
            yield LossCase("linear_cross_entropy", engine, dtype, f"rows12-chunk{chunk}", chunk=chunk)
        if extent != "quick":
            options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "chunk": 64, "rows": 200, "words": 1000}
            for reduction in ("mean", "sum", "none"):
                name = f"{reduction}-smoothed"
                yield LossCase("linear_cross_entropy", engine, dtype, name, reduction=reduction, **options)


def _case(
    op: str,
    engine: str,
    dtype: str,
    shape: tuple[int, ...],
    axis: tuple[int, ...],
    algorithm: str,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> SoftmaxCase:
    variant = f"{algorithm}-{'x'.join(map(str, shape))}-over{','.join(map(str, axis))}" + ("-blend" if beta else "")
    return SoftmaxCase(op, engine, dtype, variant, shape, axis, algorithm, alpha, beta)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """One for every dtype, of a batch that eight devices divide."""
    for dtype in ("f32", "bf16", "f16"):
        if op == "linear_cross_entropy":
            loss = LossCase(op, engine, dtype, "rows12-chunk5", chunk=5)
            yield subject(loss, seed, batch_axes=(0, None, 0), out_axis=0)
        else:
            case = _case(op, engine, dtype, (8, 1000), (-1,), "accurate")
            yield subject(case, seed, batch_axes=(0,) * case.count, out_axis=0)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> Case:
    """Rows of 1 to 200,000 elements, several axes, every algorithm, blends; and losses."""
    dtype = drawn.pick(rng, drawn.FLOATS if engine == "hopper" else drawn.WIDER)
    if op == "linear_cross_entropy":
        return LossCase(
            op,
            engine,
            dtype,
            name,
            rows=drawn.between(rng, 1, 64),
            width=drawn.channels(rng, 320),
            words=drawn.between(rng, 1, 3000),
            chunk=int(rng.integers(1, 2000)) if rng.random() < 0.7 else None,
            reduction=str(rng.choice(["none", "mean", "sum"])),
            label_smoothing=float(rng.choice([0.0, 0.1])),
            z_loss=float(rng.choice([0.0, 0.01])),
        )
    length = drawn.between(rng, 1, 37500) * int(drawn.pick(rng, {1: 1, 8: 9 if engine == "hopper" else 2}))
    rows = drawn.axes(rng, int(rng.integers(1, 3)), 2**20 / length, 3000)
    shape, axis = (*rows, length), (-1,)
    if rng.random() < 0.15 or (engine != "hopper" and rng.random() < 0.5):
        inner = drawn.axes(rng, 2, 2000, 60)
        shape = (*drawn.axes(rng, len(rows), 2**20 / math.prod(inner), 3000), *inner)
        axis = (-2, -1) if engine == "hopper" else drawn.pick(rng, {(-2, -1): 1, (0,): 1, (-2,): 1, (0, -1): 1})
    algorithm = "accurate" if op == "logsumexp" else str(rng.choice(["accurate", "log", "fast"]))
    alpha, beta = (1.0, 0.0) if op == "logsumexp" else drawn.blend(rng)
    return SoftmaxCase(op, engine, dtype, name, shape, axis, algorithm, alpha, beta)


def _long_rows(op: str, engine: str, rng: drawn.Generator, name: str) -> Case:
    """Rows of 16 to 512 KiB, for blocks that stay and for clusters of blocks."""
    dtype, bytes_ = drawn.pick(rng, drawn.FLOATS), drawn.between(rng, 16 << 10, 512 << 10)
    length = bytes_ // 16 * (4 if dtype == "f32" else 8)
    algorithm = "accurate" if op == "logsumexp" else str(rng.choice(["accurate", "log", "fast"]))
    return SoftmaxCase(op, engine, dtype, name, (drawn.between(rng, 1, 8), length), (-1,), algorithm)


def _many_rows(op: str, engine: str, rng: drawn.Generator, name: str) -> Case:
    """Rows of at most 1 KiB, so many that a warp computes two of them at once."""
    dtype, length = drawn.pick(rng, drawn.FLOATS), 8 * drawn.between(rng, 1, 32)
    return SoftmaxCase(op, engine, dtype, name, (int(rng.integers(2112, 2500)), length), (-1,))


LED = {
    "softmax": {"row shared by": [f"cluster of {n}" for n in (2, 4, 8)], "stages": range(3, 7)},
    "softmax_dgrad": {"row shared by": [f"cluster of {n}" for n in (4, 8)]},
    "logsumexp": {"row shared by": ["cluster of 8"], "stages": range(6, 9)},
}
LEADS: dict[tuple[str, branches.Branch], Any] = {
    (op, ("softmax of long rows", what, str(value))): _long_rows
    for op, decided in LED.items()
    for what, values in decided.items()
    for value in values
}
LEADS |= {(op, ("softmax of rows", "rows at once", "2")): _many_rows for op in ROWS}
LEADS |= {("softmax_dgrad", ("softmax of rows", "threads", "512")): _long_rows}


def samples(case: Any) -> tuple[tuple[int | None, ...], int] | None:
    """The first axis, if it is not reduced; for losses that are not added up, the axis of the rows."""
    if isinstance(case, LossCase):
        return ((0, None, 0), 0) if case.reduction == "none" and case.rows > 1 else None
    apart = 0 not in case.axes and case.shape[0] > 1 and not case.beta
    return ((0,) * case.count, 0) if apart else None


FAMILY = family(
    "softmax", SoftmaxCase, OPS, cases, subjects, "rows of 128", (6, 15), draw=draw, leads=LEADS, samples=samples
)
