"""What recurrent layers compute backward, in data and in weights, from what a forward pass saved.

The primitive `rnn_backward` gives e, what is due to each place where something entered a step (`steps` says which). All
else are products over all steps at once, and sums: in the order, and with the roundings, of what JAX derives.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from jaxdnn._src.core import blending, checks, primitives, trees
from jaxdnn._src.core.rounding import at_edges, nearest
from jaxdnn._src.rnn import layers, primitive
from jaxdnn._src.rnn.arguments import Layer, of_direction, of_layer
from jaxdnn._src.rnn.layers import Stack, merged, parted
from jaxdnn._src.rnn.primitive import ProductSpec
from jaxdnn._src.rnn.steps import GATES

Arrays = dict[str, Array]
WEIGHTS = ("w", "r", "bias", "recurrent_bias", "projection")


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward pass, and what a backward pass starts from.

    Attributes:
      calls: of each layer, and in it of each direction.
      saved: the same, by name; e among them if a backward pass was.
      dy: the cotangent of the last layer's y, (T, N, columns); final: those of the final states, of each layer by name.
    """

    stack: Stack
    calls: list[list[Layer]]
    saved: list[list[Arrays]]
    dy: Array
    final: list[dict[str, Any]]


def read(stack: Stack, dy: Any, final: dict[str, Any], saved: Any) -> Pass:
    """Reads the cotangents and what was saved, which is computed if it is None."""
    left = None if saved is None else _saved(stack, saved)
    calls, kept, y = [], [], stack.x
    for i in range(len(stack.weights)):
        own = stack.calls(i, stack.thinned(i, y))
        found = [layers.run(call, True)[2] if left is None else _read_saved(call, i, left) for call in own]
        y = layers.joined(own, [v["y"] for v in found], 0.0)
        calls.append(own)
        kept.append(found)
    dy = checks.array("dy", dy)
    checks.dtype("dy", dy, (stack.x.dtype,))
    checks.shape("dy", dy, tuple(stack.turned(y).shape), "that of y")
    dy = at_edges(calls[0][0].spec.level, stack.turned(dy))
    each = lambda i: {n: v if stack.single else of_layer(n, v, i, len(calls)) for n, v in final.items()}
    return Pass(stack, calls, kept, dy, [each(i) for i in range(len(calls))])


def _saved(stack: Stack, saved: Any) -> Iterator[tuple[bool, Any]]:
    """Each array of `saved`, with whether e is among them."""
    if not checks.is_sequence(saved):
        raise ValueError(f"`saved` must be what a pass with `return_saved` returned, got {checks.shown(saved)}.")
    base = 3 if stack.cell == "lstm" else 2
    twice = [stack.cell == "gru_before" or given.get("projection") is not None for given in stack.weights]
    count = sum(base + two for two in twice) * len(stack.directions)
    more = count + len(twice) * len(stack.directions)
    if len(saved) not in (count, more):
        raise ValueError(
            f"`saved` must have the {count} arrays of a forward pass through these layers, or the {more} of one and a "
            f"backward pass, got {len(saved)}."
        )
    return iter([(len(saved) == more, v) for v in saved])


