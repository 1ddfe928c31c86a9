"""Calls of the Hopper kernels of normalisation, and whether their results are within the bounds."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jaxdnn_reference as reference
from jaxdnn._src.norm import bounds as norm_bounds
from tests.norm.cases import Norm, agree, in_view

DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def norm_of(pixels: int, channels: int, group: int, images: int = 2) -> Norm:
    shape = (images, pixels, channels)
    if group == 1:
        return Norm("instance_norm", shape, (channels,), (("layout", "NWC"),))
    return Norm("group_norm", shape, (channels,), (("groups", channels // group), ("layout", "NWC")))


def arrays_of(n: Norm, dtype: str, mean: float) -> tuple[np.ndarray, ...]:
    """x and dy in the dtype, scale and bias in float32, which is what the kernels take."""
    x, _, _, dy = n.arrays(3, DTYPES[dtype], mean=mean)
    _, s, b, _ = n.arrays(4, np.float32)
    return x, s, b, dy


# What x and dy are multiplied by, so that squares of x fit into float32's range, and dy h, but not dy (x - mean).
EXTREMES = {"large": (2.0**52, 2.0**80), "tiny": (2.0**-50, 2.0**-98)}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_extreme = pytest.mark.parametrize("extreme", EXTREMES)
wide_range = pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "f16"])


def extreme_of(n: Norm, dtype: str, extreme: str) -> tuple[Norm, tuple[np.ndarray, ...]]:
    """The call with an eps of 0, and its arrays."""
    n = dataclasses.replace(n, options=(*n.options, ("eps", 0.0)))
    x, s, b, dy = arrays_of(n, dtype, 0.5)
    x, dy = ((v.astype(np.float64) * size).astype(v.dtype) for v, size in zip((x, dy), EXTREMES[extreme], strict=True))
    return n, (x, s, b, dy)


def check_forward(n: Norm, x: Any, s: Any, b: Any, out: Any, y: np.ndarray, saved: Sequence[np.ndarray]) -> None:
    """y and the saved mean, inverse deviation and variance."""
    p, wanted = n.problem(x, s, b), n.definition(x, s, b)
    agree(y, np.asarray(wanted[0]), norm_bounds.from_definition(p)[0].reshape(y.shape), out, "y")
    stats = norm_bounds.normalised(p)
    errors = {"mean": stats.mean_error, "rstd": stats.rstd_error, "variance": stats.variance_error}
    goldens = {"mean": stats.mean, "rstd": stats.rstd, "variance": stats.variance}
    for name, found in zip(errors, saved, strict=True):
        agree(found, goldens[name].reshape(found.shape), errors[name].reshape(found.shape), np.float32, name)


def check_backward(n: Norm, x: Any, s: Any, b: Any, dy: Any, out: Any, grads: Sequence[np.ndarray]) -> None:
    """dx, dscale and dbias."""
    p = n.problem(x, s, b)
    bounds = norm_bounds.from_definition(p, in_view(n, dy, p.x.shape))
    exact = n.gradients(reference, dy, x, s)
    for name, found, golden, error in zip(("dx", "dscale", "dbias"), grads, exact, bounds, strict=True):
        agree(found, golden, error.reshape(golden.shape), out if name == "dx" else np.float32, name)


def check_activation(
    n: Norm,
    name: str,
    x: Any,
    s: Any,
    b: Any,
    dy: Any,
    saved: Sequence[Any],
    y: np.ndarray,
    grads: Sequence[np.ndarray],
) -> None:
    """y and gradients of the kernels with an activation: of exactly the z that follows from the saved statistics."""
    groups, channels = saved[0].shape[-1], x.shape[-1]
    mean, rstd = (np.repeat(np.asarray(v), channels // groups, -1)[:, None] for v in saved[:2])
    z = (x.astype(np.float32) - mean) * rstd
    z = z if s is None else z * s
    z = (z if b is None else z + b).astype(np.float64)
    # Of swish the exponent is rounded, then a few operations; of relu nothing is.
    roundings = 2.0**-24 * (0 if name == "relu" else 16 * (1 + np.abs(z)))
    agree(y, reference.activation(z, activation=name), roundings * np.abs(z), x.dtype, "y")
    p, wide = n.problem(x, s, b), dy.astype(x.dtype).astype(np.float64)
    before = reference.activation_dgrad(wide, z, activation=name)
    more = norm_bounds.moved(p, in_view(n, roundings * np.abs(wide), p.x.shape))
    bounds = norm_bounds.backward(p, in_view(n, before, p.x.shape))
    for (golden, error), extra, found, kind in zip(bounds, more, grads, ("dx", "dscale", "dbias"), strict=True):
        dtype = x.dtype if kind == "dx" else np.float32
        agree(found, golden.reshape(found.shape), (error + extra).reshape(found.shape), dtype, kind)
