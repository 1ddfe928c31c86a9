"""Connectionist temporal classification: `ctc_loss`, what it sums over, and lengths from paddings.

Letters: N sequences, T steps, V classes, L labels.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, export
from jax.typing import ArrayLike

from jaxdnn._src.core import blending, checks, primitives, trees
from jaxdnn._src.core.determinism import is_fixed, required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import at_edges, product, quotient, real, rounded
from jaxdnn._src.ctc.primitive import CtcSpec

LAYOUTS = ("NTC", "TNC")
NORMALIZE = ("softmax", "none")
INFEASIBLE = ("inf", "zero")
REDUCTIONS = ("none", "mean", "sum")
_FLOATS = blending.FLOATS[:4]


@public
def ctc_loss(
    logits: ArrayLike,
    labels: ArrayLike,
    /,
    *,
    logit_lengths: ArrayLike | None = None,
    label_lengths: ArrayLike | None = None,
    blank: int = 0,
    normalize: str = "softmax",
    infeasible: str = "inf",
    reduction: str = "none",
    layout: str = "NTC",
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """The CTC loss: minus the logarithm of the probability of labels, over all their alignments with the steps.

    loss = -log Σ_π Π_t p_t(π_t)        p_t = softmax(logits_t)

    The sum runs over the paths π, of a class a step, that are the labels once runs of a class are joined and then the
    blanks left out: between two equal labels a path has a blank.

    Args:
      logits: (N, T, V); float32, bfloat16, float16, float64. Log-probabilities are logits too.
      labels: (N, L), integers. What stands behind a sequence's labels is not read.
      logit_lengths: (N,), integers from 0 to T: the steps of each sequence; None is T. Logits of later steps are not
        read. For paddings, as optax has them, see `ctc_lengths`.
      label_lengths: (N,), integers from 0 to L; None is L.
      blank: the class that stands for no label, from -V to V - 1: a negative one counts from the end.
      normalize: "softmax", or "none": p_t = exp(logits_t), log scores that need not add up to 1.
      infeasible: the loss of labels that no path has: with their repeats they are more than the steps, or a probability
        is 0. "inf", or "zero". The gradient is 0 in both.
      reduction: "none"; "sum"; or "mean" as PyTorch has it: the mean over the batch of losses divided by the number of
        their labels, or by 1 if they have none.
      layout: "NTC", or "TNC" for logits of shape (T, N, V).
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      The losses in float32 (float64 for float64): (N,), or a scalar for "mean" and "sum". NaN for a sequence with a
      label that is the blank or no class, with a length out of range, or with a step whose scores are NaN, all -inf, or
      +inf; its gradient is NaN too.

    Differentiation: any order, forward and reverse, in logits. The gradient is softmax(logits_t) minus the
      posterior (`ctc_posterior`) of each class, and under "none" minus the posterior alone: the true derivative, where
      PyTorch subtracts it from a softmax all the same. It is 0 at steps beyond the length and for infeasible labels.

    Numerics: computed in float32 (float64 for float64) and rounded once. Probabilities have an exponent of their own:
      the error of a loss is a few units of 2^-24 a step relative to 1, not to the loss, and nothing underflows between
      e^-(10^8) and 1; a probability below is 0. A loss is not below 0, but under "none". Levels: losses and gradients
      "portable" ("mean" and "sum" of a batch that `jax.export` leaves open: run_to_run); derivatives along tangents
      "mesh_invariant"; second derivatives run_to_run. For the gradient 16 bytes (32 in float64) a step and state are
      kept while it is computed, of 2 L + 1 states, and then 4 a step and label.

    Raises:
      ValueError: shapes that do not fit, a blank that is no class, an unknown option. TypeError: a dtype that is not
      served. NotImplementedError: no engine serves the call at the required level.

    Example:
      >>> loss = dnn.ctc_loss(jnp.zeros((1, 3, 4)), jnp.array([[1]]))  # 6 of 64 paths: 1__ _1_ __1 11_ _11 111
      >>> round(float(jnp.exp(-loss[0])) * 64, 3)
      6.0

    Sources: Graves et al., "Connectionist temporal classification" (ICML 2006). cuDNN's cudnnCTCLoss is blank 0. Of
      PyTorch's ctc_loss log_probs are logits of layout "TNC", `zero_infinity` is infeasible "zero", and concatenated
      targets have to be padded. `optax.ctc_loss` has paddings (`ctc_lengths`) and a finite loss for infeasible labels.
    """
    operands, spec, infeasible, reduction = _read(
        logits,
        labels,
        logit_lengths,
        label_lengths,
        blank,
        normalize,
        layout,
        engine,
        determinism,
        infeasible,
        reduction,
    )
    loss = at_edges(spec.level, primitives.call("ctc_loss", *operands, spec=spec))
    if infeasible == "zero":
        loss = jnp.where(jnp.isposinf(loss), jnp.zeros_like(loss), loss)
    if reduction == "none":
        return loss
    if reduction == "mean":
        loss = product(loss, quotient(jnp.ones_like(loss), real(jnp.maximum(operands[3], 1), loss.dtype)))
    return _reduced(reduction, loss, spec.level)


def _reduced(reduction: str, losses: Array, level: str) -> Array:
    """Their sum or mean, added in an order that depends on their number alone; of an open batch, in XLA's."""
    open_batch = export.is_symbolic_dim(losses.shape[0])
    if open_batch and is_fixed(level):
        raise NotImplementedError(
            f"`determinism` {level!r} cannot be guaranteed for `reduction` {reduction!r} over a batch that "
            "`jax.export` leaves open, expected 'run_to_run' or less, or reduction 'none'."
        )

    def run(losses: Array) -> Array:
        total = jnp.sum(losses) if open_batch else trees.halves(rounded(losses), (0,)).reshape(())
        if reduction == "sum":
            return total
        return product(total, quotient(jnp.ones_like(total), jnp.asarray(losses.shape[0], losses.dtype)))

    return primitives.composed(run, lambda losses: Factors((("n",),), ((),), ()), losses)


