"""A linear layer and the cross-entropy of its softmax as one op, whose logits never exist all at once."""

from __future__ import annotations

import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jaxdnn._src.core import blending, checks, primitives, products
from jaxdnn._src.core.determinism import require
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors, vary_alike
from jaxdnn._src.core.primitives import composed, in_types
from jaxdnn._src.softmax import primitive, targets

CHUNK_LOGITS = 1 << 27  # logits that exist at once: 512 MiB in float32


@public
def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    /,
    *,
    bias: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    precision: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Cross-entropy of the softmax of a linear layer, without its logits in memory.

    z = x w + bias,  lse = log Σ_v exp(z[v])
    loss = lse - (1 - ε) z[label] - (ε / V) Σ_v z[v] + ζ lse²

    with ε the label smoothing and ζ the weight of the z-loss, for every row of x. The rows are worked through in
    chunks, and where a gradient is asked for, it is computed in the same pass: three matrix products in all, and the
    logits of one chunk in memory. For 8192 rows of a vocabulary of 128k, 0.5 GiB of logits instead of 4.

    Args:
      x: (..., D), the rows; float32, bfloat16, float16, float64.
      w: (D, V), the layer's weight, of x's dtype. A matrix of embeddings (V, D) is given as its transpose.
      labels: (...), integers from 0 to V - 1. The loss of any other label but `ignore_index` is NaN, and so
        is the gradient.
      bias: (V,), of x's dtype or the loss's; -inf leaves a word out.
      weights: (...), what every row counts, of x's dtype or the loss's. Weights by class: give class_weights[labels].
      label_smoothing: ε, from 0 to 1: so much of the target is spread over all V words evenly.
      z_loss: ζ, at least 0: the weight of lse², which keeps the logits from drifting.
      ignore_index: a label, inside or outside the vocabulary, whose rows do not count at all: nothing in them, NaN
        neither, reaches the loss or a gradient, and their own gradient is 0. None: there is none.
      reduction: "mean", the sum of weights times losses over the sum of the weights (NaN if no row counts, with
        gradients of 0); "sum"; "none", a loss for every row, multiplied by its weight.
      chunk: the most rows whose logits are in memory at a time; at least half as many are, if the rows can be divided
        so (otherwise the last chunk is padded); None: as many as have 2^27 logits.
      precision: None multiplies the stored values exactly; "tf32" lets float32 operands be cut for tensor cores.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      The loss in float32 (float64 for float64): a scalar, or (...) for reduction "none".

    Differentiation: forward and reverse, in x, w, bias and weights, to any order. Under "mean" and "sum" the gradient
      is made where the loss is, and only in what is differentiated; with "none" every chunk is computed again on the
      way back, where the parts of the gradient in w are rounded to its dtype before they are added.

    Numerics: products accumulate in float32 (float64 for float64), and so do exponentials, the loss, and the sum of the
      gradient in w over the chunks. What is multiplied for the gradients, softmax minus target, is rounded to x's dtype
      first, for the gradient in w times weight over the power of two nearest the largest weight. Guaranteed is
      run_to_run: XLA orders the sums. Rows are assigned to the K chunks in turn (0, K, 2K, ... to the first), so rows
      sharded over a mesh stay where they are if the number of devices divides that of a chunk's rows, and no chunk is
      filled up; else XLA may gather x. A sharded vocabulary stays so. On explicit mesh axes the loss of reduction
      "none" is sharded as the rows of x are.

    Raises:
      ValueError: shapes that do not fit; label_smoothing outside [0, 1]; a negative z_loss; a chunk below 1; an unknown
        reduction or precision.
      TypeError: a dtype that is not among the above; labels that are no integers.
      NotImplementedError: a determinism level above run_to_run.

    Example:
      >>> x, w = jnp.zeros((3, 2)), jnp.ones((2, 8))
      >>> round(float(dnn.linear_cross_entropy(x, w, jnp.array([0, 5, 7]))), 4)  # log 8
      2.0794

    Sources: Wijmans et al., arXiv:2411.09009 (cut cross-entropy); Hsu et al., arXiv:2410.10989 (Liger kernels), from
      which the gradient in the forward pass is. The z-loss: Chowdhery et al., arXiv:2204.02311. Like PyTorch's
      cross_entropy of a Linear layer, whose weight is (V, D) and whose ignore_index is -100 by default.
    """
    arrays, spec = _read(
        x, w, labels, bias, weights, ignore_index, label_smoothing, z_loss, reduction, chunk, precision
    )
    require("linear_cross_entropy", determinism, "run_to_run", "XLA orders the sums of its matrix products")
    return _compiled(spec, *arrays)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What is known when a call is traced."""

    leading: tuple[int, ...]
    label_smoothing: float
    z_loss: float
    chunk: int
    reduction: str
    precision: lax.Precision
    accumulate: np.dtype
    ignored: int | None
    biased: bool  # whether a bias is given
    weighted: bool  # whether weights are

    def dot(self, a: Array, b: Array, over: tuple[int, int]) -> Array:
        """The matrix product over one axis of each, accumulated wide."""
        contract = (over[0],), (over[1],)
        return products.dot(a, b, contract, precision=self.precision, preferred=self.accumulate)


