"""Tensor utilities: layouts, scaling, blending and element-wise ops of two arrays, as cuDNN has them.

Letters: N batch, C channels, [D,] H, W spatial sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import blending, checks, frames, primitives, trees, windows
from jaxdnn._src.core.annotations import PerAxis, Scale
from jaxdnn._src.core.determinism import require, required
from jaxdnn._src.core.eager import data
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.padding import pad
from jaxdnn._src.core.rounding import nearest_number, product, real, root, rounded
from jaxdnn._src.tensor import folding

OPS = ("add", "mul", "min", "max", "sqrt", "not")
NAN_RULES = ("propagate", "ignore")


@public
@data(alpha=blending.operand, beta=blending.operand)
def transform(
    x: ArrayLike,
    /,
    *,
    layout: str = "NHWC",
    out_layout: str | None = None,
    padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0,
    fold: PerAxis = 1,
    unfold: PerAxis = 1,
    channels: int | None = None,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """Moves an array into another layout, pads or crops it, folds space into channels, scales, blends and converts.

    y = alpha moved(x) + beta prior, where moved(x) in the axes n, c, h, w is, one after another,

    unfolded  u[n, c, h f + i, w g + j] = x[n, (c f + i) g + j, h, w], with unfold (f, g), i < f, j < g
    padded    p[n, c, h, w] = u[n, c, h - a, w - b], zero outside of u, with low padding (a, b)
    folded    m[n, (c f + i) g + j, h, w] = p[n, c, h f + i, w g + j], with fold (f, g)

    and then has its channels truncated or padded with zeros.

    Args:
      x: (N, H, W, C) for layout NHWC; float32, bfloat16, float16, float64, float8_e4m3fn, float8_e5m2, int8, uint8,
        int32.
      layout: the axes of x, see `conv`: also CHWN, the vectorised NCHWc32 (NC/32HW32), one to three
        spatial axes.
      out_layout: the axes of the result and of prior; None is `layout`.
      padding: elements around x: one integer, one per spatial axis, or a (low, high) pair per spatial axis; negative
        numbers crop.
      fold: how many neighbours along a spatial axis become channels, one integer or one per axis; must divide the
        padded size.
      unfold: the inverse of fold, before the padding; the product must divide the channels.
      channels: the number of the result's channels; None keeps it. A vectorised layout has additional zero channels
        that pad the last vector.
      alpha, beta, prior: the blend, see `conv`; prior has the result's shape and layout.
      out_dtype: the result's dtype; None is that of x.

    Returns:
      y, in `out_layout`.

    Differentiation: any order, in x, prior, and alpha and beta if they are arrays; the transpose is the inverse moves.

    Numerics: float32 (float64 for float64), converted once, to nearest even; integers saturate. Integers stay integers
      if alpha is 1 and beta 0 or 1, and else become float32 first. Each product is rounded before it is added to
      anything within the op, and where a level that fixes bits is required before other operations use it: determinism
      level "portable".

    Raises:
      ValueError: shapes or layouts that do not fit. TypeError: a dtype that is not served.

    Example:
      >>> dnn.transform(jnp.ones((2, 5, 4, 3)), out_layout="NCHWc32").shape
      (2, 1, 5, 4, 32)
      >>> dnn.transform(jnp.ones((2, 5, 4, 3)), padding=((0, 1), (0, 0)), fold=2).shape
      (2, 3, 2, 12)

    Sources: cuDNN's cudnnTransformTensor and cudnnTransformTensorEx (padBefore, padAfter, fold, direction), which
      leaves the order of the folded channels open. To undo a transform: unfold where it folded, negative padding.
    """
    source = frames.frame(layout)
    target = source if out_layout is None else frames.Frame(_out_layout(out_layout, source), source.given_filter)
    given = blending.array("x", x)
    plain = source.array("x", given)
    moved = jnp.transpose(plain, [source.layout.axes.index(a) for a in _canonical(source)])
    rank = source.layout.rank
    folds = {name: checks.integers(name, v, rank, minimum=1) for name, v in (("fold", fold), ("unfold", unfold))}
    moved = _pad(folding.unfold("unfold", moved, folds["unfold"]), _pads(padding, rank))
    moved = _with_channels(folding.fold("fold", moved, folds["fold"]), channels, target.given.vector or 1)
    moved = jnp.transpose(moved, [_canonical(source).index(a) for a in target.layout.axes])
    moved = target.restore(moved)
    out = blending.out_dtype(out_dtype, given)
    computed = moved.astype(blending.accumulator(given.dtype))
    return blending.blend(
        computed, alpha=alpha, beta=beta, prior=prior, out=out, dtypes=(given.dtype,), level=required()
    )


def _out_layout(value: Any, source: frames.Frame) -> windows.Layout:
    found = windows.layout(value, "out_layout")
    if found.rank != source.given.rank:
        raise ValueError(f"`out_layout` must have the spatial axes of layout {source.given.name}, got {found.name}.")
    return found


def _canonical(frame: frames.Frame) -> str:
    return "NC" + windows.SPATIAL[frame.layout.rank]


def _pads(padding: Any, rank: int) -> tuple[tuple[int, int], ...]:
    """Reads `padding`, which unlike a convolution's may be negative."""
    values = tuple(padding) if checks.is_sequence(padding) else (padding,) * rank
    pairs = [tuple(v) if checks.is_sequence(v) else (v, v) for v in values]
    if len(pairs) != rank or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"`padding` must be an integer, {rank} integers or {rank} (low, high) pairs, one per spatial axis, "
            f"got {checks.shown(padding)}."
        )
    return tuple((checks.integer("padding", low), checks.integer("padding", high)) for low, high in pairs)


