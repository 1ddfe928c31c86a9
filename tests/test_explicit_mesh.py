"""Derivatives taken outside of jit on a mesh whose axes JAX follows in types, as `jax.make_mesh` makes them.

Eagerly every step of a derivative is a program of its own, whose operands have to come with the mesh that the next
step expects. Every op has to give there what it gives on one device: element by element where whole numbers make that
exact or the engine promises it, else within the computed bounds of both.
"""

import functools as ft
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
from jaxdnn._src.cases.example import LARGE, Example, examples, read
from tests.core import running_error

Function = Callable[..., Any]
SIZES = {**LARGE, "H": 6, "W": 4, "C": 16, "K": 5}
FURTHER = """
conv-epilogue            | NHWC, RSCK, padding=1, bias=K, activation="relu"
conv-cropped             | NHWC, RSCK, padding=((-1, 1), (2, -1))
conv_dgrad-cropped       | NhwK, RSCK, shape(NHWC), padding=((-1, 0), (1, -1)), alpha=2.0
pool-cropped             | NHWC, padding=((-2, 0), (0, -1)), return_indices=True
pool-indices             | NHWC, return_indices=True
pool-average             | NHWC, mode="average"
global_pool-max          | NHWC, mode="max"
adaptive_pool-average    | NHWC, output_sizes=shape(hw)
softmax-ordered          | NHWC, engine="ordered"
softmax-log              | NHWC, algorithm="log", engine="ordered"
softmax-channel          | NHWC, axis=1, engine="ordered"
softmax_dgrad-ordered    | NHWC, NHWC, engine="ordered"
logsumexp-ordered        | NHWC, engine="ordered"
activation-relu          | NHWC, activation="relu"
activation_dgrad-relu    | NHWC, NHWC, activation="relu"
dropout-fused            | NHWC, 7, bias=C, residual=NHWC, activation="relu"
transform-vectors        | NHWC, out_layout="NCHWc4", alpha=2.0
transform-fold           | NHWC, fold=2
transform-unfold         | NHWC, unfold=2
op_tensor-mul            | NHWC, _HWC, op="mul"
resample-roi             | NHWC, output_sizes=(3, 2), coordinates="tf_crop_and_resize", roi=((0, 2), (0.5, 1))
reduce-add-batch         | NHWC, axis=0, determinism="portable"
reduce-mul-batch         | NC, op="mul", axis=0
reduce-max-batch         | NHWC, op="max", axis=(0, 1)
resample_dgrad-nearest   | NHWC, shape(NhwC), method="nearest"
"""
# What eight devices do not divide: groups, windows, channels. Of each line the letters whose axes are sharded in turn.
LINES = """
group_norm-shared        | NHWC, groups=4, scale=C, bias=C                              | NC
group_norm-first         | NCHW, groups=2, scale=C, layout="NCHW", activation="relu"    | NC
group_norm-last          | CHWN, groups=4, layout="CHWN", return_statistics=True        | NC
group_norm-invariant     | NHWC, groups=2, determinism="batch_invariant"                | C
group_norm_dgrad-shared  | NHWC, NHWC, groups=4, scale=C                                | NC
adaptive_pool-few        | NHWC, output_sizes=(3, 5)                                    | HW
adaptive_pool-nearly     | NHWC, output_sizes=(7, 7), mode="average"                    | HW
adaptive_pool-periods    | NHWC, output_sizes=(24, 12), mode="max", return_indices=True | HW
adaptive_pool-lp         | NHWC, output_sizes=(12, 3), mode="lp"                        | HW
transform-vector         | NHWC, out_layout="NCHWc8"                                    | HWC
transform-filled         | NHWC, out_layout="NCHWc6"                                    | HC
transform-padding        | NHWC, padding=1, channels=20                                 | HWC
transform-cropping       | NHWC, padding=-1, channels=12                                | HWC
op_tensor-whole          | NHWC, NHWC, op="mul"                                         | NHWC
lrn_dgrad-whole          | NHWC, NHWC                                                   | NC
divisive_norm-means      | NHWC, means=NHWC                                             | NHWC
conv-cropped             | NHWC, RSCK, padding=-1                                       | HW
conv_dgrad-cropped       | NhwK, RSCK, shape(NHWC), padding=-1                          | HW
lstm-bias                | NTC, CG, DG, bias=G, engine="ordered"                        | G
"""
UNEVEN = {line.split()[0]: (read(line.rpartition("|")[0]), line.split()[-1]) for line in LINES.strip().splitlines()}
UNEVEN_SIZES = {**SIZES, "H": 8, "W": 8, "T": 2, "D": 8}
# Exact of whole numbers, or of a promised order; arrays of eight examples are sharded, the others are not.
EXACT = {e.name: e for e in examples().values() if (e.exact and e.operands) or e.name in ("resample", "pool_dgrad")}
EXACT |= {e.name: e for e in map(read, FURTHER.strip().splitlines())}
NORMS = ("layer_norm", "rms_norm", "adaptive_layer_norm", "group_norm", "instance_norm", "batch_norm")
BOUNDED = (*NORMS, "batch_norm_inference", "layer_norm_dgrad", "lrn", "divisive_norm", "lp_normalize")


