"""On meshes of several shapes every result is that of one device, however operands are sharded.

XLA's own partitioner has been seen to give wrong filter gradients where x is sharded along a spatial axis and dy along
the batch. Whole numbers make sums exact, so results are compared bit for bit; those of engines that promise
mesh_invariant are compared for any data.
"""

import dataclasses
import functools as ft
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
from jaxdnn._src.core import engines

MESHES = ((8,), (4, 2), (2, 2, 2))
X, W, DY = (8, 16, 8, 16), (3, 3, 16, 24), (8, 16, 8, 24)
HALF = (8, 8, 4, 16)
WIDE: dict[str, Any] = {"window": 3, "stride": 1, "padding": 1}
STRIDED: dict[str, Any] = {"window": 3, "stride": 2, "padding": 1}


def _w(window: dict[str, Any]) -> tuple[int, ...]:
    return (*window.get("taps", (3, 3)), 16 // window.get("groups", 1), 48 if window.get("groups") == 16 else 24)


def _cases() -> dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]]:
    cases: dict[str, Any] = {}
    windows: dict[str, dict[str, Any]] = {
        "": {"padding": 1},
        "strided": {"padding": 1, "stride": (1, 2)},
        "doubled": {"padding": ((1, 0), (0, 1)), "stride": 2},
        "dilated": {"padding": 4, "dilation": 4},
        "unpadded": {},
        "grouped": {"padding": 1, "groups": 4},
        "depthwise": {"padding": 1, "groups": 16, "stride": (2, 1)},
        "reversed": {"padding": 1, "mode": "convolution", "stride": 2},
    }
    for name, window in windows.items():
        w = _w(window)
        y = jax.eval_shape(ft.partial(dnn.conv, **window), jnp.zeros(X), jnp.zeros(w)).shape
        cases |= {
            f"conv {name}": (ft.partial(dnn.conv, **window), (X, w)),
            f"conv_dgrad {name}": (lambda dy, w, k=window: dnn.conv_dgrad(dy, w, X, **k), (y, w)),
            f"conv_wgrad {name}": (lambda x, dy, k=window, w=w: dnn.conv_wgrad(x, dy, w, **k), (X, y)),
        }
    epilogue = lambda x, w, b, r: dnn.conv(x, w, padding=1, bias=b, residual=r, activation="relu")
    cases["conv epilogue"] = epilogue, (X, W, (24,), DY)
    cases["conv_transpose"] = ft.partial(dnn.conv_transpose, stride=2), (HALF, (2, 2, 6, 16))
    cases["conv NCHW"] = ft.partial(dnn.conv, layout="NCHW", padding=1), ((8, 16, 16, 8), (24, 16, 3, 3))
    for name, window in {
        "": {},
        " wide": WIDE,
        " strided": STRIDED,
        " long": {"window": (7, 1), "padding": (3, 0), "stride": 1},
    }.items():
        cases |= {
            f"pool max{name}": (ft.partial(dnn.pool, **window), (X,)),
            f"pool max{name}, gradient": (_gradient(ft.partial(dnn.pool, **window)), (X,)),
            f"pool max{name}, indices": (ft.partial(dnn.pool, return_indices=True, **window), (X,)),
        }
        for mode in ("average", "average_exclude_padding"):
            of = ft.partial(dnn.pool, mode=mode, determinism="portable", **window)
            cases |= {f"pool {mode}{name}": (of, (X,)), f"pool {mode}{name}, gradient": (_gradient(of), (X,))}
    ordered: dict[str, Any] = {"determinism": "mesh_invariant"}
    cases |= {
        "softmax": (ft.partial(dnn.softmax, **ordered), (X,)),
        "softmax, gradient": (_gradient(ft.partial(dnn.softmax, **ordered)), (X,)),
        "logsumexp": (ft.partial(dnn.logsumexp, axis=(1, 3), **ordered), (X,)),
        "resample": (ft.partial(dnn.resample, output_sizes=(32, 8), **ordered), (X,)),
        "resample, gradient": (_gradient(ft.partial(dnn.resample, output_sizes=(24, 16), **ordered)), (X,)),
        "reduce": (ft.partial(dnn.reduce, axis=(0, 2), **ordered), (X,)),
        "im2col": (ft.partial(dnn.im2col, padding=1), (X,)),
        "pixel_shuffle": (dnn.pixel_shuffle, (X,)),
    }
    return cases


