"""Convolution for XLA, in the forms that it compiles to fast programs, on channels-last arrays.

x is (N, sizes..., C), w is (taps..., C / G, K), y is (N, output sizes..., K), the filter not flipped. A form is chosen
by the geometry alone. Measured on two cores of a CPU (`benchmarks/results/conv_families_cpu.json`): the shifted form of
depthwise convolution is 14 to 98 times as fast as XLA's grouped convolution (its filter gradient 1.7 to 8.5 times), the
filter gradient of grouped convolution as matrix products 17 to 142 times, that of transposed convolution 2 to 30 times.
Integers tap by tap are faster than XLA's loop over 1-D, 3-D and filter gradients, up to tens of times.

| form | when | what it is |
|---|---|---|
| matrix | one tap, no padding, one group | a matrix product over the (strided) pixels |
| patches | windows tile the input: stride = taps, no padding, no dilation, one group | a reshape and a matrix product |
| shifted | depthwise | one multiply-add over the shifted input per tap |
| products | a `matmul` of several matrices, which are groups | a batch of matrix products |
| taps | grouped (forward: wide groups); integers, but where CPUs have a library: forward in 2-D | products tap by tap |
| direct | everything else | XLA's convolution |
"""

import dataclasses
import itertools as it
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.conv.geometry import Geometry, Products
from jaxdnn._src.conv.xla.patches import from_patches, from_strided_pixels, strided_pixels, to_patches
from jaxdnn._src.conv.xla.problem import Problem, is_less, zero
from jaxdnn._src.conv.xla.taps import shifted_backward_filter, shifted_forward, taps_backward_filter, taps_forward

# With more stride phases than these (16 x 16), each of which is a convolution of its own, backward data is one
# convolution of dy with zeros between its elements.
UNROLLED_PHASES = 256
# Below this many channels a group, XLA's grouped convolution is faster on CPUs than one product per tap.
NARROW_GROUP = 16


