"""Bias, activation, dropout and residual in one op: the bound and the definition's bits, forward and backward."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.activation import bounds
from jaxdnn._src.activation.bounds import Epilogue
from jaxdnn._src.activation.formulas import PIECEWISE
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import DTYPES, Case, Expected
from jaxdnn._src.cases.family import family
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core.tolerance import FORMATS, Accumulation
from jaxdnn_reference.dropout import dropout_dgrad
from jaxdnn_reference.rounding import round_to

OPS = ("fused_dropout", "fused_dropout_tangent", "fused_dropout_dgrad")
SHAPE = (16, 5, 264)
CURVATURE = 1.0  # at least |act''| of the activations here
MANY = 2**22 + 2**20  # elements, more than blocks that stay have at a time
FULL = ("gelu_tanh", "swish", "tanh", "clipped_relu", ("leaky_relu", 0.3), ("relu", -1.0, 2.0, 0.25))


@dataclasses.dataclass(frozen=True)
class FusedCase(Case):
    """One call. Backward, `fused_dropout_tangent` is the gradient in x alone, `fused_dropout_dgrad` that in a bias too.

    The operands are x and a key, between them the bias and the residual; backward dy comes first.
    """

    primitive: ClassVar[dict[str, str]] = {op: op.removeprefix("fused_") for op in OPS}

    activation: Any = None
    rate: float = 0.1
    bias: str | None = None  # its dtype
    residual: str | None = None
    out: str | None = None
    shape: tuple[int, ...] = SHAPE

    @property
    def backward(self) -> bool:
        return self.op != "fused_dropout"

    @property
    def looked_up(self) -> bool:
        """Whether the activation is, of x + bias in the type of x."""
        kind = self.activation[0] if isinstance(self.activation, tuple) else self.activation or "identity"
        bounded = isinstance(self.activation, tuple) and len(self.activation) == 4
        return self.dtype in ("bf16", "f16") and (bounded or kind not in PIECEWISE)

    def call(self, **choices: Any) -> Callable[..., Any]:
        def forward(x: Any, *rest: Any) -> Any:
            *others, key = rest
            given = dict(zip(self._names(), others, strict=True))
            options: dict[str, Any] = {"rate": self.rate, "activation": self.activation, **choices}
            return dnn.dropout(x, key, out_dtype=self._out_dtype(), **given, **options)

        def gradient(dy: Any, x: Any, *rest: Any) -> Any:
            *others, key = rest
            if self.op == "fused_dropout_tangent":
                return jax.vjp(lambda x: forward(x, *others, key), x)[1](dy)[0]
            return jax.vjp(lambda x, b: forward(x, b, *others[1:], key), x, others[0])[1](dy)

        return gradient if self.backward else forward

    def _names(self) -> list[str]:
        return ["bias"] * (self.bias is not None) + ["residual"] * (self.residual is not None)

    def _out_dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.out or self.dtype])

    def kinds(self) -> tuple[str, ...]:
        return ("normal", "magnitudes", "special")

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        def draw(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            v = rng.normal(size=shape)
            if kind == "magnitudes":
                v = np.clip(v * np.exp2(rng.integers(-12, 3, shape)), -4, 4)  # beyond, slopes vanish
            if kind == "special":
                v.reshape(-1)[::31], v.reshape(-1)[1::37] = np.nan, -np.inf
            return v.astype(dtype)

        arrays = [draw(self.shape, self._out_dtype())] if self.backward else []
        arrays.append(draw(self.shape, self.in_dtype))
        if self.bias is not None:
            arrays.append(draw(self.shape[-1:], DTYPES[self.bias]))
        if self.residual is not None:
            arrays.append(draw(self.shape, DTYPES[self.residual]))
        return (*arrays, rng.integers(0, 2**32, 2, dtype=np.uint32))

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        with np.errstate(all="ignore"):
            return self._backward(operands) if self.backward else self._forward(operands)

    def _split(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
        x, *others, key = operands
        return x, dict(zip(self._names(), others, strict=True)), key

    def _format(self) -> Any:
        return FORMATS["float64" if self.dtype == "f64" else "float32"]

    def _argument(self, x: np.ndarray, given: dict[str, np.ndarray]) -> tuple[np.ndarray, Any]:
        """x + bias, and its error: the sum's rounding. Where it is rounded to the type of x, that is what it is."""
        z, u = x.astype(np.float64), self._format().roundoff
        if "bias" not in given:
            return z, 0.0
        if self.looked_up:
            total = x.astype(np.float32) + given["bias"].astype(np.float32)
            return round_to(total, x.dtype).astype(np.float64), 0.0
        z = z + given["bias"].astype(np.float64)
        return z, np.where(np.isfinite(z), u * np.abs(z), 0.0)

    def _forward(self, operands: tuple[np.ndarray, ...]) -> tuple[Expected, ...]:
        """The roundings of the argument, the activation, the scale, its product and the sum."""
        x, given, key = self._split(operands)
        z, error = self._argument(x, given)
        rule, residual = self._format(), given.get("residual")
        u, scale = rule.roundoff, 1 / (1 - self.rate)
        own = Epilogue(activation=self.activation, format=rule.name).error(z, np.broadcast_to(error, z.shape))
        kept = np.where(reference.dropout_mask(key, x.shape, rate=self.rate), scale, 0.0)
        v = reference.dropout(z, key, rate=self.rate, activation=self.activation)
        value = v if residual is None else v + residual.astype(np.float64)
        error = 1.01 * (kept * own + 2 * u * np.abs(v) + (0 if residual is None else u * np.abs(value)))
        error = np.where(np.isfinite(value) & np.isfinite(error), error, 0.0) + 4 * rule.smallest_normal
        return (Expected(value, error, self._out_dtype(), generic=self.dtype in ("f32", "f64")),)

    def _backward(self, operands: tuple[np.ndarray, ...]) -> tuple[Expected, ...]:
        """The roundings of the slope, the scale and two products; for a bias also those of a sum in any order."""
        dy, *rest = operands
        x, given, key = self._split(tuple(rest))
        z, off = self._argument(x, given)
        rule = self._format()
        u, scale = rule.roundoff, 1 / (1 - self.rate)
        slope: Any = 0.0  # without an activation x is not read
        if self.activation is not None:
            slope = bounds.slope_error(self.activation, z, format=rule.name) + CURVATURE * off
        value, _ = dropout_dgrad(dy, z, key, rate=self.rate, activation=self.activation)
        kept = np.where(reference.dropout_mask(key, x.shape, rate=self.rate), scale, 0.0)
        error = 1.01 * (kept * np.abs(dy.astype(np.float64)) * slope + 3 * u * np.abs(value)) + 4 * rule.smallest_normal
        error = np.where(np.isfinite(value) & np.isfinite(error), error, 0.0)
        found = Expected(value, error, self.in_dtype, "dx", generic=self.dtype in ("f32", "f64"))
        if self.op == "fused_dropout_tangent":
            return (found,)
        axes, count = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
        total = value.sum(axes)
        added = count * u / (1 - count * u) * (np.abs(value) + error).sum(axes) + error.sum(axes)
        return found, Expected(total, np.where(np.isfinite(total), added, 0.0), given["bias"].dtype, "dbias")

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        options: dict[str, Any] = {"rate": self.rate, "activation": self.activation, "arithmetic": "ordered"}
        if self.backward:
            dy, *rest = operands
            x, given, key = self._split(tuple(rest))
            return (dropout_dgrad(dy, x, key, bias=given.get("bias"), **options)[0],)
        x, given, key = self._split(operands)
        return (reference.dropout(x, key, out_dtype=self._out_dtype(), **given, **options),)

    def describe(self) -> dict[str, Any]:
        return {"activation": str(self.activation), "rate": self.rate, "bias": self.bias, "residual": self.residual}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[FusedCase]:
    """What a transformer has, in every type; of the quick extent's cases one of 16 bits that mixes types."""
    for dtype in ("f32", "bf16", "f16") if extent == "quick" else ("f32", "bf16", "f16", "f64"):
        residual = None if op != "fused_dropout" else dtype
        yield _case(op, engine, dtype, "gelu", bias=dtype, residual=residual)
        yield _case(op, engine, dtype, None, bias=dtype, residual=residual)
        yield _case(op, engine, dtype, "relu", bias=dtype)
        if extent == "quick":
            continue
        yield _case(op, engine, dtype, "gelu", rate=0.0, bias=dtype, residual=residual)
        for activation in FULL:
            yield _case(op, engine, dtype, activation, rate=0.3, bias=dtype)
    yield _case(op, engine, "bf16", "gelu", bias="f32", residual="f32" if op == "fused_dropout" else None, out="f32")


