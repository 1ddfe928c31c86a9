"""Every notebook runs from top to bottom, and is committed executed, small and in short cells."""

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebooks extra is not installed")
nbclient = pytest.importorskip("nbclient", reason="the notebooks extra is not installed")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_runs(path: Path, tmp_path: Path):
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()


@each_notebook
def test_is_committed_executed(path: Path):
    assert [cell.execution_count for cell in code_cells(path)] == list(range(1, len(code_cells(path)) + 1))


@each_notebook
def test_is_small(path: Path):
    assert path.stat().st_size < 400_000


@each_notebook
def test_cells_are_short(path: Path):
    long = [cell.source for cell in code_cells(path) if len(cell.source.splitlines()) >= 15]
    assert not long, long[0]


@each_notebook
def test_outputs_hold_no_errors_and_no_warnings(path: Path):
    outputs = [output for cell in code_cells(path) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
