"""The cases of convolutions that also return what they read: both results, and the one gradient of both."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import case as plain
from jaxdnn._src.cases.case import Expected
from jaxdnn._src.cases.drawn import Generator
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.conv.cases import checks
from jaxdnn._src.conv.cases import draw as conv_draw
from jaxdnn._src.conv.cases.case import Case
from jaxdnn._src.conv.cases.geometries import CHANNELS_LAST, GEOMETRIES, NO_BLEND, Blend, Geometry
from jaxdnn._src.core.tolerance import Accumulation

OPS = ("conv_skip",)
JOINED = {relu: Blend(beta=1.0, prior=True, relu=relu) for relu in (False, True)}


@dataclasses.dataclass(frozen=True)
class SkipCase(plain.Case):
    """One call, and the gradient in x for gradients in both results."""

    primitive: ClassVar[dict[str, str]] = {"conv_skip": "conv"}

    geometry: Geometry = GEOMETRIES["plain"]
    relu: bool = True

    def part(self, op: str, blend: Blend = NO_BLEND) -> Case:
        """An op that the call is made of."""
        return Case(op, self.engine, self.dtype, CHANNELS_LAST[len(self.geometry.sizes)], None, self.geometry, blend)

    def call(self, **choices: Any) -> Callable[..., Any]:
        given = {k: v for k, v in self.part("conv").arguments().items() if k not in ("alpha", "beta", "activation")}
        given |= {"input_activation": "relu" if self.relu else None, **choices}

        def both(x: Any, w: Any, dy: Any, dh: Any) -> Any:
            results, back = jax.vjp(lambda x: dnn.conv_skip(x, w, **given), x)
            return *results, *back((dy, dh))

        return both

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        shape = self.part("conv").shape
        return tuple(rng.standard_normal(shape(role)).astype(self.in_dtype) for role in "xwyx")

    def backward(self, x: np.ndarray, dh: np.ndarray) -> tuple[Case, np.ndarray, dict[str, np.ndarray]]:
        """The call of backward data that the gradient is, what the convolution reads, and what is given by name."""
        h = np.maximum(x, np.zeros((), x.dtype)) if self.relu else x
        return self.part("conv_dgrad", JOINED[self.relu]), h, {"prior": dh, **({"x": h} if self.relu else {})}

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        x, w, dy, dh = operands
        back, h, extras = self.backward(x, dh)
        found = []
        for name, case, arrays, given in (("y", self.part("conv"), (h, w), {}), ("dx", back, (dy, w), extras)):
            details = checks.golden(case, arrays, given)
            error = checks.error_bound(case, False, arrays, details, given, accumulation)
            if name == "dx" and self.geometry.groups > 1:  # converted before the gradients are added, and behind
                size = np.abs(np.asarray(details.accumulated, np.float64)) + error
                error = error + 2.0**-self.bits * (2 * size + np.abs(dh.astype(np.float64)))
            found.append(Expected(details.value, error, self.in_dtype, name))
        found.insert(1, Expected(h.astype(np.float64), 0.0, self.in_dtype, "h"))
        return tuple(found)

    @property
    def bits(self) -> int:
        """The bits of the results' significand."""
        return checks.tolerance.FORMATS[np.dtype(self.in_dtype).name].bits

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        x, w, dy, dh = operands
        back, h, extras = self.backward(x, dh)
        how = {"arithmetic": "ordered", "out_dtype": self.in_dtype}
        y = reference.conv(h, w, **self.part("conv").arguments(), **how)
        if self.geometry.groups == 1:
            return y, h, reference.conv_dgrad(dy, w, x.shape, **back.arguments(), **extras, **how)
        apart = reference.conv_dgrad(dy, w, x.shape, **self.part("conv_dgrad").arguments(), **how)
        return y, h, np.where(h > 0, apart + dh, 0).astype(x.dtype) if self.relu else apart + dh

    def describe(self) -> dict[str, Any]:
        return {"geometry": dataclasses.asdict(self.geometry), "input_activation": "relu" if self.relu else None}


BY_EXTENT = {
    "quick": (("bf16", "wide", True), ("f32", "plain", False)),
    "standard": (("f16", "pointwise", True), ("f32", "stride", True), ("bf16", "wide-groups", True)),
    "full": (
        ("bf16", "3d", True), ("bf16", "wide-stride", False), ("f16", "1d-all", False), ("f32", "groups", True),
        ("f64", "plain", True),
    ),
}  # fmt: skip


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[SkipCase]:
    """A few geometries; those of the convolutions are many."""
    for dtype, name, relu in up_to(extent, BY_EXTENT):
        yield SkipCase(op, engine, dtype, f"{name}-{'relu' if relu else 'plain'}", GEOMETRIES[name], relu)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """The quick cases, with a batch that meshes divide."""
    for case in cases(op, engine, "quick", seed):
        case = dataclasses.replace(case, geometry=dataclasses.replace(case.geometry, batch=8))
        yield subject(case, seed, batch_axes=(0, None, 0, 0), out_axis=0)


def draw(op: str, engine: str, rng: Generator, name: str) -> SkipCase:
    """A random convolution's geometry, in a dtype that has derivatives."""
    geometry = conv_draw.uncropped("conv", engine, rng, name).geometry
    return SkipCase(op, engine, str(rng.choice(["bf16", "f16", "f32"])), name, geometry, rng.random() < 0.7)


def facts(case: SkipCase) -> plain.Facts:
    """Those of the convolution; the engine must serve backward data too, for a gradient names it again."""
    declared = plain.facts(case)
    operands = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in case.operands("normal", np.random.default_rng(0))]
    back = plain.explained(case, "conv_dgrad", operands)
    return dataclasses.replace(declared, refusal=declared.refusal or back.refusal)


FAMILY = family("conv", SkipCase, OPS, cases, subjects, "3 x 3, relu", (1, 3), facts=facts, draw=draw)
