"""Sampling at points inside of images and outside, affine grids, and both in one: matrix, data and bounds.

A coordinate in pixels is off by at most `PLACE` roundings of what it is computed from. Away from where other pixels are
sampled, a result is off by that times its steepest slope, by two roundings for each factor of a weight, and by one for
each tap, each relative to the image's largest magnitude.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core.formats import FORMATS
from jaxdnn._src.core.tolerance import Accumulation
from jaxdnn._src.sampling.cases_gradients import MODES, gradient
from jaxdnn._src.sampling.primitive import AT, AT_PIXELS, AT_SLOPES

OPS = ("grid_sample", "affine_grid", "spatial_transformer", "warp")
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {},
    "nearest": {"mode": "nearest", "padding": "border"},
    "cubic": {"mode": "cubic", "padding": "reflection"},
    "linear-reflection": {"padding": "reflection"},
    "linear-corners": {"padding": "border", "align_corners": True},
    "cubic-zeros": {"mode": "cubic", "coordinates": "pixel", "order": "ij"},
    "nearest-corners": {"mode": "nearest", "padding": "reflection", "align_corners": True},
}
# Of an op that has not all of them. A transformer's places are any, also where "nearest" and "zeros" have steps.
OF_OP = {
    "affine_grid": ("centres", "corners"),
    "spatial_transformer": ("linear", "cubic", "linear-reflection"),
    "warp": ("linear", "cubic-zeros", "nearest", "linear-reflection"),
}
PLACE = 8
DTYPES = {"quick": ("f32", "bf16"), "standard": ("f16",), "full": ("f64",)}


@dataclasses.dataclass(frozen=True)
class SamplingCase(Case):
    """Images of some sizes, and as many points along each axis of a grid; or of a call with these a gradient."""

    batch: int = 8
    sizes: tuple[int, ...] = (7, 6)
    points: tuple[int, ...] = (5, 4)
    channels: int = 5
    align_corners: bool = False  # of affine_grid
    gradient: str = ""  # of grid_sample: in "x" or in "grid"

    primitive = dict.fromkeys(("grid_sample", "spatial_transformer", "warp"), AT)

    @property
    def bound(self) -> str:
        return {"x": AT_PIXELS, "grid": AT_SLOPES}.get(self.gradient) or super().bound

    @property
    def options(self) -> dict[str, Any]:
        if self.op == "affine_grid":
            return {"align_corners": self.align_corners}
        given = {"layout": f"N{'DHW'[3 - len(self.sizes) :]}C", **VARIANTS[self.variant.rpartition("/")[2]]}
        if self.op == "grid_sample":
            return given
        given.pop("coordinates", None)
        return given | ({"sizes": self.points} if self.op == "spatial_transformer" else {})

    @property
    def static(self) -> tuple[Any, ...]:
        return (self.points,) if self.op == "affine_grid" else ()

    def call(self, **choices: Any) -> Callable[..., Any]:
        op: Any = getattr(dnn, self.op)
        call = lambda *arrays: op(*arrays, *self.static, **{**self.options, **choices})
        if not self.gradient:
            return call
        # In the one array alone: an engine may not serve the other's gradient, which a program may keep though unused.
        if self.gradient == "x":
            return lambda x, grid, dy: jax.vjp(lambda x: call(x, grid), x)[1](dy)[0]
        return lambda x, grid, dy: jax.vjp(lambda grid: call(x, grid), grid)[1](dy)[0]

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        d = len(self.sizes)
        theta = rng.normal(size=(self.batch, d, d + 1)).astype(self.in_dtype)
        if self.op == "affine_grid":
            return (theta,)
        x = rng.normal(size=(self.batch, *self.sizes, self.channels)).astype(self.in_dtype)
        if self.op == "spatial_transformer":
            return x, theta
        places = np.stack([self._coordinates(rng, size) for size in self._by_component()], -1)
        if self.op == "warp":
            here = np.moveaxis(np.indices(self.points), 0, -1)
            places = places - (here if self.options.get("order") == "ij" else here[..., ::-1]).astype(places.dtype)
        if self.gradient:
            return x, places, rng.normal(size=(self.batch, *self.points, self.channels)).astype(self.in_dtype)
        return x, places

    def _by_component(self) -> tuple[int, ...]:
        return self.sizes if self.options.get("order") == "ij" else self.sizes[::-1]

    def _coordinates(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Away from pixels' centres and from the middle between two, of which some are outside."""
        shape = (self.batch, *self.points)
        p = rng.integers(-3, size + 3, shape) + rng.choice([0.125, 0.25, 0.75, 0.875], shape)
        if self.op != "warp" and self.options.get("coordinates") != "pixel":
            p = 2 * p / max(size - 1, 1) - 1 if self.options.get("align_corners") else (2 * p + 1) / size - 1
        return p.astype(np.float64 if self.dtype == "f64" else np.float32)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        if self.gradient:
            return (self._expected_gradient(*operands),)
        golden = np.asarray(getattr(reference, self.op)(*operands, *self.static, **self.options), np.float64)
        u, d = FORMATS["float64" if self.dtype == "f64" else "float32"].roundoff, len(self.sizes)
        affine = self.op in ("affine_grid", "spatial_transformer")
        grid = np.abs(operands[-1].astype(np.float64))
        if affine:
            grid = grid.sum(-1).reshape(self.batch, *[1] * d, d)
        if self.op == "affine_grid":
            error: Any = (2 * d + 4) * u * grid
        else:
            taps, weight, slope, _ = MODES[self.options.get("mode", "linear")]
            largest = np.abs(operands[0].astype(np.float64)).max(tuple(range(1, d + 1)), keepdims=True)
            far = grid + (max(self.points) if self.op == "warp" else 0)
            place = self._off(far, (PLACE + (2 * d + 4) * affine) * u)
            error = largest * (place * slope * weight ** (d - 1) + (taps**d + 24 * d) * u * weight**d)
        return (Expected(golden, error + 2.0**-120, self.in_dtype, generic=False),)

    def _off(self, grid: np.ndarray, roundings: float) -> np.ndarray:
        """How far off a point is at most, in pixels."""
        return roundings * ((1 + grid) * (np.asarray(self._by_component()) + 1)).sum(-1, keepdims=True)

    def _expected_gradient(self, x: np.ndarray, grid: np.ndarray, dy: np.ndarray) -> Expected:
        u = FORMATS["float64" if self.dtype == "f64" else "float32"].roundoff
        place = self._off(np.abs(grid.astype(np.float64)), PLACE * u)
        golden, error = gradient(self.gradient, x, grid, dy, self.options, place, u)
        dtype = grid.dtype if self.gradient == "grid" else self.in_dtype
        return Expected(golden, error + 2.0**-120, dtype, generic=False)

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        return (getattr(reference, self.op)(*operands, *self.static, **self.options, arithmetic="ordered"),)

    def describe(self) -> dict[str, Any]:
        named = {"gradient": self.gradient} if self.gradient else {}
        return {"sizes": self.sizes, **named, **{k: str(v) for k, v in self.options.items()}}


