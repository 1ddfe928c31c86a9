"""`jaxdnn info`: devices, versions, and for every engine what it serves here and why not the rest."""

import argparse
import collections
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxdnn import engines
from jaxdnn.verify import cases, checks, environment
from jaxdnn.verify.cases import Case
from jaxdnn.verify.geometries import Geometry

# A layer of an ordinary network, whose sizes suit every engine: what an engine says of it is what it says in general.
TYPICAL = Geometry("typical", 8, (56, 56), 64, 64, (3, 3), padding=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `jaxdnn info`."""
    parser.add_argument("--platform", choices=["cpu", "gpu"], help="default: the one that JAX chooses")


def run(arguments: argparse.Namespace) -> int:
    """Prints the versions, then the engines; ops of which the engines say the same share their lines."""
    environment.choose(arguments.platform, None)
    console = Console()
    here = environment.describe(checks.flushes_subnormals())
    facts = _columns()
    for name in ("jaxdnn", "revision", *environment.PACKAGES, "python", "system", "platform"):
        facts.add_row(name, str(here[name]))
    facts.add_row("devices", f"{len(here['devices'])} x {here['device_kind']}")
    facts.add_row("subnormals", "flushed to zero" if here["flushes_subnormals"] else "kept")
    console.print(facts)

    told: dict[Any, list[str]] = collections.defaultdict(list)
    for op in dict.fromkeys(cases.ENGINES_OF.values()):
        told[tuple((engine, line) for engine in cases.engines_of(op) for line in _lines(op, engine))].append(op)
    for rows, ops in told.items():
        console.print(f"\n[bold]{', '.join(ops)}[/], a {TYPICAL.taps[0]} x {TYPICAL.taps[1]} layer", highlight=False)
        table, last = _columns(), ""
        for engine, line in rows:
            table.add_row("" if engine == last else engine, line)
            last = engine
        console.print(table)
    return 0


def _columns() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _lines(op: str, engine: str) -> list[str]:
    """What an engine says of each dtype, those of which it says the same together, and its notes."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for dtype in (d for d in cases.DTYPES if d != "int32"):
        groups[_line(checks.facts(Case(op, engine, dtype, "NHWC", None, TYPICAL)))].append(dtype)
    lines = [f"{' '.join(dtypes)}: {line}" for line, dtypes in groups.items()]
    notes = next(e.notes for e in engines.registered(op) if e.name == engine)
    return [*lines, *(f"[dim]{escape(note)}[/]" for note in notes)]


def _line(told: checks.Facts) -> str:
    if told.refusal is not None:
        # Which dtypes these are stands before it already.
        return f"[red]no[/], {escape(told.refusal.partition(', and these are')[0])}"
    words = [f"[green]{told.level}[/]", f"adds in {told.accumulation}"]
    words += [f"bits predicted on {', '.join(told.modelled)}"] if told.modelled else []
    return ", ".join(words)
