"""Which tests a run takes: a part that rotates, and whatever facets and ops that part still lacks.

Nearly all of a test's time is compilation, many tests are one function of many parameters, and each op and each kernel
brings functions of its own. So with `--sample N` a run takes

  every third function, in turns (`TURNS`), with N of its parameters, or if there are more those whose names are of the
      run's slice;
  in each run all functions that are over all ops, with the parameters of the slice in the same way, and where the run
      has most of these functions (`MANY`) further ones, until every op is in one of them;
  and of every module the facets that are still lacking: each value of each parameter that has few (dtypes, layouts,
      engines, algorithms, kinds of plan), in some test of it.

As many consecutive slices as `SLICES` hold every parameter of every function, whichever others are added meanwhile.
What an op adds is hence a parameter of some functions and a third of its own, and `BUDGET` bounds the whole.

Where the suite runs twice, on two releases of JAX, one of the runs is `beside` the other, which is on the newest JAX,
where all kernels run. It leaves facets and ops to that run, and the tests that ask nothing of JAX (`ONCE`); of the
other functions it takes every fourth, in turns, but each time those that assemble the PTX that this release lowers
(`ALWAYS`). So the newest release meets every function in three runs, the other one in four, and both every parameter in
`SLICES` runs.
"""

import collections
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdnn._src import families
from jaxdnn.verify import turns

SLICES = 84  # runs that hold everything, if each commit has one or, without the history, each day
TURNS = 3
BESIDE = 4
BUDGET = 1900  # tests of a run on the newest JAX
OVER_ALL = 30  # ops, of which a function that is over all ops has at least so many
MANY = 16  # such functions; a run of fewer, of some files, is not made longer by all ops
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
    over_all = of_ops(functions)
    kept: set[str] = set()
    for name, group in functions.items():
        every = _every(name, name in over_all, beside)
        if every == 0 or (slice_ + turns.number(name)) % every:
            continue
        own = dict.fromkeys(turns.part(group, SLICES // every, slice_ // every))
        others = turns.shuffled(test for test in group if test not in own)
        kept.update(own, turns.following(others, count - len(own), slice_ // every))
    if beside:
        return kept
    if len(over_all) >= MANY:
        by_op = {test: {op} for group in over_all.values() for test, op in group.items()}
        kept.update(turns.covering(by_op, kept & by_op.keys(), slice_))
    facets = _facets(functions, tests)
    modules: dict[str, dict[str, set[Any]]] = collections.defaultdict(dict)
    for test in tests:
        modules[test.partition("::")[0]][test] = facets[test]
    return kept.union(*(turns.covering(of_module, kept & of_module.keys(), 0) for of_module in modules.values()))


def _every(name: str, over_all: bool, beside: bool) -> int:
    """In how many runs a function is taken once; 0: in none."""
    if not beside:
        return 1 if over_all else TURNS
    return 1 if name.startswith(ALWAYS) else 0 if name.startswith(ONCE) else BESIDE


def of_ops(functions: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """The functions that are over all ops, each with its tests that name an op, and that op."""
    ops = frozenset(families.ops())
    found = {}
    for name, group in functions.items():
        words = ((test, re.findall(r"\w+", test.partition("[")[2])) for test in group)
        named = {test: op for test, of_test in words if (op := next(filter(ops.__contains__, of_test), None))}
        if len(set(named.values())) >= OVER_ALL:
            found[name] = named
    return found


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