def _pad(x: Array, pads: tuple[tuple[int, int], ...]) -> Array:
    sizes = tuple(n + low + high for n, (low, high) in zip(x.shape[2:], pads, strict=True))
    if min(sizes) < 1 or max(sizes) > checks.LARGEST:
        raise ValueError(
            f"`padding` must leave sizes from 1 to {checks.LARGEST}, got {checks.shown(sizes)} for padding "
            f"{checks.shown(pads)}."
        )
    checks.countable("`padding`", x.shape[:2] + sizes)
    if not any(map(any, pads)):
        return x
    x = primitives.evenly(x, x.shape[:2] + sizes)
    return pad(x, 0, [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in pads)])


def _with_channels(x: Array, channels: Any, vector: int) -> Array:
    """Truncates or pads the channels; a vectorised layout's last vector is padded too."""
    wanted = x.shape[1] if channels is None else checks.integer("channels", channels)
    if wanted < 1:
        raise ValueError(f"`channels` must be None or at least 1, got {wanted}.")
    if wanted > checks.LARGEST:
        raise ValueError(f"`channels` must be at most {checks.LARGEST}, got {checks.shown(wanted)}.")
    stored = -(-wanted // vector) * vector
    kept = primitives.evenly(x, (x.shape[0], min(x.shape[1], wanted), *x.shape[2:]))[:, :wanted]
    filled = stored - kept.shape[1]
    kept = primitives.evenly(kept, (x.shape[0], stored, *x.shape[2:]))
    return jnp.pad(kept, [(0, 0), (0, filled), *[(0, 0)] * (x.ndim - 2)]) if filled else kept


@public
@data(alpha=blending.operand, beta=blending.operand)
def add(
    a: ArrayLike,
    c: ArrayLike,
    /,
    *,
    alpha: Scale = 1.0,
    beta: Scale = 1.0,
    out_dtype: DTypeLike | None = None,
    determinism: str | None = None,
) -> Array:
    """Adds an array that broadcasts: a bias, a mask, a row.

    y = alpha a + beta c

    Args:
      a: of as many dimensions as c, each of c's size or 1; the dtype of c, or the one that is computed in.
      c: the array that is added to; dtypes as for `transform`.
      alpha, beta: numbers or scalar arrays. Where beta is zero c is not read: NaN in it is harmless.
      out_dtype: the result's dtype; None is that of c.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, of c's shape.

    Differentiation: any order, in a, c, and alpha and beta if they are arrays. The gradient in a is a sum over the
      dimensions it is broadcast along: XLA's (run_to_run), or from level "batch_invariant" on a tree that the
      shape fixes.

    Numerics: as `transform`.

    Raises:
      ValueError: shapes that do not fit. TypeError: dtypes that do not go together.

    Example:
      >>> dnn.add(jnp.ones((1, 3)), jnp.zeros((2, 3)), alpha=2).tolist()
      [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]

    Sources: cuDNN's cudnnAddTensor, whose beta scales C, so that the default here is 1. NumPy's broadcasting would also
      prepend axes and widen c; this does not.
    """
    level = required(determinism)
    c, a = blending.array("c", c, level), blending.array("a", a, level)
    acc = blending.accumulator(c.dtype)
    if a.dtype != acc:
        blending.same_dtype("a", a, "c", c)
    _broadcasts("a", a, "c", c)
    out = blending.out_dtype(out_dtype, c)
    computed = trees.broadcast(a.astype(acc), c, level)
    return blending.blend(
        computed, alpha=alpha, beta=beta, prior=c, out=out, dtypes=(c.dtype,), names=("alpha", "beta", "c"), level=level
    )


def _broadcasts(name: str, value: Array, other_name: str, other: Array) -> None:
    sizes = zip(value.shape, other.shape, strict=False)
    if value.ndim != other.ndim or any(have not in (1, want) for have, want in sizes):
        raise ValueError(
            f"`{name}` must have as many dimensions as `{other_name}`, each of its size or 1, got shape {value.shape} "
            f"for {other.shape}."
        )


@public
@data(alpha1=blending.operand, alpha2=blending.operand, beta=blending.operand)
def op_tensor(
    a: ArrayLike,
    b: ArrayLike | None,
    /,
    *,
    op: str = "add",
    alpha1: Scale = 1.0,
    alpha2: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    nan: str = "propagate",
    out_dtype: DTypeLike | None = None,
    determinism: str | None = None,
) -> Array:
    """An element-wise op of two scaled arrays, of which the second broadcasts, or of the first alone.

    add   y = alpha1 a + alpha2 b + beta prior        max   y = max(alpha1 a, alpha2 b) + beta prior
    mul   y = (alpha1 a) (alpha2 b) + beta prior      sqrt  y = √(alpha1 a) + beta prior
    min   y = min(alpha1 a, alpha2 b) + beta prior    not   y = 1 - alpha1 a + beta prior

    Args:
      a: the first array; dtypes as for `transform`.
      b: of as many dimensions as a, each of a's size or 1, and of its dtype; None for sqrt and not, which read none.
      op: "add", "mul", "min", "max", "sqrt" or "not".
      alpha1, alpha2: the scales of a and b, numbers or scalar arrays.
      beta, prior: the blend, see `conv`; prior has a's shape.
      nan: of "min" and "max": "propagate" gives NaN where an operand is NaN, "ignore" the other operand.
      out_dtype: the result's dtype; None is that of a.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, of a's shape.

    Differentiation: any order, in a, b, prior, and the scales if they are arrays. Where the operands of min and max are
      equal, the derivative is that of a. √'s at zero is infinite. The gradient in a b that broadcasts: see `add`.

    Numerics: as `transform`; each scaled operand is rounded, then the result of the op, then the blend. Of operands
      that compare equal, +0 and -0 too, min and max give a's. √ of integers is computed in float32; √ is
      mesh_invariant, for that of GPUs is not correctly rounded.

    Raises:
      ValueError: shapes that do not fit, or an unknown op or rule. TypeError: dtypes that do not go together.
      NotImplementedError: sqrt at level "portable".

    Example:
      >>> dnn.op_tensor(jnp.array([1.0, 4.0]), jnp.array([3.0]), op="max", alpha2=0.5).tolist()
      [1.5, 4.0]

    Sources: cuDNN's cudnnOpTensor (CUDNN_OP_TENSOR_...; its default for NaN is "ignore").
    """
    level = required(determinism)
    a = blending.array("a", a, level)
    checks.choice("op", op, OPS)
    checks.choice("nan", nan, NAN_RULES)
    if nan != "propagate" and op not in ("min", "max"):
        raise ValueError(f"`nan` must be 'propagate' except for op 'min' and 'max', got {nan!r} for op {op!r}.")
    out = blending.out_dtype(out_dtype, a)
    acc = blending.accumulator(a.dtype)
    first = blending.scaled(a.astype(acc), blending.read_scale("alpha1", alpha1))
    if op == "sqrt":
        require("op_tensor op 'sqrt'", level, "mesh_invariant", "XLA's square roots differ between devices")
    if op in ("sqrt", "not"):
        computed = _unary(op, first)
    else:
        if b is None:
            raise ValueError(f"`b` must be an array for op {op!r}, got None.")
        other = blending.array("b", b, level)
        blending.same_dtype("b", other, "a", a)
        _broadcasts("b", other, "a", a)
        other = trees.broadcast(other.astype(acc), a, level)
        second = blending.scaled(other, blending.read_scale("alpha2", alpha2))
        common = first.dtype if first.dtype == second.dtype else jnp.float32  # int32 and a scaled one
        first, second = (v if v.dtype == common else real(v, common) for v in (first, second))
        computed = _binary(op, first, second, nan)
    return blending.blend(computed, alpha=1.0, beta=beta, prior=prior, out=out, dtypes=(a.dtype, acc), level=level)


def _unary(op: str, a: Array) -> Array:
    if op == "not":
        return 1 - rounded(a)
    return root(a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.integer) else a)


