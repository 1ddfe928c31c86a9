"""What recurrent layers compute, forward: one behind another, in one direction or both, and heads beside each other."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core import blending, checks, engines, primitives, trees
from jaxdnn._src.core.determinism import is_fixed
from jaxdnn._src.core.rounding import at_edges, nearest
from jaxdnn._src.dropout.api import dropout
from jaxdnn._src.rnn import arguments
from jaxdnn._src.rnn.arguments import DIRECTIONS, LAYOUTS, Layer
from jaxdnn._src.rnn.primitive import RnnSpec, multiply
from jaxdnn._src.rnn.steps import GATES

APART = 2**48  # elements of a dropout key's count from one layer to the next


@dataclasses.dataclass(frozen=True)
class Stack:
    """The layers of a call. x is (T, N, I), resets are (T, N), whatever the layout.

    Attributes:
      weights, initial: of each layer arrays and None by name.
      single: whether the call has one layer, that is in no sequence of them.
      rate, key: of the dropout between layers.
      options: direction, clip, engine and determinism.
    """

    cell: str
    x: Array
    weights: list[dict[str, Any]]
    initial: list[dict[str, Any]]
    single: bool
    lengths: Any
    resets: Array | None
    layout: str
    rate: float
    key: Any
    options: dict[str, Any]

    @property
    def directions(self) -> tuple[str, ...]:
        own = self.options["direction"]
        return DIRECTIONS[:2] if own == "bidirectional" else (own,)

    def calls(self, i: int, x: Array) -> list[Layer]:
        """Layer i on x, once for each direction."""
        found, two = [], len(self.directions) == 2
        own = {name: v for name, v in self.options.items() if name != "direction"} | {"layout": self.layout}
        try:
            for j, one in enumerate(self.directions):
                of = lambda given, j=j: {n: arguments.of_direction(n, v, j) if two else v for n, v in given.items()}
                given = of(self.weights[i]), of(self.initial[i])
                reverse = one == "reverse"
                found.append(arguments.read(self.cell, x, *given, self.lengths, self.resets, reverse=reverse, **own))
        except (ValueError, TypeError) as error:
            raise error if self.single else type(error)(f"In layer {i}: {error}") from None
        return found

    def thinned(self, i: int, y: Array) -> Array:
        """What layer i reads of y, the result of the one before it; as a function of y it is its own transpose."""
        if not i or not self.rate:
            return y
        y = jnp.swapaxes(y, 0, 1)
        y = dropout(y, self.key, rate=self.rate, offset=(i - 1) * APART, determinism=self.options["determinism"])
        return jnp.swapaxes(y, 0, 1)

    def turned(self, y: Array) -> Array:
        """An array of steps and sequences in the call's layout; from it back too."""
        return y if self.layout == "TNC" else jnp.swapaxes(y, 0, 1)


def read(
    cell: str, x: Any, weights: Mapping[str, Any], initial: Mapping[str, Any], *, lengths: Any, resets: Any,
    layout: Any, dropout: Any, dropout_key: Any, **options: Any,
) -> Stack:  # fmt: skip
    """The layers of a call, of which `Stack.calls` reads the arrays."""
    checks.choice("layout", layout, LAYOUTS)
    checks.choice("direction", options["direction"], DIRECTIONS)
    rate = checks.as_float("dropout", dropout)
    if not 0 <= rate <= 1:
        raise ValueError(f"`dropout` must be from 0 to 1, got {rate!r}.")
    if rate and dropout_key is None:
        raise ValueError(f"`dropout_key` must be given with a `dropout` of {rate!r}, got None.")
    x = arguments.sequences(x, layout)
    x = x if layout == "TNC" else jnp.swapaxes(x, 0, 1)
    resets = None if resets is None else arguments.read_resets(resets, x, layout)
    single = not isinstance(weights["r"], tuple | list)
    count = 1 if single else len(weights["r"])
    if not count:
        raise ValueError("`r` must have a matrix for every layer, of which there must be one, got none.")
    each = lambda given, i: {n: v if single else arguments.of_layer(n, v, i, count) for n, v in given.items()}
    of_weights, of_states = ([each(given, i) for i in range(count)] for given in (weights, initial))
    return Stack(cell, x, of_weights, of_states, single, lengths, resets, layout, rate, dropout_key, options)


