"""A ResNet in Flax NNX that learns handwritten digits, with this library's layers in place of Flax's.

The model is written as it would be with `flax.nnx`: `dnnx.Conv(...)` for `nnx.Conv(...)` is the whole change, and the
constructor's arguments, parameters and checkpoints stay Flax's. Batch normalisation has running statistics, and images
are augmented by moving them by a pixel.

What one learns:
  * `from jaxdnn import nnx as dnnx`: subclasses of Flax's layers, which `nnx.jit`, `nnx.grad` and `nnx.Optimizer` take.
  * `dnnx.BatchNorm` has Flax's meaning of momentum, the weight of the OLD statistic, where `dnn.batch_norm` has cuDNN's
    and PyTorch's; `model.eval()` switches it to running statistics, as in Flax.
  * The state of this model loads into the same model of Flax's own layers. The program does so (`nnx.state`, and
    `nnx.update`), and prints how far the two models' logits are apart: the rounding of float32.
  * `dnn.patch` needs no change of the model at all: the program traces Flax's own model within it and prints what was
    replaced.

Run: python examples/resnet.py                (a CPU)
     python examples/resnet.py --size full    (a GPU: ResNet-18's four stages in bfloat16, images of 32x32 pixels)
Expect: accuracy 0.980 on test digits after 300 steps; 23 seconds of processor time on two slow cores.
Ops: conv, batch_norm, batch_norm_inference, resample (for --size full), linear_cross_entropy, patch.
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
from flax import nnx
from sklearn.datasets import load_digits

import jaxdnn as dnn
from jaxdnn import nnx as dnnx


@dataclasses.dataclass(frozen=True)
class Size:
    stages: tuple[int, ...]  # channels
    blocks: int  # of a stage
    batch: int
    pixels: int = 8  # of an edge
    dtype: Any = jnp.float32


SIZES = {
    "tiny": Size((8, 16), 1, 32),
    "laptop": Size((16, 32, 64), 1, 64),
    "full": Size((64, 128, 256, 512), 2, 256, 32, jnp.bfloat16),
}


class Block(nnx.Module):
    """Two convolutions with batch normalisation, and the input added to their result."""

    def __init__(self, layers: Any, ins: int, out: int, stride: int, dtype: Any, rngs: nnx.Rngs):
        of = {"use_bias": False, "dtype": dtype, "rngs": rngs}
        self.conv1 = layers.Conv(ins, out, (3, 3), strides=stride, **of)
        self.norm1 = layers.BatchNorm(out, momentum=0.9, dtype=dtype, rngs=rngs)
        self.conv2 = layers.Conv(out, out, (3, 3), **of)
        # A scale of zero makes each block the identity at first, which speeds up the start.
        self.norm2 = layers.BatchNorm(out, momentum=0.9, dtype=dtype, scale_init=nnx.initializers.zeros, rngs=rngs)
        self.skip = layers.Conv(ins, out, (1, 1), strides=stride, **of) if (ins, stride) != (out, 1) else None

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.norm2(self.conv2(h)) + (x if self.skip is None else self.skip(x)))


class ResNet(nnx.Module):
    """A ResNet of the layers of a module: `flax.nnx` or `jaxdnn.nnx`."""

    def __init__(self, layers: Any, size: Size, rngs: nnx.Rngs):
        first = size.stages[0]
        self.conv = layers.Conv(1, first, (3, 3), use_bias=False, dtype=size.dtype, rngs=rngs)
        self.norm = layers.BatchNorm(first, momentum=0.9, dtype=size.dtype, rngs=rngs)
        blocks, ins = [], first
        for stage, out in enumerate(size.stages):
            for number in range(size.blocks):
                blocks.append(Block(layers, ins, out, 2 if stage and not number else 1, size.dtype, rngs))
                ins = out
        self.blocks = nnx.List(blocks)
        self.dense = nnx.Linear(ins, 10, rngs=rngs)

    def features(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))
        for block in self.blocks:
            x = block(x)
        return x.mean((1, 2)).astype(jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(self.features(x))


def digits(size: Size) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The digits to train on and those to test on: images (N, H, W, 1), and labels."""
    data: Any = load_digits()
    x = jnp.asarray(data.images[..., None] / 8 - 1, jnp.float32)
    if size.pixels != x.shape[1]:
        x = dnn.resample(x, output_sizes=size.pixels)
    labels = jnp.asarray(data.target, jnp.int32)
    return (x[:1400], labels[:1400]), (x[1400:], labels[1400:])


