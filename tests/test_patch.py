"""`jaxdnn.patch`: programs written with lax, jax.nn or Flax, untouched, use this library's ops and say so.

Numbers are small integers where results must be equal, as in `test_lax_like`.
"""

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.lax import conv_general_dilated as held  # as a program may hold it, from before any patch
from jax.nn import softmax

import jaxdnn as dnn
from jaxdnn._src.adapters.patch import _TARGETS
from tests import layers
from tests.test_lax_like import NHWC, W, X, assert_equal, integers

ROOT = Path(__file__).parents[1]
ORIGINALS = [getattr(t.owner, t.attribute) for t in _TARGETS]


def convolved(x: Array, w: Array = W, **options: Any) -> Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, **options)


def has_conv(function: Callable[..., Any], *args: Any) -> bool:
    """Whether a function's program has lax's own convolution."""
    anew = lambda *args: function(*args)  # for JAX keeps what it traced
    return "conv_general_dilated" in str(jax.make_jaxpr(anew)(*args))


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    assert [getattr(t.owner, t.attribute) for t in _TARGETS] == ORIGINALS
    assert has_conv(convolved, X)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: lax.conv_general_dilated(x, W, (2, 1), "SAME", dimension_numbers=NHWC),
        lambda x: held(x, W, (2, 1), "SAME", dimension_numbers=NHWC),
        lambda x: lax.conv(x.transpose(0, 3, 1, 2), W.transpose(3, 2, 0, 1), (1, 1), "SAME"),
        lambda x: lax.conv_transpose(x, W, (2, 2), "SAME"),
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
        lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "VALID"),
    ],
)
def test_values_and_gradients_are_the_same(call: Callable[[Array], Array]):
    both = lambda x: jax.value_and_grad(lambda x: (call(x) ** 2).sum())(x)
    wanted = both(X)
    with dnn.patch() as patched:
        found, jitted = both(X), jax.jit(both)(X)
    assert_equal(found, wanted)
    assert_equal(jitted, wanted)
    assert (patched.replaced.total(), patched.left.total()) == (2, 0)
    assert {c.place.partition(":")[0] for c in patched.replaced} == {__name__}


def test_maxima_of_integers():
    """The primitive has no initial value, so the context says one: of the operand's dtype, as lax asks for."""
    pooled = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    wanted = pooled(X.astype(jnp.int8))
    with dnn.patch() as patched:
        found = pooled(X.astype(jnp.int8))
    assert_equal([found], [wanted])
    assert (patched.replaced.total(), patched.left.total()) == (1, 0)


def test_sizes_that_are_symbolic():
    """The batch may be, and is served, wherever the windows are; what needs other sizes is left to JAX."""
    window = ((1, 3, 2, 1), (1, 2, 1, 1), "SAME")
    pooled = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *window)
    summed = lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 2), (1, 1), "VALID")[..., None]
    leading = lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 3, 2), (1, 1, 1, 1), "VALID")
    attended = lambda x: jax.nn.dot_product_attention(x, x, x)
    (n,) = jax.export.symbolic_shape("n")
    for call, shape, x, served in (
        (convolved, (n, 7, 6, 4), X, True),
        (pooled, (n, 7, 6, 4), X, True),
        (leading, (n, 2, 7, 6), X.transpose(0, 3, 1, 2)[:, :2], True),
        (convolved, (2, n, 6, 4), X, False),
        (pooled, (2, n, 6, 4), X, False),
        (summed, (n, 6), X[0, ..., 0], False),
        (attended, (2, n, 6, 4), X, False),
    ):
        wanted = call(x)
        with dnn.patch() as patched:
            found = jax.export.export(jax.jit(call))(jax.ShapeDtypeStruct(shape, x.dtype)).call(x)
        assert (patched.replaced.total(), patched.left.total()) == ((1, 0) if served else (0, 1)), shape
        assert_near = np.testing.assert_allclose if call is attended else np.testing.assert_array_equal
        assert_near(found, wanted)


def test_functions_of_jax_nn():
    q = layers.numbers((2, 5, 2, 8))
    run = lambda: (jax.nn.softmax(q), jax.nn.log_softmax(q, 0), jax.nn.dot_product_attention(q, q, q, is_causal=True))
    with jax.numpy_rank_promotion("allow"):
        wanted = run()
        with dnn.patch() as patched:
            found = run()
    assert sorted(c.function for c in patched.replaced) == ["dot_product_attention", "log_softmax", "softmax"]
    for a, b in zip(found, wanted, strict=True):
        assert abs(a - b).max() <= 64 * np.finfo(np.float32).eps * abs(b).max()  # sums of 8 terms, a few exponentials


