"""Adds the partial sums of depthwise and narrow-group filter gradients, one after another.

One thread adds an element of the result. The partial sums are few and small, and still in the L2 cache from the
previous launch: the elements are distributed over many blocks, and the loads do not wait for the sums.
"""

import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.conv.hopper.depthwise.launch import grid
from jaxdnn._src.hopper import lanes
from jaxdnn._src.hopper.lanes import THREADS
from jaxdnn._src.hopper.launch import kernel
from jaxdnn._src.hopper.sizes import ceil_div

AHEAD = 32  # loads in flight at a time, each with a register


def add_partials(partial: Array, rows: int, width: int, dtype: Any, sms: int | None) -> Array:
    """Adds partial sums (splits, parts, r, s * group, c), one after another, and rounds to (rows, width).

    A row of the result is the beginning of a row of s * group * c elements.
    """
    splits, parts, *rest = partial.shape
    many, size, pitch, count = splits * parts, math.prod(rest), math.prod(rest[1:]), rows * width
    (blocks,) = grid(ceil_div(count, THREADS), sms)

    def body(terms: Any, out: Any) -> None:
        first = lanes.numbers(lax.axis_index("block") * THREADS)

        def turn(number: Any, _: Any) -> None:
            index = first + number * (blocks * THREADS)
            at = lax.min(index, jnp.int32(count - 1))
            row, column = lanes.divided(at, width)
            place = row * pitch + column

            def added(group: Any, total: Array, some: int = AHEAD) -> Array:
                start = place + group * (AHEAD * size)
                return ft.reduce(jnp.add, [lanes.entries(terms, start, i * size) for i in range(some)], total)

            total = lax.fori_loop(0, many // AHEAD, added, lanes.one(-0.0, jnp.float32))
            total = added(many // AHEAD, total, many % AHEAD)
            lanes.store(out, at, lanes.wide(total, 1).astype(dtype), index < count)

        lax.fori_loop(0, ceil_div(count, blocks * THREADS), turn, None)

    out = jax.ShapeDtypeStruct((count, 1), dtype)
    options: dict[str, Any] = {"grid": (blocks,), "grid_names": ("block",), "kernel_name": "depthwise_add_partials"}
    return kernel(body, out_type=(out,), **options)(partial.reshape(-1))[0].reshape(rows, width)
