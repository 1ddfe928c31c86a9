"""The primitives of recurrent layers: shapes, derivatives, vmap and sharding rules.

A layer is a product x W over all steps at once, and a recurrence. Of the first, the trilinear form F = Σ x w y of rows
x and y and a matrix w, each derivative is a primitive, linear in its two operands, whose transposes are the other two:

    rnn_product     y = x w             rnn_product_x   x = y wᵀ             rnn_product_w   w = Σ xᵀ y over the rows

x and w have the call's dtype, y that of the accumulator. Of the recurrence:

| op | operands | results |
|---|---|---|
| rnn | a, r, [p], [q], h, [c], [lengths], [resets] | y, h, [c] |
| rnn_saved | the same | and gates, [cells], [u] |
| rnn_tangent | e, h, [c]; r, [p], gates, [before], [cells_before], [lengths], [resets] | y, h, [c], tangents |
| rnn_backward | y, h, [c]; r, [p], gates, [before], [cells_before], [lengths], [resets] | e, h, [c], cotangents |

In place of a there may be x, w and [b], of which a is x w + b: what then multiplies the inputs is the engine's choice,
beside the loop or step by step. Arrays then have no axes in front.

The last two are linear in the operands before the semicolon, and each is the other's transpose. `steps` says what e is,
and why weights need not be among those: the tangents and gradients of r and p are products of the form above. Arrays
have any number of common axes in front of those in `AXES`.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core import blending, primitives, trees
from jaxdnn._src.core.compat import ad
from jaxdnn._src.core.partitioning import Axes, Factors, Run
from jaxdnn._src.core.primitives import bind
from jaxdnn._src.core.rounding import nearest
from jaxdnn._src.rnn import steps

# Of every array its last axes: t steps, n sequences, others of its own. Those without n are weights.
AXES = {
    **dict.fromkeys(("a", "x", "e", "y", "gates", "cells", "u", "before", "cells_before"), "tn."),
    **{"h": "n.", "c": "n.", "lengths": "n", "resets": "tn", "w": "..", "r": "..", "p": ".."},
    **{"b": ".", "q": "."},
}


@dataclasses.dataclass(frozen=True)
class RnnSpec:
    """What is known when a call is traced.

    Attributes:
      cell: a key of `steps.GATES`; reverse: whether the last step comes first.
      clip: the limits of an LSTM's cell; projected: whether it has a projection; ragged: whether there are lengths;
        resets: whether there are steps before which the states are set to 0.
      narrow: the dtype of weights, x and h.
      inputs: what enters a step: a, or x, w and perhaps b.
    """

    cell: str
    reverse: bool
    clip: tuple[float, float] | None
    projected: bool
    ragged: bool
    resets: bool
    narrow: Any
    engine: str | None
    level: str
    inputs: tuple[str, ...] = ("a",)

    @property
    def states(self) -> tuple[str, ...]:
        return ("h", "c") if self.cell == "lstm" else ("h",)

    @property
    def saved(self) -> tuple[str, ...]:
        return ("gates", *(["cells"] if self.cell == "lstm" else []), *(["u"] if self.multiplies_twice else []))

    @property
    def multiplies_twice(self) -> bool:
        """Whether a step has a second product, of what the first one gave."""
        return self.projected or self.cell == "gru_before"

    @property
    def _weights(self) -> tuple[str, ...]:
        return ("r", *(["p"] if self.projected else []))

    @property
    def marks(self) -> tuple[str, ...]:
        """The operands, behind all others, that have no derivative."""
        return (*(["lengths"] if self.ragged else []), *(["resets"] if self.resets else []))

    @property
    def operands(self) -> tuple[str, ...]:
        """Of `rnn` and `rnn_saved`."""
        return (*self.inputs, *self._weights, *(["q"] if self.cell == "gru_after" else []), *self.states, *self.marks)

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Of the two linear ops, the operands in which they are not linear."""
        before = ["cells_before"] if self.cell == "lstm" else ["before"] if self.cell.startswith("gru") else []
        return (*self._weights, "gates", *before, *self.marks)


def operands_of(op: str, spec: RnnSpec) -> tuple[str, ...]:
    if op in ("rnn", "rnn_saved"):
        return spec.operands
    return ("e" if op == "rnn_tangent" else "y", *spec.states, *spec.coefficients)


def results_of(op: str, spec: RnnSpec) -> tuple[str, ...]:
    first = "e" if op == "rnn_backward" else "y"
    return (first, *spec.states, *(spec.saved if op == "rnn_saved" else ()))


