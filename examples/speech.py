"""A model of the kind that recognises speech, trained with CTC, on rows of handwritten digits instead of sound.

A line of digits is read from left to right, a column of eight pixels at a time, as a recogniser of speech reads frames
of a spectrogram. Nobody says which column belongs to which digit: the loss sums over all alignments. The data are
scikit-learn's handwritten digits, put beside one another at random distances and heights, with noise; there is no
audio here, but the task has the same form: long inputs, short outputs, lengths that vary, and no alignment.

What one learns:
  * `dnn.ctc_loss` takes logits, padded labels and both lengths; blank is class 0 here, and a digit d is class d + 1.
  * `dnn.gru` with direction="bidirectional" and `lengths` never reads what stands behind a sequence's end.
  * `dnn.ctc_align` says afterwards which column emitted which digit; the plot shows it above the probabilities.

Run: python examples/speech.py                (a CPU)
     python examples/speech.py --size full    (a GPU: 512 units in bfloat16, lines of up to 30 digits)
Expect: 0.08 errors for each digit of unseen lines after 300 steps; 21 seconds of processor time on two slow cores.
Ops: conv (of one spatial axis), gru, ctc_loss, ctc_align, softmax.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxdnn as dnn


@dataclasses.dataclass(frozen=True)
class Size:
    units: int
    batch: int
    digits: tuple[int, int]  # the least and the most of a line
    dtype: Any = jnp.float32
    tests: int = 200  # lines


SIZES = {
    "tiny": Size(8, 8, (2, 3), tests=16),
    "laptop": Size(64, 32, (3, 6)),
    "full": Size(512, 256, (10, 30), jnp.bfloat16),
}
WIDTH = 11  # the most columns that a digit takes: eight, and up to three empty ones before it
HEIGHT = 10
Lines = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Weights = dict[str, jax.Array]


def lines(rng: np.random.Generator, size: Size, count: int, testing: bool = False) -> Lines:
    """Lines of digits: columns (N, T, HEIGHT), their number, labels (N, L) from 1 to 10, and their number."""
    data: Any = load_digits()
    most = size.digits[1]
    pool = np.arange(1400, 1797) if testing else np.arange(1400)
    columns = rng.normal(0, 0.1, (count, most * WIDTH, HEIGHT)).astype(np.float32)
    labels, steps = np.zeros((count, most), np.int32), np.zeros(count, np.int32)
    numbers = rng.integers(size.digits[0], most + 1, count, dtype=np.int32)
    for line, number in enumerate(numbers):
        for place, chosen in enumerate(rng.choice(pool, number)):
            start, up = steps[line] + rng.integers(0, 4), rng.integers(0, 3)
            columns[line, start : start + 8, up : up + 8] += data.images[chosen].T / 16
            labels[line, place], steps[line] = data.target[chosen] + 1, start + 8
    return columns, steps, labels, numbers


def initial(rng: np.random.Generator, size: Size) -> Weights:
    units = size.units
    draw = lambda *shape, ins: jnp.asarray(rng.normal(size=shape) * ins**-0.5, size.dtype)
    zeros = lambda *shape: jnp.zeros(shape, size.dtype)
    return {
        "conv": draw(5, HEIGHT, units, ins=5 * HEIGHT),
        "conv_bias": zeros(units),
        "w": draw(2, units, 3 * units, ins=units),  # forward and reverse
        "r": draw(2, units, 3 * units, ins=units),
        "bias": zeros(2, 3 * units),
        "recurrent_bias": zeros(2, 3 * units),
        "dense": draw(2 * units, 11, ins=2 * units),
    }


def logits(weights: Weights, columns: jax.Array, steps: jax.Array) -> jax.Array:
    """(N, T, 11): for each column the scores of the blank and of the ten digits."""
    x = columns.astype(weights["conv"].dtype)
    x = dnn.conv(x, weights["conv"], padding="SAME", layout="NWC", bias=weights["conv_bias"], activation="relu")
    biases: dict[str, Any] = {name: weights[name] for name in ("bias", "recurrent_bias")}
    x, _ = dnn.gru(x, weights["w"], weights["r"], direction="bidirectional", lengths=steps, **biases)
    return x @ weights["dense"]


def loss(weights: Weights, columns: jax.Array, steps: jax.Array, labels: jax.Array, numbers: jax.Array) -> jax.Array:
    """The loss of a digit, on the average."""
    scores = logits(weights, columns, steps)
    return dnn.ctc_loss(scores, labels, logit_lengths=steps, label_lengths=numbers, reduction="mean")


def train(options: argparse.Namespace, size: Size) -> tuple[Weights, list[float]]:
    rng = np.random.default_rng(options.seed)
    weights = initial(rng, size)
    schedule = optax.cosine_onecycle_schedule(options.steps, 1e-2)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    state, losses = optimiser.init(weights), []

    @jax.jit
    def step(weights: Weights, state: Any, *batch: jax.Array) -> tuple[Weights, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(weights, *batch)
        updates, state = optimiser.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, value  # pyright: ignore[reportReturnType]

    for count in range(1, options.steps + 1):
        weights, state, value = step(weights, state, *lines(rng, size, size.batch))
        losses.append(float(value))
        if count % max(options.steps // 10, 1) == 0:
            print(f"step {count:4} of {options.steps}  loss of a digit {losses[-1]:.3f}", flush=True)
    return weights, losses


def read(scores: np.ndarray) -> list[int]:
    """The best class of each column; runs of a class are joined, then the blanks left out."""
    best = scores.argmax(-1)
    return [int(c) for c, before in zip(best, [0, *best[:-1]], strict=True) if c not in (0, before)]


def edits(a: Sequence[int], b: Sequence[int]) -> int:
    """How many digits must be put in, left out or changed to make b of a."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def error_rate(scores: np.ndarray, tests: Lines) -> float:
    """Edits for each digit that there is."""
    _, steps, labels, numbers = tests
    each = zip(scores, steps, labels, numbers, strict=True)
    return sum(edits(read(s[:t]), list(there[:n])) for s, t, there, n in each) / int(numbers.sum())


