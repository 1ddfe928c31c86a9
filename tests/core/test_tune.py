"""`tune`: what it measures, the file that it keeps, and what that decides."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdnn as dnn
from jaxdnn._src.core import engines, tuned
from jaxdnn._src.core.explain import traced_calls
from jaxdnn.verify.cli import main
from tests.test_engines_answer import calls

X, W = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What runs read; and a second engine of convolutions, which is tried after XLA's."""
    path = tmp_path / "a folder" / "tuned.json"
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    others = engines.registered("conv")
    (xla,) = (engine for engine in others if engine.name == "xla")
    other = dataclasses.replace(xla, name="other", measured_on=())
    monkeypatch.setitem(engines._registry, "conv", [*others, other])
    return path


def decide(path: Path, **ms: float) -> None:
    """Writes times of a test's choice for the convolution of X with W."""
    (call,) = traced_calls(dnn.conv, X, W, platform="cpu")
    tuned.keep(path, str(call.device_kind), {tuned.key(call): ms})


def test_engines_of_each_call_are_measured_once_and_kept(file: Path):
    def twice(x: Any, w: Any) -> Any:
        return dnn.conv(x, w) + dnn.conv(x, w), dnn.conv(x, w, padding=1, engine="xla"), dnn.pool(x, window=2)

    found = dnn.tune(twice, X, jax.ShapeDtypeStruct(W.shape, W.dtype))
    ((call, ms),) = found.items()  # neither the call that names its engine nor that which one engine serves
    assert call.startswith("conv(float32[1,4,4,2], float32[3,3,2,5]) ConvSpec(")
    assert set(ms) == {"xla", "other"}
    assert all(t > 0 for t in ms.values())
    assert json.loads(file.read_text())["cpu"][tuned.VERSIONS] == found
    assert "other" in str(found)
    again = dnn.tune(dnn.conv, X, W, padding=1)
    assert json.loads(file.read_text())["cpu"][tuned.VERSIONS] == {**found, **again}
    assert [path.name for path in file.parent.iterdir()] == ["tuned.json"]


def test_the_fastest_serves_at_level_fast_alone(file: Path):
    assert dnn.explain(dnn.conv, X, W)[0].engine == "xla"
    decide(file, other=1.0, xla=2.0)
    (found,) = dnn.explain(dnn.conv, X, W)
    assert found.engine == "other"
    words = f"on this call other took 1.0000 ms, xla took 2.0000 ms, says {file}"
    assert f"other: can serve; it comes first, because {words}" in str(found)
    assert f"xla: can serve; unless it is named, another comes first, because {words}" in str(found)
    with dnn.determinism("run_to_run"):
        assert dnn.explain(dnn.conv, X, W)[0].engine == "xla"
    assert dnn.explain(lambda x, w: dnn.conv(x, w, engine="xla"), X, W)[0].engine == "xla"
    assert dnn.explain(lambda x, w: dnn.conv(x, w, padding=1), X, W)[0].engine == "xla"  # another call
    decide(file, other=2.0, xla=1.0)
    assert dnn.explain(dnn.conv, X, W)[0].engine == "xla"


def test_other_versions_decide_nothing(file: Path, monkeypatch: pytest.MonkeyPatch):
    decide(file, other=1.0, xla=2.0)
    monkeypatch.setattr(tuned, "VERSIONS", "of another day")
    assert dnn.explain(dnn.conv, X, W)[0].engine == "xla"


def test_keys_are_alike_in_every_process():
    """No key has an address in it."""
    found = [tuned.key(call) for of_op in calls().values() for call in of_op]
    assert [key for key in found if " at 0x" in key or "<" in key] == []


def test_a_file_that_is_no_json_is_named(file: Path):
    file.parent.mkdir()
    file.write_text("nothing")
    with pytest.raises(ValueError, match=r"tuned\.json must be JSON, as `jaxdnn\.tune` writes it"):
        dnn.conv(X, W)


def test_command_measures_the_calls_of_a_script(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script, kept = tmp_path / "script.py", tmp_path / "kept.json"
    script.write_text(
        "import sys, jax.numpy as jnp, jaxdnn as dnn\n"
        "if __name__ == '__main__':\n"
        "    dnn.conv(jnp.ones((1, int(sys.argv[1]), 4, 2)), jnp.ones((3, 3, 2, 5)))\n"
    )
    assert main(["tune", "--path", str(kept), str(script), "9"]) == 0
    assert "conv(float32[1,9,4,2], float32[3,3,2,5])" in capsys.readouterr().out
    (ms,) = json.loads(kept.read_text())["cpu"][tuned.VERSIONS].values()
    assert set(ms) == {"xla", "other"}
    assert not file.exists()
