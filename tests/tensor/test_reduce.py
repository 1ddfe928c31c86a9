"""Reductions against their definition: bits where an order is asked for, a computed bound where it is XLA's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.core import tolerance
from tests.tensor.data import DTYPES, X, agree, data

OPS = ["add", "mul", "min", "max", "amax", "avg", "norm1", "norm2", "mul_no_zeros", "add_squares", "log_add"]
EXTREMES = ["min", "max", "amax"]
PORTABLE: dict[str, Any] = {"determinism": "portable"}


each_op = pytest.mark.parametrize("op", OPS)


def terms(op: str, dtype: str, *shape: int, seed: int = 0) -> np.ndarray:
    """What may be reduced by an op: for a logarithm of sums numbers that are positive."""
    x = data(dtype, *shape, seed=seed)
    return abs(x) + x.dtype.type(1) if op == "log_add" else x


@each_op
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_at_the_strongest_level(op: str, dtype: str):
    x = terms(op, dtype, *X)
    for axes in (None, 0, (1, 2), -1, (3, 1), ()):
        agree("reduce", x, op=op, axis=axes, choices=PORTABLE)
    agree("reduce", x, op=op, axis=(1, 3), keepdims=True, alpha=0.3, out_dtype=np.float32, choices=PORTABLE)
    agree("reduce", x, op=op, axis=1, beta=-0.7, prior=data(dtype, 2, 4, 3), choices=PORTABLE)


@each_op
def test_bits_operation_by_operation(op: str):
    agree("reduce", terms(op, "bfloat16", *X), op=op, axis=(3, 1), choices=PORTABLE, eager=True)


@pytest.mark.parametrize("op", ["add", "avg", "norm1", "norm2", "mul", "mul_no_zeros", "add_squares", "log_add"])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000])
def test_bits_of_many_lengths(op: str, n: int):
    for shape, axes in (((n, 5), 0), ((3, n), 1)):
        agree("reduce", terms(op, "float32", *shape, seed=n), op=op, axis=axes, choices=PORTABLE)


@pytest.mark.parametrize("op", EXTREMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_and_indices(op: str, dtype: str):
    x = data(dtype, 5, 8, 6)
    for axes in (None, (0, 2), 1, (1, 2)):
        agree("reduce", x, op=op, axis=axes, return_indices=True)
        agree("reduce", x, op=op, axis=axes, return_indices="last", keepdims=True)


@pytest.mark.parametrize("op", EXTREMES)
def test_indices_are_numpys(op: str):
    x = np.random.default_rng(0).integers(-9, 9, (4, 30)).astype(np.float32)
    kinds = (True, "last")
    found = jax.jit(lambda x: [dnn.reduce(x, op=op, axis=1, return_indices=kind)[1] for kind in kinds])(x)
    place = {"min": lambda x: x.argmin(1), "max": lambda x: x.argmax(1), "amax": lambda x: abs(x).argmax(1)}[op]
    for at, wanted in zip(found, (place(x), 29 - place(x[:, ::-1])), strict=True):
        np.testing.assert_array_equal(at, wanted)
        assert at.dtype == np.int32
    assert not np.array_equal(*found)


@pytest.mark.parametrize("nan", ["propagate", "ignore"])
def test_the_last_index_among_nan_and_zeros_of_both_signs(nan: str):
    x = np.array([[np.nan, 5, np.nan, 5, -7], [np.nan] * 5, [-1, 0.0, -0.0, -3, -4]], np.float32)
    _, at = agree("reduce", x, op="max", axis=1, nan=nan, return_indices="last")
    assert at.tolist() == [2 if nan == "propagate" else 3, 4, 2]


def test_sums_of_squares():
    """NumPy's in float64; their gradient is 2 x; and unlike those of norm2 they overflow."""
    x = data("float32", 5, 33)
    square = lambda x: dnn.reduce(x, op="add_squares", axis=1)
    y, gradient = jax.jit(lambda x: (square(x), jax.grad(lambda x: square(x).sum())(x)))(x)
    np.testing.assert_allclose(y, (x.astype(np.float64) ** 2).sum(1), rtol=33 * 2.0**-24)
    np.testing.assert_array_equal(gradient, 2 * x)
    assert dnn.reduce(jnp.array([1e20, 1.0]), op="add_squares") == np.inf
    assert dnn.reduce(jnp.array([100, -100], jnp.int8), op="add_squares", out_dtype=jnp.int32) == 20000
    assert dnn.reduce(jnp.ones((0, 3)), op="add_squares", axis=0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logarithms_of_sums(dtype: str, x64: None):
    """NumPy's, to four units in the last place, for sums of any size and near 1; and the derivative, 1 / Σ x."""
    rng = np.random.default_rng(3)
    info = jnp.finfo(dtype)
    sums = np.exp2(rng.uniform(info.minexp, info.maxexp - 1, 4000))
    x = np.concatenate([sums, 1 + np.arange(-500, 500) * float(info.eps), 1 + rng.normal(size=1000) / 8])
    x = x.astype(dtype)[:, None]
    run = jax.jit(lambda x: dnn.reduce(x, op="log_add", axis=1, **PORTABLE))
    wanted = np.log(x[:, 0].astype(np.longdouble))
    unit = np.abs(np.spacing(wanted.astype(dtype)))
    assert np.max(np.abs(np.asarray(run(x)) - wanted) / np.where(unit == 0, 1, unit)) < 4
    gradient = jax.jit(jax.grad(lambda x: run(x).sum()))(x[:50].reshape(5, 10))
    np.testing.assert_allclose(gradient, 1 / x[:50].reshape(5, 10).sum(1, keepdims=True).repeat(10, 1), rtol=1e-5)


@pytest.mark.parametrize("level", ["run_to_run", "portable"])
def test_logarithms_of_sums_that_are_not_positive(level: str):
    x = np.array([[1.0, -1.0], [-1.0, 0.5], [np.inf, 1.0], [np.nan, 1.0], [-np.inf, 1.0], [-0.0, -0.0]], np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.log(x.sum(1))
    np.testing.assert_array_equal(dnn.reduce(x, op="log_add", axis=1, determinism=level), wanted)
    assert dnn.reduce(jnp.ones((0, 2)), op="log_add", axis=0, determinism=level).tolist() == [-np.inf] * 2


@pytest.mark.parametrize("op", EXTREMES)
@pytest.mark.parametrize("nan", ["propagate", "ignore"])
def test_nan_rules(op: str, nan: str):
    x = np.array([[3, np.nan, 5, -7], [np.nan] * 4, [1, 2, 2, -2], [-np.inf, 0, -0.0, np.inf]], np.float32)
    y, at = agree("reduce", x, op=op, axis=1, nan=nan, return_indices=True)
    if nan == "propagate":
        assert np.isnan(y[:2]).all()
        assert at[:2].tolist() == [1, 0]
    else:
        assert y[0] == {"min": -7, "max": 5, "amax": 7}[op]
        assert np.isnan(y[1])
    zeros = jax.jit(lambda x: dnn.reduce(x, op=op))(np.array([-0.0, 0.0, -0.0], np.float32))
    assert not np.signbit(np.asarray(zeros))


@pytest.mark.parametrize("axes", [(1, 2), (2,), (0, 1)])
def test_nan_is_found_among_infinities(axes: tuple[int, ...]):
    """XLA's own extremes lose it on CPUs."""
    x = data("float32", 7, 33, 40)
    x[::2, ::3, ::5] = np.inf
    x[::3, ::5, ::2] = -np.inf
    x[3, 20, 37] = -np.nan
    spoilt = np.isnan(x).any(axes)
    for op in EXTREMES:
        np.testing.assert_array_equal(np.isnan(jax.jit(lambda x, op=op: dnn.reduce(x, op=op, axis=axes))(x)), spoilt)


def test_an_index_beyond_what_float32_holds():
    """Up to 2^24 elements the least index is found among floats."""
    for n in (2**24, 2**24 + 2):
        x = np.zeros(n, np.float32)
        x[-1] = 1
        _, at = jax.jit(lambda x: dnn.reduce(x, op="max", return_indices=True))(x)
        assert at == n - 1


@pytest.mark.parametrize("op", EXTREMES)
def test_looking_for_nan_stores_nothing(op: str):
    """Of x's size XLA for CPUs makes no array: it stored what `any` was taken of."""
    text = str(jax.jit(lambda x: dnn.reduce(x, op=op, axis=(0, 1))).lower(jnp.ones((64, 80, 8))).compile().as_text())
    entry = text[text.index("ENTRY") :]
    assert "8]{2,1,0} parameter" in entry
    assert "80,8]{2,1,0} fusion" not in entry


@each_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_default_is_within_its_bound(op: str, dtype: str):
    """Sums by the bound for an unknown order; products by (1 + u)^n - 1; square roots and quotients by u more."""
    x = terms(op, dtype, 4, 300) if "mul" not in op else data(dtype, 4, 20)
    golden = reference.reduce(x, op=op, axis=1)
    wide, n, u = x.astype(np.float64), x.shape[1], 2.0**-24
    rule = tolerance.ACCUMULATIONS["float32"]
    if op in EXTREMES:
        error = np.zeros(4)
    elif op in ("mul", "mul_no_zeros"):
        error = abs(golden) * ((1 + u) ** n - 1)
    elif op == "norm2":
        squares = (wide**2).sum(1)
        error = rule.error(squares, squares, n) / (2 * golden) * (1 + 1e-3) + u * golden
    elif op == "log_add":
        error = rule.error(wide.sum(1), wide.sum(1), n) / wide.sum(1) * (1 + 1e-3) + 2 * u * abs(golden)
    else:
        added = {"norm1": abs(wide), "add_squares": wide**2}.get(op, wide)
        size, exact = n if op == "avg" else 1, op != "add_squares"
        error = rule.error(added.sum(1), abs(added).sum(1), n, exact_products=exact) / size
        error = error + u * abs(golden) * (size > 1)
    found = tolerance.compare(np.asarray(dnn.reduce(x, op=op, axis=1)), golden, error)
    assert found.passed, found.message


def test_norm2_neither_overflows_nor_underflows():
    run = jax.jit(lambda x: dnn.reduce(x, op="norm2"))
    for size in (1e30, 1e-30, 3e38, 1e-37):
        x = np.array([[3 * size / 5, 4 * size / 5]], np.float32)
        np.testing.assert_allclose(run(x), np.sqrt((x.astype(np.float64) ** 2).sum()), rtol=2.0**-22)
    found = [float(run(jnp.array(v))) for v in ([np.inf, 1.0], [np.nan, np.inf], [0.0, 0.0])]
    assert found[0] == np.inf
    assert np.isnan(found[1])
    assert found[2] == 0
    assert jax.jit(jax.grad(run))(jnp.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("op", EXTREMES)
def test_gradient_goes_to_the_first(op: str):
    x = jnp.array([[2.0, -5.0, 5.0], [5.0, -5.0, 5.0]])
    found = jax.jit(jax.grad(lambda x: dnn.reduce(x, op=op).sum()))(x)
    wanted = {"min": [[0, 1, 0], [0, 0, 0]], "max": [[0, 0, 1], [0, 0, 0]], "amax": [[0, -1, 0], [0, 0, 0]]}[op]
    assert found.tolist() == wanted


def test_products_with_zeros_have_their_derivative():
    x = jnp.array([2.0, 0.0, 3.0])
    for level in ("fast", "portable"):

        def product(x: Any, op: str = "mul", level: str = level) -> Any:
            return dnn.reduce(x, op=op, determinism=level)

        assert jax.jit(jax.grad(product))(x).tolist() == [0, 6, 0]
        assert jax.jit(jax.grad(lambda x: product(x, "mul_no_zeros")))(x).tolist() == [3, 0, 2]
        assert jax.jit(jax.hessian(product))(x)[1].tolist() == [3, 0, 2]


def test_nothing_to_reduce():
    x = jnp.ones((0, 3))
    assert [float(dnn.reduce(x, op=op, axis=0)[0]) for op in ("add", "mul", "norm1", "norm2")] == [0, 1, 0, 0]
    assert dnn.reduce(x, axis=0, determinism="portable").tolist() == [0, 0, 0]
    assert dnn.reduce(x, axis=1).shape == (0,)


@pytest.mark.parametrize("op", ["add", "avg", "norm2"])
def test_rows_do_not_depend_on_each_other(op: str):
    x = data("float32", 33, 129)
    run = jax.jit(lambda x: dnn.reduce(x, op=op, axis=1, **PORTABLE))
    whole = run(x)
    spoilt = np.where(np.arange(33)[:, None] == 5, x, np.nan).astype(np.float32)
    assert run(spoilt)[5] == whole[5]
    for rows in (1, 2, 7, 32):
        np.testing.assert_array_equal(run(x[:rows]), whole[:rows])
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda x: dnn.reduce(x, op=op, **PORTABLE)))(x), whole)


