"""What came of random calls: one report a call, and the summary of a run."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxdnn._src.hopper import branches
from jaxdnn._src.hopper.branches import Branch
from jaxdnn.verify.report import number


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of one random call.

    Attributes:
      index: the call's number.
      status: "passed", "failed", "refused" by its engine; "running" while it is not known.
      message: what is wrong with it, why it was refused, or what is being done to it.
      towards: the branch that it was steered to, its words joined by slashes.
      id, op, engine, dtype, level, kind, call: the case, the engine's level, the kind of data; "" while not drawn.
      picked: whether a configuration was drawn in the planner's place.
      multiprocessors: how many its kernels could use; None: all.
      branches: of planners, that it took.
      guarded: whether the memory around its arrays was guarded.
      ratio: its largest error over the bound; infinite where it has no bound.
      procedure: the level and the procedure that was chosen for it, if any; `tried` says whether it could be run.
      fatal: whether the device, or the process, is of no use any more.
      seconds: that drawing and running took.
    """

    index: int
    status: str = "running"
    message: str = ""
    towards: str | None = None
    id: str = ""
    op: str = ""
    engine: str = ""
    dtype: str = ""
    level: str = ""
    kind: str = ""
    call: str = ""
    picked: bool = False
    multiprocessors: int | None = None
    branches: tuple[Branch, ...] = ()
    guarded: bool = False
    ratio: float = 0.0
    procedure: str = ""
    tried: bool = False
    fatal: bool = False
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, found: dict[str, Any]) -> "Report":
        """The report that `dataclasses.asdict` and JSON have made this of."""
        given: dict[str, Any] = found | {"branches": tuple((a, b, c) for a, b, c in found["branches"])}
        return cls(**given)

    def failed(self, message: str) -> "Report":
        """The same call's, which failed for this reason."""
        return dataclasses.replace(self, status="failed", message=message)


def summary(reports: Sequence[Report], reachable: Sequence[Branch]) -> dict[str, Any]:
    """Counts by op and engine, of the reachable branches and of procedures; the calls that failed.

    `passed` is the verdict.

    A branch that a kernel recorded and `branches.EVERY` does not list fails the run: a branch that is not listed would
    never be reported as not taken.
    """
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    dtypes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    taken, recorded = collections.Counter[Branch](), set[Branch]()
    for r in reports:
        name = f"{r.op} {r.engine}"
        counts[name][r.status] += 1
        recorded.update(r.branches)
        if r.status != "refused":
            dtypes[name][r.dtype] += 1
        if r.status == "passed":
            taken.update(r.branches)
    failed = [r for r in reports if r.status == "failed"]
    unknown = sorted("/".join(branch) for branch in recorded - set(branches.every()))
    calls = collections.Counter(r.status for r in reports)
    return {
        "passed": not failed and not unknown and calls["passed"] > 0,
        "calls": dict(calls),
        "by_op": {name: dict(c) | {"dtypes": dict(dtypes[name])} for name, c in sorted(counts.items())},
        "procedures": dict(sorted(collections.Counter(r.procedure for r in reports if r.tried).items())),
        "procedures_not_run": sum(bool(r.procedure) and not r.tried for r in reports),
        "branches": {"/".join(branch): taken[branch] for branch in reachable},
        "unknown_branches": unknown,
        "never_taken": sorted("/".join(branch) for branch in reachable if not taken[branch]),
        "guarded": sum(r.guarded for r in reports),
        "largest_ratio": number(max((r.ratio for r in reports if r.status == "passed"), default=0.0)),
        "seconds_in_processes": {
            what: round(sum(r.seconds.get(what, 0) for r in reports), 1) for what in ("drawing", "running")
        },
        "failed": [_entry(r) for r in failed],
    }


def _entry(report: Report) -> dict[str, Any]:
    """A failed call; which branches it took says its reproduction."""
    entry = dataclasses.asdict(report) | {"ratio": number(report.ratio)}
    del entry["branches"]
    return entry
