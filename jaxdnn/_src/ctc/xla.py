"""Engine `xla` of CTC: forward and backward recursions over the states of a lattice, in numbers of any size.

Letters: B sequences, T steps, V classes, L labels. A lattice has a state for each label and L + 1 for the blanks around
them; in time t a path passes from a state to itself, to the next one, or from a label to the next label if they differ.

Probabilities of long sequences are too small for a float, and their logarithms too inexact: beside a loss of 30,000,
float32 does not tell 0.002 apart. So a probability is a `Number` m 2^e, a float m from 1/2 to 1 and an integer e. A sum
of such numbers multiplies by powers of two alone, which is exact: no compiler can change its bits by contraction, and
nothing is computed but products, sums, quotients and integers, each rounded in IEEE arithmetic. Exponential and
logarithm are polynomials of stated coefficients; the sum of a row's exponentials is the tree `core.trees.halves`.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.core import blending, engines, trees
from jaxdnn._src.core.rounding import nearest, product, quotient, real, reciprocal, rounded

FARTHEST = 2.0**27  # of a score from its row's maximum, or from 0; beyond, its exponential is 0
LARGEST = 2**28  # exponents
ZERO = -(2**29)  # the exponent of 0
ALIGNED = -64  # so many places below the largest term of a sum another has no effect on it


class Number(NamedTuple):
    """m 2^e, element by element: m from 1/2 to 1, or m = 0 and e = `ZERO`."""

    m: Array
    e: Array


@dataclasses.dataclass(frozen=True)
class Float:
    """What differs between float32 and float64.

    Attributes:
      bits: the integers of its size; digits: those behind the point; half: the exponent field of 1/2.
      least: the least exponent that a plain result has; below, it is 0.
      exp: the coefficients of e^r, the highest power first; log: those of artanh(s) / s in s^2.
      high, low: log 2, in a part of few digits and the rest.
    """

    bits: Any
    digits: int
    half: int
    least: int
    exp: tuple[float, ...]
    log: tuple[float, ...]
    high: float
    low: float


def _exponential(degree: int) -> tuple[float, ...]:
    return tuple(1 / math.factorial(k) for k in range(degree, -1, -1))


def _artanh(degree: int) -> tuple[float, ...]:
    return tuple(1 / (2 * k + 1) for k in range(degree, -1, -1))


FLOATS = {
    np.dtype(np.float32): Float(
        jnp.int32, 23, 126, -100, _exponential(7), _artanh(5), 0.693359375, -2.121944400546905827679e-4
    ),
    np.dtype(np.float64): Float(
        jnp.int64,
        52,
        1022,
        -1000,
        _exponential(13),
        _artanh(11),
        6.93147180369123816490e-01,
        1.90821492927058770002e-10,
    ),
}


# ---- numbers of any size ---------------------------------------------------------------------------------------------


def normal(m: Array, e: Array) -> Number:
    """m 2^e for any normal m that is not negative, with m brought to its place."""
    of = FLOATS[m.dtype]
    bits = lax.bitcast_convert_type(m, of.bits)
    e = e + (bits >> of.digits).astype(jnp.int32) - of.half
    m = lax.bitcast_convert_type(bits & ((1 << of.digits) - 1) | (of.half << of.digits), m.dtype)
    zero = (bits == 0) | (e < -LARGEST)
    return Number(jnp.where(zero, jnp.zeros_like(m), m), jnp.where(zero, ZERO, jnp.minimum(e, LARGEST)))


def power(e: Array, dtype: Any) -> Array:
    """2^e for exponents of normal numbers."""
    of = FLOATS[np.dtype(dtype)]
    return lax.bitcast_convert_type((e.astype(of.bits) + (of.half + 1)) << of.digits, dtype)


def plain(m: Array, e: Array) -> Array:
    """m 2^e as a float; 0 where e is small."""
    least = FLOATS[m.dtype].least
    return jnp.where(e < least, jnp.zeros_like(m), m * power(jnp.clip(e, least, -least), m.dtype))


def aligned(*terms: Number) -> tuple[list[Array], Array]:
    """Terms as floats beside the largest of them, and its exponent."""
    top = ft.reduce(jnp.maximum, [term.e for term in terms])
    below = [term.e - top for term in terms]
    scales = (jnp.where(e < ALIGNED, 0, power(jnp.maximum(e, ALIGNED), terms[0].m.dtype)) for e in below)
    return [term.m * scale for term, scale in zip(terms, scales, strict=True)], top


def added(*terms: Number) -> Number:
    """The sum, from the left."""
    parts, top = aligned(*terms)
    return normal(ft.reduce(jnp.add, parts), top)


def added_times(p: Number, *terms: Number) -> Number:
    """The sum, from the left, rounded, times p."""
    parts, top = aligned(*terms)
    return normal(ft.reduce(jnp.add, parts) * p.m, top + p.e)


def where(keep: Array, a: Number, b: Number) -> Number:
    return Number(*(jnp.where(keep, x, y) for x, y in zip(a, b, strict=True)))


def one_at(place: Array, count: int, dtype: Any) -> Number:
    """(B, count): 1 at a place of each row, else 0."""
    here = lax.broadcasted_iota(jnp.int32, (place.shape[0], count), 1) == place[:, None]
    return Number(jnp.where(here, 0.5, 0.0).astype(dtype), jnp.where(here, 1, ZERO).astype(jnp.int32))


def exponential(d: Array) -> tuple[Array, Array]:
    """w, about from 1/2 to 2, and n with e^d = w 2^n; w = 0 for a d that is no number or far from 0."""
    of, at = FLOATS[d.dtype], ft.partial(jnp.asarray, dtype=d.dtype)
    near = jnp.abs(d) <= FARTHEST
    d = jnp.where(near, d, jnp.zeros_like(d))
    n = lax.round(product(d, at(1 / math.log(2))), lax.RoundingMethod.TO_NEAREST_EVEN)
    r = (d - product(n, at(of.high))) - product(n, at(of.low))
    w = horner(of.exp, jnp.clip(r, -0.5, 0.5))  # where d has no digits behind the point, r may be anything
    return jnp.where(near, w, jnp.zeros_like(w)), n.astype(jnp.int32)


def logarithm(x: Number) -> Array:
    """log x, of an x that is not 0."""
    of, at = FLOATS[x.m.dtype], ft.partial(jnp.asarray, dtype=x.m.dtype)
    low = x.m < at(math.sqrt(0.5))
    m, e = jnp.where(low, x.m + x.m, x.m), real(jnp.where(low, x.e - 1, x.e), x.m.dtype)
    s = quotient(m - 1, m + 1)
    half = product(s, horner(of.log, product(s, s)))
    return product(e, at(of.high)) + (product(e, at(of.low)) + (half + half))


def horner(coefficients: tuple[float, ...], x: Array) -> Array:
    """A polynomial, each product and each sum rounded."""
    constants = [jnp.asarray(c, x.dtype) for c in coefficients]
    return ft.reduce(lambda total, c: product(total, x) + c, constants[1:], jnp.broadcast_to(constants[0], x.shape))


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
        """(B, L + 1): the blank and the labels, as classes."""
        blank = jnp.full((self.labels.shape[0], 1), self.spec.blank, jnp.int32)
        return jnp.concatenate([blank, jnp.maximum(self.labels, 0)], 1)


def _flat(x: Array, rest: int) -> Array:
    """An array with one axis before its last `rest`."""
    lead = x.ndim - rest
    return x.reshape(math.prod(x.shape[:lead]), *x.shape[lead:])


def problem(spec: Any, x: Array, labels: Array, steps: Array, count: Array | None = None) -> Problem:
    """Of operands with any leading axes, the lengths of which are -1 where they are none."""
    count = jnp.zeros_like(steps) if count is None else count
    wide = blending.accumulator(x.dtype)
    x, labels, steps, count = (_flat(v, rest) for v, rest in ((x.astype(wide), 2), (labels, 1), (steps, 0), (count, 0)))
    read = lax.broadcasted_iota(jnp.int32, labels.shape, 1) < count[:, None]
    known = (steps >= 0) & (count >= 0) & ~jnp.any(read & (labels < 0), 1)
    return Problem(spec, x, labels, jnp.maximum(steps, 0), jnp.maximum(count, 0), known)


def rows(p: Problem) -> tuple[Array, Array]:
    """(B, T, 1): the largest score of a step, and 1 over the sum of e^(x - largest)."""
    largest = jnp.max(p.x, -1, keepdims=True, initial=-jnp.inf)
    return largest, reciprocal(trees.halves(plain(*exponential(rounded(p.x - largest))), (-1,)))


def shares(p: Problem, scores: Array, of_rows: tuple[Array, Array]) -> tuple[Array, Array]:
    """Some scores' probabilities as w 2^n."""
    largest, inverse = of_rows
    w, n = exponential(rounded(scores - largest))
    return product(w, inverse), n


