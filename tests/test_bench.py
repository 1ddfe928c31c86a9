"""`jaxdnn bench`: every case's functions compute the same, and the command writes what it measured."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxdnn._src import families
from jaxdnn.bench import cli
from jaxdnn.verify.cli import main

ALL = [(family, case) for family in families.with_timed() for case in families.timed(family)]


@pytest.mark.parametrize("case", [c for _, c in ALL], ids=[f"{f}-{c.family}-{c.name}" for f, c in ALL])
def test_peers_have_our_shapes(case: Any):
    """XLA's function of every pass gives ours' shapes and dtypes; what is timed is the same operation."""
    operands = jax.eval_shape(lambda: case.operands(2, np.float32, 0))
    for which in case.passes:
        functions = case.ours(which, None), case.xla(which)
        ours, theirs = ([(a.shape, a.dtype) for a in jax.tree.leaves(jax.eval_shape(f, *operands))] for f in functions)
        assert ours[: len(theirs)] == theirs  # ours may also give the statistics that its gradient needs
        assert case.flops(which, case.batch) or case.bytes(which, case.batch, 4)


@pytest.mark.parametrize("name", ["fused-l4.up", "transposed-1d 16/8", "depthwise-mbv2_384"])
def test_peers_compute_what_we_compute(name: str):
    (case,) = (c for _, c in ALL if f"{c.family}-{c.name}" == name)
    operands = case.operands(1, np.float32, 1)
    for which in case.passes:
        ours, theirs = (np.asarray(jax.jit(f)(*operands)) for f in (case.ours(which, None), case.xla(which)))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


TENSOR = families.timed("tensor")


@pytest.mark.parametrize("case", TENSOR, ids=[c.name for c in TENSOR])
def test_tensor_peers_compute_the_same_bits(case: Any):
    """Of small whole numbers every sum and every bilinear weight is exact, so no tolerance is needed."""
    small = dataclasses.replace(case, size=6, c=8)
    rng = np.random.default_rng(5)
    operands = [rng.integers(-4, 5, shape).astype(np.float32) for shape in small.shapes(2)]
    for which in small.passes:
        ours, theirs = (np.asarray(jax.jit(f)(*operands)) for f in (small.ours(which, None), small.xla(which)))
        np.testing.assert_array_equal(ours, theirs)
        assert np.any(ours != ours.flat[0]) or ours.size == 1


def test_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "found.json"
    options = ["--case", "mbv2_384", "--passes", "forward", "--batch", "1", "--repeats", "2", "--json", str(path)]
    assert main(["bench", "conv", *options]) == 0
    found = json.loads(path.read_text())
    (row,) = found["rows"]
    assert (row["family"], row["case"], row["pass"]) == ("depthwise", "mbv2_384", "forward")
    assert row["bytes"] == 4 * (2 * 14 * 14 * 384 + 9 * 384)
    name = "float32 (14,14) 384 384 (3,3) (1,1) ((1,1),(1,1)) (1,1) 384"
    assert row["call"] == {"op": "conv", "features": name, "sizes": {"batch": 1}}
    for name in ("jaxdnn", "lax"):
        assert row["tb_per_s"][name] == pytest.approx(row["bytes"] / row["ms"][name] / 1e9)
        assert row["of_copy"][name] == pytest.approx(row["tb_per_s"][name] / found["copy_tb_per_s"])
    assert "speed-up" in capsys.readouterr().out


def test_gains_are_recorded_for_calls_that_engine_hopper_served(tmp_path: Path):
    path = tmp_path / "table.json"
    call = {"op": "softmax", "features": "log bfloat16", "sizes": {"batch": 8, "length": 512}}
    served, ours = {"lax": 3.0, "jaxdnn:hopper": 2.0}, {"lax": 3.0, "jaxdnn": 2.0}
    rows = {"ms": served, "call": None}, {"ms": ours, "call": call}, {"ms": served, "call": call}
    assert [cli._record(path, row) for row in rows] == [False, False, True]
    (found,) = json.loads(path.read_text())["hopper"]["softmax"]["calls"].values()
    assert found == [{"batch": 8, "length": 512, "speed_up": 1.5}]


def test_command_says_that_there_was_nothing_to_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "table.json"
    options = ["--case", "mbv2_384", "--passes", "forward", "--batch", "1", "--repeats", "1", "--record", str(path)]
    assert main(["bench", "conv", *options]) == 1
    assert "nothing to record" in capsys.readouterr().err
    assert not path.exists()


def test_command_refuses_unknown_names(capsys: pytest.CaptureFixture[str]):
    for option in ("--family", "--case", "--passes"):
        assert main(["bench", "conv", option, "nonesuch"]) == 2
        assert "knows no nonesuch; there are" in capsys.readouterr().err


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "--dtype DTYPE of the operands (default: float32 here)" in words
    assert "--repeats REPEATS timings, of which the median counts (default: 15 here)" in words
