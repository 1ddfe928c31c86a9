"""The fence between a product and a sum: bits against NumPy, which rounds every product."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxdnn as dnn
from jaxdnn._src.core import rounding
from jaxdnn._src.core.rounding import nearest, nearest_number, power, product, quotient, real, reciprocal, root, rounded
from jaxdnn._src.softmax import xla as formulas

pytestmark = pytest.mark.usefixtures("x64")
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
Form = Callable[[Callable[..., Any], Any, Any, Any], Any]
FORMS: dict[str, Form] = {
    "sum": lambda fence, a, b, c: fence(a * b) + c,
    "difference": lambda fence, a, b, c: c - fence(a * b),
    "two products": lambda fence, a, b, c: fence(a * b) + fence(b * c),
    "square": lambda fence, a, b, c: fence(a * a) + c,
    "constant": lambda fence, a, b, c: fence(a * a.dtype.type(1 / 3)) + c,
}


def drawn(dtype: Any, shape: tuple[int, ...] = (37, 65)) -> list[np.ndarray]:
    """Normal numbers; in float16 some products are subnormal."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.normal(size=shape).astype(dtype) for _ in range(3))
    return [a * np.asarray(2.0**-12, dtype) if dtype == np.float16 else a, b, c]


def same_bits(found: Any, expected: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    words = np.dtype(f"u{expected.itemsize}")
    np.testing.assert_array_equal(np.asarray(found).view(words), expected.view(words))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_rounded_before_they_are_added(dtype: Any, form: str):
    operands = drawn(dtype)
    found = jax.jit(lambda *v: FORMS[form](rounded, *v))(*map(jnp.asarray, operands))
    same_bits(found, FORMS[form](lambda v: v, *operands))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_whole_numbers_are_rounded_too(dtype: Any):
    """Of a float that was an integer compilers know that it is not NaN, so they see through a select on that."""
    n, m = (np.random.default_rng(i).integers(-128, 128, (37, 65)).astype(np.int8) for i in range(2))
    third, fifth = np.asarray(1 / 3, dtype), np.asarray(1 / 5, dtype)

    def sums(n: Any, m: Any) -> Any:
        return product(real(n, dtype), jnp.asarray(third)) + product(real(m, dtype), jnp.asarray(fifth))

    found = jax.jit(sums)(n, m)
    same_bits(found, n.astype(dtype) * third + m.astype(dtype) * fifth)


@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.int32])
def test_numbers_pass_unchanged(dtype: Any):
    if np.issubdtype(dtype, np.integer) or np.dtype(dtype).itemsize == 1:
        values = np.arange(256).astype(np.uint8).view(np.int8).astype(np.int32)
        values = values.astype(dtype) if np.issubdtype(dtype, np.integer) else values.astype(np.int8).view(dtype)
    else:
        values = np.asarray([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, float(ml_dtypes.finfo(dtype).max)], dtype)
    numbers = values == values
    found = np.asarray(jax.jit(rounded)(values.reshape(2, -1))).reshape(-1)
    same_bits(found[numbers], values[numbers])
    assert np.all(found[~numbers] != found[~numbers])


@pytest.mark.parametrize("dtype", DTYPES)
def test_constants_in_another_order_of_dimensions(dtype: Any):
    """XLA's evaluator reads the bits of such a constant in the wrong order."""
    x, rows = drawn(dtype, (3, 4, 5))[1], np.asarray([2, 0, 1, 3])
    same_bits(jax.jit(lambda: rounded(jnp.asarray(x)[:, rows]))(), x[:, rows])


def test_derivatives_and_vmap():
    a, b, c = map(jnp.asarray, drawn(np.float64, (3, 5)))
    value, gradients = jax.value_and_grad(lambda a, b: jnp.vdot(c, product(a, b)), (0, 1))(a, b)
    np.testing.assert_allclose(value, jnp.vdot(c, a * b))
    np.testing.assert_array_equal(gradients[0], c * b)
    np.testing.assert_array_equal(gradients[1], c * a)
    np.testing.assert_array_equal(jax.jvp(rounded, (a,), (b,))[1], b)
    np.testing.assert_array_equal(jax.vmap(product, 1)(a, b), (a * b).T)


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "product": product,
    "joined": lambda a, b: rounding.joined(a, b, a.dtype),
    "quotient": quotient,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, None), (0, 1)])
