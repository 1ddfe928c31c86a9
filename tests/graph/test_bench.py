"""`jaxdnn bench graph`: what is timed computes the same, and cuDNN's frontend is built the same graph."""

import enum
import functools as ft
import json
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxdnn._src.core import engines
from jaxdnn.bench import frontend, graph
from jaxdnn.bench.graph import CASES, Fused
from jaxdnn.verify.cli import main
from tests.graph.test_nodes import worst
from tests.texts import unfolded

SCALED = {
    name: (ft.partial(graph.scaled_blocks, 64, 6, *kinds), ft.partial(graph.plain_scaled_blocks, kinds[2]))
    for name, kinds in graph.SCALED.items()
}
SMALL = (
    Fused("conv", "prologue", ft.partial(graph.prologue, 6, 5), graph.plain_prologue, 3, 1),
    Fused("conv", "epilogue", ft.partial(graph.epilogue, 6, 5, True), graph.plain_epilogue, 3, 1),
    Fused("conv", "unscaled", ft.partial(graph.epilogue, 6, 5, False), graph.plain_epilogue, 3, 1),
    Fused("batch norm", "residual", ft.partial(graph.batch_norm, 6, 5), graph.plain_batch_norm, 3),
    Fused("matmul", "gelu", ft.partial(graph.layer, 7, 6, False), ft.partial(graph.plain_layer, False), 5, 1, 1),
    Fused("matmul", "sums", ft.partial(graph.layer, 7, 6, True), ft.partial(graph.plain_layer, True), 5, 1, 1),
    Fused("matmul", "float8", ft.partial(graph.quantised, 7, 6), graph.plain_quantised, 5, 1, 1),
    Fused("matmul", "mxfp8", SCALED["mxfp8"][0], SCALED["mxfp8"][1], 5, 1, 1),
    Fused("matmul", "nvfp4", SCALED["nvfp4"][0], SCALED["nvfp4"][1], 5, 1, 1),
    Fused("rms norm", "swish", ft.partial(graph.rms_norm, 6, None), graph.plain_rms_norm, 5),
    Fused("rms norm", "float8", ft.partial(graph.rms_norm, 6, "float8_e4m3fn"), graph.plain_rms_norm, 5),
    Fused("attention", "bias", ft.partial(graph.attention, 2, 5, 8), graph.plain_attention, 3, 1),
    Fused("attention", "scored", ft.partial(graph.scored_attention, 2, 5, 8), graph.plain_scored_attention, 3, 1),
    Fused("attention", "float8", ft.partial(graph.narrow_attention, 2, 5, 8), graph.plain_narrow_attention, 3, 1),
)
small = pytest.mark.parametrize("case", SMALL, ids=[f"{c.family}-{c.name}" for c in SMALL])


def test_every_kind_of_graph_has_a_small_one():
    built = lambda case: getattr(case.build, "func", case.build)
    assert set(map(built, SMALL)) == set(map(built, CASES))


@small
def test_what_is_timed_computes_the_same(case: Fused):
    """Both plans are within the computed bound; jax.numpy's results have their shapes and are as near as its dtype."""
    dtype = ("float32", "bfloat16")[SMALL.index(case) % 2]
    operands = case.operands(case.batch, dtype, 1)
    made = case.graph(case.batch, dtype)
    arrays = {t.uid: np.asarray(a) for t, a in zip(made.inputs(), operands, strict=True)}
    others = case.others("forward", case.batch, dtype)
    found = {"jaxdnn": case.ours("forward", None), **others}
    results = {name: jax.jit(f)(*operands) for name, f in found.items()}
    results = {name: v if isinstance(v, tuple) else (v,) for name, v in results.items()}
    for name in ("jaxdnn", "single"):
        assert worst(made, arrays, dict(zip((t.uid for t in made.outputs()), results[name], strict=True))) <= 1
    for ours, plain in zip(results["jaxdnn"], results["lax"], strict=True):
        assert (ours.shape, ours.dtype) == (plain.shape, plain.dtype)
        ours, plain = (np.asarray(v, np.float64) for v in (ours, plain))
        eps = 2.0**-3 if "float8" in case.name else 2.0**-7 if dtype == "bfloat16" else 1e-4
        assert np.abs(ours - plain).max() <= eps * np.abs(plain).max()


