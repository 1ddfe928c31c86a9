"""The tensor ops against their definition, bit for bit: every op here promises level "portable"."""

import itertools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.core import tolerance
from tests.tensor.data import DTYPES, X, agree, data

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
ONES = jnp.ones((2, 6, 4, 3))


TRANSFORMS: list[dict[str, Any]] = [
    {},
    {"layout": "NCHW", "out_layout": "CHWN"},
    {"out_layout": "NCHWc4"},
    {"layout": "NCHWc3", "out_layout": "NHWC", "channels": 4},
    {"out_layout": "NCHW", "padding": ((1, 2), (-1, 0)), "fold": (3, 1), "channels": 5},
    {"layout": "CHWN", "unfold": (2, 1), "padding": -1},
    {"alpha": 0.3, "beta": -1.7},
    {"out_layout": "CHWN", "alpha": -0.3, "beta": 1.0, "out_dtype": np.float32},
    {"beta": 1.0},
]


@each_dtype
@pytest.mark.parametrize("options", TRANSFORMS, ids=str)
def test_transform(dtype: str, options: dict[str, Any]):
    x = data(dtype, *((2, 2, 6, 4, 3) if options.get("layout") == "NCHWc3" else X))
    if options.get("beta"):
        prior = data(dtype, *reference.transform(x, **{k: v for k, v in options.items() if k != "beta"}).shape, seed=1)
        options = {**options, "prior": prior}
    agree("transform", x, **options)


def test_transform_undone():
    x = data("float32", 2, 5, 4, 3)
    there = dnn.transform(x, out_layout="NCHWc32", padding=((0, 1), (2, 0)), fold=(2, 3))
    assert there.shape == (2, 1, 3, 2, 32)
    back: dict[str, Any] = {"layout": "NCHWc32", "out_layout": "NHWC"}
    kept = dnn.transform(there, channels=18, **back)
    np.testing.assert_array_equal(dnn.transform(kept, unfold=(2, 3), padding=((0, -1), (-2, 0))), x)


@pytest.mark.parametrize(("layout", "shape"), [("NWC", (2, 6, 3)), ("NCDHW", (2, 3, 4, 6, 5))])
def test_transform_of_other_ranks(layout: str, shape: tuple[int, ...]):
    out = {"NWC": "CWN", "NCDHW": "NDHWC"}[layout]
    agree(
        "transform", data("bfloat16", *shape), layout=layout, out_layout=out, fold=2 if layout == "NWC" else (2, 3, 1)
    )


@pytest.mark.parametrize(("dtype", "out"), list(itertools.product(["float32", "bfloat16", "int8"], DTYPES)))
def test_conversions(dtype: str, out: str):
    x = data(dtype, 4, 50)
    agree("scale", x, out_dtype=getattr(ml_dtypes, out, out))
    agree("scale", x, alpha=1.7, out_dtype=getattr(ml_dtypes, out, out))


def test_saturation_and_overflow():
    x = np.array([300.0, -300.0, 0.5, 1.5, np.nan, np.inf, 3e9], np.float32)
    assert dnn.scale(x, out_dtype=np.int8).tolist() == [127, -128, 0, 2, 0, 127, 127]
    assert dnn.scale(x, out_dtype=np.uint8).tolist() == [255, 0, 0, 2, 0, 255, 255]
    assert dnn.scale(x, out_dtype=np.int32).tolist() == [300, -300, 0, 2, 0, 2**31 - 1, 2**31 - 1]
    assert dnn.fill(np.zeros(2, np.int32), value=2**31 - 1).tolist() == [2**31 - 1] * 2
    large = np.array([2**31 - 1, 2**24 + 1], np.int32)
    np.testing.assert_array_equal(dnn.add(large, large), [-2, 2**25 + 2])  # wraps, and does not pass through float32


@each_dtype
def test_add(dtype: str):
    c = data(dtype, *X)
    for shape in (X, (1, 1, 1, 3), (2, 1, 4, 1), (1, 1, 1, 1)):
        agree("add", data(dtype, *shape), c)
        agree("add", data(dtype, *shape), c, alpha=0.3, beta=-0.7)
    agree("add", data(dtype, *X), c, alpha=2.0, beta=0.0)


@each_dtype
@pytest.mark.parametrize("op", ["add", "mul", "min", "max", "sqrt", "not"])
def test_op_tensor(dtype: str, op: str):
    a = data(dtype, *X)
    b = None if op in ("sqrt", "not") else data(dtype, 2, 1, 4, 1)
    a = abs(a) if op == "sqrt" else a
    agree("op_tensor", a, b, op=op)
    if op == "mul" and dtype == "int32":
        return  # a product of a thousand is scaled to one of float32, where the definition rounds as the op does
    agree("op_tensor", a, b, op=op, alpha1=0.3, alpha2=-1.7)
    agree("op_tensor", a, b, op=op, alpha2=3.0, beta=-0.7, prior=data(dtype, *X, seed=1))


