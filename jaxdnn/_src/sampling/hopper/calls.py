"""Launches the kernels of sampling: the points of a grid, and for the gradient in images XLA's sort before them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.launch import launch
from jaxdnn._src.sampling.hopper import gather_ptx, lists_ptx
from jaxdnn._src.sampling.hopper.points_ptx import THREADS, Problem

F32, U32 = jnp.float32, jnp.uint32


def _launch(code: str, threads: int, arrays: Any, name: str, *outs: tuple[tuple[int, ...], Any]) -> Any:
    """The results, of these shapes and dtypes."""
    types = [jax.ShapeDtypeStruct(*out) for out in outs]
    found = launch(code, arrays, types, name=name, blocks=-(-threads // THREADS))
    return found if len(outs) > 1 else found[0]


def samples(x: Array, grid: Array, k: Problem, dtype: Any) -> Array:
    """Of images (N, pixels, C) at points (N, points, d)."""
    branches.record(
        "sampling",
        operands=k.x,
        axes=k.axes,
        mode=k.rule.mode,
        padding=k.rule.padding,
        threads="one" if gather_ptx.sharing(k) == 1 else "several",
        taps_together=gather_ptx.together(k),
    )
    threads = k.images * k.points * gather_ptx.sharing(k)
    shape = (k.images, k.points, k.channels)
    return _launch(gather_ptx.samples(k), threads, (x, grid), "grid_sample", (shape, dtype))


def slopes(x: Array, y: Array, grid: Array, k: Problem) -> Array:
    """The gradient in the grid, (N, points, d)."""
    threads = k.images * k.points * gather_ptx.lanes(k)
    shape = (k.images, k.points, k.axes)
    return _launch(gather_ptx.slopes(k), threads, (x, y, grid), "grid_sample_slopes", (shape, F32))


def pixels(y: Array, grid: Array, k: Problem, dtype: Any) -> Array:
    """The gradient in images, (N, pixels, C)."""
    entries, shape = k.images * k.points, (k.images, k.pixels, k.channels)
    every = (entries,), U32
    key, order = _launch(lists_ptx.keys(k), entries, (grid,), "grid_sample_keys", every, every)
    digits = jnp.uint16 if k.keys < 2**16 else U32  # a radix sort's time is that of its keys' bytes
    key, order = lax.sort((key.astype(digits), order), num_keys=1, is_stable=True)
    outs = ((k.keys + 1,), U32), ((entries, 4), U32)
    found = _launch(lists_ptx.cells(k), entries + 1, (key.astype(U32), order, y, grid), "grid_sample_cells", *outs)
    threads = k.images * k.pixels * k.units
    return _launch(lists_ptx.pixels(k), threads, (y, *found), "grid_sample_pixels", (shape, dtype))
