"""The recurrences of one layer: over its steps, their derivative along a tangent, and the transpose of that.

Letters: T steps, N sequences, G gates, H units, P columns of the state h (H without a projection), E those of e.

What enters a step from outside of the recurrence is a, of G H columns: x W and the biases, which a step computes
itself if it is given x and W. Its tangent e has a column
for each place where a tangent can enter: those of a; of "lstm" with a projection also those of h; of "gru" also those
of the n gate's recurrent part, which "reset after" multiplies. So tangents of the recurrent weights are products with
what they multiply in the forward pass, over all steps at once, and in the transpose so are these weights' gradients.

Arrays have the steps first, and no axes before them. Formulas are in the accumulator's precision; h, and what else is
multiplied by weights, is rounded to the weights' dtype.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.activation.formulas import activate
from jaxdnn._src.core import blending, products
from jaxdnn._src.core.rounding import nearest

GATES = {"lstm": 4, "gru_after": 3, "gru_before": 3, "tanh": 1, "relu": 1}
Values = Mapping[str, Any]


class Arithmetic(NamedTuple):
    """What the formulas are made of, beside sums.

    `dot` multiplies a (..., K) by b (K, M), of one dtype, and adds up wide; `times` is a product of elements; `narrow`
    rounds to a dtype.
    """

    dot: Callable[[Array, Array], Array]
    times: Callable[[Array, Array], Array]
    sigmoid: Callable[[Array], Array]
    tanh: Callable[[Array], Array]
    narrow: Callable[[Array, Any], Array]


def plain_dot(a: Array, b: Array) -> Array:
    """a b as XLA multiplies and adds."""
    wide = blending.accumulator(b.dtype)
    exact = lax.Precision.DEFAULT if b.dtype.itemsize <= 2 else lax.Precision.HIGHEST
    return products.dot(a, b, ((a.ndim - 1,), (0,)), precision=exact, preferred=wide)


PLAIN = Arithmetic(
    plain_dot,
    lambda a, b: a * b,
    lambda z: activate(z, "sigmoid", None),
    lambda z: activate(z, "tanh", None),
    nearest,
)


# ---- over the steps --------------------------------------------------------------------------------------------------


def forward(k: Arithmetic, spec: Any, v: Values, wanted: Collection[str]) -> dict[str, Array]:
    """y, of which steps behind a sequence's end repeat its state, the final h and c; and, if wanted, what derivatives
    take: gates (T, N, ...), the cells (T, N, H), and u, the operand of a second product (T, N, H)."""
    wide = blending.accumulator(spec.narrow)
    keep, start = _keeper(spec, v), _starter(spec)

    def step(state: dict[str, Array], at: Values) -> tuple[dict[str, Array], dict[str, Array]]:
        # Behind the end from 0: the slopes of what NaN or infinity gives are NaN, and derivatives 0 times them.
        known = keep(at, start(at, state), {name: jnp.zeros_like(x) for name, x in state.items()})
        new, saved = CELLS[spec.cell](k, spec, v, _entering(k, spec, v, at), {**known, "h": known["h"].astype(wide)})
        new = keep(at, {**new, "h": k.narrow(new["h"], spec.narrow)}, state)
        saved |= {"y": new["h"], **({"cells": new["c"]} if "c" in new else {})}
        return new, {name: x for name, x in saved.items() if name in wanted}

    arrays = {name: v[name] for name in ("a", "x", "resets") if name in v}
    return _scanned(step, {name: v[name] for name in ("h", "c") if name in v}, arrays, spec.reverse)


def _entering(k: Arithmetic, spec: Any, v: Values, at: Values) -> Array:
    """a of a step."""
    if "a" in at:
        return at["a"]
    a = k.dot(_narrow(k, spec, v, at["x"]), v["w"])
    return a + jnp.expand_dims(v["b"], 0) if "b" in v else a


def tangent(k: Arithmetic, spec: Any, v: Values, _: Any) -> dict[str, Array]:
    """The tangents of y and of the final states, along e and those of the initial ones."""
    wide = v["e"].dtype
    keep, start = _keeper(spec, v), _starter(spec)

    def step(state: dict[str, Array], at: Values) -> tuple[dict[str, Array], dict[str, Array]]:
        new = keep(at, TANGENTS[spec.cell](k, spec, v, at, start(at, state)), state)
        return new, {"y": k.narrow(new["h"], spec.narrow)}

    states = {name: v[name].astype(wide) for name in ("h", "c") if name in v}
    found = _scanned(step, states, {name: v[name] for name in ("e", *SAVED) if name in v}, spec.reverse)
    return {**found, "h": k.narrow(found["h"], spec.narrow)}


def backward(k: Arithmetic, spec: Any, v: Values, _: Any) -> dict[str, Array]:
    """The transpose: the cotangents of e and of the initial states, of those of y and of the final ones."""
    wide = v["gates"].dtype
    keep, start = _keeper(spec, v), _starter(spec)

    def step(state: dict[str, Array], at: Values) -> tuple[dict[str, Array], dict[str, Array]]:
        state = {**state, "h": state["h"] + at["y"].astype(wide)}
        new, e = TRANSPOSES[spec.cell](k, spec, v, at, state)
        return keep(at, start(at, new), state), keep(at, {"e": e}, {"e": jnp.zeros_like(e)})

    states = {name: v[name].astype(wide) for name in ("h", "c") if name in v}
    found = _scanned(step, states, {name: v[name] for name in ("y", *SAVED) if name in v}, not spec.reverse)
    return {**found, "h": k.narrow(found["h"], spec.narrow)}


SAVED = ("gates", "before", "cells_before", "resets")


def _keeper(spec: Any, v: Values) -> Callable[[Values, dict[str, Array], dict[str, Array]], dict[str, Array]]:
    """What selects the new values where a sequence has the step, and the old ones behind its end."""
    if not spec.ragged:
        return lambda at, new, old: new

    def keep(at: Values, new: dict[str, Array], old: dict[str, Array]) -> dict[str, Array]:
        live = jnp.expand_dims(at["time"] < v["lengths"], 1)
        return {name: jnp.where(live, new[name], old[name]) for name in new}

    return keep


def _starter(spec: Any) -> Callable[[Values, dict[str, Array]], dict[str, Array]]:
    """What sets states, or what is due to them, to 0 before a step with which a sequence begins anew."""
    if not spec.resets:
        return lambda at, state: state
    anew = lambda at, x: jnp.where(jnp.expand_dims(at["resets"], 1), jnp.zeros_like(x), x)
    return lambda at, state: {name: anew(at, x) for name, x in state.items()}


def _scanned(step: Callable[..., Any], state: Any, arrays: dict[str, Array], reverse: bool) -> dict[str, Array]:
    """The results of steps in order, and the last state."""
    steps = next(iter(arrays.values())).shape[0]
    time = jnp.arange(steps, dtype=jnp.int32)
    if steps == 1:  # a cell, or one step of decoding: without a loop
        state, every = step(state, {name: x[0] for name, x in {**arrays, "time": time}.items()})
        return {**{name: jnp.expand_dims(x, 0) for name, x in every.items()}, **state}
    state, every = lax.scan(step, state, {**arrays, "time": time}, reverse=reverse)
    return {**every, **state}


# ---- one step --------------------------------------------------------------------------------------------------------


def split(z: Array, hidden: int) -> list[Array]:
    """The parts of `hidden` columns."""
    return [z[..., start : start + hidden] for start in range(0, z.shape[-1], hidden)] if hidden else [z] * 4


def joined(*parts: Array) -> Array:
    return jnp.concatenate(parts, -1)


def _of_sigmoid(k: Arithmetic, s: Array) -> Array:
    return k.times(s, 1 - s)


def _of_tanh(k: Arithmetic, t: Array) -> Array:
    return 1 - k.times(t, t)


def _narrow(k: Arithmetic, spec: Any, v: Values, x: Array) -> Array:
    """x as a factor of weights, which may be given in a wider dtype than theirs."""
    return k.narrow(x, spec.narrow).astype(v["r"].dtype)


def _plain_cell(k: Arithmetic, spec: Any, v: Values, a: Array, state: Values) -> tuple[dict[str, Array], Any]:
    z = a + k.dot(_narrow(k, spec, v, state["h"]), v["r"])
    h = k.tanh(z) if spec.cell == "tanh" else jnp.where(z <= 0, jnp.zeros_like(z), z)
    return {"h": h}, {"gates": h}


def _plain_slope(k: Arithmetic, spec: Any, gates: Array) -> Array:
    return _of_tanh(k, gates) if spec.cell == "tanh" else (gates > 0).astype(gates.dtype)


def _plain_tangent(k: Arithmetic, spec: Any, v: Values, at: Values, d: Values) -> dict[str, Array]:
    return {"h": k.times(_plain_slope(k, spec, at["gates"]), at["e"] + k.dot(_narrow(k, spec, v, d["h"]), v["r"]))}


def _plain_transpose(k: Arithmetic, spec: Any, v: Values, at: Values, d: Values) -> tuple[dict[str, Array], Array]:
    e = k.times(_plain_slope(k, spec, at["gates"]), d["h"])
    return {"h": k.dot(_narrow(k, spec, v, e), v["r"].T)}, e


def _cell(k: Arithmetic, spec: Any, i: Array, f: Array, g: Array, before: Array) -> tuple[Array, Array | None]:
    """c, and whether it is within the clip's limits."""
    c = k.times(f, before) + k.times(i, g)
    if spec.clip is None:
        return c, None
    low, high = (jnp.asarray(limit, c.dtype) for limit in spec.clip)
    below, above = c < low, c > high
    return jnp.where(below, low, jnp.where(above, high, c)), ~(below | above)


