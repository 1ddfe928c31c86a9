"""Products of matrices: NumPy's broadcast, the definition's bits, scales of quantised operands, derivatives, errors."""

import dataclasses
import functools as ft
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.core import engines, selection, tuned
from jaxdnn._src.core.explain import traced_calls

SHAPES = [
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 1, 3, 4), (3, 4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 3, 1, 6, 4), (2, 1, 7, 4, 5)),
    ((2, 1, 2, 1, 3, 4), (4, 5)),
    ((1, 3, 4), (6, 1, 4, 5)),
    ((2, 3, 0), (2, 0, 5)),
]


def normal(*shapes: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def stored(v: np.ndarray, turned: bool) -> np.ndarray:
    return np.ascontiguousarray(v.swapaxes(-1, -2)) if turned else v


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_values_are_numpys_and_bits_the_definitions(left: tuple[int, ...], right: tuple[int, ...]):
    a, b = normal(left, right)
    turned = len(left) % 2 == 0, len(right) % 2 == 1
    given: dict[str, Any] = {"transpose_a": turned[0], "transpose_b": turned[1]}
    arrays = stored(a, turned[0]), stored(b, turned[1])
    wanted = np.matmul(a.astype(np.float64), b.astype(np.float64))
    y, exact = jax.jit(
        lambda a, b: (dnn.matmul(a, b, **given), dnn.matmul(a, b, determinism="portable", **given))
    )(*arrays)  # fmt: skip
    assert y.shape == wanted.shape
    np.testing.assert_allclose(y, wanted, atol=1e-5)
    np.testing.assert_array_equal(exact, reference.matmul(*arrays, **given, arithmetic="ordered"))
    np.testing.assert_allclose(reference.matmul(*arrays, **given), wanted, atol=1e-13)


@pytest.mark.parametrize("right", [(20, 6), (2, 20, 6)])
def test_the_epilogue_is_the_definitions(right: tuple[int, ...]):
    a, b, prior, residual, bias = normal((2, 5, 20), right, (2, 5, 6), (2, 5, 6), (6,), dtype=ml_dtypes.bfloat16)
    arrays = {"prior": prior, "residual": residual, "bias": bias}
    given: dict[str, Any] = {"beta": 1.0, "activation": "relu", "out_dtype": np.float32}
    run = jax.jit(lambda a, b, arrays: dnn.matmul(a, b, **arrays, **given, determinism="portable"))
    wanted = reference.matmul(a, b, **arrays, **given, arithmetic="ordered")
    np.testing.assert_array_equal(run(a, b, arrays), wanted)


@pytest.mark.parametrize("shape", [(4, 1), (6,), (3, 1, 1), (3, 4, 6), (1, 6)])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_scales_of_rows_and_columns(shape: tuple[int, ...], dtype: str):
    """Any scales: int8 is added exactly, and each of the further steps is rounded as in the definition."""
    rng = np.random.default_rng(0)
    draw = lambda size: rng.integers(-100, 101, size) if dtype == "int8" else rng.normal(size=size)
    a, b = (draw(size).astype(dtype) for size in ((3, 4, 40), (6, 40)))
    scales, bias = rng.uniform(0.01, 0.1, shape).astype(np.float32), rng.normal(size=6).astype(np.float32)
    given: dict[str, Any] = {"transpose_b": True, "activation": "relu", "out_dtype": np.float32}
    given |= (
        {"determinism": "run_to_run"} if dtype == "int8" else {"engine": "ordered", "determinism": "mesh_invariant"}
    )
    run = jax.jit(lambda a, b, s, t: dnn.matmul(a, b, alpha=s, bias=t, **given))
    found = run(a, b, scales, bias)
    given = {name: given[name] for name in ("transpose_b", "activation", "out_dtype")}
    np.testing.assert_array_equal(found, reference.matmul(a, b, alpha=scales, bias=bias, **given, arithmetic="ordered"))


def test_int8_wraps_and_saturates():
    a, b = np.full((2, 140_000), 127, np.int8), np.full((140_000, 3), 127, np.int8)
    run = jax.jit(lambda a, b: (dnn.matmul(a, b, out_dtype=jnp.int32), dnn.matmul(a[:, :9], b[:9])))
    wrapped, saturated = run(a, b)
    np.testing.assert_array_equal(wrapped, np.full((2, 3), (140_000 * 127 * 127 + 2**31) % 2**32 - 2**31))
    np.testing.assert_array_equal(saturated, np.full((2, 3), 127, np.int8))


def test_a_prior_of_nan_is_not_read():
    a, b = normal((2, 3, 4), (4, 5))
    prior = np.full((2, 3, 5), np.nan, np.float32)
    run = jax.jit(lambda a, b, beta: [dnn.matmul(a, b, beta=scale, prior=prior) for scale in (0, beta)])
    for found in run(a, b, np.float32(0)):
        np.testing.assert_allclose(found, a @ b, atol=1e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("right", [(4, 5), (2, 4, 5), (3, 1, 4, 5)])
def test_derivatives_are_the_definitions_differences(right: tuple[int, ...]):
    """In every operand, against differences of the definition; and the second ones, against those of the first."""
    result = (*np.broadcast_shapes((2,), right[:-2]), 3, 5)
    shapes = ((2, 3, 4), right, result, result, (5,), (3, 1), ())
    arrays, along = (normal(*shapes, dtype=np.float64, seed=seed) for seed in (0, 1))
    (dy,) = normal(result, dtype=np.float64, seed=2)

    def call(op: Any, a: Any, b: Any, prior: Any, residual: Any, bias: Any, alpha: Any, beta: Any) -> Any:
        return op(a, b, prior=prior, residual=residual, bias=bias, alpha=alpha, beta=beta, activation="tanh")

    ours, theirs, h = ft.partial(call, dnn.matmul), ft.partial(call, reference.matmul), 2.0**-20
    back = lambda *v: jax.vjp(ours, *v)[1](jnp.asarray(dy))
    gradients, tangent, second = jax.jit(
        lambda v, t: (back(*v), jax.jvp(ours, v, t)[1], jax.jvp(back, v, t)[1])
    )(tuple(arrays), tuple(along))  # fmt: skip
    total = 0.0
    for i, (gradient, direction) in enumerate(zip(gradients, along, strict=True)):
        up, down = ([v + s * direction if i == j else v for j, v in enumerate(arrays)] for s in (h, -h))
        slope = (theirs(*up) - theirs(*down)) / (2 * h)
        total = total + slope
        assert gradient.shape == direction.shape
        np.testing.assert_allclose(np.vdot(gradient, direction), np.vdot(dy, slope).astype(float), atol=1e-5)
    np.testing.assert_allclose(tangent, np.float64(total), atol=1e-5)
    ends = (jax.jit(back)(*(v + s * d for v, d in zip(arrays, along, strict=True))) for s in (h, -h))
    for found, up, down in zip(second, *ends, strict=True):
        np.testing.assert_allclose(found, (up - down) / (2 * h), atol=1e-4)


@pytest.mark.parametrize("right", [(4, 5), (2, 4, 5)])
def test_vmap_over_each_operand(right: tuple[int, ...]):
    shapes = ((2, 3, 4), right, (2, 3, 5), (5,), (3, 1))
    arrays = normal(*((3, *shape) for shape in shapes))
    run = lambda a, b, residual, bias, alpha: dnn.matmul(
        a, b, residual=residual, bias=bias, alpha=alpha, activation="relu", engine="ordered"
    )
    for axes in ((0, 0, 0, 0, 0), *(tuple(0 if i == j else None for j in range(5)) for i in range(5))):
        given = [v if axis == 0 else v[0] for v, axis in zip(arrays, axes, strict=True)]
        found = jax.jit(jax.vmap(run, axes))(*given)
        for i in range(3):
            one = [v[i] if axis == 0 else v for v, axis in zip(given, axes, strict=True)]
            np.testing.assert_array_equal(found[i], jax.jit(run)(*one))


@pytest.mark.parametrize("left", ["n, t, 4", "n, 3, 4", "3, n, t, 4", "t, 4"])
@pytest.mark.parametrize("right", ["4, 5", "n, 4, 5"])
def test_rows_and_leading_axes_may_be_symbolic(left: str, right: str):
    scope, sizes = export.SymbolicScope(), {"n": 2, "t": 6}
    shapes = [export.symbolic_shape(text, scope=scope) for text in (left, right)]
    run = jax.jit(lambda a, b: dnn.matmul(a, b, bias=jnp.arange(5.0), activation="relu"))
    exported = export.export(run)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    known = [tuple(sizes.get(str(size), size) if not isinstance(size, int) else size for size in s) for s in shapes]
    a, b = normal(*(tuple(map(int, shape)) for shape in known))
    np.testing.assert_allclose(exported.call(a, b), np.maximum(a @ b + np.arange(5), 0), atol=1e-5)


def test_a_narrow_bias_of_many_matrices_has_a_gradient_that_is_rounded_once():
    a, b = jnp.ones((300, 3, 4), jnp.bfloat16), jnp.ones((300, 4, 5), jnp.bfloat16)
    weights = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1, (300, 3, 5)), jnp.bfloat16)
    loss = lambda bias: jnp.sum((dnn.matmul(a, b, bias=bias) * weights).astype(jnp.float32))
    found = np.asarray(jax.jit(jax.grad(loss))(jnp.zeros(5, jnp.bfloat16)), np.float64)
    exact = np.asarray(weights, np.float64).sum((0, 1))
    assert np.all(np.abs(found - exact) <= 2.0**-8 * exact)


