"""Spatial transformers and warps: the definition's bits, SciPy's values, conventions, derivatives, errors."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

import jaxdnn as dnn
import jaxdnn_reference as reference

LAYOUTS = {1: "NWC", 2: "NHWC", 3: "NDHWC"}
SIZES, AFTER = (7, 5, 4), (6, 3, 2)


def data(rank: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, matrices near a turn, and displacements of which some lead outside."""
    rng = np.random.default_rng(rank)
    x = rng.normal(size=(2, *SIZES[:rank], 3))
    theta = 0.6 * rng.normal(size=(2, rank, rank + 1))
    return x.astype(dtype), theta.astype(dtype), rng.uniform(-3, 3, (2, *AFTER[:rank], rank)).astype(dtype)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transformer_is_scipys_affine_transform(rank: int):
    """With cuDNN's conventions, the defaults; its matrix is in pixels, of which the outermost are at -1 and 1."""
    x, theta, _ = data(rank)
    sizes, after = SIZES[:rank], AFTER[:rank]
    options: Any = {"sizes": after, "layout": LAYOUTS[rank]}
    y = jax.jit(lambda x, theta: dnn.spatial_transformer(x, theta, **options))(x, theta)
    np.testing.assert_array_equal(y, reference.spatial_transformer(x, theta, **options, arithmetic="ordered"))
    np.testing.assert_allclose(y, reference.spatial_transformer(x, theta, **options), atol=2e-5)
    into, back = ((np.asarray(n) - 1) / 2 for n in (after, sizes))
    for n in range(2):
        matrix = back[:, None] * theta[n, ::-1, rank - 1 :: -1].astype(np.float64) / into
        offset = back * (1 + theta[n, ::-1, rank].astype(np.float64)) - matrix @ into
        for c in range(3):
            of = x[n, ..., c].astype(np.float64)
            moved: Any = offset  # an array, of which SciPy's types do not know
            wanted = scipy.ndimage.affine_transform(of, matrix, moved, after, order=1, mode="grid-constant")
            np.testing.assert_allclose(y[n, ..., c], wanted, atol=2e-5)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("order", ["xy", "ij"])
def test_warp_is_scipys_map_coordinates(rank: int, order: str):
    x, _, flow = data(rank)
    options: Any = {"padding": "border", "order": order, "layout": LAYOUTS[rank]}
    y = jax.jit(lambda x, flow: dnn.warp(x, flow, **options))(x, flow)
    np.testing.assert_array_equal(y, reference.warp(x, flow, **options, arithmetic="ordered"))
    np.testing.assert_allclose(y, reference.warp(x, flow, **options), atol=1e-5)
    for n in range(2):
        moved = np.moveaxis(flow[n].astype(np.float64), -1, 0)
        places = np.indices(AFTER[:rank]) + (moved if order == "ij" else moved[::-1])
        for c in range(3):
            wanted = scipy.ndimage.map_coordinates(x[n, ..., c].astype(np.float64), places, order=1, mode="nearest")
            np.testing.assert_allclose(y[n, ..., c], wanted, atol=1e-5)


def test_the_flow_to_a_second_image_brings_it_back():
    """What moved by 2 to the right and 1 down from a first image to a second one, by the flow (2, 1)."""
    first = np.random.default_rng(0).normal(size=(1, 8, 9, 2)).astype(np.float32)
    second = np.roll(first, (1, 2), (1, 2))
    flow = np.tile(np.array([2.0, 1.0], np.float32), (1, 8, 9, 1))
    np.testing.assert_array_equal(dnn.warp(second, flow)[:, :7, :7], first[:, :7, :7])
    # Over 1024 pixels a place in 16 bits would be off by up to 4 pixels.
    line = np.arange(1024, dtype=np.float32).reshape(1, -1, 1)
    half = jnp.full((1, 1024, 1), 0.5, jnp.bfloat16)
    np.testing.assert_array_equal(dnn.warp(line, half, layout="NWC")[0, :-1, 0], line[0, :-1, 0] + 0.5)


def test_the_defaults_of_a_transformer():
    x, _, _ = data(2)
    identity = jnp.array([[[1.0, 0, 0], [0, 1, 0]]], jnp.bfloat16)
    np.testing.assert_allclose(dnn.spatial_transformer(x, identity), x, atol=1e-6)
    channels_first = dnn.spatial_transformer(np.moveaxis(x, -1, 1), identity, sizes=(4, 9), layout="NCHW")
    aligned = dnn.spatial_transformer(x, identity, sizes=(4, 9))
    np.testing.assert_array_equal(jnp.moveaxis(channels_first, 1, -1), aligned)
    grid = dnn.affine_grid(jnp.tile(identity.astype(jnp.float32), (2, 1, 1)), (4, 9))
    other = dnn.spatial_transformer(x, identity, sizes=(4, 9), align_corners=False)
    np.testing.assert_array_equal(other, dnn.grid_sample(x, grid))
    assert not np.allclose(other, aligned)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_matrices_make_a_wide_grid(dtype: Any):
    x, theta, _ = data(2)
    narrow = jnp.asarray(theta, dtype)
    found = jax.jit(dnn.spatial_transformer)(x, narrow)
    np.testing.assert_array_equal(found, dnn.spatial_transformer(x, narrow.astype(jnp.float32)))