@public
def ctc_posterior(
    logits: ArrayLike,
    labels: ArrayLike,
    /,
    *,
    logit_lengths: ArrayLike | None = None,
    label_lengths: ArrayLike | None = None,
    blank: int = 0,
    normalize: str = "softmax",
    layout: str = "NTC",
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """The probability of each label in each step, given that the labels are right: a soft alignment.

    y[n, t, l] = Σ_π P(π) / Σ_π P(π)        the first sum over the paths of `ctc_loss` that emit label l in step t

    Args:
      logits, labels, logit_lengths, label_lengths, blank, normalize, layout: as in `ctc_loss`.
      engine, determinism: as in `ctc_loss`.

    Returns:
      y, (N, T, L + 1) for layout "NTC", (T, N, L + 1) for "TNC", in float32 (float64 for float64): y[..., 0] is the
      blank's, y[..., l] that of the l-th label, also where another label has its class. Each step's are 1 in sum. 0 at
      steps beyond the length and of labels that no path has; NaN where the loss is.

    Differentiation: any order, forward and reverse, in logits.

    Numerics: as in `ctc_loss`, determinism level "portable", derivatives "mesh_invariant". The blanks' shares are added
      on a tree.

    Raises:
      ValueError, TypeError, NotImplementedError: as `ctc_loss`.

    Example:
      >>> dnn.ctc_posterior(jnp.zeros((1, 2, 4)), jnp.array([[2, 3]]))[0].tolist()
      [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]

    Sources: Graves et al. (2006), equations 14 and 15. cuDNN and PyTorch have it inside of their gradients alone.
    """
    operands, spec, *_ = _read(
        logits, labels, logit_lengths, label_lengths, blank, normalize, layout, engine, determinism
    )
    found = at_edges(spec.level, primitives.call("ctc_posterior", *operands, spec=spec)[1])
    return found if layout == "NTC" else jnp.swapaxes(found, 0, 1)


@public
def ctc_align(
    logits: ArrayLike,
    labels: ArrayLike,
    /,
    *,
    logit_lengths: ArrayLike | None = None,
    label_lengths: ArrayLike | None = None,
    blank: int = 0,
    layout: str = "NTC",
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Forced alignment: which label the most probable path emits in each step, given that the labels are right.

    y[n] = argmax_π Σ_t logits[n, t, π_t]        over the paths of `ctc_loss`

    A step's normalisation is common to all paths, so logits and log-probabilities have the same result.

    Args:
      logits, labels, logit_lengths, label_lengths, blank, layout: as in `ctc_loss`; only logits of the blank and of the
        sequence's labels are read.
      engine, determinism: as in `ctc_loss`.

    Returns:
      y, (N, T) for layout "NTC", (T, N) for "TNC", int32: 0 in steps that emit the blank, l in those that emit the l-th
      label, its place in `ctc_posterior`; -1 in steps beyond the length. -1 in all steps where no path has the labels,
      and of a sequence with a label that is the blank or no class, a length out of range, or a logit that is NaN or
      +inf. Of equal sums, from the end back: that of a path that ends in the last label, not in the blank behind it;
      that stays in its state; that came from the state before it; that left out the blank between two labels.

    Differentiation: none.

    Numerics: sums in float64, from the first step on, so that those of equal sums of 16-bit logits are equal.
      Determinism level "portable". A byte a step and state is kept, of 2 L + 1 states.

    Raises:
      ValueError, TypeError, NotImplementedError: as `ctc_loss`.

    Example:
      >>> logits = jnp.array([[[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 1.0, 2.0], [0.0, 0.0, 2.0]]])
      >>> dnn.ctc_align(logits, jnp.array([[1, 2]])).tolist()
      [[1, 0, 2, 2]]

    Sources: torchaudio's `forced_align` has classes in place of places, and the logarithm of each step's probability:
      `jnp.take_along_axis` of labels, and of log-probabilities, at y. It raises for labels that no path has.
    """
    operands, spec, *_ = _read(logits, labels, logit_lengths, label_lengths, blank, "none", layout, engine, determinism)
    found = at_edges(spec.level, primitives.call("ctc_align", *operands, spec=spec))
    return found if layout == "NTC" else jnp.swapaxes(found, 0, 1)


@public
def ctc_lengths(paddings: ArrayLike, /) -> Array:
    """The lengths of sequences that are padded at their ends, from paddings as optax has them.

    y[n] = the number of elements of paddings[n] before the first one that is not 0

    Args:
      paddings: (N, T), 0 for what belongs to a sequence; booleans, integers or floats.

    Returns:
      y, (N,), int32.

    Differentiation: none.

    Numerics: integers, determinism level "portable".

    Raises:
      ValueError: an array that has not two axes. TypeError: complex numbers.

    Example:
      >>> dnn.ctc_lengths(jnp.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])).tolist()
      [2, 3]

    Sources: `optax.ctc_loss` takes logit_paddings and label_paddings; its logits may be padded anywhere, which is not
      served here: what stands behind the first padding counts as padding.
    """
    paddings = checks.array("paddings", paddings)
    if paddings.ndim != 2:
        raise ValueError(f"`paddings` must have shape (N, T), got {checks.shown(tuple(paddings.shape))}.")
    if jnp.issubdtype(paddings.dtype, jnp.complexfloating):
        raise TypeError(f"`paddings` must be booleans, integers or floats, got {paddings.dtype.name}.")
    run = lambda paddings: jnp.sum(jnp.cumprod((~paddings.astype(bool)).astype(jnp.int32), 1), 1, dtype=jnp.int32)
    return primitives.composed(run, lambda paddings: Factors((("n", "t"),), (("n",),), ("n",)), paddings)


# ---- reading arguments -----------------------------------------------------------------------------------------------


def _read(
    logits: Any,
    labels: Any,
    logit_lengths: Any,
    label_lengths: Any,
    blank: Any,
    normalize: Any,
    layout: Any,
    engine: Any,
    determinism: Any,
    infeasible: Any = "inf",
    reduction: Any = "none",
) -> tuple[tuple[Array, ...], CtcSpec, str, str]:
    """The operands of the primitives, logits with the batch first, and what is known when the call is traced."""
    logits, labels = checks.array("logits", logits), checks.array("labels", labels)
    checks.dtype("logits", logits, _FLOATS)
    for name, value, choices in (
        ("layout", layout, LAYOUTS),
        ("normalize", normalize, NORMALIZE),
        ("infeasible", infeasible, INFEASIBLE),
        ("reduction", reduction, REDUCTIONS),
    ):
        checks.choice(name, value, choices)
    if logits.ndim != 3:
        axes = ", ".join(layout.replace("C", "V"))
        hint = checks.unbatched("logits", logits.ndim, 3)
        raise ValueError(f"`logits` must have shape ({axes}), got {checks.shown(tuple(logits.shape))}{hint}.")
    logits = logits if layout == "NTC" else jnp.swapaxes(logits, 0, 1)
    n, steps, classes = logits.shape
    if classes < 1:
        raise ValueError(f"`logits` must have at least one class, got shape {tuple(logits.shape)}.")
    _integers("labels", labels)
    other = f" (in layout {LAYOUTS[layout == LAYOUTS[0]]} `logits` has {steps} sequences)"
    if labels.ndim != 2 or labels.shape[0] != n:
        hint = other if labels.ndim == 2 and labels.shape[0] == steps else checks.unbatched("labels", labels.ndim, 2)
        raise ValueError(
            f"`labels` must have shape (N, L) with N = {n} as in `logits`, the labels of each sequence padded to one "
            f"length, got {checks.shown(tuple(labels.shape))}{hint}."
        )
    blank = checks.integer("blank", blank)
    if not -classes <= blank < classes:
        raise ValueError(f"`blank` must be a class from {-classes} to {classes - 1}, got {blank}.")
    blank %= classes
    lengths = [
        _lengths(name, given, n, most)
        for name, given, most in (
            ("logit_lengths", logit_lengths, steps),
            ("label_lengths", label_lengths, labels.shape[1]),
        )
    ]
    spec = CtcSpec(blank, normalize, engine, required(determinism))
    operands = at_edges(spec.level, logits), _classes(labels, classes, blank), *lengths
    return operands, spec, infeasible, reduction


def _integers(name: str, value: Array) -> None:
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"`{name}` must be integers, got {value.dtype.name}.")


def _within(value: Array, most: int) -> Array:
    """Integers of any dtype as int32, -1 for those that are not from 0 to `most`."""
    wide = value if value.dtype.itemsize >= 4 else value.astype(jnp.int32)  # which holds any `most`
    known = (wide >= 0) & (wide <= most)
    return jnp.where(known, wide.astype(jnp.int32), jnp.full(wide.shape, -1, jnp.int32))


def _classes(labels: Array, classes: int, blank: int) -> Array:
    """The labels, -1 for those that are no class or the blank."""
    found = _within(labels, classes - 1)
    return jnp.where(found == blank, jnp.full_like(found, -1), found)


def _lengths(name: str, value: Any, n: Any, most: int) -> Array:
    """The lengths, -1 for those out of range."""
    if value is None:
        return jnp.full((n,), most, jnp.int32)
    value = checks.array(name, value)
    _integers(name, value)
    checks.shape(name, value, (n,), "one for every sequence")
    return _within(value, most)
