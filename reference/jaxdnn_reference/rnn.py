"""Recurrent layers and their cells: LSTM, GRU, and the plain layer of tanh or relu.

Of a sequence x_1, x_2, ... and a state h, gate by gate, with the columns of W, R and the biases ordered by gate:

    a = x_t W + b,  s = h_{t-1} R + d          b: bias, d: recurrent_bias
    rnn    h_t = act(a + s)
    lstm   i, f, o = sigmoid(a + s), g = tanh(a + s), in the order i, f, g, o
           c_t = clip(f c_{t-1} + i g),  h_t = o tanh(c_t), or (o tanh(c_t)) P with a projection P
    gru    r, z = sigmoid(a + s), in the order r, z, n;  h_t = (1 - z) n + z h_{t-1}, where
           n = tanh(a_n + r s_n) for reset_gate "after", n = tanh(a_n + (r h_{t-1}) R_n + d_n) for "before"

"reverse" runs from a sequence's last step to its first; "bidirectional" is a layer of each, whose results lie side by
side, and whose weights and states have an axis of 2 in front. A sequence ends with its length: later results are
`fill`, and the final state is the one after its last step, of no steps the initial one. Where resets[t] is true no
state passes between the steps t - 1 and t, in either direction: it is 0 before the later one of the two.

Without W, a is x, once for every gate. An R of heads is block-diagonal: of every gate's columns, head by head, each
head has its own R and P. Of several layers each reads y of the one before, after dropout(y, key, rate, (l - 1) 2^48),
y as (N, T, columns), in layer l = 1, 2, ...

What is saved for `rnn_backward` is, of each layer, and in it of each direction: h; the gates, which are i, f, g, o, or
r, z, n and for reset_gate "after" s_n, or h again; c of lstm; what a projection multiplies, or r h of reset_gate
"before". Steps come first, (T, N, columns); heads are an axis in front of the columns, but not of h. Behind a
sequence's end h and c are the state that the direction has there, the initial one in reverse; no gates are read.

arithmetic "golden": float64, nothing is rounded to the inputs' type. "ordered": float32 (float64 for float64); each
product and each sum is rounded. A sum of products starts from 0 and takes them in the order of the index; the biases
are added to each other, then to x W, and h R to that (of n with reset_gate "after" d_n to h R_n). h is rounded to the
type of x after each step; so are r h, and o tanh(c) before a projection. c_n is rounded once, at the end.

    n = rint(v log2 e), s = (v - n p) - n q for log 2 = p + q, t = s times the Taylor polynomial of (e^s - 1) / s of
    degree 6 (12);  e^v = 2^n + 2^n t,  e^v - 1 = (2^n - 1) + 2^n t
    sigmoid(x) = 1 / (1 + e), and e / (1 + e) for x < 0, with e = e^-|x|, which is 0 for |x| > 69 (690)
    tanh(x) = -m / (2 + m) with the sign of x and m = e^(-2 |x|) - 1, |x| cut to 20 (40)

Sources: Hochreiter and Schmidhuber (1997), Gers et al. (2000); Cho et al., arXiv:1406.1078; cuDNN's cudnnRNNForward.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdnn_reference.dropout import dropout as drop
from jaxdnn_reference.rounding import round_to
from jaxdnn_reference.tensor import wide

Array = np.ndarray[Any, Any]
Layers = Array | Sequence[Array | None]  # of one layer, or one for each
GATES = {"lstm": 4, "gru_after": 3, "gru_before": 3, "tanh": 1, "relu": 1}


class Arithmetic(NamedTuple):
    """What formulas have beside sums and products.

    `dot` is of a vector and a matrix; `narrow` rounds to the inputs' type; `join` is along the last axis; `within` is d
    where c is not beyond the limits, and else 0.
    """

    dot: Callable[[Any, Any], Any]
    sigmoid: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    relu: Callable[[Any], Any]
    clip: Callable[[Any, float, float], Any]
    narrow: Callable[[Any], Any]
    join: Callable[[Any], Any] = lambda parts: np.concatenate(parts, -1)
    within: Callable[[Any, Any, float, float], Any] = lambda c, d, low, high: np.where((c < low) | (c > high), 0, d)


def lstm(
    x: Array,
    w: Layers | None,
    r: Layers,
    /,
    *,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    projection: Layers | None = None,
    h0: Layers | None = None,
    c0: Layers | None = None,
    lengths: Array | None = None,
    resets: Array | None = None,
    direction: str = "forward",
    clip: Sequence[float] | None = None,
    dropout: float = 0.0,
    dropout_key: Any = None,
    fill: float = 0.0,
    layout: str = "NTC",
    return_saved: bool = False,
    arithmetic: str = "golden",
) -> tuple[Any, ...]:
    """y, and the final h and c, of several layers tuples; with `return_saved` what is saved."""
    weights = {"w": w, "r": r, "b": bias, "d": recurrent_bias, "p": projection}
    order: dict[str, Any] = {"lengths": lengths, "resets": resets, "direction": direction, "layout": layout}
    order |= {"dropout": dropout, "key": dropout_key, "fill": fill}
    y, (h, c), saved = layers("lstm", x, weights, (h0, c0), **order, clip=clip, arithmetic=arithmetic)
    return (y, (h, c), saved) if return_saved else (y, (h, c))


def gru(
    x: Array,
    w: Layers | None,
    r: Layers,
    /,
    *,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    lengths: Array | None = None,
    resets: Array | None = None,
    direction: str = "forward",
    reset_gate: str = "after",
    dropout: float = 0.0,
    dropout_key: Any = None,
    fill: float = 0.0,
    layout: str = "NTC",
    return_saved: bool = False,
    arithmetic: str = "golden",
) -> tuple[Any, ...]:
    """y, and the final h, of several layers a tuple; with `return_saved` what is saved."""
    weights = {"w": w, "r": r, "b": bias, "d": recurrent_bias}
    order: dict[str, Any] = {"lengths": lengths, "resets": resets, "direction": direction, "layout": layout}
    order |= {"dropout": dropout, "key": dropout_key, "fill": fill}
    y, (h,), saved = layers(f"gru_{reset_gate}", x, weights, (h0,), **order, arithmetic=arithmetic)
    return (y, h, saved) if return_saved else (y, h)


def rnn(
    x: Array,
    w: Layers | None,
    r: Layers,
    /,
    *,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    lengths: Array | None = None,
    resets: Array | None = None,
    direction: str = "forward",
    activation: str = "tanh",
    dropout: float = 0.0,
    dropout_key: Any = None,
    fill: float = 0.0,
    layout: str = "NTC",
    return_saved: bool = False,
    arithmetic: str = "golden",
) -> tuple[Any, ...]:
    """y, and the final h, of several layers a tuple; with `return_saved` what is saved."""
    weights = {"w": w, "r": r, "b": bias, "d": recurrent_bias}
    order: dict[str, Any] = {"lengths": lengths, "resets": resets, "direction": direction, "layout": layout}
    order |= {"dropout": dropout, "key": dropout_key, "fill": fill}
    y, (h,), saved = layers(activation, x, weights, (h0,), **order, arithmetic=arithmetic)
    return (y, h, saved) if return_saved else (y, h)


def lstm_cell(
    x: Array,
    w: Array | None,
    r: Array,
    h: Array,
    c: Array,
    /,
    *,
    bias: Array | None = None,
    recurrent_bias: Array | None = None,
    projection: Array | None = None,
    clip: Sequence[float] | None = None,
    arithmetic: str = "golden",
) -> tuple[Array, Array]:
    """h and c after a step of `lstm`."""
    weights: dict[str, Any] = {"bias": bias, "recurrent_bias": recurrent_bias, "projection": projection}
    return lstm(x[:, None], w, r, **weights, h0=h, c0=c, clip=clip, arithmetic=arithmetic)[1]


def gru_cell(
    x: Array,
    w: Array | None,
    r: Array,
    h: Array,
    /,
    *,
    bias: Array | None = None,
    recurrent_bias: Array | None = None,
    reset_gate: str = "after",
    arithmetic: str = "golden",
) -> Array:
    """h after a step of `gru`."""
    weights: dict[str, Any] = {"bias": bias, "recurrent_bias": recurrent_bias}
    return gru(x[:, None], w, r, **weights, h0=h, reset_gate=reset_gate, arithmetic=arithmetic)[1]


def rnn_cell(
    x: Array,
    w: Array | None,
    r: Array,
    h: Array,
    /,
    *,
    bias: Array | None = None,
    recurrent_bias: Array | None = None,
    activation: str = "tanh",
    arithmetic: str = "golden",
) -> Array:
    """h after a step of `rnn`."""
    weights: dict[str, Any] = {"bias": bias, "recurrent_bias": recurrent_bias}
    return rnn(x[:, None], w, r, **weights, h0=h, activation=activation, arithmetic=arithmetic)[1]


# ---- layers ------------------------------------------------------------------------------------------------------


def layers(
    cell: str,
    x: Array,
    weights: dict[str, Any],
    initial: Sequence[Any],
    *,
    dropout: float,
    key: Any,
    fill: float,
    layout: str,
    arithmetic: str,
    **own: Any,
) -> tuple[Array, Sequence[Any], tuple[Array, ...]]:
    """y of the last layer, the final states of all, of each a tuple if there is a sequence of layers, what is saved."""
    own |= {"layout": layout, "arithmetic": arithmetic}
    if not isinstance(weights["r"], tuple | list):
        y, final, saved = layer(cell, x, weights, initial, fill=fill, **own)
        return y, final, tuple(v for kept in saved for v in kept.values())
    of = lambda v, i: None if v is None else v[i]
    turned = lambda y: y if layout == "NTC" else y.swapaxes(0, 1)
    y, states, count, every = x, [], len(weights["r"]), ()
    for i in range(count):
        if i and dropout:
            dropped = drop(turned(y), key, rate=dropout, offset=(i - 1) * 2**48, arithmetic=arithmetic)
            y = turned(dropped).astype(y.dtype)
        given = {name: of(v, i) for name, v in weights.items()}
        behind = fill if i == count - 1 else 0.0
        y, final, saved = layer(cell, y, given, [of(v, i) for v in initial], fill=behind, **own)
        states.append(final)
        every += tuple(v for kept in saved for v in kept.values())
    return y, list(zip(*states, strict=True)), every


def by_heads(
    heads: int, cell: str, x: Array, weights: dict[str, Any], initial: Sequence[Any], **own: Any
) -> tuple[Array, list[Array], list[dict[str, Array]]]:
    """Head j has its part of the columns of every gate, and its own recurrent matrix and projection."""
    each = []
    for j in range(heads):
        part = lambda v, gates, j=j: v.reshape(*v.shape[:-1], gates, heads, -1)[..., j, :].reshape(*v.shape[:-1], -1)
        given = {name: v[j] for name, v in weights.items() if name in ("r", "p") and v is not None}
        if weights["w"] is None:
            given["w"], columns = None, part(x, 1)
        else:
            columns = x
        given |= {n: part(weights[n], GATES[cell]) for n in ("w", "b", "d") if weights.get(n) is not None}
        each.append(layer(cell, columns, given, [None if v is None else part(v, 1) for v in initial], **own))
    y, states, saved = zip(*each, strict=True)
    kept = {name: [own[0][name] for own in saved] for name in saved[0][0]}
    whole = {name: np.concatenate(v, -1) if name == "h" else np.stack(v, -2) for name, v in kept.items()}
    states = [np.concatenate(of_heads, -1) for of_heads in zip(*states, strict=True)]
    return np.concatenate(y, -1), states, [whole]


def layer(
    cell: str,
    x: Array,
    weights: dict[str, Any],
    initial: Sequence[Array | None],
    *,
    lengths: Array | None,
    resets: Array | None = None,
    direction: str,
    fill: float,
    layout: str,
    clip: Sequence[float] | None = None,
    arithmetic: str = "golden",
) -> tuple[Array, list[Array], list[dict[str, Array]]]:
    """y, the final states, and what is saved in each direction."""
    order: dict[str, Any] = dict(lengths=lengths, resets=resets, fill=fill, layout=layout)
    order |= dict(clip=clip, arithmetic=arithmetic)
    if direction == "bidirectional":
        of = lambda v, i: None if v is None else v[i]
        both = []
        for i, one in enumerate(("forward", "reverse")):
            own = {name: of(v, i) for name, v in weights.items()}
            both.append(layer(cell, x, own, [of(v, i) for v in initial], direction=one, **order))
        (y, final, saved), (z, others, further) = both
        states = [np.stack(pair) for pair in zip(final, others, strict=True)]
        return np.concatenate([y, z], -1), states, [*saved, *further]
    if weights["r"].ndim == 3:
        return by_heads(len(weights["r"]), cell, x, weights, initial, direction=direction, **order)
    if layout == "TNC":
        x, resets = x.swapaxes(0, 1), None if resets is None else resets.T
    n, steps, _ = x.shape
    k, numbers = (GOLDEN if arithmetic == "golden" else ordered(x.dtype)), {"x": x, **weights}
    known = {name: wide(v, arithmetic) for name, v in numbers.items() if v is not None}
    hidden = known["r"].shape[1] // GATES[cell]
    sizes, kind = (known["r"].shape[0], hidden), known["x"].dtype
    given = [np.zeros((n, s), kind) if v is None else wide(v, arithmetic) for v, s in zip(initial, sizes, strict=False)]
    rounded = np.dtype(np.float64) if arithmetic == "golden" else x.dtype
    y = np.full((n, steps, sizes[0]), fill, rounded)
    last, saved = [v.copy() for v in given], _unwritten(cell, known, steps, n, rounded)
    for i in range(n):
        count = steps if lengths is None else min(max(int(lengths[i]), 0), steps)
        time = range(count) if direction == "forward" else range(count)[::-1]
        state = tuple(v[i] for v in given)
        for t in time:
            begun = t if direction == "forward" else t + 1
            if resets is not None and begun < count and resets[i, begun]:
                state = tuple(np.zeros_like(v) for v in state)
            kept: dict[str, Any] = {}
            state = step(k, cell, known, known["x"][i, t], state, clip, kept)
            y[i, t] = state[0]
            kept |= dict(zip(("h", "cells"), state, strict=False))
            for name, v in saved.items():
                v[t, i] = kept[name]
        for whole, own, first, name in zip(last, state, given, ("h", "cells"), strict=False):
            whole[i] = own
            saved[name][count:, i] = own if direction == "forward" else first[i]
    kinds = [rounded, *(rounded if v is None or arithmetic == "golden" else v.dtype for v in initial[1:])]
    final = [round_to(v, kind) for v, kind in zip(last, kinds, strict=True)]
    return (y if layout == "NTC" else y.swapaxes(0, 1)), final, [saved]


def _unwritten(cell: str, v: dict[str, Any], steps: int, n: int, narrow: Any) -> dict[str, Array]:
    """What is saved of no step."""
    columns, wide = v["r"].shape
    hidden = wide // GATES[cell]
    widths = {"h": columns, "gates": wide + (hidden if cell == "gru_after" else 0)}
    widths |= {"cells": hidden} if cell == "lstm" else {}
    widths |= {"u": hidden} if "p" in v or cell == "gru_before" else {}
    kinds = {"h": narrow, "u": narrow}
    kept = np.float64 if narrow == np.float64 else v["r"].dtype
    return {name: np.zeros((steps, n, size), kinds.get(name, kept)) for name, size in widths.items()}


def step(
    k: Arithmetic,
    cell: str,
    v: dict[str, Any],
    x: Any,
    state: Sequence[Any],
    clip: Sequence[float] | None = None,
    saved: dict[str, Any] | None = None,
) -> tuple[Any, ...]:
    """The state after a step; of vectors, or of one row a sequence. Puts what is saved into `saved`."""
    kept: dict[str, Any] = {} if saved is None else saved
    h, hidden = state[0], v["r"].shape[1] // GATES[cell]
    part = lambda z, gate: z[..., gate * hidden : (gate + 1) * hidden]
    a = k.dot(x, v["w"]) if "w" in v else k.join([x] * GATES[cell])
    none = np.zeros(v["r"].shape[1], v["r"].dtype)
    b, d = v.get("b", none), v.get("d", none)
    if cell == "gru_after":
        s = k.dot(h, v["r"])
        a, q = a + np.concatenate([(b + d)[: 2 * hidden], part(b, 2)]), part(s, 2) + part(d, 2)
        r, z = (k.sigmoid(part(a, gate) + part(s, gate)) for gate in (0, 1))
        n = k.tanh(part(a, 2) + r * q)
        kept["gates"] = k.join([r, z, n, q])
        return (k.narrow((1 - z) * n + z * h),)
    a = a + (b + d)
    if cell == "gru_before":
        s = k.dot(h, v["r"][:, : 2 * hidden])
        r, z = (k.sigmoid(part(a, gate) + part(s, gate)) for gate in (0, 1))
        kept["u"] = k.narrow(r * h)
        n = k.tanh(part(a, 2) + k.dot(kept["u"], v["r"][:, 2 * hidden :]))
        kept["gates"] = k.join([r, z, n])
        return (k.narrow((1 - z) * n + z * h),)
    sums = a + k.dot(h, v["r"])
    if cell != "lstm":
        kept["gates"] = k.tanh(sums) if cell == "tanh" else k.relu(sums)
        return (k.narrow(kept["gates"]),)
    i, f, o = (k.sigmoid(part(sums, gate)) for gate in (0, 1, 3))
    g = k.tanh(part(sums, 2))
    c = f * state[1] + i * g
    c = c if clip is None else k.clip(c, *clip)
    u, kept["gates"] = o * k.tanh(c), k.join([i, f, g, o])
    if "p" not in v:
        return k.narrow(u), c
    kept["u"] = k.narrow(u)
    return k.narrow(k.dot(kept["u"], v["p"])), c


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def _relu(x: Array) -> Array:
    return np.where(x <= 0, np.zeros_like(x), x)


def _clip(x: Array, low: float, high: float) -> Array:
    return np.where(x < low, x.dtype.type(low), np.where(x > high, x.dtype.type(high), x))


GOLDEN = Arithmetic(np.matmul, _sigmoid, np.tanh, _relu, _clip, lambda x: x)

# ---- ordered: each step rounded ----------------------------------------------------------------------------------

# The degree of the polynomial, the parts of log 2, how far from 0 sigmoid's exponential and tanh are computed.
CONSTANTS = {
    np.dtype(np.float32): (6, 0.693359375, -2.121944400546905827679e-4, 69.0, 20.0),
    np.dtype(np.float64): (12, 6.93147180369123816490e-01, 1.90821492927058770002e-10, 690.0, 40.0),
}


def ordered(dtype: np.dtype) -> Arithmetic:
    """The stated arithmetic for inputs of a type."""
    narrow = lambda x: round_to(x, dtype).astype(x.dtype)
    return Arithmetic(in_order, sigmoid, tanh, _relu, _clip, narrow)


def in_order(x: Array, w: Array) -> Array:
    """x w from 0 on, each product and each sum rounded."""
    total = np.zeros((*x.shape[:-1], w.shape[1]), x.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        for j in range(w.shape[0]):
            total = total + x[..., j, None] * w[j]
    return total


def exponential(v: Array) -> tuple[Array, Array]:
    """2^n and 2^n t, with e^v = 2^n (1 + t)."""
    degree, high, low, *_ = CONSTANTS[v.dtype]
    of = v.dtype.type
    n = np.rint(v * of(1 / math.log(2)))
    s = (v - n * of(high)) - n * of(low)
    q = np.full_like(s, 1 / math.factorial(degree + 1))
    for i in range(degree, 0, -1):
        q = q * s + of(1 / math.factorial(i))
    power = np.ldexp(np.ones_like(v), n.astype(np.int64))
    return power, power * (s * q)


def sigmoid(x: Array) -> Array:
    most = x.dtype.type(CONSTANTS[x.dtype][3])
    size = np.where(np.isnan(x), 0, np.abs(x)).astype(x.dtype)
    power, rest = exponential(-np.minimum(size, most))
    e = np.where(size > most, 0, power + rest).astype(x.dtype)
    return np.where(np.isnan(x), x, np.where(x >= 0, 1, e).astype(x.dtype) / (1 + e))


def tanh(x: Array) -> Array:
    most = x.dtype.type(CONSTANTS[x.dtype][4])
    size = np.where(np.isnan(x), 0, np.minimum(np.abs(x), most)).astype(x.dtype)
    power, rest = exponential(-(size + size))
    m = (power - 1) + rest
    return np.where(np.isnan(x), x, np.copysign(m / (2 + m), x))
