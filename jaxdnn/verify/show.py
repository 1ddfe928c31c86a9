"""What `jaxdnn verify` prints: progress, failures as they come, and the tables at the end."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxdnn.verify.levels import PROCEDURES


def progress(console: Console, items: Iterable[Any], total: int, name: str) -> Iterator[Any]:
    """Passes the items on and shows how many there were: a bar in a terminal, a line every tenth elsewhere."""
    if not console.is_terminal:
        for i, item in enumerate(items, 1):
            if i * 10 // total > (i - 1) * 10 // total:
                console.print(f"{name}: {i} of {total}")
            yield item
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=total)
        for item in items:
            bar.advance(task)
            yield item


def failure(console: Console, name: str, message: str, reproduce: str | None) -> None:
    """A failing cell or procedure, and the line that runs it alone."""
    console.print(f"[bold red]failed[/] {escape(name)}\n       {escape(message)}", soft_wrap=True, highlight=False)
    if reproduce:
        console.print(f"       reproduce: [bold]{escape(reproduce)}[/]", soft_wrap=True, highlight=False)


def verdict(console: Console, passed: bool, text: str) -> None:
    """Prints whether a run passed, and its counts."""
    word = "[bold green]passed[/]" if passed else "[bold red]FAILED[/]"
    console.print(f"{word}: {text}", highlight=False, soft_wrap=True)


def tables(console: Console, document: dict[str, Any]) -> None:
    """The matrix by op, engine and dtype; refusals by reason; levels; controls."""
    for part in _parts(document["cells"], console.width):
        console.print(_matrix(part))
    for reason, count in _refusals(document["cells"]).items():
        console.print(f"[dim]not served: {escape(reason)} ({count} cells)[/]", soft_wrap=True, highlight=False)
    if document["summary"]["predicted"]:
        console.print(_predicted(document["summary"]["predicted"]))
    if document["determinism"]:
        console.print(_determinism(document["determinism"]))
    controls = document["summary"]["controls"]
    if any(controls.values()):
        found = f"{controls['passed']} of {controls['passed'] + controls['failed']}"
        text = f"negative controls (1 x 1 convolutions, whatever ops were selected): {found} planted faults found"
        console.print(text, soft_wrap=True, highlight=False)
    for control in (c for c in document["controls"] if c["status"] == "not run"):
        text = f"negative control of {control['procedure']}: not run here, {control['message']}"
        console.print(f"[dim]{escape(text)}[/]", soft_wrap=True, highlight=False)


def random(console: Console, document: dict[str, Any]) -> None:
    """Random calls by op and engine, the branches of planners that none of them took, and procedures of levels."""
    table = _plain("random calls", "op and engine")
    for status in ("passed", "failed", "refused"):
        table.add_column(status, justify="right")
    table.add_column("dtypes")
    for name, counts in document["by_op"].items():
        words = ", ".join(f"{dtype} {count}" for dtype, count in counts["dtypes"].items())
        table.add_row(name, *(str(counts.get(status, "")) for status in ("passed", "failed", "refused")), words)
    console.print(table)
    if any(document["branches"].values()):
        rare = {name: count for name, count in document["branches"].items() if 0 < count < 3}
        taken = sum(map(bool, document["branches"].values()))
        console.print(f"{taken} of {len(document['branches'])} branches of planners taken", highlight=False)
        for what, names in (("never taken", document["never_taken"]), ("taken once or twice", list(rare))):
            if names:
                console.print(f"[dim]{what}: {escape(', '.join(names))}[/]", soft_wrap=True, highlight=False)
    if document["unknown_branches"]:
        names = escape(", ".join(document["unknown_branches"]))
        console.print(f"[bold red]branches that are not listed[/]: {names}", soft_wrap=True, highlight=False)
    if document["procedures"]:
        words = ", ".join(f"{name} {count}" for name, count in document["procedures"].items())
        others = f"; {document['procedures_not_run']} could not be run" if document["procedures_not_run"] else ""
        console.print(f"procedures of levels: {escape(words)}{others}", soft_wrap=True, highlight=False)
    counts = document["calls"]
    text = ", ".join(f"{counts.get(status, 0)} {status}" for status in ("passed", "failed", "refused"))
    guarded = f"{document['guarded']} in guarded memory"
    verdict(console, document["passed"], f"{text}; {guarded}; {document['seconds']} s")


def mesh(console: Console, document: dict[str, Any]) -> None:
    """Prints what each sharded axis makes an op and its pullback communicate, by line of the table, level and mesh."""
    title = "collectives, forward/backward, by sharded axis: - none, h neighbours, + sum, g gather, t all to all"
    by_line: dict[str, dict[Any, Any]] = collections.defaultdict(dict)
    for line in document["lines"]:
        by_line[line["line"]][line["kind"], line["level"], line["dtype"]] = line
    variants = list(dict.fromkeys(key for found in by_line.values() for key in found))
    table = _plain(title, "op", "needs", *(" ".join(variant) for variant in variants))
    for name, found in by_line.items():
        table.add_row(name, _signs(next(iter(found.values()))["needs"]), *(_cell(found.get(v)) for v in variants))
    console.print(table)
    for reason, count in document["refusals"].items():
        console.print(f"[dim]not guaranteed: {escape(reason)} ({count})[/]", soft_wrap=True, highlight=False)
    counts = ", ".join(f"{count} {status}" for status, count in document["counts"].items())
    verdict(console, document["passed"], f"{counts}; {document['seconds']} s")


def _signs(by_letter: dict[str, str]) -> str:
    """The axes with the same communication, joined: "NC -/- HW h/h"."""
    groups: dict[str, str] = collections.defaultdict(str)
    for letter, signs in by_letter.items():
        groups[signs] += letter
    return " ".join(f"{letters} {signs}" for signs, letters in groups.items())


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    if line["status"] == "failed":
        return f"[bold red]{escape(_signs(line['found']))}[/]"
    if line["status"] == "refused":
        return "[dim]not guaranteed[/]"
    same = all(line["needs"].get(letter) == signs for letter, signs in line["found"].items())
    return "[green]as needed[/]" if same else _signs(line["found"])


def _refusals(cells: list[dict[str, Any]]) -> dict[str, int]:
    return collections.Counter(f"{c['engine']}: {c['message']}" for c in cells if c["status"] == "refused")


def _parts(cells: list[dict[str, Any]], width: int) -> Iterator[list[dict[str, Any]]]:
    """The cells of as many ops at a time as there is room for, a column each."""
    ops, used = [], 0
    for op in dict.fromkeys(cell["op"] for cell in cells):
        needed = max(len(op.removeprefix("conv_")), 10) + 1
        if ops and 18 + used + needed > width:
            yield [cell for cell in cells if cell["op"] in ops]
            ops, used = [], 0
        ops.append(op)
        used += needed
    if ops:
        yield [cell for cell in cells if cell["op"] in ops]


def _matrix(cells: list[dict[str, Any]]) -> Table:
    """The number of cells that passed and the worst error over its bound, for each engine and dtype, by op."""
    groups: dict[Any, dict[str, list[dict[str, Any]]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for cell in cells:
        if cell["status"] != "refused":
            groups[cell["engine"], cell["dtype"]][cell["op"]].append(cell)
    ops = list(dict.fromkeys(cell["op"] for cell in cells))
    table = _plain("cells passed, and their largest error over bound", "engine", "dtype")
    for op in ops:
        table.add_column(op.removeprefix("conv_"), justify="right")
    for key in sorted(groups, key=lambda k: list(dict.fromkeys(e for e, _ in groups)).index(k[0])):
        table.add_row(*key, *(_group(groups[key][op]) if op in groups[key] else "" for op in ops))
    return table


def _plain(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    table.header_style = "dim"
    return table


def _group(cells: list[dict[str, Any]]) -> str:
    failed = sum(c["status"] == "failed" for c in cells)
    if failed:
        return f"[bold red]{failed}/{len(cells)} FAIL[/]"
    worst = max(c["ratio"] or 0 for c in cells)
    return f"{len(cells)} [dim]{'0' if worst == 0 else f'{worst:.2g}':>6}[/]"


def _predicted(groups: list[dict[str, Any]]) -> Table:
    """The number of outputs that were compared with the bits that the stated order of additions predicts."""
    table = _plain("outputs equal to their predicted bits", "op", "engine", "dtype")
    table.add_column("outputs", justify="right")
    for g in groups:
        count = f"[bold red]{g['failed']} checks failed[/]" if g["failed"] else f"{g['outputs']:,}"
        table.add_row(g["op"], g["engine"], g["dtype"], count)
    return table


def _determinism(trials: list[dict[str, Any]]) -> Table:
    """A column for each level: the number of runs in which its procedures found no difference."""
    heads = {
        "run_to_run": "repeats",
        "batch_invariant": "batches",
        "mesh_invariant": "meshes",
        "portable": "definition",
    }
    table = _plain("determinism: runs compared bit for bit", "op", "engine", "dtype")
    table.padding = (0, 0, 0, 0)  # so that it fits into 80 columns; the box has a space between two
    for name in ("guarantees", *(heads[level] for level in PROCEDURES)):
        table.add_column(name, justify="left" if name == "guarantees" else "right", no_wrap=True)
    rows: dict[Any, dict[str, list[dict[str, Any]]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for t in trials:
        dtype = " ".join((t["dtype"], *t["variant"].replace("traced-", "traced ").split("/")))  # words, to fold between
        rows[t["op"], t["engine"], dtype, t["declared"]][t["level"]].append(t)
    last: tuple[str, str] = ("", "")
    for (op, engine, *rest), by_level in rows.items():
        named = ("", "") if (op, engine) == last else (op, engine)
        table.add_row(*named, *rest, *(_runs(by_level[level]) for level in PROCEDURES))
        last = op, engine
    return table


def _runs(trials: list[dict[str, Any]]) -> str:
    if any(t["status"] == "failed" for t in trials):
        return "[bold red]failed[/]"
    runs = sum(t["runs"] for t in trials)
    return f"[green]{runs}[/]" if runs else ("[dim]not run[/]" if trials else "")
