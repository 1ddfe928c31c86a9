"""The linear layer with cross-entropy: values, gradients, memory, sharding, bad input."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.softmax import cross_entropy as ce
from tests.texts import Refused, assert_refused

COMPILATION = "/jax/core/compile/backend_compile_duration"
RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(3, 7, 12)).astype(np.float32)
W = RANDOM.normal(size=(12, 50)).astype(np.float32)
LABELS = RANDOM.integers(0, 50, size=(3, 7))
LABELS[0, :2] = 9
BIAS = RANDOM.normal(size=50).astype(np.float32)
WEIGHTS = RANDOM.random((3, 7)).astype(np.float32)
OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 9}


def plain(reduction: str, x: Any, w: Any, bias: Any, weights: Any) -> Any:
    """All logits at once, by products of probabilities instead of sums of logits."""
    z = jnp.einsum("...d,dv->...v", x, w, precision="highest") + jnp.expand_dims(bias, (0, 1))
    e = jnp.exp(z - 3)
    total = jnp.sum(e, -1, keepdims=True)
    target = 0.9 * jax.nn.one_hot(LABELS, 50, dtype=x.dtype) + jnp.asarray(0.1 / 50, x.dtype)
    loss = -jnp.sum(target * jnp.log(e / total), -1) + 0.01 * (3 + jnp.log(total[..., 0])) ** 2
    weights = jnp.where(LABELS == 9, jnp.zeros_like(weights), weights)
    return {
        "none": lambda: weights * loss,
        "sum": lambda: jnp.sum(weights * loss),
        "mean": lambda: jnp.sum(weights * loss) / jnp.sum(weights),
    }[reduction]()


def ours(reduction: str, chunk: int | None, x: Any, w: Any, bias: Any, weights: Any) -> Any:
    return dnn.linear_cross_entropy(
        x, w, LABELS, bias=bias, weights=weights, reduction=reduction, chunk=chunk, **OPTIONS
    )


def by_all(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2, 3))


TRANSFORMED: dict[str, Callable[[Any, Any], Any]] = {
    "value": lambda f, a: f(*a),
    "grad": lambda f, a: by_all(f)(*a),
    "jvp": lambda f, a: jax.jvp(f, a, tuple(map(jnp.cos, a))),
    "jvp of grad": lambda f, a: jax.jvp(by_all(f), a, tuple(map(jnp.cos, a))),
    "grad of grad": lambda f, a: by_all(lambda *g: sum(jnp.vdot(u, jnp.cos(v)) for u, v in zip(by_all(f)(*g), g)))(*a),  # noqa: B905
    "vmap of x": lambda f, a: jax.vmap(f, (0, None, None, None))(jnp.stack([a[0], 0.5 * a[0]]), *a[1:]),
    "vmap of w": lambda f, a: jax.vmap(f, (None, 0, None, None))(a[0], jnp.stack([a[1], 0.5 * a[1]]), *a[2:]),
    "vmap of grad": lambda f, a: jax.vmap(by_all(f))(*(jnp.stack([v, 0.5 * v]) for v in a)),
    "remat": lambda f, a: by_all(jax.checkpoint(f))(*a),
    "scan": lambda f, a: jax.lax.scan(lambda c, _: (c, f(a[0] * c, *a[1:])), jnp.ones((), a[0].dtype), None, 2)[1],
}


@pytest.mark.parametrize("transformation", TRANSFORMED)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_transformations(chunk: int | None, reduction: str, transformation: str, x64: None):
    arrays = tuple(jnp.asarray(a, jnp.float64) for a in (X, W, BIAS, WEIGHTS))
    transform = TRANSFORMED[transformation]
    pair = ft.partial(ours, reduction, chunk), ft.partial(plain, reduction)
    found, wanted = jax.jit(lambda: [transform(f, arrays) for f in pair])()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("chunk", [None, 1, 4, 20, 100])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_value_is_the_definition_s(dtype: Any, chunk: int | None):
    x, w, bias = (a.astype(dtype) for a in (X, W, BIAS))
    for reduction in ("mean", "sum", "none"):
        named = dict(OPTIONS, bias=bias, weights=WEIGHTS, reduction=reduction)
        found = dnn.linear_cross_entropy(x, w, LABELS, chunk=chunk, **named)
        assert found.dtype == np.float32
        # Every step in float32: a sum of 12 products of magnitude S, 50 exponentials, at most 21 losses.
        z = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64))
        step = 2.0**-24 * (14 * (z.max() + np.abs(bias).astype(np.float64).max()) + 60) * 3
        wanted = reference.linear_cross_entropy(x, w, LABELS, **named)
        size = 21 if reduction == "sum" else 1
        np.testing.assert_allclose(found, wanted, rtol=22 * 2.0**-24, atol=step * size)


def test_gradients_of_bfloat16_are_near_those_of_float64():
    x, w = X.astype(ml_dtypes.bfloat16), W.astype(ml_dtypes.bfloat16)
    f = lambda x, w: dnn.linear_cross_entropy(x, w, LABELS, reduction="sum", chunk=4)
    dx, dw = jax.grad(f, (0, 1))(x, w)
    assert dx.dtype == dw.dtype == ml_dtypes.bfloat16
    z = x.astype(np.float64) @ w.astype(np.float64)
    g = np.exp(z - z.max(-1, keepdims=True))
    g = g / g.sum(-1, keepdims=True) - np.eye(50)[LABELS]
    # g rounded to bfloat16, the products added in float32, the sum rounded: 2^-8 of the sums of magnitudes, and of G.
    for found, golden, magnitude in (
        (dx, g @ w.astype(np.float64).T, np.abs(g) @ np.abs(w.astype(np.float64)).T),
        (
            dw,
            np.einsum("abd,abv->dv", x.astype(np.float64), g),
            np.einsum("abd,abv->dv", np.abs(x.astype(np.float64)), np.abs(g)),
        ),
    ):
        assert (np.abs(np.asarray(found, np.float64) - golden) <= 2.0**-8 * (np.abs(golden) + 1.01 * magnitude)).all()


def test_only_what_is_differentiated_is_computed():
    f = lambda x, w: dnn.linear_cross_entropy(x, w, LABELS, chunk=5)
    products = lambda wanted: str(jax.make_jaxpr(jax.grad(f, wanted))(X, W)).count("dot_general")
    assert [products(0), products(1), products((0, 1))] == [2, 2, 3]


def test_bias_of_minus_infinity_leaves_a_word_out():
    bias = np.where(np.arange(50) % 2 == 0, 0, -np.inf).astype(np.float32)
    labels = LABELS // 2 * 2
    f = lambda x, w, b: dnn.linear_cross_entropy(x, w, labels, bias=b)
    value, (dx, dw) = jax.value_and_grad(f, (0, 1))(X, W, bias)
    np.testing.assert_allclose(value, dnn.linear_cross_entropy(X, W[:, ::2], labels // 2), rtol=1e-6)
    assert np.isfinite(dx).all()
    assert not np.asarray(dw)[:, 1::2].any()


def test_labels_outside_are_nan_and_ignored_ones_are_nothing():
    labels = np.where(LABELS == 9, -100, LABELS)
    f = lambda x: dnn.linear_cross_entropy(x, W, labels, ignore_index=-100)
    value, dx = jax.value_and_grad(f)(X)
    assert np.isfinite(value)
    assert not np.asarray(dx)[labels == -100].any()
    rows = np.asarray(dnn.linear_cross_entropy(X, W, labels, reduction="none"))
    assert (np.isnan(rows) == (labels == -100)).all()
    assert np.isnan(dnn.linear_cross_entropy(X, W, labels))
    assert np.isnan(dnn.linear_cross_entropy(X, W, np.full((3, 7), 4), ignore_index=4))
    assert dnn.linear_cross_entropy(X, W, np.full((3, 7), 4), ignore_index=4, reduction="sum") == 0
    np.testing.assert_array_equal(dnn.linear_cross_entropy(X, W, LABELS.astype(np.uint8), ignore_index=-100, chunk=4),
                                  dnn.linear_cross_entropy(X, W, LABELS, chunk=4))  # fmt: skip
    most = np.where(LABELS == 2, np.uint32(2**32 - 1), LABELS.astype(np.uint32))
    np.testing.assert_array_equal(dnn.linear_cross_entropy(X, W, most, ignore_index=2**32 - 1),
                                  dnn.linear_cross_entropy(X, W, LABELS, ignore_index=2))  # fmt: skip


@pytest.mark.parametrize("rows", [3, 0])
def test_gradients_are_0_where_no_row_counts(rows: int):
    """As PyTorch's: a batch without labels makes the loss NaN, and leaves the weights what they are."""
    x, w, bias, weights = jnp.ones((rows, 4)), jnp.asarray(W[:4]), jnp.ones(50), jnp.ones(rows)
    labels = jnp.full(rows, -100)
    f = lambda x, w, b, s: dnn.linear_cross_entropy(x, w, labels, bias=b, weights=s, ignore_index=-100)
    slopes = jax.jit(jax.grad(lambda *a: sum(jnp.sum(g) for g in jax.grad(f, range(4))(*a)), range(4)))
    value, found = jax.jit(jax.value_and_grad(f, range(4)))(x, w, bias, weights)
    assert np.isnan(value)
    for array in (*found, *slopes(x, w, bias, weights)):
        assert not np.asarray(array).any()


