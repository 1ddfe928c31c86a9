"""Softmax, its backward pass and logsumexp: values, special values, every transformation, levels, bad input."""

import functools as ft
import math
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
from jaxdnn import tolerance, tolerance_softmax
from jaxdnn.tolerance import ACCUMULATIONS, Accumulation

DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ENGINES = ("xla", "ordered")
ALGORITHMS = ("accurate", "fast", "log")
SHAPES = {(3, 5, 7): -1, (2, 3, 130): -1, (4, 6, 5): (0, 2), (5, 3): 0, (1, 1): -1, (2, 1000): -1, (2, 3, 4): (0, 1, 2)}
RULE = Accumulation(flush=True)

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
each_engine = pytest.mark.parametrize("engine", ENGINES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def data(shape: tuple[int, ...], dtype: Any = np.float32, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(dtype)


def rows(shape: tuple[int, ...], axis: Any) -> tuple[int, ...]:
    return tuple(a % len(shape) for a in (axis if isinstance(axis, tuple) else (axis,)))


def wide(a: Any) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def assert_right(out: Any, golden: np.ndarray, error: Any, dtype: Any) -> None:
    assert out.dtype == np.dtype(dtype)
    found = tolerance.compare(np.asarray(out), golden, error)
    assert found.passed, found.message


# ---- values ----------------------------------------------------------------------------------------------------------


@each_algorithm
@each_engine
@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_is_within_its_bound(shape: tuple[int, ...], dtype: str, engine: str, algorithm: str):
    axis, x = SHAPES[shape], data(shape, DTYPES[dtype])
    out = dnn.softmax(x, algorithm=algorithm, axis=axis, engine=engine)
    golden = reference.softmax(x, algorithm=algorithm, axis=axis, out_dtype=np.float64)
    assert_right(out, golden, tolerance_softmax.softmax(wide(x), algorithm, rows(shape, axis), RULE), DTYPES[dtype])


@each_algorithm
@each_engine
@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_is_within_its_bound(shape: tuple[int, ...], dtype: str, engine: str, algorithm: str):
    axis, dy = SHAPES[shape], data(shape, DTYPES[dtype], seed=1)
    y = reference.softmax(data(shape, DTYPES[dtype]), algorithm=algorithm, axis=axis)
    out = dnn.softmax_dgrad(dy, y, algorithm=algorithm, axis=axis, engine=engine)
    golden = reference.softmax_dgrad(dy, y, algorithm=algorithm, axis=axis, out_dtype=np.float64)
    error = tolerance_softmax.softmax_dgrad(wide(dy), wide(y), algorithm, rows(shape, axis), RULE)
    assert_right(out, golden, error, DTYPES[dtype])


@each_engine
@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_logsumexp_is_within_its_bound(shape: tuple[int, ...], dtype: str, engine: str):
    axis, x = SHAPES[shape], data(shape, DTYPES[dtype])
    out = dnn.logsumexp(x, axis=axis, engine=engine, keepdims=True)
    golden = reference.logsumexp(x, axis=axis, keepdims=True, out_dtype=np.float64)
    assert_right(out, golden, tolerance_softmax.logsumexp(wide(x), rows(shape, axis), RULE), DTYPES[dtype])
    assert dnn.logsumexp(x, axis=axis, engine=engine).shape == golden.squeeze(rows(shape, axis)).shape


def test_large_inputs_do_not_overflow():
    x = data((4, 50), scale=300) + np.float32(1e4)
    error = tolerance_softmax.softmax(wide(x), "accurate", (1,), RULE)
    assert_right(dnn.softmax(x), reference.softmax(x, out_dtype=np.float64), error, np.float32)


def test_float64(x64: None):
    x = data((3, 40), np.float64)
    rule = ACCUMULATIONS["float64"]
    for algorithm in ALGORITHMS:
        out = dnn.softmax(x, algorithm=algorithm)
        error = tolerance_softmax.softmax(x, algorithm, (1,), rule)
        assert_right(out, reference.softmax(x, algorithm=algorithm), error, np.float64)
        back = dnn.softmax_dgrad(x, np.asarray(out), algorithm=algorithm)
        error = tolerance_softmax.softmax_dgrad(x, wide(out), algorithm, (1,), rule)
        assert_right(back, reference.softmax_dgrad(x, np.asarray(out), algorithm=algorithm), error, np.float64)


def test_bound_sees_planted_faults():
    x = data((8, 64))
    golden, error = (
        reference.softmax(x, out_dtype=np.float64),
        tolerance_softmax.softmax(wide(x), "accurate", (1,), RULE),
    )
    e = np.exp(wide(x))
    last_left_out = e / e[:, :-1].sum(1, keepdims=True)
    faults = {
        "scale": golden * 1.00001,
        "last element not added": last_left_out,
        "neighbour's maximum": golden * (1 + 1e-5 * np.arange(8)[:, None]),
        "bfloat16 exponentials": wide(e.astype(ml_dtypes.bfloat16)) / e.sum(1, keepdims=True),
    }
    assert tolerance.compare(golden.astype(np.float32), golden, error).passed
    for name, fault in faults.items():
        assert not tolerance.compare(fault.astype(np.float32), golden, error).passed, name


def test_exponential_and_logarithm_are_as_good_as_the_bound_takes_them():
    rng = np.random.default_rng(0)
    x = np.concatenate([-rng.random(200000) * 87, rng.random(100000) * 88]).astype(np.float32)
    s = np.concatenate([1 + rng.random(100000), np.exp(rng.random(100000) * 60)]).astype(np.float32)
    exp, log = np.exp(wide(x)), np.log(wide(s))
    off_exp = np.abs(wide(np.asarray(jax.jit(jnp.exp)(x))) - exp) / exp
    off_log = np.abs(wide(np.asarray(jax.jit(jnp.log)(s))) - log)
    assert off_exp.max() * 2**24 <= tolerance_softmax.EXP / 4
    assert (off_log * 2**24 <= (tolerance_softmax.LOG * log + tolerance_softmax.LOG_OF_ONE) / 3 + 0.01).all()


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "layout", "shape"),
    [
        ("channel", "NHWC", (2, 3, 4, 5)),
        ("channel", "NCHW", (2, 5, 3, 4)),
        ("channel", "CHWN", (5, 3, 4, 2)),
        ("channel", "NWC", (2, 3, 5)),
        ("channel", "NCDHW", (2, 5, 3, 2, 4)),
        ("channel", "NCHWc8", (2, 3, 4, 5, 8)),
        ("instance", "NHWC", (2, 3, 4, 5)),
        ("instance", "CHWN", (5, 3, 4, 2)),
        ("instance", "NCWc8", (2, 3, 4, 8)),
    ],
)
@each_algorithm
def test_modes_in_every_layout(mode: str, layout: str, shape: tuple[int, ...], algorithm: str):
    x = data(shape)
    named: dict[str, Any] = {"mode": mode, "layout": layout, "algorithm": algorithm}
    axes = reference.softmax.__globals__["axes"](len(shape), -1, mode, layout)
    error = tolerance_softmax.softmax(wide(x), algorithm, axes, RULE)
    assert_right(dnn.softmax(x, **named), reference.softmax(x, **named, out_dtype=np.float64), error, np.float32)