def test_functions_of_jax_nn_that_modules_have_imported():
    """Under their own names; under another, as `sm` here, or in an object they are not seen."""
    linen, flax_nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    sm = softmax
    with jax.numpy_rank_promotion("allow"):
        wanted = softmax(X)
        with dnn.patch() as patched:
            found = [f(X) for f in (lambda x: softmax(x), lambda x: linen.softmax(x), lambda x: flax_nnx.softmax(x))]
            assert sm is ORIGINALS[-2]
            sm(X)
    for y in found:
        np.testing.assert_allclose(y, wanted, rtol=64 * float(np.finfo(np.float32).eps))
    assert (patched.replaced.total(), patched.left.total()) == (3, 0)
    assert all(f is ORIGINALS[-2] for f in (softmax, linen.softmax, flax_nnx.softmax))


def test_places_are_lines_of_the_program_not_of_flax():
    nnx = pytest.importorskip("flax.nnx")
    first, second = (nnx.Conv(4, 4, (3, 3), rngs=nnx.Rngs(0)) for _ in range(2))
    with dnn.patch() as patched, jax.numpy_rank_promotion("allow"):
        y = first(X)
        second(y)
    places = sorted(call.place.split(":") for call in patched.replaced)
    assert [module for module, _ in places] == [__name__] * 2
    assert int(places[1][1]) == int(places[0][1]) + 1


def test_operands_are_listed_however_they_are_given():
    where = X > 0
    with dnn.patch() as patched:
        jax.nn.softmax(x=X, axis=-1, where=where)
    ((call, _),) = patched.replaced.items()
    assert call.operands == ("float32[2,7,6,4]", "bool[2,7,6,4]")


def test_what_is_refused_is_left_and_listed():
    x = integers(1, 4, 4, 2, dtype=jnp.int32)
    with dnn.patch() as patched:
        found = [convolved(x, integers(3, 3, 2, 1, dtype=jnp.int32)) for _ in range(2)]
        products = lax.reduce_window(X, 1.0, lax.mul, (1, 2, 2, 1))
        convolved(X)
    assert_equal(found, [convolved(x, integers(3, 3, 2, 1, dtype=jnp.int32))] * 2)
    assert_equal([products], [lax.reduce_window(X, 1.0, lax.mul, (1, 2, 2, 1))])
    assert patched.left.total() == 3
    (call,) = (c for c in patched.left if c.function == "conv_general_dilated")
    assert patched.left[call] == 2
    assert call.operands == ("int32[1,4,4,2]", "int32[3,3,2,1]")
    assert str(call.reason).startswith("`lhs` must be float32, bfloat16, float16, float64 or int8")
    text = str(patched)
    assert "1 replaced by jaxdnn\n  1 x conv_general_dilated(float32[2,7,6,4], float32[3,2,4,6]) at tests" in text
    assert "3 left to JAX\n  2 x conv_general_dilated(int32[1,4,4,2], int32[3,3,2,1]) at" in text
    assert call.place.startswith(f"{__name__}:")


def test_what_jax_itself_refuses_raises_its_error_and_restores():
    with pytest.raises(TypeError) as wanted:
        convolved(X, preferred_element_type=jnp.bfloat16)
    with pytest.raises(TypeError) as found, dnn.patch() as patched:
        convolved(X, preferred_element_type=jnp.bfloat16)
    assert str(found.value) == str(wanted.value)
    assert not patched.replaced
    with pytest.raises(KeyError), dnn.patch():
        raise KeyError


def test_the_librarys_own_calls_of_lax_are_not_replaced():
    """An engine convolves with lax's function, at once and when it is lowered."""
    with dnn.patch() as patched:
        found = dnn.conv(X, W, padding="SAME")
        jitted = jax.jit(jax.grad(lambda x: dnn.conv(x, W, padding="SAME", activation="relu").sum()))(X)
        dnn.ctc_loss(jnp.zeros((1, 4, 3)), jnp.ones((1, 2), jnp.int32))
        twice = jax.hessian(lambda s: dnn.ctc_loss(s * jnp.ones((1, 4, 3)), jnp.ones((1, 2), jnp.int32)).sum())(1.0)
    assert (patched.replaced.total(), patched.left.total()) == (0, 0)
    assert_equal([found], [convolved(X)])
    assert jitted.shape == X.shape
    assert jnp.isfinite(twice)


