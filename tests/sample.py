"""Which of a test function's parameters a run takes: a part that rotates, and whatever a module's facets still lack.

Nearly all of a test's time is compilation, and many tests are one function of many parameters. With `--sample N` a
function runs N of them, or if there are more those whose names are of the run's slice: about a `SLICES`th part. As many
consecutive slices as there are hold every parameter of every function, whichever others are added meanwhile. Besides,
each slice holds the facets of every module: each value of each parameter that has few (dtypes, layouts, engines, ops,
algorithms, kinds of plan), in some test of it.

Where the suite runs twice, on two releases of JAX, one of the runs is `beside` the other, which is on the newest JAX,
where all kernels run. It leaves the facets to that run, and the tests that ask nothing of JAX (`ONCE`); of the other
functions it takes every fourth, in turns, and a larger part of their parameters, but each time those that assemble the
PTX that this release lowers (`ALWAYS`). So the newest release meets every function each time, the other one in four
runs, and both every parameter in `SLICES` runs.
"""

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdnn.verify import turns

SLICES = 84  # runs that hold everything, if each commit has one or, without the history, each day
BESIDE = 4
# Whose outcome hardly depends on the release of JAX: the definition in NumPy, PTX as text, documents, the layout.
_ONCE_AT_TOP = ("docs", "layout", "notebooks", "record_lowered", "sample")
ONCE = ("tests/reference/", "tests/hopper/", *(f"tests/test_{name}.py" for name in _ONCE_AT_TOP))
ALWAYS = "tests/hopper/test_assembles.py"
FEW = 24
# The parameters that are facets; in tests of kernels also those that name the cases, which are kinds of plan.
FACETS = {"algorithm", "dtype", "engine", "family", "layout", "level", "mode", "op", "out_dtype", "transformation"}
PLANS = {"block", "case", "cluster", "length", "name", "plan", "size", "splits", "stages", "strip", "threads", "tile"}
KERNELS = "/test_hopper"


def current() -> int:
    """The slice of this commit: commits in a row have slices in a row. Without the history, that of the day."""
    return turns.current(Path(__file__))[0]


def chosen(tests: Mapping[str, Mapping[str, Any]], count: int, slice_: int, beside: bool = False) -> set[str]:
    """Of tests, each an id with the values of its parameters, those that a slice runs."""
    functions: dict[str, list[str]] = collections.defaultdict(list)
    for test in tests:
        functions[test.partition("[")[0]].append(test)
    names, parts = list(functions), SLICES // BESIDE if beside else SLICES
    if beside:
        of_turn = [name for name in names if (slice_ + turns.number(name)) % BESIDE == 0 and not name.startswith(ONCE)]
        names, slice_ = [*of_turn, *(name for name in names if name.startswith(ALWAYS))], slice_ // BESIDE
    kept: set[str] = set()
    for name in names:
        own = dict.fromkeys(turns.part(functions[name], parts, slice_))
        others = turns.shuffled(test for test in functions[name] if test not in own)
        kept.update(own, turns.following(others, count - len(own), slice_))
    if beside:
        return kept
    facets = _facets(functions, tests)
    modules: dict[str, dict[str, set[Any]]] = collections.defaultdict(dict)
    for test in tests:
        modules[test.partition("::")[0]][test] = facets[test]
    return kept.union(*(turns.covering(of_module, kept & of_module.keys(), 0) for of_module in modules.values()))


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
