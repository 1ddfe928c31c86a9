"""The rectifier with a learned slope: matrix, data and the definition's bits."""

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
from jaxdnn._src.core.tolerance import Accumulation

OPS = ("prelu",)
DTYPES = {"quick": ("f32", "bf16"), "standard": ("f16",), "full": ("f64",)}


@dataclasses.dataclass(frozen=True)
class PreluCase(Case):
    """Slopes along an axis, or one for all where it is None."""

    shape: tuple[int, ...] = (8, 5, 33)
    axis: int | None = -1

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.axis is None else {"axis": self.axis}

    def call(self, **choices: Any) -> Callable[..., Any]:
        return lambda x, slope: dnn.prelu(x, slope, **self.options, **choices)

    def kinds(self) -> tuple[str, ...]:
        return ("normal", "special")

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        x = rng.normal(size=self.shape)
        if kind == "special":
            x = np.where(rng.random(self.shape) < 0.2, rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan], self.shape), x)
        slope = rng.normal(size=() if self.axis is None else self.shape[self.axis])
        return x.astype(self.in_dtype), np.asarray(slope).astype(self.in_dtype)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        value = reference.prelu(*operands, **self.options).astype(np.float64)
        return (Expected(value, 0.0, self.in_dtype, generic=False),)

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        return (reference.prelu(*operands, **self.options),)

    def describe(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "axis": self.axis}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[PreluCase]:
    """Slopes along the last axis, along another, and one for all."""
    for dtype in up_to(extent, DTYPES):
        for variant, axis in (("last", -1), ("second", 1), ("shared", None)):
            yield PreluCase(op, engine, dtype, variant, axis=axis)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """One for every dtype."""
    for dtype in ("f32", "bf16", "f16"):
        yield subject(PreluCase(op, engine, dtype, "last"), seed, batch_axes=(0, None), out_axis=0)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> PreluCase:
    """Any shape and axis."""
    shape = drawn.axes(rng, int(rng.integers(1, 5)), 2**16, 300)
    axis = None if rng.random() < 0.2 else int(rng.integers(-len(shape), len(shape)))
    return PreluCase(op, engine, drawn.pick(rng, drawn.WIDER), name, shape=shape, axis=axis)


FAMILY = family("prelu", PreluCase, OPS, cases, subjects, "slopes along the last axis", draw=draw)
