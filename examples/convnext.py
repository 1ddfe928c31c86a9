"""A ConvNeXt in Equinox that learns handwritten digits, with this library's layers in place of Equinox's.

The blocks are those of the paper: a depthwise convolution of 7x7 pixels, a layer normalisation over channels, two
pointwise layers with GELU between them, a learned scale, and a residual. The model is written for one image with
channels first, as Equinox has it, and `jax.vmap` maps it over the batch.

What one learns:
  * `from jaxdnn import equinox as dnneqx`: subclasses of Equinox's layers, with the same constructors and fields, which
    `eqx.filter_jit`, `eqx.filter_grad` and `eqx.tree_serialise_leaves` take as their own.
  * `jax.vmap` costs nothing: a mapped `dnn.conv` is one convolution of the whole batch.
  * A file that was written from this model loads into the same model of Equinox's own layers. The program does so in
    memory, and prints how far the two models' logits are apart: the rounding of float32.
  * `dnn.linear_cross_entropy` takes the last layer's weight and never has the logits in memory.

Run: python examples/convnext.py                (a CPU)
     python examples/convnext.py --size full    (a GPU: ConvNeXt-T's channels, computed in bfloat16, 64x64 pixels)
Expect: accuracy 0.907 on test digits after 200 steps; 28 seconds of processor time on two slow cores.
Ops: conv (depthwise, strided, pointwise), layer_norm, resample, linear_cross_entropy.
"""

import argparse
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxdnn as dnn
from jaxdnn import equinox as dnneqx


@dataclasses.dataclass(frozen=True)
class Size:
    stages: tuple[tuple[int, int], ...]  # channels and blocks
    batch: int
    pixels: int  # of an edge; the first layer halves it
    dtype: Any = jnp.float32


SIZES = {
    "tiny": Size(((8, 1),), 16, 8),
    "laptop": Size(((24, 1), (48, 1)), 64, 16),
    "full": Size(((96, 3), (192, 3), (384, 9), (768, 3)), 128, 64, jnp.bfloat16),
}


def over_channels(norm: Any, x: jax.Array) -> jax.Array:
    """A normalisation of the channels of every pixel of x (C, H, W)."""
    return jax.vmap(jax.vmap(norm, 1, 1), 2, 2)(x)


