"""Softmax, its backward pass, and the logarithm of a sum of exponentials."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import blending, checks, primitives, windows
from jaxdnn._src.core.annotations import PerAxis, Scale
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.rounding import at_edges
from jaxdnn._src.softmax.primitive import SoftmaxSpec

ALGORITHMS = ("accurate", "fast", "log")
MODES = (None, "channel", "instance")


@public
def softmax(
    x: ArrayLike,
    /,
    *,
    algorithm: str = "accurate",
    axis: PerAxis | None = -1,
    mode: str | None = None,
    layout: str = "NHWC",
    where: ArrayLike | None = None,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Softmax along one or more axes, or its logarithm.

    accurate: s = exp(x - m) / Σ exp(x - m), m the largest x of the row
    fast:     s = exp(x) / Σ exp(x)
    log:      s = x - m - log Σ exp(x - m)
    y = alpha s + beta prior

    where a row is the elements along the axes, and sums run over it.

    Args:
      x: any shape; float32, bfloat16, float16, float64.
      algorithm: "accurate"; "fast", which saves the maximum and overflows where some x is above 88 (float16 too: it
        is computed in float32) and is NaN where all are far below 0 (see Numerics); or "log", the logarithm
        of the softmax.
      axis: the axis of a row, or several, which then are one row; None: all, of a scalar none. Not read where `mode`
        is given.
      mode: None, or cuDNN's names for the axes: "channel" (a row is the channels at one place) or "instance" (a row is
        all of one example).
      layout: the axes of x for `mode`: NWC, NCW, CWN, NHWC, NCHW, CHWN, NDHWC, NCDHW, CDHWN, or with channels in
        vectors NCWc32, NCHWc32, NCDHWc32. The zeros that pad the last vector are channels like others: exp(0) is in
        the sum, unless `where` excludes them.
      where: booleans that broadcast to x's shape: elements where it is False are excluded from their row, and their
        result is 0 (log: -inf) before the blend. A row whose elements are all excluded is 0 (log: -inf).
      alpha, beta, prior: the blend, see `conv`; prior has the result's shape.
      out_dtype: the result's dtype; None is that of x.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that the engine must guarantee, as within `jaxdnn.determinism`.

    Returns:
      y, shaped like x.

    Differentiation: any order, forward and reverse, in x, prior, and alpha and beta if they are arrays. As in cuDNN
      the derivative is taken from y as it was stored: see `softmax_dgrad`. First derivatives have the level asked for;
      further ones differentiate XLA's formula, which is run_to_run.

    Numerics: computed in float32 (float64 for float64) and rounded once. What is not finite follows IEEE arithmetic: a
      row with NaN is NaN; so is, but for "fast", a row whose largest element is infinite: one of nothing but -inf, or
      with a +inf. Under "fast", where exp(x) is infinite the result is NaN and the rest of the row is 0; where only
      the sum is infinite, the whole row is 0; where every exponential is zero (float32: all x below about -87, where
      they become subnormal, to -104), the row is 0 / 0, NaN. Engine "xla"
      is run_to_run, "ordered" mesh_invariant, "hopper" batch_invariant.

    Raises:
      ValueError: an unknown algorithm, mode or layout; an axis that x has not or has twice; a mask or prior of another
        shape; beta without prior.
      TypeError: a dtype that is not among the above; a mask that is not boolean.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> dnn.softmax(jnp.zeros((2, 4))).tolist()
      [[0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]]

    Sources: cuDNN's cudnnSoftmaxForward, whose modes are these. PyTorch's softmax and log_softmax, ONNX's Softmax
      (before opset 13 its axis flattened all that follow: give them all here) and LogSoftmax, `jax.nn.softmax`.
    """
    x, spec = _read(x, axis, mode, layout, out_dtype, engine, determinism)
    spec = dataclasses.replace(spec, algorithm=checks.choice("algorithm", algorithm, ALGORITHMS))
    mask = None if where is None else _mask(where, x.shape)
    if mask is not None:
        x = jnp.where(mask, x, jnp.full((), -jnp.inf, x.dtype))
    if mask is None and prior is None and blending.is_plain(alpha, beta):
        return primitives.call("softmax", x, spec=spec)
    y = primitives.call("softmax", x, spec=spec.as_dtype(spec.accumulate))
    if mask is not None:
        y = jnp.where(mask, y, jnp.full((), -jnp.inf if algorithm == "log" else 0, y.dtype))
    return blending.blend(y, alpha=alpha, beta=beta, prior=prior, out=spec.out_dtype, dtypes=(x.dtype,))


