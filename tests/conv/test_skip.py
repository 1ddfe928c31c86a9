"""A convolution that also returns what it reads: its two ops, but for the rounding of the gradient that both give."""

import functools as ft
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import Array

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src import hopper
from jaxdnn._src.activation.epilogues import Epilogue
from jaxdnn._src.conv.hopper import epilogue as kernel_epilogue

BF16 = ml_dtypes.bfloat16
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {  # of x and w, and how
    "pointwise": ((2, 5, 4, 3), (1, 1, 3, 6), {}),
    "strided": ((2, 7, 6, 3), (3, 2, 3, 4), {"stride": (2, 3), "padding": 1}),
    "grouped": ((2, 5, 6, 4), (3, 3, 2, 6), {"groups": 2, "padding": "SAME"}),
    "first": ((2, 3, 7), (5, 3, 2), {"layout": "NCW", "dilation": 2}),
    "volumes": ((1, 3, 4, 5, 2), (2, 2, 2, 2, 3), {"layout": "NDHWC", "mode": "convolution"}),
    "vectors": ((2, 2, 5, 4, 4), (8, 8, 2, 3), {"layout": "NCHWc4", "filter_layout": "KCRS"}),
}
each_size = pytest.mark.parametrize("size", SIZES)
each_activation = pytest.mark.parametrize("activation", [None, "relu"])


def data(size: str, dtype: Any = np.float32, count: int = 2) -> list[Array]:
    """Small whole numbers, of which all sums are exact."""
    rng = np.random.default_rng(3)
    shapes = [SIZES[size][:2][i % 2] for i in range(count)]
    return [jnp.asarray(rng.integers(-3, 4, shape).astype(dtype)) for shape in shapes]


def pair(size: str, activation: str | None) -> tuple[Any, Any]:
    """The op, and the two ops that it stands for."""
    how = SIZES[size][2]

    def apart(x: Array, w: Array) -> tuple[Array, Array]:
        h = x if activation is None else jnp.where(x > 0, x, 0)
        return dnn.conv(h, w, **how), h

    return lambda x, w: dnn.conv_skip(x, w, input_activation=activation, **how), apart


def loss(results: tuple[Array, Array]) -> Array:
    """A number that depends on every element of both in its own way."""
    weigh = lambda v: (jnp.arange(v.size) % 5 - 2).reshape(v.shape).astype(v.dtype)
    return sum((jnp.sum(v * v * weigh(v)) for v in results), jnp.zeros(()))


def assert_same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@each_size
@each_activation
def test_values_and_gradients(size: str, activation: str | None):
    def run(op: Any, x: Array, w: Array) -> Any:
        return op(x, w), jax.grad(lambda *v: loss(op(*v)), (0, 1))(x, w)

    x, w = data(size)
    assert_same(*jax.jit(lambda x, w: [run(op, x, w) for op in pair(size, activation)])(x, w))


@pytest.mark.parametrize("size", ["strided", "grouped"])
@each_activation
def test_other_derivatives(size: str, activation: str | None):
    """Forward, in one operand alone, of a gradient's gradient, and linearised and transposed by hand."""
    x, w, dx, dw = data(size, count=4)

    def run(op: Any) -> Any:
        gradient = jax.grad(lambda *v: loss(op(*v)), (0, 1))
        along = lambda *v: jnp.vdot(gradient(*v)[0], dx) + jnp.vdot(gradient(*v)[1], dw)
        results, linear = jax.linearize(lambda x: op(x, w), x)
        return (
            jax.jvp(op, (x, w), (dx, dw)),
            jax.jvp(lambda w: op(x, w), (w,), (dw,)),
            jax.grad(along, (0, 1))(x, w),
            jax.jvp(gradient, (x, w), (dx, dw)),
            jax.linear_transpose(linear, x)(results),
            jax.grad(lambda x: loss(jax.checkpoint(op)(x, w)))(x),
        )

    assert_same(*jax.jit(lambda: [run(op) for op in pair(size, activation)])())


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 2)])
@pytest.mark.parametrize("size", ["strided", "first"])
def test_vmap(size: str, axes: tuple[int | None, int | None]):
    several = [v if axis is None else jnp.stack([v, 2 - v], axis) for v, axis in zip(data(size), axes, strict=True)]

    def run(op: Any) -> Any:
        gradient = jax.grad(lambda *v: loss(op(*v)), (0, 1))
        whole = lambda *v: loss(jax.vmap(op, axes)(*v))
        tangents = tuple(jnp.ones_like(v) for v in several)
        return (
            jax.vmap(op, axes)(*several),
            jax.vmap(gradient, axes)(*several),
            jax.grad(whole, (0, 1))(*several),
            jax.jvp(whole, tuple(several), tangents),
            jax.vmap(lambda *v: jax.jvp(op, v, tuple(map(jnp.ones_like, v))), axes)(*several),
        )

    assert_same(*jax.jit(lambda: [run(op) for op in pair(size, "relu")])())


