"""The sample of the tests that `make test` runs: all facets and ops each time, everything in `SLICES` runs."""

import itertools
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxdnn._src import families
from jaxdnn.verify import turns
from tests import sample

DTYPES, LAYOUTS, LENGTHS = ("bfloat16", "float16", "float32"), ("NHWC", "NCHW", "NC/32HW32"), tuple(range(19))
TESTS: dict[str, dict[str, Any]] = {
    **{
        f"test_a.py::test_forward[{d}-{layout}-{seed}]": {"dtype": d, "layout": layout, "seed": seed}
        for d, layout, seed in itertools.product(DTYPES, LAYOUTS, range(30))
    },
    **{f"test_a.py::test_backward[{d}]": {"dtype": d} for d in DTYPES},
    "test_a.py::test_alone": {},
    **{f"test_b.py::test_it[{d}]": {"dtype": d} for d in DTYPES},
    **{f"tests/a/test_hopper_rows.py::test_lengths[{n}]": {"length": n} for n in LENGTHS},
    **{f"test_c.py::test_errors[{n}]": {"message": str(n)} for n in range(500)},
    **{f"test_d.py::test_each[{op}]": {"name": op} for op in families.ops()},
    **{f"test_e.py::test_each[{op}-{d}]": {"name": op, "dtype": d} for op in families.ops() for d in DTYPES},
    **{f"test_e.py::test_some[{op}]": {"name": op} for op in families.ops()[: sample.OVER_ALL - 1]},
}
OVER_ALL = ("test_d.py::test_each", "test_e.py::test_each")


def functions(kept: set[str]) -> set[str]:
    return {test.partition("[")[0] for test in kept}


def held(kept: set[str], module: str, parameter: str) -> set[Any]:
    return {TESTS[test][parameter] for test in kept if test.startswith(module) and parameter in TESTS[test]}


@pytest.mark.parametrize("slice_", [0, 5, sample.SLICES - 1])
def test_every_slice_holds_every_facet(slice_: int):
    kept = sample.chosen(TESTS, 1, slice_)
    for module in ("test_a", "test_b", "test_e"):
        assert held(kept, module, "dtype") == set(DTYPES)
    assert held(kept, "test_a", "layout") == set(LAYOUTS)
    assert held(kept, "tests/a/test_hopper_rows", "length") == set(LENGTHS)
    assert len(held(kept, "test_a", "seed")) < 25
    assert len(kept) < 80


@pytest.mark.parametrize("slice_", [0, 5, 700])
def test_every_slice_holds_every_function_over_all_ops_and_every_op_in_one(slice_: int, monkeypatch):
    of = lambda kept: {f: [TESTS[test]["name"] for test in kept if test.startswith(f"{f}[")] for f in OVER_ALL}
    few = of(sample.chosen(TESTS, 1, slice_))
    assert all(0 < len(names) < 10 for names in few.values())
    monkeypatch.setattr(sample, "MANY", len(OVER_ALL))
    every = of(sample.chosen(TESTS, 1, slice_))
    assert set().union(*every.values()) == set(families.ops())
    assert sum(map(len, every.values())) < len(families.ops()) + 10


@pytest.mark.parametrize("first", [0, 5, 700])
def test_as_many_slices_as_turns_hold_every_function(first: int):
    runs = [functions(sample.chosen(TESTS, 1, first + i)) for i in range(sample.TURNS)]
    assert set().union(*runs) == functions(set(TESTS))
    assert sum("test_c.py::test_errors" in of_run for of_run in runs) == 1


def test_a_function_of_fewer_ops_is_a_family_s():
    groups = {name: [test for test in TESTS if test.startswith(f"{name}[")] for name in functions(set(TESTS))}
    assert sorted(sample.of_ops(groups)) == sorted(OVER_ALL)


def test_a_run_keeps_to_its_budget(request: pytest.FixtureRequest):
    """Of these very tests: where it fails, fewer facets or parameters are asked for, or `TURNS` are more."""
    config = request.config
    if not config.option.sample:
        pytest.skip("no sample is taken")
    assert len(request.session.items) <= sample.BUDGET * config.option.sample


