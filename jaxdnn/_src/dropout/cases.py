"""Dropout: its bits, in every layout, at offsets of 64 bits, from keys that are operands."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected
from jaxdnn._src.cases.family import family
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core.tolerance import Accumulation

OPS = ("dropout", "dropout_mask")
SHAPES = {
    None: (16, 33, 130),
    "NHWC": (3, 8, 7, 20),
    "NCHW": (3, 20, 8, 7),
    "CHWN": (20, 8, 7, 3),
    "NCDHW": (2, 6, 5, 4, 3),
    "NCHWc4": (3, 5, 8, 7, 4),
}


@dataclasses.dataclass(frozen=True)
class DropoutCase(Case):
    """Dropout of x by a key of two words; its bits are checked against the definition's on every kind of data.

    A mask is one of x's shape, as integers, for it has no gradient.
    """

    primitive: ClassVar[dict[str, str]] = dict.fromkeys(OPS, "dropout")

    rate: float = 0.5
    offset: int = 0
    layout: str | None = None
    shape: tuple[int, ...] | None = None  # in place of the layout's own

    def arguments(self) -> dict[str, Any]:
        return {"rate": self.rate, "offset": self.offset, "layout": self.layout}

    def call(self, **choices: Any) -> Callable[..., Any]:
        given = {**self.arguments(), **choices}
        if self.op == "dropout_mask":
            return lambda x, key: dnn.dropout_mask(key, x.shape, **given).astype(np.int32)
        return lambda x, key: dnn.dropout(x, key, **given)

    def kinds(self) -> tuple[str, ...]:
        return ("normal",) if self.op == "dropout_mask" else ("normal", "magnitudes", "special")

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        x = rng.normal(size=self.shape or SHAPES[self.layout])
        if kind == "magnitudes":
            x = x * np.exp2(rng.integers(-12, 12, x.shape))
        x = x.astype(self.in_dtype)
        if kind == "special":
            x.reshape(-1)[::3], x.reshape(-1)[1::7] = np.nan, -np.inf
        return x, rng.integers(0, 2**32, 2, dtype=np.uint32)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        """Two roundings: of the scale, and of the product."""
        if self.op == "dropout_mask":
            (mask,) = self.definition(operands)
            return (Expected(mask.astype(np.float64), 0.0, np.int32, generic=False),)
        value = reference.dropout(*operands, **self.arguments())
        u = 2.0**-53 if self.dtype == "f64" else 2.0**-24
        with np.errstate(invalid="ignore"):
            error = np.where(np.isfinite(value), 2.01 * u * np.abs(value), 0.0)
        return (Expected(value, error, self.in_dtype, generic=self.dtype in ("f32", "f64")),)

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        if self.op == "dropout_mask":
            x, key = operands
            return (reference.dropout_mask(key, x.shape, **self.arguments()).astype(np.int32),)
        return (reference.dropout(*operands, **self.arguments(), arithmetic="ordered"),)

    def describe(self) -> dict[str, Any]:
        return self.arguments()


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[DropoutCase]:
    """Rates, layouts and offsets; float64 beyond the quick extent."""
    dtypes = ("f32",) if op == "dropout_mask" else ("f32", "bf16", "f16", "f64")
    for dtype in dtypes[:3] if extent == "quick" else dtypes:
        for rate in (0.1,) if extent == "quick" else (0.0, 0.1, 0.5, 0.99):
            yield DropoutCase(op, engine, dtype, f"rate{rate}", rate)
        for offset in (3,) if extent == "quick" else (3, 4, 2**34 - 100, 2**63 + 1):
            yield DropoutCase(op, engine, dtype, f"offset{offset}", 0.3, offset)
        for layout in ("NCHW",) if extent == "quick" else [v for v in SHAPES if v]:
            yield DropoutCase(op, engine, dtype, layout, 0.3, 0, layout)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """A sample's place in the batch is part of its logical index, so each is a batch of one: vmap's, not the op's."""
    for dtype in ("f32",) if op == "dropout_mask" else ("f32", "bf16", "f16"):
        case = BySample(op, engine, dtype, "by-sample", 0.3)
        yield subject(case, seed, batch_axes=(0, None), out_axis=0)


@dataclasses.dataclass(frozen=True)
class BySample(DropoutCase):
    """The same mask for every sample: vmap over x with one key, which is what has to be independent of the batch."""

    def call(self, **choices: Any) -> Callable[..., Any]:
        one = super().call(**choices)
        return jax.vmap(one, (0, None))

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        x, key = operands
        define = super().definition
        return (np.stack([define((sample, key))[0] for sample in x]),)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> DropoutCase:
    """Any rate, offsets of 64 bits, every layout."""
    dtype = drawn.pick(rng, drawn.FLOATS if engine == "hopper" else drawn.WIDER)
    dtype = "f32" if op == "dropout_mask" else dtype
    rate = drawn.pick(rng, {0.0: 1, 0.1: 4, 0.5: 4, 0.99: 1, round(float(rng.random()), 3): 4})
    offset = int(drawn.pick(rng, {0: 6, int(rng.integers(1, 100)): 2, 4 * int(rng.integers(1, 2**60)): 2}))
    if rng.random() < 0.4:
        c = drawn.channels(rng, 640)
        return DropoutCase(op, engine, dtype, name, rate, offset, None, (*drawn.axes(rng, 2, 2**19 / c, 500), c))
    rank = int(rng.integers(1, 4))
    layout = drawn.layout(rng, rank, last=engine == "hopper" and rng.random() < 0.5)
    c = -(-drawn.channels(rng, 640) // 32) * 32 if "c" in layout else drawn.channels(rng, 640)
    sizes = drawn.axes(rng, rank, 2**17 / c)
    if engine == "hopper":  # planes of whole vectors
        sizes = (*sizes[:-1], -(-sizes[-1] // 8) * 8)
    shape = drawn.laid_out(layout, drawn.batch(rng, 2**19 / (c * math.prod(sizes))), c, sizes)
    return DropoutCase(op, engine, dtype, name, rate, offset, layout, shape)


def _planes(op: str, engine: str, rng: drawn.Generator, name: str) -> DropoutCase:
    """Channels first: fours of channels, and planes of whole vectors."""
    found, c = draw(op, engine, rng, name), 4 * drawn.between(rng, 1, 160)
    layout = str(rng.choice(["NCW", "NCHW", "NCDHW"]))
    *others, last = drawn.axes(rng, len(layout) - 2, 2**17 / c)
    sizes = (*others, -(-last // 8) * 8)
    shape = drawn.laid_out(layout, drawn.batch(rng, 2**19 / (c * math.prod(sizes))), c, sizes)
    return dataclasses.replace(found, offset=found.offset // 4 * 4, layout=layout, shape=shape)


LEADS = {("dropout", ("dropout", "kernel", "planes")): _planes}
FAMILY = dataclasses.replace(
    family("dropout", DropoutCase, OPS, cases, subjects, "rate 0.1", (3, 6), draw=draw, leads=LEADS),
    facets=lambda case: {case.dtype, ("offset", case.offset > 0), ("layout", case.layout is None)},
)