def test_gradients_of_float16_when_their_sum_over_rows_is_out_of_range():
    """64 rows of 4096, 3/4 of it each, sum to -196608: beyond float16, unlike their mean."""
    x, w, labels = jnp.full((64, 2), 4096, jnp.float16), jnp.zeros((2, 4), jnp.float16), jnp.zeros(64, int)
    dw = jax.grad(dnn.linear_cross_entropy, 1)(x, w, labels, chunk=16)
    assert dw.dtype == jnp.float16
    np.testing.assert_array_equal(dw, [[-3072, 1024, 1024, 1024]] * 2)


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e5, 1e30])
def test_gradients_of_float16_do_not_depend_on_the_size_of_the_weights(size: float):
    x, w = X.astype(np.float16), W.astype(np.float16)
    f = lambda x, w, weights: dnn.linear_cross_entropy(x, w, LABELS, weights=weights, chunk=7)
    run = jax.jit(jax.grad(f, (0, 1)))
    for a, b in zip(run(x, w, WEIGHTS * np.float32(size)), run(x, w, WEIGHTS), strict=True):
        # Nothing overflows; what is rounded to float16 may be up to twice as large, near its subnormal numbers.
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=2**-8, atol=2**-13)
        assert np.abs(b.astype(np.float32)).max() > 0.03


