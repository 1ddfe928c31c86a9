"""The resampling primitive: one axis, as a banded matrix of constant weights, and its transpose in the same form.

An axis of n elements becomes one of m: y[i] = Σ_k w[i, k] x[start[i] + k]. The transpose of such a
matrix is banded too, because the bands move in one direction; so the gradient gathers as well, and adds in one order.
XLA would transpose the gather into a scatter, which on GPUs adds with atomics.
"""

import dataclasses
import functools as ft
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jaxdnn._src.core import primitives
from jaxdnn._src.core.partitioning import Axes, Factors, Run, exchange
from jaxdnn._src.core.primitives import bind as bind
from jaxdnn._src.resample.band import ResampleSpec, band


def _results(spec: ResampleSpec, x: Any) -> jax.ShapeDtypeStruct:
    rows, axis = spec.rule.inputs if spec.transposed else spec.rule.outputs, spec.axis % len(x.shape)
    return jax.ShapeDtypeStruct((*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype)


def _backward(spec: ResampleSpec, ct: Array, _: Any) -> list[Array]:
    return [bind("resample", ct, spec=dataclasses.replace(spec, transposed=not spec.transposed))]


def _factors(spec: ResampleSpec, x: Any) -> Factors:
    """The axis itself may be sharded where one of its lengths divides the other: then a device has matching parts."""
    axis, inputs, outputs = spec.axis % len(x.shape), x.shape[spec.axis], _results(spec, x).shape[spec.axis]
    ratio = max(inputs, outputs) // max(min(inputs, outputs), 1)
    even = ratio > 0 and ratio * min(inputs, outputs) == max(inputs, outputs)
    long = "n ratio" if ratio > 1 else "n"
    own = ("n" if inputs <= outputs else long, long if inputs <= outputs else "n") if even else ("in", "out")
    named = lambda name: tuple(name if i == axis else f"a{i}" for i in range(len(x.shape)))
    return Factors(
        operands=(named(own[0]),),
        results=(named(own[1]),),
        free=tuple(f"a{i}" for i in range(len(x.shape)) if i != axis),
        placed=("n",) if even else (),
        sizes={"n": min(inputs, outputs), "ratio": ratio} if even and ratio > 1 else {},
        local=ft.partial(_on_device, spec),
    )


def _on_device(spec: ResampleSpec, run: Run, axes: Axes, x: Array) -> Array:
    """A device's part, with the elements of other devices that its results depend on."""
    from jaxdnn._src.resample import xla

    devices, axis = axes["n"], spec.axis % x.ndim
    start, weights = band(spec.rule, spec.transposed)
    rows, count = x.shape[axis], len(start) // devices.count
    first = np.arange(devices.count) * rows
    places = np.where(weights.any(1), start - np.repeat(first, count), 0).reshape(devices.count, count)
    before = max(int(-places.min()), 0)
    x = exchange(x, axis, devices, before, max(int(places.max()) + weights.shape[1] - rows, 0))
    here = lambda full: lax.dynamic_slice_in_dim(full, devices.index() * count, count)
    return xla.banded(x, axis, (places + before).astype(np.int32).reshape(-1), weights, here)


primitives.define(
    "resample",
    results=_results,
    jvp=ft.partial(primitives.jvp_of_linear, "resample", None),
    transpose=_backward,
    batch=ft.partial(primitives.batch_leading, "resample"),
    factors=_factors,
)
