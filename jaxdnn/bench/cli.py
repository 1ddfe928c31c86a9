"""`jaxdnn bench conv`: every engine and peer on the same operands in one process, as a table and as JSON."""

import argparse
import collections
import datetime
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import rich
from rich.table import Table

from jaxdnn import engines
from jaxdnn._kernels.hopper import engine as hopper
from jaxdnn._version import __version__
from jaxdnn.bench import cases, peers, timing
from jaxdnn.bench.cases import Case
from jaxdnn.explain import traced_calls

PASSES = ("forward", "dgrad", "wgrad")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `jaxdnn bench`."""
    on_gpu = jax.default_backend() == "gpu"
    parser.add_argument("op", choices=["conv"], help="the op family to measure")
    parser.add_argument("--family", action="append", choices=cases.FAMILIES, help="only these (default: all)")
    parser.add_argument("--case", action="append", help="only the cases of these names (default: all)")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--engine", action="append", choices=engines.names(), help="these (default: the chosen one)")
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--batch", type=int, help="images (default: the case's own on a GPU, 2 elsewhere)")
    parser.add_argument("--repeats", type=int, default=9 if on_gpu else 15)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--record", type=Path, help="merge into this table what engine hopper gained: it ranks by it")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table while it goes and a summary, and writes the JSON."""
    wanted = [
        case
        for case in cases.CASES
        if (not args.family or case.family in args.family) and (not args.case or case.name in args.case)
    ]
    if not wanted:
        print(f"no case is named {args.case}; there are {', '.join(c.name for c in cases.CASES)}", file=sys.stderr)
        return 2
    rows = []
    for case in wanted:
        for row in _measure_case(case, args):
            rows.append(row)
            print(_line(row), flush=True)
    _print_summary(rows)
    if args.json:
        args.json.write_text(json.dumps({**_provenance(), "rows": rows}, indent=1) + "\n")
    if args.record:
        _record(args.record, rows)
    return 0


def _record(path: Path, rows: list[dict[str, Any]]) -> None:
    """Adds to the table of measured gains: for each convolution, the batch and XLA's time over ours.

    Over XLA's, which is what would serve the call instead; a peer that JAX programs cannot call does not decide here.
    """
    table = json.loads(path.read_text()) if path.exists() else {}
    here = table.setdefault(jax.devices()[0].device_kind, {})
    for row in rows:
        if "jaxdnn:hopper" in row["ms"]:
            speed_up = row["ms"]["lax"] / row["ms"]["jaxdnn:hopper"]
            here[row["key"]] = {"batch": row["batch"], "speed_up": round(speed_up, 3)}
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def _measure_case(case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    on_gpu = jax.default_backend() == "gpu"
    batch = args.batch or (case.batch if on_gpu else 2)
    dtype = jnp.dtype(args.dtype)
    key = jax.random.key(0)
    x_shape, w_shape = case.shapes(batch)
    x, w = (jax.random.normal(jax.random.fold_in(key, i), s).astype(dtype) for i, s in enumerate((x_shape, w_shape)))
    y = jax.eval_shape(case.lax, x, w)
    dy = jax.random.normal(jax.random.fold_in(key, 2), y.shape).astype(dtype)
    ours = {f"jaxdnn:{name}": case.ours(name) for name in args.engine} if args.engine else {"jaxdnn": case.ours(None)}
    functions = {**ours, "lax": case.lax}
    passes = tuple(args.passes)
    torch = peers.torch_times(case, batch, args.dtype, passes, repeats=args.repeats) if peers.torch_is_here() else {}
    for which in passes:
        able = {n: f for n, f in functions.items() if _refusal(n, _pass(f, which), (x, w, dy)) is None}
        times = timing.measure([_pass(f, which) for f in able.values()], (x, w, dy), repeats=args.repeats)
        ms = dict(zip(able, times, strict=True)) | ({"torch": torch[which]} if which in torch else {})
        mine = [t for n, t in ms.items() if n.startswith("jaxdnn")]
        if not mine:
            continue
        yield {
            "family": case.family,
            "case": case.name,
            "pass": which,
            "key": _key(_pass(case.ours(None), which), (x, w, dy)),
            "batch": batch,
            "dtype": args.dtype,
            "ms": ms,
            "tflops": {name: case.flops(batch) / t / 1e9 for name, t in ms.items()},
            "best_peer_over_jaxdnn": min(t for n, t in ms.items() if not n.startswith("jaxdnn")) / min(mine),
        }


def _refusal(name: str, function: Callable[..., Any], operands: Any) -> str | None:
    """Why one of our engines does not serve a pass; said, not hidden."""
    if not name.startswith("jaxdnn"):
        return None
    here = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    try:
        for call in traced_calls(function, *operands, platform=here):
            engines.select(call)
    except NotImplementedError as error:
        print(f"{name}: {error}", flush=True)
        return str(error)
    return None


def _key(function: Callable[..., Any], operands: Any) -> str:
    """The name of the call that a pass times, as the table of measured gains has it."""
    calls = tuple(traced_calls(function, *operands, platform="cuda"))
    return hopper.key(calls[-1])


def _pass(function: Callable[..., Any], which: str) -> Callable[..., Any]:
    if which == "forward":
        return lambda x, w, dy: function(x, w)
    if which == "dgrad":
        return lambda x, w, dy: jax.vjp(lambda x: function(x, w), x)[1](dy)
    return lambda x, w, dy: jax.vjp(lambda w: function(x, w), w)[1](dy)


def _line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {ms:9.4f} ms" for name, ms in row["ms"].items())
    ratio = row["best_peer_over_jaxdnn"]
    return f"{row['family']:10s} {row['case']:13s} {row['pass']:7s} {times}  speed-up {ratio:.2f}"


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


def _provenance() -> dict[str, Any]:
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
    }