def _case(op: str, engine: str, dtype: str, variant: str, **given: Any) -> SamplingCase:
    return SamplingCase(op, engine, dtype, variant, align_corners=variant == "corners", **given)


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[SamplingCase]:
    """Every variant in every dtype of the extent, over one to three axes in turn."""
    ranks = ({}, {"sizes": (9,), "points": (11,)}, {"sizes": (5, 4, 3), "points": (2, 4, 3), "batch": 2})
    variants = OF_OP.get(op, tuple(VARIANTS))
    for dtype in up_to(extent, DTYPES):
        for number, variant in enumerate(variants):
            if engine == "hopper" and (variant.startswith("cubic") or dtype == "f64"):
                continue
            yield _case(op, engine, dtype, variant, **ranks[number % 3])


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject]:
    """A mode in each dtype; every variant in the full extent.

    Below it cubic is over one axis: over two it has 16 taps, and its gradient, which a subject compiles 14 times with
    each blend, takes four seconds of a core.
    """
    modes = ("linear", "cubic", "nearest-corners")
    variants = OF_OP.get(op, tuple(dict.fromkeys((*modes, *VARIANTS))))
    if extent != "full":
        variants = variants[:2] if op in OF_OP else modes
    for dtype, variant in zip(("f32", "bf16", "f16") * 3, variants, strict=False):
        one_axis = {"sizes": (9,), "points": (11,)} if variant.startswith("cubic") and extent != "full" else {}
        case = _case(op, engine, dtype, variant, **one_axis)
        found = subject(case, seed, batch_axes=(0,) * (1 if op == "affine_grid" else 2), out_axis=0)
        if found is not None:
            yield dataclasses.replace(found, variant=variant)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> SamplingCase:
    """Every variant on images and grids of any sizes and rank; of `grid_sample` half of the calls are gradients."""
    rank = int(rng.integers(1, 4))
    variant = str(rng.choice(list(VARIANTS if op == "affine_grid" else OF_OP.get(op, tuple(VARIANTS)))))
    sizes, points = drawn.axes(rng, rank, 2**12, 60), drawn.axes(rng, rank, 2**7, 60)
    given = {"sizes": sizes, "points": points, "channels": drawn.channels(rng, 64)}
    batch = drawn.batch(rng, 2**16 / (math.prod(sizes) * given["channels"]))
    if op == "affine_grid":
        return SamplingCase(
            op, engine, drawn.pick(rng, drawn.WIDER), name, batch, **given, align_corners="corners" in variant
        )
    if op == "grid_sample" and (wanted := str(rng.choice(["", "", "x", "grid"]))):
        if wanted == "grid" and variant.startswith("nearest"):  # which has none
            variant = "linear-reflection"
        given["gradient"], name = wanted, f"{name}/{wanted}"
    return SamplingCase(op, engine, drawn.pick(rng, drawn.WIDER), f"{name}/{variant}", batch, **given)


def _draw_cells(most: bool, op: str, engine: str, rng: drawn.Generator, name: str) -> SamplingCase:
    """A gradient in images that have more cells in all than 16 bits number: the sort leaves the low bits of a cell's
    number, or, of the most cells, has keys of 32 bits. Along an axis of one pixel a pixel has several cells."""
    batch, sizes = (2048, (1024, 1, 1)) if most else (int(rng.integers(40, 120)), (60, 30))
    points = tuple(int(n) for n in rng.integers(1, 4, len(sizes)))
    variant = str(rng.choice([v for v in VARIANTS if v.startswith("linear")]))
    given = {"sizes": sizes, "points": points, "channels": int(rng.integers(1, 3)), "gradient": "x"}
    return SamplingCase(op, engine, drawn.pick(rng, drawn.FLOATS), f"{name}/x/{variant}", batch, **given)


LEADS = {
    ("grid_sample", ("sampling pixels", "bits left", "yes")): ft.partial(_draw_cells, False),
    ("grid_sample", ("sampling pixels", "keys", "32 bits")): ft.partial(_draw_cells, True),
}
FAMILY = family("sampling", SamplingCase, OPS, cases, subjects, "a small call", (1, 1), draw=draw, leads=LEADS)
