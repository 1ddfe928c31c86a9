"""The features of boxes in images: `roi_align`.

A bin's average is one sum over the taps of all its samples: the primitive of `grid_sample`, whose image has the batch
as an axis, so that boxes look up their images as they look up pixels.
"""

from __future__ import annotations

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import blending, checks, frames, primitives, trees
from jaxdnn._src.core.annotations import PerAxis
from jaxdnn._src.core.determinism import required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import at_edges, product, quotient, rounded
from jaxdnn._src.sampling.primitive import SampleSpec
from jaxdnn._src.sampling.taps import ORDERS, Rule, across
from jaxdnn._src.tensor.reduce import reduce

MODES = ("average", "max", "max_of_taps")
BOX_FORMATS = ("xyxy", "xywh", "cxcywh")
INSIDE = Rule("linear", "border", False, "pixel", "ij", 0.0)


@public
def roi_align(
    x: ArrayLike,
    boxes: ArrayLike,
    /,
    *,
    output_sizes: PerAxis = 1,
    batch_indices: ArrayLike | None = None,
    spatial_scale: float = 1.0,
    sampling_ratio: int = 2,
    adaptive: bool = False,
    mode: str = "average",
    aligned: bool = True,
    box_format: str = "xyxy",
    order: str = "xy",
    layout: str = "NHWC",
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Pools boxes of images to one size, each bin from samples between the pixels.

    y[k, i, j] = the average or maximum over a, b of x[n_k] at the place (p(i, a), q(j, b))
    p(i, a) = l + (i m + a + 1/2) s / (P m)        a = 0, ..., m - 1, and q alike along W

    with the box from l to l + s in pixels, of which the first has its centre at 0. A sample is bilinear (linear,
    trilinear); in the half pixel beyond the centres of the outermost pixels, and up to a pixel beyond them, it is taken
    at the edge, and further out it is 0.

    Args:
      x: (N, H, W, C) for layout NHWC; one to three spatial axes, d of them; float32, bfloat16, float16 or float64.
      boxes: (K, 2 d) with `batch_indices`, or (N, K, 2 d), K boxes for each image; float32, bfloat16, float16 or
        float64, whatever x is. See `box_format`.
      output_sizes: P and Q, the bins of a box: one integer or one per spatial axis; 1 where not given, as in ONNX.
      batch_indices: (K,), integers from 0 to N - 1: the image of each box.
      spatial_scale: by which coordinates are multiplied: 1/16 for features of a 16th of the image's size.
      sampling_ratio: m, the samples of a bin along each axis.
      adaptive: m is as many as a bin has pixels, ⌈s / P⌉, at least 1 and at most `sampling_ratio`: sizes of arrays
        cannot depend on a box. Where bins have no more pixels than that, this is the adaptive sampling of others.
      mode: "average"; "max"; or "max_of_taps", the maximum of the four products of a pixel with its weight, not of
        their sum: this is what ONNX's reference and its runtime compute for "max".
      aligned: whether coordinates count from the edge of the first pixel: its centre is 1/2, so l = spatial_scale x1 -
        1/2. Without, l = spatial_scale x1, and s is at least 1.
      box_format: "xyxy", both corners; "xywh", the first corner and the size; "cxcywh", the centre and the size.
      order: "xy", coordinates along the last spatial axis first: (x1, y1, x2, y2); "ij", in the order of the axes.
      layout: the axes of x, and of the result with the boxes as its N, see `conv`.
      out_dtype: the result's dtype; None is that of x.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, (K, P, Q, C) for NHWC, or (N, K, P, Q, C). A box without extent is sampled at one place; one that ends before
      it begins, backwards; one that is outside of the image is 0. A box with a NaN, or of an image that is not there,
      is NaN, and sends no gradient to x.

    Differentiation: any order, in x and boxes. In boxes it is that of the samples' places, 0 where they are taken at
      the edge; m has none. Of equal maxima the first has the whole derivative.

    Numerics: places and weights in float32 (float64 if x or boxes are), each step rounded; products are added in it
      tap by tap, multiplied by 1 / the number of samples, and converted once. Determinism level "portable", gradients
      "mesh_invariant". A pixel of weight 0 is not read.

    Raises:
      ValueError: an option out of range, boxes or indices that do not fit. TypeError: a dtype that is not served.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> x, box = jnp.arange(16.0).reshape(1, 4, 4, 1), jnp.array([[[0.0, 0.0, 4.0, 2.0]]])
      >>> dnn.roi_align(x, box, output_sizes=(1, 2))[0, 0, :, :, 0].tolist()
      [[2.5, 4.5]]

    Sources: He et al., "Mask R-CNN", arXiv:1703.06870. Detectron2's ROIAlign has `aligned`; torchvision's roi_align has
      not unless asked, is adaptive without a bound unless asked, has the index as a fifth number of a box, and no
      gradient in boxes; adaptive, both give 0 for a box without extent. Of ONNX's RoiAlign "half_pixel" is `aligned`.
    """
    frame = frames.frame(layout)
    given = blending.array("x", x, determinism)
    plain = frame.array("x", given)
    checks.dtype("x", given, checks.FLOATS)
    axes, level = frame.layout, required(determinism)
    canonical = (axes.batch, *axes.spatial, axes.channel)
    plain = jnp.transpose(plain, canonical)
    images, *sizes, _ = plain.shape
    if min(sizes) < 1:
        raise ValueError(f"`x` must have at least one pixel along every spatial axis, got {tuple(sizes)}.")
    boxes, indices = _boxes(boxes, batch_indices, images, len(sizes))
    regions = _regions(sizes, output_sizes, spatial_scale, sampling_ratio, adaptive, mode, aligned, box_format, order)
    taps = math.prod(regions.bins) * (2 * regions.samples) ** len(sizes)
    pixels, read = math.prod(sizes) * (1 if indices is None else images), boxes.shape[-2] * taps
    if any(not export.is_symbolic_dim(n) and n > checks.LARGEST - 2 for n in (pixels, read)):
        raise ValueError(
            f"`x` and `boxes` must have fewer than 2^31 pixels and taps, got {checks.shown(tuple(given.shape))} and "
            f"{checks.shown(tuple(boxes.shape))}."
        )
    wide = blending.accumulator(plain.dtype)
    boxes = boxes.astype(max(wide, np.dtype(boxes.dtype), key=lambda dtype: dtype.itemsize))
    lead = ("n", "k") if indices is None else ("k",)
    bins = tuple(f"p{i}" for i in range(len(sizes)))
    axes_of = lambda *_: Factors(
        ((*lead, "e"), *(() if indices is None else (("k",),))), ((*lead, *bins, "t"),) * 2 + (lead,), lead
    )
    operands = (boxes,) if indices is None else (boxes, indices)
    index, weights, count = primitives.composed(ft.partial(regions.taps, images, level), axes_of, *operands)
    x = plain.astype(wide)
    x = x[:, None] if indices is None else x
    spec = SampleSpec(tuple(x.shape[len(lead) - 1 : -1]), engine, level)
    y = primitives.call("grid_sample", x, weights.astype(wide), index, spec=spec)
    y = _joined(y, count, regions, level)
    restored = lambda y: frame.restore(jnp.transpose(y, [int(axis) for axis in np.argsort(canonical)]))
    y = restored(y) if len(lead) == 1 else jax.vmap(restored)(y)
    out = blending.out_dtype(out_dtype, given)
    return blending.blend(y, alpha=1.0, beta=0.0, prior=None, out=out, level=level)


def _joined(y: Array, count: Array, regions: Regions, level: str) -> Array:
    """The bins, of sums over samples, or of samples along the last axis of bins."""
    if regions.mode == "average":
        count = count.astype(y.dtype).reshape(*count.shape, *[1] * (y.ndim - count.ndim))
        share = quotient(jnp.ones_like(count), count)
        return product(y, primitives.placed_like(jnp.broadcast_to(share, y.shape), y))
    each = y.reshape(*y.shape[:-2], regions.bins[-1], y.shape[-2] // regions.bins[-1], y.shape[-1])
    return reduce(each, op="max", axis=each.ndim - 2, determinism=level)


def _boxes(boxes: Any, indices: Any, images: int, d: int) -> tuple[Array, Array | None]:
    boxes = checks.array("boxes", boxes)
    checks.dtype("boxes", boxes, checks.FLOATS)
    if indices is None:
        if boxes.ndim != 3 or boxes.shape[0] != images or boxes.shape[2] != 2 * d:
            raise ValueError(
                f"`boxes` must have shape ({images}, K, {2 * d}), or (K, {2 * d}) with `batch_indices`, for {images} "
                f"images of {d} spatial axes, got {checks.shown(tuple(boxes.shape))}."
            )
        return rounded(boxes), None
    if boxes.ndim != 2 or boxes.shape[1] != 2 * d:
        raise ValueError(
            f"`boxes` must have shape (K, {2 * d}) with `batch_indices`, for images of {d} spatial axes, got "
            f"{checks.shown(tuple(boxes.shape))}."
        )
    indices = checks.array("batch_indices", indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"`batch_indices` must be integers, got {indices.dtype.name}.")
    checks.shape("batch_indices", indices, (boxes.shape[0],), "one for every box")
    return rounded(boxes), indices


@dataclasses.dataclass(frozen=True)
class Regions:
    """Which samples boxes in images of some sizes are made of, see `roi_align`."""

    sizes: tuple[int, ...]
    bins: tuple[int, ...]
    scale: float
    samples: int
    adaptive: bool
    mode: str
    aligned: bool
    box_format: str
    order: str

    def taps(self, images: Any, level: str, boxes: Array, indices: Array | None = None) -> tuple[Array, Array, Array]:
        """Of every bin the flat indices of its taps, -1 for none, and their weights; of every box how many samples."""
        boxes, d = at_edges(level, boxes), len(self.sizes)
        one = [1] * (2 * d)  # the axes of bins, then those of samples
        shape = (*boxes.shape[:-1], *self.bins, *[self.samples] * d)
        like = jnp.zeros(shape, boxes.dtype)
        spread = lambda v: trees.broadcast(v.reshape(*v.shape, *one), like, level)
        each, count, spare = [], jnp.ones(boxes.shape[:-1], boxes.dtype), jnp.zeros(shape, bool)
        for axis, (size, bins) in enumerate(zip(self.sizes, self.bins, strict=True)):
            low, length = self._extent(boxes, axis)
            m = jnp.full_like(length, self.samples)
            if self.adaptive:
                m = jnp.clip(jnp.ceil(quotient(length, jnp.full_like(length, bins))), 1, self.samples)
                m = lax.stop_gradient(jnp.where(jnp.isnan(m), jnp.ones_like(m), m))
            along = lambda i: lax.broadcasted_iota(boxes.dtype, shape, i + boxes.ndim - 1)
            every = jnp.broadcast_to(m.reshape(*m.shape, *one), shape)
            sample = along(d + axis)
            spare |= sample >= every
            place = along(axis) * every + jnp.minimum(sample, every - 1) + 0.5
            p = spread(low) + product(place, spread(quotient(length, m * bins)))
            index, weights = (jnp.stack(taps, -1) for taps in INSIDE.along(p, size))
            far = ((p < -1) | (p > size))[..., None]
            each.append((index, jnp.where(far, jnp.zeros_like(weights), weights)))
            count = count * m
        index, weights = across(each, self.sizes)
        if self.mode == "average":
            weights = jnp.where(spare[..., None], jnp.zeros_like(weights), weights)
        if indices is not None:
            indices = indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)
            there = ((indices >= 0) & (indices < images)).reshape(*indices.shape, *one, 1)
            start = jnp.where(there.reshape(indices.shape), indices, 0).astype(jnp.int32) * math.prod(self.sizes)
            index = jnp.where((index < 0) | ~there, -1, index + start.reshape(there.shape))
            weights = jnp.where(there, weights, jnp.full_like(weights, jnp.nan))
        taps = (math.prod(shape[-d:]) << d,) if self.mode == "average" else self._apart(shape)
        lead = shape[: boxes.ndim - 1 + d]
        shape = (*lead[: len(lead) + 1 - len(taps)], *taps)
        return index.reshape(shape), weights.reshape(shape), count

    def _apart(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The last axis of points where samples, or their taps, are points of their own; and the taps of each."""
        d = len(self.sizes)
        points = self.bins[-1] * math.prod(shape[-d:])
        return (points, 1 << d) if self.mode == "max" else (points << d, 1)

    def _extent(self, boxes: Array, axis: int) -> tuple[Array, Array]:
        """Where boxes begin along an axis, in pixels, and how long they are."""
        d = len(self.sizes)
        column = axis if self.order == "ij" else d - 1 - axis
        scale = jnp.full(boxes.shape[:-1], self.scale, boxes.dtype)
        one, two = product(boxes[..., column], scale), product(boxes[..., d + column], scale)
        low, length = (one, rounded(two - one)) if self.box_format == "xyxy" else (one, two)
        if self.box_format == "cxcywh":
            low = rounded(low - 0.5 * length)
        if self.aligned:
            return rounded(low - 0.5), length
        return low, jnp.where(length < 1, jnp.ones_like(length), length)


def _regions(
    sizes: Sequence[int],
    output_sizes: Any,
    spatial_scale: Any,
    sampling_ratio: Any,
    adaptive: Any,
    mode: Any,
    aligned: Any,
    box_format: Any,
    order: Any,
) -> Regions:
    bins = checks.integers("output_sizes", output_sizes, len(sizes), minimum=1)
    scale = checks.as_float("spatial_scale", spatial_scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"`spatial_scale` must be finite and above 0, got {scale!r}.")
    samples = checks.integer("sampling_ratio", sampling_ratio)
    if samples < 1:
        raise ValueError(
            f"`sampling_ratio` must be at least 1, got {samples}; for as many samples as bins have pixels give "
            "`adaptive=True` and here how many these are at most."
        )
    adaptive, aligned = checks.flag("adaptive", adaptive), checks.flag("aligned", aligned)
    checks.choice("mode", mode, MODES)
    checks.choice("box_format", box_format, BOX_FORMATS)
    checks.choice("order", order, ORDERS)
    return Regions(tuple(sizes), bins, scale, samples, adaptive, mode, aligned, box_format, order)