@pytest.mark.parametrize("axes", [(0, None), (None, 0)])
def test_vmap_over_nothing(axes: tuple[int | None, int | None]):
    several = [v if axis is None else jnp.zeros((0, *v.shape)) for v, axis in zip(data("strided"), axes, strict=True)]

    def run(op: Any) -> Any:
        forward = lambda *v: jax.jvp(op, v, tuple(map(jnp.ones_like, v)))
        return jax.vmap(forward, axes)(*several), jax.grad(lambda *v: loss(jax.vmap(op, axes)(*v)), (0, 1))(*several)

    assert_same(*[run(op) for op in pair("strided", "relu")])


def test_a_gradient_is_rounded_once_under_vmap_too():
    """Of one group is each of several convolutions with filters of their own, in whatever order vmap and grad are."""
    rng = np.random.default_rng(7)
    arrays = [jnp.asarray(rng.normal(size=(3, 2, *s)), BF16) for s in ((4, 4, 4), (2, 4, 6), (3, 3, 6), (4, 4, 4))]
    op = ft.partial(dnn.conv_skip, input_activation="relu", determinism="batch_invariant")
    pull = lambda run, x, w, dy, dh: jax.vjp(lambda x: run(x, w), x)[1]((dy, dh))[0]
    one, several = jax.jit(ft.partial(pull, op)), jax.jit(ft.partial(pull, jax.vmap(op)))
    np.testing.assert_array_equal(several(*arrays), jnp.stack([one(*v) for v in zip(*arrays, strict=True)]))


def test_the_tangent_of_both_operands_is_rounded_whatever_follows():
    """Of a narrow type XLA would leave the rounding of the sum of both shares out."""
    x, w = (jnp.asarray(np.random.default_rng(6).normal(size=s), BF16) for s in ((4, 5, 6, 8), (1, 1, 8, 16)))

    def tangent(x: Array, w: Array) -> Array:
        op = lambda x, w: dnn.conv_skip(x, w, input_activation="relu", determinism="batch_invariant")
        return jax.jvp(op, (x, w), (x, w))[1][0]

    scaled = lambda v: v.astype(np.float32) * 1.3
    np.testing.assert_array_equal(jax.jit(lambda *v: scaled(tangent(*v)))(x, w), scaled(jax.jit(tangent)(x, w)))


def backward_calls(use: Any, size: str = "strided", activation: str | None = "relu") -> list[int]:
    """The operands of each call of backward data in the gradient, in x, of what is used of the results."""
    op = pair(size, activation)[0]
    found = dnn.explain(jax.grad(lambda x, w: jnp.sum(use(op(x, w)) ** 2)), *data(size))
    return [len(call.operands) for call in found if call.op == "conv_dgrad"]


def test_the_gradient_is_one_call():
    """Of dy and w, and of the gradient of h and of h itself where they count."""
    both = lambda results: jnp.concatenate([v.ravel() for v in results])
    assert backward_calls(both) == [4]
    assert backward_calls(both, activation=None) == [3]
    assert backward_calls(lambda results: results[0]) == [3]
    assert backward_calls(lambda results: results[0], activation=None) == [2]
    assert backward_calls(lambda results: results[1]) == []
    assert backward_calls(both, size="grouped") == [2]  # the kernels of narrow groups take no further operands
    batched = dnn.explain(
        jax.vmap(jax.grad(lambda x, w: loss(dnn.conv_skip(x, w))), (0, None)),
        *(jnp.ones((2, 3, 4, 4, 2)), jnp.ones((1, 1, 2, 3))),
    )
    assert [len(call.operands) for call in batched if call.op == "conv_dgrad"] == [3]


