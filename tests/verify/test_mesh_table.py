"""The table of collectives: every op, every axis sharded in turn, forward and backward, on eight simulated devices."""

import concurrent.futures
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdnn as dnn
from jaxdnn.verify import cli, mesh


@pytest.mark.parametrize("trial", mesh.trials(), ids=lambda trial: trial.id)
def test_a_line_of_the_table(trial: mesh.Trial):
    outcome = mesh.run(trial)
    if outcome.status == "refused":
        assert trial.level != "fast"
        pytest.skip(outcome.message)
    assert outcome.status == "passed", f"{outcome.message}\njaxdnn verify --mesh --devices 8 --case {trial.id}"


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", ["scale", "op_tensor", "transform", "pool", "resample", "im2col", "pixel_shuffle"])
def test_narrow_floats_are_rounded_where_they_are(name: str, kind: str):
    """Their bits are taken in one dimension, which no mesh that shards a later axis has."""
    assert mesh.run(mesh.Trial(name, "H", kind, "fast", "bfloat16")).message == ""


@pytest.mark.parametrize(
    ("found", "needed", "fits"),
    [
        ("h2", "h4", True),
        ("+h2", "h2+", True),
        ("h4", "h2", False),
        ("+2", "+", False),
        ("-", "h", False),
        ("-", "-", True),
    ],
)
def test_collectives_are_counted(found: str, needed: str, fits: bool):
    assert mesh._as_needed(found, needed, movable=False) == fits


@pytest.mark.parametrize("name", ["im2col", "divisive_norm"])
def test_a_halo_is_exchanged_once(name: str):
    """Not once for each tap: two neighbours, whatever the window."""
    outcome = mesh.run(mesh.Trial(name, "H", "explicit", "fast", "float32"))
    assert (outcome.forward, outcome.status) == ("h2", "passed")


@pytest.mark.parametrize(("devices", "two_axes", "shared"), [(2, False, False), (4, True, False), (8, True, True)])
def test_a_line_needs_devices_that_communicate(
    devices: int, two_axes: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
):
    """Two devices along two axes leave one along the second, and groups of channels may lie in one device each."""
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    trials = mesh.trials()
    assert any("," in t.letter for t in trials) == two_axes
    assert any((t.row, t.letter) == ("group_norm-shared", "C") for t in trials) == shared


def found_of(call: Callable[..., Any], letter: str, monkeypatch: pytest.MonkeyPatch) -> mesh.Outcome:
    """Of a call in place of `scale`, which communicates nothing."""
    monkeypatch.setattr(dnn, "scale", lambda x, **_: call(x))
    mesh._computed.cache_clear()
    try:
        return mesh.run(mesh.Trial("scale", letter, "auto", "fast", "float32"))
    finally:
        mesh._computed.cache_clear()


def replicated(x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh.mesh_of("auto"), P()))


@pytest.mark.parametrize(
    ("call", "letter", "message"),
    [
        (lambda x: jnp.flip(x, 1), "H", "forward: communicates h, needs -"),
        (replicated, "C", "forward: communicates g, needs -"),
        (replicated, "N", "result 0 is sharded P"),
        (lambda x: x + len(traced.append(x) or traced), "W", "result 0 has other bits in 65536 of 65536"),
    ],
    ids=["neighbours", "gather", "sharding", "values"],
)
def test_planted_faults_are_found(call: Any, letter: str, message: str, monkeypatch: pytest.MonkeyPatch):
    outcome = found_of(call, letter, monkeypatch)
    assert outcome.status == "failed"
    assert message in outcome.message


traced: list[Any] = []  # a call that adds how often it was traced gives other values on the mesh


def test_statistics_of_each_device_alone_are_found(monkeypatch: pytest.MonkeyPatch):
    batch_norm = dnn.batch_norm
    monkeypatch.setattr(dnn, "batch_norm", lambda x, *, axis_name=None, **given: batch_norm(x, **given))
    outcome = mesh.run(mesh.Trial(mesh.STATISTICS, "N", "manual", "fast", "float32"))
    assert outcome.status == "failed"


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "found.json"
    words = ["verify", "--mesh", "--platform", "cpu", "--json", str(path), "--case"]
    assert cli.main([*words, "mesh/scale/H/auto/*"]) == 0
    document = json.loads(path.read_text())
    assert document["passed"]
    assert document["lines"][0]["found"] == {"H": "-/-"}
    assert "as needed" in capsys.readouterr().out
    monkeypatch.setattr(dnn, "scale", lambda x, **_: jnp.flip(x, 1))
    mesh._computed.cache_clear()
    assert cli.main([*words, "mesh/scale/H/auto/fast/*"]) == 1
    mesh._computed.cache_clear()
    assert "--mesh --case mesh/scale/H/auto/fast/float32" in capsys.readouterr().out
    assert json.loads(path.read_text())["failed"][0]["id"] == "mesh/scale/H/auto/fast/float32"
    assert cli.main([*words, "mesh/nothing/*"]) == 2


def test_threads_that_want_the_same_compute_it_once(monkeypatch: pytest.MonkeyPatch):
    scale, calls = dnn.scale, list[int]()
    monkeypatch.setattr(dnn, "scale", lambda x, **given: calls.append(0) or scale(x, **given))
    mesh._computed.cache_clear()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: mesh._alone("scale", "fast", "float32"), range(8)))
    mesh._computed.cache_clear()
    assert all(one is found[0] for one in found)
    assert len(calls) == 2  # traced forward, and for the gradient


def test_a_device_that_is_left_out_of_an_iterated_gradient_is_found():
    """The bound for steps that round to 16 bits is wide, and still far below what half of the sequences add."""
    row, alone = mesh.rows()["lstm_dgrad"], mesh._alone("lstm_dgrad", "fast", "bfloat16")
    half = [jnp.where(jnp.arange(v.shape[0]).reshape(-1, *[1] * (v.ndim - 1)) % 2 == 0, v, 0) for v in alone.cotangents]
    gradients = jax.jit(mesh._programs(row, "fast")[1])(*half, *alone.operands)
    assert mesh._error(np.asarray(gradients[3]), np.asarray(alone.gradients[3])) > 2 * mesh._bound(row, jnp.bfloat16)


@pytest.mark.parametrize(("platform", "needed"), [("cpu", ("h4", "+2")), ("cuda", ("-", "g"))])
def test_what_cpus_alone_communicate(platform: str, needed: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mesh.engines, "platform", lambda: platform)
    assert mesh._needed(("ch4", "c+2" if platform == "cpu" else "gc+2")) == needed
