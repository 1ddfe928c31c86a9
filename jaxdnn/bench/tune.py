"""The command `jaxdnn tune`: runs a script, and measures the engines on the calls that it compiled."""

import argparse
import runpy
import sys
from pathlib import Path

import jax

from jaxdnn._src.core import engines, primitives
from jaxdnn._src.core.tune import measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `jaxdnn tune`."""
    parser.add_argument("--path", type=Path, help="the file to add to (default: the one that runs read)")
    parser.add_argument("script", help="a Python program that calls ops; a few steps of it are enough")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")


def run(args: argparse.Namespace) -> int:
    """Runs the script as `python SCRIPT` would, then measures; the script's own failure is passed on."""
    here = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    calls: list[engines.Call] = []
    listener = calls.append
    primitives.listeners.append(listener)
    given, sys.argv = sys.argv, [args.script, *args.arguments]
    try:
        runpy.run_path(args.script, run_name="__main__")
    finally:
        sys.argv = given
        primitives.listeners.remove(listener)
    print(measured((call for call in calls if call.platform == here), args.path))
    return 0