def emissions(p: Problem) -> tuple[Number, Array]:
    """(T, B, L + 1): the probabilities of the blank and of each label; (B,): whether all of them are known."""
    scores = jnp.take_along_axis(p.x, p.symbols[:, None], 2, mode="promise_in_bounds")
    if p.spec.normalize == "softmax":
        of_rows = rows(p)
        wrong = ~jnp.isfinite(of_rows[0])[..., 0]
        number = normal(*shares(p, scores, of_rows))
    else:
        read = lax.broadcasted_iota(jnp.int32, scores.shape, 2) <= p.count[:, None, None]
        wrong = jnp.any(read & ~(scores <= FARTHEST), 2)
        number = normal(*exponential(scores))
    return Number(*(jnp.moveaxis(v, 1, 0) for v in number)), p.known & ~jnp.any(wrong & p.in_time, 1)


# ---- the lattice -----------------------------------------------------------------------------------------------------


class States(NamedTuple):
    """Numbers of the states: of the blanks (B, L + 1), blank i before label i, and of the labels (B, L)."""

    blanks: Number
    labels: Number


def _moved(x: Number, before: int, after: int) -> Number:
    """With zeros at the ends, or without (negative) elements there."""
    pad = lambda v, fill: lax.pad(v, jnp.asarray(fill, v.dtype), [(0, 0, 0)] * (v.ndim - 1) + [(before, after, 0)])
    return Number(pad(x.m, 0), pad(x.e, ZERO))