def _inside(inside: Array | None, d: Array) -> Array:
    return d if inside is None else jnp.where(inside, d, jnp.zeros_like(d))


def _lstm_cell(k: Arithmetic, spec: Any, v: Values, a: Array, state: Values) -> tuple[dict[str, Array], Any]:
    z = split(a + k.dot(_narrow(k, spec, v, state["h"]), v["r"]), state["c"].shape[-1])
    i, f, g, o = k.sigmoid(z[0]), k.sigmoid(z[1]), k.tanh(z[2]), k.sigmoid(z[3])
    c, _ = _cell(k, spec, i, f, g, state["c"])
    u, saved = k.times(o, k.tanh(c)), {"gates": joined(i, f, g, o)}
    if not spec.projected:
        return {"h": u, "c": c}, saved
    u = _narrow(k, spec, v, u)
    return {"h": k.dot(u, v["p"]), "c": c}, {**saved, "u": u.astype(spec.narrow)}


def _lstm_tangent(k: Arithmetic, spec: Any, v: Values, at: Values, d: Values) -> dict[str, Array]:
    hidden = d["c"].shape[-1]
    i, f, g, o = split(at["gates"], hidden)
    c, inside = _cell(k, spec, i, f, g, at["cells_before"])
    t = k.tanh(c)
    di, df, dg, do = split(at["e"][..., : 4 * hidden] + k.dot(_narrow(k, spec, v, d["h"]), v["r"]), hidden)
    di, df, do = (k.times(_of_sigmoid(k, s), ds) for s, ds in ((i, di), (f, df), (o, do)))
    dg = k.times(_of_tanh(k, g), dg)
    dc = k.times(f, d["c"]) + k.times(at["cells_before"], df) + k.times(g, di) + k.times(i, dg)
    dc = _inside(inside, dc)
    du = k.times(t, do) + k.times(k.times(o, _of_tanh(k, t)), dc)
    dh = k.dot(_narrow(k, spec, v, du), v["p"]) + at["e"][..., 4 * hidden :] if spec.projected else du
    return {"h": dh, "c": dc}