def test_constants_are_folded_rightly():
    """XLA folds what is made of constants, and does so wrongly for the bits of some arrays."""
    x, rows = data("float32", 2, 6, 2), np.array([0, 1, 1, 5])
    for op in OPS:
        folded = jax.jit(lambda op=op: dnn.reduce(jnp.asarray(x)[:, rows], op=op, axis=2, **PORTABLE))()
        run = jax.jit(lambda x, op=op: dnn.reduce(x, op=op, axis=2, **PORTABLE))
        np.testing.assert_array_equal(folded, run(x[:, rows]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "float16", "float8_e5m2", "int32"])
def test_norm2_of_rows_of_any_size(dtype: str, x64: None):
    """Rows that need scaling beside rows that do not: of each alone the bits are the same, and right to its bound."""
    info = jnp.finfo(dtype) if dtype != "int32" else None
    least, most = (float(info.tiny), float(info.max) / 64) if info else (1.0, 2.0**27)
    base = np.random.default_rng(2).uniform(1, 2, (7, 33))
    sizes = np.asarray([1.0, 2 * least, most, 0.0, 3.0, least**0.5, most**0.5])
    x = np.asarray(base * sizes[:, None]).astype(jnp.dtype(dtype))
    norm = {
        level: jax.jit(lambda x, level=level: dnn.reduce(x, op="norm2", axis=1, determinism=level))
        for level in ("run_to_run", "portable")
    }
    wide = x.astype(np.longdouble) if dtype == "float64" else x.astype(np.float64)
    exact = np.sqrt((wide * wide).sum(1))
    # 33 roundings of a square and of sums, half of which a root keeps, the root's own, and that of a conversion.
    unit = float(jnp.finfo("float64" if dtype == "float64" else "float32").eps) / 2
    bound = exact * (18 * unit / (1 - 18 * unit))
    if dtype not in ("float32", "float64"):
        bound += (exact + bound) * (float(info.eps) / 2) if info else 0.5
    for of_level in norm.values():
        assert np.all(np.abs(np.asarray(of_level(x)).astype(exact.dtype) - exact) <= bound)
    found, mapped = norm["portable"], jax.vmap(lambda row: norm["portable"](row[None])[0])
    np.testing.assert_array_equal(mapped(jnp.asarray(x)), found(x))
    for i in range(len(x)):
        np.testing.assert_array_equal(found(x[i : i + 1])[0], found(x)[i])


ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: dnn.reduce(jnp.ones(2), op="median"), ValueError, "`op` must be one of 'add', .*, got 'median'"),
    (
        lambda: dnn.reduce(jnp.ones(2), axis=1),
        ValueError,
        "`axis` must be made of axes from -1 to 0 of `x`, got 1",
    ),
    (lambda: dnn.reduce(jnp.ones((2, 2)), axis=(0, -2)), ValueError, "`axis` must name every axis once"),
    (
        lambda: dnn.reduce(jnp.ones(2), return_indices=True),
        ValueError,
        "`return_indices` other than its default",
    ),
    (
        lambda: dnn.reduce(jnp.ones(2), nan="ignore"),
        ValueError,
        "`nan` other than its default needs op",
    ),
    (lambda: dnn.reduce(jnp.ones(2), op="max", nan="no"), ValueError, "`nan` must be one of 'propagate', 'ignore'"),
    (
        lambda: dnn.reduce(jnp.ones((0, 2)), op="max", axis=0),
        ValueError,
        "`x` must have elements along the axes",
    ),
    (lambda: dnn.reduce(jnp.ones(2), beta=1.0, prior=jnp.ones(2)), ValueError, r"`prior` must have shape \(\)"),
    (lambda: dnn.reduce(jnp.ones(2, bool)), TypeError, "`x` must have one of the dtypes"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call: Callable[[], Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        call()


def test_the_derivative_of_norm1_at_zero_is_zero():
    gradient = jax.grad(lambda x: dnn.reduce(x, op="norm1"))
    np.testing.assert_array_equal(gradient(jnp.array([-2.0, 0.0, -0.0, 3.0])), [-1, 0, 0, 1])


@pytest.mark.parametrize("size", [1e38, 3e37, 1.0, 1e-30])
def test_the_gradient_of_norm2_depends_on_no_scale(size: float):
    x = jnp.array([[0.6, 0.8], [-0.8, 0.6]]) * size
    got = jax.jit(jax.grad(lambda x: dnn.reduce(x, op="norm2", axis=1).sum()))(x)
    np.testing.assert_allclose(got, [[0.6, 0.8], [-0.8, 0.6]], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keepdims": "no"}, "`keepdims` must be True or False, got 'no'"),
        ({"op": "max", "return_indices": 1}, "`return_indices` must be True, False or 'last', got 1"),
        ({"op": "max", "return_indices": "first"}, "`return_indices` must be True, False or 'last', got 'first'"),
        ({"out_dtype": np.ones(3)}, r"`out_dtype` must be a dtype, got an array of shape \(3,\)"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=message):
        dnn.reduce(jnp.ones((2, 3)), **options)


@each_op
def test_a_number_of_python_has_derivatives(op: str):
    by = jax.grad(lambda x: dnn.reduce(x, op=op, axis=None))
    assert by(2.0) == by(jnp.float32(2)) == {"add_squares": 4, "log_add": 0.5}.get(op, 1)


@pytest.mark.parametrize("axis", [0, 1])
def test_products_that_underflow_keep_their_sign_where_their_axis_is_sharded(axis: int):
    """XLA gathers such an axis by adding zeros to what is elsewhere, and -0 + 0 is +0."""
    x = jnp.asarray(1e-2 * np.random.default_rng(0).normal(size=(8, 6, 10)), jnp.float16)
    product = jax.jit(lambda x: dnn.reduce(x, op="mul", axis=(0, 1), determinism="mesh_invariant"))
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")
    spec = ["d" if a == axis else None for a in range(3)]
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    alone = np.asarray(product(x))
    assert np.signbit(alone).any()
    np.testing.assert_array_equal(alone.view(np.uint16), np.asarray(product(spread)).view(np.uint16))
