"""What is made of samples by ops with arguments of their own: matrix, data and bounds."""

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
from jaxdnn._src.core.formats import FORMATS
from jaxdnn._src.core.tolerance import Accumulation
from jaxdnn._src.sampling.cases import DTYPES, PLACE

OPS = ("map_coordinates", "roi_align", "deform_conv")
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "map_coordinates": {
        "cubic": {"mode": "reflect"},
        "linear": {"order": 1, "cval": 1.5},
        "quintic": {"order": 5, "mode": "grid-wrap"},
        "nearest": {"order": 0, "mode": "grid-constant"},
        "quadratic": {"order": 2, "mode": "nearest"},
    },
    "roi_align": {
        "average": {"output_sizes": 3},
        "max": {"output_sizes": 2, "mode": "max", "aligned": False, "adaptive": True},
        "scaled": {"output_sizes": 2, "sampling_ratio": 3, "spatial_scale": 0.5, "adaptive": True},
        "taps": {"output_sizes": 2, "mode": "max_of_taps", "box_format": "xywh"},
    },
    "deform_conv": {
        "plain": {"padding": 1},
        "grouped": {"groups": 2, "stride": 2},
        "relu": {"dilation": 2, "padding": "SAME", "activation": "relu"},
    },
}
BATCH_AXES = {"map_coordinates": (None, 1), "roi_align": (0, 0), "deform_conv": (0, 0, None)}
GAIN = (1.0, 1.0, 2.0, 3.0, 4.8, 7.5)  # of the filter of each order: the sum of its response's magnitudes


@dataclasses.dataclass(frozen=True)
class ComposedCase(Case):
    """An array of some sizes and a number of points in it; or a batch of images and in each a number of boxes."""

    sizes: tuple[int, ...] = (7, 6)
    points: int = 24
    batch: int = 8

    primitive = {op: "conv" if op == "deform_conv" else "grid_sample" for op in OPS}  # noqa: RUF012

    @property
    def options(self) -> dict[str, Any]:
        given = VARIANTS[self.op][self.variant.rpartition("/")[2]]
        return given if self.op == "map_coordinates" else {**given, "layout": f"N{'DHW'[3 - len(self.sizes) :]}C"}

    def call(self, **choices: Any) -> Callable[..., Any]:
        op: Any = getattr(dnn, self.op)
        return lambda *arrays: op(*arrays, **{**self.options, **choices})

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        if self.op == "roi_align":
            x = rng.normal(size=(self.batch, *self.sizes, 3)).astype(self.in_dtype)
            # Of sixteenths, so that the number of samples is that of the definition, and inside of the image.
            ends = [np.sort(rng.integers(0, 16 * n, (self.batch, self.points, 2)), -1) for n in self.sizes[::-1]]
            boxes = (
                np.stack([end[..., i] for i in (0, 1) for end in ends], -1) / 16 / self.options.get("spatial_scale", 1)
            )
            return x, boxes.astype(np.float64 if self.x64 else np.float32)
        if self.op == "deform_conv":
            return self._windows(rng)
        x = rng.normal(size=self.sizes).astype(self.in_dtype)
        # Away from the elements and from the middle between two, of which some are outside.
        p = [rng.integers(-3, n + 3, self.points) + rng.choice([0.125, 0.25, 0.75], self.points) for n in self.sizes]
        return x, np.stack(p).astype(np.float64 if self.x64 else np.float32)

    def _windows(self, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Images of 4 channels, windows of 2 taps an axis, and offsets of 2 groups away from the pixels."""
        d = len(self.sizes)
        x = rng.normal(size=(self.batch, *self.sizes, 4)).astype(self.in_dtype)
        w = rng.normal(size=(*[2] * d, 4 // self.options.get("groups", 1), 6)).astype(self.in_dtype)
        plain = {k: v for k, v in self.options.items() if k != "activation"}
        shape = reference.conv(x[:1].astype(np.float32), w.astype(np.float32), **plain).shape
        shape = (self.batch, *shape[1:-1], 2 * 2**d * d)
        offsets = rng.integers(-3, 4, shape) + rng.choice([0.125, 0.25, 0.75], shape)
        return x, offsets.astype(np.float64 if self.x64 else np.float32), w

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        golden = np.asarray(getattr(reference, self.op)(*operands, **self.options), np.float64)
        u, d = FORMATS["float64" if self.x64 else "float32"].roundoff, len(self.sizes)
        if self.op == "roi_align":
            largest, m = float(np.abs(operands[0].astype(np.float64)).max()), self.options.get("sampling_ratio", 2)
            error = largest * u * (2 * PLACE * sum(2.0 * n + 4 for n in self.sizes) + 4 * (2 * m) ** d + 32)
            return (Expected(golden, np.full(golden.shape, error + 2.0**-120), self.in_dtype, generic=False),)
        if self.op == "deform_conv":
            x, _, w = (np.abs(v.astype(np.float64)) for v in operands)
            size = x.max() * w.reshape(-1, w.shape[-1]).sum(0)
            terms = math.prod(w.shape[:-1])
            rounded = FORMATS[self.in_dtype.name].roundoff  # of a sample
            places = sum(2.0 * n + 16 for n in self.sizes)
            error = size * (rounded + u * (2 * terms + 8 + 2 * PLACE * places))
            return (Expected(golden, np.broadcast_to(error, golden.shape) + 2.0**-120, self.in_dtype, generic=False),)
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
            count = 3 if op != "map_coordinates" else 24 if len(sizes) < 3 else 5
            yield ComposedCase(op, engine, dtype, variant, sizes, count)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject]:
    """Two variants, of splines a filtered and an unfiltered one, whose points are the batch; all in the full extent."""
    of_dtype = zip(("f32", "bf16", "f16", "f32", "bf16"), VARIANTS[op], strict=False)
    for dtype, variant in list(of_dtype)[: None if extent == "full" else 2]:
        case = ComposedCase(op, engine, dtype, variant, points=3 if op == "roi_align" else 24)
        found = subject(case, seed, batch_axes=BATCH_AXES[op], out_axis=0)
        if found is not None:
            yield dataclasses.replace(found, variant=variant)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> ComposedCase:
    """Every variant on arrays of any sizes and rank."""
    variant, rank = str(rng.choice(list(VARIANTS[op]))), int(rng.integers(1, 4))
    sizes = drawn.axes(rng, rank, 2**10, 60)
    if op == "deform_conv":
        sizes = tuple(max(n, 4) for n in drawn.axes(rng, rank, 2**6, 20))
        return ComposedCase(op, engine, drawn.pick(rng, drawn.WIDER), f"{name}/{variant}", sizes, 0, 2)
    if op == "roi_align":
        points, batch = drawn.between(rng, 1, 8), drawn.between(rng, 1, 4)
        return ComposedCase(op, engine, drawn.pick(rng, drawn.WIDER), f"{name}/{variant}", sizes, points, batch)
    points = drawn.between(rng, 1, max(1, 2**12 // (VARIANTS[op][variant].get("order", 3) + 1) ** rank))
    return ComposedCase(op, engine, drawn.pick(rng, drawn.WIDER), f"{name}/{variant}", sizes, min(points, 500))


FAMILY = family("sampling", ComposedCase, OPS, cases, subjects, "a small call", (2, 3), draw=draw)