def function_of(called: Example, sizes: Mapping[str, Any] = SIZES) -> tuple[Function, list[np.ndarray]]:
    """The call's first result as a function of its operands, and these."""
    function = lambda *arrays: jax.tree.leaves(called.call(getattr(dnn, called.op), *arrays, sizes=sizes))[0]
    return function, [v.astype(np.float32) for v in called.data(sizes, whole=True)]


def derivatives(function: Function, *arrays: Any) -> Any:
    """Result, gradients and tangent of a call, each step compiled by itself."""
    y, pullback = jax.vjp(function, *arrays)
    dy = ft.reduce(jnp.add, [y, jnp.ones_like(y)])
    return y, pullback(dy), jax.jvp(function, arrays, arrays)[1]


def on_mesh(
    function: Function, arrays: list[np.ndarray], place: Function, run: Function = derivatives
) -> list[np.ndarray]:
    with jax.set_mesh(jax.make_mesh((8,), ("d",))):
        return [np.asarray(found) for found in jax.tree.leaves(run(function, *map(place, arrays)))]


def sharded(array: np.ndarray) -> jax.Array:
    return jax.device_put(array, P("d") if array.shape[0] == 8 else P())


def check_exact(name: str, place: Function) -> None:
    function, arrays = function_of(EXACT[name])
    wanted = jax.tree.leaves(derivatives(function, *map(jnp.asarray, arrays)))
    for ours, alone in zip(on_mesh(function, arrays, place), wanted, strict=True):
        np.testing.assert_array_equal(ours, alone)


def check_bounded(name: str, place: Function) -> None:
    function, arrays = function_of(examples()[name])
    wanted, errors = map(jax.tree.leaves, running_error.bounds(ft.partial(derivatives, function), *arrays))
    for ours, value, error in zip(on_mesh(function, arrays, place), wanted, errors, strict=True):
        running_error.agree(ours, value, error, error)


@pytest.mark.parametrize("name", EXACT)
def test_same_as_on_one_device(name: str):
    check_exact(name, sharded)


@pytest.mark.parametrize("name", BOUNDED)
def test_within_the_bounds_of_one_device(name: str):
    check_bounded(name, sharded)


@pytest.mark.parametrize("name", [*EXACT, *BOUNDED])
def test_a_pullback_of_a_jitted_function_that_is_called_eagerly(name: str):
    """Its residuals are on the mesh that the function has inside, the cotangent on the caller's."""
    example = EXACT.get(name) or examples()[name]
    function, arrays = function_of(example)

    def run(function: Function, *arrays: Any) -> Any:
        y, pullback = jax.vjp(jax.jit(function), *arrays)
        return y, pullback(ft.reduce(jnp.add, [y, jnp.ones_like(y)]))

    found = on_mesh(function, arrays, sharded, run)
    if name in EXACT:
        for ours, alone in zip(found, jax.tree.leaves(run(function, *map(jnp.asarray, arrays))), strict=True):
            np.testing.assert_array_equal(ours, alone)
        return
    wanted, errors = map(jax.tree.leaves, running_error.bounds(ft.partial(run, function), *arrays))
    for ours, value, error in zip(found, wanted, errors, strict=True):
        running_error.agree(ours, value, error, error)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("specs", [(P("d"), P()), (P(), P("d"))], ids=["x", "residual"])