# ---- reading arguments -----------------------------------------------------------------------------------------------


def _read(
    x: Any,
    w: Any,
    labels: Any,
    bias: Any,
    weights: Any,
    ignore_index: Any,
    label_smoothing: Any,
    z_loss: Any,
    reduction: Any,
    chunk: Any,
    precision: Any,
) -> tuple[tuple[Array | None, ...], _Spec]:
    x, w, labels = (checks.array(name, v) for name, v in (("x", x), ("w", w), ("labels", labels)))
    dtype = checks.dtype("x", x, checks.FLOATS)
    checks.dtype("w", w, (dtype,))
    if len(x.shape) < 1 or len(w.shape) != 2 or w.shape[0] != x.shape[-1] or w.shape[1] < 1:
        raise ValueError(f"`w` must be (D, V) for `x` (..., D), got {tuple(w.shape)} for {tuple(x.shape)}.")
    leading = x.shape[:-1]
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"`labels` must be integers, got {labels.dtype}.")
    checks.shape("labels", labels, tuple(leading), "one for every row of x")
    checks.choice("reduction", reduction, targets.REDUCTIONS)
    checks.choice("precision", precision, (None, "tf32"))
    if precision == "tf32" and dtype != np.float32:
        raise TypeError(f"`precision` 'tf32' needs float32 operands, got {dtype.name}.")
    exact = dtype.itemsize >= 4 and precision is None
    rows, wide = math.prod(leading), blending.accumulator(dtype)
    spec = _Spec(
        leading=tuple(leading),
        label_smoothing=targets.between("label_smoothing", label_smoothing, 1.0),
        z_loss=targets.between("z_loss", z_loss, math.inf),
        chunk=_chunk(chunk, rows, w.shape[1]),
        reduction=reduction,
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        accumulate=wide,
        ignored=None if ignore_index is None else checks.integer("ignore_index", ignore_index),
        biased=bias is not None,
        weighted=weights is not None,
    )
    bias = None if bias is None else targets.vector("bias", bias, w.shape[1:], dtype, wide, "a word each")
    if weights is not None:
        weights = targets.vector("weights", weights, tuple(leading), dtype, wide, "one for every row of x")
    return (x, w, labels, bias, weights), spec


# Compiled as one: an eager call would compile the loop over the chunks anew every time.
@ft.partial(jax.jit, static_argnums=0)
def _compiled(spec: _Spec, x: Array, w: Array, labels: Array, bias: Array | None, weights: Array | None) -> Array:
    wide = spec.accumulate
    bias = jnp.zeros(w.shape[1:], wide) if bias is None else bias.astype(wide)
    weights = jnp.ones(spec.leading, wide) if weights is None else weights.astype(wide)
    arrays = (x, w, bias, weights, labels)
    factors = ft.partial(_factors, len(spec.leading), spec.reduction)
    if spec.reduction == "none":
        return composed(ft.partial(_reduced, spec), factors, *arrays)
    return in_types(ft.partial(_reduced, spec), factors, arrays)(*arrays)  # whose derivative keeps no more than these


def _reduced(spec: _Spec, *arrays: Array) -> Array:
    x, w, bias, weights, labels, keep = _flat(spec, *arrays)
    if spec.reduction == "none":
        return (weights * _rows(spec, x, w, bias, labels, keep)).reshape(spec.leading)
    total: Any = _total(spec, x, w, bias, weights, labels, keep)
    if spec.reduction == "sum":
        return total
    size = jnp.sum(weights)
    if spec.ignored is None and len(keep):
        return total / size
    # Where no row counts the mean is NaN; its gradients have nothing to add up and are 0, which 0 / 0 would not give.
    counts = jnp.any(keep)
    return total / jnp.where(counts, size, jnp.ones_like(size)) + jnp.where(counts, 0.0, jnp.nan).astype(total.dtype)