def _lstm_transpose(k: Arithmetic, spec: Any, v: Values, at: Values, d: Values) -> tuple[dict[str, Array], Array]:
    i, f, g, o = split(at["gates"], d["c"].shape[-1])
    c, inside = _cell(k, spec, i, f, g, at["cells_before"])
    t = k.tanh(c)
    du = k.dot(_narrow(k, spec, v, d["h"]), v["p"].T) if spec.projected else d["h"]
    dc = _inside(inside, d["c"] + k.times(du, k.times(o, _of_tanh(k, t))))
    di = k.times(k.times(dc, g), _of_sigmoid(k, i))
    df = k.times(k.times(dc, at["cells_before"]), _of_sigmoid(k, f))
    dg = k.times(k.times(dc, i), _of_tanh(k, g))
    do = k.times(k.times(du, t), _of_sigmoid(k, o))
    e = joined(di, df, dg, do)
    new = {"h": k.dot(_narrow(k, spec, v, e), v["r"].T), "c": k.times(dc, f)}
    return new, joined(e, d["h"]) if spec.projected else e


def _gru_cell(k: Arithmetic, spec: Any, v: Values, a: Array, state: Values) -> tuple[dict[str, Array], Any]:
    h, hidden = state["h"], state["h"].shape[-1]
    a_r, a_z, a_n = split(a, hidden)[:3]
    if spec.cell == "gru_after":
        s_r, s_z, q = split(k.dot(_narrow(k, spec, v, h), v["r"]), hidden)[:3]
        q = q + jnp.expand_dims(v["q"], 0)
        r, z = k.sigmoid(a_r + s_r), k.sigmoid(a_z + s_z)
        n = k.tanh(a_n + k.times(r, q))
        saved = {"gates": joined(r, z, n, q)}
    else:
        s_r, s_z = split(k.dot(_narrow(k, spec, v, h), v["r"][:, : 2 * hidden]), hidden)[:2]
        r, z = k.sigmoid(a_r + s_r), k.sigmoid(a_z + s_z)
        u = _narrow(k, spec, v, k.times(r, h))
        n = k.tanh(a_n + k.dot(u, v["r"][:, 2 * hidden :]))
        saved = {"gates": joined(r, z, n), "u": u.astype(spec.narrow)}
    return {"h": k.times(1 - z, n) + k.times(z, h)}, saved


