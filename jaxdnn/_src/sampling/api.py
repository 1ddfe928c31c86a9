"""Sampling images at any points: `grid_sample`, the grids of affine maps, spatial transformers, warps by a flow.

Letters: N batch, C channels, [D,] H, W sizes of the image, [D',] H', W' of the grid, d how many of them.
"""

from __future__ import annotations

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jaxdnn._src.core import blending, checks, frames, primitives, trees
from jaxdnn._src.core.annotations import Scale
from jaxdnn._src.core.determinism import is_fixed, required
from jaxdnn._src.core.explain import public
from jaxdnn._src.core.partitioning import Factors
from jaxdnn._src.core.rounding import at_edges, product, real, rounded
from jaxdnn._src.sampling.primitive import SampleSpec
from jaxdnn._src.sampling.taps import COORDINATES, MODES, ORDERS, PADDINGS, Rule


@public
def grid_sample(
    x: ArrayLike,
    grid: ArrayLike,
    /,
    *,
    mode: str = "linear",
    padding: str = "zeros",
    align_corners: bool = False,
    coordinates: str = "normalised",
    order: str = "xy",
    cubic_coefficient: float = -0.75,
    layout: str = "NHWC",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Samples images at the points of a grid.

    s[n, m, c] = Σ_t w[n, m, t] x[n, t, c]     the weights of the pixels t near the point grid[n, m]
    y = alpha s + beta prior

    A coordinate g is the place p = ((g + 1) size - 1) / 2 in pixels, of which the first has its centre at 0; with
    `align_corners` p = (g + 1) / 2 (size - 1), so that -1 and 1 are the centres of the first and the last pixel.

    Args:
      x: (N, H, W, C) for layout NHWC; float32, bfloat16, float16, float64, int8 or uint8.
      grid: (N, H', W', d), or (1, H', W', d) for all images; d = 1 to 3 is the number of spatial axes of x. float32,
        bfloat16, float16 or float64, whatever x is: 16 bits do not tell the pixels of a wide image apart.
      mode: "nearest", the pixel nearest to p, of two the even one; "linear", which is bilinear over two axes and
        trilinear over three; "cubic", the four nearest pixels along each axis, weighted as in `resample`.
      padding: what stands outside of x: "zeros"; "border", its nearest pixel; "reflection", x mirrored about the
        centres of its outermost pixels with `align_corners`, and otherwise about their outer edges.
      align_corners: see above.
      coordinates: "normalised", as above, or "pixel", p = g.
      order: "xy", the coordinate along the last spatial axis comes first in grid; "ij", in the order of the axes.
      cubic_coefficient: that of "cubic", see `resample`.
      layout: the axes of x, prior and the result, see `conv`.
      alpha, beta, prior: the blend, see `conv`; prior has the result's shape.
      out_dtype: the result's dtype; None is that of x.
      engine: None, or the name of the engine that must serve the call.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      y, (N, H', W', C) for NHWC.

    Differentiation: any order, in x, grid, prior, and alpha and beta if they are arrays. In grid, "nearest" has the
      derivative 0; elsewhere that is one-sided where weights have kinks: at a pixel's centre from the side of larger
      coordinates, at and beyond the border for "border" 0, and at the first mirror of "reflection" 0. The gradient in x
      sorts and gathers: there is no scatter and no atomic addition.

    Numerics: coordinates and weights in float32 (float64 if x or grid is), each step rounded; products are added in it
      tap by tap, and the result is converted once. Determinism level "portable", gradients "mesh_invariant" (in a grid
      for all images, where a level is required). A pixel of weight 0 is not read: infinity and NaN do not spread. A NaN
      coordinate gives NaN (0 in integers) and sends no gradient to x; an infinite one is outside, for "reflection" NaN.

    Raises:
      ValueError: an option out of range, a grid that does not fit, an image without pixels. TypeError: a dtype that is
      not served. NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> x, grid = jnp.array([[[0.0], [8.0]]]), jnp.array([[[-0.5], [0.0], [0.25], [1.0]]])
      >>> dnn.grid_sample(x, grid, layout="NWC")[0, :, 0].tolist()
      [0.0, 4.0, 6.0, 4.0]

    Sources: cuDNN's cudnnSpatialTfSamplerForward and -Backward are "linear" with "zeros" and `align_corners`. PyTorch's
      grid_sample and ONNX's GridSample have these names; there a NaN in a pixel of weight 0 spreads, and PyTorch's
      grid has the dtype of x, and what it makes of NaN and infinity in it (NaN, 0 or a pixel) differs by mode and
      padding. `jax.scipy.ndimage.map_coordinates` is "pixel" and "ij", with coordinates on the first
      axis; of order 0 it rounds half away from zero. Jaderberg et al., arXiv:1506.02025; Keys (1981) for "cubic".
    """
    frame = frames.frame(layout)
    given = blending.array("x", x, determinism)
    plain = frame.array("x", given)
    checks.dtype("x", given, (*checks.FLOATS, jnp.int8, jnp.uint8))
    axes = frame.layout
    sizes = tuple(plain.shape[axis] for axis in axes.spatial)
    grid = _grid(grid, plain.shape[axes.batch], sizes)
    rule = _rule(mode, padding, align_corners, coordinates, order, cubic_coefficient)
    wide = blending.accumulator(given.dtype)
    wide = wide if jnp.issubdtype(wide, jnp.floating) else np.dtype(np.float32)
    places = grid.astype(max(wide, np.dtype(grid.dtype), key=lambda dtype: dtype.itemsize))
    out = blending.out_dtype(out_dtype, given)
    # An image in 16 bits is read, and a result in 16 bits written, by the primitive: neither lies in memory in 32 bits.
    dtypes = [dtype if dtype in map(np.dtype, checks.FLOATS) else wide for dtype in (given.dtype, out)]
    dtypes[1] = dtypes[1] if blending.is_plain(alpha, beta) and prior is None else wide
    spec = SampleSpec(sizes, engine, required(determinism), rule, *dtypes)
    every = jax.ShapeDtypeStruct((plain.shape[axes.batch], *grid.shape[1:]), places.dtype)
    canonical = (axes.batch, *axes.spatial, axes.channel)
    operands = real(jnp.transpose(plain, canonical), dtypes[0]), _for_all(places, every, spec.level)
    y = primitives.call("grid_sample_at", *operands, spec=spec)
    y = jnp.transpose(y, [int(axis) for axis in np.argsort(canonical)])
    blend = {"alpha": alpha, "beta": beta, "prior": prior}
    return blending.blend(frame.restore(y), **blend, out=out, dtypes=(given.dtype,), level=spec.level)


def _grid(value: Any, images: Any, sizes: tuple[int, ...], name: str = "grid") -> Array:
    grid, d = checks.array(name, value), len(sizes)
    checks.dtype(name, grid, checks.FLOATS)
    if grid.ndim != d + 2 or grid.shape[-1] != d or (grid.shape[0] != 1 and grid.shape[0] != images):
        raise ValueError(
            f"`{name}` must have {d + 2} axes, the first of size {images} or 1 and the last of size {d}, for images of "
            f"{d} spatial axes, got shape {checks.shown(tuple(grid.shape))}."
        )
    if min(sizes) < 1:
        raise ValueError(f"`x` must have at least one pixel along every spatial axis, got {sizes}.")
    if max(math.prod(sizes), math.prod(grid.shape[1:-1]) * 4**d) > checks.LARGEST - 2:
        raise ValueError(
            f"`x` and `{name}` must have fewer than 2^31 pixels and taps an image, got {sizes} and "
            f"{checks.shown(tuple(grid.shape[1:-1]))}."
        )
    return jnp.asarray(grid)


def _for_all(grid: Array, every: Any, level: str) -> Array:
    """A grid for all images, whose gradient is added up in a fixed order where the level asks for one."""
    if grid.shape == every.shape:
        return grid
    return trees.broadcast(grid, jnp.zeros(every.shape, every.dtype), level)


def _rule(mode: Any, padding: Any, align_corners: Any, coordinates: Any, order: Any, cubic: Any) -> Rule:
    checks.choice("mode", mode, MODES)
    checks.choice("padding", padding, PADDINGS)
    checks.choice("coordinates", coordinates, COORDINATES)
    checks.choice("order", order, ORDERS)
    cubic = checks.as_float("cubic_coefficient", cubic)
    if not math.isfinite(cubic):
        raise ValueError(f"`cubic_coefficient` must be finite, got {cubic!r}.")
    return Rule(mode, padding, checks.flag("align_corners", align_corners), coordinates, order, cubic)


@public
def affine_grid(
    theta: ArrayLike,
    sizes: Sequence[int],
    /,
    *,
    align_corners: bool = False,
    determinism: str | None = None,
) -> Array:
    """The points to which affine maps take the pixels of an image.

    grid[n, i, j] = theta[n] (x_j, y_i, 1), and theta[n] (x_k, y_j, z_i, 1) for three sizes

    with x_j = (2 j + 1) / W - 1, or 2 j / (W - 1) - 1 with `align_corners` (0 where W is 1), and so for y and z.

    Args:
      theta: (N, d, d + 1); float32, bfloat16, float16 or float64.
      sizes: those of the grid, d of them, in the order of the image's axes: (H, W).
      align_corners: as it will be given to `grid_sample`.
      determinism: a level that must be guaranteed, as within `jaxdnn.determinism`.

    Returns:
      grid, (N, H, W, d) of theta's dtype; x first, as `grid_sample` takes it.

    Differentiation: any order, in theta.

    Numerics: coordinates are rounded to float32 (float64 for float64), each product and each sum is rounded in it, from
      the left, and the result is converted once: determinism level "portable". The gradient adds over the points: in
      XLA's order, run_to_run, or where a level that fixes bits is required on a tree, mesh_invariant. A grid in 16 bits
      does not tell the pixels of a wide image apart: give theta in float32.

    Raises:
      ValueError: a theta or sizes that do not fit. TypeError: a dtype that is not served.

    Example:
      >>> dnn.affine_grid(jnp.array([[[2.0, 0.5]]]), (2,))[0, :, 0].tolist()
      [-0.5, 1.5]

    Sources: cuDNN's cudnnSpatialTfGridGeneratorForward and -Backward have `align_corners`; PyTorch's affine_grid and
      ONNX's AffineGrid; Jaderberg et al., arXiv:1506.02025.
    """
    theta = checks.array("theta", theta)
    checks.dtype("theta", theta, checks.FLOATS)
    d = theta.shape[1] if theta.ndim == 3 else 0
    if d not in (1, 2, 3) or theta.shape[2] != d + 1:
        hint = checks.unbatched("theta", theta.ndim, 3)
        raise ValueError(
            f"`theta` must have shape (N, d, d + 1) with d from 1 to 3, got {checks.shown(theta.shape)}{hint}."
        )
    after = checks.integers("sizes", sizes, d, minimum=0)
    checks.countable("`affine_grid`", (theta.shape[0], *after, d))
    align_corners = checks.flag("align_corners", align_corners)
    level, wide = required(determinism), blending.accumulator(theta.dtype)
    centres = [_centres(n, align_corners).astype(wide) for n in after][::-1]

    def run(theta: Array) -> Array:
        shape = (theta.shape[0], *after, d)
        like = jnp.zeros(shape, wide)
        # theta[n, :, j] at every point; a coordinate at every point, of the last axis first.
        columns = [trees.broadcast(theta[:, :, j].reshape(-1, *[1] * d, d), like, level) for j in range(d + 1)]
        terms = [
            product(column, jnp.broadcast_to(c.reshape(-1, *[1] * (axis + 1)), shape))
            for axis, (column, c) in enumerate(zip(columns[:-1], centres, strict=True))
        ]
        return ft.reduce(jnp.add, [*terms, columns[-1]])

    def product_of_matrices(theta: Array) -> Array:
        along = [jnp.broadcast_to(c.reshape(-1, *[1] * axis), after) for axis, c in enumerate(centres)]
        points = jnp.stack([*along, jnp.ones(after, wide)], -1)
        return jnp.einsum("nij,...j->n...i", theta, points, precision=lax.Precision.HIGHEST)

    factors = lambda theta: Factors((("n", "i", "j"),), (("n", *(f"m{i}" for i in range(d)), "i"),), ("n",))

    def at_points(function: Callable[[Array], Array], edge: Callable[[Array], Array], theta: Array) -> Array:
        grid = primitives.composed(function, factors, edge(theta).astype(wide))
        return edge(blending.convert(grid, theta.dtype))

    found = ft.partial(at_points, run, rounded)
    if not is_fixed(level):
        tangent = ft.partial(at_points, product_of_matrices, lambda v: v)
        found = jax.custom_jvp(found)
        found.defjvp(lambda given, along: (found(*given), tangent(*along)))
    return found(jnp.asarray(theta))


def _centres(n: int, align_corners: bool) -> np.ndarray:
    """The normalised coordinates of n pixels' centres, in float64."""
    if align_corners:
        return np.linspace(-1, 1, n) if n != 1 else np.zeros(1)
    return (2 * np.arange(n) + 1) / max(n, 1) - 1


@public
def spatial_transformer(
    x: ArrayLike,
    theta: ArrayLike,
    /,
    *,
    sizes: Sequence[int] | None = None,
    mode: str = "linear",
    padding: str = "zeros",
    align_corners: bool = True,
    cubic_coefficient: float = -0.75,
    layout: str = "NHWC",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Samples images at the points to which affine maps take the pixels of the result: a spatial transformer.

    y = grid_sample(x, affine_grid(theta, sizes))

    With the defaults this is cuDNN's: "linear", "zeros" and `align_corners`, of which the last is not the default of
    `grid_sample` and `affine_grid`. So theta = ((1, 0, 0), (0, 1, 0)) is the identity, ((s, 0, 0), (0, s, 0)) with
    s < 1 magnifies about the centre, and the last column moves by half the distance between the outermost pixels.

    Args:
      x: (N, H, W, C) for layout NHWC; one to three spatial axes, d of them; the dtypes of `grid_sample`.
      theta: (N, d, d + 1), or (1, d, d + 1) for all images; x first, as for `affine_grid`; float32, bfloat16, float16
        or float64, whatever x is.
      sizes: the spatial sizes of the result, (H', W'); None is those of x.
      align_corners: of both steps.
      mode, padding, cubic_coefficient, layout, alpha, beta, prior, out_dtype, engine, determinism: see `grid_sample`.

    Returns:
      y, (N, H', W', C) for NHWC.

    Differentiation: any order, in x, theta, prior, and alpha and beta if they are arrays; as `grid_sample` and
      `affine_grid` say.

    Numerics: as theirs; the grid stays in float32 (float64 if theta is), also of a theta in 16 bits. Determinism level
      "portable", gradients "mesh_invariant", but that in theta "run_to_run" if no level is required.

    Raises:
      ValueError: an option out of range, a theta or sizes that do not fit. TypeError: a dtype that is not served.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> x, flip = jnp.array([[[0.0], [1.0], [4.0]]]), jnp.array([[[-1.0, 0.0]]])
      >>> dnn.spatial_transformer(x, flip, sizes=(5,), layout="NWC")[0, :, 0].tolist()
      [4.0, 2.5, 1.0, 0.5, 0.0]

    Sources: cuDNN's cudnnSpatialTfGridGeneratorForward followed by cudnnSpatialTfSamplerForward, over two spatial axes;
      Jaderberg et al., arXiv:1506.02025.
    """
    plain, axes = _images(x, layout)
    of_x = tuple(plain.shape[axis] for axis in axes.spatial)
    images, d = plain.shape[axes.batch], len(of_x)
    theta = checks.array("theta", theta)
    checks.dtype("theta", theta, checks.FLOATS)
    if theta.ndim != 3 or theta.shape[1:] != (d, d + 1) or (theta.shape[0] != 1 and theta.shape[0] != images):
        raise ValueError(
            f"`theta` must have shape ({images}, {d}, {d + 1}) or (1, {d}, {d + 1}) for images of {d} spatial axes, "
            f"got {checks.shown(tuple(theta.shape))}."
        )
    after = of_x if sizes is None else checks.integers("sizes", sizes, d, minimum=0)
    theta = at_edges(required(determinism), theta).astype(blending.accumulator(theta.dtype))
    grid = affine_grid(theta, after, align_corners=align_corners, determinism=determinism)
    return grid_sample(
        x,
        grid,
        mode=mode,
        padding=padding,
        align_corners=align_corners,
        cubic_coefficient=cubic_coefficient,
        layout=layout,
        alpha=alpha,
        beta=beta,
        prior=prior,
        out_dtype=out_dtype,
        engine=engine,
        determinism=determinism,
    )


@public
def warp(
    x: ArrayLike,
    flow: ArrayLike,
    /,
    *,
    mode: str = "linear",
    padding: str = "zeros",
    align_corners: bool = False,
    order: str = "xy",
    cubic_coefficient: float = -0.75,
    layout: str = "NHWC",
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    prior: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    engine: str | None = None,
    determinism: str | None = None,
) -> Array:
    """Samples images at the pixels that a flow points to.

    y[n, i, j] = x[n] at the place (i + v, j + u) in pixels        with (u, v) = flow[n, i, j]

    The flow from a first image to a second one says where the first one's pixels are in the second. So
    `warp(second, flow)` is the first image, where the second one shows the same.

    Args:
      x: (N, H, W, C) for layout NHWC; one to three spatial axes, d of them; the dtypes of `grid_sample`.
      flow: (N, H', W', d), or (1, H', W', d) for all images, in pixels and not normalised: displacements of the pixels
        of the result, (u, v) along (W, H). float32, bfloat16, float16 or float64, whatever x is. A flow with its
        components on the second axis is to be transposed: `jnp.moveaxis(flow, 1, -1)`.
      align_corners: of "reflection", where x is mirrored; places are in pixels and do not depend on it.
      order: "xy", (u, v) as above; "ij", (v, u), in the order of the axes.
      mode, padding, cubic_coefficient, layout, alpha, beta, prior, out_dtype, engine, determinism: see `grid_sample`.

    Returns:
      y, (N, H', W', C) for NHWC.

    Differentiation: any order, in x, flow, prior, and alpha and beta if they are arrays; in flow as `grid_sample` in
      grid.

    Numerics: a place is rounded to float32 (float64 if x or flow is), also of a flow in 16 bits; no place is
      normalised and brought back. The rest is that of `grid_sample`: level "portable", gradients "mesh_invariant". A
      displacement of NaN gives NaN and sends no gradient to x.

    Raises:
      ValueError: an option out of range, a flow that does not fit. TypeError: a dtype that is not served.
      NotImplementedError: no engine serves the call at the required determinism level.

    Example:
      >>> x, flow = jnp.array([[[1.0], [2.0], [4.0]]]), jnp.array([[[0.0], [0.5], [1.0]]])
      >>> dnn.warp(x, flow, layout="NWC")[0, :, 0].tolist()
      [1.0, 3.0, 0.0]

    Sources: PyTorch has no such op: its users add the flow to a mesh of pixels and normalise for `grid_sample`, by
      (size - 1) / 2, which is right with `align_corners` only, as RAFT (Teed and Deng, arXiv:2003.12039) has it.
    """
    plain, axes = _images(x, layout)
    sizes = tuple(plain.shape[axis] for axis in axes.spatial)
    flow = rounded(_grid(flow, plain.shape[axes.batch], sizes, "flow"))
    checks.choice("order", order, ORDERS)
    flow = flow.astype(np.float64 if np.float64 in (plain.dtype, flow.dtype) else np.float32)
    places = range(len(sizes)) if order == "ij" else range(len(sizes))[::-1]
    here = jnp.stack([lax.broadcasted_iota(flow.dtype, (1, *flow.shape[1:-1]), axis + 1) for axis in places], -1)
    return grid_sample(
        x,
        flow + primitives.placed_like(jnp.broadcast_to(here, flow.shape), flow),
        mode=mode,
        padding=padding,
        align_corners=align_corners,
        coordinates="pixel",
        order=order,
        cubic_coefficient=cubic_coefficient,
        layout=layout,
        alpha=alpha,
        beta=beta,
        prior=prior,
        out_dtype=out_dtype,
        engine=engine,
        determinism=determinism,
    )


def _images(x: Any, layout: Any) -> tuple[Array, Any]:
    """x without vectors of channels, and which axis is which."""
    frame = frames.frame(layout)
    return frame.array("x", blending.array("x", x)), frame.layout
