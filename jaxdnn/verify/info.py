"""`jaxdnn info`: devices, versions, and for every engine what it serves here and why not the rest."""

import argparse
import collections
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxdnn import engines
from jaxdnn.verify import cases, checks, environment
from jaxdnn.verify.cases import Case
from jaxdnn.verify.geometries import Geometry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `jaxdnn info`."""
    parser.add_argument("--platform", choices=["cpu", "gpu"], help="default: the one that JAX chooses")


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables."""
    environment.choose(arguments.platform, None)
    console = Console()
    here = environment.describe(checks.flushes_subnormals())
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name in ("jaxdnn", "revision", *environment.PACKAGES, "python", "system", "platform"):
        facts.add_row(name, str(here[name]))
    facts.add_row("devices", f"{len(here['devices'])} x {here['device_kind']}")
    facts.add_row("subnormals", "flushed to zero" if here["flushes_subnormals"] else "kept")
    console.print(facts)
    for op, primitive in cases.ENGINES_OF.items():
        if op == primitive:
            console.print(_engines(op))
    return 0


def _engines(op: str) -> Table:
    """One row an engine and dtype: whether it serves the op's plain call, what it promises, or why not."""
    table = Table(title=op, title_justify="left", title_style="bold", header_style="dim")
    for column in ("engine", "dtype", "serves", "determinism", "adds in", "bits predicted", "notes or reason"):
        table.add_column(column, overflow="fold")
    notes = {e.name: e.notes for e in engines.registered(op)}
    for engine in cases.engines_of(op):
        for told, dtypes in _grouped(op, engine).items():
            level, accumulation, modelled, refusal = told
            words = "; ".join(notes.get(engine, ())) if refusal is None else refusal
            serves = "[green]yes[/]" if refusal is None else "[red]no[/]"
            promised = (level, accumulation, modelled or "no") if refusal is None else ("", "", "")
            table.add_row(engine, ", ".join(dtypes), serves, *promised, words)
    return table


def _grouped(op: str, engine: str) -> dict[Any, list[str]]:
    """Dtypes for which an engine says the same."""
    groups: dict[Any, list[str]] = collections.defaultdict(list)
    for dtype in (d for d in cases.DTYPES if d != "int32"):
        case = Case(op, engine, dtype, "NHWC", None, Geometry("info", 8, (56, 56), 64, 64, (3, 3), padding=1))
        told = checks.facts(case)
        reason = told.refusal.partition(", and these are")[0] if told.refusal else None
        groups[told.level, told.accumulation, ", ".join(told.modelled), reason].append(dtype)
    return groups