@each_algorithm
def test_blend_is_one_rounding(algorithm: str):
    x, prior = data((4, 9), ml_dtypes.bfloat16), data((4, 9), ml_dtypes.bfloat16, seed=2)
    scales: dict[str, Any] = {"alpha": 0.5, "beta": -2.0}
    out = dnn.softmax(x, algorithm=algorithm, prior=prior, **scales)
    golden = reference.softmax(x, algorithm=algorithm, prior=prior, **scales, out_dtype=np.float64)
    plain = reference.softmax(x, algorithm=algorithm, out_dtype=np.float64)
    start = tolerance_softmax.softmax(wide(x), algorithm, (1,), RULE)
    error = tolerance.Epilogue(**scales).error(plain, start, prior=wide(prior))
    assert_right(out, golden, error, ml_dtypes.bfloat16)
    back = dnn.softmax_dgrad(x, np.asarray(out), algorithm=algorithm, prior=prior, **scales)
    assert back.dtype == ml_dtypes.bfloat16


def test_prior_is_not_read_where_beta_is_zero():
    x, prior = data((2, 5)), np.full((2, 5), np.nan, np.float32)
    np.testing.assert_array_equal(dnn.softmax(x, prior=prior), dnn.softmax(x))
    traced = jax.jit(lambda beta: dnn.softmax(x, beta=beta, prior=prior))
    assert not np.isnan(traced(jnp.float32(0))).any()
    assert np.isnan(traced(jnp.float32(1))).all()
    y = dnn.softmax(x)
    np.testing.assert_array_equal(dnn.softmax_dgrad(x, y, prior=prior), dnn.softmax_dgrad(x, y))