def test_kernels_promise_nothing_of_a_batch_for_they_choose_by_the_number_of_b():
    a, b = jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))
    level = lambda b: {c.engine: c.level for c in dnn.explain(dnn.matmul, a, b)[0].candidates}["hopper"]
    assert (level(b[0]), level(b), level(b[:1])) == ("batch_invariant", "run_to_run", "run_to_run")
    (call,) = dnn.explain(ft.partial(dnn.matmul, engine="ordered"), a, b)
    assert call.engine == "ordered"
    assert call.public == "matmul"


def unasked(function: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> list[tuple[str, str, str]]:
    """Of each call of a program of bfloat16 on an H200 its op, the engine, and why kernels come later."""
    found = []
    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    for call in traced_calls(function, *avals, platform="cuda"):
        call = dataclasses.replace(call, device_kind="NVIDIA H200")
        (kernels,) = (e for e in engines.registered(call.op) if e.name == "hopper")
        later = str(selection.why_later(kernels, call) or "").partition(" (")[0]
        found.append((call.op, selection.ranked(call)[0].name, later))
    return found


@pytest.mark.skipif(bool(hopper.unavailable()), reason=hopper.unavailable() or "")
def test_kernels_serve_unasked_where_there_is_an_epilogue():
    """Of plain products XLA's are as fast, in all three passes, and faster of a batch of them."""
    alone = "it is a product of matrices without an epilogue that XLA needs another kernel for"
    batch = "it is a batch of products of matrices"
    rows, right, bias = (128, 64), (64, 128), (128,)
    product = lambda a, b: jnp.sum(dnn.matmul(a, b).astype(jnp.float32))
    found = unasked(jax.grad(product, (0, 1)), rows, right)
    assert sorted(found) == [(op, "xla", alone) for op in ("conv", "conv_dgrad", "conv_wgrad")]
    fused = lambda a, b, bias: dnn.matmul(a, b, bias=bias, activation="gelu")
    assert unasked(fused, rows, right, bias) == [("conv", "hopper", "")]
    assert unasked(lambda a, b, r: dnn.matmul(a, b, residual=r), rows, right, (128, 128)) == [("conv", "hopper", "")]
    assert unasked(lambda a, b, bias: dnn.matmul(a, b, bias=bias), rows, right, bias) == [("conv", "xla", alone)]
    assert unasked(fused, (8, *rows), (8, *right), bias) == [("conv", "xla", batch)]
    assert unasked(fused, (8, *rows), right, bias) == [("conv", "hopper", "")]


def test_a_convolution_of_one_pixel_is_no_product():
    """What serves a convolution, and what it lowers to, is what was measured; `jaxdnn.tune` keeps the two apart."""
    pixels = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((7, 1, 24), (1, 8, 15))]
    matrices = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 7, 8), (3, 8, 5))]
    conv = ft.partial(dnn.conv, groups=3, layout="NWC")
    keys, lowered = [], []
    for function, avals in ((conv, pixels), (dnn.matmul, matrices)):
        (call,) = traced_calls(function, *avals, platform="cuda")
        keys.append(tuned.key(call))
        text = jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
        lowered.append(re.findall(r"stablehlo\.(convolution|dot_general)", text))
    assert keys[1] == keys[0].replace("Geometry(", "Products(").replace("outer=False)", "outer=False, batched=True)")
    assert lowered == [["convolution"], ["dot_general"]]


