"""The cross-entropy of logits."""

from __future__ import annotations

import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jaxdnn._src.core import blending, checks, primitives
from jaxdnn._src.core.determinism import is_fixed, require
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import at_edges, product, quotient
from jaxdnn._src.softmax import targets
from jaxdnn._src.softmax import xla as formulas
from jaxdnn._src.softmax.primitive import SoftmaxSpec


@public
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    /,
    *,
    axis: int = -1,
    weights: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Cross-entropy of the softmax of logits with labels, or with distributions over the classes.

    lse = log Σ_c exp(z[c])
    t = (1 - ε) p + ε / C,  where p is the distribution, or 1 at the label and 0 elsewhere
    loss = Σ_c t[c] (lse - z[c]) + ζ lse²

    with z the logits, ε the label smoothing and ζ the weight of the z-loss, for every row of C classes. For logits that
    a linear layer makes, `linear_cross_entropy` never has all of them in memory.

    Args:
      logits: any shape with the C classes along `axis`; float32, bfloat16, float16, float64. A logit of -inf leaves its
        class out.
      labels: integers from 0 to C - 1, in the shape of the logits without `axis`: the loss of any other label but
        `ignore_index` is NaN, and so is the gradient. Or distributions, which need not add up to 1, in the shape of the
        logits, of their dtype or the loss's.
      axis: the axis of the classes.
      weights: what every row counts, in the shape of the logits without `axis`, of their dtype or the loss's. Weights
        by class: give class_weights[labels].
      label_smoothing: ε, from 0 to 1: so much of the target is spread over all C classes evenly.
      z_loss: ζ, at least 0: the weight of lse², which keeps the logits from drifting.
      ignore_index: a label, inside or outside the classes, whose rows do not count at all: nothing in them, NaN
        neither, reaches the loss or a gradient, and their own gradient is 0. None: there is none.
      reduction: "mean", the sum of weights times losses over the sum of the weights (NaN if no row counts); "sum";
        "none", a loss for every row, multiplied by its weight.
      engine: None, or the name of the engine that must serve the rows' logsumexp.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      The loss in float32 (float64 for float64): a scalar, or for reduction "none" the logits' shape without `axis`.

    Differentiation: any order, forward and reverse, in logits, weights, and distributions. The gradient in logits,
      softmax (Σ t + 2 ζ lse) minus t, is computed from the logits and lse in one pass and rounded once (from
      batch_invariant on by another pass, of the engine "ordered"); beside the arguments only lse is kept for it. The
      gradient in distributions is infinite where a logit is -inf.

    Numerics: computed in float32 (float64 for float64). A class with target 0 adds nothing, whatever its logit; one
      that has a target above 0, by smoothing too, and the logit -inf makes the loss infinite. A row with NaN, or of
      nothing but -inf, is NaN. The levels are those of `logsumexp`, whose engines serve: "xla" is run_to_run, "ordered"
      mesh_invariant, "hopper" batch_invariant; from batch_invariant on, all sums have a fixed order, which for "mean"
      and "sum" depends on the number of rows. Second derivatives are run_to_run.

    Raises:
      ValueError: shapes that do not fit; label_smoothing outside [0, 1]; a negative z_loss; an unknown reduction;
        `ignore_index` with distributions.
      TypeError: a dtype that is not among the above.
      NotImplementedError: a determinism level above mesh_invariant, or that the engine does not guarantee.

    Example:
      >>> round(float(dnn.cross_entropy(jnp.zeros((3, 8)), jnp.array([0, 5, 7]))), 4)  # log 8
      2.0794

    Sources: PyTorch's cross_entropy, whose axis is 1, whose ignore_index is -100 by default, whose mean for
      distributions divides by the number of rows as here, and whose weights are by class; ONNX's
      SoftmaxCrossEntropyLoss; optax's softmax_cross_entropy and softmax_cross_entropy_with_integer_labels, which return
      a loss for every row. Label smoothing: Szegedy et al., arXiv:1512.00567; the z-loss: Chowdhery et al.,
      arXiv:2204.02311.
    """
    level = require("cross_entropy", determinism, "mesh_invariant", "its exponentials are the device's")
    logits, labels, weights, spec = _read(
        logits, labels, axis, weights, label_smoothing, z_loss, ignore_index, reduction, engine, level
    )
    operands = (logits, labels) if weights is None else (logits, labels, weights)
    edge = ft.partial(at_edges, level)
    operands = tuple(edge(v) if jnp.issubdtype(v.dtype, jnp.floating) else v for v in operands)
    # Made again on the way back, but for what the policy keeps: a residual of the logits' size would be another copy.
    run = jax.checkpoint(ft.partial(_loss, spec), policy=_keeps)
    return edge(primitives.composed(run, ft.partial(_factors, spec), *operands))


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What is known when a call is traced; the axis is counted from the last."""

    axis: int
    spread: bool  # whether labels are distributions
    label_smoothing: float
    z_loss: float
    ignored: int | None
    reduction: str
    accumulate: np.dtype
    engine: str | None
    level: str

    @property
    def fixed(self) -> bool:
        return is_fixed(self.level)

    def times(self, a: Array, b: Array) -> Array:
        return product(a, b) if self.fixed else a * b

    def sum(self, x: Array, axes: tuple[int, ...]) -> Array:
        """The sum, in a fixed order if the level asks for one; the axes are gone."""
        total = (formulas.tree_sum if self.fixed else formulas.xla_sum)(x, axes)
        return jnp.squeeze(total, axes)

    def logsumexp(self, z: Array) -> Array:
        wide = self.accumulate
        rows = SoftmaxSpec((self.axis,), wide, wide, engine=self.engine, level=self.level)
        return primitives.call("logsumexp", z, spec=rows)

    def softmax(self, z: Array) -> Array:
        wide = self.accumulate
        rows = SoftmaxSpec((self.axis,), wide, wide, engine="ordered", level=self.level)
        return primitives.call("softmax", z, spec=rows)


