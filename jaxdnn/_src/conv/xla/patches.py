"""Convolution as one matrix product: of (strided) pixels, or of windows that tile the input."""

import itertools as it
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.conv.xla.problem import Problem, zero


def strided_pixels(problem: Problem, x: Array) -> Array:
    return lax.slice(x, (0,) * x.ndim, x.shape, (1, *problem.geo.stride, 1))


def from_strided_pixels(problem: Problem, pixels: Array, sizes: Sequence[int]) -> Array:
    """The adjoint of `strided_pixels`, of these spatial sizes."""
    spans = zip(sizes, problem.geo.out, problem.geo.stride, strict=True)
    spatial = [(0, size - 1 - (p - 1) * stride, stride - 1) for size, p, stride in spans]
    return lax.pad(pixels, zero(pixels), [(0, 0, 0), *spatial, (0, 0, 0)])


def to_patches(problem: Problem, x: Array) -> Array:
    """(N, sizes..., C) to (N, output sizes..., taps * C); what no window covers is cropped."""
    rank, outputs, taps = problem.geo.rank, problem.geo.out, problem.geo.taps
    n, c = x.shape[0], x.shape[-1]
    covered = [p * r for p, r in zip(outputs, taps, strict=True)]
    x = lax.slice(x, (0,) * x.ndim, (n, *covered, c))
    split = x.reshape(n, *it.chain.from_iterable(zip(outputs, taps, strict=True)), c)
    order = (0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1)
    return jnp.transpose(split, order).reshape(n, *outputs, math.prod(taps) * c)


def from_patches(problem: Problem, patches: Array, c: int) -> Array:
    """The adjoint of `to_patches`."""
    rank, outputs, taps = problem.geo.rank, problem.geo.out, problem.geo.taps
    n = patches.shape[0]
    split = patches.reshape(n, *outputs, *taps, c)
    order = (0, *it.chain.from_iterable((1 + i, 1 + rank + i) for i in range(rank)), 2 * rank + 1)
    covered = [p * r for p, r in zip(outputs, taps, strict=True)]
    x = jnp.transpose(split, order).reshape(n, *covered, c)
    missing = [(0, size - cover, 0) for size, cover in zip(problem.geo.sizes, covered, strict=True)]
    return lax.pad(x, zero(x), [(0, 0, 0), *missing, (0, 0, 0)])