def forward(stack: Stack, fill: Any, saving: bool) -> tuple[Any, ...]:
    """y of the last layer, the final states, of each a tuple with one for every layer if they are in a sequence, and a
    tuple of what derivatives need, empty if it is not asked for."""
    fill = checks.as_float("fill", fill)
    y, states, saved = stack.x, [], []
    for i in range(len(stack.weights)):
        calls = stack.calls(i, stack.thinned(i, y))
        found = [run(call, saving) for call in calls]
        last = i == len(stack.weights) - 1
        y = joined(calls, [y for y, _, _ in found], fill if last else 0.0)
        pairs = zip(*(final for _, final, _ in found), strict=True)
        states.append([jnp.stack(pair) if len(pair) == 2 else pair[0] for pair in pairs])
        saved += [v for _, _, kept in found for v in kept.values()]
    final = states[0] if stack.single else tuple(zip(*states, strict=True))
    return (stack.turned(y), *final, tuple(saved))


def joined(calls: Sequence[Layer], each: Sequence[Array], fill: float) -> Array:
    """y of a layer, from that of each direction."""
    y = each[0] if len(each) == 1 else jnp.concatenate(each, -1)
    if calls[0].lengths is None:
        return y
    return jnp.where(jnp.expand_dims(live(calls[0].x, calls[0].lengths), 2), y, jnp.asarray(fill, y.dtype))


def cell(cell: str, x: Any, weights: Mapping[str, Any], states: Mapping[str, Any], **own: Any) -> Sequence[Array]:
    """The states after one step."""
    return run(arguments.read(cell, jnp.expand_dims(arguments.sequences(x, "NC"), 0), weights, states, **own))[1]


def live(x: Array, lengths: Array) -> Array:
    """(T, N): whether a step is one of its sequence."""
    return lax.broadcasted_iota(jnp.int32, x.shape[:2], 0) < jnp.expand_dims(lengths, 0)


# ---- one layer of one direction --------------------------------------------------------------------------------------


def run(call: Layer, saving: bool = False) -> tuple[Array, list[Array], dict[str, Array]]:
    """y, (T, N, H), of which steps behind a sequence's end repeat its state; the final states; and what is saved."""
    weights, wide = call.weights, blending.accumulator(call.x.dtype)
    entering, within = _biases(call.spec, weights, wide)
    given = _inputs(call, entering)
    spec = dataclasses.replace(call.spec, inputs=tuple(given))
    operands = {**given, "r": weights["r"], **initial(call), **marks(call)}
    if spec.projected:
        operands["p"] = weights["projection"]
    if spec.cell == "gru_after":
        hidden = weights["r"].shape[-1] // 3 * (call.heads or 1)
        operands["q"] = jnp.zeros(hidden, wide) if within is None else within
    bound = ft.partial(primitives.call, "rnn_saved" if saving else "rnn", spec=spec)
    given = [operands[name] for name in spec.operands]
    results = ("y", *spec.states, *(spec.saved if saving else ()))
    found = bound(*given) if call.heads is None else _by_heads(bound, call, given, results)
    y, *rest = at_edges(spec.level, found)
    states, saved = rest[: len(spec.states)], rest[len(spec.states) :]
    final = [at_edges(spec.level, nearest(v, kind)) for v, kind in zip(states, call.final, strict=True)]
    return y, final, dict(zip(results[:1] + spec.saved, [y, *saved], strict=True)) if saving else {}


def initial(call: Layer) -> dict[str, Array]:
    """The initial states: h, and c in the accumulator's dtype."""
    wide = blending.accumulator(call.x.dtype)
    return {name: v.astype(wide) if name == "c" else v for name, v in call.initial.items()}


