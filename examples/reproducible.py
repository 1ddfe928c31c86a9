"""Training of which every bit is fixed: over runs, over splits of the batch, and over meshes of devices.

A small convolutional net learns handwritten digits four times: twice in the same way on one device, once with the batch
in four micro-batches, and once on a mesh of four devices. Under `dnn.determinism("mesh_invariant")` the four runs end
with the same weights, bit for bit, of which the program prints and compares hashes. Then it does the same without
requiring a level, and plots how far the runs drift apart.

What one learns:
  * A level is required around a program (`with dnn.determinism(level):`), not built into it. An op that no engine
    serves at the level raises when it is traced: a normalisation, for instance, which is batch_invariant at most.
  * A sum over the batch is the one place where examples meet, so its order decides. Here `jax.vmap(jax.grad(...))`
    gives a gradient for each example, which depends on nothing else, and `dnn.reduce` adds them on a tree that only
    their number fixes: the second half to the first, and so on. Micro-batch j has the examples j, j + 4, j + 8, ...,
    whose sum is a branch of that tree; so the sum of the micro-batches' sums consists of the same additions.
  * The optimiser counts too: `dnn.add(g, v, beta=0.9)` rounds each product before it adds, where a compiler may fuse.
  * What it costs: memory for a gradient per example, and slower convolutions: the program prints the times.

Run: python examples/reproducible.py                (a CPU, as four devices)
     python examples/reproducible.py --size full    (one or more GPUs: a wider net and a larger batch)
Expect: one hash of the four runs at mesh_invariant, three without a level (the run repeated, alone, has the same bits),
  and weights that differ by 5e-7 after 60 steps. A step took about ten times as long at the level, 20 ms for 2 ms.
  34 seconds of processor time on two slow cores; accuracy 0.829 on test digits, for 60 steps are few.
Ops: conv, add, activation, global_pool, softmax, reduce, and the levels of `determinism`.
"""

import argparse
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jaxdnn as dnn

# Channels of the two convolutions, and examples in a batch (a power of two, so that micro-batches are branches).
SIZES = {"tiny": ((4, 8), 8), "laptop": ((16, 32), 32), "full": ((64, 128), 128)}
Weights = dict[str, jax.Array]


def initial(seed: int, channels: Sequence[int]) -> Weights:
    """Weights as He et al. draw them; a bias is kept with the axes of an image, as `dnn.add` broadcasts it."""
    rng, (c1, c2) = np.random.default_rng(seed), channels
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * (2 / np.prod(shape[:-1])) ** 0.5, jnp.float32)
    filters = {"w1": draw(3, 3, 1, c1), "w2": draw(3, 3, c1, c2), "w3": draw(4, 4, c2, 10)}
    return filters | {"b1": jnp.zeros((1, 1, 1, c1)), "b2": jnp.zeros((1, 1, 1, c2))}


def log_probabilities(weights: Weights, images: jax.Array) -> jax.Array:
    x = dnn.add(weights["b1"], dnn.conv(images, weights["w1"], padding=1))
    x = dnn.activation(x, activation="relu")
    x = dnn.add(weights["b2"], dnn.conv(x, weights["w2"], padding=1, stride=2))
    x = dnn.activation(x, activation="relu")
    # A dense layer is a convolution whose window is the image: so its products have an order too.
    return dnn.softmax(dnn.conv(x, weights["w3"])[:, 0, 0], algorithm="log")


def loss(weights: Weights, image: jax.Array, label: jax.Array) -> jax.Array:
    """The cross-entropy of one example."""
    return -log_probabilities(weights, image[None])[0, label]


@jax.jit
def gradients(weights: Weights, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Weights]:
    """The sums, over the batch, of the losses and of their gradients."""
    each = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(weights, images, labels)
    return jax.tree.map(lambda of_each: dnn.reduce(of_each, axis=0), each)


@jax.jit
def joined(*parts: Any) -> Any:
    """The sum of what micro-batches have."""
    return jax.tree.map(lambda *arrays: dnn.reduce(jnp.stack(arrays), axis=0), *parts)


@jax.jit
def updated(weights: Weights, velocity: Weights, gradient: Weights, rate: float) -> tuple[Weights, Weights]:
    """A step of gradient descent with momentum."""
    velocity = jax.tree.map(lambda g, v: dnn.add(g, v, beta=0.9), gradient, velocity)
    return jax.tree.map(lambda v, w: dnn.add(v, w, alpha=-rate), velocity, weights), velocity