def draw(path: Path, scores: np.ndarray, tests: Lines) -> None:
    """A line of the tests, where each digit was emitted, and the probabilities of the classes."""
    columns, steps, labels, numbers = (of[:1] for of in tests)
    t = steps[0]
    aligned = np.asarray(dnn.ctc_align(scores[:1], labels, logit_lengths=steps, label_lengths=numbers))[0]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 5), sharex=True, layout="constrained")
    top.imshow(columns[0, :t].T, cmap="gray_r", aspect="auto")
    for place in range(1, numbers[0] + 1):
        at = int(np.argmax(aligned == place))
        top.axvline(at, color="tab:red")
        top.text(at, -0.8, str(labels[0, place - 1] - 1), color="tab:red", ha="center")
    top.set_ylabel("pixels")
    bottom.imshow(np.asarray(dnn.softmax(scores[0, :t])).T, aspect="auto", vmin=0, vmax=1)
    bottom.set(xlabel="column", ylabel="class", yticks=range(11), yticklabels=["blank", *map(str, range(10))])
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="laptop", help="laptop (the default), full for GPUs, or tiny")
    parser.add_argument("--steps", type=int, default=300, help="steps of training")
    parser.add_argument("--seed", type=int, default=0, help="of weights and lines")
    parser.add_argument("--plot", type=Path, default=Path("speech.png"), help="where the picture goes")
    options = parser.parse_args(argv)
    size = SIZES[options.size]
    weights, losses = train(options, size)
    tests = lines(np.random.default_rng(options.seed + 1), size, size.tests, testing=True)
    scores = np.asarray(jax.jit(logits)(weights, *tests[:2]).astype(jnp.float32))
    rate = error_rate(scores, tests)
    print(f"errors for each digit, in {size.tests} lines of digits not trained on: {rate:.3f}")
    draw(options.plot, scores, tests)
    return {"losses": losses, "error rate": rate}


if __name__ == "__main__":
    main()