def _start(p: Problem, place: Array) -> States:
    """1 at a blank, from which paths enter the lattice."""
    shape, dtype = p.labels.shape, p.x.dtype
    none = Number(jnp.zeros(shape, dtype), jnp.full(shape, ZERO, jnp.int32))
    return States(one_at(place, shape[1] + 1, dtype), none)


def _skips(p: Problem) -> Array:
    """(B, L): whether a path may come to a label from the one before without a blank."""
    return jnp.pad(p.labels[:, 1:] != p.labels[:, :-1], [(0, 0), (1, 0)])[:, : p.labels.shape[1]]


def _no(number: Number) -> Number:
    return Number(jnp.zeros_like(number.m), jnp.full_like(number.e, ZERO))


def _parted(emitted: Number) -> States:
    """What blanks and labels emit in a step."""
    return States(*(Number(*(v[:, part] for v in emitted)) for part in (slice(0, 1), slice(1, None))))


def _into(skips: Array, states: States) -> tuple[tuple[Number, ...], tuple[Number, ...]]:
    """What comes to each blank and to each label: from itself, from the state before it, from the label before it."""
    before = _moved(states.labels, 1, -1)
    skipped = where(skips, before, _no(before))
    return (states.blanks, _moved(states.labels, 1, 0)), (states.labels, _moved(states.blanks, 0, -1), skipped)


