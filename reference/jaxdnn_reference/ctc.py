"""Connectionist temporal classification: the loss, the posterior of each label, the gradient, the best alignment.

    loss = -log sum over paths of prod_t p_t(path_t)         p_t = softmax(logits_t), or exp(logits_t) for "none"

A path has a class for each step; it counts if its runs of a class, joined, are the labels once the blanks are left out.
The states s = 0, ..., 2 L of a lattice are blank, first label, blank, second label, ..., blank; z_s is their class.

    alpha_t(s) = p_t(z_s) (alpha_{t-1}(s) + alpha_{t-1}(s - 1) + skip_s alpha_{t-1}(s - 2))
    beta_t(s) = sum over the same steps from s to s', of p_{t+1}(z_s') beta_{t+1}(s')

with skip_s = 1 for a label that differs from the one before it; alpha starts in the first two states, beta ends in the
last two. P = sum_s alpha_t(s) beta_t(s) for any t, loss = -log P; the posterior is alpha_t(s) beta_t(s) / P, added up
over the blanks; the gradient in logits is softmax minus the posterior of each class ("none": without the softmax).

Labels that no path has (P = 0) have an infinite loss and the gradient 0. A label that is the blank or no class, a
length out of range, and a step whose scores are NaN, +inf or all -inf give NaN.

The best alignment is the path with the largest sum of logits; each sum from the first step on, in float64, whatever
the arithmetic. Of equal sums that which comes from the state itself is taken, then from the state before it, then from
the label before it; at the end the last label's, then that of the blank behind it.

arithmetic "ordered": in float32 (float64 for float64) with numbers m 2^e, m from 1/2 to 1 and e an integer; each step
rounded. d = x - max x; n = rint(d log2 e), r = (d - n h) - n l, clipped to +-1/2, for log 2 = h + l; e^d = 2^n times
the Taylor polynomial of e^r of degree 7 (13); 0 for |d| > 2^27. Their sum, without what is below 2^-100 (2^-1000), is
added by halves, after padding with zeros to a power of two. Division by it, and by P, is
multiplication by the reciprocal. Sums in the lattice from the left, as above, times p;
exponents of 2^28 at most, and 0 below -2^28. log m = 2 artanh((m - 1) / (m + 1)), m from sqrt(1/2) to sqrt(2), by 6
(12) terms, plus e l, plus e h. Posteriors of equal labels are added in pairs of neighbours, then pairs of these.

Sources: Graves et al., "Connectionist temporal classification" (ICML 2006); cuDNN's cudnnCTCLoss.
"""

import math
from typing import Any

import numpy as np

from jaxdnn_reference.rounding import round_to
from jaxdnn_reference.tensor import wide

Array = np.ndarray[Any, Any]
Number = tuple[Array, ...]  # m and e


def ctc_loss(
    logits: Array,
    labels: Array,
    /,
    *,
    logit_lengths: Array | None = None,
    label_lengths: Array | None = None,
    blank: int = 0,
    normalize: str = "softmax",
    infeasible: str = "inf",
    reduction: str = "none",
    layout: str = "NTC",
    arithmetic: str = "golden",
    details: bool = False,
) -> Any:
    """The losses, their sum or mean; with `details` the losses and their gradients in logits."""
    given: dict[str, Any] = dict(blank=blank, normalize=normalize, layout=layout, arithmetic=arithmetic)
    loss, _, gradient = _all(logits, labels, logit_lengths, label_lengths, **given)
    loss = np.where(np.isposinf(loss), 0, loss).astype(loss.dtype) if infeasible == "zero" else loss
    if details:
        return loss, gradient
    if reduction == "none":
        return loss
    if reduction == "mean":
        count = np.full(len(loss), labels.shape[1]) if label_lengths is None else np.asarray(label_lengths)
        loss = loss * (loss.dtype.type(1) / np.maximum(count, 1).astype(loss.dtype))
    total = halves(loss)
    with np.errstate(invalid="ignore"):
        return total if reduction == "sum" else total * (total.dtype.type(1) / total.dtype.type(len(loss)))


def ctc_posterior(
    logits: Array,
    labels: Array,
    /,
    *,
    logit_lengths: Array | None = None,
    label_lengths: Array | None = None,
    blank: int = 0,
    normalize: str = "softmax",
    layout: str = "NTC",
    arithmetic: str = "golden",
) -> Array:
    """(N, T, L + 1): the share of paths that emit the blank, or a label, in a step."""
    given: dict[str, Any] = dict(blank=blank, normalize=normalize, layout=layout, arithmetic=arithmetic)
    found = _all(logits, labels, logit_lengths, label_lengths, **given)[1]
    return found if layout == "NTC" else found.swapaxes(0, 1)