def train(steps: int, seed: int, size: str, micro_batches: int = 1, devices: int = 1) -> tuple[list[Weights], float]:
    """The weights after each step, and the seconds of a step."""
    channels, batch = SIZES[size]
    data: Any = load_digits()
    rng = np.random.default_rng(seed)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("batch",))
    place = lambda arrays, *axes: jax.device_put(arrays, NamedSharding(mesh, P(*axes)))
    weights = place(initial(seed, channels))
    velocity, history, start = jax.tree.map(jnp.zeros_like, weights), [], 0.0
    for step in range(steps):
        if step == 1:  # the first one compiles
            start = time.perf_counter()
        chosen = rng.choice(1400, batch, replace=False)  # the other 397 digits are for testing
        images, labels = (data.images[chosen, ..., None] / 16).astype(np.float32), data.target[chosen].astype(np.int32)
        parts = [(images[j::micro_batches], labels[j::micro_batches]) for j in range(micro_batches)]
        sums = [gradients(weights, *place(part, "batch")) for part in parts]
        total = joined(*sums) if micro_batches > 1 else sums[0]
        weights, velocity = updated(weights, velocity, total[1], 0.1 / batch)
        history.append(jax.device_get(weights))
    return history, (time.perf_counter() - start) / max(steps - 1, 1)


def hashed(weights: Weights) -> str:
    return hashlib.sha256(b"".join(np.asarray(weights[name]).tobytes() for name in sorted(weights))).hexdigest()[:16]


def accuracy(weights: Weights) -> float:
    data: Any = load_digits()
    found = log_probabilities(weights, jnp.asarray(data.images[1400:, ..., None] / 16, jnp.float32)).argmax(-1)
    return float((np.asarray(found) == data.target[1400:]).mean())


def compare(level: str, ways: dict[str, dict[str, int]], options: argparse.Namespace) -> dict[str, list[Weights]]:
    """Trains in every way at one level; prints the hash of each run's last weights."""
    histories = {}
    for name, how in ways.items():
        if name == "run 2":
            jax.clear_caches()  # so that it compiles anew, as another process would
        with dnn.determinism(level):
            histories[name], seconds = train(options.steps, options.seed, options.size, **how)
        found = hashed(histories[name][-1])
        print(f"  {level:14}  {name:16}  {found}  {1000 * seconds:6.1f} ms a step", flush=True)
    return histories


def drift(history: list[Weights], first: list[Weights]) -> list[float]:
    """The largest difference of a weight from that of the first run, after each step."""
    return [max(float(abs(a[name] - b[name]).max()) for name in a) for a, b in zip(history, first, strict=True)]


def draw(drifts: dict[str, dict[str, list[float]]], path: Path) -> None:
    figure, panels = plt.subplots(1, len(drifts), figsize=(10, 4), sharey=True, layout="constrained")
    for panel, (level, of_level) in zip(panels, drifts.items(), strict=True):
        for (name, values), style in zip(of_level.items(), ("-", "--", "-.", ":"), strict=False):
            panel.plot(range(1, len(values) + 1), values, style, label=name, linewidth=2)
        panel.set(title=f'determinism("{level}")', xlabel="step")
        panel.set_yscale("symlog", linthresh=1e-9)
    panels[0].set_ylabel("largest difference of a weight from run 1")
    panels[-1].legend()
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="laptop", help="laptop (the default), full for GPUs, or tiny")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of the order of the examples")
    parser.add_argument("--plot", type=Path, default=Path("reproducible.png"), help="where the picture goes")
    options = parser.parse_args(argv)
    ways = {"run 1": {}, "run 2": {}, "4 micro-batches": {"micro_batches": 4}}
    devices = min(4, len(jax.devices()))
    if devices > 1:
        ways[f"{devices} devices"] = {"devices": devices}
    runs = {level: compare(level, ways, options) for level in ("mesh_invariant", "fast")}
    different = {level: len({hashed(history[-1]) for history in of.values()}) for level, of in runs.items()}
    for level, count in different.items():
        print(f"{level}: {len(ways)} runs ended with {count} different set{'s' * (count > 1)} of weights")
    found = accuracy(runs["mesh_invariant"]["run 1"][-1])
    print(f"accuracy on digits not trained on: {found:.3f}")
    drifts = {
        level: {name: drift(history, of["run 1"]) for name, history in of.items() if name != "run 1"}
        for level, of in runs.items()
    }
    draw(drifts, options.plot)
    return {"different": different, "accuracy": found}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # of a CPU four devices; GPUs are as many as they are
    main()