def test_only_engines_call_what_is_replaced():
    """And say so (`unpatched`): elsewhere in the library such a call would be replaced, in its own programs."""
    replaced = {f"jax.nn.{t.attribute}" for t in _TARGETS if t.owner is jax.nn} | {
        "lax.conv",
        "lax.conv_general_dilated",
    }
    replaced |= {"lax.conv_transpose", "lax.conv_with_general_padding", "lax.reduce_window"}
    found = {
        path.relative_to(ROOT / "jaxdnn").as_posix()
        for path in (ROOT / "jaxdnn").rglob("*.py")
        if path.stem not in ("plain", "timed") and "adapters" not in path.parts and "bench" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node).replace("jax.lax", "lax") in replaced
    }
    assert found == {"_src/conv/xla/problem.py"}


def test_a_jitted_function_is_traced_anew_inside_and_outside():
    f = jax.jit(convolved)
    wanted = f(X)
    with dnn.patch() as first:
        assert_equal([f(X)], [wanted])
        f(X)
    assert first.replaced.total() == 1
    assert has_conv(f, X)
    with dnn.patch() as again:
        f(X)
    assert not again.replaced, "what was traced inside before is not traced again"
    with dnn.patch(precision="tf32") as other:
        f(X)
    assert other.replaced.total() == 1


def test_contexts_within_one_another():
    with dnn.patch() as outer:
        convolved(X)
        with dnn.patch() as inner:
            convolved(X)
            with outer:  # once more: a call is listed once
                convolved(X)
        assert not has_conv(convolved, X)
    assert (outer.replaced.total(), inner.replaced.total()) == (4, 2)


def test_decorator():
    patched = dnn.patch()

    @patched
    def model(x: Array, depth: int) -> Array:
        return convolved(x) if depth == 0 else model(x, depth - 1)

    wanted = convolved(X)
    assert_equal([model(X, 2)], [wanted])
    assert_equal([model(X, 0)], [wanted])
    assert patched.replaced.total() == 2


def test_what_runs_after_the_context_is_not_decorated():
    def pieces() -> Any:
        yield convolved(X)

    async def later() -> Array:
        return convolved(X)

    for function in (pieces, later):
        with pytest.raises(TypeError, match=f"`function` must be no generator or coroutine.*{function.__name__}"):
            dnn.patch()(function)


def test_a_context_is_left_as_often_as_it_was_entered():
    """And no more: the next context would else stay in place for good."""
    patched = dnn.patch()
    with patched:
        pass
    with pytest.raises(RuntimeError, match="must be left by the thread that entered it, once for each entry"):
        patched.__exit__()
    with patched:
        convolved(X)
    assert patched.replaced.total() == 1


def test_other_threads_are_not_affected():
    """One thread is inside while another is not; then both are, with the same object, and leave in any order."""
    patched, results = dnn.patch(), {}
    inside, done = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)

    def with_patch() -> None:
        with patched:
            inside.wait()
            results["with"] = has_conv(convolved, X)
            done.wait()

    def without() -> None:
        inside.wait()
        results["without"] = has_conv(convolved, X)
        with patched:
            results["with, here too"] = has_conv(convolved, X)
            done.wait()
        results["after"] = has_conv(convolved, X)

    threads = [threading.Thread(target=f) for f in (with_patch, without)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {"with": False, "without": True, "with, here too": False, "after": True}
    assert patched.replaced.total() == 2


def test_what_others_replace_meanwhile_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax.nn, "softmax", jax.nn.softmax)  # puts it back at the end
    mine = lambda x: x
    with dnn.patch():
        ours, jax.nn.softmax = jax.nn.softmax, mine
    assert jax.nn.softmax is mine
    assert_equal([ours(X)], [ORIGINALS[-2](X)])  # which a program may still hold: outside of a context it is JAX's
    monkeypatch.undo()


def test_transformations_inside():
    run = lambda: (
        jax.vmap(lambda x: convolved(x[None])[0])(X),
        jax.jvp(convolved, (X,), (X,))[1],
        lax.scan(lambda c, x: (c, convolved(x[None])), 0, X)[1],
        jax.grad(lambda x: (jax.checkpoint(convolved)(x) ** 2).sum())(X),
    )
    wanted = run()
    with dnn.patch() as patched:
        found = run()
    assert_equal(found, wanted)
    assert patched.replaced
    assert not patched.left


def test_tf32_on_request():
    x, w = jnp.full((1, 1, 1, 4), 1 + 2.0**-12), jnp.ones((1, 1, 4, 1)) / 4
    with dnn.patch():
        assert convolved(x, w).item() == x[0, 0, 0, 0]
    with dnn.patch(precision="tf32"):
        assert convolved(x, w).item() == 1
        assert convolved(x, w, precision="highest").item() == x[0, 0, 0, 0]
        assert convolved(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).item() == 1
    with pytest.raises(ValueError, match="`precision` must be one of None, 'tf32', got 'bf16'"):
        dnn.patch(precision="bf16")


