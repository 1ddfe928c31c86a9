"""The tensor ops: their matrix, their bounds, and what the determinism procedures run on.

A result is off by at most k roundings of the accumulator, each relative to what the same formula gives for absolute
values: three for a blend, n and two more for a sum or a product of n elements, and for each resampled axis the taps and
two more (that of the weight, and the product's). Extremes, copies and moves are exact.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import case as plain
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected, Facts
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core import tolerance
from jaxdnn._src.core.tolerance import Accumulation

DTYPES = {"quick": ("f32", "bf16"), "standard": ("f32", "bf16", "f16", "int8"), "full": ("f64",)}
SIZES = (7, 6, 5)  # H, W, C
RESAMPLED = (9, 4)  # of what comes back from a resampled image
PATCHES = {"window": (3, 2), "stride": (2, 1), "padding": ((1, 2), (0, 1)), "dilation": (1, 2)}
PART = {"coordinates": "tf_crop_and_resize", "roi": ((0.25, 1.125), (0.75, -0.125))}
PORTABLE, ORDERED = {"determinism": "portable"}, {"determinism": "mesh_invariant"}
# op -> variant -> its options. Those of reduce and op_tensor name the level that they are asked for.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "transform": {
        "NCHWc4": {"out_layout": "NCHWc4"},
        "blend": {"out_layout": "CHWN", "alpha": 0.3, "beta": -1.7},
        "fold": {"padding": ((1, 0), (0, 0)), "fold": (2, 3), "alpha": -0.7},
    },
    "add": {"bias": {"alpha": 0.3, "beta": -0.7, **PORTABLE}},
    "op_tensor": {
        op: {"op": op, "alpha1": 0.3, "alpha2": -0.7, "beta": 0.9, **(ORDERED if op == "sqrt" else PORTABLE)}
        for op in ("add", "mul", "min", "max", "sqrt", "not")
    },
    "reduce": {
        f"{op}-{name}": {"op": op, "axis": (1, 2), **level}
        for op in (
            "add",
            "mul",
            "min",
            "max",
            "amax",
            "avg",
            "norm1",
            "norm2",
            "mul_no_zeros",
            "add_squares",
            "log_add",
        )
        for name, level in (("any", {}), ("ordered", PORTABLE))
    },
    "im2col": {"patches": PATCHES},
    "col2im": {"patches": PATCHES},
    "resample": {
        "nearest": {"output_sizes": (9, 4), "method": "nearest"},
        "linear": {"output_sizes": (9, 4)},
        "corners": {"scale": (0.6, 1.7), "coordinates": "align_corners"},
        "antialias": {"output_sizes": (3, 13), "antialias": True},
        "cubic": {"output_sizes": (9, 4), "method": "cubic"},
        "lanczos": {"output_sizes": (3, 8), "method": "lanczos3", "antialias": True},
        "symmetric": {"scale": (0.6, 1.7), "coordinates": "half_pixel_symmetric"},
        "roi": {"output_sizes": (9, 4), **PART, "extrapolation_value": -2.0},
        "roi-nearest": {"output_sizes": (9, 4), "method": "nearest", **PART, "extrapolation_value": 3.0},
    },
    "resample_dgrad": {
        "nearest": {"method": "nearest"},
        "linear": {},
        "cubic": {"method": "cubic"},
        "roi": PART,
    },
    "pixel_shuffle": {"CRD": {"factor": (5, 1)}, "DCR": {"factor": (1, 5), "order": "DCR"}},
    "pixel_unshuffle": {"CRD": {"factor": (7, 2)}},
    "scale": {"number": {"alpha": -0.7}},
    "fill": {"number": {"value": -2.7}},
}
OPS = tuple(VARIANTS)
LEVELLED = ("add", "op_tensor", "reduce", "resample", "resample_dgrad")
EXTREMES = ("min", "max", "amax")


@dataclasses.dataclass(frozen=True)
class TensorCase(Case):
    """A tensor op on images of 7 by 6 pixels with 5 channels."""

    batch: int = 8
    sizes: tuple[int, int, int] = SIZES
    given: tuple[tuple[str, Any], ...] | None = None  # options, if not the variant's

    primitive = {"resample": "resample", "resample_dgrad": "resample"}  # noqa: RUF012

    @property
    def options(self) -> dict[str, Any]:
        return VARIANTS[self.op][self.variant] if self.given is None else dict(self.given)

    @property
    def formula(self) -> dict[str, Any]:
        """The options that the definition takes too."""
        return {k: v for k, v in self.options.items() if k != "determinism"}

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, *self.sizes)

    @property
    def static(self) -> tuple[Any, ...]:
        return (self.shape,) if self.op in ("col2im", "resample_dgrad") else ()

    def call(self, **choices: Any) -> Callable[..., Any]:
        level = choices.pop("determinism", None)
        given = {**self.formula, **choices}
        if self.op in LEVELLED:
            given["determinism"] = level or self.options.get("determinism")
        return lambda *arrays: self._applied(getattr(dnn, self.op), arrays, given)

    def _applied(self, function: Callable[..., Any], arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self.op == "add":
            return function(*arrays, **options)
        first, *others = arrays
        if self.op == "op_tensor":
            b, prior = others
            return function(first, None if options["op"] in ("sqrt", "not") else b, prior=prior, **options)
        named = {"prior": others[0]} if others else {}
        return function(first, *self.static, **named, **options)

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        shapes: list[tuple[int, ...]] = [self.shape]
        h, w, c = self.sizes
        if self.op == "col2im":
            shapes = [reference.im2col(np.zeros(self.shape, np.float32), **self.formula).shape]
        elif self.op == "resample_dgrad":
            shapes = [(self.batch, *RESAMPLED, c)]
        elif self.op == "add":
            shapes = [(1, 1, 1, c), self.shape]
        elif self.op == "op_tensor":
            shapes = [self.shape, (1, h, 1, c), self.shape]
        elif self.options.get("beta"):
            shapes += [(c, h, w, self.batch)]
        drawn = [self._drawn(rng, shape) for shape in shapes]
        if self.options.get("op") == "log_add":
            return tuple(abs(v) + v.dtype.type(1) for v in drawn)
        return tuple(abs(v) if self.options.get("op") == "sqrt" else v for v in drawn)

    def _drawn(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if self.dtype == "int8":
            return rng.integers(-4, 5, shape).astype(np.int8)
        values = rng.normal(size=shape)
        values[rng.random(shape) < 0.05] = 0.0
        return values.astype(self.in_dtype)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        golden = np.asarray(self._applied(getattr(reference, self.op), operands, self.formula), np.float64)
        rounds = self._roundings
        accumulator = tolerance.FORMATS["float64" if self.dtype == "f64" else "float32"]
        error = accumulator.growth(rounds) * self._magnitude(operands, golden) if rounds else 0.0
        if rounds and accumulation.flush and self.dtype != "f64":
            error = error + rounds * 2.0**-126
        return (Expected(golden, error, self.in_dtype, generic=False),)

    @property
    def _roundings(self) -> int:
        """How often the accumulator rounds on the way to an element, scales and weights included; 0 if never."""
        op = self.options.get("op")
        whole = self.dtype == "int8" and not {"alpha", "alpha1", "beta"} & set(self.options)
        exact = ("im2col", "pixel_shuffle", "pixel_unshuffle", "fill")
        if self.op in exact or (self.op == "reduce" and op in EXTREMES):
            return 0
        if self.op == "resample":
            return 0 if self.options.get("method") == "nearest" else 2 * (16 + 3)
        if self.op == "resample_dgrad":
            return 2 * (16 + 3)
        if whole and op not in ("avg", "norm2", "log_add"):
            return 0
        return {"reduce": self.sizes[0] * self.sizes[1] + 4, "col2im": 6}.get(self.op, 8)

    def _magnitude(self, operands: tuple[np.ndarray, ...], golden: np.ndarray) -> np.ndarray:
        """What the formula gives for absolute values of operands and scales, or what bounds it."""
        op, wide = self.options.get("op"), tuple(np.abs(v.astype(np.float64)) for v in operands)
        positive = {k: abs(v) if isinstance(v, float) else v for k, v in self.formula.items()}
        if self.op == "reduce" and op in ("mul", "mul_no_zeros"):
            return np.abs(golden)
        if op == "log_add":  # of positive numbers: what the sum errs by, relative to itself, and the logarithm
            return 2 + np.abs(golden)
        if op in ("min", "max", "not", "add") and self.op == "op_tensor":
            positive["op"] = "add"
            return 1 + np.asarray(self._applied(reference.op_tensor, wide, positive), np.float64)
        if self.op in ("resample", "resample_dgrad"):
            return self._by_absolute_weights(wide[0])
        return np.asarray(self._applied(getattr(reference, self.op), wide, positive), np.float64)

    def _by_absolute_weights(self, x: np.ndarray) -> np.ndarray:
        """The resampling with the absolute values of its weights."""
        module = importlib.import_module("jaxdnn_reference.resample")
        options = {"method": "linear", "coordinates": "half_pixel", "rounding": "half_up", "antialias": False}
        options |= {k: v for k, v in self.formula.items() if k in options}
        after = self.formula.get("output_sizes", RESAMPLED) if "scale" not in self.formula else (4, 10)
        for axis, (n, m) in enumerate(zip(self.sizes[:2], after, strict=True), 1):
            scale = self.formula.get("scale")
            ratio = 1 / module.Fraction(scale[axis - 1]) if scale else module.Fraction(n, m)
            part = self.formula["roi"][axis - 1] if "roi" in self.formula else None
            w = np.abs(module.matrix(n, m, ratio, cubic_coefficient=-0.75, boundary=None, roi=part, **options))
            w = w.T if self.op == "resample_dgrad" else w
            x = np.moveaxis(np.tensordot(w, x, (1, axis)), 0, axis)
        return x

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        options = self.formula
        if self.op not in ("im2col", "pixel_shuffle", "pixel_unshuffle"):
            options = {**options, "arithmetic": "ordered"}
        return (self._applied(getattr(reference, self.op), operands, options),)

    def describe(self) -> dict[str, Any]:
        return {"shape": self.shape, **{k: str(v) for k, v in self.options.items()}}


def facts(case: TensorCase) -> Facts:
    """What is guaranteed: of a reduction of floats without a level, XLA's order."""
    found = plain.facts(case)
    loose = case.op == "reduce" and case.variant.endswith("-any") and case.options["op"] not in EXTREMES
    return dataclasses.replace(found, level="run_to_run") if loose and case.dtype != "int8" else found


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[TensorCase]:
    """Every variant in every dtype of the extent."""
    for dtype in up_to(extent, DTYPES):
        for variant in VARIANTS[op]:
            if op == "resample_dgrad" and dtype == "int8":
                continue
            yield TensorCase(op, engine, dtype, variant)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """The variants whose results have the batch as their first axis.

    Each of every dtype in "full"; else the dtypes take turns.
    """
    kinds = [d for d in ("f32", "bf16", "f16", "int8") if (op, d) != ("resample_dgrad", "int8")]
    for number, (variant, options) in enumerate(VARIANTS[op].items(), OPS.index(op)):
        if op in ("scale", "fill") and extent != "full":  # an element of each alone: a run's compilations are few
            continue
        if options.get("out_layout") == "CHWN" or (op == "reduce" and variant.endswith("-any")):
            continue
        for dtype in kinds if extent == "full" else kinds[number % len(kinds) :][:1]:
            case = TensorCase(op, engine, dtype, variant)
            axes = {"add": (None, 0), "op_tensor": (0, None, 0)}.get(op, (0,))

            def sized(batch: int, case: TensorCase = case) -> TensorCase:
                return dataclasses.replace(case, batch=batch)

            yield subject(case, seed, batch_axes=axes, out_axis=0, sized=sized, blended=True, variant=variant)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> TensorCase:
    """The variants of an op on images of other sizes, resampled to others, reduced over the same axes."""
    variant = str(rng.choice(list(VARIANTS[op])))
    options, dtype = dict(VARIANTS[op][variant]), drawn.pick(rng, drawn.WIDER | {"int8": 1})
    if dtype == "int8" and op == "resample_dgrad":
        dtype = "f32"
    h, w = drawn.axes(rng, 2, 1000)
    c = -(-drawn.channels(rng, 320) // 4) * 4
    if op in ("im2col", "col2im"):
        h, w, c = max(h, 3), max(w, 2), min(c, 16)
    if op.startswith("pixel_"):
        factor = options["factor"]
        h, w = (h * factor[0], w * factor[1]) if op == "pixel_unshuffle" else (h, w)
        c *= 5
    if "fold" in options:
        h, w = 2 * h - 1, 3 * w
    if "output_sizes" in options:
        options["output_sizes"] = drawn.axes(rng, 2, 2000, 60)
    if "scale" in options:  # (0.6, 1.7) of these are the sizes that the bound knows
        h, w = SIZES[:2]
    n = drawn.batch(rng, 2**16 / (h * w * c))
    return TensorCase(op, engine, dtype, f"{name}-{variant}", n, (h, w, c), tuple(options.items()))


FAMILY = family("tensor", TensorCase, OPS, cases, subjects, "a small call", (3, 4), facts, draw=draw)