def _binary(op: str, a: Array, b: Array, nan: str) -> Array:
    if op == "add":
        return rounded(a) + rounded(b)
    if op == "mul":
        return product(a, b)
    # Not jnp.minimum: which zero it takes of two, and whose derivative at ties, is the backend's and JAX's choice.
    first = a <= b if op == "min" else a >= b
    if jnp.issubdtype(a.dtype, jnp.inexact):
        first |= jnp.isnan(a) if nan == "propagate" else jnp.isnan(b)
    return jnp.where(first, primitives.placed_like(a, first), primitives.placed_like(b, first))


@public
@data(alpha=blending.operand)
def scale(x: ArrayLike, /, *, alpha: Scale = 1.0, out_dtype: DTypeLike | None = None) -> Array:
    """Scales an array.

    y = alpha x

    Args:
      x: any shape; dtypes as for `transform`.
      alpha: a number or a scalar array.
      out_dtype: the result's dtype; None is that of x.

    Returns:
      y, of x's shape.

    Differentiation: any order, in x, and in alpha if it is an array.

    Numerics: the product in float32 (float64 for float64), converted once, to nearest even; integers saturate, and pass
      through float32 unless alpha is 1. Determinism level: "portable".

    Raises:
      ValueError, TypeError: an alpha that is no scalar, a dtype that is not served.

    Example:
      >>> dnn.scale(jnp.array([1, -3], jnp.int8), alpha=50).tolist()
      [50, -128]

    Sources: cuDNN's cudnnScaleTensor.
    """
    x = blending.array("x", x)
    out = blending.out_dtype(out_dtype, x)
    computed = x.astype(blending.accumulator(x.dtype))
    return blending.blend(computed, alpha=alpha, beta=0.0, prior=None, out=out, level=required())