def ctc_align(
    logits: Array,
    labels: Array,
    /,
    *,
    logit_lengths: Array | None = None,
    label_lengths: Array | None = None,
    blank: int = 0,
    layout: str = "NTC",
) -> Array:
    """(N, T): 0 for the blank, l for the l-th label; -1 beyond the length, and where there is no path."""
    x = np.asarray(logits if layout == "NTC" else logits.swapaxes(0, 1), np.float64)
    n, steps, classes = x.shape
    found = np.full((n, steps), -1, np.int32)
    for i in range(n):
        time = steps if logit_lengths is None else int(logit_lengths[i])
        count = labels.shape[1] if label_lengths is None else int(label_lengths[i])
        z = labels[i, : max(count, 0)].astype(np.int64)
        if not (0 <= time <= steps and 0 <= count <= labels.shape[1]):
            continue
        if not ((z >= 0) & (z < classes) & (z != blank % classes)).all():
            continue
        symbols = np.full(2 * count + 1, blank % classes)
        symbols[1::2] = z
        own = x[i, :time, symbols].T
        if not (np.isnan(own) | np.isposinf(own)).any():
            found[i, :time] = _best_path(own, symbols)
    return found if layout == "NTC" else found.T


def _best_path(own: Array, symbols: Array) -> list[int]:
    """The label of each step, or -1: of scores (T, S) of states with these symbols."""
    sums, moves = [0.0] + [-np.inf] * (len(symbols) - 1), []
    for row in own:
        best = []
        for s in range(len(symbols)):
            skip = s >= 3 and s % 2 == 1 and symbols[s] != symbols[s - 2]
            best.append(max(range(min(s, 1 + skip) + 1), key=lambda back: sums[s - back]))  # the first of the largest
        sums = [sums[s - back] + row[s] for s, back in enumerate(best)]
        moves.append(best)
    last = len(symbols) - 1
    state = last - 1 if last and sums[last - 1] >= sums[last] else last
    if sums[state] == -np.inf:
        return [-1] * len(own)
    path = []
    for best in reversed(moves):
        path.append((state + 1) // 2 if state % 2 else 0)
        state -= best[state]
    return path[::-1]


def ctc_lengths(paddings: Array, /) -> Array:
    """The number of elements of each row before the first that is not 0."""
    return np.array([next((t for t, v in enumerate(row) if v != 0), len(row)) for row in paddings], np.int32)


def _all(
    logits: Array, labels: Array, logit_lengths: Any, label_lengths: Any, *, blank: int, normalize: str, layout: str,
    arithmetic: str,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Losses, posteriors and gradients."""
    x = wide(logits if layout == "NTC" else logits.swapaxes(0, 1), arithmetic)
    n, steps, classes = x.shape
    solve = _golden if arithmetic == "golden" else _ordered
    out = np.dtype(np.float64) if arithmetic == "golden" else x.dtype
    loss, posterior = np.zeros(n, out), np.zeros((n, steps, labels.shape[1] + 1), out)
    gradient = np.zeros(x.shape, out)
    for i in range(n):
        time = steps if logit_lengths is None else int(logit_lengths[i])
        count = labels.shape[1] if label_lengths is None else int(label_lengths[i])
        known = 0 <= time <= steps and 0 <= count <= labels.shape[1]
        time, z = max(min(time, steps), 0) if known else steps, labels[i, : max(count, 0)].astype(np.int64)
        known = known and bool(((z >= 0) & (z < classes) & (z != blank % classes)).all())
        own, symbols = x[i, :time], np.array([blank % classes, *(z if known else [])], np.int64)
        read = own if normalize == "softmax" else own[:, symbols]
        known = known and not (np.isnan(read) | np.isposinf(read)).any()
        known = known and not (normalize == "softmax" and np.isneginf(read).all(1).any())
        if not known:
            loss[i], posterior[i, :time], gradient[i, :time] = np.nan, np.nan, np.nan
            continue
        loss[i], share, probabilities = solve(own, symbols, normalize)
        if np.isfinite(loss[i]):
            posterior[i, :time, : len(symbols)] = share
            gradient[i, :time] = probabilities
            for k in set(symbols.tolist()):
                gradient[i, :time, k] -= pairs([share[:, j] for j in np.flatnonzero(symbols == k)])
    gradient = gradient if layout == "NTC" else gradient.swapaxes(0, 1)
    return loss, posterior, gradient + 0 if arithmetic == "golden" else round_to(gradient, logits.dtype)


def pairs(terms: list[Array]) -> Array:
    """Terms added in pairs of neighbours, then pairs of these, and so on."""
    while len(terms) > 1:
        terms = [sum(terms[i + 1 : i + 2], terms[i]) for i in range(0, len(terms), 2)]
    return terms[0]


def halves(x: Array) -> Array:
    """The sum along the last axis: padded with zeros to a power of two, the second half added to the first."""
    length = x.shape[-1]
    if not length:
        return np.zeros(x.shape[:-1], x.dtype)
    x = np.concatenate([x, np.zeros((*x.shape[:-1], (1 << (length - 1).bit_length()) - length), x.dtype)], -1)
    with np.errstate(invalid="ignore"):
        while x.shape[-1] > 1:
            x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


# ---- golden: logarithms ------------------------------------------------------------------------------------------


def _golden(x: Array, symbols: Array, normalize: str) -> tuple[Any, Array, Array]:
    """The loss, the posterior by symbol, and the probabilities that the gradient starts from."""
    with np.errstate(all="ignore"):
        if normalize == "softmax":
            x = x - x.max(1, keepdims=True, initial=-np.inf)
            x = x - np.log(np.exp(x).sum(1, keepdims=True))
        states = np.array([j for i in range(1, len(symbols)) for j in (0, i)] + [0])
        z = symbols[states]
        skip = np.array([s >= 3 and s % 2 == 1 and z[s] != z[s - 2] for s in range(len(z))])
        none = x.dtype.type(-np.inf)
        alpha, alphas = np.where(np.arange(len(z)) < 1, 0, none), []
        for row in x:
            before = np.concatenate([[none, none], alpha])
            came = np.logaddexp(np.logaddexp(alpha, before[1:-1]), np.where(skip, before[:-2], none))
            alpha = row[z] + came
            alphas.append(alpha)
        last = np.where(np.arange(len(z)) >= len(z) - 2, 0, none)
        beta, betas = last, []
        for row in x[::-1]:
            betas.append(beta)
            beta = row[z] + beta
            after, skipped = np.append(beta, [none, none]), np.append(np.where(skip, beta, none), [none, none])
            beta = np.logaddexp(np.logaddexp(beta, after[1:-1]), skipped[2:])
        log = np.logaddexp.reduce(alpha + last)
        if not len(x):
            log = alpha[-1]
        share = np.zeros((len(x), len(symbols)))
        for t, (a, b) in enumerate(zip(alphas, betas[::-1], strict=True)):
            np.add.at(share[t], states, np.exp(a + b - log).astype(np.float64))
        return np.float64(-log) + 0, share, np.exp(x) if normalize == "softmax" else np.zeros(x.shape)


# ---- ordered: mantissa and exponent ------------------------------------------------------------------------------

ZERO, LARGEST, FARTHEST = -(2**29), 2**28, 2.0**27
# Degrees of the polynomials, the parts of log 2, the least exponent of a plain result.
CONSTANTS = {
    np.dtype(np.float32): (7, 5, 0.693359375, -2.121944400546905827679e-4, -100),
    np.dtype(np.float64): (13, 11, 6.93147180369123816490e-01, 1.90821492927058770002e-10, -1000),
}


def normal(m: Array, e: Array) -> Number:
    """m 2^e with m from 1/2 to 1."""
    m, shift = np.frexp(m)
    e = e + shift
    zero = (m == 0) | (e < -LARGEST)
    return np.where(zero, 0, m).astype(m.dtype), np.where(zero, ZERO, np.minimum(e, LARGEST))


def aligned(*terms: Number) -> tuple[Array, Array]:
    """The sum from the left, times 2 to minus the largest exponent; and this exponent."""
    top = np.max([e for _, e in terms], 0)
    parts = [np.ldexp(m, np.maximum(e - top, -200)) for m, e in terms]
    return sum(parts[1:], parts[0]), top


def plain(m: Array, e: Array) -> Array:
    """m 2^e, 0 where e is small."""
    least = CONSTANTS[m.dtype][4]
    return np.where(e < least, 0, np.ldexp(m, np.clip(e, least, -least))).astype(m.dtype)


def horner(coefficients: list[float], x: Array) -> Array:
    total = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total = total * x + x.dtype.type(c)
    return total


def exponential(d: Array) -> Number:
    """e^d as w 2^n; w = 0 far from 0."""
    degree, _, high, low, _ = CONSTANTS[d.dtype]
    of = d.dtype.type
    near = np.abs(d) <= FARTHEST
    d = np.where(near, d, 0).astype(d.dtype)
    n = np.rint(d * of(1 / math.log(2)))
    r = np.clip((d - n * of(high)) - n * of(low), of(-0.5), of(0.5))
    w = horner([1 / math.factorial(k) for k in range(degree, -1, -1)], r)
    return np.where(near, w, 0).astype(d.dtype), n.astype(np.int64)


def minus_logarithm(m: Array, e: Array) -> Array:
    """-log(m 2^e), for m from 1/2 to 1."""
    _, terms, high, low, _ = CONSTANTS[m.dtype]
    of = m.dtype.type
    low_half = m < of(math.sqrt(0.5))
    m, e = np.where(low_half, m + m, m), np.where(low_half, e - 1, e).astype(m.dtype)
    s = (m - of(1)) / (m + of(1))
    half = s * horner([1 / (2 * k + 1) for k in range(terms, -1, -1)], s * s)
    return -(e * of(high) + (e * of(low) + (half + half)))


def _ordered(x: Array, symbols: Array, normalize: str) -> tuple[Any, Array, Array]:
    steps, count = len(x), len(symbols) - 1
    probabilities, of_classes = np.full_like(x, -0.0), exponential(x)  # what is subtracted from -0 is negated, also 0
    if normalize == "softmax" and steps:
        with np.errstate(invalid="ignore", over="ignore"):
            w, n = exponential(x - x.max(1, keepdims=True))
        w = w * (x.dtype.type(1) / halves(plain(w, n)))[:, None]
        probabilities, of_classes = plain(w, n), (w, n)
    m, e = normal(*(v[:, symbols] for v in of_classes))
    skip = np.array([i > 0 and symbols[i + 1] != symbols[i] for i in range(count)], bool)
    none = lambda size: (np.zeros(size, x.dtype), np.full(size, ZERO))
    joined = lambda *parts: tuple(np.concatenate(v) for v in zip(*parts, strict=True))
    cut = lambda a, part: tuple(v[part] for v in a)
    at = lambda place: normal((np.arange(count + 1) == place).astype(x.dtype), np.zeros(count + 1, np.int64))
    skipped = lambda a: tuple(np.where(skip, v, z) for v, z in zip(a, none(count), strict=True))

    def times(total: Number, t: int, part: slice) -> Number:
        return normal(total[0] * m[t, part], total[1] + e[t, part])

    blank, label = slice(0, 1), slice(1, None)
    blanks, labels, forward = at(0), none(count), []
    for t in range(steps):
        before = joined(none(1), cut(labels, slice(0, -1))) if count else labels
        new = times(aligned(blanks, joined(none(1), labels)), t, blank)
        labels = times(aligned(labels, cut(blanks, slice(0, -1)), skipped(before)), t, label)
        blanks = new
        forward.append((blanks, labels))
    total = normal(*aligned(cut(blanks, slice(count, None)), *([cut(labels, slice(count - 1, None))] if count else [])))
    total = cut(total, 0)
    blanks, labels, backward = at(count), none(count), []
    for t in reversed(range(steps)):
        after = joined(cut(skipped(labels), slice(1, None)), none(1)) if count else labels
        ends = (
            normal(*aligned(blanks, joined(labels, none(1)))),
            normal(*aligned(labels, cut(blanks, slice(1, None)), after)),
        )
        backward.append(ends)
        blanks, labels = (times(end, t, part) for end, part in zip(ends, (blank, label), strict=True))
    share = np.zeros((steps, count + 1), x.dtype)
    if total[0] == 0:
        return x.dtype.type(np.inf), share, probabilities
    inverse = x.dtype.type(1) / total[0]
    for t, (a, b) in enumerate(zip(forward, reversed(backward), strict=True)):
        each = [plain(p[0] * q[0] * inverse, p[1] + q[1] - total[1]) for p, q in zip(a, b, strict=True)]
        share[t] = np.append(halves(each[0]), each[1])
    loss = minus_logarithm(*total)
    loss = max(loss, x.dtype.type(0)) if normalize == "softmax" else loss
    return loss + x.dtype.type(0), share, probabilities
