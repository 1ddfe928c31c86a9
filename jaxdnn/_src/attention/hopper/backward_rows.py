"""The backward pass of attention on Hopper: of each query D = Σ dy y - dL, and its L in base 2.

A few lanes share a row: each loads a vector of 16 bytes of dy and of y, multiplies, adds the eight products pairwise,
((0+1)+(2+3))+..., and the lanes' sums are added by exchanges at distances from the largest to 1. So the order depends
on the number of features alone.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.attention.hopper.backward_plan import TILE, Problem
from jaxdnn._src.hopper import lanes
from jaxdnn._src.hopper.lanes import THREADS
from jaxdnn._src.hopper.launch import kernel
from jaxdnn._src.hopper.ptx import pairwise
from jaxdnn._src.hopper.sizes import ceil_div

LOG2_E = 1.4426950408889634
VECTOR = 8  # features of a lane


def sharing(p: Problem) -> int:
    """How many lanes share a row."""
    return 1 << (ceil_div(p.values, VECTOR) - 1).bit_length()


def run(dy: Array, y: Array, dlse: Array, lse: Array, problem: Problem) -> Array:
    """(heads of queries of all sequences, 2, tiles of queries times 64): minus L log2(e), and D.

    What stands behind the last query is not written. Of a row that saw nothing L is taken for 0.
    """
    p, many = problem, sharing(problem)
    rows, vectors, padded = p.batch * p.heads * p.queries, p.values // VECTOR, p.query_tiles * TILE

    def body(dy_ref: Any, y_ref: Any, dlse_ref: Any, lse_ref: Any, out: Any) -> None:
        number, lane = lanes.divided(lanes.numbers(lax.axis_index("block") * THREADS), many)
        row = lax.min(number, jnp.int32(rows - 1))
        loads = lane < vectors
        at = row * vectors + lane
        parts = [lanes.float32(lanes.load(ref, at, loads)) for ref in (dy_ref, y_ref)]
        products = lanes.product(*parts)
        total = pairwise(jnp.add, [lanes.element(products, i) for i in range(VECTOR)])
        total = lanes.over_lanes(total, many // 2)
        of_lse, of_dlse = (lanes.entries(ref, row) for ref in (lse_ref, dlse_ref))
        shown = lanes.product(of_lse, lanes.one(-LOG2_E, jnp.float32))
        shown = jnp.where(of_lse == -math.inf, 0.0, shown)
        head, query = _place(p, row)
        writes, place = (number < rows) & (lane == 0), head * (2 * padded) + query
        for i, value in enumerate((shown, total - of_dlse)):
            lanes.store(out, place, lanes.wide(value, 1), writes, i * padded)

    out = jax.ShapeDtypeStruct((p.batch * p.heads * 2 * padded, 1), jnp.float32)
    options: dict[str, Any] = {"grid": (ceil_div(rows * many, THREADS),), "grid_names": ("block",)}
    arrays = *(v.reshape(-1, VECTOR) for v in (dy, y)), *(v.reshape(-1) for v in (dlse, lse))
    found = kernel(body, out_type=(out,), kernel_name="attention_rows", **options)(*arrays)[0]
    return found.reshape(p.batch * p.heads, 2, padded)


def _place(p: Problem, row: Array) -> tuple[Array, Array]:
    """(head of all sequences, query) of a row in the call's layout."""
    if p.heads_first:
        return lanes.divided(row, p.queries)
    before, head = lanes.divided(row, p.heads)
    batch, query = lanes.divided(before, p.queries)
    return batch * p.heads + head, query
