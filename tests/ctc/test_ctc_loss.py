"""CTC: the definition's bits, other values of it, exceptional sequences, derivatives, errors."""

import functools as ft
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from jaxdnn._src.core import numbers

LABELS = np.array([[1, 1, 2], [3, 2, 3], [2, 0, 0]], np.int32)
LENGTHS: dict[str, Any] = {"logit_lengths": np.array([6, 5, 4]), "label_lengths": np.array([3, 3, 1])}
# Where T steps of V classes are fewer than the compiler's loops are wide, and where they are more.
SIZES = ((5, 9, 4, 3), (3, 40, 70, 12))


def data(sizes: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> tuple[Any, Any, dict[str, Any]]:
    """Logits, labels other than 0, and lengths, of which one is 0 and one label too many for its steps."""
    n, steps, classes, count = sizes
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(n, steps, classes)) * scale).astype(np.float32)
    labels = rng.integers(1, classes, (n, count)).astype(np.int32)
    of_steps, of_labels = rng.integers(steps // 2, steps + 1, n), rng.integers(0, count + 1, n)
    of_steps[0], of_labels[0], of_steps[1], of_labels[1] = steps, count, 1, count
    return x, labels, {"logit_lengths": of_steps, "label_lengths": of_labels}


@ft.partial(jax.jit, static_argnames="options")
def _both(x: Any, labels: Any, lengths: Any, options: tuple[Any, ...]) -> Any:
    losses, pull = jax.vjp(lambda x: dnn.ctc_loss(x, labels, **lengths, **dict(options)), x)
    return losses, pull(jnp.ones_like(losses))[0]


def both(x: Any, labels: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The losses and their gradients, by one program for all calls of equal shapes and options."""
    n, steps, _ = np.swapaxes(x, 0, 1).shape if options.get("layout") == "TNC" else x.shape
    given = {"logit_lengths": np.full(n, steps), "label_lengths": np.full(n, np.shape(labels)[1])}
    lengths = {name: np.asarray(options.pop(name, own), np.int32) for name, own in given.items()}
    losses, gradients = _both(x, np.asarray(labels, np.int32), lengths, tuple(options.items()))
    return np.asarray(losses), np.asarray(gradients)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", ["softmax", "none"])
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_are_the_definitions(sizes: tuple[int, ...], normalize: str):
    for scale in (1.0, 40.0):
        x, labels, lengths = data(sizes, 1, scale)
        options: dict[str, Any] = {**lengths, "normalize": normalize}
        found = both(x, labels, **options)
        wanted = reference.ctc_loss(x, labels, **options, arithmetic="ordered", details=True)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(scale))
        shares = jax.jit(ft.partial(dnn.ctc_posterior, **options))(x, labels)
        np.testing.assert_array_equal(shares, reference.ctc_posterior(x, labels, **options, arithmetic="ordered"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_logits_are_computed_in_float32(dtype: Any):
    x, labels, lengths = data(SIZES[0])
    narrow = jnp.asarray(x, dtype)
    losses, gradients = both(narrow, labels, **lengths)
    wanted = both(narrow.astype(jnp.float32), labels, **lengths)
    assert losses.dtype == np.float32
    np.testing.assert_array_equal(losses, wanted[0])
    np.testing.assert_array_equal(gradients, jnp.asarray(wanted[1], dtype))


@pytest.mark.usefixtures("x64")
def test_bits_in_float64():
    x, labels, lengths = data(SIZES[0])
    x = x.astype(np.float64)
    found = both(x, labels, **lengths)
    wanted = reference.ctc_loss(x, labels, **lengths, arithmetic="ordered", details=True)
    golden = reference.ctc_loss(x, labels, **lengths, details=True)
    for a, b, c in zip(found, wanted, golden, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-14, atol=1e-14)


def over_all_paths(log: np.ndarray, labels: Any, blank: int) -> float:
    total = 0.0
    for path in itertools.product(range(log.shape[1]), repeat=len(log)):
        joined = [k for k, _ in itertools.groupby(path) if k != blank]
        if joined == list(labels):
            total += math.exp(sum(log[t, k] for t, k in enumerate(path)))
    return -math.log(total) if total else math.inf


@pytest.mark.parametrize("blank", [0, 1, -1])
def test_sum_over_all_paths(blank: int):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8, 5, 3)).astype(np.float32)
    others = [k for k in range(3) if k != blank % 3]
    labels, count, steps = rng.choice(others, (8, 3)), rng.integers(0, 4, 8), rng.integers(1, 6, 8)
    given: dict[str, Any] = {"blank": blank, "label_lengths": count, "logit_lengths": steps}
    for normalize in ("softmax", "none"):
        log = x.astype(np.float64)
        log -= np.log(np.exp(log).sum(2, keepdims=True)) if normalize == "softmax" else 0
        paths = [over_all_paths(log[i, : steps[i]], labels[i, : count[i]], blank % 3) for i in range(8)]
        found = jax.jit(ft.partial(dnn.ctc_loss, normalize=normalize, **given))(x, labels)
        np.testing.assert_allclose(found, paths, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(reference.ctc_loss(x, labels, normalize=normalize, **given), paths, rtol=1e-12)


def test_values_are_pytorchs():
    """Those of its version 2.15 in float64 on CPUs."""
    x = 2 * np.sin(1.0 + np.arange(72.0)).reshape(3, 6, 4).astype(np.float32)
    losses, gradients = both(x, LABELS, **LENGTHS)
    np.testing.assert_allclose(losses, [5.877709468009015, 3.435021853936186, 6.088184399005953], rtol=1e-6)
    wanted = [-0.23064701243340777, 0.07640487402780737, 0.04373803463572017, 0.11050410376988021]
    np.testing.assert_allclose(gradients[0, 2], wanted, atol=1e-6)
    np.testing.assert_array_equal(gradients[2, 5], 0)
    losses, gradients = both(np.swapaxes(x, 0, 1), LABELS % 3, blank=3, layout="TNC", **LENGTHS)
    np.testing.assert_allclose(losses, [6.589772374515508, 4.211635835243626, 3.4755382141494535], rtol=1e-6)
    wanted = [0.7368876696796967, -0.4728893721110676, 0.043738034635720166, -0.3077363322043492]
    np.testing.assert_allclose(gradients[2, 0], wanted, atol=1e-6)
    loss, gradients = both(x, LABELS, reduction="mean", **LENGTHS)
    np.testing.assert_allclose(loss, 3.0641427243292285, rtol=1e-6)
    wanted = [-0.02306407964190273, 0.03685821844906906, 0.05431028251973765, -0.06810442132690397]
    np.testing.assert_allclose(gradients[1, 0], wanted, atol=1e-6)
    short: dict[str, Any] = {**LENGTHS, "logit_lengths": np.array([3, 5, 4])}
    loss, gradients = both(x, LABELS, reduction="mean", infeasible="zero", **short)
    np.testing.assert_allclose(loss, 2.4110638945504497, rtol=1e-6)
    np.testing.assert_array_equal(gradients[0], 0)
    np.testing.assert_allclose(gradients[1, 0], wanted, atol=1e-6)
    total = dnn.ctc_loss(x, LABELS, reduction="sum", **LENGTHS)
    np.testing.assert_allclose(total, 15.400915720951154, rtol=1e-6)


def test_reductions_are_the_definitions():
    x, labels, lengths = data(SIZES[0])
    for reduction in ("sum", "mean"):
        options: dict[str, Any] = {"reduction": reduction, "infeasible": "zero", **lengths}
        found = jax.jit(ft.partial(dnn.ctc_loss, determinism="portable", **options))(x, labels)
        np.testing.assert_array_equal(found, reference.ctc_loss(x, labels, arithmetic="ordered", **options))
        np.testing.assert_allclose(found, reference.ctc_loss(x, labels, **options), rtol=1e-6)
    assert dnn.ctc_loss(x, labels, reduction="sum", **lengths) == np.inf


def test_one_path():
    """As many steps as labels and blanks between equal ones: a path alone, which every gradient names."""
    labels = np.array([[1, 1, 2, 3, 3]])
    path = [1, 0, 1, 2, 3, 0, 3]
    x = np.random.default_rng(3).normal(size=(1, 7, 4)).astype(np.float32)
    p = np.exp(x[0].astype(np.float64))
    p /= p.sum(1, keepdims=True)
    losses, gradients = both(x, labels)
    np.testing.assert_allclose(losses[0], -np.log(p[np.arange(7), path]).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradients[0], p - np.eye(4)[path], atol=1e-6)
    np.testing.assert_array_equal(dnn.ctc_posterior(x, labels)[0].argmax(1), [1, 0, 2, 3, 4, 0, 5])
    assert dnn.ctc_loss(x[:, :6], labels)[0] == np.inf


def test_uniform_logits_count_paths():
    """L different labels in T steps: as many paths as ways to choose 2 L of T + L."""
    for steps, count in ((5, 2), (9, 4), (30, 12)):
        labels = 1 + np.arange(count)[None] % 2
        loss = float(dnn.ctc_loss(np.zeros((1, steps, 4), np.float32), labels)[0])
        wanted = steps * math.log(4) - math.log(math.comb(steps + count, 2 * count))
        np.testing.assert_allclose(loss, wanted, rtol=2e-6)


def test_reversed_in_time():
    x, labels, _ = data(SIZES[1])
    losses, gradients = both(x, labels)
    back, of_back = both(x[:, ::-1], labels[:, ::-1])
    np.testing.assert_allclose(losses, back, rtol=1e-6)
    np.testing.assert_allclose(gradients, of_back[:, ::-1], atol=1e-5)
    np.testing.assert_allclose(gradients.sum(2), 0, atol=2e-6)


def test_long_sequences_lose_no_digits():
    """The loss is of 3,000; in float32 logarithms it is off by 3e-3."""
    rng = np.random.default_rng(4)
    x, labels = rng.normal(size=(1, 1000, 32)).astype(np.float32), rng.integers(1, 32, (1, 100))
    losses, gradients = both(x, labels)
    golden, wanted = reference.ctc_loss(x, labels, details=True)
    assert golden[0] > 3000
    np.testing.assert_allclose(losses, golden, rtol=1e-7, atol=0)
    np.testing.assert_allclose(gradients, wanted, atol=1e-5)


def test_a_vocabulary_of_200_000():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(1, 4, 200_000)).astype(np.float32)
    labels = np.array([[199_999, 7]], np.int32)
    losses, gradients = both(x, labels)
    golden, wanted = reference.ctc_loss(x, labels, details=True)
    np.testing.assert_allclose(losses, golden, rtol=1e-6)
    np.testing.assert_allclose(gradients, wanted, atol=1e-6)


def test_confident_losses_are_not_negative():
    x = np.full((3, 6, 4), -20.0, np.float32)
    x[:, np.arange(6), [1, 0, 1, 1, 2, 2]] = np.array([[[0.0]], [[10.0]], [[200.0]]])[..., 0]
    losses, gradients = both(x, LABELS[:1].repeat(3, 0))
    assert (losses >= 0).all()
    assert not np.signbit(losses).any()
    assert (losses < 1e-6).all()
    np.testing.assert_allclose(gradients, reference.ctc_loss(x, LABELS[:1].repeat(3, 0), details=True)[1], atol=1e-6)


# ---- exceptional sequences -------------------------------------------------------------------------------------------


def test_no_labels_and_no_steps():
    x = np.random.default_rng(6).normal(size=(3, 4, 3)).astype(np.float32)
    given: dict[str, Any] = {"logit_lengths": np.array([4, 0, 0]), "label_lengths": np.array([0, 0, 1])}
    losses, gradients = both(x, np.ones((3, 2), np.int32), **given)
    log = x[0] - np.log(np.exp(x[0]).sum(1, keepdims=True))
    np.testing.assert_allclose(losses, [-log[:, 0].sum(), 0, np.inf], rtol=1e-6)
    assert not np.signbit(losses[1])
    np.testing.assert_array_equal(gradients[1:], 0)
    np.testing.assert_allclose(dnn.ctc_loss(x, np.zeros((3, 0), np.int32))[0], losses[0], rtol=1e-6)
    np.testing.assert_array_equal(dnn.ctc_loss(x[:, :0], np.ones((3, 1), np.int32)), np.inf)
    np.testing.assert_array_equal(dnn.ctc_loss(x[:, :0], np.ones((3, 0), np.int32)), 0)


def test_what_no_path_has():
    x = np.zeros((3, 3, 4), np.float32)
    x[2, :, 2] = -np.inf  # the label's probability is 0 in every step
    labels, count = np.array([[1, 1, 0], [1, 2, 1], [2, 0, 0]]), np.array([2, 3, 1])
    for infeasible, loss in (("inf", np.inf), ("zero", 0.0)):
        given: dict[str, Any] = {"logit_lengths": np.array([2, 2, 3]), "label_lengths": count}
        losses, gradients = both(x, labels, infeasible=infeasible, **given)
        np.testing.assert_array_equal(losses, loss)
        np.testing.assert_array_equal(gradients, 0)
    np.testing.assert_array_equal(dnn.ctc_posterior(x, labels, label_lengths=count)[2], 0)
    along = jax.jvp(lambda x: dnn.ctc_loss(x, labels, label_lengths=count), (x,), (x,))[1]
    assert along[2] == 0


def test_classes_that_are_not_possible():
    x = np.random.default_rng(7).normal(size=(1, 5, 6)).astype(np.float32)
    x[0, 1, 4] = x[0, 2, 5] = x[0, 3, 1] = -np.inf  # two that are no label, and a label in one step
    losses, gradients = both(x, LABELS[:1])
    golden, wanted = reference.ctc_loss(x, LABELS[:1], details=True)
    np.testing.assert_allclose(losses, golden, rtol=1e-6)
    np.testing.assert_allclose(gradients, wanted, atol=1e-6)
    assert np.isfinite(gradients).all()
    masked = np.where(np.isneginf(x), -1e9, x)
    np.testing.assert_array_equal(dnn.ctc_loss(masked, LABELS[:1]), losses)


@pytest.mark.parametrize("wrong", [-1, 0, 4, 100])
def test_labels_that_are_no_classes_or_the_blank(wrong: int):
    """NaN for that sequence and nothing for the others, unless the label is not read."""
    x = np.random.default_rng(8).normal(size=(3, 6, 4)).astype(np.float32)
    labels = LABELS.copy()
    labels[1, 2] = wrong
    losses, gradients = both(x, labels, **LENGTHS)
    right, of_right = both(x, LABELS, **LENGTHS)
    assert np.isnan(losses[1])
    assert np.isnan(gradients[1, :5]).all()
    np.testing.assert_array_equal(gradients[1, 5:], 0)
    np.testing.assert_array_equal(losses[[0, 2]], right[[0, 2]])
    np.testing.assert_array_equal(gradients[[0, 2]], of_right[[0, 2]])
    assert np.isnan(dnn.ctc_posterior(x, labels, **LENGTHS)[1, :5]).all()
    fewer: dict[str, Any] = {**LENGTHS, "label_lengths": np.array([3, 2, 1])}
    np.testing.assert_array_equal(dnn.ctc_loss(x, labels, **fewer), dnn.ctc_loss(x, LABELS, **fewer))


def test_lengths_out_of_range_are_nan():
    x = np.zeros((3, 6, 4), np.float32)
    losses = dnn.ctc_loss(x, LABELS, logit_lengths=np.array([7, 6, -1]))
    np.testing.assert_array_equal(np.isnan(losses), [True, False, True])
    losses = dnn.ctc_loss(x, LABELS, label_lengths=np.array([4, 3, -1], np.int8))
    np.testing.assert_array_equal(np.isnan(losses), [True, False, True])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_steps_without_probabilities(value: float):
    x = np.random.default_rng(9).normal(size=(3, 6, 4)).astype(np.float32)
    right, of_right = both(x, LABELS, **LENGTHS)
    x[0, 2], x[1, 5] = value, value  # the other sequence has 5 steps
    losses, gradients = both(x, LABELS, **LENGTHS)
    assert np.isnan(losses[0])
    assert np.isnan(gradients[0]).all()
    np.testing.assert_array_equal(losses[1:], right[1:])
    np.testing.assert_array_equal(gradients[1:], of_right[1:])
    golden, wanted = reference.ctc_loss(x, LABELS, **LENGTHS, details=True)
    np.testing.assert_array_equal(np.isnan(golden), np.isnan(losses))
    np.testing.assert_array_equal(np.isnan(wanted), np.isnan(gradients))


def test_log_scores_of_other_classes_are_not_read():
    x = np.random.default_rng(10).normal(size=(1, 6, 6)).astype(np.float32)
    losses, gradients = both(x, LABELS[:1], normalize="none")
    x[0, :, 4:] = np.nan
    same, of_same = both(x, LABELS[:1], normalize="none")
    np.testing.assert_array_equal(losses, same)
    np.testing.assert_array_equal(gradients, of_same)
    np.testing.assert_array_equal(gradients[..., 4:], 0)


def test_labels_of_any_integers():
    x = np.random.default_rng(11).normal(size=(3, 6, 300)).astype(np.float32)
    wanted = dnn.ctc_loss(x, LABELS, **LENGTHS)
    for dtype in (np.uint8, np.int8, np.int16, np.uint32):
        lengths: dict[str, Any] = {name: value.astype(dtype) for name, value in LENGTHS.items()}
        np.testing.assert_array_equal(dnn.ctc_loss(x, LABELS.astype(dtype), **lengths), wanted)
    assert np.isnan(dnn.ctc_loss(x, LABELS.astype(np.uint32) + np.uint32(2**31)).sum())


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("normalize", ["softmax", "none"])
def test_derivatives_are_the_definitions_differences(normalize: str):
    """Of the loss, of its gradient and of the posterior, along a direction; third ones of the second."""
    rng = np.random.default_rng(12)
    x, v = rng.normal(size=(2, 3, 6, 4))
    ct, h = np.array([1.0, -2.0, 0.5]), 2.0**-16
    given: dict[str, Any] = {"normalize": normalize, **LENGTHS}
    ours = lambda x: dnn.ctc_loss(x, LABELS, **given)
    posterior = lambda x: dnn.ctc_posterior(x, LABELS, **given)
    gradient = jax.grad(lambda x: jnp.vdot(ours(x), ct))
    reverse = jax.grad(lambda x: jnp.vdot(gradient(x), v))
    second = lambda x: jax.jvp(gradient, (x,), (v,))[1]

    def every(x: Any) -> Any:
        third = jax.jvp(second, (x,), (v,))[1]
        return *jax.jvp(ours, (x,), (v,)), gradient(x), second(x), reverse(x), third, jax.jvp(posterior, (x,), (v,))[1]

    compiled = jax.jit(every)
    _, along, first, forward, backward, third, of_posterior = compiled(x)
    slope = lambda f: (np.asarray(f(x + h * v)) - np.asarray(f(x - h * v))) / (2 * h)
    losses = slope(lambda x: reference.ctc_loss(x, LABELS, **given))
    np.testing.assert_allclose(along, losses, atol=1e-8)
    np.testing.assert_allclose(np.vdot(first, v), np.vdot(losses, ct), atol=1e-8)
    of_gradient = slope(lambda x: reference.ctc_loss(x, LABELS, details=True, **given)[1] * ct[:, None, None])
    np.testing.assert_allclose(forward, of_gradient, atol=1e-8)
    np.testing.assert_allclose(backward, of_gradient, atol=1e-8)
    np.testing.assert_allclose(third, slope(lambda x: compiled(x)[3]), atol=1e-7)
    np.testing.assert_allclose(of_posterior, slope(lambda x: reference.ctc_posterior(x, LABELS, **given)), atol=1e-8)


def test_cotangents_scale_the_gradient_and_stay_away_from_padding():
    x = np.random.default_rng(13).normal(size=(3, 6, 4)).astype(np.float32)
    pull = jax.vjp(lambda x: dnn.ctc_loss(x, LABELS, **LENGTHS), x)[1]
    ones, other = (np.asarray(pull(jnp.array(ct))[0]) for ct in ([1.0, 1.0, 1.0], [2.0, np.nan, np.inf]))
    np.testing.assert_array_equal(other[0], 2 * ones[0])
    np.testing.assert_array_equal(np.isnan(other[1]), np.arange(6)[:, None] < np.full((1, 4), 5))
    np.testing.assert_array_equal(other[2, 4:], 0)


def test_vmap():
    x, labels, lengths = data(SIZES[0])
    more, other = np.stack([x, -x]), np.stack([labels, labels[:, ::-1]])

    def loss(x: Any, labels: Any) -> Any:
        return jnp.sum(dnn.ctc_loss(x, labels, infeasible="zero", **lengths) ** 2)

    gradient = jax.jit(jax.grad(loss))
    for axes in ((0, 0), (0, None), (None, 0)):
        given = more if axes[0] == 0 else x, other if axes[1] == 0 else labels
        found = jax.jit(jax.vmap(jax.grad(loss), axes))(*given)
        each = [gradient(*(v[i] if a == 0 else v for v, a in zip(given, axes, strict=True))) for i in range(2)]
        np.testing.assert_array_equal(found, np.stack(each))


# ---- posteriors, paddings, arithmetic --------------------------------------------------------------------------------


def test_posteriors_are_minus_the_gradient_of_log_scores():
    x, labels, lengths = data(SIZES[0])
    shares = dnn.ctc_posterior(x, labels, normalize="none", **lengths)
    np.testing.assert_allclose(shares, reference.ctc_posterior(x, labels, normalize="none", **lengths), atol=1e-6)
    _, gradients = both(x, labels, normalize="none", **lengths)
    counted = np.zeros_like(gradients)
    for n, i in np.ndindex(*labels.shape):
        counted[n, :, labels[n, i]] += shares[n, :, i + 1]
    counted[..., 0] += shares[..., 0]
    np.testing.assert_allclose(gradients, -counted, atol=1e-6)
    swapped = dnn.ctc_posterior(np.swapaxes(x, 0, 1), labels, normalize="none", layout="TNC", **lengths)
    np.testing.assert_array_equal(np.swapaxes(swapped, 0, 1), shares)


def test_what_labels_of_a_class_have_in_common_is_added_before_anything_else():
    """The gradient of a posterior scattered them, and XLA scatters into what the gradient is added to."""
    rng = np.random.default_rng(1)
    x, cotangent, term = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 6, 5), (3, 6, 4), (3, 6, 5)))
    posterior = lambda x: dnn.ctc_posterior(x, LABELS, **LENGTHS, determinism="batch_invariant")
    run = lambda x, term: jax.vjp(posterior, x)[1](cotangent)[0] + term
    np.testing.assert_array_equal(jax.jit(run)(x, term), run(x, term))


@pytest.mark.parametrize("blank", [0, 3])
def test_paddings_of_optax(blank: int):
    """Losses and gradients, of all and of no labels, repeated ones, a sequence without padding."""
    rng = np.random.default_rng(6)
    x = (2 * rng.normal(size=(6, 20, 7))).astype(np.float32)
    labels = (blank + rng.integers(1, 7, (6, 5))).astype(np.int32) % 7
    labels[0, :3] = labels[0, 0]
    steps, counts = np.array([20, 13, 20, 11, 9, 1]), np.array([5, 2, 0, 3, 4, 1])
    paddings = [(np.arange(n) >= of[:, None]).astype(np.float32) for n, of in ((20, steps), (5, counts))]
    theirs = lambda x: optax.ctc_loss(x, paddings[0], labels, paddings[1], blank_id=blank)
    wanted, pull = jax.vjp(theirs, x)
    lengths = {name: dnn.ctc_lengths(of) for name, of in zip(LENGTHS, paddings, strict=True)}
    found, slopes = both(x, labels, blank=blank, **lengths)
    np.testing.assert_allclose(found, wanted, rtol=3e-6)
    np.testing.assert_allclose(slopes, pull(jnp.ones(6))[0], atol=2e-5)


def test_lengths_of_paddings():
    x, labels, lengths = data(SIZES[0])
    for dtype in (np.float32, np.int32, np.bool_):
        given = {
            name: (np.arange(size)[None] >= lengths[name][:, None]).astype(dtype)
            for name, size in (("logit_lengths", x.shape[1]), ("label_lengths", labels.shape[1]))
        }
        found: dict[str, Any] = {name: dnn.ctc_lengths(value) for name, value in given.items()}
        for name in found:
            np.testing.assert_array_equal(found[name], lengths[name])
            np.testing.assert_array_equal(found[name], reference.ctc_lengths(given[name]))
        np.testing.assert_array_equal(dnn.ctc_loss(x, labels, **found), dnn.ctc_loss(x, labels, **lengths))
    assert dnn.ctc_lengths(np.array([[0, 1, 0, 0]])).tolist() == [1]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_and_logarithms(dtype: Any):
    """Off by a few roundings, of numbers from e^-80 to e^80, and at powers of two."""
    u = float(np.finfo(dtype).eps) / 2
    d = np.concatenate([np.linspace(-80, 80, 4001), np.arange(-80, 81) * math.log(2)]).astype(dtype)
    w, n = jax.jit(numbers.exponential)(d)
    wanted = np.exp(d.astype(np.longdouble))
    found = np.ldexp(np.asarray(w, np.longdouble), np.asarray(n))
    assert np.max(np.abs(found / wanted - 1)) < 4 * u
    number = numbers.normal(w, n)
    assert ((np.asarray(number.m) >= 0.5) & (np.asarray(number.m) < 1)).all()
    log = np.asarray(jax.jit(numbers.logarithm)(number), np.longdouble)
    exact = np.log(np.ldexp(np.asarray(number.m, np.longdouble), np.asarray(number.e)))
    assert np.max(np.abs(log - exact) / np.maximum(np.abs(exact), u)) < 4 * u


def test_sums_of_numbers_of_any_size():
    """The floats beside the largest one, rounded from the left; 0 and numbers far below it have no effect."""
    a, b, c = (
        numbers.normal(jnp.float32(m), jnp.int32(e)) for m, e in ((0.7, 10**8), (0.9, 10**8 - 3), (0.6, 10**8 - 90))
    )
    total = numbers.added(a, b, c)
    assert float(total.m) == np.float32(0.7) + np.float32(0.9) / 8
    assert int(total.e) == 10**8
    none = numbers.normal(jnp.float32(0), jnp.int32(0))
    assert int(none.e) == numbers.ZERO
    assert jax.tree.map(float, numbers.added(none, c, none)) == jax.tree.map(float, c)
    assert jax.tree.map(float, numbers.added_times(a, none, none)) == jax.tree.map(float, none)
    assert float(numbers.added_times(a, b, c).m) == float(np.float32(0.7) * np.float32(0.9)) * 1.0


# ---- errors ----------------------------------------------------------------------------------------------------------

X = np.zeros((3, 6, 4), np.float32)


@pytest.mark.parametrize(
    ("x", "labels", "options", "error", "text"),
    [
        (X[0], LABELS, {}, ValueError, r"`logits` must have shape \(N, T, V\), got \(6, 4\)"),
        (X[0], LABELS, {"layout": "TNC"}, ValueError, r"`logits` must have shape \(T, N, V\), got \(6, 4\)"),
        (X.astype(np.int32), LABELS, {}, TypeError, "`logits` must have one of the dtypes float32, .* got int32"),
        (X, LABELS.astype(np.float32), {}, TypeError, "`labels` must be integers, got float32"),
        (X, LABELS.ravel(), {}, ValueError, r"`labels` must have shape \(N, L\) with N = 3 .* got \(9,\)"),
        (X, LABELS[:2], {}, ValueError, r"padded to one length, got \(2, 3\)"),
        (X, LABELS, {"blank": 4}, ValueError, "`blank` must be a class from -4 to 3, got 4"),
        (X, LABELS, {"blank": 0.0}, TypeError, "`blank` must be made of integers"),
        (X, LABELS, {"logit_lengths": np.zeros(3)}, TypeError, "`logit_lengths` must be integers, got float32"),
        (X, LABELS, {"label_lengths": np.zeros(2, int)}, ValueError, r"`label_lengths` must have shape \(3,\), one"),
        (X, LABELS, {"normalize": "log_softmax"}, ValueError, "`normalize` must be one of 'softmax', 'none', got"),
        (X, LABELS, {"infeasible": True}, ValueError, "`infeasible` must be one of 'inf', 'zero', got True"),
        (X, LABELS, {"reduction": "average"}, ValueError, "`reduction` must be one of 'none', 'mean', 'sum', got"),
        (X, LABELS, {"layout": "NCT"}, ValueError, "`layout` must be one of 'NTC', 'TNC', got 'NCT'"),
        (X, LABELS, {"engine": "hopper"}, NotImplementedError, "`ctc_loss` on .* cannot be served by engine 'hopper'"),
        (X[..., :0], LABELS, {}, ValueError, "`logits` must have at least one class, got"),
    ],
)  # fmt: skip
def test_errors(x: Any, labels: Any, options: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        dnn.ctc_loss(x, labels, **options)


def test_an_error_of_paddings():
    with pytest.raises(TypeError, match="`paddings` must be booleans, integers or floats, got complex64"):
        dnn.ctc_lengths(jnp.zeros((2, 3), jnp.complex64))
    with pytest.raises(ValueError, match=r"`paddings` must have shape \(N, T\), got \(6,\)"):
        dnn.ctc_lengths(X[0, :, 0])