def _flat(spec: _Spec, x: Array, w: Array, bias: Array, weights: Array, labels: Array) -> tuple[Array, ...]:
    """x, w, bias, weights, labels, and which rows count: rows along one axis, zeros in what does not count."""
    rows = math.prod(spec.leading)
    x, weights, labels = x.reshape(rows, x.shape[-1]), weights.reshape(rows), labels.reshape(rows)
    keep = jnp.ones_like(labels, bool)
    if spec.ignored is not None and targets.holds(labels.dtype, spec.ignored):
        keep = labels != np.asarray(spec.ignored, labels.dtype)
        x = jnp.where(jnp.expand_dims(keep, 1), x, jnp.zeros_like(x))
        weights = jnp.where(keep, weights, jnp.zeros_like(weights))
    # What a loop carries varies over the same mesh axes throughout: so the gradient of an array that is the same on all
    # devices is added over the mesh once, after the loop.
    return tuple(vary_alike((x, w, bias, weights, targets.class_indices(labels, w.shape[1]), keep)))


def _factors(leading: int, reduction: str, *arrays: Any) -> Factors:
    """Every dimension may be sharded: XLA shards along them."""
    rows = tuple(f"l{i}" for i in range(leading))
    operands = ((*rows, "d"), ("d", "v"), ("v",), rows, rows)
    return Factors(operands=operands, results=(rows if reduction == "none" else (),), free=(*rows, "d", "v"))


