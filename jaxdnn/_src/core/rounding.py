"""Roundings that compilers would omit, or do twice: a fence after a product, and the conversion to a result's dtype.

A value that passes the fence is rounded to its dtype before anything uses it.

XLA lets LLVM and ptxas contract a * b + c into one fused multiply-add, in one program and not in another: for equal
operands the bits of the result then depend on the shape, on the rest of the program, and on the device.
`lax.optimization_barrier` does not prevent it on CPUs up to JAX 0.10 (XLA drops it before it fuses loops), and where it
does, it writes the product to memory. Here a select separates the two, and no compiler can prove that it always returns
p: -p has other bits than p, also if p is NaN. It does not use the factors, so that the compilers' knowledge of the sign
of a square is no problem; but they know that a float that was an integer is not NaN, hence `real`. They know it of one
that was put together of bits, too: a product of such is not safe beside a sum.

Derivatives consist of products and sums too. So the fence is a primitive whose tangents and cotangents pass it as well,
`product` is one whose derivatives are such products again, and the derivatives of `root`, `reciprocal`, `quotient` and
`power` use `product`. A formula that is written with these functions and with sums of a fixed order has fixed bits, and
so has its gradient. `at_edges` separates a formula from the operations around it.

Narrow floats are computed in float32, and XLA may omit the rounding between two operations
(`xla_allow_excess_precision`), even across a select. So the fence of narrow floats uses their bits as integers,
combined with a zero that no compiler finds (n (n + 1) is even). The bits are taken in one dimension, because XLA folds
`bitcast_convert_type` of a constant array with permuted dimensions to wrong values (JAX 0.10 to 0.12; for example
`x[:, rows]` for a constant x).
"""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from jaxdnn._src.core import compat
from jaxdnn._src.core.compat import Partitioned, ShapedArray, ad, batching, mlir
from jaxdnn._src.core.determinism import is_fixed
from jaxdnn._src.core.partitioning import broadcast_alike, never_in_part, vary_alike

_Arrays = TypeVar("_Arrays")
_INTEGERS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def product(a: Array, b: Array) -> Array:
    """a b for two arrays of one dtype, rounded to that dtype whatever it is added to; also in its derivatives."""
    if not jnp.issubdtype(jnp.result_type(a, b), jnp.floating):
        return a * b
    return _product.bind(*broadcast_alike(a, b))


def rounded(p: Array) -> Array:
    """p through the fence: no compiler fuses its computation with its use. Integers are returned unchanged."""
    return _fence.bind(p) if jnp.issubdtype(p.dtype, jnp.floating) else p


def joined(p: Array, residual: Array, narrow: Any) -> Array:
    """p through the fence, plus a residual of its dtype. The gradient is one array for both, rounded to a narrow dtype.

    XLA takes a value on two sides of a fence for two, and would store both.
    """
    return _joined.bind(*vary_alike((p, residual)), narrow=np.dtype(narrow))


