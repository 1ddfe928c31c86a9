"""Recurrent layers and cells: matrix, data and bounds.

The bound runs with the recurrence: the definition's step is computed on numbers that carry an error (`Bounded`), with
slopes of sigmoid and tanh at most what they are within it. A state's error so includes what all steps before did.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core.formats import FORMATS, Format, format_of
from jaxdnn._src.core.tolerance import Accumulation, products_are_exact
from jaxdnn_reference.rnn import GATES, Arithmetic, step

OPS = ("lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell")
# Of each: the arrays behind x, w and r, and what else is given.
LAYERS: dict[str, dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "lstm": {
        "plain": (("bias",), {}),
        "lengths": (("bias", "recurrent_bias", "h0", "c0", "lengths"), {"direction": "reverse", "fill": -1.5}),
        "projected": (("recurrent_bias", "projection", "lengths"), {"clip": (-0.25, 0.375)}),
        "resets": (("bias", "h0", "lengths", "resets"), {}),
    },
    "gru": {
        "after": (("bias", "recurrent_bias", "h0", "lengths"), {}),
        "before": (("bias", "recurrent_bias"), {"reset_gate": "before", "direction": "reverse"}),
        "both": (("recurrent_bias", "h0", "lengths"), {"direction": "bidirectional"}),
        "heads": (("recurrent_bias", "h0", "resets"), {"direction": "reverse"}),
    },
    "rnn": {
        "tanh": (("bias", "h0", "lengths"), {}),
        "relu": (("recurrent_bias", "lengths"), {"activation": "relu", "direction": "reverse"}),
    },
    "lstm_cell": {
        "plain": (("bias", "recurrent_bias"), {}),
        "projected": (("projection",), {"clip": (-0.25, 0.375)}),
    },
    "gru_cell": {"after": (("recurrent_bias",), {}), "before": (("bias",), {"reset_gate": "before"})},
    "rnn_cell": {"tanh": (("bias",), {}), "relu": ((), {"activation": "relu"})},
}
MARKS = ("lengths", "resets")
BATCHED = ("x", "h0", "c0", "h", "c", *MARKS)
DTYPES = {"quick": ("f32", "bf16"), "standard": ("f16",), "full": ("f64",)}
LOGISTIC, TANH = 5.0, 10.0  # roundings, as for activations; and the least exponential of a sigmoid
# The kernels' exponential has an exponent with two more roundings, and is off by 2^-22 itself; see `curves_ptx`.
BY_KERNELS = {"hopper": (7.0, 2.0)}  # roundings of a sigmoid, and of what it and tanh are of
LEAST = {"float32": 2.0**-99, "float64": 2.0**-990}
CURVED, CURVED_TANH = 0.0963, 0.77  # at least the largest second derivatives


@dataclasses.dataclass(frozen=True)
class RnnCase(Case):
    """Sequences of up to some steps.

    saves: whether the call returns what its gradients need, which is not compared.
    """

    batch: int = 8
    steps: int = 6
    inputs: int = 3
    units: int = 5
    columns: int = 4  # of a projection
    saves: bool = False

    primitive = dict.fromkeys(OPS, "rnn")

    @property
    def bound(self) -> str:
        return "rnn_saved" if self.saves else super().bound

    @property
    def _kind(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        return LAYERS[self.op][self.variant.rpartition("/")[2]]

    @property
    def both(self) -> bool:
        return self._kind[1].get("direction") == "bidirectional"

    @property
    def heads(self) -> int | None:
        """How many the recurrent matrix has, if it has any."""
        return None if not self.variant.endswith("heads") else 5 if self.units % 5 == 0 else 1

    @property
    def cell(self) -> str:
        """The definition's name of what a step computes."""
        given = self._kind[1]
        name = self.op.removesuffix("_cell")
        if name == "gru":
            return f"gru_{given.get('reset_gate', 'after')}"
        return name if name == "lstm" else given.get("activation", "tanh")

    @property
    def positional(self) -> tuple[str, ...]:
        states = {"lstm_cell": ("h", "c"), "gru_cell": ("h",), "rnn_cell": ("h",)}
        return ("x", "w", "r", *states.get(self.op, ()))

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the arrays."""
        return (*self.positional, *self._kind[0])

    def _called(self, op: Callable[..., Any], arrays: tuple[Any, ...], **choices: Any) -> Any:
        count = len(self.positional)
        named = dict(zip(self.names[count:], arrays[count:], strict=True))
        return op(*arrays[:count], **named, **self._kind[1], **choices)

    def call(self, **choices: Any) -> Callable[..., Any]:
        op: Any = getattr(dnn, self.op)
        if self.saves:
            return lambda *arrays: self._called(op, arrays, return_saved=True, **choices)[:-1]
        return lambda *arrays: self._called(op, arrays, **choices)

    def kinds(self) -> tuple[str, ...]:
        return ("normal", "special")

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """Recurrent weights are small enough for errors not to grow without end."""
        n, h = self.batch, self.units
        p, wide = (self.columns if "projection" in self.names else h), h * GATES[self.cell]
        shapes = {"w": (self.inputs, wide), "r": (p, wide), "bias": (wide,), "recurrent_bias": (wide,)}
        shapes |= {"x": (n, self.inputs) if self.op.endswith("_cell") else (n, self.steps, self.inputs)}
        shapes |= {"projection": (h, p), "h0": (n, p), "h": (n, p), "c0": (n, h), "c": (n, h)}
        if self.heads is not None:
            shapes["r"] = (self.heads, p // self.heads, wide // self.heads)
        if self.both:
            shapes |= {name: (2, *shape) for name, shape in shapes.items() if name != "x"}
        scale = {"r": 1.5 / max(p, 1), "projection": 1.5 / max(h, 1)}
        lengths = rng.integers(0, self.steps + 1, n).astype(np.int32)
        made = {name: rng.normal(size=shapes[name]) * scale.get(name, 1) for name in self.names if name not in MARKS}
        x = made["x"]
        if kind == "special":
            x[0, ..., -1:] = np.nan  # of one sequence, which no other shows
            if "lengths" in self.names:
                x[np.arange(self.steps) >= lengths[:, None]] = np.inf  # is not read
        typed = {name: v.astype(self.in_dtype) for name, v in made.items()} | {"lengths": lengths}
        typed["resets"] = rng.uniform(size=(n, self.steps)) < 0.25
        return tuple(typed[name] for name in self.names)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        op: Any = getattr(reference, self.op)
        golden = _leaves(self._called(op, operands))
        given = dict(zip(self.names, operands, strict=True))
        with np.errstate(all="ignore"):
            if self.both:
                halves = ({k: v if k in ("x", "lengths") else v[i] for k, v in given.items()} for i in (0, 1))
                (y, *states), (z, *others) = (self._errors(v, accumulation, i == 1) for i, v in enumerate(halves))
                errors = np.concatenate([y, z], -1), *map(np.stack, zip(states, others, strict=True))
            else:
                errors = self._errors(given, accumulation, self._kind[1].get("direction") == "reverse")
        errors = errors[1:] if self.op.endswith("_cell") else errors
        names = ("h", "c") if self.op.endswith("_cell") else ("y", "h", "c")
        return tuple(
            Expected(np.asarray(v, np.float64), np.nan_to_num(e), self.in_dtype, name)
            for v, e, name in zip(golden, errors, names, strict=False)
        )

    def _errors(self, v: dict[str, np.ndarray], accumulation: Accumulation, reverse: bool) -> tuple[np.ndarray, ...]:
        """Of y, and of the final states, in one direction."""
        x = v["x"].astype(np.float64)
        x = x[:, None] if self.op.endswith("_cell") else x
        n, steps, _ = x.shape
        curves = BY_KERNELS.get(self.engine, (LOGISTIC, 0.0))
        k, exact = _bounds(self.in_dtype, accumulation, self._kind[1].get("clip", ()), *curves)
        short = {"bias": "b", "recurrent_bias": "d", "projection": "p"}
        weights = {short.get(name, name): v[name].astype(np.float64) for name in self.names if name not in BATCHED}
        if self.heads is not None:
            weights["r"] = _block_diagonal(weights["r"], GATES[self.cell])
        given = [next((v[name] for name in (s, f"{s}0") if name in v), None) for s in ("h", "c")]
        sizes = (weights["r"].shape[0], self.units)[: 2 if self.cell == "lstm" else 1]
        states: tuple[Bounded, ...] = tuple(
            exact(np.zeros((n, size)) if s is None else s.astype(np.float64))
            for s, size in zip(given, sizes, strict=False)
        )
        live = np.arange(steps) < v.get("lengths", np.full(n, steps))[:, None]
        begun = v.get("resets", np.zeros((n, steps), bool)) & live
        begun = np.concatenate([begun[:, 1:], np.zeros((n, 1), bool)], 1) if reverse else begun
        y = np.zeros((n, steps, sizes[0]))
        for t in range(steps)[:: -1 if reverse else 1]:
            states = tuple(exact(np.zeros(s.value.shape)).where(begun[:, t, None], s) for s in states)
            new = step(k, self.cell, weights, np.where(live[:, t, None], x[:, t], 0), states, self._kind[1].get("clip"))
            y[:, t] = np.where(live[:, t, None], new[0].unrounded, 0)
            states = tuple(a.where(live[:, t, None], b) for a, b in zip(new, states, strict=True))
        return y, *(s.unrounded for s in states)

    def definition(self, operands: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
        return _leaves(self._called(getattr(reference, self.op), operands, arithmetic="ordered"))

    def describe(self) -> dict[str, Any]:
        return {"steps": self.steps, "inputs": self.inputs, "units": self.units, **self._kind[1]}


def _block_diagonal(r: np.ndarray, gates: int) -> np.ndarray:
    """The matrix of heads, (K, H/K, G H/K), as one."""
    heads, rows, wide = r.shape
    found = np.zeros((heads, rows, gates, heads, wide // gates))
    for j in range(heads):
        found[j, :, :, j] = r[j].reshape(rows, gates, -1)
    return found.reshape(heads * rows, heads * wide)


def _leaves(found: Any) -> tuple[np.ndarray, ...]:
    return tuple(leaf for v in found for leaf in _leaves(v)) if isinstance(found, tuple) else (found,)


@dataclasses.dataclass(frozen=True)
class Bounded:
    """Numbers and how far what an engine has may be from them; `unrounded` is without a last rounding of `narrow`."""

    value: Any
    error: Any
    own: Format
    unrounded: Any = None

    def _of(self, value: Any, error: Any) -> "Bounded":
        """A result, with its own rounding."""
        error = error + self.own.roundoff * (np.abs(value) + error) + self.own.smallest_normal
        return Bounded(value, error, self.own, error)

    def __add__(self, other: Any) -> "Bounded":
        if isinstance(other, Bounded):
            return self._of(self.value + other.value, self.error + other.error)
        return self._of(self.value + other, self.error + self.own.roundoff * np.abs(other))  # a sum of two biases

    def __rsub__(self, other: Any) -> "Bounded":
        return self._of(other - self.value, self.error)

    def __sub__(self, other: "Bounded") -> "Bounded":
        return self._of(self.value - other.value, self.error + other.error)

    def __gt__(self, other: float) -> "Bounded":
        """1 where it is and 0 elsewhere, of exact numbers."""
        return Bounded((self.value > other) * 1.0, self.error, self.own, self.error)

    def __mul__(self, other: "Bounded") -> "Bounded":
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error + self.error * other.error
        return self._of(self.value * other.value, error)

    def __getitem__(self, at: Any) -> "Bounded":
        return Bounded(self.value[at], self.error[at], self.own, self.unrounded[at])

    def where(self, keep: np.ndarray, other: "Bounded") -> "Bounded":
        pairs = ((self.value, other.value), (self.error, other.error), (self.unrounded, other.unrounded))
        value, error, unrounded = (np.where(keep, a, b) for a, b in pairs)
        return Bounded(value, error, self.own, unrounded)


def _bounds(
    dtype: np.dtype, accumulation: Accumulation, limits: tuple[float, ...], of_sigmoid: float, of_argument: float
) -> tuple[Arithmetic, Any]:
    """The definition's arithmetic on numbers with errors, and what makes one of exact numbers.

    of_sigmoid, of_argument: the roundings of a sigmoid, and those of the argument of a sigmoid and of tanh.
    """
    own, to = FORMATS[accumulation.format], format_of(dtype)
    u, least = own.roundoff, LEAST[accumulation.format]
    short = products_are_exact(dtype, dtype, format=accumulation.format)
    exact = lambda v: Bounded(v, np.zeros(v.shape), own, np.zeros(v.shape))

    def dot(x: Any, w: np.ndarray) -> Bounded:
        x = x if isinstance(x, Bounded) else exact(x)
        value, size, off = x.value @ w, (np.abs(x.value) + x.error) @ np.abs(w), x.error @ np.abs(w)
        added = accumulation.error(np.abs(value) + off, size, w.shape[0], exact_products=short)
        error = off + added + own.smallest_normal
        return Bounded(value, error, own, error)

    def curve(value: Callable[[Any], Any], slope: Callable[[Any], Any], curved: float, rate: float) -> Any:
        def of(z: Bounded) -> Bounded:
            s = value(z.value)
            off = z.error + of_argument * u * (np.abs(z.value) + z.error)
            steepest = np.minimum(slope(s) + curved * off, slope(value(np.zeros(()))))
            error = np.minimum(steepest * off, 2) + rate * u * np.abs(s) + least
            return Bounded(s, error, own, error)

        return of

    def clip(c: Bounded, low: float, high: float) -> Bounded:
        error = c.error + u * max(map(abs, limits))
        return Bounded(np.clip(c.value, low, high), error, own, error)

    def narrow(x: Bounded) -> Bounded:
        if dtype.itemsize > 2:
            return x
        return Bounded(
            x.value, x.error + to.roundoff * (np.abs(x.value) + x.error) + to.smallest_subnormal, own, x.error
        )

    logistic = curve(lambda z: 1 / (1 + np.exp(-z)), lambda s: s * (1 - s), CURVED, of_sigmoid)
    tanh = curve(np.tanh, lambda t: 1 - t * t, CURVED_TANH, TANH)
    relu = lambda z: Bounded(np.maximum(z.value, 0), z.error, own, z.error)

    def join(parts: Sequence[Bounded]) -> Bounded:
        each = zip(*((x.value, x.error, x.error if x.unrounded is None else x.unrounded) for x in parts), strict=True)
        value, error, unrounded = (np.concatenate(v, -1) for v in each)
        return Bounded(value, error, own, unrounded)

    def within(c: Bounded, d: Bounded, low: float, high: float) -> Bounded:
        cut = (c.value < low) | (c.value > high)
        value = np.where(cut, 0, d.value)
        unsure = np.minimum(np.abs(c.value - low), np.abs(c.value - high)) <= c.error
        error = np.where(unsure, np.abs(d.value) + d.error, np.where(cut, 0, d.error))
        return Bounded(value, error, own, error)

    return Arithmetic(dot, logistic, tanh, relu, clip, narrow, join, within), exact


# Sizes that kernels serve, of fewer sequences than a cluster runs, and of a matrix that four blocks share.
SIZES: dict[str, dict[str, Any]] = {"hopper": {"batch": 6, "inputs": 24, "units": 256}}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[RnnCase]:
    """Every variant in every dtype of the extent."""
    for dtype in up_to(extent, DTYPES):
        for variant in LAYERS[op]:
            yield RnnCase(op, engine, dtype, variant, **SIZES.get(engine, {}))


def _axes(case: RnnCase) -> tuple[int | None, ...]:
    states = 1 if case.both else 0
    return tuple(None if name not in BATCHED else states if name in ("h0", "c0") else 0 for name in case.names)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """A layer of each kind; cells are layers of one step."""
    for dtype, variant in zip(
        ("f32", "bf16", "f16"), list(LAYERS[op])[: 1 if op.endswith("_cell") else 3], strict=False
    ):
        case = RnnCase(op, engine, dtype, variant, **SIZES.get(engine, {}))
        found = subject(case, seed, batch_axes=_axes(case), out_axis=0)
        if found is not None:
            yield dataclasses.replace(found, variant=variant)


UNITS = (32, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024)  # that clusters of two to sixteen blocks share


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> RnnCase:
    """Every variant at any sizes; for kernels those of the numbers of units that they serve, and more sequences."""
    kernels = engine == "hopper"
    sizes = {
        "batch": drawn.between(rng, 1, 300 if kernels else 8),
        "steps": drawn.between(rng, 1, 8 if kernels else 30),
        "inputs": drawn.between(rng, 1, 100),
        "units": int(rng.choice(UNITS)) if kernels else drawn.between(rng, 1, 100),
        "columns": drawn.between(rng, 1, 50),
    }
    variants = [v for v in LAYERS[op] if not kernels or not v.startswith(("projected", "before", "heads"))]
    dtype = drawn.pick(rng, {"bf16": 1, "f16": 1} if kernels else drawn.WIDER)
    saves = kernels and not op.endswith("_cell") and bool(rng.random() < 0.4)
    return RnnCase(op, engine, dtype, f"{name}/{rng.choice(variants)}", **sizes, saves=saves)


def samples(case: RnnCase) -> tuple[tuple[int | None, ...], int] | None:
    """Sequences."""
    return None if case.batch == 1 else (_axes(case), 0)


FAMILY = family("rnn", RnnCase, OPS, cases, subjects, "a small call", (1, 1), draw=draw, samples=samples)
