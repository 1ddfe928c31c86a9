"""What commands print in 80 columns is whole: nothing is cut off, and every op has its column or row."""

import io
from typing import Any

from rich.console import Console

from jaxdnn.bench import cli
from jaxdnn.verify import show

OPS = ("conv", "conv_wgrad", "adaptive_layer_norm_dgrad", "fused_dropout_tangent", "layer_norm_dgrad", "lrn", "pool")


def cell(op: str, engine: str, dtype: str) -> dict[str, Any]:
    return {"op": op, "engine": engine, "dtype": dtype, "status": "passed", "ratio": 0.376}


def trial(op: str, level: str) -> dict[str, Any]:
    own = {"dtype": "bf16", "variant": "traced-blend/gradient", "declared": "batch_invariant", "status": "passed"}
    return {"op": op, "engine": "ordered", "level": level, "runs": 33, **own}


def printed(document: dict[str, Any], width: int = 80) -> str:
    file = io.StringIO()
    show.tables(Console(file=file, width=width), document)
    return file.getvalue()


def test_the_tables_of_verify_are_whole_in_80_columns():
    cells = [cell(op, engine, dtype) for op in OPS for engine in ("hopper", "ordered") for dtype in ("f32", "e4m3fn")]
    levels = ("run_to_run", "batch_invariant", "mesh_invariant", "portable")
    document = {
        "cells": cells,
        "determinism": [trial(op, level) for op in OPS for level in levels],
        "controls": [],
        "summary": {"predicted": [], "controls": {"passed": 0, "failed": 0}},
    }
    text = printed(document)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    matrix, _, determinism = text.partition("determinism:")
    for op in OPS:
        assert f" {op.removeprefix('conv_')} " in matrix
    assert len([line for line in determinism.splitlines() if line.split()[-4:] == ["33"] * 4]) == len(OPS)
    assert printed(document, 200).count("error over bound") == 1  # one table, where there is room


def test_the_summary_of_bench_is_whole_in_80_columns(monkeypatch: Any, capsys: Any):
    monkeypatch.setenv("COLUMNS", "80")
    row = {"family": "activation", "pass": "gradient in the weights", "best_peer_over_jaxdnn": 12.34}
    cli._print_summary([row, {**row, "over_best_engine": 1.5}])
    text = capsys.readouterr().out
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for word in ("activation", "speed-up", "12.34", "50.0 %", "geometric mean"):
        assert word in text