def _gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda x: jnp.sum(function(x) * _numbers(function(x).shape)))


def _numbers(shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(-3, 4, shape).astype(np.float32))


CASES = _cases()


def mesh_of(shape: tuple[int, ...]) -> Mesh:
    return jax.make_mesh(shape, tuple("abc"[: len(shape)]), axis_types=(AxisType.Auto,) * len(shape))


def drawn(rng: random.Random, mesh: Mesh, shape: tuple[int, ...]) -> P:
    """A sharding of an array: every mesh axis along one of its axes that can take it, or along none."""
    axes: list[list[str]] = [[] for _ in shape]
    sizes = list(shape)
    for name in rng.sample(mesh.axis_names, len(mesh.axis_names)):
        able = [i for i, size in enumerate(sizes) if size % mesh.shape[name] == 0]
        if able and rng.random() < 0.8:
            at = rng.choice(able)
            axes[at].append(name)
            sizes[at] //= mesh.shape[name]
    return P(*(tuple(names) or None for names in axes))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_any_sharding_of_the_operands(name: str, shape: tuple[int, ...]):
    function, shapes = CASES[name]
    rng, mesh = random.Random(f"{name} {shape}"), mesh_of(shape)
    arrays = [np.random.default_rng(i).integers(-3, 4, s).astype(np.float32) for i, s in enumerate(shapes)]
    wanted = jax.tree.leaves(jax.jit(function)(*arrays))
    for _ in range(4):
        specs = [drawn(rng, mesh, s) for s in shapes]
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
        for ours, alone in zip(jax.tree.leaves(jax.jit(function)(*placed)), wanted, strict=True):
            np.testing.assert_array_equal(ours, alone, err_msg=f"{name} on {shape} with {specs}")


def test_filter_gradient_of_operands_sharded_along_different_axes():
    """What the partitioner of XLA gets wrong, for lax too."""
    mesh, rng = mesh_of((4, 2)), np.random.default_rng(0)
    x, dy = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((8, 6, 6, 4), (8, 6, 3, 8)))
    gradient = jax.jit(lambda x, dy: dnn.conv_wgrad(x, dy, (3, 3, 4, 8), padding=1, stride=(1, 2)))
    placed = (jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((x, P(None, "b")), (dy, P("a"))))
    np.testing.assert_array_equal(gradient(*placed), gradient(x, dy))


def test_exported_filter_gradient():
    """An exported program keeps no rule for the partitioner; it is right all the same, with whole windows."""
    mesh, rng = mesh_of((4, 2)), np.random.default_rng(0)
    arrays = [rng.integers(-3, 4, shape).astype(np.float32) for shape in ((8, 6, 6, 4), (8, 6, 3, 8))]
    shardings = tuple(NamedSharding(mesh, spec) for spec in (P(None, "b"), P("a")))
    for groups in (1, 2):

        def function(x: Any, dy: Any, groups: int = groups) -> jax.Array:
            return dnn.conv_wgrad(x, dy, (3, 3, 4 // groups, 8), padding=1, stride=(1, 2), groups=groups)

        gradient = jax.jit(function, in_shardings=shardings)
        exported = jax.export.export(gradient)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))
        found = jax.jit(exported.call, in_shardings=shardings)(*arrays)
        np.testing.assert_array_equal(found, function(arrays[0], arrays[1]))


