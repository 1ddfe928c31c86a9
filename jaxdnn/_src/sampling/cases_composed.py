"""What is made of samples by ops of their own arguments, `map_coordinates`: matrix, data and bounds."""

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
from jaxdnn._src.core.formats import FORMATS
from jaxdnn._src.core.tolerance import Accumulation
from jaxdnn._src.sampling.cases import DTYPES, PLACE

OPS = ("map_coordinates",)
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "map_coordinates": {
        "cubic": {"mode": "reflect"},
        "linear": {"order": 1, "cval": 1.5},
        "quintic": {"order": 5, "mode": "grid-wrap"},
        "nearest": {"order": 0, "mode": "grid-constant"},
        "quadratic": {"order": 2, "mode": "nearest"},
    },
}
GAIN = (1.0, 1.0, 2.0, 3.0, 4.8, 7.5)  # of the filter of each order: the sum of its response's magnitudes


@dataclasses.dataclass(frozen=True)
class ComposedCase(Case):
    """An array of some sizes, and a number of points."""

    sizes: tuple[int, ...] = (7, 6)
    points: int = 24

    primitive = dict.fromkeys(OPS, "grid_sample")

    @property
    def options(self) -> dict[str, Any]:
        return VARIANTS[self.op][self.variant.rpartition("/")[2]]

    def call(self, **choices: Any) -> Callable[..., Any]:
        op: Any = getattr(dnn, self.op)
        return lambda *arrays: op(*arrays, **{**self.options, **choices})

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        x = rng.normal(size=self.sizes).astype(self.in_dtype)
        # Away from the elements and from the middle between two, of which some are outside.
        p = [rng.integers(-3, n + 3, self.points) + rng.choice([0.125, 0.25, 0.75], self.points) for n in self.sizes]
        return x, np.stack(p).astype(np.float64 if self.x64 else np.float32)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        golden = np.asarray(getattr(reference, self.op)(*operands, **self.options), np.float64)
        u, d = FORMATS["float64" if self.x64 else "float32"].roundoff, len(self.sizes)
        order = self.options.get("order", 3)
        largest = max(float(np.abs(operands[0].astype(np.float64)).max()), 1.5) * GAIN[order] ** d
        places = sum(n + 13.0 for n in self.sizes)
        filtered = d * (2.0 * 50 + 4) if order > 1 else 0
        error = largest * u * ((PLACE * places + 4 * filtered) + (order + 1) ** d + 8 * d * (order + 1))
        return (Expected(golden, np.full(golden.shape, error + 2.0**-120), self.in_dtype, generic=False),)

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        return (getattr(reference, self.op)(*operands, **self.options, arithmetic="ordered"),)

    def describe(self) -> dict[str, Any]:
        return {"sizes": self.sizes, **{k: str(v) for k, v in self.options.items()}}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[ComposedCase]:
    """Every variant in every dtype of the extent, over one to three axes in turn."""
    for dtype in up_to(extent, DTYPES):
        for number, variant in enumerate(VARIANTS[op]):
            sizes = ((7, 6), (9,), (4, 5, 3))[number % 3]
            yield ComposedCase(op, engine, dtype, variant, sizes, 24 if len(sizes) < 3 else 5)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject]:
    """A filtered and an unfiltered spline; every variant in the full extent. The points are the batch."""
    of_dtype = zip(("f32", "bf16", "f16", "f32", "bf16"), VARIANTS[op], strict=False)
    for dtype, variant in list(of_dtype)[: None if extent == "full" else 2]:
        found = subject(ComposedCase(op, engine, dtype, variant), seed, batch_axes=(None, 1), out_axis=0)
        if found is not None:
            yield dataclasses.replace(found, variant=variant)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> ComposedCase:
    """Every variant on arrays of any sizes and rank."""
    variant, rank = str(rng.choice(list(VARIANTS[op]))), int(rng.integers(1, 4))
    sizes = drawn.axes(rng, rank, 2**10, 60)
    points = drawn.between(rng, 1, max(1, 2**12 // (VARIANTS[op][variant].get("order", 3) + 1) ** rank))
    return ComposedCase(op, engine, drawn.pick(rng, drawn.WIDER), f"{name}/{variant}", sizes, min(points, 500))


FAMILY = family("sampling", ComposedCase, OPS, cases, subjects, "the first of its cases", (2, 3), draw=draw)
