"""`jaxdnn verify`: runs the matrix and the determinism procedures, and writes what they found."""

import argparse
import concurrent.futures
import contextlib
import difflib
import fnmatch
import functools as ft
import json
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxdnn._src.cases.case import DTYPES as EVERY_DTYPE
from jaxdnn._src.cases.case import Result, flushes_subnormals
from jaxdnn._src.cases.subject import Subject
from jaxdnn._src.core import engines, files
from jaxdnn._src.core.determinism import LEVELS
from jaxdnn.verify import (
    controls,
    environment,
    levels,
    matrix,
    mesh,
    page,
    random,
    random_call,
    random_report,
    report,
    show,
    turns,
)
from jaxdnn.verify.random_report import Report

DTYPES = tuple(d for d in EVERY_DTYPE if d != "int32")
SELECT = ("op", "engine", "dtype", "level", "case")
THREADS = 32  # at most, however many processors there are
WRITTEN_EVERY = 3.0  # seconds, while random calls or shardings run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `jaxdnn verify`."""
    several = {
        "op": (matrix.ops(), "only these ops, and all that they guarantee; `jaxdnn info` lists them"),
        "engine": (matrix.engines(), f"only these engines: {', '.join(matrix.engines())}"),
        "dtype": (DTYPES, f"only these dtypes: {', '.join(DTYPES)}"),
        "level": (LEVELS, f"only these levels' procedures: {', '.join(LEVELS[1:])}; or {LEVELS[0]}: none"),
    }
    for name, (choices, text) in several.items():
        parser.add_argument(f"--{name}", nargs="+", choices=choices, metavar=name.upper(), help=text)
    parser.add_argument("--platform", choices=["cpu", "gpu"], help="default: the one that JAX chooses")
    parser.add_argument("--devices", type=int, metavar="N", help="how many devices a CPU simulates (default 2)")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick",
        dest="extent",
        action="store_const",
        const="quick",
        help="the core of the matrix, on a CPU its turn's part",
    )
    extent.add_argument("--full", dest="extent", action="store_const", const="full", help="everything, many repeats")
    parser.set_defaults(extent="standard")
    rotation = parser.add_mutually_exclusive_group()
    said = f"on a CPU, and where nothing is selected, a run takes the part of its turn, one of {turns.TURNS} (default: "
    said += "the number of commits of the checkout, without them that of days)"
    rotation.add_argument("--turn", type=int, metavar="N", help=said)
    rotation.add_argument("--all", action="store_true", help="every cell of the extent, whichever turn it is")
    parser.add_argument("--seed", type=int, default=0, help="of all random data and geometries (default 0)")
    parser.add_argument(
        "--case",
        action="append",
        metavar="ID",
        help="only this case or determinism procedure, or those of a pattern; several may be given",
    )
    parser.add_argument("--random", type=_count, metavar="N", help="N calls drawn at random in place of the matrix")
    parser.add_argument(
        "--mesh",
        action="store_true",
        help="in place of the matrix: every op sharded over all devices, with one device's",
    )
    parser.add_argument("--index", type=int, default=0, help="the first random call's number (default 0)")
    parser.add_argument("--towards", metavar="BRANCH", help="random calls that take this branch of a planner")
    parser.add_argument("--workers", type=_count, metavar="N", help="processes that run random calls")
    parser.add_argument("--under", metavar="COMMAND", help="a tool that they run under: compute-sanitizer, say")
    parser.add_argument("--list", action="store_true", help="print the ids of the cases and stop")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything that was found here")
    parser.add_argument(
        "--html", type=Path, metavar="PATH", help="write the report here (default jaxdnn-report.html; not for --case)"
    )


def _count(text: str) -> int:
    """A number of calls or processes."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the selected cells and procedures. Returns 0, 1 if anything failed, 2 for an unknown case."""
    if reason := _misplaced(arguments):
        print(f"jaxdnn verify: {reason}", file=sys.stderr)
        return 2
    environment.choose(arguments.platform, arguments.devices)
    if arguments.random is not None:
        return _run_random(arguments)
    if arguments.mesh:
        return _run_mesh(arguments)
    arguments.turn, counted = _turn(arguments)
    whole, procedures = _choose(arguments)
    chosen = whole if arguments.turn is None else matrix.of_turn(whole, arguments.turn)
    if arguments.list:
        print("\n".join([c.id for c in chosen] + procedures))
        return 0
    unknown = _unknown(arguments, chosen, procedures)
    if unknown:
        print(unknown, file=sys.stderr)
        return 2
    compilations = _count_compilations()
    console, start, here = _begun(len(chosen), "cells")
    results, trials = _execute(arguments, chosen, procedures, here["flushes_subnormals"], console)
    if procedures and not trials:
        print(f"jaxdnn verify: no engine here guarantees what {', '.join(procedures)} tests.", file=sys.stderr)
        return 2
    finished = {
        "command": _line(*_words(arguments)),
        "extent": arguments.extent,
        "turn": arguments.turn,
        "counted": counted,
        "left": len(whole) - len(chosen),
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - start, 1),
        "compilations": len(compilations),
    }
    document = report.document(here, finished, results, trials, lambda name: _reproduce(arguments, name))
    show.tables(console, document)
    _write(arguments, document, console)
    return 0 if document["summary"]["passed"] else 1