def test_rows_that_do_not_count_reach_nothing():
    ignored = np.expand_dims(LABELS == 9, -1)
    bad = np.where(ignored, np.nan, X).astype(np.float32), np.where(ignored[..., 0], np.nan, WEIGHTS).astype(np.float32)
    for reduction in ("mean", "sum", "none"):
        f = lambda x, w, weights, r=reduction: jnp.sum(
            dnn.linear_cross_entropy(x, w, LABELS, weights=weights, ignore_index=9, reduction=r, chunk=7)
        )
        run = jax.jit(jax.value_and_grad(f, (0, 1, 2)))
        found, wanted = run(bad[0], W, bad[1]), run(X, W, WEIGHTS)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        assert np.isfinite(found[0])
        assert ignored.any()
        named: dict[str, Any] = {"ignore_index": 9, "reduction": reduction}
        np.testing.assert_array_equal(
            reference.linear_cross_entropy(bad[0], W, LABELS, weights=bad[1], **named),
            reference.linear_cross_entropy(X, W, LABELS, weights=WEIGHTS, **named),
        )


def test_gradients_of_labels_outside_are_nan_whatever_the_reduction():
    labels = np.array([3, 50, -7, 4])
    for reduction in ("mean", "sum", "none"):
        f = lambda x, w, b, r=reduction: jnp.sum(
            dnn.linear_cross_entropy(x, w, labels, bias=b, ignore_index=-7, reduction=r)
        )
        dx, dw, db = jax.jit(jax.grad(f, (0, 1, 2)))(X[0, :4], W, BIAS)
        assert np.isnan(dw).all()
        assert np.isnan(db).all()
        assert np.isnan(dx[1]).all()
        assert not np.asarray(dx)[2].any()
        assert reduction == "mean" or np.isfinite(np.asarray(dx)[[0, 3]]).all()


