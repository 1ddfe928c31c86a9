"""The command `jaxdnn bench`: every engine and peer on the same operands in one process, as a table and as JSON."""

import argparse
import collections
import datetime
import functools as ft
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import rich
from rich.table import Table

from jaxdnn._src import families
from jaxdnn._src.cases.timed import Case
from jaxdnn._src.core import engines, selection
from jaxdnn._src.core.explain import traced_calls
from jaxdnn._version import __version__
from jaxdnn.bench import peers, timing
from jaxdnn.bench.train import measure as train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `jaxdnn bench`."""
    on_gpu = jax.default_backend() == "gpu"
    whole = "what to measure: the ops of a family, or with `train` whole training steps"
    parser.add_argument("op", choices=(*families.with_timed(), "train"), help=whole)
    parser.add_argument("--family", action="append", help="only the cases of these groups (default: all)")
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
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--record", type=Path, help="merge into this table engine hopper's gains, by which it is chosen"
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table while it goes and a summary, and writes the JSON after every case."""
    if args.op == "train":
        return train.run(args, provenance)
    found = families.timed(args.op)
    for given, known in (
        (args.family, [case.family for case in found]),
        (args.case, [case.name for case in found]),
        (args.passes, [which for case in found for which in case.passes]),
    ):
        if unknown := sorted(set(given or ()) - set(known)):
            choices = ", ".join(dict.fromkeys(known))
            print(f"`bench {args.op}` knows no {', '.join(unknown)}; there are {choices}", file=sys.stderr)
            return 2
    wanted = [
        case
        for case in found
        if (not args.family or case.family in args.family) and (not args.case or case.name in args.case)
    ]
    rows: list[dict[str, Any]] = []
    recorded = 0
    for case in wanted:
        for row in _measure_case(case, args):
            rows.append(row)
            print(_line(row), flush=True)
            if args.record:
                recorded += _record(args.record, row)
        if args.json:
            args.json.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")
    _print_summary(rows)
    if args.record and not recorded:
        why = "no pass was served by `--engine hopper` and has features that a table of measurements knows"
        print(f"nothing to record in {args.record}: {why}", file=sys.stderr)
        return 1
    return 0


def _record(path: Path, row: dict[str, Any]) -> bool:
    """Adds XLA's time over ours to a table of measurements; whether there was any, of a call that has features.

    XLA's is what would serve the call instead; a peer that JAX programs cannot call does not decide here.
    """
    if "jaxdnn:hopper" not in row["ms"] or row["call"] is None:
        return False
    speed_up = row["ms"]["lax"] / row["ms"]["jaxdnn:hopper"]
    features = engines.Features(row["call"]["features"], row["call"]["sizes"])
    selection.record(path, "hopper", row["call"]["op"], features, speed_up)
    return True


def _measure_case(case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    on_gpu = jax.default_backend() == "gpu"
    batch = args.batch or (case.batch if on_gpu else 2)
    itemsize, sets = jax.numpy.dtype(args.dtype).itemsize, []
    for which in case.passes:
        if args.passes and which not in args.passes:
            continue
        size = case.bytes(which, batch, itemsize)
        rotation = max(1, timing.ROTATED_BYTES // size) if on_gpu and size else 1
        if len(sets) != rotation:
            sets = [case.operands(batch, args.dtype, seed) for seed in range(rotation)]
        ours = {
            ("jaxdnn" if name is None else f"jaxdnn:{name}"): case.ours(which, name) for name in args.engine or [None]
        }
        able = {name: f for name, f in ours.items() if _refusal(name, f, sets[0]) is None}
        if not able:
            continue
        functions = {**able, "lax": case.xla(which)}
        ms = dict(zip(functions, timing.measure(list(functions.values()), sets, repeats=args.repeats), strict=True))
        if peers.torch_is_here():
            ms |= _torch(case, which, sets, args.repeats)
        flops = case.flops(which, batch)
        yield {
            "family": case.family,
            "case": case.name,
            "pass": which,
            "call": _features(case, which, sets[0]),
            "batch": batch,
            "dtype": args.dtype,
            "ms": ms,
            **({"tflops": {name: flops / t / 1e9 for name, t in ms.items()}} if flops else {}),
            **(_bandwidth(size, ms) if size else {}),
            "best_peer_over_jaxdnn": min(t for name, t in ms.items() if name not in able)
            / min(ms[name] for name in able),
        }


def _bandwidth(size: int, ms: dict[str, float]) -> dict[str, Any]:
    """What a pass that memory binds reached: bytes that must move over time, alone and over that of a plain copy."""
    rates = {name: size / t / 1e9 for name, t in ms.items()}
    copy = timing.copy_bandwidth()
    return {"bytes": size, "tb_per_s": rates, "of_copy": {name: rate / copy for name, rate in rates.items()}}


def _torch(case: Case, which: str, sets: Sequence[Sequence[Any]], repeats: int) -> dict[str, float]:
    """PyTorch's time where it serves the pass; where it raises, what it said is printed and it is no peer."""
    try:
        found = peers.torch_time(ft.partial(case.torch, which), sets, repeats)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        print(f"torch: {case.name} {which}: {str(error).splitlines()[0]}", flush=True)
        return {}
    return {} if found is None else {"torch": found}


def _refusal(name: str, function: Callable[..., Any], operands: Any) -> str | None:
    """Why one of our engines does not serve a pass; said, not hidden."""
    here = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    try:
        for call in traced_calls(function, *operands, platform=here):
            selection.select(call)
    except NotImplementedError as error:
        print(f"{name}: {error}", flush=True)
        return str(error)
    return None


def _features(case: Case, which: str, operands: Any) -> dict[str, Any] | None:
    """What a table of measurements calls the last of a pass's calls; None where engine hopper does not say."""
    calls = tuple(traced_calls(case.ours(which, None), *operands, platform="cuda"))
    kernels = [e for call in calls[-1:] for e in engines.registered(call.op) if e.name == "hopper"]
    found = kernels[0].features(calls[-1]) if kernels and kernels[0].features else None
    return found and {"op": calls[-1].op, "features": found.name, "sizes": dict(found.sizes)}


def _line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {ms:9.4f} ms" for name, ms in row["ms"].items())
    copy = "".join(
        f"  {row['tb_per_s'][n]:.2f} TB/s, {share:.2f} of copy" for n, share in list(row.get("of_copy", {}).items())[:1]
    )
    return (
        f"{row['family']:10s} {row['case']:13s} {row['pass']:8s} {times}  "
        f"speed-up {row['best_peer_over_jaxdnn']:.2f}{copy}"
    )


def _print_summary(rows: list[dict[str, Any]]) -> None:
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["family"], row["pass"]].append(row["best_peer_over_jaxdnn"])
    table = Table("family", "pass", "cases", "speed-up, geometric mean", "lowest", "highest")
    for (family, which), ratios in groups.items():
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        table.add_row(family, which, str(len(ratios)), f"{mean:.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}")
    table.caption = "speed-up: time of the best peer over jaxdnn's, medians of one run"
    rich.print(table)


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
        "torch": importlib.metadata.version("torch") if peers.torch_is_here() else None,
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "copy_tb_per_s": timing.copy_bandwidth(),
    }
