"""The level that a call requires: by its argument, by the context, whichever is stronger; and what engines promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
from jaxdnn._src.core.determinism import LEVELS, required, satisfies
from tests.conv import cases, helpers

X, W = jnp.ones((2, 5, 3)), jnp.ones((2, 3, 4))


def conv(x: jax.Array = X, w: jax.Array = W, **options: object) -> jax.Array:
    return dnn.conv(x, w, layout="NWC", **options)  # type: ignore[arg-type]


def levels_of(function, *args) -> list[str]:
    return [call.level for call in dnn.explain(function, *args)]


def test_levels_are_ordered():
    for i, strong in enumerate(LEVELS):
        assert [satisfies(strong, weak) for weak in LEVELS] == [j <= i for j in range(len(LEVELS))]


def test_nothing_is_required_by_default():
    assert required() == "fast"
    assert levels_of(conv) == ["fast"]


@pytest.mark.parametrize("level", LEVELS[:2])
def test_context_and_argument(level: str):
    with dnn.determinism(level):
        assert required() == level
        assert levels_of(conv) == [level]
    assert required() == "fast"
    assert levels_of(lambda: conv(determinism=level)) == [level]


def test_the_stronger_of_context_and_argument_counts():
    with dnn.determinism("run_to_run"):
        assert levels_of(lambda: conv(determinism="fast")) == ["run_to_run"]
        assert required("portable") == "portable"
    with dnn.determinism("portable"), dnn.determinism("run_to_run"):
        assert required() == "run_to_run"  # the innermost context is the one that holds


def test_context_ends_with_an_error():
    with pytest.raises(RuntimeError), dnn.determinism("portable"):
        raise RuntimeError
    assert required() == "fast"


def test_context_is_part_of_the_key_of_jit():
    seen = []

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        seen.append(required())
        return conv(x, activation="tanh")  # which no engine has portable

    step(X)
    with dnn.determinism("run_to_run"):
        step(X)
        step(X)
    step(X)
    assert seen == ["fast", "run_to_run"]
    with dnn.determinism("portable"), pytest.raises(NotImplementedError, match="at determinism level 'portable'"):
        step(X)


def test_eager_calls_are_not_served_from_another_level():
    conv(activation="tanh")
    with dnn.determinism("portable"), pytest.raises(NotImplementedError, match="at determinism level 'portable'"):
        conv(activation="tanh")


def test_gradients_require_the_level_too():
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(conv(x, w, alpha=0.5, activation="tanh"))

    with dnn.determinism("run_to_run"):
        assert levels_of(jax.grad(loss, (0, 1)), X, W) == ["run_to_run"] * 3
    assert levels_of(jax.grad(lambda x: jnp.sum(conv(x, determinism="run_to_run"))), X) == ["run_to_run"] * 2
    with dnn.determinism("portable"), pytest.raises(NotImplementedError, match="'portable'"):
        jax.grad(loss)(X, W)


def test_pullback_keeps_the_level_that_it_was_traced_under():
    with dnn.determinism("run_to_run"):
        _, pullback = jax.vjp(conv, X, W)
    assert levels_of(pullback, conv()) == ["run_to_run"] * 2


def test_integers_are_portable():
    x, w = X.astype(jnp.int8), W.astype(jnp.int8)
    for out in ("int8", "int32", "float32"):
        with dnn.determinism("portable"):
            np.testing.assert_array_equal(conv(x, w, out_dtype=out), 6)
    with dnn.determinism("portable"):
        assert dnn.conv_bgrad(x, layout="NWC", out_dtype="int32")[0] == 10
    with pytest.raises(NotImplementedError, match="it guarantees 'run_to_run' here"):
        conv(x, w, out_dtype="float32", alpha=0.1, determinism="portable")


def test_bias_gradient_is_repeatable():
    with dnn.determinism("run_to_run"):
        dnn.conv_bgrad(X, layout="NWC")
    with (
        dnn.determinism("batch_invariant"),
        pytest.raises(NotImplementedError, match="cannot be guaranteed for conv_bgrad"),
    ):
        dnn.conv_bgrad(X, layout="NWC")


@pytest.mark.parametrize("op", cases.OPS)
def test_run_to_run(op: str):
    """The same bits over repeats and over recompilation, on data whose sum depends on the order."""
    case = cases.case(op, cases.Geometry(3, (13, 17), 40, 24, (3, 5), padding=2), 1)
    arrays = cases.as_jax(case)
    first = np.asarray(helpers.call(case, *arrays))
    for _ in range(3):
        np.testing.assert_array_equal(helpers.call(case, *arrays), first)
    jax.clear_caches()
    np.testing.assert_array_equal(helpers.call(case, *arrays), first)


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_int8_and_float32_results_hold_the_level_claimed(dtype: type):
    """Where an engine claims batch invariance, a batch of one gives the same bits as the batch."""
    case = cases.case("conv", cases.Geometry(5, (9, 6), 7, 8, (3, 2)), 1, dtype=dtype)
    claimed = dnn.explain(lambda *a: helpers.call(case, *a), *cases.as_jax(case))[0].candidates[0].level
    x, w = cases.as_jax(case)
    whole, alone = dnn.conv(x, w)[2:3], dnn.conv(x[2:3], w)
    if satisfies(claimed, "batch_invariant"):
        np.testing.assert_array_equal(whole, alone)
    else:
        assert claimed == "run_to_run"
