"""Functions with lax's signatures: each argument has lax's meaning or is refused by name.

Operands are small integers, so that sums are exact in any order and results must be equal, not near.
"""

import doctest
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import jaxdnn as dnn
from jaxdnn import lax_like

NHWC = ("NHWC", "HWIO", "NHWC")
JAXS = {name: getattr(lax, name, None) or getattr(jax.nn, name) for name in lax_like.__all__}


def integers(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).integers(-3, 4, shape), dtype)


def values_and_gradients(function: Callable[..., Array], *arrays: Array) -> tuple[Array, ...]:
    """y, and what its pullback gives for integers."""

    @jax.jit
    def both(*arrays: Array) -> tuple[Array, ...]:
        y, pull = jax.vjp(function, *arrays)
        return y, *pull((jnp.arange(y.size) % 5 - 2).astype(y.dtype).reshape(y.shape))

    return both(*arrays)


def assert_equal(found: Sequence[Array], wanted: Sequence[Array]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        np.testing.assert_array_equal(a, b)


def assert_like_jax(name: str, arrays: Sequence[Array], *args: Any, **options: Any) -> None:
    """Values and gradients are those of JAX's function."""
    ours, theirs = (lambda *a, f=f: f(*a, *args, **options) for f in (getattr(lax_like, name), JAXS[name]))
    assert_equal(values_and_gradients(ours, *arrays), values_and_gradients(theirs, *arrays))


@pytest.mark.parametrize("name", lax_like.__all__)
def test_signature_is_jaxs(name: str):
    ours, theirs = (inspect.signature(f).parameters.values() for f in (getattr(lax_like, name), JAXS[name]))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize("name", lax_like.__all__)
def test_docstring_example_runs(name: str):
    text = inspect.getdoc(getattr(lax_like, name)) or ""
    names = {"jax": jax, "jnp": jnp, "dnn": dnn}
    results = doctest.DocTestRunner().run(doctest.DocTestParser().get_doctest(text, names, name, None, None))
    assert results.attempted
    assert not results.failed
    parameters = inspect.signature(getattr(lax_like, name)).parameters
    assert not [p for p in parameters if f"{p}:" not in text and f"{p}," not in text]


# ---- convolution -----------------------------------------------------------------------------------------------------

X, W = integers(2, 7, 6, 4), integers(3, 2, 4, 6)
PADDINGS = ["SAME", "SAME_LOWER", "VALID", ((1, 2), (0, 3)), ((5, 0), (0, 4))]


@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_stride_and_dilation(padding: Any):
    assert_like_jax("conv_general_dilated", (X, W), (2, 1), padding, None, (1, 2), NHWC)


def test_negative_padding_cuts_off():
    """lax's own is not compared with: on CPUs JAX 0.10.2 reads what is no part of the array."""
    call = lambda m, x, padding: m.conv_general_dilated(x, W, (1, 1), padding, dimension_numbers=NHWC)
    found = values_and_gradients(lambda x: call(lax_like, x, ((-1, 1), (2, -2))), X)
    wanted = values_and_gradients(lambda x: call(lax, x[:, 1:, :-2], ((0, 1), (2, 0))), X)
    assert_equal(found, wanted)


AXES = [
    (("NHWC", "HWIO", "NHWC"), (2, 7, 6, 4), (3, 2, 4, 6)),
    (("NCHW", "OIHW", "NCHW"), (2, 4, 7, 6), (6, 4, 3, 2)),
    (("NHWC", "OIHW", "NCHW"), (2, 7, 6, 4), (6, 4, 3, 2)),
    (("WCHN", "IHWO", "CNHW"), (6, 4, 7, 2), (4, 3, 2, 6)),
    (("CHWN", "HWIO", "NHWC"), (4, 7, 6, 2), (3, 2, 4, 6)),
    (("NWHC", "HWIO", "NHWC"), (2, 6, 7, 4), (3, 2, 4, 6)),
    (("NABC", "ABIO", "NABC"), (2, 7, 6, 4), (3, 2, 4, 6)),
    (None, (2, 4, 7, 6), (6, 4, 3, 2)),
    (lax.conv_dimension_numbers((2, 7, 6, 4), (3, 2, 4, 6), NHWC), (2, 7, 6, 4), (3, 2, 4, 6)),
]


@pytest.mark.parametrize(("numbers", "x", "w"), AXES)
def test_dimension_numbers(numbers: Any, x: tuple[int, ...], w: tuple[int, ...]):
    arrays = integers(*x), integers(*w)
    assert_like_jax("conv_general_dilated", arrays, (1, 2), ((1, 2), (0, 1)), None, (2, 1), numbers)


@pytest.mark.parametrize(
    ("numbers", "x", "w"),
    [
        (("NWC", "WIO", "NWC"), (2, 9, 4), (3, 4, 6)),
        (None, (2, 4, 9), (6, 4, 3)),
        (("NDHWC", "DHWIO", "NDHWC"), (2, 4, 5, 6, 3), (2, 3, 2, 3, 4)),
        (None, (2, 3, 4, 5, 6), (4, 3, 2, 3, 2)),
    ],
)
@pytest.mark.parametrize("spread", [1, 2])
def test_one_and_three_spatial_axes(numbers: Any, x: tuple[int, ...], w: tuple[int, ...], spread: int):
    rank, arrays = len(x) - 2, (integers(*x), integers(*w))
    strides = (1,) * rank if spread > 1 else (2, 1, 2)[:rank]
    assert_like_jax("conv_general_dilated", arrays, strides, [(1, 1)] * rank, [spread] * rank, None, numbers)


@pytest.mark.parametrize("spread", [(1, 1), (2, 1)])
@pytest.mark.parametrize(
    ("numbers", "x", "w", "of_features", "of_batch"),
    [
        (NHWC, (2, 7, 6, 4), (3, 2, 2, 6), 2, 1),
        (NHWC, (2, 7, 6, 4), (3, 2, 1, 8), 4, 1),
        (None, (2, 4, 7, 6), (6, 2, 3, 2), 2, 1),
        (NHWC, (4, 7, 6, 3), (3, 2, 3, 6), 1, 2),
        (("CHWN", "HWIO", "NHWC"), (3, 7, 6, 4), (3, 2, 3, 6), 1, 2),
        (None, (4, 3, 7, 6), (4, 3, 3, 2), 1, 4),
    ],
)
def test_groups(numbers: Any, x: Any, w: Any, of_features: int, of_batch: int, spread: Any):
    arrays = integers(*x), integers(*w)
    strides = (1, 2) if spread == (1, 1) else (1, 1)
    args = (strides, ((1, 1), (0, 2)), spread, None, numbers, of_features, of_batch)
    assert_like_jax("conv_general_dilated", arrays, *args)


@pytest.mark.parametrize("padding", [((1, 2), (0, 1)), ((2, 2), (2, 2)), ((6, 5), (3, 0)), ((0, 0), (0, 0))])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
def test_dilated_input(padding: Any, dilation: Any):
    """As zeros put between elements: lax's own gradient is wrong on CPUs (JAX 0.10.2) where it pads beyond windows."""
    edges: Any = list(zip(((0, 0), *padding, (0, 0)), (0, 1, 2, 0), strict=True))
    spread = lambda x: lax.pad(x, jnp.zeros((), x.dtype), [(*pad, between) for pad, between in edges])
    plain = lambda x, w: lax.conv_general_dilated(spread(x), w, (1, 1), "VALID", None, dilation, NHWC)
    ours = lambda x, w: lax_like.conv_general_dilated(x, w, (1, 1), padding, (2, 3), dilation, NHWC)
    assert_equal(values_and_gradients(ours, X, W), values_and_gradients(plain, X, W))


def test_dilation_of_one_element_may_stride():
    assert_like_jax("conv_general_dilated", (X[:, :1], W), (2, 1), ((2, 2), (0, 0)), (3, 1), None, NHWC)


def test_transformations():
    """vmap over both operands, a derivative along a derivative, outside of jit."""
    x, w = jnp.stack([X, X + 1]), jnp.stack([W, -W])
    found, wanted = (
        jax.vmap(
            jax.grad(
                lambda x, w, m=m: (m.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC) ** 2).sum()
            )
        )(x, w)
        for m in (lax_like, lax)
    )
    assert_equal([found], [wanted])
    x, w = X.transpose(0, 3, 1, 2), W.transpose(3, 2, 0, 1)
    along = lambda m: jax.jvp(jax.grad(lambda x: (m.conv(x, w, (1, 1), "SAME") ** 2).sum()), (x,), (x,))
    assert_equal(along(lax_like), along(lax))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes_and_wider_results(dtype: Any):
    x, w = X.astype(dtype), W.astype(dtype)
    assert_like_jax("conv_general_dilated", (x, w), (1, 1), "SAME", dimension_numbers=NHWC)
    wide = dict(dimension_numbers=NHWC, preferred_element_type=jnp.float32)
    found, wanted = (m.conv_general_dilated(x, w, (1, 1), "SAME", **wide) for m in (lax_like, lax))
    assert_equal([found], [wanted])