def _read_saved(call: Layer, i: int, left: Iterator[tuple[bool, Any]]) -> Arrays:
    spec, found, names = call.spec, {}, ["y", *call.spec.saved]
    steps, batch = call.x.shape[:2]
    gates, units = GATES[spec.cell], call.weights["r"].shape[-1] * (call.heads or 1) // GATES[spec.cell]
    columns, four = call.initial["h"].shape[1], (gates + (spec.cell == "gru_after")) * units
    widths = {"y": columns, "gates": four, "cells": units, "u": units}
    widths["e"] = four + columns if spec.projected else four
    for name in names:
        with_e, value = next(left)
        if name == names[0] and with_e:
            names.append("e")
        value = checks.array("saved", value)
        heads = [] if call.heads is None or name == "y" else [call.heads]
        shape = (steps, batch, *heads, widths[name] // (call.heads or 1) if heads else widths[name])
        narrow = name in ("y", "u")
        checks.shape("saved", value, shape, f"for {name} of layer {i}")
        checks.dtype("saved", value, (spec.narrow if narrow else blending.accumulator(spec.narrow),))
        found[name] = at_edges(spec.level, value)
    return found


def backward(given: Pass, weights: bool) -> tuple[Array, list[list[dict[str, Any]]]]:
    """dx, (T, N, I), and of each layer and direction e and the cotangents of the initial states, by name.

    With `weights` the cotangents of weights in place of dx and of those of states, of the e that was saved if it was.
    """
    dy, found = given.dy, []
    for i in range(len(given.calls) - 1, -1, -1):
        own = given.calls[i]
        dy = _live(own[0], dy)
        size = dy.shape[-1] // len(own)
        parts = [dy[..., j * size : (j + 1) * size] for j in range(len(own))]
        each = []
        for j, (call, saved) in enumerate(zip(own, given.saved[i], strict=True)):
            final = given.final[i]
            if len(own) == 2:
                final = {name: of_direction(name, v, j) for name, v in final.items()}
            known = weights and "e" in saved
            e, states = (saved["e"], {}) if known else _of_steps(call, saved, parts[j], final)
            passed = not known and (i > 0 or not weights)
            each.append({"e": e, **states, **_of_products(call, saved, e, weights, passed)})
        found.append(each)
        if "x" in each[0]:
            dy = given.stack.thinned(i, ft.reduce(jnp.add, [v["x"] for v in each]))
    return dy, found[::-1]


def _live(call: Layer, dy: Array) -> Array:
    """dy of the steps that there are: behind a sequence's end y is a constant."""
    if call.lengths is None:
        return dy
    return jnp.where(jnp.expand_dims(layers.live(call.x, call.lengths), 2), dy, jnp.zeros_like(dy))


def _cotangent(name: str, value: Any, like: Array, kind: Any, level: str) -> Array:
    """That of a final state, which may be None."""
    if value is None:
        return jnp.zeros_like(like)
    value = checks.array(name, value)
    checks.dtype(name, value, (kind,))
    checks.shape(name, value, tuple(like.shape), "one row for every sequence")
    return at_edges(level, value).astype(like.dtype)


def _of_steps(call: Layer, saved: Arrays, dy: Array, final: dict[str, Any]) -> tuple[Array, Arrays]:
    """e, and the cotangents of the initial states."""
    spec, initial = call.spec, _initial(call, saved["y"])
    kinds = zip(spec.states, call.final, strict=True)
    states = {n: _cotangent(f"d{n}", final.get(f"d{n}"), initial[n], kind, spec.level) for n, kind in kinds}

    def one(v: Arrays) -> dict[str, Array]:
        v = v | _before(spec, v)
        operands = (v[name] for name in ("dy", *(f"d{n}" for n in spec.states), *spec.coefficients))
        found = primitives.call("rnn_backward", *operands, spec=spec)
        return dict(zip(("e", *(f"{name}0" for name in spec.states)), found, strict=True))

    given = {"dy": dy, "y": saved["y"], **initial, **{f"d{n}": v for n, v in states.items()}}
    found = _each_head(call, one, given, saved, {"e": None, "h0": 1, "c0": 1})
    kinds = zip(spec.states, call.final, strict=True)
    return found["e"], {f"{n}0": at_edges(spec.level, nearest(found[f"{n}0"], kind)) for n, kind in kinds}


def _initial(call: Layer, y: Array) -> Arrays:
    """The initial states, sharded as those of all steps are, if shardings are in types."""
    sharding, states = jax.typeof(y).sharding, layers.initial(call)
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return states
    placed = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return {name: reshard(v, placed) for name, v in states.items()}


def _before(spec: Any, v: Arrays) -> Arrays:
    """The states before each step."""
    found = {"before": primitive.before(spec, v, v["y"], v["h"])}
    return found | ({"cells_before": primitive.before(spec, v, v["cells"], v["c"])} if "c" in v else {})


def _of_products(call: Layer, saved: Arrays, e: Array, weights: bool, data: bool) -> dict[str, Array]:
    """The cotangents of what there is of the weights, and of x, as "x", if they are asked for."""
    spec, given = call.spec, call.weights
    hidden = given["r"].shape[-1] // GATES[spec.cell]
    product = lambda x, y: primitives.call("rnn_product_w", x, y, spec=_product(spec))

    def one(v: Arrays) -> dict[str, Array]:
        e, wide = v["e"], GATES[spec.cell] * hidden
        found = {"a": e[..., :wide]}
        if not weights:
            return found
        before = primitive.before(spec, v, v["y"], v["h"])
        if spec.cell == "gru_after":
            found["q"] = e[..., wide:]
            found["r"] = product(before, jnp.concatenate([e[..., : 2 * hidden], found["q"]], -1))
        elif spec.cell == "gru_before":
            both = product(before, e[..., : 2 * hidden]), product(v["u"], e[..., 2 * hidden :])
            found["r"] = jnp.concatenate(both, -1)
        else:
            found["r"] = product(before, found["a"])
        return found | ({"projection": product(v["u"], e[..., wide:])} if spec.projected else {})

    parts = {"a": GATES[spec.cell]} | ({"q": 1, "r": 0, "projection": 0} if weights else {})
    found = _each_head(call, one, {"y": saved["y"], **_initial(call, saved["y"])}, saved | {"e": e}, parts)
    a, x = found.pop("a"), layers.inputs(call)
    if weights:
        found |= _of_biases(call, a, found.pop("q", None))
        found |= {"w": product(x, a)} if "w" in given else {}
    if data and "w" in given:
        found["x"] = primitives.call("rnn_product_x", a, given["w"], spec=_product(spec))
    elif data:
        size = x.shape[-1]
        each = [a[..., j * size : (j + 1) * size] for j in range(GATES[spec.cell])]
        found["x"] = nearest(ft.reduce(jnp.add, each), x.dtype)
    return {name: at_edges(spec.level, nearest(v, (given | {"x": x})[name].dtype)) for name, v in found.items()}


def _product(spec: Any) -> ProductSpec:
    return ProductSpec(2, spec.narrow, False, spec.engine, spec.level)


def _of_biases(call: Layer, a: Array, q: Array | None) -> Arrays:
    """The sums over all rows of what is due to biases, of which the reset gate of "after" multiplies a part."""
    spec = call.spec
    given = [name for name in ("bias", "recurrent_bias") if name in call.weights]
    total = _summed(a, spec.level) if given else a
    found = dict.fromkeys(given, total)
    if q is not None and "recurrent_bias" in found:
        kept = total.shape[0] // 3 * 2
        found["recurrent_bias"] = jnp.concatenate([total[:kept], _summed(q, spec.level)])
    return found


def _summed(rows: Array, level: str) -> Array:
    """The transpose of a broadcast along steps and sequences."""
    like = jax.ShapeDtypeStruct(rows.shape[2:], rows.dtype)
    spread = lambda b: trees.broadcast(jnp.expand_dims(b, (0, 1)), rows, level)
    return jax.linear_transpose(spread, like)(rows)[0]


def _each_head(
    call: Layer,
    one: Callable[[Arrays], dict[str, Array]],
    given: Arrays,
    saved: Arrays,
    parts: Mapping[str, int | None],
) -> dict[str, Array]:
    """What `one` returns of one head, for all: `given` has the columns of all heads beside each other, `saved` an axis
    of heads. Of the results some have heads beside each other too, in a number of parts; a matrix for each is 0 of
    them, and None keeps the axis of what is saved."""
    own, weights = saved | given, {"r": call.weights["r"]}
    weights |= {"p": call.weights["projection"]} if call.spec.projected else {}
    marks = layers.marks(call)
    if call.heads is None:
        return one(own | weights | marks)
    heads = call.heads
    own = {n: parted(v, 1, heads) if n in given else v for n, v in own.items()}

    apart = lambda v, count: v.reshape(*v.shape[:-1], count, v.shape[-1] // count)

    def inner(own: Arrays, weights: Arrays) -> dict[str, Array]:
        flat = {n: merged(v) if n in given else v for n, v in own.items()}
        found = one(flat | weights | marks)
        return {n: apart(v, parts[n]) if parts[n] else v for n, v in found.items()}

    axes = {n: -2 for n in own}, dict.fromkeys(weights, 0)
    out = {n: 0 if parts[n] == 0 else -2 for n in _names(call, parts)}
    found = jax.vmap(inner, axes, out)(own, weights)
    return {n: merged(v, 3) if parts[n] else v for n, v in found.items()}


def _names(call: Layer, parts: Mapping[str, Any]) -> Sequence[str]:
    """Those of the results that a cell has."""
    absent = {"q": call.spec.cell != "gru_after", "projection": not call.spec.projected, "c0": call.spec.cell != "lstm"}
    return [name for name in parts if not absent.get(name, False)]


# ---- results ---------------------------------------------------------------------------------------------------------


def of_data(given: Pass) -> tuple[Array, list[Any], tuple[Array, ...]]:
    """dx, the cotangents of the initial states as these are given, and what was saved, e among it."""
    dx, found = backward(given, weights=False)
    states = [_as_given(given.stack, found, f"{name}0") for name in given.calls[0][0].spec.states]
    pairs = zip(given.saved, found, strict=True)
    every = [kept | {"e": own["e"]} for saved, each in pairs for kept, own in zip(saved, each, strict=True)]
    return given.stack.turned(dx), states, tuple(v for kept in every for v in kept.values())


def of_weights(given: Pass) -> tuple[Any, ...]:
    """The cotangents of the weights that are given, in the order of `WEIGHTS`."""
    _, found = backward(given, weights=True)
    names = [name for name in WEIGHTS if any(own.get(name) is not None for own in given.stack.weights)]
    return tuple(_as_given(given.stack, found, name) for name in names)


def _as_given(stack: Stack, found: list[list[dict[str, Any]]], name: str) -> Any:
    """An array, with both directions stacked, or a tuple of them and of None, one for each layer."""
    of = lambda each: jnp.stack(each) if len(each) == 2 else each[0]
    layers = [of([own[name] for own in each]) if name in each[0] else None for each in found]
    return layers[0] if stack.single else tuple(layers)