class Block(eqx.Module):
    depthwise: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    wide: eqx.nn.Conv2d
    narrow: eqx.nn.Conv2d
    scale: jax.Array

    def __init__(self, layers: Any, channels: int, key: jax.Array):
        one, two, three = jax.random.split(key, 3)
        self.depthwise = layers.Conv2d(channels, channels, 7, padding=3, groups=channels, key=one)
        self.norm = layers.LayerNorm(channels)
        self.wide = layers.Conv2d(channels, 4 * channels, 1, key=two)
        self.narrow = layers.Conv2d(4 * channels, channels, 1, key=three)
        self.scale = jnp.full((channels, 1, 1), 0.1, jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = over_channels(self.norm, self.depthwise(x))
        return x + self.scale * self.narrow(dnn.activation(self.wide(h), activation="gelu"))


class ConvNeXt(eqx.Module):
    """A ConvNeXt of the layers of a module: `equinox.nn` or `jaxdnn.equinox`."""

    downs: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.LayerNorm]
    stages: list[list[Block]]
    last: eqx.nn.LayerNorm
    dense: eqx.nn.Linear

    def __init__(self, layers: Any, size: Size, key: jax.Array):
        keys = iter(jax.random.split(key, 1 + sum(1 + blocks for _, blocks in size.stages)))
        self.downs, self.norms, self.stages, ins = [], [], [], 1
        for channels, blocks in size.stages:
            self.downs.append(layers.Conv2d(ins, channels, 2, stride=2, key=next(keys)))
            self.norms.append(layers.LayerNorm(channels))
            self.stages.append([Block(layers, channels, next(keys)) for _ in range(blocks)])
            ins = channels
        self.last = layers.LayerNorm(ins)
        self.dense = eqx.nn.Linear(ins, 10, key=next(keys))

    def features(self, x: jax.Array) -> jax.Array:
        """Of an image (1, H, W) what the last layer reads."""
        for down, norm, blocks in zip(self.downs, self.norms, self.stages, strict=True):
            x = over_channels(norm, down(x))
            for block in blocks:
                x = block(x)
        return self.last(x.mean((1, 2)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(self.features(x))


def digits(size: Size) -> tuple[jax.Array, jax.Array]:
    """All digits, (N, 1, H, W), and their labels; the first 1400 are for training."""
    data: Any = load_digits()
    x = jnp.asarray(data.images[:, None] / 8 - 1, jnp.float32)
    return dnn.resample(x, output_sizes=size.pixels, layout="NCHW"), jnp.asarray(data.target, jnp.int32)


def loss(model: ConvNeXt, x: jax.Array, labels: jax.Array, dtype: Any) -> jax.Array:
    """Computed in dtype; weights and their gradients stay float32."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, model)
    rows = jax.vmap(narrow.features)(x.astype(dtype))
    return dnn.linear_cross_entropy(rows, narrow.dense.weight.T, labels, bias=narrow.dense.bias, label_smoothing=0.05)


@eqx.filter_jit
def logits(model: ConvNeXt, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


def train(model: ConvNeXt, options: argparse.Namespace, size: Size) -> tuple[ConvNeXt, list[float]]:
    (x, labels), rng = digits(size), np.random.default_rng(options.seed)
    optimiser = optax.adamw(optax.cosine_onecycle_schedule(options.steps, 4e-3), weight_decay=0.05)
    state, losses = optimiser.init(eqx.filter(model, eqx.is_inexact_array)), []

    @eqx.filter_jit
    def step(model: ConvNeXt, state: Any, chosen: jax.Array) -> tuple[ConvNeXt, Any, jax.Array]:
        value, gradient = eqx.filter_value_and_grad(loss)(model, x[chosen], labels[chosen], size.dtype)
        updates, state = optimiser.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    for count in range(1, options.steps + 1):
        model, state, value = step(model, state, jnp.asarray(rng.choice(1400, size.batch, replace=False)))
        losses.append(float(value))
        if count % max(options.steps // 10, 1) == 0:
            print(f"step {count:4} of {options.steps}  loss {losses[-1]:.4f}", flush=True)
    return model, losses


def beside_equinox(model: ConvNeXt, x: jax.Array, size: Size) -> float:
    """How far the logits are from those of Equinox's own layers, which read this model's file."""
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    theirs = eqx.tree_deserialise_leaves(file, ConvNeXt(eqx.nn, size, jax.random.key(0)))
    return float(abs(logits(theirs, x) - logits(model, x)).max())


def draw(path: Path, losses: list[float], model: ConvNeXt) -> None:
    """The loss, and the first block's depthwise filters."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(losses)
    left.set(xlabel="step", ylabel="loss, with label smoothing")
    filters = np.asarray(model.stages[0][0].depthwise.weight)[:, 0]
    filters = np.pad(filters[: len(filters) // 4 * 4], ((0, 0), (1, 1), (1, 1)), constant_values=np.nan)
    rows = np.concatenate(filters.reshape(4, -1, 9, 9).transpose(0, 2, 1, 3))
    right.imshow(rows.reshape(len(rows), -1), cmap="RdBu", vmin=-np.nanmax(abs(rows)), vmax=np.nanmax(abs(rows)))
    right.set(title="depthwise filters of the first block", xticks=[], yticks=[])
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="laptop", help="laptop (the default), full for GPUs, or tiny")
    parser.add_argument("--steps", type=int, default=200, help="steps of training")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of the order of the images")
    parser.add_argument("--plot", type=Path, default=Path("convnext.png"), help="where the picture goes")
    options = parser.parse_args(argv)
    size = SIZES[options.size]
    model = ConvNeXt(dnneqx, size, jax.random.key(options.seed))
    model, losses = train(model, options, size)
    x, labels = (of[1400:] for of in digits(size))
    accuracy = float((logits(model, x).argmax(-1) == labels).mean())
    apart = beside_equinox(model, x, size)
    print(f"accuracy on digits not trained on: {accuracy:.3f}; logits are within {apart:.1e} of Equinox's own layers'")
    draw(options.plot, losses, model)
    return {"losses": losses, "accuracy": accuracy, "apart": apart}


if __name__ == "__main__":
    main()
