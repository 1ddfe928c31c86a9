"""Softmax, its backward pass and logsumexp under every transformation, and on meshes."""

import dataclasses
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
from jaxdnn._src.core import engines
from tests.softmax.cases import ALGORITHMS, ENGINES, data, each_engine, rows, wide

# ---- transformations -------------------------------------------------------------------------------------------------

Function = Callable[..., Any]


def plain_softmax(algorithm: str, axis: Any, x: Any) -> Any:
    """Another formula: exponentials of differences to every other element, no maximum, no logarithm of a sum."""
    axes = rows(x.shape, axis)
    e = jnp.exp(x - jax.lax.stop_gradient(jnp.mean(x, axes, keepdims=True)))
    share = e * jnp.sum(e, axes, keepdims=True) ** -1
    return jnp.log(share) if algorithm == "log" else share


def plain_dgrad(algorithm: str, dy: Any, y: Any) -> Any:
    jacobian = jnp.expand_dims(jnp.eye(y.shape[-1], dtype=y.dtype), 0)
    row, column = jnp.expand_dims(y, -2), jnp.expand_dims(y, -1)
    jacobian = jacobian - jnp.exp(column) * jnp.ones_like(row) if algorithm == "log" else column * (jacobian - row)
    return jnp.einsum("rij,rj->ri", jacobian, dy)


PAIRS: dict[str, tuple[Function, Function, tuple[np.ndarray, ...]]] = {}
for _engine in ENGINES:
    for _algorithm in ALGORITHMS:
        _named = {"algorithm": _algorithm, "engine": _engine}
        PAIRS[f"softmax-{_algorithm}-{_engine}"] = (
            ft.partial(dnn.softmax, **_named),
            ft.partial(plain_softmax, _algorithm, -1),
            (data((3, 5)),),
        )
        PAIRS[f"softmax_dgrad-{_algorithm}-{_engine}"] = (
            ft.partial(dnn.softmax_dgrad, **_named),
            ft.partial(plain_dgrad, _algorithm),
            (data((3, 5), seed=1), np.abs(data((3, 5), scale=0.3))),
        )
    PAIRS[f"softmax-axes-{_engine}"] = (
        ft.partial(dnn.softmax, axis=(0, 1), engine=_engine),
        ft.partial(plain_softmax, "accurate", (0, 1)),
        (data((3, 5)),),
    )
    PAIRS[f"logsumexp-{_engine}"] = (
        ft.partial(dnn.logsumexp, engine=_engine),
        lambda x: jnp.log(jnp.sum(jnp.exp(x), -1)),
        (data((3, 5)),),
    )


def scalar(f: Function, *arrays: Any) -> Any:
    y = f(*arrays)
    weights = (jnp.arange(y.size, dtype=y.dtype) % 5 - 1.5).reshape(y.shape)
    return jnp.sum(y * y * weights) / 2


def _gradient(f: Function, arrays: Any) -> Any:
    return jax.grad(ft.partial(scalar, f), tuple(range(len(arrays))))


def _along(f: Function, arrays: Any) -> Function:
    return lambda *given: sum(
        jnp.vdot(g, jnp.cos(a)) for g, a in zip(_gradient(f, arrays)(*given), arrays, strict=True)
    )


