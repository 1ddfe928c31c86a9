"""What a run found, as one JSON document: the source of the table, of the page, and of `--json`."""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jaxdnn.verify.checks import Result
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
    worst = max((c for c in cells if c["status"] == "passed"), key=lambda c: c["ratio"], default=None)
    failed = counts["failed"] + sum(t["status"] == "failed" for t in trials)
    return {
        "passed": failed == 0,
        "cells": {name: counts[name] for name in ("passed", "failed", "refused")},
        "comparisons": sum(len(c["checks"]) for c in cells),
        "elements": sum(k["elements"] for c in cells for k in c["checks"]),
        "worst_ratio": worst and worst["ratio"],
        "worst_cell": worst and worst["id"],
        "determinism": _statuses(tested),
        "controls": _statuses(controls),
    }


def _statuses(trials: list[dict[str, Any]]) -> dict[str, int]:
    counts = collections.Counter(t["status"] for t in trials)
    return {name: counts[name] for name in ("passed", "failed", "not run")}


def _cell(result: Result, reproduce: Any) -> dict[str, Any]:
    case, geometry = result.case, result.case.geometry
    return {
        "id": case.id,
        "op": case.op,
        "engine": case.engine,
        "dtype": case.dtype,
        "out": case.out or case.dtype,
        "layout": case.layout,
        "filter_layout": case.filter_layout,
        "geometry": dataclasses.asdict(geometry),
        "blend": dataclasses.asdict(case.blend),
        "level": result.level,
        "accumulation": result.accumulation,
        "status": result.status,
        "ratio": _number(result.ratio),
        "seconds": round(result.seconds, 3),
        "message": result.message,
        "checks": [{k: _number(v) for k, v in dataclasses.asdict(c).items()} for c in result.checks],
        "reproduce": reproduce(case.id),
    }


def _trial(trial: Trial, reproduce: Any) -> dict[str, Any]:
    entry = dataclasses.asdict(trial)
    return entry | {"id": trial.id, "reproduce": None if trial.control else reproduce(trial.id)}


def _number(value: Any) -> Any:
    """JSON has no infinity: an allowance without limit is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
