"""Pooling to given sizes: to one element, or to any number of windows that together cover the input."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import blending, checks, primitives, windows
from jaxdnn._src.core.annotations import PerAxis, Scale
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import at_edges, product, real
from jaxdnn._src.pool import arguments, lp
from jaxdnn._src.pool.api import pool
from jaxdnn._src.pool.spec import PoolSpec
from jaxdnn._src.pool.xla.engine import rounded_quotient


@public
def global_pool(
    x: ArrayLike,
    /,
    *,
    mode: str = "average",
    layout: str = "NHWC",
    p: float = 2.0,
    nan: str = "propagate",
    return_indices: bool | str = False,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Any:
    """Pools all spatial axes to one element each.

    y[n,0,0,c] = the maximum, average or p-norm of x[n,h,w,c] over all h and w

    Args:
      x: the input, (N, H, W, C) for layout NHWC; float32, bfloat16, float16, float64, and int8 except for "lp".
      mode: "average", "max" or "lp".
      layout, p, nan, return_indices, alpha, beta, prior, out_dtype, engine, determinism: as for `pool`.

    Returns:
      y, (N, 1, 1, C) for layout NHWC; with `return_indices` the pair of y and the indices.

    Differentiation: as that of `pool`.

    Numerics: as those of `pool`, whose window is all of the spatial axes here. Determinism: portable; "lp" is
      mesh_invariant.

    Raises:
      ValueError, TypeError, NotImplementedError: as `pool`; ValueError too for a spatial axis without elements.

    Example:
      >>> dnn.global_pool(jnp.arange(8.0).reshape(1, 2, 2, 2)).ravel().tolist()
      [3.0, 4.0]

    Sources: ONNX's GlobalAveragePool, GlobalMaxPool and GlobalLpPool; PyTorch's adaptive_avg_pool2d(x, 1).
    """
    order = windows.layout(layout)
    shape = arguments.shape_of("x", checks.array("x", x), order)
    sizes = [shape[axis] for axis in arguments.spatial_axes(order)]
    if min(sizes) < 1:
        raise ValueError(f"`x` must have at least one element along every spatial axis, got shape {shape}.")
    return pool(
        x,
        window=sizes,
        mode=mode,
        layout=layout,
        p=p,
        nan=nan,
        return_indices=return_indices,
        alpha=alpha,
        beta=beta,
        prior=prior,
        out_dtype=out_dtype,
        engine=engine,
        determinism=determinism,
    )


@public
def adaptive_pool(
    x: ArrayLike,
    /,
    *,
    output_sizes: PerAxis = 1,
    mode: str = "average",
    layout: str = "NHWC",
    p: float = 2.0,
    nan: str = "propagate",
    return_indices: bool = False,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Any:
    """Pools to given spatial sizes, by windows that follow from them.

    o[n,p,q,c] = the maximum, average or p-norm of x[n,h,w,c] over ⌊p H / P⌋ ≤ h < ⌈(p + 1) H / P⌉ and w alike
    y = alpha o + beta prior

    Args:
      x: the input, (N, H, W, C) for layout NHWC; float32, bfloat16, float16, float64, and int8 except for "lp".
      output_sizes: P and Q, one integer or one per spatial axis; they may exceed H and W.
      mode: "average", "max" or "lp".
      return_indices: for "max", whether to return where the maxima are too, as flat spatial positions in x, int32.
        There are no taps here as of `pool`: the windows have different sizes.
      layout, p, nan, alpha, beta, prior, out_dtype, engine, determinism: as for `pool`.

    Returns:
      y, (N, P, Q, C) for layout NHWC; with `return_indices` the pair of y and the indices.

    Differentiation: any order, forward and reverse, in x, prior, and alpha and beta if they are arrays. Of equal maxima
      the first in row-major order has the whole derivative. At a window of zeros that of "lp" is 0.

    Numerics: as those of `pool` with each window by itself: sums in float32 (float64 for float64, int32 for
      int8), along the last spatial axis first, neighbours before neighbouring sums, multiplied by 1 / count (int8 to
      int8: divided exactly, ties to even). Determinism: portable, its gradients mesh_invariant; "lp" is mesh_invariant.

    Raises:
      ValueError, TypeError, NotImplementedError: as `pool`; ValueError too for a spatial axis without elements.

    Example:
      >>> dnn.adaptive_pool(jnp.arange(5.0).reshape(1, 5, 1), output_sizes=2, layout="NWC").ravel().tolist()
      [1.0, 3.0]

    Sources: PyTorch's adaptive_avg_pool2d and adaptive_max_pool2d, whose windows and indices these are.
    """
    order = windows.layout(layout)
    x = arguments.array("x", x, order)
    checks.choice("mode", mode, ("average", "max", "lp"))
    out, exponent = arguments.result_dtype(mode, "x", x.dtype, out_dtype), arguments.exponent(p)
    indices = arguments.wants_indices(return_indices, mode, (True,))
    axes = arguments.spatial_axes(order)
    sizes = [x.shape[axis] for axis in axes]
    outputs = checks.integers("output_sizes", output_sizes, len(sizes), minimum=1)
    checks.countable("`output_sizes`", (*outputs, *(n for axis, n in enumerate(x.shape) if axis not in axes)))
    if min(sizes) < 1:
        raise ValueError(f"`x` must have at least one element along every spatial axis, got shape {x.shape}.")
    blend = {"alpha": alpha, "beta": beta, "prior": prior}
    if all(size % count == 0 for size, count in zip(sizes, outputs, strict=True)):
        same = {"layout": layout, "p": p, "nan": nan, "engine": engine, "determinism": determinism, "out_dtype": out}
        window = [size // count for size, count in zip(sizes, outputs, strict=True)]
        return pool(x, window=window, mode=mode, return_indices=indices, **same, **blend)
    checks.choice("nan", nan, ("propagate", "ignore"))
    spec = PoolSpec((1,), (1,), (1,), ((0, 0),), (1,), (1,), (-1,), x.dtype, nan=nan, engine=engine)
    spec = dataclasses.replace(spec, level=required(determinism))
    x = at_edges(spec.level, x)
    arguments.require_level(spec, mode, alpha, beta)
    pairs = list(zip(axes, outputs, strict=True))
    if mode == "max":
        y, *at = _in_types(lambda x: _maxima(spec, x, pairs, indices), x, pairs, 1 + indices)
        y = arguments.finish(y, alpha, beta, prior, out, x.dtype)
        return (y, *at) if indices else y
    if mode == "lp":
        powers = lp.powers(exponent, x.astype(arguments.accumulator(x.dtype)))
        (total,) = _in_types(lambda v: _sums(spec, v, pairs), powers, pairs)
        y = lp.root(exponent, total)
    else:
        whole = out if blending.is_plain(alpha, beta) else None
        (y,) = _in_types(lambda x: _averages(spec, x, pairs, whole), x, pairs)
    return arguments.finish(y, alpha, beta, prior, out, x.dtype)


Pairs = Sequence[tuple[int, int]]  # a spatial axis, counted from the end, and how many windows there are along it


def _in_types(run: Callable[[Array], Any], x: Array, pairs: Pairs, results: int = 1) -> tuple[Array, ...]:
    """The results of `run(x)`, also where shardings are in types.

    A device has the windows of its elements if these are whole periods, see `_kinds`, and otherwise all elements.
    """
    counts = dict(pairs)

    def factors(x: Any) -> Factors:
        names = [f"d{axis}" for axis in range(x.ndim)]
        inputs, windows, sizes = list(names), list(names), {}
        for axis, count in pairs:
            periods, name = math.gcd(x.shape[axis], count), names[axis]
            inputs[axis], windows[axis] = f"{name} {name}in", f"{name} {name}out"
            sizes |= {name: periods, f"{name}in": x.shape[axis] // periods, f"{name}out": count // periods}
        return Factors((tuple(inputs),), (tuple(windows),) * results, free=tuple(names), sizes=sizes)

    x = primitives.evenly(x, [math.gcd(n, counts.get(axis - x.ndim, n)) for axis, n in enumerate(x.shape)])
    sharded = any(jax.typeof(x).sharding.spec[axis] for axis in counts)
    found = primitives.composed(run, factors, x) if sharded else run(x)
    return found if isinstance(found, tuple) else (found,)


def _maxima(spec: PoolSpec, x: Array, pairs: Pairs, indices: bool) -> Any:
    """The maxima, and if asked for where they are: of a window's rows the first that has one, and in it the first."""
    at = _positions(x, [axis for axis, _ in pairs]) if indices else None
    for axis, count in reversed(pairs):
        kinds = _kinds(x.shape[axis], count)
        if at is None:
            x = _joined([_bind("pool_max", spec, axis, kind, x)[0] for kind in kinds], axis)
            continue
        found = [_bind("pool_max_indices", spec, axis, kind, x) for kind in kinds]
        chosen = [_bind("pool_pick", spec, axis, kind, at, tap)[0] for kind, (_, tap) in zip(kinds, found, strict=True)]
        x, at = _joined([y for y, _ in found], axis), _joined(chosen, axis)
    return x if at is None else (x, at)


