"""Convolution written for XLA in the forms that it compiles well, on channels-last arrays.

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
| taps | grouped (forward: wide groups); integers, but where CPUs have a library: forward in 2-D | products tap by tap |
| direct | everything else | XLA's convolution |
"""

import dataclasses
import functools as ft
import itertools as it
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, export, lax

from jaxdnn._window import Window

# Beyond this many taps the unrolled sum would take long to compile, and a loop over the taps serves.
UNROLLED_TAPS = 128
# Fewer for integers on CPUs: 27 products take 1.7 s to compile and a loop 0.3 s, and neither is always the faster.
UNROLLED_INTEGER_TAPS = 9
# Beyond this many stride phases (16 x 16), each a convolution of its own, dy with zeros between its elements serves.
UNROLLED_PHASES = 256
# Below this many channels a group, XLA's grouped convolution is faster on CPUs than one product per tap.
NARROW_GROUP = 16
# So many products of two int8 values add up to 2^24 at most.
EXACT_TERMS = 1024
# Products of so few elements cost nothing in float32; XLA's own limit, below which no library is called, is lower.
SMALL_PRODUCT = 4096


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static part of a convolution.

    `integer_taps`: integers are added by matrix products of float32, tap by tap. XLA has no integer convolution for
    GPUs, and its products of int8 matrices there were found wrong for small or odd sizes (JAX 0.11.2, H200).
    """

    window: Window
    sizes: tuple[int, ...]
    taps: tuple[int, ...]
    groups: int
    precision: lax.Precision
    preferred: Any
    integer_taps: bool = False

    @property
    def rank(self) -> int:
        return len(self.taps)

    @property
    def output_sizes(self) -> tuple[int, ...]:
        return self.window.output_sizes(self.sizes, self.taps)

    @property
    def unpadded(self) -> bool:
        return not any(map(any, self.window.padding))

    @property
    def is_integer(self) -> bool:
        return jnp.issubdtype(self.preferred, jnp.integer)

    @property
    def unrolled_taps(self) -> int:
        return UNROLLED_INTEGER_TAPS if self.is_integer and not self.integer_taps else UNROLLED_TAPS

    @property
    def is_matrix(self) -> bool:
        return set(self.taps) == {1} and self.unpadded and self.groups == 1

    @property
    def is_patches(self) -> bool:
        tiled = self.window.strides == self.taps and set(self.window.dilation) == {1}
        return tiled and self.unpadded and self.groups == 1

    def dot(self, a: Array, b: Array, contract: tuple, batch: tuple = ((), ())) -> Array:
        """A matrix product in the problem's precision."""
        if self.integer_taps:
            return _exact_integer_dot(a, b, contract, batch)
        narrow = jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize < 4
        if narrow and _is_thin(a, b, contract, batch):
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            highest = lax.Precision.HIGHEST
            product = lax.dot_general(a, b, (contract, batch), precision=highest, preferred_element_type=jnp.float32)
            return product.astype(self.preferred)
        return lax.dot_general(a, b, (contract, batch), precision=self.precision, preferred_element_type=self.preferred)


def forward(problem: Problem, x: Array, w: Array) -> Array:
    """y = conv(x, w)."""
    c, k = x.shape[-1], w.shape[-1]
    if problem.is_matrix:
        return problem.dot(_strided_pixels(problem, x), w.reshape(c, k), ((x.ndim - 1,), (0,)))
    if problem.is_patches:
        return problem.dot(_to_patches(problem, x), w.reshape(-1, k), ((x.ndim - 1,), (0,)))
    if _is_depthwise(problem, c):
        return _shifted_forward(problem, x, w)
    wide = problem.groups > 1 and c // problem.groups >= NARROW_GROUP
    if problem.integer_taps or wide or _is_loop_of_integers(problem, k):
        return _taps_forward(problem, x, w)
    return _direct(problem, x, w, problem.window.strides, problem.window.padding, problem.window.dilation)


