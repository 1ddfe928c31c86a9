"""Forced alignment: the definition's paths, ties, what has no path, errors, transformations."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdnn as dnn
import jaxdnn_reference as reference
from tests.ctc.test_ctc_loss import LABELS, LENGTHS, SIZES, data


def collapsed(path: Any) -> list[int]:
    """Which labels a path of places emits."""
    return [k for k, _ in itertools.groupby(path) if k > 0]


def of_all_paths(x: np.ndarray, labels: Any, blank: int) -> float:
    """The largest sum over the paths that emit the labels, by listing all."""
    best = -np.inf
    for path in itertools.product(range(x.shape[1]), repeat=len(x)):
        if [k for k, _ in itertools.groupby(path) if k != blank] == list(labels):
            best = max(best, sum(x[t, k] for t, k in enumerate(path)))
    return best


@pytest.mark.parametrize("blank", [0, 1, -1])
def test_best_of_all_paths(blank: int):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8, 5, 3)).astype(np.float32)
    others = [k for k in range(3) if k != blank % 3]
    labels, count, steps = rng.choice(others, (8, 3)), rng.integers(0, 4, 8), rng.integers(1, 6, 8)
    given: dict[str, Any] = {"blank": blank, "label_lengths": count, "logit_lengths": steps}
    found = np.asarray(jax.jit(lambda x: dnn.ctc_align(x, labels, **given))(x))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, reference.ctc_align(x, labels, **given))
    for i in range(8):
        own, rest = found[i, : steps[i]], found[i, steps[i] :]
        best = of_all_paths(x[i, : steps[i]].astype(np.float64), labels[i, : count[i]], blank % 3)
        assert (rest == -1).all()
        if best == -np.inf:
            assert (own == -1).all()
            continue
        assert collapsed(own) == list(range(1, count[i] + 1))
        classes = np.concatenate([[blank % 3], labels[i]])[own]
        np.testing.assert_allclose(x[i, np.arange(steps[i]), classes].astype(np.float64).sum(), best, rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_paths_are_the_definitions(sizes: tuple[int, ...], dtype: Any):
    """Of whole numbers too, which have many paths with equal sums."""
    x, labels, lengths = data(sizes, 1)
    run = jax.jit(lambda x: dnn.ctc_align(x, labels, determinism="portable", **lengths))
    for given in (x, np.round(x), np.zeros_like(x), 1e4 + np.round(x, 2)):
        given = np.asarray(given, dtype)
        np.testing.assert_array_equal(run(given), reference.ctc_align(given, labels, **lengths))


@pytest.mark.usefixtures("x64")
def test_paths_in_float64():
    x, labels, lengths = data(SIZES[0])
    x = x + 1e-12 * np.arange(x.shape[2])
    np.testing.assert_array_equal(dnn.ctc_align(x, labels, **lengths), reference.ctc_align(x, labels, **lengths))


def test_ties():
    """A label at the end, then labels and blanks as long as they can be kept, looking back from there."""
    align = lambda steps, *labels: dnn.ctc_align(np.zeros((1, steps, 4), np.float32), np.array([labels]))[0].tolist()
    assert align(4, 1) == [1, 1, 1, 1]
    assert align(4, 1, 2) == [1, 2, 2, 2]
    assert align(5, 1, 1) == [1, 0, 2, 2, 2]
    assert align(3, 1, 1) == [1, 0, 2]
    assert dnn.ctc_align(np.zeros((1, 3, 4), np.float32), np.zeros((1, 0), np.int32)).tolist() == [[0, 0, 0]]


def test_long_sums_of_far_numbers_lose_no_digits():
    """In float32 the sums would be off by 0.01 and more, and the best of two paths another one."""
    x = np.full((1, 2000, 3), 1e4, np.float32)
    x[0, :, 2] = -1e4
    x[0, 1234, 0] -= 0.01
    expected = (np.arange(2000) == 1234).astype(int)
    x[0, :, 1] -= 0.02
    x[0, 1234, 1] += 0.02
    np.testing.assert_array_equal(dnn.ctc_align(x, np.array([[1]]))[0], expected)


def test_it_is_the_likely_posterior():
    """Where each step has a class that it is sure of."""
    path = np.array([0, 1, 1, 0, 2, 3, 3, 0])
    classes = np.array([0, 1, 1, 2])[path]
    x = np.where(classes[:, None] == np.arange(4), 9.0, 0.0)[None].astype(np.float32)
    labels = np.array([[1, 1, 2]])
    np.testing.assert_array_equal(dnn.ctc_align(x, labels)[0], path)
    np.testing.assert_array_equal(dnn.ctc_posterior(x, labels)[0].argmax(1), path)
    log = jax.nn.log_softmax(x)
    np.testing.assert_array_equal(dnn.ctc_align(log, labels)[0], path)
    swapped = dnn.ctc_align(np.swapaxes(x, 0, 1), labels, layout="TNC")
    np.testing.assert_array_equal(swapped[:, 0], path)


def test_what_no_path_has():
    x = np.zeros((4, 3, 4), np.float32)
    x[2, :, 2] = -np.inf
    x[3, 1, 0] = x[3, 2, 1] = -np.inf  # but for the path that has the label in the second step, and not in the third
    labels = np.array([[1, 1, 0], [1, 2, 1], [2, 0, 0], [1, 0, 0]])
    given: dict[str, Any] = {"logit_lengths": np.array([2, 2, 3, 3]), "label_lengths": np.array([2, 3, 1, 1])}
    found = dnn.ctc_align(x, labels, **given)
    np.testing.assert_array_equal(found, [[-1] * 3, [-1] * 3, [-1] * 3, [1, 1, 0]])
    np.testing.assert_array_equal(found[:, 0] < 0, np.isinf(dnn.ctc_loss(x, labels, **given)))
    np.testing.assert_array_equal(dnn.ctc_align(x[:, :0], labels), np.zeros((4, 0)))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, "label", "blank", "steps", "count"])
def test_wrong_sequences_have_no_path(wrong: Any):
    """The others have theirs; what is not read does no harm."""
    x, labels, lengths = (
        np.random.default_rng(8).normal(size=(3, 6, 5)).astype(np.float32),
        LABELS.copy(),
        dict(LENGTHS),
    )
    right = np.array(dnn.ctc_align(x, labels, **lengths))
    assert (right.max(1) == LENGTHS["label_lengths"]).all()
    right[1] = -1
    match wrong:
        case "label" | "blank":
            labels[1, 2] = 5 if wrong == "label" else 0
        case "steps" | "count":
            name = "logit_lengths" if wrong == "steps" else "label_lengths"
            lengths[name] = lengths[name] + np.array([0, 2 if wrong == "steps" else 1, 0])
        case _:
            x[1, 2, 3], x[1, 5] = wrong, wrong
            x[:, :, 4], x[0, 2, 3] = wrong, x[0, 2, 3]  # the class of no label
    np.testing.assert_array_equal(dnn.ctc_align(x, labels, **lengths), right)
    np.testing.assert_array_equal(reference.ctc_align(x, labels, **lengths), right)


def test_transformations():
    x, labels, lengths = data(SIZES[0])
    run = lambda x, labels: dnn.ctc_align(x, labels, **lengths)
    more, other = np.stack([x, -x]), np.stack([labels, labels[:, ::-1]])
    for axes in ((0, 0), (0, None), (None, 0)):
        given = more if axes[0] == 0 else x, other if axes[1] == 0 else labels
        found = jax.jit(jax.vmap(run, axes))(*given)
        each = [run(*(v[i] if a == 0 else v for v, a in zip(given, axes, strict=True))) for i in range(2)]
        np.testing.assert_array_equal(found, np.stack(each))
    path, along = jax.jvp(lambda x: run(x, labels), (x,), (x,))
    np.testing.assert_array_equal(path, run(x, labels))
    assert along.dtype == jax.dtypes.float0

    def score(x: Any) -> Any:
        """Of the path, as a user would have it."""
        path = run(x, labels)
        classes = jnp.take_along_axis(jnp.pad(labels, ((0, 0), (1, 0))), jnp.maximum(path, 0), 1)
        of_steps = jnp.take_along_axis(x, classes[..., None], 2)[..., 0]
        return jnp.sum(jnp.where(path >= 0, of_steps, 0))

    gradient = np.asarray(jax.grad(score)(x))
    assert gradient.sum() == (np.asarray(run(x, labels)) >= 0).sum()


def test_errors():
    x = np.zeros((2, 4, 3), np.float32)
    with pytest.raises(ValueError, match="`labels` must have shape"):
        dnn.ctc_align(x, np.ones((3, 1), np.int32))
    with pytest.raises(TypeError, match="`labels` must be integers"):
        dnn.ctc_align(x, np.ones((2, 1), np.float32))
    with pytest.raises(ValueError, match="`blank` must be a class"):
        dnn.ctc_align(x, np.ones((2, 1), np.int32), blank=3)
    with pytest.raises(ValueError, match="`layout`"):
        dnn.ctc_align(x, np.ones((2, 1), np.int32), layout="NCT")