def test_64_bits(x64: None):
    x, w = X.astype(jnp.float64), W.astype(jnp.float64)
    assert_like_jax("conv_general_dilated", (x, w), (1, 1), "SAME", dimension_numbers=NHWC)
    found = lax_like.conv_general_dilated(
        X, W, (1, 1), "SAME", dimension_numbers=NHWC, preferred_element_type="float64"
    )
    assert_equal([found], [lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)])


def test_int8():
    x, w = X.astype(jnp.int8), W.astype(jnp.int8)
    for spread in (1, 2):
        args = ((1, 1), ((1, 1), (0, 0)), (spread, spread), None, NHWC, 1, 1, None, jnp.int32)
        assert_equal([lax_like.conv_general_dilated(x, w, *args)], [lax.conv_general_dilated(x, w, *args)])


def test_conv_and_its_general_padding():
    x, w = integers(2, 4, 7, 6), integers(6, 4, 3, 2)
    assert_like_jax("conv", (x, w), (2, 1), "SAME", lax.Precision.HIGHEST)
    assert_like_jax("conv_with_general_padding", (x, w), (1, 1), ((1, 0), (2, 1)), (2, 1), (1, 2))


@pytest.mark.parametrize("strides", [(2, 3), (1, 1), (5, 2)])
@pytest.mark.parametrize(
    ("padding", "options"),
    [
        ("SAME", {}),
        ("VALID", {}),
        ("SAME", {"transpose_kernel": True}),
        ("VALID", {"rhs_dilation": (2, 1)}),
        (((1, 2), (2, 0)), {"rhs_dilation": (1, 2)}),
        (((1, 2), (1, 0)), {"use_consistent_padding": True}),
        ("SAME", {"use_consistent_padding": True, "transpose_kernel": True}),
    ],
)
def test_conv_transpose(strides: Any, padding: Any, options: Any):
    assert_like_jax("conv_transpose", (integers(2, 5, 4, 6), integers(4, 3, 6, 6)), strides, padding, **options)