def test_chunks_divide_the_rows_if_some_number_near_does():
    count: Any = ce._count
    pairs = {(1024, 128): 8, (8192, 1335): 8, (21, 5): 7, (13, 5): 3, (13, 20): 1, (0, 1): 1, (7, 1): 7, (26, 10): 3}
    assert {pair: count(*pair) for pair in pairs} == pairs
    f = lambda w, chunk: dnn.linear_cross_entropy(X.reshape(21, 12)[:13], w, LABELS.reshape(-1)[:13], chunk=chunk)
    found, wanted = jax.jit(lambda w: [jax.value_and_grad(f)(w, chunk) for chunk in (5, 13)])(W)
    jax.tree.map(ft.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


def test_no_width_and_no_rows():
    value, (dx, dw) = jax.jit(jax.value_and_grad(dnn.linear_cross_entropy, (0, 1)))(
        jnp.ones((4, 0)), jnp.ones((0, 5)), jnp.zeros(4, int)
    )
    np.testing.assert_allclose(value, np.log(5), rtol=1e-6)
    assert (dx.shape, dw.shape) == ((4, 0), (0, 5))
    f = lambda w: dnn.linear_cross_entropy(jnp.ones((3, 0, 2)), w, jnp.zeros((3, 0), int), reduction="sum")
    value, dw = jax.jit(jax.value_and_grad(f))(jnp.ones((2, 5)))
    assert value == 0
    assert not np.asarray(dw).any()


def test_logits_are_never_all_in_memory():
    """8192 rows of a vocabulary of 128k, bfloat16: the logits alone would be 4 GiB in float32."""
    rows, width, words = 8192, 64, 1 << 17
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, width), (width, words))]
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    for chunk, most in ((None, 3 << 30), (128, 1 << 29)):
        f = lambda x, w, labels, chunk=chunk: dnn.linear_cross_entropy(x, w, labels, chunk=chunk)
        forward = jax.jit(f).lower(*shapes, labels).compile().memory_analysis()
        both = jax.jit(jax.value_and_grad(f, (0, 1))).lower(*shapes, labels).compile().memory_analysis()
        each = jax.jit(lambda *a, f=f: jax.jvp(lambda *b: f(*b, a[2]), a[:2], a[:2])).lower(*shapes, labels).compile()
        for found in (forward, both, each.memory_analysis()):
            assert found is not None
            assert found.temp_size_in_bytes < most, (chunk, found.temp_size_in_bytes / 2**20)