@pytest.mark.usefixtures("x64")
def test_derivatives_are_the_definitions_differences():
    x, theta, flow = data(2, np.float64)
    rng, h = np.random.default_rng(9), 2.0**-18
    for name, given in (("spatial_transformer", theta), ("warp", flow)):
        ours, theirs = getattr(dnn, name), getattr(reference, name)
        dx, along = rng.normal(size=x.shape), rng.normal(size=given.shape)
        dy = rng.normal(size=theirs(x, given).shape)
        back = jax.jit(lambda x, v, f=ours, dy=dy: jax.vjp(f, x, v)[1](jnp.asarray(dy)))
        of_x, of_v = back(x, given)
        np.testing.assert_allclose(np.vdot(of_x, dx), np.vdot(dy, theirs(x + dx, given) - theirs(x, given)), atol=1e-8)
        ends = (theirs(x, given + s * along) for s in (h, -h))
        np.testing.assert_allclose(np.vdot(of_v, along), np.vdot(dy, ft.reduce(np.subtract, ends)) / (2 * h), atol=1e-6)
        second = jax.jvp(back, (x, given), (dx, along))[1]
        for found, up, down in zip(second, *(back(x + s * dx, given + s * along) for s in (h, -h)), strict=True):
            np.testing.assert_allclose(found, (up - down) / (2 * h), atol=2e-5)


def test_one_matrix_or_flow_for_all_images_and_vmap():
    x, theta, flow = data(2)
    for op, given in ((dnn.spatial_transformer, theta), (dnn.warp, flow)):
        both = np.broadcast_to(given[:1], given.shape)
        np.testing.assert_array_equal(op(x, given[:1]), op(x, both))
        found = jax.jit(jax.vmap(op))(x[:, None], given[:, None])
        np.testing.assert_array_equal(found[:, 0], op(x, given))


def test_a_displacement_of_nan_and_one_far_out():
    line = jnp.arange(1.0, 5.0).reshape(1, 4, 1)
    flow = jnp.array([np.nan, np.inf, -1e30, 0.25]).reshape(1, 4, 1)
    run = lambda x: dnn.warp(x, flow, layout="NWC")[0, :, 0]
    np.testing.assert_array_equal(run(line), [np.nan, 0, 0, 3])
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(run(x)))(line)[0, :, 0], [0, 0, 0, 0.75])


X, THETA, FLOW = np.ones((2, 4, 5, 3), np.float32), np.ones((2, 2, 3), np.float32), np.ones((2, 4, 5, 2), np.float32)


@pytest.mark.parametrize(
    ("op", "given", "options", "error", "text"),
    [
        ("spatial_transformer", THETA[:, :1], {}, ValueError, "`theta` must have shape .2, 2, 3. or .1, 2, 3. for"),
        ("spatial_transformer", np.ones((3, 2, 3)), {}, ValueError, "images of 2 spatial axes, got .3, 2, 3."),
        ("spatial_transformer", THETA.astype(int), {}, TypeError, "`theta` must have one of the dtypes float32"),
        ("spatial_transformer", THETA, {"sizes": (1, 2, 3)}, ValueError, "`sizes` must be an integer or 2 integers"),
        ("spatial_transformer", THETA, {"padding": "zero"}, ValueError, "`padding` must be one of 'zeros'"),
        ("warp", FLOW[..., :1], {}, ValueError, "`flow` must have 4 axes, the first of size 2 or 1 and the last of"),
        ("warp", np.moveaxis(FLOW, -1, 1), {}, ValueError, "`flow` must have 4 axes, .* got shape .2, 2, 4, 5."),
        ("warp", FLOW.astype(int), {}, TypeError, "`flow` must have one of the dtypes float32, .* got int"),
        ("warp", FLOW, {"order": "uv"}, ValueError, "`order` must be one of 'xy', 'ij', got 'uv'"),
        ("warp", FLOW, {"layout": "NHW"}, ValueError, "`layout`"),
    ],
)  # fmt: skip
def test_errors(op: str, given: Any, options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        getattr(dnn, op)(X, given, **options)
