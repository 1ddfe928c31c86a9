"""The part of the matrix that a run takes on a CPU: what each turn has, that turns in a row have all, what it costs."""

import collections
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxdnn._src.cases.case import Result
from jaxdnn.verify import cli, command, levels, matrix, show, turns

# What a run may compile in two minutes on two slow cores, and of it one family: a cell is a program, a subject of the
# procedures about 25. CONTRIBUTING.md says how a family keeps to it.
OF_SUBJECT, OF_FAMILY, OF_RUN = 25, 130, 760


@pytest.fixture(scope="module")
def cells() -> list[Any]:
    return list(matrix.cases("standard", 0, ops=matrix.ops(), dtypes=command.DTYPES))


@pytest.fixture(scope="module")
def subjects() -> list[Any]:
    given = (matrix.ops(), matrix.engines(), command.DTYPES)
    return list(matrix.subjects(*given, "standard", 0, every=True))


@pytest.mark.parametrize("turn", [0, 5, 700])
def test_a_turn_has_every_op_engine_dtype_and_kind_of_data(cells: list[Any], subjects: list[Any], turn: int):
    kept = matrix.of_turn(cells, turn)
    assert len(kept) < len(cells) / 3

    def held(some: list[Any]) -> set[Any]:
        families = {c.op: matrix.of(c.op) for c in some}
        pairs = {(c.op, c.engine) for c in some} | {(families[c.op].name, c.engine, c.dtype) for c in some}
        return pairs | {(families[c.op].name, c.engine, kind) for c in some for kind in c.kinds()}

    assert held(kept) == held(cells)
    row = [matrix.subjects_of_turn(subjects, turn + i) for i in range(turns.FAMILY_TURNS)]
    assert len(row[0]) < len(subjects) / 2
    of_row = {(matrix.of(s.op).name, s.engine) for part in row for s in part}
    assert of_row == {(matrix.of(s.op).name, s.engine) for s in subjects}


@pytest.mark.parametrize("first", [0, 705])
def test_turns_in_a_row_have_everything(cells: list[Any], subjects: list[Any], first: int):
    row, longer = (range(first, first + count) for count in (turns.TURNS, turns.SUBJECT_TURNS))
    assert {c.id for turn in row for c in matrix.of_turn(cells, turn)} == {c.id for c in cells}
    assert {s.id for turn in longer for s in matrix.subjects_of_turn(subjects, turn)} == {s.id for s in subjects}


def test_cells_that_are_added_defer_no_other(cells: list[Any]):
    fewer = [c for c in cells if turns.number(f"x{c.id}") % 20]
    row = [matrix.of_turn(cells if turn > 5 else fewer, turn) for turn in range(turns.TURNS)]
    assert len(fewer) < len(cells)
    assert {c.id for kept in row for c in kept} >= {c.id for c in fewer}


@pytest.mark.parametrize("hour", [2, 17])
def test_a_run_each_night_without_the_history_has_everything(
    cells: list[Any], subjects: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hour: int
):
    def kept(nights: int, part: Callable[[int], Iterable[Any]]) -> set[str]:
        found: set[str] = set()
        for day in range(20000, 20000 + nights):
            monkeypatch.setattr(time, "time", lambda day=day: float(day * 86400 + hour * 3600))
            found |= {one.id for one in part(turns.current(tmp_path / "none.py")[0])}
        return found

    assert kept(turns.TURNS, lambda turn: matrix.of_turn(cells, turn)) == {c.id for c in cells}
    of_all = {s.id for s in subjects}
    assert kept(turns.SUBJECT_TURNS, lambda turn: matrix.subjects_of_turn(subjects, turn)) == of_all


@pytest.mark.parametrize("op", matrix.ops())
def test_no_two_subjects_have_one_id(op: str):
    full = [s.id for s in matrix.subjects([op], matrix.engines(), command.DTYPES, "full", 0, every=True)]
    assert len(set(full)) == len(full)


