"""`jaxdnn info`: devices, versions, and for every engine what it serves here and why not the rest."""

import argparse
import collections
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxdnn._src.cases.case import DTYPES, Facts, flushes_subnormals
from jaxdnn._src.cases.family import Family
from jaxdnn._src.core.explain import ACCUMULATORS
from jaxdnn.verify import environment, matrix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `jaxdnn info`."""
    parser.add_argument("--platform", choices=["cpu", "gpu"], help="default: the one that JAX chooses")


def run(arguments: argparse.Namespace) -> int:
    """Prints the versions, then the engines; ops with the same facts share their lines."""
    environment.choose(arguments.platform, None)
    console = Console()
    here = environment.describe(flushes_subnormals())
    names = ("jaxdnn", "revision", *environment.PACKAGES, "python", "system", "platform")
    facts = [(name, str(here[name])) for name in names]
    facts.append(("devices", f"{len(here['devices'])} x {here['device_kind']}"))
    facts.append(("subnormals", "flushed to zero" if here["flushes_subnormals"] else "kept"))
    _print(console, facts)

    by_facts: dict[Any, list[str]] = collections.defaultdict(list)
    for op in matrix.ops():
        family = matrix.of(op)
        lines = tuple((engine, line) for engine in family.engines_of(op) for line in _lines(family, op, engine))
        by_facts[family.typical_name, lines].append(op)
    for (typical, rows), ops in by_facts.items():
        console.print(f"\n[bold]{', '.join(PUBLIC.get(op, op) for op in ops)}[/]", highlight=False, soft_wrap=True)
        console.print(f"asked about {typical}", highlight=False, soft_wrap=True)
        before = ["", *(engine for engine, _ in rows)]
        _print(
            console,
            [("" if engine == last else engine, line) for (engine, line), last in zip(rows, before, strict=False)],
        )
    return 0


# What users call, and with what, of the primitives that are no public ops.
PUBLIC = {
    "fused_dropout": "dropout with a bias, an activation or a residual",
    "fused_dropout_tangent": "its derivative along a tangent",
    "fused_dropout_dgrad": "the gradient of dropout with a bias, an activation or a residual",
    "norm_activated": "batch_norm and others with an activation",
    "norm_activated_dgrad": "their gradients",
}


def _print(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Prints two columns; lines are wrapped on a terminal only."""
    if not console.is_terminal:
        width = max((len(name) for name, _ in rows), default=0)
        for name, line in rows:
            console.print(f"{name:{width}}  {line}", highlight=False, soft_wrap=True)
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _lines(family: Family, op: str, engine: str) -> list[str]:
    """One line for each group of dtypes for which an engine has the same facts, and the engine's notes."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    notes: tuple[str, ...] = ()
    for dtype in (d for d in DTYPES if d != "int32"):
        case = family.typical(op, engine, dtype)
        if case is not None:
            facts = family.facts(case)
            groups[_line(facts)].append(dtype)
            notes = facts.notes
    lines = [f"{' '.join(dtypes)}: {line}" for line, dtypes in groups.items()]
    return [*lines, *(f"[dim]{escape(note)}[/]" for note in notes)]


def _line(facts: Facts) -> str:
    if facts.refusal is not None:
        # The line begins with these dtypes already.
        return f"[red]no[/], {escape(facts.refusal.partition(', and these are')[0])}"
    accumulator = ACCUMULATORS.get(facts.accumulation, facts.accumulation)
    words = [f"[green]{facts.level}[/]", f"accumulates in {accumulator}"]
    words += [f"the reference predicts its bits on {', '.join(facts.modelled)}"] if facts.modelled else []
    return ", ".join(words)
