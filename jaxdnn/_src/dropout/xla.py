"""The `xla` engine of dropout, alone, with bias, activation and residual, and of its derivatives.

Philox4x32-10 is written out for every element.

Four neighbours share a counter, but in this code each element runs the generator and selects its word. If a GPU's
thread computes four neighbours, the compiler finds that their counters are equal and runs the generator once, provided
that it can prove that the first one starts a counter; so the elements are numbered by one iota over the whole array. If
the four are not neighbours in memory (channels first), on a GPU the mask is computed before it is used, each counter
once. Philox's 64-bit products are one instruction each on GPUs and CPUs; without 64-bit types XLA would need ten.

The generator's own key is fixed, and the call's key is two words of the counter. So the keys of the rounds are
immediate operands; as registers they would cost 1.5 times the time on an H200 (`notes-activation.md`).

Each product is rounded before anything is added to it. In bfloat16 and float16 an activation is read from a float32
table at x + bias, rounded to that type. So the bits are those of the definition. The scale of kept elements is part of
the table, or of the slope.
"""

import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdnn._src.activation import formulas
from jaxdnn._src.core import engines
from jaxdnn._src.core.rounding import nearest, product
from jaxdnn._src.dropout.primitive import BLOCK, COUNTERS, OPS, DropoutSpec, is_fixed, pair, precision
from jaxdnn._src.tensor import reductions

ROUNDS = 10
# Where the mask of elements that share a counter, and are not neighbours, is made before it is used. On a CPU it is
# faster to draw four times as often, in vectors.
MASK_FIRST = ("cuda",)
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def _run_alone(call: engines.Call, x: Array, key: Array, start: Array) -> Array:
    """x * scale where the random word reaches the threshold, 0 elsewhere."""
    spec: DropoutSpec = call.spec
    with jax.enable_x64(True):  # this runs while a program is lowered, where no transformation sees the wide types
        wide = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
        scaled = (x.astype(wide) * wide.type(spec.scale)).astype(x.dtype)
        return jnp.where(kept(call, x.shape, key, start), scaled, jnp.zeros((), x.dtype))


def kept(call: engines.Call, shape: tuple[int, ...], key: Array, start: Array) -> Array:
    """The mask of an array of this shape, leading axes and all; 64-bit types must be on."""
    spec: DropoutSpec = call.spec
    shape = shape[spec.leading :]
    if spec.start is not None:
        start = pair(spec.start).reshape((1,) * spec.leading + (2,))
    if call.platform in MASK_FIRST and _apart(spec, shape):
        return _kept_by_counters(spec, shape, key, start)
    return _words(spec, shape, key, start) >= np.uint32(spec.threshold)


def _apart(spec: DropoutSpec, shape: tuple[int, ...]) -> bool:
    """Whether elements that share a counter form whole groups of four and are not neighbours in memory."""
    last = spec.order[-1] if spec.order else 0
    return spec.shift == 0 and shape[last] % BLOCK == 0 and math.prod(shape[last + 1 :]) > 1


