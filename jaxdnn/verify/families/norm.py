"""Normalisations by mean and deviation and their backward ops: every op, axes and layouts, means far from zero."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn import _frame, tolerance_norm
from jaxdnn import _norm_arguments as arguments
from jaxdnn.tolerance import Accumulation
from jaxdnn.verify import levels
from jaxdnn.verify.case import Case, Expected
from jaxdnn.verify.families import family

FORWARD = ("layer_norm", "rms_norm", "adaptive_layer_norm", "group_norm", "instance_norm", "batch_norm")
OPS = tuple(op + suffix for op in FORWARD for suffix in ("", "_dgrad"))
ROWS = FORWARD[:3]
# The mean of "far" data, whose deviation is 1: what the input's own format still resolves.
FAR = {"f32": 1e4, "bf16": 100.0, "f16": 100.0, "f64": 1e8}


@dataclasses.dataclass(frozen=True)
class NormCase(Case):
    """One call; forward with scale and bias, backward with a scale."""

    primitive: ClassVar[dict[str, str]] = {op: "norm_dgrad" if op.endswith("_dgrad") else "norm" for op in OPS}

    shape: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def plain(self) -> str:
        """The forward op."""
        return self.op.removesuffix("_dgrad")

    @property
    def backward(self) -> bool:
        return self.op.endswith("_dgrad")

    @property
    def view(self) -> arguments.View:
        o, x = dict(self.options), np.empty(self.shape, np.float32)
        if self.plain in ROWS:
            return (arguments.samples if self.plain == ROWS[2] else arguments.rows)(x, o.get("axis", -1))
        frame = _frame.frame(o["layout"], None)
        if self.plain == "group_norm":
            return arguments.grouped(frame, x, o["groups"])
        return (
            arguments.instances(frame, x) if self.plain == "instance_norm" else arguments.batches(frame, x, o["mode"])
        )

    def call(self, **choices: Any) -> Callable[..., Any]:
        return self._function(dnn, {**dict(self.options), **choices})

    def _function(self, module: Any, o: dict[str, Any]) -> Callable[..., Any]:
        op = getattr(module, self.op)
        if self.backward:
            if self.plain == ROWS[2]:
                return lambda dy, x, s: op(dy, x, s, **o)
            return lambda dy, x, s: op(dy, x, scale=s, **o)
        if self.plain == ROWS[2]:
            return lambda x, s, b: op(x, s, b, **o)
        first = (lambda found: found[0]) if self.plain == "batch_norm" else (lambda found: found)
        return lambda x, s, b: first(op(x, scale=s, bias=b, **o))

    def kinds(self) -> tuple[str, ...]:
        return ("normal", "far", "integers") if self.plain != "rms_norm" else ("normal", "integers")

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        shapes = [self.shape, self.view.parameters, self.shape if self.backward else self.view.parameters]
        if kind == "integers":
            arrays = [rng.integers(-4, 5, shape).astype(np.float64) for shape in shapes]
        else:
            arrays = [rng.normal(size=shape) for shape in shapes]
            arrays[0] = arrays[0] + (FAR[self.dtype] if kind == "far" else 0.5)
        x, scale, last = (v.astype(self.in_dtype) for v in arrays)
        return (last, x, scale) if self.backward else (x, scale, last)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        values = self._function(reference, dict(self.options))(*operands)
        view, wide = self.view, np.float64 if self.x64 else np.float32
        x, scale = operands[1:] if self.backward else operands[:2]
        eps = {"rms_norm": 1e-6}.get(self.plain, 1e-5)
        about = (view.shape, view.axes, view.summed, view.spread)
        bias = None if self.backward else operands[2]
        p = tolerance_norm.problem(*about, x, scale, bias, eps=eps, centred=self.plain != "rms_norm")
        generic = kind != "integers"
        dy = operands[0].astype(np.float64).reshape(view.shape) if self.backward else None
        names, values = (("dx", "dscale", "dbias"), values) if self.backward else (("y",), (values,))
        found = []
        for name, value, error in zip(names, values, tolerance_norm.from_definition(p, dy), strict=True):
            dtype = wide if name in ("dscale", "dbias") else self.in_dtype
            found.append(Expected(np.asarray(value, np.float64), error.reshape(value.shape), dtype, name, generic))
        return tuple(found)

    def describe(self) -> dict[str, Any]:
        return {"shape": self.shape, **dict(self.options)}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[NormCase]:
    """One shape an op in the quick extent; other axes, layouts and lengths, and float64, beyond."""
    plain = op.removesuffix("_dgrad")
    geometries = list(_geometries(plain))
    for dtype in ("f32", "bf16", "f16"):
        for variant, shape, options in geometries[: 2 if extent == "quick" else None]:
            yield NormCase(op, engine, dtype, variant, shape, options)
    if extent == "quick":
        return
    variant, shape, options = geometries[0]
    yield NormCase(op, engine, "f64", variant, shape, options)


def _geometries(plain: str) -> Iterator[tuple[str, tuple[int, ...], tuple[tuple[str, Any], ...]]]:
    if plain in ROWS:
        yield "rows", (6, 5, 64), ()
        yield "uneven", (3, 4, 77), ()
        yield "axes", (5, 3, 7, 8), (("axis", (1, -1)),)
        yield "long", (3, 2, 1000), ()
        return
    groups = (("groups", 4),) if plain == "group_norm" else ()
    modes = ("spatial", "per_activation") if plain == "batch_norm" else (None,)
    for mode in modes:
        extra = groups if mode is None else (("mode", mode),)
        for layout, shape in (
            ("NHWC", (5, 6, 7, 8)),
            ("NCHW", (5, 8, 6, 7)),
            ("CHWN", (8, 3, 5, 6)),
            ("NWC", (4, 9, 8)),
        ):
            yield "-".join(filter(None, (layout, mode))), shape, (*extra, ("layout", layout))


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[levels.Subject]:
    """Rows and images, by y or dx; batch statistics, like gradients in scale and bias, are of the whole batch."""
    plain = op.removesuffix("_dgrad")
    variant, shape, options = next(_geometries(plain))
    parameter = 0 if plain == ROWS[2] else None
    axes = (0, 0, parameter) if op.endswith("_dgrad") else (0, parameter, parameter)
    whole = plain == "batch_norm"
    for dtype in ("f32", "bf16"):
        case = NormCase(op, engine, dtype, variant, shape, options)
        found = levels.subject(case, seed, batch_axes=(None,) * 3 if whole else axes, out_axis=None if whole else 0)
        if found is not None:
            yield found


FAMILY = family("norm", NormCase, OPS, cases, subjects, "one normalisation", (8, 24))
