"""Softmax, its backward pass and logsumexp: values within their bounds, arguments, special values."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.activation.bounds import Epilogue
from jaxdnn._src.core import tolerance
from jaxdnn._src.core.tolerance import ACCUMULATIONS
from jaxdnn._src.softmax import bounds
from tests.softmax.cases import (
    ALGORITHMS,
    DTYPES,
    RULE,
    SHAPES,
    assert_right,
    data,
    each_algorithm,
    each_dtype,
    each_engine,
    rows,
    wide,
)

# ---- values ----------------------------------------------------------------------------------------------------------


@each_algorithm
@each_engine
@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_is_within_its_bound(shape: tuple[int, ...], dtype: str, engine: str, algorithm: str):
    axis, x = SHAPES[shape], data(shape, DTYPES[dtype])
    out = dnn.softmax(x, algorithm=algorithm, axis=axis, engine=engine)
    golden = reference.softmax(x, algorithm=algorithm, axis=axis, out_dtype=np.float64)
    assert_right(out, golden, bounds.softmax(wide(x), algorithm, rows(shape, axis), RULE), DTYPES[dtype])


@each_algorithm
@each_engine
@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_is_within_its_bound(shape: tuple[int, ...], dtype: str, engine: str, algorithm: str):
    axis, dy = SHAPES[shape], data(shape, DTYPES[dtype], seed=1)
    y = reference.softmax(data(shape, DTYPES[dtype]), algorithm=algorithm, axis=axis)
    out = dnn.softmax_dgrad(dy, y, algorithm=algorithm, axis=axis, engine=engine)
    golden = reference.softmax_dgrad(dy, y, algorithm=algorithm, axis=axis, out_dtype=np.float64)
    error = bounds.softmax_dgrad(wide(dy), wide(y), algorithm, rows(shape, axis), RULE)
    assert_right(out, golden, error, DTYPES[dtype])


@each_engine
@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_logsumexp_is_within_its_bound(shape: tuple[int, ...], dtype: str, engine: str):
    axis, x = SHAPES[shape], data(shape, DTYPES[dtype])
    out = dnn.logsumexp(x, axis=axis, engine=engine, keepdims=True)
    golden = reference.logsumexp(x, axis=axis, keepdims=True, out_dtype=np.float64)
    assert_right(out, golden, bounds.logsumexp(wide(x), rows(shape, axis), RULE), DTYPES[dtype])
    assert dnn.logsumexp(x, axis=axis, engine=engine).shape == golden.squeeze(rows(shape, axis)).shape


def test_large_inputs_do_not_overflow():
    x = data((4, 50), scale=300) + np.float32(1e4)
    error = bounds.softmax(wide(x), "accurate", (1,), RULE)
    assert_right(dnn.softmax(x), reference.softmax(x, out_dtype=np.float64), error, np.float32)


def test_float64(x64: None):
    x = data((3, 40), np.float64)
    rule = ACCUMULATIONS["float64"]
    for algorithm in ALGORITHMS:
        out = dnn.softmax(x, algorithm=algorithm)
        error = bounds.softmax(x, algorithm, (1,), rule)
        assert_right(out, reference.softmax(x, algorithm=algorithm), error, np.float64)
        back = dnn.softmax_dgrad(x, np.asarray(out), algorithm=algorithm)
        error = bounds.softmax_dgrad(x, wide(out), algorithm, (1,), rule)
        assert_right(back, reference.softmax_dgrad(x, np.asarray(out), algorithm=algorithm), error, np.float64)


def test_bound_sees_planted_faults():
    x = data((8, 64))
    golden, error = (
        reference.softmax(x, out_dtype=np.float64),
        bounds.softmax(wide(x), "accurate", (1,), RULE),
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
    assert off_exp.max() * 2**24 <= bounds.EXP / 4
    assert (off_log * 2**24 <= (bounds.LOG * log + bounds.LOG_OF_ONE) / 3 + 0.01).all()


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
    error = bounds.softmax(wide(x), algorithm, axes, RULE)
    assert_right(dnn.softmax(x, **named), reference.softmax(x, **named, out_dtype=np.float64), error, np.float32)


@each_algorithm
def test_blend_is_one_rounding(algorithm: str):
    x, prior = data((4, 9), ml_dtypes.bfloat16), data((4, 9), ml_dtypes.bfloat16, seed=2)
    scales: dict[str, Any] = {"alpha": 0.5, "beta": -2.0}
    out = dnn.softmax(x, algorithm=algorithm, prior=prior, **scales)
    golden = reference.softmax(x, algorithm=algorithm, prior=prior, **scales, out_dtype=np.float64)
    plain = reference.softmax(x, algorithm=algorithm, out_dtype=np.float64)
    start = bounds.softmax(wide(x), algorithm, (1,), RULE)
    error = Epilogue(**scales).error(plain, start, prior=wide(prior))
    assert_right(out, golden, error, ml_dtypes.bfloat16)
    back = dnn.softmax_dgrad(x, np.asarray(out), algorithm=algorithm, prior=prior, **scales)
    assert back.dtype == ml_dtypes.bfloat16


def test_prior_is_not_read_where_beta_is_zero():
    x, prior = data((2, 5)), np.full((2, 5), np.nan, np.float32)
    np.testing.assert_array_equal(dnn.softmax(x, beta=0.0, prior=prior), dnn.softmax(x))
    traced = jax.jit(lambda beta: dnn.softmax(x, beta=beta, prior=prior))
    assert not np.isnan(traced(jnp.float32(0))).any()
    assert np.isnan(traced(jnp.float32(1))).all()
    y = dnn.softmax(x)
    np.testing.assert_array_equal(dnn.softmax_dgrad(x, y, beta=0.0, prior=prior), dnn.softmax_dgrad(x, y))


@each_algorithm
@each_engine
def test_mask(algorithm: str, engine: str):
    x = data((4, 6))
    mask = np.random.default_rng(3).random((4, 6)) < 0.6
    mask[1] = False
    out = dnn.softmax(x, algorithm=algorithm, where=mask, engine=engine)
    golden = reference.softmax(x, algorithm=algorithm, where=mask, out_dtype=np.float64)
    error = np.where(mask, bounds.softmax(wide(np.where(mask, x, -np.inf)), algorithm, (1,), RULE), 0)
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
    error = bounds.softmax(wide(x), "accurate", (1,), RULE)
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
    error = bounds.softmax(wide(x), algorithm, (1,), RULE)
    assert_right(dnn.softmax(x, algorithm=algorithm, engine=engine), golden, error, DTYPES[dtype])
    lse = reference.logsumexp(x, out_dtype=np.float64)
    bound = bounds.logsumexp(wide(x), (1,), RULE)[:, 0]
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


@each_algorithm
@each_engine
def test_a_scalar_is_a_row_of_its_own(engine: str, algorithm: str):
    """With axis None, as in `jax.nn`; also if it is one of Python's numbers, alone, differentiated and mapped."""

    def ours(x: Any) -> Any:
        options = {"axis": None, "engine": engine}
        return dnn.softmax(x, algorithm=algorithm, **options), dnn.logsumexp(x, **options)

    def theirs(x: Any) -> Any:
        function = jax.nn.log_softmax if algorithm == "log" else jax.nn.softmax
        return function(x, axis=None), jax.nn.logsumexp(x)

    for of in (
        lambda f: f(0.5),
        lambda f: jax.jacfwd(f)(0.5),
        lambda f: jax.jacrev(f)(0.5),
        lambda f: jax.jvp(f, (0.5,), (2.0,)),
        lambda f: jax.vmap(jax.hessian(f))(np.array([0.5, -3], np.float32)),
        lambda f: f(np.float32(-np.inf))[1],
    ):
        jax.tree.map(np.testing.assert_array_equal, of(ours), of(theirs))
    y, x = (np.array(v, np.float32) for v in (3, 0.5))
    wanted = reference.softmax_dgrad(y, reference.softmax(x, algorithm=algorithm, axis=None), axis=None)
    np.testing.assert_array_equal(dnn.softmax_dgrad(y, ours(x)[0], axis=None, engine=engine), wanted)
    masked = dnn.softmax(x, algorithm=algorithm, axis=None, engine=engine, where=False)
    np.testing.assert_array_equal(masked, reference.softmax(x, algorithm=algorithm, axis=None, where=np.array(False)))
