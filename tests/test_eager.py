"""Calls outside of jit: each op is one program, found by its arguments; what a call costs, counted in Python's calls.

Clocks of shared machines tell nothing; `jaxdnn bench ops` has them.
"""

import contextlib
import cProfile
import functools as ft
import gc
import pstats
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.cases import example
from jaxdnn._src.core import compat, eager
from jaxdnn._src.core.rounding import quotient

X, W = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4, 8))
MOST = 80  # of Python's calls; operation by operation they are hundreds, and thousands
Programs = dict[Any, Callable[..., Any]]


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    """The programs, of which there are none when a test starts."""
    found: Programs = {}
    monkeypatch.setattr(eager, "_programs", found)
    return found


def arguments(name: str) -> tuple[list[Any], dict[str, Any]]:
    given = example.first()[name]
    return given.bind(*(jnp.asarray(v, jnp.float32) for v in given.data()))


def python_calls(call: Callable[[], Any]) -> int:
    profile = cProfile.Profile()
    profile.runcall(call)
    found: Any = pstats.Stats(profile)
    return found.total_calls


@pytest.mark.parametrize("name", example.first())
def test_a_call_is_one_program(name: str, programs: Programs):
    given, options = arguments(name)
    call = ft.partial(getattr(dnn, name), *given, **options)
    first = call()
    assert len(programs) == 1
    second = call()
    assert len(programs) == 1
    assert python_calls(call) < MOST
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_values_are_those_of_the_op_among_others():
    operands = X, W
    op = lambda x, w: dnn.conv(x, w, padding=1, stride=2, activation="relu")
    np.testing.assert_array_equal(op(*operands), jax.jit(op)(*operands))
    np.testing.assert_array_equal(op(*map(np.asarray, operands)), jax.jit(op)(*operands))


def test_equal_arguments_of_other_types_are_other_calls(programs: Programs):
    dnn.pool(X, window=1)
    for wrong in (True, 1.0):
        with pytest.raises(TypeError, match="`window` must be made of integers"):
            dnn.pool(X, window=wrong)  # type: ignore[arg-type]
    assert len(programs) == 1
    for beta in (0.0, -0.0, 0, np.float32(0), np.float64(0)):
        dnn.conv(X, W, beta=beta)
    assert len(programs) == 6
    for sizes in ((16, 16), [16, 16], (16, 17)):
        dnn.resample(X, output_sizes=sizes)
    assert len(programs) == 9
    for _ in range(2):
        dnn.conv(X, W, alpha=float("nan"))
    assert len(programs) == 10


def test_shapes_and_dtypes_are_keyed_by_jax(programs: Programs):
    for x in (X, X[:1], X.astype(jnp.bfloat16), np.asarray(X), np.ones((3, 4))):
        y = dnn.activation(x)
        assert (y.shape, y.dtype) == (x.shape, jnp.result_type(jnp.asarray(x)))
    assert len(programs) == 1


NUMBERS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "scale": (lambda v: dnn.scale(X, alpha=v), (2, 0.1, -3.5, np.float32(7), np.float64(0.3))),
    "scale of integers": (lambda v: dnn.scale(X.astype(jnp.int8), alpha=v), (2, 0.1, -300.0)),
    "add": (lambda v: dnn.add(X[:1], X, alpha=v, beta=-v), (2, 0.1, 5e5)),
    "op_tensor": (lambda v: dnn.op_tensor(X, X, op="max", alpha1=v, alpha2=0.25, beta=v, prior=X), (2, 0.1)),
    "transform": (lambda v: dnn.transform(X, alpha=v, beta=v, prior=X), (2, 0.1)),
    "reduce": (lambda v: dnn.reduce(X, alpha=v, axis=1), (2, 0.1)),
    "fill": (lambda v: dnn.fill(X.astype(jnp.bfloat16), value=v), (2, 0.25, 257.5, -0.0, 3)),
    "fill of integers": (lambda v: dnn.fill(X.astype(jnp.int8), value=v), (2, 0.5, 2.5, -1e6)),
    "batch_norm": (
        lambda v: dnn.batch_norm(X, running_mean=X[0, 0, 0], running_variance=X[0, 0, 0], momentum=v),
        (0.1, 0.5, 1 / 3),
    ),
    "dropout": (lambda v: dnn.dropout(X, v), (0, 7, 2**63 + 5, np.int64(3))),
    "dropout_mask": (lambda v: dnn.dropout_mask(v, (4, 5)), (0, 7, np.uint64(2**64 - 1))),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change_share_a_program(name: str, programs: Programs):
    call, values = NUMBERS[name]
    for value in values:
        got = call(value)
        with jax.disable_jit():
            expected = call(value)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert len(programs) == 1


