"""The model of 2^x by the special function unit, beside what an H200 gave and beside 2^x itself."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxdnn._src import hopper
from jaxdnn_reference import special_function
from jaxdnn_reference.special_function import ex2

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RECORDED = json.loads((BENCHMARKS / "results/exp2_nvidia_h200.json").read_text())["sets"]
if hopper.unavailable():
    pytest.skip(f"its kernel cannot be imported: {hopper.unavailable()}", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))
import record_exp2  # noqa: E402  # pyright: ignore[reportMissingImports]  (no package)


@pytest.mark.parametrize("name", ["-1 to 1", "-150 to 150", "of any size", "random bits", "whole numbers"])
def test_the_model_has_the_device_bits(name: str):
    """All but the two sets of 8 million, whose numbers the others draw from."""
    x = dict(record_exp2.operands())[name]
    assert record_exp2.digest(ex2(x)) == RECORDED[name]["sha256"]
    assert RECORDED[name] | {"operands": x.size, "differ": 0} == RECORDED[name]


def test_every_fraction_was_compared_on_the_device():
    assert [RECORDED[f"{name}, all"]["differ"] for name in ("1 to 2", "-2 to -1")] == [0, 0]


def test_the_error_is_what_the_docstring_says():
    x = np.random.default_rng(0).uniform(-126, 127, 200_000).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    error = np.abs(ex2(x) - exact) / np.spacing(np.float32(2) ** np.floor(x)).astype(np.float64)
    assert 1.9 < error.max() < 2.1
    assert 1.3 < error[x > 0].max() < 1.4


def test_a_row_that_is_off_by_one_is_seen(monkeypatch: pytest.MonkeyPatch):
    x = dict(record_exp2.operands())["-1 to 1"]
    rows = special_function.EX2.copy()
    rows[40, 2] += 1
    monkeypatch.setattr(special_function, "EX2", rows)
    assert record_exp2.digest(ex2(x)) != RECORDED["-1 to 1"]["sha256"]
