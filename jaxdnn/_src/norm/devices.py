"""Batch normalisation whose statistics are those of several devices, each of which has equally many elements."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.core import checks, engines
from jaxdnn._src.core.determinism import require
from jaxdnn._src.norm.arguments import View
from jaxdnn._src.norm.spec import NormSpec

AxisName = str | Sequence[str] | None


def devices(axis_name: AxisName) -> int:
    """How many devices there are along the mesh axes; checks that these are bound."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`axis_name` must be None, the name of a mesh axis or several, got {checks.shown(axis_name)}.")
    if len(set(names)) < len(names):
        raise ValueError(f"`axis_name` must name an axis once, got {axis_name!r}.")
    try:
        return int(lax.psum(1, tuple(names)))
    except NameError as error:
        raise ValueError(f"`axis_name` must name axes of shard_map, pmap or vmap, got {axis_name!r}.") from error


def _gathered(v: Array, axis_name: AxisName) -> Array:
    """The devices' arrays in the order of the mesh axis, the same on all. Each adds to zeros, so no order matters."""
    own = lax.axis_index(axis_name)
    place = jnp.arange(devices(axis_name), dtype=own.dtype) == own
    return lax.psum(jnp.where(place.reshape(-1, *[1] * v.ndim), v[None], jnp.zeros((), v.dtype)), axis_name)


def forward(
    view: View, x: Array, scale: Any, bias: Any, spec: NormSpec, axis_name: AxisName
) -> tuple[Array, Array, Array, Array]:
    """`arguments.forward` with the statistics of all devices."""
    from jaxdnn._src.norm import xla

    _check(spec)
    centred, mean, variance = xla.moments(xla.XLA, spec, x)
    # A mean is held in two parts, for where it is large its rounding would move the distances between the means.
    wide = x.dtype == spec.accumulate
    low = jnp.mean(x - mean, spec.axes, keepdims=True) if wide else jnp.zeros_like(mean)
    means, lows, moments = _gathered(jnp.stack([mean, low, variance]), axis_name).swapaxes(0, 1)
    distances = (means - means[:1]) + (lows - lows[:1])
    centre = jnp.mean(distances, 0)
    whole = means[0] + (lows[0] + centre)
    variance = jnp.mean(moments, 0) + jnp.mean((distances - centre[None]) ** 2, 0)
    rstd = xla.inverse_deviation(xla.XLA, variance, spec.eps)
    y = (centred + ((mean - means[0]) + (low - lows[0]) - centre)) * rstd
    y = y if scale is None else y * view.parameter("scale", scale, spec)
    y = y if bias is None else y + view.parameter("bias", bias, spec)
    return y, whole, rstd, variance


def backward(
    view: View, dy: Array, x: Array, scale: Any, mean: Any, rstd: Any, spec: NormSpec, axis_name: AxisName
) -> tuple[Array, Array, Array]:
    """`arguments.backward` with every sum over all devices."""
    from jaxdnn._src.norm import xla

    copies = devices(axis_name)
    if (mean is None) != (rstd is None):
        raise ValueError("`mean` and `rstd` must be given both or neither, got one of them.")
    if mean is None:
        _, whole, inverse, _ = forward(view, x, None, None, spec, axis_name)
    else:
        whole, inverse = view.statistic("mean", mean, spec), view.statistic("rstd", rstd, spec)
    _check(spec)
    total = lambda v, axes: lax.psum(jnp.sum(v, tuple(axes), keepdims=True), axis_name)
    added = xla.Arithmetic(total, lambda product: product, copies=copies)
    scales = [] if scale is None else [view.parameter("scale", scale, spec)]
    dx, ds, db = xla.norm_dgrad(added, dataclasses.replace(spec, scale=bool(scales)), dy, x, whole, inverse, *scales)
    return dx, ds.reshape(view.parameters), db.reshape(view.parameters)


def _check(spec: NormSpec) -> None:
    """Raises for what XLA's formula between devices does not have: other engines, and more than run_to_run."""
    if (named := spec.engine or engines.asked.value) not in (None, "xla"):
        raise NotImplementedError(f"`engine` must be None or 'xla' with `axis_name`, got {named!r}.")
    require("batch_norm with `axis_name`", spec.level, "run_to_run", "it adds over the batch")