def augmented(rng: np.random.Generator, images: np.ndarray) -> np.ndarray:
    """Each image moved by a pixel at most, up or down and to a side."""
    pixels = images.shape[1]
    wide = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    corners = rng.integers(0, 3, (len(images), 2))
    return np.stack([of[i : i + pixels, j : j + pixels] for of, (i, j) in zip(wide, corners, strict=True)])


def loss(model: ResNet, x: Any, labels: Any) -> jax.Array:
    dense = model.dense
    assert dense.bias is not None
    return dnn.linear_cross_entropy(
        model.features(x), dense.kernel[...], labels, bias=dense.bias[...], label_smoothing=0.05
    )


@nnx.jit
def step(model: ResNet, optimiser: nnx.Optimizer, x: Any, labels: Any) -> jax.Array:
    value, gradient = nnx.value_and_grad(loss)(model, x, labels)
    optimiser.update(model, gradient)
    return value


@nnx.jit
def logits(model: ResNet, x: jax.Array) -> jax.Array:
    return model(x)


def train(model: ResNet, options: argparse.Namespace, size: Size) -> list[float]:
    """Trains the model, and returns the loss of each step."""
    (images, labels), _ = digits(size)
    images, labels, rng = np.asarray(images), np.asarray(labels), np.random.default_rng(options.seed)
    schedule = optax.cosine_onecycle_schedule(options.steps, 5e-3)
    optimiser = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=1e-3), wrt=nnx.Param)
    losses = []
    for count in range(1, options.steps + 1):
        chosen = rng.choice(len(images), size.batch, replace=False)
        losses.append(float(step(model, optimiser, augmented(rng, images[chosen]), labels[chosen])))
        if count % max(options.steps // 10, 1) == 0:
            print(f"step {count:4} of {options.steps}  loss {losses[-1]:.4f}", flush=True)
    return losses


def beside_flax(model: ResNet, x: jax.Array, size: Size) -> tuple[float, Any]:
    """How far the logits are from those of Flax's own layers with the same state; and what `dnn.patch` replaces."""
    theirs = ResNet(nnx, size, nnx.Rngs(0))
    nnx.update(theirs, nnx.state(model))
    theirs.eval()
    apart = float(abs(logits(theirs, x) - logits(model, x)).max())
    with dnn.patch() as patched:
        jax.eval_shape(theirs, x)
    return apart, patched


def draw(path: Path, losses: list[float], x: jax.Array, labels: jax.Array, found: np.ndarray) -> None:
    """The loss, and the test digits that the model takes for others (the first ones, if there are none)."""
    figure, panels = plt.subplot_mosaic("LLL012;LLL345", figsize=(10, 4), layout="constrained")
    panels["L"].plot(losses)
    panels["L"].set(xlabel="step", ylabel="loss, with label smoothing")
    wrong = np.flatnonzero(found != np.asarray(labels))
    for place, i in zip("012345", [*wrong, *range(6)], strict=False):
        panels[place].imshow(x[i, ..., 0], cmap="gray_r")
        panels[place].set(title=f"{labels[i]}, found {found[i]}", xticks=[], yticks=[])
    figure.suptitle(f"{len(wrong)} of {len(found)} test digits are taken for others")
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="laptop", help="laptop (the default), full for GPUs, or tiny")
    parser.add_argument("--steps", type=int, default=300, help="steps of training")
    parser.add_argument("--seed", type=int, default=0, help="of weights, of the order and the moves of the images")
    parser.add_argument("--plot", type=Path, default=Path("resnet.png"), help="where the picture goes")
    options = parser.parse_args(argv)
    size = SIZES[options.size]
    model = ResNet(dnnx, size, nnx.Rngs(options.seed))
    losses = train(model, options, size)
    model.eval()
    _, (x, labels) = digits(size)
    found = np.asarray(logits(model, x).argmax(-1))
    accuracy = float((found == np.asarray(labels)).mean())
    apart, patched = beside_flax(model, x, size)
    print(f"accuracy on digits not trained on: {accuracy:.3f}; logits are within {apart:.1e} of Flax's own layers'")
    print(f"dnn.patch around Flax's own model: {patched.replaced.total()} calls replaced, {patched.left.total()} left")
    draw(options.plot, losses, x, labels, found)
    return {"losses": losses, "accuracy": accuracy, "apart": apart, "replaced": patched.replaced.total()}


if __name__ == "__main__":
    main()
