"""The backward passes of recurrent layers, in data and in weights; letters, gates and what is saved are those of `rnn`.

Behind a sequence's last step dh and dc are those of the final states. From step to step, backward, d = dy + dh and

    rnn    dz = act'(h) d
    lstm   du = d, or d P^T with a projection;  dc = dc + du o (1 - tanh(c)^2), and 0 where c was cut
           dz = (dc g i (1 - i), dc c_{t-1} f (1 - f), dc i (1 - g^2), du tanh(c) o (1 - o));  dc = dc f
    gru    dn = d (1 - z) (1 - n^2),  dz = d (h_{t-1} - n) z (1 - z);  for reset_gate "after"
           dr = dn s_n r (1 - r),  da = (dr, dz, dn),  ds = (dr, dz, dn r),  dh = d z + ds R^T;  for "before"
           v = dn R_n^T,  dr = v h_{t-1} r (1 - r),  da = (dr, dz, dn),  dh = d z + v r + (dr, dz) (R_r, R_z)^T

with dh = dz R^T of rnn and lstm, whose da and ds are dz. Where a sequence begins anew dh and dc become 0 instead; what
they are before the first step are the gradients of the initial states. Of all steps and sequences

    dx = da W^T,  dW = sum x^T da,  dR = sum h_{t-1}^T ds, of R_n with "before" sum (r h_{t-1})^T dn,
    dP = sum (o tanh(c))^T d,  d bias = sum da,  d recurrent_bias = sum ds

Behind what is saved of a layer stands da; with a projection d behind it in its columns, with reset_gate "after" dn r.
All is in float64.

Sources: Werbos (1990); cuDNN's cudnnRNNBackwardData_v8 and cudnnRNNBackwardWeights_v8.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdnn_reference.dropout import dropout as drop
from jaxdnn_reference.rnn import GATES, GOLDEN, Arithmetic, Array, Layers, layer

WEIGHTS = ("w", "r", "b", "d", "p")


def lstm_dgrad(
    dy: Array,
    x: Array,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    dc: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    projection: Layers | None = None,
    h0: Layers | None = None,
    c0: Layers | None = None,
    clip: Sequence[float] | None = None,
    return_saved: bool = False,
    **order: Any,
) -> tuple[Any, ...]:
    """dx, and the gradients of the initial states; with `return_saved` what is saved of both passes."""
    weights = {"w": w, "r": r, "b": bias, "d": recurrent_bias, "p": projection}
    found = backward("lstm", dy, x, weights, (h0, c0), (dh, dc), saved, clip=clip, **order)
    dx, states, _, kept = found
    data = dx, tuple(states)
    return (*data, kept) if return_saved else data


def lstm_wgrad(
    dy: Array,
    x: Array,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    dc: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    projection: Layers | None = None,
    h0: Layers | None = None,
    c0: Layers | None = None,
    clip: Sequence[float] | None = None,
    **order: Any,
) -> tuple[Any, ...]:
    """The gradients of the weights that are given: w, r, bias, recurrent_bias, projection."""
    weights = {"w": w, "r": r, "b": bias, "d": recurrent_bias, "p": projection}
    found = backward("lstm", dy, x, weights, (h0, c0), (dh, dc), saved, clip=clip, **order, known=True)
    return found[2]


def gru_dgrad(
    dy: Array,
    x: Array,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    reset_gate: str = "after",
    return_saved: bool = False,
    **order: Any,
) -> tuple[Any, ...]:
    """dx, and the gradients of the initial states; with `return_saved` what is saved of both passes."""
    weights = {"w": w, "r": r, "b": bias, "d": recurrent_bias}
    found = backward(f"gru_{reset_gate}", dy, x, weights, (h0,), (dh,), saved, **order)
    dx, states, _, kept = found
    data = dx, states[0]
    return (*data, kept) if return_saved else data


def gru_wgrad(
    dy: Array,
    x: Array,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    reset_gate: str = "after",
    **order: Any,
) -> tuple[Any, ...]:
    """The gradients of the weights that are given: w, r, bias, recurrent_bias."""
    weights = {"w": w, "r": r, "b": bias, "d": recurrent_bias}
    found = backward(f"gru_{reset_gate}", dy, x, weights, (h0,), (dh,), saved, **order, known=True)
    return found[2]


def rnn_dgrad(
    dy: Array,
    x: Array,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    activation: str = "tanh",
    return_saved: bool = False,
    **order: Any,
) -> tuple[Any, ...]:
    """dx, and the gradients of the initial states; with `return_saved` what is saved of both passes."""
    weights = {"w": w, "r": r, "b": bias, "d": recurrent_bias}
    found = backward(activation, dy, x, weights, (h0,), (dh,), saved, **order)
    dx, states, _, kept = found
    data = dx, states[0]
    return (*data, kept) if return_saved else data


def rnn_wgrad(
    dy: Array,
    x: Array,
    w: Layers | None,
    r: Layers,
    /,
    *,
    dh: Layers | None = None,
    saved: Layers | None = None,
    bias: Layers | None = None,
    recurrent_bias: Layers | None = None,
    h0: Layers | None = None,
    activation: str = "tanh",
    **order: Any,
) -> tuple[Any, ...]:
    """The gradients of the weights that are given: w, r, bias, recurrent_bias."""
    weights = {"w": w, "r": r, "b": bias, "d": recurrent_bias}
    found = backward(activation, dy, x, weights, (h0,), (dh,), saved, **order, known=True)
    return found[2]


# ---- layers ------------------------------------------------------------------------------------------------------


def backward(
    cell: str,
    dy: Array,
    x: Array,
    weights: dict[str, Any],
    initial: Sequence[Any],
    final: Sequence[Any],
    saved: Any,
    *,
    lengths: Array | None = None,
    resets: Array | None = None,
    direction: str = "forward",
    dropout: float = 0.0,
    dropout_key: Any = None,
    layout: str = "NTC",
    clip: Sequence[float] | None = None,
    known: bool = False,
) -> tuple[Array, list[Any], tuple[Any, ...], tuple[Array, ...]]:
    """dx, the gradients of the initial states and of weights, and what is saved, of all layers.

    If `known`, gradients of weights are those of e in `saved`, where it is there.
    """
    single = not isinstance(weights["r"], tuple | list)
    turned = lambda a: a if layout == "NTC" else a.swapaxes(0, 1)
    x, dy = (turned(np.asarray(v)) for v in (x, dy))
    resets = None if resets is None else turned(resets)
    of = lambda v, i: v if v is None or single else v[i]
    count = 1 if single else len(weights["r"])
    rest = lambda i: {"rate": dropout, "offset": (i - 1) * 2**48}
    thinned = lambda v, i: drop(v, dropout_key, **rest(i)).astype(v.dtype) if 0 < i < count and dropout else v
    live = np.arange(x.shape[1]) < (np.full(len(x), x.shape[1]) if lengths is None else np.asarray(lengths))[:, None]
    order: dict[str, Any] = {"lengths": lengths, "resets": resets, "clip": clip}
    each = lambda given, i: {name: of(v, i) for name, v in given.items()}
    own = [each(weights, i) for i in range(count)]
    states = [[of(v, i) for v in initial] for i in range(count)]
    forward = dict(**order, direction=direction, fill=0.0, layout="NTC")
    inputs, kept = [x.astype(np.float64)], []
    for i in range(count):
        y, _, found = layer(cell, inputs[i], own[i], states[i], **forward)
        kept.append(found)
        inputs.append(thinned(y, i + 1))
    if saved is not None:
        inputs, kept = [inputs[0]], _as_saved(saved, kept, known)
        for i, found in enumerate(kept):
            y = np.concatenate([v["h"].swapaxes(0, 1) for v in found], -1)
            inputs.append(thinned(np.where(live[..., None], y, 0), i + 1))
    d, states_of, weights_of = dy.astype(np.float64), [], []
    for i in range(count - 1, -1, -1):
        d = np.where(live[..., None], d, 0)
        given = [of(v, i) for v in final]
        d, *found = _layer(cell, d, inputs[i], own[i], states[i], given, kept[i], direction=direction, **order)
        d = thinned(d, i)
        states_of.insert(0, found[0])
        weights_of.insert(0, found[1])
    as_given = lambda v: v[0] if single else tuple(v)
    names = [name for name in WEIGHTS if any(v.get(name) is not None for v in own)]
    gradients = tuple(as_given([v.get(name) for v in weights_of]) for name in names)
    every = tuple(v for found in kept for one in found for name, v in one.items() if name != "known")
    return turned(d), [as_given(v) for v in zip(*states_of, strict=True)], gradients, every


def _as_saved(saved: Sequence[Array], like: list[list[dict[str, Array]]], known: bool) -> list[list[dict[str, Array]]]:
    """What is saved by layer, direction and name; of a backward pass too, e is "known"."""
    count = sum(len(one) for found in like for one in found)
    left = iter(saved)

    def read(one: dict[str, Array]) -> dict[str, Array]:
        found = {name: np.asarray(next(left), np.float64) for name in one}
        e = next(left) if len(saved) > count else None
        return found | ({} if e is None or not known else {"known": np.asarray(e, np.float64)})

    return [[read(one) for one in found] for found in like]


def _layer(
    cell: str,
    dy: Array,
    x: Array,
    weights: dict[str, Any],
    initial: Sequence[Any],
    final: Sequence[Any],
    saved: list[dict[str, Array]],
    *,
    direction: str,
    **order: Any,
) -> tuple[Array, list[Array], dict[str, Array]]:
    """dx and the gradients of initial states and of weights. Puts "e" into what is saved."""
    if direction == "bidirectional":
        of = lambda v, j: None if v is None else v[j]
        both = []
        for j, one in enumerate(("forward", "reverse")):
            own, states, ends = (
                {n: of(v, j) for n, v in weights.items()},
                *([of(v, j) for v in s] for s in (initial, final)),
            )
            part = np.split(dy, 2, -1)[j]
            both.append(_layer(cell, part, x, own, states, ends, saved[j : j + 1], direction=one, **order))
        (dx, ds, dw), (ex, es, ew) = both
        return dx + ex, list(map(np.stack, zip(ds, es, strict=True))), {n: np.stack([dw[n], ew[n]]) for n in dw}
    if weights["r"].ndim == 3:
        return _by_heads(cell, dy, x, weights, initial, final, saved[0], direction=direction, **order)
    known = {name: v.astype(np.float64) for name, v in weights.items() if v is not None}
    return _one(cell, dy, x, known, initial, final, saved[0], direction == "reverse", **order)


def _by_heads(
    cell: str, dy: Array, x: Array, weights: dict[str, Any], initial: Any, final: Any, saved: Any, **own: Any
) -> tuple[Array, list[Array], dict[str, Array]]:
    heads, gates = len(weights["r"]), GATES[cell]
    cut = lambda v, parts: v.reshape(*v.shape[:-1], parts, heads, -1)
    part = lambda v, parts, j: cut(v, parts)[..., j, :].reshape(*v.shape[:-1], -1)
    parts = {"w": gates, "b": gates, "d": gates}
    each, kept = [], []
    for j in range(heads):
        given = {n: part(v, parts[n], j) if n in parts else v[j] for n, v in weights.items() if v is not None}
        start, end = ([None if v is None else part(v, 1, j) for v in s] for s in (initial, final))
        of_head = {n: part(v, 1, j) if n == "h" else v[..., j, :] for n, v in saved.items() if n != "e"}
        columns = x if weights["w"] is not None else part(x, 1, j)
        every: dict[str, Any] = {"w": None, **given}
        each.append(_layer(cell, part(dy, 1, j), columns, every, start, end, [of_head], **own))
        kept.append(of_head["e"])
    saved["e"] = np.stack(kept, -2)
    dx, ds, dw = zip(*each, strict=True)
    beside = lambda v, parts: np.stack([a.reshape(*a.shape[:-1], parts, -1) for a in v], -2).reshape(
        *v[0].shape[:-1], -1
    )
    of_weights = {
        n: beside([v[n] for v in dw], parts[n]) if n in parts else np.stack([v[n] for v in dw]) for n in dw[0]
    }
    dx = np.sum(dx, 0) if weights["w"] is not None else beside(dx, 1)
    return dx, [beside(v, 1) for v in zip(*ds, strict=True)], of_weights


def _one(
    cell: str,
    dy: Array,
    x: Array,
    v: dict[str, Array],
    initial: Sequence[Any],
    final: Sequence[Any],
    saved: dict[str, Array],
    reverse: bool,
    *,
    lengths: Array | None,
    resets: Array | None,
    clip: Any,
) -> tuple[Array, list[Array], dict[str, Array]]:
    """One layer of one direction."""
    n, steps, _ = x.shape
    gates, hidden = GATES[cell], v["r"].shape[1] // GATES[cell]
    sizes = (v["r"].shape[0], hidden)[: 2 if cell == "lstm" else 1]
    start, end = (
        [np.zeros((n, s)) if a is None else np.asarray(a, np.float64) for a, s in zip(given, sizes, strict=False)]
        for given in (initial, final)
    )
    dx, states = np.zeros(x.shape), [a.copy() for a in end]
    grads = {name: np.zeros(a.shape) for name, a in v.items()}
    e = np.zeros((steps, n, saved["gates"].shape[-1] + (sizes[0] if "p" in v else 0)))
    for i in range(n):
        count = steps if lengths is None else min(max(int(lengths[i]), 0), steps)
        time = list(range(count))[:: -1 if reverse else 1]
        due = [a[i] for a in end]
        for place in range(count - 1, -1, -1):
            t = time[place]
            begun = t + 1 if reverse else t
            anew = resets is not None and begun < count and bool(resets[i, begun])
            names = ("h", "cells")[: len(sizes)]
            before = [a[i] for a in start] if place == 0 else [saved[name][time[place - 1], i] for name in names]
            before = [np.zeros_like(a) if anew else a for a in before]
            at = {name: a[t, i] for name, a in saved.items()}
            due[0] = due[0] + dy[i, t]
            e[t, i], due = step(GOLDEN, cell, v, at, before, due, clip)
            e[t, i] = at.get("known", e[t, i])
            due = [np.zeros_like(a) if anew else a for a in due]
            row = _rows(cell, e[t, i], gates, hidden, "p" in v)
            a_row, s_row = row[0], row[1]
            dx[i, t] = a_row @ v["w"].T if "w" in v else sum(np.split(a_row, gates))
            times = [before[0]] * gates
            if cell == "gru_before":
                times[2] = at["u"]
            of_r = [np.outer(h, part) for h, part in zip(times, np.split(s_row, gates), strict=True)]
            found = {"w": np.outer(x[i, t], a_row), "r": np.concatenate(of_r, 1), "b": a_row, "d": s_row}
            found |= {"p": np.outer(at["u"], row[2])} if "p" in v else {}
            for name in grads:
                grads[name] += found[name]
        for whole, own in zip(states, due, strict=True):
            whole[i] = own
    saved["e"] = e
    return dx, states, grads


def _rows(cell: str, e: Array, gates: int, hidden: int, projected: bool) -> tuple[Array, ...]:
    """da, ds, and what is due to a projection."""
    a = e[: gates * hidden]
    if cell == "gru_after":
        return a, np.concatenate([e[: 2 * hidden], e[3 * hidden :]])
    return (a, a, e[gates * hidden :]) if projected else (a, a)


def step(
    k: Arithmetic,
    cell: str,
    v: dict[str, Any],
    at: dict[str, Any],
    before: Sequence[Any],
    due: Sequence[Any],
    clip: Any,
) -> tuple[Any, list[Any]]:
    """e of a step, and what is due to the states before it, of what is saved of it; of vectors, or of one row a
    sequence."""
    hidden = v["r"].shape[1] // GATES[cell]
    part = lambda z, j: z[..., j * hidden : (j + 1) * hidden]
    d, gates = due[0], at["gates"]
    if cell in ("tanh", "relu"):
        e = d * (1 - gates * gates) if cell == "tanh" else d * (gates > 0)
        return e, [k.dot(k.narrow(e), v["r"].T)]
    if cell == "lstm":
        i, f, g, o = (part(gates, j) for j in range(4))
        raw = f * before[1] + i * g
        t = k.tanh(raw if clip is None else k.clip(raw, *clip))
        du = k.dot(k.narrow(d), v["p"].T) if "p" in v else d
        dc = due[1] + du * (o * (1 - t * t))
        dc = dc if clip is None else k.within(raw, dc, *clip)
        e = k.join(
            [dc * g * (i * (1 - i)), dc * before[1] * (f * (1 - f)), dc * i * (1 - g * g), du * t * (o * (1 - o))]
        )
        dh = k.dot(k.narrow(e), v["r"].T)
        return (k.join([e, d]) if "p" in v else e), [dh, dc * f]
    h = before[0]
    r, z, n = (part(gates, j) for j in range(3))
    dn, dz = d * (1 - z) * (1 - n * n), d * (h - n) * (z * (1 - z))
    if cell == "gru_after":
        dr, dq = dn * part(gates, 3) * (r * (1 - r)), dn * r
        e = k.join([dr, dz, dn, dq])
        return e, [d * z + k.dot(k.narrow(k.join([dr, dz, dq])), v["r"].T)]
    du = k.dot(k.narrow(dn), v["r"][:, 2 * hidden :].T)
    dr = du * h * (r * (1 - r))
    both = k.dot(k.narrow(k.join([dr, dz])), v["r"][:, : 2 * hidden].T)
    return k.join([dr, dz, dn]), [d * z + du * r + both]
