"""`tune`: what it measures, the file that it keeps, and what that decides."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
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
from tests.texts import unfolded

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
    with tuned.ignored():
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
    decide(file, other=1.0, xla=2.0)
    (found,) = dnn.explain(dnn.conv, X, W)
    assert found.engine == "other"
    words = f"on this call other took 1.0000 ms, xla took 2.0000 ms, says {file}"
    told = unfolded(found)
    assert f"other: can serve; it comes first, because {words}" in told
    assert f"xla: can serve; unless it is named, another comes first, because {words}" in told
    with dnn.determinism("run_to_run"):
        assert dnn.explain(dnn.conv, X, W)[0].engine == "xla"
    assert dnn.explain(lambda x, w: dnn.conv(x, w, engine="xla"), X, W)[0].engine == "xla"
    assert dnn.explain(lambda x, w: dnn.conv(x, w, padding=1), X, W)[0].engine == "xla"  # another call
    decide(file, other=2.0, xla=1.0)
    assert dnn.explain(dnn.conv, X, W)[0].engine == "xla"
    decide(file, other=1.0, xla=2.0)
    with tuned.ignored():
        assert dnn.explain(dnn.conv, X, W)[0].engine == "xla"


@pytest.mark.parametrize(("xla", "engine"), [(1.049, "xla"), (1.051, "other")])
def test_a_gain_of_less_than_5_percent_decides_nothing(file: Path, xla: float, engine: str):
    decide(file, other=1.0, xla=xla)
    (found,) = dnn.explain(dnn.conv, X, W)
    assert found.engine == engine
    assert ("a gain of less than 5 % decides nothing" in unfolded(found)) == (engine == "xla")


def test_engines_that_are_not_here_decide_nothing(file: Path):
    decide(file, gone=1.0, other=2.0, xla=3.0)
    assert dnn.explain(dnn.conv, X, W)[0].engine == "other"
    decide(file, gone=1.0, other=3.0, xla=2.0)
    assert dnn.explain(dnn.conv, X, W)[0].engine == "xla"


def test_other_versions_decide_nothing(file: Path, monkeypatch: pytest.MonkeyPatch):
    decide(file, other=1.0, xla=2.0)
    assert dnn.explain(dnn.conv, X, W)[0].engine == "other"
    monkeypatch.setattr(tuned, "VERSIONS", "of another day")
    assert dnn.explain(dnn.conv, X, W)[0].engine == "xla"


def test_keys_are_alike_in_every_process():
    """No key has an address in it."""
    found = [tuned.key(call) for of_op in calls().values() for call in of_op]
    assert [key for key in found if " at 0x" in key or "<" in key] == []


BAD = ["nothing", "[]", '{"cpu": []}', json.dumps({"cpu": {tuned.VERSIONS: {"a call": {"xla": "fast"}}}}), b"\xff"]


@pytest.mark.parametrize("content", [None, "a folder", *BAD])
def test_a_file_that_the_variable_names_must_be_a_table(file: Path, content: str | bytes | None):
    put(file, content)
    with pytest.raises(
        ValueError, match=r"`JAXDNN_TUNED` must name a file that `jaxdnn\.tune` wrote, got .*tuned\.json"
    ):
        dnn.explain(dnn.conv, X, W)
    if content in BAD:  # what is there is not replaced by a table either
        with pytest.raises(ValueError, match=r"tuned\.json must be .*, as `jaxdnn\.tune` writes it"):
            dnn.tune(dnn.conv, X, W)


@pytest.mark.parametrize("content", [None, "a folder", *BAD])
def test_a_file_that_nobody_named_may_be_anything(
    file: Path, content: str | bytes | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(tuned.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.parent))
    put(tuned.path(), content)
    assert dnn.explain(dnn.conv, X, W)[0].engine == "xla"


@pytest.mark.parametrize("error", [PermissionError("not yours"), RuntimeError("no home")])
def test_without_a_folder_of_caches_nothing_was_measured(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def home() -> Path:
        raise error

    for variable in (tuned.VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", home)
    tuned._path.cache_clear()
    tuned._read.cache_clear()
    assert dnn.explain(dnn.conv, X, W)[0].engine == "xla"


def put(path: Path, content: str | bytes | None) -> None:
    """Makes a file of this content, or a folder, or nothing."""
    path.parent.mkdir(parents=True)
    if content == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_a_file_that_exists_keeps_its_mode_and_its_links(tmp_path: Path):
    mask = os.umask(0o027)
    try:
        new, link = tmp_path / "new.json", tmp_path / "link.json"
        link.symlink_to(new)
        tuned.keep(link, "cpu", {"a call": {"xla": 1.0}})
        assert stat.S_IMODE(new.stat().st_mode) == 0o640
        new.chmod(0o664)
        tuned.keep(link, "cpu", {"another": {"xla": 2.0}})
    finally:
        os.umask(mask)
    assert link.is_symlink()
    assert stat.S_IMODE(new.stat().st_mode) == 0o664
    assert json.loads(new.read_text()) == {"cpu": {tuned.VERSIONS: {"a call": {"xla": 1.0}, "another": {"xla": 2.0}}}}


def test_a_call_at_another_level_is_measured_at_level_fast(file: Path, monkeypatch: pytest.MonkeyPatch):
    levels = []
    (xla,) = (engine for engine in engines.registered("conv") if engine.name == "xla")
    run = lambda call, *operands: levels.append(call.spec.level) or xla.run(call, *operands)
    other = dataclasses.replace(xla, name="other", run=run)
    monkeypatch.setitem(engines._registry, "conv", [xla, other])
    with dnn.determinism("run_to_run"):
        found = dnn.tune(dnn.conv, X, W)
    assert len(found) == 1
    assert set(levels) == {"fast"}


@pytest.fixture
def fails_on_padding(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine raises for convolutions with padding."""
    of_name = {engine.name: engine for engine in engines.registered("conv")}

    def run(call: engines.Call, *operands: Any) -> Any:
        if call.spec.geo.padding != ((0, 0), (0, 0)):
            raise RuntimeError("no memory\nand more")
        return of_name["xla"].run(call, *operands)

    of_name["other"] = dataclasses.replace(of_name["other"], run=run)
    monkeypatch.setitem(engines._registry, "conv", list(of_name.values()))


