"""Inference in int8: a trained net is quantised after training, with a scale for each output channel.

A convolutional net learns handwritten digits in float32. Then its weights, and what its layers read, become int8:
x ≈ s q, with q an integer from -127 to 127 and s a scale. The program compares both nets on digits that neither has
seen, and quantises the weights a second time with one scale for a layer's whole filter, to show what scales by channel
are worth.

What one learns:
  * Of int8 operands `dnn.conv` adds the products exactly, in int32, and `out_dtype=jnp.float32` gives that sum. Times
    the input's scale and each output channel's it is the float layer's result, but for the rounding of the operands.
  * Batch normalisation is folded into the convolution before (`fold`), so that an inference net has none.
  * Scales of activations are calibrated: from the largest value that some training examples reach.
  * Sums of integers have no order, so that an int8 layer guarantees the level "portable": bits equal on every device.

Run: python examples/int8.py                (a CPU)
     python examples/int8.py --size full    (a GPU: wider layers)
Expect: accuracy 0.950 on test digits in float32 and 0.947 in int8; the error of the logits is 2.1 % with scales by
  channel, 3.2 % without. 10 seconds of processor time on two slow cores.
Ops: conv (float32 and int8), batch_norm, activation, global_pool, linear_cross_entropy.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxdnn as dnn

# Channels of the three convolutions, and examples in a batch. Channels in multiples of 16 suit int8 tensor cores.
SIZES = {"tiny": ((16, 16, 16), 32), "laptop": ((16, 32, 64), 64), "full": ((128, 256, 512), 256)}
STRIDES = (1, 2, 1)
Tree = Any


def digits() -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The digits to train on and those to test on: images (N, 8, 8, 1) from 0 to 1, and labels."""
    data: Any = load_digits()
    images = jnp.asarray(data.images[..., None] / 16, jnp.float32)
    labels = jnp.asarray(data.target, jnp.int32)
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


def initial(seed: int, channels: Sequence[int]) -> Tree:
    """The layers: filters, scales and biases of the normalisations; and the dense layer at the end."""
    rng, layers, ins = np.random.default_rng(seed), [], 1
    for out in channels:
        w = jnp.asarray(rng.normal(size=(3, 3, ins, out)) * (2 / (9 * ins)) ** 0.5, jnp.float32)
        layers.append({"w": w, "scale": jnp.ones(out), "bias": jnp.zeros(out)})
        ins = out
    return {"layers": layers, "dense": jnp.asarray(rng.normal(size=(ins, 10)) * ins**-0.5, jnp.float32)}


