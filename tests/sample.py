"""Which of a test function's parameters a run takes: a part that rotates, and whatever a module's facets still lack.

Nearly all of a test's time is compilation, and many tests are one function of many parameters. With `--sample N` a
function runs N of them, or a `SLICES`th part if that is more. Which ones is the slice's number: as many consecutive
slices as there are hold every parameter of every function. Besides, each slice holds the facets of every module: each
value of each parameter that has few (dtypes, layouts, engines, ops, algorithms, kinds of plan), in some test of it.

Where the suite runs twice, on two releases of JAX, one of the runs is `beside` the other: it has every function too, of
other parameters, half of all slices away, and leaves the facets to the other run, on the newest JAX, where all kernels
run. So every release meets every function each time, and every parameter in as many runs as there are slices.
"""

import collections
import contextlib
import hashlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SLICES = 28  # of which four runs a day hold everything in a week
FEW = 24
# The parameters that are facets; in tests of kernels also those that name the cases, which are kinds of plan.
FACETS = {"algorithm", "dtype", "engine", "family", "layout", "level", "mode", "op", "out_dtype", "transformation"}
PLANS = {"block", "case", "cluster", "length", "name", "plan", "size", "splits", "stages", "strip", "threads", "tile"}
KERNELS = "/test_hopper"


def current(beside: bool = False) -> int:
    """The slice of this commit: commits in a row have slices in a row. Without the history, that of the quarter day."""
    return (counted(Path(__file__).parent) + beside * SLICES // 2) % SLICES


def counted(folder: Path) -> int:
    """How many commits led to this one; the quarter day's number without git, and where a clone is shallow."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        if git("rev-parse", "--is-shallow-repository") == "false":
            return int(git("rev-list", "--count", "HEAD"))
    return int(time.time() // (6 * 3600))


def chosen(tests: Mapping[str, Mapping[str, Any]], count: int, slice_: int, beside: bool = False) -> set[str]:
    """Of tests, each an id with the values of its parameters, those that a slice runs."""
    functions: dict[str, list[str]] = collections.defaultdict(list)
    for test in tests:
        functions[test.partition("[")[0]].append(test)
    kept: dict[str, None] = {}
    for group in functions.values():
        kept |= dict.fromkeys(_part(group, count, slice_))
    if beside:
        return set(kept)
    facets = _facets(functions, tests)
    held: dict[str, set[Any]] = collections.defaultdict(set)
    for test in kept:
        held[_module(test)] |= facets[test]
    lacking = [test for test in _shuffled(list(tests)) if facets[test] - held[_module(test)]]
    # The test of most facets that its module lacks first.
    while lacking:
        most = max(lacking, key=lambda test: len(facets[test] - held[_module(test)]))
        kept[most] = None
        held[_module(most)] |= facets[most]
        lacking = [test for test in lacking if facets[test] - held[_module(test)]]
    return set(kept)


def _part(group: Sequence[str], count: int, slice_: int) -> Iterator[str]:
    """A slice's part of a function's tests; the parts of consecutive slices follow each other in a mixed order."""
    size = min(len(group), max(count, -(-len(group) // SLICES)))
    mixed = _shuffled(group)
    return (mixed[(slice_ * size + i) % len(group)] for i in range(size))


def _shuffled(tests: Sequence[str]) -> list[str]:
    """In an order that is the same in every process, and has nothing to do with that of the parameters."""
    return sorted(tests, key=lambda test: hashlib.sha256(test.encode()).digest())


def _module(test: str) -> str:
    return test.partition("::")[0]


def _facets(functions: Mapping[str, Sequence[str]], tests: Mapping[str, Mapping[str, Any]]) -> dict[str, set[Any]]:
    """Of each test the values of its parameters that are facets: the same for all functions of a module."""
    found: dict[str, set[Any]] = {}
    for group in functions.values():
        values: dict[str, dict[str, None]] = collections.defaultdict(dict)
        for test in group:
            for parameter, value in tests[test].items():
                values[parameter][_label(value)] = None
        named = FACETS | PLANS if KERNELS in group[0] else FACETS
        few = {p for p, found in values.items() if p in named and len(found) <= FEW}
        for test in group:
            found[test] = {(p, _label(v)) for p, v in tests[test].items() if p in few}
    return found


def _label(value: Any) -> str:
    """A value as text that is the same in every process."""
    if value is None or isinstance(value, str | int | float | complex | bytes):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_label, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_label(k)}: {_label(v)}' for k, v in value.items())}}}"
    return getattr(value, "__name__", None) or getattr(value, "name", None) or type(value).__name__
