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
    branches.record(
        "sampling slopes",
        operands=k.x,
        axes=k.axes,
        padding=k.rule.padding,
        threads="one" if gather_ptx.lanes(k) == 1 else "several",
        taps_together=gather_ptx.together(k),
    )
    threads = k.images * k.points * gather_ptx.lanes(k)
    shape = (k.images, k.points, k.axes)
    return _launch(gather_ptx.slopes(k), threads, (x, y, grid), "grid_sample_slopes", (shape, F32))


def pixels(y: Array, grid: Array, k: Problem, dtype: Any) -> Array:
    """The gradient in images, (N, pixels, C)."""
    branches.record(
        "sampling pixels",
        operands=k.y,
        axes=k.axes,
        mode=k.rule.mode,
        padding=k.rule.padding,
        threads="one" if k.units == 1 else "several",
        records="samples" if lists_ptx.samples_in_records(k) else "numbers",
        records_made="before the sort" if lists_ptx.made_first(k) else "behind it",
        keys="16 bits" if lists_ptx.narrow(k) else "32 bits",
        bits_left=lists_ptx.left(k) > 0,
        sums_in_memory=lists_ptx.levels(k) > lists_ptx.LEVELS,
    )
    entries, shape = k.images * k.points, (k.images, k.pixels, k.channels)
    first = lists_ptx.made_first(k)
    digits = jnp.uint16 if lists_ptx.narrow(k) else U32
    outs = [((entries,), digits), ((entries,), U32), *([((entries, 4), U32)] if first else [])]
    given = (y, grid) if first else (grid,)
    key, order, *records = _launch(lists_ptx.keys(k), entries, given, "grid_sample_keys", *outs)
    key, order = lax.sort((key, order), num_keys=1, is_stable=True)
    source, outs = (records or [grid])[0], (((k.keys + 1,), U32), ((entries, 4), U32))
    if lists_ptx.left(k):
        count = lists_ptx.groups(k) + 1
        begins = _launch(lists_ptx.begins(k), entries + 1, (key,), "grid_sample_begins", ((count,), U32))
        arrays = begins, order, source
        found = _launch(lists_ptx.buckets(k), 32 * count, arrays, "grid_sample_buckets", *outs)
    else:
        found = _launch(lists_ptx.cells(k), entries + 1, (key, order, source), "grid_sample_cells", *outs)
    threads = k.images * k.pixels * k.units
    return _launch(lists_ptx.pixels(k), threads, (y, *found), "grid_sample_pixels", (shape, dtype))