def forward(problem: Problem, x: Array, w: Array) -> Array:
    """y = conv(x, w)."""
    c, k = x.shape[-1], w.shape[-1]
    if problem.is_matrix:
        return problem.dot(strided_pixels(problem, x), w.reshape(c, k), ((x.ndim - 1,), (0,)))
    if problem.is_patches:
        return problem.dot(to_patches(problem, x), w.reshape(-1, k), ((x.ndim - 1,), (0,)))
    if isinstance(problem.geo, Products):
        return _products(problem, x, w.reshape(-1, problem.geo.groups, k // problem.geo.groups), (2, 0))
    if _is_depthwise(problem, c):
        return shifted_forward(problem, x, w)
    wide = problem.geo.groups > 1 and c // problem.geo.groups >= NARROW_GROUP
    if problem.integer_taps or wide or _is_loop_of_integers(problem, k):
        return taps_forward(problem, x, w)
    return direct(problem, x, w, _numbers(problem.geo.rank))


def backward_data(problem: Problem, dy: Array, w: Array) -> Array:
    """dx, the adjoint of `forward` in x."""
    c = w.shape[-2] * problem.geo.groups
    if problem.is_matrix:
        pixels = problem.dot(dy, w.reshape(c, -1), ((dy.ndim - 1,), (1,)))
        return from_strided_pixels(problem, pixels, problem.geo.sizes)
    if problem.is_patches:
        patches = problem.dot(dy, w.reshape(-1, w.shape[-1]), ((dy.ndim - 1,), (1,)))
        return from_patches(problem, patches, c)
    if isinstance(problem.geo, Products):
        k = dy.shape[-1]
        return _products(problem, dy, w.reshape(-1, problem.geo.groups, k // problem.geo.groups), (2, 2))
    # As a forward convolution of dy by the reversed filter with its channels exchanged within each group.
    back = exchange_channels(lax.rev(w, range(problem.geo.rank)), problem.geo.groups)
    if 1 < math.prod(problem.geo.stride) <= UNROLLED_PHASES:
        return _backward_data_by_phases(problem, dy, back)
    reach = [(p - 1) * u + 1 for p, u in zip(problem.geo.out, problem.geo.stride, strict=True)]
    spread = from_strided_pixels(problem, dy, reach)
    padding = tuple(
        (extent - 1 - low, size + low - p)
        for size, p, extent, (low, _) in zip(
            problem.geo.sizes,
            spread.shape[1:-1],
            problem.geo.extents,
            problem.geo.padding,
            strict=True,
        )
    )
    return _cropped_forward(problem, spread, back, padding, problem.geo.dilation)


def backward_filter(problem: Problem, x: Array, dy: Array) -> Array:
    """dw, the adjoint of `forward` in w."""
    c, k = x.shape[-1], dy.shape[-1]
    pixels = tuple(range(dy.ndim - 1))
    if (problem.is_matrix or problem.is_patches) and not problem.integer_taps:
        patches = strided_pixels(problem, x) if problem.is_matrix else to_patches(problem, x)
        return problem.dot(patches, dy, (pixels, pixels)).reshape(*problem.geo.taps, c, k)
    if isinstance(problem.geo, Products):
        x, dy = (v.reshape(-1, problem.geo.groups, v.shape[-1] // problem.geo.groups) for v in (x, dy))
        products = problem.dot(x, dy, ((0,), (0,)), ((1,), (1,)))  # (G, C / G, K / G)
        return jnp.moveaxis(products, 0, 1).reshape(*problem.geo.taps, -1, k)
    if _is_depthwise(problem, c):
        return shifted_backward_filter(problem, x, dy)
    # XLA's backward-filter convolution is fast for images that are large in proportion to the channels; for small ones
    # matrix products are faster. For integers XLA has only a loop.
    if problem.geo.groups > 1 or problem.is_integer or is_less(math.prod(dy.shape[:-1]), 8 * c):
        return taps_backward_filter(problem, x, dy)
    return _direct_backward_filter(problem, x, dy)


def _products(problem: Problem, pixels: Array, w: Array, terms: tuple[int, int]) -> Array:
    """Pixels times the (C / G, G, K / G) of a filter; the axes that are added over are `terms`."""
    g, (left, right) = problem.geo.groups, terms
    split = pixels.reshape(-1, g, pixels.shape[-1] // g)
    products = problem.dot(split, w, ((left,), (right,)), ((1,), (1,)))  # (G, pixels, channels)
    return jnp.moveaxis(products, 0, 1).reshape(*pixels.shape[:-1], g * products.shape[-1])


def _is_depthwise(problem: Problem, c: int) -> bool:
    return problem.geo.groups == c and not problem.integer_taps


def _is_loop_of_integers(problem: Problem, k: int) -> bool:
    """Whether XLA compiles a convolution of integers to a loop on CPUs, so that products tap by tap are faster.

    The library that it calls serves two spatial axes. For groups with one result the products are a loop too, a slower
    one.
    """
    return problem.is_integer and problem.geo.rank != 2 and k > problem.geo.groups


# ---- direct ----------------------------------------------------------------------------------------------------------


def _numbers(rank: int) -> lax.ConvDimensionNumbers:
    data = (0, rank + 1, *range(1, rank + 1))
    return lax.ConvDimensionNumbers(data, (rank + 1, rank, *range(rank)), data)


def direct(problem: Problem, x: Array, w: Array, numbers: lax.ConvDimensionNumbers) -> Array:
    """y by XLA's convolution, of arrays whose axes are numbered so."""
    geo = problem.geo
    return problem.convolve(x, w, numbers, geo.stride, geo.padding, geo.dilation, feature_group_count=geo.groups)


def _direct_backward_filter(problem: Problem, x: Array, dy: Array) -> Array:
    geo, rank = problem.geo, problem.geo.rank
    channels_as_batch = (rank + 1, 0, *range(1, rank + 1))
    numbers = lax.ConvDimensionNumbers(channels_as_batch, channels_as_batch, (rank, rank + 1, *range(rank)))
    padding = backward_filter_padding(geo)
    x = lax.pad(x, zero(x), [(0, 0, 0), *((0, min(high, 0), 0) for _, high in padding), (0, 0, 0)])
    return problem.convolve(x, dy, numbers, geo.dilation, [(low, max(high, 0)) for low, high in padding], geo.stride)


def backward_filter_padding(geo: Geometry) -> list[tuple[int, int]]:
    """The padding with which convolving x by dy (dilated by the stride) gives as many results as there are taps."""
    spans = zip(geo.sizes, geo.out, geo.extents, geo.stride, geo.padding, strict=True)
    return [(low, extent + (p - 1) * stride - size - low) for size, p, extent, stride, (low, _) in spans]


# ---- backward data ---------------------------------------------------------------------------------------------------


def exchange_channels(w: Array, groups: int) -> Array:
    """(taps..., C / G, K) to (taps..., K / G, C)."""
    *taps, cg, k = w.shape
    split = w.reshape(*taps, cg, groups, k // groups)
    return jnp.transpose(split, (*range(len(taps)), -1, -2, -3)).reshape(*taps, k // groups, groups * cg)


def _cropped_forward(problem: Problem, x: Array, w: Array, padding: Any, dilation: Any) -> Array:
    """A forward convolution with stride 1 whose padding may be negative: then the input is cropped."""
    x, rest = crop(x, range(1, 1 + problem.geo.rank), padding, (1,) * problem.geo.rank)
    taps, one = w.shape[: problem.geo.rank], (1,) * problem.geo.rank
    inner = Geometry(x.shape[1:-1], taps, one, rest, dilation, groups=problem.geo.groups)
    return forward(dataclasses.replace(problem, geo=inner), x, w)


def crop(
    x: Array, axes: Sequence[int], padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> tuple[Array, tuple[tuple[int, int], ...]]:
    """Replaces negative padding of an array with `dilation` between its elements by a slice.

    Returns the slice and the remaining padding. XLA crashed on negative padding of dilated arrays (JAX 0.10.2, in an
    algebraic simplification). If no element remains, the array is a single zero.
    """
    rest = []
    for axis, (low, high), d in zip(axes, padding, dilation, strict=True):
        size = x.shape[axis]
        total = (size - 1) * d + 1 + low + high
        drop_low, drop_high = max(0, -(low // d)), max(0, -(high // d))
        if drop_low + drop_high < size:
            x = lax.slice_in_dim(x, drop_low, size - drop_high, axis=axis)
            rest.append((low + drop_low * d, high + drop_high * d))
        else:
            x = jnp.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)
            rest.append((0, total - 1))
    return x, tuple(rest)


@dataclasses.dataclass(frozen=True)
class _Phase:
    """The results h = offset + stride * i along one axis: the taps that contribute to them, and their place in dy."""

    first: int  # the first of these taps in the reversed filter
    step: int  # between these taps in the reversed filter
    count: int
    dilation: int  # between the elements of dy that neighbouring ones of these taps multiply
    low: int  # padding of dy

    @staticmethod
    def of(offset: int, stride: int, dilation: int, taps: int, low: int) -> "_Phase":
        """Tap r contributes to h if offset + low - r dilation is a multiple of the stride."""
        reaching = [r for r in range(taps) if (offset + low - r * dilation) % stride == 0]
        if not reaching:
            return _Phase(0, 1, 0, 1, 0)
        step = stride // math.gcd(stride, dilation)
        last = reaching[-1]  # the reversed filter begins with the last tap, which reaches the earliest element of dy
        start = (offset + low - last * dilation) // stride
        return _Phase(taps - 1 - last, step, len(reaching), step * dilation // stride, -start)


def _backward_data_by_phases(problem: Problem, dy: Array, back: Array) -> Array:
    """Each residue of the result's index modulo the stride is a dense convolution of dy by some of the taps."""
    geo, rank = problem.geo, problem.geo.rank
    n, c = dy.shape[0], back.shape[-1]
    counts = [-(-size // stride) for size, stride in zip(geo.sizes, geo.stride, strict=True)]
    results = []
    for offsets in it.product(*map(range, geo.stride)):
        axes = zip(offsets, geo.stride, geo.dilation, geo.taps, (low for low, _ in geo.padding), strict=True)
        phases = [_Phase.of(*axis) for axis in axes]
        if min(p.count for p in phases) == 0:
            results.append(jnp.zeros((n, *counts, c), problem.preferred))
            continue
        some = back[tuple(slice(p.first, p.first + (p.count - 1) * p.step + 1, p.step) for p in phases)]
        padding = [
            (p.low, count - 1 + (p.count - 1) * p.dilation + 1 - size - p.low)
            for p, count, size in zip(phases, counts, problem.geo.out, strict=True)
        ]
        results.append(_cropped_forward(problem, dy, some, padding, tuple(p.dilation for p in phases)))
    stacked = jnp.stack(results, -1).reshape(n, *counts, c, *geo.stride)
    order = (0, *it.chain.from_iterable((1 + i, 2 + rank + i) for i in range(rank)), 1 + rank)
    joined = [count * stride for count, stride in zip(counts, geo.stride, strict=True)]
    x = jnp.transpose(stacked, order).reshape(n, *joined, c)
    return lax.slice(x, (0,) * x.ndim, (n, *problem.geo.sizes, c))