def features(weights: Tree, running: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> tuple[jax.Array, Any]:
    """The net in training: convolution, batch normalisation, relu, three times; and the new running statistics."""
    new = []
    for layer, stride, (mean, variance) in zip(weights["layers"], STRIDES, running, strict=True):
        x = dnn.conv(x, layer["w"], padding=1, stride=stride)
        statistics: dict[str, Any] = {"running_mean": mean, "running_variance": variance}
        x, _, _, mean, variance = dnn.batch_norm(
            x, scale=layer["scale"], bias=layer["bias"], activation="relu", **statistics
        )
        new.append((mean, variance))
    return dnn.global_pool(x)[:, 0, 0], new


def train(options: argparse.Namespace) -> tuple[Tree, list[tuple[jax.Array, jax.Array]]]:
    """The weights and the running statistics after training."""
    channels, batch = SIZES[options.size]
    (images, labels), _ = digits()
    weights = initial(options.seed, channels)
    running = [(jnp.zeros(c), jnp.ones(c)) for c in channels]
    optimiser = optax.adam(optax.cosine_decay_schedule(3e-3, options.steps))
    state = optimiser.init(weights)

    def loss(weights: Tree, running: Any, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        rows, running = features(weights, running, x)
        return dnn.linear_cross_entropy(rows, weights["dense"], labels), running

    @jax.jit
    def step(weights: Tree, running: Any, state: Any, chosen: jax.Array) -> Any:
        of = jax.value_and_grad(loss, has_aux=True)(weights, running, images[chosen], labels[chosen])
        (value, running), gradient = of
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(weights, updates), running, state, value

    rng = np.random.default_rng(options.seed)
    for count in range(1, options.steps + 1):
        chosen = rng.choice(len(images), batch, replace=False)
        weights, running, state, value = step(weights, running, state, chosen)
        if count % max(options.steps // 5, 1) == 0:
            print(f"step {count:4} of {options.steps}  loss {float(value):.4f}", flush=True)
    return weights, running


def fold(weights: Tree, running: list[tuple[jax.Array, jax.Array]], eps: float = 1e-5) -> list[dict[str, jax.Array]]:
    """The layers of the inference net: filters and biases into which the normalisations have gone."""
    layers = []
    for layer, (mean, variance) in zip(weights["layers"], running, strict=True):
        factor = layer["scale"] / jnp.sqrt(variance + eps)  # one for each output channel, the last axis of w
        layers.append({"w": layer["w"] * factor.reshape(1, 1, 1, -1), "bias": layer["bias"] - mean * factor})
    return layers


def float_layer(layer: dict[str, jax.Array], x: jax.Array, stride: int) -> jax.Array:
    return dnn.conv(x, layer["w"], padding=1, stride=stride, bias=layer["bias"], activation="relu")


def quantised(x: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)


def quantise(layer: dict[str, jax.Array], x: jax.Array, by_channel: bool) -> dict[str, jax.Array]:
    """A layer's filter in int8 and its scales, of which the input's is from calibration examples x."""
    axes = (0, 1, 2) if by_channel else (0, 1, 2, 3)
    scale = jnp.abs(layer["w"]).max(axes, keepdims=True) / 127
    x_scale = jnp.abs(x).max() / 127
    scales = jnp.broadcast_to(x_scale * scale.ravel(), layer["bias"].shape)
    return {"w": quantised(layer["w"], scale), "x_scale": x_scale, "scales": scales, "bias": layer["bias"]}


def int8_layer(layer: dict[str, jax.Array], x: jax.Array, stride: int) -> jax.Array:
    """The same layer on integers. Its sums are exact: all that is lost is in the rounding of w and x."""
    epilogue: dict[str, Any] = {"alpha": layer["scales"], "bias": layer["bias"], "activation": "relu"}
    x = quantised(x, layer["x_scale"])
    return dnn.conv(x, layer["w"], padding=1, stride=stride, out_dtype=jnp.float32, **epilogue)


def logits(run: Callable[..., jax.Array], layers: list[Any], dense: jax.Array, x: jax.Array) -> jax.Array:
    for layer, stride in zip(layers, STRIDES, strict=True):
        x = run(layer, x, stride)
    return dnn.global_pool(x)[:, 0, 0] @ dense


def calibrate(layers: list[dict[str, jax.Array]], x: jax.Array, by_channel: bool) -> list[dict[str, jax.Array]]:
    """Quantises layer after layer, while the calibration examples pass through the float net."""
    found = []
    for layer, stride in zip(layers, STRIDES, strict=True):
        found.append(quantise(layer, x, by_channel))
        x = float_layer(layer, x, stride)
    return found


def draw(path: Path, exact: np.ndarray, approximate: dict[str, np.ndarray], last: dict[str, jax.Array]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, values), marker in zip(approximate.items(), ("o", "x"), strict=True):
        left.plot(exact.ravel(), (values - exact).ravel(), marker, markersize=2, alpha=0.5, label=name)
    left.set(xlabel="logit in float32", ylabel="logit in int8, minus that in float32", title="Error of the logits")
    left.legend()
    ranges = np.sort(np.asarray(jnp.abs(last["w"]).max((0, 1, 2))))
    right.bar(range(len(ranges)), ranges)
    right.set(xlabel="output channel, sorted", ylabel="largest weight", title="The last layer's ranges, folded")
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="laptop", help="laptop (the default), full for GPUs, or tiny")
    parser.add_argument("--steps", type=int, default=300, help="steps of the float net's training")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of the order of the examples")
    parser.add_argument("--plot", type=Path, default=Path("int8.png"), help="where the picture goes")
    options = parser.parse_args(argv)
    weights, running = train(options)
    layers, dense = fold(weights, running), weights["dense"]
    (images, _), (tests, labels) = digits()
    exact = np.asarray(jax.jit(lambda x: logits(float_layer, layers, dense, x))(tests))
    figures = {"float32": float((exact.argmax(-1) == labels).mean())}
    print(f"accuracy in float32                        {figures['float32']:.4f}")
    approximate = {}
    for name, by_channel in {"a scale per filter": False, "a scale per channel": True}.items():
        small = calibrate(layers, images[:256], by_channel)
        found = approximate[name] = np.asarray(jax.jit(lambda x, s=small: logits(int8_layer, s, dense, x))(tests))
        figures[name] = float((found.argmax(-1) == labels).mean())
        figures[f"{name}, error"] = error = float(np.sqrt(((found - exact) ** 2).mean() / (exact**2).mean()))
        print(f"accuracy in int8, {name:24} {figures[name]:.4f}; error of the logits {100 * error:.2f} %")
    draw(options.plot, exact, approximate, layers[-1])
    return figures


if __name__ == "__main__":
    main()