def _chunk(chunk: Any, rows: int, words: int) -> int:
    if export.is_symbolic_dim(rows):
        raise NotImplementedError(
            f"`x` must have a number of rows known when traced, which are cut in chunks, got {rows}."
        )
    if chunk is None:
        return max(1, min(rows, CHUNK_LOGITS // words))
    if (found := checks.integer("chunk", chunk)) < 1:
        raise ValueError(f"`chunk` must be at least 1, got {found}.")
    return max(1, min(rows, found))


# ---- by chunks -------------------------------------------------------------------------------------------------------


def _scan(spec: _Spec, body: Any, init: Any, *arrays: Array) -> tuple[Any, Any]:
    """body(carry, *chunks of the arrays) over chunks of rows; every K-th row goes to the same of K chunks.

    So a chunk has rows of every part of the array: where it is sharded over devices, all of them work on every chunk.
    The rows that fill the last chunk up are zeros. What the body yields for its rows is put back into their order.
    """
    rows = len(arrays[0])
    count = _count(rows, spec.chunk)
    each = -(-rows // count)
    more = each * count - rows
    padded = [jnp.pad(a, [(0, more), *[(0, 0)] * (a.ndim - 1)]) if more else a for a in arrays]
    split = [a.reshape(each, count, *a.shape[1:]) for a in padded]

    def step(carry: Any, k: Array) -> tuple[Any, Any]:
        return body(carry, *(lax.dynamic_index_in_dim(a, k, 1, keepdims=False) for a in split))

    # Computed again where its derivative is taken, so that no chunk's logits are kept for that.
    carry, found = lax.scan(jax.checkpoint(step, prevent_cse=False), init, jnp.arange(count))
    join = lambda a: jnp.swapaxes(a, 0, 1).reshape(each * count, *a.shape[2:])[:rows]
    return carry, jax.tree.map(join, found)


def _count(rows: int, chunk: int) -> int:
    """How many chunks: the fewest that divide the rows, or that `chunk` allows, if these are more than twice as many.

    Padding rows would move the rows between the devices that they are sharded over.
    """
    least = max(1, -(-rows // chunk))
    return next((n for n in range(least, min(2 * least, rows) + 1) if rows % n == 0), least)


def _loss(spec: _Spec, x: Array, w: Array, bias: Array, labels: Array, keep: Array) -> tuple[Array, Array, Array]:
    """The losses of a chunk's rows, 0 where a row does not count; its logits, and their logsumexp."""
    z = spec.dot(x, w, (1, 0))
    if spec.biased:
        z = z + jnp.expand_dims(bias, 0)
    wide = spec.accumulate
    rows = primitive.SoftmaxSpec(axes=(-1,), accumulate=wide, out_dtype=wide, level="run_to_run")
    lse = primitives.call("logsumexp", z, spec=rows)
    loss = lse - (1 - spec.label_smoothing) * _picked(z, labels)
    if spec.label_smoothing:
        loss = loss - spec.label_smoothing / z.shape[1] * jnp.sum(z, 1)
    if spec.z_loss:
        loss = loss + spec.z_loss * lse * lse
    # A factor, so that the derivative is NaN as well; 1 in rows that do not count, since 0 times NaN is NaN.
    loss = loss * jnp.where((labels >= 0) | ~keep, jnp.ones_like(loss), jnp.full_like(loss, jnp.nan))
    return jnp.where(keep, loss, jnp.zeros_like(loss)), z, lse


@jax.custom_jvp
def _picked(z: Array, labels: Array) -> Array:
    """The logit of every row's label; any other where there is none."""
    found = jnp.take_along_axis(z, jnp.expand_dims(jnp.maximum(labels, 0), 1), 1, mode="promise_in_bounds")
    return jnp.squeeze(found, 1)


@_picked.defjvp
def _picked_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    """Linear in z by a sum, whose transpose is element by element; a gather's would add to an array of zeros."""
    (z, labels), (dz, _) = primals, tangents
    along = jnp.sum(jnp.where(_one_hot(labels, z.shape[1]), dz, jnp.zeros_like(dz)), 1)
    return _picked(z, labels), along


def _one_hot(labels: Array, words: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (len(labels), words), 1) == jnp.expand_dims(labels, 1)


def _rows(spec: _Spec, x: Array, w: Array, bias: Array, labels: Array, keep: Array) -> Array:
    """The loss of every row."""
    body = lambda carry, x, labels, keep: (carry, _loss(spec, x, w, bias, labels, keep)[0])
    return _scan(spec, body, None, x, labels, keep)[1]


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _total(spec: _Spec, x: Array, w: Array, bias: Array, weights: Array, labels: Array, keep: Array) -> Array:
    """Σ weight loss over the rows that count."""
    return jnp.sum(weights * _rows(spec, x, w, bias, labels, keep))


def _total_jvp(spec: _Spec, primals: Any, tangents: Any) -> tuple[Array, Any]:
    x, w, bias, weights, labels, keep = primals
    wanted = tuple(not isinstance(t, SymbolicZero) for t in tangents[:3])
    if any(wanted):
        losses, gradients = _gradients(spec, wanted, x, w, bias, weights, labels, keep)
    else:
        losses, gradients = _rows(spec, x, w, bias, labels, keep), (None,) * 3
    total = jnp.sum(weights * losses)
    pairs = [(g, t) for g, t in zip((*gradients, losses), tangents[:4], strict=True) if not isinstance(t, SymbolicZero)]
    wide = total.dtype
    terms = [jnp.sum(g.astype(wide) * t.astype(wide)) for g, t in pairs if g is not None]
    return total, ft.reduce(jnp.add, terms) if terms else jnp.zeros_like(total)


_total.defjvp(_total_jvp, symbolic_zeros=True)


def _gradients(
    spec: _Spec,
    wanted: tuple[bool, ...],
    x: Array,
    w: Array,
    bias: Array,
    weights: Array,
    labels: Array,
    keep: Array,
) -> tuple[Array, tuple[Array | None, Array | None, Array | None]]:
    """The losses, and the gradients of their weighted sum in x, w and bias, as far as they are wanted."""
    wide, words = spec.accumulate, w.shape[1]
    sums = tuple(jnp.zeros_like(a, wide) if want else None for a, want in zip((w, bias), wanted[1:], strict=True))
    size = _size(weights)
    # A row's gradient is not a sum over rows, so only float16 may fail to hold it until the cotangent is applied.
    dx_dtype = wide if x.dtype == jnp.float16 else x.dtype

    def body(carry: Any, x: Array, weights: Array, labels: Array, keep: Array) -> tuple[Any, Any]:
        loss, z, lse = _loss(spec, x, w, bias, labels, keep)
        p = jnp.exp(z - jnp.expand_dims(lse, 1))
        target = jnp.where(_one_hot(labels, words), jnp.asarray(1 - spec.label_smoothing, wide), jnp.zeros((), wide))
        slope = jnp.expand_dims(1 + 2 * spec.z_loss * lse, 1)
        g = slope * p - target - jnp.asarray(spec.label_smoothing / words, wide)
        g = jnp.where(jnp.expand_dims(labels >= 0, 1), g, jnp.full_like(g, jnp.nan))
        g = jnp.where(jnp.expand_dims(keep, 1), g, jnp.zeros_like(g))
        # What is rounded to x's dtype is of the order of 1 whatever the weights are.
        weights = jnp.expand_dims(weights, 1)
        scaled = g * (weights / size) if spec.weighted else g
        dw, db = carry
        dw = None if dw is None else dw + spec.dot(x, scaled.astype(x.dtype), (0, 0))
        db = None if db is None else db + jnp.sum(g * weights, 0)
        dx = (spec.dot(g.astype(x.dtype), w, (1, 1)) * weights).astype(dx_dtype) if wanted[0] else None
        return (dw, db), (loss, dx)

    (dw, db), (losses, dx) = _scan(spec, body, sums, x, weights, labels, keep)
    # In the accumulator's dtype: a sum over rows may be outside float16 until the cotangent, 1 / Σ weights, is applied.
    return losses, (dx, None if dw is None else dw * size, db)


def _size(weights: Array) -> Array:
    """A power of two near the largest weight's magnitude: dividing by it loses nothing."""
    limits = jnp.finfo(weights.dtype)
    largest = lax.stop_gradient(jnp.max(jnp.abs(weights), initial=0))
    largest = jnp.clip(largest, limits.tiny, limits.max / 4)
    return lax.reduce_precision(largest, exponent_bits=limits.nexp, mantissa_bits=0)