@pytest.mark.parametrize(("shape", "taps"), [((2, 5, 3), (4, 3, 2)), ((2, 3, 4, 2, 3), (2, 3, 2, 3, 2))])
def test_conv_transpose_of_one_and_three_axes(shape: Any, taps: Any):
    assert_like_jax("conv_transpose", (integers(*shape), integers(*taps)), (2, 1, 3)[: len(shape) - 2], "SAME")


@pytest.mark.parametrize(
    "precision", [None, "highest", "high", "tensorfloat32", lax.Precision.DEFAULT, ("high", "default")]
)
def test_float32_is_exact_whatever_the_precision(precision: Any):
    """Numbers of 11 bits and more are not cut to TF32, unless that is asked for by its preset."""
    x, w = jnp.full((1, 1, 4), 1 + 2.0**-12), jnp.ones((1, 1, 1))
    np.testing.assert_array_equal(lax_like.conv_general_dilated(x, w, (1,), "SAME", precision=precision), x)
    for preset in ("TF32_TF32_F32", lax.DotAlgorithmPreset.TF32_TF32_F32):
        cut = lax_like.conv_general_dilated(x, w, (1,), "SAME", precision=preset)
        np.testing.assert_array_equal(cut, jnp.ones_like(x))


FOUR = jnp.ones((2, 3, 4, 4, 4, 4))  # spatial axes
CONV = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((X, W), {"out_sharding": jax.sharding.PartitionSpec()}, "`out_sharding` must be None"),
        ((X, W), {"precision": "BF16_BF16_F32"}, "`precision` must be None, one of jax.lax.Prec.*BF16_BF16_F32"),
        (
            (X, W),
            {"window_strides": (2, 1), "padding": ((1, 1), (0, 0)), "lhs_dilation": (2, 1)},
            r"`window_strides` must be 1 where `lhs_dilation` is \(2, 1\) .*got \(2, 1\)",
        ),
        ((X.astype(jnp.int32), W.astype(jnp.int32)), {}, "`lhs` must be float32, .* or int8 .*got 'int32'"),
        ((X.astype(jnp.complex64), W.astype(jnp.complex64)), {}, "`lhs` must be .*got 'complex64'"),
        ((X.astype(jnp.int8), W.astype(jnp.int8)), {}, "`preferred_element_type` must be int32 for int8.*got 'int8'"),
        ((FOUR, FOUR), {"window_strides": (1,) * 4, "dimension_numbers": None}, "`lhs` must be of one to three"),
    ],
)
def test_refused_convolutions(arrays: Any, options: Any, message: str):
    with pytest.raises(NotImplementedError, match=message):
        lax_like.conv_general_dilated(*arrays, **{**CONV, **options})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"padding": "SOME"}, Exception),
        ({"feature_group_count": 3}, ValueError),
        ({"window_strides": (0, 1)}, Exception),
        ({"lhs_dilation": (2, 2)}, ValueError),
        ({"dimension_numbers": ("NHWC", "HWIO", "NHWX")}, Exception),
        ({"preferred_element_type": jnp.bfloat16}, TypeError),
    ],
)
def test_what_lax_refuses_is_refused_in_its_words(options: Any, error: type[Exception]):
    with pytest.raises(error) as theirs:
        lax.conv_general_dilated(X, W, **{**CONV, **options})
    with pytest.raises(type(theirs.value)) as ours:
        lax_like.conv_general_dilated(X, W, **{**CONV, **options})
    assert str(ours.value) == str(theirs.value)


