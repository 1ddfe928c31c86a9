"""Maxima that are put back where they were: every result is exact, also where windows overlap."""

import dataclasses
import math
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
from jaxdnn._src.pool.cases import DTYPES, WINDOWS, windows_of

VARIANTS = {"apart": ("NHWC", "2x2"), "overlapping": ("NCHW", "3x3 step 2"), "ceil": ("NHWC", "ceil")}


@dataclasses.dataclass(frozen=True)
class UnpoolCase(Case):
    """The maxima of a pooling over windows of an image, and their indices."""

    layout: str
    sizes: tuple[int, ...]
    window: tuple[tuple[str, Any], ...]
    batch: int = 5
    channels: int = 8

    @property
    def options(self) -> dict[str, Any]:
        return {**dict(self.window), "layout": self.layout}

    @property
    def shape(self) -> tuple[int, ...]:
        return drawn.laid_out(self.layout, self.batch, self.channels, self.sizes)

    def call(self, **choices: Any) -> Callable[..., Any]:
        del choices  # it has no engines, and every element is exact
        return lambda y, indices: dnn.unpool(y, indices, self.shape, **self.options)

    def kinds(self) -> tuple[str, ...]:
        return ("normal", "elsewhere") if self.dtype == "int8" else ("normal", "special", "elsewhere")

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Kind special: values that are NaN, infinite or -0; elsewhere: indices outside of their windows too."""
        x = rng.integers(-4, 5, self.shape) if self.dtype == "int8" else rng.normal(size=self.shape)
        y, indices = reference.pool(x.astype(self.in_dtype), return_indices=True, **self.options)
        if kind == "special":
            for value in (np.nan, np.inf, -np.inf, -0.0):
                y = np.where(rng.random(y.shape) < 0.1, value, y)
        if kind == "elsewhere":
            anywhere = rng.integers(-2, math.prod(self.sizes) + 2, y.shape)
            indices = np.where(rng.random(y.shape) < 0.5, anywhere, indices)
        return y.astype(self.in_dtype), indices.astype(np.int32)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        return (Expected(self.definition(operands)[0].astype(np.float64), 0.0, self.in_dtype, generic=False),)

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        y, indices = operands
        return (np.asarray(reference.unpool(y, indices, self.shape, **self.options)).astype(self.in_dtype),)

    def describe(self) -> dict[str, Any]:
        return {"shape": self.shape, **self.options}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[UnpoolCase]:
    """Windows apart and overlapping, in every dtype of the extent."""
    for dtype in up_to(extent, DTYPES):
        for variant, (layout, window) in VARIANTS.items():
            sizes, options = WINDOWS[window]
            yield UnpoolCase(op, engine, dtype, variant, layout, sizes, tuple(options.items()))


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """Windows that overlap, of a batch that eight devices divide."""
    sizes, options = WINDOWS["3x3 step 2"]
    case = UnpoolCase(op, engine, "bf16", "overlapping", "NHWC", sizes, tuple(options.items()), 8)
    sized = lambda batch: dataclasses.replace(case, batch=batch)  # the result's shape is an argument
    yield subject(case, seed, batch_axes=(0, 0), out_axis=0, sized=sized, variant="overlapping")


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> UnpoolCase:
    """The windows of pooling, in every layout without channel vectors."""
    rank = int(drawn.pick(rng, {1: 2, 2: 6, 3: 1}))
    layout = drawn.layout(rng, rank, last=rng.random() < 0.5)
    layout = layout.partition("c")[0]
    c = drawn.channels(rng, 640)
    sizes = drawn.axes(rng, rank, 2**17 / c)
    n = drawn.batch(rng, 2**19 / (c * math.prod(sizes)))
    dtype = drawn.pick(rng, drawn.WIDER | {"int8": 1})
    return UnpoolCase(op, engine, dtype, name, layout, sizes, tuple(windows_of(rng, sizes).items()), n, c)


FAMILY = family("unpool", UnpoolCase, ("unpool",), cases, subjects, "2 x 2 windows", (3, 4), draw=draw)
