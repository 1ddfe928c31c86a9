"""What the tensor ops share: their dtypes, their one blend of result and prior, and sums in a fixed order.

These ops need no primitive and no engine: they move data and compute element by element, which XLA does at the speed of
memory, or add, for which a level above run_to_run takes the tree below.
"""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn import _check, _epilogue, _primitive
from jaxdnn._partition import Factors
from jaxdnn._rounded import product, real, rounded
from jaxdnn.determinism import is_fixed, satisfies

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.float8_e4m3fn, jnp.float8_e5m2)
INTEGERS = (jnp.int8, jnp.uint8, jnp.int32)
_F32, _F64, _I32 = (np.dtype(t) for t in (jnp.float32, jnp.float64, jnp.int32))


def array(name: str, value: Any) -> Array:
    """Reads an operand of any of the dtypes, and keeps what made it apart from what is made of it."""
    value = _check.array(name, value)
    _check.dtype(name, value, (*FLOATS, *INTEGERS))
    return rounded(jnp.asarray(value))


def same_dtype(name: str, value: Array, other_name: str, other: Array) -> None:
    """Checks that two operands have one dtype."""
    if value.dtype != other.dtype:
        raise TypeError(f"`{name}` must have the dtype of `{other_name}`, {other.dtype.name}, got {value.dtype.name}.")


def accumulator(dtype: Any) -> np.dtype:
    """What is computed in: float32, float64 for float64, int32 for integers."""
    dtype = np.dtype(dtype)
    return _F64 if dtype == _F64 else _F32 if dtype in map(np.dtype, FLOATS) else _I32


def out_dtype(value: Any, like: Array) -> np.dtype:
    """Reads `out_dtype`; None is the operand's."""
    if value is None:
        return np.dtype(like.dtype)
    found = _check.as_dtype("out_dtype", value, (*FLOATS, *INTEGERS))
    if found == _F64 and like.dtype != _F64:
        raise TypeError(f"`out_dtype` must not be wider than what is computed in, float32, got {found.name}.")
    return found


def refuse_portable(what: str, level: str) -> None:
    """Raises where a square root would have to be the same on every device; XLA's on GPUs is not correctly rounded."""
    if satisfies(level, "portable"):
        raise NotImplementedError(
            f"`determinism` 'portable' cannot be guaranteed for {what}, expected 'mesh_invariant' or less: XLA's "
            "square roots differ between devices."
        )


def scaled(z: Array, alpha: float | Array) -> Array:
    """alpha * z rounded to z's dtype (float32 for an integer z unless alpha is 1)."""
    if isinstance(alpha, float) and alpha == 1:
        return z
    z = real(z, _F32) if z.dtype == _I32 else z
    return product(z, jnp.asarray(alpha).astype(z.dtype))


def blend(
    computed: Array,
    *,
    alpha: Any,
    beta: Any,
    prior: Any,
    out: np.dtype,
    dtypes: Sequence[Any] = (),
    name: str = "prior",
) -> Array:
    """alpha * computed + beta * prior in the dtype of `computed`, and the one conversion.

    Reads and checks the arguments; where beta is zero the prior is not read. Integers stay integers if alpha is 1 and
    beta 0 or 1, and else become float32. Every step is rounded, whatever stands before and after.
    """
    alpha, beta = _epilogue.read_scales(alpha, beta, prior, ("alpha", "beta", name))
    none = isinstance(beta, float) and beta == 0
    if prior is not None:
        prior = _check.array(name, prior)
        _check.shape(name, prior, computed.shape, "the result's")
        _check.dtype(name, prior, sorted({np.dtype(t) for t in (computed.dtype, out, *dtypes)}, key=str))
    integer = computed.dtype == _I32 and isinstance(alpha, float) and alpha == 1
    if prior is None or none:
        return rounded(_epilogue.convert(scaled(computed, alpha), out))
    prior = rounded(jnp.asarray(prior))
    if integer and isinstance(beta, float) and beta == 1 and jnp.issubdtype(prior.dtype, jnp.integer):
        return _epilogue.convert(computed + prior.astype(_I32), out)
    z = scaled(real(computed, _F32) if computed.dtype == _I32 else computed, alpha)
    term = real(prior, z.dtype)
    # Rounded where nothing was scaled too: the caller may have computed x or the prior as a product.
    return rounded(_epilogue.convert(rounded(z) + rounded(_epilogue.scaled_prior(beta, term)), out))


