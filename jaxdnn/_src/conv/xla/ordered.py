"""The `ordered` engine of the convolutions: the definition's own order of additions, one product at a time.

Every element is computed by acc = fma(a, b, acc) in float32, in the order that the reference's arithmetic "ordered"
states: for `conv` and `conv_dgrad` over the taps in row-major order and then the channels, for `conv_wgrad` over the
images and then the pixels. If both operands are float16 or float8, products are exact in float32, so that the result is
the same whether or not the compiler fuses multiplication and addition (XLA does on CPUs, and not always on GPUs).
bfloat16 and TF32 have float32's exponents: a product below 2^-126 may need bits that float32 does not have, and so the
product is formed in float64, where the sum is rounded once. If an operand is float32, as the cotangent of a result that
is wider than the operands, float64 represents the product exactly and not always the sum (`_fma`).

The engine makes a pass over the result for every product of an element, which is slow. It serves those who need the
same bits on every device, and faster engines are compared with it.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export, lax

from jaxdnn._src.conv import primitive
from jaxdnn._src.conv.primitive import ConvSpec
from jaxdnn._src.conv.xla import forms
from jaxdnn._src.conv.xla import taps as conv_taps
from jaxdnn._src.conv.xla.engine import caller_layout, canonical, truncate_to_tf32
from jaxdnn._src.conv.xla.problem import Problem
from jaxdnn._src.core import engines, selection

# Types whose products float32 represents exactly, and types whose products' significant bits fit but not the exponents.
_SMALL = tuple(map(jnp.dtype, (jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)))
_NARROW = (*_SMALL, jnp.dtype(jnp.bfloat16))
Add = Callable[[Array, Array, Array], Array]


def run(call: engines.Call, a: Array, b: Array, *operands: Array) -> Array:
    """Serves a call of any of the three ops."""
    spec: ConvSpec = call.spec
    if (nothing := primitive.sum_of_nothing(call.op, spec, a, b)) is not None:
        return primitive.finish(call.op, spec, nothing, *operands)
    roles = primitive.ROLES[call.op]
    a, b = (canonical(spec, role, v).astype(jnp.float32) for role, v in zip(roles, (a, b), strict=False))
    if spec.precision == "tf32":
        a, b = truncate_to_tf32(a), truncate_to_tf32(b)
    add = addition(call)
    problem = Problem(spec.geo, lax.Precision.HIGHEST, jnp.dtype(jnp.float32))
    if roles[2] == "w":
        result = _backward_filter(problem, a, b, add)
    else:
        # `canonical` has reversed the taps of mode "convolution"; the order is that of the filter as it is stored.
        result = (_forward if roles[2] == "y" else _backward_data)(problem, a, b, add, last_tap_first=spec.geo.flip)
    return primitive.finish(call.op, spec, caller_layout(spec, roles[2], result), *operands)


def _forward(problem: Problem, x: Array, w: Array, add: Add, *, last_tap_first: bool) -> Array:
    padded = conv_taps.padded(problem, x)
    shape = (x.shape[0], *problem.geo.out)
    return _chain(problem, lambda tap: conv_taps.shift(problem, padded, tap), w, shape, add, last_tap_first)


def _backward_data(problem: Problem, dy: Array, w: Array, add: Add, *, last_tap_first: bool) -> Array:
    """Σ over taps (r, s) and output channels k of dy[(h + a - r d) / u, ...] w, where the division is exact."""
    geo = problem.geo
    extents = geo.extents
    # dy with stride - 1 zeros between its elements, long enough for every tap: index h + low - r d, plus extent - 1.
    spatial = [
        (extent - 1, size + low - 1 - (p - 1) * stride, stride - 1)
        for size, p, extent, stride, (low, _) in zip(geo.sizes, geo.out, extents, geo.stride, geo.padding, strict=True)
    ]
    spread = lax.pad(dy, jnp.zeros((), dy.dtype), [(0, 0, 0), *spatial, (0, 0, 0)])
    shape = (dy.shape[0], *problem.geo.sizes)

    def shift(tap: Any) -> Array:
        start = [extent - 1 + low - r for extent, (low, _), r in zip(extents, geo.padding, tap, strict=True)]
        return lax.dynamic_slice(spread, (0, *start, 0), (*shape, dy.shape[-1]))

    exchanged = forms.exchange_channels(w, problem.geo.groups)
    return _chain(problem, shift, exchanged, shape, add, last_tap_first)


def _chain(problem: Problem, shift: Any, w: Array, shape: tuple[int, ...], add: Add, last_tap_first: bool) -> Array:
    """acc = fma(shift(tap)[..., c], w[tap, c], acc), over the taps and then the group's channels."""
    groups, (cg, k) = problem.geo.groups, w.shape[-2:]
    w = w.reshape(-1, cg, groups, k // groups)

    def body(i: Array, acc: Array) -> Array:
        tap, c = conv_taps.divmod_index(i, cg)
        tap = w.shape[0] - 1 - tap if last_tap_first else tap
        pixels = shift(conv_taps.traced_start(problem, tap)).reshape(*shape, groups, cg)
        one = lax.dynamic_slice_in_dim(pixels, c, 1, pixels.ndim - 1)
        factor = lax.dynamic_slice(w, (tap, c, 0, 0), (1, 1, *w.shape[2:])).reshape(groups, k // groups)
        return add(one, factor.reshape((1,) * len(shape) + factor.shape), acc)

    zero = zeros((*shape, groups, k // groups))
    return lax.fori_loop(0, w.shape[0] * cg, body, zero).reshape(*shape, k)


def _backward_filter(problem: Problem, x: Array, dy: Array, add: Add) -> Array:
    """acc = fma(x[window of the pixel], dy[pixel], acc), over the images and then the pixels, in row-major order."""
    padded = conv_taps.padded(problem, x)
    geo, rank, groups = problem.geo, problem.geo.rank, problem.geo.groups
    n, outputs = dy.shape[0], problem.geo.out
    cg, kg = x.shape[-1] // groups, dy.shape[-1] // groups
    pixels = dy.reshape(-1, 1, groups, kg)
    extents = geo.extents

    def body(m: Array, acc: Array) -> Array:
        start, rest = [], m
        for p, stride in zip(reversed(outputs), reversed(geo.stride), strict=True):
            rest, place = conv_taps.divmod_index(rest, p)
            start.append(place * stride)
        block = lax.dynamic_slice(padded, (rest, *start[::-1], 0), (1, *extents, x.shape[-1]))
        seen = lax.slice(block, (0,) * block.ndim, block.shape, (1, *geo.dilation, 1))
        taps = jnp.swapaxes(seen.reshape(*problem.geo.taps, groups, cg), rank, rank + 1)[..., None]
        pixel = lax.dynamic_index_in_dim(pixels, m, keepdims=False)
        return add(taps, pixel.reshape((1,) * rank + pixel.shape), acc)

    zero = zeros((*problem.geo.taps, cg, groups, kg))
    return lax.fori_loop(0, n * math.prod(outputs), body, zero).reshape(*problem.geo.taps, cg, groups * kg)


def zeros(shape: tuple[int, ...]) -> Array:
    """The zero that a sum starts from. The barrier keeps XLA from omitting 0 + p, which for p = -0 is 0."""
    return lax.optimization_barrier(jnp.zeros(shape, jnp.float32))


def addition(call: engines.Call) -> Add:
    """The fastest multiply-add with one rounding for operands of these dtypes."""
    found = [v.dtype for v in call.avals[:2]]
    if all(dtype in _SMALL for dtype in found):
        return _add_exact
    return _add_short if call.spec.precision == "tf32" or all(dtype in _NARROW for dtype in found) else _fma


def _add_exact(a: Array, b: Array, c: Array) -> Array:
    """a b + c of factors whose product is exact in float32."""
    return c + a * b


def _add_short(a: Array, b: Array, c: Array) -> Array:
    """a b + c with one rounding, of factors of at most 11 significant bits.

    The product is exact in float64. The sum is exact too, unless the smaller term is more than 29 bits below the larger
    one, which has at most 24 bits: then rounding to float64 moves the sum neither to nor across a tie of float32.
    """
    with jax.enable_x64(True):  # this runs while a program is lowered, where no transformation sees the wide types
        a, b, c = (v.astype(jnp.float64) for v in (a, b, c))
        return (c + a * b).astype(jnp.float32)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """a b + c with one rounding.

    The product is exact in float64, and so is the error of the sum (Knuth's two-sum). A sum that is not exact is
    rounded to odd: its last bit is set to one. Then the rounding to float32 gives the correctly rounded result.
    """
    with jax.enable_x64(True):  # this runs while a program is lowered, where no transformation sees the wide types
        p, c = a.astype(jnp.float64) * b.astype(jnp.float64), c.astype(jnp.float64)
        s = p + c
        t = s - p
        error = (p - (s - t)) + (c - t)
        bits = lax.bitcast_convert_type(s.reshape(-1), jnp.int64).reshape(s.shape)
        even = ((error > 0) | (error < 0)) & (bits & 1 == 0)
        outwards = jnp.where((error > 0) == (s > 0), jnp.int64(1), jnp.int64(-1))
        odd = jnp.where(even, bits + outwards, bits)
        return lax.bitcast_convert_type(odd.reshape(-1), jnp.float64).reshape(s.shape).astype(jnp.float32)


# ---- what the engine guarantees --------------------------------------------------------------------------------------


def supports(call: engines.Call) -> str | None:
    found = [v.dtype for v in call.avals[:2]]
    if any(dtype not in (*_NARROW, jnp.float32) for dtype in found):
        names = " and ".join(dict.fromkeys(dtype.name for dtype in found))
        return f"it takes operands of float32, bfloat16, float16 or float8, and these are {names}"
    if call.spec.accumulate != jnp.float32:
        return f"it accumulates in float32, not {call.spec.accumulate}"
    return None


def _level(call: engines.Call) -> str:
    epilogue = call.spec.epilogue
    # If a compiler may fuse the epilogue's multiplications and additions, or has its own exp, bits differ by device.
    fusable = (epilogue.alpha != 1 and epilogue.operands) or (epilogue.prior and epilogue.beta != 1)
    own = epilogue.activation is not None and epilogue.activation[0] not in ("relu", "clipped_relu", "leaky_relu")
    return "mesh_invariant" if fusable or own else "portable"


def _schedule(call: engines.Call) -> engines.Schedule | None:
    """The order of additions, if it determines the result's bits: if none depend on how the epilogue is compiled."""
    spec: ConvSpec = call.spec
    if _level(call) != "portable":
        return None
    n, c, k = primitive.channels(spec, call.op, *call.avals[:2])
    per_tap = {"conv": c // spec.geo.groups, "conv_dgrad": k // spec.geo.groups}
    if call.op not in per_tap and export.is_symbolic_dim(n):
        return None
    count = math.prod(spec.geo.taps) * per_tap[call.op] if call.op in per_tap else n * math.prod(spec.geo.out)
    return engines.Schedule("ordered", np.arange(count)[None])


engines.declare(
    "ordered",
    *primitive.ROLES,
    run=run,
    supports=supports,
    level=_level,
    schedule=_schedule,
    rank=lambda call: selection.LAST,
    partition=lambda call: True,
    adds_in_order=True,
    modelled=("cpu", "cuda"),
    notes=(
        "one pass over the result per product: slow",
        "XLA flushes subnormal numbers to zero on CPUs, so portability is for normal ones",
    ),
)
