"""The command line: `jaxdnn verify`, `jaxdnn info`, `jaxdnn tune`, `jaxdnn bench`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from jaxdnn._version import __version__

# A command is a module with add_arguments(parser) and run(arguments) -> exit status, imported when it is asked for:
# some of their arguments depend on the devices, which not every command should wait for.
COMMANDS = {
    "verify": ("jaxdnn.verify.command", "compare every op with its definition and test the determinism levels"),
    "info": ("jaxdnn.verify.info", "show devices, versions, and what each engine serves"),
    "tune": ("jaxdnn.bench.tune", "measure the engines on a script's calls, for the choice among them in later runs"),
    "bench": ("jaxdnn.bench.cli", "measure the engines against each other and against peers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0 if all is well, 1 if a check failed, 2 for an error of usage."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="jaxdnn", description="Deep-neural-network primitives for JAX.")
    parser.add_argument("--version", action="version", version=f"jaxdnn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = next((word for word in given if word in COMMANDS), None)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == chosen:
            importlib.import_module(module).add_arguments(command)
    try:
        arguments = parser.parse_args(given)
    except SystemExit as stop:  # argparse has printed why
        return int(stop.code or 0)
    if arguments.command is None:
        parser.print_help(sys.stderr)  # all commands, a line each
        return 2
    return importlib.import_module(COMMANDS[arguments.command][0]).run(arguments)