def _keeps(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name == "jaxdnn_logsumexp"


# ---- reading arguments -----------------------------------------------------------------------------------------------


def _read(
    logits: Any,
    labels: Any,
    axis: Any,
    weights: Any,
    label_smoothing: Any,
    z_loss: Any,
    ignore_index: Any,
    reduction: Any,
    engine: Any,
    level: str,
) -> tuple[Array, Array, Array | None, _Spec]:
    logits, labels = checks.array("logits", logits), checks.array("labels", labels)
    dtype = checks.dtype("logits", logits, checks.FLOATS)
    (at,) = checks.axes("logits", checks.integer("axis", axis), len(logits.shape))
    if logits.shape[at] == 0:
        raise ValueError(f"`logits` must have at least one class along `axis` {axis}, got {tuple(logits.shape)}.")
    rows = tuple(size for i, size in enumerate(logits.shape) if i != at)
    wide = blending.accumulator(dtype)
    spread = bool(jnp.issubdtype(labels.dtype, jnp.floating))
    if spread:
        labels = targets.vector(
            "labels", labels, tuple(logits.shape), dtype, wide, "that of `logits`, as distributions"
        )
    elif jnp.issubdtype(labels.dtype, jnp.integer):
        checks.shape("labels", labels, rows, "one for every row of `logits`")
    else:
        raise TypeError(f"`labels` must be integers, or distributions in a dtype of floats, got {labels.dtype}.")
    if spread and ignore_index is not None:
        raise ValueError(f"`ignore_index` must be None where `labels` are distributions, got {ignore_index!r}.")
    spec = _Spec(
        axis=at - len(logits.shape),
        spread=spread,
        label_smoothing=targets.between("label_smoothing", label_smoothing, 1.0),
        z_loss=targets.between("z_loss", z_loss, math.inf),
        ignored=None if ignore_index is None else checks.integer("ignore_index", ignore_index),
        reduction=checks.choice("reduction", reduction, targets.REDUCTIONS),
        accumulate=wide,
        engine=engine,
        level=level,
    )
    if weights is not None:
        weights = targets.vector("weights", weights, rows, dtype, wide, "one for every row of `logits`")
    return logits, labels, weights, spec


def _factors(spec: _Spec, logits: Any, *others: Any) -> Factors:
    """Every axis may be sharded: XLA shards along them."""
    rank = len(logits.shape)
    every = tuple("c" if i == rank + spec.axis else f"l{i}" for i in range(rank))
    rows = tuple(name for name in every if name != "c")
    operands = (every, every if spec.spread else rows, *(rows,) * (len(others) - 1))
    return Factors(operands=operands, results=(rows if spec.reduction == "none" else (),), free=every)


# ---- the loss --------------------------------------------------------------------------------------------------------


def _loss(spec: _Spec, z: Array, labels: Array, *given: Array) -> Array:
    """The loss of rows, reduced. Rows that do not count are zeros throughout."""
    wide, rows = spec.accumulate, tuple(size for i, size in enumerate(z.shape) if i != z.ndim + spec.axis)
    weights = given[0].astype(wide) if given else jnp.ones(rows, wide)
    keep = None
    if spec.spread:
        labels = labels.astype(wide)
    else:
        if spec.ignored is not None and targets.holds(labels.dtype, spec.ignored):
            keep = labels != np.asarray(spec.ignored, labels.dtype)
            z = jnp.where(jnp.expand_dims(keep, spec.axis), z, jnp.zeros_like(z))
            weights = jnp.where(keep, weights, jnp.zeros_like(weights))
        labels = targets.class_indices(labels, z.shape[spec.axis])
        if keep is not None:  # any class, of a row without weight
            labels = jnp.where(keep, labels, jnp.zeros_like(labels))
    losses = _losses(spec, z, labels)
    losses = spec.times(weights, losses)
    if spec.reduction == "none":
        return losses
    every = tuple(range(losses.ndim))
    total = spec.sum(losses, every)
    if spec.reduction == "sum":
        return total
    count = spec.sum(weights, every)
    return quotient(total, count) if spec.fixed else total / count


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _losses(spec: _Spec, z: Array, labels: Array) -> Array:
    """The loss of every row: labels are class indices, -1 for those of no class, or distributions."""
    return _with_logsumexp(spec, z, labels)[0]


def _with_logsumexp(spec: _Spec, z: Array, labels: Array) -> tuple[Array, Array]:
    lse = spec.logsumexp(z)
    number = ft.partial(jnp.asarray, dtype=spec.accumulate)
    below = lambda: jnp.expand_dims(lse, spec.axis) - z.astype(spec.accumulate)
    if spec.spread:
        t = _targets(spec, z, labels)
        loss = spec.sum(jnp.where(t == 0, jnp.zeros_like(t), spec.times(t, below())), (spec.axis,))
    else:
        at = jnp.expand_dims(jnp.maximum(labels, 0), spec.axis)
        picked = jnp.take_along_axis(z, at, spec.axis, mode="promise_in_bounds")
        loss = lse - jnp.squeeze(picked, spec.axis).astype(spec.accumulate)
        if spec.label_smoothing:
            # Nothing of the label's logit remains where all of the target is spread.
            own = spec.times(number(1 - spec.label_smoothing), loss) if spec.label_smoothing < 1 else number(0)
            even = spec.times(number(spec.label_smoothing / z.shape[spec.axis]), spec.sum(below(), (spec.axis,)))
            loss = own + even
        loss = jnp.where(labels >= 0, loss, jnp.full_like(loss, jnp.nan))
    if spec.z_loss:
        loss = loss + spec.times(spec.times(number(spec.z_loss), lse), lse)
    return loss, lse


def _targets(spec: _Spec, z: Array, labels: Array) -> Array:
    """t of every class, NaN for a label of no class."""
    number, even = ft.partial(jnp.asarray, dtype=spec.accumulate), spec.label_smoothing / z.shape[spec.axis]
    if spec.spread:
        return spec.times(number(1 - spec.label_smoothing), labels) + number(even) if even else labels
    labels = jnp.expand_dims(labels, spec.axis)
    here = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim + spec.axis) == labels
    t = jnp.where(here, number(1 - spec.label_smoothing + even), number(even))
    return jnp.where(labels >= 0, t, jnp.full_like(t, jnp.nan))