def test_gradients_in_operands_that_vmap_does_not_map(axes: tuple[Any, Any], operation: str):
    """Each operand's has its shape, and is the sum over the axis that is mapped."""
    function, size = OPERATIONS[operation], 3
    rng = np.random.default_rng(0)
    plain = [rng.integers(1, 9, size=(5,)) / 2 if i is None else rng.integers(1, 9, (size, 5)) / 2 for i in axes]
    given = [jnp.asarray(v.T if i == 1 else v) for v, i in zip(plain, axes, strict=True)]
    cotangent = jnp.asarray(rng.integers(-4, 4, size=(size, 5)), float)

    @jax.jit
    def mapped(*arrays: Any) -> Any:
        y, pull = jax.vjp(jax.vmap(function, axes), *arrays)
        return y, pull(cotangent)

    y, gradients = mapped(*given)
    rows = [np.broadcast_to(v, (size, 5)) for v in plain]
    looped = [jax.vjp(function, *map(jnp.asarray, pair)) for pair in zip(*rows, strict=True)]
    np.testing.assert_array_equal(y, [v for v, _ in looped])
    each = zip(*(pull(ct) for (_, pull), ct in zip(looped, cotangent, strict=True)), strict=True)
    for found, wanted, array, axis in zip(gradients, each, given, axes, strict=True):
        assert found.shape == array.shape
        of_rows = np.stack(wanted)
        whole = of_rows.sum(0) if axis is None else of_rows.T if axis == 1 else of_rows
        np.testing.assert_allclose(found, whole, rtol=1e-12)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_narrow_operands_that_vmap_does_not_map_on_several_devices(operation: str):
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))
    a, b = jnp.arange(1, 33, dtype=jnp.bfloat16).reshape(8, 4), jnp.full((4,), 3, jnp.bfloat16)
    a = jax.device_put(a, NamedSharding(mesh, PartitionSpec("i")))
    mapped = jax.vmap(OPERATIONS[operation], (0, None))
    assert jnp.array_equal(jax.jit(mapped)(a, b), OPERATIONS[operation](a, jnp.broadcast_to(b, a.shape)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_derivatives_are_rounded_too(dtype: Any):
    """Forward and backward, and before what the caller adds to a tangent or a cotangent."""
    a, b, c = drawn(dtype)

    @jax.jit
    def run(a: Any, b: Any, c: Any) -> Any:
        pull = jax.vjp(product, a, b)[1]
        return [v + c for v in pull(a)], jax.jvp(product, (a, b), (c, a))[1], jax.vjp(rounded, a)[1](a * b)[0] + c

    (of_a, of_b), tangent, through = run(*map(jnp.asarray, (a, b, c)))
    same_bits(of_a, a * b + c)
    same_bits(of_b, a * a + c)
    same_bits(tangent, c * b + a * a)
    same_bits(through, a * b + c)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "root": (root, lambda a, b: np.sqrt(a), lambda a, b: (0.5 / np.sqrt(a), 0 * b)),
    "reciprocal": (reciprocal, lambda a, b: 1 / a, lambda a, b: (-1 / a**2, 0 * b)),
    "quotient": (quotient, lambda a, b: a / b, lambda a, b: (1 / b, -a / b**2)),
    "square": (lambda a: power(a, 2.0), lambda a, b: a**2, lambda a, b: (2 * a, 0 * b)),
    "power": (lambda a: power(a, -0.75), lambda a, b: a**-0.75, lambda a, b: (-0.75 * a**-1.75, 0 * b)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_one_element(name: str):
    """Values and slopes, the same bits from one operation after another and in one program."""
    ours, theirs, slopes = FUNCTIONS[name]
    a, b = (np.abs(v) + 0.1 for v in drawn(np.float64)[:2])
    given = (a, b) if name == "quotient" else (a,)

    def run(*arrays: Any) -> Any:
        y, pull = jax.vjp(ours, *arrays)
        return y, pull(y)

    y, found = jax.jit(run)(*given)
    np.testing.assert_allclose(y, theirs(a, b), rtol=1e-14)
    for one, other in zip(found, slopes(a, b), strict=False):
        np.testing.assert_allclose(one, theirs(a, b) * other, rtol=1e-13)
    narrow = [jnp.asarray(v, jnp.float32) for v in given]
    for one, other in zip(jax.tree.leaves(jax.jit(run)(*narrow)), jax.tree.leaves(run(*narrow)), strict=True):
        same_bits(one, np.asarray(other))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_quotient_by_one_number_for_all_is_a_quotient(dtype: Any):
    """XLA would multiply by the reciprocal, and did where the number is known only when the program runs."""
    a = drawn(dtype)[0]
    for b in (np.full((1,) * a.ndim, 0.7, dtype), np.asarray(3, dtype)):
        same_bits(jax.jit(lambda a, b: quotient(a, jnp.broadcast_to(b, a.shape)))(a, b), a / b)
    same_bits(jax.jit(lambda a: quotient(a, jnp.full_like(a, 3)))(a), a / dtype(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_quotients_of_gpus_are_rounded_to_nearest(dtype: Any):
    """In float64, and not narrowed at once: LLVM would make that a quotient in float32, which GPUs approximate."""
    a, b, _ = drawn(dtype)
    text = jax.jit(quotient).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    (made,) = re.findall(r"(%\w+) = stablehlo\.divide .*f64>", text)
    assert text.count("stablehlo.divide") == 1
    assert f"stablehlo.convert {made} " not in text
    run = jax.jit(rounding._divided_on_gpus)
    same_bits(run(a, b), a / b)
    special = np.meshgrid(*[np.asarray([0.0, -0.0, 1.0, 3.0, np.inf, -np.inf, np.nan], dtype)] * 2)
    with np.errstate(all="ignore"):
        found, wanted = run(*special), special[0] / special[1]
    np.testing.assert_array_equal(np.asarray(found, np.float64), wanted.astype(np.float64))
    assert (np.signbit(found) == np.signbit(wanted))[wanted == wanted].all()


def test_a_product_with_a_tangent_is_rounded_and_linear():
    a, v, c = drawn(np.float32)
    found = jax.jit(lambda a, v, c: product(a, v) + c)(*map(jnp.asarray, (a, v, c)))
    same_bits(found, a * v + c)
    along = jnp.asarray(a)
    (transposed,) = jax.linear_transpose(lambda v: product(along, v), along)(jnp.asarray(c))
    same_bits(transposed, a * c)


def halved(x: np.ndarray) -> np.ndarray:
    """The sum along the first axis, of a power of two of elements, as the engine `ordered` adds."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x


@pytest.mark.parametrize("rows", [2, 16, 64])
def test_ordered_softmax_rounds_its_products(rows: int):
    """Exponentials are taken as they come; every product and sum after them is NumPy's, also before a caller's sum."""
    level = {"axis": 0, "determinism": "mesh_invariant"}
    x, dy, c = drawn(np.float32, (rows, 9))
    exp = jax.jit(lambda z: formulas.steady(jnp.exp, z))

    @jax.jit
    def run(x: Any, dy: Any, c: Any) -> Any:
        back = dnn.softmax_dgrad(dy, x, **level), dnn.softmax_dgrad(dy, x, algorithm="log", **level)
        with dnn.determinism("mesh_invariant"):
            along = jax.jvp(lambda v: dnn.logsumexp(v, axis=0), (x,), (dy,))[1]
        return dnn.softmax(x, **level), dnn.softmax(x, **level) + c, *back, along

    y, added, back, back_log, along = map(np.asarray, run(*map(jnp.asarray, (x, dy, c))))
    e = np.asarray(exp(x - x.max(0)))
    expected = e * (np.float32(1) / halved(e))
    same_bits(y, expected)
    same_bits(added, expected + c)
    same_bits(back, x * (dy - halved(x * dy)))
    same_bits(back_log, dy - np.asarray(exp(x)) * halved(dy))
    same_bits(along, halved(expected * dy)[0])


# ---- the one conversion ----------------------------------------------------------------------------------------------

NARROW = [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def ties(dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Every middle of two neighbours, the doubles next to it, and what they round to; none that CPUs take for zero."""
    words = np.dtype(f"u{np.dtype(dtype).itemsize}")
    numbers = np.arange(1 << 8 * words.itemsize, dtype=np.uint32).astype(words).view(dtype)
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    numbers = numbers[np.argsort(numbers.astype(np.float64), kind="stable")]
    values = numbers.astype(np.float64)
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    even = np.where(numbers[:-1].view(words) % 2 == 0, low, high)
    x = np.concatenate([middle, np.nextafter(middle, low), np.nextafter(middle, high)])
    expected = np.concatenate([even, low, high])
    kept = (np.tile(low < high, 3)) & (np.abs(x) > 2.0**-125)
    return x[kept], np.copysign(expected, x)[kept]


@pytest.mark.parametrize("dtype", NARROW)
def test_float64_becomes_the_nearest_number(dtype: Any):
    x, expected = ties(dtype)
    assert np.any(x.astype(np.float32).astype(dtype).astype(np.float64) != expected)  # by way of float32 it is not
    same_bits(jax.jit(lambda x: nearest(x, dtype))(x), expected.astype(dtype))
    same_bits(jax.vmap(lambda x: nearest(x, dtype))(jnp.asarray(x)), expected.astype(dtype))
    at_once = np.asarray([nearest_number(float(v), dtype) for v in x[::97]])
    same_bits(at_once, expected[::97].astype(dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_what_is_no_finite_number_is_converted_as_by_the_type_itself(dtype: Any):
    x = np.asarray([0.0, -0.0, np.inf, -np.inf, np.nan, 1e300, -1e300, 1e-300])
    with np.errstate(over="ignore", under="ignore"):
        expected = x.astype(dtype).astype(np.float64)
    for found in (jax.jit(lambda x: nearest(x, dtype))(x), np.asarray([nearest_number(float(v), dtype) for v in x])):
        np.testing.assert_array_equal(np.asarray(found).astype(np.float64), expected)
        assert np.signbit(np.asarray(found).astype(np.float64))[:2].tolist() == [False, True]


def test_int32_becomes_the_nearest_bfloat16():
    near = (2**30 + np.arange(-3, 4)[:, None] + 2**22 * np.arange(1, 128)).reshape(-1)
    x = np.concatenate([near, -near, [2**24 + 2**16 + 1, 2**24 - 1, 2**31 - 1, -(2**31), 0, -7]]).astype(np.int32)
    found = jax.jit(lambda x: nearest(x, jnp.bfloat16))(x)
    same_bits(found, np.asarray([nearest_number(float(v), jnp.bfloat16) for v in x]))


def test_derivatives_of_a_conversion():
    x, v = (jnp.asarray(a[:5]) for a in drawn(np.float64, (5,))[1:])
    tangent = jax.jvp(lambda x: nearest(x, jnp.bfloat16), (x,), (v,))[1]
    same_bits(tangent, np.asarray(v.astype(jnp.bfloat16)))
    (back,) = jax.vjp(lambda x: nearest(x, jnp.bfloat16), x)[1](tangent)
    same_bits(back, np.asarray(tangent.astype(jnp.float64)))


TIE = 1 + 2.0**-8 + 2.0**-40  # bfloat16's 1 + 2^-7, and its 1 where float32 comes in between
LEVEL = {"out_dtype": jnp.bfloat16}
ROUTES: dict[str, Callable[[Any], Any]] = {
    "conv": lambda x: dnn.conv(x, jnp.ones((1, 1, 1, 1)), **LEVEL),
    "conv, blended": lambda x: dnn.conv(x, jnp.ones((1, 1, 1, 1)), alpha=0.5, beta=0.5, prior=x, **LEVEL),
    "transform": lambda x: dnn.transform(x, **LEVEL),
    "scale": lambda x: dnn.scale(x / 2, alpha=2, **LEVEL),
    "add": lambda x: dnn.add(jnp.zeros((1, 1, 1, 1)), x, **LEVEL),
    "fill": lambda x: dnn.fill(x, value=x[0, 0, 0, 0], **LEVEL),
    "reduce": lambda x: dnn.reduce(x, axis=3, keepdims=True, **LEVEL),
    "resample": lambda x: dnn.resample(x, output_sizes=(2, 3), **LEVEL),
    "col2im": lambda x: dnn.col2im(x, x.shape, window=1, **LEVEL),
    "pool max": lambda x: dnn.pool(x, window=1, **LEVEL),
    "pool average": lambda x: dnn.pool(x, window=1, mode="average", **LEVEL),
    "pool_dgrad": lambda x: dnn.pool_dgrad(x, x, window=1, **LEVEL),
    "pool_dgrad average": lambda x: dnn.pool_dgrad(x, x, window=1, mode="average", **LEVEL),
    "adaptive_pool": lambda x: dnn.adaptive_pool(x, output_sizes=(2, 3), mode="average", **LEVEL),
    "activation": lambda x: dnn.activation(x, **LEVEL),
    "activation_dgrad": lambda x: dnn.activation_dgrad(x, x, **LEVEL),
    "softmax": lambda x: dnn.softmax(jnp.append(-512 * x, 0 * x, 3), algorithm="log", **LEVEL)[..., :1] / -512,
    "softmax, blended": lambda x: dnn.softmax(0 * x, alpha=x[0, 0, 0, 0], **LEVEL),
    "logsumexp": lambda x: dnn.logsumexp(x, axis=3, **LEVEL),
    "norm": lambda x: dnn.layer_norm(jnp.zeros(x.shape), bias=x[0, 0, 0], **LEVEL),
    "batch_norm_inference": lambda x: dnn.batch_norm_inference(x, jnp.zeros(1), jnp.ones(1), eps=0.0, **LEVEL),
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_rounds_float64_once(route: str):
    found = np.asarray(jax.jit(ROUTES[route])(np.full((1, 2, 3, 1), TIE))).astype(np.float64)
    assert np.all(found == 1 + 2.0**-7)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_float8_overflows_to_nan_or_infinity(dtype):
    """As ml_dtypes has it. XLA's own conversion on GPUs stops at the largest number, found by random calls."""
    largest = float(ml_dtypes.finfo(dtype).max)
    x = np.array([1, 1.03, 1.03574, 1.0715, 2, 1e30, np.inf, np.nan, 0, 0.3], np.float32) * np.float32(largest)
    x = np.concatenate([x, -x, np.array([464, 464.1, 61440, 61439], np.float32)])
    with np.errstate(over="ignore"):
        expected = x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(nearest(jnp.asarray(x), dtype)).astype(np.float32), expected)
    tangent = jax.jvp(lambda v: nearest(v, dtype), (jnp.asarray(x),), (jnp.ones_like(jnp.asarray(x)),))[1]
    np.testing.assert_array_equal(np.asarray(tangent).astype(np.float32), 1)


@pytest.mark.parametrize("axis", [1, 2])
def test_no_axis_is_sharded_by_a_part_of_a_mesh_axis(axis):
    """12 rows on 4 devices become 6 by 2, each of which XLA would shard over 2: JAX has no name for such a sharding."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    x, dy = jnp.ones((8, 6, 6, 24), jnp.bfloat16), jnp.ones((8, 12, 12, 6), jnp.bfloat16)
    dy = jax.device_put(dy, NamedSharding(mesh, PartitionSpec(*("d" if i == axis else None for i in range(4)))))
    assert (jax.jit(lambda x, dy: jax.vjp(dnn.pixel_shuffle, x)[1](dy)[0])(x, dy) == 1).all()


def test_lengths_that_no_mesh_axis_divides_on_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 6, 6, 24), jnp.bfloat16), NamedSharding(mesh, PartitionSpec("d")))
        y = jax.jit(lambda x: dnn.add(x, x, alpha=0.5, beta=0.5))(x)
    assert jax.typeof(y).sharding.spec[0] == "d"
    assert (y == 1).all()