def _kept_by_counters(spec: DropoutSpec, shape: tuple[int, ...], key: Array, start: Array) -> Array:
    """The mask, for which a counter's four words are drawn at once, and what they decide is four bits of a byte."""
    last = spec.order[-1]
    blocks = tuple(n // BLOCK if axis == last else n for axis, n in enumerate(shape))
    block = _numbers(spec, blocks, _count(math.prod(blocks)))
    bits = jnp.zeros((), np.uint8)
    for i, words in enumerate(_draw(spec, block, key, start)):
        bits = bits | (words >= np.uint32(spec.threshold)).astype(np.uint8) << np.uint8(i)
    at = spec.leading + last
    fours = jnp.broadcast_to(jnp.expand_dims(bits, at + 1), (*bits.shape[: at + 1], BLOCK, *bits.shape[at + 1 :]))
    bits = fours.reshape(*bits.shape[:at], shape[last], *bits.shape[at + 1 :])
    word = (lax.broadcasted_iota(np.uint32, (1,) * spec.leading + shape, at) & np.uint32(BLOCK - 1)).astype(np.uint8)
    return (bits >> word) & np.uint8(1) != 0


def _count(size: Any) -> Any:
    """The type in which elements are numbered; of a size that is known only when the program runs, the wide one."""
    return np.uint32 if isinstance(size, int) and size < 2**32 else np.uint64


def _numbers(spec: DropoutSpec, shape: tuple[int, ...], count: Any) -> Array:
    """0, 1, ... in logical order, by one iota: XLA computes sums of one an axis in kernels of their own."""
    index = lax.iota(count, math.prod(shape)).reshape([shape[axis] for axis in spec.order])
    return index.transpose(np.argsort(spec.order)).reshape((1,) * spec.leading + shape)


def _draw(spec: DropoutSpec, block: Array, key: Array, start: Array) -> tuple[Array, ...]:
    """The four words of the counters `start` + block."""
    k0, k1, low, high = (_column(v, i, len(spec.order)) for v in (key, start) for i in (0, 1))
    first, low = low, low + block.astype(np.uint32)
    high = high + (low < first).astype(np.uint32)
    high = high + (block >> np.uint64(32)).astype(np.uint32) if block.dtype == np.uint64 else high
    if not (spec.start is not None and isinstance(block.size, int) and spec.start + block.size < COUNTERS):
        high = high & np.uint32((COUNTERS - 1) >> 32)
    # Always k0, as LLVM sees and XLA does not: that would multiply the one number k0 in a kernel of its own.
    k0 = jnp.where((block.astype(np.uint32) | np.uint32(1)) != 0, k0, np.uint32(0))
    return philox((low, high, k0, k1))


def _words(spec: DropoutSpec, shape: tuple[int, ...], key: Array, start: Array) -> Array:
    """The random word of every element, with the leading axes of key and start."""
    count = _count(math.prod(shape) + BLOCK)
    index = _numbers(spec, shape, count)
    if spec.shift is None:
        low, high = (_column(start, i, len(shape)).astype(np.uint64) for i in (0, 1))
        element = low + (high << np.uint64(32)) + index.astype(np.uint64)
        block, word = element >> np.uint64(2), (element & np.uint64(3)).astype(np.uint32)
        start = jnp.zeros_like(start)
    else:
        element = index + count(spec.shift)
        block, word = element >> count(2), (element & count(3)).astype(np.uint32)
    c0, c1, c2, c3 = _draw(spec, block, key, start)
    return jnp.where(word < 2, jnp.where(word == 0, c0, c1), jnp.where(word == 2, c2, c3))


def _column(pair: Array, i: int, rank: int) -> Array:
    return lax.expand_dims(pair[..., i], range(pair.ndim - 1, pair.ndim - 1 + rank))


def philox(counter: tuple[Array, ...], key: tuple[int, int] = (0, 0)) -> tuple[Array, ...]:
    """Four random words a counter (Salmon et al., SC 2011); 64-bit types must be on."""
    c0, c1, c2, c3 = counter
    for i in range(ROUNDS):
        (high0, low0), (high1, low1) = (_multiply(m, c) for m, c in zip(_MULTIPLIERS, (c0, c2), strict=True))
        k0, k1 = (np.uint32((k + i * w) % 2**32) for k, w in zip(key, _WEYL, strict=True))
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def _multiply(multiplier: int, x: Array) -> tuple[Any, Any]:
    """The high and the low word of a product."""
    product = x.astype(np.uint64) * np.uint64(multiplier)
    return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)


def run(call: engines.Call, x: Array, *operands: Array) -> Array:
    """residual + (act(x + bias) scale where kept, 0 elsewhere)."""
    spec: DropoutSpec = call.spec
    *rest, key, start = operands
    if spec.is_alone:
        return _run_alone(call, x, key, start)
    bias, rest = (rest[0], rest[1:]) if spec.bias else (None, rest)
    wide = precision(spec, (x, *operands))
    scale = wide.type(spec.scale)
    if spec.looked_up and x.dtype in formulas.NARROW:
        entries = formulas.table(spec.activation, spec.parameter, float(scale), np.dtype(x.dtype), wide)
        v = formulas.look_up(_argument(x, bias), entries)
    else:
        v = formulas.activate(_sum(x, bias, wide), spec.activation, spec.parameter, spec.level)
        v = v if scale == 1 else product(v, jnp.asarray(scale))
    v = jnp.where(_kept(call, x.shape, key, start), v, jnp.zeros_like(v))
    return nearest(rest[0].astype(wide) + v if rest else v, spec.out_dtype)


