"""Convolution tap by tap: for every tap the pixels that the outputs read by it, times that tap's weights.

Depthwise convolution multiplies element by element (`shifted_*`), every other one by matrix products (`taps_*`).
"""

import functools as ft
import itertools as it
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.conv.xla.problem import Problem, zero


def padded(problem: Problem, x: Array) -> Array:
    """x with its padding, cropped to what the windows reach."""
    reach = [
        (p - 1) * stride + extent
        for p, stride, extent in zip(problem.geo.out, problem.geo.stride, problem.geo.extents, strict=True)
    ]
    spatial = [
        (low, total - size - low, 0)
        for size, total, (low, _) in zip(problem.geo.sizes, reach, problem.geo.padding, strict=True)
    ]
    return lax.pad(x, zero(x), [(0, 0, 0), *spatial, (0, 0, 0)])


def shift(problem: Problem, padded: Array, start: Sequence[Any]) -> Array:
    """The input pixel that every output pixel reads by the tap that starts at `start` (may be traced)."""
    spans = [(p - 1) * s + 1 for p, s in zip(problem.geo.out, problem.geo.stride, strict=True)]
    sizes = (padded.shape[0], *spans, padded.shape[-1])
    if all(isinstance(v, int) for v in start):
        limit = [0 + a + b for a, b in zip((0, *start, 0), sizes, strict=True)]
        return lax.slice(padded, (0, *start, 0), limit, (1, *problem.geo.stride, 1))
    block = lax.dynamic_slice(padded, (0, *start, 0), sizes)
    return lax.slice(block, (0,) * block.ndim, block.shape, (1, *problem.geo.stride, 1))


def _tap_starts(problem: Problem) -> Iterator[tuple[int, ...]]:
    dilation = problem.geo.dilation
    for tap in it.product(*map(range, problem.geo.taps)):
        yield tuple(r * d for r, d in zip(tap, dilation, strict=True))


def traced_start(problem: Problem, tap: Array) -> list[Array]:
    """The start of a tap whose flat index is traced."""
    start = []
    for r, d in zip(reversed(problem.geo.taps), reversed(problem.geo.dilation), strict=True):
        tap, place = divmod_index(tap, r)
        start.append(place * d)
    return start[::-1]


def divmod_index(index: Array, by: int) -> tuple[Array, Array]:
    """divmod of an index, which is int64 where JAX's 64-bit mode is on; never negative, so truncation does."""
    divisor = jnp.asarray(by, index.dtype)
    return lax.div(index, divisor), lax.rem(index, divisor)


def _sum_over_taps(problem: Problem, term: Any, padded: Array, w: Array) -> Array:
    """Σ over the taps of term(shifted input, the tap's slice of w), w having its taps along axis 0."""
    if len(w) <= problem.unrolled_taps:
        terms = [term(shift(problem, padded, start), w[t]) for t, start in enumerate(_tap_starts(problem))]
        return ft.reduce(jnp.add, terms)

    def body(tap: Array, total: Array) -> Array:
        w_tap = lax.dynamic_index_in_dim(w, tap, keepdims=False)
        return total + term(shift(problem, padded, traced_start(problem, tap)), w_tap)

    first = term(shift(problem, padded, next(_tap_starts(problem))), w[0])
    return lax.fori_loop(1, len(w), body, first)


def _map_over_taps(problem: Problem, term: Any, padded: Array, unrolled: int) -> Array:
    """term(shifted input) of every tap, stacked along a new axis 0; in a loop if there are more than `unrolled`."""
    count = math.prod(problem.geo.taps)
    if count <= unrolled:
        return jnp.stack([term(shift(problem, padded, start)) for start in _tap_starts(problem)])
    return lax.map(lambda tap: term(shift(problem, padded, traced_start(problem, tap))), jnp.arange(count))


def shifted_forward(problem: Problem, x: Array, w: Array) -> Array:
    c, k = x.shape[-1], w.shape[-1]
    w = w.reshape(-1, c, k // c).astype(problem.preferred)

    def term(shifted: Array, tap: Array) -> Array:
        product = shifted.astype(problem.preferred)[..., None] * tap.reshape((1,) * (x.ndim - 1) + tap.shape)
        return product.reshape(*shifted.shape[:-1], k)

    return _sum_over_taps(problem, term, padded(problem, x), w)


def shifted_backward_filter(problem: Problem, x: Array, dy: Array) -> Array:
    c, k = x.shape[-1], dy.shape[-1]
    pixels = tuple(range(dy.ndim - 1))
    several = k > c  # an axis of length one would be the one that XLA's code runs along
    dy = dy.reshape(*dy.shape[:-1], c, *([k // c] if several else [])).astype(problem.preferred)

    def term(shifted: Array) -> Array:
        shifted = shifted.astype(problem.preferred)
        return jnp.sum((shifted[..., None] if several else shifted) * dy, pixels).reshape(1, k)

    # On CPUs a loop: one sum after another in the program takes XLA five times as long to compile, and longer to run.
    unrolled = problem.unrolled_taps if problem.on_gpu else 1
    return _map_over_taps(problem, term, padded(problem, x), unrolled).reshape(*problem.geo.taps, 1, k)


def taps_forward(problem: Problem, x: Array, w: Array) -> Array:
    g, k = problem.geo.groups, w.shape[-1]
    w = w.reshape(-1, w.shape[-2], g, k // g)

    def term(shifted: Array, tap: Array) -> Array:
        pixels = shifted.reshape(-1, g, shifted.shape[-1] // g)
        return problem.dot(pixels, tap, ((2,), (0,)), ((1,), (1,)))  # (G, pixels, K / G)

    total = _sum_over_taps(problem, term, padded(problem, x), w)
    return jnp.moveaxis(total, 0, 1).reshape(x.shape[0], *problem.geo.out, k)


def taps_backward_filter(problem: Problem, x: Array, dy: Array) -> Array:
    g, k, cg = problem.geo.groups, dy.shape[-1], x.shape[-1] // problem.geo.groups
    dy = dy.reshape(-1, g, k // g)

    def term(shifted: Array) -> Array:
        return problem.dot(shifted.reshape(-1, g, cg), dy, ((0,), (0,)), ((1,), (1,)))  # (G, C / G, K / G)

    stacked = _map_over_taps(problem, term, padded(problem, x), problem.unrolled_taps)
    return jnp.moveaxis(stacked, 1, 2).reshape(*problem.geo.taps, cg, k)
