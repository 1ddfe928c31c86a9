"""The sample of the tests that `make test` runs: every facet each time, all in `SLICES` runs, always the same."""

import itertools
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

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
}


def held(kept: set[str], module: str, parameter: str) -> set[Any]:
    return {TESTS[test][parameter] for test in kept if test.startswith(module) and parameter in TESTS[test]}


@pytest.mark.parametrize("slice_", [0, 5, sample.SLICES - 1])
def test_every_slice_holds_every_function_and_facet(slice_: int):
    kept = sample.chosen(TESTS, 1, slice_)
    assert {test.partition("[")[0] for test in kept} == {test.partition("[")[0] for test in TESTS}
    for module in ("test_a", "test_b"):
        assert held(kept, module, "dtype") == set(DTYPES)
    assert held(kept, "test_a", "layout") == set(LAYOUTS)
    assert held(kept, "tests/a/test_hopper_rows", "length") == set(LENGTHS)
    assert len(held(kept, "test_a", "seed")) < 20
    assert len(kept) < 80


@pytest.mark.parametrize(("count", "first"), [(1, 0), (2, 11), (1, 700)])
def test_slices_in_a_row_hold_everything(count: int, first: int):
    slices = range(first, first + sample.SLICES)
    assert set().union(*(sample.chosen(TESTS, count, s) for s in slices)) == set(TESTS)
    assert set().union(*(sample.chosen(TESTS, count, s) for s in slices[: sample.SLICES // 2])) != set(TESTS)


@pytest.mark.parametrize("first", [0, 5, 700])
def test_a_run_beside_another_takes_every_fourth_function_in_turns(first: int):
    every = {test.partition("[")[0] for test in TESTS}
    many = {"test_a.py::test_forward": 270, "test_c.py::test_errors": 500}
    runs = [sample.chosen(TESTS, 1, first + i, beside=True) for i in range(sample.SLICES)]
    functions = [[test.partition("[")[0] for test in kept] for kept in runs]
    parts = sample.SLICES // sample.BESIDE
    assert all(of_run.count(f) <= 3 * -(-many.get(f, 1) // parts) for of_run in functions for f in of_run)
    assert sum(len(set(of_run)) for of_run in functions[: sample.BESIDE]) == len(every)
    assert set().union(*functions[: sample.BESIDE]) == every
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
    assert sample.chosen(test, 1, 0) == set(test)
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


def test_the_header_says_how_to_repeat_it():
    """Of this suite itself: a process that hashes otherwise collects the same."""

    def collect(seed: str) -> str:
        options = ["--collect-only", "-p", "no:cacheprovider", "--sample", "1", "--slice", "7"]
        files = ["tests/softmax/test_errors.py", "tests/core/test_tolerance.py"]
        command = [sys.executable, "-m", "pytest", *options, *files]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        root = Path(__file__).parents[1]  # where the tests are run from: paths in PYTHONPATH may be relative to it
        return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True).stdout

    first, again = collect("1"), collect("2")
    assert "repeat this sample with --sample 1 --slice 7" in first
    tests = [[line for line in text.splitlines() if "<Function" in line] for text in (first, again)]
    assert tests[0] == tests[1]
    assert sample.current() > 0
