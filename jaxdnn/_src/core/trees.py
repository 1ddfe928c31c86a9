"""Sums in a fixed order: trees that depend on the number of elements alone, and a broadcast whose transpose is one."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, reshard

from jaxdnn._src.core.determinism import is_fixed
from jaxdnn._src.core.partitioning import broadcast_to


def tree(combine: Callable[[Array, Array], Array], x: Array, axis: int) -> Array:
    """Joins the elements along an axis in a tree that depends on their number alone; the axis keeps length 1.

    Of n elements the last ⌊n / 2⌋ are joined to the first ⌊n / 2⌋, element by element; of an odd number the middle one
    passes on; and so on until one is left.
    """
    while (n := x.shape[axis]) > 1:
        pairs, rest = n // 2, n - n // 2
        joined = combine(
            lax.slice_in_dim(x, 0, pairs, axis=axis),
            lax.slice_in_dim(x, rest, n, axis=axis),
        )
        x = joined if n % 2 == 0 else lax.concatenate([joined, lax.slice_in_dim(x, pairs, rest, axis=axis)], axis)
    return x


LEVELS_A_PASS = 3


def halves(x: Array, axes: Sequence[int]) -> Array:
    """The sum along `axes`, which are kept with length 1, on a tree that depends on their lengths alone.

    The elements, in row-major order of these axes, are padded with zeros to a power of two; then the second half is
    added to the first until one element is left. Every third step is a pass over memory.
    """
    axes = tuple(sorted(axis % x.ndim for axis in axes))
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    length = math.prod(x.shape[axis] for axis in axes)
    if length == 0:
        return jnp.zeros(shape, x.dtype)
    # Rows stay where they are if they lie innermost: XLA on CPUs takes five times as long for a transposed sum.
    along = len(kept) if axes[:1] == (len(kept),) else 0
    rest = [x.shape[axis] for axis in kept]
    lines = x if along else x.transpose(*axes, *kept)
    lines = lines.reshape(*rest[:along], length, *rest[along:])
    levels = (length - 1).bit_length()
    padding = [(0, 0, 0)] * lines.ndim
    padding[along] = 0, (1 << levels) - length, 0
    lines = lax.pad(lines, jnp.zeros((), x.dtype), padding)
    for done in range(levels):
        half = lines.shape[along] // 2
        low, high = (lax.slice_in_dim(lines, start, start + half, axis=along) for start in (0, half))
        lines = low + high
        if done % LEVELS_A_PASS == LEVELS_A_PASS - 1:  # else XLA may make one kernel of all, with 2^levels loads
            lines = lax.optimization_barrier(lines)
    return lines.reshape(shape)


def broadcast(x: Array, like: Array, level: str) -> Array:
    """x broadcast along its axes of length 1 to the shape of another array, and sharded as that is.

    The transpose of a broadcast is a sum. Where the level asks for a fixed order, the broadcast is built by doubling,
    so that its transpose is the tree above.
    """
    shape, sharding = like.shape, jax.typeof(like).sharding
    placed = sharding if AxisType.Explicit in sharding.mesh.axis_types else None
    if not is_fixed(level) or math.prod(shape) == 0:
        return jnp.broadcast_to(x, shape) if placed is None else broadcast_to(x, shape, placed)
    axes = [axis for axis, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want]
    for axis in axes:
        sizes = [shape[axis]]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] - sizes[-1] // 2)
        for n in reversed(sizes[:-1]):
            x = lax.concatenate([x, lax.slice_in_dim(x, 0, n // 2, axis=axis)], axis)
    return x if placed is None else reshard(x, placed)