@pytest.mark.parametrize("value", [0.1, 2**24 + 1, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_fill_rounds_a_number_once(value: float, dtype: Any):
    x = X.astype(dtype)
    with jax.disable_jit():
        expected = dnn.fill(x, value=value)
    got = dnn.fill(x, value=value)
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(expected, np.float64))


def test_a_number_that_decides_is_known(programs: Programs):
    """With beta 0 the prior is not read; a number that float32 does not hold is no zero."""
    nan = jnp.full_like(X, jnp.nan)
    assert not jnp.isnan(dnn.add(X, nan, beta=0)).any()
    assert not jnp.isnan(dnn.add(X, nan, beta=0.0)).any()
    assert jnp.isnan(dnn.add(X, nan, beta=1e-60)).all()
    with pytest.raises(ValueError, match="`momentum` must be a number from 0 to 1"):
        dnn.batch_norm(X, momentum=1.5)


def test_keys_of_every_kind(programs: Programs):
    mask = dnn.dropout_mask(3, (4, 5))
    state = dnn.DropoutState.of_seed(3)
    for key in (np.array([3, 0], np.uint32), jnp.array([3, 0], jnp.uint32), state):
        np.testing.assert_array_equal(dnn.dropout_mask(key, (4, 5)), mask)
    assert dnn.dropout_mask(jax.random.key(3), (4, 5)).shape == mask.shape
    assert len(programs) == 1


def test_an_integer_of_numpy_keeps_its_64_bits(programs: Programs):
    for offset in (2**40, 2**41):
        found = [dnn.dropout(X, 3, offset=kind(offset)) for kind in (int, np.int64, np.array)]
        np.testing.assert_array_equal(found[1], found[0])
        np.testing.assert_array_equal(found[2], found[0])
    assert len(programs) == 6


@pytest.mark.parametrize(
    "call",
    [
        lambda v: dnn.conv(v, W),
        lambda v: dnn.conv(X, W, bias=v[0, 0, :, 0]),
        lambda v: dnn.scale(v, alpha=2),
        lambda v: dnn.scale(X, alpha=v[0, 0, 0, :1].reshape(())),
        lambda v: dnn.ctc_lengths(v[..., 0, 0]),
    ],
    ids=["array", "option", "formula", "number", "paddings"],
)
def test_another_byte_order_is_refused_also_where_the_program_is_there(call: Callable[[Any], Any]):
    """`jax.jit` checks it when it compiles alone, and then takes the bytes for those of this machine."""
    call(np.asarray(X))
    with pytest.raises(TypeError, match=r"must have the byte order of this machine, got [<>]f4"):
        call(np.asarray(X).astype(X.dtype.newbyteorder()))


@pytest.mark.parametrize("how", ["eager", "jit", "grad"])
def test_debug_nans_names_the_op(how: str):
    run = {"eager": dnn.softmax, "jit": jax.jit(dnn.softmax), "grad": jax.grad(lambda x: dnn.softmax(x).sum())}[how]
    with jax.debug_nans(True):
        assert jnp.isfinite(run(X)).all()
        with pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in jaxdnn_softmax"):
            run(jnp.full_like(X, -jnp.inf))
        with pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in rounded_quotient"):
            quotient(jnp.zeros(3), jnp.zeros(3))


def test_an_error_is_about_what_was_given():
    with pytest.raises(TypeError, match="got an array of int32 of shape") as error:
        dnn.conv(X, W, stride=jnp.array([1, 1]))  # type: ignore[arg-type]
    assert error.value.__context__ is None
    with pytest.raises(TypeError, match="must be given by keyword"):
        dnn.conv(X, W, X)  # type: ignore[misc]
    with pytest.raises(TypeError, match="has no argument `strides`"):
        dnn.conv(X, W, strides=1)  # type: ignore[call-arg]


def test_programs_are_bounded_and_keep_no_array(programs: Programs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager, "KEPT", 3)
    for n in range(1, 6):
        dnn.pool(X, window=n)
    assert len(programs) == 3
    dnn.pool(X, window=5)  # the last is there
    assert len(programs) == 3
    x = jnp.ones((2, 8, 8, 4))
    gone = weakref.ref(x)
    dnn.activation(x).block_until_ready()
    del x
    gc.collect()
    assert gone() is None


def test_contexts_have_programs_of_their_own():
    dnn.softmax(X)
    with dnn.determinism("portable"), pytest.raises(NotImplementedError, match="'portable'"):
        dnn.softmax(X)
    assert dnn.activation(np.ones(3)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert dnn.activation(np.ones(3)).dtype == jnp.float64


def test_what_is_traced_is_no_program(programs: Programs):
    jax.jit(dnn.softmax)(X)
    jax.vmap(dnn.softmax)(X)
    jax.grad(lambda x: jnp.sum(dnn.softmax(x)))(X)
    jax.jit(lambda: dnn.dropout_mask(7, (2, 3)))()
    assert [found.engine for found in dnn.explain(dnn.softmax, X)] == ["xla"]
    assert programs == {}


def test_without_the_name_calls_run_operation_by_operation(programs: Programs, monkeypatch: pytest.MonkeyPatch):
    expected = dnn.conv(X, W)
    programs.clear()
    with contextlib.ExitStack() as stack:
        stack.callback(compat.lacking.cache_clear)
        stack.callback(compat._untraced.cache_clear)
        name = compat.UNTRACED[0]
        monkeypatch.setattr(compat, "UNTRACED", (compat.Name(name.module, "no_such_name", name.why),))
        compat._untraced.cache_clear()
        np.testing.assert_array_equal(dnn.conv(X, W), expected)
    assert programs == {}


def test_what_fails_when_it_runs_is_not_run_again(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    x = jnp.ones((2, 3))
    dnn.scale(x, alpha=2.0)
    monkeypatch.setattr(eager, "_programs", dict.fromkeys(eager._programs, fails))
    with pytest.raises(RuntimeError, match="out of memory"):
        dnn.scale(x, alpha=2.0)