def together(function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """`function` by `jax.jit`, whose options are `static`; inside the user's `jax.disable_jit` one program too.

    For what has the bits of a program only as a program: a choice of engine, or products that XLA contracts with sums.
    """
    program = jax.jit(function, **static)

    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.disable_jit(False):
            return program(*args, **kwargs)

    return run


def at_edges(level: str, arrays: _Arrays) -> _Arrays:
    """Operands or results of a call, through the fence if the level fixes bits."""
    return jax.tree.map(rounded, arrays) if is_fixed(level) else arrays


def real(x: Array, dtype: Any) -> Array:
    """x in a float dtype. Integers are converted so that no compiler knows that the result is not NaN."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return _by_bits(x.astype(dtype))
    return x.astype(dtype)


def _hidden(p: Array) -> Array:
    return _by_bits(p) if p.dtype.itemsize <= 2 else jnp.where(p == p, p, -p)


def _by_bits(p: Array) -> Array:
    integers = _INTEGERS[p.dtype.itemsize]
    n, one = lax.bitcast_convert_type(p.reshape(-1), integers), jnp.ones((), integers)
    return lax.bitcast_convert_type(n ^ (n * (n + one) & one), p.dtype).reshape(p.shape)


def _lowered(function: Callable[..., Array]) -> Callable[..., Any]:
    """The lowering of a function of arrays of one shape, element by element.

    In one dimension XLA would not shard narrow floats as they are. So each device takes the bits of its own part.
    """

    def rule(ctx: Any, *operands: Any, **static: Any) -> Any:
        run, out = (lambda *arrays: function(*arrays, **static)), ctx.avals_out[0]
        narrow = out.dtype.itemsize <= 2 and out.ndim > 1 and compat.automatic_devices(ctx) > 1
        ctx = compat.on_mesh(ctx) if narrow else ctx
        if narrow and not compat.is_exported(ctx) and not compat.lacking(compat.SHARDING) and compat.has_devices(ctx):
            run = _on_each_device(run, len(operands), out.ndim, _whole(compat.automatic_mesh(ctx), out.shape))
            ctx = ctx.replace(avals_in=[ShapedArray(out.shape, out.dtype)] * len(operands))
        return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)

    return rule


def _whole(mesh: Any, shape: Sequence[int]) -> NamedSharding | None:
    """A sharding that is whole along the axes that XLA might shard by a part of a mesh axis; None if there are none.

    Where shardings are in types XLA shards by whole mesh axes.
    """
    if mesh is None or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    loose = [PartitionSpec.UNCONSTRAINED if never_in_part(size, mesh) else None for size in shape]
    return NamedSharding(mesh, PartitionSpec(*loose)) if None in loose else None


def _on_each_device(
    function: Callable[..., Array], operands: int, rank: int, whole: NamedSharding | None
) -> Callable[..., Any]:
    def partition(mesh: Any, args: Any, result: Any) -> Any:
        def run(*arrays: Array) -> Array:
            with use_abstract_mesh(AbstractMesh((), ())):
                return function(*arrays)

        return mesh, run, result.sharding, (result.sharding,) * operands

    sharded, axes = compat.custom_partitioning(function), " ".join(f"a{i}" for i in range(rank))
    sharded.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, args, _: args[0].sharding,
        sharding_rule=f"{', '.join([axes] * operands)} -> {axes}",
    )
    if whole is None:
        return sharded
    return lambda *arrays: sharded(*(lax.with_sharding_constraint(v, whole) for v in arrays))


def _batched(primitive: Any, operands: Sequence[Array], axes: Sequence[Any], **static: Any) -> tuple[Array, int]:
    """`vmap` of an operation of operands of one shape: they have one shape again, also where some are not mapped.

    JAX's own rule gives these an axis of size 1, which neither `_lowered` nor the derivatives expect.
    """
    axis = next(i for i in axes if i is not None)
    pairs = zip(operands, axes, strict=True)
    alike = [jnp.expand_dims(v, axis) if i is None else jnp.moveaxis(v, i, axis) for v, i in pairs]
    return primitive.bind(*broadcast_alike(*alike), **static), axis


_fence = Partitioned("rounded")
for _primitive in _fence.both:
    _primitive.def_impl(lambda p: p)  # an operation of its own has nothing to be joined with
    _primitive.def_abstract_eval(lambda p: p)
    ad.deflinear2(_primitive, lambda ct, _: [_fence.bind(ct)])
    batching.defvectorized(_primitive)
    mlir.register_lowering(_primitive, _lowered(_hidden))


def _joined_jvp(primals: Any, tangents: Any, *, narrow: np.dtype) -> tuple[Array, Any]:
    dp, dr = tangents
    y = _joined.bind(*primals, narrow=narrow)
    if isinstance(dr, ad.Zero):
        return y, _fence.bind(dp)
    return y, dr if isinstance(dp, ad.Zero) else _joined.bind(dp, dr, narrow=narrow)


def _joined_transpose(ct: Any, *terms: Any, narrow: np.dtype) -> list[Any]:
    shared = ct if isinstance(ct, ad.Zero) else lax.optimization_barrier(ct.astype(narrow)).astype(ct.dtype)
    return [shared if ad.is_undefined_primal(term) else None for term in terms]


_joined = Partitioned("joined")
for _primitive in _joined.both:
    _primitive.def_impl(lambda p, residual, *, narrow: lax.add_p.bind(p, residual))
    _primitive.def_abstract_eval(lambda p, residual, *, narrow: lax.add_p.abstract_eval(p, residual)[0])
    ad.primitive_jvps[_primitive] = _joined_jvp
    ad.primitive_transposes[_primitive] = _joined_transpose
    batching.primitive_batchers[_primitive] = ft.partial(_batched, _primitive)
    mlir.register_lowering(_primitive, _lowered(lambda p, residual, *, narrow: _hidden(p) + residual))


_product = Partitioned("rounded_product")
for _primitive in _product.both:
    _primitive.def_impl(lax.mul_p.bind)
    _primitive.def_abstract_eval(lambda a, b: lax.mul_p.abstract_eval(a, b)[0])
    ad.defbilinear(_primitive, lambda ct, a, b: _product.bind(ct, b), lambda ct, a, b: _product.bind(a, ct))
    batching.primitive_batchers[_primitive] = ft.partial(_batched, _primitive)
    mlir.register_lowering(_primitive, _lowered(lambda a, b: _hidden(a * b)))


def _divided(a: Array, b: Array) -> Array:
    """a / b as XLA divides.

    Where all of b is one number, XLA moves a fence of b out of the broadcast, and multiplies by a reciprocal after
    all. A select by what a is has to stay.
    """
    b = _hidden(b)
    return _hidden(a / jnp.where(a == a, b, -b))


def _divided_on_gpus(a: Array, b: Array) -> Array:
    """a / b in float64, for in float32 XLA's code for GPUs has `div.full`, which is two units in the last place off.

    The quotient of two numbers of 24 bits is 2^-49 of its size away from the middle of two such numbers, so rounding
    twice gives what rounding once does. LLVM knows that too and would divide in float32 again, hence a factor of which
    it does not know that it is 1, n being any integer. `_hidden` is not enough: LLVM knows of some quotients that they
    are not NaN.
    """
    if a.dtype == np.float64:
        return _divided(a, b)
    n, one = lax.bitcast_convert_type(b.astype(np.float32), np.uint32), np.uint32(1)
    with jax.enable_x64(True):  # this runs while a program is lowered, where no transformation sees the wide types
        wide = (lax.convert_element_type(v, np.float64) for v in (a, b, (n * (n + one) & one) + one))
        dividend, divisor, factor = wide
        found = _hidden(lax.convert_element_type(dividend / divisor * factor, np.float32))
    return found if a.dtype == np.float32 else _hidden(found.astype(a.dtype))


_quotient = Partitioned("rounded_quotient")
for _primitive in _quotient.both:
    _primitive.def_impl(together(compat.operation(_primitive)))  # JAX's own operation is what a GPU's is
    _primitive.def_abstract_eval(lambda a, b: lax.div_p.abstract_eval(a, b)[0])
    batching.primitive_batchers[_primitive] = ft.partial(_batched, _primitive)
    mlir.register_lowering(_primitive, _lowered(_divided))
    for _platform in ("cuda", "rocm"):
        mlir.register_lowering(_primitive, _lowered(_divided_on_gpus), platform=_platform)


# ---- functions of one element ----------------------------------------------------------------------------------------


@jax.custom_jvp
def root(x: Any) -> Any:
    """√x, which XLA cannot combine with a division after it into a reciprocal root."""
    return rounded(jnp.sqrt(x))


@root.defjvp
def _root_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    y = root(*primals)
    return y, product(tangents[0], reciprocal(y + y))


@jax.custom_jvp
def reciprocal(x: Any) -> Any:
    """1 / x as the device has it: on GPUs an approximation, for which see `quotient`.

    XLA replaces some quotients, such as those by a broadcast array, by products with it, and others not.
    """
    return rounded(1 / rounded(x))


@reciprocal.defjvp
def _reciprocal_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    y = reciprocal(*primals)
    return y, product(tangents[0], -product(y, y))


@jax.custom_jvp
def quotient(a: Any, b: Any) -> Any:
    """a / b of two arrays of one dtype, rounded to nearest on every device."""
    return _quotient.bind(*broadcast_alike(a, b))


@quotient.defjvp
def _quotient_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    y, inverse = quotient(*primals), reciprocal(primals[1])
    return y, product(tangents[0], inverse) - product(tangents[1], product(y, inverse))


@ft.partial(jax.custom_jvp, nondiff_argnums=(1,))
def power(x: Any, exponent: float) -> Any:
    """x^exponent, always as a power: for known exponents such as 3 or -1/2 XLA would use products and roots."""
    e = jnp.asarray(exponent, x.dtype)
    return rounded(x ** jnp.where(x == x, e, -e))


@power.defjvp
def _power_jvp(exponent: float, primals: Any, tangents: Any) -> tuple[Array, Array]:
    slope = product(power(*primals, exponent - 1), jnp.asarray(exponent, primals[0].dtype))
    return power(*primals, exponent), product(tangents[0], slope)


LINE = 1024


def steady(function: Callable[[Array], Array], x: Array) -> Array:
    """A function of one element, with bits that do not depend on the array that the element is in.

    On CPUs XLA has several exponentials: in its vector loops, for the remainder of these loops, and, for large arrays,
    that of YNNPACK. So there a loop processes the elements in lines of a fixed length.
    """
    return lax.platform_dependent(x, cpu=ft.partial(_by_lines, function), default=function)


def _by_lines(function: Callable[[Array], Array], x: Array) -> Array:
    lines = max(2, -(-x.size // LINE))  # a loop of one line would be inlined
    filled = lax.pad(x.reshape(-1), jnp.ones((), x.dtype), [(0, lines * LINE - x.size, 0)])
    found = lax.map(function, filled.reshape(lines, LINE))
    return lax.slice(found.reshape(-1), (0,), (x.size,)).reshape(x.shape)


# ---- the one conversion ----------------------------------------------------------------------------------------------


def nearest(x: Array, dtype: Any) -> Array:
    """x in another dtype, of floats the nearest number, ties to even, rounded once.

    XLA on CPUs, as NumPy, converts float64 and int32 to the narrow types by way of float32 and so rounds twice: to
    bfloat16, 1 + 2^-8 + 2^-40 would become 1. On GPUs it gives float8 the largest number where NaN (e4m3fn) or infinity
    (e5m2) is due. A tangent is converted by XLA.
    """
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize <= 2
    if narrow and x.dtype == np.float64:
        return _converted(x, np.dtype(dtype), _narrowed)
    if narrow and x.dtype == np.int32:
        # Of what float32 does not hold, the low byte is one bit: to which side of the middle of two numbers x lies.
        sticky = jnp.where(x & 255 == 0, x, (x | 511) - 255)
        x = jnp.where((x < 2**24) & (x > -(2**24)), x, sticky)
    if narrow and np.dtype(dtype).itemsize == 1 and x.dtype != dtype:
        return _converted(x, np.dtype(dtype), _overflowing)
    return x.astype(dtype)


def nearest_number(x: float, dtype: Any) -> np.ndarray:
    """The same of a Python number."""
    with np.errstate(over="ignore", under="ignore"):
        if np.dtype(dtype).itemsize <= 2 and math.isfinite(x) and x:
            digits, least = _digits(dtype)
            unit = 2.0 ** (max(math.frexp(x)[1] - 1, least) - digits)
            x = math.copysign(round(x / unit) * unit, x)
        return np.asarray(x, dtype)


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _converted(x: Array, dtype: np.dtype, how: Callable[[Array, np.dtype], Array]) -> Array:
    return how(x, dtype)


@_converted.defjvp
def _converted_jvp(dtype: np.dtype, how: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _converted(*primals, dtype, how), tangents[0].astype(dtype)


def _narrowed(x: Array, dtype: np.dtype) -> Array:
    """A float64 x in a narrow dtype: XLA cuts its digits where it is normal there, and adding a large number below."""
    digits, least = _digits(dtype)
    x = rounded(x)
    large = jnp.asarray(1.5 * 2.0 ** (52 + least - digits), x.dtype)  # its last place is the least subnormal number
    below = rounded(jnp.abs(x) + large) - large  # XLA in JAX 0.10 would make one sum of the two
    normal = lax.reduce_precision(x, 11, digits)
    return jnp.where(jnp.abs(x) < 2.0**least, jnp.where(jnp.signbit(x), -below, below), normal).astype(dtype)


def _overflowing(x: Array, dtype: np.dtype) -> Array:
    """x in a float8 type: NaN or infinity where it rounds to no number of it; a tie goes to the even significand."""
    info = jnp.finfo(dtype)
    half = 2.0 ** (info.maxexp - 2 - info.nmant)  # of the distance from the largest number to the next one
    limit, size = float(info.max) + half, jnp.abs(x.astype(np.float32))
    odd = np.asarray(info.max, dtype).view(np.uint8) & 1
    beyond = size >= limit if odd else size > limit
    over = jnp.where(jnp.signbit(x), -jnp.inf, jnp.inf).astype(dtype)  # NaN where there is no infinity
    return jnp.where(beyond, over, x.astype(dtype))


def _digits(dtype: Any) -> tuple[int, int]:
    """The digits behind the point of a significand, and the exponent of the least normal number."""
    info = jnp.finfo(dtype)
    return info.nmant, int(info.minexp)
