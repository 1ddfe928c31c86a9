"""Engine `xla` of CTC: forward and backward recursions over the states of a lattice, in numbers of any size.

Letters: B sequences, T steps, V classes, L labels. A lattice has S = 2 L + 1 states, the labels between L + 1 blanks;
in time t a path passes from a state to itself, to the next one, or from a label to the next label if they differ. The
sum of a row's exponentials is the tree `core.trees.halves`.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core import blending, engines, trees
from jaxdnn._src.core.numbers import (
    FARTHEST,
    ZERO,
    Number,
    added,
    added_times,
    aligned,
    exponential,
    logarithm,
    one_at,
    plain,
    where,
)
from jaxdnn._src.core.padding import pad
from jaxdnn._src.core.rounding import nearest, product, quotient, rounded

# ---- what a step emits -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call's arrays with one axis of sequences.

    Attributes:
      x: (B, T, V), scores; labels: (B, L), -1 for no class.
      steps, count: (B,), the numbers of steps and of labels.
      known: (B,), whether these and the labels are what they may be.
    """

    spec: Any
    x: Array
    labels: Array
    steps: Array
    count: Array
    known: Array

    @property
    def in_time(self) -> Array:
        """(B, T): whether a step is one of its sequence."""
        return lax.broadcasted_iota(jnp.int32, self.x.shape[:2], 1) < self.steps[:, None]

    @property
    def symbols(self) -> Array:
        """(B, L + 1): the class of the blank and of each label."""
        blank = jnp.full((self.labels.shape[0], 1), self.spec.blank, jnp.int32)
        return jnp.concatenate([blank, jnp.maximum(self.labels, 0)], 1)

    @property
    def of_states(self) -> Array:
        """(B, S): the class of each state."""
        return by_state(self.symbols)