def backward_data(problem: Problem, dy: Array, w: Array) -> Array:
    """dx, the adjoint of `forward` in x."""
    c = w.shape[-2] * problem.groups
    if problem.is_matrix:
        pixels = problem.dot(dy, w.reshape(c, -1), ((dy.ndim - 1,), (1,)))
        return _from_strided_pixels(problem, pixels, problem.sizes)
    if problem.is_patches:
        patches = problem.dot(dy, w.reshape(-1, w.shape[-1]), ((dy.ndim - 1,), (1,)))
        return _from_patches(problem, patches, c)
    # As a forward convolution of dy by the reversed filter with its channels exchanged within each group.
    back = exchange_channels(lax.rev(w, range(problem.rank)), problem.groups)
    if 1 < math.prod(problem.window.strides) <= UNROLLED_PHASES:
        return _backward_data_by_phases(problem, dy, back)
    reach = [(p - 1) * u + 1 for p, u in zip(problem.output_sizes, problem.window.strides, strict=True)]
    spread = _from_strided_pixels(problem, dy, reach)
    padding = tuple(
        (extent - 1 - low, size + low - p)
        for size, p, extent, (low, _) in zip(
            problem.sizes,
            spread.shape[1:-1],
            problem.window.extents(problem.taps),
            problem.window.padding,
            strict=True,
        )
    )
    return _cropped_forward(problem, spread, back, padding, problem.window.dilation)


def backward_filter(problem: Problem, x: Array, dy: Array) -> Array:
    """dw, the adjoint of `forward` in w."""
    c, k = x.shape[-1], dy.shape[-1]
    pixels = tuple(range(dy.ndim - 1))
    if (problem.is_matrix or problem.is_patches) and not problem.integer_taps:
        patches = _strided_pixels(problem, x) if problem.is_matrix else _to_patches(problem, x)
        return problem.dot(patches, dy, (pixels, pixels)).reshape(*problem.taps, c, k)
    if _is_depthwise(problem, c):
        return _shifted_backward_filter(problem, x, dy)
    # XLA's backward-filter convolution is for images large against the channels; small ones are matrix products. Of
    # integers it has none but a loop.
    if problem.groups > 1 or problem.is_integer or _is_less(math.prod(dy.shape[:-1]), 8 * c):
        return _taps_backward_filter(problem, x, dy)
    return _direct_backward_filter(problem, x, dy)


