"""Several recurrent layers, one behind another: matrix, data and bounds, beside those of one layer.

The bound goes on from layer to layer: each reads numbers that carry the error of the one before it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Expected
from jaxdnn._src.cases.family import Family, up_to
from jaxdnn._src.core.tolerance import Accumulation
from jaxdnn._src.rnn import cases as single
from jaxdnn._src.rnn.cases import (
    BY_KERNELS,
    DTYPES,
    LOGISTIC,
    MARKS,
    SIZES,
    UNITS,
    Bounded,
    RnnCase,
    _block_diagonal,
    _bounds,
    _leaves,
)
from jaxdnn_reference.rnn import GATES, step


@dataclasses.dataclass(frozen=True)
class Kind:
    """Some layers.

    Attributes:
      arrays: what every layer has besides w and r; marks: lengths and resets.
      options: what is given by name; heads, skip: whether there are heads, and a first layer without w.
    """

    layers: int
    arrays: tuple[str, ...]
    marks: tuple[str, ...]
    options: dict[str, Any]
    heads: int | None = None
    skip: bool = False


DROPPED: dict[str, Any] = {"dropout": 0.25, "dropout_key": np.array([3, 5], np.uint32)}
BOTH: dict[str, Any] = {"direction": "bidirectional"}
KINDS: dict[str, dict[str, Kind]] = {
    "lstm": {
        "stack-dropped": Kind(2, ("bias", "h0", "c0"), ("lengths",), {**BOTH, **DROPPED}),
        "stack-projected": Kind(3, ("recurrent_bias", "projection"), MARKS, {"clip": (-0.5, 0.5), "fill": 2.0}, 2),
    },
    "gru": {
        "stack-skip": Kind(2, ("bias", "recurrent_bias"), ("resets",), {"direction": "reverse", **DROPPED}, 2, True),
        "stack-before": Kind(2, ("h0",), ("lengths",), {"reset_gate": "before", **BOTH}),
    },
    "rnn": {"stack-relu": Kind(3, ("bias",), ("lengths",), {"activation": "relu", **BOTH, **DROPPED}, None, True)},
}


@dataclasses.dataclass(frozen=True)
class StackCase(RnnCase):
    """Layers of one width."""

    units: int = 6

    @property
    def kind(self) -> Kind:
        return KINDS[self.op][self.variant.rpartition("/")[2]]

    @property
    def heads(self) -> int | None:
        return self.kind.heads

    @property
    def both(self) -> bool:
        return self.kind.options.get("direction") == "bidirectional"

    @property
    def cell(self) -> str:
        name, given = self.op, self.kind.options
        return f"gru_{given.get('reset_gate', 'after')}" if name == "gru" else given.get("activation", name)

    def layer(self, i: int) -> tuple[str, ...]:
        """The names of a layer's arrays."""
        return (*(() if self.kind.skip and not i else ("w",)), "r", *self.kind.arrays)

    @property
    def names(self) -> tuple[str, ...]:
        each = (f"{name}-{i}" for i in range(self.kind.layers) for name in self.layer(i))
        return ("x", *each, *self.kind.marks)

    def _layers(self, arrays: tuple[Any, ...]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """x and marks, and the arrays of each layer."""
        given = dict(zip(self.names, arrays, strict=True))
        each = [{name: given.pop(f"{name}-{i}") for name in self.layer(i)} for i in range(self.kind.layers)]
        return given, each

    def _called(self, op: Callable[..., Any], arrays: tuple[Any, ...], **choices: Any) -> Any:
        given, each = self._layers(arrays)
        lists = {name: [one.get(name) for one in each] for name in ("w", "r", *self.kind.arrays)}
        w, r = lists.pop("w"), lists.pop("r")
        return op(given.pop("x"), w, r, **lists, **given, **self.kind.options, **choices)

    def call(self, **choices: Any) -> Callable[..., Any]:
        op: Any = getattr(dnn, self.op)
        return lambda *arrays: self._called(op, arrays, **choices)

    def kinds(self) -> tuple[str, ...]:
        return ("normal",)

    @property
    def _columns(self) -> int:
        """Those of the state."""
        return self.columns if "projection" in self.kind.arrays else self.units

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        n, t, h, p, two = self.batch, self.steps, self.units, self._columns, (2,) if self.both else ()
        wide, k = h * GATES[self.cell], self.heads or 1
        heads = () if self.heads is None else (k,)
        shapes = {"r": (*heads, p // k, wide // k), "projection": (*heads, h // k, p // k)}
        shapes |= {"bias": (wide,), "recurrent_bias": (wide,), "h0": (n, p), "c0": (n, h)}
        scale = {"r": 1.5 * k / p, "projection": 1.5 * k / h, "w": 0.75}
        made = {"x": rng.normal(size=(n, t, h if self.kind.skip else self.inputs))}
        for i in range(self.kind.layers):
            read = self.inputs if not i else p * (1 + self.both)
            for name in self.layer(i):
                shape = (read, wide) if name == "w" else shapes[name]
                made[f"{name}-{i}"] = rng.normal(size=(*two, *shape)) * scale.get(name, 1)
        typed = {name: v.astype(self.in_dtype) for name, v in made.items()}
        typed["lengths"] = rng.integers(0, t + 1, n).astype(np.int32)
        typed["resets"] = rng.uniform(size=(n, t)) < 0.25
        return tuple(typed[name] for name in self.names)

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        golden = _leaves(self._called(getattr(reference, self.op), operands))
        given, each = self._layers(operands)
        k, exact = _bounds(
            self.in_dtype,
            accumulation,
            self.kind.options.get("clip", ()),
            *BY_KERNELS.get(self.engine, (LOGISTIC, 0.0)),
        )
        states: list[list[np.ndarray]] = []
        x = exact(given["x"].astype(np.float64))
        with np.errstate(all="ignore"):
            for i, v in enumerate(each):
                x = self._thinned(k, exact, i, x)
                x, final = self._layer(k, exact, given | v, x)
                states.append(final)
        errors = [x.unrounded, *(error for of_kind in zip(*states, strict=True) for error in of_kind)]
        named = ["y", *(f"{s}{i}" for s in "hc" for i in range(len(each)))]
        pairs = zip(golden, errors, named, strict=False)
        return tuple(Expected(v, np.nan_to_num(e), self.in_dtype, name) for v, e, name in pairs)

    def _thinned(self, k: Any, exact: Any, i: int, y: Bounded) -> Bounded:
        """y behind dropout."""
        rate = self.kind.options.get("dropout", 0.0)
        if not i or not rate:
            return y
        key, offset = self.kind.options["dropout_key"], (i - 1) * 2**48
        factor = reference.dropout(np.ones(y.value.shape), key, rate=rate, offset=offset)
        return k.narrow(y * exact(factor.astype(np.float64)))

    def _layer(self, k: Any, exact: Any, v: dict[str, np.ndarray], x: Bounded) -> tuple[Bounded, list[np.ndarray]]:
        """y, and the errors of the final states."""
        if not self.both:
            return self._direction(k, exact, v, x, self.kind.options.get("direction") == "reverse")
        of = lambda j: {name: a if name in ("x", *MARKS) else a[j] for name, a in v.items()}
        (y, one), (z, other) = (self._direction(k, exact, of(j), x, j == 1) for j in (0, 1))
        return k.join([y, z]), list(map(np.stack, zip(one, other, strict=True)))

    def _direction(
        self, k: Any, exact: Any, v: dict[str, np.ndarray], x: Bounded, reverse: bool
    ) -> tuple[Bounded, list[np.ndarray]]:
        n, steps = self.batch, self.steps
        short = {"bias": "b", "recurrent_bias": "d", "projection": "p", "w": "w", "r": "r"}
        weights = {short[name]: a.astype(np.float64) for name, a in v.items() if name in short}
        if self.heads is not None:
            gates = {"r": GATES[self.cell], "p": 1}
            weights |= {name: _block_diagonal(weights[name], g) for name, g in gates.items() if name in weights}
        names = ("h", "c") if self.cell == "lstm" else ("h",)
        sizes = (weights["r"].shape[0], self.units)
        given = [v.get(f"{s}0", np.zeros((n, size))) for s, size in zip(names, sizes, strict=False)]
        states = tuple(exact(s.astype(np.float64)) for s in given)
        live = np.arange(steps) < v.get("lengths", np.full(n, steps))[:, None]
        begun = v.get("resets", np.zeros((n, steps), bool)) & live
        begun = np.concatenate([begun[:, 1:], np.zeros((n, 1), bool)], 1) if reverse else begun
        each: list[Any] = [None] * steps
        for t in range(steps)[:: -1 if reverse else 1]:
            on, none = live[:, t, None], [exact(np.zeros(s.value.shape)) for s in states]
            states = tuple(a.where(begun[:, t, None], b) for a, b in zip(none, states, strict=True))
            read = x[:, t]
            read = read.where(on, exact(np.zeros(read.value.shape)))
            new = step(k, self.cell, weights, read, states, self.kind.options.get("clip"))
            each[t] = new[0].where(on, none[0])
            states = tuple(a.where(on, b) for a, b in zip(new, states, strict=True))
        over = lambda of: np.stack([of(s) for s in each], 1)
        y = Bounded(over(lambda s: s.value), over(lambda s: s.error), each[0].own, over(lambda s: s.unrounded))
        return y, [s.unrounded for s in states]

    def describe(self) -> dict[str, Any]:
        options = {name: str(value) for name, value in self.kind.options.items()}
        return {"steps": self.steps, "inputs": self.inputs, "units": self.units, "layers": self.kind.layers, **options}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[RnnCase]:
    """Those of one layer, and of several each kind in one dtype after the other; all in the full extent."""
    yield from single.cases(op, engine, extent, seed)
    for i, dtype in enumerate(up_to(extent, DTYPES)):
        kinds = list(KINDS.get(op, ()))
        for j, variant in enumerate(kinds):
            if extent == "full" or (i + j) % len(kinds) == 0:
                yield StackCase(op, engine, dtype, variant, **SIZES.get(engine, {}))


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> RnnCase:
    """Of four calls one has several layers, of any sizes."""
    if op not in KINDS or rng.integers(4):
        return single.draw(op, engine, rng, name)
    kernels = engine == "hopper"
    variants = [
        name for name, kind in KINDS[op].items() if not kernels or (kind.heads is None and "before" not in name)
    ]
    if not variants:
        return single.draw(op, engine, rng, name)
    variant = str(rng.choice(variants))
    heads = KINDS[op][variant].heads or 1
    sizes: dict[str, Any] = {
        "batch": drawn.between(rng, 1, 6),
        "steps": drawn.between(rng, 1, 12),
        "inputs": drawn.between(rng, 1, 60),
        "units": int(rng.choice(UNITS)) if kernels else heads * drawn.between(rng, 1, 40),
        "columns": heads * drawn.between(rng, 1, 20),
    }
    dtype = drawn.pick(rng, {"bf16": 1, "f16": 1} if kernels else drawn.WIDER)
    return StackCase(op, engine, dtype, f"{name}/{variant}", **sizes)


def samples(case: RnnCase) -> tuple[tuple[int | None, ...], int] | None:
    """Sequences, where nothing is dropped: what is depends on a sequence's place."""
    if not isinstance(case, StackCase):
        return single.samples(case)
    if case.batch == 1 or "dropout" in case.kind.options:
        return None
    axes = {"x": 0, **dict.fromkeys(MARKS, 0), **dict.fromkeys(("h0", "c0"), int(case.both))}
    return tuple(axes.get(name.partition("-")[0]) for name in case.names), 0


FAMILY: Family = dataclasses.replace(single.FAMILY, cases=cases, draw=draw, samples=samples)