def by_state(x: Array) -> Array:
    """(..., L + 1) of the blank and of each label to (..., S)."""
    states = np.arange(2 * x.shape[-1] - 1)
    return x.at[..., np.where(states % 2, states // 2 + 1, 0)].get(mode="promise_in_bounds")


def flat(x: Array, rest: int) -> Array:
    """An array with one axis before its last `rest`."""
    lead = x.ndim - rest
    return x.reshape(math.prod(x.shape[:lead]), *x.shape[lead:])


def problem(spec: Any, x: Array, labels: Array, steps: Array, count: Array | None = None) -> Problem:
    """Of operands with any leading axes, the lengths of which are -1 where they are none."""
    count = jnp.zeros_like(steps) if count is None else count
    wide = blending.accumulator(x.dtype)
    x, labels, steps, count = (flat(v, rest) for v, rest in ((x.astype(wide), 2), (labels, 1), (steps, 0), (count, 0)))
    read = lax.broadcasted_iota(jnp.int32, labels.shape, 1) < count[:, None]
    known = (steps >= 0) & (count >= 0) & ~jnp.any(read & (labels < 0), 1)
    return Problem(spec, x, labels, jnp.maximum(steps, 0), jnp.maximum(count, 0), known)


def rows(p: Problem) -> tuple[Array, Array]:
    """(B, T, 1): the largest score of a step, and 1 over the sum of e^(x - largest)."""
    largest = jnp.max(p.x, -1, keepdims=True, initial=-jnp.inf)
    total = trees.halves(plain(*exponential(rounded(p.x - largest))), (-1,))
    return largest, quotient(jnp.ones_like(total), total)


def shares(p: Problem, scores: Array, of_rows: tuple[Array, Array]) -> tuple[Array, Array]:
    """Some scores' probabilities as w 2^n."""
    largest, inverse = of_rows
    w, n = exponential(rounded(scores - largest))
    return product(w, inverse), n


def emissions(p: Problem) -> tuple[Number, Array]:
    """(T, B, S): each state's probability in each step, as w 2^n; (B,): whether all of them are known."""
    scores = jnp.take_along_axis(p.x, p.of_states[:, None], 2, mode="promise_in_bounds")
    if p.spec.normalize == "softmax":
        of_rows = rows(p)
        wrong = ~jnp.isfinite(of_rows[0])[..., 0]
        found = shares(p, scores, of_rows)
    else:
        read = lax.broadcasted_iota(jnp.int32, scores.shape, 2) <= 2 * p.count[:, None, None]
        wrong = jnp.any(read & ~(scores <= FARTHEST), 2)
        found = exponential(scores)
    return Number(*(jnp.moveaxis(v, 1, 0) for v in found)), p.known & ~jnp.any(wrong & p.in_time, 1)


# ---- the lattice -----------------------------------------------------------------------------------------------------


def _none_but(keep: Array, x: Number) -> Number:
    return where(keep, x, Number(jnp.zeros_like(x.m), jnp.full_like(x.e, ZERO)))


def _moved(x: Number, by: int) -> Number:
    """Each state's number at the state that is `by` later, with zeros where none comes from."""
    moved = lambda v, fill: pad(v, fill, [(0, 0, 0), (by, -by, 0)])
    return Number(moved(x.m, 0), moved(x.e, ZERO))


def _at(v: Array, place: Array) -> Array:
    """(B,): an element of each row of (B, S)."""
    return jnp.take_along_axis(v, place[:, None], 1, mode="promise_in_bounds")[:, 0]


def _skips(p: Problem) -> Array:
    """(B, S): whether a path may come to a state from the one before the last; only labels differ from that one."""
    differ = p.of_states[:, 2:] != p.of_states[:, :-2]
    return jnp.pad(differ, [(0, 0), (2, 0)])[:, : p.of_states.shape[1]]


def _into(skips: Array, x: Number) -> tuple[Number, ...]:
    """What comes to each state: from itself, from the state before it, from the label before it."""
    return x, _moved(x, 1), _none_but(skips, _moved(x, 2))


def _out_of(skips: Array, x: Number) -> tuple[Number, ...]:
    """The same backwards in time."""
    return x, _moved(x, -1), _moved(_none_but(skips, x), -2)


def _forward(p: Problem, skips: Array, states: Number, emitted: Number, t: Array) -> Number:
    """(B, S): the probabilities of all beginnings of paths that are in a state after step t."""
    return where((t < p.steps)[:, None], added_times(emitted, *_into(skips, states)), states)


def _backward(p: Problem, skips: Array, states: Number, emitted: Number, t: Array) -> tuple[Number, Number]:
    """(B, S): the probabilities of all ends of paths that are in a state in step t, with its emission and without."""
    terms = _out_of(skips, states)
    return where((t < p.steps)[:, None], added_times(emitted, *terms), states), added(*terms)


def probability_of(p: Problem, states: Number) -> Number:
    """(B,): that of the labels, from the states after the last step: it ends in the last blank or in the last label."""
    places = (jnp.maximum(2 * p.count - i, 0) for i in (0, 1))
    blank, label = (Number(*(_at(v, place) for v in states)) for place in places)
    return added(blank, _none_but(p.count > 0, label))


def loss_of(p: Problem, probability: Number, known: Array) -> Array:
    """(B,): -log of the probability; infinite if it is 0, NaN if not all is known."""
    possible = probability.e > ZERO
    loss = -logarithm(where(possible, probability, Number(jnp.full_like(probability.m, 0.5), probability.e)))
    # A probability is 1 at most, whatever was rounded; log scores need not be those of probabilities.
    none = loss <= 0 if p.spec.normalize == "softmax" else loss == 0
    loss = jnp.where(possible, jnp.where(none, jnp.zeros_like(loss), loss), jnp.full_like(loss, jnp.inf))
    return jnp.where(known, loss, jnp.full_like(loss, jnp.nan))


def loss(p: Problem) -> Array:
    """(B,)"""
    emitted, known = emissions(p)
    skips, times = _skips(p), jnp.arange(p.x.shape[1], dtype=jnp.int32)
    step = lambda states, at: (_forward(p, skips, states, *at), None)
    states, _ = lax.scan(step, one_at(jnp.zeros_like(p.count), skips.shape[1], p.x.dtype), (emitted, times))
    return loss_of(p, probability_of(p, states), known)


def _both_ways(p: Problem, step: Callable[..., Any], starts: Any, of_time: Any) -> Any:
    """Runs two recursions at the same time, from both ends, so that they take T steps: the last states, and all.

    step: (carry forward, carry backward, what belongs to step t, to step s, t, s) to both carries, and what both keep.
    """
    reverse = ft.partial(jax.tree.map, lambda v: jnp.flip(v, 0))

    def run(carry: Any, at: Any) -> Any:
        *carry, kept = step(*carry, *at)
        return tuple(carry), kept

    times = jnp.arange(p.x.shape[1], dtype=jnp.int32)
    carry, (forward, backward) = lax.scan(run, starts, (of_time, reverse(of_time), times, reverse(times)))
    return carry, (forward, reverse(backward))


def _starts(p: Problem) -> tuple[Number, Number]:
    """(B, S): 1 at the blank from which paths enter the lattice forward, and backward."""
    states = 2 * p.labels.shape[1] + 1
    return one_at(jnp.zeros_like(p.count), states, p.x.dtype), one_at(2 * p.count, states, p.x.dtype)


def both(p: Problem) -> tuple[Array, Number, Number, Number, Number]:
    """The loss, what is emitted, the probability, and of each step (T, B, S) the states forward and backward."""
    emitted, known = emissions(p)
    skips = _skips(p)

    def step(first: Number, last: Number, own: Number, other: Number, t: Array, s: Array) -> Any:
        first = _forward(p, skips, first, own, t)
        last, ends = _backward(p, skips, last, other, s)
        return first, last, (first, ends)

    (states, _), (forward, ends) = _both_ways(p, step, _starts(p), emitted)
    probability = probability_of(p, states)
    return loss_of(p, probability, known), emitted, probability, forward, ends


def _occupied(p: Problem, probability: Number, a: Number, b: Number) -> Array:
    """(T, B, S): the share of paths that are in a state, from what comes to it and what goes from it."""
    m, e = (v[None, :, None] for v in probability)
    possible = (e > ZERO) & p.in_time.T[..., None]
    one = jnp.ones_like(m)
    w = product(product(a.m, b.m), quotient(one, jnp.where(m == 0, one, m)))
    return jnp.where(possible, plain(w, a.e + b.e - e), jnp.zeros_like(w))


def _by_symbol(states: Array) -> Array:
    """(T, B, S) to (B, T, L + 1) of the blank and of each label."""
    blanks, labels = trees.halves(states[..., ::2], (-1,)), states[..., 1::2]
    return jnp.moveaxis(jnp.concatenate([blanks, labels], -1), 0, 1)


def posterior(p: Problem) -> tuple[Array, Array]:
    """(B,), and (B, T, L + 1): the share of paths that emit the blank, or a label, in a step."""
    loss, _, probability, forward, ends = both(p)
    found = _by_symbol(_occupied(p, probability, forward, ends))
    unknown = jnp.isnan(loss)[:, None, None] & p.in_time[..., None]
    return loss, jnp.where(unknown, jnp.full_like(found, jnp.nan), found)


# ---- the gradient ----------------------------------------------------------------------------------------------------


def by_class(v: Array, labels: Array, blank: int, classes: int) -> Array:
    """(B, T, V): what (B, T, L + 1) has for each class.

    Labels of a class are added in pairs of neighbours, then pairs of these, and so on, at the first of them.
    """
    every = jnp.arange(classes, dtype=jnp.int32)[None]
    at_blank = every == blank
    if not labels.shape[1]:
        return jnp.where(at_blank[:, None], v, jnp.zeros_like(v))
    along = ft.partial(jnp.take_along_axis, mode="promise_in_bounds")
    order = jnp.argsort(labels, 1, stable=True).astype(jnp.int32)
    ordered, place = along(labels, order, 1), jnp.argsort(order, 1).astype(jnp.int32)
    same = jnp.pad(ordered[:, 1:] == ordered[:, :-1], [(0, 0), (0, 1)])
    following = jnp.where(same, jnp.pad(order[:, 1:], [(0, 0), (0, 1)]), -1)
    following = along(following, place, 1)  # of each label the next one of its class, -1 if there is none

    def add_pairs(state: tuple[Array, Array]) -> tuple[Array, Array]:
        following, sums = state
        at = jnp.maximum(following, 0)
        other = along(sums, jnp.broadcast_to(at[:, None], sums.shape), 2)
        sums = jnp.where((following >= 0)[:, None], sums + other, sums)
        return jnp.where(following >= 0, along(following, at, 1), -1), sums

    _, sums = lax.while_loop(lambda state: jnp.any(state[0] >= 0), add_pairs, (following, v[..., 1:]))
    found = jax.vmap(lambda line: jnp.searchsorted(line, every[0]).astype(jnp.int32))(ordered)
    found = jnp.minimum(found, labels.shape[1] - 1)
    place = jnp.where(along(ordered, found, 1) == every, along(order, found, 1) + 1, -1)
    place = jnp.where(at_blank, 0, place)[:, None]
    sums = jnp.concatenate([v[..., :1], sums], 2)
    sums = along(sums, jnp.broadcast_to(jnp.maximum(place, 0), (*v.shape[:2], classes)), 2)
    return jnp.where(place >= 0, sums, jnp.zeros_like(sums))


def emitted(x: Array, labels: Array, blank: int) -> Array:
    """(B, T, L + 1): the elements of (B, T, V) for the blank and the labels, 0 for those that are no class."""
    first = jnp.full((len(labels), 1), blank, labels.dtype)
    index = jnp.concatenate([first, labels], 1)[:, None]
    found = jnp.take_along_axis(x, jnp.maximum(index, 0), 2, mode="promise_in_bounds")
    return jnp.where(index >= 0, found, jnp.zeros_like(found))


def gradient(p: Problem, occupied: Array, loss: Array) -> tuple[Array, Array]:
    """(B, T, V): the derivative of a loss in its scores, and where it is not 0 by definition."""
    counted = by_class(occupied, p.labels, p.spec.blank, p.x.shape[2])
    found = -counted
    if p.spec.normalize == "softmax":
        found = plain(*shares(p, p.x, rows(p))) - counted
    live = p.in_time[..., None] & ~jnp.isinf(loss)[:, None, None]
    return jnp.where(jnp.isnan(loss)[:, None, None], jnp.full_like(found, jnp.nan), found), live


def _dgrad(spec: Any, ct: Array, x: Array, occupied: Array, loss: Array, labels: Array, steps: Array) -> Array:
    p = problem(spec, x, labels, steps)
    found, live = gradient(p, flat(occupied, 2), flat(loss, 0))
    found = product(jnp.broadcast_to(flat(ct, 0)[:, None, None], found.shape), found)
    return nearest(jnp.where(live, found, jnp.zeros_like(found)), x.dtype).reshape(x.shape)


def _tangent(spec: Any, dx: Array, x: Array, occupied: Array, loss: Array, labels: Array, steps: Array) -> Array:
    p = problem(spec, x, labels, steps)
    found, live = gradient(p, flat(occupied, 2), flat(loss, 0))
    terms = product(found, dx.reshape(found.shape).astype(found.dtype))
    return trees.halves(jnp.where(live, terms, jnp.zeros_like(terms)), (1, 2)).reshape(loss.shape)


# ---- the derivative of the posterior ---------------------------------------------------------------------------------


def covariance(p: Problem, v: Array) -> Array:
    """(B, T, L + 1): the derivative of the posterior along v, that of the logarithms of what is emitted.

    It is the covariance of how often paths emit each symbol in each step, times v: a symmetric map. The logarithm of a
    state's probability changes by the mean of what the states before it change by, weighted by their shares.
    """
    loss, emitted, probability, forward, ends = both(p)
    skips, v = _skips(p), by_state(jnp.moveaxis(v, 1, 0))
    moved = lambda x, by: pad(x, 0, [(0, 0, 0), (by, -by, 0)])

    def mean(terms: tuple[Number, ...], change: Array, by: int) -> Array:
        parts, _ = aligned(*terms)
        total = ft.reduce(jnp.add, parts)
        total = jnp.where(total == 0, jnp.ones_like(total), total)
        changes = change, moved(change, by), moved(change, 2 * by)
        return ft.reduce(
            jnp.add, [product(quotient(part, total), value) for part, value in zip(parts, changes, strict=True)]
        )

    def step(first: Any, last: Any, own: Any, other: Any, t: Array, s: Array) -> Any:
        states, change = first
        into = own[1] + mean(_into(skips, states), change, 1)
        change = jnp.where((t < p.steps)[:, None], into, change)
        first = _forward(p, skips, states, own[0], t), change
        states, later = last
        out = mean(_out_of(skips, states), later, -1)
        later = jnp.where((s < p.steps)[:, None], other[1] + out, later)
        last = _backward(p, skips, states, other[0], s)[0], later
        return first, last, (change, out)

    starts = tuple((start, jnp.zeros_like(start.m)) for start in _starts(p))
    _, (changes, out) = _both_ways(p, step, starts, (emitted, v))
    occupied, along = _occupied(p, probability, forward, ends), changes + out
    total = trees.halves(product(occupied, along), (-1,))
    found = _by_symbol(product(occupied, along - total))
    live = p.in_time[..., None] & ~jnp.isinf(loss)[:, None, None]
    found = jnp.where(jnp.isnan(loss)[:, None, None], jnp.full_like(found, jnp.nan), found)
    return jnp.where(live, found, jnp.zeros_like(found))


# ---- the best path ---------------------------------------------------------------------------------------------------


def align(p: Problem) -> Array:
    """(B, T): the label that the path with the largest sum of scores emits, 0 for the blank; -1 where there is none.

    In float64, whose sums and comparisons are the same on every device: of what is given in 16 bits, sums that are
    equal are found to be equal.
    """
    skips, symbols = _skips(p), p.of_states
    scores = jnp.take_along_axis(p.x, symbols[:, None], 2, mode="promise_in_bounds")
    states = lax.broadcasted_iota(jnp.int32, symbols.shape, 1)
    wrong = (states <= 2 * p.count[:, None])[:, None] & p.in_time[..., None] & ~(scores < jnp.inf)
    times = jnp.arange(p.x.shape[1], dtype=jnp.int32)
    with jax.enable_x64(True):  # this runs while a program is lowered, where no transformation sees the wide types
        none = lax.full(symbols.shape, -np.inf, np.float64)
        moved = lambda v, by: pad(v, -np.inf, [(0, 0, 0), (by, -by, 0)])

        def step(sums: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
            own, t = at
            best, back = sums, jnp.zeros_like(states, np.int8)
            for i, other in ((1, moved(sums, 1)), (2, jnp.where(skips, moved(sums, 2), none))):
                back = jnp.where(other > best, lax.full_like(back, i), back)
                best = jnp.where(other > best, other, best)
            live = (t < p.steps)[:, None]
            sums = jnp.where(live, best + lax.convert_element_type(own, np.float64), sums)
            return sums, jnp.where(live, back, lax.full_like(back, 0))

        sums, moves = lax.scan(
            step, jnp.where(states == 0, lax.full_like(none, 0), none), (jnp.moveaxis(scores, 1, 0), times)
        )
        last = 2 * p.count
        label, blank = (_at(sums, jnp.maximum(place, 0)) for place in (last - 1, last))
        state = jnp.where((label >= blank) & (p.count > 0), last - 1, last)
        possible = jnp.maximum(label, blank) > -np.inf

    def back(state: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        moves, t = at
        before = state - _at(moves, state).astype(jnp.int32)
        return before, jnp.where(t < p.steps, jnp.where(state % 2 == 1, (state + 1) // 2, 0), -1)

    _, path = lax.scan(back, state, (moves, times), reverse=True)
    known = p.known & possible & ~jnp.any(wrong, (1, 2))
    return jnp.where(known[:, None], path.T, -1)


# ---- the engine ------------------------------------------------------------------------------------------------------


def _run(call: engines.Call, *operands: Array) -> Any:
    spec = call.spec
    match call.op:
        case "ctc_loss":
            return loss(problem(spec, *operands)).reshape(operands[2].shape)
        case "ctc_posterior":
            found, occupied = posterior(problem(spec, *operands))
            lead = operands[2].shape
            return found.reshape(lead), occupied.reshape(*lead, *occupied.shape[1:])
        case "ctc_align":
            return align(problem(spec, *operands)).reshape(*operands[2].shape, operands[0].shape[-2])
        case "ctc_covariance":
            v, *others = operands
            return covariance(problem(spec, *others), flat(v, 2)).reshape(v.shape)
        case "ctc_emitted" | "ctc_by_class":
            v, labels = flat(operands[0], 2), flat(operands[1], 1)
            back = call.op == "ctc_by_class"
            found = by_class(v, labels, spec.blank, spec.classes) if back else emitted(v, labels, spec.blank)
            return found.reshape(*operands[0].shape[:-1], found.shape[-1])
    run: Callable[..., Array] = _dgrad if call.op == "ctc_dgrad" else _tangent
    return run(spec, *operands)


_PORTABLE = ("ctc_loss", "ctc_posterior", "ctc_align", "ctc_dgrad")

engines.declare(
    "xla",
    *(*_PORTABLE, "ctc_tangent", "ctc_covariance", "ctc_emitted", "ctc_by_class"),
    run=_run,
    level=lambda call: "portable" if call.op in _PORTABLE else "mesh_invariant",
    partition=lambda call: True,
    accumulation=lambda call: "float64" if call.op == "ctc_align" or call.avals[0].dtype == np.float64 else "float32",
    notes=("probabilities as mantissa and exponent; T steps forward and backward at once",),
)