def _positions(x: Array, axes: Sequence[int]) -> Array:
    """The flat spatial position of every element, int32."""
    flat = jnp.zeros(x.shape, jnp.int32)
    for axis in axes:
        flat = flat * x.shape[axis] + lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + axis)
    return flat


def _sums(spec: PoolSpec, x: Array, pairs: Pairs) -> Array:
    """The sums over the windows, in the stated order whatever level is required.

    A window alone of its kind is as long as the part that it is given, and would be left to XLA's sum below that level.
    """
    spec = dataclasses.replace(spec, level="portable")
    for axis, count in reversed(pairs):
        x = _joined([_bind("pool_average", spec, axis, kind, x)[0] for kind in _kinds(x.shape[axis], count)], axis)
    return x


def _averages(spec: PoolSpec, x: Array, pairs: Pairs, out: np.dtype | None) -> Array:
    """Sums over counts; in whole numbers if integers shall become integers of dtype `out`."""
    counts = np.ones((1,) * x.ndim, np.int64)
    for axis, count in pairs:
        taps = [taps for _, taps in _windows(x.shape[axis], count)]
        counts = counts * np.reshape(taps, [count if d == x.ndim + axis else 1 for d in range(x.ndim)])
    integer = jnp.issubdtype(x.dtype, jnp.integer)
    total = _sums(spec, x.astype(jnp.int32 if integer else arguments.accumulator(x.dtype)), pairs)
    if integer and out is not None and jnp.issubdtype(out, jnp.integer):
        return rounded_quotient(total, jnp.asarray(counts, jnp.int32))
    total = real(total, arguments.accumulator(x.dtype))
    share = jnp.asarray((1.0 / counts).astype(total.dtype))  # rounded once: a quotient differs between devices
    return product(total, share)  # which the caller may add to something


