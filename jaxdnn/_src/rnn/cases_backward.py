"""The backward passes of recurrent layers: matrix, data and bounds.

Each is judged by itself: what a forward pass saved is data, and of the weights' gradients e too. The bound of gradients
in data runs back with the steps, as that of the forward pass runs with them.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.cases import drawn
from jaxdnn._src.cases.case import Case, Expected
from jaxdnn._src.cases.family import family, up_to
from jaxdnn._src.cases.subject import Subject, subject
from jaxdnn._src.core.formats import format_of
from jaxdnn._src.core.tolerance import Accumulation, products_are_exact
from jaxdnn._src.rnn.cases import BY_KERNELS, DTYPES, LOGISTIC, SIZES, UNITS, _bounds, _leaves
from jaxdnn_reference.rnn import GATES
from jaxdnn_reference.rnn_backward import step

# Of each cell: what is given by name, and how. Every op takes dy, x, w, r, dh and what is saved.
KINDS: dict[str, dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "lstm": {
        "plain": (("dc", "bias"), {}),
        "lengths": (
            ("dc", "recurrent_bias", "h0", "c0", "lengths", "resets"),
            {"direction": "reverse", "clip": (-0.25, 0.375)},
        ),
        "projected": (("projection", "lengths"), {}),
    },
    "gru": {
        "after": (("bias", "recurrent_bias", "h0", "lengths"), {}),
        "before": (("recurrent_bias", "resets"), {"reset_gate": "before", "direction": "reverse"}),
    },
    "rnn": {
        "tanh": (("bias", "h0", "lengths"), {"direction": "reverse"}),
        "relu": (("resets",), {"activation": "relu"}),
    },
}
OPS = tuple(f"{cell}_{what}" for cell in KINDS for what in ("dgrad", "wgrad"))
BATCHED = {**dict.fromkeys(("dy", "x", "dh", "dc", "h0", "c0", "lengths", "resets"), 0), "saved": 1}
WEIGHTS = {"w": "w", "r": "r", "bias": "b", "recurrent_bias": "d", "projection": "p"}


@dataclasses.dataclass(frozen=True)
class BackwardCase(Case):
    """Sequences of up to some steps."""

    batch: int = 8
    steps: int = 6
    inputs: int = 3
    units: int = 5
    columns: int = 4  # of a projection

    primitive = {op: "rnn_backward" if op.endswith("dgrad") else "rnn_product_w" for op in OPS}  # noqa: RUF012

    @property
    def _kind(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        return KINDS[self.op.partition("_")[0]][self.variant.rpartition("/")[2]]

    @property
    def cell(self) -> str:
        """The definition's name of what a step computes."""
        name, given = self.op.partition("_")[0], self._kind[1]
        if name == "gru":
            return f"gru_{given.get('reset_gate', 'after')}"
        return name if name == "lstm" else given.get("activation", "tanh")

    @property
    def options(self) -> dict[str, Any]:
        return self._kind[1]

    @property
    def reverse(self) -> bool:
        return self.options.get("direction") == "reverse"

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the arrays in front of what is saved."""
        return ("dy", "x", "w", "r", "dh", *self._kind[0])

    @property
    def saved(self) -> tuple[str, ...]:
        cells = ("cells",) if self.cell == "lstm" else ()
        u = ("u",) if "projection" in self.names or self.cell == "gru_before" else ()
        return ("h", "gates", *cells, *u, *(("e",) if self.op.endswith("wgrad") else ()))

    def _called(self, op: Callable[..., Any], arrays: tuple[Any, ...], **choices: Any) -> Any:
        count = len(self.names)
        named = dict(zip(self.names[4:], arrays[4:count], strict=True))
        return op(*arrays[:4], **named, saved=tuple(arrays[count:]), **self.options, **choices)

    def call(self, **choices: Any) -> Callable[..., Any]:
        op: Any = getattr(dnn, self.op)
        return lambda *arrays: self._called(op, arrays, **choices)

    def operands(self, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        """What is saved is the definition's, rounded."""
        n, t, h = self.batch, self.steps, self.units
        p, wide = (self.columns if "projection" in self.names else h), h * GATES[self.cell]
        shapes = {"w": (self.inputs, wide), "r": (p, wide), "bias": (wide,), "recurrent_bias": (wide,)}
        shapes |= {"x": (n, t, self.inputs), "dy": (n, t, p), "projection": (h, p)}
        shapes |= {"h0": (n, p), "dh": (n, p), "c0": (n, h), "dc": (n, h)}
        scale = {"r": 1.5 / max(p, 1), "projection": 1.5 / max(h, 1)}
        drawn = [name for name in self.names if name in shapes]
        v = {name: (rng.normal(size=shapes[name]) * scale.get(name, 1)).astype(self.in_dtype) for name in drawn}
        v["lengths"] = rng.integers(0, t + 1, n).astype(np.int32)
        v["resets"] = rng.uniform(size=(n, t)) < 0.25
        given = {name: v[name] for name in self.names}
        name = self.op.partition("_")[0]
        rest = {k: a for k, a in given.items() if k not in ("dy", "x", "w", "r", "dh", "dc")}
        kept: Any = getattr(reference, name)(v["x"], v["w"], v["r"], **rest, **self.options, return_saved=True)[-1]
        if "e" in self.saved:
            dgrad: Any = getattr(reference, f"{name}_dgrad")
            ends = {k: given[k] for k in ("dh", "dc") if k in given}
            arrays = (v[k] for k in ("dy", "x", "w", "r"))
            kept = dgrad(*arrays, **rest, **ends, saved=kept, **self.options, return_saved=True)[-1]
        wide_type = np.float64 if self.x64 else np.float32
        kinds = {"h": self.in_dtype, "u": self.in_dtype}
        kept = [a.astype(kinds.get(k, wide_type)) for k, a in zip(self.saved, kept, strict=True)]
        return *given.values(), *kept

    def expected(self, kind: str, operands: tuple[np.ndarray, ...], accumulation: Accumulation) -> tuple[Expected, ...]:
        values = _leaves(self._called(getattr(reference, self.op), operands))
        v = dict(zip((*self.names, *self.saved), operands, strict=True))
        own = self._of_data if self.op.endswith("dgrad") else self._of_weights
        errors = own(v, accumulation)
        # The definition computes in float64 too: of that, twice the error.
        factor = 2.0 if self.x64 else 1.0
        pairs = zip(values, errors.items(), strict=True)
        return tuple(Expected(value, factor * error, self.in_dtype, name) for value, (name, error) in pairs)

    def _marks(self, v: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Which steps there are, (N, T), and before which a sequence begins anew."""
        n, t = self.batch, self.steps
        live = np.arange(t) < v.get("lengths", np.full(n, t))[:, None]
        begun = v.get("resets", np.zeros((n, t), bool)) & live
        return live, np.concatenate([begun[:, 1:], np.zeros((n, 1), bool)], 1) if self.reverse else begun

    def _before(self, v: dict[str, np.ndarray], t: int, begun: np.ndarray, of: str) -> np.ndarray:
        """The state before a step, in float64."""
        place, saved = (t + 1 if self.reverse else t - 1), "h" if of == "h" else "cells"
        first = np.zeros_like(v[saved][0]) if f"{of}0" not in v else v[f"{of}0"]
        state = v[saved][place] if 0 <= place < self.steps else first
        return np.where(begun[:, t, None], 0, state.astype(np.float64))

    def _of_data(self, v: dict[str, np.ndarray], accumulation: Accumulation) -> dict[str, np.ndarray]:
        clip = self.options.get("clip")
        k, exact = _bounds(self.in_dtype, accumulation, clip or (), *BY_KERNELS.get(self.engine, (LOGISTIC, 0.0)))
        weights = {short: v[name].astype(np.float64) for name, short in WEIGHTS.items() if name in v}
        live, begun = self._marks(v)
        names = ("h", "c") if self.cell == "lstm" else ("h",)
        sizes = (weights["r"].shape[0], self.units)
        start = [v.get(f"d{s}", np.zeros((self.batch, size))) for s, size in zip(names, sizes, strict=False)]
        due = [exact(s.astype(np.float64)) for s in start]
        columns, dx = GATES[self.cell] * self.units, np.zeros((self.batch, self.steps, self.inputs))
        for t in range(self.steps)[:: 1 if self.reverse else -1]:
            at = {s: exact(v[s][t].astype(np.float64)) for s in ("gates", "u") if s in v}
            before = [exact(self._before(v, t, begun, s)) for s in names]
            on, anew = live[:, t, None], begun[:, t, None]
            added = due[0] + exact(v["dy"][:, t].astype(np.float64))
            e, new = step(k, self.cell, weights, at, before, [added.where(on, due[0]), *due[1:]], clip)
            new = [exact(np.zeros(s.value.shape)).where(anew, s) for s in new]
            due = [a.where(on, b) for a, b in zip(new, due, strict=True)]
            dx[:, t] = np.where(on, k.dot(k.narrow(e[:, :columns]), weights["w"].T).error, 0)
        last = [k.narrow(due[0]).unrounded, *(s.error for s in due[1:])]
        return {"dx": dx, **{f"d{s}0": error for s, error in zip(names, last, strict=True)}}

    def _of_weights(self, v: dict[str, np.ndarray], accumulation: Accumulation) -> dict[str, np.ndarray]:
        live, begun = self._marks(v)
        e, gates, size = v["e"].astype(np.float64), GATES[self.cell], self.units
        a, s = e[..., : gates * size], e[..., : gates * size]
        if self.cell == "gru_after":
            s = np.concatenate([e[..., : 2 * size], e[..., 3 * size :]], -1)
        x = np.where(live[..., None], v["x"], 0).astype(np.float64).swapaxes(0, 1)
        h = np.stack([np.where(live[:, t, None], self._before(v, t, begun, "h"), 0) for t in range(self.steps)])
        of_r = [(h, s)]
        if self.cell == "gru_before":
            of_r = [(h, s[..., : 2 * size]), (v["u"].astype(np.float64), s[..., 2 * size :])]
        found = {"dw": self._product(x, a, accumulation)}
        found["dr"] = np.concatenate([self._product(a, b, accumulation) for a, b in of_r], 1)
        for name, rows in (("bias", a), ("recurrent_bias", s)):
            if name in v:
                ones = np.ones((*rows.shape[:2], 1))
                found[f"d{name}"] = self._product(ones, rows, accumulation, rounded=False)[0]
        if "projection" in v:
            found["dprojection"] = self._product(v["u"].astype(np.float64), e[..., gates * size :], accumulation)
        return found

    def _product(self, x: np.ndarray, e: np.ndarray, accumulation: Accumulation, rounded: bool = True) -> np.ndarray:
        """How far the sum over all rows of xᵀ e may be off, whose e is rounded to the inputs' type."""
        to, count = format_of(self.in_dtype), x.shape[0] * x.shape[1]
        total = lambda x, e: np.tensordot(x, e, ((0, 1), (0, 1)))
        value, size = total(x, e), total(np.abs(x), np.abs(e))
        off = (to.roundoff * size + to.smallest_subnormal * total(np.abs(x), np.ones_like(e))) if rounded else 0.0
        off = 0.0 if self.in_dtype.itemsize > 2 else off
        short = rounded and products_are_exact(self.in_dtype, self.in_dtype, format=accumulation.format)
        return off + accumulation.error(np.abs(value) + off, size + off, np.asarray(count), exact_products=short)

    def describe(self) -> dict[str, Any]:
        return {"steps": self.steps, "inputs": self.inputs, "units": self.units, **self.options}


def cases(op: str, engine: str, extent: str, seed: int) -> Iterator[BackwardCase]:
    """Every variant in every dtype of the extent."""
    for dtype in up_to(extent, DTYPES):
        for variant in KINDS[op.partition("_")[0]]:
            yield BackwardCase(op, engine, dtype, variant, **SIZES.get(engine, {}))


def _axes(case: BackwardCase) -> tuple[int | None, ...]:
    return *(BATCHED.get(name) for name in case.names), *[1] * len(case.saved)


def subjects(op: str, engine: str, extent: str, seed: int) -> Iterator[Subject | None]:
    """Two kinds; of weights' gradients, which add over sequences, one."""
    kinds = list(KINDS[op.partition("_")[0]])[: 2 if op.endswith("dgrad") else 1]
    for dtype, variant in zip(("f32", "bf16"), kinds, strict=False):
        case = BackwardCase(op, engine, dtype, variant, **SIZES.get(engine, {}))
        found = subject(case, seed, batch_axes=_axes(case), out_axis=0 if op.endswith("dgrad") else None)
        if found is not None:
            yield dataclasses.replace(found, variant=variant)


def draw(op: str, engine: str, rng: drawn.Generator, name: str) -> BackwardCase:
    """Every variant at any sizes; for kernels those of the numbers of units that they serve."""
    kernels = engine == "hopper"
    sizes = {
        "batch": drawn.between(rng, 1, 8),
        "steps": drawn.between(rng, 1, 30),
        "inputs": drawn.between(rng, 1, 100),
        "units": int(rng.choice(UNITS)) if kernels else drawn.between(rng, 1, 100),
        "columns": drawn.between(rng, 1, 50),
    }
    variants = [v for v in KINDS[op.partition("_")[0]] if not kernels or v not in ("projected", "before")]
    dtype = drawn.pick(rng, {"bf16": 1, "f16": 1} if kernels else drawn.WIDER)
    return BackwardCase(op, engine, dtype, f"{name}/{rng.choice(variants)}", **sizes)


def samples(case: BackwardCase) -> tuple[tuple[int | None, ...], int] | None:
    """Sequences."""
    return None if case.batch == 1 or case.op.endswith("wgrad") else (_axes(case), 0)


FAMILY = family("rnn", BackwardCase, OPS, cases, subjects, "a small call", (1, 1), draw=draw, samples=samples)
