"""What a training step of `jaxdnn bench train` takes to trace and to lower for an H200, without a GPU:

    JAX_PLATFORMS=cpu PYTHONPATH=.:reference python benchmarks/lowering.py [NETWORK ...] [--lax] [--profile PATH]

Process times in seconds, of the first step in a process, so name one network for a figure. `--profile` keeps cProfile's
statistics, with which all takes two to three times as long. Needs JAX 0.11 or newer.

`--compile`, on a machine with a GPU, compiles the step as well. Its times are those of a clock, beside which it says
how many kernels other threads had compiled when all was lowered, when they had compiled the last one, and what the
process took of the CPUs, its children included. JAX's persistent cache must be off.
"""

import argparse
import cProfile
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdnn._src.core import ahead, compat, engines
from jaxdnn.bench.train import in_jax, measure
from jaxdnn.bench.train.networks import NETWORKS

DEVICE = "NVIDIA H200"


def lowered(name: str, implementation: str, *, compiles: bool) -> None:
    """Traces and lowers a network's step, or compiles it too, and prints how long that took, of how many kernels."""
    network = NETWORKS[name]
    parameters = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, network.make(np.random.default_rng(0))))
    images = network.vocabulary is None
    x = jax.ShapeDtypeStruct(network.shape, jnp.bfloat16 if images else jnp.int32)
    labels = jax.ShapeDtypeStruct(network.shape[:1] if images else network.shape, jnp.int32)
    ops = {"lax": in_jax.Lax, "jaxdnn": in_jax.Jaxdnn}[implementation]
    step = jax.jit(measure.jax_step(network, ops), donate_argnums=0)
    before, ended, cpu = len(compat.kernels_lowered()), _ends_of_kernels(), sum(os.times()[:4])
    clock = time.perf_counter if compiles else time.process_time
    times = [clock()]
    traced = step.trace(parameters, x, labels)
    times.append(clock())
    program = traced.lower() if compiles else traced.lower(lowering_platforms=("cuda",))
    times.append(clock())
    ahead_of = len(ended)
    trace, lower = np.diff(times)
    kernels = len(compat.kernels_lowered()) - before
    print(f"{name} {implementation}: traced in {trace:.2f} s, lowered in {lower:.2f} s, {kernels} kernels", flush=True)
    if compiles:
        program.compile()
        times.append(clock())
        last = f", the last one {max(ended) - times[0]:.2f} s after the start" if ended else ""
        print(
            f"compiled in {times[3] - times[2]:.2f} s, all in {times[3] - times[0]:.2f} s; threads: "
            f"{ahead_of} kernels when all was lowered, {len(ended)} in the end{last}; "
            f"{sum(os.times()[:4]) - cpu:.1f} s of {os.cpu_count()} CPUs",
            flush=True,
        )


def _ends_of_kernels() -> list[float]:
    """When each kernel that is compiled in another thread is ready, to which those to come are appended."""
    ended: list[float] = []
    start = ahead.start

    def started(*kernel: bytes) -> Any:
        future = start(*kernel)
        future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        return future

    ahead.start = started
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("network", nargs="*", default=["resnet50"], help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--lax", action="store_true", help="the same network in jax.lax")
    parser.add_argument("--profile", type=Path, help="a file for cProfile's statistics")
    parser.add_argument("--compile", action="store_true", help="compile the step too, on a machine with a GPU")
    args = parser.parse_args()
    if not args.compile:
        engines.device_kind = lambda platform: DEVICE if platform == "cuda" else None
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    for name in args.network:
        lowered(name, "lax" if args.lax else "jaxdnn", compiles=args.compile)
    if args.profile:
        profile.disable()
        profile.dump_stats(args.profile)


if __name__ == "__main__":
    main()