def _windows(size: int, count: int) -> list[tuple[int, int]]:
    """The start and the taps of each window of an axis."""
    return [(i * size // count, -(-(i + 1) * size // count) - i * size // count) for i in range(count)]


Kind = tuple[int, int, int, int]  # where the first window starts, taps, stride, how many windows


def _kinds(size: int, count: int) -> list[Kind]:
    """The windows of an axis as several poolings.

    With g = gcd(H, P), window i + P / g is window i moved on by H / g, the period: P / g kinds of windows, each a
    pooling.
    """
    common = math.gcd(size, count)
    return [(*window, size // common, common) for window in _windows(size, count)[: count // common]]


def _bind(op: str, spec: PoolSpec, axis: int, kind: Kind, x: Array, *others: Array) -> tuple[Array, ...]:
    """A pooling primitive along one axis, over the windows of one kind."""
    start, taps, stride, count = kind
    reach = (count - 1) * stride + taps
    part = lax.slice_in_dim(x, start, start + reach, 1, x.ndim + axis)
    moves = {"sizes": (reach,), "taps": (taps,), "stride": (stride,), "outputs": (count,)}
    one = dataclasses.replace(spec, **moves, spatial=(axis,), out_dtype=x.dtype)
    found = primitives.call(op, part, *others, spec=one)
    return found if isinstance(found, tuple) else (found,)


def _joined(parts: Sequence[Array], axis: int) -> Array:
    """The windows of all kinds in their order."""
    shape = list(parts[0].shape)
    shape[axis] *= len(parts)
    return jnp.stack(parts, parts[0].ndim + axis + 1).reshape(shape)
