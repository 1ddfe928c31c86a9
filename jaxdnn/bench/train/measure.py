"""`jaxdnn bench train`: steps per second of whole networks, each implementation in a process of its own."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich
from rich.table import Table

from jaxdnn._src.core import files, timing, tuned
from jaxdnn.bench import peers
from jaxdnn.bench.lines import joined
from jaxdnn.bench.train.networks import CLASSES, NETWORKS, Network

RATE = 1e-3
IMPLEMENTATIONS = ("lax", "jaxdnn", "torch", "torch.compile")
CALLS = 20  # for one wait: the host runs ahead of the device, as in training
KERNELS = 25  # of the longest that are listed
SEED = 0
SAME_LOSS = 0.05  # relative; batch norm in bfloat16 over the few pixels of small images is the least exact


def run(args: argparse.Namespace, provenance: Callable[[], dict[str, Any]]) -> int:
    """Measures the networks that `--case` names, prints each as it ends, and writes the JSON after each."""
    if unknown := sorted(set(args.case or ()) - set(NETWORKS)):
        print(f"`bench train` knows no {', '.join(unknown)}; there are {', '.join(NETWORKS)}", file=sys.stderr)
        return 2
    for name in ("family", "passes", "engine", "seconds", "part", "turns"):
        if getattr(args, name):
            print(f"`bench train` has no --{name}: it measures whole steps, with no engine named", file=sys.stderr)
            return 2
    on_gpu = jax.default_backend() == "gpu"
    wanted = ("lax", "torch") if args.peers is None else args.peers
    able = [name for name in IMPLEMENTATIONS if name == "jaxdnn" or name.partition(".")[0] in wanted]
    able = [name for name in able if not name.startswith("torch") or peers.torch_is_here()]
    rows = []
    for name in args.case or NETWORKS:
        shape = NETWORKS[name].shape if on_gpu else NETWORKS[name].small
        shape = (args.batch or shape[0], *shape[1:])
        for implementation in able:
            row = {"network": name, "source": NETWORKS[name].source, "implementation": implementation, "shape": shape}
            row |= _in_a_process(name, implementation, shape, args.repeats)
            first = next((r for r in rows if r["network"] == name and "wall_ms" in r), row)
            if "error" not in row and not _is_like(row["first_loss"], first["first_loss"]):
                row = {"error": [f"its first loss is {row['first_loss']}, not {first['first_loss']}"], **row}
            rows.append(row)
            _print(row, first)
        if args.json:
            document = {**provenance(), "copy_tb_per_s": timing.copy_bandwidth(), "rows": rows}
            files.write(args.json, json.dumps(document, indent=1) + "\n")
    _print_summary(rows)
    return int(any("error" in row for row in rows))


def _is_like(loss: float, other: float) -> bool:
    """Whether two losses of the same parameters and images differ by roundings; not if one is NaN."""
    return abs(loss - other) <= SAME_LOSS * abs(other)


def _in_a_process(network: str, implementation: str, shape: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """What a fresh process measures; of one that fails, what it said last."""
    task = json.dumps([network, implementation, shape, repeats])
    # Otherwise the last line of an error of JAX is a remark about its traceback.
    env = {**os.environ, "JAX_TRACEBACK_FILTERING": "off"}
    child = subprocess.run([sys.executable, "-m", __name__, task], capture_output=True, text=True, env=env)
    if child.returncode:
        return {"error": child.stderr.strip().splitlines()[-1:]}
    return json.loads(child.stdout.splitlines()[-1])


def _print(row: dict[str, Any], first: dict[str, Any]) -> None:
    said = f"{row['network']:13s} {row['implementation']:14s}"
    if "error" in row:
        print(f"{said} failed: {' '.join(row['error'])}", flush=True)
        return
    ratio = f"{first['wall_ms'] / row['wall_ms']:.2f} times {first['implementation']}'s speed"
    device = "" if row["device_ms"] is None else f"device {row['device_ms']:.2f} ms in {row['kernels']} kernels"
    memory = "" if row["peak_gib"] is None else f"peak {row['peak_gib']:.2f} GiB"
    wall = f"{said} {row['wall_ms']:.2f} ms a step"
    print(joined([wall, f"compiled in {row['compile_s']:.1f} s", device, memory, ratio]), flush=True)


def _print_summary(rows: list[dict[str, Any]]) -> None:
    names = [name for name in IMPLEMENTATIONS if any(row["implementation"] == name for row in rows)]
    table = Table("network", *(f"{name}, ms" for name in names), "speed-up over lax", caption="wall time of a step")
    for network in dict.fromkeys(row["network"] for row in rows):
        wall = {r["implementation"]: r["wall_ms"] for r in rows if r["network"] == network and "error" not in r}
        gain = f"{wall['lax'] / wall['jaxdnn']:.2f}" if {"lax", "jaxdnn"} <= wall.keys() else ""
        table.add_row(network, *(f"{wall[name]:.2f}" if name in wall else "" for name in names), gain)
    rich.print(table)


# ---- in the process --------------------------------------------------------------------------------------------------


def _data(network: Network, shape: tuple[int, ...]) -> tuple[Any, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(SEED)
    parameters = network.make(rng)
    if network.vocabulary is not None:
        tokens = rng.integers(0, network.vocabulary, (shape[0], shape[1] + 1))
        return parameters, np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
    return parameters, rng.standard_normal(shape, np.float32), rng.integers(0, CLASSES, shape[0])


def jax_step(network: Network, ops: Callable[[], Any]) -> Callable[..., Any]:
    """A step of SGD: parameters, a batch and labels to new parameters, the loss and the batch's statistics."""

    def loss_of(parameters: Any, x: jax.Array, labels: jax.Array) -> Any:
        made = ops()
        return network.loss(made, parameters, x, labels), made.statistics

    def step(parameters: Any, x: jax.Array, labels: jax.Array) -> Any:
        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters, x, labels)
        return jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients), loss, statistics

    return step