@pytest.mark.parametrize("engine", ["xla", "ordered"])
def test_the_gradient_is_rounded_once(engine: str):
    """It is the definition's, which two ops with a rounding between them miss."""
    rng = np.random.default_rng(4)
    x, w, dy, dh = (rng.normal(size=s).astype(BF16) for s in ((2, 6, 5, 8), (3, 3, 8, 6), (2, 4, 3, 6), (2, 6, 5, 8)))
    results, back = jax.vjp(lambda x: dnn.conv_skip(x, w, input_activation="relu", engine=engine), x)
    h = np.asarray(results[1])
    wanted = reference.conv_dgrad(dy, w, x.shape, beta=1.0, prior=dh, x=h, out_dtype=BF16, arithmetic="ordered")
    (dx,) = back((jnp.asarray(dy), jnp.asarray(dh)))
    np.testing.assert_array_equal(dx, wanted)
    apart = np.asarray(dnn.conv_dgrad(dy, w, x.shape, engine=engine)) + dh
    assert not np.array_equal(np.where(h > 0, apart, 0), wanted)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_gradient_at_zero_and_at_exceptional_values(dtype: Any):
    """0 where relu's result is 0, of either sign, or NaN; the gradient whole where it is the least number above 0."""
    least = ml_dtypes.finfo(dtype).smallest_subnormal
    x = jnp.asarray([0.0, -0.0, np.nan, -1, np.inf, 2], dtype).reshape(1, 1, 6, 1)
    w = jnp.ones((1, 1, 1, 1), dtype)
    (_, h), back = jax.vjp(lambda x: dnn.conv_skip(x, w, input_activation="relu"), x)
    np.testing.assert_array_equal(h.ravel().astype(np.float32), [0, 0, np.nan, 0, np.inf, 2])
    (dx,) = back((jnp.full_like(x, 2), jnp.full_like(x, 3)))
    np.testing.assert_array_equal(dx.ravel().astype(np.float32), [0, 0, 0, 0, 5, 5])
    h = jnp.asarray([least, -least], dtype).reshape(1, 1, 2, 1)
    found = jax.jit(lambda h: dnn.conv_dgrad(jnp.ones_like(h), w, h.shape, x=h))(h)
    np.testing.assert_array_equal(found.ravel().astype(np.float32), [1, 0])


def test_backward_data_before_a_relu_in_a_kernel():
    """What a kernel runs on a tile: the sums, the prior and the relu's result in this order."""
    finish = kernel_epilogue.finisher(Epilogue(beta=1.0, prior=True, relu=True))
    assert finish is not None
    acc, prior, h = (jnp.asarray(v, jnp.float32) for v in ([1, 2, 3, 4], [10, 20, 30, 40], [0, 1e-39, np.nan, 5]))
    np.testing.assert_array_equal(finish(acc, [prior, h], None)[np.array([0, 2, 3])], [0, 0, 44])


def test_errors():
    x, w = jnp.ones((2, 4, 4, 3)), jnp.ones((1, 1, 3, 5))
    with pytest.raises(ValueError, match="`input_activation` must be one of None, 'relu', got 'gelu'"):
        dnn.conv_skip(x, w, input_activation="gelu")
    with pytest.raises(ValueError, match="`x` must have shape"):
        dnn.conv_dgrad(jnp.ones((2, 4, 4, 5)), w, x.shape, x=x[:1])
    with pytest.raises(TypeError, match="`x` must have"):
        dnn.conv_dgrad(jnp.ones((2, 4, 4, 5)), w, x.shape, x=x.astype(BF16))
    with pytest.raises(NotImplementedError, match="`conv_skip`"):
        dnn.conv_skip(x.astype(jnp.int8), w.astype(jnp.int8), determinism="portable", engine="hopper")


@pytest.mark.skipif(hopper.unavailable() is not None, reason=str(hopper.unavailable()))
def test_a_kernel_adds_the_gradients_and_takes_the_relu_s_slope():
    def gradient(x: Array, w: Array, dy: Array, dh: Array) -> Array:
        op = lambda x: dnn.conv_skip(x, w, padding=1, input_activation="relu", engine="hopper")
        return jax.vjp(op, x)[1]((dy, dh))[0]

    shapes = ((4, 14, 14, 96), (3, 3, 96, 64), (4, 14, 14, 64), (4, 14, 14, 96))
    avals = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    text = jax.jit(gradient).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1
    assert not {"stablehlo.add ", "stablehlo.select "} & set(re.findall(r"stablehlo\.\w+ ", text))


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16], ids=str)
def test_the_mask_of_a_constant_whose_dimensions_are_permuted(dtype: Any):
    """XLA folds the bitcast of such a constant to wrong values."""
    rng, rows = np.random.default_rng(5), np.array([2, 0, 3, 1])
    x = np.maximum(rng.normal(size=(4, 5, 6, 7)), 0).astype(dtype)
    dy, w = jnp.ones((4, 5, 4, 2), dtype), jnp.ones((1, 1, 7, 2), dtype)
    given = lambda: jnp.asarray(x)[:, :, rows]
    found = jax.jit(lambda dy: dnn.conv_dgrad(dy, w, (4, 5, 4, 7), x=given()))(dy)
    np.testing.assert_array_equal(np.asarray(found) != 0, x[:, :, rows] > 0)
