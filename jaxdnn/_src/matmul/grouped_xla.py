"""The engines of grouped products that XLA compiles: `xla`, and `ordered` with the definition's order of additions.

`xla` cuts the rows of each group into tiles of one height, at most one of which of each group is not full, and
multiplies tile by tile in a loop whose length does not depend on the sizes of the groups. JAX's `lax.ragged_dot` does
not serve: on CPUs it multiplies all rows by the matrices of all groups, in as many times the time and memory, and adds
the products up, so that an infinity in a group's matrix makes NaN of the rows of every other group.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdnn._src.conv import primitive as convolution
from jaxdnn._src.conv.geometry import Products
from jaxdnn._src.conv.xla import engine as xla
from jaxdnn._src.conv.xla import ordered
from jaxdnn._src.conv.xla.problem import Problem
from jaxdnn._src.core import engines, selection
from jaxdnn._src.core.blending import convert
from jaxdnn._src.matmul.grouped_primitive import PRODUCT, WGRAD, GroupedSpec, group_ends, result_shape

# The least and the greatest height of a tile. Between them it is a fraction of a group's mean number of rows, for the
# tiles that are not full cost as much as full ones.
SHORTEST, TALLEST, TILES_OF_GROUP = 16, 256, 4
Form = Callable[..., Array]


class Tiles(NamedTuple):
    """Of each tile its group, its first row, the row that follows its last, and the row where `height` rows begin."""

    group: Array
    start: Array
    end: Array
    read: Array


def run(call: engines.Call, a: Array, b: Array, sizes: Array) -> Array:
    """The sums of tiles, multiplied in types that hold the operands exactly, converted once."""
    spec: GroupedSpec = call.spec
    if 0 in (*a.shape, *b.shape, *sizes.shape):
        return jnp.zeros(result_shape(call.op, spec, a, b, sizes), spec.out_dtype)
    a, b, preferred = xla.compute_types(call, a, b)
    if spec.precision == "tf32" and call.platform != "cuda":
        a, b = xla.truncate_to_tf32(a), xla.truncate_to_tf32(b)
    if call.op == WGRAD:  # the products of several tiles are added
        preferred = convolution.wider(preferred, spec.accumulate) if preferred != jnp.int32 else preferred
    uncut = a.dtype in (jnp.float32, jnp.float64) and spec.precision != "tf32"
    precision = lax.Precision.HIGHEST if uncut else lax.Precision.DEFAULT
    pixel = Products((1,), (1,), (1,), ((0, 0),), (1,))
    problem = Problem(pixel, precision, preferred, call.platform == "cuda")
    form = ft.partial(_product_of_tiles, problem.dot, spec.transpose_b) if call.op == PRODUCT else None
    acc = _mapped(form or ft.partial(_sums_of_tiles, problem.dot, preferred), a, b, sizes)
    if call.platform == "cuda" and xla.becomes_float8(spec):
        acc = lax.optimization_barrier(acc)  # else XLA may fuse the conversion, and saturates instead of NaN
    return convert(acc, spec.out_dtype)


def _mapped(form: Form, a: Array, b: Array, sizes: Array) -> Array:
    """The form over all leading axes."""
    for _ in range(a.ndim - 2):
        form = jax.vmap(form)
    return form(a, b, sizes)


# ---- tile by tile ----------------------------------------------------------------------------------------------------


def height_of_tiles(rows: int, groups: int) -> int:
    """A power of two, if there are so many rows."""
    mean = max(rows // (TILES_OF_GROUP * groups), 1)
    return min(rows, max(SHORTEST, min(TALLEST, 1 << (mean.bit_length() - 1))))


def _tiles(sizes: Array, rows: int) -> tuple[int, Array, Tiles]:
    """The tiles' height; the number of the first tile of each group; and the tiles, at the end some of no rows."""
    groups = sizes.shape[0]
    height = height_of_tiles(rows, groups)
    starts, ends = group_ends(sizes, rows)
    last = jnp.cumsum((ends - starts + height - 1) // height, dtype=sizes.dtype)
    first = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])
    number = jnp.arange((rows + groups * (height - 1)) // height, dtype=sizes.dtype)
    group = jnp.minimum(_groups_before(last, number), groups - 1)
    start = starts[group] + (number - first[group]) * height
    end = jnp.minimum(start + height, ends[group])
    return height, first, Tiles(group, start, end, jnp.clip(start, 0, rows - height))


def _groups_before(ends: Array, place: Array) -> Array:
    """How many groups end at a place or before it, for each of the places."""
    return jnp.sum(ends[None] <= place[:, None], 1, dtype=ends.dtype)


def _groups_of_rows(sizes: Array, rows: int) -> tuple[Array, Array]:
    """Of each row its group, and whether it has one."""
    _, ends = group_ends(sizes, rows)
    found = _groups_before(ends, jnp.arange(rows, dtype=sizes.dtype))
    return jnp.minimum(found, sizes.shape[0] - 1), found < sizes.shape[0]


def _product_of_tiles(dot: Any, transpose_b: bool, a: Array, b: Array, sizes: Array) -> Array:
    """Each row of the result is taken from its tile. What else the tile has read is in its other rows."""
    rows = a.shape[0]
    height, first, tiles = _tiles(sizes, rows)

    def multiply(tile: Tiles) -> Array:
        left = lax.dynamic_slice_in_dim(a, tile.read, height)
        right = lax.dynamic_index_in_dim(b, tile.group, keepdims=False)
        return dot(left, right, ((1,), (1 if transpose_b else 0,)))

    products = lax.map(multiply, tiles)
    group, has_group = _groups_of_rows(sizes, rows)
    row = jnp.arange(rows, dtype=sizes.dtype)
    number = jnp.minimum(first[group] + (row - group_ends(sizes, rows)[0][group]) // height, len(products) - 1)
    found = products.at[number, row - tiles.read[number]].get(mode="clip")
    return jnp.where(has_group[:, None], found, jnp.zeros_like(found))


def _sums_of_tiles(dot: Any, dtype: Any, a: Array, dy: Array, sizes: Array) -> Array:
    """The products of the tiles of a group are added in their order. Rows that a tile does not have count nothing."""
    rows = a.shape[0]
    height, _, tiles = _tiles(sizes, rows)

    def add(total: Array, tile: Tiles) -> tuple[Array, None]:
        row = tile.read + jnp.arange(height, dtype=sizes.dtype)
        own = ((row >= tile.start) & (row < tile.end))[:, None]
        parts = (lax.dynamic_slice_in_dim(v, tile.read, height) for v in (a, dy))
        left, right = (jnp.where(own, part, jnp.zeros_like(part)) for part in parts)
        found = lax.dynamic_index_in_dim(total, tile.group, keepdims=False) + dot(left, right, ((0,), (0,)))
        return lax.dynamic_update_index_in_dim(total, found, tile.group, 0), None

    zero = jnp.zeros((sizes.shape[0], a.shape[1], dy.shape[1]), dtype)
    return lax.scan(add, zero, tiles)[0]


# ---- in the definition's order ---------------------------------------------------------------------------------------


def run_ordered(call: engines.Call, a: Array, b: Array, sizes: Array) -> Array:
    """acc = fma(a, b, acc) in float32, over the columns of a, or over the rows."""
    spec: GroupedSpec = call.spec
    if 0 in (*a.shape, *b.shape, *sizes.shape):
        return jnp.zeros(result_shape(call.op, spec, a, b, sizes), spec.out_dtype)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    if spec.precision == "tf32":
        a, b = xla.truncate_to_tf32(a), xla.truncate_to_tf32(b)
    add = ordered.addition(call)
    form = ft.partial(_ordered_product, add, spec.transpose_b) if call.op == PRODUCT else ft.partial(_ordered_sums, add)
    return convert(_mapped(form, a, b, sizes), spec.out_dtype)


def _ordered_product(add: ordered.Add, transpose_b: bool, a: Array, b: Array, sizes: Array) -> Array:
    group, has_group = _groups_of_rows(sizes, a.shape[0])

    def body(k: Array, acc: Array) -> Array:
        of_groups = lax.dynamic_index_in_dim(b, k, 2 if transpose_b else 1, keepdims=False)
        return add(lax.dynamic_slice_in_dim(a, k, 1, 1), of_groups[group], acc)

    found = lax.fori_loop(0, a.shape[1], body, ordered.zeros((a.shape[0], b.shape[1 if transpose_b else 2])))
    return jnp.where(has_group[:, None], found, jnp.zeros_like(found))


def _ordered_sums(add: ordered.Add, a: Array, dy: Array, sizes: Array) -> Array:
    group, has_group = _groups_of_rows(sizes, a.shape[0])

    def body(m: Array, total: Array) -> Array:
        acc = lax.dynamic_index_in_dim(total, group[m], keepdims=False)
        found = jnp.where(has_group[m], add(a[m][:, None], dy[m][None], acc), acc)
        return lax.dynamic_update_index_in_dim(total, found, group[m], 0)

    return lax.fori_loop(0, a.shape[0], body, ordered.zeros((sizes.shape[0], a.shape[1], dy.shape[1])))


# ---- what the engines guarantee --------------------------------------------------------------------------------------


def _level(call: engines.Call) -> str:
    return "portable" if call.avals[0].dtype == jnp.int8 else engines.level_of_products(call)


def _accumulation(call: engines.Call) -> str:
    spec: GroupedSpec = call.spec
    return "tensor_core" if spec.accumulate == jnp.float32 and call.platform == "cuda" else spec.accumulate.name


engines.declare(
    "xla",
    PRODUCT,
    WGRAD,
    run=run,
    needs_sizes=lambda call: True,
    level=_level,
    accumulation=_accumulation,
    partition=lambda call: True,
    hazards=lambda call: ("flushes_subnormals",) if call.avals[0].dtype != jnp.int8 else (),
    notes=("a loop over tiles of rows, of which each group may have one that is not full",),
)
engines.declare(
    "ordered",
    PRODUCT,
    WGRAD,
    run=run_ordered,
    supports=ordered.supports,
    needs_sizes=lambda call: True,
    level=lambda call: "portable",
    rank=lambda call: selection.LAST,
    partition=lambda call: True,
    adds_in_order=True,
    notes=("one pass over the result per product: slow",),
)