# ---- windows ---------------------------------------------------------------------------------------------------------

REDUCTIONS = {"max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min), "add": (0.0, lax.add)}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("shape", "taps", "strides", "padding", "dilation"),
    [
        ((2, 7, 6, 3), (1, 3, 2, 1), (1, 2, 2, 1), "SAME", None),
        ((2, 7, 6, 3), (1, 3, 2, 1), (1, 2, 2, 1), "SAME_LOWER", None),
        ((2, 7, 6, 3), (1, 3, 2, 1), None, "VALID", None),
        ((2, 3, 7, 6), (1, 1, 3, 2), (1, 1, 1, 2), ((0, 0), (0, 0), (1, 2), (0, 1)), None),
        ((2, 7, 3), (1, 3, 1), (1, 2, 1), "SAME", None),
        ((2, 4, 5, 6, 3), (1, 2, 3, 2, 1), (1, 2, 1, 2, 1), "SAME", None),
        ((4, 5, 6), (2, 3, 2), (1, 2, 2), "VALID", None),
        ((4, 5, 6, 2), (1, 2, 1, 2), (1, 1, 1, 1), "SAME", None),
        ((9,), (3,), (2,), "SAME", None),
        ((3, 4, 5), (1, 1, 1), (1, 2, 1), "VALID", None),
        ((3, 4, 5), (1, 1, 1), None, "VALID", None),
        ((2, 3, 2, 3, 2, 3), (1, 2, 1, 2, 1, 1), None, "VALID", None),
    ],
)
def test_windows(reduction: str, shape: Any, taps: Any, strides: Any, padding: Any, dilation: Any):
    args = (*REDUCTIONS[reduction], taps, strides, padding, None, dilation)
    assert_like_jax("reduce_window", (integers(*shape),), *args)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_dilated_and_cut_off_windows(reduction: str):
    """Of lax the values alone: its maxima have no gradient with dilated windows."""
    x = integers(2, 7, 6, 3)
    args = (*REDUCTIONS[reduction], (1, 3, 2, 1), (1, 2, 1, 1), ((0, 0), (1, 1), (0, 0), (0, 0)), None, (1, 2, 3, 1))
    assert_equal([lax_like.reduce_window(x, *args)], [lax.reduce_window(x, *args)])
    cut = ((0, 0), (-1, 0), (0, -2), (0, 0))
    found = lax_like.reduce_window(x, *REDUCTIONS[reduction], (1, 3, 2, 1), None, cut)
    assert_equal([found], [lax.reduce_window(x[:, 1:, :-2], *REDUCTIONS[reduction], (1, 3, 2, 1), None, "VALID")])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint8, jnp.int32])
def test_windows_of_narrow_dtypes(dtype: Any):
    x, args = integers(2, 7, 6, 3, dtype=dtype), ((1, 3, 2, 1), (1, 2, 2, 1), "SAME")
    whole = jnp.issubdtype(dtype, jnp.integer)
    least, largest = (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max) if whole else (-np.inf, np.inf)
    for computation, first in ((lax.max, np.array(least, dtype)), (lax.min, np.array(largest, dtype))):
        wanted = lax.reduce_window(x, first, computation, *args)
        assert_equal([lax_like.reduce_window(x, first, computation, *args)], [wanted])
    if not whole:
        zero = jnp.zeros((), dtype)
        assert_equal([lax_like.reduce_window(x, zero, lax.add, *args)], [lax.reduce_window(x, zero, lax.add, *args)])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32])
