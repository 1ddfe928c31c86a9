"""Activations and their backward ops: every number of a narrow type, and float32 of all magnitudes."""

import dataclasses
import functools as ft
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

import jaxdnn_reference as reference
from jaxdnn._src.activation import bounds
from jaxdnn._src.activation.bounds import Epilogue as Blend
from jaxdnn._src.activation.formulas import ACTIVATIONS, PIECEWISE
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Blended, Case, Expected
from jaxdnn._src.cases.family import family
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core.tolerance import Accumulation

OPS = ("activation", "activation_dgrad")
NARROW = ("bf16", "f16")
NAMES: tuple[Any, ...] = tuple(ACTIVATIONS)
PARAMETERS = (
    ("elu", 0.5),
    ("celu", 1.5),
    ("swish", 1.5),
    ("softplus", 2.5),
    ("leaky_relu", 0.25),
    ("clipped_relu", 1.5),
)
BOUNDED = (("relu", -1.0, 2.0, 0.5), ("relu", 0.0, 6.0, 0.1))
SHAPE = (8, 33, 125)
EVERY = ("every number", "subnormal")  # kinds of data that are all 65,536 numbers


@dataclasses.dataclass(frozen=True)
class ActivationCase(Blended, Case):
    """One activation, with its blend."""

    primitive: ClassVar[dict[str, str]] = {op: op for op in OPS}

    name: Any = "relu"
    alpha: float = 1.0
    beta: float = 0.0
    shape: tuple[int, ...] = SHAPE

    def arguments(self) -> dict[str, Any]:
        return {"activation": self.name, "alpha": self.alpha, "beta": self.beta}

    def kinds(self) -> tuple[str, ...]:
        """Backward, dy is 1 where every number is tried, so that the slope itself is seen; of bfloat16 some slopes are
        subnormal numbers of float32, which some devices read as zero."""
        flushed = self.op == "activation_dgrad" and self.dtype == "bf16"
        every = ("subnormal" if flushed else "every number",) if self.dtype in NARROW else ()
        return ("normal", "magnitudes", *every)

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        if kind in EVERY:
            x = np.arange(1 << 16, dtype=np.uint16).view(self.in_dtype)
            others = (np.ones_like(x),) * (self.count - 1) + (np.zeros_like(x),) * (self.beta != 0)
            return (*others[: self.count - 1], x, *others[self.count - 1 :])
        arrays = [rng.normal(size=self.shape) for _ in range(self.count + (self.beta != 0))]
        if kind == "magnitudes":
            arrays = [v * np.exp2(rng.integers(-20, 5, self.shape)) for v in arrays]
            if self.op == "activation_dgrad":  # beyond, slopes vanish
                arrays[1] = np.clip(arrays[1], -8, 8)
        return tuple(v.astype(self.in_dtype) for v in arrays)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        definition: Any = getattr(reference, self.op)
        given = operands[: self.count]
        with np.errstate(all="ignore"):
            value = definition(*given, **self.prior(operands), **self.arguments())
            x = given[-1].astype(np.float64)
            error = self._error(kind, value, x, operands, accumulation.flush)
        error = np.where(np.isfinite(value) & np.isfinite(x), error, 0.0)
        exact = self.name in (*PIECEWISE, *BOUNDED)  # whose values are ties, or lie near numbers of the type
        # Elsewhere many values are ties, or all but ties: blends of short numbers, dy times a slope that saturates.
        generic = not exact and kind == "normal" and self.alpha == 1 and self.beta == 0
        return (Expected(value, error, self.in_dtype, generic=generic),)

    def _error(self, kind: str, value: np.ndarray, x: np.ndarray, operands: Any, flush: bool) -> Any:
        """The error: narrow types round the function once, so it is that of float64 and of a product."""
        wide = "float64" if self.dtype == "f64" else "float32"
        size = np.abs(value)
        if self.op == "activation_dgrad":
            dy = np.abs(operands[0].astype(np.float64))
            if self.dtype in NARROW:
                own = np.zeros_like(size) if kind in EVERY else 2.0**-23 * size + 2.0**-148
            else:
                u = 2.0**-24 if wide == "float32" else 2.0**-52
                own = abs(self.alpha) * dy * bounds.slope_error(self.name, x, format=wide) + 3 * u * size
            small = np.minimum(size, np.where(dy == 0, np.inf, size / dy)) < 2.0**-125
            own = own + np.where(small & flush, 2.0**-125 * (1 + dy), 0.0)
        elif self.dtype in NARROW:
            own = 2.0**-40 * size + 2.0**-200
        else:
            scale = 2.0 if wide == "float64" else 1.0  # the definition is computed in float64 too
            own = scale * bounds.value_error(self.name, x, alpha=self.alpha, format=wide)
        if not self.beta:
            return own
        return Blend(beta=self.beta).error(value, own + 2.0**-23 * size, prior=operands[-1].astype(np.float64))

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        definition: Any = getattr(reference, self.op)
        return (definition(*operands[: self.count], **self.arguments(), arithmetic="ordered"),)

    def describe(self) -> dict[str, Any]:
        return {"activation": str(self.name), "alpha": self.alpha, "beta": self.beta}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[ActivationCase]:
    """Every activation in every narrow type in full; float64 and the blends beyond the quick extent."""
    make = ft.partial(_case, op, engine)
    for dtype in ("f32", "bf16", "f16"):
        for name in NAMES if extent != "quick" or dtype != "f16" else ("gelu", "swish"):
            yield make(dtype, name)
    if extent == "quick":
        return
    for dtype in ("f32", "bf16", "f16"):
        for name in (*PARAMETERS, *BOUNDED):
            yield make(dtype, name)
        yield make(dtype, "gelu", alpha=-0.75)
        yield make(dtype, "tanh", beta=-1.5)
    for name in NAMES:
        yield make("f64", name)


def _case(op: str, engine: str, dtype: str, name: Any, alpha: float = 1.0, beta: float = 0.0) -> ActivationCase:
    words = name if isinstance(name, str) else "-".join(str(v) for v in name)
    variant = words + (f"-alpha{alpha}" if alpha != 1 else "") + (f"-beta{beta}" if beta else "")
    return ActivationCase(op, engine, dtype, variant, name, alpha, beta)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """One for every dtype; float32 with a function that has something to compute."""
    for dtype in ("f32", "bf16", "f16"):
        case = _case(op, engine, dtype, "gelu")
        yield subject(case, seed, batch_axes=(0,) * case.count, out_axis=0)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> ActivationCase:
    """Every activation with every blend, of any shape."""
    activation = drawn.pick(rng, dict.fromkeys((*NAMES, *PARAMETERS, *BOUNDED), 1))
    shape = drawn.axes(rng, int(rng.integers(1, 5)), 2**16, 300)
    return ActivationCase(op, engine, drawn.pick(rng, drawn.WIDER), name, activation, *drawn.blend(rng), shape)


FAMILY = family("activation", ActivationCase, OPS, cases, subjects, "an activation", (3, 6), draw=draw)