DECLARED: dict[str, Any] = {
    "batch_norm": (lambda x, s, b: dnn.batch_norm(x, scale=s, bias=b)[0], (X, (16,), (16,))),
    "group_norm": (lambda x, s, b: dnn.group_norm(x, groups=8, scale=s, bias=b), (X, (16,), (16,))),
    "layer_norm": (lambda x, s, b: dnn.layer_norm(x, scale=s, bias=b), (X, (16,), (16,))),
    "rms_norm": (lambda x, s: dnn.rms_norm(x, scale=s), (X, (16,))),
    "softmax": (dnn.softmax, (X,)),
    "log-softmax": (ft.partial(dnn.softmax, algorithm="log"), (X,)),
    "logsumexp": (dnn.logsumexp, (X,)),
    "activation": (ft.partial(dnn.activation, activation="gelu"), (X,)),
    "dropout": (lambda x: dnn.dropout(x, jax.random.key(1)), (X,)),
}


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("name", DECLARED)
def test_declarations_by_which_kernels_are_divided(name: str, axis: int, monkeypatch: pytest.MonkeyPatch):
    """XLA's engines divided as their primitives declare, as kernels are: values are right, and nothing is gathered.

    But for dropout: what an element of a mask is depends on its place, so only XLA's own engine is divided.
    """
    for op in engines.ops():
        declared = [dataclasses.replace(e, partition=lambda call: True) for e in engines.registered(op)]
        monkeypatch.setitem(engines._registry, op, declared)
    function, shapes = DECLARED[name]
    arrays = [np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(shapes)]
    ct = np.random.default_rng(9).normal(size=jax.eval_shape(function, *arrays).shape).astype(np.float32)
    mesh = mesh_of((8,))
    specs = [P(*[None] * axis, "a") if len(s) == 4 else P() for s in shapes]
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
    both = lambda ct, *arrays: (function(*arrays), jax.vjp(function, *arrays)[1](ct))
    compiled = jax.jit(both).lower(ct, *placed).compile()
    assert name == "dropout" or "all-gather" not in str(compiled.as_text())
    for ours, alone in zip(jax.tree.leaves(compiled(ct, *placed)), jax.tree.leaves(both(ct, *arrays)), strict=True):
        np.testing.assert_allclose(ours, alone, rtol=1e-4, atol=1e-4)


def test_ties_with_padding_on_a_mesh():
    """Where all that a window sees is as low as padding, the first element is chosen, not padding."""
    mesh = mesh_of((8,))
    x = np.full((1, 16, 4, 2), -np.inf, np.float32)
    x[:, 9:] = np.nan
    for nan in ("propagate", "ignore"):
        function = jax.jit(lambda x, nan=nan: dnn.pool(x, nan=nan, return_indices=True, **WIDE))
        for ours, alone in zip(
            function(jax.device_put(x, NamedSharding(mesh, P(None, "a")))), function(x), strict=True
        ):
            np.testing.assert_array_equal(ours, alone)


@pytest.mark.parametrize("out_dtype", [jnp.int32, jnp.float32])
def test_integers_are_added_over_devices_as_integers(out_dtype: Any):
    """A device's part of the channels is a sum in int32, beyond the whole numbers that float32 holds."""
    rng = np.random.default_rng(5)
    x, w = (rng.integers(90, 128, shape).astype(np.int8) for shape in ((2, 4, 4, 16384), (1, 1, 16384, 8)))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    sharded = (
        jax.device_put(v, NamedSharding(mesh, P(*s))) for v, s in ((x, (None, None, None, "a")), (w, (None, None, "a")))
    )
    call = jax.jit(ft.partial(dnn.conv, out_dtype=out_dtype))
    sums = x.reshape(32, 16384).astype(np.int64) @ w.reshape(16384, 8).astype(np.int64)
    assert sums.min() > 8 * 2**24
    np.testing.assert_array_equal(np.asarray(call(*sharded)).reshape(32, 8), sums.astype(out_dtype))