def test_maxima_of_integers_may_start_at_minus_infinity(dtype: Any):
    """lax takes it for the least integer."""
    x, args = integers(2, 7, 6, 3, dtype=dtype), (lax.max, (1, 3, 2, 1), (1, 2, 2, 1), "SAME")
    assert_equal([lax_like.reduce_window(x, -jnp.inf, *args)], [lax.reduce_window(x, -jnp.inf, *args)])


def test_minima_of_nan_infinities_and_the_ends_of_integers():
    """NaN spreads to its windows as in lax, and no negation overflows."""
    x = jnp.asarray([[np.nan, 1.0, -np.inf, 2.0, np.inf, np.inf, np.inf]])
    args = (lax.min, (1, 2), (1, 1), "SAME")
    np.testing.assert_array_equal(lax_like.reduce_window(x, jnp.inf, *args), lax.reduce_window(x, jnp.inf, *args))
    for dtype in (jnp.int8, jnp.uint8, jnp.int32):
        ends = jnp.iinfo(dtype)
        x = jnp.asarray([[ends.min, ends.max, ends.max, ends.min, ends.max]], dtype)
        wanted = lax.reduce_window(x, np.array(ends.max, dtype), *args)
        assert_equal([lax_like.reduce_window(x, np.array(ends.max, dtype), *args)], [wanted])
        assert_equal([lax_like.reduce_window(x, jnp.inf, *args)], [wanted])


def test_sums_are_no_averages_times_a_count():
    """A third, thrice, of a sum that float32 has exactly is not that sum."""
    x = jnp.asarray([[1.0, 2.0**23, 1.0]])[..., None]
    found = lax_like.reduce_window(x, 0.0, lax.add, (1, 3, 1))
    np.testing.assert_array_equal(found.ravel(), [2.0**23 + 2])


WINDOWS = dict(init_value=-jnp.inf, computation=lax.max, window_dimensions=(1, 2, 2, 1))


@pytest.mark.parametrize(
    ("operand", "options", "message"),
    [
        (
            X,
            {"computation": lax.mul, "init_value": 1.0},
            "`computation` must be jax.lax.max, jax.lax.min or .*got 'mul'",
        ),
        (X, {"computation": lax.min}, "`init_value` must be inf, known when traced .*got -inf"),
        (X, {"init_value": 0.0}, "`init_value` must be -inf, known when traced.*got 0.0"),
        (X, {"computation": lax.add, "init_value": 1.0}, "`init_value` must be 0, known when traced.*got 1.0"),
        ((X, X), {"init_value": (0.0, 0.0)}, "`operand` must be one array"),
        (X.astype(jnp.int16), {"init_value": np.int16(-(2**15))}, "`operand` must be one of .* int32 .*got 'int16'"),
        (X.astype(jnp.uint8), {"init_value": 1}, "`init_value` must be 0 or -inf, known when traced .*got 1"),
        (X, {"base_dilation": (1, 2, 1, 1)}, r"`base_dilation` must be None or 1 .*got \(1, 2, 1, 1\)"),
        (X, {"window_dimensions": (2, 2, 2, 2)}, r"`window_dimensions` must be of windows .*got \(2, 2, 2, 2\)"),
        (X, {"padding": ((0, 0), (2, 0), (0, 0), (0, 0))}, r"`padding` must be such that .*got \(\(0, 0\), \(2, 0\)"),
    ],
)
def test_refused_windows(operand: Any, options: Any, message: str):
    with pytest.raises(NotImplementedError, match=message):
        lax_like.reduce_window(operand, **{**WINDOWS, **options})


def test_an_initial_value_that_is_traced_is_refused():
    with pytest.raises(NotImplementedError, match=r"`init_value` must be -inf, known when traced.*got a traced array"):
        jax.jit(lambda first: lax_like.reduce_window(X, **{**WINDOWS, "init_value": first}))(-jnp.inf)


# ---- attention and softmax -------------------------------------------------------------------------------------------


