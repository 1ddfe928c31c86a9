"""Data-parallel training with synchronised batch normalisation, by `jax.shard_map` and by a sharded `jax.jit`.

The same net is trained on the same batches in four ways, and the losses are compared:
  * one device       the whole batch on one device;
  * shard_map        each device has its part of the batch; `dnn.batch_norm(..., axis_name="data")` merges the
                     statistics of all devices, and gradients are averaged by `jax.lax.pmean`;
  * sharded jit      the program of one device, given arrays that are sharded: JAX divides it, nothing else is written;
  * unsynchronised   as shard_map, but every device normalises by the statistics of its own few images.

What one learns:
  * `axis_name` is all that synchronised batch normalisation takes. Its gradient communicates as well.
  * With it the loss is that of one device up to rounding; without it another function is computed. With few images on
    each device, as here, the losses differ from the first step on.
  * Under a sharded `jit` the statistics are those of the whole batch without any `axis_name`.

Run: python examples/data_parallel.py                (a CPU, as four devices)
     python examples/data_parallel.py --size full    (all GPUs of a host)
Expect: synchronised, the first loss is within 2.4e-7 of one device's, and otherwise 1.5e-2 off. After 150 steps the
  losses are 0.067 and 0.177; accuracy on test digits is 0.889 and 0.904, for statistics of few images are a noise that
  may help. 17 seconds of processor time on two slow cores.
Ops: conv, batch_norm, batch_norm_inference, global_pool, linear_cross_entropy.
"""

import argparse
import functools as ft
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jaxdnn as dnn

# Channels of the convolutions, and images on each device.
SIZES = {"tiny": ((4, 8), 2), "laptop": ((16, 32, 64), 4), "full": ((128, 256, 512, 512), 64)}
WAYS = ("one device", "shard_map", "sharded jit", "unsynchronised")
Tree = Any


def initial(seed: int, channels: Sequence[int]) -> tuple[Tree, list[dict[str, jax.Array]]]:
    """The weights, and the running statistics of the normalisations."""
    rng, layers, ins = np.random.default_rng(seed), [], 1
    for out in channels:
        w = jnp.asarray(rng.normal(size=(3, 3, ins, out)) * (2 / (9 * ins)) ** 0.5, jnp.float32)
        layers.append({"w": w, "scale": jnp.ones(out), "bias": jnp.zeros(out)})
        ins = out
    running = [{"running_mean": jnp.zeros(out), "running_variance": jnp.ones(out)} for out in channels]
    return {"layers": layers, "dense": jnp.asarray(rng.normal(size=(ins, 10)) * ins**-0.5, jnp.float32)}, running


def loss(weights: Tree, running: Any, x: jax.Array, labels: jax.Array, axis_name: str | None) -> tuple[jax.Array, Any]:
    """The cross-entropy of the images here, and the new running statistics."""
    new = []
    for i, (layer, statistics) in enumerate(zip(weights["layers"], running, strict=True)):
        x = dnn.conv(x, layer["w"], padding=1, stride=2 if i == 1 else 1)
        affine = {"scale": layer["scale"], "bias": layer["bias"]}
        x, _, _, mean, variance = dnn.batch_norm(x, activation="relu", axis_name=axis_name, **affine, **statistics)
        new.append({"running_mean": mean, "running_variance": variance})
    return dnn.linear_cross_entropy(dnn.global_pool(x)[:, 0, 0], weights["dense"], labels), new


def gradients(axis_name: str | None, weights: Tree, running: Any, x: jax.Array, labels: jax.Array) -> Any:
    """((loss, running statistics), gradient) of the images here."""
    return jax.value_and_grad(loss, has_aux=True)(weights, running, x, labels, axis_name)


def averaged(axis_name: str | None, *arguments: Any) -> Any:
    """What one device does inside of shard_map: its own gradient, then the mean over all devices."""
    return jax.lax.pmean(gradients(axis_name, *arguments), "data")


def for_way(way: str, mesh: Mesh) -> Callable[..., Any]:
    """The function from weights, running statistics, images and labels to what `gradients` returns."""
    if way in ("one device", "sharded jit"):
        return ft.partial(gradients, None)
    inside = ft.partial(averaged, "data" if way == "shard_map" else None)
    # check_vma=False: the weights' gradients stay each device's own until `pmean`, as written above.
    return jax.shard_map(inside, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P(), check_vma=False)