def hoisted(
    op: str, spec: RnnSpec, operands: Sequence[Any], product: Callable[..., Array]
) -> tuple[RnnSpec, tuple[Any, ...]]:
    """A call with a, the product of all steps' inputs, in place of x, w and b."""
    if op not in ("rnn", "rnn_saved") or spec.inputs == ("a",):
        return spec, tuple(operands)
    count = len(spec.inputs)
    x, w, *b = operands[:count]
    a = product(x, w)
    if b:
        a = a + trees.broadcast(jnp.expand_dims(b[0], (0, 1)), a, spec.level)
    return dataclasses.replace(spec, inputs=("a",)), (a, *operands[count:])


def formula(
    op: str, spec: RnnSpec, *operands: Array, k: steps.Arithmetic = steps.PLAIN, by_steps: bool = False
) -> tuple[Array, ...]:
    """An op of the recurrence in JAX's operations, which are differentiated further.

    by_steps: whether inputs that are given as x and w are multiplied in each step.
    """
    if not by_steps:
        spec, operands = hoisted(op, spec, operands, lambda x, w: k.dot(x.astype(w.dtype), w))
    names, wanted = operands_of(op, spec), results_of(op, spec)
    run = {"rnn_tangent": steps.tangent, "rnn_backward": steps.backward}.get(op, steps.forward)

    def one(*given: Array) -> tuple[Array, ...]:
        found = run(k, spec, dict(zip(names, given, strict=True)), wanted)
        return tuple(found[name] for name in wanted)

    for _ in range(operands[0].ndim - 3):
        one = jax.vmap(one)
    return one(*operands)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _results(op: str, spec: RnnSpec, *avals: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    v = dict(zip(operands_of(op, spec), avals, strict=True))
    r, first = v["r"], avals[0]
    leading, narrow, wide = first.shape[:-1], spec.narrow, blending.accumulator(spec.narrow)
    units = r.shape[-1] // steps.GATES[spec.cell]
    width = {"y": r.shape[-2], "cells": units, "u": units, "gates": units * steps.GATES[spec.cell]}
    width["e"] = width["gates"] + (r.shape[-2] if spec.projected else units if spec.cell == "gru_after" else 0)
    if spec.cell == "gru_after":
        width["gates"] = width["e"]
    dtypes = {name: narrow if name in ("y", "h", "u") else wide for name in ("e", *AXES)}
    shapes = {name: (*leading, width[name]) for name in width} | {name: v[name].shape for name in spec.states}
    return tuple(jax.ShapeDtypeStruct(shapes[name], dtypes[name]) for name in results_of(op, spec))


# ---- derivatives -----------------------------------------------------------------------------------------------------


def _jvp(spec: RnnSpec, primals: Any, tangents: Any) -> tuple[Any, Any]:
    count = len(results_of("rnn", spec))
    if all(isinstance(t, ad.Zero) for t in tangents):
        found = bind("rnn", *primals, spec=spec)
        return found, tuple(map(primitives.zero_tangent, found))
    v = dict(zip(spec.operands, primals, strict=True))
    d = {name: t for name, t in zip(spec.operands, tangents, strict=True) if not isinstance(t, ad.Zero)}
    every = bind("rnn_saved", *primals, spec=spec)
    found, saved = every[:count], dict(zip(spec.saved, every[count:], strict=True))
    y = every[0]
    if "x" in v:
        v["a"] = jax.ShapeDtypeStruct((*y.shape[:-1], v["w"].shape[-1]), saved["gates"].dtype)
        d |= _of_inputs(spec, v, d)
    v |= saved | {"before": before(spec, v, y, v["h"])}
    if "cells" in saved:
        v["cells_before"] = before(spec, v, saved["cells"], v["c"])
    e = _entering(spec, v, d)
    initial = [d[name] if name in d else jnp.zeros_like(v[name]) for name in spec.states]
    along = bind("rnn_tangent", e, *initial, *(v[name] for name in spec.coefficients), spec=spec)
    return found, along


def before(spec: RnnSpec, v: dict[str, Any], after: Array, initial: Array) -> Array:
    """The states before each step, from those after it; 0 behind a sequence's end, and before what begins anew."""
    axis = after.ndim - 3
    if not after.shape[axis]:
        return after
    first, last = jnp.expand_dims(initial, axis), after.shape[axis] - 1
    if spec.reverse:
        found = lax.concatenate([lax.slice_in_dim(after, 1, last + 1, axis=axis), first], axis)
    else:
        found = lax.concatenate([first, lax.slice_in_dim(after, 0, last, axis=axis)], axis)
    if spec.ragged:
        time = lax.broadcasted_iota(jnp.int32, after.shape, axis)
        live = time < jnp.expand_dims(v["lengths"], (axis, after.ndim - 1))
        found = jnp.where(live, found, jnp.zeros_like(found))
    if spec.resets:
        found = jnp.where(jnp.expand_dims(v["resets"], after.ndim - 1), jnp.zeros_like(found), found)
    return found


def _of_inputs(spec: RnnSpec, v: dict[str, Any], d: dict[str, Any]) -> dict[str, Array]:
    """The tangent of a, of those of x, w and b; nothing if there are none."""
    terms = [multiply(spec, d["x"], v["w"])] if "x" in d else []
    terms += [multiply(spec, v["x"], d["w"])] if "w" in d else []
    if "b" in d:
        none = jnp.zeros(v["a"].shape, v["a"].dtype)
        terms.append(trees.broadcast(jnp.expand_dims(d["b"], (0, 1)), none, spec.level))
    return {"a": ft.reduce(jnp.add, terms)} if terms else {}


def _entering(spec: RnnSpec, v: dict[str, Any], d: dict[str, Any]) -> Array:
    """e: what enters each step from the tangents of all but the states."""
    hidden = v["r"].shape[-1] // steps.GATES[spec.cell]
    product = lambda x, w: multiply(spec, x, w)
    parts = [d.get("a")]
    if "r" in d:
        if spec.cell == "gru_before":
            dr = d["r"]
            both = product(v["before"], dr[..., : 2 * hidden]), product(v["u"], dr[..., 2 * hidden :])
            parts.append(jnp.concatenate(both, -1))
        else:
            parts.append(product(v["before"], d["r"]))
    if spec.cell == "gru_after":
        return _entering_after(spec, v, d, parts, hidden)
    e = _sum(parts, v["a"])
    if spec.projected:
        into = product(v["u"], d["p"]) if "p" in d else jnp.zeros((*e.shape[:-1], v["p"].shape[-1]), e.dtype)
        e = jnp.concatenate([e, into], -1)
    return e


def _entering_after(spec: RnnSpec, v: dict[str, Any], d: dict[str, Any], parts: list[Any], hidden: int) -> Array:
    """Where the n gate's recurrent part is apart, it takes the tangents of its weights and of its bias."""
    of_a, *of_r = parts
    none = jnp.zeros((*v["a"].shape[:-1], hidden), v["a"].dtype)
    of_a = jnp.zeros_like(v["a"]) if of_a is None else of_a
    e = jnp.concatenate([of_a, none], -1)
    for s in of_r:
        e = e + jnp.concatenate([s[..., : 2 * hidden], none, s[..., 2 * hidden :]], -1)
    if "q" in d:
        q = trees.broadcast(jnp.expand_dims(d["q"], (-2, -3)), none, spec.level)
        e = e + jnp.concatenate([jnp.zeros_like(v["a"]), q], -1)
    return e


def _sum(parts: Sequence[Array | None], like: Array) -> Array:
    given = [part for part in parts if part is not None]
    return ft.reduce(jnp.add, given) if given else jnp.zeros_like(like)


def _saved_jvp(spec: RnnSpec, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found = bind("rnn_saved", *primals, spec=spec)
    terms = primitives.along_others(ft.partial(formula, "rnn_saved", spec), primals, tangents, 0, len(spec.marks))
    return found, primitives.added(found, terms)


def _linear_jvp(op: str, spec: RnnSpec, primals: Any, tangents: Any) -> tuple[Any, Any]:
    found, linear = bind(op, *primals, spec=spec), 1 + len(spec.states)
    own = tangents[:linear]
    terms = []
    if not all(isinstance(t, ad.Zero) for t in own):
        terms = [bind(op, *map(ad.instantiate_zeros, own), *primals[linear:], spec=spec)]
    terms += primitives.along_others(ft.partial(formula, op, spec), primals, tangents, linear, len(spec.marks))
    return found, primitives.added(found, terms)


def _linear_transpose(other: str, spec: RnnSpec, ct: Any, *operands: Any) -> list[Any]:
    linear = 1 + len(spec.states)
    if any(map(primitives.is_linear_operand, operands[linear:])):
        raise NotImplementedError("A derivative of a recurrent layer is linear along its tangents alone.")
    found = bind(other, *map(ad.instantiate_zeros, ct), *operands[linear:], spec=spec)
    own = [g if primitives.is_linear_operand(v) else None for v, g in zip(operands, found, strict=False)]
    return [*own, *[None] * (len(operands) - linear)]


# ---- vmap and sharding -----------------------------------------------------------------------------------------------


def _batch(op: str, spec: RnnSpec, operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    """With weights that are not mapped, a mapped axis is more sequences; else all arrays have one more axis."""
    names = operands_of(op, spec)
    if any(d is not None and "n" not in AXES[name] for name, d in zip(names, dims, strict=True)):
        if names[0] == "x":
            return _batch(op, *_hoisted_batch(op, spec, operands, dims))
        return primitives.batch_leading(op, spec, operands, dims)
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)

    def merged(name: str, x: Array, dim: int | None) -> Array:
        if "n" not in AXES[name]:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        axis = _sequences(name, x)
        x = jnp.moveaxis(x, 0, axis - 1)
        return x.reshape(*x.shape[: axis - 1], size * x.shape[axis], *x.shape[axis + 1 :])

    def parted(name: str, x: Array) -> Array:
        axis = _sequences(name, x)
        x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    found = bind(op, *map(merged, names, operands, dims), spec=spec)
    results = tuple(map(parted, results_of(op, spec), found))
    return results, (0,) * len(results)


def _hoisted_batch(op: str, spec: RnnSpec, operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    """A mapped call, and its dimensions, with a in place of x, w and b."""
    count = len(spec.inputs)
    product = ft.partial(multiply, spec)
    own, rest = tuple(dims[:count]), operands[count:]
    enter = lambda *inputs: hoisted(op, spec, inputs, product)[1][0]
    mapped = any(d is not None for d in own)
    a = (jax.vmap(enter, own) if mapped else enter)(*operands[:count])
    return dataclasses.replace(spec, inputs=("a",)), (a, *rest), (0 if mapped else None, *dims[count:])


def _sequences(name: str, x: Array) -> int:
    """The axis of sequences."""
    return x.ndim - len(AXES[name]) + AXES[name].index("n")


def _factors(op: str, spec: RnnSpec, *avals: Any) -> Factors:
    """Sequences are independent; a step needs all units."""
    lead = tuple(f"l{i}" for i in range(len(avals[0].shape) - 3))
    own = lambda name, tag: tuple(axis if axis in "tn" else f"{tag}d{j}" for j, axis in enumerate(AXES[name]))
    dims = lambda names, kind: tuple((*lead, *own(name, f"{kind}{i}")) for i, name in enumerate(names))
    return Factors(dims(operands_of(op, spec), "o"), dims(results_of(op, spec), "r"), (*lead, "n"))


_RULES: dict[str, dict[str, Any]] = {
    "rnn": {"jvp": _jvp},
    "rnn_saved": {"jvp": _saved_jvp, "words": "The forward pass of a recurrent layer that is differentiated"},
    "rnn_tangent": {
        "jvp": ft.partial(_linear_jvp, "rnn_tangent"),
        "transpose": ft.partial(_linear_transpose, "rnn_backward"),
        "words": "The derivative of a recurrent layer along a tangent",
    },
    "rnn_backward": {
        "jvp": ft.partial(_linear_jvp, "rnn_backward"),
        "transpose": ft.partial(_linear_transpose, "rnn_tangent"),
        "words": "The gradient of a recurrent layer",
    },
}
for _op, _rules in _RULES.items():
    primitives.define(
        _op,
        **_rules,
        results=ft.partial(_results, _op),
        batch=ft.partial(_batch, _op),
        factors=ft.partial(_factors, _op),
        many=True,
    )


# ---- products over all steps -----------------------------------------------------------------------------------------

# Of each derivative of the form, by its result: its operands, in their order.
OPERANDS = {"y": ("x", "w"), "x": ("y", "w"), "w": ("x", "y")}
PRODUCTS = {"y": "rnn_product", "x": "rnn_product_x", "w": "rnn_product_w"}


@dataclasses.dataclass(frozen=True)
class ProductSpec:
    """What is known when a call is traced.

    Attributes:
      rows: the number of axes of rows; narrow: the dtype of x and w; wide: whether the result is not rounded to it.
    """

    rows: int
    narrow: Any
    wide: bool
    engine: str | None
    level: str


def multiply(spec: RnnSpec, x: Array, w: Array, *, run: Callable[..., Array] = bind) -> Array:
    """x w, of rows along two axes of x, for a call with the engine and the level of `spec`; `run` binds."""
    own = ProductSpec(2, spec.narrow, True, spec.engine, spec.level)
    return run("rnn_product", x, w, spec=own)


def _product_dims(result: str, spec: ProductSpec, *avals: Any) -> dict[str, tuple[str, ...]]:
    """The factors of the axes: leading ones of all arrays, m of rows, c and k."""
    rank = len(avals[0].shape) - 1  # the first operand has rows
    lead = tuple(f"l{i}" for i in range(rank - spec.rows))
    rows = (*lead, *(f"m{i}" for i in range(spec.rows)))
    return {"x": (*rows, "c"), "y": (*rows, "k"), "w": (*lead, "c", "k")}


def product_result(result: str, spec: ProductSpec, *avals: Any) -> jax.ShapeDtypeStruct:
    dims = _product_dims(result, spec, *avals)
    sizes: dict[str, Any] = {}
    for name, aval in zip(OPERANDS[result], avals, strict=True):
        sizes |= dict(zip(dims[name], aval.shape, strict=True))
    dtype = blending.accumulator(spec.narrow) if spec.wide else spec.narrow
    return jax.ShapeDtypeStruct(tuple(sizes[name] for name in dims[result]), dtype)


def _product_jvp(result: str, spec: ProductSpec, primals: Any, tangents: Any) -> tuple[Array, Any]:
    a, b = primals
    run = ft.partial(bind, PRODUCTS[result], spec=spec)
    y = run(a, b)
    terms = [] if isinstance(tangents[0], ad.Zero) else [run(tangents[0], b)]
    terms += [] if isinstance(tangents[1], ad.Zero) else [run(a, tangents[1])]
    return y, primitives.added(y, terms)


def _product_transpose(result: str, spec: ProductSpec, ct: Array, a: Any, b: Any) -> list[Array | None]:
    """The cotangent of the operand that is undefined: the form's derivative in it, of the other one and of `ct`."""
    unknown = 0 if primitives.is_linear_operand(a) else 1
    wanted, known = OPERANDS[result][unknown], OPERANDS[result][1 - unknown]
    given = {result: ct, known: (b, a)[unknown]}
    spec = dataclasses.replace(spec, wide=wanted == "y")
    found = bind(PRODUCTS[wanted], *(given[name] for name in OPERANDS[wanted]), spec=spec)
    return [found if i == unknown else None for i in range(2)]


def _product_batch(result: str, spec: ProductSpec, operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    """One more axis of rows where the matrix is not mapped, and else one of all arrays."""
    which = dict(zip(OPERANDS[result], dims, strict=True))
    if result == "w" or which["w"] is not None:
        return primitives.batch_leading(PRODUCTS[result], spec, operands, dims)
    rows, w = operands
    lead = w.ndim - 2
    spec = dataclasses.replace(spec, rows=spec.rows + 1)
    return bind(PRODUCTS[result], jnp.moveaxis(rows, dims[0], lead), w, spec=spec), lead


def _product_factors(result: str, spec: ProductSpec, *avals: Any) -> Factors:
    dims = _product_dims(result, spec, *avals)
    every = dict.fromkeys(name for v in dims.values() for name in v)
    summed = tuple(name for name in every if name not in dims[result])
    free = tuple(name for name in every if name in dims[result])
    operands = tuple(dims[name] for name in OPERANDS[result])
    local = ft.partial(_on_device, result, spec, summed)
    return Factors(operands, (dims[result],), free, summed=summed, local=local)


def _on_device(
    result: str, spec: ProductSpec, summed: tuple[str, ...], run: Run, axes: Axes, a: Array, b: Array
) -> Array:
    """A device's part, of whose sum over the mesh the result is the rounding."""
    names = tuple(n for factor, devices in axes.items() if factor in summed for n in devices.names)
    if not names:
        return run(spec, a, b)
    total = lax.psum(run(dataclasses.replace(spec, wide=True), a, b), names)
    return total if spec.wide else nearest(total, spec.narrow)


for _result, _name in PRODUCTS.items():
    primitives.define(
        _name,
        results=ft.partial(product_result, _result),
        jvp=ft.partial(_product_jvp, _result),
        transpose=ft.partial(_product_transpose, _result),
        batch=ft.partial(_product_batch, _result),
        factors=ft.partial(_product_factors, _result),
        words="A product of a recurrent layer with its weights",
    )