def inputs(call: Layer) -> Array:
    """x, with 0 behind a sequence's end: it is not multiplied by 0, for 0 times NaN is NaN."""
    if call.lengths is None:
        return call.x
    return jnp.where(jnp.expand_dims(live(call.x, call.lengths), 2), call.x, jnp.zeros_like(call.x))


def _inputs(call: Layer, bias: Array | None) -> dict[str, Array]:
    """What enters the steps, as `RnnSpec.inputs` names it."""
    if _on_cpus(call):
        return {"x": inputs(call), "w": call.weights["w"]} | ({} if bias is None else {"b": bias})
    a = _products(call)
    return {"a": a if bias is None else a + trees.broadcast(jnp.expand_dims(bias, (0, 1)), a, call.spec.level)}


def _on_cpus(call: Layer) -> bool:
    """Whether XLA will compute the layer on a CPU, where the inputs' product need not be apart from the loop.

    Heads have their products at once.
    """
    spec, named = call.spec, call.spec.engine or engines.asked.value
    return (
        engines.platform() == "cpu"
        and named in (None, "xla")
        and not (is_fixed(spec.level) or call.heads or "w" not in call.weights)
    )


def _products(call: Layer) -> Array:
    """x W of all steps; without W, x for every gate."""
    x = inputs(call)
    if "w" in call.weights:
        return multiply(call.spec, x, call.weights["w"], run=primitives.call)
    return jnp.concatenate([x.astype(blending.accumulator(x.dtype))] * GATES[call.spec.cell], -1)


def marks(call: Layer) -> dict[str, Array]:
    """Lengths, and before which steps (T, N) the states are 0; in reverse that is where the next step begins anew."""
    found = {} if call.lengths is None else {"lengths": call.lengths}
    resets = call.resets
    if resets is None:
        return found
    if call.spec.reverse and resets.shape[0]:
        resets = resets if call.lengths is None else resets & live(call.x, call.lengths)
        resets = jnp.concatenate([resets[1:], jnp.zeros_like(resets[:1])])
    return found | {"resets": resets}


def parted(v: Array, parts: int, heads: int) -> Array:
    """The last axis, of a number of parts with the columns of all heads, as (parts, heads, columns)."""
    v = primitives.gathered(v, v.ndim - 1)
    return v.reshape(*v.shape[:-1], parts, heads, v.shape[-1] // (heads * parts))


def merged(v: Array, axes: int = 2) -> Array:
    """The last axes as one."""
    return v.reshape(*v.shape[:-axes], math.prod(v.shape[-axes:]))


def _by_heads(
    bound: Callable[..., Any], call: Layer, operands: Sequence[Array], results: Sequence[str]
) -> tuple[Array, ...]:
    """Heads are layers that share nothing but the loop: each has its units of every gate. What is saved keeps their
    axis, the one before the last."""
    heads: Any = call.heads
    parts = {"a": GATES[call.spec.cell], "h": 1, "c": 1, "q": 1}

    def one(*given: Array) -> Any:
        return bound(*(merged(v) if name in parts else v for name, v in zip(names, given, strict=True)))

    names = call.spec.operands
    axes = [None if n in call.spec.marks else -2 if n in parts else 0 for n in names]
    given = [parted(v, parts[n], heads) if n in parts else v for n, v in zip(names, operands, strict=True)]
    found = jax.vmap(one, axes, -2)(*given)
    return tuple(merged(v) if n in ("y", *call.spec.states) else v for n, v in zip(results, found, strict=True))


def _biases(spec: RnnSpec, weights: Mapping[str, Array], wide: Any) -> tuple[Array | None, Array | None]:
    """What is added to x W, and what the reset gate of "after" multiplies."""
    b, d = (weights[name].astype(wide) if name in weights else None for name in ("bias", "recurrent_bias"))
    if d is None or b is None:
        b, both = (jnp.zeros_like(d) if b is None and d is not None else b), d if b is None else b
    else:
        both = b + d
    if spec.cell != "gru_after" or b is None or d is None or both is None:
        return both, None
    kept = b.shape[0] // 3 * 2
    return jnp.concatenate([both[:kept], b[kept:]]), d[kept:]
