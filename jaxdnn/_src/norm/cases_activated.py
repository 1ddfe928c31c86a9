"""Cases of normalisations with an activation behind them, and of the gradients through both."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.activation.bounds import Epilogue, slope_error
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected
from jaxdnn._src.cases.family import family
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core.tolerance import Accumulation
from jaxdnn._src.norm import bounds as norm_bounds
from jaxdnn._src.norm.cases import FAR, LARGE, Arrays

OPS = ("norm_activated", "norm_activated_dgrad")
NORMS: dict[str, tuple[tuple[str, Any], ...]] = {"batch_norm": (), "group_norm": (("groups", 4),), "instance_norm": ()}
ACTIVATIONS = ("relu", "swish")
OTHERS = ("gelu",)  # of which the slope is kept
CURVATURE = 1.0  # at least |act''| of the activations here, but at relu's kink
SHAPES = {"NHWC": (5, 6, 7, 8), LARGE: (2, 45, 46, 64)}


@dataclasses.dataclass(frozen=True)
class ActivatedCase(Arrays, Case):
    """One call with scale and bias; backward the gradients in x, scale and bias, of dy and these."""

    primitive: ClassVar[dict[str, str]] = dict(zip(OPS, ("norm", "norm_dgrad"), strict=True))

    of: str = "batch_norm"
    activation: str = "relu"
    shape: tuple[int, ...] = SHAPES["NHWC"]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def plain(self) -> str:
        return self.of

    @property
    def backward(self) -> bool:
        return self.op.endswith("_dgrad")

    def call(self, **choices: Any) -> Callable[..., Any]:
        return self._gradient(self._function(dnn, choices)) if self.backward else self._function(dnn, choices)

    def _function(self, module: Any, choices: dict[str, Any]) -> Callable[..., Any]:
        op, first = getattr(module, self.of), self.of == "batch_norm"

        def forward(x: Any, s: Any, b: Any) -> Any:
            y = op(x, scale=s, bias=b, activation=self.activation, **dict(self.options), **choices)
            return y[0] if first else y

        return forward

    def _gradient(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda dy, x, s, b: jax.vjp(forward, x, s, b)[1](dy)

    def kinds(self) -> tuple[str, ...]:
        return ("normal", "far")

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        x = rng.normal(FAR[self.dtype] if kind == "far" else 0.5, 1, self.shape)
        parameters = [rng.normal(size=self.view.parameters) for _ in range(2)]
        arrays = [rng.normal(size=self.shape)] * self.backward + [x, *parameters]
        return tuple(v.astype(self.in_dtype) for v in arrays)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        x, s, b = operands[self.backward :]
        view = self.view
        p = norm_bounds.problem(view.shape, view.axes, view.summed, view.spread, x, s, b, eps=1e-5, centred=True)
        share = 1 + norm_bounds.definition_share(p.format)
        z, off = norm_bounds.forward(p)
        off = share * off
        if not self.backward:
            error = share * Epilogue(activation=self.activation, format=p.format).error(z, off)
            value = self._function(reference, {})(x, s, b)
            return (Expected(np.asarray(value, np.float64), error.reshape(x.shape), self.in_dtype, "y"),)
        dy = operands[0].astype(np.float64).reshape(view.shape)
        before = reference.activation_dgrad(dy, z, activation=self.activation)
        # Where y may be on either side of relu's kink, or is rounded onto it, either slope may be taken.
        kink = np.abs(z) <= off + float(np.finfo(np.float16).smallest_subnormal)
        curved = np.where(kink, 1.0, 0.0) if self.activation == "relu" else CURVATURE * off
        roundings = slope_error(self.activation, z, format=p.format) + 4 * p.roundoff
        if self.activation in OTHERS and self.in_dtype.itemsize == 2:  # the slope and its product are stored
            roundings = roundings + 2.5 * float(jnp.finfo(self.in_dtype).eps)
        moved = norm_bounds.moved(p, np.abs(dy) * (curved + roundings))
        found = []
        for name, (value, error), more in zip(
            ("dx", "dscale", "dbias"), norm_bounds.backward(p, before), moved, strict=True
        ):
            shape = x.shape if name == "dx" else s.shape
            found.append(Expected(value.reshape(shape), (share * (error + more)).reshape(shape), self.in_dtype, name))
        return tuple(found)

    def describe(self) -> dict[str, Any]:
        return {"op": self.of, "activation": self.activation, "shape": self.shape, **dict(self.options)}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[ActivatedCase]:
    """A shape for each normalisation; a large image beyond the quick extent, and an activation that is an op apart."""
    for dtype in ("f32", "bf16", "f16"):
        for of, options in NORMS.items():
            for activation in ACTIVATIONS:
                yield _case(op, engine, dtype, of, activation, "NHWC", options)
                if extent != "quick":
                    yield _case(op, engine, dtype, of, activation, LARGE, options)
            if extent != "quick":
                yield _case(op, engine, dtype, of, OTHERS[0], "NHWC", options)


def _case(
    op: str, engine: str, dtype: str, of: str, activation: str, size: str, options: tuple[tuple[str, Any], ...]
) -> ActivatedCase:
    return ActivatedCase(op, engine, dtype, f"{of}-{activation}-{size}", of, activation, SHAPES[size], options)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """Batch norm and group norm, by y or dx; batch statistics are of the whole batch."""
    for dtype in ("f32", "bf16"):
        for of in ("batch_norm", "group_norm"):
            whole = of == "batch_norm"  # by hopper a small batch would be one block's
            size = LARGE if whole and engine == "hopper" else "NHWC"
            case = _case(op, engine, dtype, of, ACTIVATIONS[-1], size, NORMS[of])
            axes = (None,) * 4 if whole else (0, 0, None, None)
            shared = axes if case.backward else axes[1:]
            yield subject(case, seed, batch_axes=shared, out_axis=None if whole else 0, variant=of)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> ActivatedCase:
    """Channels last, groups that divide the channels."""
    of = str(rng.choice(list(NORMS)))
    dtype, activation = drawn.pick(rng, drawn.FLOATS), str(rng.choice(ACTIVATIONS))
    groups = int(rng.choice([1, 2, 4, 8]))
    c = groups * -(-drawn.channels(rng, 512) // groups)
    sizes = drawn.axes(rng, 2, 2**19 / c, 128)
    n = drawn.batch(rng, 2**20 / (c * sizes[0] * sizes[1]))
    options = (("groups", groups),) if of == "group_norm" else ()
    return ActivatedCase(op, engine, dtype, name, of, activation, (n, *sizes, c), options)


def facets(case: ActivatedCase) -> set[Any]:
    """A dtype; in bfloat16 each activation of each normalisation."""
    return {case.dtype, (case.of, case.activation) if case.dtype == "bf16" else ""}


FAMILY = family(
    "norm_activated", ActivatedCase, OPS, cases, subjects, "batch norm, relu", (3, 9), facets=facets, draw=draw
)