@each_algorithm
@each_engine
def test_mask(algorithm: str, engine: str):
    x = data((4, 6))
    mask = np.random.default_rng(3).random((4, 6)) < 0.6
    mask[1] = False
    out = dnn.softmax(x, algorithm=algorithm, where=mask, engine=engine)
    golden = reference.softmax(x, algorithm=algorithm, where=mask, out_dtype=np.float64)
    error = np.where(mask, tolerance_softmax.softmax(wide(np.where(mask, x, -np.inf)), algorithm, (1,), RULE), 0)
    assert_right(out, golden, error, np.float32)
    weights = data((4, 6), seed=5)

    def masked(x: Any) -> Any:
        y = dnn.softmax(x, algorithm=algorithm, where=mask, engine=engine)
        return jnp.vdot(weights, jnp.where(mask, y, jnp.zeros_like(y)))

    gradient = np.asarray(jax.grad(masked)(x))
    assert np.isfinite(gradient).all()
    assert not gradient[~mask].any()
    without = dnn.logsumexp(x, where=mask, engine=engine)
    np.testing.assert_allclose(without, reference.logsumexp(x, where=mask), rtol=1e-6)


@each_engine
def test_out_dtype(engine: str):
    x = data((3, 8), ml_dtypes.bfloat16)
    out = dnn.softmax(x, out_dtype=jnp.float32, engine=engine)
    error = tolerance_softmax.softmax(wide(x), "accurate", (1,), RULE)
    assert_right(out, reference.softmax(x, out_dtype=np.float64), error, np.float32)
    assert dnn.logsumexp(x, out_dtype=np.float32, engine=engine).dtype == np.float32


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@each_engine
def test_empty(shape: tuple[int, ...], engine: str):
    x = np.zeros(shape, np.float32)
    assert dnn.softmax(x, engine=engine).shape == shape
    assert dnn.softmax_dgrad(x, x, engine=engine).shape == shape
    np.testing.assert_array_equal(dnn.logsumexp(x, engine=engine), np.full(shape[:1], -np.inf))


@each_algorithm
@each_engine
@each_dtype
def test_what_is_not_finite(algorithm: str, engine: str, dtype: str):
    nan, inf = np.nan, np.inf
    x = np.array([[-inf, -inf, -inf], [0, -inf, 0], [0, inf, 1], [0, nan, 1], [-inf, inf, nan]]).astype(DTYPES[dtype])
    golden = reference.softmax(x, algorithm=algorithm, out_dtype=np.float64)
    error = tolerance_softmax.softmax(wide(x), algorithm, (1,), RULE)
    assert_right(dnn.softmax(x, algorithm=algorithm, engine=engine), golden, error, DTYPES[dtype])
    lse = reference.logsumexp(x, out_dtype=np.float64)
    bound = tolerance_softmax.logsumexp(wide(x), (1,), RULE)[:, 0]
    assert_right(dnn.logsumexp(x, engine=engine), lse, bound, DTYPES[dtype])


