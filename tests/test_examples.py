"""Every example runs in its smallest size, learns what it is about, draws a picture, and stands in the list of them."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

mpimg = pytest.importorskip("matplotlib.image", reason="the examples extra is not installed")
for module in ("optax", "sklearn"):
    pytest.importorskip(module, reason="the examples extra is not installed")

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
each_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch: pytest.MonkeyPatch):
    """Promotion as JAX has it by default, which optimisers and Flax rely on; and pictures that need no screen."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the annotations
    spec.loader.exec_module(module)
    return module


def ran(name: str, plot: Path, steps: int) -> Any:
    """What the example's `main` returns, whose picture is looked at."""
    found = loaded(name).main(["--size", "tiny", "--steps", str(steps), "--plot", str(plot)])
    check_picture(plot)
    return found


def ran_alone(name: str, plot: Path, steps: int) -> str:
    """What the example prints as a program, with the devices that it makes itself."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "reference")))
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": path}
    command = [sys.executable, f"examples/{name}.py", "--size", "tiny", "--steps", str(steps), "--plot", str(plot)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    check_picture(plot)
    return found.stdout


def check_picture(path: Path) -> None:
    picture = mpimg.imread(path)
    assert min(picture.shape[:2]) >= 300
    # Each half has much that is not white: no panel is empty.
    for half in np.array_split(picture[..., :3], 2, axis=1):
        assert (half.min(-1) < 0.9).mean() > 0.005


def falls(losses: list[float]) -> bool:
    third = max(len(losses) // 3, 1)
    return float(np.mean(losses[-third:])) < 0.9 * float(np.mean(losses[:third]))


def test_picture_without_content_is_noticed(tmp_path: Path):
    mpimg.imsave(tmp_path / "white.png", np.ones((400, 800, 3)))
    with pytest.raises(AssertionError):
        check_picture(tmp_path / "white.png")


def check_resnet(tmp_path: Path) -> None:
    pytest.importorskip("flax", reason="the examples extra is not installed")
    found = ran("resnet", tmp_path / "plot.png", steps=150)
    assert falls(found["losses"])
    assert found["apart"] < 1e-4  # Flax computes the same from the same state
    assert found["replaced"] == 6  # the convolutions of two blocks


def check_convnext(tmp_path: Path) -> None:
    pytest.importorskip("equinox", reason="the examples extra is not installed")
    found = ran("convnext", tmp_path / "plot.png", steps=120)
    assert falls(found["losses"])
    assert found["apart"] < 1e-4


def check_diffusion(tmp_path: Path) -> None:
    found = ran("diffusion", tmp_path / "plot.png", steps=40)
    assert falls(found["losses"])
    assert np.isfinite(found["samples"]).all()
    assert found["samples"].std() > 0.3


def check_speech(tmp_path: Path) -> None:
    found = ran("speech", tmp_path / "plot.png", steps=60)
    assert falls(found["losses"])
    assert 0 < found["error rate"] <= 1


def test_speech_counts_errors():
    speech = loaded("speech")
    scores = np.eye(11)[[0, 3, 3, 0, 3, 1, 0]]
    assert speech.read(scores) == [3, 3, 1]
    assert [speech.edits([3, 3, 1], to) for to in ([3, 3, 1], [3, 1], [3, 1, 3], [], [4, 3, 3, 2])] == [0, 1, 2, 3, 2]


def check_int8(tmp_path: Path) -> None:
    found = ran("int8", tmp_path / "plot.png", steps=250)
    assert found["float32"] > 0.7  # of ten digits
    assert found["a scale per channel"] > found["float32"] - 0.03
    assert found["a scale per channel, error"] < 0.05


def test_int8_of_one_scale_is_worse(tmp_path: Path):
    """Where a channel's weights are much smaller than another's, one scale for all loses them."""
    int8 = loaded("int8")
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 3, 1, 4)).astype(np.float32) * np.array([1, 1e-1, 1e-2, 1e-3], np.float32)
    layer, x = {"w": w, "bias": np.zeros(4, np.float32)}, rng.random((2, 8, 8, 1), np.float32)
    exact = np.asarray(int8.float_layer(layer, x, 1))

    def error(by_channel: bool) -> np.ndarray:
        found = int8.int8_layer(int8.quantise(layer, x, by_channel), x, 1)
        return abs(np.asarray(found) - exact).max((0, 1, 2)) / abs(exact).max((0, 1, 2))

    assert (error(True) < 0.02).all()
    assert error(False)[-1] > 0.2


def check_data_parallel(tmp_path: Path) -> None:
    printed = ran_alone("data_parallel", tmp_path / "plot.png", steps=6)
    assert printed.startswith("4 devices")
    differs = {way.strip(): float(by) for way, by in re.findall(r"^(.*?) +the first loss .* by (\S+)$", printed, re.M)}
    assert differs.keys() == {"shard_map", "sharded jit", "unsynchronised"}
    assert differs["shard_map"] < 1e-5
    assert differs["sharded jit"] < 1e-5
    assert differs["unsynchronised"] > 1e-3


def check_reproducible(tmp_path: Path) -> None:
    printed = ran_alone("reproducible", tmp_path / "plot.png", steps=4)
    hashes = re.findall(r"^ +(\S+) +(.+?) +([0-9a-f]{16}) ", printed, re.M)
    fixed = {name: found for level, name, found in hashes if level == "mesh_invariant"}
    assert fixed.keys() == {"run 1", "run 2", "4 micro-batches", "4 devices"}
    assert len(set(fixed.values())) == 1
    assert len({found for level, _, found in hashes if level == "fast"}) > 1
    assert "mesh_invariant: 4 runs ended with 1 different set of weights" in printed


CHECKS: dict[str, Callable[[Path], None]] = {
    "convnext": check_convnext,
    "data_parallel": check_data_parallel,
    "diffusion": check_diffusion,
    "int8": check_int8,
    "reproducible": check_reproducible,
    "resnet": check_resnet,
    "speech": check_speech,
}


@each_example
def test_runs(path: Path, tmp_path: Path):
    """One function, so that a sample of the tests has one example in turn."""
    CHECKS[path.stem](tmp_path)


@each_example
def test_is_listed(path: Path):
    rows = [row for row in (ROOT / "examples/README.md").read_text().splitlines() if row.startswith(f"| [{path.name}]")]
    assert len(rows) == 1
    assert f"({path.name})" in rows[0]


def test_nothing_else_is_listed():
    listed = re.findall(r"^\| \[(\w+\.py)\]", (ROOT / "examples/README.md").read_text(), re.M)
    assert sorted(listed) == [path.name for path in EXAMPLES]


@each_example
def test_says_how_it_is_run_and_what_to_expect(path: Path):
    head = path.read_text().split('"""')[1]
    assert f"Run: python examples/{path.name}" in head
    assert re.search(r"^Expect: (.*\n){1,4}Ops: ", head, re.M)
    assert re.search(r"\d+ seconds of processor time", head)
    assert "--size full" in head


@each_example
def test_is_short(path: Path):
    assert 80 <= len(path.read_text().splitlines()) <= 270