def test_a_part_of_two_of_one_id_is_an_error(subjects: list[Any]):
    with pytest.raises(ValueError, match="is the id of two"):
        matrix.subjects_of_turn([subjects[0], subjects[0]], 0)


@pytest.mark.parametrize("turn", range(turns.SUBJECT_TURNS))
def test_a_turn_keeps_to_its_budget_of_compilations(cells: list[Any], subjects: list[Any], turn: int):
    cost = collections.Counter(matrix.of(c.op).name for c in matrix.of_turn(cells, turn) if c.engine != "hopper")
    for subject in matrix.subjects_of_turn(subjects, turn):
        cost[matrix.of(subject.op).name] += OF_SUBJECT
    assert max(cost.values()) <= OF_FAMILY, cost
    assert cost.total() <= OF_RUN, cost


def test_turns_are_for_the_whole_matrix_on_a_cpu(capsys: pytest.CaptureFixture[str]):
    def listed(*words: str) -> list[str]:
        assert cli.main(["verify", "--list", *words]) == 0
        return capsys.readouterr().out.split()

    whole = listed("--all")
    assert set(listed("--turn", "3")) < set(whole)
    assert listed("--turn", "3") != listed("--turn", "4")
    assert len(listed()) == len(listed("--turn", str(turns.current(Path(turns.__file__))[0])))
    of_op = [name for name in whole if name.startswith("pool/")]
    assert listed("--op", "pool") == of_op
    assert listed("--level", "run_to_run") == whole
    turn = ["--turn", "3"]
    for words in ([*turn, "--op", "pool"], [*turn, "--level", "fast"], [*turn, "--mesh"], ["--all", "--random", "1"]):
        assert cli.main(["verify", *words]) == 2
        assert f"`{words[0]}`" in capsys.readouterr().err


def test_a_report_says_what_the_turn_counts():
    said = turns.said(3, 5, "days")
    assert "the turn counts days: of days in a row, with one run each, 12 run every cell and 84 every" in said
    assert "in a row" not in turns.said(3, 5)


def test_a_failure_is_printed_while_other_procedures_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The procedure here waits until the cell's failure is on the screen."""
    printed = threading.Event()

    def waiting(subject: Any, *_: Any) -> Iterator[levels.Trial]:
        status = "passed" if printed.wait(60) else "failed"
        yield levels.Trial("pool", "xla", "f32", "portable", "run_to_run", "repeats", status, 1, "nothing was printed")

    def failing(case: Any, **_: Any) -> Result:
        return Result(case, "failed", "fast", "", "it is a test", 0.0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(levels, "trials", waiting)
    monkeypatch.setattr(matrix, "run", failing)
    monkeypatch.setattr(matrix, "subjects", lambda *_, **__: iter([object()]))
    monkeypatch.setattr(show, "failure", lambda console, name, *_: name.startswith("pool/") and printed.set())
    assert cli.main(["verify", "--op", "pool", "--dtype", "f32", "--level", "fast", "--json", "found.json"]) == 1
    (trial,) = json.loads(Path("found.json").read_text())["determinism"]
    assert trial["status"] == "passed", trial["message"]


def test_a_recompilation_is_not_read_from_a_cache(tmp_path: Path):
    """A user's cache on disk would answer the procedure with the program that it is to be compared with."""
    changed = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_enable_compilation_cache": True,
    }
    before = {name: getattr(jax.config, name) for name in changed}
    try:
        for name, value in changed.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.jit(lambda x: x + 1)(1.0)
        assert list(tmp_path.iterdir())  # the cache is in use
        compilation_cache.reset_cache()
        kept = len(list(tmp_path.iterdir()))
        assert cli.main(["verify", "--case", "determinism/conv_bgrad/xla/int8/recompilation"]) == 0
        assert len(list(tmp_path.iterdir())) == kept
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