def test_fast_overflows_as_stated():
    out = dnn.softmax(np.array([[100.0, 0.0]], np.float32), algorithm="fast")
    np.testing.assert_array_equal(out, [[np.nan, 0.0]])


@each_engine
def test_exact_cases(engine: str):
    equal = dnn.softmax(np.full((2, 256), 7, ml_dtypes.bfloat16), engine=engine)
    np.testing.assert_array_equal(equal, np.full((2, 256), 2.0**-8))
    one_hot = dnn.softmax(np.where(np.eye(5) > 0, 0, -1e4).astype(np.float32), engine=engine)
    np.testing.assert_array_equal(one_hot, np.eye(5))
    y = np.full((1, 4), 0.25, np.float32)
    dy = np.array([[4.0, 0.0, -4.0, 8.0]], np.float32)
    np.testing.assert_array_equal(dnn.softmax_dgrad(dy, y, engine=engine), [[0.5, -0.5, -1.5, 1.5]])
    log = dnn.softmax_dgrad(dy, np.zeros((1, 4), np.float32), algorithm="log", engine=engine)
    np.testing.assert_array_equal(log, dy - 8)


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


def test_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = data((16, 24))
    gradient = jax.grad(lambda x: jnp.sum(dnn.softmax(x, engine="ordered") ** 2))
    found = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(x)
    np.testing.assert_array_equal(found, gradient(x))


# ---- levels ----------------------------------------------------------------------------------------------------------


@each_algorithm
@each_dtype
@pytest.mark.parametrize("length", [1, 7, 33, 1000])
def test_ordered_does_not_depend_on_the_batch(algorithm: str, dtype: str, length: int):
    x, dy = data((40, length), DTYPES[dtype]), data((40, length), DTYPES[dtype], seed=1)

    @jax.jit
    def run(x: Any, dy: Any) -> Any:
        y = dnn.softmax(x, algorithm=algorithm, determinism="batch_invariant")
        back = dnn.softmax_dgrad(dy, y, algorithm=algorithm, determinism="batch_invariant")
        return y, back, dnn.logsumexp(x, determinism="batch_invariant")

    whole = run(x, dy)
    for size in (1, 3, 8, 33):
        for place in {0, size - 1}:
            part = run(x[7 - place + np.arange(size)], dy[7 - place + np.arange(size)])
            for a, b in zip(part, whole, strict=True):
                np.testing.assert_array_equal(np.asarray(a)[place], np.asarray(b)[7])


def test_first_derivatives_obey_the_level_too():
    x, v = data((17, 65)), data((17, 65), seed=1)

    def both(x: Any, v: Any) -> Any:
        with dnn.determinism("batch_invariant"):
            _, tangent = jax.jvp(dnn.softmax, (x,), (v,))
            along = jax.jvp(dnn.logsumexp, (x,), (v,))
            return tangent, along, jax.vjp(dnn.softmax, x)[1](v), jax.vjp(dnn.logsumexp, x)[1](along[0])

    whole = jax.jit(both)(x, v)
    for size in (1, 2, 7):
        part = jax.jit(both)(x[:size], v[:size])
        for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(a, b[:size])


def test_levels_choose_engines():
    x = jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16)
    (told,) = dnn.explain(dnn.softmax, x, platform="cpu")
    assert told.engine == "xla"
    (told,) = dnn.explain(ft.partial(dnn.softmax, determinism="mesh_invariant"), x, platform="cpu")
    assert told.engine == "ordered"
    with pytest.raises(NotImplementedError, match="level 'portable'"):
        dnn.softmax(np.zeros((2, 3), np.float32), determinism="portable")


# ---- bad input -------------------------------------------------------------------------------------------------------

