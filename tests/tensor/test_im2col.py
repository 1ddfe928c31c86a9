"""im2col and col2im: as the matrix product that a convolution is, and against their definition bit for bit."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
import jaxdnn_reference as reference
from tests.tensor.data import DTYPES, data

WINDOW = {"stride": (2, 1), "padding": ((1, 2), (0, 1)), "dilation": (1, 2)}
CASES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("NHWC", (2, 7, 6, 3), {"window": (3, 2), **WINDOW}),
    ("NHWC", (2, 7, 6, 3), {"window": (3, 2), **WINDOW, "mode": "convolution", "order": "channels_taps"}),
    ("NCHW", (2, 3, 7, 6), {"window": (3, 2), **WINDOW}),
    ("NCHW", (2, 3, 7, 6), {"window": 2, "padding": "SAME", "stride": 3, "order": "taps_channels"}),
    ("CHWN", (3, 7, 6, 2), {"window": (3, 2), **WINDOW, "mode": "convolution"}),
    ("NCHWc4", (2, 2, 7, 6, 4), {"window": (3, 2), **WINDOW}),
    ("NWC", (2, 9, 3), {"window": 4, "stride": 5}),
    ("NCDHW", (2, 3, 5, 6, 4), {"window": (2, 3, 1), "padding": 1, "dilation": 2}),
]
each_case = pytest.mark.parametrize(("layout", "shape", "options"), CASES)


@each_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_definition(layout: str, shape: tuple[int, ...], options: dict[str, Any], dtype: str):
    x = data(dtype, *shape)
    y = jax.jit(ft.partial(dnn.im2col, layout=layout, **options))(x)
    wanted = reference.im2col(x, layout=layout, **options)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(y, np.float64), wanted.astype(np.float64))
    back = jax.jit(lambda y: dnn.col2im(y, shape, layout=layout, **options))(wanted)
    ordered = reference.col2im(wanted, shape, layout=layout, arithmetic="ordered", **options)
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(back, np.float64), ordered.astype(np.float64))


@each_case
def test_each_is_the_others_transpose(layout: str, shape: tuple[int, ...], options: dict[str, Any]):
    there = lambda x: dnn.im2col(x, layout=layout, **options)
    back = lambda y: dnn.col2im(y, shape, layout=layout, **options)
    x = np.random.default_rng(0).integers(-4, 5, shape).astype(np.float32)
    ct = np.random.default_rng(1).integers(-4, 5, jax.eval_shape(there, x).shape).astype(np.float32)

    @jax.jit
    def both(x: jax.Array, ct: jax.Array) -> Any:
        (y, of_there), (dx, of_back) = jax.vjp(there, x), jax.vjp(back, ct)
        return y, dx, of_there(ct)[0], of_back(x)[0]

    y, dx, transposed, dy = map(np.asarray, both(x, ct))
    np.testing.assert_array_equal(transposed, dx)
    np.testing.assert_array_equal(dy, y)
    assert np.vdot(y, ct) == np.vdot(x, dx)


@pytest.mark.parametrize("mode", ["cross_correlation", "convolution"])
def test_convolution_is_a_matrix_product(mode: str):
    rng = np.random.default_rng(0)
    x, w = rng.integers(-3, 4, (2, 7, 6, 3)).astype(np.float32), rng.integers(-3, 4, (3, 2, 3, 5)).astype(np.float32)
    patches = jax.jit(ft.partial(dnn.im2col, window=(3, 2), mode=mode, **WINDOW))(x)
    np.testing.assert_array_equal(patches @ w.reshape(18, 5), dnn.conv(x, w, mode=mode, **WINDOW))
    first, kcrs = {"layout": "NCHW", "mode": mode, **WINDOW}, w.transpose(3, 2, 0, 1)
    patches = jax.jit(ft.partial(dnn.im2col, window=(3, 2), **first))(x.transpose(0, 3, 1, 2))
    found = jnp.einsum("kf,nfpq->nkpq", kcrs.reshape(5, 18), patches)
    np.testing.assert_array_equal(found, dnn.conv(x.transpose(0, 3, 1, 2), kcrs, **first))


def test_gradient_adds_in_float32():
    """256 + 1 + 1 is 258 in bfloat16 if it is added before it is rounded, and 256 if not."""
    ct = jnp.array([[[0, 1, 0], [0, 0, 1], [256, 0, 0]]], jnp.bfloat16).reshape(1, 3, 3)
    x = jnp.zeros((1, 5, 1), jnp.bfloat16)
    transposed = lambda ct: jax.vjp(lambda x: dnn.im2col(x, layout="NWC"), x)[1](ct)[0]
    for op in (transposed, lambda ct: dnn.col2im(ct, x.shape, layout="NWC")):
        dx = np.asarray(jax.jit(op)(ct))
        assert dx[0, :, 0].tolist() == reference.col2im(np.asarray(ct), x.shape, layout="NWC")[0, :, 0].tolist()


ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: dnn.im2col(jnp.ones((1, 2, 2, 1))), ValueError, "`window` must fit into the padded input, got"),
    (lambda: dnn.im2col(jnp.ones((1, 2, 2, 1)), window=0), ValueError, "`window` must be at least 1 along every axis"),
    (
        lambda: dnn.im2col(jnp.ones((2, 4, 4, 2)), padding=2**30),
        ValueError,
        r"`padding` must give fewer than 2\^63 elements, got shape \(2, 2147483652, 2147483652, 2\)",
    ),
    (lambda: dnn.im2col(jnp.ones((1, 4, 4, 1)), order="RSC"), ValueError, "`order` must be one of 'taps_channels', "),
    (lambda: dnn.im2col(jnp.ones((1, 4, 4, 1)), mode="conv"), ValueError, "`mode` must be one of 'cross_correlation'"),
    (lambda: dnn.im2col(jnp.ones((4, 4, 1))), ValueError, "`x` must have 4 dimensions for layout NHWC"),
    (lambda: dnn.col2im(jnp.ones((1, 2, 2, 8)), (1, 4, 4, 1)), ValueError, r"`y` must have shape \(1, 2, 2, 9\)"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors(call: Callable[[], Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("order", ["channels_taps", "taps_channels"])
def test_an_empty_batch(order: str):
    options: dict[str, Any] = {"layout": "NCHW", "order": order}
    x = jnp.zeros((0, 2, 4, 4))
    y = jax.jit(ft.partial(dnn.im2col, **options))(x)
    assert y.shape == (0, 18, 2, 2)
    assert jax.jit(lambda y: dnn.col2im(y, x.shape, **options))(y).shape == x.shape
    assert reference.im2col(np.asarray(x), layout="NCHW", order=order).shape == y.shape


@pytest.mark.parametrize("axis", [1, 2])
def test_windows_beyond_the_edge_of_a_sharded_axis(axis: int):
    """XLA aborts where it shards an axis of narrow floats that is dilated and cropped at once."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    options: dict[str, Any] = {"window": (3, 3), "stride": 2, "padding": 1}
    x = np.random.default_rng(0).normal(size=(2, 16, 12, 4)).astype(ml_dtypes.bfloat16)
    y = np.asarray(jax.jit(ft.partial(dnn.im2col, **options))(x))
    run = jax.jit(lambda y: dnn.col2im(y, x.shape, **options))
    there = NamedSharding(mesh, P(*("d" if i == axis else None for i in range(4))))
    np.testing.assert_array_equal(run(jax.device_put(y, there)), run(y))