@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_rules(op: str):
    a, b = (v.reshape(-1).copy() for v in np.meshgrid([np.nan, -0.0, 0.0, 1.0, -np.inf], [np.nan, 0.0, -0.0, -1.0]))
    a, b = a.astype(np.float32), b.astype(np.float32)
    propagated, ignored = (agree("op_tensor", a, b, op=op, nan=rule) for rule in ("propagate", "ignore"))
    np.testing.assert_array_equal(propagated, (np.minimum if op == "min" else np.maximum)(a, b))
    np.testing.assert_array_equal(ignored, (np.fmin if op == "min" else np.fmax)(a, b))


def test_ties_go_to_the_first():
    x = jnp.array([1.0, 2.0])
    for op in ("min", "max"):
        first, second = jax.grad(lambda a, b, op=op: dnn.op_tensor(a, b, op=op).sum(), (0, 1))(x, x)
        assert (first.tolist(), second.tolist()) == ([1, 1], [0, 0])


@each_dtype
def test_fill(dtype: str):
    for value in (0.0, 3.0, -2.5, 1e9):
        agree("fill", data(dtype, 3, 2), value=value)
    np.testing.assert_array_equal(dnn.fill(jnp.ones(3), value=jnp.float32(2.5)), [2.5] * 3)


@pytest.mark.parametrize(
    ("dtype", "even", "odd"),
    [
        ("bfloat16", 1.0, 1 + 2.0**-7),
        ("bfloat16", 1 + 2.0**-6, 1 + 2.0**-7),
        ("bfloat16", 0.0, 2.0**-133),
        ("float16", 1.0, 1 + 2.0**-10),
        ("float16", 2048.0, 2046.0 + 1),
        ("float16", 0.0, 2.0**-24),
        ("float8_e4m3fn", 1.0, 1.125),
        ("float8_e5m2", 1.0, 1.25),
    ],
)
def test_fill_rounds_a_number_once(dtype: str, even: float, odd: float):
    """The double next to the middle of two neighbours becomes the nearer one; in float32 it is the middle itself."""
    middle = (even + odd) / 2
    for value, expected in ((middle, even), (np.nextafter(middle, even), even), (np.nextafter(middle, odd), odd)):
        assert np.float32(value) == middle
        for sign in (1, -1):
            found = agree("fill", np.zeros(2, jnp.dtype(dtype)), value=sign * float(value))
            assert np.asarray(found, np.float32).tolist() == [sign * expected] * 2


def test_prior_is_not_read_when_beta_is_zero():
    x, garbage = data("float32", *X), np.full(X, np.nan, np.float32)
    for beta in (0.0, jnp.float32(0)):
        np.testing.assert_array_equal(dnn.transform(x, beta=beta, prior=garbage), x)
        np.testing.assert_array_equal(dnn.add(x, garbage, beta=beta), x)
    slope = jax.jit(jax.grad(lambda beta: dnn.transform(x, beta=beta, prior=2 * x).sum()))(jnp.float32(0))
    np.testing.assert_allclose(slope, 2 * x.sum(dtype=np.float64), rtol=2.0**-20)  # derivative in beta: the prior


def test_scales_may_be_arrays():
    x = data("bfloat16", *X)
    for options in ({"alpha": 0.3, "beta": -0.7, "prior": data("bfloat16", *X, seed=1)},):
        traced: dict[str, Any] = {k: jnp.float32(v) if isinstance(v, float) else v for k, v in options.items()}
        np.testing.assert_array_equal(dnn.transform(x, **traced), dnn.transform(x, **options))


def test_golden_within_its_bound():
    """alpha x + beta prior in float32: two products, whose factors are rounded too, and a sum."""
    x, prior = data("bfloat16", *X), data("bfloat16", *X, seed=1)
    golden = reference.transform(x, alpha=0.3, beta=-0.7, prior=prior)
    terms = abs(0.3 * x.astype(np.float64)) + abs(0.7 * prior.astype(np.float64))
    found = tolerance.compare(
        np.asarray(dnn.transform(x, alpha=0.3, beta=-0.7, prior=prior)), golden, 3.01 * 2.0**-24 * terms
    )
    assert found.passed, found.message