def _run_random(arguments: argparse.Namespace) -> int:
    """Runs calls drawn at random. Returns 0, or 1 if one failed."""
    # What this process asks of a GPU is what it is; the memory is for the processes that run the calls.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    console, start, here = _begun(arguments.random, "random calls")
    words = ["--random", str(arguments.random), *_words(arguments), *_given(arguments, "index", "towards", "under")]
    found: list[Report] = []
    reachable = random_call.reachable(arguments.op, arguments.engine)

    def document(*, finished: bool) -> dict[str, Any]:
        seconds = round(time.perf_counter() - start, 1)
        made = {"command": _line(*words), "environment": here, "seconds": seconds, "finished": finished}
        made |= random_report.summary(found, reachable)
        for failed in made["failed"]:
            failed["reproduce"] = _reproduce_random(arguments, failed["index"], failed["towards"])
        return made

    try:
        calls = random.run(arguments, here, reachable)
    except ValueError as error:
        print(f"jaxdnn verify: {error}", file=sys.stderr)
        return 2
    for call in _kept(arguments.json, show.progress(console, calls, arguments.random, "calls"), found, document):
        if call.status == "failed":
            line = _reproduce_random(arguments, call.index, call.towards)
            show.failure(console, f"{call.index} {call.id}", call.message, line)
    made = document(finished=True)
    show.random(console, made)
    return 0 if made["passed"] else 1


def _kept(path: Path | None, ones: Iterable[Any], found: list[Any], document: Callable[..., Any]) -> Iterator[Any]:
    """Each of `ones`, appended to `found`; meanwhile and at the end `document` is written, as a run may be cut off."""
    written = -WRITTEN_EVERY
    for one in ones:
        found.append(one)
        yield one
        if path and time.perf_counter() - written > WRITTEN_EVERY:
            _write_json(path, document(finished=False))
            written = time.perf_counter()
    if path:
        _write_json(path, document(finished=True))


def _reproduce_random(arguments: argparse.Namespace, index: int, towards: str | None) -> str:
    words = ["--random", "1", "--index", str(index), *_words(arguments), *_given(arguments, "under")]
    return _line(*words, *(["--towards", towards] if towards else []))


def _misplaced(arguments: argparse.Namespace) -> str | None:
    """Why the arguments (of random calls, of meshes and of the matrix) cannot be combined; None if they can."""
    of_matrix = [n for n in ("turn", "all") if getattr(arguments, n) not in (None, False)]
    if arguments.mesh:
        given = [n for n in ("random", "engine", "dtype", "html") if getattr(arguments, n)] + of_matrix
        return f"`--{given[0]}` does not go with `--mesh`: `--op`, `--level` and `--case` select." if given else None
    selected = [n for n in SELECT if getattr(arguments, n)]
    if arguments.turn is not None and selected:
        return f"`--turn` is for the whole matrix: it does not go with `--{selected[0]}`."
    of_random = [n for n in ("index", "towards", "workers", "under") if getattr(arguments, n)]
    if arguments.random is None:
        return f"`--{of_random[0]}` is for random calls: it needs `--random N`." if of_random else None
    given = [n for n in ("dtype", "level", "case", "list", "html") if getattr(arguments, n)] + of_matrix
    given += [arguments.extent] if arguments.extent != "standard" else []
    if given:
        return f"`--{given[0]}` is for the matrix: of random calls `--op` and `--engine` select."
    if arguments.under and "--log-file" in arguments.under:
        return (
            "`--under` must be a tool that writes to its standard streams, which tell the call that was running: "
            "leave `--log-file` out."
        )
    return None


