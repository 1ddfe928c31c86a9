"""The environment of a run: versions, devices, revision; and the choice of a platform before JAX starts it."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from jaxdnn._src.core import engines
from jaxdnn._version import __version__

PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes")


def choose(wanted: str | None, devices: int | None) -> None:
    """Sets the platform and the number of devices that a CPU simulates, which JAX reads when it starts its backend.

    The default is two devices, so that meshes are tested on a CPU as well; GPUs are not simulated. Programs are
    compiled here and not taken from a cache on disk: a program that is found there is not compiled anew.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    flags, name = os.environ.get("XLA_FLAGS", "").split(), "--xla_force_host_platform_device_count"
    if devices or not any(flag.startswith(name) for flag in flags):
        kept = [flag for flag in flags if not flag.startswith(name)]
        os.environ["XLA_FLAGS"] = " ".join([*kept, f"{name}={devices or 2}"])
    if wanted:
        # Callbacks, which a planted fault uses, pass their arrays through a CPU.
        jax.config.update("jax_platforms", {"gpu": "cuda,cpu"}.get(wanted, wanted))


def describe(flush: bool) -> dict[str, Any]:
    """The facts about this process for the reader of a report."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jaxdnn": __version__,
        "revision": revision(),
        **{name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "platform": engines.platform(),
        "devices": [f"{d.device_kind} {d.id}" if d.platform != "cpu" else f"cpu {d.id}" for d in jax.local_devices()],
        "device_kind": jax.local_devices()[0].device_kind,
        "flushes_subnormals": flush,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def revision() -> str | None:
    """The git revision of the source, with a + behind it if files differ; None outside of a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