@pytest.mark.parametrize(("count", "first"), [(1, 0), (2, 11), (1, 700)])
def test_slices_in_a_row_hold_everything(count: int, first: int):
    slices = range(first, first + sample.SLICES)
    assert set().union(*(sample.chosen(TESTS, count, s) for s in slices)) == set(TESTS)
    assert set().union(*(sample.chosen(TESTS, count, s) for s in slices[: sample.SLICES // 2])) != set(TESTS)


@pytest.mark.parametrize("first", [0, 5, 700])
def test_a_run_beside_another_takes_every_fourth_function_in_turns(first: int):
    every = functions(set(TESTS))
    many = {name: sum(test.startswith(f"{name}[") for test in TESTS) for name in every}
    runs = [sample.chosen(TESTS, 1, first + i, beside=True) for i in range(sample.SLICES)]
    of_runs = [[test.partition("[")[0] for test in kept] for kept in runs]
    parts = sample.SLICES // sample.BESIDE
    assert all(of_run.count(f) <= 3 * max(1, -(-many[f] // parts)) for of_run in of_runs for f in of_run)
    assert sum(len(set(of_run)) for of_run in of_runs[: sample.BESIDE]) == len(every)
    assert set().union(*of_runs[: sample.BESIDE]) == every
    assert set().union(*runs) == set(TESTS)


@pytest.mark.parametrize("beside", [False, True])
def test_tests_that_are_added_defer_no_other(beside: bool):
    fewer = {test: of for test, of in TESTS.items() if turns.number(f"x{test}") % 20}
    halfway = 700 + sample.SLICES // 2
    slices = range(700, 700 + sample.SLICES)
    runs = [sample.chosen(TESTS if s > halfway else fewer, 1, s, beside=beside) for s in slices]
    assert len(fewer) < len(TESTS)
    assert set().union(*runs) >= set(fewer)


@pytest.mark.parametrize("hour", [2, 17])
@pytest.mark.parametrize("beside", [False, True])
def test_a_run_each_night_of_a_shallow_clone_has_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool, hour: int
):
    kept: set[str] = set()
    for day in range(20000, 20000 + sample.SLICES):
        monkeypatch.setattr(time, "time", lambda day=day: float(day * 86400 + hour * 3600))
        kept |= sample.chosen(TESTS, 1, turns.current(tmp_path / "none.py")[0], beside)
    assert kept == set(TESTS)


def test_the_definition_is_tested_once():
    test = {"tests/reference/test_conv.py::test_it": {}}
    assert [bool(sample.chosen(test, 1, slice_)) for slice_ in range(sample.TURNS)].count(True) == 1
    assert not any(sample.chosen(test, 1, slice_, beside=True) for slice_ in range(sample.BESIDE))
    assert all((Path(__file__).parents[1] / name).exists() for name in sample.ONCE)


def test_commits_count_where_git_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A shallow clone has as many at each one, and a checkout around an installed package those of something else."""
    whole, shallow = tmp_path / "whole", tmp_path / "shallow"

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *words], check=True, capture_output=True)

    git("init", str(whole))
    (whole / "known.py").touch()
    git("-C", str(whole), "add", "known.py")
    for message in "abc":
        git("-C", str(whole), "commit", "--allow-empty", "-m", message)
    (whole / "installed.py").touch()
    git("clone", "--depth", "1", whole.as_uri(), str(shallow))
    monkeypatch.setattr(time, "time", lambda: 86400.0 * 5)
    assert turns.current(whole / "known.py") == (3, "commits")
    for file in (whole / "installed.py", shallow / "known.py", tmp_path / "none.py"):
        assert turns.current(file) == (5, "days")


def test_a_sample_does_not_depend_on_the_order_of_the_tests():
    mixed = list(TESTS)
    random.Random(0).shuffle(mixed)
    assert sample.chosen({test: TESTS[test] for test in mixed}, 1, 3) == sample.chosen(TESTS, 1, 3)
    assert sample.chosen(TESTS, 1, 3) != sample.chosen(TESTS, 1, 4)


def collected(*options: str, seed: str = "1") -> tuple[str, list[str]]:
    """What a process that hashes by a seed collects of this suite: its header, and a line for each test."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *options]
    env = {**os.environ, "PYTHONHASHSEED": seed}
    root = Path(__file__).parents[1]  # where the tests are run from: paths in PYTHONPATH may be relative to it
    text = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True).stdout
    return text, re.findall(r"<Function (.*)>", text)


def test_the_header_says_how_to_repeat_it():
    options = ("--sample", "1", "--slice", "7", "tests/softmax/test_errors.py", "tests/core/test_tolerance.py")
    (header, tests), (_, again) = collected(*options), collected(*options, seed="2")
    assert "repeat this sample with --sample 1 --slice 7" in header
    assert tests == again
    assert tests
    assert sample.current() > 0


def test_functions_over_all_ops_are_found_by_the_names_of_their_tests():
    groups: dict[str, list[str]] = {}
    for test in collected("--sample", "0", "tests/core/test_signatures.py")[1]:
        groups.setdefault(test.partition("[")[0], []).append(test)
    assert sorted(sample.of_ops(groups)) == ["test_an_argument_that_is_none", "test_an_option_by_position"]
