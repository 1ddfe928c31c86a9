"""Derivatives taken outside of jit on a mesh whose axes JAX follows in types, as `jax.make_mesh` makes them.

Eagerly every step of a derivative is a program of its own, whose operands have to come with the mesh that the next
step expects. Every op has to give there what it gives on one device: element by element where whole numbers make that
exact or the engine promises it, else within the computed bounds of both.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
from tests.core import running_error

Function = Callable[..., Any]
Case = tuple[Function, tuple[tuple[int, ...], ...]]

IMAGE, OTHER, SMALL = (8, 6, 4, 16), (8, 6, 4, 16), (8, 3, 2, 16)
ROWS: dict[str, Any] = {"engine": "ordered"}

# An op, and the shapes of what it is differentiated in; arrays of eight examples are sharded, the others are not.
EXACT: dict[str, Case] = {
    "conv": (lambda x, w: dnn.conv(x, w, padding=1), (IMAGE, (3, 3, 16, 5))),
    "conv-grouped": (lambda x, w: dnn.conv(x, w, padding=1, groups=4), (IMAGE, (3, 3, 4, 12))),
    "conv-epilogue": (
        lambda x, w, b: dnn.conv(x, w, padding=1, bias=b, activation="relu"),
        (IMAGE, (3, 3, 16, 5), (5,)),
    ),
    "conv_dgrad": (lambda dy, w: dnn.conv_dgrad(dy, w, IMAGE, padding=1), ((8, 6, 4, 5), (3, 3, 16, 5))),
    "conv_wgrad": (lambda x, dy: dnn.conv_wgrad(x, dy, (3, 3, 16, 5), padding=1), (IMAGE, (8, 6, 4, 5))),
    "conv_transpose": (lambda x, w: dnn.conv_transpose(x, w), (IMAGE, (3, 3, 5, 16))),
    "conv_bgrad": (lambda dy: dnn.conv_bgrad(dy), (IMAGE,)),
    "pool-max": (lambda x: dnn.pool(x), (IMAGE,)),
    "pool-max-overlapping": (lambda x: dnn.pool(x, window=3, stride=1, padding=1), (IMAGE,)),
    "pool-max-indices": (lambda x: dnn.pool(x, return_indices=True)[0], (IMAGE,)),
    "pool-average": (lambda x: dnn.pool(x, mode="average"), (IMAGE,)),
    "pool_dgrad": (lambda dy: dnn.pool_dgrad(dy, IMAGE, mode="average"), (SMALL,)),
    "global_pool": (lambda x: dnn.global_pool(x, mode="max"), (IMAGE,)),
    "adaptive_pool": (lambda x: dnn.adaptive_pool(x, output_sizes=(3, 2)), (IMAGE,)),
    "unpool": (lambda y: dnn.unpool(y, dnn.pool(_twice(y), return_indices=True)[1], IMAGE), (SMALL,)),
    "softmax": (lambda x: dnn.softmax(x, **ROWS), (IMAGE,)),
    "softmax-log": (lambda x: dnn.softmax(x, algorithm="log", **ROWS), (IMAGE,)),
    "softmax-channel": (lambda x: dnn.softmax(x, axis=1, **ROWS), (IMAGE,)),
    "softmax_dgrad": (lambda dy, y: dnn.softmax_dgrad(dy, y, **ROWS), (IMAGE, OTHER)),
    "logsumexp": (lambda x: dnn.logsumexp(x, **ROWS), (IMAGE,)),
    "activation": (lambda x: dnn.activation(x, activation="relu"), (IMAGE,)),
    "activation_dgrad": (lambda dy, x: dnn.activation_dgrad(dy, x, activation="relu"), (IMAGE, OTHER)),
    "dropout": (lambda x: dnn.dropout(x, jax.random.key(3)), (IMAGE,)),
    "dropout-fused": (
        lambda x, b, r: dnn.dropout(x, jax.random.key(3), bias=b, residual=r, activation="relu"),
        (IMAGE, (16,), IMAGE),
    ),
    "transform": (lambda x: dnn.transform(x, out_layout="NCHWc4", alpha=2.0), (IMAGE,)),
    "transform-fold": (lambda x: dnn.transform(x, fold=2), (IMAGE,)),
    "transform-unfold": (lambda x: dnn.transform(x, unfold=2), (IMAGE,)),
    "add": (lambda x, c: dnn.add(x, c), ((1, 1, 1, 16), IMAGE)),
    "op_tensor-mul": (lambda a, b: dnn.op_tensor(a, b, op="mul"), (IMAGE, (1, 1, 1, 16))),
    "op_tensor-max": (lambda a, b: dnn.op_tensor(a, b, op="max"), (IMAGE, (1, 1, 1, 16))),
    "scale": (lambda x: dnn.scale(x, alpha=3.0), (IMAGE,)),
    "reduce-add": (lambda x: dnn.reduce(x, axis=(1, 2)), (IMAGE,)),
    "reduce-add-batch": (lambda x: dnn.reduce(x, axis=0, determinism="portable"), (IMAGE,)),
    "reduce-mul-batch": (lambda x: dnn.reduce(x, op="mul", axis=0), ((8, 3),)),
    "reduce-max": (lambda x: dnn.reduce(x, op="max", axis=(0, 1)), (IMAGE,)),
    "im2col": (lambda x: dnn.im2col(x, padding=1), (IMAGE,)),
    "col2im": (lambda y: dnn.col2im(y, IMAGE), ((8, 4, 2, 144),)),
    "resample": (lambda x: dnn.resample(x, output_sizes=(12, 8)), (IMAGE,)),
    "resample_dgrad": (lambda dy: dnn.resample_dgrad(dy, IMAGE, method="nearest"), ((8, 12, 8, 16),)),
    "pixel_shuffle": (lambda x: dnn.pixel_shuffle(x), (IMAGE,)),
    "pixel_unshuffle": (lambda x: dnn.pixel_unshuffle(x), (IMAGE,)),
}
BOUNDED: dict[str, Case] = {
    "layer_norm": (lambda x, s, b: dnn.layer_norm(x, scale=s, bias=b), (IMAGE, (16,), (16,))),
    "rms_norm": (lambda x, s: dnn.rms_norm(x, scale=s), (IMAGE, (16,))),
    "adaptive_layer_norm": (lambda x, s, b: dnn.adaptive_layer_norm(x, s, b), (IMAGE, (8, 16), (8, 16))),
    "group_norm": (lambda x, s, b: dnn.group_norm(x, groups=4, scale=s, bias=b), (IMAGE, (16,), (16,))),
    "instance_norm": (lambda x, s: dnn.instance_norm(x, scale=s), (IMAGE, (16,))),
    "batch_norm": (lambda x, s, b: dnn.batch_norm(x, scale=s, bias=b)[0], (IMAGE, (16,), (16,))),
    "batch_norm_inference": (lambda x, m: dnn.batch_norm_inference(x, m, jnp.ones(16) * 2), (IMAGE, (16,))),
    "layer_norm_dgrad": (lambda dy, x: dnn.layer_norm_dgrad(dy, x)[0], (IMAGE, OTHER)),
    "lrn": (lambda x: dnn.lrn(x), (IMAGE,)),
    "divisive_norm": (lambda x: dnn.divisive_norm(x), (IMAGE,)),
    "lp_normalize": (lambda x: dnn.lp_normalize(x), (IMAGE,)),
}


def _twice(y: Any) -> Any:
    return jax.lax.stop_gradient(jnp.repeat(jnp.repeat(y, 2, 1), 2, 2))


def operands(name: str, shapes: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(len(name))
    return [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]


def derivatives(function: Function, *arrays: Any) -> Any:
    """Result, gradients and tangent of a call, each step compiled by itself."""
    y, pullback = jax.vjp(function, *arrays)
    dy = ft.reduce(jnp.add, [y, jnp.ones_like(y)])
    return y, pullback(dy), jax.jvp(function, arrays, arrays)[1]


def on_mesh(function: Function, arrays: list[np.ndarray], place: Function) -> list[np.ndarray]:
    with jax.set_mesh(jax.make_mesh((8,), ("d",))):
        return [np.asarray(found) for found in jax.tree.leaves(derivatives(function, *map(place, arrays)))]


def sharded(array: np.ndarray) -> jax.Array:
    return jax.device_put(array, P("d") if array.shape[0] == 8 else P())


def check_exact(name: str, place: Function) -> None:
    function, shapes = EXACT[name]
    arrays = operands(name, shapes)
    wanted = jax.tree.leaves(derivatives(function, *map(jnp.asarray, arrays)))
    for ours, alone in zip(on_mesh(function, arrays, place), wanted, strict=True):
        np.testing.assert_array_equal(ours, alone)


def check_bounded(name: str, place: Function) -> None:
    function, shapes = BOUNDED[name]
    arrays = operands(name, shapes)
    wanted, errors = map(jax.tree.leaves, running_error.bounds(ft.partial(derivatives, function), *arrays))
    for ours, value, error in zip(on_mesh(function, arrays, place), wanted, errors, strict=True):
        running_error.agree(ours, value, error, error)


@pytest.mark.parametrize("name", EXACT)
def test_same_as_on_one_device(name: str):
    check_exact(name, sharded)


@pytest.mark.parametrize("name", BOUNDED)
def test_within_the_bounds_of_one_device(name: str):
    check_bounded(name, sharded)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "replicated"])
@pytest.mark.parametrize("name", ["conv", "adaptive_pool", "softmax", "resample", "add", "layer_norm", "batch_norm"])
def test_operands_that_are_not_placed(name: str, place: Function):
    (check_exact if name in EXACT else check_bounded)(name, place)


@pytest.mark.parametrize("name", ["conv", "pool-max", "softmax", "activation_dgrad", "dropout", "pixel_shuffle"])
def test_no_context_is_needed_where_jax_needs_none(name: str):
    """Operands that are placed on a mesh say themselves which."""
    function, shapes = EXACT[name]
    arrays, mesh = operands(name, shapes), jax.make_mesh((8,), ("d",))
    placed = [jax.device_put(a, NamedSharding(mesh, P("d") if a.shape[0] == 8 else P())) for a in arrays]
    y, pullback = jax.vjp(function, *placed)
    alone, pull_alone = jax.vjp(function, *map(jnp.asarray, arrays))
    np.testing.assert_array_equal(y, alone)
    for ours, wanted in zip(pullback(y), pull_alone(alone), strict=True):
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("name", ["conv", "softmax", "pixel_shuffle", "reduce-add", "op_tensor-max"])
def test_gradients_are_sharded_like_their_operands(name: str):
    function, shapes = EXACT[name]
    arrays = operands(name, shapes)
    with jax.set_mesh(jax.make_mesh((8,), ("d",))):
        placed = [sharded(a) for a in arrays]
        y, pullback = jax.vjp(function, *placed)
        for x, dx in zip(placed, pullback(y), strict=True):
            assert jax.typeof(dx).sharding == jax.typeof(x).sharding
