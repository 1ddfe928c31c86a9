"""Every kind of recurrent layer: its data, and calls of it."""

import functools as ft
import math
from typing import Any

import jax
import numpy as np
import pytest

import jaxdnn as dnn

N, T, D, H, P = 5, 8, 3, 4, 2
LENGTHS = np.array([8, 0, 3, 1, 6], np.int32)  # in no order; all, none and one of the steps among them
RESETS = np.zeros((N, T), bool)  # at a sequence's start, within it, at its end, behind it, and twice in turn
RESETS[[0, 0, 0, 1, 2, 2, 3, 4], [3, 4, 7, 2, 0, 3, 5, 5]] = True
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
# Every kind of step, by a name: the op, and what is given.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": ("lstm", {}),
    "lstm-projected-clipped": ("lstm", {"clip": (-0.3, 0.2)}),
    "gru-after": ("gru", {}),
    "gru-before": ("gru", {"reset_gate": "before"}),
    "rnn-tanh": ("rnn", {}),
    "rnn-relu": ("rnn", {"activation": "relu"}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
# Of each op one; the others share its code but for a step.
each_op = pytest.mark.parametrize("kind", ["lstm-projected-clipped", "gru-after", "gru-before", "rnn-tanh"])


def data(kind: str, seed: int = 0, dtype: Any = np.float32, sizes: tuple[int, ...] = (N, T, D, H, P)) -> dict[str, Any]:
    """Every array that a kind takes, by name."""
    (n, t, i, h, p), rng = sizes, np.random.default_rng(seed)
    columns, wide = (p if "projected" in kind else h), GATES[KINDS[kind][0]] * h
    shapes = {"x": (n, t, i), "w": (i, wide), "r": (columns, wide), "bias": (wide,), "recurrent_bias": (wide,)}
    shapes |= {"projection": (h, p)} if "projected" in kind else {}
    shapes |= {"h0": (n, columns)} | ({"c0": (n, h)} if kind.startswith("lstm") else {})
    return {name: (rng.normal(size=shape) * 0.6).astype(dtype) for name, shape in shapes.items()}


def called(of: Any, kind: str, v: dict[str, Any], **options: Any) -> list[Any]:
    """The results of an op, or of its definition."""
    x, w, r = (v[name] for name in ("x", "w", "r"))
    named = {name: array for name, array in v.items() if name not in ("x", "w", "r")}
    name, own = KINDS[kind]
    return jax.tree.leaves(getattr(of, name)(x, w, r, **named, **own, **options))


@ft.partial(jax.jit, static_argnames=("kind", "options"))
def _compiled(kind: str, v: dict[str, Any], options: tuple[Any, ...]) -> list[Any]:
    return called(dnn, kind, v, **dict(options))


def compiled(kind: str, v: dict[str, Any], **options: Any) -> list[np.ndarray]:
    """By one program for all calls of equal shapes and options."""
    return [np.asarray(y) for y in _compiled(kind, v, tuple(options.items()))]


def wave(*shape: int) -> np.ndarray:
    return np.sin(1.0 + np.arange(float(math.prod(shape)))).reshape(shape)