@pytest.mark.skipif(bool(hopper.unavailable()), reason=hopper.unavailable() or "")
def test_kernels_add_in_the_order_of_the_terms_whatever_the_rows():
    """Rows are pixels of images or images; the promise of a kernel for a batch of images then holds for rows."""
    right = jax.ShapeDtypeStruct((160, 256), jnp.bfloat16)
    for rows in ((1,), (9,), (8, 128), (3, 1, 7), (2, 3, 4, 5), (2, 1, 3, 1, 2)):
        left = jax.ShapeDtypeStruct((*rows, 160), jnp.bfloat16)
        (call,) = traced_calls(dnn.matmul, left, right, platform="cuda")
        (kernels,) = (e for e in engines.registered("conv") if e.name == "hopper")
        order = kernels.schedule(call)
        assert order is not None
        found = np.ravel(order.order)
        np.testing.assert_array_equal(found[found >= 0], np.arange(160))


A, B = np.ones((2, 3, 4), np.float32), np.ones((4, 5), np.float32)
BAD: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    (A[0, 0], B, {}, ValueError, r"`a` must have at least two axes, of matrices, got shape \(4,\); a\[None, :\] is a"),
    (A, B[:, 0], {}, ValueError, r"`b` must have at least two axes"),
    (A, B.T, {}, ValueError, r"`b` must have shape \(..., 4, N\) for 4 columns .* \(5, 4\) \(transpose_b=True would"),
    (A, B, {"transpose_b": True}, ValueError, r"\(..., N, 4\) .* got \(4, 5\) \(transpose_b=False would fit\)"),
    (A.swapaxes(1, 2), B, {}, ValueError, r"\(..., 3, N\) .* \(transpose_a=True would fit\)"),
    (A, np.ones((7, 6), np.float32), {}, ValueError, r"got \(7, 6\)\.$"),
    (A, np.ones((3, 4, 5), np.float32), {}, ValueError, r"`b` must have leading axes .* a, \(2,\), got \(3,\)"),
    (A, B.astype(np.float16), {}, TypeError, "`b` must have the dtype of `a` or both must be float8, got float16 and"),
    (A.astype(int), B, {}, TypeError, "`a` must have one of the dtypes float32"),
    (A > 0, B > 0, {}, TypeError, "`a` must have one of the dtypes float32"),
    (A.astype(complex), B, {}, TypeError, "`a`"),
    ("x", B, {}, TypeError, "`a` must be an array"),
    (A, None, {}, TypeError, "`b` must be an array"),
    (A, B, {"transpose_a": 1}, TypeError, "`transpose_a` must be True or False, got 1"),
    (A, B, {"transpose_b": "T"}, TypeError, "`transpose_b` must be True or False, got 'T'"),
    (A, B, {"bias": np.ones((1, 5), np.float32)}, ValueError, r"`bias` must have shape \(5,\), one a column"),
    (A, B, {"bias": np.ones(5, np.int32)}, TypeError, "`bias`"),
    (A, B, {"residual": np.ones((3, 5), np.float32)}, ValueError, r"`residual` must have shape \(2, 3, 5\), the res"),
    (A, B, {"prior": np.ones((2, 3, 4), np.float32), "beta": 1.0}, ValueError, r"`prior` must have shape \(2, 3, 5\)"),
    (A, B, {"beta": 1.0}, ValueError, "`prior` must be given when `beta` is not zero"),
    (A, B, {"alpha": np.ones(3, np.float32)}, ValueError, r"`alpha` must broadcast .* \(2, 3, 5\), got \(3,\)"),
    (A, B, {"alpha": np.ones((1, 2, 3, 5), np.float32)}, ValueError, "`alpha` must broadcast"),
    (A, B, {"alpha": np.ones(5, bool)}, TypeError, "`alpha` must have one of the dtypes"),
    (A, B, {"alpha": "1"}, TypeError, "`alpha`"),
    (A, B, {"beta": np.ones(5, np.float32), "prior": A @ B}, ValueError, r"`beta` must have shape \(\)"),
    (A, B, {"activation": "silu"}, ValueError, "`activation` .*did you mean 'swish'"),
    (A, B, {"accumulate": jnp.bfloat16}, TypeError, "`accumulate`"),
    (A, B, {"precision": "highest"}, ValueError, "`precision` must be one of None, 'tf32'"),
    (A.astype(np.float16), B.astype(np.float16), {"precision": "tf32"}, TypeError, "`precision` 'tf32' needs float32"),
    (A, B, {"out_dtype": jnp.int8}, TypeError, "`out_dtype`"),
    (A.astype(np.int8), B.astype(np.int8), {"out_dtype": jnp.int32, "alpha": np.ones(5, np.float32)}, TypeError,
     "`out_dtype` int32 needs an integer epilogue, .* got alpha .* of float32 of shape"),
    (A, B, {"engine": "cublas"}, ValueError, "`engine` must be one of"),
    (A, B, {"engine": "hopper"}, NotImplementedError, "`matmul` on cpu cannot be served by engine 'hopper'"),
    (A, B, {"determinism": "always"}, ValueError, "`determinism`"),
    (A, B, {"engine": "xla", "determinism": "batch_invariant"}, NotImplementedError, "it guarantees 'run_to_run'"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "options", "error", "text"), BAD)
def test_errors(a: Any, b: Any, options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.matmul(a, b, **options)


@pytest.mark.parametrize(("left", "right"), [("3, k", "4, 5"), ("3, k", "k, 5"), ("3, 4", "4, k")])
def test_terms_and_columns_must_be_known(left: str, right: str):
    scope = export.SymbolicScope()
    shapes = [jax.ShapeDtypeStruct(export.symbolic_shape(text, scope=scope), jnp.float32) for text in (left, right)]
    with pytest.raises(ValueError, match="must have known sizes but for the rows of a and leading axes, got k"):
        export.export(jax.jit(dnn.matmul))(*shapes)