class Anything(enum.Enum):
    FLOAT = BFLOAT16 = HALF = FP8_E4M3 = FP8_E5M2 = FP8_E8M0 = FP4_E2M1 = INFERENCE = ADD = AMAX = 0


@small
def test_cudnns_graph_has_the_same_tensors_and_nodes(case: Fused):
    """Its builder calls the methods by the names that cudnn-frontend has: ours take them too."""
    ours = case.graph(case.batch, "bfloat16")
    made = Recorder(ours)
    case.build(made, case.batch)
    assert [(t.get_dim(), t.get_stride()) for t in made.inputs] == [
        (t.get_dim(), t.get_stride()) for t in ours.inputs() if t.name not in ("epsilon", "momentum")
    ]
    assert [node.op for node in made.g.nodes] == [node.op for node in ours.nodes]
    assert [t.get_dim() for t, _ in made.outputs] == [t.get_dim() for t in ours.outputs()]


class Recorder(frontend.Theirs):
    """cuDNN's builder on a graph of ours, in whose place cudnn-frontend's would stand."""

    def __init__(self, like: Any) -> None:
        choices = dict.fromkeys(("data_type", "norm_forward_phase", "reduction_mode"), Anything)
        super().__init__(types.SimpleNamespace(pygraph=lambda **_: type(like)("theirs"), **choices), "bfloat16")
        self.g.io_data_type = "bfloat16"
        self.phase = "INFERENCE"

    def type(self, name: str) -> Any:
        return name

    def mode(self, name: str) -> Any:
        return name


def test_the_frontend_is_no_peer_without_a_gpu():
    with pytest.raises(RuntimeError, match="cuDNN needs a GPU"):
        frontend.time(SMALL[0], 2, "float32", [], 1)


def test_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "found.json"
    options = ["--case", "swish 768", "--case", "bias, gelu 768 to 3072", "--batch", "2", "--repeats", "2"]
    assert main(["bench", "graph", *options, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["family"], tuple(row["ms"])) for row in rows] == [
        ("matmul", ("jaxdnn", "lax", "single")),
        ("rms norm", ("jaxdnn", "lax", "single")),
    ]
    assert rows[0]["tflops"]["jaxdnn"] == pytest.approx(2 * 2 * 768 * 3072 / rows[0]["ms"]["jaxdnn"] / 1e9)
    assert rows[1]["bytes"] == 4 * (2 * 768 + 768 + 2 * 768)
    assert "cudnn: swish 768 forward: cuDNN needs a GPU" in capsys.readouterr().out


def test_engines_are_not_named(capsys: pytest.CaptureFixture[str]):
    """A plan chooses the engine of each step; asked for one, it says so, and there is nothing to measure."""
    assert main(["bench", "graph", "--case", "swish 768", "--engine", "xla", "--batch", "2", "--repeats", "1"]) == 0
    said = unfolded(capsys.readouterr().out)
    assert "jaxdnn:xla: `engine` must be None: the engines of a graph's steps are chosen one by one" in said


def test_a_plan_says_where_fusing_gained_nothing(monkeypatch: pytest.MonkeyPatch):
    """Of convolutions that XLA serves: by the least and the largest of what was measured."""
    path = Path(__file__).parents[2] / "benchmarks/results/graph_nvidia_h200.json"
    rows = {row["case"]: row for row in json.loads(path.read_text())["rows"] if row["family"] == "conv"}
    monkeypatch.setattr(engines, "platform", lambda: "cuda")
    monkeypatch.setattr(engines, "device_kind", lambda platform: "NVIDIA H200")
    speeds, notes = [], set()
    for case in (case for case in CASES if case.name in rows):
        plan = case.graph(case.batch, "bfloat16").plan()
        if plan.engine == "fused":
            ms = rows[case.name]["ms"]
            speeds.append(round(ms["single"] / ms["jaxdnn"], 3))
            notes |= set(plan.parts[0].notes)
            assert plan.parts[0].engine == (rows[case.name]["unasked"],) == ("xla",)
    assert len(speeds) == 4
    (note,) = notes
    assert note.endswith(f"on an NVIDIA H200 the plan had {min(speeds)} to {max(speeds)} of the speed of 'single'")
    monkeypatch.setattr(engines, "platform", lambda: "cpu")
    small = next(case for case in SMALL if case.name == "epilogue")
    assert "H200" not in str(small.graph(2, "float32").plan().explain())