def _losses_jvp(spec: _Spec, primals: Any, tangents: Any) -> tuple[Array, Any]:
    z, labels = primals
    loss, lse = _with_logsumexp(spec, z, labels)
    number, wide = ft.partial(jnp.asarray, dtype=spec.accumulate), z.astype(spec.accumulate)
    dz, dlabels = tangents
    terms = []
    if not isinstance(dz, SymbolicZero):
        t = _targets(spec, z, labels)
        # Where bits are fixed by the engine whose exponentials are, on each device's part: from the logits alone.
        p = spec.softmax(z) if spec.fixed else jnp.exp(wide - jnp.expand_dims(lse, spec.axis))
        slope = spec.sum(t, (spec.axis,)) if spec.spread else jnp.ones_like(lse)
        if spec.z_loss:
            slope = slope + spec.times(number(2 * spec.z_loss), lse)
        g = spec.times(jnp.expand_dims(slope, spec.axis), p) - t
        terms.append(spec.sum(spec.times(g, dz.astype(spec.accumulate)), (spec.axis,)))
    if spec.spread and not isinstance(dlabels, SymbolicZero):
        d = spec.times(number(1 - spec.label_smoothing), jnp.expand_dims(lse, spec.axis) - wide)
        terms.append(spec.sum(spec.times(d, dlabels.astype(spec.accumulate)), (spec.axis,)))
    return loss, ft.reduce(jnp.add, terms) if terms else jnp.zeros_like(loss)


_losses.defjvp(_losses_jvp, symbolic_zeros=True)
