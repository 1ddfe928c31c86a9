"""What a run found, as one JSON document: the source of the table, of the page, and of `--json`."""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jaxdnn._src.cases.case import Result
from jaxdnn.verify.levels import Trial

SCHEMA = 1


def document(
    environment: dict[str, Any],
    run: dict[str, Any],
    results: Iterable[Result],
    trials: Iterable[Trial],
    reproduce: Any,
) -> dict[str, Any]:
    """The whole document. `reproduce` makes the command line of a case's or trial's id."""
    cells = [_cell(r, reproduce) for r in results]
    tried = [_trial(t, reproduce) for t in trials]
    return {
        "schema": SCHEMA,
        "environment": environment,
        "run": run,
        "summary": summary(cells, tried),
        "cells": cells,
        "determinism": [t for t in tried if not t["control"]],
        "controls": [t for t in tried if t["control"]],
    }


def summary(cells: list[dict[str, Any]], trials: list[dict[str, Any]]) -> dict[str, Any]:
    counts = collections.Counter(c["status"] for c in cells)
    tested = [t for t in trials if not t["control"]]
    controls = [t for t in trials if t["control"]]
    ran = [c for c in cells if c["status"] != "refused"]
    worst = max(ran, key=lambda c: math.inf if c["ratio"] is None else c["ratio"], default=None)
    failed = counts["failed"] + sum(t["status"] == "failed" for t in trials)
    return {
        "passed": failed == 0,
        "cells": {name: counts[name] for name in ("passed", "failed", "refused")},
        "comparisons": sum(len(c["checks"]) for c in cells),
        "elements": sum(k["elements"] for c in cells for k in c["checks"]),
        "worst_ratio": worst and worst["ratio"],
        "worst_cell": worst and worst["id"],
        "predicted": predicted(cells),
        "determinism": _statuses(tested),
        "controls": _statuses(controls),
    }


def predicted(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The outputs compared with predicted bits, by op, engine and dtype: how many, on which data, in which cells.

    What is predicted is the sum by the engine's stated schedule; of integers, the exact sum.
    """
    groups: dict[Any, list[tuple[str, dict[str, Any]]]] = collections.defaultdict(list)
    for c in cells:
        for k in c["checks"]:
            if k["rule"] == "modelled bits" or (c["dtype"] == "int8" and k["rule"] == "exact integers"):
                groups[c["op"], c["engine"], c["dtype"]].append((c["id"], k))
    return [
        {
            "op": op,
            "engine": engine,
            "dtype": dtype,
            "outputs": sum(k["elements"] for _, k in found),
            "cells": len({name for name, _ in found}),
            "failed": sum(not k["passed"] for _, k in found),
            "data": list(dict.fromkeys(k["data"] for _, k in found)),
        }
        for (op, engine, dtype), found in groups.items()
    ]


def _statuses(trials: list[dict[str, Any]]) -> dict[str, int]:
    counts = collections.Counter(t["status"] for t in trials)
    return {name: counts[name] for name in ("passed", "failed", "not run")}


def _cell(result: Result, reproduce: Any) -> dict[str, Any]:
    case = result.case
    return {
        "id": case.id,
        "op": case.op,
        "engine": case.engine,
        "dtype": case.dtype,
        **case.describe(),
        "level": result.level,
        "accumulation": result.accumulation,
        "status": result.status,
        "ratio": number(result.ratio),
        "seconds": round(result.seconds, 3),
        "message": result.message,
        "checks": [{k: number(v) for k, v in dataclasses.asdict(c).items()} for c in result.checks],
        "reproduce": reproduce(case.id),
    }


def _trial(trial: Trial, reproduce: Any) -> dict[str, Any]:
    entry = dataclasses.asdict(trial)
    return entry | {"id": trial.id, "reproduce": None if trial.control else reproduce(trial.id)}


def number(value: Any) -> Any:
    """JSON has no infinity: an allowance without limit is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