def test_levels_hold_for_what_is_replaced():
    with dnn.patch() as patched, dnn.determinism("portable"):
        convolved(X)
        lax.reduce_window(X, 0.0, lax.add, (1, 2, 2, 1))
        jax.nn.softmax(X)
    assert sorted(c.function for c in patched.replaced) == ["conv_general_dilated", "reduce_window"]
    ((call, _),) = patched.left.items()
    assert "portable" in str(call.reason)


# ---- Flax ------------------------------------------------------------------------------------------------------------


def nnx_model() -> tuple[Any, Callable[[Any, Array], Array], Callable[..., Any], Callable[..., Any]]:
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, channels: int, features: int, rngs: Any) -> None:
            self.first = nnx.Conv(channels, features, (3, 3), strides=2, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(features, rngs=rngs)
            self.second = nnx.Conv(features, features, (3, 3), feature_group_count=2, rngs=rngs)
            self.skip = nnx.Conv(channels, features, (1, 1), strides=2, rngs=rngs)

        def __call__(self, x: Array) -> Array:
            return jax.nn.relu(self.second(jax.nn.relu(self.norm(self.first(x)))) + self.skip(x))

    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.stem = nnx.Conv(3, 4, (5, 5), kernel_dilation=2, rngs=rngs)
            self.block = Block(4, 8, rngs)
            self.up = nnx.ConvTranspose(8, 4, (2, 2), strides=2, rngs=rngs)
            self.dense = nnx.Linear(4, 5, rngs=rngs)

        def __call__(self, x: Array) -> Array:
            x = nnx.max_pool(jax.nn.relu(self.stem(x)), (3, 3), (2, 2), padding="SAME")
            x = nnx.avg_pool(self.up(self.block(x)), (2, 2), (2, 2))
            return jax.nn.log_softmax(self.dense(x.mean((1, 2))))

    kind, state = nnx.split(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))
    return nnx.merge(kind, layers.filled(state)), lambda model, x: model(x), nnx.value_and_grad, nnx.jit


def test_untouched_nnx_model():
    """The model is made before the context, so its layers hold lax's function already."""
    model, apply, value_and_grad, jit = nnx_model()
    x = layers.numbers((2, 16, 12, 3))
    step = jit(lambda model: value_and_grad(lambda m: (apply(m, x)[:, 0]).mean())(model))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # which Flax needs
        wanted = step(model)
        with dnn.patch() as patched:
            found = step(model)
    assert_alike(found, wanted)
    counts = {name: sum(n for c, n in patched.replaced.items() if c.function == name) for name in NAMES}
    assert counts == {"conv_general_dilated": 5, "reduce_window": 2, "log_softmax": 1}
    assert not patched.left


def test_untouched_linen_model():
    nn = pytest.importorskip("flax.linen")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            x = nn.max_pool(nn.relu(nn.Conv(4, (5, 5), kernel_dilation=2)(x)), (3, 3), (2, 2), padding="SAME")
            y = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3), strides=2, use_bias=False)(x)))
            y = nn.relu(nn.Conv(8, (3, 3), feature_group_count=2)(y) + nn.Conv(8, (1, 1), strides=2)(x))
            y = nn.avg_pool(nn.ConvTranspose(4, (2, 2), strides=(2, 2))(y), (2, 2), (2, 2), count_include_pad=False)
            return nn.Dense(5)(y.mean((1, 2)))

    model, x = Network(), layers.numbers((2, 16, 12, 3))

    @jax.jit
    def step(variables: Any) -> Any:
        loss = lambda v: (model.apply(v, x, mutable=["batch_stats"])[0][:, 0]).mean()
        return jax.value_and_grad(loss)(variables)

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        variables = layers.filled(jax.eval_shape(model.init, jax.random.key(0), x))
        wanted = step(variables)
        with dnn.patch() as patched:
            found = step(variables)
    assert_alike(found, wanted)
    counts = {name: sum(n for c, n in patched.replaced.items() if c.function == name) for name in NAMES}
    assert counts == {"conv_general_dilated": 5, "reduce_window": 3, "log_softmax": 0}
    assert not patched.left


NAMES = ("conv_general_dilated", "reduce_window", "log_softmax")


def assert_alike(found: Any, wanted: Any) -> None:
    """Each of some ten layers adds a few hundred terms in another order, in float32: an error of some hundred units in
    the last place of an array's largest number. A wrong layer would be off by as much as the numbers are."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = np.abs(b).max(initial=1e-3)
        np.testing.assert_allclose(a, b, rtol=0, atol=500 * np.finfo(np.float32).eps * scale)
