"""A diffusion model: a U-Net learns to remove noise from images of digits, and then makes digits of noise alone.

The U-Net has two resolutions. Its blocks are those that image generators use: group normalisation with swish (SiLU),
convolution, the time added in, again, and a residual; at the lower resolution also attention among all pixels. It is
told the digit, so that samples can be asked for by name, and the figure of merit is how many of them a classifier
that was trained on real digits takes for the digit that was asked for.

What one learns:
  * `dnn.group_norm(..., activation="swish")` is one op, and so is `dnn.conv(..., bias=b, residual=x)`: the residual is
    added to the accumulator, before the result is rounded.
  * `dnn.attention` takes (batch, pixels, heads, features): an image is a sequence after one reshape.
  * `dnn.resample(x, scale=2, method="nearest")` and a convolution make the way up, a convolution of stride 2 the way
    down.

Run: python examples/diffusion.py                (a CPU)
     python examples/diffusion.py --size full    (a GPU: images of 32x32 pixels, 128 channels, bfloat16)
Expect: 93 of 100 samples recognised after 800 steps; 61 seconds of processor time on two slow cores.
Ops: conv, group_norm, attention, resample.
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
from sklearn.neighbors import KNeighborsClassifier

import jaxdnn as dnn


@dataclasses.dataclass(frozen=True)
class Size:
    channels: int
    batch: int
    pixels: int = 8  # of an edge
    dtype: Any = jnp.float32
    each: int = 10  # samples of each digit


SIZES = {"tiny": Size(8, 8, each=1), "laptop": Size(32, 64), "full": Size(128, 256, 32, jnp.bfloat16)}
TIMES = 200  # steps from image to noise
HEADS = 4
Tree = Any


def alpha(t: jax.Array | float) -> Any:
    """How much of the image's variance is left at time t, from 1 (0: the image) to TIMES (noise): a cosine schedule."""
    return jnp.cos((jnp.asarray(t) / TIMES * 0.98 + 0.01) * jnp.pi / 2) ** 2