X = np.ones((2, 3, 4, 5), np.float32)
softmax: Any = dnn.softmax
softmax_dgrad: Any = dnn.softmax_dgrad
logsumexp: Any = dnn.logsumexp
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: softmax("x"), TypeError, "`x` must be an array"),
    (lambda: softmax(X.astype(np.int32)), TypeError, "`x` must have one of the dtypes float32, bfloat16"),
    (lambda: softmax(X, algorithm="exact"), ValueError, "`algorithm` must be one of 'accurate', 'fast', 'log'"),
    (lambda: softmax(X, mode="batch"), ValueError, "`mode` must be one of None, 'channel', 'instance'"),
    (lambda: softmax(X, mode="channel", layout="HWC"), ValueError, "`layout` must be one of NWC"),
    (lambda: softmax(X, layout="foo"), ValueError, "`layout` must be one of NWC"),
    (lambda: softmax(X, mode="channel", layout="NWC"), ValueError, "`x` must have 3 dimensions for layout NWC"),
    (
        lambda: softmax(X[..., None], mode="channel", layout="NCHWc8"),
        ValueError,
        "`x` must have 8 channels innermost for layout NCHWc8",
    ),
    (lambda: softmax(X, axis=4), ValueError, "`axis` must be one or more of the 4 axes of `x`, got 4"),
    (lambda: softmax(X, axis=()), ValueError, "`axis` must be one or more"),
    (lambda: softmax(X, axis=(1, -3)), ValueError, "`axis` must name every axis once"),
    (lambda: softmax(X, axis=1.0), TypeError, "`axis` must be made of integers"),
    (lambda: softmax(np.float32(1)), ValueError, "`x` must have an axis to be reduced, got a scalar."),
    (lambda: logsumexp(1.0, axis=0), ValueError, "`x` must have an axis to be reduced, got a scalar."),
    (lambda: softmax_dgrad(1.0, 1.0), ValueError, "`dy` must have an axis to be reduced, got a scalar."),
    (lambda: softmax(X, where=X), TypeError, "`where` must have one of the dtypes bool"),
    (lambda: softmax(X, where=X[:, :1, 0] > 0), ValueError, "`where` must broadcast to the shape"),
    (lambda: softmax(X, where=np.ones((7, 1, 1, 1, 1), bool)), ValueError, "`where` must broadcast"),
    (lambda: softmax(X, beta=1.0), ValueError, "`prior` must be given when `beta` is not zero"),
    (lambda: softmax(X, beta=1.0, prior=X[0]), ValueError, "`prior` must have shape"),
    (lambda: softmax(X, alpha=True), TypeError, "`alpha` must have one of the dtypes"),
    (lambda: softmax(X, out_dtype=jnp.int8), TypeError, "`out_dtype` must have one of the dtypes"),
    (lambda: softmax(X, out_dtype=np.float64), TypeError, "`out_dtype` must not be wider than the accumulator"),
    (lambda: softmax(X, engine="cudnn"), ValueError, "`engine` must be one of None"),
    (lambda: softmax(X, determinism="exact"), ValueError, "`determinism` must be one of"),
    (lambda: softmax_dgrad(X, X[0]), ValueError, "`y` must have shape"),
    (lambda: softmax_dgrad(X, X > 0), TypeError, "`y` must have one of the dtypes"),
    (lambda: softmax_dgrad(X, X, axis=9), ValueError, "axes of `dy`"),
    (lambda: logsumexp(X, keepdims=1), TypeError, "`keepdims` must be True or False, got 1"),
    (lambda: logsumexp(X, where=X), TypeError, "`where` must have one of the dtypes bool"),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_input(index: int):
    call, kind, text = BAD[index]
    with pytest.raises(kind) as raised:
        call()
    assert text in str(raised.value)


def test_rows_longer_than_memory_would_allow_a_square_of():
    x = data((2, 70001))
    error = tolerance_softmax.softmax(wide(x), "accurate", (1,), RULE)
    assert_right(dnn.softmax(x, engine="ordered"), reference.softmax(x, out_dtype=np.float64), error, np.float32)
    assert math.isclose(float(jnp.sum(dnn.softmax(x, engine="ordered")[0])), 1, rel_tol=1e-5)