TRANSFORMED: dict[str, Callable[[Function, Any], Any]] = {
    "grad": lambda f, a: _gradient(f, a)(*a),
    "jvp": lambda f, a: jax.jvp(f, a, tuple(map(jnp.cos, a))),
    "jvp of grad": lambda f, a: jax.jvp(_gradient(f, a), a, tuple(map(jnp.cos, a))),
    "grad of grad": lambda f, a: jax.grad(_along(f, a), tuple(range(len(a))))(*a),
    "hessian": lambda f, a: jax.hessian(ft.partial(scalar, f), tuple(range(len(a))))(*a),
    "vmap": lambda f, a: jax.vmap(f)(*(jnp.stack([x, 0.5 * x]) for x in a)),
    "vmap over the last axis": lambda f, a: jax.vmap(f, -1)(*(jnp.stack([x, 0.5 * x], -1) for x in a)),
    "vmap of the first argument": lambda f, a: jax.vmap(lambda x: f(x, *a[1:]))(jnp.stack([a[0], 0.5 * a[0]])),
    "vmap of the last argument": lambda f, a: jax.vmap(lambda x: f(*a[:-1], x))(jnp.stack([a[-1], 0.5 * a[-1]])),
    "vmap of grad": lambda f, a: jax.vmap(_gradient(f, a))(*(jnp.stack([x, 0.5 * x]) for x in a)),
    "scan": lambda f, a: jax.lax.scan(lambda c, _: (c, f(*(x * (1 + 0.1 * c) for x in a))), 0.5, jnp.arange(2))[1],
    "remat": lambda f, a: _gradient(jax.checkpoint(f), a)(*a),
}


@pytest.mark.parametrize("transformation", TRANSFORMED)
@pytest.mark.parametrize("name", PAIRS)
def test_transformations(name: str, transformation: str, x64: None):
    ours, theirs, arrays = PAIRS[name]
    arrays = tuple(jnp.asarray(a, jnp.float64) for a in arrays)
    transform = TRANSFORMED[transformation]
    found, wanted = jax.jit(lambda: (transform(ours, arrays), transform(theirs, arrays)))()
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", PAIRS)
def test_linear_transpose(name: str):
    ours, theirs, arrays = PAIRS[name]
    y, linear = jax.linearize(ours, *arrays)
    _, plain = jax.linearize(theirs, *arrays)
    ct = data(y.shape, seed=9)
    for a, b in zip(jax.linear_transpose(linear, *arrays)(ct), jax.linear_transpose(plain, *arrays)(ct), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_transposing_what_is_not_linear_raises():
    x = data((2, 3))
    with pytest.raises(NotImplementedError, match="`softmax_dgrad` is linear in `dy` alone"):
        jax.linear_transpose(lambda y: dnn.softmax_dgrad(x, y), x)(x)
    with pytest.raises(NotImplementedError, match="`softmax` is linear in none"):
        jax.linear_transpose(dnn.softmax, x)(x)


def test_gradient_is_that_of_finite_differences():
    x, weights = data((2, 6)), data((2, 6), seed=7)
    for algorithm in ALGORITHMS:
        gradient = jax.grad(lambda x, a=algorithm: jnp.vdot(weights, dnn.softmax(x, algorithm=a)))(x)
        for index in [(0, 0), (1, 3)]:
            away = np.zeros(x.shape)
            away[index] = 1e-5
            ends = (reference.softmax(wide(x) + s * away, algorithm=algorithm) for s in (1, -1))
            slope = float((weights * (next(ends) - next(ends))).sum()) / 2e-5
            assert abs(float(gradient[index]) - slope) < 1e-5


def test_gradients_in_the_scales():
    x, prior = data((2, 5)), data((2, 5), seed=3)
    f = lambda alpha, beta: jnp.sum(dnn.softmax(x, alpha=alpha, beta=beta, prior=prior) * prior)
    by_alpha, by_beta = jax.grad(f, (0, 1))(jnp.float32(0.5), jnp.float32(0))
    np.testing.assert_allclose(by_alpha, (np.asarray(dnn.softmax(x)) * prior).sum(), rtol=1e-5)
    np.testing.assert_allclose(by_beta, (prior * prior).sum(), rtol=1e-6)


def test_gradients_keep_their_dtypes():
    x = data((2, 8), ml_dtypes.bfloat16)
    f = lambda x: jnp.sum(dnn.softmax(x, out_dtype=jnp.float32))
    assert jax.grad(f)(x).dtype == ml_dtypes.bfloat16
    assert jax.jvp(f, (jnp.asarray(x),), (jnp.asarray(x),))[1].dtype == np.float32


@each_engine
def test_fast_where_its_sums_leave_the_range(engine: str):
    x = np.array([[88.0, 88.0, 88.0, 88.0], [-200.0, -200.0, -200.0, -300.0], [100.0, 0.0, 0.0, 0.0]], np.float32)
    found = np.asarray(dnn.softmax(x, algorithm="fast", engine=engine))
    np.testing.assert_array_equal(found, [[0] * 4, [np.nan] * 4, [np.nan, 0, 0, 0]])


def test_logsumexp_of_a_row_of_which_nothing_is_left_has_gradient_zero():
    where = np.array([[False, False], [True, False]])
    value, pullback = jax.vjp(lambda x: dnn.logsumexp(x, where=where), data((2, 2)))
    assert value[0] == -np.inf
    np.testing.assert_array_equal(pullback(jnp.ones(2))[0], [[0, 0], [1, 0]])


# ---- sharding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@each_engine
def test_sharded_rows_and_sharded_batches(kind: Any, engine: str):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    x = data((16, 24))

    def run(x: Any) -> Any:
        y = dnn.softmax(x, engine=engine)
        return y, dnn.softmax_dgrad(x, y, engine=engine), dnn.logsumexp(x, engine=engine)

    wanted = jax.jit(run)(x)
    with jax.set_mesh(mesh):
        for spec in (P("d"), P(None, "d")):
            found = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, spec)))
            for a, b in zip(found, wanted, strict=True):
                if engine == "ordered":
                    np.testing.assert_array_equal(a, b)
                else:
                    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("a", "b"), P(None, ("a", "b"))])