def _run_mesh(arguments: argparse.Namespace) -> int:
    """Runs every op on meshes of all devices. Returns 0, 1 if something failed, 2 if there is nothing to run."""
    chosen = mesh.trials()
    for name in ("op", "level"):
        wanted = getattr(arguments, name)
        chosen = [t for t in chosen if not wanted or getattr(t, name) in wanted]
    patterns = arguments.case or ["*"]
    chosen = [t for t in chosen if any(fnmatch.fnmatchcase(t.id, pattern) for pattern in patterns)]
    if arguments.list:
        print("\n".join(t.id for t in chosen))
        return 0
    if not chosen or jax.device_count() < 2:
        why = "needs two devices or more" if chosen else "has no line that was asked for"
        print(f"jaxdnn verify: `--mesh` {why}.", file=sys.stderr)
        return 2
    console, start, here = _begun(len(chosen), "shardings")
    found: list[mesh.Outcome] = []

    def document(*, finished: bool) -> dict[str, Any]:
        made = {"command": _line("--mesh", *_words(arguments)), "environment": here, "finished": finished}
        made |= {"seconds": round(time.perf_counter() - start, 1), **mesh.summary(found)}
        for failed in made["failed"]:
            failed["reproduce"] = _reproduce_mesh(arguments, failed["id"])
        return made

    with _threads(os.cpu_count() or 1) as pool:
        outcomes = show.progress(console, pool.map(mesh.run, chosen), len(chosen), "shardings")
        for outcome in _kept(arguments.json, outcomes, found, document):
            if outcome.status == "failed":
                name = outcome.trial.id
                show.failure(console, name, outcome.message, _reproduce_mesh(arguments, name))
    made = document(finished=True)
    show.mesh(console, made)
    return 0 if made["passed"] else 1


def _reproduce_mesh(arguments: argparse.Namespace, name: str) -> str:
    return _line("--mesh", "--case", name, *_setting(arguments))


def _turn(arguments: argparse.Namespace) -> tuple[int | None, str | None]:
    """The turn whose part is run, and what it counts; None for everything: on a GPU, if full, of what is selected."""
    whole = arguments.all or arguments.extent == "full" or any(getattr(arguments, name) for name in SELECT)
    if arguments.turn is not None or whole or engines.platform() != "cpu":
        return arguments.turn, None
    return turns.current(Path(__file__))


def _choose(arguments: argparse.Namespace) -> tuple[list[Any], list[str]]:
    """The cases, and the ids of the determinism procedures that are asked for by id."""
    if arguments.case:
        found = [c for name in arguments.case for c in matrix.matching(name, arguments.seed)]
        return list(dict.fromkeys(found)), [n for n in arguments.case if n.startswith("determinism/")]
    wanted = {"ops": arguments.op or matrix.ops(), "dtypes": arguments.dtype or DTYPES}
    every = matrix.cases(arguments.extent, arguments.seed, **wanted)
    return [c for c in every if not arguments.engine or c.engine in arguments.engine], []


def _unknown(arguments: argparse.Namespace, chosen: list[Any], procedures: list[str]) -> str | None:
    known = {c.id for c in chosen} | set(procedures)
    for name in arguments.case or ():
        if name not in known and not fnmatch.filter(known, name):
            every = [c.id for c in matrix.cases("full", arguments.seed, ops=matrix.ops(), dtypes=DTYPES)]
            close = difflib.get_close_matches(name, every, n=3, cutoff=0.3)
            return f"jaxdnn verify: `--case` must be the id of a case, got {name!r}; close ones: {', '.join(close)}."
    return None


def _execute(
    arguments: argparse.Namespace, chosen: list[Any], procedures: list[str], flush: bool, console: Console
) -> tuple[list[Result], list[levels.Trial]]:
    wanted = tuple(arguments.level or LEVELS)
    reported = ft.partial(_reported, arguments, console)
    run = ft.partial(matrix.run, seed=arguments.seed, flush=flush)
    # Compilation takes most of the time, and XLA compiles outside of Python's lock, for which twice as many workers as
    # there are processors wait. All wait in one queue, the long procedures before the short cells, so that no worker is
    # idle before the end.
    with _threads(2 * (os.cpu_count() or 1)) as pool:
        tasks = [] if arguments.case else [pool.submit(reported, controls.run(wanted, arguments.seed))]
        for subject in _subjects(arguments, procedures):
            trials = levels.trials(subject, arguments.extent, wanted, procedures)
            tasks.append(pool.submit(reported, trials))
        cells = [pool.submit(reported, map(run, [case])) for case in chosen]
        done = concurrent.futures.as_completed([*tasks, *cells])
        for future in show.progress(console, done, len(tasks) + len(cells), "cells and determinism tests"):
            future.result()
    return [r for f in cells for r in f.result()], [t for f in tasks for t in f.result()]