def _out_of(skips: Array, states: States) -> tuple[tuple[Number, ...], tuple[Number, ...]]:
    """The same backwards in time."""
    after = _moved(where(skips, states.labels, _no(states.labels)), -1, 1)
    return (states.blanks, _moved(states.labels, 0, 1)), (states.labels, _moved(states.blanks, -1, 0), after)


def _forward(p: Problem, skips: Array, states: States, emitted: Number, t: Array) -> States:
    """The probabilities of all beginnings of paths that are in a state after step t."""
    new = States(*(added_times(e, *terms) for e, terms in zip(_parted(emitted), _into(skips, states), strict=True)))
    return States(*(where((t < p.steps)[:, None], a, b) for a, b in zip(new, states, strict=True)))


def _backward(p: Problem, skips: Array, states: States, emitted: Number, t: Array) -> tuple[States, States]:
    """The probabilities of all ends of paths that are in a state in step t, with that step's emission and without."""
    ends = States(*(added(*terms) for terms in _out_of(skips, states)))
    with_own = States(*(added_times(e, of) for e, of in zip(_parted(emitted), ends, strict=True)))
    return States(*(where((t < p.steps)[:, None], a, b) for a, b in zip(with_own, states, strict=True))), ends


def _probability(p: Problem, states: States) -> Number:
    """(B,): that of the labels, from the states after the last step."""
    last = lambda v, place: jnp.take_along_axis(v, jnp.maximum(place, 0)[:, None], 1, mode="promise_in_bounds")[:, 0]
    blank = Number(*(last(v, p.count) for v in states.blanks))
    if not p.labels.shape[1]:
        return blank
    label = Number(*(last(v, p.count - 1) for v in states.labels))
    return added(blank, where(p.count > 0, label, _no(label)))


def _loss(p: Problem, probability: Number, known: Array) -> Array:
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
    states, _ = lax.scan(step, _start(p, jnp.zeros_like(p.count)), (emitted, times))
    return _loss(p, _probability(p, states), known)


def both(p: Problem) -> tuple[Array, Number, Number, States, States]:
    """The loss, what is emitted, the probability, and of each step (T, B, ...) the states forward and backward.

    The two recursions run at the same time, from both ends, so a call takes T steps.
    """
    emitted, known = emissions(p)
    skips, times = _skips(p), jnp.arange(p.x.shape[1], dtype=jnp.int32)

    def step(carry: tuple[States, States], at: Any) -> Any:
        (first, t), (last, s) = at
        forward = _forward(p, skips, carry[0], first, t)
        backward, ends = _backward(p, skips, carry[1], last, s)
        return (forward, backward), (forward, ends)

    start = _start(p, jnp.zeros_like(p.count)), _start(p, p.count)
    of_time = emitted, times
    reverse = lambda tree: jax.tree.map(lambda v: jnp.flip(v, 0), tree)
    (states, _), (forward, ends) = lax.scan(step, start, (of_time, reverse(of_time)))
    probability = _probability(p, states)
    return _loss(p, probability, known), emitted, probability, forward, reverse(ends)


def _occupied(p: Problem, probability: Number, a: Number, b: Number) -> Array:
    """(T, B, ...): the share of paths that are in a state, from what comes to it and what goes from it."""
    m, e = (v[None, :, None] for v in probability)
    possible = (e > ZERO) & p.in_time.T[..., None]
    w = product(product(a.m, b.m), reciprocal(jnp.where(m == 0, jnp.ones_like(m), m)))
    return jnp.where(possible, plain(w, a.e + b.e - e), jnp.zeros_like(w))


def _by_symbol(blanks: Array, labels: Array) -> Array:
    """(T, B, ...) of all states to (B, T, L + 1) of the blank and of each label."""
    return jnp.moveaxis(jnp.concatenate([trees.halves(blanks, (-1,)), labels], -1), 0, 1)