def test_sharded_rows_of_an_engine_that_sees_one_device(monkeypatch: pytest.MonkeyPatch, spec: Any):
    """As a kernel does: a row's parts are joined; where its bits do not depend on the mesh they are gathered."""
    (xla,) = (engine for engine in engines.registered("logsumexp") if engine.name == "xla")
    registry = {op: list(engines.registered(op)) for op in engines.ops()}
    x = np.array(data((8, 24)))
    x[1], x[2, 3], x[3, 23] = -np.inf, np.inf, np.nan
    x[4, :12] = -np.inf
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    operand = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    whole, golden = spec == P("a"), reference.logsumexp(x)
    for level, gathers in (("batch_invariant", False), ("mesh_invariant", not whole)):
        own = {"partition": lambda call: True, "level": lambda call, level=level: level, "rank": lambda call: -1}
        kernel = dataclasses.replace(xla, name="kernel", **own)
        monkeypatch.setattr(engines, "_registry", registry | {"logsumexp": [kernel]})
        run = jax.jit(ft.partial(dnn.logsumexp, determinism=level)).lower(operand).compile()
        text = run.as_text() or ""
        assert ("all-gather" in text, "all-reduce" in text) == (gathers, not gathers and not whole)
        found = run(jax.device_put(x, operand.sharding))
        np.testing.assert_allclose(found, golden, rtol=1e-6)


def test_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = data((16, 24))
    gradient = jax.grad(lambda x: jnp.sum(dnn.softmax(x, engine="ordered") ** 2))
    found = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(x)
    np.testing.assert_array_equal(found, gradient(x))


def test_the_gradient_of_an_ordered_logsumexp_reads_and_is_what_is_rounded():
    """Between bfloat16 operations XLA would keep float32: a cotangent that is a product, a gradient that is widened."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(40, 200)), jnp.bfloat16)
    a, b = (jnp.asarray(rng.normal(size=40), jnp.bfloat16) for _ in range(2))

    def slope(x, dy):
        return jax.vjp(lambda x: dnn.logsumexp(x, engine="ordered", determinism="batch_invariant"), x)[1](dy)[0]

    read = lambda dx: dx.astype(jnp.float32) * 3
    within = jax.jit(lambda x, a, b: read(slope(x, a * b)))(x, a, b)
    np.testing.assert_array_equal(within, read(jax.jit(slope)(x, jax.jit(jnp.multiply)(a, b))))