@pytest.mark.usefixtures("fails_on_padding")
def test_a_call_that_fails_does_not_stop_the_others(file: Path, capsys: pytest.CaptureFixture[str]):
    found = dnn.tune(lambda x, w: (dnn.conv(x, w, padding=1), dnn.conv(x, w)), X, W)
    ((failed, error),) = found.failed.items()
    assert "RuntimeError: no memory" in capsys.readouterr().err
    assert str(error) == "no memory\nand more"
    assert f"{failed}\n    failed: RuntimeError: no memory\n" in str(found)
    assert failed not in found
    assert len(found) == 1
    assert json.loads(file.read_text())["cpu"][tuned.VERSIONS] == found


@pytest.mark.usefixtures("fails_on_padding")
def test_command_says_which_call_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kept = script(tmp_path, "dnn.conv(X, W, padding=1)", "dnn.conv(X, W)")
    assert main(["tune", "--path", str(kept), str(tmp_path / "script.py")]) == 1
    assert "RuntimeError: no memory" in capsys.readouterr().err
    assert len(json.loads(kept.read_text())["cpu"][tuned.VERSIONS]) == 1


def script(folder: Path, *lines: str) -> Path:
    """Writes a script with these lines and X and W as here; returns where what is measured may be kept."""
    jax.clear_caches()  # only what is compiled while the script runs is measured
    before = "import sys, jax, jax.numpy as jnp, jaxdnn as dnn", "X, W = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5))"
    (folder / "script.py").write_text("\n".join((*before, *lines)) + "\n")
    return folder / "kept.json"


@pytest.mark.parametrize("code", ["", "0", "None", "3", "'why'"])
def test_calls_are_measured_if_the_script_exits_well(file: Path, tmp_path: Path, code: str):
    kept, well = script(tmp_path, "dnn.conv(X, W)", f"sys.exit({code})"), code in ("", "0", "None")
    command = ["tune", "--path", str(kept), str(tmp_path / "script.py")]
    if well:
        assert main(command) == 0
    else:
        with pytest.raises(SystemExit):
            main(command)
    assert kept.exists() == well


def test_script_finds_its_neighbours(file: Path, tmp_path: Path):
    (tmp_path / "a_neighbour_of_the_script.py").write_text("N = 5\n")
    given = list(sys.path)
    kept = script(tmp_path, "from a_neighbour_of_the_script import N", f"assert sys.path[0] == {str(tmp_path)!r}")
    assert main(["tune", "--path", str(kept), str(tmp_path / "script.py")]) == 0
    assert sys.path == given


def test_script_starts_jax_itself(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        "import os, jax\n"
        "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=3'\n"
        "print('devices:', jax.device_count())\n"
    )
    command = "import sys; from jaxdnn.verify.cli import main; sys.exit(main())"
    given = [sys.executable, "-c", command, "tune", str(tmp_path / "script.py")]
    assert "devices: 3" in subprocess.run(given, capture_output=True, text=True, check=True).stdout


def test_command_makes_the_file_that_the_variable_names(file: Path, tmp_path: Path):
    script(tmp_path, "dnn.conv(X, W)")
    assert main(["tune", str(tmp_path / "script.py")]) == 0
    assert file.exists()


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