def train(way: str, mesh: Mesh, options: argparse.Namespace) -> tuple[list[float], float]:
    """The loss of each step, and the accuracy on the test digits."""
    channels, per_device = SIZES[options.size]
    if way == "one device":
        mesh, per_device = Mesh(mesh.devices[:1], ("data",)), per_device * mesh.size
    data: Any = load_digits()
    rng = np.random.default_rng(options.seed)
    place = lambda arrays, spec: jax.device_put(arrays, NamedSharding(mesh, spec))
    weights, running = place(initial(options.seed, channels), P())
    optimiser, of = optax.sgd(0.05, momentum=0.9), for_way(way, mesh)
    state = place(optimiser.init(weights), P())

    @jax.jit
    def step(weights: Tree, running: Any, state: Any, x: jax.Array, labels: jax.Array) -> Any:
        (value, running), gradient = of(weights, running, x, labels)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(weights, updates), running, state, value

    losses, start = [], time.perf_counter()
    for _ in range(options.steps):
        chosen = rng.choice(1400, per_device * mesh.size, replace=False)  # the other 397 digits are for testing
        batch = (data.images[chosen, ..., None] / 16).astype(np.float32), data.target[chosen].astype(np.int32)
        weights, running, state, value = step(weights, running, state, *place(batch, P("data")))
        losses.append(float(value))
    found, seconds = accuracy(*jax.device_get((weights, running))), time.perf_counter() - start
    print(f"{way:14}  last loss {losses[-1]:.5f}  test accuracy {found:.3f}  {seconds:5.1f} s", flush=True)
    return losses, found


@jax.jit
def logits(weights: Tree, running: Any, x: jax.Array) -> jax.Array:
    for i, (layer, statistics) in enumerate(zip(weights["layers"], running, strict=True)):
        x = dnn.conv(x, layer["w"], padding=1, stride=2 if i == 1 else 1)
        mean, variance = statistics["running_mean"], statistics["running_variance"]
        affine = {"scale": layer["scale"], "bias": layer["bias"]}
        x = dnn.batch_norm_inference(x, mean, variance, activation="relu", **affine)
    return dnn.global_pool(x)[:, 0, 0] @ weights["dense"]


def accuracy(weights: Tree, running: Any) -> float:
    data: Any = load_digits()
    found = logits(weights, running, jnp.asarray(data.images[1400:, ..., None] / 16, jnp.float32)).argmax(-1)
    return float((np.asarray(found) == data.target[1400:]).mean())


def draw(losses: dict[str, list[float]], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (way, values), style in zip(losses.items(), ("C0-", "C1--", "C2:", "C3-"), strict=True):
        left.plot(range(1, len(values) + 1), values, style, label=way)
        if way != "one device":
            difference = abs(np.array(values) - losses["one device"])
            right.plot(range(1, len(values) + 1), np.maximum(difference, 1e-9), style, label=way)
    left.set(xlabel="step", ylabel="loss", title="Loss")
    right.set(xlabel="step", yscale="log", title="Difference of the loss from that of one device")
    left.legend()
    right.legend()
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="laptop", help="laptop (the default), full for GPUs, or tiny")
    parser.add_argument("--steps", type=int, default=150, help="steps of each of the four runs")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of the order of the examples")
    parser.add_argument("--plot", type=Path, default=Path("data_parallel.png"), help="where the picture goes")
    options = parser.parse_args(argv)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    print(f"{mesh.size} devices with {SIZES[options.size][1]} images each, {options.steps} steps", flush=True)
    runs = {way: train(way, mesh, options) for way in WAYS}
    losses = {way: of for way, (of, _) in runs.items()}
    first = {way: abs(of[0] - losses["one device"][0]) for way, of in losses.items()}
    for way in WAYS[1:]:
        print(f"{way:14}  the first loss differs from one device's by {first[way]:.1e}")
    draw(losses, options.plot)
    return {"losses": losses, "first": first, "accuracy": {way: found for way, (_, found) in runs.items()}}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # of a CPU four devices; GPUs are as many as they are
    main()