def posterior(p: Problem) -> tuple[Array, Array]:
    """(B,), and (B, T, L + 1): the share of paths that emit the blank, or a label, in a step."""
    loss, _, probability, forward, ends = both(p)
    found = _by_symbol(*(_occupied(p, probability, a, b) for a, b in zip(forward, ends, strict=True)))
    unknown = jnp.isnan(loss)[:, None, None] & p.in_time[..., None]
    return loss, jnp.where(unknown, jnp.full_like(found, jnp.nan), found)


# ---- the gradient ----------------------------------------------------------------------------------------------------


def _merged(p: Problem, occupied: Array) -> tuple[Array, Array]:
    """(B, T, L + 1) with all of a class at its first label, and (B, V): where a class is there, -1 if nowhere.

    Labels of a class are added in pairs of neighbours, then pairs of these, and so on.
    """
    labels, classes = p.labels, p.x.shape[2]
    if not labels.shape[1]:
        place = jnp.where(jnp.arange(classes, dtype=jnp.int32) == p.spec.blank, 0, -1)
        return occupied, jnp.broadcast_to(place, (len(labels), classes))
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

    _, sums = lax.while_loop(lambda state: jnp.any(state[0] >= 0), add_pairs, (following, occupied[..., 1:]))
    every = jnp.arange(classes, dtype=jnp.int32)[None]
    found = jax.vmap(lambda line: jnp.searchsorted(line, every[0]).astype(jnp.int32))(ordered)
    found = jnp.minimum(found, labels.shape[1] - 1)
    place = jnp.where(along(ordered, found, 1) == every, along(order, found, 1) + 1, -1)
    return jnp.concatenate([occupied[..., :1], sums], 2), jnp.where(every == p.spec.blank, 0, place)


def gradient(p: Problem, occupied: Array, loss: Array) -> tuple[Array, Array]:
    """(B, T, V): the derivative of a loss in its scores, and where it is not 0 by definition."""
    sums, place = _merged(p, occupied)
    index = jnp.broadcast_to(jnp.maximum(place, 0)[:, None], p.x.shape)
    counted = jnp.take_along_axis(sums, index, 2, mode="promise_in_bounds")
    counted = jnp.where((place >= 0)[:, None], counted, jnp.zeros_like(counted))
    found = -counted
    if p.spec.normalize == "softmax":
        found = plain(*shares(p, p.x, rows(p))) - counted
    live = p.in_time[..., None] & ~jnp.isinf(loss)[:, None, None]
    return jnp.where(jnp.isnan(loss)[:, None, None], jnp.full_like(found, jnp.nan), found), live


def _dgrad(spec: Any, ct: Array, x: Array, occupied: Array, loss: Array, labels: Array, steps: Array) -> Array:
    p = problem(spec, x, labels, steps)
    found, live = gradient(p, _flat(occupied, 2), _flat(loss, 0))
    found = product(jnp.broadcast_to(_flat(ct, 0)[:, None, None], found.shape), found)
    return nearest(jnp.where(live, found, jnp.zeros_like(found)), x.dtype).reshape(x.shape)


def _tangent(spec: Any, dx: Array, x: Array, occupied: Array, loss: Array, labels: Array, steps: Array) -> Array:
    p = problem(spec, x, labels, steps)
    found, live = gradient(p, _flat(occupied, 2), _flat(loss, 0))
    terms = product(found, dx.reshape(found.shape).astype(found.dtype))
    return trees.halves(jnp.where(live, terms, jnp.zeros_like(terms)), (1, 2)).reshape(loss.shape)


# ---- the derivative of the posterior ---------------------------------------------------------------------------------