def _subjects(arguments: argparse.Namespace, procedures: list[str]) -> Iterator[Subject]:
    if arguments.case and not procedures:
        return
    ops = [op for op in arguments.op or matrix.ops() if not procedures or any(_may_be_of(op, p) for p in procedures)]
    given = (ops, arguments.engine or matrix.engines(), arguments.dtype or DTYPES)
    # For named ops all guarantees are tested, and turns take all in time; a run of everything at once takes a sample.
    every = bool(procedures or arguments.op) or arguments.turn is not None
    found = matrix.subjects(*given, arguments.extent, arguments.seed, every=every)
    for subject in found if arguments.turn is None else matrix.subjects_of_turn(found, arguments.turn):
        if not procedures or any(levels.is_named(subject, procedure, procedures) for procedure in levels.EVERY):
            yield subject


def _may_be_of(op: str, procedure: str) -> bool:
    """Whether an id or a pattern of procedures may match an op: they agree up to the pattern's first wildcard."""
    said = re.split(r"[*?[]", procedure)[0]
    begins = f"determinism/{op}/"
    return said.startswith(begins) or begins.startswith(said)


def _reported(arguments: argparse.Namespace, console: Console, found: Iterable[Any]) -> list[Any]:
    """The results of cells or procedures. One that failed is printed at once."""
    collected = []
    for one in found:
        collected.append(one)
        if one.status == "failed":
            planted = isinstance(one, levels.Trial) and one.control
            show.failure(console, one.id, one.message, None if planted else _reproduce(arguments, one.id))
    return collected


def _count_compilations() -> list[None]:
    """A list that grows by one with each compilation by XLA."""
    seen: list[None] = []
    lock = threading.Lock()

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            with lock:
                seen.append(None)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seen


@contextlib.contextmanager
def _threads(count: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """A pool of threads, THREADS at most; when an exception ends the run, waiting tasks are cancelled."""
    with concurrent.futures.ThreadPoolExecutor(min(count, THREADS)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _begun(count: int, what: str) -> tuple[Console, float, dict[str, Any]]:
    """Prints a run's heading: where it prints, when it began, and the environment that it runs in."""
    # A file is no terminal of 80 columns: its tables keep their words whole.
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
    start, here = time.perf_counter(), environment.describe(flushes_subnormals())
    device = f"{len(here['devices'])} x {here['device_kind']}"
    versions = f"jaxdnn {here['jaxdnn']}, jax {here['jax']}, numpy {here['numpy']}, Python {here['python']}"
    heading = f"[bold]jaxdnn verify[/] on {device}: {count} {what} ({versions})"
    console.print(heading, highlight=False, soft_wrap=True)
    return console, start, here


def _words(arguments: argparse.Namespace) -> list[str]:
    """The command-line words that determine this run; those for its output are left out."""
    words = []
    for name in ("op", "engine", "dtype", "level"):
        words += [f"--{name}", *getattr(arguments, name)] if getattr(arguments, name) else []
    for name in arguments.case or ():
        words += ["--case", name]
    words += [f"--{arguments.extent}"] if arguments.extent != "standard" else []
    words += ["--all"] if arguments.all else []
    words += [] if arguments.turn is None else ["--turn", str(arguments.turn)]
    return [*words, *_setting(arguments)]


def _setting(arguments: argparse.Namespace) -> list[str]:
    return ["--seed", str(arguments.seed), *_given(arguments, "platform", "devices")]


def _given(arguments: argparse.Namespace, *names: str) -> list[str]:
    """The words for those arguments of one value that are given."""
    values = ((name, getattr(arguments, name)) for name in names)
    return [word for name, value in values if value for word in (f"--{name}", str(value))]


def _line(*words: str) -> str:
    """The command line of these words."""
    return shlex.join(["jaxdnn", "verify", *words])


def _reproduce(arguments: argparse.Namespace, name: str) -> str:
    # Of a determinism procedure the extent is part: it sets repeats and batch sizes.
    extent = [f"--{arguments.extent}"] if name.startswith("determinism/") and arguments.extent != "standard" else []
    return _line("--case", name, *extent, *_setting(arguments))


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _write(arguments: argparse.Namespace, document: dict[str, Any], console: Console) -> None:
    if arguments.json:
        _write_json(arguments.json, document)
    found = document["summary"]
    counts, bits = found["cells"], found["determinism"]
    text = f"{counts['passed']} cells passed, {counts['failed']} failed, {counts['refused']} not served; "
    text += f"{bits['passed']} determinism procedures passed, {bits['failed']} failed; "
    text += f"{document['run']['compilations']} compilations, {document['run']['seconds']} s"
    show.verdict(console, found["passed"], text)
    if document["run"]["turn"] is not None:
        console.print(turns.said(**document["run"]), highlight=False, soft_wrap=True)
    path = arguments.html or (None if arguments.case else Path("jaxdnn-report.html"))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.render(document))
        console.print(f"report: {path.resolve()}", highlight=False, soft_wrap=True)