class Weights:
    """Draws weights from one generator, with the fan-in's scale; those of a block's last convolution are small."""

    def __init__(self, rng: np.random.Generator, dtype: Any):
        self.rng, self.dtype = rng, dtype

    def draw(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(self.rng.normal(size=shape) * scale * np.prod(shape[:-1]) ** -0.5, self.dtype)

    def norm(self, channels: int) -> dict[str, jax.Array]:
        return {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}

    def conv(self, window: int, ins: int, out: int, scale: float = 1.0) -> dict[str, jax.Array]:
        return {"w": self.draw(window, window, ins, out, scale=scale), "bias": jnp.zeros(out, self.dtype)}

    def block(self, ins: int, out: int, time: int) -> Tree:
        made = {"norm1": self.norm(ins), "conv1": self.conv(3, ins, out), "time": self.draw(time, out)}
        made |= {"norm2": self.norm(out), "conv2": self.conv(3, out, out, scale=0.1)}
        return made | ({"skip": self.conv(1, ins, out)} if ins != out else {})

    def attention(self, c: int) -> Tree:
        return {"norm": self.norm(c), "qkv": self.conv(1, c, 3 * c), "out": self.conv(1, c, c, scale=0.1)}


def initial(seed: int, size: Size) -> Tree:
    make, c = Weights(np.random.default_rng(seed), size.dtype), size.channels
    return {
        "digit": make.draw(10, 4 * c, scale=10**0.5),
        "time": make.draw(c, 4 * c),
        "first": make.conv(3, 1, c),
        "high": make.block(c, c, 4 * c),
        "down": make.conv(3, c, 2 * c),
        "low": make.block(2 * c, 2 * c, 4 * c),
        "attention": make.attention(2 * c),
        "lower": make.block(2 * c, 2 * c, 4 * c),
        "up": make.conv(3, 2 * c, c),
        "higher": make.block(2 * c, c, 4 * c),
        "norm": make.norm(c),
        "last": make.conv(3, c, 1, scale=0.1),
    }


def conv(p: dict[str, jax.Array], x: jax.Array, **how: Any) -> jax.Array:
    return dnn.conv(x, p["w"], padding="SAME", bias=p["bias"], **how)


def norm(p: dict[str, Any], x: jax.Array, activation: str | None = "swish") -> Any:
    return dnn.group_norm(x, groups=8, activation=activation, **p)


def block(p: Tree, x: jax.Array, told: jax.Array) -> jax.Array:
    """A residual block; what the net is told, time and digit, is added between its convolutions."""
    h = conv(p["conv1"], norm(p["norm1"], x))
    h = h + (told @ p["time"])[:, None, None]
    return conv(p["conv2"], norm(p["norm2"], h), residual=conv(p["skip"], x) if "skip" in p else x)


def attention(p: Tree, x: jax.Array) -> jax.Array:
    """Every pixel looks at all pixels, with a residual."""
    batch, height, width, c = x.shape
    qkv = conv(p["qkv"], norm(p["norm"], x, activation=None))
    q, k, v = jnp.split(qkv.reshape(batch, height * width, 3 * HEADS, c // HEADS), 3, axis=2)
    return conv(p["out"], dnn.attention(q, k, v).reshape(x.shape), residual=x)


def unet(p: Tree, x: jax.Array, t: jax.Array, digits: jax.Array) -> jax.Array:
    """The noise in images x (N, H, W, 1) at times t (N,), in float32."""
    dtype, c = p["digit"].dtype, p["time"].shape[0]
    angles = t[:, None] / TIMES * jnp.exp(jnp.linspace(0.0, 6.0, c // 2))[None]
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(dtype)
    told = dnn.activation(waves @ p["time"] + p["digit"][digits], activation="swish")
    high = block(p["high"], conv(p["first"], x.astype(dtype)), told)
    low = block(p["low"], conv(p["down"], high, stride=2), told)
    low = block(p["lower"], attention(p["attention"], low), told)
    up = conv(p["up"], dnn.resample(low, scale=2, method="nearest"))
    h = block(p["higher"], jnp.concatenate([up, high], -1), told)
    return conv(p["last"], norm(p["norm"], h), out_dtype=jnp.float32)


def images(size: Size) -> tuple[jax.Array, jax.Array]:
    """All digits, from -1 to 1, at the size's resolution."""
    data: Any = load_digits()
    x = jnp.asarray(data.images[..., None] / 8 - 1, jnp.float32)
    return dnn.resample(x, output_sizes=size.pixels), jnp.asarray(data.target, jnp.int32)


def loss(p: Tree, key: jax.Array, x: jax.Array, digits: jax.Array) -> jax.Array:
    """The mean square of what is wrong with the noise that the net finds."""
    for_time, for_noise = jax.random.split(key)
    t = jax.random.randint(for_time, x.shape[:1], 1, TIMES + 1).astype(jnp.float32)
    noise, a = jax.random.normal(for_noise, x.shape), alpha(t)[:, None, None, None]
    return ((unet(p, jnp.sqrt(a) * x + jnp.sqrt(1 - a) * noise, t, digits) - noise) ** 2).mean()


def train(options: argparse.Namespace, size: Size) -> tuple[Tree, list[float]]:
    """The mean of the weights over the last hundred steps or so, and the losses."""
    (x, digits), weights = images(size), initial(options.seed, size)
    optimiser = optax.adam(optax.cosine_onecycle_schedule(options.steps, 3e-3))
    state, mean, losses = optimiser.init(weights), weights, []

    @jax.jit
    def step(weights: Tree, mean: Tree, state: Any, key: jax.Array) -> Any:
        for_batch, for_loss = jax.random.split(key)
        chosen = jax.random.randint(for_batch, (size.batch,), 0, len(x))
        value, gradient = jax.value_and_grad(loss)(weights, for_loss, x[chosen], digits[chosen])
        updates, state = optimiser.update(gradient, state)
        weights = optax.apply_updates(weights, updates)
        return weights, optax.incremental_update(weights, mean, 0.02), state, value

    for count, key in enumerate(jax.random.split(jax.random.key(options.seed), options.steps), 1):
        weights, mean, state, value = step(weights, mean, state, key)
        losses.append(float(value))
        if count % max(options.steps // 10, 1) == 0:
            recent = np.mean(losses[-options.steps // 10 :])
            print(f"step {count:5} of {options.steps}  loss {recent:.4f}", flush=True)
    return mean, losses


def sample(p: Tree, key: jax.Array, digits: jax.Array, pixels: int, steps: int = 50) -> jax.Array:
    """Images of the digits asked for: from noise to time 0 in fifty steps that add no noise (DDIM)."""
    times = jnp.linspace(TIMES, 0, steps + 1)

    def toward_image(x: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        now, then = pair
        noise = unet(p, x, jnp.full(x.shape[:1], now), digits)
        image = jnp.clip((x - jnp.sqrt(1 - alpha(now)) * noise) / jnp.sqrt(alpha(now)), -1, 1)
        noise = (x - jnp.sqrt(alpha(now)) * image) / jnp.sqrt(1 - alpha(now))
        return jnp.sqrt(alpha(then)) * image + jnp.sqrt(1 - alpha(then)) * noise, None

    x = jax.random.normal(key, (len(digits), pixels, pixels, 1))
    return jax.lax.scan(toward_image, x, (times[:-1], times[1:]))[0]


def recognised(samples: np.ndarray, asked: np.ndarray, size: Size) -> float:
    """The share of samples that the nearest real digits say are what was asked for."""
    real, labels = images(size)
    classifier = KNeighborsClassifier(5).fit(np.asarray(real).reshape(len(real), -1), np.asarray(labels))
    return float((classifier.predict(samples.reshape(len(samples), -1)) == asked).mean())


def draw(samples: np.ndarray, losses: list[float], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", width_ratios=(1, 1.2))
    left.plot(losses, linewidth=0.5)
    left.set(xlabel="step", ylabel="mean square error of the noise", yscale="log")
    apart = np.pad(samples[..., 0], ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    rows = np.concatenate(apart.reshape(-1, 10, *apart.shape[1:]).transpose(0, 2, 1, 3))
    right.imshow(rows.reshape(len(rows), -1), cmap="gray_r", vmin=-1, vmax=1)
    right.set(title="samples, a column for each digit", xticks=[], yticks=[])
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="laptop", help="laptop (the default), full for GPUs, or tiny")
    parser.add_argument("--steps", type=int, default=800, help="steps of training")
    parser.add_argument("--seed", type=int, default=0, help="of weights, noise and samples")
    parser.add_argument("--plot", type=Path, default=Path("diffusion.png"), help="where the picture goes")
    options = parser.parse_args(argv)
    size = SIZES[options.size]
    weights, losses = train(options, size)
    asked = np.tile(np.arange(10, dtype=np.int32), size.each)
    drawn = jax.jit(sample, static_argnames="pixels")(weights, jax.random.key(options.seed + 1), asked, size.pixels)
    samples = np.asarray(drawn)
    share = recognised(samples, asked, size)
    print(f"{share:.0%} of {len(asked)} samples are recognised as the digit that was asked for")
    draw(samples, losses, options.plot)
    return {"losses": losses, "recognised": share, "samples": samples}


if __name__ == "__main__":
    main()