@tuned.ignored()
def _measure_jax(network: Network, name: str, shape: tuple[int, ...], repeats: int) -> dict[str, Any]:
    from jaxdnn.bench.train import in_jax

    values, x, labels = _data(network, shape)
    parameters = jax.device_put(values)
    x = jnp.asarray(x, jnp.bfloat16 if network.vocabulary is None else jnp.int32)
    labels = jnp.asarray(labels, jnp.int32)
    step = jax_step(network, {"lax": in_jax.Lax, "jaxdnn": in_jax.Jaxdnn}[name])
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(parameters, x, labels).compile()
    compile_s = time.perf_counter() - start
    losses = []

    def run(calls: int) -> None:
        nonlocal parameters
        for _ in range(calls):
            parameters, loss, _ = compiled(parameters, x, labels)
            losses.append(loss)
        jax.block_until_ready(parameters)

    run(2)
    wall, device, kernels = _wall(run, repeats), None, []
    statistics_ = jax.devices()[0].memory_stats() or {}
    if jax.default_backend() == "gpu":
        kernels = timing.kernels(lambda: run(1))
        device = sum(ms for _, ms in kernels)
    memory = compiled.memory_analysis()
    return _row(wall, compile_s, device, kernels, statistics_.get("peak_bytes_in_use"), losses) | {
        "temporaries_gib": None if memory is None else memory.temp_size_in_bytes / 2**30
    }


def _measure_torch(network: Network, name: str, shape: tuple[int, ...], repeats: int) -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]  (a peer where it is installed)

    from jaxdnn.bench.train import in_torch

    torch.backends.cudnn.benchmark = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    values, x, labels = _data(network, shape)
    parameters = jax.tree.map(lambda v: in_torch.parameter(v, device), values)
    x, labels = in_torch.batch(x, device), torch.from_numpy(labels).to(device)
    step = in_torch.step_of(network, parameters, RATE, compiled=name == "torch.compile")
    losses = []

    def run(calls: int) -> None:
        losses.extend(step(x, labels) for _ in range(calls))
        wait()

    start = time.perf_counter()
    run(1)
    compile_s = time.perf_counter() - start
    run(2)
    wall, kernels, peak = _wall(run, repeats), [], None
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(1)
        found = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [(e.name, e.device_time / 1e3) for e in found]
    return _row(wall, compile_s, sum(ms for _, ms in kernels) if kernels else None, kernels, peak, losses)


def _wall(run: Callable[[int], None], repeats: int) -> list[float]:
    """Milliseconds a step, over many steps for one wait."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(CALLS)
        times.append(1e3 * (time.perf_counter() - start) / CALLS)
    return times


def _row(
    wall: list[float],
    compile_s: float,
    device: float | None,
    kernels: list[tuple[str, float]],
    peak: int | None,
    losses: Any,
) -> dict[str, Any]:
    by_name: dict[str, list[float]] = {}
    for name, ms in kernels:
        by_name.setdefault(name.partition("(")[0][:80], []).append(ms)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:KERNELS]
    return {
        "wall_ms": statistics.median(wall),
        "least_ms": min(wall),
        "compile_s": compile_s,
        "device_ms": device,
        "kernels": len(kernels),
        "longest_kernels": [{"name": name, "calls": len(ms), "ms": sum(ms)} for name, ms in longest],
        "peak_gib": None if peak is None else peak / 2**30,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
    }


def _main(task: str) -> None:
    network, implementation, shape, repeats = json.loads(task)
    measure = _measure_torch if implementation.startswith("torch") else _measure_jax
    print(json.dumps(measure(NETWORKS[network], implementation, tuple(shape), repeats)))


if __name__ == "__main__":
    _main(sys.argv[1])
