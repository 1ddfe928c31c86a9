"""`jaxdnn info`: devices, versions, and for every engine what it serves here and why not the rest."""

import argparse
import collections
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxdnn.verify import environment, families
from jaxdnn.verify.case import DTYPES, Facts, flushes_subnormals
from jaxdnn.verify.families import Family


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `jaxdnn info`."""
    parser.add_argument("--platform", choices=["cpu", "gpu"], help="default: the one that JAX chooses")


def run(arguments: argparse.Namespace) -> int:
    """Prints the versions, then the engines; ops of which the engines say the same share their lines."""
    environment.choose(arguments.platform, None)
    console = Console()
    here = environment.describe(flushes_subnormals())
    facts = _columns()
    for name in ("jaxdnn", "revision", *environment.PACKAGES, "python", "system", "platform"):
        facts.add_row(name, str(here[name]))
    facts.add_row("devices", f"{len(here['devices'])} x {here['device_kind']}")
    facts.add_row("subnormals", "flushed to zero" if here["flushes_subnormals"] else "kept")
    console.print(facts)

    told: dict[Any, list[str]] = collections.defaultdict(list)
    for op in families.ops():
        family = families.of(op)
        lines = tuple((engine, line) for engine in family.engines_of(op) for line in _lines(family, op, engine))
        told[family.typical_name, lines].append(op)
    for (typical, rows), ops in told.items():
        console.print(f"\n[bold]{', '.join(ops)}[/], {typical}", highlight=False)
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


def _lines(family: Family, op: str, engine: str) -> list[str]:
    """What an engine says of each dtype, those of which it says the same together, and its notes."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    notes: tuple[str, ...] = ()
    for dtype in (d for d in DTYPES if d != "int32"):
        case = family.typical(op, engine, dtype)
        if case is not None:
            told = family.facts(case)
            groups[_line(told)].append(dtype)
            notes = told.notes
    lines = [f"{' '.join(dtypes)}: {line}" for line, dtypes in groups.items()]
    return [*lines, *(f"[dim]{escape(note)}[/]" for note in notes)]


def _line(told: Facts) -> str:
    if told.refusal is not None:
        # Which dtypes these are stands before it already.
        return f"[red]no[/], {escape(told.refusal.partition(', and these are')[0])}"
    words = [f"[green]{told.level}[/]", f"adds in {told.accumulation}"]
    words += [f"bits predicted on {', '.join(told.modelled)}"] if told.modelled else []
    return ", ".join(words)