@pytest.mark.parametrize("spec", [("rows", P("d"), P()), ("words", P(), P(None, "d")), ("width", P(None, "d"), P("d"))])
def test_sharded(spec: Any):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    x = RANDOM.normal(size=(64, 16)).astype(np.float32)
    w = RANDOM.normal(size=(16, 48)).astype(np.float32)
    labels = RANDOM.integers(0, 48, size=64)
    run = jax.jit(jax.value_and_grad(lambda x, w: dnn.linear_cross_entropy(x, w, labels, chunk=16), (0, 1)))
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, w), spec[1:], strict=True)]
    for a, b in zip(jax.tree.leaves(run(*placed)), jax.tree.leaves(run(x, w)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_sharded_rows_stay_where_they_are():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    rows, words = 1024, 256
    x = jax.ShapeDtypeStruct((rows, 16), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    w = jax.ShapeDtypeStruct((16, words), jnp.float32, sharding=NamedSharding(mesh, P()))
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=NamedSharding(mesh, P("d")))
    text = jax.jit(lambda *a: dnn.linear_cross_entropy(*a, chunk=128)).lower(x, w, labels).compile().as_text() or ""
    assert "all-gather" not in text
    assert f"f32[16,{words}]" in text  # a chunk's logits: 16 of its 128 rows a device


def test_a_sharded_vocabulary_stays_where_it_is():
    """Logsumexp and the label's logit of a row are put together from the devices' parts, forward and backward."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    rows, words = 64, 1024
    x, labels = jax.ShapeDtypeStruct((rows, 16), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    w = jax.ShapeDtypeStruct((16, words), jnp.float32, sharding=NamedSharding(mesh, P(None, "d")))
    f = jax.value_and_grad(lambda *a: dnn.linear_cross_entropy(*a, chunk=16), (0, 1))
    text = jax.jit(f, out_shardings=(None, (None, w.sharding))).lower(x, w, labels).compile().as_text() or ""
    assert "all-gather" not in text
    assert f"f32[16,{words}]" not in text  # a chunk's logits


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_shard_map(reduction: str):
    mesh = jax.make_mesh((4,), ("b",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x, labels = X.reshape(21, 12)[:16], LABELS.reshape(-1)[:16]

    def local(x: Any, w: Any, bias: Any, labels: Any) -> Any:
        value = dnn.linear_cross_entropy(x, w, labels, bias=bias, reduction=reduction, chunk=2)
        return jax.lax.psum(jnp.sum(value), "b")

    f = jax.shard_map(local, mesh=mesh, in_specs=(P("b"), P(), P(), P("b")), out_specs=P())
    found = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(x, W, BIAS, labels)
    g = lambda x, w, bias: dnn.linear_cross_entropy(x, w, labels, bias=bias, reduction="sum")
    wanted = jax.value_and_grad(g, (0, 1, 2))(x, W, BIAS)
    jax.tree.map(ft.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_explicit_axes(reduction: str):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    x, labels = RANDOM.normal(size=(24, 12)).astype(np.float32), RANDOM.integers(0, 50, size=24)
    f = lambda x, w, labels: dnn.linear_cross_entropy(x, w, labels, reduction=reduction, chunk=9)
    run = jax.jit(lambda *a: (f(*a), jax.grad(lambda *b: jnp.mean(f(*b)), (0, 1))(*a)))
    wanted = run(x, W, labels)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("d"))
        found = run(jax.device_put(x, rows), W, jax.device_put(labels, rows))
    assert found[0].sharding.spec == (P("d") if reduction == "none" else P())
    jax.tree.map(ft.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


def test_an_equal_call_compiles_nothing_anew():
    counted: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: counted.append(event))
    f = lambda x, w, **options: jnp.sum(dnn.linear_cross_entropy(x, w, LABELS, chunk=4, **options))
    for reduction in ("mean", "none"):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.125}
        for run in (f, jax.grad(f, (0, 1)), lambda *a, **o: jax.jvp(ft.partial(f, **o), a, a)):
            x, w = jnp.asarray(X), jnp.asarray(W)
            jax.block_until_ready(run(x, w, **options))
            assert COMPILATION in counted
            counted.clear()
            jax.block_until_ready(run(x, w, **options))
            assert COMPILATION not in counted


def test_numpy_arrays_of_64_bits():
    arrays = X, W, LABELS, BIAS, WEIGHTS
    wide = [a.astype(np.float64 if a.dtype == np.float32 else np.int64) for a in arrays]
    call = lambda x, w, labels, bias, weights: dnn.linear_cross_entropy(x, w, labels, bias=bias, weights=weights)
    found, wanted = call(*wide), call(*arrays)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted)


loss: Any = dnn.linear_cross_entropy
BAD: list[Refused] = [
    (lambda: loss(X.astype(np.int32), W, LABELS), TypeError, "`x` must have one of the dtypes"),
    (lambda: loss(X, W.astype(np.float16), LABELS), TypeError, "`w` must have the dtype"),
    (lambda: loss(X, W.T, LABELS), ValueError, "`w` must be (D, V) for `x` (..., D)"),
    (lambda: loss(X, W, LABELS[0]), ValueError, "`labels` must have shape (3, 7)"),
    (lambda: loss(X, W, WEIGHTS), TypeError, "`labels` must be integers, got float32"),
    (lambda: loss(X, W, LABELS, bias=BIAS[1:]), ValueError, "`bias` must have shape (50,)"),
    (lambda: loss(X, W, LABELS, weights=BIAS), ValueError, "`weights` must have shape (3, 7)"),
    (
        lambda: loss(X, W, LABELS, weights=LABELS),
        TypeError,
        "`weights` must have the dtype",
    ),
    (lambda: loss(X, W, LABELS, label_smoothing=1.5), ValueError, "must be from 0 to 1, got 1.5"),
    (lambda: loss(X, W, LABELS, z_loss=-1), ValueError, "`z_loss` must be at least 0 and finite"),
    (lambda: loss(X, W, LABELS, z_loss="a"), TypeError, "`z_loss` must be a number known when"),
    (lambda: loss(X, W, LABELS, reduction="max"), ValueError, "`reduction` must be one of 'mean'"),
    (lambda: loss(X, W, LABELS, chunk=0), ValueError, "`chunk` must be at least 1, got 0"),
    (lambda: loss(X, W, LABELS, ignore_index=1.5), TypeError, "`ignore_index` must be made of"),
    (lambda: loss(X, W, LABELS, precision="fast"), ValueError, "`precision` must be one of None"),
    (
        lambda: loss(X.astype(np.float16), W.astype(np.float16), LABELS, precision="tf32"),
        TypeError,
        "`precision` 'tf32' needs float32 operands, got float16",
    ),
    (
        lambda: loss(X, W, LABELS, determinism="batch_invariant"),
        NotImplementedError,
        "`determinism` 'batch_invariant' cannot be guaranteed for linear_cross_entropy",
    ),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_input(index: int):
    assert_refused(*BAD[index])
