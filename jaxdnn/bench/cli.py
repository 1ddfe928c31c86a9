"""The command `jaxdnn bench`: every engine and peer on the same operands in one process, as a table and as JSON."""

import argparse
import collections
import dataclasses
import datetime
import functools as ft
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import rich
from rich.box import SIMPLE
from rich.table import Table

from jaxdnn._src import families
from jaxdnn._src.cases import networks
from jaxdnn._src.cases.timed import Between, Case, Clock, Prepared
from jaxdnn._src.core import engines, files, selection, timing, tuned
from jaxdnn._src.core.explain import traced_calls
from jaxdnn._version import __version__
from jaxdnn.bench import graph, ops, peers
from jaxdnn.bench.lines import joined
from jaxdnn.bench.train import measure as train

CORPUS, PEERS = "corpus", ("lax", "single", "optax", "cudnn", "torch")
TOTALS = "all others", "all that are held out"  # of the summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `jaxdnn bench`."""
    on_gpu = jax.default_backend() == "gpu"
    whole = (
        "what to measure: the ops of a family, with `graph` operation graphs, with `train` whole training steps, with "
        "`ops` every op and plain JAX"
    )
    parser.add_argument("op", choices=(*families.with_timed(), "graph", "ops", "train"), help=whole)
    parser.add_argument(
        "--family",
        action="append",
        help="only the cases of these groups, or `corpus`: the layers of published networks, by network, in every "
        "engine that serves them; or those of single networks (default: all but the networks)",
    )
    parser.add_argument("--case", action="append", help="only the cases of these names (default: all)")
    parser.add_argument("--passes", nargs="+", help="only these, such as forward (default: all)")
    parser.add_argument("--engine", action="append", choices=engines.names(), help="these (default: the chosen one)")
    parser.add_argument(
        "--dtype", default="bfloat16" if on_gpu else "float32", help="of the operands (default: %(default)s here)"
    )
    parser.add_argument("--batch", type=int, help="images (default: the case's own on a GPU, 2 elsewhere)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=9 if on_gpu else 15,
        help="timings, of which the median counts (default: %(default)s here)",
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="what to compare with (default: all)")
    parser.add_argument(
        "--seconds",
        type=float,
        help="measure in an order in which any beginning is a sample of all, and nothing after so many seconds",
    )
    parser.add_argument("--part", type=_part, metavar="I/N", help="only every N-th case, from the I-th on")
    parser.add_argument(
        "--turns", type=Path, help="a file that processes share, of which one at a time uses the device"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--judge", type=Path, help="measure nothing: what today's choice loses by these results")


@tuned.ignored()
def run(args: argparse.Namespace) -> int:
    """Measures, prints a table while it goes and a summary, and writes the JSON after every row."""
    if args.op == "train":
        return train.run(args, provenance)
    if args.op == "ops":
        return ops.run(args, provenance)
    own, of_networks = graph.CASES, ()
    if args.op != "graph":
        own, of_networks = families.timed(args.op), networks.cases(families.of_layer(args.op))
    if args.judge:
        _print_summary(judged(json.loads(args.judge.read_text()), [*own, *of_networks]))
        return 0
    wanted = args.family or list(dict.fromkeys(case.family for case in own))
    if CORPUS in wanted:
        wanted = [*wanted, *(case.family for case in of_networks)]
    found = [*own, *of_networks]
    for given, known in (
        (args.family, [CORPUS, *(case.family for case in found)]),
        (args.case, [case.name for case in found]),
        (args.passes, [which for case in found for which in case.passes]),
    ):
        if unknown := sorted(set(given or ()) - set(known)):
            choices = ", ".join(dict.fromkeys(known))
            print(f"`bench {args.op}` knows no {', '.join(unknown)}; there are {choices}", file=sys.stderr)
            return 2
    cases = [case for case in found if case.family in wanted and (not args.case or case.name in args.case)]
    until = time.monotonic() + args.seconds if args.seconds else math.inf
    calls, rows, failed = _calls(cases, args), list[dict[str, Any]](), list[dict[str, Any]]()
    for case, which in calls:
        try:
            compared = case in of_networks or isinstance(case, Between)
            row = _measured(case, which, args, until, compared=compared)
        except TimeoutError as end:
            print(f"{end}; {len(rows)} rows of {len(calls)} passes", file=sys.stderr, flush=True)
            break
        except Exception as error:  # such as too little memory on the device; the other results are not lost
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            print(f"{case.family} {case.name} {which}: {said}", file=sys.stderr, flush=True)
            failed.append({"family": case.family, "case": case.name, "pass": which, "error": said})
        else:
            if row is None:
                continue
            rows.append(row)
            print(_line(row), flush=True)
        if args.json:
            files.write(args.json, json.dumps(_document(rows, failed), indent=1) + "\n")
    _print_summary(rows)
    return int(bool(failed))


@tuned.ignored()
def judged(table: dict[str, Any], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The rows of a file of results that tell engines apart, with the choice as it is now on the file's device."""
    of_name = {(case.family, case.name): case for case in cases}
    found = []
    for row in table["rows"]:
        case, names = of_name.get((row["family"], row["case"])), [name.removeprefix("jaxdnn:") for name in row["ms"]]
        if case is None or not {"hopper", "xla"} <= set(names):
            continue
        operands = jax.eval_shape(ft.partial(case.operands, row["batch"], row["dtype"]), 0)
        calls = traced_calls(case.ours(row["pass"], None), *operands, platform="cuda")
        call = _decisive(case, row["pass"], tuple(calls))
        ranked = selection.ranked(dataclasses.replace(call, device_kind=table["device"]))
        found.append({**row, **_judged(row["ms"], next(e.name for e in ranked if e.name in names))})
    return found


def _part(text: str) -> tuple[int, int]:
    first, count = map(int, text.split("/"))
    if not 0 <= first < count:
        raise ValueError(f"`--part` must be I/N with I from 0 to N - 1, got {text}.")
    return first, count


def _calls(cases: Sequence[Case], args: argparse.Namespace) -> list[tuple[Case, str]]:
    """What is measured, in order.

    Within `--seconds` the networks take turns, and every layer has a pass measured before one has a second pass.
    """
    first, parts = args.part or (0, 1)
    if args.seconds:
        seen, places = collections.Counter[str](), dict[Case, tuple[int, int]]()
        for case in sorted(cases, key=_drawn):
            places[case] = seen[case.family], _drawn(case)
            seen[case.family] += 1
        cases = sorted(cases, key=places.__getitem__)
    found = []
    for case in cases[first::parts]:
        passes = deque(which for which in case.passes if not args.passes or which in args.passes)
        if args.seconds:
            passes.rotate(_drawn(case))
        found += [(nth, case, which) for nth, which in enumerate(passes)]
    if args.seconds:
        found.sort(key=lambda call: call[0])
    return [(case, which) for _, case, which in found]


def _drawn(case: Case) -> int:
    """A number that looks random, and is the same in every process."""
    return zlib.crc32(f"{case.family} {case.name}".encode())


@ft.cache
def _operands(case: Case, batch: int, dtype: str) -> tuple[Callable[..., Any], Any]:
    """What draws a case's operands from a seed, compiled, and their shapes."""
    draw = ft.partial(case.operands, batch, dtype)
    return timing.compiled(draw, [0]), jax.eval_shape(draw, 0)


def _measured(
    case: Case, which: str, args: argparse.Namespace, until: float, *, compared: bool
) -> dict[str, Any] | None:
    """The row of a pass, or None where there is nothing to measure; `compared`, of all engines if none are named."""
    on_gpu = jax.default_backend() == "gpu"
    batch = args.batch or (case.batch if on_gpu else 2)
    timing.in_time(until)
    make, shapes = _operands(case, batch, args.dtype)
    chosen, able = _engines(case, which, shapes)
    names = args.engine or (able if compared else [None])
    ours = {"jaxdnn" if name is None else f"jaxdnn:{name}": case.ours(which, name) for name in names}
    functions = {name: f for name, f in ours.items() if _refusal(name, f, shapes) is None}
    wanted = PEERS if args.peers is None else args.peers
    if not functions or (compared and not args.engine and not wanted and len(functions) == 1):
        return None
    others = {name: f for name, f in case.others(which, batch, args.dtype).items() if name in wanted}
    programs = {name: jax.jit(f).lower(*shapes) for name, f in functions.items()}
    programs |= _lowered(others, shapes)
    functions |= {name: f for name, f in others.items() if name in programs}
    # Where XLA times kernels of libraries on the device to compile a pass, it has to be alone there.
    late = [name for name in functions if case.tuned and name != "jaxdnn:hopper"]
    early = [name for name in programs if name not in late]
    compiled = {name: programs[name].compile() for name in early if name not in others}
    compiled |= _compiled({name: programs[name] for name in early if name in others})
    functions = {name: f for name, f in functions.items() if name in compiled or name in late}
    size = case.bytes(which, batch, jax.numpy.dtype(args.dtype).itemsize)
    of_set = max(size or 0, sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes)))  # some passes read a part
    rotation = min(max(1, timing.ROTATED_BYTES // of_set), timing.MOST_SETS) if on_gpu and size else 1
    copy = None
    with timing.turn(args.turns, until):
        compiled |= {name: programs[name].compile() for name in late}
        timing.in_time(until)
        sets = [make(seed) for seed in range(rotation)]
        own_sets = {name: _own(f, sets) for name, f in functions.items() if isinstance(f, Prepared)}
        refused = [n for n in others if n in functions and not _runs(n, compiled[n], own_sets.get(n, sets)[0])]
        functions = {name: f for name, f in functions.items() if name not in refused}
        given = [compiled[name] for name in functions]
        own = {i: own_sets[name] for i, name in enumerate(functions) if name in own_sets}
        ms = dict(zip(functions, timing.measure(given, sets, repeats=args.repeats, own=own), strict=True))
        if "torch" in wanted and peers.torch_is_here():
            for name, make in case.torches(which).items():
                ms |= _torch(f"{case.name} {which}", name, make, sets, args.repeats)
        for name, clock in case.clocks(which, batch, args.dtype).items():
            if name in wanted:
                ms |= _clocked(f"{case.name} {which}", name, clock, sets, args.repeats)
        del sets, own_sets, own
        if size and not compared:
            copy = timing.copy_bandwidth()
    flops = case.flops(which, batch)
    return {
        "family": case.family,
        "case": case.name,
        "pass": which,
        "batch": batch,
        "dtype": args.dtype,
        "ms": ms,
        **({"tflops": {name: flops / t / 1e9 for name, t in ms.items()}} if flops else {}),
        **(_bandwidth(size, ms, copy) if size and copy else {}),
        **_judged(ms, chosen),
    }


def _judged(ms: dict[str, float], chosen: str | None) -> dict[str, Any]:
    """The engine that serves unasked, its time over the fastest engine's, and the best peer's over ours.

    Ours is that of the engine that serves unasked if all were timed, else that of the fastest that was.
    """
    engines_ms = {name: t for name, t in ms.items() if name.startswith("jaxdnn")}
    peers_ms = [t for name, t in ms.items() if name not in engines_ms]
    ours, best = engines_ms.get(f"jaxdnn:{chosen}"), min(engines_ms.values())
    found: dict[str, Any] = {"unasked": chosen}
    if ours and len(engines_ms) > 1:
        found["over_best_engine"] = ours / best
    if peers_ms:
        found["best_peer_over_jaxdnn"] = min(peers_ms) / (ours or best)
    return found


def _bandwidth(size: int, ms: dict[str, float], copy: float) -> dict[str, Any]:
    """What a pass that memory binds reached: bytes that must move over time, alone and over that of a plain copy."""
    rates = {name: size / t / 1e9 for name, t in ms.items()}
    return {"bytes": size, "tb_per_s": rates, "of_copy": {name: rate / copy for name, rate in rates.items()}}


def _lowered(others: Mapping[str, Callable[..., Any] | Prepared], shapes: Any) -> dict[str, Any]:
    """The programs of peers in JAX; one that does not serve the pass says so and is no peer."""
    found = {}
    for name, f in others.items():
        try:
            given = jax.eval_shape(f.prepare, *shapes) if isinstance(f, Prepared) else shapes
            found[name] = jax.jit(f.function if isinstance(f, Prepared) else f).lower(*given)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            print(f"{name}: {_first_line(error)}", flush=True)
    return found


def _compiled(programs: Mapping[str, Any]) -> dict[str, Any]:
    """The programs of peers, compiled; one that its compiler refuses says so and is no peer."""
    found = {}
    for name, program in programs.items():
        try:
            found[name] = program.compile()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            print(f"{name}: {_first_line(error)}", flush=True)
    return found


def _own(f: Prepared, sets: Sequence[Sequence[Any]]) -> list[Any]:
    prepare = jax.jit(f.prepare)
    return [prepare(*of_set) for of_set in sets]


def _runs(name: str, program: Callable[..., Any], operands: Sequence[Any]) -> bool:
    """Whether a peer runs at all: cuDNN may refuse a call late, and plain JAX may need more memory than there is."""
    try:
        jax.block_until_ready(program(*operands))
    except RuntimeError as error:
        print(f"{name}: {_first_line(error)}", flush=True)
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _torch(
    title: str, name: str, make: Callable[..., Any], sets: Sequence[Sequence[Any]], repeats: int
) -> dict[str, float]:
    """PyTorch's time where it serves the pass; where it raises, what it said is printed and it is no peer."""
    try:
        found = peers.torch_time(make, sets, repeats)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        print(f"{name}: {title}: {_first_line(error)}", flush=True)
        return {}
    return {} if found is None else {name: found}


def _clocked(title: str, name: str, clock: Clock, sets: Sequence[Sequence[Any]], repeats: int) -> dict[str, float]:
    """The time by a clock of its own; where it raises, what it said is printed and it is no peer."""
    try:
        return {name: clock(sets, repeats)}
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, OSError) as error:
        print(f"{name}: {title}: {_first_line(error)}", flush=True)
        return {}


def _refusal(name: str, function: Callable[..., Any], operands: Any) -> str | None:
    """Why one of our engines does not serve a pass; said, not hidden."""
    here = engines.platform()
    try:
        for call in traced_calls(function, *operands, platform=here):
            selection.select(call)
    except NotImplementedError as error:
        print(f"{name}: {error}", flush=True)
        return str(error)
    return None


def _engines(case: Case, which: str, operands: Any) -> tuple[str | None, Sequence[str | None]]:
    """The engine that serves a pass' decisive call unasked, and all that could, but for those of last resort."""
    here = engines.platform()
    calls = tuple(traced_calls(case.ours(which, None), *operands, platform=here))
    if not calls:
        return None, [None]
    call = _decisive(case, which, calls)
    able = [
        e.name for e in selection.ranked(call) if e.rank is None and not selection.refusal(e, call, call.spec.level)
    ]
    return selection.select(call).name, able


def _decisive(case: Case, which: str, calls: Sequence[engines.Call]) -> engines.Call:
    op = case.decisive(which)
    return next((call for call in reversed(calls) if call.op == op), calls[-1])


def _line(row: dict[str, Any]) -> str:
    times = [f"{name} {ms:9.4f} ms" for name, ms in row["ms"].items()]
    gain = f"speed-up {row['best_peer_over_jaxdnn']:.2f}" if "best_peer_over_jaxdnn" in row else ""
    regret = f"{row['unasked']} unasked, {row['over_best_engine']:.3f} of best" if "over_best_engine" in row else ""
    copies = list(row.get("of_copy", {}).items())[:1]
    copy = [f"{row['tb_per_s'][name]:.2f} TB/s, {share:.2f} of a copy's" for name, share in copies]
    return joined([f"{row['family']:10s} {row['case']:13s} {row['pass']:8s}", *times, gain, regret, *copy])


def _print_summary(rows: list[dict[str, Any]]) -> None:
    groups, held_out = collections.defaultdict(list), networks.held_out()
    for row in rows:
        groups[row["family"], row["pass"]].append(row)
        if "over_best_engine" in row:
            groups[TOTALS[row["family"] in held_out], row["pass"]].append(row)
    table = Table("family", "pass", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("cases", "speed-up", "lowest", "highest", "regret", "largest"):
        table.add_column(name, justify="right")
    for (family, which), of_group in sorted(groups.items(), key=lambda group: group[0][0] in TOTALS):
        gains = [row["best_peer_over_jaxdnn"] for row in of_group if "best_peer_over_jaxdnn" in row]
        over = [row["over_best_engine"] for row in of_group if "over_best_engine" in row]
        told = (statistics.geometric_mean(gains), min(gains), max(gains)) if gains else ()
        lost = [statistics.geometric_mean(over) - 1, max(over) - 1] if over else ()
        cells = [*(f"{value:.2f}" for value in told), *[""] * (3 - len(told)), *(f"{100 * v:.1f} %" for v in lost)]
        table.add_row(family, which, str(len(of_group)), *cells)
    table.caption = (
        "speed-up: time of the best peer over jaxdnn's, geometric mean; regret: by how much the engine that serves "
        "unasked takes longer than the fastest; held out: networks that rules of choice are not to be fitted to; "
        "medians of one run"
    )
    rich.print(table)


def _document(rows: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `--json` names: the copy that rows are compared with is there if they are."""
    copy = {"copy_tb_per_s": timing.copy_bandwidth()} if any("of_copy" in row for row in rows) else {}
    return {**provenance(), **copy, **({"failed": failed} if failed else {}), "rows": rows}


def provenance() -> dict[str, Any]:
    """When, how, where and with what a file of results was made."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["jaxdnn", *sys.argv[1:]]),
        "device": device.device_kind,
        "platform": device.platform,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jaxdnn": __version__,
        "jax": jax.__version__,
        # It takes seconds to import, and who compared nothing with it has not.
        "torch": importlib.metadata.version("torch") if "torch" in sys.modules and peers.torch_is_here() else None,
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
    }