@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_bits_do_not_depend_on_the_batch_or_on_what_else_is_compiled(rows: int):
    x, prior = data("float32", 33, 40, seed=2), data("float32", 33, 40, seed=3)

    def blend(x: Any, prior: Any) -> Any:
        return dnn.op_tensor(x, x[:, :1], op="mul", alpha1=1.1, beta=0.3, prior=prior)

    whole = blend(x, prior)
    np.testing.assert_array_equal(jax.jit(blend)(x[:rows], prior[:rows]), whole[:rows])
    np.testing.assert_array_equal(jax.jit(lambda a, b: blend(a, b) + 0 * a)(x, prior), whole)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda a, b: blend(a[None], b[None])[0]))(x, prior), whole)


ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: dnn.op_tensor(jnp.ones(2), None, op="sqrt", determinism="portable"),
        NotImplementedError,
        "`determinism` 'portable' cannot be guaranteed for op_tensor op 'sqrt', expected 'mesh_invariant' or less",
    ),
    (lambda: dnn.transform(ONES, fold=5), ValueError, r"`fold` must divide the sizes \(6, 4\), got \(5, 5\)"),
    (lambda: dnn.transform(ONES, unfold=2), ValueError, "`unfold` must have a product that divides the 3"),
    (
        lambda: dnn.transform(ONES, padding=-3),
        ValueError,
        r"`padding` must leave sizes .*, got \(0, -2\)",
    ),
    (
        lambda: dnn.transform(ONES, padding=cast(Any, ((1,), 2))),
        ValueError,
        "`padding` must be an integer, 2 integers",
    ),
    (lambda: dnn.transform(ONES, channels=0), ValueError, "`channels` must be None or at least 1, got 0"),
    (lambda: dnn.transform(ONES, channels=10**400), ValueError, "`channels` must be at most 2147483647, got 1000"),
    (lambda: dnn.transform(ONES, out_layout="NQQ"), ValueError, "`out_layout` must be one of NWC, .*, got 'NQQ'"),
    (lambda: dnn.transform(ONES, out_layout="NWC"), ValueError, "`out_layout` must have the spatial axes of"),
    (lambda: dnn.transform(ONES, beta=1.0), ValueError, "`prior` must be given when `beta` is not zero"),
    (
        lambda: dnn.transform(jnp.ones(X, jnp.int16)),
        TypeError,
        "`x` must have one of the dtypes .*, got int16",
    ),
    (lambda: dnn.scale(jnp.ones(2), out_dtype=np.float64), TypeError, "`out_dtype` must not be wider than"),
    (lambda: dnn.scale(jnp.ones(2), alpha=jnp.ones(2)), ValueError, r"`alpha` must have shape \(\)"),
    (
        lambda: dnn.fill(jnp.ones(2), value="x"),  # type: ignore[arg-type]
        TypeError,
        "`value` must be an array",
    ),
    (lambda: dnn.add(jnp.ones((2, 2)), jnp.ones((1, 2))), ValueError, r"`a` must have as many dimensions as `c`"),
    (
        lambda: dnn.add(jnp.ones(2, jnp.bfloat16), jnp.ones(2)),
        TypeError,
        "`a` must have the dtype of `c`, float32",
    ),
    (lambda: dnn.op_tensor(jnp.ones(2), None, op="add"), ValueError, "`b` must be an array for op 'add', got None"),
    (lambda: dnn.op_tensor(jnp.ones(2), None, op="pow"), ValueError, "`op` must be one of 'add', .*, got 'pow'"),
    (lambda: dnn.op_tensor(jnp.ones(2), jnp.ones(2), nan="ignore"), ValueError, "`nan` must be 'propagate' except for"),
    (lambda: dnn.op_tensor(jnp.ones((2, 2)), jnp.ones(2)), ValueError, "`b` must have as many dimensions as `a`"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call: Callable[[], Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        call()


AMID_OTHERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "reduce add": (
        lambda v: dnn.reduce(v, axis=(1, 2), determinism="portable"),
        lambda v: reference.reduce(v, axis=(1, 2), arithmetic="ordered"),
    ),
    "reduce avg": (
        lambda v: dnn.reduce(v, op="avg", axis=(1, 2), determinism="portable"),
        lambda v: reference.reduce(v, op="avg", axis=(1, 2), arithmetic="ordered"),
    ),
    "adaptive_pool": (
        lambda v: dnn.adaptive_pool(v, output_sizes=3, determinism="portable"),
        lambda v: reference.adaptive_pool(v, output_sizes=3, arithmetic="ordered"),
    ),
    "col2im": (
        lambda v: dnn.col2im(v, (2, 9, 10, 1), window=3),
        lambda v: reference.col2im(v, (2, 9, 10, 1), window=3, arithmetic="ordered"),
    ),
    "add": (lambda v: dnn.add(v, jnp.ones(v.shape)), lambda v: v + np.float32(1)),
    "op_tensor add": (lambda v: dnn.op_tensor(v, jnp.ones(v.shape)), lambda v: v + np.float32(1)),
    "op_tensor not": (lambda v: dnn.op_tensor(v, None, op="not"), lambda v: np.float32(1) - v),
}


@pytest.mark.parametrize("op", AMID_OTHERS)
def test_the_bits_do_not_depend_on_what_is_computed_before_and_after(op: str):
    ours, theirs = AMID_OTHERS[op]
    rng = np.random.default_rng(1)
    a, c = (rng.standard_normal((2, 7, 8, 9)).astype(np.float32) for _ in range(2))
    expected = theirs(a * c)
    b = rng.standard_normal(expected.shape).astype(np.float32)
    with dnn.determinism("portable"):
        np.testing.assert_array_equal(jax.jit(lambda a, c: ours(a * c))(a, c), expected)
        np.testing.assert_array_equal(jax.jit(lambda v, b: ours(v) + b)(a * c, b), expected + b)