def _exact_integer_dot(a: Array, b: Array, contract: tuple, batch: tuple) -> Array:
    """The int32 product of int8 arrays over one axis each: sums of float32 that stay below 2^24, then sums of int32.

    1024 products of int8 values add up to at most 2^24: exact in float32, in any order, on a tensor core too, for which
    TF32 holds int8 values exactly. As bfloat16 they would not be safe: XLA multiplies small matrices in the operands'
    own type, and a product needs 15 bits. Sums of int32 wrap.
    """
    ((left,), (right,)) = contract
    n, size = a.shape[left], EXACT_TERMS
    parts = 1 if _is_less(n, size + 1) else -(-n // size)
    a, b = (_split_axis(v, axis, parts) for v, axis in ((a, left), (b, right)))
    lefts, rights = ([axis + (axis > at) for axis in axes] for axes, at in zip(batch, (left, right), strict=True))
    sums = lax.dot_general(
        a.astype(jnp.float32),
        b.astype(jnp.float32),
        (((left + 1,), (right + 1,)), ((left, *lefts), (right, *rights))),
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    return jnp.sum(sums.astype(jnp.int32), 0, dtype=jnp.int32)


def _is_thin(a: Array, b: Array, contract: tuple, batch: tuple) -> bool:
    """Whether XLA may turn a product into multiplications and sums in the operands' own type (seen on GPUs).

    It does so where a side is a vector or the terms are one, and leaves small products to a loop that does the same.
    """
    terms = math.prod(a.shape[axis] for axis in contract[0])
    shared = terms * math.prod(a.shape[axis] for axis in batch[0])
    if any(map(export.is_symbolic_dim, (a.size, b.size))):  # then it may be: the batch is known when it is compiled
        return True
    return 1 in (terms, a.size // max(shared, 1), b.size // max(shared, 1)) or a.size + b.size < SMALL_PRODUCT


def _is_less(size: Any, least: int) -> bool:
    """Whether a size is below a number; one with a batch that is not known when traced is taken for large."""
    return not export.is_symbolic_dim(size) and size < least


def _split_axis(v: Array, axis: int, parts: int) -> Array:
    """An axis as (parts, size), padded with zeros."""
    size = -(-v.shape[axis] // parts)
    padding = [(0, 0, 0)] * v.ndim
    padding[axis] = (0, parts * size - v.shape[axis], 0)
    return lax.pad(v, _zero(v), padding).reshape(*v.shape[:axis], parts, size, *v.shape[axis + 1 :])


def _is_depthwise(problem: Problem, c: int) -> bool:
    return problem.groups == c and not problem.integer_taps


def _is_loop_of_integers(problem: Problem, k: int) -> bool:
    """Whether XLA has no more than a loop for a convolution of integers on CPUs, where products tap by tap serve.

    The library that it calls has two spatial axes. Of groups with one result the products are a loop too, a slower one.
    """
    return problem.is_integer and problem.rank != 2 and k > problem.groups


# ---- matrix and patches ----------------------------------------------------------------------------------------------


def _strided_pixels(problem: Problem, x: Array) -> Array:
    return lax.slice(x, (0,) * x.ndim, x.shape, (1, *problem.window.strides, 1))


def _from_strided_pixels(problem: Problem, pixels: Array, sizes: Sequence[int]) -> Array:
    """The adjoint of `_strided_pixels`, of these spatial sizes."""
    spans = zip(sizes, problem.output_sizes, problem.window.strides, strict=True)
    spatial = [(0, size - 1 - (p - 1) * stride, stride - 1) for size, p, stride in spans]
    return lax.pad(pixels, _zero(pixels), [(0, 0, 0), *spatial, (0, 0, 0)])


def _to_patches(problem: Problem, x: Array) -> Array:
    """(N, sizes..., C) to (N, output sizes..., taps * C); what no window covers is cropped."""
    rank, outputs, taps = problem.rank, problem.output_sizes, problem.taps
    n, c = x.shape[0], x.shape[-1]
    covered = [p * r for p, r in zip(outputs, taps, strict=True)]
    x = lax.slice(x, (0,) * x.ndim, (n, *covered, c))
    split = x.reshape(n, *it.chain.from_iterable(zip(outputs, taps, strict=True)), c)
    order = (0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1)
    return jnp.transpose(split, order).reshape(n, *outputs, math.prod(taps) * c)


def _from_patches(problem: Problem, patches: Array, c: int) -> Array:
    """The adjoint of `_to_patches`."""
    rank, outputs, taps = problem.rank, problem.output_sizes, problem.taps
    n = patches.shape[0]
    split = patches.reshape(n, *outputs, *taps, c)
    order = (0, *it.chain.from_iterable((1 + i, 1 + rank + i) for i in range(rank)), 2 * rank + 1)
    covered = [p * r for p, r in zip(outputs, taps, strict=True)]
    x = jnp.transpose(split, order).reshape(n, *covered, c)
    missing = [(0, size - cover, 0) for size, cover in zip(problem.sizes, covered, strict=True)]
    return lax.pad(x, _zero(x), [(0, 0, 0), *missing, (0, 0, 0)])


# ---- shifted and taps ------------------------------------------------------------------------------------------------


def padded(problem: Problem, x: Array) -> Array:
    """x with its padding, cropped to what the windows reach."""
    reach = [
        (p - 1) * stride + extent
        for p, stride, extent in zip(
            problem.output_sizes, problem.window.strides, problem.window.extents(problem.taps), strict=True
        )
    ]
    spatial = [
        (low, total - size - low, 0)
        for size, total, (low, _) in zip(problem.sizes, reach, problem.window.padding, strict=True)
    ]
    return lax.pad(x, _zero(x), [(0, 0, 0), *spatial, (0, 0, 0)])


def shift(problem: Problem, padded: Array, start: Sequence[Any]) -> Array:
    """The input pixel that every output pixel sees through the tap that starts at `start` (may be traced)."""
    spans = [(p - 1) * s + 1 for p, s in zip(problem.output_sizes, problem.window.strides, strict=True)]
    sizes = (padded.shape[0], *spans, padded.shape[-1])
    if all(isinstance(v, int) for v in start):
        limit = [0 + a + b for a, b in zip((0, *start, 0), sizes, strict=True)]
        return lax.slice(padded, (0, *start, 0), limit, (1, *problem.window.strides, 1))
    block = lax.dynamic_slice(padded, (0, *start, 0), sizes)
    return lax.slice(block, (0,) * block.ndim, block.shape, (1, *problem.window.strides, 1))


def _tap_starts(problem: Problem) -> Iterator[tuple[int, ...]]:
    dilation = problem.window.dilation
    for tap in it.product(*map(range, problem.taps)):
        yield tuple(r * d for r, d in zip(tap, dilation, strict=True))


def traced_start(problem: Problem, tap: Array) -> list[Array]:
    """The start of a tap whose flat index is traced."""
    start = []
    for r, d in zip(reversed(problem.taps), reversed(problem.window.dilation), strict=True):
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


def _map_over_taps(problem: Problem, term: Any, padded: Array) -> Array:
    """term(shifted input) of every tap, stacked along a new axis 0."""
    count = math.prod(problem.taps)
    if count <= problem.unrolled_taps:
        return jnp.stack([term(shift(problem, padded, start)) for start in _tap_starts(problem)])
    return lax.map(lambda tap: term(shift(problem, padded, traced_start(problem, tap))), jnp.arange(count))


def _shifted_forward(problem: Problem, x: Array, w: Array) -> Array:
    c, k = x.shape[-1], w.shape[-1]
    w = w.reshape(-1, c, k // c).astype(problem.preferred)

    def term(shifted: Array, tap: Array) -> Array:
        product = shifted.astype(problem.preferred)[..., None] * tap.reshape((1,) * (x.ndim - 1) + tap.shape)
        return product.reshape(*shifted.shape[:-1], k)

    return _sum_over_taps(problem, term, padded(problem, x), w)


def _shifted_backward_filter(problem: Problem, x: Array, dy: Array) -> Array:
    c, k = x.shape[-1], dy.shape[-1]
    pixels = tuple(range(dy.ndim - 1))
    dy = dy.reshape(*dy.shape[:-1], c, k // c).astype(problem.preferred)

    def term(shifted: Array) -> Array:
        return jnp.sum(shifted.astype(problem.preferred)[..., None] * dy, pixels).reshape(1, k)

    return _map_over_taps(problem, term, padded(problem, x)).reshape(*problem.taps, 1, k)


def _taps_forward(problem: Problem, x: Array, w: Array) -> Array:
    g, k = problem.groups, w.shape[-1]
    w = w.reshape(-1, w.shape[-2], g, k // g)

    def term(shifted: Array, tap: Array) -> Array:
        pixels = shifted.reshape(-1, g, shifted.shape[-1] // g)
        return problem.dot(pixels, tap, ((2,), (0,)), ((1,), (1,)))  # (G, pixels, K / G)

    total = _sum_over_taps(problem, term, padded(problem, x), w)
    return jnp.moveaxis(total, 0, 1).reshape(x.shape[0], *problem.output_sizes, k)


def _taps_backward_filter(problem: Problem, x: Array, dy: Array) -> Array:
    g, k, cg = problem.groups, dy.shape[-1], x.shape[-1] // problem.groups
    dy = dy.reshape(-1, g, k // g)

    def term(shifted: Array) -> Array:
        return problem.dot(shifted.reshape(-1, g, cg), dy, ((0,), (0,)), ((1,), (1,)))  # (G, C / G, K / G)

    stacked = _map_over_taps(problem, term, padded(problem, x))
    return jnp.moveaxis(stacked, 1, 2).reshape(*problem.taps, cg, k)


# ---- direct ----------------------------------------------------------------------------------------------------------


def _numbers(rank: int) -> lax.ConvDimensionNumbers:
    data = (0, rank + 1, *range(1, rank + 1))
    return lax.ConvDimensionNumbers(data, (rank + 1, rank, *range(rank)), data)


def _direct(problem: Problem, x: Array, w: Array, strides: Any, padding: Any, dilation: Any) -> Array:
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=strides,
        padding=padding,
        rhs_dilation=dilation,
        dimension_numbers=_numbers(problem.rank),
        feature_group_count=problem.groups,
        precision=problem.precision,
        preferred_element_type=problem.preferred,
    )


def _direct_backward_filter(problem: Problem, x: Array, dy: Array) -> Array:
    rank, window = problem.rank, problem.window
    channels_as_batch = (rank + 1, 0, *range(1, rank + 1))
    padding = backward_filter_padding(window, problem.sizes, problem.taps)
    x = lax.pad(x, _zero(x), [(0, 0, 0), *((0, min(high, 0), 0) for _, high in padding), (0, 0, 0)])
    return lax.conv_general_dilated(
        x,
        dy,
        window_strides=window.dilation,
        padding=[(low, max(high, 0)) for low, high in padding],
        rhs_dilation=window.strides,
        dimension_numbers=lax.ConvDimensionNumbers(
            channels_as_batch, channels_as_batch, (rank, rank + 1, *range(rank))
        ),
        precision=problem.precision,
        preferred_element_type=problem.preferred,
    )


def backward_filter_padding(window: Window, sizes: Sequence[int], taps: Sequence[int]) -> list[tuple[int, int]]:
    """The padding with which convolving x by dy (dilated by the stride) gives as many results as there are taps."""
    spans = zip(
        sizes, window.output_sizes(sizes, taps), window.extents(taps), window.strides, window.padding, strict=True
    )
    return [(low, extent + (p - 1) * stride - size - low) for size, p, extent, stride, (low, _) in spans]


# ---- backward data ---------------------------------------------------------------------------------------------------


def exchange_channels(w: Array, groups: int) -> Array:
    """(taps..., C / G, K) to (taps..., K / G, C)."""
    *taps, cg, k = w.shape
    split = w.reshape(*taps, cg, groups, k // groups)
    return jnp.transpose(split, (*range(len(taps)), -1, -2, -3)).reshape(*taps, k // groups, groups * cg)


def _cropped_forward(problem: Problem, x: Array, w: Array, padding: Any, dilation: Any) -> Array:
    """A forward convolution with stride 1 whose padding may be negative: then the input is cropped."""
    x, rest = crop(x, range(1, 1 + problem.rank), padding, (1,) * problem.rank)
    inner = dataclasses.replace(
        problem, window=Window((1,) * problem.rank, rest, dilation), sizes=x.shape[1:-1], taps=w.shape[: problem.rank]
    )
    return forward(inner, x, w)


def crop(
    x: Array, axes: Sequence[int], padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> tuple[Array, tuple[tuple[int, int], ...]]:
    """Negative padding of an array with `dilation` between its elements as a slice; returns the rest of the padding.

    XLA has crashed on negative padding of dilated arrays (JAX 0.10.2, an algebraic simplification). If nothing of the
    array is left, a zero stands for it.
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
    """Along one axis, the results h = offset + stride * i: which taps reach them, and from where in dy."""

    first: int  # the first of these taps in the reversed filter
    step: int  # between these taps in the reversed filter
    count: int
    dilation: int  # between the elements of dy that neighbouring ones of these taps multiply
    low: int  # padding of dy

    @staticmethod
    def of(offset: int, stride: int, dilation: int, taps: int, low: int) -> "_Phase":
        """Tap r reaches h if offset + low - r dilation is a multiple of the stride."""
        reaching = [r for r in range(taps) if (offset + low - r * dilation) % stride == 0]
        if not reaching:
            return _Phase(0, 1, 0, 1, 0)
        step = stride // math.gcd(stride, dilation)
        last = reaching[-1]  # the reversed filter begins with the last tap, which reaches the earliest element of dy
        start = (offset + low - last * dilation) // stride
        return _Phase(taps - 1 - last, step, len(reaching), step * dilation // stride, -start)


def _backward_data_by_phases(problem: Problem, dy: Array, back: Array) -> Array:
    """Each residue of the result's index modulo the stride is a dense convolution of dy by some of the taps."""
    window, rank = problem.window, problem.rank
    n, c = dy.shape[0], back.shape[-1]
    counts = [-(-size // stride) for size, stride in zip(problem.sizes, window.strides, strict=True)]
    results = []
    for offsets in it.product(*map(range, window.strides)):
        axes = zip(
            offsets, window.strides, window.dilation, problem.taps, (low for low, _ in window.padding), strict=True
        )
        phases = [_Phase.of(*axis) for axis in axes]
        if min(p.count for p in phases) == 0:
            results.append(jnp.zeros((n, *counts, c), problem.preferred))
            continue
        some = back[tuple(slice(p.first, p.first + (p.count - 1) * p.step + 1, p.step) for p in phases)]
        padding = [
            (p.low, count - 1 + (p.count - 1) * p.dilation + 1 - size - p.low)
            for p, count, size in zip(phases, counts, problem.output_sizes, strict=True)
        ]
        results.append(_cropped_forward(problem, dy, some, padding, tuple(p.dilation for p in phases)))
    stacked = jnp.stack(results, -1).reshape(n, *counts, c, *window.strides)
    order = (0, *it.chain.from_iterable((1 + i, 2 + rank + i) for i in range(rank)), 1 + rank)
    joined = [count * stride for count, stride in zip(counts, window.strides, strict=True)]
    x = jnp.transpose(stacked, order).reshape(n, *joined, c)
    return lax.slice(x, (0,) * x.ndim, (n, *problem.sizes, c))


def _zero(x: Array) -> Array:
    return jnp.zeros((), x.dtype)
