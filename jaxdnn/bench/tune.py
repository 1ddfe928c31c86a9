"""The command `jaxdnn tune`: runs a script, and measures the engines on the calls that it compiled."""

import argparse
import runpy
import sys
from pathlib import Path

from jaxdnn._src.core import engines, primitives, tuned
from jaxdnn._src.core.tune import measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `jaxdnn tune`."""
    parser.add_argument("--path", type=Path, help="the file to add to (default: the one that runs read)")
    parser.add_argument("script", help="a Python program that calls ops; a few steps of it are enough")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")


def run(args: argparse.Namespace) -> int:
    """Runs the script as `python SCRIPT` would, by the rule alone, then measures.

    The script's own failure is passed on. The status is 1 if the measurement of a call failed.
    """
    calls: list[engines.Call] = []
    listener = calls.append
    primitives.listeners.append(listener)
    argv, sys.argv = sys.argv, [args.script, *args.arguments]
    folders, sys.path = sys.path, [str(Path(args.script).resolve().parent), *sys.path]
    with tuned.ignored():
        try:
            runpy.run_path(args.script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        finally:
            sys.argv, sys.path = argv, folders
            primitives.listeners.remove(listener)
        # Not before: it starts JAX, which a script may do in a way of its own.
        here = engines.platform()
        found = measured((call for call in calls if call.platform == here), args.path)
    print(found)
    return int(bool(found.failed))