def assert_near(found: Any, wanted: Any, terms: int, dtype: Any) -> None:
    """Both are sums of so many terms, of weights and values of order 1, in float32 and then rounded to the dtype: a
    weight's exponential is off by some units in the last place, and JAX rounds weights to the dtype as well."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        unit = (terms + 8) * float(jnp.finfo(jnp.float32).eps) + 4 * float(jnp.finfo(dtype).eps)
        assert np.all(np.abs(a - b) <= unit * np.maximum(np.abs(b), max(np.abs(b).max(initial=0), 1.0) * 2))


B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
# By NumPy, for JAX would compile a generator for each shape.
NORMAL = lambda seed, *shape, dtype=jnp.float32: jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)
MASK = jnp.asarray(np.random.default_rng(3).random((B, 1, T, S)) < 0.6).at[0, 0, 2].set(False)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.5, "is_causal": True},
        {"bias": NORMAL(4, 1, N, T, S)},
        {"bias": NORMAL(4, B, 1, 1, S), "mask": MASK},
        {"mask": MASK, "is_causal": True, "local_window_size": (2, 1)},
        {"local_window_size": 1},
        {"key_value_seq_lengths": jnp.array([0, 4], jnp.int32)},
        {"query_seq_lengths": jnp.array([3, 5], jnp.int32), "mask": MASK},
        {
            "query_seq_lengths": jnp.array([3, 0], jnp.int32),
            "key_value_seq_lengths": jnp.array([1, 7], jnp.int32),
            "local_window_size": (1, 0),
        },
        {"mask": MASK[:1, :, :, :1]},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_attention(dtype: Any, options: dict[str, Any]):
    q, k, v = NORMAL(0, B, T, N, H, dtype=dtype), NORMAL(1, B, S, K, H, dtype=dtype), NORMAL(2, B, S, K, H, dtype=dtype)
    terms = S * H
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # which JAX's own needs
        ours, theirs = (
            values_and_gradients(lambda q, k, v, m=m: m.dot_product_attention(q, k, v, **options), q, k, v)
            for m in (lax_like, jax.nn)
        )
        assert_near(ours[0], theirs[0], terms, dtype)
        assert_near(ours[1:], theirs[1:], terms * T * N, dtype)
        found, wanted = (m.dot_product_attention(q, k, v, **options, return_residual=True) for m in (lax_like, jax.nn))
        assert_near(found, wanted, terms, dtype)


def test_attention_where_keys_are_fewer_than_queries():
    """The last queries' window lies behind all keys: they have the mean of the values."""
    q, k, v = NORMAL(0, T + S, N, H), NORMAL(1, 3, K, H), NORMAL(2, 3, K, H)
    with jax.numpy_rank_promotion("allow"):
        found, wanted = (m.dot_product_attention(q, k, v, local_window_size=(2, 0)) for m in (lax_like, jax.nn))
    assert_near(found, wanted, S * H, jnp.float32)
    assert_near(found[-1, 0], v[:, 0].mean(0), S, jnp.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "cudnn"}, "`implementation` must be None .*got 'cudnn'"),
        ({"implementation": "xla"}, "`implementation` must be None .*got 'xla'"),
        ({"scale": jnp.ones(())}, "`scale` must be a number known when traced"),
        ({"local_window_size": (-1, 2)}, "`dot_product_attention` is not served .*`window` must have no negative side"),
    ],
)
def test_refused_attention(options: Any, message: str):
    q = NORMAL(0, B, T, N, H)
    with pytest.raises(NotImplementedError, match=message):
        lax_like.dot_product_attention(q, q, q, **options)


def test_attention_of_64_bits_is_refused(x64: None):
    """JAX computes its softmax in float32."""
    q = NORMAL(0, B, T, N, H, dtype=jnp.float64)
    with pytest.raises(NotImplementedError, match=r"`query` must be float32, bfloat16 or float16 .*got 'float64'"):
        lax_like.dot_product_attention(q, q, q)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("axis", [-1, 0, (0, 2), None])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax(name: str, axis: Any, masked: bool):
    x, where = NORMAL(0, 3, 4, 5), jnp.asarray(np.random.default_rng(1).random((3, 4, 5)) < 0.7) if masked else None
    run = lambda f: values_and_gradients(lambda x: jnp.where(jnp.isfinite(y := f(x, axis, where)), y, 0.0), x)
    with jax.numpy_rank_promotion("allow"):
        assert_near(run(getattr(lax_like, name)), run(JAXS[name]), 4 * x.size, jnp.float32)


def test_refused_softmax():
    with pytest.raises(NotImplementedError, match=r"`x` must be an array of float32, .* got an array of int32"):
        lax_like.softmax(jnp.ones(3, jnp.int32))