def _gru_tangent(k: Arithmetic, spec: Any, v: Values, at: Values, d: Values) -> dict[str, Array]:
    h, hidden = at["before"].astype(d["h"].dtype), d["h"].shape[-1]
    after = spec.cell == "gru_after"
    r, z, n, *q = split(at["gates"], hidden)[: 4 if after else 3]
    e_r, e_z, e_n, *e_q = split(at["e"], hidden)[: 4 if after else 3]
    s = split(k.dot(_narrow(k, spec, v, d["h"]), v["r"] if after else v["r"][:, : 2 * hidden]), hidden)
    dr, dz = k.times(_of_sigmoid(k, r), e_r + s[0]), k.times(_of_sigmoid(k, z), e_z + s[1])
    if after:
        dn = e_n + k.times(dr, q[0]) + k.times(r, e_q[0] + s[2])
    else:
        du = k.times(r, d["h"]) + k.times(dr, h)
        dn = e_n + k.dot(_narrow(k, spec, v, du), v["r"][:, 2 * hidden :])
    dn = k.times(_of_tanh(k, n), dn)
    return {"h": k.times(1 - z, dn) + k.times(h - n, dz) + k.times(z, d["h"])}


def _gru_transpose(k: Arithmetic, spec: Any, v: Values, at: Values, d: Values) -> tuple[dict[str, Array], Array]:
    h, hidden = at["before"].astype(d["h"].dtype), d["h"].shape[-1]
    after = spec.cell == "gru_after"
    r, z, n, *q = split(at["gates"], hidden)[: 4 if after else 3]
    dn = k.times(k.times(d["h"], 1 - z), _of_tanh(k, n))
    dz = k.times(k.times(d["h"], h - n), _of_sigmoid(k, z))
    kept = k.times(d["h"], z)
    if after:
        dr, dq = k.times(k.times(dn, q[0]), _of_sigmoid(k, r)), k.times(dn, r)
        return {"h": kept + k.dot(_narrow(k, spec, v, joined(dr, dz, dq)), v["r"].T)}, joined(dr, dz, dn, dq)
    du = k.dot(_narrow(k, spec, v, dn), v["r"][:, 2 * hidden :].T)
    dr = k.times(k.times(du, h), _of_sigmoid(k, r))
    both = k.dot(_narrow(k, spec, v, joined(dr, dz)), v["r"][:, : 2 * hidden].T)
    return {"h": kept + k.times(du, r) + both}, joined(dr, dz, dn)


CELLS: dict[str, Any] = dict.fromkeys(("tanh", "relu"), _plain_cell)
CELLS |= {"lstm": _lstm_cell, **dict.fromkeys(("gru_after", "gru_before"), _gru_cell)}
TANGENTS: dict[str, Any] = dict.fromkeys(("tanh", "relu"), _plain_tangent)
TANGENTS |= {"lstm": _lstm_tangent, **dict.fromkeys(("gru_after", "gru_before"), _gru_tangent)}
TRANSPOSES: dict[str, Any] = dict.fromkeys(("tanh", "relu"), _plain_transpose)
TRANSPOSES |= {"lstm": _lstm_transpose, **dict.fromkeys(("gru_after", "gru_before"), _gru_transpose)}