def _whole(value: Any) -> float | None:
    """The value of `fill` as an operand, where a conversion from float32 rounds as one from the number."""
    return float(value) if checks.is_number(value) and abs(value) < 2**24 and value == np.float32(value) else None


@public
@data(value=_whole)
def fill(x: ArrayLike, /, *, value: Scale = 0.0, out_dtype: DTypeLike | None = None) -> Array:
    """An array like another one, with one value everywhere.

    y = value

    Args:
      x: gives shape, dtype and sharding; its elements are not read. Dtypes as for `transform`.
      value: a number or a scalar array.
      out_dtype: the result's dtype; None is that of x.

    Returns:
      y, of x's shape.

    Differentiation: in value if it is an array; the gradient in x is zero.

    Numerics: the value is converted once, to nearest even; integers saturate. Determinism level: "portable".

    Raises:
      ValueError, TypeError: a value that is no scalar, a dtype that is not served.

    Example:
      >>> dnn.fill(jnp.zeros((2, 2)), value=3).tolist()
      [[3.0, 3.0], [3.0, 3.0]]

    Sources: cuDNN's cudnnSetTensor.
    """
    x = blending.array("x", x)
    out = blending.out_dtype(out_dtype, x)
    number = blending.read_scale("value", value)
    if isinstance(number, Array):
        return jnp.full_like(x, blending.convert(number, out), dtype=out)
    if not jnp.issubdtype(out, jnp.integer):
        return jnp.full_like(x, nearest_number(number, out), dtype=out)
    # Saturated here, for float32 does not hold every int32.
    whole = int(np.clip(np.nan_to_num(np.rint(number), nan=0.0), jnp.iinfo(out).min, jnp.iinfo(out).max))
    return jnp.full_like(x, whole, dtype=out)