def covariance(p: Problem, v: Array) -> Array:
    """(B, T, L + 1): the derivative of the posterior along v, that of the logarithms of what is emitted.

    It is the covariance of how often paths emit each symbol in each step, times v: a symmetric map. The logarithm of a
    state's probability changes by the mean of what the states before it change by, weighted by their shares.
    """
    loss, emitted, probability, forward, ends = both(p)
    skips, times = _skips(p), jnp.arange(p.x.shape[1], dtype=jnp.int32)
    v = jnp.moveaxis(v, 1, 0)
    parted = lambda v: (v[:, :1], v[:, 1:])
    pad = lambda x, before, after: lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (before, after, 0)])

    def mean(terms: tuple[Number, ...], values: tuple[Array, ...]) -> Array:
        parts, _ = aligned(*terms)
        total = ft.reduce(jnp.add, parts)
        total = jnp.where(total == 0, jnp.ones_like(total), total)
        return ft.reduce(
            jnp.add, [product(quotient(part, total), value) for part, value in zip(parts, values, strict=True)]
        )

    def step(carry: Any, at: Any) -> Any:
        (states, changes), (backward, later) = carry
        (first, dv, t), (last, dw, s) = at
        of_blanks, of_labels = _into(skips, states)
        b, w = changes
        into = mean(of_blanks, (b, pad(w, 1, 0))), mean(of_labels, (w, pad(b, 0, -1), pad(w, 1, -1)))
        into = tuple(own + change for own, change in zip(parted(dv), into, strict=True))
        keep = (t < p.steps)[:, None]
        changes = tuple(jnp.where(keep, new, old) for new, old in zip(into, changes, strict=True))
        states = _forward(p, skips, states, first, t)
        of_blanks, of_labels = _out_of(skips, backward)
        b, w = later
        out = mean(of_blanks, (b, pad(w, 0, 1))), mean(of_labels, (w, pad(b, -1, 0), pad(w, -1, 1)))
        keep = (s < p.steps)[:, None]
        own = (own + change for own, change in zip(parted(dw), out, strict=True))
        later = tuple(jnp.where(keep, new, old) for new, old in zip(own, later, strict=True))
        backward, _ = _backward(p, skips, backward, last, s)
        return ((states, changes), (backward, later)), (changes, out)

    zeros = tuple(jnp.zeros_like(x.m) for x in _start(p, p.count))
    start = (_start(p, jnp.zeros_like(p.count)), zeros), (_start(p, p.count), zeros)
    reverse = lambda tree: jax.tree.map(lambda x: jnp.flip(x, 0), tree)
    of_time = emitted, v, times
    _, (changes, out) = lax.scan(step, start, (of_time, reverse(of_time)))
    occupied = [_occupied(p, probability, a, b) for a, b in zip(forward, ends, strict=True)]
    along = [a + b for a, b in zip(changes, reverse(out), strict=True)]
    total = sum(trees.halves(product(s, a), (-1,)) for s, a in zip(occupied, along, strict=True))
    found = _by_symbol(*(product(s, a - total) for s, a in zip(occupied, along, strict=True)))
    live = p.in_time[..., None] & ~jnp.isinf(loss)[:, None, None]
    found = jnp.where(jnp.isnan(loss)[:, None, None], jnp.full_like(found, jnp.nan), found)
    return jnp.where(live, found, jnp.zeros_like(found))


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
        case "ctc_covariance":
            v, *others = operands
            return covariance(problem(spec, *others), _flat(v, 2)).reshape(v.shape)
    run: Callable[..., Array] = _dgrad if call.op == "ctc_dgrad" else _tangent
    return run(spec, *operands)


engines.declare(
    "xla",
    *("ctc_loss", "ctc_posterior", "ctc_dgrad", "ctc_tangent", "ctc_covariance"),
    run=_run,
    level=lambda call: "mesh_invariant" if call.op in ("ctc_tangent", "ctc_covariance") else "portable",
    partition=lambda call: True,
    accumulation=lambda call: "float64" if call.avals[0].dtype == np.float64 else "float32",
    notes=("probabilities as mantissa and exponent; T steps forward and backward at once",),
)
