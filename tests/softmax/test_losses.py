"""The cross-entropy of logits: values beside optax's, derivatives, memory, sharding, bad input."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
import jaxdnn_reference as reference
from tests.texts import Refused, assert_refused

RANDOM = np.random.default_rng(7)
Z = (3 * RANDOM.normal(size=(4, 5, 9))).astype(np.float32)
LABELS = RANDOM.integers(0, 9, size=(4, 5))
LABELS[0, :2] = 6
SPREAD = RANDOM.dirichlet(np.ones(9), size=(4, 5)).astype(np.float32)
WEIGHTS = RANDOM.random((4, 5)).astype(np.float32)
OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01}

loss: Any = dnn.cross_entropy


def test_rows_are_those_of_optax():
    ours = jax.jit(ft.partial(loss, reduction="none"))
    theirs = optax.softmax_cross_entropy_with_integer_labels
    np.testing.assert_allclose(ours(Z, LABELS), theirs(Z, LABELS), rtol=3e-6)
    np.testing.assert_allclose(ours(Z, SPREAD), optax.softmax_cross_entropy(Z, SPREAD), rtol=3e-6)
    smooth = optax.smooth_labels(jax.nn.one_hot(LABELS, 9), 0.1)
    found = jax.jit(ft.partial(loss, label_smoothing=0.1))(Z, LABELS)
    np.testing.assert_allclose(found, np.mean(optax.softmax_cross_entropy(Z, smooth)), rtol=3e-6)


@pytest.mark.parametrize("labels", [LABELS, SPREAD], ids=["labels", "distributions"])
def test_gradients_are_finite_differences_of_the_definition(labels: np.ndarray, x64: None):
    named: dict[str, Any] = dict(OPTIONS, ignore_index=6) if labels is LABELS else OPTIONS
    directions = [RANDOM.normal(size=a.shape) for a in (Z, WEIGHTS, SPREAD)]
    given = [a.astype(np.float64) for a in (Z, WEIGHTS, SPREAD)]
    count = 2 if labels is LABELS else 3

    def at(f: Any, reduction: str, z: Any, weights: Any, *spread: Any) -> Any:
        return f(z, *(spread or (labels,)), weights=weights, reduction=reduction, **named)

    step = 1e-5
    for reduction in ("mean", "sum", "none"):
        moved = [[a + s * d for a, d in zip(given, directions, strict=True)][:count] for s in (step, -step)]
        ends = [at(reference.cross_entropy, reduction, *arrays) for arrays in moved]
        wanted = (ends[0] - ends[1]) / (2 * step)
        f = ft.partial(at, loss, reduction)
        run = jax.jit(
            lambda a, d, f=f: (jax.jvp(f, a, d), jax.grad(lambda *b: jnp.sum(f(*b)), tuple(range(len(a))))(*a))
        )
        (value, along), gradients = run(tuple(given[:count]), tuple(directions[:count]))
        np.testing.assert_allclose(value, at(reference.cross_entropy, reduction, *given[:count]), rtol=1e-13)
        np.testing.assert_allclose(along, wanted, rtol=1e-7, atol=1e-9)
        total = sum(np.vdot(g, d) for g, d in zip(gradients, directions[:count], strict=True))
        np.testing.assert_allclose(total, np.sum(wanted), rtol=1e-7, atol=1e-9)


def test_second_derivatives(x64: None):
    named: dict[str, Any] = {"reduction": "sum", "label_smoothing": 0.25}
    z, labels = Z[0].astype(np.float64), LABELS[0]
    found = jax.jit(jax.hessian(lambda z: loss(z, labels, **named)))(z)
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    for row in range(len(z)):
        np.testing.assert_allclose(found[row, :, row], np.diag(p[row]) - np.outer(p[row], p[row]), atol=1e-14)


@pytest.mark.parametrize("level", ["fast", "mesh_invariant"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_gradients_of_narrow_logits_are_rounded_once(dtype: Any, level: str):
    """Next to a probability of 1 softmax minus label is small, and would vanish if softmax were rounded first."""
    z = Z.astype(dtype)
    z[..., 0] = 9
    labels = np.zeros((4, 5), np.uint8)
    run = jax.jit(jax.value_and_grad(lambda z: loss(z, labels, reduction="sum", determinism=level)))
    value, found = run(z)
    assert (value.dtype, found.dtype) == (np.float32, dtype)
    e = np.exp(z.astype(np.float64) - 9)
    wanted = e / e.sum(-1, keepdims=True) - np.eye(9)[0]
    unit = np.maximum(np.abs(wanted), float(ml_dtypes.finfo(dtype).tiny)) * float(ml_dtypes.finfo(dtype).eps)
    assert (np.abs(np.asarray(found).astype(np.float64) - wanted) <= 0.51 * unit + 2.0**-22).all()
    np.testing.assert_allclose(value, reference.cross_entropy(z, labels, reduction="sum"), rtol=1e-5)


def test_an_axis_among_others():
    moved, spread = np.moveaxis(Z, -1, 1), np.moveaxis(SPREAD, -1, 1)
    f = lambda z, labels, axis: jax.value_and_grad(lambda z: loss(z, labels, axis=axis, **OPTIONS))(z)
    run = jax.jit(lambda: [f(z, t, a) for z, t, a in ((moved, LABELS, 1), (moved, spread, -2), (Z, LABELS, -1))])
    (a, da), (b, _), (c, dc) = run()
    np.testing.assert_allclose(a, c, rtol=1e-6)
    np.testing.assert_allclose(np.moveaxis(da, 1, -1), dc, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(b, reference.cross_entropy(Z, SPREAD, **OPTIONS), rtol=2e-6)


def test_classes_left_out():
    left = np.arange(9) % 2 == 1
    z, labels = np.where(left, -np.inf, Z).astype(np.float32), LABELS // 2 * 2
    spread = np.where(left, 0, SPREAD).astype(np.float32)
    for target, alone in ((labels, labels // 2), (spread, spread[..., ::2])):
        value, dz = jax.jit(jax.value_and_grad(loss))(z, target)
        np.testing.assert_allclose(value, reference.cross_entropy(z, target), rtol=2e-6)
        np.testing.assert_allclose(value, jax.jit(loss)(Z[..., ::2], alone), rtol=1e-6)
        assert np.isfinite(dz).all()
        assert not np.asarray(dz)[..., left].any()
    rows = jax.jit(lambda z: [loss(z, labels % 8 + 1, reduction="none"), loss(z, labels, label_smoothing=0.1)])(z)
    for found in rows:  # a class with a target and no probability
        assert np.isposinf(found).all()
    assert np.isnan(loss(jnp.full((1, 3), -jnp.inf), jnp.zeros(1, int)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_reach_nothing_and_labels_outside_are_nan(reduction: str):
    ignored = LABELS == 6
    bad = np.where(np.expand_dims(ignored, -1), np.nan, Z), np.where(ignored, np.nan, WEIGHTS)
    f = lambda z, w: jnp.sum(loss(z, LABELS, weights=w, ignore_index=6, reduction=reduction, **OPTIONS))
    twice = jax.grad(lambda z, w: jnp.sum(jnp.sin(jax.grad(f)(z, w))))
    run = jax.jit(lambda z, w: (jax.value_and_grad(f, (0, 1))(z, w), twice(z, w)))
    found, wanted = run(*(v.astype(np.float32) for v in bad)), run(Z, WEIGHTS)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert ignored.any()
    assert np.isfinite(found[0][0])
    assert not np.asarray(found[0][1][0])[ignored].any()
    outside = np.array([3, 9, -7, -1])
    g = lambda z: jnp.sum(loss(z, outside, ignore_index=-7, reduction=reduction))
    value, dz = jax.jit(jax.value_and_grad(g))(Z[0, :4])
    assert np.isnan(value)
    assert np.isnan(dz[1]).all()
    assert np.isnan(dz[3]).all()
    assert not np.asarray(dz)[2].any()


def test_no_row_that_counts_and_no_rows():
    none = np.full((4, 5), 6)
    assert np.isnan(loss(Z, none, ignore_index=6))
    assert loss(Z, none, ignore_index=6, reduction="sum") == 0
    assert loss(jnp.ones((0, 3)), jnp.zeros(0, int), reduction="sum") == 0
    assert loss(jnp.ones(3), jnp.asarray(1), reduction="none").shape == ()
    np.testing.assert_array_equal(loss(Z, LABELS.astype(np.uint8), ignore_index=-100), loss(Z, LABELS))
    most = np.where(LABELS == 2, np.uint32(2**32 - 1), LABELS.astype(np.uint32))
    np.testing.assert_array_equal(
        loss(Z, most, ignore_index=2**32 - 1, reduction="none"), loss(Z, LABELS, ignore_index=2, reduction="none")
    )


def test_backward_keeps_no_second_copy_of_the_logits():
    shape = jax.ShapeDtypeStruct((64, 1000), jnp.bfloat16)
    labels = jnp.zeros(64, jnp.int32)
    for target in (labels, jnp.full((64, 1000), 1e-3, jnp.bfloat16)):
        f = lambda z, target=target: loss(z, target, **OPTIONS)
        kept = jax.tree.leaves(jax.eval_shape(lambda z, f=f: jax.vjp(f, z)[1], shape))
        count = sum(v.shape == shape.shape for v in kept)
        assert count == (1 if target is labels else 2)  # the logits, and given distributions
        assert all(v.dtype == jnp.bfloat16 for v in kept if v.shape == shape.shape)
        assert all(v.size <= 64 for v in kept if v.shape != shape.shape)


def test_vmap_and_remat():
    f = lambda z, labels: loss(z, labels, **OPTIONS)
    run = jax.jit(lambda z, labels: jax.vmap(jax.grad(jax.checkpoint(f)))(z, labels))
    each = jax.jit(lambda z, labels: jnp.stack([jax.grad(f)(z[i], labels[i]) for i in range(2)]))
    np.testing.assert_allclose(run(Z[:2], LABELS[:2]), each(Z[:2], LABELS[:2]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_explicit_axes(reduction: str):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    f = lambda z, labels: loss(z, labels, reduction=reduction)
    run = jax.jit(lambda *a: (f(*a), jax.grad(lambda *b: jnp.mean(f(*b)))(*a)))
    wanted = run(Z, LABELS)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("d"))
        found = run(jax.device_put(Z, rows), jax.device_put(LABELS, rows))
    assert found[0].sharding.spec == (P("d", None) if reduction == "none" else P())
    jax.tree.map(ft.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), found, wanted)


BAD: list[Refused] = [
    (lambda: loss(Z.astype(np.int32), LABELS), TypeError, "`logits` must have one of the dtypes"),
    (lambda: loss(Z, LABELS[0]), ValueError, "`labels` must have shape (4, 5), one for every row of `logits`"),
    (lambda: loss(Z, WEIGHTS), ValueError, "`labels` must have shape (4, 5, 9), that of `logits`, as distributions"),
    (lambda: loss(Z, SPREAD.astype(np.float16)), TypeError, "`labels` must have the dtype float32, got float16"),
    (lambda: loss(Z, LABELS == 1), TypeError, "`labels` must be integers, or distributions in a dtype of floats, got"),
    (lambda: loss(Z, LABELS, axis=3), ValueError, "`axis` must be made of axes from -3 to 2 of `logits`, got"),
    (lambda: loss(Z, LABELS, axis=(0, 1)), TypeError, "`axis` must be"),
    (lambda: loss(Z[..., :0], LABELS), ValueError, "`logits` must have at least one class along `axis` -1, got"),
    (lambda: loss(Z, LABELS, weights=SPREAD), ValueError, "`weights` must have shape (4, 5)"),
    (lambda: loss(Z, LABELS, weights=LABELS), TypeError, "`weights` must have the dtype"),
    (lambda: loss(Z, LABELS, label_smoothing=1.5), ValueError, "`label_smoothing` must be from 0 to 1, got 1.5"),
    (lambda: loss(Z, LABELS, z_loss=-1), ValueError, "`z_loss` must be at least 0 and finite, got -1.0"),
    (lambda: loss(Z, LABELS, reduction="max"), ValueError, "`reduction` must be one of 'mean'"),
    (lambda: loss(Z, LABELS, ignore_index=1.5), TypeError, "`ignore_index` must be made of"),
    (lambda: loss(Z, SPREAD, ignore_index=1), ValueError, "`ignore_index` must be None where `labels` are distribu"),
    (lambda: loss(Z, LABELS, determinism="portable"), NotImplementedError, "cannot be guaranteed for cross_entropy"),
    (
        lambda: loss(Z, LABELS, engine="xla", determinism="batch_invariant"),
        NotImplementedError,
        "run_to_run",
    ),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_input(index: int):
    assert_refused(*BAD[index])
