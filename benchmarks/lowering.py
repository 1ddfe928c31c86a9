"""What a training step of `jaxdnn bench train` takes to trace and to lower for an H200, without a GPU:

    JAX_PLATFORMS=cpu PYTHONPATH=.:reference python benchmarks/lowering.py [NETWORK ...] [--lax] [--profile PATH]

Process times in seconds, of the first step in a process, so name one network for a figure. `--profile` keeps cProfile's
statistics, with which all takes two to three times as long. Needs JAX 0.11 or newer.
"""

import argparse
import cProfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxdnn._src.core import compat, engines
from jaxdnn.bench.train import in_jax, measure
from jaxdnn.bench.train.networks import NETWORKS

DEVICE = "NVIDIA H200"


def lowered(name: str, implementation: str) -> None:
    """Traces and lowers a network's step, and prints how long that took and how many kernels there are."""
    network = NETWORKS[name]
    parameters = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, network.make(np.random.default_rng(0))))
    images = network.vocabulary is None
    x = jax.ShapeDtypeStruct(network.shape, jnp.bfloat16 if images else jnp.int32)
    labels = jax.ShapeDtypeStruct(network.shape[:1] if images else network.shape, jnp.int32)
    ops = {"lax": in_jax.Lax, "jaxdnn": in_jax.Jaxdnn}[implementation]
    step = jax.jit(measure.jax_step(network, ops), donate_argnums=0)
    before = len(compat.kernels_lowered())
    times = [time.process_time()]
    traced = step.trace(parameters, x, labels)
    times.append(time.process_time())
    traced.lower(lowering_platforms=("cuda",))
    times.append(time.process_time())
    trace, lower = np.diff(times)
    kernels = len(compat.kernels_lowered()) - before
    print(f"{name} {implementation}: traced in {trace:.2f} s, lowered in {lower:.2f} s, {kernels} kernels", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("network", nargs="*", default=["resnet50"], help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--lax", action="store_true", help="the same network in jax.lax")
    parser.add_argument("--profile", type=Path, help="a file for cProfile's statistics")
    args = parser.parse_args()
    engines.device_kind = lambda platform: DEVICE if platform == "cuda" else None
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    for name in args.network:
        lowered(name, "lax" if args.lax else "jaxdnn")
    if args.profile:
        profile.disable()
        profile.dump_stats(args.profile)


if __name__ == "__main__":
    main()