def _case(op: str, engine: str, dtype: str, activation: Any, **options: Any) -> FusedCase:
    words = activation if isinstance(activation, str) else "-".join(map(str, activation or ("identity",)))
    mixed = options.get("bias") != dtype
    rate = options.get("rate", 0.1)
    variant = "-".join([words, f"rate{rate}", *["residual"] * bool(options.get("residual")), *["mixed"] * mixed])
    return FusedCase(op, engine, dtype, variant, activation, **options)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """Samples share a mask, by vmap, as in `dropout`'s; but a gradient in the bias is a sum over the batch."""
    for dtype in ("f32", "bf16", "f16"):
        options: dict[str, Any] = {"bias": dtype, "residual": dtype if op == "fused_dropout" else None}
        whole = op == "fused_dropout_dgrad"
        case = (FusedCase if whole else BySample)(op, engine, dtype, "by-sample", "gelu", **options)
        axes = (0, 0, None, None) if case.backward else (0, None, 0, None)
        yield subject(case, seed, batch_axes=axes, out_axis=None if whole else 0, result=1 if whole else 0)


@dataclasses.dataclass(frozen=True)
class BySample(FusedCase):
    """The same mask for every sample, which is what has to be independent of the batch."""

    def _axes(self) -> tuple[int | None, ...]:
        return (0, 0, None, None) if self.backward else (0, None, 0, None)

    def call(self, **choices: Any) -> Callable[..., Any]:
        return jax.vmap(super().call(**choices), self._axes())

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        define, found = super().definition, []
        for i in range(SHAPE[0]):
            given = [v if axis is None else v[i] for v, axis in zip(operands, self._axes(), strict=True)]
            found += define(tuple(given)) or ()
        return (np.stack(found),)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> FusedCase:
    """Every activation, with and without bias and residual, of the same or of wider types; seldom large arrays."""
    dtype = drawn.pick(rng, drawn.FLOATS if engine == "hopper" else drawn.WIDER)
    wide = dtype if dtype == "f64" or rng.random() < 0.8 else "f32"
    bias = wide if op == "fused_dropout_dgrad" or rng.random() < 0.7 else None
    residual = wide if op == "fused_dropout" and rng.random() < 0.6 else None
    activation = drawn.pick(rng, dict.fromkeys((None, "gelu", "relu", *FULL), 1))
    if bias is None and residual is None and activation is None:
        activation = "gelu"
    rate = drawn.pick(rng, {0.0: 1, 0.1: 4, 0.5: 4, round(float(rng.random()), 3): 2})
    c = -(-drawn.channels(rng, 1280) // 8) * 8
    shape = (*drawn.axes(rng, int(rng.integers(1, 3)), 2**19 / c, 4000), c)
    if rng.random() < 0.04:
        shape = (-(-MANY // c), c)
    return FusedCase(op, engine, dtype, name, activation, rate, bias, residual, wide if wide != dtype else None, shape)


def facets(case: FusedCase) -> set[Any]:
    """A dtype, of x and of a bias; whether there is a residual; of kernels every activation."""
    activation = case.activation if case.engine == "hopper" else ""
    return {case.dtype, ("bias", case.bias), ("residual", case.residual is None), activation}


FAMILY = family(
    "dropout_fused",
    FusedCase,
    OPS,
    cases,
    subjects,
    "gelu, rate 0.1",
    (3, 9),
    facets=facets,
    draw=draw,
)