def test_a_residual_that_is_sharded_unlike_the_array(specs: tuple[P, P], wrap: Function):
    """The gradient of each has the sharding of its own."""
    function = lambda x, z: dnn.batch_norm(x, residual=z, activation="relu")[0]
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal((8, 4, 3, 5)).astype(np.float32) for _ in specs]
    run = ft.partial(derivatives, function)
    wanted, errors = map(jax.tree.leaves, running_error.bounds(run, *arrays))
    with jax.set_mesh(jax.make_mesh((8,), ("d",))):
        placed = [jax.device_put(a, spec) for a, spec in zip(arrays, specs, strict=True)]
        found = wrap(run)(*placed)
        for array, gradient in zip(placed, found[1], strict=True):
            assert jax.typeof(gradient).sharding == jax.typeof(array).sharding
    for ours, value, error in zip(jax.tree.leaves(found), wanted, errors, strict=True):
        running_error.agree(np.asarray(ours), value, error, error)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("alone", [False, True], ids=["every", "last"])
@pytest.mark.parametrize(("name", "letter"), [(e.name, a) for e, letters in UNEVEN.values() for a in letters])
def test_what_devices_do_not_divide(name: str, letter: str, alone: bool, wrap: Function):
    """The axes of a letter are sharded, of all operands or of the last one that has them."""
    called, _ = UNEVEN[name]
    function, arrays = function_of(called, UNEVEN_SIZES)
    having = [i for i, axes in enumerate(called.operands) if letter in axes]
    specs = [P(*("d" if a == letter else None for a in axes)) for axes in called.operands]
    specs = [spec if i in having[-1:] or not alone else P() for i, spec in enumerate(specs)]
    with jax.set_mesh(jax.make_mesh((8,), ("d",))):
        placed = [jax.device_put(a, spec) for a, spec in zip(arrays, specs, strict=True)]
        found = wrap(ft.partial(derivatives, function))(*placed)
        for array, gradient in zip(placed, found[1], strict=True):
            assert jax.typeof(gradient).sharding == jax.typeof(array).sharding
    run = ft.partial(derivatives, function)
    ours = map(np.asarray, jax.tree.leaves(found))
    if not called.op.startswith(("group_norm", "lrn", "divisive")):
        for one, wanted in zip(ours, jax.tree.leaves(run(*map(jnp.asarray, arrays))), strict=True):
            np.testing.assert_array_equal(one, wanted)
        return
    wanted, errors = map(jax.tree.leaves, running_error.bounds(run, *arrays))
    for one, value, error in zip(ours, wanted, errors, strict=True):
        running_error.agree(one, value, error, error)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "replicated"])
@pytest.mark.parametrize(
    "name", ["conv", "adaptive_pool", "softmax-ordered", "resample", "add", "layer_norm", "batch_norm"]
)
def test_operands_that_are_not_placed(name: str, place: Function):
    (check_exact if name in EXACT else check_bounded)(name, place)


@pytest.mark.parametrize(
    "name", ["conv", "pool", "softmax-ordered", "activation_dgrad-relu", "dropout", "pixel_shuffle"]
)
def test_no_context_is_needed_where_jax_needs_none(name: str):
    """Operands that are placed on a mesh say themselves which."""
    function, arrays = function_of(EXACT[name])
    mesh = jax.make_mesh((8,), ("d",))
    placed = [jax.device_put(a, NamedSharding(mesh, P("d") if a.shape[0] == 8 else P())) for a in arrays]
    y, pullback = jax.vjp(function, *placed)
    alone, pull_alone = jax.vjp(function, *map(jnp.asarray, arrays))
    np.testing.assert_array_equal(y, alone)
    for ours, wanted in zip(pullback(y), pull_alone(alone), strict=True):
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("name", ["conv", "softmax-ordered", "pixel_shuffle", "reduce", "op_tensor"])
def test_gradients_are_sharded_like_their_operands(name: str):
    function, arrays = function_of(EXACT[name])
    with jax.set_mesh(jax.make_mesh((8,), ("d",))):
        placed = [sharded(a) for a in arrays]
        y, pullback = jax.vjp(function, *placed)
        for x, dx in zip(placed, pullback(y), strict=True):
            assert jax.typeof(dx).sharding == jax.typeof(x).sharding