@public
def softmax_dgrad(
    dy: ArrayLike,
    y: ArrayLike,
    /,
    *,
    algorithm: str = "accurate",
    axis: PerAxis | None = -1,
    mode: str | None = None,
    layout: str = "NHWC",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """The gradient of `softmax` in its input, from the gradient in its output and the output itself.

    accurate, fast: g = y (dy - Σ y dy)
    log:            g = dy - exp(y) Σ dy
    dx = alpha g + beta prior

    Args:
      dy: the gradient in y; float32, bfloat16, float16, float64.
      y: what `softmax` returned (for alpha 1 and beta 0), the shape of dy; any of the dtypes.
      algorithm, axis, mode, layout: those of the forward pass.
      alpha, beta, prior: the blend of dx, see `conv`; prior has the shape of dy.
      out_dtype: the result's dtype; None is that of dy.
      engine, determinism: see `softmax`.

    Returns:
      dx, shaped like dy.

    Differentiation: any order, forward and reverse, in dy, y, prior, and alpha and beta if they are arrays.

    Numerics: computed in float32 (float64 if dy or y is float64) and rounded once. The gradient is that of the y that
      is given: for a bfloat16 y of log probabilities exp(y) is off by a factor of up to exp(|y| / 256). Engine "xla" is
      run_to_run, "ordered" mesh_invariant, "hopper" batch_invariant.

    Raises:
      ValueError, TypeError, NotImplementedError: as `softmax`; ValueError too for a y of another shape than dy.

    Example:
      >>> y = dnn.softmax(jnp.zeros((1, 4)))
      >>> dnn.softmax_dgrad(jnp.array([[4.0, 0.0, 0.0, 0.0]]), y).tolist()
      [[0.75, -0.25, -0.25, -0.25]]

    Sources: cuDNN's cudnnSoftmaxBackward, which takes y and dy only, too.
    """
    dy, spec = _read(dy, axis, mode, layout, out_dtype, engine, determinism, name="dy")
    y = checks.array("y", y)
    checks.dtype("y", y, checks.FLOATS)
    checks.shape("y", y, dy.shape, "that of dy")
    wide = np.dtype(np.float64) if y.dtype == np.float64 else spec.accumulate
    spec = dataclasses.replace(spec, algorithm=checks.choice("algorithm", algorithm, ALGORITHMS), accumulate=wide)
    if prior is None and blending.is_plain(alpha, beta):
        return primitives.call("softmax_dgrad", dy, y, spec=spec)
    dx = primitives.call("softmax_dgrad", dy, y, spec=spec.as_dtype(spec.accumulate))
    dtypes = (dy.dtype, y.dtype)
    return blending.blend(dx, alpha=alpha, beta=beta, prior=prior, out=spec.out_dtype, dtypes=dtypes)


@public
def logsumexp(
    x: ArrayLike,
    /,
    *,
    axis: PerAxis | None = -1,
    mode: str | None = None,
    layout: str = "NHWC",
    where: ArrayLike | None = None,
    keepdims: bool = False,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """The logarithm of the sum of exponentials along one or more axes.

    y = m + log Σ exp(x - m), m the largest x of the row

    Args:
      x: any shape; float32, bfloat16, float16, float64.
      axis, mode, layout: as in `softmax`.
      where: booleans that broadcast to x's shape: what is False is left out.
      keepdims: whether the reduced axes stay, with length 1.
      out_dtype: the result's dtype; None is that of x.
      engine, determinism: see `softmax`.

    Returns:
      y, shaped like x without the reduced axes.

    Differentiation: any order, forward and reverse, in x. The gradient of a row whose result is infinite is NaN,
      but 0 wherever `where` is False: a row of which nothing is left gives -inf with gradient 0.

    Numerics: computed in float32 (float64 for float64) and rounded once. A row of nothing, or of -inf alone, gives
      -inf; one with +inf gives +inf; one with NaN gives NaN. Engine "xla" is run_to_run, "ordered" mesh_invariant,
      "hopper" batch_invariant.

    Raises:
      ValueError, TypeError, NotImplementedError: as `softmax`; TypeError too for a `keepdims` that is no bool.

    Example:
      >>> float(dnn.logsumexp(jnp.array([-jnp.inf, 3.0])))
      3.0

    Sources: PyTorch's logsumexp, ONNX's ReduceLogSumExp, `jax.nn.logsumexp`.
    """
    x, spec = _read(x, axis, mode, layout, out_dtype, engine, determinism)
    keepdims = checks.flag("keepdims", keepdims)
    if where is not None:
        x = jnp.where(_mask(where, x.shape), x, jnp.full((), -jnp.inf, x.dtype))
    # Gradients leave through the same fences: they are rounded to x's dtype, whatever is done with them.
    y = at_edges(spec.level, primitives.call("logsumexp", at_edges(spec.level, x), spec=spec))
    return jnp.expand_dims(y, tuple(a % x.ndim for a in spec.axes)) if keepdims else y


# ---- reading arguments -----------------------------------------------------------------------------------------------


def _read(
    x: Any, axis: Any, mode: Any, layout: Any, out_dtype: Any, engine: Any, determinism: Any, *, name: str = "x"
) -> tuple[Array, SoftmaxSpec]:
    x = checks.array(name, x)
    dtype = checks.dtype(name, x, checks.FLOATS)
    checks.choice("mode", mode, MODES)
    windows.layout(layout)  # a wrong one is refused where no mode reads it, too
    axes = _axes(axis, name, len(x.shape)) if mode is None else _mode_axes(mode, layout, name, x.shape)
    wide = blending.accumulator(dtype)
    out = checks.out_dtype(out_dtype, dtype, checks.FLOATS, wide)
    return x, SoftmaxSpec(axes, wide, out, engine=engine, level=required(determinism))


def _axes(axis: Any, name: str, rank: int) -> tuple[int, ...]:
    """The axes of a row, from the last: negative, ascending. All axes of a scalar are none; its row is the scalar."""
    chosen, least = (tuple(range(rank)), 0) if axis is None else (axis, 1)
    return tuple(a - rank for a in checks.axes(name, chosen, rank, minimum=least))


def _mode_axes(mode: str, layout: Any, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = windows.layout(layout)
    windows.require_shape(name, shape, found)
    chosen = {found.channel} if mode == "channel" else set(range(len(found.axes))) - {found.batch}
    chosen |= {found.ndim - 1} if found.vector is not None else set()
    return tuple(sorted(axis - found.ndim for axis in chosen))


def _mask(where: Any, shape: tuple[int, ...]) -> Array:
    """The mask in the shape of x."""
    where = checks.array("where", where)
    checks.dtype("where", where, (jnp.bool_,))
    try:
        fits = jnp.broadcast_shapes(tuple(where.shape), tuple(shape)) == tuple(shape)  # NumPy's knows no open batch
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"`where` must broadcast to the shape {tuple(shape)} of `x`, got {tuple(where.shape)}.")
    return jnp.broadcast_to(where, shape)