# ---- space to channels -----------------------------------------------------------------------------------------------


def fold(name: str, x: Array, factors: tuple[int, ...], order: str = "CRD") -> Array:
    """(N, C, H f, W g) to (N, C f g, H, W): the new channel is (c f + i) g + j, or for "DCR" (i g + j) C + c."""
    sizes = x.shape[2:]
    if any(size % f for size, f in zip(sizes, factors, strict=True)):
        raise ValueError(f"`{name}` must divide the sizes {tuple(sizes)}, got {factors}.")
    return _primitive.in_types(ft.partial(_folded, factors, order), ft.partial(_moves, ()), (x,))(x)


def unfold(name: str, x: Array, factors: tuple[int, ...], order: str = "CRD") -> Array:
    """(N, C f g, H, W) to (N, C, H f, W g), the inverse of `fold`."""
    if (c := x.shape[1]) % math.prod(factors):
        raise ValueError(f"`{name}` must have a product that divides the {c} channels, got {factors}.")
    spatial = tuple(f"s{i}" for i in range(len(factors)))
    return _primitive.in_types(ft.partial(_unfolded, factors, order), ft.partial(_moves, spatial), (x,))(x)


def _moves(free: tuple[str, ...], x: Any) -> Factors:
    """The batch may be sharded, and the spatial axes in `free`: those that become longer, so that they stay even."""
    spatial = tuple(f"s{i}" for i in range(x.ndim - 2))
    return Factors(operands=(("n", "c", *spatial),), results=(("n", "k", *spatial),), free=("n", *free))


def _folded(factors: tuple[int, ...], order: str, x: Array) -> Array:
    n, c, *sizes = x.shape
    split = [part for size, f in zip(sizes, factors, strict=True) for part in (size // f, f)]
    rank = len(sizes)
    places, parts = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
    channels = (1, *parts) if order == "CRD" else (*parts, 1)
    y = jnp.transpose(x.reshape(n, c, *split), (0, *channels, *places))
    return y.reshape(n, c * math.prod(factors), *split[::2])


def _unfolded(factors: tuple[int, ...], order: str, x: Array) -> Array:
    n, c, *sizes = x.shape
    rank, kept = len(sizes), c // math.prod(factors)
    channels = (kept, *factors) if order == "CRD" else (*factors, kept)
    first = 2 if order == "CRD" else 1
    spatial = [axis for i in range(rank) for axis in (2 + rank + i, first + i)]
    y = jnp.transpose(x.reshape(n, *channels, *sizes), (0, 1 if order == "CRD" else 1 + rank, *spatial))
    return y.reshape(n, kept, *(size * f for size, f in zip(sizes, factors, strict=True)))


# ---- sums in a fixed order -------------------------------------------------------------------------------------------


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


def broadcast(x: Array, shape: Sequence[int], level: str) -> Array:
    """x broadcast along its axes of length 1.

    The transpose of a broadcast is a sum. Where the level asks for a fixed order, the broadcast is built by doubling,
    so that its transpose is the tree above.
    """
    axes = [axis for axis, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want]
    if not is_fixed(level) or math.prod(shape) == 0:
        return jnp.broadcast_to(x, shape)
    for axis in axes:
        sizes = [shape[axis]]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] - sizes[-1] // 2)
        for n in reversed(sizes[:-1]):
            x = lax.concatenate([x, lax.slice_in_dim(x, 0, n // 2, axis=axis)], axis)
    return x