def run_tangent(call: engines.Call, *operands: Array) -> Array:
    """act'(x + bias) scale (dx + dbias) where kept, 0 elsewhere."""
    spec: DropoutSpec = call.spec
    return nearest(_dropped(call, operands[: 1 + spec.dbias], operands[1 + spec.dbias :]), spec.out_dtype)


def run_dgrad(call: engines.Call, dy: Array, *operands: Array) -> tuple[Array, Array]:
    """dx, and the sum of the unrounded dx over the axes along which the bias is constant."""
    spec: DropoutSpec = call.spec
    v = _dropped(call, (dy,), operands)
    axes = tuple(spec.leading + axis for axis in spec.summed)
    return nearest(v, spec.out_dtype), reductions.add(v, axes, is_fixed(spec))


def _dropped(call: engines.Call, tangents: Any, operands: Any) -> Array:
    """The derivative in float32 (float64)."""
    spec: DropoutSpec = call.spec
    *at, key, start = operands
    wide = precision(spec, (*tangents, *operands))
    t = ft.reduce(jnp.add, [v.astype(wide) for v in tangents])
    v = product(t, _slope(spec, at, wide))
    return jnp.where(_kept(call, t.shape, key, start), v, jnp.zeros_like(v))


def _slope(spec: DropoutSpec, at: Any, wide: np.dtype) -> Array:
    """act'(x + bias) times the scale, in float32 (float64)."""
    scale = wide.type(spec.scale)
    if not at:
        return jnp.asarray(scale)
    x, bias = at[0], at[1] if spec.bias else None
    if spec.looked_up and x.dtype in formulas.NARROW:
        slopes = formulas.slope_table(spec.activation, spec.parameter, float(scale), np.dtype(x.dtype))
        return formulas.look_up(_argument(x, bias), slopes)
    return formulas.derivative(_sum(x, bias, wide), spec.activation, spec.parameter) * scale


def _sum(x: Array, bias: Array | None, wide: Any) -> Array:
    return x.astype(wide) if bias is None else x.astype(wide) + bias.astype(wide)


def _argument(x: Array, bias: Array | None) -> Array:
    """x + bias in the type of x, as the tables' index."""
    return x if bias is None else _sum(x, bias, np.float32).astype(x.dtype)


def _kept(call: engines.Call, shape: tuple[int, ...], key: Array, start: Array) -> Array:
    with jax.enable_x64(True):  # this runs while a program is lowered, where no transformation sees the wide types
        return kept(call, shape, key, start)


def _portable(call: engines.Call) -> bool:
    """Whether every bit is the definition's, because all operations are exact or correctly rounded on all devices."""
    spec: DropoutSpec = call.spec
    x = call.avals[0] if call.op == "dropout" else call.avals[1 + spec.dbias]
    return not spec.looked_up or np.dtype(x.dtype) in formulas.NARROW


def _level(call: engines.Call) -> str:
    """Element by element; a gradient in the bias adds over the batch."""
    if call.op == "dropout_dgrad":
        return "mesh_invariant" if is_fixed(call.spec) else "run_to_run"
    return "portable" if _portable(call) else "mesh_invariant"


_RUN: dict[str, Any] = dict(zip(OPS, (run, run_tangent, run_dgrad), strict=True))
engines.declare(
    "xla",
    *_RUN,
    run=lambda call, *operands: _RUN[call.op](call, *operands),
    needs_sizes=lambda call: call.op == "dropout_dgrad" and is_fixed(call.spec),  # a tree's
    level=_level,
    accumulation=lambda call: precision(call.spec, call.avals).name,
    hazards=engines.flushes_on_cpus,
    notes=("Philox4x32-10, drawn again for the backward pass",),
)
